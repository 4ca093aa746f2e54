"""`dgemma chat` where nobody types: a line is a turn, answers alone go to stdout; with a fake session."""

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_session
import pytest
from chats import pairs
from fake_chat import FakeChat
from typer.testing import CliRunner

from dgemma_local import cli, cli_chat
from dgemma_local.chat import store
from dgemma_local.chat.commands import NAMES
from dgemma_local.chat.conversation import Conversation, Settings
from dgemma_local.errors import DoesNotFit, NumericalError, PromptError
from dgemma_local.ui import chat_input, chat_saved
from dgemma_local.ui.chat import worst


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A state folder of this test alone, no card, no torch."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(cli_chat, "import_torch", lambda: None)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> FakeChat:
    return standing_in(monkeypatch, FakeChat(""))


def standing_in(monkeypatch: pytest.MonkeyPatch, fake: FakeChat) -> FakeChat:
    monkeypatch.setitem(sys.modules, "dgemma_local.session", fake_session.module(fake))
    return fake


def chat(text: str | bytes, *arguments: str) -> Any:
    raw = text if isinstance(text, bytes) else text.encode()
    found = CliRunner().invoke(cli.app, ["chat", "-m", "fake", *arguments], input=raw)
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found


def files(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((tmp_path / "state/dgemma/chats").glob("*.json"))]


def test_a_line_is_a_turn_and_answers_alone_go_to_stdout(session: FakeChat, tmp_path: Path) -> None:
    session.answers = ("Hi", "user", "Hi user")
    found = chat('one\n\ntwo\\\nlines\n"""\nthree\n\nlines\n"""\n', "--system", "be brief", "--seed", "4")
    assert (found.exit_code, found.stdout) == (0, "Hi\nuser\nHi user\n")
    assert session.seeds == [4, 5, 6]
    system, one, hi = (
        {"role": role, "content": text} for role, text in [("system", "be brief"), ("user", "one"), ("assistant", "Hi")]
    )
    assert session.prompts[0] == [system, one]
    assert session.prompts[1] == [system, one, hi, {"role": "user", "content": "two\nlines"}]
    assert session.prompts[2][-1] == {"role": "user", "content": "three\n\nlines"}
    assert "one" not in found.stderr and "demo model" in found.stderr
    (saved,) = files(tmp_path)
    assert [turn["answer"] for turn in saved["turns"]] == ["Hi", "user", "Hi user"]
    assert saved["system"] == "be brief" and saved["model"] == "fake" and saved["turns"][2]["seed"] == 6


def test_the_commands_of_a_script(session: FakeChat, tmp_path: Path) -> None:
    session.answers = ("Hi", "user", "Hi Hi")
    text = "one\n/stats\n/undo\ntwo\n/retry\n/set steps 3\n/think on\n/context\n/show\n/export json out.json\n/help\n"
    found = chat(text, "--seed", "1")
    assert (found.exit_code, found.stdout) == (0, "Hi\nuser\nHi Hi\n")
    assert session.seeds == [1, 2, 3]
    for said in (
        "seed      1",
        "taken back: one",
        "steps: 3",
        "thinking: on",
        "of 1,000 tokens",
        "written to out.json",
    ):
        assert said in found.stderr
    exported = json.loads((tmp_path / "out.json").read_text())
    assert [(turn["user"], turn["answer"]) for turn in exported["turns"]] == [("two", "Hi Hi")]
    assert exported["settings"]["steps"] == 3 and exported["settings"]["thinking"]
    assert session.prompts[2] == [{"role": "user", "content": "two"}]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/retyr", "the nearest is /retry"),
        ("/xyzzy", "/help lists them"),
        ("/undo", "there is no turn yet"),
        ("/retry", "there is no turn yet"),
        ("/copy", "there is no turn yet"),
        ("/export md", "there is no turn yet"),
        ("/export pdf", "say /export md|json|html"),
        ("/stats", "no answer to tell of"),
        ("/set", "there is no setting"),
        ("/set steps x", "steps cannot be 'x'"),
        ("/load", "no conversation to load"),
        ("/load none", "no conversation is called 'none'"),
        ("/load ../x", "cannot be called"),
        ("/save ../x", "cannot be called"),
        ("/edit", "needs a terminal"),
        ("/multi", "needs a terminal"),
        ("/visualize", "on or off"),
        ("/think maybe", "on|off|show"),
        ("/model nobody", "no model and no folder"),
        ("/record", "without a file"),
        ("/record none/x.jsonl", "none"),
        ("/system \x00", None),
    ],
)
def test_a_command_that_cannot_be_done_is_said_and_the_chat_goes_on(
    session: FakeChat, line: str, said: str | None
) -> None:
    found = chat(f"{line}\none\n")
    assert found.stdout == "Hi user\n"
    assert said is None or (said in found.stderr and found.exit_code not in (0, 1))


