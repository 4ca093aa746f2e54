"""`dgemma replay` without a terminal: the answer in a pipe, the past of a position, flags, and exports."""

import gzip
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import recordings
from replayed import ANSWER, STEPS, made
from replayed import file as file
from typer.testing import CliRunner

from dgemma_local import cli, cli_replay
from dgemma_local.errors import RecordingError, UsageError
from dgemma_local.recording import Recording
from dgemma_local.ui import export
from dgemma_local.ui.terminal import Terminal


def dgemma(*arguments: object, stdin: bytes = b"") -> Any:
    return CliRunner().invoke(cli.app, ["replay", *map(str, arguments)], input=stdin)


def error(found: Any, code: int) -> tuple[str, str]:
    """The two lines."""
    assert found.exit_code == code, found.stderr
    what, fix, rest = found.stderr.split("\n")[-3:]
    assert what.startswith("error: ") and fix.startswith("  fix: ") and rest == ""
    assert found.stdout == "" and "Traceback" not in found.stderr
    return what.removeprefix("error: "), fix.removeprefix("  fix: ")


# Without a terminal


def test_a_pipe_gets_the_answer_alone_and_exactly(file: Path) -> None:
    found = dgemma(file)
    assert (found.exit_code, found.stdout, found.stderr) == (0, ANSWER + "\n", "")


@pytest.mark.parametrize(
    ("answer", "written"),
    [("a\n\n\n", "a\n"), ("\n a", "\n a\n"), ("\x1b[2J\x9b\u200e", "�[2J��\n"), ("", ""), ("漢\t", "漢\t\n")],
)
def test_it_ends_in_one_newline_and_keeps_all_that_no_terminal_obeys(tmp_path: Path, answer: str, written: str) -> None:
    recordings.write(tmp_path / "r.jsonl", made(answer))
    assert dgemma(tmp_path / "r.jsonl").stdout == written


def test_a_recording_may_come_through_a_pipe_and_packed(file: Path) -> None:
    for data in (file.read_bytes(), gzip.compress(file.read_bytes())):
        found = dgemma("-", stdin=data)
        assert (found.exit_code, found.stdout) == (0, ANSWER + "\n")


def test_nothing_of_a_model_is_imported_and_no_key_is_waited_for(file: Path) -> None:
    code = (
        "import sys; sys.argv = ['dgemma', 'replay', sys.argv[1]]; from dgemma_local import cli\n"
        "try: cli.main()\n"
        "finally: print(sorted({'torch', 'triton', 'tokenizers', 'safetensors', 'transformers', 'huggingface_hub', "
        "'PIL', 'numpy', 'prompt_toolkit', 'jinja2'} & set(sys.modules)), file=sys.stderr)"
    )
    found = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, timeout=20)
    assert (found.stdout, found.stderr) == (ANSWER + "\n", "[]\n")


def test_a_damaged_recording_is_shown_up_to_the_damage(file: Path) -> None:
    whole = file.read_bytes().splitlines(keepends=True)
    for data, line in ((b"".join(whole[:5]) + whole[5][:40], 6), (b"".join(whole[:3]) + b"\x00\xff\n" + whole[3], 4)):
        file.write_bytes(data)
        found = dgemma(file)
        assert (found.exit_code, found.stdout) == (0, "")
        assert re.search(f"run.jsonl.* line {line}: .*; shown up to there\n$", found.stderr)


