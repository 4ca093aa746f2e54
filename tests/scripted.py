"""A model that says what a script tells it, canvas by canvas, and a session around it: what the demo model will not do.

It stands behind the engine's Protocol and goes through the sampler: its logits point to the tokens of the script, with a
doubt for so many steps, and another word in second place where that one is not allowed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from fake import FakeCache
from small_tokenizer import VOCAB_SIZE, small
from torch import Tensor

from dgemma_local import sampler
from dgemma_local.cache import Room
from dgemma_local.config import GenerationConfig
from dgemma_local.engine import Conversation
from dgemma_local.noise import Noise
from dgemma_local.session import Session

LENGTH = 8  # positions of a canvas
STEPS = 6  # a canvas may take
END = "<turn|>"
GENERATION = GenerationConfig(
    steps=STEPS, t_min=0.4, t_max=0.8, entropy_bound=0.1, confidence=0.005, stability=1, end_ids=(1, 106, 50), pad_id=0
)


@dataclass(frozen=True)
class Says:
    """One canvas, or one attempt at it."""

    tokens: tuple[int, ...]  # padded to the canvas
    doubt: int = 0  # steps at which it is about to say something else; from STEPS - 1 on it does not converge
    second: str = "Hi"  # a token, said where the first choice is not allowed
    broken: int | None = None  # step at which a hidden state is not a number


def says(text: str, **named: Any) -> Says:
    """`text`, with its markers, as one canvas."""
    (canvas,) = canvases(text, **named)
    return canvas


def canvases(text: str, **named: Any) -> list[Says]:
    """As many canvases as it takes."""
    ids = small().encode(text)
    parts = [ids[at : at + LENGTH] for at in range(0, len(ids), LENGTH)]
    return [Says((*part, *[0] * (LENGTH - len(part))), **named) for part in parts]


@dataclass
class ScriptedModel:
    """Says the script's entries in turn; behind the last one, the last one again."""

    script: Sequence[Says]
    before: Callable[[int], None] = lambda _: None  # called ahead of each step with its number over all
    canvas_length: int = LENGTH
    max_positions: int = 4096
    joins: int = 0
    mode: str = "scripted"
    room: Room | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    asked: list[tuple[int, sampler.Rules, Noise]] = field(default_factory=list)  # a canvas: number, rules, noise
    encoded: list[int] = field(default_factory=list)
    steps: int = 0  # over all

    def new_cache(self) -> FakeCache:
        return FakeCache()

    def encode(self, ids: Tensor, cache: FakeCache) -> None:
        self.encoded += ids.tolist()
        cache.tokens.extend(ids.tolist())

    def denoising(
        self,
        ids: Sequence[int],
        number: int,
        cache: FakeCache,
        config: GenerationConfig,
        noise: Noise,
        rules: sampler.Rules = sampler.FREE,
    ) -> Iterator[sampler.Canvas]:
        says = self.script[min(len(self.asked), len(self.script) - 1)]
        self.asked.append((number, rules, noise))
        canvas = sampler.begin(number, noise, rules)
        while not canvas.done:
            self.before(self.steps)
            self.steps += 1
            canvas = sampler.advance(canvas, _logits(says, canvas.step), config, noise)
            yield canvas

    def first_bad_layer(self, canvas: Tensor, cache: FakeCache, signal: Tensor | None) -> str:
        return "layer 3"


def _logits(says: Says, step: int) -> Tensor:
    """[L, V]."""
    chosen = torch.tensor(says.tokens)
    if step < says.doubt:
        chosen = 300 + (chosen + step) % 100  # bytes, others at each step
    logits = 20.0 * torch.nn.functional.one_hot(torch.tensor(small().encode(says.second)), VOCAB_SIZE).float()
    logits = logits.repeat(LENGTH, 1)
    logits[torch.arange(LENGTH), chosen] = 30.0
    if step == says.broken:
        logits[-1] = torch.nan
    return logits


def session(*script: Says, before: Callable[[int], None] = lambda _: None, context: int = 4096) -> Session:
    """A session whose model says this."""
    model: Any = ScriptedModel(script, before, max_positions=context)
    none: Any = None
    return Session(
        name="scripted",
        tokenizer=small(),
        generation=GENERATION,
        conversation=Conversation(model),
        is_demo=False,
        planned=none,
        proof=none,
        slow_because=None,
    )


def model_of(session: Session) -> ScriptedModel:
    model: Any = session.conversation.model
    assert isinstance(model, ScriptedModel)
    return model


def module(opens: Session | BaseException) -> ModuleType:
    """What stands in for dgemma_local.session: a session that is there, or why it cannot be opened."""
    from dgemma_local import session as real

    fake: Any = ModuleType("dgemma_local.session")

    def open_session(*_: Any) -> Session:
        if isinstance(opens, BaseException):
            raise opens
        return opens

    fake.open_session, fake.Wishes, fake.timed = open_session, real.Wishes, real.timed
    return fake
