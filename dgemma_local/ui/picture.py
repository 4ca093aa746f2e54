"""A canvas settling, as one SVG file: its frames in turn, and its last one where nothing moves.

Made from the events of a real run; the same events give the same bytes.
"""

from collections.abc import Iterable
from html import escape

from rich.cells import cell_len

from dgemma_local.events import Event, StepDone
from dgemma_local.ui.canvas import Run, State, Vocabulary, rows, states

FRAME_SECONDS = 0.45
HOLD_SECONDS = 3.0  # the last frame
_COLUMN, _LINE, _MARGIN = 9, 21, 18  # px; a monospaced letter of 15 px is 9 wide
_CSS = """\
text{font:15px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;fill:#d7dbe0;white-space:pre}
.frozen{font-weight:bold;fill:#fff}
.fresh{font-weight:bold;fill:#7ee787;text-decoration:underline}
.thawed{fill:#ff7b72;text-decoration:line-through}
.noise,.past{fill:#5f6874}
.status{fill:#8b949e}
g{opacity:0}
g:last-of-type{opacity:1}
"""


def picture(
    events: Iterable[Event], vocabulary: Vocabulary, *, canvas: int = 0, columns: int = 48, frames: int = 16
) -> str:
    """SVG of one canvas's steps, at most `frames` of them, first and last included, `columns` cells wide.

    Raises ValueError when the events hold no step of that canvas.
    """
    steps = [event for event in events if isinstance(event, StepDone) and event.canvas == canvas]
    if not steps:
        raise ValueError(f"there is no step of canvas {canvas}")
    shown = [0] if len(steps) == 1 else sorted({round(i * (len(steps) - 1) / (frames - 1)) for i in range(frames)})
    tables = [_table(steps, i, vocabulary, columns) for i in shown]
    width = 2 * _MARGIN + columns * _COLUMN
    height = 2 * _MARGIN + (2 + max(map(len, tables))) * _LINE
    groups = [
        f'<g class="s{n}">\n{_status(steps[i])}{"".join(map(_row, range(len(table)), table))}</g>\n'
        for n, (i, table) in enumerate(zip(shown, tables, strict=True))
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">\n'
        f"<title>A canvas of {len(steps[0].next)} tokens settling in {len(steps)} denoising steps</title>\n"
        f"<style>\n{_CSS}{_animation(len(shown))}</style>\n"
        f'<rect width="100%" height="100%" rx="8" fill="#0d1117"/>\n{"".join(groups)}</svg>\n'
    )


def _table(steps: list[StepDone], i: int, vocabulary: Vocabulary, columns: int) -> list[list[Run]]:
    kinds = states(steps[i], steps[i - 1].accepted if i else (), vocabulary.ends)
    return rows(zip(map(vocabulary.glyph, steps[i].next), kinds, strict=True), columns)


def _animation(frames: int) -> str:
    """Each frame shows for its part of the cycle. Delays are negative, so that all cycles run from the start."""
    cycle = (frames - 1) * FRAME_SECONDS + HOLD_SECONDS
    short, last = 100 * FRAME_SECONDS / cycle, 100 * HOLD_SECONDS / cycle
    delays = [f".s{n}{{animation-delay:{n * FRAME_SECONDS - cycle:.2f}s}}" for n in range(frames)]
    return (
        f"@keyframes short{{0%{{opacity:1}}{short:.3f}%,100%{{opacity:0}}}}\n"
        f"@keyframes last{{0%{{opacity:1}}{last:.3f}%,100%{{opacity:0}}}}\n"
        "@media (prefers-reduced-motion:no-preference){\n"
        f"g{{animation:short {cycle:.2f}s step-end infinite}}\n"
        f"g:last-of-type{{animation-name:last}}\n{''.join(delays)}\n}}\n"
    )


def _status(step: StepDone) -> str:
    text = f"step {step.step + 1} of at most {step.steps} · {sum(step.accepted)} of {len(step.accepted)} accepted"
    return f'<text class="status" x="{_MARGIN}" y="{_MARGIN + 14}">{escape(text)}</text>\n'


def _row(number: int, row: list[Run]) -> str:
    """Every letter at its own x, so that columns stand whatever the font."""
    parts = []
    column = 0
    for text, state in row:
        places = []
        for sign in text:
            places.append(str(_MARGIN + column * _COLUMN))
            column += cell_len(sign)
        if text.strip():
            x = " ".join(places)
            parts.append(f'<tspan x="{x}" class="{_CLASSES[state]}" xml:space="preserve">{escape(text)}</tspan>')
    return f'<text y="{_MARGIN + (number + 2) * _LINE + 14}">{"".join(parts)}</text>\n' if parts else ""


_CLASSES = {
    State.FROZEN: "frozen",
    State.FRESH: "fresh",
    State.THAWED: "thawed",
    State.NOISE: "noise",
    State.GUESSED: "guessed",
    State.PAST: "past",
    State.TEXT: "text",
}
