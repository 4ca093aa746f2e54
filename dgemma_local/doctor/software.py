"""Python and what is installed in it: versions against what this package asks for, and against what is known of them."""

import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgemma_local.card import Card
from dgemma_local.doctor.examination import Machine
from dgemma_local.doctor.finding import Finding, fail, ok, skip, warn
from dgemma_local.doctor.probe import Hung, Lost

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PACKAGE = "dgemma"
LATER = ("torch", "triton")  # each has a check of its own
IMPORT_LIMIT = 60.0  # seconds: torch's CUDA build is read from a cold disk, and a driver wakes up
AGAIN = "run this again; if it stays, restart the computer: torch waits for the disk or the driver"
# The oldest driver for torch's CUDA, by major version: NVIDIA, "CUDA compatibility", minor version compatibility, table 1
OLDEST_DRIVER = {12: 525, 13: 580}


@dataclass(frozen=True, slots=True)
class Known:
    """Versions of a package with a fault that somebody has reported."""

    package: str
    versions: str
    why: str
    source: str
    capability: tuple[int, int] | None = None  # of the cards that it is about; None: all
    handled: str = ""  # how this package does without; then it is no warning


KNOWN = (
    Known(
        "huggingface-hub",
        ">=1.18",
        "its own downloads start at zero when they are interrupted",
        "huggingface/huggingface_hub #4228, #4196",
        handled="`dgemma pull` moves the bytes itself, and goes on where it was",
    ),
    Known("triton", "==3.8.*", "lacks fixes for products that come out wrong on sm_120", "triton-lang/triton #11735"),
    Known("triton", "==3.8.*", "moves the results of FP8 products", "pytorch/pytorch #188841"),
    Known(
        "triton",
        ">=3.6,<3.8",
        "sums of products in a loop differ from run to run on sm_103",
        "triton-lang/triton #10590",
        capability=(10, 3),
    ),
)


def python(machine: Machine) -> Iterator[Finding]:
    """Its version, against what the package asks for."""
    from packaging.specifiers import SpecifierSet

    version, wanted = platform.python_version(), metadata.metadata(PACKAGE)["Requires-Python"] or ""
    facts = {"version": version, "executable": sys.executable, "platform": platform.platform()}
    if SpecifierSet(wanted).contains(version, prereleases=True):
        yield ok("python", f"{version} on {platform.system()} {platform.machine()}", **facts)
    else:
        yield fail("python", f"{version} is outside {wanted}", f"make an environment with Python {wanted}", **facts)


def packages(machine: Machine) -> Iterator[Finding]:
    """Each that this package needs, but for torch and triton."""
    found: dict[str, str | None] = {}
    for wanted in requirements().values():
        if wanted.name in LATER:
            continue
        found[wanted.name] = version = installed(wanted.name)
        if version is None:
            yield fail(wanted.name, "is not installed", _install(wanted))
        elif not wanted.specifier.contains(version, prereleases=True):
            yield fail(wanted.name, f"{version} is outside {wanted.specifier}", _install(wanted), version=version)
    there = ", ".join(f"{name} {version}" for name, version in found.items() if version is not None)
    yield ok("packages", there or "none", versions=found)


def known(machine: Machine) -> Iterator[Finding]:
    """Installed versions with a reported fault."""
    from packaging.specifiers import SpecifierSet

    capability = machine.card.capability if machine.card else None
    hits = 0
    for each in KNOWN:
        version = installed(each.package)
        if version is None or not SpecifierSet(each.versions).contains(version, prereleases=True):
            continue
        if each.capability not in (None, capability):
            continue
        hits += 1
        what, facts = f"{each.package} {version} {each.why} ({each.source})", {"source": each.source}
        if each.handled:
            yield ok("known faults", f"{what}: {each.handled}", **facts)
        else:
            wanted = requirements().get(each.package)
            yield warn("known faults", what, _install(wanted) if wanted else f"change {each.package}", **facts)
    if not hits:
        yield ok("known faults", "none of the installed versions")


def torch(machine: Machine) -> Iterator[Finding]:
    """Whether it can be imported, is of the wanted version, and sees the card."""
    wanted = requirements()["torch"]
    again = _install(wanted, force=True)
    try:
        facts = machine.probe.ask("torch", IMPORT_LIMIT)
    except Lost as lost:
        yield fail("torch", f"cannot be imported: {lost}", AGAIN if isinstance(lost, Hung) else again)
        return
    if "error" in facts:
        if facts.get("missing") == "torch":
            yield fail("torch", "is not installed", _install(wanted))
        else:
            yield fail("torch", f"cannot be imported: {facts['error']}", again, version=installed("torch"))
        return
    machine.torch = facts
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else f"HIP {facts['hip']}" if facts["hip"] else "CPU build"
    if not wanted.specifier.contains(facts["version"], prereleases=True):
        yield fail("torch", f"{facts['version']} is outside {wanted.specifier}", _install(wanted), **facts)
    elif not facts["sane"]:
        yield fail("torch", f"{facts['version']} multiplies wrongly on this processor", again, **facts)
    elif machine.card is not None and not facts["cuda"]:
        yield fail("torch", f"{facts['version']} is no CUDA build: {machine.card.name} lies idle", again, **facts)
    else:
        yield ok("torch", f"{facts['version']}, {build}", **facts)
        if machine.card is not None:
            yield from _cuda(facts, machine.card)


