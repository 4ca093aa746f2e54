"""How states look: legible, apart from each other for everybody, and without any colour."""

from itertools import combinations, product

import pytest

from dgemma_local.states import State
from dgemma_local.ui.palette import GROUND, HEAT, MARKS, SHADES, Chrome, Colour, Ink, Look, Theme, inked, look, shade

THEMES: tuple[Theme, Theme] = ("dark", "light")
INKS = [Ink(kind, i) for kind in (*State, *Chrome) for i in range(SHADES)]
READ, DIM = 4.5, 3.0  # WCAG 2.2, 1.4.3 for text and 1.4.11 for what supports it
CHANGES = (State.FRESH, State.REPLACED, State.THAWED, State.PINNED)
CHROMATIC = 10.0  # CIE 1976 distance; 2.3 is just noticeable

# SGR 30-37 and 90-97 as xterm has them.
ANSI16 = {
    31: (205, 0, 0), 32: (0, 205, 0), 33: (205, 205, 0), 34: (0, 0, 238), 35: (205, 0, 205), 36: (0, 205, 205),
    91: (255, 0, 0), 92: (0, 255, 0), 93: (255, 255, 0), 94: (92, 92, 255), 95: (255, 0, 255), 96: (0, 255, 255),
}  # fmt: skip
# Machado, Oliveira and Fernandes 2009, severity 1, on linear sRGB.
BLIND = {
    "nobody": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def ansi256(index: int) -> Colour:
    if index >= 232:
        return (8 + 10 * (index - 232),) * 3
    levels = (0, 95, 135, 175, 215, 255)
    index -= 16
    return levels[index // 36], levels[index // 6 % 6], levels[index % 6]


def colours(style: Look) -> dict[str, Colour]:
    """By depth, where the terminal's own is not taken."""
    found = {"true": style.colour}
    if style.ansi256 is not None:
        found["256"] = ansi256(style.ansi256)
    if style.ansi16 != 39:
        found["16"] = ANSI16[style.ansi16]
    return found


def linear(colour: Colour) -> tuple[float, ...]:
    return tuple(c / 255 / 12.92 if c <= 10.31 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour)


def luminance(colour: Colour) -> float:
    return sum(weight * level for weight, level in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


def contrast(a: Colour, b: Colour) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def lab(colour: Colour, eyes: str) -> tuple[float, float, float]:
    level = linear(colour)
    red, green, blue = (min(1.0, max(0.0, sum(k * v for k, v in zip(row, level, strict=True)))) for row in BLIND[eyes])
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def test_the_arithmetic_knows_published_values() -> None:
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21.0)
    assert contrast((119, 119, 119), (255, 255, 255)) == pytest.approx(4.48, abs=0.01)
    assert lab((255, 0, 0), "nobody") == pytest.approx((53.2, 80.1, 67.2), abs=0.1)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("ink", INKS)
def test_everything_is_legible(ink: Ink, theme: Theme) -> None:
    style = look(ink, theme)
    least = DIM if style.dim or ink.kind is Chrome.HEAT else READ
    assert {depth: round(contrast(colour, GROUND[theme]), 2) for depth, colour in colours(style).items()} == {
        depth: round(max(least, contrast(colour, GROUND[theme])), 2) for depth, colour in colours(style).items()
    }


def test_only_what_waits_or_is_over_is_dim() -> None:
    dim = {ink.kind for ink, theme in product(INKS, THEMES) if look(ink, theme).dim}
    assert dim == {State.NOISE, State.PAST, Chrome.HEAT}


@pytest.mark.parametrize("theme", THEMES)
def test_states_differ_without_colour(theme: Theme) -> None:
    def bare(state: State) -> tuple[bool, ...]:
        style = look(Ink(state), theme)
        return style.bold, style.underline, style.reverse, style.dim

    assert len({bare(state) for state in State}) == len(State)


@pytest.mark.parametrize("theme", THEMES)
def test_states_but_noise_and_the_past_differ_where_dim_is_unknown(theme: Theme) -> None:
    kept = [look(Ink(state), theme) for state in State if state not in (State.NOISE, State.PAST)]
    assert len({(style.bold, style.underline, style.reverse) for style in kept}) == len(kept)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("eyes", BLIND)
def test_changes_stay_apart_in_colour_for_everybody(eyes: str, theme: Theme) -> None:
    inks = [Ink(state) for state in (*CHANGES, State.FROZEN)] + [Ink(State.NOISE, i) for i in range(SHADES)]
    for depth in ("true", "256"):
        for a, b in combinations(inks, 2):
            if a.kind is b.kind:
                continue
            one, other = (lab(colours(look(ink, theme)).get(depth, look(ink, theme).colour), eyes) for ink in (a, b))
            assert sum((x - y) ** 2 for x, y in zip(one, other, strict=True)) ** 0.5 >= CHROMATIC, (depth, a, b)


@pytest.mark.parametrize("theme", THEMES)
def test_in_16_colours_changes_have_each_their_own(theme: Theme) -> None:
    assert len({look(Ink(state), theme).ansi16 for state in CHANGES}) == len(CHANGES)
    assert {look(Ink(state), theme).ansi16 for state in State if state not in CHANGES} == {39}


def test_marks_differ_where_states_do() -> None:
    assert set(MARKS) == set(State)
    alike = {(a, b) for a, b in combinations(State, 2) if MARKS[a] == MARKS[b]}
    assert alike == {(State.FROZEN, State.TEXT)}
    assert all(len(mark) == 1 and mark.isascii() and mark.isprintable() for mark in MARKS.values())


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("kind", [State.NOISE, Chrome.HEAT])
def test_shades_are_a_scale(kind: State | Chrome, theme: Theme) -> None:
    """Noise stands out the more, the surer the model is; heat the less."""
    for depth in ("true", "256"):
        scale = [contrast(colours(look(Ink(kind, i), theme))[depth], GROUND[theme]) for i in range(SHADES)]
        rising = scale if kind is State.NOISE else scale[::-1]
        assert rising == sorted(rising) and len(set(scale)) == SHADES, depth


def test_heat_is_told_apart_without_colour() -> None:
    assert len(set(HEAT)) == SHADES and len(HEAT) == SHADES


@pytest.mark.parametrize(
    ("entropy", "level"),
    [(0.0, 5), (0.049, 5), (0.05, 4), (0.299, 4), (0.3, 3), (0.99, 3), (1.0, 2), (2.0, 1), (4.0, 0), (12.5, 0)],
)
def test_a_shade_is_of_the_entropy(entropy: float, level: int) -> None:
    assert shade(entropy) == level


def test_only_noise_and_heat_have_shades() -> None:
    assert inked(State.NOISE, 9.0) == Ink(State.NOISE, 0)
    assert inked(Chrome.HEAT, 0.4) == Ink(Chrome.HEAT, 3)
    assert {inked(kind, 9.0).shade for kind in (*State, *Chrome) if kind not in (State.NOISE, Chrome.HEAT)} == {5}
    assert inked(State.FRESH) is inked(State.FRESH, 9.0)
