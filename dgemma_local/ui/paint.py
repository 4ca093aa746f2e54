"""Rows of inked text on a terminal, drawn over those that stand there.

The cursor rests in the first column of the frame's first row. There a resize leaves it, whatever the terminal does to the
lines below: rewrap, cut or keep them. Clearing from the cursor down then takes the old frame away, and nothing above it.
"""

import os
import sys
from collections.abc import Sequence
from functools import cache
from types import TracebackType
from typing import IO, Literal

from rich.cells import cell_len, set_cell_size

from dgemma_local.ui.canvas import Row
from dgemma_local.ui.palette import Colour, Look, Theme, look
from dgemma_local.ui.terminal import Terminal

# "none": no escape codes. "mono": attributes without colour. Else so many colours.
Depth = Literal["none", "mono", "16", "256", "true"]

# Inside these the terminal shows nothing of it, where it knows them; others leave unknown modes alone.
_TOGETHER, _SHOWN = "\x1b[?2026h", "\x1b[?2026l"
# A sign that the terminal takes for wider than we do must not push a row into the next one.
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
_HIDE, _SHOW = "\x1b[?25l", "\x1b[?25h"
_REST, _BELOW, _RESET = "\x1b[K", "\x1b[J", "\x1b[0m"

_STRICT = dict.fromkeys({*range(32), *range(127, 160)}, "\N{REPLACEMENT CHARACTER}")  # a row holds no newline, no tab
_CUBE = (0, 95, 135, 175, 215, 255)  # levels of the 6 x 6 x 6 colours from 16 on, as xterm has them


def depth(terminal: Terminal) -> Depth:
    """What `terminal` can show, by its environment: NO_COLOR, COLORTERM and TERM, in this order."""
    name = os.environ.get("TERM", "").lower()
    if not terminal.is_terminal or terminal.is_dumb_terminal:
        return "none"
    if os.environ.get("NO_COLOR"):
        return "mono"
    if os.environ.get("COLORTERM", "").lower() in ("truecolor", "24bit"):
        return "true"
    return "256" if name.endswith(("256color", "256colour")) else "16"


def theme(wish: str) -> Theme:
    """The theme that is wished for; "auto": by the background that COLORFGBG names, else dark."""
    if wish == "light":
        return "light"
    ground = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    return "light" if wish == "auto" and ground in ("7", *map(str, range(9, 16))) else "dark"


@cache
def sgr(style: Look, depth: Depth) -> str:
    """The escape code that draws a look from whatever was set before; empty at depth "none"."""
    if depth == "none":
        return ""
    coloured = depth in ("256", "true") and style.ansi256 is not None  # None: the terminal's own
    marks = {"1": style.bold, "2": style.dim and not coloured, "4": style.underline, "7": style.reverse}
    codes = ["0", *(code for code, on in marks.items() if on)]
    if depth == "16" and style.ansi16 != 39:
        codes.append(str(style.ansi16))
    if coloured:
        codes.append(f"38;5;{style.ansi256}" if depth == "256" else _true(38, style.colour))
    if depth in ("256", "true") and style.ground is not None:
        codes.append(f"48;5;{_nearest(style.ground)}" if depth == "256" else _true(48, style.ground))
    return f"\x1b[{';'.join(codes)}m"


def _true(code: int, colour: Colour) -> str:
    return f"{code};2;{colour[0]};{colour[1]};{colour[2]}"


def _nearest(colour: Colour) -> int:
    """The index of the cube's colour that is nearest, level by level."""
    red, green, blue = (min(range(6), key=lambda i: abs(_CUBE[i] - level)) for level in colour)
    return 16 + 36 * red + 6 * green + blue


class Painter:
    """A context manager; leaving it leaves no trace of the frame, and gives the cursor back."""

    def __init__(self, terminal: Terminal, theme: Theme) -> None:
        self._terminal, self._theme, self._depth = terminal, theme, depth(terminal)
        self._standing: list[Row] = []  # rows on the screen
        self._size = (0, 0)  # of the terminal they were drawn on

    def __enter__(self) -> "Painter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def paint(self, rows: Sequence[Row]) -> None:
        """Draws `rows` over the frame before, in one write, of what has changed alone. The rest is cut off.

        The first frame begins in the cursor's row, which must be empty.
        """
        self.write(self.painted(rows))

    def painted(self, rows: Sequence[Row]) -> str:
        """What `paint` writes; to be written, for it counts as standing. Empty where nothing has changed."""
        width, height = self._terminal.size
        new = [_cut(row, width) for row in rows[:height]]
        old, size = self._standing, (width, height)
        start = ""
        if not old or size != self._size:
            start, old = f"{_HIDE}\r{_RESET}{_BELOW}", []
        self._standing, self._size = new, size
        changed = [i for i in range(max(len(new), len(old))) if i >= len(old) or i >= len(new) or new[i] != old[i]]
        if not changed:
            return ""
        return f"{_TOGETHER}{_NO_WRAP}{start}{self._lines(new, changed, width)}{_WRAP}{_SHOWN}"

    @property
    def file(self) -> IO[str]:
        """What it draws on."""
        return self._terminal.file

    def write(self, text: str) -> None:
        """What `painted` returned, to the terminal; past Python's buffer, whose lock a held terminal would keep."""
        if not text:
            return
        self.file.flush()
        fd = _descriptor(self.file)
        if fd is None:
            self.file.write(text)
            self.file.flush()
            return
        rest = text.encode(self._terminal.encoding, "replace")
        while rest:
            rest = rest[os.write(fd, rest) :]

    def clear(self) -> None:
        """Takes the frame away and shows the cursor, which stands where the frame began; nothing if there is none."""
        if self._standing:
            self._standing = []
            self.write(f"\r{_RESET}{_BELOW}{_SHOW}")

    def _lines(self, rows: Sequence[Row], changed: Sequence[int], width: int) -> str:
        """Goes down by newlines, which make room at the bottom, and back up to the first row."""
        parts = []
        at = 0
        for i in changed:
            parts += ["\r\n" * (i - at), self._line(rows[i] if i < len(rows) else [], width)]
            at = i
        return "".join(parts) + "\r" + (f"\x1b[{at}A" if at else "")

    def _line(self, row: Row, width: int) -> str:
        text = "".join(sgr(look(ink, self._theme), self._depth) + text for text, ink in row)
        if sum(cell_len(text) for text, _ in row) < width:
            return f"{text}{_RESET}{_REST}"
        return f"{_REST}{text}{_RESET}"  # behind the last column, erasing takes the sign in it


def _descriptor(file: IO[str]) -> int | None:
    """None where a console takes characters, and no bytes."""
    if sys.platform == "win32":
        return None
    try:
        return file.fileno()
    except (OSError, ValueError):
        return None


def _cut(row: Row, width: int) -> Row:
    """At most `width` cells of a row, and no control character."""
    cut: Row = []
    for text, ink in row:
        text = text.translate(_STRICT)
        cells = cell_len(text)
        if cells > width:
            cut.append((set_cell_size(text, width), ink))
            break
        cut.append((text, ink))
        width -= cells
    return cut
