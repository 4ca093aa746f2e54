"""`dgemma bench` as a user gives it, on the demo models."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner
from vllm_server import Manner, VllmServer

from dgemma_local import cli
from dgemma_local.bench import __main__ as bare
from dgemma_local.bench import report


def dgemma(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["bench", *arguments])


@pytest.fixture(autouse=True)
def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that a self-test replaces here are replaced no longer than a test."""
    from dgemma_local import ops

    monkeypatch.setattr(ops, "_replaced", frozenset())


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
    assert "fixed16: a warm-up, and 1 run" in found.stderr


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
    ("flags", "dtype"),
    [
        ((), "bfloat16"),
        (("--dtype", "float32"), "float32"),
        (("--against", "transformers"), "float32"),
        (("--against", "transformers", "--device", "cpu"), "float32"),
        (("--against", "transformers", "--dtype", "bfloat16"), "bfloat16"),
    ],
)
def test_what_is_computed_in(flags: tuple[str, ...], dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dgemma_local.bench import breakdown, comparison

    def measure(subject: Any, folder: Path, task: Any, *, runs: int, say: Any) -> dict[str, Any]:
        assert folder == subject.folder and len(task.prompt) == 96 and runs == 1
        say("theirs")
        return {"why_not": f"of {subject.network.dtype}"}

    monkeypatch.setattr(comparison, "measure", measure)
    monkeypatch.setattr(breakdown, "breakdown", lambda *_: [])
    found = dgemma("--demo", "--protocol", "breakdown", "--runs", "1", "--context", "192", *flags)
    document = read(found)
    assert document["subject"]["dtype"] == dtype
    chosen = "--against" in flags and "--dtype" not in flags
    assert [line for line in found.stderr.splitlines() if line.startswith("in float32")] == [
        "in float32, where tokens are to equal those of transformers; --dtype bfloat16 compares what is stored"
    ] * chosen
    if "--against" in flags:
        assert document["against"]["found"] == {"why_not": f"of torch.{dtype}"} and "theirs" in found.stderr


def test_on_a_card_beside_transformers_it_stays_as_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    from dgemma_local.bench import command, request, subject

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("dgemma_local.registry.is_demo", lambda folder: False)
    assert subject.lands_on("demo", None) == "cuda" == subject.lands_on("demo", "cuda")
    assert subject.lands_on("demo", "cpu") == "cpu"
    monkeypatch.setattr("dgemma_local.registry.is_demo", lambda folder: True)
    assert subject.lands_on("demo", None) == "cpu"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("dgemma_local.registry.is_demo", lambda folder: False)
    assert subject.lands_on("demo", None) == "cpu"
    monkeypatch.undo()
    monkeypatch.setattr(subject, "lands_on", lambda name, device: "cuda")
    beside = request.checked(demo=True, against="transformers", context=192)
    assert str(command._opened(beside, lambda text: None).network.dtype) == "torch.bfloat16"


def test_the_file_grows_with_each_task_and_peak_memory_is_of_the_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks of one token, each of which takes memory; then the breakdown, which takes more, and Ctrl-C in it."""
    from dgemma_local.bench import breakdown, json_file, machine, measure, protocols

    file, seen, used = tmp_path / "out.json", list[dict[str, Any]](), [1]
    repeat, write, adaptive = measure.repeat, json_file.JsonFile.write, protocols.adaptive

    def answers(*given: Any) -> Any:
        used[0] += 1
        return repeat(*given)

    def taken(*_: Any) -> Any:
        used[0] = 99
        if len(seen) > 5:
            raise KeyboardInterrupt
        return []

    def watched(self: Any, document: Any) -> None:
        write(self, document)
        seen.append(json.loads(file.read_text()))

    monkeypatch.setattr(measure, "repeat", answers)
    monkeypatch.setattr(protocols, "adaptive", lambda *given, **options: list(adaptive(*given, **options))[:2])
    monkeypatch.setattr(machine, "peak_memory", lambda device: (used[0], "process"))
    monkeypatch.setattr(breakdown, "breakdown", taken)
    monkeypatch.setattr(json_file.JsonFile, "write", watched)
    flags = ("--demo", "--context", "300", "--runs", "1", "-q", "--json", str(file), "--protocol")
    found = read(dgemma(*flags, "fixed16,adaptive,breakdown"))

    def state(document: dict[str, Any]) -> tuple[Any, ...]:
        counts = {name: len(one["tasks"]) for name, one in document["protocols"].items()}
        return document["complete"], counts, (document["memory"] or {}).get("peak_bytes")

    both = {"fixed16": 1, "adaptive": 3}
    assert [state(one) for one in seen] == [
        (False, {}, None),
        (False, {"fixed16": 1}, 2),
        (False, {"fixed16": 1, "adaptive": 1}, 3),
        (False, {"fixed16": 1, "adaptive": 2}, 4),
        (False, both, 4),
        (False, both | {"breakdown": 0}, 4),
        (True, both | {"breakdown": 0}, 4),
    ]
    assert seen[-1] == found and all({*one} == {*found} for one in seen)
    assert seen[1]["machine"]["threads"] == 1 and seen[1]["memory"]["planned_bytes"] > 0
    assert seen[0]["subject"] is seen[0]["machine"] is None
    used[0] = 1
    cut = dgemma(*flags, "fixed16,breakdown")
    assert cut.exit_code == 130 and cut.stdout == ""
    assert state(json.loads(file.read_text())) == (False, {"fixed16": 1}, 2)


def test_figures_that_mean_nothing_are_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dgemma_local.bench import measure
    from dgemma_local.errors import BenchRefused

    file, repeat = tmp_path / "out.json", measure.repeat

    def differ(speaker: Any, task: Any, *given: Any) -> Any:
        if task.name == "sudoku-4x4":
            assert file.exists()
            raise BenchRefused("they differ", "report it")
        return repeat(speaker, task, *given)

    monkeypatch.setattr(measure, "repeat", differ)
    flags = ("--demo", "--context", "300", "--runs", "1", "--protocol", "fixed16,adaptive")
    assert error(dgemma(*flags, "--json", str(file)), 13)[0] == "they differ"
    assert not file.exists()


def test_a_disk_that_is_full_ends_with_two_lines_behind_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dgemma_local.bench import breakdown, json_file

    file = tmp_path / "out.json"
    monkeypatch.setattr(breakdown, "breakdown", lambda *_: [])

    def full(self: Any, document: Any) -> None:
        self.problem = "full"

    monkeypatch.setattr(json_file.JsonFile, "write", full)
    found = dgemma("--demo", "--protocol", "breakdown", "-q", "--json", str(file))
    assert found.exit_code == 2 and "cannot be written: full" in found.stderr
    assert json.loads(found.stdout.splitlines()[-1])["complete"] is True
    assert bare.main(["--demo", "--protocol", "breakdown", "-q", "--json", str(file)]) == 2  # the other front end
    said = capsys.readouterr()
    assert "cannot be written: full" in said.err and json.loads(said.out.splitlines()[-1])["complete"] is True


def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is measured or made from now on is a mistake."""
    from dgemma_local.bench import measure, subject

    def mistake(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(measure, "repeat", mistake)
    monkeypatch.setattr(subject, "open_model", mistake)
    monkeypatch.setattr(subject, "open_synthetic", mistake)


def test_a_word_that_ops_do_not_know_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    untouched(monkeypatch)
    monkeypatch.setenv("DGEMMA_OPS", "nonsense")
    what, _ = error(dgemma("--demo", "--json", str(tmp_path / "x.json")), 2)
    assert "DGEMMA_OPS has the word 'nonsense'" in what and not list(tmp_path.iterdir())


def test_a_file_of_a_run_before_is_none_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the model is opened leaves that nothing was measured; a refusal leaves nothing."""
    from dgemma_local import selftest
    from dgemma_local.bench import subject
    from dgemma_local.errors import CheckpointError

    file = tmp_path / "out.json"
    flags = ("--demo", "--protocol", "fixed16", "--context", "192", "--json", str(file))
    raised: list[BaseException] = [KeyboardInterrupt(), CheckpointError("broken", "mend it")]

    def opened(*_: Any, **__: Any) -> Any:
        assert json.loads(file.read_text())["complete"] is False
        raise raised.pop(0)

    with monkeypatch.context() as then:
        then.setattr(subject, "open_model", opened)
        file.write_text('{"complete": true}')
        assert dgemma(*flags).exit_code == 130
        left = json.loads(file.read_text())
        assert left["complete"] is False and left["protocols"] == {} and left["subject"] is None
        assert dgemma(*flags).exit_code == 6 and not file.exists()
    file.write_text('{"complete": true}')
    monkeypatch.setattr(selftest, "needed", lambda network: True)
    monkeypatch.setattr(selftest, "failing", lambda network, context: [selftest.Outcome("route", False, "NaN")])
    error(dgemma(*flags), 13)
    assert not file.exists()


@pytest.mark.parametrize(
    ("protocols", "least"), [("fixed16,adaptive", 213), ("context,fixed16,adaptive", 213), ("context", 193)]
)
def test_a_context_too_short_for_one_protocol_is_refused_before_any_is_measured(
    protocols: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what all of them need."""
    from dgemma_local.bench import measure

    real = measure.repeat
    monkeypatch.setattr(measure, "repeat", None)
    flags = ("--demo", "--runs", "1", "-q", "--protocol", protocols, "--context")
    what, fix = error(dgemma(*flags, str(least - 1)), 2)
    assert f"a context of {least - 1} tokens" in what and fix == f"give --context {least} or more"
    monkeypatch.setattr(measure, "repeat", real)
    assert read(dgemma(*flags, str(least)))["complete"] is True


@pytest.mark.parametrize(("protocols", "least"), [("fixed16,adaptive", 213), ("fixed16,context", 193)])
def test_of_several_protocols_that_do_not_fit_the_one_that_needs_most_is_named(protocols: str, least: int) -> None:
    _, fix = error(dgemma("--demo", "--context", "150", "--protocol", protocols), 2)
    assert fix == f"give --context {least} or more"


def test_a_server_that_holds_too_little_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from dgemma_local.bench import measure

    monkeypatch.setattr(measure, "repeat", None)
    flags = ("--demo", "--protocol", "fixed16", "--runs", "1", "--context", "192", "--against")
    with VllmServer(Manner(longest=191)) as server:
        what, fix = error(dgemma(*flags, server.url), 14)
    assert "a context of 191 tokens, and 192 are asked for" in what and "--max-model-len 192" in fix


def test_a_server_that_fails_does_not_take_our_figures_along(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    flags = ("--demo", "--protocol", "fixed16", "--runs", "1", "--context", "192", "--json", str(file), "--against")
    with VllmServer(Manner(failure="broken")) as server:
        found = dgemma(*flags, server.url)
    assert found.exit_code == 14 and "Traceback" not in found.output
    what, fix = found.stderr.splitlines()[-2:]
    assert "answers with an error: out of memory" in what and fix.startswith("  fix: ")
    document = json.loads(found.stdout.splitlines()[-1])
    assert document == json.loads(file.read_text()) and document["complete"] is True
    assert document["protocols"]["fixed16"]["tasks"][0]["figures"]["step_ms_p50"]["median"] > 0
    assert document["against"]["found"] == {"why_not": what.removeprefix("error: ")}
    assert set(document["against"]["ratio"].values()) == {None} and "not measured" in found.stdout


def test_why_transformers_cannot_take_part_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dtype stays as it is stored, and it is said before our own figures are taken."""
    from dgemma_local.bench import transformers_side

    monkeypatch.setattr(transformers_side, "find_spec", lambda name: None)
    flags = ("--demo", "--protocol", "fixed16", "--runs", "1", "--context", "192", "--against", "transformers")
    found = dgemma(*flags)
    document = read(found)
    assert document["subject"]["dtype"] == "bfloat16" and "not installed" in document["against"]["found"]["why_not"]
    said = found.stderr.splitlines()
    first, second = (
        next(i for i, line in enumerate(said) if words in line) for words in ("not installed", "a warm-up")
    )
    assert first < second and "in float32" not in found.stderr


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
        (("--demo", "--against", "http://127.0.0.1:9", "--protocol", "fixed16", "--runs", "1"), 14, "127.0.0.1:9"),
        (("--demo", "--dtype", "float16"), 2, "--dtype"),
        (("--model", "26b-a4b-fp8"), 4, "not on this machine"),
        (("--model", ""), 2, "--model names nothing"),
        (("--demo", "--json", ""), 2, "--json names no file"),
        (("--demo", "--against", "transformers", "--fp8-mlp"), 2, "--fp8-mlp our weights are not those"),
        (("--synthetic", "26b"), 2, "no CUDA device: on the CPU synthetic 26b nvfp4 takes 1"),
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
    monkeypatch.setattr(selftest, "failing", lambda network, context: [selftest.Outcome("route", False, "NaN")])
    what, _ = error(dgemma("--demo", "--protocol", "fixed16", "--context", "192"), 13)
    assert "self-test" in what and "route" in what
