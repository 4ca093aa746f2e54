"""Two curves over the steps of all canvases, and what was taken back: entropy, accepted positions, thaws, replacements.

Drawn by Pillow, which the canvas needs anyway: matplotlib and numpy are a hundred megabytes to install and most of a second
to import, for three panels of lines. Lines are drawn larger and made smaller, which smooths them; text is drawn last.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dgemma_local.recording import Recording
from dgemma_local.states import Seen, State
from dgemma_local.ui.canvas import signs
from dgemma_local.ui.export import Options, moments
from dgemma_local.ui.export.pixels import Face, between
from dgemma_local.ui.palette import GROUND, Chrome, Colour, Ink, Theme, look

if TYPE_CHECKING:
    from PIL.Image import Image

SIZE = (1600, 1060)  # pixels; half as many on a screen
LEFT, RIGHT = 160, 1550  # of the panels
ENTROPY, ACCEPTED = (184, 500), (576, 820)  # top and bottom of the panels
THAWS, REPLACEMENTS, STEPS, CANVASES = 872, 920, 968, 1010  # middle of the rows
_FONT = 22
_FINE = 3  # lines are drawn so many times larger
_LINE = 4  # pixels
_MOST_ENTROPY = math.log(1 << 31)  # nats: token ids are below 2**31, so what is above is no entropy
_TICKS = 6  # at most so many steps between the numbers of an axis
_LOW, _HIGH = 0.1, 0.9  # of the positions
_DOTS = (3.0, 13.0)  # pixels of radius: the smallest, and the most there is room for
_MARGIN = 26  # pixels between a panel and what is written beside it
ENTROPY_INK: dict[Theme, Colour] = {"dark": (121, 192, 255), "light": (9, 105, 218)}  # a blue that no state has
_TITLE, _LEGEND, _NAME = 56, 100, -26  # middle of the lines of text; that of a panel is above it


@dataclass(frozen=True, slots=True)
class Point:
    """One step."""

    canvas: int
    mean: float  # of the entropy over all positions; nats
    low: float  # a tenth of the positions are below
    high: float  # a tenth are above
    accepted: int  # positions
    thaws: int
    replacements: int


def points(seen: Sequence[Seen]) -> list[Point]:
    """One a step."""
    found = []
    for each in seen:
        assert each.step is not None  # a moment is of a step
        ranked = sorted(min(entropy, _MOST_ENTROPY) for entropy in each.step.entropy)
        found.append(
            Point(
                each.canvas,
                sum(ranked) / len(ranked),
                ranked[round(_LOW * (len(ranked) - 1))],
                ranked[round(_HIGH * (len(ranked) - 1))],
                sum(each.step.accepted),
                each.states.count(State.THAWED),
                each.states.count(State.REPLACED),
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class Scale:
    """Where values from 0 (or 1, for steps) are on the image; `most` is the last of the axis."""

    low: float
    most: float
    start: int  # pixels
    end: int

    def at(self, value: float) -> float:
        if self.most <= self.low:
            return (self.start + self.end) / 2
        return self.start + (self.end - self.start) * (value - self.low) / (self.most - self.low)


def scales(found: Sequence[Point], positions: int) -> tuple[Scale, Scale, Scale]:
    """Of steps from 1, of nats, of positions."""
    most = max(max(point.high, point.mean) for point in found)
    gap = _gap(most or 1.0)
    return (
        Scale(1, len(found), LEFT, RIGHT),
        Scale(0, gap * max(1, math.ceil(most / gap)), ENTROPY[1], ENTROPY[0]),
        Scale(0, positions, ACCEPTED[1], ACCEPTED[0]),
    )


def plot(recording: Recording, options: Options) -> "Image":
    """Mode RGB. Of the wanted canvases, all steps. Raises RecordingError where there is none."""
    found = points(moments(recording, replace(options, step=None)))
    return _Plot(found, recording.header.canvas_length, options.theme).drawn(_title(recording, found))


def _title(recording: Recording, found: Sequence[Point]) -> str:
    canvases, length = len({point.canvas for point in found}), recording.header.canvas_length
    return (
        f"{recording.header.model} · seed {recording.header.seed} · {len(found):,} step{'s' * (len(found) > 1)} "
        f"of {canvases:,} canvas{'es' * (canvases > 1)} of {length:,} position{'s' * (length > 1)}"
    )


def _gap(most: float) -> float:
    """Between the numbers of an axis: 1, 2 or 5 times a power of ten."""
    power: float = 10.0 ** math.floor(math.log10(most / _TICKS))
    return next(times * power for times in (1, 2, 5, 10) if most <= times * power * _TICKS)


class _Plot:
    def __init__(self, found: Sequence[Point], positions: int, theme: Theme) -> None:
        from PIL import Image, ImageDraw

        self.found = found
        self.steps, self.nats, self.places = scales(found, positions)
        self.ground = GROUND[theme]
        self.text = look(Ink(Chrome.STATUS), theme).colour
        self.strong = look(Ink(State.TEXT), theme).colour
        self.entropy = ENTROPY_INK[theme]
        self.accepted, self.thaws, self.replacements = (
            look(Ink(state), theme).colour for state in (State.FRESH, State.THAWED, State.REPLACED)
        )
        self.faint = between(self.text, self.ground, 0.25)
        self.band = between(self.entropy, self.ground, 0.22)
        self.area = between(self.accepted, self.ground, 0.12)
        self.image = Image.new("RGB", (SIZE[0] * _FINE, SIZE[1] * _FINE), self.ground)
        self.pen = ImageDraw.Draw(self.image)
        self.face = Face(_FONT)

    def drawn(self, title: str) -> "Image":
        from PIL import Image, ImageDraw

        self._grid()
        for canvas in self._canvases():
            self._curves(canvas)
        self._changes()
        self.image = self.image.resize(SIZE, Image.Resampling.BOX)
        self.pen = ImageDraw.Draw(self.image)
        self._write(LEFT, _TITLE, _cut(title, (RIGHT - LEFT) // self.face.width), self.strong, "lm", bold=True)
        self._numbers()
        self._legend()
        return self.image

    def _canvases(self) -> list[list[tuple[int, Point]]]:
        """The points of each, with their steps from 1."""
        found: list[list[tuple[int, Point]]] = []
        for step, point in enumerate(self.found, start=1):
            if not found or found[-1][-1][1].canvas != point.canvas:
                found.append([])
            found[-1].append((step, point))
        return found

    def _grid(self) -> None:
        for scale in (self.nats, self.places):
            for value in ticks(scale, whole=scale is self.places):
                self._stroke([(LEFT, round(scale.at(value))), (RIGHT, round(scale.at(value)))], self.faint, 1)
        for middle in (THAWS, REPLACEMENTS):
            self._stroke([(LEFT, middle), (RIGHT, middle)], self.faint, 1)
        border = between(self.text, self.ground, 0.5)
        for canvas in self._canvases()[1:]:
            place = round(self.steps.at(canvas[0][0] - 0.5))
            for top in range(ENTROPY[0], CANVASES + 10, 16):
                self._stroke([(place, top), (place, top + 8)], border, 1)

    def _curves(self, canvas: list[tuple[int, Point]]) -> None:
        across = [self.steps.at(step) for step, _point in canvas]
        mean, low, high = (
            [(x, self.nats.at(value)) for x, value in zip(across, values, strict=True)]
            for values in zip(*((point.mean, point.low, point.high) for _step, point in canvas), strict=True)
        )
        accepted = [(x, self.places.at(point.accepted)) for x, (_step, point) in zip(across, canvas, strict=True)]
        floor = self.places.at(0)
        if len(canvas) > 1:
            self.pen.polygon(self._larger([*high, *reversed(low)]), self.band)
            self.pen.polygon(self._larger([*accepted, (across[-1], floor), (across[0], floor)]), self.area)
        else:
            self._stroke([*low, *high], self.band, 2 * _LINE)
        dense = (RIGHT - LEFT) / len(self.found) < 4 * _LINE
        for line, colour in ((mean, self.entropy), (accepted, self.accepted)):
            self._stroke(line, colour, _LINE)
            for spot in line[-1:] if dense and len(line) > 1 else line:
                self._dot(spot, _LINE, colour)

    def _changes(self) -> None:
        """Dots whose area grows with how many."""
        least, largest = _DOTS
        most = max(max(point.thaws, point.replacements) for point in self.found)
        largest = min(largest, max(least, 0.45 * (RIGHT - LEFT) / len(self.found)))
        for step, point in enumerate(self.found, start=1):
            for count, middle, colour in (
                (point.thaws, THAWS, self.thaws),
                (point.replacements, REPLACEMENTS, self.replacements),
            ):
                if count:
                    radius = max(least, largest * math.sqrt(count / most))
                    self._dot((self.steps.at(step), middle), radius, colour)

    def _numbers(self) -> None:
        for scale, top, name in (
            (self.nats, ENTROPY[0], "entropy, nats"),
            (self.places, ACCEPTED[0], "accepted positions"),
        ):
            self._write(LEFT, top + _NAME, name, self.text, "lm")
            for value in ticks(scale, whole=scale is self.places):
                self._write(LEFT - _MARGIN, scale.at(value), f"{value:,g}", self.text, "rm")
        for middle, name in ((THAWS, "thaws"), (REPLACEMENTS, "replaced"), (STEPS, "step"), (CANVASES, "canvas")):
            self._write(LEFT - _MARGIN, middle, name, self.text, "rm")
        gap = max(1, round(_gap(len(self.found) / 2)))
        self._row(STEPS, [(self.steps.at(step), step) for step in {1, *range(gap, len(self.found) + 1, gap)}])
        middles = [
            (self.steps.at((canvas[0][0] + canvas[-1][0]) / 2), canvas[0][1].canvas + 1) for canvas in self._canvases()
        ]
        self._row(CANVASES, middles)

    def _row(self, y: int, numbers: list[tuple[float, int]]) -> None:
        """Those that have room beside the one before."""
        free = 0.0
        for x, number in sorted(numbers):
            half = len(f"{number:,}") * self.face.width / 2
            if x - half >= free:
                self._write(x, y, f"{number:,}", self.text, "mm")
                free = x + half + self.face.width

    def _legend(self) -> None:
        left = float(LEFT)
        for colour, name in (
            (self.entropy, "mean"),
            (self.band, "10–90 % of the positions"),
            (self.accepted, "accepted"),
            (self.thaws, f"thaws {sum(point.thaws for point in self.found):,}"),
            (self.replacements, f"replacements {sum(point.replacements for point in self.found):,}"),
        ):
            edge = self.entropy if colour == self.band else colour  # the band is faint
            self.pen.rectangle((left, _LEGEND - 8, left + 16, _LEGEND + 8), colour, edge, _LINE // 2)
            self._write(left + 28, _LEGEND, name, self.text, "lm")
            left += 28 + self.face.width * (len(name) + 3)

    def _stroke(self, line: list[tuple[float, float]], colour: Colour, width: int) -> None:
        if len(line) > 1:
            self.pen.line(self._larger(line), colour, width * _FINE, joint="curve")

    def _dot(self, spot: tuple[float, float], radius: float, colour: Colour) -> None:
        x, y = spot
        self.pen.ellipse(self._larger([(x - radius, y - radius), (x + radius, y + radius)]), colour)

    def _larger(self, line: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """A whole number is the middle of a pixel."""
        return [(x * _FINE + _FINE // 2, y * _FINE + _FINE // 2) for x, y in line]

    def _write(self, x: float, y: float, text: str, colour: Colour, anchor: str, *, bold: bool = False) -> None:
        self.pen.text((x, y), text, colour, self.face.bold if bold else self.face.regular, anchor=anchor)


def ticks(scale: Scale, *, whole: bool = False) -> list[float]:
    """The numbers of an axis, its last among them. whole: it counts something."""
    gap = max(_gap(scale.most), 1.0 if whole else 0.0)
    found = [gap * i for i in range(math.ceil(scale.most / gap)) if scale.most - gap * i > 0.6 * gap]
    return [*found, scale.most]


def _cut(text: str, width: int) -> str:
    """As much of it as can be drawn and has room; a name may hold anything."""
    clean = "".join(sign for sign, cells in signs(text) if cells and sign != "\n")
    return clean if len(clean) <= width else clean[: width - 1] + "…"
