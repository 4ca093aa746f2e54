"""What is measured: a demo model, a checkpoint, or the 26B model's shapes filled with random numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import torch

from dgemma_local.config import GenerationConfig
from dgemma_local.engine import Conversation
from dgemma_local.errors import DoesNotFit, UsageError
from dgemma_local.layout import Options

if TYPE_CHECKING:
    from dgemma_local.cache import Cache
    from dgemma_local.config import ModelConfig
    from dgemma_local.model import DiffusionGemma
    from dgemma_local.tokens import Tokenizer

Kind = Literal["demo", "model", "synthetic"]
SYNTHETIC_CONTEXT = 8192  # tokens, where none is asked for; as for a checkpoint


@dataclass(slots=True, kw_only=True)
class Subject:
    """A model ready to answer, and what is known of it."""

    name: str
    kind: Kind
    model: Any  # what `conversation` asks; its `mode` says how it runs
    conversation: "Conversation[Cache]"
    generation: GenerationConfig
    vocab_size: int
    tokenizer: "Tokenizer | None"  # None: a synthetic model has no words
    device: torch.device
    layout: str  # of the experts: "fp8", "nvfp4", "nvfp4-nvidia", "bf16", "fp32"
    load_seconds: float  # to open it, from the wall clock
    planned_bytes: int | None  # of tensors at the peak, without the CUDA context
    network: "DiffusionGemma"
    folder: Path | None = None  # of a checkpoint
    fp8: tuple[str, ...] = ()  # parts that are held in FP8 because it was asked for

    @property
    def mode(self) -> str:
        """ "graphs", "eager launches: …" or "torch: …"."""
        return str(self.model.mode)

    @property
    def shared(self) -> bool:
        """Whether a commit shares its pass with the next canvas's first step."""
        return bool(self.model.joins)

    @property
    def vocabulary(self) -> Sequence[int]:
        """Ids that prompts are drawn from: those that steer, or stand for an image, are no text to read."""
        every, tokenizer = range(self.vocab_size), self.tokenizer
        return every if tokenizer is None else [token for token in every if not tokenizer.is_control(token)]

    @property
    def label(self) -> str | None:
        """What must be said with every figure."""
        from dgemma_local.bench.synthetic import rehearsing

        on_cpu = self.device.type == "cpu"
        if self.kind == "synthetic" and rehearsing():
            return "rehearsal: small sizes, nothing was measured"
        if self.kind == "demo":
            here = "a CPU" if on_cpu else "a GPU"
            return f"demo model on {here}: these figures say nothing about the 26B model" + (" or a GPU" * on_cpu)
        if self.kind == "synthetic":
            return "random weights of the 26B model's shapes: the speed is to be compared, the tokens mean nothing" + (
                "; on a CPU: these figures say nothing about a GPU" * on_cpu
            )
        return "on a CPU: these figures say nothing about a GPU" if on_cpu else None


def lands_on(name: str, device: str | None) -> str:
    """ "cpu" or "cuda": where `session.open_session` puts this model. Raises UnknownModel."""
    from dgemma_local import registry

    demo = registry.is_demo(folder_of(name))
    return device or ("cuda" if torch.cuda.is_available() and not demo else "cpu")


def folder_of(name: str) -> Path:
    """Where this model lies. Raises UnknownModel."""
    from dgemma_local import hub, registry

    return registry.resolve(name, hub.folder_of)[1]


def open_model(
    name: str, *, device: str | None, context: int | None, dtype: str | None = None, fp8: Sequence[str] = ()
) -> Subject:
    """A name of the table, the demo's too, or a folder. Raises as `session.open_session` does."""
    from dgemma_local.session import Wishes, open_session

    folder = folder_of(name)
    began = perf_counter()
    held: dict[str, Any] = {f"fp8_{part}": True for part in fp8}
    session = open_session(name, Wishes(dtype=dtype, device=device, context=context, **held))
    seconds = perf_counter() - began
    model: Any = session.conversation.model
    agreed = session.planned.agreed
    return Subject(
        name=session.name,
        kind="demo" if session.is_demo else "model",
        model=model,
        conversation=session.conversation,
        generation=session.generation,
        vocab_size=session.tokenizer.vocab_size,
        tokenizer=session.tokenizer,
        device=model.device,
        layout=next(dtype for component, dtype in session.planned.layout.resident if component == "experts"),
        load_seconds=seconds,
        planned_bytes=None if agreed is None else agreed.allocated,
        network=getattr(model, "network", model),
        folder=folder,
        fp8=tuple(fp8),
    )


