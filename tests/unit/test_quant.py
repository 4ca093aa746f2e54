"""Every code under every scale, compressed-tensors' own numbers, and operations on packed weights."""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dgemma_local import quant
from dgemma_local.quant import Fp8, Nvfp4, Weight, quantise_fp8, quantise_nvfp4

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
DTYPES = [BF16, torch.float16, torch.float32, torch.float64]
VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_bytes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def same(ours: Tensor, want: Tensor) -> None:
    """Bit for bit: −0 is not 0."""
    assert ours.dtype == want.dtype and ours.shape == want.shape
    assert torch.equal(ours, want) and torch.equal(ours.signbit(), want.signbit())


def bits(t: Tensor) -> Tensor:
    return t.view(torch.uint8)


def e4m3(byte: int) -> float:
    """OCP 8-bit floating point, E4M3: bias 7, no infinity, 0x7F is not a number."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return (-1.0 if byte & 128 else 1.0) * (float("nan") if byte & 127 == 127 else magnitude)


def nvfp4(
    packed: Tensor, scale: Tensor, global_scale: Tensor, heights: tuple[int, ...] = (), divides: bool = True
) -> Nvfp4:
    return Nvfp4(
        packed, scale, global_scale, torch.ones_like(global_scale), heights or (packed.shape[-2],), divides=divides
    )


def some_nvfp4(*shape: int, heights: tuple[int, ...] = (), divides: bool = True, seed: int = 0) -> Nvfp4:
    """Random bytes under positive, finite scales; the parts' global scales are far apart."""
    *lead, out, width = shape
    scale = random_bytes(*lead, out, width // 16, seed=seed + 1) % 0x7F
    parts = len(heights) or 1
    global_scale = 1000 * 7.0 ** torch.arange(parts) * (1 + draw(*lead, parts, seed=seed).abs())
    packed = random_bytes(*lead, out, width // 2, seed=seed)
    return nvfp4(packed, scale.view(FP8), global_scale if divides else 1 / global_scale, heights, divides)


def some_fp8(*shape: int, scale_dtype: torch.dtype = BF16) -> Fp8:
    codes = random_bytes(*shape)
    codes[codes % 128 == 127] = 0
    return Fp8(codes.view(FP8), (draw(*shape[:-1], 1).abs() / 100).to(scale_dtype))


PACKED: dict[str, Callable[..., Fp8 | Nvfp4]] = {
    "fp8": some_fp8,
    "fp8, fp32 scale": lambda *shape: some_fp8(*shape, scale_dtype=torch.float32),
    "nvfp4": some_nvfp4,
    "nvfp4, two parts": lambda *shape: some_nvfp4(*shape, heights=(shape[-2] // 3, shape[-2] - shape[-2] // 3)),
    "nvfp4, ModelOpt": lambda *shape: some_nvfp4(*shape, divides=False),
}
packed_weights = pytest.mark.parametrize("some", PACKED.values(), ids=PACKED.keys())


# ── every code ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", [1372.5, 0.00067, 78923.4])
@pytest.mark.parametrize("divides", [True, False])
def test_every_fp4_code_under_every_scale_in_both_nibbles(dtype: torch.dtype, stored: float, divides: bool) -> None:
    """16 codes × 127 finite scales × two places, and the other nibble of the byte changes nothing."""
    scales = torch.arange(0x7F, dtype=torch.uint8).view(FP8)
    wanted_scales = torch.tensor([e4m3(byte) for byte in range(0x7F)])
    g = torch.tensor([stored])
    unit = wanted_scales / g if divides else wanted_scales * g
    for other in range(16):
        codes = torch.arange(16, dtype=torch.uint8)
        for packed, mine, theirs in ((codes | other << 4, 0, 1), (codes << 4 | other, 1, 0)):
            row = packed.repeat_interleave(8)  # a byte fills a group: 16 weights
            got = nvfp4(row.expand(0x7F, -1), scales[:, None].expand(-1, 16), g, divides=divides).decode(dtype)
            got = got.view(0x7F, 16, 8, 2)
            values = torch.tensor(VALUES)
            same(got[..., mine], (values[:, None] * unit[:, None, None]).to(dtype).expand(-1, -1, 8))
            same(got[..., theirs], (values[other] * unit).to(dtype)[:, None, None].expand(-1, 16, 8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.0123291015625, 3.0])
def test_every_fp8_code(dtype: torch.dtype, scale: float) -> None:
    codes = torch.arange(256, dtype=torch.uint8)[None].view(FP8)
    got = Fp8(codes, torch.tensor([[scale]], dtype=BF16)).decode(dtype)[0]
    want = (torch.tensor([e4m3(byte) for byte in range(256)]) * torch.tensor(scale)).to(dtype)
    assert torch.equal(got.isnan(), want.isnan()) and got.isnan().nonzero()[:, 0].tolist() == [127, 255]
    finite = ~want.isnan()
    same(got[finite], want[finite])


def test_the_fp32_product_is_rounded_once() -> None:
    """1.625 · (1 + 2⁻⁸) would become 1.6328125 when the scale is rounded to bf16 first."""
    weight = Fp8(torch.tensor([[1.625, 1.0]]).to(FP8), torch.tensor([[1 + 2.0**-8]]))
    same(weight.decode(torch.float32), torch.tensor([[1.625 * (1 + 2.0**-8), 1 + 2.0**-8]]))
    same(weight.decode(BF16), torch.tensor([[1.6328125, 1.0]], dtype=BF16))


def test_a_worked_example() -> None:
    weight = nvfp4(
        torch.tensor([[0x2B, 0x70, 0x05, 0xF1, 0x00, 0x88, 0x13, 0x64]], dtype=torch.uint8),
        torch.tensor([[0x3C]], dtype=torch.uint8).view(FP8),
        torch.tensor([1024.0]),
    )
    want = [-0.002197265625, 0.00146484375, 0, 0.0087890625, 0.00439453125, 0, 0.000732421875, -0.0087890625]
    want += [0, 0, -0.0, -0.0, 0.002197265625, 0.000732421875, 0.0029296875, 0.005859375]
    for dtype in DTYPES:
        same(weight.decode(dtype), torch.tensor([want]).to(dtype))


def test_packing() -> None:
    codes = quant.e2m1(torch.tensor([0.5, -6.0, 1.0, 3.0]))
    assert codes.tolist() == [1, 15, 2, 5]
    assert quant.pack(codes).tolist() == [0xF1, 0x52]


def test_codes_are_the_nearest_and_ties_go_to_the_even_one() -> None:
    assert quant.e2m1(torch.tensor(VALUES)).tolist() == [*range(8), 0, *range(9, 16)]  # −0 is written as 0
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert quant.e2m1(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    above, below = ties.nextafter(torch.tensor(9.0)), ties.nextafter(torch.tensor(0.0))
    assert quant.e2m1(above).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert quant.e2m1(below).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert quant.e2m1(-below).tolist() == [8, 9, 10, 11, 12, 13, 14]
    assert quant.e2m1(torch.tensor([1e9, -1e9])).tolist() == [7, 15]


# ── compressed-tensors ────────────────────────────────────────────────────────────────────────────────────────────


def scheme(name: str) -> Any:
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    found: QuantizationScheme = preset_name_to_scheme(name, ["Linear"])
    return found


def compressor(layout: str) -> Any:
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry(layout)


def theirs(w: Nvfp4) -> Tensor:
    state = {"weight_packed": w.packed, "weight_scale": w.scale, "weight_global_scale": w.global_scale}
    decoded: Tensor = compressor("nvfp4-pack-quantized").decompress(state, scheme("NVFP4"))["weight"]
    return decoded.detach()


@pytest.mark.parametrize("seed", range(3))
def test_compressed_tensors_decodes_nvfp4_alike(seed: int) -> None:
    weight = some_nvfp4(96, 352, seed=seed)
    same(weight.decode(BF16), theirs(weight))


def test_compressed_tensors_decodes_fp8_alike() -> None:
    weight = some_fp8(96, 352)
    state = {"weight": weight.codes, "weight_scale": weight.scale}
    decoded = compressor("float-quantized").decompress(state, scheme("FP8_DYNAMIC"))["weight"]
    same(weight.decode(BF16), decoded.detach())


def test_compressed_tensors_converts_modelopt_alike() -> None:
    """Its converter takes the global scale's reciprocal. That rounds in fp32, which bf16 does not show."""
    from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import ModelOptNvfp4Converter

    def converted(w: Nvfp4) -> Tensor:
        stored = {
            "a.experts.0.up_proj.weight": w.packed,
            "a.experts.0.up_proj.weight_scale": w.scale,
            "a.experts.0.up_proj.weight_scale_2": w.global_scale[0],
            "a.experts.0.up_proj.input_scale": w.input_scale[0],
        }
        made = ModelOptNvfp4Converter(targets=["re:.*experts.*"]).process(dict(stored))
        parts = (made[f"a.experts.0.up_proj.weight_{part}"] for part in ("packed", "scale", "global_scale"))
        packed, scale, global_scale = parts
        return theirs(nvfp4(packed, scale, global_scale.reshape(1)))

    exact = some_nvfp4(96, 352, divides=False)
    exact.global_scale.fill_(2.0**-11)
    same(exact.decode(BF16), converted(exact))
    weight = some_nvfp4(96, 352, divides=False, seed=1)
    same(weight.decode(BF16), converted(weight))


def observed(w: Tensor, name: str) -> tuple[Tensor, Tensor | None]:
    """What the published calibration's min-max observer makes of a weight: scale, global scale."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = scheme(name).weights
    global_scale = generate_gparam(w.amin(), w.amax()) if name == "NVFP4" else None
    groups = w.unflatten(-1, (-1, 16)) if name == "NVFP4" else w[:, None]
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=global_scale)
    return scale, global_scale


WEIGHTS = {
    "gaussian": lambda: draw(64, 352) / 50,
    "wide": lambda: draw(64, 352) * (3 * draw(64, 352, seed=1)).exp(),  # groups whose scale is too small for E4M3
    "zero rows": lambda: draw(64, 352) * (torch.arange(64) % 3 > 0)[:, None],
    "zero": lambda: torch.zeros(64, 352),
    "steps": lambda: torch.randint(-8, 9, (64, 352), generator=torch.Generator().manual_seed(2)) / 4,  # many ties
    "tiny": lambda: draw(64, 352) * 1e-37,  # scales that bf16 holds with a bit or two
    "negative zeros": lambda: -torch.zeros(64, 352).index_fill(1, torch.arange(0, 352, 5), 1.0),
}


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_compressed_tensors_quantises_to_the_same_bytes(weight: Callable[[], Tensor], dtype: torch.dtype) -> None:
    w = weight().to(dtype)
    scale, _ = observed(w, "FP8_DYNAMIC")
    made = compressor("float-quantized").compress({"weight": w, "weight_scale": scale}, scheme("FP8_DYNAMIC"))
    ours = quantise_fp8(w)
    same(ours.scale, made["weight_scale"])
    assert torch.equal(bits(ours.codes), bits(made["weight"]))

    scale, global_scale = observed(w, "NVFP4")
    state = {"weight": w, "weight_scale": scale, "weight_global_scale": global_scale}
    made = compressor("nvfp4-pack-quantized").compress(state, scheme("NVFP4"))
    packed = quantise_nvfp4(w)
    same(packed.global_scale, made["weight_global_scale"])
    assert torch.equal(bits(packed.scale), bits(made["weight_scale"]))
    assert torch.equal(packed.packed, made["weight_packed"])
    for decoded in (ours.decode(dtype), packed.decode(dtype)):
        assert decoded.isfinite().all() and (decoded[(w == 0).all(-1)] == 0).all()


# ── there and back ────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_quantising_costs() -> None:
    """Relative RMS error on Gaussian weights: 2.6 % and 9.5 %; as mean |error| / mean |weight|, 2.2 % and 9.0 %."""
    w = draw(512, 1024) / 50

    def error(q: Fp8 | Nvfp4) -> float:
        return ((q.decode(torch.float32) - w).norm() / w.norm()).item()

    assert error(quantise_fp8(w)) == pytest.approx(0.0264, abs=0.0005)
    assert error(quantise_nvfp4(w)) == pytest.approx(0.0953, abs=0.001)


def test_quantising_by_blocks_is_quantising(monkeypatch: pytest.MonkeyPatch) -> None:
    w = draw(3, 20, 32).to(BF16)
    whole = quantise_fp8(w)
    monkeypatch.setattr(quant, "CPU_BLOCK", 4 * 32 * 3)
    blocks = quantise_fp8(w)
    assert torch.equal(bits(whole.codes), bits(blocks.codes)) and torch.equal(whole.scale, blocks.scale)


@given(st.data())
def test_what_was_decoded_quantises_to_itself(data: st.DataObject) -> None:
    """Any parts, any leading axes: a second pass changes no weight."""
    heights = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    lead = data.draw(st.sampled_from([(), (2,), (2, 2)]))
    w = draw(*lead, sum(heights), 16 * data.draw(st.integers(1, 3)), seed=data.draw(st.integers(0, 99)))
    once = quantise_nvfp4(w, heights)
    assert once.shape == tuple(w.shape) and once.heights == heights and once.divides
    assert once.global_scale.shape == (*lead, len(heights))
    decoded = once.decode(torch.float32)
    assert (
        decoded - w
    ).abs().max() <= w.abs().max() / 5  # half of the widest gap between codes, 4 to 6, and a scale's error
    parts = [quantise_nvfp4(part).decode(torch.float32) for part in w.split(heights, -2)]
    same(decoded, torch.cat(parts, -2))
    again = quantise_nvfp4(decoded, heights)
    torch.testing.assert_close(again.decode(torch.float32), decoded, rtol=1e-6, atol=0)


# ── parts, rows, experts ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("divides", [True, False])
def test_each_part_has_its_own_global_scale(divides: bool) -> None:
    """Gate and up, q and k and v: as if each had been stored alone."""
    for heights in ((5, 3), (4, 2, 2)):
        fused = some_nvfp4(3, 8, 32, heights=heights, divides=divides)
        for p, (begin, end) in enumerate(pairwise(accumulate([0, *heights]))):
            alone = nvfp4(
                fused.packed[:, begin:end], fused.scale[:, begin:end], fused.global_scale[:, p : p + 1], divides=divides
            )
            same(fused.decode(BF16)[:, begin:end], alone.decode(BF16))


@packed_weights
def test_some_rows_are_rows_of_all(some: Callable[..., Fp8 | Nvfp4]) -> None:
    """Slices within a part, across parts, from the end, and none."""
    for weight in (some(9, 48), some(2, 9, 48)):
        whole = weight.decode(BF16)
        for begin in range(-9, 10):
            for end in [*range(-9, 10), None]:
                same(weight.decode(BF16, slice(begin, end)), whole[..., begin:end, :])
        inner = weight.rows(slice(2, 8))
        assert inner.shape == (*whole.shape[:-2], 6, 48)
        same(inner.decode(BF16, slice(1, 4)), whole[..., 3:6, :])


def test_rows_are_one_run() -> None:
    with pytest.raises(ValueError, match="one run"):
        some_nvfp4(8, 32).rows(slice(0, 8, 2))


@packed_weights
def test_one_expert_is_a_view(some: Callable[..., Fp8 | Nvfp4]) -> None:
    stack = some(4, 9, 32)
    whole = stack.decode(torch.float32)
    for e in range(4):
        assert stack[e].shape == (9, 32)
        same(stack[e].decode(torch.float32), whole[e])
        first = stack[e].codes if isinstance(stack[e], Fp8) else stack[e].packed
        base = stack.codes if isinstance(stack, Fp8) else stack.packed
        assert first.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


def test_sizes() -> None:
    """One expert's gate and up of the released model, as stored: 1,408 × 2,816."""
    fp8 = Fp8.empty((1408, 2816))
    assert fp8.nbytes == 1408 * 2816 + 2 * 1408 and fp8.scale.dtype == BF16
    assert Fp8.empty((1408, 2816), torch.float32).nbytes == 1408 * 2816 + 4 * 1408
    gate_up = Nvfp4.empty((2, 1408, 2816), (704, 704), divides=False)
    assert gate_up.nbytes == 2 * (1408 * 1408 + 1408 * 176 + 2 * 4 + 2 * 4) and not gate_up.divides
    assert Nvfp4.empty((6, 32)).heights == (6,)
    for weight in (fp8, gate_up):
        assert weight.numel() == torch.Size(weight.shape).numel() and weight.device.type == "cpu"
    assert gate_up.shape == (2, 1408, 2816) and gate_up[1].nbytes == gate_up.nbytes // 2


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Fp8(torch.empty(4, 32).to(FP8), torch.ones(4)),
        lambda: Fp8(torch.empty(4, 32).to(FP8), torch.ones(4, 1).to(torch.float16)),
        lambda: nvfp4(random_bytes(4, 16), random_bytes(4, 1).view(FP8), torch.ones(1)),
        lambda: nvfp4(random_bytes(4, 16), random_bytes(4, 2).view(FP8), torch.ones(2)),
        lambda: nvfp4(random_bytes(4, 16), random_bytes(4, 2).view(FP8), torch.ones(2), (3, 2)),
        lambda: nvfp4(random_bytes(4, 12), random_bytes(4, 1).view(FP8), torch.ones(1)),
    ],
)
def test_fields_that_do_not_belong_together_are_refused(wrong: Callable[[], Weight]) -> None:
    with pytest.raises(ValueError, match=r"wanted"):
        wrong()


# ── operations: the same as on the decoded matrix ─────────────────────────────────────────────────────────────────


def near(ours: Tensor, want: Tensor) -> None:
    """Sums in another order: within fp32 rounding, and one step of the dtype."""
    assert ours.dtype == want.dtype and ours.shape == want.shape
    eps = torch.finfo(want.dtype).eps
    torch.testing.assert_close(ours, want, rtol=2 * eps, atol=1e-5 * want.abs().max().item())


@pytest.fixture(params=["one block", "small blocks"])
def check(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor, Tensor], None]:
    if request.param == "one block":
        return same
    monkeypatch.setattr(quant, "CPU_BLOCK", 4 * 48 * 4)  # four rows of 48
    return near


@packed_weights
@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float64], ids=str)
def test_operations(
    some: Callable[..., Fp8 | Nvfp4], dtype: torch.dtype, check: Callable[[Tensor, Tensor], None]
) -> None:
    w, x, p = some(26, 48), draw(3, 5, 48).to(dtype), draw(2, 7, 26).softmax(-1).to(dtype)
    plain = w.decode(dtype)
    check(quant.linear(x, w), F.linear(x, plain))
    check(quant.weighted_rows(p, w), p @ plain)
    ids = torch.tensor([[0, 25, 3], [9, 9, 8]])
    same(quant.embedding(w, ids, dtype), plain[ids])
    same(quant.rows_of(w, slice(3, 9)).decode(dtype), plain[3:9])

    stack, rows = some(5, 26, 48), draw(12, 48, seed=1).to(dtype)
    ends = torch.tensor([0, 4, 4, 11, 12], dtype=torch.int32)  # two experts without rows
    weight, starts = stack.decode(dtype), [0, 0, 4, 4, 11]
    parts = [F.linear(rows[a:b], weight[e]) for e, (a, b) in enumerate(zip(starts, ends.tolist(), strict=True))]
    check(quant.grouped_linear(rows, stack, ends), torch.cat(parts))
    assert quant.grouped_linear(rows[:0], stack, 0 * ends).shape == (0, 26)


