"""Numbers and legend around a canvas in which the run itself has given a token."""

import pytest

from dgemma_local.events import StepDone
from dgemma_local.states import Seen, State, follow
from dgemma_local.ui.palette import MARKS, Ink
from dgemma_local.ui.status import legend, status


def after(*pinned: int) -> Seen:
    """One step of a canvas of three, of which these positions were given."""
    step = StepDone(0, 0, 48, 0.8, (1, 2, 3), (1, 2, 3), (True,) * 3, (1, 2, 3), (0.5,) * 3, False, pinned=pinned)
    return list(follow([(step, 0.1)], frozenset({9})))[-1]


def numbers(seen: Seen, width: int) -> str:
    return " ".join(text for row in status(seen, "m", width, 24) for text, _ in row)


@pytest.mark.parametrize("width", [40, 80])
def test_pinned_positions_are_counted_where_there_are_any(width: int) -> None:
    assert "1 pinned" in numbers(after(0), width) and "2 pinned" in numbers(after(0, 2), width)
    assert "pinned" not in numbers(after(), width) and "pinned" not in numbers(Seen(frozenset()), width)


@pytest.mark.parametrize("grid", [False, True])
def test_the_legend_names_them_where_there_are_any(grid: bool) -> None:
    """In their own look, behind the other states."""
    with_them, without = (
        [run for row in legend(120, 1, grid=grid, pinned=pinned) for run in row if isinstance(run[1].kind, State)]
        for pinned in (True, False)
    )
    assert (f"{MARKS[State.PINNED]} pinned" if grid else "pinned", Ink(State.PINNED)) == with_them[-1]
    assert [ink for _, ink in with_them[:-1]] == [ink for _, ink in without]
