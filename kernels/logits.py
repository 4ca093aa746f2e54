"""Hidden rows against a run of vocabulary rows: the head's matrix product, and every row's largest logit on the way.

    logits[t, v] = Σ_k hidden[t, k] · E[v, k]                    raw: no softcap, no temperature yet
    peaks[t, n]  = max over the n-th run of `block` ids          so that what follows can take exponentials at once

Shapes    hidden [T, D]; E [V, D], ids begin … end-1 of it; logits [T, ≥ end - begin]; peaks fp32 [T, ≥ blocks].
Precision fp32 sums; an FP8 embedding's codes are multiplied as they are (by bf16 rows: widened exactly) and the scale of
          their row of E, and of an FP8 hidden row, multiply the sum. One rounding, to the dtype of `logits`: the model's in
          the reference mode, fp32 in the fast one. Peaks are of the rounded logits.
Traffic   E once (a 256-row canvas has two row tiles; the programs of both run side by side and share E in the L2), the
          logits once, of which a peak is 1/128.
Grid      (row tiles, id tiles), rows fastest. Rows of E and of hidden are clamped, not masked: only stores have a mask.
Source    transformers 5.24 modeling_diffusion_gemma.py: lm_head, tied to the embedding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma_local.quant import Fp8

from ._launch import ADA, BLACKWELL, HOPPER, Cost, Rate, Tile, Tiles, choose, gpu_of, launch
from ._triton import tl, triton

Rows = Tensor | Fp8  # hidden rows, the embedding

# bf16 × bf16; bf16 × FP8 codes, widened in registers; FP8 × FP8. On Hopper the tile has all 256 rows: with 128 × 128 its
# wgmma would want 67 bytes a clock and processor from the L2. FP8 sums move to fp32 every k there; 128 × 256 then spills.
TILES: dict[str, Tiles] = {
    "bf16": {
        ADA.capability: Tile(128, 128, 64, 8, 3),
        HOPPER.capability: Tile(256, 128, 64, 8, 4),
        BLACKWELL.capability: Tile(128, 128, 64, 8, 3),
    },
    "widened": {
        ADA.capability: Tile(128, 128, 64, 8, 3),
        HOPPER.capability: Tile(256, 128, 64, 8, 4),
        BLACKWELL.capability: Tile(128, 128, 64, 8, 3),
    },
    "fp8": {
        ADA.capability: Tile(128, 128, 128, 8, 3),
        HOPPER.capability: Tile(256, 128, 128, 8, 4),
        BLACKWELL.capability: Tile(128, 128, 128, 8, 3),
    },
}
# Into fp32 and by chunks 256 rows would spill, and leave half a wave of programs.
HOPPER_CHUNKS = {
    "bf16": Tile(128, 128, 64, 8, 4),
    "widened": Tile(128, 128, 64, 8, 4),
    "fp8": Tile(128, 128, 128, 8, 4),
}


def logits_twin(hidden: Rows, E: Rows, dtype: torch.dtype) -> Tensor:
    """[T, D], [V, D] -> [T, V] of `dtype`."""
    if isinstance(hidden, Tensor) and isinstance(E, Tensor) and dtype == hidden.dtype:
        return F.linear(hidden, E)
    (x, x_scale), (w, w_scale) = (_wide(t) for t in (hidden, E))
    wide = torch.promote_types(x.dtype, torch.float32)
    total = F.linear(x.to(wide), w.to(wide))
    return total.mul_(x_scale).mul_(w_scale.mT).to(dtype)


def _wide(rows: Rows) -> tuple[Tensor, Tensor]:
    if isinstance(rows, Tensor):
        return rows, torch.ones(rows.shape[0], 1, device=rows.device)
    return rows.codes.to(torch.float32), rows.scale.to(torch.float32)


@triton.jit
def _logits(
    X,
    X_SCALE,
    E,
    E_SCALE,
    OUT,
    PEAK,
    rows,
    begin,
    end,
    out_stride,
    peak_stride,
    D: tl.constexpr,
    X_SCALED: tl.constexpr,
    E_SCALED: tl.constexpr,
    UNIT_SCALES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    block = tl.program_id(1)
    base = tl.program_id(0) * BM
    first = begin + block * BN
    row = tl.minimum(tl.arange(0, BM), rows - 1 - base)  # past the end the last row, again and again
    column = tl.minimum(tl.arange(0, BN), end - 1 - first)
    k = tl.arange(0, BK)
    x_at = X + base.to(tl.int64) * D + row[:, None] * D + k[None, :]
    e_at = E + first.to(tl.int64) * D + column[:, None] * D + k[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(0, D, BK):
        if D % BK == 0:
            x = tl.load(x_at)
            e = tl.load(e_at)
        else:
            x = tl.load(x_at, (step + k < D)[None, :], other=0.0)
            e = tl.load(e_at, (step + k < D)[None, :], other=0.0)
        if E_SCALED and not X_SCALED:
            e = e.to(X.dtype.element_ty)
        if UNIT_SCALES:  # GeForce's sm_120 multiplies FP8 at the full rate only in its block-scaled form
            x_unit = tl.full((BM, BK // 32), 127, tl.uint8)
            e_unit = tl.full((BN, BK // 32), 127, tl.uint8)
            total = tl.dot_scaled(x, x_unit, "e4m3", e.T, e_unit, "e4m3", total)
        else:
            total = tl.dot(x, e.T, total, input_precision="ieee", max_num_imprecise_acc=BK)
        x_at += BK
        e_at += BK
    if X_SCALED:
        total *= tl.load(X_SCALE + base + row).to(tl.float32)[:, None]
    if E_SCALED:
        total *= tl.load(E_SCALE + first + column).to(tl.float32)[None, :]
    rounded = total.to(OUT.dtype.element_ty)
    row = tl.arange(0, BM)
    live = base + row < rows
    out_at = OUT + base.to(tl.int64) * out_stride + block * BN + row[:, None] * out_stride + tl.arange(0, BN)[None, :]
    tl.store(out_at, rounded, live[:, None] & (first + tl.arange(0, BN) < end)[None, :])
    # ids past the end repeat the last row of E: they change no maximum
    tl.store(PEAK + (base + row) * peak_stride + block, tl.max(rounded.to(tl.float32), 1), live)


def tile_for(hidden: Rows, E: Rows, resident: bool) -> Tile:
    kind = _kind(hidden, E)
    tiles = {**TILES[kind], HOPPER.capability: HOPPER_CHUNKS[kind]} if resident else TILES[kind]
    return choose(tiles, gpu_of(_data(hidden)))


def _kind(hidden: Rows, E: Rows) -> str:
    return "fp8" if isinstance(hidden, Fp8) else "widened" if isinstance(E, Fp8) else "bf16"


def _data(rows: Rows) -> Tensor:
    return rows.codes if isinstance(rows, Fp8) else rows


def _scale(rows: Rows) -> Tensor:
    return rows.scale if isinstance(rows, Fp8) else rows  # of a plain tensor never read


def logits(
    hidden: Rows,
    E: Rows,
    out: Tensor,
    peaks: Tensor,
    begin: int,
    end: int,
    resident: bool = False,
    tile: Tile | None = None,
) -> None:
    """Ids begin … end-1: `out` [T, ≥ end - begin] and `peaks` [T, ≥ id tiles] fp32 are written from column 0.

    `resident`: a chunk, whose `out` stays in the L2 and costs no memory traffic.
    """
    T, D = hidden.shape
    tile = tile or tile_for(hidden, E, resident)
    blocks = -(-(end - begin) // tile.n)
    if (
        E.shape[1] != D
        or not 0 <= begin < end <= E.shape[0]
        or out.shape[0] != T
        or out.shape[1] < end - begin
        or peaks.shape[0] != T
        or peaks.shape[1] < blocks
        or (isinstance(hidden, Fp8) and not isinstance(E, Fp8))
    ):
        raise ValueError(
            f"logits: hidden {_kind(hidden, E)} {tuple(hidden.shape)}, E {tuple(E.shape)}, ids {begin} … {end - 1}, "
            f"out {tuple(out.shape)}, peaks {tuple(peaks.shape)}, {blocks} blocks"
        )
    launch(
        _logits,
        (-(-T // tile.m), blocks),
        _data(hidden),
        _scale(hidden),
        _data(E),
        _scale(E),
        out,
        peaks,
        T,
        begin,
        end,
        out.stride(0),
        peaks.stride(0),
        cost=lambda: Cost(
            bytes_moved(T, end - begin, D, _data(hidden), _data(E), None if resident else out),
            flops(T, end - begin, D),
            _rate(hidden),
        ),
        warps=tile.warps,
        stages=tile.stages,
        D=D,
        X_SCALED=isinstance(hidden, Fp8),
        E_SCALED=isinstance(E, Fp8),
        UNIT_SCALES=isinstance(hidden, Fp8) and gpu_of(hidden.codes).capability >= (12, 0),
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
    )


def _rate(hidden: Rows) -> Rate:
    if isinstance(hidden, Fp8):
        return "fp8"
    return "fp32" if hidden.dtype == torch.float32 else "bf16"


def bytes_moved(T: int, ids: int, D: int, hidden: Tensor, E: Tensor, out: Tensor | None) -> int:
    """Operands once, logits once where they leave the L2; scales and peaks are a hundredth."""
    operands = T * D * hidden.element_size() + ids * D * E.element_size()
    return operands + (T * ids * out.element_size() if out is not None else 0)


def flops(T: int, ids: int, D: int) -> int:
    return 2 * T * ids * D
