"""A conversation as the text of its file: one JSON object. What is read is checked as if it came from anywhere.

A key that a later version of this program has added has a value for files that lack it (`_ADDED`), and a program that does
not know it passes it over; VERSION counts what cannot be read so.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any

from dgemma_local.chat.conversation import MOST_STEPS, MOST_TOKENS, SEEDS, Conversation, Settings, Turn, encodable
from dgemma_local.presets import SETTINGS, Preset

FORMAT, VERSION = "dgemma chat", 1
_ADDED: Mapping[str, object] = {"preset": None}  # to `Settings`


class Later(ValueError):
    """A version that this program does not know yet."""


def written(conversation: Conversation) -> str:
    """What its file holds, in ASCII."""
    return json.dumps({"format": FORMAT, "version": VERSION} | asdict(conversation), allow_nan=False) + "\n"


def read(raw: bytes, name: str) -> Conversation:
    """The conversation of that name. Raises ValueError, RecursionError: it is none; Later: it may be one."""
    values = _table(json.loads(raw.decode("utf-8")), "the file")
    if values.get("format") != FORMAT:
        raise ValueError("it is no conversation")
    version = values.get("version")
    if version != VERSION:
        kind = Later if type(version) is int and version > VERSION else ValueError
        raise kind(f"its version is {str(version)[:20]}, this program reads {VERSION}")
    turns = values.get("turns")
    if not isinstance(turns, list):
        raise ValueError("it has no list of turns")
    checks: Mapping[str, Callable[[object], object]] = {
        "model": _text, "started": _text, "system": _optional(_said), "asked": _whole(0, SEEDS - 1)
    }  # fmt: skip
    settings = {**_ADDED, **_table(values.get("settings"), "its settings")}
    return Conversation(
        name=name,
        settings=Settings(**_fields(Settings, settings, "its settings", _SETTINGS)),
        turns=tuple(Turn(**_fields(Turn, turn, f"turn {n}", _TURN)) for n, turn in enumerate(turns, 1)),
        **{key: _checked(values, key, check, "the file") for key, check in checks.items()},  # type: ignore[arg-type]
    )


# What it may hold; each raises ValueError


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


def _said(value: object) -> str:
    """What a model can be told: half a character of UTF-16, which JSON can write and UTF-8 cannot, is � in it."""
    return _text(value).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _stop(value: object) -> str:
    text = _text(value)
    if not text or not encodable(text):
        raise ValueError("not UTF-8" if text else "empty")
    return text


def _preset(value: object) -> Preset:
    text = _text(value)
    if text not in SETTINGS:
        raise ValueError("not a preset")
    return Preset(text)


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
    "preset": _optional(_preset),
    "seed": _optional(_whole(0, SEEDS - 1)),
    "thinking": _flag,
    "think_tokens": _optional(_whole(1, MOST_TOKENS)),
    "show_thoughts": _flag,
    "stop": _each(_stop),
}
_TURN: Mapping[str, Callable[[object], object]] = {
    "user": _said,
    "answer": _said,
    "thought": _said,
    "ids": _each(_whole(0, MOST_TOKENS)),
    "outcome": _text,
    "seed": _whole(0, SEEDS - 1),
    "time": _text,
}
