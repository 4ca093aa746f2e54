"""A denoising step's end against its twin, and the twin against the model's head, the sampler and the soft embedding."""

import dataclasses

import pytest
import torch
from dgemma_local.kernels import draw, logits, soft, soft_fp8
from dgemma_local.kernels import vocabulary as under_test
from dgemma_local.kernels._launch import ADA, BLACKWELL, HOPPER, Tile, recording
from dgemma_local.kernels.vocabulary import (
    Across,
    Key,
    Step,
    chunk_ids,
    transpose_codes,
    vocabulary_step,
    vocabulary_step_twin,
)
from near import assert_near, assert_no_worse
from torch import Tensor

from dgemma_local import sampler
from dgemma_local.config import GenerationConfig
from dgemma_local.model import DiffusionGemma
from dgemma_local.noise import PhiloxNoise
from dgemma_local.quant import E4M3_MAX, Fp8, quantise_fp8

CAP, SCALE, SEED, ATTEMPT, CANVAS, STEP = 30.0, 9.8, 2**63 + 987654321, 2, 5, 7
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
COOL = torch.tensor([0.6])


@pytest.fixture(autouse=True)
def few_large_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 rows of many ids: the interpreter takes its time by operations, and by rows that are not there."""
    for name, span in (("REFERENCE_TILES", 2048), ("FAST_TILES", 512)):
        monkeypatch.setattr(draw, name, {ADA.capability: Tile(16, span // 4, span, 4, 1)})
    for kind in logits.TILES:
        monkeypatch.setitem(logits.TILES, kind, {ADA.capability: Tile(16, 256, 64, 4, 2)})
    for kind in soft.TILES:
        monkeypatch.setitem(soft.TILES, kind, {ADA.capability: Tile(16, 128, 256, 4, 2)})
    monkeypatch.setattr(soft_fp8, "TILES", {ADA.capability: Tile(16, 128, 256, 4, 2)})


def key(step: int = STEP) -> Key:
    return Key.of(SEED, ATTEMPT, CANVAS, torch.tensor([step], dtype=torch.int32))


def rows(T: int, D: int, dtype: torch.dtype, seed: int = 0, size: float = 1.0) -> Tensor:
    return (torch.randn(T, D, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)


def fp8_rows(x: Tensor) -> Fp8:
    scale = x.float().abs().amax(-1, keepdim=True) / E4M3_MAX
    return Fp8((x.float() / scale).to(torch.float8_e4m3fn), scale)


def operands(kind: str, T: int, V: int, D: int, dtype: torch.dtype) -> tuple[Tensor | Fp8, Tensor | Fp8]:
    hidden, E = rows(T, D, dtype, 1), rows(V, D, dtype, 2, 0.9)
    if kind == "plain":
        return hidden, E
    packed = quantise_fp8(E.float() if dtype == FP16 else E)
    return (hidden if kind == "widened" else fp8_rows(hidden)), packed


def across_of(kind: str, E: Tensor | Fp8) -> Across | None:
    return transpose_codes(E) if kind == "across" and isinstance(E, Fp8) else None


def wide(x: Tensor | Fp8) -> Tensor | Fp8:
    return x if isinstance(x, Fp8) else x.double()


def assert_steps(ours: Step, twin: Step, truth: Step, equal: float) -> None:
    assert torch.equal(ours.draft, twin.draft)
    assert torch.equal(ours.sampled, twin.sampled)
    assert ours.entropy.dtype == FP32
    # an ulp of a z of 50 is 4e-6, and moves an entropy as far
    torch.testing.assert_close(ours.entropy, twin.entropy, rtol=0, atol=1e-5)
    if len(ours.entropy) > 1:  # the error of one row is chance; z's is 4.5 ulp here, 3 in the twin
        assert_no_worse(ours.entropy, twin.entropy, truth.entropy, 2)
    assert ours.soft is not None
    assert twin.soft is not None
    assert truth.soft is not None
    assert_near(ours.soft, twin.soft, 2, equal)
    assert_no_worse(ours.soft, twin.soft, truth.soft)


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize(
    ("kind", "T", "V", "D"),
    [
        ("plain", 1, 77, 48),
        ("across", 1, 77, 48),
        *((kind, 12, 1031, 96) for kind in ("plain", "widened", "fp8", "across")),
        ("widened", 40, 640, 64),
        ("across", 40, 640, 64),
    ],
)
def test_bf16(kind: str, T: int, V: int, D: int, reference: bool) -> None:
    hidden, E = operands(kind, T, V, D, BF16)
    across = across_of(kind, E)
    arguments = (CAP, COOL, SCALE, key(), reference, True)
    twin = vocabulary_step_twin(hidden, E, *arguments, BF16, across, 512)
    truth = vocabulary_step_twin(wide(hidden), wide(E), *arguments, FP64)
    ours = vocabulary_step(hidden, E, *arguments, BF16, across, 512)
    # without across the fast weights are rounded about their chunk's maximum, the twin's about the row's
    assert_steps(ours, twin, truth, 0.99 if reference else 0.98 if across else 0.85)


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize("kind", ["plain", "widened", "across"])
def test_other_dtypes(kind: str, dtype: torch.dtype, reference: bool) -> None:
    hidden, E = operands("widened" if kind == "across" else kind, 12, 1031, 96, dtype)
    across = across_of(kind, E)
    arguments = (CAP, COOL, SCALE, key(), reference, True)
    ours, twin = (f(hidden, E, *arguments, None, across, 512) for f in (vocabulary_step, vocabulary_step_twin))
    if across:  # a code of p that falls to the other side moves its row by 2^-4 of itself
        for name in ("draft", "sampled"):
            assert torch.equal(getattr(ours, name), getattr(twin, name))
        assert ours.soft is not None
        assert twin.soft is not None
        assert (ours.soft.double() - twin.soft.double()).norm() < 1e-3 * twin.soft.double().norm()
        return
    if dtype == FP16:
        truth = vocabulary_step_twin(wide(hidden), wide(E), *arguments, FP64)
        assert_steps(ours, twin, truth, 0.99 if reference else 0.85)
        return
    assert torch.equal(ours.draft, twin.draft)
    assert torch.equal(ours.sampled, twin.sampled)
    torch.testing.assert_close(ours.entropy, twin.entropy, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.soft, twin.soft, rtol=2e-6, atol=1e-4)  # an ulp of z is 4e-6 of a weight


def network(E: Tensor | Fp8, softcap: float, dtype: torch.dtype) -> DiffusionGemma:
    """As much of a model as its head and its soft embedding read."""
    model = object.__new__(DiffusionGemma)

    @dataclasses.dataclass
    class Config:
        vocab_size: int = E.shape[0]

    config = Config()
    config.softcap = softcap  # type: ignore[attr-defined]
    model.config, model.embed_tokens, model.dtype, model.embed_scale = config, E, dtype, SCALE  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_reference_twin_is_the_model_and_the_sampler(dtype: torch.dtype) -> None:
    """Bit for bit: head, then sampler.advance, then soften."""
    hidden, E = rows(12, 64, dtype, 3), rows(1031, 64, dtype, 4, 0.9)
    model = network(E, CAP, dtype)
    config = GenerationConfig(
        steps=48, t_min=0.4, t_max=0.8, entropy_bound=3.0, confidence=0.0, stability=1, end_ids=(1,), pad_id=0
    )
    noise = PhiloxNoise(SEED, 12, 1031, torch.device("cpu"), ATTEMPT)
    with torch.inference_mode():
        logits = model.head(hidden)
        after = sampler.advance(sampler.Canvas(CANVAS, STEP, torch.zeros(12).long()), logits, config, noise)
        assert after.logits is not None
        soft = model.soften(after.logits)
    t = sampler.temperature(config, STEP).view(1)
    twin = vocabulary_step_twin(hidden, E, CAP, t, SCALE, key())
    ours = vocabulary_step(hidden, E, CAP, t, SCALE, key())
    assert after.accepted is not None
    assert after.accepted.any()
    for step in (twin, ours):
        assert torch.equal(step.draft, after.draft)
        assert torch.equal(step.sampled[after.accepted], after.next[after.accepted])
    assert torch.equal(twin.entropy, after.entropy)
    assert torch.equal(twin.soft, soft)


def test_fp8_reference_near_the_model() -> None:
    """There the scale multiplies E, which is rounded; here p. Either may differ by a step or two of bf16."""
    hidden, E = operands("widened", 12, 700, 96, BF16)
    assert isinstance(hidden, Tensor)
    model = network(E, CAP, BF16)
    logits = model.head(hidden)
    ours = vocabulary_step(hidden, E, CAP, COOL, SCALE, key())
    apart = (ours.entropy - sampler.entropies(logits / COOL)).abs()
    assert apart.mean() < 0.02  # a step of a bf16 logit of 16 … 30 is 0.125
    assert ours.soft is not None
    soft = model.soften(logits / COOL)
    assert (ours.soft.double() - soft.double()).norm() < 0.02 * soft.double().norm()


@pytest.mark.parametrize("reference", [True, False])
def test_saturated_logits(reference: bool) -> None:
    """Products of ±1,000 and beyond: tanh is ±1, whole rows tie at ±30 / t, and the lowest id wins."""
    E = torch.zeros(300, 16, dtype=BF16)
    E[:, 0] = torch.where(torch.arange(300) % 3 == 1, 10.0, -10.0)
    hidden = torch.zeros(4, 16, dtype=BF16)
    hidden[:, 0] = torch.tensor([100.0, -100.0, 3e38, 0.0])
    arguments = (hidden, E, CAP, torch.tensor([0.4]), SCALE, key(), reference)
    ours, twin = vocabulary_step(*arguments, chunk=128), vocabulary_step_twin(*arguments)
    assert ours.draft.tolist() == [1, 0, 1, 0]
    assert torch.equal(ours.sampled, twin.sampled)
    torch.testing.assert_close(ours.entropy, torch.tensor([100.0, 200.0, 100.0, 300.0]).log(), rtol=1e-6, atol=0)
    assert ours.soft is not None
    assert twin.soft is not None
    assert_near(ours.soft, twin.soft)


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("V", [2, 33, 129, 500])
def test_ties_and_ids_past_the_end(V: int, reference: bool) -> None:
    """All logits equal and very negative: an id past the end, whose logit would be 0, must never show."""
    E = torch.full((V, 32), -1.0, dtype=BF16)
    hidden = torch.full((16, 32), 1.0, dtype=BF16)
    ours = vocabulary_step(hidden, E, CAP, COOL, SCALE, key(), reference, chunk=256)
    twin = vocabulary_step_twin(hidden, E, CAP, COOL, SCALE, key(), reference)
    assert ours.draft.tolist() == [0] * 16
    assert torch.equal(ours.sampled, twin.sampled)
    assert int(ours.sampled.max()) < V
    torch.testing.assert_close(ours.entropy, torch.tensor([float(V)]).log().expand(16), rtol=1e-6, atol=1e-6)
    assert ours.soft is not None
    torch.testing.assert_close(ours.soft.float(), torch.tensor(-SCALE).expand(16, 32), rtol=8e-3, atol=0)


@pytest.mark.parametrize("reference", [True, False])
def test_certain_rows(reference: bool) -> None:
    """One id far ahead, in any chunk: no words are drawn for the other tiles, the entropy is 0, the soft row is E's."""
    E = torch.zeros(1100, 32, dtype=BF16)
    at = torch.tensor([0, 127, 128, 511, 512, 1023, 1024, 1099])
    E[at, torch.arange(8)] = 16.0
    hidden = E[at]
    ours = vocabulary_step(hidden, E, CAP, torch.tensor([0.4]), SCALE, key(), reference, chunk=512)
    twin = vocabulary_step_twin(hidden, E, CAP, torch.tensor([0.4]), SCALE, key(), reference)
    for step in (ours, twin):
        assert torch.equal(step.draft, at)
        assert torch.equal(step.sampled, at)
        assert step.entropy.abs().max() < 1e-6
        assert step.soft is not None
        torch.testing.assert_close(step.soft, (hidden.float() * SCALE).to(BF16), rtol=0, atol=1e-20)


