"""The benchmark beside transformers: turns, the same tokens of the same steps, and why it may not take part."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compare_step
import pytest
import torch
from reference import open_model
from ticking import ticking
from tiny import write_tensors, write_tiny

from dgemma_local.bench import comparison, transformers_side, turns
from dgemma_local.bench.comparison import Answer
from dgemma_local.bench.protocols import Task, endless
from dgemma_local.bench.transformers_side import THEIRS
from dgemma_local.bench.turns import OURS, STEPS, THEIR_DRAWS, WARM_UP
from dgemma_local.config import GenerationConfig, load_generation_config
from dgemma_local.demo.render import FOLDERS
from dgemma_local.engine import Conversation
from dgemma_local.errors import CheckpointError
from dgemma_local.model import DiffusionGemma
from dgemma_local.noise import PhiloxNoise

FOLDER = FOLDERS["sudoku"]
EAGER, SDPA = THEIRS
# what transformers imports at its first step brings this warning with it
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")


@pytest.fixture(scope="module")
def model() -> DiffusionGemma:
    return open_model(FOLDER, torch.float32)


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    return transformers_side.open_theirs(FOLDER, torch.float32, torch.device("cpu"))


@pytest.fixture
def config() -> GenerationConfig:
    return load_generation_config(FOLDER)


@pytest.fixture
def task(config: GenerationConfig) -> Task:
    """Two canvases of three steps."""
    return Task(name="short", prompt=tuple(range(20, 60)), config=endless(config, 3), max_tokens=192)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers that torch was told, and that it says it has; it keeps to one: on a busy machine two wait for each other."""
    told = [1]
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: told[-1])
    return told


class Paced:
    """A contestant whose n-th step takes as many seconds as it is told."""

    def __init__(self, now: list[float], log: list[str], name: str, seconds: Callable[[int, int], float]) -> None:
        self.now, self.log, self.name, self.seconds = now, log, name, seconds

    def begin(self, seed: int) -> None:
        self.seed, self.number = seed, 0

    def step(self) -> list[int]:
        self.now[0] += self.seconds(self.seed, self.number)
        self.log.append(self.name)
        self.number += 1
        return [self.seed, self.number]


def test_contestants_take_turns_and_the_warm_up_is_not_counted() -> None:
    now, log, seen = [0.0], list[str](), list[Mapping[str, list[int]]]()
    slow = Paced(now, log, "slow", lambda seed, number: 0.004 if seed >= WARM_UP else 9.0)
    mixed = Paced(now, log, "mixed", lambda seed, number: (1.0, 2.0, 3.0, 30.0, 40.0, 50.0)[number] / 1000)
    ms = turns.take_turns({"slow": slow, "mixed": mixed}, 2, seen.append, lambda: now[0])
    assert ms["slow"] == pytest.approx([4] * 2 * STEPS)
    assert ms["mixed"] == pytest.approx([1, 2, 3, 30, 40, 50] * 2)
    assert log == ["slow", "mixed"] * STEPS * (WARM_UP + 2)
    assert seen[0] == {"slow": [0, 1], "mixed": [0, 1]} and len(seen) == STEPS * (WARM_UP + 2)


@pytest.mark.parametrize(("until", "timed"), [(20.0, 0), (21.5, 2), (23.0, 3), (100.0, 12)])
def test_turns_end_in_time_and_all_have_taken_as_many(until: float, timed: int) -> None:
    """A turn takes a second; the clock begins at 14, so that the warm-up ends at 20. The turn in progress is finished."""
    now, log = [14.0], list[str]()
    contestants = {name: Paced(now, log, name, lambda seed, number: 0.5) for name in "ab"}
    ms = turns.take_turns(contestants, 2, lambda tokens: None, lambda: now[0], warm_up=1, until=until)
    assert ms == {"a": [500] * timed, "b": [500] * timed}
    assert log == ["a", "b"] * (STEPS + timed)


@pytest.mark.parity
def test_steps_in_turns_have_the_tokens_of_transformers(
    model: DiffusionGemma, theirs: dict[str, Any], config: GenerationConfig
) -> None:
    state = torch.get_rng_state()
    found = turns.per_step(model, theirs, range(20, 60), config, rounds=1, clock=ticking(0.25))
    assert torch.equal(torch.get_rng_state(), state)
    assert found["ms"] == {OURS: 250.0, THEIR_DRAWS: 250.0, EAGER: 250.0, SDPA: 250.0}
    assert (found["threads"], found["steps"]) == (1, STEPS)
    assert (found["compared"], found["unequal"], found["ratio"]) == (STEPS * (WARM_UP + 1), 0, 1.0)


