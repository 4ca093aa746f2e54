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

An FP8 embedding may lie across as well (`soft_fp8`), twice its memory: then the second product runs at the FP8 rate too.
`draw` writes its p as it goes, so that the reference mode needs no pass of its own for p, and each of the two copies is
read once in either mode.

Shapes    hidden [T, D] in the model's dtype, or FP8 with an FP8 E; E [V, D], plain or FP8; temperature fp32 [1].
Precision in `logits`, `draw` and `soft`. No tensor of T × V fp32 exists in either mode.
Traffic   bf16, T = 256, V = 262,144, D = 2,816, in GB:       E      raw, p     sums
              reference: raw out and twice in, p out and in   2.95   0.67       0.1
              fast                                            1.48   in the L2  0.02
          FP8, across: reference raw out and in, p out and in 1.48   0.40       0.1
          z is computed twice in the reference mode; to keep it instead would write 0.13 GB more.
          At 256 rows each of the two products, 378 Gflop, takes longer than its reading of E on all three cards (4090:
          2.3 ms against 1.6, 5090: 1.8 against 0.9, H200: 0.38 against 0.34). Reading E once therefore saves power and
          leaves bandwidth free, but by itself no time: what the fast mode gains is raw and p, and it pays with three
          launches a chunk, each with a last wave of its own. An FP8 hidden halves the first product's time, E across the
          second's; then the reference mode takes as long as the fast one, in 5 launches instead of 50.
Source    transformers 5.24; sampler.py, noise.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma_local.noise import LANES, row_blocks
from dgemma_local.quant import Fp8

from ._launch import ADA, BLACKWELL, HOPPER, Gpu, contiguous, gpu_of
from ._out import filled, target
from ._philox import Key
from .draw import Drawn, Parts, draw, draw_twin, scaled_twin, settle
from .draw import tile_for as draw_tile
from .logits import logits, logits_twin
from .logits import tile_for as logits_tile
from .soft import combine, probabilities, soft_twin, splits_for, weigh
from .soft import tile_for as soft_tile
from .soft_fp8 import Across, padded, soft_fp8_twin, transpose_codes, weigh_codes
from .soft_fp8 import tile_for as soft_fp8_tile

Rows = Tensor | Fp8
__all__ = ["Across", "Key", "Step", "chunk_ids", "transpose_codes", "vocabulary_step", "vocabulary_step_twin"]

# Of the L2 (72, 50 and 96 MB), what a chunk of E may take; its logits, their exponentials and the sums are 20 MB more.
CHUNK_BYTES = {ADA.capability: 48 << 20, HOPPER.capability: 48 << 20, BLACKWELL.capability: 72 << 20}
# What a split of the second product costs, as a share of its time: its fp32 sums out and in, 5.8 MB, against 738 MB · 2
# of memory once for the whole vocabulary; through the L2 for every chunk. At the FP8 rate, twice the share.
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
    across: Across | None = None,
    chunk: int | None = None,
    out: Tensor | None = None,
) -> Step:
    """The same in torch, by blocks of rows; fp64 in, fp64 all the way. `dtype` is the model's, if hidden is FP8.

    `chunk` matters with `across` alone, whose p are rounded about the largest z so far.
    """
    dtype = dtype or (hidden.dtype if isinstance(hidden, Tensor) else torch.bfloat16)
    raw = logits_twin(hidden, E, dtype if reference else torch.promote_types(dtype, torch.float32))
    drawn, softened = [], []
    for rows in row_blocks(*raw.shape):
        z = scaled_twin(raw[rows], softcap, temperature)
        drawn.append(draw_twin(z, key, rows.start))
        if soft and across is not None:
            softened.append(soft_fp8_twin(z, across, embed_scale, dtype, reference, None if reference else chunk))
        elif soft:
            softened.append(soft_twin(z, E, embed_scale, dtype, reference))
    return Step(
        torch.cat([d.draft for d in drawn]),
        torch.cat([d.entropy for d in drawn]),
        torch.cat([d.sampled for d in drawn]),
        filled("vocabulary_step", out, torch.cat(softened)) if soft else None,
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
    across: Across | None = None,
    chunk: int | None = None,
    out: Tensor | None = None,
) -> Step:
    """hidden [T, D], E [V, D] -> Step. Nothing waits for the host; temperature and key are read on the device.

    `dtype` is the model's, if hidden is FP8 and does not say; `across` an FP8 E as `transpose_codes` laid it; `chunk` the
    ids at a time of the fast mode; `out` where the soft embedding is written, contiguous [T, D] of the model's dtype.
    """
    if hidden.shape[1] != E.shape[1] or temperature.shape != (1,) or temperature.dtype != torch.float32:
        raise ValueError(
            f"vocabulary_step: hidden {tuple(hidden.shape)}, E {tuple(E.shape)}, "
            f"temperature {tuple(temperature.shape)} {temperature.dtype}"
        )
    if not hidden.shape[0] or not softcap > 0 or (out is not None and not soft):
        raise ValueError(f"vocabulary_step: hidden {tuple(hidden.shape)}, softcap {softcap}, soft {soft}")
    for what, rows in (("hidden", hidden), ("E", E)):
        contiguous(
            "vocabulary_step", **{what: _data(rows), f"{what}_scale": rows.scale if isinstance(rows, Fp8) else None}
        )
    if key.numbers.shape != (3,) or key.step.shape != (1,) or {key.numbers.dtype, key.step.dtype} != {torch.int32}:
        raise ValueError(f"vocabulary_step: key {key}")
    if across is not None and (across.codes.shape[0], *across.factor.shape) != (E.shape[1], E.shape[0]):
        raise ValueError(f"vocabulary_step: E {tuple(E.shape)}, across {tuple(across.codes.shape)}")
    dtype = dtype or (hidden.dtype if isinstance(hidden, Tensor) else torch.bfloat16)
    out = target("vocabulary_step", out, (hidden.shape[0], E.shape[1]), dtype, temperature.device) if soft else None
    if reference:
        return _reference(hidden, E, softcap, temperature, embed_scale, key, out, dtype, across)
    return _fast(hidden, E, softcap, temperature, embed_scale, key, out, dtype, across, chunk)


