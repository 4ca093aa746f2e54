"""kernels/bf16_linear.py, and what it shares with the other linears (kernels/_gemm.py)."""

from dataclasses import replace

import pytest
import torch
from dgemma_local.kernels import _gemm
from dgemma_local.kernels._launch import ADA, BLACKWELL, HOPPER, Tile, recording
from dgemma_local.kernels.bf16_linear import TILES, bf16_gated, bf16_gated_twin, bf16_linear, bf16_linear_twin
from products import DTYPES, REAL, SHAPES, SMALL, assert_right, backwards, gated, rows, weights


def exact(x, w):
    return x.double() @ w.double().T


@pytest.mark.parametrize("tile", [None, SMALL])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_shapes(dtype, shape, tile):
    T, N, K = shape
    x, w = rows(T, K, dtype), weights(N, K, dtype)
    assert_right(bf16_linear(x, w, tile), bf16_linear_twin(x, w), exact(x, w))
    assert_right(bf16_gated(x, w, tile), bf16_gated_twin(x, w), gated(exact(x, w)))


def test_a_real_depth_in_each_number_of_splits():
    T, N, K = REAL
    x, w = rows(T, K, torch.bfloat16), weights(N, K)
    for splits in (1, 2, 3, 8):
        assert_right(bf16_linear(x, w, splits=splits), bf16_linear_twin(x, w), exact(x, w))
        assert_right(bf16_gated(x, w, splits=splits), bf16_gated_twin(x, w), gated(exact(x, w)))


def test_the_order_in_which_programs_finish_changes_no_bit(monkeypatch):
    x, w = rows(70, 1024, torch.float32), weights(96, 1024, torch.float32)
    tile = Tile(32, 32, 64, 4, 2)
    forwards = [bf16_linear(x, w, tile, splits=s) for s in (1, 3, 4)]
    backwards(monkeypatch)
    for s, one in zip((1, 3, 4), forwards, strict=True):
        assert torch.equal(bf16_linear(x, w, tile, splits=s), one)


def test_only_who_counts_last_writes(monkeypatch):
    """Without the programs of the last split nothing is written at all."""
    whole = _gemm.job

    def all_but_one(*args):
        job = whole(*args)
        return replace(job, grid=(job.grid[0], job.splits - 1))

    monkeypatch.setattr(_gemm, "job", all_but_one)
    try:
        assert bf16_linear(rows(40, 256, torch.bfloat16), weights(48, 256), SMALL, splits=3).isnan().all()
    finally:
        _gemm.counters(torch.device("cpu")).zero_()


def test_counters_are_left_at_0():
    bf16_linear(rows(70, 256, torch.bfloat16), weights(96, 256), SMALL, splits=3)
    assert not _gemm.counters(torch.device("cpu")).any()


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
def test_a_plan_leaves_no_split_empty_and_is_never_slower_than_none(gpu, T):
    for N, K in ((8192, 2816), (9216, 2816), (2816, 4096), (2816, 8192), (4224, 2816), (2816, 2112), (64, 64)):
        tile, splits = _gemm.plan(TILES[gpu.capability], T, N, K, gpu)
        steps = -(-K // tile.k)
        assert (splits - 1) * -(-steps // splits) < steps
        assert all(
            _gemm._time(tile, splits, T, N, K, gpu) <= _gemm._time(t, 1, T, N, K, gpu) for t in TILES[gpu.capability]
        )


def test_a_card_with_more_processors_gets_more_programs():
    for gpu in (ADA, HOPPER, BLACKWELL):
        with recording(gpu) as launches:
            x = torch.empty(256, 4096, dtype=torch.bfloat16, device="meta")
            assert bf16_linear(x, torch.empty(2816, 4096, dtype=torch.bfloat16, device="meta")).shape == (256, 2816)
        (launch,) = launches
        programs = launch.grid[0] * launch.grid[1]
        assert programs >= 88 and launch.cost.flops == 2 * 256 * 2816 * 4096
        assert launch.cost.bytes == 2 * (2816 * 4096 + 256 * 4096 + 256 * 2816)


def test_wrong_shapes_are_refused():
    x, w = torch.zeros(3, 32), torch.zeros(6, 32)
    for wrong in ((x, w[:, :16]), (x[0], w), (x, w.bfloat16()), (x.T, torch.zeros(6, 3)), (x, torch.zeros(32, 6).T)):
        with pytest.raises(ValueError, match="bf16_linear: x"):
            bf16_linear(*wrong)
    with pytest.raises(ValueError, match=r"bf16_gated: x \(3, 32\), w \(5, 32\)"):
        bf16_gated(x, w[:5])
    with pytest.raises(ValueError, match="counters for 4096"):
        bf16_linear(torch.zeros(16 * 4097, 16), torch.zeros(16, 16), Tile(16, 16, 16, 4, 2))
