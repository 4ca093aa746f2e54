"""What commands show of a chat, which stays as it is."""

import difflib

from dgemma_local.chat.commands import COMMANDS, NAMES, SHORT
from dgemma_local.chat.conversation import DEFAULT, KEYS, Turn, shown
from dgemma_local.errors import UsageError
from dgemma_local.ui.chat_turn import Chat
from dgemma_local.ui.clipboard import copy

_KEYS = (
    f"/set KEY {DEFAULT} takes a setting back. A message //x is sent as /x.",
    'Several lines: a trailing backslash, Alt-Enter, """ around them, or a paste.',
    "Ctrl-X Ctrl-E opens the editor, Up and Ctrl-R find what was typed before.",
    "Ctrl-C stops an answer and keeps what is committed; Ctrl-D leaves.",
)


def show_help(chat: Chat, argument: str) -> None:
    """All commands, or the one that `argument` names, with or without its slash."""
    if argument:
        _one(chat, argument.removeprefix("/").lower())
        return
    width = max(len(f"{known.name} {known.argument}") for known in COMMANDS) + 1
    for known in COMMANDS:
        chat.say(f"/{known.name} {known.argument}".ljust(width + 2) + known.does, "")
    for line in _KEYS:
        chat.say(line)


def _one(chat: Chat, name: str) -> None:
    name = SHORT.get(name, name)
    found = next((known for known in COMMANDS if known.name == name), None)
    if found is None:
        near = difflib.get_close_matches(name[:40], NAMES, n=1)
        raise UsageError("there is no such command", f"say /help {near[0]}" if near else "/help lists all commands")
    chat.say(f"/{found.name} {found.argument}".rstrip() + f"  {found.does}", "")
    if name == "set":
        chat.say(f"KEY: {' '.join(KEYS)}", "")
    if others := [f"/{short}" for short, long in SHORT.items() if long == name]:
        chat.say(f"or {' '.join(others)}", "")


def show(chat: Chat, argument: str) -> None:
    conversation = chat.conversation
    if argument == "system":
        chat.say(conversation.system or "there is no system turn", "")
        return
    if argument == "thought":
        chat.say(turns(chat)[-1].thought.strip("\n") or "the last answer had no thought", "")
        return
    if argument:
        raise UsageError("/show shows the settings, the system turn or the last thought", "say /show [system|thought]")
    rows = [("conversation", f"{conversation.name}, {count(len(conversation.turns), 'turn')}")]
    rows += [("model", chat.model.name), ("system", conversation.system or "none"), *shown(conversation.settings)]
    rows += [("visualize", on(chat.visualize)), ("record", str(chat.recording or "off"))]
    for key, value in rows:
        chat.say(f"{key:<14} {value}", "")


def stats(chat: Chat, argument: str) -> None:
    if chat.latest is None:
        raise UsageError("there is no answer to tell of yet", "ask something")
    told, wall = chat.latest
    chat.say(f"seed      {told.start.seed}", "")
    for line in told.summary(wall):
        chat.say(line, "")
    chat.say(f"room      {chat.model.context:,} tokens of context", "")


def copy_answer(chat: Chat, argument: str) -> None:
    chat.say(copy(back(chat, argument).answer.strip("\n"), chat.terminal))


def turns(chat: Chat) -> tuple[Turn, ...]:
    if not chat.conversation.turns:
        raise UsageError("there is no turn yet", "ask something")
    return chat.conversation.turns


def back(chat: Chat, argument: str) -> Turn:
    """The turn that `argument`, a whole number, counts from the end; without one it is the last."""
    return turns(chat)[-counted(chat, argument)]


def counted(chat: Chat, argument: str) -> int:
    """Raises UsageError for what is no number of turns that there are."""
    most = len(turns(chat))
    number = int(argument) if argument.isascii() and argument.isdigit() and len(argument) < 10 else 0
    if argument and not 1 <= number <= most:
        raise UsageError(
            f"there {'is' if most == 1 else 'are'} {count(most, 'turn')}", f"give a number from 1 to {most}"
        )
    return number or 1


def on(value: bool) -> str:
    return "on" if value else "off"


def count(number: int, one: str) -> str:
    return f"{number} {one if number == 1 else one + 's'}"
