"""Recordings as SVG, cast and text; files are written whole or not at all. Pixels and HTML have tests of their own."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyte
import pytest
import recordings
from rich.cells import cell_len

from dgemma_local.errors import RecordingError, UsageError
from dgemma_local.events import StepDone
from dgemma_local.recording import Piece, Recording, Word
from dgemma_local.states import State, follow
from dgemma_local.ui import export as exports
from dgemma_local.ui.export import (
    HOLD_SECONDS,
    Options,
    cast,
    drawn,
    durations,
    export,
    html,
    moments,
    sight,
    svg,
    tails,
    txt,
)
from dgemma_local.ui.frame import frame
from dgemma_local.ui.palette import Ink, Theme, look
from dgemma_local.ui.status import legend_height

SVG = "{http://www.w3.org/2000/svg}"
SHORT = recordings.make(canvases=2, steps=4, length=32)
LONG = recordings.make(canvases=3, steps=40, length=16)
WIDE = recordings.make(canvases=1, steps=4, length=128)
LETTERS = recordings.make(
    canvases=1, steps=3, length=24, texts=["漢字", "\U0001f600", "e\u0301", "a\U00020000b", "x ", "7"]
)
HOSTILE = recordings.hostile()
TEXTS = {".svg": svg.render, ".cast": cast.render, ".txt": txt.render}


# Which moments


def test_every_step_is_a_moment_and_canvas_and_step_choose_among_them() -> None:
    def places(**options: Any) -> list[tuple[int, int]]:
        return [(seen.step.canvas, seen.step.step) for seen in moments(SHORT, Options(**options)) if seen.step]

    assert places() == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert places(canvas=2) == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert places(canvas=2, step=3) == [(1, 2)]
    assert places(step=3) == [(0, 2), (1, 2)]


def test_a_moment_knows_what_came_before_it_though_that_is_not_shown() -> None:
    events = zip(SHORT.events, SHORT.seconds, strict=True)
    last = [seen for seen in follow(events, frozenset(SHORT.header.ends)) if seen.step is not None][-1]
    assert moments(SHORT, Options(canvas=2, step=4)) == [last]


@pytest.mark.parametrize(
    ("options", "what", "fix"),
    [
        (Options(canvas=3), "no canvas 3", "1 to 2"),
        (Options(canvas=0), "no canvas 0", "1 to 2"),
        (Options(step=5), "no step 5", "1 to 4"),
        (Options(canvas=1, step=0), "no step 0", "1 to 4"),
    ],
)
@pytest.mark.parametrize("render", TEXTS.values())
def test_what_is_not_there_is_said_with_what_is(render: Any, options: Options, what: str, fix: str) -> None:
    with pytest.raises(RecordingError, match=what) as error:
        render(SHORT, options)
    assert fix in error.value.fix


def test_a_recording_without_a_step_has_nothing_to_show() -> None:
    with pytest.raises(RecordingError, match="no denoising step"):
        moments(Recording(SHORT.header, SHORT.events[:1], SHORT.seconds[:1], SHORT.pieces[:1]), Options())


def test_a_canvas_goes_on_in_the_line_that_was_begun() -> None:
    lines = recordings.make(canvases=3, steps=3, length=8, texts=["a", "bc", "\n"])
    text = "".join(piece.text for pieces in lines.pieces[:5] for piece in pieces)
    assert len(text) >= 8
    found = tails(lines, 80)
    assert found[0] == ""
    assert found[1] == text.rstrip("\n").rpartition("\n")[2] + "\n" * (len(text) - len(text.rstrip("\n")))
    assert found[2] != found[1]


def test_of_a_long_line_the_last_rows_are_kept_and_each_step_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one_line = recordings.make(canvases=6, steps=3, length=64, texts=["abcdefgh"])
    before = tails(one_line, 30)
    most = exports.MOST_TAIL * 30
    assert len(before[0] + before[1]) > 0 and all(len(each) <= most for each in before.values())
    assert max(map(len, before.values())) > most - 30
    whole = "abcdefgh" * 64 * 5
    assert whole.endswith(before[5]) and (len(whole) - len(before[5])) % 30 == 0  # columns stay
    calls = []
    real = exports.frame
    monkeypatch.setattr(exports, "frame", lambda *given, **named: calls.append(1) or real(*given, **named))
    drawn(one_line, Options(), 30, 200)
    assert len(calls) == 18
    calls.clear()
    svg.render(LONG, Options())
    assert len(calls) == svg.MOST_FRAMES


def test_a_long_token_is_drawn_in_part_and_told_whole() -> None:
    long = recordings.make(canvases=1, steps=2, length=8, texts=["x" * 5000])
    for suffix, render in TEXTS.items():
        drawing = render(long, Options()) if suffix != ".txt" else render(long, Options()).partition("═")[0]
        if suffix == ".svg":
            drawing = re.sub("<desc.*?</desc>", "", drawing)
        if suffix in (".svg", ".txt"):
            assert drawing.count("x") < 8 * 2 * 300, suffix
    named = recordings.make(canvases=1, steps=2, length=8, texts=lambda token: Word("y" * 5000, control=True))
    assert "y" * 200 in html.render(named, Options()) and "y" * 300 not in html.render(named, Options())
    assert "x" * 5000 in txt.render(long, Options())
    assert "x" * 5000 in long.text and "…" in (ET.fromstring(svg.render(long, Options())).findtext(f"{SVG}desc") or "")


def test_what_is_said_of_a_picture_holds_no_sign_that_nobody_sees() -> None:
    text = svg.render(recordings.make(model="a\u202eb\u200bc", texts=["\u202e\u200b\u2066"]), Options())
    assert not re.search("[\u200b\u202e\u2066]", text)


@pytest.mark.parametrize("view", ["text", "grid", "both"])
@pytest.mark.parametrize("width", [40, 80, 120])
def test_frames_are_of_one_height_and_show_all_of_it(view: Any, width: int) -> None:
    options = Options(view=view)
    shots = drawn(WIDE, options, width, 200)
    height = len(shots[0][1])
    assert {len(rows) for _seen, rows in shots} == {height}
    assert not any("more rows" in text for _seen, rows in shots for row in rows for text, _ink in row)
    assert height < 60
    above = -1 - legend_height(width, height)
    assert view != "text" or all(rows[above] == [] for _seen, rows in shots)
    assert view != "text" or any(rows[above - 1] for _seen, rows in shots)
    assert len(drawn(WIDE, options, width, 4)[0][1]) == 4
    assert len(drawn(WIDE, Options(height=9), width, 200)[0][1]) == 9


def test_a_grid_that_is_higher_than_its_text_is_shown_whole() -> None:
    digits = recordings.make(canvases=1, steps=2, length=256, texts=["7"])
    rows = drawn(digits, Options(view="both"), 80, 200)[0][1]
    assert not any("more rows" in text for row in rows for text, _ink in row)
    assert len(rows) < 24


def test_a_window_goes_on_from_the_frame_before() -> None:
    high = recordings.make(canvases=1, steps=12, length=128)
    looked = sight(high, Options())
    tops = [0]
    for seen, rows in drawn(high, Options(), 8, 8):
        shot = frame(seen, looked, 8, 8, top=tops[-1])
        assert rows == shot.rows
        tops.append(shot.top)
    assert tops[1:] != [frame(seen, looked, 8, 8).top for seen in moments(high, Options())]


def test_the_last_moment_of_a_canvas_is_shown_longer_and_the_last_of_all_longest() -> None:
    seen = moments(SHORT, Options())
    found = durations(seen, 0.5)
    assert found[:3] == [0.5] * 3
    assert found[4:7] == [0.5] * 3
    assert 0.5 < found[3] < found[7] == HOLD_SECONDS


# Files


@pytest.mark.parametrize("suffix", TEXTS)
def test_the_suffix_says_the_format_in_capitals_too(suffix: str, tmp_path: Path) -> None:
    for name in (f"a{suffix}", f"b{suffix.upper()}"):
        export(SHORT, tmp_path / name, Options())
        assert (tmp_path / name).read_text(encoding="utf-8") == TEXTS[suffix](SHORT, Options())
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"a{suffix}", f"b{suffix.upper()}"]


@pytest.mark.parametrize("name", ["a", "a.mp4", "a.svg.gz", ".svg"])
def test_another_suffix_is_refused_with_those_there_are(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        export(SHORT, tmp_path / name, Options())
    assert all(suffix in error.value.fix for suffix in (".svg", ".html", ".cast", ".gif", ".png", ".txt"))
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "file").write_text("")
    for path in (
        tmp_path / "folder.svg",
        tmp_path / "absent" / "a.svg",
        tmp_path / "file" / "a.svg",
        tmp_path / f"{'x' * 300}.svg",
    ):
        with pytest.raises(RecordingError, match="cannot be written: ") as error:
            export(SHORT, path, Options())
        assert "None" not in error.value.what
        assert "--export" in error.value.fix
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.svg"]


def test_what_was_there_stays_until_the_new_file_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")

    def full(self: Path, data: bytes) -> int:
        os.close(os.open(self, os.O_CREAT | os.O_WRONLY))
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(RecordingError, match="No space left on device"):
            export(SHORT, path, Options())
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    with path.open() as reader:
        export(SHORT, path, Options())
        assert reader.read() == "before"
    assert path.read_text(encoding="utf-8") == txt.render(SHORT, Options())


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_what_is_no_regular_file_is_left_alone(tmp_path: Path, kind: str, link: bool) -> None:
    there = path = tmp_path / "there.txt"
    if kind == "device":
        if not link:
            path = there = Path("/dev/null")
        else:
            there = Path("/dev/null")
    else:
        os.mkfifo(there)
    if link:
        path = tmp_path / "link.txt"
        path.symlink_to(there)
    before = there.stat()
    with pytest.raises(RecordingError, match="it is no regular file"):
        exports._target(path)
    if path.suffix:
        with pytest.raises(RecordingError, match="it is no regular file"):
            export(SHORT, path, Options())
    assert os.path.samestat(before, there.stat()) and not there.is_file()


def test_a_loop_of_links_is_said(tmp_path: Path) -> None:
    path = tmp_path / "loop.txt"
    path.symlink_to(path)
    with pytest.raises(RecordingError, match="Too many levels of symbolic links"):
        export(SHORT, path, Options())
    assert path.is_symlink()


def test_the_longest_name_there_can_be_is_written(tmp_path: Path) -> None:
    path = tmp_path / f"{'x' * 251}.txt"
    export(SHORT, path, Options())
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link.txt").symlink_to(tmp_path / "real" / "a.txt")
    export(SHORT, tmp_path / "link.txt", Options())
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "real" / "a.txt").read_text(encoding="utf-8") == txt.render(SHORT, Options())


def test_formats_are_imported_when_they_are_asked_for() -> None:
    code = (
        "import sys, dgemma_local.ui.export;"
        "bad = [n for n in sys.modules if n.startswith(('dgemma_local.ui.export.', 'PIL', 'torch'))];"
        "sys.exit(' '.join(bad) or 0)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, found.stderr) == (0, "")


# SVG


def classes(root: ET.Element, css: str) -> dict[str, tuple[float, float]]:
    """When the groups of each class are visible: from, and to, in seconds."""
    cycle = float(re.search(r"animation:([\d.]+)s step-end infinite", css)[1])  # type: ignore[index]
    names = dict(re.findall(r"\.(k\d+)\{animation-name:(k\d+)\}", css))
    shares = {
        name: float(share) for name, share in re.findall(r"@keyframes (k\d+)\{0%\{visibility:visible\}([\d.]+)%", css)
    }
    delays = {name: float(delay) for name, delay in re.findall(r"\.(d\d+)\{animation-delay:(-?[\d.]+)s\}", css)}
    found = {}
    for element in root.iter():
        kinds = element.get("class", "").split()
        if "m" in kinds:
            _, kind, delay = kinds
            start = cycle + delays[delay]
            found[" ".join(kinds)] = (start, start + cycle * shares[names[kind]] / 100)
    return found


def letters(element: ET.Element) -> Iterable[tuple[int, int, str]]:
    """y, x and letter of every text below."""
    for text in element.iter(f"{SVG}text"):
        places = [int(x) for x in text.get("x", "").split()]
        parts = [text.text or ""] if len(places) == 1 else list(text.text or "")
        yield from ((int(text.get("y", "")), *pair) for pair in zip(places, parts, strict=True))


def screen(marks: Iterable[tuple[int, int, str]]) -> list[str]:
    """Letters as lines of text."""
    table: dict[int, dict[int, str]] = {}
    for y, x, letter in marks:
        at = (x - svg.MARGIN) // svg.COLUMN
        assert at not in table.setdefault((y - svg.MARGIN) // svg.LINE, {}), "two letters in one place"
        table[(y - svg.MARGIN) // svg.LINE][at] = letter
    lines = []
    for y in range(max(table) + 1):
        line = ""
        for x, letter in sorted(table.get(y, {}).items()):
            line += " " * (x - cell_len(line)) + letter
        lines.append(line.rstrip())
    return lines


def visible(root: ET.Element, css: str, second: float) -> Iterable[tuple[int, int, str]]:
    spans = classes(root, css)
    for group in root.iter(f"{SVG}g"):
        if group.find(f"{SVG}text") is not None:
            start, end = spans.get(group.get("class", ""), (0, 1e9))
            if start - 0.02 <= second < end - 0.02:
                yield from letters(group)


def plain(rows: list[Any]) -> list[str]:
    lines = ["".join(text for text, _ink in row).rstrip() for row in rows]
    return lines[: max(n for n, line in enumerate(lines, 1) if line)]


@pytest.mark.parametrize(
    ("recording", "options"),
    [
        (SHORT, Options()),
        (SHORT, Options(theme="light", view="both", width=100)),
        (SHORT, Options(width=44)),
        (LETTERS, Options(draft="argmax")),
    ],
)
def test_each_frame_of_an_svg_is_the_frame_of_its_step(recording: Recording, options: Options) -> None:
    root = ET.fromstring(svg.render(recording, options))
    css = root.findtext(f"{SVG}style") or ""
    shots = drawn(recording, options, options.width or svg.WIDTH, svg.MOST_ROWS)
    waits = durations([seen for seen, _rows in shots], options.seconds)
    for start, wait, (_seen, rows) in zip([0.0, *accumulate(waits)], waits, shots, strict=False):
        for second in (start, start + wait / 2, start + wait - 0.05):
            assert screen(visible(root, css, second)) == plain(rows)


def test_a_letter_of_more_than_one_unit_has_an_element_of_its_own() -> None:
    """Renderers do not agree on how many of the x it takes."""
    texts = [text.text or "" for text in ET.fromstring(svg.render(LETTERS, Options())).iter(f"{SVG}text")]
    assert {"\U0001f600", "e\u0301", "\U00020000"} <= set(texts)
    assert not any(
        len(text.encode("utf-16-le")) > 2 and re.search("[\u0301\U00020000\U0001f600].", text) for text in texts
    )
    assert any(len(text) > 1 for text in texts)


def test_where_nothing_moves_the_last_frame_stands() -> None:
    root = ET.fromstring(svg.render(SHORT, Options()))
    hidden = {
        id(each) for group in root.iter(f"{SVG}g") if group.get("visibility") == "hidden" for each in group.iter()
    }
    marks = [mark for group in root.iter(f"{SVG}g") if id(group) not in hidden for mark in letters(group)]
    rows = drawn(SHORT, Options(), svg.WIDTH, svg.MOST_ROWS)[-1][1]
    assert screen(marks) == plain(rows)
    css = root.findtext(f"{SVG}style") or ""
    before, motion = css.split("@media (prefers-reduced-motion:no-preference){")
    assert "animation" not in before
    assert "animation-name" in motion
    assert hidden


def test_an_svg_looks_as_the_palette_says() -> None:
    themes: tuple[Theme, ...] = ("dark", "light")
    for theme in themes:
        root = ET.fromstring(svg.render(SHORT, Options(theme=theme)))
        css = root.findtext(f"{SVG}style") or ""
        rules = dict(re.findall(r"text\.(i\d+)\{(.*?)\}", css))
        grounds = dict(re.findall(r"path\.(i\d+)\{(.*?)\}", css))
        shots = drawn(SHORT, Options(theme=theme), svg.WIDTH, svg.MOST_ROWS)
        kinds = {ink.kind for _seen, rows in shots for row in rows for _text, ink in row}
        assert {State.FROZEN, State.FRESH, State.THAWED, State.REPLACED, State.NOISE} <= kinds
        for state in (State.FROZEN, State.FRESH, State.THAWED, State.REPLACED):
            style = look(Ink(state), theme)
            colour = "#{:02x}{:02x}{:02x}".format(*style.colour)
            if style.reverse:
                assert f"fill:{colour}" in grounds.values()
            else:
                assert any(
                    f"fill:{colour}" in rule
                    and ("font-weight:bold" in rule) == style.bold
                    and ("underline" in rule) == style.underline
                    for rule in rules.values()
                )


def test_a_single_step_does_not_move() -> None:
    text = svg.render(SHORT, Options(canvas=1, step=2))
    assert "animation" not in text
    assert "step 2 of" in "\n".join(screen(letters(ET.fromstring(text))))


def test_of_many_steps_some_are_shown_and_the_file_says_so() -> None:
    every, shown = len(LONG.canvases) * 40, svg.MOST_FRAMES
    assert every > shown
    text = svg.render(LONG, Options())
    root = ET.fromstring(text)
    assert f"{shown} of {every} denoising steps" in (root.findtext(f"{SVG}desc") or "")
    assert "all 8 denoising steps" in (ET.fromstring(svg.render(SHORT, Options())).findtext(f"{SVG}desc") or "")
    css = root.findtext(f"{SVG}style") or ""
    shots = drawn(LONG, Options(), svg.WIDTH, svg.MOST_ROWS, svg.MOST_FRAMES)
    assert len(shots) == shown
    assert screen(visible(root, css, 0)) == plain(shots[0][1])
    end = float(re.search(r"animation:([\d.]+)s", css)[1]) - 0.1  # type: ignore[index]
    assert screen(visible(root, css, end)) == plain(shots[-1][1])


def test_sampling_keeps_both_ends_and_the_order() -> None:
    for count in (1, 2, 3, 9, 100):
        items = list(range(count))
        for most in (2, 3, 8):
            found = exports.sampled(items, most)
            assert found == sorted(set(found))
            assert (found[0], found[-1]) == (0, count - 1)
            assert len(found) == min(count, most)


def test_an_svg_shares_what_stays() -> None:
    """A letter that stands in every frame is in the file once."""
    still = svg.render(SHORT, Options(canvas=1, step=4))
    moving = svg.render(SHORT, Options(canvas=1))
    assert "replaced" in "\n".join(screen(letters(ET.fromstring(still))))
    assert len(list(letters(ET.fromstring(moving)))) < 0.7 * 4 * len(list(letters(ET.fromstring(still))))


ALLOWED = {
    "svg": {"viewBox", "width", "height", "role", "aria-labelledby"},
    "title": {"id"},
    "desc": {"id"},
    "style": set(),
    "rect": {"x", "y", "width", "height", "rx", "fill", "stroke"},
    "g": {"class", "visibility", "stroke", "stroke-width", "opacity"},
    "path": {"class", "d"},
    "text": {"class", "x", "y"},
}


@pytest.mark.parametrize("options", [Options(), Options(draft="argmax", view="both", theme="light", width=30)])
def test_no_token_makes_an_element_or_an_attribute(options: Options) -> None:
    text = svg.render(recordings.hostile(lone=True), options)
    text.encode()
    root = ET.fromstring(text)
    for element in root.iter():
        name = element.tag.removeprefix(SVG)
        assert set(element.attrib) <= ALLOWED[name], name
        assert name != "text" or len(element) == 0
    css = root.findtext(f"{SVG}style") or ""
    for rule in re.split(r"\}\s*", css):
        assert re.fullmatch(r"[-@\w.%:,;{()#' ]*", rule.replace("\n", "")), rule
    assert not re.search(r"url\(|@import|http", css)
    assert text.count("<text") == len(list(root.iter(f"{SVG}text")))
    assert "<!" not in text
    assert "<?" not in text


def test_what_xml_cannot_hold_becomes_a_mark() -> None:
    for code in [*range(0x20), 0x7F, *range(0x80, 0xA0), 0xD800, 0xDFFF, 0xFFFE, 0xFFFF]:
        found = svg.xml(f"a{chr(code)}b")
        assert ET.fromstring(f"<a>{found}</a>").text == found
        assert (chr(code) in found) == (code in (9, 10))
    for sign in ("é", "漢", "\U0001f600", "\ue000", "\ufffd"):
        assert svg.xml(sign) == sign
    assert ET.fromstring(f'<a b="{svg.xml(chr(34) + "<&" + chr(39))}"/>').get("b") == "\"<&'"


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
