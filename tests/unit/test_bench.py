"""The benchmark: figures from a scripted clock, worked out by hand; what is asked, what is refused, what is printed."""

import io
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake import END, GENERATION, MARK, FakeModel

from dgemma_local.bench import __main__ as bare
from dgemma_local.bench import command, machine, measure, protocols, report, request
from dgemma_local.bench.json_file import JsonFile
from dgemma_local.bench.measure import Bench
from dgemma_local.bench.protocols import Task
from dgemma_local.config import GenerationConfig
from dgemma_local.engine import Conversation
from dgemma_local.errors import BenchRefused, UsageError
from dgemma_local.events import CanvasCommitted, Event, Finished, FinishReason, Prefilled, StepDone
from dgemma_local.noise import PhiloxNoise

PROMPT = tuple(range(10))
ENDLESS = protocols.endless(GENERATION, steps=3)
ADAPTIVE = Task(name="asked", prompt=PROMPT, config=replace(GENERATION, steps=3), max_tokens=8)
FIXED = Task(name="fixed", prompt=PROMPT, config=ENDLESS, max_tokens=8)


def step(canvas: int, number: int) -> StepDone:
    none: tuple[Any, ...] = ()
    return StepDone(
        canvas=canvas, step=number, steps=3, temperature=0.8, fed=none, draft=none, accepted=none, next=none,
        entropy=none, done=number == 2,
    )  # fmt: skip


def commit(canvas: int) -> CanvasCommitted:
    return CanvasCommitted(canvas=canvas, tokens=(5, 6, 7, 8), kept=4, steps=3, converged=False)


def script(
    tokens: Sequence[int] = (5, 6, 7, 8, 5, 6, 7), reason: FinishReason = "end", reused: int = 0
) -> list[tuple[float, Event]]:
    """Two canvases of three steps, with the seconds before each event."""
    return [
        (0.5, Prefilled(tokens=10, reused=reused)),
        (0.1, step(0, 0)),
        (0.2, step(0, 1)),
        (0.4, step(0, 2)),
        (0.1, commit(0)),
        (0.7, step(1, 0)),
        (0.2, step(1, 1)),
        (0.2, step(1, 2)),
        (0.1, commit(1)),
        (0.1, Finished(reason=reason, tokens=tuple(tokens), canvases=2, steps=6)),
    ]


@dataclass
class Script:
    """A conversation whose events come when they are told to; what it is asked is kept."""

    scripts: Sequence[Sequence[tuple[float, Event]]]
    now: float = 100.0
    held: list[int] = field(default_factory=lambda: [1, 2, 3])
    asked: list[tuple[Any, ...]] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def answer(self, prompt: Sequence[int], config: GenerationConfig, noise: Any, max_tokens: int) -> Iterator[Event]:
        events = self.scripts[len(self.asked) % len(self.scripts)]
        self.asked.append((tuple(prompt), config, noise, max_tokens, list(self.held)))
        self.held.extend(prompt)
        for seconds, event in events:
            self.now += seconds
            yield event


@dataclass
class Meter:
    """21 J an answer, whatever it is."""

    value: float | None = 21.0
    why_not: str | None = None
    spans: list[tuple[float, float]] = field(default_factory=list)

    def joules(self, begin: float, end: float) -> float | None:
        self.spans.append((begin, end))
        return self.value


def bench(speaker: Script, meter: Meter | None = None, *, shared: bool = False) -> Bench:
    return Bench(clock=speaker.clock, settle=lambda: None, shared=shared, power=meter or Meter())


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


# ── what is asked ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_fixed16_is_vllms() -> None:
    task = protocols.fixed16(GENERATION, canvas=256, context=8192, vocabulary=range(1000), seed=3)
    assert (len(task.prompt), task.max_tokens, task.note) == (1024, 1024, "")
    assert task.config == replace(GENERATION, steps=16, confidence=0.0, end_ids=())
    assert len(set(task.prompt)) > 500 and max(task.prompt) < 1000
    assert task.prompt == protocols.fixed16(GENERATION, canvas=256, context=4096, vocabulary=range(1000), seed=3).prompt
    assert task.prompt != protocols.fixed16(GENERATION, canvas=256, context=4096, vocabulary=range(1000), seed=4).prompt


def test_prompts_of_a_tokenizer_hold_no_token_that_steers() -> None:
    from dgemma_local.bench.subject import open_model

    subject = open_model("demo", device=None, context=None)
    assert subject.tokenizer is not None
    steering = {token for token in range(subject.vocab_size) if subject.tokenizer.is_control(token)}
    assert len(steering) > 5 and {*subject.vocabulary} == {*range(subject.vocab_size)} - steering
    for name in ("fixed16", "context"):
        drawn = {token for task in command.tasks(name, subject, 0) for token in task.prompt}
        assert len(drawn) > 100 and not drawn & steering
    subject.tokenizer = None
    assert list(subject.vocabulary) == list(range(subject.vocab_size))


