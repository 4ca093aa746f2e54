"""How many bytes of tensors are alive, at most, while some code runs; on a CPU, where torch does not say.

    with LiveBytes() as live:
        model.encode(prompt, cache)
    live.peak, live.now

Every operation's results pass through a TorchDispatchMode. A storage counts once, when an operation first returns it,
and stops counting when it is freed; views share their storage and count nothing. What existed before counts nothing
either, and neither does what an operation allocates and frees inside: sdpa's and GEMMs' scratch, which differs from
device to device. A composite operation is taken apart first, since its parts' results are tensors like any other.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`now`: bytes of the storages made since it was entered that are still alive. `peak`: the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.at_peak = ""  # the operation that reached it
        self._seen: set[int] = set()  # of storages that are alive

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given: set[int] = set()
        if func is not torch.ops.aten.lift_fresh.default:  # torch.tensor(…): its data is new, and comes as an argument
            given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        with self:
            out = func.decompose(*args, **kwargs)  # type: ignore[attr-defined]
        if out is NotImplemented:
            out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage(), given, str(func))
        return out

    def _count(self, storage: torch.UntypedStorage, given: set[int], by: str) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in given or key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, by
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size

    def restart(self) -> None:
        """The peak counts from what is alive now."""
        self.peak = self.now
