"""`dgemma run --record`, and `dgemma replay` of what it wrote."""

import errno
import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import fake_session
import pytest
from fake_session import FakeSession
from small_tokenizer import small
from typer.testing import CliRunner

from dgemma_local import __version__, cli
from dgemma_local.events import StepDone
from dgemma_local.recording import Recorder, open_recording


def dgemma(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, list(map(str, arguments)))


@pytest.fixture(autouse=True)
def session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeSession:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    fake = FakeSession("Hi user\n  model model")
    monkeypatch.setitem(sys.modules, "dgemma_local.session", fake_session.module(fake))
    return fake


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
@pytest.mark.parametrize("front", [[], ["--json"], ["--quiet"], ["--stats"]])
def test_a_run_is_recorded_whatever_shows_it(tmp_path: Path, session: FakeSession, name: str, front: list[str]) -> None:
    path = tmp_path / name
    found = dgemma("run", "-p", "Hi", "--seed", 3, "--record", path, *front)
    assert found.exit_code == 0, found.output
    recording = open_recording(path)
    assert recording.notice is None
    expected = list(session.answer([], seed=3, max_tokens=1024, pause=0))
    rounded = [event for event in recording.events if isinstance(event, StepDone)]
    steps = [event for event in expected if isinstance(event, StepDone)]
    assert [(s.fed, s.draft, s.accepted, s.next, s.done) for s in rounded] == [
        (s.fed, s.draft, s.accepted, s.next, s.done) for s in steps
    ]
    assert [type(event) for event in recording.events] == [type(event) for event in expected]
    assert recording.text == "Hi user\n  model model"
    assert all(seconds >= 0 for seconds in recording.seconds)


def test_the_first_line_says_how_it_came_about(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    assert dgemma("run", "-p", "Hi", "--seed", 3, "--max-tokens", 99, "--record", path).exit_code == 0
    header = open_recording(path).header
    assert (header.model, header.demo, header.seed, header.max_tokens, header.steps) == ("fake", True, 3, 99, 8)
    assert header.prompt == small().prompt([{"role": "user", "content": "Hi"}], thinking=False)
    assert header.settings == {"entropy_bound": 0.1, "thinking": False}
    assert header.dgemma == __version__


def test_a_prompt_is_left_out_on_demand(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    assert dgemma("run", "-p", "model", "--record", path, "--no-prompt").exit_code == 0
    assert open_recording(path).header.prompt is None
    assert "prompt" not in json.loads(gzip.decompress(path.read_bytes()).splitlines()[0])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--no-prompt"], "--no-prompt has nothing to leave it out of"),
        (["--view", "grid"], "--view has nothing to show"),
        (["--draft", "argmax"], "--draft has nothing to show"),
        (["--theme", "light"], "--theme has nothing to show"),
        (["--fps", "5"], "--fps has nothing to show"),
        (["--step"], "--step has nothing to show"),
        (["--slow", "1"], "--slow has nothing to show"),
    ],
)
def test_flags_that_would_do_nothing(session: FakeSession, flags: list[str], said: str) -> None:
    found = dgemma("run", "-p", "Hi", *flags)
    assert (found.exit_code, found.stderr.splitlines()[0]) == (2, f"error: {said}")
    assert session.opened is None


def test_steps_that_no_key_can_advance(session: FakeSession) -> None:
    found = dgemma("run", "-p", "Hi", "--visualize", "--step")
    assert found.exit_code == 2 and "waits for keys" in found.stderr
    assert session.asked == {}


def test_a_place_that_cannot_be_written_is_said_before_a_model_is_opened(tmp_path: Path, session: FakeSession) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    for path in (tmp_path, tmp_path / "no" / "such" / "run.jsonl", notes):
        found = dgemma("run", "-p", "Hi", "--record", path)
        assert found.exit_code == 15 and len(found.stderr.splitlines()) == 2, found.stderr
    assert session.opened is None
    assert notes.read_text() == "mine"


def test_a_disk_that_fills_costs_the_recording_and_not_the_answer(session: FakeSession) -> None:
    found = dgemma("run", "-p", "Hi", "--record", "/dev/full")
    assert found.stdout in ("", "Hi user\n  model model\n")
    assert found.exit_code == 15
    assert "/dev/full" in found.stderr


def test_what_was_recorded_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    assert dgemma("run", "-p", "Hi", "--record", path).exit_code == 0
    found = dgemma("replay", path)
    assert (found.exit_code, found.stdout) == (0, "Hi user\n  model model\n")


def test_a_disk_that_fills_later_is_an_error_behind_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    whole = Recorder._written

    def full(self: Recorder, data: bytes) -> OSError | None:
        if b"canvas_committed" not in data:
            return whole(self, data)
        self._fail(error := OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        return error

    monkeypatch.setattr(Recorder, "_written", full)
    found = dgemma("run", "-p", "Hi", "--record", path, "--quiet")
    assert (found.exit_code, found.stdout) == (15, "Hi user\n  model model\n")
    assert found.stderr.splitlines()[-2:] == [
        f"error: {path} is recorded in part only: No space left on device",
        "  fix: make room, or record elsewhere",
    ]
    assert len(open_recording(path).canvases[0]) == 4  # complete up to there
