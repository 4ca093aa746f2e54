"""A recording, up to where it can be trusted. Nothing in a file is believed: every value is checked before it is used."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from sys import getsizeof
from typing import BinaryIO, TypeVar, get_args

from dgemma_local.errors import RecordingError
from dgemma_local.events import (
    CanvasCommitted,
    Event,
    Finished,
    FinishReason,
    Prefilled,
    Retried,
    RetryReason,
    StepDone,
)
from dgemma_local.recording.fields import Fields
from dgemma_local.recording.form import FORMAT, VERSION, Header, Piece, Word
from dgemma_local.recording.lines import Damaged, lines, opened, parsed

MOST_POSITIONS = 65_536  # of a canvas
MOST_LINES = 1 << 18  # a context of 262,144 tokens in canvases of 64, with 48 steps each, takes 200,000
MOST_HELD = 640 << 20  # bytes of memory; the longest run, 1,024 canvases of 48 steps and 256 positions, takes 480 MB
# What is held beside the texts themselves (CPython 3.11; a test measures it): a position of a step has a pointer in each
# of four tuples, a word its object, its token and its place in the dictionary.
_POSITION, _STEP, _WORD, _PIECE, _TOKEN = 32, 600, 150, 70, 8  # bytes

Value = TypeVar("Value")


@dataclass(slots=True)
class Recording:
    """One run. `events`, `seconds` and `pieces` have an entry an event. No text in it holds half a character."""

    header: Header
    events: list[Event] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    pieces: list[tuple[Piece, ...]] = field(default_factory=list)  # text that the event made final
    words: dict[int, Word] = field(default_factory=dict)
    notice: str | None = None  # why it ends here, if it is not whole: one line

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


def open_recording(path: Path) -> Recording:
    """What can be read of the file, with `notice` where it is damaged, cut, or of a newer version.

    A pipe is read as a file is; one that nobody writes to is empty. Raises RecordingError where there is no file, or it
    is not a recording at all.
    """
    try:
        file = opened(path)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise RecordingError(f"{_name(path)} cannot be read: {reason}", "give a file that --record wrote") from None
    with file:
        return read(file, str(path))


def read(file: BinaryIO, name: str) -> Recording:
    """As `open_recording`, of an open file; `name` is for the notice."""
    name = _name(name)
    reader: _Reader | None = None
    good = 0  # lines
    damage: str | None = None
    try:
        for line, whole in lines(file):
            if good == MOST_LINES:
                raise Damaged(f"the recording has more than {MOST_LINES:,} lines")
            fields = Fields(parsed(line, whole=whole))
            if reader is None:
                reader = _Reader(fields)
            else:
                reader.take(fields)
            good += 1
    except Damaged as error:
        damage = str(error)
    if reader is None:
        what = f"its first line: {damage}" if damage else "it is empty"
        raise RecordingError(f"{name} is not a recording: {what}", "give a file that --record wrote")
    reader.recording.notice = _notice(reader, name, good, damage)
    return reader.recording


def _notice(reader: "_Reader", name: str, good: int, damage: str | None) -> str | None:
    """Why the recording is not whole, or may not be."""
    found = []
    if reader.newer is not None:
        found.append(f"it is of version {reader.newer}, and this dgemma reads version {VERSION}")
    if damage is not None:
        found.append(f"line {good + 1}: {damage}; shown up to there")
    elif not reader.finished:
        found.append("it ends before the run did; shown up to there")
    return f"{name}: {'; '.join(found)}" if found else None


def _name(path: object) -> str:
    """A file's name on one line that a terminal does not obey."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in str(path))


