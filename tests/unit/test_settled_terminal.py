"""Text before its canvas ends, on a terminal: shown, corrected, taken back; elsewhere committed text alone."""

import io
import signal
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from fake_session import END, spell, timed
from provisional import ENDS, fresh, ids, padded, record
from screens import Sized, Tty, emulator, feed, scrolled, shown
from small_tokenizer import small

from dgemma_local.events import CanvasCommitted, Event, Finished, Prefilled, Retried, StepDone
from dgemma_local.states import SETTLED_STEPS
from dgemma_local.ui import Record, Wanted, pause, show
from dgemma_local.ui import drawing as drawing_module
from dgemma_local.ui.canvas import Vocabulary
from dgemma_local.ui.frame import Sight
from dgemma_local.ui.page import Page
from dgemma_local.ui.settled import provisional

VOCABULARY = Vocabulary(text=small().piece, control=small().is_control, ends=ENDS)
ESCAPE = "\x1b"


# On a terminal


@pytest.fixture(autouse=True)
def every_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "COLORTERM", "COLORFGBG", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(drawing_module, "SHARE", 1e9)


class Watch:
    """A terminal, and what it shows whenever it is looked at."""

    def __init__(self, columns: int = 40, lines: int = 12) -> None:
        self.file, self.screen = Tty(columns, lines), emulator(columns, lines)
        self._fed = 0

    def look(self) -> list[str]:
        self._fed = feed(self.screen, self.file, self._fed)
        return [line for line in shown(self.screen) if line]

    def underlined(self) -> str:
        """What is provisional on the screen."""
        rows = (self.screen.buffer[y] for y in range(self.screen.lines))
        return "".join(
            cell.data for row in rows for cell in (row[x] for x in range(self.screen.columns)) if cell.underscore
        )

    def run(self, events: Iterable[Event], between: Callable[[Event], None] = lambda event: None, **rest: Any) -> None:
        """Shows them; `between` is called after each, when what comes of it stands on the screen."""
        rest = {"fresh": fresh, "fps": 1e9} | rest
        done = []

        def watched() -> Iterator[tuple[Event, float]]:
            for event in events:
                yield event, 0.25
                for drawer in done:
                    drawer.rest()
                between(event)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("dgemma_local.ui.settled.Drawer", kept_in(done))
            page = Page(self.file, Sized(self.file), whole_lines=True)
            provisional(
                watched(), record(), page, Sized(self.file), Sight(label="m", vocabulary=VOCABULARY), "dark", **rest
            )
        self.look()


def kept_in(made: list[Any]) -> Any:
    """Drawers that can be waited for."""

    def make(*arguments: Any) -> Any:
        made.append(drawing_module.Drawer(*arguments))
        return made[-1]

    return make


def canvas(number: int, *drafts: Sequence[int]) -> list[Event]:
    """Each draft for as many steps as it takes to settle; the last is committed."""
    steps = [draft for draft in drafts for _ in range(SETTLED_STEPS)]
    events: list[Event] = [padded(draft, k, canvas=number) for k, draft in enumerate(steps)]
    last = padded(drafts[-1], len(steps), canvas=number)
    last = replace(last, next=last.draft, done=True)
    kept = next((i for i, token in enumerate(drafts[-1]) if token in ENDS), len(drafts[-1]))
    return [*events, last, CanvasCommitted(number, last.next, kept, len(steps) + 1, True)]


def answered(*canvases: Sequence[Event]) -> list[Event]:
    events = [event for some in canvases for event in some]
    tokens = [t for e in events if isinstance(e, CanvasCommitted) for t in e.tokens[: e.kept]]
    steps = sum(isinstance(event, StepDone) for event in events)
    return [Prefilled(3, 0), *events, Finished("end", tuple(tokens), len(canvases), steps)]


def test_text_is_there_before_it_is_committed_and_corrected_when_it_thaws() -> None:
    watch = Watch()
    seen: list[tuple[str, list[str], str]] = []
    watch.run(
        answered(canvas(0, ids("Hi user Hi"), ids("Hi model")), canvas(1, [*ids(" user\nHi"), END])),
        lambda event: seen.append((type(event).__name__, watch.look(), watch.underlined())),
    )
    before = [(lines, provisional) for name, lines, provisional in seen if name == "StepDone"]
    k = SETTLED_STEPS
    assert before[k - 2] == ([], "")
    assert before[k - 1] == (["Hi user Hi"], "Hi user Hi")
    assert before[k] == (["Hi"], "Hi ")  # the rest is taken back at once, though nothing has taken its place
    assert before[2 * k - 1] == (["Hi model"], "Hi model")
    commits = [(lines, provisional) for name, lines, provisional in seen if name == "CanvasCommitted"]
    assert commits[0] == (["Hi model"], "")
    assert (["Hi model user", "Hi"], " userHi") in before
    assert watch.look() == ["Hi model user", "Hi"] and watch.underlined() == ""
    assert not watch.screen.cursor.hidden


