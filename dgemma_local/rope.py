"""The two rotary tables: `default` on sliding layers, `proportional` on full ones.

    x'[j] = x[j] * cos - x[j + d/2] * sin        x'[j + d/2] = x[j + d/2] * cos + x[j] * sin       j < d/2

Angles are position * theta^(-2j/d) in fp32, and so are cos and sin; they are cast to the activation dtype once, and the
products are rounded in it, as the reference does. Proportional: only the first `rotating * d/2` pairs turn, and the
exponent's denominator stays the full head_dim; the others have angle 0, so that they pass through exactly.

Source: transformers 5.24, modeling_rope_utils `_compute_proportional_rope_parameters`; vectors in tests/golden/rope_real.json.
"""

import torch
from torch import Tensor

from dgemma_local.config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] fp32, radians per position; zero where a pair does not rotate."""
    rotating = int(config.rotating * head_dim // 2)
    exponent = torch.arange(0, 2 * rotating, 2, dtype=torch.int64).float() / head_dim
    return torch.cat([1.0 / config.theta**exponent, torch.zeros(head_dim // 2 - rotating)])


def table(config: RopeConfig, head_dim: int, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """positions [T] -> cos and signed sin, each [T, head_dim] in `dtype`.

    The sine's first half is negated, which is exact, so that rotating is one roll, two products and a sum.
    """
    turn = inverse_frequencies(config, head_dim).to(positions.device)
    cos, sin = (torch.empty(len(positions), head_dim, dtype=dtype, device=positions.device) for _ in range(2))
    return _write(positions.float()[:, None] * turn, cos, sin)


def fill(turn: Tensor, start: Tensor, cos: Tensor, sin: Tensor) -> None:
    """The tables of as many rows as cos and sin [T, d] have, from position `start` on, int64 and on the device."""
    positions = torch.arange(len(cos), device=start.device) + start
    _write(positions.float()[:, None] * turn, cos, sin)


def _write(angle: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """angle [T, d/2], fp32 even in an fp64 model: the reference's."""
    half, c, s = angle.shape[1], angle.cos(), angle.sin()
    cos[:, :half], cos[:, half:] = c, c
    sin[:, :half], sin[:, half:] = -s, s
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., T, d], cos and signed sin [T, d] -> [..., T, d], rounded in x's dtype after each operation."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
