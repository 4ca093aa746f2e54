"""The canvas on a terminal while it settles: frames are pure (`frame`), what is drawn when is decided here.

live(events, ...)      draws frame over frame, and prints above them what is final
printed(events, ...)   prints frame under frame, for a terminal that cannot move its cursor
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from dgemma_local.events import CanvasCommitted, Finished, StepDone
from dgemma_local.interrupts import Flag
from dgemma_local.states import Seen
from dgemma_local.ui.canvas import Row
from dgemma_local.ui.drawing import FRAMES_PER_SECOND, Drawer
from dgemma_local.ui.frame import Sight, frame, marked, usual
from dgemma_local.ui.keys import Keys, hushed
from dgemma_local.ui.page import Page
from dgemma_local.ui.paint import Painter
from dgemma_local.ui.palette import Theme
from dgemma_local.ui.pause import pausable
from dgemma_local.ui.record import Record, Timed
from dgemma_local.ui.terminal import Terminal

SLICE = 0.05  # seconds that a wait may go on after Ctrl-C
_NEXT = frozenset({"space", "right", "enter"})


@dataclass(slots=True)
class Pace:
    """How long a step stays in view."""

    slow: float = 0.0  # seconds at least
    keys: Keys | None = None  # a step stays until one of them says so
    pressed: Flag = field(default_factory=Flag)  # Ctrl-C, which ends that
    drawn: float = 0.0  # when the step in view was, on the monotonic clock

    @property
    def every(self) -> bool:
        """Whether every step is to be seen."""
        return self.slow > 0 or self.keys is not None

    def hold(self, again: Callable[[], None] = lambda: None) -> None:
        """Waits for a key, where keys say how it goes on. again: called now and then, the terminal may have changed."""
        while self.keys is not None and not self.pressed.is_set():
            key = self.keys.read(SLICE)
            if key in _NEXT:
                return
            if key == "c":
                self.keys = None
            elif key == "q":
                self.pressed.set()
            again()

    def sleep(self) -> None:
        """The rest of the time that the step in view stays there."""
        while (wait := self.drawn + self.slow - time.monotonic()) > 0 and not self.pressed.is_set():
            time.sleep(min(wait, SLICE))

    def mark(self) -> None:
        self.drawn = time.monotonic()


class Region:
    """The frame at the bottom of a terminal: never less high than it was, as far as the terminal goes."""

    def __init__(self, terminal: Terminal, sight: Sight) -> None:
        self._terminal, self._sight = terminal, sight
        self._top = self._rows = 0
        self.size = (0, 0)  # of the terminal at the last frame

    def rows(self, seen: Seen, tail: str) -> Sequence[Row]:
        self.size = width, height = self._terminal.size
        self._rows = max(self._rows, usual(len(seen.states)))  # between two canvases there are no positions
        drawn = frame(seen, self._sight, width, max(1, min(height - 1, self._rows)), tail=tail, top=self._top)
        self._top = drawn.top
        return drawn.rows

    @property
    def stale(self) -> bool:
        return self._terminal.size != self.size

    def forget(self) -> None:
        """What stood there does no longer."""
        self.size = (0, 0)

    def settle(self) -> None:
        """The next canvas begins at its first row."""
        self._top = 0


def live(
    events: Iterable[Timed],
    record: Record,
    page: Page,
    terminal: Terminal,
    sight: Sight,
    theme: Theme,
    *,
    copy: Page | None = None,
    fps: float = FRAMES_PER_SECOND,
    pace: Pace | None = None,
) -> Drawer:
    """Draws the canvas on `terminal`, and what is final above it on `page`, which writes whole lines to the same one.

    copy: gets the text too, as stdout does when it is not this terminal. pace: how long steps stay in view; without one
    frames are left out where steps are faster than the drawing may be, never the last of a canvas.
    Returns the drawer, which knows how many frames there were.
    """
    pace = pace or Pace()
    region = Region(terminal, sight)

    def away() -> None:
        drawer.clear()
        region.forget()

    with (
        page,
        copy or nullcontext(),
        hushed(terminal.file),
        Drawer(Painter(terminal, theme), fps) as drawer,
        pausable(terminal.file, away),
    ):
        for event, seconds in events:
            pieces = record.take(event, seconds)
            seen = record.seen

            def make(seen: Seen = seen) -> Sequence[Row]:
                return region.rows(seen, page.tail)

            if isinstance(event, StepDone):
                pace.sleep()
                if pace.every or event.done:
                    drawer.show(make)
                    pace.hold(lambda: drawer.show(make) if region.stale else None)  # called at once
                else:
                    drawer.offer(make)
                pace.mark()
            elif isinstance(event, CanvasCommitted | Finished):
                _last(record, pace)
                drawer.clear()
                region.settle()
                if copy is not None:
                    copy.write(pieces)
                page.write(pieces)
                if isinstance(event, CanvasCommitted):
                    drawer.show(make)  # the unfinished line stays in view
    return drawer


def printed(
    events: Iterable[Timed],
    record: Record,
    page: Page,
    terminal: Terminal,
    sight: Sight,
    *,
    copy: Page | None = None,
    pace: Pace | None = None,
) -> None:
    """Prints every step's frame under the one before, and what is final on `page`; no escape code, no colour."""
    pace = pace or Pace()
    top = 0
    with page, copy or nullcontext():
        for event, seconds in events:
            pieces = record.take(event, seconds)
            if isinstance(event, StepDone):
                pace.sleep()
                width = terminal.size.width - 1  # many break the line behind the last column by themselves
                drawn = frame(
                    record.seen, sight, max(1, width), usual(len(record.seen.states)), tail=page.tail, top=top
                )
                top = drawn.top
                for line in (*marked(drawn.rows), ""):
                    terminal.say(line)
                pace.mark()
                pace.hold()
            elif isinstance(event, CanvasCommitted | Finished):
                _last(record, pace)
                top = 0
                if copy is not None:
                    copy.write(pieces)
                page.write(pieces)


def _last(record: Record, pace: Pace) -> None:
    """The last step of a canvas stays as long as any, unless the reader has had enough."""
    if not record.interrupted:
        pace.sleep()
