"""What a chat meets that is no use to it: full disks, closed streams, broken names and quotations, a second Ctrl-C."""

import errno
import io
import json
import os
import resource
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_session
import pytest
from chats import pairs
from fake_chat import FakeChat
from hypothesis import example, given
from hypothesis import strategies as st
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from dgemma_local import cli_chat, registry
from dgemma_local.chat import commands, store
from dgemma_local.chat.commands import Lines, open_block
from dgemma_local.chat.conversation import Conversation, with_setting
from dgemma_local.cli_chat_model import Opened
from dgemma_local.errors import ConfigError, DgemmaError, PromptError, UsageError
from dgemma_local.ui import chat_input
from dgemma_local.ui.chat_actions import ACTIONS
from dgemma_local.ui.chat_input import Piped, Typed, edited, piped
from dgemma_local.ui.chat_turn import Chat, _here
from dgemma_local.ui.terminal import stderr


class Nobody:
    multi = False

    def read(self, draft: str = "") -> str | None:
        return None


def begun(conversation: Conversation) -> Chat:
    model: Any = SimpleNamespace(name="m")
    return Chat(conversation=conversation, model=model, source=Nobody(), terminal=stderr(), draw=lambda most: 0)


# ── lines that belong together ────────────────────────────────────────────────────────────────────────────────────


def whole(lines: Sequence[str]) -> list[str]:
    """What `Lines` finds, each time from all that is held."""
    found, held = [], []
    for line in lines:
        goes_on = open_block("\n".join((*held, line)))
        held.append(line[:-1] if line.endswith("\\") and not goes_on else line)
        if not goes_on and not line.endswith("\\"):
            found.append("\n".join(held))
            held = []
    return found + (["\n".join(held)] if held else [])


def fed(lines: Sequence[str], largest: int = 10_000) -> list[str]:
    gathered = Lines(largest)
    found = [gathered.feed(line) for line in lines]
    return [each for each in (*found, gathered.close()) if each is not None]


PIECES = st.lists(st.sampled_from(['"""', '"', "\\", "/", "/x", " ", "\t", "a"]), max_size=4).map("".join)


@given(st.lists(PIECES, max_size=6))
@example(['"""', '"""\t', "a"])
@example(["\\", '"""', "a", '"""'])
@example(["/x\\", '"""', "a", '"""'])
def test_a_line_at_a_time_finds_what_the_whole_would(lines: list[str]) -> None:
    assert fed(lines) == whole(lines)


@pytest.mark.parametrize("first", ['"""', "\\", "a\\", "/x\\", "/x y\\"])
def test_each_line_is_looked_at_once(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def looked(text: str) -> bool:
        seen.append(len(text))
        return open_block(text)

    monkeypatch.setattr(commands, "open_block", looked)
    assert len(fed([first, *["abc\\"] * 999])) == 1
    assert sum(seen) <= 1000 * 10


def test_a_message_without_an_end_is_not_held() -> None:
    gathered = Lines(100)
    assert gathered.feed('"""') is None
    for _ in range(1000):
        assert gathered.feed("abcdefgh") is None
        assert sum(map(len, gathered._held)) <= 100
    with pytest.raises(PromptError):
        gathered.feed('"""')
    assert gathered.feed("next") == "next"


def test_a_pipe_s_messages_have_a_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_input, "LARGEST", 20)
    source = Piped(io.BytesIO(b'"""\n0123456789\n0123456789\n"""\nnext\n'))
    with pytest.raises(PromptError):
        source.read()
    assert source.read() == "next"


# ── the line editor ───────────────────────────────────────────────────────────────────────────────────────────────


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_history_that_cannot_be_written_is_said_once_and_kept_in_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with create_pipe_input() as pipe:
        source = Typed(tmp_path, {}, input=pipe, output=DummyOutput())  # a folder: it cannot even be read
        found = []
        for text in ("one\r", "two\r", "\x1b[A\x1b[A\r"):
            pipe.send_text(text)
            found.append(source.read())
    assert found == ["one", "two", "one"]
    assert capsys.readouterr().err.count("what is typed is not kept any more") == 1


def test_a_disk_that_fills_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from prompt_toolkit.history import FileHistory

    monkeypatch.setattr(FileHistory, "store_string", full)
    with create_pipe_input() as pipe:
        source = Typed(tmp_path / "history", {}, input=pipe, output=DummyOutput())
        pipe.send_text("one\r")
        assert source.read() == "one"
        pipe.send_text("\x1b[A\r")
        assert source.read() == "one"
    assert capsys.readouterr().err == "what is typed is not kept any more: No space left on device\n"


