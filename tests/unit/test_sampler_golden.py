"""The sampler's numbers against vectors of transformers 5.24: temperatures, entropies, acceptance, steps, stops, draws."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dgemma_local import sampler
from dgemma_local.checkpoint import open_checkpoint
from dgemma_local.config import GenerationConfig, load_model_config
from dgemma_local.engine import Conversation
from dgemma_local.events import CanvasCommitted, Finished
from dgemma_local.loading import load
from dgemma_local.model import DiffusionGemma
from dgemma_local.noise import Noise, TorchNoise
from dgemma_local.sampler import Canvas, Rules

GOLDEN = Path(__file__).parent.parent / "golden"
CONFIG = GenerationConfig(
    steps=48,
    t_min=0.4,
    t_max=0.8,
    entropy_bound=0.1,
    confidence=0.005,
    stability=1,
    end_ids=(1,),
    pad_id=0,
)
AT_ONE = replace(CONFIG, steps=10_000, t_min=1.0, t_max=1.0)  # logits / 1.0, and never out of steps


def cases(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((GOLDEN / f"{name}.json").read_text())["cases"]
    return found


@dataclass(frozen=True)
class Given:
    """Draws that someone else has made."""

    sampled: Tensor
    fresh: Tensor

    def canvas(self, canvas: int) -> Tensor:
        return self.fresh

    def sample(self, logits: Tensor, accepted: Tensor, canvas: int, step: int) -> Tensor:
        return self.sampled

    def renoise(self, canvas: int, step: int) -> Tensor:
        return self.fresh


def nothing(length: int) -> Given:
    return Given(torch.zeros(length, dtype=torch.int64), torch.zeros(length, dtype=torch.int64))


def name_of(case: dict[str, Any]) -> str:
    keys = ("name", "seed", "stability_threshold", "t_min", "steps", "canvas")
    return "-".join(str(case[key]) for key in keys if isinstance(case.get(key), (str, int, float)))


@pytest.mark.parametrize("case", cases("temperature"), ids=name_of)
def test_temperatures(case: dict[str, Any]) -> None:
    """To the bit: in fp32 from the steps left, the double formula gives other numbers in 12 of 48 steps."""
    config = replace(CONFIG, steps=case["steps"], t_min=case["t_min"], t_max=case["t_max"])
    got = torch.stack([sampler.temperature(config, step) for step in range(config.steps)])
    assert got.dtype == torch.float32
    assert torch.equal(got, torch.tensor(case["temperature"], dtype=torch.float32))


@pytest.mark.parametrize("case", cases("entropy_accept"), ids=name_of)
def test_entropies_and_acceptance(case: dict[str, Any]) -> None:
    entropy = sampler.entropies(torch.tensor(case["logits"]))
    torch.testing.assert_close(entropy, torch.tensor(case["entropy"]), atol=1e-5, rtol=0)
    for given in (entropy, torch.tensor(case["entropy"])):
        accepted = sampler.accept(given, case["entropy_bound"])
        assert accepted.tolist() == case["accepted"] and int(accepted.sum()) == case["n_accepted"]


def test_a_sum_that_is_the_bound_exactly_is_within_it() -> None:
    """transformers compares with ≤; no vector has such a case."""
    entropy = torch.tensor([1.0, 0.25, 2.0, 0.25])
    assert sampler.accept(entropy, 0.5).tolist() == [True, True, False, True]


@pytest.mark.parametrize("case", cases("step"), ids=name_of)
def test_one_step(case: dict[str, Any]) -> None:
    """Supplied draws; the last step, which commits its draft, is asked as if more followed, too."""
    config = replace(CONFIG, steps=case["max_denoising_steps"])
    noise = Given(torch.tensor(case["sampled"]), torch.tensor(case["random"]))
    step = config.steps - case["cur_step"]
    before = Canvas(number=0, step=step, next=torch.tensor(case["canvas_in"]))
    after = sampler.advance(before, torch.tensor(case["raw_logits"]), config, noise)
    assert (
        after.logits is not None
        and after.draft is not None
        and after.accepted is not None
        and after.entropy is not None
    )
    torch.testing.assert_close(after.logits, torch.tensor(case["processed_logits"]), atol=1e-5, rtol=0)
    assert torch.equal(after.logits.to(torch.bfloat16).float(), torch.tensor(case["sc_logits_bf16"]))
    torch.testing.assert_close(after.entropy, torch.tensor(case["entropy"]), atol=1e-5, rtol=0)
    assert after.draft.tolist() == case["argmax"]
    assert after.accepted.tolist() == case["accepted"]
    assert torch.where(after.accepted, noise.sampled, noise.fresh).tolist() == case["next_canvas"]
    assert after.done == (case["cur_step"] == 1)
    assert after.next.tolist() == (case["argmax"] if after.done else case["next_canvas"])


@pytest.mark.parametrize("case", cases("stopping"), ids=name_of)
def test_stops(case: dict[str, Any]) -> None:
    """Drafts and confidences of successive steps: when the canvas counts as converged."""
    config = replace(AT_ONE, stability=case["stability_threshold"], confidence=case["confidence_threshold"])
    canvas = sampler.begin(0, nothing(3))
    for call in case["calls"]:
        logits = torch.zeros(3, 8).scatter(1, torch.tensor(call["argmax"])[:, None], call["peak_logit"])
        canvas = sampler.advance(canvas, logits, config, nothing(3))
        assert canvas.entropy is not None
        assert float(canvas.entropy.mean()) == pytest.approx(call["mean_entropy"], abs=1e-6)
        assert canvas.converged == canvas.done == call["stop"]


@pytest.mark.parametrize("case", cases("rng_cpu"), ids=name_of)
def test_transformers_draws_in_its_order(case: dict[str, Any]) -> None:
    noise = TorchNoise(torch.Generator().manual_seed(case["seed"]), case["canvas_length"], case["vocab"])
    canvas = sampler.begin(0, noise)
    assert canvas.next.tolist() == case["initial_canvas"]
    for step in case["steps"]:
        canvas = sampler.advance(canvas, torch.tensor(step["logits"]), AT_ONE, noise)
        assert canvas.accepted is not None
        assert canvas.accepted.tolist() == step["accepted"]
        assert canvas.next.tolist() == step["next_canvas"]


class Says:
    """A model that is certain of one canvas."""

    max_positions, device = 1000, torch.device("cpu")

    def __init__(self, canvas: list[int]) -> None:
        self.tokens, self.canvas_length = canvas, len(canvas)

    def new_cache(self) -> "Says":
        return self

    def encode(self, ids: Tensor, cache: "Says") -> None:
        pass

    joins, mode, room = 0, "says", None

    def denoising(
        self, ids: Sequence[int], number: int, cache: "Says", config: GenerationConfig, noise: Noise, rules: Rules
    ) -> Iterator[Canvas]:
        canvas = sampler.begin(number, noise, rules)
        while not canvas.done:
            canvas = sampler.step(self, canvas, cache, config, noise)
            yield canvas

    def denoise(self, canvas: Tensor, cache: "Says", previous: Tensor | None) -> Tensor:
        return 30.0 * torch.nn.functional.one_hot(torch.tensor(self.tokens), 128).float()

    length = epoch = 0

    def can_crop(self, length: int) -> bool:
        return False

    def crop(self, length: int) -> None:
        raise NotImplementedError

    def signal(self, logits: Tensor) -> Tensor:
        return logits

    def first_bad_layer(self, canvas: Tensor, cache: "Says", previous: Tensor | None) -> str:
        raise NotImplementedError


@pytest.mark.parametrize("case", cases("finalize"), ids=lambda case: "-".join(map(str, case["canvas"])))
def test_a_canvas_is_cut_at_its_first_end_token(case: dict[str, Any]) -> None:
    """transformers keeps that token and pads behind it (unless it has no pad); here the answer ends before it."""
    canvas = case["canvas"]
    config = replace(CONFIG, end_ids=tuple(case["eos"]))
    events = list(Conversation(Says(canvas)).answer([5], config, nothing(len(canvas)), max_tokens=len(canvas)))
    (committed,) = (event for event in events if isinstance(event, CanvasCommitted))
    last = events[-1]
    assert isinstance(last, Finished)
    assert committed.tokens == tuple(canvas)
    assert last.tokens == tuple(canvas[: committed.kept])
    assert (last.reason == "end") == case["finished"]
    behind = canvas[committed.kept + 1 :]
    if case["pad"] is not None:
        behind = [case["pad"]] * len(behind)
    assert [*canvas[: committed.kept + 1], *behind] == case["committed"]


@pytest.mark.parametrize(("stability", "steps"), [(0, 1), (1, 2), (2, 3), (5, 6)])
def test_a_certain_model_takes_as_many_steps_as_stability_asks(stability: int, steps: int) -> None:
    events = list(
        Conversation(Says([5, 6, 7])).answer([5], replace(CONFIG, stability=stability), nothing(3), max_tokens=3)
    )
    (committed,) = (event for event in events if isinstance(event, CanvasCommitted))
    assert committed.steps == steps and committed.converged


@pytest.mark.parametrize("case", cases("tiny/generate"), ids=lambda case: f"seed-{case['torch_manual_seed']}")
def test_a_complete_answer_of_the_tiny_model(case: dict[str, Any]) -> None:
    """Plain canvases, an end token in the second, and early stops at the 32nd and 44th of 48 steps."""
    config = load_model_config(GOLDEN / "tiny")
    weights = load(open_checkpoint(GOLDEN / "tiny"), config)
    weights["norm"] = weights["norm"] * case["final_norm_weight_multiplier"]
    settings = replace(CONFIG, steps=case["max_denoising_steps"], end_ids=tuple(case["eos"]))
    noise = TorchNoise(
        torch.Generator().manual_seed(case["torch_manual_seed"]), config.canvas_length, config.vocab_size
    )
    conversation = Conversation(DiffusionGemma(config, weights))
    events = list(conversation.answer(case["prompt"], settings, noise, case["max_new_tokens"]))
    tokens = [token for event in events if isinstance(event, CanvasCommitted) for token in event.tokens]
    last = events[-1]
    assert isinstance(last, Finished)
    if last.reason == "end":
        tokens[len(last.tokens) + 1 :] = [case["pad"]] * (len(tokens) - len(last.tokens) - 1)
    assert [*case["prompt"], *tokens] == case["sequence"]
    assert conversation.cache.length == case["cache_len"]
    assert sum(token != case["pad"] for token in tokens) / last.steps == pytest.approx(case["tokens_per_forward"])
    assert len(last.tokens) <= case["max_new_tokens"]
