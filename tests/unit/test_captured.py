"""Passes on fixed memory: the same answers as the network gives by itself, and nothing in a step's way.

On a CPU the passes run their kernels' torch twins (DGEMMA_OPS=twins) on the same buffers as on a card, launch by launch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import steps
import torch
from dgemma_local.kernels._launch import ADA, BLACKWELL, HOPPER, Gpu, recording
from live_bytes import LiveBytes
from reference import GEOMETRIES, open_model, write_calm
from tiny_quantised import write_quantised
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from ways import DEFAULTS, KINDS, QUIET

from dgemma_local import cache, captured, fit, model, noise, ops, rope, sampler
from dgemma_local.cache import Room
from dgemma_local.captured import Captured, may_stop
from dgemma_local.checkpoint import open_checkpoint
from dgemma_local.config import GenerationConfig, load_model_config
from dgemma_local.engine import Conversation
from dgemma_local.errors import DoesNotFit, NumericalError, PromptError
from dgemma_local.events import CanvasCommitted, Event, Finished, Prefilled, Retried, StepDone
from dgemma_local.loading import load
from dgemma_local.model import DiffusionGemma
from dgemma_local.noise import PhiloxNoise, TorchNoise
from dgemma_local.quant import quantise_nvfp4


@pytest.fixture(autouse=True)
def twins(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setenv("DGEMMA_OPS", "twins")


def room_of(network: DiffusionGemma, context: int = 128, rows: int | None = None) -> Room:
    return Room(context=context, rows=min(context, rows or 2 * network.canvas_length), slack=network.canvas_length)


def events_of(
    conversation: Conversation[Any], prompt: Sequence[int], seed: int, config: GenerationConfig, most: int, **named: Any
) -> list[Event]:
    model = conversation.model
    network = model.network if isinstance(model, Captured) else model
    noise = PhiloxNoise(seed, network.canvas_length, network.config.vocab_size, network.device)
    return list(conversation.answer(prompt, config, noise, most, **named))


def same(ours: Sequence[Event], want: Sequence[Event], within: float = 1e-3) -> None:
    """Event by event, every token; entropies to what rounding grows to over an answer's steps."""
    assert [type(event) for event in ours] == [type(event) for event in want]
    for mine, theirs in zip(ours, want, strict=True):
        if isinstance(mine, StepDone) and isinstance(theirs, StepDone):
            assert replace(mine, entropy=()) == replace(theirs, entropy=())
            assert mine.entropy == pytest.approx(theirs.entropy, abs=within)
        elif isinstance(mine, Prefilled) and isinstance(theirs, Prefilled):
            assert replace(mine, joining=0) == replace(theirs, joining=0)
        else:
            assert mine == theirs


def prompt_of(network: DiffusionGemma, length: int, seed: int = 0) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(5, network.config.vocab_size, (length,), generator=draw).tolist()
    return ids