def _cuda(facts: Mapping[str, Any], card: Card) -> Iterator[Finding]:
    """Whether torch's CUDA build, the driver and the card go together."""
    major, driver = int(facts["cuda"].partition(".")[0]), card.driver.partition(".")[0]
    least = OLDEST_DRIVER.get(major)
    about = {"cuda": facts["cuda"], "driver": card.driver, "oldest_driver": least, "built_for": facts["built_for"]}
    if least is not None and driver.isdecimal() and int(driver) < least:
        cure = f"install a driver from {least} on, or torch's build for an older CUDA (pytorch.org lists them)"
        yield fail(
            "CUDA", f"torch's CUDA {facts['cuda']} wants a driver from {least} on, here is {card.driver}", cure, **about
        )
    elif not facts["cuda_available"]:
        said = f": {facts['said']}" if facts["said"] else ""
        cure = "restart the computer where the driver was updated; in a container pass the card in (--gpus all)"
        yield fail("CUDA", f"torch sees no card, and nvidia-smi does{said}", cure, **about)
    elif card.capability is not None and not runs(facts["built_for"], card.capability):
        what = "torch's build has no code for capability {}.{}: {}".format(
            *card.capability, " ".join(facts["built_for"])
        )
        yield fail("CUDA", what, "install torch's build for the newest CUDA (pytorch.org lists them)", **about)
    else:
        yield ok("CUDA", f"{facts['cuda']} with driver {card.driver}", **about)


def runs(built_for: list[str], capability: tuple[int, int]) -> bool:
    """Whether machine code of the same major version and no later one is in a build, or PTX to make it from. Empty: unknown."""
    for name in built_for:
        kind, _, number = name.rstrip("af").partition("_")
        if not number.isdecimal():
            continue
        major, minor = divmod(int(number), 10)
        if (major, minor) <= capability and (kind == "compute" or major == capability[0]):
            return True
    return not built_for


def triton(machine: Machine) -> Iterator[Finding]:
    """Whether it is there, of a version that this package and torch want, and finds the compiler it starts."""
    wanted = requirements().get("triton")
    if wanted is None:
        yield skip("triton", f"there is none for {platform.system()}: everything runs in plain torch")
        return
    bad = fail if machine.card else warn  # on a CPU nothing would use it
    try:
        facts = machine.probe.ask("triton", IMPORT_LIMIT)
    except Lost as lost:
        facts = {"error": str(lost)}
    if "error" in facts:
        gone = facts.get("missing") == "triton"
        what = "is not installed" if gone else f"cannot be imported: {facts['error']}"
        yield bad("triton", f"{what}: no kernel runs, everything in plain torch", _install(wanted, force=not gone))
        return
    machine.triton = True
    version = facts["version"]
    ranges = [wanted.specifier, *(r.specifier for r in _of("torch") if r.name == "triton")]
    if odd := [str(span) for span in ranges if not span.contains(version, prereleases=True)]:
        whose = "" if odd[0] == str(wanted.specifier) else ", which torch is built with"
        cure = _install(wanted) if not whose else f"pip install 'triton{odd[0]}'"
        yield bad("triton", f"{version} is outside {odd[0]}{whose}", cure, version=version)
    else:
        yield ok("triton", version, version=version)
    if machine.card is not None:
        yield from _compiler()


def _compiler() -> Iterator[Finding]:
    """What triton builds its launcher with, found as triton/runtime/build.py does."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    facts = {"compiler": compiler, "header": str(header)}
    if compiler is None or shutil.which(compiler) is None:
        named = "no C compiler" if compiler is None else f"no C compiler called {compiler} (CC)"
        yield fail("compiler", f"{named}: triton builds its launcher with one", "install gcc, or set CC", **facts)
    elif not header.is_file():
        cure = "install Python's headers: python3-dev or python3-devel"
        yield fail("compiler", f"{header} is not there: triton builds its launcher with it", cure, **facts)
    else:
        yield ok("compiler", compiler, **facts)


def requirements() -> "dict[str, Requirement]":
    """What this package needs on this platform, without extras, by name."""
    return {wanted.name: wanted for wanted in _of(PACKAGE)}


def installed(package: str) -> str | None:
    """Its version, as its metadata has it: nothing is imported."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Of everything that this package needs; nothing where not even that can be read."""
    try:
        return {name: installed(name) for name in sorted(requirements())}
    except ImportError:  # of packaging
        return {}


def _of(package: str) -> "Iterator[Requirement]":
    from packaging.requirements import Requirement

    try:
        texts = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return
    for text in texts:
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            yield wanted


def _install(wanted: "Requirement", *, force: bool = False) -> str:
    return f"pip install {'--force-reinstall ' if force else ''}'{wanted.name}{wanted.specifier}'"
