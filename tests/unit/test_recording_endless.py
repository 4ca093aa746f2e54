"""What is no file of a recording's size: endless lines, compressed bombs, pipes, folders, disks that fail."""

import gzip
import io
import os
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import recordings
from damaged import check_error, is_start, packed, parsed, plain, small, spelled

from dgemma_local.errors import RecordingError
from dgemma_local.recording import lines as lines_of_files
from dgemma_local.recording import open_recording
from dgemma_local.recording import read as reading


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
