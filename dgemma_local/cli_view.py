"""How a canvas is looked at: flags that commands share."""

from enum import StrEnum
from typing import Annotated

import typer


class View(StrEnum):
    """What of a canvas is drawn."""

    text = "text"
    grid = "grid"
    both = "both"


class Draft(StrEnum):
    """What is drawn where nothing is accepted."""

    canvas = "canvas"
    argmax = "argmax"


class Theme(StrEnum):
    """The ground of the terminal."""

    auto = "auto"
    dark = "dark"
    light = "light"


WithView = Annotated[
    View | None, typer.Option("--view", help="text (default), grid: a cell a position, shaded by entropy; or both.")
]
WithDraft = Annotated[
    Draft | None,
    typer.Option(
        "--draft",
        help="At positions that are not accepted: the random token that is read next (canvas, the default) or the model's best guess.",
    ),
]
WithTheme = Annotated[Theme | None, typer.Option("--theme", help="Colours for this ground. Default: auto.")]