# ── the same answers ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_token_for_token_the_network_s_own(kind: str, tmp_path: Path) -> None:
    """50 trajectories: each way to generate on each geometry, prompts of 3 to 21 tokens in chunks of two canvases."""
    sure, canvases, settings = KINDS[kind]
    for seed, name in enumerate(QUIET):
        network = open_model(write_calm(tmp_path / name, seed, confidence=sure, **GEOMETRIES[name]))
        config, most = replace(DEFAULTS, **settings), canvases * network.canvas_length
        prompt = prompt_of(network, 3 + 9 * (seed % 3), seed)
        fixed = Conversation(Captured(network, room_of(network)))
        same(events_of(fixed, prompt, seed, config, most), events_of(Conversation(network), prompt, seed, config, most))


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "modelopt"])
def test_packed_weights_too(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against passes of their own, rows quantised alike."""
    write_quantised(tmp_path, name, pattern="fsf", canvas=6)
    network = open_model(tmp_path, torch.float32)
    prompt, config = prompt_of(network, 19), replace(DEFAULTS, steps=4, entropy_bound=3.0)
    ours = events_of(Conversation(Captured(network, room_of(network))), prompt, 3, config, 12)
    monkeypatch.setattr(ops, "form", _as_on_a_card(ops.form))
    monkeypatch.setenv("DGEMMA_OPS", "torch")
    same(ours, events_of(Conversation(network), prompt, 3, config, 12))


def _as_on_a_card(form: Callable[..., str]) -> Callable[..., str]:
    def quantised(x: Tensor, into: Any) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DGEMMA_OPS", "twins")
            return form(x, into)

    return quantised


def first_rows(network: DiffusionGemma, ids: Tensor, canvas: Tensor, memory: cache.Cache) -> Tensor:
    """ids [T] join the memory, in one pass with a canvas [L] behind them -> its hidden rows [L, D]."""
    x = torch.cat([network.embed(ids), network.canvas_rows(canvas, None)])
    later = memory.behind(len(ids), len(canvas))
    joining = network.segment(x[: len(ids)], memory, causal=True, kv_only=True)
    hidden = network.through(x, [joining, network.segment(x[len(ids) :], later, causal=False)])
    memory.advance(len(ids))
    return hidden


@pytest.mark.parametrize(("name", "seed"), list(product(GEOMETRIES, range(5))))
@torch.inference_mode()
def test_a_commit_and_a_first_step_share_a_pass(
    name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 of them, in plain torch: hidden rows, and the K/V that the next step finds, to 5e-5."""
    monkeypatch.setenv("DGEMMA_OPS", "torch")
    network = open_model(write_calm(tmp_path, seed, **GEOMETRIES[name]))
    L = network.canvas_length
    prompt, canvas = prompt_of(network, 4 + 7 * seed, seed), torch.tensor(prompt_of(network, L, seed + 50))
    joining = torch.tensor(prompt_of(network, (L, 1, L - 1 or 1, L, 2 * L)[seed], seed + 99))
    apart, together = network.new_cache(), network.new_cache()
    for memory in (apart, together):
        network.encode(torch.tensor(prompt), memory)
    network.encode(joining, apart)
    want = network.hidden(network.canvas_rows(canvas, None), apart, causal=False)
    torch.testing.assert_close(first_rows(network, joining, canvas, together), want, atol=5e-5, rtol=0)
    assert together.length == apart.length
    soft = network.soften(network.head(want))
    second = [network.denoise(canvas, memory, soft) for memory in (apart, together)]
    torch.testing.assert_close(second[1], second[0], atol=5e-5, rtol=0)


def test_a_step_s_state_outlives_the_steps_behind_it(tmp_path: Path) -> None:
    """More of them than reports are on their way at a time."""
    network = open_model(write_calm(tmp_path, 1))
    fixed = Captured(network, room_of(network))
    config = replace(DEFAULTS, steps=3 * captured.RING, confidence=0.0)
    noise = PhiloxNoise(1, network.canvas_length, network.config.vocab_size, network.device, attempt=2)
    states = list(fixed.denoising(prompt_of(network, 5), 0, fixed.new_cache(), config, noise))
    assert len(states) == 3 * captured.RING
    network_states = list(network.denoising(prompt_of(network, 5), 0, network.new_cache(), config, noise))
    for ours, theirs in zip(states, network_states, strict=True):
        assert (ours.step, ours.number, ours.done, ours.temperature) == (
            theirs.step, theirs.number, theirs.done, theirs.temperature,
        )  # fmt: skip
        for what in ("next", "fed", "draft", "accepted"):
            assert torch.equal(getattr(ours, what), getattr(theirs, what)), what
        torch.testing.assert_close(ours.entropy, theirs.entropy, atol=1e-3, rtol=0)


def test_another_stream_of_noise_takes_the_network_s_own_steps(tmp_path: Path) -> None:
    network = open_model(write_calm(tmp_path, 1))
    L, V = network.canvas_length, network.config.vocab_size
    found = []
    for each in (Captured(network, room_of(network)), network):
        noise = TorchNoise(torch.Generator().manual_seed(3), L, V)
        found.append(list(Conversation(each).answer(prompt_of(network, 9), replace(DEFAULTS, steps=4), noise, 2 * L)))
    same(found[0], found[1], within=5e-5)


def test_settings_may_change_between_answers(tmp_path: Path) -> None:
    """Steps, bounds and stability are part of what is captured; end tokens are not."""
    network = open_model(write_calm(tmp_path, 4, confidence=3.0))
    fixed = Captured(network, room_of(network))
    talk, prompt = Conversation(fixed), prompt_of(network, 7)
    for settings in (
        {"steps": 5},
        {"steps": 2},
        {"stability": 2, "entropy_bound": 30.0, "confidence": 0.5},
        {"steps": 5},
    ):
        config = replace(DEFAULTS, **{"steps": 9} | settings)
        same(events_of(talk, prompt, 4, config, 24)[1:], events_of(Conversation(network), prompt, 4, config, 24)[1:])
    before = fixed._state
    events_of(talk, prompt, 4, replace(config, end_ids=(3,), pad_id=2), 24)
    assert fixed._state is before


# ── a conversation ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_same_bytes_again_and_after_other_turns(tmp_path: Path) -> None:
    """Nothing reused: byte-equal, whatever lay in the buffers before. A prefix reused: the same tokens, entropies close."""
    network = open_model(write_calm(tmp_path, 2, pattern="fsf", window=8, canvas=6))
    config = replace(DEFAULTS, steps=5)
    room = replace(room_of(network), slack=12)
    first = Conversation(Captured(network, room))
    prompt = prompt_of(network, 17, 1)
    want = events_of(first, prompt, 9, config, 18)
    other = prompt_of(network, 31, 2)
    assert other[0] != prompt[0]
    events_of(first, other, 1, config, 18)
    assert events_of(first, prompt, 9, config, 18) == want
    assert events_of(Conversation(Captured(network, room)), prompt, 9, config, 18) == want
    again = events_of(first, prompt, 9, config, 18)
    assert isinstance(again[0], Prefilled) and again[0].reused == len(prompt)
    same(again[1:], want[1:], within=5e-5)


@pytest.mark.parametrize("seed", range(4))
def test_turn_after_turn_reuses_what_the_cache_holds(seed: int, tmp_path: Path) -> None:
    """Four turns, each with the answer before it and some tokens more, past the window: as a new conversation each time."""
    network = open_model(write_calm(tmp_path, seed, pattern="ssf", window=7, canvas=4))
    config, prompt = replace(DEFAULTS, steps=4, entropy_bound=2.0), prompt_of(network, 5, seed)
    talk = Conversation(Captured(network, replace(room_of(network), slack=12)))
    reused = []
    for turn in range(4):
        ours = events_of(talk, prompt, turn, config, 10)
        same(ours[1:], events_of(Conversation(network), prompt, turn, config, 10)[1:])
        assert isinstance(ours[0], Prefilled) and isinstance(ours[-1], Finished)
        reused.append(ours[0].reused)
        prompt = [*prompt, *ours[-1].tokens, *prompt_of(network, 3, 100 + turn)]
    assert reused[0] == 0 and all(more > 0 for more in reused[1:])


@pytest.mark.parametrize("at", [0, 1, 3, 5])
def test_what_was_left_half_way_is_no_burden(at: int, tmp_path: Path) -> None:
    network = open_model(write_calm(tmp_path, 3))
    config, prompt = replace(DEFAULTS, steps=4), prompt_of(network, 9)
    talk = Conversation(Captured(network, room_of(network)))
    noise = PhiloxNoise(3, network.canvas_length, network.config.vocab_size, network.device)
    running = talk.answer(prompt, config, noise, 3 * network.canvas_length)
    for _ in range(at):
        next(running)
    running.close()
    second = [*prompt[:4], *prompt_of(network, 8, 7)]
    same(events_of(talk, second, 5, config, 24)[1:], events_of(Conversation(network), second, 5, config, 24)[1:])


def test_ctrl_c_within_a_pass_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = open_model(write_calm(tmp_path, 3))
    fixed = Captured(network, room_of(network))
    talk, prompt, config = Conversation(fixed), prompt_of(network, 9), replace(DEFAULTS, steps=4)
    run, calls = captured.Phase.run, []

    def press(phase: captured.Phase) -> None:
        calls.append(phase)
        if len(calls) == 3:
            raise KeyboardInterrupt
        run(phase)

    with monkeypatch.context() as patch:
        patch.setattr(captured.Phase, "run", press)
        events = events_of(talk, prompt, 3, config, 24)
    assert isinstance(events[-1], Finished) and events[-1].reason == "interrupted"
    assert talk.held == [] and fixed.cache.length == 0 and talk.cache is fixed.cache
    same(events_of(talk, prompt, 3, config, 24), events_of(Conversation(network), prompt, 3, config, 24))


def test_nan_names_the_layer(tmp_path: Path) -> None:
    network = open_model(write_calm(tmp_path, 3, pattern="fsf"))
    network.layers[1].post_feedforward_layernorm.fill_(torch.nan)
    with pytest.raises(NumericalError, match=r"^canvas 1, step 1: not a number, first in layer 1$"):
        events_of(Conversation(Captured(network, room_of(network))), prompt_of(network, 9), 3, DEFAULTS, 24)
    network = open_model(write_calm(tmp_path, 3, pattern="fsf"))
    network.self_conditioning.pre_norm.fill_(torch.nan)
    with pytest.raises(NumericalError, match=r"^canvas 1, step 2: not a number, first in self-conditioning, the final"):
        events_of(Conversation(Captured(network, room_of(network))), prompt_of(network, 9), 3, DEFAULTS, 24)


@pytest.mark.parametrize("name", ["plain", "window of two"])
def test_a_canvas_held_to_rules_is_the_network_s_own_and_the_next_one_is_captured_again(
    name: str, tmp_path: Path
) -> None:
    """A first canvas that is tried twice, then one that begins with a given token; all others on the fixed memory."""
    network = open_model(write_calm(tmp_path, 4, confidence=3.0, **GEOMETRIES[name]))
    L = network.canvas_length
    config = replace(DEFAULTS, steps=6, entropy_bound=3.0, end_ids=tuple(range(3, 8)))
    hold: dict[str, Any] = {
        "blank": lambda tokens: True,
        "first": lambda answer: 40 if len(answer) == L else None,
    }
    fixed = Captured(network, room_of(network))
    taken: list[sampler.Rules] = []
    denoising = network.denoising

    def noted(*asked: Any) -> Iterator[sampler.Canvas]:
        taken.append(asked[-1])
        return denoising(*asked)

    for seed in range(100):
        prompt = prompt_of(network, 9, seed)
        want = events_of(Conversation(network), prompt, seed, config, 3 * L, **hold)
        kinds = [type(event) for event in want]
        if Retried in kinds and sum(isinstance(event, CanvasCommitted) for event in want) == 3:
            break
    else:
        raise AssertionError("no seed of 100 shows it")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "denoising", noted)
        ours = events_of(Conversation(fixed), prompt, seed, config, 3 * L, **hold)
    same(ours, want)
    assert [(rules.below > 0, rules.positions) for rules in taken] == [(True, ()), (False, (0,))]
    of = {
        canvas: [event for event in want if isinstance(event, StepDone) and event.canvas == canvas] for canvas in (1, 2)
    }
    assert all(step.pinned == (0,) and step.draft[0] == step.next[0] == 40 for step in of[1])
    assert all(step.pinned == () for step in of[2])


