"""Presets: names for settings of the sampler, of which one is the checkpoint's own."""

import json
import sys
from pathlib import Path
from typing import Any

import compare_presets
import fake_session
import pytest
from fake_session import FakeSession
from typer.testing import CliRunner

from dgemma_local import cli
from dgemma_local.config import load_generation_config
from dgemma_local.demo.evaluate import cases
from dgemma_local.demo.render import FOLDERS
from dgemma_local.presets import SETTINGS, Preset, applied
from dgemma_local.session import Wishes, open_session

OWN = load_generation_config(FOLDERS["sudoku"])


def test_balanced_is_what_the_checkpoint_says() -> None:
    assert applied(OWN, Preset.balanced) == applied(OWN, None) == OWN


def test_fast_takes_fewer_steps_and_quality_asks_for_more() -> None:
    fast, quality = applied(OWN, Preset.fast), applied(OWN, Preset.quality)
    assert fast.steps < OWN.steps <= quality.steps
    assert quality.confidence <= OWN.confidence <= fast.confidence
    assert quality.entropy_bound <= OWN.entropy_bound <= fast.entropy_bound
    for other in (fast, quality):  # and nothing else is changed
        assert (other.end_ids, other.pad_id, other.t_min, other.t_max) == (
            OWN.end_ids,
            OWN.pad_id,
            OWN.t_min,
            OWN.t_max,
        )


def test_each_name_has_settings() -> None:
    assert {*SETTINGS} == {*Preset}


def test_a_session_is_opened_with_it() -> None:
    assert open_session("demo", Wishes(preset="fast")).steps == SETTINGS["fast"]["steps"]
    assert open_session("demo", Wishes(preset="quality")).settings["stability"] == SETTINGS["quality"]["stability"]


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    fake = FakeSession("Hi user")
    monkeypatch.setitem(sys.modules, "dgemma_local.session", fake_session.module(fake))
    return fake


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["run", "-p", "Hi", *arguments])


def test_the_flag_reaches_the_session(session: FakeSession) -> None:
    assert run("--preset", "fast").exit_code == 0
    assert session.opened is not None and session.opened[1]["preset"] == "fast"
    assert run().exit_code == 0 and session.opened[1]["preset"] is None
    assert run("--preset", "hasty").exit_code == 2


def test_a_preset_that_is_asked_for_goes_before_steps_of_the_file(
    session: FakeSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But steps that are asked for go before a preset, wherever that comes from."""
    config = tmp_path / "config.toml"
    monkeypatch.setenv("DGEMMA_CONFIG", str(config))
    config.write_text("[run]\nsteps = 3\n", encoding="utf-8")
    assert json.loads(run("--json").stdout.splitlines()[0])["steps"] == 3
    run("--preset", "quality")
    assert session.asked["steps"] is None
    config.write_text('[run]\npreset = "quality"\n', encoding="utf-8")
    run("--steps", "5")
    assert session.asked["steps"] == 5 and session.opened is not None and session.opened[1]["preset"] == "quality"


def test_the_comparison_counts_each_preset_over_the_same_cases() -> None:
    session = open_session("demo-text")
    buckets = {name: make for name, make in cases("text").items() if name in ("spell", "reverse")}
    tallies = compare_presets.compare(session, buckets, 2)
    assert {tally.answers for tally in tallies.values()} == {4}
    assert tallies[Preset.fast].steps < tallies[Preset.quality].steps
    lines = compare_presets.table("text", tallies)
    assert len(lines) == 5 and lines[3].startswith("| balanced | ")
