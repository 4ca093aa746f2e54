"""Ours beside transformers' own DiffusionGemma: the same folder, one process, in turns.

    per_step   one denoising step each (bench/turns.py); on a CPU alone
    answers    whole answers to the same prompts, transformers' `generate` against `engine.Conversation.answer`; the time
               between two drafts of them is a step's

On a CPU both with as many threads as this project takes for the model. Where that is one, steps are taken with two as
well, fewer of them and not for long: two threads that wait for a busy core take sixty times as long as one. On a card
ours is the kernels, which draw for themselves: nothing to compare token by token there.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dgemma_local.bench.protocols import Task
from dgemma_local.bench.report import counted
from dgemma_local.bench.transformers_side import generator_kept, open_theirs, settings, their_twin, version, why_not
from dgemma_local.bench.turns import OURS, THEIR_DRAWS, WARM_UP, Clock, noise_of, per_step
from dgemma_local.engine import Conversation, Croppable
from dgemma_local.events import Finished, StepDone
from dgemma_local.model import DiffusionGemma
from dgemma_local.noise import Noise

if TYPE_CHECKING:
    from dgemma_local.bench.subject import Subject

ROUNDS_A_RUN = 6  # canvases taken step by step for each answer of the protocol
TWO_THREADS_ROUNDS_A_RUN, TWO_THREADS_WARM_UP = 2, 1
TWO_THREADS_SECONDS = 20.0  # no further step is begun after

CacheT = TypeVar("CacheT", bound=Croppable)


class Answer(NamedTuple):
    """One answer and its clock."""

    tokens: list[int]
    seconds: float  # from the question to the last token
    first_draft: float  # seconds to the first step's draft
    step_ms: list[float]  # from one draft of a canvas to the next


def ours_answer(
    conversation: Conversation[CacheT], task: Task, noise: Noise, clock: Clock = time.perf_counter
) -> Answer:
    """By `Conversation.answer`, from an empty cache."""
    conversation.held.clear()
    drafts: list[list[float]] = []
    tokens: list[int] = []
    start = clock()
    for event in conversation.answer(task.prompt, task.config, noise, task.max_tokens):
        if isinstance(event, StepDone):
            if event.step == 0:
                drafts.append([])
            drafts[-1].append(clock())
        elif isinstance(event, Finished):
            tokens = list(event.tokens)
    return _answer(tokens, start, clock(), drafts)


class _Drafts:
    """A streamer that notes when each draft came."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.canvases = clock, list[list[float]]()

    def put(self, value: Tensor) -> None:
        """The prompt, then each finished canvas: another one begins."""
        self.canvases.append([])

    def put_draft(self, value: Tensor) -> None:
        self.canvases[-1].append(self.clock())

    def end(self) -> None:
        self.canvases.pop()


@torch.inference_mode()
def theirs_answer(model: Any, task: Task, seed: int, device: torch.device, clock: Clock = time.perf_counter) -> Answer:
    """By `generate`: whole canvases, of which the budget's tokens are the answer."""
    torch.manual_seed(seed)
    drafts = _Drafts(clock)
    start = clock()
    out = model.generate(
        torch.tensor([task.prompt], device=device),
        streamer=drafts,
        max_new_tokens=task.max_tokens,
        **settings(task.config),
    )
    tokens = out.sequences[0, len(task.prompt) :].tolist()
    return _answer(tokens[: task.max_tokens], start, clock(), drafts.canvases)


def _answer(tokens: list[int], start: float, end: float, drafts: Sequence[Sequence[float]]) -> Answer:
    gaps = [(after - before) * 1e3 for canvas in drafts for before, after in pairwise(canvas)]
    return Answer(tokens, end - start, drafts[0][0] - start, gaps)


