"""A memory plan before anything is loaded: what there will be, byte by byte, and whether it fits.

    weights          by component and dtype, as the loader will hold them
    KV cache         full layers the whole context, sliding layers their window and a pass (`cache.cache_bytes`)
    rotary tables    those of a canvas
    working memory   the largest of three, which are never there together
        canvas × vocabulary    one [L, V] of fp32 logits, and blocks of it: head, sampler, soft embedding
        denoising step         activations of one layer, L rows
        prefill chunk          the same for PREFILL_CHUNK rows, and their masks
                           graphs keep theirs between passes, and go before a canvas whose logits are whole (`captured`)
    CUDA context     on a card, beside all that

The cache is allocated as planned, and a step back in the conversation (`slack`) is what a tight plan gives up first.
tests/unit/test_fit.py holds the sum to what tests/live_bytes.py measures.

GB are 10⁹ bytes here and wherever dgemma prints them. No torch at import.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dgemma_local.card import MIB, Card
from dgemma_local.config import ModelConfig
from dgemma_local.errors import DoesNotFit, UsageError
from dgemma_local.registry import Entry

if TYPE_CHECKING:
    from dgemma_local.cache import Room

GB = 10**9
Compute = Literal["bf16", "fp32"]
Device = Literal["cuda", "cpu"]
Resident = Mapping[tuple[str, str], int]  # (component, dtype) -> bytes of weights
ELEMENT: dict[str, int] = {"bf16": 2, "fp32": 4}
# A CUDA context with the kernels that a run loads into it, and cuBLAS's workspace. About 300 MB since CUDA 11.7 loads
# kernels lazily (ptrblck in pytorch/pytorch#107667), more on cards of more multiprocessors; not measured on cards yet.
CUDA_CONTEXT = 500 * 10**6


# ── what it takes ─────────────────────────────────────────────────────────────────────────────────────────────────


class AtMost(int):
    """A context, in tokens, that gives way to what the model has and what fits: a user's default. Any other is firm."""


def held_by(config: ModelConfig, context: int | None) -> int | None:
    """`context`, in tokens, or what the model has of one that is `AtMost`.

    Raises UsageError on one that the model does not have.
    """
    least, most = config.canvas_length + 1, config.max_positions
    if context is None or least <= context <= most:
        return context
    if isinstance(context, AtMost):
        return AtMost(max(least, min(context, most)))
    raise UsageError(f"a context of {context:,} tokens cannot be given", f"ask for {least:,} to {most:,}")


@dataclass(frozen=True, slots=True)
class Component:
    """One line of a plan."""

    name: str
    bytes: int
    dtype: str = ""  # of weights
    working: bool = False  # of all such, only the largest is there at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a run takes, and what that was computed from."""

    config: ModelConfig
    resident: Resident
    context: int  # tokens of prompt and answer, the canvas in work included
    slack: int  # committed tokens that the cache can step back over
    compute: Compute  # dtype of activations and cache
    device: Device
    components: tuple[Component, ...]
    cuda_context: int  # bytes; 0 on a CPU

    @property
    def weights(self) -> int:
        """Bytes."""
        return sum(self.resident.values())

    @property
    def working(self) -> int:
        """Bytes of the largest of those that are not there together."""
        return max(part.bytes for part in self.components if part.working)

    @property
    def allocated(self) -> int:
        """Bytes of tensors at the peak: all but the CUDA context."""
        return sum(part.bytes for part in self.components if not part.working) + self.working

    @property
    def total(self) -> int:
        """Bytes that the process takes of the device."""
        return self.allocated + self.cuda_context

    def at(self, context: int | None = None, slack: int | None = None, resident: Resident | None = None) -> "Estimate":
        """The same run with another context, slack or form of the weights."""
        return estimate(
            self.config,
            self.resident if resident is None else resident,
            context=self.context if context is None else context,
            slack=self.slack if slack is None else slack,
            compute=self.compute,
            device=self.device,
        )

    @property
    def room(self) -> "Room":
        """What the cache is told (`engine.Conversation`)."""
        return _room(self.config, self.context, self.slack)


def estimate(
    config: ModelConfig,
    resident: Resident,
    *,
    context: int,
    slack: int | None = None,
    compute: Compute = "bf16",
    device: Device = "cuda",
) -> Estimate:
    """`slack` None: SLACK_CANVASES, what a cache without a plan has. Raises ValueError on a context without a prompt."""
    from dgemma_local.activations import Activations
    from dgemma_local.cache import SLACK_CANVASES, cache_bytes

    if context <= config.canvas_length:
        raise ValueError(f"a context of {context} tokens has no room beside a canvas of {config.canvas_length}")
    slack = SLACK_CANVASES * config.canvas_length if slack is None else slack
    room = _room(config, context, slack)
    forms = dict(sorted(resident, key=lambda key: key[1] not in ELEMENT))  # of a mixed component the packed one counts
    work = Activations(config, room, forms, ELEMENT[compute], device == "cuda")
    return Estimate(
        config=config,
        resident=resident,
        context=context,
        slack=slack,
        compute=compute,
        device=device,
        components=(
            *(Component(name, size, dtype) for (name, dtype), size in resident.items()),
            Component("KV cache", cache_bytes(config, room, ELEMENT[compute])),
            Component("rotary tables", work.rotary(config.canvas_length)),
            Component("canvas × vocabulary", work.vocabulary(), working=True),
            Component("denoising step", work.step(), working=True),
            Component("prefill chunk", work.prefill(), working=True),
        ),
        cuda_context=CUDA_CONTEXT if device == "cuda" else 0,
    )


