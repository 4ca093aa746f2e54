"""What the compilers make of every kernel at production sizes, for three cards, held by stored bounds.

Each distinct launch of each configuration: the mma that was meant, no spills, shared memory and registers that the card
has, and a hot loop (without one: a program) no longer than bounds.json says. A change for the better is stored by
`python tests/cross.py NAMES --store`.
"""

import json
import math
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from compile.configurations import CONFIGURATIONS, Configuration
from cross import CARDS, OLD_TRITON, STEP, Artefact, numbered
from dgemma_local.kernels._launch import Gpu

HERE = Path(__file__).parent
SLACK = 1.03  # of instructions: another release of triton places a few differently
REGISTER_SLACK = 8  # the unit in which a card hands them out
REGISTERS = 65_536  # of one processor, on all three cards

CASES = [(entry, card) for entry in CONFIGURATIONS for card, gpu in CARDS.items() if gpu in entry.gpus]


def _name(case: tuple[Configuration, str]) -> str:
    return f"{case[0].name}-{case[1]}"


Compiled = dict[str, "Future[Artefact]"]
Bounds = dict[str, dict[str, dict[str, Any]]]  # by configuration, card, launch


@pytest.fixture(scope="session")
def bounds() -> Bounds:
    stored: Bounds = json.loads((HERE / "bounds.json").read_text())
    return stored


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_compiles(case: tuple[Configuration, str], compiled: Compiled, bounds: Bounds) -> None:
    entry, card = case
    stored = bounds.get(entry.name, {}).get(card, {})
    artefacts = {label: compiled[key].result() for _, label, _, key in numbered(entry, card)}
    wrong = [f"{label}: {w}" for label, a in artefacts.items() for w in _wrong(a, CARDS[card])]
    if not entry.name.startswith(STEP):
        wrong += [f"{label}: {w}" for label, a in artefacts.items() for w in _longer(a, stored.get(label))]
    wanted = entry.mma.get(CARDS[card])
    if wanted and not any(m.startswith(wanted) for a in artefacts.values() for m in a.mma):
        wrong.append(f"no {wanted}, but {[*{m for a in artefacts.values() for m in a.mma}]}")
    if stale := stored.keys() - artefacts.keys():
        wrong.append(f"bounds.json has {sorted(stale)}, which nothing launches")
    assert not wrong, "\n".join([f"{entry.name} on {card}", *wrong, *map(str, artefacts.values())])


def _wrong(artefact: Artefact, gpu: Gpu) -> Iterator[str]:
    if artefact.spills:
        yield f"spills: stack {artefact.stack}, {artefact.spills} LDL/STL"
    if artefact.shared > gpu.shared_bytes:
        yield f"{artefact.shared} bytes of shared memory, the card has {gpu.shared_bytes}"
    if artefact.registers * 32 * artefact.warps > REGISTERS:
        yield f"{artefact.registers} registers × {32 * artefact.warps} threads, a processor has {REGISTERS}"


def _longer(artefact: Artefact, bound: dict[str, Any] | None) -> Iterator[str]:
    if bound is None:
        yield "no bound in bounds.json: python tests/cross.py NAME --store"
        return
    now, stored = artefact.lengths, bound["lengths"]
    if len(now) != len(stored) or any(n > math.ceil(b * SLACK) for n, b in zip(now, stored, strict=True)):
        yield f"{now} instructions in its loops, {stored} stored"
    if artefact.registers > bound["registers"] + REGISTER_SLACK:
        yield f"{artefact.registers} registers, {bound['registers']} stored"


def test_no_bound_without_a_configuration(bounds: dict[str, object]) -> None:
    assert bounds.keys() <= {entry.name for entry in CONFIGURATIONS}


def test_one_configuration_a_kernel_on_the_oldest_triton(old_compiler: subprocess.Popen[str]) -> None:
    told, _ = old_compiler.communicate()
    assert f"triton {OLD_TRITON}" in told and old_compiler.returncode == 0, told
    assert "SPILLS" not in told and "SHARED MEMORY" not in told, told
