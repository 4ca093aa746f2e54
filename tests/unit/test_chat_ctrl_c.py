"""Ctrl-C and being ended, at every moment of a chat: nothing is lost, nothing forks, and there is always a prompt again."""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import fake_session
import pytest
from chats import pairs
from fake_chat import FakeChat

from dgemma_local.chat import private, store
from dgemma_local.cli_chat_model import Opened
from dgemma_local.interrupts import Flag, Waiting, noting_ctrl_c, undisturbed
from dgemma_local.streams import Ended
from dgemma_local.ui import chat as ui_chat
from dgemma_local.ui.chat import run
from dgemma_local.ui.chat_turn import Chat
from dgemma_local.ui.terminal import stderr


def press(times: int = 3) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Those of a process that `streams.prepare` has seen, and they are as before when all is over."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise Ended(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, leave)
    yield
    now = [signal.getsignal(number) for number in before]
    for number, handler in before.items():
        signal.signal(number, handler)
    assert now == [signal.default_int_handler, leave]


# ── signals that wait ─────────────────────────────────────────────────────────────────────────────────────────────


def pressed_in(signals: Waiting, reached: list[str], *numbers: int) -> None:
    """Each number comes amid it, thrice."""
    with signals:
        for number in 3 * numbers:
            signal.raise_signal(number)
        reached.append("the end")


def test_signals_wait_and_are_handled_once_behind_it_all() -> None:
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        pressed_in(undisturbed(), reached, signal.SIGINT)
    assert reached == ["the end"]


def test_the_first_that_is_heeded_makes_the_others_wait() -> None:
    reached = []
    with Waiting(signal.SIGINT) as signals:
        try:
            with signals.heeded():
                press()
        except KeyboardInterrupt:
            press()
            reached.append("handled")
        press()
        reached.append("kept")
        signals.forget(signal.SIGINT)
    assert reached == ["handled", "kept"]


def pressed_and_unwound(times: int, reached: list[str]) -> None:
    """More come while what the last of them raised is on its way out."""
    try:
        press(times)
    finally:
        press()
        reached.append("unwound")


def test_the_first_that_is_heeded_is_the_last_on_its_way_out() -> None:
    reached: list[str] = []
    with Waiting(signal.SIGINT) as signals:
        with pytest.raises(KeyboardInterrupt), signals.heeded():
            pressed_and_unwound(1, reached)
        signals.forget(signal.SIGINT)
    assert reached == ["unwound"]


def test_what_waits_is_handled_before_it_is_heeded_again() -> None:
    with Waiting(signal.SIGINT) as signals:
        press(1)
        with pytest.raises(KeyboardInterrupt), signals.heeded():
            pytest.fail("it was asked to stop")


def test_being_ended_goes_before_ctrl_c() -> None:
    with pytest.raises(Ended) as ended:
        pressed_in(undisturbed(), [], signal.SIGINT, signal.SIGTERM)
    assert ended.value.code == 143


def test_one_inside_another_hands_over_to_it() -> None:
    reached: list[str] = []
    with Waiting(signal.SIGINT) as outer:
        pressed_in(undisturbed(), reached, signal.SIGINT)
        reached.append("between")
        outer.forget(signal.SIGINT)
    assert reached == ["the end", "between"]


