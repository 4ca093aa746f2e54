"""The batched form of the network against the model that runs; its optimiser; weights as FP8 and NVFP4 hold them."""

from typing import Any

import pytest
import torch
from dgemma_local.kernels.router import probabilities_twin
from torch import Tensor

from dgemma_local.config import LayerConfig, ModelConfig, RopeConfig
from dgemma_local.demo import fakequant
from dgemma_local.demo.network import Batch, Muon, fused_rows, initial_weights, is_matrix, orthogonalise, trainable
from dgemma_local.model import DiffusionGemma, parameter_shapes

TINY = ModelConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=24,
    self_conditioning_size=24,
    expert_size=16,
    num_experts=4,
    top_k=2,
    heads=4,
    layers=tuple(
        LayerConfig(kind="full", head_dim=16, kv_heads=1)
        if kind == "f"
        else LayerConfig(kind="sliding", head_dim=8, kv_heads=2)
        for kind in "ssfsf"
    ),
    sliding_window=6,
    rope={"sliding": RopeConfig(theta=100.0, rotating=1.0), "full": RopeConfig(theta=1000.0, rotating=0.5)},
    rms_eps=1e-6,
    softcap=30.0,
    canvas_length=5,
    max_positions=256,
    dtype=None,
)


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    """With every scale random: nothing is hidden by a 1.0."""
    draw = torch.Generator().manual_seed(5)
    made = initial_weights(TINY, 3)
    return {k: w * (0.7 + 0.6 * torch.rand(w.shape, generator=draw)) if w.dim() == 1 else w for k, w in made.items()}


