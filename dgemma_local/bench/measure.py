"""One task, answered some times over, with a clock beside its events; and the figures made of that.

What each figure is made of stands in the package's docstring (dgemma_local/bench/__init__.py). No torch here: a
conversation, its noise, the clock and what waits for the device come in.
"""

import hashlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from dgemma_local.bench.protocols import Task
from dgemma_local.config import GenerationConfig
from dgemma_local.errors import BenchRefused
from dgemma_local.events import CanvasCommitted, Event, Finished, FinishReason, Prefilled, Retried, StepDone

P95 = 0.95
LEAST_PREFILL = 0.1  # of a median step, which is taken off the time to the first draft: less is noise of that step


class Speaker(Protocol):
    """What is measured: `engine.Conversation`, as far as a benchmark asks it."""

    held: list[int]  # tokens of its cache; without them nothing is reused, and the cache begins anew

    def answer(
        self, prompt: Sequence[int], config: GenerationConfig, noise: Any, max_tokens: int
    ) -> Iterator[Event]: ...


class Joules(Protocol):
    """What reads the card's power (`machine.Power`)."""

    why_not: str | None

    def joules(self, begin: float, end: float) -> float | None:
        """Energy between two moments of the clock; None where too little was read."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """How to measure here."""

    clock: Callable[[], float]  # seconds, monotonic
    settle: Callable[[], None]  # waits until the device has done what it was given
    shared: bool  # a commit shares its pass with the next canvas's step 0
    power: Joules


@dataclass(slots=True, kw_only=True)
class Answer:
    """One answer's events as moments of the clock, seconds."""

    began: float
    prompt: int = 0  # tokens that were read: not found in the cache
    steps: list[list[float]] = field(default_factory=list)  # a list a canvas
    commits: list[float] = field(default_factory=list)
    finished: float = math.nan
    tokens: tuple[int, ...] = ()  # kept
    reason: FinishReason = "interrupted"

    @property
    def kept(self) -> int:
        return len(self.tokens)

    @property
    def forwards(self) -> int:
        return sum(map(len, self.steps))

    @property
    def gaps(self) -> list[float]:
        """Seconds from one step's event to the next one's, within canvases: steps 1, 2 …"""
        return [b - a for steps in self.steps for a, b in pairwise(steps)]

    @property
    def prefill(self) -> float:
        """Seconds to the first draft, less what a step takes here; 0 at the least."""
        return max(0.0, self.steps[0][0] - self.began - (statistics.median(self.gaps) if self.gaps else 0.0))

    @property
    def decode(self) -> float:
        """The other seconds up to the last commit."""
        return self.commits[-1] - self.began - self.prefill

    @property
    def digest(self) -> str:
        return hashlib.sha256(",".join(map(str, self.tokens)).encode()).hexdigest()


def answer(speaker: Speaker, task: Task, noise: Any, bench: Bench) -> Answer:
    """Answers `task` from an empty cache. Raises KeyboardInterrupt where Ctrl-C ended it, BenchRefused as `_check` does."""
    speaker.held.clear()
    bench.settle()
    found = Answer(began=bench.clock())
    for event in speaker.answer(task.prompt, task.config, noise, task.max_tokens):
        now = bench.clock()
        match event:
            case Prefilled():
                found.prompt = event.tokens - event.reused
            case StepDone():
                if event.step == 0:
                    found.steps.append([])
                found.steps[-1].append(now)
            case Retried():
                pass  # a bench says nothing of what is blank, so that there is none
            case CanvasCommitted():
                found.commits.append(now)
            case Finished():
                found.finished, found.tokens, found.reason = now, event.tokens, event.reason
    if found.reason == "interrupted":
        raise KeyboardInterrupt
    _check(task, found)
    return found


def repeat(speaker: Speaker, task: Task, noise: Any, bench: Bench, runs: int) -> list[Answer]:
    """`runs` answers behind one that warms up. Raises BenchRefused where two of them differ in a token."""
    first, *counted = [answer(speaker, task, noise, bench) for _ in range(1 + runs)]
    for number, one in enumerate(counted, start=1):
        if one.tokens != first.tokens:
            at = next(
                (i for i, (a, b) in enumerate(zip(first.tokens, one.tokens, strict=False)) if a != b),
                min(first.kept, one.kept),
            )
            raise BenchRefused(
                f"{task.name}: the warm-up and run {number} have the same seed and differ at token {at}",
                "no speed is shown of answers that are not the same; report it, with `dgemma bench` and --seed as here",
            )
    return counted


def _check(task: Task, found: Answer) -> None:
    """Raises BenchRefused on an answer that is not what its protocol asks: fewer tokens, steps or a reused prompt."""
    wrong = None
    if found.prompt != len(task.prompt):
        wrong = f"{found.prompt:,} tokens of the prompt were read, not all {len(task.prompt):,}"
    elif not task.config.end_ids and found.kept != task.max_tokens:
        wrong = f"{found.kept:,} tokens came, not {task.max_tokens:,}"
    elif task.config.confidence == 0 and any(len(steps) != task.config.steps for steps in found.steps):
        wrong = f"a canvas took {min(map(len, found.steps))} steps, not {task.config.steps}"
    if wrong is not None:
        raise BenchRefused(f"{task.name}: {wrong}", "its figures would not be this protocol's; report it")


