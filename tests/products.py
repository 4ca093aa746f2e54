"""Odd matrices for the tests of the linears, and the questions all of them are asked."""

import near
import torch
import torch.nn.functional as F
from dgemma_local.kernels._launch import Tile

from dgemma_local.quant import quantise_fp8, quantise_nvfp4

# rows, outputs, inputs: one of each; nothing divides anything; more than a tile each way; the narrow sides of real ones
SHAPES = ((1, 2, 16), (5, 100, 80), (37, 70, 208), (70, 130, 144))
REAL = (150, 96, 2112)
SMALL = Tile(32, 32, 64, 4, 2)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rows(T, K, dtype, seed=0):
    return torch.randn(T, K, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights(N, K, dtype=torch.bfloat16, seed=1):
    """Of a size at which both halves of a gated product count, and each row of its own size."""
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) * K**-0.5
    return (w * torch.linspace(0.3, 3.0, N)[:, None]).to(dtype)


def fp8_weights(N, K, dtype=torch.bfloat16, seed=1):
    return quantise_fp8(weights(N, K, dtype, seed))


def nvfp4_weights(N, K, heights=None, divides=True, seed=1):
    """Parts of very different global scales; `divides` says how they are written down."""
    w = weights(N, K, torch.float32, seed)
    for i, part in enumerate(w.split(list(heights or (N,)))):
        part.mul_(4.0**i)
    quantised = quantise_nvfp4(w, heights)
    quantised.global_scale.mul_(torch.linspace(0.9, 1.1, len(quantised.heights)))
    if divides:
        return quantised
    return type(quantised)(
        quantised.packed, quantised.scale, 1 / quantised.global_scale, quantised.input_scale, quantised.heights, False
    )


def gated(product):
    """What a gated twin makes of one product, unrounded in fp64."""
    gate, up = product.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def assert_right(ours, twin, truth):
    """fp32 has no rounding that hides the order of its sums: no two orders are equal to a bit there."""
    if ours.dtype == torch.float32:
        near.assert_near(ours, twin, steps=64, equal=0)
        near.assert_no_worse(ours, twin, truth, ratio=1.5)
    else:
        near.assert_near(ours, twin)
        near.assert_no_worse(ours, twin, truth)


def backwards(monkeypatch):
    """The programs of a launch in the reverse order: what an outcome must not depend on."""
    from triton.runtime.interpreter import interpreter_builder as builder

    place = builder.set_grid_idx

    def set_grid_idx(x, y, z):
        place(builder.grid_dim[0] - 1 - x, builder.grid_dim[1] - 1 - y, builder.grid_dim[2] - 1 - z)

    monkeypatch.setattr(builder, "set_grid_idx", set_grid_idx)
