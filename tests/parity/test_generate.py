"""Complete answers, token for token: transformers' generate() and this engine with transformers' draws.

Every draft of every step is compared, then the canvases, the length of the cache and the number of steps. Short canvases:
each step's self-conditioning feeds rounding back, and behind a random network it grows about 1.3 times a step, so that
after 30 steps both implementations are equally far from the truth and from each other.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from reference import GEOMETRIES, Reference, open_model, write_calm
from torch import Tensor
from ways import DEFAULTS, KINDS, QUIET

from dgemma_local.config import GenerationConfig
from dgemma_local.engine import Conversation
from dgemma_local.events import CanvasCommitted, Finished, StepDone
from dgemma_local.model import DiffusionGemma
from dgemma_local.noise import TorchNoise

pytestmark = [
    pytest.mark.parity,
    # torch.distributions, which transformers' entropy is from
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]


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


class Case(NamedTuple):
    folder: Path
    prompt: Tensor
    seed: int
    max_tokens: int
    config: GenerationConfig
    ours: Ours


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> dict[tuple[str, str], Case]:
    """Each way on each geometry, each with its own weights, prompt and seed, answered by this engine."""
    found = {}
    for seed, (name, (kind, (sure, canvases, settings))) in enumerate(product(QUIET, KINDS.items())):
        folder = write_calm(tmp_path_factory.mktemp("generate"), seed, confidence=sure, **GEOMETRIES[name])
        model, config = open_model(folder), replace(DEFAULTS, **settings)
        draw = torch.Generator().manual_seed(seed)
        prompt = torch.randint(30, model.config.vocab_size, (3 + 9 * (seed % 3),), generator=draw)
        max_tokens = canvases * model.canvas_length
        ours = answer(model, prompt, seed, max_tokens, config)
        found[name, kind] = Case(folder, prompt, seed, max_tokens, config, ours)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", QUIET)
def test_token_for_token(cases: dict[tuple[str, str], Case], name: str, kind: str) -> None:
    folder, prompt, seed, max_tokens, config, ours = cases[name, kind]
    theirs = Reference(folder, attention="sdpa").generate(prompt, seed, max_tokens, config)
    assert ours.drafts == theirs.drafts
    assert sequence(prompt, ours, config) == theirs.sequence
    assert ours.cache_length == theirs.cache_length
    new = theirs.sequence[len(prompt) :]
    assert sum(token != config.pad_id for token in new) / ours.finished.steps == pytest.approx(
        theirs.tokens_per_forward
    )


def test_the_ways_are_what_they_say(cases: dict[tuple[str, str], Case]) -> None:
    """Among the answers compared there are early stops at each stability, ends inside a canvas, and whole budgets."""
    converged = dict.fromkeys(KINDS, 0)
    reasons: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for (_, kind), case in cases.items():
        converged[kind] += sum(canvas.converged for canvas in case.ours.canvases)
        reasons[kind].add(case.ours.finished.reason)
        stability = case.config.stability
        for canvas, drafts in zip(case.ours.canvases, case.ours.drafts, strict=True):
            agreeing = all(draft == drafts[-1] for draft in drafts[-1 - stability :]) and len(drafts) > stability
            assert agreeing or not canvas.converged
    for kind, way in KINDS.items():
        assert ("end" in reasons[kind]) == ("end_ids" in way.settings)
        if kind.startswith("early stop"):
            assert converged[kind] >= 5, kind
    assert converged["many canvases"] == 0
    assert sum(len(case.ours.canvases) for case in cases.values()) > 100
