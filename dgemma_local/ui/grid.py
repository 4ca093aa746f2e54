"""A canvas as a heat map: what each position is, how sure the model is of it, and how that came about."""

from collections.abc import Sequence
from functools import lru_cache

from dgemma_local.states import Seen
from dgemma_local.ui.canvas import Row, Run
from dgemma_local.ui.palette import HEAT, MARKS, Chrome, inked, shade

CELL = 2  # columns: the mark of the state, the shade of the entropy
USUAL, FEWEST = 32, 16  # cells a row
_TITLE = "entropy: a row a step, a column a position"
_SHORT_TITLE = "entropy by step"
_LEAST_STRIP = 3  # rows: the title and two steps
_NUMBERED = 24  # columns from which the steps are numbered
_LEGEND = inked(Chrome.LEGEND)


def cells_a_row(length: int, width: int, height: int) -> int:
    """A power of two: 32 where there is room, more of them only where the grid would be too high otherwise."""
    most = max(1, width // CELL)
    cells = 1 << (most.bit_length() - 1)
    wanted = USUAL
    while -(-length // wanted) > max(1, height):
        wanted *= 2
    return min(cells, wanted)


def grid(seen: Seen, width: int, height: int) -> list[Row]:
    """A cell a position, as many rows as that takes."""
    if seen.step is None:
        return []
    length = len(seen.states)
    if width < CELL:
        return [[_heat(entropy)] for entropy in seen.step.entropy]
    cells = cells_a_row(length, width, height)
    both = [
        ((MARKS[state], inked(state, entropy)), _heat(entropy))
        for state, entropy in zip(seen.states, seen.step.entropy, strict=True)
    ]
    return [[run for cell in both[i : i + cells] for run in cell] for i in range(0, length, cells)]


def _heat(entropy: float) -> Run:
    return HEAT[shade(entropy)], inked(Chrome.HEAT, entropy)


def strip(seen: Seen, width: int, height: int) -> list[Row]:
    """The entropies of this canvas, a row a step, the latest last; at most `height` rows, none where it would say little."""
    steps = len(seen.trail)
    if height < _LEAST_STRIP or not steps:
        return []
    title = next((text for text in (_TITLE, _SHORT_TITLE) if len(text) <= width), "")
    first = max(0, steps - height + 1)
    margin = len(str(steps)) if width >= _NUMBERED else 0
    table: list[Row] = [[(title, _LEGEND)]]
    for number in range(first, steps):
        row: Row = [(f"{number + 1:>{margin}} ", _LEGEND)] if margin else []
        table.append(row + _shaded(seen.trail[number], width - margin - bool(margin)))
    return table


@lru_cache(maxsize=512)
def _shaded(entropies: Sequence[float], width: int) -> Row:
    """Positions from left to right, as wide as there is room; the mean of those that share a column."""
    length = len(entropies)
    columns = min(length, width)
    broad = max(1, width // max(1, length))
    found: Row = []
    for i in range(columns):
        part = entropies[i * length // columns : (i + 1) * length // columns]
        glyph, ink = _heat(sum(part) / len(part))
        if found and found[-1][1] is ink:
            found[-1] = (found[-1][0] + glyph * broad, ink)
        else:
            found.append((glyph * broad, ink))
    return found