def test_help_fits_a_terminal(session: FakeChat) -> None:
    lines = chat("/help\n").stderr.splitlines()[2:]
    assert max(map(len, lines)) < 80
    assert [line.split()[0] for line in lines[: len(NAMES)]] == [f"/{name}" for name in NAMES]


def test_the_context_is_counted_as_the_template_writes_it(session: FakeChat) -> None:
    told = [{"role": role, "content": text} for role, text in [("user", "one"), ("assistant", "Hi user")]]
    assert f" {len(session.prompt(told))} of 1,000 tokens" in chat("one\n/context\n").stderr


def test_an_unknown_command_is_one_line(session: FakeChat) -> None:
    assert (
        chat("/retyr\n").stderr.splitlines()[-1]
        == "there is no command /retyr; the nearest is /retry; begin with // to send it"
    )
    assert len(chat(f"/{'x' * 100_000}\n").stderr) < 400


def test_going_on_with_the_latest_or_by_name(session: FakeChat, tmp_path: Path) -> None:
    chat("one\n/save first\n", "--seed", "1")
    chat("two\n/save second\n")
    found = chat("three\n", "--resume")
    assert "second: 1 turn" in found.stderr and [each["content"] for each in session.prompts[-1]] == [
        "two",
        "Hi user",
        "three",
    ]
    found = chat("four\n", "--resume", "first")
    assert session.prompts[-1][0]["content"] == "one" and session.seeds[-1] == 2
    listed = CliRunner().invoke(cli.app, ["chat", "--list"])
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["first", "second"]
    assert "2 turns" in listed.stdout and "one" in listed.stdout and listed.exit_code == 0
    found = chat("/load second\nfive\n")
    assert session.prompts[-1][0]["content"] == "two" and len(files(tmp_path)) == 2


def test_a_damaged_file_costs_one_line_and_not_the_chat(session: FakeChat, tmp_path: Path) -> None:
    chat("one\n/save good\n")
    bad = tmp_path / "state/dgemma/chats/bad.json"
    bad.write_text("{")
    found = chat("two\n", "--resume", "bad")
    assert found.exit_code == 2 and "bad.json is damaged" in found.stderr  # a script had meant that one
    assert not found.stdout and len(session.prompts) == 1 and bad.read_text() == "{"
    listed = CliRunner().invoke(cli.app, ["chat", "--list"])
    assert "bad.json is damaged" in listed.stderr and "good" in listed.stdout and listed.exit_code == 0
    found = chat("/load bad\nthree\n")
    assert "is damaged" in found.stderr and found.stdout == "Hi user\n"


def test_who_types_is_told_that_another_conversation_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dgemma_local.ui.chat_input.on_terminal", lambda: True)
    (tmp_path / "bad.json").write_text('{"format": "dgemma chat", "version": 2}')
    assert chat_saved.resumed("bad", tmp_path) is None
    said = capsys.readouterr().err
    assert "later dgemma" in said and "damaged" not in said and "a new conversation begins" in said


def test_two_chats_on_one_conversation_lose_nothing(session: FakeChat, tmp_path: Path) -> None:
    chat("one\n/save n\n")
    theirs = tmp_path / "theirs.json"
    here = tmp_path / "state/dgemma/chats/n.json"
    told = json.loads(here.read_text())
    theirs.write_text(json.dumps(told | {"system": "theirs"}))
    answer = session.answer

    def meanwhile(*said: Any, **rest: Any) -> Any:
        if len(session.prompts) == 2:  # amid the second answer
            theirs.replace(here)
        return answer(*said, **rest)

    session.answer = meanwhile  # type: ignore[method-assign]
    found = chat("two\nthree\nfour\n", "--resume", "n")
    assert found.exit_code == 0 and found.stderr.count("n was changed elsewhere and stays so") == 1
    mine, other = files(tmp_path)
    assert other["system"] == "theirs" and len(other["turns"]) == 1
    assert [turn["user"] for turn in mine["turns"]] == ["one", "two", "three", "four"]
    assert sorted(path.name for path in here.parent.iterdir()) == ["n-2.json", "n.json"]


