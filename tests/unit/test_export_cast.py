"""A recording as asciicast and as text: a terminal ends with the answer, and is told nothing else."""

import json
import re
from typing import Any

import pyte
import pytest
import recordings
from exported import SHORT, TEXTS, WIDE, plain

from dgemma_local.events import StepDone
from dgemma_local.recording import Piece, Recording
from dgemma_local.ui import export as exports
from dgemma_local.ui.export import Options, cast, drawn, durations, moments, svg, txt

HOSTILE = recordings.hostile()


# Cast

OURS = re.compile(r"\x1b\[(\?2026[hl]|\?7[hl]|\?25[hl]|[\d;]*m|K|J|\d+A)")


def checked_cast(text: str) -> tuple[dict[str, Any], list[tuple[float, str]]]:
    """The header and what is written when, of asciicast v2; asserts what its description says."""
    head, *rest = text.removesuffix("\n").split("\n")
    header = json.loads(head)
    assert header["version"] == 2
    assert all(type(header[name]) is int and header[name] > 0 for name in ("width", "height"))
    assert set(header) <= {"version", "width", "height", "timestamp", "duration", "title", "env", "theme"}
    assert all(type(value) is str for value in header["env"].values())
    theme = header["theme"]
    assert all(
        re.fullmatch("#[0-9a-f]{6}", colour) for colour in (theme["fg"], theme["bg"], *theme["palette"].split(":"))
    )
    assert len(theme["palette"].split(":")) == 8
    events = []
    now = 0.0
    for line in rest:
        second, kind, data = json.loads(line)
        assert type(second) is float
        assert second >= now
        assert (kind, type(data)) == ("o", str)
        now = second
        events.append((second, data))
    assert now <= header["duration"]
    return header, events


def played(text: str) -> pyte.Screen:
    header, events = checked_cast(text)
    window = pyte.Screen(header["width"], header["height"])
    stream = pyte.Stream(window)
    for _second, data in events:
        stream.feed(data)
    return window


def lines_of(window: pyte.Screen) -> list[str]:
    return "\n".join(line.rstrip() for line in window.display).rstrip().split("\n")


@pytest.mark.parametrize(
    "options", [Options(width=100), Options(width=100, view="both", theme="light"), Options(canvas=2, width=100)]
)
def test_a_cast_ends_with_the_answer_and_the_cursor_below_it(options: Options) -> None:
    short = recordings.make(canvases=2, steps=4, length=24, texts=["word ", "on\n", "x", "7"])
    window = played(cast.render(short, options))
    assert lines_of(window) == [line.rstrip() for line in short.text.rstrip("\n").split("\n")]
    assert not window.cursor.hidden
    assert window.cursor.x == 0
    assert window.cursor.y == len(lines_of(window))


def test_each_frame_of_a_cast_is_the_frame_of_its_step() -> None:
    one = recordings.make(canvases=1, steps=4, length=24)
    header, events = checked_cast(cast.render(one, Options(seconds=0.25)))
    shots = drawn(one, Options(), header["width"], header["height"] - 1)
    window = pyte.Screen(header["width"], header["height"])
    stream = pyte.Stream(window)
    for (second, data), number in zip(events, range(4), strict=False):
        stream.feed(data)
        assert second == 0.25 * number
        assert lines_of(window) == plain(shots[number][1])
        assert window.cursor.hidden


def test_a_cast_is_as_large_as_it_is_told_and_does_not_scroll() -> None:
    header, events = checked_cast(cast.render(WIDE, Options(width=40, height=10)))
    assert (header["width"], header["height"]) == (40, 10)
    assert max(data.count("\n") for _second, data in events if "\x1b[?2026h" in data) == 8
    assert header["duration"] == pytest.approx(sum(durations(moments(WIDE, Options()), Options().seconds)))


def test_a_frame_of_a_cast_is_no_higher_than_it_needs() -> None:
    assert cast.render(SHORT, Options(height=cast.HEIGHT)) == cast.render(SHORT, Options())


def test_a_cast_is_the_same_whatever_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = cast.render(SHORT, Options())
    assert "38;2;" in usual
    for name, value in {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "20", "COLORFGBG": "0;15"}.items():
        monkeypatch.setenv(name, value)
    assert cast.render(SHORT, Options()) == usual


def test_no_token_reaches_a_casts_terminal() -> None:
    thought = [tuple(Piece("thought", piece.text) for piece in pieces) for pieces in HOSTILE.pieces]
    for options, pieces in (
        (Options(), HOSTILE.pieces),
        (Options(view="both", width=30, draft="argmax"), HOSTILE.pieces),
        (Options(), thought),
    ):
        made = Recording(HOSTILE.header, HOSTILE.events, HOSTILE.seconds, pieces, HOSTILE.words)
        _header, events = checked_cast(cast.render(made, options))
        for _second, data in events:
            rest = OURS.sub("", data).replace("\r\n", "").replace("\r", "")
            assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", rest), repr(rest)
            data.encode()


# Text


def test_text_holds_every_step_with_its_marks_and_ends_with_the_answer() -> None:
    text = txt.render(SHORT, Options())
    assert [f"canvas {c + 1} · step {s + 1} of" in text for c in (0, 1) for s in range(4)] == [True] * 8
    assert text.endswith("\n\n" + SHORT.text.rstrip("\n") + "\n")
    head, *steps = text.split("─" * txt.WIDTH + "\n")
    assert len(steps) == 8
    assert text.count("replaced") == 1
    assert head.startswith("synthetic · seed ")
    for mark, name in (("+", "newly frozen"), ("*", "replaced"), ("-", "thawed"), ("~", "re-randomised")):
        assert f"{mark} {name}" in head
    assert set(re.sub(r"[^-+*~.?]", "", steps[0].split("\n")[3])) <= set("+~")
    shown = txt.render(SHORT, Options(canvas=2, step=1))
    assert "canvas 2 · step 1 of" in shown
    assert shown.count("step 1 of") == 1
    assert shown.endswith("\n\n" + SHORT.text.rstrip("\n") + "\n")


def test_text_holds_no_escape() -> None:
    for options in (Options(), Options(view="grid", width=30)):
        text = txt.render(HOSTILE, options)
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
        text.encode()


def test_a_damaged_recording_is_exported_up_to_the_damage() -> None:
    count = next(n for n, event in enumerate(SHORT.events) if isinstance(event, StepDone) and event.canvas == 1) + 1
    cut = Recording(SHORT.header, SHORT.events[:count], SHORT.seconds[:count], SHORT.pieces[:count], SHORT.words)
    assert "5 denoising steps" in svg.render(cut, Options())
    assert not played(cast.render(cut, Options())).cursor.hidden
    assert txt.render(cut, Options()).count("step 1 of") == 2


def test_the_same_recording_makes_the_same_file() -> None:
    for render in TEXTS.values():
        assert render(SHORT, Options()) == render(recordings.make(canvases=2, steps=4, length=32), Options())
    assert exports.SUFFIXES == (".svg", ".html", ".cast", ".gif", ".png", ".txt")
