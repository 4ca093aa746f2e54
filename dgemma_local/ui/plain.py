"""The two front ends without a picture: text as canvases become final, and JSON lines."""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from io import BufferedWriter, FileIO
from typing import TextIO

from dgemma_local.errors import DgemmaError
from dgemma_local.events import CanvasCommitted, Event, Finished, Prefilled, Retried, StepDone
from dgemma_local.outcomes import Outcome, Verdict, of_error
from dgemma_local.streams import ending
from dgemma_local.ui.page import Page
from dgemma_local.ui.record import Record, Timed

_NAMES: Mapping[type[Event], str] = {
    Prefilled: "prefilled",
    StepDone: "step_done",
    Retried: "retried",
    CanvasCommitted: "canvas_committed",
    Finished: "finished",
}
_at_work: dict[int, BufferedWriter] = {}  # by file descriptor: a line that may not be written whole yet


def plain(events: Iterable[Timed], record: Record, page: Page) -> None:
    """The answer, canvas by canvas."""
    with page:
        for event, seconds in events:
            page.write(record.take(event, seconds))


def json_lines(events: Iterable[Timed], record: Record, out: TextIO, *, seconds: bool = False) -> None:
    """One object a line, ASCII: `start`, then every event by its field names, no clock unless `seconds`.

    `canvas_committed` and `finished` also carry the `pieces` of text they make final; `finished` the whole `answer`,
    `thought` and `tool_call`, `thought_tokens` and `answer_tokens`, and how it ended: `outcome`, `said`, `exit_code`.
    """

    _line(out, "start", asdict(record.start))
    for event, took in events:
        pieces = record.take(event, took)
        values: dict[str, object] = {each.name: getattr(event, each.name) for each in fields(event)}
        if isinstance(event, CanvasCommitted | Finished):
            values["pieces"] = [{"kind": piece.kind, "text": piece.text} for piece in pieces]
        if isinstance(event, Finished):
            values |= {**record.text, "thought_tokens": record.thought_tokens, "answer_tokens": record.answer_tokens}
            values |= _ending(record.verdict)
        if seconds:
            values["seconds"] = took
        _line(out, _NAMES[type(event)], values)


def json_error(error: BaseException, code: int, out: TextIO) -> None:
    """The last line where an error or a signal ended the run: `outcome` is null where it is none of an answer."""
    ending()
    found = of_error(error)
    said, fix = f"{type(error).__name__}: {error}", ""
    if found is Outcome.INTERRUPTED:
        said = "interrupted"
    if isinstance(error, DgemmaError):
        said, fix = error.what, error.fix
    _line(out, "failed", {"outcome": found and found.value, "said": said, "fix": fix, "exit_code": code})


def _ending(found: Verdict) -> dict[str, object]:
    return {"outcome": found.outcome.value, "said": found.line, "exit_code": found.outcome.exit_code}


def _line(out: TextIO, name: str, values: Mapping[str, object]) -> None:
    """Writes it whole: where a signal breaks off the wait for a slow reader, the rest stands before the next line."""
    text = json.dumps({"event": name, **values}, allow_nan=False) + "\n"
    out.flush()
    number = -1
    with suppress(OSError):  # a stream in memory
        number = out.fileno()
    if number < 0:
        out.write(text)
        out.flush()
        return
    try:
        _finish(number)
        _at_work[number] = BufferedWriter(FileIO(number, "w", closefd=False), len(text))
        _at_work[number].write(text.encode())  # it fits in: nothing waits here
        _finish(number)
    except OSError:
        out.write("\n")  # for `streams.ours`, which asks the stream itself
        raise


def _finish(number: int) -> None:
    """Writes what is left of the line at work; what an exception of a signal leaves is counted to the byte."""
    if number in _at_work:
        _at_work[number].flush()
        del _at_work[number]
