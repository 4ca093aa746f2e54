"""Prompt in, events out: prefill, denoise a canvas, commit it, denoise the next.

    Prefilled ─► StepDone … StepDone ─► CanvasCommitted ─► (encode the canvas) ─► StepDone … ─► Finished

The engine asks a Protocol, not a class. A canvas is encoded only when another one follows, so after an answer the
cache holds the prompt and all canvases but the last, as the reference leaves it.

Memory: right after a step its logits, 268 MB of the real model, become the signal that the next step is conditioned on,
and are dropped: no two steps' logits are ever alive together. A cache is dropped before the next one is made.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from dgemma_local import sampler
from dgemma_local.cache import Room
from dgemma_local.config import GenerationConfig
from dgemma_local.errors import NumericalError, PromptError
from dgemma_local.events import CanvasCommitted, Event, Finished, FinishReason, Prefilled, StepDone
from dgemma_local.noise import Noise


class Croppable(Protocol):
    """What the engine asks of a cache."""

    length: int  # committed tokens

    def can_crop(self, length: int) -> bool: ...

    def crop(self, length: int) -> None: ...

    def reserve(self, room: Room) -> None:
        """Allocate all that `room` says; asked of an empty cache, and only where memory is planned."""
        ...


CacheT = TypeVar("CacheT", bound=Croppable)


class BlockDiffusion(Protocol[CacheT]):
    """What the engine asks of a model, DiffusionGemma or another block-diffusion one; L canvas, V vocabulary."""

    canvas_length: int
    max_positions: int
    device: torch.device

    def new_cache(self) -> CacheT: ...

    def encode(self, ids: Tensor, cache: CacheT) -> None:
        """ids [T] int64 join the cache."""
        ...

    def advance(self, canvas: sampler.Canvas, cache: CacheT, config: GenerationConfig, noise: Noise) -> sampler.Canvas:
        """One denoising step; `sampler.step` is that of a model that shows its logits. They are not kept."""
        ...

    def first_bad_layer(self, canvas: Tensor, cache: CacheT, signal: Tensor | None) -> str:
        """Where such a step first went NaN or infinite."""
        ...


def never(_: Sequence[int]) -> int | None:
    """No stop string."""
    return None


class Conversation(Generic[CacheT]):
    """One model and the tokens its cache holds; turn after turn reuses their common prefix."""

    def __init__(self, model: BlockDiffusion[CacheT], room: Room | None = None) -> None:
        """`room`: the context that memory is planned for; without one the cache grows up to the model's context."""
        self.model, self.room = model, room
        self.context = model.max_positions if room is None else min(room.context, model.max_positions)
        self._start_over()

    def _start_over(self) -> None:
        """An empty cache; the old one goes first, there may be room for one alone."""
        self.held: list[int] = []  # tokens in the cache, in order
        vars(self).pop("cache", None)
        self.cache = self.model.new_cache()
        if self.room is not None:
            self.cache.reserve(self.room)

    def answer(
        self,
        prompt: Sequence[int],
        config: GenerationConfig,
        noise: Noise,
        max_tokens: int,
        *,
        stop: Callable[[Sequence[int]], int | None] = never,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Iterator[Event]:
        """Answer `prompt`, at most `max_tokens` tokens, whatever the canvas length.

        `stop` gets the answer so far and says how many of its tokens come before a stop string. `interrupted` is asked
        between steps. Raises PromptError when prompt and one canvas exceed the context, NumericalError on NaN.
        """
        L, room, most = self.model.canvas_length, self.context, self.model.max_positions
        if len(prompt) + L > room:
            raise PromptError(
                f"the prompt has {len(prompt):,} tokens, and with a canvas of {L} the context of {room:,} is exceeded",
                f"shorten it to {max(0, room - L):,} tokens"
                + (f", or plan for a longer context, up to {most:,} (--context)" if room < most else ""),
            )
        answer: list[int] = []
        number = steps = 0
        reason: FinishReason = "interrupted"
        struck = False
        try:
            reused = self._reuse(prompt)
            self._encode(prompt[reused:])
            yield Prefilled(tokens=len(prompt), reused=reused)
            while True:
                canvas = sampler.begin(number, noise)
                while not canvas.done and not interrupted():
                    canvas, event = self._step(canvas, config, noise)
                    steps += 1
                    yield event
                if not canvas.done:
                    break
                block: list[int] = canvas.next.tolist()
                kept, ended = _cut(answer, block, config.end_ids, max_tokens, stop)
                answer = [*answer, *block][:kept]
                before = number * L
                yield CanvasCommitted(
                    canvas=number,
                    tokens=tuple(block),
                    kept=max(0, kept - before),
                    steps=canvas.step,
                    converged=canvas.converged,
                )
                number += 1
                if ended is None and len(prompt) + (number + 1) * L > room:
                    ended = "context"
                if ended is not None:
                    reason = ended
                    break
                if interrupted():
                    break
                self._encode(block)
        except KeyboardInterrupt:
            reason, struck = "interrupted", True
        if struck:  # maybe between a layer's keys and its values. Only here: its traceback had held the old cache
            self._start_over()
        yield Finished(reason=reason, tokens=tuple(answer), canvases=number, steps=steps)

    def _reuse(self, prompt: Sequence[int]) -> int:
        """Crop the cache to what it shares with `prompt`; if its window is no longer held, start over."""
        shared = 0
        for ours, theirs in zip(self.held, prompt, strict=False):
            if ours != theirs:
                break
            shared += 1
        if not self.cache.can_crop(shared):
            shared = 0
        if shared:
            self.cache.crop(shared)
            self.held = self.held[:shared]
        elif self.cache.length:
            self._start_over()
        return shared

    def _encode(self, ids: Sequence[int]) -> None:
        if ids:
            self.model.encode(torch.tensor(ids, device=self.model.device), self.cache)
            self.held.extend(ids)

    def _step(self, before: sampler.Canvas, config: GenerationConfig, noise: Noise) -> tuple[sampler.Canvas, StepDone]:
        after = self.model.advance(before, self.cache, config, noise)
        assert after.draft is not None and after.accepted is not None and after.entropy is not None
        entropy: list[float] = after.entropy.tolist()
        if not math.isfinite(math.fsum(entropy)):
            where = self.model.first_bad_layer(before.next, self.cache, before.signal)
            raise NumericalError(
                f"canvas {before.number}, step {before.step}: not a number, first in {where}",
                "check the checkpoint's files (`--dtype float32` tells a rounding overflow from damaged weights)",
            )
        event = StepDone(
            canvas=before.number,
            step=before.step,
            steps=config.steps,
            temperature=after.temperature,
            fed=tuple(before.next.tolist()),
            draft=tuple(after.draft.tolist()),
            accepted=tuple(after.accepted.tolist()),
            next=tuple(after.next.tolist()),
            entropy=tuple(entropy),
            done=after.done,
        )
        return after, event


def _cut(
    answer: Sequence[int],
    block: Sequence[int],
    end_ids: Sequence[int],
    max_tokens: int,
    stop: Callable[[Sequence[int]], int | None],
) -> tuple[int, FinishReason | None]:
    """How many tokens of answer + block count, and why it ends here, if it does: whatever comes first."""
    whole = [*answer, *block]
    ended: FinishReason | None = None
    kept = next((i for i, token in enumerate(whole) if token in end_ids), None)
    if kept is not None:
        ended = "end"
    else:
        kept = len(whole)
    if max_tokens < kept or (ended is None and max_tokens == kept):
        kept, ended = max_tokens, "budget"
    at = stop(whole[:kept])
    if at is not None:
        kept, ended = at, "stop"
    return kept, ended
