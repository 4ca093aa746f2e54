"""Whether a kernel's outcome is its twin's: near enough, equal almost everywhere, and never NaN.

A step is the distance between neighbouring numbers of the output's type, measured at max(|twin|, rms(twin)): an element
that cancelled carries its terms' error, not its own size's. Numbers without a step (ids, counts, marks) are equal or not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """How far an outcome may be from its twin's."""

    steps: float = 2.0  # of the output's type, every element
    equal: float = 0.99  # share of the elements that are the twin's, bit for bit; 1.0: all


NEAR = Bar()
SAME = Bar(0.0, 1.0)


def tensors_of(*made: Any) -> Outputs:
    """The tensors of what a wrapper returns, in order: itself, or those of tuples and dataclasses within it."""
    found: list[Tensor] = []
    for one in made:
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, tuple | list):
            found += tensors_of(*one)
        elif is_dataclass(one):
            found += tensors_of(*(getattr(one, field.name) for field in fields(one)))
    return tuple(found)


def apart(ours: Outputs, twin: Outputs, bars: Sequence[Bar]) -> str | None:
    """What is wrong with `ours`, in a few words; None: nothing. One bar for each tensor, or one for all."""
    if len(ours) != len(twin):
        return f"{len(ours)} tensors, its twin {len(twin)}"
    each = bars if len(bars) > 1 else [*bars] * len(ours)
    return next((wrong for one in zip(ours, twin, each, strict=True) if (wrong := _apart(*one))), None)


def _apart(ours: Tensor, twin: Tensor, bar: Bar) -> str | None:
    if (ours.shape, ours.dtype) != (twin.shape, twin.dtype):
        return f"{tuple(ours.shape)} {_name(ours)}, its twin {tuple(twin.shape)} {_name(twin)}"
    if not ours.dtype.is_floating_point:
        return _unequal(ours == twin, bar)
    x, y = (t.to(_wide(t.dtype)) for t in (ours, twin))
    if bool(x.isnan().any()):
        return f"NaN in {int(x.isnan().sum())} of {x.numel()} numbers"
    same, both = x == y, x.isfinite() & y.isfinite()
    if not bool((same | both).all()):
        return f"{int((~(same | both)).sum())} of {x.numel()} numbers are not finite, or not where its twin's are not"
    off = torch.where(same, 0.0, (x - y).abs() / step_at(y, ours.dtype))
    worst = float(off.max()) if off.numel() else 0.0
    if worst > bar.steps:
        return f"{worst:.3g} steps of {_name(ours)} from its twin, in {int((off > bar.steps).sum())} of {x.numel()} numbers"
    return _unequal(same, bar)


def _unequal(same: Tensor, bar: Bar) -> str | None:
    wrong, count = int((~same).sum()), same.numel()
    few = 0 if bar.equal == 1 else max(1, int((1 - bar.equal) * count))  # one element of a tiny tensor is no fraction
    return f"{wrong} of {count} numbers differ from its twin's" if wrong > few else None


def step_at(reference: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of neighbours of `dtype` around max(|reference|, rms(reference)), elementwise, in a wider dtype."""
    finite = reference.to(_wide(dtype)).nan_to_num(0.0, 0.0, 0.0)
    size = finite.abs().clamp_min(float(finite.square().mean().sqrt()) if finite.numel() else 0.0)
    facts = torch.finfo(dtype)
    exponent = size.clamp_(facts.smallest_normal, facts.max).frexp().exponent - 1
    return torch.ldexp(torch.full_like(size, facts.eps), exponent)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What holds its numbers and their differences."""
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def _name(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")
