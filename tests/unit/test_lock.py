"""Who holds a card: told to a second process, gone with the first, however that ends."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dgemma_local import lock, session
from dgemma_local.errors import DoesNotFit
from dgemma_local.lock import MIB, Holder, take

ROOT = Path(__file__).parent.parent.parent
CARD = "GPU-fake/../1"  # a name, not a path
HOLD = f"""
import sys
from dgemma_local.lock import take
held = take({CARD!r}, {17 * 1024 * MIB}, ["/usr/bin/dgemma", "chat", "--system", "a secret"])
print("held" if held.lock else held.other.line, flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def first(cache: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the card."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_is_told_of_the_first(first: subprocess.Popen[str]) -> None:
    hold = take(CARD, 1, ["dgemma"])
    assert hold.lock is None and hold.other is not None
    assert hold.other.pid == first.pid and hold.other.bytes == 17 * 1024 * MIB
    assert hold.other.line.startswith(f"dgemma chat (pid {first.pid}, since 20")
    assert hold.other.line.endswith(", 17,408 MiB)") and "secret" not in hold.other.line


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None])
def test_it_is_gone_with_the_process(how: signal.Signals | None, first: subprocess.Popen[str]) -> None:
    """A crash leaves nothing to clean up; the paper it leaves is not read."""
    assert first.stdin is not None
    first.stdin.write("\n") if how is None else first.send_signal(how)
    first.communicate()
    hold = take(CARD, 2, ["dgemma", "run"])
    assert hold.other is None and hold.lock is not None
    hold.release()


def test_another_card_is_another_lock(first: subprocess.Popen[str]) -> None:
    hold = take("GPU-other", 1, ["dgemma"])
    assert hold.lock is not None and hold.other is None
    hold.release()


def test_released_it_is_free_and_ones_own_is_not_another(cache: Path) -> None:
    hold = take(CARD, 1, ["dgemma"])
    assert hold.lock is not None
    again = take(CARD, 1, ["dgemma"])
    assert again.lock is None and again.other is None  # this very process
    hold.release()
    hold.release()
    last = take(CARD, 1, ["dgemma"])
    assert last.lock is not None
    last.release()
    assert all(path.is_relative_to(cache / "dgemma" / "cards") for path in cache.rglob("*.*"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        "[" * 4000,
        "[" * 100_000,
        '{"pid": "x", "command": "c", "since": "s", "bytes": 1}',
        '{"pid": 1}',
    ],
)
def test_what_is_written_beside_it_is_not_trusted(text: str, first: subprocess.Popen[str], cache: Path) -> None:
    (paper,) = cache.rglob("*.json")
    paper.write_text(text, encoding="utf-8")
    assert take(CARD, 1, ["dgemma"]).other is None


@pytest.mark.parametrize(
    "change",
    [
        {"bytes": -5},
        {"pid": -1},
        {"pid": 0},
        {"pid": 10**30},
        {"bytes": 10**30},
        {"bytes": True},
        {"command": "x" * 4096},
    ],
)
def test_numbers_that_cannot_be_are_not_told(change: Any, first: subprocess.Popen[str], cache: Path) -> None:
    (paper,) = cache.rglob("*.json")
    written = json.loads(paper.read_text(encoding="utf-8"))
    paper.write_text(json.dumps(written | change), encoding="utf-8")
    assert take(CARD, 1, ["dgemma"]).other is None
    paper.write_text(json.dumps(written), encoding="utf-8")
    assert take(CARD, 1, ["dgemma"]).other is not None


