"""The 26B model without its weights: sizes and formats as published, filled with random numbers on the device.

    26b/config.json ─► forms (how the loader would hold each parameter) ─► memory ─► random bytes, in place ─► a network

What a step costs depends on sizes and formats, and on how many experts the rows go to; not on what the weights know.
So nothing is trained or quantised: codes are drawn as bytes, and the scales beside them make of those a matrix of the
wanted spread.

    matrices             std 1/√in: rows of rms 1 give rows of rms 1
    q and k norms        scores of std SCORE_STD: a row attends to few keys, so that rows stay unlike
    router               logits of std ROUTER_STD: with 256 rows every expert has some
    embedding            logits of std LOGIT_STD: below the softcap, and unsure at first, surer as the temperature falls

One generator on the device draws parameter by parameter: the same bytes for a seed on the same kind of device. Each
tensor is filled where it lies, so that the peak is what stays. No file outside this package is read.

Sources: config.json of google/diffusiongemma-26B-A4B-it and its generation_config.json at revision f7f5b7f5; formats of
RedHat's FP8-dynamic and NVFP4 and of NVIDIA's NVFP4 checkpoint, as `layout.plan` reads them.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dgemma_local import fit
from dgemma_local.cache import Room
from dgemma_local.config import GenerationConfig, LayerConfig, ModelConfig, load_generation_config, load_model_config
from dgemma_local.errors import UsageError
from dgemma_local.layout import Held, Options, Plan, component, modules
from dgemma_local.model import DiffusionGemma, parameter_shapes
from dgemma_local.quant import E2M1, Fp8, Nvfp4, Weight

PUBLISHED = Path(__file__).parent / "26b"
_LINEAR = ("attention", "dense MLP", "experts")
# by layout: which components are packed, and how; what is not named is bf16
LAYOUTS: Mapping[str, Mapping[str, Held]] = {
    "bf16": {},
    "fp8": dict.fromkeys(_LINEAR, Held((), "fp8")),
    "nvfp4": dict.fromkeys(("dense MLP", "experts"), Held((), "nvfp4")),
    "nvfp4-nvidia": {"experts": Held((), "nvfp4", divides=False)},
}

LOGIT_STD = 2.0
ROUTER_STD = 1.5
SCORE_STD = 4.0
NORM_WEIGHTS = 0.75, 1.25
LAYER_SCALARS = 0.95, 1.05  # 30 of them are multiplied
SPREAD = 0.9, 1.1  # of the scales that one number would do for: of rows, of fused parts, of experts
# E4M3 without the exponent's highest bit: ±0 … ±1.875, and none of the two NaN
FP8_CODES = 0xBF
GROUP_SCALES = 0x30, 0x48  # E4M3 codes of 0.5 … 3.75, all positive
INPUT_SCALES = 100.0, 150.0  # dividing, as stored: activations of up to 2688 / 150 keep their scales below 448

REHEARSAL = "DGEMMA_GPU_SUITE_SMALL"  # as in tests/gpu


def rehearsing() -> bool:
    """Whether this process tries out the code on small sizes, and measures nothing."""
    return os.environ.get(REHEARSAL) == "1"


def published_config() -> ModelConfig:
    """The released model's geometry."""
    return load_model_config(PUBLISHED)


def small_config() -> ModelConfig:
    """The same kinds of layers and experts, small enough for a rehearsal on a CPU."""
    whole = published_config()
    sliding = LayerConfig(kind="sliding", head_dim=32, kv_heads=2)
    full = LayerConfig(kind="full", head_dim=64, kv_heads=1)
    return replace(
        whole,
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=48,
        self_conditioning_size=48,
        expert_size=32,
        num_experts=16,
        top_k=2,
        heads=4,
        layers=(sliding, sliding, full),
        sliding_window=64,
    )


def forms(config: ModelConfig, layout: str, options: Options | None = None) -> dict[str, Held]:
    """How each parameter lies in memory when a checkpoint of this layout is loaded.

    Raises UsageError on a layout that is not in LAYOUTS.
    """
    if layout not in LAYOUTS:
        raise UsageError(f"no layout is called {layout!r}", f"choose of: {', '.join(LAYOUTS)}")
    packed = dict(LAYOUTS[layout])
    if options is not None:
        wishes = {"attention": options.fp8_attention, "embedding": options.fp8_embedding}
        packed = {part: Held((), "fp8") for part, wish in wishes.items() if wish} | packed
        if options.fp8_mlp:
            packed["dense MLP"] = Held((), "fp8")  # whatever it is stored as
    heights: dict[str, tuple[int, ...]] = {}
    for module in modules(config, frozenset()):
        if len(module.shape) > 1 and not module.expert:  # of experts the first
            heights[module.parameter] = (*heights.get(module.parameter, ()), module.shape[0])
    return {
        parameter: replace(packed.get(component(parameter), Held(())), shape=shape, heights=heights.get(parameter, ()))
        for parameter, shape in parameter_shapes(config).items()
    }


