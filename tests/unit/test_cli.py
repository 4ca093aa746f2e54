"""The command line: flags, prompts, streams and exit codes, with a fake session."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import fake_session
import pytest
from fake_session import FakeSession
from typer.testing import CliRunner

from dgemma_local import __version__, cli, interrupts, registry, streams
from dgemma_local.errors import CheckpointError, ConfigError, NumericalError, PromptError, TokenizerError, UnknownModel

TESTS = Path(__file__).parent.parent
DEMO = "demo model: tiny, trained on a CPU to show a canvas settling; knows little\n"


def dgemma(*arguments: str, stdin: bytes = b"") -> Any:
    return CliRunner().invoke(cli.app, arguments, input=stdin)


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No card, and an empty cache of models."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    fake = FakeSession("Hi user")
    monkeypatch.setitem(sys.modules, "dgemma_local.session", fake_session.module(fake))
    return fake


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model may be opened."""

    def refuse(*_: object) -> None:
        raise AssertionError("a model was opened")

    fake: Any = fake_session.module(FakeSession(""))
    fake.open_session = refuse
    monkeypatch.setitem(sys.modules, "dgemma_local.session", fake)


def process(*arguments: str, before: str = "", **options: Any) -> subprocess.CompletedProcess[bytes]:
    """The console script in a process of its own; `before` is Python, run first."""
    code = f"import fake_session\n{before}\nfake_session.main(*{arguments!r}, text='Hi user')"
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ
        | {"PYTHONPATH": f"{TESTS}:{TESTS.parent}", "PYTHONUNBUFFERED": ""},  # what is buffered is lost last
        timeout=20,
        **{"capture_output": True, **options},
    )


def error(found: Any, code: int) -> tuple[str, str]:
    """The two lines."""
    assert found.exit_code == code
    what, fix, rest = found.stderr.split("\n")[-3:]
    assert what.startswith("error: ") and fix.startswith("  fix: ") and rest == ""
    assert found.stdout == "" and "Traceback" not in found.stderr
    return what.removeprefix("error: "), fix.removeprefix("  fix: ")


# Streams


def test_the_answer_alone_goes_to_stdout(session: FakeSession) -> None:
    found = dgemma("run", "-p", "Hello", "--seed", "7")
    assert (found.exit_code, found.stdout) == (0, "Hi user\n")
    assert found.stderr == DEMO + "fake · --seed 7\ncomplete: 3 tokens in 1 canvas\n"


def test_thoughts_and_tool_calls_go_to_stderr(session: FakeSession) -> None:
    session.text = "<|channel>thought\nuser\n<channel|>Hi<|tool_call>call:Hi{}<tool_call|>"
    found = dgemma("run", "-p", "Hello", "--seed", "7", "--show-thinking")
    assert found.stdout == "Hi\n"
    done = "complete: 14 tokens in 1 canvas\n"
    assert found.stderr == DEMO + f"fake · --seed 7\nuser\ntool call: call:Hi{{}}\n{done}"
    assert dgemma("run", "-p", "Hello", "--quiet").stderr == DEMO


def test_a_thought_amid_the_answer_leaves_no_trace_on_stdout(session: FakeSession) -> None:
    session.text = "Hi<|channel>thought\nuser<channel|> model"
    assert dgemma("run", "-p", "Hello").stdout == "Hi model\n"


@pytest.mark.parametrize("text", ["Hi", "Hi\n", "Hi\n\n\n"])
def test_an_answer_ends_in_one_newline(session: FakeSession, text: str) -> None:
    session.text = text
    assert dgemma("run", "-p", "Hello").stdout == "Hi\n"


def test_a_model_that_is_no_demo_is_not_called_one(session: FakeSession) -> None:
    session.is_demo = False
    assert dgemma("run", "-p", "Hello", "--quiet").stderr == ""


