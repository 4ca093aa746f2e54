"""From published tensors to parameters, by name: where each goes, and how each parameter is held.

    q_proj ┐                     gate_proj ┐                      experts.0.gate_proj ┐
    k_proj ├ rows of qkv_proj    up_proj   ┴ rows of gate_up_proj experts.0.up_proj   ┴ expert 0 of experts.gate_up_proj
    v_proj ┘                                                      everything else is a parameter of its own

A plan accounts for everything before a byte is read: each stored tensor has a place, is left out by a rule with a
reason, or is an error; each parameter is filled to its last row, or is an error. A tensor that is only skipped, or a
parameter that keeps what memory held, is a model that answers nonsense.

The published files store the text weights once, under `model.decoder`, and of the encoder only its layer scalars. A
second copy of a tied weight may stand beside them (`lm_head`, the encoder's): it is left out, and must be equal.

Source: tensor names of google/diffusiongemma-26B-A4B-it at revision f7f5b7f5, of RedHat's FP8-dynamic and NVFP4 and of
NVIDIA's NVFP4 checkpoint (tests/golden/tensors.json); ties as in transformers 5.24.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from dgemma_local.checkpoint import TensorInfo, families
from dgemma_local.config import ModelConfig
from dgemma_local.errors import CheckpointError
from dgemma_local.model import parameter_shapes
from dgemma_local.quant import Fp8, Nvfp4, Weight
from dgemma_local.schemes import Scheme, SchemeOf

STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}

DECODER, ENCODER = "model.decoder.", "model.encoder.language_model."
EMBEDDING = f"{DECODER}embed_tokens.weight"
_WITHOUT_SUFFIX = ("layer_scalar", "router.scale", "per_expert_scale")
_LEFT_OUT = {
    "model.encoder.vision_tower.": "images are not read yet",
    "model.encoder.embed_vision.": "images are not read yet",
}
_COMPONENTS = {
    ".experts.": "experts",
    ".self_attn.qkv_proj": "attention",
    ".self_attn.o_proj": "attention",
    ".mlp.": "dense MLP",
    "embed_tokens": "embedding",
    "self_conditioning.gate_up_proj": "self-conditioning",
    "self_conditioning.down_proj": "self-conditioning",
    ".router.proj": "router",
}
Field = Literal["", "codes", "scale", "packed", "global_scale", "input_scale"]


@dataclass(frozen=True, slots=True)
class Placement:
    """`tensor`, as published, is `start … stop - 1` along the first axis of a parameter's field, or of one expert's."""

    tensor: str
    parameter: str
    field: Field  # "": the parameter is a plain tensor, or becomes FP8 as it is read
    expert: int | None
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Held:
    """How one parameter lies in memory."""

    shape: tuple[int, ...]  # logical
    form: Literal["plain", "fp8", "nvfp4"] = "plain"
    dtype: torch.dtype = torch.bfloat16  # of a plain tensor, or of FP8's scales
    heights: tuple[int, ...] = ()  # of a matrix: rows of the parts that are fused in it
    divides: bool = True  # NVFP4's global scale: compressed-tensors' divides, ModelOpt's multiplies

    def empty(self, device: torch.device | str = "cpu") -> Weight:
        """Memory for it, not yet filled."""
        if self.form == "fp8":
            return Fp8.empty(self.shape, scale_dtype=self.dtype, device=device)
        if self.form == "nvfp4":
            return Nvfp4.empty(self.shape, heights=self.heights, divides=self.divides, device=device)
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of `empty`, which is not allocated for it."""
        return self.empty("meta").nbytes


@dataclass(frozen=True, slots=True)
class Options:
    """What may differ from the stored form. `dtype` None: as stored; where stored dtypes are mixed, config.json's."""

    dtype: torch.dtype | None = None
    fp8_attention: bool = False  # attention that is stored in 16 bits is held in FP8
    fp8_embedding: bool = False  # the same for the embedding, which is the head, too
    fp8_mlp: bool = False  # the dense MLP is held in FP8, whatever it is stored as: both products at the FP8 rate


