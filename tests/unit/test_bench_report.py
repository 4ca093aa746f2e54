"""What a benchmark prints: labels, tables, ratios, and a last line of JSON."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_bench import ADAPTIVE, Meter, Script, bench, script

from dgemma_local.bench import __main__ as bare
from dgemma_local.bench import command, measure, report, request
from dgemma_local.events import Finished


def document(**changes: Any) -> dict[str, Any]:
    """Of scripted answers; a card's, with all that it may tell."""
    speaker = Script([script()])
    how = bench(speaker)
    fixed = measure.result(ADAPTIVE, measure.repeat(speaker, ADAPTIVE, None, how, 2), how)
    row = {"part": "experts", "count": 30, "ms": 1.5, "share": 0.25, "bytes": 3_000_000, "flops": None, "gb_s": None}
    return {
        "schema": 1,
        "complete": True,
        "dgemma": "0.1",
        "date": "2026-01-01T00:00:00+00:00",
        "label": "a label",
        "seed": 7,
        "runs": 2,
        "subject": {
            "name": "one", "kind": "model", "layout": "fp8", "fp8": [], "dtype": "bfloat16", "device": "cuda:0", "mode": "graphs",
            "context": 8192, "canvas_length": 4, "vocab_size": 9, "load_seconds": 2.5, "planned_bytes": 5,
        },
        "machine": {
            "cpu": "C", "cores": 8, "threads": 4, "python": "3", "torch": "2", "triton": "3", "cuda": "13", "gpu": "G",
            "driver": "575", "power_limit_w": 450.0, "sm_mhz": 2100.0, "memory_mhz": 10501.0,
        },
        "protocols": {
            "fixed16": {"note": "scaled: so", "tasks": [fixed], "rows": []},
            "context": {"note": "", "tasks": [fixed], "rows": []},
            "breakdown": {"note": "", "tasks": [], "rows": [row | {"of_copy": 0.5, "of_roofline": None}]},
        },
        "memory": {"peak_bytes": 4_500_000_000, "of": "device", "planned_bytes": 5_000_000_000},
        "against": None,
    } | changes  # fmt: skip


def text_of(found: dict[str, Any]) -> str:
    return "\n".join([*report.head(found), *(line for table in report.tables(found) for line in report.plain(table))])


def test_the_tables() -> None:
    text = text_of(document())
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "a label"
    assert "one: fp8, bfloat16, on cuda:0, graphs; context 8,192; --seed 7, 2 runs behind a warm-up" in lines
    assert (
        "G, driver 575, 450 W at most, 2100 / 10501 MHz; C, 4 of 8 threads; torch 2, triton 3, Python 3, dgemma 0.1"
        in lines
    )
    assert "loaded in 2.50 s; peak 4.500 GB of tensors on the device; planned 5.000 GB" in lines
    for line in ("ms/step, p50 200.00", "ms/step, p95 400.00", "tok/s, decode 3.3", "joules/token 3.000", "scaled: so"):
        assert line in lines
    assert "10 200.00 400.00 1,050.0 3.3 2.7 1,300.0 25" in lines  # the sweep
    assert "a step ms % of it MB % of a copy's" in lines and "experts 30 1.500 25.0 3.0 50" in lines


def test_a_spread_is_shown() -> None:
    speaker = Script([script(), script(), [(2 * seconds, event) for seconds, event in script()], script()])
    how = bench(speaker)
    found = document()
    found["protocols"]["fixed16"]["tasks"] = [
        measure.result(ADAPTIVE, measure.repeat(speaker, ADAPTIVE, None, how, 3), how)
    ]
    assert "200.00 (200.00 … 400.00)" in text_of(found)


def test_what_is_missing_says_why() -> None:
    speaker = Script([[*script()[:5], (0.0, Finished(reason="end", tokens=(5, 6), canvases=1, steps=3))]])
    how = bench(speaker, Meter(None, "no card"))
    task = measure.result(ADAPTIVE, measure.repeat(speaker, ADAPTIVE, None, how, 1), how)
    found = document(protocols={"adaptive": {"note": "", "tasks": [task], "rows": []}})
    text = text_of(found)
    assert "- joules/token: no card" in text and "- ms/commit, by difference: no answer had a second canvas" in text
    assert json.loads(report.line(found))["protocols"]["adaptive"]["tasks"][0]["figures"]["joules_per_token"] is None


