"""The experts in every layout against their twins and fp64, on routings with empty, full and single experts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dgemma_local.kernels import experts as door
from dgemma_local.kernels import experts_grouped, experts_nvfp4_nvfp4, router
from dgemma_local.kernels._launch import ADA, BLACKWELL, HOPPER, Gpu, Launch, Tile, recording
from dgemma_local.kernels.router import Routing
from dgemma_local.kernels.rows import quantise_rows_nvfp4_twin, quantise_rows_twin
from near import assert_near, assert_no_worse
from torch import Tensor

from dgemma_local.quant import Fp8, Nvfp4, Weight, grouped_linear, quantise_fp8, quantise_nvfp4

LAYOUTS = ["plain", "fp8", "nvfp4", "nvfp4, multiplies", "nvfp4 x nvfp4", "nvfp4 x nvfp4, multiplies"]
FORMS = [layout for layout in LAYOUTS if "multiplies" not in layout]
BF16 = torch.bfloat16


def experts(*arguments: Any) -> Tensor:
    return door.experts(*arguments).summed()


def experts_twin(*arguments: Any) -> Tensor:
    return door.experts_twin(*arguments).summed()


def routing_of(T: int, E: int, A: int, case: str = "spread", block: int = 32) -> Routing:
    g = torch.Generator().manual_seed(T)
    chosen = torch.stack([torch.randperm(E, generator=g)[:A] for _ in range(T)]).int()
    if case == "one expert":
        chosen = torch.arange(E - A, E).int().expand(T, A).contiguous()
    if case == "half are empty":
        chosen = (chosen // 2) * 2
    weights = torch.rand(T, A, generator=g) + 0.1
    return grouped(weights, chosen, E, block)


def grouped(weights: Tensor, chosen: Tensor, E: int, block: int = 32) -> Routing:
    order, ends = router.group_twin(chosen, E)
    return Routing(weights, chosen, order.int(), ends, router.items_twin(ends, chosen.numel(), block), block)


def rows(T: int, D: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(T, D, generator=torch.Generator().manual_seed(7)).to(dtype)


def matrices(E: int, D: int, F: int, layout: str, dtype: torch.dtype) -> tuple[Weight, Weight]:
    """gate_up and down; in NVFP4 every part of every expert has a global scale of its own."""
    g = torch.Generator().manual_seed(11)
    size = torch.rand(E, 1, 1, generator=g) + 0.5
    gate_up = torch.randn(E, 2 * F, D, generator=g) * size * D**-0.5 * 1.5
    gate_up[:, :F] *= 0.7
    down = torch.randn(E, D, F, generator=g) * size * F**-0.5
    if layout == "plain":
        return gate_up.to(dtype), down.to(dtype)
    if layout == "fp8":
        return quantise_fp8(gate_up.to(BF16)), quantise_fp8(down.to(BF16))
    packed = quantise_nvfp4(gate_up, (F, F)), quantise_nvfp4(down)
    packed[1].input_scale.copy_(torch.rand(E, 1, generator=g) * 200 + 100)
    return tuple(multiplying(w) for w in packed) if "multiplies" in layout else packed  # type: ignore[return-value]


def multiplying(w: Nvfp4) -> Nvfp4:
    return replace(w, global_scale=1 / w.global_scale, input_scale=1 / w.input_scale, divides=False)


def quantised(x: Tensor, layout: str) -> Any:
    if layout == "fp8":
        return quantise_rows_twin(x)
    return quantise_rows_nvfp4_twin(x, torch.tensor([310.0])) if " x " in layout else x


def wide(layout: str, x: Any, gate_up: Weight, down: Weight) -> tuple[Any, Any, Any]:
    return (x.double(), gate_up.double(), down.double()) if layout == "plain" else (x, gate_up, down)  # type: ignore[union-attr]


def check(layout: str, T: int, D: int, F: int, E: int, A: int, case: str = "spread", dtype: torch.dtype = BF16) -> None:
    routing = routing_of(T, E, A, case)
    gate_up, down = matrices(E, D, F, layout, dtype)
    x = quantised(rows(T, D, dtype), layout)
    ours, twin = experts(x, routing, gate_up, down, dtype), experts_twin(x, routing, gate_up, down, dtype)
    if " x " not in layout and layout != "fp8":
        if layout != "plain":
            x = x.double()
        truth = experts_twin(*reorder(wide(layout, x, gate_up, down), routing), torch.float64)
        assert_no_worse(ours, twin, truth)
    if dtype == torch.float32:
        torch.testing.assert_close(ours, twin, rtol=1e-4, atol=1e-4)
    else:
        # one code of h that a rounding of gate moves is a step of its format, not of the output's
        assert_near(ours, twin, steps=2, equal=0.99 if layout in ("plain", "nvfp4", "nvfp4, multiplies") else 0.97)


def reorder(made: tuple[Any, Any, Any], routing: Routing) -> tuple[Any, Any, Any, Any]:
    return made[0], routing, made[1], made[2]


# ── the twins against the reference's own lines ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_twin_is_the_references_grouped_experts(dtype: torch.dtype) -> None:
    """grouped_mm_experts_forward: products, gelu and gated product rounded, the sum in fp32 rounded once."""
    T, D, F_, E, A = 40, 64, 48, 8, 3
    routing, x = routing_of(T, E, A), rows(T, D, dtype)
    gate_up, down = matrices(E, D, F_, "plain", dtype)
    gate, up = grouped_linear(x[routing.order.long() // A], gate_up, routing.ends).chunk(2, -1)
    out = grouped_linear(F.gelu(gate, approximate="tanh") * up, down, routing.ends)
    by_row = torch.empty_like(out).index_copy_(0, routing.order.long(), out).view(T, A, D)
    want = (by_row * routing.weights[..., None]).sum(-2).to(dtype)
    ours = experts_twin(x, routing, gate_up, down, dtype)
    if dtype == BF16:
        assert_near(ours, want, steps=1, equal=0.99)
    else:
        torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_twins_multiply_what_the_codes_stand_for(layout: str) -> None:
    """In fp64 a twin is the sum over decoded weights and decoded activations."""
    T, D, F_, E, A = 9, 64, 32, 4, 2
    routing, (gate_up, down) = routing_of(T, E, A), matrices(E, D, F_, layout, torch.float64)
    x = quantised(rows(T, D, BF16), layout)
    if isinstance(x, Tensor):
        x = x.double()
    decoded = (
        x if isinstance(x, Tensor) else x.decode(torch.float64) if isinstance(x, Nvfp4) else x.codes.double() * x.scale
    )
    ours = experts_twin(x, routing, gate_up, down, torch.float64)
    for t in range(T):
        total = torch.zeros(D, dtype=torch.float64)
        for slot in range(A):
            e = int(routing.chosen[t, slot])
            gate, up = (gate_up[e].decode(torch.float64) @ decoded[t]).chunk(2)  # type: ignore[union-attr]
            h = (F.gelu(gate, approximate="tanh") * up)[None]
            if isinstance(x, Fp8):
                q = quantise_rows_twin(h)
                h = q.codes.double() * q.scale
            if isinstance(x, Nvfp4):
                h = quantise_rows_nvfp4_twin(h, experts_nvfp4_nvfp4.input_scale(down)[e]).decode(torch.float64)  # type: ignore[arg-type]
            total += routing.weights[t, slot].double() * (down[e].decode(torch.float64) @ h[0])  # type: ignore[union-attr]
        # quant decodes in fp32, where dividing by the global scale rounds
        torch.testing.assert_close(ours[t], total, rtol=1e-5, atol=1e-6)


# ── the kernels ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("T", [1, 5, 70])
def test_near_the_twin(layout: str, T: int) -> None:
    check(layout, T, D=96, F=48, E=8, A=2)


@pytest.mark.parametrize("layout", FORMS)
@pytest.mark.parametrize("case", ["one expert", "half are empty"])
def test_uneven_routings(layout: str, case: str) -> None:
    check(layout, 37, D=64, F=80, E=6, A=2, case=case)


@pytest.mark.parametrize("layout", FORMS)
def test_several_tiles_of_rows_and_of_the_sum(layout: str) -> None:
    check(layout, 20, D=400, F=144, E=4, A=2)


@pytest.mark.parametrize("layout", ["nvfp4", "fp8"])
def test_many_experts_of_few_rows(layout: str) -> None:
    check(layout, 8, D=64, F=32, E=128, A=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layout", ["plain", "nvfp4", "fp8"])
def test_other_dtypes(layout: str, dtype: torch.dtype) -> None:
    check(layout, 20, D=96, F=48, E=4, A=2, dtype=dtype)


def test_odd_sizes() -> None:
    check("plain", 7, D=100, F=36, E=5, A=3)


@pytest.mark.parametrize("layout", FORMS)
def test_same_bits_twice(layout: str) -> None:
    routing, (gate_up, down) = routing_of(20, 4, 2), matrices(4, 64, 32, layout, BF16)
    x = quantised(rows(20, 64, BF16), layout)
    assert torch.equal(experts(x, routing, gate_up, down), experts(x, routing, gate_up, down))


@pytest.mark.parametrize("layout", FORMS)
def test_a_row_s_result_does_not_depend_on_its_company(layout: str) -> None:
    """Alone it goes through the narrow product, in company through the wide one."""
    routing, (gate_up, down) = routing_of(40, 3, 2), matrices(3, 64, 32, layout, BF16)
    x = rows(40, 64, BF16)
    alone = routing.chosen[:1]
    one = grouped(routing.weights[:1], alone, 3)
    together = experts(quantised(x, layout), routing, gate_up, down)[:1]
    assert_near(experts(quantised(x[:1], layout), one, gate_up, down), together, steps=1)


@pytest.mark.parametrize("block", [16, 64])
def test_other_blocks_of_pairs(block: int) -> None:
    gate_up, down = matrices(3, 64, 32, "nvfp4", BF16)
    x = rows(60, 64, BF16)
    ours = experts(x, routing_of(60, 3, 2, block=block), gate_up, down)
    assert_near(ours, experts(x, routing_of(60, 3, 2), gate_up, down), steps=1)


@pytest.mark.parametrize("gpu", [ADA, HOPPER])
def test_decoding_once_is_the_same(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (experts_grouped, experts_nvfp4_nvfp4):
        monkeypatch.setattr(module, "gpu_of", lambda _: gpu)
    check("nvfp4", 20, D=128, F=64, E=4, A=2)


@pytest.mark.parametrize("layout", ["nvfp4", "nvfp4 x nvfp4"])
def test_a_bad_row_stays_alone(layout: str) -> None:
    routing, (gate_up, down) = routing_of(20, 4, 2), matrices(4, 64, 32, layout, BF16)
    x = rows(20, 64, BF16)
    good = experts(quantised(x, layout), routing, gate_up, down)
    x[3, 5] = torch.nan
    bad = experts(quantised(x, layout), routing, gate_up, down)
    others = torch.arange(20) != 3
    assert bad[3].isnan().all() and torch.equal(bad[others], good[others])


@pytest.mark.parametrize("layout", ["nvfp4", "nvfp4 x nvfp4"])
def test_one_number_that_is_none_spoils_its_experts_pairs(layout: str) -> None:
    """One NaN among the finite numbers of a pair's h, also where h is packed in four bits on the way."""
    routing, (gate_up, down) = routing_of(20, 4, 2), matrices(4, 64, 32, layout, BF16)
    assert isinstance(gate_up, Nvfp4)
    gate_up.scale.view(torch.uint8)[1, 5, 2] = 0x7F
    y = door.experts(quantised(rows(20, 64, BF16), layout), routing, gate_up, down, BF16).y
    theirs = routing.chosen.flatten() == 1
    assert y[theirs].isnan().all() and y[~theirs].isfinite().all() and theirs.any()