def make(
    layout: str,
    device: torch.device | str,
    *,
    context: int,
    seed: int = 0,
    options: Options | None = None,
    sizes: ModelConfig | None = None,
) -> tuple[DiffusionGemma, GenerationConfig, Room, int]:
    """-> network, the released generation_config, room for `context` tokens, planned bytes of tensors at the peak.

    `sizes`: another geometry than the released one; a rehearsal takes the small one. The planned bytes leave the CUDA
    context out, as torch's own count of peak memory does. Raises UsageError on an unknown layout, ValueError on a
    context without a prompt.
    """
    device = torch.device(device)
    config = sizes or (small_config() if rehearsing() else published_config())
    held = forms(config, layout, options)
    on: fit.Device = "cuda" if device.type == "cuda" else "cpu"
    plan = fit.estimate(config, Plan((), (), {}, held).resident, context=context, device=on)
    network = DiffusionGemma(config, weights(held, device, seed))
    return network, load_generation_config(PUBLISHED), plan.room, plan.allocated


# ── numbers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def weights(held: Mapping[str, Held], device: torch.device, seed: int = 0) -> dict[str, Weight]:
    """Every parameter in its form, filled; `held` as `forms` says."""
    draw = torch.Generator(device).manual_seed(seed)
    made: dict[str, Weight] = {}
    for parameter, form in held.items():
        made[parameter] = weight = form.empty(device)
        if isinstance(weight, Fp8):
            _fill_fp8(weight, _spread(parameter, form.shape[-1]), draw)
        elif isinstance(weight, Nvfp4):
            _fill_nvfp4(weight, _spread(parameter, form.shape[-1]), draw)
        elif weight.dim() > 1:
            weight.normal_(0.0, _spread(parameter, form.shape[-1]), generator=draw)
        else:
            weight.uniform_(*_between(parameter, weight.shape[0]), generator=draw)
    return made


def _spread(parameter: str, columns: int) -> float:
    """Standard deviation of a matrix's weights."""
    if parameter.endswith("router.proj"):  # the router has taken D^-½ off already
        return ROUTER_STD
    return (LOGIT_STD if parameter == "embed_tokens" else 1.0) * float(columns**-0.5)  # the embedding is the head, too


def _between(parameter: str, size: int) -> tuple[float, float]:
    """Least and most of a vector's weights."""
    if parameter.endswith(("q_norm", "k_norm")):
        scale = (SCORE_STD * size**-0.5) ** 0.5  # q · k of `size` products of numbers of rms 1
        return SPREAD[0] * scale, SPREAD[1] * scale
    return LAYER_SCALARS if parameter.endswith("layer_scalar") else NORM_WEIGHTS


def _fill_fp8(weight: Fp8, spread: float, draw: torch.Generator) -> None:
    codes = weight.codes.view(torch.uint8)
    codes.random_(0, 256, generator=draw).bitwise_and_(FP8_CODES)
    weight.scale.uniform_(*SPREAD, generator=draw).mul_(spread / _rms_of_codes())


def _fill_nvfp4(weight: Nvfp4, spread: float, draw: torch.Generator) -> None:
    weight.packed.random_(0, 256, generator=draw)
    weight.scale.view(torch.uint8).random_(*GROUP_SCALES, generator=draw)
    unit = spread / (_rms(torch.tensor(E2M1)) * _rms(_e4m3(torch.arange(*GROUP_SCALES))))
    weight.global_scale.uniform_(*SPREAD, generator=draw).mul_(unit)
    weight.input_scale.uniform_(*INPUT_SCALES, generator=draw)
    (weight.global_scale if weight.divides else weight.input_scale).reciprocal_()


def _rms_of_codes() -> float:
    return _rms(_e4m3(torch.arange(256) & FP8_CODES))


def _e4m3(codes: Tensor) -> Tensor:
    return codes.to(torch.uint8).view(torch.float8_e4m3fn).float()


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
