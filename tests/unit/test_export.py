"""What is exported of a recording, moment by moment, and the file it is written to: whole, or not at all."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import recordings
from exported import LONG, SHORT, SVG, TEXTS, WIDE

from dgemma_local.errors import RecordingError, UsageError
from dgemma_local.recording import Recording, Word
from dgemma_local.states import follow
from dgemma_local.ui import export as exports
from dgemma_local.ui.export import (
    HOLD_SECONDS,
    Options,
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
from dgemma_local.ui.status import legend_height

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
