"""What a benchmark reads of its machine: power, clocks, driver, processor, memory."""

import subprocess
from pathlib import Path

import pytest
import torch

from dgemma_local.bench import machine


def test_power_between_two_moments() -> None:
    """Readings at 1, 2, 3 … s of 100, 200, 300 … W."""
    now = iter(range(1, 100))
    power = machine.Power("GPU-1", clock=lambda: float(next(now)))
    for watts in (100, 200, 300, 400):
        power.take(f"{watts}.00, 2100, 10501\n")
    assert power.joules(1.5, 3.5) == pytest.approx(250 * 2)
    assert power.joules(2.0, 4.0) == pytest.approx(300 * 2)
    assert power.joules(2.5, 3.5) is None and power.joules(7, 9) is None
    assert (power.median_clock(0), power.median_clock(1)) == (2100, 10501)
    assert power.why_not is None


def test_power_that_is_not_told() -> None:
    power = machine.Power("GPU-1")
    power.take("[N/A], [N/A], [N/A]\n")
    assert power.joules(0, 1e12) is None and power.why_not is not None and "[N/A]" in power.why_not
    power.take("80.5, [N/A], [N/A]\n")  # clocks alone are missing
    assert power.watts == [80.5] and power.median_clock(0) is None


def test_without_a_card_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with machine.Power(None) as power:
        assert power.joules(0, 1) is None and power.why_not is not None and "no NVIDIA card" in power.why_not


def test_power_is_read_while_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvidia-smi that writes a line and then waits to be ended."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "$@" > "$0.asked"\necho "50.0, 1, 2"\necho "70.0, 1, 2"\nexec sleep 60\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with machine.Power("GPU-7") as power:
        while len(power.at) < 2:
            power._thread.join(0.01)
    assert power.watts == [50, 70] and not power._thread.is_alive()
    assert "-i GPU-7 --query-gpu=power.draw,clocks.sm,clocks.mem" in (tmp_path / "nvidia-smi.asked").read_text()


def test_no_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with machine.Power("GPU-7") as power:
        assert power.why_not is not None and "cannot be started" in power.why_not
    assert machine._driver("GPU-7") == (None, None) == machine._driver(None)


def test_what_the_driver_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for said, found in (("575.1, 450.00", ("575.1", 450.0)), ("575.1, [N/A]", ("575.1", None)), ("odd", (None, None))):
        tool.write_text(f'#!/bin/sh\necho "{said}"\n')
        tool.chmod(0o755)
        assert machine._driver("GPU-7") == found
    tool.write_text('#!/bin/sh\necho "575.1, 450.00"; exit 9\n')
    assert machine._driver("GPU-7") == (None, None)


def test_the_name_of_the_cpu(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\nmodel name\t: other\n")
    assert machine.cpu_name(info) == "Some CPU @ 3 GHz"
    assert machine.cpu_name(tmp_path / "none")


def test_memory_of_this_process() -> None:
    peak, of = machine.peak_memory(torch.device("cpu"))
    assert of == "process" and peak > 50e6  # torch is in it
