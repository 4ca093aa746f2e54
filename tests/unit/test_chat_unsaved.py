"""Conversations that cannot be saved, files that are none, recordings that cannot be begun: nothing goes without a word."""

import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_session
import pytest
from chats import pairs
from fake_chat import FakeChat
from typer.testing import CliRunner

from dgemma_local import cli, cli_chat
from dgemma_local.chat import private, store
from dgemma_local.chat.conversation import Conversation, Settings, Turn, said
from dgemma_local.cli_chat_model import Opened
from dgemma_local.errors import DgemmaError, NumericalError, RecordingError, UsageError
from dgemma_local.ui.chat import run
from dgemma_local.ui.chat_actions import ACTIONS
from dgemma_local.ui.chat_turn import Chat, answer, recap
from dgemma_local.ui.terminal import stderr


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A state folder of this test alone, no card, no torch; returns that of the conversations."""
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(cli_chat, "import_torch", lambda: None)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "XDG_STATE_HOME/dgemma/chats"


@pytest.fixture(autouse=True)
def session(monkeypatch: pytest.MonkeyPatch) -> FakeChat:
    fake = FakeChat("", answers=("Hi",))
    monkeypatch.setitem(sys.modules, "dgemma_local.session", fake_session.module(fake))
    return fake


def chat(text: str, *arguments: str) -> Any:
    model = [] if {"--list", "--prefer"} & {*arguments} else ["-m", "fake"]
    found = CliRunner().invoke(cli.app, ["chat", *model, *arguments], input=text.encode())
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found


class Disk:
    """Full, until there is room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = True
        real = os.fsync

        def fsync(handle: int) -> None:
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(handle)

        monkeypatch.setattr(os, "fsync", fsync)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


class Nobody:
    multi = False

    def read(self, draft: str = "") -> str | None:
        return None


ONE = pairs(("one", "Hi"))


def chat_of(folder: Path | None, conversation: Conversation = ONE) -> Chat:
    model: Any = SimpleNamespace(name="m", context=1000, tokens=lambda told, thinking: len(told))
    return Chat(
        conversation=conversation, model=model, source=Nobody(), terminal=stderr(), draw=lambda most: 0, folder=folder
    )


# ── a disk that is full ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("line", ["clear", "load other"])
def test_what_is_not_saved_is_not_put_away(line: str, disk: Disk, tmp_path: Path) -> None:
    chat = chat_of(tmp_path)
    chat.update(chat.conversation)
    name, _, argument = line.partition(" ")
    with pytest.raises(UsageError, match="cannot be saved: No space") as refused:
        ACTIONS[name](chat, argument)
    assert "/export it first" in refused.value.fix and chat.conversation.turns
    disk.full = False
    store.save(Conversation(name="other", model="m"), tmp_path)
    ACTIONS[name](chat, argument)
    assert not chat.conversation.turns and not chat.unsaved
    assert store.load("n", tmp_path) == ONE


@pytest.mark.parametrize("line", ["clear", "load other"])
def test_what_is_exported_can_be_put_away(line: str, disk: Disk, tmp_path: Path) -> None:
    disk.full = False
    store.save(Conversation(name="other", model="m"), tmp_path / "chats")
    disk.full = True
    chat = chat_of(tmp_path / "chats")
    chat.update(chat.conversation)
    ACTIONS["export"](chat, f"json {tmp_path / 'n.json'}")
    name, _, argument = line.partition(" ")
    ACTIONS[name](chat, argument)
    assert not chat.conversation.turns
    assert run(chat) == 0


