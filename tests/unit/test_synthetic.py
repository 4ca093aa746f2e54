"""The 26B model without its weights: every parameter as a loader would hold it, and numbers that behave like a model's."""

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import published
import pytest
import torch
from torch import Tensor

from dgemma_local import ops
from dgemma_local.bench import synthetic
from dgemma_local.cache import Room
from dgemma_local.config import GenerationConfig, load_generation_config
from dgemma_local.engine import Conversation
from dgemma_local.errors import UsageError
from dgemma_local.events import CanvasCommitted, Finished, StepDone
from dgemma_local.layout import Held, Options, component, plan
from dgemma_local.model import DiffusionGemma
from dgemma_local.noise import PhiloxNoise
from dgemma_local.quant import Fp8, Nvfp4, Weight
from dgemma_local.schemes import scheme_of

LAYOUTS = {
    "bf16": "google-bf16",
    "fp8": "redhat-fp8-dynamic",
    "nvfp4": "redhat-nvfp4",
    "nvfp4-nvidia": "nvidia-nvfp4",
}
CPU = torch.device("cpu")
CONTEXT = 1024
SMALL = synthetic.small_config()


@cache
def stored(layout: str, options: Options | None = None) -> Mapping[str, Held]:
    """What the loader's own plan makes of the published tensor list."""
    scheme = published.QUANTISATION[LAYOUTS[layout]]
    config, tensors = synthetic.published_config(), published.tensors(LAYOUTS[layout])
    return plan(config, tensors, scheme_of(scheme), options or Options()).held


@cache
def small(layout: str) -> tuple[DiffusionGemma, GenerationConfig, Room, int]:
    return synthetic.make(layout, CPU, context=CONTEXT, sizes=SMALL)


def decoded(weight: Weight) -> Tensor:
    return weight.float() if isinstance(weight, Tensor) else weight.decode(torch.float32)


# ── sizes and forms ───────────────────────────────────────────────────────────────────────────────────────────────


