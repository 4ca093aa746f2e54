"""A run as asciicast v2, for asciinema: what the live view writes to a terminal, with times.

The first line is a JSON object: version, width and height of the terminal, duration in seconds. Each line behind it is
[seconds since the start, "o", what is written].
"""

import json
from dataclasses import replace
from io import StringIO

from rich.console import ConsoleDimensions

from dgemma_local.events import CanvasCommitted, Finished, StepDone
from dgemma_local.recording import Recording
from dgemma_local.states import State
from dgemma_local.ui.export import Options, drawn, durations
from dgemma_local.ui.page import Page
from dgemma_local.ui.paint import Depth, Painter, sgr
from dgemma_local.ui.palette import GROUND, Colour, Ink, Theme, look
from dgemma_local.ui.terminal import Terminal, printable

WIDTH, HEIGHT = 80, 24
LEAST_WIDTH, LEAST_HEIGHT = 8, 5
DEPTH: Depth = "true"
# The terminal's own eight colours; those of GitHub's themes for editors.
PALETTE: dict[Theme, str] = {
    "dark": "#484f58:#ff7b72:#3fb950:#d29922:#58a6ff:#bc8cff:#39c5cf:#b1bac4",
    "light": "#24292f:#cf222e:#116329:#4d2d00:#0969da:#8250df:#1b7c83:#6e7781",
}


def render(recording: Recording, options: Options) -> str:
    """The whole file. Raises RecordingError where there is no step to draw."""
    width, height = max(LEAST_WIDTH, options.width or WIDTH), max(LEAST_HEIGHT, options.height or HEIGHT)
    shots = drawn(recording, replace(options, height=None), width, height - 1)
    tape = _Tape()
    terminal = _Screen(tape, width, height, options.theme)
    waits = durations([seen for seen, _rows in shots], options.seconds)
    frames = {seen.step: (rows, wait) for (seen, rows), wait in zip(shots, waits, strict=True)}
    with Page(tape, terminal, whole_lines=True) as page, _Painter(terminal, options.theme) as painter:
        for event, pieces in zip(recording.events, recording.pieces, strict=True):
            if isinstance(event, StepDone) and event in frames:
                rows, wait = frames[event]
                painter.paint(rows)
                tape.now += wait
            elif isinstance(event, CanvasCommitted | Finished):
                painter.clear()
                page.write(pieces)
    lines = [_header(width, height, tape.now, options.theme), *tape.written]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _header(width: int, height: int, seconds: float, theme: Theme) -> dict[str, object]:
    colours = {"fg": _hex(look(Ink(State.TEXT), theme).colour), "bg": _hex(GROUND[theme]), "palette": PALETTE[theme]}
    return {
        "version": 2,
        "width": width,
        "height": height,
        "duration": round(seconds, 6),
        "env": {"TERM": "xterm-256color", "SHELL": "/bin/sh"},
        "theme": colours,
    }


def _hex(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


class _Tape(StringIO):
    """A terminal that keeps what is written to it, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0  # seconds
        self.written: list[tuple[float, str, str]] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.written.append((round(self.now, 6), "o", text.replace("\r\n", "\n").replace("\n", "\r\n")))
        return len(text)


class _Screen(Terminal):
    """A terminal of a size of its own, whatever this process runs in."""

    def __init__(self, tape: _Tape, width: int, height: int, theme: Theme) -> None:
        super().__init__(tape)
        self._cells = ConsoleDimensions(width, height)
        self._dim = sgr(look(Ink(State.PAST), theme), DEPTH)

    @property
    def size(self) -> ConsoleDimensions:
        return self._cells

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        raise AttributeError("the size is the recording's")

    def say(self, text: str, *, style: str = "", end: str = "\n") -> None:
        """Thoughts are dim; a tool call is not."""
        self.file.write(f"{self._dim}{printable(text)}\x1b[0m{end}" if style else printable(text) + end)


class _Painter(Painter):
    """Draws in all colours, whatever the terminal of this process can."""

    def __init__(self, terminal: Terminal, theme: Theme) -> None:
        super().__init__(terminal, theme)
        self._depth = DEPTH
