"""The table of models and the memory plan of one, for people and for pipes.

experts (nvfp4)                  12.85 GB
…
KV cache, 8,192 tokens            0.64 GB
working memory, the largest of    0.36 GB     they are never there together
  canvas × vocabulary             0.36 GB
  denoising step                  0.08 GB
  prefill chunk                   0.15 GB
CUDA context                      0.50 GB
total                            18.40 GB
free on NVIDIA GeForce RTX 4090  25.38 GB
fits: …
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from rich.table import Table

from dgemma_local.registry import Entry, is_folder
from dgemma_local.ui.terminal import Terminal, printable

if TYPE_CHECKING:
    from dgemma_local.fit import Component, Estimate, Verdict

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
    needs = "-" if entry.needs is None else f"{entry.needs:.1f} GB" if entry.needs else "none"
    return (
        entry.name,
        entry.format or "-",
        f"{entry.bytes / 1e9:.1f} GB" if entry.bytes else "-",
        needs,
        "yes" if entry.folder is not None and is_folder(entry.folder) else "no",
        entry.licence or "-",
        entry.note,
    )


def show_plan(estimate: "Estimate", verdict: "Verdict | None", out: TextIO) -> None:
    """One component a line, what it adds up to, what there is, and the verdict with its fixes. None: there is no budget."""
    table = [*_plan(estimate), *(() if verdict is None else _budget(verdict))]
    said = [] if verdict is None else [verdict.line, *(f"fix: {cure}" for cure in verdict.cures)]
    if not out.isatty():
        width, digits = (max(map(len, column)) for column in zip(*((n, gb(s)) for n, s in table), strict=True))
        for name, size in table:
            print(f"{name.ljust(width)}  {gb(size).rjust(digits)}", file=out)
        for line in said:
            print(printable(line), file=out)
    else:
        grid = Table(box=None, pad_edge=False, show_header=False)
        grid.add_column(no_wrap=True)
        grid.add_column(justify="right", no_wrap=True)
        for name, size in table:
            grid.add_row(name, gb(size), style="dim" if name.startswith(" ") else "bold" if name == "total" else "")
        terminal = Terminal(out)
        terminal.print(grid)
        for line in said:
            terminal.say(line)
    out.flush()


def plan_to_json(estimate: "Estimate", verdict: "Verdict | None") -> dict[str, Any]:
    """The same in bytes, ready for `json.dumps`."""
    plan: dict[str, Any] = {
        "context": estimate.context,
        "slack": estimate.slack,
        "compute": estimate.compute,
        "device": estimate.device,
        "components": [
            {"name": part.name, "dtype": part.dtype or None, "bytes": part.bytes, "working": part.working}
            for part in estimate.components
        ],
        "working": estimate.working,
        "allocated": estimate.allocated,
        "cuda_context": estimate.cuda_context,
        "total": estimate.total,
        "verdict": None,
    }
    if verdict is not None:
        card = verdict.budget.card
        plan["verdict"] = {
            "kind": verdict.kind,
            "budget": verdict.budget.bytes,
            "place": verdict.budget.place,
            "holders": [] if card is None else [{"pid": h.pid, "name": h.name, "bytes": h.bytes} for h in card.holders],
            "context": None if verdict.plan is None else verdict.plan.context,
            "line": verdict.line,
            "cures": list(verdict.cures),
        }
    return plan


def _plan(estimate: "Estimate") -> Iterator[tuple[str, int | None]]:
    working = [part for part in estimate.components if part.working]
    for part in estimate.components:
        if not part.working:
            yield _name(part, estimate.context), part.bytes
    yield "working memory, the largest of", estimate.working
    for part in working:
        yield f"  {part.name}", part.bytes
    if estimate.cuda_context:
        yield "CUDA context", estimate.cuda_context
    yield "total", estimate.total


def _budget(verdict: "Verdict") -> Iterator[tuple[str, int | None]]:
    budget = verdict.budget
    if budget.asked:
        yield f"{budget.place}, the CUDA context not counted", budget.bytes
        return
    yield printable(f"free on {budget.place}"), budget.bytes
    for holder in () if budget.card is None else budget.card.holders:
        yield printable(f"  held by {holder.name} (pid {holder.pid})"), holder.bytes


def _name(part: "Component", context: int) -> str:
    if part.dtype:
        return f"{part.name} ({part.dtype})"
    return f"{part.name}, {context:,} tokens" if part.name == "KV cache" else part.name


def gb(size: int | None) -> str:
    """Bytes for people; `?` where nobody said."""
    if size is None:
        return "?"
    return f"{size / 1e9:.2f} GB" if size >= 5e6 else f"{size / 1e6:.2f} MB"  # what would read 0.00 GB
