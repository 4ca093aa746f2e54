"""Where a step's time goes: sums that hold, nothing counted twice, and a model that is the same afterwards."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dgemma_local.kernels import _launch
from dgemma_local.kernels._launch import ADA, Cost, Launch, launch, recording, watching

from dgemma_local import ops, sampler
from dgemma_local.bench import breakdown, synthetic
from dgemma_local.cache import Room
from dgemma_local.model import DiffusionGemma

TESTS = Path(__file__).resolve().parents[1]
SIZES = replace(synthetic.small_config(), canvas_length=16, vocab_size=256)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def network() -> DiffusionGemma:
    return synthetic.make("bf16", CPU, context=1024, sizes=SIZES)[0]


class Ticking:
    """A clock that advances only when told."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time

    def work(self, seconds: float) -> None:
        self.time += seconds


def readings() -> Callable[[], float]:
    """A clock that advances by a second at each reading."""
    return map(float, itertools.count()).__next__


# ── by the doors ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_time_inside_another_door_counts_there_alone() -> None:
    clock = Ticking()
    times = breakdown.SelfTimes(clock)
    inner = times.timed("inner", lambda: clock.work(3.0))

    def body() -> str:
        clock.work(1.0)
        inner()
        inner()
        clock.work(0.5)
        return "made"

    assert times.timed("outer", body)() == "made"
    assert times.seconds == {"inner": 6.0, "outer": 1.5}
    assert times.calls == {"inner": 2, "outer": 1}


def test_a_door_that_raises_is_counted_and_leaves_the_clock_right() -> None:
    clock = Ticking()
    times = breakdown.SelfTimes(clock)

    def fails() -> None:
        clock.work(2.0)
        raise KeyError

    def outer() -> None:
        with suppress(KeyError):
            times.timed("fails", fails)()
        clock.work(1.0)

    times.timed("outer", outer)()
    assert times.seconds == {"fails": 2.0, "outer": 1.0}


def test_time_two_doors_down_is_taken_off_once() -> None:
    clock = Ticking()
    times = breakdown.SelfTimes(clock)
    inner = times.timed("inner", lambda: clock.work(4.0))
    middle = times.timed("middle", lambda: (clock.work(2.0), inner()))
    times.timed("outer", lambda: (clock.work(1.0), middle()))()
    assert times.seconds == {"inner": 4.0, "middle": 2.0, "outer": 1.0}


def test_rows_of_a_cpu_sum_up_to_the_step_and_name_every_door(network: DiffusionGemma) -> None:
    """The clock ticks at each reading: seconds are then readings, the same in every run."""
    rows = breakdown.by_doors(network, 20, readings())
    *parts, between, whole = rows
    by_name = {row.part: row for row in parts}
    assert set(by_name) == {*breakdown.DOORS, "head", "soft embedding", "sampler"}
    assert (between.part, whole.part) == (breakdown.BETWEEN_DOORS, breakdown.WHOLE)
    assert sum(row.ms for row in (*parts, between)) == pytest.approx(whole.ms)
    assert sum(row.share or 0.0 for row in (*parts, between)) == pytest.approx(1.0) and whole.share == 1.0
    assert [row.ms for row in parts] == sorted((row.ms for row in parts), reverse=True)
    layers = len(SIZES.layers)
    for name in ("attention", "heads", "route", "experts", "sandwich", "combine"):
        assert by_name[name].count == layers
    # qkv, o and down of each layer, and self-conditioning's
    assert by_name["linear"].count == 3 * layers + 1 and by_name["gated"].count == layers + 1
    assert by_name["head"].count == by_name["sampler"].count == by_name["soft embedding"].count == 1
    assert by_name["attention"].ms == layers * 1e3  # one reading before, one behind


def test_the_model_is_the_same_afterwards(network: DiffusionGemma) -> None:
    def places() -> list[dict[str, Any]]:
        return [dict(vars(ops)), dict(vars(sampler)), dict(vars(network))]

    before = places()
    with suppress(KeyError), breakdown.clocks_in(network, breakdown.SelfTimes(Ticking())):
        assert ops.linear is not before[0]["linear"] and "head" in vars(network)
        raise KeyError
    breakdown.by_doors(network, 20, readings())
    for now, then in zip(places(), before, strict=True):
        now.pop("_rotary", None), then.pop("_rotary", None)
        assert now == then
    assert not {"head", "soften"} & vars(network).keys()


