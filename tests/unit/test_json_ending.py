"""The last line of `run --json` says how it ended, whatever ended it and however early."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import scripted
from scripted import model_of, says
from typer.testing import CliRunner

from dgemma_local import cli, errors, interrupts, streams
from dgemma_local.cli_run import json_asked
from dgemma_local.errors import RecordingError
from dgemma_local.session import Session, open_session
from dgemma_local.ui.plain import json_error

ASKED = ["run", "-p", "Hi", "-m", "demo", "--json"]


def dgemma(*arguments: str, **options: Any) -> Any:
    return CliRunner().invoke(cli.app, arguments, **options)


def ending(found: Any) -> dict[str, Any]:
    """The one line that says so; it agrees with the process and with stderr."""
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert [line["event"] in ("failed", "finished") for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["exit_code"] == found.exit_code
    assert not lines[-1].get("fix") or f"  fix: {lines[-1]['fix']}\n" in found.stderr
    assert set(lines[-1]) >= {"outcome", "said", "exit_code"}
    return dict(lines[-1])


def opens(monkeypatch: pytest.MonkeyPatch, what: Session | BaseException) -> None:
    monkeypatch.setitem(sys.modules, "dgemma_local.session", scripted.module(what))


def defaults_of(monkeypatch: pytest.MonkeyPatch, folder: Path, lines: str) -> None:
    """The user's file says so of `run`."""
    (folder / "config.toml").write_text(f"[run]\n{lines}\n")
    monkeypatch.setenv("DGEMMA_CONFIG", str(folder / "config.toml"))


# Before the command's own function is called, and in it


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seed", "99999999999999999999"], "99999999999999999999"),
        (["--steps", "many"], "--steps"),
        (["--nonsense"], "--nonsense"),
        (["--visualize"], "--json and --visualize"),
        (["--stop", ""], "--stop"),
        (["--device", "tpu"], "tpu"),
        (["--context", "10"], "context"),
        (["-p", ""], "-p"),
    ],
)
def test_a_mistake_in_a_flag(arguments: list[str], said: str) -> None:
    found = dgemma(*ASKED, *arguments)
    end = ending(found)
    assert end["event"] == "failed" and end["outcome"] is None and said in end["said"] + end["fix"]


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [("DGEMMA_OPS", "zork", 2), ("DGEMMA_RUN_STEPS", "x", 2), ("DGEMMA_RUN_STPES", "5", 2), ("DGEMMA_CONFIG", "", 5)],
)
def test_a_mistake_in_a_variable_or_in_the_defaults(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str, code: int
) -> None:
    if not value:
        (tmp_path / "config.toml").write_text("[run]\nsteps = 'x'\n")
        value = str(tmp_path / "config.toml")
    monkeypatch.setenv(name, value)
    end = ending(dgemma(*ASKED))
    assert end["event"] == "failed" and end["exit_code"] == code


@pytest.mark.parametrize(
    ("arguments", "variable", "default", "asked"),
    [
        (["--json"], None, None, True),
        (["-q", "--json", "x.txt"], None, None, True),
        ([], None, None, False),
        (["-p", "--json"], None, None, False),  # the prompt
        (["--", "--json"], None, None, False),  # the file
        (["--json", "--no-json"], None, None, False),
        ([], "1", None, True),
        (["--no-json"], "1", None, False),
        ([], "0", True, False),
        ([], None, True, True),
    ],
)
def test_it_is_asked_for_as_the_command_itself_would_see_it(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    variable: str | None,
    default: bool | None,
    asked: bool,
) -> None:
    import typer

    group: Any = typer.main.get_command(cli.app)
    if variable is not None:
        monkeypatch.setenv("DGEMMA_RUN_JSON", variable)
    if default is not None:
        defaults_of(monkeypatch, tmp_path, "json = true")
    assert json_asked(group.commands["run"], arguments, typer.Context(group)) is asked


