"""What became of one position of a canvas, in words."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dgemma_local.recording import Recording
from dgemma_local.states import HELD, Moment, State, history
from dgemma_local.ui.canvas import NEWLINE, Row, shortened, signs
from dgemma_local.ui.palette import MARKS, Chrome, Ink

WIDEST = 24  # signs of a token's text
LONGEST_NAME = max(len(state.value) for state in State)


@dataclass(frozen=True, slots=True)
class Span:
    """Steps after each other, from 0, at which the same happened to a position."""

    first: Moment
    last: Moment

    @property
    def state(self) -> State:
        return self.first.state


def spans(moments: Sequence[Moment]) -> tuple[Span, ...]:
    """Neighbours of one state and one guess as one; where the position is held, of one token, too."""
    found: list[Span] = []
    for moment in moments:
        if found and _alike(found[-1].last, moment):
            found[-1] = Span(found[-1].first, moment)
        else:
            found.append(Span(moment, moment))
    return tuple(found)


def _alike(a: Moment, b: Moment) -> bool:
    return a.state is b.state and a.draft == b.draft and (a.state not in HELD or a.token == b.token)


def reads(recording: Recording, token: int) -> str:
    """A token's text on one line, in quotes; a control token's name, bare."""
    word = recording.word(token)
    text = "".join(NEWLINE if sign == "\n" else sign for sign, _ in signs(shortened(word.text)))
    text = text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"
    return text if word.control else f"“{text}”"


def told(recording: Recording, span: Span) -> Row:
    """The steps, what was done, the token, the model's guess, how sure it was."""
    first, last = span.first, span.last
    one = first.step == last.step
    steps = f"step {first.step + 1}" if one else f"steps {first.step + 1}-{last.step + 1}"
    entropy = f"{first.entropy:.3f}" + ("" if one else f" to {last.entropy:.3f}")
    token = reads(recording, last.token) if span.state in HELD or one else "noise"
    rest = f" {token:<9} draft {reads(recording, first.draft):<9} entropy {entropy}"
    return [
        (f"{steps:<12}{MARKS[span.state]} ", Ink(Chrome.LEGEND)),
        (span.state.value, Ink(span.state)),
        (" " * (LONGEST_NAME - len(span.state.value)) + rest, Ink(Chrome.LEGEND)),
    ]


def headline(recording: Recording, moments: Sequence[Moment], canvas: int, position: int) -> str:
    """When it was frozen, thawed and replaced, and what it held, in order."""
    name = f"canvas {canvas + 1}, position {position + 1}"
    turns = list(_turns(recording, moments))
    return f"{name}: {', '.join(turns)}" if turns else f"{name}: never frozen"


def _turns(recording: Recording, moments: Sequence[Moment]) -> Iterator[str]:
    held: int | None = None
    for moment in moments:
        token = reads(recording, moment.token)
        match moment.state:
            case State.FRESH:
                again = "" if held is None else "again " if held == moment.token else "anew "
                yield f"frozen {again}at step {moment.step + 1} as {token}"
            case State.REPLACED:
                yield f"replaced at step {moment.step + 1} by {token}"
            case State.THAWED:
                yield f"thawed at step {moment.step + 1}"
            case State.GUESSED:
                yield f"committed as {token}, never sure" if held is None else f"committed as {token}"
            case _:
                pass
        if moment.state in HELD:
            held = moment.token


def lines(recording: Recording, moments: Sequence[Moment], canvas: int, position: int) -> tuple[str, ...]:
    """The headline, and a line a span."""
    rows = (told(recording, span) for span in spans(moments))
    return (headline(recording, moments, canvas, position), *("".join(text for text, _ in row) for row in rows))


def tell(recording: Recording, canvas: int, position: int) -> None:
    """The same to stdout; both count from 0."""
    moments = history(recording.canvases[canvas], position, frozenset(recording.header.ends))
    for line in lines(recording, moments, canvas, position):
        sys.stdout.write(f"{line.rstrip()}\n")
