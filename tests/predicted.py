"""What tests/compile/report.json says of a denoising step, and what follows from it: times, parts, launches, canvases.

tests/kernel_report.py predicts every launch and stores it; this file reads that, and is all that the page and the
picture in docs/ are made from. Nothing here was measured by this project, and nothing here imports torch.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STORED = ROOT / "tests/compile/report.json"

Stored = Mapping[str, Any]
Range = tuple[float, float]  # from, to


@dataclass(frozen=True, slots=True)
class Card:
    """What a card does at best: bytes and operations a second, cycles a second."""

    title: str
    arch: str
    bandwidth: float
    rates: Mapping[str, float]  # of mma by their first letters
    floor: Mapping[str, float]  # the best rates by format, for the floor
    clock: float
    l2: int  # bytes
    integer: int  # cycles in which a quarter of a processor issues one warp's integer instruction


# Bandwidth: what was measured by others (4090: clpeak#106; 5090: ninfer-3090#17), of an H200 90 % of the datasheet. Rates:
# dense, fp32 sums; datasheets, but of the 5090 measured ones (bf16 235; FP8 507, with unit block scales 785; NVFP4 from
# Triton 3.6 874, in its floor the datasheet's 1,676). mma.sync on Hopper reaches 62.9 % of wgmma (arXiv 2402.13499).
# Clocks are those at which the datasheets' rates come out.
CARDS_AT_BEST = {
    "ada": Card(
        "RTX 4090", "sm_89", 921e9,
        {"HMMA": 165.2e12, "QMMA": 330.3e12}, {"bf16": 165.2e12, "fp8": 330.3e12, "nvfp4": 165.2e12}, 2.52e9, 72 << 20, 2,
    ),
    "hopper": Card(
        "H200", "sm_90", 4300e9,
        {"HGMMA": 989e12, "QGMMA": 1979e12, "HMMA": 622e12, "QMMA": 1245e12},
        {"bf16": 989e12, "fp8": 1979e12, "nvfp4": 989e12}, 1.83e9, 50 << 20, 2,
    ),
    "blackwell": Card(
        "RTX 5090", "sm_120", 1674e9,
        {"HMMA": 235e12, "QMMA": 507e12, "QMMA.SF": 785e12, "OMMA": 874e12}, {"bf16": 235e12, "fp8": 785e12, "nvfp4": 1676e12}, 2.41e9, 96 << 20, 1,
    ),
}  # fmt: skip

CHECKPOINTS = {"redhat-nvfp4": "RedHat NVFP4", "nvidia-nvfp4": "NVIDIA NVFP4", "redhat-fp8-dynamic": "RedHat FP8"}

# Between the end of one kernel and the start of the next that needs it, a kernel's own fixed latency included, in µs.
# In a graph: 0.58 a node, up to 117 empty kernels on a laptop's RTX 5070 Ti, sm_120 (ahrefs/ocannl#488); 1.3 on an H100,
# where a stream takes 2.1 (Hazy Research, "Look Ma, No Bubbles", 2025-05-27, read second hand). Between them 0.96, what
# programmatic launch took out of a pair of empty kernels in a graph (pegainfer#569).
GRAPH_GAP: Range = (0.58, 1.3)
STREAM_GAP = 2.1
# The host's time a launch through Triton's launcher, in µs: 13.2 for a kernel of 19 arguments (tritonbench#669,
# triton 3.5; 8.7 on a GB200's host, vllm#34838). The upper end is an estimate: as much again and a little for what a
# wrapper does before, which is to check shapes and to allocate its outputs.
HOST: Range = (13.2, 30.0)
GRAPH_LAUNCH = 15.0  # µs from the host's call until the first node runs (ocannl#488); hidden where the host runs ahead

# torch's own launches in a first pass, which fill the rotary tables of two segments on two kinds of layer: every one a node
# of the graph, and too short to take time beyond its gap. tests/compile/test_report.py counts them.
ROTARY_TABLES = 44

STEPS, CANVAS = 16, 256  # vLLM's protocol: a fixed number of steps, every token of the canvas counted
PUBLISHED_H200 = 1288  # tok/s by it of vLLM, FP8 on an H200 (vLLM blog, 2026-06-10, as corrected there)

# Milliseconds a step and tokens a second: the goal, and what it must reach at the least. Set from the floors before
# there was a kernel; for FP8 on an H200 a least only.
Aim = tuple[float, float]
GOALS: Mapping[tuple[str, str], tuple[Aim | None, Aim]] = {
    ("ada", "nvfp4"): ((20.0, 800), (23.0, 650)),
    ("blackwell", "nvfp4"): ((11.5, 1390), (14.0, 1100)),
    ("hopper", "nvfp4"): ((5.0, 3150), (6.5, 2300)),
    ("hopper", "fp8"): (None, (8.5, 1800)),
}


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(STORED.read_text())
    return found


def step_of(checkpoint: str, light: bool = False) -> str:
    """The name under which a step is compiled and stored, `steps.name`'s."""
    return f"step/{checkpoint}" + (", light" if light else "")


