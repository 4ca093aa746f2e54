"""The canvas update against the sampler itself: accepted, next, done, and the stream of re-noise, bit for bit."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dgemma_local.kernels import _philox
from dgemma_local.kernels.canvas import State, update, update_twin
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


def test_shapes_that_do_not_fit() -> None:
    state, _, _ = new_state(12, CONFIG)
    ids = torch.zeros(12, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"update: history \(1, 12\), and draft \(12,\), sampled \(11,\)"):
        update(state, ids, ids[:11], torch.zeros(12), VOCAB, 0.1, 0.1)
