"""`dgemma replay` on a terminal: its keys, what it leaves behind, and being stopped, ended or resized."""

import re
import signal
import time
from pathlib import Path

import pytest
import recordings
from replayed import ANSWER, LENGTH, made
from replayed import file as file
from theatre import theatre

from dgemma_local.errors import INTERRUPTED, RecordingError
from dgemma_local.states import summary
from dgemma_local.ui.frame import frame, marked
from dgemma_local.ui.paint import sgr
from dgemma_local.ui.palette import Chrome, Ink, look
from dgemma_local.ui.player import Player
from dgemma_local.ui.replay import sight, usual
from dgemma_local.ui.tape import Tape

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
    with theatre(file, "--slow", "1", shell=True) as stage:
        stage.until("1 of 8 .* playing")
        stage.press("\x1a")
        lines = stage.until(r"\[stopped: ECHO ICANON\]")
        assert not any("of 8" in line for line in lines) and not stage.screen.cursor.hidden
        assert stage.raw.index(b"?2004h") < stage.raw.index(b"?2004l") < stage.raw.index(b"[stopped")
        time.sleep(3)  # steps
        since = len(stage.raw)
        stage.press("fg\n")
        (line,) = [each for each in stage.until("of 8 .* playing") if "of 8" in each]
        assert b"?2004h" in stage.raw[since:]
        assert re.search("[12] of 8", line)  # where it was, and not three steps on
        stage.press("q")
        assert stage.left() == 0
        assert stage.lines[-1] == "[ended: ECHO ICANON]"


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
