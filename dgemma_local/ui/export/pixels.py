"""Rows of inked text as pixels, by Pillow: cells of one size, and of no other colours than the looks' own and the steps
between them, so that 255 hold them all and a GIF needs no dithering.

The fonts are beside this file (fonts/README.md); bars and shades fill their cells without a seam. What they lack is a box of its cells, with the code point where there is
room for it.
"""

import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from dgemma_local.errors import RecordingError
from dgemma_local.ui.canvas import Row, signs
from dgemma_local.ui.frame import SIDE_BY_SIDE
from dgemma_local.ui.palette import GROUND, Colour, Ink, Look, Theme, look

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

KEEP = 0  # an index no colour has: what was there before shows through
WIDTHS = {"text": 80, "grid": 80, "both": SIDE_BY_SIDE}  # cells, where none are asked for
MOST_COLUMNS = 1000  # cells; a wall of screens
MOST_PIXELS = 1 << 25  # of one image; a byte each, and seven where it becomes a PNG
_COLOURS = 255  # beside KEEP
_SMOOTH = (32, 16, 8, 4, 2)  # steps from ground to colour, as many as the palette has room for
_FONTS = Path(__file__).with_name("fonts")
_EIGHTHS = "▁▂▃▄▅▆▇█"  # of a cell, from below
_SHADES = {"░": 64, "▒": 128, "▓": 191}  # of 255: quarters of the ink, all over the cell
_UNASSIGNED = "\U0010ffff"  # in no font

Cell = tuple[str, int, Ink]  # a sign with the marks on it, how many cells it takes, and its ink


def needed() -> None:
    """Raises RecordingError where Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise RecordingError(
            "GIF and PNG are drawn by Pillow, which is not installed", "pip install 'dgemma[gif]'"
        ) from None


def cells(row: Row) -> list[Cell]:
    """What stands in each place of a row; combining marks are joined to what they stand on."""
    found: list[Cell] = []
    for text, ink in row:
        for sign, width in signs(text):
            if width:
                found.append((sign, width, ink))
            elif found:
                base, taken, first = found[-1]
                found[-1] = (base + sign, taken, first)
    return found


def inks(frames: Iterable[list[Row]]) -> set[Ink]:
    """All that is used."""
    return {ink for rows in frames for row in rows for _text, ink in row}


def broadest(frames: Iterable[list[Row]]) -> int:
    """Cells of the longest row; at least one."""
    return max(1, *(sum(width for _text, width, _ink in cells(row)) for rows in frames for row in rows))


def pair(drawn: Look, theme: Theme) -> tuple[Colour, Colour]:
    """Colour and ground. `dim` is for terminals of few colours: a look's own colour is as faint as it should be."""
    ground = drawn.ground or GROUND[theme]
    return (ground, drawn.colour) if drawn.reverse else (drawn.colour, ground)


