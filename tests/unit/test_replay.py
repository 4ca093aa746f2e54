"""The player: what keys and time make of it, what it shows, and what it leaves on a terminal."""

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pyte
import pytest
import recordings
from hypothesis import given
from hypothesis import strategies as st

from dgemma_local.events import CanvasCommitted, StepDone
from dgemma_local.recording import Recording
from dgemma_local.states import HELD, Moment, State, follow
from dgemma_local.ui import past
from dgemma_local.ui.canvas import rows, runs
from dgemma_local.ui.frame import frame
from dgemma_local.ui.player import HELP, LONGEST_ENTRY, SHORTEST, SPEEDS, Player, press, tick
from dgemma_local.ui.replay import PAST_ROWS, places, rows_wanted, screen, sight
from dgemma_local.ui.tape import Place, Tape

KEYS = (
    *(
        "space",
        "left",
        "right",
        "up",
        "down",
        "home",
        "end",
        "pageup",
        "pagedown",
        "enter",
        "escape",
        "tab",
        "backspace",
    ),
    *"0123456789+-=[],./?gfnpvdtqxyz é漢",
)
CANVASES, STEPS, LENGTH = 3, 5, 24


@cache
def synthetic(canvases: int = CANVASES, steps: int = STEPS, length: int = LENGTH) -> Recording:
    return recordings.make(canvases=canvases, steps=steps, length=length, vocabulary=60)


def player(**rest: Any) -> Player:
    return Player(tape=Tape(synthetic()), **rest)


def pressed(start: Player, *keys: str) -> Player:
    for key in keys:
        start = press(start, key)
    return start


def text(rows: Any) -> list[str]:
    return ["".join(part for part, _ in row) for row in rows]


# The tape


def test_a_tape_knows_every_step_as_the_live_view_saw_it_in_whatever_order_it_is_asked() -> None:
    made = synthetic()
    folded = follow(zip(made.events, made.seconds, strict=True), frozenset(made.header.ends))
    truth = [seen for event, seen in zip(made.events, folded, strict=True) if isinstance(event, StepDone)]
    assert len(truth) == len(Tape(made)) == CANVASES * STEPS
    for order in (range(len(truth)), reversed(range(len(truth))), (7, 0, 14, 6, 7)):
        tape = Tape(made)
        for step in order:
            assert tape.seen(step) == truth[step]
            assert tape.canvas(step) == truth[step].canvas
        *_, last = follow(zip(made.events, made.seconds, strict=True), frozenset(made.header.ends))
        assert tape.end() == last


def test_the_end_of_a_tape_counts_every_event() -> None:
    made = synthetic()
    *_, last = follow(zip(made.events, made.seconds, strict=True), frozenset(made.header.ends))
    assert Tape(made).end() == last
    assert last.canvases == CANVASES and last.thaws and last.replacements and last.corrections


def test_a_tape_folds_no_further_than_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    from dgemma_local.ui import tape

    folded = []
    see = tape.see
    monkeypatch.setattr(tape, "see", lambda seen, event, seconds: folded.append(event) or see(seen, event, seconds))
    long = Tape(synthetic(canvases=40, steps=3))
    for step in (0, 1, 2):
        long.seen(step)
    assert len(folded) < 10


def test_the_unfinished_line_of_earlier_canvases_goes_on_in_the_next() -> None:
    made = recordings.make(canvases=2, steps=3, length=8)
    pieces = iter(["one\ntwo thr", "ee"])
    made.pieces = [
        (recordings.Piece("answer", next(pieces)),) if isinstance(event, CanvasCommitted) else ()
        for event in made.events
    ]
    tape = Tape(made)
    assert [tape.tail(step) for step in (0, 2, 3, 5)] == ["", "", "two thr", "two thr"]


