"""Checkpoints, kernels and answers that are wrong when they are tried: the doctor finds it, and names the cure."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from examined import NVFP4, RTX_4090, SEES, found, is_cured, machine
from examined import nothing_of_this_machine as nothing_of_this_machine
from examined import own_demo as own_demo
from safetensors.torch import load_file, save_file

from dgemma_local import ops, presets
from dgemma_local.bench import synthetic
from dgemma_local.demo.render import MODELS
from dgemma_local.doctor import child, storage, trial
from dgemma_local.doctor.finding import Level
from dgemma_local.doctor.probe import Lost, Probe
from dgemma_local.layout import EMBEDDING
from dgemma_local.selftest import cases


def route(*given: Any) -> ops.Routing:
    """As the kernel makes it: with items of work, and indices in int32."""
    router = ops.KERNELS["route"]
    made: ops.Routing = router.route_twin(*given, block=router.ITEM)
    return replace(made, chosen=made.chosen.int(), order=made.order.int())


def attention(*given: Any, most: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """As the kernel is called: its twin chooses no splits."""
    made: torch.Tensor = ops.KERNELS["attention"].attention_twin(*given, out=out)
    return made


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel runs here: each is its twin, on small sizes."""
    small = synthetic.small_config()
    monkeypatch.setattr(synthetic, "published_config", lambda: small)
    monkeypatch.setattr(cases, "PREFILL_CHUNK", 56)
    monkeypatch.setattr(child, "CONTEXT", 512)
    monkeypatch.setattr(ops, "why_torch", lambda device, dtype: None)
    for name, file in ops.KERNELS.items():
        monkeypatch.setattr(file, name, getattr(file, f"{name}_twin"))
    monkeypatch.setattr(ops.KERNELS["route"], "route", route)
    monkeypatch.setattr(ops.KERNELS["attention"], "attention", attention)


@pytest.mark.parametrize("name", ["rms_norm", "nvfp4_linear"])
def test_a_kernel_that_is_wrong(twins: None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at = machine(RTX_4090, torch=dict(SEES))
    seen = found(trial.kernels, at)
    assert list(seen) == ["kernels"] and seen["kernels"].level is Level.OK
    assert name in seen["kernels"].what and seen["kernels"].what.startswith("14 of 14 as their torch twins (nvfp4)")

    right = getattr(ops.KERNELS[name], name)
    monkeypatch.setattr(ops.KERNELS[name], name, lambda *given: right(*given) * 1.5)
    seen = found(trial.kernels, at)
    is_cured(seen[f"kernel {name}"], Level.FAIL, "differs from its torch twin", "in its place")
    assert seen["kernels"].what.startswith("13 of 14") and name not in seen["kernels"].what
    is_cured(seen["kernels"], Level.WARN, "as their torch twins", "DGEMMA_OPS=torch")


def test_kernels_that_were_not_tried() -> None:
    outcomes = [
        {"name": "embed", "ok": True, "untested": True, "what": "untested"},
        {"name": "heads", "ok": True, "untested": False, "what": ""},
    ]
    (warned,) = trial.judged(cast(Any, outcomes), "fp8")
    is_cured(warned, Level.WARN, "1 of 2 as their torch twins (fp8): heads; not tried", "end what holds the card")
    assert warned.what.endswith("memory: embed")


@pytest.mark.parametrize(
    ("outcomes", "levels"),
    [
        ([], ["WARN"]),
        ([{"name": "embed", "ok": False, "untested": False, "what": "far"}], ["FAIL", "WARN"]),
        ([{"name": "embed", "ok": True, "untested": True, "what": "untested"}], ["WARN"]),
        ([{"name": "embed", "ok": True, "untested": False, "what": ""}], ["OK"]),
    ],
)
def test_only_kernels_that_were_all_tried_and_right_are_in_order(outcomes: Any, levels: list[str]) -> None:
    assert [each.level for each in trial.judged(outcomes, "fp8")] == levels


# What checkpoints hold


def test_numbers_that_cannot_be_right_are_found_by_reading(own_demo: Path) -> None:
    file = own_demo / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-100_000:] = b"\xff" * 100_000
    file.write_bytes(data)
    at = machine(torch=dict(SEES), folders={"demo": own_demo, "demo-nvfp4": MODELS / "sudoku-nvfp4"}, verify=True)
    seen = found(trial.contents, at)
    is_cured(seen["contents demo"], Level.FAIL, "holds", "fetch the checkpoint again")
    assert seen["contents demo-nvfp4"].level is Level.OK and "kB read" in seen["contents demo-nvfp4"].what
    at.verify = False
    seen = found(trial.contents, at)
    assert seen["contents"].what == "tensors of this architecture, by their headers: demo, demo-nvfp4"


SECOND = "model.decoder.layers.1."


