"""Flags that several commands take: each is defined once, and means the same wherever it stands."""

import ast
import sys
from pathlib import Path
from typing import Any

import fake_session
import pytest
from fake_chat import FakeChat
from typer.testing import CliRunner

from dgemma_local import cli, cli_chat, cli_run

PACKAGE = Path(cli.__file__).parent
COMMANDS = ("cli_run", "cli_chat", "cli_bench", "cli_models")


def defined(module: str) -> list[str]:
    """The options that a module gives a form of their own."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call) and ast.unparse(each.func) == "typer.Option"]
    return [
        part.value
        for call in calls
        for part in call.args
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.startswith("--")
    ]


def test_no_command_defines_a_flag_that_is_shared() -> None:
    from dgemma_local.cli_flags import _ATTENTION, _EMBEDDING, _FORMS, _MLP

    shared = {
        *defined("cli_flags"),
        _ATTENTION,
        _EMBEDDING,
        _MLP,
        *(name for names in _FORMS for name in names.split()),
    }
    assert {"--steps", "--preset", "--think", "--stop", "--model", "--quiet"} <= shared
    for module in COMMANDS:
        assert defined(module) and shared.isdisjoint(defined(module)), module


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeChat:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for module in (cli_run, cli_chat):
        monkeypatch.setattr(module, "import_torch", lambda: None)
    fake = FakeChat("Hi user")
    monkeypatch.setitem(sys.modules, "dgemma_local.session", fake_session.module(fake))
    return fake


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--dtype float32 --device cuda --context 300 --vram 17.5",
        "--fp8-attention --steps 5",
        "--fp8-embedding --preset fast",
        "--fp8-mlp --preset quality --steps 7",
    ],
)
def test_run_and_chat_open_a_model_alike(session: FakeChat, flags: str) -> None:
    opened: list[Any] = []
    for command in (["run", "-p", "Hello"], ["chat"]):
        found = CliRunner().invoke(cli.app, [*command, "-m", "mine", *flags.split()], input="Hello\n")
        assert found.exit_code == 0 and session.opened is not None, found.stderr
        opened.append(session.opened)
    assert opened[0] == opened[1] and opened[0][0] == "mine"
    given = {key: str(value) for key, value in opened[0][1].items() if value}
    words = [word.removeprefix("--").replace("-", "_") for word in flags.split()]
    assert {*given} == {word for word in words if word in opened[0][1]}
    assert all(value == "True" or value in words for value in given.values())
