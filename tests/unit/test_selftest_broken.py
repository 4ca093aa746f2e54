"""A kernel that is wrong in any outcome, overlooks an operand or fails on some calls alone fails its self-test."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from twin_kernels import CHUNK, L, outcome
from twin_kernels import networks as networks
from twin_kernels import own_process as own_process

from dgemma_local import ops
from dgemma_local.model import DiffusionGemma
from dgemma_local.quant import Fp8, Nvfp4
from dgemma_local.selftest import cases, compare

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