def test_a_card_without_room_for_logits_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = open_model(write_calm(tmp_path, 3))
    full = torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(network, "denoise", lambda *_: (_ for _ in ()).throw(full))
    talk = Conversation(Captured(network, room_of(network)))
    with pytest.raises(DoesNotFit, match="the logits of canvas 0 have no room"):
        events_of(talk, prompt_of(network, 9), 3, DEFAULTS, 24, first=lambda answer: 7)
    assert isinstance(events_of(talk, prompt_of(network, 9), 3, DEFAULTS, 24)[-1], Finished)


# ── the prompt ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tokens", [1, 3, 5, 6, 7, 11, 12, 13, 17, 18, 19, 40])
def test_prompts_of_all_lengths(tokens: int, tmp_path: Path) -> None:
    """Around the canvas (6), a chunk (12) and the window (8)."""
    network = open_model(write_calm(tmp_path, 6, pattern="fsf", window=8, canvas=6))
    config, prompt = replace(DEFAULTS, steps=3), prompt_of(network, tokens, tokens)
    ours = events_of(Conversation(Captured(network, room_of(network))), prompt, 1, config, 12)
    same(ours, events_of(Conversation(network), prompt, 1, config, 12))
    assert isinstance(ours[0], Prefilled) and ours[0].joining == min(6, tokens)


@pytest.mark.parametrize("context", [9, 13, 18, 25])
def test_to_the_last_token_of_the_context(context: int, tmp_path: Path) -> None:
    network = open_model(write_calm(tmp_path, 6, pattern="fsf", window=8, canvas=6))
    prompt, config = prompt_of(network, 7 if context > 12 else 3), replace(DEFAULTS, steps=3)
    room = room_of(network, context)
    ours = events_of(Conversation(Captured(network, room)), prompt, 1, config, 90)
    same(ours, events_of(Conversation(network, room), prompt, 1, config, 90))
    assert isinstance(ours[-1], Finished) and ours[-1].reason == "context"


