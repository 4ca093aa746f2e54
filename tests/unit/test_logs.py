"""Logs: phases and their times, on stderr with -v, in a file with DGEMMA_LOG; never on stdout, never into a picture."""

import logging
import os
import re
from collections.abc import Iterator
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, TextIO

import pytest
from fake_session import spell
from typer.testing import CliRunner

from dgemma_local import cli, logs
from dgemma_local.errors import UsageError
from dgemma_local.events import Retried

PHASES = "torch resolve plan load selftest capture prefill canvas finished".split()


@pytest.fixture(autouse=True)
def nothing_open(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("DGEMMA_LOG", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield
    logs.stop()


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["run", "-p", "Spell river.", "-m", "demo-text", "--seed", "1", *arguments])


def firsts(text: str) -> list[str]:
    """First words of the lines that say how long something took, or how it ended."""
    return [line.split()[0] for line in text.splitlines() if re.match(r"\w+ +([\d.]+ m?s\b|end,)", line)]


def test_verbose_says_every_phase_on_stderr_and_nothing_on_stdout() -> None:
    quiet, told = run(), run("-v")
    assert told.stdout == quiet.stdout and firsts(told.stderr) == PHASES
    assert firsts(quiet.stderr) == []
    assert run("--verbose").exit_code == 0


def test_the_file_has_them_too_with_a_line_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "dgemma.log"
    monkeypatch.setenv("DGEMMA_LOG", str(path))
    assert run().exit_code == 0 and run("-q").exit_code == 0
    lines = path.read_text(encoding="utf-8").splitlines()
    levels = [line.split()[3] for line in lines]
    phases = [line.split()[4] for line in lines if line.split()[3] == "INFO"]
    assert phases == [*PHASES, *PHASES]  # the second run is appended
    assert levels.count("DEBUG") == sum(" DEBUG step " in line for line in lines) > 0


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGEMMA_LOG", str(tmp_path))
    found = run()
    assert found.exit_code == UsageError.exit_code and "DGEMMA_LOG" in found.stderr and found.stdout == ""


def test_lines_wait_until_nothing_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    logs.start(verbose=True)
    with logs.phase("load"):
        pass
    assert capsys.readouterr().err == ""
    logs.flush()
    assert capsys.readouterr().err.startswith("load ")
    with pytest.raises(ZeroDivisionError), logs.phase("plan"):
        _ = 1 / 0
    logs.stop()
    assert capsys.readouterr().err.rstrip().endswith("failed")


def test_they_stand_before_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    found = CliRunner().invoke(cli.app, ["run", "-p", "Hi", "-m", "no-such-model", "-v"])
    lines = found.stderr.splitlines()
    assert firsts(found.stderr) == ["torch", "resolve"] and lines[1].endswith("failed")
    assert lines[-2].startswith("error: ") and lines[-1].startswith("  fix: ")


def test_nothing_is_put_together_that_nobody_reads() -> None:
    logs.start()
    assert not logs.log.isEnabledFor(logging.INFO)
    logs.start(verbose=True)
    assert logs.log.isEnabledFor(logging.INFO) and not logs.log.isEnabledFor(logging.DEBUG)
    logs.stop()
    assert not logs.log.isEnabledFor(logging.INFO)
    assert not any(
        isinstance(handler, MemoryHandler | logging.FileHandler)
        for handler in logs.log.handlers
        if type(handler).__module__.startswith("logging")
    )


def test_a_program_of_ones_own_is_not_written_to(capsys: pytest.CaptureFixture[str]) -> None:
    """A library says nothing unless asked."""
    logs.log.error("nothing")
    assert capsys.readouterr() == ("", "")


def test_what_was_tried_again_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    logs.start(verbose=True)
    canvases = logs.Canvases()
    events = list(spell("Hi user"))
    for event in (*events[:3], Retried(0, "empty", 2), *events[3:]):
        canvases.take(event, 0.5)
    logs.stop()
    said = capsys.readouterr().err
    assert "retried   1.50 s, canvas 1 after 2 steps" in said and "canvas    1.50 s, 1: 2 steps" in said


def full_disk(_: object) -> TextIO:
    return Path("/dev/full").open("a", encoding="utf-8")


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log on a disk that is full."""
    monkeypatch.setenv("DGEMMA_LOG", str(tmp_path / "dgemma.log"))
    monkeypatch.setattr(logging.FileHandler, "_open", full_disk)


@pytest.mark.usefixtures("full")
def test_an_answer_outlives_its_log() -> None:
    found = run()
    assert found.exit_code == 0 and found.stdout.strip() and "Traceback" not in found.stderr
    assert found.stderr.count("DGEMMA_LOG") == 1 and "No space left" in found.stderr


@pytest.mark.usefixtures("full")
def test_a_log_that_fails_is_said_when_nothing_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    logs.start()
    logs.log.info("one")
    logs.log.info("two")
    logs.flush()
    assert capsys.readouterr().err == ""
    logs.stop()
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_bytes_that_are_no_text_are_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGEMMA_LOG", str(tmp_path / "dgemma.log"))
    logs.start()
    logs.log.info("a\udcffb")
    logs.stop()
    assert "a\\udcffb" in (tmp_path / "dgemma.log").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["pipe", "none/dgemma.log", "file/dgemma.log", "n" * 300])
def test_a_log_where_none_can_be_is_refused_before_it_is_opened(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe without a reader would hold the program for good."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    monkeypatch.setenv("DGEMMA_LOG", str(tmp_path / name))
    monkeypatch.setattr(logging.FileHandler, "_open", lambda self: pytest.fail("opened"))
    with pytest.raises(UsageError, match="DGEMMA_LOG"):
        logs.start()


@pytest.mark.parametrize("words", ["config --path", "models", "version", "completion bash", "run --help"])
def test_a_command_that_logs_nothing_does_without(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGEMMA_LOG", str(tmp_path))
    assert CliRunner().invoke(cli.app, words.split()).exit_code == 0
    assert CliRunner().invoke(cli.app, ["bench", "--demo"]).exit_code == UsageError.exit_code
