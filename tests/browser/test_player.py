"""The exported pages in a real browser: what they show is what Python derives, and nothing in a token is ever markup."""

import time
from collections.abc import Callable

import pytest
import recordings
from browser_page import Page
from selenium.webdriver.common.keys import Keys as KEYS

from dgemma_local.recording import Recording
from dgemma_local.states import Seen, State, follow, shown, summary
from dgemma_local.ui.export import Options, moments, svg
from dgemma_local.ui.palette import MARKS, shade

pytestmark = pytest.mark.browser

CANVASES, STEPS, LENGTH = 3, 8, 64
LAST = CANVASES * STEPS - 1


@pytest.fixture(scope="module")
def run() -> Recording:
    return recordings.make(canvases=CANVASES, steps=STEPS, length=LENGTH)


@pytest.fixture(scope="module")
def seens(run: Recording) -> list[Seen]:
    return moments(run, Options())


def wait(true: Callable[[], object], seconds: float = 10.0) -> None:
    """Until it is so; a page that never comes to it fails."""
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends, "it never came to it"
        time.sleep(0.02)


def at(page: Page) -> int:
    return int(page.js("return scrub.value"))


def test_it_opens_without_a_word_on_the_console_and_without_a_request(page: Page, run: Recording) -> None:
    page.open(run)
    assert page.text("text").strip()
    assert page.console() == []
    assert [address for address in page.requests() if not address.startswith("data:")] == [page.driver.current_url]
    assert page.js("return performance.getEntriesByType('resource').length") == 0


def test_what_is_not_the_page_s_own_does_not_run(page: Page, run: Recording) -> None:
    page.open(run)
    refused = page.js(
        "const s = document.createElement('script'); s.textContent = 'window.added = 1'; document.body.append(s);"
        "const i = new Image(); i.src = 'http://127.0.0.1:9/x.png'; document.body.append(i); return window.added ?? null"
    )
    assert refused is None
    wait(lambda: len([line for line in page.console() if "Content Security Policy" in line["message"]]) >= 1)


@pytest.mark.parametrize("draft", ["canvas", "argmax"])
def test_every_position_is_as_python_derives_it(page: Page, run: Recording, seens: list[Seen], draft: str) -> None:
    page.open(run, draft=draft, view="both")
    words = page.js("return JSON.parse(recording.textContent).words")
    for number in (0, 1, STEPS - 1, STEPS, STEPS + 3, LAST - 2, LAST):
        page.scrub(number)
        seen = seens[number]
        assert seen.step is not None
        names = [state.name.lower() for state in seen.states]
        shades = [str(shade(entropy)) for entropy in seen.step.entropy]
        for side in ("text", "grid"):
            assert page.places(side, "state") == names
            assert page.places(side, "shade") == shades
        tokens = [run.word(token) for token in shown(seen.step, draft)]
        drawn = page.js("return [...text.children].map((each) => (each.querySelector('.drawn') ?? each).textContent)")
        for token, word in zip(tokens, drawn, strict=True):
            assert word == token.text if not token.control else word in "·■"
        assert set(drawn) <= set(words)
        rooms = page.js("return [...text.children].map((each) => each.querySelector('.room')?.textContent ?? null)")
        for room, state, guess in zip(rooms, seen.states, seen.step.draft, strict=True):
            assert (room is not None) == (state in (State.NOISE, State.THAWED, State.PAST))
            assert room is None or run.word(guess).control or room == run.word(guess).text
        marks = page.js("return [...grid.children].map((each) => each.textContent)")
        assert marks == [MARKS[state] for state in seen.states]
        facts = page.text("facts")
        assert f"accepted{seen.accepted[-1]} of {LENGTH}" in facts
        assert f"thaws{seen.thaws}replacements{seen.replacements}corrections{seen.corrections}" in facts
        assert f"step{seen.step.step + 1} of {seen.step.steps}" in facts
        assert f"canvas{seen.canvas + 1} of {CANVASES}" in facts


def test_noise_moves_nothing_that_is_settled(page: Page, run: Recording) -> None:
    page.open(run)
    boxes = """return [...text.children].filter((each) => each.dataset.state === 'frozen').map((each) => {
        const {x, y, width} = each.getBoundingClientRect(); return [x, y, width].map(Math.round) })"""
    for number in (2, 3, 4):
        page.scrub(number)
        noise = page.js(boxes)
        page.press("d")
        assert page.js(boxes) == noise != []
        page.press("d")


