"""How answers end: each outcome of a scripted model, as the session's events and as `dgemma run` tells it."""

import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import scripted
import torch
from scripted import LENGTH, STEPS, Says, canvases, model_of, says
from small_tokenizer import small
from typer.testing import CliRunner

from dgemma_local import cli, errors, ui
from dgemma_local.channels import AnswerDecoder, Piece, is_blank, opens_channel
from dgemma_local.errors import CheckpointError, DoesNotFit, NumericalError, UsageError
from dgemma_local.events import CanvasCommitted, Event, Finished, FinishReason, Retried, StepDone
from dgemma_local.outcomes import EXIT_CODES, Outcome, of_error, outcome
from dgemma_local.recording import Header, Recorder, Word, open_recording
from dgemma_local.session import Session
from dgemma_local.states import Seen, State, see, states
from dgemma_local.ui import Record, Start
from dgemma_local.ui.canvas import Vocabulary
from dgemma_local.ui.frame import Sight, frame
from dgemma_local.ui.page import Page

CLOSE = small().special.channel_close
ENDS = (1, 106, 50)
HELLO: Any = [{"role": "user", "content": "Hi"}]
EMPTY, BLANK = says("<turn|>"), says("\n<turn|>")
THOUGHT = "<|channel>thought\n"


def events_of(session: Session, **named: Any) -> list[Event]:
    return list(session.answer(HELLO, **{"seed": 1, **named}))


def record_of(session: Session, **named: Any) -> Record:
    thinking = named.get("thinking", False)
    prompt = session.prompt(HELLO, thinking=thinking)
    decoder = AnswerDecoder(session.tokenizer, open_channel=opens_channel(prompt, session.tokenizer.special))
    start = Start(
        model="scripted",
        demo=False,
        seed=1,
        max_tokens=named.get("max_tokens", 1024),
        steps=STEPS,
        canvas_length=LENGTH,
    )
    record = Record(start, decoder, thinking=thinking)
    for event in events_of(session, **named):
        record.take(event, 0.0)
    return record


