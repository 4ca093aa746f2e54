"""`dgemma replay` on a pseudo-terminal, for tests that press its keys."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyte

ROOT = Path(__file__).parents[1]


class Theatre:
    """`dgemma replay` on a pseudo-terminal, seen through a terminal emulator."""

    def __init__(
        self,
        *arguments: object,
        size: tuple[int, int] = (24, 100),
        stdin: Path | None = None,
        before: str = "",
        shell: bool = False,
        **environment: str,
    ) -> None:
        self.master, slave = pty.openpty()
        self.resize(*size, stands=False)
        self.mode = termios.tcgetattr(slave)
        kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLORTERM", "COLUMNS", "LINES")}
        source = slave if stdin is None else os.open(stdin, os.O_RDONLY)
        self.process = subprocess.Popen(
            [
                *([sys.executable, str(ROOT / "tests" / "jobs.py")] if shell else []),
                sys.executable,
                "-c",
                f"{before}\nfrom dgemma_local.__main__ import main; main()",
                "replay",
                *map(str, arguments),
            ],
            stdin=source,
            stdout=slave,
            stderr=slave,
            env=kept | {"TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONPATH": str(ROOT)} | environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(1, termios.TIOCSCTTY, 0),
        )
        if source != slave:
            os.close(source)
        self.slave = slave
        self.screen = pyte.Screen(size[1], size[0])
        self.stream = pyte.ByteStream(self.screen)
        self.raw = b""

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display if line.strip()]

    def resize(self, lines: int, columns: int, *, stands: bool = True) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        if stands:
            self.screen.resize(lines, columns)

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def read(self, seconds: float) -> bool:
        """Whether something came."""
        if not select.select([self.master], [], [], seconds)[0]:
            return False
        data = os.read(self.master, 65536)
        self.raw += data
        self.stream.feed(data)
        return bool(data)

    def until(self, text: str) -> list[str]:
        """The screen, once it shows `text`, a pattern."""
        deadline = time.monotonic() + 20
        while not any(re.search(text, line) for line in self.lines):
            self.read(0.05)
            assert time.monotonic() < deadline, f"no {text}:\n" + "\n".join(self.lines)
        return self.lines

    def left(self) -> int:
        """The exit code, once all is read."""
        deadline = time.monotonic() + 20
        while self.process.poll() is None:
            self.read(0.05)
            assert time.monotonic() < deadline, "\n".join(self.lines)
        while self.read(0.05):
            pass
        return self.process.returncode


@contextmanager
def theatre(*arguments: object, **rest: Any) -> Iterator[Theatre]:
    found = Theatre(*arguments, **rest)
    try:
        yield found
        # whatever happened, the terminal is as it was
        assert termios.tcgetattr(found.slave) == found.mode
        assert not found.screen.cursor.hidden
    finally:
        found.process.kill()
        found.process.wait()
        os.close(found.master)
        os.close(found.slave)
