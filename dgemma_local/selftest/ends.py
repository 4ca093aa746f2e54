"""The two ends of a denoising step: the embedding, the vocabulary with its draws, and the canvas.

Where a bar is looser than `NEAR`:

    draws             a sum in another order moves a logit by a step, and near equals change places
    soft embedding    fast: weights are rounded about their chunk's maximum, the twin's about the row's; across: the
                      weights are codes of E4M3
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dgemma_local import ops
from dgemma_local.config import ModelConfig
from dgemma_local.model import DiffusionGemma
from dgemma_local.noise import PhiloxNoise
from dgemma_local.quant import Fp8, Nvfp4
from dgemma_local.selftest.compare import NEAR, SAME, Bar, Outputs, apart, step_at
from dgemma_local.selftest.operands import Form, Operands
from dgemma_local.selftest.trial import Case, Kernel, Target, Trial, by, in_form

TABLE_SIZE = 1.4  # of a row of the embedding, so that many tokens may be drawn, and some bend at the softcap
IDS = 4096  # of the vocabulary: whole blocks of it, as the real one is
CHUNK = 2048  # ids at a time of the fast head, so that there is more than one chunk
MOST_DRAW_ALIKE = 0.97  # of the rows
ENTROPY = 2e-3  # nats
SOFT = {"reference": Bar(equal=0.97), "fast": Bar(equal=0.8), "across": Bar(equal=0.9)}
FAST_TIE = 2.0**-10  # of the largest logit: sums of FP8 codes on sm_90, with a few bits of room
BOUND, CONFIDENCE = 0.9, 0.005  # nats: some of a canvas are accepted; between the means of sure and unsure turns
SEED, ATTEMPT, CANVAS, STEP = 2**63 + 987_654_321, 2, 5, 7  # of the random stream: both words of the seed count
# An update's turns: which of two drafts, and how large its entropies are.
A, B = 0, 1
UNSURE, SURE = 1.0, 0.01
# What happens: steps, stability, turns. The last turn of each is a step launched ahead, which changes nothing.
UPDATES: dict[str, tuple[int, int, list[tuple[int, float]]]] = {
    "converges": (16, 1, [(A, UNSURE), (A, UNSURE), (A, SURE), (B, UNSURE)]),
    # at the third and the fourth turn one of the last two drafts is another
    "converges after two": (16, 2, [(A, UNSURE), (B, UNSURE), (A, SURE), (A, SURE), (A, SURE), (B, UNSURE)]),
    "runs out of steps": (2, 2, [(A, UNSURE), (B, UNSURE), (A, UNSURE)]),
}


def ends(network: DiffusionGemma, every: list[int]) -> Iterator[Case]:
    """Beside what `cases` has; `every`: how many rows a pass has."""
    if isinstance(network.embed_tokens, Nvfp4):
        return  # which its kernels do not read
    table = Form.of(network.embed_tokens, network.dtype).first(IDS)
    for T in sorted({network.canvas_length, every[-1]}):
        yield _embed(network.config, table, network.embed_scale, T)
    yield _vocabulary(network.config, table, network.embed_scale)
    for what in UPDATES:
        yield _update(network.config, what)


def _table(make: Operands, form: Form) -> Any:
    """[V, D]; logits behind a normed row have a deviation of 0.4 … 4."""
    table = make.weight(form, 2)
    if isinstance(table, Tensor):
        return table.mul_(TABLE_SIZE)
    assert isinstance(table, Fp8)
    return Fp8(table.codes, table.scale.mul_(TABLE_SIZE))


def _embed(config: ModelConfig, form: Form, scale: float, T: int) -> Case:
    V, D, eps = form.shape[0], config.hidden_size, config.rms_eps

    def prepare(make: Operands) -> Trial:
        table, ids = _table(make, form), make.integers(T, below=V)
        ids[0], ids[-1] = 0, V - 1
        soft = make.normal(T, D, seed=3, size=5.0)
        joining, opening, told = (None, 0.0, False), (None, eps, True), (soft, eps, True)

        def call(f: Kernel) -> Outputs:
            """A chunk and a later step have memory of their own, the two segments of a first step a part each."""
            made = tuple(f(ids, table, scale, *rest, make.dtype) for rest in (joining, told))
            for rest in (joining, opening):
                target = Target.of(make, T, D)
                f(ids, table, scale, *rest, make.dtype, out=target.rows)
                made += target.outcome()
            return made

        return Trial(call, by(NEAR, NEAR, NEAR, SAME, NEAR, SAME))

    return Case("embed", f"{T} rows of {form}", prepare)


def _vocabulary(config: ModelConfig, form: Form, scale: float) -> Case:
    T, asked, file = config.canvas_length, ops.wishes(), ops.KERNELS["vocabulary_step"]
    reference, across = "fast-head" not in asked, "fp8-soft" in asked and form.kind == "fp8"
    mode = ("reference" if reference else "fast") + (", across" if across else "")

    def prepare(make: Operands) -> Trial:
        E, cool = _table(make, form), make.numbers(0.6)
        hidden = in_form(make.normal(T, config.hidden_size, seed=1), form.rows, make)
        key = file.Key.of(SEED, ATTEMPT, CANVAS, make.numbers(STEP, dtype=torch.int32))
        given = hidden, E, config.softcap, cool, scale, key
        named = {"reference": reference, "dtype": make.dtype, "across": file.transpose_codes(E) if across else None}
        named |= {} if reference else {"chunk": CHUNK}

        def call(f: Kernel) -> Outputs:
            target = Target.of(make, T, config.hidden_size)
            step = f(*given, **named, out=target.rows)
            return step.draft, step.entropy, step.sampled, *target.outcome()

        def wrong(ours: Outputs, twin: Outputs) -> str | None:
            *step, untouched = ours
            if not untouched:
                return "rows beside its own are written"
            raw = file.logits_twin(hidden, E, make.dtype if reference else torch.float32)
            z = file.scaled_twin(raw, config.softcap, cool)
            positions = torch.arange(T, device=make.device)
            race = z - PhiloxNoise(SEED, T, form.shape[0], make.device, ATTEMPT).variates(CANVAS, STEP, positions).log()
            return _other_step(step, twin[:-1], z, race, mode)

        return Trial(call, wrong)

    return Case("vocabulary_step", f"{T} rows, {form}, {mode}", prepare)


def _other_step(ours: Sequence[Tensor], twin: Outputs, z: Tensor, race: Tensor, mode: str) -> str | None:
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


def _update(config: ModelConfig, what: str) -> Case:
    L, V, (steps, stability, turns) = config.canvas_length, config.vocab_size, UPDATES[what]

    def prepare(make: Operands) -> Trial:
        drafts, sampled = make.integers(2, L, below=V, seed=1), make.integers(L, below=V, seed=2)
        entropy, first = make.uniform(L, low=0.0, high=0.2, seed=3), make.integers(L, below=V)
        temperatures = torch.linspace(0.8, 0.4, steps).to(make.device)

        def call(f: Kernel) -> Outputs:
            state = ops.State.new(L, stability, temperatures)
            state.history.fill_(-1)
            state.begin(first, ops.key_numbers(SEED, ATTEMPT, CANVAS).to(make.device))
            after: list[Tensor] = []
            for which, calm in turns:
                f(state, drafts[which], sampled, entropy * calm, V, BOUND, CONFIDENCE)
                seen = state.canvas, state.accepted, state.draft, state.entropy, state.flags, state.history
                after += [t.clone() for t in (*seen, state.temperature, state.key.step, state.key.numbers)]
            return tuple(after)

        return Trial(call, by(SAME))

    return Case("update", f"{L} of {V}, {what}, stability {stability}", prepare)