@pytest.mark.parity
def test_a_sure_model_takes_every_step(theirs: dict[str, Any], config: GenerationConfig) -> None:
    """A threshold above any entropy, and no stability: each would end a canvas at its first step."""
    sure = replace(config, confidence=99.0, stability=0)
    one = turns.Theirs(theirs[EAGER], torch.arange(20, 60), sure)
    one.begin(0)
    steps = [one.step() for _ in range(STEPS)]
    assert all(a != b for a, b in pairwise(steps))


def scripted_turns(monkeypatch: pytest.MonkeyPatch, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """`per_step` around turns that are given; what they were asked."""
    asked: list[dict[str, Any]] = []

    def take_turns(contestants: Any, rounds: int, check: Any, clock: Any, **options: Any) -> dict[str, list[float]]:
        assert list(contestants) == [OURS, THEIR_DRAWS, EAGER, SDPA]
        asked.append({"rounds": rounds, **options})
        check({OURS: [1], THEIR_DRAWS: [2], EAGER: [2], SDPA: [3]})
        check({OURS: [2], THEIR_DRAWS: [1], EAGER: [2], SDPA: [1]})
        check({OURS: [2], THEIR_DRAWS: [1], EAGER: [2], SDPA: [1]})
        return times

    monkeypatch.setattr(turns, "take_turns", take_turns)
    monkeypatch.setattr(turns, "Ours", lambda *_, **__: None)
    monkeypatch.setattr(turns, "Theirs", lambda *_: None)
    return asked


@pytest.mark.parametrize(
    ("dtype", "twin", "unequal"), [(torch.float32, EAGER, 2), (torch.bfloat16, SDPA, 1), (torch.float64, EAGER, 2)]
)
def test_the_worse_of_ours_stands_against_the_better_of_theirs(
    monkeypatch: pytest.MonkeyPatch, config: GenerationConfig, dtype: torch.dtype, twin: str, unequal: int
) -> None:
    """And in bf16 tokens are compared with sdpa's, in fp32 with eager's."""
    times = {OURS: [2.0, 2.0, 9.0], THEIR_DRAWS: [4.0] * 3, EAGER: [9.0] * 3, SDPA: [1.0, 8.0, 8.0]}
    asked = scripted_turns(monkeypatch, times)
    network: Any = SimpleNamespace(device=torch.device("cpu"), dtype=dtype)
    found = turns.per_step(
        network, {EAGER: None, SDPA: None}, [1], config, rounds=7, warm_up=2, within=20.0, clock=lambda: 5.0
    )
    assert asked == [{"rounds": 7, "warm_up": 2, "until": 25.0}]
    assert found["ms"] == {OURS: 2.0, THEIR_DRAWS: 4.0, EAGER: 9.0, SDPA: 8.0} and found["ratio"] == 2.0
    assert (found["twin"], found["compared"], found["unequal"]) == (twin, 3, unequal)
    assert (found["steps"], found["wanted"]) == (3, 7 * STEPS)


def test_turns_that_were_cut_in_the_warm_up_have_no_figures(
    monkeypatch: pytest.MonkeyPatch, config: GenerationConfig
) -> None:
    scripted_turns(monkeypatch, {name: [] for name in (OURS, THEIR_DRAWS, EAGER, SDPA)})
    network: Any = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
    found = turns.per_step(network, {EAGER: None, SDPA: None}, [1], config, rounds=1)
    assert found["ratio"] is None and set(found["ms"].values()) == {None} and found["steps"] == 0


@pytest.mark.parity
def test_one_set_of_weights_serves_both_attentions(theirs: dict[str, Any]) -> None:
    eager, sdpa = theirs[EAGER], theirs[SDPA]
    pointers = [[tensor.data_ptr() for tensor in one.parameters()] for one in (eager, sdpa)]
    assert pointers[0] == pointers[1] and len(pointers[0]) > 100
    kinds = [one.model.decoder.layers[0].self_attn.config._attn_implementation for one in (eager, sdpa)]
    assert kinds == ["eager", "sdpa"]


@pytest.mark.parity
def test_other_tensors_than_transformers_knows_are_refused(tmp_path: Path) -> None:
    tensors = write_tiny(tmp_path, 0)
    tensors["model.decoder.layers.0.surplus"] = torch.ones(3)
    write_tensors(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"do not agree on 1 tensor: model\.decoder\.layers\.0\.surplus"):
        transformers_side.open_theirs(tmp_path, torch.float32, torch.device("cpu"))


@pytest.mark.parity
def test_whole_answers_have_the_tokens_of_transformers(
    model: DiffusionGemma, theirs: dict[str, Any], task: Task
) -> None:
    state = torch.get_rng_state()
    found = comparison.answers(Conversation(model), model, theirs, task, runs=2, clock=ticking())
    assert torch.equal(torch.get_rng_state(), state)
    assert (found["compared"], found["unequal"], found["runs"]) == (3, 0, 2)
    assert (found["prompt_tokens"], found["tokens"], found["steps"]) == (40, 192, 3)
    # the clock is looked at once before the answer, once a draft and once behind it: 7 seconds for 192 tokens
    assert set(found["tok_s"].values()) == {192 / 7} and found["ratio"] == 1.0
    assert set(found["step_ms"].values()) == {1000.0} and set(found["first_draft_ms"].values()) == {1000.0}
    assert list(found["tok_s"]) == [OURS, THEIR_DRAWS, EAGER, SDPA]


@pytest.mark.parity
def test_ends_are_ignored_and_every_step_is_taken(model: DiffusionGemma, theirs: dict[str, Any], task: Task) -> None:
    noise = turns.noise_of(model, 1, own_stream=False)
    ours = comparison.ours_answer(Conversation(model), task, noise, ticking())
    generated = comparison.theirs_answer(theirs[EAGER], task, 1, model.device, ticking())
    assert len(ours.tokens) == 192 and ours == generated
    assert ours.step_ms == [1000.0] * 4  # two canvases of three steps
    cut = replace(task, max_tokens=100)
    assert comparison.theirs_answer(theirs[EAGER], cut, 1, model.device, ticking()).tokens == ours.tokens[:100]


def test_each_answer_begins_with_an_empty_cache(
    monkeypatch: pytest.MonkeyPatch, model: DiffusionGemma, task: Task
) -> None:
    conversation = Conversation(model)
    reused = []
    answer = conversation.answer

    def watched(*arguments: Any) -> Iterator[Any]:
        for event in answer(*arguments):
            reused.extend([event.reused] if hasattr(event, "reused") else [])
            yield event

    monkeypatch.setattr(conversation, "answer", watched)
    for _ in range(2):
        comparison.ours_answer(conversation, task, turns.noise_of(model, 0, own_stream=True))
    assert reused == [0, 0]


def test_on_a_card_the_kernels_draw_for_themselves(monkeypatch: pytest.MonkeyPatch, task: Task) -> None:
    """Medians, ratio and the warm-up of answers that are given."""
    network: Any = SimpleNamespace(
        device=torch.device("cuda"), dtype=torch.bfloat16, canvas_length=96, config=SimpleNamespace(vocab_size=128)
    )
    seconds = {OURS: iter([50.0, 1.0, 2.0, 4.0]), EAGER: iter([50.0, 8.0, 8.0, 8.0]), SDPA: iter([50.0, 4.0, 4.0, 4.0])}

    def ours(conversation: Any, asked: Task, noise: Any, clock: Any) -> Answer:
        assert isinstance(noise, PhiloxNoise) and asked is task
        return Answer([1] * 192, next(seconds[OURS]), 0.5, [1.0, 2.0, 9.0])

    def others(one: str, asked: Task, seed: int, device: Any, clock: Any) -> Answer:
        return Answer([2] * 192, next(seconds[one]), 0.25, [])

    monkeypatch.setattr(comparison, "ours_answer", ours)
    monkeypatch.setattr(comparison, "theirs_answer", others)
    conversation: Any = None
    found = comparison.answers(conversation, network, {EAGER: EAGER, SDPA: SDPA}, task, runs=3)
    assert found["tok_s"] == {OURS: 96.0, EAGER: 24.0, SDPA: 48.0} and found["ratio"] == 2.0
    assert found["step_ms"] == {OURS: 2.0, EAGER: None, SDPA: None}
    assert (found["compared"], found["unequal"]) == (0, 0)


@pytest.mark.parametrize(
    ("device", "own", "steps", "said"),
    [
        (
            "cpu",
            1,
            [(1, 4 * 6, WARM_UP, inf), (2, 4 * 2, 1, 20.0)],
            [
                "24 canvases step by step in turns, 1 thread",
                "whole answers in turns: a warm-up, and 4 runs, 1 thread",
                "8 canvases step by step in turns, 2 threads, 20 s at most",
            ],
        ),
        (
            "cpu",
            8,
            [(8, 4 * 6, WARM_UP, inf)],
            [
                "24 canvases step by step in turns, 8 threads",
                "whole answers in turns: a warm-up, and 4 runs, 8 threads",
            ],
        ),
        ("cuda", 1, [], ["whole answers in turns: a warm-up, and 4 runs"]),
    ],
)
def test_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
    threads: list[int],
    task: Task,
    device: str,
    own: int,
    steps: list[tuple[int, int, int, float]],
    said: list[str],
) -> None:
    """On a CPU with the product's threads, steps with two as well; on a card steps are not taken one by one."""
    threads[0] = own
    heard: list[str] = []
    network = SimpleNamespace(device=torch.device(device), dtype=torch.bfloat16)
    subject: Any = SimpleNamespace(network=network, generation="generation", conversation="conversation")
    opened = (FOLDER, torch.bfloat16, network.device)

    def per_step(*given: Any, rounds: int, warm_up: int, within: float, clock: Any) -> tuple[int, int, int, float]:
        assert given == (network, opened, task.prompt, "generation")
        return threads[-1], rounds, warm_up, within

    def answers(*given: Any, runs: int, clock: Any) -> tuple[int, int]:
        assert given == ("conversation", network, opened, task)
        return threads[-1], runs

    monkeypatch.setattr(comparison, "why_not", lambda *_: None)
    monkeypatch.setattr(comparison, "open_theirs", lambda *given: given)
    monkeypatch.setattr(comparison, "per_step", per_step)
    monkeypatch.setattr(comparison, "answers", answers)
    found = comparison.measure(subject, FOLDER, task, runs=4, say=heard.append)
    assert threads[-1] == own  # as it was
    assert found.pop("transformers")[0].isdecimal()
    assert found == {"why_not": None, "dtype": "bfloat16", "per_step": steps, "answers": [(own, 4)]}
    assert heard == ["opening transformers' model", *said]


