"""Predicts a denoising step from what the compilers made of its launches, and writes kernels/README.md from that.

    python tests/kernel_report.py              compile all steps for all cards (minutes), store, write the README
    python tests/kernel_report.py --render     the README again, from what is stored in tests/compile/report.json

A launch takes as long as the slowest of these would take alone, and a step as long as its launches one after another:

    memory           bytes / bandwidth; of what the step itself made, if it fits into half the L2, a quarter
    tensor cores     flops, padding included, / rate of the mma that the compiler chose
    issue            warp instructions / 4 a cycle and processor
    integer units    of them those on the half-rate units: bit logic, shifts, compares, integer sums
    special          exponentials, logarithms, and conversions that go the same way
    shared memory    bytes of loads and stores / 128 a cycle and processor

Instructions executed: a loop's length × its trips, and the rest of the program once. Trips of a loop that multiplies
matrices follow from its mma and the launch's flops; of another loop from the bytes it loads. Latency, launch gaps, bank
conflicts and clock changes are left out: this is a bound from the code as compiled, not a measurement.
"""

import argparse
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import steps
import torch
from compile.configurations import CONFIGURATIONS, recorded
from cross import CARDS, MMA, Artefact, Loop, compile_numbered, count, key_of
from dgemma_local.kernels._launch import Gpu, Launch

ROOT = Path(__file__).parents[1]
STORED = ROOT / "tests/compile/report.json"
README = ROOT / "kernels/README.md"


@dataclass(frozen=True, slots=True)
class Card:
    """What a card does at best: bytes and operations a second, cycles a second."""

    title: str
    bandwidth: float
    rates: Mapping[str, float]  # of mma by their first letters
    floor: Mapping[str, float]  # the best rates by format, for the floor
    clock: float
    l2: int  # bytes
    integer: int  # cycles in which a quarter of a processor issues one warp's integer instruction


# Bandwidth: what was measured by others, of an H200 90 % of the datasheet. Rates: dense, fp32 sums; datasheets, but of the
# 5090 measured ones (bf16 235; FP8 507, with unit block scales 785; NVFP4 from Triton 3.6 874, in its floor the
# datasheet's 1,676). mma.sync on Hopper reaches 62.9 % of wgmma (arXiv 2402.13499). Clocks are those at
# which the datasheets' rates come out.
CARDS_AT_BEST = {
    "ada": Card(
        "RTX 4090", 921e9,
        {"HMMA": 165.2e12, "QMMA": 330.3e12}, {"bf16": 165.2e12, "fp8": 330.3e12, "nvfp4": 165.2e12}, 2.52e9, 72 << 20, 2,
    ),
    "hopper": Card(
        "H200", 4300e9,
        {"HGMMA": 989e12, "QGMMA": 1979e12, "HMMA": 622e12, "QMMA": 1245e12},
        {"bf16": 989e12, "fp8": 1979e12, "nvfp4": 989e12}, 1.83e9, 50 << 20, 2,
    ),
    "blackwell": Card(
        "RTX 5090", 1674e9,
        {"HMMA": 235e12, "QMMA": 507e12, "QMMA.SF": 785e12, "OMMA": 874e12}, {"bf16": 235e12, "fp8": 785e12, "nvfp4": 1676e12}, 2.41e9, 96 << 20, 1,
    ),
}  # fmt: skip

EXCHANGED = ("PARTS", "COUNTS")  # arguments that the cost of a launch does not count
SCHEDULERS = 4  # of a processor, one instruction a cycle each
SHARED_BYTES = 128  # a cycle and processor
L2_BYTES = 64  # a cycle and processor: what a launch of few programs can draw
SPECIAL = 8  # cycles in which a quarter of a processor issues one warp's special function

INTEGER_UNITS = (
    "LOP3", "PRMT", "SHF", "IADD3", "IADD", "ISETP", "SEL", "LEA", "IMNMX", "VIMNMX", "FMNMX", "FSETP", "FSEL", "PLOP3",
    "BMSK", "SGXT", "FLO", "POPC", "F2FP", "VIADD",
)  # fmt: skip
SPECIAL_UNITS = ("MUFU", "F2F", "F2I", "I2F", "FRND")
EXPERTS = re.compile("experts_(gated|down)")
SEED, ROUTINGS = 0, 64  # simulated: every token's 8 of 128 experts, uniform


