"""Predicts a denoising step from what the compilers made of its launches, and writes what is told of it from that.

    python tests/kernel_report.py              compile all passes for all cards (minutes), store, write the pages
    python tests/kernel_report.py --render     the pages again, from what is stored in tests/compile/report.json

The pages: kernels/README.md (kernel_page.py), docs/how-fast.md and its picture (speed_page.py, make_roofline.py).

A launch takes as long as the slowest of these would take alone, and a step as long as its launches one after another:

    memory           bytes / bandwidth; of what the step itself made, if it fits into half the L2, a quarter
    tensor cores     flops, padding included, / rate of the mma that the compiler chose
    issue            warp instructions / 4 a cycle and processor
    integer units    of them those on the half-rate units: bit logic, shifts, compares, integer sums
    special          exponentials, logarithms, and conversions that go the same way
    shared memory    bytes of loads and stores / 128 a cycle and processor

Instructions executed: a loop's length × its trips, and the rest of the program once. Trips of a loop that multiplies
matrices follow from its mma and the launch's flops; of another loop from the bytes it loads. Latency inside a kernel, bank
conflicts and clock changes are left out: this is a bound from the code as compiled, not a measurement. The gaps between
launches come on top, from others' measurements (predicted.py): `--render` suffices after a change to them.
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
from typing import Any

import make_roofline
import numpy as np
import steps
import torch
from compile.configurations import CONFIGURATIONS, recorded
from cross import CARDS, MMA, Artefact, Loop, compile_numbered, count, key_of
from dgemma_local.kernels._launch import Gpu, Launch
from floor import ACTIVATIONS, floor
from kernel_page import README, gaps_table, render, steps_table
from predicted import CARDS_AT_BEST, STORED, Card, first_of, read, wanted

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
NUM_EXPERTS, TOP_K = 128, 8
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
def _items(block: int, small: int, rows: int) -> tuple[float, float, float]:
    """A layer's work list under uniform routing: (items, rows of tiles of `small` rows, rows of tiles of `block`)."""
    rng = np.random.default_rng(SEED)
    items = few = many = 0
    for _ in range(ROUTINGS):
        chosen = np.argpartition(rng.random((rows, NUM_EXPERTS)), TOP_K, axis=1)[:, :TOP_K]
        for pairs in np.bincount(chosen.ravel(), minlength=NUM_EXPERTS):
            whole, rest = divmod(int(pairs), block)
            items += whole + (rest > 0)
            many += block * (whole + (rest > small))
            few += small * (0 < rest <= small)
    return items / ROUTINGS, few / ROUTINGS, many / ROUTINGS


def _pairs(launch: Launch) -> int:
    """Of a launch of the experts: a row and one of its experts."""
    order: torch.Tensor = launch.args[launch.kernel.arg_names.index("ORDER")]
    return order.numel()


def _routed(launch: Launch) -> tuple[float, float, float]:
    return _items(launch.constants["BN"], launch.constants["SMALL"], _pairs(launch) // TOP_K)


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
        items, _, _ = _routed(launch)
        active *= items / launch.grid[1]
    for operation, n in artefact.operations.items():
        done[operation] += (n - inside[operation]) * active * artefact.warps
    return done


def _trips(launch: Launch, artefact: Artefact, programs: int) -> Iterator[tuple[Loop, float]]:
    """(loop, how often all warps of the launch together go through it)."""
    multiplying = sorted((loop for loop in artefact.loops if loop.mma), key=loop_flops)
    if EXPERTS.match(launch.name) and multiplying:
        _, few, many = _routed(launch)
        pairs = _pairs(launch)
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


# What is stored


def compiled(workers: int = 2) -> dict[str, Any]:
    """Every step and first pass on every card, compiled and predicted."""
    entries = {entry.name: entry for entry in CONFIGURATIONS}
    found: dict[str, Any] = {"steps": {}, "floors": {}, "launches": {}}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = {}
        for name, _, _, card in passes():
            for number, launch in enumerate(recorded(entries[name], CARDS[card])):
                key = key_of(launch, CARDS[card])
                if key not in jobs:
                    jobs[key] = pool.submit(compile_numbered, name, card, number)
        artefacts = {key: job.result() for key, job in jobs.items()}
    for checkpoint, light, card in wanted():
        bound = round(floor(checkpoint, light, CARDS_AT_BEST[card]), 2)
        found["floors"].setdefault(card, {})[steps.name(checkpoint, light)] = bound
    for name, checkpoint, light, card in passes():
        found["steps"].setdefault(card, {})[name] = summary(
            recorded(entries[name], CARDS[card]),
            artefacts,
            card,
            steps.lasting(checkpoint, light),
            found["launches"].setdefault(card, {}),
        )
    return found


def passes() -> Iterator[tuple[str, str, bool, str]]:
    """(name of a configuration, checkpoint, light, card): every step, then every first pass that is configured."""
    configured = {entry.name for entry in CONFIGURATIONS}
    for name_of in (steps.name, lambda checkpoint, light: first_of(steps.name(checkpoint, light))):
        for checkpoint, light, card in wanted():
            if name_of(checkpoint, light) in configured:
                yield name_of(checkpoint, light), checkpoint, light, card


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="only write the pages from what is stored")
    if not parser.parse_args().render:
        STORED.write_text(json.dumps(compiled(), indent=1) + "\n")
    stored = read()
    README.write_text(render(stored))
    make_roofline.main()
    print(steps_table(stored), gaps_table(stored), sep="\n")


if __name__ == "__main__":
    main()
