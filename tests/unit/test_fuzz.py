"""A slice of the fuzz of `dgemma run` and `dgemma chat`, and that its judge sees what is wrong."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fuzz_cases import Case, case, options
from fuzz_judge import Ended, faults

from dgemma_local.chat.commands import NAMES

TESTS = Path(__file__).parent.parent
PLANTED = """
import json, os, subprocess, sys, time
from pathlib import Path
import fuzz
from fuzz_cases import Case

def raises(): raise KeyError("nobody has thought of this")
def exits(): sys.exit(77)
def hangs(): time.sleep(60)
def dies(): os.kill(os.getpid(), 9)
def shouts(): print("\\x1b[2J", file=sys.stderr)
def forgets(): print("hello"); Path(os.environ["TMPDIR"], "half").touch()
def forks(): print("hello"); subprocess.Popen(["sleep", "60"])
def breaks():
    chats = Path(os.environ["XDG_STATE_HOME"], "dgemma", "chats")
    chats.mkdir(parents=True)
    (chats / "one.json").write_text("{}")
    print("hello")
def answers(): print("hello" if (sys.argv[1:], sys.stdin.read()) == (["run", "-p", "hello"], "in") else "")

given = Case(number=0, arguments=(b"run", b"-p", b"hello"), stdin=b"in")
plants = (raises, exits, hangs, dies, shouts, forgets, forks, breaks, answers)
print(json.dumps({
    each.__name__: fuzz.faults(given, fuzz.run(given, each, 0.3 if each is hangs else 60)) for each in plants
}))
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process that has no threads yet, as forks want it."""
    environment = os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_nothing_that_is_fed_to_it_ends_without_an_outcome() -> None:
    ended = run(str(TESTS / "fuzz.py"), "--cases", "40", "--seed", "3")
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    assert " 0 failed" in ended.stdout and "run         0  done" in ended.stdout and "chat " in ended.stdout


# ── what is drawn ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_number_draws_the_same_case_each_time() -> None:
    assert all(case(7, number) == case(7, number) for number in range(50))
    assert all(case(7, number).arguments[0] in (b"run", b"chat") for number in range(50))
    assert case(7, 0) != case(8, 0)


def test_every_option_and_every_command_of_a_chat_is_drawn() -> None:
    cases = [case(0, number) for number in range(3000)]
    for command in ("run", "chat"):
        words = {
            word.partition(b"=")[0].decode(errors="replace")
            for each in cases
            if each.command == command
            for word in each.arguments
        }
        assert not [option.name for option in options(command).values() if not words & {*option.flags}]
    said = b"\n".join(each.stdin or b"" for each in cases if each.command == "chat")
    assert not [name for name in NAMES if f"/{name} ".encode() not in said]


def test_a_number_is_drawn_at_its_bounds_and_past_them() -> None:
    given = {word for number in range(3000) for word in case(0, number).arguments}
    assert {b"0", b"1", b"4096", b"4097"} <= given, "--steps"
    assert {b"60.0", b"60.001", b"-0.001"} <= given, "--slow"


# ── the judge ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def planted() -> Mapping[str, Sequence[str]]:
    """The faults of a command that does what its name says."""
    ended = run("-c", PLANTED)
    assert ended.returncode == 0, ended.stderr
    found: Mapping[str, Sequence[str]] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize(
    ("plant", "fault"),
    [
        ("raises", "a traceback on stderr"),
        ("exits", "exit code 77 is none of those that `dgemma run --help` names"),
        ("hangs", "a hang"),
        ("dies", "exit code -9"),
        ("shouts", "control characters on stderr"),
        ("forgets", "left behind: tmp/half"),
        ("forks", "left behind: a process"),
        ("breaks", "left behind: a conversation that is none"),
    ],
)
def test_a_command_that_is_broken_is_found_out(planted: Mapping[str, Sequence[str]], plant: str, fault: str) -> None:
    assert any(each.startswith(fault) for each in planted[plant])


def test_a_command_that_answers_is_in_order(planted: Mapping[str, Sequence[str]]) -> None:
    assert planted["answers"] == []


RUN = Case(number=0, arguments=(b"run", b"-p", b"hello"))
CHAT = Case(number=0, arguments=(b"chat",), stdin=b"/show\nhello\n")
JSON = replace(RUN, json=True)
FINISHED = {"event": "finished", "outcome": "complete", "said": "complete: 1 token in 1 canvas", "exit_code": 0}
FAILED = {"event": "failed", "outcome": None, "said": "there is no file", "exit_code": 3}
TWO_LINES = b"error: there is no file\n  fix: check the path\n"


def lines(*values: object) -> bytes:
    return "".join(f"{json.dumps(value)}\n" for value in values).encode()


@pytest.mark.parametrize(
    ("given", "ended"),
    [
        (RUN, Ended(0, b"hello\n", b"")),
        (RUN, Ended(3, b"", TWO_LINES)),
        (RUN, Ended(17, b"hel\n", b"stopped at --max-tokens 1\n")),
        (replace(RUN, stdout="gone"), Ended(141, b"", b"")),
        (replace(RUN, stdout="full"), Ended(1, b"", TWO_LINES)),
        (JSON, Ended(0, lines({"event": "start"}, FINISHED), b"")),
        (JSON, Ended(3, lines(FAILED), TWO_LINES)),
        (JSON, Ended(2, b"", TWO_LINES)),
        (CHAT, Ended(0, b"hello\n", b"", turns=1)),
        (CHAT, Ended(3, b"", b"too long\n  fix: shorten it\n")),
        (replace(CHAT, stdin=b"/exit\nhello\n"), Ended(0, b"", b"")),
    ],
)
def test_what_is_in_order_has_no_fault(given: Case, ended: Ended) -> None:
    assert faults(given, ended) == []


@pytest.mark.parametrize(
    ("given", "ended", "fault"),
    [
        (RUN, Ended(0, b"", b"demo-text\n"), "exit code 0 without an answer"),
        (RUN, Ended(0, b"\xff", b""), "stdout is no UTF-8"),
        (RUN, Ended(1, b"", TWO_LINES), "exit code 1 is none"),
        (RUN, Ended(17, b"hel\n", b""), "nothing on stderr says why"),
        (RUN, Ended(3, b"", b"error: there is no file\n"), "an error without its two lines"),
        (RUN, Ended(0, b"hello\n", b"/x/y.py:3: UserWarning: this\n"), "a warning of Python's"),
        (JSON, Ended(0, b"hello\n", b""), "--json does not end in a line"),
        (JSON, Ended(0, b"", b""), "--json does not end in a line"),
        (JSON, Ended(0, lines({"event": "start"}), b""), "the last line of --json tells of start"),
        (JSON, Ended(0, lines({**FINISHED, "outcome": None}), b""), "the last line of --json has no outcome"),
        (JSON, Ended(0, lines({**FINISHED, "exit_code": 17}), b""), "the last line of --json tells of finished, 17"),
        (JSON, Ended(0, lines(FINISHED) + b"NaN\n", b""), "--json does not end in a line"),
        (JSON, Ended(3, b"", TWO_LINES), "--json does not end in a line"),
        (CHAT, Ended(0, b"", b"hello\n"), "a message without an answer"),
        (CHAT, Ended(17, b"", b"stopped\n"), "1 messages, and 0 outcomes"),
        (replace(CHAT, stdin=b"hello\n\xff\nhello\nhel"), Ended(17, b"h", b"stopped\n", turns=2), "3 messages, and 2"),
        (CHAT, Ended(2, b"", b""), "nothing on stderr says why"),
    ],
)
def test_what_is_wrong_is_named(given: Case, ended: Ended, fault: str) -> None:
    assert any(each.startswith(fault) for each in faults(given, ended))
