"""`dgemma run` and `dgemma chat` fed with whatever anybody may feed them: `python tests/fuzz.py --cases 1000 --seed 0`.

Each process ends with an exit code that its --help names, without a traceback, having said what became of it, and leaves
nothing behind. A `run` is a case, and so is each line of a `chat`'s script. The same seed draws the same cases; `--only N`
runs one of them again and shows all of it.

Most cases are forks of this process, which has torch in memory and nothing opened, and go through `cli.main` with arguments,
environment and file descriptors of their own; some are processes from the console script on. Each has a folder for all it
reads and writes, no network and no terminal, and is cut where it takes too long.
"""

import argparse
import os
import random
import secrets
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from fuzz_cases import CHATS, LINKED, Case, case
from fuzz_judge import OUTCOMES, Ended, faults

from dgemma_local import cli
from dgemma_local.chat import store
from dgemma_local.errors import OTHER_WORDS, kinds

FILES = Path(cli.__file__).parent / "demo" / "models" / "text"
HERE = "dgemma-fuzz-\x1b[1m-"  # so that a path said as it is, is seen
LIMIT = 120.0  # seconds of a case
SHOWN = 300  # characters of what a failing case was given
WARM = ("torch", "dgemma_local.session", "dgemma_local.ui.chat", "dgemma_local.recording", "dgemma_local.auto")
WORDS = {kind.exit_code: kind.word for kind in kinds()} | OTHER_WORDS


# ── running one ───────────────────────────────────────────────────────────────────────────────────────────────────────


def run(given: Case, main: Callable[[], None] = cli.main, limit: float = LIMIT) -> Ended:
    """The case in a folder of its own. main: what stands for the command where it is no whole process."""
    with tempfile.TemporaryDirectory(prefix=HERE) as name:
        here = Path(name).resolve()
        _lay(given, here)
        writer = _write_pipe(here / "pipe", given.pipe) if given.pipe is not None else None
        began = time.perf_counter()
        process = _fork(lambda: _within(given, here, main))
        code = _wait(process, limit)
        took = time.perf_counter() - began
        left = (*_processes_left(process), *_files_left(here))
        turns = sum(len(each.conversation.turns) for each in store.listed(here / CHATS) if each.conversation)
        if writer is not None:
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)
        out = here / ".stdout"
        return Ended(
            code, out.read_bytes() if out.exists() else b"", (here / ".stderr").read_bytes(), left, turns, took
        )


def _lay(given: Case, here: Path) -> None:
    for folder in "home config state cache tmp".split():
        (here / folder).mkdir()
    for name, content in given.files.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_bytes(content)
    (here / ".stdin").write_bytes(given.stdin or b"")
    (here / LINKED).mkdir()
    for path in FILES.iterdir():
        (here / LINKED / path.name).symlink_to(path)
    if given.pipe is not None:
        os.mkfifo(here / "pipe")


def _write_pipe(path: Path, content: bytes) -> int:
    """A process that writes it once somebody reads."""

    def write() -> int:
        path.write_bytes(content)
        return 0

    return _fork(write)


def _fork(within: Callable[[], int]) -> int:
    process = os.fork()
    if process == 0:
        code = 70  # of this harness alone: no case may end so
        try:
            code = within()
        finally:
            os._exit(code)
    return process


def _within(given: Case, here: Path, main: Callable[[], None]) -> int:
    """In the fork: the command as the interpreter would run it. Returns its exit code."""
    os.setsid()  # no terminal, and a group to end it by
    os.chdir(here)
    _streams(given, here)
    environment = {**_environment(here), **given.variables}
    if given.whole:
        os.execve(
            sys.executable, [sys.executable, "-m", "dgemma_local", *map(os.fsdecode, given.arguments)], environment
        )
    os.environb.clear()
    os.environb.update(environment)
    sys.argv = ["dgemma", *map(os.fsdecode, given.arguments)]
    draw = random.Random(given.number)  # where no --seed is given, too, the answer is the same each time
    secrets.randbits, secrets.randbelow = draw.getrandbits, draw.randrange  # type: ignore[assignment]
    sys.stdin = _text(0, "r", there=given.stdin is not None)
    sys.stdout = _text(1, "w", there=given.stdout != "closed")
    sys.stderr = _text(2, "w", errors="backslashreplace", buffering=1)
    return _as_interpreter(main)


def _text(number: int, mode: str, *, there: bool = True, **more: Any) -> Any:
    """A descriptor as the interpreter opens it."""
    return open(number, mode, encoding="utf-8", **more) if there else None


def _as_interpreter(main: Callable[[], None]) -> int:
    code = 0
    try:
        main()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except OSError:
        code = 120  # the interpreter's own
    return code


