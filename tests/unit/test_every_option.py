"""Every option of run, chat and bench, given away from its default, reaches what the command calls with, or is refused.

What a command calls with is written down by what stands in the place of the session, the front end and the measurement.
An option that these tables lack is found; one that changes nothing there is a flag that does nothing.
"""

import sys
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import fake_session
import pytest
import typer
from fake_chat import FakeChat
from fake_session import FakeSession
from typer.testing import CliRunner

from dgemma_local import auto, cli, cli_bench, cli_chat, cli_run, logs, ui
from dgemma_local.bench import command
from dgemma_local.preferences import leaves
from dgemma_local.ui import chat as chat_view

GROUP: Any = typer.main.get_command(cli.app)
COMMANDS = {" ".join(path): found for path, found in leaves(GROUP)}


class Option(NamedTuple):
    """How it is given, the parts of what is called with that it changes, and what it means nothing without."""

    given: str
    reaches: str
    beside: str = ""


OF_A_MODEL = {
    "--dtype": "--dtype float32",
    "--device": "--device cpu",
    "--context": "--context 300",
    "--fp8-attention": "--fp8-attention",
    "--fp8-embedding": "--fp8-embedding",
    "--fp8-mlp": "--fp8-mlp",
}
LOADED = {name: Option(given, "opened") for name, given in OF_A_MODEL.items()} | {
    "--model": Option("-m mine", "auto opened"),
    "--preset": Option("--preset fast", "opened"),
    "--vram": Option("--vram 17.5", "opened"),
    "--prefer": Option("--prefer quality", "auto"),
}
RUN = LOADED | {
    "--prompt": Option("-p Something", "asked recorder"),
    "--system": Option("--system Briefly", "asked recorder"),
    "--seed": Option("--seed 8", "asked start"),
    "--max-tokens": Option("--max-tokens 9", "asked start"),
    "--steps": Option("--steps 5", "asked start opened"),
    "--think": Option("--think", "asked recorder"),
    "--think-tokens": Option("--think-tokens 5", "asked", "--think"),
    "--show-thinking": Option("--show-thinking", "wanted"),
    "--stop": Option("--stop X", "asked wanted"),
    "--json": Option("--json", "wanted"),
    "--stats": Option("--stats", "wanted"),
    "--quiet": Option("--quiet", "wanted"),
    "--verbose": Option("--verbose", "opened logs proof"),
    "--visualize": Option("--visualize", "wanted"),
    "--slow": Option("--slow 2", "wanted", "--visualize"),
    "--step": Option("--step", "wanted", "--visualize"),
    "--fps": Option("--fps 3", "wanted", "--visualize"),
    "--view": Option("--view grid", "wanted", "--visualize"),
    "--draft": Option("--draft argmax", "wanted", "--visualize"),
    "--theme": Option("--theme dark", "wanted", "--visualize"),
    "--record": Option("--record run.jsonl", "recorder"),
    "--no-prompt": Option("--no-prompt", "recorder", "--record run.jsonl"),
}
CHAT = LOADED | {
    "--system": Option("--system Briefly", "asked"),
    "--seed": Option("--seed 8", "asked"),
    "--max-tokens": Option("--max-tokens 9", "asked"),
    "--steps": Option("--steps 5", "asked opened"),
    "--think": Option("--think", "asked"),
    "--think-tokens": Option("--think-tokens 5", "asked", "--think"),
    "--show-thinking": Option("--show-thinking", "chat"),
    "--stop": Option("--stop X", "asked"),
    "--visualize": Option("--visualize", "chat"),
    "--resume": Option("--resume", "auto opened chat asked"),
    "--list": Option("--list", "auto opened chat asked"),
    "--no-save": Option("--no-save", "chat"),
}
BENCH = {name: Option(given, "request") for name, given in OF_A_MODEL.items()} | {
    "--model": Option("-m mine", "auto request"),
    "--demo": Option("--demo", "auto request"),
    "--synthetic": Option("--synthetic 26b", "auto request"),
    "--layout": Option("--layout fp8", "request", "--synthetic 26b"),
    "--protocol": Option("--protocol context", "request"),
    "--against": Option("--against transformers", "request"),
    "--view": Option("--view", "auto request file progress view"),
    "--runs": Option("--runs 12", "request"),
    "--seed": Option("--seed 8", "request"),
    "--json": Option("--json out.json", "file"),
    "--quiet": Option("--quiet", "progress"),
}
OPTIONS = {"run": RUN, "chat": CHAT, "bench": BENCH}
ALL = [(words, option) for words, table in OPTIONS.items() for option in table]


class Called:
    """What a command calls with, part by part, while it runs."""

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {}

    def note(self, part: str, *found: object) -> None:
        self.parts.setdefault(part, []).append(found)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Folders of this test alone, no card, no torch."""
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    for each in (cli_run, cli_chat, cli_bench):
        monkeypatch.setattr(each, "import_torch", lambda: None)


def called(words: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code of a command, and what it called with; whatever it says is left aside."""
    with pytest.MonkeyPatch.context() as patch:
        noted = Called()
        started = {"run": _run, "chat": _chat, "bench": _bench}[words](patch, noted)
        found = CliRunner().invoke(cli.app, [words, *started, *arguments], input=b"one\n")
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    if "a run of three" in found.stderr:
        noted.note("progress")
    return found.exit_code, noted.parts


def _picks(patch: pytest.MonkeyPatch, noted: Called) -> None:
    def to_run(*, quality: bool = False) -> tuple[str, str]:
        noted.note("auto", quality)
        return "26b", ""

    patch.setattr(auto, "to_run", to_run)


