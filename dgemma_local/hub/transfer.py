"""Bytes from the hub into files, by spans, so that nothing that arrived is asked for twice.

    one file    |span 0      |span 1      |span 2      |span 3  |      each span is one HTTP range request
                |############|#####       |            |########|      8 at a time, over all files
    its note     span, size, bytes that have arrived of each span      plain numbers, rewritten where they stand

The file has its full length from the start and no blocks where nothing arrived. A connection that breaks is taken up
again where it broke, and so is a run. A server that ends a span early, or sends none, is asked again a few times.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dgemma_local.errors import FetchError
from dgemma_local.hub.cache import PARTIAL
from dgemma_local.hub.failures import KEPT, http, server

SPAN = 64 << 20  # bytes of one request: at 5 MB/s a connection, 13 s
CONNECTIONS = 8  # as huggingface_hub's snapshot_download
WAITS = (1.0, 2.0, 4.0, 8.0, 15.0)  # seconds before one more attempt; an attempt that brings bytes starts anew
NOTE_EVERY = 1.0  # seconds; a killed run asks again for at most so much

_WORTH_ANOTHER = (408, 429, 500, 502, 503, 504)
_LONGEST_WAIT = 60.0  # seconds, whatever Retry-After says


class Watch:
    """Is told how a fetch goes, from several threads. This one keeps it to itself."""

    def start(self, task: str, total: int, done: int) -> None:
        """`task` begins: `total` bytes, `done` of them from an earlier run."""

    def advance(self, count: int) -> None:
        """`count` bytes more of the task."""

    def say(self, text: str) -> None:
        """One line for the reader."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A file to bring: where from, how long, and its blob's path, beside which it grows."""

    name: str
    url: str
    size: int
    blob: Path

    @property
    def path(self) -> Path:
        return self.blob.with_name(self.blob.name + PARTIAL)


