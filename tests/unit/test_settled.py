"""Text before its canvas ends: the settled prefix by its laws, the text read of it, and the rows it takes."""

from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from provisional import ENDS, fresh, ids, padded, record, step
from screens import Sized, Tty
from small_tokenizer import BYTE, small

from dgemma_local.channels import AnswerDecoder
from dgemma_local.events import CanvasCommitted, Event, Retried, StepDone
from dgemma_local.states import SETTLED_BOUND, SETTLED_STEPS, Seen, see, settled
from dgemma_local.ui.settled import Ahead, Foot, Part


def after(events: Iterable[Event]) -> Seen:
    seen = Seen(ENDS)
    for event in events:
        seen = see(seen, event)
    return seen


# The prefix


@st.composite
def canvases(draw: st.DrawFn) -> list[StepDone]:
    length = draw(st.integers(1, 6))
    rows = draw(
        st.lists(st.lists(st.sampled_from([1, 1, 1, 2, 9]), min_size=length, max_size=length), min_size=1, max_size=6)
    )
    nats = st.lists(st.sampled_from([0.0, 0.05, 0.1, 0.5]), min_size=length, max_size=length)
    return [step(row, k, entropy=draw(nats)) for k, row in enumerate(rows)]


@given(canvases(), st.integers(1, 4), st.sampled_from([0.05, 0.1, 0.2, float("inf")]))
def test_the_prefix_is_what_has_stood_and_is_sure_up_to_the_first_that_is_not(
    steps: list[StepDone], many: int, bound: float
) -> None:
    seen = after(steps)
    last = steps[-1]

    def holds(i: int) -> bool:
        stood = len(steps) >= many and len({each.draft[i] for each in steps[-many:]}) == 1
        return stood and last.entropy[i] < bound and last.draft[i] not in ENDS

    count = settled(seen, many, bound)
    assert all(holds(i) for i in range(count))
    assert count == len(last.draft) or not holds(count)
    assert settled(seen, many + 1, bound) <= count <= settled(seen, many, 2 * bound)


@given(canvases(), st.integers(2, 4), st.integers(0, 5))
def test_it_ends_before_a_draft_that_has_changed(steps: list[StepDone], many: int, position: int) -> None:
    position %= len(steps[0].draft)
    draft = list(steps[-1].draft)
    draft[position] += 20
    seen = after([*steps, step(draft, len(steps))])
    assert settled(seen, many, float("inf")) <= position


@given(canvases())
def test_repeating_a_sure_draft_only_lengthens_it(steps: list[StepDone]) -> None:
    counts = []
    seen = after(steps)
    for k in range(SETTLED_STEPS + 1):
        seen = see(seen, step(steps[-1].draft, len(steps) + k))
        counts.append(settled(seen))
    assert counts == sorted(counts)
    before_the_end = next((i for i, token in enumerate(steps[-1].draft) if token in ENDS), len(steps[-1].draft))
    assert counts[-1] == before_the_end


def test_there_is_none_without_a_step_or_where_canvases_begin() -> None:
    steps = [step([1, 2, 3], k) for k in range(SETTLED_STEPS)]
    assert settled(Seen(ENDS)) == 0
    assert settled(after(steps[:-1])) == 0
    assert settled(after(steps)) == 3
    committed = CanvasCommitted(0, (1, 2, 3), 3, len(steps), True)
    assert settled(after([*steps, committed])) == 0
    assert (
        settled(after([*steps, committed, step([1, 2, 3], canvas=1)])) == 0
    )  # what another canvas held does not count
    again = [*steps, Retried(0, "empty", len(steps)), step([1, 2, 3])]
    assert settled(after(again)) == 0


def test_the_bound_is_not_in_it() -> None:
    steps = [step([1, 2], k, entropy=(SETTLED_BOUND * 0.99, SETTLED_BOUND)) for k in range(SETTLED_STEPS)]
    assert settled(after(steps)) == 1


# Its text


