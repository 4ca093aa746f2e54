"""Ctrl-C during the import of torch: in a process of its own, whose torch is a module that raises it and swallows it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dgemma_local.interrupts import Flag

TORCH = """
import os, signal, time
try:
    {}
except KeyboardInterrupt:
    pass  # as torch does around its import of numpy
"""
PROGRAM = """
import signal
from dgemma_local.interrupts import import_torch
try:
    import_torch()
except KeyboardInterrupt:
    print("interrupted", flush=True)
else:
    print("imported", flush=True)
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""
PRESS = "os.kill(os.getpid(), signal.SIGINT)"


def run(folder: Path, while_importing: str, before: str = "") -> "subprocess.CompletedProcess[str]":
    (folder / "torch.py").write_text(TORCH.format(while_importing))
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([str(folder), root])
    return subprocess.run(
        [sys.executable, "-c", before + PROGRAM], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )


@pytest.mark.parametrize(("pressed", "told"), [("pass", "imported\n"), (PRESS, "interrupted\n")])
def test_what_is_pressed_counts_behind_the_import(pressed: str, told: str, tmp_path: Path) -> None:
    done = run(tmp_path, pressed)
    assert (done.stdout, done.returncode) == (told, 0), done.stderr


def test_pressed_twice_it_ends_at_once(tmp_path: Path) -> None:
    done = run(tmp_path, f"{PRESS}; {PRESS}; time.sleep(60)")
    assert (done.stdout, done.returncode) == ("", -signal.SIGINT)


def test_a_handler_that_is_not_python_s_own_stays(tmp_path: Path) -> None:
    ignored = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    done = run(tmp_path, PRESS, ignored)
    assert done.stdout == "imported\n" and "AssertionError" in done.stderr  # the program's own last line: still ignored


def ended(program: str) -> "subprocess.CompletedProcess[str]":
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": root}
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_interpreter_leaves_changes_nothing(number: signal.Signals) -> None:
    done = ended(f"""
import atexit, os, sys
atexit.register(lambda: os.kill(os.getpid(), {int(number)}))
sys.argv = ["dgemma", "version"]
from dgemma_local.__main__ import main
main()""")
    assert (done.returncode, done.stderr) == (0, "")


def test_being_ended_twice_does_not_break_off_the_first() -> None:
    done = ended("""
import os, signal
from dgemma_local.streams import prepare
prepare()
try:
    os.kill(os.getpid(), signal.SIGTERM)
finally:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGHUP)
    print("given back", flush=True)""")
    assert (done.returncode, done.stdout, done.stderr) == (143, "given back\n", "")


def test_a_flag_is_raised_by_a_handler_that_comes_while_its_own_thread_is_in_it() -> None:
    """A lock would be held then: the profiler stands where a signal may come, and raises it once more."""
    flag = Flag()
    depth = 0

    def again(frame: object, event: str, function: object) -> None:
        nonlocal depth
        if depth < 3:
            depth += 1
            flag.set()
            flag.is_set()
            flag.clear()

    before = sys.getprofile()
    sys.setprofile(again)
    try:
        flag.set()
        flag.clear()
    finally:
        sys.setprofile(before)
    assert depth == 3 and not flag.is_set()
    flag.set()
    assert flag.is_set()


def test_a_torch_that_is_broken_is_an_error_with_a_cure(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13:\\n cannot open shared object file')")
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-m", "dgemma_local", "run", "-p", "Hi", "-m", "demo"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), root])},
    )
    assert (done.returncode, done.stdout) == (20, "")
    assert done.stderr.splitlines() == [
        "error: torch cannot be imported: OSError: libcudart.so.13: cannot open shared object file",
        "  fix: `dgemma doctor` says what is broken here",
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_being_ended_counts_behind_the_import_too(number: signal.Signals, tmp_path: Path) -> None:
    raises = (
        "import sys\nfor each in (signal.SIGTERM, signal.SIGHUP): signal.signal(each, lambda n, _: sys.exit(128 + n))\n"
    )
    swallowing = f"\n    try: os.kill(os.getpid(), {int(number)}); time.sleep(0)\n    except BaseException: pass"
    done = run(tmp_path, swallowing, f"import signal\n{raises}")
    assert (done.stdout, done.returncode) == ("", 128 + number), done.stderr


JSON = """
import fake_session
fake_session.main("run", "-p", "Hi", "--seed", "1", "--json", text="Hi user, hi user", pause={})
"""


@contextmanager
def json_run(pause: float) -> "Iterator[subprocess.Popen[str]]":
    """`dgemma run --json`, a step every `pause` seconds, its first lines read."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(root / "tests")])
    with subprocess.Popen(
        [sys.executable, "-c", JSON.format(pause)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert '"start"' in process.stdout.readline()
            assert '"prefilled"' in process.stdout.readline()
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_json_s_last_line_says_that_it_was_ended(number: signal.Signals) -> None:
    with json_run(60) as process:
        process.send_signal(number)
        out, told = process.communicate()
    assert (process.returncode, told.count("Traceback")) == (128 + number, 0)
    assert json.loads(out.splitlines()[-1]) == {
        "event": "failed", "outcome": "interrupted", "said": "interrupted", "fix": "", "exit_code": 128 + number,
    }  # fmt: skip


def test_being_ended_with_nobody_to_read_it_is_quiet() -> None:
    with json_run(60) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        process.send_signal(signal.SIGTERM)
        told = process.stderr.read()
        process.wait()
    assert "Traceback" not in told and "Exception" not in told and "error" not in told
    assert process.returncode == 128 + signal.SIGPIPE
