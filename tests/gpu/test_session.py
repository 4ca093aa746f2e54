"""Whole answers on a card: captured passes, the same bytes every time, nothing that waits or allocates in a step.

The 26B model's widths, six of its layers and an eighth of its vocabulary, random weights in every layout. A rehearsal goes
the same way on a few numbers in Triton's interpreter, where there are no graphs.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

from gpu import real

# isort: split
import pytest
import torch
from torch import Tensor

from dgemma_local.bench import synthetic
from dgemma_local.cache import Room
from dgemma_local.captured import Captured, Phase
from dgemma_local.config import GenerationConfig, ModelConfig
from dgemma_local.engine import Conversation
from dgemma_local.events import Event, StepDone
from dgemma_local.model import DiffusionGemma
from dgemma_local.noise import PhiloxNoise

pytestmark = pytest.mark.gpu
LAYOUTS = ("fp8", "nvfp4") if real.REHEARSAL else tuple(synthetic.LAYOUTS)
# never confident enough to stop: random weights never are
CONFIG = GenerationConfig(
    steps=2 if real.REHEARSAL else 6, t_min=0.4, t_max=0.8, entropy_bound=30.0, confidence=0.0, stability=1, end_ids=(), pad_id=0
)  # fmt: skip
# one matrix product after another in bf16 with its rows in another tile: what rounding does over six layers
CLOSE = 0.1  # nats, of one position's entropy


def sizes() -> ModelConfig:
    if real.REHEARSAL:
        small = synthetic.small_config()
        return replace(small, canvas_length=4, vocab_size=128, layers=small.layers[1:], num_experts=4, sliding_window=8)
    whole = synthetic.published_config()
    return replace(whole, layers=whole.layers[:6], vocab_size=whole.vocab_size // 8)


@cache
def network(layout: str) -> DiffusionGemma:
    return synthetic.make(layout, real.DEVICE, context=4 * sizes().canvas_length, sizes=sizes())[0]


def fixed(layout: str, words: str = "") -> Captured:
    L = network(layout).canvas_length
    context = 40 if real.REHEARSAL else 4096
    with mock.patch.dict(os.environ, DGEMMA_OPS=words):
        made = Captured(network(layout), Room(context=context, rows=2 * L, slack=2 * L))
        made.prepare(CONFIG)
    return made


def prompt_of(layout: str, length: int, seed: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(5, network(layout).config.vocab_size, (length,), generator=draw).tolist()
    return ids


def answer(talk: Conversation[Any], prompt: Sequence[int], seed: int) -> list[Event]:
    model = talk.model
    noise = PhiloxNoise(seed, model.canvas_length, model.network.config.vocab_size, model.device)  # type: ignore[attr-defined]
    return list(talk.answer(prompt, CONFIG, noise, 2 * model.canvas_length))


def lengths() -> tuple[int, int]:
    """A prompt beyond the window, and one of another turn."""
    return (11, 6) if real.REHEARSAL else (1700, 300)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_bytes_every_time_with_graphs_or_without(layout: str) -> None:
    long, short = lengths()
    graphs, prompt = fixed(layout), prompt_of(layout, long, 1)
    if not real.REHEARSAL:
        assert graphs.mode == "graphs"
    talk = Conversation(graphs)
    want = answer(talk, prompt, 3)
    answer(talk, prompt_of(layout, short, 2), 4)
    assert answer(talk, prompt, 3) == want
    assert answer(Conversation(fixed(layout, "eager")), prompt, 3) == want


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prompt_read_in_another_way_comes_to_nearly_the_same(layout: str) -> None:
    """In chunks and a pass shared with the first step, against one pass after another: entropies of the first step."""
    long, _ = lengths()
    prompt, ours = prompt_of(layout, long, 1), fixed(layout)
    first = next(e for e in answer(Conversation(ours), prompt, 3) if isinstance(e, StepDone))
    net, room = network(layout), Room(context=40 if real.REHEARSAL else 4096, rows=long, slack=0)
    cache = net.new_cache()
    cache.reserve(room)
    with torch.inference_mode():
        net.encode(torch.tensor(prompt), cache, chunk=long)
        rows = net.canvas_rows(torch.tensor(first.fed, device=real.DEVICE), None)
        logits = net.head(net.hidden(rows, cache, causal=False)) / first.temperature
    apart = torch.distributions.Categorical(logits=logits.float(), validate_args=False).entropy()
    difference = (apart.cpu() - torch.tensor(first.entropy)).abs()
    assert float(difference.mean()) < CLOSE and bool(difference.isfinite().all())


@pytest.mark.parametrize("layout", LAYOUTS[:1])
def test_nothing_waits_and_nothing_is_allocated_from_step_to_step(layout: str) -> None:
    if real.REHEARSAL:
        return  # of memory and waits of a card
    made, launch = fixed(layout), Captured._launch
    taken: list[int] = []

    def strict(self: Captured, phase: Phase, step: int) -> None:
        with unsynchronised():
            launch(self, phase, step)
        taken.append(torch.cuda.memory_stats()["allocation.all.allocated"])

    with mock.patch.object(Captured, "_launch", strict):
        answer(Conversation(made), prompt_of(layout, 40, 1), 3)
    assert len(taken) == 2 * CONFIG.steps and len(set(taken[: CONFIG.steps])) == 1


@contextmanager
def unsynchronised() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_replay_leaves_committed_keys_and_values_alone(layout: str) -> None:
    made = fixed(layout)
    talk = Conversation(made)
    answer(talk, prompt_of(layout, lengths()[1], 1), 3)
    held = [part.clone() for part in committed(made)]
    made.prepare(replace(CONFIG, steps=CONFIG.steps + 1))  # captures anew
    real.wait()
    assert all(torch.equal(a, b) for a, b in zip(committed(made), held, strict=True))


def test_a_capture_that_fails_leaves_a_card_that_works() -> None:
    """A wait within a pass: no graph holds it. Launched one by one the answer is the same, and memory can be given back."""
    if real.REHEARSAL:
        return  # nothing is captured there
    layout, prompt = LAYOUTS[0], prompt_of(LAYOUTS[0], 300, 1)
    want = answer(Conversation(fixed(layout)), prompt, 3)
    step = Captured.step

    def waiting(self: Captured) -> None:
        step(self)
        if torch.cuda.is_current_stream_capturing():
            self._soft.sum().item()

    with mock.patch.object(Captured, "step", waiting):
        made = fixed(layout)
    assert made.mode.startswith("eager launches: capture failed: ") and made.notice is not None
    torch.cuda.empty_cache()
    assert answer(Conversation(made), prompt, 3) == want
    assert answer(Conversation(fixed(layout)), prompt, 3) == want


def committed(made: Captured) -> list[Tensor]:
    found = []
    for i, layer in enumerate(made.network.config.layers):
        first, at = made.cache.place(layer.kind, made.canvas_length)
        found += [slab[:, first:at] for slab in made.cache.slab(i)]
    return found
