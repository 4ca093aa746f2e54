"""A canvas as rows of text: what each position is, and how its token is drawn. Pure; the live view and pictures share it.

What is drawn is what the next step reads: accepted tokens, fresh random ones elsewhere; after the last step, the
committed tokens.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from rich.cells import cell_len

from dgemma_local.events import StepDone

Glyph = Callable[[int], str]  # the text of a token; CONTROL for one that is not for reading

CONTROL = "·"
NEWLINE = "↵"
_TAB = "    "


class State(Enum):
    """What a step did to a position."""

    FROZEN = "frozen"  # accepted, as at the step before
    FRESH = "newly frozen"
    THAWED = "thawed"  # accepted at the step before, noise again
    NOISE = "noise"
    GUESSED = "guessed"  # committed by the last step without being accepted
    PAST = "past the end"  # after the end token of the answer
    TEXT = "text"  # of earlier canvases


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How tokens look."""

    glyph: Glyph
    ends: Set[int]  # tokens that end an answer


Run = tuple[str, State]


def states(step: StepDone, before: Sequence[bool], ends: Set[int]) -> list[State]:
    """One a position. before: accepted at the previous step of this canvas; empty at the first."""
    found = []
    past = False
    for i, now in enumerate(step.accepted):
        was = bool(before) and before[i]
        if past:
            state = State.PAST
        elif now:
            state = State.FROZEN if was else State.FRESH
        elif step.done:
            state = State.GUESSED
        else:
            state = State.THAWED if was else State.NOISE
        past = past or (step.next[i] in ends and (now or step.done))
        found.append(state)
    return found


def rows(tokens: Iterable[Run], width: int) -> list[list[Run]]:
    """Text and state, in order -> rows of at most `width` cells, neighbours of one state joined; at least one row.

    A newline breaks the row where its token is settled; in noise it would shake everything below it, and is drawn as ↵.
    Indentation stays, and rows break between characters, so that a column of a grid stays a column.
    """
    table: list[list[Run]] = [[]]
    column = 0
    text, state = "", State.TEXT

    def settle() -> None:
        nonlocal text
        if text:
            table[-1].append((text, state))
        text = ""

    for token, kind in tokens:
        breaks = kind in (State.FROZEN, State.FRESH, State.GUESSED, State.TEXT)
        if kind is not state:
            settle()
            state = kind
        for sign, cells in _signs(token):
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
def _signs(text: str) -> tuple[tuple[str, int], ...]:
    """Characters that can be drawn and their cells; a newline counts as the one cell of its sign.

    Invisible ones become CONTROL, and variation selectors go: they would change the width of a cell already drawn.
    """
    signs = []
    for sign in text.replace("\r\n", "\n").replace("\t", _TAB):
        if sign == "\n":
            signs.append((sign, 1))
        elif sign.isspace() and sign != " ":
            signs.append((" " * max(1, cell_len(sign)), max(1, cell_len(sign))))
        elif not sign.isprintable():
            signs.append((CONTROL, 1))
        elif not "\ufe00" <= sign <= "\ufe0f":
            signs.append((sign, cell_len(sign)))
    return tuple(signs)
