"""What is wrong with a recording is said by its line; other spellings and newer versions are read as far as they go."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damaged import check_error, is_start, outcome, parsed, plain, seen_of, small, spelled

from dgemma_local.errors import RecordingError
from dgemma_local.recording import open_recording

# What is said of it


@pytest.mark.parametrize(
    ("line", "change", "said"),
    [
        (1, {"tokens": -1}, "`tokens` is not a whole number from 0 to 2147483647"),
        (1, {"seconds": "1"}, "`seconds` is not a number from 0"),
        (1, {"event": "prefilled "}, "it is no event of a run"),
        (2, {"canvas": 1}, "a canvas is missing"),
        (3, {"step": 2}, "a step is missing"),
        (3, {"step": 0}, "a step is missing"),
        (3, {"steps": 1}, "`step` is not a whole number from 0 to 0"),
        (3, {"done": True}, "line 5: a step follows the last one of its canvas"),
        (3, {"done": 1}, "`done` is not true or false"),
        (3, {"accepted": "01"}, "`accepted` is not 8 of 0 and 1"),
        (3, {"accepted": "0000000٠"}, "`accepted` is not 8 of 0 and 1"),
        (3, {"entropy": [23, *[0.0] * 7]}, "`entropy` holds something that is no entropy"),
        (3, {"draft": [0] * 9}, "`draft` is not a list of 8"),
        (3, {"draft": [0.0] * 8}, "`draft` holds something that is no token id"),
        (3, {"next": [2**31, *[0] * 7]}, "`next` holds something that is no token id"),
        (3, {"texts": ["a", "b"] * 9}, "`texts` is not a list of"),
        (4, {"done": False}, "line 6: a canvas is committed before its last step"),
        (5, {"tokens": [2] * 8}, "what is committed is not what the last step left"),
        (5, {"steps": 2}, "what is committed is not what the last step left"),
        (5, {"kept": 9}, "`kept` is not a whole number from 0 to 8"),
        (5, {"pieces": [1]}, "`pieces` holds something that is no piece of text"),
        (5, {"pieces": [{"kind": "spell", "text": ""}]}, "`kind` is none of answer, thought, tool_call"),
        (10, {"reason": "tired"}, "the run ended for a reason that is not known"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, line: int, change: dict[str, Any], said: str) -> None:
    lines: list[Any] = [*parsed()]
    lines[line] = lines[line] | change
    found = outcome(spelled(lines), tmp_path)
    assert found is not None and said in str(found.notice) and str(found.notice).endswith("; shown up to there")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "it is empty"),
        (b"\n", "it is not JSON"),
        (b"{", "it is cut in the middle"),
        (b"[]\n", "it is not an object"),
        (b"{}\n", "it is not the head of a recording"),
        (b'{"event":"recording","format":"other"}', "it is not the head of a recording"),
        (b"\x89PNG\r\n\x1a\n", "it is not text in UTF-8"),
        (b"\xff" * 100, "it is not text in UTF-8"),
        (b"[" * 200_000 + b"\n", "it is not JSON"),
        (b'{"a":' * 200_000 + b"\n", "it is not JSON"),
        (b'{"seed":' + b"9" * 5000 + b"}\n", "it is not JSON"),
        (b'{"a":NaN}\n', "it is not JSON"),
        (b'{"a":-Infinity}\n', "it is not JSON"),
        (b'{"event":1,"event":2}\n', "it has a name twice"),
        (b"\x1f\x8b", "it is empty"),
        (b"\x1f\x8b" + b"\0" * 100, "the compressed data are damaged"),
        (gzip.compress(b""), "it is empty"),
        (gzip.compress(b"notes\n"), "it is not JSON"),
    ],
)
def test_what_is_no_recording_is_said(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "run"
    path.write_bytes(data)
    with pytest.raises(RecordingError, match=said) as caught:
        open_recording(path)
    check_error(caught.value)
    assert caught.value.what.startswith(f"{path} is not a recording: ") and caught.value.exit_code == 15


@pytest.mark.parametrize(
    ("bend", "events", "said"),
    [
        (lambda data: b"\xef\xbb\xbf" + data, 11, None),
        (lambda data: data.replace(b"\n", b"\r\n"), 11, None),
        (lambda data: data.replace(b'"0.1.0"', b'"0.1.0","later":[1]'), 11, None),
        (lambda data: data + b"\n", 11, "line 12: it is not JSON"),
        (lambda data: data + data, 11, "something follows the end of the run"),
        (lambda data: data.replace(b'"step":1', b'"step":1,"step":1', 1), 2, "it has a name twice"),
        (lambda data: data.replace(b'"step":1', b'"step":1,"deep":' + b"[" * 9999, 1), 2, "it is not JSON"),
        (lambda data: data.replace(b'"temperature":0.8', b'"temperature":1e999', 1), 1, "`temperature` is not"),
        (lambda data: data.replace(b'"entropy":[', b'"entropy":[1e999,', 1), 1, "`entropy` is not a list of 8"),
        (lambda data: gzip.compress(data) + b"\0", 11, "something follows the end of the compressed data"),
        (lambda data: gzip.compress(data) + gzip.compress(data), 11, "something follows the end of the compressed"),
        (lambda data: gzip.compress(data)[:-1], 11, None),
        (lambda data: gzip.compress(gzip.compress(data)), -1, None),
        (lambda data: data.decode().encode("utf-16"), -1, None),
    ],
)
def test_other_ways_to_write_it(tmp_path: Path, bend: Callable[[bytes], bytes], events: int, said: str | None) -> None:
    assert b'"event":"finished"' in plain()
    found = outcome(bend(plain()), tmp_path)
    assert (found is None) == (events < 0)
    if found is not None:
        assert is_start(found, small()) and len(found.events) == min(events, len(small().events))
        assert (found.notice is None) == (said is None) and str(said or "") in str(found.notice)


def test_the_prompt_is_read_once() -> None:
    found = seen_of(spelled([*parsed()[:3], parsed()[1], *parsed()[3:]]))
    assert found is not None and found.events == small().events[:2]
    assert found.notice == "run: line 4: the prompt is read in the middle of the run; shown up to there"


def test_zero_has_no_sign() -> None:
    lines = [*parsed()[:2], parsed()[2] | {"entropy": [-0.0] * 8}]
    found = seen_of(spelled(lines))
    assert found is not None and repr(found.canvases[0][0].entropy[0]) == "0.0"


# Newer ones


def newer(change: Callable[[list[Any]], None] = lambda lines: None) -> bytes:
    lines: list[Any] = [line | {"later": {"a": [1]}} for line in parsed()]
    lines[0]["version"] = 2
    change(lines)
    return spelled(lines)


def test_a_newer_version_is_read_as_far_as_it_is_understood(tmp_path: Path) -> None:
    found = outcome(newer(lambda lines: lines.insert(3, {"event": "mood", "value": 1})), tmp_path)
    assert found is not None and found.events == small().events
    assert found.notice == "run: it is of version 2, and this dgemma reads version 1"
    found = outcome(newer(lambda lines: lines[4].pop("draft")), tmp_path)
    assert found is not None and found.events == small().events[:3]
    assert str(found.notice).endswith("reads version 1; line 5: `draft` is not a list of 8; shown up to there")
    found = outcome(newer(lambda lines: lines.pop()), tmp_path)
    assert str(found and found.notice).endswith("reads version 1; it ends before the run did; shown up to there")


def test_a_newer_head_that_is_not_understood(tmp_path: Path) -> None:
    (tmp_path / "run").write_bytes(newer(lambda lines: lines[0].pop("ends")))
    with pytest.raises(RecordingError, match="it is of version 2, and this dgemma reads version 1: `ends` is not"):
        open_recording(tmp_path / "run")
