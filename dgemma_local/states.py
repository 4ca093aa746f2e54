"""What each denoising step did to each position, derived from the events alone; views, replays and exports share it.

With A(k) the positions accepted at step k of a canvas:

    frozen         in A(k) and A(k-1)
    newly frozen   in A(k), not in A(k-1)
    replaced       frozen, and holding another token than after step k-1
    thawed         in A(k-1), not in A(k): noise again, the model takes something back
    re-randomised  in neither: noise, as before
    guessed        in neither, at the last step: the draft is committed all the same
    pinned         its token was given, whatever the model would have chosen
    past the end   behind an end token that is settled, whatever else it is: it is cut from the answer

A *correction* is a committed token of the answer that differs from one its position held while it was accepted; a thaw
that comes back to the same token is none. Thaws, replacements and corrections are counted up to the end of the answer;
entropies and the number of accepted positions are the whole canvas's, as the model's own stopping rule has them.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from dgemma_local.events import CanvasCommitted, Event, Finished, Prefilled, Retried, StepDone

Draft = Literal["canvas", "argmax"]


class State(Enum):
    """What a step did to a position; the value is its name for people."""

    FROZEN = "frozen"
    FRESH = "newly frozen"
    REPLACED = "replaced"
    THAWED = "thawed"
    NOISE = "re-randomised"
    GUESSED = "guessed"
    PAST = "past the end"
    PINNED = "pinned"  # held by the run, or picked by a reader, rather than by the model
    TEXT = "text"  # of earlier canvases


HELD = frozenset({State.FROZEN, State.FRESH, State.REPLACED, State.PINNED})  # the position keeps its token

# Of the rules under which a draft has to have stood at all, the fastest by which at most 1 % of the tokens of a settled
# prefix are changed later in every bucket of the demo models' evaluation (tests/measure_settled.py): 0.46 % over all, worst
# 0.95 %. Half a nat comes to 1.5 % in the worst; more steps change as many and come later. Neither number knows the canvas's
# length: with the real model's 256 positions and some 16 steps the second step is an eighth of the way, and 0.3 nats are
# one token at some nine tenths, whatever the vocabulary.
SETTLED_STEPS = 2
SETTLED_BOUND = 0.3


def states(step: StepDone, before: StepDone | None, ends: Set[int]) -> tuple[State, ...]:
    """One a position. before: the previous step of the same canvas; None at its first."""
    found = []
    past = False
    for i, now in enumerate(step.accepted):
        was = before is not None and before.accepted[i]
        if past:
            state = State.PAST
        elif i in step.pinned:
            state = State.PINNED
        elif now and was:
            assert before is not None
            state = State.FROZEN if step.next[i] == before.next[i] else State.REPLACED
        elif now:
            state = State.FRESH
        elif was:
            state = State.THAWED
        else:
            state = State.GUESSED if step.done else State.NOISE
        past = past or (step.next[i] in ends and (now or step.done))
        found.append(state)
    return tuple(found)


def shown(step: StepDone, draft: Draft) -> tuple[int, ...]:
    """The token to draw at each position: `next` where it is accepted or the canvas is done; elsewhere the random token
    that the next step reads ("canvas"), or the model's best guess ("argmax")."""
    if draft == "canvas" or step.done:
        return step.next
    return tuple(map(_chosen, step.accepted, step.next, step.draft))


def _chosen(accepted: bool, token: int, guess: int) -> int:
    return token if accepted else guess


@dataclass(frozen=True, slots=True)
class Seen:
    """What has been seen after some events of one answer; `see` goes on from here."""

    ends: Set[int]  # tokens that end an answer
    canvas: int = 0  # the one at work
    step: StepDone | None = None  # its latest
    states: tuple[State, ...] = ()  # of that step
    held: tuple[tuple[int, ...], ...] = ()  # what each position of this canvas held while accepted, in order, each once
    same: tuple[int, ...] = ()  # how many steps in a row, up to that one, each position's draft has been what it is
    trail: tuple[tuple[float, ...], ...] = ()  # entropy of every position, after each step of this canvas; nats
    means: tuple[float, ...] = ()  # of those, over the canvas
    accepted: tuple[int, ...] = ()  # positions, after each step of this canvas
    thaws: int = 0  # of all canvases
    replacements: int = 0  # of all canvases
    corrected: int = 0  # of committed canvases
    tokens: int = 0  # of the answer, committed
    steps: int = 0  # of all canvases
    canvases: int = 0  # committed
    saved: int = 0  # steps that committed canvases did not need
    seconds: float = 0.0  # of all events
    finished: Finished | None = None

    @property
    def corrections(self) -> int:
        """Of all canvases; of the one at work as if it were committed as it stands, where it is accepted."""
        if self.step is None:
            return self.corrected
        return self.corrected + sum(
            state in HELD and _otherwise(held, token)
            for state, held, token in zip(self.states, self.held, self.step.next, strict=True)
        )

    @property
    def settled(self) -> int:
        """Tokens of the answer: those committed, and the accepted ones of the canvas at work."""
        return self.tokens + sum(state in HELD for state in self.states)


