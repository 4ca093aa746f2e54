"""`dgemma run`: flags in, one answer, a front end out."""

import secrets
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from dgemma_local import logs, preferences
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
    WithThink,
    WithThinkTokens,
    WithVram,
    check_prefer,
    check_stop,
    check_think_tokens,
    flag,
    wishes,
)
from dgemma_local.cli_session import picked, reach, recorder, vocabulary
from dgemma_local.cli_view import WithDraft, WithTheme, WithView
from dgemma_local.errors import EmptyAnswer, RecordingError, ThoughtOnly, UsageError
from dgemma_local.interrupts import import_torch
from dgemma_local.streams import lost, say

PROMPT = "dgemma.prompt"  # in a context's meta: what was read


def json_asked(command: Any, arguments: Sequence[str], ctx: Any) -> bool:
    """Whether --json is asked of `run` by a flag, a variable or the defaults, where its own function may never be called."""
    options = {name: each for each in command.params for name in (*each.opts, *each.secondary_opts)}
    asked, rest = None, iter(arguments)
    for argument in rest:
        if argument == "--":
            break
        if argument in ("--json", "--no-json"):
            asked = argument == "--json"
        elif argument in options and not options[argument].is_flag:
            next(rest, None)  # its value
    if asked is not None:
        return asked
    variable = options["--json"].value_from_envvar(ctx)
    if variable is None:
        return preferences.as_written("run.json") is True  # in a file that is refused for another line, too
    return variable.lower() in ("1", "true", "t", "yes", "y", "on")


def end_in_json(error: BaseException, code: int) -> int:
    """The last line of --json says how it ended; a missing answer is said by `finished`. Returns the process's exit code."""
    if isinstance(error, EmptyAnswer | ThoughtOnly):
        return code
    from dgemma_local.ui.plain import json_error

    try:
        json_error(error, code, sys.stdout)
    except OSError as unwritten:
        return lost(unwritten)
    return code


