"""The engine over a fake model: what is said in which order, what is encoded when, and why an answer ends."""

import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from fake import END, GENERATION, MARK, PAD, FakeCache, FakeModel
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma_local.cache import Room
from dgemma_local.engine import Conversation
from dgemma_local.errors import NumericalError, PromptError
from dgemma_local.events import CanvasCommitted, Event, Finished, Prefilled, StepDone
from dgemma_local.noise import PhiloxNoise

PROMPT = (9, 8, MARK)
LONG = tuple(range(10, 30))  # five canvases of four, no end


def talk(model: FakeModel) -> Conversation[FakeCache]:
    return Conversation(model)


def noise_of(model: FakeModel, seed: int = 1) -> PhiloxNoise:
    return PhiloxNoise(seed, model.canvas_length, model.vocab_size, model.device)


def answer(model: FakeModel, prompt: Sequence[int] = PROMPT, max_tokens: int = 1000, **rest: Any) -> list[Event]:
    return list(talk(model).answer(prompt, GENERATION, noise_of(model), max_tokens, **rest))


def finished(events: list[Event]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


def commits(events: list[Event]) -> list[CanvasCommitted]:
    return [event for event in events if isinstance(event, CanvasCommitted)]


def after(calls: int) -> Callable[[], bool]:
    """False so many times, then True."""
    left = iter([False] * calls)
    return lambda: next(left, True)


def starts_with(stop: Sequence[int]) -> Callable[[Sequence[int]], int | None]:
    """A stop string of whole tokens."""

    def find(tokens: Sequence[int]) -> int | None:
        n = len(stop)
        return next((i for i in range(len(tokens) - n + 1) if list(tokens[i : i + n]) == list(stop)), None)

    return find


# ── the grammar of events ─────────────────────────────────────────────────────────────────────────────────────────

LETTER = {Prefilled: "p", StepDone: "s", CanvasCommitted: "c", Finished: "f"}


@given(
    length=st.integers(1, 7),
    words=st.integers(0, 20),
    ends=st.booleans(),
    doubt=st.integers(0, 9),
    budget=st.integers(1, 25),
    room=st.integers(3, 30),
    calls=st.integers(0, 60),
)
@settings(max_examples=150, deadline=None)
def test_every_answer_keeps_to_the_grammar(
    length: int, words: int, ends: bool, doubt: int, budget: int, room: int, calls: int
) -> None:
    script = [*LONG[:words], *([END] if ends else [])]
    model = FakeModel(script, canvas_length=length, doubt=doubt, max_positions=room + length)
    events = answer(model, max_tokens=budget, interrupted=after(calls))
    assert re.fullmatch("p(s+c)*s*f", "".join(LETTER[type(event)] for event in events))
    last, done = finished(events), commits(events)
    steps = [event for event in events if isinstance(event, StepDone)]

    assert [c.canvas for c in done] == list(range(len(done))) and last.canvases == len(done)
    assert last.steps == len(steps) == len(model.fed)
    whole = [token for c in done for token in c.tokens]
    assert list(last.tokens) == whole[: len(last.tokens)] and len(last.tokens) <= budget and END not in last.tokens
    assert sum(c.kept for c in done) == len(last.tokens)
    assert all(c.kept == length for c in done[:-1])

    for number in range(len(done) + 1):
        own = [event for event in steps if event.canvas == number]
        assert [event.step for event in own] == list(range(len(own)))
        assert not any(event.done for event in own[:-1])
        assert all(a.next == b.fed for a, b in pairwise(own))
        if number < len(done):
            assert own[-1].done and done[number].steps == len(own)
            assert own[-1].next == own[-1].draft == done[number].tokens
            assert done[number].converged is (doubt + 2 <= GENERATION.steps)
    for event in steps:
        width = {len(t) for t in (event.fed, event.draft, event.accepted, event.next, event.entropy)}
        assert width == {length} and event.steps == GENERATION.steps
        assert all(type(x) is int for x in (*event.fed, *event.draft, *event.next))
        assert all(type(x) is bool for x in event.accepted) and all(type(x) is float for x in event.entropy)
    if doubt + 2 <= GENERATION.steps:
        assert last.tokens == LONG[: min(words, len(last.tokens))] + (PAD,) * (len(last.tokens) - words)
    held = [*PROMPT, *(token for c in done[: len(model.encoded) - 1] for token in c.tokens)]
    assert [token for ids in model.encoded for token in ids] == held


def test_a_whole_answer_event_by_event() -> None:
    model = FakeModel([10, 11, 12, 13, 14, END])
    events = answer(model)
    first = noise_of(model).canvas(0).tolist()
    step = events[1]
    assert events[0] == Prefilled(tokens=3, reused=0)
    assert isinstance(step, StepDone)
    assert step == replace(step, canvas=0, step=0, steps=8, fed=tuple(first), draft=(10, 11, 12, 13), done=False)
    assert step.temperature == pytest.approx(0.8) and step.accepted == (True,) * 4 and step.next == (10, 11, 12, 13)
    assert events[3] == CanvasCommitted(canvas=0, tokens=(10, 11, 12, 13), kept=4, steps=2, converged=True)
    assert events[6] == CanvasCommitted(canvas=1, tokens=(14, END, PAD, PAD), kept=1, steps=2, converged=True)
    assert events[7:] == [Finished(reason="end", tokens=(10, 11, 12, 13, 14), canvases=2, steps=4)]


def test_each_step_gets_the_logits_of_the_one_before_and_each_canvas_starts_without() -> None:
    model = FakeModel([*LONG[:6], END], doubt=1)
    answer(model)
    previous = [logits for _, logits in model.fed]
    assert [logits is None for logits in previous] == [True, False, False] * 2
    t = 0.4 + 0.4 * 7 / 8
    assert previous[2] is not None
    torch.testing.assert_close(previous[2].amax(-1), torch.full((4,), 30.0 / t))
    assert [fed for fed, _ in model.fed][::3] == [noise_of(model).canvas(n).tolist() for n in (0, 1)]


class Signals(FakeModel):
    """Makes something of its own of a step's logits, and looks whether they are gone when the next one begins."""

    logits: "list[weakref.ref[torch.Tensor]]"

    def signal(self, logits: torch.Tensor) -> torch.Tensor:
        self.logits = [*getattr(self, "logits", []), weakref.ref(logits)]
        return logits.argmax(-1)

    def denoise(self, canvas: torch.Tensor, cache: FakeCache, previous: torch.Tensor | None) -> torch.Tensor:
        assert all(logits() is None for logits in getattr(self, "logits", []))
        return super().denoise(canvas, cache, previous)


def test_a_model_s_own_signal_stands_for_the_logits_and_they_are_dropped() -> None:
    model, plain = Signals([*LONG[:6], END], doubt=1), FakeModel([*LONG[:6], END], doubt=1)
    assert answer(model) == answer(plain)
    signals = [signal for _, signal in model.fed]
    assert [None if signal is None else signal.tolist() for signal in signals[:3]] == [
        None,
        *(logits.argmax(-1).tolist() for _, logits in plain.fed[1:3] if logits is not None),
    ]
    assert len(model.logits) == 4  # not of a canvas's last step, which no other follows


def test_the_same_seed_gives_the_same_events_and_another_does_not() -> None:
    def events(seed: int) -> list[Event]:
        model = FakeModel([*LONG[:6], END], doubt=3)
        return list(talk(model).answer(PROMPT, GENERATION, noise_of(model, seed), 1000))

    assert events(4) == events(4)
    assert events(4) != events(5)


# ── why an answer ends ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("script", "budget", "stop", "reason", "tokens", "canvases"),
    [
        ([10, END], 1000, (), "end", [10], 1),
        ([END], 1000, (), "end", [], 1),  # an empty answer
        ([10, 11, 12, 13, END], 1000, (), "end", [10, 11, 12, 13], 2),
        ([10, 11, 12, END], 1000, (), "end", [10, 11, 12], 1),
        (LONG, 6, (), "budget", LONG[:6], 2),
        (LONG, 4, (), "budget", LONG[:4], 1),  # to the edge of a canvas
        (LONG, 1, (), "budget", LONG[:1], 1),
        ([10, 11, END], 2, (), "end", [10, 11], 1),  # both at one place: the model had finished
        ([10, 11, 12, END], 2, (), "budget", [10, 11], 1),
        ([10, END], 3, (), "end", [10], 1),
        (LONG, 1000, (12,), "stop", [10, 11], 1),
        (LONG, 1000, (13, 14), "stop", [10, 11, 12], 2),  # across two canvases
        (LONG, 1000, (10,), "stop", [], 1),
        ([10, END, 12], 1000, (12,), "end", [10], 1),
        ([10, 12, END], 1000, (12,), "stop", [10], 1),
        (LONG, 2, (12,), "budget", [10, 11], 1),
        (LONG, 3, (12,), "stop", [10, 11], 1),
        (LONG, 2, (11, 12), "budget", [10, 11], 1),  # its second half is past the budget
    ],
)
def test_whatever_comes_first(
    script: Sequence[int], budget: int, stop: Sequence[int], reason: str, tokens: Sequence[int], canvases: int
) -> None:
    model = FakeModel(script)
    events = answer(model, max_tokens=budget, **({"stop": starts_with(stop)} if stop else {}))
    assert finished(events) == Finished(reason, tuple(tokens), canvases, 2 * canvases)  # type: ignore[arg-type]
    assert len(commits(events)) == len(model.encoded) == canvases