@pytest.mark.parametrize(
    ("pieces", "tail"),
    [
        ([("answer", "one\n")], "one\n"),  # its newline may be the last, which is not written
        ([("answer", "a\nb\n\n")], "b\n\n"),
        ([("answer", "a"), ("answer", "b\nc"), ("answer", "d")], "cd"),
        ([("thought", "so"), ("answer", "x")], "x"),
        ([("answer", "x"), ("tool_call", "f()")], ""),
        ([], ""),
    ],
)
def test_the_tail_is_what_the_live_view_holds_back(pieces: list[tuple[str, str]], tail: str) -> None:
    made = recordings.make(canvases=2, steps=3, length=8)
    first = next(i for i, event in enumerate(made.events) if isinstance(event, CanvasCommitted))
    made.pieces[first] = tuple(recordings.Piece(*piece) for piece in pieces)
    assert Tape(made).tail(3) == tail


def test_find_names_each_position_once_a_canvas_where_it_first_held_the_text() -> None:
    made = synthetic()
    tape = Tape(made)
    word = next(word.text for word in made.words.values() if not word.control)
    wanted = {token for token, each in made.words.items() if word.casefold() in each.text.casefold()}
    truth = {
        (canvas, i): first
        for canvas, steps in reversed(list(enumerate(tape.canvases)))
        for step in reversed(steps)
        for i in range(LENGTH)
        if step.accepted[i] and step.next[i] in wanted
        for first in [tape.firsts[canvas] + step.step]
    }
    found = tape.find(word.upper())
    assert set(found) == {Place(step, i) for (_, i), step in truth.items()} and found == tuple(sorted(found))
    assert tape.find("no such token") == tape.find("") == ()


# Keys and time


@given(st.lists(st.sampled_from(KEYS) | st.floats(0, 5)))
def test_whatever_is_pressed_the_player_stays_within_its_recording(keys: list[str | float]) -> None:
    now = player()
    for key in keys:
        now = press(replace(now, places=places(now, 20)), key) if isinstance(key, str) else tick(now, key)
        assert 0 <= now.step <= now.last
        assert 0 <= now.position < LENGTH
        assert SPEEDS[0] <= now.speed <= SPEEDS[-1]
        assert now.rest is None or 0 <= now.rest <= 0.4 / SPEEDS[0]
        shot = screen(now, 60, 20)
        assert len(shot.rows) == 20


@given(st.integers(0, CANVASES * STEPS - 1))
def test_a_step_on_and_back_is_where_it_was_and_both_pause(step: int) -> None:
    now = player(step=step)
    on, back = press(now, "right"), press(now, "left")
    assert (on.playing, back.playing) == (False, False)
    assert on.step == min(step + 1, now.last) and back.step == max(step - 1, 0)
    if step < now.last:
        assert press(on, "left").step == step
    if step:
        assert press(back, ".").step == step and press(press(now, ","), "right").step == step


@given(st.floats(0, 20), st.floats(0, 20))
def test_time_passes_the_same_in_one_go_and_in_two(first: float, second: float) -> None:
    once, twice = tick(player(), first + second), tick(tick(player(), first), second)
    assert abs(once.step - twice.step) <= 1  # at the very edge of a step rounding decides
    assert once.playing or once.step == once.last


def test_a_step_is_shown_for_its_time_and_the_last_one_too() -> None:
    now = player(pause=1.0)
    assert tick(now, 0.9).step == 0 and tick(now, 1.0).step == 1
    assert tick(tick(now, 0.6), 0.6).step == 1
    assert tick(now, 0.25).rest == 0.75
    assert press(tick(now, 0.75), "home").rest == 1.0
    last = tick(now, float(now.last))
    assert (last.step, last.playing) == (now.last, True)
    over = tick(last, 1.0)
    assert (over.step, over.playing, over.rest) == (now.last, False, None)
    assert tick(over, 100.0) == over
    late = tick(now, 100.0)
    assert (late.step, late.playing, late.rest) == (now.last, True, 1.0)


def test_speed_divides_the_time_of_a_step_down_to_one_that_can_be_seen() -> None:
    assert tick(player(pause=1.0, speed=4.0), 1.0).step == 4
    assert tick(player(pause=0.0), 10.5 * SHORTEST).step == 10


def test_space_pauses_goes_on_and_starts_over_at_the_end() -> None:
    now = pressed(tick(player(), 0.5), "space")
    assert (now.step, now.playing) == (1, False)
    assert tick(now, 10.0) == now
    assert press(now, "space").playing and press(now, "space").step == 1
    end = press(now, "end")
    assert (end.step, end.playing) == (end.last, False)
    again = press(end, "space")
    assert (again.step, again.playing) == (0, True)
    assert press(again, "home").playing