def answers(
    conversation: Conversation[Any],
    network: DiffusionGemma,
    theirs: Mapping[str, Any],
    task: Task,
    *,
    runs: int,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """The task is answered by each contestant, one after the other, `runs` times behind a warm-up; each run has its seed.

    -> threads, prompt_tokens, tokens (of an answer), steps (a canvas), runs, by contestant the medians tok_s (prefill
    included), step_ms (None where canvases have one step) and first_draft_ms, ratio (ours ÷ theirs, in tok_s), compared
    and unequal (answers set beside those of `twin`, and how many differed; both 0 on a card).
    """
    twin = their_twin(network.dtype)
    on_cpu = network.device.type == "cpu"
    given: dict[str, list[Answer]] = {name: [] for name in (OURS, *([THEIR_DRAWS] if on_cpu else ()), *theirs)}
    with generator_kept():
        for seed in range(1 + runs):
            for name, its in given.items():
                if name in theirs:
                    its.append(theirs_answer(theirs[name], task, seed, network.device, clock))
                else:
                    its.append(ours_answer(conversation, task, noise_of(network, seed, name == OURS), clock))
    equal = [a.tokens == b.tokens for a, b in zip(given.get(THEIR_DRAWS, ()), given[twin], strict=on_cpu)]
    timed = {name: its[1:] for name, its in given.items()}
    tok_s = {name: statistics.median(len(one.tokens) / one.seconds for one in its) for name, its in timed.items()}
    gaps = {name: [ms for one in its for ms in one.step_ms] for name, its in timed.items()}
    return {
        "threads": torch.get_num_threads(),
        "prompt_tokens": len(task.prompt),
        "tokens": task.max_tokens,
        "steps": task.config.steps,
        "runs": runs,
        "tok_s": tok_s,
        "ratio": min(tok_s[name] for name in tok_s if name not in theirs) / max(tok_s[name] for name in theirs),
        "step_ms": {name: statistics.median(values) if values else None for name, values in gaps.items()},
        "first_draft_ms": {
            name: statistics.median(one.first_draft * 1e3 for one in its) for name, its in timed.items()
        },
        "twin": twin,
        "compared": len(equal),
        "unequal": equal.count(False),
    }


# ── all of it ─────────────────────────────────────────────────────────────────────────────────────────────────────


def measure(
    subject: "Subject",
    folder: Path | None,
    task: Task,
    *,
    runs: int,
    say: Callable[[str], None] = lambda _: None,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """`subject` against transformers over the checkpoint in `folder`: `task` answered, and steps behind its prompt.

    -> {"why_not": one line}, or why_not None, transformers (version), dtype, per_step (an entry for each number of
    threads; empty on a card) and answers (one entry). `say` hears of each part before it begins. Raises CheckpointError
    where transformers finds other tensors.
    """
    network = subject.network
    reason = why_not(folder, network)
    if reason is not None or folder is None:
        return {"why_not": reason}
    say("opening transformers' model")
    theirs = open_theirs(folder, network.dtype, network.device)
    own = torch.get_num_threads()

    def steps(threads: int, rounds: int, warm_up: int, within: float) -> dict[str, Any]:
        say(
            f"{rounds} canvases step by step in turns, {counted(threads, 'thread')}"
            + f", {within:g} s at most" * (within < math.inf)
        )
        with _threads(threads):
            return per_step(
                network,
                theirs,
                task.prompt,
                subject.generation,
                rounds=rounds,
                warm_up=warm_up,
                within=within,
                clock=clock,
            )

    on_cpu = network.device.type == "cpu"
    taken = [steps(own, runs * ROUNDS_A_RUN, WARM_UP, math.inf)] if on_cpu else []
    say(f"whole answers in turns: a warm-up, and {counted(runs, 'run')}" + f", {counted(own, 'thread')}" * on_cpu)
    whole = [answers(subject.conversation, network, theirs, task, runs=runs, clock=clock)]
    if on_cpu and own == 1:
        taken.append(steps(2, runs * TWO_THREADS_ROUNDS_A_RUN, TWO_THREADS_WARM_UP, TWO_THREADS_SECONDS))
    return {
        "why_not": None,
        "transformers": version(),
        "dtype": str(network.dtype).removeprefix("torch."),
        "per_step": taken,
        "answers": whole,
    }


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """torch with so many threads, and as before at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
