"""The lines of a file that may be packed, damaged, endless, or no file at all; what comes before the damage comes out."""

import json
import os
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from dgemma_local.recording.form import GZIP, GZIP_MAGIC, NONBLOCK

LONGEST_LINE = 16 << 20  # bytes; a step of 256 positions takes 7 KB, a prompt of 262,144 tokens 4 to 8 MB
# In all, packed or unpacked: 1,024 canvases of 48 steps, a context of 262,144 tokens, take 360 MB.
MOST_BYTES = 512 << 20
_READ = 1 << 18  # bytes at a time


class Damaged(Exception):
    """A line that is not what it should be; the text says how."""


def opened(path: Path) -> BinaryIO:
    """The file, for reading; a pipe that nobody writes to is empty, and not waited for. Raises OSError, ValueError."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | NONBLOCK))  # noqa: SIM115 - Path.open takes no opener
    if NONBLOCK:
        os.set_blocking(file.fileno(), True)
    return file


def lines(file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """Each line, and whether its end was found: the last may have none. Raises Damaged."""
    line = bytearray()
    for part in _unpacked(_capped(_chunks(file))):
        *whole, rest = part.split(b"\n")
        for each in whole:
            yield bytes(line + each), True
            line.clear()
        line += rest
        if len(line) > LONGEST_LINE:
            raise Damaged(f"it is longer than {LONGEST_LINE >> 20} MiB")
    if line:
        yield bytes(line), False


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    try:
        while data := file.read(_READ):
            yield data
    except OSError as error:
        raise Damaged(f"the file cannot be read on: {error.strerror or error}") from None


def _capped(parts: Iterable[bytes]) -> Iterator[bytes]:
    left = MOST_BYTES
    for part in parts:
        left -= len(part)
        if left < 0:
            raise Damaged(f"the recording is longer than {MOST_BYTES >> 20} MiB")
        yield part


def _unpacked(chunks: Iterator[bytes]) -> Iterator[bytes]:
    first = next(chunks, b"")
    chunks = chain((first,), chunks)
    return _capped(_unzipped(chunks)) if first.startswith(GZIP_MAGIC) else chunks


def _unzipped(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """One gzip member, at most _READ bytes at a time. Its end may be missing: a run that was killed writes none."""
    unzip = zlib.decompressobj(GZIP)
    for data in chunks:
        while data:
            before = unzip.copy()
            try:
                part = unzip.decompress(data, _READ)
            except zlib.error:
                yield _up_to_damage(before, data)
                raise Damaged("the compressed data are damaged") from None
            yield part
            data = unzip.unconsumed_tail
            if unzip.eof and (unzip.unused_data or next(chunks, b"")):
                raise Damaged("something follows the end of the compressed data")


def _up_to_damage(unzip: "zlib._Decompress", data: bytes) -> bytes:
    """What can be unpacked of `data`, which a call for all of it at once would not give."""
    found = bytearray()
    try:
        for i in range(len(data)):
            found += unzip.decompress(data[i : i + 1])
    except zlib.error:
        pass
    return bytes(found)


def parsed(line: bytes, *, whole: bool) -> dict[str, Any]:
    """A line's object. Raises Damaged."""
    try:
        values = json.loads(line.decode("utf-8-sig"), parse_constant=_refused, object_pairs_hook=_once)
    except UnicodeDecodeError:
        raise Damaged("it is not text in UTF-8") from None
    except (ValueError, RecursionError):
        raise Damaged("it is not JSON" if whole else "it is cut in the middle") from None
    if not isinstance(values, dict):
        raise Damaged("it is not an object")
    return values


def _refused(name: str) -> None:
    raise ValueError(name)  # NaN and Infinity are not JSON


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object, unless a name stands in it twice: readers would disagree on which one counts."""
    values = dict(pairs)
    if len(values) != len(pairs):
        raise Damaged("it has a name twice")
    return values
