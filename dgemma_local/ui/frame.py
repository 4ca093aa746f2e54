"""What a moment of a run looks like, as rows of inked text: pure, and always of the height that was asked for.

frame(seen, sight, width, height) -> rows      status, the canvas, a legend
"""

from dataclasses import dataclass
from typing import Literal

from dgemma_local.states import Draft, Seen, State, shown
from dgemma_local.ui.canvas import CONTROL, NEWLINE, Row, Run, Vocabulary, rows
from dgemma_local.ui.palette import Chrome, Ink, shade

View = Literal["text", "grid", "both"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """How a run is looked at."""

    label: str  # of the model
    vocabulary: Vocabulary
    view: View = "text"
    draft: Draft = "canvas"


@dataclass(frozen=True, slots=True)
class Frame:
    """`rows`: as many as asked for. `top`: the first row of the canvas in view."""

    rows: list[Row]
    top: int = 0


_LEGEND = (State.FROZEN, State.FRESH, State.REPLACED, State.THAWED, State.NOISE)


def frame(seen: Seen, sight: Sight, width: int, height: int, *, tail: str = "", top: int = 0) -> Frame:
    """Exactly `height` rows of at most `width` cells.

    tail: earlier text on the line that the canvas goes on with. top: that of the frame before this one.
    """
    legend = height >= 4
    body = _body(seen, sight, width, height - 1 - legend, tail)
    lines: list[Row] = [rows([(_status(seen, sight), Ink(Chrome.STATUS))], width)[0], *body]
    lines += [[] for _ in range(height - legend - len(lines))]
    if legend:
        parts: list[Run] = []
        for state in _LEGEND:
            parts += [(state.value, Ink(state)), ("  ", Ink(Chrome.LEGEND))]
        lines.append(rows([*parts, (f"{CONTROL} control  {NEWLINE} newline", Ink(Chrome.LEGEND))], width)[0])
    return Frame(lines[:height], top)


def _body(seen: Seen, sight: Sight, width: int, height: int, tail: str) -> list[Row]:
    if height <= 0:
        return []
    runs: list[Run] = [(tail, Ink(State.TEXT))]
    if seen.step is not None:
        inks = [
            Ink(state, shade(entropy)) if state is State.NOISE else Ink(state)
            for state, entropy in zip(seen.states, seen.step.entropy, strict=True)
        ]
        runs += zip(map(sight.vocabulary.glyph, shown(seen.step, sight.draft)), inks, strict=True)
    return rows(runs, width)[:height]


def _status(seen: Seen, sight: Sight) -> str:
    step = seen.step
    if step is None:
        return f"canvas {seen.canvas + 1} · {sight.label}"
    return (
        f"canvas {step.canvas + 1} · step {step.step + 1} of {step.steps} · "
        f"accepted {sum(step.accepted)} of {len(step.accepted)} · {sight.label}"
    )