# ── what is refused, and what a card would get ────────────────────────────────────────────────────────────────────


def test_wrong_shapes_and_kinds() -> None:
    routing, (gate_up, down) = routing_of(8, 4, 2), matrices(4, 64, 32, "plain", BF16)
    x = rows(8, 64, BF16)
    fp8, nvfp4 = matrices(4, 64, 32, "fp8", BF16), matrices(4, 64, 32, "nvfp4", BF16)
    with pytest.raises(ValueError, match=r"experts: x \(8, 32\), gate_up \(4, 64, 64\)"):
        experts(x[:, :32].contiguous(), routing, gate_up, down)
    with pytest.raises(ValueError, match=r"experts: x \(6, 64\), .* 16 pairs"):
        experts(x[:6], routing, gate_up, down)
    with pytest.raises(ValueError, match="no items of work"):
        experts(x, Routing(routing.weights, routing.chosen, routing.order, routing.ends), gate_up, down)
    with pytest.raises(ValueError, match="no product of Tensor rows and Fp8 weights"):
        experts(x, routing, *fp8)
    with pytest.raises(ValueError, match="no product of Fp8 rows and Nvfp4 weights"):
        experts(quantised(x, "fp8"), routing, *nvfp4)
    with pytest.raises(ValueError, match="no product of Nvfp4 rows and Tensor weights"):
        experts(quantised(x, " x "), routing, gate_up, down)
    with pytest.raises(ValueError, match=r"experts: h \(15, 32\), .* 16 pairs"):
        experts_grouped.down(rows(15, 32, BF16), routing, down, BF16)


