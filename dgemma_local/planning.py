"""One run, planned before anything is loaded: how its weights are held, what it takes beside them, whether that fits.

    headers ─► layout.plan ─► fit.estimate ─► budget: --vram, else the card's free memory, else RAM ─► verdict

A checkpoint that has not been fetched is planned from its headers alone (`hub.remote_checkpoint`).
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from dgemma_local import ops
from dgemma_local.card import Card, cards, host_memory
from dgemma_local.checkpoint import Checkpoint
from dgemma_local.config import ModelConfig
from dgemma_local.errors import UsageError
from dgemma_local.fit import Estimate, Verdict, budget, estimate, held_by, verdict
from dgemma_local.layout import Options, Plan, plan
from dgemma_local.schemes import scheme_of

DEFAULT_CONTEXT = 8192  # tokens of prompt and answer, where neither the user nor the model says less

Device = Literal["cuda", "cpu"]


@dataclass(frozen=True, slots=True)
class Planned:
    """Where the weights go, what the run takes, and what is said of it. No verdict where nothing is known of the device."""

    layout: Plan
    estimate: Estimate
    verdict: Verdict | None

    @property
    def agreed(self) -> Estimate | None:
        """What may be allocated: as asked where nothing is known, None where nothing fits."""
        return self.estimate if self.verdict is None else self.verdict.plan


def plan_run(
    checkpoint: Checkpoint,
    config: ModelConfig,
    options: Options,
    *,
    device: Device,
    context: int | None = None,
    vram: float | None = None,
    card: Card | None = None,
) -> Planned:
    """`context` None: DEFAULT_CONTEXT, or all that the model has. `vram` in GB; without it, what is free now.

    `card` is the one to plan for; None: the first. `context` may be `AtMost`: then it is shortened to what the model has.

    Raises UsageError on a context that the model does not have, CheckpointError as `layout.plan` does.
    """
    context = held_by(config, context)
    if vram is not None and not 0 <= vram < math.inf:
        raise UsageError(f"{vram} GB cannot be kept to", "give a number of GB from 0 on")
    layout = plan(config, checkpoint.tensors, scheme_of(checkpoint.quantisation), options)
    resident = dict(layout.resident)
    if (
        device == "cuda"
        and layout.held["embed_tokens"].form == "fp8"
        and {"fp8-soft"} == ops.wishes() & {"fp8-soft", "torch"}
    ):
        resident["embedding, turned", "fp8"] = config.vocab_size * config.hidden_size
    asked = estimate(
        config,
        resident,
        context=context or min(DEFAULT_CONTEXT, config.max_positions),
        compute="fp32" if layout.held["norm"].dtype.itemsize > 2 else "bf16",
        device=device,
    )
    on_card = device == "cuda"
    have = budget(vram, (card or first_card()) if on_card else None, None if on_card else host_memory())
    return Planned(layout, asked, None if have is None else verdict(asked, have))


def empty(card: Card) -> Card:
    """The same card with nothing on it."""
    return replace(card, free=card.total, holders=())


def first_card() -> Card | None:
    """The card that a run takes."""
    return next(iter(cards()), None)
