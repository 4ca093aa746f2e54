"""The values of one line, each checked as it is taken."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Any

from dgemma_local.recording.form import DIGITS, KINDS, Piece, Word, sound
from dgemma_local.recording.lines import Damaged

LARGEST_TOKEN = (1 << 31) - 1
MOST_ENTROPY = 22.0  # nats; as many tokens as there can be, all alike, have 21.5
_MOST = 1e18  # of any other number


@dataclass(frozen=True, slots=True)
class Fields:
    """A line's values. Every method raises Damaged where the value is absent, of another kind or out of range."""

    values: dict[str, Any]

    def whole(self, name: str, most: int = LARGEST_TOKEN, *, least: int = 0) -> int:
        value = self.values.get(name)
        if type(value) is not int or not least <= value <= most:
            raise Damaged(f"`{name}` is not a whole number from {least} to {most}")
        return value

    def number(self, name: str) -> float:
        value = self.values.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < _MOST:
            raise Damaged(f"`{name}` is not a number from 0")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.values.get(name)
        if not isinstance(value, bool):
            raise Damaged(f"`{name}` is not true or false")
        return value

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str):
            raise Damaged(f"`{name}` is not text")
        return sound(value)

    def list(self, name: str, length: int | None = None) -> list[Any]:
        value = self.values.get(name)
        if not isinstance(value, list) or (length is not None and len(value) != length):
            raise Damaged(f"`{name}` is not a list" + (f" of {length}" if length is not None else ""))
        return value

    def ids(self, name: str, length: int | None = None) -> Sequence[int]:
        value = self.list(name, length)
        if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) > LARGEST_TOKEN):
            raise Damaged(f"`{name}` holds something that is no token id")
        return value

    def positions(self, name: str, length: int) -> tuple[int, ...]:
        """Of a canvas, ascending, each once."""
        value = self.ids(name)
        if any(a >= b for a, b in pairwise((-1, *value, length))):
            raise Damaged(f"`{name}` is not ascending positions below {length}")
        return tuple(value)

    def entropies(self, name: str, length: int) -> Sequence[float]:
        """In nats, to DIGITS."""
        value = self.list(name, length)
        if not (set(map(type, value)) <= {int, float} and min(value) >= 0 and max(value) <= MOST_ENTROPY):
            raise Damaged(f"`{name}` holds something that is no entropy")
        return list(map(round, map(float, value), repeat(DIGITS)))

    def marks(self, name: str, length: int) -> tuple[bool, ...]:
        value = self.text(name)
        if len(value) != length or not set(value) <= {"0", "1"}:
            raise Damaged(f"`{name}` is not {length} of 0 and 1")
        return tuple([each == "1" for each in value])

    def plain(self, name: str) -> dict[str, object]:
        """An object of texts, numbers, flags and nulls."""
        values = self.values.get(name)
        if not isinstance(values, dict) or not all(map(_is_plain, values.values())):
            raise Damaged(f"`{name}` is not an object of plain values")
        return {sound(key): sound(value) if isinstance(value, str) else value for key, value in values.items()}

    def words(self, name: str, length: int) -> Sequence[Word]:
        return list(map(_word, self.list(name, length)))

    def pieces(self, name: str) -> tuple[Piece, ...]:
        return tuple(map(_piece, self.list(name)))


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str) or (isinstance(value, int | float) and -_MOST < value < _MOST)


def _word(value: object) -> Word:
    if isinstance(value, str):
        return Word(sound(value))
    if isinstance(value, dict) and isinstance(value.get("control"), str):
        return Word(sound(value["control"]), control=True)
    raise Damaged("`texts` holds something that is no text")


def _piece(value: object) -> Piece:
    if not isinstance(value, dict):
        raise Damaged("`pieces` holds something that is no piece of text")
    fields = Fields(value)
    kind = fields.text("kind")
    if kind not in KINDS:
        raise Damaged(f"`kind` is none of {', '.join(KINDS)}")
    return Piece(kind, fields.text("text"))
