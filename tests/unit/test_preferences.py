"""The user's own defaults: what the file and the environment may say, what goes first, and what is idle."""

import errno
import json
import os
import sys
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import fake_session
import pytest
import typer
from fake_chat import FakeChat
from fake_session import FakeSession
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from dgemma_local import cli, cli_page, preferences, toml_file
from dgemma_local.cli_help import PAGES
from dgemma_local.errors import ConfigError, DgemmaError, UnknownModel, UsageError
from dgemma_local.fit import AtMost
from dgemma_local.toml_file import edited, written

GROUP: Any = typer.main.get_command(cli.app)
KNOWN = preferences.settings(GROUP)


def dgemma(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, arguments)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's file, empty."""
    path = tmp_path / "config.toml"
    path.write_text("", encoding="utf-8")
    monkeypatch.setenv("DGEMMA_CONFIG", str(path))
    return path


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    fake = FakeChat("Hi user")
    monkeypatch.setitem(sys.modules, "dgemma_local.session", fake_session.module(fake))
    return fake


def start(*arguments: str) -> dict[str, Any]:
    """What the first line of --json says of a run."""
    found = dgemma("run", "-p", "Hi", "--json", *arguments)
    assert found.exit_code == 0, found.stderr
    said: dict[str, Any] = json.loads(found.stdout.splitlines()[0])
    return said


# What goes first


