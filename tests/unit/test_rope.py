"""The rotary tables: frequencies, cosines and sines of the real geometry, and what rotating means."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma_local import rope
from dgemma_local.config import RopeConfig

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "rope_real.json").read_text())
REAL = {
    "sliding_attention": (RopeConfig(theta=1e4, rotating=1.0), 256),
    "full_attention": (RopeConfig(theta=1e6, rotating=0.25), 512),
}

kinds = pytest.mark.parametrize("kind", REAL)


def vectors(kind: str) -> tuple[dict[str, Any], RopeConfig, int]:
    return GOLDEN[kind], *REAL[kind]


@kinds
def test_frequencies_are_the_reference_s(kind: str) -> None:
    golden, config, head_dim = vectors(kind)
    turn = rope.inverse_frequencies(config, head_dim)
    assert turn.dtype == torch.float32
    assert (len(turn), int((turn != 0).sum())) == (golden["n_inv_freq"], golden["nonzero"])
    at = golden["inv_freq_at"]
    torch.testing.assert_close(turn[[int(i) for i in at]], torch.tensor(list(at.values())), rtol=1e-7, atol=0)


@kinds
def test_tables_are_the_reference_s(kind: str) -> None:
    """At positions up to 262,143, where an angle is fp32: its own rounding there is 0.03 rad, so doubles would differ."""
    golden, config, head_dim = vectors(kind)
    cos, sin = rope.table(config, head_dim, torch.tensor(golden["positions"]), torch.float32)
    for i, (want_cos, want_sin) in ((int(i), (golden["cos_at"][i], golden["sin_at"][i])) for i in golden["cos_at"]):
        torch.testing.assert_close(cos[:, i], torch.tensor(want_cos), atol=1e-6, rtol=0)
        torch.testing.assert_close(cos[:, i + head_dim // 2], torch.tensor(want_cos), atol=1e-6, rtol=0)
        torch.testing.assert_close(-sin[:, i], torch.tensor(want_sin), atol=1e-6, rtol=0)
        torch.testing.assert_close(sin[:, i + head_dim // 2], torch.tensor(want_sin), atol=1e-6, rtol=0)


@kinds
def test_in_bf16_the_table_is_rounded_once(kind: str) -> None:
    _, config, head_dim = vectors(kind)
    positions = torch.tensor([0, 1, 1023, 262143])
    exact = rope.table(config, head_dim, positions, torch.float32)
    rounded = rope.table(config, head_dim, positions, torch.bfloat16)
    for wide, narrow in zip(exact, rounded, strict=True):
        assert torch.equal(narrow, wide.to(torch.bfloat16))


@kinds
@given(position=st.integers(0, 262143), seed=st.integers(0, 1000))
@settings(deadline=None)
def test_each_pair_turns_by_its_angle(kind: str, position: int, seed: int) -> None:
    """Pair j is (x[j], x[j + d/2]); as complex numbers, x' = x · e^(iφ)."""
    _, config, head_dim = vectors(kind)
    x = torch.randn(3, head_dim, generator=torch.Generator().manual_seed(seed))
    cos, sin = rope.table(config, head_dim, torch.tensor([position]), torch.float32)
    half = head_dim // 2
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.complex(cos[:, :half], sin[:, half:])
    torch.testing.assert_close(rope.rotate(x, cos, sin), torch.cat([turned.real, turned.imag], -1), atol=1e-5, rtol=0)


def test_pairs_that_do_not_rotate_pass_exactly() -> None:
    config, head_dim = REAL["full_attention"]
    x = torch.randn(1, head_dim, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    out = rope.rotate(x, *rope.table(config, head_dim, torch.tensor([262143]), torch.bfloat16))
    still = torch.cat([torch.arange(64, 256), torch.arange(320, 512)])
    assert torch.equal(out[:, still], x[:, still])
    assert (out[:, :64] != x[:, :64]).any(-1).all() and (out[:, 256:320] != x[:, 256:320]).any(-1).all()


def test_products_and_sum_are_each_rounded_in_bf16() -> None:
    config, head_dim = REAL["sliding_attention"]
    x = torch.randn(64, head_dim, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    cos, sin = rope.table(config, head_dim, torch.arange(64), torch.bfloat16)
    first, second = x.chunk(2, -1)
    other = torch.cat([second, first], -1)  # the sine's sign is in the table
    by_hand = ((x * cos).float() + (other * sin).float()).to(torch.bfloat16)
    assert torch.equal(rope.rotate(x, cos, sin), by_hand)


@given(st.integers(1, 32).map(lambda n: 2 * n), st.floats(0.05, 1.0))
@settings(deadline=None)
def test_a_share_of_the_pairs_rotates(head_dim: int, rotating: float) -> None:
    turn = rope.inverse_frequencies(RopeConfig(theta=1e6, rotating=rotating), head_dim)
    assert len(turn) == head_dim // 2
    assert int((turn != 0).sum()) == int(rotating * head_dim // 2)
