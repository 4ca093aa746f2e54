"""Activations in few bits, one row at a time.

    FP8      scale = amax(|row|) / 448                          code = e4m3(x / scale)       a zero row: scale 1, codes 0
    NVFP4    scale = e4m3(global · (amax(|group|) / 6))         code = e2m1(x / (scale / global))

Shapes    x [T, D] -> codes E4M3 [T, D], scale fp32 [T, 1]; or packed uint8 [T, D/2], scale E4M3 [T, D/16] under a global
          scale fp32 [1] that the checkpoint holds (the weight's input_scale) and that divides.
Precision Everything in fp32 from x in its own dtype, true divisions, one rounding to a code. A group whose scale would
          be 0 gets 0.125, as compressed-tensors gives the weights. A NaN stays one: its group's scale is NaN, for a
          code in four bits has none.
Traffic   x read once, codes written: (2 + 1)·T·D bytes, or (2 + ½)·T·D.
Grid      one program a row.
Source    compressed-tensors, "token, dynamic, symmetric" and "tensor_group, local"; vLLM's scaled_fp8_quant.
"""

import torch
from torch import Tensor

from dgemma_local.quant import E2M1_MAX, E4M3_MAX, GROUP, NO_GROUP_SCALE, Fp8, Nvfp4, e2m1, pack

from ._e4m3 import to_e4m3
from ._launch import Cost, launch
from ._triton import tl, triton

# Elements of a warp. Both kernels are mostly true divisions; with more a thread their slow path wants a stack.
FP8_WIDTH, NVFP4_WIDTH = 1024, 256


def quantise_rows_twin(x: Tensor) -> Fp8:
    """x [T, D] -> codes under one scale a row."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) / E4M3_MAX
    scale = torch.where(scale == 0, 1.0, scale)
    return Fp8((wide / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale)


def quantise_rows_nvfp4_twin(x: Tensor, global_scale: Tensor) -> Nvfp4:
    """x [T, D], global_scale fp32 [1], which divides -> packed codes under a scale for every 16."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(-1)
    scale = (global_scale * (amax / E2M1_MAX)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    scale.view(torch.uint8)[scale.float() == 0] = NO_GROUP_SCALE
    codes = e2m1((groups / (scale.float() / global_scale).unsqueeze(-1)).flatten(-2))
    return Nvfp4(pack(codes), scale, global_scale, global_scale, (x.shape[0],), divides=True)


@triton.jit
def _quantise_rows(X, CODES, SCALE, D: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < D
    x = tl.load(X + row * D + column, live, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(x)), LARGEST)
    scale = tl.where(scale == 0, 1.0, scale)
    code = tl.div_rn(x, tl.broadcast_to(scale, (BLOCK,)))
    tl.store(CODES + row * D + column, to_e4m3(code), live)
    tl.store(SCALE + row, scale)


@triton.jit
def to_e2m1(x):
    """fp32 -> the nearest code, int32; a tie to the even one, |x| > 5 is 6, and only what is below 0 has a sign."""
    size = tl.abs(x)
    code = tl.where(size > 0.25, 1, 0) + tl.where(size >= 0.75, 1, 0) + tl.where(size > 1.25, 1, 0)
    code += tl.where(size >= 1.75, 1, 0) + tl.where(size > 2.5, 1, 0) + tl.where(size >= 3.5, 1, 0)
    return code + tl.where(size > 5.0, 1, 0) + tl.where(x < 0, 8, 0)


@triton.jit
def larger(a, b):
    """The larger of two, and NaN if either is: `tl.max` would pass it over."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _quantise_rows_nvfp4(
    X, GLOBAL, PACKED, SCALE, D: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, NO_SCALE: tl.constexpr
):
    GROUPS: tl.constexpr = BLOCK // 16
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, GROUPS)[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = tl.load(X + row * D + column, column < D, other=0.0).to(tl.float32)  # [GROUPS, 16]
    whole = tl.load(GLOBAL)
    scale = to_e4m3(whole * tl.div_rn(tl.reduce(tl.abs(x), 1, larger), LARGEST))
    scale = tl.where(scale.to(tl.float32) == 0, NO_SCALE, scale.to(tl.float32))
    unit = tl.div_rn(scale, tl.broadcast_to(whole, (GROUPS,)))
    code = to_e2m1(tl.div_rn(x, tl.broadcast_to(unit[:, None], (GROUPS, 16))))
    low, high = tl.split(code.reshape(GROUPS * 8, 2))
    half = tl.arange(0, GROUPS * 8)
    tl.store(PACKED + row * (D // 2) + half, (low | (high << 4)).to(tl.uint8), half < D // 2)
    group = tl.arange(0, GROUPS)
    tl.store(SCALE + row * (D // 16) + group, to_e4m3(scale), group < D // 16)  # exact


def quantise_rows(x: Tensor) -> Fp8:
    """x [T, D] of any float dtype -> codes under one scale a row."""
    T, D = _shape("quantise_rows", x)
    quantised = Fp8(x.new_empty(T, D, dtype=torch.float8_e4m3fn), x.new_empty(T, 1, dtype=torch.float32))
    launch(
        _quantise_rows,
        (T,),
        x,
        quantised.codes,
        quantised.scale,
        cost=lambda: Cost(bytes_moved(T, D, x.element_size(), 1), 4 * T * D),
        warps=warps_of(D, FP8_WIDTH),
        D=D,
        BLOCK=block_of(D),
        LARGEST=E4M3_MAX,
    )
    return quantised


def quantise_rows_nvfp4(x: Tensor, global_scale: Tensor) -> Nvfp4:
    """x [T, D], D in a multiple of 16; global_scale fp32 [1], which divides."""
    T, D = _shape("quantise_rows_nvfp4", x)
    if D % GROUP or global_scale.shape != (1,):
        raise ValueError(f"quantise_rows_nvfp4: x {tuple(x.shape)}, global scale {tuple(global_scale.shape)}")
    packed = x.new_empty(T, D // 2, dtype=torch.uint8)
    scale = x.new_empty(T, D // GROUP, dtype=torch.float8_e4m3fn)
    launch(
        _quantise_rows_nvfp4,
        (T,),
        x,
        global_scale,
        packed,
        scale,
        cost=lambda: Cost(bytes_moved(T, D, x.element_size(), 0.5 + 1 / GROUP), 20 * T * D),
        warps=warps_of(D, NVFP4_WIDTH),
        D=D,
        BLOCK=block_of(D),
        LARGEST=E2M1_MAX,
        NO_SCALE=0.125,
    )
    return Nvfp4(packed, scale, global_scale, global_scale, (T,), divides=True)


def block_of(width: int) -> int:
    """The power of two that holds a row, of 512 at least: packing wants 4 neighbours a thread."""
    return max(512, 1 << (width - 1).bit_length())


def warps_of(width: int, each: int) -> int:
    return min(32, max(4, block_of(width) // each))


def _shape(name: str, x: Tensor) -> tuple[int, int]:
    if x.dim() != 2 or not x.is_contiguous():
        raise ValueError(f"{name}: x {tuple(x.shape)}, strides {x.stride()}: two axes, contiguous")
    return x.shape[0], x.shape[1]


def bytes_moved(rows: int, width: int, element: int, code: float) -> int:
    """x read, codes of `code` bytes each written."""
    return int(rows * width * (element + code))
