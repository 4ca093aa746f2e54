"""kernels/README.md as text, from what tests/kernel_report.py stored. Imports no torch; `--render` there writes it."""

import math
from collections.abc import Iterator

from predicted import (
    CARDS_AT_BEST,
    CHECKPOINTS,
    GRAPH_GAP,
    HOST,
    PUBLISHED_H200,
    ROOT,
    ROTARY_TABLES,
    STEPS,
    STREAM_GAP,
    Aim,
    Stored,
    aims,
    between,
    canvas_ms,
    eagerly,
    first,
    in_graph,
    milliseconds,
    step_of,
    tokens_a_second,
    wanted,
    whole,
)

README = ROOT / "kernels/README.md"


def render(stored: Stored) -> str:
    tables = [_launches_table(stored, card) for card in CARDS_AT_BEST]
    gaps = GAPS.format(
        graph=between(GRAPH_GAP, 2),
        stream=STREAM_GAP,
        host=between(HOST),
        published=PUBLISHED_H200,
        steps=STEPS,
        tables=ROTARY_TABLES,
    )
    return "\n".join([INTRODUCTION, steps_table(stored), gaps, gaps_table(stored), _worst(stored), METHOD, *tables])


INTRODUCTION = """<!-- written by tests/kernel_report.py; do not edit -->
# Kernels

Every hot operation as a Triton kernel beside its torch twin, one file each: maths, shapes, precision, traffic, twin,
kernel, wrapper, costs. In Python the folder is `dgemma_local.kernels`; only `dgemma_local/ops.py` calls into it.

**Nothing on this page was measured on a GPU.** The kernels were compiled for three cards on a machine without one, and the
times are what the machine code, the bytes and the flops allow at best. Read them as a lower bound with its reason: a
kernel that is slow here is slow on a card, one that is fast here may still be slow there.

## A denoising step

256 rows behind 1,024 committed tokens, all launches one after another, in milliseconds: *predicted* / floor. The floor is
what the bytes and flops of the step take if they overlapped perfectly and nothing were moved twice. *Light*: attention,
dense MLP and embedding in FP8, whatever the checkpoint stores, and the soft embedding from FP8 probabilities (`fp8-soft`,
off by default). RedHat FP8 does not fit into the 24 GB of a 4090, whose columns are there for comparison.
"""

GAPS = """## With the gaps between launches

**Predicted, like the rest.** Every launch is a node of one graph and waits for the one before: {graph} µs each, kernel
latency included. Launched eagerly a step takes as long as card (gaps of {stream} µs) or host ({host} µs a launch), whoever
is slower. Sources in `tests/predicted.py`; none of these gaps was measured on one of the three cards. *Canvas*: the
protocol `fixed16`, {steps} steps of which the *first*, whose kernels have a column of their own, is a pass of 512 rows: it
commits the canvas before as well, and has {tables} short launches of torch's besides, counted as gaps. Tokens a second are
the canvas's 256 by that time. Goal, and in brackets the least, were set before there was a kernel. vLLM published
{published:,} tok/s by this protocol for FP8 on an H200; no figure by it is known to us of the other two cards.
"""

WHY = """The one that loses the most beyond the time of its bytes. *Tensor cores*: 256 rows make a dense matrix a matter of
flops, not of bytes, in bf16 and in NVFP4, whose product is a bf16 product; and where the programs do not divide evenly
among the processors, the last ones leave most of the card idle. *Shared memory*, of NVFP4 experts on an H200: weights are
decoded in registers and must pass through shared memory to get into the tensor cores' order, which takes longer than
reading them does from so fast a memory; on the other two cards it hides behind the reading.
"""

METHOD = """
## How a time is predicted

A launch takes as long as the slowest of its limits would take alone: memory, tensor cores at the rate of the mma that was
compiled, instruction issue, the half-rate integer units (on sm_120 they have the full rate), special functions, shared
memory. The busiest processor's number of programs counts, not the mean. Left out: latency inside a kernel, bank
conflicts, clock changes. Experts are routed uniformly, 16 rows each. Bandwidths, rates and gaps with their origins stand
in `tests/predicted.py`; `tests/kernel_report.py` wrote this page, and `tests/compile` holds the machine code to it.
[docs/how-fast.md](../docs/how-fast.md) says what the choices behind these figures buy.
"""


