"""A prompt from a file, from standard input or from the command line; read and judged before a model is opened."""

import sys
from pathlib import Path
from typing import BinaryIO

from dgemma_local.errors import PromptError, UsageError

LARGEST = 16 << 20  # bytes; far more than a context of 262,144 tokens holds, and an end to /dev/zero
STDIN = "-"


def read(file: str | None, text: str | None) -> str:
    """The prompt as it is, but for a byte order mark and one newline at the end of a file.

    file: a path, or "-" for standard input; or else `text`. Raises UsageError for both or neither, PromptError when there
    is no such file, it cannot be read, is not UTF-8, too large, or blank.
    """
    if (file is None) == (text is None):
        raise UsageError(
            "give a FILE or --prompt, not both" if file is not None else "there is no prompt",
            'name a file, or - for standard input, or use --prompt "TEXT"',
        )
    if text is not None:
        return check(text, "--prompt")
    assert file is not None
    name = "standard input" if file == STDIN else f"{file!r}"
    raw = _bytes(file, name)
    if len(raw) > LARGEST:
        raise PromptError(f"{name} is larger than {LARGEST >> 20} MiB", "shorten it: no context holds so much")
    try:
        found = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + raw.count(b"\n", 0, error.start)
        raise PromptError(f"{name} is not UTF-8 text (line {line})", "save it as UTF-8") from None
    return check(found.removesuffix("\n").removesuffix("\r"), name)


def check(text: str, name: str) -> str:
    """`text`. Raises PromptError where it is blank, or holds bytes of the command line that are not UTF-8."""
    utf8(text, name)
    if not text.strip():
        raise PromptError(f"{name} is {'blank' if text else 'empty'}", "write something into it")
    return text


def utf8(text: str, name: str) -> None:
    """Raises PromptError where `text` holds bytes of the command line that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PromptError(f"{name} is not UTF-8 text", "give it as UTF-8") from None


def _bytes(file: str, name: str) -> bytes:
    try:
        if file == STDIN:
            if sys.stdin is None:
                raise PromptError("standard input is closed", "name a file, or use --prompt")
            return _limited(sys.stdin.buffer)
        with Path(file).open("rb") as opened:
            return _limited(opened)
    except FileNotFoundError:
        raise PromptError(f"there is no file {name}", f"check the path, or say --prompt {name}") from None
    except IsADirectoryError:
        raise PromptError(f"{name} is a folder", "name a file") from None
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL in it
        why = getattr(error, "strerror", None) or error
        raise PromptError(f"{name} cannot be read: {why}", "check the path and its permissions") from None


def _limited(opened: BinaryIO) -> bytes:
    return opened.read(LARGEST + 1)
