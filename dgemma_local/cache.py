"""The K/V of committed tokens, and room behind them for the rows a pass works on.

    sliding layers   …[ slack | last W-1 committed ][ rows of this pass ]
    full layers       [ all committed              ][ rows of this pass ]

A pass writes its rows behind the committed ones and attends over both in one contiguous view. An encoder pass then
calls `advance`, and they count; a denoising step does not, and the next pass overwrites them: committed entries are
never touched. W-1, not W: a row's window of W includes the row itself, and every canvas row sees the same W-1
committed tokens, as with transformers' DynamicSlidingWindowLayer.

The slack lets a conversation step back to the end of its last prompt (`crop`) without encoding it again.

Without a plan a slab grows by doubling. With one (`Room`) it is allocated once, and never again:

    full       context                                       the rows of a pass are part of it
    sliding    W-1 + max(rows, slack + canvas), or context   the room of a wide pass serves as slack between passes

A slack of one canvas is free wherever a prefill chunk is at least two canvases, as in the real model: the second turn
after an answer of one or two canvases finds its prompt in the cache. After a longer one whose thoughts the template
drops the conversation is read again, which costs a prefill and no memory. SLACK_CANVASES costs the real model 157 MB
more and spares that.
"""

import copy
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dgemma_local.config import Kind, ModelConfig

SLACK_CANVASES = 4  # the default answer, 1,024 tokens of the real model: 210 MB of its 25 sliding layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a cache is planned for, in tokens."""

    context: int  # prompt and answer, the canvas in work included: no pass goes beyond
    rows: int  # of the widest pass, a prefill chunk
    slack: int  # committed tokens to step back over


def slots(config: ModelConfig, kind: Kind, room: Room) -> int:
    """Tokens that a planned slab of this kind holds."""
    if kind == "full":
        return room.context
    behind = max(room.rows, room.slack + config.canvas_length)
    return min(room.context, config.sliding_window - 1 + behind)


def cache_bytes(config: ModelConfig, room: Room, element: int) -> int:
    """Bytes of a planned cache, keys and values of all layers; `element` bytes a number. Equals `Cache.bytes`."""
    return sum(
        2 * layer.kv_heads * layer.head_dim * slots(config, layer.kind, room) * element for layer in config.layers
    )


