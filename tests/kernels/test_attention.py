"""Attention against its twin, its twin against the model's over a real cache, and what neither may see."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dgemma_local.kernels import attention as file
from dgemma_local.kernels._launch import ADA, BLACKWELL, HOPPER, Tile, recording
from dgemma_local.kernels.attention import attention, attention_twin, splits_of
from near import assert_near, assert_no_worse
from torch import Tensor

from dgemma_local.cache import Cache
from dgemma_local.config import LayerConfig, ModelConfig, RopeConfig

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
IN_FP32 = {"steps": 256, "equal": 0.0}  # the order of a sum over keys moves fp32 by many of its steps
SMALL = Tile(16, 16, 16, 4, 2)
Span = tuple[int, int, int, int]  # first, at, rows, causal


def operands(
    rows: int, heads: int, kv_heads: int, width: int, span: Span, dtype: torch.dtype, behind: int = 3, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, slabs with NaN in every slot that the pass may not see, span."""
    g = torch.Generator().manual_seed(seed)
    first, end = span[0], span[1] + span[2]
    q = (torch.randn(rows, heads, width, generator=g) * 1.5 / width**0.25).to(dtype)
    slabs = []
    for _ in "kv":
        slab = torch.full((kv_heads, end + behind, width), torch.nan)
        slab[:, first:end] = torch.randn(kv_heads, span[1] + span[2] - first, width, generator=g) * 1.5 / width**0.25
        slabs.append(slab.to(dtype))
    return q, slabs[0], slabs[1], torch.tensor(span, dtype=torch.int32)


def check(q: Tensor, k: Tensor, v: Tensor, span: Tensor, window: int | None, **options: Any) -> Tensor:
    """The three questions; in fp32 the order of a sum is all that differs. Rows beyond the span's are zeros."""
    ours = attention(q, k, v, span, window, **options)
    twin = attention_twin(q, k, v, span, window)
    truth = attention_twin(q.double(), k, v, span, window)
    if ours.dtype == torch.float32:
        assert_near(ours, truth.float(), **IN_FP32)
    else:
        assert_near(ours, twin)
        assert_no_worse(ours, twin, truth)
    assert not ours[int(span[2]) :].any()
    return ours


# ── the twin is the model's attention ─────────────────────────────────────────────────────────────────────────────


