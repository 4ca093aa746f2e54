"""The self-test on kernels as they are: all right, in every format and under every word of DGEMMA_OPS."""

from itertools import groupby
from pathlib import Path

import pytest
import torch
from dgemma_local.kernels._launch import BLACKWELL
from reference import open_model
from tiny import write_tiny
from tiny_quantised import write_quantised

from dgemma_local import ops, selftest
from dgemma_local.model import DiffusionGemma
from dgemma_local.quant import quantise_fp8
from dgemma_local.selftest import cases
from dgemma_local.selftest.operands import Operands

ALWAYS = {
    "embed", "rms_norm", "sandwich", "combine", "bf16_linear", "bf16_gated", "heads", "attention", "route", "experts",
    "vocabulary_step", "update",
}  # fmt: skip
FP8 = {"fp8_linear", "fp8_gated", "quantise_rows"}
FOUR_BITS = {"nvfp4_nvfp4_linear", "nvfp4_nvfp4_gated", "quantise_rows_nvfp4"}


@pytest.fixture(autouse=True)
def short_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time by rows."""
    monkeypatch.setattr(cases, "PREFILL_CHUNK", 8)
    monkeypatch.setattr(cases, "EXPERT_ROWS", 8)
    monkeypatch.setattr(cases, "REACH", 64)


def network(folder: Path, scheme: str) -> DiffusionGemma:
    small = {"pattern": "sf", "canvas": 4}
    if scheme == "plain":
        write_tiny(folder, **small)
    else:
        write_quantised(folder, scheme, **small)
    return open_model(folder, torch.bfloat16)


@pytest.mark.parametrize(
    ("scheme", "wish", "more"),
    [
        ("plain", "", set()),
        ("fp8", "", FP8),
        ("fp8", "fp8-soft", FP8),
        ("nvfp4", "", {"nvfp4_linear", "nvfp4_gated"}),
        ("nvfp4", "nvfp4-rows fast-head", FOUR_BITS),
        ("modelopt", "nvfp4-rows", {"quantise_rows_nvfp4"}),
    ],
)
def test_all_are_right(scheme: str, wish: str, more: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGEMMA_OPS", wish)
    monkeypatch.setattr(ops, "gpu_of", lambda x: BLACKWELL)
    model = network(tmp_path, scheme)
    if "fp8-soft" in wish:
        assert isinstance(model.embed_tokens, torch.Tensor)
        model.embed_tokens = quantise_fp8(model.embed_tokens)
    found = selftest.run(model)
    assert [(each.name, each.what) for each in found if not each.ok] == []
    assert {each.name for each in found} == ALWAYS | more


def test_what_a_kernel_leaves_unwritten_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row fewer than there are: the launch is right in all it writes."""
    file = ops.KERNELS["rms_norm"]
    whole = file.launch

    def short(kernel: object, grid: tuple[int, ...], *args: object, **named: object) -> None:
        whole(kernel, (grid[0] - 1, *grid[1:]) if kernel is file._rms_norm else grid, *args, **named)

    monkeypatch.setattr(file, "launch", short)
    tried = [case for case in cases.cases_of(network(tmp_path, "plain")) if case.kernel in ("rms_norm", "sandwich")]
    make = Operands(torch.device("cpu"), torch.bfloat16)
    wrong, right = (selftest._outcome(name, list(each), make) for name, each in groupby(tried, lambda c: c.kernel))
    assert (wrong.name, wrong.ok) == ("rms_norm", False) and wrong.what.startswith("NaN in ")
    assert (right.name, right.ok) == ("sandwich", True)
