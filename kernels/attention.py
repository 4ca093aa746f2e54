"""Attention of one pass over the K/V slabs: canvas rows that see everything, prompt rows that see back to a window.

    o_r = Σ_j p_rj v_j / Σ_j p_rj        p_rj = 2^(s_rj − c_r)        s_rj = (q_r · k_j) · log2 e        j in what row r sees

    slots      first ………………… at ………………… at+rows          row r of the pass sits at slot at+r
    denoising  all of them                                    every row
    encoder    max(first, at+r−W+1) … at+r                    W the window, with the row itself; none: from first

What a row sees is read from device memory (`span`), so that one captured graph serves every phase.

Shapes     q [T, H, d]   K, V slabs [KV, capacity, d], any strides but the last   out [T, H·d]   span int32 [4]
           The H/KV query heads of a KV head lie in one tile, as rows (t, g): keys and values are read once for all.
Precision  Scale 1.0. Scores, sums and the softmax in fp32. Numerators stay in fp32 for their own sum, and are rounded to
           the model's dtype for the product with V, which is summed in fp32; the quotient is rounded once.
           c_r is the running maximum rounded up to an integer: every rescaling is by a power of two, hence exact, and a
           numerator rounds the same way whatever the tile, the order or the split. E4M3 K/V are cast, without a scale.
Splits     Programs of different splits take successive runs of a tile's key blocks and leave (c, Σp, Σpv) in fp32;
           `_combine` adds them in order of their number. An empty split leaves c = −inf and is not read.
Traffic    q and out once, K/V of what is seen once (other tiles of a KV head find them in L2), partial results twice.
Grid       (row tiles, KV, splits); the combination: (blocks of rows, KV).
Source     FlashAttention-2 (Dao 2023), Flash-Decoding (Dao et al. 2023); the mask is transformers 5.24's with DynamicCache.
"""

import torch
from torch import Tensor

from ._launch import Cost, Gpu, Tile, Tiles, choose, gpu_of, launch
from ._out import filled, target
from ._triton import tl, triton

LOG2E = 1.4426950408889634  # scores are taken in bits, so that a power of two is an integer away

# By head dim, then capability; k is the head dim. None spills, and the tightest takes 100,608 of 101,376 bytes. The rows
# of a tile share its keys: 64 of head dim 512 ask L2 for half of what 32 would.
TILES: dict[int, Tiles] = {
    128: {(8, 9): Tile(64, 32, 128, 4, 2)},  # and less
    256: {(8, 9): Tile(64, 32, 256, 8, 2), (9, 0): Tile(128, 64, 256, 8, 2), (12, 0): Tile(64, 32, 256, 8, 2)},
    512: {(8, 9): Tile(64, 16, 512, 8, 2), (9, 0): Tile(64, 32, 512, 8, 2), (12, 0): Tile(64, 16, 512, 8, 2)},
}
COMBINED_ROWS = 4  # a program of the combination
MOST_SPLITS = 16
# bf16 flops in the time of a byte of partial results: what the L2 gives a processor, 64 bytes a cycle (datasheets: 8, 64 and
# 9 flops a byte), twice, for it is other processors that read them, and not all of them are still there
BALANCE = {(8, 9): 16, (9, 0): 128, (12, 0): 18}


# ── truth ───────────────────────────────────────────────────────────────────────────────────────────────────────


def visible(span: Tensor, window: int | None, rows: int, slots: int) -> Tensor:
    """[rows, slots] bool: which slots each row sees; a row beyond span's sees none."""
    first, at, live, causal = span.long().unbind()
    row = torch.arange(rows, device=span.device)[:, None]
    slot = torch.arange(slots, device=span.device)
    begin = first if window is None else torch.where(causal > 0, torch.maximum(first, at + row - window + 1), first)
    end = torch.where(causal > 0, at + row + 1, at + live)
    return (row < live) & (begin <= slot) & (slot < end)


