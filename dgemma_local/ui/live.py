"""The canvas on a terminal while it settles: frames are pure (`frame`), what is drawn when is decided here.

live(events, ...)      draws frame over frame, and prints above them what is final
printed(events, ...)   prints frame under frame, for a terminal that cannot move its cursor
"""

import sys
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
from dgemma_local.ui.keys import Gone, Keys, hushed
from dgemma_local.ui.page import Page
from dgemma_local.ui.paint import Painter
from dgemma_local.ui.palette import Theme
from dgemma_local.ui.pause import front, pausable
from dgemma_local.ui.record import Record, Timed
from dgemma_local.ui.status import line
from dgemma_local.ui.terminal import Terminal, unheld

SLICE = 0.05  # seconds that a wait may go on after Ctrl-C
_NEXT = frozenset({"space", "right", "enter"})
KEYS = ("space next", "c go on", "q stop")  # of a step that waits for one
_LEAST_CANVAS = 4  # rows of a frame that leaves one to the names of the keys


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
            try:
                key = self.keys.read(SLICE)
            except Gone:  # the answer may be bound for elsewhere
                key = "c"
            if key in _NEXT:
                return
            if key == "c":
                self.keys = None
            elif key == "q":
                self.pressed.set()
            again()

    def sleep(self, again: Callable[[], None] = lambda: None) -> None:
        """The rest of the time that the step in view stays there. again: as with `hold`."""
        while (wait := self.drawn + self.slow - time.monotonic()) > 0 and not self.pressed.is_set():
            time.sleep(min(wait, SLICE))
            again()

    def mark(self) -> None:
        self.drawn = time.monotonic()


class Region:
    """The frame at the bottom of a terminal: never less high than it was, as far as the terminal goes."""

    def __init__(self, terminal: Terminal, sight: Sight) -> None:
        self._terminal, self._sight = terminal, sight
        self._top = self._rows = 0
        self.size = (0, 0)  # of the terminal at the last frame

    def rows(self, seen: Seen, tail: str, below: Sequence[str] = ()) -> Sequence[Row]:
        """below: what a last row says, where there is one to spare."""
        self.size = width, height = self._terminal.size
        # between two canvases there are no positions
        self._rows = max(self._rows, usual(len(seen.states)) + bool(below))
        room = max(1, min(height - 1, self._rows))
        last = [line(below, width)] if below and room > _LEAST_CANVAS else []
        drawn = frame(seen, self._sight, width, room - len(last), tail=tail, top=self._top)
        self._top = drawn.top
        return [*drawn.rows, *last]

    @property
    def stale(self) -> bool:
        return self._terminal.size != self.size

    def forget(self) -> None:
        """What stood there does no longer."""
        self.size = (0, 0)

    def settle(self) -> None:
        """The next canvas begins at its first row."""
        self._top = 0


class _Stage:
    """What stands on the terminal, drawn only while it is ours."""

    def __init__(self, terminal: Terminal, region: Region, drawer: Drawer, pace: Pace, page: Page) -> None:
        self._terminal, self._region, self._drawer, self._pace, self._page = terminal, region, drawer, pace, page
        self._seen: Seen | None = None

    def _make(self, seen: Seen) -> Callable[[], Sequence[Row]]:
        self._seen = seen
        return lambda: self._region.rows(seen, self._page.tail, KEYS if self._pace.keys is not None else ())

    def show(self, seen: Seen) -> None:
        make = self._make(seen)
        if front(self._terminal.file):
            self._drawer.show(make)

    def offer(self, seen: Seen) -> None:
        make = self._make(seen)
        if front(self._terminal.file):
            self._drawer.offer(make)

    def again(self) -> None:
        """Where the terminal is another one by now, in size or after Ctrl-Z."""
        if self._seen is not None and self._region.stale:
            self.show(self._seen)

    def leave(self) -> None:
        """Before the process stops."""
        self._drawer.clear()
        self._region.forget()

    def make_room(self) -> None:
        """For what is final; nothing is drawn again until it is written."""
        self._seen = None
        self._drawer.clear()
        self._region.settle()


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
    frames are left out where steps are faster than the drawing may be, never the last of a canvas. Where the terminal
    goes, or is another's meanwhile, the run goes on without the view.
    Returns the drawer, which knows how many frames there were.
    """
    pace = pace or Pace()
    with (
        page,
        copy or nullcontext(),
        hushed(terminal.file),
        Drawer(Painter(terminal, theme), fps) as drawer,
        unheld(terminal.file, sys.stdout),
    ):
        stage = _Stage(terminal, Region(terminal, sight), drawer, pace, page)
        with pausable(stage.leave):
            for event, seconds in events:
                pieces = record.take(event, seconds)
                if isinstance(event, StepDone):
                    pace.sleep(stage.again)
                    if pace.every or event.done:
                        stage.show(record.seen)
                        pace.hold(stage.again)
                    else:
                        stage.offer(record.seen)
                    pace.mark()
                elif isinstance(event, CanvasCommitted | Finished):
                    _last(record, pace, stage.again)
                    stage.make_room()
                    if copy is not None:
                        copy.write(pieces)
                    page.write(pieces)
                    if isinstance(event, CanvasCommitted):
                        stage.show(record.seen)  # the unfinished line stays in view
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
    if pace.keys is not None:
        terminal.say(" · ".join(KEYS))
    with page, copy or nullcontext(), unheld(terminal.file, sys.stdout):
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


def _last(record: Record, pace: Pace, again: Callable[[], None] = lambda: None) -> None:
    """The last step of a canvas stays as long as any, unless the reader has had enough."""
    if not record.interrupted:
        pace.sleep(again)