def see(seen: Seen, event: Event, seconds: float = 0.0) -> Seen:
    """What is known after one more event, which took so many seconds."""
    seconds = seen.seconds + seconds
    match event:
        case Prefilled():
            return replace(seen, seconds=seconds)
        case StepDone():
            return _stepped(seen, event, seconds)
        case Retried():  # what its steps did was seen, and what they left is void
            return replace(
                seen, step=None, states=(), held=(), same=(), trail=(), means=(), accepted=(), seconds=seconds
            )
        case CanvasCommitted():
            held = seen.held or ((),) * len(event.tokens)
            pairs = zip(held[: event.kept], event.tokens[: event.kept], strict=True)
            most = event.steps if seen.step is None else seen.step.steps
            return Seen(
                ends=seen.ends,
                canvas=event.canvas + 1,
                thaws=seen.thaws,
                replacements=seen.replacements,
                corrected=seen.corrected + sum(_otherwise(*pair) for pair in pairs),
                tokens=seen.tokens + event.kept,
                steps=seen.steps,
                canvases=seen.canvases + 1,
                saved=seen.saved + most - event.steps,
                seconds=seconds,
            )
        case Finished():
            return replace(seen, finished=event, seconds=seconds)


def _stepped(seen: Seen, step: StepDone, seconds: float) -> Seen:
    found = states(step, seen.step, seen.ends)  # a commit has left no step behind
    return replace(
        seen,
        canvas=step.canvas,
        step=step,
        states=found,
        held=tuple(map(_held, seen.held or ((),) * len(step.next), step.accepted, step.next)),
        same=_same(seen, step),
        trail=(*seen.trail, step.entropy),
        means=(*seen.means, sum(step.entropy) / max(1, len(step.entropy))),
        accepted=(*seen.accepted, sum(step.accepted)),
        thaws=seen.thaws + found.count(State.THAWED),
        replacements=seen.replacements + found.count(State.REPLACED),
        steps=seen.steps + 1,
        seconds=seconds,
    )


def _same(seen: Seen, step: StepDone) -> tuple[int, ...]:
    if seen.step is None:
        return (1,) * len(step.draft)
    return tuple(
        run + 1 if now == was else 1 for run, now, was in zip(seen.same, step.draft, seen.step.draft, strict=True)
    )


def settled(seen: Seen, steps: int = SETTLED_STEPS, bound: float = SETTLED_BOUND) -> int:
    """Of the canvas at work, how many tokens from the left can be read before it is committed: the settled prefix.

    A position is in it when its draft has been the same for `steps` steps and its entropy is below `bound`, in nats, and
    so it is with all before it, none of which ends the answer. Nothing holds the model to it: a step may take any of it
    back.
    """
    if seen.step is None:
        return 0
    count = 0
    for run, entropy, token in zip(seen.same, seen.step.entropy, seen.step.draft, strict=True):
        if run < steps or not entropy < bound or token in seen.ends:
            break
        count += 1
    return count


def _held(held: tuple[int, ...], accepted: bool, token: int) -> tuple[int, ...]:
    return (*held, token) if accepted and token not in held else held


def _otherwise(held: tuple[int, ...], token: int) -> bool:
    return any(each != token for each in held)


@dataclass(frozen=True, slots=True)
class Moment:
    """A position after one step."""

    step: int
    state: State
    token: int  # what the next step reads there
    draft: int  # the model's best guess
    entropy: float  # nats


def history(steps: Sequence[StepDone], position: int, ends: Set[int]) -> tuple[Moment, ...]:
    """What became of one position at each step of one canvas."""
    return tuple(
        Moment(
            step.step,
            states(step, steps[i - 1] if i else None, ends)[position],
            step.next[position],
            step.draft[position],
            step.entropy[position],
        )
        for i, step in enumerate(steps)
    )


def summary(seen: Seen) -> str:
    """One line of what was seen, for the end of a run."""
    took = f"{_count(seen.canvases, 'canvas', 'canvases')} in {_count(seen.steps, 'step')}"
    if seen.saved:
        took += f" ({seen.saved} saved)"
    changed = f"{_count(seen.thaws, 'thaw')}, {_count(seen.replacements, 'replacement')}"
    return f"{took} · {changed}, {_count(seen.corrections, 'correction')}"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def follow(events: Iterable[tuple[Event, float]], ends: Set[int]) -> Iterator[Seen]:
    """What is known after each event, given with its seconds."""
    seen = Seen(ends)
    for event, seconds in events:
        seen = see(seen, event, seconds)
        yield seen
