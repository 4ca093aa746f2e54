"""What is tried of each kernel that a model uses: its own widths, heads and formats, a part of its vocabulary and experts.

Rows are those of its passes, for the tile of a product is chosen by them; calls are the model's, `out=` and `most=` with
them, and padding rows. Where a bar is looser than `NEAR`:

    sums of FP8 codes     tensor cores do not sum them in full fp32: on sm_90 in 14 bits or so, moved to fp32 every 128
                          columns, which crosses the borders of bf16's steps more often
    rows in few bits      one rounding of a number moves its code; one of a row's largest moves the row's scale
    choices               a sum in another order moves a logit by a step, and near equals change places

The bars are those of tests/gpu/cases.py, which asks more.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dgemma_local import ops, rope
from dgemma_local.config import LayerConfig, ModelConfig
from dgemma_local.model import PREFILL_CHUNK, DiffusionGemma
from dgemma_local.quant import Fp8
from dgemma_local.selftest.compare import NEAR, SAME, Bar, Outputs, apart, tensors_of
from dgemma_local.selftest.ends import ends
from dgemma_local.selftest.operands import Form, Operands
from dgemma_local.selftest.trial import ELSEWHERE, Case, Kernel, Target, Trial, by, in_form

SPARE_EXPERTS = 4  # beyond those that a row chooses: some have many rows, some few, one none
EXPERT_ROWS = 48  # fewer than a pass has: so few experts then have about as many rows each as the model's, or some
BEHIND = 96  # committed tokens before the window
REACH = 8192  # keys that a captured pass chooses its splits for, at the most: captured.REACH
FP8_SUMS = Bar(equal=0.9)
IN_FEW_BITS = Bar(equal=0.9)  # sums of rows that were quantised between two products
CODES = Bar(1.0, 0.97)
# a row's scale follows its largest number, which may be rounded the other way: two steps of bf16, in fp32's
SCALE = Bar(2 * torch.finfo(torch.bfloat16).eps / torch.finfo(torch.float32).eps, 0.0)
GROUP_SCALE = Bar(1.0, 0.97)
MOST_CHOOSE_ALIKE = 0.9  # of the rows
LOGIT_STEPS = 8  # a step of a logit of size 4 … 8, in the dtype's eps; e^x takes it to a router's weights


def cases_of(network: DiffusionGemma, context: int | None = None) -> list[Case]:
    """All of a model, kernel by kernel; the same for two models of one geometry and the same formats.

    `context`: tokens that are planned for, which attention's splits follow; None, as all from REACH on: REACH.
    """
    most = min(context or REACH, network.config.max_positions, REACH)
    found = [*_norms(network), *_products(network), *_attention(network, most), *_mixture(network)]
    found += ends(network, passes(network.config))
    each = {(case.kernel, case.what): case for case in found}
    return sorted(each.values(), key=lambda case: list(ops.KERNELS).index(case.kernel))


def passes(config: ModelConfig) -> list[int]:
    """How many rows a pass has, ascending: a canvas; a canvas and as many that join the cache; a chunk of the prompt."""
    L = config.canvas_length
    return sorted({L, 2 * L, max(2 * L, PREFILL_CHUNK)})


def some(rows: int) -> int:
    """As many of a pass's rows as are no padding, where some are."""
    return rows - rows // 3


# ── norms, and rows in few bits ───────────────────────────────────────────────────────────────────────────────────


def _norms(network: DiffusionGemma) -> Iterator[Case]:
    config, dtype = network.config, network.dtype
    D, eps = config.hidden_size, config.rms_eps

    def written(*weights: Any) -> tuple[bool, ...]:
        """Whether a norm's kernel writes FP8 rows for these readers."""
        return tuple(weight is not None and Form.of(weight, dtype).rows == "fp8" for weight in weights)

    following = [layer.entrance[1] for layer in network.layers[1:]] + [None]
    for T in passes(config):
        for reader in (network.self_conditioning.mlp.gate_up, network.layers[0].entrance[1], None):
            yield _rms_norm(D, T, eps, *written(reader))
        for layer, after in zip(network.layers, following, strict=True):
            yield _sandwich(D, T, eps, written(layer.mlp.gate_up, layer.experts.gate_up))
            yield _combine(D, T, eps, config.top_k, *written(after))