class Reading:
    """An answer, and what is ahead of its committed text."""

    def __init__(self, stop: Sequence[str] = (), **rest: Any) -> None:
        self.record = record(**rest)
        self.ahead = Ahead(self.record, fresh, stop)
        self.text: list[tuple[str, str]] = []  # committed

    def take(self, event: Event) -> list[tuple[str, str]]:
        pieces = self.record.take(event, 0.0)
        self.ahead.take(event, pieces)
        self.text += [(piece.kind, piece.text) for piece in pieces]
        return self.now()

    def now(self) -> list[tuple[str, str]]:
        return [(part.kind, part.text) for part in self.ahead.parts(self.record.seen)]

    def settle(self, tokens: Sequence[int], rest: Sequence[int] = ()) -> list[tuple[str, str]]:
        """What is ahead once `tokens` have settled, and nothing behind them has."""
        found: list[tuple[str, str]] = []
        for k in range(SETTLED_STEPS):
            found = self.take(padded([*tokens, *rest], k, sure=len(tokens)))
        return found


def joined(parts: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Neighbours of one kind as one."""
    found: list[tuple[str, str]] = []
    for kind, text in parts:
        if found and found[-1][0] == kind and kind != "tool_call":
            text = found.pop()[1] + text
        found.append((kind, text))
    return found


MARKED = "<|channel>thought\nuser<channel|>Hi\n<|tool_call>call:user<tool_call|> <|tool_call>€\U0001f600<|channel>Hi<channel|>model"
TOKENS = st.lists(st.sampled_from(sorted({*ids(MARKED), BYTE + 0xE2, 100, 101, 48, 49})), max_size=8)


@settings(max_examples=150)
@given(st.lists(st.tuples(st.lists(TOKENS, max_size=4), TOKENS), min_size=1, max_size=3))
def test_committed_text_and_the_text_ahead_are_one_reading(run: list[tuple[list[list[int]], list[int]]]) -> None:
    """Whatever prefixes there were, grown, taken back or other ones, and whatever is then committed."""
    reading = Reading()
    committed: list[int] = []
    for number, (prefixes, block) in enumerate(run):
        for prefix in prefixes:
            ahead = reading.settle(prefix)
            whole = fresh().feed([*committed, *prefix])
            assert joined(reading.text + ahead) == joined((piece.kind, piece.text) for piece in whole)
        reading.take(CanvasCommitted(number, (*block, *ids("user")), len(block), SETTLED_STEPS, True))
        committed += block
        assert reading.now() == []


def test_thoughts_and_calls_are_no_answer_and_control_tokens_are_nothing() -> None:
    reading = Reading()
    assert reading.settle(ids("<|channel>")) == []
    assert reading.settle(ids("<|channel>thought")) == []  # what may become a label
    assert reading.settle(ids("<|channel>thought\nuser")) == [("thought", "user")]
    assert joined(reading.settle(ids("<|channel>thought\nuser<channel|>Hi"))) == [("thought", "user"), ("answer", "Hi")]
    assert reading.settle(ids("Hi<channel|><|turn>")) == [("answer", "Hi")]  # a draft's markers need not balance
    assert joined(reading.settle(ids("Hi<|tool_call>call:user"))) == [("answer", "Hi")]
    assert joined(reading.settle(ids("Hi<|tool_call>call:user<tool_call|>"))) == [
        ("answer", "Hi"), ("tool_call", "call:user")
    ]  # fmt: skip


def test_half_a_character_waits_for_its_other_half() -> None:
    emoji = ids("Hi\U0001f600")
    reading = Reading()
    for cut in range(2, len(emoji)):
        assert reading.settle(emoji[:cut], emoji[cut:]) == [("answer", "Hi")]
    assert "".join(text for _, text in reading.settle([*emoji, *ids(" Hi")])) == "Hi\U0001f600 Hi"


def test_what_the_budget_will_cut_is_not_shown() -> None:
    reading = Reading(max_tokens=3)
    assert reading.settle(ids("Hi user Hi user")) == [("answer", small().decode(ids("Hi user Hi user")[:3]))]


def test_a_stop_string_and_what_may_become_one_are_not_shown() -> None:
    tokens = ids("Hi user model")
    assert joined(Reading(stop=["model"]).settle(tokens)) == [("answer", "Hi user ")]
    assert joined(Reading(stop=["model", "us"]).settle(tokens)) == [("answer", "Hi ")]
    assert Reading(stop=["i"]).settle(ids("Hi<|channel>user<channel|>model")) == [("answer", "H")]
    reading = Reading(withheld=2)
    assert joined(reading.settle(tokens)) == [("answer", small().decode(tokens[:-2]))]
    reading.take(CanvasCommitted(0, tuple(tokens), len(tokens), 3, True))
    assert reading.now() == []  # as the committed ones wait, too
    assert joined(reading.settle(tokens)) == [("answer", small().decode([*tokens, *tokens][len(tokens) - 2 : -2]))]


def test_a_prefix_that_goes_on_is_read_once() -> None:
    fed: list[int] = []

    class Counting(AnswerDecoder):
        def feed(self, ids: Sequence[int]) -> Any:
            fed.extend(ids)
            return super().feed(ids)

    one = record()
    ahead = Ahead(one, lambda: Counting(small()))
    tokens = ids("Hi user model Hi user")
    for count in range(len(tokens) + 1):
        for k in range(SETTLED_STEPS):
            one.take(padded(tokens[:count], k), 0.0)
        ahead.parts(one.seen)
    event = CanvasCommitted(0, tuple(tokens), len(tokens), 3, True)
    ahead.take(event, one.take(event, 0.0))
    assert ahead.parts(one.seen) == []
    assert fed == tokens


# The rows at the bottom


def foot(columns: int, lines: int, *, thoughts: bool = False) -> Foot:
    return Foot(Sized(Tty(columns, lines)), thoughts=thoughts)


def drawn(rows: Iterable[Any]) -> list[str]:
    return ["".join(text for text, _ in row) for row in rows]


def test_rows_never_become_fewer_until_text_is_committed() -> None:
    one = foot(10, 8)
    assert one.rows("", []) == []
    assert drawn(one.rows("Hi ", [Part("answer", "you\nthere")])) == ["Hi you", "there"]
    assert drawn(one.rows("Hi ", [])) == ["Hi ", ""]
    one.take([])
    assert drawn(one.rows("Hi ", [])) == ["Hi "]
    one.take([])
    assert one.rows("", []) == []


def test_rows_are_never_more_than_the_terminal_has() -> None:
    file = Tty(10, 8)
    one = Foot(Sized(file), thoughts=False)
    assert len(one.rows("", [Part("answer", "a\nb\nc\nd\ne")])) == 5
    file.lines = 4
    assert drawn(one.rows("", [Part("answer", "a")])) == ["a", "", ""]


def test_of_more_rows_than_fit_the_last_are_seen() -> None:
    text = "\n".join(map(str, range(20)))
    assert drawn(foot(40, 5).rows("", [Part("answer", text)])) == ["↑ 17 more rows above", "17", "18", "19"]
    assert drawn(foot(5, 3).rows("", [Part("answer", text)])) == ["↑19", "19"]
    assert drawn(foot(1, 2).rows("", [Part("answer", "ab")])) == ["b"]


def test_committed_and_provisional_text_are_told_apart_and_so_are_thoughts() -> None:
    inks = set()
    for kind in ("answer", "thought"):
        one = foot(40, 8, thoughts=True)
        one.take([Part(kind, "x")])
        (row,) = one.rows("one", [Part(kind, "two")])
        assert [text for text, _ in row] == ["one", "two"]
        inks |= {ink for _, ink in row}
    assert len(inks) == 4
    from dgemma_local.ui.paint import sgr
    from dgemma_local.ui.palette import look

    assert len({sgr(look(ink, "dark"), "mono") for ink in inks}) == 4


def test_kinds_stand_in_lines_of_their_own_and_only_those_that_are_shown() -> None:
    parts = [Part("thought", "a\nb\n\n"), Part("tool_call", "c"), Part("answer", "d")]
    assert drawn(foot(40, 8, thoughts=True).rows("", parts)) == ["a", "b", "d"]
    assert drawn(foot(40, 8).rows("", parts)) == ["d"]
    one = foot(40, 8, thoughts=True)
    one.take([Part("thought", "x")])
    assert drawn(one.rows("tail\n", [Part("answer", "d")])) == ["tail", "d"]


def test_what_a_terminal_would_obey_is_not_in_a_row() -> None:
    (row,) = drawn(foot(40, 8).rows("", [Part("answer", "a\x1b[2Jb\x07\u202ec")]))
    assert row == "a◦[2Jb◦◦c"
