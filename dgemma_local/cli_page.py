"""What every command of the command line has: a help page, defaults of the user's, and rules of what goes with what.

Page      a command: `--no-FLAG` takes back a flag that the user's defaults turn on; a default gives way to a flag
Help      what its help says behind the options, and those rules
dress     gives each command of a group its Help and each option its variable
"""

import math
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import typer
from typer.core import TyperCommand

from dgemma_local.errors import BROKEN_PIPE, INTERRUPTED, OTHER_WORDS, DgemmaError, UsageError
from dgemma_local.logs import log
from dgemma_local.preferences import WITHOUT, file, leaves, options, variable
from dgemma_local.toml_file import written

WIDEST = 100  # cells of a line of prose
JSON = "dgemma.json"  # in a context's meta, for `run` alone: whether its --json counts
_RANK = ("DEFAULT", "DEFAULT_MAP", "ENVIRONMENT", "COMMANDLINE")  # click's names of where a value comes from
_FLAG = _RANK.index("COMMANDLINE")
_ABOUT_A_FLAG = re.compile(r"(?<![\w-])--?[a-z]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Help:
    """What a command's page says behind its options.

    exclusive: pairs of parameters of which the one from the weaker source gives way; both from one source stay, for the
    command to refuse. needs: a parameter that does nothing without one of those others: as a default it is idle then.
    terminal: parameters that are idle, as a default, where stderr is none and no flag needs them. less: pairs of numbers,
    the first below the second. at_most: numbers that, as a default, are what there is where there is less (`fit.AtMost`).
    Whatever else the command refuses beside a flag gives way to it, too: its own error says what (`_yielding`).
    """

    examples: Sequence[str]
    output: str  # what goes to stdout, what to stderr
    errors: Sequence[type[DgemmaError]] = ()
    endings: Sequence[int] = ()  # other exit codes
    environment: str = ""  # variables other than those of its options
    panels: Mapping[str, str] = field(default_factory=dict)  # the heading over each group of options -> their names
    exclusive: Sequence[tuple[str, str]] = ()
    needs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    terminal: Sequence[str] = ()
    less: Sequence[tuple[str, str]] = ()
    at_most: Sequence[str] = ()
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
        """Defaults that a flag overrules, or that have nothing to act on, are what is built in.

        So is one that the command refuses beside something stronger, before it has begun: it is then asked again.
        """
        if self.page is not None:
            for parameter in _idle(ctx, self.page):
                ctx.params[parameter] = _built_in(self, parameter)
            for parameter in self.page.at_most:
                if ctx.params[parameter] is not None and _rank(ctx, parameter) < _FLAG:
                    ctx.params[parameter] = _at_most(ctx.params[parameter])
        while True:
            if JSON in ctx.meta:
                ctx.meta[JSON] = ctx.params["as_json"]  # which may have given way
            try:
                return super().invoke(ctx)
            except DgemmaError as error:
                yielding = _yielding(self, ctx, error) if isinstance(error, UsageError) else ()
                if not yielding:
                    _tell_origin(self, ctx, error)
                    raise
            for parameter, name in options(self):
                if parameter.name in yielding:
                    log.info("%-9s without --%s, a default that gives way", "again", name)
                    ctx.params[parameter.name] = _built_in(self, parameter.name)


def _at_most(number: int) -> int:
    from dgemma_local.fit import AtMost

    return AtMost(number)


def _named(command: Any, error: DgemmaError) -> Iterable[tuple[Any, str]]:
    """The options that an error is about: it names them, or dropping one is its cure."""
    for parameter, name in options(command):
        if _names(error.what, name) or _names(error.fix, name, before=r"\bdrop "):
            yield parameter, name


def _names(text: str, name: str, *, before: str = "") -> bool:
    """Whether a text has --name in it, behind what the pattern `before` finds."""
    return re.search(rf"{before}(?<![\w-])--{re.escape(name)}(?![\w-])", text) is not None


def _rank(ctx: Any, parameter: str) -> int:
    source = ctx.get_parameter_source(parameter)
    return 0 if source is None else _RANK.index(source.name)


def _yielding(command: Any, ctx: Any, error: UsageError) -> Sequence[str]:
    """Of the options that an error names, the defaults of the weakest source.

    None where one source contradicts itself, or the error quotes the value of the only option that it names.
    """
    named = {parameter.name: name for parameter, name in _named(command, error)}
    ranks = {each: _rank(ctx, each) for each in named if ctx.params[each] != _built_in(command, each)}
    weakest = min(ranks.values(), default=_FLAG)
    found = [each for each, rank in ranks.items() if rank == weakest]
    contradicts_itself = len(found) == len(ranks) > 1
    values = [f"--{name} {ctx.params[each]}" for each, name in named.items()]
    about_its_value = len(values) == 1 and values[0] in error.what
    return [] if weakest in (0, _FLAG) or contradicts_itself or about_its_value else found


def _tell_origin(command: Any, ctx: Any, error: DgemmaError) -> None:
    """Adds to an error where what it is about is set, if not on the command line; and a cure for there, if its own
    names a flag that nobody gave. Where its cure alone names an option, that is to be given, and stays.
    """
    about = {parameter.name: (parameter, name) for parameter, name in _named(command, error)}
    about |= {
        each.name: (each, name) for each, name in options(command) if _quotes(error.what, ctx.params.get(each.name))
    }
    fix = re.sub("`[^`]*`", "", error.fix)  # without whole commands
    to_give = {
        each.name: (each, name)
        for each, name in options(command)
        if _names(fix, name) and ctx.params[each.name] != _built_in(command, each.name)
    }
    found = {each: _origin(command, ctx, *option) for each, option in (about | to_give).items()}
    origins = [told[0] for told in found.values() if told]
    cures = [told[1] for each, told in found.items() if told and each in about]
    if not origins:
        return
    error.what += f" ({'; '.join(origins)})"
    given = any(_rank(ctx, parameter) == _FLAG for parameter in about)
    if cures and not given and _ABOUT_A_FLAG.search(fix):
        error.fix = "; or ".join(cures)


def _origin(command: Any, ctx: Any, parameter: Any, name: str) -> tuple[str, str] | None:
    """Where a default is set, and a cure for there; None: a flag, or built in."""
    key = ".".join((*command.words, name))
    if _rank(ctx, parameter.name) == _RANK.index("DEFAULT_MAP"):
        return f"{key} is set in {file()}", f"correct {key}, or take it out by `dgemma config {key} --unset`"
    if _rank(ctx, parameter.name) == _RANK.index("ENVIRONMENT"):
        return f"--{name} is set by {parameter.envvar}", f"correct {parameter.envvar}, or unset it"
    return None


def _quotes(what: str, value: object) -> bool:
    """Whether an error quotes a text, or names something in the folder that it is."""
    return isinstance(value, str) and value != "" and (repr(value) in what or what.startswith(f"{value}/"))


def _idle(ctx: Any, page: Help) -> Iterable[str]:
    """The defaults that are: a default that a flag needs is as firm as that flag."""
    dropped: set[str] = set()
    needed: set[str] = set()

    def rank(parameter: str) -> int:
        return _FLAG if parameter in needed else _rank(ctx, parameter)

    def given(parameter: str) -> bool:
        return parameter not in dropped and rank(parameter) > 0 and ctx.params[parameter] not in (None, False, [], ())

    drawn = sys.stderr is not None and sys.stderr.isatty()
    needed |= {each for flag, others in page.needs.items() if given(flag) and rank(flag) == _FLAG for each in others}
    dropped |= {each for each in page.terminal if given(each) and rank(each) < _FLAG and not drawn}
    for one, other in page.exclusive:
        if given(one) and given(other) and rank(one) != rank(other):
            dropped.add(min(one, other, key=rank))
    dropped |= {one for one, other in page.yields if given(one) and given(other) and rank(one) < rank(other)}
    for parameter, others in page.needs.items():
        if given(parameter) and rank(parameter) < _FLAG and not any(map(given, others)):
            dropped.add(parameter)
    return dropped


def check_together(group: Any, said: Mapping[str, Any], key: str) -> None:
    """said: what a file is to say, by key. Raises UsageError where `key` and another of them contradict each other."""
    command = dict(leaves(group)).get((*key.split(".")[:-1],))
    if not isinstance(command, Page) or command.page is None:
        return
    page = command.page
    keys = {parameter.name: ".".join((*command.words, name)) for parameter, name in options(command)}
    given = {name: said[each] for name, each in keys.items() if said.get(each) not in (None, False, [])}
    pairs = [
        *page.exclusive,
        *((one, other) for one, other in page.less if given.get(one, 0) >= given.get(other, math.inf)),
    ]
    for one, other in pairs:
        if key in (keys.get(one), keys.get(other)) and one in given and other in given:
            mine, theirs = (one, other) if key == keys[one] else (other, one)
            raise UsageError(
                f"{key} = {written(given[mine])} contradicts {keys[theirs]} = {written(given[theirs])}",
                f"`dgemma config {keys[theirs]} --unset` first",
            )


def contradictions(group: Any, said: Mapping[str, Any]) -> Iterable[UsageError]:
    """Of a file that was written by hand, each one once."""
    left = dict(said)
    for key in said:
        try:
            check_together(group, left, key)
        except UsageError as error:
            yield error
        del left[key]


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
            if parameter.multiple:
                parameter.value_from_envvar = partial(_a_line_each, parameter)
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


def _a_line_each(parameter: Any, ctx: Any) -> Sequence[str] | None:
    """A variable's list: a text may have spaces in it, so one stands on each line."""
    given = parameter.resolve_envvar_value(ctx)
    return None if given is None else [line for line in given.split("\n") if line]


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
