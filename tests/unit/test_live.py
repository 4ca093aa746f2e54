"""A drawer that never waits, and the front ends without a process of their own."""

import io
import os
import sys
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fake_session import END, LENGTH, spell, timed
from prompt_toolkit.input import create_pipe_input
from screens import Sized, Tty, emulator, feed, scrolled, shown
from small_tokenizer import small

from dgemma_local.channels import AnswerDecoder
from dgemma_local.errors import UsageError
from dgemma_local.events import StepDone
from dgemma_local.states import Seen, State
from dgemma_local.ui import Record, Start, Wanted, show
from dgemma_local.ui import drawing as drawing_module
from dgemma_local.ui import keys as keys_module
from dgemma_local.ui.canvas import Row, Vocabulary
from dgemma_local.ui.drawing import Drawer
from dgemma_local.ui.frame import Sight
from dgemma_local.ui.keys import Gone, Keys
from dgemma_local.ui.live import KEYS, Pace, Region, live
from dgemma_local.ui.page import Page
from dgemma_local.ui.paint import Painter
from dgemma_local.ui.palette import Ink

START = Start(model="m", demo=False, seed=1, max_tokens=64, steps=8, canvas_length=LENGTH)
VOCABULARY = Vocabulary(text=small().piece, control=small().is_control, ends=frozenset({END}))


@pytest.fixture(autouse=True)
def colours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "COLORTERM", "COLORFGBG", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


# The drawer


class Slow(Tty):
    """A terminal that takes nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.busy = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.busy.set()
        assert self.open.wait(20)
        return super().write(text)


def line(text: str) -> Sequence[Row]:
    return [[(text, Ink(State.TEXT))]]


def test_frames_are_dropped_and_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing_module, "SHARE", 1e9)  # nothing but the slow terminal holds a frame back
    file = Slow()
    drawer = Drawer(Painter(Sized(file), "dark"), fps=1e9)
    made: list[str] = []

    def offer(text: str) -> bool:
        def make() -> Sequence[Row]:
            made.append(text)
            return line(text)

        return drawer.offer(make)

    with drawer:
        assert offer("first")
        assert file.busy.wait(20)
        assert not any(offer("lost") for _ in range(50))  # returns, though nothing is being taken
        assert made == ["first"] and drawer.dropped == 50
        file.open.set()
        drawer.show(lambda: line("last"))
        assert "last" in file.writes[-1]
    assert "lost" not in file.getvalue() and file.writes[-1].endswith("\x1b[?25h")
    assert drawer.drawn == 2


def test_drawing_takes_its_share_of_the_time_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 100.0

        @classmethod
        def read(cls) -> float:
            return cls.now

    clock: Any = type("time", (), {"monotonic": Clock.read, "perf_counter": Clock.read, "thread_time": lambda: 0.0})
    monkeypatch.setattr(drawing_module, "time", clock)

    def make() -> Sequence[Row]:
        Clock.now += 0.006  # seconds that a frame costs
        return line(str(Clock.now))

    with Drawer(Painter(Sized(Tty()), "dark"), fps=20) as drawer:
        assert drawer.offer(make)
        drawer.rest()
        Clock.now += 0.006 / drawing_module.SHARE - 0.001
        assert not drawer.offer(make)  # fps alone would have it
        Clock.now += 0.002
        assert drawer.offer(make)
        drawer.rest()
    with Drawer(Painter(Sized(Tty()), "dark"), fps=2) as drawer:
        assert drawer.offer(make)
        drawer.rest()
        Clock.now += 0.4
        assert not drawer.offer(make)  # the share alone would have it


def test_what_goes_wrong_in_the_thread_reaches_the_one_who_draws() -> None:
    class Broken(Tty):
        def write(self, text: str) -> int:
            if "?2026h" in text:
                raise RuntimeError("broken")
            return super().write(text)

    with Drawer(Painter(Sized(Broken()), "dark")) as drawer:
        with pytest.raises(RuntimeError, match="broken"):
            drawer.show(lambda: line("x"))
        drawer.rest()


@pytest.mark.parametrize("way", ["show", "clear", "leave"])
def test_a_terminal_that_has_gone_takes_the_frames_with_it_and_no_more(way: str) -> None:
    class Gone(Tty):
        here = True

        def write(self, text: str) -> int:
            if not self.here:
                raise OSError(5, "the terminal has gone")
            return super().write(text)

    file = Gone()
    with Drawer(Painter(Sized(file), "dark")) as drawer:
        drawer.show(lambda: line("x"))
        file.here = False
        if way == "show":
            drawer.show(lambda: line("y"))
            drawer.show(lambda: line("z"))
        elif way == "clear":
            drawer.clear()
    assert drawer.drawn == (3 if way == "show" else 1)


def test_leaving_by_an_exception_waits_for_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing_module, "LEAVING", 0.01)
    file = Slow()

    def leave() -> None:
        with Drawer(Painter(Sized(file), "dark")) as drawer:
            drawer.offer(lambda: line("x"))
            assert file.busy.wait(20)
            raise SystemExit

    with pytest.raises(SystemExit):
        leave()
    file.open.set()


def test_a_frame_is_taken_away_though_a_signal_ends_the_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Slow()
    drawer = Drawer(Painter(Sized(file), "dark"))
    join = drawer._thread.join
    waits: list[float | None] = []

    def interrupted(timeout: float | None = None) -> None:
        waits.append(timeout)
        if len(waits) == 1:
            file.open.set()
            raise SystemExit
        join(20)

    monkeypatch.setattr(drawer._thread, "join", interrupted)
    drawer.offer(lambda: line("x"))
    assert file.busy.wait(20)
    with pytest.raises(SystemExit):
        drawer.__exit__(None, None, None)
    assert file.writes[-1].endswith("\x1b[?25h")
    assert waits == [None, drawing_module.LEAVING]


# Keys


def test_an_escape_that_something_follows_in_time_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(keys_module, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=None))
    with create_pipe_input() as source:
        keys = Keys(source)

        def after(seconds: float, typed: bytes) -> str | None:
            now[0] += seconds
            if typed:
                source.send_bytes(typed)
            return keys.read(0)

        assert after(0, b"\x1b") is None
        assert after(0.25, b"") is None  # a slow line
        assert after(0, b"[C") == "right"
        assert after(0, b"x\x1b") == "x" and keys.read(0) is None
        assert after(keys_module.ESCAPE + 0.01, b"") == "escape" and keys.read(0) is None


def test_what_is_typed_for_another_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with create_pipe_input() as source:
        keys = Keys(source)
        source.send_bytes(b"q")
        monkeypatch.setattr(keys_module, "foreground", lambda fd: False)
        assert keys.read(0) is None
        monkeypatch.setattr(keys_module, "foreground", lambda fd: True)
        assert keys.read(0) == "q"


# How long a step stays


class Typed:
    """Keys that are known beforehand, or the terminal's end."""

    def __init__(self, *keys: Any) -> None:
        self.keys = list(keys)

    def read(self, seconds: float) -> str | None:
        key = self.keys.pop(0)
        if key is Gone:
            raise Gone
        return str(key)