def _opens(patch: pytest.MonkeyPatch, noted: Called, session: FakeSession) -> None:
    fake: Any = fake_session.module(session)
    plain = fake.open_session

    def open_session(model: str, wishes: Any, *rest: Any) -> FakeSession:
        noted.note("opened", model, wishes)
        opened: FakeSession = plain(model, wishes, *rest)
        return opened

    fake.open_session = open_session
    patch.setitem(sys.modules, "dgemma_local.session", fake)


def _run(patch: pytest.MonkeyPatch, noted: Called) -> list[str]:
    session = FakeSession("Hi user")
    _picks(patch, noted)
    _opens(patch, noted, session)
    show = ui.show

    def shown(events: Any, record: Any, vocabulary: Any, wanted: ui.Wanted) -> None:
        own = {each.name: getattr(wanted, each.name) for each in fields(wanted)}
        noted.note("wanted", {name: value for name, value in own.items() if name not in ("pressed", "fresh")})
        noted.note("start", record.start)
        show(events, record, vocabulary, ui.Wanted(quiet=True))
        noted.note("asked", session.asked)

    def recorder(path: Path | None, _: Any, __: Any, prompt: Any, *, thinking: bool) -> Any:
        noted.note("recorder", path, prompt, thinking)
        return nullcontext()

    patch.setattr(ui, "show", shown)
    patch.setattr(cli_run, "recorder", recorder)
    patch.setattr(logs, "start", lambda *, verbose=False: noted.note("logs") if verbose else None)
    patch.setattr("dgemma_local.ui.loading.show_proof", lambda *_: noted.note("proof"))
    patch.setattr(FakeSession, "planned", None, raising=False)
    patch.setattr(FakeSession, "proof", None, raising=False)
    return ["-p", "Hello", "--seed", "7"]


def _chat(patch: pytest.MonkeyPatch, noted: Called) -> list[str]:
    session = FakeChat("")
    _picks(patch, noted)
    _opens(patch, noted, session)
    talk = chat_view.run

    def run(chat: Any) -> int:
        noted.note("chat", chat.visualize, chat.conversation.settings.show_thoughts, chat.folder, chat.saved)
        code = talk(chat)
        noted.note("asked", session.prompts, session.seeds, session.asked)
        return code

    patch.setattr(chat_view, "run", run)
    patch.setenv("DGEMMA_CHAT_SEED", "7")  # a default, for --list refuses a flag beside it
    return []


def _bench(patch: pytest.MonkeyPatch, noted: Called) -> list[str]:
    _picks(patch, noted)

    def measured(request: Any, say: Any, file: Any, _: Any) -> None:
        say("a run of three")
        noted.note("request", request)
        noted.note("file", file.name)

    def watched(others: Any, runs: Any, seed: int, json_file: Any, *, quiet: bool) -> None:
        noted.note("view", list(others), runs, seed, json_file, quiet)

    patch.setattr(command, "run", measured)
    patch.setattr(cli_bench, "_view", watched)
    return []


# ── each by itself ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("words", OPTIONS)
def test_no_option_is_left_out(words: str) -> None:
    given = {
        next(each for each in parameter.opts if each.startswith("--"))
        for parameter in COMMANDS[words].params
        if parameter.param_type_name == "option"
    }
    assert given - {"--help"} == set(OPTIONS[words])


@pytest.mark.parametrize(("words", "option"), ALL)
def test_it_reaches_what_the_command_calls_with(words: str, option: str) -> None:
    given, reaches, beside = OPTIONS[words][option]
    if option == "--resume":
        assert called(words)[0] == 0  # what is gone on with
    (code, without), (again, found) = called(words, *beside.split()), called(words, *beside.split(), *given.split())
    assert code == again == 0
    assert {part for part in without | found if without.get(part) != found.get(part)} == set(reaches.split())


@pytest.mark.parametrize("words", OPTIONS)
def test_what_changes_is_the_option_s_doing(words: str) -> None:
    assert called(words) == called(words)


@pytest.mark.parametrize(("words", "option"), [(words, each) for words, each in ALL if OPTIONS[words][each].beside])
def test_without_what_it_is_about_it_is_refused(words: str, option: str) -> None:
    assert called(words, *OPTIONS[words][option].given.split()) == (2, {})


def test_arguments_too() -> None:
    Path("prompt.txt").write_text("From a file", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        noted = Called()
        _run(patch, noted)
        assert CliRunner().invoke(cli.app, ["run", "prompt.txt"]).exit_code == 0
    assert noted.parts["asked"][0][0]["messages"][0]["content"] == "From a file"
    assert called("run", "prompt.txt")[0] == 2  # beside -p
    assert called("chat", "name") == (2, {})


@pytest.mark.parametrize("option", ["--no-think", "--no-show-thinking", *sorted(set(CHAT) - {"--list"})])
def test_beside_list_it_is_refused(option: str) -> None:
    given = CHAT[option].given if option in CHAT else option
    assert called("chat", "--list", *given.split()) == (2, {})


# ── beside what leaves nothing for them ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("option", sorted(set(BENCH) - {"--view", "--demo"}))
def test_beside_view_it_is_refused_or_reaches_it(option: str) -> None:
    """The demo is what --view measures, so that --demo says it once more."""
    (_, without), (code, found) = called("bench", "--view"), called("bench", "--view", *BENCH[option].given.split())
    assert code == 0
    (refused, *reached), (_, *before) = found["view"][0], without["view"][0]
    assert refused or reached != before


@pytest.mark.parametrize("words", ["run", "chat"])
def test_a_model_by_name_leaves_nothing_to_prefer(words: str) -> None:
    assert called(words, "-m", "mine", "--prefer", "quality") == (2, {})
    assert called(words, "-m", "auto", "--prefer", "quality")[1]["auto"] == [(True,)]