def _reference(
    hidden: Rows,
    E: Rows,
    softcap: float,
    temperature: Tensor,
    embed_scale: float,
    key: Key,
    out: Tensor | None,
    dtype: torch.dtype,
    across: Across | None,
) -> Step:
    T, V, device = hidden.shape[0], E.shape[0], E.device
    raw = torch.empty(T, V, dtype=dtype, device=device)  # in the end p, if not across
    peaks = torch.empty(T, -(-V // logits_tile(hidden, E, False).n), device=device)
    tiles = -(-V // draw_tile(True, gpu_of(raw)).k)
    parts = Parts.empty(T, 1, tiles, tiles, device)
    codes = _codes(T, V, device) if out is not None and across is not None else None
    factor = None if across is None else across.factor
    logits(hidden, E, raw, peaks, 0, V)
    draw(raw, peaks, codes, factor, softcap, temperature, key, parts, 0, V, 0, reference=True)
    drawn, total = settle(parts, V, reference=True)
    if out is None:
        return _step(drawn, None)
    if codes is not None and across is not None:
        sums = _sums(codes, E, V, SPLIT_COST)
        weigh_codes(codes, across, sums, parts.centre, 0, V, 0)
        return _step(drawn, combine(sums, total, embed_scale, dtype, reference=False, unit=across.unit, out=out))
    probabilities(raw, V, softcap, temperature, parts, total, E.scale if isinstance(E, Fp8) else None)
    sums = _sums(raw, E, V, SPLIT_COST)
    weigh(raw, E, sums, parts.centre, 0, V, 0)
    return _step(drawn, combine(sums, total, embed_scale, dtype, reference=True, out=out))


def _fast(
    hidden: Rows,
    E: Rows,
    softcap: float,
    temperature: Tensor,
    embed_scale: float,
    key: Key,
    out: Tensor | None,
    dtype: torch.dtype,
    across: Across | None,
    chunk: int | None,
) -> Step:
    T, V, device = hidden.shape[0], E.shape[0], E.device
    chunk = min(chunk or chunk_ids(gpu_of(_data(E)), hidden, E), -(-V // LANES) * LANES)
    chunks = -(-V // chunk)
    raw = torch.empty(T, chunk, device=device)
    weights = torch.empty(T, chunk, dtype=dtype, device=device) if across is None else _codes(T, chunk, device)
    factor = across.factor if across is not None else E.scale if isinstance(E, Fp8) else None
    span = draw_tile(False, gpu_of(raw)).k
    per_chunk = -(-chunk // span)
    tiles = (chunks - 1) * per_chunk + -(-(V - (chunks - 1) * chunk) // span)
    parts = Parts.empty(T, chunks, per_chunk, tiles, device)
    sums = None if out is None else _sums(weights, E, chunk, CHUNK_SPLIT_COST)
    for i in range(chunks):
        begin, end = i * chunk, min((i + 1) * chunk, V)
        peaks = torch.empty(T, -(-(end - begin) // logits_tile(hidden, E, True).n), device=device)
        logits(hidden, E, raw, peaks, begin, end, resident=True)
        draw(
            raw, peaks, None if out is None else weights, factor, softcap, temperature, key, parts, begin, end, i,
            reference=False,
        )  # fmt: skip
        if sums is None:
            continue
        if across is None:
            weigh(weights, E, sums, parts.centre, begin, end, i, resident=True)
        else:
            weigh_codes(weights, across, sums, parts.centre, begin, end, i, resident=True)
    drawn, total = settle(parts, V, reference=False)
    if sums is None:
        return _step(drawn, None)
    unit = None if across is None else across.unit
    return _step(drawn, combine(sums, total, embed_scale, dtype, reference=False, unit=unit, out=out))


def _codes(rows: int, ids: int, device: torch.device) -> Tensor:
    return torch.empty(rows, padded(ids), dtype=torch.float8_e4m3fn, device=device)


def _data(rows: Rows) -> Tensor:
    return rows.codes if isinstance(rows, Fp8) else rows


def _sums(p: Tensor, E: Rows, ids: int, cost: float) -> Tensor:
    """Room for the second product's splits, fp32 [splits, T, D]."""
    codes = p.dtype == torch.float8_e4m3fn
    tile, (T, D) = soft_fp8_tile(p) if codes else soft_tile(p, E), (len(p), E.shape[1])
    programs = -(-T // tile.m) * -(-D // tile.n)
    splits = splits_for(gpu_of(p), programs, ids, tile.k, 2 * cost if codes else cost)
    return torch.empty(splits, T, D, device=p.device)


def _step(drawn: Drawn, soft: Tensor | None) -> Step:
    return Step(drawn.draft, drawn.entropy, drawn.sampled, soft)


def chunk_ids(gpu: Gpu, hidden: Rows, E: Rows) -> int:
    """Ids of a chunk of the fast mode: whole waves of the first product, as many as their E leaves room for in the L2."""
    tile, span = logits_tile(hidden, E, True), draw_tile(False, gpu).k
    room = CHUNK_BYTES.get(gpu.capability, CHUNK_BYTES[HOPPER.capability]) // (E.shape[1] * _data(E).element_size())
    wave = max(1, gpu.processors // -(-hidden.shape[0] // tile.m)) * tile.n
    ids = room // wave * wave if wave <= room else room
    return max(ids // span * span, span)
