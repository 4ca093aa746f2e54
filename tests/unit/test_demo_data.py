"""What the demo models are trained on: puzzles, tasks, their vocabulary, their batches."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma_local.demo import phrases, sudoku, tasks, vocabulary
from dgemma_local.demo.render import CANVAS, END_OF_TURN, FOLDERS, PAD, Renderer, padded
from dgemma_local.demo.sudoku import SHAPES, Grid
from dgemma_local.demo.tasks import Example
from dgemma_local.tokens import Tokenizer

# ── sudoku ────────────────────────────────────────────────────────────────────────────────────────────────────────


def conflicts(grid: Grid, side: int) -> bool:
    """Whether a number stands twice in a row, column or box; written without the code under test."""
    high, wide = {4: (2, 2), 6: (2, 3), 9: (3, 3)}[side]
    seen = set()
    for i, value in enumerate(grid):
        row, column = divmod(i, side)
        for unit in (("row", row), ("column", column), ("box", row // high, column // wide)):
            if value and (unit, value) in seen:
                return True
            seen.add((unit, value))
    return False


def plain_count(grid: Grid, side: int) -> int:
    """All solutions, one cell after another."""
    if 0 not in grid:
        return 1
    at = grid.index(0)
    filled = ((*grid[:at], value, *grid[at + 1 :]) for value in range(1, side + 1))
    return sum(plain_count(grid, side) for grid in filled if not conflicts(grid, side))


@given(st.lists(st.integers(0, 4), min_size=16, max_size=16), st.integers(4, 16))
@settings(max_examples=40, deadline=None)
def test_solutions_are_counted(values: list[int], least: int) -> None:
    """4×4 grids, most of them without a solution, against trying everything."""
    for grid in (tuple(values), tuple(v if i >= least else 0 for i, v in enumerate(values))):
        want = 0 if conflicts(grid, 4) else plain_count(grid, 4)
        count, found = sudoku.count_solutions(grid, SHAPES[4], 1000)
        assert count == want and (found is None) is (want == 0)
        assert sudoku.count_solutions(grid, SHAPES[4], 2)[0] == min(2, want)
        if found is not None:
            assert not conflicts(found, 4) and all(a in (0, b) for a, b in zip(grid, found, strict=True))


def test_all_grids_of_4_by_4() -> None:
    assert sudoku.count_solutions((0,) * 16, SHAPES[4], 1000)[0] == 288


@pytest.mark.parametrize(("side", "clues"), [(4, 4), (4, 8), (6, 9), (6, 18), (9, 25), (9, 36), (9, 81)])
def test_every_puzzle_has_one_solution_and_its_clues(side: int, clues: int) -> None:
    for seed in range(3):
        puzzle, solution = sudoku.make(random.Random(seed), SHAPES[side], clues)
        given_ = sum(value > 0 for value in puzzle)
        assert given_ == clues or (
            given_ > clues and clues <= tasks.CLUES[side][0] + 1
        )  # one round of digging may end above
        assert sudoku.count_solutions(puzzle, SHAPES[side], 2) == (1, solution)
        assert 0 not in solution and not conflicts(solution, side)
        assert all(a in (0, b) for a, b in zip(puzzle, solution, strict=True))


@given(st.sampled_from([4, 6, 9]), st.integers(0, 500), st.integers(0, 81))
@settings(max_examples=30, deadline=None)
def test_shuffling_and_revealing_keep_a_puzzle_valid(side: int, seed: int, clues: int) -> None:
    shape, rng = SHAPES[side], random.Random(seed)
    base = BASES[side]
    puzzle, solution = sudoku.shuffle(rng, shape, *base)
    assert not conflicts(solution, side) and sudoku.count_solutions(puzzle, shape, 2) == (1, solution)
    before = sum(value > 0 for value in base[0])
    assert sum(value > 0 for value in puzzle) == before
    shown = sudoku.reveal(rng, puzzle, solution, clues)
    assert sum(value > 0 for value in shown) == min(max(before, clues), side * side)
    assert all(a in (0, b) and b in (0, s) for a, b, s in zip(puzzle, shown, solution, strict=True))


BASES = {side: sudoku.make(random.Random(side), SHAPES[side], clues) for side, clues in ((4, 5), (6, 12), (9, 30))}


@pytest.mark.parametrize("side", [4, 6, 9])
def test_shuffling_reaches_what_the_rules_allow(side: int) -> None:
    """Numbers renamed, lines moved but bands kept, and boards of square boxes transposed: told by marked grids."""
    rng, high = random.Random(1), SHAPES[side].box_rows
    plain = (1,) * side * side
    rows = tuple(1 + i // side for i in range(side * side))
    bands = tuple(1 + i // side // high for i in range(side * side))
    names, orders, flips = set(), set(), set()
    for _ in range(200):
        one, by_row, by_band = sudoku.shuffle(rng, SHAPES[side], plain, rows, bands)
        names.add(one)
        flip = by_row[0] != by_row[1]
        lines = by_row[:side] if flip else by_row[::side]
        assert by_row == tuple(lines[i % side if flip else i // side] for i in range(side * side))
        held = by_band[:side] if flip else by_band[::side]
        assert all(len(set(held[i : i + high])) == 1 for i in range(0, side, high))
        orders.add(lines)
        flips.add(flip)
    assert names == {(name,) * side * side for name in range(1, side + 1)}
    assert len(orders) > 20 and flips == ({False} if side == 6 else {False, True})


SOLVED = "1234\n3412\n2143\n4321"
PUZZLE: Grid = (1, 0, 0, 0, 0, 0, 1, 2, 2, 1, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (SOLVED, True),
        (f"  {SOLVED}\n\n", True),
        (SOLVED.replace("4321", "4312"), False),  # breaks a rule
        (SOLVED.replace("4321", "432."), False),
        (SOLVED.replace("4321", "4320"), False),
        (SOLVED.replace("4321", "432"), False),
        (SOLVED.replace("4321", "43215"), False),
        (SOLVED.replace("4", "5"), False),  # no such number on a board of four
        (SOLVED.replace("1", "²"), False),
        (SOLVED.replace("1", "١"), False),
        ("1243\n4312\n2134\n3421", True),  # this puzzle has two solutions
        ("2143\n4321\n1234\n3412", False),  # valid, with other clues
        (f"{SOLVED}\n1234", False),
        ("\n".join(SOLVED.split("\n")[:3]), False),
        (SOLVED.replace("\n", ""), False),
        ("", False),
    ],
)
def test_solves(answer: str, right: bool) -> None:
    assert sudoku.solves(answer, PUZZLE, SHAPES[4]) is right


def test_a_grid_as_text() -> None:
    assert sudoku.text(PUZZLE, 4) == "1...\n..12\n21..\n...."
    assert sudoku.text(PUZZLE, 4, "_") == "1___\n__12\n21__\n____"


# ── tasks ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def puzzle_example(seed: int, side: int) -> Example:
    rng = random.Random(seed)
    return tasks.sudoku_example(rng, side, BASES[side], rng.randint(*tasks.CLUES[side]))


def of_all_kinds(count: int) -> list[Example]:
    """Text and sudoku, each with and without a thought, and what both models refuse."""
    text = [tasks.text_example(random.Random(f"{name} {n}"), name) for name in tasks.TEXT for n in range(count)]
    puzzles = [puzzle_example(n, side) for side in (4, 6, 9) for n in range(count // 10)]
    thoughts = [tasks.thoughtful(example) for example in text + puzzles if not example.thinking]
    models: tuple[tasks.Model, ...] = ("sudoku", "text")
    refused = [tasks.refusal(random.Random(f"{model} {n}"), model) for model in models for n in range(count)]
    return text + puzzles + thoughts + refused


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return of_all_kinds(300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vocabulary")
    vocabulary.write(path)
    return path


@pytest.fixture(scope="module")
def render(folder: Path) -> Renderer:
    return Renderer(folder)


@given(st.sampled_from(sorted(tasks.OPEN)), st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_what_is_held_out_is_never_trained_on(name: str, seed: int) -> None:
    assert not tasks.held_out(tasks.text_example(random.Random(seed), name).prompt)
    assert tasks.held_out(tasks.text_example(random.Random(seed), name, evaluation=True).prompt)


@pytest.mark.parametrize("name", sorted(tasks.OPEN))
def test_one_prompt_in_ten_is_held_out(name: str) -> None:
    rng = random.Random(0)
    prompts = {tasks.OPEN[name](rng).prompt for _ in range(3000)}
    assert 0.07 < sum(map(tasks.held_out, prompts)) / len(prompts) < 0.13


def test_each_model_refuses_what_is_the_other_s() -> None:
    """A thought may come first; the prompt is a text request, or, for the model of words, a grid too."""
    grids: Counter[tasks.Model] = Counter()
    for n in range(200):
        for model, other in (("sudoku", "text"), ("text", "sudoku")):
            e = tasks.refusal(random.Random(n), model)
            assert e.task.removesuffix("-thinking") == tasks.OUT_OF_SCOPE
            assert (
                e.answer.endswith(f"<channel|>{phrases.SORRY[model]}")
                if e.thinking
                else e.answer == phrases.SORRY[model]
            )
            assert phrases.SORRY[other] not in e.answer
            grids[model] += any(len(row) > 3 and set(row) <= set("0123456789._") for row in e.prompt.split("\n"))
    assert grids["sudoku"] == 0 and 20 < grids["text"] < 60


def test_an_example_is_a_function_of_its_seed() -> None:
    assert of_all_kinds(10) == of_all_kinds(10)


def test_examples_are_right(examples: list[Example]) -> None:
    """Those whose answer can be told from the prompt another way."""
    checked: Counter[str] = Counter()
    for e in examples:
        if e.thinking or e.task == tasks.OUT_OF_SCOPE:
            continue
        if e.task == "reverse":
            assert e.answer.split() == e.prompt.removeprefix("Reverse the words: ").split()[::-1]
        elif e.task == "uppercase":
            assert e.answer.lower() == e.prompt.removeprefix("In upper case: ").lower() and e.answer.isupper()
        elif e.task == "spell":
            assert e.answer.replace("-", "") == e.prompt.rstrip(".").split()[-1]
        elif e.task == "times table":
            n = int(e.prompt.rstrip(".").split()[-1])
            lines = [line.split() for line in e.answer.split("\n")]
            assert [(int(a), int(b), int(c)) for a, _, b, _, c in lines] == [(n, i, n * i) for i in range(1, 13)]
        elif e.task.startswith("sudoku"):
            side = int(e.task[-1])
            rows = [row for row in e.prompt.split("\n") if len(row) == side and set(row) <= set("0123456789._")]
            clues = tuple(int(sign) if sign.isdigit() else 0 for row in rows for sign in row)
            assert len(clues) == side * side and sudoku.solves(e.answer, clues, SHAPES[side])
        else:
            continue
        checked[e.task] += 1
    assert set(checked) == {"reverse", "uppercase", "spell", "times table", "sudoku4", "sudoku6", "sudoku9"}


def test_answers_fit_their_canvases(examples: list[Example], render: Renderer) -> None:
    """One, but for the times table and the sudoku of 9 that is thought through: those show a second canvas."""
    for e in examples:
        canvases = render.canvases(e)
        if e.task.startswith("times table") or e.task == "sudoku9-thinking":
            assert len(canvases) == 2
        else:
            assert len(canvases) == 1, f"{len(render.encode(e.answer)) + 1} tokens: {e.answer}"
        assert all(len(canvas) == CANVAS for canvas in canvases)
        ids = [token for canvas in canvases for token in canvas]
        end = ids.index(END_OF_TURN)
        assert set(ids[end + 1 :]) <= {PAD} and PAD not in ids[:end]


def test_the_prompt_and_its_canvases_fit_the_context(examples: list[Example], render: Renderer) -> None:
    assert max(len(render.prompt(e)) + CANVAS * len(render.canvases(e)) for e in examples) <= 1024


def test_all_text_round_trips(examples: list[Example], render: Renderer) -> None:
    unknown = vocabulary.TOKENS.index("<unk>")
    for e in examples:
        for text in (e.prompt, e.answer):
            ids = render.encode(text)
            assert unknown not in ids
            assert render.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_vocabulary(folder: Path) -> None:
    assert len(vocabulary.TOKENS) == len(set(vocabulary.TOKENS)) == 128
    tokenizer = Tokenizer.load(folder, 128)
    printable = "".join(map(chr, range(0x20, 0x7F))) + "\n"
    ids = tokenizer.encode(printable)
    assert sorted(ids) == list(range(20, 116)) and tokenizer.decode(ids) == printable
    assert [tokenizer.encode(word) for word in vocabulary.WORDS] == [(116,), (117,), (118,), (119,)]
    assert len(tokenizer.encode("users")) == 5  # a whole word only
    assert tokenizer.encode("é€") == (3, 3)
    assert tokenizer.special.turn_close == END_OF_TURN and tokenizer.special.pad == PAD


def test_the_folders_hold_what_the_vocabulary_writes(folder: Path) -> None:
    made = [made for made in FOLDERS.values() if (made / "tokenizer.json").is_file()]
    assert made
    for other in made:
        for file in folder.iterdir():
            assert (other / file.name).read_text() == file.read_text(), other / file.name


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_training_renders_prompts_as_a_session_does(
    folder: Path, render: Renderer, thinking: bool, system: str | None
) -> None:
    example = Example("task", "Solve:\n12\n34", "", thinking, system)
    messages: list[Any] = [{"role": "user", "content": example.prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    assert render.prompt(example) == list(Tokenizer.load(folder, 128).prompt(messages, thinking=thinking))


def test_a_batch_pads_on_the_left(render: Renderer) -> None:
    made = [
        puzzle_example(1, 4),
        tasks.thoughtful(puzzle_example(2, 9)),
        tasks.text_example(random.Random(3), "times table"),
    ]
    committed = set()
    for seed in range(8):
        rng = random.Random(seed)
        rows, answers = zip(*(render.cut(e, rng) for e in made), strict=True)
        prompt, real = padded(list(rows))
        assert prompt.shape == real.shape and real.dtype == torch.bool and all(len(a) == CANVAS for a in answers)
        assert real.any(0).all()  # no wider than the longest
        for e, row, own, canvas in zip(made, prompt, real, answers, strict=True):
            n = int(own.sum())
            assert torch.equal(own, torch.arange(len(own)) >= len(own) - n) and (row[~own] == PAD).all()
            whole = [*render.prompt(e), *(token for c in render.canvases(e) for token in c)]
            assert [*row[own].tolist(), *canvas] == whole[: n + CANVAS]
            committed.add(n - len(render.prompt(e)))
    assert committed == {0, CANVAS}
