"""What a trial of a kernel is: operands ready on the device, and the question how two outcomes on them differ."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dgemma_local import ops
from dgemma_local.quant import Fp8, Nvfp4
from dgemma_local.selftest.compare import Bar, Outputs, apart
from dgemma_local.selftest.operands import Operands

Kernel = Callable[..., Any]
ELSEWHERE = 77.0  # what lies where a pass has no business


@dataclass(frozen=True, slots=True)
class Trial:
    """A kernel's operands, ready on the device: `call` runs it or its twin on them, `wrong` says how the two differ."""

    call: Callable[[Kernel], Outputs]
    wrong: Callable[[Outputs, Outputs], str | None]
    truth: Callable[[Kernel], Outputs] | None = None  # how the twin is called, where not like the kernel


@dataclass(frozen=True, slots=True)
class Case:
    """One trial, not yet prepared: whatever needs memory is made when its turn comes, and let go after it."""

    kernel: str  # in ops.KERNELS
    what: str  # what it is tried on; no two of a kernel are alike
    prepare: Callable[[Operands], Trial]


@dataclass(frozen=True, slots=True)
class Target:
    """Rows of a larger tensor that a kernel is to write, as a captured pass has them: `out=` of the model's calls."""

    whole: Tensor  # [3·T, width]; the middle is the kernel's

    @classmethod
    def of(cls, make: Operands, T: int, width: int) -> "Target":
        return cls(torch.full((3 * T, width), ELSEWHERE, dtype=make.dtype, device=make.device))

    @property
    def rows(self) -> Tensor:
        return self.whole.chunk(3)[1]

    def outcome(self) -> Outputs:
        """The rows, and whether what lies around them is as it was."""
        before, own, behind = self.whole.chunk(3)
        return own, (torch.cat([before, behind]) == ELSEWHERE).all()


def by(*bars: Bar) -> Callable[[Outputs, Outputs], str | None]:
    """Held to these bars, one for each tensor, or one for all."""
    return lambda ours, twin: apart(ours, twin, bars)


def in_form(x: Tensor, rows: str, make: Operands) -> Tensor | Fp8 | Nvfp4:
    """x [T, D] as `rows` says: "plain", "fp8", "nvfp4". By the twins: a kernel that quantises wrongly spoils no other's trial."""
    twins = ops.KERNELS["quantise_rows"]
    if rows == "fp8":
        made: Fp8 = twins.quantise_rows_twin(x)
        return made
    if rows == "nvfp4":
        packed: Nvfp4 = twins.quantise_rows_nvfp4_twin(x, make.numbers(700.0))
        return packed
    return x
