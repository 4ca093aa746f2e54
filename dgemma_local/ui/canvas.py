"""A canvas as rows of text: pure; terminals, pictures and bitmaps share it.

Rows follow the model's best guess: a random token is fitted into the cells that the guess at its position takes, so that
noise does not shake what is settled behind it.
"""

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from functools import lru_cache

from rich.cells import cell_len

from dgemma_local.states import State
from dgemma_local.ui.palette import Ink

CONTROL = "·"
NEWLINE = "↵"
END = "■"
_TAB = "    "


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How tokens look."""

    text: Callable[[int], str]  # what a token reads as; its name, for a control token
    control: Callable[[int], bool]  # it steers instead of being read
    ends: Set[int]  # tokens that end an answer

    def glyph(self, token: int) -> str:
        """What is drawn: control tokens are a small mark, not their names."""
        if token in self.ends:
            return END
        return CONTROL if self.control(token) else self.text(token)


Run = tuple[str, Ink]
Row = list[Run]

_BREAKS = (State.FROZEN, State.FRESH, State.REPLACED, State.GUESSED, State.PINNED, State.TEXT)


def rows(tokens: Iterable[Run], width: int) -> list[Row]:
    """Text and ink, in order -> rows of at most `width` cells, neighbours of one ink joined; at least one row.

    A newline breaks the row where its token is settled; in noise it would shake everything below it, and is drawn as ↵.
    Indentation stays, and rows break between characters, so that a column of a grid stays a column.
    """
    table: list[Row] = [[]]
    column = 0
    text, ink = "", Ink(State.TEXT)

    def settle() -> None:
        nonlocal text
        if text:
            table[-1].append((text, ink))
        text = ""

    for token, kind in tokens:
        breaks = kind.kind in _BREAKS
        if kind is not ink:
            settle()
            ink = kind
        for sign, cells in signs(token):
            if sign == "\n" and breaks:
                settle()
                table.append([])
                column = 0
                continue
            if sign == "\n":
                sign = NEWLINE
            if cells > width:
                sign, cells = CONTROL, 1
            if column + cells > width:
                settle()
                table.append([])
                column = 0
            text += sign
            column += cells
    settle()
    return table


@lru_cache(maxsize=4096)
def signs(text: str) -> tuple[tuple[str, int], ...]:
    """Characters that can be drawn and their cells; a newline counts as the one cell of its sign.

    Invisible ones become CONTROL, and variation selectors go: they would change the width of a cell already drawn.
    """
    found = []
    for sign in text.replace("\r\n", "\n").replace("\t", _TAB):
        if sign == "\n":
            found.append((sign, 1))
        elif sign.isspace() and sign != " ":
            found.append((" " * max(1, cell_len(sign)), max(1, cell_len(sign))))
        elif not sign.isprintable():
            found.append((CONTROL, 1))
        elif not "\ufe00" <= sign <= "\ufe0f":
            found.append((sign, cell_len(sign)))
    return tuple(found)
