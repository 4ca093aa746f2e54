"""What stands on the screen after every frame, through a terminal emulator; and the codes that draw it."""

import io
import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from screens import Sized, Tty, emulator, feed, pyte, scrolled, shown

from dgemma_local.states import State
from dgemma_local.ui.canvas import Row, rows
from dgemma_local.ui.paint import Depth, Painter, depth, sgr, theme
from dgemma_local.ui.palette import Ink, Look, look
from dgemma_local.ui.terminal import Terminal

COMMITTED = [f"committed line {number}" for number in range(30)]
WORDS = ["ab", "漢字", " ", "é", "x" * 30, "한", "ا", "👩", "1"]
STATES = [State.FROZEN, State.FRESH, State.REPLACED, State.THAWED, State.NOISE, State.TEXT]


@pytest.fixture(autouse=True)
def colours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "COLORTERM", "COLORFGBG", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def some_rows(rng: random.Random, width: int, height: int) -> list[Row]:
    text = [(rng.choice(WORDS), Ink(rng.choice(STATES))) for _ in range(rng.randrange(60))]
    table = rows(text, width)[:height]
    return table + [[] for _ in range(height - len(table))]


@given(st.integers(0, 10_000))
def test_the_screen_is_what_a_fresh_drawing_would_show(seed: int) -> None:
    """Frames that grow and shrink, wide signs, resizes in between: no residue, and what is above stays."""
    rng = random.Random(seed)
    file = Tty(rng.randrange(2, 50), rng.randrange(3, 16))
    screen = emulator(file.columns, file.lines)
    above = [line[: file.columns].rstrip() for line in COMMITTED[: rng.randrange(6)]]
    pyte.Stream(screen).feed("".join(line + "\r\n" for line in above))
    terminal = Sized(file)
    at = 0
    with Painter(terminal, "dark") as painter:
        for _ in range(8):
            if rng.random() < 0.2:  # wider or higher; what pyte does when it shrinks, no terminal does
                file.columns, file.lines = file.columns + rng.randrange(6), file.lines + rng.randrange(4)
                screen.resize(file.lines, file.columns)
            frame = some_rows(rng, file.columns, rng.randrange(1, file.lines))
            painter.paint(frame)
            at = feed(screen, file, at)
            fresh = Tty(file.columns, file.lines)
            Painter(Sized(fresh), "dark").paint(frame)
            other = emulator(file.columns, file.lines)
            pyte.Stream(other).feed(fresh.getvalue())
            top = screen.cursor.y
            assert shown(screen)[top:] == shown(other)[: file.lines - top]
            assert attributes(screen, top, len(frame)) == attributes(other, 0, len(frame))
            assert [*scrolled(screen), *shown(screen)[:top]] == above
            assert screen.cursor.hidden and screen.cursor.x == 0
            assert pyte.modes.DECAWM in screen.mode  # what comes next may wrap again
    feed(screen, file, at)
    assert not screen.cursor.hidden
    assert [*scrolled(screen), *filter(None, shown(screen))] == above


def attributes(screen: Any, top: int, count: int) -> list[Any]:
    return [[screen.buffer[top + y][x] for x in range(screen.columns)] for y in range(count)]


def reflowed(screen: Any, columns: int) -> Any:
    """The same screen narrower, as terminals do it: every row is wrapped, the cursor stays on its own."""
    narrow = emulator(columns, screen.lines)
    text, cursor = [], 0
    for y, line in enumerate(shown(screen)):
        if y == screen.cursor.y:
            cursor = len(text)
        text += [line[i : i + columns] for i in range(0, len(line), columns)] or [""]
    while len(text) > max(cursor + 1, 1) and not text[-1]:
        text.pop()
    pyte.Stream(narrow).feed("\r\n".join(text))
    scrolled_off = max(0, len(text) - screen.lines)
    narrow.cursor.y, narrow.cursor.x = max(0, cursor - scrolled_off), 0
    return narrow


@pytest.mark.parametrize("columns", [39, 21, 20, 13, 5])
def test_a_narrower_terminal_that_rewraps_keeps_no_residue(columns: int) -> None:
    file = Tty(40, 20)
    screen = emulator(40, 20)
    above = ["one", "two", "three"]
    pyte.Stream(screen).feed("".join(line + "\r\n" for line in above))
    painter = Painter(Sized(file), "dark")
    painter.paint([[("x" * 40, Ink(State.FROZEN))] for _ in range(4)])
    at = feed(screen, file, 0)
    screen = reflowed(screen, columns)
    file.columns = columns
    painter.paint([[("y" * columns, Ink(State.FROZEN))] for _ in range(4)])
    at = feed(screen, file, at)
    left = [line for line in [*scrolled(screen), *shown(screen)] if line]
    assert left[:3] == above
    assert [line for line in left[3:] if "y" in line] == ["y" * columns] * 4
    on_screen = shown(screen)
    assert not any("x" in line for line in on_screen)
    painter.clear()
    feed(screen, file, at)
    assert not any("x" in line or "y" in line for line in shown(screen))


