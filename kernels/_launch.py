"""How every kernel is launched: what the card is, which tile it gets, what the launch costs, and who may watch.

    wrapper ─ checks shapes ─ chooses a Tile for the Gpu ─ launch(kernel, grid, …) ─┬─► the card, or the interpreter
                                                                                    ├─► the same, by an observer's hand,
                                                                                    │   while watching(observer)
                                                                                    └─► a record, while recording(gpu)

While recording, wrappers run on meta tensors of any size: nothing is launched, and each launch is noted exactly as the
card would get it: kernel, grid, arguments, constants, warps, stages, bytes, flops. The compile suite compiles those, and
the predicted time of a step is their sum. It also makes "no host sync" a law: a meta tensor has no values to wait for.

While watching, launches are real, and the observer makes each one: before and behind it may record CUDA events.

Importing this module asks no driver anything; a card is asked once, at its first launch.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

Rate = Literal["bf16", "fp8", "fp4", "fp32"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a tile is chosen by."""

    capability: tuple[int, int]
    shared_bytes: int  # that one program may have
    processors: int


# for compiling and predicting without one; shared memory: CUDA programming guide, "technical specifications"
ADA = Gpu((8, 9), 101_376, 128)  # RTX 4090
HOPPER = Gpu((9, 0), 232_448, 132)  # H200
BLACKWELL = Gpu((12, 0), 101_376, 170)  # RTX 5090


@dataclass(frozen=True, slots=True)
class Tile:
    """The block of one program: m rows of the output, n columns, k of the sum at a time."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


Tiles = Mapping[tuple[int, int], Tile]  # by capability; data, measured or compiled for, never searched on a user's card
Choice = TypeVar("Choice")  # a tile, or several


@dataclass(frozen=True, slots=True)
class Cost:
    """What a launch must move to and from memory, and compute, at the least."""

    bytes: int
    flops: int = 0
    rate: Rate = "fp32"  # of the units that do the flops


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch as a card would get it. `args` are tensors and numbers in the kernel's order, constants by name."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: Mapping[str, Any]
    warps: int
    stages: int
    cost: Cost

    @property
    def name(self) -> str:
        return str(self.kernel.__name__).lstrip("_")


_recorder: tuple[Gpu, list[Launch]] | None = None


@contextmanager
def recording(gpu: Gpu) -> Iterator[list[Launch]]:
    """Launches nothing inside, and notes what would be launched on `gpu`."""
    global _recorder
    before, _recorder = _recorder, (gpu, [])
    try:
        yield _recorder[1]
    finally:
        _recorder = before


def is_recording() -> bool:
    return _recorder is not None


Observer = Callable[[Launch, Callable[[], None]], None]  # a launch, and what makes it: to be called once or more
_observer: Observer | None = None


@contextmanager
def watching(observer: Observer) -> Iterator[None]:
    """Hands every launch inside to `observer`, who makes it. A recording comes first: it launches nothing to watch."""
    global _observer
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before


def gpu_of(x: Tensor) -> Gpu:
    """The card that `x` is on; the recorded one while recording; under the interpreter the smallest there is."""
    if _recorder is not None:
        return _recorder[0]
    return _ask(x.device.index or 0) if x.is_cuda else ADA


@cache
def _ask(index: int) -> Gpu:
    facts = torch.cuda.get_device_properties(index)
    shared: int = facts.shared_memory_per_block_optin  # type: ignore[attr-defined]  # the stub lags torch
    return Gpu((facts.major, facts.minor), shared, facts.multi_processor_count)


def choose(tiles: Mapping[tuple[int, int], Choice], gpu: Gpu) -> Choice:
    """The tile of this capability; of an unlisted one, the newest older card's of no more shared memory."""
    if gpu.capability in tiles:
        return tiles[gpu.capability]
    room = {g.capability: g.shared_bytes for g in (ADA, HOPPER, BLACKWELL)}
    older = [c for c in tiles if c < gpu.capability and room.get(c, 0) <= gpu.shared_bytes]
    return tiles[max(older, default=min(tiles))]


def cdiv(a: int, b: int) -> int:
    """Programs of `b` each that cover `a`."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least one that is n or more."""
    return 1 << (n - 1).bit_length()


def contiguous(name: str, **tensors: Tensor | None) -> None:
    """Raises ValueError on the first that a kernel would read across its strides."""
    for what, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name}: {what} {tuple(tensor.shape)}, strides {tensor.stride()}, wanted contiguous")


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    cost: Callable[[], Cost],
    warps: int = 4,
    stages: int = 2,
    **constants: Any,
) -> None:
    """Launch `kernel` on `grid` with positional `args` and constexpr `constants`; `cost` is for those who look."""
    if _recorder is not None:
        _recorder[1].append(Launch(kernel, grid, args, constants, warps, stages, cost()))
    elif _observer is not None:
        noted = Launch(kernel, grid, args, constants, warps, stages, cost())
        _observer(noted, lambda: kernel[grid](*args, **constants, num_warps=warps, num_stages=stages))
    else:
        kernel[grid](*args, **constants, num_warps=warps, num_stages=stages)
