"""`dgemma`: flags in, one call, a front end out.

Heavy imports wait inside the commands, so that `--help` is instant. Errors end in one place, `Commands.invoke`.
"""

import errno
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from enum import StrEnum
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from dgemma_local import __version__
from dgemma_local.errors import BROKEN_PIPE, INTERRUPTED, DgemmaError, UsageError

if TYPE_CHECKING:
    from dgemma_local.session import Session
    from dgemma_local.ui.canvas import Vocabulary

LARGEST_SEED = (1 << 64) - 1
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Dtype(StrEnum):
    """What the weights are computed in."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Commands(TyperGroup):
    """Every command runs in here, and what it raises becomes two lines and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            found = super().invoke(ctx)
            sys.stdout.flush()
            return found
        except DgemmaError as error:
            typer.echo(f"error: {_line(error.what)}\n  fix: {_line(error.fix)}", err=True)
            code = error.exit_code
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            code = INTERRUPTED
        except BrokenPipeError:
            _abandon_output()
            code = BROKEN_PIPE
        except OSError as error:
            if error.errno not in _FULL:
                raise
            _abandon_output()
            typer.echo(
                f"error: the output cannot be written: {error.strerror}\n  fix: make room, or write elsewhere", err=True
            )
            code = DgemmaError.exit_code
        raise typer.Exit(code)


app = typer.Typer(
    name="dgemma",
    cls=Commands,
    help="DiffusionGemma on one consumer GPU, every denoising step in view.",
    epilog="Exit codes: 2 flags, 3 prompt, 4-7 model files, 8 NaN, 9 no answer, 130 Ctrl-C, 141 closed pipe.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dgemma {__version__}")
        raise typer.Exit


@app.callback()
def dgemma(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...


@app.command()
def version() -> None:
    """Show the version."""
    typer.echo(f"dgemma {__version__}")


@app.command()
def models() -> None:
    """List the models in the table, and which of them are on this machine."""
    from dgemma_local.registry import table
    from dgemma_local.ui.models import show_models

    show_models(table().values(), sys.stdout)


@app.command()
def run(
    file: Annotated[str | None, typer.Argument(metavar="FILE", help="Prompt file in UTF-8; - is stdin.")] = None,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="The prompt itself.")] = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System turn before it.")] = None,
    model: Annotated[
        str,
        typer.Option(
            "-m",
            "--model",
            metavar="NAME",
            help="A name from `dgemma models`, or a folder. The demo is the default while published checkpoints cannot be fetched by dgemma.",
        ),
    ] = "demo",
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="N", help="The same seed, the same answer. Default: random, and shown."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, metavar="N", help="Thought and answer together.")
    ] = 1024,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", min=1, max=4096, metavar="N", help="Denoising steps a canvas, at most. Default: the model's."
        ),
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option("--dtype", help="Compute in this. Default: as stored.")] = None,
    think: Annotated[bool, typer.Option("--think", help="Let the model think first.")] = False,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End the answer before this; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Every event as one JSON object a line.")] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Counts and timings on stderr; with --json in every event.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the answer, errors and the demo's label.")] = False,
    visualize: Annotated[
        bool, typer.Option("--visualize", help="Show the canvas while it settles, on stderr.")
    ] = False,
    slow: Annotated[
        float,
        typer.Option(
            "--slow", min=0, max=60, metavar="SECONDS", help="With --visualize: show a step at least so long."
        ),
    ] = 0.0,
) -> None:
    """Answer one prompt.

    The answer alone goes to stdout and ends in one newline.

    Thoughts (dimmed), tool calls, the seed and notices go to stderr; --quiet drops them.
    """
    _check_flags(seed, stop or [], as_json=as_json, visualize=visualize, stats=stats, quiet=quiet, slow=slow)
    from dgemma_local.ui.prompt import check, read

    text = read(file, prompt)
    if system is not None:
        check(system, "--system")

    # torch comes in from here on, after the cheap checks
    from dgemma_local.channels import AnswerDecoder, opens_channel
    from dgemma_local.session import open_session, timed
    from dgemma_local.tokens import Message
    from dgemma_local.ui import Record, Start, Wanted, show

    session = open_session(model, dtype.value if dtype else None)
    seed = secrets.randbits(64) if seed is None else seed
    messages = [Message(role="system", content=system)] if system is not None else []
    messages.append(Message(role="user", content=text))
    events = session.answer(messages, seed=seed, max_tokens=max_tokens, steps=steps, thinking=think, stop=stop or ())
    start = Start(
        model=session.name,
        demo=session.is_demo,
        seed=seed,
        max_tokens=max_tokens,
        steps=steps or session.steps,
        canvas_length=session.canvas_length,
    )
    inside = opens_channel(session.tokenizer.prompt(messages, thinking=think), session.tokenizer.special)
    record = Record(start, AnswerDecoder(session.tokenizer, open_channel=inside), withheld=_reach(stop or []))
    wanted = Wanted(as_json=as_json, visualize=visualize, stats=stats, quiet=quiet, slow=slow)
    show(timed(events), record, _vocabulary(session), wanted)
    if record.interrupted:
        raise typer.Exit(INTERRUPTED)
    record.require_answer()


def _vocabulary(session: "Session") -> "Vocabulary":
    """How a view draws this model's tokens: control tokens and unused ids are a dot, not their names."""
    from dgemma_local.ui.canvas import CONTROL, Vocabulary

    tokenizer = session.tokenizer

    def glyph(token: int) -> str:
        piece = tokenizer.piece(token)
        return CONTROL if tokenizer.is_control(token) or piece.startswith("<unused") else piece

    return Vocabulary(glyph=glyph, ends=frozenset(session.generation.end_ids))


def _reach(stop: Sequence[str]) -> int:
    """Tokens at the end of a text that may turn out to begin a stop string: one a byte, and not the whole of it."""
    return max((len(text.encode(errors="replace")) - 1 for text in stop), default=0)


def _check_flags(
    seed: int | None, stop: list[str], *, as_json: bool, visualize: bool, stats: bool, quiet: bool, slow: float
) -> None:
    """Raises UsageError for flags that contradict each other, would do nothing, or are out of range."""
    if seed is not None and not 0 <= seed <= LARGEST_SEED:
        raise UsageError(f"the seed {seed} is out of range", f"give a whole number from 0 to {LARGEST_SEED}")
    if as_json and visualize:
        raise UsageError("--json and --visualize exclude each other", "drop one of them")
    if quiet and visualize:
        raise UsageError("--quiet keeps stderr empty, and --visualize draws there", "drop one of them")
    if quiet and stats and not as_json:
        raise UsageError("--quiet keeps stderr empty, and --stats writes there", "drop one of them, or add --json")
    if slow and not visualize:
        raise UsageError("--slow has nothing to slow down", "add --visualize")
    if not all(stop):
        raise UsageError("a --stop string is empty", "give the text to stop at")


def _line(text: str) -> str:
    """One line that a terminal can be trusted with: paths and prompts may hold anything."""
    return "".join(sign if sign.isprintable() else "�" for sign in " ".join(text.split()))


def _abandon_output() -> None:
    """Nothing more can be written; the interpreter's own flush at exit must not find that out again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())


def _leave(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def main() -> None:
    """The console script."""
    if sys.stderr is None:  # closed by the caller, as is stdout below
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - for the life of the process
    if sys.stdout is None:
        sys.exit(BROKEN_PIPE)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP, and means it
            signal.signal(number, _leave)  # by way of an exception: the cursor comes back
    app()
