"""`dgemma pull` and `dgemma models`, against a hub on this machine."""

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from hub_server import COMMIT, Hub, Repository, checkpoint
from own_hub import own_hub
from typer.testing import CliRunner

from dgemma_local import hub
from dgemma_local.cli import Commands
from dgemma_local.cli_models import app_models, pull
from dgemma_local.hub.failures import size
from dgemma_local.registry import user_file
from dgemma_local.ui import shelf
from dgemma_local.ui.terminal import Terminal

ROOT = Path(__file__).parents[2]
NAME = "org/model"
TABLE = f'[big]\nrepository = "{NAME}"\nformat = "fp8"\nbytes = 4_000\n'

app = typer.Typer(cls=Commands, pretty_exceptions_enable=False)  # wired as in cli.py
app.add_typer(app_models, name="models")
app.command()(pull)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with own_hub({NAME: Repository(checkpoint())}, TABLE, tmp_path, monkeypatch) as running:
        yield running


def dgemma(*arguments: str, **more: Any) -> Result:
    return CliRunner().invoke(app, list(arguments), **more)


def error(found: Result, code: int) -> tuple[str, str]:
    assert found.exit_code == code, found.output
    what, fix = found.stderr.splitlines()[-2:]
    assert "Traceback" not in found.output
    return what.removeprefix("error: "), fix.removeprefix("  fix: ")


def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models--org--model" / "snapshots" / COMMIT


# ── pull ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_pull(server: Hub, tmp_path: Path) -> None:
    found = dgemma("pull", "big")
    assert (found.exit_code, found.stdout) == (0, f"{folder(tmp_path)}\n")
    lines = found.stderr.splitlines()
    assert lines[0] == f"org/model into {tmp_path / 'cache'}"
    assert "fetching 22 kB" in lines and "verifying 17 kB" in lines and lines[-1] == "big is complete: 22 kB"
    assert any(line.startswith("fetching: 100 %, ") and line.endswith("B/s") for line in lines)


def test_a_pull_without_a_terminal_says_how_far_it_is(server: Hub) -> None:
    """A line at every tenth, and the first before the last byte is there: in a log it is no hang."""
    server.repositories[NAME] = Repository(checkpoint(shards=12))
    lines = dgemma("pull", "big").stderr.splitlines()
    tenths = [int(line.split()[1]) for line in lines if line.startswith("fetching: ")]
    assert len(tenths) > 5 and tenths[-1] == 100 and tenths == sorted(set(tenths))


def test_pull_quietly(server: Hub, tmp_path: Path) -> None:
    found = dgemma("pull", "big", "--quiet")
    assert (found.exit_code, found.stdout, found.stderr) == (0, f"{folder(tmp_path)}\n", "")


def test_pull_goes_on(server: Hub) -> None:
    server.faults.budget = 9000
    what, fix = error(dgemma("pull", "big"), 10)
    assert "broke" in what and fix == "what arrived is kept; run the same command to go on"
    server.faults.budget, server.faults.down = None, False
    found = dgemma("pull", "big")
    assert found.exit_code == 0 and "of it are here" in found.stderr


def test_pull_verifies(server: Hub, tmp_path: Path) -> None:
    dgemma("pull", "big")
    path = folder(tmp_path) / "tokenizer.json"
    path.resolve().write_bytes(b"?" * path.stat().st_size)
    assert "damaged" not in dgemma("pull", "big").stderr
    assert "tokenizer.json is damaged on the disk; fetching it again" in dgemma("pull", "big", "--verify").stderr
    assert path.read_bytes() == checkpoint()["tokenizer.json"]


def test_pull_another_revision(server: Hub) -> None:
    assert error(dgemma("pull", "big", "--revision", "v9"), 10)[0] == "org/model has no revision 'v9'"
    assert dgemma("pull", "big", "--revision", COMMIT).exit_code == 0


def test_pull_what_has_a_folder(server: Hub, tmp_path: Path) -> None:
    found = dgemma("pull", "demo")
    assert found.exit_code == 0 and found.stdout.endswith("demo/models/sudoku\n") and "nothing to fetch" in found.stderr
    user_file().write_text('[big]\nfolder = "/no/such"\n')
    assert "is not there" in error(dgemma("pull", "big"), 4)[0]
    assert not server.log


def test_pull_what_is_not_known(server: Hub) -> None:
    assert error(dgemma("pull", "huge"), 4)[0] == "no model is called 'huge'"
    found = dgemma("pull")  # auto, and this hub has none of ours
    assert found.exit_code == 10 and "26b-a4b-nvfp4: NVFP4: " in found.stderr


