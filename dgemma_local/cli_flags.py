"""Flags that several commands take, each defined once; and what a model is opened with, made from them.

WithX    a flag that means the same in every command that has it
flag     one of which each command has its own to say: its name, its form and its range are the same
wishes   what of them concerns the model
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgemma_local.chat.conversation import MOST_STEPS, SEEDS
from dgemma_local.errors import DgemmaError, UsageError
from dgemma_local.presets import Preset

if TYPE_CHECKING:
    from dgemma_local.session import Wishes

AUTO = "auto"
LARGEST_SEED = SEEDS - 1
LARGEST_VRAM = 10_000  # GB; inf is no budget


def model_names(incomplete: str) -> list[str]:
    """What a shell may complete a model's name to. A table that is broken completes nothing."""
    from dgemma_local.registry import RESERVED, table

    try:
        return completions((*table(), *RESERVED), incomplete)
    except DgemmaError:
        return []


def completions(names: Iterable[str], incomplete: str) -> list[str]:
    """Those that begin so, as the shell wants them: bash inserts them as they are, the others quote what they insert."""
    found = [name for name in names if name.startswith(incomplete)]
    bash = os.environ.get("_DGEMMA_COMPLETE") == "complete_bash"
    return [re.sub(r"[^\w@%+=:,./-]", r"\\\g<0>", name) for name in found] if bash else found


class Dtype(StrEnum):
    """What the weights are computed in."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Device(StrEnum):
    """Where the model runs."""

    cpu = "cpu"
    cuda = "cuda"


class Prefer(StrEnum):
    """What `auto` weighs more than room for a long context."""

    quality = "quality"


def _check_seed(seed: int | None) -> int | None:
    """Raises typer's BadParameter: out of the range of the noise."""
    if seed is not None and not 0 <= seed <= LARGEST_SEED:
        raise typer.BadParameter(f"{seed} is out of range: it is a whole number from 0 to {LARGEST_SEED}")
    return seed


_FORMS: Mapping[str, Mapping[str, Any]] = {
    "-m --model": {"metavar": "NAME", "autocompletion": model_names},
    "--system": {"metavar": "TEXT"},
    "--seed": {"callback": _check_seed, "metavar": "N"},  # with min and max, help would hold twenty digits
    "--max-tokens": {"min": 1, "metavar": "N"},
    "--dtype": {},
    "--think": {},
    "--context": {"min": 1, "metavar": "N"},
    "--vram": {"min": 0, "max": LARGEST_VRAM, "metavar": "GB"},
    "--show-thinking": {},
    "--visualize": {},
    "--quiet -q": {},
}


def flag(names: str, text: str, **more: Any) -> Any:
    """An option by all its names, with a command's own help; more: what of its form is this command's own, too."""
    return typer.Option(*names.split(), help=text, **{**_FORMS[names], **more})


# The model, and the memory it may take

WithDevice = Annotated[
    Device | None, typer.Option("--device", help="Default: the card if there is one; the demo runs on the CPU.")
]
WithDtype = Annotated[Dtype | None, flag("--dtype", "Compute in this. Default: as stored.")]
WithVram = Annotated[float | None, flag("--vram", "Stay within so much. Default: what is free.")]
WithPrefer = Annotated[
    Prefer | None, typer.Option("--prefer", help="With auto: FP8 from 32 GB of VRAM on, not from 40.")
]
_ATTENTION, _EMBEDDING, _MLP = "--fp8-attention", "--fp8-embedding", "--fp8-mlp"
WithFp8Attention = Annotated[bool, typer.Option(_ATTENTION, help="Hold 16-bit attention weights in FP8: 1.1 GB less.")]
WithFp8Embedding = Annotated[
    bool, typer.Option(_EMBEDDING, help="Hold the embedding, which is the head, in FP8: 0.7 GB less.")
]
WithFp8Mlp = Annotated[
    bool, typer.Option(_MLP, help="Hold the dense MLP in FP8, multiplied at its rate: faster on a card.")
]
# of a model that is planned or measured
WithAttentionHeld = Annotated[bool, typer.Option(_ATTENTION, help="With attention held in FP8.")]
WithEmbeddingHeld = Annotated[bool, typer.Option(_EMBEDDING, help="With the embedding held in FP8.")]
WithMlpHeld = Annotated[bool, typer.Option(_MLP, help="With the dense MLP held in FP8.")]

# How it answers

WithSteps = Annotated[
    int | None,
    typer.Option(
        "--steps", min=1, max=MOST_STEPS, metavar="N", help="Denoising steps a canvas, at most. Default: the model's."
    ),
]
WithPreset = Annotated[
    Preset | None,
    typer.Option(
        "--preset",
        help="Steps, entropy bound and thresholds by name: fast, balanced (the model's own) or quality. --steps goes before.",
    ),
]
_THINK = flag("--think", "Let the model think first.")
WithThink = Annotated[bool, _THINK]
WithThinkOrAsBefore = Annotated[bool | None, _THINK]  # None: as the conversation has it
WithThinkTokens = Annotated[
    int | None,
    typer.Option(
        "--think-tokens", min=1, metavar="N", help="With --think: after so many tokens of thought, the answer."
    ),
]
WithStop = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="End the answer before this; may be repeated.")
]


def check_stop(stop: Sequence[str]) -> None:
    """Raises UsageError: a string is empty. Raises PromptError: it is not UTF-8 text."""
    from dgemma_local.ui.prompt import utf8

    if not all(stop):
        raise UsageError("a --stop string is empty", "give the text to stop at")
    for each in stop:
        utf8(each, "--stop")


def check_think_tokens(think_tokens: int | None, max_tokens: int, *, think: bool) -> None:
    """Raises UsageError where a bound of thoughts would do nothing, or leaves no room for an answer."""
    if think_tokens is None:
        return
    if not think:
        raise UsageError("--think-tokens has no thought to bound", "add --think")
    if think_tokens >= max_tokens:
        raise UsageError(
            f"--think-tokens {think_tokens} leaves nothing of --max-tokens {max_tokens} for an answer",
            "raise --max-tokens, or think less",
        )


def check_prefer(prefer: Prefer | None, model: str | None) -> None:
    """Raises UsageError where the model is named already. model: None is `auto`, too."""
    if prefer is not None and model not in (None, AUTO):
        raise UsageError("--prefer has nothing to choose from", "drop it, or -m")


def wishes(
    *,
    dtype: Dtype | None,
    device: Device | None,
    context: int | None,
    vram: float | None,
    fp8: tuple[bool, bool, bool],
    steps: int | None,
    preset: Preset | None,
    checksum: bool = False,
) -> "Wishes":
    """How a model is to be opened, from its flags. fp8: attention, embedding, MLP. Imports torch."""
    from dgemma_local.session import Wishes

    attention, embedding, mlp = fp8
    return Wishes(
        dtype=dtype.value if dtype else None,
        device=device.value if device else None,
        context=context,
        vram=vram,
        fp8_attention=attention,
        fp8_embedding=embedding,
        fp8_mlp=mlp,
        checksum=checksum,
        steps=steps,
        preset=preset.value if preset else None,
    )
