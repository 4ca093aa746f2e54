"""The launches that production makes, one configuration a line: every wrapper on meta tensors of the 26B model's sizes.

    for name, launch in launches(ADA): …                     what the compile suite compiles, and cross.py prints

A configuration is named file/what; its function calls the wrapper. `mma` is what the tensor cores must be given: the
mnemonic's first part by card, none for kernels that multiply no matrices.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import steps
import torch
import triton  # noqa: F401  before the kernels, which look whether somebody did
from dgemma_local.kernels._launch import ADA, BLACKWELL, HOPPER, Gpu, Launch, recording
from predicted import first_of
from torch import Tensor

from dgemma_local.quant import Fp8, Nvfp4

BF16, E4M3, FP32, INT32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int32

# DiffusionGemma 26B-A4B, its config.json
CANVAS, PREFILL = 256, 512
FIRST = 2 * CANVAS  # rows that join the cache and the canvas's, in one pass
D, DENSE, F, EXPERTS, ACTIVE, VOCABULARY = 2816, 2112, 704, 128, 8, 262_144
HEADS = 16
SLIDING, FULL = (8, 256), (2, 512)  # KV heads, head dim
WINDOW, EPS, SOFTCAP = 1024, 1e-6, 30.0
ITEM = 32  # pairs of a work item, route's own
CAPACITY = 8192 + CANVAS

EVERY = (ADA, HOPPER, BLACKWELL)


@dataclass(frozen=True, slots=True)
class Configuration:
    name: str
    call: Callable[[], object]
    mma: dict[Gpu, str]
    gpus: tuple[Gpu, ...]


CONFIGURATIONS: list[Configuration] = []


def configuration(
    name: str, mma: str | dict[Gpu, str] | None = None, gpus: Sequence[Gpu] = EVERY
) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Register the function below as `name`; `mma` for every card, or by card."""

    def register(call: Callable[[], object]) -> Callable[[], object]:
        wanted = {} if mma is None else dict.fromkeys(gpus, mma) if isinstance(mma, str) else mma
        CONFIGURATIONS.append(Configuration(name, call, wanted, tuple(gpus)))
        return call

    return register


def launches(gpu: Gpu, wanted: Sequence[str] = ()) -> Iterator[tuple[str, Launch]]:
    """(configuration, launch) of `gpu`, of all files or of the wanted ones."""
    for entry in CONFIGURATIONS:
        if gpu in entry.gpus and (not wanted or any(w in (entry.name.split("/")[0], entry.name) for w in wanted)):
            for launch in recorded(entry, gpu):
                yield entry.name, launch


def recorded(entry: Configuration, gpu: Gpu) -> list[Launch]:
    return _recorded(entry.name, gpu)


@cache
def _recorded(name: str, gpu: Gpu) -> list[Launch]:
    (entry,) = (e for e in CONFIGURATIONS if e.name == name)
    with recording(gpu) as made:
        entry.call()
    return made


# Operands


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def fp8(*shape: int, scale: torch.dtype = BF16) -> Fp8:
    return Fp8.empty(shape, scale, device="meta")


def fp8_rows(rows: int, width: int) -> Fp8:
    """Quantised activations."""
    return fp8(rows, width, scale=FP32)


def nvfp4(*shape: int, heights: tuple[int, ...] | None = None, divides: bool = True) -> Nvfp4:
    return Nvfp4.empty(shape, heights or (shape[-2],), divides, device="meta")


def span() -> Tensor:
    return meta(4, dtype=INT32)