def test_two_chats_of_the_same_second(session: FakeChat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgemma_local.ui.chat_actions.stamp", lambda: "now")
    answer = session.answer

    def meanwhile(*said: Any, **rest: Any) -> Any:
        if not session.prompts:  # amid the first answer
            store.save(theirs, tmp_path / "state/dgemma/chats")
        return answer(*said, **rest)

    theirs = replace(pairs(("theirs", "Hi")), name="now")
    session.answer = meanwhile  # type: ignore[method-assign]
    found = chat("mine\n/set steps 2\n/clear\n/set steps 3\nlater\n")
    assert "changed elsewhere" not in found.stderr  # nobody chose the name
    mine, later, other = files(tmp_path)  # now-2, now-3, now
    assert [each["turns"][0]["user"] for each in (mine, later, other)] == ["mine", "later", "theirs"]
    assert [each["settings"]["steps"] for each in (mine, later, other)] == [2, 3, None]


def test_clearing_and_renaming_leaves_the_conversation_before(session: FakeChat, tmp_path: Path) -> None:
    chat("one\n/save a\n/clear\n/save b\ntwo\n/load a\nthree\n")
    assert [[turn["user"] for turn in each["turns"]] for each in files(tmp_path)] == [["one", "three"], ["two"]]


def test_what_a_flag_sets_can_be_read_again(session: FakeChat, tmp_path: Path) -> None:
    assert chat("one\n", "--max-tokens", str((1 << 30) + 1)).exit_code == 2
    assert chat("one\n/save n\n", "--max-tokens", str(1 << 30)).exit_code == 0
    assert chat("two\n", "--resume", "n").exit_code == 0


def test_taking_back_the_only_turn_is_saved(session: FakeChat, tmp_path: Path) -> None:
    chat("one\n/undo\n")
    assert [each["turns"] for each in files(tmp_path)] == [[]]


def test_a_question_that_is_ended_before_its_answer_begins_is_kept(
    session: FakeChat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*shown: Any) -> None:
        raise SystemExit(143)

    monkeypatch.setattr("dgemma_local.ui.chat_turn.plain", ended)
    assert chat("one\n").exit_code == 143
    assert [(turn["user"], turn["outcome"]) for turn in files(tmp_path)[0]["turns"]] == [("one", "interrupted")]


def test_nothing_is_kept_where_that_is_asked(session: FakeChat, tmp_path: Path) -> None:
    found = chat("one\n/save x\n", "--no-save")
    assert not (tmp_path / "state").exists() and "not saved" in found.stderr


def test_what_was_committed_of_an_answer_that_was_stopped_is_kept(session: FakeChat, tmp_path: Path) -> None:
    session.reason = "interrupted"
    found = chat("one\ntwo\n")
    assert found.exit_code == 130 and found.stdout == "Hi user\n"  # a script ends with it
    assert [(turn["answer"], turn["outcome"]) for turn in files(tmp_path)[0]["turns"]] == [("Hi user", "interrupted")]


def test_a_second_ctrl_c_keeps_the_turn(session: FakeChat, tmp_path: Path) -> None:
    session.answers = (KeyboardInterrupt(),)
    assert chat("one\ntwo\n").exit_code == 130
    assert [(turn["user"], turn["outcome"]) for turn in files(tmp_path)[0]["turns"]] == [("one", "interrupted")]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BrokenPipeError(32, "Broken pipe"), 141),
        (SystemExit(143), 143),
        (DoesNotFit("no memory is left", "shorten it"), DoesNotFit.exit_code),
    ],
)
def test_a_turn_that_is_ended_amid_its_answer_is_kept(
    session: FakeChat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def gone(events: Any, record: Any, page: Any) -> None:
        for event, seconds in events:
            record.take(event, seconds)
        raise error

    monkeypatch.setattr("dgemma_local.ui.chat_turn.plain", gone)
    monkeypatch.setattr("dgemma_local.cli.ours", lambda error: True)
    monkeypatch.setattr("dgemma_local.cli.lost", lambda error: 141)
    assert chat("one\n").exit_code == code
    (turn,) = files(tmp_path)[0]["turns"]
    assert (turn["user"], turn["answer"], turn["outcome"]) == ("one", "Hi user", "interrupted")


@pytest.mark.parametrize("ends", [KeyboardInterrupt(), NumericalError("canvas 0, step 1", "check")])
def test_a_retry_that_is_torn_leaves_the_whole_answer(
    session: FakeChat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: BaseException
) -> None:
    from dgemma_local.ui.plain import plain

    def torn(events: Any, record: Any, page: Any) -> None:
        plain(events, record, page)
        if len(session.prompts) == 2:
            raise ends

    monkeypatch.setattr("dgemma_local.ui.chat_turn.plain", torn)
    session.answers = ("Hi", "user")
    found = chat("one\n/retry\n")
    assert "the answer before it stays" in found.stderr and found.exit_code in (8, 130)
    assert [(turn["answer"], turn["outcome"]) for turn in files(tmp_path)[0]["turns"]] == [("Hi", "complete")]


def test_a_shell_completes_the_names_of_what_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert cli_chat.saved_names("") == []
    for name in ("tea", "two words"):
        store.save(Conversation(name=name, model="m"), tmp_path / "dgemma" / "chats")
    assert cli_chat.saved_names("t") == ["tea", "two words"] and cli_chat.saved_names("tw") == ["two words"]
    monkeypatch.setenv("_DGEMMA_COMPLETE", "complete_bash")  # which inserts it as it is
    assert cli_chat.saved_names("t") == ["tea", r"two\ words"] and cli_chat.saved_names("two ") == [r"two\ words"]


def test_what_is_saved_is_listed_without_torch_and_without_a_line_editor(tmp_path: Path) -> None:
    code = (
        "import sys; from dgemma_local import cli; sys.argv = ['dgemma', 'chat', '--list']\n"
        "try: cli.main()\n"
        "except SystemExit as left: assert not left.code\n"
        "assert not {'torch', 'prompt_toolkit', 'tokenizers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_retry_that_comes_to_nothing_leaves_the_answer(session: FakeChat, tmp_path: Path) -> None:
    session.answers = ("Hi", "")
    found = chat("one\n/retry\n")
    assert "the answer before it stays" in found.stderr and found.exit_code == 9
    assert [turn["answer"] for turn in files(tmp_path)[0]["turns"]] == ["Hi"]


def test_outcomes_are_said_in_words_of_the_chat(session: FakeChat, tmp_path: Path) -> None:
    session.answers = ("Hi user", "", "Hi")
    found = chat("one\n/set max-tokens 2\ntwo\nthree\n")
    assert "say /retry" in found.stderr and found.exit_code == 9
    assert [turn["outcome"] for turn in files(tmp_path)[0]["turns"]] == ["complete", "empty", "complete"]
    session.answers = ("Hi user",)
    found = chat("/set max-tokens 1\none\n")
    assert "stopped at /set max-tokens 1" in found.stderr and found.exit_code == 17


def test_an_error_before_anything_is_asked_keeps_no_turn(session: FakeChat, tmp_path: Path) -> None:
    session.answers = (PromptError("too long", "shorten it"), "Hi")
    found = chat("one\ntwo\n")
    assert found.exit_code == 3 and "too long\n  fix: shorten it" in found.stderr and found.stdout == "Hi\n"
    assert [turn["user"] for turn in files(tmp_path)[0]["turns"]] == ["two"]


def test_not_a_number_is_an_outcome(session: FakeChat, tmp_path: Path) -> None:
    session.answers = (NumericalError("canvas 0, step 1", "check"), "Hi")
    found = chat("one\ntwo\n")
    assert found.exit_code == 8 and found.stdout == "Hi\n"
    assert [turn["outcome"] for turn in files(tmp_path)[0]["turns"]] == ["numeric", "complete"]
    assert session.prompts[1] == [{"role": "user", "content": "one\n\ntwo"}]


@pytest.mark.parametrize("raw", [b"\xff\xfe\nHi\n", b"\xed\xa0\x80\nHi\n"])
def test_bytes_that_are_no_text_are_refused_and_the_next_line_is_read(session: FakeChat, raw: bytes) -> None:
    found = chat(raw)
    assert found.exit_code == 3 and "not UTF-8" in found.stderr and found.stdout == "Hi user\n"


@pytest.mark.parametrize("line", ["x" * 1_000_000, "\x1b[2J\x07", "\0", "\u202e", '"""', "/", "//", "\\"])
def test_any_line_is_a_turn_or_said(session: FakeChat, line: str) -> None:
    found = chat(f"{line}\n")
    assert found.exit_code in (0, 2) and "Traceback" not in found.output and "\x1b" not in found.stderr


def test_every_answer_is_recorded_in_a_file_of_its_own(session: FakeChat, tmp_path: Path) -> None:
    found = chat("/record run.jsonl\none\ntwo\n/record off\nthree\n")
    assert found.exit_code == 0 and {*tmp_path.glob("*.jsonl")} == {tmp_path / "run.jsonl", tmp_path / "run-2.jsonl"}
    assert '"finished"' in (tmp_path / "run-2.jsonl").read_text()


def test_a_recording_takes_no_other_s_place(session: FakeChat, tmp_path: Path) -> None:
    chat("/record run.jsonl\none\ntwo\n")
    (tmp_path / "run.jsonl").rename(tmp_path / "run-3.jsonl")
    kept = {name: (tmp_path / name).read_bytes() for name in ("run-2.jsonl", "run-3.jsonl")}
    found = chat("/record run.jsonl\none\ntwo\n/record run.jsonl\nthree\n")
    assert found.exit_code == 2 and "run.jsonl is there already" in found.stderr
    assert all((tmp_path / name).read_bytes() == raw for name, raw in kept.items())
    assert sorted(each.name for each in tmp_path.glob("*.jsonl")) == [
        "run-2.jsonl", "run-3.jsonl", "run-4.jsonl", "run-5.jsonl", "run.jsonl"
    ]  # fmt: skip


def test_an_export_takes_nobody_s_place(session: FakeChat, tmp_path: Path) -> None:
    (tmp_path / "mine.md").write_text("mine")
    found = chat("one\n/export md mine.md\n/export md none/mine.md\n/export html\n")
    assert (tmp_path / "mine.md").read_text() == "mine" and "is there already" in found.stderr
    assert "cannot be written" in found.stderr and len([*tmp_path.glob("*.html")]) == 1


def test_a_disk_that_is_full_is_said_and_the_chat_goes_on(session: FakeChat, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    found = chat("one\ntwo\n")
    assert found.stdout == "Hi user\nHi user\n" and "cannot be saved: No space left" in found.stderr


@pytest.mark.parametrize("terminal", [False, True])
def test_the_prompt_comes_after_the_model_is_open(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    """Nobody is asked for a line, and none is read, before there is a model to answer it."""
    order: list[str] = []

    class Source:
        def read(self, draft: str) -> None:
            order.append("a line is asked for")

    fake: Any = fake_session.module(FakeChat(""))
    plain, broken = fake.open_session, [DoesNotFit("it does not fit", "take another")]

    def open_session(*given: Any) -> Any:
        order.append("opening")
        if broken:
            raise broken.pop()
        opened = plain(*given)
        order.append("open")
        return opened

    fake.open_session = open_session
    monkeypatch.setitem(sys.modules, "dgemma_local.session", fake)
    monkeypatch.setattr(chat_input, "on_terminal", lambda: terminal)
    for name in ("piped", "typed"):
        monkeypatch.setattr(chat_input, name, lambda *_: Source())
    assert chat("one\n").exit_code == 11 and order == ["opening"]
    order.clear()
    assert chat("one\n").exit_code == 0 and order == ["opening", "open", "a line is asked for"]


def test_thoughts_never_go_back(session: FakeChat, tmp_path: Path) -> None:
    """Not in the next turn, nor a retried or an edited one, nor behind a pause in which the conversation lay on the disk."""
    session.answers = ("<|channel>thought\nuser model<channel|>Hi", "<|channel>thought\nmodel<channel|>Hi user")
    assert chat("one\ntwo\n/retry\n", "--think").exit_code == 0
    assert chat("three\n", "--resume", "--think").exit_code == 0
    (saved,) = files(tmp_path)
    assert [turn["thought"] for turn in saved["turns"]] == ["user model", "model", "model"]
    told = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "Hi"}]
    assert session.prompts[1] == session.prompts[2] == [*told, {"role": "user", "content": "two"}]
    assert session.prompts[3][:4] == [*session.prompts[2], {"role": "assistant", "content": "Hi user"}]
    for prompt in session.prompts:
        ids = session.prompt(prompt, thinking=True)
        assert session.tokenizer.special.channel_open not in ids


def test_how_it_answers_is_set_by_flags_and_kept(session: FakeChat, tmp_path: Path) -> None:
    flags = "--think --think-tokens 5 --max-tokens 9 --show-thinking --stop X --stop YZ".split()
    session.answers = ("<|channel>thought\nuser model<channel|>Hi",)
    found = chat("one\n/save n\n", *flags)
    assert (found.exit_code, found.stdout) == (0, "Hi\n") and "user model" in found.stderr
    asked = {"thinking": True, "think_tokens": 5, "stop": ("X", "YZ")}
    assert session.asked.items() >= asked.items()
    (saved,) = files(tmp_path)
    assert saved["settings"]["stop"] == ["X", "YZ"] and saved["settings"]["show_thoughts"]
    assert chat("two\n", "--resume", "n").exit_code == 0 and session.asked.items() >= asked.items()
    assert chat("three\n", "--resume", "n", "--think-tokens", "7", "--stop", "Z").exit_code == 0
    assert session.asked.items() >= (asked | {"think_tokens": 7, "stop": ("Z",)}).items()


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ("--think-tokens 5", 2, "add --think"),
        ("--think --think-tokens 1024", 2, "leaves nothing of --max-tokens 1024"),
        ("--think --think-tokens 5 --max-tokens 5", 2, "leaves nothing of --max-tokens 5"),
        ("--think --think-tokens 0", 2, "greater than or equal to 1"),
        ("--stop ''", 2, "is empty"),
        ("--stop \udc80", 3, "--stop"),
        ("--preset hasty", 2, "hasty"),
        ("--resume n --max-tokens 4", 2, "think-tokens 4 leaves nothing of max-tokens 4"),
        ("--resume n --think-tokens 6 --max-tokens 6", 2, "leaves nothing of --max-tokens 6"),
    ],
)
def test_flags_of_answers_are_checked_before_a_model_is_opened(
    session: FakeChat, tmp_path: Path, flags: str, code: int, said: str
) -> None:
    begun = replace(pairs(("one", "Hi")), settings=Settings(thinking=True, think_tokens=4))
    store.save(begun, tmp_path / "state/dgemma/chats")
    found = chat("two\n", *shlex.split(flags))
    assert found.exit_code == code and said in found.stderr, found.stderr
    assert session.opened is None


