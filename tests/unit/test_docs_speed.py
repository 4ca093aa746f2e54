"""docs/how-fast.md and its picture say what tests/compile/report.json says, and what follows from it follows."""

import copy
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import make_roofline
import predicted
import pytest
import speed_page
from predicted import CARDS_AT_BEST, GRAPH_GAP, HOST, STREAM_GAP, Part, first_of, step_of

STEP = step_of("nvidia-nvfp4", light=True)
REMAKE = "python tests/make_roofline.py"


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return predicted.read()


def slower(report: dict[str, Any], kernel: str, times: float = 2) -> dict[str, Any]:
    changed = copy.deepcopy(report)
    for card in changed["launches"].values():
        for label, line in card.items():
            if label.startswith(kernel):
                line["limits"] = {limit: us * times for limit, us in line["limits"].items()}
    return changed


# what stands in docs/


def test_the_page_is_of_today(report: dict[str, Any]) -> None:
    page = speed_page.PAGE.read_text(encoding="utf-8")
    assert speed_page.filled(page, report) == page, REMAKE


def test_the_picture_is_of_today(report: dict[str, Any]) -> None:
    assert make_roofline.PICTURE.read_text(encoding="utf-8") == make_roofline.picture(report), REMAKE


def test_every_figure_has_its_place_on_the_page() -> None:
    page = speed_page.PAGE.read_text(encoding="utf-8")
    assert sorted(found["name"] for found in speed_page.REGION.finditer(page)) == sorted(speed_page.REGIONS)


def test_a_region_that_nobody_makes_is_an_error(report: dict[str, Any]) -> None:
    with pytest.raises(KeyError, match="wishes"):
        speed_page.filled("<!-- wishes, by tests/make_roofline.py -->\n5,000 tok/s\n<!-- end -->", report)


@pytest.mark.parametrize("kernel", ["experts_grouped", "logits", "fp8_linear", "attention", "norms"])
def test_a_changed_kernel_makes_page_and_picture_stale(kernel: str, report: dict[str, Any]) -> None:
    page = speed_page.PAGE.read_text(encoding="utf-8")
    changed = slower(report, kernel)
    assert speed_page.filled(page, changed) != page
    assert make_roofline.picture(changed) != make_roofline.picture(report)


def test_the_picture_is_well_formed_and_says_that_nothing_was_measured(report: dict[str, Any]) -> None:
    picture = make_roofline.picture(report)
    words = " ".join(ET.fromstring(picture).itertext())
    assert "not measured" in words and all(card.title in words for card in CARDS_AT_BEST.values())
    assert "prefers-color-scheme:dark" in picture and "<script" not in picture


def test_everything_lies_within_the_picture(report: dict[str, Any]) -> None:
    root = ET.fromstring(make_roofline.picture(report))
    shapes = [e for e in root.iter() if e.tag.endswith(("}circle", "}rect", "}text")) and e.get("width") != "100%"]
    assert len(shapes) > 60
    for shape in shapes:
        x, y = float(shape.get("cx") or shape.get("x", "")), float(shape.get("cy") or shape.get("y", ""))
        width = float(shape.get("width", "0"))
        assert x >= 0 and x + width <= make_roofline.WIDTH and 0 <= y <= make_roofline.HEIGHT, shape.attrib


def test_points_bars_and_floors_are_where_the_figures_are(report: dict[str, Any]) -> None:
    root = ET.fromstring(make_roofline.picture(report))
    circles = [(float(e.get("cx", "")), float(e.get("cy", ""))) for e in root.iter() if e.tag.endswith("}circle")]
    floors = [float(e.get("d", "M0 ")[1:].split(" ")[0]) for e in root.iter() if e.get("class") == "floor"]
    bars = [
        float(e.get("x", "")) + float(e.get("width", ""))
        for e in root.iter()
        if "halo" in e.get("class", "") and e.get("x")
    ]
    for i, (card, best) in enumerate(CARDS_AT_BEST.items()):
        left = make_roofline.LEFT + i * (make_roofline.PANEL + make_roofline.GUTTER)
        right = left + make_roofline.PANEL
        experts = predicted.parts(report, card, STEP)["experts"]
        at = make_roofline._x(left, experts.flops / experts.bytes), make_roofline._y(experts.flops / experts.ms / 1e9)
        mine = [spot for spot in circles if left <= spot[0] <= right]
        assert len(mine) >= 2 + 2 * 2  # experts and attention, dense products and vocabulary twice
        assert any(spot == pytest.approx(at, abs=0.1) for spot in mine)
        assert all(y >= make_roofline._y(best.floor["fp8"] / 1e12) - 0.1 for _, y in mine)
        assert sum(left < x < right for x in floors) == len(make_roofline.SHOWN)
        assert max(x for x in bars if x <= right + 1) == pytest.approx(right, abs=0.2)  # the longest, gaps included


