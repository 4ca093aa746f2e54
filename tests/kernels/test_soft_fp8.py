"""The second product in FP8: the embedding turned at load, runs of ids, splits, chunks, and what four bits cost."""

import pytest
import torch
from dgemma_local.kernels import soft_fp8 as under_test
from dgemma_local.kernels._launch import ADA, BLACKWELL, HOPPER, Gpu, Tile, recording
from dgemma_local.kernels.soft_fp8 import MOST_SHIFT, Across, soft_fp8_twin, transpose_codes, weigh_codes
from torch import Tensor

from dgemma_local.quant import E4M3_MAX, Fp8, quantise_fp8

SMALL = Tile(16, 32, 32, 4, 2)
E4M3, FP32 = torch.float8_e4m3fn, torch.float32


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def embedding(V: int, D: int, dtype: torch.dtype = torch.bfloat16, spread: float = 1.0) -> Fp8:
    """Rows whose sizes differ by e^spread."""
    return quantise_fp8((normal(V, D, seed=2) * (spread * normal(V, 1, seed=3)).exp()).to(dtype))


def decoded(across: Across) -> Tensor:
    """[V, D] fp64."""
    V = len(across.factor)
    return across.codes[:, :V].double().T * across.factor.double()[:, None] * across.unit.double()


def codes(T: int, ids: int) -> Tensor:
    return (normal(T, ids, seed=1).abs() * 100).clamp(max=E4M3_MAX).to(E4M3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP32])
