"""A console that measures the stream it draws on, and text made safe to draw."""

import os
import sys
from contextlib import suppress
from typing import IO, TextIO

from rich.console import Console, ConsoleDimensions
from rich.text import Text

# C0 but newline and tab, DEL, C1: a model may write them, and a terminal would obey. What turns the order of the text
# around it, and tags, which say something that nobody sees.
_CONTROL = dict.fromkeys(
    {*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xE0000, 0xE0080)} - {9, 10},
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
        try:
            self.print(Text(printable(text), style=style, end=""), end=end, soft_wrap=True)
        except OSError:
            silence(self.file)


def silence(stream: IO[str]) -> None:
    """Nothing more can be written to it; the interpreter's own flush at exit must not find that out again."""
    with suppress(OSError, ValueError):  # ValueError: it has no file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def stderr() -> Terminal:
    """Everything but the answer goes here."""
    return Terminal(sys.stderr)