@pytest.mark.parametrize("fails", [False, True])
def test_the_editor_s_key_leaves_a_draft(
    fails: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with create_pipe_input() as pipe:

        def stand_in(text: str) -> str:
            pipe.send_text("!\r")
            if fails:
                raise UsageError("no editor", "set one")
            return text + "\nmore"

        monkeypatch.setattr(chat_input, "edited", stand_in)
        pipe.send_text("some\x18\x05")
        assert Typed(None, {}, input=pipe, output=DummyOutput()).read() == ("some!" if fails else "some\nmore!")
    assert capsys.readouterr().err == ("no editor\n  fix: set one\n" if fails else "")


def test_an_editor_whose_quotation_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", "'vi")
    with pytest.raises(UsageError, match="quotation"):
        edited("x")


def test_no_place_to_edit_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDITOR", "true")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(UsageError, match="no place"):
        edited("x")


@pytest.mark.parametrize("text", ["/record ~a\0b", "/model ", "/load "])
def test_what_cannot_be_completed_is_not(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[str]:
        raise ConfigError("models.toml is broken", "mend it")

    completer = Typed(None, {"model": broken, "load": full}, output=DummyOutput())._session.completer
    assert completer is not None
    assert [*completer.get_completions(Document(text), CompleteEvent())] == []


def test_a_closed_stdin_is_said(monkeypatch: pytest.MonkeyPatch, standing_in: FakeChat, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(cli_chat, "import_torch", lambda: None)
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(PromptError, match="closed"):
        piped()
    with pytest.raises(PromptError, match="closed"):
        cli_chat.chat(model="fake")
    assert standing_in.opened is None  # it is found out before a model is


# ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("line", ["export md ~nosuchuser/x", "record ~nosuchuser/x.jsonl"])
def test_the_home_of_a_user_that_is_none(line: str) -> None:
    name, _, argument = line.partition(" ")
    with pytest.raises(UsageError, match="~nosuchuser"):
        ACTIONS[name](begun(pairs(("q", "a"))), argument)


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Python ignores SIGXFSZ: what is beyond fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [10, 100_000])  # one that the buffer hides until it is flushed
def test_an_export_that_cannot_be_written_leaves_nothing(size: int, tmp_path: Path) -> None:
    path = tmp_path / "out.md"
    with files_up_to(4), pytest.raises(UsageError, match="cannot be written"):
        ACTIONS["export"](begun(pairs(("q", "a" * size))), f"md {path}")
    assert not path.exists()
    path.write_text("another's")
    with pytest.raises(UsageError, match="is there already"):
        ACTIONS["export"](begun(pairs(("q", "a"))), f"md\t{path}")
    assert path.read_text() == "another's"


def test_any_blank_space_is_between_a_key_and_its_value() -> None:
    chat = begun(pairs())
    for argument in ("steps\t5", "stop  \t a b "):
        ACTIONS["set"](chat, argument)
    assert (chat.conversation.settings.steps, chat.conversation.settings.stop) == (5, ("a b",))


def test_a_stop_string_that_is_no_text_is_neither_set_nor_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="UTF-8"):
        with_setting(pairs(), "stop", "a\udcff")
    path = store.save(pairs(), tmp_path / "a" / "b")
    found = json.loads(path.read_text())
    for stop in ("a\udcff", ""):
        found["settings"]["stop"] = [stop]
        path.write_text(json.dumps(found))
        with pytest.raises(store.Damaged, match="stop"):
            store.load("n", path.parent)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x; give another --stop", "x; say /set stop default"),
        ("raise `--steps`, or give `--preset quality`", "raise `/set steps`, or give `/set preset quality`"),
        (
            "no room; plan for a longer one (--context)",
            "no room; say /undo or /clear, or begin with a longer --context",
        ),
        ("shorten it to 7,000 tokens", "say /undo or /clear, or shorten the message"),
        (
            "shorten it to 7 tokens, or plan for a longer context, up to 262,144 (--context)",
            "say /undo or /clear, or shorten the message",
        ),
        ("shorten the prompt", "say /undo or /clear, or shorten the message"),
    ],
)
def test_cures_are_what_a_chat_can_do(line: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _here(line) == expected
    begun(pairs()).failed(PromptError("what", line))
    assert expected in " ".join(capsys.readouterr().err.split())


# ── another model ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def standing_in(monkeypatch: pytest.MonkeyPatch) -> FakeChat:
    fake = FakeChat("Hi")
    monkeypatch.setitem(sys.modules, "dgemma_local.session", fake_session.module(fake))
    return fake


def opened() -> Opened:
    wishes: Any = {}
    return Opened("fake", wishes)


@pytest.mark.parametrize("stopped", [KeyboardInterrupt(), ConfigError("broken", "mend it")])
def test_a_model_that_does_not_open_leaves_the_one_before_it(
    stopped: BaseException, monkeypatch: pytest.MonkeyPatch, standing_in: FakeChat
) -> None:
    model = opened()
    monkeypatch.setattr(registry, "resolve", lambda *_: None)
    module: Any = sys.modules["dgemma_local.session"]
    real, tries = module.open_session, []

    def failing(name: str, *rest: Any) -> FakeChat:
        tries.append(name)
        if len(tries) <= 2:
            raise stopped
        found: FakeChat = real(name, *rest)
        return found

    monkeypatch.setattr(module, "open_session", failing)
    for _ in range(2):
        with pytest.raises((KeyboardInterrupt, DgemmaError)):
            model.switch("other") if not tries else model.context
        assert model.name == "fake"
    assert (
        model.context == 1000
        and not model.ask([{"role": "user", "content": "q"}], 1, pairs().settings, None).record.finished
    )
    assert tries == ["other", "fake", "fake"]


def test_a_model_that_opens_gives_its_name(monkeypatch: pytest.MonkeyPatch, standing_in: FakeChat) -> None:
    model = opened()
    monkeypatch.setattr(registry, "resolve", lambda *_: None)
    standing_in.name = "other"
    model.switch("other")
    assert model.name == "other"
