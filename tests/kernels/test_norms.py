"""The norms against their twins, the twins against the reference's roundings, and the fused FP8 rows by their law."""

from typing import Any

import pytest
import torch
from dgemma_local.kernels import norms
from dgemma_local.kernels._launch import HOPPER, recording
from dgemma_local.kernels.rows import quantise_rows_twin
from near import assert_near, assert_no_worse
from torch import Tensor

from dgemma_local.quant import Fp8

EPS = 1e-6
IN_FP32 = {"steps": 6, "equal": 0.0}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [(1, 2816), (5, 64), (3, 100), (2, 1)]  # the real width; a power of two; neither; a single number


def rows(count: int, width: int, dtype: torch.dtype, seed: int = 0, size: float = 3.0) -> Tensor:
    return (torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)


def weight(width: int, dtype: torch.dtype, seed: int) -> Tensor:
    return rows(1, width, dtype, seed, 0.5)[0] + 1


def wide(*tensors: Any) -> list[Any]:
    return [t.double() if isinstance(t, Tensor) else t for t in tensors]


def check(ours: Tensor, twin: Tensor, truth: Tensor) -> None:
    """In 16 bits the three questions. In fp32 the order of a sum moves a whole row by a step, the twin's and ours alike."""
    if ours.dtype == torch.float32:
        assert_near(ours, truth.float(), **IN_FP32)
    else:
        assert_near(ours, twin)
        assert_no_worse(ours, twin, truth)


# ── the twins keep the reference's roundings, bit for bit ─────────────────────────────────────────────────────────


def unit_of(x: Tensor) -> Tensor:
    """x / rms(x), not rounded."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS)


def norm_of(x: Tensor, w: Tensor | None) -> Tensor:
    """Rounded once, after the product with the weight."""
    return (unit_of(x) if w is None else unit_of(x) * w.to(torch.promote_types(w.dtype, torch.float32))).to(x.dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("lead", [(6,), (2, 3)])
@pytest.mark.parametrize("width", [96, 2816])
def test_twins_round_where_the_reference_does(dtype: torch.dtype, lead: tuple[int, ...], width: int) -> None:
    """modeling_diffusion_gemma.py's decoder layer, from what attention, MLP and experts return."""
    x, residual, routed = (rows(6, width, dtype, s).view(*lead, width) for s in range(3))
    w = [weight(width, dtype, s) for s in range(10, 16)]
    scalar = torch.tensor([0.37], dtype=dtype)

    assert torch.equal(norms.rms_norm_twin(x, w[0], EPS), norm_of(x, w[0]))  # type: ignore[arg-type]
    assert torch.equal(norms.rms_norm_twin(x, None, EPS), norm_of(x, None))  # type: ignore[arg-type]

    r = residual + norm_of(x, w[0])
    h, (one, two, bare) = norms.sandwich_twin(x, residual, w[0], (w[1], w[2], None), EPS)
    assert torch.equal(h, r)
    for ours, w_i in ((one, w[1]), (two, w[2]), (bare, None)):
        assert torch.equal(ours, norm_of(r, w_i))  # type: ignore[arg-type]
    assert torch.equal(norms.sandwich_twin(x, residual, w[0], (w[1],), EPS)[1][0], one)  # type: ignore[arg-type]

    y, n = norms.combine_twin(x, routed, residual, w[3], w[4], w[5], scalar, EPS, w[0])
    assert torch.equal(y, (residual + norm_of(norm_of(x, w[3]) + norm_of(routed, w[4]), w[5])) * scalar)
    assert isinstance(n, Tensor) and torch.equal(n, norm_of(y, w[0]))
    assert norms.combine_twin(x, routed, residual, w[3], w[4], w[5], scalar, EPS)[1] is None


def test_twins_carry_gradients() -> None:
    x, residual = (rows(3, 8, torch.float64, s).requires_grad_() for s in range(2))
    w = [weight(8, torch.float64, s).requires_grad_() for s in range(5)]
    scalar = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    whole = lambda *t: norms.combine_twin(*t, EPS, t[3])  # noqa: E731
    assert torch.autograd.gradcheck(whole, (x, residual, x, *w[:3], scalar))
    both = lambda x, r, a, b, c: [h := norms.sandwich_twin(x, r, a, (b, c), EPS), (h[0], *h[1])][1]  # noqa: E731
    assert torch.autograd.gradcheck(both, (x, residual, *w[:3]))


