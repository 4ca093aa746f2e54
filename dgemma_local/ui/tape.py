"""A recording by its steps: pure, and folded only as far as it is looked at, a canvas at a time."""

from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from dgemma_local.events import Event, StepDone
from dgemma_local.recording import Recording
from dgemma_local.states import Moment, Seen, history, see
from dgemma_local.ui.canvas import Vocabulary
from dgemma_local.ui.page import unfinished


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A position at a step of the whole recording; both count from 0."""

    step: int
    position: int


class Tape:
    """Steps count from 0 over all canvases. There is at least one."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.canvases = recording.canvases
        self.firsts = (0, *accumulate(map(len, self.canvases)))[:-1]  # step of each canvas at which it begins
        self.ends = frozenset(recording.header.ends)
        self.vocabulary = Vocabulary(
            text=lambda token: recording.word(token).text,
            control=lambda token: recording.word(token).control,
            ends=self.ends,
        )
        self._spans = tuple(_spans(recording))
        self._before = [Seen(self.ends)]  # what is known when a canvas begins, as far as that has been asked for
        self._held: tuple[int, list[Seen]] = (-1, [])  # a canvas, and what is seen after each of its steps
        self._told: tuple[tuple[int, int], tuple[Moment, ...]] = ((-1, -1), ())  # a canvas's position, and its past

    def __len__(self) -> int:
        return sum(map(len, self.canvases))

    @property
    def length(self) -> int:
        """Positions of a canvas."""
        return self.recording.header.canvas_length

    def canvas(self, step: int) -> int:
        """The one that a step belongs to."""
        return bisect(self.firsts, step) - 1

    def seen(self, step: int) -> Seen:
        """What is known right after a step."""
        canvas = self.canvas(step)
        while len(self._before) <= canvas:
            self._fold(len(self._before) - 1)
        if self._held[0] != canvas:
            self._held = (canvas, self._fold(canvas))
        return self._held[1][step - self.firsts[canvas]]

    def end(self) -> Seen:
        """What is known after the last event."""
        while len(self._before) <= len(self._spans):
            self._fold(len(self._before) - 1)
        return self._before[-1]

    def _fold(self, canvas: int) -> list[Seen]:
        seen = self._before[canvas]
        found = []
        for event, seconds in self._spans[canvas]:
            seen = see(seen, event, seconds)
            if isinstance(event, StepDone):
                found.append(seen)
        if len(self._before) == canvas + 1:
            self._before.append(seen)
        return found

    def tail(self, step: int) -> str:
        """Committed text on the line that the canvas of this step goes on with."""
        done = sum(map(len, self._spans[: self.canvas(step)]))  # events
        return unfinished(piece for pieces in self.recording.pieces[:done] for piece in pieces)

    def history(self, canvas: int, position: int) -> tuple[Moment, ...]:
        """What became of a position at each step of a canvas."""
        if self._told[0] != (canvas, position):
            self._told = ((canvas, position), history(self.canvases[canvas], position, self.ends))
        return self._told[1]

    def find(self, text: str) -> tuple[Place, ...]:
        """Where a position first came to hold a token that reads like this, in any case; in the order of the steps."""
        wanted = {
            token for token, word in self.recording.words.items() if text and text.casefold() in word.text.casefold()
        }
        found = []
        for first, steps in zip(self.firsts, self.canvases, strict=True):
            new = set(range(self.length))
            for step in steps:
                held = sorted(i for i in new if step.accepted[i] and step.next[i] in wanted)
                found += [Place(first + step.step, i) for i in held]
                new -= set(held)
        return tuple(found)


def _spans(recording: Recording) -> Iterator[list[tuple[Event, float]]]:
    """The events of each canvas, with their seconds; what comes before its first step belongs to it, too."""
    span: list[tuple[Event, float]] = []
    begun = False
    for event, seconds in zip(recording.events, recording.seconds, strict=True):
        if isinstance(event, StepDone) and event.step == 0:
            if begun:
                yield span
                span = []
            begun = True
        span.append((event, seconds))
    yield span
