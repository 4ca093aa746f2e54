"""transformers' own DiffusionGemma over the folders that dgemma opens: the reference of the parity tests.

Behind the same verbs as `dgemma_local.model`, one sequence without a batch axis. The cache is a DynamicCache and the
experts are transformers' default, `grouped_mm`; its static cache is not exact beyond the window. transformers is imported
when the first reference is built: it takes seconds.
"""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tiny import write_tensors, write_tiny
from torch import Tensor

from dgemma_local.bench.transformers_side import NO_VISION
from dgemma_local.cache import Cache
from dgemma_local.checkpoint import open_checkpoint
from dgemma_local.config import GenerationConfig, load_model_config
from dgemma_local.layout import Options
from dgemma_local.loading import load
from dgemma_local.model import DiffusionGemma

# What tiny.tiny_config is told: windows longer and shorter than prompt and canvas, one head and many, one layer and many.
GEOMETRIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window beyond the prompt": {"pattern": "sfsf", "window": 64, "canvas": 8, "heads": 2, "full_kv_heads": 2},
    "window of two": {"pattern": "sf", "window": 2, "canvas": 5, "hidden": 16, "top_k": 8},
    "canvas of one": {"pattern": "ssf", "window": 6, "canvas": 1, "hidden": 24, "top_k": 1},
    "full only": {"pattern": "fff", "hidden": 24, "vocab": 100, "softcap": 5.0, "experts": 2},
    "one layer": {"pattern": "f", "hidden": 40, "heads": 3, "kv_heads": 3, "head_dim": 16, "full_head_dim": 32},
    "one key head": {
        "pattern": "sssssf",
        "hidden": 48,
        "heads": 8,
        "kv_heads": 1,
        "window": 5,
        "canvas": 16,
        "experts": 4,
    },
    "wide": {"pattern": "sfsf", "hidden": 64, "intermediate": 40, "kv_heads": 4, "full_kv_heads": 2, "head_dim": 32}
    | {"full_head_dim": 64, "window": 12, "experts": 16, "top_k": 4, "expert_size": 8},
}


def write_calm(
    folder: Path, seed: int, dtype: torch.dtype = torch.float32, confidence: float = 1.0, **geometry: Any
) -> Path:
    """A random checkpoint of `geometry` whose attention is soft and whose logits are `confidence` times as large.

    Random scores at scale 1 have a spread of √d: layer after layer of such attention turns rounding into noise. And a
    random model seldom agrees with itself from step to step unless it is sure.
    """
    tensors = write_tiny(folder, seed, dtype, **geometry)
    for name, tensor in tensors.items():
        if name.endswith("q_norm.weight"):
            tensor *= 0.25
    tensors["model.decoder.norm.weight"] *= confidence
    write_tensors(folder, tensors)
    return folder


class Reference:
    """transformers' model of one folder; `attention` is "eager" or "sdpa"."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, attention: str = "eager") -> None:
        transformers: Any = import_module("transformers")
        logging: Any = import_module("transformers.utils.logging")
        logging.disable_progress_bar()
        logging.set_verbosity_error()  # its report lists the vision tower as missing
        config = transformers.DiffusionGemmaConfig.from_pretrained(folder, vision_config=NO_VISION)
        model: Any
        model, report = transformers.DiffusionGemmaForBlockDiffusion.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation=attention, output_loading_info=True
        )
        assert all("vision" in name for name in report["missing_keys"]) and not report["unexpected_keys"]
        self.model = model
        assert model.config._experts_implementation == "grouped_mm"
        assert model.model.decoder.rotary_emb.full_attention_inv_freq.dtype == torch.float32

    def new_cache(self) -> Any:
        return import_module("transformers").DynamicCache(config=self.model.config.get_text_config(decoder=True))

    @torch.inference_mode()
    def encode(self, ids: Tensor, cache: Any) -> Tensor:
        """ids [T] join the cache -> the last hidden state [T, D]."""
        hidden: Tensor = self.model.model.encoder(input_ids=ids[None], cache=cache).last_hidden_state[0]
        return hidden

    def signal(self, logits: Tensor) -> Tensor:
        """transformers softens the logits within the next step."""
        return logits

    @torch.inference_mode()
    def denoise(self, canvas: Tensor, cache: Any, previous: Tensor | None) -> Tensor:
        """canvas [L], previous logits [L, V] or None -> softcapped logits [L, V] fp32."""
        signal = None if previous is None else previous[None].to(self.model.dtype)
        logits: Tensor = self.model(
            decoder_input_ids=canvas[None], cache=cache, self_conditioning_logits=signal
        ).logits[0]
        return logits

    def generate(self, prompt: Tensor, seed: int, max_new_tokens: int, config: GenerationConfig) -> "Generated":
        """A complete answer with draws from torch's generator, seeded with `seed`."""
        generation: Any = import_module("transformers.models.diffusion_gemma.generation_diffusion_gemma")
        heard = _Drafts()
        torch.manual_seed(seed)
        out = self.model.generate(
            prompt[None],
            streamer=heard,
            max_new_tokens=max_new_tokens,
            max_denoising_steps=config.steps,
            sampler_config=generation.EntropyBoundSamplerConfig(entropy_bound=config.entropy_bound),
            t_min=config.t_min,
            t_max=config.t_max,
            stability_threshold=config.stability,
            confidence_threshold=config.confidence,
            eos_token_id=list(config.end_ids) or None,
            pad_token_id=config.pad_id,
        )
        return Generated(
            sequence=out.sequences[0].tolist(),
            drafts=heard.drafts,
            cache_length=out.cache.get_seq_length(),
            tokens_per_forward=float(out.tokens_per_forward),
        )


@dataclass(frozen=True)
class Generated:
    """What transformers' generate() gave."""

    sequence: list[int]  # prompt, then whole canvases; behind an end token, pads
    drafts: list[list[list[int]]]  # canvas by canvas, the argmax after each step
    cache_length: int  # tokens
    tokens_per_forward: float  # tokens other than pads, a denoising step


class _Drafts:
    """A streamer that keeps every draft."""

    def __init__(self) -> None:
        self.drafts: list[list[list[int]]] = []
        self.canvas: list[list[int]] = []

    def put(self, value: Tensor) -> None:
        """The prompt, then each finished canvas."""
        if self.canvas:
            self.drafts.append(self.canvas)
        self.canvas = []

    def put_draft(self, value: Tensor) -> None:
        self.canvas.append(value[0].tolist())

    def end(self) -> None:
        pass


def open_model(folder: Path, dtype: torch.dtype | None = None) -> DiffusionGemma:
    """dgemma's model of one folder."""
    config = load_model_config(folder)
    return DiffusionGemma(config, load(open_checkpoint(folder), config, Options(dtype)))


@torch.inference_mode()
def encode(model: DiffusionGemma, ids: Tensor, cache: Cache) -> Tensor:
    """As `DiffusionGemma.encode` in one chunk, with the last hidden state [T, D] that it leaves out."""
    hidden = model.hidden(model.embed(ids), cache, causal=True)
    cache.advance(len(ids))
    return hidden
