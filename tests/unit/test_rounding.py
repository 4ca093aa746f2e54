"""Where bf16 is rounded, and where not: each rounding spelled out beside the model, as transformers 5.24 has it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dgemma_local.kernels._gelu import gated_gelu_twin
from dgemma_local.kernels.norms import normalise
from dgemma_local.kernels.norms import rms_norm_twin as rms_norm
from dgemma_local.kernels.router import Routing, group_twin, probabilities_twin
from reference import open_model
from tiny import write_tiny
from torch import Tensor

from dgemma_local.checkpoint import open_checkpoint
from dgemma_local.config import load_model_config
from dgemma_local.layout import Options
from dgemma_local.loading import load
from dgemma_local.model import DiffusionGemma, Experts, Router

GOLDEN = Path(__file__).parent.parent / "golden"
TINY = GOLDEN / "tiny"
CONFIG = load_model_config(TINY)
BF16 = torch.bfloat16


def close(ours: Tensor, want: Tensor, atol: float) -> None:
    torch.testing.assert_close(ours, want, atol=atol, rtol=0)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def real_width(tmp_path_factory: pytest.TempPathFactory) -> DiffusionGemma:
    """One small layer at the real model's hidden size, in bf16."""
    folder = tmp_path_factory.mktemp("wide")
    small = {"vocab": 8, "intermediate": 8, "heads": 1, "experts": 2, "expert_size": 8, "full_head_dim": 8}
    write_tiny(folder, dtype=BF16, pattern="f", hidden=2816, **small)
    return open_model(folder)


def test_the_embedding_s_scale_is_53_at_the_real_width(real_width: DiffusionGemma) -> None:
    """√2816 is 53.066; in bf16 it is 53."""
    assert real_width.embed_scale == 53.0
    ids = torch.arange(8)
    want = (real_width.embed_tokens.float() * 53).to(BF16)
    assert torch.equal(real_width.embed(ids), want)
    assert not torch.equal(want, (real_width.embed_tokens.float() * 2816**0.5).to(BF16))


@pytest.mark.parametrize("width", [64, 2816])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_rms_norm_rounds_once(width: int, size: float) -> None:
    x, w = (size * draw(50, width)).to(BF16), (1 + draw(width, seed=1) / 4).to(BF16)
    unit = normalise(x.float(), 1e-6)
    once = (unit * w.float()).to(BF16)
    assert torch.equal(rms_norm(x, w, 1e-6), once)
    assert torch.equal(rms_norm(x, None, 1e-6), unit.to(BF16))
    assert not torch.equal(once, unit.to(BF16) * w)


def test_the_router_rounds_each_step_and_its_logits() -> None:
    config = replace(CONFIG, hidden_size=48)  # 48^-0.5 is not a power of two
    weights = {
        "router.scale": (1 + draw(48) / 4).to(BF16),
        "router.proj": draw(8, 48, seed=1).to(BF16),
        "router.per_expert_scale": (1 + draw(8, seed=2) / 4).to(BF16),
    }
    router, x = Router(config, weights), draw(40, 48, seed=3).to(BF16)
    unit = normalise(x, config.rms_eps).to(BF16)
    scaled = (unit.float() * weights["router.scale"].float()).to(BF16)
    u = (scaled.float() * 48**-0.5).to(BF16)
    logits = (u.double() @ weights["router.proj"].double().T).to(BF16)
    got = probabilities_twin(x, router.scale, router.proj, router.eps)
    assert got.dtype == torch.float32
    close(got, logits.float().softmax(-1), 2e-3)
    assert (got == logits.float().softmax(-1)).all(-1).float().mean() > 0.9  # the sums' order may round a row otherwise
    assert router(x).weights.dtype == torch.float32


@pytest.mark.parametrize("width", [16, 12], ids=["grouped", "one by one"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float64], ids=str)
def test_experts_round_each_product_and_the_sum_once(width: int, dtype: torch.dtype) -> None:
    """Rows out of order, experts that nobody chose, and both ways to multiply, against fp64 with each rounding spelled out."""
    E, F, D, T, A = 8, width, 32, 15, 3
    experts = Experts((draw(E, 2 * F, D) / 6).to(dtype), (draw(E, D, F, seed=1) / 4).to(dtype), dtype)
    x, weights = draw(T, D, seed=2).to(dtype), draw(T, A, seed=3).abs().to(torch.promote_types(dtype, torch.float32))
    chosen = torch.stack([torch.randperm(E - 2, generator=torch.Generator().manual_seed(t))[:A] for t in range(T)])
    want = torch.zeros(T, D, dtype=torch.float64)
    for slot in range(A):
        gate_up = torch.einsum("td,tfd->tf", x.double(), experts.gate_up[chosen[:, slot]].double()).to(dtype)
        out = torch.einsum("tf,tdf->td", gated_gelu_twin(gate_up).double(), experts.down[chosen[:, slot]].double()).to(
            dtype
        )
        want += out.double() * weights[:, slot, None].double()
    got = experts(x, Routing(weights, chosen, *group_twin(chosen, E)))
    assert got.dtype == dtype
    step = torch.finfo(dtype).eps * want.abs().clamp_min(1.0)
    assert ((got.double() - want.to(dtype).double()).abs() <= 16 * step).all()
    if dtype == BF16:
        assert (got == want.to(dtype)).float().mean() > 0.97  # a product's sum in fp32 may round to the neighbour


