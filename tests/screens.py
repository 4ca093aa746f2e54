"""Terminals for tests: streams that keep what is written, and an emulator that shows it."""

import io
from typing import Any

import pytest
from rich.console import ConsoleDimensions

from dgemma_local.ui.terminal import Terminal

pyte = pytest.importorskip("pyte")


class Tty(io.StringIO):
    """A terminal of any size, which keeps what was written, write by write."""

    encoding = "utf-8"

    def __init__(self, columns: int = 40, lines: int = 12) -> None:
        super().__init__()
        self.columns, self.lines = columns, lines
        self.writes: list[str] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.writes.append(text)
        return super().write(text)


class Sized(Terminal):
    """A terminal that knows the size of a `Tty`."""

    @property
    def size(self) -> Any:
        return ConsoleDimensions(self.file.columns, self.file.lines)  # type: ignore[attr-defined]


def emulator(columns: int, lines: int) -> Any:
    screen = pyte.HistoryScreen(columns, lines, history=1000, ratio=0.5)
    screen.set_mode(pyte.modes.LNM)  # as a terminal's line discipline makes of a newline
    return screen


def shown(screen: Any) -> list[str]:
    return [line.rstrip() for line in screen.display]


def scrolled(screen: Any) -> list[str]:
    lines = ["".join(line[i].data for i in range(screen.columns)).rstrip() for line in screen.history.top]
    return [line for line in lines if line]


def feed(screen: Any, file: Tty, since: int) -> int:
    pyte.Stream(screen).feed("".join(file.writes[since:]))
    return len(file.writes)
