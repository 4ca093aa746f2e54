"""Conversations as files: whole or not at all, private, and checked when they are read; and what is exported of them."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from chats import CONVERSATIONS, pairs
from hypothesis import given
from hypothesis import strategies as st

from dgemma_local.chat import private, store
from dgemma_local.chat.conversation import SEEDS, Conversation, retried, said, with_settings
from dgemma_local.chat.export import exported
from dgemma_local.errors import UsageError
from dgemma_local.presets import Preset
from dgemma_local.ui.terminal import printable

TWO = pairs(("a <b>", "**A** & co"), ("# c\nd", ""), system="be\nbrief")


@given(conversation=CONVERSATIONS)
def test_what_is_saved_is_what_is_loaded(tmp_path_factory: pytest.TempPathFactory, conversation: Conversation) -> None:
    folder = tmp_path_factory.getbasetemp() / "chats"
    store.save(conversation, folder)
    assert store.load(conversation.name, folder) == conversation


def test_files_are_private_and_nothing_is_left_beside_them(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        folder = tmp_path / "state" / "dgemma" / "chats"
        path = store.save(TWO, folder)
        store.save(replace(TWO, turns=()), folder)
        history = private.file_at(folder.parent / "history")
    finally:
        os.umask(old)
    assert [each.name for each in folder.iterdir()] == ["n.json"] == [path.name]
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, history)] == [0o600, 0o600]
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


def test_a_history_of_others_becomes_private_and_keeps_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "history").write_text("typed")
    (tmp_path / "history").chmod(0o644)
    path = private.file_at(tmp_path / "history")
    assert path.read_text() == "typed" and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_disk_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(TWO, tmp_path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            store.save(replace(TWO, turns=()), tmp_path)
    assert store.load("n", tmp_path) == TWO and [each.name for each in tmp_path.iterdir()] == ["n.json"]


KILLED = """
import sys
from pathlib import Path
from dgemma_local.chat import private, store
from dgemma_local.chat.conversation import Conversation, Turn
folder, turns = Path(sys.argv[1]), ()
while True:
    turns = (*turns, Turn(user=str(len(turns)), answer="x" * 20_000))[-200:]
    store.save(Conversation(name="n", model="m", asked=len(turns), turns=turns), folder)
    print(len(turns), flush=True)
