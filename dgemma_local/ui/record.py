"""What one run comes to, event by event: text by kind, counts and seconds. Notices, statistics and exit codes follow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dgemma_local.errors import DgemmaError, EmptyAnswer, ThoughtOnly
from dgemma_local.events import CanvasCommitted, Event, Finished, Prefilled, Retried, StepDone
from dgemma_local.outcomes import Outcome, Verdict, verdict
from dgemma_local.recording import Recorder
from dgemma_local.states import Seen, see
from dgemma_local.ui.figures import Counts, Times, lines

Timed = tuple[Event, float]  # an event and the seconds it took

_UNANSWERED: Mapping[Outcome, type[DgemmaError]] = {Outcome.EMPTY: EmptyAnswer, Outcome.THOUGHT_ONLY: ThoughtOnly}


class Piece(Protocol):
    """Some text of one kind: answer, thought or tool_call."""

    @property
    def kind(self) -> str: ...
    @property
    def text(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Rest:
    """Text of the answer that no whole token holds: what stands before a stop string."""

    text: str
    kind: str = "answer"


class Reader(Protocol):
    """`channels.AnswerDecoder`, of which a front end knows no more than this."""

    @property
    def thought_tokens(self) -> int: ...
    @property
    def answer_tokens(self) -> int: ...
    def feed(self, ids: Sequence[int]) -> Sequence[Piece]: ...
    def close(self) -> Sequence[Piece]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What is known before the first event; the first line of --json."""

    model: str
    demo: bool
    seed: int
    max_tokens: int
    steps: int  # a canvas may take
    canvas_length: int
    settings: Mapping[str, object] = field(default_factory=dict)  # of the sampler and others, in plain values


@dataclass(slots=True)
class Record:
    """Grows with every event of one answer.

    withheld: so many of the last tokens wait for the next canvas, since a stop string that begins in them would take
    them back. A stop string of B bytes reaches at most B - 1 tokens over the edge of a canvas.
    """

    start: Start
    reader: Reader
    withheld: int = 0
    thinking: bool = False  # asked for with --think
    recorder: Recorder | None = None  # gets every event
    watched: Seen | None = None  # what has been seen; None: nobody asks
    text: dict[str, str] = field(default_factory=lambda: {"answer": "", "thought": "", "tool_call": ""})
    prompt: int = 0  # tokens
    reused: int = 0
    joining: int = 0  # tokens of the prompt that were read in one pass with the first step
    retried: list[Retried] = field(default_factory=list)
    canvases: list[CanvasCommitted] = field(default_factory=list)
    steps: int = 0
    times: Times = field(default_factory=Times)
    finished: Finished | None = None
    _tokens: list[int] = field(default_factory=list)
    _read: int = 0  # of those, handed to the reader

    def take(self, event: Event, seconds: float) -> Sequence[Piece]:
        """The pieces of text that this event makes final, in order."""
        pieces: Sequence[Piece] = ()
        self.times.take(event, seconds)
        match event:
            case Prefilled():
                self.prompt, self.reused, self.joining = event.tokens, event.reused, event.joining
            case StepDone():
                self.steps += 1
            case Retried():
                self.retried.append(event)
            case CanvasCommitted():
                self.canvases.append(event)
                self._tokens += event.tokens[: event.kept]
                pieces = self._feed(len(self._tokens) - self.withheld)
            case Finished():
                self.finished = event
                self._tokens = list(event.tokens)
                pieces = [*self._feed(len(self._tokens)), *self.reader.close()]
                if event.rest:
                    pieces.append(Rest(event.rest))
        for piece in pieces:
            self.text[piece.kind] += piece.text
        if self.watched is not None:
            self.watched = see(self.watched, event, seconds)
        if self.recorder is not None:
            self.recorder.take(event, seconds, pieces)
        return pieces

    @property
    def seen(self) -> Seen:
        """Of a record that is watched."""
        assert self.watched is not None, "nobody has said which tokens end an answer"
        return self.watched

    def _feed(self, upto: int) -> Sequence[Piece]:
        if upto <= self._read:
            return ()
        ids, self._read = self._tokens[self._read : upto], upto
        return self.reader.feed(ids)

    @property
    def step_seconds(self) -> float:
        """Of all steps together."""
        return sum(self.times.steps)

    @property
    def interrupted(self) -> bool:
        return self.finished is not None and self.finished.reason == "interrupted"

    @property
    def thought_tokens(self) -> int:
        """Of those that are final, with the markers of the thoughts."""
        return self.reader.thought_tokens

    @property
    def answer_tokens(self) -> int:
        """All others that are final."""
        return self.reader.answer_tokens

    @property
    def verdict(self) -> Verdict:
        """How it ended, once all events are there."""
        return verdict(self)

    def require_answer(self) -> None:
        """Raises EmptyAnswer or ThoughtOnly when nothing, or only blank space, is for the reader of stdout."""
        found = self.verdict
        if found.outcome in _UNANSWERED:
            raise _UNANSWERED[found.outcome](found.what, found.cure)

    def notices(self) -> list[str]:
        """What a reader should know of how it ended, a line each; an answer that is missing is an error, and raised."""
        found = self.verdict
        lines = [f"canvas {retried.canvas + 1} came out empty and was tried once more" for retried in self.retried]
        return lines if found.outcome in _UNANSWERED else [*lines, found.line]

    def summary(self, wall: float) -> list[str]:
        """The statistics, a line each. wall: seconds from the prompt to the end, drawing included."""
        counts = Counts(
            prompt=self.prompt,
            reused=self.reused,
            joining=self.joining,
            length=self.start.canvas_length,
            most=self.start.steps,
            taken=[commit.steps for commit in self.canvases],
            last=self.canvases[-1].kept if self.canvases else 0,
            tokens=len(self.finished.tokens) if self.finished else len(self._tokens),
            thought=self.thought_tokens,
        )
        return lines(counts, self.times, wall, self.start.settings)
