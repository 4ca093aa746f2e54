"""x · wᵀ of two E4M3 matrices, one scale a row of x and one a row of w; and the gated pair of such products.

    out[t, n] = Σₖ x[t, k] w[n, k] · sx[t] · sw[n]        [T, N]
    out       = gelu(gate) · up                           [T, N/2], w = [gate; up], tanh form

Shapes    x codes [T, K] under scale fp32 [T, 1]; w codes [N, K] under scale bf16 or fp32 [N, 1].
Precision Products of codes are exact, sums are fp32; on sm_90, whose FP8 accumulators keep 14 bits or so, they are taken
          over into true fp32 every 128 columns. Then × sx, × sw in fp32, and one rounding; gated: as bf16_linear.py.
Traffic   w once, x and out once: N·K + T·K + 2·T·N bytes. At 256 rows 512 operations a byte: tensor cores are the limit
          on an RTX 4090 (330 Tflop/s: 1.4 × the memory's time) and on an RTX 5090, both are on an H200.
Grid      _gemm.py: tiles, or shares of all their steps where tiles do not fill the card.
Source    vLLM's cutlass_scaled_mm; compressed-tensors' FP8-dynamic; triton-lang/triton#11320 (block-scaled on sm_120).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma_local.quant import Fp8

from . import _gemm
from ._gelu import gated_gelu_twin
from ._launch import Cost, Tile, launch
from ._triton import tl, triton

TILES = {
    (8, 9): (Tile(128, 128, 128, 8, 3), Tile(128, 128, 64, 8, 5)),
    (9, 0): (Tile(128, 128, 128, 8, 4), Tile(128, 64, 128, 8, 4)),
    (12, 0): (Tile(128, 128, 128, 8, 3), Tile(128, 128, 64, 8, 5)),
}

EXACT_AFTER = tl.constexpr(128)  # columns of K; only sm_90 listens


def fp8_linear_twin(x: Fp8, w: Fp8, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """x [T, K], w [N, K] -> [T, N]."""
    return (F.linear(x.codes.float(), w.codes.float()) * x.scale * w.scale.float().T).to(dtype)


def fp8_gated_twin(x: Fp8, w: Fp8, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """x [T, K], w [2F, K], gate above up -> [T, F]."""
    return gated_gelu_twin(fp8_linear_twin(x, w, dtype))


@triton.jit
def _fp8_linear(
    X,
    X_SCALE,
    W,
    W_SCALE,
    OUT,
    PARTS,
    COUNTS,
    T,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    UNIT_SCALES: tl.constexpr,
    SHARED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    STEPS: tl.constexpr = (K + BK - 1) // BK
    ks = tl.arange(0, BK)
    begin, end = _gemm.share(T, N, STEPS, SHARED, BM, BN)
    for tile in range(begin // STEPS, (end + STEPS - 1) // STEPS):
        row, column, first, last = _gemm.place(tile, begin, end, T, STEPS, BM, BN)
        rows = row + tl.arange(0, BM)
        columns = _gemm.weight_rows(column, N, BN, GATED)
        x_at = X + tl.minimum(rows, T - 1)[:, None] * K + ks[None, :]  # past the end the last one again, never stored
        w_at = W + columns[:, None] * K + ks[None, :]
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(first, last):
            k = step * BK
            if K % BK:
                live = (k + ks < K)[None, :]
                x, w = tl.load(x_at + k, live, other=0.0), tl.load(w_at + k, live, other=0.0)
            else:
                x, w = tl.load(x_at + k), tl.load(w_at + k)
            if UNIT_SCALES:  # GeForce's sm_120 multiplies FP8 at the full rate only in its block-scaled form
                x_unit = tl.full((BM, BK // 32), 127, tl.uint8)
                w_unit = tl.full((BN, BK // 32), 127, tl.uint8)
                acc = tl.dot_scaled(x, x_unit, "e4m3", w.T, w_unit, "e4m3", acc)
            else:
                acc = tl.dot(x, w.T, acc, max_num_imprecise_acc=min(BK, EXACT_AFTER))
        whole = True
        if SHARED:
            acc, whole = _gemm.total(acc, PARTS, COUNTS, tile, first, last, T, N, STEPS)
        if whole:
            acc = acc * tl.load(X_SCALE + rows, rows < T, other=0.0)[:, None]
            acc = acc * tl.load(W_SCALE + columns).to(tl.float32)[None, :]
            _gemm.store(acc, OUT, row, column, T, N, GATED)


def fp8_linear(
    x: Fp8, w: Fp8, dtype: torch.dtype = torch.bfloat16, tile: Tile | None = None, programs: int | None = None
) -> Tensor:
    """x [T, K], w [N, K] -> [T, N] of `dtype`."""
    return _product("fp8_linear", x, w, False, dtype, tile, programs)


def fp8_gated(
    x: Fp8, w: Fp8, dtype: torch.dtype = torch.bfloat16, tile: Tile | None = None, programs: int | None = None
) -> Tensor:
    """x [T, K], w [2F, K], gate above up -> [T, F] of `dtype`."""
    return _product("fp8_gated", x, w, True, dtype, tile, programs)


def _product(
    name: str, x: Fp8, w: Fp8, gated: bool, dtype: torch.dtype, tile: Tile | None, programs: int | None
) -> Tensor:
    if len(x.shape) != 2 or len(w.shape) != 2 or x.shape[1] != w.shape[1] or (gated and w.shape[0] % 2):
        raise ValueError(f"{name}: x {x.shape}, w {w.shape}")
    tensors = (x.codes, x.scale, w.codes, w.scale)
    if x.scale.dtype != torch.float32 or not all(t.is_contiguous() for t in tensors):
        raise ValueError(f"{name}: x.scale {x.scale.dtype}, strides {[t.stride() for t in tensors]}: fp32, contiguous")
    (T, K), N = x.shape, w.shape[0]
    job = _gemm.job(TILES, x.codes, T, N, K, tile, programs)
    out = torch.empty(T, N // 2 if gated else N, dtype=dtype, device=x.device)
    launch(
        _fp8_linear,
        job.grid,
        *tensors,
        out,
        *job.memory,
        T,
        cost=lambda: Cost(bytes_moved(T, N, K, gated, out.element_size()), flops(T, N, K), "fp8"),
        warps=job.tile.warps,
        stages=job.tile.stages,
        N=N,
        K=K,
        GATED=gated,
        UNIT_SCALES=job.capability >= (12, 0),
        **job.constants,
    )
    return out


def bytes_moved(rows: int, out: int, width: int, gated: bool, element: int = 2) -> int:
    """w and x read with their scales, the outcome written."""
    return out * width + 2 * out + rows * width + 4 * rows + element * rows * (out // 2 if gated else out)


def flops(rows: int, out: int, width: int) -> int:
    return 2 * rows * out * width
