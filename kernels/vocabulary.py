"""The end of a denoising step: from the last hidden rows to draft, entropy, sample and the next step's conditioning.

    hidden ─ · Eᵀ ─► raw ─ softcap ─ / temperature ─► z ─┬─ argmax ──────────────► draft
                                                         ├─ H(softmax z) ────────► entropy
                                                         ├─ exponential race ────► sampled
                                                         └─ softmax z ─ · E · s ─► soft

    reference   raw, z and p rounded to the model's dtype where transformers rounds them. One tensor [T, V] of that
                dtype, 134 MB in bf16, is raw and then p:
                    logits ─ draw ─ settle ─ probabilities ─ weigh ─ combine          E is read twice
    fast        raw and z in fp32. A chunk of the vocabulary at a time, whose E stays in the L2 for its second product:
                    (logits ─ draw ─ weigh) for every chunk ─ settle ─ combine        E is read once

Shapes    hidden [T, D] in the model's dtype, or FP8 with an FP8 E; E [V, D], plain or FP8; temperature fp32 [1].
Precision in `logits`, `draw` and `soft`. No tensor of T × V fp32 exists in either mode.
Traffic   bf16, T = 256, V = 262,144, D = 2,816, in GB:       E      raw, p     sums
              reference: raw out and twice in, p out and in   2.95   0.67       0.1
              fast                                            1.48   in the L2  0.02
          z is computed twice in the reference mode; to keep it instead would write 0.13 GB more.
          At 256 rows each of the two products, 378 Gflop, takes longer than its reading of E on all three cards (4090:
          2.3 ms against 1.6, 5090: 1.8 against 0.9, H200: 0.38 against 0.34). Reading E once therefore saves power and
          leaves bandwidth free, but by itself no time: what the fast mode gains is raw and p, and it pays with three
          launches a chunk, each with a last wave of its own. An FP8 hidden halves the first product's time.
Source    transformers 5.24; sampler.py, noise.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma_local.noise import LANES, row_blocks
from dgemma_local.quant import Fp8

from ._launch import ADA, BLACKWELL, HOPPER, Gpu, gpu_of
from ._philox import Key
from .draw import Drawn, Parts, draw, draw_twin, scaled_twin, settle
from .draw import tile_for as draw_tile
from .logits import logits, logits_twin
from .logits import tile_for as logits_tile
from .soft import combine, probabilities, soft_twin, splits_for, weigh
from .soft import tile_for as soft_tile

Rows = Tensor | Fp8
__all__ = ["Key", "Step", "chunk_ids", "vocabulary_step", "vocabulary_step_twin"]

# Of the L2 (72, 50 and 96 MB), what a chunk of E may take; its logits, their exponentials and the sums are 20 MB more.
CHUNK_BYTES = {ADA.capability: 48 << 20, HOPPER.capability: 48 << 20, BLACKWELL.capability: 72 << 20}
# What a split of the second product costs, as a share of its time: its fp32 sums out and in, 5.8 MB, against 738 MB · 2
# of memory once for the whole vocabulary; through the L2 for every chunk.
SPLIT_COST, CHUNK_SPLIT_COST = 0.003, 0.02


@dataclass(frozen=True, slots=True)
class Step:
    """What a denoising step comes to."""

    draft: Tensor  # int64 [T], argmax z
    entropy: Tensor  # fp32 [T], nats
    sampled: Tensor  # int64 [T], a sample of softmax z for every row
    soft: Tensor | None  # [T, D] in the model's dtype, s · softmax(z) @ E


def vocabulary_step_twin(
    hidden: Rows,
    E: Rows,
    softcap: float,
    temperature: Tensor,
    embed_scale: float,
    key: Key,
    reference: bool = True,
    soft: bool = True,
    dtype: torch.dtype | None = None,
) -> Step:
    """The same in torch, by blocks of rows; fp64 in, fp64 all the way. `dtype` is the model's, if hidden is FP8."""
    dtype = dtype or (hidden.dtype if isinstance(hidden, Tensor) else torch.bfloat16)
    raw = logits_twin(hidden, E, dtype if reference else torch.promote_types(dtype, torch.float32))
    drawn, softened = [], []
    for rows in row_blocks(*raw.shape):
        z = scaled_twin(raw[rows], softcap, temperature)
        drawn.append(draw_twin(z, key, rows.start))
        if soft:
            softened.append(soft_twin(z, E, embed_scale, dtype, reference))
    return Step(
        torch.cat([d.draft for d in drawn]),
        torch.cat([d.entropy for d in drawn]),
        torch.cat([d.sampled for d in drawn]),
        torch.cat(softened) if soft else None,
    )


