"""The pictures of README and docs/gallery, from the recordings in examples/recordings.

python tests/make_gallery.py             the pictures again, from the recordings
python tests/make_gallery.py --record    the recordings again, from the demo models; then the pictures
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from dgemma_local import cli
from dgemma_local.recording import Recording, open_recording
from dgemma_local.ui.export import Options, export

ROOT = Path(__file__).parent.parent
RECORDINGS, DOCS = ROOT / "examples" / "recordings", ROOT / "docs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What was asked of a demo model."""

    model: str
    prompt: str
    seed: int = 1
    thinking: bool = False

    @property
    def flags(self) -> list[str]:
        """Of `dgemma run`."""
        return ["-m", self.model, "-p", self.prompt, "--seed", str(self.seed), *["--think"] * self.thinking]


def sudoku(*rows: str) -> str:
    return "\n".join(("Solve this sudoku:", *rows))


RUNS = {
    # 32 numbers given; every state occurs, and the answer is right
    "sudoku.jsonl.gz": Run(
        model="demo",
        prompt=sudoku(
            ".3..6....",
            ".7...296.",
            "2.4..91..",
            "....86.9.",
            "..6.3..21",
            ".87.2.4..",
            ".4.....1.",
            "1.387....",
            ".95.1..82",
        ),
    ),
    "thinking.jsonl.gz": Run(
        model="demo",
        prompt=sudoku(
            "..5.29.3.",
            "....3....",
            ".9.7....2",
            "8...4.6..",
            ".263.1...",
            ".5..8..97",
            ".8.41..63",
            "6......5.",
            ".72.6.14.",
        ),
        thinking=True,
    ),
    "table.jsonl": Run(model="demo-text", prompt="Times table of 7."),
}
PICTURES = {
    "canvas.svg": ("sudoku.jsonl.gz", Options()),
    "canvas-light.svg": ("sudoku.jsonl.gz", Options(theme="light")),
    "gallery/thinking.svg": ("thinking.jsonl.gz", Options(view="both", width=100)),
    "gallery/table.svg": ("table.jsonl", Options(theme="light")),
    "gallery/sudoku.txt": ("sudoku.jsonl.gz", Options()),
    "gallery/sudoku.cast": ("sudoku.jsonl.gz", Options()),
    "gallery/sudoku.html": ("sudoku.jsonl.gz", Options()),
    "gallery/sudoku.gif": ("sudoku.jsonl.gz", Options()),
    "gallery/sudoku.png": ("sudoku.jsonl.gz", Options(step=16)),
    "gallery/curves.png": ("sudoku.jsonl.gz", Options(plot=True)),
}


def record(path: Path, run: Run) -> None:
    """What `dgemma run` records of a demo model."""
    cli.app(["run", *run.flags, "--device", "cpu", "--quiet", "--record", str(path)], standalone_mode=False)


def recorded(name: str) -> Recording:
    return open_recording(RECORDINGS / name)


def draw(name: str, folder: Path = DOCS) -> Path:
    """One picture, again."""
    source, options = PICTURES[name]
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    export(recorded(source), path, options)
    return path


def main() -> None:
    if "--record" in sys.argv[1:]:
        RECORDINGS.mkdir(parents=True, exist_ok=True)
        for name, run in RUNS.items():
            for _ in range(2):  # torch's first passes are slow; the second recording takes the place of the first
                record(RECORDINGS / name, run)
    for name in PICTURES:
        path = draw(name)
        print(f"{path.stat().st_size:>8} bytes  {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