def test_plain_tensors_take_torch_s_own_operations() -> None:
    """And stay differentiable, with leading axes."""
    x, w = draw(2, 3, 32), draw(8, 32).requires_grad_()
    same(quant.linear(x, w), F.linear(x, w))
    same(quant.embedding(w, torch.tensor([3, 1]), BF16), w[[3, 1]])
    p = draw(2, 3, 8)
    same(quant.weighted_rows(p, w), p @ w)
    same(quant.rows_of(w, slice(2, 4)), w[2:4])
    (quant.linear(x, w).sum() + quant.weighted_rows(p, w).sum()).backward()
    assert w.grad is not None and w.grad.abs().min() > 0
    stack, ends = draw(3, 8, 32).requires_grad_(), torch.tensor([2, 2, 6], dtype=torch.int32)
    same(quant.grouped_linear(x.flatten(0, 1), stack, ends), F.grouped_mm(x.flatten(0, 1), stack.mT, offs=ends))
    (quant.grouped_linear(x.flatten(0, 1), stack, ends) * draw(6, 8)).sum().backward()
    assert stack.grad is not None and (stack.grad[1] == 0).all() and stack.grad[2].abs().min() > 0


def test_blocks_are_bounded_and_experts_without_rows_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    decode = Nvfp4.decode

    def watch(self: Nvfp4, dtype: torch.dtype, rows: slice = quant.EVERYTHING) -> Tensor:
        made = decode(self, dtype, rows)
        seen.append(tuple(made.shape))
        return made

    monkeypatch.setattr(Nvfp4, "decode", watch)
    monkeypatch.setattr(quant, "CPU_BLOCK", 4 * 48 * 10)
    stack = some_nvfp4(5, 26, 48)
    quant.grouped_linear(draw(3, 48), stack, torch.tensor([0, 2, 2, 3, 3], dtype=torch.int32))
    assert seen == 2 * [(10, 48), (10, 48), (6, 48)]
    seen.clear()
    quant.weighted_rows(draw(2, 26), stack[0])
    assert seen == [(10, 48), (10, 48), (6, 48)]


def test_tables_made_in_inference_mode_serve_training_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in (quant._e4m3_table, quant._e2m1_pairs):
        table.cache_clear()
    with torch.inference_mode():
        weights: list[Fp8 | Nvfp4] = [some_fp8(8, 32), some_nvfp4(8, 32)]
        decoded = [w.decode(torch.float32) for w in weights]
    for w, plain in zip(weights, decoded, strict=True):
        x = draw(3, 32).requires_grad_()
        same(w.decode(torch.float32), plain)
        quant.linear(x, w).sum().backward()
        assert x.grad is not None
