"""The soft embedding at the FP8 rate: codes of probabilities times codes of the embedding, which lie across.

    E[v, d]    = code[v, d] · scale[v]                   as stored: D is contiguous, and the product sums over v
               = across[d, v] · factor[v] · unit         once at load: code / 2^shift[v], so that 224 < factor ≤ 448
    p̃[t, v]    = e4m3(e^(z - centre) · factor[v])        by `draw`, in both modes; centre: the largest z, of the row or so far
    soft[t, d] = s · unit / Z[t] · Σ_v p̃[t, v] · across[d, v]

unit is a power of two, so factor has the bits of scale, and shift levels the rows: whatever their scales, the likeliest
id's p̃ lies between 224 and 448. A shifted code loses what is finer than 2^-9: at MOST_SHIFT, a 900th of its row's largest.

Shapes    p̃ E4M3 [T, ≥ ids], ids begin … end-1 of across E4M3 [D, V']; V' is V in a multiple of 16; parts as in `soft`.
Precision products of codes are exact, sums fp32, on sm_90 taken over into true fp32 at every k; one rounding at the end.
          In the reference mode z is rounded as there, but p̃ is no rounded softmax. Z is of the exact exponentials.
          Off from fp64, % of a row (and once normalised, as the self-conditioning does next: a sure id's p̃ is off by a
          factor of its whole row, which a norm divides out). Of fp64 z in bf16, 262,144 ids, Gaussian z and E:

              entropy, nats              0             0.1           1             4             8        demo, all rows
              bf16 E              0.00 (0.00)   0.19 (0.17)   0.22 (0.16)   0.21 (0.18)   0.16 (0.16)    0.13 (0.11)
              FP8 E, widened      2.58 (2.54)   2.65 (2.63)   2.41 (2.38)   1.75 (1.73)   0.50 (0.49)    2.45 (2.41)
              FP8 E, FP8 p        3.60 (2.55)   3.22 (2.63)   3.99 (2.43)   2.63 (2.01)   1.06 (0.66)    3.32 (2.45)
              p that fell to 0    0.00          0.05          0.10          0.97          1.2            0.01

          p̃ is 0 below 2^-10 / 224 = 4.4e-6 of the largest. The worst rows tried have one id and all others just below
          that: a third of the probability is lost, and they are 25 % (23 %) off; over an embedding whose row scales
          spread widely (lognormal, σ = 1) 59 % (56 %).
Traffic   across once, p̃ once, parts as in `soft`. No pass for p: `draw` writes p̃ where it has z, before Z is known.
Grid      as `soft`.
Source    transformers 5.24: the self-conditioning signal; fp8_linear.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma_local.quant import Fp8

from ._launch import ADA, BLACKWELL, HOPPER, Cost, Tile, Tiles, choose, gpu_of, launch
from ._triton import tl, triton

TILES: Tiles = {
    ADA.capability: Tile(128, 128, 128, 8, 3),
    HOPPER.capability: Tile(256, 128, 128, 8, 4),
    BLACKWELL.capability: Tile(128, 128, 128, 8, 3),
}
ALIGNED = 16  # bytes, of a row of codes
MOST_SHIFT = 8
BLOCK_IDS = 8192  # that are turned at once: 92 MB in fp32 of 2,816
_LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True, eq=False)
class Across:
    """An FP8 embedding for the second product: E[v, d] = codes[d, v] · factor[v] · unit."""

    codes: Tensor  # float8_e4m3fn [D, V'], zeros behind V
    factor: Tensor  # [V] of the scale's dtype; 0 where the row of E is
    unit: Tensor  # fp32 [1]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.factor.nbytes + self.unit.nbytes


def padded(ids: int) -> int:
    """Columns of a row of codes for so many ids."""
    return -(-ids // ALIGNED) * ALIGNED


@torch.no_grad()
def transpose_codes(E: Fp8) -> Across:
    """E [V, D] -> its codes [D, V'] under levelled scales; once at load, as large as E's own."""
    V, D = E.shape
    scale = E.scale.flatten().float()
    mantissa, exponent = scale.frexp()  # of [½, 1)
    high = mantissa * 512 > 448
    factor, level = torch.where(high, mantissa * 256, mantissa * 512), exponent - 9 + high.int()
    used = torch.cat([block.view(torch.uint8).bitwise_and(127).amax(1) > 0 for block in E.codes.split(BLOCK_IDS)])
    top = torch.where(used, level, -1000).amax()  # a zero row's scale is anything
    shift = (top - level).clamp(0, MOST_SHIFT)
    codes = torch.empty(D, padded(V), dtype=torch.float8_e4m3fn, device=E.device)
    codes.view(torch.uint8)[:, V:] = 0
    for start in range(0, V, BLOCK_IDS):
        ids = slice(start, min(start + BLOCK_IDS, V))
        codes[:, ids] = (E.codes[ids].float() * torch.exp2(-shift[ids].float())[:, None]).to(codes.dtype).T
    factor = torch.where(used, factor * torch.exp2((level - top + shift).float()), 0.0)
    return Across(codes, factor.to(E.scale.dtype), torch.exp2(top.float()).view(1))


def soft_fp8_twin(
    z: Tensor, across: Across, scale: float, dtype: torch.dtype, reference: bool, chunk: int | None = None
) -> Tensor:
    """z [T, V] in fp32 or wider -> [T, D] of `dtype`. `chunk`: ids whose p̃ are about the largest z up to and with them."""
    if reference:
        z = z.to(dtype).to(z.dtype)
    centre = z.new_full((len(z), 1), -torch.inf)
    sums, total = z.new_zeros(len(z), len(across.codes)), z.new_zeros(len(z), 1)
    for start in range(0, z.shape[1], chunk or z.shape[1]):
        ids = slice(start, min(start + (chunk or z.shape[1]), z.shape[1]))
        before, centre = centre, centre.maximum(z[:, ids].amax(-1, keepdim=True))
        shrink, weight = (before - centre).exp(), (z[:, ids] - centre).exp()
        p = (weight * across.factor[ids].to(z.dtype)).to(torch.float8_e4m3fn).to(z.dtype)
        sums = sums * shrink + p @ across.codes[:, ids].to(z.dtype).T
        total = total * shrink + weight.sum(-1, keepdim=True)
    return (sums * (across.unit * scale / total)).to(dtype)


@triton.jit(do_not_specialize=["chunk"])
def _soft_fp8(
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
    e_stride,
    D: tl.constexpr,
    UNIT_SCALES: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
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
    e_row = tl.minimum(column, D - 1) if D % BN else column
    e_at = E + begin + first + e_row.to(tl.int64)[:, None] * e_stride + k[None, :]
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
            e = tl.load(e_at, (first + k < last)[None, :], other=0.0)
            first += BK
        if UNIT_SCALES:  # GeForce's sm_120 multiplies FP8 at the full rate only in its block-scaled form
            p_unit = tl.full((BM, BK // 32), 127, tl.uint8)
            e_unit = tl.full((BN, BK // 32), 127, tl.uint8)
            total = tl.dot_scaled(p, p_unit, "e4m3", e.T, e_unit, "e4m3", total)
        else:
            total = tl.dot(p, e.T, total, max_num_imprecise_acc=BK)
        p_at += BK
        e_at += BK
    tl.store(part_at, total, live)


def tile_for(p: Tensor) -> Tile:
    return choose(TILES, gpu_of(p))


def weigh_codes(
    p: Tensor,
    across: Across,
    sums: Tensor,
    centre: Tensor,
    begin: int,
    end: int,
    chunk: int,
    resident: bool = False,
    tile: Tile | None = None,
) -> None:
    """p̃ [T, ≥ end - begin] of ids begin … end-1 times their columns -> sums [splits, T, D], to which chunks > 0 add.

    `resident`: p̃ and the sums are in the L2, and cost no memory traffic.
    """
    tile = tile or tile_for(p)
    T, D, ids, splits = p.shape[0], across.codes.shape[0], end - begin, sums.shape[0]
    if (
        sums.shape[1:] != (T, D)
        or not 0 < ids <= p.shape[1]
        or centre.shape[0] != T
        or not 0 <= begin < end <= across.factor.shape[0]
        or p.dtype != across.codes.dtype
    ):
        raise ValueError(
            f"weigh_codes: p {tuple(p.shape)} {p.dtype}, across {tuple(across.codes.shape)}, sums {tuple(sums.shape)}, "
            f"centre {tuple(centre.shape)}, ids {begin} … {end - 1}"
        )
    split_ids = -(-ids // (splits * tile.k)) * tile.k
    launch(
        _soft_fp8, (-(-T // tile.m) * -(-D // tile.n), splits), p, across.codes, sums, centre, T, begin, ids, split_ids,
        chunk, centre.shape[1], p.stride(0), across.codes.stride(0),
        cost=lambda: weigh_cost(T, ids, D, splits, resident),
        warps=tile.warps, stages=tile.stages, D=D, UNIT_SCALES=gpu_of(p).capability >= (12, 0),
        EVEN=ids % tile.k == 0, BM=tile.m, BN=tile.n, BK=tile.k,
    )  # fmt: skip


def weigh_cost(T: int, ids: int, D: int, splits: int, resident: bool) -> Cost:
    """across once in; p̃ in and the sums out, where they leave the L2."""
    return Cost(D * ids + (0 if resident else T * ids + 4 * splits * T * D), 2 * T * ids * D, "fp8")
