"""A recording, line by line as it happens."""

import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Protocol

from dgemma_local.errors import RecordingError
from dgemma_local.events import CanvasCommitted, Event, Finished, Prefilled, Retried, StepDone
from dgemma_local.recording.form import DIGITS, FORMAT, GZIP, GZIP_MAGIC, NONBLOCK, VERSION, Header, Word, sound

_LEVEL = 6  # of zlib
_HEAD = 512  # bytes in which a recording says what it is
_START = re.compile(rf'\s*\{{\s*"event"\s*:\s*"recording"\s*,\s*"format"\s*:\s*"{FORMAT}"'.encode())
_ANOTHER = "give another file to --record"


class Text(Protocol):
    """A piece of committed text."""

    @property
    def kind(self) -> str: ...
    @property
    def text(self) -> str: ...


class Recorder:
    """Writes one recording; a context manager.

    Each line is with the operating system before `take` returns: what ends the process costs nothing but the line at
    work. A file that cannot be written any more ends the recording and not the run: `failed` then says why. Raises
    RecordingError where `check_target` does, or the first line cannot be written.
    """

    def __init__(self, path: Path, header: Header, word: Callable[[int], Word]) -> None:
        self.path = path
        self.failed: str | None = None
        self._word = word
        self._named: set[int] = set()
        check_target(path)
        new = not path.exists()
        try:
            self._file = _opened(path)
        except (OSError, ValueError) as error:
            raise _unwritable(path, error) from None
        self._zip = zlib.compressobj(_LEVEL, wbits=GZIP) if path.suffix.lower() == ".gz" else None
        hindered = self._line(_head(header) | {"texts": self._new(header.ends, header.prompt or ())})
        if hindered is not None:
            self.close()
            if new:
                with suppress(OSError):
                    Path(os.path.realpath(path)).unlink()
            raise _unwritable(path, hindered)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def take(self, event: Event, seconds: float, pieces: Iterable[Text] = ()) -> None:
        """One event, the seconds it took, and the text it made final."""
        if self.failed is None:
            ends = isinstance(event, CanvasCommitted | Finished)
            texts = {"pieces": [{"kind": piece.kind, "text": sound(piece.text)} for piece in pieces]}
            self._line(self._fields(event) | (texts if ends else {}) | {"seconds": round(seconds, 6)})

    def close(self) -> None:
        """Idempotent."""
        if self._file.closed:
            return
        if self._zip is not None and self.failed is None:
            self._written(self._zip.flush())
        try:
            self._file.close()
        except OSError as error:  # a file over the network says here what it could not keep
            self._fail(error)

    def _fields(self, event: Event) -> dict[str, object]:
        match event:
            case Prefilled():
                return {
                    "event": "prefilled",
                    "tokens": event.tokens,
                    "reused": event.reused,
                    "joining": event.joining,
                }
            case StepDone():
                return self._step(event)
            case Retried():
                return {
                    "event": "retried",
                    "canvas": event.canvas,
                    "reason": event.reason,
                    "steps": event.steps,
                }
            case CanvasCommitted():
                return {
                    "event": "canvas_committed",
                    "canvas": event.canvas,
                    "tokens": event.tokens,
                    "kept": event.kept,
                    "steps": event.steps,
                    "converged": event.converged,
                    "texts": self._new(event.tokens),
                }
            case Finished():
                return {
                    "event": "finished",
                    "reason": event.reason,
                    "tokens": event.tokens,
                    "canvases": event.canvases,
                    "steps": event.steps,
                    "texts": self._new(event.tokens),
                }

    def _step(self, event: StepDone) -> dict[str, object]:
        fed = event.fed if event.step == 0 else ()  # later steps read the `next` before them
        return {
            "event": "step_done",
            "canvas": event.canvas,
            "step": event.step,
            "steps": event.steps,
            "temperature": round(event.temperature, 6),
            **({"fed": fed} if fed else {}),
            "draft": event.draft,
            "accepted": "".join(["1" if each else "0" for each in event.accepted]),
            "next": event.next,
            "entropy": [max(0.0, round(each, DIGITS)) for each in event.entropy],  # rounding left some below 0
            "done": event.done,
            **({"pinned": event.pinned} if event.pinned else {}),
            "texts": self._new(fed, event.draft, event.next),
        }

    def _new(self, *lists: Sequence[int]) -> list[object]:
        """The texts of tokens that were not named before, in their order."""
        new = [token for ids in lists for token in dict.fromkeys(ids) if token not in self._named]
        new = list(dict.fromkeys(new))
        self._named.update(new)
        return [_text(self._word(token)) for token in new]

    def _line(self, values: Mapping[str, object]) -> OSError | None:
        """Writes it, or returns what hindered it."""
        line = (json.dumps(values, separators=(",", ":")) + "\n").encode()
        if self._zip is not None:
            line = self._zip.compress(line) + self._zip.flush(zlib.Z_SYNC_FLUSH)
        return self._written(line)

    def _written(self, data: bytes) -> OSError | None:
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            self._fail(error)
            return error
        return None

    def _fail(self, error: OSError) -> None:
        self.failed = f"{self.path} is recorded in part only: {error.strerror or error}"


