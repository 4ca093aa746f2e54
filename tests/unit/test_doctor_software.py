"""Pythons with one broken package each: the doctor finds it, and names the cure."""

import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from examined import RTX_4090, SEES, A, found, is_cured, machine
from examined import nothing_of_this_machine as nothing_of_this_machine

from dgemma_local.card import Card
from dgemma_local.doctor import software, trial
from dgemma_local.doctor.finding import Level
from dgemma_local.doctor.probe import Lost, Probe
from dgemma_local.fit import GB

# ── Python, packages ──────────────────────────────────────────────────────────────────────────────────────────────


def test_python_and_packages_of_this_environment() -> None:
    assert found(software.python, machine())["python"].level is Level.OK
    packages = found(software.packages, machine())
    assert packages["packages"].facts["versions"]["tokenizers"] == software.installed("tokenizers")
    assert "torch" not in packages["packages"].facts["versions"]


def test_a_package_that_is_missing_or_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    there = software.installed
    monkeypatch.setattr(software, "installed", lambda p: {"rich": None, "tokenizers": "0.15.0"}.get(p, there(p)))
    seen = found(software.packages, machine())
    is_cured(seen["rich"], Level.FAIL, "is not installed", "pip install 'rich")
    is_cured(seen["tokenizers"], Level.FAIL, "0.15.0 is outside", "pip install 'tokenizers")


def test_reported_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "installed", {"triton": "3.8.0", "huggingface-hub": "1.17.0"}.get)
    is_cured(found(software.known, machine())["known faults"], Level.WARN, "triton 3.8.0", "pip install 'triton")
    monkeypatch.setattr(software, "installed", {"triton": "3.7.1", "huggingface-hub": "1.18.0"}.get)
    assert "goes on where it was" in found(software.known, machine())["known faults"].what
    monkeypatch.setattr(software, "installed", {"triton": "3.7.1"}.get)
    assert found(software.known, machine())["known faults"].level is Level.OK
    b300 = Card(index=0, name="B300", uuid=A, total=GB, free=GB, capability=(10, 3))
    is_cured(found(software.known, machine(b300))["known faults"], Level.WARN, "#10590", "triton")


# ── torch and triton ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], None]:
    """A module that a child of this process imports in another's place."""
    monkeypatch.syspath_prepend(tmp_path / "modules")

    def breaks(name: str, code: str) -> None:
        (tmp_path / "modules").mkdir(exist_ok=True)
        (tmp_path / "modules" / f"{name}.py").write_text(code)

    return breaks


MISSING = 'raise ModuleNotFoundError("No module named \'{0}\'", name="{0}")'


def test_triton_is_missing(broken: Callable[[str, str], None]) -> None:
    broken("triton", MISSING.format("triton"))
    with Probe() as asked:
        seen = found(software.triton, machine(RTX_4090, probe=asked))["triton"]
        is_cured(seen, Level.FAIL, "is not installed: no kernel runs", "pip install 'triton<3.8,>=3.6'")
        assert found(software.triton, machine(probe=asked))["triton"].level is Level.WARN


TORCHES = [
    (MISSING.format("torch"), "is not installed", "pip install 'torch"),
    ("raise ImportError('libcudnn.so.9: cannot open')", "libcudnn.so.9: cannot open", "--force-reinstall"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "ended by SIGILL", "--force-reinstall"),
    ("import os; os._exit(3)", "ended with 3", "--force-reinstall"),
    ("print('noise on stdout'); raise OSError('short read')", "OSError: short read", "--force-reinstall"),
    ("__version__ = '2.0'", "AttributeError", "--force-reinstall"),
]


@pytest.mark.parametrize(("code", "what", "cure"), TORCHES)
def test_torch_is_broken(broken: Callable[[str, str], None], code: str, what: str, cure: str) -> None:
    broken("torch", code)
    with Probe() as asked:
        at = machine(probe=asked)
        is_cured(found(software.torch, at)["torch"], Level.FAIL, what, cure)
        assert at.torch is None
        assert found(trial.kernels, at)["kernels"].level is found(trial.smoke, at)["demo"].level is Level.SKIP


