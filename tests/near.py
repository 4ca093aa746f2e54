"""Three questions a kernel answers: near its twin, equal almost everywhere, no farther from fp64 than eager is.

A step is the distance between neighbouring numbers of the output's type, measured at max(|ref|, rms(ref)): an element
that cancelled carries its terms' error, not its own size's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def assert_near(ours: Tensor, twin: Tensor, steps: float = 2, equal: float = 0.99) -> None:
    """Same shape and type, NaN and infinities in the same places, ≤ `steps` off, `equal` of the elements identical."""
    _assert_same_form(ours, twin)
    if not ours.dtype.is_floating_point:
        _assert_equal(ours, twin)
        return
    x, y = ours.double(), twin.double()
    same = (x == y) | (x.isnan() & y.isnan())
    both = x.isfinite() & y.isfinite()
    if not (same | both).all():
        raise AssertionError(f"not finite where the twin is, or the reverse: {_first(~(same | both), ours, twin)}")
    off = torch.where(same, 0.0, (x - y).abs() / step_at(y, ours.dtype))
    worst = float(off.max()) if off.numel() else 0.0
    if worst > steps:
        at = _index(off.argmax(), off)
        raise AssertionError(
            f"{worst:.3g} steps of {ours.dtype} off at {at}: {float(ours[at].float()):.9g}, twin {float(twin[at].float()):.9g}"
            f" ({int((off > steps).sum())} of {off.numel()} beyond {steps} steps)"
        )
    unequal = int((~same).sum())
    if unequal > max(1, int((1 - equal) * same.numel())):  # one element of a tiny tensor is no fraction
        at = _index(off.argmax(), off)
        raise AssertionError(
            f"{1 - unequal / same.numel():.2%} equal, {equal:.0%} wanted; the worst, {worst:.3g} steps, at {at}: "
            f"{float(ours[at].float()):.9g}, twin {float(twin[at].float()):.9g}"
        )


def assert_no_worse(ours: Tensor, eager: Tensor, truth: Tensor, ratio: float = 1.05) -> None:
    """‖ours − fp64‖ ≤ ratio · ‖eager − fp64‖, and a hundredth of a step more, for an eager that is exact by chance."""
    _assert_same_form(ours, eager)
    exact = truth.double()
    our_error, eager_error = (ours.double() - exact).norm(), (eager.double() - exact).norm()
    tiny = torch.finfo(ours.dtype).eps / 100 * exact.norm()
    if not our_error <= ratio * eager_error + tiny:
        off = (ours.double() - exact).abs()
        at = _index(off.argmax(), off)
        raise AssertionError(
            f"{float(our_error):.4g} from fp64, eager {float(eager_error):.4g} (ratio {float(our_error / eager_error):.3f}, "
            f"{ratio} allowed); the worst at {at}: {float(ours[at].float()):.9g}, eager {float(eager[at].float()):.9g}, "
            f"fp64 {float(exact[at]):.9g}"
        )


def step_at(reference: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of neighbours of `dtype` around max(|reference|, rms(reference)), elementwise, fp64."""
    finite = reference.double().nan_to_num(0.0, 0.0, 0.0)
    size = finite.abs().clamp_min(float(finite.square().mean().sqrt()) if finite.numel() else 0.0)
    facts = torch.finfo(dtype)
    size = size.clamp(facts.smallest_normal, facts.max)
    return torch.exp2(torch.floor(torch.log2(size))) * facts.eps


def _assert_same_form(ours: Tensor, twin: Tensor) -> None:
    if (ours.shape, ours.dtype) != (twin.shape, twin.dtype):
        raise AssertionError(f"{tuple(ours.shape)} {ours.dtype}, twin {tuple(twin.shape)} {twin.dtype}")


def _assert_equal(ours: Tensor, twin: Tensor) -> None:
    if not torch.equal(ours, twin):
        raise AssertionError(
            f"{int((ours != twin).sum())} of {ours.numel()} differ: {_first(ours != twin, ours, twin)}"
        )


def _first(where: Tensor, ours: Tensor, twin: Tensor) -> str:
    at = _index(where.int().argmax(), where)
    return f"first at {at}: {ours[at].item()}, twin {twin[at].item()}"


def _index(flat: Tensor, of: Tensor) -> Sequence[int]:
    return tuple(int(i) for i in torch.unravel_index(flat, of.shape))
