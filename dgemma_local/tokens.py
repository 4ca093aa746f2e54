"""Text to token ids and back: tokenizer.json, the checkpoint's own chat template, streaming decode.

    messages ── template ─► text ── tokenizer.json ─► ids ─► engine ─► ids ── StreamDecoder ─► text

The template changed twice in the model's first weeks, so none is written here: the file beside the weights is rendered,
by an environment set up as transformers sets up its own. It is a program from elsewhere and runs in jinja2's sandbox.
Token ids are looked up by name; the published vocabulary's are known, and a file that disagrees is refused.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from dgemma_local.errors import PromptError, TokenizerError

# Names and ids in the published vocabulary of 262,144.
KNOWN_VOCABULARY = 262_144
KNOWN_IDS = {
    "<pad>": 0, "<eos>": 1, "<bos>": 2,
    "<|tool>": 46, "<tool|>": 47, "<|tool_call>": 48, "<tool_call|>": 49,
    "<|tool_response>": 50, "<tool_response|>": 51, '<|"|>': 52,
    "<|think|>": 98, "<|channel>": 100, "<channel|>": 101, "<|turn>": 105, "<turn|>": 106,
    "<|image>": 255_999, "<|image|>": 258_880, "<image|>": 258_882,
}  # fmt: skip

Tool = Mapping[str, Any]  # a JSON schema: {"type": "function", "function": {...}}

_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_TOGETHER = "use the files of one checkpoint together, unedited"


class Message(TypedDict):
    """One turn; role is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialIds:
    """Ids of the control tokens; None where the vocabulary has no such token."""

    pad: int
    eos: int
    bos: int
    turn_open: int  # <|turn>
    turn_close: int  # <turn|>, the usual end of an answer
    channel_open: int  # <|channel>, before a thought
    channel_close: int
    think: int | None  # <|think|>, in the system turn: thinking is on
    tool_open: int | None  # <|tool>, a declaration
    tool_close: int | None
    call_open: int | None  # <|tool_call>
    call_close: int | None
    response_open: int | None  # <|tool_response>, the end of an answer that calls a tool
    response_close: int | None
    quote: int | None  # <|"|>, around strings in tool calls
    image_open: int | None
    image: int | None  # <|image|>, where an image's rows go
    image_close: int | None


