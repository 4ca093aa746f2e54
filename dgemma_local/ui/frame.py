"""What a moment of a run looks like, as rows of inked text: pure, and always of the height that was asked for.

frame(seen, sight, width, height) -> rows      numbers, the canvas, a legend
marked(rows) -> lines                          the same without colour or weight, a mark under what has a state
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len

from dgemma_local.states import Draft, Seen, State
from dgemma_local.ui.canvas import Row, Run, Vocabulary, leftward, rows, runs
from dgemma_local.ui.grid import CELL, FEWEST, USUAL, cells_a_row, grid, strip
from dgemma_local.ui.palette import MARKS, Chrome, inked
from dgemma_local.ui.status import legend, legend_height, status

View = Literal["text", "grid", "both"]

SIDE_BY_SIDE = 100  # columns from which text and grid share rows
_BROAD = 160  # columns from which the grid beside the text has its usual width
_FEWEST_ROWS = 8
_AROUND = 5  # rows of numbers and legend
_POSITIONS = 8  # of a canvas that get a row of their own: text with short lines still fits
BETWEEN: Run = (" │ ", inked(Chrome.LEGEND))
_CHANGED = frozenset({State.FRESH, State.REPLACED, State.THAWED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """How a run is looked at."""

    label: str  # of the model
    vocabulary: Vocabulary
    view: View = "text"
    draft: Draft = "canvas"


@dataclass(frozen=True, slots=True)
class Frame:
    """`rows`: as many as asked for. `top`: the first row of the canvas in view."""

    rows: list[Row]
    top: int = 0


def frame(seen: Seen, sight: Sight, width: int, height: int, *, tail: str = "", top: int = 0) -> Frame:
    """Exactly `height` rows of at most `width` cells.

    tail: earlier text on the line that the canvas goes on with. top: that of the frame before this one.
    """
    head = status(seen, sight.label, width, height)
    pinned = State.PINNED in seen.states
    foot = legend(width, legend_height(width, height), grid=sight.view != "text", pinned=pinned)
    body, top = _body(seen, sight, width, height - len(head) - len(foot), tail, top)
    return Frame([*head, *body, *foot][:height], top)


def _body(seen: Seen, sight: Sight, width: int, height: int, tail: str, top: int) -> tuple[list[Row], int]:
    """Exactly `height` rows, and the first in view of the text, or of the grid where there is no text."""
    if height <= 0:
        return [], top
    if sight.view == "grid":
        return _heat(seen, width, height, top)
    text = _text(seen, sight, tail)
    if sight.view == "text":
        return _written(text, width, height, top, _picked(seen))
    # Where a terminal reorders a row for its right-to-left text, it would move the cells beside it, too.
    if width >= SIDE_BY_SIDE and not any(leftward(part) for part, _ in text):
        beside = grid_width(width)
        room = width - beside - cell_len(BETWEEN[0])
        left, top = _written(text, room, height, top, _picked(seen))
        right, _ = _heat(seen, beside, height, 0)
        return [_beside(*pair, room) for pair in zip(left, right, strict=True)], top
    share = height // 2
    if seen.step is not None:
        length = len(seen.states)
        share = min(share, -(-length // cells_a_row(length, width, share)))
    above, top = _written(text, width, height - share, top, _picked(seen))
    below, _ = _heat(seen, width, share, 0)
    return above + below, top


def grid_width(width: int) -> int:
    """Cells of the grid that stands beside the text, of so many in all."""
    return CELL * (USUAL if width >= _BROAD else FEWEST)


def usual(length: int) -> int:
    """Rows of the frame of a canvas of so many positions, where the terminal has them."""
    return max(_FEWEST_ROWS, _AROUND + length // _POSITIONS)


def _beside(left: Row, right: Row, width: int) -> Row:
    rest = width - sum(cell_len(text) for text, _ in left)
    return [*left, (" " * rest, BETWEEN[1]), BETWEEN, *right] if rest else [*left, BETWEEN, *right]


def _text(seen: Seen, sight: Sight, tail: str) -> list[Run]:
    return [(tail, inked(State.TEXT)), *runs(seen, sight.vocabulary, sight.draft)]


def _written(text: list[Run], width: int, height: int, top: int, picked: bool) -> tuple[list[Row], int]:
    """The unfinished line, of which the last third of the room is kept, and the canvas going on in it."""
    skipped = max(0, len(rows(text[:1], width)) - max(1, height // 3))
    return _window(rows(text, width)[skipped:], width, height, top, picked)


def _heat(seen: Seen, width: int, height: int, top: int) -> tuple[list[Row], int]:
    cells = grid(seen, width, height)
    return _window(cells + strip(seen, width, height - len(cells)), width, height, top, _picked(seen))


def _window(table: list[Row], width: int, height: int, top: int, picked: bool) -> tuple[list[Row], int]:
    """Exactly `height` rows; where there are more, those that change, and a last one that says how many are hidden.

    It stays where it is as long as that shows at least half of the changing rows that another place would show.
    """
    if height <= 0:
        return [], top
    if len(table) <= height:
        return table + [[] for _ in range(height - len(table))], 0
    room = max(1, height - 1)
    last = len(table) - room
    top = min(max(0, top), last)
    changes = [0]  # before each row
    for row in table:
        changes.append(changes[-1] + any(ink.kind in _CHANGED for _, ink in row))
    seen = [changes[first + room] - changes[first] for first in range(last + 1)]
    most = max(seen)
    if 2 * seen[top] < most or (seen[top] < most == changes[-1]):
        top = min((first for first in range(last + 1) if seen[first] == most), key=lambda first: abs(first - top))
    if picked:
        held = [i for i, row in enumerate(table) if any(ink.kind is State.PINNED for _, ink in row)]
        top = min(max(top, held[-1] - room + 1), held[-1], last) if held else top  # what the reader holds is in view
    shown = table[top : top + room]
    return ([*shown, _hidden(top, last - top, width)] if height > 1 else shown), top


def _picked(seen: Seen) -> bool:
    """Whether a reader holds a position; what the run itself has pinned moves nothing into view."""
    given = () if seen.step is None else seen.step.pinned
    return any(state is State.PINNED and i not in given for i, state in enumerate(seen.states))


def _hidden(above: int, below: int, width: int) -> Row:
    said = (f"↑ {above} more rows above · ↓ {below} below", f"↑{above} ↓{below}", "↕")
    return [(next(text for text in said if len(text) <= width), inked(Chrome.LEGEND))]


def marked(rows: Iterable[Row]) -> list[str]:
    """Plain text: each row, and below it the marks of its states, where it has any.

    Cells of the grid carry theirs already. Of several blank lines one is left.
    """
    lines: list[str] = []
    for row in rows:
        marks = ""
        for i, (text, ink) in enumerate(row):
            carried = i + 1 < len(row) and row[i + 1][1].kind is Chrome.HEAT
            mark = MARKS[ink.kind] if isinstance(ink.kind, State) and not carried else " "
            marks += mark * cell_len(text)
        line = "".join(text for text, _ in row).rstrip()
        if line or (lines and lines[-1]):
            lines.append(line)
        if marks.strip():
            lines.append(marks.rstrip())
    return lines
