"""Views as functions, the page, the record and the picture; no terminal."""

import io
import json
import random
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from typing import Any

import fake_session
import pytest
from fake_session import END, LENGTH, spell, timed
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from small_tokenizer import small

from dgemma_local.channels import AnswerDecoder
from dgemma_local.events import CanvasCommitted, Finished, Prefilled, StepDone
from dgemma_local.ui import Record, Start
from dgemma_local.ui.canvas import CONTROL, NEWLINE, State, Vocabulary, rows, states
from dgemma_local.ui.live import STYLES, Seen, see, view
from dgemma_local.ui.page import Page
from dgemma_local.ui.picture import picture
from dgemma_local.ui.plain import json_lines, plain

# Token 0 … 9 are digits, 10 breaks the line, 11 ends the answer, the rest is awkward in some way.
TEXTS = [*"0123456789", "\n", CONTROL, "word", "  ", "\t", "漢字", "é", "e\u0301", "\u0301", "👩\u200d🚀", "❤\ufe0f", "\x1b[31m",
         "\r\n", "a\nb", "", "\u202e", "\u3000", "�", "🇩🇪", "\u1100\u1161", "ก็", "[red]"]  # fmt: skip
VOCABULARY = Vocabulary(glyph=TEXTS.__getitem__, ends=frozenset({11}))
START = Start(model="m", demo=False, seed=1, max_tokens=64, steps=8, canvas_length=LENGTH)
BREAK = 10


def step(tokens: list[int], accepted: list[bool] | None = None, number: int = 0, **other: Any) -> StepDone:
    accepted = [True] * len(tokens) if accepted is None else accepted
    values = {"canvas": 0, "steps": 8, "temperature": 0.8, "done": False} | other
    return StepDone(
        step=number,
        fed=tuple(tokens),
        draft=tuple(tokens),
        accepted=tuple(accepted),
        next=tuple(tokens),
        entropy=(0.5,) * len(tokens),
        **values,
    )


def record(**rest: Any) -> Record:
    return Record(START, AnswerDecoder(small()), **rest)


@st.composite
def steps_of_a_canvas(draw: st.DrawFn) -> list[StepDone]:
    length = draw(st.integers(0, 40))
    tokens = st.lists(st.integers(0, len(TEXTS) - 1), min_size=length, max_size=length)
    flags = st.lists(st.booleans(), min_size=length, max_size=length)
    last = draw(st.integers(0, 3))
    return [step(draw(tokens), draw(flags), n, done=n == last) for n in range(last + 1)]


# The view


@given(steps_of_a_canvas(), st.integers(1, 60), st.integers(1, 20), st.text(max_size=200), st.text(max_size=30))
@settings(deadline=None)
def test_a_view_has_always_its_height_and_never_more_than_its_width(
    events: list[StepDone], width: int, height: int, tail: str, label: str
) -> None:
    seen = Seen(label, VOCABULARY, tail=tail)
    for event in [Prefilled(3, 0), *events, CanvasCommitted(0, (), 0, 1, True), Finished("end", (), 1, 1)]:
        seen = see(seen, event)
        text = view(seen, width, height)
        lines = text.plain.split("\n")
        assert len(lines) == height
        assert all(cell_len(line) <= width for line in lines)
        assert all(line.isprintable() for line in lines)
        console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True)
        assert len(console.render_lines(text, console.options, pad=False)) == height


def body(seen: Seen, width: int = 40, height: int = 12) -> list[str]:
    return [line.rstrip() for line in view(seen, width, height).plain.split("\n")[1:-1]]


def test_the_status_line_keeps_what_matters_at_80_columns() -> None:
    event = step([1] * 256, number=47, steps=48, canvas=9)
    status = view(see(Seen("26b-a4b-nvfp4-nvidia", VOCABULARY), event), 80, 12).plain.split("\n")[0]
    assert status.startswith("canvas 10 · step 48 of 48 · accepted 256 of 256 · 26b-a4b-nvfp4-nvidia")


def test_settled_newlines_and_indentation_are_real_and_those_in_noise_are_signs() -> None:
    tokens = [1, 2, BREAK, 13, 3, BREAK, 4]
    assert body(see(Seen("m", VOCABULARY), step(tokens)))[:4] == ["12", "  3", "4", ""]
    settled = [True, True, True, True, True, False, True]
    assert body(see(Seen("m", VOCABULARY), step(tokens, settled)))[:3] == ["12", f"  3{NEWLINE}4", ""]