def test_reading_the_report_needs_no_torch() -> None:
    tests = str(Path(predicted.__file__).parent)
    code = (
        f"import sys; sys.path.insert(0, {tests!r}); import kernel_page, make_roofline; print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# what follows from a report


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


def two_launches(first: dict[str, int] | None = None) -> dict[str, Any]:
    """A report of one step: an expert product bound by memory, and a norm; of every card and step alike."""
    lines = {
        "experts_grouped.experts_gated 1": {"limits": {"memory": 900.0, "tensor cores": 500.0}, "flops": 10},
        "norms.rms_norm 1": {"limits": {"issue": 50.0}, "flops": 1},
    }
    steps = {
        step_of(c, light): {"experts_grouped.experts_gated 1": 10, "norms.rms_norm 1": 20}
        for c, light, _ in predicted.wanted()
    }
    if first is not None:
        steps |= {first_of(step): first for step in steps}
    return {"steps": dict.fromkeys(CARDS_AT_BEST, steps), "launches": dict.fromkeys(CARDS_AT_BEST, lines)}


def test_a_first_pass_is_estimated_until_it_is_compiled() -> None:
    estimated = predicted.first(two_launches(), "ada", STEP)
    assert estimated.ms == pytest.approx(10 * 1.0 + 20 * 0.1)  # twice the flops outlast the reading; twice the norms
    heavier = two_launches()
    heavier["launches"]["ada"]["experts_grouped.experts_gated 1"]["limits"]["shared memory"] = 890.0
    assert predicted.first(heavier, "ada", STEP).ms == pytest.approx(10 * 0.89 * predicted.MORE_ITEMS + 20 * 0.1)
    compiled = predicted.first(two_launches(first={"norms.rms_norm 1": 7}), "ada", STEP)
    assert compiled.ms == pytest.approx(0.35) and compiled.launches == 7


def test_the_vocabulary_of_a_first_pass_sees_one_canvas(report: dict[str, Any]) -> None:
    unfinished = {
        **report,
        "steps": {card: {k: v for k, v in of.items() if k.startswith("step/")} for card, of in report["steps"].items()},
    }
    label = next(label for label in unfinished["steps"]["ada"][STEP] if label.startswith("logits"))
    unfinished["steps"]["ada"][STEP] = {label: 1}
    assert predicted.first(unfinished, "ada", STEP).ms == predicted.milliseconds(unfinished, "ada", STEP)


def test_what_a_choice_saves() -> None:
    """Of two_launches, with a first pass of 2 ms: apart, commit and step take 10 ms each, and neither has a vocabulary."""
    report = two_launches(first={"norms.rms_norm 1": 40})
    assert speed_page._fused_commit(report, "ada")[1] == pytest.approx((18 / predicted.STEPS,) * 2)
    step = Part(ms=1, launches=1000)
    assert speed_page._graph(step) == pytest.approx((HOST[0] - 1 - GRAPH_GAP[1], HOST[1] - 1 - GRAPH_GAP[0]))


def test_what_misses_its_least_is_named(report: dict[str, Any]) -> None:
    hurried = {**report, "launches": slower(report, "", 0.5)["launches"]}
    assert "Short of" not in speed_page.REGIONS["prediction"](hurried)
    late = speed_page.REGIONS["prediction"]({**report, "launches": slower(report, "", 1.5)["launches"]})
    assert late.count(" on an ") == 7  # every row


def test_a_canvas_is_a_first_pass_and_fifteen_steps() -> None:
    report = two_launches(first={"norms.rms_norm 1": 40})
    low, high = predicted.canvas_ms(report, "ada", STEP)
    assert low == pytest.approx(2 + 15 * 10 + (40 + 15 * 30) * GRAPH_GAP[0] / 1e3)
    assert high == pytest.approx(2 + 15 * 10 + (40 + 15 * 30) * GRAPH_GAP[1] / 1e3)
    assert predicted.tokens_a_second(report, "ada", STEP) == pytest.approx((256e3 / high, 256e3 / low))


def test_bytes_are_those_that_reach_the_memory() -> None:
    part = predicted.parts(two_launches(), "ada", STEP)["experts"]
    assert part.bytes == pytest.approx(10 * 900e-6 * CARDS_AT_BEST["ada"].bandwidth) and part.flops == 100


def test_few_tokens_hit_nearly_all_experts(report: dict[str, Any]) -> None:
    """8 of 128 each, evenly: 126 of them are hit by 64 tokens, 112 by 32, 82 by 16; simulated elsewhere alike."""
    cells = [
        [c.strip() for c in line.split("|")[1:-1]] for line in speed_page.REGIONS["frozen"](report).splitlines()[2:]
    ]
    assert [row[:2] for row in cells] == [
        ["256", "128 of 128"], ["128", "128 of 128"], ["64", "126 of 128"], ["32", "112 of 128"], ["16", "82 of 128"]
    ]  # fmt: skip
    assert cells[0][3] == "0%"


def test_a_range_is_written_once_where_its_ends_read_alike() -> None:
    assert predicted.between((1.04, 0.96)) == "1.0"
    assert predicted.between((6.8, 7.2)) == "6.8 … 7.2"
    assert predicted.between((1951.4, 2027.6), 0) == "1,951 … 2,028"