@pytest.mark.parametrize(("V", "D"), [(1, 8), (37, 48), (64, 33)])
def test_turned_codes(V: int, D: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same values but for the last bits of codes that lie far under a row's largest; the scale's own bits."""
    monkeypatch.setattr(under_test, "BLOCK_IDS", 16)
    E = embedding(V, D, dtype)
    across = transpose_codes(E)
    assert across.codes.shape == (D, -(-V // 16) * 16)
    assert not across.codes[:, V:].view(torch.uint8).any()
    assert (across.factor.dtype, across.unit.dtype) == (dtype, FP32)
    assert across.factor.min() > 224
    assert across.factor.max() <= 448
    assert across.nbytes == across.codes.numel() + V * dtype.itemsize + 4
    shift = torch.log2(across.factor.double() * across.unit.double() / E.scale.flatten().double())
    assert torch.equal(shift, shift.round().clamp(0, MOST_SHIFT))
    assert shift.min() == 0
    quantum = 2.0**-10 * across.factor.double()[:, None] * across.unit.double()
    assert ((decoded(across) - E.decode(FP32).double()).abs() <= quantum).all()


def test_scales_far_apart() -> None:
    """Rows beyond MOST_SHIFT keep their bits, and a smaller factor; a row of zeros has no say in the unit."""
    E = Fp8(torch.full((4, 16), E4M3_MAX).to(E4M3), torch.tensor([[2.0**-3], [1.5 * 2**-8], [2.0**-15], [2.0**9]]))
    E.codes[3] = 0
    across = transpose_codes(E)
    assert across.factor.tolist() == [256, 384, 16, 0]
    assert torch.equal(decoded(across)[:3], E.decode(FP32).double()[:3])
    assert float(across.unit) == 2**-11


def test_meta() -> None:
    across = transpose_codes(Fp8.empty((1000, 48), device="meta"))
    assert (across.codes.shape, across.factor.shape, across.unit.shape) == ((48, 1008), (1000,), (1,))


@pytest.mark.parametrize("gpu", [ADA, BLACKWELL])
@pytest.mark.parametrize(
    ("T", "V", "D", "begin", "end", "splits"), [(1, 9, 16, 0, 9, 1), (20, 300, 80, 64, 299, 3), (5, 64, 33, 0, 64, 4)]
)
def test_runs_of_ids_in_splits(
    T: int, V: int, D: int, begin: int, end: int, splits: int, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "gpu_of", lambda _: gpu)
    p, across = codes(T, end - begin + 2), transpose_codes(embedding(V, D))
    sums = torch.empty(splits, T, D)
    weigh_codes(p, across, sums, torch.zeros(T, 1), begin, end, 0, tile=SMALL)
    want = p[:, : end - begin].double() @ across.codes[:, begin:end].double().T
    torch.testing.assert_close(sums.sum(0).double(), want, rtol=1e-5, atol=1e-6 * float(want.abs().max()))


def test_the_cards_own_tile() -> None:
    p, across, sums = codes(3, 300), transpose_codes(embedding(300, 140)), torch.empty(2, 3, 140)
    weigh_codes(p, across, sums, torch.zeros(3, 1), 0, 300, 0)
    torch.testing.assert_close(sums.sum(0), p.float() @ across.codes[:, :300].float().T, rtol=1e-5, atol=10)


def test_chunks_add_up_under_a_rising_maximum() -> None:
    """Each chunk's p are about its own maximum: what was there shrinks by e^(before - now), to nothing if far."""
    T, D = 18, 40
    p, across = codes(T, 192), transpose_codes(embedding(192, D))
    centre = torch.tensor([[0.0, 1.5, 40.0], [2.0, 2.0, 2.5], [-90.0, 90.0, 90.0]]).repeat(6, 1)
    sums = torch.empty(2, T, D)
    for chunk in range(3):
        at = slice(64 * chunk, 64 * chunk + 64)
        weigh_codes(p[:, at].contiguous(), across, sums, centre, at.start, at.stop, chunk, resident=True, tile=SMALL)
    weight = (centre - centre[:, -1:]).exp().repeat_interleave(64, 1)
    want = (weight * p.float()) @ across.codes.float().T
    torch.testing.assert_close(sums.sum(0), want, rtol=1e-5, atol=1e-6 * float(want.abs().max()))


@pytest.mark.parametrize("reference", [True, False])
def test_twin(reference: bool) -> None:
    """By chunks it is what it is whole, but for p rounded elsewhere; 4 bits of p cost a few percent, a sure id's nothing."""
    z, E = normal(6, 500, seed=7) * 4, embedding(500, 64)
    across = transpose_codes(E)
    exact = (z.to(torch.bfloat16) if reference else z).double().softmax(-1) @ E.decode(FP32).double() * 3
    for chunk in (None, 200, 500):
        soft = soft_fp8_twin(z, across, 3.0, FP32, reference, chunk)
        assert (soft.double() - exact).norm() < 0.04 * exact.norm()
    assert torch.equal(soft, soft_fp8_twin(z, across, 3.0, FP32, reference))
    z[:, 17] = 80
    sure = torch.nn.functional.normalize(soft_fp8_twin(z, across, 3.0, FP32, reference))
    torch.testing.assert_close(sure, torch.nn.functional.normalize(decoded(across)[17:18]).float().expand(6, -1))


def test_what_falls_to_nothing() -> None:
    """Of one id and 9,999 others equally far behind, the others are rounded to 2^-17 of it, or below half of that to 0."""
    E = Fp8(torch.full((10_000, 16), 1.0).to(E4M3), torch.ones(10_000, 1))
    across = transpose_codes(E)  # every factor is 256, E4M3's smallest 2^-9
    for power, kept in ((-17.9, 2.0**-17), (-18.1, 0.0)):
        z = torch.full((1, 10_000), power).mul_(0.6931472)
        z[:, 3] = 0.0
        soft = soft_fp8_twin(z, across, 1.0, FP32, False)
        want = (1 + 9_999 * kept) / (1 + 9_999 * 2.0**power)
        torch.testing.assert_close(soft, torch.full((1, 16), want), rtol=1e-5, atol=0)


def test_launches() -> None:
    meta = {"device": "meta"}
    p, sums = torch.empty(256, 4096, dtype=E4M3, **meta), torch.empty(3, 256, 2816, **meta)
    across = transpose_codes(Fp8.empty((4096, 2816), device="meta"))
    for gpu, scaled in ((ADA, False), (HOPPER, False), (BLACKWELL, True)):
        with recording(gpu) as launches:
            for resident in (False, True):
                weigh_codes(p, across, sums, torch.empty(256, 1, **meta), 0, 4096, 0, resident)
        first, second = launches
        assert (first.constants["UNIT_SCALES"], first.cost.rate) == (scaled, "fp8")
        assert first.cost.flops == 2 * 256 * 4096 * 2816
        assert first.cost.bytes == p.nbytes + across.codes.nbytes + sums.nbytes
        assert second.cost.bytes == across.codes.nbytes


def test_errors() -> None:
    p, across = codes(4, 64), transpose_codes(embedding(64, 32))
    sums, centre = torch.empty(2, 4, 32), torch.zeros(4, 1)
    for bad in (
        lambda: weigh_codes(p, across, sums[:, :3], centre, 0, 64, 0, tile=SMALL),
        lambda: weigh_codes(p, across, sums, centre[:3], 0, 64, 0, tile=SMALL),
        lambda: weigh_codes(p, across, sums, centre, 0, 65, 0, tile=SMALL),
        lambda: weigh_codes(p[:, :63], across, sums, centre, 0, 64, 0, tile=SMALL),
        lambda: weigh_codes(p.float(), across, sums, centre, 0, 64, 0, tile=SMALL),
    ):
        with pytest.raises(ValueError, match="weigh_codes: p"):
            bad()