def steps_table(stored: Stored) -> str:
    rows = [
        "| checkpoint | "
        + " | ".join(f"{c.title}, as stored | light" for c in CARDS_AT_BEST.values())
        + " | launches |"
    ]
    rows.append("|---" * (2 + 2 * len(CARDS_AT_BEST)) + "|")
    for checkpoint, title in CHECKPOINTS.items():
        cells = []
        for card in CARDS_AT_BEST:
            for light in (False, True):
                predicted = milliseconds(stored, card, step_of(checkpoint, light))
                cells.append(f"*{predicted:.1f}* / {stored['floors'][card][step_of(checkpoint, light)]:.1f}")
        launches = {sum(stored["steps"][card][step_of(checkpoint, False)].values()) for card in CARDS_AT_BEST}
        rows.append(
            f"| {title} | " + " | ".join(cells) + f" | {' … '.join(map(str, sorted({min(launches), max(launches)})))} |"
        )
    return "\n".join(rows) + "\n"


def gaps_table(stored: Stored) -> str:
    rows = ["| step | card | launches | kernels | in a graph | eagerly | goal | first | canvas | tok/s | goal |"]
    rows.append("|---" * 11 + "|")
    for checkpoint, light, card in wanted():
        name, title = step_of(checkpoint, light), CHECKPOINTS[checkpoint] + (", light" if light else "")
        step, aim = whole(stored, card, name), aims(card, checkpoint)
        cells = [title, CARDS_AT_BEST[card].title, step.launches, f"{step.ms:.1f}"]
        cells += [between(in_graph(step)), between(eagerly(step)), _aim(aim, 0, ".1f")]
        cells += [
            f"{first(stored, card, name).ms:.1f}",
            between(canvas_ms(stored, card, name), 0),
            between(tokens_a_second(stored, card, name), 0),
        ]
        rows.append(f"| {' | '.join(map(str, cells))} | {_aim(aim, 1, ',.0f')} |")
    return "\n".join(rows) + "\n"


def _aim(aim: tuple[Aim | None, Aim] | None, which: int, form: str) -> str:
    """20.0 (23.0); without a goal the least alone."""
    if aim is None:
        return ""
    goal, least = aim
    return f"({least[which]:{form}})" if goal is None else f"{goal[which]:{form}} ({least[which]:{form}})"


def _worst(stored: Stored) -> str:
    """Of each step the kernel that loses the most beyond its bytes."""
    text = ["## The worst kernel of each step", "", WHY]
    text += ["| step | card | kernel | ms a step | of its bytes alone | limit |", "|---|---|---|---|---|---|"]
    for checkpoint, light, card in wanted():
        step = step_of(checkpoint, light)
        name, time, memory, limit = max(_by_kernel(stored, card, step), key=lambda k: k[1] - k[2])
        title = CHECKPOINTS[checkpoint] + (", light" if light else "")
        text.append(f"| {title} | {CARDS_AT_BEST[card].title} | {name} | {time:.2f} | {memory:.2f} | {limit} |")
    return "\n".join(text) + "\n"


def _by_kernel(stored: Stored, card: str, step: str) -> Iterator[tuple[str, float, float, str]]:
    """(kernel, ms a step, ms of its bytes, the limit that most of the time is due to)."""
    names: dict[str, list[tuple[float, float, str]]] = {}
    for label, n in stored["steps"][card][step].items():
        limits = stored["launches"][card][label]["limits"]
        limit = max(limits, key=limits.__getitem__)
        memory = stored["launches"][card][label]["bytes"] / CARDS_AT_BEST[card].bandwidth * 1e6
        names.setdefault(label.rsplit(" ", 1)[0], []).append((n * limits[limit] / 1e3, n * memory / 1e3, limit))
    for name, parts in names.items():
        yield name, sum(p[0] for p in parts), sum(p[1] for p in parts), max(parts)[2]


def _launches_table(stored: Stored, card: str) -> str:
    title = f"## Launches on an {CARDS_AT_BEST[card].title}, {CARDS_AT_BEST[card].arch}"
    rows = [title, ""]
    rows.append(
        "| kernel | programs × warps | MB | Gflop | mma | instr. per mma | per byte | registers | shared KB | µs | limit |"
    )
    rows.append("|---|---|---|---|---|---|---|---|---|---|---|")
    for label, line in sorted(stored["launches"][card].items()):
        limits = line["limits"]
        limit = max(limits, key=limits.__getitem__)
        grid = f"{math.prod(line['grid']):,} × {line['warps']}"
        per_mma = "" if line["per_mma"] is None else f"{line['per_mma']:.1f}"
        rows.append(
            f"| {label} | {grid} | {line['bytes'] / 1e6:.2f} | {line['flops'] / 1e9:.2f} | {line['mma']} | {per_mma} "
            f"| {line['per_byte']:.2f} | {line['registers']} | {line['shared'] / 1024:.1f} | {limits[limit]:.1f} | {limit} |"
        )
    return "\n".join(rows) + "\n"