def _streams(given: Case, here: Path) -> None:
    """Descriptors 0, 1 and 2."""
    os.dup2(os.open(here / ".stdin", os.O_RDONLY), 0)
    os.dup2(os.open(here / ".stderr", os.O_WRONLY | os.O_CREAT), 2)
    match given.stdout:
        case "full":
            os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        case "gone":
            reader, writer = os.pipe()
            os.close(reader)
            os.dup2(writer, 1)
        case _:
            os.dup2(os.open(here / ".stdout", os.O_WRONLY | os.O_CREAT), 1)
    for number, closed in ((0, given.stdin is None), (1, given.stdout == "closed")):
        if closed:
            os.close(number)


def _environment(here: Path) -> dict[bytes, bytes]:
    folders = {
        "HOME": "home",
        "TMPDIR": "tmp",
        "XDG_CONFIG_HOME": "config",
        "XDG_STATE_HOME": "state",
        "XDG_CACHE_HOME": "cache",
    }
    plain = {name: str(here / folder) for name, folder in folders.items()} | {
        "HF_HOME": str(here / "cache"),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "LANG": "C.UTF-8",
        "PATH": os.defpath,
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }
    return {os.fsencode(name): os.fsencode(value) for name, value in plain.items()}


def _wait(process: int, limit: float) -> int | None:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def _processes_left(group: int) -> Iterator[str]:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
        yield "a process"


def _files_left(here: Path) -> Iterator[str]:
    """What was to be there for a moment only, and a conversation that cannot be read again."""
    for path in here.rglob("*"):
        name = str(path.relative_to(here))
        if path.suffix in (".new", ".tmp", ".part", ".incomplete") or (path.parent == here / "tmp"):
            yield name
    for found in store.listed(here / CHATS):
        turns = found.conversation.turns if found.conversation else ()
        if (found.conversation is None and found.name != "broken") or any(
            each.outcome not in OUTCOMES for each in turns
        ):
            yield f"a conversation that is none: {found.damage or found.name}"


# ── all of them ───────────────────────────────────────────────────────────────────────────────────────────────────────


def drawn(seed: int, count: int) -> Iterator[Case]:
    """Cases until there are `count`, the lines of scripts counted one by one."""
    number = total = 0
    while total < count:
        found = case(seed, number)
        yield found
        number, total = number + 1, total + found.lines


def warm() -> None:
    """What every fork needs. No thread may be there when it is made."""
    for name in WARM:
        import_module(name)
    import_module("torch").set_num_threads(1)
    assert threading.active_count() == 1


def told(given: Case, ended: Ended, seed: int, wrong: Sequence[str], most: int = SHOWN) -> str:
    """A case in full: how to run it again, what it was given, what came of it."""

    def short(raw: object) -> str:
        text = repr(raw)
        return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"

    files = {
        name: content for name, content in given.files.items() if name in ("question", "config/dgemma/config.toml")
    }
    rows = {
        "arguments": given.arguments, "stdin": given.stdin, "variables": dict(given.variables), "files": files, "pipe": given.pipe,
        "stdout": f"{given.stdout}{', a process of its own' if given.whole else ''}", "code": ended.code,
    }  # fmt: skip
    lines = [f"case {given.number}: {'; '.join(wrong) or 'as it should'}"]
    lines += [f"    python tests/fuzz.py --seed {seed} --only {given.number}"]
    lines += [f"    {name:10} {short(value)}" for name, value in rows.items()]
    return "\n".join(
        [*lines, f"    {'says':10} {short(ended.stderr[-most:])}", f"    {'writes':10} {short(ended.stdout[-most:])}"]
    )


def table(ends: Counter[tuple[str, int | None]], lines: Counter[tuple[str, int | None]]) -> str:
    """By command and exit code."""
    rows = ["command  code  what                processes  cases"]
    for key in sorted(ends, key=str):
        command, code = key
        word = "cut" if code is None else WORDS.get(code, "undocumented")
        rows.append(f"{command:7}  {'-' if code is None else code:>4}  {word:18}  {ends[key]:9,}  {lines[key]:5,}")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of a case")
    parser.add_argument("--only", type=int, metavar="N", help="the case of that number alone, shown in full")
    asked = parser.parse_args()
    warm()
    ends: Counter[tuple[str, int | None]] = Counter()
    lines: Counter[tuple[str, int | None]] = Counter()
    failed, slowest = 0, (0.0, 0)
    for given in drawn(asked.seed, asked.cases) if asked.only is None else [case(asked.seed, asked.only)]:
        ended = run(given, limit=asked.limit)
        ends[given.command, ended.code] += 1
        lines[given.command, ended.code] += given.lines
        slowest = max(slowest, (ended.seconds, given.number))
        wrong = faults(given, ended)
        failed += bool(wrong)
        if wrong or asked.only is not None:
            print(told(given, ended, asked.seed, wrong, SHOWN if asked.only is None else 20_000), flush=True)
    print(table(ends, lines))
    print(
        f"{lines.total():,} cases in {ends.total():,} processes, {failed} failed; the slowest, {slowest[1]}: {slowest[0]:.1f} s"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
