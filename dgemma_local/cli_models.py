"""`dgemma pull` and `dgemma models`: thin, as the rest of the command line. What they raise, `cli.Commands` shows."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dgemma_local.cli_flags import (
    AUTO,
    Prefer,
    WithAttentionHeld,
    WithEmbeddingHeld,
    WithMlpHeld,
    WithPrefer,
    flag,
    model_names,
)
from dgemma_local.cli_page import Page
from dgemma_local.errors import DoesNotFit, FetchError, UnknownModel, UsageError

if TYPE_CHECKING:
    from dgemma_local.checkpoint import Checkpoint
    from dgemma_local.registry import Entry

app_models = typer.Typer(invoke_without_command=True, help="List, plan or remove the models of the table.")

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="A name from `dgemma models`.", show_default=False, autocompletion=model_names),
]
OrAuto = Annotated[
    str,
    typer.Argument(
        metavar="[NAME]", help="A name from `dgemma models`; auto: what suits this card.", autocompletion=model_names
    ),
]


def pull(
    name: OrAuto = AUTO,
    prefer: WithPrefer = None,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="R", help="A commit, branch or tag. Default: the table's.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash what is here already, too, and fetch damaged files again.")
    ] = False,
    anyway: Annotated[bool, typer.Option("--anyway", help="Fetch it although it does not fit this card.")] = False,
    quiet: Annotated[bool, flag("--quiet -q", "No progress, only the folder and errors.")] = False,
) -> None:
    """Fetch a model into the Hugging Face cache; its folder goes to stdout.

    Where there is a card, it is first planned from its headers whether the model will fit there.

    A fetch that was interrupted goes on where it was. HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE count.
    """
    from dgemma_local import hub
    from dgemma_local.hub.failures import size
    from dgemma_local.registry import find, is_folder
    from dgemma_local.ui.shelf import progress
    from dgemma_local.ui.terminal import stderr

    entry = _auto(prefer, quiet=quiet) if name == AUTO else find(name)
    if entry.folder is not None:
        if not is_folder(entry.folder):
            raise UnknownModel(
                f"the folder of {entry.name!r} is not there: {entry.folder}", "correct `folder` in your table"
            )
        if not quiet:
            stderr().say(f"{entry.name} has a folder of its own: nothing to fetch")
        typer.echo(entry.folder)
        return
    if revision is not None:
        entry = replace(entry, revision=revision)
    if not anyway and hub.folder_of(entry) is None:
        _check_fit(entry, quiet=quiet)
    if not quiet:
        stderr().say(f"{entry.repository} into {hub.root()}")
    try:
        with progress(quiet=quiet) as watch:
            folder = hub.fetch(entry, verify=verify, watch=watch)
    except KeyboardInterrupt:
        if not quiet:
            stderr().say("what arrived is kept; run the same command to go on")
        raise
    if not quiet:
        stderr().say(f"{entry.name} is complete: {size(hub.held(entry))}")
    typer.echo(folder)


@app_models.callback()
def models(context: typer.Context) -> None:
    """List the models of the table, and which of them are on this machine."""
    if context.invoked_subcommand is None:
        list_models()


@app_models.command("list", cls=Page)
def list_models() -> None:
    """List the models of the table, and which of them are on this machine."""
    from dgemma_local.registry import table
    from dgemma_local.ui.models import show_models
    from dgemma_local.ui.shelf import show_held

    entries = list(table().values())
    copies = {entry.name: _copy(entry) for entry in entries if entry.folder is None}
    folders = {name: folder for name, (folder, _) in copies.items()}
    show_models([replace(entry, folder=folders.get(entry.name, entry.folder)) for entry in entries], sys.stdout)
    show_held([(entry, *copies[entry.name]) for entry in entries if copies.get(entry.name, (None, 0))[1]], sys.stdout)


@app_models.command("show", cls=Page)
def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[NAME]", help="A name, or a folder; auto: what suits this card.", autocompletion=model_names
        ),
    ] = AUTO,
    prefer: WithPrefer = None,
    context: Annotated[int | None, flag("--context", "Tokens of prompt and answer. Default: 8192.")] = None,
    vram: Annotated[float | None, flag("--vram", "Hold it to so much. Default: what is free.")] = None,
    fp8_attention: WithAttentionHeld = False,
    fp8_embedding: WithEmbeddingHeld = False,
    fp8_mlp: WithMlpHeld = False,
    as_json: Annotated[bool, typer.Option("--json", help="In bytes, as one JSON object.")] = False,
) -> None:
    """Plan a model's memory, component by component. Nothing is downloaded but headers.

    Exit code 11 where it does not fit as asked.
    """
    import json

    from dgemma_local.config import load_model_config
    from dgemma_local.layout import Options
    from dgemma_local.planning import first_card, plan_run
    from dgemma_local.ui.models import plan_to_json, show_plan

    checkpoint = _checkpoint(_auto(prefer, quiet=as_json).name if name == AUTO else name)
    planned = plan_run(
        checkpoint,
        load_model_config(checkpoint.folder),
        Options(fp8_attention=fp8_attention, fp8_embedding=fp8_embedding, fp8_mlp=fp8_mlp),
        device="cuda" if vram is not None or first_card() is not None else "cpu",
        context=context,
        vram=vram,
    )
    if as_json:
        typer.echo(json.dumps(plan_to_json(planned.estimate, planned.verdict)))
    else:
        show_plan(planned.estimate, planned.verdict, sys.stdout)
    if planned.verdict is not None and not planned.verdict.fits:
        raise typer.Exit(DoesNotFit.exit_code)


@app_models.command("rm", cls=Page)
def remove(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a model from the cache. A folder of your own is never touched."""
    from dgemma_local import hub
    from dgemma_local.hub.failures import size
    from dgemma_local.registry import find
    from dgemma_local.ui.terminal import stderr

    entry = find(name)
    count = hub.held(entry)
    if not count and entry.folder is not None:
        raise UsageError(
            f"{entry.name!r} lies in a folder of its own: {entry.folder}", "nothing was fetched, so nothing is removed"
        )
    if not count:
        raise UnknownModel(f"nothing of {entry.name!r} is on this machine", "`dgemma models` shows what is")
    if not yes and not _agreed(f"remove {entry.name}, {size(count)} in {hub.root()}? [y/N] "):
        stderr().say("kept")
        return
    stderr().say(f"removed {entry.name}: {size(hub.remove(entry))} freed")