def test_the_last_line_is_sorted_json_without_nan() -> None:
    found = document()
    line = report.line(found)
    assert (
        "\n" not in line and json.loads(line) == found and line == json.dumps(found, sort_keys=True, ensure_ascii=False)
    )
    with pytest.raises(ValueError, match="JSON"):
        report.line(document(seed=float("nan")))


def test_every_key_of_the_document_is_in_the_docstring() -> None:
    from dgemma_local import bench as package

    told = package.__doc__ or ""
    found = document()
    keys = {*found, *found["subject"], *found["machine"], *found["memory"], *found["protocols"]["fixed16"]}
    keys |= {*found["protocols"]["fixed16"]["tasks"][0], *report.FIGURES, *found["protocols"]}
    missing = [key for key in keys if key not in told]
    assert not missing


TRANSFORMERS: dict[str, Any] = {
    "why_not": None,
    "transformers": "5.24.0",
    "dtype": "float32",
    "per_step": [
        {"threads": n, "ms": {"ours": 2.0, "transformers sdpa": 2.0 * ratio}, "ratio": ratio,
         "compared": 9, "unequal": 0, "twin": "transformers eager", "steps": 6, "wanted": 6}
        for n, ratio in ((1, 1.5), (2, 1.25))
    ],
    "answers": [
        {"threads": 1, "tok_s": {"ours": 30.0, "transformers sdpa": 10.0}, "ratio": 3.0, "compared": 0, "unequal": 0,
         "step_ms": {"ours": 2.0, "transformers sdpa": 5.0, "transformers eager": 4.0}},
    ],
}  # fmt: skip


def test_the_worst_ratio_counts() -> None:
    assert report.ratios(TRANSFORMERS) == {"per_step": 1.25, "per_canvas": None, "end_to_end": 3.0}
    on_a_card = report.ratios(TRANSFORMERS | {"per_step": []})
    assert on_a_card == {"per_step": 2.0, "per_canvas": None, "end_to_end": 3.0}
    assert set(report.ratios({"why_not": "absent"}).values()) == {None}


@pytest.mark.parametrize(("dtype", "why"), [("float32", "near-tie"), ("bfloat16", "--dtype float32")])
def test_tokens_that_differ_have_a_reason(dtype: str, why: str) -> None:
    one, two = TRANSFORMERS["per_step"]
    found = TRANSFORMERS | {"dtype": dtype, "per_step": [one, two | {"unequal": 4}]}
    text = text_of(document(against={"what": "transformers", "found": found, "ratio": report.ratios(found)}))
    assert text.count(why) == 1
    assert "4 of 9 compared" in text


def test_steps_that_were_cut_are_shown_and_not_in_the_ratio() -> None:
    one, two = TRANSFORMERS["per_step"]
    none = dict.fromkeys(two["ms"])
    for cut in (two | {"steps": 5}, two | {"steps": 0, "ms": none, "ratio": None}):
        found = TRANSFORMERS | {"per_step": [one, cut]}
        assert report.ratios(found)["per_step"] == 1.5
        text = text_of(document(against={"what": "transformers", "found": found, "ratio": report.ratios(found)}))
        assert f"stopped early, {cut['steps']} of 6 steps were timed: not in the ratio below" in text
        assert text.count("stopped early") == 1


def test_threads_that_wait_for_each_other_are_shown_and_not_in_the_ratio() -> None:
    one, two = TRANSFORMERS["per_step"]
    slow = two | {"ms": {name: ms * 60 for name, ms in one["ms"].items()}, "ratio": 0.5}
    found = TRANSFORMERS | {"per_step": [one, slow]}
    assert report.ratios(found)["per_step"] == 1.5
    text = text_of(document(against={"what": "transformers", "found": found, "ratio": report.ratios(found)}))
    assert text.count("slower than with fewer threads") == 1 and "120.000" in text
    ours_alone = two | {"ms": two["ms"] | {"ours": 9.0}, "ratio": 0.5}  # theirs gain by them: that counts
    assert report.ratios(TRANSFORMERS | {"per_step": [one, ours_alone]})["per_step"] == 0.5


