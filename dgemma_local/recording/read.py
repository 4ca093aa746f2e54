"""A recording, up to where it can be trusted. Nothing in a file is believed: every value is checked before it is used."""

import json
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, get_args

from dgemma_local.errors import RecordingError
from dgemma_local.events import CanvasCommitted, Event, Finished, FinishReason, Prefilled, StepDone
from dgemma_local.recording.form import FORMAT, KINDS, VERSION, Header, Piece, Word

LONGEST_LINE = 16 << 20  # bytes; a step of 256 positions takes 9 KB
MOST_BYTES = 512 << 20  # in all, unpacked; 1,024 canvases of 48 steps, a context of 262,144 tokens, take 440 MB
MOST_POSITIONS = 65_536  # of a canvas
LARGEST_TOKEN = (1 << 31) - 1
_READ = 1 << 18  # bytes at a time
_GZIP = 31


@dataclass(slots=True)
class Recording:
    """One run. `events`, `seconds` and `pieces` have an entry an event."""

    header: Header
    events: list[Event] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    pieces: list[tuple[Piece, ...]] = field(default_factory=list)  # text that the event made final
    words: dict[int, Word] = field(default_factory=dict)
    notice: str | None = None  # why it ends here, if it is not whole

    def word(self, token: int) -> Word:
        return self.words.get(token, Word("�"))

    @property
    def canvases(self) -> list[list[StepDone]]:
        """The steps of each canvas."""
        found: list[list[StepDone]] = []
        for event in self.events:
            if isinstance(event, StepDone):
                if event.step == 0:
                    found.append([])
                found[-1].append(event)
        return found

    @property
    def text(self) -> str:
        """The committed answer."""
        return "".join(piece.text for pieces in self.pieces for piece in pieces if piece.kind == "answer")


class Damaged(Exception):
    """A line that is not what it should be; the text says how."""


def open_recording(path: Path) -> Recording:
    """What can be read of the file, with `notice` where it is damaged, cut, or of a newer version.

    Raises RecordingError where there is no file, or it is not a recording at all.
    """
    try:
        with path.open("rb") as file:
            return read(file, str(path))
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror}", "give a file that --record wrote") from None


def read(file: BinaryIO, name: str) -> Recording:
    """As `open_recording`, of an open file."""
    reader: _Reader | None = None
    good = 0  # lines
    damage: str | None = None
    try:
        for line in _lines(file):
            values = _parsed(line)
            if reader is None:
                reader = _Reader(values)
            else:
                reader.take(values)
            good += 1
    except Damaged as error:
        damage = str(error)
    if reader is None:
        raise RecordingError(
            f"{name} is not a recording: {damage or 'it is empty'}", "give a file that --record wrote"
        ) from None
    recording = reader.recording
    if damage is not None:
        recording.notice = f"{name}, line {good + 1}: {damage}; shown up to there"
    elif not (recording.events and isinstance(recording.events[-1], Finished)):
        recording.notice = f"{name} ends before the run did; shown up to there"
    if reader.newer:
        newer = f"{name} is of version {reader.newer}, and this dgemma reads version {VERSION}"
        recording.notice = newer if recording.notice is None else f"{newer}; {recording.notice}"
    return recording


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Whole lines, and a last one that has no end; unpacked where the file is packed. Raises Damaged."""
    rest = b""
    for data in _unpacked(file):
        *whole, rest = (rest + data).split(b"\n")
        yield from whole
        if len(rest) > LONGEST_LINE:
            raise Damaged(f"it is longer than {LONGEST_LINE >> 20} MiB")
    if rest:
        yield rest


def _unpacked(file: BinaryIO) -> Iterator[bytes]:
    unzip = None
    total = 0
    while data := file.read(_READ):
        if not total and unzip is None and data.startswith(b"\x1f\x8b"):
            unzip = zlib.decompressobj(_GZIP)
        while data:
            try:
                part = data if unzip is None else unzip.decompress(data, _READ)
            except zlib.error:
                raise Damaged("the compressed data are damaged") from None
            total += len(part)
            if total > MOST_BYTES:
                raise Damaged(f"the recording is longer than {MOST_BYTES >> 20} MiB")
            yield part
            if unzip is None or unzip.eof:
                break
            data = unzip.unconsumed_tail
        if unzip is not None and unzip.eof:
            return


def _parsed(line: bytes) -> "_Fields":
    try:
        values = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        raise Damaged("it is not JSON, or cut in the middle") from None
    if not isinstance(values, dict):
        raise Damaged("it is not an object")
    return _Fields(values)


def _no_constant(name: str) -> None:
    raise ValueError(name)


@dataclass(frozen=True, slots=True)
class _Fields:
    """A line's values, each checked as it is taken. Raises Damaged."""

    values: dict[str, Any]

    def whole(self, name: str, most: int = LARGEST_TOKEN, *, least: int = 0) -> int:
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise Damaged(f"`{name}` is not a whole number from {least} to {most}")
        return value

    def number(self, name: str) -> float:
        value = self.values.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e18:
            raise Damaged(f"`{name}` is not a number from 0")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.values.get(name)
        if not isinstance(value, bool):
            raise Damaged(f"`{name}` is not true or false")
        return value

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str):
            raise Damaged(f"`{name}` is not text")
        return value

    def list(self, name: str, length: int | None = None) -> list[Any]:
        value = self.values.get(name)
        if not isinstance(value, list) or (length is not None and len(value) != length):
            raise Damaged(f"`{name}` is not a list" + (f" of {length}" if length is not None else ""))
        return value

    def ids(self, name: str, length: int | None = None) -> tuple[int, ...]:
        value = self.list(name, length)
        if not all(type(each) is int and 0 <= each <= LARGEST_TOKEN for each in value):
            raise Damaged(f"`{name}` holds something that is no token id")
        return tuple(value)


