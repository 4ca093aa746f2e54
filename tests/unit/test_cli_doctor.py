"""`dgemma doctor` as a process: lines, JSON, exit codes, and a Python without torch."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import typer

from dgemma_local import cli, cli_doctor
from dgemma_local.doctor import Check, Machine, examine
from dgemma_local.doctor.finding import Level, fail, ok
from dgemma_local.ui import doctor
from dgemma_local.ui.terminal import Terminal


def dgemma(*arguments: str, modules: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "DGEMMA", "CUDA"))}
    return subprocess.run(
        [sys.executable, "-m", "dgemma_local", "doctor", *arguments],
        env=kept
        | {"PYTHONPATH": str(modules), "HF_HUB_CACHE": str(modules / "cache"), "HF_HUB_OFFLINE": "1"}
        | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_all_in_order(tmp_path: Path) -> None:
    done = dgemma(modules=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert {line[:5].strip() for line in lines[:-1]} <= {"OK", "WARN", "SKIP", "cure:", ""}
    assert lines[-1].endswith("s") and " OK, " in lines[-1]
    assert any(line.startswith("OK   demo ") and "2 steps" in line for line in lines)


def test_a_python_whose_torch_is_broken(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    (tmp_path / "triton.py").write_text("raise ModuleNotFoundError('No module named triton', name='triton')")
    done = dgemma("--json", modules=tmp_path, HF_TOKEN="hf_secret")
    assert done.returncode == 19 and done.stderr == "", done.stderr
    told = json.loads(done.stdout)
    levels = {each["name"]: each["level"] for each in told["findings"]}
    assert (levels["torch"], levels["kernels"], levels["demo"], levels["environment"]) == ("FAIL", "SKIP", "SKIP", "OK")
    assert levels["python"] == levels["text demo"] == "OK" and levels["triton"] in ("WARN", "FAIL")
    assert told["failed"] is True and "libcudart.so.13" in done.stdout and "hf_secret" not in done.stdout
    assert "cure: " in dgemma(modules=tmp_path).stdout


def test_help_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = dgemma("--help", modules=tmp_path)
    assert done.returncode == 0 and "--verify" in done.stdout and "19" in done.stdout


def test_a_line_comes_before_the_next_check() -> None:
    out = io.StringIO()

    def checks() -> Any:
        yield ok("one", "is \x1b[31mfine")
        assert out.getvalue() == "OK   one              is �[31mfine\n"
        yield fail("two", "is not", "mend it")

    assert [each.level for each in doctor.show(checks(), out)] == [Level.OK, Level.FAIL]
    assert out.getvalue().splitlines()[1:3] == ["FAIL two              is not", "     cure: mend it"]
    assert out.getvalue().splitlines()[3].startswith("1 OK, 1 FAIL, in ")


def test_a_reader_who_has_gone(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    code = subprocess.run(
        [sys.executable, "-m", "dgemma_local", "doctor"],
        env=os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        stdout=write,
        stderr=subprocess.PIPE,
        timeout=60,
    )
    os.close(write)
    assert (code.returncode, code.stderr) == (141, b"")


class Screen(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("encoding", "size", "term", "level"),
    [("utf-8", (80, 24), "xterm", "OK"), ("latin-1", (80, 24), "xterm", "WARN"), ("utf-8", (30, 24), "xterm", "WARN"), ("utf-8", (80, 24), "dumb", "WARN")],
)  # fmt: skip
def test_terminals(
    encoding: str, size: tuple[int, int], term: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(os, "get_terminal_size", lambda number: os.terminal_size(size))
    screen = Screen(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(screen, "fileno", lambda: 1)
    (seen,) = doctor.look(Terminal(screen))
    assert seen.level == level and (seen.cure is None) == (level == "OK")
    (piped,) = doctor.look(Terminal(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")))
    assert piped.level is Level.OK and "not a terminal" in piped.what


GROUP: Any = typer.main.get_command(cli.app)


def test_defaults_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.toml"
    monkeypatch.setenv("DGEMMA_CONFIG", str(path))
    path.write_text("[run]\nsteps = 8\n", encoding="utf-8")
    assert [(each.level, each.facts) for each in cli_doctor.defaults(GROUP)] == [(Level.OK, {"run.steps": 8})]
    path.write_text("[run]\nsteps = 0\n", encoding="utf-8")
    for name, value in (("RUN_STEPS", "three"), ("CHAT_THINK", "maybe"), ("RUN_STEPZ", "3")):
        monkeypatch.setenv(f"DGEMMA_{name}", value)
    seen = list(cli_doctor.defaults(GROUP))
    assert all(each.level is Level.FAIL and each.cure for each in seen) and len(seen) == 4
    told = " ".join(each.what for each in seen)
    assert all(part in told for part in (str(path), "DGEMMA_RUN_STEPS", "DGEMMA_CHAT_THINK", "DGEMMA_RUN_STEPZ"))


def test_a_pipe_as_the_file_of_defaults_is_an_error_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGEMMA_CONFIG", str(tmp_path / "pipe"))
    os.mkfifo(tmp_path / "pipe")
    (seen,) = examine([Check("defaults", lambda _: cli_doctor.defaults(GROUP))], Machine(probe=cast(Any, None)))
    assert seen.level is Level.FAIL and "is no regular file" in seen.what and "report it" not in (seen.cure or "")


@pytest.mark.parametrize(
    "lines",
    ["seed = -1", 'stop = [""]', 'system = ""', 'model = "nope"', "json = true\nvisualize = true", "slow = nan"],
)
def test_defaults_that_run_would_refuse(lines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.toml"
    monkeypatch.setenv("DGEMMA_CONFIG", str(path))
    path.write_text(f"[run]\n{lines}\n", encoding="utf-8")
    (found,) = cli_doctor.defaults(GROUP)
    assert found.level is Level.FAIL and f"run.{lines.split()[0]}" in found.what and found.cure


def test_defaults_in_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("DGEMMA_CONFIG", str(tmp_path / "pipe"))
    (found,) = cli_doctor.defaults(GROUP)
    assert found.level is Level.FAIL and "no regular file" in found.what


def test_a_log_and_a_file_that_are_in_the_way_end_no_report(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('none')")
    (tmp_path / "triton.py").write_text("raise ImportError('none')")
    done = dgemma("--json", modules=tmp_path, DGEMMA_LOG=str(tmp_path), DGEMMA_RUN_STEPS="three")
    failed = {each["name"]: each["what"] for each in json.loads(done.stdout)["findings"] if each["level"] == "FAIL"}
    assert "DGEMMA_LOG" in failed["environment"] and "DGEMMA_RUN_STEPS" in failed["defaults"]
