"""A recording as SVG: each frame is that of its step, and no token makes an element."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from itertools import accumulate

import pytest
import recordings
from exported import LONG, SHORT, SVG, plain
from rich.cells import cell_len

from dgemma_local.recording import Recording
from dgemma_local.states import State
from dgemma_local.ui import export as exports
from dgemma_local.ui.export import Options, drawn, durations, svg
from dgemma_local.ui.palette import Ink, Theme, look

LETTERS = recordings.make(
    canvases=1, steps=3, length=24, texts=["漢字", "\U0001f600", "e\u0301", "a\U00020000b", "x ", "7"]
)


def classes(root: ET.Element, css: str) -> dict[str, tuple[float, float]]:
    """When the groups of each class are visible: from, and to, in seconds."""
    cycle = float(re.search(r"animation:([\d.]+)s step-end infinite", css)[1])  # type: ignore[index]
    names = dict(re.findall(r"\.(k\d+)\{animation-name:(k\d+)\}", css))
    shares = {
        name: float(share) for name, share in re.findall(r"@keyframes (k\d+)\{0%\{visibility:visible\}([\d.]+)%", css)
    }
    delays = {name: float(delay) for name, delay in re.findall(r"\.(d\d+)\{animation-delay:(-?[\d.]+)s\}", css)}
    found = {}
    for element in root.iter():
        kinds = element.get("class", "").split()
        if "m" in kinds:
            _, kind, delay = kinds
            start = cycle + delays[delay]
            found[" ".join(kinds)] = (start, start + cycle * shares[names[kind]] / 100)
    return found


def letters(element: ET.Element) -> Iterable[tuple[int, int, str]]:
    """y, x and letter of every text below."""
    for text in element.iter(f"{SVG}text"):
        places = [int(x) for x in text.get("x", "").split()]
        parts = [text.text or ""] if len(places) == 1 else list(text.text or "")
        yield from ((int(text.get("y", "")), *pair) for pair in zip(places, parts, strict=True))


def screen(marks: Iterable[tuple[int, int, str]]) -> list[str]:
    """Letters as lines of text."""
    table: dict[int, dict[int, str]] = {}
    for y, x, letter in marks:
        at = (x - svg.MARGIN) // svg.COLUMN
        assert at not in table.setdefault((y - svg.MARGIN) // svg.LINE, {}), "two letters in one place"
        table[(y - svg.MARGIN) // svg.LINE][at] = letter
    lines = []
    for y in range(max(table) + 1):
        line = ""
        for x, letter in sorted(table.get(y, {}).items()):
            line += " " * (x - cell_len(line)) + letter
        lines.append(line.rstrip())
    return lines


def visible(root: ET.Element, css: str, second: float) -> Iterable[tuple[int, int, str]]:
    spans = classes(root, css)
    for group in root.iter(f"{SVG}g"):
        if group.find(f"{SVG}text") is not None:
            start, end = spans.get(group.get("class", ""), (0, 1e9))
            if start - 0.02 <= second < end - 0.02:
                yield from letters(group)


@pytest.mark.parametrize(
    ("recording", "options"),
    [
        (SHORT, Options()),
        (SHORT, Options(theme="light", view="both", width=100)),
        (SHORT, Options(width=44)),
        (LETTERS, Options(draft="argmax")),
    ],
)
def test_each_frame_of_an_svg_is_the_frame_of_its_step(recording: Recording, options: Options) -> None:
    root = ET.fromstring(svg.render(recording, options))
    css = root.findtext(f"{SVG}style") or ""
    shots = drawn(recording, options, options.width or svg.WIDTH, svg.MOST_ROWS)
    waits = durations([seen for seen, _rows in shots], options.seconds)
    for start, wait, (_seen, rows) in zip([0.0, *accumulate(waits)], waits, shots, strict=False):
        for second in (start, start + wait / 2, start + wait - 0.05):
            assert screen(visible(root, css, second)) == plain(rows)


def test_a_letter_of_more_than_one_unit_has_an_element_of_its_own() -> None:
    """Renderers do not agree on how many of the x it takes."""
    texts = [text.text or "" for text in ET.fromstring(svg.render(LETTERS, Options())).iter(f"{SVG}text")]
    assert {"\U0001f600", "e\u0301", "\U00020000"} <= set(texts)
    assert not any(
        len(text.encode("utf-16-le")) > 2 and re.search("[\u0301\U00020000\U0001f600].", text) for text in texts
    )
    assert any(len(text) > 1 for text in texts)


def test_where_nothing_moves_the_last_frame_stands() -> None:
    root = ET.fromstring(svg.render(SHORT, Options()))
    hidden = {
        id(each) for group in root.iter(f"{SVG}g") if group.get("visibility") == "hidden" for each in group.iter()
    }
    marks = [mark for group in root.iter(f"{SVG}g") if id(group) not in hidden for mark in letters(group)]
    rows = drawn(SHORT, Options(), svg.WIDTH, svg.MOST_ROWS)[-1][1]
    assert screen(marks) == plain(rows)
    css = root.findtext(f"{SVG}style") or ""
    before, motion = css.split("@media (prefers-reduced-motion:no-preference){")
    assert "animation" not in before
    assert "animation-name" in motion
    assert hidden


def test_an_svg_looks_as_the_palette_says() -> None:
    themes: tuple[Theme, ...] = ("dark", "light")
    for theme in themes:
        root = ET.fromstring(svg.render(SHORT, Options(theme=theme)))
        css = root.findtext(f"{SVG}style") or ""
        rules = dict(re.findall(r"text\.(i\d+)\{(.*?)\}", css))
        grounds = dict(re.findall(r"path\.(i\d+)\{(.*?)\}", css))
        shots = drawn(SHORT, Options(theme=theme), svg.WIDTH, svg.MOST_ROWS)
        kinds = {ink.kind for _seen, rows in shots for row in rows for _text, ink in row}
        assert {State.FROZEN, State.FRESH, State.THAWED, State.REPLACED, State.NOISE} <= kinds
        for state in (State.FROZEN, State.FRESH, State.THAWED, State.REPLACED):
            style = look(Ink(state), theme)
            colour = "#{:02x}{:02x}{:02x}".format(*style.colour)
            if style.reverse:
                assert f"fill:{colour}" in grounds.values()
            else:
                assert any(
                    f"fill:{colour}" in rule
                    and ("font-weight:bold" in rule) == style.bold
                    and ("underline" in rule) == style.underline
                    for rule in rules.values()
                )


def test_a_single_step_does_not_move() -> None:
    text = svg.render(SHORT, Options(canvas=1, step=2))
    assert "animation" not in text
    assert "step 2 of" in "\n".join(screen(letters(ET.fromstring(text))))


def test_of_many_steps_some_are_shown_and_the_file_says_so() -> None:
    every, shown = len(LONG.canvases) * 40, svg.MOST_FRAMES
    assert every > shown
    text = svg.render(LONG, Options())
    root = ET.fromstring(text)
    assert f"{shown} of {every} denoising steps" in (root.findtext(f"{SVG}desc") or "")
    assert "all 8 denoising steps" in (ET.fromstring(svg.render(SHORT, Options())).findtext(f"{SVG}desc") or "")
    css = root.findtext(f"{SVG}style") or ""
    shots = drawn(LONG, Options(), svg.WIDTH, svg.MOST_ROWS, svg.MOST_FRAMES)
    assert len(shots) == shown
    assert screen(visible(root, css, 0)) == plain(shots[0][1])
    end = float(re.search(r"animation:([\d.]+)s", css)[1]) - 0.1  # type: ignore[index]
    assert screen(visible(root, css, end)) == plain(shots[-1][1])


def test_sampling_keeps_both_ends_and_the_order() -> None:
    for count in (1, 2, 3, 9, 100):
        items = list(range(count))
        for most in (2, 3, 8):
            found = exports.sampled(items, most)
            assert found == sorted(set(found))
            assert (found[0], found[-1]) == (0, count - 1)
            assert len(found) == min(count, most)


def test_an_svg_shares_what_stays() -> None:
    """A letter that stands in every frame is in the file once."""
    still = svg.render(SHORT, Options(canvas=1, step=4))
    moving = svg.render(SHORT, Options(canvas=1))
    assert "replaced" in "\n".join(screen(letters(ET.fromstring(still))))
    assert len(list(letters(ET.fromstring(moving)))) < 0.7 * 4 * len(list(letters(ET.fromstring(still))))


ALLOWED = {
    "svg": {"viewBox", "width", "height", "role", "aria-labelledby"},
    "title": {"id"},
    "desc": {"id"},
    "style": set(),
    "rect": {"x", "y", "width", "height", "rx", "fill", "stroke"},
    "g": {"class", "visibility", "stroke", "stroke-width", "opacity"},
    "path": {"class", "d"},
    "text": {"class", "x", "y"},
}


@pytest.mark.parametrize("options", [Options(), Options(draft="argmax", view="both", theme="light", width=30)])
def test_no_token_makes_an_element_or_an_attribute(options: Options) -> None:
    text = svg.render(recordings.hostile(lone=True), options)
    text.encode()
    root = ET.fromstring(text)
    for element in root.iter():
        name = element.tag.removeprefix(SVG)
        assert set(element.attrib) <= ALLOWED[name], name
        assert name != "text" or len(element) == 0
    css = root.findtext(f"{SVG}style") or ""
    for rule in re.split(r"\}\s*", css):
        assert re.fullmatch(r"[-@\w.%:,;{()#' ]*", rule.replace("\n", "")), rule
    assert not re.search(r"url\(|@import|http", css)
    assert text.count("<text") == len(list(root.iter(f"{SVG}text")))
    assert "<!" not in text
    assert "<?" not in text


def test_what_xml_cannot_hold_becomes_a_mark() -> None:
    for code in [*range(0x20), 0x7F, *range(0x80, 0xA0), 0xD800, 0xDFFF, 0xFFFE, 0xFFFF]:
        found = svg.xml(f"a{chr(code)}b")
        assert ET.fromstring(f"<a>{found}</a>").text == found
        assert (chr(code) in found) == (code in (9, 10))
    for sign in ("é", "漢", "\U0001f600", "\ue000", "\ufffd"):
        assert svg.xml(sign) == sign
    assert ET.fromstring(f'<a b="{svg.xml(chr(34) + "<&" + chr(39))}"/>').get("b") == "\"<&'"
