"""GIF and PNG: what is decoded again shows the looks' own colours where the rows say, a frame a step, curves in their places."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
import recordings
from PIL import Image

from dgemma_local.errors import RecordingError
from dgemma_local.events import StepDone
from dgemma_local.recording import Recording
from dgemma_local.states import State
from dgemma_local.ui.canvas import CARRIER, CONTROL, END, HIDDEN, NEWLINE, Row
from dgemma_local.ui.export import Options, drawn, gif, moments, pixels, plot, png
from dgemma_local.ui.export.pixels import Face, Sheet, between, broadest, cells, has, inks
from dgemma_local.ui.palette import GROUND, HEAT, SHADES, Chrome, Ink, Theme, look

THEMES: tuple[Theme, ...] = ("dark", "light")
EVERY_INK = [Ink(kind, shade) for kind in (*State, *Chrome) for shade in range(SHADES)]
SIZE = 15


def sheet_of(rows: list[Row], theme: Theme = "dark", size: int = SIZE) -> tuple[Sheet, Image.Image]:
    """The rows, drawn; the image is RGB."""
    sheet = Sheet(broadest([rows]), len(rows), inks([rows]), theme, size)
    image = sheet.draw(rows).copy()
    image.putpalette(sheet.colours.table)
    return sheet, image.convert("RGB")


def cell(sheet: Sheet, image: Image.Image, column: int, line: int = 0, width: int = 1) -> Image.Image:
    """What is drawn there; scale: the image's."""
    left = sheet.margin + column * sheet.face.width
    top = sheet.margin + line * sheet.face.height
    return image.crop((left, top, left + width * sheet.face.width, top + sheet.face.height))


def colours(image: Image.Image) -> dict[tuple[int, ...], int]:
    """How many pixels are of each."""
    found = image.getcolors(image.width * image.height)
    assert found is not None
    return {colour: count for count, colour in found if isinstance(colour, tuple)}


def frames(data: bytes) -> list[tuple[Image.Image, float]]:
    """As a viewer shows them: RGB, and seconds."""
    image = Image.open(BytesIO(data))
    found = []
    for i in range(getattr(image, "n_frames", 1)):
        image.seek(i)
        found.append((image.convert("RGB"), image.info["duration"] / 1000))
    return found


def opened(data: bytes) -> Image.Image:
    return Image.open(BytesIO(data)).convert("RGBA")


class TestColours:
    @pytest.mark.parametrize("theme", THEMES)
    def test_every_look_is_drawn_in_its_own_colours_and_steps_between(self, theme: Theme) -> None:
        rows: list[Row] = [[("M", ink)] for ink in EVERY_INK]
        sheet, image = sheet_of(rows, theme)
        for line, ink in enumerate(EVERY_INK):
            drawn = look(ink, theme)
            colour, ground = drawn.colour, drawn.ground or GROUND[theme]
            if drawn.reverse:
                colour, ground = ground, colour
            found = colours(cell(sheet, image, 0, line))
            assert found[colour] and found[ground]
            assert cell(sheet, image, 0, line).getpixel((0, 0)) == ground  # where no letter reaches
            for each in found:
                assert all(min(c, g) <= e <= max(c, g) for c, g, e in zip(colour, ground, each, strict=True)), ink

    def test_a_palette_is_exact_however_many_looks_there_are(self) -> None:
        many = {((i, 255 - i, 7), (0, i, 0)) for i in range(100)}
        made = pixels.Colours(many)
        table = made.table
        assert len(table) == 768 and len(made.index) <= 255
        for colour, ground in many:
            codes = made.codes((colour, ground))
            assert pixels.KEEP not in codes
            assert tuple(table[3 * codes[255] :][:3]) == colour and tuple(table[3 * codes[0] :][:3]) == ground

    def test_few_looks_are_smoother_than_many(self) -> None:
        few, many = ({((i, 0, 0), (255, i, 255)) for i in range(n)} for n in (2, 60))
        assert len(set(pixels.Colours(few).codes(max(few)))) > len(set(pixels.Colours(many).codes(max(many)))) >= 4

    def test_what_is_outside_the_rows_is_ground(self) -> None:
        for theme in THEMES:
            sheet, image = sheet_of([[("MMM", Ink(State.THAWED))]], theme)
            margin = image.crop((0, 0, image.width, sheet.margin))
            assert list(colours(margin)) == [GROUND[theme]]