def test_any_of_the_end_ids_ends() -> None:
    for end in (5, 6):
        model = FakeModel([10, end, 11])
        config = replace(GENERATION, end_ids=(5, 6))
        *_, last = talk(model).answer(PROMPT, config, noise_of(model), 100)
        assert last == Finished("end", (10,), 1, 2)


def test_the_whole_canvas_is_reported_and_its_kept_part_counted() -> None:
    done = commits(answer(FakeModel([10, 11, 12, 13, 14, END, 15, 16])))
    assert [(c.tokens, c.kept) for c in done] == [((10, 11, 12, 13), 4), ((14, END, 15, 16), 1)]
    done = commits(answer(FakeModel(LONG), max_tokens=6))
    assert [c.kept for c in done] == [4, 2]


def test_a_stop_string_that_began_a_canvas_ago_takes_tokens_back() -> None:
    events = answer(FakeModel(LONG), stop=starts_with((12, 13, 14)))
    assert [c.kept for c in commits(events)] == [4, 0]
    assert finished(events).tokens == (10, 11)


def test_stop_sees_the_answer_without_its_end_and_budget() -> None:
    seen: list[list[int]] = []
    answer(FakeModel([*LONG[:6], END, 30]), stop=lambda tokens: seen.append([*tokens]))
    answer(FakeModel(LONG), max_tokens=3, stop=lambda tokens: seen.append([*tokens]))
    assert seen == [[*LONG[:4]], [*LONG[:6]], [*LONG[:3]]]


