"""The router against its twin, the twin against the model's own; ties, NaN, and the work list's laws."""

import pytest
import torch
import torch.nn.functional as F
from dgemma_local.kernels import router
from dgemma_local.kernels._launch import HOPPER, Tile, recording
from dgemma_local.kernels.router import Routing, items_at_most
from near import assert_near, assert_no_worse
from torch import Tensor

EPS = 1e-6
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 64, 8, 2), (5, 100, 128, 8), (33, 96, 24, 3), (17, 2816, 128, 8), (3, 48, 4, 4)]  # T, D, E, A


def inputs(T: int, D: int, E: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    r = torch.randn(T, D, generator=g) * 3
    scale = torch.randn(D, generator=g) * 0.3 + 1
    proj = torch.randn(E, D, generator=g)
    return r.to(dtype), scale.to(dtype), proj.to(dtype), (torch.rand(E, generator=g) + 0.5).to(dtype)


def same_choice(ours: Routing, twin: Routing) -> Tensor:
    return (ours.chosen == twin.chosen).all(-1)


def check_lists(routing: Routing, experts: int) -> None:
    assert routing.items is not None
    order, ends = router.group_twin(routing.chosen, experts)
    assert_near(routing.order, order.int())
    assert_near(routing.ends, ends)
    assert_near(routing.items, router.items_twin(ends, routing.chosen.numel(), routing.block))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_twin_rounds_where_the_reference_does(dtype: torch.dtype) -> None:
    """modeling_diffusion_gemma.py's router, line by line."""
    T, D, E, A = 40, 96, 16, 3
    r, scale, proj, per_expert = inputs(T, D, E, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    x = r.to(wide)
    u = (x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()).to(dtype) * scale * D**-0.5
    weights, chosen = F.linear(u, proj).softmax(-1, dtype=wide).topk(A, -1)
    weights = weights / weights.sum(-1, keepdim=True) * per_expert[chosen]
    twin = router.route_twin(r, scale, proj, per_expert, A, EPS)
    assert torch.equal(twin.weights, weights) and torch.equal(twin.chosen.long(), chosen)
    assert torch.equal(twin.order.long(), chosen.flatten().argsort(stable=True))
    assert torch.equal(twin.ends.long(), torch.bincount(chosen.flatten(), minlength=E).cumsum(0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "D", "E", "A"), SHAPES)
def test_near_the_twin(T: int, D: int, E: int, A: int, dtype: torch.dtype) -> None:
    args = inputs(T, D, E, dtype)
    ours, twin = router.route(*args, A, EPS), router.route_twin(*args, A, EPS)
    same = same_choice(ours, twin)
    # a sum in another order moves a logit by a step of the dtype, and near equals change places
    assert same.float().mean() >= 0.9
    if dtype == torch.float32:
        assert same.all()
        torch.testing.assert_close(ours.weights, twin.weights, rtol=2e-5, atol=0)
    else:
        truth = router.route_twin(*(a.double() for a in args), A, EPS)
        same &= same_choice(ours, truth)
        assert_no_worse(ours.weights[same], twin.weights[same], truth.weights[same], ratio=1.25)
        step = torch.finfo(dtype).eps * 8  # a step of a logit of size 4 … 8, which e takes to the weights
        torch.testing.assert_close(ours.weights[same], twin.weights[same], rtol=4 * step, atol=0)
    check_lists(ours, E)


def test_rounds_where_the_reference_does() -> None:
    """Weights of powers of two: the sums are exact, so what differs from the twin is a missing rounding."""
    r, _, proj, per_expert = inputs(16, 64, 16, torch.bfloat16)
    proj = torch.zeros_like(proj)
    proj[torch.arange(16), torch.arange(16) * 4] = 1.0  # a logit is one number of u
    scale = inputs(1, 64, 16, torch.bfloat16, seed=3)[1]
    ours, twin = (f(r, scale, proj, per_expert, 4, EPS) for f in (router.route, router.route_twin))
    assert same_choice(ours, twin).all()
    torch.testing.assert_close(ours.weights, twin.weights, rtol=1e-6, atol=0)


def test_logits_are_rounded_to_the_models_dtype() -> None:
    """Two experts a thousandth apart are one number in bf16: the tie goes to the lower, and the weights are equal."""
    proj = torch.zeros(4, 64)
    proj[1, :3], proj[3, :2] = 1.0, 1.0
    proj[1, 2] = 2.0**-9
    r = torch.ones(1, 64, dtype=torch.bfloat16)
    ours = router.route(r, torch.ones(64).bfloat16(), proj.bfloat16(), torch.ones(4).bfloat16(), 2, EPS)
    assert ours.chosen.tolist() == [[1, 3]] and ours.weights[0, 0] == ours.weights[0, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_go_to_the_lowest(dtype: torch.dtype) -> None:
    r, scale, proj, per_expert = inputs(6, 32, 12, dtype)
    proj = proj[[0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1]]
    routing = router.route(r, scale, proj, per_expert, 5, EPS)
    for row in routing.chosen.tolist():
        first = row[0] % 2
        assert row == [first, first + 2, first + 4, first + 6, first + 8]
    zeros = router.route(torch.zeros_like(r), scale, proj, per_expert, 5, EPS)
    assert zeros.chosen.tolist() == [[0, 1, 2, 3, 4]] * 6
    check_lists(zeros, 12)


def test_a_logit_far_below_still_has_a_place() -> None:
    """All but one expert have p = 0 in fp32."""
    proj = torch.full((8, 16), -100.0)
    proj[5] = 100.0
    args = (torch.ones(2, 16), torch.ones(16), proj, torch.ones(8))
    ours = router.route(*args, 3, EPS)
    assert ours.chosen.tolist() == [[5, 0, 1]] * 2 == router.route_twin(*args, 3, EPS).chosen.tolist()
    assert ours.weights.tolist() == [[1.0, 0.0, 0.0]] * 2


def test_nan_chooses_inside() -> None:
    r, scale, proj, per_expert = inputs(4, 64, 24, torch.float32)
    r[1, 5] = torch.nan
    routing = router.route(r, scale, proj, per_expert, 3, EPS)
    assert routing.weights[1].isnan().all() and routing.weights[[0, 2, 3]].isfinite().all()
    assert int(routing.chosen.min()) >= 0 and int(routing.chosen.max()) < 24
    check_lists(routing, 24)


@pytest.mark.parametrize("block", [16, 32, 64])
@pytest.mark.parametrize("case", ["spread", "one expert", "first", "last", "single row"])
def test_lists(case: str, block: int) -> None:
    T, E, A = (1 if case == "single row" else 150), 12, 2
    g = torch.Generator().manual_seed(1)
    chosen = torch.stack([torch.randperm(E, generator=g)[:A] for _ in range(T)]).int()
    if case == "one expert":  # which one row cannot choose twice, but the list does not mind
        chosen[:] = 7
    if case == "first":
        chosen = chosen % 3
    if case == "last":
        chosen = chosen % 3 + 9
    routing = Routing(chosen.float(), chosen, *router.group(chosen, E, block), block)
    check_lists(routing, E)
    expert, first, pairs = routing.items.T.tolist()
    used = [(e, f, n) for e, f, n in zip(expert, first, pairs, strict=True) if n]
    assert sum(n for *_, n in used) == T * A and max(n for *_, n in used) <= block
    assert [f for _, f, _ in used] == sorted(f for _, f, _ in used)
    for e, f, n in used:  # an item's pairs all chose its expert
        assert (chosen.flatten()[routing.order[f : f + n].long()] == e).all()


def test_most_items() -> None:
    """As many as there can be: every expert but the last has one pair beyond full blocks."""
    chosen = torch.tensor([[0]] * 17 + [[1]] * 17 + [[2]] * 16).int()
    _, _, items = router.group(chosen, 3, 16)
    assert len(items) == items_at_most(50, 3, 16) == 6 and (items[:5, 2] > 0).all()


def test_same_bits_twice() -> None:
    args = inputs(20, 96, 16, torch.bfloat16)
    one, two = (router.route(*args, 4, EPS) for _ in range(2))
    for a, b in zip((one.weights, *lists(one)), (two.weights, *lists(two)), strict=True):
        assert torch.equal(a, b)


def lists(routing: Routing) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return routing.chosen, routing.order, routing.ends, routing.items


def test_another_tile_chooses_the_same() -> None:
    args = inputs(20, 96, 16, torch.float32)
    assert torch.equal(
        router.route(*args, 4, EPS, tile=Tile(32, 8, 32, 4, 2)).chosen, router.route(*args, 4, EPS).chosen
    )


@pytest.mark.parametrize("wrong", ["proj", "scale", "per_expert", "top_k"])
def test_wrong_shapes(wrong: str) -> None:
    r, scale, proj, per_expert = inputs(4, 32, 8, torch.float32)
    top_k = 2
    if wrong == "proj":
        proj = proj[:, :16]
    elif wrong == "scale":
        scale = scale[:16]
    elif wrong == "per_expert":
        per_expert = per_expert[:4]
    else:
        top_k = 9
    with pytest.raises(ValueError, match=r"route: r \(4, 32\)"):
        router.route(r, scale, proj, per_expert, top_k, EPS)


@pytest.mark.parametrize("rows", [0, (1 << 17) + 1])
def test_no_pairs_and_more_than_a_block_holds(rows: int) -> None:
    """2^20 pairs are as many as triton has elements of a block."""
    with recording(HOPPER) as launches:
        meta = {"dtype": torch.bfloat16, "device": "meta"}
        weights = [torch.empty(*s, **meta) for s in ((16,), (8, 16), (8,))]
        with pytest.raises(ValueError, match=rf"^route: {8 * rows} pairs in blocks of 32, wanted 1 … 1048576 pairs"):
            router.route(torch.empty(rows, 16, **meta), *weights, 8, EPS)
        with pytest.raises(ValueError, match=rf"^route: {8 * rows} pairs"):
            router.group(torch.empty(rows, 8, dtype=torch.int32, device="meta"), 8, 32)
        assert not launches
        router.route(torch.empty(1 << 17, 16, **meta), *weights, 8, EPS)
    assert launches[-1].constants["PAIRS"] == 1 << 20


@pytest.mark.parametrize(("block", "pairs"), [(0, 16), (1, 1 << 20)])
def test_blocks_of_pairs_that_make_too_many_items_or_none(block: int, pairs: int) -> None:
    with recording(HOPPER), pytest.raises(ValueError, match=rf"^route: {pairs} pairs in blocks of {block}, wanted"):
        router.group(torch.empty(pairs, 1, dtype=torch.int32, device="meta"), 8, block)


def test_records_the_real_size() -> None:
    with recording(HOPPER) as launches:
        sizes = [(256, 2816), (2816,), (128, 2816), (128,)]
        r, scale, proj, per_expert = (torch.empty(*s, dtype=torch.bfloat16, device="meta") for s in sizes)
        routing = router.route(r, scale, proj, per_expert, 8, EPS)
    assert [launch.name for launch in launches] == ["router_logits", "router_choose", "router_group"]
    assert routing.items.shape == (192, 3) and launches[0].grid == (16, router.SPLITS)
    assert launches[0].cost.flops == 2 * 256 * 2816 * 128
