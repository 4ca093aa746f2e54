"""`dgemma bench --view`: what the canvas view costs a run, measured by running with it and without, in turn.

The view is drawn on a pseudo-terminal of 80 x 24 that a thread reads empty; where there are none, on the terminal itself.
A pair is one run each way, the order changing from pair to pair, all with one seed and so one answer.

The document, schema 1: complete · dgemma · date · label · seed · pairs · subject {name, device, canvas_length, threads} and

    with, without   {wall_s, cpu_s, ms_per_step}, medians of the runs, and steps, of each run
    ratio           wall time with : without, of every pair: median, least and most
    cpu_ratio       the same of the processor time of all threads, what reads the terminal empty included: other work on
                    the machine moves it less
    frames          drawn and dropped, medians of the runs with the view
    frame_ms        processor time of one frame of CELLS positions: derived, laid out and painted; median of FRAMES
"""

import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any, TextIO

from dgemma_local import __version__
from dgemma_local.bench import SCHEMA, report
from dgemma_local.errors import BenchRefused, UsageError
from dgemma_local.events import StepDone
from dgemma_local.states import Seen, see
from dgemma_local.ui.canvas import Vocabulary
from dgemma_local.ui.drawing import Drawer
from dgemma_local.ui.frame import Sight
from dgemma_local.ui.live import Region, live
from dgemma_local.ui.page import Page
from dgemma_local.ui.paint import Painter
from dgemma_local.ui.plain import plain
from dgemma_local.ui.record import Record, Timed
from dgemma_local.ui.terminal import Terminal, stderr

PROMPT = """Solve this sudoku:
.34.7.91.
..2......
...3.25.7
...7..4..
..6......
..3.....6
.......8.
.8...9.3.
...2.6..9"""  # few clues: the demo model takes tens of steps over it, and thaws
PAIRS = 10  # at least
CELLS = 256  # positions of the real model's canvas
FRAMES = 200
_COLUMNS, _LINES = 80, 24
_TAKEN = 0.3  # share of the positions that are accepted in the frames that are timed


@dataclass(frozen=True, slots=True)
class Ran:
    """One run."""

    wall: float  # seconds, drawing included
    cpu: float  # seconds of the processor, all threads
    steps: int
    step_seconds: float
    tokens: tuple[int, ...]
    drawn: int = 0  # frames
    dropped: int = 0


Ask = Callable[[], tuple[Iterable[Timed], Record]]  # one more answer, the same as before