def attention_twin(
    q: Tensor, k_slab: Tensor, v_slab: Tensor, span: Tensor, window: int | None, *, out: Tensor | None = None
) -> Tensor:
    """q [T, H, d], slabs [KV, capacity, d] -> [T, H·d] in q's dtype, with the kernel's roundings; fp64 stays fp64."""
    (T, H, _), (KV, slots, d) = q.shape, k_slab.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    seen = visible(span, window, T, slots)
    anyone = seen.any(0)[:, None]  # slots that hold nothing yet may be NaN
    keys, values = (slab.to(q.dtype).to(wide).where(anyone, 0.0) for slab in (k_slab, v_slab))
    queries = q.to(wide).view(T, KV, H // KV, d).permute(1, 0, 2, 3).flatten(1, 2)  # [KV, T·G, d]
    score = (queries @ keys.mT) * LOG2E
    score = score.masked_fill(~seen.repeat_interleave(H // KV, 0), -torch.inf)
    p = (score - score.amax(-1, keepdim=True).ceil().clamp_min(torch.finfo(wide).min)).exp2()
    total = p.sum(-1, keepdim=True)
    o = p.to(q.dtype).to(wide) @ values / total.masked_fill(total == 0, 1.0)
    return filled("attention", out, o.to(q.dtype).view(KV, T, H // KV, d).permute(1, 0, 2, 3).reshape(T, H * d))


# ── kernels ─────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit(do_not_specialize=["capacity"])
def _attention(
    Q, K, V, SPAN, OUT, PART, TOP, SUM,
    queries, capacity, k_head, k_slot, v_head, v_slot,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
    SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, at, rows, causal = tl.load(SPAN), tl.load(SPAN + 1), tl.load(SPAN + 2), tl.load(SPAN + 3)
    col = tl.arange(0, BD)
    inside = (col < D)[None, :]
    i = tile * BM + tl.arange(0, BM)
    t = i // GROUP
    q_at = t * (KV * GROUP * D) + head * (GROUP * D) + (i % GROUP) * D  # [BM], of q and of out
    q = tl.load(Q + q_at[:, None] + col[None, :], (i < queries)[:, None] & inside, other=0.0)

    # what each row sees, and what the tile's rows see together
    end = tl.where(t < rows, tl.where(causal != 0, at + t + 1, at + rows), 0)
    begin = tl.full([BM], first, tl.int32)
    if WINDOW > 0:
        begin = tl.where(causal != 0, tl.maximum(first, at + t - WINDOW + 1), first)
    # nothing outside the slab, and no difference that wraps, whatever span says
    begin, end = tl.minimum(tl.maximum(begin, 0), capacity), tl.minimum(tl.maximum(end, 0), capacity)
    tile_begin, tile_end = tl.min(begin, 0), tl.max(end, 0)
    edge_begin, edge_end = tl.max(begin, 0), tl.min(end, 0)
    share = tl.cdiv(tl.cdiv(tl.maximum(tile_end - tile_begin, 0), BN), SPLITS) * BN
    start = tile_begin + split * share
    stop = tl.minimum(start + share, tile_end)

    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    k_tile = K + head.to(tl.int64) * k_head + col[None, :]
    v_tile = V + head.to(tl.int64) * v_head + col[None, :]
    for block in range(start, stop, BN):
        slot = block + tl.arange(0, BN)
        live = (slot < stop)[:, None] & inside
        k = tl.load(k_tile + slot[:, None] * k_slot, live, other=0.0).to(q.dtype)
        s = tl.dot(q, k.T, input_precision="ieee") * 1.4426950408889634  # log2 e
        # Masked where somebody's edge runs through the block. As a branch it also parts the two products: triton gives
        # chained ones the same warps, and half of them would compute the scores of the other half again.
        if (block < edge_begin) | (block + BN > edge_end):
            s = tl.where((slot[None, :] >= begin[:, None]) & (slot[None, :] < end[:, None]), s, -float("inf"))
        higher = tl.maximum(top, tl.ceil(tl.max(s, 1)))
        centre = tl.where(higher == -float("inf"), 0.0, higher)  # a row that has seen nothing yet
        p = tl.exp2(s - centre[:, None])
        fade = tl.exp2(top - centre)
        total = total * fade + tl.sum(p, 1)
        v = tl.load(v_tile + slot[:, None] * v_slot, live, other=0.0).to(q.dtype)
        acc = tl.dot(p.to(q.dtype), v, acc * fade[:, None], input_precision="ieee")
        top = higher

    if SPLITS == 1:
        out = acc / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(OUT + q_at[:, None] + col[None, :], out.to(OUT.dtype.element_ty), (i < queries)[:, None] & inside)
    else:
        part = (split * KV + head).to(tl.int64) * queries + i
        tl.store(TOP + part, top, i < queries)
        tl.store(SUM + part, total, i < queries)
        filled = ((i < queries) & (total > 0))[:, None] & inside
        tl.store(PART + part[:, None] * D + col[None, :], acc, filled)


@triton.jit
def _combine(
    PART, TOP, SUM, OUT, queries,
    GROUP: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
    SPLITS: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    col = tl.arange(0, BD)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    live = i < queries
    top = tl.full([BM], -float("inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        part = (split * KV + head).to(tl.int64) * queries + i
        top = tl.maximum(top, tl.load(TOP + part, live, other=-float("inf")))
    centre = tl.where(top == -float("inf"), 0.0, top)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    for split in tl.static_range(SPLITS):
        part = (split * KV + head).to(tl.int64) * queries + i
        weight = tl.exp2(tl.load(TOP + part, live, other=-float("inf")) - centre)
        total += weight * tl.load(SUM + part, live, other=0.0)
        filled = (weight > 0)[:, None] & (col < D)[None, :]
        acc += weight[:, None] * tl.load(PART + part[:, None] * D + col[None, :], filled, other=0.0)
    out = acc / tl.where(total == 0, 1.0, total)[:, None]
    at = (i // GROUP) * (KV * GROUP * D) + head * (GROUP * D) + (i % GROUP) * D
    tl.store(OUT + at[:, None] + col[None, :], out.to(OUT.dtype.element_ty), live[:, None] & (col < D)[None, :])


# ── wrapper ─────────────────────────────────────────────────────────────────────────────────────────────────────


def splits_of(tile: Tile, queries: int, kv_heads: int, most: int, gpu: Gpu) -> int:
    """How many programs share a tile's keys: as many as fill the card sooner than their partial results cost."""
    programs, blocks = -(-queries // tile.m) * kv_heads, max(1, -(-most // tile.n))
    balance = choose(BALANCE, gpu)
    exchange = 2 * queries * kv_heads * balance / (gpu.processors * tile.m * tile.n)  # of one split, in key blocks

    def time(splits: int) -> float:
        waves = -(-programs * splits // gpu.processors)
        return waves * -(-blocks // splits) + (splits * exchange if splits > 1 else 0)

    return min(range(1, min(MOST_SPLITS, blocks) + 1), key=time)


def attention(
    q: Tensor,
    k_slab: Tensor,
    v_slab: Tensor,
    span: Tensor,
    window: int | None,
    *,
    most: int | None = None,
    splits: int | None = None,
    tile: Tile | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """q [T, H, d], slabs [KV, capacity, d] of q's dtype or e4m3, span int32 [4] -> [T, H·d] in q's dtype.

    `most`: as many keys as a row may see, for the number of splits only; what lies beyond is seen all the same.
    `out`: where it is written, contiguous [T, H·d] of q's dtype. Slots outside the slab are not read, whatever span says.
    """
    (T, H, d), (KV, capacity, width) = q.shape, k_slab.shape
    if (
        v_slab.shape != k_slab.shape
        or width != d
        or not KV
        or H % KV
        or tuple(span.shape) != (4,)
        or span.dtype != torch.int32
    ):
        shapes = f"q {tuple(q.shape)}, K {tuple(k_slab.shape)}, V {tuple(v_slab.shape)}"
        raise ValueError(f"attention: {shapes}, span {tuple(span.shape)} {span.dtype}")
    if (window is not None and window < 1) or (splits is not None and splits < 1) or not span.is_contiguous():
        raise ValueError(f"attention: window {window}, splits {splits}, span strides {span.stride()}")
    if not q.is_contiguous() or k_slab.stride(2) != 1 or v_slab.stride(2) != 1:
        strides = f"q {q.stride()}, K {k_slab.stride()}, V {v_slab.stride()}"
        raise ValueError(f"attention: rows must be contiguous, and strides are {strides}")
    if capacity * max(k_slab.stride(1), v_slab.stride(1)) >= 1 << 31:
        raise ValueError(f"attention: {capacity} slots are past 32-bit offsets, strides {k_slab.stride()}")
    block = max(16, 1 << (d - 1).bit_length())
    if block > max(TILES):
        raise ValueError(f"attention: head dim {d} is past {max(TILES)}")
    gpu = gpu_of(q)
    tile = tile or choose(TILES[max(min(TILES), block)], gpu)
    queries, bound = T * (H // KV), min(capacity, most or capacity)
    if window is not None:
        bound = min(bound, window - 1 + T)
    splits = splits or splits_of(tile, queries, KV, bound, gpu)
    out = target("attention", out, (T, H * d), q.dtype, q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    part, top, total = (
        (q.new_empty(splits, KV, queries, d, dtype=wide), *q.new_empty(2, splits, KV, queries, dtype=wide).unbind())
        if splits > 1
        else (out, out, out)  # not read
    )
    geometry = {"GROUP": H // KV, "KV": KV, "D": d, "SPLITS": splits, "BD": block}
    launch(
        _attention,
        (-(-queries // tile.m), KV, splits),
        *(q, k_slab, v_slab, span, out, part, top, total),
        *(queries, capacity, k_slab.stride(0), k_slab.stride(1), v_slab.stride(0), v_slab.stride(1)),
        cost=lambda: Cost(bytes_moved(q, k_slab, bound, splits), flops(q, bound), "bf16"),
        warps=tile.warps,
        stages=tile.stages,
        **geometry,
        WINDOW=window or 0,
        BM=tile.m,
        BN=tile.n,
    )
    if splits > 1:
        launch(
            _combine,
            (-(-queries // COMBINED_ROWS), KV),
            *(part, top, total, out, queries),
            cost=lambda: Cost((splits * part[0].numel() + top.numel() + total.numel()) * 4 + out.nbytes),
            **geometry,
            BM=COMBINED_ROWS,
        )
    return out


def bytes_moved(q: Tensor, k_slab: Tensor, keys: int, splits: int) -> int:
    """q and out or the partial results, and `keys` keys and values of every KV head, each once."""
    kv = 2 * k_slab.shape[0] * keys * k_slab.shape[2] * k_slab.element_size()
    written = q.nbytes if splits == 1 else splits * 4 * (q.numel() + 2 * q.shape[0] * q.shape[1])
    return q.nbytes + kv + written


def flops(q: Tensor, keys: int) -> int:
    """Of `keys` keys that every row sees: two products."""
    return 4 * q.numel() * keys