@pytest.mark.parametrize("distance", [900, 1022, 1023, 1024, 1025, 1300])
@torch.inference_mode()
def test_a_needle_across_chunks_and_window(distance: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real window, 1,024, and chunks of 512: a token so many before the canvas is seen through a sliding layer up to
    1,023, through a full one at any distance, and in chunks exactly as in one piece."""
    folder = write_calm(tmp_path, 5, pattern="sf", window=1024, canvas=4, hidden=16)
    config = replace(DEFAULTS, steps=1)
    for index, reach in enumerate((1023, 10_000)):
        network = alone(folder, index)
        prompt, canvas = prompt_of(network, 1400, 3), torch.tensor(prompt_of(network, 4, 4))
        found = []
        for by in (0, 1):
            needle = 5 + (prompt[-distance] - 5 + by) % (network.config.vocab_size - 5)
            changed = [*prompt[:-distance], needle, *prompt[len(prompt) - distance + 1 :]]
            talk = Conversation(Captured(network, Room(context=1500, rows=512, slack=4)))
            (step,) = [e for e in events_of(talk, changed, 2, config, 4) if isinstance(e, StepDone)]
            whole = network.new_cache()
            network.encode(torch.tensor(changed), whole, chunk=10_000)
            hidden = network.hidden(network.canvas_rows(canvas, None), whole, causal=False)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("DGEMMA_OPS", "torch")
                chunked = network.hidden(network.canvas_rows(canvas, None), talk.cache, causal=False)
            torch.testing.assert_close(chunked, hidden, atol=5e-5, rtol=0)
            found.append((hidden, step.entropy))
        assert torch.equal(found[0][0], found[1][0]) is (distance > reach)
        assert (found[0][1] == found[1][1]) is (distance > reach)


def alone(folder: Path, index: int) -> DiffusionGemma:
    """A network of one layer of a checkpoint's."""
    config, prefix = load_model_config(folder), f"layers.{index}."
    weights = load(open_checkpoint(folder), config)
    own = {k.replace(prefix, "layers.0."): w for k, w in weights.items() if k.startswith(prefix) or "layers." not in k}
    return DiffusionGemma(replace(config, layers=(config.layers[index],)), own)


def test_rotary_tables_are_filled_as_they_are_made() -> None:
    config = rope.RopeConfig(theta=1e6, rotating=0.25)
    for start in (0, 1, 1023, 250_000):
        cos, sin = torch.empty(2, 7, 16, dtype=torch.bfloat16)
        rope.fill(rope.inverse_frequencies(config, 16), torch.tensor(start), cos, sin)
        want = rope.table(config, 16, torch.arange(start, start + 7), torch.bfloat16)
        assert torch.equal(cos, want[0]) and torch.equal(sin, want[1])


# ── running ahead ─────────────────────────────────────────────────────────────────────────────────────────────────


def launches_of(fixed: Captured, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is launched and read from now on, in order."""
    order: list[str] = []
    launch, done = fixed._launch, fixed._done

    def launching(phase: captured.Phase, step: int) -> None:
        order.append(f"launch {step}")
        launch(phase, step)

    def reading(step: int) -> bool:
        order.append(f"read {step}")
        return done(step)

    monkeypatch.setattr(fixed, "_launch", launching)
    monkeypatch.setattr(fixed, "_done", reading)
    return order


def test_a_fixed_number_of_steps_is_run_ahead_all_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's protocol, threshold 0: each step is launched before the one before it is read, and none in vain."""
    network = open_model(write_calm(tmp_path, 3))
    fixed = Captured(network, room_of(network))
    order = launches_of(fixed, monkeypatch)
    events_of(Conversation(fixed), prompt_of(network, 5), 1, replace(DEFAULTS, steps=4, confidence=0.0), 1)
    assert order == [
        "launch 0", "launch 1", "read 0", "launch 2", "read 1", "launch 3", "read 2", "read 3",
    ]  # fmt: skip


def test_a_canvas_near_its_end_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of canvases that stop early, none launches a step in vain where the step before was near, and else one."""
    sure, _, settings = KINDS["early stop"]
    config = replace(DEFAULTS, **settings)
    stopped = wasted = 0
    for seed in range(6):
        network = open_model(write_calm(tmp_path / str(seed), seed, confidence=sure))
        fixed = Captured(network, room_of(network))
        order = launches_of(fixed, monkeypatch)
        events = events_of(Conversation(fixed), prompt_of(network, 5), seed, config, 1)
        taken = [event for event in events if isinstance(event, StepDone)]
        launched = sum(line.startswith("launch") for line in order)
        assert len(taken) <= launched <= min(len(taken) + 1, config.steps)
        if len(taken) < config.steps:
            stopped += 1
            wasted += launched - len(taken)
            assert fixed.wasted == launched - len(taken)
            before = taken[-2]
            mean = sum(before.entropy) / len(before.entropy)
            assert (launched > len(taken)) is (mean >= captured.NEAR * config.confidence)
    assert stopped >= 3 and wasted < stopped


@pytest.mark.parametrize(
    ("step", "stability", "mean", "may"),
    [
        (0, 1, 0.0, False),  # one draft is none to compare with
        (1, 1, 0.09, True),
        (1, 1, 0.11, False),
        (1, 2, 0.0, False),
        (2, 2, 0.0, True),
        (0, 0, None, True),  # nothing is known of the state before the first
    ],
)
def test_what_may_stop(step: int, stability: int, mean: float | None, may: bool) -> None:
    entropy = None if mean is None else torch.full((4,), mean)
    canvas = sampler.Canvas(number=0, step=step, next=torch.zeros(4, dtype=torch.int64), entropy=entropy)
    assert may_stop(canvas, replace(DEFAULTS, stability=stability, confidence=0.005)) is may
    assert not may_stop(replace(canvas, entropy=torch.zeros(4)), replace(DEFAULTS, confidence=0.0))


# ── graphs ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Graph:
    """A CUDA graph's part: while it is captured the body runs once, harmlessly or not, and a replay runs it again."""

    def __init__(self, body: Callable[[], None]) -> None:
        body()
        self.body, self.replays = body, 0
        self.pool: Tensor | None = None

    def replay(self) -> None:
        self.replays += 1
        with torch.inference_mode():
            self.body()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Graph]]:
    """A card as `captured` sees it, on the CPU: memory is not pinned, copies and launches take no time of their own."""
    graphs: list[Graph] = []

    def made(_: Captured, body: Callable[[], None]) -> Graph:
        graphs.append(Graph(body))
        return graphs[-1]

    monkeypatch.setattr(Captured, "on_card", property(lambda _: True, lambda _, value: None), raising=False)
    monkeypatch.setattr(Captured, "_graph_of", made)
    why = captured._why_eager  # twins, which these tests run, are no reason here
    monkeypatch.setattr(captured, "_why_eager", lambda: why() if "eager" in ops.wishes() else None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: None))
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, pin_memory=False, **k: zeros(*a, **k))
    return graphs


