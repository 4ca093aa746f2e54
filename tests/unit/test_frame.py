"""A moment of a run as rows: always of its size, with what matters in it."""

import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from dgemma_local.events import CanvasCommitted, Finished, Prefilled, StepDone
from dgemma_local.states import Seen, State, follow
from dgemma_local.ui.canvas import CONTROL, NEWLINE, Row, Vocabulary
from dgemma_local.ui.frame import Frame, Sight, View, frame, marked
from dgemma_local.ui.palette import HEAT, MARKS, SHADES, Chrome, Ink, inked
from dgemma_local.ui.status import legend_height

# Token 0 … 9 are digits, 10 breaks the line, 11 ends the answer, 12 steers, the rest is awkward in some way.
TEXTS = [*"0123456789", "\n", "<end>", "<ctl>", "word", "  ", "\t", "漢字", "e\u0301", "\u0301", "👩\u200d🚀", "❤\ufe0f",
         "\x1b[31m", "\r\n", "a\nb", "", "\u202e", "\u3000", "🇩🇪", "ก็", "שלום"]  # fmt: skip
BREAK, END, STEERS, WORD, RTL = 10, 11, 12, 13, len(TEXTS) - 1
ENDS = frozenset({END})
VOCABULARY = Vocabulary(text=TEXTS.__getitem__, control=lambda token: token == STEERS, ends=ENDS)
VIEWS: tuple[View, ...] = ("text", "grid", "both")


def sight(view: View = "text", **other: Any) -> Sight:
    return Sight(**{"label": "m", "vocabulary": VOCABULARY, "view": view, **other})


def step(tokens: Sequence[int], accepted: Sequence[bool] | None = None, number: int = 0, **other: Any) -> StepDone:
    """With `tokens` as the guess as well, unless `draft` says otherwise."""
    accepted = [True] * len(tokens) if accepted is None else accepted
    values = {
        "canvas": 0,
        "steps": 48,
        "temperature": 0.8,
        "done": False,
        "entropy": (0.5,) * len(tokens),
        "draft": tuple(tokens),
    }
    return StepDone(step=number, fed=tuple(tokens), accepted=tuple(accepted), next=tuple(tokens), **values | other)


def seen(*events: Any, seconds: float = 0.0) -> Seen:
    return list(follow(((event, seconds) for event in events), ENDS))[-1]


def plain(rows: Sequence[Row]) -> list[str]:
    return ["".join(text for text, _ in row).rstrip() for row in rows]


def shot(events: Seen | StepDone, width: int = 80, height: int = 14, view: View = "text", **other: Any) -> list[str]:
    now = events if isinstance(events, Seen) else seen(events)
    return plain(frame(now, sight(view), width, height, **other).rows)


def body(events: Seen | StepDone, width: int = 80, height: int = 14, **other: Any) -> list[str]:
    return shot(events, width, height, **other)[2:-1]


@st.composite
def runs(draw: st.DrawFn) -> list[Any]:
    length = draw(st.integers(1, 40))
    tokens = st.lists(st.integers(0, len(TEXTS) - 1), min_size=length, max_size=length)
    flags = st.lists(st.booleans(), min_size=length, max_size=length)
    entropies = st.lists(st.floats(0, 13), min_size=length, max_size=length).map(tuple)
    last = draw(st.integers(0, 3))
    steps = [
        step(draw(tokens), draw(flags), n, done=n == last, draft=tuple(draw(tokens)), entropy=draw(entropies))
        for n in range(last + 1)
    ]
    return [
        Prefilled(3, 0),
        *steps,
        CanvasCommitted(0, steps[-1].next, length, last + 1, True),
        Finished("end", (), 1, 1),
    ]


@given(runs(), st.sampled_from(VIEWS), st.integers(1, 170), st.integers(1, 30), st.text(max_size=80), st.booleans())
@settings(deadline=None, max_examples=200)
def test_a_frame_has_always_its_height_and_never_more_than_its_width(
    events: list[Any], view: View, width: int, height: int, tail: str, argmax: bool
) -> None:
    top = 0
    looked = sight(view, label=tail[:20], draft="argmax" if argmax else "canvas")
    for now in follow(((event, 0.3) for event in events), ENDS):
        made = frame(now, looked, width, height, tail=tail, top=top)
        top = made.top
        assert len(made.rows) == height and top >= 0
        for row in made.rows:
            assert cell_len("".join(text for text, _ in row)) == sum(cell_len(text) for text, _ in row) <= width
            assert all(text.isprintable() for text, _ in row)


