"""The experts' two products with both operands in NVFP4, by the tensor core's own block scales: sm_120.

    sums[m, n] = Σ over groups of 16  scale_w · scale_x · Σ code_w · code_x                 tl.dot_scaled, mxf4nvf4
    gate, up   = sums / (global_w · global_x)        or · global_w / global_x               where global_w multiplies
    h          = gelu(gate) · up, rounded to `dtype`, then quantised under its expert's input scale, as rows.py has it
    y[pair]    = sums of down / (global_w · input_scale)

Shapes     x Nvfp4 [T, D]; gate_up Nvfp4 [E, 2F, D], down Nvfp4 [E, D, F], F a multiple of 16 -> y [P, D] by pair.
Precision  products and sums in fp32; where it rounds: gate, up, gelu, product (_gelu.py), h's scales
           to E4M3 and its codes to E2M1, y. A group of 16 lies inside a program's rows, so that h never leaves it wider.
Traffic    weights once, 0.5625 bytes each; x, h and y about A times, from the L2.
Grid       blocks of weight rows × items, as experts_grouped.
"""

from dataclasses import replace

import torch
from torch import Tensor

from dgemma_local.quant import E2M1_MAX, Nvfp4, Weight

from ._e4m3 import to_e4m3
from ._gelu import gated_gelu, gated_gelu_twin
from ._launch import Tile, Tiles, cdiv, choose, gpu_of, launch
from ._triton import tl, triton
from .experts_grouped import SMALL, products_cost
from .router import Routing
from .rows import larger, quantise_rows_nvfp4_twin, to_e2m1

GATED: Tiles = {(12, 0): Tile(64, 0, 256, 4, 3)}
DOWN: Tiles = {(12, 0): Tile(128, 0, 128, 4, 4)}


# ── twin ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def pairs_twin(x: Nvfp4, routing: Routing, gate_up: Weight, down: Weight, dtype: torch.dtype) -> Tensor:
    """[P, D] by pair."""
    gate_up, down = _packed(gate_up), _packed(down)
    rows = routing.order.long() // routing.chosen.shape[1]
    y, begin = [], 0
    for expert, end in enumerate(routing.ends.tolist()):
        own = rows[begin:end]
        mine = replace(x, packed=x.packed[own], scale=_pick(x.scale, own), heights=(len(own),))
        h = gated_gelu_twin(_product(mine, gate_up[expert], dtype))
        y.append(_product(quantise_rows_nvfp4_twin(h, input_scale(down)[expert]), down[expert], dtype))
        begin = end
    by_place = torch.cat(y)
    return torch.empty_like(by_place).index_copy_(0, routing.order.long(), by_place)