def test_three_graphs_serve_a_session(tmp_path: Path, card: list[Graph]) -> None:
    """Captured once, at whatever time: what capturing itself runs changes neither cache nor canvas."""
    network = open_model(write_calm(tmp_path, 2, pattern="fsf", window=8, canvas=6))
    config, fixed = replace(DEFAULTS, steps=5), Captured(network, room_of(network))
    talk = Conversation(fixed)
    for turn, tokens in enumerate((3, 17, 40)):
        prompt = prompt_of(network, tokens, turn)
        ours = events_of(talk, prompt, turn, config, 18)
        same(ours[1:], events_of(Conversation(network), prompt, turn, config, 18)[1:])
    assert len(card) == 3 and all(graph.replays for graph in card) and fixed.mode == "graphs"
    prompt = [*talk.held, *prompt_of(network, 5, 9)]  # a prefix is reused, and the settings are new
    config = replace(config, steps=3)
    ours = events_of(talk, prompt, 7, config, 18)
    assert isinstance(ours[0], Prefilled) and ours[0].reused > 0
    same(ours[1:], events_of(Conversation(network), prompt, 7, config, 18)[1:])
    assert len(card) == 5  # the prompt's chunk knows nothing of the settings


def test_capturing_leaves_committed_tokens_and_a_canvas_alone(tmp_path: Path, card: list[Graph]) -> None:
    """Other settings in the middle of a conversation: not a byte of the cache, nor of the state, is written."""
    network = open_model(write_calm(tmp_path, 2, pattern="fsf", window=8, canvas=6))
    fixed = Captured(network, room_of(network))
    events_of(Conversation(fixed), prompt_of(network, 17), 1, replace(DEFAULTS, steps=3), 18)
    slabs = [slab for i in range(len(network.layers)) for slab in fixed.cache.slab(i)]
    before = [slab.clone() for slab in slabs]
    fixed.prepare(replace(DEFAULTS, steps=4))
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(slabs, before, strict=True))
    state = fixed._state
    assert not state.draft.any() and not state.history.any() and not state.canvas.any() and state.flags.all()


