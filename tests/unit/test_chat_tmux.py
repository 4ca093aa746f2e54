"""Twenty turns of a chat in a terminal, with all that happens to one: pastes, Ctrl-C, a kill, and going on after it."""

import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from captures import PATIENCE, Tmux, tmux

ROOT = Path(__file__).parent.parent.parent
WORDS = "river stone cloud green light table horse apple bread chair".split()

pytestmark = [pytest.mark.tmux, pytest.mark.slow]


@pytest.fixture(autouse=True)
def needs_tmux() -> None:
    if shutil.which("tmux") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("CI must have tmux")
        pytest.skip("tmux is not installed")


@pytest.fixture
def pane(tmp_path: Path) -> Iterator[Tmux]:
    with tmux(90, 40, {"XDG_STATE_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}) as found:
        yield found


def begin(pane: Tmux, folder: Path, *flags: str) -> None:
    """The chat, its process id in a file."""
    words = [sys.executable, "-m", "dgemma_local", "chat", "-m", "demo-text", *flags]
    script = folder / "command.sh"
    command = f"echo $$ > {shlex.quote(str(folder / 'pid'))}; exec {shlex.join(words)}"
    line = f"cd {shlex.quote(str(ROOT))}; clear; sh -c {shlex.quote(command)}; echo chat-'ended' $?\n"
    script.write_text(line, encoding="utf-8")
    pane.type(f". {shlex.quote(str(script))}")
    pane.until(re.compile(r"^>>>", re.M))


def saved(folder: Path) -> dict[str, Any]:
    (path,) = (folder / "dgemma" / "chats").glob("*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def until_saved(folder: Path, true: Callable[[dict[str, Any]], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not (folder / "dgemma" / "chats").is_dir() or not [*(folder / "dgemma" / "chats").glob("*.json")]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    while not true(saved(folder)):
        assert time.monotonic() < deadline, saved(folder)
        time.sleep(0.02)


def ready(pane: Tmux) -> str:
    """The screen, once an empty prompt stands below everything else."""
    return pane.until(re.compile(r">>>\s*\Z"))


def ask(pane: Tmux, folder: Path, line: str, turns: int) -> dict[str, Any]:
    """Types a line, waits until so many turns are saved and the prompt is back; the answer stands below the line."""
    pane.type(line)
    until_saved(folder, lambda found: len(found["turns"]) == turns)
    screen = ready(pane)
    found = saved(folder)["turns"]
    last: dict[str, Any] = found[-1]
    below = screen[screen.rindex(line) :].split("\n")
    shown = [text.rstrip() for text in last["answer"].strip().split("\n")]
    assert below[1 : 1 + len(shown)] == shown or not last["answer"].strip()
    return last


def test_twenty_turns(pane: Tmux, tmp_path: Path) -> None:
    begin(pane, tmp_path, "--seed", "7")
    for n, word in enumerate(WORDS[:5], 1):  # 1 to 5
        turn = ask(pane, tmp_path, f"Spell {word}.", n)
        assert turn["user"] == f"Spell {word}." and turn["seed"] == 6 + n

    pane.call("set-buffer", "Reverse the words:\ncat dog sun")  # 6: several lines in one paste are one message
    pane.call("paste-buffer", "-p")
    screen = pane.until("cat dog sun")
    assert "... cat dog sun" in screen and len(saved(tmp_path)["turns"]) == 5
    pane.key("Enter")
    until_saved(tmp_path, lambda found: len(found["turns"]) == 6)
    ready(pane)
    assert saved(tmp_path)["turns"][5]["user"] == "Reverse the words:\ncat dog sun"
    pane.type("/undo")
    pane.until("taken back: Reverse the words")
    assert len(saved(tmp_path)["turns"]) == 5

    pane.type("Spell\\")  # again 6, over two lines
    pane.until(re.compile(r"^\.\.\.", re.M))
    assert ask(pane, tmp_path, "cloud.", 6)["user"] == "Spell\ncloud."
    pane.type("/retry")
    until_saved(tmp_path, lambda found: found["asked"] == 8)
    ready(pane)
    again = saved(tmp_path)["turns"]
    assert len(again) == 6 and again[5]["user"] == "Spell\ncloud."
    for n, word in enumerate(WORDS[5:9], 7):  # 7 to 10
        ask(pane, tmp_path, f"Spell {word}.", n)

    pane.type("/save a chat")
    pane.until("saved as a chat")
    before = saved(tmp_path)
    assert before["turns"][:5] == again[:5] and len(before["turns"]) == 10

    pane.type("/visualize on")  # 11: Ctrl-C in the middle
    pane.until("canvas in view: on")
    pane.type("/set steps 4096")
    pane.until("steps: 4096")
    pane.type("Tell me of the sea and of nine unknown things 17 times.")
    pane.until(re.compile(r"step (?:[2-9]|\d\d)"))
    pane.key("C-c")
    screen = ready(pane)
    assert "interrupted" in screen and "canvas 1 ·" not in screen and ">>> Tell me of the sea" in screen
    after = saved(tmp_path)["turns"]
    assert len(after) == 11 and after[10]["outcome"] == "interrupted" and after[:10] == before["turns"]
    pane.type("/undo")
    pane.until("taken back: Tell me")

    pane.key("C-c")
    pane.until("Ctrl-D or /exit leaves")
    pane.type("Tell me of the sea and of nine unknown things 17 times.")  # 12: killed in the middle
    pane.until(re.compile(r"step (?:[2-9]|\d\d)"))
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    pane.until("chat-ended 137")
    pane.type("stty sane; clear")
    assert saved(tmp_path)["turns"] == before["turns"]

    begin(pane, tmp_path, "--resume", "a chat")
    screen = pane.screen()
    assert "a chat: 10 turns" in screen and "> Spell bread." in screen
    pane.type("/set steps default")
    for n in range(11, 21):  # to 20
        word = WORDS[n % 10]
        assert ask(pane, tmp_path, f"Spell {word}.", n)["user"] == f"Spell {word}."
    assert saved(tmp_path)["turns"][:10] == before["turns"]
    pane.type("/stats")
    pane.until(re.compile(r"prompt +\d+ tokens, \d+ of them reused"))
    pane.key("C-d")
    screen = pane.until("chat-ended 0")
    assert pane.call("display-message", "-p", "#{cursor_flag}").strip() == "1"

    history = (tmp_path / "dgemma" / "history").read_text()
    assert "+Reverse the words:\n+cat dog sun\n" in history and "+/save a chat\n" in history