@pytest.mark.parametrize("length", [1, 16, 96, 256, 1000, 4096])
@pytest.mark.parametrize("view", VIEWS)
def test_canvases_of_any_length_at_any_size(view: View, length: int) -> None:
    noise = random.Random(length)
    tokens = [noise.randrange(len(TEXTS)) for _ in range(length)]
    now = seen(
        step(tokens, [noise.random() < 0.5 for _ in tokens], entropy=tuple(noise.expovariate(1) for _ in tokens))
    )
    for width, height in ((80, 24), (40, 12), (200, 60), (1, 1), (1, 9), (3, 2), (20, 5), (300, 100)):
        rows = frame(now, sight(view), width, height).rows
        assert len(rows) == height
        assert max(sum(cell_len(text) for text, _ in row) for row in rows) <= width


# The numbers


def busy() -> Seen:
    """Canvas 10, step 48 of 48, everything has happened."""
    events: list[Any] = [CanvasCommitted(n, (1,), 1, 12, True) for n in range(9)]
    length = 256
    events += [
        step([1] * length, canvas=9),
        step([1] * length, [False] * 12 + [True] * (length - 12), 1, canvas=9),
        step([2] * length, number=47, canvas=9, temperature=0.4, entropy=(0.25,) * length),
    ]
    return seen(*events, seconds=0.5)


def test_the_numbers_at_80_columns() -> None:
    rows = shot(busy(), 80, 12)
    assert rows[0] == "canvas 10 · step 48 of 48 · accepted 256 of 256 · 44.2 tokens/s · T 0.40 · m"
    assert rows[1].startswith("12 thaws · 244 replacements · 256 corrections · entropy 0.250 nats ")


def test_the_numbers_at_200_columns() -> None:
    rows = shot(busy(), 200, 12)
    assert rows[0].endswith("accepted 256 of 256 · 44.2 tokens/s · temperature 0.40 · m")
    assert rows[1] == "12 thaws · 244 replacements · 256 corrections · entropy 0.250 nats ██▅"


def test_narrow_frames_keep_whole_numbers() -> None:
    assert shot(busy(), 40, 12)[:2] == [
        "canvas 10 · 48/48 · 256/256 · 44.2 tok/s",
        "12 thaws · 244 repl. · 256 corr. ██▅",
    ]
    assert shot(busy(), 20, 12)[:2] == ["c10 · 48/48 · T 0.40", "12 thaws · 244 repl."]
    assert shot(busy(), 5, 12)[:2] == ["c10", ""]
    for width in range(1, 130):
        numbers = re.findall("[0-9.]*[0-9]", " ".join(shot(busy(), width, 12)[:2]))
        assert set(numbers) <= {"10", "48", "256", "44.2", "0.40", "12", "244", "0.250", "0.25"}, width


def test_below_8_rows_one_row_of_numbers_is_left() -> None:
    now = seen(step([1, BREAK, 2]))
    assert shot(now, 80, 8)[2:4] == ["1", "2"]
    assert shot(now, 80, 7)[1:3] == ["1", "2"]
    assert shot(now, 80, 7)[0].startswith("canvas 1 · step 1 of 48 · accepted 3 of 3 · 0 thaws")
    assert shot(now, 80, 1) == shot(now, 80, 7)[:1]


def test_no_rate_over_a_window_near_zero_or_of_nothing() -> None:
    assert "tokens/s" not in shot(seen(step([1, 2]), seconds=0.09))[0]
    assert "20.0 tokens/s" in shot(seen(step([1, 2]), seconds=0.1))[0]
    assert "tokens/s" not in shot(seen(step([1, 2], [False, False]), seconds=5.0))[0]
    assert "1280 tokens/s" in shot(seen(step([1] * 256), seconds=0.2))[0]


def test_steps_saved_are_said_once_there_are_some() -> None:
    first = step([1, 2], done=True)
    assert "saved" not in "".join(shot(seen(first)))
    assert "47 steps saved" in shot(seen(first, CanvasCommitted(0, (1, 2), 2, 1, True)))[1]


def test_a_run_that_is_over_says_why_and_how_far_it_came() -> None:
    whole = [step([1, 2], done=True), CanvasCommitted(0, (1, 2), 2, 1, True)]
    assert shot(seen(*whole))[0] == "canvas 2 · m"
    assert shot(seen(*whole, Finished("end", (1, 2), 1, 1)))[0] == "finished: end · 1 canvas · 1 step · m"
    assert shot(seen(step([1, 2]), Finished("interrupted", (), 0, 1)))[0].startswith("canvas 1 · step 1 of 48")


