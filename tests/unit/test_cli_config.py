"""`dgemma config` shows and sets; `dgemma completion` writes what a shell needs."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dgemma_local import cli
from dgemma_local.errors import UsageError
from dgemma_local.registry import table

ROOT = Path(__file__).parent.parent.parent


def dgemma(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, arguments)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user's file would be."""
    path = tmp_path / "config.toml"
    monkeypatch.setenv("DGEMMA_CONFIG", str(path))
    return path


def test_set_show_and_unset(config: Path) -> None:
    config.write_text("# mine\n", encoding="utf-8")
    found = dgemma("config", "run.slow", "0.2")
    assert found.exit_code == 0 and found.stdout == "" and found.stderr == "run.slow = 0.2, from the file\n"
    assert dgemma("config", "run.think", "true").exit_code == 0
    assert dgemma("config", "run.stop", "a b", "c").exit_code == 0
    text = config.read_text(encoding="utf-8")
    assert text.startswith("# mine\n")
    assert tomllib.loads(text) == {"run": {"slow": 0.2, "think": True, "stop": ["a b", "c"]}}
    assert "0.2" in dgemma("config", "run.slow").stdout and "from the file" in dgemma("config", "run.slow").stdout
    assert dgemma("config", "run.slow", "--unset").stderr == "run.slow = 0.0, built in\n"
    assert "slow" not in config.read_text(encoding="utf-8")


def test_the_first_key_makes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DGEMMA_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert dgemma("config", "run.steps", "24").exit_code == 0
    assert tomllib.loads((tmp_path / "dgemma/config.toml").read_text(encoding="utf-8")) == {"run": {"steps": 24}}


def test_every_key_is_shown_with_its_source(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text("[run]\nsteps = 24\nslow = 0.5\n", encoding="utf-8")
    monkeypatch.setenv("DGEMMA_RUN_STEPS", "7")
    shown = {each["key"]: each for each in json.loads(dgemma("config", "--json").stdout)}
    assert shown["run.steps"] == {
        "key": "run.steps",
        "value": 7,
        "source": "DGEMMA_RUN_STEPS",
        "variable": "DGEMMA_RUN_STEPS",
        "default": None,
    }
    assert shown["run.slow"]["value"] == 0.5 and shown["run.slow"]["source"] == str(config)
    assert shown["run.max-tokens"]["source"] == "built in" and shown["run.max-tokens"]["value"] == 1024
    lines = dgemma("config").stdout
    for key in shown:
        assert f"\n{key.rsplit('.', 1)[1]} " in lines


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run.stepz", "3"), "run.steps"),
        (("run.steps", "many"), "run.steps = many"),
        (("run.steps", "0"), "greater"),
        (("run.view", "gird"), "'grid'"),
        (("run.steps", "1", "2"), "one value"),
        (("run.nothing",), "run.nothing"),
        (("--unset",), "KEY"),
        (("--path", "--json"), "together"),
        (("run.steps", "3", "--unset"), "together"),
    ],
)
def test_what_means_nothing_is_refused(arguments: tuple[str, ...], said: str, config: Path) -> None:
    config.write_text("", encoding="utf-8")
    found = dgemma("config", *arguments)
    assert found.exit_code == UsageError.exit_code and said in found.stderr and len(found.stderr.splitlines()) == 2
    assert config.read_text(encoding="utf-8") == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_there_is_completion_for_each_shell(shell: str) -> None:
    found = dgemma("completion", shell)
    assert found.exit_code == 0 and "_DGEMMA_COMPLETE" in found.stdout and "dgemma" in found.stdout


def test_no_other_shell() -> None:
    assert dgemma("completion", "cmd").exit_code == UsageError.exit_code


def test_bash_completes_the_names_of_models(tmp_path: Path) -> None:
    """A real bash, on the script it is given; and torch is not imported for it."""
    bash = shutil.which("bash")
    assert bash is not None
    program = tmp_path / "dgemma"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.modules['torch'] = None\nsys.path.insert(0, {str(ROOT)!r})\n"
        "sys.argv[0] = 'dgemma'\nfrom dgemma_local.__main__ import main\nmain()\n",
        encoding="utf-8",
    )
    program.chmod(0o755)
    script = (
        "source <(dgemma completion bash); COMP_WORDS=(dgemma run -m demo); COMP_CWORD=3; _dgemma_completion dgemma; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    found = subprocess.run([bash, "-c", script], capture_output=True, text=True, env=environment, timeout=60)
    assert found.stderr == ""
    assert {*found.stdout.split()} == {name for name in table() if name.startswith("demo")}


def test_a_value_that_a_terminal_cannot_be_trusted_with_is_escaped(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.touch()
    monkeypatch.setenv("DGEMMA_RUN_SYSTEM", "é\udcff\x9b")
    found = dgemma("config", "run.system")
    assert found.exit_code == 0 and r'"é\udcff\u009b"' in found.stdout


def test_what_is_wrong_is_shown_and_ends_no_list(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text('[run]\nmodel = "nope"\njson = true\nvisualize = true\n', encoding="utf-8")
    monkeypatch.setenv("DGEMMA_RUN_STEPS", "three")
    monkeypatch.setenv("DGEMMA_RUN_STPES", "3")
    found = dgemma("config")
    assert found.exit_code == 0 and '"three"' in found.stdout and "max-tokens" in found.stdout
    wrong = [line for line in found.stderr.splitlines() if line.startswith("wrong: ")]
    parts = (
        ("run.model", "'nope'", str(config)),
        ("DGEMMA_RUN_STEPS", "integer"),
        ("run.json", "contradicts", "run.visualize"),
        ("DGEMMA_RUN_STPES", "sets nothing"),
    )
    assert len(wrong) == len(parts)
    for each in parts:
        assert any(all(part in line for part in each) for line in wrong), each
    assert "wrong: run.model" in dgemma("config", "run.model").stderr
    assert "wrong: " not in dgemma("config", "run.max-tokens").stderr
    shown = {each["key"]: each for each in json.loads(dgemma("config", "--json").stdout)}
    assert {key for key, each in shown.items() if "wrong" in each} == {"run.model", "run.steps"}


def test_a_model_that_is_here_is_not_wrong(config: Path) -> None:
    for name in ("demo-text", "auto"):
        config.write_text(f'[run]\nmodel = "{name}"\n', encoding="utf-8")
        assert "wrong" not in dgemma("config", "run.model").stderr


@pytest.mark.parametrize(
    ("words", "incomplete", "shell", "wanted"),
    [
        ("config", "run.think-", "bash", "run.think-tokens"),
        ("run -m", "my", "bash", r"my\ model"),
        ("run -m", "my", "zsh", "my model"),
    ],
)
def test_keys_and_names_with_spaces_are_completed(
    words: str, incomplete: str, shell: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dgemma").mkdir()
    (tmp_path / "dgemma/models.toml").write_text('["my model"]\nfolder = "x"\n', encoding="utf-8")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("_DGEMMA_COMPLETE", f"complete_{shell}")
    command: Any = typer.main.get_command(cli.app)
    name, *before = words.split()
    context = command.make_context("dgemma", [name], resilient_parsing=True)
    leaf = command.commands[name]
    inner = typer.Context(leaf, info_name=name, parent=context)
    parameter = next(each for each in leaf.params if (before[0] if before else "key") in (*each.opts, each.name))
    assert [each.value for each in parameter.shell_complete(inner, incomplete)] == [wanted]
