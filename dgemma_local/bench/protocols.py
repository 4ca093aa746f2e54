"""What a model is asked, so that its figures can be set beside others'.

    fixed16     vLLM's: 1,024 random ids in, 1,024 tokens out, 16 steps a canvas, never stopped early, ends ignored
    adaptive    prompts that come with the package, the model's own rule of stopping
    context     fixed16's canvases behind prompts of 1,024 tokens, twice as many, … up to the plan
    breakdown   where a step's time goes (bench/breakdown.py)

Source of fixed16: the vLLM blog's figures of DiffusionGemma (`max_denoising_steps 16`, `confidence_threshold 0.0`) and the
commands of vLLM's pull request 46212. The entropy bound and the temperatures are the model's.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dgemma_local.config import GenerationConfig
from dgemma_local.errors import UsageError

NAMES = ("fixed16", "adaptive", "context", "breakdown")
STEPS = 16
IN = OUT = 1024  # tokens of vLLM's protocol
SWEEP_CANVASES = 2  # the second one's first step shows the commit
SHORTEST_SWEEP = 1024  # tokens of the first prompt; a quarter of the context where that is less
PROMPTS = Path(__file__).parent / "prompts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One question, as token ids, and how it is to be answered."""

    name: str
    prompt: tuple[int, ...]
    config: GenerationConfig
    max_tokens: int
    note: str = ""


class ContextTooShort(UsageError):
    """A protocol does not fit the context; `least` tokens would do."""

    def __init__(self, what: str, least: int) -> None:
        super().__init__(what, f"give --context {least} or more")
        self.least = least


def random_ids(count: int, vocabulary: Sequence[int], seed: int) -> tuple[int, ...]:
    """`count` of these token ids, uniform; the same for the same seed on every machine."""
    return tuple(random.Random(f"prompt {seed}").choices(vocabulary, k=count))


def endless(config: GenerationConfig, steps: int = STEPS) -> GenerationConfig:
    """Exactly `steps` steps a canvas and no end: a mean entropy is never strictly below 0."""
    return replace(config, steps=steps, confidence=0.0, end_ids=())


def fixed16(config: GenerationConfig, *, canvas: int, context: int, vocabulary: Sequence[int], seed: int) -> Task:
    """vLLM's protocol; where the context cannot hold it, half of the context in whole canvases each way, and said so.

    Raises UsageError on a context that holds no two canvases.
    """
    into, out, note = IN, OUT, ""
    if context < IN + OUT:
        into = out = context // 2 // canvas * canvas
        note = (
            f"scaled: {out} tokens in and out, for the context holds {context:,}; vLLM's protocol is {IN:,} and {OUT:,}"
        )
    if not out:
        raise ContextTooShort(f"a context of {context:,} tokens holds no fixed16", 2 * canvas)
    prompt = random_ids(into, vocabulary, seed)
    return Task(name="fixed16", prompt=prompt, config=endless(config), max_tokens=out, note=note)


def sweep_lengths(context: int, canvas: int) -> tuple[int, ...]:
    """Prompt tokens of the context sweep: powers of two while they fit, then what the context holds."""
    most = context - SWEEP_CANVASES * canvas
    length = SHORTEST_SWEEP
    while length > max(1, context // 4):
        length //= 2
    lengths = []
    while length < most:
        lengths.append(length)
        length *= 2
    return (*lengths, most) if most > 0 else ()


def sweep(
    config: GenerationConfig, *, canvas: int, context: int, vocabulary: Sequence[int], seed: int
) -> tuple[Task, ...]:
    """Raises UsageError on a context without a prompt beside two canvases."""
    lengths = sweep_lengths(context, canvas)
    if not lengths:
        least = SWEEP_CANVASES * canvas + 1
        raise ContextTooShort(f"a context of {context:,} tokens leaves the context sweep no prompt", least)
    ids = random_ids(lengths[-1], vocabulary, seed)
    return tuple(
        Task(name=f"{n:,}", prompt=ids[:n], config=endless(config), max_tokens=SWEEP_CANVASES * canvas) for n in lengths
    )


def adaptive(
    config: GenerationConfig, encode: Callable[[str], tuple[int, ...]], *, demo: str | None, context: int, canvas: int
) -> Iterator[Task]:
    """The prompts of `demo` ("demo", "demo-text"), or of the 26B model; `encode`: a user's turn as a prompt's ids.

    Raises UsageError on a context that does not hold each of them beside a canvas.
    """
    files = sorted((PROMPTS / (demo or "26b")).glob("*.txt"))
    prompts = {file.stem: encode(file.read_text(encoding="utf-8").rstrip("\n")) for file in files}
    longest = max(prompts, key=lambda name: len(prompts[name]))
    least = len(prompts[longest]) + canvas
    if least > context:
        raise ContextTooShort(f"a context of {context:,} tokens does not hold adaptive's {longest} and a canvas", least)
    for name, ids in prompts.items():
        room = (context - len(ids)) // canvas * canvas
        yield Task(name=name, prompt=ids, config=config, max_tokens=min(OUT, room))
