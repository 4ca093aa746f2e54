"""How soon text can be read before its canvas is committed, and how often that is taken back: `python tests/measure_settled.py`.

The demo models answer prompts they have never seen (`demo.evaluate`'s cases), once; every rule (S steps, entropy bound) is
then tried on what they did. A rule's row says

    shown      tokens that stood in a settled prefix at some step before the last of their canvas
    changed    share of those that stood there as another token than the one committed, in percent
    withdrawn  share of those that left the prefix again at a later step, whatever was committed
    early      share of answers of which something could be read before their first canvas was committed
    steps, ms  to the first visible text, mean over all answers: the prefill and denoising steps. Where nothing could be
               read early it is the canvas's own
    of canvas  those ms as a share of the time to the canvas

`--cost PAIRS` measures instead what it costs a run to show it.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from unittest import mock

import torch

from dgemma_local import cli_bench
from dgemma_local.channels import AnswerDecoder
from dgemma_local.demo.evaluate import cases
from dgemma_local.demo.render import FOLDERS
from dgemma_local.events import CanvasCommitted, Prefilled, StepDone
from dgemma_local.session import Session, open_session, timed
from dgemma_local.states import SETTLED_BOUND, SETTLED_STEPS, Seen, see, settled
from dgemma_local.tokens import Message
from dgemma_local.ui.settled import provisional

STEPS = (1, 2, 3, 4)
BOUNDS = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1.0, float("inf"))  # nats
GOAL = 0.01  # of the tokens shown, changed later


@dataclass(slots=True)
class Canvas:
    """What one canvas went through."""

    moments: list[tuple[Seen, float]] = field(default_factory=list)  # after each step, and its seconds
    tokens: tuple[int, ...] = ()  # committed


@dataclass(slots=True)
class Answer:
    """What one answer went through. bucket: the evaluation's name of the case."""

    bucket: str
    prefill: float  # seconds
    canvases: list[Canvas]


