"""Module by module against vectors of transformers 5.24, in fp32; bf16's roundings are in test_rounding.py.

Weights and configuration: tests/golden/tiny. Tolerances are absolute.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dgemma_local.kernels.norms import normalise
from dgemma_local.kernels.norms import rms_norm_twin as rms_norm
from dgemma_local.kernels.router import probabilities_twin
from live_bytes import LiveBytes
from reference import encode
from torch import Tensor

from dgemma_local import model, quant
from dgemma_local.cache import Cache, causal_mask
from dgemma_local.checkpoint import open_checkpoint
from dgemma_local.config import Kind, load_model_config
from dgemma_local.loading import load
from dgemma_local.model import DiffusionGemma, parameter_shapes
from dgemma_local.quant import Weight, quantise_fp8, quantise_nvfp4

GOLDEN = Path(__file__).parent.parent / "golden"
TINY = GOLDEN / "tiny"
CONFIG = load_model_config(TINY)
WEIGHTS = load(open_checkpoint(TINY), CONFIG)
MODEL = DiffusionGemma(CONFIG, WEIGHTS)
MODULES: dict[str, Any] = {
    name: torch.tensor(value) if isinstance(value, list) else value
    for name, value in json.loads((TINY / "modules.json").read_text()).items()
}
FORWARD = json.loads((TINY / "forward.json").read_text())["cases"]
VISIBILITY = json.loads((GOLDEN / "visibility.json").read_text())["cases"]


def close(ours: Tensor, want: Any, atol: float = 1e-5) -> None:
    torch.testing.assert_close(ours, torch.as_tensor(want), atol=atol, rtol=0)


class GivenPast:
    """Some keys and values before the rows of a pass, and everything seen."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.length, self.keys, self.values = keys.shape[-2], keys, values

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([self.keys, k], -2), torch.cat([self.values, v], -2)

    def mask(self, kind: Kind, rows: int, causal: bool) -> Tensor | None:
        window = CONFIG.sliding_window if kind == "sliding" else None
        return causal_mask(0, rows, window, torch.device("cpu")) if causal else None


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ── one box at a time ─────────────────────────────────────────────────────────────────────────────────────────────


def test_rms_norm() -> None:
    close(rms_norm(MODULES["x"], MODEL.layers[0].input_layernorm, CONFIG.rms_eps), MODULES["rms_input_layernorm"])


def test_normalise_has_unit_rms_and_survives_zeros() -> None:
    x = draw(5, 32)
    close(normalise(x, 1e-6).square().mean(-1), torch.ones(5), 1e-4)
    assert torch.equal(normalise(torch.zeros(2, 32), 1e-6), torch.zeros(2, 32))


def test_embedding() -> None:
    close(MODEL.embed(MODULES["embed_ids"]), MODULES["embed_out"])


def test_router() -> None:
    router, x = MODEL.layers[0].router, MODULES["x"]
    close(probabilities_twin(x, router.scale, router.proj, router.eps), MODULES["router_probs"])
    routing = router(x)
    assert torch.equal(routing.chosen, MODULES["topk_index"])
    close(routing.weights, MODULES["topk_weights"])


def test_router_weights_carry_the_expert_s_own_scale_after_they_summed_to_one() -> None:
    router = MODEL.layers[0].router
    routing = router(draw(20, 32))
    close((routing.weights / router.per_expert_scale[routing.chosen]).sum(-1), torch.ones(20))
    assert (routing.weights.sum(-1) - 1).abs().max() > 0.01


def test_experts() -> None:
    layer = MODEL.layers[0]
    x = rms_norm(MODULES["x"], layer.pre_feedforward_layernorm_2, CONFIG.rms_eps)
    close(layer.experts(x, layer.router(MODULES["x"])), MODULES["experts_out"])


def test_dense_mlp() -> None:
    close(MODEL.layers[0].mlp(MODULES["x"]), MODULES["mlp_out"])