def test_why_transformers_cannot_take_part(monkeypatch: pytest.MonkeyPatch, model: DiffusionGemma) -> None:
    subject: Any = SimpleNamespace(network=model)
    nothing: Any = None
    assert "random" in comparison.measure(subject, None, nothing, runs=1)["why_not"]
    packed = transformers_side.why_not(FOLDER.parent / "sudoku-fp8", model)
    assert packed is not None and "packed" in packed
    wanted = 2_556_822  # bytes of the demo's 581,096 parameters in fp32, and a tenth of that
    assert transformers_side.why_not(FOLDER, model, free=wanted) is None
    small = transformers_side.why_not(FOLDER, model, free=wanted - 1)
    assert small is not None and "are free" in small
    assert transformers_side.why_not(FOLDER, model) is None
    monkeypatch.setattr(
        transformers_side, "find_spec", lambda name: None if name.endswith("diffusion_gemma") else "there"
    )
    assert "has no DiffusionGemma" in str(transformers_side.why_not(FOLDER, model))
    monkeypatch.setattr(transformers_side, "find_spec", lambda name: None)
    assert "not installed" in str(transformers_side.why_not(FOLDER, model))


@pytest.mark.parity
def test_the_script_ends_with_a_line_of_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], threads: list[int], theirs: dict[str, Any]
) -> None:
    monkeypatch.setattr(compare_step, "open_theirs", lambda *_: theirs)
    monkeypatch.setattr("sys.argv", ["compare_step.py", "--rounds", "1"])
    compare_step.main()
    *shown, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert list(found) == ["ratio", "dtype", "torch", "cpu", "unequal"] and found["unequal"] == 0
    assert shown[0].startswith("1 thread:  ours ") and shown[1].startswith("2 threads:  ours ")
    assert shown[2] == f"6 steps each; steps whose tokens differ from transformers': 0 of {2 * 6 * (WARM_UP + 1)}"
