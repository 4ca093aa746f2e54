"""A PNG: the canvas at a step, at twice a screen's pixels; or, as a plot, the curves over all steps."""

from dataclasses import replace
from io import BytesIO
from typing import TYPE_CHECKING

from dgemma_local.errors import RecordingError
from dgemma_local.recording import Recording
from dgemma_local.ui.export import Options, drawn, moments
from dgemma_local.ui.export.pixels import MOST_COLUMNS, WIDTHS, Sheet, between, broadest, inks, most_lines, needed
from dgemma_local.ui.export.plot import plot
from dgemma_local.ui.palette import GROUND, Chrome, Ink, Theme, look

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_ROWS = {"text": 2000, "grid": 60, "both": 48}  # a grid fills what it is given
FONT = 30  # pixels: cells of 18 by 36
_DPI = 144  # twice a screen's
_ROUND, _EDGE = 24, 2  # pixels: of the card's corners, and around it
_FAINT = 0.35  # of the legend's colour in the edge
_FINE = 4  # a corner is drawn so many times larger, and made smaller


def render(recording: Recording, options: Options) -> bytes:
    """The wanted step; the last one of the last wanted canvas where none is named.

    Raises RecordingError where there is nothing to draw, too much of it, or no Pillow.
    """
    needed()
    return _packed(plot(recording, options) if options.plot else _canvas(recording, options))


def _canvas(recording: Recording, options: Options) -> "Image":
    width = options.width or WIDTHS[options.view]
    if width > MOST_COLUMNS:
        raise RecordingError(f"a PNG of {width:,} cells is too wide to draw", f"give --width {MOST_COLUMNS} or less")
    step = moments(recording, options)[-1].step
    assert step is not None  # a moment is of a step
    one = replace(options, canvas=step.canvas + 1, step=step.step + 1)
    most = options.height or min(MOST_ROWS[options.view], most_lines(width, FONT))
    rows = drawn(recording, one, width, most)[0][1]
    sheet = Sheet(options.width or broadest([rows]), len(rows), inks([rows]), options.theme, FONT)
    image = sheet.draw(rows)
    image.putpalette(sheet.colours.table)
    return _card(image, options.theme)


def _card(image: "Image", theme: Theme) -> "Image":
    """With round corners, and an edge that can be seen on a page of its own colour."""
    from PIL import ImageChops

    edge = between(look(Ink(Chrome.LEGEND), theme).colour, GROUND[theme], _FAINT)
    card = image.convert("RGBA")
    card.paste(edge, mask=ImageChops.invert(_rounded(image.size, _EDGE)))
    card.putalpha(_rounded(image.size, 0))
    return card


def _rounded(size: tuple[int, int], inset: int) -> "Image":
    """Mode L: 255 inside a rectangle so many pixels smaller on every side, its round corners smoothed."""
    from PIL import Image, ImageDraw

    radius = _ROUND - inset
    large = Image.new("L", (2 * radius * _FINE,) * 2)
    ImageDraw.Draw(large).ellipse((0, 0, large.width - 1, large.height - 1), 255)
    disc = large.resize((2 * radius,) * 2, Image.Resampling.BOX)
    right, bottom = size[0] - inset, size[1] - inset
    mask = Image.new("L", size)
    mask.paste(255, (inset, inset, right, bottom))
    for i, left in enumerate((inset, right - radius)):
        for j, top in enumerate((inset, bottom - radius)):
            corner = (i * radius, j * radius, (i + 1) * radius, (j + 1) * radius)
            mask.paste(disc.crop(corner), (left, top))
    return mask


def _packed(image: "Image") -> bytes:
    file = BytesIO()
    image.save(file, "PNG", dpi=(_DPI, _DPI))
    return file.getvalue()
