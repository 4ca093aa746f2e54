"""Weights times embedding: runs of ids, splits, chunks that add to what came before; the choice of splits."""

import pytest
import torch
from dgemma_local.kernels._launch import ADA, BLACKWELL, HOPPER, Tile
from dgemma_local.kernels.draw import Parts
from dgemma_local.kernels.soft import combine, probabilities, soft_twin, splits_for, weigh
from near import assert_near
from torch import Tensor

from dgemma_local.quant import quantise_fp8

SMALL = Tile(16, 32, 32, 4, 2)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("T", "V", "D", "begin", "end", "splits"), [(1, 9, 16, 0, 9, 1), (20, 300, 80, 64, 299, 3), (5, 64, 33, 0, 64, 4)]
)
def test_runs_of_ids_in_splits(T: int, V: int, D: int, begin: int, end: int, splits: int, packed: bool) -> None:
    p, E = normal(T, end - begin + 2, seed=1).abs(), normal(V, D, seed=2)
    weights = quantise_fp8(E) if packed else E
    sums = torch.empty(splits, T, D)
    weigh(p, weights, sums, torch.zeros(T, 1), begin, end, 0, tile=SMALL)
    rows = weights.codes if packed else E
    torch.testing.assert_close(sums.sum(0), p[:, : end - begin].float() @ rows[begin:end].float(), rtol=1e-5, atol=1e-3)
    ones = torch.ones(T)
    out = combine(sums, ones, 1.5, torch.bfloat16, reference=True)
    assert_near(out, sums.sum(0).to(torch.bfloat16) * 1.5)
    assert_near(combine(sums, ones * 4, 2.0, torch.float32, reference=False), sums.sum(0) / 2, 4, 0.0)
    units = torch.tensor([2.0**-5])
    assert_near(combine(sums, ones * 4, 2.0, torch.float32, reference=False, unit=units), sums.sum(0) / 64, 4, 0.0)


def test_chunks_add_up_under_a_rising_maximum() -> None:
    """Each chunk's weights are about its own maximum: what was there shrinks by e^(before - now), to nothing if far."""
    T, D = 18, 40
    p, E = normal(T, 192, seed=3).abs(), normal(192, D, seed=4)
    centre = torch.tensor([[0.0, 1.5, 40.0], [2.0, 2.0, 2.5], [-90.0, 90.0, 90.0]]).repeat(6, 1)
    sums = torch.empty(2, T, D)
    for chunk in range(3):
        at = slice(64 * chunk, 64 * chunk + 64)
        weigh(p[:, at].contiguous(), E, sums, centre, at.start, at.stop, chunk, resident=True, tile=SMALL)
    weight = (centre - centre[:, -1:]).exp().repeat_interleave(64, 1)
    torch.testing.assert_close(sums.sum(0), (weight * p.float()) @ E.float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_probabilities(packed: bool) -> None:
    """Softmax of what bf16 leaves of z, rounded: the reference's, bit for bit but for a step here and there."""
    raw, t = normal(9, 700, seed=5) * 20, torch.tensor([0.6])
    z = (raw.float() / 30).tanh() * 30 / t
    rounded = z.to(torch.bfloat16)
    parts = Parts.empty(9, 1, 1, 1, raw.device)
    parts.centre.copy_(z.amax(-1, keepdim=True))
    total = (rounded.float() - rounded.float().amax(-1, keepdim=True)).exp().sum(-1)
    scale = torch.rand(700, 1, generator=torch.Generator().manual_seed(6)).to(torch.bfloat16) if packed else None
    probabilities(raw, 700, 30.0, t, parts, total, scale)
    want = rounded.softmax(-1, dtype=torch.float32).to(torch.bfloat16)
    assert_near(raw, want if scale is None else want * scale.mT, 2, 0.99)


@pytest.mark.parametrize("reference", [True, False])
def test_twin_is_blind_to_its_own_blocks(reference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    z, E = normal(4, 100, seed=7, dtype=torch.float32) * 4, normal(100, 24, seed=8)
    whole = soft_twin(z, quantise_fp8(E), 3.0, torch.bfloat16, reference)
    monkeypatch.setattr("dgemma_local.kernels.soft.TWIN_IDS", 7)
    assert_near(soft_twin(z, quantise_fp8(E), 3.0, torch.bfloat16, reference), whole)


def test_splits_leave_few_processors_idle() -> None:
    assert splits_for(HOPPER, 44, 8192, 64, 0.02) == 3  # 132 programs for 132 processors
    for gpu in (ADA, HOPPER, BLACKWELL):
        for programs in (22, 44, 88):
            splits = splits_for(gpu, programs, 262_144, 64, 0.003)
            waves = -(-programs * splits // gpu.processors)
            assert programs * splits / (waves * gpu.processors) > 0.85
    assert splits_for(ADA, 1, 64, 64, 0.003) == 1  # never more than there are steps


def test_errors() -> None:
    p, E, sums, centre = normal(4, 64, seed=0), normal(64, 32, seed=0), torch.empty(2, 4, 32), torch.zeros(4, 1)
    for bad in (
        lambda: weigh(p, E, sums[:, :3], centre, 0, 64, 0, tile=SMALL),
        lambda: weigh(p, E, sums, centre[:3], 0, 64, 0, tile=SMALL),
        lambda: weigh(p, E, sums, centre, 0, 65, 0, tile=SMALL),
        lambda: weigh(p[:, :63], E, sums, centre, 0, 64, 0, tile=SMALL),
    ):
        with pytest.raises(ValueError, match="weigh: p"):
            bad()
    parts = Parts.empty(4, 2, 1, 2, p.device)
    with pytest.raises(ValueError, match="probabilities: raw"):
        probabilities(p, 64, 30.0, torch.ones(1), parts, torch.ones(4), None)