@dataclass(slots=True)
class Partial:
    """A file on its way, and what has arrived of each span."""

    piece: Piece
    span: int
    done: list[int]
    saved: list[int] = field(default_factory=list)

    @classmethod
    def open(cls, piece: Piece) -> "Partial":
        """Continues what lies there. A note that does not fit its file is worth nothing: the file starts anew."""
        piece.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            span, size, *done = map(int, _note(piece).read_text(encoding="ascii").split())
            fits = size == piece.size == piece.path.stat().st_size and span > 0
            if fits and len(done) == -(-size // span) and all(0 <= n <= span for n in done):
                return cls(piece, span, done, saved=list(done))
        except (OSError, ValueError):
            pass
        with piece.path.open("wb") as file, _named(piece):
            file.truncate(piece.size)
        started = cls(piece, SPAN, [0] * -(-piece.size // SPAN))
        started.save()
        return started

    @property
    def missing(self) -> int:
        return self.piece.size - sum(self.done)

    def end(self, index: int) -> int:
        """Where span `index` ends in the file."""
        return min((index + 1) * self.span, self.piece.size)

    def at(self, index: int) -> int:
        """The first byte of span `index` that has not arrived."""
        return index * self.span + self.done[index]

    def save(self) -> None:
        """The bytes first, then the note that says they are there.

        A note is as long at the start as at the end: overwritten where it stands, it can be kept on a full disk, too.
        """
        done = list(self.done)
        if done == self.saved:
            return
        if any(done):
            with self.piece.path.open("r+b") as file:
                os.fsync(file.fileno())  # a file that was verified must not lose bytes to a power cut, either
        numbers = (self.span, self.piece.size, *done)
        with _note(self.piece).open("r+" if self.saved else "w", encoding="ascii") as file:
            file.write("".join(f"{number:>15}\n" for number in numbers))
        self.saved = done

    def finish(self) -> None:
        """The whole file becomes its blob."""
        self.piece.path.replace(self.piece.blob)
        _note(self.piece).unlink(missing_ok=True)

    def drop(self) -> None:
        """Removes the file and its note."""
        self.piece.path.unlink(missing_ok=True)
        _note(self.piece).unlink(missing_ok=True)


def bring(partials: Sequence[Partial], headers: Mapping[str, str], watch: Watch) -> None:
    """Fetches all that is missing. Ctrl-C and errors leave what arrived, noted.

    Raises FetchError, and what the HTTP library and the disk raise (`failures.told` tells them).
    """
    download = _Download(partials, headers, watch)
    threads = [threading.Thread(target=download.work, daemon=True) for _ in range(CONNECTIONS)]
    try:
        for thread in threads:
            thread.start()
        while alive := [thread for thread in threads if thread.is_alive()]:
            alive[0].join(NOTE_EVERY)
            download.save()
        if download.error is None:
            download.save()
    finally:
        download.stop.set()
        with suppress(OSError):  # the note of a moment ago stands
            download.save()
    if download.error is not None:
        raise download.error


def first_bytes(url: str, count: int, headers: Mapping[str, str]) -> bytes:
    """The first `count` bytes of a file, or fewer where it is shorter."""
    data = bytearray()
    with _get(url, 0, count, headers) as response:
        for chunk in response.iter_bytes():
            data += chunk
            if len(data) >= count:  # a server without ranges sends the whole file: hang up
                break
    return bytes(data[:count])


class _Download:
    """The spans still to come, and the threads' common state."""

    def __init__(self, partials: Sequence[Partial], headers: Mapping[str, str], watch: Watch) -> None:
        self.partials, self.headers, self.watch = partials, headers, watch
        self.stop = threading.Event()
        self.error: BaseException | None = None
        open_spans = ((p, index) for p in partials for index in range(len(p.done)) if p.at(index) < p.end(index))
        self.spans = deque(open_spans)
        self.library = http()
        self.said = 0.0

    def save(self) -> None:
        for partial in self.partials:
            partial.save()

    def work(self) -> None:
        """One thread: span after span, until none is left or one failed."""
        while not self.stop.is_set():
            try:
                partial, index = self.spans.popleft()
            except IndexError:
                return  # none left
            try:
                self.bring_span(partial, index)
            except BaseException as error:
                self.error = self.error or error
                self.stop.set()

    def bring_span(self, partial: Partial, index: int) -> None:
        tries = 0
        while partial.at(index) < partial.end(index) and not self.stop.is_set():
            before = partial.done[index]
            try:
                self.read(partial, index)
                reason: Exception = FetchError(f"{server()} ends {partial.piece.name} too early", KEPT)
            except Exception as error:
                if not self.worth_another(error):
                    raise
                reason = error
            if partial.done[index] > before:
                tries = 0
            if partial.at(index) < partial.end(index) and not self.stop.is_set():
                if tries == len(WAITS):
                    raise reason
                self.wait(WAITS[tries], reason)
                tries += 1

    def read(self, partial: Partial, index: int) -> None:
        """One request: what comes of a span, each chunk written before it is counted."""
        at, end = partial.at(index), partial.end(index)
        with _get(partial.piece.url, at, end, self.headers) as response, partial.piece.path.open("r+b", 0) as file:
            _check_range(response, partial.piece, at, end)
            file.seek(at)
            for chunk in response.iter_bytes():
                left = memoryview(chunk)[: end - partial.at(index)]
                while left and not self.stop.is_set():
                    with _named(partial.piece):
                        count = file.write(left)
                    partial.done[index] += count
                    self.watch.advance(count)
                    left = left[count:]
                if self.stop.is_set() or partial.at(index) == end:
                    return

    def worth_another(self, error: Exception) -> bool:
        response = getattr(error, "response", None)
        if response is not None:
            return response.status_code in _WORTH_ANOTHER
        kinds = (self.library.TimeoutException, self.library.NetworkError, self.library.RemoteProtocolError)
        return isinstance(error, kinds)

    def wait(self, seconds: float, reason: Exception) -> None:
        asked = getattr(getattr(reason, "response", None), "headers", {}).get("Retry-After", "")
        seconds = min(max(seconds, float(asked)), _LONGEST_WAIT) if asked.isdigit() else seconds
        now = time.monotonic()
        if now - self.said > 2 * seconds:  # one line for all connections
            self.said = now
            self.watch.say("the connection broke; asking again for what is missing")
        self.stop.wait(seconds)


@contextmanager
def _get(url: str, begin: int, end: int, headers: Mapping[str, str]) -> Iterator[Any]:
    """A GET of bytes begin .. end - 1, redirects followed, refused answers raised."""
    from huggingface_hub import constants, get_session, hf_raise_for_status

    # a compressed body has other offsets than the file
    asked = {**headers, "Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
    session, patience = get_session(), constants.HF_HUB_DOWNLOAD_TIMEOUT
    with session.stream("GET", url, headers=asked, timeout=patience, follow_redirects=True) as response:
        hf_raise_for_status(response)
        yield response


def _check_range(response: Any, piece: Piece, begin: int, end: int) -> None:
    """The answer is the range that was asked for, of a file as long as the listing says."""
    got = response.headers.get("Content-Range", "").removeprefix("bytes ")
    if response.status_code == 206 and got:
        if got.split("-")[0] != f"{begin}" or got.rpartition("/")[2] not in (f"{piece.size}", "*"):
            raise FetchError(
                f"{server()} answers bytes {got} of {piece.name}, not {begin}-{end - 1} of {piece.size}",
                "the repository may have changed a moment ago: run the command again",
            )
    elif begin > 0:
        raise FetchError(
            f"{server()} sends all of {piece.name} where a part was asked for",
            "set HF_ENDPOINT to a server that answers range requests, or leave out the proxy between",
        )


@contextmanager
def _named(piece: Piece) -> Iterator[None]:
    """A failure to write is told with the file's name, which the system leaves out for a file that is open."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or f"{piece.name} in {piece.path.parent}"
        raise


def _note(piece: Piece) -> Path:
    return piece.path.with_name(piece.path.name + ".txt")
