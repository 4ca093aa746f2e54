"""Every kernel on the sizes of the 26B model: what is launched, what its twin makes of the same, and what fp64 does.

    CASES[name](rows) -> Case        operands are made on the card, by seed: the same at every call

A case's `ours` launches through the wrapper and gives all tensors that it wrote; `check` asks them the questions of
tests/kernels. SUBSET has one name for each kernel and form, for what is asked of all of them alike: bits under load,
guards around outputs, capture in a graph, the sanitizer.

Where it is looser than under the interpreter. FP8_EQUAL: tensor cores do not sum products of E4M3 in full fp32 (on
sm_90 in 14 bits or so, moved to fp32 every 128 columns), which is a small part of a step of bf16 but crosses its
borders more often; the distance from fp64 keeps its 1.05. Sums in another order than cuBLAS's move the rest.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

from gpu import real
from gpu.real import BF16, E4M3, EPS, FP32, FP64, INT32, SOFTCAP, S

# isort: split
import near
import torch
import torch.nn.functional as F
from dgemma_local.kernels import bf16_linear as bf16
from dgemma_local.kernels import canvas as canvas_file
from dgemma_local.kernels import draw as draw_file
from dgemma_local.kernels import embedding, heads, norms, router, rows
from dgemma_local.kernels import experts as experts_file
from dgemma_local.kernels import fp8_linear as fp8
from dgemma_local.kernels import nvfp4_linear as nvfp4
from dgemma_local.kernels import nvfp4_nvfp4_linear as four
from dgemma_local.kernels._launch import ADA, Tile, gpu_of
from dgemma_local.kernels._philox import Key, key_numbers
from dgemma_local.kernels.attention import attention, attention_twin
from dgemma_local.kernels.draw import scaled_twin
from dgemma_local.kernels.logits import logits_twin
from dgemma_local.kernels.vocabulary import (
    Across,
    Step,
    chunk_ids,
    transpose_codes,
    vocabulary_step,
    vocabulary_step_twin,
)
from torch import Tensor

from dgemma_local import rope
from dgemma_local.config import RopeConfig
from dgemma_local.quant import Fp8, Nvfp4, Weight, quantise_fp8

Outputs = tuple[Tensor, ...]

if real.REHEARSAL:  # more rows a program: the interpreter takes its time by operations
    draw_file.REFERENCE_TILES = draw_file.FAST_TILES = {ADA.capability: Tile(16, 128, 512, 4, 1)}

FP8_EQUAL = 0.9
PACKED_ROWS_EQUAL = 0.9  # a code of h that one rounding of gate moves
ENTROPY, ROWS_AGREE = 2e-3, 0.97  # of steps whose raw logits were rounded from sums in another order
MANY = 64  # the error of fewer single numbers is chance
SEED, ATTEMPT, NUMBER, STEP = 2**63 + 987654321, 2, 5, 7


@dataclass(frozen=True, slots=True)
class Case:
    ours: Callable[[], Outputs]
    check: Callable[[Outputs], None]


Make = Callable[[int], Case]
CASES: dict[str, Make] = {}
SUBSET: list[str] = []


def case(name: str, in_subset: bool = False) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        CASES[name] = make
        if in_subset:
            SUBSET.append(name)
        return make

    return register


# ── the questions ─────────────────────────────────────────────────────────────────────────────────────────────────


def compare(
    twin: Callable[[], Any],
    truth: Callable[[], Any] | None = None,
    equal: float = 0.99,
    steps: float = 2.0,
    ratio: float = 1.05,
) -> Callable[[Outputs], None]:
    """Near the twin; where there is a truth in fp64, as many tensors of it first, no farther from it than the twin."""

    def check(ours: Outputs) -> None:
        theirs = real.tensors_of(twin())
        exact = real.tensors_of(truth()) if truth is not None else ()
        assert len(theirs) == len(ours)
        for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            tell(mine, other, exact[i] if i < len(exact) else None)
        for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            near.assert_near(mine, other, steps, equal)
            if i < len(exact):
                near.assert_no_worse(mine, other, exact[i], ratio)

    return check


def tell(ours: Tensor, twin: Tensor, truth: Tensor | None) -> None:
    """The figures behind the questions, whatever their answers are."""
    if ours.shape != twin.shape or not ours.dtype.is_floating_point:
        return
    x, y = ours.double(), twin.double()
    same = (x == y) | (x.isnan() & y.isnan())
    off = torch.where(same, 0.0, (x - y).abs() / near.step_at(y, ours.dtype))
    told = f"{tuple(ours.shape)}: {float(same.double().mean()):.4%} equal, {float(off.max()):.3g} steps at most"
    if truth is not None:
        distances = [float((t - truth.double()).norm()) for t in (x, y)]
        told += f", {distances[0] / max(distances[1], 1e-300):.4f} of the twin's distance from fp64"
    real.say(told)


def bit_equal(want: Callable[[], Any]) -> Callable[[Outputs], None]:
    def check(ours: Outputs) -> None:
        for mine, other in zip(ours, real.tensors_of(want()), strict=True):
            assert mine.dtype == other.dtype and torch.equal(real.bits(mine).cpu(), real.bits(other).cpu())

    return check


def wide(*given: Any) -> list[Any]:
    return [t.double() if isinstance(t, Tensor) and t.dtype in (BF16, FP32) else t for t in given]


def gated(product: Tensor) -> Tensor:
    """What a gated twin makes of one product, unrounded in fp64."""
    gate, up = product.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


# ── norms ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def stream(T: int, seed: int) -> Tensor:
    """Rows of the residual stream."""
    return real.normal(T, S.D, seed=seed, size=3.0)


def weight(seed: int, width: int | None = None) -> Tensor:
    return real.normal(width or S.D, seed=seed, size=0.5) + 1


def assert_codes(packed: Outputs, plain: Tensor) -> None:
    """The law, by torch on a CPU, of the row that the same kernel writes when it does not quantise.

    On a CPU, because torch on a card divides by a number as it multiplies by its reciprocal. Two forms of a kernel may sum
    a row's squares in another order: then single numbers are rounded apart, and a row's largest may be one of them.
    """
    want = rows.quantise_rows_twin(plain.cpu())
    codes, scale = (t.cpu() for t in packed)
    same = (real.bits(codes) == real.bits(want.codes)).double().mean()
    real.say(f"{tuple(codes.shape)}: {float(same):.4%} of the codes, {int((scale != want.scale).sum())} scales apart")
    assert codes.dtype == E4M3 and same >= 0.999
    near.assert_near(codes, want.codes, 1, 0.999)
    torch.testing.assert_close(scale, want.scale, rtol=2 * torch.finfo(BF16).eps, atol=0)


@case("rms_norm", in_subset=True)
def _(T: int) -> Case:
    x, w = stream(T, 0), weight(1)
    return Case(
        lambda: real.tensors_of(norms.rms_norm(x, w, EPS), norms.rms_norm(x, None, EPS)),
        compare(
            lambda: (norms.rms_norm_twin(x, w, EPS), norms.rms_norm_twin(x, None, EPS)),
            lambda: (norms.rms_norm_twin(*wide(x, w), EPS), norms.rms_norm_twin(x.double(), None, EPS)),
        ),
    )


@case("rms_norm, FP8 rows", in_subset=True)
def _(T: int) -> Case:
    x, w = stream(T, 0), weight(1)
    x[-1] = 0

    def check(ours: Outputs) -> None:
        (plain,) = real.tensors_of(norms.rms_norm(x, w, EPS))
        assert_codes(ours, plain)

    return Case(lambda: real.tensors_of(norms.rms_norm(x, w, EPS, quantise=True)), check)


@case("sandwich", in_subset=True)
def _(T: int) -> Case:
    given = stream(T, 0), stream(T, 1), weight(2)
    pres = weight(3), weight(4)
    return Case(
        lambda: real.tensors_of(norms.sandwich(*given, pres, EPS)),
        compare(
            lambda: norms.sandwich_twin(*given, pres, EPS),
            lambda: norms.sandwich_twin(*wide(*given), wide(*pres), EPS),
        ),
    )


@case("sandwich, FP8 rows", in_subset=True)
def _(T: int) -> Case:
    given = stream(T, 0), stream(T, 1), weight(2)
    pres = weight(3), weight(4)

    def check(ours: Outputs) -> None:
        h, one, two = real.tensors_of(norms.sandwich(*given, pres, EPS))
        near.assert_near(ours[0], h, 1, 0.999)
        assert_codes(ours[1:3], one)
        assert_codes(ours[3:5], two)

    return Case(lambda: real.tensors_of(norms.sandwich(*given, pres, EPS, quantise=True)), check)


def combined(T: int) -> tuple[Any, ...]:
    pairs = norms.Pairs(real.normal(T * S.active, S.D, seed=2), real.uniform(T, S.active, low=0.02, high=0.3, seed=3))
    return stream(T, 0), pairs, stream(T, 1), weight(4), weight(5), weight(6), real.numbers(0.37, dtype=BF16)


@case("combine", in_subset=True)
def _(T: int) -> Case:
    given, following = combined(T), weight(7)
    exact = norms.Pairs(given[1].y.double(), given[1].weights.double())
    return Case(
        lambda: real.tensors_of(norms.combine(*given, EPS, following)),
        compare(
            lambda: norms.combine_twin(*given, EPS, following),
            lambda: norms.combine_twin(given[0].double(), exact, *wide(*given[2:]), EPS, following.double()),
        ),
    )


@case("combine, a scalar a row", in_subset=True)
def _(T: int) -> Case:
    """As of encoder and canvas rows in one pass."""
    given, following = (*combined(T)[:-1], real.uniform(T, low=0.1, high=1.5, seed=8).to(BF16)), weight(7)
    exact = norms.Pairs(given[1].y.double(), given[1].weights.double())
    return Case(
        lambda: real.tensors_of(norms.combine(*given, EPS, following)),
        compare(
            lambda: norms.combine_twin(*given, EPS, following),
            lambda: norms.combine_twin(given[0].double(), exact, *wide(*given[2:]), EPS, following.double()),
        ),
    )


@case("combine, FP8 rows", in_subset=True)
def _(T: int) -> Case:
    given, following = combined(T), weight(7)

    def check(ours: Outputs) -> None:
        y, normed = real.tensors_of(norms.combine(*given, EPS, following))
        near.assert_near(ours[0], y, 1, 0.999)
        assert_codes(ours[1:], normed)

    return Case(lambda: real.tensors_of(norms.combine(*given, EPS, following, quantise=True)), check)


# ── rows in few bits ──────────────────────────────────────────────────────────────────────────────────────────────

for _width in sorted({S.D, S.dense, S.F, S.heads * S.sliding[1], S.heads * S.full[1]}):

    @case(f"quantise_rows, {_width}", in_subset=_width == S.dense)
    def _(T: int, width: int = _width) -> Case:
        x = real.with_rows_of_every_size(real.normal(T, width))
        x[0] = 0
        return Case(lambda: real.tensors_of(rows.quantise_rows(x)), bit_equal(lambda: rows.quantise_rows_twin(x.cpu())))


for _whole in (3.0, 300.0, 1e5):  # the last: scales saturate

    @case(f"quantise_rows_nvfp4, global {_whole:g}", in_subset=_whole == 300)
    def _(T: int, number: float = _whole) -> Case:
        x, whole = real.with_rows_of_every_size(real.normal(T, S.D)), real.numbers(number)
        x[0, :32] = 0
        return Case(
            lambda: real.tensors_of(rows.quantise_rows_nvfp4(x, whole)),
            bit_equal(lambda: rows.quantise_rows_nvfp4_twin(x.cpu(), whole.cpu())),
        )


# ── embedding ─────────────────────────────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=2)
def table(kind: str) -> Tensor | Fp8:
    """[V, D]; logits behind a normed row have a deviation of 5 or so."""
    plain = real.normal(S.V, S.D, seed=2, size=5.0 * S.D**-0.5)
    return plain if kind == "bf16" else quantise_fp8(plain)


def scale_of_embeddings() -> float:
    return float(torch.tensor(S.D**0.5, dtype=BF16))


for _kind in ("bf16", "fp8"):

    @case(f"embed, {_kind}", in_subset=True)
    def _(T: int, kind: str = _kind) -> Case:
        E, scale = table(kind), scale_of_embeddings()
        ids, soft = real.integers(T, below=S.V), real.normal(T, S.D, seed=3, size=5.0)
        ids[0], ids[-1] = 0, S.V - 1
        plain = (ids, E, scale), (ids, E, scale, soft, EPS, True, BF16), (ids, E, scale, None, EPS, True, BF16)

        def truth() -> list[Tensor]:
            x = (E[ids] if isinstance(E, Tensor) else E.pick(ids, BF16)).double() * scale
            return [x, *(norms.norm(t, None, EPS) for t in (x + soft.double(), x))]

        return Case(
            lambda: real.tensors_of([embedding.embed(*a) for a in plain]),
            compare(lambda: [embedding.embed_twin(*a) for a in plain], truth),
        )


# ── heads ─────────────────────────────────────────────────────────────────────────────────────────────────────────

ROPE = {"sliding": RopeConfig(theta=1e4, rotating=1.0), "full": RopeConfig(theta=1e6, rotating=0.25)}
GEOMETRY = {"sliding": S.sliding, "full": S.full}


def span_of(first: int, at: int, count: int, causal: bool) -> Tensor:
    return real.numbers(first, at, count, causal, dtype=INT32)


for _layer in ("sliding", "full"):
    for _name, _held in (("bf16", BF16), ("e4m3", E4M3)):
        for _context in S.contexts:

            @case(f"heads, {_layer}, {_name}, {_context} behind", in_subset=_context == S.contexts[2])
            def _(T: int, layer: str = _layer, held: torch.dtype = _held, context: int = _context) -> Case:
                kv, d = GEOMETRY[layer]
                count = S.heads + kv * (1 if layer == "full" else 2)
                qk_norm = torch.cat([weight(1, d).expand(S.heads, -1), weight(2, d).expand(kv, -1)])
                positions = torch.arange(context, context + T, device=real.DEVICE)
                given = (
                    real.normal(T, count * d, size=4.0),
                    qk_norm,
                    *rope.table(ROPE[layer], d, positions, BF16),
                    S.heads,
                    kv,
                    EPS,
                )
                span = span_of(0, context, T, False)

                def run(f: Callable[..., Tensor]) -> Outputs:
                    k, v = (torch.full((kv, context + T + 3, d), 77.0, device=real.DEVICE).to(held) for _ in "kv")
                    return f(*given, k, v, span), k, v

                def check(ours: Outputs) -> None:
                    def truth() -> Tensor:
                        product: Tensor = heads.project_twin(*wide(*given))[0]
                        return product

                    compare(lambda: run(heads.heads_twin), truth)(ours)
                    untouched = float(torch.tensor(77.0).to(held).float())
                    for slab in ours[1:]:
                        assert (slab[:, :context].float() == untouched).all()
                        assert (slab[:, context + T :].float() == untouched).all()

                return Case(lambda: run(heads.heads), check)


# ── attention ─────────────────────────────────────────────────────────────────────────────────────────────────────


def attended(T: int, layer: str, causal: bool, context: int, held: torch.dtype, size: float = 1.5) -> tuple[Any, ...]:
    """q, K and V with NaN in every slot that the pass may not see, span, window; and the most keys that a row sees."""
    kv, d = GEOMETRY[layer]
    first = max(0, context - (S.window - 1)) if layer == "sliding" else 0
    q = real.normal(T, S.heads, d, size=size / d**0.25)
    slabs = []
    for seed in (1, 2):
        slab = torch.full((kv, context + T + 3, d), torch.nan, device=real.DEVICE, dtype=BF16)
        slab[:, first : context + T] = real.normal(kv, context + T - first, d, seed=seed, size=size / d**0.25)
        slabs.append(slab.to(held))
    window = S.window if layer == "sliding" else None
    return (q, *slabs, span_of(first, context, T, causal), window), context - first + T


for _layer in ("sliding", "full"):
    for _mode in ("canvas", "prompt"):
        for _name, _held in (("bf16", BF16), ("e4m3", E4M3)):
            for _context in S.contexts if _name == "bf16" else (S.contexts[0], S.contexts[2], S.contexts[4]):

                @case(f"attention, {_layer}, {_mode}, {_name}, {_context} behind", in_subset=_context == S.contexts[4])
                def _(
                    T: int,
                    layer: str = _layer,
                    causal: bool = _mode == "prompt",
                    context: int = _context,
                    held: torch.dtype = _held,
                ) -> Case:
                    given, most = attended(T, layer, causal, context, held)
                    return Case(
                        lambda: (attention(*given, most=most),),
                        compare(lambda: attention_twin(*given), lambda: attention_twin(given[0].double(), *given[1:])),
                    )


# ── dense linears ─────────────────────────────────────────────────────────────────────────────────────────────────


def linear_case(
    gate: bool, x: Any, w: Any, file: Any, name: str, exact: Callable[[], Tensor], equal: float = 0.99
) -> Case:
    form = f"{name}_{'gated' if gate else 'linear'}"
    kernel, twin = getattr(file, form), getattr(file, f"{form}_twin")
    return Case(
        lambda: (kernel(x, w),),
        compare(lambda: twin(x, w), lambda: gated(exact()) if gate else exact(), equal=equal),
    )


def codes_of(w: Nvfp4) -> Tensor:
    """code · scale, fp64."""
    return replace(w, global_scale=torch.ones_like(w.global_scale), divides=True).decode(FP32).double()


def factors(w: Nvfp4) -> Tensor:
    whole = w.global_scale.double().repeat_interleave(torch.tensor(w.heights, device=w.device))
    return 1 / whole if w.divides else whole


for _matrix, (_out, _width, _heights) in S.matrices.items():

    @case(f"bf16_linear, {_matrix}", in_subset=_matrix in ("sliding qkv", "gate_up", "down"))
    def _(T: int, name: str = _matrix, out: int = _out, width: int = _width) -> Case:
        x, w = real.normal(T, width), real.matrix(out, width)
        return linear_case(name == "gate_up", x, w, bf16, "bf16", lambda: x.double() @ w.double().T)

    @case(f"fp8_linear, {_matrix}", in_subset=_matrix in ("sliding qkv", "gate_up", "down"))
    def _(T: int, name: str = _matrix, out: int = _out, width: int = _width) -> Case:
        x = rows.quantise_rows_twin(real.with_rows_of_every_size(real.normal(T, width)))
        w = real.fp8_matrix(out, width)

        def exact() -> Tensor:
            product: Tensor = (x.codes.double() @ w.codes.double().T) * x.scale.double() * w.scale.double().T
            return product

        return linear_case(name == "gate_up", x, w, fp8, "fp8", exact, FP8_EQUAL)

    for _divides in (True, False):

        @case(
            f"nvfp4_linear, {_matrix}{'' if _divides else ', global multiplies'}",
            in_subset=_divides and _matrix in ("sliding qkv", "gate_up", "down"),
        )
        def _(
            T: int,
            name: str = _matrix,
            out: int = _out,
            width: int = _width,
            heights: tuple[int, ...] = _heights,
            divides: bool = _divides,
        ) -> Case:
            x, w = real.normal(T, width), real.nvfp4_matrix(out, width, heights=heights, divides=divides)
            return linear_case(
                name == "gate_up", x, w, nvfp4, "nvfp4", lambda: (x.double() @ codes_of(w).T) * factors(w)
            )

    if real.capability() >= (12, 0):

        @case(f"nvfp4_nvfp4_linear, {_matrix}", in_subset=_matrix in ("gate_up", "down"))
        def _(
            T: int, name: str = _matrix, out: int = _out, width: int = _width, heights: tuple[int, ...] = _heights
        ) -> Case:
            x = rows.quantise_rows_nvfp4_twin(real.normal(T, width), real.numbers(700.0))
            w = real.nvfp4_matrix(out, width, heights=heights)

            def exact() -> Tensor:
                product: Tensor = (codes_of(x) @ codes_of(w).T) * factors(w) / x.global_scale.double()
                return product

            return linear_case(name == "gate_up", x, w, four, "nvfp4_nvfp4", exact)


# ── router ────────────────────────────────────────────────────────────────────────────────────────────────────────


@case("route", in_subset=True)
def _(T: int) -> Case:
    r, scale = stream(T, 0), real.normal(S.D, seed=1, size=0.3) + 1
    proj = real.normal(S.experts, S.D, seed=2)  # logits of √D: spread routing
    per_expert = real.uniform(S.experts, low=0.5, high=1.5, seed=3, dtype=BF16)
    given = r, scale, proj, per_expert

    def check(ours: Outputs) -> None:
        weights, chosen, order, ends, items = ours
        twin = router.route_twin(*given, S.active, EPS)
        truth = router.route_twin(*wide(*given), S.active, EPS)
        same = (chosen == twin.chosen).all(-1)
        real.say(f"{float(same.double().mean()):.2%} of the rows choose as the twin does")
        # a sum in another order moves a logit by a step of bf16, and near equals change places
        assert int((~same).sum()) <= max(1, T // 10)
        same &= (chosen == truth.chosen).all(-1)
        if T >= MANY:
            near.assert_no_worse(weights[same], twin.weights[same], truth.weights[same], ratio=1.25)
        step = torch.finfo(BF16).eps * 8  # a step of a logit of size 4 … 8, which e takes to the weights
        torch.testing.assert_close(weights[same], twin.weights[same], rtol=4 * step, atol=0)
        want, last = router.group_twin(chosen, S.experts)
        assert torch.equal(order, want.int()) and torch.equal(ends, last)
        assert torch.equal(items, router.items_twin(last, chosen.numel(), 32))

    return Case(lambda: real.tensors_of(router.route(*given, S.active, EPS)), check)


# ── experts ───────────────────────────────────────────────────────────────────────────────────────────────────────

LAYOUTS = ["bf16", "fp8", "nvfp4", "nvfp4, global multiplies"]
if real.capability() >= (12, 0):
    LAYOUTS += ["nvfp4 x nvfp4"]


@lru_cache(maxsize=1)
def bank(layout: str) -> tuple[Weight, Weight]:
    """One layer's gate_up and down."""
    shapes = (S.experts, 2 * S.F, S.D), (S.experts, S.D, S.F)
    if layout == "bf16":
        return real.matrix(*shapes[0]), real.matrix(*shapes[1], seed=2)
    if layout == "fp8":
        return real.fp8_matrix(*shapes[0]), real.fp8_matrix(*shapes[1], seed=2)
    divides = "multiplies" not in layout
    return (
        real.nvfp4_matrix(*shapes[0], heights=(S.F, S.F), divides=divides),
        real.nvfp4_matrix(*shapes[1], heights=(S.D,), divides=divides, seed=5),
    )


