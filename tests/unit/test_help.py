"""Every command's help is a page that teaches: examples that parse, groups of options, where things go, exit codes."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dgemma_local import cli
from dgemma_local.cli_help import PAGES
from dgemma_local.cli_page import WIDEST, Page
from dgemma_local.errors import kinds
from dgemma_local.preferences import leaves

ROOT = Path(__file__).parent.parent.parent
GROUP: Any = typer.main.get_command(cli.app)
COMMANDS = {" ".join(path): command for path, command in leaves(GROUP)}


@pytest.fixture(autouse=True)
def a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERMINAL_WIDTH", "100")


def shown(*words: str) -> str:
    found = CliRunner().invoke(cli.app, [*words, "--help"])
    assert found.exit_code == 0 and found.stderr == ""
    return found.stdout


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_has_a_page(words: str) -> None:
    page = PAGES[words]
    text = shown(*words.split())
    assert isinstance(COMMANDS[words], Page)
    assert all(example in text for example in page.examples)
    assert "Output: " in text and "Exit codes: 0 done" in text
    assert all(f"{kind.exit_code} " in text for kind in page.errors)
    assert ("DGEMMA_" in text) == (words not in ("version", "completion"))


@pytest.mark.parametrize("words", COMMANDS)
def test_it_fits_a_hundred_columns(words: str) -> None:
    for line in shown(*words.split()).splitlines():
        assert len(line.rstrip()) <= WIDEST, line


def parsed(example: str) -> tuple[str, dict[str, Any]]:
    """The command of an example, and its parameters. Raises where click would refuse it."""
    line = example.split("|")[-1].split(" # ")[0].split(">")[0]
    program, *words = shlex.split(line.strip().removeprefix("source <(").rstrip(")"))
    assert program == "dgemma", example
    command, path = GROUP, []
    while hasattr(command, "commands") and words and words[0] in command.commands:
        path.append(words.pop(0))
        command = command.commands[path[-1]]
    context = command.make_context(path[-1] if path else "dgemma", words, parent=None)
    return " ".join(path), context.params


@pytest.mark.parametrize(("words", "example"), [(words, each) for words in COMMANDS for each in PAGES[words].examples])
def test_every_example_parses(words: str, example: str) -> None:
    if example in ("dgemma --version", "dgemma models"):  # of the group itself
        assert CliRunner().invoke(cli.app, shlex.split(example)[1:]).exit_code == 0
    else:
        assert parsed(example)[0] == words


def test_an_example_that_is_wrong_would_be_seen() -> None:
    with pytest.raises(typer.BadParameter.__mro__[1]):  # type: ignore[arg-type]  # click's UsageError, wherever it lives
        parsed("dgemma run --no-such-flag")


def test_options_stand_in_groups() -> None:
    """But for --help, every option of the large commands has a heading."""
    for words in ("run", "replay", "bench"):
        loose = [
            each.name for each in COMMANDS[words].params if each.opts[0].startswith("-") and not each.rich_help_panel
        ]
        assert loose == [], words
        assert all(heading in shown(words) for heading in PAGES[words].panels)


def test_the_codes_have_words() -> None:
    assert len({kind.word for kind in kinds()}) == len(kinds())


@pytest.mark.parametrize("words", [(), ("run",), ("replay",), ("config",)])
def test_help_imports_no_torch(words: tuple[str, ...]) -> None:
    code = (
        f"import sys; sys.argv = ['dgemma', *{words!r}, '--help']\n"
        "for heavy in ('torch', 'transformers', 'compressed_tensors', 'triton', 'huggingface_hub', 'tokenizers'):\n"
        "    sys.modules[heavy] = None\n"
        "from dgemma_local.__main__ import main\nmain()"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, timeout=60)
    assert found.returncode == 0 and found.stderr == b"" and b"Usage" in found.stdout


ROOT = Path(__file__).parent.parent.parent
PAGES_OF_TEXT = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands_of(page: Path) -> list[str]:
    """The lines of its indented blocks that call dgemma, without the variables before and the words behind them."""
    lines = [line.strip() for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("    ")]
    return [
        found[0]
        for line in lines
        if (found := re.search(r"\bdgemma .*", line)) and re.match(r"([A-Z_]+=\S+ )*dgemma ", line)
    ]


def test_every_command_of_the_texts_parses() -> None:
    lines = [line for page in PAGES_OF_TEXT for line in commands_of(page)]
    assert len(lines) > 30
    for line in lines:
        if "…" not in line and line.split("#")[0].split() != ["dgemma", "models"]:  # of the group itself
            parsed(line.split(" #")[0].split(" <")[0])


def test_thinking_left_out_is_not_sold_as_faster() -> None:
    """A model that may not think answers with blanks more often, and takes its canvases all the same."""
    pages = [page.read_text(encoding="utf-8") for page in PAGES_OF_TEXT] + [shown(*words.split()) for words in COMMANDS]
    for sentence in (sentence for page in pages for sentence in re.split(r"(?<=[.:|])\s", page)):
        if re.search(r"\bthink", sentence, re.IGNORECASE):
            assert not re.search(r"\b(fast|faster|quick|quicker|speed)\b", sentence, re.IGNORECASE), sentence