class _Reader:
    """The run so far; `take` goes on with a line, or raises Damaged and leaves it as it was."""

    def __init__(self, fields: _Fields) -> None:
        if fields.values.get("event") != "recording" or fields.values.get("format") != FORMAT:
            raise Damaged("its first line is not a recording's")
        version = fields.whole("version", least=1)
        self.newer = version if version > VERSION else None
        header = Header(
            model=fields.text("model"),
            revision=None if fields.values.get("revision") is None else fields.text("revision"),
            demo=fields.flag("demo"),
            seed=fields.whole("seed", (1 << 64) - 1),
            canvas_length=fields.whole("canvas_length", MOST_POSITIONS, least=1),
            steps=fields.whole("steps", least=1),
            max_tokens=fields.whole("max_tokens", least=1),
            ends=fields.ids("ends"),
            prompt=fields.ids("prompt") if "prompt" in fields.values else None,
            settings=fields.values["settings"] if isinstance(fields.values.get("settings"), dict) else {},
            dgemma=fields.text("dgemma"),
        )
        self.recording = Recording(header)
        self._before: StepDone | None = None  # the latest step of the canvas at work
        self._canvas = 0  # the one at work
        self._same: dict[Any, Any] = {}  # one object for equal numbers: they come back in every step
        self._name(fields, header.ends, header.prompt or ())

    def take(self, fields: _Fields) -> None:
        if self.recording.events and isinstance(self.recording.events[-1], Finished):
            raise Damaged("something follows the end of the run")
        kind = fields.values.get("event")
        makers: dict[object, Callable[[_Fields], Event]] = {
            "prefilled": self._prefilled,
            "step_done": self._step,
            "canvas_committed": self._committed,
            "finished": self._finished,
        }
        if not isinstance(kind, str) or kind not in makers:
            raise Damaged("it is no event of a run")
        if (kind == "prefilled") != (not self.recording.events):
            raise Damaged("the run does not begin with `prefilled`, or has it twice")
        event = makers[kind](fields)
        pieces = tuple(map(_piece, fields.list("pieces"))) if isinstance(event, CanvasCommitted | Finished) else ()
        seconds = fields.number("seconds")
        self._name(fields, *_ids(event, self._before))
        self.recording.events.append(event)
        self.recording.seconds.append(seconds)
        self.recording.pieces.append(pieces)
        if isinstance(event, StepDone):
            self._before = event
        elif isinstance(event, CanvasCommitted):
            self._before, self._canvas = None, self._canvas + 1

    def _prefilled(self, fields: _Fields) -> Prefilled:
        return Prefilled(fields.whole("tokens"), fields.whole("reused"), fields.whole("joining"))

    def _step(self, fields: _Fields) -> StepDone:
        L, before = self.recording.header.canvas_length, self._before
        self._of_this_canvas(fields)
        if fields.whole("step") != (0 if before is None else before.step + 1):
            raise Damaged("a step is missing")
        if before is not None and before.done:
            raise Damaged("a step follows the last one of its canvas")
        accepted = fields.text("accepted")
        if len(accepted) != L or not set(accepted) <= {"0", "1"}:
            raise Damaged(f"`accepted` is not {L} of 0 and 1")
        entropy = fields.list("entropy", L)
        if not all(type(each) in (int, float) and math.isfinite(each) and each >= 0 for each in entropy):
            raise Damaged("`entropy` holds something that is no entropy")
        return StepDone(
            canvas=self._canvas,
            step=fields.whole("step"),
            steps=fields.whole("steps", least=1),
            temperature=fields.number("temperature"),
            fed=self._shared(fields.ids("fed", L)) if before is None else before.next,
            draft=self._shared(fields.ids("draft", L)),
            accepted=tuple(each == "1" for each in accepted),
            next=self._shared(fields.ids("next", L)),
            entropy=self._shared(tuple(map(float, entropy))),
            done=fields.flag("done"),
        )

    def _committed(self, fields: _Fields) -> CanvasCommitted:
        L = self.recording.header.canvas_length
        self._of_this_canvas(fields)
        if self._before is None or not self._before.done:
            raise Damaged("a canvas is committed before its last step")
        return CanvasCommitted(
            canvas=self._canvas,
            tokens=fields.ids("tokens", L),
            kept=fields.whole("kept", L),
            steps=fields.whole("steps"),
            converged=fields.flag("converged"),
        )

    def _finished(self, fields: _Fields) -> Finished:
        reason = fields.text("reason")
        for known in get_args(FinishReason):
            if reason == known:
                return Finished(known, fields.ids("tokens"), fields.whole("canvases"), fields.whole("steps"))
        raise Damaged("the run ended for a reason that is not known")

    def _of_this_canvas(self, fields: _Fields) -> None:
        if fields.whole("canvas") != self._canvas:
            raise Damaged("a canvas is missing")

    def _shared(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple([self._same.setdefault(each, each) for each in values])

    def _name(self, fields: _Fields, *lists: Sequence[int]) -> None:
        """The texts of tokens that are named for the first time, in their order."""
        words = self.recording.words
        new = dict.fromkeys(token for ids in lists for token in ids if token not in words)
        texts = fields.list("texts", len(new)) if new or "texts" in fields.values else []
        words.update(zip(new, map(_word, texts), strict=True))


def _ids(event: Event, before: StepDone | None) -> tuple[tuple[int, ...], ...]:
    """The tokens that a line names, in the order in which their texts stand in it."""
    match event:
        case Prefilled():
            return ()
        case StepDone():
            return (event.fed if before is None else (), event.draft, event.next)
        case CanvasCommitted() | Finished():
            return (event.tokens,)


def _word(value: object) -> Word:
    if isinstance(value, str):
        return Word(value)
    if isinstance(value, dict) and isinstance(value.get("control"), str):
        return Word(value["control"], control=True)
    raise Damaged("`texts` holds something that is no text")


def _piece(value: object) -> Piece:
    if not isinstance(value, dict):
        raise Damaged("`pieces` holds something that is no piece of text")
    fields = _Fields(value)
    kind = fields.text("kind")
    if kind not in KINDS:
        raise Damaged(f"`kind` is none of {', '.join(KINDS)}")
    return Piece(kind, fields.text("text"))
