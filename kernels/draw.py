"""What a denoising step wants of its logits, one pass over them: draft, entropy, sample, and what softmax is made of.

    z      = c · tanh(raw / c) / temperature                     softcap, then temperature
    d      = z - centre                                          centre: the largest z of this row, as far as known
    draft  = argmax z,  the lowest id                            Z = Σ e^d,  S = Σ e^d · d,  entropy = log Z - S / Z
    sample = argmin E · e^-d                                     = argmax e^d / E: the exponential race, E of `noise`

    ids of a tile       0 … 31  32 … 63  64 … 95  96 … 127 │ 128 …          one Philox call gives a lane four words,
    word of the call    0       1        2        3        │ 0              for ids 32 apart
    lane (its group)    0 … 31  0 … 31   0 … 31   0 … 31   │ 32 …

Two launches: `_draw` leaves one number of each kind for every row and tile of `span` ids, `_settle` combines a row's
tiles. Where the vocabulary comes in chunks, a chunk's centre is the largest z up to and with it, and what it left is
rescaled to the last chunk's. Raw logits are read with the peaks of their blocks (`logits`), so that the centre is known
before the first exponential, and so is which tiles cannot win the race: none that lies `noise.FARTHEST` below the centre.
Their words are not even drawn; where a row is sure of its id, that is most of them.

Shapes    raw [T, ids], the model's dtype (reference) or fp32 (fast); peaks fp32 [T, blocks]; temperature fp32 [1].
          e^d, times an FP8 embedding's scale of that id, goes to `weights` where they are wanted: in the fast mode in the
          model's dtype, for an embedding that lies across (`soft_fp8`) in E4M3, there of the rounded z in the reference mode.
Precision everything in fp32. tanh 1.8 ulp, e^x 2 ulp, E 1.1 ulp: draft and sample are the twin's but for logits that
          differ by about an ulp of z. A tie goes to the lowest id: within a tile by comparing ids, between tiles too.
Traffic   reference 2·T·V bytes in bf16, fast 4 in and 2 out for a logit, in the L2; E4M3 weights are T·V more; statistics
          28 bytes for every `span` ids.
Grid      (rows / m, ids / span). Not in the product's epilogue: tried there, it ran at 255 registers and spilled.
Source    noise.py, sampler.py; transformers 5.24 generation_diffusion_gemma.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma_local.noise import FARTHEST, LANES, WORD, PhiloxNoise, Purpose, exponential_race

from . import _philox
from ._e4m3 import to_e4m3
from ._launch import ADA, BLACKWELL, HOPPER, Cost, Gpu, Tile, Tiles, choose, gpu_of, launch
from ._philox import Key
from ._triton import tl, triton

# m rows, n lanes of 4 ids, k ids a program: one warp a row, so that no program waits for another row's race. In the fast
# mode a chunk has to fill the card; what a program does once costs 35 instructions a logit at 512 ids, 4 at 4,096.
REFERENCE_TILES: Tiles = dict.fromkeys((g.capability for g in (ADA, HOPPER, BLACKWELL)), Tile(1, 128, 4096, 1, 1))
FAST_TILES: Tiles = dict.fromkeys((g.capability for g in (ADA, HOPPER, BLACKWELL)), Tile(1, 128, 1024, 1, 1))
SETTLED_ROWS = 4
OPERATIONS = 80  # instructions for a logit
_LANE = tl.constexpr(LANES // 4)
_LANES = tl.constexpr(LANES)
_FARTHEST = tl.constexpr(FARTHEST)
_LOG2E = tl.constexpr(1.4426950408889634)
_SAMPLE = tl.constexpr(int(Purpose.SAMPLE))
_FAR = tl.constexpr(-1e30)  # stands for -inf: times e^-inf = 0 it is 0
_INF = tl.constexpr(float("inf"))
_RCP = tl.constexpr("rcp.approx.ftz.f32 $0, $1;")


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a step wants of its logits."""

    draft: Tensor  # int64 [T]
    entropy: Tensor  # fp32 [T], nats
    sampled: Tensor  # int64 [T]


@dataclass(frozen=True, slots=True)
class Parts:
    """What the launches of `draw` leave of every tile for `settle`."""

    centre: Tensor  # fp32 [T, chunks]: the largest z up to and with each chunk
    statistic: Tensor  # fp32 [5, T, tiles]: largest z, Z, S, score of the race, Z of the rounded z
    id: Tensor  # int32 [2, T, tiles]: of the largest z, of the race's winner
    tiles_per_chunk: int

    @classmethod
    def empty(cls, rows: int, chunks: int, tiles_per_chunk: int, tiles: int, device: torch.device) -> "Parts":
        return cls(
            torch.empty(rows, chunks, device=device),
            torch.empty(5, rows, tiles, device=device),
            torch.empty(2, rows, tiles, dtype=torch.int32, device=device),
            tiles_per_chunk,
        )