def steps_of(events: Sequence[Event], canvas: int) -> list[StepDone]:
    return [event for event in events if isinstance(event, StepDone) and event.canvas == canvas]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`dgemma run` of a session, or of what hinders one."""

    def invoke(opens: Session | BaseException, *flags: str) -> Any:
        monkeypatch.setitem(sys.modules, "dgemma_local.session", scripted.module(opens))
        return CliRunner().invoke(cli.app, ["run", "-p", "Hi", "--seed", "1", "-m", "demo", *flags])

    return invoke


def last(found: Any) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return line


# ── one outcome each ──────────────────────────────────────────────────────────────────────────────────────────────

TALK = "Hi user Hi user Hi user Hi user "
LATE = [says("Hi user "), replace(says("Hi user "), doubt=STEPS), says("Hi<turn|>")]

ENDINGS: list[tuple[Outcome, list[Says], dict[str, Any], str]] = [
    (Outcome.COMPLETE, [says("Hi<turn|>")], {}, "complete: 1 token in 1 canvas"),
    (Outcome.TOKEN_LIMIT, canvases(TALK), {"max_tokens": 9}, "stopped at --max-tokens 9; raise it for the rest"),
    (
        Outcome.TOKEN_LIMIT,
        [replace(canvases(TALK)[0], doubt=STEPS)],
        {"max_tokens": 16},
        "stopped at --max-tokens 16, and 2 of 2 canvases did not converge in 6 steps; raise it for the rest",
    ),
    (
        Outcome.EMPTY,
        [EMPTY, BLANK],
        {},
        "the model ended its turn without an answer; ask for a whole sentence, or give another --seed",
    ),
    (
        Outcome.THOUGHT_ONLY,
        [says(f"{THOUGHT}Hi<turn|>")],
        {},
        "all that came is a thought of 4 tokens, and no answer; give another --seed",
    ),
    (
        Outcome.THOUGHT_ONLY,
        [says(f"{THOUGHT}Hi Hi"), says("Hi Hi Hi")],
        {"max_tokens": 32, "thinking": True},
        "all that came is a thought of 32 tokens, and no answer; "
        "raise --max-tokens, bound the thought (--think-tokens), or leave --think out",
    ),
    (
        Outcome.NOT_CONVERGED,
        LATE,
        {},
        "not converged: 1 of 3 canvases did not converge in 6 steps; raise --steps, or give another --seed",
    ),
    (
        Outcome.EMPTY,
        [says("<|tool_call>call<tool_call|><turn|>")],
        {},
        "the model called a tool instead of answering; ask for an answer in words",
    ),
    (
        Outcome.EMPTY,
        [says("Hi<turn|>")],
        {"stop": ["Hi"]},
        "the answer began with a stop string, and nothing is left of it; give another --stop",
    ),
]


@pytest.mark.parametrize(("ending", "script", "asked", "line"), ENDINGS)
def test_every_answer_ends_in_one_outcome(
    ending: Outcome, script: list[Says], asked: dict[str, Any], line: str
) -> None:
    assert outcome(record_of(scripted.session(*script), **asked)) == (ending, line)


def test_ctrl_c_outranks_what_was_left_out() -> None:
    """A record without its last event was stopped, whatever it holds."""
    session = scripted.session(says("Hi"))
    model_of(session).before = lambda step: session.pressed.set() if step == 2 else None
    record = record_of(session)
    assert len(record.canvases) == 1 and record.canvases[0].converged
    assert outcome(record) == (Outcome.INTERRUPTED, "interrupted")
    assert outcome(replace(record, finished=None)) == (Outcome.INTERRUPTED, "interrupted")


def test_a_full_context_is_a_limit() -> None:
    prompt = len(scripted.session(says("Hi")).prompt(HELLO))
    session = scripted.session(says("Hi user "), context=prompt + 2 * LENGTH + 1)
    assert outcome(record_of(session)) == (
        Outcome.TOKEN_LIMIT,
        "stopped: the context has no room for another canvas; plan for a longer one (--context)",
    )


ORDER = [  # of all that may be true of one answer, the first that is
    Outcome.INTERRUPTED,
    Outcome.EMPTY,
    Outcome.TOKEN_LIMIT,
    Outcome.NOT_CONVERGED,
    Outcome.COMPLETE,
]


@pytest.mark.parametrize("reason", ["end", "budget", "context", "stop", "interrupted"])
@pytest.mark.parametrize("converged", [True, False])
@pytest.mark.parametrize("text", ["Hi", " \n"])
@pytest.mark.parametrize("thought", ["", " \n", "Hi"])
def test_the_worst_of_what_is_true_counts(reason: FinishReason, converged: bool, text: str, thought: str) -> None:
    record = record_of(scripted.session(says("Hi<turn|>")))
    record.canvases = [replace(record.canvases[0], converged=converged)]
    assert record.finished is not None
    record.finished = replace(record.finished, reason=reason)
    record.text |= {"answer": text, "thought": thought}
    true = {Outcome.COMPLETE}
    true |= {Outcome.INTERRUPTED} if reason == "interrupted" else set()
    cut = reason in ("budget", "context")
    true |= (
        set() if text.strip() or (cut and not thought.strip()) else {Outcome.EMPTY}
    )  # what a limit cut is no empty answer
    true |= {Outcome.TOKEN_LIMIT} if cut else set()
    true |= set() if converged else {Outcome.NOT_CONVERGED}
    want = next(each for each in ORDER if each in true)
    if want is Outcome.EMPTY and thought.strip() and reason != "stop":
        want = Outcome.THOUGHT_ONLY
    found, line = outcome(record)
    assert found is want and line and "\n" not in line


def test_every_outcome_has_an_exit_code_of_its_own() -> None:
    assert set(EXIT_CODES) == set(Outcome) and len(set(EXIT_CODES.values())) == len(Outcome)
    assert {each.value: each.exit_code for each in Outcome} == {
        "complete": 0,
        "numeric": 8,
        "empty": 9,
        "refused": 11,
        "thought_only": 16,
        "token_limit": 17,
        "not_converged": 18,
        "interrupted": 130,
    }
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.DgemmaError)]
    others = {kind.exit_code for kind in kinds} - {8, 9, 11, 16}
    assert not others & set(EXIT_CODES.values())
    assert of_error(CheckpointError("x", "y")) is None and of_error(NumericalError("x", "y")) is Outcome.NUMERIC


# ── as `run` tells it ─────────────────────────────────────────────────────────────────────────────────────────────


def flags_of(asked: dict[str, Any]) -> list[str]:
    flags = [part for text in asked.get("stop", ()) for part in ("--stop", text)]
    flags += ["--think"] if asked.get("thinking") else []
    return [*flags, *(["--max-tokens", str(asked["max_tokens"])] if "max_tokens" in asked else [])]


@pytest.mark.parametrize(("ending", "script", "asked", "line"), ENDINGS)
def test_run_says_it_on_stderr_and_exits_with_its_code(
    run: Any, ending: Outcome, script: list[Says], asked: dict[str, Any], line: str
) -> None:
    found = run(scripted.session(*script), *flags_of(asked))
    assert found.exit_code == ending.exit_code and "Traceback" not in found.output
    said = found.stderr.replace("\n  fix: ", "; ").splitlines()[-1]  # of an error in its two lines
    assert said.removeprefix("error: ") == line
    assert bool(found.stdout) is (ending not in (Outcome.EMPTY, Outcome.THOUGHT_ONLY))


@pytest.mark.parametrize(("ending", "script", "asked", "line"), ENDINGS)
def test_json_s_last_line_says_it(
    run: Any, ending: Outcome, script: list[Says], asked: dict[str, Any], line: str
) -> None:
    found = run(scripted.session(*script), *flags_of(asked), "--json", "--quiet")
    end = last(found)
    assert found.exit_code == end["exit_code"] == ending.exit_code
    assert (end["event"], end["outcome"], end["said"]) == ("finished", ending.value, line)
    assert end["thought_tokens"] + end["answer_tokens"] == len(end["tokens"])
    assert (end["thought_tokens"] > 0) is (ending is Outcome.THOUGHT_ONLY)
    assert found.stderr == "" or ending in (Outcome.EMPTY, Outcome.THOUGHT_ONLY)


def test_quiet_keeps_the_line_to_itself_and_the_code(run: Any) -> None:
    found = run(scripted.session(*canvases(TALK)), "--max-tokens", "9", "--quiet")
    assert (found.exit_code, found.stderr) == (17, "")


def test_ctrl_c(run: Any) -> None:
    session = scripted.session(says("Hi user "))
    model_of(session).before = lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 3 else None
    found = run(session, "--json")
    assert found.exit_code == 130 and found.stderr.endswith("\ninterrupted\n")
    end = last(found)
    assert (end["event"], end["outcome"], end["answer"]) == ("finished", "interrupted", "Hi user Hi user ")


@pytest.mark.parametrize("broken", [0, 1, 3])
@pytest.mark.parametrize("canvas", [0, 2])
def test_what_is_not_a_number_is_named_and_never_shown(run: Any, canvas: int, broken: int) -> None:
    script = [says("Hi user ")] * canvas + [Says((0,) * LENGTH, doubt=broken, broken=broken)]
    what = f"canvas {canvas + 1}, step {broken + 1}: not a number, first in layer 3"
    with pytest.raises(NumericalError, match=what):
        events_of(scripted.session(*script))
    found = run(scripted.session(*script))
    assert found.exit_code == 8 and found.stderr.splitlines()[-2] == f"error: {what}"
    assert found.stdout == ("Hi user " * canvas + "\n" if canvas else "")
    found = run(scripted.session(*script), "--json")
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert sum(line["event"] == "step_done" and line["canvas"] == canvas for line in lines) == broken
    fix = "check the checkpoint's files (`--dtype float32` tells a rounding overflow from damaged weights)"
    assert lines[-1] == {"event": "failed", "outcome": "numeric", "said": what, "fix": fix, "exit_code": 8}


def test_a_plan_that_has_no_room(run: Any) -> None:
    refused = DoesNotFit("big does not fit: needs 46.00 GB", "take another")
    assert run(refused).exit_code == 11 and run(refused).stdout == ""
    found = run(refused, "--json")
    assert found.exit_code == 11 and found.stderr.endswith(
        "error: big does not fit: needs 46.00 GB\n  fix: take another\n"
    )
    assert last(found) == {
        "event": "failed",
        "outcome": "refused",
        "said": "big does not fit: needs 46.00 GB",
        "fix": "take another",
        "exit_code": 11,
    }


def test_ctrl_c_before_an_answer_has_begun(run: Any) -> None:
    found = run(KeyboardInterrupt(), "--json")
    assert found.exit_code == 130 and len(found.stdout.splitlines()) == 1
    assert last(found) == {
        "event": "failed", "outcome": "interrupted", "said": "interrupted", "fix": "", "exit_code": 130,
    }  # fmt: skip


def test_other_errors_are_no_outcome_of_an_answer(run: Any) -> None:
    end = last(run(CheckpointError("a shard is missing", "fetch it"), "--json"))
    assert (end["outcome"], end["said"], end["exit_code"]) == (None, "a shard is missing", 6)
    assert last(run(UsageError("no", "drop it"), "--json"))["exit_code"] == 2


# ── an empty first canvas ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("blank", "below"),
    [
        ("<turn|>", 1),
        ("<eos>", 1),
        ("\n\n<turn|>", 2),
        ("<|channel>thought\n<channel|><turn|>", 5),
        ("<|channel>thought\n\n\n<|tool_response>", 5),
        ("<pad><pad> <turn|>", 4),
    ],
)
def test_it_is_tried_once_more_with_other_noise_and_no_end_up_to_there(blank: str, below: int) -> None:
    session = scripted.session(says(blank), says("Hi<turn|>" if below < 2 else "Hi user  <turn|>"))
    events = events_of(session)
    at = next(i for i, event in enumerate(events) if isinstance(event, Retried))
    assert events[at] == Retried(canvas=0, reason="empty", steps=2)
    assert all(isinstance(event, StepDone) for event in events[1:at])
    assert not any(isinstance(event, CanvasCommitted) for event in events[:at])

    (zero, free, first), (again, held, second) = model_of(session).asked[:2]
    assert (zero, again, free.banned, held.pinned) == (0, 0, (), ())
    assert (held.banned, held.below) == (ENDS, below)
    ours, other = first.canvas(0), second.canvas(0)
    assert not ours.equal(other) and steps_of(events[at:], 0)[0].fed == tuple(other.tolist())
    assert isinstance(events[-1], Finished)
    assert events[-1].steps == sum(isinstance(event, StepDone) for event in events)
    assert not set(events[-1].tokens[:below]) & set(ENDS)


@pytest.mark.parametrize("reason", ["budget", "context"])
def test_nothing_to_read_before_a_limit_is_the_limits_doing(reason: FinishReason) -> None:
    record = record_of(scripted.session(says("Hi<turn|>")))
    assert record.finished is not None
    record.finished = replace(record.finished, reason=reason)
    record.text |= {"answer": " ", "thought": ""}
    found, line = outcome(record)
    assert found is Outcome.TOKEN_LIMIT and "nothing of it is for a reader" in line


def test_where_the_model_insists_on_its_end_the_next_best_word_stands_there() -> None:
    session = scripted.session(EMPTY, EMPTY, says("user<turn|>"))
    record = record_of(session)
    assert (
        record.text["answer"] == "Hiuser" and record.notices()[0] == "canvas 1 came out empty and was tried once more"
    )
    assert outcome(record)[0] is Outcome.COMPLETE


def test_once_is_enough(run: Any) -> None:
    session = scripted.session(EMPTY, BLANK, says("Hi"))
    found = run(session, "--json")
    kinds = [json.loads(line)["event"] for line in found.stdout.splitlines()]
    assert kinds.count("retried") == 1 and kinds.count("canvas_committed") == 1
    assert found.exit_code == 9 and "canvas 1 came out empty and was tried once more\n" in found.stderr
    assert json.loads(found.stdout.splitlines()[kinds.index("retried")]) == {
        "event": "retried",
        "canvas": 0,
        "reason": "empty",
        "steps": 2,
    }


@pytest.mark.parametrize(
    "script",
    [
        [says("Hi<turn|>")],
        [says(f"{THOUGHT}Hi<turn|>")],
        [says("<|tool_call>call<tool_call|><turn|>")],
        [says("Hi"), EMPTY],
        [says("\n\n"), EMPTY],
    ],
)
def test_what_has_something_to_read_or_is_not_the_first_is_not(script: list[Says]) -> None:
    assert not any(isinstance(event, Retried) for event in events_of(scripted.session(*script)))


@pytest.mark.parametrize(
    ("script", "asked", "want", "code", "said"),
    [
        ([says("\n\n"), EMPTY], {}, Outcome.EMPTY, 9, "the model ended its turn without an answer"),
        ([says("\n\n"), says(" \n"), BLANK], {}, Outcome.EMPTY, 9, "the model ended its turn without an answer"),
        ([says("\n\n")], {"max_tokens": 2}, Outcome.TOKEN_LIMIT, 17, "nothing of it is for a reader"),
        ([says("\n\n"), says("Hi<turn|>")], {}, Outcome.COMPLETE, 0, "complete"),
    ],
)
def test_a_blank_canvas_without_an_end_goes_on_and_is_no_blank_without_a_reason(
    script: list[Says], asked: dict[str, Any], want: Outcome, code: int, said: str
) -> None:
    """Such a canvas may be the white space before an answer; only its end would make it an empty one."""
    record = record_of(scripted.session(*script), **asked)
    found, line = outcome(record)
    assert (found, found.exit_code) == (want, code) and said in line
    assert not any(isinstance(event, Retried) for event in events_of(scripted.session(*script), **asked))


def test_nor_is_what_a_stop_string_or_a_budget_cut() -> None:
    for asked in ({"stop": ["Hi"]}, {"max_tokens": 1}):
        script = [says("Hi")] if "stop" in asked else [says("\n\nHi")]
        assert not any(isinstance(event, Retried) for event in events_of(scripted.session(*script), **asked))


def test_the_next_turn_reuses_the_prompt_of_a_canvas_tried_twice() -> None:
    session = scripted.session(EMPTY, says("Hi<turn|>"))
    prompt = session.prompt(HELLO)
    events_of(session)
    assert session.conversation.held == list(prompt) == model_of(session).encoded
    assert session.conversation.cache.length == len(prompt)


def test_the_same_seed_gives_the_same_retry() -> None:
    one, two = (events_of(scripted.session(EMPTY, EMPTY, says("user<turn|>")), seed=9) for _ in range(2))
    assert one == two


def test_blank_is_what_no_reader_would_see() -> None:
    for text, blank in (("", True), (" \n", True), ("<pad><|channel>thought\n<channel|>", True), ("Hi", False)):
        assert is_blank(AnswerDecoder(small()), small().encode(text)) is blank
    assert not is_blank(AnswerDecoder(small(), open_channel=True), small().encode("user"))


# ── a bounded thought ─────────────────────────────────────────────────────────────────────────────────────────────

ENDLESS = says("Hi user ")
OPENS = says(f"{THOUGHT}Hi Hi ")


def test_a_thought_that_reaches_its_budget_is_closed_and_the_answer_follows() -> None:
    session = scripted.session(OPENS, ENDLESS, ENDLESS, says("<pad>user<turn|>"))
    record = record_of(session, thinking=True, think_tokens=20)
    assert [rules.pinned for _, rules, _ in model_of(session).asked] == [(), (), (), ((0, CLOSE),)]
    assert (record.text["answer"], outcome(record)[0]) == ("user", Outcome.COMPLETE)
    assert (record.thought_tokens, record.answer_tokens) == (25, 1)


@pytest.mark.parametrize(("most", "canvases"), [(1, 1), (7, 1), (8, 1), (9, 2), (16, 2), (17, 3), (None, 5)])
def test_it_is_closed_by_the_first_canvas_behind_its_budget(most: int | None, canvases: int) -> None:
    session = scripted.session(OPENS, ENDLESS)
    events_of(session, thinking=True, think_tokens=most, max_tokens=5 * LENGTH)
    held = [rules.pinned for _, rules, _ in model_of(session).asked]
    assert held == [()] * canvases + ([((0, CLOSE),)] + [()] * (4 - canvases) if most else [])


def test_without_a_budget_nothing_is_pinned_and_nothing_differs() -> None:
    script = [OPENS, ENDLESS, says("<channel|>Hi<turn|>")]
    free = events_of(scripted.session(*script), thinking=True)
    assert free == events_of(scripted.session(*script), thinking=True, think_tokens=1000)
    assert all(step.pinned == () for step in free if isinstance(step, StepDone))


def test_a_thought_that_ends_by_itself_is_left_alone_and_one_that_opens_again_is_not() -> None:
    session = scripted.session(says(f"{THOUGHT}Hi<channel|>Hi"), says("Hi"), says(f"Hi{THOUGHT}user"), ENDLESS)
    events_of(session, thinking=True, think_tokens=6, max_tokens=4 * LENGTH)
    assert [rules.pinned for _, rules, _ in model_of(session).asked] == [(), (), (), ((0, CLOSE),)]


def test_an_end_inside_a_thought_ends_the_turn() -> None:
    session = scripted.session(OPENS, says("Hi<turn|>"), says("user"))
    record = record_of(session, thinking=True, think_tokens=100)
    assert outcome(record)[0] is Outcome.THOUGHT_ONLY and len(record.canvases) == 2


def test_a_thought_that_the_prompt_opened_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "prompt", lambda *_, **__: (2, small().special.channel_open))
    session = scripted.session(ENDLESS)
    events_of(session, think_tokens=LENGTH, max_tokens=2 * LENGTH)
    assert [rules.pinned for _, rules, _ in model_of(session).asked] == [(), ((0, CLOSE),)]


@pytest.mark.parametrize("doubt", [0, 2, STEPS])
def test_the_pinned_position_is_never_anything_else(doubt: int) -> None:
    session = scripted.session(OPENS, replace(says("Hi user "), doubt=doubt), says("<turn|>"))
    events = events_of(session, thinking=True, think_tokens=1)
    first, second = steps_of(events, 0), steps_of(events, 1)
    assert all(step.pinned == () for step in first) and len(second) == min(doubt + 2, STEPS)
    for step in second:
        assert step.pinned == (0,) and step.accepted[0] and step.entropy[0] == 0.0
        assert step.fed[0] == step.draft[0] == step.next[0] == CLOSE
        found = states(step, None, frozenset(ENDS))
        assert found[0] is State.PINNED and State.PINNED not in found[1:]
    commit = next(event for event in events if isinstance(event, CanvasCommitted) and event.canvas == 1)
    assert commit.tokens[0] == CLOSE and commit.converged is (doubt < STEPS - 1)


def test_it_moves_nothing_into_view() -> None:
    """A reader's own pick does; the first row of a long canvas would else stay where it is."""
    words = Vocabulary(text=lambda token: f"{token:09d} ", control=lambda _: False, ends=frozenset(ENDS))
    sight = Sight(label="m", vocabulary=words)
    step = StepDone(0, 1, 9, 0.8, (5,) * 64, (5,) * 64, (False,) * 64, (5,) * 64, (1.0,) * 64, False, pinned=(0,))
    given = see(Seen(frozenset(ENDS)), step)
    assert given.states[0] is State.PINNED
    picked = replace(given, step=replace(step, pinned=()))
    assert frame(given, sight, 40, 10, top=6).top == 6 and frame(picked, sight, 40, 10, top=6).top == 0


