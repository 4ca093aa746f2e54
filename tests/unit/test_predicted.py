"""What follows from tests/compile/report.json: parts, launches with their gaps, first passes, canvases, what a choice saves."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import predicted
import pytest
import speed_page
from predicted import CARDS_AT_BEST, GRAPH_GAP, HOST, ROTARY_TABLES, STREAM_GAP, Part, first_of, step_of

STEP = step_of("nvidia-nvfp4", light=True)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return predicted.read()


@pytest.mark.parametrize("card", CARDS_AT_BEST)
def test_the_parts_are_the_whole(card: str, report: dict[str, Any]) -> None:
    for checkpoint, light, of in predicted.wanted():
        if of == card:
            step = step_of(checkpoint, light)
            total, parts = predicted.whole(report, card, step), predicted.parts(report, card, step)
            assert sum(p.ms for p in parts.values()) == pytest.approx(total.ms)
            assert (
                sum(p.launches for p in parts.values()) == total.launches == sum(report["steps"][card][step].values())
            )
            assert parts["experts"].ms == max(p.ms for p in parts.values())
            assert all(part.launches for part in parts.values())


@pytest.mark.parametrize("card", CARDS_AT_BEST)
def test_no_part_is_above_its_roof(card: str, report: dict[str, Any]) -> None:
    best = CARDS_AT_BEST[card]
    for name, part in predicted.parts(report, card, STEP).items():
        if name != predicted.REST:
            roof = min(best.bandwidth * part.flops / part.bytes, best.floor["fp8"])
            assert 0.2 * roof < part.flops / part.ms * 1e3 <= 1.01 * roof, name  # rounded to three digits


def test_a_step_in_a_graph_pays_a_gap_a_launch() -> None:
    low, high = predicted.in_graph(Part(ms=10, launches=1000))
    assert low == pytest.approx(10 + GRAPH_GAP[0]) and high == pytest.approx(10 + GRAPH_GAP[1])


def test_eagerly_the_slower_of_card_and_host_counts() -> None:
    assert predicted.eagerly(Part(ms=100, launches=1000)) == pytest.approx((100 + STREAM_GAP,) * 2)
    assert predicted.eagerly(Part(ms=1, launches=1000)) == pytest.approx(HOST)
    assert GRAPH_GAP[0] < GRAPH_GAP[1] < STREAM_GAP < HOST[0] < HOST[1]


def two_launches(first: Mapping[str, int] = MappingProxyType({})) -> dict[str, Any]:
    """A report of one step: an expert product bound by memory, and a norm; of every card and step alike."""
    lines = {
        "experts_grouped.experts_gated 1": {"limits": {"memory": 900.0, "tensor cores": 500.0}, "flops": 10},
        "norms.rms_norm 1": {"limits": {"issue": 50.0}, "flops": 1},
    }
    steps = {
        step_of(c, light): {"experts_grouped.experts_gated 1": 10, "norms.rms_norm 1": 20}
        for c, light, _ in predicted.wanted()
    }
    steps |= {first_of(step): dict(first) for step in steps}
    return {"steps": dict.fromkeys(CARDS_AT_BEST, steps), "launches": dict.fromkeys(CARDS_AT_BEST, lines)}


def test_a_first_pass_has_launches_of_its_own() -> None:
    joined = predicted.first(two_launches(first={"norms.rms_norm 1": 7}), "ada", STEP)
    assert joined.ms == pytest.approx(0.35) and joined.launches == 7 + ROTARY_TABLES
    with pytest.raises(KeyError):
        predicted.first({**two_launches(), "steps": {"ada": {STEP: {}}}}, "ada", STEP)


@pytest.mark.parametrize("card", CARDS_AT_BEST)
def test_a_first_pass_reads_the_weights_once_and_sees_one_canvas(card: str, report: dict[str, Any]) -> None:
    for checkpoint, light, of in predicted.wanted():
        if of == card:
            step = step_of(checkpoint, light)
            alone, joined = predicted.parts(report, card, step), predicted.parts(report, card, first_of(step))
            assert joined["vocabulary"] == alone["vocabulary"]
            assert alone["experts"].bytes < joined["experts"].bytes < 1.1 * alone["experts"].bytes
            assert 1.8 < joined["attention"].flops / alone["attention"].flops <= 2


def test_what_a_choice_saves() -> None:
    """Of two_launches, with a first pass of 2 ms: apart, step and commit take 10 ms each, the last layer's 30th left out."""
    report = two_launches(first={"norms.rms_norm 1": 40})
    size, ms = speed_page._fused_commit(report, "ada")
    assert ms == pytest.approx(((10 + 10 * 29 / 30 - 2) / predicted.STEPS,) * 2)
    assert size == pytest.approx(9e-3 * CARDS_AT_BEST["ada"].bandwidth * 59 / 30 / predicted.STEPS)
    step = Part(ms=1, launches=1000)
    assert speed_page._graph(step) == pytest.approx((HOST[0] - 1 - GRAPH_GAP[1], HOST[1] - 1 - GRAPH_GAP[0]))


def test_a_canvas_is_a_first_pass_and_fifteen_steps() -> None:
    report = two_launches(first={"norms.rms_norm 1": 40})
    first = 40 + ROTARY_TABLES
    low, high = predicted.canvas_ms(report, "ada", STEP)
    assert low == pytest.approx(2 + 15 * 10 + (first + 15 * 30) * GRAPH_GAP[0] / 1e3)
    assert high == pytest.approx(2 + 15 * 10 + (first + 15 * 30) * GRAPH_GAP[1] / 1e3)
    assert predicted.tokens_a_second(report, "ada", STEP) == pytest.approx((256e3 / high, 256e3 / low))


def test_bytes_are_those_that_reach_the_memory() -> None:
    part = predicted.parts(two_launches(), "ada", STEP)["experts"]
    assert part.bytes == pytest.approx(10 * 900e-6 * CARDS_AT_BEST["ada"].bandwidth) and part.flops == 100


def test_a_range_is_written_once_where_its_ends_read_alike() -> None:
    assert predicted.between((1.04, 0.96)) == "1.0"
    assert predicted.between((6.8, 7.2)) == "6.8 … 7.2"
    assert predicted.between((1951.4, 2027.6), 0) == "1,951 … 2,028"
