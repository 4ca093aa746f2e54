"""kernels/rows.py against its twins: codes and scales equal in every bit."""

import pytest
import torch
from dgemma_local.kernels import rows
from dgemma_local.kernels._launch import HOPPER, recording

from dgemma_local.quant import quantise_nvfp4

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def activations(T, D, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = torch.logspace(-3, 2, T)[:, None] if dtype != torch.float16 else torch.logspace(-1, 2, T)[:, None]
    return (torch.randn(T, D, generator=generator) * size).to(dtype)


def assert_same(ours, twin):
    for name in ("codes", "packed", "scale"):
        if hasattr(ours, name):
            a, b = getattr(ours, name), getattr(twin, name)
            assert a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


@pytest.mark.parametrize("shape", [(1, 16), (3, 100), (2, 2112), (5, 2816), (1, 8192)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_rows_equal_the_twin(dtype, shape):
    x = activations(*shape, dtype)
    assert_same(rows.quantise_rows(x), rows.quantise_rows_twin(x))


@pytest.mark.parametrize("shape", [(1, 16), (3, 112), (2, 2112), (3, 2816)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nvfp4_rows_equal_the_twin(dtype, shape):
    x = activations(*shape, dtype)
    for whole in (3.0, 448 * 6 / float(x.abs().max()), 1e5):  # the last: scales saturate
        whole = torch.tensor([whole])
        assert_same(rows.quantise_rows_nvfp4(x, whole), rows.quantise_rows_nvfp4_twin(x, whole))


def test_a_row_of_zeros_has_scale_1():
    quantised = rows.quantise_rows(torch.zeros(2, 48, dtype=torch.bfloat16))
    assert torch.equal(quantised.scale, torch.ones(2, 1)) and not quantised.codes.view(torch.uint8).any()


def test_the_largest_of_a_row_is_the_largest_code():
    x = activations(4, 64, torch.float32)
    codes = rows.quantise_rows(x).codes.float()
    assert torch.equal(codes.abs().amax(-1), torch.full((4,), 448.0))
    assert torch.equal(codes.sign().gather(1, x.abs().argmax(1, True)), x.sign().gather(1, x.abs().argmax(1, True)))


def test_a_group_of_zeros_has_a_scale_and_no_codes():
    x = torch.zeros(1, 32)
    x[0, 16:] = 1.0
    quantised = rows.quantise_rows_nvfp4(x, torch.tensor([448.0]))
    assert quantised.scale.float()[0].tolist()[0] == 0.125 and not quantised.packed[0, :8].any()


def test_ties_go_to_the_even_code():
    """Under scale 1: x / 1 lies on the middle between two codes."""
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x = torch.cat([middles, torch.tensor([6.0]), -middles, torch.tensor([-0.0])])[None]
    quantised = rows.quantise_rows_nvfp4(x, torch.ones(1))
    assert quantised.scale.float().item() == 1.0
    assert quantised.decode(torch.float32)[0].tolist()[:8] == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert_same(quantised, rows.quantise_rows_nvfp4_twin(x, torch.ones(1)))


def test_one_row_with_its_own_global_is_what_the_weights_would_be():
    x = activations(1, 256, torch.float32)
    weight = quantise_nvfp4(x)
    assert_same(rows.quantise_rows_nvfp4(x, weight.global_scale), weight)


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan])
@pytest.mark.parametrize("place", [0, 17, 47])
def test_nan_stays_nan_in_its_group_alone(bad, place):
    x = activations(2, 48, torch.float32)
    good = rows.quantise_rows_nvfp4(x, torch.tensor([100.0])).decode(torch.float32)
    x[1, place] = bad
    group = torch.arange(48) // 16 == place // 16
    for form in (rows.quantise_rows_nvfp4, rows.quantise_rows_nvfp4_twin):
        decoded = form(x, torch.tensor([100.0])).decode(torch.float32)
        assert decoded[1, group].isnan().all()
        assert torch.equal(decoded[1, ~group], good[1, ~group]) and torch.equal(decoded[0], good[0])


def test_no_rows_are_no_codes():
    assert rows.quantise_rows(torch.zeros(0, 48)).codes.shape == (0, 48)
    assert rows.quantise_rows_nvfp4(torch.zeros(0, 48), torch.ones(1)).packed.shape == (0, 24)


def test_shapes_that_would_write_elsewhere_are_refused():
    with pytest.raises(ValueError, match=r"quantise_rows: x \(2, 3, 4\)"):
        rows.quantise_rows(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="contiguous"):
        rows.quantise_rows(torch.zeros(8, 4).T)
    with pytest.raises(ValueError, match=r"quantise_rows_nvfp4: x \(2, 24\)"):
        rows.quantise_rows_nvfp4(torch.zeros(2, 24), torch.ones(1))
    with pytest.raises(ValueError, match=r"global scale \(2,\)"):
        rows.quantise_rows_nvfp4(torch.zeros(2, 32), torch.ones(2))


def test_recording_needs_no_values():
    with recording(HOPPER) as launches:
        x = torch.empty(256, 2816, dtype=torch.bfloat16, device="meta")
        assert rows.quantise_rows(x).codes.shape == (256, 2816)
        assert rows.quantise_rows_nvfp4(x, torch.empty(1, device="meta")).packed.shape == (256, 1408)
    assert [launch.name for launch in launches] == ["quantise_rows", "quantise_rows_nvfp4"]
    assert [launch.cost.bytes for launch in launches] == [256 * 2816 * 3, 256 * 2816 * (2 + 9 / 16)]
