"""The benchmark as a process: its file, a bare machine, exit codes, and outputs that cannot be written."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dgemma_local.bench import __main__ as bare
from dgemma_local.bench import command, request
from dgemma_local.bench.json_file import JsonFile
from dgemma_local.errors import BenchRefused, UsageError

# ── the file ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_file_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    nothing = JsonFile(None)
    nothing.write({"complete": True})
    nothing.remove()
    nothing.check()
    there = tmp_path / "there.json"
    JsonFile(str(there))
    assert not list(tmp_path.iterdir())
    there.write_text("old")
    JsonFile(str(there))
    assert there.read_text() == "old" and list(tmp_path.iterdir()) == [there]
    for bad in (str(tmp_path), str(tmp_path / "none" / "x.json"), str(there / "x"), "\0"):
        with pytest.raises(UsageError, match="cannot be written"):
            JsonFile(bad)


def test_each_document_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    """In one move: whoever has the old one open goes on reading it whole."""
    path, link = tmp_path / "out.json", tmp_path / "link.json"
    link.symlink_to(path)
    file = JsonFile(str(link))
    file.write({"complete": False, "n": 1})
    path.chmod(0o640)
    with path.open() as reader:
        file.write({"complete": False, "n": 2})
        assert json.load(reader)["n"] == 1
    assert json.loads(path.read_text())["n"] == 2 and path.stat().st_mode & 0o777 == 0o640
    assert sorted(tmp_path.iterdir()) == [link, path] and link.is_symlink()
    file.remove()
    assert list(tmp_path.iterdir()) == [link]


def test_a_pipe_gets_the_whole_document_alone(tmp_path: Path) -> None:
    import os

    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    file = JsonFile(str(path))
    file.write({"complete": False})
    file.write({"complete": True})
    assert json.loads(os.read(reader, 1000)) == {"complete": True}
    file.remove()
    os.close(reader)
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_that_is_full_is_said_and_does_not_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    path = tmp_path / "out.json"
    file = JsonFile(str(path), said.append)
    file.write({"complete": False, "n": 1})

    def full(self: Path, *_: Any, **__: Any) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as then:
        then.setattr(Path, "write_text", full)
        file.write({"complete": False, "n": 2})
    assert said == [f"{str(path)!r} cannot be written: No space left on device"]
    assert json.loads(path.read_text())["n"] == 1 and list(tmp_path.iterdir()) == [path]
    with pytest.raises(UsageError, match="No space left"):
        file.check()
    file.write({"complete": True})
    file.check()  # there was room again


# ── whole ─────────────────────────────────────────────────────────────────────────────────────────────────────────


BARE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
BLOCKED = {"typer", "click", "rich", "tokenizers", "safetensors", "jinja2", "compressed_tensors", "huggingface_hub", "transformers"}
sys.meta_path.insert(0, Absent())
from dgemma_local.bench.__main__ import main
code = main(sys.argv[1:])
assert not BLOCKED & {name.split(".")[0] for name in sys.modules}
sys.exit(code)
"""


def on_a_bare_machine(*flags: str, small: bool = True) -> "subprocess.CompletedProcess[str]":
    import os

    environment = os.environ | {"OMP_NUM_THREADS": "1", "DGEMMA_GPU_SUITE_SMALL": "1" if small else "0"}
    return subprocess.run(
        [sys.executable, "-c", BARE, *flags], capture_output=True, text=True, env=environment, check=False
    )


