"""What every command of the command line has: a help page, defaults of the user's, and rules of what goes with what.

Page      a command: `--no-FLAG` takes back a flag that the user's defaults turn on; a default gives way to a flag
Help      what its help says behind the options, and those rules
dress     gives each command of a group its Help and each option its variable
"""

import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import typer
from typer.core import TyperCommand

from dgemma_local.errors import BROKEN_PIPE, INTERRUPTED, OTHER_WORDS, DgemmaError, UsageError
from dgemma_local.preferences import WITHOUT, file, leaves, options, variable

WIDEST = 100  # cells of a line of prose
_RANK = ("DEFAULT", "DEFAULT_MAP", "ENVIRONMENT", "COMMANDLINE")  # click's names of where a value comes from


@dataclass(frozen=True, slots=True, kw_only=True)
class Help:
    """What a command's page says behind its options.

    exclusive: pairs of parameters of which the one from the weaker source gives way; both from one source stay, for the
    command to refuse. needs: a parameter that does nothing without one of those others: as a default it is idle then.
    """

    examples: Sequence[str]
    output: str  # what goes to stdout, what to stderr
    errors: Sequence[type[DgemmaError]] = ()
    endings: Sequence[int] = ()  # other exit codes
    environment: str = ""  # variables other than those of its options
    panels: Mapping[str, str] = field(default_factory=dict)  # the heading over each group of options -> their names
    exclusive: Sequence[tuple[str, str]] = ()
    needs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    yields: Sequence[tuple[str, str]] = ()  # the first, from a weaker source, gives way to the second


class Page(TyperCommand):
    """A command whose defaults are the user's to set."""

    words: Sequence[str] = ()  # that name it: models show
    page: Help | None = None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Typer's page, and ours behind it: Typer would fold its lines, and take what is in brackets for markup."""
        super().format_help(ctx, formatter)
        if self.page is not None:
            typer.echo(behind(self.words, self.page, min(shutil.get_terminal_size().columns, WIDEST)))

    def make_parser(self, ctx: Any) -> Any:
        """With a hidden --no-FLAG for each flag that has no opposite yet."""
        parser = super().make_parser(ctx)
        taken = {name for parameter in self.params for name in parameter.opts}
        for parameter, name in options(self):
            opposite = f"--no-{name}"
            if getattr(parameter, "is_flag", False) and not parameter.secondary_opts and opposite not in taken:
                parser.add_option(
                    obj=parameter, opts=[opposite], dest=parameter.name, action="store_const", const=False
                )
        return parser

    def invoke(self, ctx: Any) -> Any:
        """Defaults that a flag overrules, or that have nothing to act on, are what is built in."""
        if self.page is not None:
            for parameter in _idle(ctx, self.page):
                ctx.params[parameter] = _built_in(self, parameter)
        try:
            return super().invoke(ctx)
        except UsageError as error:
            if said := "; ".join(_sources(self, ctx, error.what)):
                error.what += f" ({said})"
            raise


def _sources(command: Any, ctx: Any, what: str) -> Iterable[str]:
    """Of each option that an error names, where it is set if not on the command line."""
    for parameter, name in options(command):
        source = ctx.get_parameter_source(parameter.name)
        if source is None or not re.search(rf"(?<![\w-])--{re.escape(name)}(?![\w-])", what):
            continue
        if source.name == "DEFAULT_MAP":
            yield f"{'.'.join((*command.words, name))} is set in {file()}"
        elif source.name == "ENVIRONMENT":
            yield f"--{name} is set by {parameter.envvar}"


def _idle(ctx: Any, page: Help) -> Iterable[str]:
    def rank(parameter: str) -> int:
        source = ctx.get_parameter_source(parameter)
        return 0 if source is None else _RANK.index(source.name)

    def given(parameter: str) -> bool:
        return parameter not in dropped and rank(parameter) > 0 and ctx.params[parameter] not in (None, False, [], ())

    dropped: set[str] = set()
    for one, other in page.exclusive:
        if given(one) and given(other) and rank(one) != rank(other):
            dropped.add(min(one, other, key=rank))
    dropped |= {one for one, other in page.yields if given(one) and given(other) and rank(one) < rank(other)}
    for parameter, others in page.needs.items():
        if given(parameter) and rank(parameter) < _RANK.index("COMMANDLINE") and not any(map(given, others)):
            dropped.add(parameter)
    return dropped


def _built_in(command: Any, name: str) -> Any:
    parameter = next(each for each in command.params if each.name == name)
    clean = typer.Context(command)  # without the user's own defaults
    return parameter.process_value(clean, parameter.get_default(clean))


def dress(group: Any, pages: Mapping[str, Help]) -> None:
    """Gives every command of the group its page, and every option the variable that sets it."""
    for path, command in leaves(group):
        for parameter, name in options(command) if path[0] not in WITHOUT else ():
            parameter.envvar = variable(path, name)
            parameter.show_envvar = False  # one line says it of all
        page = pages.get(" ".join(path))
        if page is None:
            continue
        headings = {name: heading for heading, names in page.panels.items() for name in names.split()}
        for parameter in command.params:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""  # Typer would write <bool>
            parameter.rich_help_panel = headings.get(parameter.name, parameter.rich_help_panel)
        if isinstance(command, Page):
            command.words, command.page = path, page


def behind(path: Sequence[str], page: Help, width: int) -> str:
    """What stands behind the options, in lines of at most `width` cells; an example is never broken."""
    codes = [f"{kind.exit_code} {kind.word}" for kind in sorted(page.errors, key=lambda kind: kind.exit_code)]
    codes += [f"{code} {OTHER_WORDS[code]}" for code in (*page.endings, INTERRUPTED, BROKEN_PIPE)]
    parts = {"Output": page.output, "Exit codes": f"{', '.join(['0 done', *codes])}.", "Environment": page.environment}
    if path[0] not in WITHOUT:
        parts["Defaults"] = (
            f"every option has a variable, {variable(path, '…')}, and a key, {'.'.join(path)}.…, in config.toml: "
            "`dgemma config` shows them. --no-FLAG takes back a flag that is on there."
        )
    fill = partial(textwrap.fill, width=width, initial_indent=" ", subsequent_indent="   ", break_on_hyphens=False)
    lines = [fill(f"{name}: {text}") for name, text in parts.items() if text]
    return "\n".join([" Examples:", *(f"   {example}" for example in page.examples), "", *lines, ""])
