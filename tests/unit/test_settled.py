"""Text before its canvas ends: the settled prefix by its laws, and what of it reaches a terminal."""

import io
import signal
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from fake_session import END, LENGTH, spell, timed
from hypothesis import given, settings
from hypothesis import strategies as st
from screens import Sized, Tty, emulator, feed, scrolled, shown
from small_tokenizer import BYTE, small

from dgemma_local.channels import AnswerDecoder
from dgemma_local.events import CanvasCommitted, Event, Finished, Prefilled, Retried, StepDone
from dgemma_local.states import SETTLED_BOUND, SETTLED_STEPS, Seen, see, settled
from dgemma_local.ui import Record, Start, Wanted, pause, show
from dgemma_local.ui import drawing as drawing_module
from dgemma_local.ui.canvas import Vocabulary
from dgemma_local.ui.frame import Sight
from dgemma_local.ui.page import Page
from dgemma_local.ui.settled import Ahead, Foot, Part, provisional

ENDS = frozenset({END, 9})
VOCABULARY = Vocabulary(text=small().piece, control=small().is_control, ends=ENDS)
SURE, UNSURE = 0.0, 2.0  # nats
ESCAPE = "\x1b"
WIDEST = 400  # positions: the longest text here


def fresh() -> AnswerDecoder:
    return AnswerDecoder(small())


def ids(text: str) -> list[int]:
    return [*small().encode(text)]


def step(
    draft: Sequence[int], number: int = 0, *, canvas: int = 0, entropy: Sequence[float] = (), done: bool = False
) -> StepDone:
    tokens = tuple(draft)
    nats = (*entropy, *[SURE] * (len(tokens) - len(entropy)))
    samples = (
        tokens if done else tuple(token + 300 + number for token in tokens)
    )  # they say nothing of what has settled
    return StepDone(canvas, number, 48, 0.8, samples, tokens, (True,) * len(tokens), samples, nats, done)


def padded(draft: Sequence[int], number: int, *, canvas: int = 0, sure: int | None = None) -> StepDone:
    """A step of a canvas of WIDEST positions, of which nothing behind the first so many is sure."""
    known = len(draft) if sure is None else sure
    return step(
        [*draft, *[0] * (WIDEST - len(draft))],
        number,
        canvas=canvas,
        entropy=[SURE] * known + [UNSURE] * (WIDEST - known),
    )


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


def record(**rest: Any) -> Record:
    most = rest.pop("max_tokens", 1000)
    start = Start(model="m", demo=False, seed=1, max_tokens=most, steps=48, canvas_length=LENGTH)
    return Record(start, fresh(), watched=Seen(ENDS), **rest)


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


# On a terminal


@pytest.fixture(autouse=True)
def every_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "COLORTERM", "COLORFGBG", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(drawing_module, "SHARE", 1e9)


class Watch:
    """A terminal, and what it shows whenever it is looked at."""

    def __init__(self, columns: int = 40, lines: int = 12) -> None:
        self.file, self.screen = Tty(columns, lines), emulator(columns, lines)
        self._fed = 0

    def look(self) -> list[str]:
        self._fed = feed(self.screen, self.file, self._fed)
        return [line for line in shown(self.screen) if line]

    def underlined(self) -> str:
        """What is provisional on the screen."""
        rows = (self.screen.buffer[y] for y in range(self.screen.lines))
        return "".join(
            cell.data for row in rows for cell in (row[x] for x in range(self.screen.columns)) if cell.underscore
        )

    def run(self, events: Iterable[Event], between: Callable[[Event], None] = lambda event: None, **rest: Any) -> None:
        """Shows them; `between` is called after each, when what comes of it stands on the screen."""
        rest = {"fresh": fresh, "fps": 1e9} | rest
        done = []

        def watched() -> Iterator[tuple[Event, float]]:
            for event in events:
                yield event, 0.25
                for drawer in done:
                    drawer.rest()
                between(event)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("dgemma_local.ui.settled.Drawer", kept_in(done))
            page = Page(self.file, Sized(self.file), whole_lines=True)
            provisional(
                watched(), record(), page, Sized(self.file), Sight(label="m", vocabulary=VOCABULARY), "dark", **rest
            )
        self.look()