def test_rows_of_a_grid_stay_under_each_other_while_cells_are_noise() -> None:
    rng = random.Random(1)
    grid = [1, 2, 3, BREAK, 4, 5, 6, BREAK, 7, 8, 9]
    for _ in range(20):
        accepted = [token == BREAK or rng.random() < 0.5 for token in grid]
        tokens = [t if a else rng.randrange(12) for t, a in zip(grid, accepted, strict=True)]
        assert [len(line) for line in body(see(Seen("m", VOCABULARY), step(tokens, accepted)))[:4]] == [3, 3, 3, 0]


def test_states() -> None:
    before = [True, True, False, False]
    now = [True, False, True, False]
    assert states(step([1, 1, 1, 1], now), before, {11}) == [State.FROZEN, State.THAWED, State.FRESH, State.NOISE]
    assert states(step([1, 1], [True, False]), (), {11}) == [State.FRESH, State.NOISE]
    assert states(step([1, 1], [True, False], done=True), (), {11}) == [State.FRESH, State.GUESSED]


def test_what_follows_the_end_is_past_it_once_the_end_is_settled() -> None:
    tokens = [1, 11, 2, 3]
    assert states(step(tokens, [True, True, False, True]), (), {11}) == [
        State.FRESH,
        State.FRESH,
        State.PAST,
        State.PAST,
    ]
    assert states(step(tokens, [True, False, False, True]), (), {11})[2:] == [State.NOISE, State.FRESH]
    assert states(step(tokens, [True, False, False, True], done=True), (), {11})[2:] == [State.PAST, State.PAST]


def test_the_step_before_counts_within_a_canvas_only() -> None:
    seen = see(Seen("m", VOCABULARY), step([1, 2], [True, False]))
    assert see(seen, step([1, 2], [True, True], 1)).before == (True, False)
    assert see(seen, step([1, 2], [True, True], 0, canvas=1)).before == ()
    assert see(seen, CanvasCommitted(0, (1, 2), 2, 1, True)).before == ()


def test_states_differ_without_colour() -> None:
    bare = {
        " ".join(word for word in style.split() if word not in ("red", "green"))
        for state, style in STYLES.items()
        if state in (State.FROZEN, State.FRESH, State.THAWED, State.NOISE, State.GUESSED)
    }
    assert len(bare) == 5


def test_noise_is_the_token_that_the_next_step_reads() -> None:
    assert body(see(Seen("m", VOCABULARY), step([7, 8, 11], [False, False, False])))[0] == f"78{CONTROL}"


def test_a_canvas_higher_than_its_room_says_how_much_is_hidden() -> None:
    seen = see(Seen("m", VOCABULARY), step([1, BREAK] * 9))
    assert body(seen, height=7) == ["1", "1", "1", "1", "… 6 more lines"]


def test_the_canvas_goes_on_in_the_unfinished_line() -> None:
    seen = see(Seen("m", VOCABULARY, tail="ab"), step([1, BREAK, 2]))
    assert body(seen)[:3] == ["ab1", "2", ""]
    long = see(Seen("m", VOCABULARY, tail="x" * 400 + "ab"), step([1, BREAK, 2]))
    assert body(long)[:5] == ["x" * 40, "x" * 40, "ab1", "2", ""]


def test_rows_break_between_characters_and_never_inside_one() -> None:
    assert rows([("漢字漢", State.TEXT)], 5) == [[("漢字", State.TEXT)], [("漢", State.TEXT)]]
    assert rows([("❤\ufe0f", State.TEXT)], 9) == [[("❤", State.TEXT)]]
    assert rows([("漢", State.TEXT)], 1) == [[(CONTROL, State.TEXT)]]
    assert rows([("a", State.NOISE), ("b", State.NOISE), ("c", State.FRESH)], 9) == [
        [("ab", State.NOISE), ("c", State.FRESH)]
    ]


# The page and the record