def run(
    ctx: typer.Context,
    file: Annotated[str | None, typer.Argument(metavar="FILE", help="Prompt file in UTF-8; - is stdin.")] = None,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="The prompt itself.")] = None,
    system: Annotated[str | None, flag("--system", "System turn before it.")] = None,
    model: Annotated[
        str,
        flag(
            "-m --model",
            "A name from `dgemma models`, or a folder. auto: the checkpoint for this card where it is fetched, else the demo.",
        ),
    ] = AUTO,
    seed: Annotated[int | None, flag("--seed", "The same seed, the same answer. Default: random, and shown.")] = None,
    max_tokens: Annotated[int, flag("--max-tokens", "Thought and answer together.")] = 1024,
    steps: WithSteps = None,
    preset: WithPreset = None,
    dtype: WithDtype = None,
    device: WithDevice = None,
    context: Annotated[int | None, flag("--context", "Tokens of prompt and answer to plan for. Default: 8192.")] = None,
    vram: WithVram = None,
    prefer: WithPrefer = None,
    fp8_attention: WithFp8Attention = False,
    fp8_embedding: WithFp8Embedding = False,
    fp8_mlp: WithFp8Mlp = False,
    think: WithThink = False,
    think_tokens: WithThinkTokens = None,
    show_thinking: Annotated[
        bool, flag("--show-thinking", "Thoughts on stderr, dimmed; else a line says how long they were.")
    ] = False,
    stop: WithStop = None,
    as_json: Annotated[bool, typer.Option("--json", help="Every event as one JSON object a line.")] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Counts and timings on stderr; with --json in every event.")
    ] = False,
    quiet: Annotated[bool, flag("--quiet -q", "Only the answer, errors and the demo's label.")] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "-v",
            "--verbose",
            help="On stderr what was loaded (tensors, bytes, the plan, a checksum), and what took how long.",
        ),
    ] = False,
    visualize: Annotated[bool, flag("--visualize", "Show the canvas while it settles, on stderr.")] = False,
    slow: Annotated[
        float,
        typer.Option(
            "--slow", min=0, max=60, metavar="SECONDS", help="With --visualize: show a step at least so long."
        ),
    ] = 0.0,
    step: Annotated[
        bool, typer.Option("--step", help="With --visualize: a key for every step: space next, c go on, q stop.")
    ] = False,
    fps: Annotated[
        float | None,
        typer.Option(
            "--fps",
            min=0.1,
            max=240,
            metavar="N",
            help="With --visualize: at most so many frames a second. Default: 20, fewer where they would cost time.",
        ),
    ] = None,
    view: WithView = None,
    draft: WithDraft = None,
    theme: WithTheme = None,
    record_to: Annotated[
        Path | None,
        typer.Option(
            "--record", metavar="FILE", help="Keep every step in FILE.jsonl or FILE.jsonl.gz, for `dgemma replay`."
        ),
    ] = None,
    no_prompt: Annotated[bool, typer.Option("--no-prompt", help="With --record: leave the prompt out.")] = False,
) -> None:
    """Answer one prompt.

    The answer alone goes to stdout and ends in one newline.

    Tool calls, the seed, notices, and thoughts with --show-thinking go to stderr; --quiet drops them.
    """
    on_stderr = {
        "--visualize": visualize,
        "--stats": stats and not as_json,
        "--show-thinking": show_thinking,
        "--verbose": verbose,
    }
    _check_written(on_stderr, as_json=as_json, quiet=quiet)
    check_stop(stop or ())
    check_think_tokens(think_tokens, max_tokens, think=think)
    check_prefer(prefer, model)
    shown = {"--slow": slow, "--step": step, "--fps": fps, "--view": view, "--draft": draft, "--theme": theme}
    for name, given in shown.items():
        if given and not visualize:
            raise UsageError(f"{name} has nothing to show", "add --visualize")
    if no_prompt and record_to is None:
        raise UsageError("--no-prompt has nothing to leave it out of", "add --record FILE")
    if record_to is not None:
        from dgemma_local.recording import check_target

        check_target(record_to)
    from dgemma_local.ui.prompt import check, read

    if PROMPT not in ctx.meta:  # the command may be asked again, without a default: a pipe is read once
        ctx.meta[PROMPT] = read(file, prompt)
    text = ctx.meta[PROMPT]
    if system is not None:
        check(system, "--system")

    logs.start(verbose=verbose)
    with logs.phase("torch"):
        import_torch()  # from here on, after the cheap checks
    from dgemma_local.channels import AnswerDecoder, opens_channel
    from dgemma_local.session import open_session, timed
    from dgemma_local.tokens import Message
    from dgemma_local.ui import Record, Start, Wanted, loading, show

    asked = wishes(
        dtype=dtype,
        device=device,
        context=context,
        vram=vram,
        fp8=(fp8_attention, fp8_embedding, fp8_mlp),
        steps=steps,
        preset=preset,
        checksum=verbose,
    )
    with loading.progress(quiet=quiet) as progress:
        session = open_session(picked(model, prefer, quiet=quiet), asked, progress, say if not quiet else _nothing)
    logs.flush()  # nothing is drawn just now
    if verbose:
        loading.show_proof(session.planned, session.proof, session.mode, session.words)
    elif session.slow_because is not None and session.on_gpu and not quiet:
        say(f"this runs in plain torch, many times slower than the fused kernels: {session.slow_because}")
    told = () if quiet else session.notices
    for notice in told:
        say(notice)
    seed = secrets.randbits(64) if seed is None else seed
    messages = [Message(role="system", content=system)] if system is not None else []
    messages.append(Message(role="user", content=text))
    events = session.answer(
        messages,
        seed=seed,
        max_tokens=max_tokens,
        steps=steps,
        thinking=think,
        think_tokens=think_tokens,
        stop=stop or (),
    )
    start = Start(
        model=session.name,
        demo=session.is_demo,
        seed=seed,
        max_tokens=max_tokens,
        steps=steps or session.steps,
        canvas_length=session.canvas_length,
        settings=session.settings,
    )
    ids = session.prompt(messages, thinking=think)
    fresh = partial(AnswerDecoder, session.tokenizer, open_channel=opens_channel(ids, session.tokenizer.special))
    record = Record(start, fresh(), withheld=reach(stop or []), thinking=think)
    wanted = Wanted(
        as_json=as_json,
        visualize=visualize,
        stats=stats,
        quiet=quiet,
        slow=slow,
        step=step,
        fps=fps,
        view=view.value if view else "text",
        draft=draft.value if draft else "canvas",
        theme=theme.value if theme else "auto",
        pressed=session.pressed,
        fresh=fresh,
        stop=stop or (),
        thoughts=show_thinking,
    )
    kept = None if no_prompt else ids
    with recorder(record_to, session, start, kept, thinking=think) as record.recorder:
        show(timed(events), record, vocabulary(session), wanted)
    if record.recorder is not None and record.recorder.failed is not None:
        raise RecordingError(record.recorder.failed, "make room, or record elsewhere")
    for notice in () if quiet else session.notices[len(told) :]:  # of passes that were captured for this answer
        say(notice)
    record.require_answer()
    if code := record.verdict.outcome.exit_code:
        raise typer.Exit(code)


def _check_written(on_stderr: Mapping[str, bool], *, as_json: bool, quiet: bool) -> None:
    """Raises UsageError for flags of what is written that contradict each other, or would do nothing."""
    if as_json and on_stderr["--visualize"]:
        raise UsageError("--json and --visualize exclude each other", "drop one of them")
    if as_json and on_stderr["--show-thinking"]:
        raise UsageError("--show-thinking adds nothing to --json, which has the thoughts", "drop one of them")
    for name, given in on_stderr.items():
        if quiet and given:
            more = ", or add --json" if name == "--stats" else ""
            raise UsageError(f"--quiet keeps stderr empty, and {name} writes there", f"drop one of them{more}")


def _nothing(_: str) -> None:
    """What --quiet says."""
