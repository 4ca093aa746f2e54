"""The two front ends without a picture: text as canvases become final, and JSON lines."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import TextIO

from dgemma_local.events import CanvasCommitted, Event, Finished, Prefilled, StepDone
from dgemma_local.ui.page import Page
from dgemma_local.ui.record import Record, Timed

_NAMES: Mapping[type[Event], str] = {
    Prefilled: "prefilled",
    StepDone: "step_done",
    CanvasCommitted: "canvas_committed",
    Finished: "finished",
}


def plain(events: Iterable[Timed], record: Record, page: Page) -> None:
    """The answer, canvas by canvas."""
    with page:
        for event, seconds in events:
            page.write(record.take(event, seconds))


def json_lines(events: Iterable[Timed], record: Record, out: TextIO, *, seconds: bool = False) -> None:
    """One object a line, ASCII: `start`, then every event by its field names, no clock unless `seconds`.

    `canvas_committed` and `finished` also carry the `pieces` of text they make final; `finished` the whole `answer`,
    `thought` and `tool_call`.
    """

    def line(name: str, values: Mapping[str, object]) -> None:
        out.write(json.dumps({"event": name, **values}, allow_nan=False) + "\n")
        out.flush()

    line("start", asdict(record.start))
    for event, took in events:
        pieces = record.take(event, took)
        values: dict[str, object] = {each.name: getattr(event, each.name) for each in fields(event)}
        if isinstance(event, CanvasCommitted | Finished):
            values["pieces"] = [{"kind": piece.kind, "text": piece.text} for piece in pieces]
        if isinstance(event, Finished):
            values |= record.text
        if seconds:
            values["seconds"] = took
        line(_NAMES[type(event)], values)