def test_newlines_break_the_line_where_they_are_settled(page: Page) -> None:
    lines = recordings.make(canvases=1, steps=6, length=96, texts=["\n"] * 8 + [" a", "b"])
    page.open(lines)
    seens = moments(lines, Options())
    found = set()
    for number, seen in enumerate(seens):
        page.scrub(number)
        assert seen.step is not None
        drawn = page.js("return [...text.children].map((each) => (each.querySelector('.drawn') ?? each).textContent)")
        for state, token, word in zip(seen.states, seen.step.next, drawn, strict=True):
            if lines.word(token).text == "\n":
                found.add(state)
                assert word == ("↵" if state in (State.NOISE, State.THAWED, State.PAST) else "↵\n"), state
    assert {State.FRESH, State.FROZEN, State.NOISE, State.GUESSED} <= found


def test_the_whole_run_is_summed_up_and_earlier_canvases_stand_above(page: Page, run: Recording) -> None:
    page.open(run)
    *_, last = follow(zip(run.events, run.seconds, strict=True), frozenset(run.header.ends))
    assert summary(last) in page.text("summary")
    assert page.text("earlier") == ""
    page.open(run, canvas=CANVASES)
    before = [piece.text for pieces in run.pieces for piece in pieces][: CANVASES - 1]
    assert page.text("earlier") == "".join(before) != ""


def test_the_keyboard_alone_is_enough(page: Page, run: Recording) -> None:
    page.open(run)
    page.press(KEYS.ARROW_RIGHT, KEYS.ARROW_RIGHT, ".")
    assert at(page) == 3
    page.press(KEYS.ARROW_LEFT, ",")
    assert at(page) == 1
    page.press("]")
    assert at(page) == STEPS
    page.press(KEYS.ARROW_RIGHT, "[")
    assert at(page) == STEPS
    page.press("[", KEYS.END)
    assert at(page) == LAST
    page.press(KEYS.HOME)
    assert at(page) == 0
    assert page.text("status") == f"Canvas 1, step 1 of 48, {accepted(page)} of {LENGTH} accepted"
    page.press("v")
    assert page.js("return [getComputedStyle(text).display, getComputedStyle(grid).display]") == ["none", "grid"]
    page.press("v", "v", "d")
    assert page.js("return [document.body.dataset.view, draft.value]") == ["text", "argmax"]
    page.press("+", "+", "-")
    assert page.js("return speed.value") == "2"
    page.press(KEYS.SPACE)
    wait(lambda: at(page) >= 2)
    page.press(KEYS.SPACE)
    assert page.text("play") == "Play"
    page.press("?")
    assert page.js("return help.open")
    page.press(KEYS.ESCAPE)
    assert not page.js("return help.open")


def accepted(page: Page) -> int:
    return int(page.js("return JSON.parse(recording.textContent).steps[scrub.value].accepted"))


