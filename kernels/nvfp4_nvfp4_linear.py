"""x · wᵀ of two NVFP4 matrices on tensor cores that take them as they are (sm_120); and the gated pair of such products.

    out[t, n] = (Σₖ code · scale of x[t, k] · code · scale of w[n, k]) / global of x / global of w       or · global of w
    out       = gelu(gate) · up, w = [gate; up], tanh form

Shapes    packed uint8 [T, K/2] and [N, K/2], scale E4M3 [T, K/16] and [N, K/16], global fp32: one of x, which divides, one
          for each of at most 3 fused parts of w. Scales lie in rows as the checkpoint has them, nothing is swizzled.
Precision Products of codes and scales are exact, sums are fp32, × the globals' factors in fp32, one rounding; gated: as
          bf16_linear.py.
Traffic   w once, x and out once: (9/16)·(N + T)·K + 2·T·N bytes. At 256 rows 900 operations a byte: on an RTX 5090, which
          does 1,676 T of them a second, the memory is the limit.
Cards     sm_120 only: mma.m16n8k64 kind::mxf4nvf4, `tl.dot_scaled`. For older ones triton 3.7 has no code at all.
Grid      _gemm.py: tiles, or shares of all their steps where tiles do not fill the card.
Source    compressed-tensors' NVFP4 with input_global_scale; triton-lang/triton#8173.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma_local.quant import GROUP, Nvfp4

from . import _gemm
from ._e2m1 import UNIT, decode_twin
from ._gelu import gated_gelu_twin
from ._launch import Cost, Tile, launch
from ._triton import tl, triton
from .nvfp4_linear import check, parts_of

TILES = {(12, 0): (Tile(128, 128, 128, 8, 4), Tile(128, 64, 128, 4, 4))}


def nvfp4_nvfp4_linear_twin(x: Nvfp4, w: Nvfp4, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """x [T, K], w [N, K] -> [T, N]."""
    sums = F.linear(decode_twin(x, torch.float32), decode_twin(w, torch.float32)) / UNIT**2
    factor = 1 / w.global_scale if w.divides else w.global_scale
    return (sums * (factor / x.global_scale).repeat_interleave(torch.tensor(w.heights, device=w.device))).to(dtype)


def nvfp4_nvfp4_gated_twin(x: Nvfp4, w: Nvfp4, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """x [T, K], w [2F, K], gate above up -> [T, F]."""
    return gated_gelu_twin(nvfp4_nvfp4_linear_twin(x, w, dtype))


@triton.jit
def _nvfp4_nvfp4_linear(
    X,
    X_SCALE,
    X_GLOBAL,
    W,
    W_SCALE,
    W_GLOBAL,
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
    halves, groups = tl.arange(0, BK // 2), tl.arange(0, BK // 16)
    begin, end = _gemm.share(T, N, STEPS, SHARED, BM, BN)
    for tile in range(begin // STEPS, (end + STEPS - 1) // STEPS):
        row, column, first, last = _gemm.place(tile, begin, end, T, STEPS, BM, BN)
        rows = tl.minimum(row + tl.arange(0, BM), T - 1)  # past the end the last one again, never stored
        columns = _gemm.weight_rows(column, N, BN, GATED)
        x_at = X + rows[:, None] * (K // 2) + halves[None, :]
        w_at = W + columns[:, None] * (K // 2) + halves[None, :]
        x_scale_at = X_SCALE + rows[:, None] * (K // 16) + groups[None, :]
        w_scale_at = W_SCALE + columns[:, None] * (K // 16) + groups[None, :]
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(first, last):
            half, group = step * (BK // 2), step * (BK // 16)
            if K % BK:
                live, live_groups = (half + halves < K // 2)[None, :], (group + groups < K // 16)[None, :]
                x, w = tl.load(x_at + half, live, other=0), tl.load(w_at + half, live, other=0)
                x_scale = tl.load(x_scale_at + group, live_groups, other=0.0)
                w_scale = tl.load(w_scale_at + group, live_groups, other=0.0)
            else:
                x, w = tl.load(x_at + half), tl.load(w_at + half)
                x_scale, w_scale = tl.load(x_scale_at + group), tl.load(w_scale_at + group)
            acc = tl.dot_scaled(x, x_scale, "e2m1", w.T, w_scale, "e2m1", acc)
        whole = True
        if SHARED:
            acc, whole = _gemm.total(acc, PARTS, COUNTS, tile, first, last, T, N, STEPS)
        if whole:
            factor = tl.load(W_GLOBAL + tl.where(columns >= END_0, 1, 0) + tl.where(columns >= END_1, 1, 0))
            if DIVIDES:
                factor = tl.div_rn(tl.full((BN,), 1.0, tl.float32), factor)
            acc = acc * tl.div_rn(factor, tl.broadcast_to(tl.load(X_GLOBAL), (BN,)))[None, :]
            _gemm.store(acc, OUT, row, column, T, N, GATED)


def nvfp4_nvfp4_linear(
    x: Nvfp4, w: Nvfp4, dtype: torch.dtype = torch.bfloat16, tile: Tile | None = None, programs: int | None = None
) -> Tensor:
    """x [T, K], w [N, K] -> [T, N] of `dtype`."""
    return _product("nvfp4_nvfp4_linear", x, w, False, dtype, tile, programs)


def nvfp4_nvfp4_gated(
    x: Nvfp4, w: Nvfp4, dtype: torch.dtype = torch.bfloat16, tile: Tile | None = None, programs: int | None = None
) -> Tensor:
    """x [T, K], w [2F, K], gate above up -> [T, F] of `dtype`."""
    return _product("nvfp4_nvfp4_gated", x, w, True, dtype, tile, programs)


def _product(
    name: str, x: Nvfp4, w: Nvfp4, gated: bool, dtype: torch.dtype, tile: Tile | None, programs: int | None
) -> Tensor:
    tensors = (x.packed, x.scale, x.global_scale, w.packed, w.scale, w.global_scale)
    check(name, x.shape, w, gated, tensors)
    if len(x.heights) != 1 or not x.divides:
        raise ValueError(f"{name}: x of {len(x.heights)} parts, divides {x.divides}: one, whose global scale divides")
    (T, K), N = x.shape, w.shape[0]
    job = _gemm.job(TILES, x.packed, T, N, K, tile, programs)
    out = torch.empty(T, N // 2 if gated else N, dtype=dtype, device=x.device)
    launch(
        _nvfp4_nvfp4_linear,
        job.grid,
        *tensors,
        out,
        *job.memory,
        T,
        cost=lambda: Cost(bytes_moved(T, N, K, gated, out.element_size()), flops(T, N, K), "fp4"),
        warps=job.tile.warps,
        stages=job.tile.stages,
        N=N,
        K=K,
        GATED=gated,
        **parts_of(w),
        **job.constants,
    )
    return out


def bytes_moved(rows: int, out: int, width: int, gated: bool, element: int = 2) -> int:
    """w and x read with their scales, the outcome written."""
    codes = (out + rows) * (width // 2 + width // GROUP)
    return codes + element * rows * (out // 2 if gated else out)


def flops(rows: int, out: int, width: int) -> int:
    return 2 * rows * out * width
