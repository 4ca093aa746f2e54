"""What the engine says, as five frozen facts in plain values.

    Prefilled ─► [StepDone* ─► Retried] ─► (StepDone* ─► CanvasCommitted)* ─► Finished

An event holds no tensor, no text for people and no clock: the same seed gives the same events, byte for byte.
Timings travel beside the events (`session.timed`). Canvases and steps count from 0.
"""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["end", "budget", "context", "stop", "interrupted"]
RetryReason = Literal["empty"]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt is in the cache, but for what joins it with the first step."""

    tokens: int  # in the prompt
    reused: int  # of those, already in the cache from an earlier turn
    joining: int = 0  # of those, read in one pass with the first step


@dataclass(frozen=True, slots=True)
class StepDone:
    """One denoising step over one canvas; every tuple has one entry a canvas position."""

    canvas: int
    step: int  # 0 is the first, noisiest
    steps: int  # at most so many in this canvas
    temperature: float
    fed: tuple[int, ...]  # what this step read
    draft: tuple[int, ...]  # argmax of its logits: what would be committed if it were the last
    accepted: tuple[bool, ...]  # within the entropy bound at this step
    next: tuple[int, ...]  # what the next step reads; after the last step, the committed ids
    entropy: tuple[float, ...]  # nats, of the temperature-scaled distribution
    done: bool  # stable and confident, or out of steps
    pinned: tuple[int, ...] = ()  # positions whose token was given, not chosen by the model; ascending


@dataclass(frozen=True, slots=True)
class Retried:
    """The steps since the last commit are void: that canvas begins anew, with other noise."""

    canvas: int
    reason: RetryReason  # nothing in it was for a reader
    steps: int  # denoising steps that are void


@dataclass(frozen=True, slots=True)
class CanvasCommitted:
    """A canvas is final."""

    canvas: int
    tokens: tuple[int, ...]  # the whole canvas
    kept: int  # the first so many belong to the answer: cut at an end token, a stop string or the budget
    steps: int  # denoising steps it took
    converged: bool  # stable and confident; False when the steps ran out


@dataclass(frozen=True, slots=True)
class Finished:
    """Always the last event."""

    reason: FinishReason  # an end token, the token budget, no room for another canvas, a stop string, Ctrl-C
    tokens: tuple[int, ...]  # the answer, end token excluded
    canvases: int  # committed
    steps: int  # denoising steps over all canvases, void ones included
    rest: str = ""  # of the answer, behind `tokens`: what stands before a stop string in the token it begins in


Event = Prefilled | StepDone | Retried | CanvasCommitted | Finished