# ── the kernels against the twins ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "width"), SIZES)
def test_rms_norm(count: int, width: int, dtype: torch.dtype) -> None:
    x, w = rows(count, width, dtype), weight(width, dtype, 1)
    for scale in (w, None):
        check(
            norms.rms_norm(x, scale, EPS), norms.rms_norm_twin(x, scale, EPS), norms.rms_norm_twin(*wide(x, scale), EPS)
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "width"), SIZES)
@pytest.mark.parametrize("readers", [1, 2])
def test_sandwich(count: int, width: int, dtype: torch.dtype, readers: int) -> None:
    x, residual = rows(count, width, dtype), rows(count, width, dtype, 1)
    post, *pres = (weight(width, dtype, s) for s in range(2, 3 + readers))
    h, normed = norms.sandwich(x, residual, post, tuple(pres), EPS)
    twin_h, twins = norms.sandwich_twin(x, residual, post, tuple(pres), EPS)
    true_h, truths = norms.sandwich_twin(*wide(x, residual, post), wide(*pres), EPS)
    check(h, twin_h, true_h)
    for ours, twin, truth in zip(normed, twins, truths, strict=True):
        check(ours, twin, truth)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "width"), SIZES)
@pytest.mark.parametrize("last", [True, False])
def test_combine(count: int, width: int, dtype: torch.dtype, last: bool) -> None:
    dense, routed, residual = (rows(count, width, dtype, s) for s in range(3))
    w = [weight(width, dtype, s) for s in range(3, 7)]
    arguments = (dense, routed, residual, *w[:3], torch.tensor([0.37], dtype=dtype))
    following = None if last else w[3]
    y, n = norms.combine(*arguments, EPS, following)
    twin_y, twin_n = norms.combine_twin(*arguments, EPS, following)
    true_y, true_n = norms.combine_twin(*wide(*arguments), EPS, *wide(following))
    check(y, twin_y, true_y)
    if last:
        assert n is None
    else:
        check(n, twin_n, true_n)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
def test_combine_sums_the_experts_pairs_first(dtype: torch.dtype) -> None:
    dense, residual = (rows(5, 100, dtype, s) for s in range(2))
    pairs = norms.Pairs(rows(5 * 3, 100, dtype, 2), torch.rand(5, 3, generator=torch.Generator().manual_seed(0)) + 0.1)
    w = [weight(100, dtype, s) for s in range(3, 7)]
    rest = (residual, *w[:3], torch.tensor([0.37], dtype=dtype))
    exact = norms.Pairs(pairs.y.double(), pairs.weights.double())
    ours, twin = (f(dense, pairs, *rest, EPS, w[3]) for f in (norms.combine, norms.combine_twin))
    truth = norms.combine_twin(dense.double(), exact, *wide(*rest), EPS, *wide(w[3]))
    for mine, theirs, true in zip(ours, twin, truth, strict=True):
        check(mine, theirs, true)  # type: ignore[arg-type]


def test_combine_sums_in_the_order_of_the_slots() -> None:
    """Of 1e8, 1, -1e8 and 1 only the last is left in fp32; in another order more is."""
    y = torch.tensor([1e8, 1.0, -1e8, 1.0]).view(4, 1) * torch.tensor([1.0, 2.0, 4.0])
    zero, one = torch.zeros(1, 3), torch.ones(3)
    got, _ = norms.combine(zero, norms.Pairs(y, torch.ones(1, 4)), zero, one, one, one, torch.ones(1), EPS)
    want, _ = norms.combine(zero, torch.tensor([[1.0, 2.0, 4.0]]), zero, one, one, one, torch.ones(1), EPS)
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 7])
def test_combine_with_a_scalar_for_each_row(count: int, dtype: torch.dtype) -> None:
    """Every row is what it would be alone, with one scalar, bit for bit."""
    dense, residual = (rows(count, 100, dtype, s) for s in range(2))
    pairs = norms.Pairs(rows(count * 3, 100, dtype, 2), torch.rand(count, 3) + 0.1)
    w, scalar = [weight(100, dtype, s) for s in range(3, 7)], rows(1, count, dtype, 9)[0]
    for form in (norms.combine, norms.combine_twin):
        y, n = form(dense, pairs, residual, *w[:3], scalar, EPS, w[3])
        assert isinstance(n, Tensor)
        for t in range(count):
            alone = norms.Pairs(pairs.y[3 * t : 3 * t + 3], pairs.weights[t : t + 1])
            row = slice(t, t + 1)
            one_y, one_n = form(dense[row], alone, residual[row], *w[:3], scalar[row], EPS, w[3])
            assert torch.equal(y[row], one_y) and torch.equal(n[row], one_n)  # type: ignore[arg-type]


