"""Weights as FP8 and NVFP4 would hold them, for training a model that stays right when it is quantised.

    FP8     one scale a row, codes E4M3
    NVFP4   codes E2M1 in groups of 16 along the input, scales E4M3, one fp32 scale a matrix that divides

The formulas are `quant`'s. The forward value is the quantised one, the gradient passes straight through.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dgemma_local.quant import quantise_fp8, quantise_nvfp4


def fp8(weight: Tensor) -> Tensor:
    """[..., out, in] -> the same shape, each row through E4M3."""
    return quantise_fp8(weight).decode(weight.dtype)


def nvfp4(weight: Tensor) -> Tensor:
    """[..., out, in], in a multiple of 16 -> the same shape, through E2M1 codes and their two scales."""
    return quantise_nvfp4(weight).decode(weight.dtype)


SCHEMES: dict[str, Callable[[Tensor], Tensor]] = {"fp8": fp8, "nvfp4": nvfp4}


def straight_through(weight: Tensor, scheme: str) -> Tensor:
    """`weight` with the values that `scheme` would store, and the gradient of `weight`."""
    with torch.no_grad():
        change = SCHEMES[scheme](weight) - weight
    return weight + change


def is_quantised(name: str, weight: Tensor) -> bool:
    """Whether the published quantised checkpoints hold this parameter in few bits: attention, MLP and experts."""
    return weight.dim() > 1 and name != "embed_tokens" and "router" not in name and "self_conditioning" not in name