def check_target(path: Path) -> None:
    """Raises RecordingError where a recording would not be begun at `path`; touches nothing.

    A recording that is there is overwritten, anything else is not. A link is followed. A pipe is written to while
    somebody reads it; a terminal, and where the process's own output goes, is refused.
    """
    try:
        if path.is_dir():
            raise RecordingError(f"{path} is a folder", "give a file in it to --record")
        if not path.parent.is_dir():
            raise RecordingError(f"there is no folder {path.parent} to record in", _ANOTHER)
        if _is_output(path):
            raise RecordingError(f"{path} is where the output goes", _ANOTHER)
        if path.is_file() and not _is_recording(path):
            raise RecordingError(f"{path} is there and is no recording", f"{_ANOTHER}, or remove it")
        place = path if path.exists() else path.parent
        if not os.access(place, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
            raise RecordingError(f"{path} cannot be written: it is not yours to write", _ANOTHER)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: Exception) -> RecordingError:
    return RecordingError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}", _ANOTHER)


def _opened(path: Path) -> FileIO:
    """For writing; a pipe that nobody reads is an error, and not waited for."""
    file = open(path, "wb", buffering=0, opener=lambda name, flags: os.open(name, flags | NONBLOCK, 0o666))  # noqa: SIM115 - Path.open takes no opener
    if NONBLOCK:
        os.set_blocking(file.fileno(), True)
    return file


def _is_output(path: Path) -> bool:
    """Whether it is a terminal, or the file that stdout or stderr write to."""
    if not path.exists():
        return False
    if path.is_char_device():
        with _opened(path) as device:
            return device.isatty()
    return any(os.path.samestat(path.stat(), os.fstat(number)) for number in (1, 2) if _is_open(number))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _is_recording(path: Path) -> bool:
    """Whether the file holds a recording, what is left of one, or nothing."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if not head:
        return True
    if head.startswith(GZIP_MAGIC):
        try:
            head = zlib.decompressobj(GZIP).decompress(head, _HEAD)
        except zlib.error:
            return False
    start = json.dumps({"event": "recording", "format": FORMAT}, separators=(",", ":"))[:-1].encode()
    return _START.match(head) is not None or (bool(head) and start.startswith(head))


def _head(header: Header) -> dict[str, object]:
    """The first line, but for its texts."""
    prompt = {} if header.prompt is None else {"prompt": header.prompt}
    return {
        "event": "recording",
        "format": FORMAT,
        "version": VERSION,
        "model": sound(header.model),
        "revision": header.revision,
        "demo": header.demo,
        "seed": header.seed,
        "canvas_length": header.canvas_length,
        "steps": header.steps,
        "max_tokens": header.max_tokens,
        "ends": header.ends,
        **prompt,
        "settings": {sound(str(name)): _plain(value) for name, value in header.settings.items()},
        "dgemma": header.dgemma,
    }


def _plain(value: object) -> object:
    """What JSON has a word for; of anything else how it reads."""
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return sound(str(value))


def _text(word: Word) -> object:
    return {"control": sound(word.text)} if word.control else sound(word.text)