def test_one_that_runs_no_more_is_not_the_holder(first: subprocess.Popen[str], cache: Path) -> None:
    """The paper of one that crashed, before the holder has written its own."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (paper,) = cache.rglob("*.json")
    paper.write_text(json.dumps(json.loads(paper.read_text(encoding="utf-8")) | {"pid": ended.pid}), encoding="utf-8")
    assert take(CARD, 1, ["dgemma"]).other is None


def test_a_pipe_beside_it_is_not_waited_for(first: subprocess.Popen[str], cache: Path) -> None:
    (paper,) = cache.rglob("*.json")
    paper.unlink()
    os.mkfifo(paper)
    assert take(CARD, 1, ["dgemma"]).other is None


def test_a_pipe_where_the_paper_is_made_is_not_waited_for(cache: Path) -> None:
    take(CARD, 1, ["dgemma"]).release()
    (paper,) = cache.rglob("*.json")
    os.mkfifo(paper.with_suffix(f".{os.getpid()}"))
    hold = take(CARD, 2, ["dgemma"])
    assert hold.lock is not None and json.loads(paper.read_text(encoding="utf-8"))["bytes"] == 2
    hold.release()


def test_nothing_of_it_reaches_the_terminal_raw(first: subprocess.Popen[str], cache: Path) -> None:
    (paper,) = cache.rglob("*.json")
    hostile = {"pid": 1, "command": "\x1b[2J" + "x" * 500, "since": "\n", "bytes": None}
    paper.write_text(json.dumps(hostile), encoding="utf-8")
    other = take(CARD, 1, ["dgemma"]).other
    assert other is not None and other.line.isprintable() and len(other.line) < 150


def test_no_folder_no_lock(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "dgemma").write_text("", encoding="utf-8")
    assert take(CARD, 1, ["dgemma"]) == lock.Hold(None)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["/usr/bin/dgemma", "run", "-p", "secret"], "dgemma run"),
        (["/x/dgemma_local/__main__.py", "bench"], "dgemma bench"),
        (["serve.py", "--token", "secret"], "serve.py"),
        ([], ""),
    ],
)
def test_the_command_without_what_was_asked(arguments: list[str], shown: str, cache: Path) -> None:
    hold = take(CARD, None, arguments)
    (paper,) = cache.rglob("*.json")
    assert json.loads(paper.read_text(encoding="utf-8"))["command"] == shown
    hold.release()


# In a session


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU were a card."""
    monkeypatch.setattr(session, "_card", lambda *_: CARD)


def test_a_session_holds_its_card_and_says_who_else_does(card: None, first: subprocess.Popen[str]) -> None:
    said: list[str] = []
    opened = session.open_session("demo", say=said.append)
    assert opened.hold.lock is None
    assert said == [f"another dgemma is on this card, too: {opened.hold.other.line}"]  # type: ignore[union-attr]


def test_alone_it_holds_the_card_and_says_nothing(card: None, cache: Path) -> None:
    said: list[str] = []
    opened = session.open_session("demo", say=said.append)
    assert opened.hold.lock is not None and said == []
    (paper,) = cache.rglob("*.json")
    written: dict[str, Any] = json.loads(paper.read_text(encoding="utf-8"))
    assert written["pid"] == os.getpid() and opened.planned.agreed is not None
    assert written["bytes"] == opened.planned.agreed.total
    opened.hold.release()


def test_where_it_does_not_fit_the_holder_is_named(card: None, first: subprocess.Popen[str]) -> None:
    with pytest.raises(DoesNotFit) as refused:
        session.open_session("demo", session.Wishes(vram=0.0))
    assert refused.value.fix.startswith(f"end dgemma chat (pid {first.pid}")


def test_a_refusal_without_a_holder_is_as_it_was() -> None:
    error = DoesNotFit("what", "fix")
    assert lock.named(error, None) is error
    other = Holder(pid=7, command="dgemma run", since="2026-01-01T00:00:00", bytes=None)
    assert lock.named(error, other).fix == "end dgemma run (pid 7, since 2026-01-01 00:00:00); or fix"


def test_on_a_cpu_nothing_is_held(cache: Path) -> None:
    assert session.open_session("demo", session.Wishes(device="cpu")).hold == lock.Hold(None)
    assert not (cache / "dgemma" / "cards").exists()