def recorded(layout: str, gpu: Gpu) -> list[Launch]:
    T, D, F_, E, A = 256, 2816, 704, 128, 8
    with recording(gpu) as launches:
        shape = {"gate_up": (E, 2 * F_, D), "down": (E, D, F_)}
        x: Any = torch.empty(T, D, dtype=BF16, device="meta")
        weights: list[Any] = [torch.empty(s, dtype=BF16, device="meta") for s in shape.values()]
        if layout == "fp8":
            x = Fp8(x.to(torch.float8_e4m3fn), torch.empty(T, 1, device="meta"))
            weights = [Fp8.empty(s, device="meta") for s in shape.values()]
        if "nvfp4" in layout:
            heights = {"gate_up": (F_, F_), "down": (D,)}
            weights = [Nvfp4.empty(s, heights[n], device="meta") for n, s in shape.items()]
        if " x " in layout:
            x = Nvfp4.empty((T, D), device="meta")
        weight, chosen = (torch.empty(T, A, device="meta", dtype=d) for d in (torch.float32, torch.int32))
        experts(x, Routing(weight, chosen, *router.group(chosen, E, 32), 32), *weights)
    return launches


@pytest.mark.parametrize("gpu", [ADA, HOPPER, BLACKWELL])
@pytest.mark.parametrize("layout", FORMS)
def test_records_the_real_size(layout: str, gpu: Gpu) -> None:
    bytes_a_weight = {"plain": 2, "fp8": 1, "nvfp4": 9 / 16}[layout.split()[0]]
    rows_too = 1.12  # x, h and y beside the weights
    launches = {launch.name: launch for launch in recorded(layout, gpu)}
    names = [n for n in launches if n.startswith(("experts_gated", "experts_down"))]
    gated, down = (launches[n] for n in names)
    assert gated.grid == (11, 192) and down.grid == (22, 192)
    for launch, share in ((gated, 2), (down, 1)):
        weights = 128 * share * 704 * 2816
        assert weights * bytes_a_weight < launch.cost.bytes < rows_too * weights * bytes_a_weight
        assert launch.cost.flops == 2 * 2048 * share * 704 * 2816


def test_a_tile_may_be_given() -> None:
    routing, (gate_up, _) = routing_of(8, 4, 2), matrices(4, 64, 32, "plain", BF16)
    x = rows(8, 64, BF16)
    ours = experts_grouped.gated(x, routing, gate_up, BF16, tile=Tile(32, 0, 32, 4, 2))
    assert_near(ours, experts_grouped.gated_twin(x, routing, gate_up, BF16))
