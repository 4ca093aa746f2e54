"""How each state looks: one table for terminals of 16, 256 and 16 million colours, for SVG, HTML and bitmaps, dark and light.

Every state differs from the others without colour, too, by weight, underline and reversal alone, which all terminals have;
where there are not even those, by its mark.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Literal

from dgemma_local.states import State

Theme = Literal["dark", "light"]
Colour = tuple[int, int, int]

SHADES = 6  # of confidence: 0 is the least sure
GROUND: dict[Theme, Colour] = {"dark": (13, 17, 23), "light": (255, 255, 255)}


class Chrome(Enum):
    """What is not a token."""

    STATUS = "status"
    LEGEND = "legend"
    HEAT = "heat"  # a cell of the grid: shade is its confidence


@dataclass(frozen=True, slots=True)
class Ink:
    """What a piece of a row is: the key to its look."""

    kind: State | Chrome
    shade: int = SHADES - 1  # of confidence, 0 to SHADES - 1; only re-randomised tokens and the grid have more than one


@dataclass(frozen=True, slots=True)
class Look:
    """How an ink is drawn."""

    colour: Colour
    ground: Colour | None = None
    bold: bool = False
    underline: bool = False
    reverse: bool = False
    dim: bool = False
    ansi16: int = 39  # SGR of the foreground: 30-37, 90-97; 39 is the terminal's own
    ansi256: int | None = None  # index of the foreground; None: the terminal's own


MARKS = {
    State.FROZEN: " ",
    State.FRESH: "+",
    State.REPLACED: "*",
    State.THAWED: "-",
    State.NOISE: "~",
    State.GUESSED: "?",
    State.PAST: ".",
    State.PINNED: "^",
    State.TEXT: " ",
}


@cache
def look(ink: Ink, theme: Theme) -> Look:
    """The look of an ink."""
    dark = theme == "dark"
    match ink.kind:
        case State.FROZEN:
            return Look((255, 255, 255) if dark else (0, 0, 0), bold=True)
        case State.FRESH:
            return Look((126, 231, 135) if dark else (17, 99, 41), bold=True, underline=True, ansi16=32, ansi256=114)
        case State.REPLACED:
            return Look((210, 168, 255) if dark else (102, 57, 186), bold=True, reverse=True, ansi16=35, ansi256=141)
        case State.THAWED:
            return Look((255, 123, 114) if dark else (164, 14, 38), reverse=True, ansi16=31, ansi256=203)
        case State.NOISE:
            level = 90 + 20 * ink.shade
            return Look((level, level, level) if dark else (230 - level // 2,) * 3, dim=True)
        case State.PAST:
            return Look((95, 104, 116), dim=True)
        case State.PINNED:
            return Look((121, 192, 255) if dark else (9, 105, 218), underline=True, ansi16=34, ansi256=75)
        case Chrome.HEAT:
            level = 40 + 40 * ink.shade
            return Look((level, level // 2, 255 - level))
        case Chrome.STATUS | Chrome.LEGEND:
            return Look((139, 148, 158) if dark else (87, 96, 106), dim=True)
        case State.GUESSED | State.TEXT:
            return Look((215, 219, 224) if dark else (31, 35, 40))


def shade(entropy: float) -> int:
    """Confidence of a position, from its entropy in nats: SHADES - 1 below 0.01, then by factors."""
    return sum(entropy < bound for bound in (4.0, 2.0, 1.0, 0.3, 0.05))