@pytest.mark.parametrize("most", [0, -1, 32, 33])
def test_a_budget_leaves_room_for_an_answer(most: int) -> None:
    with pytest.raises(UsageError, match=f"a thought of {most} tokens leaves none of 32"):
        events_of(scripted.session(OPENS), thinking=True, think_tokens=most, max_tokens=32)


def test_run_folds_thoughts_and_counts_them(run: Any) -> None:
    script = [says(f"{THOUGHT}user<channel|>Hi<turn|>")]
    found = run(scripted.session(*script), "--think", "--think-tokens", "9", "--stats")
    assert (found.exit_code, found.stdout) == (0, "Hi\n")
    assert "thought: 5 tokens (--show-thinking shows them)\n" in found.stderr and "\nuser\n" not in found.stderr
    assert "5 of them thought" in found.stderr
    shown = run(scripted.session(*script), "--think", "--show-thinking").stderr
    assert "\nuser\n" in shown and "--show-thinking" not in shown
    assert "thought:" not in run(scripted.session(says("Hi<turn|>"))).stderr
    assert run(scripted.session(*script), "--think", "--quiet").stderr == ""
    end = last(run(scripted.session(*script), "--json"))
    assert (end["thought"], end["thought_tokens"], end["answer_tokens"]) == ("user", 5, 1)


