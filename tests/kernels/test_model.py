"""Whole passes and whole answers on the kernels alone, beside the same on their twins.

`DGEMMA_OPS` is read at every call, so that one process has both. Packed weights have quantised rows on both sides here:
that is the card's arithmetic, which twins share (`ops.quantises`).
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dgemma_local.kernels import vocabulary
from reference import open_model
from tiny import write_tiny
from tiny_quantised import write_quantised
from torch import Tensor

from dgemma_local import ops
from dgemma_local.cache import Cache, Room
from dgemma_local.captured import Captured
from dgemma_local.config import GenerationConfig
from dgemma_local.engine import Conversation
from dgemma_local.events import CanvasCommitted, Event, Prefilled, StepDone
from dgemma_local.model import DiffusionGemma
from dgemma_local.noise import PhiloxNoise

STEPS = GenerationConfig(
    steps=2, t_min=0.4, t_max=0.8, entropy_bound=3.0, confidence=0.005, stability=1, end_ids=(), pad_id=0
)
PROMPT = [2, 5, 9, 33, 17, 41, 8, 8, 29, 60]  # past the window of 8
SMALL = {"pattern": "fsf", "canvas": 4}  # the last layer of an encoder pass does not attend: a full one before it must
On = Callable[[str], None]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> On:
    return lambda what: monkeypatch.setenv("DGEMMA_OPS", what)


@torch.inference_mode()
def test_the_choice_is_read_at_every_call(on: On) -> None:
    for what, fused in (("torch", False), ("", True), ("torch", False)):
        on(what)
        assert ops.fused(torch.zeros(1)) is fused


@pytest.fixture(scope="module", params=["plain", "fp8", "nvfp4", "modelopt"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DiffusionGemma:
    """fp32, so that a sum's order is no reason for another token."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "plain":
        write_tiny(folder, **SMALL)
    else:
        write_quantised(folder, request.param, **SMALL)
    return open_model(folder, torch.float32)


def fixed(model: DiffusionGemma) -> Captured:
    """On the kernels' fixed memory, in chunks of two canvases."""
    return Captured(model, Room(context=40, rows=2 * model.canvas_length, slack=model.canvas_length))


def answer(model: DiffusionGemma, seed: int, on_kernels: bool) -> list[Event]:
    noise = PhiloxNoise(seed, model.canvas_length, model.config.vocab_size, model.device)
    talk: Conversation[Cache] = Conversation(fixed(model) if on_kernels else model)
    return list(talk.answer(PROMPT, STEPS, noise, 2 * model.canvas_length))


def test_an_answer_on_the_kernels_is_the_twins_token_for_token(model: DiffusionGemma, on: On) -> None:
    """Two canvases: prefill past the window, denoising with and without a signal, a commit within a first step."""
    on("torch")
    want = answer(model, 3, on_kernels=False)
    on("")
    got = answer(model, 3, on_kernels=True)
    assert [type(event) for event in got] == [type(event) for event in want]
    for ours, twin in zip(got, want, strict=True):
        if isinstance(ours, StepDone) and isinstance(twin, StepDone):
            for what in ("fed", "draft", "accepted", "next", "temperature", "done"):
                assert getattr(ours, what) == getattr(twin, what), what
            assert ours.entropy == pytest.approx(twin.entropy, abs=1e-3)  # what rounding grows to over the steps
        elif isinstance(ours, Prefilled) and isinstance(twin, Prefilled):
            assert ours.joining == model.canvas_length and replace(ours, joining=0) == twin
        else:
            assert ours == twin
    assert sum(isinstance(event, CanvasCommitted) for event in got) == 2


def test_a_retry_draws_anew(tmp_path: Path) -> None:
    """Another attempt, other noise, of the first canvas and of what is not accepted."""
    write_tiny(tmp_path, pattern="f", canvas=6)
    model, states = open_model(tmp_path, torch.float32), {}
    for attempt in (0, 1):
        noise = PhiloxNoise(3, 6, model.config.vocab_size, model.device, attempt)
        runner = fixed(model)
        one, two = runner.denoising(PROMPT[:6], 0, runner.new_cache(), replace(STEPS, steps=2), noise)
        assert one.accepted is not None and not one.done and two.done
        assert torch.equal(one.fed, noise.canvas(0))  # type: ignore[arg-type]
        assert torch.equal(one.next[~one.accepted], noise.renoise(0, 0)[~one.accepted])
        states[attempt] = one.next
    assert not torch.equal(states[0], states[1])


