"""The experts' two matrix products: every expert's weights are read once and meet all rows that chose it.

    h[p] = gelu(gate_e x_t) · (up_e x_t)         p = place in `order`, e its expert, t its row: [P, D] -> [P, F]
    y[pair] = down_e h[p]                        pair = t·A + slot = order[p]:                  [P, F] -> [P, D]

An expert has about 16 of 256 rows and 6 M weights, so this streams weights: 14 of a 4090's 17 ms a step. Weights are
the tall operand, tl.dot(w [BM, BK], x [BK, rows]); a program holds the same BM rows of gate and up, so that what it
stores is finished, and an item of few rows takes a narrower product of its own.

    W         Tensor      x Tensor     bf16, fp16 or fp32
              Fp8         x Fp8        x's scale a row, W's scale an output
              Nvfp4       x Tensor     decoded in registers to x's dtype, once (_e2m1)

Shapes     x [T, D]; gate_up [E, 2F, D] (gate's rows first); down [E, D, F] -> h [P, F], y [P, D] of `dtype`; P = T·A.
Precision  sums in fp32 (FP8 on sm_90: promoted every BK products; its own accumulator has about 14 bits). Row and
           column scales, or the part's global scale, multiply the sum. gate x, up x, gelu and the product are each
           rounded to `dtype`, as _gelu.py has them; so is y.
Traffic    weights once; x, h and y about A times, from the L2.
Grid       blocks of weight rows × items of the routing, one expert's blocks side by side; items that no routing filled
           leave at once.
Tiles      K contiguous, so that 16 bytes a thread fly by cp.async, 64 bytes of a row at a time or more; 704 = 11 · 64.
Tried      NVFP4, instructions a weight byte on sm_89 at ≤ 32 and ≤ 16 rows: 0.33 and 0.28, 34 KB, two programs a
           processor. 128 rows and 8 warps: 0.30, one program. Decoding through shared memory (_e2m1.once): 0.26 at 194
           registers and 51 KB, one program; it pays on sm_90 (0.35 -> 0.29), whose wgmma wants another layout. k of
           64: three programs, but 32-byte pieces of rows. Items of 64 rows: 51 KB, one program.
Source     transformers 5.24 grouped_mm_experts_forward.
"""

from dataclasses import replace

import torch
from torch import Tensor

from dgemma_local.quant import Fp8, Nvfp4, Weight

from ._e2m1 import UNIT, decode, once
from ._gelu import gated_gelu, gated_gelu_twin
from ._launch import Cost, Rate, Tile, Tiles, cdiv, choose, contiguous, gpu_of, launch
from ._triton import tl, triton
from .router import Routing

SMALL = 16  # rows of the narrow product: what a tensor core's tile has room for at the least

# m weight rows (twice that of gate and up together), k of the sum; an item's rows come with the routing
GATED: dict[str, Tiles] = {
    "plain": {(8, 9): Tile(64, 0, 64, 4, 3), (9, 0): Tile(64, 0, 64, 4, 4), (12, 0): Tile(64, 0, 64, 4, 3)},
    "fp8": {(8, 9): Tile(64, 0, 128, 4, 3), (9, 0): Tile(64, 0, 128, 4, 4), (12, 0): Tile(64, 0, 128, 4, 3)},
    "nvfp4": {(8, 9): Tile(64, 0, 128, 4, 3), (9, 0): Tile(64, 0, 128, 4, 4), (12, 0): Tile(64, 0, 128, 4, 3)},
}
DOWN: dict[str, Tiles] = {
    "plain": {(8, 9): Tile(128, 0, 64, 4, 3), (9, 0): Tile(128, 0, 64, 4, 4), (12, 0): Tile(128, 0, 64, 4, 3)},
    "fp8": {(8, 9): Tile(128, 0, 64, 4, 5), (9, 0): Tile(128, 0, 64, 4, 5), (12, 0): Tile(128, 0, 64, 4, 5)},
    "nvfp4": {(8, 9): Tile(128, 0, 128, 4, 3), (9, 0): Tile(128, 0, 128, 4, 4), (12, 0): Tile(128, 0, 128, 4, 3)},
}
ONCE = {(8, 9): False, (9, 0): True, (12, 0): False}  # decode through shared memory; see _e2m1


# ── twin ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def gated_twin(x: Tensor | Fp8, routing: Routing, gate_up: Weight, dtype: torch.dtype) -> Tensor:
    """[P, F] by place."""
    rows = routing.order.long() // routing.chosen.shape[1]
    return gated_gelu_twin(products_twin(_take(x, rows), routing, gate_up, dtype))


