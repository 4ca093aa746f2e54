"""Single keys from the terminal, by name; Ctrl-C stays what it is.

They come from stdin or, where that is no terminal, from the one that this process belongs to: a prompt may come through a
pipe, and stdout and stderr may be open for writing alone.
"""

import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import IO, TYPE_CHECKING, TextIO

from dgemma_local.ui.pause import foreground, modes

if TYPE_CHECKING:
    from prompt_toolkit.input.base import Input
    from prompt_toolkit.key_binding import KeyPress

# Seconds after which an escape that nothing follows was the key: over a slow line the rest of a sequence comes later.
ESCAPE = 0.3
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


class Gone(KeyboardInterrupt):
    """The terminal has: no key will come any more."""


class Keys:
    """A context manager; inside it the terminal neither echoes keys nor waits for the end of a line."""

    @classmethod
    def open(cls) -> "Keys | None":
        """None where there is no terminal to read keys from."""
        source = _terminal()
        if source is None:
            return None
        from prompt_toolkit.input import create_input

        return cls(create_input(source), None if source in (sys.stdin, sys.stdout, sys.stderr) else source)

    def __init__(self, source: "Input", opened: TextIO | None = None) -> None:
        """opened: what `source` reads, to be closed when it is left."""
        self._source, self._opened = source, opened
        self._waiting: deque[str] = deque()
        self._came = 0.0  # when something last did, on the monotonic clock
        self._left = ExitStack()  # what leaving undoes

    def __enter__(self) -> "Keys":
        with ExitStack() as entered:
            if self._opened is not None:
                entered.enter_context(self._opened)
            if sys.platform == "win32":
                entered.enter_context(self._source.raw_mode())
            else:
                import termios

                entered.enter_context(modes(self._source.fileno(), termios.ECHO | termios.ICANON, *paste_marks()))
            self._left = entered.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.close()

    def read(self, seconds: float) -> str | None:
        """The next key by its name, or the character it types; None when none came in time.

        Pastes and sequences without a name here are dropped. Raises Gone when the terminal has gone.
        """
        if not self._waiting:
            presses: Sequence[KeyPress] = ()
            if self._ready(seconds):
                presses = self._source.read_keys()
                self._came = time.monotonic()
            elif time.monotonic() - self._came >= ESCAPE:
                presses = self._source.flush_keys()
            self._waiting += filter(None, map(self._name, presses))
            if self._source.closed:
                raise Gone
        return self._waiting.popleft() if self._waiting else None

    def _ready(self, seconds: float) -> bool:
        if sys.platform == "win32":
            from prompt_toolkit.eventloop.win32 import wait_for_handles

            handle = self._source.handle  # type: ignore[attr-defined]  # Win32Input's
            return wait_for_handles([handle], int(1000 * seconds)) is not None
        else:
            terminal = self._source.fileno()
            if not foreground(terminal):  # what is typed is for another
                time.sleep(seconds)
                return False
            if not select.select([terminal], [], [], seconds)[0]:
                return False
            # Ctrl-Z may have come meanwhile, and a shell have read what was there: to read it, too, would wait for more.
            return foreground(terminal) and bool(select.select([terminal], [], [], 0)[0])

    def _name(self, press: "KeyPress") -> str | None:
        key = str(getattr(press.key, "value", press.key))
        if key == "c-c":  # of a console that has no signals; elsewhere it never gets here
            signal.raise_signal(signal.SIGINT)
        if key in NAMES:
            return NAMES[key]
        return key if len(key) == 1 and key.isprintable() else None


def _terminal() -> TextIO | None:
    """Where keys come from. None where none of stdin, stdout and stderr is a terminal, or none can be read."""
    streams = [stream for stream in (sys.stdin, sys.stdout, sys.stderr) if stream is not None and stream.isatty()]
    if not streams or streams[0] is sys.stdin or sys.platform == "win32":
        return streams[0] if streams else None
    import fcntl

    with suppress(OSError):  # it belongs to none
        return open(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY), encoding="utf-8")  # noqa: PTH123 - the run's
    for stream in streams:
        if fcntl.fcntl(stream.fileno(), fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY:
            return stream
    return None


def paste_marks() -> tuple[bytes, bytes]:
    """What lets the terminal say where a pasted text begins and ends, and what ends that."""
    return (b"", b"") if os.environ.get("TERM", "") in ("dumb", "unknown") else (b"\x1b[?2004h", b"\x1b[?2004l")


@contextmanager
def hushed(stream: IO[str]) -> Iterator[None]:
    """What is typed meanwhile is not echoed, and waits for whoever reads next: an echo would push a frame off its place."""
    with ExitStack() as left:
        if sys.platform != "win32" and stream.isatty():
            import termios

            with suppress(OSError, ValueError):  # it has no file descriptor
                left.enter_context(modes(stream.fileno(), termios.ECHO))
        yield
