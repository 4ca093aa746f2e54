"""A recording cut or bent at every byte, and lines and bytes changed at random: what is read is sound, or one error."""

import gzip
import json
import random
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import recordings
from damaged import is_start, outcome, packed, parsed, plain, seen_of, small, spelled
from jsonschema import Draft202012Validator

from dgemma_local import recording as package

# Cut and bent, at every byte


def test_the_files_themselves_are_whole(tmp_path: Path) -> None:
    assert outcome(plain(), tmp_path) == outcome(packed(), tmp_path) == small()


def test_cut_at_every_byte() -> None:
    head = plain().index(b"\n")
    for size in range(len(plain())):
        found = seen_of(plain()[:size])
        assert (found is None) == (size < head)
        if found is None:
            continue
        whole_lines = plain()[: size + 1].count(b"\n") - 1  # a line that lacks its end alone is whole
        assert is_start(found, small()) and len(found.events) == whole_lines
        assert (found.notice is None) == (size == len(plain()) - 1)


def test_packed_and_cut_at_every_byte() -> None:
    ends, pack, at = [], zlib.compressobj(6, wbits=31), 0
    for line in plain().splitlines(keepends=True):
        at += len(pack.compress(line) + pack.flush(zlib.Z_SYNC_FLUSH))
        ends.append(at)
    for size in range(len(packed())):
        found = seen_of(packed()[:size])
        there = sum(end <= size for end in ends)
        assert found is not None or there == 0
        if found is not None:
            assert is_start(found, small()) and there - 1 <= len(found.events) <= there


def test_packed_and_bent_at_every_byte() -> None:
    for i in range(len(packed())):
        bent = bytearray(packed())
        bent[i] ^= 1 << i % 8
        found = seen_of(bytes(bent))
        if i >= len(packed()) - 8:  # of the checksum
            assert found is not None and replace(found, notice=None) == small() and found.notice is not None


def test_damage_costs_nothing_that_comes_before_it(tmp_path: Path) -> None:
    large = recordings.make(length=64, vocabulary=5000, steps=16)
    recordings.write(tmp_path / "large.gz", large)
    data = (tmp_path / "large.gz").read_bytes()
    found = outcome(data[: len(data) // 2] + b"\xff" * 100, tmp_path)
    assert found is not None and is_start(found, large) and len(found.events) > len(large.events) // 3
    assert found.notice is not None


# Seeded fuzz of the lines


STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 0.5, -0.5, 1e300, 10**30, 10**4000, 2**31, 2**63, "", "x", "1", "\ud800", "\x1b[2J"),
    *(
        [],
        {},
        [[]],
        [{}],
        [None],
        [-1],
        [2**31],
        [0.5],
        [True],
        ["a"],
        {"control": 1},
        {"control": None},
        [{"kind": "x"}],
    ),
)


def other(value: Any, chance: random.Random) -> Any:
    if isinstance(value, list) and value and chance.randrange(2):
        changed = list(value)
        at = chance.randrange(len(changed))
        match chance.randrange(4):
            case 0:
                changed[at] = chance.choice(STRANGE)
            case 1:
                del changed[at]
            case 2:
                changed.append(changed[at])
            case 3:
                changed[at] = [changed[at]]
        return changed
    return chance.choice(STRANGE)


def swapped(lines: list[Any], chance: random.Random) -> None:
    a, b = chance.randrange(len(lines)), chance.randrange(len(lines))
    lines[a], lines[b] = lines[b], lines[a]


def dropped(lines: list[Any], chance: random.Random) -> None:
    del lines[chance.randrange(len(lines))]


def doubled(lines: list[Any], chance: random.Random) -> None:
    at = chance.randrange(len(lines))
    lines.insert(chance.randrange(len(lines)), lines[at])


def replaced(lines: list[Any], chance: random.Random) -> None:
    line = lines[chance.randrange(len(lines))]
    line[chance.choice(list(line))] = chance.choice(STRANGE)


def changed(lines: list[Any], chance: random.Random) -> None:
    line = lines[chance.randrange(len(lines))]
    name = chance.choice(list(line))
    line[name] = other(line[name], chance)


def lost(lines: list[Any], chance: random.Random) -> None:
    line = lines[chance.randrange(len(lines))]
    del line[chance.choice(list(line))]


def exchanged(lines: list[Any], chance: random.Random) -> None:
    """A line is something else altogether."""
    lines[chance.randrange(len(lines))] = chance.choice(STRANGE)


def bent(data: bytes, chance: random.Random) -> bytes:
    bytes_ = bytearray(data)
    for _ in range(chance.randrange(1, 9)):
        bytes_[chance.randrange(len(bytes_))] = chance.randrange(256)
    return bytes(bytes_)


@pytest.mark.parametrize("change", [swapped, dropped, doubled, replaced, changed, lost, exchanged])
def test_fuzzed_lines(tmp_path: Path, change: Callable[[list[Any], random.Random], None]) -> None:
    for seed in range(60):
        chance = random.Random(seed)
        lines = json.loads(json.dumps(parsed()))
        change(lines, chance)
        if seed % 3 == 2:
            change(lines, chance)
        outcome(spelled(lines), tmp_path)


@pytest.mark.parametrize("pack", [False, True])
def test_fuzzed_bytes(tmp_path: Path, pack: bool) -> None:
    for seed in range(150):
        data = bent(packed() if pack else plain(), random.Random(seed))
        outcome(gzip.compress(bent(plain(), random.Random(-seed))) if pack and seed % 2 else data, tmp_path)


def test_every_value_is_held_to_the_schema_and_by_the_reader() -> None:
    """Each value of each kind of line in turn replaced by each strange one: where the schema says no, so does the reader."""
    schema = Draft202012Validator(json.loads((Path(package.__file__).parent / "schema.json").read_text()))
    refused = 0
    for i, whole in enumerate(parsed()[:6]):  # the head, the prompt, the steps of a canvas and what it commits
        for name in whole:
            for strange in STRANGE:
                lines = [*parsed()[:6]]
                lines[i] = whole | {name: strange}
                found = seen_of(spelled(lines))
                got = -1 if found is None else len(found.events)
                if not schema.is_valid(lines[i]):
                    refused += 1
                    assert got < i, (whole["event"], name, strange)
    assert refused > 500
