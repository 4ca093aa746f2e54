"""A stop string ends the answer, and only the answer: never a thought, a tool call, or a marker's name."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import scripted
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import LENGTH, canvases
from small_tokenizer import BYTE, small
from typer.testing import CliRunner

from dgemma_local import cli
from dgemma_local.channels import AnswerDecoder, StopSearch
from dgemma_local.events import Finished
from dgemma_local.session import Session
from dgemma_local.ui.settled import Part, _before

HELLO: Any = [{"role": "user", "content": "Hi"}]
MARKED = "<|channel>thought\nuser<channel|>Hi\n<|tool_call>call:user<tool_call|> €\U0001f600model<turn|>"


def ids(text: str) -> tuple[int, ...]:
    return small().encode(text)


def search(text: str, *stop: str, open_channel: bool = False) -> str | None:
    """What is kept of `text`, markers by name."""
    tokens = ids(text)
    kept = StopSearch(small(), stop, open_channel=open_channel)(tokens)
    return None if kept is None else small().decode(tokens[:kept])


# Where it is looked for


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("Hi user", "user", "Hi "),
        ("Hi user", "model", None),
        ("Hi user", "", None),
        ("Hi user", "Hi", ""),
        ("<|channel>thought\nuser<channel|>Hi model", "user", None),
        ("<|channel>thought\nuser<channel|>Hi model", "thought", None),  # a name is no text
        ("<|channel>thought\nuser<channel|>Hi model", "channel", None),
        ("<|channel>thought\nuser<channel|>Hi user", "user", "<|channel>thought\nuser<channel|>Hi "),
        ("<|channel>thought\nHi<channel|>user", "Hiuser", None),  # over the end of a thought
        ("Hi<|channel>model<channel|>user", "Hiuser", None),  # over a whole one: the first half may be written already
        ("Hi<|channel>model<channel|>user Hi user", "Hi user", "Hi<|channel>model<channel|>user "),
        ("<|tool_call>call:user{}<tool_call|>Hi user", "user", "<|tool_call>call:user{}<tool_call|>Hi "),
        ("Hi<|tool_call>call:user", "user", None),  # maybe a call
        ("Hi<channel|>user", "user", "Hi<channel|>"),  # a closer of nothing
    ],
)
def test_the_answer_alone_holds_a_stop_string(text: str, stop: str, kept: str | None) -> None:
    assert search(text, stop) == kept


def test_a_thought_that_the_prompt_opened_holds_none() -> None:
    assert search("user<channel|>Hi user", "user", open_channel=True) == "user<channel|>Hi "
    assert search("user", "user", open_channel=True) is None


def test_the_first_of_several_counts_and_whole_tokens_are_cut() -> None:
    assert search("Hi user model", "model", "user") == "Hi "
    assert len(ids("model")) == 1 and search("Hi model", "odel") == "Hi "
    assert search("é€", "€") == "é"  # of a run of bytes, too


@pytest.mark.parametrize(
    ("text", "stop", "rest"),
    [
        ("Hi model", "odel", "m"),
        ("Hi model user", "el us", "mod"),
        ("<|channel>thought\nmodel<channel|>model", "del", "mo"),
        ("Hi model", "model", ""),
        ("Hi model", "user", ""),
        ("é€", "€", ""),
    ],
)
def test_what_stands_before_it_in_the_token_it_begins_in_is_known(text: str, stop: str, rest: str) -> None:
    finder = StopSearch(small(), [stop])
    finder(ids(text))
    assert finder.rest == rest


# Canvas by canvas


def grown(finder: StopSearch, tokens: Sequence[int], width: int) -> int | None:
    """Asked as the engine does."""
    for end in range(width, len(tokens) + width, width):
        found = finder(tokens[:end])
        if found is not None:
            return found
    return None


TOKENS = st.lists(st.sampled_from(sorted({*ids(MARKED), BYTE + 0xE2})), max_size=24)


@given(TOKENS, st.integers(1, 9), st.sampled_from(["i", "user", "€", "Hi\n", "el"]))
@settings(max_examples=150, deadline=None)
def test_it_is_found_canvas_by_canvas_and_nothing_of_it_is_left(tokens: list[int], width: int, stop: str) -> None:
    finder, whole = StopSearch(small(), [stop]), StopSearch(small(), [stop])
    found = grown(finder, tokens, width)
    assert found == whole(tokens) and finder.rest == whole.rest
    decoder = AnswerDecoder(small())
    pieces = [*decoder.feed(tokens if found is None else tokens[:found]), *decoder.close()]
    assert not any(stop in piece.text for piece in pieces if piece.kind == "answer") or found is None
    if not any(small().is_control(token) for token in tokens):
        text, at = small().decode(tokens).partition(stop)[:2]
        assert "".join(piece.text for piece in pieces) + finder.rest == text and (found is not None) == bool(at)


def test_what_was_read_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[int] = []
    feed = AnswerDecoder.feed
    monkeypatch.setattr(AnswerDecoder, "feed", lambda self, more: fed.extend(more) or feed(self, more))
    tokens = ids("Hi user " * 10)
    assert grown(StopSearch(small(), ["model"]), tokens, LENGTH) is None
    assert fed == [*tokens]
    fed.clear()
    assert grown(StopSearch(small(), [""]), tokens, LENGTH) is None
    assert fed == []


def test_a_canvas_that_began_anew_is_read_anew() -> None:
    finder = StopSearch(small(), ["user"])
    assert finder(ids("<|channel>")) is None
    assert finder(ids("Hi user")) == len(ids("Hi "))


# A whole answer


def finished(session: Session, *stop: str) -> Finished:
    *_, last = session.answer(HELLO, seed=1, stop=stop)
    assert isinstance(last, Finished)
    return last


THINKS = "<|channel>thought\nuser model user Hi\n<channel|>Hi model Hi user"


def test_an_answer_behind_a_thought_is_given_up_to_the_stop_string() -> None:
    assert len(canvases(THINKS)) > 2
    end = finished(scripted.session(*canvases(THINKS + "<turn|>")), "user")
    assert end.reason == "stop" and small().decode(end.tokens) == THINKS.removesuffix("user")
    assert end.rest == ""
    end = finished(scripted.session(*canvases(THINKS + "<turn|>")), "odel")
    assert end.rest == "m" and small().decode(end.tokens) == THINKS.removesuffix("model Hi user")
    end = finished(scripted.session(*canvases(THINKS + "<turn|>")), "thought")
    assert end.reason == "end" and small().decode(end.tokens) == THINKS


def test_run_says_that_an_answer_began_with_it_only_where_one_did(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*flags: str) -> Any:
        opens = scripted.session(*canvases(THINKS + "<turn|>"))
        monkeypatch.setitem(sys.modules, "dgemma_local.session", scripted.module(opens))
        return CliRunner().invoke(cli.app, ["run", "-p", "Hi", "--seed", "1", "-m", "demo", "--think", *flags])

    found = run("--stop", "user")
    assert (found.exit_code, found.stdout) == (0, "Hi model Hi \n")
    found = run("--stop", "odel")
    assert (found.exit_code, found.stdout) == (0, "Hi m\n")
    *_, last = map(json.loads, run("--stop", "odel", "--json").stdout.splitlines())
    assert (last["answer"], last["rest"], last["pieces"][-1]["text"]) == ("Hi m", "m", "m")
    assert run("--stop", "i").stdout == "H\n"
    found = run("--stop", "Hi")
    assert found.exit_code == 9 and "the answer began with a stop string" in found.stderr


# As far as it has settled


def test_what_is_shown_ahead_is_cut_as_it_will_be() -> None:
    def shown(*parts: tuple[str, str], stop: Sequence[str] = ("user", "del")) -> list[tuple[str, str]]:
        return [(part.kind, part.text) for part in _before([Part(*part) for part in parts], stop)]

    assert shown(("thought", "user"), ("answer", "Hi us"), ("answer", "er Hi")) == [
        ("thought", "user"),
        ("answer", "Hi "),
    ]
    assert shown(("answer", "model"), ("thought", "Hi")) == [("answer", "mo")]
    assert shown(("answer", "us"), ("thought", "Hi"), ("answer", "er")) == [
        ("answer", "us"), ("thought", "Hi"), ("answer", "er"),
    ]  # fmt: skip
    assert shown(("answer", "user"), ("thought", "Hi")) == []
    assert shown(("tool_call", "user"), ("answer", "Hi"), stop=()) == [("tool_call", "user"), ("answer", "Hi")]
