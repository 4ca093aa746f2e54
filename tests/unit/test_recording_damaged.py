"""Files that are no recording, or were one: what is sound is shown, with a line; nothing else ever comes out."""

import gzip
import io
import json
import os
import random
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import recordings
from jsonschema import Draft202012Validator

from dgemma_local import recording as package
from dgemma_local.errors import RecordingError
from dgemma_local.events import CanvasCommitted, StepDone
from dgemma_local.recording import Recorder, Recording, open_recording
from dgemma_local.recording import lines as lines_of_files
from dgemma_local.recording import read as reading
from dgemma_local.states import follow, summary


@cache
def small() -> Recording:
    """A few kilobytes: every kind of line, two canvases."""
    return recordings.make(length=8, steps=3, vocabulary=30)


@cache
def plain() -> bytes:
    """`small`, as a file."""
    file = io.BytesIO()
    made = small()
    there, here = os.pipe()
    with Recorder(Path(f"/dev/fd/{here}"), made.header, made.word) as recorder:
        os.close(here)
        for event, seconds, pieces in zip(made.events, made.seconds, made.pieces, strict=True):
            recorder.take(event, seconds, pieces)
    with os.fdopen(there, "rb") as pipe:
        file.write(pipe.read())
    return file.getvalue()


@cache
def packed() -> bytes:
    """The same, flushed line by line."""
    pack = zlib.compressobj(6, wbits=31)
    parts = [pack.compress(line) + pack.flush(zlib.Z_SYNC_FLUSH) for line in plain().splitlines(keepends=True)]
    return b"".join(parts) + pack.flush()


@cache
def parsed() -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(line) for line in plain().splitlines())


