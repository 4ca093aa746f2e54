"""How long every launch of a denoising step takes on this card, and how near that is to what its memory can do.

    python tests/gpu/times.py [--out FILE]        default: tests/gpu_results/CARD-DATE.json, and a table

Each distinct launch of one step of every published checkpoint (tests/steps.py), as production makes it, with memory of
the real sizes that is filled on the card, a layer's at a time. Between two CUDA events: 20 launches to warm up, then 100,
before each of which the L2 is flushed by writing 256 MB, what the launch changes in place is put back, and the card is
kept busy until the host has queued the launch, so that no host time is measured. Median and 95th percentile; the pair of
events alone is measured, too, and not taken off. Bytes and flops are the kernel's own `Cost`, bandwidth is held against
a copy of 1 GB on the same card.

The sum of a step counts each launch as often as the step makes it, every time from a cold L2 and with its pair of events:
an upper bound of what a graph of the same launches would take.

A rehearsal (DGEMMA_GPU_SUITE_SMALL=1) goes the same way on a CPU; its numbers are of the interpreter and are none.
"""

import argparse
import datetime
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu import real

# isort: split
import torch
import triton
from dgemma_local.kernels._launch import Gpu, Launch
from gpu import replay
from torch import Tensor

RESULTS = real.TESTS / "gpu_results"
PREDICTED = real.TESTS / "compile/report.json"
CARDS = {(8, 9): "ada", (9, 0): "hopper", (12, 0): "blackwell"}
NOT_MEASURED = "rehearsal, not measured"
WARM_UP, TIMES = (1, 2) if real.REHEARSAL else (20, 100)
FLUSH = 1 << 16 if real.REHEARSAL else 256 << 20  # bytes, more than any card's L2
COPY = 1 << 16 if real.REHEARSAL else 1 << 30
BUSY_CYCLES = 400_000  # 0.2 ms: longer than triton takes to queue a launch
SMALL = 1 << 16  # bytes of a tensor that is put back before each launch: counters, flags, a canvas
IN_PLACE = {
    "soft.probabilities": ("RAW",)
}  # larger ones that a kernel changes; other outputs do not matter to its time
CLOCKS = "clocks.sm,clocks.mem,temperature.gpu,power.draw,pstate"


# ── the card ──────────────────────────────────────────────────────────────────────────────────────────────────────


def nvidia_smi(query: str) -> str:
    """Its answer, or why there is none."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"not known: {error}"
    return done.stdout.strip().splitlines()[0]


def card_name() -> str:
    return "none: Triton's interpreter on a CPU" if real.REHEARSAL else torch.cuda.get_device_name()


def stem(today: datetime.date) -> str:
    """Of the files that hold this card's results."""
    name = "rehearsal" if real.REHEARSAL else card_name().removeprefix("NVIDIA ")
    return f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}-{today.isoformat()}"


def facts(gpu: Gpu) -> dict[str, Any]:
    return {
        "what": NOT_MEASURED if real.REHEARSAL else "measured",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "card": card_name(),
        "capability": list(gpu.capability),
        "processors": gpu.processors,
        "driver": "none" if real.REHEARSAL else nvidia_smi("driver_version"),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "protocol": {"warm_up": WARM_UP, "times": TIMES, "flush_bytes": FLUSH, "copy_bytes": COPY},
    }


# ── one launch ────────────────────────────────────────────────────────────────────────────────────────────────────


class Clock:
    """Microseconds of single calls on the card."""

    def __init__(self) -> None:
        self.flush = torch.empty(FLUSH, dtype=torch.uint8, device=real.DEVICE)

    def times(self, call: Callable[[], object], before: Callable[[], None], warm_up: int, times: int) -> list[float]:
        for _ in range(warm_up):
            before()
            call()
        if real.REHEARSAL:
            return [self._on_the_host(call, before) for _ in range(times)]
        torch.cuda.synchronize()
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
        for start, end in pairs:
            before()
            self.flush.zero_()
            torch.cuda._sleep(BUSY_CYCLES)
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in pairs]

    def _on_the_host(self, call: Callable[[], object], before: Callable[[], None]) -> float:
        before()
        self.flush.zero_()
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