def routing_of(T: int, kind: str) -> router.Routing:
    g = torch.Generator().manual_seed(T)
    chosen = torch.rand(T, S.experts, generator=g).argsort(-1)[:, : S.active].int()
    if kind == "one set":  # eight experts have everything
        chosen = torch.arange(S.experts - S.active, S.experts).int().expand(T, -1).contiguous()
    if kind == "half are empty":
        chosen = (chosen // 2) * 2
    order, ends = router.group_twin(chosen, S.experts)
    made = (
        real.uniform(T, S.active, low=0.1, high=1.1, seed=4),
        chosen,
        order.int(),
        ends,
        router.items_twin(ends, chosen.numel(), 32),
    )
    return router.Routing(*(t.to(real.DEVICE) for t in made), 32)


for _layout in LAYOUTS:
    for _routing in ("spread", "one set", "half are empty"):

        @case(f"experts, {_layout}, {_routing}", in_subset=_routing == "spread" and "multiplies" not in _layout)
        def _(T: int, layout: str = _layout, kind: str = _routing) -> Case:
            routing, x = routing_of(T, kind), real.normal(T, S.D)
            given: Any = x
            if layout == "fp8":
                given = rows.quantise_rows_twin(x)
            elif " x " in layout:
                given = rows.quantise_rows_nvfp4_twin(x, real.numbers(310.0))

            def summed(made: norms.Pairs) -> tuple[Tensor, Tensor]:
                return made.y, made.summed()

            def truth() -> tuple[Tensor, Tensor]:
                w = wide(*bank(layout))
                return summed(experts_file.experts_twin(x.double(), routing, w[0], w[1], FP64))

            packed = layout == "fp8" or " x " in layout
            fits = layout != "bf16" or real.free_bytes() > 8 * 3 * S.experts * S.F * S.D + (4 << 30)
            if not packed and not fits:
                real.say("no truth: the experts in fp64 do not fit this card")
            return Case(
                lambda: summed(experts_file.experts(given, routing, *bank(layout))),
                compare(
                    lambda: summed(experts_file.experts_twin(given, routing, *bank(layout))),
                    truth if not packed and fits else None,
                    equal=PACKED_ROWS_EQUAL if packed else 0.99,
                ),
            )


# ── the vocabulary ────────────────────────────────────────────────────────────────────────────────────────────────


def key_of(step: int = STEP) -> Key:
    return Key.of(SEED, ATTEMPT, NUMBER, real.numbers(step, dtype=INT32))


def hidden_for(kind: str, T: int) -> Tensor | Fp8:
    hidden = real.normal(T, S.D, seed=1)
    return rows.quantise_rows_twin(hidden) if kind.startswith("fp8") else hidden


def table_for(kind: str) -> Tensor | Fp8:
    return table("bf16" if kind == "bf16" else "fp8")


@lru_cache(maxsize=1)
def across() -> Across:
    """The FP8 table's codes, turned."""
    E = table("fp8")
    assert isinstance(E, Fp8)
    return transpose_codes(E)


for _kind in ("bf16", "bf16 x fp8", "fp8 x fp8", "fp8 x fp8 across"):
    for _mode in ("reference", "fast"):

        @case(f"vocabulary, {_kind}, {_mode}", in_subset=_kind != "bf16 x fp8")
        def _(T: int, kind: str = _kind, reference: bool = _mode == "reference") -> Case:
            hidden, cool, key = hidden_for(kind, T), real.numbers(0.6), key_of()

            def arguments() -> tuple[Any, ...]:
                E, turned = table_for(kind), across() if "across" in kind else None
                chunk = chunk_ids(gpu_of(cool), hidden, E) if turned is not None and not reference else None
                return (
                    *(hidden, E, SOFTCAP, cool, scale_of_embeddings(), key),
                    *(reference, True, BF16, turned, chunk),
                )

            def check(ours: Outputs) -> None:
                check_step(Step(*ours), arguments())

            return Case(lambda: real.tensors_of(vocabulary_step(*arguments())), check)


def check_step(ours: Step, arguments: tuple[Any, ...]) -> None:
    """Ids may differ where the raw logits, from sums in another order, were rounded apart: then they nearly tie."""
    hidden, E, softcap, cool, _, _, reference, _, dtype, turned, _ = arguments
    twin = vocabulary_step_twin(*arguments)
    z = scaled_twin(logits_twin(hidden, E, dtype if reference else FP32), softcap, cool)
    drafts = ours.draft == twin.draft
    real.say(
        f"{float(drafts.double().mean()):.2%} of the drafts and "
        f"{float((ours.sampled == twin.sampled).double().mean()):.2%} of the samples are the twin's, "
        f"entropies within {float((ours.entropy - twin.entropy).abs().max()):.3g}"
    )
    few = max(1, int((1 - ROWS_AGREE) * len(drafts)))
    assert int((~drafts).sum()) <= few and int((ours.sampled != twin.sampled).sum()) <= few
    behind = z.amax(-1) - z.gather(-1, ours.draft[:, None])[:, 0]
    tie = near.step_at(z.amax(-1), BF16) * 2 if reference else z.amax(-1).abs() * 1e-5
    assert (behind <= tie).all()
    torch.testing.assert_close(ours.entropy, twin.entropy, rtol=0, atol=ENTROPY)
    assert ours.soft is not None and twin.soft is not None
    tell(ours.soft, twin.soft, None)
    # fast: weights are rounded about their chunk's maximum, the twin's about the row's
    near.assert_near(ours.soft, twin.soft, 2, FP8_EQUAL if turned is not None else 0.97 if reference else 0.8)
    if real.free_bytes() < 10 * S.V * S.D + 20 * S.V * S.canvas:
        real.say("no truth: the embedding in fp64 does not fit this card")
        return
    truth = vocabulary_step_twin(*wide(hidden, E), *arguments[2:8], FP64)
    assert truth.soft is not None
    if len(ours.entropy) >= MANY:
        near.assert_no_worse(ours.entropy, twin.entropy, truth.entropy, 2)
    near.assert_no_worse(ours.soft, twin.soft, truth.soft)


# ── canvas ────────────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def temperatures() -> Tensor:
    return torch.linspace(0.8, 0.4, 16, device=real.DEVICE)


def canvas_state(T: int, stability: int = 1) -> canvas_file.State:
    state = canvas_file.State.new(T, stability, temperatures())
    state.history.fill_(-1)
    state.begin(real.integers(T, below=S.V), key_numbers(SEED, ATTEMPT, NUMBER).to(real.DEVICE))
    return state


@case("canvas update", in_subset=True)
def _(T: int) -> Case:
    draft, sampled = real.integers(T, below=S.V, seed=1), real.integers(T, below=S.V, seed=2)
    entropy = real.uniform(T, low=0.0, high=0.2, seed=3)

    def run(f: Callable[..., None]) -> Outputs:
        state = canvas_state(T)
        f(state, draft, sampled, entropy, S.V, 0.9, 0.005)
        f(state, draft, sampled, entropy * 0.01, S.V, 0.9, 0.005)  # the same draft, and sure of it: done
        return real.tensors_of(state)

    return Case(lambda: run(canvas_file.update), bit_equal(lambda: run(canvas_file.update_twin)))