def test_flags_reach_the_session(session: FakeSession) -> None:
    flags = [
        "--seed",
        "18446744073709551615",
        "--max-tokens",
        "9",
        "--steps",
        "5",
        "--think",
        "--stop",
        "X",
        "--stop",
        "YZ",
        "--system",
        "Be",
    ]
    assert dgemma("run", "-p", "Hello", *flags).exit_code == 0
    assert session.asked == {
        "messages": [{"role": "system", "content": "Be"}, {"role": "user", "content": "Hello"}],
        "seed": 18446744073709551615,
        "max_tokens": 9,
        "steps": 5,
        "thinking": True,
        "think_tokens": None,
        "stop": ["X", "YZ"],
    }


def test_wishes_reach_the_session(session: FakeSession) -> None:
    assert dgemma("run", "-p", "Hello", "-m", "mine").exit_code == 0
    assert session.opened is not None and session.opened[0] == "mine"
    assert {key: value for key, value in session.opened[1].items() if value} == {}
    flags = ["--dtype", "float32", "--device", "cuda", "--context", "300", "--vram", "17.5", "--fp8-attention"]
    assert dgemma("run", "-p", "Hello", "--fp8-embedding", "--fp8-mlp", *flags).exit_code == 0
    assert session.opened == (
        "demo",  # what auto is where no card is known
        {
            "dtype": "float32",
            "device": "cuda",
            "context": 300,
            "vram": 17.5,
            "fp8_attention": True,
            "fp8_embedding": True,
            "fp8_mlp": True,
            "checksum": False,
            "steps": None,
            "preset": None,
        },
    )


def test_a_seed_not_given_is_drawn_and_shown(session: FakeSession) -> None:
    seen = set()
    for _ in range(3):
        found = dgemma("run", "-p", "Hello")
        seen.add(session.asked["seed"])
        assert f"--seed {session.asked['seed']}\n" in found.stderr
    assert len(seen) == 3


def test_json(session: FakeSession) -> None:
    session.text = "<|channel>thought\nuser<channel|>Hi €\n"
    found = dgemma("run", "-p", "Hello", "--seed", "7", "--json", "--quiet")
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert lines[0] == {
        "event": "start", "model": "fake", "demo": True, "seed": 7, "max_tokens": 1024, "steps": 8, "canvas_length": 16,
        "settings": {"entropy_bound": 0.1},
    }  # fmt: skip
    assert [line["event"] for line in lines[1:]] == ["prefilled", *["step_done"] * 4, "canvas_committed", "finished"]
    assert lines[2].keys() == {
        "event", "canvas", "step", "steps", "temperature", "fed", "draft", "accepted", "next", "entropy", "done",
        "pinned",
    }  # fmt: skip
    assert lines[-2]["pieces"] == [{"kind": "thought", "text": "user"}, {"kind": "answer", "text": "Hi €\n"}]
    assert (lines[-1]["thought"], lines[-1]["answer"], lines[-1]["reason"]) == ("user", "Hi €\n", "end")
    assert found.stderr == ""
    assert found.stdout == dgemma("run", "-p", "Hello", "--seed", "7", "--json").stdout  # byte for byte


def test_timings_only_when_asked_for(session: FakeSession) -> None:
    found = dgemma("run", "-p", "Hello", "--json", "--stats")
    assert [json.loads(line).get("seconds") for line in found.stdout.splitlines()] == [None, *[0.25] * 7]
    plain = dgemma("run", "-p", "Hello", "--stats")
    assert plain.stdout == "Hi user\n"
    assert "sampler   at most 8 steps a canvas, entropy bound 0.1\n" in plain.stderr
    assert "steps     4; p50 250" in plain.stderr and "4 of at most 8 steps\n" in plain.stderr


def test_notices(session: FakeSession) -> None:
    session.text, session.taken = "Hi user Hi user model model model Hi", 8
    found = dgemma("run", "-p", "Hello", "--max-tokens", "9")
    assert found.stderr.endswith(
        "stopped at --max-tokens 9, and 1 of 1 canvas did not converge in 8 steps; raise it for the rest\n"
    )
    assert found.exit_code == 17
    session.reason = "context"
    assert "no room for another canvas" in dgemma("run", "-p", "Hello").stderr


