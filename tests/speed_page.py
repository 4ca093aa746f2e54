"""The figures in docs/how-fast.md: what stands between its `<!-- NAME, … -->` and `<!-- end -->` is made here.

tests/make_roofline.py writes them. The prose around is written by hand and holds no figure of ours.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator

from predicted import (
    CANVAS,
    CARDS_AT_BEST,
    GRAPH_GAP,
    GRAPH_LAUNCH,
    HOST,
    ROOT,
    STEPS,
    STREAM_GAP,
    Part,
    Range,
    Stored,
    aims,
    between,
    eagerly,
    first,
    in_graph,
    launched,
    part_of,
    parts,
    step_of,
    tokens_a_second,
    whole,
)

PAGE = ROOT / "docs/how-fast.md"
REGION = re.compile(r"<!-- (?P<name>\w+), by tests/make_roofline\.py -->\n.*?<!-- end -->", re.DOTALL)

FP8, NVFP4, LIGHT = step_of("redhat-fp8-dynamic"), step_of("nvidia-nvfp4"), step_of("nvidia-nvfp4", light=True)
LAYERS, EXPERTS, TOP_K, VOCABULARY = 30, 128, 8, 262_144
HEAD, SOFT = ("logits",), ("draw", "soft", "soft_fp8")  # kernels of the vocabulary's two products
WORTH_NAMING = 0.15  # ms
TITLES = [card.title for card in CARDS_AT_BEST.values()]


def filled(page: str, stored: Stored) -> str:
    """The page with its figures of today. Raises KeyError on a region that nobody makes."""
    return REGION.sub(
        lambda found: (
            f"<!-- {found['name']}, by tests/make_roofline.py -->\n{REGIONS[found['name']](stored)}\n<!-- end -->"
        ),
        page,
    )


def table(head: list[str], rows: Iterator[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# The regions


def _step(stored: Stored) -> str:
    """Where the bytes and the milliseconds of a light step go."""

    def rows() -> Iterator[list[str]]:
        of = {card: parts(stored, card, LIGHT) for card in CARDS_AT_BEST}
        for name, part in of["ada"].items():
            yield [
                name,
                f"{part.bytes / 1e9:.1f}",
                f"{part.flops / 1e12:.2f}",
                *(f"{of[card][name].ms:.1f}" for card in CARDS_AT_BEST),
            ]
        step = {card: whole(stored, card, LIGHT) for card in CARDS_AT_BEST}
        yield [
            f"gaps between {step['ada'].launches} launches", "", "",
            *(between(_gaps(step[card])) for card in CARDS_AT_BEST),
        ]  # fmt: skip
        yield [
            "**all**", f"{step['ada'].bytes / 1e9:.1f}", f"{step['ada'].flops / 1e12:.2f}",
            *(f"**{between(in_graph(step[card]))}**" for card in CARDS_AT_BEST),
        ]  # fmt: skip
        yield ["floor", "", "", *(f"{stored['floors'][card][LIGHT]:.1f}" for card in CARDS_AT_BEST)]

    return table(["part of a step", "GB (4090)", "Tflop", *(f"{title}, ms" for title in TITLES)], rows())


def _gaps(step: Part) -> Range:
    low, high = in_graph(step)
    return low - step.ms, high - step.ms


def _choices(stored: Stored) -> str:
    """What each choice takes off a step."""

    def row(title: str, taken: Callable[[str], tuple[float, Range]], digits: int = 2) -> list[str]:
        by_card = {card: taken(card) for card in CARDS_AT_BEST}
        gigabytes = by_card["ada"][0] / 1e9
        return [title, f"{gigabytes:.1f}" if gigabytes else "", *(between(ms, digits) for _, ms in by_card.values())]

    def rows() -> Iterator[list[str]]:
        yield row("experts in NVFP4 instead of FP8", lambda card: _off(stored, card, FP8, NVFP4, "experts"))
        yield row(
            "attention, dense MLP in FP8 instead of bf16",
            lambda card: _off(stored, card, NVFP4, LIGHT, "dense products"),
        )
        yield row("embedding in FP8, as the head", lambda card: _off(stored, card, NVFP4, LIGHT, "vocabulary", HEAD))
        yield row(
            "and as the soft embedding's (`fp8-soft`)",
            lambda card: _off(stored, card, NVFP4, LIGHT, "vocabulary", SOFT),
        )
        yield row("fused head: each pass over fp32 logits not made", _pass_over_logits)
        yield row("commit and first step in one pass, by step", lambda card: _fused_commit(stored, card))
        yield row("a graph instead of eager launches", lambda card: (0.0, _graph(whole(stored, card, LIGHT))))
        yield row(
            "running ahead: the host's launch out of the way", lambda card: (0.0, (GRAPH_LAUNCH / 1e3,) * 2), digits=3
        )

    return table(["choice", "GB less (4090)", *(f"{title}, ms less" for title in TITLES)], rows())


def _off(
    stored: Stored, card: str, before: str, after: str, of: str, kernels: tuple[str, ...] | None = None
) -> tuple[float, Range]:
    """(bytes, milliseconds) that one part of a step, or some kernels of it, takes less."""

    def total(step: str) -> Part:
        chosen = (
            part
            for label, part in launched(stored, card, step)
            if part_of(label) == of and (kernels is None or re.split(r"[ .]", label)[0] in kernels)
        )
        return sum(chosen, Part())

    ms = total(before).ms - total(after).ms
    return total(before).bytes - total(after).bytes, (ms, ms)


def _pass_over_logits(card: str) -> tuple[float, Range]:
    size = 4.0 * CANVAS * VOCABULARY
    ms = size / CARDS_AT_BEST[card].bandwidth * 1e3
    return size, (ms, ms)


def _fused_commit(stored: Stored, card: str) -> tuple[float, Range]:
    """Apart, a canvas has a pass more: that of a step, without the vocabulary and without the last layer."""
    step, vocabulary = whole(stored, card, LIGHT), parts(stored, card, LIGHT)["vocabulary"]
    joined = first(stored, card, LIGHT)
    share = (LAYERS - 1) / LAYERS
    ms = step.ms + share * (step.ms - vocabulary.ms) - joined.ms
    size = step.bytes + share * (step.bytes - vocabulary.bytes) - joined.bytes
    return size / STEPS, (ms / STEPS,) * 2


def _graph(step: Part) -> Range:
    graph, eager = in_graph(step), eagerly(step)
    return max(0.0, eager[0] - graph[1]), eager[1] - graph[0]


def _limits(stored: Stored) -> str:
    """What lies between a light step and its floor, a line for each card."""
    return "\n".join(f"- **{best.title}**, {_above_floor(stored, card)}" for card, best in CARDS_AT_BEST.items())


def _above_floor(stored: Stored, card: str) -> str:
    step, least = whole(stored, card, LIGHT), stored["floors"][card][LIGHT]
    found = parts(stored, card, LIGHT)
    waits = {name: part.ms - part.bytes / CARDS_AT_BEST[card].bandwidth * 1e3 for name, part in found.items()}
    named = sorted((name for name in waits if waits[name] >= WORTH_NAMING), key=waits.__getitem__, reverse=True)
    moved = step.bytes / CARDS_AT_BEST[card].bandwidth * 1e3 - least
    above = between((in_graph(step)[0] - least, in_graph(step)[1] - least))
    return (
        f"{above} ms above its floor. Beyond the time of their bytes: "
        + ", ".join(f"{name.split(',')[0]} {waits[name]:.1f} ({_limit_of(stored, card, name)})" for name in named)
        + f". Bytes that the floor leaves out: {moved:.1f}. Gaps: {between(_gaps(step))}."
    )


def _limit_of(stored: Stored, card: str, part: str) -> str:
    """What most of the part's time is due to, memory apart."""
    by_limit: Counter[str] = Counter()
    for label, launches in launched(stored, card, LIGHT):
        limits = stored["launches"][card][label]["limits"]
        if part_of(label) == part:
            by_limit[max(limits, key=limits.__getitem__)] += launches.ms
    del by_limit["memory"]
    return max(by_limit, key=by_limit.__getitem__)