def padded(lengths: list[int], seed: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Prompts of these lengths: each for itself, and as a batch with its `real`; the padding is a token like others."""
    draw = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, TINY.vocab_size, (n,), generator=draw) for n in lengths]
    width = max(lengths)
    prompt = torch.stack([torch.cat([torch.zeros(width - len(row), dtype=torch.int64), row]) for row in rows])
    real = torch.stack([torch.arange(width) >= width - n for n in lengths])
    return rows, prompt, real


def close(ours: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(ours, want, atol=1e-4, rtol=0)


LENGTHS = [[3, 3], [3, 7], [5, 6], [6, 1], [20, 4], [17, 31], [2, 40]]


@pytest.mark.parametrize("lengths", LENGTHS)
@torch.no_grad()
def test_a_batch_computes_what_the_model_with_its_cache_does(weights: dict[str, Tensor], lengths: list[int]) -> None:
    """Encoder hidden states, a first denoising step and a self-conditioned one, prompt by prompt; windows of 6."""
    rows, prompt, real = padded(lengths, seed=sum(lengths))
    model, alone = trainable(TINY, weights), DiffusionGemma(TINY, weights)
    draw = torch.Generator().manual_seed(1)
    canvases = torch.randint(3, TINY.vocab_size, (len(rows), TINY.canvas_length), generator=draw)

    memory = Batch(real, len(TINY.layers), TINY.sliding_window)
    hidden = model.hidden(model.embed(prompt), memory, causal=True)
    memory.length = prompt.shape[1]
    seen = memory.canvases(1, prompt.shape[1], detach=False)
    first = model.head(model.hidden(model.canvas_rows(canvases, None), seen, causal=False))
    previous = first / 0.7
    x = model.canvas_rows(canvases, model.soften(previous))
    second = model.head(model.hidden(x, memory.canvases(1, prompt.shape[1], detach=True), causal=False))

    for b, row in enumerate(rows):
        cache = alone.new_cache()
        close(hidden[b, -len(row) :], alone.hidden(alone.embed(row), cache, causal=True))
        cache = alone.new_cache()
        alone.encode(row, cache)
        close(first[b], alone.denoise(canvases[b], cache, None))
        close(second[b], alone.denoise(canvases[b], cache, alone.signal(previous[b])))
        assert (first[b] - second[b]).abs().max() > 1e-2  # the comparison is of something


@pytest.mark.parametrize("lengths", LENGTHS)
@torch.no_grad()
def test_a_canvas_behind_the_first_part_of_what_was_encoded(weights: dict[str, Tensor], lengths: list[int]) -> None:
    """As when the encoder read the answer too: a canvas must not see it. Two views a prompt, and a choice of them."""
    rows, prompt, real = padded(lengths, seed=1)
    P, L = prompt.shape[1], TINY.canvas_length
    model, alone = trainable(TINY, weights), DiffusionGemma(TINY, weights)
    draw = torch.Generator().manual_seed(2)
    answers = torch.randint(3, TINY.vocab_size, (len(rows), L), generator=draw)
    views = torch.randint(3, TINY.vocab_size, (2 * len(rows), L), generator=draw)

    memory = Batch(torch.nn.functional.pad(real, (0, L), value=True), len(TINY.layers), TINY.sliding_window)
    hidden = model.hidden(model.embed(torch.cat([prompt, answers], 1)), memory, causal=True)
    memory.length = P
    x = model.canvas_rows(views, None)
    logits = model.head(model.hidden(x, memory.canvases(2, P, detach=False), causal=False))
    chosen = torch.tensor([3, 0])
    some = model.head(model.hidden(x[chosen], memory.canvases(2, P, detach=True, rows=chosen), causal=False))
    close(some, logits[chosen])
    for b, row in enumerate(rows):
        whole = torch.cat([row, answers[b]])
        close(hidden[b, -len(whole) :], alone.hidden(alone.embed(whole), alone.new_cache(), causal=True))
        cache = alone.new_cache()
        alone.encode(row, cache)
        for view in (0, 1):
            close(logits[2 * b + view], alone.denoise(views[2 * b + view], cache, None))


def test_the_masks_row_by_row() -> None:
    real = torch.tensor([[True] * 5, [False, False, True, True, True]])
    batch = Batch(real, 1, window=3)
    sliding, full = (batch.mask(kind, 5, causal=True) for kind in ("sliding", "full"))
    assert sliding is not None and full is not None and sliding.shape == full.shape == (2, 1, 5, 5)
    assert sliding[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 1, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]
    assert full[1, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]
    batch.length = 5
    sliding, full = (batch.mask(kind, 2, causal=False) for kind in ("sliding", "full"))
    assert sliding is not None and full is not None
    assert sliding[:, 0, 0].int().tolist() == [[0, 0, 0, 1, 1, 1, 1]] * 2
    assert full[:, 0, 0].int().tolist() == [[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]]


@pytest.mark.parametrize("detach", [False, True])
def test_gradients_reach_the_encoder_unless_it_is_detached(weights: dict[str, Tensor], detach: bool) -> None:
    own = {k: w.clone().requires_grad_() for k, w in weights.items()}
    _, prompt, real = padded([4, 9], seed=1)
    model, memory = trainable(TINY, own), Batch(real, len(TINY.layers), TINY.sliding_window)
    model.hidden(model.embed(prompt), memory, causal=True)
    memory.length = 9
    x = model.canvas_rows(torch.ones(2, 5, dtype=torch.int64), None)
    model.head(model.hidden(x, memory.canvases(1, 9, detach), causal=False)).square().sum().backward()
    assert (own["layers.0.encoder_layer_scalar"].grad is None) is detach
    assert all(w.grad is not None and w.grad.isfinite().all() for k, w in own.items() if "experts" in k or "qkv" in k)


@torch.no_grad()
def test_counting_routers_choose_as_routers_do(weights: dict[str, Tensor]) -> None:
    counting, plain = (m.layers[1].router for m in (trainable(TINY, weights), DiffusionGemma(TINY, weights)))
    u = torch.randn(2, 7, TINY.hidden_size, generator=torch.Generator().manual_seed(1))
    ours, want = counting(u), plain(u)
    assert torch.equal(ours.chosen, want.chosen) and torch.equal(ours.weights, want.weights)
    p, chosen = probabilities_twin(u, plain.scale, plain.proj, plain.eps).flatten(0, 1), want.chosen.flatten().tolist()
    share = torch.tensor([chosen.count(e) / len(chosen) for e in range(TINY.num_experts)])
    torch.testing.assert_close(counting.balance, TINY.num_experts * (share * p.mean(0)).sum())  # type: ignore[attr-defined]


def test_initial_weights_are_seeded_and_soft() -> None:
    a, b, c = (initial_weights(TINY, seed) for seed in (1, 1, 2))
    assert {k: tuple(w.shape) for k, w in a.items()} == parameter_shapes(TINY)
    assert all(torch.equal(a[k], b[k]) for k in a) and not torch.equal(a["embed_tokens"], c["embed_tokens"])
    x = torch.randint(3, 40, (30,), generator=torch.Generator().manual_seed(1))
    model = DiffusionGemma(TINY, a)
    logits = model.denoise(x[:5], model.new_cache(), None)
    assert logits.isfinite().all() and logits.abs().max() < 10


# ── Muon ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6), (3, 8, 12)])
def test_orthogonalised_matrices_keep_their_directions(shape: tuple[int, ...]) -> None:
    """Singular values near 1 (Muon's coefficients trade exactness for speed: 0.7 … 1.2), singular vectors untouched."""
    m = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    ours = orthogonalise(m)
    u, s, vh = torch.linalg.svd(m, full_matrices=False)
    inside = u.mT @ ours @ vh.mT
    values = inside.diagonal(dim1=-2, dim2=-1)
    well = s > 0.1 * s.amax(-1, keepdim=True)
    assert ((values[well] > 0.6) & (values[well] < 1.3)).all()
    assert (inside - torch.diag_embed(values)).abs().max() < 1e-4
    assert torch.equal(ours, orthogonalise(m)) and not orthogonalise(torch.zeros(shape)).any()
    torch.testing.assert_close(orthogonalise(1000 * m), ours, atol=1e-4, rtol=0)


def test_a_step_of_muon() -> None:
    draw = torch.Generator().manual_seed(1)
    start, grad = torch.randn(12, 4, generator=draw), torch.randn(12, 4, generator=draw)
    p = start.clone().requires_grad_()
    p.grad = grad.clone()
    muon = Muon([(p, [8, 4])], lr=0.1, momentum=0.9, weight_decay=0.5)
    muon.step()
    # Nesterov: g + 0.9 (0.1 g - g) is 0.19 g, and the scale is lost in orthogonalising; each fused matrix is its own
    update = torch.cat([orthogonalise(grad[:8]) * 2**0.5, orthogonalise(grad[8:])])
    torch.testing.assert_close(p.detach(), start * (1 - 0.05) - 0.1 * update, atol=1e-5, rtol=0)
    p.grad = None
    before = p.detach().clone()
    muon.step()
    assert torch.equal(p.detach(), before)


def test_momentum_carries_on() -> None:
    p = torch.zeros(4, 4, requires_grad=True)
    muon = Muon([(p, [4])], lr=1.0, momentum=0.5, weight_decay=0.0)
    a, b = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(2))
    p.grad = a
    muon.step()
    before = p.detach().clone()
    p.grad = b
    muon.step()
    held = 0.5 * (0.5 * a) + 0.5 * b
    torch.testing.assert_close(before - p.detach(), orthogonalise(0.5 * b + 0.5 * held), atol=1e-4, rtol=0)


def test_fused_matrices_are_told_apart() -> None:
    weights = initial_weights(TINY, 1)
    rows = {k: fused_rows(TINY, k, w) for k, w in weights.items() if is_matrix(k, w)}
    assert rows["layers.0.self_attn.qkv_proj"] == [32, 16, 16]
    assert rows["layers.2.self_attn.qkv_proj"] == [64, 16]
    assert rows["layers.0.experts.gate_up_proj"] == [16, 16] and rows["self_conditioning.gate_up_proj"] == [24, 24]
    assert rows["layers.0.mlp.down_proj"] == [32]
    assert all(sum(parts) == weights[k].shape[-2] for k, parts in rows.items())
    assert not any("router" in k or k == "embed_tokens" or "norm" in k for k in rows)


# ── weights as they will be stored ────────────────────────────────────────────────────────────────────────────────

# One group of 16 with weight_scale 1.5 and weight_global_scale 1,024; the codes B2 70 05 F1 00 88 13 64, low nibble first
CODES = (-1.5, 1.0, 0.0, 6.0, 3.0, 0.0, 0.5, -6.0, 0.0, 0.0, -0.0, -0.0, 1.5, 0.5, 2.0, 4.0)
VECTOR = torch.tensor(CODES)[None] * 1.5 / 1024


def ulps(ours: Tensor, want: Tensor, most: int) -> None:
    torch.testing.assert_close(ours, want, atol=0, rtol=most * 2.0**-23)


def test_nvfp4_keeps_what_it_can_hold() -> None:
    assert VECTOR[0, 0].item() == -0.002197265625 and VECTOR[0, 3].item() == 0.0087890625
    ulps(fakequant.nvfp4(VECTOR), VECTOR, 2)
    ulps(fakequant.nvfp4(37 * VECTOR), 37 * VECTOR, 2)


def test_nvfp4_rounds_to_the_nearest_code() -> None:
    group = torch.tensor([6.0, 5.1, 4.9, 3.6, 3.4, 2.6, 2.4, 1.8, 1.7, 1.3, 1.2, 0.8, 0.7, 0.3, 0.2, -2.4])[None]
    want = [6.0, 6.0, 4.0, 4.0, 3.0, 3.0, 2.0, 2.0, 1.5, 1.5, 1.0, 1.0, 0.5, 0.5, 0.0, -2.0]
    ulps(fakequant.nvfp4(group), torch.tensor([want]), 2)


def test_nvfp4_breaks_ties_to_the_even_code() -> None:
    """As compressed-tensors does; with an amax of 6 in the group the scales are exact."""
    group = torch.tensor([6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25] * 2)[None]
    ulps(fakequant.nvfp4(group), torch.tensor([[6.0, 4.0, 4.0, 2.0, 2.0, 1.0, 1.0, 0.0] * 2]), 2)


@pytest.mark.parametrize("scheme", [fakequant.fp8, fakequant.nvfp4])
@pytest.mark.parametrize("shape", [(8, 32), (3, 8, 48)])
def test_quantising_twice_changes_nothing(scheme: Any, shape: tuple[int, ...]) -> None:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    once = scheme(w)
    ulps(scheme(once), once, 4)
    assert not torch.equal(once, w) and not scheme(torch.zeros(shape)).any()
    assert torch.equal(scheme(-w), -once)


def test_the_errors_are_those_of_the_formats() -> None:
    """On Gaussian weights 9.2 % and 2.1 % were measured with compressed-tensors."""
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    for scheme, want in ((fakequant.nvfp4, 0.092), (fakequant.fp8, 0.021)):
        assert (scheme(w) - w).norm() / w.norm() == pytest.approx(want, rel=0.35)


def test_scales_are_a_row_s_an_expert_s_and_a_group_s() -> None:
    """Making one row, expert or group larger leaves what the others hold as fine as it was."""
    w = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(1))
    grown = w.clone()
    grown[0, 0] *= 1000
    assert torch.equal(fakequant.fp8(grown)[0, 1:], fakequant.fp8(w)[0, 1:])
    assert torch.equal(fakequant.fp8(grown)[1], fakequant.fp8(w)[1])
    assert torch.equal(fakequant.nvfp4(grown)[1], fakequant.nvfp4(w)[1])
    grown = w.clone()
    grown[0, 0, :16] *= 8
    error = (fakequant.nvfp4(grown) - grown)[0, 0, 16:].norm() / grown[0, 0, 16:].norm()
    assert error < 0.15


