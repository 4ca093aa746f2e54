"""What the linears share: which part of the product a program makes, and how the parts of a sum become one.

    out [T, N] = x [T, K] · w [N, K]ᵀ          steps of K, tile after tile: those of the same columns one after another
    gated: out [T, N/2] = gelu(gate) · up      │ tile 0    │ tile 1    │ tile 2    │ …
                                               └ program 0 ─┴─ program 1 ─┴─ program 2 ─┴ …

Gated     Rows of w are taken in the order gate 0, up 0, gate 1, up 1, …, so that the two factors of an output are
          neighbours in the registers of one thread; the loop over K does not know.
Shares    256 rows and 2,816 columns make 44 tiles of 128 × 128, a card has 128 … 170 processors. So the steps of all
          tiles are dealt out in one row, and each processor's program takes as many as the others, wherever that cuts a
          tile. A program that has not the whole of a tile leaves its part in memory and counts itself there; who counts
          last adds all parts, in the order of K, so that the result does not depend on who that is. It leaves the counter
          as it found it, at 0. Nobody waits. Where tiles fill the card as they are, each program has one.
Source    Osama et al. 2023, Stream-K: work-centric parallel decomposition for dense matrix multiplication (PPoPP).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ._gelu import gated_gelu
from ._launch import Gpu, Tile, choose, gpu_of
from ._triton import tl, triton

COUNTERS = 4096
# A product's time is reckoned in a processor's cycles. Datasheets' rates, by capability, of bytes of K multiplied for an
# output: bf16 and FP8 are alike then. (A 5090's FP8 is faster, up to 958; for the choice 512 will do.)
MULTIPLIED = {(8, 9): 512, (9, 0): 4096, (12, 0): 512}
L2_BYTES = 64
# Cycles without an mma, estimated: of a piece, until its first operands are there, two trips to memory; of a step, two
# barriers and the way from shared memory into registers.
FILL, PAUSE = 1500, 100


@triton.jit
def share(T, N: tl.constexpr, STEPS: tl.constexpr, SHARED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """[first, last) of the steps of all tiles that this program has: one tile's, or as many as every other program."""
    program = tl.program_id(0)
    if SHARED:
        programs = tl.num_programs(0)
        steps = tl.cdiv(T, BM) * tl.cdiv(N, BN) * STEPS
        return program * steps // programs, (program + 1) * steps // programs
    return program * STEPS, (program + 1) * STEPS


