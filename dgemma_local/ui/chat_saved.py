"""Which conversation a chat begins with, and the list of those that are saved."""

import time
from pathlib import Path

from dgemma_local.chat import store
from dgemma_local.chat.conversation import Conversation
from dgemma_local.errors import UsageError
from dgemma_local.streams import say
from dgemma_local.ui import chat_actions, chat_input
from dgemma_local.ui.chat_turn import now
from dgemma_local.ui.terminal import printable

MODEL = 24  # characters of a model's name in the list: it may be a path


def new(folder: Path | None) -> Conversation:
    """One without a turn; it claims its name when it is first saved."""
    return Conversation(name=store.free_name(chat_actions.stamp(), folder), model="", started=now())


def resumed(name: str | None, folder: Path | None) -> Conversation | None:
    """What is gone on with; a damaged file is one line.

    Raises UsageError: nothing of that name; it, or all that is saved, is damaged, and nobody is there to see that another
    one begins.
    """
    if folder is None:
        raise UsageError("there is no folder to resume from", "set XDG_STATE_HOME to a folder, or HOME")
    if name is not None:
        try:
            return store.load(name, folder)
        except store.Damaged as error:
            if not chat_input.on_terminal():
                raise UsageError(str(error), "resume another one: `dgemma chat --list` shows them") from None
            say(printable(f"{error}; a new conversation begins"))
            return None
    damaged = False
    for found in store.listed(folder):
        if found.conversation is not None:
            return found.conversation
        say(printable(found.damage))
        damaged = True
    nothing = "nothing that can be read is saved" if damaged else "nothing is saved yet"
    if damaged and not chat_input.on_terminal():
        raise UsageError(nothing, "leave --resume out to begin a new conversation")
    say(f"{nothing}; a new conversation begins")
    return None


def show_list(folder: Path | None) -> None:
    """One conversation a line on stdout; what is damaged, on stderr."""
    for found in store.listed(folder):
        if found.conversation is None:
            say(printable(found.damage))
            continue
        turns = found.conversation.turns
        first = " ".join(turns[0].user.split()) if turns else ""
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.changed))
        count = f"{len(turns):>3} turn{'' if len(turns) == 1 else 's'}"
        model = found.conversation.model[:MODEL]
        line = f"{found.name:<20}  {when}  {count:<9}  {model:<12}  {first[:60]}"
        print(printable(line.rstrip()), flush=True)
