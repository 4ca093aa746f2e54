"""The passes of the 26B model as launches, for any published checkpoint and any card, without weights.

    with recording(ADA) as launches:
        run("redhat-nvfp4")

Parameters are meta tensors in the forms that the loader would give them; the cache is planned for CONTEXT committed
tokens and a canvas. The passes are `captured`'s: a step in the middle of a canvas, and a canvas's first, with which rows
of the canvas before it join the cache.
"""

import os
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import cache
from pathlib import Path
from unittest import mock

import published
import torch
import triton  # noqa: F401  before the kernels, which look whether somebody did

from dgemma_local.cache import Room
from dgemma_local.captured import Captured
from dgemma_local.config import GenerationConfig, ModelConfig
from dgemma_local.layout import Held, Options, plan
from dgemma_local.model import PREFILL_CHUNK, DiffusionGemma
from dgemma_local.quant import Weight
from dgemma_local.schemes import scheme_of

CONTEXT = 1024  # committed tokens, as the floors of README assume
CHECKPOINTS = {"redhat-nvfp4": "RedHat NVFP4", "nvidia-nvfp4": "NVIDIA NVFP4", "redhat-fp8-dynamic": "RedHat FP8"}
STEPS = GenerationConfig(
    steps=16, t_min=0.4, t_max=0.8, entropy_bound=0.1, confidence=0.005, stability=1, end_ids=(1,), pad_id=0
)


def name(checkpoint: str, light: bool) -> str:
    """Of the configuration that compiles this step."""
    return f"step/{checkpoint}" + (", light" if light else "")


@cache
def config() -> ModelConfig:
    with tempfile.TemporaryDirectory() as folder:
        return published.real_config(Path(folder))


@cache
def held(checkpoint: str, light: bool) -> Mapping[str, Held]:
    """How every parameter lies in memory; `light`: attention, dense MLP and embedding in FP8, whatever was stored."""
    options = Options(fp8_attention=light, fp8_embedding=light, fp8_mlp=light)
    return plan(config(), published.tensors(checkpoint), scheme_of(published.QUANTISATION[checkpoint]), options).held


@cache
def weights(checkpoint: str, light: bool) -> dict[str, Weight]:
    return {name: form.empty("meta") for name, form in held(checkpoint, light).items()}


@cache
def model(checkpoint: str, light: bool) -> DiffusionGemma:
    return DiffusionGemma(config(), weights(checkpoint, light))


def _asked(light: bool) -> AbstractContextManager[object]:
    return mock.patch.dict(os.environ, DGEMMA_OPS="fp8-soft" if light else "")


@cache
def session(checkpoint: str, light: bool) -> Captured:
    """The fixed memory of its passes; `light`: with a second copy of the embedding, for the soft one in FP8."""
    network = model(checkpoint, light)
    room = Room(context=CONTEXT + network.canvas_length, rows=PREFILL_CHUNK, slack=0)
    with _asked(light):
        made = Captured(network, room)
        made.prepare(STEPS)
    return made


@cache
def lasting(checkpoint: str, light: bool) -> frozenset[int]:
    """The storages that a step finds and leaves: weights, keys and values. Everything else is made and used up in it."""
    made = session(checkpoint, light)
    slabs = [slab for i in range(len(config().layers)) for slab in made.cache.slab(i)]
    tensors = [*slabs, *(t for w in weights(checkpoint, light).values() for t in parts(w))]
    if (across := made.head.across) is not None:
        tensors += [across.codes, across.factor, across.unit]
    return frozenset(t.untyped_storage()._cdata for t in tensors)


def parts(weight: Weight) -> list[torch.Tensor]:
    if isinstance(weight, torch.Tensor):
        return [weight]
    return [getattr(weight, f.name) for f in fields(weight) if isinstance(getattr(weight, f.name), torch.Tensor)]


@torch.inference_mode()
def run(checkpoint: str, light: bool = False) -> None:
    """One denoising step; to be called while recording."""
    with _asked(light):
        session(checkpoint, light).step()


@torch.inference_mode()
def run_first(checkpoint: str, light: bool = False) -> None:
    """A canvas's first step, and the commit of the one before in the same pass; likewise."""
    with _asked(light):
        session(checkpoint, light).first()