def vocabulary_step(
    hidden: Rows,
    E: Rows,
    softcap: float,
    temperature: Tensor,
    embed_scale: float,
    key: Key,
    reference: bool = True,
    soft: bool = True,
    dtype: torch.dtype | None = None,
    chunk: int | None = None,
) -> Step:
    """hidden [T, D], E [V, D] -> Step. Nothing waits for the host; temperature and key are read on the device.

    `dtype` is the model's, if hidden is FP8 and does not say; `chunk` the ids at a time of the fast mode.
    """
    if hidden.shape[1] != E.shape[1] or temperature.shape != (1,) or temperature.dtype != torch.float32:
        raise ValueError(
            f"vocabulary_step: hidden {tuple(hidden.shape)}, E {tuple(E.shape)}, "
            f"temperature {tuple(temperature.shape)} {temperature.dtype}"
        )
    if key.numbers.shape != (3,) or key.step.shape != (1,) or {key.numbers.dtype, key.step.dtype} != {torch.int32}:
        raise ValueError(f"vocabulary_step: key {key}")
    dtype = dtype or (hidden.dtype if isinstance(hidden, Tensor) else torch.bfloat16)
    if reference:
        return _reference(hidden, E, softcap, temperature, embed_scale, key, soft, dtype)
    return _fast(hidden, E, softcap, temperature, embed_scale, key, soft, dtype, chunk)


def _reference(
    hidden: Rows,
    E: Rows,
    softcap: float,
    temperature: Tensor,
    embed_scale: float,
    key: Key,
    soft: bool,
    dtype: torch.dtype,
) -> Step:
    (T, D), V, device = hidden.shape, E.shape[0], E.device
    scale = E.scale if isinstance(E, Fp8) else None
    raw = torch.empty(T, V, dtype=dtype, device=device)  # in the end p
    peaks = torch.empty(T, -(-V // logits_tile(hidden, E, False).n), device=device)
    tiles = -(-V // draw_tile(True, gpu_of(raw)).k)
    parts = Parts.empty(T, 1, tiles, tiles, device)
    logits(hidden, E, raw, peaks, 0, V)
    draw(raw, peaks, None, None, softcap, temperature, key, parts, 0, V, 0, reference=True)
    drawn, total = settle(parts, V, reference=True)
    if not soft:
        return _step(drawn, None)
    probabilities(raw, V, softcap, temperature, parts, total, scale)
    sums = _sums(raw, E, T, D, V, SPLIT_COST)
    weigh(raw, E, sums, parts.centre, 0, V, 0)
    return _step(drawn, combine(sums, total, embed_scale, dtype, reference=True))


def _fast(
    hidden: Rows,
    E: Rows,
    softcap: float,
    temperature: Tensor,
    embed_scale: float,
    key: Key,
    soft: bool,
    dtype: torch.dtype,
    chunk: int | None,
) -> Step:
    (T, D), V, device = hidden.shape, E.shape[0], E.device
    scale = E.scale if isinstance(E, Fp8) else None
    chunk = min(chunk or chunk_ids(gpu_of(_data(E)), hidden, E), -(-V // LANES) * LANES)
    chunks = -(-V // chunk)
    raw = torch.empty(T, chunk, device=device)
    weights = torch.empty(T, chunk, dtype=dtype, device=device) if soft else None
    span = draw_tile(False, gpu_of(raw)).k
    per_chunk = -(-chunk // span)
    tiles = (chunks - 1) * per_chunk + -(-(V - (chunks - 1) * chunk) // span)
    parts = Parts.empty(T, chunks, per_chunk, tiles, device)
    sums = _sums(raw, E, T, D, chunk, CHUNK_SPLIT_COST) if soft else None
    for i in range(chunks):
        begin, end = i * chunk, min((i + 1) * chunk, V)
        peaks = torch.empty(T, -(-(end - begin) // logits_tile(hidden, E, True).n), device=device)
        logits(hidden, E, raw, peaks, begin, end, resident=True)
        draw(raw, peaks, weights, scale, softcap, temperature, key, parts, begin, end, i, reference=False)
        if weights is not None and sums is not None:
            weigh(weights, E, sums, parts.centre, begin, end, i, resident=True)
    drawn, total = settle(parts, V, reference=False)
    return _step(drawn, None if sums is None else combine(sums, total, embed_scale, dtype, reference=False))


def _data(rows: Rows) -> Tensor:
    return rows.codes if isinstance(rows, Fp8) else rows


def _sums(p: Tensor, E: Rows, T: int, D: int, ids: int, cost: float) -> Tensor:
    """Room for the second product's splits, fp32 [splits, T, D]."""
    tile = soft_tile(p, E)
    programs = -(-T // tile.m) * -(-D // tile.n)
    return torch.empty(splits_for(gpu_of(p), programs, ids, tile.k, cost), T, D, device=p.device)


def _step(drawn: Drawn, soft: Tensor | None) -> Step:
    return Step(drawn.draft, drawn.entropy, drawn.sampled, soft)


def chunk_ids(gpu: Gpu, hidden: Rows, E: Rows) -> int:
    """Ids of a chunk of the fast mode: whole waves of the first product, as many as their E leaves room for in the L2."""
    tile, span = logits_tile(hidden, E, True), draw_tile(False, gpu).k
    room = CHUNK_BYTES.get(gpu.capability, CHUNK_BYTES[HOPPER.capability]) // (E.shape[1] * _data(E).element_size())
    wave = max(1, gpu.processors // -(-hidden.shape[0] // tile.m)) * tile.n
    ids = room // wave * wave if wave <= room else room
    return max(ids // span * span, span)