def test_run_closes_a_thought(run: Any) -> None:
    found = run(scripted.session(OPENS, says("<pad>user<turn|>")), "--think", "--think-tokens", "3")
    assert (found.exit_code, found.stdout) == (0, "user\n")


@pytest.mark.parametrize("shown", [True, False])
def test_a_view_folds_thoughts_too(shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[Page] = []
    monkeypatch.setattr(ui, "printed", lambda events, record, page, *_, **__: pages.append(page))
    terminal: Any = SimpleNamespace(writes=True, redraws=False)
    vocabulary = Vocabulary(text=str, control=lambda _: False, ends=frozenset(ENDS))
    record = record_of(scripted.session(says("Hi<turn|>")))
    ui._run([], record, vocabulary, ui.Wanted(visualize=True, thoughts=shown), terminal, None)
    (page,) = pages
    page.write([Piece("thought", "user")])
    assert page.tail == ("user" if shown else "")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--think-tokens", "9"], "--think-tokens has no thought to bound"),
        (["--think", "--think-tokens", "9", "--max-tokens", "9"], "leaves nothing of --max-tokens 9"),
        (["--show-thinking", "--json"], "--show-thinking adds nothing"),
        (["--show-thinking", "--quiet"], "--show-thinking writes there"),
    ],
)
def test_flags_that_would_do_nothing(run: Any, flags: list[str], said: str) -> None:
    found = run(AssertionError("opened"), *flags)
    assert found.exit_code == 2 and said in found.stderr


