"""The router: which A of E experts each row goes to, with which weight, and the rows in the experts' order.

    u       = (r / rms(r)) · scale · D^-½              rms(r) = sqrt(mean(r²) + eps)
    p       = softmax(u @ projᵀ)                       over all E experts
    w, e    = the A largest p and their experts;       of equals the lower number comes first
    weight  = w / Σ w · per_expert_scale[e]            need not sum to 1
    pair    = t·A + slot,  sorted by expert;           stable: within an expert by pair
    item    = (expert, first, pairs)                   up to `block` pairs of one expert, what one grouped tile works on

Shapes     r [T, D]; scale [D]; proj [E, D]; per_expert_scale [E] -> Routing, below.
Precision  r / rms, · scale and · D^-½ are each rounded to r's dtype, and so are the logits; sums, softmax and weights
           are fp32. A sum of D products in another order can move a logit by one step of the dtype, and with it a choice.
Traffic    proj once from memory and from the L2 for every 16 rows; r twice; the rest is small.
Grid       logits: blocks of rows × SPLITS parts of D: 176 programs of 4 steps for 256 rows, two a processor;
           choose: blocks of rows; group: one program an expert, each counts all pairs by itself. No atomics: the same
           bits every time. Every warp of a logits program makes u for itself (560 instructions a step): through
           shared memory it was no fewer.
Source     transformers 5.24 DiffusionGemmaTextRouter; top-k there leaves the order of equals open.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ._launch import Cost, Tile, Tiles, cdiv, choose, contiguous, gpu_of, launch, power_of_two
from ._triton import tl, triton
from .norms import normalise

SPLITS = 11  # parts of D: 2,816 is 11 · 4 · 64
GROUP_WARPS = 8
MOST_PAIRS = 1 << 20  # elements of a block, triton's own bound: each program of `_router_group` holds all pairs
ITEM = 32  # most pairs of an item of work

# m rows; n rows of the softmax; k of D
TILES: Tiles = {
    (8, 9): Tile(16, 4, 64, 4, 3),
    (9, 0): Tile(16, 4, 64, 4, 3),
    (12, 0): Tile(16, 4, 64, 4, 3),
}


@dataclass(frozen=True, slots=True)
class Routing:
    """Where each row goes, and the same sorted by expert; all on the device."""

    weights: Tensor  # fp32 [T, A]
    chosen: Tensor  # [T, A], int32; the twin's int64, as torch likes its indices
    order: Tensor  # [T·A], the same, pairs t·A + slot, expert by expert
    ends: Tensor  # int32 [E], one past each expert's last place in `order`
    items: Tensor | None = None  # int32 [I, 3]: expert, first place in `order`, pairs (0: none, and no item follows)
    block: int = 0  # most pairs of an item

    def work(self) -> Tensor:
        """The items. Raises ValueError where the routing was made for torch, without any."""
        if self.items is None:
            raise ValueError("routing: no items of work, which router.route makes")
        return self.items


def items_at_most(pairs: int, experts: int, block: int) -> int:
    """No routing makes more: every expert that has pairs may have one item that is not full."""
    return min(experts, pairs) + pairs // block


def probabilities_twin(r: Tensor, scale: Tensor, proj: Tensor, eps: float) -> Tensor:
    """r [..., T, D] -> softmax over all experts, fp32 (fp64 of fp64) [..., T, E]."""
    u = normalise(r, eps).to(r.dtype) * scale * r.shape[-1] ** -0.5  # each step rounded, as the reference has it
    return F.linear(u, proj).softmax(-1, dtype=torch.promote_types(r.dtype, torch.float32))


def route_twin(
    r: Tensor,
    scale: Tensor,
    proj: Tensor,
    per_expert_scale: Tensor,
    top_k: int,
    eps: float,
    block: int | None = None,
) -> Routing:
    """The same in torch, of r [..., T, D]; without a block no items, which kernels alone read."""
    weights, chosen = probabilities_twin(r, scale, proj, eps).sort(dim=-1, descending=True, stable=True)
    weights, chosen = weights[..., :top_k], chosen[..., :top_k]
    weights = weights / weights.sum(-1, keepdim=True) * per_expert_scale.take(chosen)
    order, ends = group_twin(chosen, len(proj))
    items = None if block is None else items_twin(ends, chosen.numel(), block)
    return Routing(weights, chosen, order, ends, items, block or 0)


def group_twin(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """chosen [..., T, A] -> order, ends."""
    flat = chosen.flatten()
    return flat.argsort(stable=True), torch.bincount(flat, minlength=experts).cumsum(0, dtype=torch.int32)


def items_twin(ends: Tensor, pairs: int, block: int) -> Tensor:
    items = [
        (e, first, min(block, end - first))
        for e, (begin, end) in enumerate(pairwise([0, *ends.tolist()]))
        for first in range(begin, end, block)
    ]
    items += [(0, 0, 0)] * (items_at_most(pairs, len(ends), block) - len(items))
    return torch.tensor(items, dtype=torch.int32, device=ends.device).view(-1, 3)


@triton.jit
def _router_logits(
    R, SCALE, PROJ, PARTS, T, width, eps,
    D: tl.constexpr, E: tl.constexpr, SPLITS: tl.constexpr, EXPERTS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    r_rows = R + rows[:, None].to(tl.int64) * D
    squares = tl.zeros((BM, WIDE), tl.float32)
    for begin in tl.static_range(0, D, WIDE):
        columns = begin + tl.arange(0, WIDE)[None, :]
        wide = tl.load(r_rows + columns, (rows[:, None] < T) & (columns < D), other=0.0).to(tl.float32)
        squares += wide * wide
    unit = tl.rsqrt(tl.sum(squares, 1) / D + eps)[:, None]

    experts = tl.arange(0, EXPERTS)
    logits = tl.zeros((BM, EXPERTS), tl.float32)
    steps: tl.constexpr = (D + SPLITS * BK - 1) // (SPLITS * BK)
    for step in range(steps):
        k = (part * steps + step) * BK + tl.arange(0, BK)
        x = tl.load(r_rows + k[None, :], (rows[:, None] < T) & (k[None, :] < D), other=0.0)
        scale = tl.load(SCALE + k, k < D, other=0.0).to(tl.float32)
        proj = tl.load(PROJ + experts[:, None] * D + k[None, :], (experts[:, None] < E) & (k[None, :] < D), other=0.0)
        normed = (x.to(tl.float32) * unit).to(R.dtype.element_ty)
        scaled = (normed.to(tl.float32) * scale[None, :]).to(R.dtype.element_ty)
        u = (scaled.to(tl.float32) * width).to(R.dtype.element_ty)
        logits = tl.dot(u, proj.T, logits, input_precision="ieee")
    out = PARTS + (part * T + rows[:, None]) * E + experts[None, :]
    tl.store(out, logits, (rows[:, None] < T) & (experts[None, :] < E))


@triton.jit
def _router_choose(
    PARTS, EXPERT_SCALE, WEIGHTS, CHOSEN, T,
    E: tl.constexpr, A: tl.constexpr, SPLITS: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    experts = tl.arange(0, EXPERTS)[None, :]
    live = (rows[:, None] < T) & (experts < E)
    logits = tl.zeros((BM, EXPERTS), tl.float32)
    for part in tl.static_range(SPLITS):
        logits += tl.load(PARTS + (part * T + rows[:, None]) * E + experts, live, other=0.0)
    logits = logits.to(EXPERT_SCALE.dtype.element_ty).to(tl.float32)  # rounded as the model's dtype has them
    logits = tl.where(experts < E, logits, -float("inf"))
    p = tl.exp(logits - tl.max(logits, 1)[:, None])
    p = tl.where(experts < E, p / tl.sum(p, 1)[:, None], -1.0)

    slots = tl.arange(0, SLOTS)[None, :]
    weights = tl.zeros((BM, SLOTS), tl.float32)
    chosen = tl.zeros((BM, SLOTS), tl.int32)
    for slot in tl.static_range(A):
        value, best = tl.max(p, 1, return_indices=True, return_indices_tie_break_left=True)
        best = tl.minimum(best, E - 1)  # a row of NaN has no best, and must not point outside
        weights = tl.where(slots == slot, value[:, None], weights)
        chosen = tl.where(slots == slot, best[:, None], chosen)
        p = tl.where(experts == best[:, None], -1.0, p)
    weights = weights / tl.sum(weights, 1)[:, None] * tl.load(EXPERT_SCALE + chosen).to(tl.float32)
    out = rows[:, None] * A + slots
    live = (rows[:, None] < T) & (slots < A)
    tl.store(WEIGHTS + out, weights, live)
    tl.store(CHOSEN + out, chosen, live)


@triton.jit
def _router_group(
    CHOSEN, ORDER, ENDS, ITEMS, pairs, items,
    E: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr, PAIRS: tl.constexpr, ITEM_BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    pair = tl.arange(0, PAIRS)
    chosen = tl.load(CHOSEN + pair, pair < pairs, other=E)
    mine = (chosen == expert).to(tl.int32)
    first = tl.sum((chosen < expert).to(tl.int32))
    count = tl.sum(mine)
    tl.store(ORDER + first + tl.cumsum(mine, 0) - 1, pair, chosen == expert)
    tl.store(ENDS + expert, first + count)

    counts = tl.histogram(chosen, EXPERTS, mask=pair < pairs)
    blocks = tl.where(tl.arange(0, EXPERTS) < E, (counts + BLOCK - 1) // BLOCK, 0)
    before = tl.sum(tl.where(tl.arange(0, EXPERTS) < expert, blocks, 0))
    total = tl.sum(blocks)
    own = (count + BLOCK - 1) // BLOCK
    place = tl.arange(0, ITEM_BLOCK)
    # the last expert's program also closes the list
    live = (place >= before) & ((place < before + own) | ((expert == E - 1) & (place < items)))
    is_item = place < total
    done = (place - before) * BLOCK
    tl.store(ITEMS + place * 3, tl.where(is_item, expert, 0), live)
    tl.store(ITEMS + place * 3 + 1, tl.where(is_item, first + done, 0), live)
    tl.store(ITEMS + place * 3 + 2, tl.where(is_item, tl.minimum(count - done, BLOCK), 0), live)


def route(
    r: Tensor,
    scale: Tensor,
    proj: Tensor,
    per_expert_scale: Tensor,
    top_k: int,
    eps: float,
    block: int = ITEM,
    tile: Tile | None = None,
) -> Routing:
    """r [T, D], un-normalised -> Routing; `block` is the most pairs that one item of work may have."""
    T, D = r.shape
    E = proj.shape[0]
    if proj.shape[1] != D or scale.shape != (D,) or per_expert_scale.shape != (E,) or not 0 < top_k <= E:
        raise ValueError(
            f"route: r {tuple(r.shape)}, scale {tuple(scale.shape)}, proj {tuple(proj.shape)},"
            f" per_expert_scale {tuple(per_expert_scale.shape)}, top_k {top_k}"
        )
    contiguous("route", scale=scale, proj=proj, per_expert_scale=per_expert_scale)
    _countable(T * top_k, E, block)
    if not T or {scale.dtype, proj.dtype, per_expert_scale.dtype} != {r.dtype}:
        raise ValueError(f"route: r {tuple(r.shape)} {r.dtype}, {scale.dtype}, {proj.dtype}, {per_expert_scale.dtype}")
    tile = tile or choose(TILES, gpu_of(r))
    experts = max(16, power_of_two(E))
    parts = r.new_empty(SPLITS, T, E, dtype=torch.float32)
    launch(
        _router_logits, (cdiv(T, tile.m), SPLITS),
        r.contiguous(), scale, proj, parts, T, D**-0.5, eps,
        D=D, E=E, SPLITS=SPLITS, EXPERTS=experts, BM=tile.m, BK=tile.k, WIDE=min(512, power_of_two(D)),
        warps=tile.warps, stages=tile.stages, cost=lambda: logits_cost(T, D, E, r.element_size()),
    )  # fmt: skip
    weights = r.new_empty(T, top_k, dtype=torch.float32)
    chosen = r.new_empty(T, top_k, dtype=torch.int32)
    launch(
        _router_choose, (cdiv(T, tile.n),), parts, per_expert_scale, weights, chosen, T,
        E=E, A=top_k, SPLITS=SPLITS, EXPERTS=experts, SLOTS=power_of_two(top_k), BM=tile.n,
        warps=tile.warps, cost=lambda: Cost(4 * T * (SPLITS * E + 2 * top_k)),
    )  # fmt: skip
    return Routing(weights, chosen, *group(chosen, E, block), block)


def group(chosen: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """chosen int32 [T, A] -> order, ends, items, as Routing has them."""
    pairs = chosen.numel()
    items = _countable(pairs, experts, block)
    order, ends = chosen.new_empty(pairs), chosen.new_empty(experts)
    table = chosen.new_empty(items, 3)
    launch(
        _router_group, (experts,), chosen, order, ends, table, pairs, items,
        E=experts, BLOCK=block, EXPERTS=power_of_two(experts),
        PAIRS=power_of_two(pairs), ITEM_BLOCK=power_of_two(items),
        warps=GROUP_WARPS, cost=lambda: Cost(4 * (2 * pairs + experts + 3 * items)),
    )  # fmt: skip
    return order, ends, table


def _countable(pairs: int, experts: int, block: int) -> int:
    """`items_at_most`; ValueError where there is nothing to count, or more than a block of triton holds."""
    items = items_at_most(pairs, experts, block) if block > 0 else 0
    if pairs > MOST_PAIRS or not 0 < items <= MOST_PAIRS:
        raise ValueError(f"route: {pairs} pairs in blocks of {block}, wanted 1 … {MOST_PAIRS} pairs and as many items")
    return items


def logits_cost(T: int, D: int, E: int, element_bytes: int) -> Cost:
    """r and proj read once, the partial logits written."""
    return Cost(element_bytes * (T * D + E * D + D) + 4 * SPLITS * T * E, 2 * T * D * E, "bf16")