class _Reader:
    """The run so far; `take` goes on with a line, or raises Damaged and leaves it as it was."""

    def __init__(self, fields: Fields) -> None:
        if fields.values.get("event") != "recording" or fields.values.get("format") != FORMAT:
            raise Damaged("it is not the head of a recording")
        version = fields.whole("version", least=1)
        self.newer = version if version > VERSION else None
        try:
            header = _header(fields)
        except Damaged as error:
            if self.newer is None:
                raise
            raise Damaged(f"it is of version {version}, and this dgemma reads version {VERSION}: {error}") from None
        self.recording = Recording(header)
        self._before: StepDone | None = None  # the latest step of the canvas at work
        self._canvas = 0  # the one at work
        self._room = MOST_HELD
        self._tokens: dict[int, int] = {}  # one object for equal numbers: they come back in every step
        self._entropies = {0.0: 0.0}  # which -0.0 is found as, too
        self._take_room(_TOKEN * len((*header.ends, *(header.prompt or ()))))
        self._learn(fields, header.ends, header.prompt or ())

    @property
    def finished(self) -> bool:
        return bool(self.recording.events) and isinstance(self.recording.events[-1], Finished)

    def take(self, fields: Fields) -> None:
        if self.finished:
            raise Damaged("something follows the end of the run")
        makers: dict[object, Callable[[Fields], Event]] = {
            "prefilled": self._prefilled,
            "step_done": self._step,
            "retried": self._retried,
            "canvas_committed": self._committed,
            "finished": self._finished,
        }
        make = makers.get(fields.text("event"))
        if make is None:
            if self.newer is not None:
                return  # a kind of line that came later
            raise Damaged("it is no event of a run")
        event = make(fields)
        pieces = fields.pieces("pieces") if isinstance(event, CanvasCommitted | Finished) else ()
        seconds = fields.number("seconds")
        self._take_room(_weight(event) + sum(_PIECE + getsizeof(piece.text) for piece in pieces))
        self._learn(fields, *_ids(event))
        self.recording.events.append(event)
        self.recording.seconds.append(seconds)
        self.recording.pieces.append(pieces)
        if isinstance(event, StepDone):
            self._before = event
        elif isinstance(event, Retried):
            self._before = None
        elif isinstance(event, CanvasCommitted):
            self._before, self._canvas = None, self._canvas + 1

    def _prefilled(self, fields: Fields) -> Prefilled:
        if self.recording.events:
            raise Damaged("the prompt is read in the middle of the run")
        return Prefilled(fields.whole("tokens"), fields.whole("reused"), fields.whole("joining"))

    def _step(self, fields: Fields) -> StepDone:
        L, before = self.recording.header.canvas_length, self._before
        self._of_this_canvas(fields)
        if before is not None and before.done:
            raise Damaged("a step follows the last one of its canvas")
        steps = fields.whole("steps", least=1)
        step = fields.whole("step", steps - 1)
        if step != (0 if before is None else before.step + 1):
            raise Damaged("a step is missing")
        return StepDone(
            canvas=self._canvas,
            step=step,
            steps=steps,
            temperature=fields.number("temperature"),
            fed=_shared(self._tokens, fields.ids("fed", L)) if before is None else before.next,
            draft=_shared(self._tokens, fields.ids("draft", L)),
            accepted=fields.marks("accepted", L),
            next=_shared(self._tokens, fields.ids("next", L)),
            entropy=_shared(self._entropies, fields.entropies("entropy", L)),
            done=fields.flag("done"),
            pinned=fields.positions("pinned", L) if "pinned" in fields.values else (),
        )

    def _retried(self, fields: Fields) -> Retried:
        before = self._before
        self._of_this_canvas(fields)
        if before is None or not before.done or fields.whole("steps") != before.step + 1:
            raise Damaged("a canvas begins anew before its last step")
        reason = fields.text("reason")
        for known in get_args(RetryReason):
            if reason == known:
                return Retried(self._canvas, known, before.step + 1)
        raise Damaged("a canvas begins anew for a reason that is not known")

    def _committed(self, fields: Fields) -> CanvasCommitted:
        L, before = self.recording.header.canvas_length, self._before
        self._of_this_canvas(fields)
        if before is None or not before.done:
            raise Damaged("a canvas is committed before its last step")
        tokens = tuple(fields.ids("tokens", L))
        if tokens != before.next or fields.whole("steps") != before.step + 1:
            raise Damaged("what is committed is not what the last step left")
        return CanvasCommitted(
            canvas=self._canvas,
            tokens=before.next,
            kept=fields.whole("kept", L),
            steps=before.step + 1,
            converged=fields.flag("converged"),
        )

    def _finished(self, fields: Fields) -> Finished:
        reason = fields.text("reason")
        for known in get_args(FinishReason):
            if reason == known:
                return Finished(known, tuple(fields.ids("tokens")), fields.whole("canvases"), fields.whole("steps"))
        raise Damaged("the run ended for a reason that is not known")

    def _of_this_canvas(self, fields: Fields) -> None:
        if fields.whole("canvas") != self._canvas:
            raise Damaged("a canvas is missing")

    def _learn(self, fields: Fields, *lists: Sequence[int]) -> None:
        """The texts of tokens that are named for the first time, in their order."""
        words = self.recording.words
        new = dict.fromkeys(token for ids in lists for token in ids if token not in words)
        if not new and "texts" not in fields.values:
            return
        found = fields.words("texts", len(new))
        self._take_room(_WORD * len(found) + sum(getsizeof(word.text) for word in found))
        words.update(zip(new, found, strict=True))

    def _take_room(self, size: int) -> None:
        """`size` bytes of what a recording may hold."""
        if size > self._room:
            raise Damaged(f"the recording takes more than {MOST_HELD >> 20} MiB of memory")
        self._room -= size


def _header(fields: Fields) -> Header:
    return Header(
        model=fields.text("model"),
        revision=None if fields.values.get("revision") is None else fields.text("revision"),
        demo=fields.flag("demo"),
        seed=fields.whole("seed", (1 << 64) - 1),
        canvas_length=fields.whole("canvas_length", MOST_POSITIONS, least=1),
        steps=fields.whole("steps", least=1),
        max_tokens=fields.whole("max_tokens", least=1),
        ends=tuple(fields.ids("ends")),
        prompt=tuple(fields.ids("prompt")) if "prompt" in fields.values else None,
        settings=fields.plain("settings"),
        dgemma=fields.text("dgemma"),
    )


def _ids(event: Event) -> tuple[Sequence[int], ...]:
    """The tokens that a line names, in the order in which their texts stand in it."""
    match event:
        case Prefilled() | Retried():
            return ()
        case StepDone():
            return (event.fed if event.step == 0 else (), event.draft, event.next)
        case CanvasCommitted() | Finished():
            return (event.tokens,)


def _weight(event: Event) -> int:
    """Bytes of memory it takes, about."""
    match event:
        case StepDone():
            return _STEP + _POSITION * len(event.next)
        case Finished():
            return _STEP + _TOKEN * len(event.tokens)
        case _:
            return _STEP


def _shared(same: dict[Value, Value], values: Sequence[Value]) -> tuple[Value, ...]:
    return tuple(map(same.setdefault, values, values))
