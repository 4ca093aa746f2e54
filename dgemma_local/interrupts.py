"""Signals: while torch is imported, while an answer is made, and what is left of one.

torch tries to import numpy and goes on without it, whatever was raised meanwhile: what the handler of a signal raises, too.
So the import runs with Ctrl-C, SIGTERM and SIGHUP noted, and handled behind it.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType

from dgemma_local.errors import InstallationError

ENDINGS = (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))  # Windows has no SIGHUP


def import_torch() -> None:
    """Raises KeyboardInterrupt where Ctrl-C came meanwhile, InstallationError where it cannot be imported.

    A second signal of a kind ends the process at once.
    """
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.signal(number, signal.SIG_DFL)

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
    """The first Ctrl-C sets `pressed`; after it Python's own handler is back, so that a second one stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    before = signal.getsignal(signal.SIGINT)

    def press(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        pressed.set()

    signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)  # None: not installed by Python
