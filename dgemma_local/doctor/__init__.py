"""Whether everything is in order: one check after the other, each a line with its cure, none of which ends the others.

    examine(CHECKS, machine) ─► Finding(name, level, what, cure, facts) …        as they come

    software       Python, packages, reported faults, torch, triton and its compiler
    hardware       driver, cards, who holds them, links; RAM
    storage        models, disk, what is in the cache and whether it is whole, the hub, vocabularies and templates
    trial          what checkpoints hold, kernels beside their torch twins, an easy answer of the demo
    surroundings   environment variables

Made for installations that are broken: nothing here imports torch but the probe's child, a process of its own.
"""

from collections.abc import Sequence
from typing import Any

from dgemma_local import __version__
from dgemma_local.doctor import hardware, software, storage, surroundings, trial
from dgemma_local.doctor.examination import Check, Machine, examine, failed
from dgemma_local.doctor.finding import Finding, Level
from dgemma_local.doctor.probe import Probe

__all__ = ["CHECKS", "Check", "Finding", "Level", "Machine", "Probe", "document", "examine", "failed"]

FORMAT = 1  # of the document
HASHING = 3600.0  # seconds for --verify: 50 GB from a slow disk

CHECKS = (
    Check("python", software.python),
    Check("packages", software.packages),
    Check("models", storage.models),
    Check("card", hardware.cards, hardware.LIMIT, hardware.RESTART),
    Check("RAM", hardware.host),
    Check("known faults", software.known),
    Check("disk", storage.disk, storage.DISK, storage.ANOTHER_DISK),
    Check("models", storage.checkpoints, 3 * storage.DISK, storage.ANOTHER_DISK),
    Check("hashes", storage.hashes, HASHING, "look after that disk: it is slower than 15 MB/s"),
    Check("hub", storage.online, storage.ONLINE_LIMIT + 1, "check the network's name service"),
    Check("text", storage.tokenizers, storage.DISK),
    Check("torch", software.torch, software.IMPORT_LIMIT + 5),
    Check("contents", trial.contents, trial.READING + 5),
    Check("triton", software.triton, software.IMPORT_LIMIT + 5),
    Check("kernels", trial.kernels, trial.COMPILING + 5),
    Check("demo", trial.smoke, trial.COMPILING + 5),
    Check("environment", surroundings.environment, surroundings.WORDS_LIMIT + 5),
)


def document(findings: Sequence[Finding], seconds: float) -> dict[str, Any]:
    """All of a report, for JSON."""
    return {
        "doctor": FORMAT,
        "dgemma": __version__,
        "failed": failed(findings),
        "seconds": round(seconds, 1),
        "versions": software.versions(),
        "findings": [
            {"name": f.name, "level": f.level.value, "what": f.what, "cure": f.cure, "facts": f.facts} for f in findings
        ],
    }
