"""README says what is: its tables are those of the files they describe."""

import re
from pathlib import Path

import pytest

from dgemma_local import errors
from dgemma_local.demo.evaluate import HEADER, line, read, side_by_side
from dgemma_local.demo.render import FOLDERS, MODELS

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_exit_code_is_in_the_table() -> None:
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)}
    ours = {kind.exit_code for kind in errors.DgemmaError.__subclasses__()}
    assert listed == {0, 1, 129, 143, errors.INTERRUPTED, errors.BROKEN_PIPE} | ours
    assert len(ours) == len(errors.DgemmaError.__subclasses__())  # each has one of its own


@pytest.mark.parametrize("model", sorted(FOLDERS))
def test_the_evaluation_tables_are_the_committed_ones(model: str) -> None:
    assert "\n".join([HEADER, *map(line, read(FOLDERS[model]))]) in README


def test_the_table_of_the_three_layouts_is_the_committed_one() -> None:
    forms = {"bf16": "sudoku", "FP8-dynamic": "sudoku-fp8", "NVFP4": "sudoku-nvfp4"}
    assert side_by_side({form: read(MODELS / folder) for form, folder in forms.items()}) in README


def test_the_first_block_is_two_commands() -> None:
    """What .ci/run executes: install and answer, then test."""
    block = README.split("```sh\n")[1].split("\n```")[0].splitlines()
    assert len(block) == 2 and "dgemma run" in block[0] and "pytest" in block[1]


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
