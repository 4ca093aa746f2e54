"""The self-test without kernels: twins stand in their place, and are broken one by one; and what is kept of a verdict."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tiny import tiny_config
from torch import Tensor

from dgemma_local import captured, errors, ops, selftest
from dgemma_local.cache import Room
from dgemma_local.config import ModelConfig, load_model_config
from dgemma_local.model import DiffusionGemma, parameter_shapes
from dgemma_local.quant import Fp8, Nvfp4, Weight, quantise_fp8, quantise_nvfp4
from dgemma_local.selftest import cases, compare, ends
from dgemma_local.selftest.compare import NEAR, SAME, Bar, apart
from dgemma_local.selftest.operands import Form, Operands

BF16 = torch.bfloat16
L, CHUNK = 12, 56  # rows of a canvas, and of a prompt's chunk
REACH = cases.REACH
MOST = 96  # keys that splits are chosen for
MAKE = Operands(torch.device("cpu"), BF16)


@pytest.fixture(autouse=True)
def own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel runs here: each is its twin, in the formats of a card; and the cache is the test's own."""
    monkeypatch.setenv("DGEMMA_OPS", "twins")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(cases, "PREFILL_CHUNK", CHUNK)
    monkeypatch.setattr(cases, "REACH", MOST)
    monkeypatch.setattr(ops, "_replaced", frozenset())
    for name, file in ops.KERNELS.items():
        monkeypatch.setattr(file, name, getattr(file, f"{name}_twin"))
    monkeypatch.setattr(ops.KERNELS["route"], "route", route)
    monkeypatch.setattr(ops.KERNELS["attention"], "attention", attention)


def route(*given: Any) -> ops.Routing:
    """As the kernel makes it: with items of work, and indices in int32."""
    router = ops.KERNELS["route"]
    made: ops.Routing = router.route_twin(*given, block=router.ITEM)
    return replace(made, chosen=made.chosen.int(), order=made.order.int())


def attention(*given: Any, most: int, out: Tensor | None = None) -> Tensor:
    """As the kernel is called: its twin chooses no splits."""
    made: Tensor = ops.KERNELS["attention"].attention_twin(*given, out=out)
    return made


PACKED = {"fp8": ("self_attn.", "mlp.", "experts.", "embed_tokens"), "nvfp4": ("mlp.", "experts."), "plain": ()}


def network_of(config: ModelConfig, scheme: str) -> DiffusionGemma:
    """Parameters of 1, in a checkpoint's formats: what a self-test asks of a network is its shapes."""
    weights: dict[str, Weight] = {}
    for name, shape in parameter_shapes(config).items():
        plain = torch.ones(shape, dtype=BF16)
        if len(shape) == 1 or not any(f".{part}" in f".{name}" for part in PACKED[scheme]) or "conditioning" in name:
            weights[name] = plain
        elif scheme == "fp8":
            weights[name] = quantise_fp8(plain)
        else:
            weights[name] = quantise_nvfp4(plain, (shape[-2] // 2,) * 2 if "gate_up" in name else None)
    return DiffusionGemma(config, weights)


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DiffusionGemma]:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(tiny_config(pattern="sf", canvas=L, intermediate=32)))
    return {scheme: network_of(load_model_config(folder), scheme) for scheme in PACKED}


@pytest.fixture
def network(networks: dict[str, DiffusionGemma], monkeypatch: pytest.MonkeyPatch) -> DiffusionGemma:
    """One whose passes count as taking kernels on a card."""
    monkeypatch.setattr(selftest, "needed", lambda network: True)
    return networks["plain"]


# ── what a broken kernel is told by ───────────────────────────────────────────────────────────────────────────────

Break = Callable[[Tensor], None]


def rows_turned(t: Tensor) -> None:
    """Each row where the one before it belongs."""
    t.copy_(t.roll(1, 0 if len(t) > 1 else -1))


def two_swapped(t: Tensor) -> None:
    """The first two rows, or numbers of a row, that differ."""
    flat = t.view(len(t), -1) if len(t) > 1 else t.view(-1, 1)
    other = next(i for i in range(1, len(flat)) if not torch.equal(flat[0].float(), flat[i].float()))
    flat[[0, other]] = flat[[other, 0]].clone()


def one_wild(t: Tensor) -> None:
    first = t[(0,) * (t.dim() - 1)][:1]
    if t.dtype == torch.bool:
        first.logical_not_()
    elif t.dtype.is_floating_point:
        first.copy_(first.float() * 1.5 + 0.5 * t.float().abs().max())
    else:
        first.add_(1)


def last_lost(t: Tensor) -> None:
    """NaN, or what no type can hold in its place."""
    last = t.reshape(-1)[-1:] if t.is_contiguous() else t[-1, -1, -1:]
    if t.dtype.is_floating_point:
        last.fill_(torch.nan)
    elif t.dtype == torch.bool:
        last.logical_not_()
    else:
        last.sub_(1)