def test_synthetic_needs_torch_and_triton_alone() -> None:
    """Of the small sizes that the suite for a card is rehearsed with."""
    flags = ("--synthetic", "26b", "--layout", "fp8", "--protocol", "fixed16", "--runs", "1", "--context", "1024")
    done = on_a_bare_machine(*flags, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    *tables, last = done.stdout.splitlines()
    found = json.loads(last)
    assert tables[0] == found["label"] == "rehearsal: small sizes, nothing was measured" and found["complete"]
    assert found["subject"]["kind"] == "synthetic" and found["subject"]["layout"] == "fp8"
    (task,) = found["protocols"]["fixed16"]["tasks"]
    assert task["kept_tokens"] == 512 and task["canvases"] == 2 and task["figures"]["steps_per_canvas"]["median"] == 16
    assert task["figures"]["commit_ms"] is not None and "scaled" in task["note"]


def test_synthetic_that_does_not_fit_is_refused_with_sizes(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("DGEMMA_GPU_SUITE_SMALL", "0")
    monkeypatch.setattr("dgemma_local.card.host_memory", lambda: 2 * 10**9)
    assert bare.main(["--synthetic", "26b", "--device", "cpu", "--layout", "bf16"]) == 11
    what, fix = capsys.readouterr().err.splitlines()[-2:]
    assert "synthetic 26b bf16 does not fit" in what and " GB" in what and "2.00 GB" in what
    assert "--demo" in fix and "free" in fix
    monkeypatch.setattr("dgemma_local.card.host_memory", lambda: 24 * 10**9)
    assert bare.main(["--synthetic", "26b", "--device", "cpu", "--layout", "fp8"]) == 11
    assert "take --layout nvfp4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "code", "what"),
    [
        (["--synthetic", "26b", "--layout", "int4"], 2, "no layout is called 'int4'"),
        (["--synthetic", "26b", "--context", "300000"], 2, "a context of 300,000 tokens"),
        (["--demo", "--context", "5000"], 2, "a context of 5,000 tokens"),
        (["--model", "nobody"], 4, "no model and no folder is called 'nobody'"),
        (["--demo", "--json", "/nowhere/at/all.json"], 2, "cannot be written"),
    ],
)
def test_two_lines_on_a_bare_machine(flags: list[str], code: int, what: str, capsys: Any) -> None:
    assert bare.main(flags) == code
    said = capsys.readouterr()
    error, fix = said.err.splitlines()[-2:]
    assert error.startswith("error: ") and what in error and fix.startswith("  fix: ") and said.out == ""


def test_the_26b_model_is_not_made_on_a_cpu_unless_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from dgemma_local import fit
    from dgemma_local.bench import subject, synthetic

    class Made(Exception):
        pass

    def make(*_: Any, **__: Any) -> None:
        raise Made

    said: list[str] = []
    monkeypatch.setattr(synthetic, "make", make)
    monkeypatch.setattr("dgemma_local.card.host_memory", lambda: 10**12)
    with pytest.raises(UsageError) as refused:
        subject.open_synthetic("fp8", device=None, context=None, seed=0, say=said.append)
    assert " GB of memory" in refused.value.what and "minutes" in refused.value.what and not said
    assert "--demo" in refused.value.fix and "--device cpu" in refused.value.fix
    with pytest.raises(Made):
        subject.open_synthetic("fp8", device="cpu", context=None, seed=0, say=said.append)
    assert said[-1] == "on a CPU: a step takes minutes, and an answer many of them"
    made: list[int] = []
    monkeypatch.setattr(synthetic, "make", lambda *_, context, **__: made.append(context) or make())
    with pytest.raises(Made):  # a default gives way to what the model has
        subject.open_synthetic("fp8", device="cpu", context=fit.AtMost(10**9), seed=0)
    assert made == [synthetic.published_config().max_positions]
    told: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setenv("DGEMMA_GPU_SUITE_SMALL", "1")
    with pytest.raises(Made):
        subject.open_synthetic("fp8", device=None, context=512, seed=0, say=(said := []).append)
    assert told == [1] and said == ["making the 26B model of random numbers, fp8"]


def test_the_layouts_that_flags_know_are_those_that_can_be_made() -> None:
    from dgemma_local.bench import synthetic

    assert set(request.LAYOUTS) == set(synthetic.LAYOUTS)


def test_flags_are_refused_without_torch() -> None:
    code = (
        "import sys; from dgemma_local.bench.__main__ import main; "
        "assert main(['--synthetic', '26b', '--layout', 'int4']) == 2; "
        "assert main(['--demo', '--json', '']) == 2; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


# ── the process's output ──────────────────────────────────────────────────────────────────────────────────────────


QUICK = """
import sys, types
from dgemma_local import streams
from dgemma_local.bench import __main__ as bare, command, request
def run(wanted, say, file, show):
    ACTION
command.run = run
bare._show = lambda document: (sys.stdout.write("x" * 200000), sys.stdout.flush())
streams.prepare()
sys.exit(bare.main(["--demo"]))
"""


def ended(action: str, shell: str) -> tuple[int, str]:
    """The exit code and stderr of a bench that does this, under a shell line; $RUN is the command."""
    done = subprocess.run(
        ["bash", "-c", f'RUN=("$0" -c "$1"); {shell}', sys.executable, QUICK.replace("ACTION", action)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("action", "shell", "code", "said"),
    [
        ("show({})", '"${RUN[@]}" | true; exit "${PIPESTATUS[0]}"', 141, ""),
        ("show({})", '"${RUN[@]}" >&-', 141, ""),
        (
            "show({})",
            '"${RUN[@]}" >/dev/full',
            1,
            "error: the output cannot be written: No space left on device\n  fix: ",
        ),
        (
            "pass",
            'env -u PYTHONUNBUFFERED "$0" -m dgemma_local.bench --help >/dev/full',
            1,
            "error: the output cannot be written: No space left on device\n  fix: ",
        ),
        ("say('a'); show({})", '"${RUN[@]}" 2>&- >/dev/null', 0, ""),
        ("say('a'); show({})", '"${RUN[@]}" 2>/dev/full >/dev/null', 0, ""),
        ("import os; os.kill(os.getpid(), 15)", '"${RUN[@]}"', 143, ""),
        ("raise KeyboardInterrupt", '"${RUN[@]}"', 130, "interrupted"),
    ],
)
def test_how_a_process_ends(action: str, shell: str, code: int, said: str) -> None:
    found, stderr = ended(action, shell)
    assert found == code and stderr.startswith(said) and stderr.count("\n") == said.count("\n") + bool(said)


def test_both_front_ends_take_the_same_flags() -> None:
    import inspect

    from dgemma_local.cli_bench import bench as typed

    theirs = {"json_file" if name == "json" else name for name in vars(bare.parser().parse_args([]))}
    assert theirs == set(inspect.signature(typed).parameters) - {"view"}  # which needs rich, and the other has none


def test_no_speed_over_a_failed_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    from dgemma_local import ops, selftest
    from dgemma_local.bench.subject import open_model

    subject = open_model("demo", device=None, context=None)
    command.require_sound_kernels(subject)  # on a CPU no kernel runs, and none is tested
    outcome = selftest.Outcome("attention", False, "2 numbers")
    monkeypatch.setattr(selftest, "needed", lambda network: network is subject.network)
    monkeypatch.setattr(selftest, "failing", lambda network, context: [outcome])
    with pytest.raises(BenchRefused, match="attention"):
        command.require_sound_kernels(subject)
    monkeypatch.setattr(selftest, "failing", lambda network, context: [])
    command.require_sound_kernels(subject)
    monkeypatch.setattr(ops, "replaced", lambda: frozenset({"route"}))  # when it was opened
    with pytest.raises(BenchRefused, match="route"):
        command.require_sound_kernels(subject)
