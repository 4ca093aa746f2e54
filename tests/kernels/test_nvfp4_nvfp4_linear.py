"""kernels/nvfp4_nvfp4_linear.py: both sides packed, each under its own scales."""

import pytest
import torch
from dgemma_local.kernels._launch import BLACKWELL, recording
from dgemma_local.kernels.nvfp4_nvfp4_linear import (
    nvfp4_nvfp4_gated,
    nvfp4_nvfp4_gated_twin,
    nvfp4_nvfp4_linear,
    nvfp4_nvfp4_linear_twin,
)
from dgemma_local.kernels.rows import quantise_rows_nvfp4_twin
from products import (
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
    nvfp4_weights,
    rows,
)

from dgemma_local.quant import Nvfp4


def activations(T, K):
    return quantise_rows_nvfp4_twin(rows(T, K, torch.bfloat16), torch.tensor([700.0]))


def codes(w):
    return Nvfp4(w.packed, w.scale, torch.ones_like(w.global_scale), w.input_scale, w.heights, True).decode(
        torch.float32
    )


def exact(x, w):
    whole = w.global_scale.double().repeat_interleave(torch.tensor(w.heights))
    product = codes(x).double() @ codes(w).double().T / x.global_scale.double()
    return product * (1 / whole if w.divides else whole)


@pytest.mark.parametrize(("tile", "programs"), [(None, None), (SMALL, None), (SMALL, 7)])
@pytest.mark.parametrize("shape", SHAPES)
def test_odd_shapes(shape, tile, programs):
    T, N, K = shape
    x, w = activations(T, K), nvfp4_weights(N, K)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert_right(nvfp4_nvfp4_linear(x, w, dtype, tile, programs), nvfp4_nvfp4_linear_twin(x, w, dtype), exact(x, w))
        assert_right(
            nvfp4_nvfp4_gated(x, w, dtype, tile, programs), nvfp4_nvfp4_gated_twin(x, w, dtype), gated(exact(x, w))
        )


@pytest.mark.parametrize("divides", [True, False])
@pytest.mark.parametrize("heights", [(64, 32, 24), (60, 60)])
def test_parts_have_their_own_global_scales_and_a_sense(heights, divides):
    x, w = activations(20, 80), nvfp4_weights(120, 80, heights, divides)
    assert_right(nvfp4_nvfp4_linear(x, w), nvfp4_nvfp4_linear_twin(x, w), exact(x, w))


def test_a_real_depth_between_any_number_of_programs():
    T, N, K = REAL
    x, w = activations(T, K), nvfp4_weights(N, K, (N // 2, N // 2))
    for programs in (1, 2, 3, 34):  # two tiles of 17 steps
        assert_right(nvfp4_nvfp4_linear(x, w, programs=programs), nvfp4_nvfp4_linear_twin(x, w), exact(x, w))
    assert_right(nvfp4_nvfp4_gated(x, w, programs=3), nvfp4_nvfp4_gated_twin(x, w), gated(exact(x, w)))


def test_every_byte_meets_its_own_column_on_both_sides():
    """Unit vectors on the one side pick the codes of the other out, exactly."""
    unit = quantise_rows_nvfp4_twin(torch.eye(144), torch.tensor([6.0]))  # codes 6 under scales 1: 6 / 6
    w = nvfp4_weights(130, 144)
    w.global_scale.fill_(1.0)
    assert torch.equal(nvfp4_nvfp4_linear(unit, w, torch.float32), w.decode(torch.float32).T)
    assert torch.equal(nvfp4_nvfp4_linear(w, unit, torch.float32), w.decode(torch.float32))


@pytest.mark.parametrize("order", [backwards, from_the_middle])
def test_the_order_in_which_programs_finish_changes_no_bit(monkeypatch, order):
    x, w = activations(40, 512), nvfp4_weights(96, 512)
    forwards = [nvfp4_nvfp4_linear(x, w, torch.float32, SMALL, p) for p in (4, 14, 40)]
    in_order(monkeypatch, order)
    for programs, one in zip((4, 14, 40), forwards, strict=True):
        assert torch.equal(nvfp4_nvfp4_linear(x, w, torch.float32, SMALL, programs), one)


def test_only_who_counts_last_writes(monkeypatch):
    x, w = activations(32, 256), nvfp4_weights(64, 256)
    assert_only_who_counts_last_writes(monkeypatch, lambda: nvfp4_nvfp4_linear(x, w, torch.float32, SMALL, 3))


def test_real_products_fill_the_card():
    def packed(*shape):
        return Nvfp4.empty(shape, device="meta")

    for gpu, product, filled in fills(nvfp4_nvfp4_linear, packed, packed, (BLACKWELL,)):
        assert filled >= 0.93, (gpu, product, filled)


def test_what_a_card_gets():
    with recording(BLACKWELL) as launches:
        x = Nvfp4.empty((256, 2816), device="meta")
        out = nvfp4_nvfp4_gated(x, Nvfp4.empty((4224, 2816), (2112, 2112), device="meta"))
    (launch,) = launches
    assert out.shape == (256, 2112) and launch.cost.rate == "fp4"
    assert launch.cost.bytes == (4224 + 256) * 2816 * 9 // 16 + 2 * 256 * 2112


def test_wrong_shapes_are_refused():
    x, w = activations(3, 32), nvfp4_weights(8, 32)
    with pytest.raises(ValueError, match=r"nvfp4_nvfp4_linear: x \(3, 48\), w \(8, 32\)"):
        nvfp4_nvfp4_linear(activations(3, 48), w)
    with pytest.raises(ValueError, match="x of 2 parts"):
        nvfp4_nvfp4_linear(nvfp4_weights(8, 32, (4, 4)), w)
    with pytest.raises(ValueError, match="divides False"):
        nvfp4_nvfp4_linear(nvfp4_weights(8, 32, divides=False), w)
    with pytest.raises(ValueError, match="contiguous"):
        nvfp4_nvfp4_linear(x, Nvfp4(w.packed.T.contiguous().T, w.scale, w.global_scale, w.input_scale, (8,), True))
