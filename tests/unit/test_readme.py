"""README says what is: its tables are those of the files they describe."""

import json
import re
from pathlib import Path

import pytest

from dgemma_local import errors
from dgemma_local.demo.evaluate import HEADER, Row, line
from dgemma_local.demo.render import FOLDERS

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_exit_code_is_in_the_table() -> None:
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)}
    ours = {kind.exit_code for kind in errors.DgemmaError.__subclasses__()}
    assert listed == {0, 1, 143, errors.INTERRUPTED, errors.BROKEN_PIPE} | ours
    assert len(ours) == len(errors.DgemmaError.__subclasses__())  # each has one of its own


@pytest.mark.parametrize("model", sorted(FOLDERS))
def test_the_evaluation_tables_are_the_committed_ones(model: str) -> None:
    rows = json.loads((FOLDERS[model] / "evaluation.json").read_text(encoding="utf-8"))["rows"]
    table = "\n".join([HEADER, *(line(Row(**row)) for row in rows)])
    assert table in README


def test_the_first_block_is_two_commands() -> None:
    """What .ci/run executes: install and answer, then test."""
    block = README.split("```sh\n")[1].split("\n```")[0].splitlines()
    assert len(block) == 2 and "dgemma run" in block[0] and "pytest" in block[1]


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
