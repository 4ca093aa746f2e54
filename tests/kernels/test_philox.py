"""The stream inside kernels against `noise`: words and tokens bit for bit, variates within 4 ulp of the real logarithm."""

import math

import numpy as np
import pytest
import torch
from dgemma_local.kernels import _philox
from dgemma_local.kernels._triton import tl, triton
from torch import Tensor

from dgemma_local.noise import LANES, PhiloxNoise, Purpose, exponential, philox

KEYS = [
    (0, 0, 0, 0),
    (1, 0, 0, 47),
    (2**64 - 1, 255, 2**24 - 1, 65535),
    (0x9E3779B97F4A7C15, 3, 12, 5),
    (2**31, 0, 1, 2),
]


@triton.jit
def _words(KEY, STEP, POSITION, GROUP, OUT, PURPOSE: tl.constexpr, P: tl.constexpr, G: tl.constexpr):
    position, group = tl.arange(0, P), tl.arange(0, G)
    four = _philox.words(KEY, STEP, PURPOSE, tl.load(POSITION + position)[:, None], tl.load(GROUP + group)[None, :])
    at = position[:, None] * G + group[None, :]
    for w in tl.static_range(4):
        tl.store(OUT + w * P * G + at, four[w].to(tl.int32, bitcast=True))


@triton.jit
def _tokens(KEY, STEP, OUT, vocab_size, PURPOSE: tl.constexpr, P: tl.constexpr):
    position = tl.arange(0, P)
    word = _philox.words(KEY, STEP, PURPOSE, position, position * 0)[0]
    tl.store(OUT + position, _philox.uniform_token(word, vocab_size))


@triton.jit
def _variates(WORD, OUT, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(OUT + at, _philox.exponential(tl.load(WORD + at).to(tl.uint32, bitcast=True)))


def unsigned(x: Tensor) -> Tensor:
    return x.long() & 0xFFFFFFFF


@pytest.mark.parametrize(("seed", "attempt", "canvas", "step"), KEYS)
@pytest.mark.parametrize("purpose", list(Purpose))
def test_words_are_the_contracts(seed: int, attempt: int, canvas: int, step: int, purpose: Purpose) -> None:
    key = _philox.Key.of(seed, attempt, canvas, torch.tensor([step], dtype=torch.int32))
    position = torch.tensor([0, 1, 255, 2**31 - 1], dtype=torch.int32)
    group = torch.tensor([0, 1, 31, 32, 65535, 2**31 - 1, 7, 8191], dtype=torch.int32)
    out = torch.empty(4, 4, 8, dtype=torch.int32)
    _words[(1,)](key.numbers, key.step, position, group, out, PURPOSE=int(purpose), P=4, G=8)
    noise = PhiloxNoise(seed, 4, LANES, torch.device("cpu"), attempt)
    assert torch.equal(unsigned(out), noise.words(purpose, canvas, step, position.long()[:, None], group.long()))


def test_known_answer() -> None:
    """Random123's kat_vectors, philox4x32-10, through the same door."""
    seed, counter = 0x299F31D0_A4093822, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    step = torch.tensor([counter[2] - (1 << 16)], dtype=torch.int32)
    numbers = torch.cat([_philox.key_numbers(seed, 0, 0)[:2], torch.tensor([counter[3]], dtype=torch.int32)])
    out = torch.empty(4, 1, 1, dtype=torch.int32)
    place = [torch.tensor([c - (c >> 31 << 32)], dtype=torch.int32) for c in (counter[1], counter[0])]
    _words[(1,)](numbers, step, *place, out, PURPOSE=1, P=1, G=1)
    assert unsigned(out).flatten().tolist() == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    assert philox(torch.tensor(counter), (seed & 0xFFFFFFFF, seed >> 32)).tolist() == unsigned(out).flatten().tolist()


@pytest.mark.parametrize("vocab_size", [1, 2, 1000, 262_144])
def test_tokens_are_the_contracts(vocab_size: int) -> None:
    seed, canvas, step = 2**63 + 12345, 7, 3
    key = _philox.Key.of(seed, 0, canvas, torch.tensor([step], dtype=torch.int32))
    out = torch.empty(64, dtype=torch.int32)
    _tokens[(1,)](key.numbers, key.step, out, vocab_size, PURPOSE=int(Purpose.RENOISE), P=64)
    assert torch.equal(out.long(), PhiloxNoise(seed, 64, vocab_size, torch.device("cpu")).renoise(canvas, step))


def variates(word: Tensor) -> Tensor:
    size = 1 << 17
    out = torch.empty(-(-len(word) // size) * size)
    padded = torch.cat([word, word[:1].expand(len(out) - len(word))])
    _variates[(len(out) // size,)]((padded - (padded >> 31 << 32)).int(), out, N=size)
    return out[: len(word)]


def ulps(ours: Tensor, truth: np.ndarray) -> float:
    return float(
        np.max(np.abs(ours.double().numpy() - truth) / np.spacing(truth.astype(np.float32)).astype(np.float64))
    )


def test_common_variates_everywhere_that_matters() -> None:
    """Both ends whole, every 61st between (all 2^23 once, by hand: 1.04 ulp)."""
    k = torch.cat(
        [torch.arange(2048, 1 << 15), torch.arange(1 << 15, 1 << 23, 61), torch.arange((1 << 23) - 4096, 1 << 23)]
    )
    word = k * 512 + k % 512  # the low nine bits play no part
    truth = -np.log((2.0**24 - 2 * k.double().numpy() - 1) / 2**24)
    ours = variates(word)
    assert ulps(ours, truth) <= 1.5
    assert ulps(exponential(word), truth) <= 1.5
    assert ours.max() <= 24 * math.log(2) + 1e-6


def test_rare_variates() -> None:
    word = torch.cat(
        [torch.arange(4096), torch.arange(4096, 1 << 20, 37), torch.arange((1 << 20) - 64, (1 << 20) + 64)]
    )
    u = (word.double().numpy() + 0.5) / 2**32
    truth = np.where(word.numpy() < 1 << 20, -np.log1p(-u), -np.log1p(-(word.numpy() // 512 + 0.5) / 2**23))
    ours = variates(word)
    assert ours.min() > 0
    assert ulps(ours, truth) <= 1.5
    assert ulps(exponential(word), truth) <= 1.5


@pytest.mark.parametrize("bad", [(-1, 0, 0), (1 << 64, 0, 0), (0, 256, 0), (0, 0, 1 << 24)])
def test_keys_out_of_range(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"key: seed {bad[0]}, attempt {bad[1]}, canvas {bad[2]}"):
        _philox.key_numbers(*bad)
