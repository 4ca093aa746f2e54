"""How each state looks: one table for terminals of 16, 256 and 16 million colours, for SVG, HTML and bitmaps, dark and light.

Without colour every state differs from the others by weight, underline, reversal and dimness, which all terminals have; where
there are not even those, by its mark. With colour, what the model changes (newly frozen, replaced, thawed, pinned) stays
apart for people who see no red, no green or no blue, too. What is to be read stands at 4.5 : 1 or more against GROUND, what
is dim at 3 : 1 (WCAG 2.2, 1.4.3 and 1.4.11).
"""

from bisect import bisect_right
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Literal

from dgemma_local.states import State

Theme = Literal["dark", "light"]
Colour = tuple[int, int, int]

SHADES = 6  # of confidence: 0 is the least sure
HEAT = "█▓▒░:·"  # a glyph a shade
GROUND: dict[Theme, Colour] = {"dark": (13, 17, 23), "light": (255, 255, 255)}
_BOUNDS = (0.05, 0.3, 1.0, 2.0, 4.0)  # nats: one choice; a second is possible; two; seven; more than fifty


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
    dim: bool = False  # where there is no colour for it: `colour` and `ansi256` are as dim as they should be
    ansi16: int = 39  # SGR of the foreground: 30-37, 90-97; 39 is the terminal's own
    ansi256: int | None = None  # index of the foreground; None: the terminal's own, with true colour, too


MARKS = {
    State.FROZEN: " ",
    State.FRESH: "+",
    State.REPLACED: "*",
    State.THAWED: "-",
    State.NOISE: "~",
    State.GUESSED: "?",
    State.PAST: ".",
    State.PINNED: "^",
    State.TEXT: " ",  # as frozen: neither changes any more
}

_DARK: dict[State | Chrome, Look] = {
    State.TEXT: Look((215, 219, 224)),
    State.FROZEN: Look((255, 255, 255), bold=True),
    State.FRESH: Look((86, 224, 160), bold=True, underline=True, ansi16=92, ansi256=78),
    State.REPLACED: Look((190, 155, 255), bold=True, reverse=True, ansi16=95, ansi256=141),
    State.THAWED: Look((255, 130, 70), reverse=True, ansi16=91, ansi256=209),
    State.PINNED: Look((255, 215, 60), underline=True, reverse=True, ansi16=93, ansi256=221),
    State.GUESSED: Look((215, 219, 224), underline=True),
    State.PAST: Look((104, 113, 126), underline=True, dim=True, ansi256=242),
    Chrome.STATUS: Look((139, 148, 158), ansi256=246),
    Chrome.LEGEND: Look((139, 148, 158), ansi256=246),
}
_LIGHT: dict[State | Chrome, Look] = {
    State.TEXT: Look((40, 46, 54)),
    State.FROZEN: Look((0, 0, 0), bold=True),
    State.FRESH: Look(
        (0, 110, 75), bold=True, underline=True, ansi16=34, ansi256=28
    ),  # 16 colours have no green for white
    State.REPLACED: Look((120, 60, 200), bold=True, reverse=True, ansi16=35, ansi256=91),
    State.THAWED: Look((190, 60, 0), reverse=True, ansi16=31, ansi256=160),
    State.PINNED: Look((105, 25, 0), underline=True, reverse=True, ansi256=52),
    State.GUESSED: Look((40, 46, 54), underline=True),
    State.PAST: Look((138, 144, 154), underline=True, dim=True, ansi256=245),
    Chrome.STATUS: Look((87, 96, 106), ansi256=241),
    Chrome.LEGEND: Look((87, 96, 106), ansi256=241),
}
# A shade each, the least sure first.
_SHADED: dict[tuple[State | Chrome, Theme], tuple[Look, ...]] = {
    (State.NOISE, "dark"): (
        Look((104, 108, 116), dim=True, ansi256=242),
        Look((120, 125, 133), dim=True, ansi256=244),
        Look((137, 142, 150), dim=True, ansi256=246),
        Look((154, 159, 167), dim=True, ansi256=248),
        Look((172, 177, 185), dim=True, ansi256=250),
        Look((190, 196, 204), dim=True, ansi256=251),
    ),
    (State.NOISE, "light"): (
        Look((138, 142, 150), dim=True, ansi256=245),
        Look((128, 132, 140), dim=True, ansi256=244),
        Look((118, 122, 130), dim=True, ansi256=243),
        Look((108, 112, 120), dim=True, ansi256=242),
        Look((98, 103, 111), dim=True, ansi256=241),
        Look((88, 94, 102), dim=True, ansi256=240),
    ),
    (Chrome.HEAT, "dark"): (
        Look((255, 236, 120), ansi16=93, ansi256=228),
        Look((250, 196, 80), ansi16=93, ansi256=215),
        Look((240, 156, 76), ansi16=33, ansi256=173),
        Look((222, 112, 106), ansi16=33, ansi256=167),
        Look((145, 105, 150), ansi256=96),
        Look((98, 102, 150), dim=True, ansi256=61),
    ),
    (Chrome.HEAT, "light"): (
        Look((70, 0, 30), ansi16=31, ansi256=52),
        Look((125, 10, 40), ansi16=31, ansi256=88),
        Look((155, 25, 42), ansi16=35, ansi256=124),
        Look((180, 55, 55), ansi16=35, ansi256=131),
        Look((165, 115, 135), ansi256=132),
        Look((130, 140, 175), dim=True, ansi256=103),
    ),
}


@cache
def look(ink: Ink, theme: Theme) -> Look:
    """The look of an ink."""
    shades = _SHADED.get((ink.kind, theme))
    if shades is not None:
        return shades[ink.shade]
    return (_DARK if theme == "dark" else _LIGHT)[ink.kind]


def shade(entropy: float) -> int:
    """Confidence of a position, from its entropy in nats."""
    return SHADES - 1 - bisect_right(_BOUNDS, entropy)


_INKS = {kind: Ink(kind) for kind in (*State, *Chrome)}
_NOISE, _HEAT = (tuple(Ink(kind, each) for each in range(SHADES)) for kind in (State.NOISE, Chrome.HEAT))


def inked(kind: State | Chrome, entropy: float = 0.0) -> Ink:
    """The ink of a position; entropy in nats, of which all but re-randomised tokens and the grid are independent."""
    if kind is State.NOISE:
        return _NOISE[shade(entropy)]
    return _HEAT[shade(entropy)] if kind is Chrome.HEAT else _INKS[kind]
