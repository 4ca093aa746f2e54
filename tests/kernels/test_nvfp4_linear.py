"""kernels/nvfp4_linear.py: decoding inside the product, parts and their global scales."""

import pytest
import torch
from dgemma_local.kernels._launch import HOPPER, recording
from dgemma_local.kernels.nvfp4_linear import nvfp4_gated, nvfp4_gated_twin, nvfp4_linear, nvfp4_linear_twin
from products import (
    DTYPES,
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

from dgemma_local.quant import Nvfp4, linear


def exact(x, w):
    """fp64 all the way; the global scale as it is, fp32."""
    code = Nvfp4(w.packed, w.scale, torch.ones_like(w.global_scale), w.input_scale, w.heights, True)
    whole = w.global_scale.double().repeat_interleave(torch.tensor(w.heights))
    return x.double() @ code.decode(torch.float32).double().T * (1 / whole if w.divides else whole)


@pytest.mark.parametrize(("tile", "programs"), [(None, None), (SMALL, None), (SMALL, 7)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_shapes(dtype, shape, tile, programs):
    T, N, K = shape
    x, w = rows(T, K, dtype), nvfp4_weights(N, K)
    assert_right(nvfp4_linear(x, w, tile, programs), nvfp4_linear_twin(x, w), exact(x, w))
    assert_right(nvfp4_gated(x, w, tile, programs), nvfp4_gated_twin(x, w), gated(exact(x, w)))


@pytest.mark.parametrize("divides", [True, False])
@pytest.mark.parametrize("heights", [(64, 32, 24), (60, 60), (1, 118, 1)])
def test_parts_have_their_own_global_scales_and_a_sense(heights, divides):
    w = nvfp4_weights(120, 80, heights, divides)
    x = rows(20, 80, torch.bfloat16)
    assert_right(nvfp4_linear(x, w), nvfp4_linear_twin(x, w), exact(x, w))
    if len(heights) == 2:
        assert_right(nvfp4_gated(x, w), nvfp4_gated_twin(x, w), gated(exact(x, w)))


def test_a_real_depth_between_any_number_of_programs():
    T, N, K = REAL
    x, w = rows(T, K, torch.bfloat16), nvfp4_weights(N, K, (N // 2, N // 2))
    for programs in (1, 2, 3, 66):  # two tiles of 33 steps
        assert_right(nvfp4_linear(x, w, programs=programs), nvfp4_linear_twin(x, w), exact(x, w))
    assert_right(nvfp4_gated(x, w, programs=3), nvfp4_gated_twin(x, w), gated(exact(x, w)))


def test_every_byte_meets_its_own_column():
    """Unit vectors pick the weights out one by one, exactly: a swapped nibble or a shifted scale is another number."""
    w = nvfp4_weights(130, 144)
    w.global_scale.fill_(1.0)
    assert torch.equal(nvfp4_linear(torch.eye(144, dtype=torch.bfloat16), w), w.decode(torch.bfloat16).T)


def test_nearer_to_fp64_than_weights_rounded_to_bf16():
    x, w = rows(64, 512, torch.bfloat16), nvfp4_weights(128, 512)
    truth = exact(x, w)
    assert (nvfp4_linear(x, w).double() - truth).norm() < (linear(x, w).double() - truth).norm()


@pytest.mark.parametrize("order", [backwards, from_the_middle])
def test_the_order_in_which_programs_finish_changes_no_bit(monkeypatch, order):
    x, w = rows(40, 512, torch.float32), nvfp4_weights(96, 512)
    forwards = [nvfp4_linear(x, w, SMALL, p) for p in (4, 14, 40)]
    in_order(monkeypatch, order)
    for programs, one in zip((4, 14, 40), forwards, strict=True):
        assert torch.equal(nvfp4_linear(x, w, SMALL, programs), one)


def test_only_who_counts_last_writes(monkeypatch):
    x, w = rows(32, 256, torch.bfloat16), nvfp4_weights(64, 256)
    assert_only_who_counts_last_writes(monkeypatch, lambda: nvfp4_linear(x, w, SMALL, 3))


def test_real_products_fill_every_card():
    def x(*shape):
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    for gpu, product, filled in fills(nvfp4_linear, x, lambda N, K: Nvfp4.empty((N, K), device="meta")):
        assert filled >= 0.93, (gpu, product, filled)


def test_what_a_card_gets():
    with recording(HOPPER) as launches:
        x = torch.empty(256, 2816, dtype=torch.bfloat16, device="meta")
        assert nvfp4_gated(x, Nvfp4.empty((4224, 2816), (2112, 2112), device="meta")).shape == (256, 2112)
    (launch,) = launches
    assert launch.constants["END_0"] == 2112 and launch.constants["DIVIDES"]
    assert launch.cost.bytes == 4224 * 2816 * 9 // 16 + 2 * 256 * (2816 + 2112)
    assert launch.cost.flops == 2 * 256 * 4224 * 2816


def test_wrong_shapes_are_refused():
    x, w = torch.zeros(3, 32), nvfp4_weights(8, 32)
    with pytest.raises(ValueError, match=r"nvfp4_linear: x \(3, 48\), w \(8, 32\)"):
        nvfp4_linear(torch.zeros(3, 48), w)
    with pytest.raises(ValueError, match=r"nvfp4_gated: x \(3, 32\), w \(7, 32\)"):
        nvfp4_gated(x, nvfp4_weights(7, 32))
    with pytest.raises(ValueError, match="parts of"):
        nvfp4_linear(x, nvfp4_weights(8, 32, (2, 2, 2, 2)))
    with pytest.raises(ValueError, match="contiguous"):
        nvfp4_linear(torch.zeros(32, 3).T, w)
