"""The canvas on a terminal while it settles.

see(seen, event) -> seen          what the view needs to know, and no more
view(seen, width, height) -> Text always `height` lines: a frame that grows is what flickers
live(events, ...)                 repaints the one, prints above it what is final
"""

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import TracebackType

from rich.live import Live
from rich.text import Text

from dgemma_local.events import CanvasCommitted, Event, Finished, Prefilled, StepDone
from dgemma_local.ui.canvas import CONTROL, NEWLINE, Run, State, Vocabulary, rows, states
from dgemma_local.ui.page import Page
from dgemma_local.ui.record import Record, Timed
from dgemma_local.ui.terminal import Terminal

SLICE = 0.05  # seconds that a sleep may go on after Ctrl-C
FRAMES_PER_SECOND = 20  # at most; drawing one costs a few milliseconds that no step should wait for

# Each differs from the others without colour too.
STYLES = {
    State.FROZEN: "bold",
    State.FRESH: "bold underline green",
    State.THAWED: "strike red",
    State.NOISE: "dim",
    State.GUESSED: "",
    State.PAST: "dim",
    State.TEXT: "",
}
_LEGEND = (State.FROZEN, State.FRESH, State.THAWED, State.NOISE)


@dataclass(frozen=True, slots=True)
class Seen:
    """The canvas at work."""

    label: str  # of the model
    vocabulary: Vocabulary
    step: StepDone | None = None  # the latest of this canvas
    before: tuple[bool, ...] = ()  # accepted at the step before it
    canvas: int = 0
    tail: str = ""  # earlier text on the line that the canvas goes on with


def see(seen: Seen, event: Event) -> Seen:
    """The next state. `tail` is the page's to know."""
    match event:
        case StepDone():
            same = seen.step is not None and seen.step.canvas == event.canvas
            before = seen.step.accepted if same and seen.step is not None else ()
            return replace(seen, step=event, before=before, canvas=event.canvas)
        case CanvasCommitted():
            return replace(seen, step=None, before=(), canvas=event.canvas + 1)
        case Prefilled() | Finished():
            return seen


def view(seen: Seen, width: int, height: int) -> Text:
    """Exactly `height` lines of at most `width` cells: status, the canvas, a legend where there is room for it."""
    lines: list[list[tuple[str, str]]] = [[(text, "dim") for text, _ in rows([(_status(seen), State.NOISE)], width)[0]]]
    legend = height >= 4
    lines += _body(seen, width, height - 1 - legend)
    lines += [[] for _ in range(height - legend - len(lines))]
    if legend:
        parts = [part for state in _LEGEND for part in ((state.value, STYLES[state]), ("  ", ""))]
        lines.append([*parts, (f"{CONTROL} control  {NEWLINE} newline", "dim")])
    lines = lines[:height]
    if not lines[-1]:
        lines[-1] = [(" ", "")]  # rich drops an empty line at the end
    text = Text(no_wrap=True, overflow="crop", end="")
    for i, line in enumerate(lines):
        row = Text.assemble(*line)
        row.truncate(width)
        text.append("\n" if i else "").append_text(row)
    return text


def _body(seen: Seen, width: int, height: int) -> list[list[tuple[str, str]]]:
    """The unfinished line, of which the last third of the room is kept, and the canvas going on in it."""
    if height <= 0:
        return []
    tail: list[Run] = [(seen.tail, State.TEXT)]
    skipped = max(0, len(rows(tail, width)) - max(1, height // 3))
    runs = list(tail)
    if seen.step is not None:
        kinds = states(seen.step, seen.before, seen.vocabulary.ends)
        runs += zip(map(seen.vocabulary.glyph, seen.step.next), kinds, strict=True)
    table = rows(runs, width)[skipped:]
    lines = [[(text, STYLES[state]) for text, state in row] for row in table]
    if len(lines) > height:
        lines[height - 1 :] = [[(f"… {len(lines) - height + 1} more lines", "dim")]]
    return lines


def _status(seen: Seen) -> str:
    step = seen.step
    if step is None:
        return f"canvas {seen.canvas + 1} · {seen.label}"
    length = max(1, len(step.accepted))
    return (
        f"canvas {step.canvas + 1} · step {step.step + 1} of {step.steps} · "
        f"accepted {sum(step.accepted)} of {len(step.accepted)} · {seen.label} · "
        f"entropy {sum(step.entropy) / length:.3f} nats · temperature {step.temperature:.3f}"
    )


class Region:
    """The lines at the bottom of the terminal that are drawn again and again; leaving it leaves no trace of them."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._live: Live | None = None
        self._seen: Seen | None = None
        self._rows = 0  # never fewer than before

    def __enter__(self) -> "Region":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def draw(self, seen: Seen) -> None:
        self._seen = seen
        if self._live is None:
            self._live = Live(
                console=self._terminal,
                get_renderable=self._frame,  # asked at every repaint: the size may have changed
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
                vertical_overflow="crop",
            )
            self._live.start()
        self._live.refresh()

    def clear(self) -> None:
        """Rich remembers a stopped region's height, so the next one is a new one."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _frame(self) -> Text:
        assert self._seen is not None
        width, height = self._terminal.size
        length = 0 if self._seen.step is None else len(self._seen.step.next)
        self._rows = max(self._rows, 2 + max(6, length // 8))
        return view(self._seen, width, max(1, min(height - 1, self._rows)))


def never() -> bool:
    return False


def live(
    events: Iterable[Timed],
    record: Record,
    page: Page,
    terminal: Terminal,
    vocabulary: Vocabulary,
    *,
    copy: Page | None = None,
    slow: float = 0.0,
    hurry: Callable[[], bool] = never,
) -> None:
    """Draws the canvas on `terminal`, and what is final above it on `page`, which writes whole lines to the same one.

    copy: gets the text too, as stdout does when it is not this terminal. slow: seconds that every step is shown at
    least; at 0 frames are left out where steps are faster than FRAMES_PER_SECOND, never the last of a canvas.
    hurry: asked while a step is only being shown; True ends that.
    """
    seen = Seen(record.start.model, vocabulary)
    drawn = 0.0  # when, on the monotonic clock
    with page, copy or nullcontext(), Region(terminal) as region:
        for event, seconds in events:
            pieces = record.take(event, seconds)
            seen = see(seen, event)
            if isinstance(event, StepDone):
                _sleep_until(drawn + slow, hurry)
                if slow or event.done or time.monotonic() - drawn >= 1 / FRAMES_PER_SECOND:
                    region.draw(seen)
                    drawn = time.monotonic()
            elif isinstance(event, CanvasCommitted | Finished):
                if not record.interrupted:
                    _sleep_until(drawn + slow, hurry)
                region.clear()
                if copy is not None:
                    copy.write(pieces)
                page.write(pieces)
                seen = replace(seen, tail=page.tail)
                if isinstance(event, CanvasCommitted):
                    region.draw(seen)  # the unfinished line stays in view


def _sleep_until(moment: float, hurry: Callable[[], bool]) -> None:
    while (wait := moment - time.monotonic()) > 0 and not hurry():
        time.sleep(min(wait, SLICE))
