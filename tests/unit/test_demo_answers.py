"""Answers of the demo models to what they have never seen, read as what they claim to be: JSON by a JSON parser, a grid
by the rules of sudoku. A word that stands somewhere in a text proves less: an opening quote may be lost beside it.

`dgemma_local.demo.evaluate` measures the same with a larger count; its tables are README's.
"""

import json
from collections.abc import Iterator

import pytest
import torch

from dgemma_local.demo import evaluate, sudoku, tasks
from dgemma_local.demo.render import FOLDERS
from dgemma_local.session import Session, open_session

PROMPTS = 8  # of the open task json, on the evaluation's side of the hash
MISSES = 1  # that may not settle; the whole table has one in two hundred


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Which `open_session` leaves behind."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def words() -> Session:
    return open_session(str(FOLDERS["text"]))


@pytest.fixture(scope="module")
def puzzles() -> Session:
    return open_session(str(FOLDERS["sudoku"]))


def test_json_parses(words: Session) -> None:
    """Every answer whose canvas settled is the object that was asked for, key by key, types and all."""
    settled = 0
    for number in range(PROMPTS):
        example, _ = evaluate.text_case("json", number)
        assert tasks.held_out(example.prompt)
        text, *_, converged = evaluate.answer(words, example, seed=number)
        if converged:
            settled += 1
            assert json.loads(text) == json.loads(example.answer), example.prompt
    assert settled >= PROMPTS - MISSES


@pytest.mark.parametrize(("side", "clues"), [(4, 4), (4, 6), (6, 12), (9, 36)])
def test_grids_keep_the_rules(puzzles: Session, side: int, clues: int) -> None:
    """With as few clues as take tens of steps, and as many as take three."""
    for number in range(2):
        example, grid = evaluate.puzzle(side, clues, number)
        text, *_ = evaluate.answer(puzzles, example, seed=number)
        assert sudoku.solves(text, grid, sudoku.SHAPES[side]), text
