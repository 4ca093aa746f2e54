"""Complete answers, token for token: transformers' generate() and this engine with transformers' draws.

Every draft of every step is compared, then the canvases, the length of the cache and the number of steps. Geometries
whose fp32 noise is near 1e-5: two implementations choose differently where two candidates lie that close, about once in a
hundred thousand choices.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from reference import GEOMETRIES, Generated, Reference, open_model, write_calm
from torch import Tensor

from dgemma_local.config import GenerationConfig
from dgemma_local.engine import Conversation
from dgemma_local.events import CanvasCommitted, Finished, StepDone
from dgemma_local.model import DiffusionGemma
from dgemma_local.noise import TorchNoise

pytestmark = pytest.mark.parity

TINY = Path(__file__).parent.parent / "golden" / "tiny"
GOLDEN = json.loads((TINY / "generate.json").read_text())["cases"]
DEFAULTS = GenerationConfig(
    steps=48,
    t_min=0.4,
    t_max=0.8,
    entropy_bound=0.1,
    confidence=0.005,
    stability=1,
    end_ids=(),
    pad_id=0,
)


class Kind(NamedTuple):
    """A way to generate: how sure the model is, and the sampler's settings."""

    confidence: float
    canvases: int
    settings: dict[str, Any]


KINDS = {
    "many canvases": Kind(1.0, 4, {"steps": 5}),
    "one step": Kind(1.0, 3, {"steps": 1}),
    "loose bound": Kind(1.0, 3, {"steps": 6, "entropy_bound": 3.0}),
    "no bound": Kind(1.0, 2, {"steps": 5, "entropy_bound": 0.0}),
    "colder": Kind(1.0, 3, {"steps": 7, "t_min": 0.0, "t_max": 0.5}),
    "end tokens": Kind(1.0, 5, {"steps": 4, "end_ids": tuple(range(24, 30))}),
    "early stop": Kind(8.0, 3, {"confidence": 0.02}),
    "early stop, stability 0": Kind(8.0, 3, {"stability": 0, "confidence": 0.1}),
    "early stop, stability 2": Kind(8.0, 2, {"stability": 2, "confidence": 0.1}),
    "early stop, end tokens": Kind(8.0, 4, {"confidence": 0.05, "end_ids": tuple(range(20, 26))}),
}
QUIET = ("plain", "window beyond the prompt", "window of two", "canvas of one", "one layer")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Ours(NamedTuple):
    drafts: list[list[list[int]]]  # canvas by canvas
    canvases: list[CanvasCommitted]
    finished: Finished
    cache_length: int


def answer(model: DiffusionGemma, prompt: Tensor, seed: int, max_tokens: int, config: GenerationConfig) -> Ours:
    conversation = Conversation(model)
    noise = TorchNoise(torch.Generator().manual_seed(seed), model.canvas_length, model.config.vocab_size)
    drafts: list[list[list[int]]] = []
    canvases: list[CanvasCommitted] = []
    for event in conversation.answer(prompt.tolist(), config, noise, max_tokens):
        if isinstance(event, StepDone):
            if event.step == 0:
                drafts.append([])
            drafts[-1].append(list(event.draft))
        elif isinstance(event, CanvasCommitted):
            canvases.append(event)
    assert isinstance(event, Finished)
    return Ours(drafts, canvases, event, conversation.cache.length)


def sequence(prompt: Tensor, ours: Ours, config: GenerationConfig) -> list[int]:
    """As transformers returns it: whole canvases, pads behind the first end token."""
    tokens = [token for canvas in ours.canvases for token in canvas.tokens]
    if ours.finished.reason == "end":
        kept = len(ours.finished.tokens) + 1
        tokens[kept:] = [config.pad_id] * (len(tokens) - kept)
    return [*prompt.tolist(), *tokens]


def agree(ours: Ours, theirs: Generated, prompt: Tensor, config: GenerationConfig) -> None:
    assert ours.drafts == theirs.drafts
    assert sequence(prompt, ours, config) == theirs.sequence
    assert ours.cache_length == theirs.cache_length
    new = theirs.sequence[len(prompt) :]
    assert sum(token != config.pad_id for token in new) / ours.finished.steps == pytest.approx(theirs.tokens_per_forward)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", QUIET)
def test_token_for_token(tmp_path: Path, name: str, kind: str) -> None:
    sure, canvases, settings = KINDS[kind]
    seed = 100 * QUIET.index(name) + list(KINDS).index(kind)
    folder = write_calm(tmp_path, seed, confidence=sure, **GEOMETRIES[name])
    model, theirs = open_model(folder), Reference(folder, attention="sdpa")
    draw = torch.Generator().manual_seed(seed)
    prompt = torch.randint(30, model.config.vocab_size, (3 + 9 * (seed % 3),), generator=draw)
    config = replace(DEFAULTS, **settings)
    max_tokens = canvases * model.canvas_length
    ours = answer(model, prompt, seed, max_tokens, config)
    agree(ours, theirs.generate(prompt, seed, max_tokens, config), prompt, config)


def test_the_ways_are_what_they_say(tmp_path: Path) -> None:
    """The runs above do stop early, do end at an end token, and do not where they should not."""
    reached: dict[str, set[str]] = {}
    for kind, (sure, canvases, settings) in KINDS.items():
        for name in QUIET:
            seed = 100 * QUIET.index(name) + list(KINDS).index(kind)
            model = open_model(write_calm(tmp_path / f"{name} {kind}", seed, confidence=sure, **GEOMETRIES[name]))
            draw = torch.Generator().manual_seed(seed)
            prompt = torch.randint(30, model.config.vocab_size, (3 + 9 * (seed % 3),), generator=draw)
            config = replace(DEFAULTS, **settings)
            ours = answer(model, prompt, seed, canvases * model.canvas_length, config)
            facts = reached.setdefault(kind, set())
            facts.add(ours.finished.reason)
            facts.update("converged" if canvas.converged else "ran out" for canvas in ours.canvases)
            facts.update(["several canvases"] * (len(ours.canvases) > 1))
    print(reached)