def _rows(quantise: Sequence[bool]) -> list[Bar]:
    return [bar for each in quantise for bar in ((CODES, SCALE) if each else (NEAR,))]


def _rms_norm(D: int, T: int, eps: float, quantise: bool) -> Case:
    def prepare(make: Operands) -> Trial:
        x, weight = make.normal(T, D, size=3.0), make.scales(D, 1)
        return Trial(lambda f: tensors_of(f(x, weight, eps, quantise)), by(*_rows([quantise])))

    return Case("rms_norm", f"{T} x {D}{', FP8 rows' if quantise else ''}", prepare)


def _sandwich(D: int, T: int, eps: float, quantise: tuple[bool, ...]) -> Case:
    def prepare(make: Operands) -> Trial:
        x, residual = make.normal(T, D, size=3.0), make.normal(T, D, seed=1, size=3.0)
        post, pres = make.scales(D, 2), (make.scales(D, 3), make.scales(D, 4))
        return Trial(lambda f: tensors_of(f(x, residual, post, pres, eps, quantise)), by(NEAR, *_rows(quantise)))

    return Case("sandwich", f"{T} x {D}, FP8 rows {quantise}", prepare)


def _combine(D: int, T: int, eps: float, A: int, quantise: bool) -> Case:
    def prepare(make: Operands) -> Trial:
        dense, residual = make.normal(T, D, size=3.0), make.normal(T, D, seed=1, size=3.0)
        pairs = ops.Pairs(make.normal(T * A, D, seed=2), make.uniform(T, A, low=0.02, high=0.3, seed=3))
        norms, following = [make.scales(D, seed) for seed in (4, 5, 6)], make.scales(D, 7)
        # of a pass of one kind of rows, and of one whose rows that join have another
        scalars = make.uniform(1, low=0.3, high=0.9, seed=8), make.uniform(T, low=0.3, high=0.9, seed=9)

        def call(f: Kernel) -> Outputs:
            given = dense, pairs, residual, *norms
            return tensors_of(*(f(*given, s.to(make.dtype), eps, following, quantise) for s in scalars))

        return Trial(call, by(*[NEAR, *_rows([quantise])] * len(scalars)))

    return Case("combine", f"{T} x {D}, {A} pairs a row{', FP8 rows' if quantise else ''}", prepare)


def _quantise(kind: str, T: int, width: int) -> Case:
    def prepare(make: Operands) -> Trial:
        x = make.normal(T, width) * torch.logspace(-1, 1, T, device=make.device, dtype=make.dtype)[:, None]
        x[0] = 0
        if kind == "fp8":
            return Trial(lambda f: tensors_of(f(x)), by(CODES, SCALE))
        whole = make.numbers(300.0)

        def call(f: Kernel) -> Outputs:
            made = f(x, whole)
            return made.packed, made.scale

        return Trial(call, by(CODES, GROUP_SCALE))

    return Case("quantise_rows" if kind == "fp8" else "quantise_rows_nvfp4", f"{T} x {width}", prepare)


# ── matrices ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _products(network: DiffusionGemma) -> Iterator[Case]:
    config, own = network.config, network.self_conditioning.mlp
    L, every = config.canvas_length, passes(config)
    matrices = [("gated", own.gate_up, [L], True), ("linear", own.down, [L], False)]
    for layer in network.layers:
        matrices += [
            ("linear", layer.attention.qkv_proj, every, True),
            ("linear", layer.attention.o_proj, every, False),
            ("gated", layer.mlp.gate_up, every, True),
            ("linear", layer.mlp.down, every, False),
        ]
    for what, weight, rows, normed in matrices:
        form = Form.of(weight, network.dtype)
        for T in rows:
            yield _product(what, form, T)
            yield from _quantised_rows(form, T, normed)
    for layer in network.layers:
        for T in every:
            yield from _quantised_rows(Form.of(layer.experts.gate_up, network.dtype), T, True)
            if isinstance(layer.experts.down, Fp8):
                yield _quantise("fp8", T * config.top_k, config.expert_size)
    if isinstance(network.embed_tokens, Fp8):
        yield _quantise("fp8", L, config.hidden_size)


def _quantised_rows(form: Form, T: int, normed: bool) -> Iterator[Case]:
    """The pass that quantises a matrix's rows, where no norm has done it."""
    if form.rows == "nvfp4" or (form.rows == "fp8" and not normed):
        yield _quantise(form.rows, T, form.shape[-1])


