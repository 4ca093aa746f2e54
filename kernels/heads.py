"""What lies between the q/k/v projection and attention: a norm a head, rotation, and the K/V cache.

    q, k   u = w · p / rms(p)          p a head's d numbers, w q_norm or k_norm
           u'[j]       = u[j] · cos[j] − u[j + d/2] · sin[j]                  j < d/2
           u'[j + d/2] = u[j + d/2] · cos[j] + u[j] · sin[j]
    v      p / rms(p)                  sliding layers: its own projection; full layers: k's, neither weighted nor rotated

    projected  [ q … H heads ][ k … KV heads ][ v … KV heads, sliding layers only ]
    slabs      …[ committed ][ at ─ rows of this pass ─► at + rows ]…

Shapes     projected [T, N·d], N = H + 2·KV or H + KV; qk_norm [H + KV, d]; cos, sin [T, d] as `rope.table` makes them:
           the second half of cos repeats the first, the first half of sin is the negated second; only half is read.
           q [T, H, d]; slabs [KV, capacity, d] in the model's dtype or E4M3; span int32 [4]: first, at, rows, causal.
Precision  the norm in fp32 with its weight, rounded once; each product and the sum of the rotation rounded. Pairs that do
           not turn have cos 1 and sin 0, and pass exactly. E4M3 is rounded from the model's dtype and saturates at 448.
Writes     rows 0 … rows-1 to slots at … at+rows-1. A padding row, or a slot outside 0 … capacity-1, writes no K/V.
Traffic    with s bytes an element 2s·T·N·d (full layers s·T·(2N + KV)·d), and the tables. `span` is read on the device.
Grid       (row tiles, heads); the head is the faster index, so that programs that share a row's tables run together.
Source     transformers 5.24 modeling_diffusion_gemma.py: DiffusionGemmaTextAttention; rope.py.
"""

import torch
from torch import Tensor

from dgemma_local.quant import E4M3_MAX

from ._e4m3 import to_e4m3
from ._launch import Cost, Tile, Tiles, choose, gpu_of, launch
from ._triton import tl, triton
from .norms import normalise

# m rows of heads with n pairs a program, fewer of wider ones: a lane holds 8 numbers of each half, one load of 16 bytes
# each, and a row's sum stays in its warp.
TILES: Tiles = {(8, 9): Tile(m=8, n=128, k=0, warps=4, stages=1)}


