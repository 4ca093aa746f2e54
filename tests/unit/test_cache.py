"""The cache against the plainest one there is, which keeps everything; and its laws under the model.

The model runs in fp64, where two orders of the same sums differ by 1e-14: the laws hold to 1e-10 or not at all.
"""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from reference import encode, open_model
from torch import Tensor

from dgemma_local.cache import SLACK_CANVASES, Cache, Room, cache_bytes, causal_mask
from dgemma_local.config import ModelConfig, load_model_config
from dgemma_local.model import DiffusionGemma

GOLDEN = Path(__file__).parent.parent / "golden" / "tiny"
CONFIG = load_model_config(GOLDEN)  # layers sliding, sliding, full; window 8, canvas 12
W, C = CONFIG.sliding_window, CONFIG.canvas_length
SLACK = SLACK_CANVASES * C


@pytest.fixture(scope="module")
def model() -> DiffusionGemma:
    return open_model(GOLDEN, torch.float64)


def ids(n: int, seed: int) -> Tensor:
    return torch.randint(5, CONFIG.vocab_size, (n,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def committed(cache: Cache, config: ModelConfig = CONFIG) -> list[tuple[Tensor, Tensor]]:
    """What the next pass would see of each layer's committed keys and values: a pass of no rows."""
    nothing = [torch.empty(layer.kv_heads, 0, layer.head_dim) for layer in config.layers]
    return [(k.clone(), v.clone()) for k, v in (cache.write(i, none, none) for i, none in enumerate(nothing))]


def logits(model: DiffusionGemma, prompt: Tensor, canvas: Tensor, chunk: int = 1_000_000) -> Tensor:
    """A first denoising step behind a fresh prefill."""
    cache = model.new_cache()
    model.encode(prompt, cache, chunk)
    return model.denoise(canvas, cache, None)


def close(ours: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(ours, want, atol=1e-10, rtol=0)


# ── the data structure ────────────────────────────────────────────────────────────────────────────────────────────


class AgainstEverythingKept(RuleBasedStateMachine):
    """Random passes and crops: each pass sees what a list of all rows ever committed would show it."""

    @initialize(seed=st.integers(0, 1000))
    def start(self, seed: int) -> None:
        self.draw = torch.Generator().manual_seed(seed)
        self.cache = Cache(CONFIG, torch.float32)
        self.longest = 0
        self.kept: list[tuple[Tensor, Tensor]] = [
            (torch.empty(layer.kv_heads, 0, layer.head_dim),) * 2 for layer in CONFIG.layers
        ]

    def a_pass(self, rows: int) -> list[tuple[Tensor, Tensor]]:
        """Writes random rows to every layer and checks the view; -> the rows."""
        written = []
        for i, layer in enumerate(CONFIG.layers):
            k, v = (torch.randn(layer.kv_heads, rows, layer.head_dim, generator=self.draw) for _ in "kv")
            seen = W - 1 if layer.kind == "sliding" else self.cache.length
            start = max(0, self.cache.length - seen)
            keys, values = self.cache.write(i, k, v)
            assert torch.equal(keys, torch.cat([self.kept[i][0][:, start:], k], 1))
            assert torch.equal(values, torch.cat([self.kept[i][1][:, start:], v], 1))
            written.append((k, v))
        return written

    @rule(rows=st.one_of(st.integers(1, 3 * W), st.just(C)))
    def encoder_pass(self, rows: int) -> None:
        written = self.a_pass(rows)
        self.cache.advance(rows)
        self.longest = max(self.longest, self.cache.length)
        self.kept = [
            (torch.cat([k, new_k], 1), torch.cat([v, new_v], 1))
            for (k, v), (new_k, new_v) in zip(self.kept, written, strict=True)
        ]

    @rule(rows=st.just(C))
    def denoising_step(self, rows: int) -> None:
        self.a_pass(rows)

    @precondition(lambda self: self.cache.length > 0)
    @rule(share=st.floats(0, 1))
    def crop(self, share: float) -> None:
        length = int(share * self.cache.length)
        if self.cache.can_crop(length):
            self.cache.crop(length)
            self.kept = [(k[:, :length], v[:, :length]) for k, v in self.kept]
        else:
            assert self.longest - length > SLACK  # so far back from its longest it may always step
            with pytest.raises(ValueError, match="window is no longer held"):
                self.cache.crop(length)

    @invariant()
    def counts(self) -> None:
        assert self.cache.length == self.kept[0][0].shape[1]


TestAgainstEverythingKept = AgainstEverythingKept.TestCase
TestAgainstEverythingKept.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


class PlannedAgainstEverythingKept(AgainstEverythingKept):
    """The same of a planned cache: nothing is ever allocated again, and a pass past the plan is refused and harmless."""

    @initialize(seed=st.integers(0, 1000), context=st.integers(C + 1, 40 * W), slack=st.integers(0, 3 * C))
    def start(self, seed: int, context: int, slack: int) -> None:  # type: ignore[override]
        super().start(seed)
        self.room = Room(context=context, rows=3 * W, slack=slack)
        self.cache.reserve(self.room)
        self.bytes, self.places = self.cache.bytes, places(self.cache)

    def a_pass(self, rows: int) -> list[tuple[Tensor, Tensor]]:
        assume(self.cache.length + rows <= self.room.context)
        return super().a_pass(rows)

    @precondition(lambda self: self.cache.length > 0)
    @rule(share=st.floats(0, 1))
    def crop(self, share: float) -> None:
        length = int(share * self.cache.length)
        if self.cache.can_crop(length):
            self.cache.crop(length)
            self.kept = [(k[:, :length], v[:, :length]) for k, v in self.kept]
        else:  # the rows of the widest pass are taken from the slack
            assert self.longest - length > self.room.slack - (self.room.rows - C)

    @rule()
    def past_the_plan(self) -> None:
        rows = self.room.context - self.cache.length + 1
        full = CONFIG.layers[-1]
        k = torch.zeros(full.kv_heads, rows, full.head_dim)
        with pytest.raises(ValueError, match="is past the plan of"):
            self.cache.write(len(CONFIG.layers) - 1, k, k)

    @invariant()
    def stays_where_it_is(self) -> None:
        assert self.cache.bytes == self.bytes and places(self.cache) == self.places


TestPlannedAgainstEverythingKept = PlannedAgainstEverythingKept.TestCase
TestPlannedAgainstEverythingKept.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def places(cache: Cache) -> list[int]:
    """Where each layer's keys lie."""
    nothing = [torch.empty(layer.kv_heads, 0, layer.head_dim) for layer in CONFIG.layers]
    return [cache.write(i, none, none)[0].untyped_storage().data_ptr() for i, none in enumerate(nothing)]


@given(
    pattern=st.lists(st.sampled_from("sf"), max_size=6),
    context=st.integers(13, 3000),
    rows=st.integers(1, 600),
    slack=st.integers(0, 50),
    window=st.integers(1, 300),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=60, deadline=None)
def test_the_planned_bytes_are_the_allocated_bytes(
    pattern: list[str], context: int, rows: int, slack: int, window: int, dtype: torch.dtype
) -> None:
    kinds = dict(zip("sf", (CONFIG.layers[0], CONFIG.layers[-1]), strict=True))
    config = replace(CONFIG, sliding_window=window, layers=tuple(kinds[letter] for letter in [*pattern, "f"]))
    cache, room = Cache(config, dtype), Room(context=context, rows=rows, slack=slack)
    assert cache.bytes == 0
    cache.reserve(room)
    assert cache.bytes == cache_bytes(config, room, dtype.itemsize)


def test_a_planned_cache_is_as_small_as_it_can_be() -> None:
    """Full layers the context, sliding ones the window and a pass; where a pass is wide, a canvas of slack is free."""
    sliding, _, full = (2 * layer.kv_heads * layer.head_dim * 4 for layer in CONFIG.layers)
    for rows, slack, slots in ((2 * C, C, W - 1 + 2 * C), (2 * C, 0, W - 1 + 2 * C), (C, 4 * C, W - 1 + 5 * C)):
        room = Room(context=1000, rows=rows, slack=slack)
        assert cache_bytes(CONFIG, room, 4) == 1000 * full + 2 * slots * sliding
    assert cache_bytes(CONFIG, Room(context=20, rows=2 * C, slack=C), 4) == 20 * (full + 2 * sliding)


def test_a_cache_in_use_cannot_be_planned_any_more() -> None:
    cache = Cache(CONFIG, torch.float32)
    fill(cache, 5, 5)
    with pytest.raises(ValueError, match="a cache of 5 tokens cannot be planned"):
        cache.reserve(Room(context=100, rows=10, slack=0))


@pytest.mark.parametrize("prompt", [3, 2 * C, 100 - C])
def test_a_planned_cache_changes_no_bit(model: DiffusionGemma, prompt: int) -> None:
    first, canvas = ids(prompt, seed=4), ids(C, seed=5)
    grown, planned = model.new_cache(), model.new_cache()
    planned.reserve(Room(context=100, rows=2 * C, slack=C))
    for cache in (grown, planned):
        model.encode(first, cache, 2 * C)
    assert torch.equal(model.denoise(canvas, grown, None), model.denoise(canvas, planned, None))


def test_the_window_counts_the_row_itself() -> None:
    mask = causal_mask(seen=3, rows=4, window=3, device=torch.device("cpu"))
    assert mask.int().tolist() == [
        [0, 1, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 1, 1, 1],
    ]
    assert causal_mask(2, 2, None, torch.device("cpu")).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


def fill(cache: Cache, rows: int, by: int) -> None:
    for start in range(0, rows, by):
        for i, layer in enumerate(CONFIG.layers):
            k = torch.zeros(layer.kv_heads, min(by, rows - start), layer.head_dim)
            cache.write(i, k, k)
        cache.advance(min(by, rows - start))


@pytest.mark.parametrize("by", [1, 7, C, 100])
def test_sliding_layers_stay_bounded(by: int) -> None:
    """Beyond window, slack and one pass nothing is allocated for them; full layers at most double."""
    cache = Cache(CONFIG, torch.float32)
    fill(cache, 2000, by)
    sliding, _, full = (2 * layer.kv_heads * layer.head_dim * 4 for layer in CONFIG.layers)  # bytes a token, k and v
    most = 2 * sliding * (W - 1 + SLACK + by) + 2 * full * (2000 + by)
    assert 2 * sliding * (W - 1) + full * 2000 <= cache.bytes <= most


def test_all_is_moved_rarely() -> None:
    """Full layers double; a sliding slab is moved once a commit, and no denoising step but the first moves anything."""
    cache = Cache(CONFIG, torch.float32)
    places: list[list[int]] = []
    for _ in range(60):
        for _ in range(3):
            places.append([])
            for i, layer in enumerate(CONFIG.layers):
                rows = torch.zeros(layer.kv_heads, C, layer.head_dim)
                places[-1].append(cache.write(i, rows, rows)[0].untyped_storage().data_ptr())
        cache.advance(C)
    pairs = list(pairwise(places))
    assert all(a == b for n, (a, b) in enumerate(pairs, start=1) if n % 3)
    assert sum(a[2] != b[2] for a, b in pairs) <= 8


@pytest.mark.parametrize("length", [-1, 101])
def test_a_crop_to_nowhere_is_refused(length: int) -> None:
    cache = Cache(CONFIG, torch.float32)
    fill(cache, 100, 10)
    assert not cache.can_crop(length)
    with pytest.raises(ValueError, match="cannot crop a cache of 100 tokens"):
        cache.crop(length)
    assert cache.length == 100


def test_a_crop_beyond_the_slack_is_refused() -> None:
    cache = Cache(CONFIG, torch.float32)
    fill(cache, 1000, 10)
    assert cache.can_crop(1000 - SLACK)
    assert not cache.can_crop(500) and not cache.can_crop(0)


# ── under the model ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("chunk", [1, 5, W - 1, W, W + 1])
@pytest.mark.parametrize("length", [3, W - 1, W, W + 1, 5 * W + 3])
def test_chunked_prefill_equals_one_pass(model: DiffusionGemma, chunk: int, length: int) -> None:
    prompt, canvas = ids(length, seed=length), ids(C, seed=1)
    close(logits(model, prompt, canvas, chunk), logits(model, prompt, canvas))


@given(
    lengths=st.lists(st.integers(1, 3 * W), min_size=1, max_size=6),
    seed=st.integers(0, 100),
    draft=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_any_cutting_equals_one_pass(model: DiffusionGemma, lengths: list[int], seed: int, draft: bool) -> None:
    """Encoded in pieces, with or without denoising steps between them: commit after commit is one long prefill."""
    prompt, canvas = ids(sum(lengths), seed), ids(C, seed + 1)
    cache = model.new_cache()
    for piece in prompt.split(lengths):
        if draft:
            model.denoise(canvas, cache, None)
        model.encode(piece, cache)
    whole = model.new_cache()
    model.encode(prompt, whole, chunk=1_000_000)
    for (k, v), (want_k, want_v) in zip(committed(cache), committed(whole), strict=True):
        close(k, want_k)
        close(v, want_v)
    close(model.denoise(canvas, cache, None), model.denoise(canvas, whole, None))


def test_a_prompt_of_many_default_chunks(model: DiffusionGemma) -> None:
    """2,100 tokens: four chunks of 512 and a rest, each at rotary positions of its own."""
    prompt, canvas = ids(2100, seed=9), ids(C, seed=1)
    cache = model.new_cache()
    model.encode(prompt, cache)
    close(model.denoise(canvas, cache, None), logits(open_model(GOLDEN, torch.float64), prompt, canvas))


def test_behind_8k_tokens_nothing_has_faded(model: DiffusionGemma) -> None:
    """8,300 tokens in chunks of one size as of another; and the first of them still moves the logits."""
    prompt, canvas = ids(8300, seed=9), ids(C, seed=1)
    moved = prompt.clone()
    moved[0] = (moved[0] + 1) % CONFIG.vocab_size
    base, other, far = (
        logits(model, each, canvas, chunk) for each, chunk in ((prompt, 512), (prompt, 700), (moved, 512))
    )
    close(base, other)
    assert (far - base).abs().max() > 1e-8


@pytest.mark.parametrize("chunk", [W, 4 * W])
def test_a_needle_many_windows_back_is_seen(model: DiffusionGemma, chunk: int) -> None:
    """One token of the prompt, before, at and after the edges of chunks: changing it moves the logits as in one pass."""
    prompt, canvas = ids(12 * W, seed=3), ids(C, seed=1)
    base = logits(model, prompt, canvas)
    for at in (0, 1, chunk - 1, chunk, chunk + 1, 6 * W, 12 * W - 1):
        changed = prompt.clone()
        changed[at] = 5 + (changed[at] - 4) % (CONFIG.vocab_size - 5)
        want = logits(model, changed, canvas)
        assert (want - base).abs().max() > 1e-3
        close(logits(model, changed, canvas, chunk), want)


def test_denoising_leaves_the_committed_entries_as_they_are(model: DiffusionGemma) -> None:
    """Bit for bit, also where the canvas outgrows the slab and all is moved."""
    cache = model.new_cache()
    for n in (3, 20, 50, 7):
        model.encode(ids(n, seed=n), cache)
        before = committed(cache)
        previous = model.denoise(ids(C, seed=1), cache, None)
        model.denoise(ids(C, seed=2), cache, model.signal(previous / 0.5))
        for (k, v), (was_k, was_v) in zip(committed(cache), before, strict=True):
            assert torch.equal(k, was_k) and torch.equal(v, was_v)


@pytest.mark.parametrize("length", [3, 8, 20])
def test_the_short_way_to_the_keys_and_values_is_exact(model: DiffusionGemma, length: int) -> None:
    """`encode` skips what follows the last layer's K/V; those are the same bits."""
    whole, short = model.new_cache(), model.new_cache()
    encode(model, ids(length, seed=1), whole)
    model.encode(ids(length, seed=1), short)
    assert short.length == whole.length == length
    for (k, v), (want_k, want_v) in zip(committed(short), committed(whole), strict=True):
        assert torch.equal(k, want_k) and torch.equal(v, want_v)


@pytest.mark.parametrize(("held", "shared"), [(30, 30), (30, 25), (100, 100 - SLACK), (40, 1), (40, 0)])
def test_crop_and_continue_equals_a_fresh_run(model: DiffusionGemma, held: int, shared: int) -> None:
    first, canvas = ids(held, seed=1), ids(C, seed=2)
    second = torch.cat([first[:shared], ids(21, seed=3)])
    cache = model.new_cache()
    model.encode(first, cache)
    model.denoise(canvas, cache, None)
    cache.crop(shared)
    model.encode(second[shared:], cache)
    close(model.denoise(canvas, cache, None), logits(model, second, canvas))


def test_a_refused_crop_changes_nothing(model: DiffusionGemma) -> None:
    cache = model.new_cache()
    model.encode(ids(300, seed=1), cache, chunk=10)
    before = model.denoise(ids(C, seed=1), cache, None)
    with pytest.raises(ValueError, match="cannot crop"):
        cache.crop(100)
    assert torch.equal(model.denoise(ids(C, seed=1), cache, None), before)
