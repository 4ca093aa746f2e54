"""x · wᵀ with plain weights, and the gated pair of such products.

    out = x wᵀ                       [T, N]
    out = gelu(x gateᵀ) · (x upᵀ)    [T, N/2], w = [gate; up], tanh form

Shapes    x [T, K], w [N, K], both of one dtype, contiguous.
Precision Sums in fp32, rounded once; gated: gate and up each rounded, gelu rounded, the product rounded, as eager does.
Traffic   w once, x and out once: 2·(N·K + T·K + T·N) bytes. At 256 rows 234 multiplications a byte: the tensor cores of
          an RTX 4090 take 1.4 times as long as its memory.
Grid      _gemm.py: tiles, or shares of all their steps where tiles do not fill the card.
Source    torch.nn.functional.linear; _gelu.py.
"""

import torch.nn.functional as F
from torch import Tensor

from . import _gemm
from ._gelu import gated_gelu_twin
from ._launch import Cost, Tile, launch
from ._triton import tl, triton

TILES = {
    (8, 9): (Tile(128, 128, 64, 8, 3), Tile(128, 64, 64, 8, 3)),
    (9, 0): (Tile(128, 128, 64, 8, 4), Tile(128, 64, 64, 8, 4)),
    (12, 0): (Tile(128, 128, 64, 8, 3), Tile(128, 64, 64, 8, 3)),
}


def bf16_linear_twin(x: Tensor, w: Tensor) -> Tensor:
    """x [T, K], w [N, K] -> [T, N]."""
    return F.linear(x, w)


def bf16_gated_twin(x: Tensor, w: Tensor) -> Tensor:
    """x [T, K], w [2F, K], gate above up -> [T, F]."""
    return gated_gelu_twin(F.linear(x, w))


@triton.jit
def _bf16_linear(
    X,
    W,
    OUT,
    PARTS,
    COUNTS,
    T,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
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
        rows = tl.minimum(row + tl.arange(0, BM), T - 1)  # past the end the last one again, never stored
        x_at = X + rows[:, None] * K + ks[None, :]
        w_at = W + _gemm.weight_rows(column, N, BN, GATED)[:, None] * K + ks[None, :]
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(first, last):
            k = step * BK
            if K % BK:
                live = (k + ks < K)[None, :]
                x, w = tl.load(x_at + k, live, other=0.0), tl.load(w_at + k, live, other=0.0)
            else:
                x, w = tl.load(x_at + k), tl.load(w_at + k)
            acc = tl.dot(x, w.T, acc, input_precision="ieee")
        whole = True
        if SHARED:
            acc, whole = _gemm.total(acc, PARTS, COUNTS, tile, first, last, T, N, STEPS)
        if whole:
            _gemm.store(acc, OUT, row, column, T, N, GATED)


def bf16_linear(x: Tensor, w: Tensor, tile: Tile | None = None, programs: int | None = None) -> Tensor:
    """x [T, K], w [N, K] -> [T, N]."""
    return _product("bf16_linear", x, w, False, tile, programs)


def bf16_gated(x: Tensor, w: Tensor, tile: Tile | None = None, programs: int | None = None) -> Tensor:
    """x [T, K], w [2F, K], gate above up -> [T, F]."""
    return _product("bf16_gated", x, w, True, tile, programs)


def _product(name: str, x: Tensor, w: Tensor, gated: bool, tile: Tile | None, programs: int | None) -> Tensor:
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1] or (gated and w.shape[0] % 2):
        raise ValueError(f"{name}: x {tuple(x.shape)}, w {tuple(w.shape)}")
    if x.dtype != w.dtype or not (x.is_contiguous() and w.is_contiguous()):
        raise ValueError(f"{name}: x {x.dtype} {x.stride()}, w {w.dtype} {w.stride()}: one dtype, contiguous")
    (T, K), N = x.shape, w.shape[0]
    job = _gemm.job(TILES, x, T, N, K, tile, programs)
    out = x.new_empty(T, N // 2 if gated else N)
    launch(
        _bf16_linear,
        job.grid,
        x,
        w,
        out,
        *job.memory,
        T,
        cost=lambda: Cost(bytes_moved(T, N, K, gated, x.element_size()), flops(T, N, K), "bf16"),
        warps=job.tile.warps,
        stages=job.tile.stages,
        N=N,
        K=K,
        GATED=gated,
        **job.constants,
    )
    return out


def bytes_moved(rows: int, out: int, width: int, gated: bool, element: int = 2) -> int:
    """w and x read, the outcome written."""
    return element * (out * width + rows * width + rows * (out // 2 if gated else out))


def flops(rows: int, out: int, width: int) -> int:
    return 2 * rows * out * width
