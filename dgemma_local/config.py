"""config.json and generation_config.json as frozen dataclasses.

Nothing is taken from another library's defaults: those of transformers (hidden 2304, 8 heads) are not the released
model's. A key without a default below that is absent from the file is an error that names it.

Two spellings of the per-layer geometry are read: `global_head_dim` and `num_global_key_value_heads` for all full-attention
layers (the published files), and `per_layer_config`, a map from layer number to `head_dim` and `num_key_value_heads`
(what transformers 5.24 writes when it saves).

Source: the byte-exact published config.json and generation_config.json at revision f7f5b7f5.
"""

import json
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dgemma_local.errors import ConfigError

ARCHITECTURE = "diffusion_gemma"
DENOISING = ("sampler_config", "max_denoising_steps", "t_min", "t_max")  # keys that no autoregressive model has

Kind = Literal["sliding", "full"]
_KINDS: dict[str, Kind] = {"sliding_attention": "sliding", "full_attention": "full"}

_SHORT = reprlib.Repr()  # a value in an error: one line, whatever its length or depth
_SHORT.maxstring = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of one kind of layer."""

    theta: float
    rotating: float  # share of the dimension pairs that rotate: 1.0 "default", 0.25 "proportional" in the real model


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """What differs from layer to layer."""

    kind: Kind
    head_dim: int
    kv_heads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The geometry of one DiffusionGemma; the real one's values in comments."""

    vocab_size: int  # 262,144
    hidden_size: int  # 2,816
    intermediate_size: int  # 2,112, dense MLP
    self_conditioning_size: int  # 2,112; absent from the published file, then intermediate_size
    expert_size: int  # 704
    num_experts: int  # 128
    top_k: int  # 8
    heads: int  # 16 query heads, on every layer
    layers: tuple[LayerConfig, ...]  # 30: five sliding, one full, repeated; the last is full
    sliding_window: int  # 1,024 tokens, the query's own included
    rope: Mapping[Kind, RopeConfig]
    rms_eps: float  # 1e-6
    softcap: float  # 30.0
    canvas_length: int  # 256
    max_positions: int  # 262,144
    dtype: str | None  # "bfloat16"; None: as the tensors are stored


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """How a canvas is denoised and where an answer ends."""

    steps: int  # at most, per canvas
    t_min: float  # approached, never reached: the last step's temperature is t_min + (t_max - t_min) / steps
    t_max: float  # first step
    entropy_bound: float  # nats a step may accept, summed over all calmer positions
    confidence: float  # mean nats a position, strictly below which a stable canvas stops
    stability: int  # so many previous drafts must equal this one
    end_ids: tuple[int, ...]
    pad_id: int


class _Keys:
    """Reads one JSON object and remembers its name, so that an error can say which key of which file."""

    def __init__(self, file: str, values: Mapping[str, Any], where: str = "") -> None:
        self.file, self.values, self.where = file, values, where

    def fail(self, what: str) -> ConfigError:
        return ConfigError(f"{self.file}: {what}", "use the file that belongs to the checkpoint, unedited")

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def raw(self, key: str) -> Any:
        if key not in self:
            raise self.fail(f"the key '{self.where}{key}' is missing")
        return self.values[key]

    def integer(self, key: str, least: int = 1, most: int = 2**31 - 1) -> int:
        value = self.raw(key)
        if type(value) is not int or not least <= value <= most:
            raise self.fail(f"'{self.where}{key}' is {_SHORT.repr(value)}, not a whole number from {least} to {most}")
        return value

    def number(self, key: str, above: float = 0.0, inclusive: bool = False) -> float:
        value = self.raw(key)
        most = sys.float_info.max  # a whole number in JSON may be larger than any float
        good = type(value) in (int, float) and above <= value <= most and (inclusive or value > above)
        if not good:
            wanted = f"a number {'from' if inclusive else 'above'} {above:g}"
            raise self.fail(f"'{self.where}{key}' is {_SHORT.repr(value)}, not {wanted}")
        return float(value)

    def ids(self, key: str) -> tuple[int, ...]:
        value = self.raw(key)
        values = value if isinstance(value, list) else [value]
        if not values or not all(type(v) is int and v >= 0 for v in values):
            raise self.fail(f"'{self.where}{key}' is {_SHORT.repr(value)}, not a token id or a list of them")
        return tuple(values)

    def section(self, key: str) -> "_Keys":
        value = self.raw(key)
        if not isinstance(value, dict):
            raise self.fail(f"'{self.where}{key}' is {_SHORT.repr(value)}, not an object")
        return _Keys(self.file, value, f"{self.where}{key}.")


