"""docs/how-fast.md and its picture say what tests/compile/report.json says, and what follows from it follows."""

import copy
import inspect
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import make_roofline
import predicted
import pytest
import speed_page
from predicted import CARDS_AT_BEST, step_of
from typer.main import get_command

from dgemma_local import captured, ops
from dgemma_local.bench import protocols, synthetic
from dgemma_local.cli import app

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


def test_dark_is_every_colour_of_light() -> None:
    light, dark = make_roofline._style().split("@media (prefers-color-scheme:dark)")
    assert make_roofline.LIGHT.keys() == make_roofline.DARK.keys() and "var(" not in light
    for name, colour in make_roofline.LIGHT.items():
        assert colour in light and make_roofline.DARK[name] in dark
        assert colour not in dark and make_roofline.DARK[name] not in light
    assert re.findall(r"[.\w,]+\{", light.splitlines()[-1]) == re.findall(r"[.\w,]+\{", dark)


@pytest.mark.parametrize("colours", [make_roofline.LIGHT, make_roofline.DARK], ids=["light", "dark"])
def test_words_and_shapes_stand_out(colours: Mapping[str, str]) -> None:
    """WCAG 2.1: 4.5 : 1 for words, 3 : 1 for shapes; the grid and the gaps may be paler."""
    for name, colour in colours.items():
        least = {"ink": 4.5, "faint": 4.5, "paper": 1, "line": 1, "gaps": 1.5}.get(name, 3)
        assert contrast(colour, colours["paper"]) >= least, name


def contrast(a: str, b: str) -> float:
    """Relative luminances, (L + 0.05) / (l + 0.05)."""

    def luminance(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
        rgb = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in rgb]
        return sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


# the words around the figures


@pytest.fixture(scope="module")
def words() -> str:
    """The page, whatever its line breaks."""
    return " ".join(speed_page.PAGE.read_text(encoding="utf-8").split())


def test_running_ahead_is_told_as_it_is_done(words: str) -> None:
    assert f"below {captured.NEAR:.0f} times the threshold" in words
    canvases, most = re.findall(r"Of (\d+) canvases .* all were below ([\d.]+) times", words)[0]
    measured = " ".join(inspect.getsource(captured).replace("\n# ", " ").split())
    assert f"Of {canvases} canvases of the demo models that converged" in measured
    assert f"was below {most} times the threshold in all" in measured and float(most) < captured.NEAR