@pytest.mark.parametrize("canvas", [1, 4, 5])
def test_the_context_is_filled_to_the_last_canvas_that_fits(canvas: int) -> None:
    for spare in range(canvas):
        model = FakeModel(LONG, canvas_length=canvas, max_positions=3 + 2 * canvas + spare)
        last = finished(answer(model))
        assert (last.reason, last.tokens) == ("context", LONG[: 2 * canvas])
        ended = finished(answer(replace(model, script=[*LONG[: 2 * canvas - 1], END])))
        assert ended.reason == "end"  # a full context is no matter to an answer that is over
        assert finished(answer(model, max_tokens=2 * canvas)).reason == "budget"


def test_the_longest_prompt_leaves_one_canvas() -> None:
    model = FakeModel([10, END], max_positions=20)
    longest = [9] * 15 + [MARK]
    assert finished(answer(model, longest)).reason == "end"
    with pytest.raises(
        PromptError, match="the prompt has 17 tokens, and with a canvas of 4 the context of 20"
    ) as caught:
        answer(model, [9, *longest])
    assert caught.value.fix == "shorten it to 16 tokens"


def test_a_refused_prompt_leaves_the_conversation_as_it_was() -> None:
    model = FakeModel([10, END], max_positions=20)
    conversation = talk(model)
    list(conversation.answer(PROMPT, GENERATION, noise_of(model), 100))
    with pytest.raises(PromptError):
        list(conversation.answer([9] * 30, GENERATION, noise_of(model), 100))
    assert conversation.held == list(PROMPT) and conversation.cache.tokens == list(PROMPT)


