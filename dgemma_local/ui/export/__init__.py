"""A recording as a file to show: .svg .html .cast .gif .png .txt, by the suffix; a module each.

    export(recording, path, options)     writes it whole, or leaves what was there
    moments, drawn, durations, …         what the formats share

The same recording and options give the same bytes.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from rich.cells import cell_len

from dgemma_local.errors import RecordingError, UsageError
from dgemma_local.events import CanvasCommitted, StepDone
from dgemma_local.files import replaceable
from dgemma_local.recording import Recording
from dgemma_local.states import Draft, Seen, follow
from dgemma_local.ui.canvas import Row, Vocabulary
from dgemma_local.ui.frame import BETWEEN, SIDE_BY_SIDE, Sight, View, frame, grid_width
from dgemma_local.ui.grid import cells_a_row
from dgemma_local.ui.page import Page
from dgemma_local.ui.palette import Theme
from dgemma_local.ui.status import TWO_ROWS, legend, legend_height

STEP_SECONDS = 0.45
CANVAS_SECONDS = 1.5  # the last step of a canvas
HOLD_SECONDS = 3.5  # the last of all
LEAST_HEIGHT = 3  # rows above the legend: status, one of the canvas, one between
MOST_STATUS = 2  # rows
MOST_TAIL = 8  # rows of earlier text above a canvas; an answer without a line break would grow with every canvas
SUFFIXES = (".svg", ".html", ".cast", ".gif", ".png", ".txt")

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is exported, and how it looks."""

    theme: Theme = "dark"
    view: View = "text"
    draft: Draft = "canvas"
    width: int | None = None  # cells; None: what suits the format
    height: int | None = None  # rows; None: as many as the tallest moment takes
    canvas: int | None = None  # counted from 1; None: all
    step: int | None = None  # counted from 1; None: all, and the last one in what does not move
    seconds: float = STEP_SECONDS  # a step is shown
    plot: bool = False  # entropy and acceptance over the steps, in a PNG


def export(recording: Recording, path: Path, options: Options) -> None:
    """Writes `path`, in the format of its suffix; a file that was there stays until the new one is whole.

    Raises UsageError on another suffix; RecordingError where there is nothing to draw, what draws it is not installed, or
    the file cannot be written: only a regular file is replaced.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UsageError(f"{path} cannot be exported: its ending says no format", f"end it in {' '.join(SUFFIXES)}")
    target = _target(path)
    render: Callable[[Recording, Options], str | bytes]
    render = import_module(f"{__name__}.{suffix[1:]}").render
    made = render(recording, options)
    with _refused(path):
        _replace(target, made if isinstance(made, bytes) else made.encode())


def moments(recording: Recording, options: Options) -> list[Seen]:
    """What was known after each wanted step, in order; at least one. Raises RecordingError where there is none."""
    found = [
        seen
        for event, seen in zip(recording.events, _seen(recording), strict=True)
        if isinstance(event, StepDone)
        and options.canvas in (None, event.canvas + 1)
        and options.step in (None, event.step + 1)
    ]
    if not found:
        raise _nothing(recording, options)
    return found


def outcome(recording: Recording) -> Seen:
    """What is known at its end."""
    return deque(_seen(recording), maxlen=1).pop()


def sight(recording: Recording, options: Options) -> Sight:
    """How the recording is looked at."""
    vocabulary = Vocabulary(
        text=lambda token: recording.word(token).text,
        control=lambda token: recording.word(token).control,
        ends=frozenset(recording.header.ends),
    )
    return Sight(label=recording.header.model, vocabulary=vocabulary, view=options.view, draft=options.draft)


def tails(recording: Recording, width: int) -> dict[int, str]:
    """By canvas, from 0: the committed text on the line that it goes on with, the last MOST_TAIL rows of it."""
    found = {}
    with Page(StringIO(), None, whole_lines=True) as page:
        for event, pieces in zip(recording.events, recording.pieces, strict=True):
            if isinstance(event, StepDone) and event.step == 0:
                found[event.canvas] = _last_rows(page.tail, width)
            elif isinstance(event, CanvasCommitted):
                page.write(pieces)
    return found


def _last_rows(text: str, width: int) -> str:
    """Cut where a row ends, as far as a character takes a cell: what stands in a column stays there."""
    rows = -(-max(0, len(text) - MOST_TAIL * width) // width)
    return text[rows * width :]


def sampled(items: Sequence[Item], most: int) -> list[Item]:
    """At most so many, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def durations(seen: Sequence[Seen], seconds: float) -> list[float]:
    """Seconds that each moment is shown: the last of a canvas longer, and the last of all longest."""
    after = [CANVAS_SECONDS if now.canvas != then.canvas else seconds for now, then in pairwise(seen)]
    return [*after, HOLD_SECONDS]


