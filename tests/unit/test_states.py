"""States, thaws, replacements and corrections, recomputed here from the raw events by set algebra."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgemma_local.events import CanvasCommitted, Event, Finished, Prefilled, StepDone
from dgemma_local.session import Session, open_session
from dgemma_local.states import HELD, Seen, State, follow, history, see, shown, states, summary

END = 9
ENDS = frozenset({END})


def step(next: Iterable[int], accepted: str, number: int = 0, *, canvas: int = 0, done: bool = False) -> StepDone:
    tokens = tuple(next)
    flags = tuple(each == "1" for each in accepted)
    return StepDone(
        canvas, number, 48, 0.8, tokens, tuple(t + 100 for t in tokens), flags, tokens, (0.5,) * len(tokens), done
    )


@st.composite
def canvases(draw: st.DrawFn) -> list[list[StepDone]]:
    length = draw(st.integers(1, 6))
    tokens = st.lists(st.integers(0, END), min_size=length, max_size=length)
    flags = st.text("01", min_size=length, max_size=length)
    found = []
    for canvas in range(draw(st.integers(1, 3))):
        count = draw(st.integers(1, 5))
        found.append([step(draw(tokens), draw(flags), k, canvas=canvas, done=k == count - 1) for k in range(count)])
    return found


def end(step: StepDone) -> int:
    """How many positions belong to the answer, its end token included."""
    settled = (i for i, t in enumerate(step.next) if t in ENDS and (step.accepted[i] or step.done))
    return min(settled, default=len(step.next)) + 1


def committed(steps: list[StepDone]) -> CanvasCommitted:
    last = steps[-1]
    kept = next((i for i, t in enumerate(last.next) if t in ENDS), len(last.next))
    return CanvasCommitted(last.canvas, last.next, kept, len(steps), converged=True)


def run(found: list[list[StepDone]]) -> list[Event]:
    events: list[Event] = [Prefilled(3, 0)]
    for steps in found:
        events += [*steps, committed(steps)]
    return [*events, Finished("end", (), len(found), sum(map(len, found)))]


@given(canvases())
def test_a_position_is_what_two_steps_say_it_is(found: list[list[StepDone]]) -> None:
    for steps in found:
        for k, now in enumerate(steps):
            before = steps[k - 1] if k else None
            a = {i for i, each in enumerate(now.accepted) if each}
            b = {i for i, each in enumerate(before.accepted) if each} if before else set()
            same = {i for i in range(len(now.next)) if before and now.next[i] == before.next[i]}
            answer, everywhere = set(range(end(now))), set(range(len(now.next)))
            expected = {
                State.FROZEN: a & b & same,
                State.REPLACED: (a & b) - same,
                State.FRESH: a - b,
                State.THAWED: b - a,
                State.GUESSED if now.done else State.NOISE: everywhere - a - b,
            }
            expected = {state: places & answer for state, places in expected.items()} | {
                State.PAST: everywhere - answer
            }
            kinds = states(now, before, ENDS)
            assert {state: {i for i, kind in enumerate(kinds) if kind is state} for state in expected} == expected
            assert set(kinds) <= set(expected)


@given(canvases())
def test_counts_are_those_of_the_raw_events(found: list[list[StepDone]]) -> None:
    last = list(follow([(event, 0.25) for event in run(found)], ENDS))[-1]
    thaws = replacements = corrections = 0
    for steps in found:
        for before, now in pairwise(steps):
            for i in range(min(end(now), len(now.next))):
                thaws += before.accepted[i] and not now.accepted[i]
                replacements += before.accepted[i] and now.accepted[i] and before.next[i] != now.next[i]
        final = committed(steps)
        for i in range(final.kept):
            corrections += any(s.accepted[i] and s.next[i] != final.tokens[i] for s in steps)
    assert (last.thaws, last.replacements, last.corrections) == (thaws, replacements, corrections)
    assert last.steps == sum(map(len, found))
    assert last.saved == sum(48 - len(steps) for steps in found)
    assert last.tokens == sum(committed(steps).kept for steps in found)
    assert last.canvases == len(found)
    assert last.seconds == 0.25 * len(run(found))
    assert last.finished is not None


def test_a_correction_is_none_where_a_thawed_token_comes_back() -> None:
    back = [step([1, 2], "11"), step([7, 2], "01", 1), step([1, 2], "11", 2, done=True)]
    other = [step([1, 2], "11"), step([7, 2], "01", 1), step([3, 2], "11", 2, done=True)]
    assert [each.corrections for each in follow([(event, 0.0) for event in run([back])], ENDS)][-1] == 0
    found = list(follow([(event, 0.0) for event in run([other])], ENDS))
    assert [each.corrections for each in found] == [0, 0, 0, 1, 1, 1]  # while it settles as afterwards
    assert found[-1].thaws == 1


def test_the_canvas_at_work_is_followed_step_by_step() -> None:
    first, second = step([1, 2, 3], "100"), step([1, 5, 6], "110", 1)
    seen = see(see(Seen(ENDS), first), second)
    assert seen.states == (State.FROZEN, State.FRESH, State.NOISE)
    assert seen.accepted == (1, 2)
    assert seen.means == (0.5, 0.5)
    assert seen.trail == (first.entropy, second.entropy)
    assert seen.held == ((1,), (5,), ())
    assert seen.settled == 2
    after = see(seen, CanvasCommitted(0, (1, 5, 6), 3, 2, True))
    assert (after.step, after.states, after.trail, after.settled, after.canvas) == (None, (), (), 3, 1)
    following = see(after, step([1, 2, 3], "100", canvas=1))
    assert following.states[0] is State.FRESH  # what another canvas accepted does not count


@given(canvases(), st.integers(0, 5))
def test_the_history_of_a_position_is_its_column(found: list[list[StepDone]], position: int) -> None:
    steps = found[0]
    position %= len(steps[0].next)
    moments = history(steps, position, ENDS)
    assert [moment.step for moment in moments] == list(range(len(steps)))
    seen = Seen(ENDS)
    for moment, each in zip(moments, steps, strict=True):
        seen = see(seen, each)
        assert moment.state is seen.states[position]
        assert (moment.token, moment.draft, moment.entropy) == (each.next[position], each.draft[position], 0.5)


def test_what_is_shown() -> None:
    at_work = step([1, 2], "10")
    assert shown(at_work, "canvas") == (1, 2)
    assert shown(at_work, "argmax") == (1, 102)
    assert shown(replace(at_work, done=True), "argmax") == (1, 2)  # committed


def test_the_summary_counts_in_words() -> None:
    events = run([[step([1, 2], "10"), step([3, 2], "01", 1), step([3, 4], "11", 2, done=True)]])
    assert summary(list(follow([(e, 0.0) for e in events], ENDS))[-1]) == (
        "1 canvas in 3 steps (45 saved) · 1 thaw, 1 replacement, 2 corrections"
    )
    assert summary(Seen(ENDS)) == "0 canvases in 0 steps · 0 thaws, 0 replacements, 0 corrections"


@pytest.fixture(scope="module")
def session() -> Session:
    return open_session("demo")


def test_the_demo_model_changes_its_mind(session: Session) -> None:
    """Thaws, replacements and corrections of a real run, each recounted from its events."""
    puzzle = "53..7....\n6...9....\n.98....6.\n8.......3\n4..8.3..1\n7...2...6\n.6....28.\n....19..5\n....8...9"
    ends = frozenset(session.generation.end_ids)
    events = list(session.answer([{"role": "user", "content": f"Solve this sudoku:\n{puzzle}"}], seed=1))
    steps = [event for event in events if isinstance(event, StepDone)]
    last = list(follow([(event, 0.0) for event in events], ends))[-1]
    (final,) = (event for event in events if isinstance(event, CanvasCommitted))
    inside = [
        min((i for i, t in enumerate(s.next) if t in ends and (s.accepted[i] or s.done)), default=len(s.next))
        for s in steps
    ]
    pairs = [(a, b, n) for (a, b), n in zip(pairwise(steps), inside[1:], strict=True)]
    assert last.thaws == sum(a.accepted[i] and not b.accepted[i] for a, b, n in pairs for i in range(n + 1)) > 0
    assert (
        0
        < last.replacements
        == sum(a.accepted[i] and b.accepted[i] and a.next[i] != b.next[i] for a, b, n in pairs for i in range(n + 1))
    )
    assert (
        0
        < last.corrections
        == sum(any(s.accepted[i] and s.next[i] != final.tokens[i] for s in steps) for i in range(final.kept))
    )
    assert HELD.isdisjoint({State.THAWED, State.NOISE, State.PAST, State.GUESSED})