def _product(what: str, form: Form, T: int) -> Case:
    packed = form.rows != "plain"
    name = {"plain": {"plain": "bf16", "nvfp4": "nvfp4"}, "fp8": {"fp8": "fp8"}, "nvfp4": {"nvfp4": "nvfp4_nvfp4"}}

    def prepare(make: Operands) -> Trial:
        w, x = make.weight(form, 1), in_form(make.normal(T, form.shape[-1], seed=2), form.rows, make)
        given = (x, w, make.dtype) if packed else (x, w)
        return Trial(lambda f: tensors_of(f(*given)), by(FP8_SUMS if form.rows == "fp8" else NEAR))

    return Case(f"{name[form.rows][form.kind]}_{what}", f"{form}, {T}", prepare)


# ── attention ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _attention(network: DiffusionGemma, most: int) -> Iterator[Case]:
    config = network.config
    behind = config.sliding_window + min(BEHIND, config.sliding_window)
    L, every = config.canvas_length, passes(config)
    for layer in network.layers:
        geometry = config.layers[layer.attention.index]
        for T in every:
            for live in (T, some(T)):
                yield _heads(config, geometry, T, live, behind)
        for T, causal in ((L, False), (L, True), (every[-1], True)):
            for live in (T, some(T)):
                yield _attended(config, geometry, T, live, behind, causal, most)
        yield _attended(config, geometry, every[-1], every[-1], 0, True, most)


def _geometry(config: ModelConfig, layer: LayerConfig) -> str:
    return f"{layer.kind}, {config.heads}/{layer.kv_heads} heads of {layer.head_dim}"


def _heads(config: ModelConfig, layer: LayerConfig, T: int, live: int, at: int) -> Case:
    KV, d = layer.kv_heads, layer.head_dim
    count = config.heads + (1 if layer.kind == "full" else 2) * KV

    def prepare(make: Operands) -> Trial:
        qk_norm = torch.cat([make.scales(d, 1).expand(config.heads, -1), make.scales(d, 2).expand(KV, -1)])
        positions = torch.arange(at, at + T, device=make.device)
        tables = rope.table(config.rope[layer.kind], d, positions, make.dtype)
        given = make.normal(T, count * d, size=4.0), qk_norm, *tables, config.heads, KV, config.rms_eps
        span = make.numbers(0, at, live, False, dtype=torch.int32)

        def call(f: Kernel) -> Outputs:
            slabs = torch.full((2, KV, at + T + 3, d), ELSEWHERE, dtype=make.dtype, device=make.device)
            q = f(*given, slabs[0], slabs[1], span)
            own = slice(at, at + live)
            beside = torch.cat([slabs[:, :, :at], slabs[:, :, at + live :]], 2)
            return q, slabs[0][:, own], slabs[1][:, own], (beside == ELSEWHERE).all()

        return Trial(call, by(NEAR, NEAR, NEAR, SAME))

    return Case("heads", f"{_geometry(config, layer)}, {T} rows, {live} of them at {at}", prepare)


def _attended(config: ModelConfig, layer: LayerConfig, T: int, live: int, behind: int, causal: bool, most: int) -> Case:
    """On slabs no shorter than what the splits are chosen for; what no row sees is NaN."""
    H, KV, d = config.heads, layer.kv_heads, layer.head_dim
    capacity = max(most, behind + T)
    window = config.sliding_window if layer.kind == "sliding" else None
    first = 0 if window is None else max(0, behind - (window - 1))

    def prepare(make: Operands) -> Trial:
        size = 1.5 / d**0.25  # scores of deviation 2.25: some keys count, and not one alone
        q = make.normal(T, H, d, size=size)
        slabs = torch.full((2, KV, capacity, d), torch.nan, dtype=make.dtype, device=make.device)
        for slab, seed in zip(slabs, (1, 2), strict=True):
            slab[:, first : behind + live] = make.normal(KV, behind + live - first, d, seed=seed, size=size)
        span = make.numbers(first, behind, live, causal, dtype=torch.int32)

        def called(f: Kernel, seen: Tensor, **named: int) -> Outputs:
            target = Target.of(make, T, H * d)
            f(q, seen[0], seen[1], span, window, out=target.rows, **named)
            return target.outcome()

        return Trial(
            lambda f: called(f, slabs, most=most),
            by(NEAR, SAME),
            truth=lambda f: called(f, slabs[:, :, : behind + T]),  # which has scores of all slots that there are
        )

    told = f"{T} {'prompt' if causal else 'canvas'} rows, {live} of them behind {behind}, window {window}, most {most}"
    return Case("attention", f"{_geometry(config, layer)}, {told}", prepare)


