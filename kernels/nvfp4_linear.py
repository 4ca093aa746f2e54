"""x · wᵀ with NVFP4 weights and activations as they are; and the gated pair of such products.

    out[t, n] = (Σₖ x[t, k] · code[n, k] scale[n, k/16]) / global       or · global, as the checkpoint has it
    out       = gelu(gate) · up, w = [gate; up], tanh form

Shapes    x [T, K]; w packed uint8 [N, K/2], scale E4M3 [N, K/16], global fp32, one for each of at most 3 fused parts.
Precision code · scale is exact in x's dtype, sums are fp32, × global's factor in fp32, one rounding; gated: as
          bf16_linear.py. quant.linear rounds every code · (scale / global) to x's dtype instead: this is nearer fp64.
Traffic   w once, x and out once: (9/16)·N·K + 2·T·K + 2·T·N bytes. At 256 rows 900 operations a byte, far on the side of
          the tensor cores, which do bf16 here: NVFP4 halves a dense layer's memory against FP8, not its time.
Decode    By the program, once a tile: 2.6 instructions a weight (_e2m1.py), through shared memory (`once`). In the
          operand's registers every warp would decode what others have too: 9 instructions an mma instead of 3.5 … 4.7.
Grid      _gemm.py: tiles, or shares of all their steps where tiles do not fill the card.
Source    compressed-tensors' NVFP4A16; vLLM's Marlin path does the same arithmetic.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma_local.quant import GROUP, Nvfp4

from . import _gemm
from ._e2m1 import UNIT, decode, decode_twin, once
from ._gelu import gated_gelu_twin
from ._launch import Cost, Tile, launch
from ._triton import tl, triton

TILES = {
    (8, 9): (Tile(128, 128, 64, 8, 3), Tile(128, 64, 64, 8, 3)),
    (9, 0): (Tile(128, 128, 64, 8, 4), Tile(128, 64, 64, 8, 4)),
    (12, 0): (Tile(128, 128, 64, 8, 3), Tile(128, 64, 64, 8, 3)),
}
MOST_PARTS = 3  # q, k and v
_WHOLE = tl.constexpr(1 / UNIT)


def nvfp4_linear_twin(x: Tensor, w: Nvfp4) -> Tensor:
    """x [T, K], w [N, K] -> [T, N]."""
    sums = F.linear(x.float(), decode_twin(w, x.dtype).float())
    whole = torch.full_like(w.global_scale, 1 / UNIT)
    factor = whole / w.global_scale if w.divides else whole * w.global_scale
    return (sums * factor.repeat_interleave(torch.tensor(w.heights, device=w.device))).to(x.dtype)


def nvfp4_gated_twin(x: Tensor, w: Nvfp4) -> Tensor:
    """x [T, K], w [2F, K], gate above up -> [T, F]."""
    return gated_gelu_twin(nvfp4_linear_twin(x, w))


@triton.jit
def global_factor(GLOBAL, columns, END_0: tl.constexpr, END_1: tl.constexpr, DIVIDES: tl.constexpr):
    """[BN] fp32: what the sums of these rows of w are multiplied by, UNIT taken off; parts end at END_0 and END_1."""
    part = tl.where(columns >= END_0, 1, 0) + tl.where(columns >= END_1, 1, 0)
    scale = tl.load(GLOBAL + part)
    return tl.div_rn(tl.full(scale.shape, _WHOLE, tl.float32), scale) if DIVIDES else scale * _WHOLE


@triton.jit
def _nvfp4_linear(
    X,
    PACKED,
    SCALE,
    GLOBAL,
    OUT,
    PARTS,
    COUNTS,
    T,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    END_0: tl.constexpr,
    END_1: tl.constexpr,
    DIVIDES: tl.constexpr,
    SHARED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    STEPS: tl.constexpr = (K + BK - 1) // BK
    ks, halves, groups = tl.arange(0, BK), tl.arange(0, BK // 2), tl.arange(0, BK // 16)
    begin, end = _gemm.share(T, N, STEPS, SHARED, BM, BN)
    for tile in range(begin // STEPS, (end + STEPS - 1) // STEPS):
        row, column, first, last = _gemm.place(tile, begin, end, T, STEPS, BM, BN)
        rows = tl.minimum(row + tl.arange(0, BM), T - 1)  # past the end the last one again, never stored
        columns = _gemm.weight_rows(column, N, BN, GATED)
        x_at = X + rows[:, None] * K + ks[None, :]
        packed_at = PACKED + columns[:, None] * (K // 2) + halves[None, :]
        scale_at = SCALE + columns[:, None] * (K // 16) + groups[None, :]
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(first, last):
            k, half, group = step * BK, step * (BK // 2), step * (BK // 16)
            if K % BK:
                x = tl.load(x_at + k, (k + ks < K)[None, :], other=0.0)
                packed = tl.load(packed_at + half, (half + halves < K // 2)[None, :], other=0)
                scale = tl.load(scale_at + group, (group + groups < K // 16)[None, :], other=0.0)
            else:
                x, packed, scale = tl.load(x_at + k), tl.load(packed_at + half), tl.load(scale_at + group)
            w = once(decode(packed, scale, X.dtype.element_ty))
            acc = tl.dot(x, w.T, acc, input_precision="ieee")
        whole = True
        if SHARED:
            acc, whole = _gemm.total(acc, PARTS, COUNTS, tile, first, last, T, N, STEPS)
        if whole:
            acc = acc * global_factor(GLOBAL, columns, END_0, END_1, DIVIDES)[None, :]
            _gemm.store(acc, OUT, row, column, T, N, GATED)


def nvfp4_linear(x: Tensor, w: Nvfp4, tile: Tile | None = None, programs: int | None = None) -> Tensor:
    """x [T, K], w [N, K] -> [T, N]."""
    return _product("nvfp4_linear", x, w, False, tile, programs)


def nvfp4_gated(x: Tensor, w: Nvfp4, tile: Tile | None = None, programs: int | None = None) -> Tensor:
    """x [T, K], w [2F, K], gate above up -> [T, F]."""
    return _product("nvfp4_gated", x, w, True, tile, programs)


def _product(name: str, x: Tensor, w: Nvfp4, gated: bool, tile: Tile | None, programs: int | None) -> Tensor:
    check(name, tuple(x.shape), w, gated, (x, w.packed, w.scale, w.global_scale))
    (T, K), N = x.shape, w.shape[0]
    job = _gemm.job(TILES, x, T, N, K, tile, programs)
    out = x.new_empty(T, N // 2 if gated else N)
    launch(
        _nvfp4_linear,
        job.grid,
        x,
        w.packed,
        w.scale,
        w.global_scale,
        out,
        *job.memory,
        T,
        cost=lambda: Cost(bytes_moved(T, N, K, gated, x.element_size()), flops(T, N, K), "bf16"),
        warps=job.tile.warps,
        stages=job.tile.stages,
        N=N,
        K=K,
        GATED=gated,
        **parts_of(w),
        **job.constants,
    )
    return out


def check(name: str, x: tuple[int, ...], w: Nvfp4, gated: bool, tensors: tuple[Tensor, ...]) -> None:
    """ValueError for shapes that would read or write elsewhere."""
    wrong = len(x) != 2 or len(w.shape) != 2 or x[1:] != w.shape[1:] or len(w.heights) > MOST_PARTS
    if wrong or (gated and w.shape[0] % 2):
        raise ValueError(f"{name}: x {x}, w {w.shape} in parts of {w.heights}")
    if not all(t.is_contiguous() for t in tensors):
        raise ValueError(f"{name}: strides {[t.stride() for t in tensors]}: contiguous")


def parts_of(w: Nvfp4) -> dict[str, int | bool]:
    """Where the first and the second part end, and what their global scales do."""
    ends = [sum(w.heights[:i]) for i in range(1, MOST_PARTS)]
    return {"END_0": ends[0], "END_1": ends[1], "DIVIDES": w.divides}


def bytes_moved(rows: int, out: int, width: int, gated: bool, element: int = 2) -> int:
    """w with its scales and x read, the outcome written."""
    weights = out * width // 2 + out * width // GROUP
    return weights + element * (rows * width + rows * (out // 2 if gated else out))


def flops(rows: int, out: int, width: int) -> int:
    return 2 * rows * out * width