# Flops of one warp's mma


def flops_of(operation: str) -> int:
    """HMMA.16816 is 16 × 8 × 16; HGMMA.64x128x16 is shared by the four warps of a group."""
    if wide := re.search(r"\.(\d+)x(\d+)x(\d+)", operation):
        m, n, k = map(int, wide.groups())
        return 2 * m * n * k // 4
    digits = re.search(r"\.(16|8)(8)(\d+)", operation)
    if digits is None:
        raise ValueError(f"mma of unknown shape: {operation}")
    return 2 * math.prod(map(int, digits.groups()))


def loop_flops(loop: Loop) -> int:
    return sum(n * flops_of(o) for o, n in loop.operations.items() if o.split(".")[0] in MMA)


# Instructions executed


@cache
def _items(block: int, small: int) -> tuple[float, float, float]:
    """A layer's work list under uniform routing: (items, rows of tiles of `small` rows, rows of tiles of `block`)."""
    rng = np.random.default_rng(SEED)
    items = few = many = 0
    for _ in range(ROUTINGS):
        chosen = np.argpartition(rng.random((256, 128)), 8, axis=1)[:, :8]
        for pairs in np.bincount(chosen.ravel(), minlength=128):
            whole, rest = divmod(int(pairs), block)
            items += whole + (rest > 0)
            many += block * (whole + (rest > small))
            few += small * (0 < rest <= small)
    return items / ROUTINGS, few / ROUTINGS, many / ROUTINGS


def work(launch: Launch, artefact: Artefact) -> Counter[str]:
    """Warp instructions that the whole launch executes, by operation; of mma their number."""
    programs = math.prod(launch.grid)
    done: Counter[str] = Counter()
    inside: Counter[str] = Counter()
    for loop, trips in _trips(launch, artefact, programs):
        inside.update(loop.operations)
        for operation, n in loop.operations.items():
            done[operation] += n * trips
    active = programs
    if EXPERTS.match(launch.name):
        items, _, _ = _items(launch.constants["BN"], launch.constants["SMALL"])
        active *= items / launch.grid[1]
    for operation, n in artefact.operations.items():
        done[operation] += (n - inside[operation]) * active * artefact.warps
    return done


def _trips(launch: Launch, artefact: Artefact, programs: int) -> Iterator[tuple[Loop, float]]:
    """(loop, how often all warps of the launch together go through it)."""
    multiplying = sorted((loop for loop in artefact.loops if loop.mma), key=loop_flops)
    if EXPERTS.match(launch.name) and multiplying:
        _, few, many = _items(launch.constants["BN"], launch.constants["SMALL"])
        pairs = 256 * 8
        shares = [(multiplying[0], few / pairs), (multiplying[-1], many / pairs)]
        if len(multiplying) == 1:
            shares = [(multiplying[0], (few + many) / pairs)]
        for loop, share in shares:
            yield loop, launch.cost.flops * share / loop_flops(loop)
    elif multiplying:
        yield multiplying[-1], launch.cost.flops / loop_flops(multiplying[-1])
    elif artefact.hot is not None:
        loaded = sum(n * 32 * _width(o) for o, n in artefact.hot.operations.items() if o.startswith(("LDG", "STG")))
        yield artefact.hot, max(launch.cost.bytes / loaded if loaded else 0, programs * artefact.warps)


