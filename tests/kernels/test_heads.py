"""Head norms, rotation and the cache write against their twin, and the twin against the reference's roundings."""

from dataclasses import dataclass

import pytest
import torch
from dgemma_local.kernels._launch import BLACKWELL, Tile, recording
from dgemma_local.kernels.heads import heads, heads_twin, project_twin
from near import assert_near, assert_no_worse
from torch import Tensor

from dgemma_local import rope
from dgemma_local.config import RopeConfig
from dgemma_local.quant import E4M3_MAX

EPS = 1e-6
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Geometry:
    """A kind of layer."""

    heads: int
    kv_heads: int
    width: int
    full: bool  # v is the raw k, a quarter of the pairs rotates

    @property
    def count(self) -> int:
        return self.heads + (1 if self.full else 2) * self.kv_heads

    @property
    def rope(self) -> RopeConfig:
        return RopeConfig(theta=1e6, rotating=0.25) if self.full else RopeConfig(theta=1e4, rotating=1.0)


SLIDING, FULL = Geometry(3, 2, 256, False), Geometry(4, 1, 512, True)
GEOMETRIES = [SLIDING, FULL, Geometry(2, 1, 16, False), Geometry(4, 2, 32, True), Geometry(1, 1, 100, False)]


def random(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size


def inputs(g: Geometry, rows: int, dtype: torch.dtype, position: int = 1000) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """projected, qk_norm, cos, sin."""
    projected = random(rows, g.count * g.width, size=4).to(dtype)
    norms = (random(2, g.width, seed=1, size=0.3) + 1).to(dtype)
    qk_norm = norms.repeat_interleave(torch.tensor([g.heads, g.kv_heads]), 0)
    cos, sin = rope.table(g.rope, g.width, torch.arange(position, position + rows), dtype)
    return projected, qk_norm, cos, sin


def slabs(g: Geometry, capacity: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Full of a number that no row has, so that what was not to be written shows."""
    return tuple(torch.full((g.kv_heads, capacity, g.width), 77.0).to(dtype) for _ in range(2))  # type: ignore[return-value]


def span(at: int, rows: int, first: int = 0, causal: int = 0) -> Tensor:
    return torch.tensor([first, at, rows, causal], dtype=torch.int32)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("g", GEOMETRIES)
def test_the_twin_rounds_where_the_reference_does(g: Geometry, dtype: torch.dtype) -> None:
    """modeling_diffusion_gemma.py: q_norm, k_norm, v_norm, rotate_half on x · cos + rotated · sin."""
    projected, qk_norm, cos, sin = inputs(g, 5, dtype)
    H, KV, d = g.heads, g.kv_heads, g.width
    parts = projected.view(5, g.count, d)

    def norm(x: Tensor, w: Tensor | None) -> Tensor:
        wide = x.to(torch.promote_types(dtype, torch.float32))
        unit = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + EPS)
        return (unit if w is None else unit * w.to(wide.dtype)).to(dtype)

    def turned(x: Tensor) -> Tensor:
        plain_sin = torch.cat([sin[:, d // 2 :]] * 2, -1)[:, None]  # the table's first half is negated
        half = torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1)
        return x * cos[:, None] + half * plain_sin

    q, k, v = project_twin(projected, qk_norm, cos, sin, H, KV, EPS)
    assert torch.equal(q, turned(norm(parts[:, :H], qk_norm[0])))
    assert torch.equal(k, turned(norm(parts[:, H : H + KV], qk_norm[H])))
    assert torch.equal(v, norm(parts[:, H : H + KV] if g.full else parts[:, H + KV :], None))
    lead = project_twin(projected.expand(2, -1, -1), qk_norm, cos, sin, H, KV, EPS)
    assert all(torch.equal(one[1], other) for one, other in zip(lead, (q, k, v), strict=True))


def test_the_twin_carries_gradients() -> None:
    g = Geometry(2, 1, 4, True)
    projected, qk_norm, cos, sin = inputs(g, 2, torch.float64)
    projected.requires_grad_(), qk_norm.requires_grad_()
    assert torch.autograd.gradcheck(lambda p, w: project_twin(p, w, cos, sin, 2, 1, EPS), (projected, qk_norm))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("g", GEOMETRIES)
@pytest.mark.parametrize("rows", [1, 5])
def test_q_and_the_slabs(g: Geometry, rows: int, dtype: torch.dtype) -> None:
    arguments = (*inputs(g, rows, dtype), g.heads, g.kv_heads, EPS)
    ours, twin = slabs(g, 11, dtype), slabs(g, 11, dtype)
    q = heads(*arguments, *ours, span(4, rows))
    want = heads_twin(*arguments, *twin, span(4, rows))
    truth = project_twin(*(a.double() if isinstance(a, Tensor) else a for a in arguments))  # type: ignore[arg-type]
    results = [q, *(slab[:, 4 : 4 + rows].transpose(0, 1) for slab in ours)]
    twins = [want, *(slab[:, 4 : 4 + rows].transpose(0, 1) for slab in twin)]
    for mine, other, exact in zip(results, twins, truth, strict=True):
        if dtype == torch.float32:
            assert_near(mine, exact.float(), steps=6, equal=0)
        else:
            assert_near(mine, other)
            assert_no_worse(mine, other, exact)
    for slab, other in zip(ours, twin, strict=True):
        assert torch.equal(slab == 77, other == 77) and (slab == 77).sum() == slab[:, rows:].numel()


@pytest.mark.parametrize("g", [SLIDING, FULL])
def test_a_canvas_of_256_rows(g: Geometry) -> None:
    g = Geometry(1, 1, g.width, g.full)
    arguments = (*inputs(g, 256, torch.bfloat16), 1, 1, EPS)
    ours, twin = slabs(g, 300, torch.bfloat16), slabs(g, 300, torch.bfloat16)
    assert_near(heads(*arguments, *ours, span(44, 256)), heads_twin(*arguments, *twin, span(44, 256)))
    for slab, other in zip(ours, twin, strict=True):
        assert_near(slab, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("g", [SLIDING, FULL, Geometry(1, 1, 100, False)])
def test_e4m3_slabs_hold_the_rounded_rows_codes(g: Geometry, dtype: torch.dtype) -> None:
    arguments = (*inputs(g, 3, dtype), g.heads, g.kv_heads, EPS)
    plain, packed = slabs(g, 8, dtype), slabs(g, 8, E4M3)
    q = heads(*arguments, *plain, span(2, 3))
    assert torch.equal(heads(*arguments, *packed, span(2, 3)), q)
    for wide, narrow in zip(plain, packed, strict=True):
        assert same_bits(narrow[:, 2:5], wide[:, 2:5].clamp(-E4M3_MAX, E4M3_MAX).to(E4M3))
        assert same_bits(narrow[:, :2], torch.full_like(wide[:, :2], 77).to(E4M3))
    twin = slabs(g, 8, E4M3)
    heads_twin(*arguments, *twin, span(2, 3))
    for ours, other in zip(packed, twin, strict=True):
        assert (ours.float() == other.float()).float().mean() > 0.99


def test_e4m3_saturates() -> None:
    g = Geometry(1, 1, 32, False)
    projected, qk_norm, cos, sin = inputs(g, 2, torch.bfloat16)
    qk_norm = qk_norm * 1000
    ours, twin = slabs(g, 2, E4M3), slabs(g, 2, E4M3)
    heads(projected, qk_norm, cos, sin, 1, 1, EPS, *ours, span(0, 2))
    heads_twin(projected, qk_norm, cos, sin, 1, 1, EPS, *twin, span(0, 2))
    assert ours[0].float().abs().max() == E4M3_MAX and ours[0].float().isfinite().all()
    assert torch.equal(ours[0].float().abs() == E4M3_MAX, twin[0].float().abs() == E4M3_MAX)


# ── where rows go ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
@pytest.mark.parametrize(
    ("at", "rows"),
    [
        (0, 5), (1, 5), (6, 5), (7, 5), (10, 5), (11, 5), (2**31 - 5, 5),  # the last slots of 11, and beyond
        (-2, 5), (-5, 5), (3, 0), (3, 1), (3, 4), (3, 9), (9, 4), (0, -1),  # padding; more rows than there are
    ],
)  # fmt: skip
def test_only_the_spans_rows_reach_only_the_slabs_slots(at: int, rows: int, dtype: torch.dtype) -> None:
    g = Geometry(2, 2, 16, False)
    arguments = (*inputs(g, 5, torch.bfloat16), 2, 2, EPS)
    whole = slabs(g, 20, torch.bfloat16)
    heads(*arguments, *whole, span(0, 5))
    ours = slabs(g, 11, dtype)
    q = heads(*arguments, *ours, span(at, rows))
    assert torch.equal(q, heads(*arguments, *whole, span(0, 5)))  # padding or not
    for slab, all_rows in zip(ours, whole, strict=True):
        want = torch.full_like(all_rows[:, :11], 77)
        for r in range(min(rows, 5)):
            if 0 <= at + r < 11:
                want[:, at + r] = all_rows[:, r]
        assert same_bits(slab, want.to(dtype))
    twin = slabs(g, 11, dtype)
    heads_twin(*arguments, *twin, span(at, rows))
    for slab, other in zip(ours, twin, strict=True):
        assert torch.equal(slab.float() == 77, other.float() == 77)


def test_slabs_of_any_strides() -> None:
    """Views of one larger tensor, [slots, KV, 2, d]: neighbours stay as they are."""
    g = Geometry(2, 2, 16, False)
    arguments = (*inputs(g, 3, torch.float16), 2, 2, EPS)
    plain = slabs(g, 6, torch.float16)
    heads(*arguments, *plain, span(2, 3))
    both = torch.full((7, 3, 2, 20), 77.0, dtype=torch.float16)
    k, v = (both[:6, :2, i, :16].transpose(0, 1) for i in range(2))
    heads(*arguments, k, v, span(2, 3))
    assert torch.equal(k, plain[0]) and torch.equal(v, plain[1])
    assert (both[6] == 77).all() and (both[:, 2] == 77).all() and (both[..., 16:] == 77).all()


@pytest.mark.parametrize("tile", [Tile(1, 256, 0, 1, 1), Tile(1, 16, 0, 4, 1), Tile(16, 256, 0, 8, 1)])
def test_tiles_give_the_same_bits(tile: Tile) -> None:
    arguments = (*inputs(FULL, 7, torch.bfloat16), FULL.heads, FULL.kv_heads, EPS)
    one, other = slabs(FULL, 9, torch.bfloat16), slabs(FULL, 9, torch.bfloat16)
    assert torch.equal(heads(*arguments, *one, span(2, 7)), heads(*arguments, *other, span(2, 7), tile=tile))
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


# ── numbers at the edge ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", DTYPES)
def test_pairs_that_do_not_turn_pass_exactly(dtype: torch.dtype) -> None:
    """On full layers 64 pairs of 256 rotate; of the others q is the normed row, bit for bit, at any position."""
    projected, qk_norm, cos, sin = inputs(FULL, 2, dtype, position=100_000)
    still, _ = rope.table(FULL.rope, 512, torch.zeros(2), dtype)
    ours, fixed = slabs(FULL, 2, dtype), slabs(FULL, 2, dtype)
    q = heads(projected, qk_norm, cos, sin, 4, 1, EPS, *ours, span(0, 2))
    unturned = heads(projected, qk_norm, still, torch.zeros_like(still), 4, 1, EPS, *fixed, span(0, 2))
    turn = torch.zeros(512, dtype=torch.bool)
    turn[:64] = turn[256:320] = True
    assert torch.equal(q[..., ~turn], unturned[..., ~turn]) and not torch.equal(q[..., turn], unturned[..., turn])
    assert torch.equal(ours[0][..., ~turn], fixed[0][..., ~turn])
    assert torch.equal(ours[1], fixed[1])  # values never turn


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros_and_huge_rows(dtype: torch.dtype) -> None:
    for g in (Geometry(1, 1, 100, False), Geometry(1, 1, 64, True)):
        projected, qk_norm, cos, sin = inputs(g, 4, dtype)
        projected[0] = 0
        projected[1] = torch.finfo(dtype).max
        projected[2, 7 :: g.width] = torch.finfo(dtype).max / 4
        arguments = (projected, qk_norm, cos, sin, 1, 1, EPS)
        ours, twin = slabs(g, 4, dtype), slabs(g, 4, dtype)
        how = {"steps": 4, "equal": 0.0} if dtype == torch.float32 else {}
        assert_near(heads(*arguments, *ours, span(0, 4)), heads_twin(*arguments, *twin, span(0, 4)), **how)
        for slab, other in zip(ours, twin, strict=True):
            assert_near(slab, other, **how)


# ── errors, and recording ─────────────────────────────────────────────────────────────────────────────────────────


def test_errors_name_the_shapes() -> None:
    g = Geometry(2, 1, 8, False)
    p, w, cos, sin = inputs(g, 3, torch.float32)
    k, v = slabs(g, 4, torch.float32)
    good = span(0, 3)
    with pytest.raises(ValueError, match=r"heads: projected \(3, 24\), 2 \+ 2 heads of 8"):
        heads(p[:, :24], w, cos, sin, 2, 2, EPS, k, v, good)
    with pytest.raises(ValueError, match=r"qk_norm \(2, 8\)"):
        heads(p, w[:2], cos, sin, 2, 1, EPS, k, v, good)
    with pytest.raises(ValueError, match=r"cos \(2, 8\)"):
        heads(p, w, cos[:2], sin, 2, 1, EPS, k, v, good)
    with pytest.raises(ValueError, match=r"span \(4,\) torch.int64"):
        heads(p, w, cos, sin, 2, 1, EPS, k, v, good.long())
    with pytest.raises(ValueError, match="wanted contiguous"):
        heads(p.T.contiguous().T, w, cos, sin, 2, 1, EPS, k, v, good)
    with pytest.raises(ValueError, match="slabs"):
        heads(p, w, cos, sin, 2, 1, EPS, k[..., :4], v[..., :4], good)
    with pytest.raises(ValueError, match="slabs"):
        heads(p, w, cos, sin, 2, 1, EPS, k, v.half(), good)
    with pytest.raises(ValueError, match="slabs"):
        heads(p, w, cos, sin, 2, 1, EPS, k[..., ::2], v[..., ::2], good)


def test_it_records_on_meta_tensors_and_knows_its_bytes() -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    with recording(BLACKWELL) as launches:
        for kv, d, count, stored in ((8, 256, 32, torch.bfloat16), (2, 512, 18, E4M3)):
            slab = meta(kv, 5000, d, dtype=stored)
            table = meta(256, d)
            heads(
                meta(256, count * d),
                meta(16 + kv, d),
                table,
                table,
                16,
                kv,
                EPS,
                slab,
                slab,
                meta(4, dtype=torch.int32),
            )
    assert [launch.cost.bytes for launch in launches] == [
        256 * 256 * (2 * (32 + 16 + 1) + 2 * 8 * 2) + 24 * 512 + 16,
        256 * 512 * (2 * (18 + 16 + 1) + 2 * 2) + 18 * 1024 + 16,
    ]
    assert [launch.grid for launch in launches] == [(32, 32), (18, 64)]