def test_what_thaws_is_gone_at_once() -> None:
    watch = Watch()
    seen: list[list[str]] = []
    watch.run(
        [*answered(canvas(0, ids("user"), ids("model")))[1:]],
        lambda event: seen.append(watch.look()),
    )
    assert seen[SETTLED_STEPS - 1 :][:2] == [["user"], []]


def test_nothing_is_left_of_text_that_was_taken_back() -> None:
    watch = Watch(20, 10)
    long, short = ids("Hi\n" * 7), ids("Hi user")
    watch.run(answered(canvas(0, long, short), canvas(1, long, [END])))
    assert watch.look() == ["Hi user"]
    assert scrolled(watch.screen) == []


def test_wide_signs_and_marks_stand_where_they_end_up() -> None:
    text = "\u4f60\u597d\U0001f600e\u0301 Hi\n\u4f60\u597d" + "\u597d" * 11
    watch = Watch(12, 12)
    seen: list[list[str]] = []
    watch.run(answered(canvas(0, [*ids(text), *ids("Hi")])), lambda event: seen.append(watch.look()))
    rows = [line.replace(" ", "") for line in seen[-3]]
    assert rows == [line.replace(" ", "") for line in watch.look()]
    assert unicodedata.normalize("NFD", "".join(rows)) == text.replace("\n", "").replace(" ", "") + "Hi"


def test_more_than_the_terminal_holds() -> None:
    watch = Watch(30, 6)
    text = "\n".join(f"Hi {'user ' * (number % 4)}Hi" for number in range(30))
    seen: list[list[str]] = []
    watch.run(answered(canvas(0, ids(text))), lambda event: seen.append(watch.look()))
    lines = [line.rstrip() for line in text.split("\n")]
    ahead = next(screen for screen in seen if screen)
    assert ahead == ["↑ 26 more rows above", *lines[-4:]]
    assert [*scrolled(watch.screen), *watch.look()] == lines


def test_only_committed_text_is_ever_scrolled_off() -> None:
    watch = Watch(20, 6)
    blocks = [ids("Hi\nuser\n" * 4), ids("model\n" * 9), [*ids("Hi"), END]]
    watch.run(answered(*(canvas(n, ids("user user\n" * 9), block) for n, block in enumerate(blocks))))
    text = small().decode([t for block in blocks for t in block if t != END])
    assert [*scrolled(watch.screen), *watch.look()] == text.split("\n")