def test_what_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with undisturbed():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            press()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_whoever_leaves_ignores_what_follows() -> None:
    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Ended(number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        with pytest.raises(Ended), undisturbed() as signals, signals.heeded():
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_third_ctrl_c_of_an_answer_waits() -> None:
    pressed = Flag()
    with Waiting(signal.SIGINT) as signals:
        reached: list[str] = []
        with pytest.raises(KeyboardInterrupt), signals.heeded(), noting_ctrl_c(pressed):
            pressed_and_unwound(2, reached)
        assert pressed.is_set() and reached == ["unwound"]
        press()
        signals.forget(signal.SIGINT)


def test_an_answer_that_is_left_open_hands_a_late_ctrl_c_on() -> None:
    """Its generator puts back the handler that it found, when that is over."""
    left_open = noting_ctrl_c(Flag())
    with Waiting(signal.SIGINT):
        left_open.__enter__()
    left_open.__exit__(None, None, None)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            press(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)


# ── a chat ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Typist:
    """Gives each line, or does what stands in its place and gives what that does."""

    multi = False

    def __init__(self, *lines: "str | Callable[[], str]") -> None:
        self._lines = list(lines)

    def read(self, draft: str = "") -> str | None:
        if not self._lines:
            return None
        line = self._lines.pop(0)
        return line if isinstance(line, str) else line()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeChat:
    fake = FakeChat("", answers=("Hi",))
    monkeypatch.setitem(sys.modules, "dgemma_local.session", fake_session.module(fake))
    return fake


def chat_of(folder: Path, *lines: "str | Callable[[], str]", **more: Any) -> Chat:
    wishes: Any = {}
    return Chat(
        conversation=pairs(),
        model=Opened("fake", wishes),
        source=Typist(*lines),
        terminal=stderr(),
        draw=lambda most: 0,
        folder=folder,
        **more,
    )


def questions(folder: Path) -> dict[str, Sequence[str]]:
    found = {each: store.load(each, folder) for each in store.names(folder)}
    return {name: [turn.user for turn in conversation.turns] for name, conversation in found.items()}


def pressing_in(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, act: Callable[[], None]) -> None:
    """`act` comes amid each call of it."""
    real = getattr(owner, name)

    def pressed(*arguments: Any, **rest: Any) -> Any:
        act()
        found = real(*arguments, **rest)
        act()
        return found

    monkeypatch.setattr(owner, name, pressed)


@pytest.mark.parametrize(
    ("owner", "name"), [(private, "folder_at"), (store, "free_name"), (store, "_written"), (private, "_sync")]
)
def test_ctrl_c_amid_a_save_neither_loses_nor_forks(
    owner: Any,
    name: str,
    fake: FakeChat,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pressing_in(monkeypatch, owner, name, press)
    assert run(chat_of(tmp_path, "one", "two", "/undo", "three")) == 0
    assert questions(tmp_path) == {"n": ["one", "three"]}
    assert [each.name for each in tmp_path.iterdir()] == ["n.json"]
    assert "elsewhere" not in capsys.readouterr().err


def test_ctrl_c_amid_a_new_name_leaves_one_conversation(
    fake: FakeChat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = chat_of(tmp_path, "one", "/save new", "two")
    pressing_in(monkeypatch, private, "_sync", press)
    assert run(chat) == 0 and questions(tmp_path) == {"new": ["one", "two"]}


@pytest.mark.parametrize("said", ["interrupted", ui_chat.LEAVE])
def test_ctrl_c_amid_what_is_said_of_another(
    said: str, fake: FakeChat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    fake.answers = (KeyboardInterrupt(), "Hi")
    real, came = Chat.say, []

    def say(self: Chat, text: str, style: str = "dim") -> None:
        if text == said:
            came.append(text)
            press()
        real(self, text, style)

    monkeypatch.setattr(Chat, "say", say)
    assert run(chat_of(tmp_path, "one", interrupted, "two")) == 0
    assert came and questions(tmp_path) == {"n": ["one", "two"]}


def test_many_ctrl_c_end_one_answer_and_are_not_spoken_of(
    fake: FakeChat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.answers = (KeyboardInterrupt(), "Hi")
    pressing_in(monkeypatch, private, "_sync", press)
    assert run(chat_of(tmp_path, "one")) == 0
    assert ui_chat.LEAVE not in (told := capsys.readouterr().err) and "interrupted" in told


def test_ctrl_c_while_the_editor_begins_or_ends_is_nothing(fake: FakeChat, tmp_path: Path) -> None:
    def building() -> str:
        press()
        return "one"

    assert run(chat_of(tmp_path, building)) == 0
    assert questions(tmp_path) == {"n": ["one"]} and len(fake.prompts) == 1


def test_ctrl_c_while_a_chat_is_left_is_nothing(
    fake: FakeChat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pressing_in(monkeypatch, Chat, "leave", press)
    assert run(chat_of(tmp_path, "one")) == 0


def test_ctrl_c_ends_a_script_that_waits_for_a_line(fake: FakeChat, tmp_path: Path) -> None:
    came: list[str] = []

    def waiting() -> str:
        press(1)
        came.append("a line")  # which may never come
        return "two"

    assert run(chat_of(tmp_path, "one", waiting, scripted=True)) == 130
    assert not came and len(fake.prompts) == 1


def test_ctrl_c_ends_a_script_behind_its_save(fake: FakeChat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pressing_in(monkeypatch, private, "_sync", press)
    assert run(chat_of(tmp_path, "one", "two", scripted=True)) == 130
    assert questions(tmp_path) == {"n": ["one"]}


def test_being_ended_amid_a_save_leaves_when_it_is_there(
    fake: FakeChat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pressing_in(monkeypatch, store, "_written", lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Ended):
        run(chat_of(tmp_path, "one", "two"))
    assert questions(tmp_path) == {"n": ["one"]}
    assert [each.name for each in tmp_path.iterdir()] == ["n.json"]
