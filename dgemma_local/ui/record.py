"""What one run comes to, event by event: text by kind, counts and seconds. Notices, statistics and exit codes follow."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dgemma_local.errors import EmptyAnswer
from dgemma_local.events import CanvasCommitted, Event, Finished, Prefilled, StepDone
from dgemma_local.recording import Recorder
from dgemma_local.states import Seen, see

Timed = tuple[Event, float]  # an event and the seconds it took


class Piece(Protocol):
    """Some text of one kind: answer, thought or tool_call."""

    @property
    def kind(self) -> str: ...
    @property
    def text(self) -> str: ...


class Reader(Protocol):
    """`channels.AnswerDecoder`, of which a front end knows no more than this."""

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
    canvases: list[CanvasCommitted] = field(default_factory=list)
    steps: int = 0
    step_seconds: float = 0.0
    prefill_seconds: float = 0.0
    finished: Finished | None = None
    _tokens: list[int] = field(default_factory=list)
    _read: int = 0  # of those, handed to the reader

    def take(self, event: Event, seconds: float) -> Sequence[Piece]:
        """The pieces of text that this event makes final, in order."""
        pieces: Sequence[Piece] = ()
        match event:
            case Prefilled():
                self.prompt, self.reused, self.prefill_seconds = event.tokens, event.reused, seconds
                self.joining = event.joining
            case StepDone():
                self.steps += 1
                self.step_seconds += seconds
            case CanvasCommitted():
                self.canvases.append(event)
                self._tokens += event.tokens[: event.kept]
                pieces = self._feed(len(self._tokens) - self.withheld)
            case Finished():
                self.finished = event
                self._tokens = list(event.tokens)
                pieces = [*self._feed(len(self._tokens)), *self.reader.close()]
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
    def interrupted(self) -> bool:
        return self.finished is not None and self.finished.reason == "interrupted"

    def require_answer(self) -> None:
        """Raises EmptyAnswer when nothing, or only blank space, is for the reader of stdout."""
        if self.finished is None or self.text["answer"].strip():
            return
        if self.finished.reason == "stop":
            raise EmptyAnswer("the answer began with a stop string, and nothing is left of it", "give another --stop")
        if self.text["tool_call"]:
            raise EmptyAnswer("the model called a tool instead of answering", "ask for an answer in words")
        if self.text["thought"]:
            fix = "leave --think out" if self.thinking else "give another --seed"
            if self.finished.reason == "budget":
                fix = f"raise --max-tokens, or {fix}"
            raise EmptyAnswer(f"all {len(self.finished.tokens)} tokens went into the thought, none into an answer", fix)
        raise EmptyAnswer(
            "the model ended its turn without an answer", "ask for a whole sentence, or give another --seed"
        )

    def notices(self) -> list[str]:
        """What a reader should know of how it ended, a line each."""
        most = f"{self.start.steps} step{'' if self.start.steps == 1 else 's'}"
        lines = [f"canvas {c.canvas + 1} did not converge in {most}" for c in self.canvases if not c.converged]
        match self.finished.reason if self.finished else "interrupted":
            case "budget":
                lines.append(f"stopped at --max-tokens {self.start.max_tokens}")
            case "context":
                lines.append("stopped: the context has no room for another canvas")
            case "interrupted":
                lines.append("interrupted")
            case "end" | "stop":
                pass
        return lines

    def summary(self, wall: float) -> list[str]:
        """The statistics, a line each. wall: seconds from the prompt to the end, drawing included."""
        tokens = len(self.finished.tokens) if self.finished else len(self._tokens)
        taken = [c.steps for c in self.canvases]
        lines = [
            f"prompt    {self.prompt} tokens, {self.reused} of them reused, {1000 * self.prefill_seconds:.0f} ms"
            + (f" without the {self.joining} read with the first step" if self.joining else ""),
            f"canvases  {len(taken)} of {self.start.canvas_length} tokens; one costs its steps, however little it holds",
            f"steps     {self.steps}",
        ]
        if taken:
            lines[-1] += f": {', '.join(map(str, taken))} a canvas, at most {self.start.steps}"
        if self.steps:
            lines[-1] += f"; {1000 * self.step_seconds / self.steps:.1f} ms and {tokens / self.steps:.1f} tokens a step"
        lines.append(f"context   {self.prompt + tokens} tokens at the end")
        lines.append(
            f"wall      {wall:.2f} s for {tokens} tokens" + (f": {tokens / wall:.1f} tokens/s" if wall > 1e-3 else "")
        )
        return lines
