"""`dgemma replay`: flags in, a recording behind them; played, exported, or the past of one position."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Annotated

import typer

from dgemma_local.cli_view import Theme, WithDraft, WithTheme, WithView
from dgemma_local.errors import RecordingError, UsageError

if TYPE_CHECKING:
    from dgemma_local.recording import Recording
    from dgemma_local.ui import palette
    from dgemma_local.ui.export import Options

STDIN = "-"
MOVING = (".svg", ".html", ".cast", ".gif")
NEEDS = {  # flags, and the exports in which each does something
    "--plot": (".png",),
    "--at": (".png", ".txt", ".html"),
    "--width": (".svg", ".cast", ".gif", ".png", ".txt"),  # a page takes the width and the ground of its reader
    "--theme": (".svg", ".cast", ".gif", ".png"),
    "--speed": MOVING,
    "--slow": MOVING,
}
ONLY_EXPORTED = ("--plot", "--at", "--width")  # and nothing in the player
PLOT_HAS_NONE = ("--width", "--view", "--draft")  # it is of one size, and of numbers alone
PATIENCE = 1.0  # seconds after which it is said what is waited for
RANGES = (("--speed", 0.25, 16), ("--slow", 0, 60), ("--width", 20, 400))  # times, seconds, cells


def replay(
    file: Annotated[str, typer.Argument(metavar="FILE", help="What --record wrote; - is stdin.")],
    exports: Annotated[
        list[Path] | None,
        typer.Option(
            "--export", metavar="OUT", help="Write .svg .html .cast .gif .png or .txt instead; may be repeated."
        ),
    ] = None,
    plot: Annotated[
        bool, typer.Option("--plot", help="With --export OUT.png: entropy and acceptance over the steps.")
    ] = False,
    canvas: Annotated[
        int | None, typer.Option("--canvas", metavar="N", help="This canvas alone; the player begins with it.")
    ] = None,
    at: Annotated[
        int | None,
        typer.Option(
            "--at", metavar="STEP", help="With --export OUT.png or OUT.txt: this step alone; an OUT.html opens at it."
        ),
    ] = None,
    position: Annotated[
        int | None, typer.Option("--position", metavar="N", help="Say what became of this position, and play nothing.")
    ] = None,
    view: WithView = None,
    draft: WithDraft = None,
    theme: WithTheme = None,
    speed: Annotated[
        float | None, typer.Option("--speed", metavar="X", help="So many times as fast: 0.25 to 16.")
    ] = None,
    slow: Annotated[
        float | None, typer.Option("--slow", metavar="SECONDS", help="Show a step so long. Default: 0.4.")
    ] = None,
    width: Annotated[int | None, typer.Option("--width", metavar="N", help="With --export: cells of a row.")] = None,
) -> None:
    """Play a recording: ? lists the keys.

    Needs no model. The answer stays on the screen; where stdout is no terminal, the answer alone goes to it.
    """
    if len({os.path.realpath(path) for path in exports or []}) < len(exports or []):
        raise UsageError("the same file is to be exported twice", "name each --export once")
    looks = {"--view": view, "--draft": draft, "--theme": theme, "--speed": speed, "--slow": slow}
    _check(exports or [], {"--plot": plot or None, "--at": at, "--width": width, "--position": position, **looks})
    for path in exports or []:
        if _is_same(file, path):
            raise UsageError(f"{path} is the recording itself", "give another file to --export")
    with _said("reading"):
        recording = _opened(file)
    if recording.notice is not None:
        from dgemma_local.ui.terminal import stderr

        stderr().say(recording.notice)
    _check_within(recording, canvas, at, position)
    if position is not None:
        from dgemma_local.ui.past import tell

        tell(recording, (canvas or 1) - 1, position - 1)
    elif exports:
        from dgemma_local.ui.export import STEP_SECONDS, Options

        options = Options(
            theme=_theme(theme) if theme else "dark",
            view=view.value if view else "text",
            draft=draft.value if draft else "canvas",
            width=width,
            canvas=canvas,
            step=at,
            seconds=(STEP_SECONDS if slow is None else slow) / (speed or 1.0),
            plot=plot,
        )
        _export(recording, exports, options)
    else:
        from dgemma_local.ui.player import PAUSE, Player
        from dgemma_local.ui.replay import show
        from dgemma_local.ui.tape import Tape

        tape = Tape(recording)
        player = Player(
            tape=tape,
            pause=PAUSE if slow is None else slow,
            speed=speed or 1.0,
            view=view.value if view else "text",
            draft=draft.value if draft else "canvas",
            theme=_theme(theme),
            step=tape.firsts[canvas - 1] if canvas else 0,
        )
        show(player)


def _theme(wish: Theme | None) -> "palette.Theme":
    from dgemma_local.ui.paint import theme

    return theme(wish.value if wish else "auto")


def _check(exports: Sequence[Path], given: Mapping[str, object]) -> None:
    """Raises UsageError for flags that contradict each other, would do nothing, or are out of range."""
    flags = {name for name, value in given.items() if value is not None}
    for name, least, most in RANGES:
        value = given[name]
        if isinstance(value, int | float) and not least <= value <= most:  # nan is within nothing
            raise UsageError(f"{name} {value} is out of range", f"give {least:g} to {most:g}")
    if exports and "--position" in flags:
        raise UsageError("--export and --position exclude each other", "drop one of them")
    if {"--plot", "--at"} <= flags:
        raise UsageError("--plot shows every step, and --at one", "drop one of them")
    if "--plot" in flags and all(path.suffix.lower() == ".png" for path in exports):
        for name in PLOT_HAS_NONE:
            if name in flags and exports:
                raise UsageError(f"--plot shows no canvas, so that {name} has no effect", "drop one of them")
    for name in sorted(flags & {"--view", "--draft", "--theme", "--speed", "--slow"}):
        if "--position" in flags:
            raise UsageError(f"--position plays nothing, so that {name} has no effect", "drop one of them")
    for name, suffixes in NEEDS.items():
        wanted = " or ".join(f"--export OUT{suffix}" for suffix in suffixes)
        useful = any(path.suffix.lower() in suffixes for path in exports)
        if name in flags and not useful and (exports or name in ONLY_EXPORTED):
            raise UsageError(f"{name} has nothing to act on", f"add {wanted}, or drop it")


def _check_within(recording: "Recording", canvas: int | None, at: int | None, position: int | None) -> None:
    """Raises RecordingError where there is no step to look at, UsageError where a number leads out of the recording."""
    canvases = recording.canvases
    if not canvases:
        raise RecordingError("there is no denoising step in the recording", "record a run that takes at least one")
    _within("--canvas", canvas, len(canvases))
    if at is not None and canvas is None and len(canvases) > 1:
        raise UsageError(f"--at {at} is in each of {len(canvases)} canvases", f"add --canvas 1 to {len(canvases)}")
    _within("--at", at, max(map(len, canvases if canvas is None else [canvases[canvas - 1]])))
    _within("--position", position, recording.header.canvas_length)


def _within(name: str, number: int | None, most: int) -> None:
    if number is not None and not 1 <= number <= most:
        raise UsageError(f"{name} {number} is not in the recording", f"give 1 to {most}" if most > 1 else "give 1")


def _is_same(file: str, path: Path) -> bool:
    """Whether an export would replace what is read."""
    try:
        read = os.fstat(sys.stdin.fileno()) if file == STDIN else Path(file).stat()
        return os.path.samestat(read, path.stat())
    except (AttributeError, OSError, ValueError):  # no stdin, no such file, no name of one
        return False


@contextmanager
def _said(what: str) -> Iterator[None]:
    """On a terminal, what is being done, where it takes a while."""
    from dgemma_local.ui.terminal import stderr

    terminal = stderr()
    waiting = Timer(PATIENCE, terminal.say, [f"{what} …"])
    waiting.daemon = True
    if terminal.is_terminal:
        waiting.start()
    try:
        yield
    finally:
        waiting.cancel()


def _opened(file: str) -> "Recording":
    """The recording, up to where it is damaged. Raises RecordingError."""
    from dgemma_local.recording import open_recording
    from dgemma_local.recording.read import read

    if file != STDIN:
        recording = open_recording(Path(file))
    elif sys.stdin is None or sys.stdin.isatty():
        raise RecordingError(
            "no recording comes from standard input", f"give a file, or pipe one into `replay {STDIN}`"
        )
    else:
        try:
            recording = read(sys.stdin.buffer, "standard input")
        except OSError as error:
            raise RecordingError(f"standard input cannot be read: {error.strerror}", "give a file") from None
    return recording


def _export(recording: "Recording", paths: Sequence[Path], options: "Options") -> None:
    from dgemma_local.ui.export import SUFFIXES, export
    from dgemma_local.ui.terminal import stderr

    for path in paths:  # before the first is written
        if path.suffix.lower() not in SUFFIXES:
            raise UsageError(f"{path} cannot be exported: its ending says no format", f"end it in {' '.join(SUFFIXES)}")
    for path in paths:
        has_steps = path.suffix.lower() in NEEDS["--at"]
        with _said(f"drawing {path}"):
            export(recording, path, options if has_steps else replace(options, step=None))
        stderr().say(f"wrote {path} ({max(1, round(path.stat().st_size / 1000))} KB)")
