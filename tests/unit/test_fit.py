"""The plan: against the bytes that a run really holds, against the published sizes, and what it says of a budget."""

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from live_bytes import LiveBytes

from dgemma_local import fit, model, noise
from dgemma_local.card import MIB, Card, Holder
from dgemma_local.config import GenerationConfig, LayerConfig, ModelConfig, RopeConfig, load_model_config
from dgemma_local.engine import Conversation
from dgemma_local.errors import DoesNotFit
from dgemma_local.fit import GB, Estimate, Resident, budget, choose, estimate, largest_context, lighter, verdict
from dgemma_local.model import DiffusionGemma, parameter_shapes
from dgemma_local.noise import PhiloxNoise
from dgemma_local.quant import Weight, quantise_fp8, quantise_nvfp4
from dgemma_local.registry import Entry

GOLDEN = Path(__file__).parent.parent / "golden"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def geometry(
    *,
    pattern: str = "ssfsf",
    vocab: int = 16384,
    canvas: int = 64,
    hidden: int = 256,
    intermediate: int = 192,
    expert: int = 64,
    experts: int = 16,
    top_k: int = 4,
    heads: int = 8,
    kv: int = 2,
    full_kv: int = 1,
    dim: int = 32,
    full_dim: int = 64,
    window: int = 128,
    context: int = 8192,
) -> ModelConfig:
    kinds = {
        "s": LayerConfig(kind="sliding", head_dim=dim, kv_heads=kv),
        "f": LayerConfig(kind="full", head_dim=full_dim, kv_heads=full_kv),
    }
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        self_conditioning_size=intermediate,
        expert_size=expert,
        num_experts=experts,
        top_k=top_k,
        heads=heads,
        layers=tuple(kinds[letter] for letter in pattern),
        sliding_window=window,
        rope={"sliding": RopeConfig(theta=1e4, rotating=1.0), "full": RopeConfig(theta=1e6, rotating=0.25)},
        rms_eps=1e-6,
        softcap=30.0,
        canvas_length=canvas,
        max_positions=context,
        dtype=None,
    )


# ── the plan against what is then alive ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Case:
    """A geometry, a context, and what is the largest of the working memory there."""

    config: ModelConfig
    context: int
    largest: str


WIDE = {"hidden": 128, "intermediate": 256, "dim": 64, "full_dim": 128, "kv": 4, "full_kv": 2}
CASES = {
    "vocabulary": Case(geometry(vocab=32768, canvas=32, hidden=128), 32 + 96, "canvas × vocabulary"),
    "vocabulary, wide attention": Case(geometry(vocab=12288, canvas=96, **WIDE), 96 + 64, "canvas × vocabulary"),
    "experts in prefill": Case(geometry(vocab=2048, top_k=8), 64 + 1024, "prefill chunk"),
    "attention in prefill": Case(
        geometry(vocab=2048, heads=16, top_k=1, pattern="sssf", **WIDE), 64 + 512, "prefill chunk"
    ),
    "masks of a long context": Case(
        geometry(vocab=512, top_k=1, pattern="fsf", window=512), 64 + 2048, "prefill chunk"
    ),
    "a canvas longer than its prompt": Case(geometry(vocab=1024, canvas=256, top_k=8), 256 + 40, "denoising step"),
}
STEPS = GenerationConfig(
    steps=2, t_min=0.4, t_max=0.8, entropy_bound=1e6, confidence=0.0, stability=9, end_ids=(), pad_id=0
)


def random_model(config: ModelConfig, compute: str, packed: dict[str, str]) -> DiffusionGemma:
    draw = torch.Generator().manual_seed(0)
    weights: dict[str, Weight] = {}
    for name, shape in parameter_shapes(config).items():
        plain = torch.randn(shape, generator=draw) * (shape[-1] ** -0.5 if len(shape) > 1 else 1.0)
        form = next((form for part, form in packed.items() if part in name), "")
        quantise = {"fp8": quantise_fp8, "nvfp4": quantise_nvfp4}.get(form)
        weights[name] = plain.to(DTYPES[compute]) if quantise is None else quantise(plain.bfloat16())
    return DiffusionGemma(config, weights)


