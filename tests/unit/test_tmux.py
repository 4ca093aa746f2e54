"""The live view in a real terminal multiplexer, which rewraps its lines when it is resized."""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from captures import Tmux, residue, tmux

TESTS = Path(__file__).parent.parent
TEXT = "Hi user\n  model model\nHi Hi Hi Hi user user user user"  # over two canvases
STEP = re.compile(r"c(?:anvas )?\d · (?:step )?\d(?: of |/)8")

pytestmark = pytest.mark.tmux


@pytest.fixture(autouse=True)
def needs_tmux() -> None:
    if shutil.which("tmux") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("CI must have tmux")
        pytest.skip("tmux is not installed")


def begin(pane: Tmux, folder: Path, *flags: str) -> None:
    arguments = ("run", "-p", "Hi", "--seed", "5", "--visualize", *flags)
    code = f"import fake_session; fake_session.main(*{arguments!r}, text={TEXT!r})"
    script = folder / "command.sh"
    path = f"PYTHONPATH={shlex.quote(f'{TESTS}:{TESTS.parent}')}"
    script.write_text(
        f"clear; for i in 1 2 3 4 5 6 7 8; do echo above; done; {path} {shlex.quote(sys.executable)} -c {shlex.quote(code)}; echo run-'ended'\n",
        encoding="utf-8",
    )
    pane.type(f". {shlex.quote(str(script))}")


def stepping(folder: Path, sizes: list[tuple[int, int]]) -> tuple[str, str]:
    """A key for every step, another size between them -> all that the pane holds at the end, and its last screen."""
    waiting = iter(sizes)
    shown = []
    with tmux(60, 24) as pane:
        begin(pane, folder, "--step")
        last = ""
        while "run-ended" not in (screen := pane.until(re.compile(f"run-ended|{STEP.pattern}"), besides=last)):
            last = only_step(screen)
            shown.append(re.findall(r"\d", last)[:2])
            if (size := next(waiting, None)) is not None:
                pane.resize(*size)
                pane.until_still()
                last = only_step(pane.screen())
            pane.key("Space")
        text, screen = pane.screen(history=True), pane.screen()
        assert pane.call("display-message", "-p", "#{cursor_flag}").strip() == "1"
    assert shown == [[canvas, step] for canvas in "12" for step in "1234"]
    return text, screen


def only_step(screen: str) -> str:
    """The step that a screen shows, in one frame and no remains of others."""
    assert len(STEP.findall(screen)) == screen.count("thaw") - screen.count("thawed") == screen.count("frozen") == 1, (
        screen
    )
    found = STEP.search(screen)
    assert found is not None
    return found.group()


def kept(text: str) -> list[str]:
    """What is no frame's."""
    lines = [line.rstrip() for line in text.split("\n") if line.strip()]
    return [line for line in lines if line == "above" or line in TEXT.split("\n")]


def test_a_run_that_is_resized_leaves_nothing_but_its_text(tmp_path: Path) -> None:
    text, _ = stepping(tmp_path, [(50, 24), (58, 20), (44, 24), (70, 22), (60, 30)])
    assert residue(text) == []
    assert kept(text) == ["above"] * 8 + TEXT.split("\n")


def test_no_resize_leaves_remains_on_the_screen_or_takes_text(tmp_path: Path) -> None:
    """So narrow and low that tmux itself scrolls parts of the wrapped frame off: what it has there nobody can reach."""
    text, screen = stepping(tmp_path, [(31, 20), (50, 14), (23, 12), (80, 24), (26, 30), (60, 20)])
    assert residue(screen) == []
    lines = kept(text)
    assert lines[:8] == ["above"] * 8
    assert list(dict.fromkeys(lines[8:])) == TEXT.split("\n")


def test_codes_that_tmux_ignores_are_not_printed(tmp_path: Path) -> None:
    with tmux(80, 24) as pane:
        begin(pane, tmp_path, "--step")
        screen = pane.until(STEP)
        pane.key("c")
        end = pane.until("run-ended")
    assert not re.search(r"\[?\?\d+[hl]|2026|\[\dm", screen + end)


def test_ctrl_z_gives_the_terminal_to_the_shell_and_takes_it_back(tmp_path: Path) -> None:
    with tmux(60, 24) as pane:
        begin(pane, tmp_path, "--step")
        screen = pane.until(STEP)
        pane.key("C-z")
        pane.until(re.compile("Stopped"))
        assert residue(pane.screen()) == []
        assert pane.call("display-message", "-p", "#{cursor_flag}").strip() == "1"
        pane.type("echo at-the-shell; fg")
        screen = pane.until(STEP)
        assert "at-the-shell" in screen and only_step(screen)
        assert pane.call("display-message", "-p", "#{cursor_flag}").strip() == "0"
        pane.key("c")
        pane.until(re.compile(r"complete: \d+ tokens"))
        text = pane.screen(history=True)
    assert residue(text) == []
    assert kept(text)[-3:] == TEXT.split("\n")