def kept_in(made: list[Any]) -> Any:
    """Drawers that can be waited for."""

    def make(*arguments: Any) -> Any:
        made.append(drawing_module.Drawer(*arguments))
        return made[-1]

    return make


def canvas(number: int, *drafts: Sequence[int]) -> list[Event]:
    """Each draft for as many steps as it takes to settle; the last is committed."""
    steps = [draft for draft in drafts for _ in range(SETTLED_STEPS)]
    events: list[Event] = [padded(draft, k, canvas=number) for k, draft in enumerate(steps)]
    last = padded(drafts[-1], len(steps), canvas=number)
    last = replace(last, next=last.draft, done=True)
    kept = next((i for i, token in enumerate(drafts[-1]) if token in ENDS), len(drafts[-1]))
    return [*events, last, CanvasCommitted(number, last.next, kept, len(steps) + 1, True)]


def answered(*canvases: Sequence[Event]) -> list[Event]:
    events = [event for some in canvases for event in some]
    tokens = [t for e in events if isinstance(e, CanvasCommitted) for t in e.tokens[: e.kept]]
    steps = sum(isinstance(event, StepDone) for event in events)
    return [Prefilled(3, 0), *events, Finished("end", tuple(tokens), len(canvases), steps)]


def test_text_is_there_before_it_is_committed_and_corrected_when_it_thaws() -> None:
    watch = Watch()
    seen: list[tuple[str, list[str], str]] = []
    watch.run(
        answered(canvas(0, ids("Hi user Hi"), ids("Hi model")), canvas(1, [*ids(" user\nHi"), END])),
        lambda event: seen.append((type(event).__name__, watch.look(), watch.underlined())),
    )
    before = [(lines, provisional) for name, lines, provisional in seen if name == "StepDone"]
    k = SETTLED_STEPS
    assert before[k - 2] == ([], "")
    assert before[k - 1] == (["Hi user Hi"], "Hi user Hi")
    assert before[k] == (["Hi"], "Hi ")  # the rest is taken back at once, though nothing has taken its place
    assert before[2 * k - 1] == (["Hi model"], "Hi model")
    commits = [(lines, provisional) for name, lines, provisional in seen if name == "CanvasCommitted"]
    assert commits[0] == (["Hi model"], "")
    assert (["Hi model user", "Hi"], " userHi") in before
    assert watch.look() == ["Hi model user", "Hi"] and watch.underlined() == ""
    assert not watch.screen.cursor.hidden


def test_what_thaws_is_gone_at_once() -> None:
    watch = Watch()
    seen: list[list[str]] = []
    watch.run(
        [*answered(canvas(0, ids("user"), ids("model")))[1:]],
        lambda event: seen.append(watch.look()),
    )
    assert seen[SETTLED_STEPS - 1 :][:2] == [["user"], []]


def test_nothing_is_left_of_text_that_was_taken_back() -> None:
    watch = Watch(20, 10)
    long, short = ids("Hi\n" * 7), ids("Hi user")
    watch.run(answered(canvas(0, long, short), canvas(1, long, [END])))
    assert watch.look() == ["Hi user"]
    assert scrolled(watch.screen) == []


def test_wide_signs_and_marks_stand_where_they_end_up() -> None:
    text = "\u4f60\u597d\U0001f600e\u0301 Hi\n\u4f60\u597d" + "\u597d" * 11
    watch = Watch(12, 12)
    seen: list[list[str]] = []
    watch.run(answered(canvas(0, [*ids(text), *ids("Hi")])), lambda event: seen.append(watch.look()))
    rows = [line.replace(" ", "") for line in seen[-3]]
    assert rows == [line.replace(" ", "") for line in watch.look()]
    assert unicodedata.normalize("NFD", "".join(rows)) == text.replace("\n", "").replace(" ", "") + "Hi"


