"""What the program did and how long it took, by the standard `logging`: with --verbose on stderr, in DGEMMA_LOG in a file.

    resolve ─► plan ─► load ─► selftest ─► capture ─► prefill ─► canvas, canvas, …

Never on stdout, which is the answer's. What is for stderr is held back until nothing is drawn there: a bar while a model is
loaded, a canvas while it settles. Nothing is sent anywhere.
"""

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import MemoryHandler
from pathlib import Path

from dgemma_local.errors import UsageError
from dgemma_local.events import CanvasCommitted, Event, Finished, Prefilled, Retried, StepDone
from dgemma_local.streams import say

log = logging.getLogger("dgemma")
log.addHandler(logging.NullHandler())  # a program that uses this package decides itself
log.propagate = False
log.setLevel(logging.WARNING)
HELD = 100_000  # lines, at most, that wait for stderr


class _Stderr(logging.Handler):
    """Whatever stderr is by then, closed or full included."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


class _File(logging.FileHandler):
    """One that cannot be written any more, as on a full disk, is left, and said when it is closed: the answer goes on."""

    lost: str | None = None  # why nothing is written any more

    def emit(self, record: logging.LogRecord) -> None:
        if self.lost is None:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        self.lost = str(getattr(error, "strerror", None) or error)

    def flush(self) -> None:
        if self.lost is None:
            super().flush()

    def close(self) -> None:
        with suppress(OSError):  # what is left to write
            super().close()
        if self.lost is not None:
            say(f"DGEMMA_LOG: {self.baseFilename} is not whole: {self.lost}")
            self.lost = None


def start(*, verbose: bool = False) -> None:
    """Opens what is asked for, and closes what was open. Raises UsageError where DGEMMA_LOG cannot be written."""
    stop()
    if verbose:
        held = MemoryHandler(HELD, flushLevel=logging.CRITICAL + 1, target=_Stderr())
        held.setLevel(logging.INFO)  # a line a step is for the file
        log.addHandler(held)
        log.setLevel(logging.INFO)
    if path := os.environ.get("DGEMMA_LOG"):
        check(path)
        try:
            file = _File(path, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise _unwritable(path, error.strerror) from None
        file.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(message)s"))
        log.addHandler(file)
        log.setLevel(logging.DEBUG)


def check(path: str) -> None:
    """Raises UsageError where there can be no log. Opens nothing: a pipe that nobody reads would hold the program."""
    file = Path(path)
    try:
        if file.exists():
            why = None if file.is_file() else "it is no regular file"
        else:
            why = None if file.parent.is_dir() else "there is no such folder"
    except OSError as error:
        why = error.strerror
    if why is None and not os.access(file if file.exists() else file.parent, os.W_OK):
        why = "its permissions do not allow it"
    if why is not None:
        raise _unwritable(path, why)


def _unwritable(path: str, why: str | None) -> UsageError:
    return UsageError(f"DGEMMA_LOG names {path}, which cannot be written: {why}", "name another file, or unset it")


def flush() -> None:
    """What was held back goes to stderr: nothing is drawn there now."""
    for handler in log.handlers:
        handler.flush()


def stop() -> None:
    """Says what is held back, and closes the file."""
    for handler in log.handlers[:]:
        if not isinstance(handler, logging.NullHandler):
            log.removeHandler(handler)
            handler.close()
    log.setLevel(logging.WARNING)  # nothing is put together that nobody reads


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Logs how long what is within took, or that it failed."""
    began, how = time.perf_counter(), ""
    try:
        yield
    except BaseException:
        how = ", failed"
        raise
    finally:
        log.info("%-9s %s%s", name, _seconds(time.perf_counter() - began), how)


class Canvases:
    """Logs an answer as its events come: the prefill, each canvas, the end."""

    def __init__(self) -> None:
        self.steps, self.seconds = 0, 0.0

    def take(self, event: Event, seconds: float) -> None:
        """One event and the time it took."""
        self.seconds += seconds
        match event:
            case Prefilled():
                self._say("prefill", f"{event.tokens} tokens, {event.reused} reused")
            case StepDone():
                self.steps += 1
                if log.isEnabledFor(logging.DEBUG):
                    where = f"{event.canvas + 1}.{event.step + 1}"
                    log.debug("%-9s %s, %s, %d accepted", "step", _seconds(seconds), where, sum(event.accepted))
            case CanvasCommitted():
                how = "converged" if event.converged else "not converged"
                self._say("canvas", f"{event.canvas + 1}: {self.steps} steps, {event.kept} tokens kept, {how}")
            case Retried():
                self._say("retried", f"canvas {event.canvas + 1} after {self.steps} steps")
            case Finished():
                log.info("%-9s %s, %d tokens, %d steps", "finished", event.reason, len(event.tokens), event.steps)

    def _say(self, name: str, what: str) -> None:
        log.info("%-9s %s, %s", name, _seconds(self.seconds), what)
        self.steps, self.seconds = 0, 0.0


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
