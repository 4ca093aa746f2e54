"""Which modules a checkpoint quantises and how, from config.json's `quantization_config`.

    quant_method         scheme    tensors of one linear layer                                            read with
    compressed-tensors   fp8       weight, weight_scale [out, 1]                                          its own classes
    compressed-tensors   nvfp4     weight_packed, weight_scale, weight_global_scale, input_global_scale   its own classes
    modelopt             modelopt  weight, weight_scale, weight_scale_2, input_scale                      here: a few keys

A scheme that is not in this table is refused by name, before a tensor is read. compressed-tensors brings transformers
along and takes seconds to import, so it is imported when such a checkpoint is opened, and nowhere else.

Source: compressed-tensors 0.20 QuantizationConfig; ModelOpt's hf_quant_config as NVIDIA's config.json carries it.
"""

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from dgemma_local.errors import CheckpointError, ConfigError

Scheme = Literal["fp8", "nvfp4", "modelopt"]
SchemeOf = Callable[[str], Scheme | None]  # a module's name, as published -> how it is quantised; None: not at all

_READ = "give a checkpoint in bf16, FP8 (compressed-tensors, dynamic) or NVFP4 (compressed-tensors or ModelOpt)"
_UNEDITED = "use the file that belongs to the checkpoint, unedited"
_GROUP = 16


def scheme_of(quantisation: Mapping[str, Any] | None) -> SchemeOf:
    """`quantization_config`, or None -> the scheme of every linear layer by its module name.

    Raises CheckpointError: a method or a scheme that is not read, by name; ConfigError: a configuration that its own
    library refuses.
    """
    if not quantisation:
        return lambda module: None
    method = quantisation.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors(quantisation)
    if method == "modelopt":
        return _modelopt(quantisation)
    raise CheckpointError(f"the weights are quantised by {_named(method)}, which is not read", _READ)


def quantization_config(scheme: Scheme, ignored: Iterable[str]) -> dict[str, Any]:
    """What config.json of a checkpoint in RedHat's layouts says; `ignored` are the linear layers left as they are."""
    if scheme == "modelopt":
        raise ValueError("ModelOpt's layout is read, not written")
    weights: dict[str, Any] = {"num_bits": 8, "strategy": "channel", "observer": "memoryless_minmax"}
    activations: dict[str, Any] = {"num_bits": 8, "strategy": "token", "dynamic": True}
    if scheme == "nvfp4":
        weights = {"num_bits": 4, "strategy": "tensor_group", "group_size": _GROUP}
        activations = {"num_bits": 4, "strategy": "tensor_group", "group_size": _GROUP, "dynamic": "local"}
    layout = {"fp8": "float-quantized", "nvfp4": "nvfp4-pack-quantized"}[scheme]
    both = {"type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": both | {"dynamic": False} | weights,
        "input_activations": both | activations,
        "format": layout,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(ignored),
        "kv_cache_scheme": None,
    }


# ── compressed-tensors ────────────────────────────────────────────────────────────────────────────────────────────


def _compressed_tensors(quantisation: Mapping[str, Any]) -> SchemeOf:
    from compressed_tensors.quantization import QuantizationConfig
    from pydantic import ValidationError

    for key in ("sparsity_config", "transform_config"):
        if quantisation.get(key):
            raise CheckpointError(f"the weights are stored with a {key}, which is not read", _READ)
    try:
        config = QuantizationConfig.model_validate(dict(quantisation))
    except (ValidationError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"config.json: compressed-tensors refuses its quantization_config: {_reason(error)}", _UNEDITED
        ) from None
    if config.quantization_status.value != "compressed":
        raise CheckpointError(
            f"the quantised weights are {config.quantization_status.value!r}, not 'compressed', and only those are read",
            _READ,
        )
    groups: list[tuple[_Names, Scheme]] = []
    for group in config.config_groups.values():
        scheme = _scheme(group, config.format)
        groups.append((_Names(group.targets), scheme))
    ignored = _Names(config.ignore or ())

    def of(module: str) -> Scheme | None:
        if module in ignored:
            return None
        return next((scheme for names, scheme in groups if module in names), None)

    return of


