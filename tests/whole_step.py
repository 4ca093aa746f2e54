"""Every launch of a pass of the real model, as a card would get it: the published layouts on meta tensors, no bytes.

    as stored      what a checkpoint holds
    fp8            the same, and what it leaves in 16 bits, but the router, in FP8: attention, dense MLP, self-conditioning,
                   embedding; what it holds in fewer bits stays there, but for the dense MLP
"""

import tempfile
from pathlib import Path

import torch
from dgemma_local.kernels._launch import Gpu, Launch, recording
from published import real_config

from dgemma_local import ops
from dgemma_local.cache import Room
from dgemma_local.model import PREFILL_CHUNK, DiffusionGemma, parameter_shapes
from dgemma_local.quant import Fp8, Nvfp4, Weight

CHECKPOINTS = ("RedHat NVFP4", "NVIDIA NVFP4", "RedHat FP8")
META = torch.device("meta")
STEPS, ENTROPY_BOUND, CONFIDENCE = 48, 0.1, 0.005  # the published generation_config.json


def model(checkpoint: str, *, fp8: bool) -> DiffusionGemma:
    """The 26B model on the meta device, each matrix in the form that the checkpoint has it in."""
    with tempfile.TemporaryDirectory() as folder:
        config = real_config(Path(folder))
    weights = {name: weight(name, shape, checkpoint, fp8) for name, shape in parameter_shapes(config).items()}
    return DiffusionGemma(config, weights)


def weight(name: str, shape: tuple[int, ...], checkpoint: str, fp8: bool) -> Weight:
    if len(shape) == 1 or "router" in name:
        return torch.empty(shape, dtype=torch.bfloat16, device=META)
    embedding = name == "embed_tokens"
    stored = {
        "RedHat NVFP4": "nvfp4" if "experts" in name or ".mlp." in name else "bf16",
        "NVIDIA NVFP4": "nvfp4" if "experts" in name else "bf16",
        "RedHat FP8": "bf16" if embedding or name.startswith("self_conditioning") else "fp8",
    }[checkpoint]
    if stored == "fp8" or (fp8 and "experts" not in name):
        return Fp8.empty(shape, device=META)
    if stored == "bf16":
        return torch.empty(shape, dtype=torch.bfloat16, device=META)
    heights = (shape[-2] // 2,) * 2 if "gate_up" in name else None
    return Nvfp4.empty(shape, heights, divides=checkpoint == "RedHat NVFP4", device=META)


@torch.inference_mode()
def denoising_step(gpu: Gpu, network: DiffusionGemma, context: int) -> list[Launch]:
    """A step with self-conditioning behind `context` committed tokens, to the flags that say whether there is another."""
    config, L = network.config, network.canvas_length
    with recording(gpu) as launches:
        cache = network.new_cache()
        cache.reserve(Room(context=context + L, rows=PREFILL_CHUNK, slack=L))
        cache.advance(context)
        canvas = torch.empty(L, dtype=torch.int64, device=META)
        soft = torch.empty(L, config.hidden_size, dtype=torch.bfloat16, device=META)
        hidden = network.hidden(network.canvas_rows(canvas, soft), cache, causal=False)
        table = network.embed_tokens
        assert not isinstance(table, Nvfp4)
        fused = ops.FusedCanvas(canvas, torch.empty(STEPS, device=META), 1, seed=0, attempt=0, number=0)
        fused.step(hidden, ops.Head(table, config.softcap, network.embed_scale), ENTROPY_BOUND, CONFIDENCE)
    return launches


@torch.inference_mode()
def encoder_pass(gpu: Gpu, network: DiffusionGemma, context: int, rows: int) -> list[Launch]:
    """A commit of 256 rows, or a chunk of a prefill, behind `context` tokens."""
    with recording(gpu) as launches:
        cache = network.new_cache()
        cache.reserve(Room(context=context + rows, rows=PREFILL_CHUNK, slack=network.canvas_length))
        cache.advance(context)
        network.encode(torch.empty(rows, dtype=torch.int64, device=META), cache, chunk=rows)
    return launches
