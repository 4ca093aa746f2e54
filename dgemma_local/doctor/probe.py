"""A Python of its own in which torch is imported and tried: it may hang, crash, or take the card's context with it.

    here ── {"part": "torch"} ─► child ── {"version": "2.13.0", …} ─► here          one JSON line each way

It imports from where this process would, so that what is broken here is broken there. Starting early lets torch be
imported while other checks run.
"""

import json
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import IO, Any, Self

_CODE = "import sys; sys.path[:] = sys.argv[1:]; from dgemma_local.doctor.child import main; main()"
ENDS_WITHIN = 2.0  # seconds that a killed child may take: one that waits for a driver does not end at all


class Lost(Exception):
    """The child has ended, or does not answer: the text says how."""


class Hung(Lost):
    """It did not answer in time, and was ended."""


class Probe:
    """Asks the child, and starts one where none runs."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self._lines: SimpleQueue[str | None] = SimpleQueue()  # None: its last
        self._errors: IO[str] | None = None
        self._begun: list[str] = []  # asked, and not answered yet

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def begin(self, part: str, **given: Any) -> None:
        """Asks, and does not wait. Raises Lost where it cannot be started."""
        if self._child is None:
            self._start()
        assert self._child is not None and self._child.stdin is not None
        with suppress(OSError):  # it has ended: `ask` finds out how
            self._child.stdin.write(json.dumps({"part": part, **given}) + "\n")
            self._child.stdin.flush()
        self._begun.append(part)

    def ask(self, part: str, limit: float, **given: Any) -> dict[str, Any]:
        """The child's answer, of parts that were begun the first. Raises Lost where there is none within `limit` seconds."""
        if part not in self._begun:
            self.begin(part, **given)
        try:
            line = self._lines.get(timeout=limit)
        except Empty:
            self.stop()
            raise Hung(f"no answer within {limit:g} seconds") from None
        if line is None:
            raise Lost(self._end())
        self._begun.remove(part)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        """Ends the child, if one runs."""
        child, self._child, self._begun = self._child, None, []
        if child is None:
            return
        child.kill()
        try:
            child.wait(ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            return  # its pipes stay as they are: the reader waits for them
        for stream in (child.stdin, self._errors):
            if stream is not None:
                with suppress(OSError):  # what was written to it, and never read
                    stream.close()

    def _start(self) -> None:
        self._lines, self._errors = SimpleQueue(), tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-c", _CODE, *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                encoding="utf-8",
            )
        except OSError as error:
            raise Lost(f"Python cannot be started: {error.strerror}") from None
        threading.Thread(target=_read, args=(self._child.stdout, self._lines), daemon=True).start()

    def _end(self) -> str:
        """How the child ended."""
        assert self._child is not None and self._errors is not None
        try:
            code = self._child.wait(ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            code = 0
        self._errors.seek(0)
        last = next((line.strip() for line in reversed(self._errors.readlines()) if line.strip()), "it says nothing")
        self.stop()
        return f"Python was ended by {_signal(-code)}" if code < 0 else f"Python ended with {code}: {last}"


def _read(stream: IO[str], lines: "SimpleQueue[str | None]") -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
