"""A canvas as rows of text: pure; terminals, pictures and bitmaps share it.

Rows follow the model's best guess: a random token is fitted into the cells that the guess at its position takes, so that
noise does not shake what is settled around it.

A row holds what every terminal draws in the same number of cells, and nothing that it obeys:

    line breaks       break the row where their token is settled; ↵ in noise
    tabs              four spaces
    combining marks   in the cell of the sign before them; on a dotted circle where there is none
    joined emoji      as their parts, flags as their two letters: terminals differ in what they join
    right-to-left     in reading order, one sign after the other. Terminals that reorder do so within a row, and no
                      row holds a control for it. In noise only where the guess reads that way too: a single such letter
                      would move the settled digits beside it
    the rest          ◦ for what is invisible, private, or moves text; · for control tokens, ■ for end tokens
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from functools import lru_cache

from rich.cells import cell_len

from dgemma_local.states import Draft, Seen, State, shown
from dgemma_local.ui.palette import Ink, inked

CONTROL = "·"
NEWLINE = "↵"
END = "■"
HIDDEN = "◦"
CARRIER = "◌"  # Unicode's own for a mark that has nothing to stand on
MOST_DRAWN = 256  # characters of one token; a file may hold some of a megabyte
MOST_MARKS = 4  # in one cell; more are no language, and reach into the rows around

_TAB = "    "
_FIRST_FLAG, _LAST_FLAG = "\U0001f1e6", "\U0001f1ff"  # regional indicators, A to Z
_SKINS = range(0x1F3FB, 0x1F400)  # modifiers: some terminals paint the sign before, some draw a square of two cells
# Printable by category and yet invisible: joiner, Hangul fillers, Khmer vowels, blank Braille.
_INVISIBLE = frozenset("\u034f\u115f\u1160\u3164\uffa0\u17b4\u17b5\u2800")
# Choose how the sign before looks, and with that its width.
_SELECTORS = frozenset(map(chr, [*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0), *range(0x180B, 0x1810)]))

# The blocks of right-to-left scripts (Unicode's DerivedBidiClass, R and AL).
_LEFTWARD = re.compile("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff\U00010800-\U00010fff\U0001e800-\U0001efff]")

Sign = tuple[str, int]  # what is drawn as one, and its cells
Run = tuple[str, Ink]
Row = list[Run]

_BREAKS = frozenset({State.FROZEN, State.FRESH, State.REPLACED, State.GUESSED, State.PINNED, State.TEXT})


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How tokens look."""

    text: Callable[[int], str]  # what a token reads as; its name, for a control token
    control: Callable[[int], bool]  # it steers instead of being read
    ends: Set[int]  # tokens that end an answer
    _known: dict[int, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    def glyph(self, token: int) -> str:
        """What is drawn: control tokens are a small mark, not their names."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._glyph(token)
        return known

    def _glyph(self, token: int) -> str:
        if token in self.ends:
            return END
        return CONTROL if self.control(token) else shortened(self.text(token))


def shortened(text: str) -> str:
    """A token's text, or as much of it as is drawn."""
    return text if len(text) <= MOST_DRAWN else text[:MOST_DRAWN] + "…"


def runs(seen: Seen, vocabulary: Vocabulary, draft: Draft) -> list[Run]:
    """The canvas at work: text and ink of every position."""
    step = seen.step
    if step is None:
        return []
    glyph = vocabulary.glyph
    found = []
    for state, entropy, accepted, token, guess in zip(
        seen.states, step.entropy, step.accepted, shown(step, draft), step.draft, strict=True
    ):
        text = glyph(token)
        if not (accepted or step.done):
            text = fitted(text, glyph(guess))
        found.append((text, inked(state, entropy)))
    return found


@lru_cache(maxsize=1 << 15)
def fitted(text: str, guess: str) -> str:
    """`text` in as many cells as `guess` takes, at least one: cut, or padded with spaces."""
    if text and guess and _plain(text) and _plain(guess):
        return text[: len(guess)].ljust(len(guess))
    room = max(1, _cells(guess))
    if leftward(text) and not leftward(guess):
        text = _LEFTWARD.sub(HIDDEN, text)
    drawn, cells = _drawn(text)
    if drawn and cells <= room:
        return drawn + " " * (room - cells)
    found, used = "", 0
    for sign, cells in signs(text) or ((HIDDEN, 1),):
        if sign == "\n":
            sign = NEWLINE
        elif cells == 0:
            sign, cells = CARRIER + sign, 1
        if used + cells > room:
            break
        found += sign
        used += cells
    if not found:  # the first sign is too wide
        found, used = HIDDEN, 1
    return found + " " * (room - used)


def _cells(text: str) -> int:
    drawn, cells = _drawn(text)
    return cells if drawn else sum(cells for _, cells in signs(text))


def leftward(text: str) -> bool:
    """Whether a terminal that knows how would reorder it."""
    return not text.isascii() and _LEFTWARD.search(text) is not None


def _plain(text: str) -> bool:
    """Every character is one sign of one cell."""
    return text.isascii() and text.isprintable()


def rows(tokens: Iterable[Run], width: int) -> list[Row]:
    """Text and ink, in order -> rows of at most `width` cells, neighbours of one ink joined; at least one row.

    Indentation stays, and rows break between characters, so that a column of a grid stays a column.
    """
    paper = _Paper(width)
    for text, ink in tokens:
        paper.take(ink)
        drawn, cells = _drawn(text)
        if drawn and paper.has_room(cells):
            paper.write(drawn, cells)
        else:
            if ink.kind is State.PINNED:
                text = text.replace("\n", f"{NEWLINE}\n")  # a break alone would show nothing of it
            _write(paper, text, width, ink.kind in _BREAKS)
    paper.settle()
    return paper.rows


def _write(paper: "_Paper", text: str, width: int, breaks: bool) -> None:
    for sign, cells in signs(text):
        if sign == "\n" and breaks:
            paper.feed()
        elif sign == "\n":
            paper.write(NEWLINE, 1)
        elif cells == 0:
            paper.join(sign, breaks)
        elif cells > width:
            paper.write(HIDDEN, 1)
        else:
            paper.write(sign, cells)


@lru_cache(maxsize=1 << 16)
def _drawn(text: str) -> Sign:
    """All of it as one, where it neither breaks the row nor begins with a mark; "" where it does."""
    if _plain(text):
        return text, len(text)
    found = [_sign(character) for character in text.replace("\t", _TAB)]
    if "\n" in text or not all(cells for _, cells in found):
        found = list(signs(text))
        if not all(cells and sign != "\n" for sign, cells in found):
            return "", 0
    return "".join([sign for sign, _ in found]), sum([cells for _, cells in found])


class _Paper:
    """Rows being written: the cursor, and the run that is not in them yet."""

    def __init__(self, width: int) -> None:
        self.rows: list[Row] = [[]]
        self._width, self._column = width, 0
        self._text, self._ink = "", inked(State.TEXT)
        self._joined = MOST_MARKS  # marks in the last cell: nothing stands there yet

    def take(self, ink: Ink) -> None:
        if ink.kind is not self._ink.kind or ink.shade != self._ink.shade:
            self.settle()
            self._ink = ink

    def settle(self) -> None:
        if not self._text:
            return
        row = self.rows[-1]
        if row and row[-1][1] == self._ink:  # what stood between them had nothing to draw, or joined the one before
            self._text = row.pop()[0] + self._text
        row.append((self._text, self._ink))
        self._text = ""

    def feed(self) -> None:
        self.settle()
        self.rows.append([])
        self._column, self._joined = 0, MOST_MARKS

    def write(self, sign: str, cells: int) -> None:
        if not self.has_room(cells):
            self.feed()
        self._text += sign
        self._column += cells
        self._joined = 0

    def has_room(self, cells: int) -> bool:
        return self._column + cells <= self._width

    def join(self, mark: str, settled: bool) -> None:
        """Marks that begin a token belong to the sign before it; in noise they stand alone."""
        if not settled or self._joined + len(mark) > MOST_MARKS:
            self.write(CARRIER + mark, 1)
        elif self._text:
            self._text += mark
        else:
            text, ink = self.rows[-1][-1]
            self.rows[-1][-1] = (text + mark, ink)
        self._joined += len(mark)


@lru_cache(maxsize=1 << 16)
def signs(text: str) -> tuple[Sign, ...]:
    """What can be drawn of a text, and its cells: characters with their combining marks.

    "\\n" counts as one cell. Only the first sign, or one behind "\\n", may have none: marks with nothing before them.
    """
    if _plain(text):
        return tuple((character, 1) for character in text)
    found: list[Sign] = []
    for each in map(_sign, text.replace("\r\n", "\n").replace("\t", _TAB)):
        if each[1]:
            found.append(each)
        else:
            _join(found, each[0])
    return tuple(found)


def _join(found: list[Sign], mark: str) -> None:
    """To the last sign; "" changes nothing there."""
    sign, cells = found[-1] if found else ("\n", 1)
    if sign == "\n":
        found.append((mark, 0) if mark else (HIDDEN, 1))
    elif mark and len(sign) > MOST_MARKS - (cells == 0):
        found.append((HIDDEN, 1))
    else:
        found[-1] = (sign + mark, cells)


@lru_cache(maxsize=1 << 16)
def _sign(character: str) -> Sign:
    """Cells 0: it belongs to the sign before; "" changes nothing there but the width."""
    if character == "\n":
        return "\n", 1
    if character in _SELECTORS:
        return "", 0
    if unicodedata.category(character) == "Zs":
        cells = max(1, cell_len(character))
        return " " * cells, cells
    if not character.isprintable() or character in _INVISIBLE or ord(character) in _SKINS:
        return HIDDEN, 1
    if _FIRST_FLAG <= character <= _LAST_FLAG:
        return chr(ord("A") + ord(character) - ord(_FIRST_FLAG)), 1
    return character, cell_len(character)
