"""What `fuzz.py` holds against a process of `dgemma run` or `dgemma chat`: the promises of README and of its --help."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from fuzz_cases import Case

from dgemma_local.chat.commands import Command, Lines, Say, parse
from dgemma_local.cli_help import PAGES
from dgemma_local.errors import BROKEN_PIPE, ConfigError, DgemmaError, UsageError, kinds
from dgemma_local.outcomes import Outcome
from dgemma_local.ui.prompt import LARGEST
from dgemma_local.ui.terminal import printable

OUTCOMES = frozenset(each.value for each in Outcome)
UNASKED = frozenset({UsageError.exit_code, ConfigError.exit_code})  # of flags and defaults: before anything is begun
_WARNING = re.compile(r"^\S+:\d+: \w*Warning: ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of a case."""

    code: int | None  # exit code; a signal's number below zero; None: cut
    stdout: bytes
    stderr: bytes
    left: tuple[str, ...] = ()  # behind it: processes and files that it did not take away
    turns: int = 0  # that are saved, over all conversations
    seconds: float = 0.0


def faults(given: Case, ended: Ended) -> list[str]:
    """What is wrong with how a case has ended; nothing, as a rule."""
    if ended.code is None:
        return [f"a hang: cut after {ended.seconds:.0f} s"]
    found = [f"left behind: {each}" for each in ended.left]
    if ended.code not in _documented(given):
        found.append(f"exit code {ended.code} is none of those that `dgemma {given.command} --help` names")
    texts = []
    for name, raw in (("stdout", ended.stdout), ("stderr", ended.stderr)):
        texts.append(raw.decode(errors="replace"))
        if texts[-1].encode() != raw:
            found.append(f"{name} is no UTF-8")
        if "Traceback" in texts[-1]:
            found.append(f"a traceback on {name}")
    out, said = texts
    if _WARNING.search(said):
        found.append("a warning of Python's on stderr")
    if printable(said) != said:
        found.append("control characters on stderr")
    if given.stdout == "file":
        found += _untold(given, ended, ended.code, out, said)
    return found


def _documented(given: Case) -> set[int]:
    page = PAGES[given.command]
    codes = {0, UsageError.exit_code, *(each.exit_code for each in page.errors), *page.endings}
    return codes if given.stdout == "file" else codes | {DgemmaError.exit_code, BROKEN_PIPE}


def _untold(given: Case, ended: Ended, code: int, out: str, said: str) -> Iterator[str]:
    """Where a reader would not know what became of it."""
    helped = b"--help" in given.arguments or b"--list" in given.arguments
    if code and not said.strip() and not given.json:
        yield f"nothing on stderr says why the exit code is {code}"
    if given.command == "chat":
        if not helped:
            yield from _unanswered(given, ended, out, said)
        return
    if code == 0 and not out.strip():
        yield "exit code 0 without an answer"
    if code in {each.exit_code for each in kinds()} and not re.search(r"(^|\n)error: .+\n  fix: .+\n$", said):
        yield "an error without its two lines"
    if given.json and not (code in UNASKED and not out) and (wrong := _ends_badly(out, code)):
        yield wrong


def _ends_badly(out: str, code: int) -> str | None:
    """Why the last of the JSON lines does not tell how it ended."""
    try:
        lines = [json.loads(each, parse_constant=_no_json) for each in out.splitlines()]
        last = lines[-1]
        if last["event"] not in ("finished", "failed") or last["exit_code"] != code or not last["said"]:
            return f"the last line of --json tells of {last['event']}, {last.get('exit_code')}, and the exit code is {code}"
        if last["outcome"] not in (OUTCOMES if last["event"] == "finished" else OUTCOMES | {None}):
            return f"the last line of --json has no outcome, but {last['outcome']!r}"
    except (ValueError, LookupError, TypeError) as error:
        return f"--json does not end in a line that tells how it ended: {error!r}"
    return None


def _no_json(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _unanswered(given: Case, ended: Ended, out: str, said: str) -> Iterator[str]:
    """Of a chat: each message becomes a turn, which is saved with its outcome, or an error that says how to cure it."""
    due = _messages(given.stdin or b"")
    if ended.code == 0 and due and not out.strip():
        yield "a message without an answer, and exit code 0"
    begun = ended.turns - sum(name.endswith("held.json") for name in given.files)  # which has one turn
    outcomes = begun + said.count("  fix: ") + said.count("taken back: ")
    kept = "is not saved" not in said and b"XDG_STATE_HOME" not in given.variables
    if outcomes < due and kept and "error: " not in said:
        yield f"{due} messages, and {outcomes} outcomes"


def _messages(script: bytes) -> int:
    """How many a script has, up to where it leaves; what is not UTF-8 is none."""
    lines, found = Lines(LARGEST), 0
    for raw in (*script.split(b"\n"), None):
        try:
            read = lines.close() if raw is None else lines.feed(raw.decode("utf-8-sig").removesuffix("\r"))
        except (ValueError, DgemmaError):
            continue
        meant = parse(read or "")
        if isinstance(meant, Command) and meant.name == "exit":
            break
        found += isinstance(meant, Say)
    return found
