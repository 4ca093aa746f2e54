"""What a check found: a level, one line, the cure, and the facts behind it.

Made for bug reports: the home folder is written ~, whoever's it is, and an address loses its login.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

LONGEST = 400  # characters of a line

_ANY_HOME = re.compile(r"(?:/home|/Users|[A-Za-z]:\\Users)[/\\][^/\\\s:;,'\"]+")
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")


class Level(StrEnum):
    OK = "OK"
    WARN = "WARN"  # works, with less than there could be
    FAIL = "FAIL"  # something that is here does not work
    SKIP = "SKIP"  # nothing to check here, or not without what failed before


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report. `facts` hold plain values alone, for JSON."""

    name: str
    level: Level
    what: str
    cure: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def tidied(self) -> "Finding":
        """Each text in one line, and without what tells who wrote the report."""
        cure = None if self.cure is None else line(self.cure)
        return replace(self, name=line(self.name), what=line(self.what), cure=cure, facts=private(dict(self.facts)))


def ok(name: str, what: str, /, **facts: Any) -> Finding:
    return Finding(name=name, level=Level.OK, what=what, facts=facts)


def warn(name: str, what: str, cure: str, /, **facts: Any) -> Finding:
    return Finding(name=name, level=Level.WARN, what=what, cure=cure, facts=facts)


def fail(name: str, what: str, cure: str, /, **facts: Any) -> Finding:
    return Finding(name=name, level=Level.FAIL, what=what, cure=cure, facts=facts)


def skip(name: str, why: str, /, **facts: Any) -> Finding:
    return Finding(name=name, level=Level.SKIP, what=why, facts=facts)


def line(text: str) -> str:
    """Private, in one line, of a length that a terminal can bear."""
    text = " ".join(str(private(text)).split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def private(value: Any) -> Any:
    """A value of JSON's kinds, its texts without home folders and logins."""
    if isinstance(value, str):
        return _LOGIN.sub("", _ANY_HOME.sub("~", _without_home(value)))
    if isinstance(value, Mapping):
        return {str(key): private(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [private(each) for each in value]
    return value


def _without_home(text: str) -> str:
    """This user's, wherever it lies. A container's may be the root of everything, and tells nothing."""
    home = os.path.expanduser("~").rstrip("/\\")  # noqa: PTH111 - unlike Path's, it does without a home
    return text if home in ("", "~") else re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
