"""One turn of a chat: asked, shown as it comes, and kept; and what a chat holds beside the frozen conversation."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from dgemma_local.chat import store
from dgemma_local.chat.conversation import Conversation, Settings, Turn, messages, next_seed, said
from dgemma_local.errors import INTERRUPTED, DgemmaError, NumericalError, RecordingError, UsageError
from dgemma_local.interrupts import undisturbed
from dgemma_local.outcomes import Outcome
from dgemma_local.recording import Recorder
from dgemma_local.states import Seen
from dgemma_local.ui.canvas import Vocabulary
from dgemma_local.ui.chat_input import Input
from dgemma_local.ui.chat_page import ChatPage, Markdown, print_lines
from dgemma_local.ui.frame import Sight
from dgemma_local.ui.live import live, printed
from dgemma_local.ui.page import Page
from dgemma_local.ui.paint import theme
from dgemma_local.ui.plain import plain
from dgemma_local.ui.record import Reader, Record, Timed
from dgemma_local.ui.settled import provisional
from dgemma_local.ui.terminal import Terminal

# What an outcome says in flags -> in commands.
_HERE = (
    (re.compile(r"give another --seed"), "say /retry"),
    (re.compile(r"leave --think out"), "say /think off"),
    (re.compile(r"give another --stop"), "say /set stop default"),
    (re.compile(r"plan for a longer one \(--context\)"), "say /undo or /clear, or begin with a longer --context"),
    (
        re.compile(r"shorten (it to [\d,]+ tokens(, or plan .*\(--context\))?|the prompt)"),
        "say /undo or /clear, or shorten the message",
    ),
    (re.compile(r"give (a file in it|another file) to --record"), "say /record FILE with another name"),
    (re.compile(r"`?--dtype float32`?"), "a chat begun with --dtype float32"),
    (re.compile(r"--(max-tokens|steps|preset|stop|think-tokens)"), r"/set \1"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One answer on its way; nothing has been computed yet."""

    events: Iterable[Timed]
    record: Record
    fresh: Callable[[], Reader]  # makes a reader like the record's
    recording: AbstractContextManager[Recorder | None]


class Model(Protocol):
    """An opened model, as a chat needs it."""

    @property
    def name(self) -> str: ...
    @property
    def demo(self) -> bool: ...
    @property
    def context(self) -> int: ...  # tokens
    @property
    def vocabulary(self) -> Vocabulary: ...

    def switch(self, name: str) -> None:
        """Another model in its place. Raises DgemmaError where there is none; the one before then stays."""
        ...

    def ask(self, messages: Sequence[Mapping[str, str]], seed: int, settings: Settings, to: Path | None) -> Asked:
        """Raises PromptError where the messages are no text, or too long for any context."""
        ...

    def tokens(self, messages: Sequence[Mapping[str, str]], *, thinking: bool) -> int:
        """Of the prompt they make. Raises as `ask` does."""
        ...


