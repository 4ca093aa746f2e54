"""Cards, drivers and memory with one fault each: the doctor finds it, and names the cure."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from dgemma_local.kernels import _launch
from examined import SEES, A, found, is_cured, machine
from examined import nothing_of_this_machine as nothing_of_this_machine

from dgemma_local import card, ops
from dgemma_local.doctor import hardware, software, trial
from dgemma_local.doctor.finding import Level
from dgemma_local.fit import GB


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """An nvidia-smi that answers three queries, or runs a script."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def write(cards: str = "", links: str = "", apps: str = "", script: str | None = None) -> None:
        answers = f"""case "$1" in *pcie*) printf '%s' '{links}';; *compute-apps*) printf '%s' '{apps}';; *) printf '%s' '{cards}';; esac"""
        path = folder / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{answers if script is None else script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    return write


LINK = "0, 580.65.06, 1, 4, 16, 16\n"


def row(name: str = "NVIDIA GeForce RTX 4090", total: int = 24564, free: int = 24000, capability: str = "8.9") -> str:
    return f"0, {name}, {total}, {total - free}, {capability}, 580.65.06, {A}, {free}\n"


def test_a_card_that_is_in_order(smi: Callable[..., None]) -> None:
    smi(row(), LINK)
    at = machine()
    seen = found(hardware.cards, at)
    assert {each.level for each in seen.values()} == {Level.OK}
    assert list(seen) == ["driver", "card 0", "VRAM 0", "PCIe 0"]
    assert at.card is not None and at.driver == "580.65.06"
    assert seen["card 0"].what == "NVIDIA GeForce RTX 4090, capability 8.9"
    assert seen["PCIe 0"].facts == {"generation": 1, "generation_max": 4, "width": 16, "width_max": 16}


CARDS = [
    ({"cards": row(total=16376, free=16000)}, "VRAM 0", "needs 18.40 GB", "dgemma models show 26b-a4b-nvfp4"),
    ({"cards": row(capability="8.6")}, "card 0", "the kernels begin at 8.9", "RTX 40 series"),
    ({"cards": row(capability="10.0")}, "card 0", "not seen on it", "`kernels`"),
    (
        {"cards": row(free=9000), "apps": f"4711, python3, 15000, {A}\n"},
        "VRAM 0",
        "pid 4711 (15,000 MiB)",
        "end pid 4711",
    ),
    ({"cards": row(free=9000)}, "VRAM 0", "needs 18.40 GB", "--context"),
    ({"cards": row(), "links": "0, 580.65.06, 4, 4, 4, 16\n"}, "PCIe 0", "4 of 16 lanes", "slot"),
]


@pytest.mark.parametrize(("answers", "name", "what", "cure"), CARDS)
def test_a_card_that_is_not(smi: Callable[..., None], answers: dict[str, str], name: str, what: str, cure: str) -> None:
    smi(**{"links": LINK} | answers)
    is_cured(found(hardware.cards, machine())[name], Level.WARN, what, cure)


SMIS = [
    ("exec sleep 60", Level.FAIL, "nvidia-smi does not answer", "restart the computer"),
    ("echo '<html>'", Level.FAIL, "makes no sense: '<html>'", "install the driver again"),
    ("printf ''", Level.FAIL, "makes no sense", "install the driver again"),
    ("printf '0, 580, 4\\n'", Level.FAIL, "makes no sense", "install the driver again"),
    ("echo 'NVIDIA-SMI has failed'; exit 9", Level.FAIL, "ends with 9: NVIDIA-SMI has failed", "restart"),
    ("exit 1", Level.FAIL, "nvidia-smi ends with 1, and says nothing", "restart"),
    ("kill -9 $$", Level.FAIL, "nvidia-smi is ended by signal 9, and says nothing", "restart"),
    ("exec yes", Level.FAIL, "makes no sense: it writes without end", "install the driver again"),
    ("exec yes >&2", Level.FAIL, "makes no sense: it writes without end", "install the driver again"),
    ("echo 'No devices were found'; exit 6", Level.WARN, "finds no card", "power"),
]


@pytest.mark.parametrize(("script", "level", "what", "cure"), SMIS)
def test_a_driver_that_is_not(
    smi: Callable[..., None], script: str, level: Level, what: str, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(script=script)
    monkeypatch.setattr(hardware, "FIRST", 0.5 if "sleep" in script else 7.0)
    at = machine()
    (seen,) = found(hardware.cards, at).values()
    is_cured(seen, level, what, cure)
    assert at.cards == ()


def test_no_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(hardware, "LOADED", tmp_path / "none")
    at = machine(answers={"torch": SEES | {"cuda": None, "cuda_available": False, "version": "2.13.0"}})
    assert found(hardware.cards, at)["card"].level is Level.SKIP
    assert found(software.torch, at)["torch"].level is Level.OK
    kernels = found(trial.kernels, at)["kernels"]
    assert kernels.level is Level.SKIP
    assert kernels.what == "nothing runs on kernels here: no card is in use (the model is on cpu)"


def test_a_driver_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(hardware, "LOADED", tmp_path)
    is_cured(found(hardware.cards, machine())["card"], Level.WARN, "nvidia-smi is not on PATH", "nvidia-utils")


def test_an_nvidia_smi_that_may_not_be_executed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "nvidia-smi").touch(0o644)
    seen = found(hardware.cards, machine())["driver"]
    is_cured(seen, Level.FAIL, f"{tmp_path}/nvidia-smi may not be executed", "chmod a+x")


def test_a_card_that_is_hidden(smi: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    smi(row(), LINK)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    is_cured(
        found(hardware.cards, machine())["card"], Level.WARN, "CUDA_VISIBLE_DEVICES='' leaves no card of 1", "unset"
    )


def test_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "host_memory", lambda: GB)
    is_cured(found(hardware.host, machine())["RAM"], Level.WARN, "1.00 GB free", "container's limit")
    monkeypatch.setattr(card, "host_memory", lambda: 4 * GB)
    assert found(hardware.host, machine())["RAM"].level is Level.OK
    monkeypatch.setattr(card, "host_memory", lambda: None)
    assert found(hardware.host, machine())["RAM"].level is Level.SKIP


def test_the_cards_that_kernels_are_for_are_those_of_the_kernels() -> None:
    assert hardware.OLDEST == ops.OLDEST
    assert set(hardware.COMPILED_FOR) == {g.capability for g in (_launch.ADA, _launch.HOPPER, _launch.BLACKWELL)}
