"""A small recording as bytes, plain and packed, and what must hold of whatever is read of it once it is damaged."""

import io
import json
import os
import zlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import recordings

from dgemma_local.errors import RecordingError
from dgemma_local.events import CanvasCommitted, StepDone
from dgemma_local.recording import Recorder, Recording, open_recording
from dgemma_local.recording import read as reading
from dgemma_local.states import follow, summary


@cache
def small() -> Recording:
    """A few kilobytes: every kind of line, two canvases."""
    return recordings.make(length=8, steps=3, vocabulary=30)


@cache
def plain() -> bytes:
    """`small`, as a file."""
    file = io.BytesIO()
    made = small()
    there, here = os.pipe()
    with Recorder(Path(f"/dev/fd/{here}"), made.header, made.word) as recorder:
        os.close(here)
        for event, seconds, pieces in zip(made.events, made.seconds, made.pieces, strict=True):
            recorder.take(event, seconds, pieces)
    with os.fdopen(there, "rb") as pipe:
        file.write(pipe.read())
    return file.getvalue()


@cache
def packed() -> bytes:
    """The same, flushed line by line."""
    pack = zlib.compressobj(6, wbits=31)
    parts = [pack.compress(line) + pack.flush(zlib.Z_SYNC_FLUSH) for line in plain().splitlines(keepends=True)]
    return b"".join(parts) + pack.flush()


@cache
def parsed() -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(line) for line in plain().splitlines())


def spelled(lines: list[Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def check_error(error: RecordingError) -> None:
    for line in (error.what, error.fix):
        assert line and line.isprintable() and line.encode()
    assert error.__cause__ is None


def check_sound(found: Recording) -> None:
    """Every value is what it should be: a view needs no check of its own."""
    if found.notice is not None:
        assert found.notice.isprintable() and found.notice.encode()
    L = found.header.canvas_length
    for event in found.events:
        if isinstance(event, StepDone):
            for ids in (event.fed, event.draft, event.next):
                assert len(ids) == L and all(type(each) is int and each >= 0 for each in ids)
                assert all(each in found.words for each in ids)
            assert len(event.accepted) == L and {type(each) for each in event.accepted} == {bool}
            assert len(event.entropy) == L and all(type(each) is float and 0 <= each <= 22 for each in event.entropy)
            assert 0 <= event.step < event.steps
        elif isinstance(event, CanvasCommitted):
            assert len(event.tokens) == L and event.kept <= L
    assert len(found.events) == len(found.seconds) == len(found.pieces)
    repr(found).encode()  # which half a character cannot
    json.dumps(dict(found.header.settings), allow_nan=False)
    for seen in follow(zip(found.events, found.seconds, strict=True), frozenset(found.header.ends)):
        assert summary(seen)
    assert [len(steps) for steps in found.canvases] == [
        len([e for e in found.events if isinstance(e, StepDone) and e.canvas == number])
        for number in range(len(found.canvases))
    ]


def seen_of(data: bytes) -> Recording | None:
    """What is read of the bytes; None where they are no recording."""
    try:
        found = reading.read(io.BytesIO(data), "run")
    except RecordingError as error:
        check_error(error)
        return None
    check_sound(found)
    return found


def outcome(data: bytes, folder: Path) -> Recording | None:
    """As `seen_of`; written and read again it is the same, but for digits that no recorder writes."""
    found = seen_of(data)
    if found is None:
        return None
    once, twice = written(folder, found), written(folder, written(folder, found))
    assert once == twice and len(once.events) == len(found.events)
    assert once.header == found.header and once.pieces == found.pieces and once.words == found.words
    return found


def written(folder: Path, made: Recording) -> Recording:
    path = folder / "again"
    path.unlink(missing_ok=True)
    recordings.write(path, made)
    return replace(open_recording(path), notice=None)


def is_start(found: Recording, whole: Recording) -> bool:
    return found.header == whole.header and found.events == whole.events[: len(found.events)]
