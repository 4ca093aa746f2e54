"""Sudoku of 4×4, 6×6 and 9×9 cells: solve, make with one solution only, shuffle by the symmetries of the rules.

A grid is a flat tuple of numbers, row by row, 0 for an empty cell.
"""

import random
from dataclasses import dataclass

Grid = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """Box height × box width; the side is their product."""

    box_rows: int
    box_columns: int

    @property
    def side(self) -> int:
        return self.box_rows * self.box_columns

    @property
    def units(self) -> list[tuple[int, int, int]]:
        """(row, column, box) of every cell."""
        n, r, c = self.side, self.box_rows, self.box_columns
        return [(i // n, i % n, i // n // r * r + i % n // c) for i in range(n * n)]


SHAPES = {4: Shape(2, 2), 6: Shape(2, 3), 9: Shape(3, 3)}


def count_solutions(grid: Grid, shape: Shape, limit: int, rng: random.Random | None = None) -> tuple[int, Grid | None]:
    """How many solutions, up to `limit`, and the first found (a random one if `rng` is given).

    Depth first over the cell with the fewest candidates; candidates are bit sets a row, column and box.
    """
    n, units = shape.side, shape.units
    full = (1 << n) - 1
    rows, columns, boxes = [full] * n, [full] * n, [full] * n
    cells = list(grid)
    empty = []
    for i, value in enumerate(cells):
        r, c, b = units[i]
        if value == 0:
            empty.append(i)
            continue
        bit = 1 << (value - 1)
        if not rows[r] & columns[c] & boxes[b] & bit:
            return 0, None
        rows[r] ^= bit
        columns[c] ^= bit
        boxes[b] ^= bit
    found: list[Grid] = []
    count = 0

    def search() -> bool:
        """True once `limit` solutions are known."""
        nonlocal count
        if not empty:
            count += 1
            if not found:
                found.append(tuple(cells))
            return count >= limit
        best, fewest, options = -1, n + 1, 0
        for at, i in enumerate(empty):
            r, c, b = units[i]
            free = rows[r] & columns[c] & boxes[b]
            candidates = free.bit_count()
            if candidates < fewest:
                best, fewest, options = at, candidates, free
                if candidates <= 1:
                    break
        if fewest == 0:
            return False
        i = empty[best]
        empty[best] = empty[-1]
        empty.pop()
        r, c, b = units[i]
        values = [v for v in range(n) if options >> v & 1]
        if rng is not None:
            rng.shuffle(values)
        stop = False
        for v in values:
            bit = 1 << v
            rows[r] ^= bit
            columns[c] ^= bit
            boxes[b] ^= bit
            cells[i] = v + 1
            stop = search()
            rows[r] ^= bit
            columns[c] ^= bit
            boxes[b] ^= bit
            if stop:
                break
        cells[i] = 0
        empty.append(i)
        empty[best], empty[-1] = empty[-1], empty[best]
        return stop

    search()
    return count, found[0] if found else None


def make(rng: random.Random, shape: Shape, clues: int) -> tuple[Grid, Grid]:
    """(puzzle, solution): exactly one solution, and `clues` numbers given, or as few as digging once round allows."""
    n = shape.side
    _, solution = count_solutions((0,) * (n * n), shape, 1, rng)
    assert solution is not None  # an empty grid has one
    puzzle = list(solution)
    order = list(range(n * n))
    rng.shuffle(order)
    given = n * n
    for i in order:
        if given == clues:
            break
        value, puzzle[i] = puzzle[i], 0
        if count_solutions(tuple(puzzle), shape, 2)[0] == 1:
            given -= 1
        else:
            puzzle[i] = value
    return tuple(puzzle), solution


def reveal(rng: random.Random, puzzle: Grid, solution: Grid, clues: int) -> Grid:
    """More of the solution, up to `clues` numbers; a puzzle with one solution keeps it."""
    empty = [i for i, value in enumerate(puzzle) if value == 0]
    more = max(0, clues - (len(puzzle) - len(empty)))
    shown = list(puzzle)
    for i in rng.sample(empty, min(more, len(empty))):
        shown[i] = solution[i]
    return tuple(shown)


def shuffle(rng: random.Random, shape: Shape, *grids: Grid) -> tuple[Grid, ...]:
    """The same symmetry on every grid: numbers renamed, rows and columns permuted within and by bands, transposed."""
    n = shape.side

    def lines(band: int) -> list[int]:
        bands = rng.sample(range(n // band), n // band)
        return [b * band + i for b in bands for i in rng.sample(range(band), band)]

    rows, columns = lines(shape.box_rows), lines(shape.box_columns)
    names = [0, *rng.sample(range(1, n + 1), n)]
    flip = shape.box_rows == shape.box_columns and rng.random() < 0.5
    where = [columns[c] * n + rows[r] if flip else rows[r] * n + columns[c] for r in range(n) for c in range(n)]
    return tuple(tuple(names[grid[i]] for i in where) for grid in grids)


def text(grid: Grid, side: int, empty: str = ".") -> str:
    """Rows of digits, a newline between them."""
    signs = "".join(str(value) if value else empty for value in grid)
    return "\n".join(signs[i : i + side] for i in range(0, side * side, side))


def solves(answer: str, puzzle: Grid, shape: Shape) -> bool:
    """Whether `answer` is a complete grid that keeps the puzzle's clues and breaks no rule."""
    n = shape.side
    rows = answer.strip().split("\n")
    if len(rows) != n or any(len(row) != n or not row.isascii() or not row.isdigit() for row in rows):
        return False
    grid = tuple(int(sign) for row in rows for sign in row)
    kept = all(clue in (0, value) for clue, value in zip(puzzle, grid, strict=True))
    return kept and all(grid) and count_solutions(grid, shape, 1)[0] == 1
