"""Frames on their way to the terminal: one at a time, written by a thread, so that nobody waits for a slow one."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

from dgemma_local.ui.canvas import Row
from dgemma_local.ui.paint import Painter
from dgemma_local.ui.terminal import LEAVING, spared

FRAMES_PER_SECOND = 20.0  # at most; more is not seen
SHARE = 0.03  # of the time, at most, goes into drawing
_LAST = 4  # frames, whose cost says when the next one is due


class Drawer:
    """A context manager over a painter: leaving it waits for what is being written, then takes the frame away.

    Its thread is the only one that writes frames; `rest` before anything else is written to the same terminal. By an
    exception it leaves without waiting for long. Where the terminal has gone, frames are lost, and no more than they.
    """

    def __init__(self, painter: Painter, fps: float = FRAMES_PER_SECOND) -> None:
        self._painter, self._between = painter, 1 / fps
        self._changed = threading.Condition()
        self._rows: Sequence[Row] | None = None  # given, and not yet on the screen
        self._ended = False
        self._error: BaseException | None = None
        self._recent: deque[float] = deque(maxlen=_LAST)  # seconds of frames: made and painted, not written
        self._due = 0.0  # on the monotonic clock
        self.drawn = self.dropped = 0  # frames
        self._thread = threading.Thread(target=self._work, name="canvas view", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Drawer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        try:
            self._thread.join(None if kind is None else LEAVING)
        finally:
            self._thread.join(LEAVING)  # another signal may have ended that wait

    def offer(self, make: Callable[[], Sequence[Row]]) -> bool:
        """Draws what `make` returns if a frame is due and the one before is written; else drops it, and says False."""
        with self._changed:
            if self._rows is not None or time.monotonic() < self._due:
                self.dropped += 1
                return False
        self._give(make)
        return True

    def show(self, make: Callable[[], Sequence[Row]]) -> None:
        """Draws what `make` returns, and waits until it is written."""
        self.rest()
        self._give(make)
        self.rest()

    def rest(self) -> None:
        """Waits until nothing is being written. Raises what went wrong in the thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._rows is None)
            error, self._error = self._error, None
        if error is not None:
            raise error

    def clear(self) -> None:
        """Takes the frame away."""
        self.rest()
        with spared(self._painter.file):
            self._painter.clear()

    def _give(self, make: Callable[[], Sequence[Row]]) -> None:
        began = time.perf_counter()
        rows = make()
        with self._changed:
            self._recent.append(time.perf_counter() - began)
            self._due = time.monotonic() + self._between
            self._rows = rows
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._rows is not None or self._ended)
                rows = self._rows
            if rows is None:
                with spared(self._painter.file):
                    self._painter.clear()
                return
            error: BaseException | None = None
            try:
                began = time.thread_time()  # what the painter takes from the model: waiting for it is not its cost
                text = self._painter.painted(rows)
                took = time.thread_time() - began
                self._count(took)
                with spared(self._painter.file):
                    self._painter.write(text)
            except Exception as caught:  # to the one who draws: nobody hears a thread
                error = caught
            with self._changed:
                self._rows, self._error = None, error
                self._changed.notify_all()

    def _count(self, painted: float) -> None:
        with self._changed:
            cost = self._recent.pop() + painted
            self._recent.append(cost)
            self.drawn += 1
            mean = sum(self._recent) / len(self._recent)
            self._due = max(self._due, time.monotonic() + mean / SHARE)