def test_more_than_the_terminal_holds() -> None:
    watch = Watch(30, 6)
    text = "\n".join(f"Hi {'user ' * (number % 4)}Hi" for number in range(30))
    seen: list[list[str]] = []
    watch.run(answered(canvas(0, ids(text))), lambda event: seen.append(watch.look()))
    lines = [line.rstrip() for line in text.split("\n")]
    ahead = next(screen for screen in seen if screen)
    assert ahead == ["↑ 26 more rows above", *lines[-4:]]
    assert [*scrolled(watch.screen), *watch.look()] == lines


def test_only_committed_text_is_ever_scrolled_off() -> None:
    watch = Watch(20, 6)
    blocks = [ids("Hi\nuser\n" * 4), ids("model\n" * 9), [*ids("Hi"), END]]
    watch.run(answered(*(canvas(n, ids("user user\n" * 9), block) for n, block in enumerate(blocks))))
    text = small().decode([t for block in blocks for t in block if t != END])
    assert [*scrolled(watch.screen), *watch.look()] == text.split("\n")


def test_a_resize_draws_it_anew() -> None:
    watch = Watch(40, 12)
    events = answered(canvas(0, ids("Hi user Hi user Hi user"), ids("Hi user Hi user Hi")))
    seen: list[list[str]] = []

    def between(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == SETTLED_STEPS:
            watch.look()
            watch.file.columns, watch.file.lines = 9, 8
            watch.screen.resize(8, 9)
        seen.append(watch.look())

    watch.run(events, between)
    assert ["Hi user H", "i user Hi"] in [screen[:2] for screen in seen[SETTLED_STEPS + 1 : 2 * SETTLED_STEPS + 1]]
    assert "".join(watch.look()) == "Hi user Hi user Hi"


def test_ctrl_z_takes_it_away_and_the_next_step_brings_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch()
    stopped: list[tuple[list[str], bool]] = []
    monkeypatch.setattr(pause.os, "kill", lambda *_: stopped.append((watch.look(), watch.screen.cursor.hidden)))
    monkeypatch.setattr(pause.signal, "SIG_DFL", signal.getsignal(signal.SIGTSTP))
    text = ids("Hi user")
    seen: list[list[str]] = []

    def between(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == SETTLED_STEPS - 1:
            assert watch.look() == ["Hi user"]
            signal.raise_signal(signal.SIGTSTP)
        seen.append(watch.look())

    watch.run(answered(canvas(0, text, text)), between)
    assert stopped == [([], False)]
    assert seen[SETTLED_STEPS] == [] and seen[SETTLED_STEPS + 1] == ["Hi user"]
    assert watch.look() == ["Hi user"]


def test_what_was_not_committed_is_gone_when_it_is_interrupted_or_breaks() -> None:
    committed = canvas(0, ids("Hi user\n"))
    begun = [Prefilled(3, 0), *committed, *canvas(1, ids("model"))[:-2]]
    watch = Watch()
    watch.run([*begun, Finished("interrupted", tuple(ids("Hi user\n")), 1, 9)])
    assert watch.look() == ["Hi user"] and not watch.screen.cursor.hidden

    def broken() -> Iterator[Event]:
        yield from begun
        raise KeyboardInterrupt

    watch = Watch()
    with pytest.raises(KeyboardInterrupt):
        watch.run(broken())
    assert watch.look() == ["Hi user"] and not watch.screen.cursor.hidden


def test_thoughts_are_seen_where_the_page_shows_them_and_never_as_answer() -> None:
    text = "<|channel>thought\nuser<channel|>Hi<|tool_call>call:model<tool_call|>"
    for thoughts, expected in ((True, ["user", "Hi"]), (False, ["Hi"])):
        watch = Watch()
        seen: list[list[str]] = []
        watch.run(
            answered(canvas(0, ids(text))),
            lambda event, seen=seen, watch=watch: seen.append(watch.look()),
            thoughts=thoughts,
        )  # type: ignore[misc]
        assert seen[SETTLED_STEPS] == expected
        assert watch.look() == ["user", "Hi", "tool call: call:model"]


def test_a_thought_goes_on_over_the_edge_of_a_canvas() -> None:
    watch = Watch()
    seen: list[list[str]] = []
    run = [canvas(0, ids("<|channel>thought\nHi\nHi")), canvas(1, [*ids(" user<channel|>model"), END])]
    watch.run(answered(*run), lambda event: seen.append(watch.look()), thoughts=True)
    assert seen[-3] == ["Hi", "Hi user", "model"]
    assert watch.look() == ["Hi", "Hi user", "model"]


def test_a_canvas_that_settles_as_it_is_committed_is_not_drawn_before() -> None:
    watch = Watch()
    steps = canvas(0, ids("Hi user"))
    watch.run(answered(steps[1:]))
    assert f"{ESCAPE}[0;4m" not in watch.file.getvalue() and watch.look() == ["Hi user"]


def test_an_answer_that_begins_anew_is_not_read_twice() -> None:
    first = canvas(0, ids("Hi user"))[:-1]
    watch = Watch()
    seen: list[list[str]] = []
    events = answered(canvas(0, ids("model")))
    watch.run(
        [events[0], *first, Retried(0, "empty", len(first)), *events[1:]], lambda event: seen.append(watch.look())
    )
    assert ["Hi user"] in seen and ["model"] in seen
    assert watch.look() == ["model"]


# Who gets it


def shown_by(out: Any, err: Any, monkeypatch: pytest.MonkeyPatch, events: Sequence[Event], **wanted: Any) -> None:
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    monkeypatch.setattr("dgemma_local.ui.Terminal", Sized)
    show(timed(events), Record(record().start, fresh()), VOCABULARY, Wanted(**wanted))


EVENTS = answered(canvas(0, ids("Hi model"), ids("Hi user\n")), canvas(1, [*ids("Hi \x1b[2JHi"), END]))


def test_a_terminal_gets_it_and_no_summary_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch()
    shown_by(watch.file, watch.file, monkeypatch, EVENTS, fresh=fresh)
    assert f"{ESCAPE}[0;4mHi model" in watch.file.getvalue()
    assert watch.look()[:3] == ["m · --seed 1", "Hi user", "Hi �[2JHi"]
    assert "thaws" not in watch.file.getvalue()


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        ("pipe", {}),
        ("dumb", {}),
        ("ascii", {}),
        ("tty", {"quiet": True}),
        ("tty", {"as_json": True}),
        ("tty", {"fresh": None}),
    ],
)
def test_only_committed_text_elsewhere_byte_for_byte(
    case: str, wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    got = []
    for reader in (fresh, None):  # None: as it was before there was provisional text
        out: Any = io.StringIO() if case == "pipe" else Tty()
        if case == "ascii":
            out.encoding = "ascii"
        if case == "dumb":
            monkeypatch.setenv("TERM", "dumb")
        shown_by(out, Tty(), monkeypatch, EVENTS, **{"fresh": reader} | wanted)
        got.append(out.getvalue())
    assert got[0] == got[1]
    assert ESCAPE not in got[0] or case == "pipe"
    if case == "pipe":
        assert got[0] == "Hi user\nHi \x1b[2JHi\n"


def test_what_stop_strings_will_cut_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch()
    shown_by(watch.file, watch.file, monkeypatch, EVENTS[:3], fresh=fresh, stop=("model",))
    assert f"{ESCAPE}[0;4mHi " in watch.file.getvalue() and "model" not in watch.file.getvalue()


def test_the_view_of_the_canvas_comes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Tty(60, 20)
    shown_by(file, file, monkeypatch, EVENTS, fresh=fresh, visualize=True)
    assert "step 1 of 48" in file.getvalue()


def test_spelled_text_comes_out_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long answers over many canvases, on terminals of several sizes."""
    text = "\n".join(f"Hi {'user ' * (number % 7)}model" for number in range(24))
    for size in ((80, 24), (23, 7), (5, 3), (1, 2)):
        screens = []
        for reader in (fresh, None):
            watch = Watch(*size)
            shown_by(watch.file, Tty(), monkeypatch, list(spell(text, steps=6)), fresh=reader)
            watch.look()
            screens.append(("".join([*scrolled(watch.screen), *watch.look()])).replace(" ", ""))
        assert screens[0] == screens[1] == text.replace("\n", "").replace(" ", "")