def asked(session: Session, bucket: str, prompt: str, thinking: bool, seed: int) -> Answer:
    """One answer, followed step by step."""
    answer = Answer(bucket, 0.0, [])
    seen = Seen(frozenset(session.generation.end_ids))
    canvas = Canvas()
    messages = [Message(role="user", content=prompt)]
    for event, seconds in timed(session.answer(messages, seed=seed, thinking=thinking)):
        seen = see(seen, event, seconds)
        match event:
            case Prefilled():
                answer.prefill = seconds
            case StepDone():
                canvas.moments.append((seen, seconds))
            case CanvasCommitted():
                canvas.tokens = event.tokens
                answer.canvases.append(canvas)
                canvas = Canvas()
            case _:
                pass
    return answer


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rule comes to over some answers."""

    shown: int
    changed: int
    withdrawn: int
    answers: int
    early: int
    steps: float  # to the first text
    canvas_steps: float  # to the first canvas
    ms: float
    canvas_ms: float

    @property
    def share(self) -> float:
        """Of the tokens shown, those that were changed."""
        return self.changed / self.shown if self.shown else 0.0

    def row(self) -> str:
        shown = max(1, self.shown)
        return (
            f"{self.shown} | {self.share:.2%} | {self.withdrawn / shown:.2%} | {self.early / self.answers:.0%} "
            f"| {self.steps:.1f} of {self.canvas_steps:.1f} | {self.ms:.0f} of {self.canvas_ms:.0f} "
            f"| {self.ms / self.canvas_ms:.0%}"
        )


HEADER = "shown | changed | withdrawn | early | steps | ms | of canvas"


def tried(answers: Iterable[Answer], tokenizer: object, steps: int, bound: float) -> Outcome:
    """The rule, on answers that are over."""
    shown = changed = withdrawn = early = 0
    first: list[tuple[int, int, float, float]] = []
    for answer in answers:
        for canvas in answer.canvases:
            counts = [
                settled(seen, steps, bound) for seen, _ in canvas.moments[:-1]
            ]  # the last one is committed at once
            reach = max(counts, default=0)
            shown += reach
            other: set[int] = set()
            gone: set[int] = set()
            for k, count in enumerate(counts):
                draft = canvas.moments[k][0].step.draft  # type: ignore[union-attr]  # there has been a step
                other.update(i for i in range(count) if draft[i] != canvas.tokens[i])
                if k and count < counts[k - 1]:
                    gone.update(range(count, counts[k - 1]))
            changed += len(other)
            withdrawn += len(gone)
        head = answer.canvases[0].moments
        at = next(
            (k for k, (seen, _) in enumerate(head[:-1]) if _visible(seen, tokenizer, steps, bound)), len(head) - 1
        )
        early += at < len(head) - 1
        seconds = [answer.prefill + sum(took for _, took in head[: k + 1]) for k in (at, len(head) - 1)]
        first.append((at + 1, len(head), *seconds))
    columns = [mean(column) for column in zip(*first, strict=True)]
    return Outcome(
        shown, changed, withdrawn, len(first), early, columns[0], columns[1], 1000 * columns[2], 1000 * columns[3]
    )


def _visible(seen: Seen, tokenizer: object, steps: int, bound: float) -> bool:
    """Whether the settled prefix reads as anything of the answer."""
    count = settled(seen, steps, bound)
    if not count or seen.step is None:
        return False
    pieces = AnswerDecoder(tokenizer).feed(seen.step.draft[:count])  # type: ignore[arg-type]
    return any(piece.kind == "answer" and piece.text.strip() for piece in pieces)


def table(models: dict[str, list[Answer]], tokenizers: dict[str, object]) -> list[dict[str, object]]:
    """Every rule on every model, printed as Markdown; the figures."""
    figures = []
    for name, answers in models.items():
        print(f"\n{name}: {len(answers)} answers\n\nS | bound | {HEADER}\n" + "|".join(["---"] * 9), flush=True)
        for steps in STEPS:
            for bound in BOUNDS:
                outcome = tried(answers, tokenizers[name], steps, bound)
                kept = " ←" if (steps, bound) == (SETTLED_STEPS, SETTLED_BOUND) else ""
                print(f"{steps} | {bound:g} | {outcome.row()}{kept}", flush=True)
                figures.append(
                    {"model": name, "steps": steps, "bound": bound, "share": outcome.share, "ms": outcome.ms}
                )
        print(
            f"\n{name}, by bucket, S = {SETTLED_STEPS}, bound {SETTLED_BOUND:g}\n\nbucket | {HEADER}\n"
            + "|".join(["---"] * 8)
        )
        for bucket in dict.fromkeys(answer.bucket for answer in answers):
            some = [answer for answer in answers if answer.bucket == bucket]
            print(f"{bucket} | {tried(some, tokenizers[name], SETTLED_STEPS, SETTLED_BOUND).row()}", flush=True)
    return figures


def cost(pairs: int) -> None:
    """What provisional text costs a run, by the method of `dgemma bench --view`, in the canvas view's place."""
    tokenizer = open_session(str(FOLDERS["sudoku"])).tokenizer
    instead = partial(provisional, fresh=lambda: AnswerDecoder(tokenizer))
    print("with: provisional text; the frame that is timed is the canvas view's, all the same")
    with mock.patch("dgemma_local.ui.cost.live", instead):
        cli_bench._view([], pairs, 1, None, quiet=True)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=100, help="cases a bucket")
    parser.add_argument("--out", type=Path, help="write the figures as JSON here")
    parser.add_argument(
        "--cost", type=int, metavar="PAIRS", help="measure instead what it costs a run, in so many pairs"
    )
    options = parser.parse_args(arguments)
    if options.cost is not None:
        cost(options.cost)
        return
    torch.set_num_threads(1)
    models: dict[str, list[Answer]] = {}
    tokenizers: dict[str, object] = {}
    for name, folder in FOLDERS.items():
        session = open_session(str(folder))
        tokenizers[name] = session.tokenizer
        models[name] = [
            asked(session, bucket, example.prompt, example.thinking, number)
            for bucket, make in cases(name).items()
            for number in range(options.count)
            for example in [make(number)[0]]
        ]
    figures = table(models, tokenizers)
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