# ── seen and recorded ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_retry_leaves_no_step_behind_and_counts_them() -> None:
    seen = Seen(frozenset(ENDS))
    for event in events_of(scripted.session(EMPTY, says("Hi<turn|>"))):
        before, seen = seen, see(seen, event, 0.5)
        if isinstance(event, Retried):
            assert (seen.canvas, seen.step, seen.states, seen.held, seen.means) == (0, None, (), (), ())
            assert (seen.steps, seen.canvases, seen.tokens) == (
                before.steps,
                0,
                0,
            ) and seen.seconds == before.seconds + 0.5
    assert (seen.steps, seen.canvases, seen.tokens, seen.saved) == (4, 1, 1, STEPS - 2)


def test_both_are_recorded_and_read_back(tmp_path: Path) -> None:
    session = scripted.session(EMPTY, OPENS, says("<pad>user<turn|>"))
    header = Header(model="m", seed=1, canvas_length=LENGTH, steps=STEPS, max_tokens=1024, ends=ENDS)
    path = tmp_path / "run.jsonl"
    events = events_of(session, thinking=True, think_tokens=3)
    with Recorder(path, header, lambda token: Word(str(token))) as recorder:
        for event in events:
            recorder.take(event, 0.0)
    recording = open_recording(path)
    assert recording.notice is None
    assert [replace(event, entropy=()) if isinstance(event, StepDone) else event for event in recording.events] == [
        replace(event, entropy=(), temperature=round(event.temperature, 6)) if isinstance(event, StepDone) else event
        for event in events
    ]
    pinned = [event.pinned for event in recording.events if isinstance(event, StepDone)]
    assert pinned == [(), (), (), (), (0,), (0,)] and len(recording.canvases) == 3
    assert [line.count('"pinned"') for line in path.read_text().splitlines() if "step_done" in line] == [
        0,
        0,
        0,
        0,
        1,
        1,
    ]


