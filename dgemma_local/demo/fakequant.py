"""Weights as FP8 and NVFP4 would hold them, for training a model that stays right when it is quantised.

    FP8     one scale a row, amax / 448, codes E4M3
    NVFP4   codes E2M1 in groups of 16 along the input, scales E4M3, one fp32 scale a matrix that divides

Formulas: compressed-tensors 0.20. The forward value is the quantised one, the gradient passes straight through.
"""

from collections.abc import Callable

import torch
from torch import Tensor

E4M3_MAX, E2M1_MAX, GROUP = 448.0, 6.0, 16
# between two codes; a tie goes to the even code, so every second bound lies one ulp below its midpoint
_BOUNDS = tuple(m * (1 - 2.0**-24) if i % 2 else m for i, m in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)))
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fp8(weight: Tensor) -> Tensor:
    """[..., out, in] -> the same shape, each row through E4M3."""
    scale = weight.abs().amax(-1, keepdim=True).clamp_min(1e-12) / E4M3_MAX
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


def nvfp4(weight: Tensor) -> Tensor:
    """[..., out, in], in a multiple of 16 -> the same shape, through E2M1 codes and their two scales."""
    whole = weight.abs().amax((-2, -1), keepdim=True).clamp_min(1e-12)
    divisor = E4M3_MAX * E2M1_MAX / whole  # weight_global_scale
    groups = weight.unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(-1)
    scale = (divisor * amax / E2M1_MAX).to(torch.float8_e4m3fn).to(weight.dtype)
    unit = (scale / divisor)[..., None].clamp_min(1e-20)
    codes = torch.bucketize((groups / unit).abs(), weight.new_tensor(_BOUNDS))
    quantised: Tensor = weight.new_tensor(_VALUES)[codes] * groups.sign() * unit
    return quantised.flatten(-2)


SCHEMES: dict[str, Callable[[Tensor], Tensor]] = {"fp8": fp8, "nvfp4": nvfp4}


def straight_through(weight: Tensor, scheme: str) -> Tensor:
    """`weight` with the values that `scheme` would store, and the gradient of `weight`."""
    with torch.no_grad():
        change = SCHEMES[scheme](weight) - weight
    return weight + change


def is_quantised(name: str, weight: Tensor) -> bool:
    """Whether the published quantised checkpoints hold this parameter in few bits: attention, MLP and experts."""
    return weight.dim() > 1 and name != "embed_tokens" and "router" not in name and "self_conditioning" not in name
