"""A drawer that never waits, and the front ends without a process of their own."""

import io
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from fake_session import END, LENGTH, spell, timed
from screens import Sized, Tty, emulator, feed, scrolled, shown
from small_tokenizer import small

from dgemma_local.channels import AnswerDecoder
from dgemma_local.errors import UsageError
from dgemma_local.states import Seen, State
from dgemma_local.ui import Record, Start, Wanted, show
from dgemma_local.ui import drawing as drawing_module
from dgemma_local.ui.canvas import Row, Vocabulary
from dgemma_local.ui.drawing import Drawer
from dgemma_local.ui.frame import Sight
from dgemma_local.ui.live import Pace, live
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
    assert len(drawer.costs) == 2


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


def test_what_stops_the_writing_reaches_the_one_who_draws() -> None:
    class Gone(Tty):
        def write(self, text: str) -> int:
            if "?2026h" in text:
                raise OSError(5, "the terminal has gone")
            return super().write(text)

    with Drawer(Painter(Sized(Gone()), "dark")) as drawer:
        with pytest.raises(OSError, match="gone"):
            drawer.show(lambda: line("x"))
        drawer.rest()


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
