"""What a chat leaves to the cache, on the demo model: a turn reads the answer before it and itself, however long the past."""

from dataclasses import replace
from itertools import takewhile
from typing import Any

import pytest
import torch

from dgemma_local.cache import Cache
from dgemma_local.chat.conversation import Conversation, Settings, messages, said
from dgemma_local.cli_chat_model import Opened
from dgemma_local.model import DiffusionGemma
from dgemma_local.session import Session, Wishes
from dgemma_local.tokens import Message
from dgemma_local.ui.chat_actions import ACTIONS
from dgemma_local.ui.chat_turn import Chat, answer
from dgemma_local.ui.terminal import stderr

QUESTIONS = [f"Spell {word}." for word in "river stone cloud green light table horse apple bread chair".split()]
CLOSING = 5  # tokens between a question and its answer: they are gone where none came and the next question follows
SINGLE = Wishes(dtype="float32", device="cpu")


def begun(**settings: Any) -> Chat:
    model = Opened("demo-text", SINGLE)
    conversation = Conversation(name="n", model=model.name, settings=Settings(seed=3, max_tokens=192, **settings))
    return Chat(
        conversation=conversation, model=model, source=Nobody(), terminal=stderr(), draw=lambda most: 0, scripted=True
    )


class Nobody:
    multi = False

    def read(self, draft: str = "") -> str | None:
        return None


def session_of(chat: Chat) -> Session:
    assert isinstance(chat.model, Opened)
    return chat.model._session


def prompt(chat: Chat, user: str) -> tuple[int, ...]:
    """Ids of the turn to come."""
    told = [Message(role=each["role"], content=each["content"]) for each in messages(chat.conversation, user)]
    return session_of(chat).prompt(told, thinking=chat.conversation.settings.thinking)


@pytest.mark.parametrize("thinking", [False, True])
def test_a_turn_reads_the_answer_before_it_and_itself(thinking: bool) -> None:
    chat = begun(thinking=thinking)
    past: tuple[int, ...] = ()
    read = []
    for question in QUESTIONS:
        whole = prompt(chat, question)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(past, whole, strict=False)))
        assert shared >= len(past) - CLOSING
        answer(chat, question, said)
        assert chat.latest is not None
        record, _ = chat.latest
        assert record.prompt == len(whole) and record.reused >= shared
        read.append(record.prompt - record.reused)
        past = whole
    added = len(past) // len(QUESTIONS)
    assert len(past) > 5 * max(read[1:]) and max(read[1:]) < 3 * added
    assert len(chat.conversation.turns) == len(QUESTIONS)


def test_turn_ten_is_what_a_new_cache_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step, from the same canvas and signal: a step's own difference, not what later ones make of it.

    Left to itself, a canvas that does not settle raises it through self-conditioning from step to step, without bound.
    """
    steps: list[tuple[torch.Tensor, torch.Tensor | None, int, torch.Tensor]] = []
    denoise = DiffusionGemma.denoise

    def watched(self: DiffusionGemma, canvas: torch.Tensor, cache: Cache, signal: torch.Tensor | None) -> torch.Tensor:
        logits = denoise(self, canvas, cache, signal)
        steps.append((canvas.clone(), None if signal is None else signal.clone(), cache.length, logits.clone()))
        return logits

    monkeypatch.setattr(DiffusionGemma, "denoise", watched)
    chat = begun()
    for question in QUESTIONS[:9]:
        answer(chat, question, said)
    before = chat.conversation
    steps.clear()
    answer(chat, QUESTIONS[9], said)
    assert chat.latest is not None and chat.latest[0].reused > 0

    taken = iter(steps)

    def led(self: DiffusionGemma, canvas: torch.Tensor, cache: Cache, signal: torch.Tensor | None) -> torch.Tensor:
        canvas, signal, length, logits = next(taken)
        assert cache.length == length
        torch.testing.assert_close(denoise(self, canvas, cache, signal), logits, atol=5e-5, rtol=0)
        return logits

    monkeypatch.setattr(DiffusionGemma, "denoise", led)
    anew = begun()
    anew.conversation = before
    answer(anew, QUESTIONS[9], said)
    assert next(taken, None) is None and len(steps) > 2
    assert anew.latest is not None and anew.latest[0].reused == 0
    assert anew.conversation.turns[-1].answer == chat.conversation.turns[-1].answer


def test_a_turn_taken_back_and_a_retry_read_nothing_of_the_past_anew() -> None:
    chat = begun()
    for question in QUESTIONS[:3]:
        answer(chat, question, said)
    whole = prompt(
        replace(chat, conversation=replace(chat.conversation, turns=chat.conversation.turns[:-1])), QUESTIONS[2]
    )
    ACTIONS["retry"](chat, "")
    assert chat.latest is not None
    assert (chat.latest[0].prompt, chat.latest[0].reused) == (len(whole), len(whole))
    ACTIONS["undo"](chat, "")
    answer(chat, "Spell bread.", said)
    assert chat.latest[0].prompt - chat.latest[0].reused < 20
