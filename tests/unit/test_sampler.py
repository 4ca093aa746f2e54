"""Laws of the sampler, by search; its numbers against transformers stand in test_sampler_golden.py."""

import math
from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch
from fake import GENERATION
from hypothesis import given, settings
from hypothesis import strategies as st
from live_bytes import LiveBytes
from torch import Tensor

from dgemma_local import noise as stream
from dgemma_local import sampler
from dgemma_local.config import GenerationConfig
from dgemma_local.noise import PhiloxNoise
from dgemma_local.sampler import Canvas, Rules

L, V = 16, 64
NOISE = PhiloxNoise(1, L, V, torch.device("cpu"))

nats = st.floats(0, 12, width=32)
canvases = st.lists(nats, min_size=1, max_size=64)
# 0.1 is the released model's; 0 accepts nothing but the calmest and what is certain before the second
bounds = st.one_of(st.just(0.1), st.floats(0, 50, width=32))


def logits(seed: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(L, V, generator=torch.Generator().manual_seed(seed))


def certain(tokens: Tensor, of: float = 30.0) -> Tensor:
    return torch.nn.functional.one_hot(tokens, V) * of


def run(logits_of_step: list[Tensor], config: GenerationConfig) -> list[Canvas]:
    states = [sampler.begin(0, NOISE)]
    for z in logits_of_step:
        states.append(sampler.advance(states[-1], z.clone(), config, NOISE))
        if states[-1].done:
            break
    return states[1:]


# ── acceptance ────────────────────────────────────────────────────────────────────────────────────────────────────


@given(canvases, bounds)
@settings(max_examples=200, deadline=None)
def test_acceptance_is_monotone_and_never_empty(entropy: list[float], bound: float) -> None:
    e = torch.tensor(entropy)
    accepted = sampler.accept(e, bound)
    assert accepted[e == e.min()].any()
    assert not ((e[:, None] < e[None, accepted]).any(1) & ~accepted).any()  # calmer than an accepted one: accepted


@given(canvases, bounds)
@settings(max_examples=200, deadline=None)
def test_acceptance_keeps_to_the_bound_and_uses_it_up(entropy: list[float], bound: float) -> None:
    """The calmer ones of any accepted position sum to ≤ bound; the calmest that is refused comes after more than that."""
    e = torch.tensor(entropy)
    accepted = sampler.accept(e, bound)
    slack = 1e-5 * (1 + bound)  # fp32 sums
    kept = sorted(e[accepted].tolist())
    assert math.fsum(kept[:-1]) <= bound + slack
    if not accepted.all():
        assert math.fsum(kept) > bound - slack


@given(st.lists(nats, min_size=1, max_size=64, unique=True), bounds, st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_positions_have_no_order(entropy: list[float], bound: float, draw: object) -> None:
    e = torch.tensor(entropy)
    order = list(range(len(e)))
    draw.shuffle(order)  # type: ignore[attr-defined]
    assert torch.equal(sampler.accept(e[order], bound), sampler.accept(e, bound)[order])


def test_tiny_entropies_after_large_ones_do_not_slip_in() -> None:
    """The reference's `cumsum - own` accepts 1.0 here and refuses the subnormal: fp32 absorbs it."""
    e = torch.tensor([1.0, 2.5e-44, 0.0])
    assert sampler.accept(e, 0.0).tolist() == [False, True, True]
    assert sampler.accept(torch.zeros(5), 0.0).all()


# ── entropy and temperature ───────────────────────────────────────────────────────────────────────────────────────


def test_entropies_equal_the_definition() -> None:
    """1,000 rows from flat to saturated, logits up to the softcap's ±30; the definition in fp64."""
    draw = torch.Generator().manual_seed(3)
    z = torch.randn(1000, 128, generator=draw) * torch.logspace(-3, 2, 1000)[:, None]
    z = z.clamp(-30, 30) / 0.4
    z[:3] = torch.tensor([[30.0], [-30.0], [0.0]]) / 0.4
    z[3] = torch.where(torch.arange(128) == 5, 30.0, -30.0) / 0.4
    log_p = z.double().log_softmax(-1)
    torch.testing.assert_close(sampler.entropies(z).double(), -(log_p.exp() * log_p).sum(-1), atol=1e-5, rtol=0)
    assert sampler.entropies(z)[3] == 0 and sampler.entropies(z)[0] == pytest.approx(math.log(128), abs=1e-6)


def test_an_impossible_token_has_no_part_in_the_entropy() -> None:
    z = logits(1)
    banned = torch.cat([z, torch.full((L, 9), -torch.inf)], 1)
    torch.testing.assert_close(sampler.entropies(banned), sampler.entropies(z), atol=1e-6, rtol=0)
    one = torch.full((1, 4), -torch.inf)
    one[0, 2] = 1.5
    assert sampler.entropies(one).tolist() == [0.0]


@given(st.integers(1, 300), st.floats(0, 1, width=16), st.floats(0, 1, width=16))
@settings(max_examples=100, deadline=None)
def test_temperature_falls_from_t_max_and_never_reaches_t_min(steps: int, a: float, b: float) -> None:
    config = replace(GENERATION, steps=steps, t_min=min(a, b), t_max=max(a, b))
    t = [float(sampler.temperature(config, step)) for step in range(steps)]
    assert t[0] == pytest.approx(config.t_max, abs=1e-6)
    assert t[-1] == pytest.approx(config.t_min + (config.t_max - config.t_min) / steps, abs=1e-6)
    if config.t_max - config.t_min > 0.01:
        assert all(x > y for x, y in pairwise(t)) and t[-1] > config.t_min


# ── one step ──────────────────────────────────────────────────────────────────────────────────────────────────────


def same(a: Canvas, b: Canvas) -> bool:
    """Equal in all fields, tensors bit for bit."""

    def equal(x: object, y: object) -> bool:
        if isinstance(x, tuple) and isinstance(y, tuple):
            return len(x) == len(y) and all(map(equal, x, y))
        return torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x == y

    return all(equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(Canvas))


def copy(canvas: Canvas) -> Canvas:
    def fresh(x: object) -> object:
        return tuple(map(fresh, x)) if isinstance(x, tuple) else x.clone() if isinstance(x, Tensor) else x

    return replace(canvas, **{f.name: fresh(getattr(canvas, f.name)) for f in fields(Canvas)})


@given(st.integers(0, 10_000), st.sampled_from([0.5, 3.0, 20.0]))
@settings(max_examples=30, deadline=None)
def test_a_step_is_pure_but_for_the_logits_it_uses_up(seed: int, scale: float) -> None:
    before = sampler.advance(sampler.begin(2, NOISE), logits(seed + 1, scale), GENERATION, NOISE)
    kept, z = copy(before), logits(seed, scale)
    after = sampler.advance(before, z, GENERATION, NOISE)
    assert same(before, kept)
    assert after.logits is not None and after.logits.data_ptr() == z.data_ptr()
    own = PhiloxNoise(1, L, V, torch.device("cpu"))
    assert same(after, sampler.advance(kept, logits(seed, scale), GENERATION, own))


@given(st.integers(0, 10_000), st.sampled_from([0.5, 3.0, 20.0]))
@settings(max_examples=30, deadline=None)
def test_what_one_step_computes(seed: int, scale: float) -> None:
    """Its fields against their definitions, two steps in."""
    config = replace(GENERATION, entropy_bound=6.0)
    before = sampler.advance(sampler.begin(2, NOISE), logits(seed + 1, scale), config, NOISE)
    z = logits(seed, scale)
    after = sampler.advance(before, z.clone(), config, NOISE)
    t = config.t_min + (config.t_max - config.t_min) * 7 / 8
    assert (after.number, after.step, after.converged, after.done) == (2, 2, False, False)
    assert after.temperature == pytest.approx(t, abs=1e-7)
    assert after.logits is not None and after.entropy is not None and after.accepted is not None
    torch.testing.assert_close(after.logits, z / t)
    assert torch.equal(after.draft, z.argmax(-1))
    assert torch.equal(after.entropy, sampler.entropies(after.logits))
    assert torch.equal(after.accepted, sampler.accept(after.entropy, 6.0))
    drawn = torch.where(after.accepted, NOISE.sample(after.logits, after.accepted, 2, 1), NOISE.renoise(2, 1))
    assert torch.equal(after.next, drawn)


def test_what_was_accepted_is_not_remembered() -> None:
    """A position accepted at one step is noise after the next, if that one refuses it."""
    sure, flat = certain(torch.arange(L)), torch.zeros(L, V)
    first, second = run([sure, flat], GENERATION)
    assert torch.equal(first.next, torch.arange(L))
    assert second.accepted is not None and second.accepted.sum() == 1
    assert torch.equal(second.next[~second.accepted], NOISE.renoise(0, 1)[~second.accepted])


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_how_a_canvas_is_cut_is_no_input(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run([logits(seed) for seed in range(3)], GENERATION)
    monkeypatch.setattr(stream, "BLOCK_BYTES", 4 * V * rows)
    assert all(map(same, run([logits(seed) for seed in range(3)], GENERATION), whole))


def test_a_step_makes_nothing_as_large_as_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks of them at most, whatever the canvas: with every row drawn, and of a model that knows nothing."""
    length, vocab = 64, 4096
    monkeypatch.setattr(stream, "BLOCK_BYTES", 4 * vocab * 8)
    draws = PhiloxNoise(1, length, vocab, torch.device("cpu"))
    everything = replace(GENERATION, entropy_bound=1e6)
    for flat in (torch.randn(length, vocab), torch.zeros(length, vocab)):
        canvas = sampler.begin(0, draws)
        with LiveBytes() as live:
            after = sampler.advance(canvas, flat, everything, draws)
        assert after.accepted is not None and after.accepted.all()
        assert live.peak < 3 * stream.BLOCK_BYTES < flat.nbytes


# ── where a canvas ends ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("stability", "taken"), [(0, 1), (1, 2), (2, 3), (4, 5)])
def test_a_certain_model_takes_one_step_more_than_must_agree(stability: int, taken: int) -> None:
    states = run([certain(torch.arange(L))] * 8, replace(GENERATION, stability=stability))
    assert len(states) == taken
    assert all(s.accepted is not None and s.accepted.all() for s in states)
    assert [s.converged for s in states] == [s.done for s in states] == [False] * (taken - 1) + [True]
    assert all(torch.equal(s.next, torch.arange(L)) for s in states)


def test_a_model_that_knows_nothing_keeps_one_position_and_all_steps() -> None:
    states = run([torch.zeros(L, V)] * 8, GENERATION)
    assert len(states) == 8
    assert all(s.accepted is not None and s.accepted.sum() == 1 for s in states)
    assert states[-1].done and not states[-1].converged


def test_the_last_draft_is_committed_not_the_sample() -> None:
    """Ended by the steps or by convergence, and different from the sampled canvas that would have been fed next."""
    for scale, config in ((1.0, replace(GENERATION, steps=3)), (1.0, replace(GENERATION, confidence=99.0))):
        last = run([logits(5, scale)] * 8, config)[-1]
        assert last.draft is not None and last.logits is not None
        assert torch.equal(last.next, last.draft)
        assert not torch.equal(last.draft, NOISE.sample(last.logits, torch.ones(L, dtype=torch.bool), 0, last.step - 1))
    assert last.converged and last.step == 2


A, B = torch.arange(L), torch.arange(L) + 1
SURE, UNSURE = 30.0, 3.0  # mean entropies 0 and 2.4 nats


@pytest.mark.parametrize(
    ("story", "end"),
    [
        ([(A, SURE), (A, SURE)], 2),
        ([(A, UNSURE), (A, SURE)], 2),  # the drafts agree, and this step is confident
        ([(A, SURE), (A, UNSURE), (A, SURE)], 3),  # stable at 2, confident at 1: not at once
        ([(A, SURE), (B, SURE), (A, SURE), (A, SURE)], 4),
        ([(A, SURE), (B, SURE), (B, UNSURE), (A, SURE), (A, UNSURE), (A, SURE)], 6),
    ],
)
def test_stable_and_confident_in_the_same_step(story: list[tuple[Tensor, float]], end: int) -> None:
    states = run([certain(tokens, of) for tokens, of in story], GENERATION)
    assert len(states) == end and states[-1].converged


def test_one_position_that_changes_is_not_stable() -> None:
    other = A.clone()
    other[-1] = 0
    states = run([certain(A), certain(other)] * 3, replace(GENERATION, steps=6))
    assert len(states) == 6 and not states[-1].converged


def test_stability_looks_at_all_the_last_drafts() -> None:
    story = [certain(t) for t in (A, B, A, A, B, B, B)]
    states = run(story, replace(GENERATION, stability=2))
    assert len(states) == 7 and states[-1].converged


def test_confidence_is_strict() -> None:
    z = logits(4)
    mean = float(run([z, z], GENERATION)[1].entropy.mean())  # type: ignore[union-attr]
    for confidence, ends in ((mean, False), (math.nextafter(mean, 0), False), (mean * (1 + 1e-6), True)):
        assert run([z, z], replace(GENERATION, confidence=confidence))[1].converged is ends


def test_the_last_step_ends_a_canvas_and_may_converge() -> None:
    one = run([certain(A)] * 3, replace(GENERATION, steps=1))
    assert len(one) == 1 and one[0].done and not one[0].converged
    two = run([certain(A)] * 3, replace(GENERATION, steps=2))
    assert len(two) == 2 and two[1].done and two[1].converged


def test_a_new_canvas_starts_from_nothing() -> None:
    canvas = sampler.begin(3, NOISE)
    assert torch.equal(canvas.next, NOISE.canvas(3))
    assert (canvas.number, canvas.step, canvas.history, canvas.logits, canvas.done) == (3, 0, (), None, False)


# ── rules ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(
    seed=st.integers(0, 99),
    pinned=st.dictionaries(st.integers(0, L - 1), st.integers(0, V - 1), max_size=4),
    banned=st.sets(st.integers(0, V - 1), max_size=5),
    below=st.integers(0, L),
    scale=st.sampled_from([0.1, 3.0, 30.0]),
)
@settings(max_examples=100, deadline=None)
def test_a_canvas_keeps_to_its_rules_and_is_free_elsewhere(
    seed: int, pinned: dict[int, int], banned: set[int], below: int, scale: float
) -> None:
    rules = Rules(tuple(sorted((p, t) for p, t in pinned.items() if p >= below)), tuple(banned), below)
    canvas, free = sampler.begin(1, NOISE, rules), sampler.begin(1, NOISE)
    config = replace(GENERATION, steps=4, entropy_bound=20.0)
    held = {position for position, _ in rules.pinned} | (set(range(below)) if banned else set())
    others = [i for i in range(L) if i not in held]
    for step in range(4):
        z = logits(seed + step, scale)
        canvas, free = (sampler.advance(each, z.clone(), config, NOISE) for each in (canvas, free))
        assert canvas.draft is not None and canvas.entropy is not None and canvas.accepted is not None
        for position, token in rules.pinned:
            assert canvas.fed is not None and canvas.fed[position] == token
            assert canvas.draft[position] == canvas.next[position] == token
            assert canvas.accepted[position] and canvas.entropy[position] == 0
        assert not set(canvas.draft[:below].tolist()) & banned
        sampled = canvas.next[:below][canvas.accepted[:below]]
        assert not set(sampled.tolist()) & banned
        assert free.draft is not None and free.entropy is not None
        assert torch.equal(canvas.draft[others], free.draft[others])
        assert torch.equal(canvas.entropy[others], free.entropy[others])
        if canvas.done or free.done:
            break


@pytest.mark.parametrize("rules", [Rules(pinned=((0, 5),)), Rules(banned=(1, 2), below=L)])
def test_rules_hide_nothing_that_is_not_a_number(rules: Rules) -> None:
    z = logits(1)
    z[0] = torch.nan
    after = sampler.advance(sampler.begin(0, NOISE, rules), z, GENERATION, NOISE)
    assert after.entropy is not None and not after.entropy[0].isfinite()