def test_canvases_are_gone_to_by_their_first_steps() -> None:
    now = player(step=7)
    assert [pressed(now, *keys).step for keys in (["up"], ["up", "["], ["up", "up", "up"])] == [5, 0, 0]
    assert [pressed(now, *keys).step for keys in (["down"], ["down", "]"], ["]", "]", "]"])] == [10, 14, 14]


def test_speeds_go_through_their_row_and_stay_at_its_ends() -> None:
    now = player()
    found = [now.speed]
    for key in "++++++------=-0":
        now = press(now, key)
        found.append(now.speed)
    assert found == [1, 2, 4, 8, 16, 16, 16, 8, 4, 2, 1, 0.5, 0.25, 0.5, 0.25, 1]
    assert press(player(speed=3.0), "+").speed == 4 and press(player(speed=3.0), "-").speed == 2


def test_a_step_is_gone_to_by_its_number() -> None:
    assert pressed(player(), "g", "1", "2", "enter").step == 11
    assert pressed(player(), "g", "1", "2", "backspace", "3", "x", "enter").step == 12
    assert pressed(player(step=3), "g", "9", "escape").step == 3
    assert pressed(player(step=3), "g", "enter").step == 3
    far = pressed(player(step=3), "g", "9", "9", "enter")
    assert (far.step, far.told) == (3, "steps are 1 to 15")
    assert pressed(player(step=3), "g", "0", "enter").told == "steps are 1 to 15"
    asking = pressed(player(), "g", "q")
    assert asking.asking == "step" and not asking.left and not asking.playing
    assert press(far, "x").told == ""
    assert pressed(player(), "g", *"1" * 99).entry == "1" * LONGEST_ENTRY


def test_view_draft_and_theme_go_round() -> None:
    now = player()
    assert [pressed(now, *"v" * n).view for n in range(4)] == ["text", "grid", "both", "text"]
    assert [pressed(now, *"d" * n).draft for n in range(3)] == ["canvas", "argmax", "canvas"]
    assert [pressed(now, *"t" * n).theme for n in range(3)] == ["dark", "light", "dark"]


def test_leaving_closes_first_what_is_open() -> None:
    assert press(player(), "q").left and press(player(), "escape").left
    helped = press(player(), "?")
    assert helped.help and not press(helped, "escape").help and not press(helped, "escape").left
    picking = press(player(), "tab")
    assert picking.picking and not press(picking, "escape").picking and not press(picking, "escape").left
    assert press(picking, "q").left
    assert not press(press(player(), "f"), "q").left


