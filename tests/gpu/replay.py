"""Launches as production makes them, recorded on meta tensors, and run on this card with memory of their sizes.

    launches = record(step, gpu)          one denoising step of the 26B model, of a published checkpoint
    memory = Memory(launches)
    memory.run(launch)                    tensors are made when a launch first names them, and let go behind the last one

Launches that share a tensor share its memory, so that what a step's earlier launches made is what its later ones read.
What nobody made is filled by the argument's name and type, so that it can be read: ids within the vocabulary, a work
list of uniform routing, scales of a real matrix's size.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gpu import real

# isort: split
import steps
import torch
from dgemma_local.kernels import router
from dgemma_local.kernels._launch import ADA, Gpu, Launch, gpu_of, recording
from torch import Tensor

from dgemma_local import layout, ops, schemes
from dgemma_local.config import LayerConfig, ModelConfig, RopeConfig
from dgemma_local.model import parameter_shapes

ITEM = 32  # pairs of a work item, route's own
FORMATS: Mapping[str, schemes.Scheme] = {"float-quantized": "fp8", "nvfp4-pack-quantized": "nvfp4"}
SCALES = ("S", "SCALE", "W_SCALE", "X_SCALE", "XS", "HS")  # in E4M3: of groups of 16
DIVIDING = ("X_GLOBAL", "XG", "HG")


def this_card() -> Gpu:
    return ADA if real.REHEARSAL else gpu_of(torch.empty(0, device=real.DEVICE))


# ── recording ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Step:
    checkpoint: str
    light: bool
    wishes: str | None = None  # DGEMMA_OPS; None: as tests/steps.py has it

    @property
    def name(self) -> str:
        name = steps.name(self.checkpoint, self.light)
        return name if self.wishes is None else f"{name}, {self.wishes or 'without wishes'}"


def every_step(capability: tuple[int, int]) -> list[Step]:
    """What kernels/README.md predicts, and what can only be chosen between on a card."""
    found = [Step(checkpoint, light) for checkpoint in steps.CHECKPOINTS for light in (False, True)]
    found += [Step("redhat-nvfp4", True, wishes) for wishes in ("", "fast-head", "fast-head fp8-soft")]
    if capability >= (12, 0):
        found += [Step("redhat-nvfp4", False, "nvfp4-rows"), Step("redhat-nvfp4", True, "fp8-soft nvfp4-rows")]
    return found


def scheme_of(quantisation: Mapping[str, Any] | None) -> schemes.SchemeOf:
    """schemes.scheme_of for the published configurations, on a machine without compressed-tensors."""
    if quantisation is None or quantisation["quant_method"] != "compressed-tensors":
        return schemes.scheme_of(quantisation)
    scheme, ignored = FORMATS[quantisation["format"]], schemes._Names(quantisation["ignore"])
    return lambda module: None if module in ignored else scheme


steps.scheme_of = scheme_of  # type: ignore[attr-defined]


@contextmanager
def wishing(words: str | None) -> Iterator[None]:
    """Whatever the environment says."""
    plain = ops.wishes
    if words is not None:
        ops.wishes = lambda: frozenset(words.split())
    try:
        yield
    finally:
        ops.wishes = plain


def record(step: Step, gpu: Gpu) -> list[Launch]:
    steps.session.cache_clear()  # whose head reads the wishes once
    launches: list[Launch]
    with wishing(step.wishes), recording(gpu) as launches:
        steps.run(step.checkpoint, step.light)
    steps.session.cache_clear()
    return launches


def group_of(launch: Launch) -> str:
    """The same for launches that do the same work: code, sizes and cost, not the numbers that say where."""
    given = [
        (str(a.dtype), tuple(a.shape), a.stride()) if isinstance(a, Tensor) else None if a is None else type(a).__name__
        for a in launch.args
    ]
    constants = sorted((name, str(value)) for name, value in launch.constants.items())
    return repr((title_of(launch), launch.grid, given, constants, launch.warps, launch.stages, launch.cost))


def title_of(launch: Launch) -> str:
    """As cross.title_of, which needs a compiler's kernel."""
    file = launch.kernel.fn.__module__.rsplit(".", 1)[-1]
    return launch.name if launch.name.startswith(file) else f"{file}.{launch.name}"


def distinct(launches: Sequence[Launch]) -> dict[str, tuple[Launch, int]]:
    """By group: its first launch, and how many there are."""
    found: dict[str, tuple[Launch, int]] = {}
    for launch in launches:
        group = group_of(launch)
        first, count = found.get(group, (launch, 0))
        found[group] = first, count + 1
    return found


# ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────────


