"""A user's own defaults, for every option of every command: from a file, and from the environment.

    dgemma run --steps 24         a flag
    DGEMMA_RUN_STEPS=24           a variable: the command and the option, in capitals
    [run]                         a file in TOML: a table a command, a key an option
    steps = 24

A flag goes before a variable, that before the file, that before what is built in. What the file may say is read off the
commands themselves, and so is every check: a new option is a new key.
"""

import codecs
import difflib
import math
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import typer

from dgemma_local import toml_file
from dgemma_local.errors import ConfigError, DgemmaError, UsageError
from dgemma_local.registry import RESERVED, expand, user_folder
from dgemma_local.toml_file import edited, written

BUILT_IN = "built in"
# Of one run alone: what it reads, where it writes, what is agreed to.
ONCE = frozenset(
    "--help --version --prompt --record --export --yes --at --canvas --position --resume --list --path --unset".split()
)
WITHOUT = frozenset(
    {"config", "completion", "doctor", "version"}
)  # commands that have no defaults; doctor is for what is broken, the file included
OTHERS = frozenset({"DGEMMA_OPS", "DGEMMA_LOG", "DGEMMA_CONFIG"})  # variables that set no option
_MISTYPED = 0.85  # likeness from which a variable is meant to be one of those
_WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One option of one command, as a default that can be set."""

    command: tuple[str, ...]  # ("models", "show")
    name: str  # of the option, without its dashes
    parameter: str  # in Python
    kind: type  # bool, int, float or str
    many: bool  # a list of those
    default: object  # built in
    convert: Callable[[object], Any]  # raises typer's BadParameter
    from_environment: Callable[[], Any]  # None: not set; raises typer's BadParameter

    @property
    def key(self) -> str:
        return ".".join((*self.command, self.name))

    @property
    def variable(self) -> str:
        return variable(self.command, self.name)


@dataclass(frozen=True, slots=True)
class Current:
    """A default as it stands, and where it comes from: BUILT_IN, a file, or the name of a variable.

    wrong: what the command will say to it, if anything.
    """

    value: object
    source: str
    wrong: DgemmaError | None = None


def variable(command: Sequence[str], name: str) -> str:
    """The environment's name for an option."""
    return "_".join(("dgemma", *command, name)).replace("-", "_").upper()


def leaves(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command of a group, groups opened, with the words that name it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, (*path, name))
        else:
            yield (*path, name), command


def options(command: Any) -> Iterator[tuple[Any, str]]:
    """Its options that a default can be set for, with their names: the long one, without its dashes."""
    for parameter in command.params:
        long = next((each for each in parameter.opts if each.startswith("--")), None)
        if parameter.param_type_name == "option" and long is not None and long not in ONCE:
            yield parameter, long.removeprefix("--")


def settings(group: Any) -> dict[str, Setting]:
    """Every default of every command, by key."""
    found = [
        _setting(path, command, parameter, name)
        for path, command in leaves(group)
        if path[0] not in WITHOUT
        for parameter, name in options(command)
    ]
    return {setting.key: setting for setting in found}


def _setting(path: tuple[str, ...], command: Any, parameter: Any, name: str) -> Setting:
    context = typer.Context(command, info_name=path[-1])
    hint = get_type_hints(command.callback).get(parameter.name, str)
    hint = next((each for each in get_args(hint) if each is not type(None)), hint) if _optional(hint) else hint
    many = get_origin(hint) is list
    kind = get_args(hint)[0] if many else hint

    kind = kind if kind in (bool, int, float) else str

    def convert(value: object) -> Any:
        _check_meaning(kind, value)
        return plain(parameter.process_value(context, value))

    def from_environment() -> Any:
        given = parameter.value_from_envvar(context)
        return None if given is None else convert(given)

    return Setting(
        command=path,
        name=name,
        parameter=parameter.name,
        kind=kind,
        many=many,
        default=plain(parameter.get_default(context)),
        convert=convert,
        from_environment=from_environment,
    )


def _check_meaning(kind: type, value: object) -> None:
    """Raises typer's BadParameter for what is of the type, and says nothing; a stop string may be a line feed."""
    if kind is str and (not all(value) if isinstance(value, list) else not str(value).strip()):
        raise typer.BadParameter("a text of the list is empty" if isinstance(value, list) else "it is blank")
    if kind is float and _is_nan(value):
        raise typer.BadParameter("it is not a number")


def _is_nan(value: object) -> bool:
    try:
        return math.isnan(float(value))  # type: ignore[arg-type]  # that is the question
    except (TypeError, ValueError, OverflowError):
        return False