# ── figures ───────────────────────────────────────────────────────────────────────────────────────────────────────


def figures(answers: Sequence[Answer], bench: Bench) -> tuple[dict[str, float | None], dict[str, str]]:
    """Of answers taken together -> name to value, and why a value is missing."""
    kept, forwards = sum(one.kept for one in answers), sum(one.forwards for one in answers)
    canvases, decode = sum(len(one.commits) for one in answers), sum(one.decode for one in answers)
    ended = sum(one.reason == "end" for one in answers)
    own_passes = 0 if bench.shared else sum(len(one.commits) - 1 for one in answers)  # the last one is not committed
    prefill = sum(one.prefill for one in answers)
    later = sorted(1e3 * gap for one in answers for gap in one.gaps)
    first = [1e3 * (steps[0] - at) for one in answers for at, steps in zip(one.commits, one.steps[1:], strict=False)]
    p50 = statistics.median(later) if later else None
    first_step = statistics.median(first) if first else None
    known = prefill > 0 and (p50 is None or 1e3 * prefill >= LEAST_PREFILL * p50 * len(answers))
    joules = _sum(bench.power.joules(one.began, one.finished) for one in answers)
    values = {
        "step_ms_p50": p50,
        "step_ms_p95": later[math.ceil(P95 * len(later)) - 1] if later else None,
        "first_step_ms": first_step,
        "commit_ms": None if first_step is None or p50 is None else first_step - p50,
        "canvas_ms": 1e3 * decode / canvases,
        "steps_per_canvas": forwards / canvases,
        "tokens_per_forward": (kept + ended) / forwards,
        "tokens_per_pass": kept / (forwards + own_passes),
        "decode_tok_s": kept / decode,
        "end_to_end_tok_s": kept / sum(one.finished - one.began for one in answers),
        "first_draft_ms": 1e3 * statistics.median(one.steps[0][0] - one.began for one in answers),
        "first_canvas_ms": 1e3 * statistics.median(one.commits[0] - one.began for one in answers),
        "prefill_tok_s": sum(one.prompt for one in answers) / prefill if known else None,
        "joules_per_token": None if joules is None or not kept else joules / kept,
    }
    one_step, one_canvas = "every canvas took one step", "no answer had a second canvas"
    reasons = {
        "step_ms_p50": one_step,
        "step_ms_p95": one_step,
        "first_step_ms": one_canvas,
        "commit_ms": one_canvas if first_step is None else one_step,
        "prefill_tok_s": "the prompt was read in less time than steps differ by, a tenth of a step",
        "joules_per_token": bench.power.why_not
        or ("no token was kept" if not kept else "the power was read too seldom for an answer so short"),
    }
    return values, {name: reasons[name] for name, value in values.items() if value is None}


def spread(runs: Sequence[Mapping[str, float | None]]) -> dict[str, dict[str, Any] | None]:
    """Of each figure of some runs: median, least, most, and all of them in order; None where one run has none."""
    return {
        name: None
        if any(run[name] is None for run in runs)
        else {
            "median": statistics.median(values := [run[name] or 0.0 for run in runs]),
            "min": min(values),
            "max": max(values),
            "runs": values,
        }
        for name in runs[0]
    }


def result(task: Task, runs: Sequence[Answer], bench: Bench) -> dict[str, Any]:
    """A task of the document, of its counted runs; `report` says what is in it."""
    found = [figures([one], bench) for one in runs]
    first = runs[0]
    config = task.config
    return {
        "name": task.name,
        "note": task.note,
        "prompt_tokens": len(task.prompt),
        "asked_tokens": task.max_tokens,
        "steps": config.steps,
        "confidence": config.confidence,
        "entropy_bound": config.entropy_bound,
        "t_max": config.t_max,
        "t_min": config.t_min,
        "ends_ignored": not config.end_ids,
        "kept_tokens": first.kept,
        "canvases": len(first.commits),
        "finish": first.reason,
        "digest": first.digest,
        "figures": spread([values for values, _ in found]),
        "missing": {name: why for _, missing in found for name, why in missing.items()},
    }


def together(tasks: Sequence[Task], runs: Sequence[Sequence[Answer]], bench: Bench) -> dict[str, Any]:
    """The same of several tasks summed, run by run; `runs`: the counted runs of each."""
    found = [figures(each, bench) for each in zip(*runs, strict=True)]
    firsts = [answers[0] for answers in runs]
    return result(tasks[0], runs[0], bench) | {
        "name": "together",
        "note": "",
        "prompt_tokens": sum(len(task.prompt) for task in tasks),
        "asked_tokens": sum(task.max_tokens for task in tasks),
        "kept_tokens": sum(one.kept for one in firsts),
        "canvases": sum(len(one.commits) for one in firsts),
        "finish": None,
        "digest": hashlib.sha256("".join(one.digest for one in firsts).encode()).hexdigest(),
        "figures": spread([values for values, _ in found]),
        "missing": {name: why for _, missing in found for name, why in missing.items()},
    }


def _sum(values: Iterator[float | None]) -> float | None:
    total = 0.0
    for value in values:
        if value is None:
            return None
        total += value
    return total