# ── interruptions and accidents ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("calls", "steps", "tokens"),
    [
        (0, 0, ()),
        (1, 1, ()),
        (2, 2, LONG[:4]),  # asked after the canvas was done: it is committed
        (3, 2, LONG[:4]),
        (4, 3, LONG[:4]),
    ],
)
def test_interrupted_between_steps(calls: int, steps: int, tokens: tuple[int, ...]) -> None:
    model = FakeModel(LONG)
    last = finished(answer(model, interrupted=after(calls)))
    assert last == Finished("interrupted", tokens, len(tokens) // 4, steps)


def test_an_answer_that_ended_is_not_interrupted() -> None:
    assert finished(answer(FakeModel([10, END]), interrupted=after(2))).reason == "end"


@pytest.mark.parametrize(("at", "tokens"), [(0, ()), (1, ()), (2, LONG[:4]), (5, LONG[:8])])
def test_ctrl_c_inside_a_step(at: int, tokens: tuple[int, ...]) -> None:
    def press(number: int) -> None:
        if number == at:
            raise KeyboardInterrupt

    last = finished(answer(FakeModel(LONG, before=press)))
    assert last == Finished("interrupted", tokens, len(tokens) // 4, at)


class InterruptedOnce(FakeModel):
    """Encodes half of what it should, then Ctrl-C."""

    def encode(self, ids: torch.Tensor, cache: FakeCache) -> None:
        if not self.encoded:
            super().encode(ids[: len(ids) // 2], cache)
            raise KeyboardInterrupt
        super().encode(ids, cache)


def test_ctrl_c_inside_the_prefill() -> None:
    model = InterruptedOnce([10, END])
    conversation = talk(model)
    assert list(conversation.answer(PROMPT, GENERATION, noise_of(model), 100)) == [Finished("interrupted", (), 0, 0)]
    *_, last = conversation.answer(PROMPT, GENERATION, noise_of(model), 100)
    assert last == Finished("end", (10,), 1, 2)
    assert conversation.held == conversation.cache.tokens == [*PROMPT]


def test_ctrl_c_may_leave_a_torn_cache_behind() -> None:
    """It can strike between a layer's keys and its values: such a cache is not used again."""
    model = FakeModel(LONG)
    conversation = talk(model)

    def tear(number: int) -> None:
        if number == 3:
            conversation.cache.tokens[1] = 31
            raise KeyboardInterrupt

    model.before = tear
    *_, last = conversation.answer(PROMPT, GENERATION, noise_of(model), 100)
    assert last == Finished("interrupted", LONG[:4], 1, 3)
    model.before = lambda _: None
    list(conversation.answer(PROMPT, GENERATION, noise_of(model), 4))
    assert conversation.held == conversation.cache.tokens == [*PROMPT]


@pytest.mark.parametrize("at", range(7))
def test_an_answer_after_an_interrupted_one_is_as_from_a_new_conversation(at: int) -> None:
    model = FakeModel(LONG)
    conversation = talk(model)
    list(conversation.answer(PROMPT, GENERATION, noise_of(model), 100, interrupted=after(at)))
    second = (*PROMPT, *LONG[:4], 7, MARK)
    again = list(conversation.answer(second, GENERATION, noise_of(model), 9))
    assert again[1:] == answer(FakeModel(LONG), second, 9)[1:]
    assert conversation.held == conversation.cache.tokens == [*second, *LONG[:8]]


def test_an_answer_that_is_dropped_half_way_is_no_burden() -> None:
    model = FakeModel(LONG)
    conversation = talk(model)
    events = conversation.answer(PROMPT, GENERATION, noise_of(model), 100)
    for _ in range(5):
        next(events)
    events.close()
    second = (9, 8, 7, MARK)
    again = list(conversation.answer(second, GENERATION, noise_of(model), 9))
    assert again[1:] == answer(FakeModel(LONG), second, 9)[1:]


class Broken(FakeModel):
    """One logit of one step is `value`."""

    value, at = float("nan"), 3

    def denoise(self, canvas: torch.Tensor, cache: FakeCache, previous: torch.Tensor | None) -> torch.Tensor:
        logits = super().denoise(canvas, cache, previous)
        if len(self.fed) == self.at + 1:
            logits[2, 5] = self.value
        return logits

    def first_bad_layer(self, canvas: torch.Tensor, cache: FakeCache, previous: torch.Tensor | None) -> str:
        """Of the step that went wrong: what it read, and what it was conditioned on."""
        read, signal = self.fed[-1]
        assert canvas.tolist() == read and previous is signal
        return super().first_bad_layer(canvas, cache, previous)


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize(("at", "where"), [(0, "canvas 1, step 1"), (3, "canvas 2, step 2")])
def test_nan_names_canvas_step_and_layer(value: str, at: int, where: str) -> None:
    model = Broken(LONG)
    model.value, model.at = float(value), at
    seen: list[Event] = []
    with pytest.raises(NumericalError, match=f"^{where}: not a number, first in layer 7$"):
        seen.extend(talk(model).answer(PROMPT, GENERATION, noise_of(model), 100))
    assert sum(isinstance(event, StepDone) for event in seen) == at  # the bad step is not shown


# ── the cache ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_canvas_is_encoded_when_another_follows() -> None:
    model = FakeModel([*LONG[:10], END])
    conversation = talk(model)
    order: list[str] = []
    model.before = lambda _: order.append("step")
    for event in conversation.answer(PROMPT, GENERATION, noise_of(model), 100):
        if isinstance(event, CanvasCommitted):
            order += [f"{len(model.encoded)} encoded"]
    assert model.encoded == [[*PROMPT], [*LONG[:4]], [*LONG[4:8]]]
    assert order == ["step", "step", "1 encoded", "step", "step", "2 encoded", "step", "step", "3 encoded"]
    assert conversation.held == conversation.cache.tokens == [*PROMPT, *LONG[:8]]


@pytest.mark.parametrize(
    ("second", "reused"),
    [
        ((*PROMPT, *LONG[:4], *LONG[4:6], 7, MARK), 7),  # the next turn: all but the last canvas is there
        ((*PROMPT, *LONG[:4]), 7),  # nothing new at all
        (PROMPT, 3),  # asked again
        ((9, 8, 7, MARK), 2),
        ((9, MARK), 1),
        ((7, 8, MARK), 0),
    ],
)
def test_the_common_prefix_is_not_encoded_again(second: tuple[int, ...], reused: int) -> None:
    model = FakeModel([*LONG[:6], END])
    conversation = talk(model)
    list(conversation.answer(PROMPT, GENERATION, noise_of(model), 100))
    del model.encoded[:]
    cache = conversation.cache
    events = list(conversation.answer(second, GENERATION, noise_of(model), 4))
    assert events[0] == Prefilled(tokens=len(second), reused=reused)
    assert model.encoded[:1] == ([[*second[reused:]]] if second[reused:] else [])
    assert conversation.cache.tokens[: len(second)] == [*second]
    assert (conversation.cache is cache) is (reused > 0)
    assert events[1:] == answer(FakeModel([*LONG[:6], END]), second, 4)[1:]


def test_a_cache_that_cannot_step_back_starts_over() -> None:
    model = FakeModel([*LONG[:6], END], croppable=False)
    conversation = talk(model)
    list(conversation.answer(PROMPT, GENERATION, noise_of(model), 100))
    events = list(conversation.answer((9, 8, 7, MARK), GENERATION, noise_of(model), 4))
    assert events[0] == Prefilled(tokens=4, reused=0)
    assert model.encoded[-1] == [9, 8, 7, MARK]
    assert conversation.held == conversation.cache.tokens == [9, 8, 7, MARK]


class Reserved(FakeCache):
    """A cache that remembers what it was told, and that all before it have gone."""

    alive: ClassVar[weakref.WeakSet[FakeCache]] = weakref.WeakSet()
    rooms: ClassVar[list[Room]] = []

    def __init__(self) -> None:
        super().__init__()
        assert not self.alive
        self.alive.add(self)

    __hash__ = object.__hash__

    def reserve(self, room: Room) -> None:
        assert not self.tokens
        self.rooms.append(room)


class Planned(FakeModel):
    def new_cache(self) -> FakeCache:
        return Reserved()


def test_a_planned_conversation_reserves_each_cache_when_the_one_before_has_gone() -> None:
    Reserved.rooms.clear()
    model, room = Planned([*LONG[:6], END]), Room(context=15, rows=8, slack=4)
    conversation = Conversation(model, room)
    list(conversation.answer(PROMPT, GENERATION, noise_of(model), 100))
    list(conversation.answer((7, 8, MARK), GENERATION, noise_of(model), 100))
    model.before = interrupt
    assert finished(list(conversation.answer((5, MARK), GENERATION, noise_of(model), 4))).reason == "interrupted"
    assert Reserved.rooms == [room] * 4  # one to begin with, two for what shared nothing, one after the interrupt


def interrupt(step: int) -> None:
    raise KeyboardInterrupt


def test_a_planned_context_ends_an_answer_and_refuses_a_prompt() -> None:
    model = Planned(LONG)
    conversation = Conversation(model, Room(context=3 + 2 * 4 + 3, rows=8, slack=4))
    last = finished(list(conversation.answer(PROMPT, GENERATION, noise_of(model), 100)))
    assert (last.reason, last.tokens) == ("context", LONG[:8])
    with pytest.raises(PromptError, match="the prompt has 11 tokens, and with a canvas of 4 the context of 14"):
        list(conversation.answer([9] * 10 + [MARK], GENERATION, noise_of(model), 100))
    del conversation
    wide = Conversation(model, Room(context=10**9, rows=8, slack=4))
    assert wide.context == model.max_positions


def test_a_canvas_of_256() -> None:
    model = FakeModel([3 + i % 20 for i in range(300)] + [END], canvas_length=256)
    last = finished(answer(model))
    assert (last.reason, len(last.tokens), last.canvases) == ("end", 300, 2)