def _optional(hint: Any) -> bool:
    return type(None) in get_args(hint)


def plain(value: object) -> Any:
    """A parameter's value as TOML has it."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


# ── the file ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def file() -> Path:
    """Where the defaults lie: DGEMMA_CONFIG, else config.toml in the folder that models.toml is looked for."""
    own = os.environ.get("DGEMMA_CONFIG")
    return expand(own) if own else user_folder() / "config.toml"


def read(known: Mapping[str, Setting], path: Path) -> dict[str, Any]:
    """What the file says, by key, checked.

    Raises ConfigError: it is named and not there, unreadable, or says what means nothing.
    """
    if os.environ.get("DGEMMA_CONFIG") and not os.path.exists(path):  # noqa: PTH110 - False where it cannot be looked at
        raise ConfigError(f"DGEMMA_CONFIG names {path}, which is not there", "correct the variable, or unset it")
    return {key: _checked(known[key], value, path) for key, value in _flat(toml_file.read(path), known, path)}


def as_written(key: str) -> object:
    """What the file says of one key, whatever else it says, unchecked. None: nothing, or the file cannot be read."""
    try:
        found: object = toml_file.read(file())
    except ConfigError:
        return None
    for word in key.split("."):
        found = found.get(word) if isinstance(found, Mapping) else None
    return found


def _flat(
    table: Mapping[str, Any], known: Mapping[str, Setting], path: Path, above: tuple[str, ...] = ()
) -> Iterator[tuple[str, Any]]:
    tables = {setting.command[: length + 1] for setting in known.values() for length in range(len(setting.command))}
    for name, value in table.items():
        key = ".".join((*above, name))
        if isinstance(value, Mapping) and (*above, name) in tables:
            yield from _flat(value, known, path, (*above, name))
        elif key in known:
            yield key, value
        else:
            raise ConfigError(f"{path}: nothing is called {_printable(key)}", _like(key, known))


def _like(key: str, known: Mapping[str, Setting]) -> str:
    near = difflib.get_close_matches(key.replace("_", "-"), known, cutoff=0.7)
    return (
        f"did you mean {' or '.join(near)}? `dgemma config` lists every key"
        if near
        else "`dgemma config` lists every key"
    )


def _printable(text: str) -> str:
    return text if text.isprintable() else repr(text)


def _checked(setting: Setting, value: object, path: Path) -> Any:
    """As the option has it. Raises ConfigError where it is of another type, or out of the option's range."""
    values = value if setting.many and isinstance(value, list) else [value]
    right = isinstance(value, list) == setting.many and all(_is(each, setting.kind) for each in values)
    if not right:
        wanted = "a list of text" if setting.many else _WANTED[setting.kind]
        raise ConfigError(f"{path}: {setting.key} = {toml_file.shown(value)} is not {wanted}", "correct that line")
    try:
        return setting.convert(value)
    except typer.BadParameter as error:
        raise ConfigError(
            f"{path}: {setting.key} = {toml_file.shown(value)}: {_reason(error)}", "correct that line"
        ) from None


def _reason(error: typer.BadParameter) -> str:
    """In Typer's words, as the end of a sentence of ours."""
    what = error.message.removeprefix("Value error, ").rstrip(".")
    return f"{what[:1].lower()}{what[1:]}"


def _is(value: object, kind: type) -> bool:
    if kind is int and isinstance(value, float):
        return value.is_integer()  # 5.0, as a flag and a variable may say it
    return type(value) in ((int, float) if kind is float else (kind,))


# ── what counts ───────────────────────────────────────────────────────────────────────────────────────────────────────


def defaults(group: Any) -> dict[str, Any]:
    """What the file says, as the default map of a context. Raises ConfigError as `read` does, UsageError on a variable
    of ours that means nothing.
    """
    known = settings(group)
    check_environment(group, known)
    nested: dict[str, Any] = {}
    for key, value in read(known, file()).items():
        table = nested
        for word in known[key].command:
            table = table.setdefault(word, {})
        table[known[key].parameter] = value
    return nested


def check_environment(group: Any, known: Mapping[str, Setting]) -> None:
    """Raises UsageError on a variable that is meant for us and sets nothing."""
    for error in mistyped(group, known):
        raise error