class TestSigns:
    def test_underline_runs_through_the_cells(self) -> None:
        ink = Ink(State.FRESH)
        sheet, image = sheet_of([[("  ", ink)]])
        assert look(ink, "dark").underline
        place = cell(sheet, image, 0, width=2)
        lines = [list(colours(place.crop((0, y, place.width, y + 1)))) for y in range(place.height)]
        assert [look(ink, "dark").colour] in lines and lines.count([GROUND["dark"]]) >= place.height - 3

    def test_bold_has_more_ink(self) -> None:
        face = Face(SIZE)
        thin, thick = (sum(face.mask("H", 1, bold).tobytes()) for bold in (False, True))
        assert thick > 1.2 * thin

    def test_a_wide_sign_takes_two_cells_and_what_follows_has_its_own(self) -> None:
        ink = Ink(State.TEXT)
        for size in (SIZE, png.FONT):
            sheet, image = sheet_of([[("漢😀a", ink)], [("    a", ink)]], size=size)
            assert broadest([[[("漢😀a", ink)]]]) == 5
            assert cell(sheet, image, 4, 0).tobytes() == cell(sheet, image, 4, 1).tobytes()
            for column in range(4):
                assert len(colours(cell(sheet, image, column, 0))) > 1  # a box over all of them

    def test_a_box_says_which_sign_is_missing(self) -> None:
        face = Face(png.FONT)
        one, other, again = (face.mask(sign, 2).tobytes() for sign in ("漢", "字", "漢"))
        assert one == again != other

    def test_marks_stand_on_their_letter(self) -> None:
        face = Face(png.FONT)
        text, noise = Ink(State.TEXT), Ink(State.NOISE)
        assert cells([("ae\u0301", text), ("\u0301b", noise)]) == [
            ("a", 1, text),
            ("e\u0301\u0301", 1, text),
            ("b", 1, noise),
        ]
        assert face.mask("e\u0301", 1).tobytes() == face.mask("é", 1).tobytes()
        bare, marked = face.mask("x", 1), face.mask("x\u0301", 1)
        assert bare.tobytes() != marked.tobytes()
        low = (0, face.ascent // 2, face.width, face.height)
        assert bare.crop(low).tobytes() == marked.crop(low).tobytes()  # above it, in the same cell

    def test_bars_and_shades_fill_their_cells(self) -> None:
        face = Face(SIZE)
        for eighths, sign in enumerate("▁▂▃▄▅▆▇█", start=1):
            mask = face.mask(sign, 1)
            filled = round(face.height * eighths / 8)
            assert mask.getbbox() == (0, face.height - filled, face.width, face.height)
            assert set(mask.crop(mask.getbbox()).tobytes()) == {255}
        shades = [set(face.mask(sign, 1).tobytes()) for sign in "░▒▓"]
        assert shades == [{64}, {128}, {191}]

    def test_the_font_has_every_mark_of_the_views_and_one_width(self) -> None:
        face = Face(SIZE)
        for sign in f"{CONTROL}{NEWLINE}{END}{HIDDEN}{CARRIER}{HEAT}│↑↓▁▂▃▄▅▆▇█×…·äßñŁΩжЯ─┼╬▲●✓":
            assert has(face.regular, sign), sign
        for sign in f"{CONTROL}{NEWLINE}{END}{HIDDEN}{CARRIER}äßñŁΩжЯ×…":
            assert has(face.bold, sign), sign
        for sign in "漢😀ש\U0010ffff":
            assert not has(face.regular, sign)
        assert {font.getlength(chr(i)) for font in (face.regular, face.bold) for i in range(33, 127)} == {face.width}

    def test_fonts_are_small_and_come_with_their_licence(self) -> None:
        folder = Path(pixels.__file__).with_name("fonts")
        assert sum(file.stat().st_size for file in folder.iterdir()) <= 200_000
        assert "Bitstream Vera" in (folder / "LICENSE").read_text() and (folder / "README.md").exists()

    def test_a_row_is_drawn_anew_only_where_it_differs(self) -> None:
        one: list[Row] = [[("long row", Ink(State.NOISE))], [("stays", Ink(State.FROZEN))]]
        other: list[Row] = [[("x", Ink(State.FRESH))], one[1]]
        sheet = Sheet(8, 2, inks([one, other]), "dark", SIZE)
        sheet.draw(one)
        reused = sheet.draw(other).copy()
        fresh = Sheet(8, 2, inks([one, other]), "dark", SIZE).draw(other)
        assert reused.tobytes() == fresh.tobytes()

    def test_what_has_no_room_is_left_out(self) -> None:
        rows: list[Row] = [[("abc漢", Ink(State.TEXT))], [("late", Ink(State.TEXT))]]
        sheet = Sheet(4, 1, inks([rows]), "dark", SIZE)
        image = sheet.draw(rows).copy()
        want = Sheet(4, 1, inks([rows]), "dark", SIZE).draw([[("abc", Ink(State.TEXT))]])
        assert image.tobytes() == want.tobytes()


def raster(recording: Recording, options: Options) -> list[Image.Image]:
    """What the frames of a GIF should look like."""
    width = options.width or pixels.WIDTHS[options.view]
    every = [rows for _seen, rows in drawn(recording, options, width, gif.MOST_ROWS)]
    sheet = Sheet(options.width or broadest(every), len(every[0]), inks(every), options.theme, gif.FONT)
    found = []
    for rows in every:
        image = sheet.draw(rows).copy()
        image.putpalette(sheet.colours.table)
        found.append(image.convert("RGB"))
    return found


class TestGif:
    @pytest.mark.parametrize("view", ["text", "grid", "both"])
    @pytest.mark.parametrize("theme", THEMES)
    def test_a_frame_a_step_each_pixel_for_pixel(self, view: str, theme: Theme) -> None:
        made = recordings.make(canvases=2, steps=4, length=48)
        options = Options(theme=theme, view=view)  # type: ignore[arg-type]
        shown = frames(gif.render(made, options))
        assert len(shown) == sum(map(len, made.canvases)) == 8
        for (image, _seconds), want in zip(shown, raster(made, options), strict=True):
            assert image.tobytes() == want.tobytes()

    @pytest.mark.parametrize(("canvases", "steps"), [(1, 1), (1, 30), (3, 5)])
    def test_as_many_frames_as_steps(self, canvases: int, steps: int) -> None:
        made = recordings.make(canvases=canvases, steps=steps, length=16)
        assert len(frames(gif.render(made, Options()))) == canvases * steps

    def test_equal_frames_stay_frames(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = recordings.make(canvases=1, steps=4, length=16)
        first = drawn(made, Options(), 80, gif.MOST_ROWS)[0]
        monkeypatch.setattr(gif, "drawn", lambda *_: [first] * 4)
        shown = frames(gif.render(made, Options()))
        assert [seconds for _image, seconds in shown] == [0.45, 0.45, 0.45, 3.0]
        assert len({image.tobytes() for image, _seconds in shown}) == 1

    @pytest.mark.parametrize(
        ("seconds", "want", "last"), [(0.45, 0.45, 3), (0.1, 0.1, 3), (5, 5, 5), (0, 0.02, 3), (1e9, 600, 600)]
    )
    def test_seconds_a_step_and_the_last_is_held(self, seconds: float, want: float, last: float) -> None:
        made = recordings.make(canvases=2, steps=3, length=16)
        found = [each for _image, each in frames(gif.render(made, Options(seconds=seconds)))]
        assert found == [want] * 5 + [last]

    def test_it_begins_again_for_ever(self) -> None:
        image = Image.open(BytesIO(gif.render(recordings.make(canvases=1, steps=3, length=16), Options())))
        assert image.info["loop"] == 0 and image.info["version"] == b"GIF89a"

    def test_one_canvas_and_one_step(self) -> None:
        made = recordings.make(canvases=3, steps=4, length=16)
        assert len(frames(gif.render(made, Options(canvas=2)))) == 4
        assert len(frames(gif.render(made, Options(canvas=2, step=3)))) == 1
        assert len(frames(gif.render(made, Options(step=3)))) == 3

    def test_thirty_steps_of_a_sudoku_are_small(self) -> None:
        made = recordings.make(canvases=1, steps=30, length=96, texts=[*"0123456789", "\n", ".", "ab", "<x>", "of"])
        assert len(gif.render(made, Options())) <= 300_000

    def test_width_and_height_are_those_asked_for(self) -> None:
        made = recordings.make(canvases=1, steps=3, length=64)
        face = Face(gif.FONT)
        image, _seconds = frames(gif.render(made, Options(width=40, height=10)))[0]
        margin = 2 * (face.width * 3 // 2)
        assert image.size == (40 * face.width + margin, 10 * face.height + margin)

    def test_the_same_bytes_twice(self) -> None:
        made = recordings.make(canvases=2, steps=3, length=32)
        assert gif.render(made, Options(view="both")) == gif.render(made, Options(view="both"))


class TestPng:
    def test_the_last_step_of_the_last_canvas(self) -> None:
        made = recordings.make(canvases=2, steps=3, length=32)
        each = {(c, s): png.render(made, Options(canvas=c, step=s)) for c in (1, 2) for s in (1, 2, 3)}
        assert len(set(each.values())) == 6
        assert png.render(made, Options()) == each[2, 3]
        assert png.render(made, Options(canvas=1)) == each[1, 3]
        assert png.render(made, Options(step=2)) == each[2, 2]

    @pytest.mark.parametrize("theme", THEMES)
    def test_the_inside_is_the_rows_pixel_for_pixel(self, theme: Theme) -> None:
        made = recordings.make(canvases=1, steps=5, length=32)
        card = opened(png.render(made, Options(theme=theme, step=3)))
        rows = drawn(made, Options(step=3), 80, 100)[0][1]
        sheet, want = sheet_of(rows, theme, png.FONT)
        inside = (sheet.margin, sheet.margin, card.width - sheet.margin, card.height - sheet.margin)
        assert card.size == want.size
        assert card.convert("RGB").crop(inside).tobytes() == want.crop(inside).tobytes()

    def test_a_card_with_round_corners_and_an_edge(self) -> None:
        for theme in THEMES:
            card = opened(png.render(recordings.make(canvases=1, steps=2, length=16), Options(theme=theme)))
            right, bottom = card.width - 1, card.height - 1
            assert [card.getpixel(each)[3] for each in ((0, 0), (right, 0), (0, bottom), (right, bottom))] == [0] * 4
            edge = between(look(Ink(Chrome.LEGEND), theme).colour, GROUND[theme], 0.35)
            middles = ((0, bottom // 2), (right, bottom // 2), (right // 2, 0), (right // 2, bottom))
            assert {card.getpixel(each) for each in middles} == {(*edge, 255)}
            assert card.getpixel((right // 2, 4)) == (*GROUND[theme], 255)

    def test_twice_the_pixels_of_a_screen(self) -> None:
        image = Image.open(BytesIO(png.render(recordings.make(canvases=1, steps=2, length=16), Options())))
        assert [round(each) for each in image.info["dpi"]] == [144, 144]


def plotted(recording: Recording, options: Options) -> tuple[Image.Image, list[plot.Point], Sequence[plot.Scale]]:
    found = plot.points(moments(recording, options))
    data = png.render(recording, replace(options, plot=True))
    return opened(data).convert("RGB"), found, plot.scales(found, recording.header.canvas_length)


def at(image: Image.Image, x: float, y: float) -> object:
    return image.getpixel((round(x), round(y)))


def test_a_png_is_never_too_large_for_its_own_rows() -> None:
    high = recordings.make(canvases=1, steps=2, length=2048, texts=["\n"])
    for width in (20, 80, 400):
        image = opened(png.render(high, Options(width=width)))
        assert image.width * image.height <= pixels.MOST_PIXELS
    assert png.MOST_ROWS["text"] > pixels.most_lines(80, png.FONT)


class TestPlot:
    def test_positions_are_counted_in_whole_numbers(self) -> None:
        for most in (1, 2, 3, 256):
            found = plot.ticks(plot.Scale(0, most, 100, 0), whole=True)
            assert all(value == int(value) for value in found) and found[-1] == most
        one = recordings.make(canvases=1, steps=3, length=1)
        assert plot._title(one, plot.points(moments(one, Options()))).endswith("of 1 position")
        image, _found, _scales = plotted(one, Options())
        assert image.size == plot.SIZE

    def test_the_swatch_of_the_band_has_an_edge_that_is_seen(self) -> None:
        image, _found, _scales = plotted(recordings.make(canvases=1, steps=3, length=16), Options())
        left = plot.LEFT + 28 + Face(plot._FONT).width * (len("mean") + 3)
        assert at(image, left, plot._LEGEND) == plot.ENTROPY_INK["dark"]
        assert at(image, left + 8, plot._LEGEND) != plot.ENTROPY_INK["dark"]

    @pytest.mark.parametrize("theme", THEMES)
    def test_the_curves_are_where_the_events_say(self, theme: Theme) -> None:
        made = recordings.make(canvases=2, steps=9, length=64)
        image, found, (across, nats, _places) = plotted(made, Options(theme=theme))
        every = [event for event in made.events if isinstance(event, StepDone)]
        assert len(found) == len(every) == 18
        accepted = look(Ink(State.FRESH), theme).colour
        band = between(plot.ENTROPY_INK[theme], GROUND[theme], 0.22)
        for step, (event, point) in enumerate(zip(every, found, strict=True), start=1):
            ranked = sorted(event.entropy)
            assert point.mean == pytest.approx(sum(ranked) / 64)
            assert (point.low, point.high) == (ranked[6], ranked[57])
            x = plot.LEFT + (plot.RIGHT - plot.LEFT) * (step - 1) / 17
            assert across.at(step) == pytest.approx(x)
            assert at(image, x, nats.at(point.mean)) == plot.ENTROPY_INK[theme]
            top, bottom = plot.ACCEPTED
            assert at(image, x, bottom - (bottom - top) * sum(event.accepted) / 64) == accepted
            middle = nats.at((point.mean + point.high) / 2)
            if nats.at(point.mean) - middle > 12 and step not in (1, 9, 10, 18):
                assert at(image, x, middle) == band
        assert any(nats.at(each.mean) - nats.at(each.high) > 24 for each in found)  # some of those were asked

    @pytest.mark.parametrize("theme", THEMES)
    def test_thaws_and_replacements_are_dots_that_grow(self, theme: Theme) -> None:
        made = recordings.make(canvases=1, steps=12, length=64)
        image, found, (across, _nats, _places) = plotted(made, Options(theme=theme))
        last = moments(made, Options())[-1]
        assert sum(point.thaws for point in found) == last.thaws != last.replacements
        assert sum(point.replacements for point in found) == last.replacements
        sizes = {}
        for kind, middle, counts in (
            (State.THAWED, plot.THAWS, [point.thaws for point in found]),
            (State.REPLACED, plot.REPLACEMENTS, [point.replacements for point in found]),
        ):
            colour = look(Ink(kind), theme).colour
            assert sum(counts)
            for step, count in enumerate(counts, start=1):
                x = round(across.at(step))
                column = [image.getpixel((x, y)) for y in range(middle - 16, middle + 17)]
                assert (colour in column) == (count > 0)
                sizes[kind, step] = column.count(colour), count
        small, large = (pick(sizes.values(), key=lambda each: each[1]) for pick in (min, max))
        assert small[1] == 0 and large[0] > max(size for size, count in sizes.values() if 0 < count <= large[1] / 2)

    def test_curves_break_where_a_canvas_ends(self) -> None:
        made = recordings.make(canvases=2, steps=6, length=64)
        image, found, (across, nats, places) = plotted(made, Options())
        x = across.at(6.5) + 4  # beside the border
        half = nats.at((found[5].mean + found[6].mean) / 2)
        colours_there = {image.getpixel((round(x), y)) for y in range(plot.ENTROPY[0] + 2, plot.ACCEPTED[1] - 2)}
        assert (
            plot.ENTROPY_INK["dark"] not in colours_there and look(Ink(State.FRESH), "dark").colour not in colours_there
        )
        assert nats.at(found[6].mean) < half < nats.at(found[5].mean)
        border = [image.getpixel((round(across.at(6.5)), y)) for y in range(plot.ENTROPY[0], plot.CANVASES)]
        inner = [image.getpixel((round(across.at(3.5)), y)) for y in range(plot.ENTROPY[0], plot.CANVASES)]
        dash = between(look(Ink(Chrome.STATUS), "dark").colour, GROUND["dark"], 0.5)
        assert border.count(dash) > 100 and dash not in inner
        assert places.at(0) == plot.ACCEPTED[1] and places.at(64) == plot.ACCEPTED[0]

    def test_all_steps_of_the_wanted_canvases(self) -> None:
        made = recordings.make(canvases=3, steps=5, length=16)
        every, one = (png.render(made, Options(plot=True, canvas=each)) for each in (None, 2))
        assert every != one
        assert one == png.render(made, Options(plot=True, canvas=2, step=3))

    @pytest.mark.parametrize(
        ("most", "want"),
        [
            (256, [0, 50, 100, 150, 200, 256]),
            (96, [0, 20, 40, 60, 80, 96]),
            (110, [0, 20, 40, 60, 80, 110]),
            (1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
            (0.05, [0, 0.01, 0.02, 0.03, 0.04, 0.05]),
        ],
    )
    def test_numbers_of_an_axis(self, most: float, want: list[float]) -> None:
        assert plot.ticks(plot.Scale(0, most, 0, 100)) == pytest.approx(want)

    @pytest.mark.parametrize("entropy", [0.0, 1e-300, 1e300])
    def test_no_entropy_and_absurd_entropy(self, entropy: float) -> None:
        made = recordings.make(canvases=1, steps=1, length=16)
        made.events = [
            replace(event, entropy=(entropy,) * 16) if isinstance(event, StepDone) else event for event in made.events
        ]
        image, found, (across, nats, _places) = plotted(made, Options())
        assert across.at(1) == (plot.LEFT + plot.RIGHT) / 2
        assert nats.most <= 25
        assert at(image, across.at(1), nats.at(found[0].mean)) == plot.ENTROPY_INK["dark"]

    def test_thousands_of_steps_and_dozens_of_canvases(self) -> None:
        made = recordings.make(canvases=40, steps=50, length=8)
        image, found, _scales = plotted(made, Options())
        assert image.size == plot.SIZE and len(found) == 2000


class TestHostile:
    @pytest.mark.parametrize("view", ["text", "grid", "both"])
    def test_hostile_text_is_drawn(self, view: str) -> None:
        made = recordings.hostile(lone=True)
        options = Options(view=view)  # type: ignore[arg-type]
        assert len(frames(gif.render(made, options))) == sum(map(len, made.canvases))
        assert opened(png.render(made, options)).width > 100

    def test_hostile_names_are_drawn(self) -> None:
        made = recordings.hostile()
        for model in ("\ud800\x1b]0;x\x07" + "漢" * 300, ""):
            made.header = replace(made.header, model=model)
            assert opened(png.render(made, Options(plot=True))).size == plot.SIZE

    def test_no_step_is_said(self) -> None:
        made = recordings.make(canvases=1, steps=1, length=16)
        made.events, made.seconds, made.pieces = made.events[:1], made.seconds[:1], made.pieces[:1]
        for render, options in ((gif.render, Options()), (png.render, Options()), (png.render, Options(plot=True))):
            with pytest.raises(RecordingError):
                render(made, options)


class TestLimits:
    @pytest.mark.parametrize("render", [gif.render, png.render])
    def test_too_wide_is_refused_before_it_is_drawn(self, render: object, monkeypatch: pytest.MonkeyPatch) -> None:
        made = recordings.make(canvases=1, steps=2, length=16)
        for module in (gif, png):
            monkeypatch.setattr(module, "drawn", lambda *_: pytest.fail("drawn"))
        with pytest.raises(RecordingError, match="too wide") as caught:
            render(made, Options(width=10**9))  # type: ignore[operator]
        assert "--width" in caught.value.fix

    def test_too_many_cells_are_refused_before_they_are_drawn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = recordings.make(canvases=2, steps=300, length=8)
        made.header = replace(made.header, canvas_length=65_536)
        monkeypatch.setattr(gif, "drawn", lambda *_: pytest.fail("drawn"))
        with pytest.raises(RecordingError, match="too large") as caught:
            gif.render(made, Options())
        assert "--canvas" in caught.value.fix
        made.header = replace(made.header, canvas_length=5000)
        gif._bounded(made, Options(canvas=1), 80, gif.MOST_ROWS)  # half of what is too much
        with pytest.raises(RecordingError):
            gif._bounded(made, Options(), 80, gif.MOST_ROWS)

    def test_two_thousand_steps_or_a_canvas_of_4096_are_not(self) -> None:
        made = recordings.make(canvases=1, steps=2, length=8)
        for steps, length in ((2000, 256), (48, 4096)):
            made.header = replace(made.header, canvas_length=length)
            step = next(event for event in made.events if isinstance(event, StepDone))
            made.events = [replace(step, step=i) for i in range(steps)]
            gif._bounded(made, Options(), 80, gif.MOST_ROWS)

    def test_an_image_too_large_is_refused(self) -> None:
        with pytest.raises(RecordingError, match="too large") as caught:
            Sheet(1000, 2000, [], "dark", png.FONT)
        assert "--width" in caught.value.fix

    def test_a_canvas_of_4096_positions(self) -> None:
        made = recordings.make(canvases=1, steps=2, length=4096)
        image, _seconds = frames(gif.render(made, Options()))[0]
        assert image.height <= (gif.MOST_ROWS + 3) * Face(gif.FONT).height
        assert opened(png.render(made, Options(step=1))).height > image.height


class TestPillow:
    @pytest.mark.parametrize("options", [Options(), Options(plot=True)])
    def test_without_it_the_cure_is_said(self, options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
        made = recordings.make(canvases=1, steps=2, length=16)
        monkeypatch.setitem(sys.modules, "PIL", None)
        for name in [name for name in sys.modules if name.startswith("PIL.")]:
            monkeypatch.setitem(sys.modules, name, None)
        for render in (gif.render, png.render):
            with pytest.raises(RecordingError) as caught:
                render(made, options)
            assert caught.value.fix == "pip install 'dgemma[gif]'" and "Pillow" in caught.value.what

    def test_it_is_imported_only_to_draw(self) -> None:
        code = (
            "import sys, dgemma_local.ui.export.gif, dgemma_local.ui.export.png\n"
            "assert not {'PIL', 'torch', 'numpy'} & set(sys.modules)"
        )
        subprocess.run([sys.executable, "-c", code], check=True)
