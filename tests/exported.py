"""Recordings to export, short, long and wide, and rows of them as lines of text."""

from typing import Any

import recordings

from dgemma_local.ui.export import cast, svg, txt

SVG = "{http://www.w3.org/2000/svg}"
SHORT = recordings.make(canvases=2, steps=4, length=32)
LONG = recordings.make(canvases=3, steps=40, length=16)
WIDE = recordings.make(canvases=1, steps=4, length=128)
TEXTS = {".svg": svg.render, ".cast": cast.render, ".txt": txt.render}


def plain(rows: list[Any]) -> list[str]:
    lines = ["".join(text for text, _ink in row).rstrip() for row in rows]
    return lines[: max(n for n, line in enumerate(lines, 1) if line)]
