"""Prompt in, events out: prefill, denoise a canvas, commit it, denoise the next.

    Prefilled ─► StepDone … StepDone ─► CanvasCommitted ─► (the canvas joins the cache) ─► StepDone … ─► Finished
                     └─► Retried, once: a first canvas with nothing for a reader begins anew, its ends banned

The engine asks a Protocol, not a class. A canvas joins the cache only when another one follows, so after an answer the
cache holds the prompt and all canvases but the last, as the reference leaves it. A model may read so many tokens in one
pass with the first step of the canvas behind them (`joins`); the others it encodes before.

Memory: right after a step its logits, 268 MB of the real model, become the signal that the next step is conditioned on,
and are dropped: no two steps' logits are ever alive together. A cache is dropped before the next one is made.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from dgemma_local import sampler
from dgemma_local.cache import Room
from dgemma_local.config import GenerationConfig
from dgemma_local.errors import NumericalError, PromptError
from dgemma_local.events import CanvasCommitted, Event, Finished, FinishReason, Prefilled, Retried, StepDone
from dgemma_local.noise import Noise


class Croppable(Protocol):
    """What the engine asks of a cache."""

    length: int  # committed tokens
    epoch: int  # raised whenever all of them are forgotten

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

    @property
    def mode(self) -> str:
        """How passes are run, for reports."""
        ...

    @property
    def room(self) -> Room | None:
        """What its memory is planned for already."""
        ...

    def new_cache(self) -> CacheT: ...

    def encode(self, ids: Tensor, cache: CacheT) -> None:
        """ids [T] int64, on the host, join the cache."""
        ...

    @property
    def joins(self) -> int:
        """At most so many tokens join the cache with a canvas's first step."""
        ...

    def denoising(
        self,
        ids: Sequence[int],
        number: int,
        cache: CacheT,
        config: GenerationConfig,
        noise: Noise,
        rules: sampler.Rules = sampler.FREE,
    ) -> Iterator[sampler.Canvas]:
        """ids, at most `joins`, join the cache with the first step; the states behind each step of canvas `number`.

        The last one is done. Whoever reads them may stop before, and leaves committed tokens as they are.
        """
        ...

    def first_bad_layer(self, canvas: Tensor, cache: CacheT, signal: Tensor | None) -> str:
        """Where such a step first went NaN or infinite."""
        ...


def never(_: Sequence[int]) -> int | None:
    """No stop string; no token that a canvas is to begin with."""
    return None


def spoken(_: Sequence[int]) -> bool:
    """No answer is blank."""
    return False


class Conversation(Generic[CacheT]):
    """One model and the tokens its cache holds; turn after turn reuses their common prefix."""

    def __init__(self, model: BlockDiffusion[CacheT], room: Room | None = None) -> None:
        """`room`: the context that memory is planned for; without one the cache grows up to the model's context."""
        self.model, self.room = model, model.room if room is None else room
        self.context = model.max_positions if self.room is None else min(self.room.context, model.max_positions)
        self._start_over()

    def _start_over(self) -> None:
        """An empty cache; the old one goes first, there may be room for one alone."""
        self.held: list[int] = []  # tokens in the cache, in order
        vars(self).pop("cache", None)
        self.cache = self.model.new_cache()
        if self.room is not None:
            self.cache.reserve(self.room)
        self._epoch = self.cache.epoch

    def answer(
        self,
        prompt: Sequence[int],
        config: GenerationConfig,
        noise: Noise,
        max_tokens: int,
        *,
        stop: Callable[[Sequence[int]], int | None] = never,
        rest: Callable[[], str] = str,
        first: Callable[[Sequence[int]], int | None] = never,
        blank: Callable[[Sequence[int]], bool] = spoken,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Iterator[Event]:
        """Answer `prompt`, at most `max_tokens` tokens, whatever the canvas length.

        `stop` gets the answer so far and says how many of its tokens come before a stop string; `rest` says
        then what text of the next token does, too. `first` gets the answer before each canvas, and says which token that
        one is to begin with. `blank` gets what an end token leaves of the first canvas: where that is nothing for a
        reader, the canvas begins anew, once, with other noise, and end tokens are not allowed up to where its end stood.
        `interrupted` is asked between steps. Raises PromptError when prompt and one canvas exceed the context,
        NumericalError on NaN.
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
        rules = _pinned(first(answer))
        try:
            reused = self._reuse(prompt)
            joining = self._encode(prompt[reused:])
            yield Prefilled(tokens=len(prompt), reused=reused, joining=len(joining))
            while True:
                canvas: sampler.Canvas | None = None
                states = self.model.denoising(joining, number, self.cache, config, noise, rules)
                while (canvas is None or not canvas.done) and not interrupted():
                    canvas, event = self._step(states, canvas, config)
                    self.held.extend(joining)
                    joining = []
                    steps += 1
                    yield event
                if canvas is None or not canvas.done:
                    break
                block: list[int] = canvas.next.tolist()
                kept, ended = _cut(answer, block, config.end_ids, max_tokens, stop)
                if ended == "end" and not number and not rules.banned and blank(block[:kept]):
                    rules = replace(rules, banned=tuple(config.end_ids), below=kept + 1)
                    noise = noise.again()
                    yield Retried(canvas=number, reason="empty", steps=canvas.step)
                    continue
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
                joining, rules = self._encode(block), _pinned(first(answer))
        except KeyboardInterrupt:
            reason, struck = "interrupted", True
        if struck:  # maybe between a layer's keys and its values. Only here: its traceback had held the old cache
            self._start_over()
        yield Finished(
            reason=reason,
            tokens=tuple(answer),
            canvases=number,
            steps=steps,
            rest=rest() if reason == "stop" else "",
        )

    def _reuse(self, prompt: Sequence[int]) -> int:
        """Crop the cache to what it shares with `prompt`; if its window is no longer held, start over."""
        if "cache" not in vars(self) or self.cache.epoch != self._epoch:  # a start that was stopped, another's memory
            self._start_over()
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

    def _encode(self, ids: Sequence[int]) -> Sequence[int]:
        """The ids that are left to join with a canvas's first step."""
        alone = max(0, len(ids) - self.model.joins)
        if alone:
            self.model.encode(torch.tensor(ids[:alone]), self.cache)
            self.held.extend(ids[:alone])
        return ids[alone:]

    def _step(
        self, states: Iterator[sampler.Canvas], before: sampler.Canvas | None, config: GenerationConfig
    ) -> tuple[sampler.Canvas, StepDone]:
        after = next(states)
        assert after.fed is not None and after.draft is not None
        assert after.accepted is not None and after.entropy is not None
        entropy: list[float] = after.entropy.tolist()
        if not math.isfinite(math.fsum(entropy)):
            where = self.model.first_bad_layer(after.fed, self.cache, None if before is None else before.signal)
            raise NumericalError(
                f"canvas {after.number + 1}, step {after.step}: not a number, first in {where}",
                "check the checkpoint's files (`--dtype float32` tells a rounding overflow from damaged weights)",
            )
        event = StepDone(
            canvas=after.number,
            step=after.step - 1,
            steps=config.steps,
            temperature=after.temperature,
            fed=tuple(after.fed.tolist()),
            draft=tuple(after.draft.tolist()),
            accepted=tuple(after.accepted.tolist()),
            next=tuple(after.next.tolist()),
            entropy=tuple(entropy),
            done=after.done,
            pinned=after.rules.positions,
        )
        return after, event


def _pinned(token: int | None) -> sampler.Rules:
    """For a canvas that is to begin with this token."""
    return sampler.FREE if token is None else sampler.Rules(pinned=((0, token),))


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