def _product(x: Nvfp4, w: Nvfp4, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    units = [replace(t, global_scale=torch.ones_like(t.global_scale)).decode(wide) for t in (x, w)]
    whole = w.global_scale.repeat_interleave(torch.tensor(w.heights, device=w.device), -1)
    factor = 1 / (x.global_scale * whole) if w.divides else whole / x.global_scale
    return (units[0] @ units[1].T * factor.to(wide)).to(dtype)


def _pick(scale: Tensor, rows: Tensor) -> Tensor:
    return scale.view(torch.uint8)[rows].view(torch.float8_e4m3fn)


def input_scale(w: Nvfp4) -> Tensor:
    """[E, parts], in the sense that divides."""
    return w.input_scale if w.divides else 1 / w.input_scale


def _packed(w: Weight) -> Nvfp4:
    if not isinstance(w, Nvfp4):
        raise ValueError(f"experts: no product of Nvfp4 rows and {type(w).__name__} weights")
    return w


# ── kernels ───────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _part(pointers, live, left, PART: tl.constexpr, EVEN: tl.constexpr):
    """A tile [rows, PART] of whose columns `left` exist, of its live rows; the rest is 0."""
    if EVEN:
        return tl.load(pointers, live, other=0.0)
    return tl.load(pointers, live & (tl.arange(0, PART)[None, :] < left), other=0.0)


@triton.jit
def _sums(W, S, X, XS, w_row, x_row, w_live, x_live, sums, begin, K: tl.constexpr, BK: tl.constexpr):
    """sums [BM, BN] and what BK products from `begin` on add to them."""
    half = (begin // 2 + tl.arange(0, BK // 2))[None, :]
    group = (begin // 16 + tl.arange(0, BK // 16))[None, :]
    EVEN: tl.constexpr = K % BK == 0
    w = _part(W + w_row * (K // 2) + half, w_live, (K - begin) // 2, BK // 2, EVEN)
    w_scale = _part(S + w_row * (K // 16) + group, w_live, (K - begin) // 16, BK // 16, EVEN)
    x = _part(X + x_row * (K // 2) + half, x_live, (K - begin) // 2, BK // 2, EVEN)
    x_scale = _part(XS + x_row * (K // 16) + group, x_live, (K - begin) // 16, BK // 16, EVEN)
    return tl.dot_scaled(w, w_scale, "e2m1", x.T, x_scale, "e2m1", sums)


@triton.jit
def _factor(whole, x_whole, DIVIDES: tl.constexpr):
    if DIVIDES:
        return 1.0 / (whole * x_whole)
    return whole / x_whole


@triton.jit
def _gated_item(
    X, XS, XG, ORDER, W, S, G, HG, H, HS, expert, first, pairs, depth,
    DIVIDES: tl.constexpr, D: tl.constexpr, F: tl.constexpr, A: tl.constexpr, OUT: tl.constexpr,
    LARGEST: tl.constexpr, NO_SCALE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, BN)
    live = n < pairs
    row = tl.load(ORDER + first + n, live, other=0) // A
    f = tl.program_id(0) * BM + tl.arange(0, BM)
    base = expert.to(tl.int64) * 2 * F
    weights, scales = W + base * (D // 2), S + base * (D // 16)
    gate = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    at, exists = f[:, None], f[:, None] < F
    for begin in range(0, depth, BK):
        gate = _sums(weights, scales, X, XS, at, row[:, None], exists, live[:, None], gate, begin, D, BK)
        up = _sums(weights, scales, X, XS, F + at, row[:, None], exists, live[:, None], up, begin, D, BK)
    x_whole = tl.load(XG)
    gate = gate * _factor(tl.load(G + expert * 2), x_whole, DIVIDES)
    up = up * _factor(tl.load(G + expert * 2 + 1), x_whole, DIVIDES)

    GROUPS: tl.constexpr = BM // 16
    whole = tl.load(HG + expert)
    h = gated_gelu(gate, up, OUT).to(tl.float32).T.reshape(BN, GROUPS, 16)
    scale = to_e4m3(whole * tl.div_rn(tl.reduce(tl.abs(h), 2, larger), LARGEST))
    scale = tl.where(scale.to(tl.float32) == 0, NO_SCALE, scale.to(tl.float32))
    unit = tl.div_rn(scale, tl.broadcast_to(whole, (BN, GROUPS)))
    code = to_e2m1(tl.div_rn(h, tl.broadcast_to(unit[:, :, None], (BN, GROUPS, 16))))
    low, high = tl.split(code.reshape(BN, BM // 2, 2))
    half = tl.program_id(0) * (BM // 2) + tl.arange(0, BM // 2)[None, :]
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)[None, :]
    place = (first + n)[:, None]
    tl.store(H + place * (F // 2) + half, (low | (high << 4)).to(tl.uint8), live[:, None] & (half < F // 2))
    tl.store(HS + place * (F // 16) + group, to_e4m3(scale), live[:, None] & (group < F // 16))


@triton.jit
def _down_item(
    H, HS, HG, ORDER, W, S, G, Y, expert, first, pairs, depth,
    DIVIDES: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, BN)
    live = n < pairs
    d = tl.program_id(0) * BM + tl.arange(0, BM)
    base = expert.to(tl.int64) * D
    weights, scales = W + base * (F // 2), S + base * (F // 16)
    y = tl.zeros((BM, BN), tl.float32)
    at, exists, place = d[:, None], d[:, None] < D, (first + n)[:, None]
    for begin in range(0, depth, BK):
        y = _sums(weights, scales, H, HS, at, place, exists, live[:, None], y, begin, F, BK)
    y = y * _factor(tl.load(G + expert), tl.load(HG + expert), DIVIDES)
    pair = tl.load(ORDER + first + n, live, other=0)
    tl.store(Y + pair[None, :] * D + at, y.to(Y.dtype.element_ty), live[None, :] & exists)


@triton.jit
def _experts_gated_nvfp4(
    X, XS, XG, ORDER, ITEMS, W, S, G, HG, H, HS, LIKE, depth,
    DIVIDES: tl.constexpr, D: tl.constexpr, F: tl.constexpr, A: tl.constexpr, LARGEST: tl.constexpr,
    NO_SCALE: tl.constexpr, BM: tl.constexpr, SMALL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    item = ITEMS + tl.program_id(1) * 3
    expert = tl.load(item)
    first = tl.load(item + 1)
    pairs = tl.load(item + 2)
    OUT: tl.constexpr = LIKE.dtype.element_ty
    if pairs > SMALL:
        _gated_item(
            X, XS, XG, ORDER, W, S, G, HG, H, HS, expert, first, pairs, depth,
            DIVIDES, D, F, A, OUT, LARGEST, NO_SCALE, BM, BN, BK,
        )  # fmt: skip
    elif pairs > 0:
        _gated_item(
            X, XS, XG, ORDER, W, S, G, HG, H, HS, expert, first, pairs, depth,
            DIVIDES, D, F, A, OUT, LARGEST, NO_SCALE, BM, SMALL, BK,
        )  # fmt: skip


@triton.jit
def _experts_down_nvfp4(
    H, HS, HG, ORDER, ITEMS, W, S, G, Y, depth,
    DIVIDES: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, SMALL: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    item = ITEMS + tl.program_id(1) * 3
    expert = tl.load(item)
    first = tl.load(item + 1)
    pairs = tl.load(item + 2)
    if pairs > SMALL:
        _down_item(H, HS, HG, ORDER, W, S, G, Y, expert, first, pairs, depth, DIVIDES, D, F, BM, BN, BK)
    elif pairs > 0:
        _down_item(H, HS, HG, ORDER, W, S, G, Y, expert, first, pairs, depth, DIVIDES, D, F, BM, SMALL, BK)


# ── wrapper ───────────────────────────────────────────────────────────────────────────────────────────────────────


def pairs(x: Nvfp4, routing: Routing, gate_up: Weight, down: Weight, dtype: torch.dtype) -> Tensor:
    """x [T, D] -> y [P, D] of `dtype`, by pair."""
    gate_up, down = _packed(gate_up), _packed(down)
    T, D = x.shape
    E, F = down.shape[0], down.shape[2]
    P, A = routing.order.numel(), routing.chosen.shape[1]
    if gate_up.shape != (E, 2 * F, D) or down.shape[1] != D or P != T * A or routing.ends.shape != (E,):
        raise ValueError(
            f"experts: x {tuple(x.shape)}, gate_up {gate_up.shape}, down {down.shape}, {P} pairs,"
            f" ends {tuple(routing.ends.shape)}"
        )
    if not x.divides or x.global_scale.numel() != 1:
        raise ValueError(f"experts: x has {x.global_scale.numel()} global scales, divides {x.divides}; wanted 1, True")
    whole = input_scale(down)
    h = Nvfp4.empty((P, F), device=x.device)
    y = x.packed.new_empty(P, D, dtype=dtype)
    items, block = routing.work(), max(2 * SMALL, routing.block)
    tile = choose(GATED, gpu_of(x.packed))
    launch(
        _experts_gated_nvfp4, (cdiv(F, tile.m), len(items)),
        x.packed, x.scale, x.global_scale, routing.order, items, gate_up.packed, gate_up.scale, gate_up.global_scale,
        whole, h.packed, h.scale, y, D,
        DIVIDES=gate_up.divides, D=D, F=F, A=A, LARGEST=E2M1_MAX, NO_SCALE=0.125,
        BM=tile.m, SMALL=SMALL, BN=block, BK=tile.k,
        warps=tile.warps, stages=tile.stages, cost=lambda: products_cost(P, gate_up, h, x),
    )  # fmt: skip
    tile = choose(DOWN, gpu_of(x.packed))
    launch(
        _experts_down_nvfp4, (cdiv(D, tile.m), len(items)),
        h.packed, h.scale, whole, routing.order, items, down.packed, down.scale, down.global_scale, y, F,
        DIVIDES=down.divides, D=D, F=F, BM=tile.m, SMALL=SMALL, BN=block, BK=tile.k,
        warps=tile.warps, stages=tile.stages, cost=lambda: products_cost(P, down, y, h),
    )  # fmt: skip
    return y