def spelled(lines: list[Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def check_error(error: RecordingError) -> None:
    for line in (error.what, error.fix):
        assert line and line.isprintable() and line.encode()
    assert error.__cause__ is None


def check_sound(found: Recording) -> None:
    """Every value is what it should be: a view needs no check of its own."""
    if found.notice is not None:
        assert found.notice.isprintable() and found.notice.encode()
    L = found.header.canvas_length
    for event in found.events:
        if isinstance(event, StepDone):
            for ids in (event.fed, event.draft, event.next):
                assert len(ids) == L and all(type(each) is int and each >= 0 for each in ids)
                assert all(each in found.words for each in ids)
            assert len(event.accepted) == L and {type(each) for each in event.accepted} == {bool}
            assert len(event.entropy) == L and all(type(each) is float and 0 <= each <= 22 for each in event.entropy)
            assert 0 <= event.step < event.steps
        elif isinstance(event, CanvasCommitted):
            assert len(event.tokens) == L and event.kept <= L
    assert len(found.events) == len(found.seconds) == len(found.pieces)
    repr(found).encode()  # which half a character cannot
    json.dumps(dict(found.header.settings), allow_nan=False)
    for seen in follow(zip(found.events, found.seconds, strict=True), frozenset(found.header.ends)):
        assert summary(seen)
    assert [len(steps) for steps in found.canvases] == [
        len([e for e in found.events if isinstance(e, StepDone) and e.canvas == number])
        for number in range(len(found.canvases))
    ]


def seen_of(data: bytes) -> Recording | None:
    """What is read of the bytes; None where they are no recording."""
    try:
        found = reading.read(io.BytesIO(data), "run")
    except RecordingError as error:
        check_error(error)
        return None
    check_sound(found)
    return found


def outcome(data: bytes, folder: Path) -> Recording | None:
    """As `seen_of`; written and read again it is the same, but for digits that no recorder writes."""
    found = seen_of(data)
    if found is None:
        return None
    once, twice = written(folder, found), written(folder, written(folder, found))
    assert once == twice and len(once.events) == len(found.events)
    assert once.header == found.header and once.pieces == found.pieces and once.words == found.words
    return found


def written(folder: Path, made: Recording) -> Recording:
    path = folder / "again"
    path.unlink(missing_ok=True)
    recordings.write(path, made)
    return replace(open_recording(path), notice=None)


def is_start(found: Recording, whole: Recording) -> bool:
    return found.header == whole.header and found.events == whole.events[: len(found.events)]


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


# No file, no end


class Endless(io.RawIOBase):
    """Some bytes, then the same ones for ever."""

    def __init__(self, first: bytes, then: bytes) -> None:
        self.first, self.then, self.given = first, then, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        assert size > 0
        data, self.first = (self.first, b"") if self.first else (self.then * (size // len(self.then)), b"")
        self.given += len(data)
        return data


@pytest.mark.parametrize("byte", [b"\0", b"[", b" ", b'"', b"9"])
def test_a_line_without_an_end(byte: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_of_files, "LONGEST_LINE", 2 << 20)
    file: Any = Endless(b"".join(plain().splitlines(keepends=True)[:4]), byte)
    found = reading.read(file, "run")
    assert len(found.events) == 3 and found.notice == "run: line 5: it is longer than 2 MiB; shown up to there"
    assert file.given < 3 << 20
    with pytest.raises(RecordingError, match="it is longer than 2 MiB"):
        reading.read(Endless(b"", byte), "run")  # type: ignore[arg-type]


def test_lines_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_of_files, "MOST_BYTES", 3 << 20)
    lines: list[Any] = [*parsed()]
    lines[0] = lines[0] | {"version": 2}  # which may hold lines that are not known
    file: Any = Endless(spelled(lines[:4]), b'{"event":"mood","of":"' + b"x" * 999 + b'"}\n')
    found = reading.read(file, "run")
    assert len(found.events) == 3 and "the recording is longer than 3 MiB; shown up to there" in str(found.notice)
    assert file.given < 4 << 20
    monkeypatch.setattr(reading, "MOST_LINES", 5)
    found = reading.read(Endless(spelled(lines[:4]), b'{"event":"mood"}\n'), "run")  # type: ignore[arg-type]
    assert "line 6: the recording has more than 5 lines; shown up to there" in str(found.notice)
    nothing = b"\0\0\0\xff\xff"  # an empty block: unpacked, it stays nothing for ever
    file = Endless(gzip.compress(b"")[:10], nothing)
    with pytest.raises(RecordingError, match="longer than 3 MiB"):
        reading.read(file, "run")
    assert file.given < 4 << 20


@pytest.mark.parametrize("body", ["zeros", "lines", "lists"])
def test_a_bomb_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    monkeypatch.setattr(lines_of_files, "MOST_BYTES", 3 << 20)
    monkeypatch.setattr(lines_of_files, "LONGEST_LINE", 1 << 20)
    lines: list[Any] = [*parsed()[:4]]
    lines[0] = lines[0] | {"version": 2}
    head, many = spelled(lines), 16 << 20
    line = b'{"event":"mood","of":"' + b"x" * 999 + b'"}\n'
    data = {"zeros": b"\0" * many, "lines": line * (many // 1000), "lists": b"[" + b"{}," * (many // 3)}
    path = tmp_path / "run.gz"
    path.write_bytes(gzip.compress(head + data[body]))
    assert path.stat().st_size < 1 << 20
    del data
    tracemalloc.start()
    found = open_recording(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found.events) == 3 and "is longer than" in str(found.notice)
    assert peak < 4 << 20


def test_what_a_recording_holds_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recordings.make(length=256, steps=12, vocabulary=262_144)
    path = tmp_path / "run"
    recordings.write(path, made)
    tracemalloc.start()
    found = open_recording(path)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    for most in range(0, 4 * held, held // 20):  # the least that is enough
        monkeypatch.setattr(reading, "MOST_HELD", most)
        try:
            if open_recording(path).notice is None:
                break
        except RecordingError:
            pass
    assert 0.8 * held < most < 1.3 * held
    monkeypatch.setattr(reading, "MOST_HELD", most // 2)
    found = open_recording(path)
    assert is_start(found, made) and 0 < len(found.events) < len(made.events)
    assert "the recording takes more than 0 MiB of memory; shown up to there" in str(found.notice)


def test_gigabytes_of_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for head in (b"", b"".join(plain().splitlines(keepends=True)[:4])):
        path.write_bytes(head)
        os.truncate(path, 8 << 30)
        if head:
            assert "line 5: it is longer than 16 MiB" in str(open_recording(path).notice)
        else:
            with pytest.raises(RecordingError, match="longer than 16 MiB"):
                open_recording(path)


def test_paths_that_lead_to_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    cases = {
        tmp_path: "Is a directory",
        tmp_path / "none": "No such file or directory",
        tmp_path / "a\0b": "embedded null byte",
        tmp_path / ("x" * 300): "File name too long",
        tmp_path / "loop": "Too many levels of symbolic links",
        tmp_path / "fifo": "it is empty",  # nobody writes to it
        Path(os.devnull): "it is empty",
        Path("/dev/zero"): "longer than 16 MiB",
    }
    for path, said in cases.items():
        with pytest.raises(RecordingError, match=said) as caught:
            open_recording(path)
        check_error(caught.value)


def test_a_name_is_not_obeyed(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[2J\nb\u202e\udcff"
    with pytest.raises(RecordingError) as caught:
        open_recording(path)
    check_error(caught.value)
    path.write_bytes(plain()[:-2])
    assert f"{tmp_path}/a�[2J�b��: line 11" in str(open_recording(path).notice)


def test_what_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_bytes(plain())
    path.chmod(0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        with pytest.raises(RecordingError, match="cannot be read: Permission denied"):
            open_recording(path)
    finally:
        if root:
            os.seteuid(0)


def test_a_pipe_is_waited_for(tmp_path: Path) -> None:
    there, here = os.pipe()

    def write() -> None:
        for part in (packed()[:300], packed()[300:]):
            time.sleep(0.05)
            os.write(here, part)
        os.close(here)

    thread = threading.Thread(target=write)
    thread.start()
    assert open_recording(Path(f"/dev/fd/{there}")) == small()
    thread.join()
    os.close(there)


def test_a_disk_that_fails_in_the_middle() -> None:
    class Failing(Endless):
        def read(self, size: int = -1) -> bytes:
            if not self.first:
                raise OSError(5, "Input/output error")
            return super().read(size)

    found = reading.read(Failing(b"".join(plain().splitlines(keepends=True)[:4]), b"\0"), "run")  # type: ignore[arg-type]
    assert len(found.events) == 3
    assert found.notice == "run: line 5: the file cannot be read on: Input/output error; shown up to there"
