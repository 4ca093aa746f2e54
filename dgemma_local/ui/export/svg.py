"""A run as one SVG that moves without a script: CSS shows each thing for the steps in which it stands.

What stands in several steps is drawn once: a letter is drawn anew only where it changes. Where nothing moves (a reader who
asks for less motion, a renderer without animation) the last step is there. Every letter has its own x, so that columns
stand whatever the font.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from dgemma_local.recording import Recording
from dgemma_local.states import Seen, State, summary
from dgemma_local.ui.canvas import CONTROL, Row, signs
from dgemma_local.ui.export import Options, drawn, durations, moments, outcome
from dgemma_local.ui.palette import GROUND, Colour, Ink, Look, Theme, look

WIDTH = 80  # cells
MOST_ROWS = 64
MOST_FRAMES = 64
MOST_TOLD = 10_000  # characters of the answer in the description
COLUMN, LINE, LETTER, MARGIN = 9, 22, 15, 18  # px; a monospaced letter of 15 px is 9 wide
BASELINE = 16  # px under the top of its line
EDGE: dict[Theme, Colour] = {"dark": (48, 54, 61), "light": (208, 215, 222)}


class Cell(NamedTuple):
    """A letter where it stands."""

    row: int
    column: int
    columns: int  # it takes
    letter: str  # with the marks that combine with it
    look: Look


class Span(NamedTuple):
    """Frames in which something stands."""

    first: int
    end: int  # the one after the last


def render(recording: Recording, options: Options) -> str:
    """The whole file. Raises RecordingError where there is no step to draw."""
    width = options.width or WIDTH
    shown = drawn(recording, options, width, options.height or MOST_ROWS, MOST_FRAMES)
    seen = [each for each, _rows in shown]
    spans = _spans([_cells(rows, options.theme) for _seen, rows in shown])
    names = {
        each: f"i{n}" for n, each in enumerate(dict.fromkeys(cell.look for cells in spans.values() for cell in cells))
    }
    ticks = [Span(number, len(shown)) for number in range(len(shown))]
    motion, classes = _motion({*spans, *ticks}, [0.0, *accumulate(durations(seen, options.seconds))])
    wide, high = 2 * MARGIN + width * COLUMN, 2 * MARGIN + len(shown[0][1]) * LINE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" role="img" '
        'aria-labelledby="title desc">\n'
        f"{_words(recording, seen, len(moments(recording, options)))}"
        f"<style>\n{_style(names, options.theme)}{motion}</style>\n"
        f'<rect x=".5" y=".5" width="{wide - 1}" height="{high - 1}" rx="8" fill="{_hex(GROUND[options.theme])}" '
        f'stroke="{_hex(EDGE[options.theme])}"/>\n'
        f"{_drawing(spans, classes, names, len(shown))}{_track(ticks, classes, wide, high, options.theme)}</svg>\n"
    )


def xml(text: str) -> str:
    """Text as it stands in an element or between double quotes; what XML cannot hold becomes a mark."""
    return escape("".join(sign if _in_xml(ord(sign)) else CONTROL for sign in text))


def _in_xml(code: int) -> bool:
    """Whether XML 1.0 has this character (its production `Char`, but for the control characters that it discourages)."""
    return (
        code in (9, 10) or 0x20 <= code <= 0x7E or 0xA0 <= code <= 0xD7FF or 0xE000 <= code <= 0xFFFD or code > 0xFFFF
    )


def _cells(rows: Iterable[Row], theme: Theme) -> set[Cell]:
    """What is to be drawn of a frame; spaces only where they are seen, by a ground or a line."""
    found: set[Cell] = set()
    for number, row in enumerate(rows):
        column = 0
        for text, ink in row:
            looks = look(ink, theme)
            for sign, columns in signs(text):
                if sign.strip() or looks.underline or _ground(looks):
                    found.add(Cell(number, column, columns, sign, looks))
                column += columns
    return found


def _spans(frames: Sequence[set[Cell]]) -> dict[Span, list[Cell]]:
    """Each cell with the frames in which it stands unchanged; in order of the spans, and of rows and columns."""
    found: dict[Span, list[Cell]] = defaultdict(list)
    since: dict[Cell, int] = {}
    for number, cells in enumerate([*frames, set()]):
        for cell in [cell for cell in since if cell not in cells]:
            found[Span(since.pop(cell), number)].append(cell)
        since |= {cell: number for cell in cells if cell not in since}
    return {span: sorted(found[span], key=lambda cell: cell[:2]) for span in sorted(found)}


def _words(recording: Recording, seen: Sequence[Seen], steps: int) -> str:
    """Title and description, for who does not see the picture."""
    said = f"all {steps}" if len(seen) == steps else f"{len(seen)} of {steps}"
    told = f"{said} denoising steps, one after the other; of the whole run: {summary(outcome(recording))}"
    answer = recording.text
    answer = answer if len(answer) <= MOST_TOLD else answer[:MOST_TOLD] + "…"
    return (
        f'<title id="title">{xml(_seen_signs(recording.header.model))}: canvases of {recording.header.canvas_length} tokens, step by step</title>\n'
        f'<desc id="desc">{xml(told)}. {xml(_seen_signs(answer))}</desc>\n'
    )


def _seen_signs(text: str) -> str:
    """Nothing that is invisible, or turns the order of what is around it."""
    return "".join(sign for sign, _cells in signs(text))


def _style(names: dict[Look, str], theme: Theme) -> str:
    rules = [
        f"text{{font:{LETTER}px ui-monospace,SFMono-Regular,Menlo,'DejaVu Sans Mono',Consolas,monospace;"
        "white-space:pre;unicode-bidi:bidi-override}\n"
    ]
    for looks, name in names.items():
        letter = GROUND[theme] if looks.reverse and looks.ground is None else looks.colour
        weight = ";font-weight:bold" if looks.bold else ""
        line = ";text-decoration:underline" if looks.underline else ""
        rules.append(f"text.{name}{{fill:{_hex(letter)}{weight}{line}}}\n")
        ground = _ground(looks)
        if ground is not None:
            rules.append(f"path.{name}{{fill:{_hex(ground)}}}\n")
    return "".join(rules)


def _ground(looks: Look) -> Colour | None:
    return looks.colour if looks.reverse and looks.ground is None else looks.ground


def _motion(spans: Iterable[Span], times: Sequence[float]) -> tuple[str, dict[Span, str]]:
    """CSS, and the class of each span: one animation a length, with a delay below zero, so that all run from the start."""
    cycle = times[-1]
    lengths = {span: round(times[span.end] - times[span.first], 3) for span in spans if span != (0, len(times) - 1)}
    if not lengths:
        return "", {}
    numbers = {length: n for n, length in enumerate(sorted(set(lengths.values())))}
    frames = [
        f"@keyframes k{n}{{0%{{visibility:visible}}{100 * length / cycle:.3f}%,100%{{visibility:hidden}}}}\n"
        for length, n in numbers.items()
    ]
    kinds = [f".k{n}{{animation-name:k{n}}}\n" for n in numbers.values()]
    delays = [f".d{i}{{animation-delay:{times[i] - cycle:.2f}s}}\n" for i in sorted({first for first, _end in lengths})]
    css = (
        f"{''.join(frames)}@media (prefers-reduced-motion:no-preference){{\n"
        f".m{{animation:{cycle:.2f}s step-end infinite}}\n{''.join(kinds)}{''.join(delays)}}}\n"
    )
    return css, {span: f"m k{numbers[length]} d{span.first}" for span, length in lengths.items()}


def _drawing(spans: dict[Span, list[Cell]], classes: dict[Span, str], names: dict[Look, str], frames: int) -> str:
    """At rest only what stands in the last frame is visible."""
    resting = [span for span in spans if span.end == frames]
    groups = {span: _group(cells, classes.get(span), names) for span, cells in spans.items()}
    passing = "".join(group for span, group in groups.items() if span.end != frames)
    return f'{"".join(groups[span] for span in resting)}<g visibility="hidden">\n{passing}</g>\n'


def _group(cells: list[Cell], classes: str | None, names: dict[Look, str]) -> str:
    """Cells that come and go together."""

    def line(cell: Cell) -> tuple[int, str]:
        return cell.row, names[cell.look]

    rows = groupby(sorted(cells, key=line), key=line)
    lines = "".join(_line(list(some), names) for _key, some in rows)
    return f'<g class="{classes}">{lines}</g>\n' if classes else f"<g>{lines}</g>\n"


def _line(cells: list[Cell], names: dict[Look, str]) -> str:
    """Cells of one row and one look. Only letters of one UTF-16 unit share an element: renderers count x by units."""
    name, top = names[cells[0].look], MARGIN + cells[0].row * LINE
    ground = ""
    if _ground(cells[0].look) is not None:
        paths = "".join(f"M{_x(cell)} {top}h{cell.columns * COLUMN}v{LINE}h-{cell.columns * COLUMN}z" for cell in cells)
        ground = f'<path class="{name}" d="{paths}"/>'
    lone = [[cell] for cell in cells if not _simple(cell)]
    together = [cell for cell in cells if _simple(cell)]
    texts = [
        f'<text class="{name}" y="{top + BASELINE}" x="{" ".join(str(_x(cell)) for cell in some)}">'
        f"{xml(''.join(cell.letter for cell in some))}</text>"
        for some in [together, *lone]
        if some
    ]
    return ground + "".join(texts)


def _track(ticks: list[Span], classes: dict[Span, str], wide: int, high: int, theme: Theme) -> str:
    """How far the picture is, along its lower edge: a part for each frame that has come."""
    places = [MARGIN + (wide - 2 * MARGIN) * number // len(ticks) for number in range(len(ticks) + 1)]
    parts = "".join(
        f'<path class="{classes.get(tick, "")}" d="M{left} {high - MARGIN // 2}H{right - (right > left + 4) * 2}"/>\n'
        for tick, (left, right) in zip(ticks, pairwise(places), strict=True)
    )
    return f'<g stroke="{_hex(look(Ink(State.FRESH), theme).colour)}" stroke-width="2" opacity=".6">\n{parts}</g>\n'


def _simple(cell: Cell) -> bool:
    return len(cell.letter) == 1 and ord(cell.letter) <= 0xFFFF


def _x(cell: Cell) -> int:
    return MARGIN + cell.column * COLUMN


def _hex(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)