def test_a_notice_is_one_line_and_nothing_a_terminal_obeys(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[2J\nb.jsonl"
    recordings.write(path, made())
    path.write_bytes(path.read_bytes()[:-20])
    found = dgemma(path)
    assert "\x1b" not in found.stderr and found.stderr.count("\n") == 1
    assert "\x1b" not in error(dgemma(tmp_path / "\x1b[31mnone"), RecordingError.exit_code)[0]


def test_without_a_step_there_is_nothing_to_play(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recordings.write(path, made())
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    what, _ = error(dgemma(path), RecordingError.exit_code)
    assert what == "there is no denoising step in the recording"


def test_what_is_no_recording_is_said_to_be_none(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for data in (b"", b"\x00" * 100, b"{}\n", b"[]\n", b"\x1f\x8bx"):
        path.write_bytes(data)
        assert "is not a recording" in error(dgemma(path), RecordingError.exit_code)[0]
        assert "standard input is not a recording" in error(dgemma("-", stdin=data), RecordingError.exit_code)[0]
    error(dgemma(tmp_path / "none"), RecordingError.exit_code)
    error(dgemma(tmp_path), RecordingError.exit_code)


# The past of a position


def test_the_past_of_a_position_as_plain_lines(file: Path) -> None:
    found = dgemma(file, "--position", "2", "--canvas", "2")
    first, *spans = found.stdout.splitlines()
    assert found.exit_code == 0 and first.startswith("canvas 2, position 2: ")
    steps = [re.match(r"steps? (\d+)(?:-(\d+))? ", line) for line in spans]
    covered = [i for step in steps if step for i in range(int(step[1]), int(step[2] or step[1]) + 1)]
    assert covered == list(range(1, STEPS + 1)) and "\x1b" not in found.stdout
    assert dgemma(file, "--position", "2").stdout.startswith("canvas 1, position 2: ")


# Flags


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--speed", "nan"], "--speed nan is out of range"),
        (["--speed", "0"], "--speed 0.0 is out of range"),
        (["--speed", "17"], "--speed 17.0 is out of range"),
        (["--slow", "-1"], "--slow -1.0 is out of range"),
        (["--slow", "61"], "--slow 61.0 is out of range"),
        (["--export", "a.txt", "--width", "19"], "--width 19 is out of range"),
        (["--canvas", "3"], "--canvas 3 is not in the recording"),
        (["--canvas", "0"], "--canvas 0 is not in the recording"),
        (["--position", "17"], "--position 17 is not in the recording"),
        (["--position", "0"], "--position 0 is not in the recording"),
        (["--export", "a.png", "--at", "1"], "--at 1 is in each of 2 canvases"),
        (["--export", "a.png", "--at", "5", "--canvas", "1"], "--at 5 is not in the recording"),
        (["--export", "a.png", "--at", "0", "--canvas", "1"], "--at 0 is not in the recording"),
        (["--plot"], "--plot has nothing to act on"),
        (["--plot", "--export", "a.svg"], "--plot has nothing to act on"),
        (["--at", "1", "--plot", "--export", "a.png"], "--plot shows every step, and --at one"),
        (["--plot", "--export", "a.png", "--width", "40"], "--plot shows no canvas, so that --width has no effect"),
        (["--plot", "--export", "a.png", "--view", "grid"], "--plot shows no canvas, so that --view has no effect"),
        (["--plot", "--export", "a.png", "--draft", "argmax"], "--plot shows no canvas, so that --draft has no effect"),
        (["--at", "1"], "--at has nothing to act on"),
        (["--at", "1", "--export", "a.gif"], "--at has nothing to act on"),
        (["--width", "40"], "--width has nothing to act on"),
        (["--speed", "2", "--export", "a.png"], "--speed has nothing to act on"),
        (["--slow", "2", "--export", "a.txt"], "--slow has nothing to act on"),
        (["--width", "40", "--export", "a.html"], "--width has nothing to act on"),
        (["--theme", "dark", "--export", "a.html"], "--theme has nothing to act on"),
        (["--theme", "dark", "--export", "a.txt"], "--theme has nothing to act on"),
        (["--export", "a.png", "--position", "1"], "--export and --position exclude each other"),
        (["--slow", "1", "--position", "1"], "--position plays nothing, so that --slow has no effect"),
        (["--view", "grid", "--position", "1"], "--position plays nothing, so that --view has no effect"),
        (["--export", "a.png", "--export", "a.png"], "the same file is to be exported twice"),
        (["--export", "a.jpg"], "a.jpg cannot be exported: its ending says no format"),
        (["--export", "a.png", "--export", "a"], "a cannot be exported: its ending says no format"),
    ],
)
def test_flags_that_mean_nothing_are_refused_and_nothing_is_written(
    file: Path, flags: list[str], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    assert error(dgemma(file, *flags), UsageError.exit_code)[0] == what
    assert list(file.parent.iterdir()) == [file]


def test_unknown_values_are_refused(file: Path) -> None:
    for flags in (["--view", "x"], ["--draft", "x"], ["--theme", "x"], ["--canvas", "x"], ["--no-such"]):
        error(dgemma(file, *flags), UsageError.exit_code)
    error(dgemma(), UsageError.exit_code)


# Exports


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, export.Options]]:
    """What would be exported."""
    calls: list[tuple[Path, export.Options]] = []

    def take(recording: Recording, path: Path, options: export.Options) -> None:
        calls.append((path, options))
        path.write_bytes(b"x" * 3_560)

    monkeypatch.setattr(export, "export", take)
    return calls


def test_every_export_is_written_and_said(file: Path, exported: list[tuple[Path, export.Options]]) -> None:
    out = [file.with_suffix(suffix) for suffix in export.SUFFIXES]
    found = dgemma(file, *(word for path in out for word in ("--export", path)))
    assert (found.exit_code, found.stdout) == (0, "")
    assert found.stderr == "".join(f"wrote {path} (4 KB)\n" for path in out)
    assert [path for path, _ in exported] == out
    assert all(options == export.Options() for _, options in exported)


def test_flags_become_options(file: Path, exported: list[tuple[Path, export.Options]]) -> None:
    flags = "--canvas 2 --at 3 --view grid --draft argmax --theme light --speed 4 --slow 2 --width 50".split()
    out = [file.with_suffix(suffix) for suffix in (".gif", ".png")]
    assert dgemma(file, *flags, "--export", out[0], "--export", out[1]).exit_code == 0
    wanted = export.Options(theme="light", view="grid", draft="argmax", width=50, canvas=2, step=3, seconds=0.5)
    assert exported == [(out[0], replace(wanted, step=None)), (out[1], wanted)]  # what moves is not of one step
    dgemma(file, "--plot", "--theme", "light", "--export", out[1])
    assert exported[-1][1] == export.Options(theme="light", plot=True)
    dgemma(file, "--speed", "2", "--export", out[0])
    assert exported[-1][1].seconds == export.STEP_SECONDS / 2


def test_a_loop_of_links_is_an_error_of_two_lines(file: Path) -> None:
    loop = file.with_name("loop.svg")
    loop.symlink_to(loop)
    assert "Too many levels" in error(dgemma(file, "--export", loop), RecordingError.exit_code)[0]


def test_the_recording_itself_is_not_exported_onto(file: Path) -> None:
    itself = file.rename(file.with_suffix(".txt"))
    link = file.with_name("link.svg")
    link.symlink_to(itself)
    before = itself.read_bytes()
    for path in (itself, link):
        assert error(dgemma(itself, "--export", path), UsageError.exit_code)[0] == f"{path} is the recording itself"
    assert itself.read_bytes() == before


def test_a_plot_beside_a_canvas_leaves_the_canvas_its_flags(
    file: Path, exported: list[tuple[Path, export.Options]]
) -> None:
    flags = "--plot --width 40 --view grid --export a.png --export a.svg".split()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(file.parent)
        assert dgemma(file, *flags).exit_code == 0
    assert len(exported) == 2


@pytest.mark.parametrize("terminal", [True, False])
def test_what_takes_a_while_is_said_on_a_terminal(file: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    said = []

    class AtOnce:
        daemon = False

        def __init__(self, seconds: float, call: Any, given: list[str]) -> None:
            assert seconds == cli_replay.PATIENCE
            self.given = given

        def start(self) -> None:
            said.extend(self.given)

        def cancel(self) -> None:
            said.append("over")

    monkeypatch.setattr(cli_replay, "Timer", AtOnce)
    monkeypatch.setattr(Terminal, "is_terminal", terminal)
    out = file.with_suffix(".txt")
    assert dgemma(file, "--export", out).exit_code == 0
    assert said == (["reading …", "over", f"drawing {out} …", "over"] if terminal else ["over", "over"])


def test_an_export_of_a_damaged_recording_says_what_is_missing(
    file: Path, exported: list[tuple[Path, export.Options]]
) -> None:
    file.write_bytes(file.read_bytes()[:-30])
    found = dgemma(file, "--export", file.with_suffix(".svg"))
    assert found.exit_code == 0 and len(exported) == 1
    assert re.search(r"shown up to there\nwrote .*run\.svg \(4 KB\)\n$", found.stderr)
