"""`dgemma replay`: what it prints, what it refuses, and what it leaves on a terminal."""

import fcntl
import gzip
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyte
import pytest
import recordings
from typer.testing import CliRunner

from dgemma_local import cli, cli_replay
from dgemma_local.errors import INTERRUPTED, RecordingError, UsageError
from dgemma_local.recording import Piece, Recording
from dgemma_local.states import summary
from dgemma_local.ui import export
from dgemma_local.ui.frame import frame, marked
from dgemma_local.ui.paint import sgr
from dgemma_local.ui.palette import Chrome, Ink, look
from dgemma_local.ui.player import Player
from dgemma_local.ui.replay import sight, usual
from dgemma_local.ui.tape import Tape
from dgemma_local.ui.terminal import Terminal

ROOT = Path(__file__).parents[2]
ANSWER = "Hi there\n  two  lines"
CANVASES, STEPS, LENGTH = 2, 4, 16


def made(answer: str = ANSWER, **rest: Any) -> Recording:
    """A recording whose answer is known, though its tokens read otherwise."""
    found = recordings.make(**({"canvases": CANVASES, "steps": STEPS, "length": LENGTH} | rest))
    found.pieces = [() for _ in found.events]
    found.pieces[-1] = (Piece("thought", "hm"), Piece("answer", answer)) if answer else ()
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    recordings.write(path, made())
    return path


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


# On a terminal


class Theatre:
    """`dgemma replay` on a pseudo-terminal, seen through a terminal emulator."""

    def __init__(
        self,
        *arguments: object,
        size: tuple[int, int] = (24, 100),
        stdin: Path | None = None,
        before: str = "",
        shell: bool = False,
        **environment: str,
    ) -> None:
        self.master, slave = pty.openpty()
        self.resize(*size, stands=False)
        self.mode = termios.tcgetattr(slave)
        kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLORTERM", "COLUMNS", "LINES")}
        source = slave if stdin is None else os.open(stdin, os.O_RDONLY)
        self.process = subprocess.Popen(
            [
                *([sys.executable, str(ROOT / "tests" / "jobs.py")] if shell else []),
                sys.executable,
                "-c",
                f"{before}\nfrom dgemma_local.__main__ import main; main()",
                "replay",
                *map(str, arguments),
            ],
            stdin=source,
            stdout=slave,
            stderr=slave,
            env=kept | {"TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONPATH": str(ROOT)} | environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(1, termios.TIOCSCTTY, 0),
        )
        if source != slave:
            os.close(source)
        self.slave = slave
        self.screen = pyte.Screen(size[1], size[0])
        self.stream = pyte.ByteStream(self.screen)
        self.raw = b""

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display if line.strip()]

    def resize(self, lines: int, columns: int, *, stands: bool = True) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        if stands:
            self.screen.resize(lines, columns)

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def read(self, seconds: float) -> bool:
        """Whether something came."""
        if not select.select([self.master], [], [], seconds)[0]:
            return False
        data = os.read(self.master, 65536)
        self.raw += data
        self.stream.feed(data)
        return bool(data)

    def until(self, text: str) -> list[str]:
        """The screen, once it shows `text`, a pattern."""
        deadline = time.monotonic() + 20
        while not any(re.search(text, line) for line in self.lines):
            self.read(0.05)
            assert time.monotonic() < deadline, f"no {text}:\n" + "\n".join(self.lines)
        return self.lines

    def left(self) -> int:
        """The exit code, once all is read."""
        deadline = time.monotonic() + 20
        while self.process.poll() is None:
            self.read(0.05)
            assert time.monotonic() < deadline, "\n".join(self.lines)
        while self.read(0.05):
            pass
        return self.process.returncode


@contextmanager
def theatre(*arguments: object, **rest: Any) -> Iterator[Theatre]:
    found = Theatre(*arguments, **rest)
    try:
        yield found
        # whatever happened, the terminal is as it was
        assert termios.tcgetattr(found.slave) == found.mode
        assert not found.screen.cursor.hidden
    finally:
        found.process.kill()
        found.process.wait()
        os.close(found.master)
        os.close(found.slave)


