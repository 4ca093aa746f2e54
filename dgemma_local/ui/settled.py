"""Text before its canvas ends: the settled prefix, read as the answer will be and drawn below what is committed.

Ahead             what the prefix would add to the committed text
provisional(...)  a front end: committed text above, the prefix underlined at the bottom, drawn over as it changes

It is provisional: a step may take any of it back, and then it is drawn anew. Only committed text ever leaves the bottom.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from dgemma_local.events import CanvasCommitted, Event, Finished, StepDone
from dgemma_local.states import Seen, State, settled
from dgemma_local.ui.canvas import Row, Run, rows
from dgemma_local.ui.drawing import FRAMES_PER_SECOND, Drawer
from dgemma_local.ui.frame import Sight
from dgemma_local.ui.keys import hushed
from dgemma_local.ui.page import Page
from dgemma_local.ui.paint import Painter
from dgemma_local.ui.palette import Chrome, Ink, Theme, inked
from dgemma_local.ui.pause import front, pausable
from dgemma_local.ui.record import Piece, Reader, Record, Timed
from dgemma_local.ui.terminal import Terminal

# Whether committed, kind of text -> ink. What is provisional is underlined, thoughts are dim: apart without colour, too.
_INKS: dict[tuple[bool, str], Ink] = {
    (True, "answer"): inked(State.TEXT),
    (True, "thought"): inked(State.NOISE),
    (False, "answer"): inked(State.GUESSED),
    (False, "thought"): inked(State.PAST),
}
_BREAK: Run = ("\n", inked(State.TEXT))  # of a line; other inks show it as a sign
_PART = re.compile(
    r"\r\n|\s|\S{1,16}"
)  # laid out at once, and remembered: short, so that text that grows is known already


@dataclass(frozen=True, slots=True)
class Part:
    """Some text that is not committed."""

    kind: str
    text: str


class Ahead:
    """What the settled prefix would add to the text that `record` has made final.

    A reader of its own is fed the committed tokens and, behind them, the prefix: channels and tool calls are told apart as
    in committed text, and half a character, half a label, a call without its end are held back. It goes on from one prefix
    to the next, and begins anew only when what it was fed is taken back.

    fresh: makes the reader that the answer begins with. stop: strings that end the answer before them.
    """

    def __init__(self, record: Record, fresh: Callable[[], Reader], stop: Sequence[str] = ()) -> None:
        self._record, self._fresh, self._stop = record, fresh, stop
        self._committed: list[int] = []
        self._final = 0  # characters of text that they have made final, of all kinds
        self._begin()

    def _begin(self) -> None:
        self._reader = self._fresh()
        self._fed: list[int] = []
        self._read: list[Piece] = []

    def take(self, event: Event, pieces: Iterable[Piece]) -> None:
        """Another event of the answer, and the text that it made final."""
        if isinstance(event, CanvasCommitted):
            self._committed += event.tokens[: event.kept]
        self._final += sum(len(piece.text) for piece in pieces)

    def parts(self, seen: Seen) -> list[Part]:
        """The text behind what is final, as far as it has settled: within --max-tokens, and before a stop string."""
        self._feed(self._ids(seen))
        found = []
        skipped = self._final
        for piece in self._read:
            text = piece.text[skipped:]
            skipped = max(0, skipped - len(piece.text))
            if text:
                found.append(Part(piece.kind, text))
        return _before(found, self._stop)

    def _ids(self, seen: Seen) -> list[int]:
        """The answer so far; its last tokens wait, as they do when they are committed, where they may begin a stop string."""
        prefix = seen.step.draft[: settled(seen)] if seen.step is not None else ()
        ids = [*self._committed, *prefix][: self._record.start.max_tokens]
        return ids[: max(0, len(ids) - self._record.withheld)]

    def _feed(self, ids: list[int]) -> None:
        if ids[: len(self._fed)] != self._fed:
            self._begin()
        self._read += self._reader.feed(ids[len(self._fed) :])
        self._fed = ids


def _before(parts: list[Part], stop: Sequence[str]) -> list[Part]:
    """What stands before the first of these strings in the answer; none reaches over a thought or a tool call."""
    kept: list[Part] = []
    for kind, run in groupby(parts, lambda part: part.kind):
        if kind != "answer":
            kept += run
            continue
        text = "".join(part.text for part in run)
        starts = [at for at in map(text.find, stop) if at >= 0]
        if shown := text[: min(starts, default=None)]:
            kept.append(Part(kind, shown))
        if starts:
            break
    return kept


class Foot:
    """The rows at the bottom of a terminal: the committed line that is not finished, and the text ahead of it.

    thoughts: whether thoughts are to be seen.
    """

    def __init__(self, terminal: Terminal, *, thoughts: bool) -> None:
        self._terminal = terminal
        self._kinds = ("answer", "thought") if thoughts else ("answer",)
        self._kind = "answer"  # of the committed line
        self._rows = 0

    @property
    def stands(self) -> bool:
        """Whether there are any."""
        return self._rows > 0

    def take(self, pieces: Iterable[Piece]) -> None:
        """More text is committed, and the rows are gone."""
        for piece in pieces:
            if piece.kind in self._kinds:
                self._kind = piece.kind
        self._rows = 0

    def rows(self, tail: str, parts: Iterable[Part]) -> list[Row]:
        """None where there is no text; else never fewer than before, so that nothing jumps, and at most one less than fit.

        tail: the line that is not finished. Of what is too high the last rows are seen.
        """
        runs = self._runs(tail, parts)
        if not (runs or self._rows):
            return []
        width, height = self._terminal.size
        most = max(1, height - 1)
        found = rows(runs, width)
        if len(found) > most:
            above = len(found) - most + 1
            found = [_hidden(above, width), *found[above:]] if most > 1 else found[-1:]
        self._rows = max(min(self._rows, most), len(found))
        return found + [[] for _ in range(self._rows - len(found))]

    def _runs(self, tail: str, parts: Iterable[Part]) -> list[Run]:
        kind = self._kind
        runs = list(_inked(tail, _INKS[True, kind]))
        for part in parts:
            if part.kind not in self._kinds:
                continue
            if part.kind != kind and runs:  # as the page ends a kind: with one newline
                while runs and runs[-1] == _BREAK:
                    runs.pop()
                runs.append(_BREAK)
            kind = part.kind
            runs += _inked(part.text, _INKS[False, kind])
        return runs


def _inked(text: str, ink: Ink) -> Iterator[Run]:
    for part in _PART.findall(text):
        yield _BREAK if part in ("\n", "\r\n") else (part, ink)


def _hidden(above: int, width: int) -> Row:
    said = (f"↑ {above} more rows above", f"↑{above}", "↑")
    return [(next(text for text in said if len(text) <= max(1, width)), inked(Chrome.LEGEND))]


def provisional(
    events: Iterable[Timed],
    record: Record,
    page: Page,
    terminal: Terminal,
    sight: Sight,
    theme: Theme,
    *,
    fresh: Callable[[], Reader],
    stop: Sequence[str] = (),
    thoughts: bool = False,
    fps: float = FRAMES_PER_SECOND,
) -> Drawer:
    """Draws what has settled of the canvas at work at the bottom of `terminal`, and writes what is committed above it.

    As `live.live`, in whose place it can be called: `page` writes whole lines to the terminal that is drawn on; frames are
    left out rather than waited for. Of `sight` it asks which tokens end an answer. `record` is watched from here on.

    fresh: makes a reader like record's own, as it was before the first event. stop: the stop strings. thoughts: whether
    `page` shows thoughts; provisional ones are then dim as well as underlined, else not seen.
    Returns the drawer, which knows how many frames there were.
    """
    if record.watched is None:
        record.watched = Seen(sight.vocabulary.ends)
    ahead = Ahead(record, fresh, stop)
    foot = Foot(terminal, thoughts=thoughts)

    def make() -> Sequence[Row]:
        return foot.rows(page.tail, ahead.parts(record.seen))

    with (
        page,
        hushed(terminal.file),
        Drawer(Painter(terminal, theme), fps) as drawer,
        pausable(lambda: drawer.clear()),
    ):
        for event, seconds in events:
            pieces = record.take(event, seconds)
            ahead.take(event, pieces)
            if isinstance(event, StepDone):
                # the last draft is committed at once
                if not event.done and (foot.stands or settled(record.seen)) and front(terminal.file):
                    drawer.offer(make)
            elif isinstance(event, CanvasCommitted | Finished):
                drawer.clear()
                page.write(pieces)
                foot.take(pieces)
                if isinstance(event, CanvasCommitted) and front(terminal.file):
                    drawer.show(make)  # the unfinished line stays in view
    return drawer
