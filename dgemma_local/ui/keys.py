"""Single keys from the terminal, by name; Ctrl-C stays what it is.

The keys come from whichever of stdin, stdout and stderr is a terminal, so that a prompt may come through a pipe.
"""

import os
import select
import signal
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prompt_toolkit.input.base import Input
    from prompt_toolkit.key_binding import KeyPress

ESCAPE = 0.05  # seconds after which an escape that nothing follows was the key; sequences arrive in one piece
NAMES = {
    "left": "left",
    "right": "right",
    "up": "up",
    "down": "down",
    "home": "home",
    "end": "end",
    "pageup": "pageup",
    "pagedown": "pagedown",
    "escape": "escape",
    "c-i": "tab",
    "c-m": "enter",
    "c-j": "enter",
    "c-h": "backspace",
    " ": "space",
}
_PASTES, _NO_PASTES = b"\x1b[?2004h", b"\x1b[?2004l"  # the terminal says where a pasted text begins and ends


class Keys:
    """A context manager; inside it the terminal neither echoes keys nor waits for the end of a line."""

    @classmethod
    def open(cls) -> "Keys | None":
        """None where there is no terminal to read keys from."""
        if not any(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
            return None
        from prompt_toolkit.input import create_input

        return cls(create_input(always_prefer_tty=True))

    def __init__(self, source: "Input") -> None:
        self._source = source
        self._waiting: deque[str] = deque()
        self._left = ExitStack()  # what leaving undoes

    def __enter__(self) -> "Keys":
        with ExitStack() as entered:
            if sys.platform == "win32":
                entered.enter_context(self._source.raw_mode())
            else:
                import termios

                _without(self._source.fileno(), termios.ECHO | termios.ICANON, entered)
            if os.environ.get("TERM", "") not in ("dumb", "unknown"):
                _mark_pastes(self._source.fileno(), entered)
            self._left = entered.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.close()

    def read(self, seconds: float | None) -> str | None:
        """The next key by its name, or the character it types; None when none came in time. seconds: None waits on.

        Pastes and sequences without a name here are dropped. Raises KeyboardInterrupt when the terminal has gone.
        """
        if not self._waiting and self._ready(seconds):
            presses: Sequence[KeyPress] = self._source.read_keys()
            if not presses and not self._ready(ESCAPE):
                presses = self._source.flush_keys()
            self._waiting += filter(None, map(self._name, presses))
            if self._source.closed:
                raise KeyboardInterrupt
        return self._waiting.popleft() if self._waiting else None

    def _ready(self, seconds: float | None) -> bool:
        if sys.platform == "win32":
            from prompt_toolkit.eventloop.win32 import wait_for_handles

            handle = self._source.handle  # type: ignore[attr-defined]  # Win32Input's
            return wait_for_handles([handle], -1 if seconds is None else int(1000 * seconds)) is not None
        else:
            return bool(select.select([self._source.fileno()], [], [], seconds)[0])

    def _name(self, press: "KeyPress") -> str | None:
        key = str(getattr(press.key, "value", press.key))
        if key == "c-c":  # of a console that has no signals; elsewhere it never gets here
            signal.raise_signal(signal.SIGINT)
        if key in NAMES:
            return NAMES[key]
        return key if len(key) == 1 and key.isprintable() else None


@contextmanager
def hushed(stream: IO[str]) -> Iterator[None]:
    """What is typed meanwhile is not echoed, and waits for whoever reads next: an echo would push a frame off its place."""
    with ExitStack() as left:
        if sys.platform != "win32":
            import termios

            with suppress(OSError, ValueError, termios.error):  # no terminal, or not ours
                fd = stream.fileno()
                if os.tcgetpgrp(fd) == os.getpgrp():  # one in the background would be stopped for it
                    _without(fd, termios.ECHO, left)
        yield


def _without(fd: int, flags: int, entered: ExitStack) -> None:
    """Turns modes of a terminal off until `entered` is left; the signals of Ctrl-C and Ctrl-Z stay."""
    import termios

    before = termios.tcgetattr(fd)
    now: list[Any] = termios.tcgetattr(fd)
    now[3] &= ~flags
    if flags & termios.ICANON:
        now[6] = [*now[6]]
        now[6][termios.VMIN], now[6][termios.VTIME] = 1, 0
    entered.callback(termios.tcsetattr, fd, termios.TCSADRAIN, before)
    termios.tcsetattr(fd, termios.TCSADRAIN, now)


def _mark_pastes(fd: int, entered: ExitStack) -> None:
    def say(sequence: bytes) -> None:
        with suppress(OSError):  # a terminal that is open for reading alone marks none
            os.write(fd, sequence)

    say(_PASTES)
    entered.callback(say, _NO_PASTES)
