"""Lines to commands, what completes them, and which lines of a message belong together."""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dgemma_local.chat.conversation import DEFAULT, KEYS, SWITCHES
from dgemma_local.errors import PromptError
from dgemma_local.presets import Preset

BLOCK = '"""'
_SWITCH = ("on", "off")


@dataclass(frozen=True, slots=True)
class Known:
    """A command as /help shows it."""

    name: str
    argument: str
    does: str


COMMANDS = (
    Known("help", "[NAME]", "what can be said here, or one of it"),
    Known("system", "[TEXT]", "the system turn; without TEXT there is none"),
    Known("set", "KEY VALUE", "how it answers; /help set lists the KEYs"),
    Known("show", "[system|thought]", "the settings; the system turn or thought in full"),
    Known("clear", "", "a new conversation; this one stays saved"),
    Known("undo", "[N]", "take the last turn back, or the last N"),
    Known("retry", "", "ask the last question again, with another seed"),
    Known("edit", "[TEXT]", "write the next message in $VISUAL or $EDITOR"),
    Known("save", "[NAME]", "it is saved after every turn; NAME names it"),
    Known("load", "NAME", "go on with a saved conversation"),
    Known("delete", "NAME", "do away with a saved conversation"),
    Known("export", "md|json|html [FILE]", "write it for other programs"),
    Known("record", "FILE|off", "keep every step, for `dgemma replay`"),
    Known("visualize", "on|off", "the canvas while it settles"),
    Known("think", "on|off|show", "think first; show: thoughts are printed, or not"),
    Known("model", "[NAME]", "go on with another model"),
    Known("context", "", "how much of the context is used"),
    Known("stats", "", "what the last answer took"),
    Known("copy", "[N]", "an answer to the clipboard; 2: the one before it"),
    Known("multi", "", "Enter begins a line, Alt-Enter sends; or back"),
    Known("exit", "", "leave, as Ctrl-D does"),
)
NAMES = tuple(known.name for known in COMMANDS)
SHORT = {"quit": "exit", "bye": "exit", "?": "help", "reset": "clear", "regenerate": "retry", "q": "exit"}


@dataclass(frozen=True, slots=True)
class Say:
    """A message for the model."""

    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """A known command; `argument` is all that follows it, blank space around it left out."""

    name: str
    argument: str = ""


@dataclass(frozen=True, slots=True)
class Unknown:
    """What looks like a command and is none."""

    name: str
    nearest: str | None


def parse(text: str) -> Say | Command | Unknown | None:
    """What one input means; None for a blank one. Two slashes before a letter send a message that begins with one.

    Before anything else they are a comment's, or a rule: "/ x" is no command that they could be told from.
    """
    stripped = text.strip()
    if not stripped:
        return None
    if stripped.startswith("//"):
        return Say(text if stripped[2:3] in ("", "/") or stripped[2].isspace() else stripped[1:])
    if not stripped.startswith("/"):
        message = unwrapped(text)
        return Say(message) if message.strip() else None
    name, _, argument = re.sub(r"\s", " ", stripped[1:], count=1).partition(" ")
    name = name.lower()
    name = SHORT.get(name, name)
    if name in NAMES:
        return Command(name, unwrapped(argument.strip()))
    near = difflib.get_close_matches(name[:40], NAMES, n=1)
    return Unknown(name, near[0] if near else None)


# What belongs together


def open_block(text: str) -> bool:
    """Whether a message that begins with three quotes, or a command's argument that does, has not ended with them."""
    body = _body(text)
    return body.startswith(BLOCK) and not _closed(body) and BLOCK not in _first(body)


def _first(body: str) -> str:
    """What stands behind three quotes in their line: with three more it is a message that begins with a quotation."""
    return body[len(BLOCK) :].partition("\n")[0]