@dataclass(slots=True, kw_only=True)
class Chat:
    """What a chat holds beside the frozen conversation."""

    conversation: Conversation
    model: Model
    source: Input
    terminal: Terminal
    draw: Callable[[int], int]  # a whole number below the one given
    folder: Path | None = None  # of conversations; None: nothing is saved
    saved: Conversation | None = None  # what the conversation's file holds, as far as this chat has read or written it
    unsaved: bool = False  # it should be saved as it is, and could not
    exported: Conversation | None = None  # the latest that went into a file elsewhere
    scripted: bool = False  # nobody types
    visualize: bool = False
    recording: Path | None = None
    recorded: int = 0  # answers since `recording` was set
    draft: str = ""  # what the next prompt begins with
    latest: tuple[Record, float] | None = None  # the last answer's, and its seconds
    codes: list[int] = field(default_factory=list)  # exit codes, of turns and of what failed
    ended: bool = False

    def say(self, text: str, style: str = "dim") -> None:
        self.terminal.say(text, style=style)

    def update(self, conversation: Conversation) -> None:
        """Takes it over, and saves what can be lost."""
        self._told(self.keep(conversation))

    def keep(self, conversation: Conversation) -> str:
        """As `update`; the line that there is to say of it, or nothing."""
        self.conversation = conversation
        if self.folder is None or not (conversation.turns or self.saved):
            return ""
        self.unsaved, before = True, self.saved
        with undisturbed():  # it would take its own file for another's
            try:
                kept = store.kept(conversation, before, self.folder)
            except OSError as error:
                return f"this conversation cannot be saved: {error.strerror}; make room, or /export it elsewhere"
            self.conversation = self.saved = kept
            self.unsaved = False
        if before is None or kept.name == conversation.name:
            return ""
        return f"{conversation.name} was changed elsewhere and stays so; this chat goes on as {kept.name}"

    def secure(self) -> None:
        """Before the conversation is put away: what could not be saved is tried again.

        Raises UsageError where it still cannot be, and was not exported as it is either.
        """
        line = self.keep(self.conversation) if self.at_risk() else ""
        if self.at_risk():
            raise UsageError(line.partition(";")[0], "make room, or /export it first")
        self._told(line)

    def leave(self) -> None:
        """The last attempt to save what could not be; an exit code says that it failed."""
        if self.unsaved:
            self._told(self.keep(self.conversation))
        if self.at_risk():
            self.codes.append(DgemmaError.exit_code)

    def at_risk(self) -> bool:
        """Whether it is neither saved, as it should be, nor exported as it is."""
        return self.unsaved and self.exported != self.conversation

    def _told(self, line: str) -> None:
        if line:
            self.say(line, "")

    def failed(self, error: DgemmaError) -> None:
        self.say(f"{error.what}\n  fix: {_here(error.fix)}", "")
        self.codes.append(error.exit_code)


def answer(chat: Chat, user: str, join: Callable[[Conversation, Turn], Conversation]) -> None:
    """Asks, shows the answer as it comes, and keeps it. join: how the turn becomes part of the conversation.

    Raises DgemmaError where nothing was asked: the conversation is then as it was. Whatever else ends an answer (SIGTERM,
    a reader that has gone, an error amid it) is raised when the turn is saved.
    """
    before = chat.conversation
    history = before if join is said else replace(before, turns=before.turns[:-1])
    seed = next_seed(before, chat.draw)
    asked = _asked(chat, messages(history, user), seed)
    record = asked.record
    lost: BaseException | None = None
    said_of_it = ""
    began = time.perf_counter()
    with undisturbed() as signals:  # none of them comes between what is committed and its file
        try:
            with asked.recording as record.recorder, signals.heeded():
                _show(chat, asked)
        except NumericalError as error:
            said_of_it = f"{error.what}\n  fix: {_here(error.fix)}"
            outcome, code = Outcome.NUMERIC, error.exit_code
        except KeyboardInterrupt:
            said_of_it = "interrupted"
            outcome, code = Outcome.INTERRUPTED, INTERRUPTED
        except BaseException as error:  # nobody reads it any more, or asks; it is kept all the same
            if isinstance(error, DgemmaError) and not any(record.text.values()):
                raise
            outcome, code, lost = Outcome.INTERRUPTED, 0, error
        else:
            outcome, code = record.verdict.outcome, record.verdict.outcome.exit_code
        chat.latest = record, time.perf_counter() - began
        chat.codes.append(code)
        turn = Turn(
            user=user,
            answer=record.text["answer"],
            thought=record.text["thought"],
            ids=record.finished.tokens if record.finished else (),
            outcome=outcome.value,
            seed=seed,
            time=now(),
        )
        of_the_file = chat.keep(join(before, turn))
        if outcome is Outcome.INTERRUPTED:
            signals.forget(signal.SIGINT)  # they were meant for the answer
    for line in filter(None, (said_of_it, of_the_file)):
        chat.say(line, "")
    if chat.conversation.turns[-1] != turn:
        chat.say("the answer before it stays", "")
    if lost is not None:
        raise lost
    _notices(chat, record)
    if chat.scripted and outcome is Outcome.INTERRUPTED:
        chat.ended = True