def test_the_head_rounds_before_the_softcap(real_width: DiffusionGemma) -> None:
    hidden = draw(6, 2816).to(BF16)
    product = (hidden.double() @ real_width.embed_tokens.double().T).to(BF16).float()
    logits = real_width.head(hidden)
    assert logits.dtype == torch.float32
    assert (logits == (product / 30).tanh() * 30).float().mean() > 0.9


def spelled_out(embedding: Tensor) -> DiffusionGemma:
    """A bf16 model that is little more than its embedding, [V, V]. Of the identity, a soft embedding is p · √V."""
    vocab = len(embedding)
    config = replace(CONFIG, vocab_size=vocab, hidden_size=vocab, layers=())
    names = ("norm", "self_conditioning.pre_norm", "self_conditioning.gate_up_proj", "self_conditioning.down_proj")
    return DiffusionGemma(config, {"embed_tokens": embedding.to(BF16)} | {n: torch.ones(1, dtype=BF16) for n in names})


def test_the_soft_embedding_rounds_logits_and_probabilities() -> None:
    """Reference values of one step: temperature-scaled logits, and what the next step makes of them."""
    for case in json.loads((GOLDEN / "step.json").read_text())["cases"]:
        logits, want = torch.tensor(case["processed_logits"]), torch.tensor(case["sc_probs_bf16"])
        model = spelled_out(torch.eye(logits.shape[-1]))
        assert model.embed_scale == 4.0  # exact, and so is the product
        assert torch.equal(model.soften(logits), (want * 4).to(BF16))
        assert not torch.equal(torch.tensor(case["sc_probs_fp32"]).to(BF16), want.to(BF16))


def test_probabilities_are_rounded_before_the_product() -> None:
    """Two tokens that cancel: 0.50146 and 0.49854 become 0.5 and 0.49805, and their difference two thirds of itself."""
    logits = torch.full((1, 16), -1000.0)
    logits[0, :2] = torch.tensor([0.005859375, 0.0])  # exact in bf16
    embedding = torch.zeros(16, 16)
    embedding[0], embedding[1] = 1.0, -1.0
    soft = spelled_out(embedding).soften(logits)
    assert torch.equal(soft.float(), torch.full((1, 16), (0.5 - 0.498046875) * 4))


def test_a_near_tie_is_visibly_coarse() -> None:
    """At t = 0.41 logits 29, 28 and 27.5 become 70.5, 68.5 and 67: half a nat is the step of bf16 there."""
    logits = torch.full((1, 16), -1000.0)
    logits[0, :3] = torch.tensor([29.0, 28.0, 27.5]) / 0.41
    close(spelled_out(torch.eye(16)).soften(logits)[0, :3].float() / 4, torch.tensor([0.8580, 0.1161, 0.0259]), 2e-3)


def test_fp64_goes_all_the_way() -> None:
    """The truth of other tests: no part of an fp64 model falls back to fp32, except the reference's own fp32 angles."""
    model = open_model(TINY, torch.float64)
    wide = load(open_checkpoint(TINY), CONFIG, Options(torch.float64))
    assert model.embed_scale == 32**0.5
    cache, nudged_cache = model.new_cache(), model.new_cache()
    nudged = DiffusionGemma(CONFIG, wide | {"embed_tokens": wide["embed_tokens"] * (1 + 1e-12)})
    prompt, canvas = torch.arange(10, 30), torch.arange(12)
    model.encode(prompt, cache)
    nudged.encode(prompt, nudged_cache)
    previous = model.denoise(canvas, cache, None) / 0.6
    assert previous.dtype == torch.float64
    moved = (
        (
            nudged.denoise(canvas, nudged_cache, nudged.signal(previous))
            - model.denoise(canvas, cache, model.signal(previous))
        )
        .abs()
        .max()
    )
    assert 0 < moved < 1e-8  # fp32 would show nothing, or a step of 1e-6