def _read(folder: Path, name: str) -> _Keys:
    path = folder / name
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no {name}", "give the folder that holds the whole checkpoint") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", "check the folder's permissions") from None
    except (ValueError, RecursionError) as error:  # of bytes, of JSON, and of an integer with too many digits
        raise ConfigError(f"{path} is not JSON: {error}", "fetch the file again") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not a JSON object", "fetch the file again")
    return _Keys(name, values)


def _rope(text: _Keys, kind: str) -> RopeConfig:
    rope = text.section("rope_parameters").section(kind)
    flavour = rope.raw("rope_type")
    _refuse(rope, "factor", 1.0)
    if flavour == "default":
        _refuse(rope, "partial_rotary_factor", 1.0)
        return RopeConfig(theta=rope.number("rope_theta"), rotating=1.0)
    if flavour == "proportional":
        rotating = rope.number("partial_rotary_factor")
        if rotating > 1.0:
            raise rope.fail(f"'{rope.where}partial_rotary_factor' is {rotating}, more than all")
        return RopeConfig(theta=rope.number("rope_theta"), rotating=rotating)
    raise rope.fail(f"'{rope.where}rope_type' is {_SHORT.repr(flavour)}; 'default' and 'proportional' are known")


def _layer(text: _Keys, index: int, kind: Kind) -> LayerConfig:
    """Geometry of one layer: its entry in per_layer_config, else the global_* keys for a full layer, else the plain keys."""
    own = text.section("per_layer_config") if "per_layer_config" in text else None
    # transformers numbers the layers with leading zeros from ten on
    name = None if own is None else next((key for key in own.values if _layer_number(key) == index), None)
    layer = None if own is None or name is None else own.section(name)
    if kind == "full" and own is None:
        head_dim, kv_heads = text.integer("global_head_dim"), text.integer("num_global_key_value_heads")
    else:
        head_dim = (layer if layer is not None and "head_dim" in layer else text).integer("head_dim")
        heads = layer if layer is not None and "num_key_value_heads" in layer else text
        kv_heads = heads.integer("num_key_value_heads")
    if head_dim % 2:
        raise text.fail(f"layer {index} has head_dim {head_dim}, which is odd: rotary embedding pairs dimensions")
    if text.integer("num_attention_heads") % kv_heads:
        raise text.fail(
            f"layer {index}: {kv_heads} key/value heads do not divide {text.raw('num_attention_heads')} heads"
        )
    return LayerConfig(kind=kind, head_dim=head_dim, kv_heads=kv_heads)


def _layer_number(key: str) -> int:
    """-1 for what is no number, or has too many digits to be a layer's."""
    return int(key) if key.isdecimal() and len(key) < 10 else -1


def _check_layer_names(text: _Keys, layers: int) -> None:
    """per_layer_config names layers that exist, each once."""
    if "per_layer_config" not in text:
        return
    own = text.section("per_layer_config")
    numbers = [_layer_number(key) for key in own.values]
    if len(set(numbers)) < len(numbers) or not all(0 <= number < layers for number in numbers):
        raise own.fail(f"'text_config.per_layer_config' names layers that are not 0 to {layers - 1}, each once")


def _refuse(text: _Keys, key: str, expected: object) -> None:
    """A key that changes the mathematics, with the one value that is implemented."""
    if key in text and text.raw(key) != expected:
        raise text.fail(f"'{text.where}{key}' is {_SHORT.repr(text.raw(key))}; only {expected!r} is implemented")


