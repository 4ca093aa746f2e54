"""The canvas update against the sampler itself: accepted, next, done, and the stream of re-noise, bit for bit."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dgemma_local.kernels import _philox
from dgemma_local.kernels.canvas import State, Views, update, update_twin
from torch import Tensor

from dgemma_local import sampler
from dgemma_local.config import GenerationConfig
from dgemma_local.noise import PhiloxNoise
from dgemma_local.sampler import Canvas

GOLDEN = Path(__file__).parent.parent / "golden"
SEED, ATTEMPT, NUMBER, VOCAB = 2**63 + 7, 3, 5, 1000
CONFIG = GenerationConfig(
    steps=48, t_min=0.4, t_max=0.8, entropy_bound=0.1, confidence=0.005, stability=1, end_ids=(1,), pad_id=0
)
FORMS = [update, update_twin]

Update = Callable[..., None]


def cases(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((GOLDEN / f"{name}.json").read_text())["cases"]
    return found


def new_state(length: int, config: GenerationConfig, vocab: int = VOCAB) -> tuple[State, Canvas, PhiloxNoise]:
    """The same beginning twice: on the device, and the sampler's."""
    noise = PhiloxNoise(SEED, length, vocab, torch.device("cpu"), ATTEMPT)
    temperatures = torch.stack([sampler.temperature(config, step) for step in range(config.steps)])
    state, canvas = State.new(length, config.stability, temperatures), sampler.begin(NUMBER, noise)
    state.history.fill_(-1)
    state.begin(canvas.next, _philox.key_numbers(SEED, ATTEMPT, NUMBER))
    return state, canvas, noise


def assert_same(state: State, canvas: Canvas) -> None:
    assert canvas.accepted is not None
    assert int(state.key.step) == canvas.step
    assert torch.equal(state.accepted, canvas.accepted)
    assert torch.equal(state.canvas, canvas.next)
    assert canvas.draft is not None and torch.equal(state.draft, canvas.draft)
    assert canvas.entropy is not None and torch.equal(state.entropy, canvas.entropy)
    assert state.flags.tolist() == [canvas.converged, canvas.done]


def decide(update: Update, entropy: Tensor, bound: float) -> Tensor:
    """Whom it accepts."""
    state, _, _ = new_state(len(entropy), CONFIG)
    ids = torch.zeros(len(entropy), dtype=torch.int64)
    update(state, ids, ids, entropy, VOCAB, bound, CONFIG.confidence)
    return state.accepted


@pytest.mark.parametrize("stability", [0, 1, 2, 4])
@pytest.mark.parametrize("length", [1, 12, 96, 256])
@pytest.mark.parametrize("form", FORMS)
def test_whole_canvases_step_by_step(form: Update, length: int, stability: int) -> None:
    """Logits that grow certain, with a relapse; the sampler's state and ours, to the end and beyond it."""
    config = replace(CONFIG, stability=stability, steps=12)
    state, canvas, noise = new_state(length, config)
    g = torch.Generator().manual_seed(length + stability)
    goal = torch.zeros(length, VOCAB).scatter_(1, torch.randint(VOCAB, (length, 1), generator=g), 3.0)
    while not canvas.done:
        certain = 0.3 if canvas.step == 3 else 0.3 + 2.0 * canvas.step
        logits = (goal + torch.randn(length, VOCAB, generator=g) / (1 + canvas.step)) * certain
        assert torch.equal(state.temperature[0], sampler.temperature(config, canvas.step))
        after = sampler.advance(canvas, logits, config, noise)
        assert after.draft is not None and after.entropy is not None
        sampled = noise.sample(logits, torch.ones(length, dtype=torch.bool), NUMBER, canvas.step)
        form(state, after.draft, sampled, after.entropy, VOCAB, config.entropy_bound, config.confidence)
        canvas = after
        assert_same(state, canvas)
    assert canvas.converged
    other = (canvas.next + 1) % VOCAB
    form(state, other, other, torch.zeros(length), VOCAB, config.entropy_bound, config.confidence)
    assert_same(state, canvas)  # a step launched ahead changes nothing


@pytest.mark.parametrize("form", FORMS)
def test_a_second_canvas_begins_afresh(form: Update) -> None:
    config = replace(CONFIG, steps=1)
    state, canvas, _ = new_state(12, config)
    draft = torch.arange(12)
    form(state, draft, draft, torch.ones(12), VOCAB, 0.1, 1.0)
    assert state.flags.tolist() == [0, 1] and torch.equal(state.canvas, draft)
    state.begin(canvas.next, _philox.key_numbers(SEED, ATTEMPT, NUMBER + 1))
    assert state.flags.tolist() == [0, 0] and int(state.key.step) == 0 and torch.equal(state.canvas, canvas.next)


