"""What each command does; the lines it says go to stderr. Raises DgemmaError for what cannot be done."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from dgemma_local.chat import store
from dgemma_local.chat.commands import COMMANDS
from dgemma_local.chat.conversation import (
    cleared,
    messages,
    retried,
    shown,
    undone,
    with_setting,
    with_settings,
)
from dgemma_local.chat.export import FORMS, Form, exported
from dgemma_local.errors import UsageError
from dgemma_local.interrupts import undisturbed
from dgemma_local.recording import check_target
from dgemma_local.ui.chat_input import edited
from dgemma_local.ui.chat_shown import copy_answer, count, counted, on, show, show_help, stats, turns
from dgemma_local.ui.chat_turn import Chat, answer, now, recap
from dgemma_local.ui.prompt import check
from dgemma_local.ui.terminal import printable

BAR = 40  # cells of a full context


def system(chat: Chat, argument: str) -> None:
    chat.update(replace(chat.conversation, system=check(argument, "the system turn") if argument else None))
    chat.say("the system turn is set" if argument else "there is no system turn")


def set_key(chat: Chat, argument: str) -> None:
    key, value = _parted(argument)
    key = key.lower().replace("_", "-")
    chat.update(with_setting(chat.conversation, key, value))
    chat.say(f"{key}: {dict(shown(chat.conversation.settings))[key]}")


def clear(chat: Chat, argument: str) -> None:
    chat.secure()
    began = now()
    chat.conversation = cleared(chat.conversation, store.free_name(stamp(), chat.folder), began)
    chat.saved, chat.unsaved = None, False
    chat.latest = None
    chat.say("a new conversation")


def undo(chat: Chat, argument: str) -> None:
    number = counted(chat, argument)
    last = turns(chat)[-1]
    left = chat.conversation
    for _ in range(number):
        left = undone(left)
    chat.update(left)
    chat.say(f"taken back: {_line(last.user)}" if number == 1 else f"taken back: {count(number, 'turn')}")


def retry(chat: Chat, argument: str) -> None:
    answer(chat, turns(chat)[-1].user, retried)


def edit(chat: Chat, argument: str) -> None:
    if chat.scripted:
        raise UsageError("/edit needs a terminal", "write the message in a line, or between three quotes")
    text = edited(argument)
    chat.draft = text
    chat.say("Enter sends it" if text.strip() else "nothing was written")


def save(chat: Chat, argument: str) -> None:
    if chat.folder is None:
        raise UsageError("conversations are not saved here", "use /export, or set XDG_STATE_HOME to a folder")
    if argument and argument != chat.conversation.name:
        named = replace(chat.conversation, name=store.check_name(argument))
        with undisturbed():
            try:
                store.renamed(named, chat.saved, chat.folder)
            except OSError as error:
                raise UsageError(f"it cannot be saved: {error.strerror}", "make room, or use /export") from None
            chat.conversation, chat.saved, chat.unsaved = named, named, False
    else:
        turns(chat)
        chat.update(chat.conversation)
        if chat.unsaved:  # it has said why
            return
    chat.say(f"saved as {chat.conversation.name}: `dgemma chat --resume {_quoted(chat.conversation.name)}`")


def load(chat: Chat, argument: str) -> None:
    if chat.folder is None or not argument:
        raise UsageError("there is no conversation to load", "say /load NAME; Tab lists those that are saved")
    chat.secure()
    try:
        chat.conversation = chat.saved = store.load(argument, chat.folder)
    except store.Damaged as error:
        raise UsageError(str(error), "this conversation goes on; load another one") from None
    chat.unsaved = False
    chat.latest = None
    recap(chat)
    if chat.conversation.model != chat.model.name:
        chat.say(f"it was held with {chat.conversation.model}; /model {chat.conversation.model} goes on with that")


def delete(chat: Chat, argument: str) -> None:
    if chat.folder is None or not argument:
        raise UsageError("there is no conversation to delete", "say /delete NAME; Tab lists those that are saved")
    name = store.check_name(argument)
    if name == chat.conversation.name:
        raise UsageError(f"{name} is the conversation at work", "say /clear first, or /load another one")
    try:
        store.forget(name, chat.folder)
    except OSError as error:
        raise UsageError(
            f"{name} cannot be deleted: {error.strerror}", "look at it with `dgemma chat --list`"
        ) from None
    chat.say(f"deleted: {name}")


def export(chat: Chat, argument: str) -> None:
    form, name = _parted(argument)
    if form not in FORMS:
        raise UsageError("nothing is exported without a form", f"say /export {'|'.join(FORMS)} [FILE]")
    turns(chat)
    path = _path(name or f"{chat.conversation.name}.{form}")
    text = exported(chat.conversation, cast(Form, form), printable)
    try:
        with path.open("x", encoding="utf-8", errors="replace") as file:
            try:
                file.write(text)
                file.flush()
            except BaseException:  # a disk that is full: half a file is none
                path.unlink(missing_ok=True)
                raise
    except FileExistsError:
        raise UsageError(f"{path} is there already", f"say /export {form} FILE with another name") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"{path} cannot be written: {why}", "choose another place") from None
    chat.exported = chat.conversation
    chat.say(f"written to {path}")


def record(chat: Chat, argument: str) -> None:
    if not argument:
        raise UsageError("nothing is recorded without a file", "say /record FILE.jsonl.gz, or /record off")
    if argument.startswith("off "):
        raise UsageError("/record off takes nothing behind it", "say /record off")
    path = None if argument == "off" else _path(argument)
    if path is not None:
        if os.path.lexists(path):  # a recording, too: a chat begins new ones; a device, a link to nowhere
            raise UsageError(f"{path} is there already", "say /record FILE with another name")
        check_target(path)
    chat.recording, chat.recorded = path, 0
    chat.say(f"the next answer is recorded in {path}, and each after it beside that" if path else "nothing is recorded")


def visualize(chat: Chat, argument: str) -> None:
    chat.visualize = _switch("visualize", argument)
    chat.say(f"the canvas in view: {on(chat.visualize)}")
    if chat.visualize and not chat.terminal.writes:
        chat.say("it needs stderr to be a terminal that knows UTF-8; going on without")


def think(chat: Chat, argument: str) -> None:
    settings = chat.conversation.settings
    if argument == "show":
        chat.update(with_settings(chat.conversation, thinking=True, show_thoughts=not settings.show_thoughts))
    else:
        chat.update(with_settings(chat.conversation, thinking=_switch("think", argument, "show")))
    settings = chat.conversation.settings
    chat.say(f"thinking: {on(settings.thinking)}, thoughts {'shown' if settings.show_thoughts else 'folded'}")


def model(chat: Chat, argument: str) -> None:
    if argument:
        chat.model.switch(argument)
        chat.update(replace(chat.conversation, model=chat.model.name))
    chat.say(f"{chat.model.name}, a context of {chat.model.context:,} tokens")


def context(chat: Chat, argument: str) -> None:
    conversation, room = chat.conversation, chat.model.context
    told = messages(conversation)
    used = chat.model.tokens(told, thinking=conversation.settings.thinking) if told else 0
    filled = min(BAR, -(-BAR * used // room))
    full, free = "█░" if chat.terminal.encoding.startswith("utf") else "#."
    chat.say(f"{full * filled}{free * (BAR - filled)} {used:,} of {room:,} tokens ({used / room:.0%})", "")
    chat.say(count(len(conversation.turns), "turn"))


def multi(chat: Chat, argument: str) -> None:
    if chat.scripted:
        raise UsageError("/multi needs a terminal", "put three quotes around a message of several lines")
    chat.source.multi = not chat.source.multi
    chat.say("Enter begins a line, Alt-Enter sends" if chat.source.multi else "Enter sends")


def leave(chat: Chat, argument: str) -> None:
    chat.ended = True


def _bare(name: str, act: Callable[[Chat, str], None]) -> Callable[[Chat, str], None]:
    """The action of a command that takes nothing: what stands behind it was meant for something else."""

    def alone(chat: Chat, argument: str) -> None:
        if argument:
            raise UsageError(f"/{name} takes nothing behind it", f"say /{name} alone")
        act(chat, argument)

    return alone


_ACTIONS: Mapping[str, Callable[[Chat, str], None]] = {
    "help": show_help, "system": system, "set": set_key, "show": show, "clear": clear, "undo": undo, "retry": retry,
    "edit": edit, "save": save, "load": load, "delete": delete, "export": export, "record": record,
    "visualize": visualize, "think": think, "model": model, "context": context, "stats": stats, "copy": copy_answer,
    "multi": multi, "exit": leave,
}  # fmt: skip
ACTIONS = {
    known.name: _ACTIONS[known.name] if known.argument else _bare(known.name, _ACTIONS[known.name])
    for known in COMMANDS
}


def stamp() -> str:
    """A name for a conversation that has none yet."""
    return time.strftime("%Y-%m-%d-%H%M%S")


def _parted(argument: str) -> tuple[str, str]:
    """Its first word, and what follows the blank space behind that."""
    first, *rest = argument.split(None, 1) or [""]
    return first, rest[0].strip() if rest else ""


def _path(name: str) -> Path:
    """Raises UsageError: ~ of a user that is none."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise UsageError(f"{name} names a home that is not known", "write the path out, or ./~ for the tilde") from None


def _switch(name: str, argument: str, *more: str) -> bool:
    if argument not in ("on", "off"):
        raise UsageError(f"/{name} is on or off", f"say /{name} {'|'.join(('on', 'off', *more))}")
    return argument == "on"


def _line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"


def _quoted(name: str) -> str:
    return f"'{name}'" if " " in name else name
