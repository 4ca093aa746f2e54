"""The kernel tests' process: triton interprets, rightly (interpreter.py) and under guard (bounds.py); fresh memory is NaN.

These tests run apart from the others, for an interpreting process cannot compile:
`TRITON_INTERPRET=1 pytest tests/kernels`, or all suites by `pytest` (tests/unit/test_kernel_suites.py starts this one).
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError(
        "triton is imported already and compiles: run these tests alone, TRITON_INTERPRET=1 pytest tests/kernels"
    )
os.environ["TRITON_INTERPRET"] = "1"

import bounds
import interpreter

interpreter.install()
bounds.install()
torch.set_num_threads(1)


def _poison(made: torch.Tensor) -> torch.Tensor:
    if made.is_meta or made.numel() == 0:
        return made
    if made.dtype.is_floating_point:
        return made.fill_(torch.nan)
    if made.dtype in (torch.uint8, torch.int8):
        return made.fill_(0x7F)  # as e4m3 a NaN
    if made.dtype == torch.bool:
        return made.fill_(True)
    return made.fill_(interpreter.WILD & torch.iinfo(made.dtype).max)


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        return _poison(make(*args, **kwargs))

    return made


@pytest.fixture(autouse=True)
def nan_in_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody wrote is NaN, or an integer far out of every bound."""
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, _poisoned(getattr(torch.Tensor, name)))
