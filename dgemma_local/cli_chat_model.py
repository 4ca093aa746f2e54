"""A session as a chat needs it: asked turn by turn, and exchanged for another one."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dgemma_local.cli_flags import Prefer
from dgemma_local.cli_session import picked, reach, recorder, vocabulary
from dgemma_local.streams import say

if TYPE_CHECKING:
    from dgemma_local.chat.conversation import Settings
    from dgemma_local.presets import Preset
    from dgemma_local.session import Session, Wishes
    from dgemma_local.tokens import Message
    from dgemma_local.ui.canvas import Vocabulary
    from dgemma_local.ui.chat_turn import Asked


class Opened:
    """`ui.chat_turn.Model`. Its constructor raises as `session.open_session` does.

    preset: the one among the wishes.
    """

    def __init__(
        self, name: str, wishes: "Wishes", prefer: Prefer | None = None, preset: "Preset | None" = None
    ) -> None:
        self._wishes, self._prefer, self._wished = wishes, prefer, preset
        self._preset = preset  # that the session's settings are of
        self._held: Session | None = self._opened(name)
        self._name = self._held.name

    @property
    def name(self) -> str:
        return self._name

    @property
    def _session(self) -> "Session":
        """Open; where another one could not take its place, it is opened again now."""
        if self._held is None:
            self._held = self._opened(self._name)
        return self._held

    @property
    def demo(self) -> bool:
        return self._session.is_demo

    @property
    def context(self) -> int:
        """Tokens of prompt and answer."""
        return self._session.conversation.context

    @property
    def vocabulary(self) -> "Vocabulary":
        return vocabulary(self._session)

    def ask(self, messages: Sequence[Mapping[str, str]], seed: int, settings: "Settings", to: Path | None) -> "Asked":
        """One answer, not begun; `to` gets its recording. Raises PromptError, and what reading a preset's base does."""
        from dgemma_local.channels import AnswerDecoder, opens_channel
        from dgemma_local.session import timed
        from dgemma_local.ui import Record, Start
        from dgemma_local.ui.chat_turn import Asked

        session, thinking, told = self._tuned(settings.preset), settings.thinking, _told(messages)
        ids = session.prompt(told, thinking=thinking)
        fresh = partial(AnswerDecoder, session.tokenizer, open_channel=opens_channel(ids, session.tokenizer.special))
        start = Start(
            model=session.name,
            demo=session.is_demo,
            seed=seed,
            max_tokens=settings.max_tokens,
            steps=settings.steps or session.steps,
            canvas_length=session.canvas_length,
            settings=session.settings,
        )
        events = session.answer(
            told,
            seed=seed,
            max_tokens=settings.max_tokens,
            steps=settings.steps,
            thinking=thinking,
            think_tokens=settings.think_tokens if thinking else None,
            stop=settings.stop,
        )
        return Asked(
            events=timed(events),
            record=Record(start, fresh(), withheld=reach(settings.stop), thinking=thinking),
            fresh=fresh,
            recording=recorder(to, session, start, ids, thinking=thinking),
        )

    def tokens(self, messages: Sequence[Mapping[str, str]], *, thinking: bool) -> int:
        """Of the prompt they make. Raises PromptError."""
        return len(self._session.prompt(_told(messages), thinking=thinking))

    def switch(self, name: str) -> None:
        """Another model in its place. Where that cannot be opened, what stopped it is raised, and this one stays.

        There may be memory for one alone, so the old one goes first, and is opened again when it is needed; a name that
        is none is found out before.
        """
        from dgemma_local import hub
        from dgemma_local.registry import resolve

        resolve(name, hub.folder_of)
        self._held = None
        self._held = self._opened(name)
        self._name = self._held.name

    def _tuned(self, preset: "Preset | None") -> "Session":
        """The session with the preset's settings. Those of its own are read again: it holds what it was opened with."""
        session = self._session
        if preset != self._preset:
            from dgemma_local import hub
            from dgemma_local.config import load_generation_config
            from dgemma_local.presets import applied
            from dgemma_local.registry import resolve

            own = load_generation_config(resolve(self._name, hub.folder_of)[1], session.tokenizer.vocab_size)
            session.generation, self._preset = applied(own, preset), preset
        return session

    def _opened(self, name: str) -> "Session":
        from dgemma_local.session import open_session
        from dgemma_local.ui import loading

        with loading.progress() as progress:
            session = open_session(picked(name, self._prefer, quiet=False), self._wishes, progress, say)
        self._preset = self._wished
        if session.slow_because is not None and session.on_gpu:
            say(f"this runs in plain torch, many times slower than the fused kernels: {session.slow_because}")
        for notice in session.notices:
            say(notice)
        return session


def _told(messages: Sequence[Mapping[str, str]]) -> "list[Message]":
    from dgemma_local.tokens import Message

    return [Message(role=each["role"], content=each["content"]) for each in messages]