LEFT, RIGHT, UP, DOWN = "\x1b[D", "\x1b[C", "\x1b[A", "\x1b[B"
END = [*ANSWER.split("\n"), summary(Tape(made()).end())]


def test_it_plays_to_its_end_and_stays_there_until_it_is_left(file: Path) -> None:
    with theatre(file, "--slow", "0.05") as stage:
        lines = stage.until("8 of 8 · canvas 2 of 2 · paused")
        assert any("canvas 2 · step 4" in line for line in lines)
        stage.press("q")
        assert stage.left() == 0
        assert stage.lines == END
        assert set(re.findall(rb"(\d) of 8 ", stage.raw)) >= {b"1", b"8"}


def test_keys_pause_step_and_jump(file: Path) -> None:
    with theatre(file, "--slow", "60") as stage:
        stage.until("1 of 8 .* playing")
        stage.press(" ")
        stage.until("1 of 8 .* paused")
        stage.press(RIGHT + RIGHT)
        stage.until("3 of 8 .* paused")
        stage.press(LEFT)
        stage.until("2 of 8 .* paused")
        stage.press(DOWN)
        stage.until("5 of 8 · canvas 2 of 2")
        stage.press("\x1b[H")
        stage.until("1 of 8 · canvas 1 of 2")
        stage.press("g")
        stage.until("go to step, 1 to 8: _")
        stage.press("7\r")
        stage.until("7 of 8 · canvas 2 of 2 · paused")
        stage.press("+ ")
        stage.until("7 of 8 .* playing · 2×")
        stage.press("\x1b")
        assert stage.left() == 0
        assert stage.lines == END


def test_a_position_is_picked_and_its_past_read(file: Path) -> None:
    with theatre(file, "--slow", "60") as stage:
        stage.until("playing")
        stage.press("\t" + RIGHT)
        lines = stage.until("canvas 1, position 2: ")
        assert any(line.startswith("> step") for line in lines)
        stage.press("\t")
        stage.until("lists the keys")
        stage.press("?")
        stage.until("space play, pause .* step")
        stage.press("?q")
        assert stage.left() == 0
        assert stage.lines == END


def test_a_token_is_found(file: Path) -> None:
    tape = Tape(made())
    word = next(w.text for w in tape.recording.words.values() if w.text.isalpha() and tape.find(w.text))
    first = tape.find(word)[0]
    with theatre(file, "--slow", "60") as stage:
        stage.until("playing")
        stage.press(f"f{word}\r")
        stage.until(f"^.{{0,60}} {first.step + 1} of 8 .* 1 of {len(tape.find(word))} found")
        stage.until(f"position {first.position + 1}: ")
        stage.press("q")
        assert stage.left() == 0


def test_ctrl_c_gives_the_terminal_back_and_leaves_the_answer(file: Path) -> None:
    with theatre(file, "--slow", "60") as stage:
        stage.until("playing")
        stage.press("\x03")
        assert stage.left() == INTERRUPTED
        assert stage.lines == [*END, "interrupted"]


def test_being_ended_gives_the_terminal_back(file: Path) -> None:
    with theatre(file, "--slow", "60") as stage:
        stage.until("playing")
        stage.process.send_signal(signal.SIGTERM)
        assert stage.left() == 128 + signal.SIGTERM


def test_views_themes_and_sizes_change_without_residue(file: Path) -> None:
    with theatre(file, "--slow", "60") as stage:
        stage.until("playing")
        for keys in ("v", "v", "t", "d", "\t", "?", "?", "t"):
            stage.press(keys)
            stage.read(0.3)
        for lines, columns in ((40, 120), (12, 40), (24, 100)):
            before = len(stage.raw)
            stage.resize(lines, columns)
            deadline = time.monotonic() + 20
            while len(stage.raw) == before and time.monotonic() < deadline:
                stage.read(0.1)
            stage.until("1 of 8")
            assert sum("1 of 8" in line for line in stage.lines) == 1
        stage.press("q")
        assert stage.left() == 0
        assert stage.lines == END


