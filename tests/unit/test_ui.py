"""Views as functions, the page and the record; no terminal."""

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from fake_session import LENGTH, spell, timed
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizer import small

from dgemma_local.channels import AnswerDecoder
from dgemma_local.events import CanvasCommitted, Finished, Prefilled
from dgemma_local.ui import Record, Start
from dgemma_local.ui.page import Page
from dgemma_local.ui.plain import json_lines, plain

START = Start(model="m", demo=False, seed=1, max_tokens=64, steps=8, canvas_length=LENGTH)


def record(**rest: Any) -> Record:
    return Record(START, AnswerDecoder(small()), **rest)


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
