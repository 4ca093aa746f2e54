"""kernels/_e2m1.py and _e4m3.py: every code, under every scale, bit for bit."""

import pytest
import torch
import triton
import triton.language as tl
from dgemma_local.kernels._e2m1 import UNIT, decode, decode_twin, once
from dgemma_local.kernels._e4m3 import to_e4m3

from dgemma_local.quant import Nvfp4

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
FINITE = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)  # E4M3 scales, both signs


@triton.jit
def _decode_tile(PACKED, SCALE, OUT, N: tl.constexpr, K: tl.constexpr, ONCE: tl.constexpr):
    row = tl.arange(0, N)[:, None]
    packed = tl.load(PACKED + row * (K // 2) + tl.arange(0, K // 2)[None, :])
    scale = tl.load(SCALE + row * (K // 16) + tl.arange(0, K // 16)[None, :])
    w = decode(packed, scale, OUT.dtype.element_ty)
    if ONCE:
        w = once(w)
    tl.store(OUT + row * K + tl.arange(0, K)[None, :], w)


def decoded(packed, scale, dtype, settle=False):
    out = torch.empty(packed.shape[0], 2 * packed.shape[1], dtype=dtype)
    _decode_tile[(1,)](packed, scale, out, *out.shape, settle)
    return out


def nvfp4(packed, scale):
    one = torch.ones(1)
    return Nvfp4(packed, scale, one, one, (packed.shape[0],), True)


def every_byte():
    """[256, 128] bytes: row s, under scale s, holds each byte in its first or second half; all scales but NaN."""
    scales = torch.cat([FINITE, FINITE[:2]])
    low = torch.arange(128, dtype=torch.uint8).expand(256, -1)
    return torch.cat([low, low + 128], 1).contiguous(), scales[:, None].expand(-1, 32).contiguous()


@pytest.mark.parametrize("settle", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_under_every_scale_in_both_nibbles(dtype, settle):
    packed, scale = every_byte()
    scale = scale.view(torch.float8_e4m3fn)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).int()
    want = torch.tensor(E2M1)[codes] * scale.float().repeat_interleave(16, 1) * UNIT
    assert torch.equal(want.to(dtype).float(), want)  # exact in every dtype
    got = decoded(packed, scale, dtype, settle)
    assert torch.equal(got.view(BITS[dtype]), want.to(dtype).view(BITS[dtype]))  # the sign of zero counts
    twin = decode_twin(nvfp4(packed, scale), dtype)
    assert torch.equal(twin.view(BITS[dtype]), want.to(dtype).view(BITS[dtype]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_group_has_its_own_scale_and_each_byte_its_place(dtype):
    generator = torch.Generator().manual_seed(3)
    packed = torch.randint(0, 256, (32, 64), generator=generator, dtype=torch.uint8)
    scale = torch.randint(1, 127, (32, 8), generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert torch.equal(decoded(packed, scale, dtype), decode_twin(nvfp4(packed, scale), dtype))


def test_a_scale_that_is_nan_stays_visible():
    packed = torch.full((4, 8), 0x22, dtype=torch.uint8)
    scale = torch.full((4, 1), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for dtype in DTYPES:
        assert decoded(packed, scale, dtype).isnan().all()


@triton.jit
def _to_codes(X, CODES, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(CODES + at, to_e4m3(tl.load(X + at)))


def test_e4m3_rounds_once_to_even_and_saturates():
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (values[1:] + values[:-1]) / 2
    x = torch.cat(
        [values, middle, middle * (1 + 2**-20), middle * (1 - 2**-20), torch.tensor([17.0001, 500, 1e9, 464])]
    )
    x = torch.cat([x, -x, torch.zeros(1024 - 2 * len(x))])
    codes = torch.empty(1024, dtype=torch.float8_e4m3fn)
    _to_codes[(1,)](x, codes, 1024)
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(codes.view(torch.uint8), want.view(torch.uint8))
