"""Writes docs/roofline.svg and the figures in docs/how-fast.md from tests/compile/report.json. `python tests/make_roofline.py`

Above, for every card, its roofline: what each part of a step can reach, given how many flops it does with a byte. Below,
the milliseconds that the parts take one after another. Both axes of the roofline are the same for all cards.
"""

import math
from collections.abc import Iterator, Mapping

import speed_page
from predicted import (
    CARDS_AT_BEST,
    GRAPH_GAP,
    PARTS,
    REST,
    ROOT,
    Stored,
    between,
    in_graph,
    parts,
    read,
    step_of,
    whole,
)

PICTURE = ROOT / "docs/roofline.svg"
SHOWN = {  # bars of a card, from top
    step_of("redhat-fp8-dynamic"): "RedHat FP8",
    step_of("nvidia-nvfp4"): "NVIDIA NVFP4",
    step_of("nvidia-nvfp4", light=True): "the same, light",
}
STORED_STEP, LIGHT_STEP = list(SHOWN)[1:]
CLASSES = dict(
    zip((*PARTS, REST, "gaps"), ("experts", "dense", "vocabulary", "attention", "rest", "gaps"), strict=True)
)

# px
PANEL, GUTTER, LEFT, TOP = 286, 28, 46, 112
PLOT, BARS, BAR = 230, 26, 20  # heights; from bar to bar, and of one
INTENSITY, RATE = (8, 1000), (8, 2500)  # flop a byte; Tflop a second
TICKS_X, TICKS_Y = (10, 30, 100, 300, 1000), (10, 100, 1000)
WIDTH = LEFT + 3 * PANEL + 2 * GUTTER + 24
HEIGHT = TOP + PLOT + 66 + len(SHOWN) * (BARS + 16)

KEY = "○ NVIDIA NVFP4 as stored, ● with attention, dense MLP and embedding in FP8 (light); ┃ floor: everything at once, nothing twice"

# Plain colours first: not everything that draws SVG knows of colour schemes.
LIGHT = {
    "paper": "#fff", "ink": "#1f2328", "faint": "#59636e", "line": "#d0d7de", "experts": "#2f6fb3", "dense": "#c96a14",
    "vocabulary": "#2f8a57", "attention": "#9147b3", "rest": "#8c959f", "gaps": "#bfc7d0",
}  # fmt: skip
DARK = {
    "paper": "#0d1117", "ink": "#e6edf3", "faint": "#9198a1", "line": "#30363d", "experts": "#5aa2ea", "dense": "#f0954a",
    "vocabulary": "#56c288", "attention": "#c58be0", "rest": "#7d8590", "gaps": "#4d555f",
}  # fmt: skip
SHAPES = """\
text{font:12px system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif}
.title{font-size:15px;font-weight:600}.small{font-size:11px}.end{text-anchor:end}.middle{text-anchor:middle}
.grid{stroke-width:1}.roof{stroke-width:2;fill:none}.lower{stroke-width:1.2;stroke-dasharray:5 4;fill:none}
.move{stroke-width:1.5}.open{stroke-width:2}.floor{stroke-width:2}.halo{stroke-width:1}"""


def _style() -> str:
    return f"{SHAPES}\n{_colours(LIGHT)}\n@media (prefers-color-scheme:dark){{{_colours(DARK)}}}"


def _colours(of: Mapping[str, str]) -> str:
    rules = [f".paper{{fill:{of['paper']}}}text{{fill:{of['ink']}}}.faint,.small{{fill:{of['faint']}}}"]
    rules += [f".grid{{stroke:{of['line']}}}.roof,.lower,.floor{{stroke:{of['ink']}}}"]
    rules += [f".{kind}{{fill:{of[kind]};stroke:{of[kind]}}}" for kind in CLASSES.values()]
    rules += [f".halo{{stroke:{of['paper']}}}.open{{fill:{of['paper']}}}"]  # of the shapes that have two classes
    return "".join(rules)


def picture(stored: Stored) -> str:
    """SVG, light or dark as its reader's screen is; the same report gives the same bytes."""
    shapes = [line for i, card in enumerate(CARDS_AT_BEST) for line in _card(stored, card, LEFT + i * (PANEL + GUTTER))]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">',
            "<title>Rooflines of three cards with the parts of a denoising step, and the milliseconds each part takes; predicted</title>",
            f"<style>\n{_style()}\n</style>",
            '<rect width="100%" height="100%" rx="8" class="paper"/>',
            _text(
                LEFT,
                26,
                "A denoising step against three rooflines. Predicted from compiled code, not measured",
                "title",
            ),
            *_legend(),
            *shapes,
            "</svg>\n",
        ]
    )


def _legend() -> Iterator[str]:
    x = float(LEFT)
    for name, kind in CLASSES.items():
        title = "gaps in a graph" if kind == "gaps" else name
        yield f'<rect x="{x:.0f}" y="40" width="11" height="11" class="{kind}"/>'
        yield _text(x + 16, 50, title)
        x += 34 + 6.6 * len(title)
    yield _text(LEFT, 70, KEY, "faint")


