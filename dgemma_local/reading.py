"""Tensors from files into memory that is already theirs: no second copy, bounded staging, several reads at a time.

    as stored, on the CPU     consecutive tensors of a file are one `preadv`, scattered straight into their places
    anything else             through a staging buffer of STAGING bytes a thread, row by row: another dtype, another
                              device, FP8 made on the way

Tensors are read in the order of the file, so that the disk reads ahead; a few threads keep it busy, and on a warm page
cache they share the copying and the first touch of fresh memory.
"""

import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from threading import local

import torch
from torch import Tensor

from dgemma_local.checkpoint import TensorInfo
from dgemma_local.errors import CheckpointError

STAGING = 64 << 20  # bytes a thread
BATCH = 32 << 20  # bytes of one scattered read, about
MOST_PIECES = 512  # of one scattered read; the system's limit is 1,024
THREADS = 4

Take = Callable[[int, Tensor], None]  # the first row, and rows as stored


@dataclass(frozen=True, slots=True)
class Job:
    """One stored tensor and where it goes: into `to`, bytes as they are, or to `take`, some rows at a time."""

    tensor: TensorInfo
    dtype: torch.dtype  # as stored
    to: Tensor | None = None
    take: Take | None = None


def read(
    jobs: Iterable[Job], *, progress: Callable[[int], None] | None = None, checksum: bool = False
) -> dict[str, int]:
    """Reads every tensor of `jobs` into its place; `progress` hears of bytes as they arrive, from this thread.

    With `checksum`, CRC-32 of each tensor's stored bytes by name, else nothing. Raises CheckpointError: a file that
    ends early or cannot be read.
    """
    sums: dict[str, int] = {}
    staging = local()
    ordered = sorted(jobs, key=lambda job: (job.tensor.file, job.tensor.begin))
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(min(THREADS, 2 * (os.cpu_count() or 1))))
        pending = []
        for path, of_file in groupby(ordered, key=lambda job: job.tensor.file):
            file = stack.enter_context(_Reader(path))
            pending += [pool.submit(_run, file, batch, staging, checksum) for batch in _batches(of_file)]
        try:
            for future in as_completed(pending):
                size, found = future.result()
                sums |= found
                if progress is not None:
                    progress(size)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return sums


def _batches(jobs: Iterable[Job]) -> Iterator[list[Job]]:
    """Runs of tensors that lie behind each other and go in directly; the others one by one."""
    run: list[Job] = []
    size = end = 0
    for job in jobs:
        joins = job.to is not None and job.tensor.begin == end and size + job.tensor.nbytes <= BATCH
        if run and not (joins and len(run) < MOST_PIECES):
            yield run
            run, size = [], 0
        if job.to is None:
            yield [job]
            end = -1
        else:
            run.append(job)
            size += job.tensor.nbytes
            end = job.tensor.begin + job.tensor.nbytes
    if run:
        yield run


def _run(file: "_Reader", batch: list[Job], staging: local, checksum: bool) -> tuple[int, dict[str, int]]:
    if batch[0].to is None:
        return _staged(file, batch[0], staging, checksum)
    views = [_bytes(job.to) for job in batch if job.to is not None]
    file.scatter(views, batch[0].tensor.begin)
    found = {job.tensor.name: zlib.crc32(view) for job, view in zip(batch, views, strict=True)} if checksum else {}
    return sum(map(len, views)), found


def _staged(file: "_Reader", job: Job, staging: local, checksum: bool) -> tuple[int, dict[str, int]]:
    tensor, take = job.tensor, job.take
    assert take is not None
    rows = tensor.shape[0] if tensor.shape else 1
    each = tensor.nbytes // max(rows, 1)
    if not hasattr(staging, "buffer") or len(staging.buffer) < min(max(each, STAGING), tensor.nbytes):
        size = max(each, min(STAGING, tensor.nbytes))
        staging.buffer = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    step = max(1, len(staging.buffer) // max(each, 1))
    crc = 0
    for first in range(0, rows, step):
        count = min(step, rows - first)
        part = staging.buffer[: count * each]
        file.scatter([_bytes(part)], tensor.begin + first * each)
        if checksum:
            crc = zlib.crc32(_bytes(part), crc)
        take(first, part.view(job.dtype).view(count, *tensor.shape[1:]) if tensor.shape else part.view(job.dtype)[0])
    return tensor.nbytes, {tensor.name: crc} if checksum else {}


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class _Reader:
    """One open file that several threads read from."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> "_Reader":
        try:
            self.file = self.path.open("rb", buffering=0)
        except OSError as error:
            raise self._unreadable(error.strerror) from None
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def scatter(self, views: list[memoryview], begin: int) -> None:
        """Fills `views`, one behind the other, from byte `begin` on."""
        views = [view for view in views if len(view)]
        while views:
            try:
                count = self._read(views, begin)
            except OSError as error:
                raise self._unreadable(error.strerror) from None
            if count == 0:
                raise self._unreadable("it ends early")
            begin += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:
                views[0] = views[0][count:]

    def _read(self, views: list[memoryview], begin: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self.file.fileno(), views, begin)
        with self.path.open("rb", buffering=0) as own:  # where there is no preadv: a position of one's own
            own.seek(begin)
            return own.readinto(views[0]) or 0

    def _unreadable(self, why: str | None) -> CheckpointError:
        return CheckpointError(f"{self.path} cannot be read: {why}", "check the file, or fetch it again")
