"""A self-test without kernels: their twins stand in their place, on tiny networks of every format.

A test file takes fixtures by their names: `from twin_kernels import networks as networks`. `own_process` then holds for
all of its tests.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_config
from torch import Tensor

from dgemma_local import ops, selftest
from dgemma_local.config import ModelConfig, load_model_config
from dgemma_local.model import DiffusionGemma, parameter_shapes
from dgemma_local.quant import Weight, quantise_fp8, quantise_nvfp4
from dgemma_local.selftest import cases
from dgemma_local.selftest.operands import Operands

BF16 = torch.bfloat16
L, CHUNK = 12, 56  # rows of a canvas, and of a prompt's chunk
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


def names(network: DiffusionGemma) -> list[str]:
    return list(dict.fromkeys(case.kernel for case in cases.cases_of(network)))


@torch.inference_mode()
def outcome(network: DiffusionGemma, name: str) -> selftest.Outcome:
    """Of one kernel."""
    return selftest._outcome(name, [case for case in cases.cases_of(network) if case.kernel == name], MAKE)
