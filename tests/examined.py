"""Machines for the doctor, each with what is broken in it; a probe that answers in this process or as it is told to.

A test file takes `from examined import nothing_of_this_machine as nothing_of_this_machine`: it then holds for all its tests;
and `own_demo` alike.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import pytest

from dgemma_local.card import MIB, Card
from dgemma_local.demo.render import MODELS
from dgemma_local.doctor import child, examine, surroundings
from dgemma_local.doctor.examination import Check, Machine
from dgemma_local.doctor.finding import Finding, Level
from dgemma_local.doctor.probe import Probe
from dgemma_local.registry import table

NVFP4 = "26b-a4b-nvfp4"
A = "GPU-3a1cb1e4-0f4e-6b52-9f7a-5d0a3f1f8c11"
RTX_4090 = Card(
    index=0,
    name="NVIDIA GeForce RTX 4090",
    uuid=A,
    total=24564 * MIB,
    free=24000 * MIB,
    capability=(8, 9),
    driver="580.65",
)


class Here:
    """Answers as the child does, in this process, or as it is told to."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    def ask(self, part: str, limit: float, **given: Any) -> dict[str, Any]:
        if part in self.answers:
            if isinstance(self.answers[part], Exception):
                raise self.answers[part]
            return cast(dict[str, Any], self.answers[part])
        return child.answer({"part": part, **given})


SEES = {
    "version": "2.13.0", "cuda": "13.0", "hip": None, "sane": True, "cuda_available": True, "said": "",
    "cards": ["NVIDIA GeForce RTX 4090"], "built_for": ["sm_80", "sm_86", "sm_90", "sm_120"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if surroundings.THEIRS.fullmatch(name) and name not in ("LANG", "PYTHONPATH"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def own_demo(tmp_path: Path) -> Path:
    """The demo's folder, a copy that can be damaged, told by the user's table."""
    folder = tmp_path / "sudoku"
    shutil.copytree(MODELS / "sudoku", folder)
    (tmp_path / "config" / "dgemma").mkdir(parents=True)
    (tmp_path / "config" / "dgemma" / "models.toml").write_text(f'[demo]\nfolder = "{folder}"\n')
    return folder


def machine(*cards: Card, **known: Any) -> Machine:
    made = Machine(probe=cast(Probe, Here(**known.pop("answers", {}))), cards=cards, models=table())
    for name, value in known.items():
        setattr(made, name, value)
    return made


def found(look: Callable[[Machine], Iterable[Finding]], at: Machine) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine([Check("check", look)], at)}


def is_cured(finding: Finding, level: Level, what: str, cure: str) -> None:
    assert finding.level is level
    assert what in finding.what and cure in (finding.cure or ""), finding