def keeper(launch: Launch, arguments: Mapping[str, Any]) -> Callable[[], None]:
    """Puts back what the launch finds: small tensors, and large ones that it changes in place."""
    changed = IN_PLACE.get(replay.title_of(launch), ())
    kept = [
        (t, t.clone())
        for name, t in arguments.items()
        if isinstance(t, Tensor) and (t.nbytes <= SMALL or name in changed)
    ]

    def put_back() -> None:
        for t, was in kept:
            t.copy_(was)

    return put_back


def measure(launch: Launch, memory: replay.Memory, clock: Clock, copy_rate: float) -> dict[str, Any]:
    arguments = memory.arguments(launch)
    put_back = keeper(launch, arguments)
    values = clock.times(lambda: memory.run(launch, arguments), put_back, WARM_UP, TIMES)
    put_back()
    memory.run(launch, arguments)  # what later launches read
    real.wait()
    median, cost = statistics.median(values), launch.cost
    return {
        "kernel": replay.title_of(launch),
        "us": round(median, 2),
        "us_p95": round(percentile(values, 0.95), 2),
        "us_min": round(min(values), 2),
        "grid": list(launch.grid),
        "warps": launch.warps,
        "stages": launch.stages,
        "constants": {name: str(value) for name, value in launch.constants.items()},
        "tensors": {n: [str(t.dtype), *t.shape] for n, t in arguments.items() if isinstance(t, Tensor)},
        "bytes": cost.bytes,
        "flops": cost.flops,
        "rate": cost.rate,
        "gigabytes_a_second": round(cost.bytes / median / 1e3, 1),
        "share_of_copy": round(cost.bytes / median / 1e3 / copy_rate, 4),
        "teraflops": round(cost.flops / median / 1e6, 2),
        "us_predicted": predicted(launch, replay.this_card()),
    }


def predicted(launch: Launch, gpu: Gpu) -> float | None:
    """What kernels/README.md says of the same launch on this kind of card."""
    stored = json.loads(PREDICTED.read_text())["launches"].get(CARDS.get(gpu.capability, ""), {})
    want = (replay.title_of(launch), list(launch.grid), launch.cost.bytes, launch.cost.flops)
    for label, line in stored.items():
        if (label.rsplit(" ", 1)[0], line["grid"], line["bytes"], line["flops"]) == want:
            return round(float(max(line["limits"].values())), 2)
    return None


def copy_rate(clock: Clock) -> dict[str, float]:
    """GB/s of a copy on the card, bytes read and written; and the pair of events around nothing, in µs."""
    a = torch.empty(COPY, dtype=torch.uint8, device=real.DEVICE).random_(0, 256)
    b = torch.empty_like(a)
    values = clock.times(lambda: b.copy_(a), lambda: None, 5, 20)
    nothing = clock.times(lambda: None, lambda: None, 5, 20)
    return {
        "gigabytes_a_second": round(2 * COPY / statistics.median(values) / 1e3, 4),
        "us": round(statistics.median(values), 1),
        "us_of_nothing": round(statistics.median(nothing), 2),
    }


# ── the steps ─────────────────────────────────────────────────────────────────────────────────────────────────────


def measured() -> dict[str, Any]:
    gpu, clock = replay.this_card(), Clock()
    found = facts(gpu) | {"clocks_before": nvidia_smi(CLOCKS) if not real.REHEARSAL else NOT_MEASURED}
    found["copy"] = copy_rate(clock)
    launches: dict[str, dict[str, Any]] = {}  # by group
    labels: dict[str, str] = {}
    steps: dict[str, Any] = {}
    failed: list[str] = []
    for step in replay.every_step(gpu.capability):
        groups = replay.distinct(replay.record(step, gpu))
        new = {group: launch for group, (launch, _) in groups.items() if group not in labels}
        memory = replay.Memory(list(new.values()))
        for group, launch in new.items():
            title = replay.title_of(launch)
            labels[group] = f"{title} {sum(k.rsplit(' ', 1)[0] == title for k in launches) + 1}"
            try:
                launches[labels[group]] = measure(launch, memory, clock, found["copy"]["gigabytes_a_second"])
            except Exception as error:  # the other launches are of interest all the same
                launches[labels[group]] = {"kernel": title, "failed": f"{type(error).__name__}: {error}"[:500]}
                failed.append(labels[group])
                print(f"{labels[group]} FAILED: {error}", flush=True)
            memory.forget(launch)
        counts = {labels[group]: count for group, (_, count) in groups.items()}
        steps[step.name] = summary(counts, launches)
    found |= {
        "clocks_after": nvidia_smi(CLOCKS) if not real.REHEARSAL else NOT_MEASURED,
        "steps": steps,
        "launches": launches,
        "failed": failed,
    }
    return found