def test_a_view_that_cannot_be_drawn_is_said_once_and_left_out(session: FakeSession) -> None:
    found = dgemma("run", "-p", "Hello", "--visualize")
    assert found.stdout == "Hi user\n" and found.stderr.count("--visualize needs") == 1
    assert "\x1b" not in found.output


def test_force_color_writes_no_escape_code_into_a_pipe(session: FakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert "\x1b" not in dgemma("run", "-p", "Hello", "--visualize", "--stats").output
    assert "\x1b" not in dgemma("models").output


# Outcomes


@pytest.mark.parametrize(
    ("text", "reason", "said"),
    [
        ("", "end", "ended its turn without an answer"),
        ("\n \n", "end", "ended its turn without an answer"),
        ("<|tool_call>call:Hi{}<tool_call|>", "end", "called a tool"),
        ("", "stop", "began with a stop string"),
    ],
)
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_an_empty_answer_is_an_error(session: FakeSession, text: str, reason: Any, said: str, form: list[str]) -> None:
    session.text, session.reason = text, reason
    found = dgemma("run", "-p", "Hello", *form)
    assert found.exit_code == 9
    assert said in found.stderr and "  fix: " in found.stderr


def test_interrupted_after_some_text(session: FakeSession) -> None:
    session.reason = "interrupted"
    found = dgemma("run", "-p", "Hello")
    assert (found.exit_code, found.stdout) == (130, "Hi user\n")
    assert found.stderr.endswith("interrupted\n")


def test_interrupted_before_any_text(session: FakeSession) -> None:
    session.text, session.reason = "", "interrupted"
    found = dgemma("run", "-p", "Hello")
    assert (found.exit_code, found.stdout) == (130, "")


def test_ctrl_c_while_the_model_opens(monkeypatch: pytest.MonkeyPatch, session: FakeSession) -> None:
    def press(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["dgemma_local.session"], "open_session", press)
    found = dgemma("run", "-p", "Hello")
    assert (found.exit_code, found.stdout, found.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    "kind", [PromptError, UnknownModel, ConfigError, CheckpointError, TokenizerError, NumericalError]
)
def test_errors_are_two_lines_and_a_code(session: FakeSession, kind: Any) -> None:
    session.error = kind("what\nis\x1b[2J wrong", "do this")
    found = dgemma("run", "-p", "Hello", "--quiet")
    assert error(found, kind.exit_code) == ("what is�[2J wrong", "do this")


# Usage and prompts, all before a model is opened


@pytest.mark.usefixtures("closed")
@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["FILE", "-p", "Hello"],
        ["-p", "Hello", "--quiet", "--visualize"],
        ["-p", "Hello", "--quiet", "--stats"],
        ["-p", "Hello", "--slow", "0.3"],
        ["-p", "Hello", "--seed", "-1"],
        ["-p", "Hello", "--seed", "18446744073709551616"],
        ["-p", "Hello", "--stop", ""],
    ],
)
def test_flags_that_make_no_sense_together(flags: list[str]) -> None:
    error(dgemma("run", *flags), 2)


@pytest.mark.usefixtures("closed")
def test_a_view_has_no_place_in_json() -> None:
    found = dgemma("run", "-p", "Hello", "--json", "--visualize")
    assert found.exit_code == 2 and found.stderr.startswith("error: --json and --visualize exclude each other\n")
    assert json.loads(found.stdout)["exit_code"] == 2


@pytest.mark.usefixtures("closed")
@pytest.mark.parametrize(
    "flags",
    [
        ["--max-tokens", "0"],
        ["--steps", "0"],
        ["--dtype", "int8"],
        ["--sead", "1"],
        ["--slow", "nan", "--visualize"],
        ["a", "b"],
    ],
)
def test_flags_out_of_range(flags: list[str]) -> None:
    assert dgemma("run", "-p", "Hello", *flags).exit_code == 2


