"""A recording on the terminal: played with keys, or once and to its end where there are none; elsewhere its answer.

screen(player, width, height)     the live view's frame, what is picked below it, the player's own row: pure
show(player)                      plays, and leaves nothing but the answer
"""

import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from textwrap import wrap

from rich.cells import cell_len

from dgemma_local.recording import Recording
from dgemma_local.states import Seen, State, summary
from dgemma_local.ui.canvas import Row, rows, runs
from dgemma_local.ui.frame import Frame, Sight, frame, marked, usual
from dgemma_local.ui.grid import cells_a_row
from dgemma_local.ui.keys import Keys
from dgemma_local.ui.page import Page
from dgemma_local.ui.paint import Painter
from dgemma_local.ui.palette import Chrome, Ink
from dgemma_local.ui.past import headline, spans, told
from dgemma_local.ui.pause import front, pausable
from dgemma_local.ui.player import HELP, Player, press, tick
from dgemma_local.ui.terminal import Terminal, stderr, unheld

PAST_ROWS = 6  # of a picked position's history, its headline included
LEAST_FRAME = 6  # rows that a history leaves to the canvas; help is read, and closed again
LOOK = 0.25  # seconds after which the size of the terminal is looked at again
GAP = 3  # cells between two keys of the help
SHORTEST_BAR, LONGEST_BAR = 8, 60  # cells
_WORDS = Ink(Chrome.STATUS)


def sight(player: Player) -> Sight:
    """How the player looks at its recording."""
    model = player.tape.recording.header.model
    return Sight(label=model, vocabulary=player.tape.vocabulary, view=player.view, draft=player.draft)


def screen(player: Player, width: int, height: int, top: int = 0) -> Frame:
    """Exactly `height` rows of at most `width` cells. top: that of the screen before this one."""
    if height < 2:
        return Frame([_bar(player, width)][:height], top)
    below = _below(player, width, height - 1)
    seen, tail = _seen(player), player.tape.tail(player.step)
    shot = frame(seen, sight(player), width, height - 1 - len(below), tail=tail, top=top)
    return Frame([*shot.rows, *below, _bar(player, width)], shot.top)


def rows_wanted(player: Player) -> int:
    """Rows of the screen, where the terminal has them."""
    return usual(player.tape.length) + (PAST_ROWS if player.picking else 0) + 1


def places(player: Player, width: int) -> tuple[tuple[int, int], ...]:
    """Row and column of each position, as drawn; of one that takes no room, where the one before it begins."""
    tape = player.tape
    if player.view == "grid":
        cells = cells_a_row(tape.length, width, tape.length)
        return tuple(divmod(i, cells) for i in range(tape.length))
    drawn = runs(tape.seen(player.step), tape.vocabulary, player.draft)
    # each position's ink names it, in place of a shade
    named = [(tape.tail(player.step), Ink(State.TEXT, -1))]
    named += [(text, Ink(ink.kind, i)) for i, (text, ink) in enumerate(drawn)]
    found: dict[int, tuple[int, int]] = {}
    for number, row in enumerate(rows(named, width)):
        column = 0
        for text, ink in row:
            found.setdefault(ink.shade, (number, column))
            column += cell_len(text)
    at = (0, 0)
    return tuple(at := found.get(i, at) for i in range(tape.length))


def _seen(player: Player) -> Seen:
    """What the frame shows: the picked position as one that is pinned."""
    seen = player.tape.seen(player.step)
    if not player.picking:
        return seen
    states = list(seen.states)
    states[player.position] = State.PINNED
    return replace(seen, states=tuple(states))


def _below(player: Player, width: int, height: int) -> list[Row]:
    """The rows between the frame and the bar, at most `height`, cut to the width."""
    if player.help:
        return [rows([(line, _WORDS)], width)[0] for line in _flowed(HELP, width)][:height]
    return _past(player, width, max(0, min(height - LEAST_FRAME, PAST_ROWS))) if player.picking else []


def _flowed(items: Iterable[str], width: int) -> list[str]:
    """As many on a line as there is room for; one that is too long for a line takes several."""
    lines = [""]
    for item in items:
        more = f"{lines[-1]}{' ' * GAP * bool(lines[-1])}{item}"
        if cell_len(more) <= width:
            lines[-1] = more
        else:
            lines += wrap(item, width)
    return lines


