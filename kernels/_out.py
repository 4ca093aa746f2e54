"""Where a kernel writes what it returns: into new memory, or into the caller's `out`, as a captured graph wants it."""

from collections.abc import Sequence

import torch
from torch import Tensor


def target(name: str, out: Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`out`, or a new tensor. Raises ValueError where `out` is not contiguous, of this shape and dtype, on this device."""
    if out is None:
        return torch.empty(*shape, dtype=dtype, device=device)
    if (tuple(out.shape), out.dtype, out.device) != (tuple(shape), dtype, device) or not out.is_contiguous():
        raise ValueError(
            f"{name}: out {tuple(out.shape)} {out.dtype} on {out.device}, strides {out.stride()}, "
            f"wanted {tuple(shape)} {dtype} on {device}, contiguous"
        )
    return out


def filled(name: str, out: Tensor | None, made: Tensor) -> Tensor:
    """What a twin made, copied into `out` where there is one."""
    return made if out is None else target(name, out, made.shape, made.dtype, made.device).copy_(made)