def drawn(
    recording: Recording, options: Options, width: int, most: int, frames: int | None = None
) -> list[tuple[Seen, list[Row]]]:
    """Every wanted moment with its rows, `width` cells wide, all of one height: the tallest's, and never above `most`.

    frames: at most so many moments, evenly spread; None: all.
    """
    seen = moments(recording, options)
    seen = seen if frames is None else sampled(seen, frames)
    before, wanted = tails(recording, width), sight(recording, options)
    if options.height is None and wanted.view == "text":
        return list(zip(seen, _cut(seen, before, wanted, width, most), strict=True))
    height = options.height or _height(seen, before, wanted, width, most)
    return list(zip(seen, _frames(seen, before, wanted, width, min(height, most)), strict=True))


def _cut(seen: Sequence[Seen], tails: Mapping[int, str], wanted: Sight, width: int, most: int) -> Iterable[list[Row]]:
    """Text, drawn once with all the room there is, and cut behind the tallest."""
    below = legend_height(width, most)
    bodies = []
    for rows in _frames(seen, tails, wanted, width, most):
        body = rows[: len(rows) - below]
        bodies.append(body[: _filled(body)])
    height = _least(max(map(len, bodies)), 0, width, most)
    if height < TWO_ROWS:  # the numbers take one
        return _frames(seen, tails, wanted, width, height)
    foot = legend(width, legend_height(width, height), grid=False)
    room = height - len(foot)
    return ([*body, *([] for _ in range(room - len(body))), *foot] for body in bodies)


def _frames(
    seen: Iterable[Seen], tails: Mapping[int, str], wanted: Sight, width: int, height: int
) -> Iterator[list[Row]]:
    top = 0
    for each in seen:
        shot = frame(each, wanted, width, height, tail=tails[each.canvas], top=top)
        top = shot.top
        yield shot.rows


def _height(seen: Sequence[Seen], tails: Mapping[int, str], wanted: Sight, width: int, most: int) -> int:
    """Rows that the tallest moment takes, with one that keeps it off the legend."""
    beside = wanted.view == "both" and width >= SIDE_BY_SIDE
    room = width - grid_width(width) - cell_len(BETWEEN[0]) if beside else width
    grid = 0
    if wanted.view == "both" and not beside:
        grid = max(-(-length // cells_a_row(length, width, most)) for length in (len(each.states) for each in seen))
    wanted = replace(wanted, view="grid" if wanted.view == "grid" else "text")
    below = legend_height(room, most)
    tallest = max(_filled(rows[: len(rows) - below]) for rows in _frames(seen, tails, wanted, room, most))
    return _least(tallest, grid, width, most)


def _least(tallest: int, grid: int, width: int, most: int) -> int:
    """Rows of a frame with so many above a grid of so many, which gets no more than half."""
    return min(most, max(LEAST_HEIGHT, tallest + 1 + grid, MOST_STATUS + 2 * grid) + legend_height(width, most))


def _filled(rows: list[Row]) -> int:
    """Rows up to the last in which something stands."""
    return max((n for n, row in enumerate(rows, 1) if any(text.strip() for text, _ink in row)), default=0)


def _seen(recording: Recording) -> Iterator[Seen]:
    return follow(zip(recording.events, recording.seconds, strict=True), frozenset(recording.header.ends))


def _nothing(recording: Recording, options: Options) -> RecordingError:
    canvases = recording.canvases
    if not canvases:
        return RecordingError("there is no denoising step in the recording", "record a run that takes at least one")
    if options.canvas is not None and not 1 <= options.canvas <= len(canvases):
        return RecordingError(f"there is no canvas {options.canvas}", f"give --canvas 1 to {len(canvases)}")
    wanted = canvases if options.canvas is None else [canvases[options.canvas - 1]]
    return RecordingError(f"there is no step {options.step}", f"give --at 1 to {max(map(len, wanted))}")


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    """What the operating system says against a file, as an error with a cure."""
    try:
        yield
    except OSError as error:
        raise RecordingError(f"{path} cannot be written: {error.strerror}", "give another file to --export") from None


def _target(path: Path) -> Path:
    """The file behind links. Raises RecordingError where something is there that is not one: a device, a pipe, a folder."""
    with _refused(path):
        return replaceable(path)


def _replace(path: Path, data: bytes) -> None:
    beside = path.with_name(f".dgemma-{os.getpid()}")  # short, however long the name
    try:
        beside.write_bytes(data)
        beside.replace(path)
    finally:
        with suppress(OSError):
            beside.unlink()
