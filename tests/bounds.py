"""A guard on the interpreter's memory: every active lane of a load, store or atomic lies inside a tensor of the launch.

Inside means between the first and the last element of an argument as it was passed: a kernel that is given a slice may
not reach into its neighbour, though the storage goes on there. Torch's allocator would let both pass in silence.

It is a guard on order, too: programs of a launch run in parallel on a card, so that none may read or overwrite what
another one stored, unless an atomic of its own stands between (the last program of a count may read what all wrote).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

Array = np.ndarray[Any, Any]


class OutOfBounds(IndexError):
    """A lane reached outside of every tensor of its launch."""


class Race(RuntimeError):
    """Two programs of one launch touched the same element, and one of them wrote."""


class _Region:
    """One argument's memory; `writer` has the program that stored each byte, −1 for none, and begins with the first store."""

    def __init__(self, tensor: torch.Tensor) -> None:
        reach = sum((n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        self.first = tensor.data_ptr()
        self.end = self.first + (0 if tensor.numel() == 0 else (reach + 1) * tensor.element_size())
        self.writer: Array | None = None


class _Launch:
    def __init__(self, tensors: Iterator[torch.Tensor]) -> None:
        regions = {(r.first, r.end): r for r in map(_Region, tensors)}
        self.regions = list(regions.values())
        self.synchronised: set[int] = set()


_launch: _Launch | None = None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif isinstance(getattr(value, "base", None), torch.Tensor):  # a tensor descriptor
        yield value.base


def _program() -> int:
    x, y, z = interpreter.interpreter_builder.grid_idx
    _, height, depth = interpreter.interpreter_builder.grid_dim
    return int((x * height + y) * depth + z)


def _check(pointers: Any, mask: Any, what: str) -> None:
    if _launch is None:
        return
    size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
    active = (
        pointers.data if mask is None else pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
    )
    lanes = active.reshape(-1).astype(np.int64)
    if lanes.size == 0:
        return
    inside = np.zeros(lanes.shape, bool)
    program = _program()
    for region in _launch.regions:
        here = (lanes >= region.first) & (lanes + size <= region.end)
        if here.any():
            inside |= here
            _order(region, lanes[here] - region.first, size, program, what)
    if not inside.all():
        stray = int(lanes[~inside][0])
        near = min(_launch.regions, key=lambda r: max(r.first - stray, stray - r.end, 0), default=None)
        where = (
            ""
            if near is None
            else f"; the first, {(stray - near.first) // size} elements past the start of a tensor of "
        )
        where += "" if near is None else f"{(near.end - near.first) // size}"
        raise OutOfBounds(f"{what}: {int((~inside).sum())} of {lanes.size} active lanes out of bounds{where}")


def _order(region: _Region, offsets: Array, size: int, program: int, what: str) -> None:
    assert _launch is not None
    if what == "store" and region.writer is None:
        region.writer = np.full(region.end - region.first, -1, np.int64)
    if region.writer is None or what == "atomic":
        return
    before = region.writer[offsets]
    if program not in _launch.synchronised and ((before != program) & (before >= 0)).any():
        other = int(before[(before != program) & (before >= 0)][0])
        raise Race(f"{what}: program {program} touches what program {other} of the same launch stored")
    if what == "store":
        region.writer[offsets[:, None] + np.arange(size)] = program


def install() -> None:
    """Put the guard in, for the rest of the process; after interpreter.install()."""
    if getattr(InterpreterBuilder, "guarded", False):
        return
    builder, call = InterpreterBuilder, GridExecutor.__call__
    load, store = builder.create_masked_load, builder.create_masked_store
    rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas

    def guarded_call(self: Any, *args: Any, **kwargs: Any) -> None:
        global _launch
        before, _launch = _launch, _Launch(_tensors([*args, *kwargs.values()]))
        try:
            call(self, *args, **kwargs)
        finally:
            _launch = before

    def guarded_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        _check(pointers, mask, "load")
        return load(self, pointers, mask, *rest)

    def guarded_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check(pointers, mask, "store")
        return store(self, pointers, value, mask, *rest)

    def guarded_rmw(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check(pointers, mask, "atomic")
        _synchronise()
        return rmw(self, operation, pointers, value, mask, *rest)

    def guarded_cas(self: Any, pointers: Any, *rest: Any) -> Any:
        _check(pointers, None, "atomic")
        _synchronise()
        return cas(self, pointers, *rest)

    builder.create_masked_load, builder.create_masked_store = guarded_load, guarded_store
    builder.create_atomic_rmw, builder.create_atomic_cas = guarded_rmw, guarded_cas
    GridExecutor.__call__ = guarded_call
    builder.guarded = True


def _synchronise() -> None:
    if _launch is not None:
        _launch.synchronised.add(_program())