def measure(
    ask: Ask, vocabulary: Vocabulary, subject: Mapping[str, Any], seed: int, pairs: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """The document. Raises BenchRefused where two runs of one seed differ, UsageError where nothing can be drawn on."""
    sight = Sight(label=str(subject["name"]), vocabulary=vocabulary)
    runs: dict[bool, list[Ran]] = {False: [], True: []}
    with _screen() as terminal, open(os.devnull, "w", encoding="utf-8") as nowhere:  # noqa: PTH123  # it is no path

        def once(view: bool) -> Ran:
            return _seen(ask, terminal, sight) if view else _unseen(ask, nowhere)

        for view in (False, True):
            once(view)  # the first of each warms up
        for pair in range(pairs):
            say(f"pair {pair + 1} of {pairs}")
            for view in ((False, True), (True, False))[pair % 2]:
                runs[view].append(once(view))
        if len({run.tokens for some in runs.values() for run in some}) != 1:
            raise BenchRefused("runs of one seed differ", "report this: the view must not change what the model does")
        frame_ms = [1000 * seconds for seconds in frames(terminal, sight, seed)]
    both = list(zip(runs[True], runs[False], strict=True))
    return {
        "schema": SCHEMA,
        "complete": True,
        "dgemma": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "label": "the demo model with the canvas view and without, on this machine as it is loaded now",
        "seed": seed,
        "pairs": pairs,
        "subject": dict(subject),
        "with": _figures(runs[True]),
        "without": _figures(runs[False]),
        "ratio": _spread([a.wall / b.wall for a, b in both]),
        "cpu_ratio": _spread([a.cpu / b.cpu for a, b in both]),
        "frames": {
            "drawn": median(run.drawn for run in runs[True]),
            "dropped": median(run.dropped for run in runs[True]),
        },
        "frame_ms": {"cells": CELLS, "median": median(frame_ms), "max": max(frame_ms), "frames": len(frame_ms)},
    }


def _spread(ratios: list[float]) -> dict[str, float]:
    return {"median": median(ratios), "min": min(ratios), "max": max(ratios)}


def _figures(runs: list[Ran]) -> dict[str, float]:
    return {
        "wall_s": median(run.wall for run in runs),
        "cpu_s": median(run.cpu for run in runs),
        "ms_per_step": median(1000 * run.step_seconds / run.steps for run in runs),
        "steps": runs[0].steps,
    }


def _unseen(ask: Ask, out: TextIO) -> Ran:
    events, record = ask()
    began = _clocks()
    plain(events, record, Page(out, None))
    return _ran(record, began)


def _seen(ask: Ask, terminal: Terminal, sight: Sight) -> Ran:
    events, record = ask()
    record.watched = Seen(sight.vocabulary.ends)
    page = Page(terminal.file, None, whole_lines=True)  # type: ignore[arg-type]  # rich says IO[str]
    began = _clocks()
    drawer = live(events, record, page, terminal, sight, "dark")
    return _ran(record, began, drawer)


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _ran(record: Record, began: tuple[float, float], drawer: Drawer | None = None) -> Ran:
    wall, cpu = (now - then for now, then in zip(_clocks(), began, strict=True))
    tokens = record.finished.tokens if record.finished else ()
    drawn, dropped = (drawer.drawn, drawer.dropped) if drawer else (0, 0)
    return Ran(wall, cpu, max(1, record.steps), record.step_seconds, tokens, drawn, dropped)


def frames(terminal: Terminal, sight: Sight, seed: int) -> Iterator[float]:
    """Seconds of the processor for each of FRAMES frames of CELLS positions, of which some change at every step."""
    rng = random.Random(seed)
    region, painter = Region(terminal, sight), Painter(terminal, "dark")
    seen = Seen(sight.vocabulary.ends)
    most = 100  # ids that every vocabulary has

    def some() -> tuple[int, ...]:
        return tuple(rng.randrange(most) for _ in range(CELLS))

    fed = some()
    for number in range(FRAMES):
        accepted = tuple(rng.random() < _TAKEN for _ in range(CELLS))
        entropy = tuple(rng.random() * 5 for _ in range(CELLS))
        step = StepDone(0, number, FRAMES, 0.6, fed, some(), accepted, fed := some(), entropy, False)
        began = time.thread_time()
        seen = see(seen, step)
        painter.painted(region.rows(seen, ""))
        yield time.thread_time() - began


@contextmanager
def _screen() -> Iterator[Terminal]:
    """What the view is drawn on."""
    try:
        import pty
    except ImportError:
        terminal = stderr()
        if not terminal.redraws:
            raise UsageError("there is nothing to draw on", "run `dgemma bench --view` on a terminal") from None
        yield terminal
        return
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _LINES, _COLUMNS, 0, 0))
    reader = threading.Thread(target=_drain, args=(ours,), daemon=True)
    reader.start()
    try:
        with open(theirs, "w", encoding="utf-8") as file:  # noqa: PTH123  # an open descriptor
            yield Terminal(file)
    finally:
        reader.join()  # it ends when nobody holds the other side
        os.close(ours)


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 1 << 16):
            pass
    except OSError:  # Linux's end of file on a terminal
        pass


def show_cost(document: Mapping[str, Any], out: TextIO) -> None:
    """A table for people and, in the last line, the document for programs."""
    subject, ratio, frame = document["subject"], document["ratio"], document["frame_ms"]
    print(document["label"], file=out)
    print(f"{subject['name']} on {subject['device']}; --seed {document['seed']}, {document['pairs']} pairs", file=out)
    number = report.number
    table = report.Table(
        "The view",
        ("", "with", "without"),
        tuple(
            (name, number(document["with"][key], digits), number(document["without"][key], digits))
            for name, key, digits in (
                ("ms/step", "ms_per_step", 2),
                ("s, wall", "wall_s", 3),
                ("s, processor", "cpu_s", 3),
                ("steps", "steps", 0),
            )
        ),
        (
            *(
                f"{name} time with : without, median of the pairs: {of['median']:.3f} ({of['min']:.3f} to {of['max']:.3f})"
                for name, of in (("wall", ratio), ("processor", document["cpu_ratio"]))
            ),
            f"frames a run: {document['frames']['drawn']:g} drawn, {document['frames']['dropped']:g} dropped",
            f"a frame of {frame['cells']} positions: {frame['median']:.2f} ms, median of {frame['frames']}",
        ),
    )
    for line in report.plain(table):
        print(line, file=out)
    print(report.line(document), file=out)
    out.flush()
