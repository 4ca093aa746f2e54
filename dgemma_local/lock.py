"""Who holds the card: a lock a card and user, that tells a second dgemma of the first.

It is a word between neighbours: nobody waits for it, and nobody is kept out by it. The plan of the memory says what fits; this
says who is there, which `nvidia-smi` does not say everywhere. The operating system lets go of the lock when the process
ends, however it ends, so that what a crashed one wrote beside it is never read.
"""

import json
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from dgemma_local import files
from dgemma_local.errors import DoesNotFit

MIB = 1 << 20
LONGEST = 4096  # bytes of what a holder writes beside its lock
LONGEST_COMMAND = 80  # characters of it that are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A dgemma with a model on a card."""

    pid: int
    command: str
    since: str  # local time, ISO 8601 to the second
    bytes: int | None  # by its plan

    @property
    def line(self) -> str:
        """Such as: dgemma chat (pid 123, since 2026-11-30 12:03:00, 17,100 MiB)."""
        size = "" if self.bytes is None else f", {self.bytes // MIB:,} MiB"
        return f"{self.command} (pid {self.pid}, since {self.since.replace('T', ' ')}{size})"


@dataclass(slots=True)
class Hold:
    """What came of asking. Lives as long as the model does: with it, the lock is let go."""

    other: Holder | None  # who was there first; None: nobody, or nobody knows
    lock: FileLock | None = None  # ours

    def release(self) -> None:
        """Another may be the first now."""
        if self.lock is not None:
            self.lock.release()
            self.lock = None


def take(card: str, size: int | None, arguments: Sequence[str] | None = None) -> Hold:
    """Takes the lock of a card, or finds who has it. Where no lock can be kept, as without a home folder, neither.

    card: any name that every process has for it; its uuid. size: bytes by the plan. arguments: None: this process's.
    """
    base = _folder()
    if base is None:
        return Hold(None)
    name = re.sub(r"[^A-Za-z0-9-]", "_", card)
    paper = base / f"{name}.json"
    try:
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = FileLock(base / f"{name}.lock")
        lock.acquire(timeout=0)
    except Timeout:
        return Hold(_read(paper))
    except (OSError, NotImplementedError):  # a folder that may not be written, a file system without locks
        return Hold(None)
    me = Holder(
        pid=os.getpid(),
        command=_command(sys.argv if arguments is None else arguments),
        since=datetime.now().isoformat(timespec="seconds"),
        bytes=size,
    )
    with suppress(OSError):
        fresh = paper.with_suffix(f".{os.getpid()}")
        fresh.unlink(missing_ok=True)  # one that ended had this number
        with fresh.open("x", encoding="utf-8") as file:
            json.dump(asdict(me), file)
        fresh.replace(paper)
    return Hold(None, lock)


def named(error: DoesNotFit, other: Holder | None) -> DoesNotFit:
    """The same refusal, with the one named who holds the card."""
    return error if other is None else DoesNotFit(error.what, f"end {other.line}; or {error.fix}")


def _folder() -> Path | None:
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (cache if cache.is_absolute() else Path("~/.cache").expanduser()) / "dgemma" / "cards"
    except RuntimeError:  # no home
        return None


def _read(paper: Path) -> Holder | None:
    """None of our own process, and where nothing, or nothing of use, is written: it is being written just now."""
    try:
        written = json.loads(files.whole(paper, LONGEST))
        pid, command, since, size = (written[name] for name in ("pid", "command", "since", "bytes"))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    good = _is_count(pid) and isinstance(command, str) and isinstance(since, str) and (size is None or _is_count(size))
    if not good or pid == os.getpid() or not _runs(pid):
        return None
    return Holder(pid=pid, command=_clean(command), since=_clean(since), bytes=size)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 63


def _runs(pid: int) -> bool:
    """Whether there is such a process; on Windows, where that question would end it, always."""
    if sys.platform == "win32":
        return True
    try:
        os.kill(pid, 0)
    except PermissionError:  # another's
        return True
    except (OSError, OverflowError):
        return False
    return True


def _command(arguments: Sequence[str]) -> str:
    """The program and, of our own, its command; no more: what follows may be a prompt."""
    program, *rest = [*arguments] or [""]
    name = Path(program).name
    ours = name in ("dgemma", "__main__.py")
    return _clean(" ".join(["dgemma", *rest[:1]] if ours else [name]))


def _clean(text: str) -> str:
    text = "".join(sign if sign.isprintable() else "�" for sign in text)
    return text if len(text) <= LONGEST_COMMAND else text[: LONGEST_COMMAND - 1] + "…"
