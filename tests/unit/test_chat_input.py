"""What a chat is asked: messages of a pipe, with their faults, and what is typed while it answers or is stopped."""

import fcntl
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prompt_toolkit.input import typeahead
from prompt_toolkit.input.vt100 import Vt100Input
from prompt_toolkit.output import DummyOutput

from dgemma_local.chat.conversation import Conversation
from dgemma_local.errors import PromptError, UsageError
from dgemma_local.ui import chat, chat_input
from dgemma_local.ui.chat_input import LONGEST_KEPT, Piped, Typed, ahead, edited
from dgemma_local.ui.chat_turn import Chat
from dgemma_local.ui.pause import front, given_back
from dgemma_local.ui.terminal import stderr

TESTS = Path(__file__).parent.parent
PATIENCE = 20  # seconds
LOCAL = termios.ECHO | termios.ICANON

# ── a pipe ────────────────────────────────────────────────────────────────────────────────────────────────────────


def asked(raw: bytes) -> list[str]:
    """Every message, and the cause in angles where there was none."""
    source, found = Piped(io.BytesIO(raw)), []
    while True:
        try:
            message = source.read()
        except PromptError as error:
            message = f"<{error.what}>"
        if message is None:
            return found
        found.append(message)


@pytest.mark.parametrize(
    "fault", [b"caf\xe9", b"\xff\\", b"x" * 99, b"x" * 98 + b"\\"], ids=["latin 1", "goes on", "long", "long, goes on"]
)
def test_a_fault_in_a_block_costs_the_whole_message(fault: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_input, "LARGEST", 80)
    monkeypatch.setattr(chat_input, "ENDS", 8)
    (what, behind) = asked(b'"""\none\n' + fault + b'\ntwo\n"""\nnext\n')
    assert what.startswith("<a line is") and behind == "next"


def test_a_fault_in_a_line_that_goes_on_costs_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_input, "LARGEST", 80)
    monkeypatch.setattr(chat_input, "ENDS", 8)
    assert asked(b"a\\\n\xff\\\nb\nnext\n") == ["<a line is not UTF-8 text>", "next"]
    assert asked(b"x" * 99 + b"\\\nb\nnext\n")[1:] == ["next"]
    assert asked(b"x" * 99) == asked(b"x" * 99 + b"\n")
    assert asked(b'"""\n\xff') == ["<a line is not UTF-8 text>"]


class Endless(io.BytesIO):
    """`begin`, then `line` again and again, or a line without an end; it notices being read for ever."""

    def __init__(self, begin: bytes, line: bytes) -> None:
        super().__init__(begin)
        self._line, self._given = line, 0

    def readline(self, size: int | None = -1) -> bytes:
        self._given += 1
        assert self._given < 1000
        return super().readline(size) or self._line or bytes(size or 0)


@pytest.mark.parametrize(("begin", "line"), [(b"", b""), (b'"""\n', b""), (b'"""\n', b"y\n"), (b"", b"y\\\n")])
def test_an_input_without_an_end_is_ended(monkeypatch: pytest.MonkeyPatch, begin: bytes, line: bytes) -> None:
    monkeypatch.setattr(chat_input, "LARGEST", 50)
    monkeypatch.setattr(chat_input, "ENDLESS", 200)
    source = Piped(Endless(begin, line))
    with pytest.raises(PromptError, match="does not end"):
        source.read()
    assert source.read() is None


def test_a_block_that_is_never_closed_is_asked_without_its_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    (message,) = asked(b'"""\none\ntwo')
    assert chat.parse(message) == chat.Say("one\ntwo") and "ended before the three quotes" in capsys.readouterr().err
    (command,) = asked(b'/system """\none\ntwo\n')
    assert chat.parse(command) == chat.Command("system", "one\ntwo")
    capsys.readouterr()
    assert asked(b'"""quoted""" is what?\nnext\n') == ['"""quoted""" is what?', "next"]
    assert not capsys.readouterr().err


# ── what is typed meanwhile ───────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Keyboard:
    """A terminal, and the line editor that reads from it."""

    master: int
    slave: int
    typed: Typed

    def modes(self) -> int:
        return int(termios.tcgetattr(self.slave)[3] & LOCAL)

    def press(self, raw: bytes) -> None:
        """Raises AssertionError where the terminal takes no more."""
        while raw:
            assert select.select([], [self.master], [], PATIENCE)[1], "the terminal is held up"
            raw = raw[os.write(self.master, raw[:1000]) :]


