"""Measure the demo model on puzzles and prompts it has never seen: `python -m dgemma_local.demo.evaluate sudoku`, or `… text`.

A sudoku counts as solved when the answer is a complete grid that keeps the clues and breaks no rule; a text answer when
it is equal to the expected one, character for character. Puzzles are dug from seeds that training does not use, to the
clue count of their bucket exactly; prompts of the open text tasks are those that the hash holds out. The closed tasks
are memorised by design. Every answer is sampled with a seed of its own, by the product's engine, one at a time.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from dgemma_local.channels import AnswerDecoder
from dgemma_local.demo import sudoku, tasks
from dgemma_local.demo.render import FOLDERS
from dgemma_local.events import CanvasCommitted, Finished
from dgemma_local.session import Session, Wishes, open_session
from dgemma_local.tokens import Message

# clue counts a bucket
BUCKETS = {4: (4, 5, 6, 8), 6: (10, 12, 14, 18), 9: (26, 28, 30, 32, 34, 36, 40, 45)}
SEED = 1_000_003  # of puzzles and prompts; training's puzzle seeds are strings of another form


# number of a case -> the example, and the judge of an answer
Case = Callable[[int], tuple[tasks.Example, Callable[[str], bool]]]


@dataclass(frozen=True, slots=True)
class Row:
    """One bucket's result."""

    task: str
    count: int
    solved: float  # share
    steps: float  # mean denoising steps an answer
    tokens_per_step: float  # answer tokens a forward pass of the decoder
    canvases: float  # mean
    unconverged: float  # share of answers with a canvas that used all its steps


def puzzle(side: int, clues: int, number: int) -> tuple[tasks.Example, sudoku.Grid]:
    """Puzzle `number` of a bucket: the first of its own random stream that can be dug to the clue count."""
    rng = random.Random(f"evaluation {SEED} {side} {clues} {number}")
    while True:
        grid, solution = sudoku.make(rng, sudoku.SHAPES[side], clues)
        if sum(value > 0 for value in grid) == clues:
            prompt = tasks.SUDOKU_PROMPTS[0].format(sudoku.text(grid, side))
            return tasks.Example(f"sudoku{side}", prompt, sudoku.text(solution, side)), grid


def answer(session: Session, example: tasks.Example, seed: int) -> tuple[str, int, int, int, bool]:
    """-> visible text, denoising steps, answer tokens, canvases, whether all converged."""
    messages = [Message(role="user", content=example.prompt)]
    decoder = AnswerDecoder(session.tokenizer)
    text, steps, tokens, canvases, converged = "", 0, 0, 0, True
    for event in session.answer(messages, seed=seed, thinking=example.thinking):
        if isinstance(event, CanvasCommitted):
            converged &= event.converged
        elif isinstance(event, Finished):
            pieces = decoder.feed(event.tokens) + decoder.close()
            text = "".join(piece.text for piece in pieces if piece.kind == "answer")
            steps, tokens, canvases = event.steps, len(event.tokens), event.canvases
    return text, steps, tokens, canvases, converged


def measure(session: Session, name: str, count: int, make: Case) -> Row:
    """`make(number)` gives an example and its judge."""
    solved = steps = tokens = canvases = unconverged = 0
    for number in range(count):
        example, right = make(number)
        text, took, length, blocks, converged = answer(session, example, seed=number)
        solved += right(text)
        steps, tokens, canvases, unconverged = (
            steps + took,
            tokens + length,
            canvases + blocks,
            unconverged + (not converged),
        )
    return Row(name, count, solved / count, steps / count, tokens / steps, canvases / count, unconverged / count)


def sudoku_case(side: int, clues: int, thinking: bool, number: int) -> tuple[tasks.Example, Callable[[str], bool]]:
    example, grid = puzzle(side, clues, number)
    if thinking:
        example = tasks.thoughtful(example)
    return example, lambda text: sudoku.solves(text, grid, sudoku.SHAPES[side])


def text_case(name: str, number: int) -> tuple[tasks.Example, Callable[[str], bool]]:
    example = tasks.text_example(random.Random(f"evaluation {SEED} {name} {number}"), name, evaluation=True)
    return example, lambda text: text == example.answer


def refusal_case(model: tasks.Model, number: int) -> tuple[tasks.Example, Callable[[str], bool]]:
    example = tasks.refusal(random.Random(f"evaluation {SEED} refusal {number}"), model, evaluation=True)
    return example, lambda text: text == example.answer


def cases(model: tasks.Model) -> Mapping[str, Case]:
    """The buckets of one of the two models, by name."""
    if model == "text":
        names = {name: name for name in tasks.OPEN} | {name: f"{name} (memorised)" for name in tasks.CLOSED}
        return {shown: partial(text_case, name) for name, shown in names.items() if name != tasks.OUT_OF_SCOPE} | {
            tasks.OUT_OF_SCOPE: partial(refusal_case, model)
        }
    sizes = {
        f"{side}×{side}, {clues} clues": partial(sudoku_case, side, clues, False)
        for side, buckets in BUCKETS.items()
        for clues in buckets
    }
    return sizes | {
        "9×9, 36 clues, thinking": partial(sudoku_case, 9, 36, True),
        tasks.OUT_OF_SCOPE: partial(refusal_case, model),
    }


def line(row: Row) -> str:
    """A row of a Markdown table."""
    return (
        f"| {row.task} | {row.solved:.1%} | {row.steps:.1f} | {row.tokens_per_step:.1f} | {row.canvases:.1f} "
        f"| {row.unconverged:.1%} |"
    )


HEADER = "| task | exact | steps | tokens a step | canvases | did not converge |\n|---|---|---|---|---|---|"


def read(folder: Path) -> list[Row]:
    """What was measured of a demo checkpoint."""
    return [Row(**row) for row in json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))["rows"]]


def side_by_side(forms: Mapping[str, list[Row]]) -> str:
    """A Markdown table of exact answers and mean steps, a column for each form that the weights are stored in."""
    head = [f"| task | {' | '.join(forms)} |", "|---" * (len(forms) + 1) + "|"]
    body = [
        f"| {rows[0].task} | {' | '.join(f'{row.solved:.1%} in {row.steps:.1f}' for row in rows)} |"
        for rows in zip(*forms.values(), strict=True)
    ]
    return "\n".join(head + body)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m dgemma_local.demo.evaluate", description=__doc__.split("\n")[0])
    parser.add_argument("model", choices=sorted(FOLDERS))
    parser.add_argument("--folder", help="another checkpoint of that model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--count", type=int, default=200, help="cases a bucket")
    parser.add_argument("--out", type=Path, help="write the rows as JSON here")
    options = parser.parse_args(arguments)
    session = open_session(options.folder or str(FOLDERS[options.model]), Wishes(dtype=options.dtype))
    start = time.perf_counter()
    print(HEADER, flush=True)
    rows = []
    for name, make in cases(options.model).items():
        rows.append(measure(session, name, options.count, make))
        print(line(rows[-1]), flush=True)
    print(f"\n{options.count} cases a row, {time.perf_counter() - start:.0f} s")
    if options.out is not None:
        content = {"seed": SEED, "dtype": options.dtype or "as stored", "rows": [asdict(row) for row in rows]}
        options.out.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
