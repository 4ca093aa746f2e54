"""What the linears share: which part of the product a program makes, and how the parts of a sum become one.

    out [T, N] = x [T, K] · w [N, K]ᵀ          ┌ tile 0 ┬ tile 1 ┬ …    a program: m rows, n columns, one split of K
    gated: out [T, N/2] = gelu(gate) · up      ├ tile m ┼ …             programs side by side share w's rows, not x's

Gated     Rows of w are taken in the order gate 0, up 0, gate 1, up 1, …, so that the two factors of an output are
          neighbours in the registers of one thread; the loop over K does not know.
Splits    256 rows and 2,816 columns make 44 tiles of 128 × 128, a card has 128 … 170 processors: K is cut in parts. Each
          program leaves its part in memory and counts itself; who counts last adds all parts, in the order of the
          splits, so that the result does not depend on who that is. It leaves the counter as it found it, at 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ._launch import Gpu, Tile, choose, gpu_of
from ._triton import tl, triton

MOST_SPLITS = 8
# What a program does beside its loop, in columns of K: fill the pipeline, store; and, of a split, also write its part and
# read the others'. Estimated from bytes, not measured.
OVERHEAD, SPLIT_OVERHEAD = 192, 256
COUNTERS = 4096

_MINUS_2_SQRT_2_PI = tl.constexpr(-1.5957691216057308)  # −2 √(2/π)
_CUBIC = tl.constexpr(0.044715)


@triton.jit
def place(T, BM: tl.constexpr, BN: tl.constexpr):
    """This program's tile: its number, first row, first column. The tiles of the same columns run side by side."""
    tile = tl.program_id(0)
    tall = tl.cdiv(T, BM)
    return tile, (tile % tall) * BM, (tile // tall) * BN


@triton.jit
def weight_rows(first, N: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr):
    """[BN] rows of w, gate and up in turn where it is gated; past the end the last one again, never stored."""
    row = first + tl.arange(0, BN)
    if N % BN:
        row = tl.minimum(row, N - 1)
    if GATED:
        row = (row % 2) * (N // 2) + row // 2
    return row


@triton.jit
def steps(STEPS: tl.constexpr, SPLITS: tl.constexpr):
    """[first, last) of the loop's steps that this program's split has."""
    each: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    first = tl.program_id(1) * each
    return first, tl.minimum(first + each, STEPS)


@triton.jit
def total(acc, PARTS, COUNTS, tile, SPLITS: tl.constexpr):
    """The sum over all splits, and whether this program is the one that has it."""
    BM: tl.constexpr = acc.shape[0]
    BN: tl.constexpr = acc.shape[1]
    at = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    parts = PARTS + tile * (SPLITS * BM * BN)
    tl.store(parts + tl.program_id(1) * (BM * BN) + at, acc)
    tl.debug_barrier()  # all warps' parts are written before one thread says so
    last = tl.atomic_add(COUNTS + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if last:
        acc = tl.zeros((BM, BN), tl.float32)
        for split in range(SPLITS):
            acc += tl.load(parts + split * (BM * BN) + at, cache_modifier=".cg")  # .cg: not from a stale L1
        tl.atomic_xchg(COUNTS + tile, 0)
    return acc, last


@triton.jit
def gelu_tanh(x):
    """½ x (1 + tanh(√(2/π) (x + 0.044715 x³))), fp32.

    tanh(u) = 2 / (1 + exp(−2u)) − 1 is off by 2⁻²⁴ at the most, which counts against 1, not against a small u. Below −4
    it cancels with the 1, as it does in torch, whose last digits x · sigmoid(2u) would miss.
    """
    tanh = 2 / (tl.exp((x + x * x * x * _CUBIC) * _MINUS_2_SQRT_2_PI) + 1) - 1
    return 0.5 * x * (1 + tanh)


@triton.jit
def store(acc, OUT, row, column, T, N: tl.constexpr, GATED: tl.constexpr, last):
    """acc [BM, BN] fp32 from first row `row` and first column `column` on, gated or as it is, rounded to OUT's dtype."""
    BM: tl.constexpr = acc.shape[0]
    BN: tl.constexpr = acc.shape[1]
    WIDTH: tl.constexpr = N // 2 if GATED else N
    rows = row + tl.arange(0, BM)[:, None]
    if GATED:
        gate, up = tl.split(acc.reshape(BM, BN // 2, 2))
        gate = gate.to(OUT.dtype.element_ty).to(tl.float32)
        up = up.to(OUT.dtype.element_ty).to(tl.float32)
        out = gelu_tanh(gate).to(OUT.dtype.element_ty).to(tl.float32) * up
        columns = column // 2 + tl.arange(0, BN // 2)[None, :]
    else:
        out = acc
        columns = column + tl.arange(0, BN)[None, :]
    live = (rows < T) & (columns < WIDTH) & last
    tl.store(OUT + rows.to(tl.int64) * WIDTH + columns, out.to(OUT.dtype.element_ty), live)


@dataclass(frozen=True, slots=True)
class Job:
    """How a product is launched."""

    capability: tuple[int, int]
    tile: Tile
    splits: int
    grid: tuple[int, int]
    memory: tuple[Tensor, Tensor]  # the parts of sums and the counters; without splits nobody looks

    @property
    def constants(self) -> dict[str, int]:
        return {"SPLITS": self.splits, "BM": self.tile.m, "BN": self.tile.n, "BK": self.tile.k}


def job(
    tiles: Mapping[tuple[int, int], Any],
    x: Tensor,
    T: int,
    N: int,
    K: int,
    tile: Tile | None = None,
    splits: int | None = None,
) -> Job:
    """The launch of x [T, K] times [N, K]ᵀ, by the best of the capability's tiles or by a given one."""
    gpu = gpu_of(x)
    candidates: Any = (tile,) if tile else choose(tiles, gpu)
    tile, parts = plan(candidates, T, N, K, gpu)
    parts = splits or parts
    grid = _cdiv(T, tile.m) * _cdiv(N, tile.n), parts
    if grid[0] > COUNTERS:
        raise ValueError(f"_gemm: {grid[0]} tiles of {tile}, counters for {COUNTERS}")
    counts = counters(x.device)
    memory = counts if parts == 1 else x.new_empty(*grid, tile.m, tile.n, dtype=torch.float32)
    return Job(gpu.capability, tile, parts, grid, (memory, counts))


@cache
def plan(tiles: tuple[Tile, ...], T: int, N: int, K: int, gpu: Gpu) -> tuple[Tile, int]:
    """The tile and the number of splits that keep the card's processors busiest, by the time of the busiest one."""
    choices = [(_time(t, s, T, N, K, gpu), i, s) for i, t in enumerate(tiles) for s in _splits(t, K)]
    _, i, splits = min(choices)
    return tiles[i], splits


def _splits(tile: Tile, K: int) -> list[int]:
    """Numbers of splits of which none is empty."""
    count = _cdiv(K, tile.k)
    return [s for s in range(1, MOST_SPLITS + 1) if (s - 1) * _cdiv(count, s) < count]


def _time(tile: Tile, splits: int, T: int, N: int, K: int, gpu: Gpu) -> int:
    """Multiplications of the busiest processor, with its overheads in the same unit."""
    programs = _cdiv(T, tile.m) * _cdiv(N, tile.n) * splits
    steps = _cdiv(_cdiv(K, tile.k), splits) * tile.k + OVERHEAD + (SPLIT_OVERHEAD if splits > 1 else 0)
    return _cdiv(programs, gpu.processors) * steps * tile.m * tile.n


@cache
def counters(device: torch.device) -> Tensor:
    """One a device, for all launches of a stream: each leaves them at 0."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
