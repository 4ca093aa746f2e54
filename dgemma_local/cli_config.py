"""`dgemma config` and `dgemma completion`: the user's own defaults, and what a shell needs to complete a line."""

import json
from collections.abc import Mapping
from enum import StrEnum
from itertools import groupby
from typing import Annotated

import typer

from dgemma_local import preferences
from dgemma_local.cli_page import check_together, contradictions
from dgemma_local.errors import UsageError
from dgemma_local.preferences import Current, Setting
from dgemma_local.streams import say
from dgemma_local.toml_file import written


def _keys(context: typer.Context, incomplete: str) -> list[str]:
    """What a shell may complete a key to."""
    return [key for key in preferences.settings(context.find_root().command) if key.startswith(incomplete)]


def config(
    context: typer.Context,
    key: Annotated[
        str | None,
        typer.Argument(metavar="KEY", help="Such as run.steps: the command, and the option.", autocompletion=_keys),
    ] = None,
    values: Annotated[
        list[str] | None, typer.Argument(metavar="VALUE", help="The new default; several where it is a list.")
    ] = None,
    unset: Annotated[bool, typer.Option("--unset", help="Take KEY out of the file.")] = False,
    path: Annotated[bool, typer.Option("--path", help="Where the file is, or would be.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON: key, value, source, variable, default.")] = False,
) -> None:
    """Show or set the defaults of every command's options.

    A flag goes before its variable, that before the file, that before what is built in.
    """
    file = preferences.file()
    if path + unset + as_json + bool(values) > 1 or (path and key) or (unset and not key):
        raise UsageError("these do not go together", "give KEY VALUE, KEY --unset, KEY, --path or --json")
    if path:
        typer.echo(file)
        return
    root = context.find_root().command
    known = preferences.settings(root)
    if key is not None and (values or unset):
        preferences.put(known, file, key, values or [], lambda said: check_together(root, said, key))
    elif key is not None:
        preferences.find(known, key)
    said = preferences.read(known, file)
    standing = preferences.current(known if key is None else {key: known[key]}, said, file)
    if values or unset:
        (now,) = standing.values()
        say(f"{key} = {_shown(now.value)}, {_source(now, file=str(file))}")
    elif as_json:
        typer.echo(json.dumps([_plain(known[name], now) for name, now in standing.items()], indent=1))
    else:
        if key is None:
            say(f"{file}{'' if file.exists() else ' (not there yet)'}")
        typer.echo("\n".join(_lines(known, standing, str(file))))
    troubles = [now.wrong for now in standing.values() if now.wrong is not None]
    if key is None:
        troubles += [*contradictions(root, said), *preferences.mistyped(root, known)]
    for each in troubles:
        say(f"wrong: {_escaped(each.what)}\n  fix: {_escaped(each.fix)}")


def _plain(setting: Setting, now: Current) -> Mapping[str, object]:
    return {
        "key": setting.key,
        "value": now.value,
        "source": now.source,
        "variable": setting.variable,
        "default": setting.default,
    } | ({} if now.wrong is None else {"wrong": now.wrong.what})


def _lines(known: Mapping[str, Setting], standing: Mapping[str, Current], file: str) -> list[str]:
    """A block a command, as in the file; what is not set stands as "-"."""
    lines: list[str] = []
    width = max(len(known[key].name) for key in standing)
    for command, keys in groupby(standing, key=lambda key: known[key].command):
        lines += [*([""] if lines else []), f"[{'.'.join(command)}]"]
        lines += [
            f"{known[key].name:{width}}  {_shown(standing[key].value):16}  {_source(standing[key], file)}"
            for key in keys
        ]
    return lines


def _shown(value: object) -> str:
    """As in the file; what a terminal cannot be trusted with, such as bytes that are no UTF-8, is escaped."""
    if value is None or value == []:
        return "-"
    return _escaped(written(value))


def _escaped(text: str) -> str:
    return "".join(sign if sign.isprintable() else json.dumps(sign)[1:-1] for sign in text)


def _source(now: Current, file: str) -> str:
    return "from the file" if now.source == file else now.source


class Shell(StrEnum):
    """For which there is completion."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"
    powershell = "powershell"


def completion(shell: Annotated[Shell, typer.Argument(help="The shell to complete in.")]) -> None:
    """Print the script that lets a shell complete commands, options and model names."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # not in its __all__

    typer.echo(get_completion_script(prog_name="dgemma", complete_var="_DGEMMA_COMPLETE", shell=shell.value))
