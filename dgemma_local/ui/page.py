"""Where text goes: the answer alone to stdout, thoughts and tool calls to stderr."""

from collections.abc import Callable, Iterable
from io import StringIO
from typing import TextIO

from dgemma_local.ui.record import Piece
from dgemma_local.ui.terminal import Terminal, printable


class Sink:
    """One kind of text. Its last newlines are withheld until more follows, so that it ends in exactly one."""

    def __init__(self, write: Callable[[str], None], whole_lines: bool) -> None:
        self._write, self._whole_lines = write, whole_lines
        self._mid_line = False
        self.held = ""

    def put(self, text: str) -> None:
        text = self.held + text
        end = len(text.rstrip("\n"))
        cut = text.rfind("\n", 0, end) + 1 if self._whole_lines else end
        self.held = text[cut:]
        if cut:
            self._mid_line = not self._whole_lines  # first: Ctrl-C may come right after the text
            self._write(text[:cut])

    def end(self) -> None:
        rest, self.held = self.held.rstrip("\n"), ""
        if rest or self._mid_line:
            self._write(rest + "\n")
        self._mid_line = False


class Page:
    """A context manager over the sinks; leaving it ends the last line, whatever happened.

    out: gets the answer byte for byte; a terminal, and whoever reads it where it is to be `clean`, without control
    characters. notes: None drops what is not answer. thoughts: False folds them away. whole_lines: an unfinished line
    waits in `tail`, for a live view that needs its cursor in the first column.
    """

    def __init__(
        self,
        out: TextIO,
        notes: Terminal | None,
        *,
        whole_lines: bool = False,
        thoughts: bool = True,
        clean: bool = False,
    ) -> None:
        def answer(text: str) -> None:
            out.write(printable(text) if shown or clean else text)
            out.flush()

        def note(style: str) -> Callable[[str], None]:
            return lambda text: notes.say(text, style=style, end="") if notes is not None else None

        shown = out.isatty()
        self._sinks = {
            "answer": Sink(answer, whole_lines),
            "thought": Sink(note("dim"), whole_lines),
            "tool_call": Sink(note(""), False),
        }
        self._folded = frozenset() if thoughts else frozenset({"thought"})
        self._apart = set() if shown else {"answer"}  # does not share the terminal with the others
        self._kind = "answer"

    def __enter__(self) -> "Page":
        return self

    def __exit__(self, *_: object) -> None:
        for sink in self._sinks.values():
            sink.end()

    @property
    def tail(self) -> str:
        """The line that is not finished and not yet written."""
        return self._sinks[self._kind].held

    def write(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if piece.kind in self._folded:
                continue
            if piece.kind != self._kind and self._kind not in self._apart:
                self._sinks[self._kind].end()
            self._kind = piece.kind
            sink = self._sinks[piece.kind]
            if piece.kind == "tool_call":
                sink.put(f"tool call: {piece.text}")
                sink.end()
            else:
                sink.put(piece.text)


def unfinished(pieces: Iterable[Piece]) -> str:
    """The line that these leave unfinished, which a live view keeps for what follows."""
    with Page(StringIO(), None, whole_lines=True) as page:
        page.write(pieces)
        return page.tail
