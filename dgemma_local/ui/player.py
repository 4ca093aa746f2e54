"""A recording being played: pure. A key, or time that passes, makes another player of it.

press(player, key) -> player
tick(player, seconds) -> player
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from dgemma_local.states import Draft
from dgemma_local.ui.frame import View
from dgemma_local.ui.palette import Theme
from dgemma_local.ui.tape import Place, Tape

PAUSE = 0.4  # seconds a step, at speed 1
SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
SHORTEST = 0.02  # seconds that a step is shown, whatever the speed: an eye sees no shorter one
LONGEST_ENTRY = 40  # characters

HELP = (  # the first are what the lowest terminal has room for
    "space play, pause",
    "q leave",
    "? these lines",
    "← → or , . step",
    "↑ ↓ or [ ] canvas",
    "home end",
    "+ - 0 speed",
    "g go to a step",
    "tab or / pick a position: arrows move it, its past stands below",
    "f find a token, n p next, previous",
    "v view",
    "d draft",
    "t theme",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """What is shown, and what goes on."""

    tape: Tape
    pause: float = PAUSE  # seconds a step, at speed 1
    speed: float = 1.0
    view: View = "text"
    draft: Draft = "canvas"
    theme: Theme = "dark"
    step: int = 0  # of the whole recording, from 0
    playing: bool = True
    waited: float = 0.0  # seconds that the step has been shown while playing
    asking: Literal["", "step", "text"] = ""  # what is being typed
    entry: str = ""  # as far as it is typed
    position: int = 0  # the one picked, or picked last
    picking: bool = False
    help: bool = False
    found: tuple[Place, ...] = ()  # by the latest search
    told: str = ""  # what a key came to; until the next one
    left: bool = False
    places: tuple[tuple[int, int], ...] = ()  # row and column of each position, as drawn: what up and down go by

    @property
    def last(self) -> int:
        return len(self.tape) - 1

    @property
    def canvas(self) -> int:
        return self.tape.canvas(self.step)

    @property
    def rest(self) -> float | None:
        """Seconds until something changes by itself; None: nothing will."""
        return max(0.0, _shown(self) - self.waited) if self.playing else None


def _shown(player: Player) -> float:
    """Seconds a step."""
    return max(SHORTEST, player.pause / player.speed)


Act = Callable[[Player], Player]


def tick(player: Player, seconds: float) -> Player:
    """After so much time. The last step is shown as long as the others, and never skipped; then it stays, paused."""
    if not player.playing:
        return player
    waited = player.waited + seconds
    steps = int(waited / _shown(player))
    if player.step + steps > player.last:
        return replace(player, step=player.last, playing=player.step < player.last, waited=0.0)
    return replace(player, step=player.step + steps, waited=max(0.0, waited - steps * _shown(player)))


def press(player: Player, key: str) -> Player:
    """After a key; one that means nothing here changes nothing."""
    player = replace(player, told="")
    if player.asking:
        return _typed(player, key)
    act = (_PICKING.get(key) if player.picking else None) or _KEYS.get(key)
    return player if act is None else act(player)


def _to(player: Player, step: int) -> Player:
    return replace(player, step=max(0, min(player.last, step)), waited=0.0)


def _by(steps: int) -> Act:
    return lambda player: replace(_to(player, player.step + steps), playing=False)


def _play(player: Player) -> Player:
    if not player.playing and player.step == player.last:
        player = _to(player, 0)
    return replace(player, playing=not player.playing, waited=0.0)


def _canvas_back(player: Player) -> Player:
    """To where this canvas began; from there to where the one before it did."""
    first = player.tape.firsts[player.canvas]
    return _to(player, first if player.step > first else player.tape.firsts[max(0, player.canvas - 1)])


def _canvas_on(player: Player) -> Player:
    firsts = player.tape.firsts
    return _to(player, firsts[player.canvas + 1] if player.canvas + 1 < len(firsts) else player.last)


def _faster(player: Player) -> Player:
    return replace(player, speed=min((each for each in SPEEDS if each > player.speed), default=player.speed))


def _slower(player: Player) -> Player:
    return replace(player, speed=max((each for each in SPEEDS if each < player.speed), default=player.speed))


def _turn(name: str, values: tuple[str, ...]) -> Act:
    """To the next of them, and from the last to the first."""

    def act(player: Player) -> Player:
        chosen: dict[str, Any] = {name: values[(values.index(getattr(player, name)) + 1) % len(values)]}
        return replace(player, **chosen)

    return act


def _ask(what: Literal["step", "text"]) -> Act:
    return lambda player: replace(player, asking=what, entry="", playing=False)


def _typed(player: Player, key: str) -> Player:
    closed = replace(player, asking="", entry="")
    if key == "escape":
        return closed
    if key == "enter":
        return _went(closed, player.entry) if player.asking == "step" else _searched(closed, player.entry)
    if key == "backspace":
        return replace(player, entry=player.entry[:-1])
    sign = " " if key == "space" else key
    fits = len(sign) == 1 and (sign in "0123456789" if player.asking == "step" else sign.isprintable())
    return replace(player, entry=(player.entry + sign)[:LONGEST_ENTRY]) if fits else player


def _went(player: Player, entry: str) -> Player:
    if not entry:
        return player
    step = int(entry)
    if not 1 <= step <= len(player.tape):
        return replace(player, told=f"steps are 1 to {len(player.tape)}")
    return _to(player, step - 1)


def _searched(player: Player, entry: str) -> Player:
    found = player.tape.find(entry)
    if not found:
        return replace(player, told=f"no position ever held “{entry}”" if entry else "", found=())
    here = next((i for i, place in enumerate(found) if place.step >= player.step), 0)
    return _shows(replace(player, found=found), here)


def _next(by: int) -> Act:
    def act(player: Player) -> Player:
        if not player.found:
            return replace(player, told="f finds a token")
        here = Place(player.step, player.position)
        if by > 0:
            at = next((i for i, place in enumerate(player.found) if place > here), 0)
        else:
            at = max((i for i, place in enumerate(player.found) if place < here), default=len(player.found) - 1)
        return _shows(player, at)

    return act


def _shows(player: Player, at: int) -> Player:
    """One of the places found, its position picked."""
    place = player.found[at]
    player = replace(_to(player, place.step), playing=False, picking=True, position=place.position, help=False)
    return replace(player, told=f"{at + 1} of {len(player.found)} found")


def _pick(player: Player) -> Player:
    return replace(player, picking=not player.picking, playing=False, help=False)


def _unpick(player: Player) -> Player:
    return replace(player, picking=False)


def _move(by: int) -> Act:
    return lambda player: replace(player, position=max(0, min(player.tape.length - 1, player.position + by)))


def _row(by: int) -> Act:
    """To the position above or below, as it was drawn."""

    def act(player: Player) -> Player:
        if not player.places:
            return player
        row, column = player.places[player.position]
        others = [(abs(r - row), abs(c - column), i) for i, (r, c) in enumerate(player.places) if (r - row) * by > 0]
        return replace(player, position=min(others)[2]) if others else player

    return act


def _help(player: Player) -> Player:
    return replace(player, help=not player.help, picking=False)


def _leave(player: Player) -> Player:
    return replace(player, left=True)


def _escape(player: Player) -> Player:
    """Out of what is open; out of the player where nothing is."""
    return replace(player, help=False) if player.help else _leave(player)


_KEYS: Mapping[str, Act] = {
    "space": _play,
    "left": _by(-1),
    "right": _by(+1),
    ",": _by(-1),
    ".": _by(+1),
    "up": _canvas_back,
    "down": _canvas_on,
    "[": _canvas_back,
    "]": _canvas_on,
    "pageup": _canvas_back,
    "pagedown": _canvas_on,
    "home": lambda player: _to(player, 0),
    "end": lambda player: replace(_to(player, player.last), playing=False),
    "+": _faster,
    "=": _faster,
    "-": _slower,
    "0": lambda player: replace(player, speed=1.0),
    "g": _ask("step"),
    "f": _ask("text"),
    "n": _next(+1),
    "p": _next(-1),
    "v": _turn("view", ("text", "grid", "both")),
    "d": _turn("draft", ("canvas", "argmax")),
    "t": _turn("theme", ("dark", "light")),
    "/": _pick,
    "tab": _pick,
    "?": _help,
    "q": _leave,
    "escape": _escape,
}
_PICKING: Mapping[str, Act] = {
    "left": _move(-1),
    "right": _move(+1),
    "up": _row(-1),
    "down": _row(+1),
    "enter": _unpick,
    "escape": _unpick,
}
