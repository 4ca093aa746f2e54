"""Figures of others: transformers in this process, and a server that speaks vLLM's protocol."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, pairwise
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import compare_step
import pytest
import torch
from reference import open_model
from tiny import write_tensors, write_tiny
from vllm_server import MODEL, Failure, Manner, VllmServer

from dgemma_local.bench import comparison, endpoint, transformers_side, turns
from dgemma_local.bench.comparison import Answer
from dgemma_local.bench.endpoint import figures, together
from dgemma_local.bench.protocols import Task, endless
from dgemma_local.bench.server import NOT_READ, Answered, Chunk, Server
from dgemma_local.bench.transformers_side import THEIRS
from dgemma_local.bench.turns import OURS, STEPS, THEIR_DRAWS, WARM_UP
from dgemma_local.config import GenerationConfig, load_generation_config
from dgemma_local.demo.render import FOLDERS
from dgemma_local.engine import Conversation
from dgemma_local.errors import CheckpointError, EndpointError, UsageError
from dgemma_local.model import DiffusionGemma
from dgemma_local.noise import PhiloxNoise

FOLDER = FOLDERS["sudoku"]
EAGER, SDPA = THEIRS
# what transformers imports at its first step brings this warning with it
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
UNKNOWN_STEPS = "how many steps its canvases take is not known: no time of a step is set beside ours"
PROMPTS = ((5, 6, 7), (6, 7, 8), (7, 8, 9))  # the first to warm up


def ticking(step: float = 1.0) -> Callable[[], float]:
    """A clock on which `step` seconds pass from one look to the next."""
    ticks = count()
    return lambda: next(ticks) * step


# ── transformers ──────────────────────────────────────────────────────────────────────────────────────────────────


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


# ── a server: what is computed ────────────────────────────────────────────────────────────────────────────────────


def answered(*chunks: tuple[float, int | None], total: int | None = None) -> Answered:
    return Answered(tuple(Chunk(*chunk) for chunk in chunks), 1024, total or chunks[-1][1] or 0)


def test_figures_of_four_canvases() -> None:
    found, missing = figures(answered((0.5, 256), (0.75, 512), (1.0, 768), (1.5, 1024)))
    assert missing == {}
    assert (found["ttft_ms"], found["chunks"], found["seconds"]) == (500.0, 4, 1.5)
    assert found["end_to_end_tok_s"] == pytest.approx(1024 / 1.5)  # prefill and first canvas included
    assert found["decode_tok_s"] == 768.0  # the first canvas took no time of this second
    assert found["canvas_ms"] == 250.0  # 250, 250, 500


def test_pieces_that_come_together_are_one_chunk() -> None:
    pieces = [Chunk(0.5, 100), Chunk(0.504, 200), Chunk(0.506, 256), Chunk(0.8, 300), Chunk(0.801, 512)]
    assert together(pieces) == [Chunk(0.5, 200), Chunk(0.506, 256), Chunk(0.8, 512)]
    found, _ = figures(answered((0.5, 128), (0.501, 256), (1.0, 384), (1.001, 512)))
    assert (found["chunks"], found["decode_tok_s"], found["canvas_ms"]) == (2, 512.0, 500.0)
    assert found["seconds"] == 1.001


@pytest.mark.parametrize("chunks", [[(0.5, 1024)], [(0.5, 256), (0.501, 512), (0.502, 1024)]])
def test_one_burst_has_no_decode_speed(chunks: list[tuple[float, int]]) -> None:
    found, missing = figures(answered(*chunks))
    assert found["decode_tok_s"] is None and found["canvas_ms"] is None
    assert missing == dict.fromkeys(("decode_tok_s", "canvas_ms"), "all tokens came at once")
    assert found["end_to_end_tok_s"] == 1024 / chunks[-1][0]


def test_chunks_of_unknown_size_have_no_decode_speed() -> None:
    found, missing = figures(answered((0.5, None), (1.0, None), total=512))
    assert found["decode_tok_s"] is None and found["end_to_end_tok_s"] == 512.0
    assert set(missing) == {"decode_tok_s", "canvas_ms"} and "continuous_usage_stats" in missing["canvas_ms"]


def test_only_whole_canvases_have_a_time() -> None:
    found, missing = figures(answered((0.5, 1), (1.0, 2), (1.5, 3)))  # token by token
    assert found["canvas_ms"] is None and found["decode_tok_s"] == 2.0
    assert missing == {"canvas_ms": "no chunk holds whole canvases of 256 tokens"}
    pair, _ = figures(answered((0.5, 256), (1.0, 768), (1.25, 868)))  # two at once, then a part of one
    assert pair["canvas_ms"] == 250.0
    small, _ = figures(answered((0.5, 96), (1.0, 192)), canvas=96)
    assert small["canvas_ms"] == 500.0
    odd, _ = figures(answered((0.5, 256), (1.0, None), (1.5, 768), total=768))
    assert odd["canvas_ms"] is None and odd["decode_tok_s"] == 512.0


# ── a server: what is asked, and what comes ───────────────────────────────────────────────────────────────────────


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def test_the_protocol() -> None:
    manner = Manner(delays=(0.0,))
    with VllmServer(manner) as server:
        found = endpoint.measure(server.url, PROMPTS, 1024, clock=ticking(0.01))
    assert server.log == [
        "GET /v1/models",
        "GET /version",
        "GET /server_info?config_format=json",
        *["POST /v1/completions"] * 3,
    ]
    assert [body["prompt"] for body in server.bodies] == [list(prompt) for prompt in PROMPTS]
    assert server.bodies[0] == {
        "model": MODEL,
        "prompt": [5, 6, 7],
        "max_tokens": 1024,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    assert (found["url"], found["model"], found["version"]) == (server.url, MODEL, "0.26.0")
    assert (found["settings"], found["missing"], found["notes"]) == (NOT_READ, {}, [UNKNOWN_STEPS])
    assert found["same_steps"] is False and found["no_ratio"] is None
    assert (found["prompt_tokens"], found["asked_tokens"], len(found["requests"])) == (3, 1024, 2)
    # the clock is looked at once a line: two lines an event, the first of them without a token
    assert found["median"] == {
        "ttft_ms": pytest.approx(30.0),
        "end_to_end_tok_s": pytest.approx(1024 / 0.09),
        "decode_tok_s": pytest.approx(768 / 0.06),
        "canvas_ms": pytest.approx(20.0),
    }


def test_what_sets_a_server_apart_is_said() -> None:
    manner = Manner(ends_after=512, diffusion={"canvas_length": 256, "max_denoising_steps": 48}, version=None)
    with VllmServer(manner) as server:
        found = endpoint.measure(server.url, PROMPTS, 1024, clock=ticking(0.01))
    assert found["settings"] == manner.diffusion and found["version"] is None
    assert found["notes"] == [
        "the server takes up to 48 steps a canvas, and fixed16 takes 16",
        UNKNOWN_STEPS,
        "an answer has 512 tokens, and 1,024 were asked for",
    ]
    assert found["no_ratio"] == "the server gave 512 tokens, and 1,024 were asked for"


def test_the_median_is_of_the_requests_behind_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([answered((9.0, 256), (99.0, 512)), *(answered((t, 256), (2 * t, 512)) for t in (1.0, 2.0, 4.0))])
    monkeypatch.setattr(Server, "answer", lambda *_: next(answers))
    with VllmServer() as server:
        found = endpoint.measure(server.url, [(1,) * 1024] * 4, 512)
    assert found["median"] == {"ttft_ms": 2e3, "end_to_end_tok_s": 128.0, "decode_tok_s": 128.0, "canvas_ms": 2e3}
    assert found["notes"] == [UNKNOWN_STEPS]


@pytest.mark.parametrize(
    ("settings", "same"),
    [
        ({"max_denoising_steps": 16, "confidence_threshold": 0.0}, True),
        ({"max_denoising_steps": 16, "confidence_threshold": 0.005}, False),
        ({"max_denoising_steps": 16}, False),
        ({"max_denoising_steps": 48, "confidence_threshold": 0.0}, False),
        ({"confidence_threshold": 0.0}, False),
    ],
)
def test_steps_are_known_where_the_server_tells_that_it_takes_all_sixteen(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], same: bool
) -> None:
    monkeypatch.setattr(Server, "answer", lambda *_: answered((1.0, 256), (2.0, 512)))
    with VllmServer(Manner(diffusion=settings)) as server:
        found = endpoint.measure(server.url, [(1,) * 1024] * 2, 512)
    assert found["same_steps"] is same and (UNKNOWN_STEPS in found["notes"]) is not same


def test_a_figure_that_one_request_lacks_has_no_median(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([answered((1.0, 512)), answered((1.0, 256), (2.0, 512)), answered((1.0, 512))])
    monkeypatch.setattr(Server, "answer", lambda *_: next(answers))
    with VllmServer() as server:
        found = endpoint.measure(server.url, PROMPTS, 512)
    assert found["median"]["decode_tok_s"] is None and found["missing"]["decode_tok_s"] == "all tokens came at once"
    assert found["notes"] == [UNKNOWN_STEPS, "the server counts 1,024 tokens in a prompt of 3"]


def test_a_server_that_cuts_its_canvases_or_counts_them_at_the_end() -> None:
    with VllmServer(Manner(pieces=8)) as server:  # at a clock of 1 ms a line: three pieces within 5 ms
        found = endpoint.measure(server.url, PROMPTS, 512, clock=ticking(0.001))["requests"][0]
    assert found["completion_tokens"] == 512 and found["chunks"] == 6
    with VllmServer(Manner(says_tokens=False)) as server:
        found = endpoint.measure(server.url, PROMPTS, 512, clock=ticking(0.01))
    assert found["requests"][0]["ttft_ms"] == pytest.approx(30.0) and found["median"]["decode_tok_s"] is None


def test_a_path_before_v1_and_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", " s3cret\n")
    with VllmServer(Manner(base="/gpu/0", key="s3cret")) as server:
        for url in (server.url, server.url + "/", server.url + "/v1", server.url + "/v1/"):
            found = endpoint.measure(url, PROMPTS[:2], 256)
            assert found["url"] == server.url
    assert "s3cret" not in json.dumps(found)
    assert server.log[0] == "GET /gpu/0/v1/models"


def test_the_server_ends_by_itself() -> None:
    server = VllmServer(lifetime=0.01)
    server._timer.start()
    server.serve_forever(0.01)  # returns
    server.server_close()


# ── a server: what goes wrong ─────────────────────────────────────────────────────────────────────────────────────

TOLD: dict[Failure, tuple[str, str]] = {
    "not found": ("has no /v1/models (404)", "without /v1"),
    "locked": ("wants a key (403)", "set OPENAI_API_KEY"),
    "broken": ("answers with an error: out of memory None", "log"),
    "page": ("does not answer in JSON: '<html>welcome</html>'", "vLLM server"),
    "page in the stream": ("does not answer in JSON: '<html>'", "vLLM server"),
    "cut": ("broke off in the middle of its answer", "again"),
    "error in the stream": ("answers with an error: EngineCore died", "log"),
    "no usage": ("does not say how many tokens it gave", "include_usage"),
    "no token": ("ended its answer without a token", "log"),
    "silence": ("has been silent for 0.1 s", "busy"),
    "comments": ("has been silent for 0.1 s", "busy"),
    "endless": ("does not end its answer", "max_tokens"),
    "nothing served": ("lists no model at /v1/models", "loaded one"),
}


@pytest.mark.parametrize("failure", get_args(Failure))
def test_each_failure_has_two_lines(failure: Failure) -> None:
    what, fix = TOLD[failure]
    with VllmServer(Manner(failure=failure)) as server, pytest.raises(EndpointError) as raised:
        endpoint.measure(server.url, PROMPTS, 512, silence=0.1)
    assert raised.value.what.startswith(server.url) and raised.value.what.endswith(what)
    assert fix in raised.value.fix
    assert "\n" not in raised.value.what + raised.value.fix


def test_a_key_that_is_refused_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    with VllmServer(Manner(key="another")) as server, pytest.raises(EndpointError) as raised:
        endpoint.measure(server.url, PROMPTS, 512)
    assert raised.value.what == f"{server.url} wants another key (401)"
    with VllmServer(Manner(failure="broken")) as server, pytest.raises(EndpointError) as raised:
        endpoint.measure(server.url, PROMPTS, 512)
    assert raised.value.what.endswith("out of memory Bearer …")
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret\nX-Injected: 1")
    with pytest.raises(UsageError, match="characters that no key has") as raised:
        endpoint.measure(server.url, PROMPTS, 512)
    assert "s3cret" not in raised.value.what + raised.value.fix


def test_a_context_that_is_too_short() -> None:
    with VllmServer(Manner(longest=1000)) as server, pytest.raises(EndpointError, match="context of 1,000") as raised:
        endpoint.measure(server.url, PROMPTS, 1024)
    assert raised.value.fix == "start it with --max-model-len 1027 or more"
    for longest in (1027, None):
        with VllmServer(Manner(longest=longest)) as server:
            assert endpoint.measure(server.url, PROMPTS[:2], 1024)["asked_tokens"] == 1024


def test_nobody_there() -> None:
    with VllmServer() as server:
        pass
    with pytest.raises(EndpointError, match=r"cannot be reached: .*refused"):
        endpoint.measure(server.url, PROMPTS, 512)


def test_https_to_a_server_without_it() -> None:
    with VllmServer() as server, pytest.raises(EndpointError, match="is not trusted") as raised:
        endpoint.measure(server.url.replace("http", "https"), PROMPTS, 512, silence=5.0)
    assert raised.value.what.startswith(f"https://127.0.0.1:{server.server_address[1]} ")


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://host",
        "http://",
        "http://[::1",
        "http://host:99999",
        "http://host:0",
        "http://user:s3cret@host",
        "http://host/v1?key=s3cret",
        "http://host/#s3cret",
        "http://host/a b",
        "http://host/ü",
        "http://ho\nst/",
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UsageError, match="no server's address") as raised:
        Server(url, "")
    assert "s3cret" not in raised.value.what + raised.value.fix


@pytest.mark.parametrize("url", ["http://[::1]:8000/a", "https://host", "http://host:80"])
def test_addresses_as_they_are_shown(url: str) -> None:
    assert str(Server(url + "/v1/", "")) == url


class Lines:
    """A response that is read line by line."""

    def __init__(self, events: Sequence[Any]) -> None:
        said = (event if isinstance(event, str) else json.dumps(event) for event in events)
        self.lines = [f"data: {line}\n".encode() for line in said]

    def readline(self, most: int) -> bytes:
        return self.lines.pop(0) if self.lines else b""


def listened(*events: Any) -> Answered:
    response: Any = Lines(events)
    return Server("http://host", "", clock=ticking())._listen(response, -1.0, 512)


def test_words_without_tokens_are_no_chunks() -> None:
    def usage(tokens: int) -> dict[str, int]:
        return {"prompt_tokens": 9, "completion_tokens": tokens}

    word = {"text": "a"}
    found = listened(
        {"choices": [{"text": ""}], "usage": usage(0)},
        {"choices": [{"text": ""}], "usage": usage(256)},  # tokens that no text shows
        {"choices": [word], "usage": usage(512)},
        {"choices": [word], "usage": usage(512)},  # why it ended
        {"choices": [], "usage": usage(512)},
        "[DONE]",
        "not read",
    )
    assert found == Answered((Chunk(2.0, 256), Chunk(3.0, 512)), 9, 512)
    uncounted = listened({"choices": [{"text": ""}]}, {"choices": [word]}, {"choices": [], "usage": usage(1)}, "[DONE]")
    assert uncounted == Answered((Chunk(2.0, None),), 9, 1)


@pytest.mark.parametrize(
    "said",
    [
        {"error": "too many"},
        {"error": {"message": "too many"}},
        {"object": "error", "message": "too many", "code": 400},
    ],
)
def test_errors_in_all_their_forms(said: dict[str, Any]) -> None:
    with pytest.raises(EndpointError, match="answers with an error: too many"):
        listened(said)


@pytest.mark.parametrize("said", ["[1]", "3", "{", "[" * 100_000])
def test_what_is_no_event(said: str) -> None:
    with pytest.raises(EndpointError, match="does not answer in JSON") as raised:
        listened(said)
    assert len(raised.value.what) < 300