def down_twin(h: Tensor | Fp8, routing: Routing, down: Weight, dtype: torch.dtype) -> Tensor:
    """[P, D] by pair."""
    y = products_twin(h, routing, down, dtype)
    return torch.empty_like(y).index_copy_(0, routing.order.long(), y)


def products_twin(rows: Tensor | Fp8, routing: Routing, w: Weight, dtype: torch.dtype) -> Tensor:
    """rows [P, in] by place -> [P, out] of `dtype`, each place with its expert's matrix; sums in fp32 or wider."""
    out, begin = [], 0
    for expert, end in enumerate(routing.ends.tolist()):
        out.append(_product(_take(rows, slice(begin, end)), w[expert], dtype))
        begin = end
    return torch.cat(out)


def _product(x: Tensor | Fp8, w: Weight, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    if isinstance(x, Fp8) and isinstance(w, Fp8):
        return ((x.codes.to(wide) @ w.codes.to(wide).T) * x.scale * w.scale.T.to(wide)).to(dtype)
    assert isinstance(x, Tensor) and not isinstance(w, Fp8)
    if isinstance(w, Tensor):
        return (x.to(wide) @ w.T.to(wide)).to(dtype)
    unit = replace(w, global_scale=torch.ones_like(w.global_scale)).decode(wide)
    whole = w.global_scale.repeat_interleave(torch.tensor(w.heights, device=w.device), -1).to(wide)
    sums = x.to(wide) @ unit.T
    return (sums / whole if w.divides else sums * whole).to(dtype)


def _take(x: Tensor | Fp8, rows: Tensor | slice) -> Tensor | Fp8:
    if isinstance(x, Tensor):
        return x[rows]
    return Fp8(x.codes.view(torch.uint8)[rows].view(torch.float8_e4m3fn), x.scale[rows])


# ── kernels ───────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _part(pointers, left, PART: tl.constexpr, EVEN: tl.constexpr):
    """A tile [rows, PART] of which `left` columns exist; the rest is 0."""
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, tl.arange(0, PART)[None, :] < left, other=0.0)