# ── twins ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., T, N, d], cos and signed sin [T, d] -> x's shape, rounded in its dtype after each operation."""
    return x * cos.unsqueeze(-2) + x.roll(x.shape[-1] // 2, -1) * sin.unsqueeze(-2)


def project_twin(
    projected: Tensor, qk_norm: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """projected [..., T, N·d] -> q [..., T, H, d], k and v [..., T, KV, d]; differentiable."""
    own = normalise(projected.unflatten(-1, (-1, qk_norm.shape[-1])), eps)  # [..., T, N, d]
    qk = rotate((own[..., : heads + kv_heads, :] * qk_norm).to(projected.dtype), cos, sin)
    return qk[..., :heads, :], qk[..., heads:, :], own[..., -kv_heads:, :].to(projected.dtype)


def heads_twin(
    projected: Tensor,
    qk_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
    k_slab: Tensor,
    v_slab: Tensor,
    span: Tensor,
) -> Tensor:
    """projected [T, N·d] -> q [T, H, d]; k and v go to their slots."""
    q, k, v = project_twin(projected, qk_norm, cos, sin, heads, kv_heads, eps)
    _, at, rows, _ = span.tolist()
    begin, end = max(0, -at), min(rows, len(projected), k_slab.shape[1] - at)
    if begin < end:
        for slab, new in ((k_slab, k), (v_slab, v)):
            slab[:, at + begin : at + end] = _stored(new[begin:end].transpose(0, 1), slab.dtype)
    return q


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(dtype) if dtype == torch.float8_e4m3fn else x.to(dtype)


# ── kernel ────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _heads(
    P, W, COS, SIN, SPAN, Q, K, V, eps, T, capacity, head_stride, slot_stride,
    H: tl.constexpr, KV: tl.constexpr, N: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1) * M + tl.arange(0, M)[:, None]  # [M, 1]
    col = tl.arange(0, BLOCK)[None, :]  # [1, d/2]
    live = (row < T) & (col < D // 2)
    at = tl.load(SPAN + 1).to(tl.int64)
    held = tl.load(SPAN + 2)

    first = P + (row.to(tl.int64) * N + head) * D + col
    lo = tl.load(first, live, other=0.0).to(tl.float32)
    hi = tl.load(first + D // 2, live, other=0.0).to(tl.float32)
    unit = tl.rsqrt((tl.sum(lo * lo, 1) + tl.sum(hi * hi, 1)) / D + eps)[:, None]
    lo, hi = lo * unit, hi * unit

    slot = at + row
    into = slot * slot_stride + col
    kept = live & (row < held) & (slot >= 0) & (slot < capacity)
    if head >= N - KV:  # a value: of its own, or of the raw key
        values = V + (head - (N - KV)).to(tl.int64) * head_stride + into
        _store(values, lo.to(P.dtype.element_ty), hi.to(P.dtype.element_ty), kept, D, PACKED)
    if head < H + KV:
        weight = W + head * D + tl.broadcast_to(col, M, BLOCK)  # as wide as what it meets: no exchange between lanes
        lo = (lo * tl.load(weight, live, other=0.0)).to(P.dtype.element_ty).to(tl.float32)
        hi = (hi * tl.load(weight + D // 2, live, other=0.0)).to(P.dtype.element_ty).to(tl.float32)
        cos = tl.load(COS + row * D + col, live, other=0.0).to(tl.float32)
        sin = tl.load(SIN + row * D + col, live, other=0.0).to(tl.float32)  # negated, as the table's first half is
        turned_lo = _sum(lo * cos, hi * sin, P.dtype.element_ty)
        turned_hi = _sum(hi * cos, lo * -sin, P.dtype.element_ty)
        if head < H:
            _store(Q + (row.to(tl.int64) * H + head) * D + col, turned_lo, turned_hi, live, D, False)
        else:
            _store(K + (head - H).to(tl.int64) * head_stride + into, turned_lo, turned_hi, kept, D, PACKED)


@triton.jit
def _sum(a, b, dtype: tl.constexpr):
    """Two products, each rounded, and their sum, rounded."""
    return (a.to(dtype).to(tl.float32) + b.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _store(into, lo, hi, live, D: tl.constexpr, PACKED: tl.constexpr):
    if PACKED:
        tl.store(into, to_e4m3(lo), live)
        tl.store(into + D // 2, to_e4m3(hi), live)
    else:
        tl.store(into, lo.to(into.dtype.element_ty), live)
        tl.store(into + D // 2, hi.to(into.dtype.element_ty), live)


def heads(
    projected: Tensor,
    qk_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
    k_slab: Tensor,
    v_slab: Tensor,
    span: Tensor,
    tile: Tile | None = None,
) -> Tensor:
    """projected [T, N·d] -> q [T, H, d]; k and v go to their slots."""
    rows, width = _shape(projected, qk_norm, cos, sin, heads, kv_heads, k_slab, v_slab, span)
    count = projected.shape[1] // width
    tile, block = tile or choose(TILES, gpu_of(projected)), 1 << (width // 2 - 1).bit_length()
    at_once = max(1, tile.m * tile.n // block)
    q = torch.empty(rows, heads, width, dtype=projected.dtype, device=projected.device)
    head_stride, slot_stride, _ = k_slab.stride()
    launch(
        _heads, (count, -(-rows // at_once)),
        projected, qk_norm, cos, sin, span, q, k_slab, v_slab,
        eps, rows, k_slab.shape[1], head_stride, slot_stride,
        H=heads, KV=kv_heads, N=count, D=width, M=at_once, BLOCK=block, PACKED=k_slab.dtype == torch.float8_e4m3fn,
        warps=tile.warps, stages=tile.stages,
        cost=lambda: heads_cost(rows, count, heads, kv_heads, width, q.element_size(), k_slab.element_size()),
    )  # fmt: skip
    return q


def _shape(
    projected: Tensor, qk_norm: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int,
    k_slab: Tensor, v_slab: Tensor, span: Tensor,
) -> tuple[int, int]:  # fmt: skip
    """(T, d); ValueError where a tensor is of another shape than the kernel reads or writes."""
    rows, width = projected.shape[0], qk_norm.shape[-1]
    sizes = f"heads: projected {tuple(projected.shape)}, {heads} + {kv_heads} heads"
    if projected.dim() != 2 or projected.shape[1] not in (n * width for n in (heads + kv_heads, heads + 2 * kv_heads)):
        raise ValueError(f"{sizes} of {width}, wanted [T, N·d] with N = H + KV or H + 2·KV")
    if qk_norm.shape != (heads + kv_heads, width) or width % 2:
        raise ValueError(f"{sizes}, qk_norm {tuple(qk_norm.shape)}, wanted [H + KV, d], d even")
    if cos.shape != (rows, width) or sin.shape != (rows, width):
        raise ValueError(f"{sizes}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}, wanted {(rows, width)}")
    if span.shape != (4,) or span.dtype != torch.int32:
        raise ValueError(f"{sizes}, span {tuple(span.shape)} {span.dtype}, wanted [4] int32")
    if not all(t.is_contiguous() for t in (projected, qk_norm, cos, sin)):
        strides = [t.stride() for t in (projected, qk_norm, cos, sin)]
        raise ValueError(f"{sizes}, strides of projected, qk_norm, cos, sin {strides}, wanted contiguous")
    ours, theirs = (k_slab.shape, k_slab.stride(), k_slab.dtype), (v_slab.shape, v_slab.stride(), v_slab.dtype)
    if ours != theirs or k_slab.dim() != 3 or k_slab.shape[::2] != (kv_heads, width) or k_slab.stride(2) != 1:
        raise ValueError(f"{sizes} of {width}, slabs {ours} and {theirs}, wanted both [KV, capacity, d], d contiguous")
    return rows, width


def heads_cost(rows: int, count: int, heads: int, kv_heads: int, width: int, element: int, stored: int) -> Cost:
    """`element` bytes of the model's dtype, `stored` of the slabs'; of the tables half is read."""
    moved = (
        rows * width * (element * (count + heads + 1) + 2 * kv_heads * stored) + (heads + kv_heads) * width * element
    )
    return Cost(moved + 16, rows * width * (4 * count + 4 * (heads + kv_heads)))
