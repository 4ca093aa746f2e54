"""How far a kernel may be from its twin, in steps of its type; and the operands that both are given."""

import pytest
import torch
from torch import Tensor
from twin_kernels import BF16
from twin_kernels import networks as networks
from twin_kernels import own_process as own_process

from dgemma_local.model import DiffusionGemma
from dgemma_local.quant import Fp8
from dgemma_local.selftest import compare
from dgemma_local.selftest.compare import NEAR, SAME, Bar, apart
from dgemma_local.selftest.operands import Form, Operands

# ── bars ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def numbers(seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(100, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_bars() -> None:
    x = numbers()
    step = compare.step_at(x, BF16)
    near, far = x.clone(), x.clone()
    near[3, 7] = (x[3, 7] + 2 * step[3, 7]).to(BF16)
    far[3, 7] = (x[3, 7] + 3 * step[3, 7]).to(BF16)
    assert apart((x,), (x,), [NEAR]) is None and apart((near,), (x,), [NEAR]) is None
    assert apart((far,), (x,), [NEAR]) == "3 steps of bfloat16 from its twin, in 1 of 6400 numbers"
    many = (x.float() + step).to(BF16)
    assert apart((many,), (x,), [NEAR]) == f"{int((many != x).sum())} of 6400 numbers differ from its twin's"
    assert apart((many,), (x,), [Bar(1.5, 0.0)]) is None  # one and a half where the sum came into the next octave
    assert apart((near,), (x,), [SAME]) is not None
    one = torch.arange(6400).view(100, 64)
    assert apart((one,), (one,), [SAME]) is None
    assert apart((one + (one == 5).int(),), (one,), [SAME]) == "1 of 6400 numbers differ from its twin's"
    assert apart((one,), (one.int(),), [SAME]) == "(100, 64) int64, its twin (100, 64) int32"
    assert apart((x, x), (x,), [NEAR]) == "2 tensors, its twin 1"
    assert apart((x, many), (x, x), [NEAR, Bar(1.5, 0.0)]) is None


def test_nan_fails_even_where_the_twin_has_it() -> None:
    x = numbers()
    x[0, 0] = torch.nan
    assert apart((x,), (x,), [NEAR]) == "NaN in 1 of 6400 numbers"
    assert apart((numbers(),), (x,), [NEAR]) == "1 of 6400 numbers are not finite, or not where its twin's are not"
    x[0, 0] = torch.inf
    assert apart((x,), (x,), [NEAR]) is None
    assert apart((x,), (-x,), [NEAR]) is not None and apart((numbers(),), (x,), [NEAR]) is not None


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float8_e4m3fn])
def test_steps_are_those_of_the_type(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, 1.999, 2.0, 4.0, -8.0]).to(dtype)
    x = torch.cat([x.float(), torch.tensor([0.0])]).to(dtype)
    eps = torch.finfo(dtype).eps
    rms = float(x.double().square().mean().sqrt())  # of 3.7: between 2 and 4
    sizes = [max(abs(float(v)), rms) for v in x.double()]
    want = [2.0 ** (torch.tensor(s).log2().floor().item()) * eps for s in sizes]
    assert compare.step_at(x, dtype).tolist() == want


# ── operands ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_operands_are_the_same_every_time_and_of_their_form(networks: dict[str, DiffusionGemma]) -> None:
    one, two = (Operands(torch.device("cpu"), BF16) for _ in range(2))
    for network in networks.values():
        layer = network.layers[0]
        for weight in (layer.mlp.gate_up, layer.experts.down, network.embed_tokens):
            form = Form.of(weight, BF16)
            made = one.weight(form, 1)
            assert Form.of(made, BF16) == form and type(made) is type(weight)
            for a, b in zip(compare.tensors_of(made), compare.tensors_of(two.weight(form, 1)), strict=True):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            if not isinstance(made, Tensor | Fp8):
                assert bool((made.scale.float() >= 0.5).all() and (made.scale.float() < 4).all())
    assert not torch.equal(one.normal(64, seed=1), one.normal(64, seed=2))
    rows = one.normal(600, 2816)  # more than once round
    assert len({tuple(row[:4].tolist()) for row in rows}) == 600
    assert float(rows.float().mean().abs()) < 0.01 and abs(float(rows.float().std()) - 1) < 0.01