def test_one_run_and_all_the_steps() -> None:
    found = document(runs=1)
    assert "--seed 7, 1 run behind a warm-up" in text_of(found)
    (fixed,) = found["protocols"]["fixed16"]["tasks"]
    for confidence, words in ((0.0, "fixed16: exactly 3 steps"), (0.1, "fixed16: at most 3 steps")):
        fixed["confidence"] = confidence
        assert words in text_of(found)


def test_the_comparison_is_shown() -> None:
    against = {"what": "transformers", "found": TRANSFORMERS, "ratio": report.ratios(TRANSFORMERS)}
    lines = [" ".join(line.split()) for line in text_of(document(against=against)).splitlines()]
    assert "a step 1.25" in lines and "end to end 3.00" in lines and "transformers sdpa 2.500" in lines
    assert lines.count("0 of 9 compared with transformers eager by their tokens differ") == 2
    assert "against transformers, step by step, 1 thread" in lines
    assert "against transformers, step by step, 2 threads" in lines
    assert "against transformers, whole answers, 1 thread" in lines and not any(
        line.startswith("a canvas") for line in lines
    )
    refused = {"what": "transformers", "found": {"why_not": "not installed"}, "ratio": report.ratios({})}
    text = text_of(document(against=refused))
    assert "against transformers: not measured" in text and "not installed" in text and "ours : theirs" not in text


def test_an_endpoint_is_set_beside_the_same_figures() -> None:
    """Ours: 1,050 ms a canvas, 7 tokens in 2.6 s."""
    found = {
        "url": "http://x", "model": "m", "version": None, "settings": "not read", "same_steps": True, "notes": ["2 of 3 are short"],
        "median": {"ttft_ms": 2000.0, "canvas_ms": 2100.0, "end_to_end_tok_s": 7 / 5.2, "decode_tok_s": None},
        "missing": {"decode_tok_s": "not ours either"},
    }  # fmt: skip
    ours = document()["protocols"]["fixed16"]["tasks"][0]["figures"]
    ratio = report.endpoint_ratios(ours, found)
    assert ratio == pytest.approx({"per_step": 2.0, "per_canvas": 2.0, "end_to_end": 2.0})
    lines = [
        " ".join(line.split())
        for line in text_of(document(against={"what": "http://x", "found": found, "ratio": ratio})).splitlines()
    ]
    for line in ("ms to the first canvas 1,300.0 2,000.0", "ms/canvas 1,050.0 2,100.0", "tok/s, end to end 2.7 1.3"):
        assert line in lines
    assert "m, version ?: not read" in lines and "2 of 3 are short" in lines and "a step 2.00" in lines
    found["same_steps"] = False
    ratio = report.endpoint_ratios(ours, found)
    assert ratio["per_step"] is None and ratio["per_canvas"] == pytest.approx(2.0)
    text = text_of(document(against={"what": "http://x", "found": found, "ratio": ratio}))
    assert "a step" not in text.split("so many times as fast")[1] and "a canvas" in text.split("so many times")[1]
    found["same_steps"], found["median"]["canvas_ms"], found["missing"] = True, None, {"canvas_ms": "no whole canvas"}
    ratio = report.endpoint_ratios(ours, found)
    assert ratio["per_step"] is ratio["per_canvas"] is None
    text = text_of(document(against={"what": "http://x", "found": found, "ratio": ratio}))
    assert "- canvas_ms: no whole canvas" in text