def test_near_uniform_rows_split_anywhere() -> None:
    """Logits of 1e-3: every tile has a share; the result depends on no chunk, but for the last bit of a sum."""
    hidden, E = rows(16, 32, BF16, 8, 0.01), rows(1500, 32, BF16, 9, 0.1)
    steps = [vocabulary_step(hidden, E, CAP, COOL, SCALE, key(), False, chunk=n) for n in (256, 1536)]
    twin = vocabulary_step_twin(hidden, E, CAP, COOL, SCALE, key(), False)
    for step in steps:
        assert torch.equal(step.draft, twin.draft)
        assert torch.equal(step.sampled, twin.sampled)
        torch.testing.assert_close(step.entropy, twin.entropy, rtol=5e-7, atol=0)
        assert step.soft is not None
        assert twin.soft is not None
        # 1,500 weights near 1 that bf16 rounds by 2^-9: of what cancels down to 0.02, a few steps remain
        torch.testing.assert_close(step.soft, twin.soft, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize(
    ("kind", "bad"), [("plain", float("nan")), *((kind, float("inf")) for kind in ("plain", "widened", "across"))]
)
def test_broken_rows_stay_alone(kind: str, bad: float, reference: bool) -> None:
    """NaN in a row is NaN in its entropy and soft row, its ids are ids, and its neighbours do not notice."""
    hidden, plain = rows(5, 32, BF16, 10), rows(600, 32, BF16, 11)
    hidden[3, 7] = bad
    plain[9, 7] = 0.0  # times infinity: NaN
    E = plain if kind == "plain" else quantise_fp8(plain)
    sound_again = [0, 1, 2, 4]
    ours = vocabulary_step(hidden, E, CAP, COOL, SCALE, key(), reference, across=across_of(kind, E), chunk=256)
    assert ours.entropy[3].isnan()
    assert ours.soft is not None
    assert ours.soft[3].isnan().all()
    assert ours.soft[sound_again].isfinite().all()
    assert 0 <= int(ours.draft[3]) < 600
    assert 0 <= int(ours.sampled[3]) < 600
    assert ours.entropy[sound_again].isfinite().all()
    assert torch.equal(
        ours.draft[sound_again], vocabulary_step_twin(hidden, E, CAP, COOL, SCALE, key()).draft[sound_again]
    )


@pytest.mark.parametrize("reference", [True, False])
def test_same_bits_again_and_without_soft(reference: bool) -> None:
    """Whether there is a soft embedding, and how it is made, the other three do not notice."""
    hidden, E = operands("fp8", 12, 1031, 96, BF16)
    across = across_of("across", E)
    arguments = (hidden, E, CAP, COOL, SCALE, key(), reference)
    first, second = (vocabulary_step(*arguments, dtype=BF16, across=across, chunk=512) for _ in range(2))
    widened = vocabulary_step(*arguments, dtype=BF16, chunk=512)
    bare = [vocabulary_step(*arguments, False, BF16, each, 512) for each in (None, across)]
    for name in ("draft", "entropy", "sampled"):
        for other in (second, widened, *bare):
            assert torch.equal(getattr(first, name), getattr(other, name))
    assert torch.equal(first.soft, second.soft)
    assert [step.soft for step in bare] == [None, None]
    assert first.soft is not None
    assert widened.soft is not None
    apart = (first.soft.double() - widened.soft.double()).norm() / widened.soft.double().norm()
    assert 0.01 < apart < 0.06  # p in 4 bits


def test_samples_follow_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chi-square of 1,024 samples of one row's softmax over 40 ids; 99.9 % of true samplers stay below 72."""
    monkeypatch.setattr(draw, "REFERENCE_TILES", {ADA.capability: Tile(256, 32, 128, 4, 1)})
    monkeypatch.setitem(logits.TILES, "bf16", {ADA.capability: Tile(256, 64, 32, 4, 2)})
    E = rows(40, 32, BF16, 12, 0.25)
    hidden = rows(1, 32, BF16, 13).expand(256, -1).contiguous()
    drawn = torch.cat([vocabulary_step(hidden, E, CAP, COOL, SCALE, key(s), soft=False).sampled for s in range(4)])
    z = (torch.nn.functional.linear(hidden[:1], E).double() / CAP).tanh() * CAP / 0.6
    expected = z.softmax(-1)[0] * len(drawn)
    counts = torch.bincount(drawn, minlength=40).double()
    assert float(((counts - expected).square() / expected).sum()) < 72
    assert counts.count_nonzero() > 10


def test_the_cards_own_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for reference, V in ((True, 4140), (False, 1100)):
        hidden, E = operands("plain", 1, V, 32, BF16)
        ours = vocabulary_step(hidden, E, CAP, COOL, SCALE, key(), reference, soft=not reference)
        twin = vocabulary_step_twin(hidden, E, CAP, COOL, SCALE, key(), reference)
        assert torch.equal(ours.draft, twin.draft)
        assert torch.equal(ours.sampled, twin.sampled)
        if ours.soft is not None and twin.soft is not None:
            assert_near(ours.soft, twin.soft, 2, 0.85)


def test_launches_and_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On meta tensors of the real sizes: six launches, or three a chunk; no tensor of 256 × 262,144 fp32."""
    monkeypatch.undo()
    meta = {"device": "meta"}
    hidden, E = torch.empty(256, 2816, dtype=BF16, **meta), torch.empty(262_144, 2816, dtype=BF16, **meta)
    on_card = Key(torch.empty(3, dtype=torch.int32, **meta), torch.empty(1, dtype=torch.int32, **meta))
    for gpu in (ADA, HOPPER, BLACKWELL):
        for reference, E_reads in ((True, 2), (False, 1)):
            with recording(gpu) as launches:
                step = vocabulary_step(hidden, E, CAP, torch.empty(1, **meta), 53.0, on_card, reference)
            assert step.soft is not None
            assert (step.soft.shape, step.soft.dtype) == ((256, 2816), BF16)
            largest = max(t.nbytes for x in launches for t in x.args if isinstance(t, Tensor) and t is not E)
            assert largest <= 256 * 262_144 * 2
            assert E_reads * E.nbytes < sum(x.cost.bytes for x in launches) < (E_reads + 0.6) * E.nbytes
            ids = 262_144 if reference else chunk_ids(gpu, hidden, E)
            assert len(launches) == (6 if reference else 3 * -(-262_144 // ids) + 2)
            assert ids % 1024 == 0


def test_launches_across(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both products at the FP8 rate, each copy of E read once, and a launch less."""
    monkeypatch.undo()
    hidden, E = (Fp8.empty((T, 2816), dtype, "meta") for T, dtype in ((256, FP32), (262_144, BF16)))
    across = transpose_codes(E)
    numbers = torch.empty(3, dtype=torch.int32, device="meta"), torch.empty(1, dtype=torch.int32, device="meta")
    cool = torch.empty(1, device="meta")
    for gpu in (ADA, HOPPER, BLACKWELL):
        for reference in (True, False):
            with recording(gpu) as launches:
                vocabulary_step(hidden, E, CAP, cool, 53.0, Key(*numbers), reference, across=across)
            products = [x for x in launches if x.name in ("logits", "soft_fp8")]
            assert {x.cost.rate for x in products} == {"fp8"}
            assert all(x.constants["EVEN"] for x in products if x.name == "soft_fp8")
            assert sum(x.cost.flops for x in products) == 4 * 256 * 262_144 * 2816
            moved, codes = sum(x.cost.bytes for x in launches), E.nbytes + across.nbytes
            assert 0.99 * codes < moved < (1.35 if reference else 1.03) * codes
            if reference:
                assert len(launches) == 5


@pytest.mark.parametrize("size", [1, 16, 256, 512])
def test_chunks_fit_their_cards(size: int) -> None:
    hidden = torch.empty(size, 2816, dtype=BF16, device="meta")
    for gpu in (ADA, HOPPER, BLACKWELL):
        for E in (torch.empty(262_144, 2816, dtype=BF16, device="meta"), Fp8.empty((262_144, 2816), device="meta")):
            ids, row = chunk_ids(gpu, hidden, E), E.nbytes // 262_144
            assert ids >= 1024
            assert ids * row <= under_test.CHUNK_BYTES[gpu.capability] * 1.01


def test_errors() -> None:
    hidden, E = rows(4, 32, BF16), rows(64, 32, BF16)
    with pytest.raises(ValueError, match=r"vocabulary_step: hidden \(4, 32\), E \(64, 16\)"):
        vocabulary_step(hidden, E[:, :16].contiguous(), CAP, COOL, SCALE, key())
    across = transpose_codes(quantise_fp8(rows(60, 32, BF16)))
    with pytest.raises(ValueError, match=r"vocabulary_step: E \(64, 32\), across \(32, 64\)"):
        vocabulary_step(hidden, E, CAP, COOL, SCALE, key(), across=across)
    with pytest.raises(ValueError, match=r"temperature \(1,\) torch.float64"):
        vocabulary_step(hidden, E, CAP, COOL.double(), SCALE, key())
    with pytest.raises(ValueError, match="key"):
        vocabulary_step(hidden, E, CAP, COOL, SCALE, Key(key().numbers.long(), key().step))
    with pytest.raises(ValueError, match="ids 0 … 63"):
        vocabulary_step(fp8_rows(hidden), E, CAP, COOL, SCALE, key(), dtype=BF16)
    with pytest.raises(ValueError, match=r"draw: .* ids 100 …"):
        vocabulary_step(hidden, rows(300, 32, BF16), CAP, COOL, SCALE, key(), False, chunk=100)
