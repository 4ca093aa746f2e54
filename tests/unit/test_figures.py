"""The statistics of a run: medians and whole times, no rate over a moment, and what a canvas costs."""

import statistics

import pytest
from fake_session import LENGTH, spell
from hypothesis import given
from hypothesis import strategies as st

from dgemma_local.events import CanvasCommitted, Event, Finished, Prefilled, StepDone
from dgemma_local.ui.figures import ENOUGH, SHORTEST_WALL, Counts, Times, lines, median, quantile


def counts(**others: int) -> Counts:
    given = {
        "prompt": 40,
        "reused": 8,
        "joining": 0,
        "length": 256,
        "most": 48,
        "last": 12,
        "tokens": 268,
        "thought": 0,
    }
    return Counts(**{**given, **others}, taken=[10, 12])


def step(canvas: int = 0) -> StepDone:
    return StepDone(canvas, 0, 8, 0.8, (1,), (1,), (True,), (1,), (0.0,), False)


def timed(*events: tuple[Event, float]) -> Times:
    times = Times()
    for event, seconds in events:
        times.take(event, seconds)
    return times


def told(times: Times, wall: float = 2.0, **others: int) -> dict[str, str]:
    """Each line by its first word."""
    return {line.split()[0]: line for line in lines(counts(**others), times, wall)}


def test_a_whole_run() -> None:
    times = timed(
        (Prefilled(tokens=40, reused=8), 0.1),
        *[(step(0), 0.010)] * 9,
        (step(0), 0.050),
        (CanvasCommitted(0, (1,) * 256, 256, 10, True), 0.02),
        *[(step(1), 0.012)] * 12,
        (CanvasCommitted(1, (1,) * 256, 12, 12, True), 0.02),
        (Finished("end", (1,) * 268, 2, 22), 0.0),
    )
    assert lines(counts(), times, 2.0) == [
        "prompt    40 tokens, 8 of them reused, 100 ms",
        "first     draft after 110 ms, the first canvas after 260 ms",
        "steps     22; p50 12.0 ms, p95 12.0 ms",
        "canvases  2 of 256 tokens, 10, 12 of at most 48 steps",
        "          a step computes the whole canvas: the 12 tokens of the last cost as much as 256 would",
        "context   10.0 ms a step behind 40 tokens, 12.0 ms a step behind 296 tokens; 308 tokens at the end",
        "tokens    268 without padding: 12.2 a forward pass",
        "wall      2.00 s: 134.0 tokens/s from end to end",
    ]


def test_one_canvas_says_its_context_once() -> None:
    times = timed((Prefilled(9, 0), 0.1), (step(), 0.01), (CanvasCommitted(0, (1,) * 16, 3, 1, True), 0.0))
    assert told(times)["context"].count("a step behind") == 1


def test_a_canvas_counts_its_own_steps() -> None:
    commit = CanvasCommitted(0, (1,) * 16, 16, 5, True)
    times = timed(*[(step(), 0.01)] * 5, (commit, 0.0), *[(step(1), 0.03)] * 2, (commit, 0.0))
    assert [seconds for _, seconds in times.canvases] == [0.01, 0.03]


def test_few_steps_have_a_slowest_and_no_p95() -> None:
    few = timed(*[(step(), 0.01)] * (ENOUGH - 2), (step(), 0.5))
    assert told(few)["steps"].endswith("p50 10.0 ms, slowest 500 ms")
    many = timed(*[(step(), 0.01)] * (ENOUGH - 1), (step(), 0.5))
    assert told(many)["steps"].endswith("p50 10.0 ms, p95 10.0 ms")


@pytest.mark.parametrize("wall", [0.0, 1e-9, 0.99 * SHORTEST_WALL])
def test_no_rate_over_a_moment(wall: float) -> None:
    assert "tokens/s" not in "".join(lines(counts(), timed((step(), 0.0)), wall))


def test_a_rate_over_long_enough() -> None:
    assert told(Times(), SHORTEST_WALL)["wall"].endswith("268.0 tokens/s from end to end")


def test_a_run_of_nothing() -> None:
    nothing = Counts(prompt=0, reused=0, joining=0, length=16, most=4, taken=[], last=0, tokens=0, thought=0)
    assert lines(nothing, Times(), 5.0) == [
        "prompt    0 tokens, 0 of them reused, 0.0 ms",
        "steps     0",
        "wall      5.00 s",
    ]


def test_thoughts_are_counted_apart() -> None:
    assert (
        "268 without padding, 100 of them thought: 268.0 a forward pass"
        in told(timed((step(), 0.1)), thought=100)["tokens"]
    )


def test_what_was_tried_again_is_not_the_next_canvas() -> None:
    """Times of a canvas are of the steps since the canvas before."""
    events = [(event, 0.01) for event in spell("Hi user Hi user model user Hi user model Hi user Hi user model")]
    times = timed(*events)
    assert len(times.canvases) > 1 and times.canvases[1][0] == times.canvases[0][0] + LENGTH


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50), st.floats(0, 1))
def test_a_quantile_is_the_smallest_value_that_so_many_do_not_exceed(values: list[float], share: float) -> None:
    found = quantile(values, share)
    assert found in values and sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert sum(value < found for value in values) <= share * len(values)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50))
def test_a_median_has_as_many_below_as_above(values: list[float]) -> None:
    found = median(values)
    assert found == pytest.approx(statistics.median(values))
    assert sum(value < found for value in values) <= len(values) / 2 >= sum(value > found for value in values)


def test_two_steps_have_a_median_of_both() -> None:
    assert told(timed((step(), 0.01), (step(), 0.03)))["steps"].endswith("p50 20.0 ms, slowest 30.0 ms")


def test_the_sampler_s_settings_are_told_where_they_are_known() -> None:
    given = {"preset": "fast", "entropy_bound": 0.1, "confidence": 0.02, "stability": 1, "context": 99, "device": "cpu"}
    (line,) = [each for each in lines(counts(), Times(), 1.0, given) if each.startswith("sampler")]
    assert line == (
        "sampler   at most 48 steps a canvas, preset fast, entropy bound 0.1, mean entropy to stop 0.02, drafts to agree 1"
    )
    assert not [each for each in lines(counts(), Times(), 1.0, {"preset": None}) if each.startswith("sampler")]
