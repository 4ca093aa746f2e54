"""One denoising step of ours and one of transformers', in turns, from step to step of the same canvases.

The contestants: ours with this project's random stream, ours with transformers' draws, and transformers with its default
experts, with eager and with sdpa attention over one set of weights. With their draws our tokens are to equal theirs in
fp32; in bf16 they are compared, and nothing more is asked. A ratio sets the faster of theirs against the slower of ours.
On a CPU alone: on a card our steps run ahead of the host and cannot be taken one by one.

Milliseconds are medians by a monotonic clock (time.perf_counter), sampling included, and a warm-up that is not counted
comes first.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dgemma_local import sampler
from dgemma_local.bench.transformers_side import THEIRS, generator_kept, settings, their_twin
from dgemma_local.config import GenerationConfig
from dgemma_local.model import DiffusionGemma
from dgemma_local.noise import Noise, PhiloxNoise, TorchNoise

STEPS = 6  # of each canvas that is taken step by step; the first has no self-conditioning
ROUNDS = 20  # such canvases
WARM_UP = 3  # canvases before them
OURS, THEIR_DRAWS = "ours", "ours, their draws"

Clock = Callable[[], float]  # seconds


class Contestant(Protocol):
    """Takes steps when it is asked to."""

    def begin(self, seed: int) -> None:
        """A canvas of random tokens behind the prompt."""
        ...

    def step(self) -> list[int]:
        """One denoising step -> the tokens that the next one reads."""
        ...


class Ours:
    """This project's step: the model's forward pass and the sampler."""

    def __init__(self, model: DiffusionGemma, prompt: Tensor, config: GenerationConfig, own_stream: bool) -> None:
        self.model, self.config, self.own_stream = model, config, own_stream
        self.cache = model.new_cache()
        model.encode(prompt, self.cache)

    def begin(self, seed: int) -> None:
        self.noise = noise_of(self.model, seed, self.own_stream)
        self.canvas = sampler.begin(0, self.noise)

    @torch.inference_mode()
    def step(self) -> list[int]:
        self.canvas = self.model.advance(self.canvas, self.cache, self.config, self.noise)
        tokens: list[int] = self.canvas.next.tolist()
        return tokens


def noise_of(model: DiffusionGemma, seed: int, own_stream: bool) -> Noise:
    """This project's stream, or transformers' draws as torch.manual_seed(seed) gives them on a CPU."""
    L, V = model.canvas_length, model.config.vocab_size
    return (
        PhiloxNoise(seed, L, V, model.device) if own_stream else TorchNoise(torch.Generator().manual_seed(seed), L, V)
    )


class Theirs:
    """transformers' step, as its `generate` takes it."""

    def __init__(self, model: Any, prompt: Tensor, config: GenerationConfig) -> None:
        self.model, self.prompt, self.steps = model, prompt[None], config.steps
        generation, _ = model._prepare_generation_config(None, **settings(config))
        self.sampler = model._prepare_sampler(generation)
        self.processor = model._prepare_logits_processor(generation)
        self.stopping = model._prepare_diffusion_stopping_criteria(generation)
        self.cache = model._prepare_cache_for_generation(
            generation, batch_size=1, max_length=model.config.canvas_length
        )
        with torch.inference_mode():
            model.model.encoder(input_ids=self.prompt, cache=self.cache)

    def begin(self, seed: int) -> None:
        torch.manual_seed(seed)
        n, device = self.prompt.shape[1], self.prompt.device
        self.canvas = self.sampler.initialize_canvas(1, device)
        self.draft = torch.full_like(self.canvas, -1)
        self.signal, self.left = None, self.steps
        self.positions = torch.arange(n, n + self.canvas.shape[1], device=device)[None]
        self.masks = self.model.model.decoder.create_diffusion_decoder_attention_mask(
            config=self.model.config, inputs_embeds=self.canvas.unsqueeze(-1), cache=self.cache
        )
        self.finished = torch.zeros(1, dtype=torch.bool, device=device)
        self.stopping.reset()
        self.state = torch.get_rng_state()

    @torch.inference_mode()
    def step(self) -> list[int]:
        torch.set_rng_state(self.state)  # contestants take turns with the one generator that transformers draws from
        self.canvas, self.draft, self.signal, self.finished = self.model._denoising_step(
            decoder_forward=self.model.forward,
            current_canvas=self.canvas,
            argmax_canvas=self.draft,
            input_ids=self.prompt,
            decoder_position_ids=self.positions,
            self_conditioning_logits=self.signal,
            mask_mapping=self.masks,
            cache=self.cache,
            finished_denoising=self.finished & False,  # it must not freeze the canvas: every step is to be whole
            cur_step=self.left,
            sampler=self.sampler,
            logits_processor=self.processor,
            diffusion_stopping_criteria=self.stopping,
        )
        self.left -= 1
        tokens: list[int] = self.canvas[0].tolist()
        self.state = torch.get_rng_state()
        return tokens


