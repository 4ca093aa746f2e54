"""Thought, answer and tool calls told apart by ids, however the ids arrive."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizer import BYTE, GAP, MARKERS, VOCAB_SIZE, small

from dgemma_local.channels import AnswerDecoder, Piece, opens_channel

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "chat.json").read_text(encoding="utf-8"))["cases"]
CALL = 'call:w{c:<|"|>Rome<|"|>,n:3,x:true}'


def joined(pieces: list[Piece]) -> list[tuple[str, str]]:
    """Neighbours of one kind as one; tool calls stay apart."""
    merged: list[tuple[str, str]] = []
    for piece in pieces:
        assert piece.text
        if merged and merged[-1][0] == piece.kind != "tool_call":
            merged[-1] = (piece.kind, merged[-1][1] + piece.text)
        else:
            merged.append((piece.kind, piece.text))
    return merged


def read(*chunks: tuple[int, ...], open_channel: bool = False) -> list[tuple[str, str]]:
    decoder = AnswerDecoder(small(), open_channel=open_channel)
    return joined([piece for chunk in chunks for piece in decoder.feed(chunk)] + decoder.close())


def both(text: str, open_channel: bool = False) -> list[tuple[str, str]]:
    """What `text` reads as; the same in one chunk and token by token."""
    ids = small().encode(text)
    whole = read(ids, open_channel=open_channel)
    assert read(*((i,) for i in ids), open_channel=open_channel) == whole
    return whole


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("Hi", [("answer", "Hi")]),
        ("<|channel>thought\n<channel|>Hi", [("answer", "Hi")]),
        ("<|channel>thought<channel|>Hi", [("answer", "Hi")]),
        ("<|channel><channel|>Hi", [("answer", "Hi")]),
        ("<|channel>thought\nabc<channel|>Hi", [("thought", "abc"), ("answer", "Hi")]),
        ("<|channel>thought\n\nabc\n<channel|>\n Hi \n", [("thought", "\nabc\n"), ("answer", "\n Hi \n")]),
        ("Hi<|channel>thought\na<channel|>b", [("answer", "Hi"), ("thought", "a"), ("answer", "b")]),
        ("<|channel>thought\na<channel|><|channel>thought\nb<channel|>c", [("thought", "ab"), ("answer", "c")]),
        ("<|channel>thought\na<|channel>thought\nb<channel|>c", [("thought", "ab"), ("answer", "c")]),
        ("thought\nHi", [("answer", "thought\nHi")]),  # a word like any other outside a channel
    ],
)
def test_channels(text: str, expected: list[tuple[str, str]]) -> None:
    assert both(text) == expected


@pytest.mark.parametrize(
    ("inside", "thought"),
    [
        ("thoughtful\na", "thoughtful\na"),
        ("thought a", "thought a"),
        ("thou", "thou"),
        ("final\na", "final\na"),
        ("\na", "\na"),
        ("a\nthought\nb", "a\nthought\nb"),
    ],
)
def test_only_the_known_label_is_dropped(inside: str, thought: str) -> None:
    assert both(f"<|channel>{inside}<channel|>Hi") == [("thought", thought), ("answer", "Hi")]


@pytest.mark.parametrize(("text", "thought"), [("thought\nabc", "abc"), ("thought\nab €", "ab €"), ("thou", "thou")])
def test_a_thought_without_an_end_is_all_thought(text: str, thought: str) -> None:
    assert both(f"<|channel>{text}") == [("thought", thought)]


@pytest.mark.parametrize("text", ["<|channel>", "<|channel>thought", "<|channel>thought\n"])
def test_a_label_alone_is_no_thought(text: str) -> None:
    assert both(text) == []


def test_the_label_is_held_until_it_is_certain() -> None:
    decoder = AnswerDecoder(small())
    assert decoder.feed(small().encode("<|channel>thou")) == []
    assert decoder.feed(small().encode("ght")) == []
    assert decoder.feed(small().encode("\na")) == [Piece("thought", "a")]
    assert decoder.feed(small().encode("b<channel|>c")) == [Piece("thought", "b"), Piece("answer", "c")]
    assert decoder.close() == [] and decoder.close() == []


def test_another_label_is_let_go_at_its_first_odd_letter() -> None:
    assert AnswerDecoder(small()).feed(small().encode("<|channel>thx")) == []  # x is a byte: its run may go on
    assert AnswerDecoder(small()).feed(small().encode("<|channel>tho m")) == [Piece("thought", "tho m")]


def test_says_whether_the_answer_is_yet_to_come() -> None:
    decoder = AnswerDecoder(small())
    seen = [decoder.in_thought]
    for text in ("<|channel>thought\n", "a", "<channel|>", "b"):
        decoder.feed(small().encode(text))
        seen.append(decoder.in_thought)
    assert seen == [False, True, True, False, False]


def test_control_tokens_reach_no_text() -> None:
    control = [i for name, i in MARKERS.items() if "channel" not in name and "call" not in name]
    (hi,) = small().encode("Hi")
    inside = [i for i in control if i != MARKERS['<|"|>']]
    assert read((hi, *control, hi)) == [("answer", "HiHi")]
    assert read((MARKERS["<|channel>"], hi, *control, hi)) == [("thought", "HiHi")]
    assert read((MARKERS["<|tool_call>"], hi, *inside, hi, MARKERS["<tool_call|>"])) == [("tool_call", "HiHi")]


def test_a_control_token_splits_no_character() -> None:
    first, *rest = small().encode("😀")
    assert read((first, MARKERS["<pad>"], *rest)) == [("answer", "😀")]


def test_an_unfinished_character_is_shown_where_it_stands() -> None:
    assert read((MARKERS["<|channel>"], BYTE + 0xE2, MARKERS["<channel|>"], BYTE + 0x82)) == [
        ("thought", "�"),
        ("answer", "�"),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"<|tool_call>{CALL}<tool_call|>", [("tool_call", CALL)]),
        (f"<|tool_call>{CALL}<tool_call|><|tool_response>", [("tool_call", CALL)]),
        (f"a<|tool_call>{CALL}<tool_call|>b", [("answer", "a"), ("tool_call", CALL), ("answer", "b")]),
        ("<|tool_call>a<tool_call|><|tool_call>b<tool_call|>", [("tool_call", "a"), ("tool_call", "b")]),
        ("<|tool_call><tool_call|>", []),
        (
            f"<|channel>thought\na<|tool_call>{CALL}<tool_call|>b<channel|>c",
            [("thought", "a"), ("tool_call", CALL), ("thought", "b"), ("answer", "c")],
        ),
    ],
)
def test_tool_calls_come_whole(text: str, expected: list[tuple[str, str]]) -> None:
    assert both(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"a<|tool_call>{CALL}", [("answer", f"a{CALL}")]),
        (f"<|channel>thought\na<|tool_call>{CALL}", [("thought", f"a{CALL}")]),
        ("<|tool_call>a<|tool_call>b<tool_call|>", [("answer", "a"), ("tool_call", "b")]),
        ("<|tool_call>a<|channel>thought\nb<channel|>c", [("answer", "a"), ("thought", "b"), ("answer", "c")]),
        ("<|channel>thought\n<|tool_call>a<channel|>b<tool_call|>c", [("thought", "a"), ("answer", "bc")]),
    ],
)
def test_a_call_without_an_end_is_shown(text: str, expected: list[tuple[str, str]]) -> None:
    assert both(text) == expected


@pytest.mark.parametrize("closer", ["<channel|>", "<tool_call|>", "<tool_response|>", "<turn|>"])
def test_stray_closers_are_ignored(closer: str) -> None:
    assert both(f"H{closer}i") == [("answer", "Hi")]


def test_a_stray_channel_closer_ends_no_call() -> None:
    assert both("<|tool_call>a<channel|>b<tool_call|>") == [("tool_call", "ab")]


def test_a_call_is_not_mixed_with_the_text_before_it() -> None:
    assert both("x<|tool_call>y<tool_call|>") == [("answer", "x"), ("tool_call", "y")]


# The prompt


@pytest.mark.parametrize("rendered", [text for case in GOLDEN for text in case["rendered"].values()])
def test_published_prompts_leave_no_channel_open(rendered: str) -> None:
    ids, special = small().encode(rendered), small().special
    assert not opens_channel(ids, special)
    assert opens_channel(small().encode(f"{rendered}<|channel>thought\n"), special)
    assert opens_channel(small().encode(f"{rendered}<|channel>"), special)


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "<|turn>user\n<|channel><turn|>\n<|turn>model\n",
        "<|turn>user\n<|channel>",  # and the next turn's opener
        "<|turn>model\n<|tool_response>response:w{value:<|channel>}<tool_response|>",
        "<|turn>system\n<|tool>declaration:w{description:<|channel>}<tool|>",
    ],
)
def test_a_channel_left_open_elsewhere_does_not_count(prompt: str) -> None:
    ids = small().encode(prompt)
    ids += (MARKERS["<|turn>"],) if prompt.endswith("<|channel>") else ()
    assert not opens_channel(ids, small().special)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abc<channel|>Hi", [("thought", "abc"), ("answer", "Hi")]),
        ("thought\nabc<channel|>Hi", [("thought", "abc"), ("answer", "Hi")]),
        ("<channel|>Hi", [("answer", "Hi")]),
        ("abc", [("thought", "abc")]),
        ("a<channel|>Hi<|channel>thought\nb", [("thought", "a"), ("answer", "Hi"), ("thought", "b")]),
    ],
)
def test_an_answer_that_begins_inside_a_channel(text: str, expected: list[tuple[str, str]]) -> None:
    assert both(text, open_channel=True) == expected


# Laws

NAMED = [*MARKERS.values(), *small().encode("thought\n"), 108, *small().encode("€😀\xff"), GAP, BYTE + 0xFF]
IDS = st.lists(st.one_of(st.sampled_from(NAMED), st.integers(0, VOCAB_SIZE - 1)), max_size=50)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(ids=IDS, cuts=st.lists(st.integers(0, 50), max_size=8), open_channel=st.booleans())
def test_chunks_change_nothing(ids: list[int], cuts: list[int], open_channel: bool) -> None:
    edges = [0, *sorted(cuts), len(ids)]
    chunks = [tuple(ids[a:b]) for a, b in pairwise(edges)]
    assert read(*chunks, open_channel=open_channel) == read(tuple(ids), open_channel=open_channel)


@settings(deadline=None, derandomize=True)
@given(ids=IDS.map(lambda ids: [i for i in ids if not small().is_control(i)]), open_channel=st.booleans())
def test_without_markers_text_is_the_decoding(ids: list[int], open_channel: bool) -> None:
    kind, text = ("thought" if open_channel else "answer"), small().decode(ids)
    if open_channel:
        text = "" if text == "thought" else text.removeprefix("thought\n")
    assert read(tuple(ids), open_channel=open_channel) == ([(kind, text)] if text else [])


WORDS = st.text("aHi \n€{}:thoug", min_size=1)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["thought", "answer", "tool_call"]), WORDS), max_size=8))
def test_what_is_written_is_read(parts: list[tuple[str, str]]) -> None:
    written = {"thought": "<|channel>thought\n{}<channel|>", "answer": "{}", "tool_call": "<|tool_call>{}<tool_call|>"}
    ids = tuple(i for kind, text in parts for i in small().encode(written[kind].replace("{}", text, 1)))
    assert read(ids) == joined([Piece(kind, text) for kind, text in parts])  # type: ignore[arg-type]
