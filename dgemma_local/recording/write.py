"""A recording, line by line as it happens."""

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Protocol

from dgemma_local.errors import RecordingError
from dgemma_local.events import CanvasCommitted, Event, Finished, Prefilled, StepDone
from dgemma_local.recording.form import DIGITS, FORMAT, VERSION, Header, Word

_GZIP = 31  # zlib's window of 15 bits, with gzip's header
_BEST = 9


class Text(Protocol):
    """A piece of committed text."""

    @property
    def kind(self) -> str: ...
    @property
    def text(self) -> str: ...


class Recorder:
    """Writes one recording; a context manager.

    Each line is with the operating system before `take` returns. A file that cannot be written any more ends the
    recording and not the run: `failed` then says why. Raises RecordingError where the file cannot be begun, or holds
    something else than a recording.
    """

    def __init__(self, path: Path, header: Header, word: Callable[[int], Word]) -> None:
        self.path = path
        self.failed: str | None = None
        self._word = word
        self._named: set[int] = set()
        self._canvas = -1  # whose first step has been written
        _keep_what_is_no_recording(path)
        try:
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise RecordingError(
                f"{path} cannot be written: {error.strerror}", "give another file to --record"
            ) from None
        self._zip = zlib.compressobj(_BEST, wbits=_GZIP) if path.suffix == ".gz" else None
        known = {name: value for name, value in asdict(header).items() if name != "prompt" or value is not None}
        values = {"event": "recording", "format": FORMAT, "version": VERSION, **known}
        self._line(values | {"texts": self._new(header.ends, header.prompt or ())})

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def take(self, event: Event, seconds: float, pieces: Iterable[Text] = ()) -> None:
        """One event, the seconds it took, and the text it made final."""
        if self.failed is None:
            texts = {"pieces": [{"kind": piece.kind, "text": piece.text} for piece in pieces]}
            ends = isinstance(event, CanvasCommitted | Finished)
            self._line(self._fields(event) | (texts if ends else {}) | {"seconds": round(seconds, 6)})

    def close(self) -> None:
        if not self._file.closed:
            if self._zip is not None:
                self._write(self._zip.flush())
            self._file.close()

    def _fields(self, event: Event) -> dict[str, object]:
        match event:
            case Prefilled():
                return {"event": "prefilled", **asdict(event)}
            case StepDone():
                values = {
                    "event": "step_done",
                    "canvas": event.canvas,
                    "step": event.step,
                    "steps": event.steps,
                    "temperature": round(event.temperature, 6),
                    "draft": event.draft,
                    "accepted": "".join("01"[each] for each in event.accepted),
                    "next": event.next,
                    "entropy": [round(each, DIGITS) for each in event.entropy],
                    "done": event.done,
                }
                fed = event.fed if event.canvas != self._canvas else ()  # later steps read the `next` before them
                self._canvas = event.canvas
                if fed:
                    values["fed"] = fed
                return values | {"texts": self._new(fed, event.draft, event.next)}
            case CanvasCommitted():
                return {"event": "canvas_committed", **asdict(event), "texts": self._new(event.tokens)}
            case Finished():
                return {"event": "finished", **asdict(event), "texts": self._new(event.tokens)}

    def _new(self, *lists: Sequence[int]) -> list[object]:
        """The texts of tokens that were not named before, in their order."""
        found: list[object] = []
        for token in (token for ids in lists for token in ids):
            if token not in self._named:
                self._named.add(token)
                word = self._word(token)
                found.append({"control": word.text} if word.control else word.text)
        return found

    def _line(self, values: dict[str, object]) -> None:
        line = (json.dumps(values, separators=(",", ":"), allow_nan=False) + "\n").encode()
        self._write(line if self._zip is None else self._zip.compress(line) + self._zip.flush(zlib.Z_SYNC_FLUSH))

    def _write(self, data: bytes) -> None:
        if self.failed is not None:
            return
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            self.failed = f"{self.path} is recorded in part only: {error.strerror}"


def _keep_what_is_no_recording(path: Path) -> None:
    """Raises RecordingError where `path` holds bytes that are not a recording's."""
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except OSError:
        return  # not there, or said when it is opened for writing
    if head[:2] == b"\x1f\x8b":
        head = zlib.decompressobj(_GZIP).decompress(head)
    if head and f'"{FORMAT}"'.encode() not in head:
        raise RecordingError(f"{path} is there and is no recording", "give another file to --record, or remove it")