def _card(stored: Stored, card: str, left: float) -> Iterator[str]:
    best = CARDS_AT_BEST[card]
    yield _text(left, TOP - 12, f"{best.title}, {best.bandwidth / 1e9:,.0f} GB/s", "title")
    yield from _axes(left, numbered=left == LEFT)
    yield from _roofs(card, left)
    yield from _points(stored, card, left)
    yield from _bars(stored, card, left, TOP + PLOT + 62)


# The roofline


def _x(left: float, intensity: float) -> float:
    low, high = map(math.log, INTENSITY)
    return left + PANEL * (math.log(intensity) - low) / (high - low)


def _y(rate: float) -> float:
    """Of Tflop a second."""
    low, high = map(math.log, RATE)
    return TOP + PLOT * (1 - (math.log(rate) - low) / (high - low))


def _axes(left: float, numbered: bool) -> Iterator[str]:
    bottom = TOP + PLOT
    for tick in TICKS_X:
        x = _x(left, tick)
        yield f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}"/>'
        yield _text(x, bottom + 15, f"{tick:,}", "small middle")
    for tick in TICKS_Y:
        y = _y(tick)
        yield f'<path class="grid" d="M{left:.1f} {y:.1f}H{left + PANEL:.1f}"/>'
        if numbered:
            yield _text(left - 6, y + 4, f"{tick:,}", "small end")
    yield _text(left + PANEL / 2, bottom + 31, "flop a byte of memory", "small middle")
    if numbered:
        yield _text(left + 5, TOP + 13, "Tflop/s", "small")


def _roofs(card: str, left: float) -> Iterator[str]:
    best = CARDS_AT_BEST[card]
    right = left + PANEL
    top, lower = best.floor["fp8"], best.floor["bf16"]
    start = best.bandwidth * INTENSITY[0] / 1e12
    begin = INTENSITY[0] if start >= RATE[0] else RATE[0] * 1e12 / best.bandwidth
    slope = f"M{_x(left, begin):.1f} {_y(best.bandwidth * begin / 1e12):.1f}"
    ridge = _x(left, top / best.bandwidth)
    yield f'<path class="roof" d="{slope}L{ridge:.1f} {_y(top / 1e12):.1f}H{right:.1f}"/>'
    yield f'<path class="lower" d="M{_x(left, lower / best.bandwidth):.1f} {_y(lower / 1e12):.1f}H{right:.1f}"/>'
    yield _text(right - 3, _y(top / 1e12) - 8, f"FP8 {top / 1e12:,.0f}", "small end")
    yield _text(right - 3, _y(lower / 1e12) + 14, f"bf16 {lower / 1e12:,.0f}", "small end")


def _points(stored: Stored, card: str, left: float) -> Iterator[str]:
    """Each part as stored and light, and the way from one to the other."""
    before, after = parts(stored, card, STORED_STEP), parts(stored, card, LIGHT_STEP)
    for name in PARTS:
        kind = CLASSES[name]
        spots = [(_x(left, p.flops / p.bytes), _y(p.flops / p.ms / 1e9)) for p in (before[name], after[name])]
        (x, y), (to_x, to_y) = spots
        if math.dist(*spots) > 2:
            yield f'<path class="move {kind}" d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"/>'
            yield f'<circle class="{kind} open" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>'
        yield f'<circle class="{kind} halo" cx="{to_x:.1f}" cy="{to_y:.1f}" r="6"/>'


# The bars


def _bars(stored: Stored, card: str, left: float, top: float) -> Iterator[str]:
    longest = max(in_graph(whole(stored, card, step))[1] for step in SHOWN)
    scale = PANEL / longest
    for i, (step, title) in enumerate(SHOWN.items()):
        y = top + i * (BARS + 16)
        total = whole(stored, card, step)
        yield _text(left, y, title)
        yield _text(left + PANEL, y, f"{between(in_graph(total))} ms", "end")
        lengths = {name: part.ms for name, part in parts(stored, card, step).items()}
        lengths["gaps"] = total.launches * GRAPH_GAP[1] / 1e3
        x = float(left)
        for name, ms in lengths.items():
            yield f'<rect class="{CLASSES[name]} halo" x="{x:.1f}" y="{y + 6:.1f}" width="{ms * scale:.1f}" height="{BAR}"/>'
            x += ms * scale
        floor = left + stored["floors"][card][step] * scale
        mark = f"M{floor:.1f} {y + 5:.1f}V{y + BAR + 9:.1f}"
        yield f'<path class="halo" style="stroke-width:5" d="{mark}"/><path class="floor" d="{mark}"/>'


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    of = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{of}>{words}</text>'


def main() -> None:
    stored = read()
    PICTURE.write_text(picture(stored), encoding="utf-8")
    page = speed_page.PAGE
    page.write_text(speed_page.filled(page.read_text(encoding="utf-8"), stored), encoding="utf-8")


if __name__ == "__main__":
    main()
