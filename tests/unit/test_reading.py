"""Bytes arrive where they should: scattered or staged, in any mixture, whatever the system returns at a time."""

import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dgemma_local import reading
from dgemma_local.checkpoint import TensorInfo
from dgemma_local.errors import CheckpointError
from dgemma_local.reading import Job, read

SHAPES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), min_size=1, max_size=12)


class Case:
    """A file of uint8 tensors with gaps between some, and where each is to go."""

    def __init__(self, path: Path, shapes: list[tuple[int, int]], staged: list[bool], gaps: list[int]) -> None:
        payload = bytearray()
        self.jobs: list[Job] = []
        self.want: list[Tensor] = []
        self.got: list[Tensor] = []
        draw = torch.Generator().manual_seed(len(shapes))
        for n, (shape, late, gap) in enumerate(zip(shapes, staged, gaps, strict=True)):
            payload += b"\xaa" * gap
            tensor = torch.randint(256, shape, dtype=torch.uint8, generator=draw)
            info = TensorInfo(f"t{n}", "U8", shape, path, tensor.nbytes, len(payload))
            payload += tensor.numpy().tobytes()
            room = torch.full(shape, 7, dtype=torch.uint8)
            self.want.append(tensor)
            self.got.append(room)

            def take(row: int, part: Tensor, room: Tensor = room) -> None:
                room[row : row + len(part)] = part

            self.jobs.append(Job(info, torch.uint8, take=take) if late else Job(info, torch.uint8, to=room))
        path.write_bytes(payload)

    def arrived(self) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.want, self.got, strict=True))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), shapes=SHAPES)
def test_every_byte_arrives_once(data: st.DataObject, shapes: list[tuple[int, int]], tmp_path: Path) -> None:
    n = len(shapes)
    staged = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    gaps = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    case = Case(tmp_path / "x", shapes, staged, gaps)
    most = data.draw(st.integers(1, 9), label="bytes a call returns at most")
    preadv = os.preadv

    def little(fd: int, views: list[Any], begin: int) -> int:
        return preadv(fd, [views[0][:most]], begin)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "STAGING", data.draw(st.integers(1, 40), label="staging"))
        patch.setattr(reading, "BATCH", data.draw(st.integers(1, 60), label="batch"))
        patch.setattr(reading, "MOST_PIECES", data.draw(st.integers(1, 4), label="pieces"))
        patch.setattr(os, "preadv", little)
        seen: list[int] = []
        sums = read(reversed(case.jobs), progress=seen.append, checksum=True)
    assert case.arrived()
    assert sum(seen) == sum(t.nbytes for t in case.want)
    assert sums == {f"t{i}": zlib.crc32(t.numpy().tobytes()) for i, t in enumerate(case.want)}


def test_neighbours_are_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten tensors that lie behind each other, then a gap, then two more."""
    case = Case(tmp_path / "x", [(2, 3)] * 12, [False] * 12, [0] * 10 + [5, 0])
    calls: list[int] = []
    preadv = os.preadv

    def counted(fd: int, views: list[Any], begin: int) -> int:
        calls.append(len(views))
        return preadv(fd, views, begin)

    monkeypatch.setattr(os, "preadv", counted)
    read(case.jobs)
    assert case.arrived() and sorted(calls) == [2, 10]


def test_without_preadv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "preadv")
    case = Case(tmp_path / "x", [(3, 4), (1, 2), (5, 5)], [False, True, False], [0, 1, 0])
    assert read(case.jobs) == {} and case.arrived()


@pytest.mark.parametrize("staged", [False, True])
def test_a_file_that_ends_early(staged: bool, tmp_path: Path) -> None:
    path = tmp_path / "x"
    case = Case(path, [(4, 4), (4, 4)], [staged] * 2, [0, 0])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="it ends early"):
        read(case.jobs)


def test_an_error_of_the_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    case = Case(tmp_path / "x", [(4, 4)], [False], [0])
    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(CheckpointError, match="Input/output error"):
        read(case.jobs)


def test_staging_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of 100 rows of 8 bytes through 20 bytes: two rows at a time, in order."""
    seen: list[tuple[int, int]] = []
    data = torch.arange(800, dtype=torch.int64).to(torch.uint8).view(100, 8)
    (tmp_path / "x").write_bytes(data.numpy().tobytes())
    monkeypatch.setattr(reading, "STAGING", 20)
    info = TensorInfo("t", "U8", (100, 8), tmp_path / "x", 800)
    read([Job(info, torch.uint8, take=lambda row, part: seen.append((row, len(part))))])
    assert seen == [(row, 2) for row in range(0, 100, 2)]