@pytest.fixture
def keyboard() -> Iterator[Keyboard]:
    master, slave = pty.openpty()
    os.set_blocking(master, False)
    with open(slave, encoding="utf-8") as stream:  # noqa: PTH123 - a descriptor
        source = Vt100Input(stream)
        typeahead.clear_typeahead(source)
        yield Keyboard(master, slave, Typed(None, {}, input=source, output=DummyOutput()))
        typeahead.clear_typeahead(source)
    os.close(master)


@pytest.fixture
def came(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set whenever keys were kept for the next prompt."""
    store, event = typeahead.store_typeahead, threading.Event()

    def stored(source: Any, keys: Any) -> None:
        store(source, keys)
        event.set()

    monkeypatch.setattr(typeahead, "store_typeahead", stored)
    return event


def test_what_is_typed_meanwhile_comes_whole(keyboard: Keyboard) -> None:
    """A terminal that gathers lines keeps 4,095 bytes of one."""
    before = keyboard.modes()
    with ahead(keyboard.typed):
        assert not keyboard.modes()
        keyboard.press(b"x" * 4200 + b"\r")
    assert keyboard.modes() == before == LOCAL
    assert keyboard.typed.read() == "x" * 4200


def test_a_large_paste_meanwhile_holds_nothing_up(keyboard: Keyboard) -> None:
    """A terminal that nobody reads takes a few thousand characters, and then no Ctrl-C."""
    with ahead(keyboard.typed):
        keyboard.press(b"\x1b[200~" + b"x" * 100_000 + b"\x1b[201~\r")
    assert keyboard.typed.read() == "x" * 100_000


def test_a_paste_meanwhile_is_one_message(keyboard: Keyboard, came: threading.Event) -> None:
    """It begins while a chat answers, and ends at the prompt."""
    text = "line of a paste\n" * 500
    with ahead(keyboard.typed):
        keyboard.press(b"a\x1b[200~" + text.encode())
        assert came.wait(PATIENCE) and front(io.StringIO())  # as every frame asks
    keyboard.press(b"end\x1b[201~\r")
    assert keyboard.typed.read() == f"a{text}end"


def test_several_messages_typed_ahead_come_one_by_one(keyboard: Keyboard, came: threading.Event) -> None:
    with ahead(keyboard.typed):
        keyboard.press(b"one\rtwo\r")
        assert came.wait(PATIENCE)
    assert keyboard.typed.read() == "one"
    with ahead(keyboard.typed):
        keyboard.press(b"three\r")
    assert [keyboard.typed.read(), keyboard.typed.read()] == ["two", "three"]


def test_ctrl_d_typed_ahead_leaves(keyboard: Keyboard, came: threading.Event) -> None:
    with ahead(keyboard.typed):
        keyboard.press(b"\x04")
        assert came.wait(PATIENCE)
    keyboard.press(b"not this\r")
    assert keyboard.typed.read() is None


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (b"one\x1b\rtwo\r", "one\ntwo"),  # Alt-Enter
        (b"\x1b[200~one\r\ntwo\x1b[201~\r", "one\ntwo"),
        (b"\x1b[200~" + b"x" * 3000 + b"\x1b[201~\x03\r", "x" * 3000),  # Ctrl-C right behind a paste
    ],
)
def test_keys_typed_meanwhile_are_those_of_the_prompt(keyboard: Keyboard, typed: bytes, message: str) -> None:
    with ahead(keyboard.typed):
        assert termios.tcgetattr(keyboard.slave)[3] & termios.NOFLSH
        keyboard.press(typed)
    assert not termios.tcgetattr(keyboard.slave)[3] & termios.NOFLSH
    assert keyboard.typed.read() == message


def test_a_paste_that_another_program_broke_off_ends(keyboard: Keyboard) -> None:
    """Else the prompt would wait for its end mark, which went elsewhere."""
    parser, deadline = keyboard.typed._session.input.vt100_parser, time.monotonic() + PATIENCE
    with ahead(keyboard.typed):
        keyboard.press(b"\x1b[200~half")
        while getattr(parser, "_paste_buffer", "") != "half":
            assert time.monotonic() < deadline
            time.sleep(0.001)
        with given_back():
            pass
        keyboard.press(b" and more\r")
    assert keyboard.typed.read() == "half and more"


def test_the_terminal_marks_pastes_meanwhile(keyboard: Keyboard, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, marks in (("xterm", b"\x1b[?2004h\x1b[?2004l"), ("dumb", b"")):
        monkeypatch.setenv("TERM", name)
        with ahead(keyboard.typed):
            pass
        os.write(keyboard.slave, b".")
        written = b""
        while not written.endswith(b"."):
            assert select.select([keyboard.master], [], [], PATIENCE)[0]
            written += os.read(keyboard.master, 100)
        assert written == marks + b"."


def test_an_editor_gets_the_terminal_as_it_was(keyboard: Keyboard, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is typed in it."""
    found: list[Any] = []

    def run(words: list[str], check: bool) -> Any:
        found.append(keyboard.modes())
        keyboard.press(b"x\n")
        assert select.select([keyboard.slave], [], [], PATIENCE)[0]
        found.append(os.read(keyboard.slave, 10))
        return SimpleNamespace(returncode=0)

    monkeypatch.setenv("VISUAL", "editor")
    monkeypatch.setattr(chat_input.subprocess, "run", run)
    with ahead(keyboard.typed):
        assert edited("text") == "text"
        assert not keyboard.modes()
    assert found == [LOCAL, b"x\n"]


def test_ctrl_c_in_an_editor_is_the_editor_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(words: list[str], check: bool) -> Any:
        signal.raise_signal(signal.SIGINT)
        Path(words[-1]).write_text("kept", encoding="utf-8")
        return SimpleNamespace(returncode=0)

    monkeypatch.setenv("VISUAL", "editor")
    monkeypatch.setattr(chat_input.subprocess, "run", run)
    assert edited("text") == "kept"


def test_nothing_is_held_that_is_no_terminal() -> None:
    with given_back(), ahead(Piped(io.BytesIO())):
        pass


def test_a_chat_holds_the_terminal_while_it_does_what_it_was_told(
    keyboard: Keyboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def take(_: Chat, line: str) -> None:
        found.append((line, keyboard.modes()))
        if line == "one":
            raise UsageError("what", "fix")
        held.ended = True

    monkeypatch.setattr(chat, "take", take)
    model: Any = SimpleNamespace(name="m")
    held = Chat(
        conversation=Conversation(name="n", model="m"),
        model=model,
        source=keyboard.typed,
        terminal=stderr(),
        draw=lambda most: 0,
    )
    keyboard.press(b"one\rtwo\r")
    assert chat.run(held) == 0
    assert found == [("one", 0), ("two", 0)] and keyboard.modes() == LOCAL


# ── stopped ───────────────────────────────────────────────────────────────────────────────────────────────────────


def seen_until(master: int, wanted: str, *, shown: Callable[[str], str] = lambda text: text) -> str:
    found, deadline = "", time.monotonic() + PATIENCE
    while wanted not in shown(found):
        assert time.monotonic() < deadline, found
        if select.select([master], [], [], 0.05)[0]:
            chunk = os.read(master, 65536).decode(errors="replace")
            if "\x1b[6n" in chunk:  # where is the cursor?
                os.write(master, b"\x1b[1;1R")
            found += chunk
    return found


def plain(text: str) -> str:
    """Without sequences and blanks, for which an editor may move the cursor."""
    return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]| ", "", text)


def test_ctrl_z_stops_at_the_prompt_and_fg_draws_it_again() -> None:
    code = "from dgemma_local.ui.chat_input import typed; print('got', repr(typed(None, {}).read()))"
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(TESTS / "jobs.py"), sys.executable, "-c", code],
        stdin=slave, stdout=slave, stderr=slave, env=os.environ | {"TERM": "xterm-256color"}, cwd=TESTS.parent,
        start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(slave)
    try:
        seen_until(master, ">>>", shown=plain)
        os.write(master, b"begun")
        seen_until(master, "begun", shown=plain)
        os.write(master, b"\x1a")
        seen_until(master, "[stopped: ECHO ICANON]")
        os.write(master, b"fg\n")
        seen_until(master, ">>>begun", shown=plain)
        os.write(master, b" and ended\r")
        assert "got'begunandended'" in plain(seen_until(master, "[ended: ECHO ICANON]"))
        assert process.wait(PATIENCE) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(master)


# ── what is kept ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_long_paste_is_known_to_this_chat_alone(tmp_path: Path) -> None:
    history = chat_input._kept(tmp_path / "history")
    for text in ("short", "x" * LONGEST_KEPT, "y" * (LONGEST_KEPT + 1)):
        history.append_string(text)
    assert [len(each) for each in history.get_strings()] == [5, LONGEST_KEPT, LONGEST_KEPT + 1]
    again = chat_input._kept(tmp_path / "history")
    assert [len(each) for each in again.load_history_strings()] == [LONGEST_KEPT, 5]