def _width(operation: str) -> int:
    """Bytes a lane."""
    found = re.search(r"\.(U8|S8|U16|S16|64|128)\b", operation)
    return {None: 4, "U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}[found[1] if found else None]


def _shared_bytes(operation: str) -> int:
    """Bytes of a warp's access: LDSM.16.M88.4 reads four matrices of 128 bytes."""
    name = operation.split(".")[0]
    if name in ("LDSM", "STSM"):
        return 128 * int(found[1] if (found := re.search(r"\.([124])$", operation)) else 1)
    if name == "LDGSTS":
        return 32 * _width(operation)
    return max(SHARED_BYTES, 32 * _width(operation)) if name in ("LDS", "STS") else 0


# Times


@dataclass(frozen=True, slots=True)
class Prediction:
    """Microseconds a launch, limit by limit."""

    limits: Mapping[str, float]

    @property
    def us(self) -> float:
        return max(self.limits.values())

    @property
    def limit(self) -> str:
        return max(self.limits, key=self.limits.__getitem__)


def memory_bytes(launch: Launch, lasting: frozenset[int], card: Card) -> float:
    """Bytes that reach the memory: of what an earlier launch of the step left in the L2 a share, as in the floor."""
    made = {}
    for name, x in zip(launch.kernel.arg_names, launch.args, strict=False):
        if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in lasting and name not in EXCHANGED:
            made[x.untyped_storage()._cdata] = x.nbytes
    near = sum(size for size in made.values() if size <= card.l2 // 2)
    return launch.cost.bytes - (1 - ACTIVATIONS) * min(near, launch.cost.bytes)


def _longest_share(launch: Launch) -> float:
    """Of a product whose programs share its tiles, the longest share of steps, by the mean one."""
    c = launch.constants
    if not c.get("SHARED"):
        return 1.0
    rows, programs = launch.args[-1], math.prod(launch.grid)
    steps = math.ceil(rows / c["BM"]) * math.ceil(c["N"] / c["BN"]) * math.ceil(c["K"] / c["BK"])
    return math.ceil(steps / programs) * programs / steps


def _exchanged(launch: Launch) -> int:
    """Bytes of parts of sums that programs leave for one another, written and read; they stay in the L2."""
    c = launch.constants
    return 2 * math.prod(launch.grid) * 4 * c["BM"] * c["BN"] if c.get("SHARED") else 0


def predict(launch: Launch, artefact: Artefact, gpu: Gpu, card: Card, lasting: frozenset[int]) -> Prediction:
    programs = math.prod(launch.grid)
    busy = min(programs, gpu.processors)
    # the busiest processor has a whole number of programs, and the launch takes as long as it
    lag = math.ceil(programs / gpu.processors) / (programs / gpu.processors) * _longest_share(launch)
    done = work(launch, artefact)
    cycles = gpu.processors * card.clock / lag  # of all processors, a second

    def issued(*names: str) -> float:
        return sum(n for o, n in done.items() if o.split(".")[0] in names)

    tensor = sum(n * flops_of(o) / _rate(card, o) for o, n in done.items() if o.split(".")[0] in MMA) * lag
    limits = {
        "memory": memory_bytes(launch, lasting, card) / min(card.bandwidth, busy * L2_BYTES * card.clock),
        "L2": (launch.cost.bytes + _exchanged(launch)) / (busy * L2_BYTES * card.clock),
        "tensor cores": tensor,
        "issue": sum(done.values()) / (SCHEDULERS * cycles),
        "integer units": issued(*INTEGER_UNITS) * card.integer / (SCHEDULERS * cycles),
        "special functions": issued(*SPECIAL_UNITS) * SPECIAL / (SCHEDULERS * cycles),
        "shared memory": sum(n * _shared_bytes(o) for o, n in done.items()) / (SHARED_BYTES * cycles),
    }
    return Prediction({name: seconds * 1e6 for name, seconds in limits.items()})


def _rate(card: Card, operation: str) -> float:
    """By the longest name that fits: QMMA.SF, with unit block scales, is faster than QMMA on a 5090."""
    return next(rate for name, rate in sorted(card.rates.items(), reverse=True) if operation.startswith(name))


# The floor: max(all bytes / bandwidth, all flops / peak), every byte once


def floor(checkpoint: str, light: bool, card: Card) -> float:
    """Milliseconds a step of CONTEXT committed tokens, all experts hit, 16-row tiles padded."""
    config = steps.config()
    forms = steps.held(checkpoint, light)
    rows, seen = config.canvas_length, steps.CONTEXT
    moved, seconds = 0.0, 0.0
    for name, form in forms.items():
        if name == "embed_tokens" or len(form.shape) < 2:
            continue
        moved += form.nbytes
        multiplied = math.prod(form.shape[-2:]) * rows
        if ".experts." in name:
            multiplied *= config.top_k * PADDING
        seconds += 2 * multiplied / card.floor["bf16" if form.form == "plain" else form.form]
    embedding = forms["embed_tokens"]
    reads = 1 if light else 2  # for the head, and again for the soft embedding
    moved += embedding.nbytes * reads
    for layer in config.layers:
        keys = min(seen, config.sliding_window) if layer.kind == "sliding" else seen
        moved += 2 * keys * layer.kv_heads * layer.head_dim * 2
        seconds += 4 * rows * config.heads * layer.head_dim * (keys + rows) / card.floor["bf16"]
    moved += (
        ACTIVATIONS
        * len(config.layers)
        * (
            14 * rows * config.hidden_size * 2
            + rows * config.top_k * (2 * config.hidden_size + 3 * config.expert_size) * 2
        )
    )
    vocabulary = 2 * 2 * rows * math.prod(embedding.shape)
    seconds += vocabulary / card.floor["bf16" if embedding.form == "plain" else embedding.form]
    return max(moved / card.bandwidth, seconds) * 1e3


PADDING = 1.44  # rows of 16-row tiles a routed pair, uniform routing
ACTIVATIONS = 0.25  # of their bytes that miss the L2


# What is stored


def compiled(workers: int = 2) -> dict[str, Any]:
    """Every step on every card, compiled and predicted."""
    entries = {entry.name: entry for entry in CONFIGURATIONS}
    found: dict[str, Any] = {"steps": {}, "floors": {}, "launches": {}}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = {}
        for checkpoint, light, card in wanted():
            name = steps.name(checkpoint, light)
            for number, launch in enumerate(recorded(entries[name], CARDS[card])):
                key = key_of(launch, CARDS[card])
                if key not in jobs:
                    jobs[key] = pool.submit(compile_numbered, name, card, number)
        artefacts = {key: job.result() for key, job in jobs.items()}
    for checkpoint, light, card in wanted():
        name = steps.name(checkpoint, light)
        launches = recorded(entries[name], CARDS[card])
        found["floors"].setdefault(card, {})[name] = round(floor(checkpoint, light, CARDS_AT_BEST[card]), 2)
        found["steps"].setdefault(card, {})[name] = summary(
            launches, artefacts, card, steps.lasting(checkpoint, light), found["launches"].setdefault(card, {})
        )
    return found


def wanted() -> Iterator[tuple[str, bool, str]]:
    for card in CARDS:
        for checkpoint in steps.CHECKPOINTS:
            for light in (False, True):
                yield checkpoint, light, card


def summary(
    launches: Sequence[Launch],
    artefacts: Mapping[str, Artefact],
    card: str,
    lasting: frozenset[int],
    lines: dict[str, Any],
) -> dict[str, int]:
    """How often each distinct launch runs in a step; its line goes into `lines`."""
    counts: Counter[str] = Counter()
    for launch in launches:
        artefact = artefacts[key_of(launch, CARDS[card])]
        line = describe(launch, artefact, card, lasting)
        label = next((k for k, known in lines.items() if known == line), None)
        if label is None:
            label = f"{artefact.name} {sum(k.rsplit(' ', 1)[0] == artefact.name for k in lines) + 1}"
            lines[label] = line
        counts[label] += 1
    return dict(counts)


def describe(launch: Launch, artefact: Artefact, card: str, lasting: frozenset[int]) -> dict[str, Any]:
    predicted = predict(launch, artefact, CARDS[card], CARDS_AT_BEST[card], lasting)
    done = work(launch, artefact)
    mma = count(done, *MMA)
    return {
        "grid": list(launch.grid),
        "warps": artefact.warps,
        "registers": artefact.registers,
        "shared": artefact.shared,
        "bytes": launch.cost.bytes,
        "flops": launch.cost.flops,
        "mma": " ".join(sorted({re.split(r"\.\d", o)[0] for o in artefact.mma})),
        "per_mma": round(sum(done.values()) / mma, 2) if mma else None,
        "per_byte": round(sum(done.values()) / max(launch.cost.bytes, 1), 3),
        "limits": {k: float(f"{v:.3g}") for k, v in predicted.limits.items() if v * 20 > predicted.us},
    }


# kernels/README.md


def render(stored: Mapping[str, Any]) -> str:
    tables = [_launches_table(stored, card) for card in CARDS]
    return "\n".join([INTRODUCTION, _steps_table(stored), _worst(stored), METHOD, *tables])


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
dense MLP and embedding in FP8, whatever the checkpoint stores.
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
memory. The busiest processor's number of programs counts, not the mean. Left out: latency, the gaps between launches
(about 1 µs each in a CUDA graph), bank conflicts. Experts are routed uniformly, 16 rows each. Bandwidths
and rates with their origins stand in `tests/kernel_report.py`, which wrote this page; `tests/compile` holds the machine
code to it.
"""


def milliseconds(stored: Mapping[str, Any], card: str, step: str) -> float:
    lines = stored["launches"][card]
    return sum(n * max(lines[label]["limits"].values()) for label, n in stored["steps"][card][step].items()) / 1e3


def _steps_table(stored: Mapping[str, Any]) -> str:
    rows = [
        "| checkpoint | "
        + " | ".join(f"{c.title}, as stored | light" for c in CARDS_AT_BEST.values())
        + " | launches |"
    ]
    rows.append("|---" * (2 + 2 * len(CARDS)) + "|")
    for checkpoint, title in steps.CHECKPOINTS.items():
        cells = []
        for card in CARDS:
            for light in (False, True):
                predicted = milliseconds(stored, card, steps.name(checkpoint, light))
                cells.append(f"*{predicted:.1f}* / {stored['floors'][card][steps.name(checkpoint, light)]:.1f}")
        launches = {sum(stored["steps"][card][steps.name(checkpoint, False)].values()) for card in CARDS}
        rows.append(
            f"| {title} | " + " | ".join(cells) + f" | {' … '.join(map(str, sorted({min(launches), max(launches)})))} |"
        )
    return "\n".join(rows) + "\n"


def _worst(stored: Mapping[str, Any]) -> str:
    """Of each step the kernel that loses the most beyond its bytes."""
    text = ["## The worst kernel of each step", "", WHY]
    text += ["| step | card | kernel | ms a step | of its bytes alone | limit |", "|---|---|---|---|---|---|"]
    for checkpoint, light, card in wanted():
        step = steps.name(checkpoint, light)
        name, time, memory, limit = max(_by_kernel(stored, card, step), key=lambda k: k[1] - k[2])
        title = steps.CHECKPOINTS[checkpoint] + (", light" if light else "")
        text.append(f"| {title} | {CARDS_AT_BEST[card].title} | {name} | {time:.2f} | {memory:.2f} | {limit} |")
    return "\n".join(text) + "\n"


def _by_kernel(stored: Mapping[str, Any], card: str, step: str) -> Iterator[tuple[str, float, float, str]]:
    """(kernel, ms a step, ms of its bytes, the limit that most of the time is due to)."""
    names: dict[str, list[tuple[float, float, str]]] = {}
    for label, n in stored["steps"][card][step].items():
        limits = stored["launches"][card][label]["limits"]
        limit = max(limits, key=limits.__getitem__)
        memory = stored["launches"][card][label]["bytes"] / CARDS_AT_BEST[card].bandwidth * 1e6
        names.setdefault(label.rsplit(" ", 1)[0], []).append((n * limits[limit] / 1e3, n * memory / 1e3, limit))
    for name, parts in names.items():
        yield name, sum(p[0] for p in parts), sum(p[1] for p in parts), max(parts)[2]


def _launches_table(stored: Mapping[str, Any], card: str) -> str:
    title = "## Launches on an {}, sm_{}{}".format(CARDS_AT_BEST[card].title, *CARDS[card].capability)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="only write the README from what is stored")
    if not parser.parse_args().render:
        STORED.write_text(json.dumps(compiled(), indent=1) + "\n")
    README.write_text(render(json.loads(STORED.read_text())))
    print(_steps_table(json.loads(STORED.read_text())))


if __name__ == "__main__":
    main()
