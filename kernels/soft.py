"""What the next step is conditioned on: probabilities times embedding, the second product of a step's end.

    soft[t] = s · Σ_v p[t, v] · E[v]            p = softmax z

    reference   p = e^(z̃ - max z̃) / Σ e^(z̃ - max z̃) of the rounded z̃, rounded: written over raw (`probabilities`)
                soft = round(round(Σ p·E) · s)
    fast        p̃ = e^(z - centre), rounded, chunk by chunk behind the logits (`draw`), while the chunk's E is in the L2;
                parts ← parts · e^(centre before - centre) + Σ p̃·E,     soft = round(Σ parts / Z · s)

Shapes    p [T, ids], E [V, D], ids begin … end-1 of it; parts fp32 [splits, T, D]; soft [T, D].
Precision fp32 sums, in the order of ids within a split and of splits then: the same bits at every run. An FP8
          embedding's codes are widened exactly; the scale of a row multiplies p before p is rounded (in the reference mode
          the rounded p, so that there p is rounded twice and E not: model.soften decodes and rounds E).
Traffic   E once, p once, the parts out (by chunks: out and in, through the L2). `probabilities` reads and writes 2·T·V
          bytes each; p made on the way into the product instead would be made anew for every 128 columns, 22 times.
Grid      (row tiles × column tiles, splits): 256 × 2,816 in tiles of 128 are 44, so the vocabulary is split to fill the
          card. FP8 codes lie along D, across what the product sums over: lanes pick single bytes and widen them, 8
          instructions an mma on sm_89 and sm_120, whose bf16 mma takes 32 cycles. `soft_fp8` turns them once instead.
Source    transformers 5.24 modeling_diffusion_gemma.py: the self-conditioning signal.
"""

import torch
from torch import Tensor

from dgemma_local.quant import Fp8

from ._launch import ADA, BLACKWELL, HOPPER, Cost, Gpu, Tile, Tiles, choose, gpu_of, launch
from ._out import target
from ._triton import tl, triton
from .draw import Parts, scaled

Rows = Tensor | Fp8
TWIN_IDS = 8192  # that the twin widens at once

# Hopper's wgmma wants wide tiles (see logits.TILES); elsewhere 256 columns spill.
_TILES: Tiles = {
    ADA.capability: Tile(128, 128, 64, 8, 3),
    HOPPER.capability: Tile(128, 256, 64, 8, 4),
    BLACKWELL.capability: Tile(128, 128, 64, 8, 3),
}
TILES: dict[str, Tiles] = {"bf16": _TILES, "widened": {**_TILES, HOPPER.capability: Tile(256, 128, 64, 8, 4)}}
ELEMENTWISE = Tile(4, 1024, 1, 4, 1)  # of `probabilities`
COMBINED = Tile(4, 256, 1, 4, 1)
MOST_SPLITS = 24
_LOG2E = tl.constexpr(1.4426950408889634)


# ── twins ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def soft_twin(z: Tensor, E: Rows, scale: float, dtype: torch.dtype, reference: bool) -> Tensor:
    """z [T, V] in fp32 or wider -> [T, D] of `dtype`. Reference: as model.soften, but for when an FP8 scale multiplies."""
    wide = torch.promote_types(dtype, torch.float32)
    total = torch.ones((), dtype=wide, device=z.device)
    if reference:
        p = z.to(dtype).softmax(-1, dtype=wide).to(dtype)
    else:
        p = (z - z.amax(-1, keepdim=True)).exp()
        total = p.sum(-1, keepdim=True)
    if isinstance(E, Tensor) and reference:
        return (p @ E) * scale
    if isinstance(E, Fp8):
        p = p * E.scale.to(wide).mT
    soft = torch.zeros(len(z), E.shape[1], dtype=wide, device=z.device)
    for ids in range(0, len(z.mT), TWIN_IDS):
        part = E[ids : ids + TWIN_IDS] if isinstance(E, Tensor) else E.codes[ids : ids + TWIN_IDS]
        soft += p[:, ids : ids + TWIN_IDS].to(dtype).to(wide) @ part.to(wide)
    return soft.to(dtype) * scale if reference else (soft / total * scale).to(dtype)


