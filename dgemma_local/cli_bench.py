"""`dgemma bench`: flags in, `bench.command` behind them, a table and one line of JSON out."""

import sys
from enum import StrEnum
from typing import Annotated

import typer


class Dtype(StrEnum):
    """What the weights are computed in."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Device(StrEnum):
    """Where the model runs."""

    cpu = "cpu"
    cuda = "cuda"


def bench(
    demo: Annotated[bool, typer.Option("--demo", help="The demo model: the default where there is no card.")] = False,
    model: Annotated[
        str | None, typer.Option("-m", "--model", metavar="NAME", help="A name from `dgemma models`, or a folder.")
    ] = None,
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
    runs: Annotated[int, typer.Option("--runs", metavar="N", help="Behind a warm-up; all with the same seed.")] = 3,
    context: Annotated[
        int | None, typer.Option("--context", metavar="N", help="Tokens to plan for. Default: 8192.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of prompts, noise and synthetic weights.")] = 0,
    fp8_attention: Annotated[bool, typer.Option("--fp8-attention", help="With attention held in FP8.")] = False,
    fp8_mlp: Annotated[bool, typer.Option("--fp8-mlp", help="With the dense MLP held in FP8.")] = False,
    fp8_embedding: Annotated[bool, typer.Option("--fp8-embedding", help="With the embedding held in FP8.")] = False,
    dtype: Annotated[
        Dtype | None,
        typer.Option("--dtype", help="Compute in this. Default: as stored; float32 beside transformers on a CPU."),
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="FILE", help="The last line of stdout into this file, too, and before it what there is."
        ),
    ] = None,
    device: Annotated[
        Device | None, typer.Option("--device", help="Default: the card if there is one; the demo runs on the CPU.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """Measure a model on this machine.

    Tables to stdout, and in the last line the same as one JSON object.

    Nothing is shown where a kernel's self-test failed, or two runs of one seed differ in a token: exit code 13.
    """
    from dgemma_local.bench import command
    from dgemma_local.bench.json_file import JsonFile
    from dgemma_local.bench.request import checked
    from dgemma_local.ui.bench import show_bench
    from dgemma_local.ui.terminal import stderr

    request = checked(
        demo=demo,
        model=model,
        synthetic=synthetic,
        layout=layout,
        protocol=protocol,
        against=against,
        runs=runs,
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