def _asked(chat: Chat, told: Sequence[Mapping[str, str]], seed: int) -> Asked:
    """A recording that cannot be begun costs no answer. Raises as `Model.ask` does."""
    settings, to = chat.conversation.settings, _recording(chat)
    try:
        return chat.model.ask(told, seed, settings, to)
    except RecordingError as error:
        chat.say(f"{error.what}; nothing is recorded any more", "")
        chat.codes.append(error.exit_code)
        chat.recording = None
        return chat.model.ask(told, seed, settings, None)


def _show(chat: Chat, asked: Asked) -> None:
    out, terminal, record, settings = sys.stdout, chat.terminal, asked.record, chat.conversation.settings
    thoughts, shared = settings.show_thoughts, out.isatty()
    sight = Sight(label=chat.model.name, vocabulary=chat.model.vocabulary)
    record.watched = Seen(chat.model.vocabulary.ends)
    if chat.visualize and terminal.writes:
        page = ChatPage(out if shared else sys.stderr, terminal, thoughts=thoughts)
        copy = None if shared else Page(out, None)
        if terminal.redraws:
            live(asked.events, record, page, terminal, sight, theme("auto"), copy=copy)
        else:
            printed(asked.events, record, page, terminal, sight, copy=copy)
    elif shared and (screen := Terminal(out)).redraws:
        page = ChatPage(out, terminal, thoughts=thoughts)
        provisional(
            asked.events, record, page, screen, sight, theme("auto"),
            fresh=asked.fresh, stop=settings.stop, thoughts=thoughts,
        )  # fmt: skip
    else:
        plain(asked.events, record, Page(out, terminal, thoughts=thoughts))


def _notices(chat: Chat, record: Record) -> None:
    if record.text["thought"].strip() and not chat.conversation.settings.show_thoughts:
        chat.say(f"thought: {record.thought_tokens} tokens (/think show prints the next ones)")
    if record.finished is not None:
        lines = record.notices()
        verdict = record.verdict
        complete = verdict.outcome is Outcome.COMPLETE
        for line in [each for each in lines if each != verdict.line] + ([] if complete else [verdict.line]):
            chat.say(_here(line), "")
    if record.recorder is not None and record.recorder.failed is not None:
        chat.say(f"{record.recorder.failed}; nothing is recorded any more", "")
        chat.recording = None


def _recording(chat: Chat) -> Path | None:
    """A file an answer: FILE.jsonl, then FILE-2.jsonl …; those that are there already are passed over."""
    if chat.recording is None:
        return None
    name, dot, endings = chat.recording.name.partition(".")
    while True:
        chat.recorded += 1
        number = "" if chat.recorded == 1 else f"-{chat.recorded}"
        path = chat.recording.with_name(f"{name}{number}{dot}{endings}")
        if not os.path.lexists(path):
            return path


def _here(line: str) -> str:
    for flag, command in _HERE:
        line = flag.sub(command, line)
    return line


def recap(chat: Chat) -> None:
    """Where a conversation stood, for whoever goes on with it."""
    turns = chat.conversation.turns
    chat.say(f"{chat.conversation.name}: {len(turns)} turn{'' if len(turns) == 1 else 's'}")
    if turns and not chat.scripted:
        for line in turns[-1].user.splitlines():
            chat.say(f"> {line}")
        if turns[-1].answer.strip():
            print_lines(chat.terminal, Markdown().lines(turns[-1].answer))
        if turns[-1].outcome != Outcome.COMPLETE.value:
            chat.say(turns[-1].outcome.replace("_", " "))


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
