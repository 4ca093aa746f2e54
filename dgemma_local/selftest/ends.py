"""The two ends of a denoising step: the embedding, the vocabulary with its draws, and the canvas.

Where a bar is looser than `NEAR`:

    draws             a sum in another order moves a logit by a step, and near equals change places
    soft embedding    fast: weights are rounded about their chunk's maximum, the twin's about the row's; across: the
                      weights are codes of E4M3
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dgemma_local import ops
from dgemma_local.config import ModelConfig
from dgemma_local.model import DiffusionGemma
from dgemma_local.noise import PhiloxNoise
from dgemma_local.quant import Fp8, Nvfp4
from dgemma_local.selftest.compare import NEAR, SAME, Bar, Outputs, apart, step_at, tensors_of
from dgemma_local.selftest.operands import Form, Operands
from dgemma_local.selftest.trial import Case, Kernel, Trial, by, in_form

TABLE_SIZE = 1.4  # of a row of the embedding, so that many tokens may be drawn, and some bend at the softcap
IDS = 4096  # of the vocabulary: whole blocks of it, as the real one is
CHUNK = 2048  # ids at a time of the fast head, so that there is more than one chunk
MOST_DRAW_ALIKE = 0.97  # of the rows
ENTROPY = 2e-3  # nats
SOFT = {"reference": Bar(equal=0.97), "fast": Bar(equal=0.8), "across": Bar(equal=0.9)}
FAST_TIE = 2.0**-10  # of the largest logit: sums of FP8 codes on sm_90, with a few bits of room
SEED, ATTEMPT, CANVAS, STEP = 2**63 + 987_654_321, 2, 5, 7  # of the random stream: both words of the seed count


def ends(network: DiffusionGemma) -> Iterator[Case]:
    if isinstance(network.embed_tokens, Nvfp4):
        return  # which its kernels do not read
    table = Form.of(network.embed_tokens, network.dtype).first(IDS)
    yield _embed(network.config, table, network.embed_scale)
    yield _vocabulary(network.config, table, network.embed_scale)
    yield _update(network.config)


def _table(make: Operands, form: Form) -> Any:
    """[V, D]; logits behind a normed row have a deviation of 0.4 … 4."""
    table = make.weight(form, 2)
    if isinstance(table, Tensor):
        return table.mul_(TABLE_SIZE)
    assert isinstance(table, Fp8)
    return Fp8(table.codes, table.scale.mul_(TABLE_SIZE))


def _embed(config: ModelConfig, form: Form, scale: float) -> Case:
    T, V, D, eps = config.canvas_length, form.shape[0], config.hidden_size, config.rms_eps

    def prepare(make: Operands) -> Trial:
        table, ids = _table(make, form), make.integers(T, below=V)
        ids[0], ids[-1] = 0, V - 1
        soft = make.normal(T, D, seed=3, size=5.0)
        given = (None, 0.0, False, make.dtype), (soft, eps, True, make.dtype), (None, eps, True, make.dtype)
        return Trial(lambda f: tensors_of(*(f(ids, table, scale, *rest) for rest in given)), by(NEAR))

    return Case("embed", f"{T} rows of {form}", prepare)


def _vocabulary(config: ModelConfig, form: Form, scale: float) -> Case:
    T, asked, file = config.canvas_length, ops.wishes(), ops.KERNELS["vocabulary_step"]
    reference, across = "fast-head" not in asked, "fp8-soft" in asked and form.kind == "fp8"
    mode = ("reference" if reference else "fast") + (", across" if across else "")

    def prepare(make: Operands) -> Trial:
        E, cool = _table(make, form), make.numbers(0.6)
        hidden = in_form(make.normal(T, config.hidden_size, seed=1), form.rows, make)
        key = file.Key.of(SEED, ATTEMPT, CANVAS, make.numbers(STEP, dtype=torch.int32))
        given = hidden, E, config.softcap, cool, scale, key, reference, True, make.dtype
        turned = file.transpose_codes(E) if across else None

        def wrong(ours: Outputs, twin: Outputs) -> str | None:
            raw = file.logits_twin(hidden, E, make.dtype if reference else torch.float32)
            z = file.scaled_twin(raw, config.softcap, cool)
            positions = torch.arange(T, device=make.device)
            race = z - PhiloxNoise(SEED, T, form.shape[0], make.device, ATTEMPT).variates(CANVAS, STEP, positions).log()
            return _other_step(ours, twin, z, race, mode)

        return Trial(lambda f: tensors_of(f(*given, turned, None if reference else CHUNK)), wrong)

    return Case("vocabulary_step", f"{T} rows, {form}, {mode}", prepare)


def _other_step(ours: Outputs, twin: Outputs, z: Tensor, race: Tensor, mode: str) -> str | None:
    """z, and z less the logarithm of its variates: the draft has the largest of the one, the sample of the other.

    Ids may differ where the raw logits, of sums in another order, were rounded apart: then they nearly tie.
    """
    (draft, entropy, sampled, soft), (T, V) = ours, z.shape
    largest = z.abs().amax(-1)
    tie = 2 * step_at(largest, torch.bfloat16) if mode.startswith("reference") else FAST_TIE * largest
    for what, ids, others, chances in (("drafts", draft, twin[0], z), ("samples", sampled, twin[2], race)):
        if bool(((ids < 0) | (ids >= V)).any()):
            return f"{what} outside the vocabulary"
        unlike = int((ids != others).sum())
        if unlike > max(1, int((1 - MOST_DRAW_ALIKE) * T)):
            return f"{unlike} of {T} {what} are not its twin's"
        lost = chances.amax(-1) - chances.gather(-1, ids[:, None])[:, 0] > tie
        if bool(lost.any()):
            return f"{int(lost.sum())} of {T} {what} are not what they should be by far"
    off = float((entropy - twin[1]).abs().max())
    if not off <= ENTROPY:
        return f"an entropy {off:.3g} nats from its twin's"
    return apart((soft,), (twin[3],), [SOFT["across" if "across" in mode else mode]])


def _update(config: ModelConfig) -> Case:
    L, V = config.canvas_length, config.vocab_size

    def prepare(make: Operands) -> Trial:
        draft, sampled = make.integers(L, below=V, seed=1), make.integers(L, below=V, seed=2)
        entropy, first = make.uniform(L, low=0.0, high=0.2, seed=3), make.integers(L, below=V)
        temperatures = torch.linspace(0.8, 0.4, 16).to(make.device)

        def call(f: Kernel) -> Outputs:
            state = ops.State.new(L, 1, temperatures)
            state.history.fill_(-1)
            state.begin(first, ops.key_numbers(SEED, ATTEMPT, CANVAS).to(make.device))
            after: list[Tensor] = []
            # a few accepted; then the same draft, and sure of it: done; then one launched ahead, which changes nothing
            for ids, calm in ((draft, 1.0), (draft, 0.01), (sampled, 1.0)):
                f(state, ids, sampled, entropy * calm, V, 0.9, 0.005)
                seen = state.canvas, state.accepted, state.draft, state.entropy, state.flags, state.history
                after += [t.clone() for t in (*seen, state.temperature, state.key.step, state.key.numbers)]
            return tuple(after)

        return Trial(call, by(SAME))

    return Case("update", f"{L} of {V}", prepare)