@dataclass(frozen=True, slots=True)
class Plan:
    """Where every tensor goes. `placements`, `copies` and `ignored` share no tensor and leave none out."""

    placements: tuple[Placement, ...]
    copies: tuple[Placement, ...]  # tied duplicates of what stands there; compared, not loaded
    ignored: Mapping[str, str]  # tensor -> why it is left out
    held: Mapping[str, Held]  # parameter -> how
    staged: Mapping[str, Held] = field(default_factory=dict)  # how one is read first that is held in another form

    @property
    def resident(self) -> dict[tuple[str, str], int]:
        """Bytes in memory by component and dtype, such as ("experts", "nvfp4")."""
        sizes: dict[tuple[str, str], int] = {}
        for parameter, held in self.held.items():
            key = (component(parameter), _SHORT[held.dtype] if held.form == "plain" else held.form)
            sizes[key] = sizes.get(key, 0) + held.nbytes
        return sizes


def component(parameter: str) -> str:
    """What part of the model a parameter belongs to, for people."""
    return next((name for key, name in _COMPONENTS.items() if key in parameter), "norms and scalars")


def destination(weights: Mapping[str, Weight], place: Placement) -> Tensor:
    """The memory that `place` speaks of: a contiguous view."""
    weight = weights[place.parameter]
    whole: Tensor = getattr(weight, place.field) if place.field else weight  # type: ignore[assignment]
    return (whole if place.expert is None else whole[place.expert])[place.start : place.stop]


# ── what a model of this configuration stores ─────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Module:
    """One published weight: rows `row … row + shape[0] - 1` of a parameter, or of one of its experts."""

    name: str
    parameter: str
    shape: tuple[int, ...]
    row: int = 0
    part: int = 0  # which of the parameter's fused parts
    expert: int | None = None
    suffix: str = ".weight"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor that must be there."""

    place: Placement
    shapes: tuple[tuple[int, ...], ...]  # any of them
    dtypes: frozenset[str] = field(default_factory=lambda: frozenset(STORED))


def wanted(config: ModelConfig, schemes: Mapping[str, Scheme | None], fused: frozenset[str]) -> dict[str, Wanted]:
    """Every tensor by its published name. `schemes`: by parameter; `fused`: experts stored as one tensor a layer."""
    return {
        name: want
        for module in modules(config, fused)
        for name, want in _tensors(module, schemes.get(module.parameter))
    }


def modules(config: ModelConfig, fused: frozenset[str]) -> Iterator[_Module]:
    """Every published weight, parameter by parameter, each one's parts top to bottom."""
    for parameter, shape in parameter_shapes(config).items():
        name = DECODER + parameter
        block = name.rpartition(".")[0]
        if ".experts." in parameter and parameter in fused:
            yield _Module(name, parameter, shape, suffix="")
        elif ".experts." in parameter:
            parts = _parts(config, parameter, shape[1])
            for expert in range(shape[0]):
                yield from _stacked(f"{block}.{expert}", parameter, parts, shape[2:], expert)
        elif parameter.endswith(".encoder_layer_scalar"):
            stored = ENCODER + parameter.replace("encoder_layer_scalar", "layer_scalar")
            yield _Module(stored, parameter, shape, suffix="")
        elif name.endswith(_WITHOUT_SUFFIX):
            yield _Module(name, parameter, shape, suffix="")
        else:
            yield from _stacked(block, parameter, _parts(config, parameter, shape[0]), shape[1:], None)


def _stacked(
    block: str, parameter: str, parts: Mapping[str, int], rest: tuple[int, ...], expert: int | None
) -> Iterator[_Module]:
    row = 0
    for part, (leaf, rows) in enumerate(parts.items()):
        yield _Module(f"{block}.{leaf}", parameter, (rows, *rest), row, part, expert)
        row += rows


