"""What was measured on: names, versions, clocks, memory, and the card's power while it works."""

import os
import platform
import resource
import statistics
import subprocess
import sys
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import torch

from dgemma_local.card import ask

INTERVAL_MS = 50  # between two readings; the driver itself averages power over up to a second
SAMPLED = ("power.draw", "clocks.sm", "clocks.mem")
ENDS_WITHIN = 2.0  # seconds that nvidia-smi has to end in
TELLS_WITHIN = 8.0  # seconds that it has to say what the card is


class Power:
    """nvidia-smi in a thread: watts and clocks of one card, each reading with the moment it arrived.

    `why_not`: why there is nothing to read, once it is known.
    """

    def __init__(self, card: str | None, clock: Callable[[], float] = perf_counter) -> None:
        """`card`: its uuid, or None where the model is on none."""
        self.card, self.clock = card, clock
        self.why_not: str | None = None if card else "the model is on no NVIDIA card: nothing tells its power"
        self.at: list[float] = []
        self.watts: list[float] = []
        self.clocks: list[tuple[float, ...]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        if self.card is None:
            return self
        query = f"--query-gpu={','.join(SAMPLED)}"
        command = ["nvidia-smi", "-i", self.card, query, "--format=csv,noheader,nounits", "-lms", str(INTERVAL_MS)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError as error:
            self.why_not = f"nvidia-smi cannot be started: {error.strerror}"
            return self
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join(ENDS_WITHIN)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            self.take(line)

    def take(self, line: str) -> None:
        """One reading, as nvidia-smi writes it."""
        now = self.clock()
        watts, *clocks = (field.strip() for field in line.split(","))
        try:
            power = float(watts)
        except ValueError:
            self.why_not = f"nvidia-smi tells no power of this card: {watts[:40]!r}"
            return
        with suppress(ValueError):  # clocks alone may be missing
            self.clocks.append(tuple(map(float, clocks)))
        self.watts.append(power)
        self.at.append(now)  # last: a moment that is there has its watts

    def joules(self, begin: float, end: float) -> float | None:
        """Energy between two moments: the mean of the readings between them × their distance. None: fewer than two."""
        count = len(self.at)
        low, high = bisect_left(self.at, begin, 0, count), bisect_right(self.at, end, 0, count)
        return None if high - low < 2 else statistics.fmean(self.watts[low:high]) * (end - begin)

    def median_clock(self, index: int) -> float | None:
        """MHz, of SM (0) or memory (1)."""
        return statistics.median(row[index] for row in self.clocks) if self.clocks else None


def describe(device: torch.device, power: Power) -> dict[str, Any]:
    """`machine` of the document."""
    card = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    driver, limit = _driver(power.card)
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": _triton(),
        "cuda": torch.version.cuda,
        "gpu": None if card is None else card.name,
        "driver": driver,
        "power_limit_w": limit,
        "sm_mhz": power.median_clock(0),
        "memory_mhz": power.median_clock(1),
    }


def cpu_name(info: Path = Path("/proc/cpuinfo")) -> str:
    """As the kernel calls it; else what Python knows."""
    try:
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def peak_memory(device: torch.device) -> tuple[int, str]:
    """Bytes at the peak, of torch's tensors on the "device" since `forget_peak`, or of this whole "process"."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "device"
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most * (1 if sys.platform == "darwin" else 1024), "process"  # bytes there, KiB elsewhere


def forget_peak(device: torch.device) -> None:
    """A device's peak counts from here; a process's never begins again."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def settle(device: torch.device) -> Callable[[], None]:
    """Waits for what the device was given."""
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)


def uuid_of(device: torch.device) -> str | None:
    """What nvidia-smi knows this card by."""
    if device.type != "cuda":
        return None
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _triton() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def _driver(card: str | None) -> tuple[str | None, float | None]:
    """Driver version, and the power limit in W."""
    if card is None:
        return None, None
    command = ["nvidia-smi", "-i", card, "--query-gpu=driver_version,power.limit", "--format=csv,noheader,nounits"]
    try:
        answer = ask(command, TELLS_WITHIN)
        if answer.code:
            return None, None
        driver, limit = (field.strip() for field in answer.out.split(","))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None, None
    try:
        return driver, float(limit)
    except ValueError:
        return driver, None