# Kernel -> its outcome's tensors, of its arguments and what it returned
WRITTEN: dict[str, Callable[[tuple[Any, ...], Any], list[Tensor]]] = {
    "heads": lambda given, made: [made, *(slab[:, int(given[9][1]) :][:, : int(given[9][2])] for slab in given[7:9])],
    "experts": lambda given, made: [made.y],
    "update": lambda given, made: [given[0].canvas, given[0].accepted, given[0].history],
    "quantise_rows_nvfp4": lambda given, made: [made.packed, made.scale],
    "embed": lambda given, made: [made],
}


def written(name: str, given: tuple[Any, ...], made: Any) -> list[Tensor]:
    return WRITTEN[name](given, made) if name in WRITTEN else list(compare.tensors_of(made))


def break_kernel(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Break, which: int) -> None:
    right = getattr(ops.KERNELS[name], name)

    def broken(*given: Any, **named: Any) -> Any:
        made = right(*given, **named)
        wrong(written(name, given, made)[which])
        return made

    monkeypatch.setattr(ops.KERNELS[name], name, broken)


def names(network: DiffusionGemma) -> list[str]:
    return list(dict.fromkeys(case.kernel for case in cases.cases_of(network)))


@torch.inference_mode()
def outcome(network: DiffusionGemma, name: str) -> selftest.Outcome:
    """Of one kernel."""
    return selftest._outcome(name, [case for case in cases.cases_of(network) if case.kernel == name], MAKE)


