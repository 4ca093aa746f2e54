"""`dgemma chat`: flags in, a conversation, its files in the user's state folder."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dgemma_local.chat.conversation import MOST_TOKENS, Conversation, with_settings
from dgemma_local.cli_chat_model import Opened
from dgemma_local.cli_flags import (
    AUTO,
    WithDevice,
    WithDtype,
    WithFp8Attention,
    WithFp8Embedding,
    WithFp8Mlp,
    WithPrefer,
    WithPreset,
    WithSteps,
    WithStop,
    WithThinkOrAsBefore,
    WithThinkTokens,
    WithVram,
    check_prefer,
    check_stop,
    check_think_tokens,
    completions,
    flag,
    wishes,
)
from dgemma_local.errors import UsageError
from dgemma_local.interrupts import import_torch


def saved_names(incomplete: str) -> list[str]:
    """What a shell may complete a conversation's name to."""
    from dgemma_local.chat import store

    home = store.home()
    return completions(store.names(home and home / "chats"), incomplete)


def chat(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", autocompletion=saved_names, help="With --resume: which one. Default: the latest."
        ),
    ] = None,
    model: Annotated[
        str | None,
        flag(
            "-m --model",
            "A name from `dgemma models`, or a folder. Default: that of the conversation, else auto: the checkpoint for this card where it is fetched, else the demo.",
        ),
    ] = None,
    system: Annotated[str | None, flag("--system", "System turn before it all.")] = None,
    seed: Annotated[
        int | None,
        flag("--seed", "Of the first answer; later ones count up. Default: drawn for each, /stats shows it."),
    ] = None,
    max_tokens: Annotated[
        int | None, flag("--max-tokens", "Of an answer with its thought. Default: 1024.", max=MOST_TOKENS)
    ] = None,
    steps: WithSteps = None,
    preset: WithPreset = None,
    think: WithThinkOrAsBefore = None,
    think_tokens: WithThinkTokens = None,
    show_thinking: Annotated[
        bool | None, flag("--show-thinking", "Thoughts in view, dimmed; else a line says how long they were.")
    ] = None,
    stop: WithStop = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the latest conversation, or with NAME.")] = False,
    list_all: Annotated[bool, typer.Option("--list", help="What is saved, the latest first; then leave.")] = False,
    no_save: Annotated[
        bool, typer.Option("--no-save", help="Keep neither the conversation nor what is typed.")
    ] = False,
    visualize: Annotated[bool, flag("--visualize", "Show the canvas while it settles.")] = False,
    dtype: WithDtype = None,
    device: WithDevice = None,
    context: Annotated[int | None, flag("--context", "Tokens of the conversation to plan for. Default: 8192.")] = None,
    vram: WithVram = None,
    prefer: WithPrefer = None,
    fp8_attention: WithFp8Attention = False,
    fp8_embedding: WithFp8Embedding = False,
    fp8_mlp: WithFp8Mlp = False,
) -> None:
    """Talk with a model; /help lists what can be said besides.

    Every turn is saved when it ends. Where stdin is no terminal a line is a message, the answers alone go to stdout, and
    the exit code is that of the worst of them.
    """
    from dgemma_local.chat import store
    from dgemma_local.ui import prompt
    from dgemma_local.ui.chat_input import check_stdin
    from dgemma_local.ui.chat_saved import new, resumed

    if list_all:
        others: Mapping[str, object] = {
            "NAME": name,
            "--model": model,
            "--system": system,
            "--seed": seed,
            "--max-tokens": max_tokens,
            "--steps": steps,
            "--preset": preset,
            "--think": think,
            "--no-think": think is False,
            "--think-tokens": think_tokens,
            "--show-thinking": show_thinking,
            "--no-show-thinking": show_thinking is False,
            "--stop": stop,
            "--resume": resume,
            "--no-save": no_save,
            "--visualize": visualize,
            "--dtype": dtype,
            "--device": device,
            "--context": context,
            "--vram": vram,
            "--prefer": prefer,
            "--fp8-attention": fp8_attention,
            "--fp8-embedding": fp8_embedding,
            "--fp8-mlp": fp8_mlp,
        }
        _list([flag for flag, given in others.items() if given is not None and given is not False and given != []])
        return
    if name is not None and not resume:
        raise UsageError(
            f"{name!r} is nothing to begin with", "say --resume NAME, or type the message after the prompt"
        )
    check_prefer(prefer, model)
    check_stop(stop or ())
    home = None if no_save and not resume else store.home()
    folder = None if home is None else home / "chats"
    check_stdin()
    if system is not None:
        prompt.check(system, "--system")
    saved = begun = resumed(name, folder) if resume else None
    if saved and saved.model and prefer is not None and model is None:
        raise UsageError(
            f"--prefer has nothing to choose from: {saved.name} is held with {saved.model}", "drop it, or add -m auto"
        )
    given = {
        "seed": seed,
        "max_tokens": max_tokens,
        "steps": steps,
        "preset": preset,
        "thinking": think,
        "think_tokens": think_tokens,
        "show_thoughts": show_thinking,
        "stop": tuple(stop or ()) or None,
    }
    begun = _with_flags(begun or new(folder), {key: value for key, value in given.items() if value is not None})
    if system is not None:
        begun = replace(begun, system=system)

    import_torch()
    asked = wishes(
        dtype=dtype,
        device=device,
        context=context,
        vram=vram,
        fp8=(fp8_attention, fp8_embedding, fp8_mlp),
        steps=begun.settings.steps,
        preset=begun.settings.preset,
    )
    opened = Opened(model or begun.model or AUTO, asked, prefer, begun.settings.preset)
    begun = replace(begun, model=opened.name)
    code = _talk(begun, saved, opened, None if no_save else home, visualize=visualize)
    if code:
        raise typer.Exit(code)


def _list(others: Sequence[str]) -> None:
    """others: flags that mean nothing here."""
    from dgemma_local.chat import store
    from dgemma_local.ui.chat_saved import show_list

    if others:
        raise UsageError(f"--list shows what is saved, and {others[0]} means nothing to it", f"drop {others[0]}")
    home = store.home()
    show_list(None if home is None else home / "chats")


def _talk(
    begun: Conversation, saved: Conversation | None, opened: Opened, home: Path | None, *, visualize: bool
) -> int:
    """saved: what was gone on with, as its file holds it; None: a new one. Returns the exit code."""
    from dgemma_local.chat import private, store
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
            history = private.file_at(home / "history")
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


def _with_flags(conversation: Conversation, given: Mapping[str, Any]) -> Conversation:
    """given: by the names of `Settings`. Raises UsageError for a bound of thoughts that `run` would refuse, too."""
    now = conversation.settings
    check_think_tokens(
        given.get("think_tokens"), given.get("max_tokens", now.max_tokens), think=given.get("thinking", now.thinking)
    )
    return with_settings(conversation, **given) if given else conversation