def _room(config: ModelConfig, context: int, slack: int) -> "Room":
    from dgemma_local.cache import Room
    from dgemma_local.model import PREFILL_CHUNK

    return Room(context=context, rows=min(max(PREFILL_CHUNK, 2 * config.canvas_length), context), slack=slack)


# ── whether it fits ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much there is, where, and who has the rest."""

    bytes: int
    place: str  # "NVIDIA GeForce RTX 4090", "this computer", "--vram"
    card: Card | None = None
    asked: bool = False  # by --vram: it is for tensors, as torch's own limit is, and the CUDA context comes on top


def budget(vram: float | None = None, card: Card | None = None, host: int | None = None) -> Budget | None:
    """`vram` in GB if it was asked for, else what the card has free, else RAM. None: nothing is known."""
    if vram is not None:
        return Budget(bytes=int(vram * GB), place="--vram", card=card, asked=True)
    if card is not None:
        return None if card.free is None else Budget(bytes=card.free, place=card.name, card=card)
    return None if host is None else Budget(bytes=host, place="this computer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a run fits: `plan` is what to allocate, the asked context if that fits."""

    asked: Estimate
    plan: Estimate | None  # None: no context fits
    budget: Budget
    cures: tuple[str, ...]  # what would fit, the least first; none where all fits

    @property
    def fits(self) -> bool:
        """As asked."""
        return self.plan is not None and self.plan.context == self.asked.context

    @property
    def kind(self) -> Literal["fits", "shorter", "refused"]:
        """As asked, with less context, not at all."""
        return "refused" if self.plan is None else "fits" if self.fits else "shorter"

    @property
    def line(self) -> str:
        """In one line, with the sizes."""
        budget, card = self.budget, self.budget.card
        have = f"{gb(budget.bytes)} were given" if budget.asked else f"{budget.place} has {gb(budget.bytes)} free"
        if self.fits and self.plan is not None:
            return f"fits: {needs(self.plan, budget)}, and {have}"
        need = f"{self.asked.context:,} tokens of context need {needs(self.asked, budget)}, and {have}"
        if self.plan is not None:
            return f"fits with a context of at most {self.plan.context:,} tokens: {need}"
        if card is not None and card.total is not None and not budget.asked and self.asked.weights > card.total:
            return f"does not fit: the weights alone are {gb(self.asked.weights)}, and {card.name} has {gb(card.total)}"
        return f"does not fit: {need}; the weights alone are {gb(self.asked.weights)}"

    def error(self, name: str) -> DoesNotFit:
        """Of a model that does not fit as asked."""
        return DoesNotFit(f"{name} {self.line}", "; or ".join(self.cures) or "give it a device with more memory")


def verdict(asked: Estimate, budget: Budget) -> Verdict:
    """Fits as asked, with less to step back over, with less context, or not; and what would."""
    L = asked.config.canvas_length
    for plan in (asked, asked.at(slack=min(asked.slack, L))):
        if _fits(plan, budget):
            return Verdict(asked=asked, plan=plan, budget=budget, cures=())
    most = largest_context(asked.at(slack=min(asked.slack, L)), budget)
    shorter = None if most is None else asked.at(context=most, slack=min(asked.slack, L))
    return Verdict(asked=asked, plan=shorter, budget=budget, cures=tuple(_cures(asked, shorter, budget)))


def largest_context(estimate: Estimate, budget: Budget) -> int | None:
    """The most tokens, of at most the model's own, whose plan fits. None: not even one token beside a canvas."""
    low, high = estimate.config.canvas_length + 1, estimate.config.max_positions
    if not _fits(estimate.at(context=low), budget):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _fits(estimate.at(context=middle), budget) else (low, middle - 1)
    return low


def gb(size: int) -> str:
    """Bytes for people: decimal, two places."""
    return f"{size / GB:.2f} GB"


def needs(estimate: Estimate, budget: Budget) -> str:
    """What is held to the budget, for people; rounded up, so that too much never reads like enough."""
    return gb(-(-_measured(estimate, budget) // (GB // 100)) * (GB // 100))


def _measured(estimate: Estimate, budget: Budget) -> int:
    return estimate.allocated if budget.asked else estimate.total


def _fits(estimate: Estimate, budget: Budget) -> bool:
    return _measured(estimate, budget) <= budget.bytes


def _cures(asked: Estimate, shorter: Estimate | None, budget: Budget) -> Iterator[str]:
    if shorter is not None:
        yield f"ask for a context of at most {shorter.context:,} tokens"
    lean = asked.at(slack=min(asked.slack, asked.config.canvas_length))
    holders = budget.card.holders if budget.card is not None and not budget.asked else ()
    freed = 0
    for count, holder in enumerate(holders, start=1):
        freed += holder.bytes or 0
        if _measured(lean, budget) <= budget.bytes + freed:
            names = ", ".join(f"{one.name} (pid {one.pid}, {(one.bytes or 0) // MIB:,} MiB)" for one in holders[:count])
            yield f"end what else holds the card: {names}"
            break
    for name, resident in lighter(asked.config, asked.resident):
        if _fits(lean.at(resident=resident), budget):
            yield f"take {name}"
            break
    else:
        device = "a card" if asked.device == "cuda" else "a computer"
        yield f"give --vram {needs(lean, budget)}" if budget.asked else f"use {device} with {needs(lean, budget)} free"


def lighter(config: ModelConfig, resident: Resident) -> Iterator[tuple[str, Resident]]:
    """Other forms of the same model, the one that changes least first; each goes on from the one before."""
    D, layers = config.hidden_size, config.layers
    forms, said = dict(resident), []
    if any(component == "vision" for component, _ in forms):
        forms = {key: size for key, size in forms.items() if key[0] != "vision"}
        said.append("the model without its vision tower")
        yield " and ".join(said), forms
    rows = sum((config.heads + (1 if at.kind == "full" else 2) * at.kv_heads) * at.head_dim + D for at in layers)
    attention = sum(
        (2 * config.heads + (1 if at.kind == "full" else 2) * at.kv_heads) * at.head_dim * D for at in layers
    )
    if ("experts", "nvfp4") not in forms:  # as RedHat stores it: experts and dense MLP in 4 bits, attention in 16
        linears = {"experts": config.num_experts * config.expert_size, "dense MLP": config.intermediate_size}
        forms = {key: size for key, size in forms.items() if key[0] not in (*linears, "attention")}
        for component, height in linears.items():
            count = 3 * len(layers) * (config.num_experts if component == "experts" else 1)
            numbers = 3 * len(layers) * height * D
            # half a byte each, an E4M3 scale for 16 of them, and two fp32 scales of each matrix
            forms[component, "nvfp4"] = numbers // 2 + numbers // 16 + 8 * count
        forms["attention", "bf16"] = 2 * attention
        said.append("the NVFP4 format")
        yield " and ".join(said), forms
    if ("attention", "fp8") not in forms:
        forms = {key: size for key, size in forms.items() if key[0] != "attention"}
        forms["attention", "fp8"] = attention + 2 * rows  # a bf16 scale a row
        said.append("--fp8-attention")
        yield " and ".join(said), forms


# ── which one to take ─────────────────────────────────────────────────────────────────────────────────────────────

FP8_FROM = 40 * GB  # of a card: what is left beside FP8's weights is a long context's, and the rest of the desktop's
FP8_FOR_QUALITY_FROM = 32 * GB


@dataclass(frozen=True, slots=True)
class Choice:
    """An entry of the table, and why it and not the other."""

    entry: Entry
    reason: str


def choose(
    entries: Iterable[Entry],
    cards: Sequence[Card],
    prefer: Literal["quality"] | None = None,
    vram: float | None = None,
) -> Choice | None:
    """What `auto` stands for: NVFP4 on a card below 40 GB, FP8 from there on, or from 32 GB on for quality.

    The smallest of a format; the first card counts, or `vram` GB. None: no entry in either format needs a card.
    """
    real = [entry for entry in entries if entry.needs != 0]
    best = {
        name: min(found, key=lambda entry: entry.bytes or 0)
        for name in ("fp8", "nvfp4")
        if (found := [entry for entry in real if entry.format == name])
    }
    if not best:
        return None
    card = next((one for one in cards if one.total is not None), None)
    total = int(vram * GB) if vram is not None else 0 if card is None or card.total is None else card.total
    where = "no NVIDIA card is known here" if card is None else f"{card.name} has {gb(total)}"
    where = where if vram is None else f"{gb(total)} were given"
    fp8 = best.get("fp8")
    least = FP8_FOR_QUALITY_FROM if prefer == "quality" else FP8_FROM
    if fp8 is not None and ("nvfp4" not in best or total >= least):
        return Choice(fp8, f"FP8: {where}")
    why = "" if fp8 is None else f"; FP8 is taken from {least // GB} GB on"
    if fp8 is not None and fp8.bytes and fp8.bytes > total:
        why = f"; FP8 would not fit, its files are {gb(fp8.bytes)}"
    return Choice(best["nvfp4"], f"NVFP4: {where}{why}")
