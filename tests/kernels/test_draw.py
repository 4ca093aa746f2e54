"""Softcap, statistics and race on logits given directly, against the sampler's own functions."""

import pytest
import torch
from dgemma_local.kernels._launch import Tile
from dgemma_local.kernels._philox import Key
from dgemma_local.kernels._triton import tl, triton
from dgemma_local.kernels.draw import Drawn, Parts, draw, draw_twin, scaled, scaled_twin, settle
from torch import Tensor

from dgemma_local import sampler
from dgemma_local.noise import FARTHEST, PhiloxNoise, exponential_race

CAP = 30.0
TILE = Tile(16, 64, 256, 4, 1)


@triton.jit
def _scale(RAW, OUT, TEMPERATURE, CAP: tl.constexpr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(OUT + at, scaled(tl.load(RAW + at), tl.div_rn(1.0, tl.load(TEMPERATURE)), CAP))


def test_softcap_and_temperature() -> None:
    """4.5 ulp of z against fp64, over all that bf16 logits can be; ±30 / t exactly where tanh is ±1."""
    raw = torch.arange(1 << 16).to(torch.int32).short().view(torch.bfloat16).float()
    raw = torch.where(raw.isfinite(), raw, 0.0)
    ours = torch.empty_like(raw)
    _scale[(1,)](raw, ours, torch.tensor([0.4]), CAP=CAP, N=1 << 16)
    exact = (raw.double() / CAP).tanh() * CAP / float(torch.tensor(0.4))
    ulp = torch.exp2(exact.abs().clamp_min(2.0**-120).log2().floor() - 23)
    assert float(((ours.double() - exact).abs() / ulp).max()) < 4.5
    assert torch.equal(ours[raw.abs() > 300], raw[raw.abs() > 300].sign() * torch.tensor(CAP) * (1 / torch.tensor(0.4)))


def key(seed: int = 77) -> Key:
    return Key.of(seed, 1, 9, torch.tensor([3], dtype=torch.int32))


def noise(seed: int, T: int, V: int) -> PhiloxNoise:
    return PhiloxNoise(seed, T, V, torch.device("cpu"), 1)


def run(raw: Tensor, t: float = 0.6, chunk: int | None = None, seed: int = 77, tile: Tile = TILE) -> Drawn:
    (T, V), chunk = raw.shape, chunk or raw.shape[1]
    chunks, per_chunk = -(-V // chunk), -(-chunk // tile.k)
    parts = Parts.empty(T, chunks, per_chunk, chunks * per_chunk, raw.device)
    parts.statistic.zero_(), parts.id.zero_()
    parts.statistic[0], parts.statistic[3] = -torch.inf, torch.inf  # tiles that a short last chunk has not
    for i in range(chunks):
        part = raw[:, i * chunk : (i + 1) * chunk].contiguous()
        peaks = torch.stack([block.float().amax(-1) for block in part.split(128, -1)], -1)
        temperature = torch.tensor([t])
        end = i * chunk + part.shape[1]
        draw(part, peaks, None, None, CAP, temperature, key(seed), parts, i * chunk, end, i, chunks == 1, tile)
    return settle(parts, V, reference=False)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("T", "V", "chunk"), [(1, 1, None), (12, 700, None), (5, 700, 128), (20, 512, 256)])
def test_statistics_and_race(T: int, V: int, chunk: int | None, dtype: torch.dtype) -> None:
    raw = (torch.randn(T, V, generator=torch.Generator().manual_seed(V)) * 8).to(dtype)
    ours = run(raw, chunk=chunk)
    z = scaled_twin(raw, CAP, torch.tensor([0.6]))
    twin = draw_twin(z, key())
    for a, b in ((ours.draft, twin.draft), (ours.sampled, twin.sampled)):
        assert torch.equal(a, b)
    torch.testing.assert_close(ours.entropy, sampler.entropies(z), rtol=0, atol=4e-6)
    assert torch.equal(twin.entropy, sampler.entropies(z))
    variates = noise(77, T, V).variates(9, 3, torch.arange(T))
    assert torch.equal(twin.sampled, exponential_race(z, variates))


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize(("V", "scaled"), [(512, False), (700, True)])
def test_weights(V: int, scaled: bool, reference: bool) -> None:
    """e^(z - centre), of the rounded z in the reference mode, in E4M3 or the model's dtype, times the ids' factors."""
    raw = (torch.randn(12, V, generator=torch.Generator().manual_seed(V)) * 12).to(torch.bfloat16)
    factor = (torch.rand(V, generator=torch.Generator().manual_seed(1)) * 224 + 224).to(torch.bfloat16)
    peaks = torch.stack([block.float().amax(-1) for block in raw.split(128, -1)], -1)
    z = scaled_twin(raw, CAP, torch.tensor([0.6]))
    z = z.to(torch.bfloat16).float() if reference else z
    want = (z - z.amax(-1, keepdim=True)).exp() * (factor.float() if scaled else 1)
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        parts, out = Parts.empty(12, 1, 3, 3, raw.device), torch.empty(12, V + 16, dtype=dtype)
        scale, tile = factor if scaled else None, Tile(16, 64, 512, 4, 1)
        draw(raw, peaks, out, scale, CAP, torch.tensor([0.6]), key(), parts, 0, V, 0, reference, tile)
        assert out[:, V:].isnan().all()  # nothing past the end is touched
        ours, rounded = out[:, :V].double(), want.to(dtype).double()
        assert (ours == rounded).double().mean() > 0.998
        torch.testing.assert_close(ours, rounded, rtol=0.13 if dtype == torch.float8_e4m3fn else 8e-3, atol=2**-9)


def test_every_id_can_win() -> None:
    """Equal logits: the race is the smallest variate alone, and over 1,500 draws each of 160 ids wins some, none past them."""
    raw = torch.zeros(500, 160)
    wins = torch.cat([run(raw, seed=s, tile=Tile(256, 64, 256, 4, 1)).sampled for s in range(3)])
    want = torch.cat([noise(s, 500, 160).variates(9, 3, torch.arange(500)).argmin(-1) for s in range(3)])
    assert torch.equal(wins, want)
    assert torch.bincount(wins, minlength=160).min() > 0


@pytest.mark.parametrize("gap", [3.0, 8.0, 12.0, FARTHEST - 0.5, FARTHEST + 0.5])
def test_tiles_far_behind(gap: float) -> None:
    """One id leads by `gap` nats, alone in its tile; the others, together, may still win, and do as often as the twin says."""
    z = torch.full((64, 1024), -gap)
    z[:, 5] = 0.0
    raw = torch.atanh((z - 2.0) / CAP) * CAP
    ours = run(raw, t=1.0, chunk=256)
    twin = draw_twin(scaled_twin(raw, CAP, torch.ones(1)), key())
    assert torch.equal(ours.sampled, twin.sampled)
    assert ours.draft.tolist() == [5] * 64
    assert (twin.sampled != 5).any() == (gap < 10)


def test_ties() -> None:
    """The lowest id, whether the equals meet in a lane, in a tile, between tiles or between chunks."""
    raw = torch.full((5, 1024), -5.0)
    pairs = (
        [300, 700],
        [1023, 0],
        [255, 256],
        [72, 40],
        [259, 3],
    )  # a lane has ids 32 apart, and 256 apart if it goes on
    for row, at in enumerate(pairs):
        raw[row, at] = 7.0
    for chunk, tile in ((None, TILE), (256, TILE), (512, TILE), (None, Tile(16, 64, 1024, 4, 1))):
        assert run(raw, chunk=chunk, tile=tile).draft.tolist() == [min(at) for at in pairs]


def test_errors() -> None:
    raw, peaks, parts = torch.zeros(2, 300), torch.zeros(2, 3), Parts.empty(2, 1, 2, 2, torch.device("cpu"))
    t = torch.ones(1)
    for bad in (
        lambda: draw(raw, peaks, None, None, CAP, t, key(), parts, 64, 300, 0, True, TILE),
        lambda: draw(raw, peaks, None, None, CAP, t, key(), parts, 0, 301, 0, True, TILE),
        lambda: draw(raw, peaks[:1], None, None, CAP, t, key(), parts, 0, 300, 0, True, TILE),
        lambda: draw(raw, peaks, None, None, CAP, t, key(), parts, 0, 300, 1, True, TILE),
        lambda: draw(raw, peaks, raw[:, :200], None, CAP, t, key(), parts, 0, 300, 0, False, TILE),
        lambda: draw(raw, peaks, None, None, CAP, t, key(), parts, 0, 300, 0, True, Tile(16, 16, 256, 4, 1)),
    ):
        with pytest.raises(ValueError, match="draw: raw"):
            bad()
