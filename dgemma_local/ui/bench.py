"""A benchmark's tables: drawn on a terminal, aligned text in a pipe; the last line is the document."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich.table import Table

from dgemma_local.bench import report
from dgemma_local.ui.terminal import Terminal, printable

GAP = 2  # spaces between columns


def show_bench(document: Mapping[str, Any], out: TextIO) -> None:
    """All of a document, for people and, in the last line, for programs."""
    text = not out.isatty()
    terminal = Terminal(out)
    for line in report.head(document):
        if text:
            print(printable(line), file=out)
        else:
            terminal.say(line, style="bold" if line == document["label"] else "dim")
    for table in report.tables(document):
        if text:
            print(file=out)
            for line in report.plain(table):
                print(printable(line), file=out)
        else:
            _draw(table, terminal)
    print(report.line(document), file=out)
    out.flush()


def _draw(table: report.Table, terminal: Terminal) -> None:
    """Below one another as many columns at a time as the terminal holds beside the first."""
    first, *others = ([printable(cell) for cell in column] for column in zip(table.head, *table.rows, strict=True))
    for number, part in enumerate(_parts(others, terminal.size.width - max(map(len, first)))):
        terminal.print()
        if not number:
            terminal.say(table.title, style="bold")
        grid = Table(box=None, pad_edge=False, header_style="bold")
        grid.add_column(first[0])
        for name, *_ in part:
            grid.add_column(name, justify="right", no_wrap=True)
        for row in list(zip(first, *part, strict=True))[1:]:
            grid.add_row(*row)
        terminal.print(grid)
    for note in table.notes:
        terminal.say(note, style="dim")


def _parts(columns: Sequence[list[str]], width: int) -> Iterator[list[list[str]]]:
    """Columns in groups that fit, of at least one; one group without columns where there are none."""
    part: list[list[str]] = []
    left = width
    for column in columns:
        takes = GAP + max(map(len, column))
        if part and takes > left:
            yield part
            part, left = [], width
        part.append(column)
        left -= takes
    yield part