# ── twins ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def scaled_twin(raw: Tensor, softcap: float, temperature: Tensor) -> Tensor:
    """Raw logits -> z in fp32 or wider, as model.head and sampler.advance have it."""
    wide = raw.to(torch.promote_types(raw.dtype, torch.float32), copy=True)
    return wide.div_(softcap).tanh_().mul_(softcap).div_(temperature.to(wide.dtype))


def draw_twin(z: Tensor, key: Key, first_row: int = 0) -> Drawn:
    """z [T, V], canvas positions from `first_row` on; all rows draw."""
    centred = z - z.amax(-1, keepdim=True)
    weight = centred.exp()
    total = weight.sum(-1)
    entropy = total.log() - (weight * centred.clamp_min(torch.finfo(z.dtype).min)).sum(-1) / total
    low, high, stream = (n & WORD for n in key.numbers.tolist())
    noise = PhiloxNoise((high << 32) + low, len(z), z.shape[1], z.device, stream >> 24)
    positions = torch.arange(first_row, first_row + len(z), device=z.device)
    variates = noise.variates(stream & 0xFFFFFF, int(key.step), positions)
    return Drawn(z.argmax(-1), entropy, exponential_race(z, variates))


# ── kernels ───────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _tanh(x):
    """1.8 ulp: an odd polynomial (minimax, fitted for this) below 0.55, 1 - 2 / (e^2x + 1) beyond."""
    square = x * x
    p = tl.fma(square, 0.01645876094698906, -0.05268414691090584)
    p = tl.fma(p, square, 0.13320942223072052)
    p = tl.fma(p, square, -0.33332958817481995)
    near = tl.fma(p * square, x, x)
    grown = tl.exp2(x * 2.885390081777927) + 1.0
    shrunk = tl.inline_asm_elementwise(_RCP, "=f,f", [grown], dtype=tl.float32, is_pure=True, pack=1)
    return tl.where(tl.abs(x) < 0.55, near, tl.fma(shrunk, -2.0, 1.0))


@triton.jit
def scaled(raw, cooling, SOFTCAP: tl.constexpr):
    """Raw logits -> z; `cooling` is 1 / temperature. The same bits in every kernel: each fma is spelled out."""
    return _tanh(raw.to(tl.float32) * (1.0 / SOFTCAP)) * SOFTCAP * cooling


@triton.jit
def _lowest(values, best, ids):
    """[m, n], [m], [m, n] -> [m]: the lowest id among those that hold the best value."""
    return tl.min(tl.where(values == best[:, None], ids, 2147483647), 1)


