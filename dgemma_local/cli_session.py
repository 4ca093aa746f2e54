"""What every command that answers makes of a session and its flags."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from dgemma_local import __version__
from dgemma_local.cli_flags import AUTO, Prefer
from dgemma_local.streams import say

if TYPE_CHECKING:
    from dgemma_local.recording import Recorder
    from dgemma_local.session import Session
    from dgemma_local.ui import Start
    from dgemma_local.ui.canvas import Vocabulary


def picked(model: str, prefer: Prefer | None, *, quiet: bool) -> str:
    """The model to open: what was asked, or what `auto` finds for this card."""
    from dgemma_local.auto import to_run

    if model != AUTO:
        return model
    name, why = to_run(quality=prefer is not None)
    if not quiet and why:
        say(why)
    return name


def vocabulary(session: "Session") -> "Vocabulary":
    """How a view draws this model's tokens."""
    from dgemma_local.ui.canvas import Vocabulary

    tokenizer = session.tokenizer
    return Vocabulary(text=tokenizer.piece, control=tokenizer.is_mark, ends=frozenset(session.generation.end_ids))


def recorder(
    path: Path | None, session: "Session", start: "Start", prompt: Sequence[int] | None, *, thinking: bool
) -> AbstractContextManager["Recorder | None"]:
    """Opens the recording that is asked for. prompt: ids; None: not recorded."""
    if path is None:
        return nullcontext()
    from dgemma_local.recording import Header, Recorder, Word

    header = Header(
        model=start.model,
        revision=session.revision,
        demo=start.demo,
        seed=start.seed,
        canvas_length=start.canvas_length,
        steps=start.steps,
        max_tokens=start.max_tokens,
        ends=tuple(session.generation.end_ids),
        prompt=None if prompt is None else tuple(prompt),
        settings={**session.settings, "thinking": thinking},
        dgemma=__version__,
    )
    tokenizer = session.tokenizer
    return Recorder(path, header, lambda token: Word(tokenizer.piece(token), tokenizer.is_mark(token)))


def reach(stop: Sequence[str]) -> int:
    """Tokens at the end of a text that may turn out to begin a stop string: one a byte, and not the whole of it."""
    return max((len(text.encode()) - 1 for text in stop), default=0)
