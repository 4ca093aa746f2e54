"""One denoising step of the 26B model as launches, for any published checkpoint and any card, without weights.

    with recording(ADA) as launches:
        run("redhat-nvfp4")

Parameters are meta tensors in the forms that the loader would give them; the cache has CONTEXT committed tokens; the
step is one in the middle of a canvas, conditioned on the step before.
"""

import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from unittest import mock

import published
import torch
import triton  # noqa: F401  before the kernels, which look whether somebody did

from dgemma_local.cache import Cache, Room
from dgemma_local.config import GenerationConfig, ModelConfig
from dgemma_local.layout import Held, Options, plan
from dgemma_local.model import PREFILL_CHUNK, DiffusionGemma
from dgemma_local.noise import PhiloxNoise
from dgemma_local.quant import Weight
from dgemma_local.sampler import Canvas
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
    options = Options(fp8_attention=light, fp8_embedding=light)
    forms = plan(config(), published.tensors(checkpoint), scheme_of(published.QUANTISATION[checkpoint]), options).held
    if not light:
        return forms
    return {
        name: replace(form, form="fp8", dtype=torch.bfloat16) if ".mlp." in name else form
        for name, form in forms.items()
    }


@cache
def weights(checkpoint: str, light: bool) -> dict[str, Weight]:
    return {name: form.empty("meta") for name, form in held(checkpoint, light).items()}


@cache
def model(checkpoint: str, light: bool) -> DiffusionGemma:
    return DiffusionGemma(config(), weights(checkpoint, light))


@cache
def memory(checkpoint: str, light: bool) -> Cache:
    network = model(checkpoint, light)
    committed = network.new_cache()
    committed.reserve(Room(context=CONTEXT + network.canvas_length, rows=PREFILL_CHUNK, slack=0))
    committed.length = CONTEXT
    return committed


@cache
def lasting(checkpoint: str, light: bool) -> frozenset[int]:
    """The storages that a step finds and leaves: weights, keys and values. Everything else is made and used up in it."""
    committed = memory(checkpoint, light)
    slabs = [slab for i in range(len(config().layers)) for slab in committed.slab(i)]
    tensors = [*slabs, *(t for w in weights(checkpoint, light).values() for t in parts(w))]
    head = model(checkpoint, light)._head
    if head is not None and head.across is not None:
        tensors += [head.across.codes, head.across.factor, head.across.unit]
    return frozenset(t.untyped_storage()._cdata for t in tensors)


def parts(weight: Weight) -> list[torch.Tensor]:
    if isinstance(weight, torch.Tensor):
        return [weight]
    return [getattr(weight, f.name) for f in fields(weight) if isinstance(getattr(weight, f.name), torch.Tensor)]


def run(checkpoint: str, light: bool = False) -> None:
    """One denoising step; to be called while recording."""
    network, committed = model(checkpoint, light), memory(checkpoint, light)
    length, width = network.canvas_length, network.config.hidden_size
    canvas = Canvas(
        number=1,
        step=3,
        next=torch.empty(length, dtype=torch.int64, device="meta"),
        signal=torch.empty(length, width, dtype=network.dtype, device="meta"),
        history=(torch.empty(length, dtype=torch.int64, device="meta"),),
    )
    noise = PhiloxNoise(seed=0, length=length, vocab_size=network.config.vocab_size, device=torch.device("meta"))
    asked = mock.patch.dict(os.environ, DGEMMA_OPS="fp8-soft" if light else "")
    # behind the last launch the flags are read, and meta tensors hold nothing
    with asked, suppress(NotImplementedError):
        network.advance(canvas, committed, STEPS, noise)