def take_turns(
    contestants: Mapping[str, Contestant],
    rounds: int,
    check: Callable[[Mapping[str, list[int]]], None],
    clock: Clock = time.perf_counter,
    *,
    warm_up: int = WARM_UP,
    until: float = math.inf,
) -> dict[str, list[float]]:
    """Milliseconds of each one's steps, in `rounds` canvases of STEPS steps behind the warm-up's.

    `check` gets every step's tokens. Once the clock has reached `until` no further step is begun: then all have fewer.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for seed in range(warm_up + rounds):
        for one in contestants.values():
            one.begin(seed)
        for _ in range(STEPS):
            if clock() >= until:
                return times
            tokens = {}
            for name, one in contestants.items():
                start = clock()
                tokens[name] = one.step()
                if seed >= warm_up:
                    times[name].append((clock() - start) * 1e3)
            check(tokens)
    return times


def per_step(
    model: DiffusionGemma,
    theirs: Mapping[str, Any],
    prompt: Sequence[int],
    config: GenerationConfig,
    *,
    rounds: int = ROUNDS,
    warm_up: int = WARM_UP,
    within: float = math.inf,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Steps in turns on a CPU, with as many threads as torch has now, for about `within` seconds at the most.

    -> threads, ms (by contestant), ratio (theirs ÷ ours), steps (timed, of each), wanted (steps that were to be timed),
    compared and unequal (steps whose tokens were set beside those of `twin`, and how many differed). Cut before a step
    was timed, ms are None, and the ratio.
    """
    began = clock()
    ids = torch.tensor(prompt, device=model.device)
    config, twin = unending(config), their_twin(model.dtype)
    contestants: dict[str, Contestant] = {
        OURS: Ours(model, ids, config, own_stream=True),
        THEIR_DRAWS: Ours(model, ids, config, own_stream=False),
        **{name: Theirs(one, ids, config) for name, one in theirs.items()},
    }
    equal: list[bool] = []

    def check(tokens: Mapping[str, list[int]]) -> None:
        equal.append(tokens[THEIR_DRAWS] == tokens[twin])

    with generator_kept():
        times = take_turns(contestants, rounds, check, clock, warm_up=warm_up, until=began + within)
    found = {name: statistics.median(its) if its else math.nan for name, its in times.items()}
    ratio = min(found[name] for name in THEIRS) / max(found[OURS], found[THEIR_DRAWS])
    return {
        "threads": torch.get_num_threads(),
        "ms": {name: known(ms) for name, ms in found.items()},
        "ratio": known(ratio),
        "steps": len(times[OURS]),
        "wanted": rounds * STEPS,
        "twin": twin,
        "compared": len(equal),
        "unequal": equal.count(False),
    }


def known(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value


def unending(config: GenerationConfig) -> GenerationConfig:
    """Never confident enough to stop: a canvas that is done keeps its draft, where transformers would go on sampling."""
    return replace(config, confidence=0.0)
