"""What reader and writer agree on."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

FORMAT = "dgemma recording"
VERSION = 1
KINDS = ("answer", "thought", "tool_call")  # of committed text
DIGITS = 3  # of an entropy, behind the point: a thousandth of a nat
GZIP = 31  # zlib's window of 15 bits, with gzip's header
GZIP_MAGIC = b"\x1f\x8b"
NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # a pipe is opened whether or not there is another end

_LONE = re.compile("[\ud800-\udfff]")  # halves of a surrogate pair: JSON can spell them, UTF-8 cannot


def sound(text: str) -> str:
    """`text` that can be encoded: � for what is half a character."""
    return text if text.isascii() else _LONE.sub("\N{REPLACEMENT CHARACTER}", text)


@dataclass(frozen=True, slots=True)
class Word:
    """How a token reads."""

    text: str  # its name, for a control token; � for a part of a character
    control: bool = False  # it steers instead of being read


@dataclass(frozen=True, slots=True)
class Piece:
    """Some committed text; `channels.Piece` of a run."""

    kind: str  # answer, thought or tool_call
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What is known before the first event."""

    model: str
    revision: str | None = None  # of its files, where it is known
    demo: bool = False
    seed: int
    canvas_length: int  # L
    steps: int  # a canvas may take
    max_tokens: int
    ends: tuple[int, ...]  # tokens that end an answer
    prompt: tuple[int, ...] | None = None  # ids; None where it was left out
    settings: Mapping[str, object] = field(default_factory=dict)  # sampler, dtype, device: for the reader's eye
    dgemma: str = ""  # version that wrote it
