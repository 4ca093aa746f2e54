"""A run as plain text: each step beneath the one before, a mark under each token that has changed, the answer last."""

from dgemma_local.recording import Recording
from dgemma_local.states import summary
from dgemma_local.ui.canvas import signs
from dgemma_local.ui.export import Options, drawn, outcome
from dgemma_local.ui.frame import marked
from dgemma_local.ui.palette import MARKS
from dgemma_local.ui.status import legend_height
from dgemma_local.ui.terminal import printable

WIDTH = 80
MOST_ROWS = 1000  # a step; 256 tokens that are words take ten


def render(recording: Recording, options: Options) -> str:
    """The whole file. Raises RecordingError where there is no step to draw."""
    width = options.width or WIDTH
    shots = drawn(recording, options, width, options.height or MOST_ROWS)
    header = recording.header
    model = "".join(sign for sign, _cells in signs(header.model) if sign != "\n")
    known = " · ".join(f"{mark} {state.value}" for state, mark in MARKS.items() if mark != " ")
    parts = [f"{model} · seed {header.seed} · {header.canvas_length} tokens a canvas\n{known}\n"]
    for _seen, rows in shots:
        body = "\n".join(marked(rows[: len(rows) - legend_height(width, len(rows))])).rstrip()
        parts.append(f"{'─' * width}\n{body}\n")
    parts.append(f"{'═' * width}\n{summary(outcome(recording))}\n\n{printable(recording.text)}")
    return "\n".join(parts).rstrip("\n") + "\n"
