"""Every kernel on a card, on the sizes of the 26B model, against its twin there and against fp64; and what no interpreter
shows: bits under load, capture in graphs, launches that fit the card, tensor cores that meet every code, memory that stays
as it was.

    pytest -m gpu tests/gpu                    bash tests/gpu/run_all.sh: with the sanitizer and the times
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from gpu import real
from gpu.real import BF16, E4M3, FP32, INT32, SOFTCAP, S

# isort: split
import torch
from compile.configurations import CONFIGURATIONS, EVERY, Configuration
from dgemma_local.kernels import _gemm, _philox
from dgemma_local.kernels._launch import ADA, Launch, gpu_of, recording
from dgemma_local.kernels._triton import tl, triton
from dgemma_local.kernels.attention import attention, attention_twin
from dgemma_local.kernels.canvas import update
from dgemma_local.kernels.draw import Parts, draw, draw_twin, scaled_twin, settle
from dgemma_local.kernels.draw import tile_for as draw_tile
from dgemma_local.kernels.experts_grouped import down, gated
from dgemma_local.kernels.fp8_linear import fp8_linear
from dgemma_local.kernels.heads import heads
from dgemma_local.kernels.logits import logits
from dgemma_local.kernels.nvfp4_linear import nvfp4_linear
from dgemma_local.kernels.nvfp4_nvfp4_linear import nvfp4_nvfp4_linear
from dgemma_local.kernels.router import Routing, group_twin, items_twin
from dgemma_local.kernels.vocabulary import vocabulary_step, vocabulary_step_twin
from gpu import cases, replay
from gpu.cases import CASES, SUBSET, Outputs
from torch import Tensor

from dgemma_local import rope
from dgemma_local.noise import LANES, PhiloxNoise, Purpose, exponential
from dgemma_local.quant import Fp8, Nvfp4

pytestmark = pytest.mark.gpu

AGAIN, AGAIN_UNDER_LOAD = (1, 1) if real.REHEARSAL else (20, 100)
CANVAS_ONLY = ("vocabulary", "canvas update", "attention, sliding, canvas", "attention, full, canvas")
PROMPT_ONLY = ("attention, sliding, prompt", "attention, full, prompt")
GUARD = 1 << 16  # bytes on either side
POISON = 0x7F  # in every byte: NaN in E4M3, 3.4e38 in 16 and 32 bits, far out of every bound as an integer


def rows_of(name: str) -> list[int]:
    """Row numbers that production launches this with."""
    if name.startswith(CANVAS_ONLY):
        return [S.canvas]
    return [S.prefill] if name.startswith(PROMPT_ONLY) else [S.canvas, S.prefill]


def assert_same_bits(ours: Outputs, before: Outputs) -> None:
    for a, b in zip(ours, before, strict=True):
        assert torch.equal(real.bits(a), real.bits(b)), f"{int((real.bits(a) != real.bits(b)).sum())} bytes differ"


@contextmanager
def fresh() -> Iterator[None]:
    """What a test made goes back to the card."""
    yield
    gc.collect()
    if real.DEVICE.type == "cuda":
        torch.cuda.empty_cache()


# ── every kernel and its twin ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("name", "rows"), [(name, rows) for name in CASES for rows in rows_of(name)])
def test_near_the_twin_and_the_same_bits_again(name: str, rows: int) -> None:
    with fresh():
        case = CASES[name](rows)
        first = case.ours()
        case.check(first)
        for _ in range(AGAIN):
            assert_same_bits(case.ours(), first)


@pytest.mark.parametrize("rows", [3, S.odd])
@pytest.mark.parametrize("name", SUBSET)
def test_near_the_twin_on_odd_numbers_of_rows(name: str, rows: int) -> None:
    with fresh():
        case = CASES[name](rows)
        case.check(case.ours())


# ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Guards:
    """Tensors that wrappers allocate lie between poison, and are poison until somebody writes to them."""

    def __init__(self) -> None:
        self.made: list[tuple[Tensor, int]] = []
        self._empty = torch.empty

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        size = torch.Size(shape).numel() * torch.empty((), dtype=dtype, device="meta").element_size()
        whole = self._empty(2 * GUARD + size + -size % 16, dtype=torch.uint8, device=device).fill_(POISON)
        self.made.append((whole, size))
        return whole[GUARD : GUARD + size].view(dtype).view(shape)

    def check(self) -> None:
        real.wait()
        assert self.made
        for whole, size in self.made:
            assert (whole[:GUARD] == POISON).all(), f"written before a tensor of {size} bytes"
            assert (whole[GUARD + size :] == POISON).all(), f"written behind a tensor of {size} bytes"


@contextmanager
def guarded() -> Iterator[Guards]:
    guards = Guards()
    plain = {name: getattr(torch, name) for name in ("empty", "empty_like")}
    new_empty = torch.Tensor.new_empty
    on_card = real.DEVICE.type

    def empty(*shape: Any, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Tensor:
        shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        where = torch.device(device or "cpu")
        if where.type != on_card or options:
            made: Tensor = plain["empty"](shape, dtype=dtype, device=device, **options)
            return made
        return guards.empty(shape, dtype or torch.get_default_dtype(), where)

    def empty_like(x: Tensor, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        return empty(x.shape, dtype=dtype or x.dtype, device=options.pop("device", x.device), **options)

    def make_new(x: Tensor, *shape: Any, dtype: torch.dtype | None = None, device: Any = None, **more: Any) -> Tensor:
        return empty(*shape, dtype=dtype or x.dtype, device=device or x.device, **more)

    torch.empty, torch.empty_like = empty, empty_like  # type: ignore[assignment]
    torch.Tensor.new_empty = make_new  # type: ignore[assignment, method-assign]
    try:
        yield guards
    finally:
        torch.empty, torch.empty_like = plain["empty"], plain["empty_like"]
        torch.Tensor.new_empty = new_empty  # type: ignore[method-assign]


@pytest.mark.parametrize("rows", [S.odd, S.canvas])
@pytest.mark.parametrize("name", SUBSET)
def test_nothing_is_written_around_an_output_and_everything_in_it(name: str, rows: int) -> None:
    """Poison around each tensor stays, and poison within shows nowhere: the bits are those without it."""
    with fresh():
        case = CASES[name](rows)
        plain = case.ours()
        with guarded() as guards:
            ours = case.ours()
        guards.check()
        assert_same_bits(ours, plain)


# ── the same bits, whatever else goes on ──────────────────────────────────────────────────────────────────────────


class Load:
    """Work of another kind on another stream, different at every call."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream() if real.DEVICE.type == "cuda" else None
        n = 64 if real.REHEARSAL else 4096
        self.a, self.b = real.normal(n, n, seed=1), real.normal(n, n, seed=2)

    def more(self, i: int) -> None:
        if self.stream is None:
            self.a @ self.b
            return
        with torch.cuda.stream(self.stream):
            for _ in range(i % 4):
                self.a @ self.b
            self.a.roll(i, 0)