def test_fast_head_reaches_the_end_of_a_step(tmp_path: Path, on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(tmp_path, pattern="f", canvas=6)
    model, asked = open_model(tmp_path, torch.float32), []
    whole = vocabulary.vocabulary_step

    def spy(*arguments: Any, **named: Any) -> Any:
        asked.append(named["reference"])
        return whole(*arguments, **named)

    monkeypatch.setattr(vocabulary, "vocabulary_step", spy)
    for words in ("", "fast-head"):
        on(words)
        noise, runner = PhiloxNoise(3, 6, model.config.vocab_size, model.device), fixed(model)
        next(runner.denoising([], 0, runner.new_cache(), replace(STEPS, steps=1), noise))
    assert asked == [True, False]


def test_a_kernel_that_was_found_wrong_is_replaced_by_its_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time: what the first step comes to is the same without it, and it is never asked."""
    write_tiny(tmp_path, pattern="f", canvas=4)
    model = open_model(tmp_path, torch.float32)

    def first() -> list[int]:
        noise, runner = PhiloxNoise(3, 4, model.config.vocab_size, model.device), fixed(model)
        (step,) = runner.denoising(PROMPT[:3], 0, runner.new_cache(), replace(STEPS, steps=1), noise)
        drafts: list[int] = step.next.tolist()
        return drafts

    monkeypatch.setenv("DGEMMA_OPS", "twins")
    want = first()
    monkeypatch.setenv("DGEMMA_OPS", "")
    for name in ("embed", "sandwich", "combine", "bf16_linear", "heads", "attention", "route", "experts", "update"):

        def broken(*_: Any, what: str = name, **__: Any) -> None:
            raise AssertionError(what)

        with monkeypatch.context() as patch:
            patch.setattr(ops, "_replaced", frozenset())
            patch.setattr(ops.KERNELS[name], name, broken)
            with pytest.raises(AssertionError, match=f"^{name}$"):
                first()
            ops.replace([name])
            assert first() == want


def passes(model: DiffusionGemma, prompt: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Hidden states of a denoising pass behind an encoder pass, and the K/V that the latter left."""
    cache = model.new_cache()
    model.encode(torch.tensor(prompt), cache)
    with torch.inference_mode():
        rows = model.canvas_rows(torch.arange(2, 2 + model.canvas_length), None)
        hidden = model.hidden(rows, cache, causal=False)
    return hidden, [held(cache, layer) for layer in range(len(model.layers))]


def held(cache: Cache, layer: int) -> Tensor:
    """What a layer holds of the committed tokens that the next pass sees."""
    first, at, _, _ = cache.span(cache.config.layers[layer].kind, cache.config.canvas_length, False).tolist()
    return torch.stack(cache.slab(layer))[..., first:at, :].clone()


@pytest.mark.parametrize("tokens", [1, 8, 19])
def test_prefill_and_canvas_are_the_twins_around_the_window(model: DiffusionGemma, on: On, tokens: int) -> None:
    prompt = [2 + (7 * i) % 60 for i in range(tokens)]
    on("torch")
    hidden, kv = passes(model, prompt)
    on("")
    ours, our_kv = passes(model, prompt)
    torch.testing.assert_close(ours, hidden, atol=5e-5, rtol=0)
    for mine, theirs in zip(our_kv, kv, strict=True):
        torch.testing.assert_close(mine, theirs, atol=5e-5, rtol=0)


def test_in_bf16_the_kernels_are_no_farther_from_fp64_than_the_twins(tmp_path: Path, on: On) -> None:
    """‖ours − truth‖ ≤ 1.05 · ‖twin − truth‖ of all hidden states together."""
    write_tiny(tmp_path, dtype=torch.bfloat16, heads=2, **SMALL)
    rounded, exact = open_model(tmp_path), open_model(tmp_path, torch.float64)
    prompts = [[2 + (7 * i + s) % 60 for i in range(9 + s)] for s in range(3)]
    on("torch")
    truth = [passes(exact, prompt)[0] for prompt in prompts]
    twins = [passes(rounded, prompt)[0].double() for prompt in prompts]
    on("")
    ours = [passes(rounded, prompt)[0].double() for prompt in prompts]

    def distance(hidden: list[Tensor]) -> float:
        return float(torch.stack([(a - b).square().sum() for a, b in zip(hidden, truth, strict=True)]).sum().sqrt())

    assert 0 < distance(ours) <= 1.05 * distance(twins)
