"""Ctrl-C while torch is imported, and what is left of one.

torch tries to import numpy and goes on without it, whatever was raised meanwhile: a KeyboardInterrupt, too. So the import
runs with Ctrl-C noted, and raised behind it.
"""

import signal
import threading
from importlib import import_module
from types import FrameType

from dgemma_local.errors import InstallationError


def import_torch() -> None:
    """Raises KeyboardInterrupt where Ctrl-C came meanwhile, InstallationError where it cannot be imported.

    A second Ctrl-C ends the process at once.
    """
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    # only the main thread may handle signals, and a handler of somebody else's stays
    main = threading.current_thread() is threading.main_thread()
    ours = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, note)
    try:
        import_module("torch")
    except Exception as error:  # whatever a broken installation raises
        what = " ".join(str(error).split())
        raise InstallationError(
            f"torch cannot be imported: {type(error).__name__}: {what}", "`dgemma doctor` says what is broken here"
        ) from None
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


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