@pytest.mark.parametrize("name", SUBSET)
def test_a_hundred_launches_among_other_work_give_the_same_bits(name: str) -> None:
    with fresh():
        case, load = CASES[name](S.canvas), Load()
        first = case.ours()
        differ = torch.zeros((), dtype=torch.int64, device=real.DEVICE)
        for i in range(AGAIN_UNDER_LOAD):
            load.more(i)
            for a, b in zip(case.ours(), first, strict=True):
                differ += (real.bits(a) != real.bits(b)).sum()
        assert int(differ) == 0
        assert not _gemm.counters(first[0].device).any()


# ── in a graph ────────────────────────────────────────────────────────────────────────────────────────────────────


class Captured:
    """A call in a CUDA graph; its outputs lie where they lay at capture. In a rehearsal the call itself, again."""

    def __init__(self, call: Callable[[], Any]) -> None:
        real.tensors_of(call())  # compiled, and what lasts allocated
        real.wait()
        self.call, self.graph = call, None
        if real.DEVICE.type == "cuda":
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.outputs = real.tensors_of(call())
        else:
            self.outputs = tuple(t.clone() for t in real.tensors_of(call()))

    def replay(self) -> Outputs:
        if self.graph is not None:
            self.graph.replay()
            real.wait()
        else:
            for kept, new in zip(self.outputs, real.tensors_of(self.call()), strict=True):
                kept.copy_(new)
        return tuple(t.clone() for t in self.outputs)


