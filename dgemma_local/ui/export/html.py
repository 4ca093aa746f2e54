"""One page with a player, complete in itself: it asks for nothing from anywhere, and a recording's text is never markup.

The page is `player/player.html`, `.css` and `.js`; what the palette and the recording say is put in here. Everything that
has to be derived is derived here: the script only looks up.
"""

import json
import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from dgemma_local.events import CanvasCommitted, StepDone
from dgemma_local.recording import Recording
from dgemma_local.states import HELD, Seen, State, follow, shown, summary
from dgemma_local.ui.canvas import CONTROL, END, HIDDEN, NEWLINE, Vocabulary, shortened, signs
from dgemma_local.ui.export import Options, moments, sight
from dgemma_local.ui.palette import GROUND, MARKS, SHADES, Chrome, Colour, Ink, Look, Theme, look, shade
from dgemma_local.ui.status import SHORTEST_WINDOW

_PLAYER = Path(__file__).parent / "player"
_THEMES: tuple[Theme, ...] = ("dark", "light")
_LETTERS = {state: str(place) for place, state in enumerate(State)}
_CHANGES = frozenset({State.FRESH, State.REPLACED, State.THAWED, State.GUESSED})  # what a history tells in words
_LEGEND = (State.FROZEN, State.FRESH, State.REPLACED, State.THAWED, State.NOISE, State.GUESSED, State.PAST)
_SIGNS = {CONTROL: "control", NEWLINE: "newline", END: "end", HIDDEN: "invisible"}
_SHORT = 12  # characters of a revision: enough to tell commits apart
_MILLI = 1000  # entropies are written in thousandths of a nat

# what would end a script element, or a line of script in an old engine; JSON's own escapes for them
_ESCAPES = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}


def render(recording: Recording, options: Options) -> str:
    """The page. It follows its reader's theme, has every step of the wanted canvases, and opens at the wanted step.

    Raises RecordingError where there is no such step.
    """
    style = _part("player.css") + _looks()
    script = _part("player.js")
    parts = {"policy": _policy(script, style), "style": style, "script": script, "data": _json(recording, options)}
    return re.sub(r"\{(policy|style|script|data)\}", lambda found: parts[found[1]], _part("player.html"))


def _part(name: str) -> str:
    return (_PLAYER / name).read_text(encoding="utf-8")


def _policy(script: str, style: str) -> str:
    """What the browser may do: run this script, use this style, and nothing else."""
    allowed = {"default-src": "'none'", "script-src": _hash(script), "style-src": _hash(style), "img-src": "data:"}
    allowed |= {"base-uri": "'none'", "form-action": "'none'"}
    return "; ".join(f"{kind} {source}" for kind, source in allowed.items())


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _json(recording: Recording, options: Options) -> str:
    text = json.dumps(data(recording, options), ensure_ascii=False, separators=(",", ":"))
    return text.translate(_ESCAPES)


def data(recording: Recording, options: Options) -> dict[str, object]:
    """What the script reads: plain values; tokens are places in `words`, states letters of `states`."""
    steps = moments(recording, replace(options, step=None))
    start = steps.index(moments(recording, options)[0])
    *_, last = follow(zip(recording.events, recording.seconds, strict=True), frozenset(recording.header.ends))
    words = _Words(sight(recording, options).vocabulary)
    header = recording.header
    return {
        "model": _clean(header.model),
        "about": _clean(_about(recording)),
        "notice": None if recording.notice is None else _clean(recording.notice),
        "summary": summary(last),
        "total": len(recording.canvases),
        "start": start,
        "moves": options.step is None,
        "view": options.view,
        "draft": options.draft,
        "seconds": options.seconds,
        "states": {letter: _state(state) for state, letter in _LETTERS.items()},
        "legend": [_LETTERS[state] for state in _LEGEND],
        "signs": _SIGNS,
        "newline": NEWLINE,
        "committed": _committed(recording),
        "canvases": _canvases(steps, words),
        "steps": _steps(steps, words),
        "words": words.texts,
        "names": words.names,
    }


def _about(recording: Recording) -> str:
    header = recording.header
    parts = ["demo model"] if header.demo else []
    parts += [f"revision {header.revision[:_SHORT]}"] if header.revision else []
    parts += [f"seed {header.seed}", f"{header.canvas_length} positions a canvas"]
    return " · ".join([*parts, *([f"dgemma {header.dgemma}"] if header.dgemma else [])])


def _state(state: State) -> dict[str, object]:
    return {
        "key": state.name.lower(),
        "name": state.value,
        "mark": MARKS[state],
        "breaks": state in HELD or state in (State.GUESSED, State.TEXT),  # its newlines break the line
        "fits": state in (State.THAWED, State.NOISE, State.PAST),  # its token takes the room of the best guess
        "changes": state in _CHANGES,
    }