def _past(player: Player, width: int, height: int) -> list[Row]:
    """Always `height` rows: a headline, of two rows where it needs them, and what happened around this step."""
    tape, canvas = player.tape, player.canvas
    moments = tape.history(canvas, player.position)
    found = spans(moments)
    step = player.step - tape.firsts[canvas]
    now = next(i for i, span in enumerate(found) if step <= span.last.step)
    head = headline(tape.recording, moments, canvas, player.position)
    lines = rows([(head, _WORDS)], width)[: 2 if height > 3 else 1]
    room = max(0, height - len(lines))
    begin = max(0, min(now - room // 2, len(found) - room))
    for i, span in list(enumerate(found))[begin : begin + room]:
        lines += rows([("> " if i == now else "  ", _WORDS), *told(tape.recording, span)], width)[:1]
    return [*lines, *([] for _ in range(height - len(lines)))][:height]


def _bar(player: Player, width: int) -> Row:
    """The player's own row: what is being typed, what a key came to, or where in the recording this is."""
    tape = player.tape
    if player.asking == "step":
        text = f"go to step, 1 to {len(tape)}: {player.entry}_"
    elif player.asking == "text":
        text = f"find a token: {player.entry}_"
    else:
        where = f"canvas {player.canvas + 1} of {len(tape.canvases)}"
        does = f"playing · {player.speed:g}×" if player.playing else "paused"
        items = [f"{player.step + 1} of {len(tape)}", where, does, "? lists the keys"]
        if player.told:
            items = [items[0], player.told, does]
        text = next((line for n in (4, 3, 2) if cell_len(line := " · ".join(items[:n])) <= width), items[0])
        text = _progress(player, width - cell_len(text)) + text
    return rows([(text, _WORDS)], width)[0]


def _progress(player: Player, width: int) -> str:
    """A cell a stretch of steps, marked where a canvas begins, and a space; empty where there is no room."""
    tape = player.tape
    cells = min(width - 1, LONGEST_BAR)
    if cells < SHORTEST_BAR:
        return ""
    at = [step * (cells - 1) // max(1, player.last) for step in (player.step, *tape.firsts[1:])]
    bar = ["━" if i <= at[0] else "─" for i in range(cells)]
    for cell in at[1:]:
        bar[cell] = "┃" if cell <= at[0] else "│"
    bar[at[0]] = "●"
    return "".join(bar) + " "


def show(player: Player) -> None:
    """Plays where stdout is a terminal, and leaves the answer there; elsewhere writes the answer and no more.

    Raises KeyboardInterrupt after Ctrl-C, once the terminal is as it was.
    """
    terminal, recording = Terminal(sys.stdout), player.tape.recording
    if not terminal.writes:
        if terminal.is_terminal:
            stderr().say("the player needs a terminal that knows UTF-8; going on without")
        answer(recording)
        return
    try:
        if terminal.redraws:
            _play(player, terminal)
        else:
            with unheld(terminal.file, sys.stderr):
                _list(player, terminal)
    finally:
        answer(recording)
        stderr().say(summary(player.tape.end()), style="dim")


def answer(recording: Recording) -> None:
    """The committed answer, alone, to stdout."""
    with Page(sys.stdout, None, clean=True) as page:  # whoever made the file
        for pieces in recording.pieces:
            page.write(pieces)


def _play(player: Player, terminal: Terminal) -> None:
    """Until the reader leaves, or the end where no key can say so."""
    with Keys.open() or nullcontext() as keys:
        while not _over(player, keys):
            # a painter knows one theme
            with (
                Painter(terminal, player.theme) as painter,
                pausable(painter.clear),
                unheld(terminal.file, sys.stderr),
            ):
                player = _act(player, terminal, painter, keys)


def _over(player: Player, keys: Keys | None) -> bool:
    return player.left or (keys is None and not player.playing)


def _act(player: Player, terminal: Terminal, painter: Painter, keys: Keys | None) -> Player:
    """Plays on until it is over, or the theme is another one."""
    theme, top, tall = player.theme, 0, 0
    while player.theme == theme and not _over(player, keys):
        if not front(terminal.file):
            time.sleep(LOOK)
            continue
        began = time.monotonic()
        width, lines = terminal.size
        tall = max(tall, rows_wanted(player))
        shot = screen(player, width, max(1, min(lines - 1, tall)), top)
        top = shot.top
        painter.paint(shot.rows)
        wait = LOOK if player.rest is None else min(LOOK, player.rest)
        latest = time.monotonic() + wait
        key = _waited(keys, wait)
        player = tick(player, min(time.monotonic(), latest) - began)  # later it is where Ctrl-Z came meanwhile
        if key is not None:
            player = press(replace(player, places=places(player, width) if player.picking else ()), key)
    return player


def _waited(keys: Keys | None, seconds: float) -> str | None:
    if keys is not None:
        return keys.read(seconds)
    time.sleep(seconds)
    return None


def _list(player: Player, terminal: Terminal) -> None:
    """Frames one beneath another, for a terminal that cannot move its cursor."""
    tape, top = player.tape, 0
    for step in range(player.step, len(tape)):
        width = max(1, terminal.size.width - 1)  # many break the line behind the last column by themselves
        top = 0 if step in tape.firsts else top
        shot = frame(tape.seen(step), sight(player), width, usual(tape.length), tail=tape.tail(step), top=top)
        top = shot.top
        for line in marked(shot.rows):
            terminal.say(line)
        time.sleep(player.pause / player.speed)