def test_fixed16_where_the_context_is_short() -> None:
    task = protocols.fixed16(GENERATION, canvas=96, context=1024, vocabulary=range(128), seed=0)
    assert len(task.prompt) == task.max_tokens == 480 and "scaled: 480 tokens" in task.note and "1,024" in task.note
    with pytest.raises(UsageError, match="holds no fixed16") as refused:
        protocols.fixed16(GENERATION, canvas=96, context=191, vocabulary=range(128), seed=0)
    assert "192" in refused.value.fix
    assert protocols.fixed16(GENERATION, canvas=96, context=192, vocabulary=range(128), seed=0).max_tokens == 96
    assert protocols.fixed16(GENERATION, canvas=256, context=2048, vocabulary=range(128), seed=0).note == ""


@pytest.mark.parametrize(
    ("context", "canvas", "lengths"),
    [
        (8192, 256, (1024, 2048, 4096, 7680)),
        (262_144, 256, (*(1024 * 2**n for n in range(8)), 261_632)),
        (1024, 96, (256, 512, 832)),
        (4608, 256, (1024, 2048, 4096)),
        (512, 256, ()),
        (513, 256, (1,)),
    ],
)
def test_the_sweep(context: int, canvas: int, lengths: tuple[int, ...]) -> None:
    found = protocols.sweep_lengths(context, canvas)
    if lengths != (1,):
        assert found == lengths
    assert all(n + 2 * canvas <= context for n in found) and list(found) == sorted(set(found))
    if lengths:
        tasks = protocols.sweep(GENERATION, canvas=canvas, context=context, vocabulary=range(64), seed=0)
        assert [len(task.prompt) for task in tasks] == list(found)
        assert {task.max_tokens for task in tasks} == {2 * canvas} and {task.config.steps for task in tasks} == {16}
    else:
        with pytest.raises(UsageError, match="leaves the context sweep no prompt"):
            protocols.sweep(GENERATION, canvas=canvas, context=context, vocabulary=range(64), seed=0)


@pytest.mark.parametrize(
    ("demo", "names"),
    [
        (None, ["chat", "code", "json", "prose"]),
        ("demo", ["sudoku-4x4", "sudoku-6x6", "sudoku-9x9"]),
        ("demo-text", ["dates", "json", "table", "words"]),
    ],
)
def test_shipped_prompts(demo: str | None, names: list[str]) -> None:
    read: list[str] = []

    def encode(text: str) -> tuple[int, ...]:
        read.append(text)
        return tuple(text.encode())

    tasks = list(protocols.adaptive(GENERATION, encode, demo=demo, context=1024, canvas=96))
    assert [task.name for task in tasks] == names and all(task.config == GENERATION for task in tasks)
    assert all(text == text.strip() and text for text in read)
    assert all(len(task.prompt) + task.max_tokens <= 1024 and task.max_tokens % 96 == 0 for task in tasks)
    wide = protocols.adaptive(GENERATION, encode, demo=demo, context=8192, canvas=96)
    assert {task.max_tokens for task in wide} == {1024}


# ── flags ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ({"demo": True, "model": "x"}, "exclude each other"),
        ({"demo": True, "synthetic": "26b"}, "exclude each other"),
        ({"synthetic": "27b"}, "no synthetic model is called '27b'"),
        ({"layout": "fp8"}, "--layout is that of a synthetic model"),
        ({"synthetic": "26b", "layout": "int4"}, "no layout is called 'int4'"),
        ({"synthetic": "26b", "protocol": "adaptive"}, "has no words"),
        ({"synthetic": "26b", "against": "transformers"}, "cannot open random weights"),
        ({"demo": True, "protocol": "fixed16,quick"}, "no protocol is called 'quick'"),
        ({"demo": True, "protocol": " , "}, "names nothing"),
        ({"demo": True, "runs": 0}, "0 runs"),
        ({"model": " "}, "--model names nothing"),
        (
            {"demo": True, "against": "transformers", "fp8_mlp": True, "fp8_attention": True},
            "--fp8-attention, --fp8-mlp",
        ),
        ({"demo": True, "seed": 1 << 64}, "out of range"),
        ({"demo": True, "seed": -1}, "out of range"),
        ({"demo": True, "context": 0}, "a context of 0"),
        ({"demo": True, "device": "tpu"}, "the device 'tpu'"),
        ({"demo": True, "dtype": "float16"}, "the dtype 'float16'"),
        ({"synthetic": "26b", "dtype": "bfloat16"}, "--dtype is that of a model with weights"),
        ({"demo": True, "against": "vllm"}, "against 'vllm'"),
        ({"demo": True, "against": "http://x", "protocol": "adaptive"}, "compared by fixed16"),
    ],
)
def test_flags_that_cannot_be(flags: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError) as refused:
        request.checked(**flags)
    assert what in refused.value.what and refused.value.fix and "\n" not in refused.value.what + refused.value.fix