def test_torch_hangs(broken: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    broken("torch", "import time; time.sleep(60)")
    monkeypatch.setattr(software, "IMPORT_LIMIT", 0.2)
    with Probe() as asked:
        seen = found(software.torch, machine(probe=asked))["torch"]
        is_cured(seen, Level.FAIL, "no answer within 0.2 seconds", "restart the computer")
        assert asked._child is None  # and none is left


def test_a_probe_starts_again_after_a_crash(broken: Callable[[str, str], None]) -> None:
    broken("torch", "import os; os._exit(3)")
    with Probe() as asked:
        with pytest.raises(Lost):
            asked.ask("torch", 30)
        assert "version" in asked.ask("triton", 60)


CUDAS: list[tuple[dict[str, Any], Card, str, str]] = [
    ({"cuda": None}, RTX_4090, "is no CUDA build: NVIDIA GeForce RTX 4090 lies idle", "pip install --force-reinstall 'torch"),
    ({"version": "2.9.1"}, RTX_4090, "2.9.1 is outside", "pip install 'torch"),
    ({"sane": False}, RTX_4090, "multiplies wrongly", "--force-reinstall"),
    ({}, replace(RTX_4090, driver="550.144.03"), "a driver from 580 on, here is 550.144.03", "install a driver from 580"),
    ({"cuda": "12.8"}, replace(RTX_4090, driver="515.1"), "a driver from 525 on", "install a driver from 525"),
    ({"cuda_available": False, "said": "no permission"}, RTX_4090, "torch sees no card, and nvidia-smi does: no perm", "--gpus"),
    ({"built_for": ["sm_90"]}, RTX_4090, "no code for capability 8.9: sm_90", "newest CUDA"),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "here", "what", "cure"), CUDAS)
def test_torch_and_the_card_do_not_go_together(facts: dict[str, Any], here: Card, what: str, cure: str) -> None:
    seen = found(software.torch, machine(here, answers={"torch": SEES | facts}))
    (wrong,) = (each for each in seen.values() if each.level is Level.FAIL)
    is_cured(wrong, Level.FAIL, what, cure)


def test_torch_and_the_card_go_together() -> None:
    seen = found(software.torch, machine(RTX_4090, answers={"torch": SEES}))
    assert {each.level for each in seen.values()} == {Level.OK} and set(seen) == {"torch", "CUDA"}


@pytest.mark.parametrize(
    ("built", "capability", "good"),
    [
        (["sm_86"], (8, 9), True), (["sm_90"], (8, 9), False), (["sm_80"], (9, 0), False), (["sm_90a"], (9, 0), True),
        (["compute_80"], (12, 0), True), (["compute_120"], (9, 0), False), (["sm_100"], (12, 0), False), ([], (8, 9), True),
    ],
)  # fmt: skip
def test_which_code_a_card_runs(built: list[str], capability: tuple[int, int], good: bool) -> None:
    assert software.runs(built, capability) is good


def test_triton_finds_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    at = machine(RTX_4090, answers={"triton": {"version": "3.7.1"}})
    monkeypatch.setenv("PATH", str(tmp_path))
    is_cured(found(software.triton, at)["compiler"], Level.FAIL, "no C compiler", "install gcc")
    monkeypatch.setenv("CC", "nocc")
    is_cured(found(software.triton, at)["compiler"], Level.FAIL, "called nocc (CC)", "set CC")
    (tmp_path / "nocc").write_text("")
    (tmp_path / "nocc").chmod(0o755)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    is_cured(found(software.triton, at)["compiler"], Level.FAIL, "Python.h is not there", "python3-dev")
    (tmp_path / "Python.h").write_text("")
    assert found(software.triton, at)["compiler"].level is Level.OK


def test_triton_of_another_version() -> None:
    at = machine(RTX_4090, answers={"triton": {"version": "3.9.0"}})
    is_cured(found(software.triton, at)["triton"], Level.FAIL, "3.9.0 is outside", "pip install 'triton")
