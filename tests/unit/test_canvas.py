"""A canvas as rows of text: what is drawn of any text, and where."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from dgemma_local.states import State
from dgemma_local.ui.canvas import (
    CARRIER,
    CONTROL,
    END,
    HIDDEN,
    MOST_DRAWN,
    MOST_MARKS,
    NEWLINE,
    Row,
    Vocabulary,
    fitted,
    leftward,
    rows,
    signs,
)
from dgemma_local.ui.palette import Ink, inked

TEXT, FROZEN, FRESH, NOISE = (inked(state) for state in (State.TEXT, State.FROZEN, State.FRESH, State.NOISE))
ACUTE = "\u0301"
AWKWARD = [
    "\x00", "\x1b[31m", "\x9b31m", "\r", "\r\n", "\n", "\t", " ", "\u00a0", "\u3000", "\u200b", "\u200d", "\u00ad", "\u2028",
    "\u202e", "\u2066", "\u200f", "\u061c", "\ufeff", "\ue000", "\U000f0000", "\U000e0041", "\ud800", "\u034f", "\u3164",
    ACUTE, "\u20e3", "\ufe0f", "\U000e0101", "👩\u200d🚀", "👍🏽", "🏽", "🇩🇪", "🇩", "❤\ufe0f", "1\ufe0f\u20e3", "漢字", "ก็",
    "\u1100\u1161", "\u1161", "שלום", "مرحبا", "١٢", "é", "e" + ACUTE, "�", "\uffff", "a", "word", "",
]  # fmt: skip
CONTROLS = re.compile("[\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\U000e0000-\U000e007f]")

texts = st.lists(st.sampled_from(AWKWARD) | st.text(max_size=4), max_size=6).map("".join)
inks = st.sampled_from([inked(state) for state in State])


def plain(table: list[Row]) -> list[str]:
    return ["".join(text for text, _ in row) for row in table]


def drawn(text: str) -> str:
    return "".join(sign for sign, _ in signs(text))


# Laws


@given(st.lists(st.tuples(texts, inks), max_size=12), st.integers(1, 12))
@settings(deadline=None)
def test_no_row_is_wider_than_it_should_be_and_none_holds_what_a_terminal_obeys(
    tokens: list[tuple[str, Ink]], width: int
) -> None:
    table = rows(tokens, width)
    assert table
    for line in plain(table):
        assert cell_len(line) <= width
        assert line.isprintable() and not CONTROLS.search(line)
    for row in table:
        assert all(text for text, _ in row)
        assert all(cell_len(text[0]) for text, _ in row), "a run begins in a cell of its own"
        assert all(a[1] != b[1] for a, b in pairwise(row))


@given(texts)
@settings(deadline=None)
def test_signs_know_their_cells_and_are_what_they_are_drawn_as(text: str) -> None:
    found = signs(text)
    assert all(cells == (1 if sign == "\n" else cell_len(sign)) for sign, cells in found)
    assert signs(drawn(text)) == found or " " in drawn(text)  # a wide space becomes two
    assert all(len(sign) <= 1 + MOST_MARKS or sign.isspace() for sign, _ in found)
    assert all(cells or i == 0 or found[i - 1][0] == "\n" for i, (_, cells) in enumerate(found))


@given(texts, texts)
@settings(deadline=None)
def test_noise_takes_the_cells_of_the_guess(text: str, guess: str) -> None:
    room = max(1, sum(cells for _, cells in signs(guess)))
    fit = fitted(text, guess)
    assert cell_len(fit) == room and fit.isprintable()
    assert plain(rows([(fit, NOISE)], room)) == [fit], "it is drawn as it is"
    assert leftward(guess) or not leftward(fit)


@given(st.lists(texts, max_size=8), st.integers(2, 12))
@settings(deadline=None)
def test_nothing_settled_is_lost(parts: list[str], width: int) -> None:
    """Token for token or at once, the same signs; marks that have no sign before them stand on one."""
    text = "".join(parts)
    alone = re.sub(r"\n", "", "".join(drawn(part) for part in parts))
    shown = "".join(plain(rows([(part, FROZEN) for part in parts], width))).replace(CARRIER, "")
    assert shown == alone.replace(CARRIER, "")
    assert "".join(plain(rows([(text, FROZEN)], width))).count("漢") == text.count("漢")


# Examples


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("a\tb", "a    b"),
        ("a\rb", f"a{HIDDEN}b"),
        ("\x1b[31m", f"{HIDDEN}[31m"),
        ("a\u202eb", f"a{HIDDEN}b"),
        ("\ue000\U000f0000\U000e0041\u200b\u00ad\u034f\u3164\ud800", HIDDEN * 8),
        ("👩\u200d🚀", f"👩{HIDDEN}🚀"),
        ("👍🏽", f"👍{HIDDEN}"),
        ("🇩🇪", "DE"),
        ("❤\ufe0f", "❤"),
        ("\ufe0f", HIDDEN),
        ("1\ufe0f\u20e3", "1\u20e3"),
        ("a\u00a0b\u3000c", "a b  c"),
        ("e" + ACUTE, "e" + ACUTE),
        (ACUTE, CARRIER + ACUTE),
        ("e" + ACUTE * 6, "e" + ACUTE * MOST_MARKS + HIDDEN * 1 + ACUTE),
        ("שלום", "שלום"),
    ],
)
def test_what_is_drawn_of_a_text(text: str, seen: str) -> None:
    assert plain(rows([(text, FROZEN)], 40)) == [seen]


def test_line_breaks_are_real_where_they_are_settled_and_signs_in_noise() -> None:
    assert plain(rows([("a", FROZEN), ("\r\n", FRESH), ("  b\n\nc", FROZEN)], 9)) == ["a", "  b", "", "c"]
    assert plain(rows([("a", FROZEN), ("\r\n", NOISE), ("b", FROZEN)], 9)) == [f"a{NEWLINE}b"]
    for state in State:
        breaks = len(rows([("\n", inked(state))], 9)) == 2
        assert breaks == (state not in (State.NOISE, State.THAWED, State.PAST)), state


def test_a_full_row_and_a_line_break_are_one() -> None:
    assert plain(rows([("abc\nd", FROZEN)], 3)) == ["abc", "d"]
    assert plain(rows([("abcd", FROZEN)], 3)) == ["abc", "d"]


def test_rows_break_between_characters_and_never_inside_one() -> None:
    assert rows([("漢字漢", TEXT)], 5) == [[("漢字", TEXT)], [("漢", TEXT)]]
    assert rows([("漢", TEXT)], 1) == [[(HIDDEN, TEXT)]]
    assert rows([("ab" + ACUTE, TEXT)], 2) == [[("ab" + ACUTE, TEXT)]]
    assert rows([], 5) == [[]]


def test_neighbours_of_one_ink_are_one_run() -> None:
    noise = Ink(State.NOISE)
    assert rows([("a", NOISE), ("b", noise), ("c", FRESH)], 9) == [[("ab", NOISE), ("c", FRESH)]]
    assert rows([("a", Ink(State.NOISE, 1)), ("b", noise)], 9) == [[("a", Ink(State.NOISE, 1)), ("b", noise)]]


def test_a_mark_joins_the_token_before_it_where_it_is_settled() -> None:
    assert rows([("e", FROZEN), (ACUTE + "f", FRESH)], 9) == [[("e" + ACUTE, FROZEN), ("f", FRESH)]]
    assert rows([("e", FROZEN), (ACUTE, FROZEN)], 9) == [[("e" + ACUTE, FROZEN)]]
    assert rows([("e", FROZEN), (ACUTE, NOISE)], 9) == [[("e", FROZEN), (CARRIER + ACUTE, NOISE)]]
    assert plain(rows([("e\n", FROZEN), (ACUTE, FROZEN)], 9)) == ["e", CARRIER + ACUTE]
    assert plain(rows([("e", FROZEN)] + [(ACUTE, FROZEN)] * 6, 9)) == ["e" + ACUTE * 4 + CARRIER + ACUTE * 2]


@pytest.mark.parametrize(
    ("text", "guess", "seen"),
    [
        ("word", "7", "w"),
        ("w", "seven", "w    "),
        ("\n", "7", NEWLINE),
        ("7", "\n", "7"),
        ("漢", "7", HIDDEN),
        ("漢字", "777", "漢 "),
        ("", "77", HIDDEN + " "),
        ("x", "", "x"),
        (ACUTE, "7", CARRIER + ACUTE),
        ("אב", "77", HIDDEN * 2),
        ("אב", "שלום", "אב  "),
    ],
)
def test_noise_is_cut_or_padded(text: str, guess: str, seen: str) -> None:
    assert fitted(text, guess) == seen


def test_of_a_long_token_so_much_is_drawn() -> None:
    vocabulary = Vocabulary(text=lambda token: "x" * token, control=lambda token: False, ends=frozenset())
    assert vocabulary.glyph(MOST_DRAWN) == "x" * MOST_DRAWN
    assert vocabulary.glyph(10**6) == "x" * MOST_DRAWN + "…"


def test_control_and_end_tokens_are_marks_and_each_token_is_read_once() -> None:
    asked: list[int] = []

    def text(token: int) -> str:
        asked.append(token)
        return f"<{token}>"

    vocabulary = Vocabulary(text=text, control=lambda token: token == 5, ends=frozenset({6}))
    assert [vocabulary.glyph(token) for token in (5, 6, 7, 7)] == [CONTROL, END, "<7>", "<7>"]
    assert asked == [7]
