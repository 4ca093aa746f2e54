"""One denoising step of the demo model, sampling included, ours against transformers', side by side.

    python tests/compare_step.py [--rounds 60] [--dtype float32]

The same weights and canvases. The contestants alternate within one process, one step each, from step to step of the
same answer: ours with this project's random stream, ours with transformers' draws (whose tokens must equal theirs at
every step), and transformers with its default experts, with eager and with sdpa attention, of which the faster counts.
Prints medians for 1 and 2 threads and, last, one line of JSON with the worst ratio.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from reference import Reference, open_model

from dgemma_local import sampler
from dgemma_local.config import GenerationConfig, load_generation_config
from dgemma_local.demo.render import FOLDERS, Renderer
from dgemma_local.demo.tasks import Example
from dgemma_local.model import DiffusionGemma
from dgemma_local.noise import Noise, PhiloxNoise, TorchNoise

PUZZLE = "53..7....\n6..195...\n.98....6.\n8...6...3\n4..8.3..1\n7...2...6\n.6....28.\n...419..5\n....8..79"
STEPS = 6  # of each canvas; the first has no self-conditioning


FOLDER = FOLDERS["sudoku"]


class Ours:
    """This project's step: the model's forward pass and the sampler."""

    def __init__(self, model: DiffusionGemma, prompt: torch.Tensor, config: GenerationConfig, own_stream: bool) -> None:
        self.model, self.config, self.own_stream = model, config, own_stream
        self.cache = model.new_cache()
        model.encode(prompt, self.cache)

    def begin(self, seed: int) -> None:
        L, V = self.model.canvas_length, self.model.config.vocab_size
        draw = torch.Generator().manual_seed(seed)
        noise: Noise = PhiloxNoise(seed, L, V, self.model.device) if self.own_stream else TorchNoise(draw, L, V)
        self.noise, self.canvas = noise, sampler.begin(0, noise)

    @torch.inference_mode()
    def step(self) -> list[int]:
        self.canvas = self.model.advance(self.canvas, self.cache, self.config, self.noise)
        return self.canvas.next.tolist()


class Theirs:
    """transformers' step, as its generate() takes it."""

    def __init__(self, reference: Reference, prompt: torch.Tensor, folder: Any) -> None:
        self.model, self.cache, self.prompt = reference.model, reference.new_cache(), prompt[None]
        reference.encode(prompt, self.cache)
        config = type(self.model.generation_config).from_pretrained(folder)
        self.sampler = self.model._prepare_sampler(config)
        self.processor = self.model._prepare_logits_processor(config)
        self.stopping = self.model._prepare_diffusion_stopping_criteria(config)
        self.steps = config.max_denoising_steps

    def begin(self, seed: int) -> None:
        torch.manual_seed(seed)
        n = self.prompt.shape[1]
        self.canvas = self.sampler.initialize_canvas(1, self.prompt.device)
        self.draft = torch.full_like(self.canvas, -1)
        self.signal, self.left = None, self.steps
        self.positions = torch.arange(n, n + self.canvas.shape[1])[None]
        self.masks = self.model.model.decoder.create_diffusion_decoder_attention_mask(
            config=self.model.config, inputs_embeds=self.canvas.unsqueeze(-1), cache=self.cache
        )
        self.finished = torch.zeros(1, dtype=torch.bool)
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


def measure(
    contestants: dict[str, Any], rounds: int, check: Callable[[dict[str, list[int]]], None]
) -> dict[str, float]:
    """Median milliseconds a step of each, over `rounds` canvases of STEPS steps."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for seed in range(-3, rounds):  # three to warm up
        for one in contestants.values():
            one.begin(seed + 3)
        for _ in range(STEPS):
            tokens = {}
            for name, one in contestants.items():
                start = time.perf_counter()
                tokens[name] = one.step()
                if seed >= 0:
                    times[name].append((time.perf_counter() - start) * 1e3)
            check(tokens)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help=f"canvases of {STEPS} steps")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    prompt = torch.tensor(Renderer().prompt(Example("sudoku9", f"Solve this sudoku:\n{PUZZLE}", "")))
    # never confident enough to stop: a canvas that is done keeps its draft, where transformers would go on sampling
    config = replace(load_generation_config(FOLDER), confidence=0.0)
    model = open_model(FOLDER, dtype)
    contestants: dict[str, Any] = {
        "ours": Ours(model, prompt, config, own_stream=True),
        "ours, their draws": Ours(model, prompt, config, own_stream=False),
        "transformers eager": Theirs(Reference(FOLDER, dtype, "eager"), prompt, FOLDER),
        "transformers sdpa": Theirs(Reference(FOLDER, dtype, "sdpa"), prompt, FOLDER),
    }

    unequal = 0

    def check(tokens: dict[str, list[int]]) -> None:
        nonlocal unequal
        unequal += tokens["ours, their draws"] != tokens["transformers eager"]

    ratios: list[float] = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        medians = measure(contestants, options.rounds, check)
        theirs = min(medians["transformers eager"], medians["transformers sdpa"])
        ours = max(medians["ours"], medians["ours, their draws"])
        ratios.append(theirs / ours)
        shown = "   ".join(f"{name} {ms:.2f} ms" for name, ms in medians.items())
        print(f"{threads} thread{'s' if threads > 1 else ''}:  {shown}   → {ratios[-1]:.2f}×")
    samples = options.rounds * STEPS
    print(
        f"{samples} steps each; steps whose tokens differ from transformers': {unequal} of {2 * (samples + 3 * STEPS)}"
    )
    print(
        json.dumps(
            {
                "ratio": round(min(ratios), 2),
                "dtype": options.dtype,
                "torch": torch.__version__,
                "cpu": platform.processor() or platform.machine(),
                "unequal": unequal,
            }
        )
    )


if __name__ == "__main__":
    main()