def test_leaving_is_one_more_attempt(disk: Disk, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = chat_of(tmp_path)
    chat.update(chat.conversation)
    assert run(chat) == DgemmaError.exit_code and store.names(tmp_path) == []
    assert capsys.readouterr().err.count("cannot be saved") == 2
    disk.full = False
    assert run(chat) == 0 and store.names(tmp_path) == ["n"]


def test_a_script_that_cannot_be_saved_says_so_in_its_code(disk: Disk, here: Path) -> None:
    found = chat("one\n/save\n")
    assert (found.exit_code, found.stdout) == (DgemmaError.exit_code, "Hi\n")
    assert "cannot be saved: No space" in found.stderr and "saved as" not in found.stderr
    assert store.names(here) == []


def test_what_was_resumed_and_not_changed_is_not_written_when_it_is_left(here: Path) -> None:
    before = store.save(ONE, here).read_bytes()
    assert chat("", "--resume", "n", "--seed", "4").exit_code == 0
    assert (here / "n.json").read_bytes() == before


# ── what stands in a file's or a folder's place ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("place", ["", "dgemma", "dgemma/chats"])
@pytest.mark.parametrize("dangling", [False, True])
def test_a_folder_that_is_none_is_said(place: str, dangling: bool, tmp_path: Path) -> None:
    path = tmp_path / "XDG_STATE_HOME" / place
    path.parent.mkdir(parents=True, exist_ok=True)
    if dangling:
        path.symlink_to(tmp_path / "nowhere")
    else:
        path.write_text("")
    found = chat("one\n/save new\n")
    assert (found.exit_code, found.stdout) == (DgemmaError.exit_code, "Hi\n")
    assert f"cannot be saved: {path} is no folder" in found.stderr and "elsewhere and stays" not in found.stderr
    listed = chat("", "--list")
    assert listed.exit_code == 2 and f"{path} is no folder" in listed.stderr


def test_a_fifo_is_no_conversation_and_nobody_waits_for_it(here: Path) -> None:
    here.mkdir(parents=True)
    os.mkfifo(here / "f.json")
    listed = chat("", "--list")
    assert listed.exit_code == 0 and "no regular file" in listed.stderr
    assert "no regular file" in chat("", "--resume", "f").stderr


def test_a_history_that_is_a_fifo_is_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "history", 0o644)
    with pytest.raises(OSError, match="no regular file"):
        private.file_at(tmp_path / "history")
    assert (tmp_path / "history").stat().st_mode & 0o777 == 0o644 & ~_umask()


def _umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


def test_what_is_too_large_is_neither_read_nor_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(pairs(("one", "x" * 500)), tmp_path)
    monkeypatch.setattr(store, "LARGEST", 400)
    with pytest.raises(store.Damaged, match="larger"):
        store.load("n", tmp_path)
    with pytest.raises(OSError, match="too large"):
        store.save(pairs(("one", "x" * 500)), tmp_path)


# ── what is said of damaged files ─────────────────────────────────────────────────────────────────────────────────


def test_a_damaged_file_s_text_is_not_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "\x1b[31m"))
    here = tmp_path / "\x1b[31m/dgemma/chats"
    here.mkdir(parents=True)
    (here / "bad.json").write_text('{"format": "dgemma chat", "version": "\\u001b[31m\\u202e"}')
    for arguments in (["--list"], ["--resume"], ["--resume", "bad"]):
        told = chat("", *arguments).stderr
        assert "bad.json is damaged" in told and "\x1b" not in told and "\u202e" not in told
    with pytest.raises(store.Damaged) as damaged:
        store.load("bad", here)
    assert "its version is �[31m�," in str(damaged.value)


def test_a_script_that_resumes_does_not_begin_where_all_is_damaged(here: Path) -> None:
    here.mkdir(parents=True)
    (here / "bad.json").write_text("{")
    found = chat("one\n", "--resume")
    assert found.exit_code == UsageError.exit_code and not found.stdout
    assert "nothing that can be read is saved" in found.stderr and "nothing is saved yet" not in found.stderr
    (here / "bad.json").unlink()
    found = chat("one\n", "--resume")
    assert found.exit_code == 0 and "nothing is saved yet" in found.stderr


# ── recordings ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_recording_that_cannot_be_begun_costs_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wishes: Any = {}
    chat = chat_of(None)
    chat.model, chat.recording = Opened("fake", wishes), tmp_path / "gone/x.jsonl"
    answer(chat, "two", said)
    assert chat.recording is None and chat.codes == [RecordingError.exit_code, 0]
    assert [turn.answer for turn in chat.conversation.turns] == ["Hi", "Hi"]
    assert "nothing is recorded any more" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["file", "fifo", "link", "folder"])
