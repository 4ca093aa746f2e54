"""Writes docs/canvas.svg: the demo model solving a sudoku. `python tests/make_picture.py [SEED]`."""

import sys
from pathlib import Path

from dgemma_local.session import open_session
from dgemma_local.ui.canvas import CONTROL, Vocabulary
from dgemma_local.ui.picture import picture

SUDOKU = """\
530070000
600195000
098000060
800060003
400803001
700020006
060000280
000419005
000080079"""


def main() -> None:
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    session = open_session("demo")
    tokenizer = session.tokenizer
    vocabulary = Vocabulary(
        glyph=lambda token: CONTROL if tokenizer.is_control(token) else tokenizer.piece(token),
        ends=frozenset(session.generation.end_ids),
    )
    prompt = "Solve this sudoku:\n" + SUDOKU.replace("0", ".")
    events = list(session.answer([{"role": "user", "content": prompt}], seed=seed))
    path = Path(__file__).parent.parent / "docs" / "canvas.svg"
    path.parent.mkdir(exist_ok=True)
    path.write_text(picture(events, vocabulary), encoding="utf-8")


if __name__ == "__main__":
    main()
