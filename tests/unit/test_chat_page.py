"""Answers of a chat as they are printed, the clipboard, and the line editor."""

import base64
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.text import Text
from screens import Sized, Tty

from dgemma_local.errors import UsageError
from dgemma_local.ui import clipboard
from dgemma_local.ui.chat_input import Typed, edited
from dgemma_local.ui.chat_page import LONGEST, ChatPage, Markdown, inline
from dgemma_local.ui.settled import Part
from dgemma_local.ui.terminal import printable

ANSWER = """# Title

Some **bold**, *slanted* and `code`.
- one
  - two
1. first
> said

```python
def f(x):  # **not bold**
    return "- no bullet"

```
2 * 3 * 4 and snake_case_name
---
"""


def rendered(*chunks: str) -> list[Text]:
    markdown = Markdown()
    return [line for chunk in chunks for line in markdown.lines(chunk)]


def test_markdown_keeps_every_line_where_it_was() -> None:
    assert [line.plain for line in rendered(ANSWER)] == [
        "Title", "", "Some bold, slanted and code.", "• one", "  • two", "1. first", "> said", "",
        "```python", "def f(x):  # **not bold**", '    return "- no bullet"', "", "```",
        "2 * 3 * 4 and snake_case_name", "---",
    ]  # fmt: skip


def styles(line: Text) -> dict[str, str]:
    return {line.plain[span.start : span.end]: str(span.style) for span in line.spans}


@pytest.mark.parametrize(
    ("line", "plain", "styled"),
    [
        ("**a** b", "a b", {"a": "bold"}),
        ("__a b__", "a b", {"a b": "bold"}),
        ("an *x y*.", "an x y.", {"x y": "italic"}),
        ("_x_", "x", {"x": "italic"}),
        ("`a*b*c`", "a*b*c", {"a*b*c": "cyan"}),
        ("``a`b``", "a`b", {"a`b": "cyan"}),
        ("`a``b` c", "a``b c", {"a``b": "cyan"}),  # other runs of ticks end nothing
        ("`a``", "`a``", {}),
        ("a*b*c", "a*b*c", {}),
        ("2 * 3 * 4", "2 * 3 * 4", {}),
        ("a_b_c __init", "a_b_c __init", {}),
        ("** a **", "** a **", {}),
        ("`open", "`open", {}),
        ("[bold]x[/bold]", "[bold]x[/bold]", {}),
    ],
)
def test_emphasis(line: str, plain: str, styled: dict[str, str]) -> None:
    found = inline(line)
    assert (found.plain, styles(found)) == (plain, styled)