@pytest.mark.parametrize(("kind", "index"), [("sliding", 0), ("full", 2)])
def test_attention_and_layer(kind: Kind, index: int) -> None:
    """Four past positions, six canvas rows at 4 … 9, nothing masked, the decoder's scalar."""
    case = MODULES[f"attn_{kind}"]
    past = GivenPast(torch.tensor(case["past_k"]), torch.tensor(case["past_v"]))
    x, layer = torch.tensor(case["x"]), MODEL.layers[index]
    segments = [MODEL.segment(x, past, causal=False)]
    close(layer.attention.read(layer.attention.write(x, segments)), case["out"])
    seen = layer.attention.write(rms_norm(x, layer.input_layernorm, CONFIG.rms_eps), segments)
    after, following = layer(x, seen, segments, (WEIGHTS["norm"], None))
    close(after, MODULES[f"layer_{kind}"])
    close(following, rms_norm(after, WEIGHTS["norm"], CONFIG.rms_eps))


def test_self_conditioning() -> None:
    embedded, signal = MODULES["self_cond_embeds"], MODULES["self_cond_signal"]
    close(rms_norm(embedded + MODEL.self_conditioning(signal), None, CONFIG.rms_eps), MODULES["self_cond_out"])


def test_without_a_previous_step_the_norm_stays() -> None:
    close(MODULES["self_cond_out_zero_signal"], normalise(MODULES["self_cond_embeds"], CONFIG.rms_eps))
    ids = torch.arange(12)
    for nothing in (None, torch.zeros(12, 32)):
        close(MODEL.canvas_rows(ids, nothing), normalise(MODEL.embed(ids), CONFIG.rms_eps))


def test_head_is_softcapped() -> None:
    hidden = 200 * draw(4, 32)
    logits = MODEL.head(hidden)
    close(logits, 30 * torch.tanh(hidden @ MODEL.embed_tokens.T / 30), 1e-4)
    assert (hidden @ MODEL.embed_tokens.T).abs().max() > 60 and logits.abs().max() <= 30


# ── the whole pass ────────────────────────────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
@pytest.mark.parametrize("case", FORWARD, ids=lambda case: f"prompt-{len(case['prompt'])}")
def test_prefill_steps_commit_and_second_canvas(case: dict[str, Any]) -> None:
    prompt, canvas, commit, second = (torch.tensor(case[k]) for k in ("prompt", "canvas", "commit", "canvas2"))
    cache = MODEL.new_cache()
    close(encode(MODEL, prompt, cache), case["encoder_last_hidden"])
    for i, layer in enumerate(CONFIG.layers):
        want = case["kv_after_prefill"][f"layer{i}"]
        nothing = torch.empty(layer.kv_heads, 0, layer.head_dim)
        k, v = cache.write(i, nothing, nothing)
        assert [1, *k.shape] == want["k_shape"]
        for ours, name in ((k, "k"), (v, "v")):
            close(ours.sum(), want[f"{name}_sum"], 1e-4)
            close(ours.abs().sum(), want[f"{name}_abs_sum"], 1e-4)
    close(MODEL.denoise(canvas, cache, None), case["logits_step0"], 5e-5)
    close(MODEL.denoise(canvas, cache, MODEL.signal(torch.tensor(case["sc_logits"]))), case["logits_with_sc"], 5e-5)
    close(encode(MODEL, commit, cache), case["commit_last_hidden"])
    close(MODEL.denoise(second, cache, None), case["logits_canvas2_step0"], 5e-5)


def test_encoder_and_decoder_have_each_their_scalars() -> None:
    """Swapped sets move the logits by more than half."""
    swapped = dict(WEIGHTS)
    for i in range(3):
        ours, theirs = f"layers.{i}.layer_scalar", f"layers.{i}.encoder_layer_scalar"
        swapped[ours], swapped[theirs] = WEIGHTS[theirs], WEIGHTS[ours]
    prompt, canvas = (torch.tensor(FORWARD[2][k]) for k in ("prompt", "canvas"))

    def step(model: DiffusionGemma) -> Tensor:
        cache = model.new_cache()
        model.encode(prompt, cache)
        return model.denoise(canvas, cache, None)

    assert (step(MODEL) - step(DiffusionGemma(CONFIG, swapped))).abs().max() > 0.5


def only_layer(index: int) -> DiffusionGemma:
    """One layer of the tiny model alone, so that what its rows see is what reaches the output; in fp64."""
    prefix = f"layers.{index}."
    own = {
        k.replace(prefix, "layers.0."): w.double()
        for k, w in WEIGHTS.items()
        if k.startswith(prefix) or "layers." not in k
    }
    return DiffusionGemma(replace(CONFIG, layers=(CONFIG.layers[index],)), own)