def _frozen(stored: Stored) -> str:
    """Bytes of a step of fewer rows, under uniform routing."""
    experts, step = parts(stored, "ada", LIGHT)["experts"].bytes, whole(stored, "ada", LIGHT).bytes

    def rows() -> Iterator[list[str]]:
        for live in (256, 128, 64, 32, 16):
            hit = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** live)
            left = step - experts * (1 - hit / EXPERTS)
            yield [str(live), f"{hit:.0f} of {EXPERTS}", f"{left / 1e9:.1f}", f"{1 - left / step:.0%}"]

    return table(["tokens that still move", "experts hit in a layer", "GB a step", "saved"], rows())


def _two(stored: Stored) -> str:
    """A first pass has the rows of two canvases and the vocabulary of one."""

    def cost(card: str) -> float:
        another = parts(stored, card, LIGHT)["vocabulary"].ms
        return (first(stored, card, LIGHT).ms + another) / whole(stored, card, LIGHT).ms

    costs = (f"×{cost(card):.2f} on an {best.title}" for card, best in CARDS_AT_BEST.items())
    return f"A step of both would cost {', '.join(costs)} as much as one of either (predicted, gaps left out)."


def _gap_sources(stored: Stored) -> str:
    step = whole(stored, "ada", LIGHT)
    return (
        f"A step has {step.launches} launches, each of which needs the one before. Between two of them others measured "
        f"{GRAPH_GAP[0]} to {GRAPH_GAP[1]} µs in a graph and {STREAM_GAP} µs in a stream; of the host's time {HOST[0]} µs a launch, "
        f"which we take for {HOST[1]:.0f} at the most (sources: `tests/predicted.py`)."
    )


