"""How a download goes, and what lies on the disk.

a terminal   fetching ━━━━━━━━━━━╸━━━━━━━ 9.8/18.0 GB 92.4 MB/s 0:01:29
a pipe       fetching 18.0 GB, 9.8 GB of it are here
             fetching: 60 %, 92 MB/s
--quiet      nothing
"""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as SpeedColumn

from dgemma_local.hub import Watch
from dgemma_local.hub.failures import size
from dgemma_local.registry import Entry
from dgemma_local.ui.terminal import Terminal, stderr

_TENTHS = 10  # lines of a task in a pipe


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Watch]:
    """What `hub.fetch` tells, shown on stderr while the block runs."""
    terminal = stderr()
    if quiet:
        yield Watch()
    elif terminal.redraws:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            SpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=terminal) as bars:
            yield Bars(bars, terminal)
    else:
        yield Lines(terminal)


class Bars(Watch):
    """One bar a task."""

    def __init__(self, bars: Progress, terminal: Terminal) -> None:
        self.bars, self.terminal = bars, terminal
        self.task: TaskID | None = None

    def start(self, task: str, total: int, done: int) -> None:
        self.task = self.bars.add_task(task, total=total, completed=done)

    def advance(self, count: int) -> None:
        if self.task is not None:
            self.bars.advance(self.task, count)

    def say(self, text: str) -> None:
        self.terminal.say(text)


class Lines(Watch):
    """A line when a task begins, and at every tenth of it."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.lock = threading.Lock()
        self.task, self.total, self.done, self.came, self.began = "", 0, 0, 0, 0.0

    def start(self, task: str, total: int, done: int) -> None:
        self.task, self.total, self.done, self.came, self.began = task, total, done, 0, time.monotonic()
        self.say(f"{task} {size(total)}" + (f", {size(done)} of it are here" if done else ""))

    def advance(self, count: int) -> None:
        with self.lock:
            before = self.done * _TENTHS // max(self.total, 1)
            self.done, self.came = self.done + count, self.came + count
            tenth = self.done * _TENTHS // max(self.total, 1)
            if tenth > before:
                speed = size(int(self.came / max(time.monotonic() - self.began, 1e-3)))
                self.say(f"{self.task}: {tenth * 100 // _TENTHS} %, {speed}/s")

    def say(self, text: str) -> None:
        self.terminal.say(text)


def show_held(held: Iterable[tuple[Entry, Path | None, int]], out: TextIO) -> None:
    """Which models lie in the cache: name, bytes, folder; of one that is not complete, how to go on."""
    for entry, folder, count in held:
        if folder is not None:
            line = f"{entry.name}: {size(count)} in {folder}"
        else:
            whole = f" of {size(entry.bytes)}" if entry.bytes else ""
            line = f"{entry.name}: {size(count)}{whole} are here; `dgemma pull {entry.name}` brings the rest"
        print(line, file=out)
    out.flush()