def test_flag_then_variable_then_file_then_built_in(
    config: Path, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start()["max_tokens"] == 1024
    config.write_text("[run]\nmax-tokens = 11\n", encoding="utf-8")
    assert start()["max_tokens"] == 11
    monkeypatch.setenv("DGEMMA_RUN_MAX_TOKENS", "12")
    assert start()["max_tokens"] == 12
    assert start("--max-tokens", "13")["max_tokens"] == 13
    monkeypatch.setenv("DGEMMA_RUN_MAX_TOKENS", "")  # as if it were not set
    assert start()["max_tokens"] == 11


def test_every_option_has_a_variable_of_its_own_and_one_key() -> None:
    variables = [setting.variable for setting in KNOWN.values()]
    assert len({*variables}) == len(variables)
    assert {"run.max-tokens", "run.json", "models.show.vram", "bench.view", "replay.speed"} <= KNOWN.keys()
    assert KNOWN["models.show.fp8-mlp"].variable == "DGEMMA_MODELS_SHOW_FP8_MLP"
    assert KNOWN["run.json"].variable == "DGEMMA_RUN_JSON"  # by the option, whatever its name in Python
    for path, command in preferences.leaves(GROUP):
        if path[0] not in preferences.WITHOUT:
            for parameter, name in preferences.options(command):
                assert parameter.envvar == KNOWN[".".join((*path, name))].variable


def test_what_belongs_to_one_run_is_no_default() -> None:
    """The prompt, what is written over, what is agreed to."""
    assert not {"run.prompt", "run.record", "replay.export", "models.rm.yes"} & KNOWN.keys()


def test_a_flag_that_is_on_is_taken_back(config: Path, session: FakeSession) -> None:
    config.write_text("[run]\njson = true\n", encoding="utf-8")
    assert dgemma("run", "-p", "Hi").stdout.startswith('{"event"')
    found = dgemma("run", "-p", "Hi", "--no-json")
    assert found.exit_code == 0 and not found.stdout.startswith("{")


def test_an_opposite_never_hides_an_option() -> None:
    app = typer.Typer()
    app.command(cls=cli_page.Page)(save)
    command: Any = typer.main.get_command(app)
    parser = command.make_parser(typer.Context(command))
    assert parser._long_opt["--no-save"].obj.name == "no_save"
    assert parser._long_opt["--no-no-save"].obj.name == "no_save"


def save(
    save: Annotated[bool, typer.Option("--save")] = False, no_save: Annotated[bool, typer.Option("--no-save")] = False
) -> None: ...


# What is idle


@pytest.mark.parametrize(
    "line", ["slow = 0.2", "fps = 5", 'view = "grid"', 'theme = "light"', "step = true", "no-prompt = true"]
)
def test_a_default_without_what_it_acts_on_is_idle(line: str, config: Path, session: FakeSession) -> None:
    config.write_text(f"[run]\n{line}\n", encoding="utf-8")
    found = dgemma("run", "-p", "Hi")
    assert found.exit_code == 0 and "error" not in found.stderr


def test_as_a_flag_it_is_refused(config: Path, session: FakeSession) -> None:
    assert dgemma("run", "-p", "Hi", "--slow", "0.2").exit_code == UsageError.exit_code


def test_an_idle_default_comes_alive(config: Path, session: FakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    config.write_text("[run]\nslow = 0.25\n", encoding="utf-8")
    import dgemma_local.ui as ui

    monkeypatch.setattr(ui, "show", lambda events, record, vocabulary, wanted: seen.append(wanted.slow))
    for arguments in ((), ("--visualize",)):
        dgemma("run", "-p", "Hi", *arguments)
    assert seen == [0.0, 0.25]


@pytest.mark.parametrize(
    ("line", "flag"), [("visualize = true", "--json"), ("stats = true", "--quiet"), ("verbose = true", "--quiet")]
)
def test_a_default_gives_way_to_a_flag(line: str, flag: str, config: Path, session: FakeSession) -> None:
    config.write_text(f"[run]\n{line}\n", encoding="utf-8")
    assert dgemma("run", "-p", "Hi", flag).exit_code == 0
    name = line.split()[0]
    assert dgemma("run", "-p", "Hi", flag, f"--{name}").exit_code == UsageError.exit_code


def test_of_two_defaults_the_variable_stays(
    config: Path, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text("[run]\nvisualize = true\n", encoding="utf-8")
    monkeypatch.setenv("DGEMMA_RUN_JSON", "1")
    assert dgemma("run", "-p", "Hi").stdout.startswith('{"event"')


def test_bench_gives_way_too(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    import dgemma_local.bench.command as command

    monkeypatch.setattr(command, "run", lambda request, *_: asked.append(request))
    config.write_text('[bench]\nmodel = "x"\nlayout = "fp8"\n', encoding="utf-8")
    assert dgemma("bench", "--demo").exit_code == 0
    assert asked[0].model == "demo" and asked[0].layout is None


def test_the_rules_name_what_there_is() -> None:
    for words, page in PAGES.items():
        command = dict(preferences.leaves(GROUP)).get(tuple(words.split()))
        if command is None:
            continue  # mounted by another file
        names = {parameter.name for parameter in command.params}
        ruled = (
            {name for pair in page.exclusive for name in pair}
            | {*page.needs}
            | {n for ns in page.needs.values() for n in ns}
            | {name for pair in (*page.less, *page.yields) for name in pair}
            | {*page.terminal, *page.at_most}
        )
        assert ruled <= names, words


# What is refused


BROKEN = {
    "[run]\nstepz = 3": ("run.stepz", "run.steps"),
    "[run]\nmax_tokens = 3": ("run.max_tokens", "run.max-tokens"),
    "[rum]\nsteps = 3": ("rum", "every key"),
    "steps = 3": ("steps", "run.steps"),
    "[run.deeper]\nsteps = 3": ("run.deeper", ""),
    "[version]\nx = 1": ("version", "every key"),
    "[run]\nsteps = 2.5": ("run.steps = 2.5", "a whole number"),
    "[run]\nsteps = true": ("run.steps = True", "a whole number"),
    '[run]\nsteps = "3"': ("run.steps = '3'", "a whole number"),
    "[run]\nsteps = 0": ("run.steps = 0", "greater"),
    "[run]\nsteps = 99999": ("run.steps = 99999", "less"),
    "[run]\nthink = 1": ("run.think = 1", "true or false"),
    '[run]\nslow = "fast"': ("run.slow = 'fast'", "a number"),
    "[run]\nslow = -1": ("run.slow = -1", "greater"),
    '[run]\nview = "gird"': ("run.view = 'gird'", "'grid'"),
    "[run]\nslow = nan": ("run.slow = nan", "not a number"),
    "[run]\nseed = -1": ("run.seed = -1", "out of range"),
    "[bench]\nseed = 0x1_0000_0000_0000_0000": ("bench.seed = 18446744073709551616", "out of range"),
    '[run]\nsystem = " "': ("run.system = ' '", "blank"),
    '[run]\nstop = ["a", ""]': ("run.stop = ['a', '']", "empty"),
    '[run]\nstop = "a"': ("run.stop = 'a'", "a list"),
    "[run]\nstop = [1]": ("run.stop = [1]", "a list"),
    '[run]\nmodel = ["a"]': ("run.model", "text"),
    "run = 3": ("run", "every key"),
    "[run": ("TOML", "line"),
    '[run]\nprompt = "x"': ("run.prompt", ""),
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_file_is_one_line_with_file_key_and_cure(text: str, config: Path, session: FakeSession) -> None:
    config.write_text(text, encoding="utf-8")
    found = dgemma("run", "-p", "Hi")
    assert found.exit_code == ConfigError.exit_code and found.stdout == ""
    what, fix = found.stderr.splitlines()
    assert what.startswith(f"error: {config}") and fix.startswith("  fix: ")
    assert all(part in what + fix for part in BROKEN[text])


def test_help_and_config_are_given_whatever_the_file_says(config: Path) -> None:
    config.write_text("[run", encoding="utf-8")
    assert dgemma("run", "--help").exit_code == 0
    assert dgemma("version").exit_code == 0
    assert dgemma("config", "--path").stdout == f"{config}\n"
    assert dgemma("config").exit_code == ConfigError.exit_code


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("DGEMMA_RUN_STEPZ", "3", "DGEMMA_RUN_STEP"),
        ("DGEMMA_RUN_PROMPT", "3", "unset"),
        ("DGEMMA_MODELS_SHOW_X", "3", "unset"),
        ("DGEMMA_RUN_STEPS", "three", "DGEMMA_RUN_STEPS"),
        ("DGEMMA_RUN_STEPS", "0", "DGEMMA_RUN_STEPS"),
        ("DGEMMA_RUN_THINK", "maybe", "DGEMMA_RUN_THINK"),
    ],
)
def test_a_broken_variable_is_named(
    name: str, value: str, said: str, config: Path, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    found = dgemma("run", "-p", "Hi")
    assert found.exit_code == UsageError.exit_code
    what, fix = found.stderr.splitlines()
    assert name in what and said in what + fix and "unset" in fix


def test_variables_of_another_kind_are_left_alone(
    config: Path, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DGEMMA_OPS", "torch")
    assert dgemma("run", "-p", "Hi").exit_code == 0


def test_a_file_that_is_named_and_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DGEMMA_CONFIG", str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match=r"none\.toml"):
        preferences.read(KNOWN, preferences.file())


def test_the_folder_is_that_of_models_toml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DGEMMA_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert preferences.file() == tmp_path / "dgemma" / "config.toml"
    assert preferences.read(KNOWN, preferences.file()) == {}


# Writing


def test_an_edit_leaves_every_other_line() -> None:
    before = "# mine\n[run]  # often\nsteps = 8 # few\nslow = 0.5\n\n[bench]\nseed = 3"
    after = edited(before, "run", "steps", "24")
    assert after == "# mine\n[run]  # often\nsteps = 24 # few\nslow = 0.5\n\n[bench]\nseed = 3\n"
    after = edited(after, "run", "fps", "5")
    assert after == "# mine\n[run]  # often\nsteps = 24 # few\nslow = 0.5\nfps = 5\n\n[bench]\nseed = 3\n"
    assert edited(after, "models.show", "vram", "24").endswith("seed = 3\n\n[models.show]\nvram = 24\n")
    assert "steps" not in edited(after, "run", "steps", None)
    assert edited("", "run", "steps", "1") == "[run]\nsteps = 1\n"


@given(
    st.one_of(
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters(codec="utf-8")),
    )
)
def test_what_is_written_is_read_again(value: object) -> None:
    assert tomllib.loads(f"x = {written(value)}") == {"x": value}


def test_put_refuses_a_file_that_it_would_misread(config: Path) -> None:
    config.write_text("run.steps = 8\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be edited"):
        preferences.put(KNOWN, config, "run.steps", ["9"])
    assert config.read_text(encoding="utf-8") == "run.steps = 8\n"


def test_put_follows_a_link_and_keeps_the_mode(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.chmod(0o640)
    link = tmp_path / "link.toml"
    link.symlink_to(config)
    preferences.put(KNOWN, link, "run.steps", ["9"])
    assert link.is_symlink() and config.stat().st_mode & 0o777 == 0o640
    assert tomllib.loads(config.read_text(encoding="utf-8")) == {"run": {"steps": 9}}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml", "link.toml"]


def test_put_says_where_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be written"):
        preferences.put(KNOWN, tmp_path / "file" / "config.toml", "run.steps", ["9"])


@pytest.mark.parametrize("arguments", [("config", "run.steps", "9"), ("config",), ("run", "-p", "Hi"), ("pull", "x")])
def test_a_pipe_is_neither_waited_for_nor_replaced(arguments: tuple[str, ...], config: Path) -> None:
    config.unlink()
    os.mkfifo(config)
    found = dgemma(*arguments)
    assert found.exit_code == ConfigError.exit_code and f"{config} cannot be read: it is no regular" in found.stderr
    assert config.is_fifo() and [*config.parent.iterdir()] == [config]
    assert dgemma("run", "--help").exit_code == 0


def test_a_write_looks_again_at_what_is_there(config: Path) -> None:
    config.unlink()
    os.mkfifo(config)
    with pytest.raises(ConfigError, match="cannot be written: it is no regular file"):
        toml_file.write(config, b"", "set DGEMMA_CONFIG")
    assert config.is_fifo() and [*config.parent.iterdir()] == [config]


def test_a_file_without_end_is_one_line(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toml_file, "LONGEST", 99)
    config.write_text("#" * 99, encoding="utf-8")
    assert preferences.read(KNOWN, config) == {}
    config.write_text("#" * 100, encoding="utf-8")
    with pytest.raises(ConfigError, match="longer than 99 bytes"):
        preferences.read(KNOWN, config)


def test_a_link_that_leads_nowhere_is_not_an_empty_file(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.unlink()
    config.symlink_to("none.toml")
    with pytest.raises(ConfigError, match=r"DGEMMA_CONFIG names .* which is not there"):
        preferences.read(KNOWN, config)
    monkeypatch.delenv("DGEMMA_CONFIG")
    with pytest.raises(ConfigError, match="a link to what is not there"):
        preferences.read(KNOWN, config)
    with pytest.raises(ConfigError, match="a link to what is not there"):
        preferences.put(KNOWN, config, "run.steps", ["9"])
    assert config.is_symlink() and not config.exists()


def test_no_torch_is_imported() -> None:
    assert "torch" not in {*vars(preferences)} | {*vars(cli_page)}
    assert os.environ["DGEMMA_CONFIG"] == os.devnull  # no test reads the defaults of whoever runs it


@pytest.mark.parametrize(
    ("line", "after"),
    [
        ("steps = 24 # don't touch", "steps = 9 # don't touch"),
        ('steps = 24 # say "nine"', 'steps = 9 # say "nine"'),
        ('"steps"=24#x', '"steps"=9#x'),
        ("steps = 'a#b' # c", "steps = 9 # c"),
        ('steps = "a\\"#b" # c', "steps = 9 # c"),
        ("steps = ['#', \"#\"]", "steps = 9"),
    ],
)
def test_a_comment_behind_a_value_stays(line: str, after: str) -> None:
    assert edited(f"[run]\n{line}\n", "run", "steps", "9") == f"[run]\n{after}\n"


def test_lines_end_as_they_did_and_the_mark_stays(config: Path) -> None:
    config.write_bytes(b"\xef\xbb\xbf# mine\r\n[run]\r\nsteps = 8 # few\r\n")
    for key, value in (("run.steps", "9"), ("run.fps", "5"), ("bench.seed", "3")):
        preferences.put(KNOWN, config, key, [value])
    assert config.read_bytes() == (
        b"\xef\xbb\xbf# mine\r\n[run]\r\nsteps = 9 # few\r\nfps = 5.0\r\n\r\n[bench]\r\nseed = 3\r\n"
    )


def test_a_full_disk_leaves_nothing_behind(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tempfile.NamedTemporaryFile

    def full(*arguments: Any, **named: Any) -> Any:
        new: Any = whole(*arguments, **named)
        new.write = refuse
        return new

    def refuse(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", full)
    with pytest.raises(ConfigError, match="No space left") as found:
        preferences.put(KNOWN, config, "run.steps", ["9"])
    assert "make room" in found.value.fix and [*config.parent.iterdir()] == [config]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("run.system", "a\udcffb", "not UTF-8"),
        ("run.stop", "a\udcffb", "not UTF-8"),
        ("run.system", " ", "blank"),
        ("run.stop", "", "blank"),
        ("run.slow", "nan", "not a number"),
        ("run.seed", "-1", "out of range"),
        ("run.seed", str(1 << 64), "from 0 to 18446744073709551615"),
    ],
)
def test_what_a_run_would_refuse_is_not_set(key: str, value: str, said: str, config: Path) -> None:
    with pytest.raises(UsageError, match=said):
        preferences.put(KNOWN, config, key, [value])
    assert [*config.parent.iterdir()] == [config] and config.read_bytes() == b""


def test_a_stop_string_may_be_a_line_feed(config: Path) -> None:
    preferences.put(KNOWN, config, "run.stop", ["\n"])
    assert preferences.read(KNOWN, config) == {"run.stop": ["\n"]}


@pytest.mark.parametrize(("name", "meant"), [("DGEMMA_OP", "DGEMMA_OPS"), ("DGEMMA_LOGS", "DGEMMA_LOG")])
def test_a_mistyped_variable_of_another_kind_is_refused(
    name: str, meant: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DGEMMA_COMPILE_CACHE", "x")  # of nobody here
    preferences.check_environment(GROUP, KNOWN)
    monkeypatch.setenv(name, "x")
    with pytest.raises(UsageError, match=name) as found:
        preferences.check_environment(GROUP, KNOWN)
    assert f"did you mean {meant}?" in found.value.fix


def test_an_error_says_where_a_default_comes_from(
    config: Path, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text("[run]\nthink = true\nthink-tokens = 9999\nmax-tokens = 12\n", encoding="utf-8")
    found = dgemma("run", "-p", "Hi")
    assert found.exit_code == UsageError.exit_code  # the file contradicts itself
    for part in (f"run.think-tokens is set in {config}", f"run.max-tokens is set in {config}", "; "):
        assert part in found.stderr.splitlines()[0]
    monkeypatch.setenv("DGEMMA_RUN_THINK_TOKENS", "99")
    monkeypatch.setenv("DGEMMA_RUN_MAX_TOKENS", "12")
    assert "--max-tokens is set by DGEMMA_RUN_MAX_TOKENS" in dgemma("run", "-p", "Hi").stderr.splitlines()[0]
    said = dgemma("run", "-p", "Hi", "--think-tokens", "99", "--max-tokens", "9").stderr
    assert said.startswith("error: --think-tokens 99") and "set " not in said


# What cannot hold beside something stronger


@pytest.mark.parametrize(
    ("lines", "flags", "asked"),
    [
        (
            "think = true\nthink-tokens = 50",
            "--max-tokens 40",
            {"max_tokens": 40, "think_tokens": None, "thinking": True},
        ),
        ("think = true\nthink-tokens = 5000", "", {"max_tokens": 1024, "think_tokens": None}),
        ("think-tokens = 50", "", {"think_tokens": None, "thinking": False}),
        ("think = true\nthink-tokens = 50", "--no-think", {"think_tokens": None, "thinking": False}),
        ("think = true\nmax-tokens = 40", "--think-tokens 50", {"max_tokens": 1024, "think_tokens": 50}),
        ("think = true\nthink-tokens = 50", "", {"think_tokens": 50}),
    ],
)
def test_a_default_gives_way_to_what_it_cannot_hold_beside(
    lines: str, flags: str, asked: dict[str, Any], config: Path, session: FakeSession
) -> None:
    config.write_text(f"[run]\n{lines}\n", encoding="utf-8")
    found = dgemma("run", "-p", "Hi", *flags.split())
    assert found.exit_code == 0, found.stderr
    assert {name: session.asked[name] for name in asked} == asked


@pytest.mark.parametrize("flags", ["--json", "--quiet", "", "--visualize"])
@pytest.mark.parametrize(
    "lines", ["visualize = true\nstep = true", "show-thinking = true", "stats = true", "step = true"]
)
def test_no_default_makes_a_run_fail(lines: str, flags: str, config: Path, session: FakeSession) -> None:
    """Nor without a terminal, which these runs have none of."""
    config.write_text(f"[run]\n{lines}\n", encoding="utf-8")
    found = dgemma("run", "-p", "Hi", *flags.split())
    assert found.exit_code == 0 and "--step" not in found.stderr, found.stderr


def test_what_is_drawn_is_idle_without_a_terminal_before_the_prompt_is_read(config: Path, session: FakeSession) -> None:
    config.write_text("[run]\nvisualize = true\nstep = true\n", encoding="utf-8")
    found = CliRunner().invoke(cli.app, ["run", "-"], input="Hi")
    assert (found.exit_code, found.stdout) == (0, "Hi user\n") and "--visualize" not in found.stderr, found.stderr
    found = CliRunner().invoke(cli.app, ["run", "-", "--visualize"], input="Hi")
    assert found.exit_code == 0 and "--visualize needs stderr to be a terminal" in found.stderr, found.stderr


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_context_is_firm_as_a_flag_alone(command: str, config: Path, session: FakeSession) -> None:
    config.write_text(f"[{command}]\ncontext = 900\n", encoding="utf-8")
    words = {"run": "-p Hi", "chat": "--no-save"}[command]
    contexts = []
    for flags in ((), ("--context", "800")):
        CliRunner().invoke(cli.app, [command, *words.split(), *flags], input="")
        assert session.opened is not None
        contexts.append(session.opened[1]["context"])
    assert contexts == [900, 800] and [type(each) for each in contexts] == [AtMost, int]


@pytest.mark.parametrize(
    ("lines", "flags"),
    [
        ("think = true\nthink-tokens = 50", "--max-tokens 40"),
        ("think-tokens = 50", ""),
        ("think = true\nthink-tokens = 5000", ""),
        ('steps = 9\npreset = "fast"', "--preset quality"),
        ("visualize = true", ""),
        ('prefer = "quality"', "-m fake"),
    ],
)
def test_no_default_makes_a_chat_fail(lines: str, flags: str, config: Path, session: FakeSession) -> None:
    config.write_text(f"[chat]\n{lines}\n", encoding="utf-8")
    found = CliRunner().invoke(cli.app, ["chat", "--no-save", *flags.split()], input="")
    assert found.exit_code == 0 and "error" not in found.stderr, found.stderr


def test_as_flags_they_are_refused_as_before(config: Path, session: FakeSession) -> None:
    for flags in ("--think-tokens 50", "--think --think-tokens 50 --max-tokens 40", "--visualize --step", "--step"):
        assert dgemma("run", "-p", "Hi", *flags.split()).exit_code == UsageError.exit_code, flags
    config.write_text("[run]\nthink-tokens = 50\n", encoding="utf-8")
    assert dgemma("run", "-p", "Hi", "--think", "--think-tokens", "50", "--max-tokens", "40").exit_code == 2


def test_what_the_rules_do_not_know_gives_way_to_the_command_s_own_refusal() -> None:
    """An option that no table names; and a value that is wrong by itself stays an error."""

    def draw(
        wide: Annotated[bool, typer.Option("--wide")] = False,
        cells: Annotated[int, typer.Option("--cells")] = 1,
        edge: Annotated[int, typer.Option("--edge")] = 0,
    ) -> None:
        if cells > 9:
            raise UsageError(f"--cells {cells} is out of range", "give less")
        if wide and cells > 5:
            raise UsageError("--wide has no room beside --cells", "drop one of them")
        if edge and not wide:
            raise UsageError("--edge has nothing to act on", "add --wide")
        typer.echo(f"{wide} {cells} {edge}")

    app = typer.Typer()
    app.command(cls=cli_page.Page)(draw)

    def asked(defaults: dict[str, Any], *flags: str) -> Any:
        found = CliRunner().invoke(app, flags, default_map=defaults)
        return found.stdout.strip() if found.exit_code == 0 else found.exception

    assert asked({"wide": True}, "--cells", "7") == "False 7 0"
    assert asked({"cells": 7}, "--wide") == "True 1 0"
    assert asked({"edge": 3}) == "False 1 0"
    assert asked({"wide": True, "edge": 3}, "--cells", "7") == "False 7 0"  # one after the other
    for defaults, flags in (({"wide": True, "cells": 7}, ()), ({"cells": 12}, ()), ({}, ("--wide", "--cells", "7"))):
        assert isinstance(asked(defaults, *flags), UsageError)


@pytest.mark.parametrize(
    ("said", "key", "value"),
    [
        ("json = true", "run.visualize", "true"),
        ("visualize = true", "run.json", "true"),
        ("max-tokens = 40", "run.think-tokens", "40"),
        ("think-tokens = 40", "run.max-tokens", "40"),
        ('prefer = "quality"', "run.model", "demo"),
    ],
)
def test_two_defaults_that_contradict_each_other_are_not_set(said: str, key: str, value: str, config: Path) -> None:
    text = f"[run]\n{said}\n"
    config.write_text(text, encoding="utf-8")
    found = dgemma("config", key, value)
    other = said.partition(" ")[0]
    assert found.exit_code == UsageError.exit_code and config.read_text(encoding="utf-8") == text
    first, fix = found.stderr.splitlines()
    assert key in first and f"run.{other}" in first and f"dgemma config run.{other} --unset" in fix
    assert dgemma("config", "run.steps", "9").exit_code == 0  # it concerns neither
    assert dgemma("config", f"run.{other}", "--unset").exit_code == dgemma("config", key, value).exit_code == 0


def test_what_goes_together_is_set(config: Path) -> None:
    config.write_text("[run]\nmax-tokens = 41\njson = false\n", encoding="utf-8")
    for key, value in (("run.think-tokens", "40"), ("run.visualize", "true")):
        assert dgemma("config", key, value).exit_code == 0


# Where an error's cause is set


class Missing(UnknownModel):
    """Of a kind that no rule knows."""


def refusing(error: Callable[..., DgemmaError]) -> Any:
    """A command of one option that its error is about."""

    def draw(
        model: Annotated[str, typer.Option("--model", "-m", envvar="DGEMMA_DRAW_MODEL")] = "",
        device: Annotated[str, typer.Option("--device", envvar="DGEMMA_DRAW_DEVICE")] = "",
    ) -> None:
        if model or device:
            raise error(model)

    app = typer.Typer()
    app.command(cls=cli_page.Page)(draw)
    command: Any = typer.main.get_command(app)
    command.words = ("draw",)
    return command


def told(command: Any, defaults: dict[str, str], *flags: str) -> tuple[str, str] | None:
    """The two lines of its error."""
    try:
        command.main(flags, standalone_mode=False, default_map=defaults)
    except DgemmaError as error:
        return error.what, error.fix
    return None


def test_an_error_of_any_kind_says_where_its_value_is_set(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quoting = refusing(lambda model: Missing(f"no model is called {model!r}", "pick one of: demo"))
    set_in = f"draw.model is set in {config}"
    assert told(quoting, {"model": "nope"}) == (f"no model is called 'nope' ({set_in})", "pick one of: demo")
    assert told(quoting, {"model": "nope"}, "-m", "none") == ("no model is called 'none'", "pick one of: demo")
    within = refusing(lambda model: ConfigError(f"{model}/config.json is broken", "take another --model"))
    found = told(within, {"model": "/x"})
    assert found == (
        f"/x/config.json is broken ({set_in})",
        "correct draw.model, or take it out by `dgemma config draw.model --unset`",
    )
    assert told(within, {}, "-m", "/x") == ("/x/config.json is broken", "take another --model")
    monkeypatch.setenv("DGEMMA_DRAW_MODEL", "/y")
    assert told(within, {"model": "/x"}) == (
        "/y/config.json is broken (--model is set by DGEMMA_DRAW_MODEL)",
        "correct DGEMMA_DRAW_MODEL, or unset it",
    )


def test_a_cure_that_names_a_flag_that_was_given_stays(config: Path) -> None:
    both = refusing(lambda _: ConfigError("--model has no kernels for --device", "take another --device"))
    found = told(both, {"model": "nope"}, "--device", "cuda")
    assert found is not None and found[1] == "take another --device" and "draw.model is set in" in found[0]


def test_a_cure_that_is_a_command_stays(config: Path) -> None:
    fetched = refusing(lambda model: Missing(f"{model!r} is not here", "run `dgemma pull --verify nope`"))
    found = told(fetched, {"model": "nope"})
    assert found is not None and found[1] == "run `dgemma pull --verify nope`"


def test_a_default_gives_way_where_dropping_it_is_the_cure(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cardless = refusing(lambda _: UsageError("torch sees no CUDA device", "drop --device cuda, or install a driver"))
    assert told(cardless, {"device": "cuda"}) is None
    monkeypatch.setenv("DGEMMA_DRAW_DEVICE", "cuda")
    assert told(cardless, {}) is None
    assert told(cardless, {}, "--device", "cuda") is not None


def test_a_prompt_is_read_once_though_a_default_gives_way(
    config: Path, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card that is not there is found when the model is opened, behind the prompt."""
    opened: list[str | None] = []
    module = sys.modules["dgemma_local.session"]

    def cardless(name: str, wishes: Any, *_: Any) -> FakeSession:
        opened.append(wishes["device"])
        if wishes["device"] == "cuda":
            raise UsageError("torch sees no CUDA device", "drop --device cuda, or install a driver")
        return session

    monkeypatch.setattr(module, "open_session", cardless)
    monkeypatch.setenv("DGEMMA_RUN_DEVICE", "cuda")
    found = CliRunner().invoke(cli.app, ["run", "-"], input="Hi")
    assert (found.exit_code, found.stdout, opened) == (0, "Hi user\n", ["cuda", None]), found.stderr
    assert "without --device" not in found.stderr
    assert "without --device" in CliRunner().invoke(cli.app, ["run", "-", "-v"], input="Hi").stderr
    again = CliRunner().invoke(cli.app, ["run", "-"], input="Another")
    assert again.exit_code == 0 and session.asked["messages"] == [{"role": "user", "content": "Another"}]


@pytest.mark.parametrize("default", ["DGEMMA_DRAW_DEVICE", "draw.device"])
def test_where_the_cure_alone_names_an_option_it_stays(
    default: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tight = refusing(lambda _: ConfigError("it does not fit", "give --device cpu"))
    if default.isupper():
        monkeypatch.setenv(default, "cuda")
        assert told(tight, {}) == (f"it does not fit (--device is set by {default})", "give --device cpu")
    else:
        found = told(tight, {"device": "cuda"})
        assert found == (f"it does not fit ({default} is set in {config})", "give --device cpu")
    assert told(tight, {"model": "x"}, "--device", "cuda") == ("it does not fit", "give --device cpu")


@pytest.mark.parametrize(("name", "value"), [("VRAM", "0.001"), ("CONTEXT", "5")])
def test_an_error_of_what_is_too_small_says_where_it_is_set(
    name: str, value: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"DGEMMA_RUN_{name}", value)
    found = dgemma("run", "-p", "Hello, hello, hello", "-m", "demo", "--device", "cpu")
    what, fix = (line for line in found.stderr.splitlines() if line.startswith(("error", "  fix")))
    assert f"--{name.lower()} is set by DGEMMA_RUN_{name}" in what and f"--{name.lower()}" in fix


def test_a_default_that_a_flag_needs_is_not_idle(config: Path, session: FakeSession) -> None:
    config.write_text("[run]\nvisualize = true\nstep = true\n", encoding="utf-8")
    assert dgemma("run", "-p", "Hi").stdout == "Hi user\n"
    for flags in (("--view", "grid"), ("--slow", "0.1")):
        found = dgemma("run", "-p", "Hi", *flags)
        assert found.exit_code == 0 and "--visualize needs stderr to be a terminal" in found.stderr, found.stderr
        assert dgemma("run", "-p", "Hi", "--no-visualize", *flags).exit_code == UsageError.exit_code


@pytest.mark.parametrize("flag", ["--no-step", "--slow=0", "--theme=auto", "--seed=1"])
def test_it_is_where_none_does(flag: str, config: Path, session: FakeSession) -> None:
    config.write_text("[run]\nvisualize = true\n", encoding="utf-8")
    found = dgemma("run", "-p", "Hi", flag)
    assert ("--visualize needs" in found.stderr, found.exit_code) == (flag == "--theme=auto", 0), found.stderr


def test_a_default_that_a_flag_needs_is_as_firm(
    config: Path, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Firmer than a variable; and what a flag took away is not said to be set."""
    config.write_text("[run]\nvisualize = true\n", encoding="utf-8")
    monkeypatch.setenv("DGEMMA_RUN_QUIET", "1")
    found = dgemma("run", "-p", "Hi", "--view", "grid")
    assert found.exit_code == 0 and "--visualize needs stderr" in found.stderr, found.stderr
    for flag in ("--json", "--quiet"):
        found = dgemma("run", "-p", "Hi", "--view", "grid", flag)
        assert found.stderr == "error: --view has nothing to show\n  fix: add --visualize\n"


def test_a_default_alone_needs_nothing(config: Path, session: FakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text("[run]\nvisualize = true\n", encoding="utf-8")
    monkeypatch.setenv("DGEMMA_RUN_VIEW", "grid")
    found = dgemma("run", "-p", "Hi")
    assert found.exit_code == 0 and "--visualize" not in found.stderr, found.stderr


def test_a_variable_of_a_list_holds_one_text_on_each_line(
    config: Path, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DGEMMA_RUN_STOP", "a b\n\nc\n")
    dgemma("run", "-p", "Hi")
    assert session.asked["stop"] == ["a b", "c"]
    monkeypatch.setenv("DGEMMA_RUN_STOP", "")
    dgemma("run", "-p", "Hi")
    assert not session.asked["stop"]


def test_a_whole_number_may_have_a_point(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the file as in a variable."""
    config.write_text("[run]\nsteps = 5.0\n", encoding="utf-8")
    monkeypatch.setenv("DGEMMA_CHAT_STEPS", "5.0")
    said = preferences.read(KNOWN, config)
    standing = preferences.current(KNOWN, said, config)
    for key in ("run.steps", "chat.steps"):
        assert standing[key].value == 5 and type(standing[key].value) is int


def test_what_a_plan_takes_as_a_default_gives_way_to_what_the_model_has() -> None:
    for words in ("run", "chat", "bench", "models show"):
        assert "context" in PAGES[words].at_most, words