def test_a_preset_stays_with_its_conversation(session: FakeChat, tmp_path: Path) -> None:
    def opened(*flags: str) -> tuple[Any, Any, str]:
        found = chat("/show\none\n/save n\n", *flags)
        assert found.exit_code == 0 and session.opened is not None
        said = next(line.split()[1] for line in found.stderr.splitlines() if line.startswith("preset "))
        return session.opened[1]["preset"], session.opened[1]["steps"], said

    assert opened("--preset", "fast") == ("fast", None, "fast")
    assert files(tmp_path)[0]["settings"]["preset"] == "fast"
    assert opened("--resume", "n") == ("fast", None, "fast")
    assert opened("--resume", "n", "--steps", "5") == ("fast", 5, "fast")
    assert opened("--resume", "n") == ("fast", 5, "fast")
    assert opened("--resume", "n", "--preset", "balanced") == ("balanced", None, "balanced")
    assert opened("--resume", "n") == ("balanced", None, "balanced")


def test_a_default_of_the_user_s_gives_way_to_what_is_resumed(
    session: FakeChat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chat("one\n/save n\n", "--preset", "fast", "--think", "--think-tokens", "5", "--stop", "X").exit_code == 0
    for name, value in {"PRESET": "quality", "THINK_TOKENS": "7", "STOP": "Y"}.items():
        monkeypatch.setenv(f"DGEMMA_CHAT_{name}", value)
    assert chat("two\n", "--resume", "n").exit_code == 0
    assert session.opened is not None and session.opened[1]["preset"] == "fast"
    assert (session.asked["think_tokens"], session.asked["stop"]) == (5, ("X",))
    assert chat("one\n").exit_code == 0  # a bound without thoughts is idle
    assert session.opened[1]["preset"] == "quality" and session.asked["stop"] == ("Y",)


def test_flags_that_mean_nothing(session: FakeChat) -> None:
    assert chat("", "hello").exit_code == 2
    assert chat("", "--prefer", "quality").exit_code == 2
    assert chat("", "--system", " ").exit_code == 3
    assert chat("", "--resume", "none").exit_code == 2
    assert session.opened is None


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([], 0),
        ([0, 0], 0),
        ([0, 17, 9], 9),
        ([18, 17], 17),
        ([3, 8], 8),
        ([2, 130, 8], 130),
        ([9, 2], 2),
        ([15, 18], 15),
    ],
)
def test_the_worst_of_several_exit_codes(codes: list[int], expected: int) -> None:
    assert worst(codes) == worst(codes[::-1]) == expected