def test_a_slow_model_is_measured_on_fewer_steps(network: DiffusionGemma, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakdown, "SECONDS", 0.0)
    asked: list[int] = []
    advance = sampler.advance
    monkeypatch.setattr(sampler, "advance", lambda *given: asked.append(1) or advance(*given))
    rows = breakdown.by_doors(network, 20, readings())
    assert len(asked) == breakdown.WARM_UP + 1 and rows[-1].part == breakdown.WHOLE


def test_the_table_is_plain_json_and_goes_as_far_as_the_room(
    network: DiffusionGemma, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    doors = breakdown.by_doors

    def spy(model: DiffusionGemma, committed: int, now: Callable[[], float]) -> list[breakdown.Row]:
        asked.append(committed)
        return doors(model, 20, now)

    monkeypatch.setattr(breakdown, "by_doors", spy)
    rows = breakdown.breakdown(network, Room(context=100, rows=64, slack=0), CPU)
    breakdown.breakdown(network, None, CPU)
    assert asked == [100 - 2 * 16, breakdown.CONTEXT]
    assert json.loads(json.dumps(rows)) == rows
    keys = {"part", "count", "ms", "share", "bytes", "flops", "gb_s", "of_copy", "of_roofline"}
    assert all(set(row) == keys for row in rows)
    assert rows[-1]["ms"] > 0 and rows[-1]["of_copy"] is None


# ── launch by launch ──────────────────────────────────────────────────────────────────────────────────────────────


class Kernel:
    """What launch() asks of one."""

    def __init__(self, name: str, file: str, ran: list[str]) -> None:
        self.__name__ = name
        self.fn = SimpleNamespace(__module__=f"dgemma_local.kernels.{file}")
        self.ran = ran

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *given, **named: self.ran.append(self.__name__)


def test_watched_launches_are_made_by_the_observer_and_tell_their_cost() -> None:
    ran: list[str] = []
    seen: list[Launch] = []

    def observer(noted: Launch, run: Callable[[], None]) -> None:
        seen.append(noted)
        if noted.grid == (2,):
            run()
            run()

    kernel = Kernel("_k", "file", ran)
    with watching(observer):
        launch(kernel, (2,), 7, cost=lambda: Cost(10, 20, "bf16"), warps=8, stages=3, X=1)
        launch(kernel, (1,), cost=lambda: Cost(1))
    assert ran == ["_k", "_k"]
    first = seen[0]
    assert (first.args, first.constants, first.warps, first.stages) == ((7,), {"X": 1}, 8, 3)
    assert first.cost == Cost(10, 20, "bf16") and first.name == "k"
    launch(kernel, (1,), cost=lambda: pytest.fail("nobody looks"))
    assert ran == ["_k"] * 3 and len(seen) == 2


def test_watching_ends_with_its_block_and_a_recording_comes_first() -> None:
    ran: list[str] = []
    seen: list[Launch] = []
    kernel = Kernel("_k", "file", ran)
    with suppress(KeyError), watching(lambda noted, run: seen.append(noted)):
        with recording(ADA) as recorded:
            launch(kernel, (1,), cost=lambda: Cost(1))
        with watching(lambda noted, run: run()):
            launch(kernel, (1,), cost=lambda: Cost(1))
        launch(kernel, (1,), cost=lambda: Cost(1))
        raise KeyError
    assert len(recorded) == 1 and len(ran) == 1 and len(seen) == 1
    assert _launch._observer is None


class Marks:
    """A clock for launches; `events` in order."""

    def __init__(self) -> None:
        self.time, self.slept = 0.0, 0

    def ahead(self) -> None:
        self.slept += 1

    def mark(self) -> float:
        return self.time

    def wait(self) -> None: ...

    def ms(self, begin: float, end: float) -> float:
        return end - begin


def watched(clock: Marks, steps: int, *, extra_at: int | None = None) -> breakdown.Watcher:
    """Steps of norm, product, product, update; each launch's time and the gaps grow from step to step."""
    watcher = breakdown.Watcher(clock)
    ran: list[str] = []
    for step in range(steps):
        names = [
            ("_norm", "norms", 4),
            ("_product", "product", 100),
            ("_product", "product", 50),
            ("_update", "canvas", 1),
        ]
        for name, file, took in [*names[:1], *names[: step == extra_at], *names[1:]]:
            cost = Cost(1000 * took, 4000 if file == "product" else 0, "bf16" if file == "product" else "fp32")
            noted = Launch(Kernel(name, file, ran), (1,), (), {}, 4, 2, cost)
            clock.time += 1.0  # between
            watcher(noted, lambda took=took, step=step: setattr(clock, "time", clock.time + took + step))
    return watcher


def test_rows_of_a_card_are_medians_by_position_summed_by_kernel() -> None:
    clock = Marks()
    steps = breakdown.REPEATS + 3
    watcher = watched(clock, steps, extra_at=0)
    assert clock.slept == steps + 0 and len(watcher.steps) == steps + 1
    rows = breakdown.summed(watcher.steps, clock, copy=2e-6, peaks={"bf16": 2e6})
    middle = sum(range(3, steps)) / breakdown.REPEATS
    *parts, between, whole, copied = rows
    assert [(row.part, row.count) for row in parts] == [("product", 2), ("norms.norm", 1), ("canvas.update", 1)]
    assert [row.ms for row in parts] == [150 + 2 * middle, 4 + middle, 1 + middle]
    assert between.ms == 3.0 and whole.ms == 155 + 4 * middle + 3
    assert sum(row.share or 0.0 for row in (*parts, between)) == pytest.approx(1.0)
    product = parts[0]
    assert (product.bytes, product.flops) == (150_000, 8000)
    assert product.gb_s == pytest.approx(150_000 / product.ms / 1e6)
    # a byte takes 1e-6 s: 100 and 50 ms; the flops 2 ms each
    assert product.of_copy == pytest.approx(150 / product.ms) == product.of_roofline
    assert whole.of_copy == pytest.approx(155 / whole.ms)
    assert copied.gb_s == pytest.approx(1e-3) and copied.ms == pytest.approx(2 * breakdown.COPY * 1e-3)


def test_the_roofline_is_the_flops_where_those_take_longer_and_absent_where_the_peak_is_not_known() -> None:
    clock = Marks()
    watcher = watched(clock, breakdown.REPEATS)
    slow = {row.part: row for row in breakdown.summed(watcher.steps, clock, copy=2e-6, peaks={"bf16": 4e4})}
    assert slow["product"].of_roofline == pytest.approx(
        200 / slow["product"].ms
    )  # 100 ms each; the second's bytes take 50
    without = {row.part: row for row in breakdown.summed(watcher.steps, clock, copy=2e-6, peaks=None)}
    assert without["product"].of_roofline is None and without["product"].of_copy is not None
    assert without["norms.norm"].of_roofline == without["norms.norm"].of_copy  # no flops: its bytes alone
    assert without[breakdown.WHOLE].of_roofline is None
    bare = breakdown.summed(watcher.steps, clock, copy=None, peaks=None)
    assert all(row.of_copy is None and row.of_roofline is None for row in bare)
    assert bare[-1].part == breakdown.WHOLE


def test_too_few_steps_are_no_measurement() -> None:
    clock = Marks()
    with pytest.raises(RuntimeError, match=f"{breakdown.REPEATS - 1} steps"):
        breakdown.summed(watched(clock, breakdown.REPEATS - 1).steps, clock, None, None)
    with pytest.raises(RuntimeError, match="0 steps"):
        breakdown.summed([[]], clock, None, None)


INTERPRETED = """
import json, sys
import interpreter
interpreter.install()
from dataclasses import replace
import torch, triton
from dgemma_local.bench import breakdown, synthetic
from dgemma_local.cache import Room
breakdown.REPEATS = 1
breakdown.SETTINGS = replace(breakdown.SETTINGS, steps=2)
whole = synthetic.small_config()
sizes = replace(whole, canvas_length=8, vocab_size=64, num_experts=4, layers=whole.layers[1:])
network = synthetic.make("nvfp4", "cpu", context=512, sizes=sizes)[0]
print(json.dumps(breakdown.breakdown(network, Room(context=24, rows=24, slack=0), torch.device("cpu"))))
"""


def test_real_launches_of_a_step_in_the_interpreter() -> None:
    """The rows of a card, but for its clock: every kernel of a step, as often as the step launches it."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(TESTS)}
    environment.pop("DGEMMA_OPS", None)
    done = subprocess.run([sys.executable, "-c", INTERPRETED], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    rows = {row["part"]: row for row in json.loads(done.stdout.splitlines()[-1])}
    layers = 2
    assert rows["canvas.update"]["count"] == 1
    assert rows["norms.sandwich"]["count"] == layers and rows["norms.combine"]["count"] == layers
    assert rows["heads"]["count"] == layers
    assert rows["whole step"]["count"] == sum(row["count"] for part, row in rows.items() if row["count"]) / 2
    assert rows["whole step"]["bytes"] > 0 and rows["between the launches"]["ms"] > 0
    parts = sum(row["ms"] for part, row in rows.items() if part != "whole step")
    assert parts == pytest.approx(rows["whole step"]["ms"])
