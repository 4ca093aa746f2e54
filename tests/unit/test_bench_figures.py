"""The benchmark's figures, worked out by hand from a scripted clock; and repeats, of which none may differ."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from fake import END, GENERATION, MARK, FakeModel
from scripted_bench import ADAPTIVE, PROMPT, Meter, Script, bench, commit, script, step

from dgemma_local.bench import measure, protocols, report
from dgemma_local.bench.measure import Bench
from dgemma_local.bench.protocols import Task
from dgemma_local.engine import Conversation
from dgemma_local.errors import BenchRefused
from dgemma_local.events import Event, Finished, Prefilled
from dgemma_local.noise import PhiloxNoise

ENDLESS = protocols.endless(GENERATION, steps=3)
FIXED = Task(name="fixed", prompt=PROMPT, config=ENDLESS, max_tokens=8)


def figures_of(
    events: Sequence[tuple[float, Event]], *, shared: bool = False, meter: Meter | None = None
) -> tuple[dict[str, float | None], dict[str, str]]:
    speaker = Script([events])
    how = bench(speaker, meter, shared=shared)
    return measure.figures([measure.answer(speaker, ADAPTIVE, None, how)], how)


# ── figures ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_figure_by_hand() -> None:
    """Steps 1 and 2 took 200, 400, 200, 200 ms; the first draft came at 0.6 s, commits at 1.3 and 2.5, the end at 2.6."""
    values, missing = figures_of(script())
    assert missing == {}
    assert values == pytest.approx(
        {
            "step_ms_p50": 200,
            "step_ms_p95": 400,
            "first_step_ms": 700,  # 2.0 - 1.3
            "commit_ms": 500,
            "canvas_ms": 1050,  # decode: 2.5 - (0.6 - 0.2) = 2.1 s of two canvases
            "steps_per_canvas": 3,
            "tokens_per_forward": 8 / 6,  # the end token is none of padding
            "tokens_per_pass": 7 / 7,  # six steps, and the pass that committed the first canvas
            "decode_tok_s": 7 / 2.1,
            "end_to_end_tok_s": 7 / 2.6,
            "first_draft_ms": 600,
            "first_canvas_ms": 1300,
            "prefill_tok_s": 10 / 0.4,
            "joules_per_token": 3,
        }
    )
    assert set(values) == set(report.FIGURES)


def test_a_shared_commit_is_no_pass_of_its_own() -> None:
    assert figures_of(script(), shared=True)[0]["tokens_per_pass"] == pytest.approx(7 / 6)


def test_without_an_end_no_end_token_is_counted() -> None:
    values, _ = figures_of(script((5, 6, 7, 8, 5, 6, 7, 8), "budget"))
    assert values["tokens_per_forward"] == pytest.approx(8 / 6) and values["decode_tok_s"] == pytest.approx(8 / 2.1)


def test_p95_is_a_step_that_was_taken() -> None:
    """Of 40 steps the 38th."""
    events: list[tuple[float, Event]] = [(0.5, Prefilled(tokens=10, reused=0)), (0.1, step(0, 0))]
    events += [(n / 1000, step(0, n)) for n in range(1, 41)]
    events += [(0.0, commit(0)), (0.0, Finished(reason="end", tokens=(5,), canvases=1, steps=41))]
    values, _ = figures_of(events)
    assert values["step_ms_p95"] == pytest.approx(38) and values["step_ms_p50"] == pytest.approx(20.5)


def test_one_canvas_has_no_commit() -> None:
    one = [*script()[:5], (0.0, Finished(reason="end", tokens=(5, 6), canvases=1, steps=3))]
    values, missing = figures_of(one)
    assert values["first_step_ms"] is None and values["commit_ms"] is None
    assert missing["commit_ms"] == "no answer had a second canvas" == missing["first_step_ms"]
    assert values["tokens_per_pass"] == pytest.approx(2 / 3)  # it is not committed


def test_canvases_of_one_step() -> None:
    """Nothing can be taken off the time to the first draft."""
    kept = [0, 1, 4, 5, 8, 9]
    values, missing = figures_of([script()[i] for i in kept])
    assert values["step_ms_p50"] is values["step_ms_p95"] is values["commit_ms"] is None
    assert missing["commit_ms"] == missing["step_ms_p50"] == "every canvas took one step"
    assert values["prefill_tok_s"] == pytest.approx(10 / 0.6)
    assert values["decode_tok_s"] == pytest.approx(7 / 0.9)  # 0.1 + 0.7 + 0.1


def test_a_prompt_faster_than_a_step_has_no_rate() -> None:
    quick = [(0.0, script()[0][1]), *script()[1:]]
    values, missing = figures_of(quick)
    assert values["prefill_tok_s"] is None and "less time than steps differ" in missing["prefill_tok_s"]
    assert values["decode_tok_s"] == pytest.approx(7 / 2.0)


def test_a_prompt_that_takes_less_than_a_tenth_of_a_step_has_no_rate() -> None:
    """A median step takes 200 ms, and the first draft comes 219 or 221 ms behind the question."""
    for seconds, known in ((0.119, False), (0.121, True)):
        values, missing = figures_of([(seconds, script()[0][1]), *script()[1:]])
        assert (values["prefill_tok_s"] is not None) is known and ("prefill_tok_s" in missing) is not known
    quick = [(0.115, script()[0][1]), *script()[1:]]
    speaker = Script([quick, quick])  # 15 ms each, and together no more of a step
    how = bench(speaker)
    values, _ = measure.figures([measure.answer(speaker, ADAPTIVE, None, how) for _ in range(2)], how)
    assert values["prefill_tok_s"] is None


def test_energy_is_that_of_the_answer_or_says_why_not() -> None:
    meter = Meter()
    figures_of(script(), meter=meter)
    assert meter.spans == [(100.0, pytest.approx(102.6))]
    for meter, why in ((Meter(None, "no card"), "no card"), (Meter(None), "read too seldom"), (Meter(), "no token")):
        tokens = () if why == "no token" else (5, 6)
        values, missing = figures_of(script(tokens), meter=meter)
        assert values["joules_per_token"] is None and why in missing["joules_per_token"]


def test_answers_are_summed_before_they_are_divided() -> None:
    """The second has one canvas and two tokens: 9 tokens, 9 steps and one commit, 2.1 + 0.9 s, of which 10 tokens a prompt."""
    one = [*script()[:5], (0.0, Finished(reason="end", tokens=(5, 6), canvases=1, steps=3))]
    speaker = Script([script(), one])
    how = bench(speaker)
    values, _ = measure.figures([measure.answer(speaker, ADAPTIVE, None, how) for _ in range(2)], how)
    # of the second prefill is 0.6 - 0.3, the median of 200 and 400 ms, and decode 1.3 - 0.3
    assert values["prefill_tok_s"] == pytest.approx(20 / 0.7)
    assert values["decode_tok_s"] == pytest.approx(9 / 3.1)
    assert values["end_to_end_tok_s"] == pytest.approx(9 / (2.6 + 1.3))
    assert values["tokens_per_forward"] == pytest.approx(11 / 9)
    assert values["tokens_per_pass"] == pytest.approx(9 / 10)
    assert values["steps_per_canvas"] == pytest.approx(3) and values["canvas_ms"] == pytest.approx(3100 / 3)
    assert values["joules_per_token"] == pytest.approx(42 / 9)


def test_spread() -> None:
    found = measure.spread([{"a": 3.0, "b": 1.0}, {"a": 1.0, "b": None}, {"a": 4.0, "b": 1.0}])
    assert found == {"a": {"median": 3.0, "min": 1.0, "max": 4.0, "runs": [3.0, 1.0, 4.0]}, "b": None}


# ── repeats ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_warm_up_is_not_counted_and_every_run_reads_its_prompt() -> None:
    slow = [(10 * seconds, event) for seconds, event in script()]
    speaker = Script([slow, script(), script(), script()])
    how = bench(speaker)
    runs = measure.repeat(speaker, ADAPTIVE, "noise", how, 3)
    assert len(runs) == 3 and all(one.finished - one.began == pytest.approx(2.6) for one in runs)
    assert speaker.asked == [(PROMPT, ADAPTIVE.config, "noise", 8, [])] * 4
    found = measure.result(ADAPTIVE, runs, how)
    assert found["figures"]["step_ms_p50"]["runs"] == pytest.approx([200] * 3)
    assert (found["kept_tokens"], found["canvases"], found["finish"]) == (7, 2, "end")
    assert found["digest"] == runs[0].digest != measure.Answer(began=0, tokens=(5, 6)).digest


@pytest.mark.parametrize("different", [1, 3])
def test_runs_that_differ_are_refused(different: int) -> None:
    scripts = [script() for _ in range(4)]
    scripts[different] = script((5, 6, 7, 9, 5, 6, 7))
    speaker = Script(scripts)
    with pytest.raises(BenchRefused, match=f"run {different} .* differ at token 3") as refused:
        measure.repeat(speaker, ADAPTIVE, None, bench(speaker), 3)
    assert refused.value.exit_code == 13


def test_a_longer_answer_differs() -> None:
    speaker = Script([script(), script((5, 6, 7, 8, 5, 6, 7, 8))])
    with pytest.raises(BenchRefused, match="differ at token 7"):
        measure.repeat(speaker, ADAPTIVE, None, bench(speaker), 1)


@pytest.mark.parametrize(
    ("events", "what"),
    [
        (script(reused=3), "7 tokens of the prompt were read, not all 10"),
        (script(), "7 tokens came, not 8"),
        ([*script()[:7], *script(range(8))[8:]], "a canvas took 2 steps, not 3"),
    ],
)
def test_a_protocol_that_was_not_kept_is_refused(events: list[tuple[float, Event]], what: str) -> None:
    speaker = Script([events])
    with pytest.raises(BenchRefused, match=what):
        measure.answer(speaker, FIXED, None, bench(speaker))


def test_the_protocol_kept_is_not_refused() -> None:
    speaker = Script([script(range(8), "budget")])
    assert measure.answer(speaker, FIXED, None, bench(speaker)).kept == 8


def test_ctrl_c_ends_it() -> None:
    speaker = Script([script(reason="interrupted")])
    with pytest.raises(KeyboardInterrupt):
        measure.answer(speaker, ADAPTIVE, None, bench(speaker))


def test_on_a_real_conversation() -> None:
    """A model that is sure at once and ends early: endless takes all its steps and tokens, and a repeat is the same."""
    model = FakeModel([7, 8, 9, END] * 9)
    talk = Conversation(model, None)
    noise = PhiloxNoise(1, model.canvas_length, model.vocab_size, model.device)
    clock = iter(range(10_000))
    how = Bench(clock=lambda: float(next(clock)), settle=lambda: None, shared=False, power=Meter())
    task = Task(name="t", prompt=(9, 8, MARK), config=protocols.endless(GENERATION, 5), max_tokens=12)
    runs = measure.repeat(talk, task, noise, how, 2)
    assert [(one.kept, list(map(len, one.steps)), one.prompt) for one in runs] == [(12, [5, 5, 5], 3)] * 2
    free = measure.answer(talk, replace(task, config=GENERATION), noise, how)
    assert free.kept == 3 and free.reason == "end" and list(map(len, free.steps)) == [2]
