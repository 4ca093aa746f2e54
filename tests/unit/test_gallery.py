"""The pictures are of today: of the committed recordings, and those of what the demo models do now."""

import re
from dataclasses import replace
from pathlib import Path

import make_gallery
import pytest
from make_gallery import DOCS, PICTURES, RECORDINGS, ROOT, RUNS, recorded

from dgemma_local.events import StepDone
from dgemma_local.recording import open_recording
from dgemma_local.states import State
from dgemma_local.ui.export import moments, outcome

REDRAW = "stale: python tests/make_gallery.py"
RECORD = "stale: python tests/make_gallery.py --record"
MOST_BYTES = 1_000_000  # of all that is committed; a clone should stay light
NEAR = 2e-3  # nats: entropies are written to a thousandth, and differ a little from CPU to CPU


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_the_export_makes_now(name: str, tmp_path: Path) -> None:
    made, kept = make_gallery.draw(name, tmp_path), DOCS / name
    if made.suffix in (".gif", ".png"):
        assert pixels(made) == pixels(kept), REDRAW
    else:
        assert made.read_bytes() == kept.read_bytes(), REDRAW


def pixels(path: Path) -> list[tuple[tuple[int, int], int, bytes]]:
    """Size, milliseconds and colours of every frame: how they are packed may differ from one zlib to the next."""
    from PIL import Image, ImageSequence

    with Image.open(path) as image:
        return [
            (frame.size, int(frame.info.get("duration", 0)), frame.convert("RGBA").tobytes())
            for frame in ImageSequence.Iterator(image)
        ]


@pytest.mark.parametrize("name", RUNS)
def test_a_recording_is_what_the_product_records_now(name: str, tmp_path: Path) -> None:
    make_gallery.record(tmp_path / name, RUNS[name])
    now, then = open_recording(tmp_path / name), recorded(name)
    assert then.notice is None
    assert replace(then.header, dgemma=now.header.dgemma) == now.header, RECORD
    assert then.words == now.words and then.pieces == now.pieces, RECORD
    assert len(then.events) == len(now.events), RECORD
    for new, old in zip(now.events, then.events, strict=True):
        if isinstance(new, StepDone) and isinstance(old, StepDone):
            assert old.entropy == pytest.approx(new.entropy, abs=NEAR), RECORD
            assert replace(old, entropy=new.entropy) == new, RECORD
        else:
            assert new == old, RECORD


def test_the_sudoku_shows_every_state_and_is_solved() -> None:
    recording = recorded("sudoku.jsonl.gz")
    end = outcome(recording)
    assert end.thaws >= 3
    assert end.replacements >= 1
    assert end.corrected >= 3
    states = {state for seen in moments(recording, PICTURES["canvas.svg"][1]) for state in seen.states}
    assert states >= {State.FROZEN, State.FRESH, State.REPLACED, State.THAWED, State.NOISE, State.PAST}
    for name in ("sudoku.jsonl.gz", "thinking.jsonl.gz"):
        asked, solved = RUNS[name].prompt.split("\n")[1:], recorded(name).text.strip().split("\n")
        assert all(
            clue in (".", cell)
            for row, answer in zip(asked, solved, strict=True)
            for clue, cell in zip(row, answer, strict=True)
        )
        boxes = ["".join(solved[r + i][c : c + 3] for i in range(3)) for r in (0, 3, 6) for c in (0, 3, 6)]
        for unit in [*solved, *map("".join, zip(*solved, strict=True)), *boxes]:
            assert sorted(unit) == list("123456789")


def test_two_canvases_are_shown() -> None:
    for name in ("thinking.jsonl.gz", "table.jsonl"):
        assert len(recorded(name).canvases) == 2


def test_nothing_is_committed_that_the_script_does_not_make() -> None:
    assert {path.name for path in RECORDINGS.iterdir()} == set(RUNS)
    kept = {str(path.relative_to(DOCS)) for path in (DOCS / "gallery").iterdir()} - {"gallery/README.md"}
    assert kept == {name for name in PICTURES if name.startswith("gallery/")}
    sizes = [path.stat().st_size for path in (*RECORDINGS.iterdir(), *(DOCS / name for name in PICTURES))]
    assert sum(sizes) < MOST_BYTES
    assert (DOCS / "canvas.svg").stat().st_size < 60_000


def test_the_gallerys_page_shows_each_picture_and_links_nothing_else() -> None:
    page = (DOCS / "gallery" / "README.md").read_text(encoding="utf-8")
    links = set(re.findall(r"\]\((?!http)([^)#]+)", page)) | set(re.findall(r'(?:src|srcset)="([^"]+)"', page))
    assert all((DOCS / "gallery" / link).exists() for link in links), links
    files = {(DOCS / "gallery" / link).resolve() for link in links}
    assert {(DOCS / name).resolve() for name in PICTURES} <= files
    assert {(RECORDINGS / name).resolve() for name in RUNS} <= files
    assert (ROOT / "tests" / "make_gallery.py").resolve() in files
