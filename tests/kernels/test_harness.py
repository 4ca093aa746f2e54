"""What the kernel tests stand on, proved: the mended interpreter, the guard, the PTX evaluator, the bars of near.py."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import near
import numpy as np
import ptx
import pytest
import torch
import triton
import triton.language as tl
from interpreter import run_assembly
from narrow import E2M1, decode, encode
from torch import Tensor

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def random(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    unsigned = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(unsigned), b.view(unsigned))


# The interpreter


@triton.jit
def _dot(A, B, OUT, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(A + m[:, None] * K + k[None, :])
    b = tl.load(B + n[:, None] * K + k[None, :])
    tl.store(OUT + m[:, None] * N + n[None, :], tl.dot(a, b.T, input_precision="ieee").to(OUT.dtype.element_ty))


@pytest.mark.parametrize("dtype", [BF16, E4M3, torch.float8_e5m2, torch.float16, torch.float32, torch.int8])
def test_dot(dtype: torch.dtype) -> None:
    integers = dtype == torch.int8
    a, b = ((random(32, 64, dtype=torch.float32, seed=s) * (40 if integers else 1)).to(dtype) for s in (1, 2))
    out = torch.empty(32, 32, dtype=torch.int32 if integers else torch.float32)
    _dot[(1,)](a, b, out, 32, 32, 64)
    want = a.double() @ b.double().T
    assert torch.equal(out.double(), want) if integers else torch.allclose(out.double(), want, rtol=1e-5, atol=1e-5)


@triton.jit
def _cast(X, OUT, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(OUT + i, tl.load(X + i).to(OUT.dtype.element_ty))


def awkward() -> Tensor:
    """Halfway cases of every type, the edges of each range, infinities, NaN, and many others."""
    bits = torch.arange(0, 2**32, 2**19 + 1, dtype=torch.int64).to(torch.int32)[:8000]
    edges = [0.0, -0.0, 447.9, 448.0, 464.0, 465.0, 500.0, 1e5, -1e5, 17.0001, -127.9, 2**-9, 2**-10, 1e-40, 65520.0]
    fixed = torch.tensor([*edges, torch.inf, -torch.inf, torch.nan])
    halfway = 1 + torch.arange(1, 9) / 16
    return torch.cat([bits.view(torch.float32), fixed, halfway, torch.randn(166) * 100])


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float8_e5m2])
def test_casts_round_to_nearest_even(dtype: torch.dtype) -> None:
    x = awkward()
    out = torch.empty(x.shape, dtype=dtype)
    _cast[(1,)](x, out, x.numel())
    clamped = x.clamp(-57344, 57344) if dtype == torch.float8_e5m2 else x
    assert torch.equal(out.isnan(), x.isnan())
    assert same_bits(out[~x.isnan()], clamped.to(dtype)[~x.isnan()])


@pytest.mark.parametrize("source", [torch.float32, BF16, torch.float16])
def test_e4m3_saturates_and_keeps_nan(source: torch.dtype) -> None:
    x = awkward().to(source)
    out = torch.empty(x.shape, dtype=E4M3)
    _cast[(1,)](x, out, x.numel())
    assert torch.equal(out.isnan(), x.isnan())
    assert same_bits(out[~x.isnan()], x.float().clamp(-448, 448).to(E4M3)[~x.isnan()])
    assert (out[x >= 465].float() == 448).all() and (x == torch.inf).any()


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2])
@pytest.mark.parametrize("to", [torch.float32, BF16, torch.float16])
def test_every_byte_of_fp8(dtype: torch.dtype, to: torch.dtype) -> None:
    x = torch.arange(256, dtype=torch.uint8).view(dtype)
    out = torch.empty(256, dtype=to)
    _cast[(1,)](x, out, 256)
    assert torch.equal(out.isnan(), x.float().isnan())
    assert same_bits(out[~x.float().isnan()], x.to(to)[~x.float().isnan()])


@triton.jit
def _arithmetic(X, Y, OUT, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(X + i), tl.load(Y + i)
    tl.store(OUT + i, x * 2.0 + y)
    tl.store(OUT + N + i, x / y)
    tl.store(OUT + 2 * N + i, tl.where(x > y, -x, tl.abs(y)))
    tl.store(OUT + 3 * N + i, tl.maximum(x, y))
    tl.store(OUT + 4 * N + i, tl.fma(x, y, x))


def test_bf16_arithmetic_rounds_every_operation() -> None:
    x, y = random(512, seed=3), random(512, seed=4)
    out = torch.empty(5, 512, dtype=BF16)
    _arithmetic[(1,)](x, y, out, 512)
    assert same_bits(out[0], x * 2 + y)
    assert same_bits(out[1], (x.float() / y.float()).bfloat16())
    assert same_bits(out[2], torch.where(x > y, -x, y.abs()))
    assert same_bits(out[3], torch.maximum(x, y))
    assert same_bits(out[4], (x.double() * y.double() + x.double()).float().bfloat16())


@triton.jit
def _dot_scaled(A, A_SCALE, B, B_SCALE, OUT, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr):
    m, n, k, g = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K // 2), tl.arange(0, K // GROUP)
    a, b = tl.load(A + m[:, None] * (K // 2) + k[None, :]), tl.load(B + n[:, None] * (K // 2) + k[None, :])
    a_scale = tl.load(A_SCALE + m[:, None] * (K // GROUP) + g[None, :])
    b_scale = tl.load(B_SCALE + n[:, None] * (K // GROUP) + g[None, :])
    tl.store(OUT + m[:, None] * N + n[None, :], tl.dot_scaled(a, a_scale, "e2m1", b.T, b_scale, "e2m1"))


def unpacked(packed: Tensor) -> Tensor:
    return torch.from_numpy(E2M1)[torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()].double()


@pytest.mark.parametrize("group", [16, 32])
def test_dot_scaled(group: int) -> None:
    """NVFP4: groups of 16 under e4m3 scales; MXFP4: of 32 under powers of two."""
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randint(0, 256, (n, 64), dtype=torch.uint8, generator=generator) for n in (16, 32))
    scales = [torch.rand(n, 128 // group, generator=generator) * 4 for n in (16, 32)]
    if group == 16:
        stored = [s.to(E4M3) for s in scales]
        factors = [s.double() for s in stored]
    else:
        stored = [(125 + s).to(torch.uint8) for s in scales]
        factors = [torch.exp2(s.double() - 127) for s in stored]
    out = torch.empty(16, 32)
    _dot_scaled[(1,)](a, stored[0], b, stored[1], out, 16, 32, 128, group)
    x, y = (unpacked(c) * f.repeat_interleave(group, 1) for c, f in zip((a, b), factors, strict=True))
    assert torch.allclose(out.double(), x @ y.T, rtol=1e-5)


@triton.jit
def _keep_larger(value, index, other_value, other_index):
    second = other_value > value
    return tl.where(second, other_value, value), tl.where(second, other_index, index)


@triton.jit
def _twice_plus(a, b):
    return a * 2 + b


@triton.jit
def _reductions(X, VALUE, INDEX, SCAN, COUNT, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(X + m[:, None] * N + n[None, :])
    value, index = tl.reduce((x, n[None, :] + tl.zeros([M, N], tl.int32)), 1, _keep_larger)
    tl.store(VALUE + m, value)
    tl.store(INDEX + m, index)
    tl.store(SCAN + m[:, None] * N + n[None, :], tl.associative_scan(x, 1, _larger))
    tl.store(COUNT + tl.arange(0, 4), tl.histogram(tl.minimum(tl.reshape(tl.abs(x).to(tl.int32), [M * N]), 3), 4))


@triton.jit
def _larger(a, b):
    return tl.where(b > a, b, a)


@triton.jit
def _histogram(X, OUT, N: tl.constexpr, BINS: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(OUT + tl.arange(0, BINS), tl.histogram(tl.load(X + i), BINS, mask=i < N - 1))


def test_a_histogram_counts_what_has_a_bin() -> None:
    out = torch.empty(4, dtype=torch.int32)
    _histogram[(1,)](torch.tensor([0, 3, 3, 4, 9, -1, 1, 1], dtype=torch.int32), out, 8, 4)
    assert out.tolist() == [1, 1, 0, 2]


def test_reductions_scans_and_histograms() -> None:
    x = random(8, 64, dtype=torch.float32, seed=6)
    x[1] = x[1, 0]  # a tie: the lowest index
    value, index, scan = torch.empty(8), torch.empty(8, dtype=torch.int32), torch.empty(8, 64)
    count = torch.empty(4, dtype=torch.int32)
    _reductions[(1,)](x, value, index, scan, count, 8, 64)
    assert torch.equal(value, x.amax(1)) and torch.equal(index.long(), x.argmax(1)) and index[1] == 0
    assert torch.equal(scan, x.cummax(1).values)
    assert torch.equal(count.long(), x.abs().long().clamp(max=3).flatten().bincount(minlength=4))


@triton.jit
def _loop(COUNT, OUT):
    total = 0
    for i in tl.range(0, tl.load(COUNT)):
        total += i
    tl.store(OUT, total)


def test_a_loop_whose_length_is_in_memory() -> None:
    out = torch.empty(1, dtype=torch.int32)
    _loop[(1,)](torch.tensor([5], dtype=torch.int32), out)
    assert out.item() == 10


# Memory


@triton.jit
def _copy(X, OUT, n, N: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(X + i, i < n, other=0.0) if LOAD else tl.load(X + i)
    if STORE:
        tl.store(OUT + i, x, i < n)
    else:
        tl.store(OUT + i, x)


def test_a_lane_out_of_bounds_is_caught() -> None:
    x, large = random(100), torch.empty(128, dtype=BF16)
    _copy[(2,)](x, large[:100], 100, 64, True, True)
    assert torch.equal(large[:100], x)
    for arguments in [(x, large, 100, 64, False, True), (x, large[:100], 100, 64, True, False)]:
        with pytest.raises(Exception, match="28 of 64 active lanes out of bounds"):
            _copy[(2,)](*arguments)


def test_a_slice_does_not_open_its_neighbour() -> None:
    both, out = torch.ones(128, dtype=BF16), torch.empty(64, dtype=BF16)
    with pytest.raises(Exception, match="load: 64 of 64 active lanes out of bounds"):
        _copy[(2,)](both[:64], out, 128, 64, True, True)


@triton.jit
def _before(X, OUT):
    tl.store(OUT, tl.load(X - 1))


def test_a_lane_before_the_first_is_caught() -> None:
    both, out = torch.ones(8), torch.empty(1)
    with pytest.raises(
        Exception, match="load: 1 of 1 active lanes out of bounds; the first, -1 elements past the start"
    ):
        _before[(1,)](both[4:], out)


@triton.jit
def _count(COUNTER, PARTS, OUT, n, SUM: tl.constexpr):
    """Every program leaves a part; the last one to be counted adds them up."""
    program = tl.program_id(0)
    tl.store(PARTS + program, program)
    if SUM:
        if tl.atomic_add(COUNTER, 1) == n - 1:
            total = 0
            for i in range(n):
                total += tl.load(PARTS + i)
            tl.store(OUT, total)
    else:
        tl.store(OUT, tl.load(PARTS))


def test_programs_of_one_launch_do_not_read_each_other() -> None:
    counter, parts, out = torch.zeros(1, dtype=torch.int32), torch.empty(4, dtype=torch.int32), torch.zeros(1)
    _count[(4,)](counter, parts, out, 4, True)
    assert out.item() == 6
    with pytest.raises(Exception, match=r"Race.*load: program 1 touches what program 0"):
        _count[(4,)](counter, parts, out, 4, False)
    with pytest.raises(Exception, match=r"Race.*store: program 1 touches what program 0"):
        _same_place[(2,)](torch.empty(1))


@triton.jit
def _same_place(OUT):
    tl.store(OUT, 1.0)


@triton.jit
def _atomic(COUNTER, i):
    tl.atomic_add(COUNTER + i, 1)


def test_atomics_are_guarded() -> None:
    with pytest.raises(Exception, match="atomic: 1 of 1 active lanes out of bounds"):
        _atomic[(1,)](torch.zeros(1, dtype=torch.int32), 1)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16, E4M3, torch.float8_e5m2])
def test_fresh_memory_is_nan(dtype: torch.dtype) -> None:
    x = torch.zeros(3, dtype=dtype)
    made = [
        torch.empty(3, dtype=dtype),
        torch.empty_like(x),
        x.new_empty(3),
        torch.empty_strided((3,), (1,), dtype=dtype),
    ]
    assert all(m.float().isnan().all() for m in made)
    assert torch.empty(3, dtype=dtype, device="meta").is_meta


def test_fresh_integers_are_wild() -> None:
    assert torch.empty(1, dtype=torch.int32).item() > 2**30 and torch.empty(1, dtype=torch.int64).item() > 2**62
    assert torch.empty(1, dtype=torch.uint8).view(E4M3).float().isnan()


@triton.jit
def _half_masked(X, OUT, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(OUT + i, tl.load(X + i, i < N // 2))


@pytest.mark.parametrize("dtype", [torch.float32, BF16, E4M3, torch.int32])
def test_masked_lanes_hold_nothing_of_use(dtype: torch.dtype) -> None:
    out = torch.zeros(8, dtype=dtype)
    _half_masked[(1,)](torch.ones(8, dtype=dtype), out, 8)
    assert torch.equal(out[:4].float(), torch.ones(4))
    assert (out[4:] > 2**30).all() if dtype == torch.int32 else out[4:].float().isnan().all()


def test_divisions_by_zero_warn_nobody() -> None:
    x = torch.zeros(512, dtype=BF16)
    _arithmetic[(1,)](x, x, torch.empty(5, 512, dtype=BF16), 512)


# Inline assembly

SPREAD = """{
    .reg .b32 t;
    prmt.b32 t, $4, 0, 0x4140;   // bytes 0 and 1 into halves
    shl.b32 $0, t, 4;
    and.b32 $1, t, 0x00ff00ff;
    lop3.b32 $2, $4, 0x0f0f0f0f, 0xf0f0f0f0, 0xca;
    mov.b32 $3, t;
}"""


@triton.jit
def _assembly(X, OUT, N: tl.constexpr, ASM: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.inline_asm_elementwise(ASM, "=r,=r,=r,=r,r", [tl.load(X + i)], (tl.bfloat16, tl.bfloat16), True, 4)
    tl.store(OUT + i, a)
    tl.store(OUT + N + i, b)


def test_inline_assembly_in_a_kernel() -> None:
    """Four bytes in one register; two outputs of four halves in two registers each."""
    x = torch.arange(64, dtype=torch.uint8) * 3
    out = torch.zeros(2, 64, dtype=BF16)
    _assembly[(1,)](x, out, 64, SPREAD)
    word = x.numpy().view(np.uint32)
    spread = (word & 0xFF) | (word >> 8 & 0xFF) << 16
    chosen = (word & 0x0F0F0F0F) | (~word & 0xF0F0F0F0)
    halves = out.view(torch.int32).numpy().view(np.uint32).reshape(2, 16, 2)
    assert (halves[0, :, 0] == spread << 4).all() and (halves[0, :, 1] == spread & 0x00FF00FF).all()
    assert (halves[1, :, 0] == chosen).all() and (halves[1, :, 1] == spread).all()


def test_a_wrong_count_of_registers_is_caught() -> None:
    with pytest.raises(ValueError, match="name 1 outputs and 1 inputs; pack=4 makes them 2 and 1"):
        run_assembly("mov.b32 $0, $1;", "=r,r", [np.zeros(8, np.uint8)], [np.uint16], pack=4)
    with pytest.raises(NotImplementedError, match=r"no `bar\.sync`"):
        ptx.run("bar.sync $0, 0;", 1, [np.zeros(1, np.uint32)])


def lanes(*values: float, fmt: str = "f32") -> np.ndarray:
    return encode(np.array(values, np.float64), fmt).astype(np.uint32)


PTX_CASES = [
    ("prmt.b32 $0, $1, $2, 0x7610;", [[0x33221100], [0x77665544]], [0x77661100]),
    ("prmt.b32 $0, $1, 0, 0x9188;", [[0x0000F280]], [0xFFF2FFFF]),  # bit 3 of a selector copies the sign
    ("shl.b32 $0, $1, 32;", [[1]], [0]),
    ("shr.s32 $0, $1, 4;", [[0x80000000]], [0xF8000000]),
    ("shr.u32 $0, $1, 4;", [[0x80000000]], [0x08000000]),
    ("shf.l.wrap.b32 $0, $1, $2, 8;", [[0x11223344], [0xAABBCCDD]], [0xBBCCDD11]),
    ("bfe.u32 $0, $1, 4, 8;", [[0xABCD]], [0xBC]),
    ("bfe.s32 $0, $1, 4, 8;", [[0xABCD]], [0xFFFFFFBC]),
    ("bfi.b32 $0, $1, $2, 8, 4;", [[0xF], [0]], [0xF00]),
    ("mul.hi.u32 $0, $1, $2;", [[0xD2511F53], [0xFFFFFFFF]], [0xD2511F52]),
    ("mad.lo.u32 $0, $1, $2, 5;", [[0x10000], [0x10001]], [0x10005]),
    ("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; mov.b32 $0, {hi, lo}; }", [[0x11223344]], [0x33441122]),
    ("{ .reg .pred p; setp.lt.s32 p, $1, 0; @p mov.b32 $0, 7; @!p mov.b32 $0, 8; }", [[0xFFFFFFFF, 1]], [7, 8]),
    ("{ .reg .pred p; setp.gt.f32 p, $1, 0f3F800000; selp.b32 $0, 1, 2, p; }", [[0x40000000, 0x3F800000]], [1, 2]),
    (
        "cvt.rn.satfinite.e4m3x2.f32 $0, $1, $2;",
        [lanes(500.0), lanes(17.0001)],
        [0x7E59],
    ),  # the first is the upper half
    (
        "cvt.rn.f16x2.e4m3x2 $0, $1;",
        [[0x7E59]],
        [int(lanes(448.0, fmt="f16")[0]) << 16 | int(lanes(18.0, fmt="f16")[0])],
    ),
    ("cvt.rn.satfinite.e2m1x2.f32 $0, $1, $2;", [lanes(-5.0, 0.25), lanes(2.5, 9.0)], [0xE4, 0x07]),
    ("cvt.rn.f16x2.e2m1x2 $0, $1;", [[0xF1]], [int(lanes(-6.0, fmt="f16")[0]) << 16 | int(lanes(0.5, fmt="f16")[0])]),
    ("cvt.rn.bf16x2.f32 $0, $1, $2;", [lanes(1.00390625), lanes(1.01171875)], [0x3F803F82]),  # ties to even, both ways
    ("cvt.rzi.s32.f32 $0, $1;", [lanes(-1.9, 3e9)], [0xFFFFFFFF, 0x7FFFFFFF]),
    ("cvt.rn.f32.u32 $0, $1;", [[16777217]], [0x4B800000]),
    ("fma.rn.bf16x2 $0, $1, $2, $3;", [[0x3F804000], [0x40404040], [0x3F800000]], [0x408040C0]),
    ("mul.rn.bf16x2 $0, $1, $2;", [[0x3F814000], [0x3F813F80]], [0x3F824000]),
    ("mul.f16x2 $0, $1, $2;", [[0x3C004000], [0x40004200]], [0x40004600]),
    ("lg2.approx.f32 $0, $1;", [lanes(8.0)], lanes(3.0)),
    ("ex2.approx.ftz.f32 $0, $1;", [lanes(-2.0, -140.0)], lanes(0.25, 0.0)),
    ("max.f32 $0, $1, $2;", [[0x7FC00000], lanes(1.0)], lanes(1.0)),
]


@pytest.mark.parametrize(("assembly", "inputs", "want"), PTX_CASES)
def test_ptx(assembly: str, inputs: list[list[int]], want: list[int]) -> None:
    (got,) = ptx.run(assembly, 1, [np.array(x, np.uint64) for x in inputs])
    assert [hex(int(x)) for x in np.atleast_1d(got)] == [hex(int(x)) for x in want]


@pytest.mark.parametrize("fmt", ["f16", "bf16", "e4m3", "e5m2", "e2m1"])
def test_formats_return_their_own_values(fmt: str) -> None:
    bits = np.arange(2 ** {"f16": 16, "bf16": 16, "e4m3": 8, "e5m2": 8, "e2m1": 4}[fmt], dtype=np.uint64)
    values = decode(bits, fmt)
    finite = np.isfinite(values)
    assert (encode(values[finite], fmt) == bits[finite]).all()


def test_bf16_from_fp64_rounds_once() -> None:
    """1 + 2⁻⁸ + 2⁻⁴⁰: by way of fp32 it would be a tie, and go down."""
    assert encode(np.array([1 + 2**-8 + 2**-40, -(1 + 2**-8 + 2**-40)]), "bf16").tolist() == [0x3F81, 0xBF81]


# The bars


def test_near_counts_steps() -> None:
    x = torch.ones(1000, dtype=BF16)
    near.assert_near(x, x)
    y = x.clone()
    y[3] += 2**-6  # two steps
    near.assert_near(y, x)
    y[3] += 2**-7
    with pytest.raises(AssertionError, match=r"3 steps of torch\.bfloat16 off at \(3,\): 1\.0234375, twin 1"):
        near.assert_near(y, x)
    y = x.clone()
    y[:20] += 2**-7
    with pytest.raises(AssertionError, match=r"98\.00% equal, 99% wanted"):
        near.assert_near(y, x)
    near.assert_near(y, x, equal=0.98)


def test_near_measures_a_cancelled_element_by_its_neighbours() -> None:
    twin = torch.full((1000,), 8.0, dtype=BF16)
    twin[0] = 0.018
    ours = twin.clone()
    ours[0] += 0.05
    near.assert_near(ours, twin)


def test_near_holds_nan_infinity_shape_and_type() -> None:
    x = torch.tensor([1.0, torch.nan, torch.inf])
    near.assert_near(x, x.clone())
    for other in (torch.tensor([1.0, 2.0, torch.inf]), torch.tensor([1.0, torch.nan, -torch.inf])):
        with pytest.raises(AssertionError, match="not finite"):
            near.assert_near(other, x)
    with pytest.raises(AssertionError, match="bfloat16, twin"):
        near.assert_near(x.bfloat16(), x)
    near.assert_near(torch.arange(3), torch.arange(3))
    with pytest.raises(AssertionError, match=r"1 of 3 differ: first at \(2,\): 5, twin 2"):
        near.assert_near(torch.tensor([0, 1, 5]), torch.arange(3))


def test_no_worse_than_eager() -> None:
    truth = random(1000, dtype=torch.float64, seed=7)
    eager = truth.to(BF16)
    near.assert_no_worse(eager, eager, truth)
    with pytest.raises(AssertionError, match=r"from fp64, eager .* the worst at \(\d+,\)"):
        near.assert_no_worse((truth * 1.004).to(BF16), eager, truth)
    with pytest.raises(AssertionError):
        near.assert_no_worse(torch.full_like(eager, torch.nan), eager, truth)


# The process


def test_an_interpreting_process_cannot_begin_after_triton() -> None:
    tests = Path(importlib.util.find_spec("interpreter").origin).parent  # type: ignore[union-attr, arg-type]
    script = f"import sys; sys.path.insert(0, {str(tests)!r})\nimport triton, interpreter\ninterpreter.install()"
    clean = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=clean, check=False)
    assert "triton was imported before TRITON_INTERPRET=1 was set" in done.stderr