"""


def test_a_kill_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    for pause in (0.0, 0.003, 0.01, 0.03):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(4):
            said = int(process.stdout.readline())
        time.sleep(pause)
        process.send_signal(signal.SIGKILL)
        said = max([said, *map(int, process.stdout.read().split())])
        process.stdout.close()
        process.wait()
        found = store.load("n", tmp_path)
        assert len(found.turns) >= said and found.turns[-1].answer == "x" * 20_000
    assert store.names(tmp_path) == ["n"]  # whatever was left beside it is no conversation


def test_a_file_from_before_there_were_presets_is_read_and_goes_on(tmp_path: Path) -> None:
    settings = {key: value for key, value in asdict(TWO.settings).items() if key != "preset"}
    (tmp_path / "n.json").write_bytes(saved(settings=settings))
    old = store.load("n", tmp_path)
    assert old == TWO and old.settings.preset is None
    now = with_settings(old, preset=Preset.fast)
    assert store.kept(now, old, tmp_path) == now == store.load("n", tmp_path)  # not beside it: the file is this one


def saved(**values: Any) -> bytes:
    return json.dumps({"format": "dgemma chat", "version": 1} | asdict(TWO) | values).encode()


DAMAGES = {
    "empty": (b"", "Expecting value"),
    "cut": (saved()[:-40], "is damaged"),
    "not json": (b"hello", "Expecting value"),
    "not utf-8": (b"\xff\xfe{}", "decode"),
    "deep": (b"[" * 200_000, "recursion depth"),
    "a list": (b"[]", "no object"),
    "another format": (saved(format="x"), "no conversation"),
    "a later version": (saved(version=2), "is from a later dgemma (its version is 2, this program reads 1)"),
    "no version": (saved(version="x"), "damaged and stays as it is: its version is x"),
    "no turns": (saved(turns=None), "no list of turns"),
    "a turn that is none": (saved(turns=[1]), "turn 1 is no object"),
    "a turn that lacks": (saved(turns=[{"user": "a"}]), "turn 1 lacks 'answer'"),
    "ids that are none": (saved(turns=[asdict(TWO.turns[0]) | {"ids": [1.5]}]), "'ids'"),
    "a seed past its range": (saved(turns=[asdict(TWO.turns[0]) | {"seed": 1 << 64}]), "'seed'"),
    "a preset that is none": (saved(settings=asdict(TWO.settings) | {"preset": "hasty"}), "'preset': not a preset"),
    "a flag that is a number": (saved(settings=asdict(TWO.settings) | {"thinking": 1}), "'thinking'"),
    "steps out of range": (saved(settings=asdict(TWO.settings) | {"steps": 0}), "'steps'"),
    "no settings": (saved(settings=[]), "its settings is no object"),
    "a system of numbers": (saved(system=1), "'system'"),
    "a huge number": (b'{"format": ' + b"9" * 10_000 + b"}", "digits"),
    "NaN": (saved(asked=float("nan")), "'asked'"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_one_line(tmp_path: Path, name: str) -> None:
    raw, why = DAMAGES[name]
    store.save(replace(TWO, name="good"), tmp_path)
    (tmp_path / "bad.json").write_bytes(raw)
    with pytest.raises(store.Damaged, match=re.escape(why)) as caught:
        store.load("bad", tmp_path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400 and "bad.json" in str(caught.value)
    found = {each.name: each for each in store.listed(tmp_path)}
    assert found["bad"].conversation is None and found["bad"].damage
    assert found["good"].conversation == replace(TWO, name="good")
    assert (tmp_path / "bad.json").read_bytes() == raw


@given(st.binary(max_size=40), st.integers(0, 600))
def test_no_damage_is_more_than_a_line(tmp_path_factory: pytest.TempPathFactory, junk: bytes, at: int) -> None:
    folder = tmp_path_factory.getbasetemp()
    raw = saved()
    (folder / "bad.json").write_bytes(raw[:at] + junk + raw[at + len(junk) :])
    with suppress(store.Damaged):
        store.load("bad", folder)
    found = {each.name: each for each in store.listed(folder)}["bad"]
    assert (found.conversation is None) == bool(found.damage) and "\n" not in found.damage


def test_the_latest_is_listed_first(tmp_path: Path) -> None:
    for i, name in enumerate(["b", "c", "a"]):
        path = store.save(replace(TWO, name=name), tmp_path)
        os.utime(path, (i, i))
    (tmp_path / "a folder.json").mkdir()
    os.utime(tmp_path / "a folder.json", (9, 9))
    assert [each.name for each in store.listed(tmp_path)] == ["a folder", "a", "c", "b"]
    assert next(store.listed(tmp_path)).damage
    assert [*store.listed(tmp_path / "none")] == [*store.listed(None)] == store.names(None) == []


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "a\\b", ".hidden", "a\0b", "a\nb", "x" * 81, "𠮷" * 63, " a", "a ", "-a", "C:x"],
)
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        store.load(name, tmp_path)


@pytest.mark.parametrize("name", ["a", "Zürich 2.0", "数独", "2026-11-30-120000", "x" * 80, "𠮷" * 62])
def test_names_that_are_some(tmp_path: Path, name: str) -> None:
    store.save(replace(TWO, name=name), tmp_path)
    assert store.load(name, tmp_path).name == name


def test_renaming_keeps_one_file_and_takes_nobody_s_name(tmp_path: Path) -> None:
    store.save(TWO, tmp_path)
    store.renamed(replace(TWO, name="new"), TWO, tmp_path)
    assert store.names(tmp_path) == ["new"] and store.load("new", tmp_path).turns == TWO.turns
    store.save(TWO, tmp_path)
    with pytest.raises(UsageError, match="already"):
        store.renamed(replace(TWO, name="new"), TWO, tmp_path)
    assert store.names(tmp_path) == ["n", "new"]


def test_renaming_leaves_a_file_that_another_has_written(tmp_path: Path) -> None:
    theirs = replace(TWO, asked=9)
    store.save(theirs, tmp_path)
    store.renamed(replace(TWO, name="new"), TWO, tmp_path)
    store.renamed(replace(TWO, name="newer"), None, tmp_path)
    assert store.load("n", tmp_path) == theirs and store.names(tmp_path) == ["n", "new", "newer"]


def test_a_free_name(tmp_path: Path) -> None:
    assert store.free_name("n", tmp_path) == "n" == store.free_name("n", None)
    store.save(TWO, tmp_path)
    assert store.free_name("n", tmp_path) == "n-2"
    store.save(replace(TWO, name="n-2"), tmp_path)
    assert store.free_name("n", tmp_path) == "n-3"
    assert store.free_name("n-2", tmp_path) == "n-3"  # and not n-2-2: it is one of that row
    store.save(replace(TWO, name="2026-11-30"), tmp_path)
    assert store.free_name("2026-11-30", tmp_path) == "2026-11-30-2"  # no 2026-11 is there to be counted on


@pytest.mark.parametrize("name", ["x" * 80, "𠮷" * 62])
def test_a_free_name_is_one_that_can_be_loaded(tmp_path: Path, name: str) -> None:
    store.save(replace(TWO, name=name), tmp_path)
    found = store.kept(replace(TWO, name=name), None, tmp_path)
    assert found.name[-2:] == "-2" and store.load(found.name, tmp_path) == found


def test_what_others_have_written_stays(tmp_path: Path) -> None:
    mine, theirs = replace(TWO, asked=1), replace(TWO, asked=2)
    assert store.kept(mine, None, tmp_path) == mine
    assert store.kept(theirs, mine, tmp_path) == theirs  # the file holds what was known of it
    again = replace(mine, asked=3)
    aside = store.kept(again, mine, tmp_path)
    assert aside == replace(again, name="n-2") and store.load("n", tmp_path) == theirs
    assert store.load("n-2", tmp_path) == aside
    assert store.kept(again, aside, tmp_path).name == "n-3"  # known of another name
    (tmp_path / "n.json").write_text("{")
    assert store.kept(mine, theirs, tmp_path).name == "n-4" and (tmp_path / "n.json").read_text() == "{"
    (tmp_path / "n.json").unlink()
    assert store.kept(mine, theirs, tmp_path) == mine == store.load("n", tmp_path)


@pytest.mark.parametrize("asked", [1 << 30, SEEDS - 1])
def test_what_is_read_is_written_and_read_again(asked: int, tmp_path: Path) -> None:
    store.save(replace(TWO, asked=asked), tmp_path)
    found = store.load("n", tmp_path)
    for after in (said(found, TWO.turns[0]), retried(found, replace(TWO.turns[0], outcome="interrupted"))):
        store.save(after, tmp_path)
        assert store.load("n", tmp_path) == after and after.asked == (asked + 1) % SEEDS


def test_half_a_character_is_none(tmp_path: Path) -> None:
    turn = asdict(TWO.turns[0])
    half = {"user": "a\ud83d", "answer": "\udc80", "thought": "\ud83d\ude00"}
    (tmp_path / "n.json").write_bytes(saved(system="\udcff", turns=[turn | half]))
    found = store.load("n", tmp_path)
    assert (found.system, found.turns[0].user, found.turns[0].answer) == ("\ufffd", "a\ufffd", "\ufffd")
    assert found.turns[0].thought == "\U0001f600"
    assert store.kept(replace(found, asked=1), found, tmp_path).name == "n"


@pytest.mark.parametrize("links", [True, False])
def test_a_name_is_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    """Two that began in the same second, neither with a file when it looked."""
    if not links:

        def none(beside: str, path: Path) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", none)
    free = store.free_name
    looked: list[str] = []

    def late(wish: str, folder: Path | None) -> str:
        looked.append(wish)
        return wish if len(looked) < 3 else free(wish, folder)

    monkeypatch.setattr(store, "free_name", late)
    first, second = (store.kept(replace(TWO, asked=asked), None, tmp_path) for asked in (1, 2))
    assert [first.name, second.name] == ["n", "n-2"] and len(looked) == 3
    assert [store.load(each, tmp_path).asked for each in ("n", "n-2")] == [1, 2]
    assert len([*tmp_path.iterdir()]) == 2
    assert {stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()} == {0o600}


def test_a_home_in_which_nothing_is_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "somebody"))
    home = store.home()
    assert home == tmp_path / "somebody" / ".local" / "state" / "dgemma"
    assert store.kept(TWO, None, home / "chats") == TWO == store.load("n", home / "chats")


def test_a_file_in_the_folder_s_place_is_no_name_that_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said, once: no other name is tried, and nobody is told that another conversation had this one."""
    (tmp_path / "chats").write_text("")
    monkeypatch.setattr(store, "_written", lambda *_: pytest.fail("there is nowhere to write to"))
    for attempt in (
        lambda: store.kept(TWO, None, tmp_path / "chats"),
        lambda: store.renamed(TWO, None, tmp_path / "chats"),
    ):
        with pytest.raises(NotADirectoryError, match="chats is no folder"):
            attempt()


