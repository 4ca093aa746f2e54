"""Conversations for tests: any at all, and short ones."""

from typing import Any

from hypothesis import strategies as st

from dgemma_local.chat.conversation import SEEDS, Conversation, Settings, Turn
from dgemma_local.presets import Preset

TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
TURNS = st.builds(
    Turn,
    user=TEXTS,
    answer=st.one_of(st.just(""), TEXTS),
    thought=TEXTS,
    ids=st.lists(st.integers(0, 262_143), max_size=5).map(tuple),
    outcome=st.sampled_from(["complete", "interrupted", "empty"]),
    seed=st.integers(0, SEEDS - 1),
    time=TEXTS,
)
SETTINGS = st.builds(
    Settings,
    max_tokens=st.integers(1, 9999),
    steps=st.none() | st.integers(1, 4096),
    preset=st.none() | st.sampled_from(Preset),
    seed=st.none() | st.integers(0, SEEDS - 1),
    thinking=st.booleans(),
    think_tokens=st.none() | st.integers(1, 99),
    show_thoughts=st.booleans(),
    stop=st.lists(TEXTS.filter(bool), max_size=2).map(tuple),
)
CONVERSATIONS = st.builds(
    Conversation,
    name=st.just("a name"),
    model=TEXTS,
    started=TEXTS,
    system=st.none() | TEXTS,
    settings=SETTINGS,
    asked=st.integers(0, 99),
    turns=st.lists(TURNS, max_size=5).map(tuple),
)


def pairs(*turns: tuple[str, str], **rest: Any) -> Conversation:
    return Conversation(name="n", model="m", turns=tuple(Turn(user=u, answer=a) for u, a in turns), **rest)