def open_synthetic(
    layout: str,
    *,
    device: str | None,
    context: int | None,
    seed: int,
    fp8: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> Subject:
    """The 26B model without its weights, on the card; on the CPU where that is asked for, or rehearsed.

    Raises UsageError on an unknown layout, a context the model does not have, or a card that is not there; DoesNotFit
    before anything is made. Imports nothing but torch and triton from outside the package and the standard library.
    """
    from dgemma_local import captured, fit
    from dgemma_local.bench import synthetic

    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise UsageError("torch sees no CUDA device", "drop --device cuda, or install torch's CUDA build and a driver")
    on = device or ("cuda" if there else "cpu")
    rehearsing = synthetic.rehearsing()
    sizes = synthetic.small_config() if rehearsing else synthetic.published_config()
    options = Options(fp8_attention="attention" in fp8, fp8_mlp="mlp" in fp8, fp8_embedding="embedding" in fp8)
    context = fit.held_by(sizes, context)
    if rehearsing:
        torch.set_num_threads(1)  # of small sizes: more of them wait for each other
    elif device is None and not there:
        raise _no_card(layout, sizes, context, options)
    room_for = _room_for(layout, sizes, on, context, options)
    say(f"making the 26B model of random numbers, {layout}")
    if on == "cpu" and not rehearsing:
        say("on a CPU: a step takes minutes, and an answer many of them")
    began = perf_counter()
    network, generation, room, planned = synthetic.make(
        layout, on, context=room_for, seed=seed, sizes=sizes, options=options
    )
    model = captured.best(network, room)
    if on == "cuda":
        torch.cuda.synchronize()
    seconds = perf_counter() - began
    return Subject(
        name=f"synthetic 26b {layout}",
        kind="synthetic",
        model=model,
        conversation=Conversation(model, room),
        generation=generation,
        vocab_size=network.config.vocab_size,
        tokenizer=None,
        device=network.device,
        layout=layout,
        load_seconds=seconds,
        planned_bytes=planned,
        network=network,
        fp8=tuple(fp8),
    )


def _no_card(layout: str, config: "ModelConfig", context: int | None, options: Options) -> UsageError:
    """That a CPU is no place for this, and what it would take there."""
    from dgemma_local import fit
    from dgemma_local.bench import synthetic
    from dgemma_local.layout import Plan

    held = Plan((), (), {}, synthetic.forms(config, layout, options)).resident
    size = fit.estimate(config, held, context=context or SYNTHETIC_CONTEXT, device="cpu").allocated
    return UsageError(
        f"torch sees no CUDA device: on the CPU synthetic 26b {layout} takes {fit.gb(size)} of memory, and minutes a step",
        "measure the demo model (--demo); or insist with --device cpu",
    )


def _room_for(layout: str, config: "ModelConfig", device: str, context: int | None, options: Options) -> int:
    """The context to plan for. Raises DoesNotFit with the sizes."""
    from dgemma_local import fit
    from dgemma_local.bench import synthetic
    from dgemma_local.card import cards, host_memory
    from dgemma_local.layout import Plan

    on_card = device == "cuda"

    def asked(name: str) -> fit.Estimate:
        held = Plan((), (), {}, synthetic.forms(config, name, options))
        wanted = context or SYNTHETIC_CONTEXT
        return fit.estimate(config, held.resident, context=wanted, device="cuda" if on_card else "cpu")

    here = asked(layout)
    card = next(iter(cards()), None) if on_card else None
    have = fit.budget(card=card, host=None if on_card else host_memory())
    if have is None:
        return here.context
    said = fit.verdict(here, have)
    if said.plan is not None and (said.fits or context is None or isinstance(context, fit.AtMost)):
        return said.plan.context
    cures = [f"use {'a card' if on_card else 'a computer'} with {fit.needs(here, have)} free"]
    if said.plan is not None:
        cures.insert(0, f"give --context {said.plan.context}")
    else:
        smallest = min(synthetic.LAYOUTS, key=lambda name: asked(name).allocated)
        if fit.verdict(asked(smallest), have).fits:
            cures.insert(0, f"take --layout {smallest}")
    cures.append("measure the demo model (--demo), which runs on any CPU")
    raise DoesNotFit(f"synthetic 26b {layout} {said.line}", "; or ".join(cures))