@pytest.mark.parametrize("case", cases("entropy_accept"), ids=lambda case: case["name"])
def test_transformers_accepts_the_same(case: dict[str, Any]) -> None:
    for form in FORMS:
        assert decide(form, torch.tensor(case["entropy"]), case["entropy_bound"]).tolist() == case["accepted"]


@pytest.mark.parametrize("case", cases("step"), ids=lambda case: f"{case['seed']}-{case['cur_step']}")
@pytest.mark.parametrize("form", FORMS)
def test_transformers_makes_the_same_step(form: Update, case: dict[str, Any]) -> None:
    """But for its own random tokens, where Philox's stand."""
    draft, sampled = torch.tensor(case["argmax"]), torch.tensor(case["sampled"])
    config = replace(CONFIG, steps=case["max_denoising_steps"])
    state, _, noise = new_state(len(draft), config, vocab=16)
    step = config.steps - case["cur_step"]
    state.key.step.fill_(step)
    form(state, draft, sampled, torch.tensor(case["entropy"]), 16, config.entropy_bound, config.confidence)
    accepted = torch.tensor(case["accepted"])
    wanted = torch.where(accepted, torch.tensor(case["next_canvas"]), noise.renoise(NUMBER, step))
    assert state.accepted.tolist() == case["accepted"]
    assert state.flags[1] == (case["cur_step"] == 1)
    assert torch.equal(state.canvas, draft if case["cur_step"] == 1 else wanted)


@pytest.mark.parametrize("form", FORMS)
def test_transformers_stops_at_the_same_steps(form: Update) -> None:
    for case in cases("stopping"):
        config = replace(CONFIG, stability=case["stability_threshold"], confidence=case["confidence_threshold"])
        state, _, _ = new_state(3, config, vocab=8)
        for call in case["calls"]:
            state.flags.zero_()  # the vectors go on where a canvas would have ended
            logits = torch.zeros(3, 8).scatter(1, torch.tensor(call["argmax"])[:, None], call["peak_logit"])
            draft, entropy = torch.tensor(call["argmax"]), sampler.entropies(logits)
            form(state, draft, draft, entropy, 8, config.entropy_bound, config.confidence)
            assert state.flags.tolist() == [call["stop"], call["stop"]]


ENTROPIES = {
    "one": [3.0],
    "bound met exactly": [1.0, 0.25, 2.0, 0.25],
    "ties, the lower position first": [0.5] * 12,
    "all calm": [0.0] * 256,
    "both zeros": [0.0, -0.0, 0.6, -0.0, 0.0],
    "a hair below zero, as a rounded sum may be": [-1e-7, 0.6, -3e-8, 0.3, 0.2],
    "subnormal": [1e-45, 2e-42, 0.5, 0.4],
    "NaN comes last and ends it": [float("nan"), 0.1, 0.2, -float("nan"), 0.05],
    "infinite": [float("inf"), 0.1, float("inf"), 0.2],
}


@pytest.mark.parametrize("entropy", ENTROPIES.values(), ids=ENTROPIES)
def test_odd_entropies(entropy: list[float]) -> None:
    ours, twin = (decide(form, torch.tensor(entropy), 0.5) for form in FORMS)
    assert torch.equal(ours, twin)
    if not any(h != h for h in entropy):
        assert torch.equal(ours, sampler.accept(torch.tensor(entropy), 0.5))
    assert decide(update, torch.tensor([0.5] * 12), 0.5).tolist() == [True, True] + [False] * 10


