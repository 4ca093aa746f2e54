"""Front ends: each reads one run's events, with the seconds they took, and shows them.

    events ─► plain        the answer to stdout, canvas by canvas
           ─► json_lines   one object a line
           ─► live         the canvas at work on stderr, the answer to stdout

Nothing here knows a model or a tokenizer: both come in as functions of token ids.
"""

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dgemma_local.ui.canvas import Vocabulary
from dgemma_local.ui.live import live, never
from dgemma_local.ui.page import Page
from dgemma_local.ui.plain import json_lines, plain
from dgemma_local.ui.record import Record, Start, Timed
from dgemma_local.ui.terminal import stderr

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
    hurry: Callable[[], bool] = never  # whether the reader has had enough of `slow`


def show(events: Iterable[Timed], record: Record, vocabulary: Vocabulary, wanted: Wanted) -> None:
    """Runs the front end that is wanted; `record` then holds what came of it."""
    terminal, out = stderr(), sys.stdout
    start = record.start
    if start.demo and not wanted.as_json:  # there the first line says so; nothing else silences it
        terminal.say(DEMO, style="dim")
    if not wanted.quiet:
        terminal.say(f"{start.model} · --seed {start.seed}", style="dim")
    notes = None if wanted.quiet else terminal
    visualize = wanted.visualize and terminal.redraws
    if wanted.visualize and not visualize:
        terminal.say("--visualize needs stderr to be a terminal that can move its cursor; going on without")
    began = time.perf_counter()
    if wanted.as_json:
        json_lines(events, record, out, seconds=wanted.stats)
    elif visualize:
        shared = out.isatty()
        page = Page(out if shared else sys.stderr, notes, whole_lines=True)
        copy = None if shared else Page(out, None)
        live(events, record, page, terminal, vocabulary, copy=copy, slow=wanted.slow, hurry=wanted.hurry)
    else:
        plain(events, record, Page(out, notes))
    wall = time.perf_counter() - began
    if not wanted.quiet:
        for line in record.notices():
            terminal.say(line)
    if wanted.stats and not wanted.quiet:
        for line in record.summary(wall):
            terminal.say(line, style="dim")
