"""transformers' own DiffusionGemma, opened from the folder that ours is read from.

transformers is imported when its model is opened: that takes seconds. Its cache is a DynamicCache, its default.
Source: transformers 5.24 modeling_diffusion_gemma.py and generation_diffusion_gemma.py.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from dgemma_local.bench.report import counted
from dgemma_local.card import host_memory
from dgemma_local.checkpoint import open_checkpoint
from dgemma_local.config import GenerationConfig
from dgemma_local.errors import CheckpointError
from dgemma_local.fit import gb
from dgemma_local.model import DiffusionGemma

ATTENTIONS = ("eager", "sdpa")
THEIRS = tuple(f"transformers {attention}" for attention in ATTENTIONS)
# Beside its weights transformers holds a step's logits a few times over; what a tenth of the weights leaves is enough for
# the real model's 268 MB of fp32 logits, and small for the demo's.
SPARE = 1.1

# transformers refuses a threshold of 0, and without one it leaves the whole test out, entropies and all. No mean of fp32
# entropies but 0 itself is below this one.
NEVER_CONFIDENT = torch.finfo(torch.float32).tiny

# As small as transformers builds it: our layers are those of the text, and its default tower has 16 of its own.
NO_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "position_embedding_size": 8,
}


def unable(folder: Path | None) -> str | None:
    """Why transformers cannot open this checkpoint, as far as can be told without opening it here; None where it can.

    `folder`: None for random weights.
    """
    if folder is None:
        return "these weights are random and in no folder that transformers could open"
    if find_spec("transformers") is None:
        return "transformers is not installed (pip install transformers==5.24.0)"
    if find_spec("transformers.models.diffusion_gemma") is None:
        return "the transformers installed here has no DiffusionGemma (pip install transformers==5.24.0)"
    checkpoint = open_checkpoint(folder)
    if checkpoint.quantisation is not None:
        return "the folder's weights are packed, and transformers is compared on unpacked ones"
    return None


def why_not(folder: Path | None, network: DiffusionGemma, free: int | None = None) -> str | None:
    """Why transformers cannot take part beside `network`, in one line; None where it can.

    `free`: bytes there are for its weights; None: asked.
    """
    reason = unable(folder)
    if folder is None or reason is not None:
        return reason
    checkpoint = open_checkpoint(folder)
    count = sum(torch.Size(tensor.shape).numel() for tensor in checkpoint.tensors.values())
    wanted = round(SPARE * network.dtype.itemsize * count)
    left = _free(network.device) if free is None else free
    if left is not None and wanted > left:
        return f"it would take {gb(wanted)} beside our weights, and {gb(left)} are free"
    return None


def _free(device: torch.device) -> int | None:
    """Bytes that a second model may take; None: unknown."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory()


def open_theirs(folder: Path, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """transformers' model under the names of THEIRS, once for each attention, over one set of weights.

    Raises CheckpointError where it and the folder do not agree on the tensors.
    """
    import transformers
    from transformers.utils import logging

    library: Any = transformers  # whose types say less than they seem to
    log: Any = logging
    log.disable_progress_bar()
    log.set_verbosity_error()  # its report lists the vision tower as missing
    config = library.DiffusionGemmaConfig.from_pretrained(folder, vision_config=NO_VISION)
    model, report = library.DiffusionGemmaForBlockDiffusion.from_pretrained(
        folder, config=config, dtype=dtype, attn_implementation=ATTENTIONS[0], output_loading_info=True
    )
    wrong = sorted(name for key in ("missing_keys", "unexpected_keys") for name in report[key] if "vision" not in name)
    if wrong:
        raise CheckpointError(
            f"transformers and {folder} do not agree on {counted(len(wrong), 'tensor')}: {wrong[0]} …",
            "use the whole folder of one checkpoint, and transformers 5.24",
        )
    model = model.to(device).eval()
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    opened = {THEIRS[0]: model}
    for name, attention in zip(THEIRS[1:], ATTENTIONS[1:], strict=True):
        opened[name] = copy.deepcopy(model, dict(shared))  # modules and configuration alone
        opened[name].set_attn_implementation(attention)
    return opened


def settings(config: GenerationConfig) -> dict[str, Any]:
    """`config` as transformers' `generate` takes it."""
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

    return {
        "max_denoising_steps": config.steps,
        "sampler_config": EntropyBoundSamplerConfig(entropy_bound=config.entropy_bound),
        "t_min": config.t_min,
        "t_max": config.t_max,
        "stability_threshold": config.stability,
        "confidence_threshold": max(config.confidence, NEVER_CONFIDENT),
        "eos_token_id": list(config.end_ids) or None,
        "pad_token_id": config.pad_id,
    }


def version() -> str:
    import transformers

    return str(transformers.__version__)


def their_twin(dtype: torch.dtype) -> str:
    """Of THEIRS the one that ours is compared with: in fp32 eager, in bf16 sdpa, whose attention rounds where ours does."""
    return THEIRS[ATTENTIONS.index("sdpa" if dtype == torch.bfloat16 else "eager")]


@contextmanager
def generator_kept() -> Iterator[None]:
    """transformers draws from torch's own generator, which is left as it was found."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield
