"""Conversations as files, each as `document` writes it, in the user's state folder.

    <state>/dgemma/history              what was typed, by prompt-toolkit
    <state>/dgemma/chats/NAME.json      a conversation, as it was after its latest turn

A file is written beside its place, brought to the disk, and renamed: at every moment it is the old one or the new one,
whole. A new one takes no other's name, and one that somebody else has written since stays: two chats may go on with one
conversation. Files are for their owner's eyes alone (0600, folders 0700).
"""

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dgemma_local.chat import document
from dgemma_local.chat.conversation import Conversation
from dgemma_local.errors import UsageError

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
    _private_folder(folder)
    return _written(conversation, folder, os.replace)


def kept(conversation: Conversation, before: Conversation | None, folder: Path) -> Conversation:
    """Saves it, and returns it as it is named now. before: what its file holds, as far as the caller knows.

    Where the file holds something else, that stays, and the conversation gets the first free name behind its own. So it
    is where nothing was saved before. Raises OSError.
    """
    if before is not None and before.name == conversation.name and _holds(folder, before):
        save(conversation, folder)
        return conversation
    _private_folder(folder)  # here, so that a file that exists is a name that is taken
    while True:
        named = replace(conversation, name=free_name(conversation.name, folder))
        with suppress(FileExistsError):  # somebody has just taken the name
            _written(named, folder, _placed)
            return named


def _holds(folder: Path, conversation: Conversation) -> bool:
    try:
        return document.written(load(conversation.name, folder)) == document.written(conversation)
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
    text = document.written(conversation)
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
    _private_folder(folder)
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
        return document.read(raw, name)
    except document.Later as error:
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