def load_model_config(folder: Path) -> ModelConfig:
    """`folder/config.json` -> ModelConfig. Raises ConfigError: absent, not JSON, another architecture, a key missing."""
    top = _read(folder, "config.json")
    if top.values.get("model_type") != ARCHITECTURE:
        raise ConfigError(
            f"config.json: the model type is {_SHORT.repr(top.values.get('model_type'))}, and dgemma runs only {ARCHITECTURE!r}",
            "give a DiffusionGemma checkpoint; `dgemma models` lists those that are known",
        )
    text = top.section("text_config")
    _refuse(text, "hidden_activation", "gelu_pytorch_tanh")
    _refuse(text, "attention_bias", False)
    _refuse(text, "use_bidirectional_attention", "vision")  # of images, which are not read yet
    _refuse(top, "tie_word_embeddings", True)
    kinds = text.raw("layer_types")
    if not isinstance(kinds, list) or any(not isinstance(kind, str) or kind not in _KINDS for kind in kinds):
        raise text.fail(f"'text_config.layer_types' holds something other than {', '.join(_KINDS)}")
    if len(kinds) != text.integer("num_hidden_layers", most=1024):
        raise text.fail(f"{len(kinds)} layer types for {text.raw('num_hidden_layers')} layers")
    if kinds[-1] != "full_attention":
        raise text.fail("the last layer is not full attention, as this architecture demands")
    _check_layer_names(text, len(kinds))
    experts = text.integer("num_experts", most=4096)
    dtype = top.values.get("dtype")
    if dtype is not None and not isinstance(dtype, str):
        raise top.fail(f"'dtype' is {_SHORT.repr(dtype)}, not a name")
    canvas_length, max_positions = top.integer("canvas_length"), text.integer("max_position_embeddings")
    if canvas_length >= max_positions:
        raise top.fail(f"'canvas_length' {canvas_length} leaves no room for a prompt in {max_positions} positions")
    return ModelConfig(
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        intermediate_size=text.integer("intermediate_size"),
        self_conditioning_size=text.integer(
            "self_conditioning_size" if "self_conditioning_size" in text else "intermediate_size"
        ),
        expert_size=text.integer("moe_intermediate_size"),
        num_experts=experts,
        top_k=text.integer("top_k_experts", most=experts),
        heads=text.integer("num_attention_heads"),
        layers=tuple(_layer(text, i, _KINDS[kind]) for i, kind in enumerate(kinds)),
        sliding_window=text.integer("sliding_window"),
        rope={_KINDS[kind]: _rope(text, kind) for kind in sorted(set(kinds))},
        rms_eps=text.number("rms_norm_eps"),
        softcap=text.number("final_logit_softcapping"),
        canvas_length=canvas_length,
        max_positions=max_positions,
        dtype=dtype,
    )


def load_generation_config(folder: Path, vocab_size: int | None = None) -> GenerationConfig:
    """`folder/generation_config.json` -> GenerationConfig. Its end ids count, not config.json's: they differ (50).

    vocab_size is the model's; None: the ids are not compared with it. Raises ConfigError as `load_model_config` does, on
    the file of an autoregressive model, and on an id that the vocabulary does not have.
    """
    keys = _read(folder, "generation_config.json")
    if not any(key in keys for key in DENOISING):
        raise ConfigError(
            f"generation_config.json is that of an autoregressive model: it has none of {', '.join(DENOISING)}",
            "use the one published with the DiffusionGemma checkpoint, which says how a canvas is denoised",
        )
    sampler = keys.section("sampler_config")
    name = sampler.raw("_cls_name")
    if name != "EntropyBoundSamplerConfig":
        raise sampler.fail(f"the sampler is {_SHORT.repr(name)}; only 'EntropyBoundSamplerConfig' is implemented")
    config = GenerationConfig(
        steps=keys.integer("max_denoising_steps", most=4096),
        t_min=keys.number("t_min", inclusive=True),
        t_max=keys.number("t_max"),
        entropy_bound=sampler.number("entropy_bound", inclusive=True),
        confidence=keys.number("confidence_threshold", inclusive=True),
        stability=keys.integer("stability_threshold", least=0, most=4096),
        end_ids=keys.ids("eos_token_id"),
        pad_id=keys.integer("pad_token_id", least=0),
    )
    for token in (*config.end_ids, config.pad_id):
        if vocab_size is not None and token >= vocab_size:
            raise keys.fail(f"the token id {_SHORT.repr(token)} is past the vocabulary, which ends at {vocab_size - 1}")
    if config.t_min > config.t_max:
        raise keys.fail(f"t_min {config.t_min} is above t_max {config.t_max}")
    return config
