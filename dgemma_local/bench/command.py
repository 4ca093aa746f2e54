"""The command behind both front ends, `dgemma bench` and `python -m dgemma_local.bench`: a request in, a document out."""

import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from time import perf_counter
from typing import TYPE_CHECKING, Any

from dgemma_local import __version__
from dgemma_local.bench import SCHEMA
from dgemma_local.bench.json_file import JsonFile
from dgemma_local.bench.request import Request
from dgemma_local.errors import BenchRefused

if TYPE_CHECKING:
    from dgemma_local.bench.measure import Bench
    from dgemma_local.bench.protocols import Task
    from dgemma_local.bench.subject import Subject


def perform(request: Request, say: Callable[[str], None], file: JsonFile | None = None) -> dict[str, Any]:
    """Opens, tests, measures -> the document. `say` hears what is being done; `file` gets the document after each task.

    Raises what opening a model raises; BenchRefused where a kernel failed or two runs differ, and then the file is
    removed; EndpointError of a server; KeyboardInterrupt after Ctrl-C.
    """
    from dgemma_local.bench import machine
    from dgemma_local.bench.measure import Bench

    file = file or JsonFile(None)
    if request.against not in (None, "transformers"):
        _require_endpoint(request.against)
    subject = _opened(request, say)
    require_sound_kernels(subject)
    machine.forget_peak(subject.device)
    with machine.Power(machine.uuid_of(subject.device)) as power:
        bench = Bench(clock=perf_counter, settle=machine.settle(subject.device), shared=subject.shared, power=power)
        document = _head(request, subject)
        peak: tuple[int, str] | None = None

        def keep(complete: bool = False) -> None:
            of_now = peak or machine.peak_memory(subject.device)
            document["memory"] |= dict(zip(("peak_bytes", "of"), of_now, strict=True))
            document["machine"] = machine.describe(subject.device, power)
            file.write(document | {"complete": complete})

        try:
            for name in request.protocols:
                if name == "breakdown":
                    peak = machine.peak_memory(subject.device)  # before it takes a cache and a copy of its own
                for found in _protocol(name, subject, bench, request, say):
                    document["protocols"][name] = found
                    keep()
            peak = peak or machine.peak_memory(subject.device)  # before others take their part
            document["against"] = _against(subject, request, document["protocols"], say)
        except BenchRefused:
            file.remove()
            raise
    keep(complete=True)
    return document | {"complete": True}


def _opened(request: Request, say: Callable[[str], None]) -> "Subject":
    from dgemma_local.bench.subject import lands_on, open_model, open_synthetic

    if request.model is None:
        assert request.layout is not None
        say(f"making the 26B model of random numbers, {request.layout}")
        return open_synthetic(
            request.layout, device=request.device, context=request.context, seed=request.seed, fp8=request.fp8
        )
    dtype = request.dtype
    if dtype is None and request.against == "transformers" and lands_on(request.model, request.device) == "cpu":
        dtype = "float32"
        say("in float32, where tokens are to equal those of transformers; --dtype bfloat16 compares what is stored")
    return open_model(request.model, device=request.device, context=request.context, dtype=dtype, fp8=request.fp8)


def _head(request: Request, subject: "Subject") -> dict[str, Any]:
    """A document of nothing measured yet."""
    return {
        "schema": SCHEMA,
        "complete": False,
        "dgemma": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "label": subject.label,
        "seed": request.seed,
        "runs": request.runs,
        "subject": _described(subject),
        "machine": {},
        "protocols": {},
        "memory": {"planned_bytes": subject.planned_bytes},
        "against": None,
    }


def tasks(name: str, subject: "Subject", seed: int) -> "tuple[Task, ...]":
    """What a protocol asks of this subject: fixed16 one task, adaptive one a prompt, context one a length."""
    from dgemma_local.bench import protocols

    canvas, context = subject.conversation.model.canvas_length, subject.conversation.context
    if name == "adaptive":
        assert subject.tokenizer is not None
        read = subject.tokenizer.prompt
        known = None if subject.kind != "demo" else "demo-text" if subject.name == "demo-text" else "demo"
        return tuple(
            protocols.adaptive(
                subject.generation,
                lambda text: read([{"role": "user", "content": text}], max_tokens=context),
                demo=known,
                context=context,
                canvas=canvas,
            )
        )
    config, ids = subject.generation, subject.vocabulary
    if name == "fixed16":
        return (protocols.fixed16(config, canvas=canvas, context=context, vocabulary=ids, seed=seed),)
    return protocols.sweep(config, canvas=canvas, context=context, vocabulary=ids, seed=seed)


