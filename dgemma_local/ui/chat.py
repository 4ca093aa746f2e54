"""`dgemma chat`: read a line, do what it says, show what comes of it; nothing of a conversation is lost on the way.

    Input ─► commands.parse ─┬─► ACTIONS (chat_actions)       state to state
                             └─► answer (chat_turn)           live, provisional or plain, then saved

Everything but answers goes to stderr. A turn is saved when it ends, however it ends.
"""

import signal
from collections.abc import Sequence
from contextlib import nullcontext

from dgemma_local.chat.commands import Command, Say, Unknown, parse
from dgemma_local.chat.conversation import said
from dgemma_local.errors import INTERRUPTED, DgemmaError, UsageError
from dgemma_local.interrupts import Waiting
from dgemma_local.outcomes import Outcome
from dgemma_local.ui.chat_actions import ACTIONS
from dgemma_local.ui.chat_input import ahead
from dgemma_local.ui.chat_turn import Chat, answer

LEAVE = "Ctrl-D or /exit leaves"
LONGEST = 40  # characters of a name that is none


def run(chat: Chat) -> int:
    """Until it is left. Returns the exit code: in a script that of the worst turn, else 0; 1 where it could not be saved.

    Ctrl-C counts amid a turn and at the prompt, which sees to it itself; between them, however often, it is nothing.
    """
    with Waiting(signal.SIGINT) as signals:
        try:
            _turns(chat, signals)
        finally:
            chat.leave()
            if not chat.scripted:
                signals.forget(signal.SIGINT)
    return worst(chat.codes) if chat.scripted else (DgemmaError.exit_code if chat.at_risk() else 0)


def _turns(chat: Chat, signals: Waiting) -> None:
    while not chat.ended:
        try:
            with signals.heeded() if chat.scripted else nullcontext():
                line = _read(chat)
            if line is None:
                break
            if not chat.scripted:
                signals.forget(signal.SIGINT)
            with ahead(chat.source), signals.heeded():
                take(chat, line)
        except DgemmaError as error:
            chat.failed(error)
        except KeyboardInterrupt:
            if chat.scripted:
                chat.codes.append(INTERRUPTED)
                break
            chat.say(LEAVE)


def _read(chat: Chat) -> str | None:
    draft, chat.draft = chat.draft, ""
    line = chat.source.read(draft)
    if line is None and not chat.scripted:
        chat.say("")  # the prompt's line ends
    return line


def take(chat: Chat, line: str) -> None:
    """One input. Raises DgemmaError for a command that cannot be done, KeyboardInterrupt for Ctrl-C during one."""
    match parse(line):
        case Say(text):
            answer(chat, text, said)
        case Command(name, argument):
            ACTIONS[name](chat, argument)
        case Unknown(name, nearest):
            shown = name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"
            near = f"the nearest is /{nearest}" if nearest else "/help lists them"
            chat.say(f"there is no command /{shown}; {near}; begin with // to send it", "")
            chat.codes.append(UsageError.exit_code)
        case None:
            pass


_WORST = (
    INTERRUPTED,
    *(each.exit_code for each in (Outcome.NUMERIC, Outcome.REFUSED)),
    *(each.exit_code for each in (Outcome.EMPTY, Outcome.THOUGHT_ONLY, Outcome.TOKEN_LIMIT, Outcome.NOT_CONVERGED)),
)  # behind the errors of commands and prompts, which come after the first three


def worst(codes: Sequence[int]) -> int:
    """Of several exit codes the one that says most: what stopped the chat, what failed, what an answer lacked."""

    def rank(code: int) -> tuple[int, int]:
        if code == 0:
            return 3, 0
        if code in _WORST[:3]:
            return 0, _WORST.index(code)
        return (2, _WORST.index(code)) if code in _WORST else (1, code)

    return min(codes, key=rank, default=0)