def mistyped(group: Any, known: Mapping[str, Setting]) -> Iterator[UsageError]:
    """What is wrong with each variable that is meant for us and sets nothing."""
    ours = {setting.variable for setting in known.values()}
    beginnings = tuple(variable((name,), "") for name in group.commands)
    for name in sorted(os.environ):
        of_command = name.startswith(beginnings) and name not in ours
        like_another = name.startswith("DGEMMA_") and name not in ours | OTHERS
        if of_command or (like_another and difflib.get_close_matches(name, OTHERS, cutoff=_MISTYPED)):
            near = difflib.get_close_matches(name, ours | OTHERS, n=1, cutoff=0.7)
            yield UsageError(
                f"the variable {_printable(name)} sets nothing",
                f"{f'did you mean {near[0]}? or ' if near else ''}unset it",
            )


def current(known: Mapping[str, Setting], said: Mapping[str, Any], path: Path) -> dict[str, Current]:
    """Every default as it stands, with what is wrong with it. `said`: what `read` found."""
    return {key: _current(setting, said, path) for key, setting in known.items()}


def _current(setting: Setting, said: Mapping[str, Any], path: Path) -> Current:
    try:
        given = setting.from_environment()
    except typer.BadParameter as error:
        wrong = UsageError(f"{setting.variable}: {_reason(error)}", "correct the variable, or unset it")
        return Current(os.environ[setting.variable], setting.variable, wrong)
    if given is not None:
        return _looked_at(setting, Current(given, setting.variable))
    if setting.key in said:
        return _looked_at(setting, Current(said[setting.key], str(path)))
    return Current(setting.default, BUILT_IN)


def _looked_at(setting: Setting, now: Current) -> Current:
    """With what is wrong with a model: `read` does not look for it, as another may be asked for."""
    if setting.name != "model" or now.value in RESERVED:
        return now
    from dgemma_local import hub
    from dgemma_local.registry import resolve

    try:
        resolve(str(now.value), hub.folder_of)
    except DgemmaError as error:
        return replace(now, wrong=type(error)(f"{setting.key} ({now.source}): {error.what}", error.fix))
    return now


# ── setting one ───────────────────────────────────────────────────────────────────────────────────────────────────────


def find(known: Mapping[str, Setting], key: str) -> Setting:
    """Raises UsageError where nothing is called so."""
    if key not in known:
        raise UsageError(f"nothing is called {_printable(key)}", _like(key, known))
    return known[key]


def put(
    known: Mapping[str, Setting],
    path: Path,
    key: str,
    values: Sequence[str],
    check: Callable[[Mapping[str, Any]], None] = lambda said: None,
) -> None:
    """Writes one key, and leaves every other line as it is; no values: takes it away.

    check: hears what the file is to say, and raises what stands against it. Raises UsageError on a key or value without a
    meaning, ConfigError where the file cannot be read, edited or written.
    """
    setting = find(known, key)
    if len(values) > 1 and not setting.many:
        raise UsageError(f"{key} takes one value", "quote it where it has spaces")
    if any(not (each if setting.many else each.strip()) for each in values):  # a stop string may be a line feed
        raise UsageError(f"{key}: the value is blank", f"`dgemma config {key} --unset` takes it out of the file")
    if any(not _is_utf8(each) for each in values):
        raise UsageError(f"{key}: the value is not UTF-8", "give it in UTF-8, as TOML is written")
    before = dict(_flat(toml_file.read(path), known, path))
    wanted = {name: value for name, value in before.items() if name != key}
    literal = None
    if values:
        try:
            wanted[key] = setting.convert(list(values) if setting.many else values[0])
        except typer.BadParameter as error:
            raise UsageError(
                f"{key} = {values[0]}: {_reason(error)}",
                f"`dgemma {' '.join(setting.command)} --help` says what it takes",
            ) from None
        literal = written(wanted[key])
        check(wanted)
    raw = path.read_bytes() if before or path.exists() else b""
    mark = codecs.BOM_UTF8 if raw.startswith(codecs.BOM_UTF8) else b""
    text = raw.removeprefix(mark).decode()
    after = edited(text, ".".join(setting.command), setting.name, literal)
    if not _says(after, wanted, known, path):  # dotted keys, inline tables, values over several lines
        raise ConfigError(f"{path} is written in a way that cannot be edited here", f"set {key} in it by hand")
    toml_file.write(path, mark + after.encode(), "set DGEMMA_CONFIG")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes of an argument that are none
        return False
    return True


def _says(text: str, wanted: Mapping[str, Any], known: Mapping[str, Setting], path: Path) -> bool:
    try:
        return dict(_flat(tomllib.loads(text), known, path)) == wanted
    except ValueError:
        return False