def first_of(step: str) -> str:
    """The same of the first pass of a canvas: 256 rows that join the cache and 256 of step 0, together."""
    return step.replace("step/", "first/", 1)


def wanted() -> Iterator[tuple[str, bool, str]]:
    """(checkpoint, light, card) of every step that is predicted."""
    for card in CARDS_AT_BEST:
        for checkpoint in CHECKPOINTS:
            for light in (False, True):
                yield checkpoint, light, card


# Launches, and parts that a reader of the model knows


@dataclass(frozen=True, slots=True)
class Part:
    """Launches of a step that belong together: milliseconds, bytes that reach the memory, flops, and how many they are."""

    ms: float = 0.0
    bytes: float = 0.0  # of a launch whose memory takes less than 5 % of its time none are stored
    flops: float = 0.0
    launches: int = 0

    def __add__(self, other: "Part") -> "Part":
        return Part(
            self.ms + other.ms,
            self.bytes + other.bytes,
            self.flops + other.flops,
            self.launches + other.launches,
        )


PARTS = {
    "experts": ("experts_grouped", "experts_nvfp4_nvfp4"),
    "dense products": ("fp8_linear", "bf16_linear", "nvfp4_linear", "nvfp4_nvfp4_linear", "rows"),
    "vocabulary": ("logits", "draw", "soft", "soft_fp8"),
    "attention": ("attention", "heads"),
}
REST = "norms, router, sampler"


def launched(stored: Stored, card: str, step: str) -> Iterator[tuple[str, Part]]:
    """(label, all its launches in the step)."""
    for label, n in stored["steps"][card][step].items():
        line = stored["launches"][card][label]
        from_memory = line["limits"].get("memory", 0.0) / 1e6 * CARDS_AT_BEST[card].bandwidth
        yield label, Part(n * max(line["limits"].values()) / 1e3, n * from_memory, n * line["flops"], n)


def part_of(label: str) -> str:
    kernel = label.rsplit(" ", 1)[0].split(".")[0]
    return next((part for part, kernels in PARTS.items() if kernel in kernels), REST)


def parts(stored: Stored, card: str, step: str) -> dict[str, Part]:
    found = {part: Part() for part in (*PARTS, REST)}
    for label, part in launched(stored, card, step):
        found[part_of(label)] += part
    return found


def whole(stored: Stored, card: str, step: str) -> Part:
    return sum((part for _, part in launched(stored, card, step)), Part())


def milliseconds(stored: Stored, card: str, step: str) -> float:
    """The kernels alone, one after another."""
    return whole(stored, card, step).ms


# A step with its gaps, and a canvas of steps


def in_graph(step: Part) -> Range:
    low, high = (step.ms + step.launches * gap / 1e3 for gap in GRAPH_GAP)
    return low, high


def eagerly(step: Part) -> Range:
    """Whoever is slower, card or host. A bound from below: while kernels are shorter than a launch, the card waits."""
    card = step.ms + step.launches * STREAM_GAP / 1e3
    low, high = (max(card, step.launches * host / 1e3) for host in HOST)
    return low, high


def first(stored: Stored, card: str, step: str) -> Part:
    """The first pass of a canvas of such steps: its own launches, and torch's."""
    return whole(stored, card, first_of(step)) + Part(launches=ROTARY_TABLES)


def canvas_ms(stored: Stored, card: str, step: str) -> Range:
    """A canvas of STEPS steps in graphs. The first pass commits the canvas before, so that no other pass does."""
    begun, steady = in_graph(first(stored, card, step)), in_graph(whole(stored, card, step))
    return begun[0] + (STEPS - 1) * steady[0], begun[1] + (STEPS - 1) * steady[1]


def tokens_a_second(stored: Stored, card: str, step: str) -> Range:
    """From the slow end to the fast one."""
    low, high = canvas_ms(stored, card, step)
    return CANVAS / high * 1e3, CANVAS / low * 1e3


def aims(card: str, checkpoint: str) -> tuple[Aim | None, Aim] | None:
    return GOALS.get((card, "fp8" if "fp8" in checkpoint else "nvfp4"))


def between(low_high: Range, digits: int = 1) -> str:
    """21.3 … 21.7, or one number where both are written alike."""
    low, high = (f"{x:,.{digits}f}" for x in low_high)
    return low if low == high else f"{low} … {high}"