@pytest.mark.parametrize("wrong", ["steps = 'x'", "nonsense = 1", "json = true\nsteps = 0"])
def test_a_default_of_it_counts_beside_a_line_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: str
) -> None:
    asked = "" if "json" in wrong else "json = true\n"
    defaults_of(monkeypatch, tmp_path, asked + wrong)
    found = dgemma("run", "-p", "Hi")
    assert (ending(found)["outcome"], found.exit_code) == (None, errors.ConfigError.exit_code)
    assert dgemma("run", "-p", "Hi", "--no-json").stdout == ""


@pytest.mark.parametrize("lines", ["json = 'true'", "json = 1", "json = true\n[", "json = false\nsteps = 'x'"])
def test_what_is_no_default_of_it_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: str) -> None:
    defaults_of(monkeypatch, tmp_path, lines)
    found = dgemma("run", "-p", "Hi")
    assert (found.stdout, found.exit_code) == ("", errors.ConfigError.exit_code)


@pytest.mark.parametrize("flag", ["--show-thinking", "--visualize"])
def test_a_default_of_it_that_gave_way_says_nothing(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    monkeypatch.setenv("DGEMMA_RUN_JSON", "1")
    found = dgemma("run", "-p", "Hi", "-m", "nope", flag)
    assert (found.stdout, found.exit_code) == ("", errors.UnknownModel.exit_code)
    assert ending(dgemma("run", "-p", "Hi", "-m", "nope"))["exit_code"] == errors.UnknownModel.exit_code


def test_nor_one_that_gave_way_to_the_command_s_own_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is asked again, and fails of something else."""
    monkeypatch.setenv("DGEMMA_RUN_JSON", "1")
    refused = [errors.UsageError("--json is refused", "drop --json"), errors.UnknownModel("no such model", "pick one")]

    def refuse(*_: object) -> None:
        raise refused.pop(0)

    monkeypatch.setattr("dgemma_local.cli_run.check_prefer", refuse)
    found = dgemma("run", "-p", "Hi")
    assert (found.stdout, found.exit_code, refused) == ("", errors.UnknownModel.exit_code, [])


def test_nothing_is_said_to_those_who_did_not_ask() -> None:
    for arguments in (
        ["run", "-p", "Hi", "--steps", "0"],
        ["models", "--json"],
        ["run", "-p", "--json", "--steps", "0"],
    ):
        assert dgemma(*arguments).stdout == ""


# Amid an answer


def breaking(error: BaseException) -> Session:
    session = scripted.session(says("Hi user "))

    def fail(step: int) -> None:
        if step == 3:
            raise error

    model_of(session).before = fail
    return session


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "cache"),
            1,
            "the system refuses: No space left on device: cache",
        ),
        (OSError(errno.EIO, "Input/output error"), 1, "the system refuses: Input/output error"),
        (ConnectionResetError("gone"), 1, "the system refuses: gone"),
        (MemoryError(), 11, "memory ran out while answering"),
        (RuntimeError("a fault"), 1, "RuntimeError: a fault"),
        (streams.Ended(signal.SIGTERM), 143, "interrupted"),
    ],
)
def test_whatever_breaks_off_an_answer(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    opens(monkeypatch, breaking(error))
    found = dgemma(*ASKED)
    end = ending(found)
    assert (end["event"], end["exit_code"], end["said"]) == ("failed", code, said)
    assert "the output cannot" not in found.stderr
    assert isinstance(found.exception, RuntimeError) is isinstance(error, RuntimeError)  # ours: with its traceback


@pytest.mark.parametrize(("error", "code"), [(MemoryError(), 11), (OSError(errno.ENOMEM, "Cannot allocate memory"), 1)])
def test_a_model_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int) -> None:
    opens(monkeypatch, error)
    found = dgemma(*ASKED)
    end = ending(found)
    assert (end["event"], end["exit_code"]) == ("failed", code) and end["fix"]
    assert isinstance(found.exception, SystemExit)  # and no traceback


def test_memory_that_runs_out_while_a_model_is_opened_is_an_error_with_a_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("dgemma_local.session.fill", none_left)
    with pytest.raises(errors.DoesNotFit, match=r"^memory ran out while the model was opened$"):
        open_session("demo")


def test_an_answer_that_is_missing_is_said_by_finished_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    opens(monkeypatch, scripted.session(says("Hi<turn|>")))
    end = ending(dgemma(*ASKED, "--stop", "Hi"))
    assert (end["event"], end["exit_code"]) == ("finished", 9)


def test_a_recording_that_failed_behind_the_answer_is_the_last_word(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The answer is whole, and the process ends with another code: both are said."""
    from dgemma_local.recording import Recorder

    opens(monkeypatch, scripted.session(says("Hi<turn|>")))
    whole = Recorder._written

    def full(self: Recorder, data: bytes) -> OSError | None:
        if b"canvas_committed" not in data:
            return whole(self, data)
        self._fail(error := OSError(errno.ENOSPC, "No space left on device"))
        return error

    monkeypatch.setattr(Recorder, "_written", full)
    found = dgemma(*ASKED, "--record", str(tmp_path / "a.jsonl"))
    *_, before, last = [json.loads(line) for line in found.stdout.splitlines()]
    assert (before["event"], before["exit_code"]) == ("finished", 0)
    assert (last["event"], last["exit_code"], found.exit_code) == ("failed", 15, RecordingError.exit_code)


# Streams


@pytest.mark.parametrize("module", ["dgemma_local.cli", "typer.main"])
def test_ctrl_c_before_a_command_runs(module: str) -> None:
    """While the command line is imported, or made."""
    code = (
        "import os, signal, sys, types\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Cli(types.ModuleType):\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Cli)\n"
        f"sys.argv = ['dgemma', *{ASKED!r}]\n"
        "from dgemma_local.__main__ import main\nmain()"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=20)
    assert (found.returncode, found.stderr, found.stdout) == (-signal.SIGINT, b"", interrupts.EARLY % 130)


def test_the_line_of_that_ctrl_c_is_the_one_of_every_other() -> None:
    import io

    out = io.StringIO()
    json_error(KeyboardInterrupt(), errors.INTERRUPTED, out)
    assert out.getvalue().encode() == interrupts.EARLY % errors.INTERRUPTED


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("flags", [[], ["-u"]])
def test_what_cannot_be_written_is_still_told_from_what_cannot_be_read(flags: list[str]) -> None:
    code = (
        "import sys\nfrom dgemma_local import streams\n"
        "try:\n    print('x'); sys.stdout.flush()\n"
        "except OSError as error:\n    code = 40 + streams.ours(error); streams.abandon(); sys.exit(code)"
    )
    with Path("/dev/full").open("wb") as full:
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        found = subprocess.run(
            [sys.executable, *flags, "-c", code], stdout=full, stderr=subprocess.DEVNULL, env=buffered, timeout=20
        )
    assert found.returncode == 41


def test_a_file_that_is_named_is_none_of_the_output() -> None:
    code = "import sys; from dgemma_local import streams; sys.exit(40 + streams.ours(OSError(28, 'full', 'file')))"
    found = subprocess.run([sys.executable, "-u", "-c", code], capture_output=True, timeout=20)
    assert found.returncode == 40


@pytest.mark.usefixtures("capsys")
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full", "file"), OSError(errno.EIO, "x"), BrokenPipeError(errno.EPIPE, "x")]
)
def test_an_error_of_another_file_is_none_of_the_output(error: OSError) -> None:
    assert not streams.ours(error)
    with pytest.raises(type(error)) as raised:
        streams.lost(error)
    assert raised.value is error


def test_an_error_whose_line_nobody_reads() -> None:
    read, write = os.pipe()
    os.close(read)
    code = f"import sys; from dgemma_local import cli; sys.argv = ['dgemma', *{[*ASKED, '--steps', '0']!r}]; cli.main()"
    with os.fdopen(write, "wb") as gone:
        found = subprocess.run([sys.executable, "-c", code], stdout=gone, stderr=subprocess.PIPE, timeout=20)
    assert found.returncode == errors.BROKEN_PIPE
    assert found.stderr.startswith(b"error: ") and b"Traceback" not in found.stderr and b"Broken" not in found.stderr
