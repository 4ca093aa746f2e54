"""tests/gpu/run_all.sh with a stand-in for Python: whatever becomes of its parts, one JSON and one page are there."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu import merge

ROOT = Path(__file__).parents[2]
# what each part does; merge.py is the real one
STAND_IN = """#!/bin/bash
case "$*" in
  *--stem*) echo rehearsal-2026-01-02 ;;
  *merge.py*) exec {python} "$@" ;;
  *run.py*--launch*) echo "3 of 3 launched" ;;
  *run.py*) {suite} ;;
  *times.py*) cp {times} "${{@: -1}}" ;;
  *dgemma_local.bench*)
    while [[ $1 != --json ]]; do shift; done
    cat {bench} >"$2"
    case "$2" in *{failing}.json) echo '{{"half": ' >"$2"; exit 3 ;; *context-256k.json) rm "$2"; exit 11 ;; esac ;;
esac
"""
SHORT = {"LEAST_SECONDS": "1", "TIMES_SECONDS": "20", "SUITE_SECONDS": "20"}


def figures(speed: float) -> dict[str, Any]:
    known = dict.fromkeys(merge.FIGURES)
    return known | {"decode_tok_s": {"median": speed, "min": speed, "max": speed, "runs": [speed]}}


def bench(speed: float = 100.0, protocols: tuple[str, ...] = ("fixed16", "context", "breakdown")) -> dict[str, Any]:
    row = {
        "part": "experts",
        "count": 30,
        "ms": 4.5,
        "share": 0.5,
        "gb_s": 3000.0,
        "of_copy": 0.75,
        "of_roofline": None,
    }
    kinds: dict[str, Any] = {
        "fixed16": {"tasks": [{"prompt_tokens": 1024, "figures": figures(speed)}]},
        "context": {"tasks": [{"prompt_tokens": n, "figures": figures(speed)} for n in (1024, 2048)]},
        "breakdown": {"rows": [row]},
    }
    return {
        "complete": True,
        "date": "2026-01-02T03:04:05+00:00",
        "machine": {"gpu": "NVIDIA H200", "cpu": "a CPU", "driver": "1.2", "torch": "2.11", "triton": "3.6"},
        "subject": {"layout": "fp8", "mode": "graphs", "load_seconds": 3.0},
        "memory": {"peak_bytes": 27_000_000_000, "planned_bytes": None},
        "protocols": {name: kinds[name] for name in protocols},
    }


TIMES = {"steps": {"step/redhat-nvfp4": {"ms": 8.5, "ms_predicted": None, "launches": 480}}}
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """The script, on its way, with results in tmp_path / "results"."""
    files = {"bench": tmp_path / "bench.json", "times": tmp_path / "times.json"}
    files["bench"].write_text(json.dumps(bench()))
    files["times"].write_text(json.dumps(TIMES))

    def run(suite: str, folder: Path = tmp_path / "results", failing: str = "none", **settings: str) -> Any:
        stand_in = tmp_path / "python"
        stand_in.write_text(STAND_IN.format(python=sys.executable, suite=suite, failing=failing, **files))
        stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
        return subprocess.Popen(
            ["bash", "tests/gpu/run_all.sh", str(folder)],
            cwd=ROOT,
            env=os.environ | SHORT | {"PYTHON": str(stand_in), "DGEMMA_GPU_SUITE_SMALL": "1"} | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return run


def results(tmp_path: Path) -> tuple[dict[str, Any], str]:
    stem = tmp_path / "results" / "rehearsal-2026-01-02"
    return json.loads(stem.with_suffix(".json").read_text()), stem.with_suffix(".md").read_text()


def test_parts_that_are_cut_fail_or_do_not_fit_leave_the_others_whole(tmp_path: Path, start: Start) -> None:
    process = start('echo "passed one 0.1 s"; sleep 60', failing="nvfp4-1", SUITE_SECONDS="1")
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "FAILED: suite nvfp4-1\n" in told, told
    found, page = results(tmp_path)
    outcomes = {part["name"]: part["outcome"] for part in found["parts"]}
    assert outcomes == {
        "suite": "cut",
        "fp8-1": "done",
        "fp8-2": "done",
        "nvfp4-1": "failed, exit code 3",
        "nvfp4-2": "done",
        "nvfp4-light": "done",
        "context-32k": "done",
        "context-256k": "does not fit this card",
        "times": "done",
        "launches": "done",
    }
    assert found["suite"] == {"passed": 1, "failed": 0}
    assert set(found["benches"]) == {
        "fp8-1",
        "fp8-2",
        "nvfp4-2",
        "nvfp4-light",
        "context-32k",
    }  # half a document is none
    assert found["benches"]["fp8-1"] == bench() and found["times"] == TIMES
    assert found["what"] == merge.REHEARSAL and merge.REHEARSAL in page and page in told


def test_what_passes_is_no_failure(tmp_path: Path, start: Start) -> None:
    process = start('echo "12 passed, 0 failed in 3 s"')
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "nothing failed\n" in told, told
    found, _ = results(tmp_path)
    assert found["suite"] == {"passed": 12, "failed": 0}
    assert [part["outcome"] for part in found["parts"]].count("done") == 9


def test_parts_without_time_are_named_and_none_goes_past_the_end(tmp_path: Path, start: Start) -> None:
    began = time.monotonic()
    process = start("sleep 60", ALL_SECONDS="2", LEAST_SECONDS="2", SUITE_SECONDS="50")
    assert process.communicate(timeout=60)[0] and process.returncode == 1
    assert time.monotonic() - began < 30  # not the suite's 50
    parts = results(tmp_path)[0]["parts"]
    assert [part["outcome"] for part in parts] == ["cut", *["no time left"] * 9]


def test_an_interrupted_run_leaves_what_it_has_and_ends_what_it_started(tmp_path: Path, start: Start) -> None:
    process = start(f"echo $$ >{tmp_path}/pid; exec sleep 300", SUITE_SECONDS="200")
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert [part["outcome"] for part in results(tmp_path)[0]["parts"]] == ["interrupted"]
    sleeper = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not Path(f"/proc/{sleeper}").exists() or "Z" in Path(f"/proc/{sleeper}/stat").read_text().split()[2]:
            break
        time.sleep(0.05)
    else:
        pytest.fail("the part goes on")


def test_a_rehearsal_never_writes_among_the_results(start: Start) -> None:
    process = start("exit", folder=ROOT / "tests/gpu_results/rehearsal")
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and "a rehearsal measures nothing" in told
    assert not (ROOT / "tests/gpu_results/rehearsal").exists()


# ── the page ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_page_says_each_figure_and_how_far_two_processes_lie_apart(tmp_path: Path) -> None:
    folder, stem = tmp_path, "nvidia-h200-2026-01-02"
    for name, document in {
        "fp8-1": bench(100.0),
        "fp8-2": bench(104.0),
        "context-32k": bench(90.0, ("context",)),
    }.items():
        (folder / f"{stem}-{name}.json").write_text(json.dumps(document))
    (folder / f"{stem}-parts.tsv").write_text("suite\t0\t12\t145\tsuite.txt\nsanitizer\tnot run: none\t0\t0\t\n")
    (folder / f"{stem}-suite.txt").write_text("== 40 passed, 3 warnings in 5.00s ==\n")
    found = merge.merged(folder, stem, 77)
    lines = merge.page(found).splitlines()
    assert "measured, 77 s in all" in lines
    assert "NVIDIA H200, driver 1.2, torch 2.11, triton 3.6, 2026-01-02T03:04:05+00:00" in lines
    assert "| suite | done: 40 passed | 12 | 145 |" in lines and "| sanitizer | not run: none | 0 | 0 |" in lines
    assert "| tok/s, decode | 100.0 | 104.0 | 4.0% |" in lines and "| ms/step, p50 |  |  |  |" in lines
    assert "| GB at the peak | 27.00 | 27.00 |  |" in lines
    assert "| experts | 30 | 4.500 | 50.0 | 3,000 | 75.0 |  |" in lines
    assert any(line.startswith("| 2,048 |") and "90.0" in line for line in lines)


def test_what_was_cut_while_it_measured_is_said(tmp_path: Path) -> None:
    """Of a sweep the rows that there are; of a protocol nothing: its figures are not those of all runs."""
    stem, sweep = "card-2026-01-02", bench(90.0, ("context",)) | {"complete": False}
    cut = bench() | {"complete": False, "memory": {"planned_bytes": None}, "protocols": {"fixed16": {"tasks": []}}}
    light = bench(120.0)
    for name, document in {"fp8-1": cut, "nvfp4-light": light, "context-256k": sweep}.items():
        (tmp_path / f"{stem}-{name}.json").write_text(json.dumps(document))
    page = merge.page(merge.merged(tmp_path, stem, 77))
    assert "## context-256k, fp8, cut\n" in page and "| 2,048 |" in page
    assert "fixed16, fp8" not in page and "## fixed16, nvfp4-light, graphs\n" in page and "| 120.0 |" in page


def test_a_folder_with_nothing_gives_a_page_all_the_same(tmp_path: Path) -> None:
    found = merge.merged(tmp_path, "card-2026-01-02", 0)
    assert found["parts"] == [] and found["suite"] is None and found["times"] is None and found["benches"] == {}
    assert merge.page(found).startswith("# card-2026-01-02\n")


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("=== 3 failed, 40 passed, 2 warnings in 12.34s ===", {"failed": 3, "passed": 40}),
        ("=== 1 failed, 2 passed in 83.10s (0:01:23) ===", {"failed": 1, "passed": 2}),
        ("passed a[1] 0.1 s\nFAILED b\nFAILED b\n1 passed, 1 failed in 3 s", {"passed": 1, "failed": 1}),
        ("x/y.py::test_a[1] told 1\ntold 2\nPASSED\nx/y.py::test_b FAILED\n", {"passed": 1, "failed": 1}),
        ("x/y.py::test_a[1] PASSED\nx/y.py::test_b FAILED\nx/y.py::test_c", {"passed": 1, "failed": 1}),
    ],
)
def test_a_suite_is_counted_by_its_last_line_or_by_its_tests(tmp_path: Path, text: str, counts: dict[str, int]) -> None:
    log = tmp_path / "log.txt"
    log.write_text(text)
    assert merge.counted(log) == counts
