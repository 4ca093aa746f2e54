"""The same answer for prompts of n … n + 64 tokens, however many rows their chunks are filled up with.

A prompt is encoded in passes of a fixed number of rows, the last of them filled up. At 65 lengths in a row every remainder
of both sizes comes up several times; what fills a pass up must not be seen by the canvas behind it. Before, at and after
the window.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from reference import open_model, write_calm
from ways import DEFAULTS

from dgemma_local.cache import Room
from dgemma_local.captured import Captured
from dgemma_local.engine import Conversation
from dgemma_local.events import Event, Finished, StepDone
from dgemma_local.model import DiffusionGemma
from dgemma_local.noise import PhiloxNoise

CANVAS, WINDOW = 6, 8
FIRST = 3  # tokens of the shortest prompt
SPAN = 64
VOCABULARY = 64


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> DiffusionGemma:
    folder = tmp_path_factory.mktemp("calm")
    return open_model(write_calm(folder, 6, pattern="sf", window=WINDOW, canvas=CANVAS))


@pytest.fixture(autouse=True)
def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes that a card runs, with the kernels' torch twins in them."""
    monkeypatch.setenv("DGEMMA_OPS", "twins")


def answered(model: Any, prompt: list[int]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The answer's tokens, and each step's draft."""
    noise = PhiloxNoise(1, CANVAS, VOCABULARY, torch.device("cpu"))
    config = replace(DEFAULTS, steps=1)
    events: list[Event] = list(Conversation(model).answer(prompt, config, noise, CANVAS))
    assert isinstance(events[-1], Finished)
    return events[-1].tokens, tuple(event.draft for event in events if isinstance(event, StepDone))


def prompts() -> list[list[int]]:
    """A token more each."""
    draw = torch.Generator().manual_seed(1)
    longest: list[int] = torch.randint(5, VOCABULARY, (FIRST + SPAN,), generator=draw).tolist()
    return [longest[:length] for length in range(FIRST, FIRST + SPAN + 1)]


@pytest.fixture(scope="module")
def wanted(network: DiffusionGemma) -> list[Any]:
    """What the network answers that takes a whole prompt in one pass of just its length."""
    return [answered(network, prompt) for prompt in prompts()]


@pytest.mark.parametrize("rows", [12, 16])  # of a pass
def test_sixty_five_lengths_in_a_row(network: DiffusionGemma, wanted: list[Any], rows: int) -> None:
    fixed = Captured(network, Room(context=128, rows=rows, slack=CANVAS))
    assert len(set(wanted)) > SPAN // 2  # a token more is another answer: there is something to get wrong
    for prompt, want in zip(prompts(), wanted, strict=True):
        assert answered(fixed, prompt) == want, len(prompt)