def _reason(error: Exception) -> str:
    """One line: of pydantic's first complaint the keys that lead there, and what is wrong with them."""
    complaints: list[dict[str, Any]] = getattr(error, "errors", list)()
    if not complaints:
        return " ".join(str(error).split())
    keys = ".".join(str(key) for key in complaints[0]["loc"] if str(key).isidentifier() or isinstance(key, int))
    return f"{keys}: {complaints[0]['msg']}"


def _scheme(group: Any, config_format: str) -> Scheme:
    """A QuantizationScheme -> ours. Raises CheckpointError naming what it asks."""
    weights, activations = group.weights, group.input_activations
    layout = getattr(group, "format", None) or config_format
    if weights is None:
        raise CheckpointError(f"a group of layers has no quantised weights ({layout})", _READ)
    strategy = getattr(weights.strategy, "value", weights.strategy)
    facts = (layout, weights.num_bits, weights.type, strategy, bool(weights.symmetric))
    if facts == ("float-quantized", 8, "float", "channel", True):
        if activations is None or activations.dynamic is True:
            return "fp8"
    elif facts == ("nvfp4-pack-quantized", 4, "float", "tensor_group", True) and weights.group_size == _GROUP:
        return "nvfp4"
    symmetry = "" if weights.symmetric else ", asymmetric"
    group_size = f" of {weights.group_size}" if weights.group_size else ""
    static = ", static activations" if activations is not None and activations.dynamic is False else ""
    raise CheckpointError(
        f"the weights are {weights.num_bits}-bit {weights.type} by {strategy}{group_size}{symmetry}{static} ({layout}), "
        "which is not read",
        _READ,
    )


class _Names:
    """Module names as compressed-tensors lists them: exact, `re:` a pattern from the start, or the class Linear.

    Lists name modules with or without `model.` in front.
    """

    def __init__(self, listed: Iterable[str]) -> None:
        listed = list(listed)
        self.all = "Linear" in listed
        self.exact = {name.removeprefix("model.") for name in listed}
        try:
            self.patterns = [re.compile(name.removeprefix("re:")) for name in listed if name.startswith("re:")]
        except re.error as error:
            raise ConfigError(
                f"config.json: {error.pattern!r} in its quantization_config is not a pattern: {error}", _UNEDITED
            ) from None

    def __contains__(self, module: str) -> bool:
        short = module.removeprefix("model.")
        return self.all or short in self.exact or any(p.match(module) or p.match(short) for p in self.patterns)


# ── ModelOpt ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _modelopt(quantisation: Mapping[str, Any]) -> SchemeOf:
    algorithm = quantisation.get("quant_algo")
    if algorithm is None:
        raise ConfigError("config.json: its quantization_config of modelopt names no 'quant_algo'", _UNEDITED)
    if algorithm != "NVFP4":
        raise CheckpointError(f"the weights are quantised by modelopt {_named(algorithm)}, which is not read", _READ)
    groups = quantisation.get("config_groups")
    sizes = {
        str(group["weights"]["group_size"])
        for group in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(group, dict) and isinstance(group.get("weights"), dict) and "group_size" in group["weights"]
    } | ({str(quantisation["group_size"])} if "group_size" in quantisation else set())
    if other := sorted(sizes - {str(_GROUP)}):
        raise CheckpointError(f"the weights are NVFP4 in groups of {other[0]}, not {_GROUP}", _READ)
    ignore = quantisation.get("ignore", quantisation.get("exclude_modules", []))
    if not isinstance(ignore, list) or not all(isinstance(name, str) for name in ignore):
        raise ConfigError("config.json: 'ignore' in its quantization_config is not a list of names", _UNEDITED)

    def of(module: str) -> Scheme | None:
        names = (module, module.removeprefix("model."))
        return None if any(fnmatch.fnmatchcase(name, glob) for name in names for glob in ignore) else "modelopt"

    return of


def _named(value: object) -> str:
    return repr(value)[:80] if isinstance(value, str) else "a method without a name"
