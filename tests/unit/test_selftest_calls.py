"""The self-test makes the calls that a model's passes make: padding, rows in place, updates' ends, splits, formats."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from twin_kernels import CHUNK, MAKE, L, attention, names, outcome
from twin_kernels import networks as networks
from twin_kernels import own_process as own_process

from dgemma_local import captured, ops, selftest
from dgemma_local.cache import Room
from dgemma_local.model import DiffusionGemma
from dgemma_local.selftest import cases, ends

REACH = cases.REACH


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