def test_a_picked_position_moves_by_arrows_while_others_keys_still_step() -> None:
    now = pressed(player(step=4), "/")
    assert not now.playing and (now.position, now.step) == (0, 4)
    assert press(now, "left").position == 0
    assert pressed(now, "right", "right").position == 2 and pressed(now, "right").step == 4
    assert pressed(now, *["right"] * 99).position == LENGTH - 1
    assert pressed(now, ".", "right").step == 5
    assert not press(now, "enter").picking and not press(now, "tab").picking
    grid = replace(now, position=6, places=tuple((i // 8, i % 8) for i in range(LENGTH)))
    assert [press(grid, key).position for key in ("up", "down")] == [6, 14]
    assert (
        press(replace(grid, position=14), "up").position == 6
        and press(replace(grid, position=20), "down").position == 20
    )


def test_search_picks_what_it_finds_and_goes_round() -> None:
    word = "e"
    found = Tape(synthetic()).find(word)
    assert len(found) > 2
    now = pressed(player(step=0), "f", *word, "enter")
    assert now.picking and not now.playing and Place(now.step, now.position) == found[0]
    for place in (*found[1:], found[0]):
        now = press(now, "n")
        assert Place(now.step, now.position) == place
    assert now.told == f"1 of {len(found)} found"
    for place in (found[-1], found[-2]):
        now = press(now, "p")
        assert Place(now.step, now.position) == place
    later = pressed(player(step=found[0].step + 1), "f", *word, "enter")
    assert later.step == next(place.step for place in found if place.step > found[0].step)
    none = pressed(player(), "f", "?", "space", "?", "enter")
    assert none.told == "no position ever held “? ?”" and not none.picking
    assert press(player(), "n").told == "f finds a token"


def test_the_help_names_every_key() -> None:
    from dgemma_local.ui.player import _KEYS

    words = {word.rstrip(",:") for line in HELP for word in line.split()}
    said = words | {"left", "right", "up", "down", ",", ".", "="} | {"pageup", "pagedown", " ", "/", "escape"}
    assert set(_KEYS) <= said
    assert {"←", "→", "↑", "↓"} <= words
    helped = press(player(), "?")
    for width in (70, 80, 200):
        assert all(item in "\n".join(text(screen(helped, width, 30).rows)) for item in HELP)


@pytest.mark.parametrize("view", ["text", "grid", "both"])
def test_the_help_is_whole_on_a_small_terminal(view: Any) -> None:
    helped = press(player(view=view), "?")
    said = " ".join(text(screen(helped, 40, 11).rows))
    assert all(word in said for item in HELP for word in item.split())
    lowest = " ".join(text(screen(helped, 40, 3).rows))
    assert all(item in lowest for item in ("space play, pause", "q leave", "? these lines"))


def test_a_past_is_told_once_and_drawn_often(monkeypatch: pytest.MonkeyPatch) -> None:
    from dgemma_local.ui import tape

    told: list[int] = []
    history = tape.history
    monkeypatch.setattr(
        tape, "history", lambda steps, position, ends: told.append(position) or history(steps, position, ends)
    )
    now = pressed(player(step=2), "tab")
    for key in (".", ",", "right", ",", "left", "."):
        screen(now, 100, 24)
        now = press(now, key)
    assert told == [0, 1, 0]
    made = Tape(synthetic())
    assert made.history(1, 3) == history(made.canvases[1], 3, made.ends) != made.history(0, 3)


# What became of a position


def moments_of(position: int, canvas: int = 0) -> Any:
    return Tape(synthetic()).history(canvas, position)


@pytest.mark.parametrize("position", range(LENGTH))
def test_the_past_of_a_position_is_its_events_retold(position: int) -> None:
    made = synthetic()
    moments = moments_of(position)
    found = past.spans(moments)
    assert [i for span in found for i in range(span.first.step, span.last.step + 1)] == list(range(STEPS))
    for span in found:
        covered = moments[span.first.step : span.last.step + 1]
        assert {moment.state for moment in covered} == {span.state}
        assert {moment.draft for moment in covered} == {span.first.draft}
        if span.state in HELD:
            assert {moment.token for moment in covered} == {span.first.token}
    line = past.headline(made, moments, 0, position)
    assert line.startswith(f"canvas 1, position {position + 1}: ")
    fresh = [moment.step + 1 for moment in moments if moment.state is State.FRESH]
    assert [int(step) for step in re.findall(r"frozen (?:again |anew )?at step (\d+)", line)] == fresh
    assert line.count("thawed") == sum(moment.state is State.THAWED for moment in moments)
    assert line.count("replaced") == sum(moment.state is State.REPLACED for moment in moments)


def test_the_past_says_what_was_held_before() -> None:
    made = synthetic(canvases=1, steps=8, length=LENGTH)
    said = {past.headline(made, Tape(made).history(0, i), 0, i) for i in range(LENGTH)}
    assert any(re.search(r"thawed at step \d, frozen again at step", line) for line in said)
    assert any(re.search(r"frozen at step \d as .*, thawed at step \d, frozen anew at step", line) for line in said)
    assert any(re.search(r"frozen at step \d as .*, replaced at step \d by", line) for line in said)
    assert any(re.search(r"committed as .*, never sure", line) for line in said)


def test_a_past_in_words() -> None:
    made = recordings.make(canvases=1, steps=2, length=8, texts=["a", "b", "c"])
    a, b, c = (len(recordings.CONTROLS) + i for i in range(3))
    seen = [
        *((State.NOISE, c, a), (State.FRESH, a, a), (State.FROZEN, a, a), (State.THAWED, c, a), (State.FRESH, a, a)),
        *((State.REPLACED, b, b), (State.REPLACED, c, b), (State.THAWED, a, b), (State.FRESH, a, b)),
        *((State.THAWED, b, b), (State.GUESSED, b, b)),
    ]
    moments = [past_moment(i, *each) for i, each in enumerate(seen)]
    assert past.headline(made, moments, 1, 4) == (
        "canvas 2, position 5: frozen at step 2 as “a”, thawed at step 4, frozen again at step 5 as “a”, "
        "replaced at step 6 by “b”, replaced at step 7 by “c”, thawed at step 8, frozen anew at step 9 as “a”, "
        "thawed at step 10, committed as “b”"
    )
    assert [(span.first.step, span.last.step) for span in past.spans(moments)] == [(i, i) for i in range(11)]
    assert past.lines(made, moments[:1], 0, 0) == (
        "canvas 1, position 1: never frozen",
        "step 1      ~ re-randomised “c”       draft “a”       entropy 0.000",
    )
    still = [past_moment(i, State.FROZEN, a, a) for i in range(3)]
    assert (
        past.lines(made, still, 0, 0)[1]
        == "steps 1-3     frozen        “a”       draft “a”       entropy 0.000 to 0.250"
    )
    noise = [past_moment(i, State.NOISE, token, a) for i, token in enumerate((b, c))]
    assert " noise " in past.lines(made, noise, 0, 0)[1]
    assert past.headline(made, [past_moment(0, State.GUESSED, b, b)], 0, 0).endswith("committed as “b”, never sure")


def past_moment(step: int, state: State, token: int, draft: int) -> Moment:
    return Moment(step, state, token, draft, step / 8)


def test_a_token_reads_as_one_short_line_without_control() -> None:
    made = recordings.make(canvases=1, steps=2, length=8, texts=["a\nb\x1b[2J", "x" * 500, "‮evil"])
    first = len(recordings.CONTROLS)
    shown = [past.reads(made, first + i) for i in range(3)]
    assert shown[0].startswith("“a↵b") and "\x1b" not in shown[0] and "\n" not in shown[0]
    assert len(shown[1]) == past.WIDEST + 2 and shown[1].endswith("…”")
    assert "\u202e" not in shown[2]
    assert past.reads(made, 0) == "<pad>"
    assert past.reads(made, 999_999) == "“�”"


# The screen


@pytest.mark.parametrize("view", ["text", "grid", "both"])
def test_the_frame_is_the_live_views_own(view: Any) -> None:
    now = player(step=6, view=view)
    alone = frame(now.tape.seen(6), sight(now), 70, 14, tail=now.tape.tail(6))
    shot = screen(now, 70, 15)
    assert shot.rows[:-1] == alone.rows
    assert "7 of 15 · canvas 2 of 3 · playing · 1×" in text(shot.rows)[-1]


@pytest.mark.parametrize("width", [1, 7, 20, 40, 80, 200])
@pytest.mark.parametrize("height", [1, 2, 3, 8, 24])
def test_every_screen_fits_whatever_is_open(width: int, height: int) -> None:
    for keys in ([], ["?"], ["tab"], ["g", "1"], ["f", "漢", "x"], ["end"], ["tab", "?"]):
        shot = screen(pressed(player(step=3), *keys), width, height)
        assert len(shot.rows) == height
        assert all(pyte.screens.wcwidth(sign) >= 0 for row in text(shot.rows) for sign in row)
        from rich.cells import cell_len

        assert all(cell_len(row) <= width for row in text(shot.rows))


def test_the_bar_moves_over_the_steps_and_shows_where_canvases_begin() -> None:
    bars = [text(screen(player(step=step), 100, 10).rows)[-1] for step in range(CANVASES * STEPS)]
    heads = [bar.index("●") for bar in bars]
    assert heads == sorted(set(heads)) and heads[0] == 0
    assert bars[0].count("│") == CANVASES - 1 and bars[-1].count("┃") == CANVASES - 1
    assert bars[0].index("│") == heads[STEPS]  # the head stands on it when the canvas begins
    assert "paused · ? lists the keys" in text(screen(player(playing=False), 100, 10).rows)[-1]
    assert text(screen(press(player(), "g"), 100, 10).rows)[-1] == "go to step, 1 to 15: _"
    assert text(screen(pressed(player(), "f", "a", "space"), 100, 10).rows)[-1] == "find a token: a _"


def test_a_picked_position_stands_out_and_its_past_below() -> None:
    now = pressed(player(step=4), "tab", "right", "right")
    shot = screen(now, 100, 24)
    pinned = [part for row in shot.rows[: -PAST_ROWS - 2] for part, ink in row if ink.kind is State.PINNED]
    seen = now.tape.seen(4)
    assert seen.step is not None
    assert "".join(pinned).strip() == now.tape.vocabulary.glyph(seen.step.next[2]).strip()
    below = text(shot.rows)[-PAST_ROWS - 1 : -1]
    assert below[0].startswith("canvas 1, position 3: ")
    marked = [line for line in below if line.startswith("> ")]
    assert len(marked) == 1 and re.match(r"> steps? (\d-)?5 ", marked[0])
    elsewhere = press(now, "home")
    assert re.match(
        r"> steps? 1", next(line for line in text(screen(elsewhere, 100, 24).rows) if line.startswith("> "))
    )
    assert rows_wanted(now) == rows_wanted(player()) + PAST_ROWS


def test_a_long_past_is_a_window_around_the_step() -> None:
    now = Player(tape=Tape(synthetic(canvases=1, steps=40, length=8)), picking=True, position=4)
    for step in range(40):
        below = text(screen(replace(now, step=step), 100, 30).rows)[-PAST_ROWS - 1 : -1]
        assert all(below) and sum(line.startswith("> ") for line in below) == 1


def test_narrow_screens_keep_whole_items_and_the_step_that_is_meant() -> None:
    last = [text(screen(player(step=6), width, 10).rows)[-1] for width in (70, 40, 30, 10)]
    assert last[0].endswith("─ 7 of 15 · canvas 2 of 3 · playing · 1× · ? lists the keys")
    assert last[1:] == ["7 of 15 · canvas 2 of 3 · playing · 1×", "7 of 15 · canvas 2 of 3", "7 of 15"]
    now = Player(tape=Tape(synthetic(canvases=1, steps=40, length=8)), picking=True, position=4)
    for step in range(40):
        shown = text(screen(replace(now, step=step), 30, 9).rows)
        assert [line[0] for line in shown[-3:-1]] == ["c", ">"]  # a headline of one row, and the step
    said = "".join(text(screen(now, 50, 20).rows)[-PAST_ROWS - 1 :][:2])
    whole = past.headline(now.tape.recording, now.tape.history(0, 4), 0, 4)
    assert len(whole) > 50 and whole.startswith(said) and len(said) > 50


def test_places_are_where_positions_are_drawn() -> None:
    now = player(step=STEPS - 1)
    where = places(now, 20)
    assert len(where) == LENGTH and list(where) == sorted(where)
    seen = now.tape.seen(now.step)
    body = text(rows(runs(seen, now.tape.vocabulary, "canvas"), 20))
    assert seen.step is not None and len(body) > 2
    for (row, column), token in zip(where, seen.step.next, strict=True):
        glyph = now.tape.vocabulary.glyph(token)
        assert glyph.startswith(body[row][column : column + len(glyph)])
    grid = places(replace(now, view="grid"), 16)
    assert grid == tuple((i // 8, i % 8) for i in range(LENGTH))


def test_hostile_texts_and_names_reach_no_row() -> None:
    made = recordings.hostile()
    now = Player(tape=Tape(made), picking=True)
    for position in range(now.tape.length):
        shot = screen(replace(now, step=position % len(now.tape), position=position), 60, 20)
        said = [part for row in shot.rows[-PAST_ROWS - 1 :] for part, _ in row]
        told = [
            line for canvas in (0, 1) for line in past.lines(made, now.tape.history(canvas, position), canvas, position)
        ]
        assert all(sign.isprintable() for part in (*said, *told) for sign in part)
    typed = pressed(now, "f", *"\x1b\x9b\u202e[2J")
    assert typed.entry == "[2J"
