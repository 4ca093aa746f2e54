"""Steps whose drafts settle, and an answer's record, for tests of text before its canvas ends."""

from collections.abc import Sequence
from typing import Any

from fake_session import END, LENGTH
from small_tokenizer import small

from dgemma_local.channels import AnswerDecoder
from dgemma_local.events import StepDone
from dgemma_local.states import Seen
from dgemma_local.ui import Record, Start

ENDS = frozenset({END, 9})
SURE, UNSURE = 0.0, 2.0  # nats
WIDEST = 400  # positions: the longest text here


def fresh() -> AnswerDecoder:
    return AnswerDecoder(small())


def ids(text: str) -> list[int]:
    return [*small().encode(text)]


def step(
    draft: Sequence[int], number: int = 0, *, canvas: int = 0, entropy: Sequence[float] = (), done: bool = False
) -> StepDone:
    tokens = tuple(draft)
    nats = (*entropy, *[SURE] * (len(tokens) - len(entropy)))
    samples = (
        tokens if done else tuple(token + 300 + number for token in tokens)
    )  # they say nothing of what has settled
    return StepDone(canvas, number, 48, 0.8, samples, tokens, (True,) * len(tokens), samples, nats, done)


def padded(draft: Sequence[int], number: int, *, canvas: int = 0, sure: int | None = None) -> StepDone:
    """A step of a canvas of WIDEST positions, of which nothing behind the first so many is sure."""
    known = len(draft) if sure is None else sure
    return step(
        [*draft, *[0] * (WIDEST - len(draft))],
        number,
        canvas=canvas,
        entropy=[SURE] * known + [UNSURE] * (WIDEST - known),
    )


def record(**rest: Any) -> Record:
    most = rest.pop("max_tokens", 1000)
    start = Start(model="m", demo=False, seed=1, max_tokens=most, steps=48, canvas_length=LENGTH)
    return Record(start, fresh(), watched=Seen(ENDS), **rest)