@triton.jit(do_not_specialize=["chunk", "chunks", "tiles", "tile_before"])
def _draw(
    RAW,
    OUT,
    PEAK,
    CENTRE,
    STATISTIC,
    ID,
    TEMPERATURE,
    KEY,
    STEP,
    E_SCALE,
    rows,
    begin,
    end,
    chunk,
    chunks,
    blocks,
    tiles,
    tile_before,
    raw_stride,
    out_stride,
    peak_stride,
    SOFTCAP: tl.constexpr,
    REFERENCE: tl.constexpr,
    STORE: tl.constexpr,
    E_SCALED: tl.constexpr,
    CODES: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCKS: tl.constexpr,
    BM: tl.constexpr,
    G: tl.constexpr,
    SPAN: tl.constexpr,
):
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    live = row < rows
    row = tl.minimum(row, rows - 1)
    tile = tl.program_id(1)
    cooling = tl.div_rn(1.0, tl.load(TEMPERATURE))

    block = tl.arange(0, BLOCKS)
    peak = tl.load(PEAK + row[:, None] * peak_stride + block[None, :], (block < blocks)[None, :], other=-_INF)
    centre = scaled(tl.max(peak, 1), cooling, SOFTCAP)
    before = tl.load(CENTRE + row * chunks + chunk - 1, live & (chunk > 0), other=-_INF)
    centre = tl.maximum(centre, before)
    tl.store(CENTRE + row * chunks + chunk, centre, live & (tile == 0))
    rounded_centre = centre.to(RAW.dtype.element_ty).to(tl.float32)

    lane = tl.arange(0, G)
    offset = lane // _LANE * _LANES + lane % _LANE  # of the first of a lane's four ids
    total = tl.zeros((BM, G), tl.float32)
    centred = tl.zeros((BM, G), tl.float32)
    rounded_total = tl.zeros((BM, G), tl.float32)
    best = tl.full((BM, G), _FAR, tl.float32)  # as far as an id past the end, which so never wins, not even among NaN
    best_at = tl.zeros((BM, G), tl.int32)
    low = tl.full((BM, G), _INF, tl.float32)
    low_at = tl.zeros((BM, G), tl.int32)
    raw_at = RAW + row.to(tl.int64)[:, None] * raw_stride + tile * SPAN + offset[None, :]
    out_at = OUT + row.to(tl.int64)[:, None] * out_stride + tile * SPAN + offset[None, :]
    for sub in range(SPAN // (4 * G)):
        inside = begin + tile * SPAN + sub * (4 * G) + offset
        powers = ()
        for j in tl.static_range(4):
            if EVEN:
                z = scaled(tl.load(raw_at + j * _LANE), cooling, SOFTCAP)
            else:
                valid = (inside + j * _LANE < end)[None, :]
                z = tl.where(valid, scaled(tl.load(raw_at + j * _LANE, valid, other=0.0), cooling, SOFTCAP), _FAR)
            better = z > best
            best = tl.where(better, z, best)
            best_at = tl.where(better, sub * 4 + j, best_at)
            power = (z - centre[:, None]) * _LOG2E
            weight = tl.exp2(power)
            total += weight
            centred += weight * power
            powers = powers + (power,)  # type: ignore[assignment]  # noqa: RUF005  triton unpacks no tuple
            if REFERENCE:
                apart = z.to(RAW.dtype.element_ty).to(tl.float32) - rounded_centre[:, None]
                weight = tl.exp2(apart * _LOG2E)
                rounded_total += weight
            if STORE:
                if E_SCALED:
                    scale_at = inside + j * _LANE
                    scale = tl.load(E_SCALE + (scale_at if EVEN else tl.minimum(scale_at, end - 1)))
                    weight *= scale.to(tl.float32)[None, :]
                stored = live[:, None] if EVEN else live[:, None] & valid
                tl.store(out_at + j * _LANE, to_e4m3(weight) if CODES else weight.to(OUT.dtype.element_ty), stored)
        ahead = tl.max(tl.max(best, 1) - centre, 0)
        if ahead > -_FARTHEST:
            group = (begin + tile * SPAN) // 4 + sub * G + lane
            words = _philox.words(KEY, STEP, _SAMPLE, row[:, None], group[None, :])
            for j in tl.static_range(4):
                score = _philox.exponential(words[j]) * tl.exp2(-powers[j])
                better = score < low
                low = tl.where(better, score, low)
                low_at = tl.where(better, sub * 4 + j, low_at)
        raw_at += 4 * G
        out_at += 4 * G

    at = row * tiles + tile_before + tile
    plane = rows * tiles
    first = begin + tile * SPAN + offset[None, :]
    top = tl.max(best, 1)
    tl.store(STATISTIC + at, top, live)
    tl.store(STATISTIC + plane + at, tl.sum(total, 1), live)
    tl.store(STATISTIC + 2 * plane + at, tl.sum(centred, 1) * (1.0 / _LOG2E), live)
    winner = tl.min(low, 1)
    tl.store(STATISTIC + 3 * plane + at, winner, live)
    if REFERENCE:
        tl.store(STATISTIC + 4 * plane + at, tl.sum(rounded_total, 1), live)
    tl.store(ID + at, _lowest(best, top, first + best_at // 4 * (4 * G) + best_at % 4 * _LANE), live)
    tl.store(ID + plane + at, _lowest(low, winner, first + low_at // 4 * (4 * G) + low_at % 4 * _LANE), live)


@triton.jit
def _settle(
    CENTRE,
    STATISTIC,
    ID,
    DRAFT,
    ENTROPY,
    SAMPLED,
    TOTAL,
    rows,
    vocabulary,
    chunks,
    tiles,
    tiles_per_chunk,
    REFERENCE: tl.constexpr,
    BM: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    live = row < rows
    row = tl.minimum(row, rows - 1)
    tile = tl.arange(0, TILES)
    valid = (tile < tiles)[None, :] & live[:, None]
    at = row[:, None] * tiles + tile[None, :]
    plane = rows * tiles
    last = tl.load(CENTRE + row * chunks + chunks - 1)
    own = tl.load(CENTRE + row[:, None] * chunks + (tile // tiles_per_chunk)[None, :], valid, other=0.0)
    apart = tl.where(valid, own - last[:, None], 0.0)  # <= 0
    shrink = tl.exp2(apart * _LOG2E)

    z = tl.load(STATISTIC + at, valid, other=-_INF)
    best = tl.max(z, 1)
    draft = tl.load(ID + at, valid, other=2147483647)
    tl.store(DRAFT + row, _lowest(z, best, draft).to(tl.int64), live)
    part = tl.load(STATISTIC + plane + at, valid, other=0.0)
    total = tl.sum(part * shrink, 1)
    centred = tl.load(STATISTIC + 2 * plane + at, valid, other=0.0)
    centred = tl.sum(shrink * (centred + part * apart), 1)
    tl.store(ENTROPY + row, tl.log(total) - centred / total, live)
    score = tl.load(STATISTIC + 3 * plane + at, valid, other=_INF) * tl.exp2(-apart * _LOG2E)
    winner = tl.min(score, 1)
    sampled = tl.load(ID + plane + at, valid, other=2147483647)
    # of a row of NaN no score is the winner, and the id must be one all the same
    tl.store(SAMPLED + row, tl.minimum(_lowest(score, winner, sampled), vocabulary - 1).to(tl.int64), live)
    if REFERENCE:
        total = tl.sum(tl.load(STATISTIC + 4 * plane + at, valid, other=0.0), 1)
    tl.store(TOTAL + row, total, live)


# ── wrappers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def tile_for(reference: bool, gpu: Gpu) -> Tile:
    return choose(REFERENCE_TILES if reference else FAST_TILES, gpu)


def draw(
    raw: Tensor,
    peaks: Tensor,
    weights: Tensor | None,
    scale: Tensor | None,
    softcap: float,
    temperature: Tensor,
    key: Key,
    parts: Parts,
    begin: int,
    end: int,
    chunk: int,
    reference: bool,
    tile: Tile | None = None,
) -> None:
    """Ids begin … end-1, the `chunk`-th run of them: raw [T, ≥ end - begin], peaks [T, their blocks] -> `parts`.

    Into `weights` [T, ≥ end - begin], where given, go the exponentials, times `scale` [V]. `begin` is a multiple of 128.
    In the reference mode the sum of the rounded z's exponentials is taken too, and the one chunk is the vocabulary.
    """
    tile = tile or tile_for(reference, gpu_of(raw))
    T, ids = raw.shape[0], end - begin
    out = raw if weights is None else weights
    tiles = -(-ids // tile.k)
    before = chunk * parts.tiles_per_chunk
    if (
        begin % LANES
        or tile.k % (4 * tile.n)
        or tile.n % (LANES // 4)
        or not 0 < ids <= min(raw.shape[1], out.shape[1])
        or peaks.shape[0] != T
        or before + tiles > parts.id.shape[2]
    ):
        raise ValueError(
            f"draw: raw {tuple(raw.shape)}, weights {tuple(out.shape)}, peaks {tuple(peaks.shape)}, "
            f"ids {begin} … {end - 1}, chunk {chunk}, parts {tuple(parts.id.shape)}, {tile}"
        )
    launch(
        _draw, (-(-T // tile.m), tiles), raw, out, peaks, parts.centre, parts.statistic, parts.id, temperature,
        key.numbers, key.step, temperature if scale is None else scale, T, begin, end, chunk, parts.centre.shape[1],
        peaks.shape[1], parts.id.shape[2], before, raw.stride(0), out.stride(0), peaks.stride(0),
        cost=lambda: draw_cost(T, ids, tiles, reference, raw, weights),
        warps=tile.warps, stages=tile.stages, SOFTCAP=softcap, REFERENCE=reference, STORE=weights is not None,
        E_SCALED=scale is not None, CODES=out.dtype == torch.float8_e4m3fn, EVEN=ids % tile.k == 0,
        BLOCKS=1 << (peaks.shape[1] - 1).bit_length(), BM=tile.m, G=tile.n, SPAN=tile.k,
    )  # fmt: skip


def settle(parts: Parts, vocabulary: int, reference: bool) -> tuple[Drawn, Tensor]:
    """-> what the step wants, and the sums that softmax divides by, fp32 [T]: of the rounded z in the reference mode."""
    (T, chunks), tiles, device = parts.centre.shape, parts.id.shape[2], parts.id.device
    draft, sampled = (torch.empty(T, dtype=torch.int64, device=device) for _ in range(2))
    entropy, total = (torch.empty(T, device=device) for _ in range(2))
    launch(
        _settle, (-(-T // SETTLED_ROWS),), parts.centre, parts.statistic, parts.id, draft, entropy, sampled, total, T,
        vocabulary, chunks, tiles, parts.tiles_per_chunk,
        cost=lambda: Cost(T * (32 * tiles + 28)),
        warps=4, stages=1, REFERENCE=reference, BM=SETTLED_ROWS, TILES=1 << (tiles - 1).bit_length(),
    )  # fmt: skip
    return Drawn(draft, entropy, sampled), total


def draw_cost(T: int, ids: int, tiles: int, reference: bool, raw: Tensor, weights: Tensor | None) -> Cost:
    """Logits in and weights out, where they go through memory and not the L2; all rows and tiles draw."""
    each = raw.element_size() + (0 if weights is None else weights.element_size())
    return Cost(T * ((ids * each if reference else 0) + 28 * tiles), T * ids * OPERATIONS)
