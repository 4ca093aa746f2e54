"""NVFP4 codes to numbers in registers, for kernels that multiply them with wider activations.

    packed [N, K/2] uint8,  scale [N, K/16] E4M3   ─►   code · scale · UNIT  [N, K] in natural order, exact

                                                  sign      exponent   fraction
    E2M1 in a nibble                              3         2 1        0
    the same bits in bf16                         15        8 7        6            = code · 2⁻¹²⁶, ½ a subnormal
    × scale · 2¹¹⁶, one rounding that never acts                                    = code · scale · 2⁻¹⁰

Precision A code has 2 significant bits, a scale 4: their product has 6 at most, and bf16 8, fp16 11, fp32 24. `UNIT` is
          there because scale · 2¹²⁶ overflows; it is a power of two, and the kernel takes it off its fp32 sums together
          with the global scale. In fp16 the smallest product, 2⁻²⁰, is a subnormal, which it has.
Cost      bf16: 8 weights in 4 prmt, 1 shl, 4 shr, 8 lop3, 4 fma: 2.6 instructions a weight. The other dtypes go the long
          way in fp32; no card's fast path wants them.
Source    PTX ISA 8.7, prmt, lop3, fma.bf16x2 (sm_80 and up; mul.bf16x2 only from sm_90, so −0 is added instead).

Where a program's warps share weights (a tile of rows ≥ 64), `decode` in the operand's own layout would be repeated by
every warp; `once` makes the compiler finish the tile first and hand it over through shared memory.
"""

from dataclasses import replace

import torch
from torch import Tensor

from dgemma_local.quant import Nvfp4

from ._triton import tl, triton

UNIT = 2.0**-10


def decode_twin(w: Nvfp4, dtype: torch.dtype) -> Tensor:
    """[..., out, in]: code · scale · UNIT, the global scale left out."""
    one = torch.full_like(w.global_scale, 1 / UNIT)
    return replace(w, global_scale=one, divides=True).decode(dtype)


def _decoding() -> str:
    """PTX: 4 bytes ($4) under their scales ($5, $6: two bf16 each) -> 4 pairs of bf16 ($0 … $3)."""
    lines = [".reg .b32 low, both, bits, zero;", "shl.b32 low, $4, 4;", "mov.b32 zero, 0x80008000;"]
    for j in range(4):
        # bytes: byte j's low nibble on top of the lower half, its high nibble on top of the upper half
        lines += [
            f"prmt.b32 both, low, $4, 0x{4 + j}{4 + j}{j}{j};",
            "shr.u32 bits, both, 6;",
            "and.b32 bits, bits, 0x01C001C0;",
            "lop3.b32 both, both, zero, bits, 0xEA;",  # (both & zero) | bits
            f"fma.rn.bf16x2 ${j}, both, ${5 + j // 2}, zero;",
        ]
    return "{\n" + "\n".join(lines) + "\n}"


DECODE_ASM = tl.constexpr(_decoding())
SETTLE_ASM = tl.constexpr("mov.b32 $0, $1;")
_SCALE_UP = tl.constexpr(2.0**116)


@triton.jit
def decode(packed, scale, OUT: tl.constexpr):
    """[N, K/2] uint8, [N, K/16] E4M3 -> [N, K] of OUT: code · scale · UNIT."""
    N: tl.constexpr = packed.shape[0]
    HALF: tl.constexpr = packed.shape[1]
    unit = scale.to(tl.float32) * _SCALE_UP
    unit = tl.broadcast_to(unit[:, :, None].to(tl.bfloat16), (N, HALF // 8, 8)).reshape(N, HALF)
    if tl.bfloat16 == OUT:
        pairs = tl.inline_asm_elementwise(
            DECODE_ASM, "=r,=r,=r,=r,r,r,r", [packed, unit], dtype=tl.int32, is_pure=True, pack=4
        )
        low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        code = packed.to(tl.int32)
        low = (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True)
        high = (((code & 0x80) << 24) | ((code & 0x70) << 18)).to(tl.float32, bitcast=True)
        low, high = (low * unit.to(tl.float32)).to(OUT), (high * unit.to(tl.float32)).to(OUT)
    return tl.join(low, high).reshape(N, 2 * HALF)


@triton.jit
def once(tile):
    """The same bf16 tile, finished before it becomes an operand: no warp decodes what another one has."""
    if tile.dtype == tl.bfloat16:
        # impure, so that the compiler does not move it past the change of layout; ptxas drops the move itself
        tile = tl.inline_asm_elementwise(SETTLE_ASM, "=r,r", [tile], dtype=tl.bfloat16, is_pure=False, pack=2)
    return tile