class Tokenizer:
    """One checkpoint's vocabulary and chat template; made by `Tokenizer.load`."""

    def __init__(
        self, raw: tokenizers.Tokenizer, template: jinja2.Template, names: Mapping[str, str], vocab_size: int
    ) -> None:
        vocabulary = raw.get_vocab()
        _check(raw, max(vocabulary.values(), default=0), vocab_size)
        self.longest = max((len(name.encode()) for name in vocabulary), default=0)  # bytes of a token's name, at most
        self.vocab_size = vocab_size  # rows of the embedding; the tokenizer may name fewer ids
        self.special = _special_ids(raw, vocab_size)
        self._raw, self._template, self._names = raw, template, names
        flagged = {i for i, token in raw.get_added_tokens_decoder().items() if token.special}
        named = {raw.token_to_id(name) for name in KNOWN_IDS} - {None}
        self._control = frozenset(flagged | named)

    @classmethod
    def load(cls, folder: Path, vocab_size: int) -> "Tokenizer":
        """Reads tokenizer.json, tokenizer_config.json (only for names) and chat_template.jinja from `folder`.

        vocab_size is the model's. Raises TokenizerError: a file absent or broken, a needed token absent or at another
        id than published, ids past the model's embedding, a decoder that cannot be streamed, a template that does not parse.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{folder} has no tokenizer.json", "give the folder that holds the whole checkpoint")
        with _refusing(f"{path} cannot be read", "fetch the file again"):
            raw = tokenizers.Tokenizer.from_file(str(path))
        raw.no_truncation()
        raw.no_padding()
        config = _config(folder)
        return cls(raw, _template(folder, config), _names(config), vocab_size)

    def render(
        self, messages: Sequence[Message], *, thinking: bool = False, tools: Sequence[Tool] | None = None
    ) -> str:
        """The prompt as text, <bos> and the opening of the model's turn included.

        Raises TokenizerError when the template does, and when it writes nothing.
        """
        try:
            text = self._template.render(
                messages=list(messages),
                tools=tools,
                documents=None,
                add_generation_prompt=True,
                enable_thinking=thinking,
                **self._names,
            )
        except Exception as error:  # whatever a program from elsewhere raises
            raise TokenizerError(
                f"the chat template cannot render these messages: {_line(error)}",
                "check the roles and their order (system, user, assistant, user …), then the checkpoint's chat_template.jinja",
            ) from None
        if not text.strip():
            raise TokenizerError(
                "the chat template writes nothing for these messages", "fetch chat_template.jinja again"
            )
        return text

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of `text`, nothing added: the template writes <bos>.

        A marker spelled out in the text becomes its control token, in a user's words too, as in transformers by default.
        Raises PromptError for text that is not Unicode (a lone surrogate, left by undecodable bytes).
        """
        _bytes(text)
        with _refusing("tokenizer.json cannot encode the prompt", _TOGETHER):
            return tuple(self._raw.encode(text, add_special_tokens=False).ids)

    def prompt(
        self,
        messages: Sequence[Message],
        *,
        thinking: bool = False,
        tools: Sequence[Tool] | None = None,
        max_tokens: int | None = None,
    ) -> tuple[int, ...]:
        """Ids of the rendered messages. Raises as `render` and `encode` do.

        max_tokens is the context's size: PromptError at once where even the longest tokens would not bring the messages
        below it, since encoding a long text takes long. None, or a prompt that passes: not compared.
        """
        for message in messages:
            if not isinstance(message["content"], str):  # transformers takes lists of parts there, images among them
                raise PromptError("a message holds something other than text", "give text alone: images are not read")
        size = sum(_bytes(message["content"]) for message in messages)
        if max_tokens is not None and size > max_tokens * self.longest:
            raise PromptError(
                f"the prompt has {size} bytes, more than a context of {max_tokens} tokens can hold",
                "shorten the prompt",
            )
        text = self.render(messages, thinking=thinking, tools=tools)
        try:
            return self.encode(text)
        except PromptError:  # the messages were valid
            raise TokenizerError(
                "the chat template writes half a character", "fetch chat_template.jinja again"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens by their names. Bytes that are no UTF-8 read �, ids without a token nothing."""
        return self._raw.decode(list(ids), skip_special_tokens=False)

    def piece(self, token: int) -> str:
        """Text of one token for a view of the canvas: specials by name, � for a part of a character or an unused id."""
        return self.decode((token,)) or "�"

    def is_control(self, token: int) -> bool:
        """Whether the token steers instead of being read: flagged special in tokenizer.json, or in `special`."""
        return token in self._control

    def is_mark(self, token: int) -> bool:
        """Whether a view draws a mark instead of the token's text: control tokens, and ids that nothing was trained on."""
        return self.is_control(token) or self.piece(token).startswith("<unused")

    def ends_character(self, token: int) -> bool:
        """Whether text may be cut after this token. Not after a byte: the decoder reads a whole run of bytes at once."""
        name = self._raw.id_to_token(token)
        return name is not None and not _BYTE.fullmatch(name)


class StreamDecoder:
    """Text of ids that arrive bit by bit; the pieces join to exactly `decode` of all of them.

    A run of byte tokens is held until another token ends it, because one bad byte turns its whole run to �. Each id is
    decoded once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._held: list[int] = []

    def feed(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete."""
        ends = self._tokenizer.ends_character
        cut = next((n for n in range(len(ids), 0, -1) if ends(ids[n - 1])), 0)
        if not cut:
            self._held.extend(ids)
            return ""
        ready, self._held = [*self._held, *ids[:cut]], list(ids[cut:])
        return self._tokenizer.decode(ready)

    def close(self) -> str:
        """The text still held, � for each byte of an unfinished run. The decoder then starts afresh."""
        held, self._held = self._held, []
        return self._tokenizer.decode(held)


def _line(error: BaseException) -> str:
    return " ".join(f"{error}".split()) or type(error).__name__


@contextmanager
def _refusing(what: str, fix: str) -> Iterator[None]:
    """TokenizerError for whatever the library raises: nothing narrower than Exception, and a panic in Rust not even that."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise TokenizerError(f"{what}: {_line(error)}", fix) from None


def _bytes(text: str) -> int:
    """Length of a user's text in UTF-8. Raises PromptError on a lone surrogate."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise PromptError(f"the prompt is not valid text at character {error.start}", "give it as UTF-8") from None


def _check(raw: tokenizers.Tokenizer, most: int, vocab_size: int) -> None:
    """Refuses ids without an embedding row, and a decoder whose text for a token depends on more than a run of bytes."""
    if most >= vocab_size:
        raise TokenizerError(f"tokenizer.json has an id {most}, the model ends at {vocab_size - 1}", _TOGETHER)
    decoder = json.loads(raw.decoder.__getstate__()) if raw.decoder is not None else {}
    steps = [step.get("type") for step in decoder.get("decoders", [decoder])]
    if not set(steps) <= {"Replace", "ByteFallback", "Fuse"}:
        raise TokenizerError(
            f"tokenizer.json decodes by {steps}; only Replace, ByteFallback and Fuse are implemented", _TOGETHER
        )


def _special_ids(raw: tokenizers.Tokenizer, vocab_size: int) -> SpecialIds:
    def find(name: str) -> int | None:
        found = raw.token_to_id(name)
        if found is not None and vocab_size == KNOWN_VOCABULARY and found != KNOWN_IDS[name]:
            raise TokenizerError(f"tokenizer.json has {name} at {found}, published is {KNOWN_IDS[name]}", _TOGETHER)
        return found

    def need(name: str) -> int:
        if (found := find(name)) is None:
            raise TokenizerError(f"tokenizer.json has no token {name}", "use a DiffusionGemma checkpoint")
        with _refusing(f"tokenizer.json cannot encode {name}", _TOGETHER):
            ids = raw.encode(name, add_special_tokens=False).ids
        if ids != [found]:
            raise TokenizerError(f"tokenizer.json makes {ids} of {name}, its id is {found}", _TOGETHER)
        return found

    return SpecialIds(
        pad=need("<pad>"), eos=need("<eos>"), bos=need("<bos>"),
        turn_open=need("<|turn>"), turn_close=need("<turn|>"),
        channel_open=need("<|channel>"), channel_close=need("<channel|>"), think=find("<|think|>"),
        tool_open=find("<|tool>"), tool_close=find("<tool|>"),
        call_open=find("<|tool_call>"), call_close=find("<tool_call|>"),
        response_open=find("<|tool_response>"), response_close=find("<tool_response|>"), quote=find('<|"|>'),
        image_open=find("<|image>"), image=find("<|image|>"), image_close=find("<image|>"),
    )  # fmt: skip


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} cannot be read: {_line(error)}", "fetch the file again") from None
    if not isinstance(config, dict):
        raise TokenizerError(f"{path} is not a JSON object", "fetch the file again")
    return config


def _names(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token … for the template; a name stands alone or in an object's "content"."""
    plain = {key: value.get("content") if isinstance(value, dict) else value for key, value in config.items()}
    found = {key: value for key, value in plain.items() if key.endswith("_token") and isinstance(value, str)}
    return {"bos_token": "<bos>"} | found


class _Namespace(Namespace):
    """Without names in underscores, as in transformers: jinja2 looks up __call__ and its like past the sandbox."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _template(folder: Path, config: Mapping[str, Any]) -> jinja2.Template:
    """chat_template.jinja, else the "chat_template" of tokenizer_config.json, compiled in transformers' environment."""
    path = folder / "chat_template.jinja"
    try:
        source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {_line(error)}", "fetch the file again") from None
    if not isinstance(source, str):
        raise TokenizerError(f"{folder} has no chat_template.jinja", "fetch it from the checkpoint's repository")
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # jinja2's own escapes <, > and &
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["namespace"] = _Namespace
    try:
        return environment.from_string(source)
    except Exception as error:  # compiling can fail in Python too, on blocks nested too deep
        raise TokenizerError(f"the chat template does not parse: {_line(error)}", "fetch the file again") from None