def test_what_is_measured_without_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgemma_local.auto.cards", lambda: ())
    assert request.checked() == request.Request(model="demo", protocols=("fixed16", "adaptive", "breakdown"))
    assert request.checked(demo=True, protocol="all").protocols == protocols.NAMES
    assert request.checked(demo=True, protocol="breakdown, fixed16").protocols == ("fixed16", "breakdown")
    assert request.checked(demo=True, dtype="bfloat16", device="cpu").dtype == "bfloat16"
    random = request.checked(synthetic="26b")
    assert (random.model, random.layout, random.protocols) == (None, "nvfp4", ("fixed16", "breakdown"))
    assert request.checked(synthetic="26b", protocol="all").protocols == ("fixed16", "context", "breakdown")


# ── the file ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_file_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    nothing = JsonFile(None)
    nothing.write({"complete": True})
    nothing.remove()
    nothing.check()
    there = tmp_path / "there.json"
    JsonFile(str(there))
    assert not list(tmp_path.iterdir())
    there.write_text("old")
    JsonFile(str(there))
    assert there.read_text() == "old" and list(tmp_path.iterdir()) == [there]
    for bad in (str(tmp_path), str(tmp_path / "none" / "x.json"), str(there / "x"), "\0"):
        with pytest.raises(UsageError, match="cannot be written"):
            JsonFile(bad)


def test_each_document_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    """In one move: whoever has the old one open goes on reading it whole."""
    path, link = tmp_path / "out.json", tmp_path / "link.json"
    link.symlink_to(path)
    file = JsonFile(str(link))
    file.write({"complete": False, "n": 1})
    path.chmod(0o640)
    with path.open() as reader:
        file.write({"complete": False, "n": 2})
        assert json.load(reader)["n"] == 1
    assert json.loads(path.read_text())["n"] == 2 and path.stat().st_mode & 0o777 == 0o640
    assert sorted(tmp_path.iterdir()) == [link, path] and link.is_symlink()
    file.remove()
    assert list(tmp_path.iterdir()) == [link]


def test_a_pipe_gets_the_whole_document_alone(tmp_path: Path) -> None:
    import os

    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    file = JsonFile(str(path))
    file.write({"complete": False})
    file.write({"complete": True})
    assert json.loads(os.read(reader, 1000)) == {"complete": True}
    file.remove()
    os.close(reader)
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_that_is_full_is_said_and_does_not_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    path = tmp_path / "out.json"
    file = JsonFile(str(path), said.append)
    file.write({"complete": False, "n": 1})

    def full(self: Path, *_: Any, **__: Any) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as then:
        then.setattr(Path, "write_text", full)
        file.write({"complete": False, "n": 2})
    assert said == [f"{str(path)!r} cannot be written: No space left on device"]
    assert json.loads(path.read_text())["n"] == 1 and list(tmp_path.iterdir()) == [path]
    with pytest.raises(UsageError, match="No space left"):
        file.check()
    file.write({"complete": True})
    file.check()  # there was room again


# ── the machine ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_power_between_two_moments() -> None:
    """Readings at 1, 2, 3 … s of 100, 200, 300 … W."""
    now = iter(range(1, 100))
    power = machine.Power("GPU-1", clock=lambda: float(next(now)))
    for watts in (100, 200, 300, 400):
        power.take(f"{watts}.00, 2100, 10501\n")
    assert power.joules(1.5, 3.5) == pytest.approx(250 * 2)
    assert power.joules(2.0, 4.0) == pytest.approx(300 * 2)
    assert power.joules(2.5, 3.5) is None and power.joules(7, 9) is None
    assert (power.median_clock(0), power.median_clock(1)) == (2100, 10501)
    assert power.why_not is None


def test_power_that_is_not_told() -> None:
    power = machine.Power("GPU-1")
    power.take("[N/A], [N/A], [N/A]\n")
    assert power.joules(0, 1e12) is None and power.why_not is not None and "[N/A]" in power.why_not
    power.take("80.5, [N/A], [N/A]\n")  # clocks alone are missing
    assert power.watts == [80.5] and power.median_clock(0) is None


def test_without_a_card_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with machine.Power(None) as power:
        assert power.joules(0, 1) is None and power.why_not is not None and "no NVIDIA card" in power.why_not


def test_power_is_read_while_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvidia-smi that writes a line and then waits to be ended."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "$@" > "$0.asked"\necho "50.0, 1, 2"\necho "70.0, 1, 2"\nexec sleep 60\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with machine.Power("GPU-7") as power:
        while len(power.at) < 2:
            power._thread.join(0.01)
    assert power.watts == [50, 70] and not power._thread.is_alive()
    assert "-i GPU-7 --query-gpu=power.draw,clocks.sm,clocks.mem" in (tmp_path / "nvidia-smi.asked").read_text()


def test_no_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with machine.Power("GPU-7") as power:
        assert power.why_not is not None and "cannot be started" in power.why_not
    assert machine._driver("GPU-7") == (None, None) == machine._driver(None)


def test_what_the_driver_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for said, found in (("575.1, 450.00", ("575.1", 450.0)), ("575.1, [N/A]", ("575.1", None)), ("odd", (None, None))):
        tool.write_text(f'#!/bin/sh\necho "{said}"\n')
        tool.chmod(0o755)
        assert machine._driver("GPU-7") == found