@torch.inference_mode()
@pytest.mark.parametrize("case", VISIBILITY, ids=lambda case: f"prompt-{case['prompt']}")
def test_what_each_row_sees(case: dict[str, Any]) -> None:
    """Change one token, see which rows move: encoder and canvas, sliding and full."""
    n, L = case["prompt"], case["canvas"]
    assert (case["sliding_window"], L) == (CONFIG.sliding_window, CONFIG.canvas_length)
    prompt, canvas = (torch.randint(5, 64, (m,), generator=torch.Generator().manual_seed(m)) for m in (n, L))

    def run(model: DiffusionGemma, prompt: Tensor, canvas: Tensor) -> tuple[Tensor, Tensor]:
        cache = model.new_cache()
        return encode(model, prompt, cache), model.denoise(canvas, cache, None)

    def seen(model: DiffusionGemma, of_canvas: bool) -> tuple[list[list[int]], list[list[int]]]:
        """For each encoder row and each canvas row, the tokens of prompt or canvas that move it."""
        before = run(model, prompt, canvas)
        moved: list[list[Tensor]] = [[], []]
        for at in range(L if of_canvas else n):
            changed = [prompt.clone(), canvas.clone()]
            changed[of_canvas][at] = 5 + (changed[of_canvas][at] - 4) % 59
            for rows, was, now in zip(moved, before, run(model, *changed), strict=True):
                rows.append(((was - now).abs() > 1e-9).any(-1))  # below: other sums of the experts' rows
        encoder, decoder = (torch.stack(rows, 1) for rows in moved)
        return [row.nonzero()[:, 0].tolist() for row in encoder], [row.nonzero()[:, 0].tolist() for row in decoder]

    sliding, full = only_layer(0), only_layer(2)
    encoder_rows, canvas_rows = seen(sliding, of_canvas=False)
    assert encoder_rows == case["encoder_sliding_query_sees_prompt"]
    assert canvas_rows == case["canvas_sliding_query_sees_prompt"]
    assert seen(sliding, of_canvas=True)[1] == case["canvas_sliding_query_sees_canvas"]
    encoder_rows, canvas_rows = seen(full, of_canvas=False)
    assert encoder_rows == [list(range(row + 1)) for row in range(n)]
    assert canvas_rows == case["canvas_full_layer_query_sees_prompt"]
    assert seen(full, of_canvas=True)[1] == [list(range(L))] * L


@pytest.mark.parametrize("causal", [True, False])
def test_leading_axes_are_a_batch(causal: bool) -> None:
    """As in training: two sequences side by side are two sequences."""
    ids = torch.randint(5, 64, (2, 20), generator=torch.Generator().manual_seed(0))

    class NothingBefore(GivenPast):
        def __init__(self) -> None:
            self.length = 0

        def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return k, v

    both = MODEL.head(MODEL.hidden(MODEL.embed(ids), NothingBefore(), causal))
    for one, row in zip(both, ids, strict=True):
        close(one, MODEL.head(MODEL.hidden(MODEL.embed(row), NothingBefore(), causal)), 5e-5)


@pytest.mark.parametrize(
    ("parameter", "says"),
    [
        ("self_conditioning.down_proj", "the embedding or self-conditioning"),
        ("layers.0.mlp.down_proj", "layer 0"),
        ("layers.2.self_attn.o_proj", "layer 2"),
        ("norm", "the final norm or head"),
    ],
)
def test_the_first_bad_layer_is_named(parameter: str, says: str) -> None:
    bad = DiffusionGemma(CONFIG, WEIGHTS | {parameter: WEIGHTS[parameter] * float("nan")})
    canvas = torch.arange(12)
    cache = Cache(CONFIG, torch.float32)
    assert bad.first_bad_layer(canvas, cache, bad.signal(torch.zeros(12, 64))) == says