def _closed(body: str) -> bool:
    if len(body) < 2 * len(BLOCK) or not (body.startswith(BLOCK) and body.endswith(BLOCK)):
        return False
    _, end, more = _first(body).partition(BLOCK)
    return not end or ("\n" not in body and not more.strip('"'))


def _body(text: str) -> str:
    """What three quotes may stand around: a message, or a command's argument."""
    body = text.strip()
    if not body.startswith("/"):
        return body
    _, *argument = body.split(None, 1)
    return argument[0] if argument else ""


def unwrapped(text: str) -> str:
    """A message without the three quotes around it and the line breaks next to them."""
    body = text.strip()
    if _closed(body):
        return body[len(BLOCK) : -len(BLOCK)].removeprefix("\n").removesuffix("\n")
    return text


class Lines:
    """Lines one by one -> messages: a trailing backslash goes on in the next line, so does an open block.

    Each line is looked at once. largest: characters of a message; what is beyond is read to its end, and not held.
    """

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._begin()

    def feed(self, line: str) -> str | None:
        """The message that `line`, without its end, completes. Raises PromptError: it is too large."""
        if self._goes_on(line):
            self._hold(line)
            return None
        if line.endswith("\\"):
            self._hold(line[:-1])
            return None
        self._hold(line)
        return self.close()

    def close(self) -> str | None:
        """What is held when no line follows. Raises as `feed` does."""
        held, size = self._held, self._size
        self._begin()
        if size > self._largest:
            raise PromptError("a message is larger than what is read of one", "shorten it: no context holds so much")
        return "\n".join(held) if held else None

    def _begin(self) -> None:
        self._held: list[str] = []
        self._size = 0  # characters, held or not
        self._open = False  # within a block
        self._head: str | None = ""  # as much of the message as tells whether it begins with one; None: it does not

    def _goes_on(self, line: str) -> bool:
        if self._open:
            self._open = not line.rstrip().endswith(BLOCK)
        elif self._head is not None:
            text = f"{self._head}\n{line}"
            self._open = open_block(text)
            held = text.removesuffix("\\")
            self._head = None if _body(held) else held.lstrip()[:1]
        return self._open

    def _hold(self, line: str) -> None:
        self._size += len(line) + 1
        if self._size > self._largest:
            self._held = []
        else:
            self._held.append(line)


# Completion


def complete(text: str, names: Mapping[str, Callable[[], Iterable[str]]]) -> tuple[int, list[str]]:
    """Characters before the cursor that a completion replaces, and what it may be.

    text: up to the cursor. names: what may follow a command that takes a name (load, model), asked when it is needed.
    """
    if not text.startswith("/") or "\n" in text:
        return 0, []
    name, space, argument = text[1:].partition(" ")
    if not space:
        return len(text), [f"/{each}" for each in NAMES if each.startswith(name)]
    choices: Iterable[str]
    match name:
        case "set" if " " not in argument:
            choices = KEYS
        case "set":
            key, _, argument = argument.rpartition(" ")
            choices = (*_values(key.lower().replace("_", "-")), DEFAULT)
        case "help":
            choices = NAMES
        case "show":
            choices = ("system", "thought")
        case "delete":
            choices = names["load"]() if "load" in names else ()
        case "export":
            choices = ("md", "json", "html")
        case "visualize":
            choices = _SWITCH
        case "think":
            choices = (*_SWITCH, "show")
        case "record":
            choices = ("off",)
        case _ if name in names:
            choices = names[name]()
        case _:
            choices = ()
    return len(argument), [each for each in choices if each.startswith(argument)]


def _values(key: str) -> Iterable[str]:
    return Preset if key == "preset" else _SWITCH if key in SWITCHES else ()


def file_part(text: str) -> str | None:
    """The beginning of a file name at the cursor; None where none is wanted."""
    found = re.fullmatch(r"/record (.*)|/export (?:md|json|html) (.*)", text)
    return next((each for each in found.groups() if each is not None), None) if found else None
