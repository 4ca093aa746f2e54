"""Conversations as files, each as `document` writes it, in the user's state folder.

    <state>/dgemma/history              what was typed, by prompt-toolkit
    <state>/dgemma/chats/NAME.json      a conversation, as it was after its latest turn

A file is written beside its place, brought to the disk, and renamed: at every moment it is the old one or the new one,
whole. A new one takes no other's name, and one that somebody else has written since stays: two chats may go on with one
conversation, and one at a time looks and writes. Files are for their owner's eyes alone (0600, folders 0700).
"""

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dgemma_local.chat import document, private
from dgemma_local.chat.conversation import Conversation
from dgemma_local.errors import UsageError

LARGEST = 64 << 20  # bytes of a file; no conversation has so many
LONGEST = 80  # characters of a name
MOST_BYTES = 255 - len(".json")  # of a name in UTF-8: as many as file systems take
_NAME = re.compile(r"\w[\w .-]*")
_NUMBERED = re.compile(r"(.+)-([1-9][0-9]*)")


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
    """`wish`, or with the first number behind it that no file has; one that this has numbered is counted on from there."""
    name, number = wish, 1
    if folder is None:
        return wish
    found = _NUMBERED.fullmatch(wish)
    if found and all(os.path.lexists(_path(folder, each)) for each in (wish, found[1])):
        wish, number = found[1], int(found[2])
    while os.path.lexists(_path(folder, name)):
        number += 1
        name = f"{wish}-{number}"
        while not _fits(name):
            wish = wish[:-1]
            name = f"{wish}-{number}"
    return name


def save(conversation: Conversation, folder: Path) -> Path:
    """Writes it, in place of what was saved under its name. Raises OSError; the old file is then still there."""
    private.folder_at(folder)
    return _written(conversation, folder, os.replace)


def kept(conversation: Conversation, before: Conversation | None, folder: Path) -> Conversation:
    """Saves it, and returns it as it is named now. before: what its file holds, as far as the caller knows.

    Where the file holds something else, that stays, and the conversation gets the first free name behind its own. So it
    is where nothing was saved before. What it holds may be this very conversation, too. Raises OSError.
    """
    private.folder_at(folder)  # here, so that a file that exists is a name that is taken
    with private.alone(folder):
        if before is not None and before.name == conversation.name and _holds(folder, before, conversation):
            save(conversation, folder)
            return conversation
        while True:
            named = replace(conversation, name=free_name(conversation.name, folder))
            with suppress(FileExistsError):  # somebody has just taken the name
                _written(named, folder, private.placed)
                return named


def _holds(folder: Path, *conversations: Conversation) -> bool:
    """Whether the file of that name holds one of them."""
    try:
        found = document.written(load(conversations[0].name, folder))
    except (Damaged, UsageError):
        return False
    return any(found == document.written(each) for each in conversations)


def _written(conversation: Conversation, folder: Path, place: Callable[[str, Path], None]) -> Path:
    text = document.written(conversation)
    if len(text) > LARGEST:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return private.written(text, _path(folder, conversation.name), place)


def renamed(conversation: Conversation, before: Conversation | None, folder: Path) -> None:
    """Saves it under its new name, then forgets its file of before, unless that holds something else by now.

    Raises UsageError where another one has the name, OSError.
    """
    private.folder_at(folder)
    with private.alone(folder):
        try:
            _written(conversation, folder, private.placed)
        except FileExistsError:
            raise UsageError(f"there is a conversation {conversation.name!r} already", "choose another name") from None
        if before is not None and _holds(folder, before):
            _path(folder, before.name).unlink(missing_ok=True)


def forget(name: str, folder: Path) -> None:
    """Deletes what is saved under a name. Raises UsageError: nothing is, OSError."""
    try:
        _path(folder, check_name(name)).unlink()
    except FileNotFoundError:
        raise _nothing(name) from None


def load(name: str, folder: Path) -> Conversation:
    """Raises UsageError: none of that name. Raises Damaged: it cannot be read, or holds something else."""
    path = _path(folder, check_name(name))
    try:
        return document.read(_content(path), name)
    except FileNotFoundError:
        raise _nothing(name) from None
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from None
    except document.Later as error:
        raise Damaged(f"{path} is from a later dgemma ({_line(error)}) and stays as it is: update this one") from None
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path} is damaged and stays as it is: {_line(error)}") from None


def _nothing(name: str) -> UsageError:
    return UsageError(f"no conversation is called {name!r}", "`dgemma chat --list` shows those that are saved")


def _content(path: Path) -> bytes:
    """Raises OSError, ValueError: it is no file that ends."""

    def at_once(name: str, flags: int) -> int:  # a FIFO that nobody writes to would be waited for
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))

    with open(path, "rb", opener=at_once) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no regular file")
        if found.st_size > LARGEST:
            raise ValueError(f"it is larger than {LARGEST >> 20} MiB")
        return file.read(LARGEST + 1)


def _line(error: Exception) -> str:
    """What it says, of a file that may hold anything, in one short line that a terminal does not obey."""
    text = " ".join(f"{error}".split())[:120]
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def listed(folder: Path | None) -> Iterator[Listed]:
    """All that is saved, the latest first. Raises UsageError: what stands in the folder's place is none."""
    if folder is not None:
        _check_folder(folder)
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


def _check_folder(folder: Path) -> None:
    for each in (folder.parent.parent, folder.parent, folder):
        if os.path.lexists(each) and not each.is_dir():
            raise UsageError(f"{each} is no folder", "move it away, or set XDG_STATE_HOME to another folder")


def names(folder: Path | None) -> list[str]:
    """Of what is saved, unread."""
    return sorted(path.stem for path in folder.glob("[!.]*.json")) if folder is not None else []


def _fits(name: str) -> bool:
    return len(name) <= LONGEST and len(name.encode("utf-8", "surrogatepass")) <= MOST_BYTES


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"
