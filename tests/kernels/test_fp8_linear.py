"""kernels/fp8_linear.py: products of codes, and where the scales go."""

import pytest
import torch
from dgemma_local.kernels import _gemm
from dgemma_local.kernels._launch import ADA, BLACKWELL, HOPPER, recording
from dgemma_local.kernels.fp8_linear import fp8_gated, fp8_gated_twin, fp8_linear, fp8_linear_twin
from dgemma_local.kernels.rows import quantise_rows_twin
from products import (
    REAL,
    SHAPES,
    SMALL,
    assert_only_who_counts_last_writes,
    assert_right,
    backwards,
    fills,
    fp8_weights,
    from_the_middle,
    gated,
    in_order,
    rows,
)

from dgemma_local.quant import Fp8


def activations(T, K):
    """Each row of its own scale."""
    return quantise_rows_twin(rows(T, K, torch.float32) * torch.linspace(0.2, 4.0, T)[:, None])


def exact(x, w):
    return (x.codes.double() @ w.codes.double().T) * x.scale.double() * w.scale.double().T


@pytest.fixture(params=["plain", "block-scaled"])
def form(request, monkeypatch):
    """sm_89 and sm_90 multiply codes; sm_120 codes under scales of 1."""
    if request.param == "block-scaled":
        monkeypatch.setattr(_gemm, "gpu_of", lambda x: BLACKWELL)


@pytest.mark.parametrize(("tile", "programs"), [(None, None), (SMALL, None), (SMALL, 7)])
@pytest.mark.parametrize("shape", SHAPES)
def test_odd_shapes(shape, tile, programs, form):
    T, N, K = shape
    x = activations(T, K)
    for dtype, scale in (
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
    ):
        w = fp8_weights(N, K, scale)
        assert_right(fp8_linear(x, w, dtype, tile, programs), fp8_linear_twin(x, w, dtype), exact(x, w))
        assert_right(fp8_gated(x, w, dtype, tile, programs), fp8_gated_twin(x, w, dtype), gated(exact(x, w)))


def test_a_real_depth_between_any_number_of_programs(form):
    T, N, K = REAL
    x, w = activations(T, K), fp8_weights(N, K)
    for programs in (1, 2, 3, 34):  # two tiles of 17 steps
        assert_right(fp8_linear(x, w, programs=programs), fp8_linear_twin(x, w), exact(x, w))
    assert_right(fp8_gated(x, w, programs=3), fp8_gated_twin(x, w), gated(exact(x, w)))


def test_each_row_and_each_column_has_its_own_scale():
    """Codes of 1 everywhere: what comes out is K · sx · sw, a power of two each."""
    x = Fp8(torch.ones(40, 32).to(torch.float8_e4m3fn), torch.exp2(torch.arange(40.0) - 20)[:, None])
    w = Fp8(torch.ones(24, 32).to(torch.float8_e4m3fn), torch.exp2(torch.arange(24.0) - 12)[:, None])
    assert torch.equal(fp8_linear(x, w, torch.float32), 32 * x.scale * w.scale.T)


def test_every_code_is_multiplied():
    """One code a column: a product with itself on the diagonal, for each finite code; saturated ones too."""
    codes = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8).view(torch.float8_e4m3fn)
    x = Fp8(torch.diag(codes.float()).to(torch.float8_e4m3fn), torch.ones(254, 1))
    one = Fp8(torch.eye(254).to(torch.float8_e4m3fn), torch.ones(254, 1))
    x, one = (
        Fp8(torch.nn.functional.pad(m.codes.view(torch.uint8), (0, 2)).view(m.codes.dtype), m.scale) for m in (x, one)
    )
    assert torch.equal(fp8_linear(x, one, torch.float32).diag(), codes.float())


@pytest.mark.parametrize("order", [backwards, from_the_middle])
def test_the_order_in_which_programs_finish_changes_no_bit(monkeypatch, order):
    x, w = activations(70, 1024), fp8_weights(96, 1024)
    forwards = [fp8_linear(x, w, torch.float32, SMALL, p) for p in (4, 14, 50)]
    in_order(monkeypatch, order)
    for programs, one in zip((4, 14, 50), forwards, strict=True):
        assert torch.equal(fp8_linear(x, w, torch.float32, SMALL, programs), one)


def test_only_who_counts_last_writes(monkeypatch):
    x, w = activations(32, 256), fp8_weights(64, 256)
    assert_only_who_counts_last_writes(monkeypatch, lambda: fp8_linear(x, w, torch.float32, SMALL, 3))


def meta_rows(T, K):
    return Fp8(torch.empty(T, K, dtype=torch.float8_e4m3fn, device="meta"), torch.empty(T, 1, device="meta"))


def test_real_products_fill_every_card():
    for gpu, product, filled in fills(fp8_linear, meta_rows, lambda *shape: Fp8.empty(shape, device="meta")):
        assert filled >= 0.93, (gpu, product, filled)


def test_what_a_card_gets():
    for gpu, scaled in ((ADA, False), (HOPPER, False), (BLACKWELL, True)):
        with recording(gpu) as launches:
            out = fp8_gated(meta_rows(256, 2816), Fp8.empty((4224, 2816), device="meta"))
        (launch,) = launches
        assert out.shape == (256, 2112) and out.dtype == torch.bfloat16
        assert launch.constants["UNIT_SCALES"] == scaled and launch.name == "fp8_linear"
        assert launch.cost.bytes == 4224 * 2816 + 2 * 4224 + 256 * 2816 + 4 * 256 + 2 * 256 * 2112


def test_wrong_shapes_are_refused():
    x, w = activations(3, 32), fp8_weights(6, 32)
    with pytest.raises(ValueError, match=r"fp8_linear: x \(3, 32\), w \(6, 16\)"):
        fp8_linear(x, fp8_weights(6, 16))
    with pytest.raises(ValueError, match=r"fp8_gated: x \(3, 32\), w \(5, 32\)"):
        fp8_gated(x, w.rows(slice(0, 5)))
    with pytest.raises(ValueError, match="fp32, contiguous"):
        fp8_linear(Fp8(x.codes, x.scale.bfloat16()), w)
    with pytest.raises(ValueError, match="contiguous"):
        fp8_linear(x, Fp8(torch.zeros(32, 6, dtype=torch.float8_e4m3fn).T, w.scale))