def test_the_line_of_entropies_spans_the_canvas_whatever_its_room() -> None:
    steps = [step([1], number=n, entropy=(4.0 * (n < 24),)) for n in range(48)]
    wide, narrow = (shot(seen(*steps), width)[1].split()[-1] for width in (200, 80))
    assert wide == "█" * 24 + "▁" * 24
    assert 4 <= len(narrow) < 48 and narrow[0] == "█" and narrow[-1] == "▁"
    assert narrow.count("█") == pytest.approx(len(narrow) / 2, abs=1)


def test_a_sure_canvas_has_a_flat_line() -> None:
    steps = [step([1], number=n, entropy=(0.001 * (n % 2),)) for n in range(6)]
    assert shot(seen(*steps))[1].endswith(" ▁▁▁▁▁▁")


# The legend


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
def test_the_legend_names_the_states_in_their_own_look(width: int, view: View) -> None:
    last = frame(seen(step([1])), sight(view), width, 24).rows[-2 if width < 60 else -1 :]
    named = [ink.kind for row in last for text, ink in row if isinstance(ink.kind, State)]
    assert named[:3] == [State.FROZEN, State.FRESH, State.REPLACED]
    assert width < 40 or {State.THAWED, State.NOISE} <= set(named)
    text = " ".join(plain(last))
    assert ("newly frozen" in text) == (width >= 120 if view == "text" else width >= 200), text
    if view != "text":
        assert f"{MARKS[State.FRESH]} new" in text


@pytest.mark.parametrize("view", VIEWS)
def test_the_numbers_and_the_legend_have_rows_of_their_own_whatever_happens(view: View) -> None:
    for width, height in ((80, 24), (40, 12), (20, 30), (40, 5)):
        lines = legend_height(width, height)
        frames = [frame(now, sight(view), width, height).rows for now in (Seen(ENDS), seen(step([1, 2])), busy())]
        assert lines and all(rows[-lines:] == frames[0][-lines:] for rows in frames), (width, height)
        assert all(ink.kind is Chrome.STATUS for rows in frames for row in rows[: 1 + (height >= 8)] for _, ink in row)


# Text


def test_settled_newlines_and_indentation_are_real_and_those_in_noise_are_signs() -> None:
    tokens = [1, 2, BREAK, 14, 3, BREAK, 4]
    assert body(step(tokens))[:4] == ["12", "  3", "4", ""]
    assert body(step(tokens, [True] * 5 + [False, True]))[:3] == ["12", f"  3{NEWLINE}4", ""]


def test_a_guess_that_is_committed_is_text_and_no_longer_noise() -> None:
    assert body(step([1, BREAK, WORD], [False] * 3, done=True))[:2] == ["1", "word"]
    assert body(step([1, WORD], [False] * 2, done=True, draft=(1, 2)))[0] == "1word"


def test_noise_is_the_token_that_the_next_step_reads_in_the_cells_of_the_guess() -> None:
    now = seen(step([7, WORD, STEERS], [False] * 3, draft=(WORD, 8, 9)))
    assert plain(frame(now, sight(), 80, 14).rows)[2] == f"7   w{CONTROL}"
    assert plain(frame(now, sight(draft="argmax"), 80, 14).rows)[2] == "word89"


def test_a_grid_stays_a_grid_whatever_the_noise() -> None:
    rng = random.Random(1)
    grid = [1, 2, 3, BREAK, 4, 5, 6, BREAK, 7, 8, 9]
    for _ in range(50):
        accepted = [token == BREAK or rng.random() < 0.5 for token in grid]
        tokens = [t if a else rng.randrange(len(TEXTS)) for t, a in zip(grid, accepted, strict=True)]
        rows = frame(seen(step(tokens, accepted, draft=tuple(grid))), sight(), 80, 14).rows[2:6]
        assert [sum(cell_len(text) for text, _ in row) for row in rows] == [3, 3, 3, 0]


def test_every_state_has_its_ink() -> None:
    now = seen(
        step([1, 2, 3, 4, 5, END, 7], [True, True, True, False, False, True, True]),
        step([1, 9, 3, 4, 5, END, 7], [True, True, False, True, False, True, True], 1, entropy=(0.0,) * 4 + (2.5,) * 3),
    )
    assert frame(now, sight(), 80, 14).rows[2] == [
        ("1", inked(State.FROZEN)),
        ("9", inked(State.REPLACED)),
        ("3", inked(State.THAWED)),
        ("4", inked(State.FRESH)),
        ("5", Ink(State.NOISE, 1)),
        ("■", inked(State.FROZEN)),
        ("7", inked(State.PAST)),
    ]