def test_the_twins_scalars_are_the_rows_of_any_leading_axes() -> None:
    x, scalar = rows(6, 32, torch.float32).view(2, 3, 32), torch.tensor([0.5, 2.0, -3.0])
    w = weight(32, torch.float32, 1)
    y, _ = norms.combine_twin(x, x, x, w, w, w, scalar, EPS)
    ones, _ = norms.combine_twin(x, x, x, w, w, w, torch.ones(1), EPS)
    assert torch.equal(y, ones * scalar.view(1, 3, 1))


def test_a_canvas_of_256_rows() -> None:
    x, residual = rows(256, 64, torch.bfloat16), rows(256, 64, torch.bfloat16, 1)
    w = weight(64, torch.bfloat16, 2)
    h, (n,) = norms.sandwich(x, residual, w, (w,), EPS)
    twin_h, (twin_n,) = norms.sandwich_twin(x, residual, w, (w,), EPS)
    assert_near(h, twin_h)
    assert_near(n, twin_n)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros_and_huge_rows_stay_what_the_twin_makes_of_them(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.zeros(5, 100, dtype=dtype)
    x[1] = largest  # its square is infinite, but for fp16: 0, as the reference has it
    x[2, 7] = largest / 4
    x[3] = 1e-7  # its square is lost beside eps
    x[4, 3] = torch.inf
    w, residual = weight(100, dtype, 1), torch.zeros(5, 100, dtype=dtype)
    near = IN_FP32 if dtype == torch.float32 else {}
    assert_near(norms.rms_norm(x, w, EPS), norms.rms_norm_twin(x, w, EPS), **near)  # type: ignore[arg-type]
    h, (n,) = norms.sandwich(x, residual, w, (w,), EPS)
    twin_h, (twin_n,) = norms.sandwich_twin(x, residual, w, (w,), EPS)
    assert_near(h, twin_h, **near)
    assert_near(n, twin_n, **near)  # type: ignore[arg-type]
    arguments = (x, x, residual, w, w, w, torch.ones(1, dtype=dtype), EPS, w)
    for ours, twin in zip(norms.combine(*arguments), norms.combine_twin(*arguments), strict=True):
        assert_near(ours, twin, **near)  # type: ignore[arg-type]


# ── FP8 rows of the same pass ─────────────────────────────────────────────────────────────────────────────────────


def quantised(n: Tensor) -> Fp8:
    """The law itself, by torch's own conversion."""
    scale = n.float().abs().amax(-1, keepdim=True) / 448
    scale[scale == 0] = 1
    return Fp8((n.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale)


def assert_codes(ours: Any, plain: Tensor) -> None:
    want = quantised(plain)
    assert torch.equal(ours.scale, want.scale)
    assert torch.equal(ours.codes.view(torch.uint8), want.codes.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "width"), SIZES)
def test_quantised_rows_are_the_codes_of_the_rounded_row(count: int, width: int, dtype: torch.dtype) -> None:
    """Bit for bit: of the row that the same kernel writes when it does not quantise."""
    x, residual = rows(count, width, dtype), rows(count, width, dtype, 1)
    x[-1] = 0
    w = [weight(width, dtype, s) for s in range(2, 6)]
    assert_codes(norms.rms_norm(x, w[0], EPS, quantise=True), norms.rms_norm(x, w[0], EPS))  # type: ignore[arg-type]
    _, plain = norms.sandwich(x, residual, w[0], (w[1], w[2]), EPS)
    _, packed = norms.sandwich(x, residual, w[0], (w[1], w[2]), EPS, quantise=True)
    for ours, n in zip(packed, plain, strict=True):
        assert_codes(ours, n)  # type: ignore[arg-type]
    for mixed in ((True, False), (False, True)):
        _, some = norms.sandwich(x, residual, w[0], (w[1], w[2]), EPS, quantise=mixed)
        for ours, n, is_packed in zip(some, plain, mixed, strict=True):
            (assert_codes if is_packed else assert_near)(ours, n)  # type: ignore[arg-type]
    arguments = (x, residual, residual, *w[:3], torch.tensor([0.37], dtype=dtype), EPS, w[3])
    assert_codes(norms.combine(*arguments, quantise=True)[1], norms.combine(*arguments)[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_quantising_twin_keeps_the_law(dtype: torch.dtype) -> None:
    x = rows(6, 100, dtype)
    x[0], x[1], x[2, 3] = 0, 1e-6, torch.nan
    want, ours = quantised(x), quantise_rows_twin(x)
    assert torch.equal(ours.scale.nan_to_num(-1), want.scale.nan_to_num(-1))
    assert torch.equal(ours.codes.view(torch.uint8), want.codes.view(torch.uint8))
    assert float(ours.scale[0]) == 1 and ours.codes[0].float().abs().max() == 0
    lead = norms.rms_norm_twin(x.view(2, 3, 100), None, EPS, quantise=True)
    assert isinstance(lead, Fp8) and lead.shape == (2, 3, 100) and lead.scale.shape == (2, 3, 1)


@pytest.mark.parametrize("largest", [448, 1344, 3.5, 7 * 2.0**-20, 13.0, 1.0, 0.0])
def test_quotients_round_as_true_division_does(largest: float) -> None:
    """Ties of E4M3 among them: 1,344 = 3 · 448 makes the scale 3, and 51 / 3 = 17 lies between 16 and 18.

    A row of ones has rms 1, so that the norm is its weight.
    """
    fractions = torch.arange(-448, 449, 0.5) / 448  # the halves are ties above 8, the quarters of bf16's own above 4
    for dtype in DTYPES:
        w = (fractions * largest).to(dtype)
        n = norms.rms_norm(torch.ones(2, len(w), dtype=dtype), w, 0.0)
        assert torch.equal(n, w.expand(2, -1))  # type: ignore[arg-type]
        assert_codes(norms.rms_norm(torch.ones(2, len(w), dtype=dtype), w, 0.0, quantise=True), n)  # type: ignore[arg-type]


# ── errors, and recording ─────────────────────────────────────────────────────────────────────────────────────────


def test_errors_name_the_shapes() -> None:
    x, w = torch.ones(3, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"rms_norm: x \(3, 8\), weight \(9,\)"):
        norms.rms_norm(x, torch.ones(9), EPS)
    with pytest.raises(ValueError, match=r"rms_norm: x \(2, 3, 8\)"):
        norms.rms_norm(torch.ones(2, 3, 8), w, EPS)
    with pytest.raises(ValueError, match=r"rms_norm: x \(8, 3\), strides \(1, 8\)"):
        norms.rms_norm(x.T, torch.ones(3), EPS)
    with pytest.raises(ValueError, match=r"sandwich: x \(3, 8\), residual \(2, 8\)"):
        norms.sandwich(x, x[:2], w, (w,), EPS)
    with pytest.raises(ValueError, match=r"sandwich: x \(3, 8\), pre 1 \(4,\)"):
        norms.sandwich(x, x, w, (w, torch.ones(4)), EPS)
    with pytest.raises(ValueError, match="sandwich: 3 readers"):
        norms.sandwich(x, x, w, (w, w, w), EPS)
    with pytest.raises(ValueError, match=r"sandwich: quantise \(True,\) for 2 readers"):
        norms.sandwich(x, x, w, (w, w), EPS, quantise=(True,))
    with pytest.raises(ValueError, match=r"combine: x \(3, 8\), routed \(1, 8\), 1 of each row"):
        norms.combine(x, x[:1], x, w, w, w, torch.ones(1), EPS)
    with pytest.raises(ValueError, match=r"combine: scalar \(2,\)"):
        norms.combine(x, x, x, w, w, w, torch.ones(2), EPS)


def test_wrappers_record_on_meta_tensors_and_know_their_bytes() -> None:
    x, w = (
        torch.empty(256, 2816, dtype=torch.bfloat16, device="meta"),
        torch.empty(2816, dtype=torch.bfloat16, device="meta"),
    )
    with recording(HOPPER) as launches:
        norms.rms_norm(x, w, EPS)
        norms.sandwich(x, x, w, (w, w), EPS, quantise=(True, False))
        norms.combine(x, x, x, w, w, w, w[:1], EPS, w, quantise=True)
    row, weights = 256 * 2816 * 2, 2816 * 2
    assert [launch.name for launch in launches] == ["rms_norm", "sandwich", "combine"]
    assert [launch.cost.bytes for launch in launches] == [
        2 * row + weights,
        4 * row + row // 2 + 256 * 4 + 3 * weights,
        4 * row + row // 2 + 256 * 4 + 4 * weights,
    ]
    assert all(launch.grid == (256,) and launch.warps == 16 and launch.cost.flops > 0 for launch in launches)
