"""`dgemma run`: flags in, one answer, a front end out."""

import secrets
import sys
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ParamSpec

import typer

from dgemma_local import logs
from dgemma_local.cli_bench import Device, Dtype
from dgemma_local.cli_models import AUTO, LARGEST_VRAM, WithPrefer
from dgemma_local.cli_session import picked, reach, recorder, vocabulary
from dgemma_local.cli_view import WithDraft, WithPreset, WithTheme, WithView, model_names
from dgemma_local.errors import DgemmaError, EmptyAnswer, RecordingError, ThoughtOnly, UsageError
from dgemma_local.interrupts import import_torch
from dgemma_local.streams import say

if TYPE_CHECKING:
    pass

LARGEST_SEED = (1 << 64) - 1

Given = ParamSpec("Given")  # the flags


def _ending_in_json(command: Callable[Given, None]) -> Callable[Given, None]:
    """With --json the last line says what became of the answer, also where an error took its place."""

    @wraps(command)
    def told(*args: Given.args, **flags: Given.kwargs) -> None:
        try:
            command(*args, **flags)
        except (UsageError, EmptyAnswer, ThoughtOnly):
            raise  # nothing was begun; `finished` has said it
        except (DgemmaError, KeyboardInterrupt) as error:
            if flags.get("as_json"):
                from dgemma_local.ui.plain import json_error

                json_error(error, sys.stdout)
            raise

    return told


@_ending_in_json
def run(
    file: Annotated[str | None, typer.Argument(metavar="FILE", help="Prompt file in UTF-8; - is stdin.")] = None,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="The prompt itself.")] = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System turn before it.")] = None,
    model: Annotated[
        str,
        typer.Option(
            "-m",
            "--model",
            metavar="NAME",
            autocompletion=model_names,
            help="A name from `dgemma models`, or a folder. auto: the checkpoint for this card where it is fetched, else the demo.",
        ),
    ] = AUTO,
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="N", help="The same seed, the same answer. Default: random, and shown."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, metavar="N", help="Thought and answer together.")
    ] = 1024,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", min=1, max=4096, metavar="N", help="Denoising steps a canvas, at most. Default: the model's."
        ),
    ] = None,
    preset: WithPreset = None,
    dtype: Annotated[Dtype | None, typer.Option("--dtype", help="Compute in this. Default: as stored.")] = None,
    device: Annotated[
        Device | None, typer.Option("--device", help="Default: the card if there is one; the demo runs on the CPU.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option("--context", min=1, metavar="N", help="Tokens of prompt and answer to plan for. Default: 8192."),
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
        bool,
        typer.Option("--fp8-mlp", help="Hold the dense MLP in FP8, multiplied at its rate: faster on a card."),
    ] = False,
    think: Annotated[bool, typer.Option("--think", help="Let the model think first.")] = False,
    think_tokens: Annotated[
        int | None,
        typer.Option(
            "--think-tokens", min=1, metavar="N", help="With --think: after so many tokens of thought, the answer."
        ),
    ] = None,
    show_thinking: Annotated[
        bool, typer.Option("--show-thinking", help="Thoughts on stderr, dimmed; else a line says how long they were.")
    ] = False,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End the answer before this; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Every event as one JSON object a line.")] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Counts and timings on stderr; with --json in every event.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the answer, errors and the demo's label.")] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "-v",
            "--verbose",
            help="On stderr what was loaded (tensors, bytes, the plan, a checksum), and what took how long.",
        ),
    ] = False,
    visualize: Annotated[
        bool, typer.Option("--visualize", help="Show the canvas while it settles, on stderr.")
    ] = False,
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
    _check_flags(seed, stop or [], as_json=as_json, visualize=visualize, stats=stats, quiet=quiet)
    _check_thinking(max_tokens, think_tokens, think=think, show=show_thinking, as_json=as_json, quiet=quiet)
    if quiet and verbose:
        raise UsageError("--quiet keeps stderr empty, and --verbose writes there", "drop one of them")
    if prefer is not None and model != AUTO:
        raise UsageError("--prefer has nothing to choose from", "drop it, or -m")
    shown = {"--slow": slow, "--step": step, "--fps": fps, "--view": view, "--draft": draft, "--theme": theme}
    for flag, given in shown.items():
        if given and not visualize:
            raise UsageError(f"{flag} has nothing to show", "add --visualize")
    if no_prompt and record_to is None:
        raise UsageError("--no-prompt has nothing to leave it out of", "add --record FILE")
    if record_to is not None:
        from dgemma_local.recording import check_target

        check_target(record_to)
    from dgemma_local.ui.prompt import check, read, utf8

    text = read(file, prompt)
    if system is not None:
        check(system, "--system")
    for each in stop or ():
        utf8(each, "--stop")

    logs.start(verbose=verbose)
    with logs.phase("torch"):
        import_torch()  # from here on, after the cheap checks
    from dgemma_local.channels import AnswerDecoder, opens_channel
    from dgemma_local.session import Wishes, open_session, timed
    from dgemma_local.tokens import Message
    from dgemma_local.ui import Record, Start, Wanted, loading, show

    wishes = Wishes(
        dtype=dtype.value if dtype else None,
        device=device.value if device else None,
        context=context,
        vram=vram,
        fp8_attention=fp8_attention,
        fp8_embedding=fp8_embedding,
        fp8_mlp=fp8_mlp,
        checksum=verbose,
        steps=steps,
        preset=preset.value if preset else None,
    )
    with loading.progress(quiet=quiet) as progress:
        session = open_session(picked(model, prefer, quiet=quiet), wishes, progress, say if not quiet else _nothing)
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


def _check_flags(
    seed: int | None, stop: list[str], *, as_json: bool, visualize: bool, stats: bool, quiet: bool
) -> None:
    """Raises UsageError for flags that contradict each other, would do nothing, or are out of range."""
    if seed is not None and not 0 <= seed <= LARGEST_SEED:
        raise UsageError(f"the seed {seed} is out of range", f"give a whole number from 0 to {LARGEST_SEED}")
    if as_json and visualize:
        raise UsageError("--json and --visualize exclude each other", "drop one of them")
    if quiet and visualize:
        raise UsageError("--quiet keeps stderr empty, and --visualize draws there", "drop one of them")
    if quiet and stats and not as_json:
        raise UsageError("--quiet keeps stderr empty, and --stats writes there", "drop one of them, or add --json")
    if not all(stop):
        raise UsageError("a --stop string is empty", "give the text to stop at")


def _check_thinking(
    max_tokens: int, think_tokens: int | None, *, think: bool, show: bool, as_json: bool, quiet: bool
) -> None:
    """Raises UsageError where a flag about thoughts would do nothing, or leaves no room for an answer."""
    if think_tokens is not None and not think:
        raise UsageError("--think-tokens has no thought to bound", "add --think")
    if think_tokens is not None and think_tokens >= max_tokens:
        raise UsageError(
            f"--think-tokens {think_tokens} leaves nothing of --max-tokens {max_tokens} for an answer",
            "raise --max-tokens, or think less",
        )
    if show and as_json:
        raise UsageError("--show-thinking adds nothing to --json, which has the thoughts", "drop one of them")
    if show and quiet:
        raise UsageError("--quiet keeps stderr empty, and --show-thinking writes there", "drop one of them")


def _nothing(_: str) -> None:
    """What --quiet says."""