# ── the vocabulary in blocks ──────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def test_head_and_soft_embedding_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, scaled = draw(12, 32), 5 * draw(12, 64)
    batch, scaled_batch = draw(2, 3, 32), 5 * draw(2, 3, 64)
    whole = [MODEL.head(hidden), MODEL.head(batch), MODEL.soften(scaled), MODEL.soften(scaled_batch)]
    monkeypatch.setattr(model, "VOCABULARY_BLOCK", 1024)  # a third of 12 × 64
    blocks = [MODEL.head(hidden), MODEL.head(batch), MODEL.soften(scaled), MODEL.soften(scaled_batch)]
    for ours, want in zip(blocks, whole, strict=True):
        close(ours, want)
    assert [t.shape for t in whole] == [(12, 64), (2, 3, 64), (12, 32), (2, 3, 32)]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_second_copy_of_the_logits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the logits, which are 12 blocks, there are never four blocks alive."""
    monkeypatch.setattr(model, "VOCABULARY_BLOCK", 1 << 14)
    V, L, D = 1 << 12, 12, CONFIG.hidden_size
    names = ("norm", "self_conditioning.pre_norm", "self_conditioning.gate_up_proj", "self_conditioning.down_proj")
    weights = {"embed_tokens": draw(V, D).to(dtype)} | {name: torch.ones(1, dtype=dtype) for name in names}
    wide = DiffusionGemma(replace(CONFIG, vocab_size=V, layers=()), weights)
    hidden = draw(L, D).to(dtype)
    with LiveBytes() as live:
        logits = wide.head(hidden)
    assert logits.nbytes == 12 << 14 and live.peak < logits.nbytes + (4 << 14)
    with LiveBytes() as live:
        wide.soften(logits)
    assert live.peak < 4 << 14


def test_with_gradients_nothing_is_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "VOCABULARY_BLOCK", 1024)  # a third of 12 × 64
    embedding = WEIGHTS["embed_tokens"].clone().requires_grad_()
    trained = DiffusionGemma(CONFIG, WEIGHTS | {"embed_tokens": embedding})
    hidden = draw(12, 32)
    trained.head(hidden + trained.soften(5 * draw(12, 64))).sum().backward()
    assert embedding.grad is not None and (embedding.grad != 0).any(-1).all()


# ── packed weights ────────────────────────────────────────────────────────────────────────────────────────────────


def pack(name: str, weight: Tensor, layout: str) -> Weight:
    """What a checkpoint of this layout would hold; NVFP4 leaves alone what is no multiple of 16 wide."""
    if weight.dim() == 1 or "router" in name:
        return weight
    if layout == "fp8" or (layout == "mixed" and "experts" not in name):
        return quantise_fp8(weight)
    if weight.shape[-1] % 16 or name == "embed_tokens":
        return weight
    rows = weight.shape[-2]
    return quantise_nvfp4(weight, (rows // 2, rows - rows // 2) if "gate_up" in name else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["fp8", "nvfp4", "mixed"])
def test_a_packed_model_is_the_model_of_its_decoded_weights(
    layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill, first step, and a step with self-conditioning; norms say in which dtype, even above an FP8 embedding."""
    packed = {k: pack(k, w.to(dtype), layout) for k, w in WEIGHTS.items()}
    decoded = {k: w if isinstance(w, Tensor) else w.decode(dtype) for k, w in packed.items()}
    assert sum(not isinstance(w, Tensor) for w in packed.values()) >= 12
    prompt, canvas = (torch.tensor(FORWARD[2][k]) for k in ("prompt", "canvas"))

    def steps(model: DiffusionGemma) -> list[Tensor]:
        assert model.dtype == dtype
        cache = model.new_cache()
        first_hidden = encode(model, prompt, cache)
        first = model.denoise(canvas, cache, None)
        return [first_hidden, first, model.denoise(canvas, cache, model.signal(first / 0.7))]

    wanted = steps(DiffusionGemma(CONFIG, decoded))
    whole = steps(DiffusionGemma(CONFIG, packed))
    monkeypatch.setattr(quant, "CPU_BLOCK", 1024)  # eight rows of 32
    blocks = steps(DiffusionGemma(CONFIG, packed))
    for one, many, want in zip(whole, blocks, wanted, strict=True):
        close(one, want, 1e-5 if dtype == torch.float32 else 0.07)  # logits of 7: two steps of bf16
        close(many, want, 5e-5 if dtype == torch.float32 else 0.25)


def test_the_real_model_has_25_billion_parameters(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((GOLDEN / "config.google-26b.json").read_text())
    shapes = parameter_shapes(load_model_config(tmp_path))
    assert 25.2e9 < sum(torch.Size(shape).numel() for shape in shapes.values()) < 25.3e9
    assert shapes["layers.0.self_attn.qkv_proj"] == (4096 + 2 * 2048, 2816)
    assert shapes["layers.5.self_attn.qkv_proj"] == (8192 + 1024, 2816)
    assert shapes["layers.29.experts.gate_up_proj"] == (128, 1408, 2816)