@pytest.mark.parametrize("length", [12, 96, 256])
def test_acceptance_is_the_samplers(length: int) -> None:
    """Entropies over many magnitudes, and bounds that are sums of theirs."""
    g = torch.Generator().manual_seed(length)
    for _ in range(12):
        entropy = torch.rand(length, generator=g) * 10.0 ** -torch.randint(0, 6, (length,), generator=g)
        sums = entropy.sort().values.cumsum(0)
        for bound in (0.1, float(sums[length // 3])):
            assert torch.equal(decide(update, entropy, bound), sampler.accept(entropy, bound))


@pytest.mark.parametrize("form", FORMS)
def test_confidence_is_strict(form: Update) -> None:
    state, _, _ = new_state(4, replace(CONFIG, stability=0))
    ids = torch.arange(4)
    form(state, ids, ids, torch.full((4,), 0.25), VOCAB, 0.1, 0.25)
    assert state.flags.tolist() == [0, 0]
    form(state, ids, ids, torch.full((4,), 0.25), VOCAB, 0.1, 0.2500001)
    assert state.flags.tolist() == [1, 1]


# ── the buffer ────────────────────────────────────────────────────────────────────────────────────────────────────

BEGINS = ("numbers", "step", "temperature", "canvas", "flags")
REPORTS = ("canvas", "flags", "accepted", "draft", "entropy")


def named(views: Views) -> dict[str, Tensor]:
    """Every view but memory and its slices."""
    own = {name: getattr(views, name) for name in ("temperature", *REPORTS)}
    return {"numbers": views.key.numbers, "step": views.key.step, **own}


def bytes_of(view: Tensor, memory: Tensor) -> range:
    first = view.data_ptr() - memory.data_ptr()
    return range(first, first + view.nbytes)


@pytest.mark.parametrize("length", [1, 12, 37, 256])
def test_the_buffer_holds_every_view_once_and_aligned(length: int) -> None:
    state, _, _ = new_state(length, CONFIG)
    places = {name: bytes_of(view, state.memory) for name, view in named(state).items()}
    assert all(place.start % 16 == 0 for place in places.values())
    assert sum(map(len, places.values())) == len(set().union(*places.values()))  # none overlaps another
    for copied, names in ((state.begins, BEGINS), (state.reports, REPORTS)):
        assert copied.dtype == torch.uint8 and copied.is_contiguous()
        inside = bytes_of(copied, state.memory)
        assert {name for name, place in places.items() if set(place) <= set(inside)} == set(names)
        assert {name for name, place in places.items() if set(place) & set(inside)} == set(names)
    assert [len(state.canvas), len(state.draft), len(state.entropy), len(state.accepted)] == [length] * 4


@pytest.mark.parametrize("form", FORMS)
def test_one_copy_begins_a_canvas_and_one_reports_a_step(form: Update) -> None:
    """By way of a host's buffer, as `begin` would and as the state has it; neither carries more than its own."""
    told, copied = (new_state(12, CONFIG)[0] for _ in range(2))
    for state in (told, copied):
        state.memory.fill_(0x55)
    host = told.views(torch.zeros_like(told.memory))
    first, numbers = torch.arange(12) + 1, _philox.key_numbers(SEED, ATTEMPT, NUMBER + 1)
    host.canvas.copy_(first)
    host.key.numbers.copy_(numbers)
    host.temperature.copy_(told.temperatures[:1])
    copied.begins.copy_(host.begins)
    told.begin(first, numbers)
    for name, view in named(told).items():
        assert torch.equal(view.view(torch.uint8), named(copied)[name].view(torch.uint8)), name

    ids, entropy = torch.arange(12), torch.linspace(0, 1, 12)
    form(copied, ids, (ids + 1) % 12, entropy, VOCAB, 0.1, 0.0)
    ring = torch.full((3, len(copied.memory)), 0x11, dtype=torch.uint8)
    host = copied.views(ring[1])
    host.reports.copy_(copied.reports)
    for name in REPORTS:
        assert torch.equal(getattr(host, name), getattr(copied, name))
    assert torch.equal(host.draft, ids) and torch.equal(host.entropy, entropy)
    assert host.key.step.item() == 0x11111111 and (ring[::2] == 0x11).all()


def test_buffers_that_do_not_fit() -> None:
    state, _, _ = new_state(12, CONFIG)
    size = len(state.memory)
    for buffer in (
        torch.zeros(size + 16, dtype=torch.uint8),
        torch.zeros(size, dtype=torch.int8),
        torch.zeros(2 * size, dtype=torch.uint8)[::2],
    ):
        with pytest.raises(ValueError, match=rf"^canvas: \(\d+,\) .*, wanted uint8 \[{size}\], contiguous$"):
            state.views(buffer)
    with pytest.raises(ValueError, match=r"^canvas: a buffer at byte 8, no multiple of 16$"):
        state.views(torch.zeros(size + 8, dtype=torch.uint8)[8:])


def test_a_canvas_of_no_tokens_is_refused() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"update: history \(1, 0\)"):
        update(State.new(0, 1, torch.ones(4)), none, none, torch.zeros(0), VOCAB, 0.1, 0.1)


def test_shapes_that_do_not_fit() -> None:
    state, _, _ = new_state(12, CONFIG)
    ids = torch.zeros(12, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"update: history \(1, 12\), and draft \(12,\), sampled \(11,\)"):
        update(state, ids, ids[:11], torch.zeros(12), VOCAB, 0.1, 0.1)
