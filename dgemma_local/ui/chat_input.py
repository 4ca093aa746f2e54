"""Where a chat's messages come from: a terminal with line editing, or lines of any other stream."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from dgemma_local.chat.commands import BLOCK, Lines, complete, file_part, open_block
from dgemma_local.errors import DgemmaError, PromptError, UsageError
from dgemma_local.interrupts import Waiting
from dgemma_local.streams import say
from dgemma_local.ui.ahead import typed_ahead
from dgemma_local.ui.pause import given_back
from dgemma_local.ui.prompt import LARGEST

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completer, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

PROMPT, GOES_ON = ">>> ", "... "
ENDLESS = 4 * LARGEST  # bytes; /dev/zero is a line without an end
ENDS = 64  # bytes
_SHORTEN = "shorten it: no context holds so much"
LONGEST_KEPT = 1 << 16  # characters of what is typed or pasted at once that the next chat still knows
MENU = 4  # lines that completions may take below the prompt


class Input(Protocol):
    """What a chat asks."""

    multi: bool  # Enter begins a line

    def read(self, draft: str = "") -> str | None:
        """The next message or command; None at the end. draft: what stands there already.

        Raises KeyboardInterrupt for Ctrl-C on an empty prompt, PromptError for what is no text.
        """
        ...


class Piped:
    """A message a line; a trailing backslash and three quotes join lines."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._lines = stream, Lines(LARGEST)
        self._ended = False
        self.multi = False

    def read(self, draft: str = "") -> str | None:
        """As `Input.read`; a message with a fault is read to its end before it is raised."""
        fault: PromptError | None = None
        size = 0  # bytes of this message
        while not self._ended and (raw := self._stream.readline(LARGEST + 1)):
            size += len(raw)
            if len(raw) > LARGEST and not raw.endswith(b"\n"):
                fault = fault or PromptError(f"a line is larger than {LARGEST >> 20} MiB", _SHORTEN)
                raw, more = self._rest(raw)
                size += more
            if size > ENDLESS:
                self._ended, self._lines = True, Lines(LARGEST)
                raise PromptError(f"a message does not end within {ENDLESS >> 20} MiB", "nothing behind it is read")
            try:
                line = raw.decode("utf-8-sig")
            except UnicodeDecodeError:
                fault = fault or PromptError("a line is not UTF-8 text", "give it as UTF-8")
                line = raw.decode(errors="replace")
            if (message := self._lines.feed(line.removesuffix("\n").removesuffix("\r"))) is not None:
                if fault is not None:
                    raise fault
                return message
        message = self._lines.close()
        if fault is not None:
            raise fault
        if message is not None and open_block(message):
            say("the input ended before the three quotes did: the message ends with it")
            return f"{message}\n{BLOCK}"
        return message

    def _rest(self, begun: bytes) -> tuple[bytes, int]:
        """Of a line too large: its two ends, which say what goes on behind it, and how many bytes were still to read."""
        end, more = begun, 0
        while more <= ENDLESS and not end.endswith(b"\n") and (found := self._stream.readline(LARGEST)):
            end, more = end[-ENDS:] + found, more + len(found)
        return begun[:ENDS] + b" " + end[-ENDS:], more


class Typed:
    """prompt-toolkit's line editor. history: a file, of which it is the only writer; None keeps none."""

    def __init__(self, history: Path | None, names: Mapping[str, Callable[[], Iterable[str]]], **streams: Any) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.history import InMemoryHistory

        self.multi = False
        commands = Condition(lambda: self._session.default_buffer.text.startswith("/"))
        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory() if history is None else _kept(history),
            completer=_completer(names),
            complete_while_typing=commands,
            reserve_space_for_menu=MENU,
            key_bindings=self._keys(),
            multiline=True,
            prompt_continuation=lambda *_: GOES_ON,
            enable_suspend=True,
            **streams,
        )

    def read(self, draft: str = "") -> str | None:
        try:
            return self._session.prompt(PROMPT, default=draft)
        except EOFError:
            return None
        except KeyboardInterrupt:
            if self._session.default_buffer.text:
                return ""  # it has taken back what was typed
            raise

    def ahead(self) -> AbstractContextManager[None]:
        """Meanwhile what is typed waits for the next `read`."""
        return typed_ahead(self._session.input)

    def _keys(self) -> "KeyBindings":
        from prompt_toolkit.key_binding import KeyBindings

        keys = KeyBindings()

        @keys.add("enter")
        def enter(event: Any) -> None:
            buffer = event.current_buffer
            if self.multi or open_block(buffer.text):
                buffer.newline(copy_margin=False)
            elif buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
                buffer.delete_before_cursor()
                buffer.newline(copy_margin=False)
            else:
                buffer.validate_and_handle()

        @keys.add("escape", "enter")
        def alt_enter(event: Any) -> None:
            if self.multi:
                event.current_buffer.validate_and_handle()
            else:
                event.current_buffer.newline(copy_margin=False)

        @keys.add("c-x", "c-e")
        def editor(event: Any) -> None:
            from prompt_toolkit.application import run_in_terminal
            from prompt_toolkit.document import Document

            def edit() -> None:
                try:
                    event.current_buffer.document = Document(edited(event.current_buffer.text))
                except UsageError as error:
                    say(f"{error.what}\n  fix: {error.fix}")

            run_in_terminal(edit)

        return keys


