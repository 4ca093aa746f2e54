"""What has been said, and with which settings: frozen, so that every command is a function from one state to the next.

What the model gets (`messages`) are answers without their thoughts: templates cut those from history, and so every turn
begins with what the turn before it has left in the cache.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

from dgemma_local.errors import UsageError
from dgemma_local.presets import SETTINGS, Preset

SEEDS = 1 << 64
MOST_STEPS = 4096  # as `Session.answer` takes them
MOST_TOKENS = 1 << 30  # far more than any context
TORN = ("interrupted", "numeric")  # outcomes of answers that something else ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A question and what came of it."""

    user: str
    answer: str = ""  # what was committed of it, thoughts left out
    thought: str = ""
    ids: tuple[int, ...] = ()  # the model's tokens as they came, thoughts and markers included
    outcome: str = "complete"
    seed: int = 0
    time: str = ""  # ISO 8601, UTC, at its end


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How answers are asked for; None is the model's own."""

    max_tokens: int = 1024
    steps: int | None = None  # goes before those of the preset
    preset: Preset | None = None  # settings of the sampler in the place of the model's own
    seed: int | None = None  # of the first answer, later ones count up from it; None: drawn for each
    thinking: bool = False
    think_tokens: int | None = None  # None: no budget of its own
    show_thoughts: bool = False
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One chat, from its first turn to the last."""

    name: str
    model: str
    started: str = ""  # ISO 8601, UTC
    system: str | None = None
    settings: Settings = Settings()
    asked: int = 0  # answers begun, those of turns since taken back included, modulo SEEDS: what seeds count by
    turns: tuple[Turn, ...] = ()


def messages(conversation: Conversation, user: str | None = None) -> list[dict[str, str]]:
    """Roles and contents for the template, `user` being the question to come.

    A question that got no answer stands before the next one in one turn: templates want the roles to alternate, and an
    empty answer in its history teaches a model to give another.
    """
    said = [] if conversation.system is None else [{"role": "system", "content": conversation.system}]
    waiting: list[str] = []
    for turn in conversation.turns:
        waiting.append(turn.user)
        if turn.answer.strip():
            said += [
                {"role": "user", "content": "\n\n".join(waiting)},
                {"role": "assistant", "content": turn.answer},
            ]
            waiting = []
    if user is not None:
        waiting.append(user)
    if waiting:
        said.append({"role": "user", "content": "\n\n".join(waiting)})
    return said


def said(conversation: Conversation, turn: Turn) -> Conversation:
    """With one more turn."""
    return replace(conversation, turns=(*conversation.turns, turn), asked=_one_more(conversation))


def undone(conversation: Conversation) -> Conversation:
    """Without its last turn; as it is, where there is none."""
    return replace(conversation, turns=conversation.turns[:-1])


def retried(conversation: Conversation, turn: Turn) -> Conversation:
    """With `turn` in place of the last one, unless that was something and this is nothing, or whole and this is torn."""
    last = conversation.turns[-1]
    less = not turn.answer.strip() or (last.outcome == "complete" and turn.outcome in TORN)
    if last.answer.strip() and less:
        return replace(conversation, asked=_one_more(conversation))
    return said(undone(conversation), turn)


def cleared(conversation: Conversation, name: str, started: str) -> Conversation:
    """A new one with the same system turn and settings. Its seeds begin anew."""
    return replace(conversation, name=name, started=started, turns=(), asked=0)


def next_seed(conversation: Conversation, draw: Callable[[int], int]) -> int:
    """Of the answer to come. draw(n): a whole number below n; asked only where no seed is set."""
    first = conversation.settings.seed
    return draw(SEEDS) if first is None else (first + conversation.asked) % SEEDS


def _one_more(conversation: Conversation) -> int:
    return (conversation.asked + 1) % SEEDS


# /set KEY VALUE

_NUMBERS: Mapping[str, tuple[int, int]] = {  # least and most
    "max-tokens": (1, MOST_TOKENS),
    "steps": (1, MOST_STEPS),
    "seed": (0, SEEDS - 1),
    "think-tokens": (1, MOST_TOKENS),
}
SWITCHES = ("thinking", "show-thoughts")
KEYS = (*_NUMBERS, "preset", "stop", *SWITCHES)
DEFAULT = "default"


def with_setting(conversation: Conversation, key: str, value: str) -> Conversation:
    """`key` set to what `value` says; "default" is what it was before anything was set.

    A stop string may be quoted, with \\n and \\t in it. Raises UsageError: no such key, a value that is none.
    """
    name = key.replace("-", "_")
    if key not in KEYS:
        raise UsageError(f"there is no setting {key!r}", f"choose one of: {', '.join(KEYS)}")
    if not value:
        raise UsageError(f"{key} needs a value", f"say /set {key} VALUE, or /set {key} {DEFAULT}")
    if value == DEFAULT:
        found: object = getattr(Settings(), name)
    elif key == "stop":
        found = (*conversation.settings.stop, _string(value))
    elif key == "preset":
        found = _preset(value)
    elif key in SWITCHES:
        found = _switch(key, value)
    else:
        found = number(key, value)
    return with_settings(conversation, **{name: found})


def with_settings(conversation: Conversation, **values: object) -> Conversation:
    """By the names of `Settings`. Seeds count from a new one on, and a preset brings its steps along.

    Raises UsageError for what no file may hold, and for a thought that would leave no room for an answer.
    """
    for name, value in values.items():
        key = name.replace("_", "-")
        if key in _NUMBERS and value is not None:
            number(key, str(value))
    if values.get("preset") is not None:
        values = {"steps": None, **values}
    settings = replace(conversation.settings, **values)  # type: ignore[arg-type]  # names and types are the caller's
    bound, most = settings.think_tokens, settings.max_tokens
    if not values.keys().isdisjoint({"think_tokens", "max_tokens"}) and bound is not None and bound >= most:
        raise UsageError(
            f"think-tokens {bound} leaves nothing of max-tokens {most} for an answer",
            "let max-tokens be more, or think-tokens less",
        )
    asked = 0 if "seed" in values else conversation.asked
    return replace(conversation, settings=settings, asked=asked)


def _preset(value: str) -> Preset:
    try:
        return Preset(value)
    except ValueError:
        raise UsageError(f"there is no preset {_short(value)!r}", f"choose one of: {', '.join(Preset)}") from None


def _switch(key: str, value: str) -> bool:
    if value not in ("on", "off"):
        raise UsageError(f"{key} cannot be {_short(value)!r}", "say on or off")
    return value == "on"


def number(key: str, value: str) -> int:
    """Raises UsageError for what is no whole number, or out of the key's range."""
    least, most = _NUMBERS[key]
    digits = value.replace(",", "").replace("_", "")
    # Python reads no longer ones, and there is no key of so many digits
    good = digits.isascii() and digits.isdigit() and len(digits) <= 1 + math.ceil(math.log10(SEEDS))
    found = int(digits) if good else -1
    if not least <= found <= most:
        raise UsageError(f"{key} cannot be {_short(value)!r}", f"give a whole number from {least} to {most}")
    return found


def shown(settings: Settings) -> list[tuple[str, str]]:
    """Every setting by the key that sets it, and its value in words."""
    values = {field.name.replace("_", "-"): getattr(settings, field.name) for field in fields(settings)}
    words = {None: "the model's own", (): "none", True: "on", False: "off"}
    unset = {"seed": "drawn for each answer", "think-tokens": "no budget"}
    if settings.preset is not None and "steps" in (own := SETTINGS[settings.preset]):
        unset["steps"] = f"{own['steps']}, the preset's"
    found = []
    for key, value in values.items():
        if value is None and key in unset:
            text = unset[key]
        elif value is None or isinstance(value, bool) or value == ():
            text = words[value]
        elif isinstance(value, tuple):
            text = ", ".join(repr(each) for each in value)
        else:
            text = str(value)
        found.append((key, text))
    return found


def _string(value: str) -> str:
    if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        value = value[1:-1]
    found = value.replace("\\n", "\n").replace("\\t", "\t")
    if not found:
        raise UsageError("an empty stop string ends nothing", "give at least one character")
    if not encodable(found):
        raise UsageError("a stop string is not UTF-8 text", "give it as UTF-8")
    return found


def encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:39] + "…"
