"""x · wᵀ with plain weights, and the gated pair of such products.

    out = x wᵀ                       [T, N]
    out = gelu(x gateᵀ) · (x upᵀ)    [T, N/2], w = [gate; up], tanh form

Shapes    x [T, K], w [N, K], both of one dtype, contiguous.
Precision Sums in fp32, rounded once; gated: gate and up each rounded, gelu rounded, the product rounded, as eager does.
Traffic   w once, x and out once: 2·(N·K + T·K + T·N) bytes. At 256 rows 234 multiplications a byte: the tensor cores of
          an RTX 4090 take 1.4 times as long as its memory.
Grid      _gemm.py: tiles, side by side over the rows, times splits of K.
Source    torch.nn.functional.linear; ops.gated_gelu.
"""

import torch.nn.functional as F
from torch import Tensor

from . import _gemm
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
    gate, up = F.linear(x, w).chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


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
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    tile, row, column = _gemm.place(T, BM, BN)
    rows = tl.minimum(row + tl.arange(0, BM), T - 1)  # past the end the last one again, never stored
    ks = tl.arange(0, BK)
    first, last = _gemm.steps((K + BK - 1) // BK, SPLITS)
    x_at = X + rows[:, None] * K + first * BK + ks[None, :]
    w_at = W + _gemm.weight_rows(column, N, BN, GATED)[:, None] * K + first * BK + ks[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(first, last):
        if K % BK:
            live = (step * BK + ks < K)[None, :]
            x, w = tl.load(x_at, live, other=0.0), tl.load(w_at, live, other=0.0)
        else:
            x, w = tl.load(x_at), tl.load(w_at)
        acc = tl.dot(x, w.T, acc, input_precision="ieee")
        x_at += BK
        w_at += BK
    has_sum = True
    if SPLITS > 1:
        acc, has_sum = _gemm.total(acc, PARTS, COUNTS, tile, SPLITS)
    _gemm.store(acc, OUT, row, column, T, N, GATED, has_sum)


def bf16_linear(x: Tensor, w: Tensor, tile: Tile | None = None, splits: int | None = None) -> Tensor:
    """x [T, K], w [N, K] -> [T, N]."""
    return _product("bf16_linear", x, w, False, tile, splits)


def bf16_gated(x: Tensor, w: Tensor, tile: Tile | None = None, splits: int | None = None) -> Tensor:
    """x [T, K], w [2F, K], gate above up -> [T, F]."""
    return _product("bf16_gated", x, w, True, tile, splits)


def _product(name: str, x: Tensor, w: Tensor, gated: bool, tile: Tile | None, splits: int | None) -> Tensor:
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1] or (gated and w.shape[0] % 2):
        raise ValueError(f"{name}: x {tuple(x.shape)}, w {tuple(w.shape)}")
    if x.dtype != w.dtype or not (x.is_contiguous() and w.is_contiguous()):
        raise ValueError(f"{name}: x {x.dtype} {x.stride()}, w {w.dtype} {w.stride()}: one dtype, contiguous")
    (T, K), N = x.shape, w.shape[0]
    job = _gemm.job(TILES, x, T, N, K, tile, splits)
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