def test_a_step_that_waits_for_a_key_says_which() -> None:
    file = Tty(80, 24)
    keys: Any = Typed(*["space"] * 4, "c")
    page = Page(file, None, whole_lines=True)
    live(timed(spell("Hi user " * 10)), watched(), page, Sized(file), Sight(label="m", vocabulary=VOCABULARY), "dark",
         pace=Pace(keys=keys))  # fmt: skip
    screen = emulator(80, 24)
    named = []
    for number, write in enumerate(file.writes):
        feed(screen, Slice(file.writes[number : number + 1]), 0)
        if "?2026h" in write:
            named.append(" · ".join(KEYS) in shown(screen))
    assert named[:6] == [True] * 6 and not named[-1]  # the sixth is the step that c was pressed at
    assert keys.keys == []


class Slice(Tty):
    def __init__(self, writes: list[str]) -> None:
        super().__init__()
        self.writes = writes


@pytest.mark.parametrize("width", [10, 20, 30])
def test_a_narrow_or_low_frame_names_what_keys_it_has_room_for(width: int) -> None:
    seen = Seen(frozenset({END}))
    sight = Sight(label="m", vocabulary=VOCABULARY)
    for height in range(1, 12):
        rows = Region(Sized(Tty(width, height + 1)), sight).rows(seen, "", KEYS)
        assert len(rows) == min(height, 9)
        said = "".join(text for text, _ in rows[-1])
        fits = " · ".join(KEYS[: {10: 1, 20: 2, 30: 3}[width]])
        assert (said == fits) == (height > 4)


