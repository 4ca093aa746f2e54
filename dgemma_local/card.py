"""Which NVIDIA cards there are, what they hold and for whom; and how much memory the host has left.

Asked of `nvidia-smi` and of the kernel's own files, so that a plan can be made before torch is imported, and without
waking a card: a CUDA context of our own would take half a gigabyte of what is to be measured.

    total  ┬ reserved by the driver    on a 4090 some 350 MiB: in `total`, never to be had
           ├ used                      by the processes that are listed, and by a desktop, which is not
           └ free                      what a plan may count on

nvidia-smi counts in MiB; everything here is in bytes.

Numbers are PCI order, as nvidia-smi has it. CUDA's own order is fastest first: who opens a card by what stands here
sets CUDA_VISIBLE_DEVICES to its uuid.
"""

import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

MIB = 1 << 20
TIMEOUT = 8.0  # seconds: without the persistence daemon each card takes a second or two to wake up
ENDS_WITHIN = 1.0  # seconds that a killed nvidia-smi may take
LARGEST = 1 << 20  # bytes of an answer: of a hundred cards it takes some 10,000
_CARD = ("index", "name", "memory.total", "memory.used", "compute_cap", "driver_version", "uuid", "memory.free")
_HOLDER = ("pid", "process_name", "used_memory", "gpu_uuid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process with memory on a card."""

    pid: int
    name: str
    bytes: int | None  # None: the driver does not say, as under WSL


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One card. None: nvidia-smi does not say, as with MIG partitions and memory shared with the host."""

    index: int
    name: str
    uuid: str
    total: int | None  # bytes
    free: int | None
    capability: tuple[int, int] | None = None
    driver: str = ""
    holders: tuple[Holder, ...] = ()  # the largest first


def cards() -> tuple[Card, ...]:
    """The cards that this process may use, in the order of CUDA_VISIBLE_DEVICES. No nvidia-smi, or an error of it: none."""
    found = [card for row in _ask("--query-gpu", _CARD) if (card := _card(row)) is not None]
    if not found:
        return ()
    held: dict[str, list[Holder]] = {}
    for pid, name, used, uuid in _ask("--query-compute-apps", _HOLDER):
        if _is_number(pid):
            held.setdefault(uuid, []).append(Holder(pid=int(pid), name=name, bytes=_mib(used)))
    for holders in held.values():
        holders.sort(key=lambda holder: -(holder.bytes or 0))
    return tuple(_visible([replace(card, holders=tuple(held.get(card.uuid, ()))) for card in found]))


def host_memory(root: Path = Path("/")) -> int | None:
    """Bytes of RAM that this process may still take: what the kernel calls available, or less in a container.

    None where there is no /proc, as on macOS.
    """
    free = _meminfo(root / "proc/meminfo")
    return None if free is None else max(0, min([free, *_cgroup_room(root)]))


@dataclass(frozen=True, slots=True)
class Answer:
    """What a program wrote, and how it ended: below 0 by that signal."""

    code: int
    out: str
    errors: str


def ask(command: Sequence[str], limit: float) -> Answer:
    """A program's answer within `limit` seconds, and LARGEST bytes of it: one that prints for ever fills no memory.

    Raises OSError: it cannot be started; subprocess.TimeoutExpired; subprocess.SubprocessError: it wrote more than that.
    """
    ends = time.monotonic() + limit
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stderr is not None
    wrote: dict[IO[bytes], bytes] = {}
    readers = [
        threading.Thread(target=_first_of, args=(pipe, wrote), daemon=True) for pipe in (child.stdout, child.stderr)
    ]
    try:
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(max(0.0, ends - time.monotonic()))
        code = child.wait(max(0.0, ends - time.monotonic()))
        if any(reader.is_alive() for reader in readers):  # what it started holds its pipes
            raise subprocess.TimeoutExpired(command, limit)
    finally:
        _end(child)
    if any(len(each) > LARGEST for each in wrote.values()):
        raise subprocess.SubprocessError("it writes without end")
    out, errors = (wrote[pipe].decode("utf-8", errors="replace") for pipe in (child.stdout, child.stderr))
    return Answer(code, out, errors)


def _first_of(pipe: IO[bytes], wrote: dict[IO[bytes], bytes]) -> None:
    """A byte more than it may be; then the pipe is closed, and who writes on is ended."""
    with pipe:
        wrote[pipe] = pipe.read(LARGEST + 1)


def _end(child: "subprocess.Popen[bytes]") -> None:
    """One that waits for a driver does not end at all, and is left behind."""
    if child.poll() is None:
        child.kill()
        with suppress(subprocess.TimeoutExpired):
            child.wait(ENDS_WITHIN)


def _ask(query: str, fields: tuple[str, ...]) -> Iterator[list[str]]:
    """nvidia-smi's rows. A comma within the second field, a name, does not shift those behind it."""
    command = ["nvidia-smi", f"{query}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        answer = ask(command, TIMEOUT)
    except (OSError, subprocess.SubprocessError):
        return
    for line in answer.out.splitlines() if answer.code == 0 else ():
        first, *rest = line.split(",")
        behind = len(fields) - 2
        if len(rest) > behind:
            yield [part.strip() for part in (first, ",".join(rest[:-behind]), *rest[-behind:])]


def _card(row: list[str]) -> Card | None:
    index, name, total, used, capability, driver, uuid, free = row
    if not _is_number(index):
        return None
    major, dot, minor = capability.partition(".")
    known = dot and _is_number(major) and _is_number(minor)
    whole, taken = _mib(total), _mib(used)
    rest = None if whole is None or taken is None else whole - taken
    return Card(
        index=int(index),
        name=name,
        uuid=uuid,
        total=whole,
        free=rest if _mib(free) is None else _mib(free),
        capability=(int(major), int(minor)) if known else None,
        driver=driver,
    )


def _mib(field: str) -> int | None:
    """None for [N/A], [Insufficient Permissions], [Unknown Error]."""
    return int(field) * MIB if _is_number(field) else None


def _is_number(field: str) -> bool:
    """Python makes no number of thousands of digits."""
    return field.isdecimal() and len(field) < 20


def _visible(found: list[Card]) -> Iterator[Card]:
    """As CUDA reads CUDA_VISIBLE_DEVICES: numbers, or beginnings of uuids; the first that is no card ends the list."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        yield from found
        return
    for name in (part.strip() for part in wanted.split(",")):
        matching = [card for card in found if name == str(card.index) or (name and card.uuid.startswith(name))]
        if len(matching) != 1:  # also a beginning that two share
            return
        yield matching[0]


def _meminfo(file: Path) -> int | None:
    """MemAvailable: free, and what the kernel would give up for it."""
    for name, _, value in (line.partition(":") for line in _lines(file)):
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _cgroup_room(root: Path) -> Iterator[int]:
    """What the memory limit of each control group around this process leaves; page cache is given up for it."""
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mount, most, used, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, most, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        own = mount / path.strip("/")  # within a container the path may be the host's, and not be there
        for group in [own, *own.parents][: 1 + len(own.relative_to(mount).parts)]:
            limit, taken = _number(group / most), _number(group / used)
            if limit is not None and taken is not None:
                stat = dict(pair for line in _lines(group / "memory.stat") if len(pair := line.split()) == 2)
                yield limit - taken + int(stat.get(cache, 0))


def _number(file: Path) -> int | None:
    """A file's one number; None: no file, or "max"."""
    text = " ".join(_lines(file)).strip()
    return int(text) if text.isdecimal() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
