"""`dgemma`: flags in, one call, a front end out.

Heavy imports wait inside the commands, so that `--help` is instant. Errors end in one place, `Commands.invoke`.
"""

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dgemma_local import __version__, logs, preferences
from dgemma_local.cli_bench import bench
from dgemma_local.cli_chat import chat
from dgemma_local.cli_config import completion, config
from dgemma_local.cli_doctor import doctor
from dgemma_local.cli_help import PAGES
from dgemma_local.cli_models import app_models, pull
from dgemma_local.cli_page import JSON, Page, dress
from dgemma_local.cli_replay import replay
from dgemma_local.cli_run import end_in_json, json_asked, run
from dgemma_local.errors import INTERRUPTED, OTHER_WORDS, DgemmaError, DoesNotFit, UsageError, kinds
from dgemma_local.streams import Ended, begun, ending, lost, ours, prepare, say

LONGEST_LINE = 400  # characters of an error
LOGGED = frozenset({"run", "chat", "bench"})  # commands that write to DGEMMA_LOG; the others do without it


_UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # click's, of which typer carries a copy of its own


class Commands(TyperGroup):
    """Every command runs in here, and what it raises becomes two lines and an exit code."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        dress(self, PAGES)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """With the user's own defaults, once it is known for which command."""
        found = super().resolve_command(ctx, args)
        if found[0] not in preferences.WITHOUT and not ctx.resilient_parsing:
            try:
                if found[0] in LOGGED:
                    logs.start()
                ctx.default_map = preferences.defaults(self)
            except DgemmaError:
                if not {"-h", "--help"} & {*args}:  # help is given whatever the file says
                    raise
            finally:
                if found[0] == "run":
                    ctx.meta[JSON] = json_asked(found[1], found[2], ctx)
        return found

    def invoke(self, ctx: Any) -> Any:
        try:
            try:
                begun()
                found = super().invoke(ctx)
            finally:
                logs.stop()  # what was held back stands before an error
            sys.stdout.flush()
            return found
        except _UsageError as error:
            if not error.args or type(error).__name__ == "NoArgsIsHelpError":
                raise
            raise self._failed(ctx, UsageError(*_usage(error, ctx))) from None
        except DgemmaError as error:
            raise self._failed(ctx, error) from None
        except KeyboardInterrupt as error:
            ending()
            say("interrupted")
            raise self._ended(ctx, error, INTERRUPTED) from None
        except Ended as error:
            ending()
            raise self._ended(ctx, error, error.exit_code) from None
        except MemoryError:
            raise self._failed(ctx, DoesNotFit("memory ran out", "end what else holds it, or ask for less")) from None
        except OSError as error:
            if ours(error):
                raise typer.Exit(lost(error)) from None
            where = "" if error.filename is None else f": {error.filename}"
            what = f"the system refuses: {error.strerror or error}{where}"
            raise self._failed(ctx, DgemmaError(what, "make room, or see to the file or disk that is named")) from None
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:  # a fault of ours: its traceback is what a report needs
            self._ended(ctx, error, 1)
            raise

    def _failed(self, ctx: Any, error: DgemmaError) -> typer.Exit:
        """Says it in two lines."""
        say(f"error: {_line(error.what)}\n  fix: {_line(error.fix)}")
        return self._ended(ctx, error, error.exit_code)

    def _ended(self, ctx: Any, error: BaseException, code: int) -> typer.Exit:
        """The end of the process, said in --json, too."""
        return typer.Exit(end_in_json(error, code) if ctx.meta.get(JSON) else code)


def _usage(error: Any, ctx: Any) -> tuple[str, str]:
    """What Typer found, and how to cure it."""
    where = getattr(error, "ctx", None) or ctx
    what = getattr(error, "format_message", error.__str__)()
    parameter = getattr(error, "param", None)
    source = None if parameter is None else where.get_parameter_source(parameter.name)
    if parameter is not None and source is not None and source.name == "ENVIRONMENT":
        return f"the variable {parameter.envvar}: {what}", "correct the variable, or unset it"
    return what, f"`{where.command_path} --help` lists what can be given"


def _codes() -> str:
    """Every exit code and its word, in order."""
    words = {kind.exit_code: kind.word for kind in kinds()} | OTHER_WORDS
    return ", ".join(f"{code} {word}" for code, word in sorted(words.items()))


app = typer.Typer(
    name="dgemma",
    cls=Commands,
    help="DiffusionGemma on one consumer GPU, every denoising step in view.",
    epilog="Begin with `dgemma run examples/sudoku.txt --visualize`, or `dgemma chat`; every command's --help has examples.\n\n"
    f"Exit codes: {_codes()}.",
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


@app.command(cls=Page)
def version() -> None:
    """Show the version."""
    typer.echo(f"dgemma {__version__}")


app.add_typer(app_models, name="models")
app.command(cls=Page)(run)
app.command(cls=Page)(chat)
app.command(cls=Page)(replay)
app.command(cls=Page)(pull)
app.command(cls=Page)(bench)
app.command(cls=Page)(doctor)
app.command(cls=Page)(config)
app.command(cls=Page)(completion)


def _line(text: str) -> str:
    """One line that a terminal can be trusted with: paths and prompts may hold anything."""
    line = "".join(sign if sign.isprintable() else "�" for sign in " ".join(text.split()))
    return line if len(line) <= LONGEST_LINE else line[: LONGEST_LINE - 1] + "…"


def main() -> None:
    """The console script."""
    prepare()  # being ended is an exception, too: the cursor comes back
    if "_DGEMMA_COMPLETE" in os.environ:  # a shell asks: `dgemma completion`
        from typer.completion import completion_init  # type: ignore[attr-defined]  # not in its __all__

        completion_init()
    try:
        app()
    except OSError as error:  # of what click writes itself, such as --help
        sys.exit(lost(error))