@pytest.mark.parametrize(
    ("line", "name", "value", "said"),
    [
        (4, "steps", 1, "begins anew before its last step"),
        (4, "reason", "tired", "begins anew for a reason that is not known"),
        (4, "canvas", 1, "a canvas is missing"),
        (8, "pinned", [0, 0], "ascending positions below 8"),
        (8, "pinned", [1, 0], "ascending positions below 8"),
        (8, "pinned", [LENGTH], "ascending positions below 8"),
    ],
)
def test_what_is_read_back_is_checked(tmp_path: Path, line: int, name: str, value: object, said: str) -> None:
    header = Header(model="m", seed=1, canvas_length=LENGTH, steps=STEPS, max_tokens=1024, ends=ENDS)
    path = tmp_path / "run.jsonl"
    with Recorder(path, header, lambda token: Word(str(token))) as recorder:
        for event in events_of(scripted.session(EMPTY, OPENS, says("<pad>user<turn|>")), thinking=True, think_tokens=3):
            recorder.take(event, 0.0)
    lines = [json.loads(each) for each in path.read_text().splitlines()]
    assert name in lines[line]
    lines[line][name] = value
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    recording = open_recording(path)
    assert recording.notice is not None and said in recording.notice and len(recording.events) == line - 1


# ── what breaks off in the middle ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("error", "code", "outcome", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB."), 11, "refused", "memory ran out"),
        (MemoryError(), 11, "refused", "memory ran out"),
        (
            torch.AcceleratorError("CUDA error: an illegal memory access was encountered. More"),
            12,
            None,
            "the card gave up",
        ),
    ],
)
@pytest.mark.parametrize("when", [0, 2])
def test_what_the_card_cannot_give_is_an_error_with_a_cure(
    run: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, outcome: str | None, said: str, when: int
) -> None:
    session = scripted.session(says("Hi<turn|>"))
    model = model_of(session)
    whole = model.denoising

    def breaks(*given: Any) -> Any:
        for i, canvas in enumerate(whole(*given)):
            if i >= min(when, 1):
                raise error
            yield canvas

    monkeypatch.setattr(model, "denoising", breaks)
    found = run(session, "--json")
    assert found.exit_code == code
    assert found.stderr.splitlines()[-2].startswith(f"error: {said}") and "  fix: " in found.stderr.splitlines()[-1]
    last = json.loads(found.stdout.splitlines()[-1])
    assert (last["event"], last["outcome"], last["exit_code"]) == ("failed", outcome, code)
