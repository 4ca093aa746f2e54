"""Answers that take the time they are told to, for what measures, repeats and reports: no clock, no model, no meter."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fake import GENERATION

from dgemma_local.bench.measure import Bench
from dgemma_local.bench.protocols import Task
from dgemma_local.config import GenerationConfig
from dgemma_local.events import CanvasCommitted, Event, Finished, FinishReason, Prefilled, StepDone

PROMPT = tuple(range(10))
ADAPTIVE = Task(name="asked", prompt=PROMPT, config=replace(GENERATION, steps=3), max_tokens=8)


def step(canvas: int, number: int) -> StepDone:
    none: tuple[Any, ...] = ()
    return StepDone(
        canvas=canvas, step=number, steps=3, temperature=0.8, fed=none, draft=none, accepted=none, next=none,
        entropy=none, done=number == 2,
    )  # fmt: skip


def commit(canvas: int) -> CanvasCommitted:
    return CanvasCommitted(canvas=canvas, tokens=(5, 6, 7, 8), kept=4, steps=3, converged=False)


def script(
    tokens: Sequence[int] = (5, 6, 7, 8, 5, 6, 7), reason: FinishReason = "end", reused: int = 0
) -> list[tuple[float, Event]]:
    """Two canvases of three steps, with the seconds before each event."""
    return [
        (0.5, Prefilled(tokens=10, reused=reused)),
        (0.1, step(0, 0)),
        (0.2, step(0, 1)),
        (0.4, step(0, 2)),
        (0.1, commit(0)),
        (0.7, step(1, 0)),
        (0.2, step(1, 1)),
        (0.2, step(1, 2)),
        (0.1, commit(1)),
        (0.1, Finished(reason=reason, tokens=tuple(tokens), canvases=2, steps=6)),
    ]


@dataclass
class Script:
    """A conversation whose events come when they are told to; what it is asked is kept."""

    scripts: Sequence[Sequence[tuple[float, Event]]]
    now: float = 100.0
    held: list[int] = field(default_factory=lambda: [1, 2, 3])
    asked: list[tuple[Any, ...]] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def answer(self, prompt: Sequence[int], config: GenerationConfig, noise: Any, max_tokens: int) -> Iterator[Event]:
        events = self.scripts[len(self.asked) % len(self.scripts)]
        self.asked.append((tuple(prompt), config, noise, max_tokens, list(self.held)))
        self.held.extend(prompt)
        for seconds, event in events:
            self.now += seconds
            yield event


@dataclass
class Meter:
    """21 J an answer, whatever it is."""

    value: float | None = 21.0
    why_not: str | None = None
    spans: list[tuple[float, float]] = field(default_factory=list)

    def joules(self, begin: float, end: float) -> float | None:
        self.spans.append((begin, end))
        return self.value


def bench(speaker: Script, meter: Meter | None = None, *, shared: bool = False) -> Bench:
    return Bench(clock=speaker.clock, settle=lambda: None, shared=shared, power=meter or Meter())