def test_tab_reaches_the_tokens_and_arrows_move_between_them(page: Page, run: Recording) -> None:
    page.open(run, step=4)
    for _ in range(20):
        page.press(KEYS.TAB)
        if page.js("return document.activeElement.className.includes('token')"):
            break
    here = "return Number(document.activeElement.dataset.place)"
    assert page.js(here) == 0
    assert page.js("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.press(KEYS.ARROW_RIGHT, KEYS.ARROW_RIGHT, KEYS.ARROW_LEFT)
    assert page.js(here) == 1
    assert page.text("position") == "Position 2"
    page.press(KEYS.END)
    assert page.js(here) == LENGTH - 1
    page.press(KEYS.HOME, KEYS.ARROW_DOWN)
    below = page.js(here)
    assert page.js(
        "return document.activeElement.getBoundingClientRect().top > text.children[0].getBoundingClientRect().top"
    )
    page.press(KEYS.ARROW_UP)
    assert page.js(here) == 0 < below
    page.press(KEYS.ENTER, KEYS.TAB)
    assert page.text("position") == "Position 1"
    assert not page.js("return document.getElementById('history').hidden")  # kept open
    page.press(KEYS.ESCAPE)
    assert page.js("return document.getElementById('history').hidden")
    page.js("text.children[5].click(); document.activeElement.blur()")
    assert page.text("position") == "Position 6"
    page.scrub(STEPS)  # a position of another canvas is another one
    assert page.js("return document.getElementById('history').hidden")
    assert page.js("return document.querySelectorAll('[aria-selected=true]').length") == 0


def test_tab_never_loses_the_focus(page: Page, run: Recording) -> None:
    page.open(run)
    page.js("document.querySelector('#text .token').focus()")
    assert tabbed(page, 2) == ["panel", "scrub"]
    page.js("document.querySelector('#text .token').focus()")
    page.press(KEYS.ENTER)
    assert tabbed(page, 2) == ["panel", "let-go"]
    page.press(KEYS.ENTER)
    assert page.js("return document.activeElement.dataset.place") == "0"
    assert tabbed(page, 2) == ["panel", "scrub"]  # nothing is held, so nothing is let go


def tabbed(page: Page, times: int) -> list[str]:
    """What has the focus after each."""
    found = []
    for _ in range(times):
        page.press(KEYS.TAB)
        found.append(page.js("return document.activeElement.id"))
    return found


def test_a_long_name_leaves_the_screen_to_the_canvas(page: Page) -> None:
    page.emulate(size=(390, 844))
    page.open(recordings.make(canvases=1, steps=2, length=16, model="very long name " * 200))
    assert page.js("return document.querySelector('body > header').offsetHeight") < 844 / 4


def test_every_control_has_a_name(page: Page, run: Recording) -> None:
    page.open(run)
    nodes = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    named = {}
    for node in nodes:
        role = node.get("role", {}).get("value")
        if not node.get("ignored") and role in ("button", "slider", "combobox", "listbox", "option", "image", "dialog"):
            named.setdefault(role, []).append(node.get("name", {}).get("value", ""))
    assert {"button", "slider", "combobox", "listbox", "option", "image"} <= set(named)
    assert all(name.strip() for name in named.pop("option"))  # of a list of speeds, too
    assert all(any(map(str.isalpha, name)) for names in named.values() for name in names), named  # not ‹ alone
    assert page.js("return scrub.getAttribute('aria-valuetext')").startswith("Canvas 1, step 1 of 48")


def test_a_token_under_the_pointer_tells_its_history(page: Page, run: Recording, seens: list[Seen]) -> None:
    page.open(run, step=STEPS, canvas=1)
    first = seens[:STEPS]
    position = next(i for i, held in enumerate(first[-1].held) if len(held) == 2)
    point(page, position)
    wait(lambda: page.text("position") == f"Position {position + 1}")
    rows = page.js(
        "return [...moments.children].map((row) => [...row.children].map((each) => each.textContent.trim()))"
    )
    assert len(rows) == STEPS
    for row, seen in zip(rows, first, strict=True):
        assert seen.step is not None
        state = seen.states[position]
        assert row[0] == str(seen.step.step + 1)
        assert row[1].endswith(state.value) and row[1].startswith(MARKS[state].strip())
        assert row[2].replace("␣", " ") == run.word(seen.step.next[position]).text
        assert row[3].replace("␣", " ") == run.word(seen.step.draft[position]).text
        assert row[4] == f"{seen.step.entropy[position]:.3f}"
    held = page.js("return [...document.querySelectorAll('#held .word')].map((each) => each.textContent)")
    assert [each.replace("␣", " ") for each in held] == [run.word(token).text for token in first[-1].held[position]]
    told = page.js("return [...changes.children].map((each) => each.textContent.replaceAll('␣', ' '))")
    expected = []
    for seen in first:
        assert seen.step is not None
        if seen.states[position].name in ("FRESH", "THAWED", "REPLACED", "GUESSED"):
            read, left = (run.word(tokens[position]).text for tokens in (seen.step.fed, seen.step.next))
            expected.append(f"{seen.states[position].value} at step {seen.step.step + 1}: {read} → {left}")
    assert told == expected
    assert page.js("return plot.querySelector('.own').getAttribute('d').length") > 0


def point(page: Page, position: int) -> None:
    box = page.js(
        "const b = text.children[arguments[0]].getClientRects()[0]; return [b.x + b.width / 2, b.y + b.height / 2]",
        position,
    )
    event = {"type": "mouseMoved", "x": box[0], "y": box[1]}
    page.driver.execute_cdp_cmd("Input.dispatchMouseEvent", event)


def test_the_curves_are_drawn_and_a_click_on_them_scrubs(page: Page, run: Recording) -> None:
    page.open(run)
    curves = page.js("return [...plot.querySelectorAll('.entropy, .accepted')].map((each) => each.getAttribute('d'))")
    assert len(curves) == 2 * CANVASES
    entropies = [curve for curve in curves if not curve.endswith("Z")]
    assert [curve.count("L") for curve in entropies] == [STEPS - 1] * CANVASES
    box = page.js("const b = plot.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]")
    for kind in ("mousePressed", "mouseReleased"):
        where = {"x": box[0] + box[2] * 0.5, "y": box[1] + box[3] / 2, "button": "left", "buttons": 1, "clickCount": 1}
        page.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": kind, **where})
    assert abs(at(page) - LAST / 2) <= 1
    page.scrub(LAST)
    assert float(page.js("return plot.querySelector('circle').getAttribute('cx')")) == pytest.approx(box[2] - 8)


def test_hostile_text_is_shown_and_never_obeyed(page: Page) -> None:
    hostile = recordings.hostile()
    hostile.notice = "<img src=x onerror='window.__pwned = 1'>"
    page.open(hostile, view="both")
    own = page.js("return document.querySelectorAll('*').length")
    for number in range(len(moments(hostile, Options()))):
        page.scrub(number)
    page.js("text.children[22].click()")
    assert page.text("notice") == hostile.notice
    assert "<script>alert(1)</script>" in page.text("text")
    assert "&lt;" in page.text("text")
    assert (
        page.js("return document.querySelectorAll('img, foreignObject, iframe, [onload], [onclick], [onerror]').length")
        == 0
    )
    assert page.js("return document.scripts.length") == 2  # the data, and the player
    assert page.js("return window.__pwned ?? null") is None
    assert own > 100
    assert page.console() == []  # an alert would have stopped every call above
    assert len(page.requests()) <= 2
    drawn = page.js("return document.body.innerText")
    for sign in "\x1b\x00\x9b\u202e\u2066\u200b\u200f\u061c":
        assert sign not in drawn


def test_the_notice_of_a_damaged_recording_is_shown(page: Page, run: Recording) -> None:
    page.open(run)
    assert not page.driver.find_element("id", "notice").is_displayed()
    damaged = recordings.make(canvases=1, steps=4, length=16)
    damaged.events, damaged.seconds, damaged.pieces = damaged.events[:3], damaged.seconds[:3], damaged.pieces[:3]
    damaged.notice = "run.jsonl, line 4: it is not JSON, or cut in the middle; shown up to there"
    page.open(damaged)
    assert page.driver.find_element("id", "notice").is_displayed()
    assert page.text("notice") == damaged.notice
    assert page.js("return scrub.max") == "1"


def test_it_plays_by_itself_unless_motion_is_unwelcome(page: Page, run: Recording) -> None:
    page.open(run, seconds=0.05)
    assert page.text("play") == "Play"
    time.sleep(0.3)  # six steps' worth
    assert at(page) == 0
    page.emulate(motion="no-preference")
    page.open(run, seconds=0.05)
    wait(lambda: at(page) == LAST)
    wait(lambda: page.text("play") == "Play")
    page.press(KEYS.SPACE)  # once more, from the beginning
    wait(lambda: 0 < at(page) < LAST)
    page.open(run, seconds=0.05, step=2)
    assert (at(page), page.text("play")) == (1, "Play")


def test_dark_and_light_are_the_reader_s_and_can_be_changed(page: Page, run: Recording) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    page.open(run)
    dark = page.js(ground)
    page.emulate(scheme="light")
    wait(lambda: page.js(ground) != dark)
    light = page.js(ground)
    page.open(run)
    assert page.js(ground) == light
    page.press("t")
    assert page.js(ground) == dark


@pytest.mark.parametrize("width", [360, 1400])
@pytest.mark.parametrize("view", ["text", "grid", "both"])
def test_nothing_is_wider_than_the_screen(page: Page, width: int, view: str) -> None:
    page.emulate(size=(width, 740))
    page.open(recordings.hostile(), view=view, step=5)
    page.js("text.children[3].click()")
    assert page.js("return document.documentElement.scrollWidth") <= width
    for name in ("play", "scrub", "plot", "panel"):
        box = page.js(
            "const b = document.getElementById(arguments[0]).getBoundingClientRect(); return [b.left, b.right, b.bottom]",
            name,
        )
        assert 0 <= box[0] < box[1] <= width and box[2] <= 740, name


def test_an_animated_picture_plays(page: Page, run: Recording) -> None:
    page.emulate(motion="no-preference")
    page.open_text(svg.render(run, Options(seconds=0.2)), "run.svg")
    first = page.driver.get_screenshot_as_png()
    wait(lambda: page.driver.get_screenshot_as_png() != first)
    assert page.console() == []
    assert [address for address in page.requests() if not address.startswith("data:")] == [page.driver.current_url]
