"""The random stream against published vectors, against the docstring written out in Python's integers, and in bulk."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from live_bytes import LiveBytes
from torch import Tensor

from dgemma_local import noise as stream
from dgemma_local.noise import (
    DRAWN,
    FARTHEST,
    PhiloxNoise,
    Purpose,
    TorchNoise,
    exponential,
    exponential_race,
    philox,
    row_blocks,
)

CPU = torch.device("cpu")
M32 = 2**32 - 1
SEEDS = (0, 1, M32, 2**32, 0x1234_5678_9ABC_DEF0, 2**64 - 1)

# kat_vectors of Random123 (D. E. Shaw Research), philox4x32 with 10 rounds: counter, key, words
PUBLISHED = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((M32, M32, M32, M32), (M32, M32), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def plain_philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """The paper's round, one after another."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & M32, (p0 >> 32) ^ c3 ^ k1, p0 & M32
        k0, k1 = (k0 + 0x9E3779B9) & M32, (k1 + 0xBB67AE85) & M32
    return c0, c1, c2, c3


def plain_words(
    seed: int, purpose: int, canvas: int, step: int, position: int, group: int, attempt: int
) -> tuple[int, ...]:
    counter = (group, position, purpose * 2**16 + step, attempt * 2**24 + canvas)
    return plain_philox(counter, (seed % 2**32, seed >> 32))


