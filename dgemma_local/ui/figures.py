"""What an answer took, in figures that mean something: medians, whole times, and no rate over a moment too short for one.

A canvas arrives at once: tokens over the time since the last one would be anything at all. So speed is milliseconds a
denoising step and steps a canvas, tokens a forward pass is a plain ratio of counts, and tokens a second count from the
question to the end, drawing included.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dgemma_local.events import CanvasCommitted, Event, Finished, Prefilled, Retried, StepDone

SHORTEST_WALL = 1.0  # seconds from the question to the end: a rate over less says more of the start than of the speed
ENOUGH = 20  # steps, so that a twentieth of them is one; below, the slowest is what p95 would be


@dataclass(slots=True)
class Times:
    """Seconds of one answer, event by event; a reader's own time is not in them."""

    passed: float = 0.0  # of all events so far
    prefill: float = 0.0
    first_draft: float | None = None  # from the question on
    first_canvas: float | None = None
    steps: list[float] = field(default_factory=list)
    canvases: list[tuple[int, float]] = field(default_factory=list)  # tokens before it, its median step
    _context: int = 0  # tokens before the canvas at work
    _begun: int = 0  # steps taken before it

    def take(self, event: Event, seconds: float) -> None:
        """One event, and how long it took to make."""
        self.passed += seconds
        match event:
            case Prefilled():
                self.prefill, self._context = seconds, event.tokens
            case StepDone():
                self.steps.append(seconds)
                self.first_draft = self.passed if self.first_draft is None else self.first_draft
            case CanvasCommitted():
                self.first_canvas = self.passed if self.first_canvas is None else self.first_canvas
                if own := self.steps[self._begun :]:
                    self.canvases.append((self._context, median(own)))
                self._begun, self._context = len(self.steps), self._context + len(event.tokens)
            case Retried() | Finished():
                pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What beside the times is told of an answer."""

    prompt: int
    reused: int
    joining: int  # of the prompt, read in one pass with the first step
    length: int  # of a canvas
    most: int  # steps a canvas
    taken: Sequence[int]  # steps of each canvas that was committed
    last: int  # tokens that the last one gave to the answer
    tokens: int  # of the answer and its thoughts, without padding
    thought: int


def median(values: Sequence[float]) -> float:
    """The one in the middle, or halfway between the two that are."""
    ordered, half = sorted(values), len(values) // 2
    return (ordered[half] + ordered[~half]) / 2


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of them does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def lines(counts: Counts, times: Times, wall: float, settings: Mapping[str, object] | None = None) -> list[str]:
    """The statistics, a line each. wall: seconds from the question to the end, drawing included.

    settings: of `session.Session`; what they say of the sampler is told.
    """
    told = [f"prompt    {_count(counts.prompt, 'token')}, {counts.reused} of them reused, {_ms(times.prefill)}"]
    if counts.joining:
        told[0] += f" without the {counts.joining} read with the first step"
    if times.first_draft is not None:
        canvas = "" if times.first_canvas is None else f", the first canvas after {_ms(times.first_canvas)}"
        told.append(f"first     draft after {_ms(times.first_draft)}{canvas}")
    told.append(f"steps     {len(times.steps)}{_pace(times.steps)}")
    if used := _sampler(settings or {}):
        told.append(f"sampler   {', '.join([f'at most {counts.most} steps a canvas', *used])}")
    if counts.taken:
        told.append(
            f"canvases  {len(counts.taken)} of {counts.length} tokens, {', '.join(map(str, counts.taken))} "
            f"of at most {counts.most} steps"
        )
        told.append(
            f"          a step computes the whole canvas: the {_count(counts.last, 'token')} of the last cost as much as "
            f"{counts.length} would"
        )
    if times.canvases:
        told.append(f"context   {_grown(times.canvases)}; {counts.prompt + counts.tokens} tokens at the end")
    if counts.tokens and times.steps:
        apart = f", {counts.thought} of them thought" if counts.thought else ""
        rate = counts.tokens / len(times.steps)
        told.append(f"tokens    {counts.tokens} without padding{apart}: {rate:.1f} a forward pass")
    speed = f": {counts.tokens / wall:.1f} tokens/s from end to end" if wall >= SHORTEST_WALL and counts.tokens else ""
    told.append(f"wall      {wall:.2f} s{speed}")
    return told


def _sampler(settings: Mapping[str, object]) -> list[str]:
    """Its settings in words, those that are known."""
    words = {
        "preset": "preset {}",
        "entropy_bound": "entropy bound {}",
        "confidence": "mean entropy to stop {}",
        "stability": "drafts to agree {}",
        "t_min": "temperature {}",
        "t_max": "to {}",
    }
    return [said.format(settings[name]) for name, said in words.items() if settings.get(name) is not None]


def _pace(steps: Sequence[float]) -> str:
    if not steps:
        return ""
    slow, name = (quantile(steps, 0.95), "p95") if len(steps) >= ENOUGH else (max(steps), "slowest")
    return f"; p50 {_ms(median(steps))}, {name} {_ms(slow)}"


def _grown(canvases: Sequence[tuple[int, float]]) -> str:
    """How a step's time goes with the context: of the first canvas, and of the last."""
    shown = [canvases[0], canvases[-1]] if len(canvases) > 1 else [canvases[0]]
    return ", ".join(f"{_ms(seconds)} a step behind {_count(tokens, 'token')}" for tokens, seconds in shown)


def _ms(seconds: float) -> str:
    """Three digits, or whole milliseconds."""
    milliseconds = 1000 * seconds
    return f"{milliseconds:.0f} ms" if milliseconds >= 99.5 else f"{milliseconds:.1f} ms"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