# ── kernels ───────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit(do_not_specialize=["chunk"])
def _soft(
    P,
    E,
    PART,
    CENTRE,
    rows,
    begin,
    ids,
    split_ids,
    chunk,
    chunks,
    p_stride,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
):
    columns: tl.constexpr = (D + BN - 1) // BN
    split = tl.program_id(1)
    base = tl.program_id(0) // columns * BM
    row = tl.minimum(tl.arange(0, BM), rows - 1 - base)  # past the end the last row, again and again
    column = tl.program_id(0) % columns * BN + tl.arange(0, BN)
    live = (base + tl.arange(0, BM) < rows)[:, None] & (column < D)[None, :]
    k = tl.arange(0, BK)
    first = split * split_ids
    last = tl.minimum(first + split_ids, ids)
    p_at = P + base.to(tl.int64) * p_stride + first + row[:, None] * p_stride + k[None, :]
    e_at = (
        E
        + (begin + first).to(tl.int64) * D
        + k[:, None] * D
        + (tl.minimum(column, D - 1) if D % BN else column)[None, :]
    )
    part_at = PART + (split.to(tl.int64) * rows + base) * D + row[:, None] * D + column[None, :]

    total = tl.zeros((BM, BN), tl.float32)
    if chunk > 0:
        centre_at = CENTRE + (base + row) * chunks + chunk
        shrink = tl.exp2((tl.load(centre_at - 1) - tl.load(centre_at)) * _LOG2E)
        total = tl.load(part_at, live, other=0.0) * shrink[:, None]
    for _ in range(first, last, BK):
        if EVEN:
            p = tl.load(p_at)
            e = tl.load(e_at)
        else:
            p = tl.load(p_at, (first + k < last)[None, :], other=0.0)
            e = tl.load(e_at, (first + k < last)[:, None], other=0.0)
            first += BK
        total = tl.dot(p, e.to(P.dtype.element_ty), total, input_precision="ieee")
        p_at += BK
        e_at += BK * D
    tl.store(part_at, total, live)


