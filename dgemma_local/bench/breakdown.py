"""Where a denoising step's time goes: on a card kernel by kernel, elsewhere by the doors of `ops`.

    on the kernels    eager steps, each launch between two events, whatever lies between launches beside them
    in plain torch    whole steps, a clock in each of the model's operations while it runs; the rest is torch between

On a card the host must not be measured: before the first launch of a step the card is put to sleep until the host has
queued all of it. A launch's time is the median over REPEATS steps, its two events included (`us_of_nothing` of
tests/gpu/times.py); a kernel's row is the sum of its launches. So the rows are of a step launched one by one, an upper
bound of what a graph of the same launches takes.

Bandwidth is bytes that a kernel must move, by its own `Cost`, over its time; held against a copy of COPY bytes that is
measured on the same card in the same run. The roofline is the larger of bytes at the copy's rate and flops at the
card's peak, launch by launch; on cards whose peaks are not known here it is left out.

A row is a dict, the same keys in each, null where there is nothing to say:

    part         kernel, operation, or one of the rows at the end: BETWEEN, WHOLE, on a card the copy
    count        launches or calls a step
    ms           milliseconds a step
    share        of the step, 0 … 1
    bytes, flops a step, at the least
    gb_s         bytes over ms, in 10⁹ bytes a second
    of_copy      gb_s over the copy's
    of_roofline  time at the roofline over ms
"""

import os
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dgemma_local import ops, sampler
from dgemma_local.cache import Room
from dgemma_local.config import GenerationConfig
from dgemma_local.model import PREFILL_CHUNK, DiffusionGemma
from dgemma_local.noise import PhiloxNoise

if TYPE_CHECKING:  # as in ops
    from kernels._launch import Cost, Launch, watching  # noqa: TID251
else:
    from dgemma_local.kernels._launch import Cost, Launch, watching

CONTEXT = 1024  # committed tokens, as of kernels/README.md; less where the plan has less
WARM_UP, REPEATS = 4, 10  # steps
SECONDS = 60.0  # no further step is begun after, in plain torch: the real model takes minutes there
SETTINGS = GenerationConfig(  # of the released model; a mean entropy is never strictly below 0, so that nothing stops
    steps=WARM_UP + REPEATS + 1,  # the last one makes no soft embedding
    t_min=0.4,
    t_max=0.8,
    entropy_bound=0.1,
    confidence=0.0,
    stability=1,
    end_ids=(),
    pad_id=0,
)
LAST = "canvas.update"  # a step's last launch
BETWEEN_LAUNCHES, BETWEEN_DOORS, WHOLE = "between the launches", "torch between them", "whole step"
COPY = 1 << 30  # bytes read, and as many written
COPY_TIMES, COPY_WARM_UP = 20, 5
SLEEP = 200_000_000  # cycles, 0.1 s at 2 GHz: longer than the host takes to queue a step's launches and their events

DOORS = (
    "embed", "rms_norm", "sandwich", "combine", "linear", "gated", "heads", "attention", "route", "experts"
)  # fmt: skip