@pytest.mark.parametrize("line", ["`" * LONGEST, " **a" * (LONGEST // 4), " _a" * (LONGEST // 4)])
def test_signs_without_an_end_are_looked_through(line: str) -> None:
    """Where every one were tried with every other and every end, this would take minutes."""
    assert inline(line) == Text(line)
    (found,) = rendered(f"# {' ' * 9999}{line}")
    assert found.plain == line.strip()


def test_a_line_that_is_too_long_has_no_emphasis() -> None:
    line = "**a** " + "b" * (LONGEST - 6)
    assert len(inline(line).spans) == 1 and inline(line + "b") == Text(line + "b")


@pytest.mark.parametrize(
    ("line", "title"), [("# A #", "A"), ("## C#", "C#"), ("# A ## \t", "A"), ("#  A # b ", "A # b"), ("# #", "#")]
)
def test_a_heading(line: str, title: str) -> None:
    (found,) = rendered(line)
    assert found.plain == title and found.style == "bold underline"


LINES = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=30), min_size=1, max_size=8)


@given(LINES)
def test_a_line_is_a_line_and_nothing_the_terminal_obeys(lines: list[str]) -> None:
    found = rendered("\n".join(lines) + "\n")
    assert len(found) == len(lines)
    assert all(line.plain == printable(line.plain) and "\n" not in line.plain for line in found)


@given(LINES, st.sampled_from(["", "python", "json", "no-such-language", "c++"]))
def test_code_is_exactly_what_the_model_wrote(lines: list[str], language: str) -> None:
    code = [line for line in lines if not line.strip().startswith(("```", "~~~"))]
    arriving = ["".join(f"{line}\n" for line in part) for part in (code[:2], code[2:]) if part]
    found = rendered(f"```{language}\n", *arriving, "```\n")
    assert [line.plain for line in found[1:-1]] == [printable(line) for line in code]


def test_a_fence_ends_with_its_own_sign_alone() -> None:
    found = rendered("````\n```\n**x**\n````\n", "**y**\n")
    assert [line.plain for line in found] == ["````", "```", "**x**", "````", "y"]


@pytest.mark.parametrize("cut", [0, 3, 40, 90, 130])
def test_however_an_answer_arrives_the_screen_is_the_same(cut: int) -> None:
    def written(*texts: str) -> str:
        out = Tty(40, 30)
        with ChatPage(out, Sized(out), thoughts=False) as page:
            for text in texts:
                page.write([Part("thought", "hm"), Part("answer", text)])
        return "".join(out.writes)

    whole = written(ANSWER)
    pieces = written(ANSWER[:cut], ANSWER[cut:])
    plain = Text.from_ansi(whole).plain
    assert Text.from_ansi(pieces).plain == plain
    assert "hm" not in plain and "def f(x):  # **not bold**\n" in plain and "Some bold" in plain
    assert "\x1b[1mbold" in whole


def test_a_long_line_is_left_to_the_terminal_to_wrap() -> None:
    out, line = Tty(40, 30), "word " * 40 + "end"
    with ChatPage(out, Sized(out), thoughts=False) as page:
        page.write([Part("answer", line)])
    assert Text.from_ansi("".join(out.writes)).plain.rstrip("\n") == line


def test_what_no_terminal_reads_is_the_answer_byte_for_byte(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out, ChatPage(out, Sized(Tty()), thoughts=False) as page:
        page.write([Part("answer", ANSWER)])
    assert (tmp_path / "out").read_text() == ANSWER


# ── the clipboard ─────────────────────────────────────────────────────────────────────────────────────────────────


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def desktop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("WAYLAND_DISPLAY", "w")
    monkeypatch.setenv("DISPLAY", ":0")
    return tmp_path


def test_a_desktop_s_program_gets_the_text(desktop: Path) -> None:
    out = Tty()
    program(desktop, "wl-copy", "exit 1")
    program(desktop, "xclip", f"cat > {desktop}/copied")
    assert clipboard.copy("数 x\n", Sized(out)) == "copied 4 characters by xclip"
    assert (desktop / "copied").read_text() == "数 x\n" and not out.writes


def test_else_the_terminal_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WAYLAND_DISPLAY", "DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("TERM", "xterm")
    out = Tty()
    assert "OSC 52" in clipboard.copy("数 x", Sized(out))
    assert "".join(out.writes) == f"\x1b]52;c;{base64.b64encode('数 x'.encode()).decode()}\x07"
    assert "hardly" in clipboard.copy("x" * 100_000, Sized(Tty()))
    monkeypatch.setenv("TERM", "dumb")
    out = Tty()
    assert "no clipboard" in clipboard.copy("x", Sized(out)) and not out.writes


# ── the editor ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_editor_of_the_user_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "my editor", 'ls -l "$2" > mode; echo more >> "$2"')
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", f"'{tmp_path}/my editor' -w")
    assert edited("some\n") == "some\nmore"
    assert (tmp_path / "mode").read_text().startswith("-rw-------")


@pytest.mark.parametrize("editor", ["false", "/no/such/editor"])
def test_an_editor_that_fails(editor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISUAL", editor)
    with pytest.raises(UsageError) as caught:
        edited("x")
    assert "VISUAL" in caught.value.fix


# ── the line editor ───────────────────────────────────────────────────────────────────────────────────────────────


def keys(*typed: str, history: Path | None = None, multi: bool = False, draft: str = "") -> list[str | None]:
    """What is read, message for message, from keys as a terminal sends them."""
    with create_pipe_input() as pipe:
        source = Typed(history, {"load": lambda: ["a chat"]}, input=pipe, output=DummyOutput())
        source.multi = multi
        found: list[str | None] = []
        for text in typed:
            pipe.send_text(text)
            found.append(source.read(draft))
        return found


PASTE = "\x1b[200~{}\x1b[201~"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("Hi\r", "Hi"),
        ("a\\\rb\r", "a\nb"),
        ("a\x1b\rb\r", "a\nb"),
        ('"""\ra\r\rb\r"""\r', '"""\na\n\nb\n"""'),
        (PASTE.format("a\r\n  b\\\nc") + "\r", "a\n  b\\\nc"),
        (PASTE.format("/help\n/exit") + "\r", "/help\n/exit"),
        ("Hallo\x01>\r", ">Hallo"),
        ("x\x03", ""),
        ("\x04", None),
    ],
)
def test_keys(typed: str, expected: str | None) -> None:
    assert keys(typed) == [expected]


def test_ctrl_c_on_an_empty_prompt_is_told_apart() -> None:
    with pytest.raises(KeyboardInterrupt):
        keys("\x03")


def test_in_multi_mode_enter_begins_a_line() -> None:
    assert keys("a\rb\x1b\r", multi=True) == ["a\nb"]


def test_a_draft_stands_there_already() -> None:
    assert keys("!\r", draft="two\nlines") == ["two\nlines!"]


def test_what_was_typed_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "history"
    assert keys("one\r", "two\r", history=path) == ["one", "two"]
    assert keys("\x1b[A\x1b[A\r", history=path) == ["one"]


def completions(text: str) -> list[str]:
    source = Typed(None, {"load": lambda: ["a chat"]}, output=DummyOutput())
    completer = source._session.completer
    assert completer is not None
    found = completer.get_completions(Document(text), CompleteEvent(completion_requested=True))
    return [text[: len(text) + each.start_position] + each.text for each in found]


def test_commands_names_and_files_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert completions("/retr") == ["/retry"]
    assert completions("/load ") == ["/load a chat"]
    assert completions("/record r") == ["/record run.jsonl"]
    assert completions("/export md r") == ["/export md run.jsonl"]
    assert completions("r") == []
