"""`dgemma bench`: flags in, `bench.command` behind them, a table and one line of JSON out."""

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from dgemma_local.cli_flags import (
    Device,
    Dtype,
    WithAttentionHeld,
    WithDevice,
    WithEmbeddingHeld,
    WithMlpHeld,
    flag,
)
from dgemma_local.errors import DgemmaError, UsageError
from dgemma_local.interrupts import import_torch

if TYPE_CHECKING:
    from dgemma_local.ui import Record
    from dgemma_local.ui.record import Timed

DEMO = "demo"  # its name in models.toml


def bench(
    demo: Annotated[bool, typer.Option("--demo", help="The demo model: the default where there is no card.")] = False,
    model: Annotated[str | None, flag("-m --model", "A name from `dgemma models`, or a folder.")] = None,
    synthetic: Annotated[
        str | None,
        typer.Option("--synthetic", metavar="26b", help="The 26B model's shapes with random weights: no file needed."),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option("--layout", metavar="L", help="Of --synthetic: nvfp4 (default), nvfp4-nvidia, fp8 or bf16."),
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            "--protocol",
            metavar="P,…",
            help="fixed16 (vLLM's), adaptive, context, breakdown, or all. Default: all but context.",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="WHAT", help="transformers, or the http:// address of a vLLM server."),
    ] = None,
    view: Annotated[
        bool, typer.Option("--view", help="What the canvas view costs the demo model: with it and without, in turn.")
    ] = False,
    runs: Annotated[
        int | None,
        typer.Option(
            "--runs",
            metavar="N",
            help="Behind a warm-up; all with the same seed. Default: 3; of --view 10 pairs, the fewest.",
        ),
    ] = None,
    context: Annotated[int | None, flag("--context", "Tokens to plan for. Default: 8192.", min=None)] = None,
    seed: Annotated[int, flag("--seed", "Of prompts, noise and synthetic weights.")] = 0,
    fp8_attention: WithAttentionHeld = False,
    fp8_mlp: WithMlpHeld = False,
    fp8_embedding: WithEmbeddingHeld = False,
    dtype: Annotated[
        Dtype | None,
        flag("--dtype", "Compute in this. Default: as stored; float32 beside transformers on a CPU."),
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="FILE", help="The last line of stdout into this file, too, and before it what there is."
        ),
    ] = None,
    device: WithDevice = None,
    quiet: Annotated[bool, flag("--quiet -q", "No progress on stderr.")] = False,
) -> None:
    """Measure a model on this machine.

    Tables to stdout, and in the last line the same as one JSON object.

    Nothing is shown where a kernel's self-test failed, or two runs of one seed differ in a token: exit code 13.
    """
    from dgemma_local.bench import command
    from dgemma_local.bench.json_file import JsonFile
    from dgemma_local.bench.request import DEFAULT_RUNS, checked
    from dgemma_local.ui.bench import show_bench
    from dgemma_local.ui.terminal import stderr

    if view:
        others = {
            "--model": model,
            "--synthetic": synthetic,
            "--layout": layout,
            "--protocol": protocol,
            "--against": against,
            "--context": context,
            "--dtype": dtype,
            "--device": device,
            "--fp8-attention": fp8_attention,
            "--fp8-mlp": fp8_mlp,
            "--fp8-embedding": fp8_embedding,
        }
        _view([flag for flag, given in others.items() if given], runs, seed, json_file, quiet=quiet)
        return
    request = checked(
        demo=demo,
        model=model,
        synthetic=synthetic,
        layout=layout,
        protocol=protocol,
        against=against,
        runs=DEFAULT_RUNS if runs is None else runs,
        context=context,
        seed=seed,
        fp8_attention=fp8_attention,
        fp8_mlp=fp8_mlp,
        fp8_embedding=fp8_embedding,
        dtype=dtype.value if dtype else None,
        device=device.value if device else None,
    )
    notes = stderr()
    file = JsonFile(json_file, notes.say)
    command.run(
        request, (lambda text: None) if quiet else notes.say, file, lambda document: show_bench(document, sys.stdout)
    )


def _view(others: Sequence[str], pairs: int | None, seed: int, json_file: str | None, *, quiet: bool) -> None:
    """The demo model on the CPU, with the view and without. others: flags that mean nothing here."""
    from dgemma_local.bench.json_file import JsonFile
    from dgemma_local.bench.request import MOST_RUNS
    from dgemma_local.ui.cost import PAIRS, PROMPT, measure, show_cost
    from dgemma_local.ui.terminal import stderr

    if others:
        raise UsageError(f"--view measures the demo model, and {others[0]} means nothing to it", f"drop {others[0]}")
    pairs = PAIRS if pairs is None else pairs
    if not PAIRS <= pairs <= MOST_RUNS:
        raise UsageError(f"{pairs} pairs say little, or take forever", f"ask for {PAIRS} to {MOST_RUNS:,}")
    notes = stderr()
    file = JsonFile(json_file, notes.say)
    import_torch()
    import torch

    from dgemma_local.channels import AnswerDecoder
    from dgemma_local.session import Wishes, open_session, timed
    from dgemma_local.tokens import Message
    from dgemma_local.ui import Record, Start
    from dgemma_local.ui.canvas import Vocabulary

    session = open_session(DEMO, Wishes(device=Device.cpu.value))
    start = Start(
        model=session.name,
        demo=True,
        seed=seed,
        max_tokens=session.canvas_length,
        steps=session.steps,
        canvas_length=session.canvas_length,
    )

    def ask() -> "tuple[Iterable[Timed], Record]":
        messages = [Message(role="user", content=PROMPT)]
        events = session.answer(messages, seed=seed, max_tokens=start.max_tokens)
        return timed(events), Record(start, AnswerDecoder(session.tokenizer))

    tokenizer = session.tokenizer
    vocabulary = Vocabulary(text=tokenizer.piece, control=tokenizer.is_mark, ends=frozenset(session.generation.end_ids))
    subject = {
        "name": session.name,
        "device": Device.cpu.value,
        "canvas_length": session.canvas_length,
        "threads": torch.get_num_threads(),
    }
    file.write({"complete": False})  # what a run before has left is none of this one
    try:
        document = measure(ask, vocabulary, subject, seed, pairs, (lambda text: None) if quiet else notes.say)
    except DgemmaError:
        file.remove()
        raise
    file.write(document)
    show_cost(document, sys.stdout)
    file.check()
