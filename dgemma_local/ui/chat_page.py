"""Answers in a chat: Markdown line by line, as lines become final, and every line break where the model wrote it.

A renderer of whole documents would join lines into paragraphs, and could show a paragraph only once it has ended. Here a
line is styled by itself; only a fence goes on from one to the next. Nothing is put into code, before or behind its
lines, and a line longer than the terminal is left to it: so what is selected there is what the model wrote.
"""

import re
from collections.abc import Iterable, Iterator
from typing import TextIO

from rich.syntax import Syntax
from rich.text import Text

from dgemma_local.ui.page import Page, Sink
from dgemma_local.ui.terminal import Terminal, printable

FENCE = re.compile(r" {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)")
_HEADING = re.compile(r" {0,3}#{1,6}\s+(.*)")
_RULE = re.compile(r" {0,3}([-*_])(?:\s*\1){2,}\s*")
_BULLET = re.compile(r"(\s*)[-*+](\s+)(?=\S)")
# Emphasis touches what it emphasises and no word outside: 2 * 3 * 4 and snake_case_names are none.
_INLINE = re.compile(
    r"(?<!`)(?P<ticks>`+)(?!`)(?P<code>.+?)(?<!`)(?P=ticks)(?!`)"
    r"|\*\*(?=\S)(?P<bold>.+?)(?<=\S)\*\*"
    r"|(?<![\w*])\*(?=[^\s*])(?P<italic>.+?)(?<=[^\s*])\*(?![\w*])"
    r"|(?<!\w)__(?=\S)(?P<strong>.+?)(?<=\S)__(?!\w)"
    r"|(?<!\w)_(?=[^\s_])(?P<slanted>.+?)(?<=[^\s_])_(?!\w)"
)
_STYLES = {"code": "cyan", "bold": "bold", "italic": "italic", "strong": "bold", "slanted": "italic"}
LONGEST = 2000  # characters: each sign is looked for the end of, up to the end of the line
_THEME = "ansi_dark"  # the terminal's own colours


class Markdown:
    """Whole lines in, styled lines out; in between it remembers whether it stands in code."""

    def __init__(self) -> None:
        self._fence = ""  # the signs that opened the code at work
        self._language = ""

    def lines(self, text: str) -> Iterator[Text]:
        """One styled line for each of `text`, which is made printable here."""
        code: list[str] = []
        for line in printable(text).removesuffix("\n").split("\n"):
            if self._fence and not self._closes(line):
                code.append(line)
                continue
            yield from self._code(code)
            code = []
            yield self._line(line)
        yield from self._code(code)

    def _closes(self, line: str) -> bool:
        body = line.strip()
        return len(body) >= len(self._fence) and set(body) == {self._fence[0]}

    def _line(self, line: str) -> Text:
        if self._fence:
            self._fence = ""
            return Text(line, style="dim")
        if (opened := FENCE.match(line)) and "`" not in line[opened.end() :]:
            self._fence, self._language = opened[1], opened[2]
            return Text(line, style="dim")
        if heading := _HEADING.fullmatch(line):
            return Text(_title(heading[1]), style="bold underline")
        if _RULE.fullmatch(line):
            return Text(line, style="dim")
        if line.lstrip().startswith(">"):
            return Text(line, style="italic")
        if bullet := _BULLET.match(line):
            return Text.assemble(f"{bullet[1]}•{bullet[2]}", inline(line[bullet.end() :]))
        return inline(line)

    def _code(self, lines: list[str]) -> Iterator[Text]:
        """As many lines as there are, each exactly its text: what a highlighter would change stays as it is."""
        if not lines:
            return
        plain = "\n".join(lines)
        shaded = Syntax("", self._language or "text", theme=_THEME).highlight(plain)
        shaded.rstrip()
        found = [*shaded.split("\n", allow_blank=True)]
        for i, line in enumerate(lines):
            yield found[i] if i < len(found) and found[i].plain == line else Text(line)


def _title(body: str) -> str:
    """Without the signs that may close a heading."""
    body = body.rstrip()
    bare = body.rstrip("#")
    return bare.rstrip() if bare != bare.rstrip() else body


def inline(line: str) -> Text:
    """Emphasis and code within a line; one that is too long to look for their ends has none."""
    if len(line) > LONGEST:
        return Text(line)
    found, at = Text(), 0
    for match in _INLINE.finditer(line):
        found.append(line[at : match.start()])
        kind = match.lastgroup or "code"
        found.append(match[kind], style=_STYLES[kind])
        at = match.end()
    return found.append(line[at:])


class ChatPage(Page):
    """A page of whole lines whose answers are styled on a terminal; anywhere else they are the model's, byte for byte."""

    def __init__(self, out: TextIO, notes: Terminal, *, thoughts: bool) -> None:
        super().__init__(out, notes, whole_lines=True, thoughts=thoughts)
        if out.isatty():
            screen, markdown = Terminal(out), Markdown()
            self._sinks["answer"] = Sink(lambda text: print_lines(screen, markdown.lines(text)), True)


def print_lines(screen: Terminal, lines: Iterable[Text]) -> None:
    """Each as one line, however long; raises OSError where the terminal has gone."""
    for line in lines:
        screen.print(line, soft_wrap=True)
