"""`dgemma chat`: flags in, a conversation, its files in the user's state folder."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgemma_local.chat.conversation import MOST_TOKENS
from dgemma_local.cli_bench import Device, Dtype
from dgemma_local.cli_chat_model import Opened
from dgemma_local.cli_models import AUTO, LARGEST_VRAM, WithPrefer
from dgemma_local.cli_run import LARGEST_SEED
from dgemma_local.cli_view import WithPreset, model_names
from dgemma_local.errors import UsageError
from dgemma_local.interrupts import import_torch
from dgemma_local.streams import say

if TYPE_CHECKING:
    from dgemma_local.chat.conversation import Conversation


def chat(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="With --resume: which one. Default: the latest.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--model",
            metavar="NAME",
            autocompletion=model_names,
            help="A name from `dgemma models`, or a folder. Default: that of the conversation, else auto: the checkpoint for this card where it is fetched, else the demo.",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System turn before it all.")] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            min=0,
            max=LARGEST_SEED,
            metavar="N",
            help="Of the first answer; later ones count up. Default: drawn for each, /stats shows it.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            min=1,
            max=MOST_TOKENS,
            metavar="N",
            help="Of an answer with its thought. Default: 1024.",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", min=1, max=4096, metavar="N", help="Denoising steps a canvas, at most. Default: the model's."
        ),
    ] = None,
    preset: WithPreset = None,
    think: Annotated[bool, typer.Option("--think", help="Let the model think first.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the latest conversation, or with NAME.")] = False,
    list_all: Annotated[bool, typer.Option("--list", help="What is saved, the latest first; then leave.")] = False,
    no_save: Annotated[
        bool, typer.Option("--no-save", help="Keep neither the conversation nor what is typed.")
    ] = False,
    visualize: Annotated[bool, typer.Option("--visualize", help="Show the canvas while it settles.")] = False,
    dtype: Annotated[Dtype | None, typer.Option("--dtype", help="Compute in this. Default: as stored.")] = None,
    device: Annotated[
        Device | None, typer.Option("--device", help="Default: the card if there is one; the demo runs on the CPU.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option("--context", min=1, metavar="N", help="Tokens of the conversation to plan for. Default: 8192."),
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
        bool, typer.Option("--fp8-mlp", help="Hold the dense MLP in FP8, multiplied at its rate: faster on a card.")
    ] = False,
) -> None:
    """Talk with a model; /help lists what can be said besides.

    Every turn is saved when it ends. Where stdin is no terminal a line is a message, the answers alone go to stdout, and
    the exit code is that of the worst of them.
    """
    from dgemma_local.chat import store
    from dgemma_local.ui import prompt

    if name is not None and not resume:
        raise UsageError(
            f"{name!r} is nothing to begin with", "say --resume NAME, or type the message after the prompt"
        )
    if prefer is not None and model not in (None, AUTO):
        raise UsageError("--prefer has nothing to choose from", "drop it, or -m")
    home = None if no_save and not (resume or list_all) else store.home()
    folder = None if home is None else home / "chats"
    if list_all:
        _list(folder)
        return
    if system is not None:
        prompt.check(system, "--system")
    saved = begun = _resumed(name, folder) if resume else None
    given: dict[str, Any] = {"seed": seed, "max_tokens": max_tokens, "steps": steps, "thinking": think or None}
    begun = _with_flags(begun or _new(folder), {key: value for key, value in given.items() if value is not None})
    if system is not None:
        begun = replace(begun, system=system)

    import_torch()
    from dgemma_local.session import Wishes

    wishes = Wishes(
        dtype=dtype.value if dtype else None,
        device=device.value if device else None,
        context=context,
        vram=vram,
        fp8_attention=fp8_attention,
        fp8_embedding=fp8_embedding,
        fp8_mlp=fp8_mlp,
        steps=steps,
        preset=preset.value if preset else None,
    )
    opened = Opened(model or begun.model or AUTO, wishes, prefer)
    begun = replace(begun, model=opened.name)
    code = _talk(begun, saved, opened, None if no_save else home, visualize)
    if code:
        raise typer.Exit(code)


def _talk(
    begun: "Conversation", saved: "Conversation | None", opened: Opened, home: Path | None, visualize: bool
) -> int:
    """saved: what was gone on with, as its file holds it; None: a new one. Returns the exit code."""
    from dgemma_local.chat import store
    from dgemma_local.registry import table
    from dgemma_local.ui import DEMO
    from dgemma_local.ui.chat import run
    from dgemma_local.ui.chat_input import on_terminal, piped, typed
    from dgemma_local.ui.chat_turn import Chat, recap
    from dgemma_local.ui.terminal import stderr

    folder = None if home is None else home / "chats"
    scripted = not on_terminal()
    terminal = stderr()
    history = None
    if home is not None and not scripted:
        try:
            history = store.private_file(home / "history")
        except OSError as error:
            terminal.say(f"what is typed is not kept: {error.strerror}", style="dim")
    names: Mapping[str, Callable[[], Sequence[str]]] = {
        "load": lambda: store.names(folder),
        "model": lambda: [*table()],
    }
    chat = Chat(
        conversation=begun,
        model=opened,
        source=piped() if scripted else typed(history, names),
        terminal=terminal,
        draw=secrets.randbelow,
        folder=folder,
        saved=saved,
        scripted=scripted,
        visualize=visualize,
    )
    if opened.demo:
        chat.say(DEMO)
    chat.say(opened.name + ("" if scripted else " · /help lists the commands, Ctrl-D leaves"))
    if home is None:
        chat.say("this conversation is not saved")
    if saved and begun.turns:
        recap(chat)
    return run(chat)


def _new(folder: Path | None) -> "Conversation":
    from dgemma_local.chat.conversation import Conversation
    from dgemma_local.chat.store import free_name
    from dgemma_local.ui.chat_actions import stamp
    from dgemma_local.ui.chat_turn import now

    return Conversation(name=free_name(stamp(), folder), model="", started=now())


def _resumed(name: str | None, folder: Path | None) -> "Conversation | None":
    """What is gone on with; a damaged file is one line.

    Raises UsageError: nothing of that name; it is damaged, and nobody is there to see that another one begins.
    """
    from dgemma_local.chat import store
    from dgemma_local.ui.chat_input import on_terminal

    if folder is None:
        raise UsageError("there is no folder to resume from", "set XDG_STATE_HOME to a folder, or HOME")
    if name is not None:
        try:
            return store.load(name, folder)
        except store.Damaged as error:
            if not on_terminal():
                raise UsageError(str(error), "resume another one: `dgemma chat --list` shows them") from None
            say(f"{error}; a new conversation begins")
            return None
    for found in store.listed(folder):
        if found.conversation is not None:
            return found.conversation
        say(found.damage)
    say("nothing is saved yet; a new conversation begins")
    return None


def _with_flags(conversation: "Conversation", given: Mapping[str, Any]) -> "Conversation":
    from dgemma_local.chat.conversation import with_settings

    return with_settings(conversation, **given) if given else conversation


def _list(folder: Path | None) -> None:
    """One conversation a line on stdout; what is damaged, on stderr."""
    from dgemma_local.chat import store
    from dgemma_local.ui.terminal import printable

    for found in store.listed(folder):
        if found.conversation is None:
            say(printable(found.damage))
            continue
        turns = found.conversation.turns
        first = " ".join(turns[0].user.split()) if turns else ""
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.changed))
        line = f"{found.name:<20}  {when}  {len(turns):>3} turns  {found.conversation.model:<12}  {first[:60]}"
        typer.echo(printable(line.rstrip()))
