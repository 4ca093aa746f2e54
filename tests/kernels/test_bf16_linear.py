"""kernels/bf16_linear.py, and what it shares with the other linears (kernels/_gemm.py)."""

import pytest
import torch
from dgemma_local.kernels import _gemm
from dgemma_local.kernels._launch import ADA, BLACKWELL, HOPPER, Tile, recording
from dgemma_local.kernels.bf16_linear import TILES, bf16_gated, bf16_gated_twin, bf16_linear, bf16_linear_twin
from products import (
    DTYPES,
    PRODUCTS,
    REAL,
    SHAPES,
    SMALL,
    assert_only_who_counts_last_writes,
    assert_right,
    backwards,
    fills,
    from_the_middle,
    gated,
    in_order,
    rows,
    weights,
)


def meta(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def exact(x, w):
    return x.double() @ w.double().T


@pytest.mark.parametrize(("tile", "programs"), [(None, None), (SMALL, None), (SMALL, 7)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_shapes(dtype, shape, tile, programs):
    T, N, K = shape
    x, w = rows(T, K, dtype), weights(N, K, dtype)
    assert_right(bf16_linear(x, w, tile, programs), bf16_linear_twin(x, w), exact(x, w))
    assert_right(bf16_gated(x, w, tile, programs), bf16_gated_twin(x, w), gated(exact(x, w)))


def test_a_real_depth_between_any_number_of_programs():
    T, N, K = REAL
    x, w = rows(T, K, torch.bfloat16), weights(N, K)
    for programs in (1, 2, 3, 5, 11, 66):  # two tiles of 33 steps
        assert_right(bf16_linear(x, w, None, programs), bf16_linear_twin(x, w), exact(x, w))
        assert_right(bf16_gated(x, w, None, programs), bf16_gated_twin(x, w), gated(exact(x, w)))


@pytest.mark.parametrize("programs", [*range(1, 12), 17, 23, 41, 42, 43])
def test_every_step_is_taken_once(programs):
    """6 tiles of 7 steps, in whole numbers: exact, however they are dealt out."""
    x = torch.arange(20.0 * 100).reshape(20, 100) % 11
    w = torch.arange(40.0 * 100).reshape(40, 100) % 13
    out = bf16_linear(x, w, Tile(16, 16, 16, 4, 2), programs)
    assert torch.equal(out, x @ w.T)
    assert not _gemm.counters(torch.device("cpu")).any()


@pytest.mark.parametrize("order", [backwards, from_the_middle])
def test_the_order_in_which_programs_finish_changes_no_bit(monkeypatch, order):
    """9 tiles of 16 steps: between 4 programs whole ones too, between 50 each in 6 or 7 parts."""
    x, w = rows(70, 1024, torch.float32), weights(96, 1024, torch.float32)
    shares = (4, 9, 14, 50)
    forwards = [(bf16_linear(x, w, SMALL, p), bf16_gated(x, w, SMALL, p)) for p in shares]
    in_order(monkeypatch, order)
    for programs, (plain, paired) in zip(shares, forwards, strict=True):
        assert torch.equal(bf16_linear(x, w, SMALL, programs), plain)
        assert torch.equal(bf16_gated(x, w, SMALL, programs), paired)


def test_parts_are_added_in_the_order_of_k():
    """One tile in four parts, 2²⁴ + 1 + 1 − 2²⁴: 0 from the left, in which each 1 is lost; 2 or 1 in other orders."""
    x, w = torch.ones(1, 64), torch.zeros(2, 64)
    w[:, 0], w[:, 16], w[:, 32], w[:, 48] = 2.0**24, 1.0, 1.0, -(2.0**24)
    assert not bf16_linear(x, w, Tile(16, 16, 16, 4, 2), 4).any()


def test_only_who_counts_last_writes(monkeypatch):
    x, w = rows(32, 256, torch.bfloat16), weights(64, 256)
    assert_only_who_counts_last_writes(monkeypatch, lambda: bf16_linear(x, w, SMALL, 3))


def test_rows_that_are_infinite_or_nan_stay_with_themselves():
    x, w = rows(4, 64, torch.bfloat16), weights(32, 64)
    x[1, 3], x[2, 5] = torch.inf, torch.nan
    out = bf16_linear(x, w)
    assert out[[0, 3]].isfinite().all() and not out[[1, 2]].isfinite().any()


def test_gelu_at_its_extremes():
    """Gates of every size against up = 1: near 0 the half of the gate, far below 0, far above the gate itself."""
    gates = torch.cat([torch.logspace(-30, 2, 60), -torch.logspace(-30, 2, 60), torch.zeros(8)])
    for dtype in (torch.float32, torch.bfloat16):
        x, w = torch.eye(1, 16, dtype=dtype), torch.zeros(2 * len(gates), 16, dtype=dtype)
        w[: len(gates), 0], w[len(gates) :, 0] = gates, 1.0
        truth = gated(exact(x, w))
        assert_right(bf16_gated(x, w), bf16_gated_twin(x, w), truth)
        small = gates.abs() < 1
        error = (bf16_gated(x, w).double() - truth)[0, small] / truth[0, small].abs().clamp_min(1e-300)
        assert error.abs().max() <= 2 * torch.finfo(dtype).eps  # relative: nothing cancels


@pytest.mark.parametrize("T", [1, 17, 256, 512])
@pytest.mark.parametrize("gpu", [ADA, HOPPER, BLACKWELL])
def test_a_plan_is_never_slower_than_a_program_a_tile(gpu, T):
    for N, K in (*PRODUCTS, (64, 64)):
        tiles = TILES[gpu.capability]
        tile, programs = _gemm.plan(tiles, T, N, K, 2 * K, gpu)
        time = _gemm._time(tile, programs, T, N, K, 2 * K, gpu)
        assert programs <= max(_gemm._tiles(tile, T, N), gpu.processors)
        assert all(time <= _gemm._time(t, _gemm._tiles(t, T, N), T, N, K, 2 * K, gpu) for t in tiles)


def test_the_time_of_a_share():
    """Two tiles of 4 steps between three programs: 2, 3 and 3 steps, the middle one in two pieces, both of them parts."""
    tile = Tile(64, 64, 64, 4, 2)
    step = 64 * 64 * 128 / 512 + _gemm.PAUSE
    exchange = 2 * 4 * 64 * 64 / _gemm.L2_BYTES
    time = _gemm._time(tile, 3, 64, 128, 256, 512, ADA)
    assert time == 3 * step + 2 * _gemm.FILL + 2 * exchange
    assert _gemm._time(tile, 2, 64, 128, 256, 512, ADA) == 4 * step + _gemm.FILL
    assert [_gemm._parts(*bounds, 4) for bounds in ((0, 4), (0, 2), (2, 5), (4, 12), (3, 12), (3, 13), (5, 7))] == [
        0, 1, 2, 0, 1, 2, 1,
    ]  # fmt: skip


def test_the_time_of_a_step_is_that_of_its_bytes_where_these_take_longer():
    narrow = Tile(128, 32, 64, 4, 2)
    step = (128 + 32) * 128 / _gemm.L2_BYTES + _gemm.PAUSE
    assert _gemm._time(narrow, 1, 128, 32, 256, 512, HOPPER) == 4 * step + _gemm.FILL


def test_real_products_fill_every_card():
    for gpu, product, filled in fills(bf16_linear, meta, meta):
        assert filled >= 0.93, (gpu, product, filled)


def test_what_a_card_gets():
    for gpu, shared in ((ADA, True), (HOPPER, True), (BLACKWELL, True)):
        with recording(gpu) as launches:
            assert bf16_linear(meta(256, 4096), meta(2816, 4096)).shape == (256, 2816)
        (launch,) = launches
        assert launch.grid == (gpu.processors,) and launch.constants["SHARED"] == shared
        assert launch.cost.flops == 2 * 256 * 2816 * 4096
        assert launch.cost.bytes == 2 * (2816 * 4096 + 256 * 4096 + 256 * 2816)
    with recording(ADA) as launches:
        bf16_linear(meta(256, 2816), meta(8192, 2816))
    assert launches[0].grid == (128,) and not launches[0].constants["SHARED"]


def test_wrong_shapes_are_refused():
    x, w = torch.zeros(3, 32), torch.zeros(6, 32)
    for wrong in ((x, w[:, :16]), (x[0], w), (x, w.bfloat16()), (x.T, torch.zeros(6, 3)), (x, torch.zeros(32, 6).T)):
        with pytest.raises(ValueError, match="bf16_linear: x"):
            bf16_linear(*wrong)
    with pytest.raises(ValueError, match=r"bf16_gated: x \(3, 32\), w \(5, 32\)"):
        bf16_gated(x, w[:5])
    with pytest.raises(ValueError, match=r"_gemm: 4097 tiles of .*, 1 steps each, between 5 programs"):
        bf16_linear(torch.zeros(16 * 4097, 16), torch.zeros(16, 16), Tile(16, 16, 16, 4, 2), 5)