def test_the_screen_is_no_higher_than_it_needs_and_takes_another_theme_whole(file: Path) -> None:
    light, dark = (sgr(look(Ink(Chrome.STATUS), theme), "256").encode() for theme in ("light", "dark"))
    with theatre(file, "--slow", "60", size=(40, 100)) as stage:
        stage.until("playing")
        assert [i for i, line in enumerate(stage.screen.display) if "1 of 8" in line] == [usual(LENGTH)]
        assert dark in stage.raw and light not in stage.raw
        stage.press("t?")
        stage.until("space play, pause")
        drawn = stage.raw.rpartition(b"\x1b[J")[2]
        assert light in drawn and dark not in drawn
        stage.press("q")
        assert stage.left() == 0


def test_a_dumb_terminal_gets_frames_one_beneath_another_and_no_escape(file: Path) -> None:
    with theatre(file, "--slow", "0", TERM="dumb") as stage:
        assert stage.left() == 0
        assert b"\x1b" not in stage.raw
        said = stage.raw.decode().replace("\r\n", "\n")
        heads = re.findall(r"canvas (\d) · step (\d)", said)
        assert heads == [(str(canvas), str(step)) for canvas in (1, 2) for step in (1, 2, 3, 4)]
        assert said.endswith("\n".join(END) + "\n")


def test_frames_one_beneath_another_are_the_live_views(tmp_path: Path) -> None:
    recordings.write(tmp_path / "run.jsonl", made(length=96, steps=12))
    tape, top, expected = Tape(made(length=96, steps=12)), 0, []
    for step in range(len(tape)):
        top = 0 if step in tape.firsts else top
        shot = frame(tape.seen(step), sight(Player(tape=tape)), 11, usual(96), tail=tape.tail(step), top=top)
        top = shot.top
        expected += [line for line in marked(shot.rows) if line]
    with theatre(tmp_path / "run.jsonl", "--slow", "0", size=(24, 12), TERM="dumb") as stage:
        assert stage.left() == 0
        said = [line for line in stage.raw.decode().split("\r\n") if line]
    assert said == [*expected, *END[:-1], summary(tape.end())]


def test_a_hostile_recording_gives_the_terminal_nothing_to_obey(tmp_path: Path) -> None:
    recordings.write(tmp_path / "h.jsonl", recordings.hostile())
    with theatre(tmp_path / "h.jsonl", "--slow", "0.02") as stage:
        stage.until("10 of 10 .* paused")
        stage.press("\t" + RIGHT * 5 + "q")
        assert stage.left() == 0
    obeyed = set(re.findall(r"\x1b(?:\[[0-9;?]*[A-Za-z]|.)", stage.raw.decode()))
    assert {re.sub(r"[\d;]+", "", each) for each in obeyed} <= {
        "\x1b[?h",
        "\x1b[?l",
        "\x1b[m",
        "\x1b[K",
        "\x1b[J",
        "\x1b[A",
    }
    assert not set(stage.raw.decode()) & {*map(chr, range(0x80, 0xA0)), "\x07", "\x00", "\x7f"}


def test_one_step_and_a_canvas_larger_than_the_terminal(tmp_path: Path) -> None:
    recordings.write(tmp_path / "one.jsonl", made(canvases=1, steps=1))
    recordings.write(tmp_path / "huge.jsonl", made(canvases=1, steps=2, length=3000))
    with theatre(tmp_path / "one.jsonl", "--slow", "0") as stage:
        stage.until("1 of 1 · canvas 1 of 1 · paused")
        stage.press("q")
        assert stage.left() == 0
    with theatre(tmp_path / "huge.jsonl", "--slow", "60") as stage:
        stage.until("1 of 2 · canvas 1 of 1 · playing")
        stage.press(RIGHT + "\t" + DOWN * 3)
        stage.until("position ")
        stage.press("q")
        assert stage.left() == 0
        assert stage.lines[: len(ANSWER.split("\n"))] == ANSWER.split("\n")


def test_the_player_begins_with_the_wanted_canvas(file: Path) -> None:
    with theatre(file, "--canvas", "2", "--slow", "60") as stage:
        stage.until("5 of 8 · canvas 2 of 2 · playing")
        stage.press("q")
        assert stage.left() == 0