def ahead(source: Input) -> AbstractContextManager[None]:
    """While what came from `source` is done: what is typed then comes next, whole; a pipe keeps it by itself."""
    return source.ahead() if isinstance(source, Typed) else nullcontext()


def _kept(path: Path) -> "History":
    """What was typed, in a file, and in memory alone once that can be neither read nor written; this is said once."""
    from prompt_toolkit.history import FileHistory

    class Kept(FileHistory):
        failed = False

        def load_history_strings(self) -> Iterable[str]:
            try:
                return super().load_history_strings()
            except OSError as error:
                self._fail(error)
                return ()

        def store_string(self, string: str) -> None:
            if self.failed or len(string) > LONGEST_KEPT:
                return
            try:
                super().store_string(string)
            except OSError as error:
                self._fail(error)

        def _fail(self, error: OSError) -> None:
            self.failed = True
            say(f"what is typed is not kept any more: {error.strerror}")

    return Kept(str(path))


def _completer(names: Mapping[str, Callable[[], Iterable[str]]]) -> "Completer":
    from prompt_toolkit.completion import Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    paths = PathCompleter(expanduser=True)

    class Commands(Completer):
        def get_completions(self, document: "Document", event: Any) -> Iterable["Completion"]:
            try:
                return [*self._found(document.text_before_cursor, event)]
            except (OSError, ValueError, DgemmaError):  # a path that is none, a models.toml that is broken
                return []

        def _found(self, text: str, event: Any) -> Iterable["Completion"]:
            back, found = complete(text, names)
            for each in found:
                yield Completion(each, start_position=-back)
            if (begun := file_part(text)) is not None:
                yield from paths.get_completions(Document(begun), event)

    return Commands()


def on_terminal() -> bool:
    """Whether somebody types: stdin is a terminal, and one of the others shows what is typed."""
    streams = (sys.stdout, sys.stderr)
    return sys.stdin is not None and sys.stdin.isatty() and any(s is not None and s.isatty() for s in streams)


def check_stdin() -> None:
    """Raises PromptError: it is closed."""
    if sys.stdin is None:
        raise PromptError("standard input is closed", "type on a terminal, or pipe a message a line")


def piped() -> Piped:
    """Standard input. Raises as `check_stdin` does."""
    check_stdin()
    return Piped(sys.stdin.buffer)


def typed(history: Path | None, names: Mapping[str, Callable[[], Iterable[str]]]) -> Typed:
    """On the terminal, drawn on stderr where stdout goes elsewhere."""
    from prompt_toolkit.output import create_output

    return Typed(history, names, output=create_output(sys.stdout if sys.stdout.isatty() else sys.stderr))


def edited(text: str) -> str:
    """What became of `text` in the user's editor. Raises UsageError: there is none, or it failed."""
    wanted = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    try:
        found = shlex.split(wanted) if wanted else [each for each in ("nano", "vi") if shutil.which(each)][:1]
    except ValueError:
        raise UsageError(f"the editor {wanted} has a quotation that does not end", "set VISUAL or EDITOR") from None
    if not found:
        raise UsageError("there is no editor", "set VISUAL or EDITOR")
    try:
        handle, name = tempfile.mkstemp(prefix="dgemma-", suffix=".md")  # 0600
    except OSError as error:
        raise UsageError(f"there is no place to edit in: {error.strerror}", "make room, or set TMPDIR") from None
    path = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        with Waiting(signal.SIGINT) as signals, given_back():  # Ctrl-C is the editor's
            code = subprocess.run([*found, name], check=False).returncode
            signals.forget(signal.SIGINT)
        if code:
            raise UsageError(f"{found[0]} ended with {code}", "what was typed is dropped; set VISUAL or EDITOR")
        return path.read_text(encoding="utf-8").removesuffix("\n")
    except OSError as error:
        raise UsageError(f"{found[0]} cannot be run: {error.strerror}", "set VISUAL or EDITOR") from None
    except ValueError:
        raise UsageError("the editor left no UTF-8 text", "save it as UTF-8") from None
    finally:
        path.unlink(missing_ok=True)
