"""A recording to replay, whose answer is known, and its file: `from replayed import file as file`."""

from pathlib import Path
from typing import Any

import pytest
import recordings

from dgemma_local.recording import Piece, Recording

ANSWER = "Hi there\n  two  lines"
CANVASES, STEPS, LENGTH = 2, 4, 16


def made(answer: str = ANSWER, **rest: Any) -> Recording:
    """A recording whose answer is known, though its tokens read otherwise."""
    found = recordings.make(**({"canvases": CANVASES, "steps": STEPS, "length": LENGTH} | rest))
    found.pieces = [() for _ in found.events]
    found.pieces[-1] = (Piece("thought", "hm"), Piece("answer", answer)) if answer else ()
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    recordings.write(path, made())
    return path