@triton.jit
def _weights(W, S, begin, KIND: tl.constexpr, OUT: tl.constexpr, ONCE: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """The operand [BM, BK] from `begin` on; W and S point at its rows."""
    if KIND == "nvfp4":
        packed = _part(W + begin // 2, (K - begin) // 2, BK // 2, K % BK == 0)
        scale = _part(S + begin // 16, (K - begin) // 16, BK // 16, K % BK == 0)
        tile = decode(packed, scale, OUT)
        if ONCE:
            tile = once(tile)
    else:
        tile = _part(W + begin, K - begin, BK, K % BK == 0)
    return tile


@triton.jit
def _columns(X, row, live, begin, K: tl.constexpr, BK: tl.constexpr):
    """x of the item's rows from `begin` on, [rows, BK]; 0 where there is none."""
    k = begin + tl.arange(0, BK)[None, :]
    if K % BK == 0:
        return tl.load(X + row[:, None] * K + k, live[:, None], other=0.0)
    return tl.load(X + row[:, None] * K + k, live[:, None] & (k < K), other=0.0)


@triton.jit
def _gated_item(
    X, XS, ORDER, W, S, G, H, expert, first, pairs, depth,
    KIND: tl.constexpr, DIVIDES: tl.constexpr, ONCE: tl.constexpr, FACTOR: tl.constexpr,
    D: tl.constexpr, F: tl.constexpr, A: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, BN)
    live = n < pairs
    row = tl.load(ORDER + first + n, live, other=0) // A
    f = tl.program_id(0) * BM + tl.arange(0, BM)
    at = tl.minimum(f, F - 1)[:, None]  # past the last row the last row again, and nothing is stored
    OUT: tl.constexpr = X.dtype.element_ty
    PACK: tl.constexpr = 2 if KIND == "nvfp4" else 1
    weights = W + expert.to(tl.int64) * 2 * F * (D // PACK) + at * (D // PACK) + tl.arange(0, BK // PACK)[None, :]
    scales = S + expert.to(tl.int64) * 2 * F * (D // 16) + at * (D // 16) + tl.arange(0, BK // 16)[None, :]

    gate = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for begin in range(0, depth, BK):
        x = _columns(X, row, live, begin, D, BK)
        w = _weights(weights, scales, begin, KIND, OUT, ONCE, D, BK)
        gate = tl.dot(w, x.T, gate, input_precision="ieee", max_num_imprecise_acc=BK)
        w = _weights(weights + F * (D // PACK), scales + F * (D // 16), begin, KIND, OUT, ONCE, D, BK)
        up = tl.dot(w, x.T, up, input_precision="ieee", max_num_imprecise_acc=BK)

    if KIND == "fp8":
        row_scale = tl.load(XS + row, live, other=0.0)[None, :]
        gate = gate * row_scale * tl.load(S + expert * 2 * F + at).to(tl.float32)
        up = up * row_scale * tl.load(S + expert * 2 * F + F + at).to(tl.float32)
    if KIND == "nvfp4":
        gate = _times_global(gate, tl.load(G + expert * 2), DIVIDES, FACTOR)
        up = _times_global(up, tl.load(G + expert * 2 + 1), DIVIDES, FACTOR)
    h = gated_gelu(gate, up, H.dtype.element_ty)
    tl.store(H + (first + n)[None, :] * F + f[:, None], h, live[None, :] & (f[:, None] < F))


@triton.jit
def _times_global(sums, whole, DIVIDES: tl.constexpr, FACTOR: tl.constexpr):
    if DIVIDES:
        return sums * (FACTOR / whole)
    return sums * (FACTOR * whole)


@triton.jit
def _down_item(
    H, HS, ORDER, W, S, G, Y, expert, first, pairs, depth,
    KIND: tl.constexpr, DIVIDES: tl.constexpr, ONCE: tl.constexpr, FACTOR: tl.constexpr,
    D: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, BN)
    live = n < pairs
    d = tl.program_id(0) * BM + tl.arange(0, BM)
    at = tl.minimum(d, D - 1)[:, None]
    OUT: tl.constexpr = H.dtype.element_ty
    PACK: tl.constexpr = 2 if KIND == "nvfp4" else 1
    weights = W + expert.to(tl.int64) * D * (F // PACK) + at * (F // PACK) + tl.arange(0, BK // PACK)[None, :]
    scales = S + expert.to(tl.int64) * D * (F // 16) + at * (F // 16) + tl.arange(0, BK // 16)[None, :]

    y = tl.zeros((BM, BN), tl.float32)
    for begin in range(0, depth, BK):
        h = _columns(H, first + n, live, begin, F, BK)
        w = _weights(weights, scales, begin, KIND, OUT, ONCE, F, BK)
        y = tl.dot(w, h.T, y, input_precision="ieee", max_num_imprecise_acc=BK)

    if KIND == "fp8":
        row_scale = tl.load(HS + first + n, live, other=0.0)[None, :]
        y = y * row_scale * tl.load(S + expert * D + at).to(tl.float32)
    if KIND == "nvfp4":
        y = _times_global(y, tl.load(G + expert), DIVIDES, FACTOR)
    pair = tl.load(ORDER + first + n, live, other=0)
    tl.store(Y + pair[None, :] * D + d[:, None], y.to(Y.dtype.element_ty), live[None, :] & (d[:, None] < D))


@triton.jit
def _experts_gated(
    X, XS, ORDER, ITEMS, W, S, G, H, depth,
    KIND: tl.constexpr, DIVIDES: tl.constexpr, ONCE: tl.constexpr, FACTOR: tl.constexpr, D: tl.constexpr,
    F: tl.constexpr, A: tl.constexpr, BM: tl.constexpr, SMALL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    item = ITEMS + tl.program_id(1) * 3
    expert = tl.load(item)
    first = tl.load(item + 1)
    pairs = tl.load(item + 2)
    if pairs > SMALL:
        _gated_item(
            X, XS, ORDER, W, S, G, H, expert, first, pairs, depth,
            KIND, DIVIDES, ONCE, FACTOR, D, F, A, BM, BN, BK,
        )  # fmt: skip
    elif pairs > 0:
        _gated_item(
            X, XS, ORDER, W, S, G, H, expert, first, pairs, depth,
            KIND, DIVIDES, ONCE, FACTOR, D, F, A, BM, SMALL, BK,
        )  # fmt: skip


@triton.jit
def _experts_down(
    H, HS, ORDER, ITEMS, W, S, G, Y, depth,
    KIND: tl.constexpr, DIVIDES: tl.constexpr, ONCE: tl.constexpr, FACTOR: tl.constexpr, D: tl.constexpr,
    F: tl.constexpr, BM: tl.constexpr, SMALL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    item = ITEMS + tl.program_id(1) * 3
    expert = tl.load(item)
    first = tl.load(item + 1)
    pairs = tl.load(item + 2)
    if pairs > SMALL:
        _down_item(
            H, HS, ORDER, W, S, G, Y, expert, first, pairs, depth,
            KIND, DIVIDES, ONCE, FACTOR, D, F, BM, BN, BK,
        )  # fmt: skip
    elif pairs > 0:
        _down_item(
            H, HS, ORDER, W, S, G, Y, expert, first, pairs, depth,
            KIND, DIVIDES, ONCE, FACTOR, D, F, BM, SMALL, BK,
        )  # fmt: skip


# ── wrappers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def gated(x: Tensor | Fp8, routing: Routing, gate_up: Weight, dtype: torch.dtype, tile: Tile | None = None) -> Tensor:
    """x [T, D] -> h [P, F] of `dtype`, by place in `routing.order`."""
    T, D = x.shape
    E, F2, _ = gate_up.shape
    P, A = routing.order.numel(), routing.chosen.shape[1]
    kind = _kind(x, gate_up)
    if gate_up.shape[2] != D or F2 % 2 or P != T * A or routing.ends.shape != (E,):
        raise ValueError(
            f"experts: x {tuple(x.shape)}, gate_up {tuple(gate_up.shape)}, {P} pairs, ends {tuple(routing.ends.shape)}"
        )
    codes, scale, whole, divides = stored(gate_up)
    contiguous("experts", gate_up=codes, scale=scale, rows_scale=x.scale if isinstance(x, Fp8) else None)
    values, row_scale = (x.codes, x.scale) if isinstance(x, Fp8) else (x, x)
    tile = tile or choose(GATED[kind], gpu_of(codes))
    h = codes.new_empty(P, F2 // 2, dtype=dtype)
    launch(
        _experts_gated, (cdiv(F2 // 2, tile.m), len(routing.work())),
        values.contiguous(), row_scale, routing.order, routing.work(), codes, scale, whole, h, D,
        KIND=kind, DIVIDES=divides, ONCE=_once(codes), FACTOR=1 / UNIT, D=D, F=F2 // 2, A=A,
        BM=tile.m, SMALL=SMALL, BN=max(2 * SMALL, routing.block), BK=tile.k,
        warps=tile.warps, stages=tile.stages, cost=lambda: products_cost(P, gate_up, h, x),
    )  # fmt: skip
    return h


def down(h: Tensor | Fp8, routing: Routing, w: Weight, dtype: torch.dtype, tile: Tile | None = None) -> Tensor:
    """h [P, F] by place -> y [P, D] of `dtype`, by pair."""
    P, F = h.shape
    E, D, _ = w.shape
    kind = _kind(h, w)
    if w.shape[2] != F or routing.order.numel() != P or routing.ends.shape != (E,):
        raise ValueError(
            f"experts: h {tuple(h.shape)}, down {tuple(w.shape)}, {routing.order.numel()} pairs,"
            f" ends {tuple(routing.ends.shape)}"
        )
    codes, scale, whole, divides = stored(w)
    contiguous("experts", down=codes, scale=scale, rows_scale=h.scale if isinstance(h, Fp8) else None)
    values, row_scale = (h.codes, h.scale) if isinstance(h, Fp8) else (h, h)
    tile = tile or choose(DOWN[kind], gpu_of(codes))
    y = codes.new_empty(P, D, dtype=dtype)
    launch(
        _experts_down, (cdiv(D, tile.m), len(routing.work())),
        values.contiguous(), row_scale, routing.order, routing.work(), codes, scale, whole, y, F,
        KIND=kind, DIVIDES=divides, ONCE=_once(codes), FACTOR=1 / UNIT, D=D, F=F,
        BM=tile.m, SMALL=SMALL, BN=max(2 * SMALL, routing.block), BK=tile.k,
        warps=tile.warps, stages=tile.stages, cost=lambda: products_cost(P, w, y, h),
    )  # fmt: skip
    return y


def _kind(x: Tensor | Fp8, w: Weight) -> str:
    if isinstance(x, Tensor) and isinstance(w, Tensor) and x.dtype == w.dtype:
        return "plain"
    if isinstance(x, Fp8) and isinstance(w, Fp8):
        return "fp8"
    if isinstance(x, Tensor) and isinstance(w, Nvfp4):
        return "nvfp4"
    raise ValueError(f"experts: no product of {type(x).__name__} rows and {type(w).__name__} weights")


def stored(w: Weight) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Codes, scales, global scales and their sense; of what has none the codes, which nobody then reads as such."""
    if isinstance(w, Tensor):
        return w, w, w, False
    if isinstance(w, Fp8):
        return w.codes, w.scale, w.codes, False
    return w.packed, w.scale, w.global_scale, w.divides


def _once(x: Tensor) -> bool:
    return ONCE.get(gpu_of(x).capability, False)


def products_cost(pairs: int, w: Weight, out: Tensor | Nvfp4, x: Tensor | Fp8 | Nvfp4) -> Cost:
    """Every expert's weights once, x once, what is stored once; two flops a weight and pair."""
    rate: Rate = "fp8" if isinstance(x, Fp8) else "fp4" if isinstance(x, Nvfp4) else "bf16"
    return Cost(w.nbytes + x.nbytes + out.nbytes, 2 * pairs * w.shape[1] * w.shape[2], rate)