def config(window: int, heads: int, kv_heads: int, width: int) -> ModelConfig:
    layers = (
        LayerConfig(kind="sliding", head_dim=width, kv_heads=kv_heads),
        LayerConfig(kind="full", head_dim=width, kv_heads=kv_heads),
    )
    rope = RopeConfig(theta=1e4, rotating=1.0)
    return ModelConfig(
        vocab_size=64, hidden_size=32, intermediate_size=24, self_conditioning_size=24, expert_size=16, num_experts=8,
        top_k=2, heads=heads, layers=layers, sliding_window=window, rope={"sliding": rope, "full": rope}, rms_eps=1e-6,
        softcap=30.0, canvas_length=12, max_positions=1024, dtype=None,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layer", [0, 1])
def test_twin_and_kernel_over_a_cache(layer: int, dtype: torch.dtype) -> None:
    """A prompt in chunks, past the window, with canvases between: as sdpa sees the cache's own views and masks."""
    made = config(window=8, heads=4, kv_heads=2, width=16)
    kind, window = made.layers[layer].kind, 8 if layer == 0 else None
    cache = Cache(made, dtype)
    g = torch.Generator().manual_seed(1)
    for rows, causal in [(3, True), (12, False), (4, True), (1, True), (9, True), (12, False)]:
        q, k, v = (torch.randn(heads, rows, 16, generator=g).to(dtype) for heads in (4, 2, 2))
        keys, values = [cache.write(i, k, v) for i in (0, 1)][layer]  # layers of a cache go together
        span = cache.span(kind, rows, causal)
        mask = cache.mask(kind, rows, causal)
        eager = F.scaled_dot_product_attention(
            q[None], keys[None], values[None], attn_mask=mask, scale=1.0, enable_gqa=True
        )
        eager = eager[0].transpose(0, 1).reshape(rows, -1)
        q = q.transpose(0, 1).contiguous()
        twin = attention_twin(q, *cache.slab(layer), span, window)
        torch.testing.assert_close(twin, eager, **({"atol": 2e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {}))
        if dtype != torch.float64:
            check(q, *cache.slab(layer), span, window, tile=SMALL)
        if causal:
            cache.advance(rows)


# ── the kernel is its twin ────────────────────────────────────────────────────────────────────────────────────────

PASSES: dict[str, tuple[int, Span, int | None]] = {  # rows of the launch, span, window
    "canvas, nothing before it": (12, (0, 0, 12, 0), 1024),
    "canvas behind one key": (12, (0, 1, 12, 0), 1024),
    "canvas behind a full window": (12, (0, 1023, 12, 0), 1024),
    "canvas, the slab's start is slack": (12, (7, 1030, 12, 0), 1024),
    "canvas, 1,024 behind, all seen": (12, (0, 1024, 12, 0), None),
    "canvas, 5,000 behind": (12, (0, 5000, 12, 0), None),
    "canvas, one row": (1, (0, 37, 1, 0), None),
    "prompt from nothing": (40, (0, 0, 40, 1), 1024),
    "prompt, first token": (1, (0, 0, 1, 1), 8),
    "prompt across the window's edge": (40, (0, 1003, 40, 1), 1024),
    "prompt behind the window": (40, (3, 1026, 40, 1), 1024),
    "prompt, window within a block": (33, (0, 20, 33, 1), 7),
    "prompt, window of itself": (20, (0, 20, 20, 1), 1),
    "prompt, all seen": (40, (0, 1024, 40, 1), None),
    "padding behind a canvas": (40, (2, 30, 12, 0), None),
    "padding behind a prompt": (40, (2, 30, 9, 1), 16),
    "padding alone": (12, (0, 5, 0, 0), None),
}


@pytest.mark.parametrize("splits", [1, 7])
@pytest.mark.parametrize("name", PASSES)
def test_what_each_row_sees(name: str, splits: int) -> None:
    rows, span, window = PASSES[name]
    given = operands(rows, 4, 2, 16, span, torch.bfloat16)
    check(*given, window, splits=splits, tile=Tile(32, 64, 16, 4, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"),
    [(4, 2, 256), (16, 2, 512), (16, 2, 256), (4, 2, 512), (4, 2, 8), (3, 1, 48), (2, 2, 32), (6, 2, 128)],
)
def test_geometries(heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> None:
    """Two and eight query heads a KV head with both real head dims, and others, padded to a power of two."""
    for span, splits in [((0, 50, 11, 0), 1), ((0, 50, 11, 1), 2)]:
        check(*operands(11, heads, kv_heads, width, span, dtype), 40, splits=splits)


@pytest.mark.parametrize("gpu", [ADA, HOPPER, BLACKWELL])
@pytest.mark.parametrize(("kv_heads", "width"), [(8, 256), (2, 512)])
def test_production_tiles(kv_heads: int, width: int, gpu: Any) -> None:
    tile = file.TILES[width][gpu.capability]
    check(*operands(19, 16, kv_heads, width, (5, 70, 19, 1), torch.bfloat16), 1024, tile=tile, splits=2)


@pytest.mark.parametrize("causal", [0, 1])
def test_splits_differ_by_the_order_of_fp32_sums_alone(causal: int) -> None:
    """Numerators round alike in every split and tile: hardly an element moves. And each gives its bits again."""
    given = operands(14, 2, 1, 32, (0, 110, 14, causal), torch.bfloat16)
    one = attention(*given, None, splits=1)
    for splits, tile in [(2, SMALL), (7, SMALL), (7, Tile(32, 32, 32, 4, 2)), (20, Tile(32, 16, 32, 4, 2))]:
        ours = attention(*given, None, splits=splits, tile=tile)  # 20: more than there are blocks of keys
        assert_near(ours, one, steps=1, equal=0.999)
        assert torch.equal(ours, attention(*given, None, splits=splits, tile=tile))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_saturated_scores(dtype: torch.dtype, splits: int) -> None:
    """Scores in the thousands, of either sign: one key takes all, and 2^−126 is nothing to divide by."""
    q, k, v, span = operands(20, 4, 2, 16, (0, 90, 20, 0), dtype)
    for queries, keys in [(q * 200, k), (q.abs() * 200, -k.abs())]:  # the second: every score far below zero
        ours = attention(queries, keys, v, span, None, splits=splits)
        truth = attention_twin(queries.double(), keys, v, span, None)
        torch.testing.assert_close(ours.double(), truth, atol=0.02, rtol=0.02)


def test_keys_that_later_ones_outshine() -> None:
    """Each block's scores exceed the last one's by hundreds: what was summed fades to nothing, and to no NaN."""
    q, k, v, span = operands(16, 2, 1, 16, (0, 80, 16, 0), torch.float32)
    rise = torch.arange(k.shape[1])[None, :, None] * 10.0
    q, k = torch.ones_like(q), k + torch.where(k.isnan(), 0.0, rise)
    for flip in (False, True):
        both = [t[:, :96].flip(1) if flip else t for t in (k, v)]
        check(q, both[0].contiguous(), both[1].contiguous(), span, None, splits=2, tile=SMALL)


def test_minus_infinity_is_a_score_like_others() -> None:
    """A key whose score is −inf has no part, even where a whole block or split holds nothing else."""
    q, k, v, span = operands(16, 2, 1, 16, (0, 80, 16, 0), torch.float32)
    q = q.abs()
    k[:, :48] = -torch.inf
    for splits in (1, 6):
        ours = attention(q, k, v, span, None, splits=splits, tile=SMALL)
        torch.testing.assert_close(ours, attention_twin(q, k[:, 48:], v[:, 48:], span - torch.tensor([0, 48, 0, 0], dtype=torch.int32), None))  # fmt: skip


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("kv_heads", "width", "window"), [(2, 32, 40), (1, 512, None)])
def test_e4m3_slabs(kv_heads: int, width: int, window: int | None, splits: int) -> None:
    for causal in (0, 1):
        q, k, v, span = operands(11, 8, kv_heads, width, (4, 60, 11, causal), torch.bfloat16)
        k, v = (t.to(torch.float8_e4m3fn) for t in (k, v))
        ours = check(q, k, v, span, window, splits=splits)
        assert torch.equal(ours, attention(q, k.bfloat16(), v.bfloat16(), span, window, splits=splits))


def test_slabs_of_any_strides() -> None:
    q, k, v, span = operands(12, 4, 2, 16, (3, 40, 12, 0), torch.bfloat16)
    together = torch.stack([k, v]).permute(2, 0, 1, 3).contiguous()  # [slots, 2, KV, d]
    views = [together[:, i].transpose(0, 1) for i in (0, 1)]
    assert torch.equal(attention(q, *views, span, None), attention(q, k, v, span, None))


WILD: dict[str, Span] = {
    "past the end": (0, 30, 12, 0),
    "past the end, prompt": (0, 30, 12, 1),
    "behind the end": (50, 60, 12, 0),
    "before the start": (-20, 3, 12, 0),
    "before the start, prompt": (-20, -5, 12, 1),
    "more rows than there are": (0, 4, 1 << 20, 0),
    "first above everything": (2**31 - 1, 0, 12, 0),
    "sums that wrap": (-(2**31), 2**31 - 9, 40, 1),
    "sums that wrap, canvas": (2**31 - 1, 2**31 - 1, 40, 0),
    "differences that wrap": (2**31 - 1, -(2**31), 40, 1),
}


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("name", WILD)
def test_nothing_outside_the_slab_is_read(name: str, window: int | None, splits: int) -> None:
    """Whatever span says; a slab amid others, which bounds.py guards and whose neighbours are NaN."""
    q = operands(40 if "wrap" in name else 12, 2, 1, 16, (0, 0, 12, 0), torch.float32)[0]
    around = torch.full((2, 3, 32, 16), torch.nan)
    around[:, 1] = torch.randn(2, 32, 16, generator=torch.Generator().manual_seed(3))
    k, v = around[:, 1:2]
    span = torch.tensor(WILD[name], dtype=torch.int32)
    ours = attention(q, k, v, span, window, splits=splits, tile=SMALL)
    assert ours.isfinite().all()
    if "wrap" not in name:  # there the twin counts on, and sees all or nothing
        assert_near(ours, attention_twin(q.double(), k, v, span, window).float(), **IN_FP32)


# ── the launch ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_splits_fill_a_card_and_no_more() -> None:
    """26B on its cards: two programs a processor of keys that can be shared, none where tiles suffice."""
    full, sliding = file.TILES[512], file.TILES[256]
    assert splits_of(sliding[8, 9], 512, 8, 1279, ADA) == 2  # 64 tiles, 128 processors
    assert splits_of(sliding[9, 0], 512, 8, 1279, HOPPER) == 4  # 32 tiles, 132 processors
    assert (
        splits_of(sliding[12, 0], 512, 8, 1279, BLACKWELL) == 5
    )  # 64 tiles, 170 processors: two waves of a fifth each
    assert splits_of(full[8, 9], 2048, 2, 65_536, ADA) == 2
    assert splits_of(full[8, 9], 4096, 2, 65_536, ADA) == 1  # a prefill chunk: 128 tiles
    assert splits_of(full[8, 9], 2048, 2, 1, ADA) == splits_of(full[8, 9], 16, 1, 0, ADA) == 1


def test_launches_depend_on_sizes_alone() -> None:
    """Recorded on meta tensors, whose span nobody can read."""
    m = {"device": "meta", "dtype": torch.bfloat16}
    span = torch.empty(4, dtype=torch.int32, device="meta")
    with recording(HOPPER) as launches:
        out = attention(torch.empty(256, 16, 256, **m), *[torch.empty(8, 4096, 256, **m)] * 2, span, 1024)
    assert tuple(out.shape) == (256, 4096)
    assert [(launch.name, launch.grid) for launch in launches] == [("attention", (4, 8, 4)), ("combine", (128, 8))]
    assert launches[0].cost.flops == 4 * 256 * 16 * 256 * 1279


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (2, 40, 32)}, r"attention: q \(4, 4, 16\), K \(2, 40, 32\)"),
        ({"q": (4, 3, 16)}, r"attention: q \(4, 3, 16\), K \(2, 40, 16\)"),
        ({"span": (3,)}, r"span \(3,\) torch.int32"),
        ({"q": (4, 4, 1024), "k": (2, 40, 1024), "v": (2, 40, 1024)}, "attention: head dim 1024 is past 512"),
    ],
)
def test_shapes_that_do_not_fit(change: dict[str, tuple[int, ...]], message: str) -> None:
    shapes = {"q": (4, 4, 16), "k": (2, 40, 16), "v": (2, 40, 16), "span": (4,)} | change
    q, k, v = (torch.zeros(shapes[name]) for name in "qkv")
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, torch.zeros(shapes["span"], dtype=torch.int32), None)


def test_strides_and_types_that_do_not_fit() -> None:
    q, k, v, span = operands(4, 4, 2, 16, (0, 4, 4, 0), torch.float32)
    with pytest.raises(ValueError, match=r"attention: rows must be contiguous"):
        attention(q.transpose(0, 1).contiguous().transpose(0, 1), k, v, span, None)
    with pytest.raises(ValueError, match=r"span \(4,\) torch.int64"):
        attention(q, k, v, span.long(), None)
    far = torch.empty(1, 1 << 22, 512, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ValueError, match=r"attention: 4194304 slots are past 32-bit offsets"):
        attention(torch.empty(4, 1, 512, dtype=torch.bfloat16, device="meta"), far, far, span, None)