# Dense peaks in flop/s by units, with sums in fp32: NVIDIA's data sheets; of the RTX 5090, as tests/predicted.py has
# them, what was measured in bf16 and in FP8 with block scales, which is more. Whole names, for a laptop's card has a
# desktop's in its own.
PEAKS: Mapping[str, Mapping[str, float]] = {
    "NVIDIA GeForce RTX 4090": {"bf16": 165.2e12, "fp8": 330.3e12, "fp32": 82.6e12},
    "NVIDIA GeForce RTX 5090": {"bf16": 235e12, "fp8": 785e12, "fp4": 1676e12, "fp32": 104.8e12},
    "NVIDIA H200": {"bf16": 989e12, "fp8": 1979e12, "fp32": 67e12},
    "NVIDIA H100 80GB HBM3": {"bf16": 989e12, "fp8": 1979e12, "fp32": 67e12},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """See above."""

    part: str
    count: float | None = None
    ms: float
    share: float | None = None
    bytes: int | None = None
    flops: int | None = None
    gb_s: float | None = None
    of_copy: float | None = None
    of_roofline: float | None = None


def breakdown(network: DiffusionGemma, room: Room | None, device: torch.device) -> list[dict[str, Any]]:
    """Rows of one denoising step, the largest first. `room`: what the conversation is planned for; it limits CONTEXT.

    Takes memory for a cache of CONTEXT tokens and, on a card, for the copy. Leaves nothing changed.
    """
    most = network.max_positions if room is None else min(room.context, network.max_positions)
    committed = max(1, min(CONTEXT, most - 2 * network.canvas_length))
    kernels = ops.why_torch(network.device, network.dtype) is None
    if kernels and (device.type == "cuda" or ops.mended()):
        clock: Clock = CardClock(device) if device.type == "cuda" else HostClock()
        copy = copy_seconds(device, clock) if device.type == "cuda" else None
        peaks = PEAKS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        rows = by_launches(_eager(network, committed), network, committed, clock, copy, peaks)
    else:
        rows = by_doors(network, committed, _waiting(device))
    return [asdict(row) for row in rows]


# ── the steps that are measured ───────────────────────────────────────────────────────────────────────────────────


def _room(network: DiffusionGemma, committed: int) -> Room:
    """For the committed tokens, and a canvas behind them."""
    L = network.canvas_length
    rows = max(PREFILL_CHUNK, 2 * L)  # the widest pass: a chunk, or a canvas that joins and the next one
    return Room(context=max(committed + L, rows), rows=rows, slack=0)


def _eager(network: DiffusionGemma, committed: int) -> Any:
    """The network on the kernels, launch by launch: a graph's replay is none that could be watched."""
    from dgemma_local.captured import Captured

    wishes = os.environ.get("DGEMMA_OPS")
    os.environ["DGEMMA_OPS"] = f"{wishes or ''} eager"
    try:
        return Captured(network, _room(network, committed))
    finally:
        if wishes is None:
            del os.environ["DGEMMA_OPS"]
        else:
            os.environ["DGEMMA_OPS"] = wishes


def _steps(model: Any, network: DiffusionGemma, committed: int) -> Generator[sampler.Canvas, None, None]:
    """The steps of one canvas behind `committed` random tokens."""
    L, V = network.canvas_length, network.config.vocab_size
    ids = torch.randint(V, (committed,), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache()
    before = max(0, committed - L)  # what is left joins the cache with the first step, where passes are shared
    if before:
        model.encode(ids[:before], cache)
    yield from model.denoising(ids[before:].tolist(), 0, cache, SETTINGS, PhiloxNoise(0, L, V, network.device))


# ── launch by launch ──────────────────────────────────────────────────────────────────────────────────────────────


class Clock(Protocol):
    """Moments in the order of the launches."""

    def ahead(self) -> None:
        """The host is about to queue a step."""
        ...

    def mark(self) -> Any:
        """Now, behind all that was launched."""
        ...

    def wait(self) -> None:
        """Until every mark has been passed."""
        ...

    def ms(self, begin: Any, end: Any) -> float: ...


class CardClock:
    """CUDA events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def ahead(self) -> None:
        torch.cuda._sleep(SLEEP)

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def ms(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end))


class HostClock:
    """Of Triton's interpreter, which launches nothing and returns when it is done."""

    def ahead(self) -> None: ...

    def mark(self) -> float:
        return time.perf_counter()

    def wait(self) -> None: ...

    def ms(self, begin: float, end: float) -> float:
        return (end - begin) * 1e3


@dataclass(slots=True)
class _Watched:
    """One launch. Its arguments are not kept: a step's tensors would all stay."""

    title: str
    cost: Cost
    begin: Any
    end: Any


@dataclass(slots=True)
class Watcher:
    """Puts a mark before and behind every launch, and tells steps apart by their last one."""

    clock: Clock
    steps: list[list[_Watched]] = field(default_factory=lambda: [[]])

    def __call__(self, launch: Launch, run: Callable[[], None]) -> None:
        if not self.steps[-1]:
            self.clock.ahead()
        begin = self.clock.mark()
        run()
        title = title_of(launch)
        self.steps[-1].append(_Watched(title, launch.cost, begin, self.clock.mark()))
        if title == LAST:
            self.steps.append([])


def title_of(launch: Launch) -> str:
    """File and kernel, once where they are called alike."""
    file = launch.kernel.fn.__module__.rsplit(".", 1)[-1]
    return launch.name if launch.name.startswith(file) else f"{file}.{launch.name}"


def copy_seconds(device: torch.device, clock: Clock, size: int = COPY) -> float:
    """Of a byte that is copied on the card, read and written: two bytes' traffic. Median of COPY_TIMES copies."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    marks = []
    for _ in range(COPY_WARM_UP + COPY_TIMES):
        begin = clock.mark()
        target.copy_(source)
        marks.append((begin, clock.mark()))
    clock.wait()
    return statistics.median(clock.ms(*pair) for pair in marks[COPY_WARM_UP:]) / 1e3 / size


def by_launches(
    model: Any,
    network: DiffusionGemma,
    committed: int,
    clock: Clock,
    copy: float | None,
    peaks: Mapping[str, float] | None,
) -> list[Row]:
    """A row a kernel. `copy`: seconds of a byte that is read and written; `peaks`: flop/s by rate; None: not known."""
    watcher = Watcher(clock)
    with watching(watcher):
        for _ in _steps(model, network, committed):
            pass
    clock.wait()
    return summed(watcher.steps, clock, copy, peaks)


def summed(
    watched: Sequence[Sequence[_Watched]], clock: Clock, copy: float | None, peaks: Mapping[str, float] | None
) -> list[Row]:
    """Of the last REPEATS whole steps, which launch the same kernels in the same order."""
    whole = [step for step in watched if step and step[-1].title == LAST]
    titles = [launch.title for launch in whole[-1]] if whole else []
    alike = [step for step in whole if [launch.title for launch in step] == titles][-REPEATS:]
    if len(alike) < REPEATS:
        raise RuntimeError(f"{len(alike)} steps of the same launches were watched, wanted {REPEATS}")
    span = statistics.median(clock.ms(step[0].begin, step[-1].end) for step in alike)
    byte = None if copy is None else copy / 2  # seconds of one byte's traffic
    parts: dict[str, list[tuple[float, Cost]]] = {}
    for at in zip(*alike, strict=True):
        median = statistics.median(clock.ms(launch.begin, launch.end) for launch in at)
        parts.setdefault(at[0].title, []).append((median, at[0].cost))
    rows = [_row(title, launches, span, byte, peaks) for title, launches in parts.items()]
    rows.sort(key=lambda row: -row.ms)
    everything = [launch for launches in parts.values() for launch in launches]
    between = span - sum(row.ms for row in rows)
    rows.append(Row(part=BETWEEN_LAUNCHES, ms=between, share=between / span))
    rows.append(_row(WHOLE, everything, span, byte, peaks, ms=span))
    if byte is not None:
        ms = COPY * 2 * byte * 1e3
        rows.append(Row(part="a copy of 1 GiB, for comparison", count=1, ms=ms, bytes=2 * COPY, gb_s=1 / byte / 1e9))
    return rows


def _row(
    part: str,
    launches: Sequence[tuple[float, Cost]],
    span: float,
    byte: float | None,
    peaks: Mapping[str, float] | None,
    ms: float | None = None,
) -> Row:
    ms = sum(each for each, _ in launches) if ms is None else ms
    moved, flops = sum(cost.bytes for _, cost in launches), sum(cost.flops for _, cost in launches)
    least = [_at_the_roofline(cost, byte, peaks) for _, cost in launches]
    known = [each for each in least if each is not None]
    return Row(
        part=part,
        count=len(launches),
        ms=ms,
        share=ms / span,
        bytes=moved,
        flops=flops,
        gb_s=moved / ms / 1e6,
        of_copy=None if byte is None else moved * byte * 1e3 / ms,
        of_roofline=sum(known) * 1e3 / ms if len(known) == len(least) else None,
    )


def _at_the_roofline(cost: Cost, byte: float | None, peaks: Mapping[str, float] | None) -> float | None:
    """Seconds; None where a rate is not known."""
    if byte is None or (cost.flops and cost.rate not in (peaks or {})):
        return None
    return max(cost.bytes * byte, cost.flops / peaks[cost.rate] if peaks and cost.flops else 0.0)


# ── by the doors of ops ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class SelfTimes:
    """Seconds and calls by name; what a call spends in another one counts there."""

    now: Callable[[], float]
    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    _inside: list[float] = field(default_factory=list)  # of the calls in progress: seconds of those they made

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self._inside.append(0.0)
            begin = self.now()
            try:
                return function(*arguments, **named)
            finally:
                took, inside = self.now() - begin, self._inside.pop()
                self.seconds[name] = self.seconds.get(name, 0.0) + took - inside
                self.calls[name] = self.calls.get(name, 0) + 1
                if self._inside:
                    self._inside[-1] += took

        return call

    def clear(self) -> None:
        self.seconds.clear()
        self.calls.clear()


@contextmanager
def clocks_in(network: DiffusionGemma, times: SelfTimes) -> Iterator[None]:
    """The model's operations with a clock in each; as they were afterwards, whatever happens."""
    places: list[tuple[Any, str, str]] = [(ops, name, name) for name in DOORS]
    places += [(network, "head", "head"), (network, "soften", "soft embedding"), (sampler, "advance", "sampler")]
    own = [(place, name, name in vars(place), getattr(place, name)) for place, name, _ in places]
    try:
        for place, name, label in places:
            setattr(place, name, times.timed(label, getattr(place, name)))
        yield
    finally:
        for place, name, was_its_own, function in own:
            if was_its_own:
                setattr(place, name, function)
            else:
                vars(place).pop(name, None)  # of a method: the class's is seen again


def by_doors(network: DiffusionGemma, committed: int, now: Callable[[], float]) -> list[Row]:
    """A row an operation: means over the steps behind the warm-up, so that they sum up to the whole."""
    times = SelfTimes(now)
    started, measured, spent = now(), 0, 0.0
    with clocks_in(network, times):
        steps = _steps(network, network, committed)
        for number in range(WARM_UP + REPEATS):
            if number == WARM_UP:
                times.clear()
            begin = now()
            next(steps)
            if number >= WARM_UP:
                measured, spent = measured + 1, spent + now() - begin
                if now() - started > SECONDS:
                    break
        steps.close()
    rows = [
        Row(part=name, count=times.calls[name] / measured, ms=seconds / measured * 1e3, share=seconds / spent)
        for name, seconds in times.seconds.items()
    ]
    rows.sort(key=lambda row: -row.ms)
    between = spent - sum(times.seconds.values())
    rows.append(Row(part=BETWEEN_DOORS, ms=between / measured * 1e3, share=between / spent))
    rows.append(Row(part=WHOLE, ms=spent / measured * 1e3, share=1.0))
    return rows


def _waiting(device: torch.device) -> Callable[[], float]:
    """A clock that waits for the device first."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now
