"""Conversations as files, one JSON object each, in the user's state folder.

    <state>/dgemma/history              what was typed, by prompt-toolkit
    <state>/dgemma/chats/NAME.json      a conversation, as it was after its latest turn

A file is written beside its place, brought to the disk, and renamed: at every moment it is the old one or the new one,
whole. A new one takes no other's name, and one that somebody else has written since stays: two chats may go on with one
conversation. Files are for their owner's eyes alone (0600, folders 0700), and what is read from them is checked as if it came
from anywhere.
"""

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from dgemma_local.chat.conversation import MOST_STEPS, MOST_TOKENS, SEEDS, Conversation, Settings, Turn, encodable
from dgemma_local.errors import UsageError

FORMAT, VERSION = "dgemma chat", 1
PRIVATE, PRIVATE_FOLDER = 0o600, 0o700
LARGEST = 256 << 20  # bytes; no conversation has so many, and it is an end to /dev/zero
LONGEST = 80  # characters of a name
MOST_BYTES = 255 - len(".json")  # of a name in UTF-8: as many as file systems take
_NAME = re.compile(r"\w[\w .-]*")


class Damaged(Exception):
    """A file that is no conversation any more; its text says why, in one line."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A saved conversation, or why it cannot be read; `changed` in seconds since 1970."""

    name: str
    changed: float
    conversation: Conversation | None
    damage: str = ""


def home() -> Path | None:
    """The folder of this program's state; None: a container's user may have no home.

    XDG_STATE_HOME counts where it is absolute, as its specification has it.
    """
    folder = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not folder.is_absolute():
        try:
            folder = Path("~/.local/state").expanduser()
        except RuntimeError:
            return None
    return folder / "dgemma"


def private_file(path: Path) -> Path:
    """There, and for its owner alone; what it holds already stays. Raises OSError."""
    _private_folder(path.parent)
    os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, PRIVATE))
    path.chmod(PRIVATE)
    return path


def check_name(name: str) -> str:
    """Raises UsageError for what cannot be a file's name everywhere."""
    if not _NAME.fullmatch(name) or name != name.strip():
        raise UsageError(
            f"a conversation cannot be called {name[:LONGEST]!r}",
            f"use up to {LONGEST} letters, digits, spaces, dots and dashes",
        )
    if not _fits(name):
        raise UsageError(
            f"{name[:LONGEST]!r} is too long for a file's name",
            f"use up to {LONGEST} letters, and {MOST_BYTES} bytes of them in UTF-8",
        )
    return name


def free_name(wish: str, folder: Path | None) -> str:
    """`wish`, or with the first number behind it that no file has."""
    name, number = wish, 1
    while folder is not None and os.path.lexists(_path(folder, name)):
        number += 1
        name = f"{wish}-{number}"
        while not _fits(name):
            wish = wish[:-1]
            name = f"{wish}-{number}"
    return name


def save(conversation: Conversation, folder: Path) -> Path:
    """Writes it, in place of what was saved under its name. Raises OSError; the old file is then still there."""
    return _written(conversation, folder, os.replace)


def kept(conversation: Conversation, before: Conversation | None, folder: Path) -> Conversation:
    """Saves it, and returns it as it is named now. before: what its file holds, as far as the caller knows.

    Where the file holds something else, that stays, and the conversation gets the first free name behind its own. So it
    is where nothing was saved before. Raises OSError.
    """
    if before is not None and before.name == conversation.name and _holds(folder, before):
        save(conversation, folder)
        return conversation
    while True:
        named = replace(conversation, name=free_name(conversation.name, folder))
        with suppress(FileExistsError):  # somebody has just taken the name
            _written(named, folder, _placed)
            return named


def _holds(folder: Path, conversation: Conversation) -> bool:
    try:
        return _line(load(conversation.name, folder)) == _line(conversation)
    except (Damaged, UsageError):
        return False


def _placed(beside: str, path: Path) -> None:
    """Gives the file its name. Raises FileExistsError where that is another's."""
    try:
        os.link(beside, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, PRIVATE))
        Path(beside).replace(path)
    else:
        Path(beside).unlink()


def _written(conversation: Conversation, folder: Path, place: Callable[[str, Path], None]) -> Path:
    text = _line(conversation)
    _private_folder(folder)
    path = _path(folder, conversation.name)
    handle, beside = tempfile.mkstemp(prefix=".", suffix=".new", dir=folder)  # 0600
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        place(beside, path)
    except BaseException:
        with suppress(OSError):
            Path(beside).unlink()
        raise
    _sync(folder)
    return path


def renamed(conversation: Conversation, before: Conversation | None, folder: Path) -> None:
    """Saves it under its new name, then forgets its file of before, unless that holds something else by now.

    Raises UsageError where another one has the name.
    """
    try:
        _written(conversation, folder, _placed)
    except FileExistsError:
        raise UsageError(f"there is a conversation {conversation.name!r} already", "choose another name") from None
    if before is not None and _holds(folder, before):
        _path(folder, before.name).unlink(missing_ok=True)


