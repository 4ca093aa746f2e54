"""A fake session that a chat can be held with: an answer of its own for each turn."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from fake_session import FakeSession

from dgemma_local.errors import DgemmaError
from dgemma_local.events import Event, Finished


@dataclass
class FakeChat(FakeSession):
    """Gives its answers one after the other, the last one again and again; an error among them is raised."""

    answers: Sequence[str | DgemmaError | KeyboardInterrupt] = ("Hi user",)
    prompts: list[Any] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)

    @property
    def conversation(self) -> Any:
        return SimpleNamespace(context=1000)

    def answer(self, messages: Sequence[Any], *, seed: int, max_tokens: int, **rest: Any) -> Iterator[Event]:
        found = self.answers[min(len(self.prompts), len(self.answers) - 1)]
        self.prompts.append([dict(each) for each in messages])
        self.seeds.append(seed)
        self.asked = rest
        if isinstance(found, DgemmaError | KeyboardInterrupt):
            raise found
        self.text = found
        interrupted = self.reason == "interrupted"
        for event in super().answer(messages, seed=seed, max_tokens=max_tokens, **rest):
            if interrupted and isinstance(event, Finished):
                event = Finished("interrupted", event.tokens, event.canvases, event.steps)
            yield event