def test_a_frame_is_one_write_of_what_has_changed() -> None:
    file = Tty()
    painter = Painter(Sized(file), "dark")
    frame: list[Row] = [[("one", Ink(State.TEXT))], [("two", Ink(State.TEXT))], [("three", Ink(State.TEXT))]]
    painter.paint(frame)
    assert len(file.writes) == 1 and file.writes[0].startswith("\x1b[?2026h") and file.writes[0].endswith("\x1b[?2026l")
    painter.paint(frame)
    assert len(file.writes) == 1
    painter.paint([frame[0], [("zwei", Ink(State.TEXT))], frame[2]])
    assert len(file.writes) == 2 and "zwei" in file.writes[1] and "one" not in file.writes[1]
    painter.clear()
    painter.clear()
    assert len(file.writes) == 3


def test_nothing_is_erased_behind_the_last_column() -> None:
    """There the cursor waits on the last sign, and terminals erase it."""
    file = Tty(5, 3)
    Painter(Sized(file), "dark").paint([[("12345", Ink(State.TEXT))], [("1234", Ink(State.TEXT))]])
    assert re.search(r"\x1b\[K[^\r]*12345\x1b\[0m\r\n", file.getvalue())
    assert "1234\x1b[0m\x1b[K\r" in file.getvalue()


def test_no_control_character_passes() -> None:
    file = Tty()
    Painter(Sized(file), "dark").paint([[("a\x1b]0;owned\x07\x9b2J\n\tb", Ink(State.NOISE))]])
    drawn = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", file.getvalue())
    assert drawn.strip("\r") == "a�]0;owned��2J��b"


def test_a_row_that_is_too_long_is_cut() -> None:
    file = Tty(5, 3)
    screen = emulator(5, 3)
    Painter(Sized(file), "dark").paint([[("漢字漢字", Ink(State.TEXT))]] * 9)
    feed(screen, file, 0)
    assert [line.replace(" ", "") for line in shown(screen)] == ["漢字"] * 3


# Colours


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, "256"),
        ({"COLORTERM": "truecolor"}, "true"),
        ({"COLORTERM": "24bit"}, "true"),
        ({"TERM": "xterm"}, "16"),
        ({"NO_COLOR": "1", "COLORTERM": "truecolor"}, "mono"),
        ({"NO_COLOR": ""}, "256"),
        ({"TERM": "dumb", "COLORTERM": "truecolor"}, "none"),
    ],
)
def test_depth(environment: dict[str, str], found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert depth(Terminal(Tty())) == found
    assert depth(Terminal(io.StringIO())) == "none"


def test_the_codes_of_a_look() -> None:
    style = Look((1, 2, 3), bold=True, underline=True, ansi16=32, ansi256=114)
    wanted: dict[Depth, str] = {
        "none": "",
        "mono": "\x1b[0;1;4m",
        "16": "\x1b[0;1;4;32m",
        "256": "\x1b[0;1;4;38;5;114m",
        "true": "\x1b[0;1;4;38;2;1;2;3m",
    }
    assert {each: sgr(style, each) for each in wanted} == wanted
    dim = Look((1, 2, 3), ground=(255, 0, 96), reverse=True, dim=True, ansi256=7)
    assert sgr(dim, "16") == "\x1b[0;2;7m"
    assert sgr(dim, "256") == "\x1b[0;7;38;5;7;48;5;197m"  # the colour is as dim as it should be
    assert sgr(dim, "true") == "\x1b[0;7;38;2;1;2;3;48;2;255;0;96m"
    assert sgr(Look((9, 9, 9)), "true") == "\x1b[0m"  # the terminal's own


@pytest.mark.parametrize("shades", ["mono", "16", "256", "true"])
@pytest.mark.parametrize("shade", ["dark", "light"])
def test_states_have_codes_of_their_own(shades: Any, shade: Any) -> None:
    told = [state for state in STATES if state is not State.TEXT]
    assert len({sgr(look(Ink(state), shade), shades) for state in told}) == len(told)


@pytest.mark.parametrize(
    ("wish", "ground", "found"),
    [("auto", "15;0", "dark"), ("auto", "0;15", "light"), ("auto", "0;default;7", "light"), ("auto", "", "dark"),
     ("dark", "0;15", "dark"), ("light", "15;0", "light")],
)  # fmt: skip
def test_theme(wish: str, ground: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLORFGBG", ground)
    assert theme(wish) == found
