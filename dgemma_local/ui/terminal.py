"""A console that measures the stream it draws on, and text made safe to draw."""

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, TextIO, cast

from rich.console import Console, ConsoleDimensions
from rich.text import Text

from dgemma_local.ui.pause import foreground

LEAVING = 0.5  # seconds that whoever leaves in a hurry waits for a terminal

# C0 but newline and tab, DEL, C1: a model may write them, and a terminal would obey. What turns the order of the text
# around it, and tags, which say something that nobody sees.
_TURNING = {0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)}
_CONTROL = dict.fromkeys(
    {*range(32), *range(127, 160), *_TURNING, *range(0xE0000, 0xE0080)} - {9, 10},
    "\N{REPLACEMENT CHARACTER}",
)


def printable(text: str) -> str:
    """`text` without control characters, � for each."""
    return text.translate(_CONTROL)


class Terminal(Console):
    """Colours and escape codes only where `file` is a terminal, whatever FORCE_COLOR says; never with TERM=dumb."""

    def __init__(self, file: TextIO) -> None:
        super().__init__(
            file=file, force_terminal=file.isatty(), force_jupyter=False, highlight=False, markup=False, emoji=False
        )

    @property
    def size(self) -> ConsoleDimensions:
        """Of `file`'s own terminal: rich asks stdin first, which may be another one, or a size exported long ago."""
        try:
            columns, lines = os.get_terminal_size(self.file.fileno())
        except (OSError, ValueError):
            columns, lines = 0, 0
        return ConsoleDimensions(columns or 80, lines or 24)  # a terminal without a size reports 0

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        raise AttributeError("the size is the terminal's")

    def on_broken_pipe(self) -> None:
        """To the caller, who knows the exit code; rich would leave with 1."""
        raise  # rich calls this while it handles the BrokenPipeError

    @property
    def redraws(self) -> bool:
        """Whether a frame can be drawn over another here."""
        return self.writes and not self.is_dumb_terminal

    @property
    def writes(self) -> bool:
        """Whether a frame can be printed here, one under another: a terminal that knows our signs."""
        return self.is_terminal and not self.legacy_windows and self.encoding.startswith("utf")

    def say(self, text: str, *, style: str = "", end: str = "\n") -> None:
        """`text` as it is: not wrapped, not interpreted. Where it cannot be written it is lost, and no more than it."""
        with spared(self.file):
            self.print(Text(printable(text), style=style, end=""), end=end, soft_wrap=True)


def silence(stream: IO[str]) -> None:
    """Nothing more can be written to it; the interpreter's own flush at exit must not find that out again."""
    with suppress(OSError, ValueError):  # ValueError: it has no file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def spared(stream: IO[str]) -> Iterator[None]:
    """What is written to it is for the eye alone: where it has gone, the run goes on without."""
    try:
        yield
    except OSError:
        silence(stream)


class _Spared:
    """A stream whose loss is no error."""

    def __init__(self, file: TextIO) -> None:
        self._file, self.isatty = file, file.isatty

    def write(self, text: str) -> None:
        with spared(self._file):
            self._file.write(text)

    def flush(self) -> None:
        with spared(self._file):
            self._file.flush()


def for_the_eye(file: TextIO) -> TextIO:
    """`file`, of which nothing is missed where it has gone: what goes to it goes elsewhere, too."""
    return cast(TextIO, _Spared(file))  # all that a page needs


@contextmanager
def unheld(*streams: IO[str]) -> Iterator[None]:
    """Whoever leaves by an exception does not wait for a terminal that takes nothing.

    One that Ctrl-S holds is let go; one that nobody reads is silenced.
    """
    try:
        yield
    except BaseException:
        for stream in streams:
            with suppress(OSError, ValueError):  # ValueError: it has no file descriptor
                if stream.isatty() and not _takes(stream.fileno()):
                    silence(stream)
        raise


def _takes(fd: int) -> bool:
    if sys.platform == "win32":
        return True
    if not select.select([], [fd], [], 0)[1] and foreground(fd):
        _let_go(fd)
    return bool(select.select([], [fd], [], LEAVING)[1])


def _let_go(fd: int) -> None:
    """Terminals write on when their flow control ends."""
    import termios

    with suppress(termios.error):
        before = termios.tcgetattr(fd)
        termios.tcsetattr(fd, termios.TCSANOW, [before[0] & ~termios.IXON, *before[1:]])
        termios.tcsetattr(fd, termios.TCSANOW, before)


def stderr() -> Terminal:
    """Everything but the answer goes here."""
    return Terminal(sys.stderr)