@triton.jit
def _probabilities(
    RAW,
    CENTRE,
    TOTAL,
    TEMPERATURE,
    E_SCALE,
    rows,
    ids,
    stride,
    SOFTCAP: tl.constexpr,
    E_SCALED: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    live = (row < rows)[:, None]
    row = tl.minimum(row, rows - 1)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    at = RAW + row.to(tl.int64)[:, None] * stride + column[None, :]
    inside = live if EVEN else live & (column < ids)[None, :]
    z = scaled(tl.load(at, inside, other=0.0), tl.div_rn(1.0, tl.load(TEMPERATURE)), SOFTCAP)
    centre = tl.load(CENTRE + row).to(RAW.dtype.element_ty).to(tl.float32)  # the largest of the rounded z
    share = 1.0 / tl.load(TOTAL + row)
    apart = z.to(RAW.dtype.element_ty).to(tl.float32) - centre[:, None]
    p = (tl.exp2(apart * _LOG2E) * share[:, None]).to(RAW.dtype.element_ty)
    if E_SCALED:
        scale = tl.load(E_SCALE + column, column < ids, other=0.0).to(tl.float32)
        p = (p.to(tl.float32) * scale[None, :]).to(RAW.dtype.element_ty)
    tl.store(at, p, inside)


@triton.jit
def _combine(
    PART,
    TOTAL,
    UNIT,
    OUT,
    rows,
    splits,
    scale,
    D: tl.constexpr,
    REFERENCE: tl.constexpr,
    IN_UNITS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    live = (row < rows)[:, None] & (column < D)[None, :]
    row = tl.minimum(row, rows - 1)
    at = row[:, None] * D + column[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    part_at = PART + at
    for _ in range(splits):
        total += tl.load(part_at, live, other=0.0)
        part_at += rows * D
    if REFERENCE:
        soft = total.to(OUT.dtype.element_ty).to(tl.float32) * scale
    else:
        if IN_UNITS:
            scale *= tl.load(UNIT)
        soft = total * (scale / tl.load(TOTAL + row))[:, None]
    tl.store(OUT + at, soft.to(OUT.dtype.element_ty), live)


# ── wrappers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def tile_for(p: Tensor, E: Rows) -> Tile:
    return choose(TILES["widened" if isinstance(E, Fp8) else "bf16"], gpu_of(p))


def splits_for(gpu: Gpu, programs: int, ids: int, step: int, cost: float) -> int:
    """Splits that leave the fewest processors idle in the last wave, where each one costs this share of the time.

    `programs` are a split's, `step` the ids that a program takes at a time.
    """

    def share(splits: int) -> float:
        waves = -(-programs * splits // gpu.processors)
        return programs * splits / (waves * gpu.processors) - cost * splits

    return max(range(1, min(MOST_SPLITS, -(-ids // step)) + 1), key=share)


def probabilities(
    raw: Tensor, ids: int, softcap: float, temperature: Tensor, parts: Parts, total: Tensor, scale: Tensor | None
) -> None:
    """raw [T, ≥ ids] becomes the rounded softmax of the rounded z; with an FP8 embedding's `scale` times it, rounded again."""
    T, t = raw.shape[0], ELEMENTWISE
    if parts.centre.shape != (T, 1) or total.shape != (T,) or raw.shape[1] < ids:
        raise ValueError(
            f"probabilities: raw {tuple(raw.shape)}, {ids} ids, centre {tuple(parts.centre.shape)}, "
            f"total {tuple(total.shape)}"
        )
    launch(
        _probabilities, (-(-T // t.m), -(-ids // t.n)), raw, parts.centre, total, temperature,
        total if scale is None else scale, T, ids, raw.stride(0),
        cost=lambda: Cost(2 * T * ids * raw.element_size(), 24 * T * ids),
        warps=t.warps, stages=t.stages, SOFTCAP=softcap, E_SCALED=scale is not None, EVEN=ids % t.n == 0, BM=t.m, BN=t.n,
    )  # fmt: skip


def weigh(
    p: Tensor,
    E: Rows,
    sums: Tensor,
    centre: Tensor,
    begin: int,
    end: int,
    chunk: int,
    resident: bool = False,
    tile: Tile | None = None,
) -> None:
    """p [T, ≥ end - begin] of ids begin … end-1 times their rows of E -> sums [splits, T, D], to which chunks > 0 add.

    `resident`: p, E's rows and the sums are in the L2, and cost no memory traffic.
    """
    tile = tile or tile_for(p, E)
    T, D, ids = p.shape[0], E.shape[1], end - begin
    codes = E.codes if isinstance(E, Fp8) else E
    splits = sums.shape[0]
    if (
        sums.shape[1:] != (T, D)
        or not 0 < ids <= p.shape[1]
        or centre.shape[0] != T
        or not 0 <= begin < end <= E.shape[0]
    ):
        raise ValueError(
            f"weigh: p {tuple(p.shape)}, E {tuple(E.shape)}, sums {tuple(sums.shape)}, "
            f"centre {tuple(centre.shape)}, ids {begin} … {end - 1}"
        )
    split_ids = -(-ids // (splits * tile.k)) * tile.k
    launch(
        _soft, (-(-T // tile.m) * -(-D // tile.n), splits), p, codes, sums, centre, T, begin, ids, split_ids, chunk,
        centre.shape[1], p.stride(0),
        cost=lambda: weigh_cost(T, ids, p, codes, splits, resident),
        warps=tile.warps, stages=tile.stages, D=D, BM=tile.m, BN=tile.n, BK=tile.k, EVEN=ids % tile.k == 0,
    )  # fmt: skip


def combine(
    sums: Tensor,
    total: Tensor,
    scale: float,
    dtype: torch.dtype,
    reference: bool,
    unit: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """sums [splits, T, D] in units of `unit`, total [T] -> soft [T, D]. `reference`: p was divided by the total before.

    `out`: where it is written, contiguous [T, D] of `dtype`.
    """
    (splits, T, D), t = sums.shape, COMBINED
    out = target("combine", out, (T, D), dtype, sums.device)
    launch(
        _combine, (-(-T // t.m), -(-D // t.n)), sums, total, total if unit is None else unit, out, T, splits, scale,
        cost=lambda: Cost(T * D * (4 * splits + out.element_size()), T * D * splits),
        warps=t.warps, stages=t.stages, D=D, REFERENCE=reference, IN_UNITS=unit is not None, BM=t.m, BN=t.n,
    )  # fmt: skip
    return out


def weigh_cost(T: int, ids: int, p: Tensor, E: Tensor, splits: int, resident: bool) -> Cost:
    """p and E once in, the sums out."""
    D = E.shape[1]
    moved = 0 if resident else (T * p.element_size() + D * E.element_size()) * ids + 4 * splits * T * D
    return Cost(moved, 2 * T * ids * D, "fp32" if p.dtype == torch.float32 else "bf16")