# but the canvas update, whose case begins a canvas from the host at every call: see the captured step below
@pytest.mark.parametrize("name", [name for name in SUBSET if name != "canvas update"])
def test_a_captured_launch_gives_the_eager_bits_at_every_replay(name: str) -> None:
    with fresh():
        case = CASES[name](S.canvas)
        eager, captured = case.ours(), Captured(case.ours)
        for _ in range(3):
            assert_same_bits(captured.replay(), eager)


@pytest.mark.parametrize("layer", ["sliding", "full"])
def test_one_graph_serves_every_phase(layer: str) -> None:
    """Heads and attention captured once; what is seen is read from the device: canvas and prompt, padded, anywhere."""
    kv, d = cases.GEOMETRY[layer]
    T, capacity, window = S.prefill, S.contexts[-1] + S.prefill, S.window if layer == "sliding" else None
    count = S.heads + kv * (1 if layer == "full" else 2)
    g = torch.full((kv, capacity, d), 0.25, device=real.DEVICE)
    held = [(g * real.normal(kv, capacity, d, seed=s, size=4.0, dtype=FP32)).to(BF16) for s in (1, 2)]
    slabs = [t.clone() for t in held]
    projected, qk_norm = real.normal(T, count * d, size=4.0), cases.weight(1, d).expand(S.heads + kv, -1).contiguous()
    tables = rope.table(cases.ROPE[layer], d, torch.arange(T, device=real.DEVICE), BF16)
    span = cases.span_of(0, 0, T, True)

    def call() -> tuple[Tensor, Tensor]:
        q = heads(projected, qk_norm, *tables, S.heads, kv, real.EPS, *slabs, span)
        return q, attention(q, *slabs, span, window)

    captured = Captured(call)
    for at in S.contexts:
        for rows, causal in ((T, True), (S.canvas, False), (S.odd, True), (1, False)):
            first = max(0, at - S.window + 1) if window else 0
            span.copy_(cases.span_of(first, at, rows, causal))
            _restore(slabs, held)
            q, out = captured.replay()
            after = [t.clone() for t in slabs]
            _restore(slabs, held)
            assert_same_bits((q, out), call())
            assert_same_bits(tuple(after), tuple(slabs))
            cases.compare(partial(attention_twin, q, *slabs, span, window))((out,))
            assert not out[rows:].any()


def _restore(slabs: list[Tensor], held: list[Tensor]) -> None:
    for slab, was in zip(slabs, held, strict=True):
        slab.copy_(was)


@pytest.mark.parametrize("reference", [True, False])
def test_a_captured_step_reads_temperature_key_and_step_from_the_device(reference: bool) -> None:
    """The end of a step and the canvas update in one graph: a whole canvas by replays, another key, beside eager."""
    T, steps = S.canvas, 5
    hidden, E = real.normal(T, S.D, seed=1), cases.table("bf16")

    def call(state: Any) -> Callable[[], Outputs]:
        def step() -> Outputs:
            end = vocabulary_step(
                hidden, E, SOFTCAP, state.temperature, cases.scale_of_embeddings(), state.key, reference
            )
            update(state, end.draft, end.sampled, end.entropy, S.V, 9.0, 0.005)
            return real.tensors_of(end)

        return step

    on_graph, eager = cases.canvas_state(T), cases.canvas_state(T)
    captured, drawn = Captured(call(on_graph)), []
    with fresh():
        for seed in (3, 2**64 - 5):
            for state in (on_graph, eager):
                state.begin(real.integers(T, below=S.V), _philox.key_numbers(seed, 0, 7).to(real.DEVICE))
                state.history.fill_(-1)
            for _ in range(steps):
                ours = captured.replay()
                assert_same_bits(ours, call(eager)())
                assert_same_bits(real.tensors_of(on_graph), real.tensors_of(eager))
                drawn.append(ours[2])
            assert int(on_graph.key.step) == steps
        # by its step alone or by its key alone there would be fewer
        assert len({tuple(sample.tolist()) for sample in drawn}) > steps