def _parts(config: ModelConfig, parameter: str, rows: int) -> dict[str, int]:
    """The published layers that are fused in a parameter of `rows` rows, top to bottom, with theirs."""
    leaf = parameter.rpartition(".")[2]
    if leaf == "qkv_proj":
        layer = config.layers[int(parameter.split(".")[1])]
        q, kv = config.heads * layer.head_dim, layer.kv_heads * layer.head_dim
        heights = {"q": q, "k": kv} if layer.kind == "full" else {"q": q, "k": kv, "v": kv}
        return {f"{letter}_proj": height for letter, height in heights.items()}
    if leaf == "gate_up_proj":
        return {f"{half}_proj": rows // 2 for half in ("gate", "up")}
    return {leaf: rows}


def _tensors(module: _Module, scheme: Scheme | None) -> Iterator[tuple[str, Wanted]]:
    """The tensors of one module in one scheme; the table of `schemes` in shapes and dtypes."""

    def at(where: Field, start: int, stop: int, suffix: str) -> Placement:
        return Placement(module.name + suffix, module.parameter, where, module.expert, start, stop)

    rows = (module.row, module.row + module.shape[0])
    part = (module.part, module.part + 1)
    if scheme is None:
        yield module.name + module.suffix, Wanted(at("", *rows, module.suffix), (module.shape,))
        return
    out, columns = module.shape
    scalar: tuple[tuple[int, ...], ...] = ((1,), ())  # published both ways
    one, e4m3, u8 = frozenset({"F32"}), frozenset({"F8_E4M3"}), frozenset({"U8"})
    table: dict[str, tuple[Field, tuple[int, int], tuple[tuple[int, ...], ...], frozenset[str]]]
    if scheme == "fp8":
        table = {
            ".weight": ("codes", rows, ((out, columns),), e4m3),
            ".weight_scale": ("scale", rows, ((out, 1),), frozenset({"BF16", "F32"})),
        }
    else:
        ours = scheme == "nvfp4"
        table = {
            ".weight_packed" if ours else ".weight": ("packed", rows, ((out, columns // 2),), u8),
            ".weight_scale": ("scale", rows, ((out, columns // 16),), e4m3),
            ".weight_global_scale" if ours else ".weight_scale_2": ("global_scale", part, scalar, one),
            ".input_global_scale" if ours else ".input_scale": ("input_scale", part, scalar, one),
        }
    for suffix, (where, (start, stop), shapes, dtypes) in table.items():
        yield module.name + suffix, Wanted(at(where, start, stop, suffix), shapes, dtypes)


# ── what this checkpoint stores, held against it ──────────────────────────────────────────────────────────────────


def plan(
    config: ModelConfig,
    tensors: Mapping[str, TensorInfo],
    scheme_of: SchemeOf = lambda module: None,
    options: Options | None = None,
) -> Plan:
    """Places every tensor, from the headers alone; `scheme_of` tells which linear layers are quantised.

    Raises CheckpointError naming, by pattern, every tensor without a place, parameter without a tensor, wrong shape and
    dtype; a parameter whose parts are quantised differently, a quantised router.
    """
    fused = frozenset(p for p in parameter_shapes(config) if ".experts." in p and _is_fused(p, tensors, scheme_of))
    schemes = _schemes(config, scheme_of, fused)
    wants = wanted(config, schemes, fused)
    faults: dict[str, list[str]] = {
        "tensors without a place in this model": [],
        "tensors of this model that are missing": [name for name in wants if name not in tensors],
        "tensors of another shape than config.json asks": [],
        "tensors of a dtype that does not belong there": [],
    }
    unknown, _, misshapen, mistyped = faults.values()
    placements: list[Placement] = []
    copies: list[Placement] = []
    ignored: dict[str, str] = {}
    for name, tensor in tensors.items():
        original = name if name in wants else tied_to(name)
        want = wants.get(original)
        reason = next((why for prefix, why in _LEFT_OUT.items() if name.startswith(prefix)), None)
        if want is None and reason is None:
            unknown.append(name)
        elif want is None:
            ignored[name] = reason or ""
        else:
            place = want.place
            if name != original:
                place = Placement(name, place.parameter, place.field, place.expert, place.start, place.stop)
            (placements if name == original else copies).append(place)
            if tensor.shape not in want.shapes:
                misshapen.append(f"{name} is {list(tensor.shape)}, not {list(want.shapes[0])}")
            elif tensor.dtype not in want.dtypes:
                mistyped.append(f"{name} is {tensor.dtype}")
    if any(faults.values()):
        raise CheckpointError(
            "; ".join(f"{fault} ({len(names)}): {families(names)}" for fault, names in faults.items() if names),
            "give the whole folder of one checkpoint: bf16, FP8-dynamic or NVFP4, as `dgemma models` lists them",
        )
    options = options or Options()
    held = _held(config, schemes, placements, tensors, options)
    staged = {
        parameter: form
        for parameter, form in held.items()
        if form.form == "nvfp4" and component(parameter) == "dense MLP" and options.fp8_mlp
    }
    in_fp8 = {parameter: Held(form.shape, "fp8", heights=form.heights) for parameter, form in staged.items()}
    return Plan(tuple(placements), tuple(copies), ignored, held | in_fp8, staged)


def tied_to(name: str) -> str:
    """The published name whose weight `name` repeats, if it repeats one."""
    if name == "lm_head.weight":
        return EMBEDDING
    return DECODER + name.removeprefix(ENCODER) if name.startswith(ENCODER) else name


def _is_fused(parameter: str, tensors: Mapping[str, TensorInfo], scheme_of: SchemeOf) -> bool:
    """Whether a layer's experts are one tensor: they are not where one is quantised, or stored alone."""
    block, _, leaf = (DECODER + parameter).rpartition(".")
    first = f"{block}.0.{'gate_proj' if leaf == 'gate_up_proj' else leaf}"
    return scheme_of(first) is None and f"{first}.weight" not in tensors


def _schemes(config: ModelConfig, scheme_of: SchemeOf, fused: frozenset[str]) -> dict[str, Scheme | None]:
    """By parameter: fused parts must agree."""
    found: dict[str, Scheme | None] = {}
    mixed: list[str] = []
    for module in modules(config, fused):
        is_linear = len(module.shape) == 2 and module.parameter != "embed_tokens"
        scheme = scheme_of(module.name) if is_linear else None
        if found.setdefault(module.parameter, scheme) != scheme:
            mixed.append(module.name)
        if scheme is not None and "router" in module.parameter:
            raise CheckpointError(
                f"the router is quantised ({module.name}), which is not read",
                "give a checkpoint whose quantization_config ignores the routers, as the published ones do",
            )
        if scheme in ("nvfp4", "modelopt") and module.shape[1] % 16:
            raise CheckpointError(
                f"{module.name} has {module.shape[1]} columns, which groups of 16 do not divide",
                "give the checkpoint that belongs to this config.json",
            )
    if mixed:
        raise CheckpointError(
            f"layers that share a matrix are quantised differently ({len(mixed)}): {families(mixed)}",
            "give a checkpoint that quantises q, k and v alike, gate and up alike, and all experts of a layer",
        )
    return found


def _held(
    config: ModelConfig,
    schemes: Mapping[str, Scheme | None],
    placements: list[Placement],
    tensors: Mapping[str, TensorInfo],
    options: Options,
) -> dict[str, Held]:
    stored: dict[tuple[str, Field], set[torch.dtype]] = {}
    for place in placements:
        if place.field in ("", "scale") and tensors[place.tensor].dtype in STORED:
            stored.setdefault((place.parameter, place.field), set()).add(STORED[tensors[place.tensor].dtype])
    plain = set().union(*(dtypes for (_, where), dtypes in stored.items() if where == ""))
    dtype = options.dtype or (plain.pop() if len(plain) == 1 else _named_dtype(config, tensors))
    held: dict[str, Held] = {}
    wishes = {"attention": options.fp8_attention, "embedding": options.fp8_embedding, "dense MLP": options.fp8_mlp}
    in_fp8 = {part for part, wish in wishes.items() if wish}
    for parameter, shape in parameter_shapes(config).items():
        scheme, part = schemes[parameter], component(parameter)
        heights = tuple(_parts(config, parameter, shape[-2]).values()) if len(shape) > 1 else ()
        if scheme == "fp8":
            # a row of scales in fp32 among rows in bf16 keeps what it says
            scales = stored[parameter, "scale"]
            held[parameter] = Held(shape, "fp8", torch.float32 if torch.float32 in scales else torch.bfloat16, heights)
        elif scheme is not None:
            held[parameter] = Held(shape, "nvfp4", heights=heights, divides=scheme == "nvfp4")
        elif part in in_fp8:
            held[parameter] = Held(shape, "fp8", heights=heights)
        else:
            held[parameter] = Held(shape, dtype=dtype, heights=heights)
    return held


def _named_dtype(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> torch.dtype:
    by_name = {str(dtype).removeprefix("torch."): dtype for dtype in STORED.values()}  # as config.json spells them
    return by_name.get(str(config.dtype)) or STORED[tensors[EMBEDDING].dtype]