def named(launch: Launch) -> dict[str, Any]:
    return dict(zip(launch.kernel.arg_names, launch.args, strict=False))


class Memory:
    """Real tensors in the place of meta ones, one memory for each of theirs.

    Where views of several types lie one behind the other, as a canvas's state does, each is filled by its own name.
    """

    def __init__(self, launches: Sequence[Launch]) -> None:
        """`launches` are all that will be run, in this order."""
        self._held: dict[int, Tensor] = {}
        self._last = {_storage(t): launch for launch in launches for t in launch.args if isinstance(t, Tensor)}
        self._fields = _of_several_types(launches)
        self._filled: set[tuple[int, int]] = set()  # (storage, first byte) of such views

    def arguments(self, launch: Launch) -> dict[str, Any]:
        """By name, with this card's tensors."""
        return {
            name: self._real(launch, name, value) if isinstance(value, Tensor) else value
            for name, value in named(launch).items()
        }

    def run(self, launch: Launch, arguments: Mapping[str, Any] | None = None) -> None:
        arguments = self.arguments(launch) if arguments is None else arguments
        launch.kernel[launch.grid](
            *arguments.values(), **launch.constants, num_warps=launch.warps, num_stages=launch.stages
        )

    def forget(self, launch: Launch) -> None:
        """Let go of what no later launch names."""
        for storage in [s for s in self._held if self._last.get(s) is launch]:
            del self._held[storage]
            self._filled = {field for field in self._filled if field[0] != storage}

    def _real(self, launch: Launch, name: str, meta: Tensor) -> Tensor:
        storage = _storage(meta)
        if storage not in self._held:
            size = meta.untyped_storage().nbytes()
            self._held[storage] = (
                torch.zeros(size, dtype=torch.uint8, device=real.DEVICE)
                if storage in self._fields
                else fill(launch, name, meta, size // meta.element_size())
            )
        whole = self._held[storage]
        whole = whole if whole.dtype == meta.dtype else whole.view(meta.dtype)
        made = whole.as_strided(meta.shape, meta.stride(), meta.storage_offset())
        if storage in self._fields and (field := (storage, _first_byte(meta))) not in self._filled:
            self._filled.add(field)
            made.copy_(fill(launch, name, meta, meta.numel()).view(meta.shape))
        if name == "SPAN":  # the two kinds of layers see different ranges of one recorded context
            made.copy_(_span(launch))
        return made


def _storage(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)


def _first_byte(t: Tensor) -> int:
    return t.storage_offset() * t.element_size()


def _of_several_types(launches: Sequence[Launch]) -> set[int]:
    """Storages whose views differ in type, and begin at different places."""
    places: dict[int, set[tuple[int, torch.dtype]]] = {}
    for t in (t for launch in launches for t in launch.args if isinstance(t, Tensor)):
        places.setdefault(_storage(t), set()).add((_first_byte(t), t.dtype))
    return {
        storage for storage, found in places.items() if all(len(set(each)) > 1 for each in zip(*found, strict=True))
    }


def _span(launch: Launch) -> Tensor:
    window = launch.constants.get("WINDOW", 0)
    first = max(0, steps.CONTEXT - (window - 1)) if window else 0
    return torch.tensor([first, steps.CONTEXT, _rows(launch), 0], dtype=torch.int32)


def _rows(launch: Launch) -> int:
    return steps.config().canvas_length if "T" not in (n := named(launch)) else int(n["T"])


def fill(launch: Launch, name: str, meta: Tensor, size: int) -> Tensor:
    """`size` numbers for the whole memory of an argument, flat."""
    kind, device = meta.dtype, real.DEVICE
    if kind == torch.uint8:
        return torch.randint(0, 256, (size,), dtype=kind, device=device)
    if kind == torch.float8_e4m3fn:
        low, high = (0x30, 0x48) if name in SCALES else (0, 256)
        codes = torch.randint(low, high, (size,), dtype=torch.uint8, device=device)
        return (codes if name in SCALES else codes.bitwise_and_(0xBF)).view(kind)  # -1.875 … 1.875, no NaN
    if kind == torch.bool:
        return torch.zeros(size, dtype=kind, device=device)
    if not kind.is_floating_point:
        return _integers(launch, name, meta, size)
    return _floats(launch, name, meta, size)


def _integers(launch: Launch, name: str, meta: Tensor, size: int) -> Tensor:
    kind, device = meta.dtype, real.DEVICE
    if name in ("ITEMS", "ORDER") and "W" in named(launch):  # else the router is about to write them
        made = _work_list(launch)[name]
        assert made.numel() == size, f"{title_of(launch)}: {name} of {size}, {made.numel()} made"
        return made.flatten().to(kind).to(device)
    below = {"IDS": 0, "DRAFT": 0, "SAMPLED": 0, "CANVAS": 0, "HISTORY": 0, "KEY": 1 << 31}
    if name in below:
        top = below[name] or launch.constants.get("V", steps.config().vocab_size)
        return torch.randint(0, top, (size,), device=device).to(kind)
    if name == "CHOSEN":
        return torch.randint(0, launch.constants["E"], (size,), device=device).to(kind)
    return torch.full((size,), 3 if name == "STEP" else 0, dtype=kind, device=device)


def _work_list(launch: Launch) -> dict[str, Tensor]:
    """Of uniform routing, as router.route writes it."""
    given = named(launch)
    experts, pairs = given["W"].shape[0], given["ORDER"].numel()
    active = steps.config().top_k
    g = torch.Generator().manual_seed(0)
    chosen = torch.rand(pairs // active, experts, generator=g).argsort(-1)[:, :active]
    order, ends = router.group_twin(chosen, experts)
    return {"ORDER": order, "ITEMS": router.items_twin(ends, pairs, max(ITEM, launch.constants["BN"]))}


def _floats(launch: Launch, name: str, meta: Tensor, size: int) -> Tensor:
    kind, device, shape = meta.dtype, real.DEVICE, meta.shape
    if name in ("TEMPERATURE", "TEMPERATURES"):
        return torch.linspace(0.6, 0.4, size, device=device, dtype=kind)
    if name in DIVIDING:
        return torch.full((size,), 300.0, device=device, dtype=kind)
    if name in ("G", "GLOBAL", "W_GLOBAL"):  # what brings codes under SCALES to the size of a matrix's numbers
        return torch.full(
            (size,), 150.0 if launch.constants.get("DIVIDES", True) else 1 / 150, device=device, dtype=kind
        )
    if len(shape) > 1 and shape[-1] == 1:  # scales of rows
        return torch.rand(size, device=device, dtype=kind).add_(0.5).mul_(0.03)
    if name in ("PAIR", "TOTAL"):
        return torch.rand(size, device=device, dtype=kind).add_(0.01)
    made = torch.randn(size, device=device, dtype=kind)
    if len(shape) == 1:  # a norm's weights, a layer's scalar
        return made.mul_(0.1).add_(1.0)
    if name in ("W", "PROJ"):
        return made.mul_(shape[-1] ** -0.5)
    return made.mul_(0.03) if name == "E" else made


# ── the rehearsal's step: the same launches, of a model of a few thousand numbers ─────────────────────────────────


def _small_config() -> ModelConfig:
    s = real.TINY
    return ModelConfig(
        vocab_size=s.V, hidden_size=s.D, intermediate_size=s.dense, self_conditioning_size=s.dense,
        expert_size=s.F, num_experts=s.experts, top_k=s.active, heads=s.heads,
        layers=(
            LayerConfig(kind="sliding", kv_heads=s.sliding[0], head_dim=s.sliding[1]),
            LayerConfig(kind="full", kv_heads=s.full[0], head_dim=s.full[1]),
        ),
        sliding_window=s.window,
        rope={"sliding": RopeConfig(theta=1e4, rotating=1.0), "full": RopeConfig(theta=1e6, rotating=0.25)},
        rms_eps=real.EPS, softcap=real.SOFTCAP, canvas_length=s.canvas, max_positions=1024, dtype=None,
    )  # fmt: skip


def _small() -> None:
    """Every parameter of a small model in the form that its namesake of the real one has."""
    published, config = steps.held, _small_config()
    shapes = parameter_shapes(config)
    namesake = {f"layers.{i}.": f"layers.{j}." for i, j in enumerate((0, 5))}

    def held(checkpoint: str, light: bool) -> Mapping[str, layout.Held]:
        forms, found = published(checkpoint, light), {}
        for name, shape in shapes.items():
            real_name = next((name.replace(a, b) for a, b in namesake.items() if name.startswith(a)), name)
            form = forms[real_name]
            heights = tuple(layout._parts(config, name, shape[-2]).values()) if len(shape) > 1 else ()
            found[name] = layout.Held(shape, form.form, form.dtype, heights, form.divides)
        return found

    real_config = steps.config

    def small_held(checkpoint: str, light: bool) -> Mapping[str, layout.Held]:
        steps.config = real_config  # the published tensors are planned for the model they belong to
        try:
            return held(checkpoint, light)
        finally:
            steps.config = lambda: config  # type: ignore[assignment]

    steps.config, steps.held = (lambda: config), small_held  # type: ignore[assignment]
    steps.CONTEXT = 20


if real.REHEARSAL:
    _small()
