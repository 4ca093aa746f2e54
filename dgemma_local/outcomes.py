"""How an answer ended: one outcome each, its line for people and its exit code for `run`.

Several may be true of one answer. The one that keeps a reader furthest from what was asked comes first:

    refused         11   the plan of the memory had no room; nothing ran
    numeric          8   NaN or infinity: canvas, step and layer are named, nothing of that step is shown
    interrupted    130   Ctrl-C; what was committed stands. SIGTERM and SIGHUP end in it, too, with 143 and 129
    empty            9   nothing for the reader, no limit has cut it, and an empty first canvas was tried once more
    thought only    16   all of it is thought
    token limit     17   cut at --max-tokens, or where the context has no room for another canvas
    not converged   18   whole, but so many canvases were committed when their steps ran out
    complete         0   an end token or a stop string, all canvases converged

The first two are raised (`DoesNotFit`, `NumericalError`), since no answer ends in them; the others are read off a record.
An end token inside an open thought ends the turn: thought only.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from dgemma_local.errors import (
    INTERRUPTED,
    NOT_CONVERGED,
    TOKEN_LIMIT,
    DoesNotFit,
    EmptyAnswer,
    NumericalError,
    ThoughtOnly,
)
from dgemma_local.events import CanvasCommitted, Finished


class Outcome(Enum):
    """The value is its name in --json."""

    COMPLETE = "complete"
    TOKEN_LIMIT = "token_limit"
    EMPTY = "empty"
    THOUGHT_ONLY = "thought_only"
    NOT_CONVERGED = "not_converged"
    INTERRUPTED = "interrupted"
    NUMERIC = "numeric"
    REFUSED = "refused"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self]


EXIT_CODES: Mapping[Outcome, int] = {
    Outcome.COMPLETE: 0,
    Outcome.NUMERIC: NumericalError.exit_code,
    Outcome.EMPTY: EmptyAnswer.exit_code,
    Outcome.REFUSED: DoesNotFit.exit_code,
    Outcome.THOUGHT_ONLY: ThoughtOnly.exit_code,
    Outcome.TOKEN_LIMIT: TOKEN_LIMIT,
    Outcome.NOT_CONVERGED: NOT_CONVERGED,
    Outcome.INTERRUPTED: INTERRUPTED,
}


class Limits(Protocol):
    """What was asked for."""

    @property
    def max_tokens(self) -> int: ...
    @property
    def steps(self) -> int: ...


class Ended(Protocol):
    """What is asked of a record (`ui.Record`) whose events are all there."""

    @property
    def start(self) -> Limits: ...
    @property
    def finished(self) -> Finished | None: ...
    @property
    def canvases(self) -> Sequence[CanvasCommitted]: ...
    @property
    def text(self) -> Mapping[str, str]: ...
    @property
    def thinking(self) -> bool: ...
    @property
    def thought_tokens(self) -> int: ...


class Verdict(NamedTuple):
    """An outcome, what there is to say of it, and what can be done; the cure is empty where nothing is wrong."""

    outcome: Outcome
    what: str
    cure: str = ""

    @property
    def line(self) -> str:
        return f"{self.what}; {self.cure}" if self.cure else self.what


def outcome(record: Ended) -> tuple[Outcome, str]:
    """How it ended, and one line that says so."""
    found = verdict(record)
    return found.outcome, found.line


def verdict(record: Ended) -> Verdict:
    """How it ended. Without its `Finished` it was stopped."""
    finished = record.finished
    if finished is None or finished.reason == "interrupted":
        return Verdict(Outcome.INTERRUPTED, "interrupted")
    if not record.text["answer"].strip():
        return _without_answer(record, finished)
    late = [commit.canvas + 1 for commit in record.canvases if not commit.converged]
    total = len(record.canvases)
    most = _count(record.start.steps, "step")
    apart = f"{len(late)} of {_count(total, 'canvas', 'canvases')} did not converge in {most}" if late else ""
    if finished.reason in ("budget", "context"):
        return _cut(record, finished, apart)
    if late:
        return Verdict(Outcome.NOT_CONVERGED, f"not converged: {apart}", "raise --steps, or give another --seed")
    return Verdict(
        Outcome.COMPLETE, f"complete: {_count(len(finished.tokens), 'token')} in {_count(total, 'canvas', 'canvases')}"
    )


def _cut(record: Ended, finished: Finished, also: str) -> Verdict:
    """At a limit; `also` is true as well, if it says anything."""
    where, cure = (
        (f"stopped at --max-tokens {record.start.max_tokens}", "raise it for the rest")
        if finished.reason == "budget"
        else ("stopped: the context has no room for another canvas", "plan for a longer one (--context)")
    )
    return Verdict(Outcome.TOKEN_LIMIT, f"{where}, and {also}" if also else where, cure)


def _without_answer(record: Ended, finished: Finished) -> Verdict:
    """Nothing, or only blank space, is for the reader of stdout."""
    empty = Outcome.EMPTY
    if finished.reason == "stop":
        return Verdict(empty, "the answer began with a stop string, and nothing is left of it", "give another --stop")
    if record.text["tool_call"]:
        return Verdict(empty, "the model called a tool instead of answering", "ask for an answer in words")
    if record.text["thought"].strip():
        cure = "leave --think out" if record.thinking else "give another --seed"
        if finished.reason == "budget":
            cure = (
                f"raise --max-tokens, bound the thought (--think-tokens), or {cure}"
                if record.thinking
                else (f"raise --max-tokens, or {cure}")
            )
        what = f"all that came is a thought of {_count(record.thought_tokens, 'token')}, and no answer"
        return Verdict(Outcome.THOUGHT_ONLY, what, cure)
    if finished.reason in ("budget", "context"):
        return _cut(record, finished, "nothing of it is for a reader")
    return Verdict(
        empty, "the model ended its turn without an answer", "ask for a whole sentence, or give another --seed"
    )


def of_error(error: BaseException) -> Outcome | None:
    """The outcome of a run that an error ended; None where it is none of an answer."""
    match error:
        case NumericalError():
            return Outcome.NUMERIC
        case DoesNotFit():
            return Outcome.REFUSED
        case KeyboardInterrupt() | SystemExit():
            return Outcome.INTERRUPTED
        case _:
            return None


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