def summary(counts: Mapping[str, int], launches: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    whole = not any("failed" in launches[label] for label in counts)
    total = sum(n * launches[label].get("us", 0.0) for label, n in counts.items()) / 1e3
    moved = sum(n * launches[label].get("bytes", 0) for label, n in counts.items())
    expected = [n * us for label, n in counts.items() if (us := launches[label].get("us_predicted")) is not None]
    return {
        "ms": round(total, 3) if whole else None,
        "ms_predicted": round(sum(expected) / 1e3, 3) if len(expected) == len(counts) else None,
        "launches": sum(counts.values()),
        "gigabytes": round(moved / 1e9, 3),
        "counts": dict(counts),
    }


def table(found: Mapping[str, Any]) -> str:
    head = f"{'launch':34}{'µs':>9}{'p95':>9}{'GB/s':>8}{'% copy':>8}{'Tflop/s':>9}{'predicted':>11}"
    lines = [f"{found['card']}, {found['what']}, copy {found['copy']['gigabytes_a_second']:.0f} GB/s", "", head]
    for label, line in found["launches"].items():
        if "failed" in line:
            lines.append(f"{label:34} failed")
            continue
        expected = "" if line["us_predicted"] is None else f"{line['us_predicted']:.1f}"
        lines.append(
            f"{label:34}{line['us']:9.1f}{line['us_p95']:9.1f}{line['gigabytes_a_second']:8.0f}"
            f"{line['share_of_copy'] * 100:8.0f}{line['teraflops']:9.1f}{expected:>11}"
        )
    lines += ["", f"{'step':52}{'ms':>9}{'predicted':>11}{'launches':>10}{'GB':>8}"]
    for name, step in found["steps"].items():
        ms, expected = ("" if step[k] is None else f"{step[k]:.2f}" for k in ("ms", "ms_predicted"))
        lines.append(f"{name:52}{ms:>9}{expected:>11}{step['launches']:10}{step['gigabytes']:8.2f}")
    return "\n".join(lines)


def write(found: Mapping[str, Any], out: Path) -> None:
    """A line a launch."""
    lines = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in found.items() if k not in ("steps", "launches")]
    for part in ("steps", "launches"):
        inner = ",\n".join(f"    {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in found[part].items())
        lines.append(f"  {json.dumps(part)}: {{\n{inner}\n  }}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the JSON file")
    parser.add_argument("--stem", action="store_true", help="print the name of this card's files, and do nothing else")
    arguments = parser.parse_args()
    if not real.REHEARSAL and not torch.cuda.is_available():
        sys.exit("times.py: no CUDA device, and times of none are not made up")
    if arguments.stem:
        print(stem(datetime.date.today()))
        return
    out = (arguments.out or RESULTS / f"{stem(datetime.date.today())}.json").resolve()
    if real.REHEARSAL and (out.is_relative_to(RESULTS) or RESULTS.name in out.parts):
        sys.exit(f"times.py: a rehearsal measures nothing, and does not write to {out}: give another --out")
    os.environ.pop("DGEMMA_OPS", None)
    found = measured()
    write(found, out)
    print(table(found))
    print(f"\n{out}")
    steps = {name: step["ms"] for name, step in found["steps"].items()}
    last = {k: found[k] for k in ("what", "card", "driver", "torch", "triton", "date", "copy", "failed")}
    print(json.dumps(last | {"steps_ms": steps}, ensure_ascii=False))
    sys.exit(bool(found["failed"]))


if __name__ == "__main__":
    main()