class Memory(Protocol):
    """What a layer asks: where do my rows' keys and values go, and what do their queries see?"""

    length: int  # committed tokens

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [..., KV, T, d] of this pass -> keys and values [..., KV, N + T, d] that its rows attend over."""
        ...

    def mask(self, kind: Kind, rows: int, causal: bool) -> Tensor | None:
        """What `rows` queries may see of those N + T, bool, True is seen; None: everything."""
        ...


@runtime_checkable
class SlabMemory(Memory, Protocol):
    """What the kernels ask: one fixed place for a layer's keys and values, and what of it a pass sees, on the device."""

    def span(self, kind: Kind, rows: int, causal: bool) -> Tensor:
        """Makes room for `rows` and says where: int32 [4] on the device, first slot, slot of row 0, rows, causal.

        Row r sits at slot at + r. Without `causal` it sees first … at + rows - 1, with it first … at + r, of a sliding
        layer the window before itself alone.
        """
        ...

    def slab(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [KV, capacity, d] of a layer, as they lie."""
        ...

    def reach(self, kind: Kind, rows: int) -> int:
        """Keys that a row of such a pass sees at the most."""
        ...


def causal_mask(seen: int, rows: int, window: int | None, device: torch.device) -> Tensor:
    """[rows, seen + rows] bool: row r sits at key seen + r and sees back to itself, `window` keys with itself if given."""
    visible = torch.ones(rows, seen + rows, dtype=torch.bool, device=device).tril_(seen)  # a byte a pair, and no more
    return visible if window is None else visible.triu_(seen + 1 - window)


class _Slab:
    """Keys and values of one layer, [KV, capacity, d] each; slot 0 holds position `base`."""

    def __init__(
        self, kv_heads: int, head_dim: int, keep: int | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.base = 0
        self.keep = keep  # committed tokens that must survive; None: all
        self.planned = False
        self.k = torch.empty(kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.v = torch.empty_like(self.k)

    def reserve(self, capacity: int, keep: int | None) -> None:
        if self.planned:
            if (self.k.shape[-2], self.keep) != (capacity, keep):
                raise ValueError(f"a cache planned for {self.k.shape[-2]} slots cannot be planned for {capacity}")
            return
        self.planned, self.keep = True, keep
        for name in ("k", "v"):
            old: Tensor = getattr(self, name)
            setattr(self, name, old.new_empty(old.shape[0], capacity, old.shape[2]))

    def make_room(self, length: int, rows: int) -> int:
        """Room for `rows` behind `length` tokens -> the slot where it begins."""
        if length - self.base + rows > self.k.shape[-2]:
            (self._shift if self.planned else self._grow)(length, rows)
        return length - self.base

    def write(self, length: int, k: Tensor, v: Tensor, context: int | None) -> tuple[Tensor, Tensor]:
        rows = k.shape[-2]
        end = self.make_room(length, rows)
        self.k[:, end : end + rows] = k
        self.v[:, end : end + rows] = v
        start = 0 if context is None else max(0, end - context)
        return self.k[:, start : end + rows], self.v[:, start : end + rows]

    def _shift(self, length: int, rows: int) -> None:
        """Move the latest committed tokens to the front, in place. Raises ValueError past the plan."""
        held, capacity = length - self.base, self.k.shape[-2]
        kept = min(held, capacity - rows)
        if kept < (held if self.keep is None else min(held, self.keep)):
            raise ValueError(f"a pass of {rows} rows behind {length} tokens is past the plan of {capacity} slots")
        for slab in (self.k, self.v):
            slab[:, :kept] = slab[:, held - kept : held].clone()  # the two overlap
        self.base = length - kept

    def _grow(self, length: int, rows: int) -> None:
        """Drop what no one may ask for any more; if that is not enough, double."""
        held = length - self.base
        kept = held if self.keep is None else min(held, self.keep)
        capacity = self.k.shape[-2]
        if kept + rows > capacity:
            capacity = max(2 * capacity, kept + rows) if self.keep is None else min(2 * capacity, self.keep) + rows
            capacity = max(capacity, kept + rows)
        for name in ("k", "v"):
            old: Tensor = getattr(self, name)
            new = old.new_empty(old.shape[0], capacity, old.shape[2])
            new[:, :kept] = old[:, held - kept : held]
            setattr(self, name, new)
        self.base = length - kept


class Cache:
    """K/V of one conversation on one device, batch 1."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.length = self.epoch = 0
        self.rows: int | None = None  # of the widest pass that is planned for
        self.config = config
        self.device = torch.device(device)
        self.window = config.sliding_window
        context = self.window - 1
        slack = SLACK_CANVASES * config.canvas_length
        self._context: list[int | None] = [context if layer.kind == "sliding" else None for layer in config.layers]
        self._slabs = [
            _Slab(layer.kv_heads, layer.head_dim, None if at is None else at + slack, dtype, self.device)
            for layer, at in zip(config.layers, self._context, strict=True)
        ]

    def reserve(self, room: Room) -> None:
        """Allocate all of it now, for good; what is planned alike stays. Raises ValueError on a cache that holds tokens."""
        if self.length:
            raise ValueError(f"a cache of {self.length} tokens cannot be planned any more")
        self.rows = room.rows
        for slab, layer, context in zip(self._slabs, self.config.layers, self._context, strict=True):
            slab.reserve(slots(self.config, layer.kind, room), context)

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self._slabs[layer].write(self.length, k, v, self._context[layer])

    def mask(self, kind: Kind, rows: int, causal: bool) -> Tensor | None:
        if not causal:
            return None  # the view `write` returned is exactly what a canvas row sees
        if kind == "full":
            return causal_mask(self.length, rows, None, self.device)
        return causal_mask(min(self.length, self.window - 1), rows, self.window, self.device)

    def behind(self, rows: int, more: int) -> "Cache":
        """The same memory as `more` rows find it whose pass has `rows` others before them, and room for both."""
        for slab in self._slabs:
            slab.make_room(self.length, rows + more)
        later = copy.copy(self)
        later.length += rows
        return later

    def span(self, kind: Kind, rows: int, causal: bool) -> Tensor:
        return torch.tensor([*self.place(kind, rows), rows, causal], dtype=torch.int32, device=self.device)

    def place(self, kind: Kind, rows: int) -> tuple[int, int]:
        """Makes room for `rows`: the first slot they see, and the one where they begin. No layer of the kind: 0, 0."""
        ends = {
            slab.make_room(self.length, rows)
            for slab, layer in zip(self._slabs, self.config.layers, strict=True)
            if layer.kind == kind
        }
        (at,) = ends or {0}  # layers of a kind are written together, so they stand alike
        return (0 if kind == "full" else max(0, at - (self.window - 1))), at

    def slab(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._slabs[layer].k, self._slabs[layer].v

    def reach(self, kind: Kind, rows: int) -> int:
        return (self.length if kind == "full" else min(self.length, self.window - 1)) + rows

    def advance(self, rows: int) -> None:
        """The rows of the encoder pass that just ended are committed."""
        self.length += rows

    def clear(self) -> None:
        """Forget everything, and keep what is allocated."""
        self.length = 0
        self.epoch += 1
        for slab in self._slabs:
            slab.base = 0

    def can_crop(self, length: int) -> bool:
        """Whether the last W-1 tokens before `length` are still held on every sliding layer."""
        oldest = max(0, length - (self.window - 1))
        return 0 <= length <= self.length and all(slab.base <= oldest for slab in self._slabs)

    def crop(self, length: int) -> None:
        """Forget everything from `length` on. Raises ValueError where `can_crop` says no."""
        if not self.can_crop(length):
            raise ValueError(f"cannot crop a cache of {self.length} tokens to {length}: its window is no longer held")
        self.length = length

    @property
    def bytes(self) -> int:
        """Allocated bytes, keys and values of all layers."""
        return sum(2 * slab.k.numel() * slab.k.element_size() for slab in self._slabs)