def test_keys_come_from_the_terminal_while_the_recording_comes_through_a_pipe(file: Path) -> None:
    with theatre("-", "--slow", "60", stdin=file) as stage:
        stage.until("1 of 8 .* playing")
        stage.press(RIGHT)
        stage.until("2 of 8 .* paused")
        stage.press("q")
        assert stage.left() == 0
        assert stage.lines == END


def test_without_any_keys_it_plays_once_and_ends(file: Path) -> None:
    none = "from dgemma_local.ui.keys import Keys; Keys.open = classmethod(lambda cls: None)"
    with theatre(file, "--slow", "0.03", before=none) as stage:
        assert stage.left() == 0
        assert stage.lines == END
    assert set(re.findall(rb"(\d) of 8 ", stage.raw)) >= {b"1", b"8"}


def test_a_terminal_is_no_recording(file: Path) -> None:
    with theatre("-") as stage:
        assert stage.left() == RecordingError.exit_code
        assert stage.lines[0] == "error: no recording comes from standard input"


def test_ctrl_z_gives_the_terminal_back_and_no_time_passes(file: Path) -> None:
    with theatre(file, "--slow", "0.5", shell=True) as stage:
        stage.until("1 of 8 .* playing")
        stage.press("\x1a")
        lines = stage.until(r"\[stopped: ECHO ICANON\]")
        assert not any("of 8" in line for line in lines) and not stage.screen.cursor.hidden
        assert stage.raw.index(b"?2004h") < stage.raw.index(b"?2004l") < stage.raw.index(b"[stopped")
        time.sleep(2)  # four steps
        since = len(stage.raw)
        stage.press("fg\n")
        stage.until("8 of 8 .* paused")
        assert b"?2004h" in stage.raw[since:]
        assert re.search(rb"[12] of 8", stage.raw[since:])  # where it was, and not four steps on
        stage.press("q")
        assert stage.left() == 0
        assert stage.lines[-len(END) - 1 :] == [*END, "[ended: ECHO ICANON]"]


def test_in_the_background_it_waits_and_draws_nothing(file: Path) -> None:
    with theatre(file, "--slow", "0.1", shell=True) as stage:
        stage.until("playing")
        stage.press("\x1a")
        stage.until(r"\[stopped")
        stage.press("bg\n")
        stage.until("in the background")
        since = len(stage.raw)
        assert not stage.read(1)
        stage.press("fg\n")
        stage.until("8 of 8 .* paused")
        assert b"?2004h" in stage.raw[since:]
        stage.press("q")
        assert stage.left() == 0
        assert stage.lines[-1] == "[ended: ECHO ICANON]" and stage.raw.count(b"[stopped") == 1


def test_an_arrow_that_comes_in_pieces_is_no_escape(file: Path) -> None:
    with theatre(file, "--slow", "60") as stage:
        stage.until("1 of 8 .* playing")
        stage.press("\x1b")
        stage.read(0.15)
        stage.press("[C")
        stage.until("2 of 8 .* paused")
        stage.press("\t")
        stage.until("position 1: ")
        stage.press("x\x1b")  # in one piece with another key
        while any("position 1: " in line for line in stage.lines):
            stage.read(0.1)
        stage.press("\x1b")
        assert stage.left() == 0


def test_a_terminal_that_knows_few_signs_is_told_and_gets_the_answer(file: Path) -> None:
    with theatre(file, PYTHONIOENCODING="ascii") as stage:
        assert stage.left() == 0
        assert stage.lines[0].startswith("the player needs a terminal that knows UTF-8")
        assert stage.lines[1:3] == END[:2] and b"\x1b[?" not in stage.raw and b"step 1" not in stage.raw


@pytest.mark.parametrize("held", [True, False])
def test_being_ended_waits_for_no_terminal_that_takes_nothing(file: Path, held: bool) -> None:
    with theatre(file, "--slow", "0.02", "--view", "both", size=(60, 300)) as stage:
        stage.until("1 of 8")
        if held:
            stage.press("\x13")
            time.sleep(0.3)
        else:
            stage.press("t" * 2000)  # the whole screen, so many times, and nobody reads
            time.sleep(1)
        stage.process.send_signal(signal.SIGTERM)
        stage.process.wait(10)
        assert stage.left() == 128 + signal.SIGTERM
        if not held:
            stage.screen.cursor.hidden = False  # nothing could be written there