def test_commands_and_switches_are_those_that_there_are(words: str) -> None:

    commands: Any = get_command(app)
    known = {
        name: {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
        for name, command in commands.commands.items()
    }
    bench = re.findall(r"^    dgemma bench (.*?)  +#", speed_page.PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(bench) == 4 and {o for line in bench for o in re.findall(r"--[\w-]+", line)} <= known["bench"]
    assert set(re.findall(r"`(--[\w-]+)`", words)) <= known["run"]
    assert set(re.findall(r"DGEMMA_OPS=([\w-]+)", words)) <= set(ops.WISHES)
    assert set(re.findall(r"--layout (\S+)", words)) <= set(synthetic.LAYOUTS) and "fixed16" in protocols.NAMES
    models = tomllib.loads((predicted.ROOT / "models.toml").read_text(encoding="utf-8"))
    assert set(re.findall(r"--model (\S+)", words)) <= set(models)


def test_the_cards_suite_is_told_as_it_runs(words: str) -> None:
    script = (predicted.ROOT / "tests/gpu/run_all.sh").read_text(encoding="utf-8")
    told = {
        "runs the kernels' suite": "part suite",
        "in FP8, then NVFP4": "for layout in fp8 nvfp4",
        "each twice": 'bench "$layout-2"',
        "`fixed16` and the breakdown": 'AGAIN_SECONDS" --layout "$layout" "${fixed[@]}"',
        "then NVFP4's light step": "bench nvfp4-light",
        "NVFP4 behind contexts up to 32k": 'bench context-32k "$SWEEP_SECONDS" --layout nvfp4',
        "then up to 256k": 'bench context-256k "$LONG_SWEEP_SECONDS" --layout nvfp4',
        "every launch of a step alone": "part times",
        "compute-sanitizer where it starts": "for tool in memcheck racecheck",
    }
    start = words.index("runs the kernels' suite")
    assert [words.index(w, start) for w in told] == sorted(words.index(w, start) for w in told)
    assert [script.index(w) for w in told.values()] == sorted(script.index(w) for w in told.values())
    assert (
        len(re.findall(r"^ *(?:SHOWN=\d+ )?(?:part|bench) [\"a-z]", script, re.MULTILINE)) == 8
    )  # launches: a rehearsal's
    assert "FOLDER/CARD-DATE.json" in script and "FOLDER/CARD-DATE.md" in script and "`CARD-DATE.md`" in words
    assert int(re.findall(r"ALL_SECONDS:-(\d+)", script)[0]) < 9 * 60 and "nine minutes at most" in words


# figures of the regions


def test_what_misses_its_least_is_named(report: dict[str, Any]) -> None:
    hurried = {**report, "launches": slower(report, "", 0.5)["launches"]}
    assert "Short of" not in speed_page.REGIONS["prediction"](hurried)
    late = speed_page.REGIONS["prediction"]({**report, "launches": slower(report, "", 1.5)["launches"]})
    assert late.count(" on an ") == 7  # every row


def test_a_pass_of_two_canvases_has_the_vocabulary_twice(report: dict[str, Any]) -> None:
    words = speed_page.REGIONS["two"](report)
    for card, best in CARDS_AT_BEST.items():
        step, vocabulary = predicted.whole(report, card, STEP).ms, predicted.parts(report, card, STEP)["vocabulary"].ms
        times = (predicted.first(report, card, STEP).ms + vocabulary) / step
        assert f"×{times:.2f} on an {best.title}" in words and 1 < times < 2


@pytest.mark.parametrize("card", CARDS_AT_BEST)
def test_what_limits_a_card_is_all_that_lies_above_its_floor(card: str, report: dict[str, Any]) -> None:
    """The parts that are named, bytes and gaps, added up; what is not worth naming and rounding left over."""
    line = speed_page._above_floor(report, card)
    above, named, moved, gaps = re.split(r" ms above|leaves out: |Gaps: ", line)
    waits = [float(ms) for ms in re.findall(r" (\d\.\d) \(", named)]
    assert waits == sorted(waits, reverse=True) and waits
    low = sum(waits) + float(moved.strip(". ")) + float(gaps.split(" ")[0])
    assert 0 <= float(above.split(" ")[0]) + 0.3 - low < 0.6


def test_what_limits_a_card_names_the_part_and_its_limit(report: dict[str, Any]) -> None:
    changed = copy.deepcopy(report)
    for label, launch in changed["launches"]["ada"].items():
        if label.startswith("experts"):
            launch["limits"]["issue"] = 2 * max(launch["limits"].values())
    more = predicted.parts(changed, "ada", STEP)["experts"].ms / 2
    before, after = (speed_page._above_floor(r, "ada") for r in (report, changed))
    assert "experts" not in before and f"Beyond the time of their bytes: experts {more:.1f} (issue), " in after
    # of its time, more is memory's
    assert speed_page._limit_of(report, "blackwell", "vocabulary") == "tensor cores"


def test_few_tokens_hit_nearly_all_experts(report: dict[str, Any]) -> None:
    """8 of 128 each, evenly: 126 of them are hit by 64 tokens, 112 by 32, 82 by 16; simulated elsewhere alike."""
    cells = [
        [c.strip() for c in line.split("|")[1:-1]] for line in speed_page.REGIONS["frozen"](report).splitlines()[2:]
    ]
    assert [row[:2] for row in cells] == [
        ["256", "128 of 128"], ["128", "128 of 128"], ["64", "126 of 128"], ["32", "112 of 128"], ["16", "82 of 128"]
    ]  # fmt: skip
    assert cells[0][3] == "0%"