BROKEN = [
    *(("plain", name, i) for name, count in {"embed": 1, "rms_norm": 1, "sandwich": 3, "combine": 2}.items() for i in range(count)),
    *(("plain", name, 0) for name in ("bf16_linear", "bf16_gated", "attention", "experts")),
    *(("fp8", name, 0) for name in ("fp8_linear", "fp8_gated", "experts", "vocabulary_step", "embed")),
    *(("fp8", name, i) for name in ("quantise_rows", "rms_norm") for i in range(2)),
    *(("nvfp4", name, 0) for name in ("nvfp4_linear", "nvfp4_gated", "experts")),
    *(("plain", name, i) for name in ("heads", "update") for i in range(3)),
    *(("plain", "route", i) for i in range(5)),
    *(("plain", "vocabulary_step", i) for i in range(4)),
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "name", "which"), BROKEN, ids=lambda each: str(each))
def test_a_wrong_outcome_fails(
    networks: dict[str, DiffusionGemma], scheme: str, name: str, which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, wrongs = networks[scheme], [rows_turned, two_swapped, one_wild, last_lost]
    assert outcome(model, name).ok
    for wrong in wrongs:
        with monkeypatch.context() as patch:
            break_kernel(patch, name, wrong, which)
            found = outcome(model, name)
            assert not found.ok, wrong.__name__
            assert found.what.partition("; ")[2] in {c.what for c in cases.cases_of(model) if c.kernel == name}


def ones(x: Any) -> Any:
    return torch.ones_like(x)


def halves_swapped(w: Any) -> Any:
    """Gate where up belongs; of a stack in each expert."""
    if isinstance(w, Fp8):
        return Fp8(halves_swapped(w.codes.float()).to(w.codes.dtype), halves_swapped(w.scale))
    if isinstance(w, Nvfp4):
        return replace(w, global_scale=w.global_scale.flip(-1))
    return torch.cat(w.chunk(2, -2)[::-1], -2)


# What a kernel might overlook or take for another: scheme, kernel, place of the argument, what it becomes
OVERLOOKED: list[tuple[str, str, int, Callable[[Any], Any]]] = [
    ("plain", "rms_norm", 1, ones),
    ("plain", "rms_norm", 2, lambda eps: 0.1),
    ("plain", "sandwich", 2, ones),
    ("plain", "sandwich", 3, lambda pres: pres[::-1]),
    ("plain", "combine", 1, lambda pairs: replace(pairs, weights=pairs.weights.roll(1, -1))),
    ("plain", "combine", 6, ones),
    ("plain", "combine", 6, lambda scalar: scalar[:1]),
    ("plain", "embed", 2, lambda scale: 1.0),
    ("plain", "embed", 3, lambda soft: None),
    ("fp8", "embed", 1, lambda table: replace(table, scale=table.scale.roll(1, 0))),
    ("plain", "bf16_gated", 1, halves_swapped),
    ("fp8", "fp8_linear", 0, lambda x: replace(x, scale=ones(x.scale))),
    ("fp8", "fp8_linear", 1, lambda w: replace(w, scale=w.scale.roll(1, 0))),
    ("fp8", "fp8_gated", 1, halves_swapped),
    ("nvfp4", "nvfp4_linear", 1, lambda w: replace(w, global_scale=ones(w.global_scale))),
    ("nvfp4", "nvfp4_linear", 1, lambda w: replace(w, scale=w.scale.float().roll(1, -1).to(w.scale.dtype))),
    ("nvfp4", "nvfp4_linear", 1, lambda w: replace(w, divides=not w.divides)),
    ("nvfp4", "nvfp4_gated", 1, halves_swapped),
    ("plain", "heads", 1, ones),
    ("plain", "heads", 2, ones),
    ("plain", "heads", 3, torch.neg),
    ("plain", "heads", 9, lambda span: span + torch.tensor([0, 1, 0, 0], dtype=torch.int32)),
    ("plain", "attention", 3, lambda span: span * torch.tensor([1, 1, 1, 0], dtype=torch.int32)),
    ("plain", "attention", 3, lambda span: span + torch.tensor([1, 0, 0, 0], dtype=torch.int32)),
    ("plain", "attention", 3, lambda span: span + torch.tensor([0, 0, 1, 0], dtype=torch.int32)),
    ("plain", "attention", 4, lambda window: window and window + 1),
    ("plain", "attention", 4, lambda window: window and window - 1),
    ("plain", "route", 1, ones),
    ("plain", "route", 2, lambda proj: proj.roll(1, 0)),
    ("plain", "route", 3, ones),
    ("plain", "experts", 2, halves_swapped),
    ("fp8", "experts", 2, halves_swapped),
    ("nvfp4", "experts", 2, halves_swapped),
    ("nvfp4", "experts", 3, lambda w: replace(w, global_scale=w.global_scale.roll(1, 0))),
    ("plain", "experts", 1, lambda routing: replace(routing, order=routing.order.flip(0))),
    ("plain", "vocabulary_step", 2, lambda softcap: 2 * softcap),
    ("plain", "vocabulary_step", 3, ones),
    ("plain", "vocabulary_step", 4, lambda scale: 1.0),
    ("plain", "vocabulary_step", 5, lambda key: replace(key, step=key.step + 1)),
    ("plain", "vocabulary_step", 5, lambda key: replace(key, numbers=key.numbers * torch.tensor([1, 0, 1]).int())),
    ("fp8", "vocabulary_step", 0, lambda hidden: replace(hidden, scale=ones(hidden.scale))),
    ("plain", "update", 4, lambda vocabulary: vocabulary // 2),
    ("plain", "update", 5, lambda bound: 2 * bound),
    ("plain", "update", 6, lambda confidence: 0.0),
    ("fp8", "quantise_rows", 0, lambda x: 1.1 * x),
]


@pytest.mark.parametrize(("scheme", "name", "which", "become"), OVERLOOKED)
def test_an_operand_overlooked_fails(
    networks: dict[str, DiffusionGemma], scheme: str, name: str, which: int, become: Callable[[Any], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    right = getattr(ops.KERNELS[name], name)

    def broken(*given: Any, **named: Any) -> Any:
        changed = [become(x) if i == which and x is not None else x for i, x in enumerate(given)]
        return right(*changed, **named)

    monkeypatch.setattr(ops.KERNELS[name], name, broken)
    found = outcome(networks[scheme], name)
    assert not found.ok and "Error" not in found.what


# Where a kernel is wrong, and nowhere else: of its arguments
When = Callable[[tuple[Any, ...], dict[str, Any]], bool]


def rows_are(count: int) -> When:
    return lambda given, named: len(given[0]) == count


def is_named(what: str) -> When:
    return lambda given, named: named.get(what) is not None


WRONG_WHERE: list[tuple[str, When]] = [
    ("attention", is_named("most")),
    *((name, is_named("out")) for name in ("attention", "embed", "vocabulary_step")),
    ("embed", lambda given, named: "out" in named and given[5]),
    ("embed", lambda given, named: "out" in named and not given[5]),
    ("embed", lambda given, named: "out" not in named and given[3] is not None),
    ("embed", lambda given, named: "out" not in named and given[3] is None),
    *(
        (name, rows_are(T))
        for name in ("rms_norm", "sandwich", "combine", "heads", "experts", "route", "bf16_linear", "bf16_gated")
        for T in (L, 2 * L, CHUNK)
    ),
    *((name, rows_are(T)) for name in ("attention", "embed") for T in (L, CHUNK)),
    *(("combine", lambda given, named, n=n: len(given[0]) == 2 * L and given[6].numel() == n) for n in (1, 2 * L)),
    ("combine", lambda given, named: len(given[0]) == CHUNK and given[6].numel() == 1),
    ("experts", lambda given, named: len(given[0]) > 48),
    ("heads", lambda given, named: int(given[9][2]) < len(given[0])),
    ("attention", lambda given, named: int(given[3][2]) < len(given[0]) == CHUNK),
    ("attention", lambda given, named: not given[3][3] and int(given[3][2]) < len(given[0])),
    *(("quantise_rows", lambda given, named, T=T: given[0].shape == (2 * T, 16)) for T in (L, 2 * L, CHUNK)),  # by pair
    *(("update", lambda given, named, k=k: len(given[0].history) == k) for k in (1, 2)),
    ("update", lambda given, named: bool(given[0].flags[0])),
    ("update", lambda given, named: bool(given[0].flags[1]) and not given[0].flags[0]),
]


@pytest.mark.parametrize(("name", "when"), WRONG_WHERE)
def test_wrong_on_some_of_the_models_calls_alone_fails(
    networks: dict[str, DiffusionGemma], name: str, when: When, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = getattr(ops.KERNELS[name], name), []

    def broken(*given: Any, **named: Any) -> Any:
        made = right(*given, **named)
        if when(given, named):
            one_wild(
                WRITTEN.get(name, lambda _, made: list(compare.tensors_of(made)))(given, made)[
                    0 if name == "heads" else -1
                ]
            )
            wrong.append(given)
        return made

    monkeypatch.setattr(ops.KERNELS[name], name, broken)
    network = networks["fp8" if name == "quantise_rows" else "plain"]
    found = outcome(network, name)
    assert wrong and not found.ok
    assert found.what.partition("; ")[2] in {case.what for case in cases.cases_of(network) if case.kernel == name}


def whole_span(span: Tensor, rows: int) -> Tensor:
    """As if no row were padding."""
    return torch.cat([span[:2], torch.tensor([rows], dtype=torch.int32), span[3:]])


@pytest.mark.parametrize(("name", "place"), [("heads", 9), ("attention", 3)])
def test_padding_that_counts_as_rows_fails(
    networks: dict[str, DiffusionGemma], name: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(ops.KERNELS[name], name)

    def broken(*given: Any, **named: Any) -> Any:
        changed = [whole_span(x, len(given[0])) if i == place else x for i, x in enumerate(given)]
        return right(*changed, **named)

    monkeypatch.setattr(ops.KERNELS[name], name, broken)
    found = outcome(networks["plain"], name)
    assert not found.ok and ("numbers differ" in found.what or "NaN" in found.what)


@pytest.mark.parametrize("name", ["attention", "embed", "vocabulary_step"])
@pytest.mark.parametrize("fault", ["elsewhere", "before", "behind"])
def test_out_means_those_rows_and_no_others(
    networks: dict[str, DiffusionGemma], name: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(ops.KERNELS[name], name)

    def broken(*given: Any, out: Tensor | None = None, **named: Any) -> Any:
        if out is None or fault == "elsewhere":
            return right(*given, **named)
        made, around = right(*given, **named, out=out), out.as_strided((3 * out.numel(),), (1,), 0)
        around[0 if fault == "before" else -1] = 0.0
        return made

    monkeypatch.setattr(ops.KERNELS[name], name, broken)
    found = outcome(networks["plain"], name)
    assert not found.ok and "Error" not in found.what
    if fault != "elsewhere":
        assert found.what.startswith(("1 of 1 numbers differ", "rows beside its own are written"))


def forgets(update: Callable[..., None], state: Any, *given: Any) -> None:
    update(state, *given)
    state.history[1:] = -1


def compares_one(update: Callable[..., None], state: Any, draft: Tensor, *given: Any) -> None:
    """The draft with the history's first row alone, and keeps all."""
    before, row, over = state.history.clone(), int(state.key.step) % len(state.history), bool(state.flags[1])
    state.history[1:] = draft
    update(state, draft, *given)
    state.history.copy_(before)
    if not over:
        state.history[row] = draft


def converges_early(update: Callable[..., None], state: Any, *given: Any) -> None:
    """Two drafts alike are enough."""
    update(replace(state, history=state.history[:1]), *given)


def never_runs_out(update: Callable[..., None], state: Any, *given: Any) -> None:
    update(replace(state, temperatures=torch.cat([state.temperatures, state.temperatures[-1:]])), *given)


def goes_on(update: Callable[..., None], state: Any, *given: Any) -> None:
    """Behind its end."""
    state.flags.zero_()
    update(state, *given)


@pytest.mark.parametrize("fault", [forgets, compares_one, converges_early, never_runs_out, goes_on])
def test_an_update_that_ends_wrongly_fails(
    networks: dict[str, DiffusionGemma], fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ops.KERNELS["update"]
    monkeypatch.setattr(file, "update", lambda *given: fault(file.update_twin, *given))
    found = outcome(networks["plain"], "update")
    assert not found.ok and "numbers differ" in found.what


@pytest.mark.parametrize("what", ends.UPDATES)
def test_updates_end_as_they_are_called(what: str) -> None:
    """The cases are what their names say: at the last turn but one, and not before."""
    steps, stability, turns = ends.UPDATES[what]
    state = ops.State.new(L, stability, torch.linspace(0.8, 0.4, steps))
    state.history.fill_(-1)
    drafts, entropy = MAKE.integers(2, L, below=64), MAKE.uniform(L, low=0.0, high=0.2)
    seen = []
    for which, calm in turns:
        ops.KERNELS["update"].update_twin(
            state, drafts[which], drafts[0], entropy * calm, 64, ends.BOUND, ends.CONFIDENCE
        )
        seen.append(tuple(state.flags.tolist()))
    end = (int("converges" in what), 1)
    assert seen == [(0, 0)] * (len(turns) - 2) + [end, end]


@pytest.mark.parametrize(("context", "asked"), [(2 * REACH, 2 * REACH), (2 * REACH, None), (REACH, REACH), (100, 100)])
def test_splits_are_chosen_as_a_captured_pass_chooses_them(
    networks: dict[str, DiffusionGemma], context: int, asked: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, calls = networks["plain"], []

    def noted(q: Tensor, keys: Tensor, *given: Any, **named: Any) -> Tensor:
        calls.append((len(q), keys.shape[1], named["most"]))
        return attention(q, keys, *given, **named)

    monkeypatch.setattr(cases, "REACH", REACH)
    monkeypatch.setattr(ops.KERNELS["attention"], "attention", noted)
    monkeypatch.setattr(selftest, "needed", lambda network: True)
    assert selftest.failing(network, context=asked) == []
    runner = captured.Captured(network, Room(context=context, rows=CHUNK, slack=0))
    (reach,) = {sight.reach for sight in runner._canvas().sights.values()}
    assert {most for _, _, most in calls} == {reach}
    assert all(slots >= reach for _, slots, _ in calls)  # fewer would bound the splits
    assert {rows for rows, _, _ in calls} == {L, CHUNK}


def test_another_planned_context_runs_again_where_it_may_choose_other_splits(
    network: DiffusionGemma, runs: list[DiffusionGemma]
) -> None:
    for context, fresh in ((None, 1), (MOST, 1), (2 * MOST, 1), (MOST - 1, 2), (MOST - 1, 2), (40, 3), (None, 3)):
        assert len(selftest.apply(network, context=context)) == 1 and len(runs) == fresh


def test_no_more_keys_than_the_model_has_positions_for(
    networks: dict[str, DiffusionGemma], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(networks["plain"], "config", replace(networks["plain"].config, max_positions=40))
    told = {case.what.rpartition(", ")[2] for case in cases.cases_of(networks["plain"]) if case.kernel == "attention"}
    assert told == {"most 40"}


@pytest.mark.parametrize("slot", [0, -1])
def test_a_slot_that_is_not_the_passs_own_fails(
    networks: dict[str, DiffusionGemma], slot: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ops.KERNELS["heads"].heads_twin

    def broken(*given: Any) -> Tensor:
        q: Tensor = right(*given)
        given[8][-1, slot, 0] = 0
        return q

    monkeypatch.setattr(ops.KERNELS["heads"], "heads", broken)
    assert outcome(networks["plain"], "heads").what.startswith("1 of 1 numbers differ")


@pytest.mark.parametrize("name", ["bf16_linear", "route", "update", "vocabulary_step", "experts"])
def test_a_kernel_that_raises_fails_alone(
    networks: dict[str, DiffusionGemma], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_resources(*given: Any, **named: Any) -> None:
        raise RuntimeError("\n  out of resource: shared memory, Required: 131072\nmore")

    monkeypatch.setattr(ops.KERNELS[name], name, out_of_resources)
    found = selftest.run(networks["plain"])
    assert [each.name for each in found] == names(networks["plain"])
    (wrong,) = (each for each in found if not each.ok)
    assert wrong.name == name
    assert wrong.what.startswith("RuntimeError: out of resource: shared memory, Required: 131072; ")


def test_every_kernel_of_every_format_is_tried(networks: dict[str, DiffusionGemma]) -> None:
    tried = {name for network in networks.values() for name in names(network)}
    four = {
        "nvfp4_nvfp4_linear",
        "nvfp4_nvfp4_gated",
        "quantise_rows_nvfp4",
    }  # under the word nvfp4-rows: tests/kernels
    assert tried == set(ops.KERNELS) - four
    for network in networks.values():
        told = [(case.kernel, case.what) for case in cases.cases_of(network)]
        assert len(set(told)) == len(told)


def test_rows_are_those_of_the_passes(networks: dict[str, DiffusionGemma], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "PREFILL_CHUNK", 512)
    assert cases.passes(networks["plain"].config) == [12, 24, 512]
    monkeypatch.setattr(cases, "PREFILL_CHUNK", 16)
    assert cases.passes(networks["plain"].config) == [12, 24]  # a plan has room for two canvases


def test_attention_is_tried_on_what_each_pass_sees(networks: dict[str, DiffusionGemma]) -> None:
    told = [
        case.what.partition("heads of ")[2] for case in cases.cases_of(networks["plain"]) if case.kernel == "attention"
    ]
    seen = [
        *(f"12 canvas rows, {live} of them behind 16" for live in (12, 8)),
        *(f"12 prompt rows, {live} of them behind 16" for live in (12, 8)),
        *(f"56 prompt rows, {live} of them behind {at}" for live, at in ((56, 16), (38, 16), (56, 0))),
    ]
    assert told == [f"{d}, {rows}, window {w}, most 96" for d, w in ((8, 8), (16, None)) for rows in seen]


def test_a_word_of_dgemma_ops_changes_the_cases(
    networks: dict[str, DiffusionGemma], monkeypatch: pytest.MonkeyPatch
) -> None:
    def heads(words: str) -> list[str]:
        monkeypatch.setenv("DGEMMA_OPS", f"twins {words}")
        return [case.what for case in cases.cases_of(networks["fp8"]) if case.kernel == "vocabulary_step"]

    told = [heads(words) for words in ("", "fast-head", "fp8-soft", "fast-head fp8-soft")]
    assert [what[0].partition(" rows, ")[2].partition(" rows, ")[2] for what in told] == [
        "reference",
        "fast",
        "reference, across",
        "fast, across",
    ]
    for words in ("fast-head", "fp8-soft", "fast-head fp8-soft"):
        heads(words)
        assert outcome(networks["fp8"], "vocabulary_step").ok


def test_ids_that_tie_may_differ_but_not_many() -> None:
    T, V, z = 100, 8, torch.ones(100, 8)
    z[:, 2:] = 0.0
    draft, entropy, soft = torch.zeros(T).long(), torch.ones(T), torch.ones(T, 4)
    twin = draft, entropy, draft, soft

    def wrong(which: int, rows: int, to: int) -> str | None:
        ids = draft.clone()
        ids[:rows] = to
        return ends._other_step(tuple(ids if i == which else t for i, t in enumerate(twin)), twin, z, z, "reference")

    for which, what in ((0, "drafts"), (2, "samples")):
        assert wrong(which, 3, to=1) is None
        assert wrong(which, 4, to=1) == f"4 of 100 {what} are not its twin's"
        assert wrong(which, 1, to=2) == f"1 of 100 {what} are not what they should be by far"
        for outside in (-1, V):
            assert wrong(which, 1, outside) == f"{what} outside the vocabulary"


# ── bars ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def numbers(seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(100, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_bars() -> None:
    x = numbers()
    step = compare.step_at(x, BF16)
    near, far = x.clone(), x.clone()
    near[3, 7] = (x[3, 7] + 2 * step[3, 7]).to(BF16)
    far[3, 7] = (x[3, 7] + 3 * step[3, 7]).to(BF16)
    assert apart((x,), (x,), [NEAR]) is None and apart((near,), (x,), [NEAR]) is None
    assert apart((far,), (x,), [NEAR]) == "3 steps of bfloat16 from its twin, in 1 of 6400 numbers"
    many = (x.float() + step).to(BF16)
    assert apart((many,), (x,), [NEAR]) == f"{int((many != x).sum())} of 6400 numbers differ from its twin's"
    assert apart((many,), (x,), [Bar(1.5, 0.0)]) is None  # one and a half where the sum came into the next octave
    assert apart((near,), (x,), [SAME]) is not None
    one = torch.arange(6400).view(100, 64)
    assert apart((one,), (one,), [SAME]) is None
    assert apart((one + (one == 5).int(),), (one,), [SAME]) == "1 of 6400 numbers differ from its twin's"
    assert apart((one,), (one.int(),), [SAME]) == "(100, 64) int64, its twin (100, 64) int32"
    assert apart((x, x), (x,), [NEAR]) == "2 tensors, its twin 1"
    assert apart((x, many), (x, x), [NEAR, Bar(1.5, 0.0)]) is None


def test_nan_fails_even_where_the_twin_has_it() -> None:
    x = numbers()
    x[0, 0] = torch.nan
    assert apart((x,), (x,), [NEAR]) == "NaN in 1 of 6400 numbers"
    assert apart((numbers(),), (x,), [NEAR]) == "1 of 6400 numbers are not finite, or not where its twin's are not"
    x[0, 0] = torch.inf
    assert apart((x,), (x,), [NEAR]) is None
    assert apart((x,), (-x,), [NEAR]) is not None and apart((numbers(),), (x,), [NEAR]) is not None


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float8_e4m3fn])
def test_steps_are_those_of_the_type(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, 1.999, 2.0, 4.0, -8.0]).to(dtype)
    x = torch.cat([x.float(), torch.tensor([0.0])]).to(dtype)
    eps = torch.finfo(dtype).eps
    rms = float(x.double().square().mean().sqrt())  # of 3.7: between 2 and 4
    sizes = [max(abs(float(v)), rms) for v in x.double()]
    want = [2.0 ** (torch.tensor(s).log2().floor().item()) * eps for s in sizes]
    assert compare.step_at(x, dtype).tolist() == want


# ── operands ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_operands_are_the_same_every_time_and_of_their_form(networks: dict[str, DiffusionGemma]) -> None:
    one, two = (Operands(torch.device("cpu"), BF16) for _ in range(2))
    for network in networks.values():
        layer = network.layers[0]
        for weight in (layer.mlp.gate_up, layer.experts.down, network.embed_tokens):
            form = Form.of(weight, BF16)
            made = one.weight(form, 1)
            assert Form.of(made, BF16) == form and type(made) is type(weight)
            for a, b in zip(compare.tensors_of(made), compare.tensors_of(two.weight(form, 1)), strict=True):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            if not isinstance(made, Tensor | Fp8):
                assert bool((made.scale.float() >= 0.5).all() and (made.scale.float() < 4).all())
    assert not torch.equal(one.normal(64, seed=1), one.normal(64, seed=2))
    rows = one.normal(600, 2816)  # more than once round
    assert len({tuple(row[:4].tolist()) for row in rows}) == 600
    assert float(rows.float().mean().abs()) < 0.01 and abs(float(rows.float().std()) - 1) < 0.01


# ── what is kept ──────────────────────────────────────────────────────────────────────────────────────────────────


def kept_file() -> Path:
    file = selftest.cache_file()
    assert file is not None
    return file


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[DiffusionGemma]:
    """Each fresh self-test; one kernel fails."""
    made: list[DiffusionGemma] = []

    def run(network: DiffusionGemma, context: int | None) -> list[selftest.Outcome]:
        made.append(network)
        wrong = selftest.Outcome("attention", False, "NaN in 1 of 2 numbers; full")
        return [wrong if name == "attention" else selftest.Outcome(name, True) for name in names(network)]

    monkeypatch.setattr(selftest, "run", run)
    return made


def test_a_failing_kernel_is_replaced_with_one_line(network: DiffusionGemma, runs: list[DiffusionGemma]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DGEMMA_OPS", "")
        line = (
            "kernel attention failed its self-test (NaN in 1 of 2 numbers; full): its torch twin runs instead, slower"
        )
        assert selftest.apply(network) == [line]
        assert ops.replaced() == {"attention"}
        assert selftest.apply(network) == [line]  # from the cache
        assert [each.name for each in selftest.failing(network)] == ["attention"]
    assert len(runs) == 1


def test_a_kept_verdict_runs_nothing_and_force_runs_anew(network: DiffusionGemma, runs: list[DiffusionGemma]) -> None:
    for force, fresh in ((False, 1), (False, 1), (True, 2), (False, 2)):
        assert [each.name for each in selftest.failing(network, force=force)] == ["attention"]
        assert len(runs) == fresh
    (entry,) = json.loads(kept_file().read_text()).values()
    assert set(entry) == {
        *("card", "capability", "driver", "torch", "triton", "dgemma", "sources", "cases", "outcomes")
    }
    assert [path.name for path in kept_file().parent.iterdir()] == ["selftest.json"]


@pytest.mark.parametrize("what", ["_driver", "_triton", "_name", "_capability", "_sources", "__version__", "cases"])
def test_anything_new_runs_again(
    network: DiffusionGemma, runs: list[DiffusionGemma], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    selftest.failing(network)
    with monkeypatch.context() as patch:
        if what == "cases":
            patch.setenv("DGEMMA_OPS", "twins fast-head")
        else:
            patch.setattr(selftest, what, "9" if what == "__version__" else lambda *device: "another")
        selftest.failing(network)
        selftest.failing(network)
        assert len(runs) == 2
    selftest.failing(network)  # both are kept
    assert len(runs) == 2


def test_a_changed_kernel_is_another_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = selftest._sources()
    file = tmp_path / "embedding.py"
    file.write_text("one")
    monkeypatch.setattr(ops.KERNELS["embed"], "__file__", str(file))
    with_one = selftest._sources()
    file.write_text("two")
    assert len({before, with_one, selftest._sources()}) == 3


DAMAGED = [
    *("", "{", "[]", '"x"', "\xff\xfe", '{"KEY": 3}', '{"KEY": {"outcomes": []}}'),
    *(
        '{"KEY": {"outcomes": [{"name": "embed"}]}}',
        '{"KEY": {"outcomes": 3}}',
        '{"KEY": {"outcomes": [{"name": "no", "ok": true, "what": ""}]}}',
    ),
]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_file_runs_again(network: DiffusionGemma, runs: list[DiffusionGemma], text: str) -> None:
    selftest.failing(network)
    file = kept_file()
    (key,) = json.loads(file.read_text())
    file.write_bytes(text.replace("KEY", key).encode("latin-1"))
    _, notices = selftest._verdict(network, force=False)
    assert len(runs) == 2
    damaged = f"the kernels' self-test is not remembered: {file} is damaged"
    assert notices == ([] if "KEY" in text else [damaged])
    assert selftest._verdict(network, force=False)[1] == [] and len(runs) == 2  # mended


def test_an_unwritable_folder_is_one_line(
    network: DiffusionGemma, runs: list[DiffusionGemma], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    lines = selftest.apply(network)
    assert len(lines) == 2 and lines[1].startswith("the kernels' self-test is not remembered: ")
    assert "annot be" in lines[1]
    assert len(selftest.failing(network)) == 1 and len(runs) == 2


def test_the_file_is_written_whole_or_not_at_all(
    network: DiffusionGemma, runs: list[DiffusionGemma], monkeypatch: pytest.MonkeyPatch
) -> None:
    selftest.failing(network)
    before = kept_file().read_text()

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    monkeypatch.setattr(selftest, "_driver", lambda: "another")
    assert selftest._verdict(network, force=False)[1][0].endswith("cannot be written: No space left on device")
    assert kept_file().read_text() == before and len(list(kept_file().parent.iterdir())) == 1


def test_only_the_newest_are_kept(
    network: DiffusionGemma, runs: list[DiffusionGemma], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "KEPT", 2)
    for driver in ("1", "2", "3"):
        monkeypatch.setattr(selftest, "_driver", lambda driver=driver: driver)
        selftest.failing(network)
    entries = json.loads(kept_file().read_text()).values()
    assert [entry["driver"] for entry in entries] == ["2", "3"]


@pytest.mark.parametrize("home", ["", "relative"])
def test_a_relative_cache_home_does_not_count(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert selftest.cache_file() == tmp_path / ".cache" / "dgemma" / "selftest.json"


def test_without_a_home_nothing_is_kept(
    network: DiffusionGemma, runs: list[DiffusionGemma], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose user is a number."""

    def nobody(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert selftest.cache_file() is None
    for fresh in (1, 2):
        told, notice = selftest.apply(network)
        assert told.startswith("kernel attention failed") and len(runs) == fresh
        assert notice == ("the kernels' self-test is not remembered: there is no home folder, and no XDG_CACHE_HOME")


def stuck(*given: Any) -> None:
    raise AssertionError("it waits for a pipe's writer")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda file: file.symlink_to("/dev/zero")])
def test_what_is_no_regular_file_is_neither_read_nor_replaced(
    network: DiffusionGemma, runs: list[DiffusionGemma], make: Callable[[Path], None]
) -> None:
    file = kept_file()
    file.parent.mkdir(parents=True)
    make(file)
    before = file.lstat()
    handler = signal.signal(signal.SIGALRM, stuck)
    signal.alarm(5)
    try:
        _, notices = selftest._verdict(network, force=False)
        told = selftest._write({})
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
    assert notices == told == [f"the kernels' self-test is not remembered: {file} is no regular file"]
    assert len(runs) == 1 and file.lstat().st_ino == before.st_ino
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    "change",
    [
        *(lambda o: o[1:], lambda o: o + o[:1], lambda o: o[::-1], lambda o: o[:-1] + o[:1]),
        *(lambda o, what=what: [{**each, **what} for each in o] for what in ({"ok": 1}, {"what": None}, {"name": 3})),
    ],
)
def test_a_verdict_on_other_kernels_is_none(
    network: DiffusionGemma, runs: list[DiffusionGemma], change: Callable[[list[Any]], list[Any]]
) -> None:
    selftest.failing(network)
    kept = json.loads(kept_file().read_text())
    ((key, entry),) = kept.items()
    kept_file().write_text(json.dumps({key: {**entry, "outcomes": change(entry["outcomes"])}}))
    assert [each.name for each in selftest.failing(network)] == ["attention"] and len(runs) == 2
    selftest.failing(network)
    assert len(runs) == 2  # mended


def test_nothing_runs_where_no_kernel_does(networks: dict[str, DiffusionGemma], runs: list[DiffusionGemma]) -> None:
    for network in networks.values():
        assert not selftest.needed(network)
        assert selftest.apply(network) == [] and selftest.failing(network, force=True) == []
    assert runs == [] and not kept_file().exists()


def test_it_is_needed_where_kernels_are_taken_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "why_torch", lambda device, dtype: None)
    on_card: Any = SimpleNamespace(device=torch.device("cuda"), dtype=BF16)
    assert not selftest.needed(on_card)  # DGEMMA_OPS=twins
    monkeypatch.setenv("DGEMMA_OPS", "fast-head")
    assert selftest.needed(on_card)
    assert not selftest.needed(cast(Any, SimpleNamespace(device=torch.device("cpu"), dtype=BF16)))  # the interpreter
    monkeypatch.setattr(ops, "why_torch", lambda device, dtype: "a reason")
    assert not selftest.needed(on_card)


# ── what is no kernel's fault, and what nothing can be done about ─────────────────────────────────────────────────


def test_too_little_memory_is_no_verdict(network: DiffusionGemma, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **named: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(ops.KERNELS["attention"], "attention_twin", full)
        lines = selftest.apply(network)
    assert lines == ["self-test of attention left out: not enough memory on the card"]
    assert not kept_file().exists()
    assert selftest.apply(network) == [] and kept_file().exists()


def test_a_dead_context_is_an_error_with_a_cure(network: DiffusionGemma, monkeypatch: pytest.MonkeyPatch) -> None:
    dead: list[bool] = []

    def reads_elsewhere(*given: Any, **named: Any) -> None:
        dead.append(True)

    def wait(device: torch.device) -> None:
        if dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be …")

    monkeypatch.setattr(selftest, "_wait", wait)
    monkeypatch.setattr(ops.KERNELS["attention"], "attention", reads_elsewhere)
    with pytest.raises(
        errors.KernelCrash, match=r"^the kernel attention crashed on cpu \(.*\): RuntimeError: CUDA"
    ) as caught:
        selftest.apply(network)
    assert "DGEMMA_OPS=twins" in caught.value.fix and "DGEMMA_OPS=torch" in caught.value.fix
    assert caught.value.exit_code == 12
    assert not kept_file().exists()


def test_torchs_settings_are_as_before(network: DiffusionGemma, monkeypatch: pytest.MonkeyPatch) -> None:
    matmul, seen = torch.backends.cuda.matmul, []
    before = torch.get_float32_matmul_precision(), matmul.allow_bf16_reduced_precision_reduction
    right = ops.KERNELS["embed"].embed_twin

    def embed_twin(*given: Any, **named: Any) -> Tensor:
        seen.append((torch.get_float32_matmul_precision(), matmul.allow_bf16_reduced_precision_reduction))
        made: Tensor = right(*given, **named)
        return made

    torch.set_float32_matmul_precision("high")
    try:
        monkeypatch.setattr(ops.KERNELS["embed"], "embed_twin", embed_twin)
        selftest.run(network)
        assert set(seen) == {("highest", False)}
        assert (torch.get_float32_matmul_precision(), matmul.allow_bf16_reduced_precision_reduction) == (
            "high",
            before[1],
        )
    finally:
        torch.set_float32_matmul_precision(before[0])