@pytest.mark.usefixtures("closed")
@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b" \n\t\n", "is blank"),
        (b"caf\xc3\xa9\ncaf\xe9\n", "is not UTF-8 text (line 2)"),
        ("Hi".encode("utf-16"), "is not UTF-8 text (line 1)"),
        (b"x" * (16 * 1024 * 1024 + 1), "is larger than 16 MiB"),
    ],
)
def test_prompts_that_cannot_be_read(tmp_path: Path, raw: bytes, said: str) -> None:
    path = tmp_path / "prompt"
    path.write_bytes(raw)
    assert said in error(dgemma("run", str(path)), 3)[0]
    assert error(dgemma("run", "-", stdin=raw), 3)[0] == f"standard input {said}"


@pytest.mark.usefixtures("closed")
def test_prompts_that_are_not_there(tmp_path: Path) -> None:
    assert "there is no file" in error(dgemma("run", str(tmp_path / "none")), 3)[0]
    assert "is a folder" in error(dgemma("run", str(tmp_path)), 3)[0]
    assert "cannot be read" in error(dgemma("run", "a\0b"), 3)[0]
    assert "is empty" in error(dgemma("run", "-p", ""), 3)[0]
    assert "--system is blank" in error(dgemma("run", "-p", "Hello", "--system", " "), 3)[0]
    assert "is not UTF-8" in error(dgemma("run", "-p", "\udce9"), 3)[0]


@pytest.mark.parametrize(
    ("raw", "prompt"),
    [
        (b"  two\n\nlines \n", "  two\n\nlines "),
        (b"one\r\n", "one"),
        (b"one\n\n", "one\n"),
        (b"\xef\xbb\xbfmark", "mark"),
    ],
)
def test_a_prompt_is_passed_as_it_is(session: FakeSession, tmp_path: Path, raw: bytes, prompt: str) -> None:
    path = tmp_path / "prompt"
    path.write_bytes(raw)
    for arguments, stdin in (([str(path)], b""), (["-"], raw)):
        assert dgemma("run", *arguments, stdin=stdin).exit_code == 0
        assert session.asked["messages"] == [{"role": "user", "content": prompt}]


# Other commands


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["run", "--nope"], "No such option: --nope"),
        (["run", "--max-tokens", "many"], "Invalid value for '--max-tokens'"),
        (["run", "--vram", "inf"], "Invalid value for '--vram'"),
        (["run", "--vram", "nan"], "Invalid value for '--vram'"),
        (["fly"], "No such command 'fly'"),
        (["models", "fly"], "No such command 'fly'"),
        (["models", "rm"], "Missing argument 'NAME'"),
        (["models", "show", "--context", "0"], "Invalid value for '--context'"),
    ],
)
def test_flags_the_parser_refuses_are_two_lines(arguments: list[str], what: str) -> None:
    found = dgemma(*arguments)
    lines = found.stderr.splitlines()
    assert found.exit_code == 2 and not found.stdout and len(lines) == 2
    assert lines[0].startswith(f"error: {what}")
    assert lines[1].startswith("  fix: `") and "--help` lists what can be given" in lines[1]


def test_version() -> None:
    for arguments in (["version"], ["--version"]):
        assert dgemma(*arguments).stdout == f"dgemma {__version__}\n"


def test_models_in_a_pipe_are_aligned_columns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entries = [
        registry.Entry(name="a", folder=tmp_path, format="bf16", needs=0.0, licence="MIT", note="x y"),
        registry.Entry(name="long-name", repository="r", bytes=51_647_701_024, needs=48.9),
    ]
    monkeypatch.setattr(registry, "table", lambda: {entry.name: entry for entry in entries})
    assert dgemma("models").stdout.splitlines() == [
        "name       format  weights     VRAM  here  licence  note",
        "a          bf16          -     none  yes   MIT      x y",
        "long-name  -       51.6 GB  48.9 GB  no    -",
    ]


def test_run_has_words_for_every_flag() -> None:
    shown = dgemma("run", "--help")
    assert shown.exit_code == 0
    for flag in (
        "--prompt",
        "--seed",
        "--max-tokens",
        "--steps",
        "--json",
        "--stats",
        "--quiet",
        "--visualize",
        "--slow",
    ):
        assert flag in shown.stdout


