"""`dgemma`: flags in, one call, a front end out.

Heavy imports wait inside the commands, so that `--help` is instant. Errors end in one place, `Commands.invoke`.
"""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dgemma_local import __version__
from dgemma_local.cli_bench import bench
from dgemma_local.cli_models import app_models, pull
from dgemma_local.cli_replay import replay
from dgemma_local.cli_run import run
from dgemma_local.errors import INTERRUPTED, DgemmaError, UsageError
from dgemma_local.streams import lost, prepare, say

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
    epilog="Exit codes: 1 output not written, 2 flags, 3 prompt, 4-7 model files, 8 NaN, 9 no answer, 10 download, 11 memory, 12 kernel crash, 13-14 bench, 15 recording, 130 Ctrl-C, 141 closed pipe, 143 terminated.",
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
app.command()(run)
app.command()(replay)
app.command()(pull)
app.command()(bench)


def _line(text: str) -> str:
    """One line that a terminal can be trusted with: paths and prompts may hold anything."""
    line = "".join(sign if sign.isprintable() else "�" for sign in " ".join(text.split()))
    return line if len(line) <= LONGEST_LINE else line[: LONGEST_LINE - 1] + "…"


def main() -> None:
    """The console script."""
    prepare()  # being ended is an exception, too: the cursor comes back
    try:
        app()
    except OSError as error:  # of what click writes itself, such as --help
        sys.exit(lost(error))