# ── the mixture ───────────────────────────────────────────────────────────────────────────────────────────────────


def _mixture(network: DiffusionGemma) -> Iterator[Case]:
    for T in passes(network.config):
        yield _route(network.config, T)
    for layer in network.layers:
        gate_up, down = (Form.of(w, network.dtype) for w in (layer.experts.gate_up, layer.experts.down))
        for T in sorted({EXPERT_ROWS, *passes(network.config)}):
            yield _experts(network.config, T, gate_up, down)


def _route(config: ModelConfig, T: int) -> Case:
    D, E, A = config.hidden_size, config.num_experts, config.top_k
    router = ops.KERNELS["route"]

    def prepare(make: Operands) -> Trial:
        given = (
            make.normal(T, D, size=3.0),
            make.normal(D, seed=1, size=0.3).add_(1),
            make.normal(E, D, seed=2),
            make.uniform(E, low=0.5, high=1.5, seed=3, dtype=make.dtype),
        )

        def wrong(ours: Outputs, twin: Outputs) -> str | None:
            weights, chosen, *lists = ours
            if (inside := (chosen >= 0) & (chosen < E)).logical_not().any():
                return f"{int((~inside).sum())} choices of no expert"
            alike = (chosen == twin[1]).all(-1)
            if int((~alike).sum()) > max(1, int((1 - MOST_CHOOSE_ALIKE) * T)):
                return f"{int((~alike).sum())} of {T} rows choose other experts than its twin's"
            steps = 4 * LOGIT_STEPS * torch.finfo(make.dtype).eps
            far = (weights[alike] - twin[0][alike]).abs() > steps * twin[0][alike].abs()
            if bool(weights.isnan().any()) or bool(far.any()):
                return f"{int(far.sum())} weights are not its twin's, {int(weights.isnan().sum())} NaN"
            order, ends = router.group_twin(chosen, E)
            items = router.items_twin(ends, chosen.numel(), router.ITEM)
            return apart(tuple(lists), (order.int(), ends, items), [SAME])

        def call(f: Kernel) -> Outputs:
            return tensors_of(f(*given, A, config.rms_eps))

        return Trial(call, wrong)

    return Case("route", f"{T} x {D}, {A} of {E}", prepare)


def _routing(make: Operands, experts: int, active: int, T: int) -> ops.Routing:
    """By the twin, of choices that favour the last experts; nobody chooses the first, where there is another."""
    router = ops.KERNELS["route"]
    favour = torch.linspace(0.0, 0.6, experts, device=make.device)
    if experts > active:
        favour[0] = -1.0
    chosen = (make.uniform(T, experts, low=0.0, high=1.0) + favour).argsort(-1, descending=True)[:, :active].int()
    order, ends = router.group_twin(chosen, experts)
    items = router.items_twin(ends, chosen.numel(), router.ITEM)
    weights = make.uniform(T, active, low=0.1, high=1.1, seed=4)
    return ops.Routing(weights, chosen, order.int(), ends, items, router.ITEM)


def _experts(config: ModelConfig, T: int, gate_up: Form, down: Form) -> Case:
    gate_up, down = (form.first(config.top_k + SPARE_EXPERTS) for form in (gate_up, down))

    def prepare(make: Operands) -> Trial:
        weights = make.weight(gate_up, 1), make.weight(down, 5)
        routing = _routing(make, gate_up.shape[0], config.top_k, T)
        x = in_form(make.normal(T, config.hidden_size, seed=9), gate_up.rows, make)

        def call(f: Kernel) -> Outputs:
            pairs = f(x, routing, *weights, make.dtype)
            return pairs.y, pairs.summed()

        return Trial(call, by(NEAR if gate_up.rows == "plain" else IN_FEW_BITS))

    return Case("experts", f"{T} rows; {gate_up}; {down}", prepare)
