"""What the presets of the sampler cost and give, on the demo models: `python tests/compare_presets.py`.

Every bucket of the held-out evaluation (`dgemma_local.demo.evaluate`), the same cases and seeds for each preset, the presets
in turn within a bucket, so that a machine that slows down slows all of them: exact answers, steps an answer, seconds.
The demo models are small and sure of themselves; what a preset costs the 26B model, its own evaluation has to say.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

from dgemma_local.demo.evaluate import Case, Row, cases, measure
from dgemma_local.demo.render import FOLDERS
from dgemma_local.presets import Preset, applied
from dgemma_local.session import Session, open_session

COUNT = 6  # cases a bucket: 17 buckets of sudoku and 9 of text come to some 150


@dataclass(slots=True)
class Tally:
    """One preset over all buckets."""

    answers: int = 0
    exact: float = 0.0
    steps: float = 0.0
    unconverged: float = 0.0
    seconds: float = 0.0

    def add(self, row: Row, seconds: float) -> None:
        self.answers += row.count
        self.exact += row.solved * row.count
        self.steps += row.steps * row.count
        self.unconverged += row.unconverged * row.count
        self.seconds += seconds


def compare(session: Session, buckets: dict[str, Case], count: int) -> dict[Preset, Tally]:
    """Each preset's tally."""
    own = session.generation
    tallies = {preset: Tally() for preset in Preset}
    for number, (name, make) in enumerate(buckets.items()):
        turn = [*Preset][number % len(Preset) :] + [*Preset][: number % len(Preset)]
        for preset in turn:
            session.generation = applied(own, preset)
            start = time.perf_counter()
            row = measure(session, name, count, make)
            tallies[preset].add(row, time.perf_counter() - start)
    session.generation = own
    return tallies


def table(model: str, tallies: dict[Preset, Tally]) -> Sequence[str]:
    """A Markdown table."""
    lines = [f"| {model} | exact | steps an answer | s an answer | did not converge |", "|---|---|---|---|---|"]
    for preset, tally in tallies.items():
        parts = (value / tally.answers for value in (tally.exact, tally.steps, tally.seconds, tally.unconverged))
        exact, steps, seconds, late = parts
        lines.append(f"| {preset} | {exact:.1%} | {steps:.1f} | {seconds:.3f} | {late:.1%} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=COUNT, help="cases a bucket")
    options = parser.parse_args()
    for model in sorted(FOLDERS):
        session = open_session(str(FOLDERS[model]))
        tallies = compare(session, dict(cases(model)), options.count)
        print("\n".join([*table(model, tallies), f"{tallies[Preset.balanced].answers} answers a row", ""]), flush=True)


if __name__ == "__main__":
    main()
