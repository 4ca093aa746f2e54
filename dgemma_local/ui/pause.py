"""Ctrl-Z while a frame stands."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO


@contextmanager
def pausable(stream: IO[str], clear: Callable[[], None]) -> Iterator[None]:
    """Before the process stops, `clear` takes the frame away; when it goes on, the terminal's modes are as they were.

    The shell and whatever else runs meanwhile move the cursor, so that the next frame must be a new one.
    """
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield
        return
    import termios

    def stop(number: int, _: FrameType | None) -> None:
        clear()
        modes = None
        with suppress(OSError, ValueError, termios.error):  # no terminal
            modes = termios.tcgetattr(stream.fileno())
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # here it stops
        signal.signal(number, stop)
        if modes is not None:
            with suppress(OSError, termios.error):
                termios.tcsetattr(stream.fileno(), termios.TCSADRAIN, modes)

    before = signal.getsignal(signal.SIGTSTP)
    if before is not signal.SIG_DFL:  # ignored by a shell without job control, and meant so
        yield
        return
    signal.signal(signal.SIGTSTP, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)