def require_sound_kernels(subject: "Subject") -> None:
    """Raises BenchRefused where a kernel of this subject fails its self-test; none is asked where none runs."""
    from dgemma_local import ops, selftest

    if not selftest.needed(subject.network):
        return
    wrong = selftest.failing(subject.network, context=subject.conversation.context)
    failing = {*(outcome.name for outcome in wrong), *ops.replaced()}
    if failing:
        raise BenchRefused(
            f"the self-test of these kernels failed on this card: {', '.join(sorted(failing))}",
            "no speed is shown over it; report it with `dgemma run --verbose`, card and driver",
        )


def _protocol(
    name: str, subject: "Subject", bench: "Bench", request: Request, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """A protocol of the document, again and again: once a task has been answered, with all that were."""
    if name == "breakdown":
        from dgemma_local.bench.breakdown import breakdown

        say("breakdown")
        rows = breakdown(subject.network, subject.conversation.room, subject.device)
        yield {"note": "", "tasks": [], "rows": rows}
        return
    from dgemma_local.bench.measure import repeat, result, together
    from dgemma_local.noise import PhiloxNoise

    asked = tasks(name, subject, request.seed)
    noise = PhiloxNoise(request.seed, subject.conversation.model.canvas_length, subject.vocab_size, subject.device)
    runs, results = [], []
    for task in asked:
        say(f"{name}{'' if task.name == name else ' ' + task.name}: a warm-up, and {request.runs} runs")
        runs.append(repeat(subject.conversation, task, noise, bench, request.runs))
        results.append(result(task, runs[-1], bench))
        yield {"note": asked[0].note, "tasks": list(results), "rows": []}
    if name == "adaptive":
        yield {"note": asked[0].note, "tasks": [*results, together(asked, runs, bench)], "rows": []}


def _against(
    subject: "Subject", request: Request, ours: dict[str, Any], say: Callable[[str], None]
) -> dict[str, Any] | None:
    """`against` of the document: theirs, and the ratios ours : theirs as speeds."""
    if request.against is None:
        return None
    task = tasks("fixed16", subject, request.seed)[0]
    if request.against == "transformers":
        from dgemma_local.bench import comparison
        from dgemma_local.bench.report import ratios

        found = comparison.measure(subject, subject.folder, task, runs=request.runs, say=say)
        return {"what": request.against, "found": found, "ratio": ratios(found)}
    from dgemma_local.bench import endpoint
    from dgemma_local.bench.protocols import random_ids
    from dgemma_local.bench.report import endpoint_ratios

    say(
        f"the server: a warm-up, and {request.runs} requests of {len(task.prompt):,} tokens in, {task.max_tokens:,} out"
    )
    prompts = [random_ids(len(task.prompt), subject.vocabulary, request.seed + n) for n in range(1 + request.runs)]
    canvas = subject.conversation.model.canvas_length
    found = endpoint.measure(request.against, prompts, task.max_tokens, canvas=canvas)
    figures = ours["fixed16"]["tasks"][0]["figures"]
    return {"what": found["url"], "found": found, "ratio": endpoint_ratios(figures, found)}


def _require_endpoint(url: str) -> None:
    """Raises EndpointError where no server answers at `url`: before minutes have gone into our own figures."""
    from dgemma_local.bench.server import Server

    Server(url, os.environ.get("OPENAI_API_KEY", "")).model()


def _described(subject: "Subject") -> dict[str, Any]:
    network = subject.network
    return {
        "name": subject.name,
        "kind": subject.kind,
        "layout": subject.layout,
        "fp8": list(subject.fp8),
        "dtype": str(network.dtype).removeprefix("torch."),
        "device": str(subject.device),
        "mode": subject.mode,
        "context": subject.conversation.context,
        "canvas_length": subject.conversation.model.canvas_length,
        "vocab_size": subject.vocab_size,
        "load_seconds": subject.load_seconds,
        "planned_bytes": subject.planned_bytes,
    }
