"""`dgemma`: flags in, one call, a front end out.

Heavy imports wait inside the commands, so that `--help` is instant. Errors end in one place, `Commands.invoke`.
"""

import secrets
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from dgemma_local import __version__
from dgemma_local.cli_bench import Device, Dtype, bench
from dgemma_local.cli_models import AUTO, LARGEST_VRAM, Prefer, WithPrefer, app_models, pull
from dgemma_local.errors import INTERRUPTED, DgemmaError, UsageError
from dgemma_local.interrupts import import_torch
from dgemma_local.streams import lost, prepare, say

if TYPE_CHECKING:
    from dgemma_local.session import Session
    from dgemma_local.ui.canvas import Vocabulary

LARGEST_SEED = (1 << 64) - 1
LONGEST_LINE = 400  # characters of an error


_UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # click's, of which typer carries a copy of its own


class Commands(TyperGroup):
    """Every command runs in here, and what it raises becomes two lines and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            found = super().invoke(ctx)
            sys.stdout.flush()
            return found
        except _UsageError as error:
            if not error.args or type(error).__name__ == "NoArgsIsHelpError":
                raise
            where = getattr(error, "ctx", None) or ctx
            what = getattr(error, "format_message", error.__str__)()
            say(f"error: {_line(what)}\n  fix: `{where.command_path} --help` lists what can be given")
            code = UsageError.exit_code
        except DgemmaError as error:
            say(f"error: {_line(error.what)}\n  fix: {_line(error.fix)}")
            code = error.exit_code
        except KeyboardInterrupt:
            say("interrupted")
            code = INTERRUPTED
        except OSError as error:
            code = lost(error)
        raise typer.Exit(code)


app = typer.Typer(
    name="dgemma",
    cls=Commands,
    help="DiffusionGemma on one consumer GPU, every denoising step in view.",
    epilog="Exit codes: 1 output not written, 2 flags, 3 prompt, 4-7 model files, 8 NaN, 9 no answer, 10 download, 11 memory, 12 kernel crash, 13-14 bench, 130 Ctrl-C, 141 closed pipe, 143 terminated.",
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


app.add_typer(app_models, name="models")
app.command()(pull)
app.command()(bench)


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
            help="A name from `dgemma models`, or a folder. auto: the checkpoint for this card where it is fetched, else the demo.",
        ),
    ] = AUTO,
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
    device: Annotated[
        Device | None, typer.Option("--device", help="Default: the card if there is one; the demo runs on the CPU.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option("--context", min=1, metavar="N", help="Tokens of prompt and answer to plan for. Default: 8192."),
    ] = None,
    vram: Annotated[
        float | None,
        typer.Option(
            "--vram", min=0, max=LARGEST_VRAM, metavar="GB", help="Stay within so much. Default: what is free."
        ),
    ] = None,
    prefer: WithPrefer = None,
    fp8_attention: Annotated[
        bool, typer.Option("--fp8-attention", help="Hold 16-bit attention weights in FP8: 1.1 GB less.")
    ] = False,
    fp8_embedding: Annotated[
        bool, typer.Option("--fp8-embedding", help="Hold the embedding, which is the head, in FP8: 0.7 GB less.")
    ] = False,
    fp8_mlp: Annotated[
        bool,
        typer.Option("--fp8-mlp", help="Hold the dense MLP in FP8, multiplied at its rate: faster on a card."),
    ] = False,
    think: Annotated[bool, typer.Option("--think", help="Let the model think first.")] = False,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End the answer before this; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Every event as one JSON object a line.")] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Counts and timings on stderr; with --json in every event.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the answer, errors and the demo's label.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="What was loaded, on stderr: tensors, bytes, the plan, a checksum.")
    ] = False,
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
    if quiet and verbose:
        raise UsageError("--quiet keeps stderr empty, and --verbose writes there", "drop one of them")
    if prefer is not None and model != AUTO:
        raise UsageError("--prefer has nothing to choose from", "drop it, or -m")
    from dgemma_local.ui.prompt import check, read, utf8

    text = read(file, prompt)
    if system is not None:
        check(system, "--system")
    for each in stop or ():
        utf8(each, "--stop")

    import_torch()  # from here on, after the cheap checks
    from dgemma_local.channels import AnswerDecoder, opens_channel
    from dgemma_local.session import Wishes, open_session, timed
    from dgemma_local.tokens import Message
    from dgemma_local.ui import Record, Start, Wanted, loading, show

    wishes = Wishes(
        dtype=dtype.value if dtype else None,
        device=device.value if device else None,
        context=context,
        vram=vram,
        fp8_attention=fp8_attention,
        fp8_embedding=fp8_embedding,
        fp8_mlp=fp8_mlp,
        checksum=verbose,
        steps=steps,
    )
    with loading.progress(quiet=quiet) as progress:
        session = open_session(_picked(model, prefer, quiet=quiet), wishes, progress, say if not quiet else _nothing)
    if verbose:
        loading.show_proof(session.planned, session.proof, session.mode, session.words)
    elif session.slow_because is not None and session.on_gpu and not quiet:
        say(f"this runs in plain torch, many times slower than the fused kernels: {session.slow_because}")
    told = () if quiet else session.notices
    for notice in told:
        say(notice)
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
    inside = opens_channel(session.prompt(messages, thinking=think), session.tokenizer.special)
    reader = AnswerDecoder(session.tokenizer, open_channel=inside)
    record = Record(start, reader, withheld=_reach(stop or []), thinking=think)
    wanted = Wanted(
        as_json=as_json, visualize=visualize, stats=stats, quiet=quiet, slow=slow, hurry=session.pressed.is_set
    )
    show(timed(events), record, _vocabulary(session), wanted)
    for notice in () if quiet else session.notices[len(told) :]:  # of passes that were captured for this answer
        say(notice)
    if record.interrupted:
        raise typer.Exit(INTERRUPTED)
    record.require_answer()


def _picked(model: str, prefer: Prefer | None, *, quiet: bool) -> str:
    """The model to open: what was asked, or what `auto` finds for this card."""
    from dgemma_local.auto import to_run

    if model != AUTO:
        return model
    name, why = to_run(quality=prefer is not None)
    if not quiet and why:
        say(why)
    return name


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
    return max((len(text.encode()) - 1 for text in stop), default=0)


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
    line = "".join(sign if sign.isprintable() else "�" for sign in " ".join(text.split()))
    return line if len(line) <= LONGEST_LINE else line[: LONGEST_LINE - 1] + "…"


def _nothing(_: str) -> None:
    """What --quiet says."""


def main() -> None:
    """The console script."""
    prepare()  # being ended is an exception, too: the cursor comes back
    try:
        app()
    except OSError as error:  # of what click writes itself, such as --help
        sys.exit(lost(error))
