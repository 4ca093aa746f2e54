"""What is asked of a terminal, and giving it back: to whoever has it while this process is stopped or in the background.

Everything that changes a terminal says here how to leave it and how to take it again:

    pausable(leave, enter)   left before Ctrl-Z stops the process, entered when it goes on
    modes(fd, off)           the same for modes of the terminal itself
    given_back()             left while another program has the terminal
    front(stream)            whether the terminal is ours; all is entered then, for `fg` may follow `bg`
"""

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType
from typing import IO, Any

from dgemma_local.interrupts import Flag

_held: list[tuple[Callable[[], None], Callable[[], None]]] = []  # how to leave and to enter, in the order they came
_lent = Flag()  # while `given_back`


@contextmanager
def pausable(leave: Callable[[], None], enter: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Before the process stops, `leave` is called; when it goes on, `enter`. Both may find nothing to do."""
    pair = (leave, enter)
    with nullcontext() if _held else _handled():
        _held.append(pair)
        try:
            yield
        finally:
            _held.remove(pair)


@contextmanager
def given_back() -> Iterator[None]:
    """The terminal as it was before all that holds it now; whoever has it may be stopped with us, and goes on with it."""
    if _lent.is_set():
        yield
        return
    for leave, _ in reversed(_held):
        leave()
    _lent.set()
    try:
        yield
    finally:
        _lent.clear()
        for _, enter in _held:
            enter()


def front(stream: IO[str]) -> bool:
    """False while another has the terminal. A stream that is none is always ours."""
    with suppress(OSError, ValueError):  # ValueError: it has no file descriptor
        if _lent.is_set() or not foreground(stream.fileno()):
            return False
    for _, enter in _held:
        enter()
    return True


def foreground(fd: int) -> bool:
    """Whether this process may set modes of a terminal and read its keys: one in the background would be stopped for it."""
    if sys.platform == "win32":
        return True
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:  # another session's, in which nobody can put us into the background
        return True


@contextmanager
def modes(fd: int, off: int, on: bytes = b"", back: bytes = b"", *, untouched: bool = False) -> Iterator[None]:
    """Turns local modes (`off`: flags of termios) of a terminal off; the signals of Ctrl-C and Ctrl-Z stay.

    on, back: written after that, and after it is undone. untouched: what is typed comes as it is, Enter as a carriage
    return, and none of it is dropped for a signal. Nothing is done that a terminal refuses, or while it is another's.
    """
    kept = _Modes(os.dup(fd), off, on, back, untouched=untouched)  # a stream may be silenced meanwhile
    try:
        with pausable(kept.leave, kept.enter):
            kept.enter()
            yield
    finally:
        kept.leave()
        os.close(kept.fd)


class _Modes:
    """What it takes it gives back, and no more: whoever came before may leave before, where `fg` let them in late."""

    def __init__(self, fd: int, off: int, on: bytes, back: bytes, *, untouched: bool = False) -> None:
        self.fd, self._off, self._on, self._back, self._untouched = fd, off, on, back, untouched
        self._before: list[Any] | None = None  # while it is entered

    def enter(self) -> None:
        import termios

        if self._before is not None or not foreground(self.fd):
            return
        with suppress(OSError, termios.error):
            self._before = termios.tcgetattr(self.fd)
            now = termios.tcgetattr(self.fd)
            now[3] &= ~self._off
            if self._untouched:
                now[0] &= ~termios.ICRNL
                now[3] |= termios.NOFLSH
            if self._off & termios.ICANON:
                now[6][termios.VMIN], now[6][termios.VTIME] = 1, 0
            termios.tcsetattr(self.fd, termios.TCSANOW, now)  # not TCSADRAIN: the terminal may be held
            self._say(self._on)

    def leave(self) -> None:
        import termios

        before, self._before = self._before, None
        if before is not None and foreground(self.fd):
            with suppress(OSError, termios.error):
                now = termios.tcgetattr(self.fd)
                now[3] |= before[3] & self._off
                if self._untouched:
                    now[0] |= before[0] & termios.ICRNL
                    now[3] &= before[3] | ~termios.NOFLSH
                if before[3] & self._off & termios.ICANON:
                    now[6][termios.VMIN], now[6][termios.VTIME] = before[6][termios.VMIN], before[6][termios.VTIME]
                termios.tcsetattr(self.fd, termios.TCSANOW, now)
                self._say(self._back)

    def _say(self, sequence: bytes) -> None:
        if sequence and select.select([], [self.fd], [], 0)[1]:  # else it is held
            os.write(self.fd, sequence)


@contextmanager
def _handled() -> Iterator[None]:
    """SIGTSTP is ours meanwhile, unless a shell without job control ignores it, and means it."""
    main = threading.current_thread() is threading.main_thread()
    if sys.platform == "win32" or not main or signal.getsignal(signal.SIGTSTP) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTSTP, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)


def _stop(number: int, _: FrameType | None) -> None:
    with given_back():
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # here it stops
        signal.signal(number, _stop)
