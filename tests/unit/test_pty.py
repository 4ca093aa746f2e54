"""The front ends on a real pseudo-terminal, seen through a terminal emulator."""

import fcntl
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pyte = pytest.importorskip("pyte")

TESTS = Path(__file__).parent.parent
ESCAPE = "\x1b"
PARAGRAPH = "Hi user\n  model model\nHi Hi Hi Hi user user user user"  # over two canvases


@dataclass
class Outcome:
    code: int
    raw: str  # what the terminal got
    lines: list[str]  # what it shows at the end, the blank ones left out
    cursor_hidden: bool
    frames: list[str]  # what it showed whenever something new had come
    piped: str  # stdout, when that is not the terminal


def on_terminal(
    *arguments: str,
    session: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    size: tuple[int, int] = (24, 80),
    told: tuple[int, int] | None = None,
    pipe_stdout: bool = False,
    shell: bool = False,
    meanwhile: Callable[[subprocess.Popen[bytes], int, str], None] | None = None,
) -> Outcome:
    """Runs `dgemma`, with a fake session, on a terminal of lines × columns; `meanwhile` sees all that has come so far.

    told: what the terminal answers when it is asked for its size, if not the truth. shell: under `jobs`.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *(told or size), 0, 0))
    code = f"import fake_session; fake_session.main(*{arguments!r}, **{session or {'text': PARAGRAPH}!r})"
    variables = {
        k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TERM")
    }
    variables |= {"TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONPATH": f"{TESTS}:{TESTS.parent}"} | (
        environment or {}
    )
    process = subprocess.Popen(
        [*([sys.executable, str(TESTS / "jobs.py")] if shell else []), sys.executable, "-c", code],
        stdin=slave,
        stdout=subprocess.PIPE if pipe_stdout else slave,
        stderr=slave,
        env=variables,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    screen = pyte.Screen(size[1], size[0])
    stream = pyte.ByteStream(screen)
    raw = b""
    frames = []
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if not select.select([master], [], [], 0.05)[0]:
            if process.poll() is not None:
                break
            continue
        try:
            chunk = os.read(master, 65536)
        except OSError:  # Linux's end of file on a terminal
            break
        if not chunk:
            break
        raw += chunk
        stream.feed(chunk)
        frames.append("\n".join(screen.display))
        if meanwhile is not None:
            meanwhile(process, master, raw.decode(errors="replace"))
    piped = process.stdout.read().decode() if process.stdout else ""
    process.wait(timeout=5)
    os.close(master)
    if process.stdout:
        process.stdout.close()
    lines = [line.rstrip() for line in screen.display if line.strip()]
    return Outcome(process.returncode, raw.decode(), lines, screen.cursor.hidden, frames, piped)


def run(*arguments: str, **rest: Any) -> Outcome:
    return on_terminal("run", "-p", "Hi", "--seed", "5", *arguments, **rest)


HEAD = [
    "demo model: tiny, trained on a CPU to show a canvas settling; knows little",
    "fake · --seed 5",
]
ANSWER = PARAGRAPH.split("\n")
SUMMARY = "2 canvases in 8 steps (8 saved) · 0 thaws, 0 replacements, 0 corrections"
FOOT = [SUMMARY, "complete: 25 tokens in 2 canvases"]


def test_the_live_view_moves_and_leaves_nothing_but_the_answer() -> None:
    seen = run("--visualize", "--slow", "0.03")
    assert seen.code == 0
    assert seen.lines == HEAD + ANSWER + FOOT
    assert not seen.cursor_hidden
    steps = {match for frame in seen.frames for match in re.findall(r"canvas (\d) · step (\d) of 8", frame)}
    assert steps == {(canvas, step) for canvas in "12" for step in "1234"}


def test_an_unfinished_line_stays_in_view_while_the_next_canvas_settles() -> None:
    seen = run("--visualize", "--slow", "0.03")
    second = [frame for frame in seen.frames if "canvas 2 · step 1" in frame]
    assert second
    for frame in second:
        lines = [line.rstrip() for line in frame.split("\n")]
        assert lines[len(HEAD) :][:2] == ANSWER[:2]  # above
        status = next(i for i, line in enumerate(lines) if line.startswith("canvas 2"))
        assert any(line.startswith("Hi Hi") for line in lines[status + 1 : status + 4])


def test_fast_steps_show_the_last_frame_of_every_canvas() -> None:
    seen = run("--visualize")
    assert "canvas 1 · step 4 of 8" in seen.raw and "canvas 2 · step 4 of 8" in seen.raw


def test_the_answer_goes_to_a_pipe_exactly_and_to_the_terminal_for_the_eye() -> None:
    seen = run("--visualize", "--slow", "0.03", pipe_stdout=True)
    assert seen.piped == PARAGRAPH + "\n"
    assert seen.lines == HEAD + ANSWER + FOOT


def test_without_the_view_a_terminal_gets_no_control_at_all() -> None:
    seen = run(session={"text": "Hi\x1b[2JHi\x07"})
    assert seen.lines == [*HEAD, "Hi�[2JHi�", "complete: 7 tokens in 1 canvas"]
    assert "\x1b[2J" not in seen.raw and "\x07" not in seen.raw


def test_a_pipe_gets_the_exact_bytes() -> None:
    assert run(session={"text": "Hi\x1b[2JHi"}, pipe_stdout=True).piped == "Hi\x1b[2JHi\n"


def test_a_thought_is_dimmed_and_ends_before_the_answer() -> None:
    seen = run("--think", "--show-thinking", session={"text": "<|channel>thought\nuser<channel|>Hi"})
    assert seen.lines == [*HEAD, "user", "Hi", "complete: 6 tokens in 1 canvas"]
    assert "\x1b[2muser" in seen.raw
    assert run("--quiet", session={"text": "<|channel>thought\nuser<channel|>Hi"}).lines[-2:] == [HEAD[0], "Hi"]


@pytest.mark.parametrize("size", [(3, 80), (24, 7), (1, 2)])
def test_small_terminals(size: tuple[int, int]) -> None:
    seen = run("--visualize", size=size, environment={"COLUMNS": "200", "LINES": "90"})
    assert seen.code == 0 and not seen.cursor_hidden
    assert "canvas 1 · step" not in "".join(seen.lines)


def test_a_terminal_that_knows_no_size_is_taken_for_24_by_80() -> None:
    assert run("--visualize", told=(0, 0)).lines == HEAD + ANSWER + FOOT


def test_no_color() -> None:
    seen = run("--visualize", "--slow", "0.03", environment={"NO_COLOR": "1"})
    colours = re.findall(r"\x1b\[(?:\d+;)*(?:3[0-7]|4[0-7]|9[0-7]|38;[\d;]+)m", seen.raw)
    assert not colours
    assert "\x1b[0;1;4m" in seen.raw  # newly frozen, told apart all the same
    assert seen.lines == HEAD + ANSWER + FOOT


def test_a_terminal_that_knows_few_signs_is_told_and_gets_the_text() -> None:
    seen = run("--visualize", environment={"PYTHONIOENCODING": "ascii"})
    assert seen.code == 0
    assert any(line.startswith("--visualize needs") for line in seen.lines)
    assert "step 1 of" not in seen.raw and "\x1b[?25l" not in seen.raw
    assert [line for line in seen.lines if line in ANSWER] == ANSWER


def test_a_terminal_that_cannot_redraw_gets_frame_under_frame() -> None:
    seen = run("--visualize", environment={"TERM": "dumb"}, size=(200, 80))
    assert seen.code == 0
    assert ESCAPE not in seen.raw
    steps = re.findall(r"canvas (\d) · step (\d) of 8", "\n".join(seen.lines))
    assert steps == [(canvas, step) for canvas in "12" for step in "1234"]
    assert any(set(line.strip()) == {"+", "~", " "} or set(line.strip()) == {"+", "~"} for line in seen.lines)  # marks
    first = seen.lines.index("canvas 2 · step 1 of 8") if "canvas 2 · step 1 of 8" in seen.lines else None
    assert first is None or seen.lines[:first].count(ANSWER[0]) >= 1
    assert seen.lines[-len(FOOT) :] == FOOT


@pytest.mark.parametrize("key", ["ctrl-c", "terminate"])
def test_stopping_midway_gives_the_cursor_back(key: str) -> None:
    sent = []

    def press(process: subprocess.Popen[bytes], master: int, raw: str) -> None:
        if "canvas 2 · step 1" in raw and not sent:
            sent.append(key)
            if key == "ctrl-c":
                os.write(master, b"\x03")
            else:
                process.send_signal(signal.SIGTERM)

    seen = run("--visualize", "--slow", "0.05", session={"text": PARAGRAPH, "pause": 0.05}, meanwhile=press)
    assert sent
    assert seen.code == (130 if key == "ctrl-c" else 143)
    assert not seen.cursor_hidden
    assert seen.lines[: len(HEAD) + 2] == HEAD + ANSWER[:2]  # the first canvas stays
    assert not any("· step" in line for line in seen.lines)
    if key == "ctrl-c":
        assert seen.lines[-1].startswith("interrupted")


def test_ctrl_c_without_the_view() -> None:
    sent = []

    def press(_: subprocess.Popen[bytes], master: int, raw: str) -> None:
        if "user user" in raw and not sent:  # of the second canvas, and not committed
            sent.append(os.write(master, b"\x03"))

    seen = run(session={"text": PARAGRAPH, "pause": 0.1}, meanwhile=press)
    assert sent and not seen.cursor_hidden
    assert not any("user user" in line for line in seen.lines)
    assert seen.code == 130
    assert seen.lines[len(HEAD) :][:2] == ANSWER[:2] and seen.lines[-1].startswith("interrupted")


def test_what_is_typed_meanwhile_does_not_move_provisional_text() -> None:
    typed: list[int] = []

    def type_on(_: subprocess.Popen[bytes], master: int, raw: str) -> None:
        if f"{ESCAPE}[0;4m" in raw and len(typed) < 2:
            typed.append(os.write(master, b"ls\r\r"))

    seen = run(session={"text": PARAGRAPH, "pause": 0.1}, meanwhile=type_on)
    assert typed and "ls" not in seen.raw
    assert seen.lines[: len(HEAD + ANSWER)] == HEAD + ANSWER


def test_ctrl_c_ends_a_slow_show() -> None:
    sent: list[float] = []

    def press(_: subprocess.Popen[bytes], master: int, raw: str) -> None:
        if "canvas 1 · step 1" in raw and not sent:
            time.sleep(0.3)  # the next step is there by now, and waits to be shown
            os.write(master, b"\x03")
            sent.append(time.monotonic())

    seen = run("--visualize", "--slow", "10", session={"text": PARAGRAPH}, meanwhile=press)
    assert time.monotonic() - sent[0] < 5
    assert seen.code == 130 and not seen.cursor_hidden
    assert seen.lines[-1].startswith("interrupted")


def keys_for_steps(keys: list[bytes], size: tuple[int, int] = (24, 80)) -> Outcome:
    """A key each time another step stands on the screen."""
    waiting = iter(keys)
    shown: list[str] = []

    def press(_: subprocess.Popen[bytes], master: int, raw: str) -> None:
        steps = re.findall(r"canvas \d · step \d of 8", raw)
        if steps and steps[-1] not in shown and raw.rstrip("\0").endswith("l"):  # the frame is whole
            shown.append(steps[-1])
            os.write(master, next(waiting, b""))

    return run("--visualize", "--step", meanwhile=press, size=size)


def test_a_key_for_every_step() -> None:
    seen = keys_for_steps([b" ", b"\r", b"\x1b[C", b" ", b" ", b"\n", b" ", b" "])
    assert seen.code == 0 and not seen.cursor_hidden
    assert seen.lines == HEAD + ANSWER + FOOT
    shown = list(dict.fromkeys(re.findall(r"canvas (\d) · step (\d) of 8", seen.raw)))
    assert shown == [(canvas, step) for canvas in "12" for step in "1234"]


def test_a_step_waits_for_its_key_and_no_other() -> None:
    began: list[float] = []

    def wait(process: subprocess.Popen[bytes], master: int, raw: str) -> None:
        if "canvas 1 · step 1" in raw and not began:
            began.append(time.monotonic())
            os.write(master, b"x\x1b[200~ \x1b[201~")  # a paste is no key
            time.sleep(0.3)
            os.write(master, b"q")

    seen = run("--visualize", "--step", meanwhile=wait)
    assert "canvas 1 · step 2" not in seen.raw
    assert seen.code == 130 and not seen.cursor_hidden and seen.lines[-1].startswith("interrupted")


def test_c_goes_on_without_stopping() -> None:
    seen = keys_for_steps([b" ", b"c"])
    assert seen.code == 0 and seen.lines == HEAD + ANSWER + FOOT


def test_ctrl_c_while_a_step_waits() -> None:
    seen = keys_for_steps([b" ", b"\x03"])
    assert seen.code == 130 and not seen.cursor_hidden and seen.lines[-1].startswith("interrupted")


def test_the_terminal_has_its_echo_back() -> None:
    modes: list[int] = []

    def look(process: subprocess.Popen[bytes], master: int, raw: str) -> None:
        modes.append(termios.tcgetattr(master)[3] & (termios.ECHO | termios.ICANON))
        if "canvas 1 · step 1" in raw:
            os.write(master, b"c")

    run("--visualize", "--step", meanwhile=look)
    assert 0 in modes and modes[-1] == termios.ECHO | termios.ICANON


def test_what_is_typed_meanwhile_does_not_move_the_frame() -> None:
    typed: list[int] = []

    def type_on(_: subprocess.Popen[bytes], master: int, raw: str) -> None:
        if "canvas 1 · step" in raw and len(typed) < 4:
            typed.append(os.write(master, b"ls\r\r"))

    seen = run("--visualize", "--slow", "0.1", meanwhile=type_on)
    assert len(typed) == 4
    assert seen.lines == HEAD + ANSWER + FOOT


ON = "ECHO ICANON"


def jobs(*acts: tuple[str, bytes]) -> Callable[[subprocess.Popen[bytes], int, str], None]:
    """Types what belongs to the first text once it has come, then waits for the next one behind it."""
    waiting = list(acts)
    done = [0]

    def act(_: subprocess.Popen[bytes], master: int, raw: str) -> None:
        while waiting and (at := raw.find(waiting[0][0], done[0])) >= 0:
            os.write(master, waiting.pop(0)[1])
            done[0] = at + 1

    return act


def test_ctrl_z_gives_a_plain_shell_its_modes_and_takes_them_again() -> None:
    acts = jobs(
        ("canvas 1 · step 1", b"\x1a"), ("[stopped", b"fg\n"), ("canvas 1 · step 1", b" "), ("canvas 1 · step 2", b"\x1a"),
        ("[stopped", b"fg\n"), ("canvas 1 · step 2", b"c"),
    )  # fmt: skip
    seen = run("--visualize", "--step", shell=True, meanwhile=acts)
    assert seen.code == 0 and not seen.cursor_hidden
    assert re.findall(r"\[(?:stopped|ended): (.*)\]", seen.raw) == [ON, ON, ON]
    assert re.findall(r"\?2004[hl]|stopped|ended", seen.raw) == [
        *["?2004h", "?2004l", "stopped"] * 2,
        "?2004h",
        "?2004l",
        "ended",
    ]
    assert seen.raw.rindex("?2026l", 0, seen.raw.index("[stopped")) < seen.raw.index(
        "\x1b[?25h"
    )  # the frame went first


def test_ctrl_z_where_the_cursor_cannot_be_moved() -> None:
    acts = jobs(("canvas 1 · step 1", b"\x1a"), ("[stopped", b"fg\n"))
    seen = run("--visualize", "--slow", "0.2", shell=True, meanwhile=acts, environment={"TERM": "dumb"})
    assert seen.code == 0 and ESCAPE not in seen.raw and "[stopped: " + ON in seen.raw


def test_steps_beneath_each_other_wait_for_keys_and_give_the_modes_back_too() -> None:
    acts = jobs(("canvas 1 · step 1", b"\x1a"), ("[stopped", b"fg\n"), ("\n", b"c"))
    seen = run("--visualize", "--step", shell=True, meanwhile=acts, environment={"TERM": "dumb"}, size=(200, 80))
    assert seen.code == 0 and "[stopped: " + ON in seen.raw
    assert seen.lines[len(HEAD)] == "space next · c go on · q stop"


def test_in_the_background_it_draws_nothing_and_finishes() -> None:
    acts = jobs(("canvas 1 · step 2", b"\x1a"), ("[stopped", b"bg\n"))
    seen = run("--visualize", "--slow", "0.1", shell=True, meanwhile=acts)
    assert seen.code == 0 and seen.raw.count("[stopped") == 1
    behind = seen.raw[seen.raw.index("[in the background]") :]
    assert "· step" not in behind and "[ended: " + ON in behind
    assert seen.lines[-len(FOOT) - len(ANSWER) - 1 : -1] == ANSWER + FOOT


def test_sent_to_the_background_before_the_view_stood_it_draws_nothing() -> None:
    acts = jobs(("--seed 5", b"\x1a"), ("[stopped", b"bg\n"))
    seen = run("--visualize", "--slow", "0.1", shell=True, meanwhile=acts, session={"text": PARAGRAPH, "pause": 0.3})
    assert seen.code == 0 and seen.raw.count("[stopped") == 1 and "· step" not in seen.raw
    assert seen.lines[-len(FOOT) - len(ANSWER) - 1 : -1] == ANSWER + FOOT


def test_brought_back_from_the_background_it_draws_again_and_hushes_the_keys() -> None:
    acts = jobs(("canvas 1 · step 1", b"\x1a"), ("[stopped", b"bg\n"), ("[in the background]", b"fg\n"),
                ("canvas 1 · step 1", b" "), ("canvas 1 · step 2", b"c"))  # fmt: skip
    seen = run("--visualize", "--step", shell=True, meanwhile=acts)
    assert seen.code == 0 and seen.raw.count("[stopped") == 1
    assert seen.raw.endswith(f"[ended: {ON}]\r\n")
    assert seen.raw.count("?2004h") == seen.raw.count("?2004l") == 2


def test_a_slow_step_stands_again_after_ctrl_z_and_after_a_resize() -> None:
    def narrow(process: subprocess.Popen[bytes], master: int, raw: str) -> None:
        acts(process, master, raw)
        if "[stopped" in raw and raw.rpartition("[stopped")[2].count("canvas 1 · step 1") == 1 and not sizes:
            sizes.append(1)
            fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 70, 0, 0))
        if raw.rpartition("[stopped")[2].count("canvas 1 · step 1") == 2 and len(sizes) == 1:
            sizes.append(2)
            os.write(master, b"\x03")

    sizes: list[int] = []
    acts = jobs(("canvas 1 · step 1", b"\x1a"), ("[stopped", b"fg\n"))
    seen = run("--visualize", "--slow", "15", shell=True, meanwhile=narrow)
    assert sizes == [1, 2] and seen.code == 130


@pytest.mark.parametrize("way", ["held", "unread", "held, twice"])
def test_being_ended_waits_for_no_terminal_that_takes_nothing(way: str) -> None:
    sent: list[float] = []

    def end(process: subprocess.Popen[bytes], master: int, raw: str) -> None:
        if "canvas 2 · step 1" in raw and not sent:  # a line is unfinished by now
            if way != "unread":
                os.write(master, b"\x13")
            time.sleep(0.5)  # the next frame waits by now
            sent.append(time.monotonic())
            process.send_signal(signal.SIGTERM)
            if way == "held, twice":
                time.sleep(0.05)
                process.send_signal(signal.SIGTERM)
            if way == "unread":
                process.wait(10)
                return
            os.set_blocking(master, True)

    session = {"text": "Hi user\n" + "Hi " * 4000 if way == "unread" else PARAGRAPH, "pause": 0.05}
    size = (300, 500) if way == "unread" else (24, 80)
    seen = run("--visualize", "--slow", "0.05", session=session, meanwhile=end, size=size)
    assert seen.code == 143
    if way != "unread":
        assert not seen.cursor_hidden and not any("· step" in line for line in seen.lines)


def until(master: int, sign: bytes) -> None:
    """Reads on until it comes."""
    raw = b""
    while sign not in raw:
        assert select.select([master], [], [], 15)[0], raw
        raw += os.read(master, 65536)


def test_an_answer_bound_for_elsewhere_outlives_the_terminal() -> None:
    code = (
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); import fake_session;"
        f"fake_session.main('run', '-p', 'Hi', '--visualize', '--slow', '0.1', text={PARAGRAPH!r})"
    )
    master, slave = pty.openpty()
    variables = os.environ | {"TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=slave, stdout=subprocess.PIPE, stderr=slave, env=variables,
        start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(slave)
    until(master, b"step 2 of")
    os.close(master)
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out.decode()) == (0, PARAGRAPH + "\n")


def test_keys_come_though_every_stream_of_the_terminal_is_for_writing_alone() -> None:
    master, slave = pty.openpty()
    path = os.ttyname(slave)
    code = (
        "import os, sys\n"
        f"os.dup2(os.open({path!r}, os.O_WRONLY | os.O_NOCTTY), 2)\n"
        "os.dup2(os.open(os.devnull, os.O_RDONLY), 0)\n"
        f"import fake_session; fake_session.main('run', '-p', 'Hi', '--visualize', '--step', text={PARAGRAPH!r})"
    )
    variables = os.environ | {"TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=slave, stdout=subprocess.PIPE, stderr=slave, env=variables,
        start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    try:
        until(master, b"step 1 of")
        os.write(master, b"c")
        until(master, b"2 canvases in 8 steps")
    finally:
        process.terminate()
    out, _ = process.communicate(timeout=20)
    os.close(master)
    os.close(slave)
    assert out.decode() == PARAGRAPH + "\n"


def test_resizing_while_it_draws() -> None:
    sizes = iter([(24, 40), (10, 30), (30, 100), (5, 20)])

    def resize(process: subprocess.Popen[bytes], master: int, raw: str) -> None:
        size = next(sizes, None)
        if size is not None and "canvas 1 · step" in raw:
            fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))

    seen = run("--visualize", "--slow", "0.05", meanwhile=resize)
    assert seen.code == 0 and not seen.cursor_hidden
    assert seen.raw.count("Hi Hi Hi Hi user user user user") >= 1


def test_models_is_a_table_on_a_terminal() -> None:
    seen = on_terminal("models", size=(40, 100))
    assert seen.code == 0
    assert seen.lines[0].split()[:3] == ["name", "format", "weights"]
    assert all(len(line) <= 100 for line in seen.lines)