@pytest.mark.parametrize(
    ("model", "tensor", "code"),
    [
        ("sudoku", EMBEDDING, math.nan),
        ("sudoku", f"{SECOND}experts.gate_up_proj", -math.inf),
        ("sudoku-fp8", f"{SECOND}mlp.up_proj.weight", 0x7F),
        ("sudoku-fp8", f"{SECOND}experts.1.gate_proj.weight", 0xFF),
        ("sudoku-nvfp4", f"{SECOND}self_attn.k_proj.weight", math.nan),
    ],
)
def test_one_number_that_is_none_is_found_in_any_tensor(tmp_path: Path, model: str, tensor: str, code: float) -> None:
    shutil.copytree(MODELS / model, tmp_path / model)
    file = tmp_path / model / "model.safetensors"
    tensors = load_file(file)
    damaged = tensors[tensor]
    (damaged.view(torch.uint8) if damaged.itemsize == 1 else damaged).flatten()[-1] = code
    save_file(tensors, file)
    seen = found(trial.contents, machine(torch=dict(SEES), folders={"demo": tmp_path / model}, verify=True))
    is_cured(seen["contents demo"], Level.FAIL, f"{tensor} holds NaN or infinity", "fetch the checkpoint again")


def test_the_largest_numbers_of_every_form_are_numbers() -> None:
    folders = {f"demo{form}": MODELS / f"sudoku{form}" for form in ("", "-fp8", "-nvfp4")}
    seen = found(trial.contents, machine(torch=dict(SEES), folders=folders, verify=True))
    assert {each.level for each in seen.values()} == {Level.OK} and len(seen) == len(folders)


def test_a_tied_copy_that_differs_is_found_by_reading(own_demo: Path) -> None:
    tensors = load_file(own_demo / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors[EMBEDDING] * 2}, own_demo / "model.safetensors")
    seen = found(trial.contents, machine(torch=dict(SEES), folders={"demo": own_demo}, verify=True))
    is_cured(seen["contents demo"], Level.FAIL, f"lm_head.weight differs from {EMBEDDING}", "share their weights")


def test_a_checkpoint_of_another_architecture(own_demo: Path) -> None:
    """Its headers are right by themselves."""
    path = own_demo / "config.json"
    told = json.loads(path.read_text())
    told["text_config"]["vocab_size"] *= 2
    path.write_text(json.dumps(told))
    at = machine(torch=dict(SEES))
    assert found(storage.checkpoints, at)["model demo"].level is Level.OK
    seen = found(trial.contents, at)
    is_cured(seen["contents demo"], Level.FAIL, "of another shape than config.json asks", "one checkpoint")
    assert "demo-text" in seen["contents"].what


def test_published_hashes_stand_for_what_is_read() -> None:
    at = machine(torch=dict(SEES), folders={NVFP4: MODELS / "sudoku-nvfp4"}, verify=True)
    assert list(found(trial.contents, at)) == ["contents"]


def test_a_checkpoint_that_ends_the_child(own_demo: Path) -> None:
    folders = {"demo": own_demo, "demo-text": MODELS / "text"}
    at = machine(torch=dict(SEES), folders=folders, answers={"contents": Lost("ended by SIGBUS")})
    seen = found(trial.contents, at)
    is_cured(seen["contents demo"], Level.FAIL, "SIGBUS", "--json")
    assert seen["contents demo-text"].level is Level.FAIL  # the next is tried, by another child
    assert found(trial.contents, machine())["contents"].level is Level.SKIP


@pytest.mark.parametrize(
    ("answer", "what", "cure"),
    [
        (Lost("ended by SIGSEGV"), "SIGSEGV", "DGEMMA_OPS=torch"),
        ({"error": "the kernel embed crashed", "fix": "set DGEMMA_OPS=twins"}, "embed crashed", "DGEMMA_OPS=twins"),
        ({"error": "RuntimeError: odd"}, "odd", "--json"),
    ],
)
def test_a_trial_that_ends_badly(answer: Any, what: str, cure: str) -> None:
    at = machine(RTX_4090, torch=dict(SEES), answers={"kernels": answer, "smoke": answer})
    is_cured(found(trial.kernels, at)["kernels"], Level.FAIL, what, cure)
    assert found(trial.smoke, at)["demo"].level is Level.FAIL


def test_two_steps_of_the_demo() -> None:
    at = machine(torch=dict(SEES))
    seen = found(trial.smoke, at)["demo"]
    assert seen.level is Level.OK and seen.facts["steps"] == child.STEPS and seen.facts["finite"]
    assert "the model is on cpu" in seen.what
    wrong = dict(seen.facts) | {"finite": False}
    assert found(trial.smoke, machine(torch=dict(SEES), answers={"smoke": wrong}))["demo"].level is Level.FAIL
    noticed = dict(seen.facts) | {"notices": ["kernel embed failed"]}
    assert found(trial.smoke, machine(torch=dict(SEES), answers={"smoke": noticed}))["demo"].level is Level.WARN


def test_an_easy_answer_that_takes_all_its_steps_is_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would where a router is fed wrong states: here the model's own rule of stopping is out of reach."""
    assert found(trial.smoke, machine(torch=dict(SEES)))["demo"].facts["converged"] is True
    monkeypatch.setattr(presets, "applied", lambda config, _: replace(config, confidence=0.0, steps=4))
    seen = found(trial.smoke, machine(torch=dict(SEES)))["demo"]
    is_cured(seen, Level.FAIL, "did not settle in 4 steps", "DGEMMA_OPS=torch")


def test_the_child_says_what_it_was_given() -> None:
    with Probe() as asked:
        asked.begin("torch")
        assert asked.ask("torch", 60)["version"] == torch.__version__
        assert asked.ask("wishes", 60) == {"words": []}