def test_the_end_of_the_keys_terminal_is_no_end_of_the_run() -> None:
    pace = Pace(keys=Typed("x", Gone))  # type: ignore[arg-type]
    pace.hold()
    assert pace.keys is None and not pace.pressed.is_set()


def test_a_long_step_is_drawn_again_where_the_terminal_has_another_size() -> None:
    calls: list[int] = []
    pace = Pace(slow=0.2)
    pace.mark()
    pace.sleep(lambda: calls.append(1))
    assert len(calls) >= 2
    file = Tty(40, 20)

    def resized() -> Any:
        for event, seconds in timed(spell("Hi user")):
            if isinstance(event, StepDone) and event.step == 1:
                file.columns = 60  # while the first step stands, and sleeps
            yield event, seconds

    page = Page(file, None, whole_lines=True)
    live(resized(), watched(), page, Sized(file), Sight(label="m", vocabulary=VOCABULARY), "dark",
         pace=Pace(slow=0.15))  # fmt: skip
    screen = emulator(60, 20)
    again = [write for write in file.writes if "\x1b[?25l" in write]
    feed(screen, Slice(again[1:2]), 0)
    assert any("step 1 of 8" in each for each in shown(screen))


# The front end


def watched(**rest: Any) -> Record:
    return Record(START, AnswerDecoder(small()), watched=Seen(frozenset({END})), **rest)


def test_committed_text_is_in_the_scrollback_and_nothing_else() -> None:
    file = Tty(40, 10)
    text = "\n".join(f"Hi {'user ' * (number % 5)}Hi" for number in range(40))
    page = Page(file, None, whole_lines=True)
    live(timed(spell(text)), watched(), page, Sized(file), Sight(label="m", vocabulary=VOCABULARY), "dark",
         pace=Pace(slow=1e-9))  # fmt: skip
    screen = emulator(40, 10)
    feed(screen, file, 0)
    assert [*scrolled(screen), *filter(None, shown(screen))] == [line.rstrip() for line in text.split("\n")]


def test_a_frame_keeps_its_height(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["dgemma_local.ui.frame"], "_POSITIONS", 1)  # more rows with positions than without
    file = Tty(40, 30)
    page = Page(file, None, whole_lines=True)
    live(timed(spell("Hi\n" * 20)), watched(), page, Sized(file), Sight(label="m", vocabulary=VOCABULARY), "dark",
         pace=Pace(slow=1e-9))  # fmt: skip
    downs = [write.count("\r\n") for write in file.writes if "\x1b[?25l" in write]
    assert len(downs) > 3 and len(set(downs)) == 1


def test_every_front_end_hands_events_to_the_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorder:
        failed = None

        def __init__(self) -> None:
            self.taken: list[Any] = []

        def take(self, event: Any, seconds: float, pieces: Any = ()) -> None:
            self.taken.append((event, seconds, "".join(piece.text for piece in pieces)))

    for wanted in (Wanted(), Wanted(as_json=True), Wanted(visualize=True)):
        recorder: Any = Recorder()
        err = Tty(40, 20)
        monkeypatch.setattr("sys.stderr", err)
        monkeypatch.setattr("sys.stdout", io.StringIO())
        show(timed(spell("Hi user")), Record(START, AnswerDecoder(small()), recorder=recorder), VOCABULARY, wanted)
        assert [each[0] for each in recorder.taken] == list(spell("Hi user"))
        assert "".join(each[2] for each in recorder.taken) == "Hi user"
        assert "1 canvas in 4 steps" in err.getvalue()


def test_steps_without_keys_are_refused_before_anything_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(f"sys.{name}", io.StringIO())

    def never() -> Any:
        raise AssertionError("generated")
        yield

    with pytest.raises(UsageError, match="--step"):
        show(never(), Record(START, AnswerDecoder(small())), VOCABULARY, Wanted(visualize=True, step=True))


def test_a_pipe_gets_text_and_no_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    monkeypatch.setitem(os.environ, "FORCE_COLOR", "1")
    show(timed(spell("Hi user")), Record(START, AnswerDecoder(small())), VOCABULARY, Wanted(visualize=True))
    assert out.getvalue() == "Hi user\n"
    assert "\x1b" not in err.getvalue() and "--visualize needs" in err.getvalue()