@triton.jit
def place(tile, begin, end, T, STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """First row and first column of a tile, and [first, last) of its steps that lie within begin … end-1 of all."""
    tall = tl.cdiv(T, BM)
    first, last = tl.maximum(begin - tile * STEPS, 0), tl.minimum(end - tile * STEPS, STEPS)
    return (tile % tall) * BM, (tile // tall) * BN, first, last


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
def total(acc, PARTS, COUNTS, tile, first, last, T, N: tl.constexpr, STEPS: tl.constexpr):
    """The sum over all steps of the tile, of which acc has first … last-1; and whether this program is the one that has it.

    Each further piece is of the next program, or of the next tile, or of both: program + tile numbers them all.
    """
    whole = True
    if last - first < STEPS:
        BM: tl.constexpr = acc.shape[0]
        BN: tl.constexpr = acc.shape[1]
        part = PARTS + tile * (BM * BN) + tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        programs = tl.num_programs(0)
        steps = tl.cdiv(T, BM) * tl.cdiv(N, BN) * STEPS
        one = ((tile * STEPS + 1) * programs - 1) // steps  # program of the tile's first step
        end = ((tile + 1) * STEPS * programs - 1) // steps + 1
        tl.store(part + tl.program_id(0) * (BM * BN), acc)
        tl.debug_barrier()  # all warps' parts are written before one thread says so
        whole = tl.atomic_add(COUNTS + tile, 1, sem="acq_rel", scope="gpu") == end - one - 1
        if whole:
            acc = tl.zeros((BM, BN), tl.float32)
            for program in range(one, end):
                acc += tl.load(part + program * (BM * BN), cache_modifier=".cg")  # .cg: not from a stale L1
            tl.atomic_xchg(COUNTS + tile, 0)
    return acc, whole


@triton.jit
def store(acc, OUT, row, column, T, N: tl.constexpr, GATED: tl.constexpr):
    """acc [BM, BN] fp32 from first row `row` and first column `column` on, gated or as it is, rounded to OUT's dtype."""
    BM: tl.constexpr = acc.shape[0]
    BN: tl.constexpr = acc.shape[1]
    WIDTH: tl.constexpr = N // 2 if GATED else N
    rows = row + tl.arange(0, BM)[:, None]
    if GATED:
        gate, up = tl.split(acc.reshape(BM, BN // 2, 2))
        out = gated_gelu(gate, up, OUT.dtype.element_ty)
        columns = column // 2 + tl.arange(0, BN // 2)[None, :]
    else:
        out = acc
        columns = column + tl.arange(0, BN)[None, :]
    live = (rows < T) & (columns < WIDTH)
    tl.store(OUT + rows.to(tl.int64) * WIDTH + columns, out.to(OUT.dtype.element_ty), live)


@dataclass(frozen=True, slots=True)
class Job:
    """How a product is launched."""

    capability: tuple[int, int]
    tile: Tile
    shared: bool  # tiles between programs
    grid: tuple[int]
    memory: tuple[Tensor, Tensor]  # the parts of sums and the counters; where no tile is shared nobody looks

    @property
    def constants(self) -> dict[str, int]:
        return {"SHARED": self.shared, "BM": self.tile.m, "BN": self.tile.n, "BK": self.tile.k}


def job(
    tiles: Mapping[tuple[int, int], Any],
    x: Tensor,
    T: int,
    N: int,
    K: int,
    tile: Tile | None = None,
    programs: int | None = None,
) -> Job:
    """The launch of x [T, K] times [N, K]ᵀ, by the best of the capability's tiles or by a given one."""
    gpu = gpu_of(x)
    candidates: Any = (tile,) if tile else choose(tiles, gpu)
    tile, planned = plan(candidates, T, N, K, x.shape[1] * x.element_size(), gpu)
    count, steps = _tiles(tile, T, N), _cdiv(K, tile.k)
    programs = min(programs or planned, count * steps)
    counts = counters(x.device)
    if programs == count:
        return Job(gpu.capability, tile, False, (count,), (counts, counts))
    if not _shareable(count, steps, programs):
        raise ValueError(f"_gemm: {count} tiles of {tile}, {steps} steps each, between {programs} programs")
    parts = x.new_empty(count + programs - 1, tile.m, tile.n, dtype=torch.float32)
    return Job(gpu.capability, tile, True, (programs,), (parts, counts))


@cache
def plan(tiles: tuple[Tile, ...], T: int, N: int, K: int, row_bytes: int, gpu: Gpu) -> tuple[Tile, int]:
    """The tile and the number of programs, one a tile or one a processor, by the time of the busiest processor."""
    times = [
        (_time(tile, programs, T, N, K, row_bytes, gpu), i, programs)
        for i, tile in enumerate(tiles)
        for programs in _programs(tile, T, N, K, gpu)
    ]
    _, i, programs = min(times)
    return tiles[i], programs


def _programs(tile: Tile, T: int, N: int, K: int, gpu: Gpu) -> tuple[int, ...]:
    count, steps = _tiles(tile, T, N), _cdiv(K, tile.k)
    shared = min(gpu.processors, count * steps)
    return (count, shared) if _shareable(count, steps, shared) else (count,)


def _shareable(count: int, steps: int, programs: int) -> bool:
    """Each tile has a counter, and the kernel's int32 hold the shares' bounds."""
    return count <= COUNTERS and (programs + 1) * count * steps < 2**31


def _time(tile: Tile, programs: int, T: int, N: int, K: int, row_bytes: int, gpu: Gpu) -> float:
    """Cycles of the busiest processor: its steps; for each piece of a tile the fill; for each part, one written, one read."""
    steps, count = _cdiv(K, tile.k), _tiles(tile, T, N)
    rate = MULTIPLIED[max((c for c in MULTIPLIED if c <= gpu.capability), default=min(MULTIPLIED))]
    deep = tile.k * row_bytes / K
    step = max(tile.m * tile.n * deep / rate, (tile.m + tile.n) * deep / L2_BYTES) + PAUSE
    if programs == count:
        return _cdiv(count, gpu.processors) * (steps * step + FILL)
    exchange = 2 * 4 * tile.m * tile.n / L2_BYTES
    bounds = [program * count * steps // programs for program in range(programs + 1)]
    return max(
        (end - begin) * step + (_cdiv(end, steps) - begin // steps) * FILL + _parts(begin, end, steps) * exchange
        for begin, end in pairwise(bounds)
    )


def _parts(begin: int, end: int, steps: int) -> int:
    """How many tiles have some of their steps within begin … end-1, and others not."""
    return sum(not begin <= tile * steps <= end - steps for tile in {begin // steps, (end - 1) // steps})


def _tiles(tile: Tile, T: int, N: int) -> int:
    return _cdiv(T, tile.m) * _cdiv(N, tile.n)


@cache
def counters(device: torch.device) -> Tensor:
    """One a device, for all launches of a stream: each leaves them at 0."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