# ── launches that production makes ────────────────────────────────────────────────────────────────────────────────


def for_this_card(entry: Configuration) -> bool:
    """What is compiled for its capability; on one that nobody compiled for, what all cards have in common."""
    compiled = {gpu.capability for gpu in EVERY}
    return (real.capability() if real.capability() in compiled else ADA.capability) in {
        g.capability for g in entry.gpus
    }


def launch_all(launches: list[Launch]) -> None:
    """Each distinct launch, compiled and run."""
    found = [launch for launch, _ in replay.distinct(launches).values()]
    memory = replay.Memory(found)
    for launch in found:
        try:
            memory.run(launch)
            real.wait()
        except Exception as error:
            raise AssertionError(f"{replay.title_of(launch)} {launch.grid} {dict(launch.constants)}") from error
        memory.forget(launch)


@pytest.mark.parametrize(
    "name", [e.name for e in CONFIGURATIONS if for_this_card(e) and not e.name.startswith(("step/", "first/"))]
)
def test_every_production_launch_compiles_and_fits(name: str) -> None:
    (entry,) = (e for e in CONFIGURATIONS if e.name == name)
    with fresh():
        with recording(replay.this_card()) as launches:
            entry.call()
        assert launches
        if not real.REHEARSAL:  # of the real sizes: there only noted
            launch_all(launches)


@pytest.mark.parametrize("step", replay.every_step(real.capability()), ids=lambda step: step.name)
def test_every_launch_of_a_step_compiles_and_fits(step: replay.Step) -> None:
    with fresh():
        launch_all(replay.record(step, replay.this_card()))


# ── every code through the tensor cores ───────────────────────────────────────────────────────────────────────────

FINITE = [b for b in range(256) if b & 0x7F != 0x7F]  # of E4M3


def every_byte() -> Nvfp4:
    """[256, 512]: row s, under scale s, holds each of 256 bytes; all finite scales, of both signs."""
    scales = torch.tensor([*FINITE, *FINITE[:2]], dtype=torch.uint8, device=real.DEVICE)
    packed = torch.arange(256, device=real.DEVICE).to(torch.uint8).expand(256, -1).contiguous()
    one = torch.ones(1, device=real.DEVICE)
    return Nvfp4(packed, scales[:, None].expand(-1, 32).contiguous().view(E4M3), one, one, (256,), True)


def numbers_of(w: Nvfp4) -> Tensor:
    """code · scale in fp32 by table, on a CPU."""
    packed, scale = w.packed.cpu(), w.scale.cpu().float()
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return torch.cat([values, -values])[codes] * scale.repeat_interleave(16, -1)


def unit_rows(n: int) -> Tensor:
    return torch.eye(n, dtype=BF16, device=real.DEVICE)


def in_order(pairs: int) -> Routing:
    """One expert, which every row chose."""
    chosen = torch.zeros(pairs, 1, dtype=INT32)
    order, ends = group_twin(chosen, 1)
    made = torch.ones(pairs, 1), chosen, order.int(), ends, items_twin(ends, pairs, 32)
    return Routing(*(t.to(real.DEVICE) for t in made), 32)


def test_every_fp4_code_under_every_scale_through_a_linear() -> None:
    """Unit vectors pick the weights out one by one; each is exact in bf16, and the rest of its sum is zeros."""
    w = every_byte()
    assert torch.equal(nvfp4_linear(unit_rows(512), w).cpu().T.float(), numbers_of(w))


