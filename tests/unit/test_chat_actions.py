"""What stands behind a command: used, or refused in one line."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chats import pairs

from dgemma_local.chat import store
from dgemma_local.chat.commands import COMMANDS, SHORT, parse
from dgemma_local.chat.conversation import KEYS, Conversation, Turn, shown, with_setting
from dgemma_local.errors import UsageError
from dgemma_local.ui import chat_shown
from dgemma_local.ui.chat import take
from dgemma_local.ui.chat_actions import ACTIONS
from dgemma_local.ui.chat_turn import Chat
from dgemma_local.ui.terminal import stderr

THREE = pairs(("one", "first"), ("two", "second"), ("three", "third"), system="be brief\nand kind")


class Nobody:
    multi = False

    def read(self, draft: str = "") -> str | None:
        return None


def begun(conversation: Conversation = THREE, folder: Path | None = None, **rest: Any) -> Chat:
    model: Any = SimpleNamespace(name="m", context=1000)
    return Chat(
        conversation=conversation,
        model=model,
        source=Nobody(),
        terminal=stderr(),
        draw=lambda most: 0,
        folder=folder,
        **rest,
    )


@pytest.mark.parametrize("name", [known.name for known in COMMANDS if not known.argument])
def test_a_command_that_takes_nothing_refuses_what_stands_behind_it(name: str) -> None:
    chat = begun()
    with pytest.raises(UsageError, match=f"/{name} takes nothing"):
        take(chat, f"/{name} now")
    assert chat.conversation == THREE and not chat.ended


@pytest.mark.parametrize(
    "line",
    [
        "/record off now", "/visualize on now", "/think show now", "/show me", "/help me now", "/undo x", "/undo 0",
        "/undo 4", "/undo -1", "/undo 1 2", "/undo " + "9" * 5000, "/undo ²", "/copy 4", "/copy x", "/help xyzzy",
        "/set thinking", "/set show-thoughts maybe", "/delete", "/delete n", "/delete none", "/delete ../x",
    ],
)  # fmt: skip
def test_what_says_nothing_is_refused_in_two_lines(line: str, tmp_path: Path) -> None:
    chat = begun(folder=tmp_path / "chats")
    with pytest.raises(UsageError) as error:
        take(chat, line)
    assert "\n" not in error.value.what + error.value.fix and len(error.value.what) < 100
    assert chat.conversation == THREE and chat.recording is None and not chat.visualize


def test_several_turns_are_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    chat = begun()
    take(chat, "/undo 2")
    assert [turn.user for turn in chat.conversation.turns] == ["one"]
    take(chat, "/undo 1")
    assert not chat.conversation.turns
    assert capsys.readouterr().err.split("\n")[:2] == ["taken back: 2 turns", "taken back: one"]


@pytest.mark.parametrize(("line", "text"), [("/copy", "third"), ("/copy 1", "third"), ("/copy 3", "first")])
def test_an_earlier_answer_is_copied(monkeypatch: pytest.MonkeyPatch, line: str, text: str) -> None:
    found = []
    monkeypatch.setattr(chat_shown, "copy", lambda text, _: found.append(text) or "copied")
    take(begun(), line)
    assert found == [text]


def test_the_system_turn_and_a_thought_are_shown_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    thought = Conversation(name="n", model="m", turns=(Turn(user="u", answer="a", thought="so\nand so\n"),))
    for chat, line in [
        (begun(), "system"),
        (begun(), "thought"),
        (begun(thought), "thought"),
        (begun(thought), "system"),
    ]:
        take(chat, f"/show {line}")
    assert capsys.readouterr().err.splitlines() == [
        "be brief", "and kind", "the last answer had no thought", "so", "and so", "there is no system turn"
    ]  # fmt: skip


def test_help_of_one_command(capsys: pytest.CaptureFixture[str]) -> None:
    for known in COMMANDS:
        for name in (
            known.name,
            f"/{known.name.upper()}",
            *(short for short, long in SHORT.items() if long == known.name),
        ):
            take(begun(), f"/help {name}")
            lines = capsys.readouterr().err.splitlines()
            assert lines[0] == f"/{known.name} {known.argument}".rstrip() + f"  {known.does}"
            assert max(map(len, lines)) < 80
    take(begun(), "/help set")
    assert f"KEY: {' '.join(KEYS)}" in capsys.readouterr().err
    with pytest.raises(UsageError) as error:
        take(begun(), "/help retyr")
    assert error.value.fix == "say /help retry"


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("STEPS 5", "steps", "5"), ("max_tokens 9", "max-tokens", "9"), ("Show_Thoughts on", "show-thoughts", "on"),
        ("thinking on", "thinking", "on"), ("thinking off", "thinking", "off"), ("thinking default", "thinking", "off"),
    ],
)  # fmt: skip
def test_a_key_is_known_however_it_is_written(
    line: str, key: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = begun()
    take(chat, f"/set {line}")
    assert dict(shown(chat.conversation.settings))[key] == value
    assert capsys.readouterr().err == f"{key}: {value}\n"


def test_every_key_that_is_shown_can_be_set() -> None:
    assert {key for key, _ in shown(THREE.settings)} == {*KEYS}
    for key in KEYS:
        assert with_setting(THREE, key, "default").settings == THREE.settings


def test_a_conversation_is_deleted_and_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "dgemma" / "chats"
    for name in ("n", "old", "older"):
        store.save(Conversation(name=name, model="m", turns=THREE.turns), folder)
    chat = begun(folder=folder)
    take(chat, "/delete old")
    assert store.names(folder) == ["n", "older"] and capsys.readouterr().err == "deleted: old\n"
    with pytest.raises(UsageError, match="the conversation at work"):
        take(chat, "/delete n")
    with pytest.raises(UsageError, match="no conversation is called 'old'"):
        take(chat, "/delete old")
    with pytest.raises(UsageError):
        take(begun(), "/delete older")
    (folder / "a folder.json").mkdir()
    with pytest.raises(UsageError, match="cannot be deleted"):
        take(chat, "/delete a folder")
    assert json.loads((folder / "n.json").read_text()) and store.names(folder) == ["a folder", "n", "older"]


def test_every_command_does_something() -> None:
    assert [*ACTIONS] == [known.name for known in COMMANDS]
    assert all(parse(f"/{name}") is not None for name in (*ACTIONS, *SHORT))
