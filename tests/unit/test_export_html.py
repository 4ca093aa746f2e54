"""The page as text: complete in itself, as its policy says, small, and with every step as it was recorded."""

import json
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from itertools import pairwise

import pytest
import recordings

from dgemma_local.errors import RecordingError
from dgemma_local.recording import Recording
from dgemma_local.states import State, shown, summary
from dgemma_local.ui.export import Options, moments
from dgemma_local.ui.export.html import _ESCAPES, data, render
from dgemma_local.ui.palette import SHADES, Chrome, Ink, look, shade
from dgemma_local.ui.status import SHORTEST_WINDOW


@pytest.fixture(scope="module")
def run() -> Recording:
    return recordings.make(canvases=3, steps=6, length=32)


class Elements(HTMLParser):
    """The elements of a page, in order, and the text of its scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.bodies: list[str] = []
        self.policy = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(name for name, _value in attrs)))
        values = dict(attrs)
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"] or ""

    def handle_data(self, text: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style") and text.strip():
            self.bodies.append(text)


def test_a_run_of_three_canvases_is_small() -> None:
    page = render(recordings.make(canvases=3, steps=16, length=256, vocabulary=262_144), Options())
    assert len(page.encode()) <= 300_000


def test_the_policy_allows_the_page_s_own_script_and_style_alone(run: Recording) -> None:
    page = Elements(render(run, Options()))
    style, _data, script = page.bodies
    hashes = [b64encode(sha256(text.encode()).digest()).decode() for text in (script, style)]
    assert page.policy.split("; ") == [
        "default-src 'none'",
        f"script-src 'sha256-{hashes[0]}'",
        f"style-src 'sha256-{hashes[1]}'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]


def test_nothing_is_asked_for_and_nothing_is_read_as_markup(run: Recording) -> None:
    page = Elements(render(run, Options()))
    style, _data, script = page.bodies
    assert not re.search(r"url\(|@import|@font-face|expression", style)
    assert re.findall(r"\w+://[^\"]+", script) == ["http://www.w3.org/2000/svg"]  # a name, not an address
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|Function\(|fetch|XMLHttp|import|srcdoc|DOMParser"
    )
    assert not re.search(forbidden, script)
    assert script.startswith('"use strict";')
    names = {name for _tag, attributes in page.tags for name in attributes}
    assert not names & {"src", "style", "srcset", "action", "onclick", "onload", "onerror"}


def test_every_step_can_be_read_back(run: Recording) -> None:
    made = json.loads(json.dumps(data(run, Options())))
    seens = moments(run, Options())
    assert len(made["steps"]) == len(seens) == 18
    before: dict[str, list[int]] = {}
    for step, seen in zip(made["steps"], seens, strict=True):
        assert seen.step is not None
        if step["step"] == 1:
            before = {}
        lists = {name: unpack(step[name], before.get(name)) for name in ("canvas", "guess", "entropy")}
        lists["argmax"] = unpack(step["argmax"], lists["guess"])
        texts = {name: [made["words"][place] for place in lists[name]] for name in ("canvas", "guess", "argmax")}
        assert texts["canvas"] == [drawn(run, token) for token in seen.step.next]
        assert texts["guess"] == [drawn(run, token) for token in seen.step.draft]
        assert texts["argmax"] == [drawn(run, token) for token in shown(seen.step, "argmax")]
        assert lists["entropy"] == [round(1000 * each) for each in seen.step.entropy]
        assert [made["states"][letter]["name"] for letter in step["states"]] == [state.value for state in seen.states]
        assert [int(each) for each in step["shades"]] == [shade(each) for each in seen.step.entropy]
        rate = None if seen.seconds < SHORTEST_WINDOW else round(seen.settled / seen.seconds, 1)
        assert (step["rate"], step["time"], step["mean"]) == (rate, round(seen.seconds, 3), round(seen.means[-1], 3))
        assert step["of"] == seen.canvas and step["done"] == seen.step.done
        assert [step[name] for name in ("accepted", "thaws", "replacements", "corrections", "saved")] == [
            seen.accepted[-1],
            seen.thaws,
            seen.replacements,
            seen.corrections,
            seen.saved,
        ]
        before = lists


def unpack(text: str, before: list[int] | None) -> list[int]:
    if text == "":
        assert before is not None
        return before
    return [int(each, 36) if each else (before or [])[i] for i, each in enumerate(text.split(","))]


def drawn(run: Recording, token: int) -> str:
    if token in run.header.ends:
        return "■"
    return "·" if run.word(token).control else run.word(token).text


def test_what_the_positions_held_and_what_was_before_each_canvas(run: Recording) -> None:
    made = data(run, Options())
    words, canvases = made["words"], made["canvases"]
    assert isinstance(words, list) and isinstance(canvases, list) and isinstance(made["committed"], list)
    ends = [
        now
        for now, then in pairwise([*moments(run, Options()), None])
        if now and (not then or then.canvas != now.canvas)
    ]
    committed = [[piece.kind, piece.text] for pieces in run.pieces for piece in pieces]
    for number, (canvas, seen) in enumerate(zip(canvases, ends, strict=True)):
        held = [tuple(words[int(one, 36)] for one in each.split("+") if one) for each in canvas["held"].split(",")]
        assert held == [tuple(drawn(run, token) for token in tokens) for tokens in seen.held]
        assert made["committed"][number] == committed[number : number + 1]
        first = run.canvases[number][0]
        assert [words[place] for place in unpack(canvas["fed"], None)] == [drawn(run, token) for token in first.fed]


def test_control_tokens_have_their_names(run: Recording) -> None:
    made = data(run, Options())
    assert isinstance(made["names"], dict) and isinstance(made["words"], list)
    assert "<eos>" in made["names"].values()
    assert {made["words"][place] for place in made["names"]} <= {"·", "■"}


def test_one_canvas_alone_and_where_the_page_opens(run: Recording) -> None:
    made = data(run, Options(canvas=2, step=4))
    assert [step["step"] for step in made["steps"]] == [1, 2, 3, 4, 5, 6]  # type: ignore[attr-defined]
    assert [canvas["number"] for canvas in made["canvases"]] == [2]  # type: ignore[attr-defined]
    assert (made["start"], made["moves"], made["total"]) == (3, False, 3)
    whole = data(run, Options())
    assert (whole["start"], whole["moves"]) == (0, True)
    assert whole["summary"] == made["summary"] == summary(last(run))


def last(run: Recording) -> object:
    from dgemma_local.states import follow

    *_, seen = follow(zip(run.events, run.seconds, strict=True), frozenset(run.header.ends))
    return seen


def test_a_step_that_is_not_there_is_an_error(run: Recording) -> None:
    with pytest.raises(RecordingError, match="no step 7"):
        render(run, Options(step=7))
    with pytest.raises(RecordingError, match="no canvas 4"):
        render(run, Options(canvas=4))


def test_hostile_text_adds_no_element_and_ends_no_script(run: Recording) -> None:
    hostile = recordings.hostile(lone=True)
    hostile.notice = "</script><script>alert(1)</script>\ud800"
    page = render(hostile, Options())
    page.encode()  # no lone surrogate
    assert Elements(page).tags == Elements(render(run, Options())).tags
    text = Elements(page).bodies[1]
    assert not re.search("[<>&\u2028\u2029]", text)
    values = json.loads(text)
    assert "<script>alert(1)</script>" in values["words"]
    everything = "".join(
        [values["model"], values["about"], values["notice"], *values["words"], *values["names"].values()]
        + [piece for pieces in values["committed"] for _kind, piece in pieces]
    )
    assert all(sign == "\n" or sign.isprintable() for sign in everything)


def test_what_could_end_a_script_is_written_as_json_has_it() -> None:
    signs = "<>&\u2028\u2029"
    escaped = json.dumps(signs, ensure_ascii=False).translate(_ESCAPES)
    assert not set(escaped) & set(signs)
    assert json.loads(escaped) == signs


def test_text_that_looks_like_a_place_of_the_page_stays_text() -> None:
    texts = ["{script}", "{data}", "{style}", "{policy}", "ok"]
    page = render(recordings.make(canvases=1, steps=4, length=16, texts=texts), Options())
    assert set(texts) <= set(json.loads(Elements(page).bodies[1])["words"])


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_the_looks_are_the_palette_s(run: Recording, theme: str) -> None:
    style = Elements(render(run, Options())).bodies[0]
    rules = dict(re.findall(rf'\[data-theme="{theme}"\] (\S+) {{ (.*?) }}', style))
    for state in State:
        drawn = look(Ink(state), theme)
        rule = rules[f'[data-state="{state.name.lower()}"]']
        colour = "#{:02x}{:02x}{:02x}".format(*drawn.colour)
        assert f"{'background' if drawn.reverse else 'color'}: {colour};" in rule
        assert ("font-weight: bold" in rule) == drawn.bold
        assert ("text-decoration: underline" in rule) == drawn.underline
    for each in range(SHADES):
        colour = "#{:02x}{:02x}{:02x}".format(*look(Ink(Chrome.HEAT, each), theme).colour)
        assert f"background: {colour};" in rules[f'.cell[data-shade="{each}"]']
    assert len(set(rules.values())) > SHADES + 6


def test_the_same_recording_gives_the_same_page(run: Recording) -> None:
    assert render(run, Options()) == render(run, Options())
