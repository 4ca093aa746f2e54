"""What is said around a canvas: numbers above it, a legend below. Whole items only: what has no room is left out."""

from collections.abc import Iterable, Sequence
from functools import cache

from rich.cells import cell_len

from dgemma_local.states import Seen, State
from dgemma_local.ui.canvas import CONTROL, END, HIDDEN, NEWLINE, Row, Run, rows
from dgemma_local.ui.palette import HEAT, MARKS, SHADES, Chrome, Ink, inked

TWO_ROWS = 8  # the height from which the numbers take two
WORDS, LETTERS = 60, 30  # columns from which, and below which, numbers have names in full, and hardly any
SHORTEST_WINDOW = 0.1  # seconds: a rate over less is noise
SPARKS = "▁▂▃▄▅▆▇█"
_LEAST_SPARKS = 4
_LEAST_SCALE = 0.05  # nats: a canvas that is sure throughout is flat, not jagged
_GAP = " · "
_STATUS, _LEGEND = inked(Chrome.STATUS), inked(Chrome.LEGEND)


def status(seen: Seen, label: str, width: int, height: int) -> list[Row]:
    """One row, or two of them; the first says where the run is, the second what it has changed."""
    if height < TWO_ROWS:
        return [line([*_place(seen, width), *_changes(seen, width), *_beside(seen, label, width)], width, seen)]
    place = line([*_place(seen, width), *_beside(seen, label, width)], width)
    return [place, line(_changes(seen, width), width, seen)]


def line(items: Iterable[str], width: int, spark: Seen | None = None) -> Row:
    """Those that fit, in order, and the mean entropies in what is left."""
    text = ""
    for item in filter(None, items):
        more = text + _GAP * bool(text) + item
        if cell_len(more) <= width:
            text = more
    room = width - cell_len(text) - bool(text)
    if text and spark is not None and len(spark.means) > 1 and room >= _LEAST_SPARKS:
        text += " " + sparkline(spark.means, room)
    return [(text, _STATUS)] if text else []


def _place(seen: Seen, width: int) -> list[str]:
    step, canvas = seen.step, seen.canvas + 1
    if step is None and seen.finished is not None:
        return [
            f"finished: {seen.finished.reason}",
            _count(seen.canvases, "canvas", "canvases"),
            _count(seen.steps, "step"),
        ]
    if step is None:
        return [f"canvas {canvas}" if width >= LETTERS else f"c{canvas}"]
    now, accepted, length = step.step + 1, seen.accepted[-1], len(step.accepted)
    if width >= WORDS:
        return [f"canvas {canvas}", f"step {now} of {step.steps}", f"accepted {accepted} of {length}"]
    name = "canvas " if width >= LETTERS else "c"
    return [f"{name}{canvas}", f"{now}/{step.steps}", f"{accepted}/{length}"]


def _changes(seen: Seen, width: int) -> list[str]:
    """Entropy last: the line of its past goes on from it."""
    words = width >= WORDS
    items = [
        _count(seen.thaws, "thaw"),
        _count(seen.replacements, "replacement") if words else f"{seen.replacements} repl.",
        _count(seen.corrections, "correction") if words else f"{seen.corrections} corr.",
    ]
    if seen.step is not None and seen.step.pinned:
        items.append(f"{len(seen.step.pinned)} pinned")
    if seen.saved:
        items.append(f"{_count(seen.saved, 'step')} saved" if words else f"{seen.saved} saved")
    if seen.means:
        items.append(f"entropy {seen.means[-1]:.3f} nats" if words else f"{seen.means[-1]:.2f} nats")
    return items


def _beside(seen: Seen, label: str, width: int) -> list[str]:
    words = width >= WORDS
    items = []
    if seen.settled and seen.seconds >= SHORTEST_WINDOW:
        rate = seen.settled / seen.seconds
        number = f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}"
        items.append(f"{number} tokens/s" if words else f"{number} tok/s")
    if seen.step is not None:
        items.append(f"temperature {seen.step.temperature:.2f}" if width >= 100 else f"T {seen.step.temperature:.2f}")
    return [*items, _printable(label)]


@cache
def _printable(label: str) -> str:
    row = rows([(label.replace("\n", " "), _STATUS)], max(1, 2 * len(label)))[0]
    return "".join(text for text, _ in row)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def sparkline(values: Sequence[float], width: int) -> str:
    """A bar a value, at most `width` of them: neighbours are joined by their mean. The highest is the scale."""
    top = max(*values, _LEAST_SCALE)
    bars = min(len(values), width)
    means = []
    for i in range(bars):
        part = values[i * len(values) // bars : (i + 1) * len(values) // bars]
        means.append(sum(part) / len(part))
    return "".join(SPARKS[min(len(SPARKS) - 1, int(len(SPARKS) * max(0.0, mean) / top))] for mean in means)


# The legend

_SHORT = {
    State.FROZEN: "frozen",
    State.FRESH: "new",
    State.REPLACED: "replaced",
    State.THAWED: "thawed",
    State.NOISE: "noise",
    State.GUESSED: "guessed",
    State.PAST: "past",
}
_SIGNS = ((CONTROL, "control"), (NEWLINE, "newline"), (END, "end"), (HIDDEN, "invisible"))
_APART: Run = ("  ", _LEGEND)


def legend_height(width: int, height: int) -> int:
    """Rows of the legend: a second one where the first is narrow and the frame is high."""
    return 0 if height < 4 else 2 if height >= 12 and width < WORDS else 1


@cache
def legend(width: int, lines: int, *, grid: bool, pinned: bool = False) -> tuple[Row, ...]:
    """Exactly `lines` rows. grid: it names what stands in the cells of the grid. pinned: there are pinned positions."""
    if not lines:
        return ()
    names = _SHORT | ({State.PINNED: State.PINNED.value} if pinned else {})
    full = _flow(_entries(grid, {state: state.value for state in names}), width, lines)
    return full or _flow(_entries(grid, names), width, lines, drop=True)


def _entries(grid: bool, names: dict[State, str]) -> list[list[Run]]:
    """Each its runs, the most important first."""
    entries: list[list[Run]] = []
    for state, name in names.items():
        mark = f"{MARKS[state]} ".lstrip() if grid else ""
        entries.append([(mark + name, Ink(state))])
    scale: list[Run] = [("sure ", _LEGEND)] + [(HEAT[i], Ink(Chrome.HEAT, i)) for i in reversed(range(SHADES))]
    if grid:
        entries.insert(5, [*scale, (" unsure", _LEGEND)])
    return entries + [[(f"{sign} {name}", _LEGEND)] for sign, name in _SIGNS]


def _flow(entries: Iterable[list[Run]], width: int, lines: int, drop: bool = False) -> tuple[Row, ...]:
    """Entries from row to row; one that has no room is left out, or there is no legend at all."""
    table: list[Row] = [[] for _ in range(lines)]
    at = used = 0
    for entry in entries:
        cells = sum(cell_len(text) for text, _ in entry)
        gap = len(_APART[0]) * bool(used)
        if used + gap + cells > width and at < lines - 1 and cells <= width:
            at, used, gap = at + 1, 0, 0
        if used + gap + cells <= width:
            table[at] += [_APART, *entry] if gap else entry
            used += gap + cells
        elif not drop:
            return ()
    return tuple(table)