def test_a_resize_draws_it_anew() -> None:
    watch = Watch(40, 12)
    events = answered(canvas(0, ids("Hi user Hi user Hi user"), ids("Hi user Hi user Hi")))
    seen: list[list[str]] = []

    def between(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == SETTLED_STEPS:
            watch.look()
            watch.file.columns, watch.file.lines = 9, 8
            watch.screen.resize(8, 9)
        seen.append(watch.look())

    watch.run(events, between)
    assert ["Hi user H", "i user Hi"] in [screen[:2] for screen in seen[SETTLED_STEPS + 1 : 2 * SETTLED_STEPS + 1]]
    assert "".join(watch.look()) == "Hi user Hi user Hi"


def test_ctrl_z_takes_it_away_and_the_next_step_brings_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch()
    stopped: list[tuple[list[str], bool]] = []
    monkeypatch.setattr(pause.os, "kill", lambda *_: stopped.append((watch.look(), watch.screen.cursor.hidden)))
    monkeypatch.setattr(pause.signal, "SIG_DFL", signal.getsignal(signal.SIGTSTP))
    text = ids("Hi user")
    seen: list[list[str]] = []

    def between(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == SETTLED_STEPS - 1:
            assert watch.look() == ["Hi user"]
            signal.raise_signal(signal.SIGTSTP)
        seen.append(watch.look())

    watch.run(answered(canvas(0, text, text)), between)
    assert stopped == [([], False)]
    assert seen[SETTLED_STEPS] == [] and seen[SETTLED_STEPS + 1] == ["Hi user"]
    assert watch.look() == ["Hi user"]


def test_what_was_not_committed_is_gone_when_it_is_interrupted_or_breaks() -> None:
    committed = canvas(0, ids("Hi user\n"))
    begun = [Prefilled(3, 0), *committed, *canvas(1, ids("model"))[:-2]]
    watch = Watch()
    watch.run([*begun, Finished("interrupted", tuple(ids("Hi user\n")), 1, 9)])
    assert watch.look() == ["Hi user"] and not watch.screen.cursor.hidden

    def broken() -> Iterator[Event]:
        yield from begun
        raise KeyboardInterrupt

    watch = Watch()
    with pytest.raises(KeyboardInterrupt):
        watch.run(broken())
    assert watch.look() == ["Hi user"] and not watch.screen.cursor.hidden


def test_thoughts_are_seen_where_the_page_shows_them_and_never_as_answer() -> None:
    text = "<|channel>thought\nuser<channel|>Hi<|tool_call>call:model<tool_call|>"
    for thoughts, expected in ((True, ["user", "Hi"]), (False, ["Hi"])):
        watch = Watch()
        seen: list[list[str]] = []
        watch.run(
            answered(canvas(0, ids(text))),
            lambda event, seen=seen, watch=watch: seen.append(watch.look()),
            thoughts=thoughts,
        )  # type: ignore[misc]
        assert seen[SETTLED_STEPS] == expected
        assert watch.look() == ["user", "Hi", "tool call: call:model"]


def test_a_thought_goes_on_over_the_edge_of_a_canvas() -> None:
    watch = Watch()
    seen: list[list[str]] = []
    run = [canvas(0, ids("<|channel>thought\nHi\nHi")), canvas(1, [*ids(" user<channel|>model"), END])]
    watch.run(answered(*run), lambda event: seen.append(watch.look()), thoughts=True)
    assert seen[-3] == ["Hi", "Hi user", "model"]
    assert watch.look() == ["Hi", "Hi user", "model"]


def test_a_canvas_that_settles_as_it_is_committed_is_not_drawn_before() -> None:
    watch = Watch()
    steps = canvas(0, ids("Hi user"))
    watch.run(answered(steps[1:]))
    assert f"{ESCAPE}[0;4m" not in watch.file.getvalue() and watch.look() == ["Hi user"]


def test_an_answer_that_begins_anew_is_not_read_twice() -> None:
    first = canvas(0, ids("Hi user"))[:-1]
    watch = Watch()
    seen: list[list[str]] = []
    events = answered(canvas(0, ids("model")))
    watch.run(
        [events[0], *first, Retried(0, "empty", len(first)), *events[1:]], lambda event: seen.append(watch.look())
    )
    assert ["Hi user"] in seen and ["model"] in seen
    assert watch.look() == ["model"]


# Who gets it


def shown_by(out: Any, err: Any, monkeypatch: pytest.MonkeyPatch, events: Sequence[Event], **wanted: Any) -> None:
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    monkeypatch.setattr("dgemma_local.ui.Terminal", Sized)
    show(timed(events), Record(record().start, fresh()), VOCABULARY, Wanted(**wanted))


EVENTS = answered(canvas(0, ids("Hi model"), ids("Hi user\n")), canvas(1, [*ids("Hi \x1b[2JHi"), END]))


def test_a_terminal_gets_it_and_no_summary_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch()
    shown_by(watch.file, watch.file, monkeypatch, EVENTS, fresh=fresh)
    assert f"{ESCAPE}[0;4mHi model" in watch.file.getvalue()
    assert watch.look()[:3] == ["m · --seed 1", "Hi user", "Hi �[2JHi"]
    assert "thaws" not in watch.file.getvalue()


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        ("pipe", {}),
        ("dumb", {}),
        ("ascii", {}),
        ("tty", {"quiet": True}),
        ("tty", {"as_json": True}),
        ("tty", {"fresh": None}),
    ],
)
def test_only_committed_text_elsewhere_byte_for_byte(
    case: str, wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    got = []
    for reader in (fresh, None):  # None: as it was before there was provisional text
        out: Any = io.StringIO() if case == "pipe" else Tty()
        if case == "ascii":
            out.encoding = "ascii"
        if case == "dumb":
            monkeypatch.setenv("TERM", "dumb")
        shown_by(out, Tty(), monkeypatch, EVENTS, **{"fresh": reader} | wanted)
        got.append(out.getvalue())
    assert got[0] == got[1]
    assert ESCAPE not in got[0] or case == "pipe"
    if case == "pipe":
        assert got[0] == "Hi user\nHi \x1b[2JHi\n"


def test_what_stop_strings_will_cut_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch()
    shown_by(watch.file, watch.file, monkeypatch, EVENTS[:3], fresh=fresh, stop=("model",))
    assert f"{ESCAPE}[0;4mHi " in watch.file.getvalue() and "model" not in watch.file.getvalue()


def test_the_view_of_the_canvas_comes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Tty(60, 20)
    shown_by(file, file, monkeypatch, EVENTS, fresh=fresh, visualize=True)
    assert "step 1 of 48" in file.getvalue()


def test_spelled_text_comes_out_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long answers over many canvases, on terminals of several sizes."""
    text = "\n".join(f"Hi {'user ' * (number % 7)}model" for number in range(24))
    for size in ((80, 24), (23, 7), (5, 3), (1, 2)):
        screens = []
        for reader in (fresh, None):
            watch = Watch(*size)
            shown_by(watch.file, Tty(), monkeypatch, list(spell(text, steps=6)), fresh=reader)
            watch.look()
            screens.append(("".join([*scrolled(watch.screen), *watch.look()])).replace(" ", ""))
        assert screens[0] == screens[1] == text.replace("\n", "").replace(" ", "")
