"""Front ends: each reads one run's events, with the seconds they took, and shows them.

    events ─► plain        the answer to stdout, canvas by canvas
           ─► provisional  the same on a terminal, with what has settled of the canvas at work below it
           ─► json_lines   one object a line
           ─► live         the canvas at work on stderr, the answer to stdout
           ─► printed      the same, frame under frame, where the cursor cannot be moved

Nothing here knows a model or a tokenizer: both come in as functions of token ids.
"""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from dgemma_local.errors import UsageError
from dgemma_local.interrupts import Flag
from dgemma_local.states import Draft, Seen, summary
from dgemma_local.ui.canvas import Vocabulary
from dgemma_local.ui.drawing import FRAMES_PER_SECOND
from dgemma_local.ui.frame import Sight, View
from dgemma_local.ui.keys import Keys
from dgemma_local.ui.live import Pace, live, printed
from dgemma_local.ui.page import Page
from dgemma_local.ui.paint import theme
from dgemma_local.ui.plain import json_lines, plain
from dgemma_local.ui.record import Reader, Record, Start, Timed
from dgemma_local.ui.settled import provisional
from dgemma_local.ui.terminal import Terminal, for_the_eye, stderr

__all__ = ["Record", "Start", "Wanted", "show"]

DEMO = "demo model: tiny, trained on a CPU to show a canvas settling; knows little"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the reader asked for."""

    as_json: bool = False
    visualize: bool = False
    stats: bool = False
    quiet: bool = False
    slow: float = 0.0  # seconds
    pressed: Flag = field(default_factory=Flag)  # Ctrl-C; the end of `slow` and `step`
    view: View = "text"
    draft: Draft = "canvas"  # what is drawn where nothing is accepted
    fps: float | None = None  # at most; None: as many as are seen
    step: bool = False  # a key for every step
    theme: str = "auto"  # dark, light, or what the terminal says
    fresh: Callable[[], Reader] | None = None  # makes a reader like the record's; None: only committed text is shown
    stop: Sequence[str] = ()  # strings that end the answer before them
    thoughts: bool = False  # shown as they are committed; else a line says how long they were


def show(events: Iterable[Timed], record: Record, vocabulary: Vocabulary, wanted: Wanted) -> None:
    """Runs the front end that is wanted; `record` then holds what came of it.

    Raises UsageError, before the first event is asked for, where steps wait for keys and there are none.
    """
    terminal = stderr()
    with _keys(wanted) as keys:
        _introduce(terminal, record.start, wanted)
        counted = wanted.visualize or wanted.stats or record.recorder is not None
        if counted:
            record.watched = Seen(vocabulary.ends)
        began = time.perf_counter()
        _run(events, record, vocabulary, wanted, terminal, keys)
        wall = time.perf_counter() - began
    if not wanted.quiet:
        if record.text["thought"].strip() and not (wanted.thoughts or wanted.as_json):
            terminal.say(f"thought: {record.thought_tokens} tokens (--show-thinking shows them)", style="dim")
        if counted and record.watched is not None and record.steps:
            terminal.say(summary(record.watched), style="dim")
        for line in record.notices():
            terminal.say(line, style="dim" if line.startswith("complete") else "")
    if wanted.stats and not wanted.quiet:
        for line in record.summary(wall):
            terminal.say(line, style="dim")


def _keys(wanted: Wanted) -> "Keys | nullcontext[None]":
    if not (wanted.step and wanted.visualize):
        return nullcontext()
    keys = Keys.open()
    if keys is None:
        raise UsageError("--step waits for keys, and there is no terminal to read them from", "give --slow SECONDS")
    return keys


def _introduce(terminal: Terminal, start: Start, wanted: Wanted) -> None:
    if start.demo and not wanted.as_json:  # there the first line says so; nothing else silences it
        terminal.say(DEMO, style="dim")
    if not wanted.quiet:
        terminal.say(f"{start.model} · --seed {start.seed}", style="dim")
    if wanted.visualize and not terminal.writes:
        terminal.say("--visualize needs stderr to be a terminal that knows UTF-8; going on without")


def _run(
    events: Iterable[Timed],
    record: Record,
    vocabulary: Vocabulary,
    wanted: Wanted,
    terminal: Terminal,
    keys: Keys | None,
) -> None:
    out = sys.stdout
    notes = None if wanted.quiet else terminal
    if wanted.as_json:
        json_lines(events, record, out, seconds=wanted.stats)
    elif wanted.visualize and terminal.writes:
        sight = Sight(label=record.start.model, vocabulary=vocabulary, view=wanted.view, draft=wanted.draft)
        pace = Pace(slow=wanted.slow, keys=keys, pressed=wanted.pressed)
        shared = out.isatty()
        eye = out if shared else for_the_eye(sys.stderr)
        page = Page(eye, notes, whole_lines=True, thoughts=wanted.thoughts)
        copy = None if shared else Page(out, None)
        if terminal.redraws:
            shade = theme(wanted.theme)
            live(
                events, record, page, terminal, sight, shade, copy=copy, fps=wanted.fps or FRAMES_PER_SECOND, pace=pace
            )
        else:
            printed(events, record, page, terminal, sight, copy=copy, pace=pace)
    elif wanted.fresh is not None and not wanted.quiet and (screen := Terminal(out)).redraws:
        page = Page(out, notes, whole_lines=True, thoughts=wanted.thoughts)
        sight = Sight(label=record.start.model, vocabulary=vocabulary)
        provisional(
            events, record, page, screen, sight, theme(wanted.theme),
            fresh=wanted.fresh, stop=wanted.stop, thoughts=wanted.thoughts,
        )  # fmt: skip
    else:
        plain(events, record, Page(out, notes, thoughts=wanted.thoughts))
