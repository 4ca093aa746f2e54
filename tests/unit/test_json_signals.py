"""Signals to `run --json`, in a process of its own: every line is whole, and the last one agrees with the exit code."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ASKED = ["dgemma", "run", "-p", "Hi", "-m", "demo", "--json", "--seed", "1"]
BEGIN = f"""
import atexit, os, signal, sys, threading, time, types
from importlib import import_module
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = {ASKED!r}
def kill(number): os.kill(os.getpid(), number)
"""
FAKE = """
import fake_session
from dgemma_local import cli_run
from dgemma_local.__main__ import main
cli_run.import_torch = lambda: None
sys.modules["dgemma_local.session"] = fake_session.module(fake_session.FakeSession(text="Hi user", **{}))
"""
ENDED = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


def child(program: str, stdout: int = subprocess.PIPE, **variables: str) -> "subprocess.Popen[str]":
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), variables.pop("path", "")])
    return subprocess.Popen(
        [sys.executable, "-c", BEGIN + program], stdout=stdout, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path, **variables},
    )  # fmt: skip


def done(program: str, **variables: str) -> tuple[int, str, str]:
    """The exit code, stdout and stderr."""
    with child(program, **variables) as process:
        try:
            out, told = process.communicate(timeout=60)
        finally:
            process.kill()
    return process.returncode, out, told


def last(out: str) -> tuple[str, int]:
    """The last line's event and exit code, where it is the only one of its kind and every line is whole."""
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["event"] in ("failed", "finished") for line in lines] == [False] * (len(lines) - 1) + [True]
    return lines[-1]["event"], lines[-1]["exit_code"]


# Amid a line


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("number", ENDED)
def test_a_line_that_waits_for_its_reader_is_written_whole(number: signal.Signals, unbuffered: str) -> None:
    read, write = os.pipe()
    size = fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    program = FAKE.format({"settings": {"long": "x" * 30_000}}) + "main()"
    with child(program, stdout=write, PYTHONUNBUFFERED=unbuffered) as process, os.fdopen(read) as reader:
        os.close(write)
        try:
            while waiting_in(read) < size:  # the rest of the first line has no room
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(number)
            out = reader.read()
            process.wait(60)
        finally:
            process.kill()
    assert json.loads(out.splitlines()[0])["event"] == "start"
    assert (*last(out), process.returncode) == ("failed", ENDED[number], ENDED[number])


def waiting_in(pipe: int) -> int:
    """Bytes that nobody has read yet."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


# Early


@pytest.mark.parametrize("module", ["dgemma_local.cli", "typer.main"])
@pytest.mark.parametrize("numbers", [*((each,) for each in ENDED), (signal.SIGINT, signal.SIGTERM)])
def test_before_a_command_runs(numbers: tuple[signal.Signals, ...], module: str) -> None:
    code, out, told = done(f"""
class Finder(types.ModuleType):
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            for number in {[*map(int, numbers)]}: kill(number)
sys.meta_path.insert(0, Finder)
from dgemma_local.__main__ import main
main()""")
    assert (code, last(out), told) == (-numbers[0], ("failed", ENDED[numbers[0]]), "")


@pytest.mark.parametrize("number", ENDED)
def test_between_the_command_line_s_import_and_the_command(number: signal.Signals) -> None:
    code, out, told = done(f"""
from dgemma_local import cli
from dgemma_local.__main__ import main
prepare = cli.prepare
def prepared(): prepare(); kill({int(number)})
cli.prepare = prepared
main()""")
    assert (code, last(out), told) == (-number, ("failed", ENDED[number]), "")


# Twice


@pytest.mark.parametrize("number", ENDED)
def test_twice_while_torch_is_imported(number: signal.Signals, tmp_path: Path) -> None:
    press = f"os.kill(os.getpid(), {int(number)})"
    (tmp_path / "torch.py").write_text(f"import os, time\n{press}; {press}\ntime.sleep(60)")
    code, out, _ = done("from dgemma_local.__main__ import main\nmain()", path=str(tmp_path))
    assert (code, last(out)) == (-number, ("failed", ENDED[number]))


@pytest.mark.parametrize("number", ENDED)
def test_another_one_amid_the_last_word(number: signal.Signals) -> None:
    code, out, told = done(
        FAKE.format({})
        + f"""
plain = import_module("dgemma_local.ui.plain")
of_error = plain.of_error
def again(error):
    kill({int(number)})
    return of_error(error)
plain.of_error = again
def answer(*_, **__): kill({int(number)})
fake_session.FakeSession.answer = answer
main()"""
    )
    assert (code, last(out)) == (ENDED[number], ("failed", ENDED[number]))
    assert "Traceback" not in told and "Aborted" not in told


# Behind the end


@pytest.mark.parametrize("number", ENDED)
def test_while_the_interpreter_leaves_the_exit_code_stays(number: signal.Signals) -> None:
    code, out, told = done(
        FAKE.format({})
        + f"""
class Late:
    def __del__(self, kill=os.kill, own=os.getpid()): kill(own, {int(number)})
late = Late()  # goes with its module, behind every callback
atexit.register(lambda: kill({int(number)}))
main()"""
    )
    assert (code, last(out)) == (0, ("finished", 0))
    assert "Traceback" not in told


@pytest.mark.parametrize("number", ENDED)
def test_a_thread_that_holds_the_process_is_ended_by_a_second_one(number: signal.Signals) -> None:
    code, out, _ = done(
        FAKE.format({})
        + f"""
from dgemma_local import streams
def hold():
    for handler in (streams._pass, signal.SIG_DFL):
        while signal.getsignal({int(number)}) is not handler: time.sleep(0.001)
        kill({int(number)})
    threading.Event().wait()
released = streams.release
def release():
    released()
    threading.Thread(target=hold).start()
streams.release = release
main()"""
    )
    assert (code, last(out)) == (-number, ("finished", 0))
