"""The table of models, for people and for pipes."""

from collections.abc import Iterable
from typing import TextIO

from rich.table import Table

from dgemma_local.registry import Entry, is_folder
from dgemma_local.ui.terminal import Terminal

_HEAD = ("name", "format", "weights", "VRAM", "here", "licence", "note")
_RIGHT = ("weights", "VRAM")


def show_models(entries: Iterable[Entry], out: TextIO) -> None:
    """One model a row: a table on a terminal, aligned columns in a pipe."""
    table = [_row(entry) for entry in entries]
    if not out.isatty():
        widths = [max(map(len, column)) for column in zip(_HEAD, *table, strict=True)]
        for row in (_HEAD, *table):
            cells = (
                cell.rjust(width) if name in _RIGHT else cell.ljust(width)
                for name, cell, width in zip(_HEAD, row, widths, strict=True)
            )
            print("  ".join(cells).rstrip(), file=out)
    else:
        grid = Table(box=None, pad_edge=False, header_style="bold")
        for name in _HEAD:
            grid.add_column(name, justify="right" if name in _RIGHT else "left", no_wrap=name != "note")
        for row in table:
            grid.add_row(*row)
        Terminal(out).print(grid)
    out.flush()


def _row(entry: Entry) -> tuple[str, ...]:
    needs = "-" if entry.needs is None else f"{entry.needs:.1f} GiB" if entry.needs else "none"
    return (
        entry.name,
        entry.format or "-",
        f"{entry.bytes / 1e9:.1f} GB" if entry.bytes else "-",
        needs,
        "yes" if entry.folder is not None and is_folder(entry.folder) else "no",
        entry.licence or "-",
        entry.note,
    )