def slabs(geometry: tuple[int, int], dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    kv_heads, width = geometry
    return meta(kv_heads, CAPACITY, width, dtype=dtype), meta(kv_heads, CAPACITY, width, dtype=dtype)


# norms


@configuration("norms/rms_norm")
def _() -> None:
    from dgemma_local.kernels.norms import rms_norm

    for quantise in (False, True):
        rms_norm(meta(CANVAS, D), meta(D), EPS, quantise)
    rms_norm(meta(CANVAS, D), None, EPS)


@configuration("norms/sandwich")
def _() -> None:
    from dgemma_local.kernels.norms import sandwich

    x, w = meta(CANVAS, D), meta(D)
    for quantise in (False, True):
        sandwich(x, x, w, (w, w), EPS, quantise)
    sandwich(x, x, w, (w,), EPS)


@configuration("norms/combine")
def _() -> None:
    from dgemma_local.kernels.norms import Pairs, combine

    x, w = meta(CANVAS, D), meta(D)
    for quantise in (False, True):
        combine(x, x, x, w, w, w, meta(1), EPS, w, quantise)
    combine(x, Pairs(meta(CANVAS * ACTIVE, D), meta(CANVAS, ACTIVE, dtype=FP32)), x, w, w, w, meta(1), EPS, w)
    x, pairs = meta(FIRST, D), Pairs(meta(FIRST * ACTIVE, D), meta(FIRST, ACTIVE, dtype=FP32))
    for quantise in (False, True):
        combine(x, pairs, x, w, w, w, meta(FIRST), EPS, w, quantise)


@configuration("embedding/embed")
def _() -> None:
    from dgemma_local.kernels.embedding import embed

    ids = meta(CANVAS, dtype=torch.int64)
    for table in (meta(VOCABULARY, D), fp8(VOCABULARY, D)):
        embed(ids, table, D**0.5, meta(CANVAS, D), EPS, True)
        embed(meta(PREFILL, dtype=torch.int64), table, D**0.5)


@configuration("heads/heads")
def _() -> None:
    from dgemma_local.kernels.heads import heads

    for (kv_heads, width), count in ((SLIDING, HEADS + 16), (FULL, HEADS + 2)):
        for kept in (BF16, E4M3):
            tables = meta(CANVAS, width), meta(CANVAS, width)
            k, v = slabs((kv_heads, width), kept)
            norms = meta(HEADS + kv_heads, width)
            heads(meta(CANVAS, count * width), norms, *tables, HEADS, kv_heads, EPS, k, v, span())


# attention

WARPGROUPS = {ADA: "HMMA", HOPPER: "HGMMA", BLACKWELL: "HMMA"}


def _attend(geometry: tuple[int, int], window: int | None, dtype: torch.dtype, rows: int = CANVAS) -> None:
    from dgemma_local.kernels.attention import attention

    attention(meta(rows, HEADS, geometry[1]), *slabs(geometry, dtype), span(), window)


@configuration("attention/sliding", WARPGROUPS)
def _() -> None:
    for dtype in (BF16, E4M3):
        _attend(SLIDING, WINDOW, dtype)
    _attend(SLIDING, WINDOW, BF16, PREFILL)


@configuration("attention/full", WARPGROUPS)
def _() -> None:
    for dtype in (BF16, E4M3):
        _attend(FULL, None, dtype)
    _attend(FULL, None, BF16, PREFILL)


# router


@configuration("router/route", "HMMA")
def _() -> None:
    from dgemma_local.kernels.router import route

    for rows in (CANVAS, PREFILL):
        route(meta(rows, D), meta(D), meta(EXPERTS, D), meta(EXPERTS), ACTIVE, EPS)


# dense matrices: [out, in], and whether a gate stands above an up. What else a pass of FIRST rows launches is the code of
# CANVAS rows, or of PREFILL ones.

MATRICES = {
    "sliding qkv": (HEADS * 256 + 2 * 8 * 256, D),
    "full qkv": (HEADS * 512 + 2 * 512, D),
    "sliding o": (D, HEADS * 256),
    "full o": (D, HEADS * 512),
    "gate_up": (2 * DENSE, D),
    "down": (D, DENSE),
}
GATED = ("gate_up",)


def _matrices(
    linear: Callable[..., object],
    gated: Callable[..., object],
    rows: Callable[..., object],
    weight: Callable[..., object],
    count: int = CANVAS,
) -> None:
    for name, (out, width) in MATRICES.items():
        (gated if name in GATED else linear)(rows(count, width), weight(out, width))


@configuration("bf16_linear/canvas", WARPGROUPS)
def _() -> None:
    from dgemma_local.kernels.bf16_linear import bf16_gated, bf16_linear

    _matrices(bf16_linear, bf16_gated, meta, meta)


@configuration("bf16_linear/first", WARPGROUPS)
def _() -> None:
    from dgemma_local.kernels.bf16_linear import bf16_gated, bf16_linear

    _matrices(bf16_linear, bf16_gated, meta, meta, FIRST)


FP8_MMA = {ADA: "QMMA", HOPPER: "QGMMA", BLACKWELL: "QMMA"}


@configuration("fp8_linear/canvas", FP8_MMA)
def _() -> None:
    from dgemma_local.kernels.fp8_linear import fp8_gated, fp8_linear

    _matrices(fp8_linear, fp8_gated, fp8_rows, fp8)


@configuration("fp8_linear/first", FP8_MMA)
def _() -> None:
    from dgemma_local.kernels.fp8_linear import fp8_gated, fp8_linear

    _matrices(fp8_linear, fp8_gated, fp8_rows, fp8, FIRST)


def _packed(out: int, width: int) -> Nvfp4:
    """As checkpoints fuse them: q, k and v, gate and up each have a global scale."""
    parts = {HEADS * 256 + 2 * 8 * 256: (HEADS * 256, 8 * 256, 8 * 256), 2 * DENSE: (DENSE, DENSE)}
    return nvfp4(out, width, heights=parts.get(out))


@configuration("nvfp4_linear/canvas", WARPGROUPS)
def _() -> None:
    from dgemma_local.kernels.nvfp4_linear import nvfp4_gated, nvfp4_linear

    _matrices(nvfp4_linear, nvfp4_gated, meta, _packed)


@configuration("nvfp4_linear/first", WARPGROUPS)
def _() -> None:
    from dgemma_local.kernels.nvfp4_linear import nvfp4_gated, nvfp4_linear

    _matrices(nvfp4_linear, nvfp4_gated, meta, _packed, FIRST)


@configuration("nvfp4_nvfp4_linear/canvas", "OMMA", gpus=(BLACKWELL,))
def _() -> None:
    from dgemma_local.kernels.nvfp4_nvfp4_linear import nvfp4_nvfp4_gated, nvfp4_nvfp4_linear

    _matrices(nvfp4_nvfp4_linear, nvfp4_nvfp4_gated, nvfp4, _packed)


@configuration("nvfp4_nvfp4_linear/first", "OMMA", gpus=(BLACKWELL,))
def _() -> None:
    from dgemma_local.kernels.nvfp4_nvfp4_linear import nvfp4_nvfp4_gated, nvfp4_nvfp4_linear

    _matrices(nvfp4_nvfp4_linear, nvfp4_nvfp4_gated, nvfp4, _packed, FIRST)


@configuration("rows/quantise")
def _() -> None:
    from dgemma_local.kernels.rows import quantise_rows, quantise_rows_nvfp4

    for rows, width in (
        (CANVAS, D),
        (CANVAS, HEADS * 256),
        (CANVAS, HEADS * 512),
        (CANVAS, DENSE),
        (CANVAS * ACTIVE, F),
    ):
        quantise_rows(meta(rows, width))
    quantise_rows_nvfp4(meta(CANVAS, D), meta(1, dtype=FP32))


# experts


def _routing() -> object:
    from dgemma_local.kernels.router import Routing, items_at_most

    pairs = CANVAS * ACTIVE
    items = meta(items_at_most(pairs, EXPERTS, ITEM), 3, dtype=INT32)
    chosen, order, ends = (meta(*shape, dtype=INT32) for shape in ((CANVAS, ACTIVE), (pairs,), (EXPERTS,)))
    return Routing(meta(CANVAS, ACTIVE, dtype=FP32), chosen, order, ends, items, ITEM)


def _experts(x: object, weight: Callable[..., object]) -> None:
    from dgemma_local.kernels.experts import experts

    experts(x, _routing(), weight(EXPERTS, 2 * F, D), weight(EXPERTS, D, F))


def _packed_experts(*shape: int, divides: bool = True) -> Nvfp4:
    return nvfp4(*shape, heights=(F, F) if shape[-2] == 2 * F else None, divides=divides)


@configuration("experts/bf16", WARPGROUPS)
def _() -> None:
    _experts(meta(CANVAS, D), meta)


@configuration("experts/fp8", FP8_MMA)
def _() -> None:
    _experts(fp8_rows(CANVAS, D), fp8)


@configuration("experts/nvfp4", WARPGROUPS)
def _() -> None:
    for divides in (True, False):
        _experts(meta(CANVAS, D), lambda *shape, d=divides: _packed_experts(*shape, divides=d))


@configuration("experts/nvfp4 rows", "OMMA", gpus=(BLACKWELL,))
def _() -> None:
    _experts(nvfp4(CANVAS, D), _packed_experts)


# canvas


@configuration("canvas/update")
def _() -> None:
    from dgemma_local.kernels.canvas import State, update

    state = State.new(CANVAS, 1, meta(16, dtype=FP32))
    ids = meta(CANVAS, dtype=torch.int64)
    update(state, ids, ids, meta(CANVAS, dtype=FP32), VOCABULARY, 0.1, 0.005)


# the vocabulary: logits, draw, soft embedding


def _vocabulary(hidden: Tensor | Fp8, embedding: Tensor | Fp8, reference: bool, across: bool = False) -> None:
    from dgemma_local.kernels._philox import Key
    from dgemma_local.kernels.soft_fp8 import Across
    from dgemma_local.kernels.vocabulary import vocabulary_step

    key = Key(meta(3, dtype=INT32), meta(1, dtype=INT32))
    codes = Across(meta(D, VOCABULARY, dtype=E4M3), meta(VOCABULARY), meta(1, dtype=FP32)) if across else None
    vocabulary_step(hidden, embedding, SOFTCAP, meta(1, dtype=FP32), 53.0, key, reference, across=codes)


@configuration("vocabulary/reference", WARPGROUPS)
def _() -> None:
    _vocabulary(meta(CANVAS, D), meta(VOCABULARY, D), True)
    _vocabulary(meta(CANVAS, D), fp8(VOCABULARY, D), True)


@configuration("vocabulary/fast", WARPGROUPS)
def _() -> None:
    _vocabulary(meta(CANVAS, D), meta(VOCABULARY, D), False)


@configuration("vocabulary/fast fp8", FP8_MMA)
def _() -> None:
    _vocabulary(fp8_rows(CANVAS, D), fp8(VOCABULARY, D), False)


@configuration("vocabulary/fp8 across", FP8_MMA)
def _() -> None:
    for reference in (True, False):
        _vocabulary(fp8_rows(CANVAS, D), fp8(VOCABULARY, D), reference, across=True)


# whole steps, and a canvas's first passes: what production launches, whatever the lines above forgot

for _checkpoint in steps.CHECKPOINTS:
    for _light in (False, True):
        configuration(steps.name(_checkpoint, _light))(partial(steps.run, _checkpoint, _light))
        configuration(first_of(steps.name(_checkpoint, _light)))(partial(steps.run_first, _checkpoint, _light))