def load(name: str, folder: Path) -> Conversation:
    """Raises UsageError: none of that name. Raises Damaged: it cannot be read, or holds something else."""
    path = _path(folder, check_name(name))
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST + 1)
    except FileNotFoundError:
        raise UsageError(
            f"no conversation is called {name!r}", "`dgemma chat --list` shows those that are saved"
        ) from None
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from None
    try:
        if len(raw) > LARGEST:
            raise ValueError("it is too large")
        return _conversation(json.loads(raw.decode("utf-8")), name)
    except _Later as error:
        raise Damaged(f"{path} is from a later dgemma ({error}) and stays as it is: update this one") from None
    except (ValueError, RecursionError) as error:
        why = " ".join(f"{error}".split())[:120]
        raise Damaged(f"{path} is damaged and stays as it is: {why}") from None


def listed(folder: Path | None) -> Iterator[Listed]:
    """All that is saved, the latest first."""
    found = []
    for path in folder.glob("[!.]*.json") if folder is not None else ():
        with suppress(OSError):
            found.append((path.stat().st_mtime_ns, path.stem))
    for changed, name in sorted(found, reverse=True):
        assert folder is not None
        try:
            yield Listed(name, changed / 1e9, load(name, folder))
        except (Damaged, UsageError) as error:  # a name that is no name; a file that has just gone
            yield Listed(name, changed / 1e9, None, str(error))


def names(folder: Path | None) -> list[str]:
    """Of what is saved, unread."""
    return sorted(path.stem for path in folder.glob("[!.]*.json")) if folder is not None else []


def _line(conversation: Conversation) -> str:
    """What its file holds."""
    return json.dumps({"format": FORMAT, "version": VERSION} | asdict(conversation), allow_nan=False) + "\n"


def _fits(name: str) -> bool:
    return len(name) <= LONGEST and len(name.encode("utf-8", "surrogatepass")) <= MOST_BYTES


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _private_folder(folder: Path) -> None:
    """There; what of it and of its parent is made here is for the owner alone."""
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    for each in (folder.parent, folder):
        each.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)


def _sync(folder: Path) -> None:
    """The name, too, is on the disk; where a folder cannot be opened, the file is whole all the same."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


# What a file may hold; each raises ValueError


class _Later(ValueError):
    """A version that this program does not know yet."""


def _conversation(found: object, name: str) -> Conversation:
    values = _table(found, "the file")
    if values.get("format") != FORMAT:
        raise ValueError("it is no conversation")
    version = values.get("version")
    if version != VERSION:
        kind = _Later if type(version) is int and version > VERSION else ValueError
        raise kind(f"its version is {str(version)[:20]}, this program reads {VERSION}")
    turns = values.get("turns")
    if not isinstance(turns, list):
        raise ValueError("it has no list of turns")
    checks: Mapping[str, Callable[[object], object]] = {
        "model": _text, "started": _text, "system": _optional(_text), "asked": _whole(0, MOST_TOKENS)
    }  # fmt: skip
    found_settings = _fields(Settings, values.get("settings"), "its settings", _SETTINGS)
    return Conversation(
        name=name,
        settings=Settings(**found_settings),
        turns=tuple(Turn(**_fields(Turn, turn, f"turn {n}", _TURN)) for n, turn in enumerate(turns, 1)),
        **{key: _checked(values, key, check, "the file") for key, check in checks.items()},  # type: ignore[arg-type]
    )


def _fields(
    kind: type[Any], found: object, where: str, checks: Mapping[str, Callable[[object], object]]
) -> dict[str, Any]:
    values = _table(found, where)
    return {field.name: _checked(values, field.name, checks[field.name], where) for field in fields(kind)}


def _checked(values: Mapping[str, object], key: str, check: Callable[[object], object], where: str) -> object:
    if key not in values:
        raise ValueError(f"{where} lacks {key!r}")
    try:
        return check(values[key])
    except ValueError as error:
        raise ValueError(f"{where}, {key!r}: {error}") from None


def _table(found: object, where: str) -> Mapping[str, object]:
    if not isinstance(found, dict):
        raise ValueError(f"{where} is no object")
    return found


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("not a text")
    return value


def _stop(value: object) -> str:
    text = _text(value)
    if not text or not encodable(text):
        raise ValueError("not UTF-8" if text else "empty")
    return text


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("neither true nor false")
    return value


def _whole(least: int, most: int) -> Callable[[object], int]:
    def check(value: object) -> int:
        if type(value) is not int or not least <= value <= most:
            raise ValueError("out of its range")
        return value

    return check


def _optional(check: Callable[[object], object]) -> Callable[[object], object]:
    return lambda value: None if value is None else check(value)


def _each(check: Callable[[object], object]) -> Callable[[object], tuple[object, ...]]:
    def many(value: object) -> tuple[object, ...]:
        if not isinstance(value, list):
            raise ValueError("not a list")
        return tuple(map(check, value))

    return many


_SETTINGS: Mapping[str, Callable[[object], object]] = {
    "max_tokens": _whole(1, MOST_TOKENS),
    "steps": _optional(_whole(1, MOST_STEPS)),
    "seed": _optional(_whole(0, SEEDS - 1)),
    "thinking": _flag,
    "think_tokens": _optional(_whole(1, MOST_TOKENS)),
    "show_thoughts": _flag,
    "stop": _each(_stop),
}
_TURN: Mapping[str, Callable[[object], object]] = {
    "user": _text,
    "answer": _text,
    "thought": _text,
    "ids": _each(_whole(0, MOST_TOKENS)),
    "outcome": _text,
    "seed": _whole(0, SEEDS - 1),
    "time": _text,
}