def test_the_canvas_goes_on_in_the_unfinished_line() -> None:
    now = seen(step([1, BREAK, 2]))
    assert body(now, tail="ab")[:3] == ["ab1", "2", ""]
    assert body(now, 60, 14, tail="x" * 600 + "ab")[:6] == ["x" * 60, "x" * 60, "ab1", "2", "", ""]
    assert body(Seen(ENDS), tail="ab")[0] == "ab"


# A window on what is taller than its room


def tall(changed: Sequence[int], lines: int = 40, before: Sequence[int] = ()) -> Seen:
    """A canvas of lines, of which those are newly frozen in this step, and in the step before."""
    tokens = [token for _ in range(lines) for token in (1, BREAK)]
    was = [i % 2 == 1 or i // 2 not in changed for i in range(2 * lines)]
    return seen(step(tokens, was), step(tokens, number=1))


def window(changed: Sequence[int], top: int = 0, height: int = 14) -> Frame:
    return frame(tall(changed), sight(), 80, height, top=top)


def test_the_window_follows_what_changes_and_says_what_it_hides() -> None:
    """14 rows: two of numbers, ten of the canvas, one that says what is hidden, one of the legend; 41 lines in all."""
    first = window([3])
    assert first.top == 0 and plain(first.rows)[-2] == "↑ 0 more rows above · ↓ 31 below"
    moved = window([25], top=0)
    assert moved.top == 16 and plain(moved.rows)[-2] == "↑ 16 more rows above · ↓ 15 below"
    assert any(ink.kind is State.FRESH for _, ink in moved.rows[11])
    assert window([2], top=16).top == 2


@pytest.mark.parametrize("state", [State.REPLACED, State.THAWED])
def test_the_window_follows_what_is_taken_back_too(state: State) -> None:
    tokens = [1, BREAK] * 40
    kept = [i != 50 or state is State.REPLACED for i in range(80)]
    then = seen(step(tokens), step([*tokens[:50], 2, *tokens[51:]], kept, 1))
    assert then.states[50] is state
    assert frame(then, sight(), 80, 14).top == 16


def test_the_window_stays_while_the_changes_are_in_view() -> None:
    assert window([25], top=20).top == 20
    assert window([], top=20).top == 20
    assert window([20, 29], top=20).top == 20
    assert window([20, 30], top=20).top == 20, "both cannot be seen at once: no other place shows more"
    assert window([19, 20], top=20).top == 19
    assert window([0, 1, 2, 3, 20, 21], top=20).top == 20, "half of the most is enough where all have no room"
    assert window([0, 1, 2, 3, 4, 20, 21], top=20).top == 0


def test_a_window_ends_with_the_canvas() -> None:
    assert window([40], top=99).top == 31
    short = frame(seen(step([1])), sight(), 80, 14, top=31)
    assert short.top == 0 and plain(short.rows)[2] == "1"


def test_what_is_hidden_is_said_in_whatever_room_there_is() -> None:
    now = tall([3])
    assert "↑0 ↓31" in plain(frame(now, sight(), 20, 15).rows)
    assert "↕" in plain(frame(now, sight(), 3, 14).rows)
    assert plain(frame(now, sight(), 80, 2).rows)[1] == "1"


# The grid


def test_a_cell_of_the_grid_is_the_mark_of_its_state_and_the_shade_of_its_entropy() -> None:
    tokens, accepted = [1] * 40, [True, False] * 20
    entropy = tuple([0.0, 0.1, 0.5, 1.5, 3.0, 9.0] + [0.0] * 34)
    rows = frame(seen(step(tokens, accepted, entropy=entropy)), sight("grid"), 80, 24).rows
    assert rows[2][:4] == [("+", inked(State.FRESH)), (HEAT[5], Ink(Chrome.HEAT, 5)), ("~", Ink(State.NOISE, 4)), (HEAT[4], Ink(Chrome.HEAT, 4))]  # fmt: skip
    assert plain(rows)[2].startswith("".join(mark + HEAT[SHADES - 1 - i] for i, mark in enumerate("+~+~+~")))
    assert [len(line) for line in plain(rows)[2:5]] == [64, 16, len("entropy: a row a step, a column a position")]


@pytest.mark.parametrize(
    ("width", "height", "length", "cells"),
    [(80, 24, 256, 32), (63, 40, 256, 16), (40, 30, 256, 16), (200, 60, 256, 32), (200, 60, 4096, 64), (20, 30, 64, 8)],
)
def test_cells_a_row(width: int, height: int, length: int, cells: int) -> None:
    rows = plain(frame(seen(step([1] * length)), sight("grid"), width, height).rows)
    assert len(rows[2]) == 2 * cells


def test_below_the_grid_stands_its_past_a_row_a_step() -> None:
    steps = [step([1] * 32, number=n, entropy=(5.0,) * (32 - 8 * n) + (0.0,) * (8 * n)) for n in range(4)]
    rows = shot(seen(*steps), 80, 24, "grid")
    assert rows[3] == "entropy: a row a step, a column a position"
    assert rows[4:9] == [f"{n + 1} " + "█" * (64 - 16 * n) + "·" * (16 * n) for n in range(4)] + [""]
    many = [step([1] * 32, number=n) for n in range(30)]
    assert [row.split()[0] for row in shot(seen(*many), 80, 24, "grid")[4:-1]] == [str(n) for n in range(12, 31)]
    assert shot(seen(*steps), 20, 24, "grid")[6:11] == [
        "entropy by step",
        *("█" * (20 - 5 * n) + "·" * (5 * n) for n in range(4)),
    ]


def test_positions_that_share_a_column_share_their_mean() -> None:
    now = seen(step([1] * 256, entropy=(0.0, 1.5) * 128), step([1] * 256, number=1, entropy=(0.0,) * 256))
    rows = shot(now, 40, 40, "grid")
    assert f"1 {HEAT[3]}" in "\n".join(rows) and f"2 {HEAT[5] * 38}" in rows


# Both


def test_side_by_side_where_there_is_room() -> None:
    now = seen(step([1, BREAK, 2] + [3] * 253))
    rows = shot(now, 120, 24, "both")
    assert rows[2] == "1" + " " * 84 + " │ " + "+░" * 16
    assert rows[3][:85] == "2" + "3" * 84 and rows[3][85:] == " │ " + "+░" * 16
    wide = shot(now, 200, 24, "both")
    assert wide[2].endswith(" │ " + "+░" * 32)


def test_one_above_the_other_where_there_is_not() -> None:
    rows = shot(seen(step([1, BREAK, 2] + [3] * 253)), 80, 24, "both")
    assert rows[2] == "1" and rows[3].startswith("23")
    assert rows[15:23] == ["+░" * 32] * 8
    assert all("░" not in row for row in rows[:15])


def test_right_to_left_text_shares_its_rows_with_nothing() -> None:
    rows = shot(seen(step([RTL] + [3] * 255)), 120, 24, "both")
    assert all("│" not in row for row in rows) and rows[2].startswith("שלום3")
    noise = seen(step([RTL] + [3] * 255, [False] + [True] * 255, draft=(3,) * 256))
    assert "│" in shot(noise, 120, 24, "both")[2]


def test_the_window_of_both_is_that_of_the_text() -> None:
    assert frame(tall([35]), sight("both"), 120, 14).top == 26


# Plain text


def test_marks_stand_under_what_has_a_state() -> None:
    rows: list[Row] = [
        [("numbers", inked(Chrome.STATUS))],
        [
            ("ab", inked(State.FROZEN)),
            ("漢", inked(State.FRESH)),
            ("e\u0301", inked(State.THAWED)),
            ("x ", inked(State.NOISE)),
        ],
        [("frozen", inked(State.FROZEN))],
        [],
    ]
    assert marked(rows) == ["numbers", "ab漢e\u0301x", "  ++-~~", "frozen", ""]


def test_cells_of_the_grid_carry_their_own_marks() -> None:
    rows = frame(seen(step([1] * 32, [True, False] * 16)), sight("grid"), 80, 8).rows
    assert marked(rows)[2:4] == ["+░~░" * 16, "entropy: a row a step, a column a position"]


@given(runs(), st.sampled_from(VIEWS), st.integers(1, 120))
@settings(deadline=None, max_examples=50)
def test_plain_text_has_no_escape_and_no_more_than_a_mark_a_cell(events: list[Any], view: View, width: int) -> None:
    for line in marked(frame(seen(*events[:2]), sight(view), width, 12).rows):
        assert line.isprintable() and cell_len(line) <= width and line == line.rstrip()