# The process


@pytest.mark.parametrize("arguments", [("--help",), ("run", "--help"), ("models",), ("run", "-p", "")])
def test_what_is_cheap_imports_nothing_heavy(arguments: tuple[str, ...]) -> None:
    heavy = {
        "torch",
        "triton",
        "transformers",
        "compressed_tensors",
        "tokenizers",
        "safetensors",
        "jinja2",
        "huggingface_hub",
    }
    code = (
        "import sys\nfrom dgemma_local import cli\n"
        f"sys.argv = ['dgemma', *{arguments!r}]\n"
        f"try: cli.main()\nfinally: print('HEAVY', {heavy!r} & set(sys.modules), file=sys.stderr)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=TESTS.parent, timeout=20)
    assert b"HEAVY set()" in found.stderr


def test_a_reader_that_leaves_is_no_error_of_ours() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as gone:
        for arguments in (["run", "-p", "Hello"], ["run", "-p", "Hello", "--json"], ["models"], ["version"]):
            found = process(*arguments, stdout=gone, stderr=subprocess.PIPE, capture_output=False)
            assert found.returncode == 141
            assert b"Traceback" not in found.stderr and b"Broken" not in found.stderr


def test_a_reader_of_both_streams_that_leaves() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as gone:
        assert process("run", "-p", "Hello", stdout=gone, stderr=gone, capture_output=False).returncode == 141


@pytest.mark.parametrize(
    ("closing", "arguments", "code"),
    [
        (0, ["run", "-"], 3),
        (0, ["run", "-p", "Hello"], 0),
        (1, ["run", "-p", "Hello"], 141),
        (2, ["run", "-p", "Hello"], 0),
    ],
)
def test_streams_closed_by_the_caller(closing: int, arguments: list[str], code: int) -> None:
    found = process(*arguments, preexec_fn=lambda: os.close(closing))
    assert found.returncode == code
    assert b"Traceback" not in found.stderr
    assert found.stdout == (b"Hi user\n" if code == 0 else b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said_in_two_lines() -> None:
    with Path("/dev/full").open("wb") as full:
        found = process("run", "-p", "Hello", stdout=full, stderr=subprocess.PIPE, capture_output=False)
    assert found.returncode == 1
    assert b"Traceback" not in found.stderr and b"No space left" in found.stderr


def test_an_encoding_without_the_letter() -> None:
    before = "import sys; sys.stdout.reconfigure(encoding='ascii')"
    code = f"{before}\nimport fake_session; fake_session.main('run', '-p', 'Hello', text='€')"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    )
    assert (found.returncode, found.stdout) == (0, b"?\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_what_cannot_be_said_changes_nothing_else() -> None:
    with Path("/dev/full").open("wb") as full:
        answered = process("run", "-p", "Hello", stdout=subprocess.PIPE, stderr=full, capture_output=False)
        refused = process("run", "-p", "", stdout=subprocess.PIPE, stderr=full, capture_output=False)
        neither = process("run", "-p", "Hello", stdout=full, stderr=full, capture_output=False)
    assert (answered.returncode, answered.stdout) == (0, b"Hi user\n")
    assert (refused.returncode, refused.stdout) == (3, b"")
    assert neither.returncode == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_help_for_a_full_disk(arguments: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        found = process(*arguments, stdout=full, stderr=subprocess.PIPE, capture_output=False)
    assert found.returncode == 1
    assert b"Traceback" not in found.stderr and b"No space left" in found.stderr


@pytest.mark.parametrize("number", [errno.EIO, errno.EBADF])
def test_a_disk_that_fails_is_not_taken_for_the_output(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number), "weights")

    monkeypatch.setattr(sys.modules["dgemma_local.session"], "open_session", fail)
    what, _ = error(dgemma("run", "-p", "Hello"), 1)
    assert what == f"the system refuses: {os.strerror(number)}: weights"


def test_a_pipe_that_does_not_block_gets_everything() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    code = "import fake_session; fake_session.main('run', '-p', 'Hello', '--json', text='Hi user ' * 400)"
    environment = os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    running = subprocess.Popen([sys.executable, "-c", code], stdout=write, stderr=subprocess.DEVNULL, env=environment)
    os.close(write)
    with os.fdopen(read, "rb") as reader:
        first = reader.read(1)
        time.sleep(0.5)  # it is full by now
        text = first + reader.read()
    assert running.wait(timeout=20) == 17  # cut at --max-tokens
    assert len(text) > 1 << 17  # twice what a pipe holds
    assert json.loads(text.splitlines()[-1])["event"] == "finished"


@pytest.mark.parametrize("ignored", [False, True])
def test_ctrl_c_while_the_command_line_is_imported(ignored: bool) -> None:
    code = (
        "import os, signal, sys, types\n"
        # a job in the background inherits SIG_IGN
        f"signal.signal(signal.SIGINT, signal.{'SIG_IGN' if ignored else 'default_int_handler'})\n"
        "class Cli(types.ModuleType):\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'dgemma_local.cli': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Cli)\n"
        "sys.argv = ['dgemma', 'version']\n"
        "from dgemma_local.__main__ import main\nmain()"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=TESTS.parent, timeout=20)
    assert found.returncode == (0 if ignored else -signal.SIGINT)
    assert found.stderr == b""


def test_ctrl_c_is_an_exception_once_a_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from dgemma_local import __main__ as script

    seen = []
    monkeypatch.setattr(cli, "main", lambda: seen.append(signal.getsignal(signal.SIGINT)) or dgemma("version"))
    monkeypatch.setattr(streams, "release", lambda: seen.append(signal.getsignal(signal.SIGINT)))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        script.main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [interrupts.leave_early, signal.default_int_handler]
    scripts = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"dgemma": "dgemma_local.__main__:main"}


# Words


def test_an_error_is_never_a_wall_of_text(session: FakeSession) -> None:
    session.error = ConfigError("x" * 1000, "y" * 1000)
    what, fix = error(dgemma("run", "-p", "Hello", "--quiet"), 5)
    assert len("error: " + what) <= 410 and len("  fix: " + fix) <= 410 and what.endswith("x…")


def test_one_step_is_singular(session: FakeSession) -> None:
    session.taken = 8
    assert "did not converge in 1 step; " in dgemma("run", "-p", "Hello", "--steps", "1").stderr


def test_think_is_left_out_only_by_those_who_gave_it(session: FakeSession) -> None:
    session.text = "<|channel>thought\nuser"
    bound = {True: ", bound the thought (--think-tokens)", False: ""}
    for reason, longer in (("end", ""), ("budget", "raise --max-tokens{}, or ")):
        session.reason = reason  # type: ignore[assignment]
        for flags, fix in ((["--think"], "leave --think out"), ([], "give another --seed")):
            found = dgemma("run", "-p", "Hello", "--quiet", *flags)
            cure = longer.format(bound[bool(flags)])
            assert found.exit_code == 16 and f"  fix: {cure}{fix}\n" in found.stderr


@pytest.mark.usefixtures("closed")
def test_a_stop_string_that_is_no_text() -> None:
    assert error(dgemma("run", "-p", "Hello", "--stop", "\udce9"), 3)[0] == "--stop is not UTF-8 text"


def test_a_blank_stop_string_is_one(session: FakeSession) -> None:
    assert dgemma("run", "-p", "Hello", "--stop", "\n").exit_code == 0


def test_help_names_every_exit_code() -> None:
    codes = dgemma("--help").stdout.split("Exit codes:")[1]
    for code in ("1 ", "2 ", "3 ", "4 ", "7 ", "8 ", "9 ", "16 ", "17 ", "18 ", "130 ", "141 ", "143 "):
        assert f" {code}" in codes.replace("\n", " ")


def test_the_demo_label_is_one_line() -> None:
    assert len(DEMO.rstrip("\n")) <= 78