def test_the_config_in_the_package_is_the_published_one(tmp_path: Path) -> None:
    assert synthetic.published_config() == published.real_config(tmp_path)
    generation = load_generation_config(synthetic.PUBLISHED, synthetic.published_config().vocab_size)
    assert generation == GenerationConfig(
        steps=48, t_min=0.4, t_max=0.8, entropy_bound=0.1, confidence=0.005, stability=1, end_ids=(1, 106, 50), pad_id=0
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_forms_are_what_the_loader_makes_of_the_published_tensors(layout: str) -> None:
    ours, theirs = synthetic.forms(synthetic.published_config(), layout), stored(layout)
    assert list(ours) == list(theirs)
    for parameter, form in theirs.items():
        assert ours[parameter] == form, parameter


@pytest.mark.parametrize("options", [Options(fp8_attention=True), Options(fp8_embedding=True), Options(fp8_mlp=True)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_forms_follow_the_flags_of_the_loader(layout: str, options: Options) -> None:
    assert synthetic.forms(synthetic.published_config(), layout, options) == stored(layout, options)


def test_an_unknown_layout_is_an_error_with_a_cure() -> None:
    with pytest.raises(UsageError) as caught:
        synthetic.make("q4", CPU, context=CONTEXT, sizes=SMALL)
    assert "'q4'" in caught.value.what and "nvfp4-nvidia" in caught.value.fix


@pytest.mark.parametrize("layout", LAYOUTS)
def test_planned_bytes_are_of_the_weights_and_all_that_a_run_takes_beside_them(layout: str) -> None:
    """The cache is exactly as planned, and what a step works on is beside it."""
    network, _, room, planned = small(layout)
    weights = sum(form.nbytes for form in synthetic.forms(SMALL, layout).values())
    committed = network.new_cache()
    committed.reserve(room)
    assert room.context == CONTEXT
    assert planned > weights + committed.bytes
    longer = synthetic.make(layout, CPU, context=2 * CONTEXT, sizes=SMALL)
    assert longer[2].context == 2 * CONTEXT and longer[3] > planned


def test_a_rehearsal_takes_the_small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(synthetic.REHEARSAL, "1")
    assert synthetic.make("bf16", CPU, context=CONTEXT)[0].config == SMALL
    monkeypatch.setenv(synthetic.REHEARSAL, "0")
    assert not synthetic.rehearsing()


# ── numbers ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("options", [Options(), Options(fp8_attention=True, fp8_embedding=True)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_matrix_has_the_wanted_spread_in_every_form(layout: str, options: Options) -> None:
    held = synthetic.forms(SMALL, layout, options)
    made = synthetic.weights(held, CPU)
    assert list(made) == list(held)
    kinds = {"plain": Tensor, "fp8": Fp8, "nvfp4": Nvfp4}
    for parameter, weight in made.items():
        form = held[parameter]
        assert (
            isinstance(weight, kinds[form.form]) and tuple(weight.shape) == form.shape and weight.nbytes == form.nbytes
        )
        values = decoded(weight)
        assert values.isfinite().all(), parameter
        if len(form.shape) < 2:
            assert (values > 0).all() and values.max() < 2, parameter
            continue
        wanted = {"router": synthetic.ROUTER_STD, "embedding": synthetic.LOGIT_STD * SMALL.hidden_size**-0.5}
        std = wanted.get(component(parameter), form.shape[-1] ** -0.5)
        assert float(values.std()) == pytest.approx(std, rel=0.13), (
            parameter
        )  # SPREAD, of a matrix with one scale for all
        assert abs(float(values.mean())) < 0.1 * std, parameter
    if layout.startswith("nvfp4"):
        packed = made["layers.0.experts.gate_up_proj"]
        assert isinstance(packed, Nvfp4)
        assert (
            len(packed.global_scale.unique()) == packed.global_scale.numel()
        )  # every expert's gate and up have their own
        inputs = packed.input_scale if packed.divides else 1 / packed.input_scale
        assert float(inputs.min()) > 99 and float(inputs.max()) < 151


def test_codes_take_every_value_they_may_and_never_nan() -> None:
    fp8 = synthetic.weights({"x": Held((64, 512), "fp8")}, CPU)["x"]
    nvfp4 = synthetic.weights({"x": Held((64, 512), "nvfp4", heights=(64,))}, CPU)["x"]
    assert isinstance(fp8, Fp8) and isinstance(nvfp4, Nvfp4)
    assert len(fp8.codes.view(torch.uint8).unique()) == 128 and len(nvfp4.packed.unique()) == 256
    assert not fp8.codes.float().isnan().any()
    scales = nvfp4.scale.float()
    assert float(scales.min()) == 0.5 and float(scales.max()) == 3.75


def test_the_same_seed_gives_the_same_bytes_and_another_gives_others() -> None:
    held = synthetic.forms(SMALL, "nvfp4")
    one, same, other = (synthetic.weights(held, CPU, seed)["layers.1.mlp.down_proj"] for seed in (3, 3, 4))
    assert isinstance(one, Nvfp4) and isinstance(same, Nvfp4) and isinstance(other, Nvfp4)
    assert torch.equal(one.packed, same.packed) and torch.equal(one.global_scale, same.global_scale)
    assert not torch.equal(one.packed, other.packed)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_canvases_of_sixteen_steps_are_sane(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows go to every expert, none has most of them; doubt lies between certainty and none, and falls."""
    network, generation, room, _ = small(layout)
    L, V, E = SMALL.canvas_length, SMALL.vocab_size, SMALL.num_experts
    counts: list[Tensor] = []
    route = ops.route

    def spy(r: Tensor, *given: object) -> ops.Routing:
        routing = route(r, *given)  # type: ignore[arg-type]
        if len(r) == L:
            counts.append(routing.chosen.flatten().bincount(minlength=E))
        return routing

    monkeypatch.setattr(ops, "route", spy)
    config = replace(generation, steps=16, confidence=0.0, end_ids=())
    prompt = torch.randint(V, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    noise = PhiloxNoise(1, L, V, CPU)
    events = list(Conversation(network, room).answer(prompt, config, noise, 2 * L))
    steps = [event for event in events if isinstance(event, StepDone)]
    assert len(steps) == 32 and sum(isinstance(event, CanvasCommitted) for event in events) == 2
    assert isinstance(events[-1], Finished) and events[-1].reason == "budget"
    assert len(counts) >= 32 * len(SMALL.layers)
    for chosen in counts:
        assert int(chosen.min()) > 0 and int(chosen.max()) < L / 2  # fair would be L · top_k / E, an eighth of the rows
    for canvas in (steps[:16], steps[16:]):
        means = [sum(step.entropy) / L for step in canvas]
        assert all(0.1 * math.log(V) < mean < 0.9 * math.log(V) for mean in means)
        assert means[-1] < means[0]
        assert all(len(set(step.draft)) > L / 4 for step in canvas)  # not one token everywhere


def test_logits_are_far_from_the_softcap() -> None:
    network, *_ = small("bf16")
    committed = network.new_cache()
    ids = torch.randint(SMALL.vocab_size, (SMALL.canvas_length,), generator=torch.Generator().manual_seed(0))
    logits = network.denoise(ids, committed, None)
    assert logits.isfinite().all() and float(logits.abs().max()) < 0.9 * SMALL.softcap
    assert 1.0 < float(logits.std()) < 4.0


# ── where it runs ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_bare_machine_needs_torch_alone() -> None:
    """What reads checkpoints and prints is not imported."""
    code = """
import sys
from dgemma_local.bench import synthetic
synthetic.make("nvfp4", "cpu", context=512, sizes=synthetic.small_config())
found = {"tokenizers", "safetensors", "compressed_tensors", "typer", "rich", "huggingface_hub", "transformers"}
print(sorted(found & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
