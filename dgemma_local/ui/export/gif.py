"""A GIF: one frame a step, in the looks' own colours; the last is held, then it begins again.

Frames are put together here rather than by Pillow's `save_all`, which joins equal ones and keeps all of them in memory;
what is inside a frame is Pillow's. A frame holds what has changed: the rest shows through from the one before.
"""

from typing import TYPE_CHECKING

from dgemma_local.errors import RecordingError
from dgemma_local.recording import Recording
from dgemma_local.ui.export import Options, drawn
from dgemma_local.ui.export.pixels import KEEP, MOST_COLUMNS, WIDTHS, Sheet, broadest, inks, needed

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_ROWS = 48  # a higher canvas is looked at through a window
FONT = 15  # pixels: cells of 9 by 18
HELD = 3.0  # seconds, of the last frame
MOST_CELLS = 2_000_000  # of all frames: 2,000 steps of a canvas that fills 12 rows
_SHORTEST, _LONGEST = 0.02, 600.0  # seconds a frame; browsers slow down what is shorter, and a GIF counts to 655.35
_ONCE_MORE = b"!\xff\x0bNETSCAPE2.0\x03\x01\x00\x00\x00"  # for ever
_KEPT = 1  # disposal: the next frame is drawn over this one


def render(recording: Recording, options: Options) -> bytes:
    """Raises RecordingError where there is nothing to draw, too much of it, or no Pillow."""
    needed()
    width = options.width or WIDTHS[options.view]
    most = options.height or MOST_ROWS
    _bounded(recording, options, width, most)
    frames = [rows for _seen, rows in drawn(recording, options, width, most)]
    sheet = Sheet(options.width or broadest(frames), len(frames[0]), inks(frames), options.theme, FONT)
    parts = [_head(sheet)]
    before: Image | None = None
    for i, rows in enumerate(frames):
        now = sheet.draw(rows).copy()
        parts += _frame(now, before, max(options.seconds, HELD) if i == len(frames) - 1 else options.seconds)
        before = now
    return b"".join([*parts, b";"])


def _bounded(recording: Recording, options: Options, width: int, most: int) -> None:
    if width > MOST_COLUMNS:
        raise RecordingError(f"a GIF of {width:,} cells is too wide to draw", f"give --width {MOST_COLUMNS} or less")
    canvases = recording.canvases
    wanted = canvases if options.canvas is None else canvases[options.canvas - 1 : options.canvas]
    steps = sum(map(len, wanted)) if options.step is None else len(wanted)
    if steps * min(width * most, recording.header.canvas_length) > MOST_CELLS:
        raise RecordingError(
            f"a GIF of {steps:,} steps of {recording.header.canvas_length:,} positions is too large to draw",
            "give one canvas with --canvas, one step with --at, or export .html",
        )


def _head(sheet: Sheet) -> bytes:
    """Signature, size, 256 colours of 8 bits, and that it plays for ever."""
    width, height = sheet.size
    return b"GIF89a" + _two(width) + _two(height) + b"\xf7\x00\x00" + sheet.colours.table + _ONCE_MORE


def _frame(now: "Image", before: "Image | None", seconds: float) -> list[bytes]:
    from PIL import Image, ImageChops
    from PIL.GifImagePlugin import getdata

    patch, corner = now, (0, 0)
    if before is not None:
        difference = ImageChops.difference(now, before)
        box = difference.getbbox() or (0, 0, 1, 1)  # a frame has to have a pixel
        patch, corner = Image.new("L", (box[2] - box[0], box[3] - box[1]), KEEP), box[:2]
        patch.paste(now.crop(box), mask=difference.crop(box).point([0] + [255] * 255))
    milliseconds = round(min(max(seconds, _SHORTEST), _LONGEST) * 100) * 10
    return getdata(patch, corner, duration=milliseconds, disposal=_KEPT, transparency=KEEP)


def _two(number: int) -> bytes:
    return number.to_bytes(2, "little")