def test_the_name_of_the_cpu(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\nmodel name\t: other\n")
    assert machine.cpu_name(info) == "Some CPU @ 3 GHz"
    assert machine.cpu_name(tmp_path / "none")


def test_memory_of_this_process() -> None:
    peak, of = machine.peak_memory(torch.device("cpu"))
    assert of == "process" and peak > 50e6  # torch is in it


# ── what is printed ───────────────────────────────────────────────────────────────────────────────────────────────


def document(**changes: Any) -> dict[str, Any]:
    """Of scripted answers; a card's, with all that it may tell."""
    speaker = Script([script()])
    how = bench(speaker)
    fixed = measure.result(ADAPTIVE, measure.repeat(speaker, ADAPTIVE, None, how, 2), how)
    row = {"part": "experts", "count": 30, "ms": 1.5, "share": 0.25, "bytes": 3_000_000, "flops": None, "gb_s": None}
    return {
        "schema": 1,
        "complete": True,
        "dgemma": "0.1",
        "date": "2026-01-01T00:00:00+00:00",
        "label": "a label",
        "seed": 7,
        "runs": 2,
        "subject": {
            "name": "one", "kind": "model", "layout": "fp8", "fp8": [], "dtype": "bfloat16", "device": "cuda:0", "mode": "graphs",
            "context": 8192, "canvas_length": 4, "vocab_size": 9, "load_seconds": 2.5, "planned_bytes": 5,
        },
        "machine": {
            "cpu": "C", "cores": 8, "threads": 4, "python": "3", "torch": "2", "triton": "3", "cuda": "13", "gpu": "G",
            "driver": "575", "power_limit_w": 450.0, "sm_mhz": 2100.0, "memory_mhz": 10501.0,
        },
        "protocols": {
            "fixed16": {"note": "scaled: so", "tasks": [fixed], "rows": []},
            "context": {"note": "", "tasks": [fixed], "rows": []},
            "breakdown": {"note": "", "tasks": [], "rows": [row | {"of_copy": 0.5, "of_roofline": None}]},
        },
        "memory": {"peak_bytes": 4_500_000_000, "of": "device", "planned_bytes": 5_000_000_000},
        "against": None,
    } | changes  # fmt: skip


def text_of(found: dict[str, Any]) -> str:
    return "\n".join([*report.head(found), *(line for table in report.tables(found) for line in report.plain(table))])


def test_the_tables() -> None:
    text = text_of(document())
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "a label"
    assert "one: fp8, bfloat16, on cuda:0, graphs; context 8,192; --seed 7, 2 runs behind a warm-up" in lines
    assert (
        "G, driver 575, 450 W at most, 2100 / 10501 MHz; C, 4 of 8 threads; torch 2, triton 3, Python 3, dgemma 0.1"
        in lines
    )
    assert "loaded in 2.50 s; peak 4.500 GB of tensors on the device; planned 5.000 GB" in lines
    for line in ("ms/step, p50 200.00", "ms/step, p95 400.00", "tok/s, decode 3.3", "joules/token 3.000", "scaled: so"):
        assert line in lines
    assert "10 200.00 400.00 1,050.0 3.3 2.7 1,300.0 25" in lines  # the sweep
    assert "a step ms % of it MB % of a copy's" in lines and "experts 30 1.500 25.0 3.0 50" in lines


def test_a_spread_is_shown() -> None:
    speaker = Script([script(), script(), [(2 * seconds, event) for seconds, event in script()], script()])
    how = bench(speaker)
    found = document()
    found["protocols"]["fixed16"]["tasks"] = [
        measure.result(ADAPTIVE, measure.repeat(speaker, ADAPTIVE, None, how, 3), how)
    ]
    assert "200.00 (200.00 … 400.00)" in text_of(found)


def test_what_is_missing_says_why() -> None:
    speaker = Script([[*script()[:5], (0.0, Finished(reason="end", tokens=(5, 6), canvases=1, steps=3))]])
    how = bench(speaker, Meter(None, "no card"))
    task = measure.result(ADAPTIVE, measure.repeat(speaker, ADAPTIVE, None, how, 1), how)
    found = document(protocols={"adaptive": {"note": "", "tasks": [task], "rows": []}})
    text = text_of(found)
    assert "- joules/token: no card" in text and "- ms/commit, by difference: no answer had a second canvas" in text
    assert json.loads(report.line(found))["protocols"]["adaptive"]["tasks"][0]["figures"]["joules_per_token"] is None


def test_the_last_line_is_sorted_json_without_nan() -> None:
    found = document()
    line = report.line(found)
    assert (
        "\n" not in line and json.loads(line) == found and line == json.dumps(found, sort_keys=True, ensure_ascii=False)
    )
    with pytest.raises(ValueError, match="JSON"):
        report.line(document(seed=float("nan")))


def test_every_key_of_the_document_is_in_the_docstring() -> None:
    from dgemma_local import bench as package

    told = package.__doc__ or ""
    found = document()
    keys = {*found, *found["subject"], *found["machine"], *found["memory"], *found["protocols"]["fixed16"]}
    keys |= {*found["protocols"]["fixed16"]["tasks"][0], *report.FIGURES, *found["protocols"]}
    missing = [key for key in keys if key not in told]
    assert not missing


TRANSFORMERS: dict[str, Any] = {
    "why_not": None,
    "transformers": "5.24.0",
    "dtype": "float32",
    "per_step": [
        {"threads": n, "ms": {"ours": 2.0, "transformers sdpa": 2.0 * ratio}, "ratio": ratio,
         "compared": 9, "unequal": 0, "twin": "transformers eager", "steps": 6, "wanted": 6}
        for n, ratio in ((1, 1.5), (2, 1.25))
    ],
    "answers": [
        {"threads": 1, "tok_s": {"ours": 30.0, "transformers sdpa": 10.0}, "ratio": 3.0, "compared": 0, "unequal": 0,
         "step_ms": {"ours": 2.0, "transformers sdpa": 5.0, "transformers eager": 4.0}},
    ],
}  # fmt: skip


def test_the_worst_ratio_counts() -> None:
    assert report.ratios(TRANSFORMERS) == {"per_step": 1.25, "per_canvas": None, "end_to_end": 3.0}
    on_a_card = report.ratios(TRANSFORMERS | {"per_step": []})
    assert on_a_card == {"per_step": 2.0, "per_canvas": None, "end_to_end": 3.0}
    assert set(report.ratios({"why_not": "absent"}).values()) == {None}


@pytest.mark.parametrize(("dtype", "why"), [("float32", "near-tie"), ("bfloat16", "--dtype float32")])
def test_tokens_that_differ_have_a_reason(dtype: str, why: str) -> None:
    one, two = TRANSFORMERS["per_step"]
    found = TRANSFORMERS | {"dtype": dtype, "per_step": [one, two | {"unequal": 4}]}
    text = text_of(document(against={"what": "transformers", "found": found, "ratio": report.ratios(found)}))
    assert text.count(why) == 1
    assert "4 of 9 compared" in text


def test_steps_that_were_cut_are_shown_and_not_in_the_ratio() -> None:
    one, two = TRANSFORMERS["per_step"]
    none = dict.fromkeys(two["ms"])
    for cut in (two | {"steps": 5}, two | {"steps": 0, "ms": none, "ratio": None}):
        found = TRANSFORMERS | {"per_step": [one, cut]}
        assert report.ratios(found)["per_step"] == 1.5
        text = text_of(document(against={"what": "transformers", "found": found, "ratio": report.ratios(found)}))
        assert f"stopped early, {cut['steps']} of 6 steps were timed: not in the ratio below" in text
        assert text.count("stopped early") == 1


def test_threads_that_wait_for_each_other_are_shown_and_not_in_the_ratio() -> None:
    one, two = TRANSFORMERS["per_step"]
    slow = two | {"ms": {name: ms * 60 for name, ms in one["ms"].items()}, "ratio": 0.5}
    found = TRANSFORMERS | {"per_step": [one, slow]}
    assert report.ratios(found)["per_step"] == 1.5
    text = text_of(document(against={"what": "transformers", "found": found, "ratio": report.ratios(found)}))
    assert text.count("slower than with fewer threads") == 1 and "120.000" in text
    ours_alone = two | {"ms": two["ms"] | {"ours": 9.0}, "ratio": 0.5}  # theirs gain by them: that counts
    assert report.ratios(TRANSFORMERS | {"per_step": [one, ours_alone]})["per_step"] == 0.5


def test_one_run_and_all_the_steps() -> None:
    found = document(runs=1)
    assert "--seed 7, 1 run behind a warm-up" in text_of(found)
    (fixed,) = found["protocols"]["fixed16"]["tasks"]
    for confidence, words in ((0.0, "fixed16: exactly 3 steps"), (0.1, "fixed16: at most 3 steps")):
        fixed["confidence"] = confidence
        assert words in text_of(found)


def test_the_comparison_is_shown() -> None:
    against = {"what": "transformers", "found": TRANSFORMERS, "ratio": report.ratios(TRANSFORMERS)}
    lines = [" ".join(line.split()) for line in text_of(document(against=against)).splitlines()]
    assert "a step 1.25" in lines and "end to end 3.00" in lines and "transformers sdpa 2.500" in lines
    assert lines.count("0 of 9 compared with transformers eager by their tokens differ") == 2
    assert "against transformers, step by step, 1 thread" in lines
    assert "against transformers, step by step, 2 threads" in lines
    assert "against transformers, whole answers, 1 thread" in lines and not any(
        line.startswith("a canvas") for line in lines
    )
    refused = {"what": "transformers", "found": {"why_not": "not installed"}, "ratio": report.ratios({})}
    text = text_of(document(against=refused))
    assert "against transformers: not measured" in text and "not installed" in text and "ours : theirs" not in text


def test_an_endpoint_is_set_beside_the_same_figures() -> None:
    """Ours: 1,050 ms a canvas, 7 tokens in 2.6 s."""
    found = {
        "url": "http://x", "model": "m", "version": None, "settings": "not read", "same_steps": True, "notes": ["2 of 3 are short"],
        "median": {"ttft_ms": 2000.0, "canvas_ms": 2100.0, "end_to_end_tok_s": 7 / 5.2, "decode_tok_s": None},
        "missing": {"decode_tok_s": "not ours either"},
    }  # fmt: skip
    ours = document()["protocols"]["fixed16"]["tasks"][0]["figures"]
    ratio = report.endpoint_ratios(ours, found)
    assert ratio == pytest.approx({"per_step": 2.0, "per_canvas": 2.0, "end_to_end": 2.0})
    lines = [
        " ".join(line.split())
        for line in text_of(document(against={"what": "http://x", "found": found, "ratio": ratio})).splitlines()
    ]
    for line in ("ms to the first canvas 1,300.0 2,000.0", "ms/canvas 1,050.0 2,100.0", "tok/s, end to end 2.7 1.3"):
        assert line in lines
    assert "m, version ?: not read" in lines and "2 of 3 are short" in lines and "a step 2.00" in lines
    found["same_steps"] = False
    ratio = report.endpoint_ratios(ours, found)
    assert ratio["per_step"] is None and ratio["per_canvas"] == pytest.approx(2.0)
    text = text_of(document(against={"what": "http://x", "found": found, "ratio": ratio}))
    assert "a step" not in text.split("so many times as fast")[1] and "a canvas" in text.split("so many times")[1]
    found["same_steps"], found["median"]["canvas_ms"], found["missing"] = True, None, {"canvas_ms": "no whole canvas"}
    ratio = report.endpoint_ratios(ours, found)
    assert ratio["per_step"] is ratio["per_canvas"] is None
    text = text_of(document(against={"what": "http://x", "found": found, "ratio": ratio}))
    assert "- canvas_ms: no whole canvas" in text


def test_a_server_that_gave_fewer_tokens_has_no_ratio() -> None:
    found = {
        "url": "http://x", "model": "m", "version": None, "settings": "not read", "same_steps": True, "notes": [],
        "median": {"ttft_ms": 1.0, "canvas_ms": 1.0, "end_to_end_tok_s": 1.0, "decode_tok_s": 1.0}, "missing": {},
        "no_ratio": "the server gave 3 tokens",
    }  # fmt: skip
    ours = document()["protocols"]["fixed16"]["tasks"][0]["figures"]
    ratio = report.endpoint_ratios(ours, found)
    assert ratio == dict.fromkeys(report.RATIOS)
    text = text_of(document(against={"what": "http://x", "found": found, "ratio": ratio}))
    assert "against http://x: no ratio" in text and "the server gave 3 tokens" in text
    assert "so many times as fast" not in text


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_on_a_terminal_and_in_a_pipe() -> None:
    from dgemma_local.ui.bench import show_bench

    screen, pipe = Screen(), io.StringIO()
    found = document(label="odd \x1b[31m label")
    show_bench(found, screen)
    show_bench(found, pipe)
    assert "\x1b[31m label" not in screen.getvalue() + pipe.getvalue()  # a name may hold anything
    assert pipe.getvalue().splitlines()[-1] == screen.getvalue().splitlines()[-1] == report.line(found)
    assert "200.00" in screen.getvalue() and "200.00" in pipe.getvalue() and "scaled: so" in screen.getvalue()


def test_a_narrow_terminal_gets_the_columns_in_parts() -> None:
    from dgemma_local.ui.bench import _parts

    columns = [["a" * 8], ["b" * 8], ["c" * 30], ["d"]]
    assert list(_parts(columns, 20)) == [columns[:2], columns[2:3], columns[3:]]
    assert list(_parts(columns, 19)) == [columns[:1], columns[1:2], columns[2:3], columns[3:]]
    assert list(_parts([], 20)) == [[]]


# ── whole ─────────────────────────────────────────────────────────────────────────────────────────────────────────

BARE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
BLOCKED = {"typer", "click", "rich", "tokenizers", "safetensors", "jinja2", "compressed_tensors", "huggingface_hub", "transformers"}
sys.meta_path.insert(0, Absent())
from dgemma_local.bench.__main__ import main
code = main(sys.argv[1:])
assert not BLOCKED & {name.split(".")[0] for name in sys.modules}
sys.exit(code)
"""


def on_a_bare_machine(*flags: str, small: bool = True) -> "subprocess.CompletedProcess[str]":
    import os

    environment = os.environ | {"OMP_NUM_THREADS": "1", "DGEMMA_GPU_SUITE_SMALL": "1" if small else "0"}
    return subprocess.run(
        [sys.executable, "-c", BARE, *flags], capture_output=True, text=True, env=environment, check=False
    )


def test_synthetic_needs_torch_and_triton_alone() -> None:
    """Of the small sizes that the suite for a card is rehearsed with."""
    flags = ("--synthetic", "26b", "--layout", "fp8", "--protocol", "fixed16", "--runs", "1", "--context", "1024")
    done = on_a_bare_machine(*flags, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    *tables, last = done.stdout.splitlines()
    found = json.loads(last)
    assert tables[0] == found["label"] == "rehearsal: small sizes, nothing was measured" and found["complete"]
    assert found["subject"]["kind"] == "synthetic" and found["subject"]["layout"] == "fp8"
    (task,) = found["protocols"]["fixed16"]["tasks"]
    assert task["kept_tokens"] == 512 and task["canvases"] == 2 and task["figures"]["steps_per_canvas"]["median"] == 16
    assert task["figures"]["commit_ms"] is not None and "scaled" in task["note"]


def test_synthetic_that_does_not_fit_is_refused_with_sizes(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("DGEMMA_GPU_SUITE_SMALL", "0")
    monkeypatch.setattr("dgemma_local.card.host_memory", lambda: 2 * 10**9)
    assert bare.main(["--synthetic", "26b", "--device", "cpu", "--layout", "bf16"]) == 11
    what, fix = capsys.readouterr().err.splitlines()[-2:]
    assert "synthetic 26b bf16 does not fit" in what and " GB" in what and "2.00 GB" in what
    assert "--demo" in fix and "free" in fix
    monkeypatch.setattr("dgemma_local.card.host_memory", lambda: 24 * 10**9)
    assert bare.main(["--synthetic", "26b", "--device", "cpu", "--layout", "fp8"]) == 11
    assert "take --layout nvfp4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "code", "what"),
    [
        (["--synthetic", "26b", "--layout", "int4"], 2, "no layout is called 'int4'"),
        (["--synthetic", "26b", "--context", "300000"], 2, "a context of 300,000 tokens"),
        (["--demo", "--context", "5000"], 2, "a context of 5,000 tokens"),
        (["--model", "nobody"], 4, "no model and no folder is called 'nobody'"),
        (["--demo", "--json", "/nowhere/at/all.json"], 2, "cannot be written"),
    ],
)
def test_two_lines_on_a_bare_machine(flags: list[str], code: int, what: str, capsys: Any) -> None:
    assert bare.main(flags) == code
    said = capsys.readouterr()
    error, fix = said.err.splitlines()[-2:]
    assert error.startswith("error: ") and what in error and fix.startswith("  fix: ") and said.out == ""


def test_the_26b_model_is_not_made_on_a_cpu_unless_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from dgemma_local.bench import subject, synthetic

    class Made(Exception):
        pass

    def make(*_: Any, **__: Any) -> None:
        raise Made

    said: list[str] = []
    monkeypatch.setattr(synthetic, "make", make)
    monkeypatch.setattr("dgemma_local.card.host_memory", lambda: 10**12)
    with pytest.raises(UsageError) as refused:
        subject.open_synthetic("fp8", device=None, context=None, seed=0, say=said.append)
    assert " GB of memory" in refused.value.what and "minutes" in refused.value.what and not said
    assert "--demo" in refused.value.fix and "--device cpu" in refused.value.fix
    with pytest.raises(Made):
        subject.open_synthetic("fp8", device="cpu", context=None, seed=0, say=said.append)
    assert said[-1] == "on a CPU: a step takes minutes, and an answer many of them"
    told: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setenv("DGEMMA_GPU_SUITE_SMALL", "1")
    with pytest.raises(Made):
        subject.open_synthetic("fp8", device=None, context=512, seed=0, say=(said := []).append)
    assert told == [1] and said == ["making the 26B model of random numbers, fp8"]


def test_the_layouts_that_flags_know_are_those_that_can_be_made() -> None:
    from dgemma_local.bench import synthetic

    assert set(request.LAYOUTS) == set(synthetic.LAYOUTS)


def test_flags_are_refused_without_torch() -> None:
    code = (
        "import sys; from dgemma_local.bench.__main__ import main; "
        "assert main(['--synthetic', '26b', '--layout', 'int4']) == 2; "
        "assert main(['--demo', '--json', '']) == 2; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


# ── the process's output ──────────────────────────────────────────────────────────────────────────────────────────

QUICK = """
import sys, types
from dgemma_local import streams
from dgemma_local.bench import __main__ as bare, command, request
def run(wanted, say, file, show):
    ACTION
command.run = run
bare._show = lambda document: (sys.stdout.write("x" * 200000), sys.stdout.flush())
streams.prepare()
sys.exit(bare.main(["--demo"]))
"""


def ended(action: str, shell: str) -> tuple[int, str]:
    """The exit code and stderr of a bench that does this, under a shell line; $RUN is the command."""
    done = subprocess.run(
        ["bash", "-c", f'RUN=("$0" -c "$1"); {shell}', sys.executable, QUICK.replace("ACTION", action)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("action", "shell", "code", "said"),
    [
        ("show({})", '"${RUN[@]}" | true; exit "${PIPESTATUS[0]}"', 141, ""),
        ("show({})", '"${RUN[@]}" >&-', 141, ""),
        (
            "show({})",
            '"${RUN[@]}" >/dev/full',
            1,
            "error: the output cannot be written: No space left on device\n  fix: ",
        ),
        (
            "pass",
            'env -u PYTHONUNBUFFERED "$0" -m dgemma_local.bench --help >/dev/full',
            1,
            "error: the output cannot be written: No space left on device\n  fix: ",
        ),
        ("say('a'); show({})", '"${RUN[@]}" 2>&- >/dev/null', 0, ""),
        ("say('a'); show({})", '"${RUN[@]}" 2>/dev/full >/dev/null', 0, ""),
        ("import os; os.kill(os.getpid(), 15)", '"${RUN[@]}"', 143, ""),
        ("raise KeyboardInterrupt", '"${RUN[@]}"', 130, "interrupted"),
    ],
)
def test_how_a_process_ends(action: str, shell: str, code: int, said: str) -> None:
    found, stderr = ended(action, shell)
    assert found == code and stderr.startswith(said) and stderr.count("\n") == said.count("\n") + bool(said)


def test_both_front_ends_take_the_same_flags() -> None:
    import inspect

    from dgemma_local.cli_bench import bench as typed

    theirs = {"json_file" if name == "json" else name for name in vars(bare.parser().parse_args([]))}
    assert theirs == set(inspect.signature(typed).parameters) - {"view"}  # which needs rich, and the other has none


def test_no_speed_over_a_failed_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    from dgemma_local import ops, selftest
    from dgemma_local.bench.subject import open_model

    subject = open_model("demo", device=None, context=None)
    command.require_sound_kernels(subject)  # on a CPU no kernel runs, and none is tested
    outcome = selftest.Outcome("attention", False, "2 numbers")
    monkeypatch.setattr(selftest, "needed", lambda network: network is subject.network)
    monkeypatch.setattr(selftest, "failing", lambda network, context: [outcome])
    with pytest.raises(BenchRefused, match="attention"):
        command.require_sound_kernels(subject)
    monkeypatch.setattr(selftest, "failing", lambda network, context: [])
    command.require_sound_kernels(subject)
    monkeypatch.setattr(ops, "replaced", lambda: frozenset({"route"}))  # when it was opened
    with pytest.raises(BenchRefused, match="route"):
        command.require_sound_kernels(subject)


def test_a_page_without_figures_says_what_became_of_them(tmp_path: Path) -> None:
    """One bench was ended before its model was there; what has figures has no such line."""
    from gpu import merge

    parts = [("suite", "0"), ("fp8-1", "124"), ("times", "3")]
    (tmp_path / "one-parts.tsv").write_text("".join(f"{name}\t{code}\t1\t2\tlog\n" for name, code in parts))
    (tmp_path / "one-fp8-1.json").write_text(report.line(command._head(request.Request(model="demo"))))
    found = merge.merged(tmp_path, "one", 3)
    assert merge.page(found).endswith("\nno figures: fp8-1 cut, times failed, exit code 3\n")
    times = {"steps": {"a step": {"ms": 1.0, "ms_predicted": None, "launches": 1}}}
    assert "no figures" not in merge.page(found | {"times": times})
    assert "no part that measures was begun" in merge.page(found | {"parts": []})


def test_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    from dgemma_local.bench.subject import open_model

    subject = open_model("demo-text", device=None, context=None)
    assert subject.label == "demo model on a CPU: these figures say nothing about the 26B model or a GPU"
    assert (subject.kind, subject.layout, subject.mode[:5], subject.shared) == ("demo", "bf16", "torch", False)
    assert subject.folder is not None and subject.folder.name == "text" and subject.load_seconds > 0
    subject.kind = "model"
    assert subject.label == "on a CPU: these figures say nothing about a GPU"
    subject.device = torch.device("cuda")
    assert subject.label is None
    subject.kind = "demo"
    assert subject.label == "demo model on a GPU: these figures say nothing about the 26B model"
    subject.kind = "synthetic"
    assert subject.label is not None and subject.label.endswith("the tokens mean nothing")
    monkeypatch.setenv("DGEMMA_GPU_SUITE_SMALL", "1")
    assert subject.label == "rehearsal: small sizes, nothing was measured"
    subject.kind = "demo"  # the same whether rehearsing or not
    assert subject.label.startswith("demo model")
    subject.model = type("Model", (), {"mode": "graphs", "joins": 256})()
    assert (subject.mode, subject.shared) == ("graphs", True)


def test_parts_in_fp8_are_asked_for_and_named() -> None:
    asked = request.checked(synthetic="26b", layout="nvfp4", fp8_attention=True, fp8_mlp=True)
    assert asked.fp8 == ("attention", "mlp")
    given = bare.parser().parse_args(["--synthetic", "26b", "--fp8-embedding"])
    assert request.checked(**{k: v for k, v in vars(given).items() if k not in ("json", "quiet")}).fp8 == ("embedding",)
    made = document()
    made["subject"]["fp8"] = ["attention", "mlp"]
    assert any("fp8 with attention, mlp in FP8, bfloat16, on cuda:0" in line for line in report.head(made))
