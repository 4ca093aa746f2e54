"""`dgemma bench` as a user gives it, on the demo models."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from dgemma_local import cli
from dgemma_local.bench import report


def dgemma(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["bench", *arguments])


def error(found: Result, code: int) -> tuple[str, str]:
    assert found.exit_code == code, found.output
    what, fix = found.stderr.splitlines()[-2:]
    assert "Traceback" not in found.output and found.stdout == ""
    return what.removeprefix("error: "), fix.removeprefix("  fix: ")


def read(found: Result) -> dict[str, Any]:
    assert found.exit_code == 0, found.output
    document: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return document


def test_the_demo(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    protocols = ("--protocol", "context,fixed16,adaptive")
    found = dgemma("--demo", *protocols, "--context", "384", "--runs", "1", "--seed", "5", "--json", str(file))
    document = read(found)
    lines = found.stdout.splitlines()
    assert (
        lines[0] == document["label"] == "demo model on a CPU: these figures say nothing about the 26B model or a GPU"
    )
    assert file.read_text(encoding="utf-8") == lines[-1] + "\n" == report.line(document) + "\n"
    assert (document["schema"], document["seed"], document["runs"], document["against"]) == (1, 5, 1, None)
    assert list(document["protocols"]) == ["adaptive", "context", "fixed16"]  # sorted
    (fixed,) = document["protocols"]["fixed16"]["tasks"]
    assert (fixed["prompt_tokens"], fixed["kept_tokens"], fixed["canvases"], fixed["finish"]) == (192, 192, 2, "budget")
    assert fixed["figures"]["steps_per_canvas"]["runs"] == [16.0]
    assert fixed["figures"]["tokens_per_forward"]["median"] == 6
    assert fixed["figures"]["tokens_per_pass"]["median"] == pytest.approx(192 / 33)
    *puzzles, together = document["protocols"]["adaptive"]["tasks"]
    assert [one["name"] for one in puzzles] == ["sudoku-4x4", "sudoku-6x6", "sudoku-9x9"]
    assert all(one["finish"] == "end" and one["kept_tokens"] > 10 for one in puzzles)  # it knows them
    assert together["name"] == "together" and together["kept_tokens"] == sum(one["kept_tokens"] for one in puzzles)
    sweep = document["protocols"]["context"]["tasks"]
    assert [one["prompt_tokens"] for one in sweep] == [64, 128, 192] and {one["canvases"] for one in sweep} == {2}
    assert (
        document["memory"]["of"] == "process" and document["memory"]["peak_bytes"] > document["memory"]["planned_bytes"]
    )
    assert document["machine"]["gpu"] is None and document["machine"]["threads"] == 1
    assert "fixed16: a warm-up, and 1 runs" in found.stderr


def test_the_text_demo_knows_its_prompts() -> None:
    document = read(dgemma("--model", "demo-text", "--protocol", "adaptive", "--runs", "1", "--quiet"))
    *answers, _ = document["protocols"]["adaptive"]["tasks"]
    assert [one["name"] for one in answers] == ["dates", "json", "table", "words"]
    assert all(one["finish"] == "end" and one["kept_tokens"] > 5 for one in answers)
    assert max(one["canvases"] for one in answers) == 2  # so that a commit is measured
    assert answers[2]["figures"]["commit_ms"] is not None


def test_the_same_seed_gives_the_same_answers() -> None:
    flags = ("--demo", "--protocol", "fixed16", "--runs", "1", "--context", "192", "-q", "--seed")
    digests = [read(dgemma(*flags, seed))["protocols"]["fixed16"]["tasks"][0]["digest"] for seed in ("1", "1", "2")]
    assert digests[0] == digests[1] != digests[2]


def test_quiet_says_nothing() -> None:
    found = dgemma("--demo", "--protocol", "fixed16", "--runs", "1", "--context", "192", "--quiet")
    assert found.stderr == "" and read(found)["subject"]["context"] == 192


def test_the_breakdown_of_the_demo() -> None:
    found = dgemma("--demo", "--protocol", "breakdown", "--quiet")
    rows = read(found)["protocols"]["breakdown"]["rows"]
    assert (
        len(rows) > 5
        and {"part", "ms", "share"} <= set(rows[0])
        and "breakdown: where a step's time goes" in found.stdout
    )


@pytest.mark.parametrize(
    ("flags", "code", "what"),
    [
        (("--demo", "--layout", "fp8"), 2, "--layout is that of a synthetic model"),
        (("--synthetic", "26b", "--layout", "int4"), 2, "no layout is called 'int4'"),
        (("--demo", "--runs", "0"), 2, "0 runs cannot be made"),
        (("--demo", "--runs", "many"), 2, "--runs"),
        (("--demo", "--context", "2000"), 2, "a context of 2,000 tokens cannot be given"),
        (("--demo", "--context", "150", "--protocol", "fixed16"), 2, "holds no fixed16"),
        (("--demo", "--device", "tpu"), 2, "tpu"),
        (("--demo", "--against", "http://127.0.0.1:9", "--protocol", "fixed16", "--runs", "1"), 2, "127.0.0.1:9"),
        (("--model", "26b-a4b-fp8"), 4, "not on this machine"),
    ],
)
def test_two_lines(
    flags: tuple[str, ...], code: int, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    said, fix = error(dgemma(*flags), code)
    assert what in said and fix


def test_runs_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every canvas begins with other random tokens."""
    from dgemma_local import noise

    real, count = noise.PhiloxNoise.canvas, itertools.count()
    monkeypatch.setattr(noise.PhiloxNoise, "canvas", lambda self, canvas: real(self, canvas + 100 * next(count)))
    what, _ = error(dgemma("--demo", "--protocol", "fixed16", "--runs", "1", "--context", "192"), 13)
    assert "the same seed and differ" in what


def test_a_failed_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    from dgemma_local import selftest

    monkeypatch.setattr(selftest, "needed", lambda network: True)
    monkeypatch.setattr(selftest, "failing", lambda network: [selftest.Outcome("route", False, "NaN")])
    what, _ = error(dgemma("--demo", "--protocol", "fixed16", "--context", "192"), 13)
    assert "self-test" in what and "route" in what