def test_ctrl_c(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def press(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(hub, "fetch", press)
    found = dgemma("pull", "big")
    assert found.exit_code == 130
    assert found.stderr.splitlines()[1:] == ["what arrived is kept; run the same command to go on", "interrupted"]
    assert dgemma("pull", "big", "-q").stderr == "interrupted\n"


@pytest.mark.parametrize("fault", ["gated", "names", "gone"])
def test_failures_are_two_lines(server: Hub, fault: str) -> None:
    if fault == "gated":
        server.repositories[NAME].gated = True
    elif fault == "names":
        server.faults.names = {"README.md": "../x"}
    else:
        server.repositories.clear()
    found = dgemma("pull", "big", "--quiet")
    assert len(found.stderr.splitlines()) == 2 and error(found, 10)


# ── the list ──────────────────────────────────────────────────────────────────────────────────────────────────────


def here(name: str) -> tuple[str, list[str]]:
    """The `here` column of a model's row, and what is said below the table."""
    found = dgemma("models")
    assert found.exit_code == 0, found.output
    assert found.stdout == dgemma("models", "list").stdout
    lines = found.stdout.splitlines()
    at = lines[0].index("here")
    row = next(line for line in lines if line.startswith(f"{name} "))
    return row[at : at + 4].strip(), [line for line in lines if line.startswith(f"{name}: ")]


def test_the_list_knows_what_is_here(server: Hub, tmp_path: Path) -> None:
    assert here("big") == ("no", []) and here("demo") == ("yes", [])
    server.faults.budget = 9000
    dgemma("pull", "big")
    server.faults.budget, server.faults.down = None, False
    word, (line,) = here("big")
    assert word == "no" and line.endswith("kB of 4 kB are here; `dgemma pull big` brings the rest")
    dgemma("pull", "big")
    assert here("big") == ("yes", [f"big: 22 kB in {folder(tmp_path)}"])


def test_a_copy_that_may_not_be_used_does_not_spoil_the_list(server: Hub, tmp_path: Path) -> None:
    dgemma("pull", "big")
    path = folder(tmp_path) / "config.json"
    path.unlink()
    path.symlink_to("/etc/hostname")
    found = dgemma("models")
    assert found.exit_code == 0 and "is a link out of the cache" in found.stderr
    assert here("big")[0] == "no"


def test_the_list_needs_no_heavy_import(server: Hub) -> None:
    dgemma("pull", "big")
    code = """
import sys
from typer.testing import CliRunner
import typer
from dgemma_local.cli_models import app_models
found = CliRunner().invoke(app_models, [])
assert found.exit_code == 0 and "big: 22 kB in" in found.stdout
print({"torch", "transformers", "huggingface_hub", "httpx", "httpx2", "tokenizers"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n"


# ── rm ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Typed(io.StringIO):
    """A terminal at which this was typed."""

    def isatty(self) -> bool:
        return True


def test_rm(server: Hub, tmp_path: Path) -> None:
    dgemma("pull", "big")
    found = dgemma("models", "rm", "big", "--yes")
    assert (found.exit_code, found.stdout, found.stderr) == (0, "", "removed big: 22 kB freed\n")
    assert not folder(tmp_path).exists()
    assert error(dgemma("models", "rm", "big", "-y"), 4)[0] == "nothing of 'big' is on this machine"


@pytest.mark.parametrize(
    ("answer", "gone"), [("y\n", True), ("Yes\n", True), ("n\n", False), ("\n", False), ("", False), ("yep\n", False)]
)
def test_rm_asks(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, gone: bool) -> None:
    dgemma("pull", "big")

    def run() -> None:  # CliRunner puts its own stdin in place: take it away again
        monkeypatch.setattr(sys, "stdin", Typed(answer))

    monkeypatch.setattr("dgemma_local.hub.held", lambda entry, held=hub.held: (run(), held(entry))[1])
    found = dgemma("models", "rm", "big")
    assert found.exit_code == 0
    assert found.stderr.startswith(f"remove big, 22 kB in {tmp_path / 'cache'}? [y/N] ")
    assert found.stderr.endswith("removed big: 22 kB freed\n" if gone else "kept\n")
    assert folder(tmp_path).exists() is not gone


def test_rm_does_not_guess(server: Hub, tmp_path: Path) -> None:
    dgemma("pull", "big")
    what, fix = error(dgemma("models", "rm", "big"), 2)
    assert "not a terminal" in what and fix == "add --yes" and folder(tmp_path).exists()


def test_rm_never_touches_a_folder_of_ones_own(server: Hub, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    user_file().write_text(TABLE + 'folder = "~/mine"\n')
    for name in ("big", "demo"):
        assert "a folder of its own" in error(dgemma("models", "rm", name, "--yes"), 2)[0]
    assert (tmp_path / "mine").is_dir()


def test_rm_what_is_not_known(server: Hub) -> None:
    assert error(dgemma("models", "rm", "huge", "--yes"), 4)[0] == "no model is called 'huge'"


# ── on a terminal ─────────────────────────────────────────────────────────────────────────────────────────────────


class Screen(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(shelf, "stderr", lambda: Terminal(screen))
    with shelf.progress() as watch:
        watch.start("fetching", 18_000_000_000, 9_000_000_000)
        watch.advance(9_000_000_000)
        watch.say("damaged on arrival: x; fetching again")
    assert "18.0/18.0 GB" in screen.getvalue() and "damaged on arrival: x" in screen.getvalue()
    for quiet, term in ((True, "xterm"), (False, "dumb")):
        monkeypatch.setenv("TERM", term)
        screen.seek(0)
        screen.truncate()
        with shelf.progress(quiet=quiet) as watch:
            watch.start("fetching", 100, 0)
            watch.advance(100)
        assert screen.getvalue().count("\n") == (0 if quiet else 2) and "\x1b" not in screen.getvalue()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 kB"),
        (1500, "2 kB"),
        (2_500_000, "2 MB"),
        (999_400_000, "999 MB"),
        (999_999_999, "1.0 GB"),
        (18_048_607_656, "18.0 GB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text
