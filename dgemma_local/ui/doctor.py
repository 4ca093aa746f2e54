"""The doctor's report: a line a finding as it comes, its cure beneath; or one JSON object.

OK   torch        2.13.0, CUDA 13.0
WARN PCIe 0       generation 4 of 4, 8 of 16 lanes
     cure: only loading is slower for it …
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO

from rich.text import Text

from dgemma_local.doctor.finding import Finding, Level, ok, warn
from dgemma_local.ui.terminal import Terminal, printable

STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red", Level.SKIP: "dim"}
NAMES = 16  # columns of a name
LEAST_COLUMNS, LEAST_LINES = 40, 10  # of a terminal in which a canvas can be followed


Document = Callable[[Sequence[Finding], float], dict[str, Any]]


def show(findings: Iterable[Finding], out: TextIO, document: Document | None = None) -> list[Finding]:
    """Writes them to `out` as they come, and returns them; with `document`, when all are there, as what it makes of them."""
    began, seen = time.perf_counter(), list[Finding]()
    terminal = Terminal(out)
    for finding in findings:
        seen.append(finding)
        if document is None:
            _line(finding, terminal)
            out.flush()
    seconds = time.perf_counter() - began
    if document is not None:
        print(json.dumps(document(seen, seconds)), file=out)
    else:
        counts = Counter(finding.level for finding in seen)
        said = ", ".join(f"{counts[level]} {level.value}" for level in Level if counts[level])
        terminal.print(Text(f"{said}, in {seconds:.1f} s", style="bold"), soft_wrap=True)
    out.flush()
    return seen


def look(terminal: Terminal) -> Iterator[Finding]:
    """What a canvas can be drawn with on this terminal: UTF-8, colours, size."""
    width, height = terminal.size
    colours = terminal.color_system or "none"
    facts = {
        "terminal": terminal.is_terminal,
        "encoding": terminal.encoding,
        "colours": colours,
        "columns": width,
        "lines": height,
        "dumb": terminal.is_dumb_terminal,
    }
    what = f"{terminal.encoding}, colours: {colours}, {width} x {height}"
    if not terminal.encoding.startswith("utf"):
        yield warn(
            "terminal", what, "set LANG to a UTF-8 locale, such as C.UTF-8: without it nothing is drawn", **facts
        )
    elif not terminal.is_terminal:
        yield ok("terminal", f"{terminal.encoding}, not a terminal: plain text", **facts)
    elif terminal.is_dumb_terminal:
        yield warn("terminal", f"{what}; TERM is dumb", "set TERM to what the terminal is: frames stand one under another", **facts)  # fmt: skip
    elif width < LEAST_COLUMNS or height < LEAST_LINES:
        yield warn("terminal", what, f"make it {LEAST_COLUMNS} x {LEAST_LINES} or larger", **facts)
    else:
        yield ok("terminal", what, **facts)


def _line(finding: Finding, terminal: Terminal) -> None:
    """As it is: not wrapped, and lost with an error where the reader has gone."""
    text = Text(finding.level.value.ljust(5), style=STYLES[finding.level])
    text.append(printable(f"{finding.name.ljust(NAMES)} {finding.what}"), style="not bold not dim default")
    if finding.cure is not None:
        text.append(printable(f"\n     cure: {finding.cure}"), style="not bold default")
    terminal.print(text, soft_wrap=True)
