"""Checks in order of dependency, each within its time, none of which can end the others.

Check(name, look, limit) ─ look(machine) ─► findings     an exception, or no end within the limit: one FAIL
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from dgemma_local.card import Card
from dgemma_local.doctor.finding import Finding, Level, fail
from dgemma_local.doctor.probe import Probe
from dgemma_local.errors import DgemmaError
from dgemma_local.fit import Choice
from dgemma_local.hub import Watch
from dgemma_local.registry import Entry

REPORT = "report it, with what `dgemma doctor --json` writes"


@dataclass(slots=True, kw_only=True)
class Machine:
    """What the checks know of this machine by now."""

    probe: Probe
    verify: bool = False  # hash what is in the cache
    watch: Watch = field(default_factory=Watch)  # hears how far hashing is
    say: Callable[[str], None] = lambda _: None  # hears why it takes longer
    models: dict[str, Entry] = field(default_factory=dict)  # the table
    driver: str | None = None  # its version; None: there is none, or it does not answer
    cards: tuple[Card, ...] = ()  # that a run may use, the one that it takes first
    torch: dict[str, Any] | None = None  # what the probe says of it; None: it cannot be imported
    triton: bool = False  # it can be imported
    folders: dict[str, Any] = field(default_factory=dict)  # complete checkpoints by name

    @property
    def card(self) -> Card | None:
        return self.cards[0] if self.cards else None

    @property
    def wanted(self) -> Choice | None:
        """The published checkpoint for the card; None without a card, where the demo answers."""
        from dgemma_local.auto import PUBLISHED
        from dgemma_local.fit import choose

        return choose([self.models[n] for n in PUBLISHED if n in self.models], self.cards) if self.cards else None


@dataclass(frozen=True, slots=True)
class Check:
    """`look` yields findings; it may raise, and may hang."""

    name: str
    look: Callable[[Machine], Iterable[Finding]]
    limit: float = 10.0  # seconds
    hung: str = REPORT  # the cure where it does not end in time


def examine(checks: Sequence[Check], machine: Machine) -> Iterator[Finding]:
    """Findings as they come. Never raises but KeyboardInterrupt."""
    for check in checks:
        for finding in within(check, machine):
            yield finding.tidied()


def failed(findings: Iterable[Finding]) -> bool:
    return any(finding.level is Level.FAIL for finding in findings)


def within(check: Check, machine: Machine) -> Iterator[Finding]:
    """A check in a thread of its own, which is left behind where it hangs: a disk or a driver may hold it for good.

    What it has found until then counts.
    """
    answers: SimpleQueue[Finding | None] = SimpleQueue()  # None: its last
    threading.Thread(target=_look, args=(check, machine, answers), daemon=True, name=check.name).start()
    ends = time.monotonic() + check.limit
    try:
        while (finding := answers.get(timeout=max(0.0, ends - time.monotonic()))) is not None:
            yield finding
    except Empty:
        yield fail(check.name, f"no answer within {check.limit:g} seconds", check.hung)


def _look(check: Check, machine: Machine, answers: "SimpleQueue[Finding | None]") -> None:
    """All that it finds, up to what it raises."""
    try:
        for finding in check.look(machine):
            answers.put(finding)
    except DgemmaError as error:
        answers.put(fail(check.name, error.what, error.fix))
    except BaseException as error:  # of a broken installation: anything, a panic in Rust too
        answers.put(fail(check.name, f"{type(error).__name__}: {error}", REPORT))
    answers.put(None)
