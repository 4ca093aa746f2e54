"""Environment variables as the doctor tells them: no secret, and what cannot be meant."""

import json
import os

import pytest
from examined import SEES, found, is_cured, machine
from examined import nothing_of_this_machine as nothing_of_this_machine

from dgemma_local.doctor import examine, surroundings
from dgemma_local.doctor.examination import Check
from dgemma_local.doctor.finding import Level


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "none that matter" in found(surroundings.environment, machine())["environment"].what or os.environ.get(
        "LANG"
    )
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@proxy:1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    seen = list(examine([Check("environment", surroundings.environment)], machine()))
    assert "secret" not in json.dumps([dict(each.facts) for each in seen]) + str(seen)
    assert seen[0].facts["TOKENIZERS_PARALLELISM"] == "false" and seen[0].facts["HF_TOKEN"] == "set, not shown"
    is_cured(seen[1], Level.WARN, "TRITON_INTERPRET", "unset")


def test_a_word_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGEMMA_OPS", "troch")
    seen = found(surroundings.environment, machine(torch=dict(SEES)))["environment"]
    is_cured(seen, Level.FAIL, "'troch'", "choose of: torch")
