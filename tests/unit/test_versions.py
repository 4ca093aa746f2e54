"""Versions of what this package stands on: each range has an end, and what is known to be bad is outside or said."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from dgemma_local.card import Card
from dgemma_local.doctor import software
from dgemma_local.doctor.examination import Machine
from dgemma_local.doctor.finding import Level
from dgemma_local.doctor.probe import Probe
from dgemma_local.doctor.software import KNOWN, Known

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WANTED = [Requirement(each) for each in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["gif"]]]
FAR = Version("9999")


@pytest.mark.parametrize("wanted", WANTED, ids=lambda wanted: wanted.name)
def test_every_dependency_has_an_upper_bound_and_a_lower_one(wanted: Requirement) -> None:
    """An upgrade that nobody here has seen cannot come by itself; what is installed here lies between."""
    assert not wanted.specifier.contains(FAR) and not wanted.specifier.contains(Version("0"))
    assert {each.operator for each in wanted.specifier} == {">=", "<"}
    there = software.installed(wanted.name)
    assert there is None or wanted.specifier.contains(there, prereleases=True)


def version_in(versions: str) -> str:
    """The first of a range of faulty ones."""
    return min((each.version.removesuffix(".*") for each in SpecifierSet(versions)), key=Version)


@pytest.mark.parametrize("fault", KNOWN, ids=lambda fault: f"{fault.package}{fault.versions}")
def test_a_version_that_is_known_to_be_bad_is_said(fault: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = version_in(fault.versions)
    assert SpecifierSet(fault.versions).contains(bad) and fault.source and fault.why
    monkeypatch.setattr(software, "installed", {fault.package: bad}.get)
    found = [each for each in software.known(machine(fault)) if fault.source in each.what]
    assert [each.level for each in found] == [Level.OK if fault.handled else Level.WARN]
    assert fault.why in found[0].what


def machine(fault: Known) -> Machine:
    """With the card that a fault is about."""
    card = Card(index=0, name="card", uuid="GPU-0", total=1, free=1, capability=fault.capability)
    return Machine(probe=Probe(), cards=(card,), models={})