def _prediction(stored: Stored) -> str:
    chosen = [(card, checkpoint, light) for card in CARDS_AT_BEST for checkpoint, light in _rows_of(card)]

    def rows() -> Iterator[list[str]]:
        for card, checkpoint, light in chosen:
            step = step_of(checkpoint, light)
            goal, least = aims(card, checkpoint) or (None, (0.0, 0.0))
            wanted = [f"{goal[0]:.1f} ({least[0]:.1f})", f"{goal[1]:,.0f} ({least[1]:,.0f})"] if goal else [
                f"({least[0]:.1f})", f"({least[1]:,.0f})"
            ]  # fmt: skip
            yield [
                CARDS_AT_BEST[card].title, _title(checkpoint, light), f"{stored['floors'][card][step]:.1f}",
                between(in_graph(whole(stored, card, step))), wanted[0],
                between(tokens_a_second(stored, card, step), 0), wanted[1],
            ]  # fmt: skip

    head = ["card", "weights", "floor, ms", "predicted ms a step", "goal (least)", "predicted tok/s", "goal (least)"]
    missed = [
        f"{_title(checkpoint, light)} on an {CARDS_AT_BEST[card].title}"
        for card, checkpoint, light in chosen
        if (aim := aims(card, checkpoint)) and in_graph(whole(stored, card, step_of(checkpoint, light)))[0] > aim[1][0]
    ]
    below = f"Short of the least even in this prediction: {'; '.join(missed)}." if missed else ""
    return table(head, rows()) + (f"\n\n{below}" if below else "")


def _rows_of(card: str) -> list[tuple[str, bool]]:
    nvfp4 = [("nvidia-nvfp4", False), ("nvidia-nvfp4", True)]
    return [*nvfp4, ("redhat-fp8-dynamic", False)] if card == "hopper" else nvfp4


def _title(checkpoint: str, light: bool) -> str:
    return {"nvidia-nvfp4": "NVIDIA NVFP4", "redhat-fp8-dynamic": "RedHat FP8"}[checkpoint] + (
        ", light" if light else ""
    )


REGIONS: dict[str, Callable[[Stored], str]] = {
    "step": _step,
    "choices": _choices,
    "limits": _limits,
    "frozen": _frozen,
    "two": _two,
    "gaps": _gap_sources,
    "prediction": _prediction,
}