class Out(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@given(st.lists(st.text(alphabet="a\n", max_size=6), max_size=6), st.booleans(), st.booleans())
def test_a_page_holds_the_whole_answer_and_ends_in_one_newline(parts: list[str], terminal: bool, whole: bool) -> None:
    out = Out(terminal)
    written = ""
    with Page(out, None, whole_lines=whole) as page:
        for part in parts:
            page.write([fake_piece("answer", part)])
            assert not whole or out.getvalue() == "" or out.getvalue().endswith("\n")
            assert out.getvalue() + page.tail == (written := written + part)
    text = "".join(parts).rstrip("\n")
    assert out.getvalue() == (text + "\n" if text else "")


def fake_piece(kind: str, text: str) -> Any:
    from dgemma_local.channels import Piece

    return Piece(kind, text)  # type: ignore[arg-type]


def test_the_line_is_ended_when_the_run_breaks_off() -> None:
    out = Out(False)

    def broken() -> Iterator[Any]:
        yield from timed(list(spell("Hi user Hi user model"))[:7])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plain(broken(), record(), Page(out, None))
    assert out.getvalue().startswith("Hi user") and out.getvalue().endswith("\n")


def test_a_stop_string_over_the_edge_of_a_canvas_is_never_shown() -> None:
    """The second canvas takes back a token of the first, where the stop string began."""
    hi = small().encode("Hi")[0]
    first, stop = (hi,) * (LENGTH - 1), small().encode("model")
    assert len(stop) == 1
    out = Out(False)
    events = [
        CanvasCommitted(0, (*first, *stop), LENGTH, 1, True),
        CanvasCommitted(1, (hi,) * LENGTH, 0, 1, True),
        Finished("stop", first, 2, 2),
    ]
    kept = record(withheld=len(b"model Hi") - 1)
    plain(timed(events), kept, Page(out, None))
    assert out.getvalue() == "Hi" * (LENGTH - 1) + "\n"
    assert kept.text["answer"] == "Hi" * (LENGTH - 1)


@given(st.text(alphabet="Hi user\nmodel€", max_size=60), st.integers(0, 40))
@settings(deadline=None)
def test_what_is_withheld_is_late_and_not_lost(text: str, withheld: int) -> None:
    late, once = record(withheld=withheld), record()
    for event in spell(text):
        late.take(event, 0.0)
        once.take(event, 0.0)
    assert late.text == once.text and once.text["answer"] == text


def test_json_lines_are_ascii_and_carry_every_field() -> None:
    out = Out(False)
    events = list(spell("Hi €"))
    json_lines(timed(events), record(), out)
    text = out.getvalue()
    assert text.isascii() and text.endswith("}\n") and text.count("\n") == len(events) + 1
    last = json.loads(text.splitlines()[-1])
    assert last["answer"] == "Hi €" and last["tokens"] == list(events[-1].tokens)


def test_statistics_survive_an_answer_without_steps_or_time() -> None:
    nothing = record()
    assert all("nan" not in line and "inf" not in line for line in nothing.summary(0.0))
    nothing.take(Finished("interrupted", (), 0, 0), 0.0)
    assert nothing.notices() == ["interrupted"]


@pytest.mark.parametrize(
    ("joining", "said"),
    [
        (0, "prompt    40 tokens, 8 of them reused, 250 ms"),
        (12, "prompt    40 tokens, 8 of them reused, 250 ms without the 12 read with the first step"),
    ],
)
def test_what_a_prompt_took_is_not_said_of_what_came_later(joining: int, said: str) -> None:
    told = record()
    told.take(Prefilled(tokens=40, reused=8, joining=joining), 0.25)
    assert told.summary(1.0)[0] == said


# The picture


def test_a_picture_is_one_svg_with_the_last_frame_at_rest() -> None:
    events = list(spell("Hi user <&> Hi", steps=8))
    text = picture(events, Vocabulary(glyph=small().piece, ends=frozenset({END})), columns=30, frames=5)
    assert text == picture(events, Vocabulary(glyph=small().piece, ends=frozenset({END})), columns=30, frames=5)
    root = ET.fromstring(text)
    space = {"s": "http://www.w3.org/2000/svg"}
    groups = root.findall("s:g", space)
    assert len(groups) == 5
    assert "step 8 of at most 8" in "".join(groups[-1].itertext())
    assert "step 1 of" in "".join(groups[0].itertext())
    width = int(root.get("width", "0"))
    places = [int(x) for span in root.iter("{http://www.w3.org/2000/svg}tspan") for x in span.get("x", "").split()]
    assert places and max(places) < width and len(re.findall(r"animation-delay", text)) == 5


def test_a_picture_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no step of canvas 1"):
        picture(list(fake_session.spell("Hi")), VOCABULARY, canvas=1)