def _auto(prefer: Prefer | None, *, quiet: bool) -> "Entry":
    """What suits this card, and why it does on stderr."""
    from dgemma_local.auto import choice
    from dgemma_local.ui.terminal import stderr

    found = choice(quality=prefer is not None)
    if not quiet:
        stderr().say(f"{found.entry.name}: {found.reason}")
    return found.entry


def _check_fit(entry: "Entry", *, quiet: bool) -> None:
    """Raises DoesNotFit where the first card could not hold the model in any form; says what it takes otherwise."""
    from dgemma_local.card import cards
    from dgemma_local.ui.terminal import stderr

    card = next(iter(cards()), None)
    if card is None:
        return
    from dgemma_local import hub
    from dgemma_local.config import load_model_config
    from dgemma_local.layout import Options
    from dgemma_local.planning import empty, plan_run

    checkpoint = hub.remote_checkpoint(entry)
    config = load_model_config(checkpoint.folder)
    said, lean = (
        plan_run(checkpoint, config, options, device="cuda", card=empty(card)).verdict
        for options in (Options(), Options(fp8_attention=True, fp8_embedding=True))
    )
    if said is None or lean is None:
        return
    if lean.plan is None:
        error = said.error(entry.name)
        raise DoesNotFit(error.what, f"{error.fix}; or fetch it --anyway")
    if not quiet:
        stderr().say(f"{entry.name} {said.line}")
        if said.plan is None:
            stderr().say("with --fp8-attention --fp8-embedding it does: " + lean.line)


def _checkpoint(name: str) -> "Checkpoint":
    """Of a folder or a fetched model, what is on the disk; of another, what the hub says of it."""
    from dgemma_local import hub
    from dgemma_local.checkpoint import open_checkpoint, refuse_special_files
    from dgemma_local.registry import resolve, table

    for entry in table().values():
        if name in (entry.name, entry.repository) and entry.folder is None and hub.folder_of(entry) is None:
            return hub.remote_checkpoint(entry)
    folder = resolve(name, hub.folder_of)[1]
    refuse_special_files(folder)
    return open_checkpoint(folder)


def _copy(entry: "Entry") -> tuple[Path | None, int]:
    """Its complete copy in the cache, and bytes of it; one that may not be used is said, and does not spoil the list."""
    from dgemma_local import hub
    from dgemma_local.ui.terminal import stderr

    try:
        return hub.folder_of(entry), hub.held(entry)
    except FetchError as error:
        stderr().say(f"{entry.name}: {error.what}")
        return None, 0


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("rm asks before it removes, and stdin is not a terminal", "add --yes")
    typer.echo(question, err=True, nl=False)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