class Face:
    """The fonts at one size: `width` and `height` of a cell, in pixels, and masks of what stands in it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.regular, self.bold = (_font(name, size) for name in ("DejaVuSansMono.ttf", "DejaVuSansMono-Bold.ttf"))
        self.ascent, descent = self.regular.getmetrics()
        self.width, self.height = round(self.regular.getlength("M")), self.ascent + descent

    def mask(self, text: str, places: int, bold: bool = False, underline: bool = False) -> "Image":
        """Mode L, 255 where ink is."""
        from PIL import Image, ImageDraw

        image = Image.new("L", (places * self.width, self.height))
        pen = ImageDraw.Draw(image)
        text = unicodedata.normalize("NFC", text)
        font = self.bold if bold and has(self.bold, text[0]) else self.regular
        if text[0] in _EIGHTHS:
            high = round(self.height * (1 + _EIGHTHS.index(text[0])) / len(_EIGHTHS))
            pen.rectangle((0, self.height - high, image.width, self.height), 255)
        elif text[0] in _SHADES:
            image.paste(_SHADES[text[0]], (0, 0, *image.size))
        elif has(font, text[0]):
            for sign in text:
                if has(font, sign):
                    pen.text((0, self.ascent), sign, 255, font, anchor="ls")  # a mark's glyph stands over the same cell
        else:
            self._box(pen, ord(text[0]), places)
        if underline:
            stroke = max(1, self.size // 14)
            pen.rectangle((0, self.ascent + stroke + 1, image.width, self.ascent + 2 * stroke), 255)
        return image

    def _box(self, pen: "ImageDraw", code: int, places: int) -> None:
        thick = max(1, self.size // 20)
        left, right = thick, places * self.width - 1 - thick
        top, bottom = thick + self.size // 10, self.height - 1 - thick - self.size // 10
        pen.rounded_rectangle((left, top, right, bottom), self.size // 8, outline=150, width=thick)
        digits = f"{code:04X}" if code < 0x10000 else f"{code:06X}"
        half = len(digits) // 2
        small = _fitting(right - left - 4 * thick, (bottom - top - 3 * thick) // 2, half)
        if small is not None:
            middle, line = (left + right + 1) / 2, (bottom - top) / 4
            pen.text((middle, top + line + 1), digits[:half], 255, small, anchor="mm")
            pen.text((middle, bottom - line), digits[half:], 255, small, anchor="mm")


@cache
def _font(name: str, size: int) -> "FreeTypeFont":
    from PIL import ImageFont

    return ImageFont.truetype(_FONTS / name, size, layout_engine=ImageFont.Layout.BASIC)


@lru_cache(maxsize=1 << 14)
def has(font: "FreeTypeFont", sign: str) -> bool:
    """Whether the font draws a sign as more than its box for what it lacks."""
    return sign == " " or bytes(font.getmask(sign)) != bytes(font.getmask(_UNASSIGNED))


_SMALLEST = 7  # pixels of font size in which digits can still be read


def _fitting(width: int, height: int, digits: int) -> "FreeTypeFont | None":
    """The largest font whose digits have room."""
    for size in range(height, _SMALLEST - 1, -1):
        font = _font("DejaVuSansMono.ttf", size)
        if font.getlength("0" * digits) <= width:
            return font
    return None


def most_lines(columns: int, size: int) -> int:
    """Rows of so many cells that an image of MOST_PIXELS has room for; size: of the font, in pixels."""
    face = Face(size)
    margin = 2 * _margin(face)
    return (MOST_PIXELS // (margin + columns * face.width) - margin) // face.height


def _margin(face: Face) -> int:
    return face.width * 3 // 2


class Colours:
    """Indices of a palette: of every colour on every ground, and of the steps between the two."""

    def __init__(self, pairs: Iterable[tuple[Colour, Colour]]) -> None:
        pairs = sorted(set(pairs))
        for smooth in _SMOOTH:
            self.ramps = {each: [between(*each, step / (smooth - 1)) for step in range(smooth)] for each in pairs}
            found = dict.fromkeys(colour for ramp in self.ramps.values() for colour in ramp)
            if len(found) <= _COLOURS:
                break
        self.index = {colour: 1 + i for i, colour in enumerate(found)}

    @property
    def table(self) -> bytes:
        """256 colours of 3 bytes; KEEP is black."""
        flat = bytes([0, 0, 0]) + bytes(level for colour in self.index for level in colour)
        return flat.ljust(3 * 256, b"\0")

    def codes(self, colours: tuple[Colour, Colour]) -> list[int]:
        """The index for each of 256 strengths of ink."""
        ramp = [self.index[colour] for colour in self.ramps[colours]]
        return [ramp[(strength * (len(ramp) - 1) + 127) // 255] for strength in range(256)]


def between(colour: Colour, ground: Colour, part: float) -> Colour:
    """So much of the colour, the rest of the ground."""
    red, green, blue = (round(g + (c - g) * part) for c, g in zip(colour, ground, strict=True))
    return red, green, blue


class Sheet:
    """An image that rows are drawn on, again and again: only rows that differ from those before are drawn.

    Mode L, an index of `colours` a pixel.
    """

    def __init__(self, columns: int, lines: int, used: Iterable[Ink], theme: Theme, size: int) -> None:
        """columns, lines: in cells, beside a margin all around. size: of the font, in pixels.

        Raises RecordingError where the image would be too large.
        """
        from PIL import Image

        self.face = Face(size)
        self.theme = theme
        self.margin = _margin(self.face)
        self.columns, self.lines = columns, lines
        self.size = (2 * self.margin + columns * self.face.width, 2 * self.margin + lines * self.face.height)
        if self.size[0] * self.size[1] > MOST_PIXELS:
            raise RecordingError(
                f"an image of {columns:,} by {lines:,} cells is too large to draw", "give a smaller --width"
            )
        ground = GROUND[theme]
        self.colours = Colours([(ground, ground), *(pair(look(ink, theme), theme) for ink in used)])
        self.image = Image.new("L", self.size, self.colours.index[ground])
        self._rows: list[Row] = [[] for _ in range(lines)]
        self._tile = lru_cache(maxsize=1 << 13)(self._tiled)

    def draw(self, rows: Sequence[Row]) -> "Image":
        """The image, which is drawn on again by the next call."""
        for line, row in enumerate(rows[: self.lines]):
            if row != self._rows[line]:
                self._draw(line, row)
                self._rows[line] = row
        return self.image

    def _draw(self, line: int, row: Row) -> None:
        top = self.margin + line * self.face.height
        right = self.margin + self.columns * self.face.width
        ground = self.colours.index[GROUND[self.theme]]
        self.image.paste(ground, (self.margin, top, right, top + self.face.height))
        left = self.margin
        for text, width, ink in cells(row):
            if left + width * self.face.width > right:
                break
            self.image.paste(self._tile(text, width, ink), (left, top))
            left += width * self.face.width

    def _tiled(self, text: str, width: int, ink: Ink) -> "Image":
        drawn = look(ink, self.theme)
        mask = self.face.mask(text, width, drawn.bold, drawn.underline)
        return mask.point(self.colours.codes(pair(drawn, self.theme)))