def test_where_conversations_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert store.home() == tmp_path / "dgemma"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.home() == tmp_path / ".local/state/dgemma"

    def homeless(_: Path) -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "expanduser", homeless)
    assert store.home() is None


# ── exports ───────────────────────────────────────────────────────────────────────────────────────────────────────


@given(CONVERSATIONS)
def test_json_holds_everything_in_ascii(conversation: Conversation) -> None:
    text = exported(conversation, "json", printable)
    assert text.isascii() and json.loads(text) == json.loads(json.dumps(asdict(conversation)))


@given(CONVERSATIONS)
def test_html_holds_every_text_and_no_tag_of_it(conversation: Conversation) -> None:
    text = exported(conversation, "html", lambda text: text)
    tags = re.compile(r"</?([a-z]+)")
    empty = exported(replace(conversation, turns=(), system=None, name="", model="", started=""), "html", str)
    ours = {*tags.findall(empty), "section", "div", "footer", "details", "summary"} | {"h", "p"}
    assert {*tags.findall(text)} <= ours
    bodies = [unescape(body) for body in re.findall(r'<div class="answer">(.*?)</div>', text, re.S)]
    assert bodies == [turn.answer for turn in conversation.turns]


def test_html_of_a_hostile_text() -> None:
    hostile = "</div><script>alert(1)</script>&amp;\x1b[2J"
    text = exported(pairs((hostile, hostile), system=hostile), "html", printable)
    assert "<script" not in text and "\x1b" not in text
    assert text.count("&lt;/div&gt;&lt;script&gt;alert(1)&lt;/script&gt;&amp;amp;�[2J") == 3


def test_markdown() -> None:
    text = exported(replace(TWO, name="a `b`"), "md", printable)
    assert text.startswith("# `` a `b` ``\n")
    assert "## System\n\n> be\n> brief\n" in text
    assert "## You\n\n> a <b>\n\n## Model\n\n**A** & co\n" in text
    assert "> # c\n> d\n" in text  # a question that looks like a heading is none
    assert "<sub>complete · seed 0 · </sub>" in text
    thought = replace(TWO, turns=(replace(TWO.turns[0], thought="</pre>x"),))
    assert "<pre>&lt;/pre&gt;x</pre>" in exported(thought, "md", printable)
    assert "\x1b" not in exported(pairs(("\x1b[2J", "\x1b[2J")), "md", printable)
