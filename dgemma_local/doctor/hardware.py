"""The cards, their driver, memory and links, and the host's memory.

nvidia-smi may hang for good where a card has fallen off its bus: all that is asked of it here has 8 seconds together.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from dgemma_local import card
from dgemma_local.card import MIB, Card
from dgemma_local.doctor.examination import Machine
from dgemma_local.doctor.finding import Finding, fail, ok, skip, warn
from dgemma_local.fit import GB, gb

LIMIT = 8.0  # seconds for all of nvidia-smi
FIRST = 7.0  # of these, before the driver counts as hung
OLDEST = (8, 9)  # capability at which the kernels begin: ops.OLDEST, which imports torch
COMPILED_FOR = ((8, 9), (9, 0), (12, 0))  # that they were compiled and looked at for: kernels/_launch.py
# A CUDA context, torch's libraries, and the loader's buffers (4 threads of 64 MiB); an estimate, not measured on cards
LEAST_RAM = 2 * GB
LOADED = Path("/proc/driver/nvidia/version")
RESTART = "run `nvidia-smi` yourself; restart the computer, or install the driver again"

_LINK = ("index", "driver_version", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max")  # fmt: skip


def cards(machine: Machine) -> Iterator[Finding]:
    """Driver, card, capability, memory and who holds it, link."""
    rows, trouble = _ask()
    if trouble is not None:
        yield trouble
        return
    machine.driver = rows[0][1]
    found = card.cards()
    machine.cards = found
    yield ok("driver", machine.driver, driver=machine.driver)
    if not found:
        wish = os.environ.get("CUDA_VISIBLE_DEVICES")
        if wish is None:
            yield fail("card", "nvidia-smi tells no card's name and size", RESTART)
        else:
            yield warn("card", f"CUDA_VISIBLE_DEVICES={wish!r} leaves no card of {len(rows)}", "unset it to use one")
        return
    for each in found:
        yield _card(each, first=each is found[0])
        yield from _memory(each, machine)
    for row in rows:
        if any(row[0] == str(each.index) for each in found):
            yield _link(row)


def host(machine: Machine) -> Iterator[Finding]:
    """RAM."""
    free, whole = card.host_memory(), _ram()
    if free is None:
        yield skip("RAM", "this system does not tell how much is free", total=whole)
    elif free < LEAST_RAM:
        what = f"{gb(free)} free: too little to load anything in"
        yield warn("RAM", what, f"end what holds it, or raise the container's limit; {gb(LEAST_RAM)} will do for a card", free=free, total=whole)  # fmt: skip
    else:
        of = "" if whole is None else f" of {gb(whole)}"
        yield ok("RAM", f"{gb(free)} free{of}", free=free, total=whole)


def _ask() -> tuple[list[list[str]], Finding | None]:
    """A row a card; or what is the matter."""
    there = shutil.which("nvidia-smi", os.F_OK)
    if there is not None and shutil.which("nvidia-smi") is None:
        return [], fail("driver", f"{there} may not be executed", f"chmod a+x {there}, or install the driver again")
    if there is None and LOADED.exists():
        what = "the NVIDIA driver is loaded, and nvidia-smi is not on PATH: what a card holds is not known"
        return [], warn("card", what, "install the driver's utilities (nvidia-utils), or add them to PATH")
    if there is None:
        return [], skip("card", "no NVIDIA driver here (no nvidia-smi on PATH): models run on the CPU")
    command = ["nvidia-smi", f"--query-gpu={','.join(_LINK)}", "--format=csv,noheader,nounits"]
    try:
        answer = card.ask(command, FIRST)
    except subprocess.TimeoutExpired:
        return [], fail(
            "driver", f"nvidia-smi does not answer within {FIRST:g} seconds: a card or its driver hangs", RESTART
        )
    except OSError as error:
        return [], fail("driver", f"nvidia-smi cannot be started: {error.strerror}", RESTART)
    except subprocess.SubprocessError as error:
        return [], fail("driver", f"nvidia-smi answers what makes no sense: {error}", RESTART)
    text = answer.out.strip()
    said = (text or answer.errors.strip()).partition("\n")[0][:200]
    if "no devices were found" in said.lower():
        return [], warn("card", "the driver finds no card", "look whether it is seated and has power; " + RESTART)
    if answer.code:
        ends = f"ends with {answer.code}" if answer.code > 0 else f"is ended by signal {-answer.code}"
        return [], fail("driver", f"nvidia-smi {ends}" + (f": {said}" if said else ", and says nothing"), RESTART)
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    if not rows or any(len(row) != len(_LINK) or not row[0].isdecimal() for row in rows):
        return [], fail("driver", f"nvidia-smi answers what makes no sense: {said!r}", RESTART)
    return rows, None


def _card(each: Card, *, first: bool) -> Finding:
    """Its name and capability."""
    name = f"card {each.index}"
    facts = {"name": each.name, "capability": each.capability, "total": each.total, "free": each.free}
    if each.capability is None:
        return warn(name, f"{each.name}: its capability is not told", "update the driver", **facts)
    what = "{}, capability {}.{}".format(each.name, *each.capability)
    if each.capability < OLDEST:
        cure = "use a card from the RTX 40 series on; on this one everything runs in plain torch, slower"
        return warn(name, "{}: the kernels begin at {}.{}".format(what, *OLDEST), cure, **facts)
    if each.capability not in COMPILED_FOR:
        cure = "look at the line `kernels` below: each is tried on this very card"
        return warn(name, f"{what}: the kernels were made for 8.9, 9.0 and 12.0, and not seen on it", cure, **facts)
    return ok(name, what if first else f"{what}; a run takes the first", **facts)


def _memory(each: Card, machine: Machine) -> Iterator[Finding]:
    """Total, free, and who has the rest; against what the checkpoint for the first card needs."""
    name = f"VRAM {each.index}"
    holders = [{"pid": h.pid, "name": h.name, "bytes": h.bytes} for h in each.holders]
    facts = {"total": each.total, "free": each.free, "holders": holders}
    if each.total is None or each.free is None:
        yield skip(name, "the driver does not tell it: the card is a part of one, or shares the host's memory", **facts)
        return
    what = f"{gb(each.free)} free of {gb(each.total)}"
    if each.holders:
        what += "; held by " + ", ".join(f"pid {h.pid} ({_mib(h.bytes)})" for h in each.holders)
    wanted = machine.wanted if each is machine.card else None
    need = 0.0 if wanted is None or wanted.entry.needs is None else wanted.entry.needs * GB
    if wanted is not None and need > each.total:
        model = wanted.entry.name
        cure = f"`dgemma models show {model}` plans what would fit; `dgemma run -m demo` runs anywhere"
        yield warn(name, f"{what}: {model} needs {gb(int(need))}", cure, **facts)
    elif wanted is not None and need > each.free:
        whose = f"end pid {each.holders[0].pid}" if each.holders else "close what draws on this card"
        cure = f"{whose}, or give a smaller --context"
        yield warn(name, f"{what}: {wanted.entry.name} needs {gb(int(need))}", cure, **facts)
    else:
        yield ok(name, what, **facts)


def _link(row: list[str]) -> Finding:
    """PCIe's generation, which rests lower than it works, and its width, which does not."""
    name, numbers = f"PCIe {row[0]}", row[2:]
    if not all(number.isdecimal() for number in numbers):
        return skip(name, "the driver does not tell its link")
    generation, best, width, most = map(int, numbers)
    facts = {"generation": generation, "generation_max": best, "width": width, "width_max": most}
    what = f"generation {generation} of {best}, {width} of {most} lanes"
    if width < most:
        cure = "only loading is slower for it; for all lanes use the board's first slot, and seat the card anew"
        return warn(name, what, cure, **facts)
    return ok(name, what, **facts)


def _mib(count: int | None) -> str:
    return "unknown" if count is None else f"{count // MIB:,} MiB"


def _ram() -> int | None:
    """Bytes of RAM in all."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not on Windows
        return None