def test_a_recording_takes_nothing_s_place(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    {
        "file": lambda: path.write_text(""),
        "fifo": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to(tmp_path / "nowhere"),
        "folder": path.mkdir,
    }[kind]()
    chat = chat_of(None)
    with pytest.raises(UsageError, match="is there already"):
        ACTIONS["record"](chat, str(path))
    assert chat.recording is None


def test_a_later_recording_passes_over_whatever_is_there(tmp_path: Path) -> None:
    (tmp_path / "x-2.jsonl").symlink_to(tmp_path / "nowhere")
    found = chat("/record x.jsonl\none\ntwo\n")
    assert found.exit_code == 0 and (tmp_path / "x-3.jsonl").is_file() and not (tmp_path / "nowhere").exists()


# ── what is shown, and flags ──────────────────────────────────────────────────────────────────────────────────────


def test_the_list_counts_and_cuts(here: Path) -> None:
    store.save(Conversation(name="a", model="m" * 6000, turns=(Turn(user="one"),)), here)
    store.save(Conversation(name="b", model="m"), here)
    lines = {line.split()[0]: line for line in chat("", "--list").stdout.splitlines()}
    assert "  1 turn " in lines["a"] and "  0 turns " in lines["b"] and len(lines["a"]) < 160


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--seed", "0"], "--seed"), (["--stop", "a"], "--stop"), (["--resume"], "--resume"), (["n"], "NAME"),
        (["--no-save"], "--no-save"), (["--think"], "--think"), (["--fp8-mlp"], "--fp8-mlp"), (["-m", "x"], "--model"),
    ],
)  # fmt: skip
def test_the_list_takes_no_other_flag(flags: list[str], named: str) -> None:
    found = chat("", "--list", *flags)
    assert found.exit_code == 2 and f"{named} means nothing to it" in found.stderr and f"drop {named}" in found.stderr


def test_a_default_gives_way_to_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGEMMA_CHAT_SEED", "4")
    monkeypatch.setenv("DGEMMA_CHAT_THINK", "1")
    assert chat("", "--list").exit_code == 0


def test_nothing_is_preferred_where_the_conversation_names_its_model(here: Path, session: FakeChat) -> None:
    store.save(ONE, here)
    found = chat("", "--resume", "n", "--prefer", "quality")
    assert found.exit_code == 2 and "held with m" in found.stderr and session.opened is None


@pytest.mark.parametrize(
    ("flags", "thinks", "shows"),
    [([], True, True), (["--no-think"], False, True), (["--no-show-thinking"], True, False)],
)
def test_a_flag_takes_thinking_back(flags: list[str], thinks: bool, shows: bool, here: Path) -> None:
    settings = Settings(thinking=True, show_thoughts=True)
    store.save(Conversation(name="n", model="m", settings=settings, turns=(Turn(user="q", answer="a"),)), here)
    assert chat("one\n", "--resume", "n", *flags).exit_code == 0
    found = store.load("n", here).settings
    assert (found.thinking, found.show_thoughts) == (thinks, shows)


def test_a_turn_without_an_answer_says_how_it_ended(capsys: pytest.CaptureFixture[str]) -> None:
    recap(chat_of(None, Conversation(name="n", model="m", turns=(Turn(user="q", outcome="thought_only"),))))
    assert capsys.readouterr().err.splitlines() == ["n: 1 turn", "> q", "thought only"]
    recap(chat_of(None))
    assert capsys.readouterr().err.splitlines()[-1] == "Hi"


def test_the_context_counts_a_system_turn_and_is_drawn_in_what_there_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ACTIONS["context"](chat_of(None, Conversation(name="n", model="m", system="be brief")), "")
    assert "█" in (told := capsys.readouterr().err) and " 1 of 1,000 tokens" in told
    monkeypatch.setattr("dgemma_local.ui.terminal.Terminal.encoding", "ascii")
    ACTIONS["context"](chat_of(None), "")
    assert capsys.readouterr().err.startswith("#" + "." * 39)


def test_the_cure_of_nan_is_one_of_a_chat(session: FakeChat) -> None:
    session.answers = (NumericalError("canvas 1, step 1", "check (`--dtype float32` tells)"),)
    assert "check (a chat begun with --dtype float32 tells)" in chat("one\n").stderr
