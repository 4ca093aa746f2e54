"""Signals: before a command runs, while torch is imported, while an answer is made, and while it is kept.

torch tries to import numpy and goes on without it, whatever was raised meanwhile: what the handler of a signal raises, too.
So the import runs with Ctrl-C, SIGTERM and SIGHUP noted, and handled behind it.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType, TracebackType

from dgemma_local.errors import InstallationError

ENDINGS = (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))  # Windows has no SIGHUP

# As `ui.plain.json_error` writes it, before any of that is imported.
EARLY = b'{"event": "failed", "outcome": "interrupted", "said": "interrupted", "fix": "", "exit_code": %d}\n'


def leave_early(number: int, _: object) -> None:
    """A signal before a command runs: as it would be without Python, but that `run --json` says so."""
    for each in (signal.SIGINT, *ENDINGS):
        signal.signal(each, signal.SIG_IGN)  # one is enough, and says its line whole
    if sys.argv[1:2] == ["run"] and "--json" in sys.argv:
        with suppress(OSError):
            os.write(1, EARLY % (128 + number))
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def import_torch() -> None:
    """Raises KeyboardInterrupt where Ctrl-C came meanwhile, InstallationError where it cannot be imported.

    A second signal of a kind ends the process at once, as one before a command runs.
    """
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.signal(number, leave_early)

    # only the main thread may handle signals, and what is ignored or left to the system stays so
    main = threading.current_thread() is threading.main_thread()
    handlers = {
        int(number): handler
        for number in (signal.SIGINT, *ENDINGS)
        if main and callable(handler := signal.getsignal(number))
    }
    for number in handlers:
        signal.signal(number, note)
    try:
        import_module("torch")
    except Exception as error:  # whatever a broken installation raises
        what = " ".join(str(error).split())
        raise InstallationError(
            f"torch cannot be imported: {type(error).__name__}: {what}", "`dgemma doctor` says what is broken here"
        ) from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number in came:
        handlers[number](number, None)


class Flag:
    """Raised by the handler of a signal, asked by everybody else.

    A `threading.Event` has a lock, and a handler that comes while its own thread holds it waits for itself.
    """

    __slots__ = ("_up",)

    def __init__(self) -> None:
        self._up = False

    def is_set(self) -> bool:
        return self._up

    def set(self) -> None:
        self._up = True

    def clear(self) -> None:
        self._up = False


@contextmanager
def noting_ctrl_c(pressed: Flag) -> Iterator[None]:
    """The first Ctrl-C sets `pressed`; after it Python's own handler is back, so that a second one stops at once.

    Inside a `Waiting` its handler is: that stops at once, too, and makes a third one wait.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    before = signal.getsignal(signal.SIGINT)
    waiting = isinstance(getattr(before, "__self__", None), Waiting)

    def press(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before if waiting else signal.default_int_handler)
        pressed.set()

    signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)  # None: not installed by Python


class Waiting:
    """A context manager; inside it signals of these numbers wait, but in `heeded`, and at its end those that wait are handled.

    One handler does both: whatever a signal raises in `heeded` makes the next one wait at once, so that no number of them,
    however quick, breaks off what follows. What is ignored or left to the system stays so.
    """

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers
        self._handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._came: list[int] = []
        self._heeds = self._over = False

    def __enter__(self) -> "Waiting":
        if threading.current_thread() is threading.main_thread():  # only it may handle signals
            for number in self._numbers:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._take:  # streams._leave ignores what follows it
                signal.signal(number, handler)
        self._heeds = self._over = True  # for whoever took this handler for the one of before
        self._handle()

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """In it signals are handled as they were before; first those that wait."""
        self._heeds = True
        try:
            self._handle()
            yield
        finally:
            self._heeds = False

    def forget(self, *numbers: int) -> None:
        """Those that wait are not handled any more."""
        self._came = [number for number in self._came if number not in numbers]

    def _handle(self) -> None:
        came, self._came = sorted({*self._came}, key=signal.SIGINT.__eq__), []  # Ctrl-C asks for less than the others
        for number in came:
            self._take(number, None)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if not self._heeds:
            self._came.append(number)
            return
        self._heeds = self._over
        self._handlers[number](number, frame)
        self._heeds = True


def undisturbed() -> Waiting:
    """Neither Ctrl-C nor being ended breaks off what is in it."""
    return Waiting(signal.SIGINT, *ENDINGS)
