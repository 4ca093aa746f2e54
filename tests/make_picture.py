"""Writes docs/canvas.svg: the demo model solving a sudoku. `python tests/make_picture.py [SEED]`."""

import sys
from pathlib import Path

from dgemma_local.session import open_session
from dgemma_local.ui.canvas import CONTROL, Vocabulary
from dgemma_local.ui.picture import picture

ROOT = Path(__file__).parent.parent


def main() -> None:
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    session = open_session("demo")
    tokenizer = session.tokenizer
    vocabulary = Vocabulary(
        glyph=lambda token: CONTROL if len(tokenizer.piece(token)) > 1 else tokenizer.piece(token),
        ends=frozenset(session.generation.end_ids),
    )
    prompt = (ROOT / "examples" / "sudoku.txt").read_text(encoding="utf-8").rstrip("\n")
    events = list(session.answer([{"role": "user", "content": prompt}], seed=seed))
    path = ROOT / "docs" / "canvas.svg"
    path.parent.mkdir(exist_ok=True)
    path.write_text(picture(events, vocabulary), encoding="utf-8")


if __name__ == "__main__":
    main()
