"""Committed ids to thought, answer and tool calls: the one decoder behind every front end.

    <|channel>thought\\n … <channel|> answer <|tool_call>call:NAME{…}<tool_call|>

Markers are read as ids, before any text exists: decoding first and stripping specials after removes the markers, and
leaves the channel's name, `thought`, in the answer. Only committed canvases go through here; a draft's markers need not
balance.

Every channel is a thought, whatever its name, since chat templates cut every channel from history. Only the name
`thought` is dropped; another name or none at all stays at the head of the thought, so that nothing is lost.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dgemma_local.tokens import SpecialIds, StreamDecoder, Tokenizer

Kind = Literal["thought", "answer", "tool_call"]

_NAME = "thought"
_LABEL = f"{_NAME}\n"


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text, never empty. A thought or an answer may come in many pieces, a tool call comes whole."""

    kind: Kind
    text: str


def opens_channel(prompt: Sequence[int], special: SpecialIds) -> bool:
    """Whether the prompt ends inside a channel: templates may open one after a tool's result, for the model to go on in.

    A channel left open in an earlier turn, or spelled out in a tool's result, does not count.
    """
    closers = {special.channel_close, special.turn_open, special.turn_close, special.tool_close, special.response_close}
    last = next((token for token in reversed(prompt) if token == special.channel_open or token in closers), None)
    return last == special.channel_open


class AnswerDecoder:
    """State machine over the ids of one answer; how they are split over `feed` changes neither text nor order.

    Control tokens are in no text, but for <|"|> in tool calls, which quotes their strings. A tool call is the raw text
    between its markers; one that is never closed becomes text of whatever it stands in, the answer or a thought.
    Stray closers are ignored. Text is exact: nothing is stripped but the label.

    open_channel: the prompt opened one (`opens_channel`). The label is then the prompt's, and dropped if it is repeated.
    """

    def __init__(self, tokenizer: Tokenizer, *, open_channel: bool = False) -> None:
        self._tokenizer = tokenizer
        self._stream = StreamDecoder(tokenizer)
        self._in_channel = open_channel
        self._label: str | None = "" if open_channel else None  # held while it may become "thought\n"; None: past it
        self._call: list[int] | None = None  # since <|tool_call>; None: in no call
        self._pieces: list[Piece] = []
        self.thought_tokens = 0  # ids so far that were of thoughts, their markers included
        self.answer_tokens = 0  # all others, control tokens included

    @property
    def in_thought(self) -> bool:
        """Whether a channel is open: the answer has yet to come."""
        return self._in_channel

    @property
    def in_call(self) -> bool:
        """Whether a tool call is open."""
        return self._call is not None

    def feed(self, ids: Sequence[int]) -> list[Piece]:
        """The pieces that `ids` complete."""
        for token in ids:
            before = self._in_channel
            self._take(token)
            inside = before or self._in_channel
            self.thought_tokens += inside
            self.answer_tokens += not inside
        return self._drain()

    def close(self) -> list[Piece]:
        """The pieces still held when generation ends."""
        self._settle()
        return self._drain()

    def _take(self, token: int) -> None:
        special = self._tokenizer.special
        if token == special.channel_open:
            self._settle()
            self._in_channel, self._label = True, ""
        elif token == special.channel_close and self._in_channel:
            self._settle()
            self._in_channel = False
        elif token == special.call_open:
            self._settle()
            self._call = []
        elif token == special.call_close:
            self._emit("tool_call", self._tokenizer.decode(self._call or ()))
            self._call = None
        elif self._call is not None:
            if token == special.quote or not self._tokenizer.is_control(token):
                self._call.append(token)
        elif not self._tokenizer.is_control(token):
            self._say(self._stream.feed((token,)))

    def _settle(self) -> None:
        """Lets go of everything held: half a character, what might have been a label, a call without an end."""
        self._say(self._stream.close())
        held, self._label = self._label, None
        if held and held != _NAME:
            self._say(held)
        unclosed, self._call = self._call, None
        if unclosed:
            self._say(self._tokenizer.decode(unclosed))

    def _say(self, text: str) -> None:
        if self._label is not None:
            text = self._label + text
            if text != _LABEL and _LABEL.startswith(text):
                self._label = text
                return
            self._label = None
            text = text.removeprefix(_LABEL)
        self._emit("thought" if self._in_channel else "answer", text)

    def _emit(self, kind: Kind, text: str) -> None:
        if not text:
            return
        if kind != "tool_call" and self._pieces and self._pieces[-1].kind == kind:
            text = self._pieces.pop().text + text
        self._pieces.append(Piece(kind, text))

    def _drain(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces


def is_blank(decoder: AnswerDecoder, answer: Sequence[int]) -> bool:
    """Whether a whole answer has nothing to read: no text but blank space, of whatever kind."""
    return not any(piece.text.strip() for piece in [*decoder.feed(answer), *decoder.close()])


class StopSearch:
    """Where one of some strings first stands in an answer; asked with all of its tokens, canvas by canvas.

    Only what a reader of the answer sees is searched: thoughts, names of channels, tool calls and markers neither hold a
    stop string nor are reached over by one. What was read at the canvas before is not read again.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str], *, open_channel: bool = False) -> None:
        """strings: empty ones never stop. open_channel: of the prompt, as for `AnswerDecoder`."""
        self._tokenizer, self._open_channel = tokenizer, open_channel
        self._strings = [string for string in strings if string]
        self.rest = ""  # text between the whole tokens that stand before the string found and that string
        self._begin()

    def _begin(self) -> None:
        self._decoder = AnswerDecoder(self._tokenizer, open_channel=self._open_channel)
        self._read: list[int] = []
        self._start = 0  # of the run of text at the end

    def __call__(self, tokens: Sequence[int]) -> int | None:
        """How many tokens stand before the first stop string, whole ones; None: there is none.

        What else stands before it, in the token it begins in, is `rest`.
        """
        if not self._strings:
            return None
        if self._read != [*tokens[: len(self._read)]]:  # the first canvas began anew
            self._begin()
        found = (self._find(tokens, start, end) for start, end in self._runs(tokens))
        return next((at for at in found if at is not None), None)

    def _runs(self, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Where text of the answer stands uninterrupted, from the run on that was the last one before."""
        for i, token in enumerate(tokens[len(self._read) :], len(self._read)):
            self._read.append(token)
            self._decoder.feed((token,))
            if self._decoder.in_thought or self._decoder.in_call or self._tokenizer.is_control(token):
                start, self._start = self._start, i + 1
                if start < i:
                    yield start, i
        yield self._start, len(tokens)

    def _find(self, tokens: Sequence[int], start: int, end: int) -> int | None:
        text = self._tokenizer.decode(tokens[start:end])
        first = min((at for at in map(text.find, self._strings) if at >= 0), default=None)
        if first is None:
            return None
        while end > start and len(self._tokenizer.decode(tokens[start:end])) > first:
            end -= 1
        self.rest = text[len(self._tokenizer.decode(tokens[start:end])) : first]
        return end
