"""The examination: what a check raises, holds back or says of somebody ends no report, and names nobody."""

import json
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from examined import is_cured, machine
from examined import nothing_of_this_machine as nothing_of_this_machine

from dgemma_local.doctor import CHECKS, document, examine, failed, hardware
from dgemma_local.doctor.examination import Check, Machine
from dgemma_local.doctor.finding import LONGEST, Finding, Level, ok, private


def test_what_a_check_raises_is_a_finding_and_the_next_goes_on() -> None:
    def broken(at: Machine) -> Iterator[Finding]:
        yield ok("first", "is kept")
        raise ZeroDivisionError("two\nlines")

    seen = list(examine([Check("broken", broken), Check("next", lambda at: [ok("next", "done")])], machine()))
    assert [(f.name, f.level) for f in seen] == [("first", "OK"), ("broken", "FAIL"), ("next", "OK")]
    is_cured(seen[1], Level.FAIL, "ZeroDivisionError: two lines", "--json")


def test_a_check_that_hangs_is_left_behind() -> None:
    began = time.monotonic()
    hangs = Check("disk", lambda at: cast(Any, time.sleep(30)), 0.05, "pull the plug")
    seen = list(examine([hangs, Check("next", lambda at: [ok("next", "done")])], machine()))
    assert time.monotonic() - began < 10
    is_cured(seen[0], Level.FAIL, "no answer within 0.05 seconds", "pull the plug")
    assert seen[1].level is Level.OK


def test_what_was_found_before_it_hangs_is_told() -> None:
    def hangs(at: Machine) -> Iterator[Finding]:
        yield ok("first", "is kept")
        time.sleep(30)

    seen = list(examine([Check("disk", hangs, 0.5, "pull the plug")], machine()))
    assert [(f.name, f.level) for f in seen] == [("first", "OK"), ("disk", "FAIL")]


def test_a_panic_is_a_finding() -> None:
    def panics(at: Machine) -> Iterator[Finding]:
        raise SystemExit(3)

    (seen,) = examine([Check("odd", panics)], machine())
    assert seen.level is Level.FAIL and failed([seen]) and not failed([])


def test_a_report_names_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/data/alice")
    assert private("/data/alice/x and /data/alicent, /home/bob/y") == "~/x and /data/alicent, ~/y"
    assert private({"a": ["http://me:secret@proxy:1/"], "n": 3}) == {"a": ["http://proxy:1/"], "n": 3}
    tidied = Finding(
        name="n", level=Level.OK, what="a\nb " * 300, cure="/data/alice", facts={"p": "/data/alice/z"}
    ).tidied()
    assert len(tidied.what) == LONGEST and "\n" not in tidied.what
    assert (tidied.cure, tidied.facts) == ("~", {"p": "~/z"})
    monkeypatch.setenv("HOME", "/")
    assert private("/etc") == "/etc"


def test_the_document_is_json() -> None:
    made = json.loads(json.dumps(document([ok("a", "b", size=1)], 1.26)))
    assert made["findings"] == [{"name": "a", "level": "OK", "what": "b", "cure": None, "facts": {"size": 1}}]
    assert made["seconds"] == 1.3 and made["failed"] is False
    assert made["versions"]["torch"] == torch.__version__


def test_every_check_has_an_end() -> None:
    assert all(0 < check.limit < 2 * 3600 for check in CHECKS)
    assert hardware.FIRST < hardware.LIMIT <= 8
