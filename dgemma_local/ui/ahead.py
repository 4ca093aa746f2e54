"""What is typed or pasted while a chat answers waits for its next prompt, whole.

A terminal that gathers lines cuts one at 4,095 bytes, and takes Ctrl-D for itself; one that gathers nothing holds up what
comes behind as much, Ctrl-C, too. So it does not gather, and what comes is read: the prompt begins with that.
"""

import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dgemma_local.interrupts import Flag
from dgemma_local.ui.keys import paste_marks
from dgemma_local.ui.pause import foreground, modes, pausable

if TYPE_CHECKING:
    from prompt_toolkit.input.base import Input

AGAIN = 0.05  # seconds until it is looked again whether the terminal is ours
_PASTED = "\x1b[201~"  # what a terminal sends behind a paste
SOON = 0.001  # the same when there was no whole key: amid a paste, or when the terminal has gone


@contextmanager
def typed_ahead(source: "Input") -> Iterator[None]:
    """Meanwhile what comes from `source` is not echoed, and kept for the next prompt that reads from it."""
    if sys.platform == "win32" or not os.isatty(source.fileno()):
        yield
        return
    import termios

    flags = termios.ECHO | termios.ICANON
    with modes(source.fileno(), flags, *paste_marks(), untouched=True), _read(source):
        yield


@contextmanager
def _read(source: "Input") -> Iterator[None]:
    from prompt_toolkit.input.typeahead import store_typeahead

    terminal, paused, again = source.fileno(), Flag(), Flag()

    def resume() -> None:
        if paused.is_set():  # every frame asks
            again.set()
            paused.clear()

    ended, end = os.pipe()

    def read() -> None:
        while not source.closed and ended not in (ready := select.select([terminal, ended], [], [])[0]):
            if paused.is_set() or not foreground(terminal):  # what is typed is for another
                select.select([ended], [], [], AGAIN)
            elif again.is_set():
                again.clear()
                _end_paste(source)
            elif terminal in ready and (keys := source.read_keys()):
                store_typeahead(source, keys)
            else:
                select.select([ended], [], [], SOON)

    thread = threading.Thread(target=read, daemon=True)
    try:
        with pausable(paused.set, resume):
            thread.start()
            yield
    finally:
        os.close(end)  # which makes the other end readable
        if thread.is_alive():  # Ctrl-C may have come before it began
            thread.join()
        os.close(ended)
        if again.is_set():
            _end_paste(source)


def _end_paste(source: "Input") -> None:
    """Of one that was broken off while the terminal was another's, the rest went there, and its end mark with it."""
    parser: Any = getattr(source, "vt100_parser", None)
    if getattr(parser, "_in_bracketed_paste", False):
        parser.feed(_PASTED)
