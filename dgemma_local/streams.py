"""What becomes of the process's output: streams that are closed or full, and being ended, each with its exit code.

Of both front ends: nothing is imported from outside the standard library, for machines without typer and rich.
"""

import atexit
import errno
import os
import signal
import sys
from contextlib import suppress
from io import RawIOBase, TextIOWrapper
from typing import NoReturn

from dgemma_local.errors import BROKEN_PIPE, DgemmaError
from dgemma_local.interrupts import ENDINGS, leave_early

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
_handed: set[int] = set()  # signals that `begun` took over: those of a console script, of no host of this module


def prepare() -> None:
    """Before anything is written: exits with BROKEN_PIPE where stdout is closed. SIGTERM and SIGHUP exit with 128 more."""
    if sys.stderr is None:  # closed by the caller, as is stdout below
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - for the life of the process
    if sys.stdout is None:
        sys.exit(BROKEN_PIPE)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
        with suppress(
            OSError, ValueError
        ):  # a pipe left non-blocking by its other owner would lose what it cannot hold
            os.set_blocking(stream.fileno(), True)
    for number in ENDINGS:
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP, and means it
            signal.signal(number, _leave)


class Ended(SystemExit):
    """By a signal that asks to leave; its code is 128 more than the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.exit_code = 128 + number


def _leave(number: int, _: object) -> NoReturn:
    for each in ENDINGS:  # another one would break off what gives the terminal back
        signal.signal(each, signal.SIG_IGN)
    raise Ended(number)


def begun() -> None:
    """From here on Ctrl-C is Python's exception, and what else asks to leave is `Ended`."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), *((each, _leave) for each in ENDINGS)):
        if signal.getsignal(number) is leave_early:
            signal.signal(number, handler)
            _handed.add(number)


def ending() -> None:
    """Once the end has begun: the next signal of a kind does not break off the last word, one more ends the process."""
    for number in _handed:
        signal.signal(number, _pass)


def release() -> None:
    """Once all is said: a signal does not change the exit code any more.

    A second one ends the process where a thread still holds it; behind that nothing heeds them.
    """
    atexit.register(_ignore)
    for number in (signal.SIGINT, *ENDINGS):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _pass)


def _pass(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_DFL)


def _ignore() -> None:
    """The interpreter's own end would give every handler back to the system, which ends the process by a signal."""
    for number in (signal.SIGINT, *ENDINGS):
        signal.signal(number, signal.SIG_IGN)


def say(text: str) -> None:
    """To stderr, if that can be written: the exit code says the same."""
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except OSError:
        abandon()


def ours(error: OSError) -> bool:
    """Whether it is stdout or stderr that could not be written, and no other file."""
    if error.filename is not None or not (isinstance(error, BrokenPipeError) or error.errno in UNWRITABLE):
        return False
    for stream in (sys.stdout, sys.stderr):
        if isinstance(getattr(stream, "buffer", None), RawIOBase):  # python -u: what failed is not kept
            return True
        try:
            stream.flush()  # what could not be written is still there
        except OSError:
            return True
    return False


def lost(error: OSError) -> int:
    """The exit code where stdout could not be written, once that is said. Raises `error` where it is another one."""
    if not ours(error):
        raise error
    abandon()
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    say(f"error: the output cannot be written: {error.strerror}\n  fix: make room, or write elsewhere")
    return DgemmaError.exit_code


def abandon() -> None:
    """Silences what can no longer be written; the interpreter's own flush at exit must not find that out again."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError, ValueError):  # ValueError: it has no file descriptor
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