@pytest.mark.parametrize("scheme", ["fp8", "nvfp4"])
def test_the_gradient_passes_straight_through(scheme: str) -> None:
    draw = torch.Generator().manual_seed(1)
    w = torch.randn(4, 32, generator=draw).requires_grad_()
    upstream = torch.randn(4, 32, generator=draw)
    out = fakequant.straight_through(w, scheme)
    out.backward(upstream)
    assert torch.equal(w.grad, upstream)  # type: ignore[arg-type]
    torch.testing.assert_close(out.detach(), {"fp8": fakequant.fp8, "nvfp4": fakequant.nvfp4}[scheme](w.detach()))


def test_quantised_weights_stay_near(weights: dict[str, Tensor]) -> None:
    """The whole network under each scheme still runs, and not as without it."""
    prompt = torch.arange(3, 20)

    def logits(own: dict[str, Tensor]) -> Tensor:
        model = DiffusionGemma(TINY, own)
        cache = model.new_cache()
        model.encode(prompt, cache)
        return model.denoise(prompt[:5], cache, None)

    base = logits(weights)
    for scheme in (fakequant.fp8, fakequant.nvfp4):
        moved = logits({k: scheme(w) if is_matrix(k, w) and w.shape[-1] % 16 == 0 else w for k, w in weights.items()})
        assert 1e-3 < (moved - base).norm() / base.norm() < 1