def test_a_server_that_gave_fewer_tokens_has_no_ratio() -> None:
    found = {
        "url": "http://x", "model": "m", "version": None, "settings": "not read", "same_steps": True, "notes": [],
        "median": {"ttft_ms": 1.0, "canvas_ms": 1.0, "end_to_end_tok_s": 1.0, "decode_tok_s": 1.0}, "missing": {},
        "no_ratio": "the server gave 3 tokens",
    }  # fmt: skip
    ours = document()["protocols"]["fixed16"]["tasks"][0]["figures"]
    ratio = report.endpoint_ratios(ours, found)
    assert ratio == dict.fromkeys(report.RATIOS)
    text = text_of(document(against={"what": "http://x", "found": found, "ratio": ratio}))
    assert "against http://x: no ratio" in text and "the server gave 3 tokens" in text
    assert "so many times as fast" not in text


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_on_a_terminal_and_in_a_pipe() -> None:
    from dgemma_local.ui.bench import show_bench

    screen, pipe = Screen(), io.StringIO()
    found = document(label="odd \x1b[31m label")
    show_bench(found, screen)
    show_bench(found, pipe)
    assert "\x1b[31m label" not in screen.getvalue() + pipe.getvalue()  # a name may hold anything
    assert pipe.getvalue().splitlines()[-1] == screen.getvalue().splitlines()[-1] == report.line(found)
    assert "200.00" in screen.getvalue() and "200.00" in pipe.getvalue() and "scaled: so" in screen.getvalue()


def test_a_narrow_terminal_gets_the_columns_in_parts() -> None:
    from dgemma_local.ui.bench import _parts

    columns = [["a" * 8], ["b" * 8], ["c" * 30], ["d"]]
    assert list(_parts(columns, 20)) == [columns[:2], columns[2:3], columns[3:]]
    assert list(_parts(columns, 19)) == [columns[:1], columns[1:2], columns[2:3], columns[3:]]
    assert list(_parts([], 20)) == [[]]


def test_a_page_without_figures_says_what_became_of_them(tmp_path: Path) -> None:
    """One bench was ended before its model was there; what has figures has no such line."""
    from gpu import merge

    parts = [("suite", "0"), ("fp8-1", "124"), ("times", "3")]
    (tmp_path / "one-parts.tsv").write_text("".join(f"{name}\t{code}\t1\t2\tlog\n" for name, code in parts))
    (tmp_path / "one-fp8-1.json").write_text(report.line(command._head(request.Request(model="demo"))))
    found = merge.merged(tmp_path, "one", 3)
    assert merge.page(found).endswith("\nno figures: fp8-1 cut, times failed, exit code 3\n")
    times = {"steps": {"a step": {"ms": 1.0, "ms_predicted": None, "launches": 1}}}
    assert "no figures" not in merge.page(found | {"times": times})
    assert "no part that measures was begun" in merge.page(found | {"parts": []})


def test_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    from dgemma_local.bench.subject import open_model

    subject = open_model("demo-text", device=None, context=None)
    assert subject.label == "demo model on a CPU: these figures say nothing about the 26B model or a GPU"
    assert (subject.kind, subject.layout, subject.mode[:5], subject.shared) == ("demo", "bf16", "torch", False)
    assert subject.folder is not None and subject.folder.name == "text" and subject.load_seconds > 0
    subject.kind = "model"
    assert subject.label == "on a CPU: these figures say nothing about a GPU"
    subject.device = torch.device("cuda")
    assert subject.label is None
    subject.kind = "demo"
    assert subject.label == "demo model on a GPU: these figures say nothing about the 26B model"
    subject.kind = "synthetic"
    assert subject.label is not None and subject.label.endswith("the tokens mean nothing")
    monkeypatch.setenv("DGEMMA_GPU_SUITE_SMALL", "1")
    assert subject.label == "rehearsal: small sizes, nothing was measured"
    subject.kind = "demo"  # the same whether rehearsing or not
    assert subject.label.startswith("demo model")
    subject.model = type("Model", (), {"mode": "graphs", "joins": 256})()
    assert (subject.mode, subject.shared) == ("graphs", True)


def test_parts_in_fp8_are_asked_for_and_named() -> None:
    asked = request.checked(synthetic="26b", layout="nvfp4", fp8_attention=True, fp8_mlp=True)
    assert asked.fp8 == ("attention", "mlp")
    given = bare.parser().parse_args(["--synthetic", "26b", "--fp8-embedding"])
    assert request.checked(**{k: v for k, v in vars(given).items() if k not in ("json", "quiet")}).fp8 == ("embedding",)
    made = document()
    made["subject"]["fp8"] = ["attention", "mlp"]
    assert any("fp8 with attention, mlp in FP8, bfloat16, on cuda:0" in line for line in report.head(made))
