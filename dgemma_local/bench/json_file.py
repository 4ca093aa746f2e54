"""The document in a file: written as the measurement goes on, so that a run which is cut keeps what it has."""

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dgemma_local.bench.report import line
from dgemma_local.errors import UsageError


class JsonFile:
    """`--json`; without a name nothing is written. A reader sees one whole document or the next, never a part of one.

    A disk that fills up does not end a measurement: it is said, and `check` raises at the end.
    """

    def __init__(self, name: str | None, say: Callable[[str], None] = lambda _: None) -> None:
        """Looks at it before anything is measured, and leaves nothing behind. Raises UsageError where it cannot be written."""
        self.name, self.say, self.problem = name, say, ""
        if name is None:
            return
        if not name.strip():
            raise UsageError("--json names no file", "give the name of a file, or drop it")
        try:
            self.path = Path(name).resolve()  # what a link points to is written, not the link
            there = self.path.exists()
            self.plain = self.path.is_file() or not there
            if there:
                self.path.open("a").close()
            if self.plain:
                self._beside("").unlink()
        except (OSError, ValueError) as error:
            raise self._refused(_why(error)) from None

    def write(self, document: Mapping[str, Any]) -> None:
        """Replaces what is there; a device or a pipe, which nothing can replace, gets the complete document alone."""
        if self.name is None or not (self.plain or document["complete"]):
            return
        self.problem, text = "", line(document) + "\n"
        try:
            if self.plain:
                self._beside(text).replace(self.path)
            else:
                self.path.write_text(text, encoding="utf-8")
        except OSError as error:
            self.problem = _why(error)
            self.say(f"{self.name!r} cannot be written: {self.problem}")

    def remove(self) -> None:
        """Where figures that it may hold turn out to mean nothing."""
        if self.name is not None and self.plain:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)

    def check(self) -> None:
        """Raises UsageError where the last `write` failed."""
        if self.problem:
            raise self._refused(self.problem)

    def _beside(self, text: str) -> Path:
        """A file in the same folder that holds `text`, with the permissions of the one that is there."""
        made = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            made.write_text(text, encoding="utf-8")
            if self.path.exists():
                shutil.copymode(self.path, made)
        except BaseException:
            made.unlink(missing_ok=True)
            raise
        return made

    def _refused(self, why: str) -> UsageError:
        return UsageError(
            f"{self.name!r} cannot be written: {why}", "give --json a file in a folder that can be written"
        )


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or "not a path"
