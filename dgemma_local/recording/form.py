"""What reader and writer agree on."""

from collections.abc import Mapping
from dataclasses import dataclass, field

FORMAT = "dgemma recording"
VERSION = 1
KINDS = ("answer", "thought", "tool_call")  # of committed text
DIGITS = 3  # of an entropy, behind the point: a thousandth of a nat


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