class _Words:
    """The tokens that occur, in order of appearance, as they are drawn."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._places: dict[int, int] = {}
        self.texts: list[str] = []
        self.names: dict[int, str] = {}  # of control tokens, by place

    def place(self, token: int) -> int:
        found = self._places.get(token)
        if found is None:
            found = self._places[token] = len(self.texts)
            self.texts.append(_clean(self._vocabulary.glyph(token)) or CONTROL)
            if self._vocabulary.control(token) or token in self._vocabulary.ends:
                self.names[found] = _clean(shortened(self._vocabulary.text(token)))
        return found

    def places(self, tokens: Sequence[int]) -> list[int]:
        return list(map(self.place, tokens))


def _committed(recording: Recording) -> list[list[list[str]]]:
    """The pieces of text, each with its kind, that every canvas of the recording made final."""
    return [
        [[piece.kind, _clean(piece.text)] for piece in pieces]
        for event, pieces in zip(recording.events, recording.pieces, strict=True)
        if isinstance(event, CanvasCommitted)
    ]


def _canvases(steps: list[Seen], words: _Words) -> list[dict[str, object]]:
    """Each wanted canvas: its number from 1, what its first step read, what its positions held."""
    last = {seen.canvas: seen for seen in steps}
    first = {each.canvas: each for seen in reversed(steps) if (each := seen.step) is not None}
    return [
        {
            "number": canvas + 1,
            "fed": _pack(words.places(first[canvas].fed)),
            "held": ",".join("+".join(map(_base36, words.places(tokens))) for tokens in seen.held),
        }
        for canvas, seen in last.items()
    ]


def _steps(steps: list[Seen], words: _Words) -> list[dict[str, object]]:
    found = []
    numbers = {canvas: place for place, canvas in enumerate(dict.fromkeys(seen.canvas for seen in steps))}
    before: tuple[list[int], list[int], list[int]] | None = None
    for place, seen in enumerate(steps):
        step = seen.step
        assert step is not None
        if place and steps[place - 1].canvas != seen.canvas:
            before = None
        tokens, guesses = words.places(step.next), words.places(step.draft)
        entropies = [round(_MILLI * each) for each in step.entropy]
        was = (None, None, None) if before is None else before
        found.append(
            {
                "of": numbers[seen.canvas],
                "step": step.step + 1,
                "steps": step.steps,
                "done": step.done,
                "states": "".join(map(_LETTERS.__getitem__, seen.states)),
                "shades": "".join(str(shade(each / _MILLI)) for each in entropies),
                "canvas": _pack(tokens, was[0]),
                "guess": _pack(guesses, was[1]),
                "argmax": _pack(words.places(shown(step, "argmax")), guesses),
                "entropy": _pack(entropies, was[2]),
                **_figures(seen, step),
            }
        )
        before = (tokens, guesses, entropies)
    return found


def _figures(seen: Seen, step: StepDone) -> dict[str, object]:
    return {
        "temperature": round(step.temperature, 3),
        "mean": round(seen.means[-1], 3),
        "accepted": seen.accepted[-1],
        "rate": round(seen.settled / seen.seconds, 1) if seen.seconds >= SHORTEST_WINDOW else None,
        "thaws": seen.thaws,
        "replacements": seen.replacements,
        "corrections": seen.corrections,
        "saved": seen.saved,
        "time": round(seen.seconds, 3),
    }


def _pack(values: Sequence[int], before: Sequence[int] | None = None) -> str:
    """Numbers in base 36, joined by commas: an empty one is that of `before`, and nothing at all is all of `before`."""
    if before is None:
        return ",".join(map(_base36, values))
    if list(values) == list(before):
        return ""
    return ",".join("" if each == was else _base36(each) for each, was in zip(values, before, strict=True))


@lru_cache(maxsize=1 << 16)
def _base36(number: int) -> str:
    """As JavaScript's parseInt(text, 36) reads it."""
    high, low = divmod(number, 36)
    return (_base36(high) if high else "") + "0123456789abcdefghijklmnopqrstuvwxyz"[low]


def _clean(text: str) -> str:
    """As it is drawn, with newlines: signs for what is invisible, steers the direction, or is no character at all."""
    return "".join(sign for sign, _cells in signs(text))


@lru_cache
def _looks() -> str:
    """The palette as rules of style: its looks are drawn, never copied."""
    return "\n".join(_rules(theme) for theme in _THEMES)


def _rules(theme: Theme) -> str:
    root = f'[data-theme="{theme}"]'
    colours = {
        "ground": GROUND[theme],
        "text": look(Ink(State.TEXT), theme).colour,
        "quiet": look(Ink(Chrome.STATUS), theme).colour,
        "accent": look(Ink(State.PINNED), theme).colour,
        "accepted": look(Ink(State.FRESH), theme).colour,
        "entropy": look(Ink(Chrome.HEAT, SHADES // 3), theme).colour,
        "warning": look(Ink(State.THAWED), theme).colour,
    }
    variables = "".join(f" --{name}: {_css(colour)};" for name, colour in colours.items())
    lines = [f"{root} {{ color-scheme: {theme};{variables} }}"]
    lines += [
        f'{root} [data-state="{state.name.lower()}"] {{ {_drawn(look(Ink(state), theme), theme)} }}' for state in State
    ]
    for each in range(SHADES):
        noise, heat = look(Ink(State.NOISE, each), theme), look(Ink(Chrome.HEAT, each), theme)
        lines.append(f'{root} .token[data-state="noise"][data-shade="{each}"] {{ {_drawn(noise, theme)} }}')
        ground = heat.ground or heat.colour
        lines.append(
            f'{root} .cell[data-shade="{each}"] {{ background: {_css(ground)}; color: {_css(_over(ground))}; }}'
        )
    return "\n".join(lines)


def _drawn(drawn: Look, theme: Theme) -> str:
    colour, ground = drawn.colour, drawn.ground
    if drawn.reverse:
        colour, ground = ground or GROUND[theme], colour
    rules = [f"color: {_css(colour)}", f"background: {'none' if ground is None else _css(ground)}"]
    rules.append(f"font-weight: {'bold' if drawn.bold else 'normal'}")
    rules.append(f"text-decoration: {'underline' if drawn.underline else 'none'}")
    return "; ".join(rules) + ";"


def _over(ground: Colour) -> Colour:
    """Black or white, whichever is read more easily on it (relative luminance of WCAG 2, without its gamma's toe)."""
    red, green, blue = ((each / 255) ** 2.2 for each in ground)
    return (0, 0, 0) if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 else (255, 255, 255)


def _css(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)
