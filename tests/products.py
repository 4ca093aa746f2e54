"""Odd matrices for the tests of the linears, and the questions all of them are asked."""

from dataclasses import replace

import near
import torch
import torch.nn.functional as F
from dgemma_local.kernels import _gemm
from dgemma_local.kernels._launch import ADA, BLACKWELL, HOPPER, Tile, recording

from dgemma_local.quant import quantise_fp8, quantise_nvfp4

# rows, outputs, inputs: one of each; nothing divides anything; more than a tile each way; the narrow sides of real ones
SHAPES = ((1, 2, 16), (5, 100, 80), (37, 70, 208), (70, 130, 144))
REAL = (150, 96, 2112)
SMALL = Tile(32, 32, 64, 4, 2)
# the real products: outputs, inputs
PRODUCTS = ((8192, 2816), (9216, 2816), (2816, 4096), (2816, 8192), (4224, 2816), (2816, 2112))
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


def assert_only_who_counts_last_writes(monkeypatch, product):
    """Of a product in two tiles of 4 steps between three programs, the last one of which is missing, half is written."""
    whole = _gemm.job

    def all_but_one(*args):
        job = whole(*args)
        assert job.grid == (3,)
        return replace(job, grid=(2,))

    monkeypatch.setattr(_gemm, "job", all_but_one)
    monkeypatch.setattr(_gemm.tl, "num_programs", lambda axis: 3)
    try:
        out = product()
    finally:
        _gemm.counters(torch.device("cpu")).zero_()
    assert out.shape == (32, 64)
    assert out[:, 32:].isnan().all() and not out[:, :32].isnan().any()


def in_order(monkeypatch, order):
    """The programs of a launch in another order, `order(n)` of n: what an outcome must not depend on."""
    from triton.runtime.interpreter import interpreter_builder as builder

    place = builder.set_grid_idx

    def set_grid_idx(x, y, z):
        place(order(builder.grid_dim[0])[x], y, z)

    monkeypatch.setattr(builder, "set_grid_idx", set_grid_idx)


def backwards(programs):
    return range(programs)[::-1]


def from_the_middle(programs):
    """Even ones first, from the middle on: most tiles are begun before any is finished."""
    return sorted(range(programs), key=lambda p: (p % 2, abs(2 * p - programs)))


def fill(gpu, launch):
    """Steps of K a processor, on the average, by those of the busiest one; of a recorded linear."""
    c, T = launch.constants, launch.args[-1]
    steps = -(-c["K"] // c["BK"])
    total = -(-T // c["BM"]) * -(-c["N"] // c["BN"]) * steps
    (programs,) = launch.grid
    busiest = -(-total // programs) if c["SHARED"] else -(-programs // gpu.processors) * steps
    return total / gpu.processors / busiest


def fills(linear, x, w, cards=(ADA, HOPPER, BLACKWELL)):
    """How well each real product of 256 rows fills each card; `x` and `w` make meta operands of a shape."""
    for gpu in cards:
        for N, K in PRODUCTS:
            with recording(gpu) as launches:
                linear(x(256, K), w(N, K))
            yield gpu, (N, K), fill(gpu, *launches)