def test_every_fp4_code_under_every_scale_through_the_experts() -> None:
    w, want = every_byte(), numbers_of(every_byte())
    stacked = Nvfp4(w.packed[None], w.scale[None], w.global_scale[None], w.input_scale[None], w.heights, True)
    assert torch.equal(down(unit_rows(512), in_order(512), stacked, BF16).cpu().T.float(), want)
    # a gate of 3 · 32, whose gelu is itself, times every up: at most 8 bits, exact again
    codes = torch.cat([torch.full_like(w.packed, 0x55), w.packed])
    scale = torch.cat([torch.full((256, 32), 32.0, device=real.DEVICE), w.scale.float()]).to(E4M3)
    one = torch.ones(1, 2, device=real.DEVICE)
    ups = Nvfp4(codes[None], scale[None], one, one, (256, 256), True)
    made = gated(unit_rows(512), in_order(512), ups, BF16).cpu().T.float()
    assert torch.equal(made, want * 96.0)


if real.capability() >= (12, 0):

    def test_every_fp4_code_under_every_scale_on_both_sides() -> None:
        w, want = every_byte(), numbers_of(every_byte())
        one = torch.ones(1, device=real.DEVICE)
        places = torch.arange(512, device=real.DEVICE)
        codes = torch.zeros(512, 256, dtype=torch.uint8, device=real.DEVICE)
        codes[places, places // 2] = torch.where(places % 2 == 0, 0x02, 0x20).to(torch.uint8)  # code 1.0
        unit = torch.full((512, 32), 0x38, dtype=torch.uint8, device=real.DEVICE).view(E4M3)  # scale 1.0
        x = Nvfp4(codes, unit, one, one, (512,), True)
        assert torch.equal(nvfp4_nvfp4_linear(x, w).cpu().T.float(), want)
        other = nvfp4_nvfp4_linear(
            Nvfp4(w.packed, w.scale, one, one, (256,), True), Nvfp4(codes, unit, one, one, (512,), True)
        )
        assert torch.equal(other.cpu().float(), want)


def e4m3_codes() -> Tensor:
    return torch.tensor([*FINITE, 0, 0], dtype=torch.uint8, device=real.DEVICE).view(E4M3)


def test_every_e4m3_code_through_a_linear_the_experts_and_the_head() -> None:
    codes, one = e4m3_codes(), torch.ones(256, 1, device=real.DEVICE)
    want = codes.float()
    diagonal = torch.diag(want).to(E4M3)
    unit = torch.eye(256, device=real.DEVICE).to(E4M3)
    assert torch.equal(fp8_linear(Fp8(diagonal, one), Fp8(unit, one)).float(), torch.diag(want))
    assert torch.equal(fp8_linear(Fp8(unit, one), Fp8(diagonal, one)).float(), torch.diag(want))
    stacked = Fp8(diagonal[None], one[None])
    assert torch.equal(down(Fp8(unit, one), in_order(256), stacked, BF16).float(), torch.diag(want))
    for hidden in (unit_rows(256), Fp8(unit, one)):  # widened in registers; as they are
        out, peaks = torch.empty(256, 256, dtype=BF16, device=real.DEVICE), torch.empty(256, 2, device=real.DEVICE)
        logits(hidden, Fp8(diagonal, one), out, peaks, 0, 256)
        assert torch.equal(out.float(), torch.diag(want))


# ── scores and logits at their limits ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layer", ["sliding", "full"])
def test_saturated_scores(layer: str) -> None:
    """Scores in the thousands, of either sign: one key takes all, and 2^-126 is nothing to divide by."""
    (q, k, v, span, window), most = cases.attended(S.canvas, layer, False, S.contexts[2], BF16)
    for queries, keys in ((q * 200, k), (q.abs() * 200, -k.abs())):
        ours = attention(queries, keys, v, span, window, most=most)
        truth = attention_twin(queries.double(), keys, v, span, window)
        torch.testing.assert_close(ours.double(), truth, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("reference", [True, False])
def test_saturated_logits(reference: bool) -> None:
    """Products of ±1,000 and beyond: tanh is ±1, whole rows tie at ±30 / t, and the lowest id wins."""
    E = torch.zeros(S.V, S.D, dtype=BF16, device=real.DEVICE)
    thirds = torch.arange(S.V, device=real.DEVICE) % 3 == 1
    E[:, 0] = torch.where(thirds, 10.0, -10.0)
    hidden = torch.zeros(4, S.D, dtype=BF16, device=real.DEVICE)
    hidden[:, 0] = real.numbers(100.0, -100.0, 3e38, 0.0)
    arguments = (hidden, E, SOFTCAP, real.numbers(0.4), cases.scale_of_embeddings(), cases.key_of(), reference)
    with fresh():
        ours, twin = vocabulary_step(*arguments), vocabulary_step_twin(*arguments)
        few = int(thirds.sum())
        assert ours.draft.tolist() == [1, 0, 1, 0]
        assert torch.equal(ours.sampled, twin.sampled)
        torch.testing.assert_close(ours.entropy, real.numbers(few, S.V - few, few, S.V).log(), rtol=1e-5, atol=1e-5)
        assert ours.soft is not None and twin.soft is not None
        torch.testing.assert_close(ours.soft.float(), twin.soft.float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_the_race_on_given_logits(dtype: torch.dtype) -> None:
    """Without a product before it: draft and sample are the twin's but where logits are an ulp apart, and entropy's an ulp's."""
    T, V = S.canvas, S.V
    raw = real.normal(T, V, seed=5, size=8.0, dtype=FP32).to(dtype)
    raw[1] = 3.0  # all equal
    raw[2] = -1e4
    raw[2, V // 2] = 1e4  # certain
    cool, reference = real.numbers(0.6), dtype == BF16
    tile = draw_tile(reference, gpu_of(raw))
    tiles = -(-V // tile.k)
    parts = Parts.empty(T, 1, tiles, tiles, raw.device)
    peaks = torch.stack([block.float().amax(-1) for block in raw.split(128, -1)], -1)
    with fresh():
        draw(raw, peaks, None, None, SOFTCAP, cool, cases.key_of(), parts, 0, V, 0, reference)
        ours, _ = settle(parts, V, reference)
        twin = draw_twin(scaled_twin(raw, SOFTCAP, cool), cases.key_of())
        for a, b in ((ours.draft, twin.draft), (ours.sampled, twin.sampled)):
            real.say(f"{int((a != b).sum())} of {T} ids differ")
            assert int((a != b).sum()) <= T // 100
        assert int(ours.draft[1]) == 0 and int(ours.draft[2]) == int(ours.sampled[2]) == V // 2
        torch.testing.assert_close(ours.entropy, twin.entropy, rtol=1e-5, atol=1e-5)


def test_samples_follow_the_distribution() -> None:
    """Chi-square of samples of one row's softmax over 40 ids; 99.9 % of true samplers stay below 72."""
    E, row = real.normal(40, 64, seed=12, size=0.25), real.normal(1, 64, seed=13)
    hidden = row.expand(S.canvas, -1).contiguous()
    draws = 4 if not real.REHEARSAL else 40
    arguments = (hidden, E, SOFTCAP, real.numbers(0.6), 8.0)
    drawn = torch.cat([vocabulary_step(*arguments, cases.key_of(s), soft=False).sampled for s in range(draws)])
    z = (torch.nn.functional.linear(row, E).double() / SOFTCAP).tanh() * SOFTCAP / 0.6
    expected = z.softmax(-1)[0] * len(drawn)
    counts = torch.bincount(drawn, minlength=40).double()
    assert float(((counts - expected).square() / expected).sum()) < 72
    assert counts.count_nonzero() > 10


# ── the random stream ─────────────────────────────────────────────────────────────────────────────────────────────

KEYS = [(0, 0, 0, 0), (2**64 - 1, 255, 2**24 - 1, 65535), (0x9E3779B97F4A7C15, 3, 12, 5), (2**31, 0, 1, 2)]


@triton.jit
def _words(KEY, STEP, POSITION, GROUP, OUT, PURPOSE: tl.constexpr, P: tl.constexpr, G: tl.constexpr):  # type: ignore[no-untyped-def]
    position, group = tl.arange(0, P), tl.arange(0, G)
    four = _philox.words(KEY, STEP, PURPOSE, tl.load(POSITION + position)[:, None], tl.load(GROUP + group)[None, :])
    at = position[:, None] * G + group[None, :]
    for w in tl.static_range(4):
        tl.store(OUT + w * P * G + at, four[w].to(tl.int32, bitcast=True))


@triton.jit
def _tokens(KEY, STEP, OUT, vocab_size, PURPOSE: tl.constexpr, P: tl.constexpr):  # type: ignore[no-untyped-def]
    position = tl.arange(0, P)
    word = _philox.words(KEY, STEP, PURPOSE, position, position * 0)[0]
    tl.store(OUT + position, _philox.uniform_token(word, vocab_size))


@triton.jit
def _variates(WORD, OUT, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(OUT + at, _philox.exponential(tl.load(WORD + at).to(tl.uint32, bitcast=True)))


def unsigned(x: Tensor) -> Tensor:
    return x.long() & 0xFFFFFFFF


@pytest.mark.parametrize(("seed", "attempt", "canvas", "step"), KEYS)
def test_words_and_tokens_are_the_contracts(seed: int, attempt: int, canvas: int, step: int) -> None:
    key = _philox.Key.of(seed, attempt, canvas, real.numbers(step, dtype=INT32))
    position, group = (
        torch.cat([real.integers(n - 2, below=2**31 - 1, seed=n), real.numbers(0, 2**31 - 1, dtype=torch.int64)]).int()
        for n in (64, 128)
    )
    for purpose in Purpose:
        out = torch.empty(4, 64, 128, dtype=INT32, device=real.DEVICE)
        _words[(1,)](key.numbers, key.step, position, group, out, PURPOSE=int(purpose), P=64, G=128)
        noise = PhiloxNoise(seed, 4, LANES, torch.device("cpu"), attempt)
        want = noise.words(purpose, canvas, step, position.cpu().long()[:, None], group.cpu().long())
        assert torch.equal(unsigned(out).cpu(), want)
    ids = torch.empty(256, dtype=INT32, device=real.DEVICE)
    for vocabulary in (1, 1000, 262_144):
        _tokens[(1,)](key.numbers, key.step, ids, vocabulary, PURPOSE=int(Purpose.RENOISE), P=256)
        noise = PhiloxNoise(seed, 256, vocabulary, torch.device("cpu"), attempt)
        assert torch.equal(ids.long().cpu(), noise._uniform(Purpose.RENOISE, canvas, step))


def test_every_exponential_there_is() -> None:
    """All 2^23 + 2^20 arguments: within 4 ulp of `noise.exponential` on a CPU, 1.5 of the logarithm itself."""
    common, rare = torch.arange(2048, 1 << 23), torch.arange(1 << 20)
    if real.REHEARSAL:
        common, rare = common[::997], rare[::331]
    for word, truth in (
        (common * 512 + common % 512, -torch.log((2.0**24 - 2 * common.double() - 1) / 2**24)),
        (rare, -torch.log1p(-(rare.double() + 0.5) / 2**32)),
    ):
        size = 1024
        padded = torch.cat([word, word[:1].expand(-len(word) % size)]).to(real.DEVICE)
        out = torch.empty(len(padded), device=real.DEVICE)
        _variates[(len(padded) // size,)]((padded - (padded >> 31 << 32)).int(), out, N=size)
        ours, theirs = out[: len(word)].cpu(), exponential(word)
        ulp = torch.exp2(truth.log2().floor() - 23)
        apart, off = ((t.double() - w).abs() / ulp for t, w in ((ours, theirs.double()), (ours, truth)))
        real.say(
            f"{len(word)} variates: {float(off.max()):.3f} ulp from the logarithm, {float(apart.max()):.3f} from noise's"
        )
        assert float(off.max()) <= 1.5 and float(apart.max()) <= 4
        assert ours.min() > 0