def plain_word_of(v: int, seed: int, canvas: int, step: int, position: int, attempt: int) -> int:
    """The word of one vocabulary id's exponential."""
    group, word = 32 * (v // 128) + v % 32, v % 128 // 32
    return plain_words(seed, 1, canvas, step, position, group, attempt)[word]


def plain_exponential(word: int) -> float:
    """In Python's doubles."""
    if word < 2**20:
        u = (word + 0.5) * 2.0**-32
        return u * (1 + u * (0.5 + u / 3))
    return -math.log1p(-(word // 512 + 0.5) * 2.0**-23)


def ulps(ours: Tensor, want: Tensor) -> float:
    """Greatest distance of fp32 `ours` from fp64 `want`, in fp32 units in the last place."""
    near = want.float()
    unit = near.nextafter(torch.tensor(torch.inf)) - near
    return float(((ours.double() - want).abs() / unit.double()).max())


@pytest.mark.parametrize(("counter", "key", "words"), PUBLISHED)
def test_published_vectors(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    assert tuple(philox(torch.tensor(counter), key).tolist()) == words
    assert plain_philox(counter, key) == words


@given(st.lists(st.tuples(*[st.integers(0, M32)] * 4), min_size=1, max_size=5), st.tuples(*[st.integers(0, M32)] * 2))
@settings(max_examples=60, deadline=None)
def test_words_equal_the_paper(counters: list[tuple[int, ...]], key: tuple[int, int]) -> None:
    ours = philox(torch.tensor(counters).mT, key)
    assert [tuple(row) for row in ours.mT.tolist()] == [plain_philox(counter, key) for counter in counters]


@given(
    seed=st.one_of(st.sampled_from(SEEDS), st.integers(0, 2**64 - 1)),
    canvas=st.integers(0, 2**24 - 1),
    step=st.integers(0, 4095),
    attempt=st.integers(0, 255),
    vocab=st.sampled_from([7, 64, 128, 129, 300, 262144]),
)
@settings(max_examples=60, deadline=None)
def test_uniform_tokens_follow_the_contract(seed: int, canvas: int, step: int, attempt: int, vocab: int) -> None:
    noise = PhiloxNoise(seed, 5, vocab, CPU, attempt)
    first = [plain_words(seed, 0, canvas, 0, i, 0, attempt)[0] * vocab >> 32 for i in range(5)]
    fresh = [plain_words(seed, 2, canvas, step, i, 0, attempt)[0] * vocab >> 32 for i in range(5)]
    assert noise.canvas(canvas).tolist() == first
    assert noise.renoise(canvas, step).tolist() == fresh
    assert noise.canvas(canvas).dtype == noise.renoise(canvas, step).dtype == torch.int64


@pytest.mark.parametrize("vocab", [7, 64, 128, 129, 300])
@pytest.mark.parametrize("seed", SEEDS)
def test_exponentials_follow_the_contract(seed: int, vocab: int) -> None:
    """Every id: a wrong group or word of any would be off by far more than 4 ulp."""
    canvas, step, attempt, positions = 3, 17 + seed % 5, seed % 3, (0, 2, 255)
    ours = PhiloxNoise(seed, 256, vocab, CPU, attempt).variates(canvas, step, torch.tensor(positions))
    words = [[plain_word_of(v, seed, canvas, step, i, attempt) for v in range(vocab)] for i in positions]
    want = torch.tensor([[plain_exponential(w) for w in row] for row in words], dtype=torch.float64)
    assert ours.dtype == torch.float32 and ours.shape == want.shape
    assert torch.equal(ours, exponential(torch.tensor(words)))
    assert ulps(ours, want) <= 4


def test_exponentials_of_the_real_vocabulary() -> None:
    ids = [0, 31, 32, 127, 128, 4095, 4096, 131071, 131072, 200_001, 262_143]
    ours = PhiloxNoise(2**32 + 5, 256, 262_144, CPU).variates(11, 47, torch.tensor([255]))
    want = [plain_exponential(plain_word_of(v, 2**32 + 5, 11, 47, 255, 0)) for v in ids]
    assert ours.shape == (1, 262_144)
    assert ulps(ours[0, ids], torch.tensor(want, dtype=torch.float64)) <= 4


def test_exponentials_at_the_ends_of_their_branches() -> None:
    edges = [0, 1, 511, 512, 2**20 - 1, 2**20, 2**20 + 511, 2**20 + 512, 2**31 - 1, 2**31, M32 - 512, M32]
    words = torch.tensor(edges)
    ours = exponential(words)
    assert (ours > 0).all() and ours.isfinite().all()
    assert ulps(ours, torch.tensor([plain_exponential(w) for w in edges], dtype=torch.float64)) <= 4
    assert (ours.diff() >= 0).all()  # no step back where the branches meet
    assert ours[0].item() == 2.0**-33
    assert ours[-1].item() == pytest.approx(24 * math.log(2), rel=1e-7)


def test_common_exponentials_are_exact_before_the_logarithm() -> None:
    draw = random.Random(1)
    words = sorted(draw.randrange(2**32) for _ in range(20_000))
    want = torch.tensor([plain_exponential(w) for w in words], dtype=torch.float64)
    assert ulps(exponential(torch.tensor(words)), want) <= 4


@given(st.permutations([(c, s, what) for c in (0, 1) for s in (0, 15, 16, 40) for what in ("re-noise", "sample")]))
@settings(max_examples=15, deadline=None)
def test_the_order_of_draws_is_no_input(order: list[tuple[int, int, str]]) -> None:
    logits = torch.linspace(-2, 2, 50).expand(6, 50)
    every = torch.ones(6, dtype=torch.bool)
    shared = PhiloxNoise(9, 6, 50, CPU)
    for canvas, step, what in order:
        alone = PhiloxNoise(9, 6, 50, CPU)
        if what == "re-noise":
            assert torch.equal(shared.renoise(canvas, step), alone.renoise(canvas, step))
        else:
            assert torch.equal(shared.sample(logits, every, canvas, step), alone.sample(logits, every, canvas, step))
        assert torch.equal(shared.canvas(canvas), alone.canvas(canvas))


def test_every_input_matters() -> None:
    """Seed (both halves), attempt, canvas, step and purpose: no two streams of 64 tokens are alike."""
    streams = [
        PhiloxNoise(seed, 64, 1000, CPU, attempt).renoise(canvas, step)
        for seed in (0, 1, 2**32)
        for attempt in (0, 1)
        for canvas in (0, 1)
        for step in (0, 1, 16)
    ]
    streams += [PhiloxNoise(0, 64, 1000, CPU).canvas(0)]
    assert len({tuple(s.tolist()) for s in streams}) == len(streams)
    assert [int(p) for p in (Purpose.CANVAS, Purpose.SAMPLE, Purpose.RENOISE)] == [0, 1, 2]


def test_a_step_that_was_drawn_ahead_survives_a_visit_elsewhere() -> None:
    noise = PhiloxNoise(4, 8, 100, CPU)
    before = [noise.renoise(0, step).clone() for step in range(40)]
    noise.renoise(1, 0)
    assert all(torch.equal(noise.renoise(0, step), was) for step, was in enumerate(before))


# ── the sample ────────────────────────────────────────────────────────────────────────────────────────────────────


def chi_square(counts: Tensor, p: Tensor) -> float:
    expected = p.double() * counts.sum()
    live = expected > 0
    return float(((counts - expected).square()[live] / expected[live]).sum())


def test_samples_have_the_distribution() -> None:
    """102,400 draws of 50 tokens, five of them impossible; 44 degrees of freedom pass 78.7 once in a thousand."""
    logits = 1.5 * torch.randn(50, generator=torch.Generator().manual_seed(0))
    logits[[0, 7, 31, 32, 49]] = -torch.inf
    noise = PhiloxNoise(2026, 100, 128 * 50, CPU)  # a row of variates is cut into 128 races
    variates = torch.cat([noise.variates(0, step, torch.arange(100)).view(-1, 50) for step in range(8)])
    counts = exponential_race(logits.expand_as(variates), variates).bincount(minlength=50)
    assert counts.sum() == 102_400 and not counts[[0, 7, 31, 32, 49]].any()
    assert chi_square(counts, logits.softmax(-1)) < 78.7


def test_uniform_tokens_are_uniform() -> None:
    """6 degrees of freedom pass 22.5 once in a thousand."""
    noise = PhiloxNoise(5, 1000, 7, CPU)
    for drawn in (
        torch.cat([noise.renoise(0, step) for step in range(50)]),
        torch.cat([noise.canvas(number) for number in range(50)]),
    ):
        assert chi_square(drawn.bincount(minlength=7), torch.full((7,), 1 / 7)) < 22.5


def test_rare_tokens_are_drawn_as_often_as_they_should() -> None:
    """Where fp32 uniforms of 23 bits would fail: a race is won by a tiny exponential, so those need their low bits."""
    words = torch.arange(0, 2**20, 16)
    assert exponential(words).unique().numel() == words.numel()


def test_a_sample_is_the_race_over_its_own_variates() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    noise = PhiloxNoise(3, 6, 300, CPU)
    every = torch.ones(6, dtype=torch.bool)
    race = (logits.double().softmax(-1) / noise.variates(2, 5, torch.arange(6)).double()).argmax(-1)
    assert torch.equal(noise.sample(logits, every, 2, 5), race)
    certain = torch.nn.functional.one_hot(torch.arange(6) * 50, 300) * 200.0
    assert torch.equal(noise.sample(certain, every, 2, 5), torch.arange(6) * 50)


def test_the_lowest_id_wins_a_tie() -> None:
    assert exponential_race(torch.zeros(2, 40), torch.ones(2, 40)).tolist() == [0, 0]
    logits = torch.tensor([-torch.inf, 1.0, 0.0, 1.0])
    assert exponential_race(logits, torch.ones(4)).item() == 1


def test_rows_that_are_not_accepted_draw_nothing_and_change_nothing() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    accepted = torch.tensor([False, True, True, False, False, True])
    noise = PhiloxNoise(3, 6, 300, CPU)
    some, every = noise.sample(logits, accepted, 2, 5), noise.sample(logits, torch.ones_like(accepted), 2, 5)
    assert torch.equal(some[accepted], every[accepted])
    assert some.dtype == torch.int64 and ((some >= 0) & (some < 300)).all()


def test_no_row_at_all_may_be_accepted() -> None:
    nothing = torch.zeros(6, dtype=torch.bool)
    assert PhiloxNoise(3, 6, 300, CPU).sample(torch.zeros(6, 300), nothing, 2, 5).shape == (6,)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=f"seed {seed} is not in 0"):
        PhiloxNoise(seed, 4, 10, CPU)


def test_torch_noise_draws_in_the_order_of_transformers() -> None:
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(1))
    accepted = torch.tensor([True, False, False, False, False])  # all rows are drawn, whatever is accepted
    noise = TorchNoise(torch.Generator().manual_seed(7), 5, 30)
    ours = [noise.canvas(0), noise.sample(logits, accepted, 0, 0), noise.renoise(0, 0), noise.canvas(1)]
    draw = torch.Generator().manual_seed(7)
    assert torch.equal(ours[0], torch.randint(0, 30, (1, 5), generator=draw)[0])
    assert torch.equal(ours[1], torch.multinomial(logits.softmax(-1), 1, generator=draw)[:, 0])
    assert torch.equal(ours[2], torch.randint(0, 30, (1, 5), generator=draw)[0])
    assert torch.equal(ours[3], torch.randint(0, 30, (1, 5), generator=draw)[0])


def test_rows_that_no_draw_could_change_are_not_drawn_for_nothing() -> None:
    """Leaving them out changes no sample: the whole race over every row has the same winners."""
    noise = PhiloxNoise(11, 64, 128, CPU)
    draw = torch.Generator().manual_seed(0)
    everywhere = torch.ones(64, dtype=torch.bool)
    for step, sharpness in enumerate((1.0, 5.0, 10.0, 20.0, 40.0)):
        logits = sharpness * torch.randn(64, 128, generator=draw)
        whole = exponential_race(logits, noise.variates(0, step, torch.arange(64)))
        assert torch.equal(noise.sample(logits, everywhere, 0, step), whole)


def test_the_farthest_winner_is_within_reach() -> None:
    """FARTHEST is the widest gap that the variates can bridge, and hardly more."""
    smallest, largest = exponential(torch.tensor([0, (1 << 32) - 1])).tolist()
    assert 0 < FARTHEST - math.log(largest / smallest) < 0.02


# ── blocks of rows ────────────────────────────────────────────────────────────────────────────────────────────────


@given(rows=st.integers(0, 300), vocab=st.integers(1, 300_000), each=st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_blocks_are_all_rows_once_and_none_is_too_large(rows: int, vocab: int, each: int) -> None:
    blocks = row_blocks(rows, vocab, each)
    assert [row for block in blocks for row in range(rows)[block]] == list(range(rows))
    largest = max((block.stop - block.start for block in blocks), default=1)
    assert largest == 1 or largest * vocab * each * 4 <= stream.BLOCK_BYTES
    if len(blocks) > 1:
        assert (largest + 1) * vocab * each * 4 > stream.BLOCK_BYTES  # and none smaller than it must be


def test_the_real_canvas_is_eight_blocks_and_the_demo_s_is_one() -> None:
    assert len(row_blocks(256, 262_144)) == 8 and len(row_blocks(256, 262_144, DRAWN)) == 32
    assert len(row_blocks(96, 128, DRAWN)) == 1


@pytest.mark.parametrize("rows", [1, 2, 5, 100])
def test_how_a_canvas_is_cut_is_no_input(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = 4 * torch.randn(40, 300, generator=torch.Generator().manual_seed(1))
    accepted = torch.rand(40, generator=torch.Generator().manual_seed(2)) < 0.7
    whole = PhiloxNoise(3, 40, 300, CPU).sample(logits, accepted, 2, 5)
    monkeypatch.setattr(stream, "BLOCK_BYTES", 4 * 300 * rows)
    assert torch.equal(PhiloxNoise(3, 40, 300, CPU).sample(logits, accepted, 2, 5), whole)


def test_a_draw_takes_two_blocks_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the logits, of rows that are all drawn."""
    L, V = 64, 4096
    monkeypatch.setattr(stream, "BLOCK_BYTES", 4 * V * 8)
    logits, noise = torch.randn(L, V), PhiloxNoise(3, L, V, CPU)
    with LiveBytes() as live:
        noise.sample(logits, torch.ones(L, dtype=torch.bool), 0, 0)
    assert stream.BLOCK_BYTES < live.peak <= 2 * stream.BLOCK_BYTES


def test_another_attempt_draws_other_numbers_for_everything() -> None:
    first = PhiloxNoise(5, 6, 50, CPU)
    drawn = first.canvas(0), first.renoise(0, 3), first.variates(0, 0, torch.arange(2))
    again = first.again()
    assert (again.attempt, first.attempt) == (1, 0) and again.again().attempt == 2
    for ours, theirs in zip(
        drawn, (again.canvas(0), again.renoise(0, 3), again.variates(0, 0, torch.arange(2))), strict=True
    ):
        assert not torch.equal(ours, theirs)
    assert torch.equal(again.renoise(0, 3), PhiloxNoise(5, 6, 50, CPU, attempt=1).renoise(0, 3))
