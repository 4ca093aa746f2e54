"""`dgemma doctor`: thin, as the rest of the command line."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgemma_local import preferences
from dgemma_local.errors import CHECK_FAILED, DgemmaError

if TYPE_CHECKING:
    from dgemma_local.doctor import Finding


def doctor(
    context: typer.Context,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object, for bug reports: no tokens, no user's name.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Hash each fetched checkpoint and read each other one: a minute or so each."),
    ] = False,
) -> None:
    """Check everything that a run stands on, and say how to cure what is wrong.

    Python and packages, driver and cards, memory and who holds it, disk, fetched checkpoints, the hub, torch and triton,
    every kernel beside its torch twin on this very card, an easy answer of the demo model, the terminal. A line each:

    OK it is in order · WARN it works, with less than there could be · FAIL it does not work, and the cure is beneath ·
    SKIP there is nothing to check

    Works where torch cannot even be imported. Exit code 19 where something FAILs, else 0.
    """
    from dgemma_local.doctor import CHECKS, Check, Machine, Probe, document, examine, failed
    from dgemma_local.doctor.probe import Lost
    from dgemma_local.ui.doctor import look, show
    from dgemma_local.ui.shelf import progress
    from dgemma_local.ui.terminal import Terminal, stderr

    commands = context.find_root().command
    checks = (
        *CHECKS,
        Check("defaults", lambda machine: defaults(commands)),
        Check("terminal", lambda machine: look(Terminal(sys.stdout))),
    )
    with Probe() as probe, progress(quiet=as_json or not verify) as watch:
        with suppress(Lost):  # the check asks again, and says so
            probe.begin("torch")  # is imported while the rest is looked at
        machine = Machine(probe=probe, verify=verify, watch=watch)
        if not as_json:
            machine.say = lambda text: stderr().say(text, style="dim")
        found = show(examine(checks, machine), sys.stdout, document if as_json else None)
    if failed(found):
        raise typer.Exit(CHECK_FAILED)


def defaults(commands: Any) -> "Iterator[Finding]":
    """The user's own: a file that cannot be used, each variable that does not mean anything."""
    from dgemma_local.cli_page import contradictions
    from dgemma_local.doctor.finding import fail, ok

    known, file = preferences.settings(commands), preferences.file()
    said: dict[str, Any] = {}
    wrong: list[DgemmaError] = []
    try:
        said = preferences.read(known, file)
    except DgemmaError as error:
        wrong.append(error)
    wrong += [now.wrong for now in preferences.current(known, said, file).values() if now.wrong is not None]
    wrong += [*contradictions(commands, said), *preferences.mistyped(commands, known)]
    for each in wrong:
        yield fail("defaults", each.what, each.fix)
    if not wrong:
        yield ok("defaults", f"{len(said)} set in {file}" if said else "none set in a file", **said)
