"""A session without a model: it spells out a given text, canvas by canvas, and needs no torch."""

import random
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

from small_tokenizer import small

from dgemma_local.errors import DgemmaError
from dgemma_local.events import CanvasCommitted, Event, Finished, FinishReason, Prefilled, StepDone
from dgemma_local.interrupts import Flag

END = 106  # <turn|>
LENGTH = 16


def spell(
    text: str, *, steps: int = 4, seed: int = 0, most: int = 1000, reason: FinishReason = "end"
) -> Iterator[Event]:
    """Events of an answer that is `text`; each step accepts the next few tokens, and the noise elsewhere is real."""
    ids = (*small().encode(text),)[:most]
    noise = random.Random(seed)
    yield Prefilled(tokens=7, reused=0)
    padded = [*ids, END]
    padded += [0] * (-len(padded) % LENGTH)
    canvases = [tuple(padded[i : i + LENGTH]) for i in range(0, len(padded), LENGTH)]
    for number, tokens in enumerate(canvases):
        fed = tuple(noise.randrange(800) for _ in tokens)
        for step in range(steps):
            accepted = tuple(i < LENGTH * (step + 1) // steps for i in range(LENGTH))
            after = tuple(t if a else noise.randrange(800) for t, a in zip(tokens, accepted, strict=True))
            done = step == steps - 1
            yield StepDone(number, step, 8, 0.8, fed, tokens, accepted, after, (0.001,) * LENGTH, done)
            fed = after
        kept = max(0, min(LENGTH, len(ids) - number * LENGTH))
        yield CanvasCommitted(number, tokens, kept, steps, converged=steps < 8)
    yield Finished(reason, ids, len(canvases), steps * len(canvases))


@dataclass
class FakeSession:
    """Takes `pause` seconds a step; raises `error` instead of its first event."""

    text: str
    pause: float = 0.0
    reason: FinishReason = "end"
    error: DgemmaError | None = None
    is_demo: bool = True
    taken: int = 4  # steps a canvas
    name: str = "fake"
    canvas_length: int = LENGTH
    steps: int = 8
    on_gpu: bool = False
    slow_because: str | None = "the model is on cpu"
    mode: str = "torch: the model is on cpu"
    words: tuple[str, ...] = ()
    revision: str | None = None
    settings: dict[str, object] = field(default_factory=lambda: {"entropy_bound": 0.1})
    notices: tuple[str, ...] = ()
    asked: dict[str, Any] = field(default_factory=dict)
    opened: tuple[str, Any] | None = None
    pressed: Flag = field(default_factory=Flag)

    @property
    def tokenizer(self) -> Any:
        return small()

    @property
    def generation(self) -> Any:
        return SimpleNamespace(end_ids=(1, END, 50))

    def prompt(self, messages: Sequence[Any], *, thinking: bool = False) -> tuple[int, ...]:
        return self.tokenizer.prompt(messages, thinking=thinking)

    def answer(self, messages: Sequence[Any], *, seed: int, max_tokens: int, **rest: Any) -> Iterator[Event]:
        self.asked = {"messages": messages, "seed": seed, "max_tokens": max_tokens, **rest}
        if self.error is not None:
            raise self.error
        short = max_tokens < len(small().encode(self.text))
        reason = "budget" if short else self.reason
        tokens: tuple[int, ...] = ()
        canvases = steps = 0
        self.pressed.clear()
        before = signal.signal(signal.SIGINT, lambda *_: self.pressed.set())
        try:
            for event in spell(self.text, steps=self.taken, seed=seed, most=max_tokens, reason=reason):
                if isinstance(event, StepDone):
                    time.sleep(self.pause)
                    steps += 1
                if self.pressed.is_set():
                    yield Finished("interrupted", tokens, canvases, steps)
                    return
                if isinstance(event, CanvasCommitted):
                    tokens, canvases = tokens + event.tokens[: event.kept], canvases + 1
                yield event
        finally:
            signal.signal(signal.SIGINT, before)


def timed(events: Iterable[Event]) -> Iterator[tuple[Event, float]]:
    for event in events:
        yield event, 0.25


def module(session: FakeSession) -> ModuleType:
    """What stands in for dgemma_local.session."""
    fake: Any = ModuleType("dgemma_local.session")

    def open_session(model: str, wishes: Any = None, progress: Any = None, say: Any = None) -> FakeSession:
        session.opened = (model, wishes)
        return session

    fake.open_session, fake.Wishes = open_session, dict
    fake.timed = timed
    return fake


def main(*arguments: str, **session: Any) -> None:
    """`dgemma ARGUMENTS` in this process, as the console script runs it."""
    from dgemma_local import cli, cli_run

    cli_run.import_torch = lambda: None  # it takes seconds, and nothing here needs it
    sys.modules["dgemma_local.session"] = module(FakeSession(**session))
    sys.argv = ["dgemma", *arguments]
    cli.main()