@pytest.mark.parametrize("again", [5, 2])  # the new settings, or those that were captured before
@pytest.mark.parametrize("at", ["state", "body", "capture"])
def test_what_is_stopped_while_it_is_prepared_begins_anew(
    at: str, again: int, tmp_path: Path, card: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while other settings are compiled or captured: the next turn has its graphs, none of the ones before."""
    network = open_model(write_calm(tmp_path, 2))
    fixed, prompt = Captured(network, room_of(network)), prompt_of(network, 30)
    talk, config = Conversation(fixed), replace(DEFAULTS, steps=5)
    events_of(talk, prompt, 4, replace(DEFAULTS, steps=2), 24)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if at == "state":
            patch.setattr(ops.State, "new", stop)
        elif at == "body":
            patch.setattr(fixed._step, "body", stop)
        else:
            patch.setattr(Captured, "_graph_of", stop)
        events = events_of(talk, prompt, 4, config, 24)
        assert isinstance(events[-1], Finished) and events[-1].reason == "interrupted" and fixed.mode != "graphs"
    config = replace(config, steps=again)
    same(events_of(talk, prompt, 4, config, 24), events_of(Conversation(network), prompt, 4, config, 24))
    assert fixed.mode == "graphs"


def test_all_graphs_share_one_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = open_model(write_calm(tmp_path, 2))
    fixed, pools = Captured(network, room_of(network)), []
    fixed._pool = "the session's"

    @contextmanager
    def capturing(graph: Any, pool: Any, capture_error_mode: str) -> Iterator[None]:
        pools.append(pool)
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    for _ in range(3):
        fixed._graph_of(lambda: None)
    assert pools == ["the session's"] * 3


@pytest.mark.parametrize("held", ["tried again", "begins with a given token"])
def test_a_canvas_held_to_rules_stays_within_the_plan(
    held: str, tmp_path: Path, card: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logits take the graphs' own memory, which goes before; the next canvas has graphs again."""
    network = open_model(write_calm(tmp_path, 4, vocab=8192, canvas=32))
    V, L = network.config.vocab_size, network.canvas_length
    monkeypatch.setattr(noise, "BLOCK_BYTES", 4 * L * V // 8)  # as of the real model
    monkeypatch.setattr(model, "VOCABULARY_BLOCK", 4 * L * V // 8)
    plan = fit.estimate(network.config, {}, context=4 * L, compute="fp32", device="cpu", slack=L)
    ends, token = {"tried again": (tuple(range(0, V, 8)), None), "begins with a given token": ((), 40)}[held]
    config = replace(DEFAULTS, steps=2, end_ids=ends)
    pool = plan.working // 2
    peaks: list[int] = []

    def captures(fixed: Captured, body: Callable[[], None]) -> Graph:
        graph = Graph(body)
        at = [phase.graph for phase in (fixed._chunk, fixed._first, fixed._step) if phase.graph is not None]
        graph.pool = at[0].pool if at else torch.empty(pool, dtype=torch.uint8)  # all graphs' own
        return graph

    monkeypatch.setattr(Captured, "_graph_of", captures)
    denoising = network.denoising

    def measured(*asked: Any) -> Iterator[sampler.Canvas]:
        live.restart()
        for state in denoising(*asked):
            peaks.append(live.peak)
            yield state

    monkeypatch.setattr(network, "denoising", measured)
    prompt = prompt_of(network, L)
    with LiveBytes() as live:
        fixed = Captured(network, plan.room)
        beside = live.now - sum(part.bytes for part in plan.components if part.name == "KV cache")
        fixed.prepare(config)
        assert live.now > pool
        talk = Conversation(fixed)
        first: dict[int, int | None] = {0: token}
        events = events_of(
            talk, prompt, 1, config, 2 * L, blank=lambda tokens: True, first=lambda answer: first.get(len(answer))
        )
    assert peaks and max(peaks) <= 1.01 * (plan.allocated + beside)  # of the real model it is 3 MB
    assert isinstance(events[-1], Finished)
    fixed.prepare(config)
    fixed.encode(torch.tensor([1]), fixed.new_cache())
    assert fixed.mode == "graphs"


def test_graph_or_eager_the_same_bytes(tmp_path: Path, card: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    network = open_model(write_calm(tmp_path, 2))
    prompt, config = prompt_of(network, 9), replace(DEFAULTS, steps=5)
    graphs = events_of(Conversation(Captured(network, room_of(network))), prompt, 4, config, 24)
    monkeypatch.setenv("DGEMMA_OPS", "twins eager")
    eager = Captured(network, room_of(network))
    assert events_of(Conversation(eager), prompt, 4, config, 24) == graphs
    assert len(card) == 3 and eager.mode == "eager launches: DGEMMA_OPS=eager asks for it"


def test_a_capture_that_fails_leaves_eager_launches_and_says_so(
    tmp_path: Path, card: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(fixed: Captured, body: Callable[[], None]) -> Graph:
        if body == fixed.first:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand more")
        return Graph(body)

    monkeypatch.setattr(Captured, "_graph_of", fails)
    network = open_model(write_calm(tmp_path, 2))
    prompt, config = prompt_of(network, 9), replace(DEFAULTS, steps=5)
    fixed = Captured(network, room_of(network))
    same(
        events_of(Conversation(fixed), prompt, 4, config, 24),
        events_of(Conversation(network), prompt, 4, config, 24),
    )
    failed = "capture failed: CUDA error: operation not permitted when stream is capturing"
    assert fixed.mode == f"eager launches: {failed}"
    assert fixed.notice is not None and failed in fixed.notice
    assert not any(phase.graph for phase in (fixed._chunk, fixed._first, fixed._step))  # all or none


def test_twins_are_launched_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for the host, and no graph holds that."""
    monkeypatch.setenv("DGEMMA_OPS", "")
    monkeypatch.setattr(ops, "_replaced", frozenset())
    assert captured._why_eager() is None
    ops.replace(["route"])
    assert captured._why_eager() == "route runs as its twin"
    ops.replace(["heads"])
    assert captured._why_eager() == "2 kernels run as their twins"
    with pytest.raises(KeyError):
        ops.replace(["root"])


def test_a_capture_that_fails_gives_the_stream_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own context leaves its capture stream behind when the end of a capture raises."""
    network = open_model(write_calm(tmp_path, 2))
    fixed, streams = Captured(network, room_of(network)), ["the session's"]

    @contextmanager
    def capturing(graph: Any, pool: Any, capture_error_mode: str) -> Iterator[None]:
        streams.append("a capture's")
        yield
        raise RuntimeError("invalid capture")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    calls: list[tuple[str, Any]] = []
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda device, pool, name=name: calls.append((name, pool)), raising=False)
    fixed._pool = "pool"
    with pytest.raises(RuntimeError, match="invalid capture"):
        fixed._graph_of(lambda: None)
    assert streams[-1] == "the session's"
    assert calls == [("_cuda_endAllocateToPool", "pool"), ("_cuda_releasePool", "pool")]


# ── nothing in a step's way ───────────────────────────────────────────────────────────────────────────────────────

VIEWS = {
    "view", "_unsafe_view", "slice", "select", "split", "split_with_sizes", "detach", "unsqueeze", "expand", "transpose",
    "permute", "unbind", "alias", "as_strided", "squeeze", "t", "_reshape_alias", "promote_types",
}  # fmt: skip
EMPTY = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}  # of a graph's own pool
TABLES = {"to", "arange", "add", "mul", "cos", "sin", "neg", "copy_", "_to_copy"}  # rope.fill, once a canvas
COPY = {"copy_"}


class Strict(TorchDispatchMode):
    """Lets views and `allowed` operations of torch's own through; `.item()`, `.cpu()`, nonzero and new tensors are none."""

    def __init__(self, allowed: set[str]) -> None:
        super().__init__()
        self.allowed = VIEWS | allowed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in self.allowed:
            raise AssertionError(f"{func} within a step")
        out = func(*args, **(kwargs or {}))
        if name in ("to", "_to_copy"):
            assert out.device == args[0].device, "a copy to another device within a step"
        return out


@pytest.fixture
def no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DGEMMA_OPS")


@pytest.mark.usefixtures("no_words")
@pytest.mark.parametrize("gpu", [ADA, HOPPER, BLACKWELL], ids=["ada", "hopper", "blackwell"])
@pytest.mark.parametrize("checkpoint", steps.CHECKPOINTS)
def test_a_step_is_nothing_but_launches_of_kernels(checkpoint: str, gpu: Gpu) -> None:
    """Of the 26B model, every checkpoint and card: beside them no operation of torch, no wait, only room for outputs."""
    for light in (False, True):
        with recording(gpu):  # as before a capture: what is made once is made here
            steps.run(checkpoint, light)
            steps.run_first(checkpoint, light)
        with recording(gpu) as launches, Strict(EMPTY):
            steps.run(checkpoint, light)
        assert len(launches) > 400
        with recording(gpu) as launches, Strict(EMPTY | TABLES):
            steps.run_first(checkpoint, light)
        assert len(launches) > 400


@pytest.mark.usefixtures("no_words")
@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x.clone(),
        lambda x: torch.zeros(3),
        lambda x: x + 1,
        lambda x: x.tolist(),
    ],
    ids=["item", "cpu", "nonzero", "clone", "zeros", "add", "tolist"],
)
def test_that_law_sees_what_it_forbids(spoil: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch) -> None:
    with recording(ADA):
        steps.run("redhat-nvfp4")
    read = ops.attention

    def spoiled(seen: Any) -> Tensor:
        out = read(seen)
        spoil(out)
        return out

    monkeypatch.setattr(ops, "attention", spoiled)
    with recording(ADA), Strict(EMPTY), pytest.raises((AssertionError, NotImplementedError, RuntimeError)):
        steps.run("redhat-nvfp4")


def test_between_two_steps_the_host_copies_one_report_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = open_model(write_calm(tmp_path, 3))
    fixed = Captured(network, room_of(network))
    config, launch = replace(DEFAULTS, steps=6, confidence=0.0), fixed._launch
    copies: list[int] = []

    @contextmanager
    def watched() -> Iterator[None]:
        with Strict(COPY), monkeypatch.context() as patch:
            copy = Tensor.copy_
            patch.setattr(Tensor, "copy_", lambda a, b, **k: (copies.append(a.nbytes), copy(a, b, **k))[1])
            yield

    def strictly(phase: captured.Phase, step: int) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(phase, "run", lambda: None)
            with watched():
                launch(phase, step)
        launch(phase, step)

    monkeypatch.setattr(fixed, "_launch", strictly)
    events_of(Conversation(fixed), prompt_of(network, 5), 1, config, 1)
    L = network.canvas_length
    assert len(copies) == 6 and set(copies) == {len(fixed._state.reports)}
    assert copies[0] <= L * (8 + 1 + 8 + 4) + 5 * 16  # ids, marks, drafts, entropies, flags; each aligned


def test_buffers_are_made_once(tmp_path: Path) -> None:
    network = open_model(write_calm(tmp_path, 3))
    fixed, config = Captured(network, room_of(network)), replace(DEFAULTS, steps=3)
    talk = Conversation(fixed)

    def places() -> list[int]:
        slabs = [t for i in range(len(network.layers)) for t in fixed.cache.slab(i)]
        tables = [t for pair in fixed._rotary.values() for t in pair]
        held = [*slabs, *tables, fixed._soft, fixed._inbox.memory, fixed._state.memory, fixed._state.history]
        return [t.data_ptr() for t in held]

    events_of(talk, prompt_of(network, 30, 1), 1, config, 24)
    before = places()
    events_of(talk, prompt_of(network, 41, 2), 2, config, 48)
    assert places() == before


def test_a_prompt_past_the_plan_is_refused_in_the_same_words(tmp_path: Path) -> None:
    """The plan is named, and the flag that widens it: the model's own context is longer."""
    network = open_model(write_calm(tmp_path, 3))
    room, said = room_of(network, 40), []
    for talk in (Conversation(Captured(network, room)), Conversation(network, room)):
        with pytest.raises(PromptError) as error:
            events_of(talk, prompt_of(network, 39), 1, DEFAULTS, 12)
        said.append((error.value.what, error.value.fix))
    assert said[0] == said[1] and "--context" in said[0][1]


# ── a device that is behind ───────────────────────────────────────────────────────────────────────────────────────


class Late:
    """A stream whose work is done when somebody waits for it, and not before: what a host must not count on."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.done = 0

    def launch(self, work: Callable[[], object]) -> None:
        self.queue.append(work)

    def finish(self, upto: int | None = None) -> None:
        end = len(self.queue) if upto is None else upto
        while self.done < end:
            self.done += 1
            with torch.inference_mode():
                self.queue[self.done - 1]()


class LateEvent:
    def __init__(self, stream: Late) -> None:
        self.stream, self.at = stream, 0

    def record(self) -> None:
        self.at = len(self.stream.queue)

    def synchronize(self) -> None:
        self.stream.finish(self.at)


def test_nothing_is_read_or_written_before_its_turn(
    tmp_path: Path, card: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches and copies that do nothing until their event is waited for: the same answers, turn after turn."""
    network = open_model(write_calm(tmp_path, 2, confidence=3.0, pattern="ssf", window=7, canvas=4))
    want_of = Conversation(network)
    stream, copy, shift = Late(), Tensor.copy_, cache._Slab._shift
    monkeypatch.setattr(torch.cuda, "Event", lambda: LateEvent(stream))
    fixed = Captured(network, replace(room_of(network), slack=100))  # with room to read many chunks without a shift

    def copying(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if non_blocking:
            stream.launch(lambda: copy(into, source))
            return into
        return copy(into, source)

    def shifting(slab: Any, length: int, rows: int) -> None:
        stream.finish()  # the device does this itself, in its turn
        shift(slab, length, rows)

    monkeypatch.setattr(Tensor, "copy_", copying)
    monkeypatch.setattr(cache._Slab, "_shift", shifting)
    monkeypatch.setattr(captured.Phase, "run", lambda phase: stream.launch(phase.body))
    talk, config = Conversation(fixed), replace(DEFAULTS, steps=7, entropy_bound=30.0, confidence=0.3)
    fixed.prepare(config)  # what it does itself is not late here
    for turn, tokens in enumerate((30, 9, 41, 3)):
        prompt = prompt_of(network, tokens, turn)
        ours = events_of(talk, prompt, turn, config, 14)
        same(ours[1:], events_of(want_of, prompt, turn, config, 14)[1:])
    assert stream.done > 40
    noise = PhiloxNoise(1, network.canvas_length, network.config.vocab_size, network.device)
    stream.finish()
    for written in range(1, 4):  # canvases that are begun and never read: no buffer is written over that is on its way
        fixed._begin([5], 0, noise)
        behind = len(stream.queue) - 4 * (written - 1)  # inbox, canvas, pass, report of each
        assert written == 1 or stream.done >= behind - 2


# ── and what else was found wrong once ────────────────────────────────────────────────────────────────────────────


def test_two_conversations_over_one_memory_do_not_mix(tmp_path: Path) -> None:
    network = open_model(write_calm(tmp_path, 2, window=64))
    fixed, config = Captured(network, replace(room_of(network), slack=48)), replace(DEFAULTS, steps=3)
    first, second = Conversation(fixed), Conversation(fixed)
    prompt = prompt_of(network, 9, 1)
    events_of(first, prompt, 1, config, 12)
    events_of(second, prompt_of(network, 30, 2), 1, config, 12)
    longer = [*prompt, 12, 13]
    same(events_of(first, longer, 3, config, 12), events_of(Conversation(network), longer, 3, config, 12))


def test_a_start_that_was_stopped_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = open_model(write_calm(tmp_path, 2))
    talk, prompt, config = Conversation(network), prompt_of(network, 9), replace(DEFAULTS, steps=3)
    with monkeypatch.context() as patch:

        def stop(_: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(DiffusionGemma, "new_cache", stop)
        with pytest.raises(KeyboardInterrupt):
            talk._start_over()
    same(events_of(talk, prompt, 1, config, 12), events_of(Conversation(network), prompt, 1, config, 12))


def test_planned_memory_is_planned_once(tmp_path: Path) -> None:
    """Graphs know where it lies."""
    network = open_model(write_calm(tmp_path, 2))
    fixed = Captured(network, room_of(network))
    with pytest.raises(ValueError, match="planned for 128 slots cannot be planned for 256"):
        Conversation(fixed, room_of(network, 256))
    with pytest.raises(ValueError, match="passes of 12 rows are planned for, and two canvases have 24"):
        Captured(network, Room(context=128, rows=12, slack=0))


def test_attention_is_told_how_far_a_pass_may_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the plan, up to REACH: the number of splits follows from it, and is captured."""
    told: list[int | None] = []
    monkeypatch.setattr(captured, "REACH", 1100)
    whole = ops.KERNELS["attention"].attention
    monkeypatch.setattr(
        ops.KERNELS["attention"], "attention", lambda *a, **k: (told.append(k["most"]), whole(*a, **k))[1]
    )
    monkeypatch.delenv("DGEMMA_OPS")
    with recording(ADA):
        steps.run("redhat-nvfp4")
    assert set(told) == {1100}


def test_a_canvas_of_a_length_of_its_own_is_planned_for(tmp_path: Path) -> None:
    """Longer than half a chunk of the 26B model's: two of them are one pass."""
    network = open_model(write_calm(tmp_path, 2, canvas=300, hidden=16))
    room = fit._room(network.config, 2000, 300)
    assert room.rows == 600 and isinstance(captured.best(network, room), Captured)


def test_an_embedding_in_four_bits_is_no_kernel_s(tmp_path: Path) -> None:
    network = open_model(write_calm(tmp_path, 2))
    network.embed_tokens = quantise_nvfp4(torch.randn(64, 32))
    assert captured.best(network, room_of(network)) is network


def test_the_network_encodes_in_chunks_that_are_planned_for(tmp_path: Path) -> None:
    network = open_model(write_calm(tmp_path, 2, window=5, canvas=5))
    prompt, config = prompt_of(network, 26), replace(DEFAULTS, steps=2)
    planned = Conversation(network, Room(context=128, rows=10, slack=0))
    same(events_of(planned, prompt, 1, config, 10), events_of(Conversation(network), prompt, 1, config, 10))


def test_a_step_that_nobody_reads_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never waiting: each canvas that stops early has one behind it."""
    sure, _, settings = KINDS["early stop"]
    monkeypatch.setattr(captured, "NEAR", 0.0)
    network = open_model(write_calm(tmp_path, 0, confidence=sure))
    fixed, config = Captured(network, room_of(network)), replace(DEFAULTS, **settings)
    events = events_of(Conversation(fixed), prompt_of(network, 5), 0, config, 1)
    taken = sum(isinstance(event, StepDone) for event in events)
    assert taken < config.steps and fixed.wasted == 1