def blocks_in_proportion(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the real model, a canvas of logits is eight blocks."""
    block = 4 * config.canvas_length * config.vocab_size // 8
    monkeypatch.setattr(noise, "BLOCK_BYTES", block)
    monkeypatch.setattr(model, "VOCABULARY_BLOCK", block)


def measure(network: DiffusionGemma, plan: Estimate) -> tuple[int, int]:
    """-> bytes of the cache and at the peak: the longest prompt and its canvas."""
    config = network.config
    prompt = torch.randint(config.vocab_size, (plan.context - config.canvas_length,)).tolist()
    with LiveBytes() as live:
        conversation = Conversation(network, plan.room)
        cache = live.now
        draws = PhiloxNoise(1, config.canvas_length, config.vocab_size, torch.device("cpu"))
        *_, last = conversation.answer(prompt, STEPS, draws, max_tokens=10_000)
        assert live.now < cache + 2 * MIB  # the logits are gone
    assert last.reason == "context" and last.steps == 2  # type: ignore[union-attr]
    return cache, live.peak


@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_what_is_then_allocated(name: str, compute: fit.Compute, monkeypatch: pytest.MonkeyPatch) -> None:
    """To 2 %, without a byte of weights to hide behind; the cache exactly."""
    case = CASES[name]
    blocks_in_proportion(case.config, monkeypatch)
    plan = estimate(
        case.config, {}, context=case.context, compute=compute, device="cpu", slack=case.config.canvas_length
    )
    cache, peak = measure(random_model(case.config, compute, {}), plan)
    assert max((part for part in plan.components if part.working), key=lambda part: part.bytes).name == case.largest
    assert cache == next(part.bytes for part in plan.components if part.name == "KV cache")
    assert plan.allocated == pytest.approx(peak, rel=0.02)


NVFP4 = {("experts", "nvfp4"): 0, ("dense MLP", "nvfp4"): 0}
PACKED: dict[str, tuple[dict[str, str], Resident]] = {
    "experts and dense MLP": ({"experts.": "nvfp4", "mlp.": "nvfp4"}, NVFP4),
    "the same in FP8": ({"experts.": "fp8", "mlp.": "fp8"}, {("experts", "fp8"): 0, ("dense MLP", "fp8"): 0}),
    "attention": ({"qkv_proj": "fp8", "o_proj": "fp8"}, {("attention", "fp8"): 0}),
    "embedding": ({"embed_tokens": "fp8"}, {("embedding", "fp8"): 0}),
}


@pytest.mark.parametrize("packed", PACKED)
def test_blocks_of_packed_weights_are_in_the_plan(packed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small pass through large matrices: what is decoded is most of what is alive."""
    forms, resident = PACKED[packed]
    wide = 96 if packed == "attention" else 32
    config = geometry(
        vocab=2048, canvas=16, hidden=512, intermediate=1024, expert=256, experts=4, heads=16, pattern="sf", dim=wide
    )
    blocks_in_proportion(config, monkeypatch)
    plan = estimate(config, resident, context=16 + 48, device="cpu", slack=16)
    without = estimate(config, {}, context=16 + 48, device="cpu", slack=16)
    assert plan.allocated > 1.5 * without.allocated
    _, peak = measure(random_model(config, "bf16", forms), plan)
    assert plan.allocated == pytest.approx(peak, rel=0.02)


# ── the published checkpoints ─────────────────────────────────────────────────────────────────────────────────────

# Bytes of the released model's parts as each checkpoint stores them; its vision tower left out
BF16 = {
    ("embedding", "bf16"): 1_476_395_008,
    ("self-conditioning", "bf16"): 35_684_352,
    ("router", "bf16"): 21_626_880,
    ("norms and scalars", "bf16"): 1_406_584,
}
EXPERTS, ATTENTION = ("experts", "nvfp4"), ("attention", "bf16")
FP8_ATTENTION = {("attention", "fp8"): 1_110_850_560}
REDHAT = BF16 | {EXPERTS: 12_846_458_880, ("dense MLP", "nvfp4"): 301_087_440, ATTENTION: 2_220_359_680}
NVIDIA = BF16 | {EXPERTS: 12_846_458_880, ("dense MLP", "bf16"): 1_070_530_560, ATTENTION: 2_220_359_680}
FP8 = BF16 | {("experts", "fp8"): 22_870_425_600, ("dense MLP", "fp8"): 535_687_680} | FP8_ATTENTION
VISION = {("vision", "bf16"): 1_145_588_832}
CARD_4090 = Card(index=0, name="NVIDIA GeForce RTX 4090", uuid="GPU-1", total=24564 * MIB, free=24200 * MIB)
CARD_5090 = Card(index=0, name="NVIDIA GeForce RTX 5090", uuid="GPU-2", total=32607 * MIB, free=32100 * MIB)
CARD_H200 = Card(index=0, name="NVIDIA H200", uuid="GPU-3", total=143771 * MIB, free=143156 * MIB)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("real")
    (folder / "config.json").write_bytes((GOLDEN / "config.google-26b.json").read_bytes())
    return load_model_config(folder)


def on(found: fit.Budget | None) -> fit.Budget:
    assert found is not None
    return found


def with_fp8_attention(resident: Resident) -> Resident:
    return {key: size for key, size in resident.items() if key != ATTENTION} | FP8_ATTENTION


def test_redhat_s_nvfp4_fits_18_gb_with_8192_tokens(real: ModelConfig) -> None:
    """All but the CUDA context, and even with four canvases to step back."""
    plan = estimate(real, REDHAT, context=8192)
    assert (plan.weights, plan.slack) == (16_903_018_824, 1024)
    assert plan.allocated <= 18_000_000_000
    assert verdict(plan, on(budget(vram=18.0))).plan == plan


def test_nvidia_s_nvfp4_is_refused_at_18_gb_and_fits_with_fp8_attention(real: ModelConfig) -> None:
    plan = estimate(real, NVIDIA, context=8192)
    said = verdict(plan, on(budget(vram=18.0)))
    assert not said.fits and said.plan is None and said.cures == ("take --fp8-attention",)
    assert said.line == (
        "does not fit: 8,192 tokens of context need 18.67 GB, and 18.00 GB were given; the weights alone are 17.67 GB"
    )
    assert verdict(plan.at(resident=with_fp8_attention(NVIDIA)), on(budget(vram=18.0))).fits


def test_fp8_is_refused_on_a_4090_with_the_sizes(real: ModelConfig) -> None:
    said = verdict(estimate(real, FP8, context=8192), on(budget(card=CARD_4090)))
    assert said.plan is None and said.cures == ("take the NVFP4 format",)
    assert said.line == "does not fit: the weights alone are 26.05 GB, and NVIDIA GeForce RTX 4090 has 25.76 GB"
    error = said.error("26b-a4b-fp8")
    assert isinstance(error, DoesNotFit)
    assert (error.what, error.fix) == (f"26b-a4b-fp8 {said.line}", "take the NVFP4 format")


def test_the_lighter_forms_are_the_published_bytes(real: ModelConfig) -> None:
    names = ["the model without its vision tower", "the NVFP4 format", "--fp8-attention"]
    forms = list(lighter(real, FP8 | VISION))
    assert forms == [
        (names[0], FP8),
        (" and ".join(names[:2]), REDHAT),
        (" and ".join(names), with_fp8_attention(REDHAT)),
    ]
    assert list(lighter(real, NVIDIA)) == [("--fp8-attention", with_fp8_attention(NVIDIA))]
    assert not list(lighter(real, with_fp8_attention(REDHAT)))


def test_what_the_parts_of_the_real_plan_are(real: ModelConfig) -> None:
    """By hand: a token takes 20,480 bytes of the full layers and 204,800 of the sliding ones, logits are 268 MB."""
    plan = estimate(real, REDHAT, context=8192, slack=256)
    sizes = {part.name: part.bytes for part in plan.components}
    assert sizes["KV cache"] == 8192 * 20_480 + (1023 + 512) * 204_800
    assert estimate(real, {}, context=8192).components[0].bytes == 8192 * 20_480 + (1023 + 1024 + 256) * 204_800
    assert 80e6 < sizes["canvas × vocabulary"] - 268_435_456 < 90e6
    assert sizes["denoising step"] < sizes["prefill chunk"] < 200e6
    assert plan.working == sizes["canvas × vocabulary"]
    assert plan.allocated == plan.weights + sizes["KV cache"] + sizes["rotary tables"] + plan.working
    assert plan.total == plan.allocated + fit.CUDA_CONTEXT
    assert estimate(real, REDHAT, context=8192, device="cpu").cuda_context == 0


# ── what is said of a budget ──────────────────────────────────────────────────────────────────────────────────────

SMALL = geometry(vocab=4096, window=64, context=4096)
WEIGHTS: Resident = {("experts", "bf16"): 3_000_000, ("attention", "bf16"): 1_000_000, ("vision", "bf16"): 500_000}


def given_bytes(size: int, asked: bool = True) -> fit.Budget:
    return fit.Budget(bytes=size, place="a place", asked=asked)


@given(context=st.integers(65, 4096), share=st.floats(0.0, 1.2))
@settings(max_examples=60, deadline=None)
def test_a_verdict_keeps_its_word(context: int, share: float) -> None:
    """What it plans fits; what it refuses does not; one token more than the most it allows does not."""
    asked = estimate(SMALL, WEIGHTS, context=context)
    size = int(share * asked.allocated)
    said, lean = verdict(asked, given_bytes(size)), asked.at(slack=64)
    assert said.fits == (lean.allocated <= size)
    assert bool(said.cures) is not said.fits
    if said.plan is None:
        assert lean.at(context=65).allocated > size and said.line.startswith("does not fit: ")
        return
    assert said.plan.allocated <= size and said.plan.context <= context
    assert said.plan.slack == (256 if asked.allocated <= size else 64)
    if said.fits:
        assert said.line.startswith("fits: ")
    else:
        assert lean.at(context=said.plan.context + 1).allocated > size
        assert said.line.startswith(f"fits with a context of at most {said.plan.context:,} tokens: ")
        assert said.cures[0] == f"ask for a context of at most {said.plan.context:,} tokens"


def test_a_plan_grows_with_its_context_and_its_slack() -> None:
    sizes = [estimate(SMALL, {}, context=context).allocated for context in range(65, 4097, 37)]
    assert sizes == sorted(sizes)
    wide = [estimate(SMALL, {}, context=4096, slack=slack).allocated for slack in (64, 256, 640, 1024)]
    assert wide == sorted(wide)


def test_a_context_without_room_for_a_prompt_has_no_plan() -> None:
    with pytest.raises(ValueError, match="a context of 64 tokens has no room beside a canvas of 64"):
        estimate(SMALL, {}, context=64)
    short = estimate(SMALL, {}, context=100)
    assert largest_context(short, given_bytes(1000)) is None
    assert largest_context(short, given_bytes(10**12)) == SMALL.max_positions


def test_a_budget_is_what_was_asked_for_or_what_is_free() -> None:
    assert budget(vram=18.0, card=CARD_4090, host=5) == fit.Budget(
        bytes=18_000_000_000, place="--vram", card=CARD_4090, asked=True
    )
    assert budget(vram=17.9) == fit.Budget(bytes=17_900_000_000, place="--vram", asked=True)
    assert budget(card=CARD_4090, host=5) == fit.Budget(bytes=24200 * MIB, place=CARD_4090.name, card=CARD_4090)
    assert budget(host=5) == fit.Budget(bytes=5, place="this computer")
    assert budget() is None and budget(card=replace(CARD_4090, free=None), host=5) is None


def test_the_context_of_cuda_counts_on_a_card_and_not_in_what_was_asked_for() -> None:
    asked = estimate(SMALL, WEIGHTS, context=1000)
    assert verdict(asked, given_bytes(asked.allocated)).fits
    assert not verdict(asked, given_bytes(asked.allocated, asked=False)).fits
    assert verdict(asked, given_bytes(asked.total, asked=False)).fits


def test_too_much_never_reads_like_enough(real: ModelConfig) -> None:
    plan = estimate(real, REDHAT, context=8192, slack=256)
    short = given_bytes(plan.allocated // 10_000_000 * 10_000_000)
    assert plan.allocated - short.bytes < 5_000_000  # it would round to the same
    assert float(fit.needs(plan, short)[:5]) == float(fit.gb(short.bytes)[:5]) + 0.01


def test_who_holds_the_card_is_named_when_that_would_do(real: ModelConfig) -> None:
    asked = estimate(real, REDHAT, context=8192)
    busy = (Holder(pid=1, name="python3", bytes=5000 * MIB), Holder(pid=2, name="Xorg", bytes=900 * MIB))

    def cures(free: int, holders: tuple[Holder, ...]) -> tuple[str, ...]:
        return verdict(asked, on(budget(card=replace(CARD_4090, free=free * MIB, holders=holders)))).cures

    first, both = "python3 (pid 1, 5,000 MiB)", "python3 (pid 1, 5,000 MiB), Xorg (pid 2, 900 MiB)"
    other = "use a card with 18.25 GB free"
    assert cures(16_900, busy) == (f"end what else holds the card: {first}", "take --fp8-attention")
    assert cures(12_000, busy) == (f"end what else holds the card: {both}", other)
    assert cures(11_000, busy) == (other,)
    assert cures(12_000, (busy[1], replace(busy[0], bytes=None))) == (other,)


# ── auto ──────────────────────────────────────────────────────────────────────────────────────────────────────────

TABLE = (
    Entry(name="demo", format="bf16", needs=0.0),
    Entry(name="demo-fp8", format="fp8", needs=0.0, bytes=1),
    Entry(name="demo-nvfp4", format="nvfp4", needs=0.0, bytes=1),
    Entry(name="bf16", format="bf16", needs=48.9, bytes=51_647_701_024),
    Entry(name="fp8", format="fp8", needs=26.1, bytes=27_200_864_632),
    Entry(name="nvidia", format="nvfp4", needs=18.3, bytes=18_823_855_888),
    Entry(name="redhat", format="nvfp4", needs=17.6, bytes=18_048_607_656),
)
TOO_LARGE = "FP8 would not fit, its files are 27.20 GB"


def of(total: float) -> tuple[Card, ...]:
    return (Card(index=0, name="a card", uuid="", total=int(total * GB), free=None),)


@pytest.mark.parametrize(
    ("cards", "prefer", "name", "reason"),
    [
        ((CARD_4090,), None, "redhat", f"NVFP4: NVIDIA GeForce RTX 4090 has 25.76 GB; {TOO_LARGE}"),
        ((CARD_4090,), "quality", "redhat", f"NVFP4: NVIDIA GeForce RTX 4090 has 25.76 GB; {TOO_LARGE}"),
        ((CARD_5090,), None, "redhat", "NVFP4: NVIDIA GeForce RTX 5090 has 34.19 GB; FP8 is taken from 40 GB on"),
        ((CARD_5090,), "quality", "fp8", "FP8: NVIDIA GeForce RTX 5090 has 34.19 GB"),
        ((CARD_H200, CARD_4090), None, "fp8", "FP8: NVIDIA H200 has 150.75 GB"),
        (of(18.0), None, "redhat", f"NVFP4: a card has 18.00 GB; {TOO_LARGE}"),
        (of(31.9), "quality", "redhat", "NVFP4: a card has 31.90 GB; FP8 is taken from 32 GB on"),
        (of(32.0), "quality", "fp8", "FP8: a card has 32.00 GB"),
        (of(39.9), None, "redhat", "NVFP4: a card has 39.90 GB; FP8 is taken from 40 GB on"),
        (of(40.0), None, "fp8", "FP8: a card has 40.00 GB"),
        ((), None, "redhat", f"NVFP4: no NVIDIA card is known here; {TOO_LARGE}"),
    ],
)
def test_auto(cards: tuple[Card, ...], prefer: str | None, name: str, reason: str) -> None:
    chosen = choose(TABLE, cards, prefer)  # type: ignore[arg-type]
    assert chosen is not None and (chosen.entry.name, chosen.reason) == (name, reason)


def test_auto_with_a_budget_and_with_a_shorter_table() -> None:
    given_18 = choose(TABLE, (CARD_H200,), vram=18.0)
    assert given_18 is not None and given_18.entry.name == "redhat"
    assert given_18.reason == f"NVFP4: 18.00 GB were given; {TOO_LARGE}"
    only = choose([entry for entry in TABLE if entry.format != "nvfp4"], of(24.0))
    assert only is not None and only.entry.name == "fp8"
    assert choose([entry for entry in TABLE if entry.needs == 0], of(24.0)) is None
    assert choose((), ()) is None


def test_a_plan_s_types_come_without_torch() -> None:
    code = "import sys, dgemma_local.fit, dgemma_local.card; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
