"""The command behind both front ends, `dgemma bench` and `python -m dgemma_local.bench`: a request in, a document out."""

import os
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from time import perf_counter
from typing import TYPE_CHECKING, Any

from dgemma_local import __version__
from dgemma_local.bench import SCHEMA
from dgemma_local.bench.json_file import JsonFile
from dgemma_local.bench.report import counted
from dgemma_local.bench.request import Request
from dgemma_local.errors import BenchRefused, DgemmaError
from dgemma_local.interrupts import import_torch

if TYPE_CHECKING:
    from dgemma_local.bench.measure import Bench
    from dgemma_local.bench.protocols import Task
    from dgemma_local.bench.server import Server
    from dgemma_local.bench.subject import Subject


def run(request: Request, say: Callable[[str], None], file: JsonFile, show: Callable[[dict[str, Any]], None]) -> None:
    """Opens, tests, measures, and shows what was found.

    Raises as `perform` does; and, once our own figures are shown, what kept theirs from being measured, and UsageError
    where the file could not be written.
    """
    import_torch()
    document, failed = perform(request, say, file)
    show(document)
    file.check()
    if failed is not None:
        raise failed


def perform(
    request: Request, say: Callable[[str], None], file: JsonFile | None = None
) -> tuple[dict[str, Any], DgemmaError | None]:
    """Opens, tests, measures -> the document, and the error that ended the comparison. `say` hears what is being done.

    `file` gets the document at once, with nothing measured, and again after each task. Raises what opening a model raises;
    UsageError on a context too short for a protocol; BenchRefused where a kernel failed or two runs differ; EndpointError
    of a server that is not there or too small: then the file is removed. KeyboardInterrupt after Ctrl-C.
    """
    file = file or JsonFile(None)
    document = _head(request)
    file.write(document)  # what a run before has left is none of this one
    try:
        failed = _measured(document, request, say, file)
    except DgemmaError:
        file.remove()
        raise
    return document, failed


def _measured(
    document: dict[str, Any], request: Request, say: Callable[[str], None], file: JsonFile
) -> DgemmaError | None:
    """Fills the document and the file; raises and returns as `perform` does."""
    from dgemma_local import ops
    from dgemma_local.bench import machine
    from dgemma_local.bench.measure import Bench

    ops.wishes()  # a word that is not known
    served = _served(request.against)
    subject = _opened(request, say)
    document |= {"label": subject.label, "subject": _described(subject)}
    asked = _all_tasks(subject, request)
    reason = _why_not(subject, request, served, asked)
    if reason is not None:
        say(f"transformers is not measured: {reason}")
    require_sound_kernels(subject)
    machine.forget_peak(subject.device)
    failed: DgemmaError | None = None
    with machine.Power(machine.uuid_of(subject.device)) as power:
        bench = Bench(clock=perf_counter, settle=machine.settle(subject.device), shared=subject.shared, power=power)
        peak: tuple[int, str] | None = None

        def keep() -> None:
            of_now = peak or machine.peak_memory(subject.device)
            of, planned = dict(zip(("peak_bytes", "of"), of_now, strict=True)), {"planned_bytes": subject.planned_bytes}
            document["memory"] = of | planned
            document["machine"] = machine.describe(subject.device, power)
            file.write(document)

        for name in request.protocols:
            if name == "breakdown":
                peak = machine.peak_memory(subject.device)  # before it takes a cache and a copy of its own
            for found in _protocol(name, asked.get(name, ()), subject, bench, request, say):
                document["protocols"][name] = found
                keep()
        peak = peak or machine.peak_memory(subject.device)  # before others take their part
        if reason is not None:
            document["against"] = _without(request, reason)
        elif request.against is not None:
            try:
                document["against"] = _against(subject, request, asked["fixed16"][0], document["protocols"], say)
            except DgemmaError as error:  # ours are measured, and took minutes
                failed = error
                document["against"] = _without(request, error.what)
    document["complete"] = True
    keep()
    return failed


def _opened(request: Request, say: Callable[[str], None]) -> "Subject":
    from dgemma_local.bench.subject import lands_on, open_model, open_synthetic

    if request.model is None:
        assert request.layout is not None
        return open_synthetic(
            request.layout, device=request.device, context=request.context, seed=request.seed, fp8=request.fp8, say=say
        )
    dtype = request.dtype
    beside = request.against == "transformers" and dtype is None
    if beside and lands_on(request.model, request.device) == "cpu" and _can_be_opened(request.model):
        dtype = "float32"
        say("in float32, where tokens are to equal those of transformers; --dtype bfloat16 compares what is stored")
    return open_model(request.model, device=request.device, context=request.context, dtype=dtype, fp8=request.fp8)


def _can_be_opened(name: str) -> bool:
    """Whether transformers can open this model here, its memory aside."""
    from dgemma_local.bench.subject import folder_of
    from dgemma_local.bench.transformers_side import unable

    return unable(folder_of(name)) is None


def _head(request: Request) -> dict[str, Any]:
    """A document of nothing opened yet."""
    return {
        "schema": SCHEMA,
        "complete": False,
        "dgemma": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "label": None,
        "seed": request.seed,
        "runs": request.runs,
        "subject": None,
        "machine": None,
        "protocols": {},
        "memory": None,
        "against": None,
    }


def _all_tasks(subject: "Subject", request: Request) -> "dict[str, tuple[Task, ...]]":
    """Of each protocol, and of fixed16 for a comparison too. Raises UsageError on a context too short for one of them."""
    from dgemma_local.bench.protocols import ContextTooShort

    names = [*request.protocols, *(["fixed16"] if request.against else [])]
    found: dict[str, tuple[Task, ...]] = {}
    short: list[ContextTooShort] = []
    for name in dict.fromkeys(names):
        if name != "breakdown":
            try:
                found[name] = tasks(name, subject, request.seed)
            except ContextTooShort as error:
                short.append(error)
    if short:
        raise max(short, key=lambda error: error.least)
    return found


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
                lambda text: read([{"role": "user", "content": text}]),
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
    name: str,
    asked: "Sequence[Task]",
    subject: "Subject",
    bench: "Bench",
    request: Request,
    say: Callable[[str], None],
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

    noise = PhiloxNoise(request.seed, subject.conversation.model.canvas_length, subject.vocab_size, subject.device)
    runs, results = [], []
    for task in asked:
        say(f"{name}{'' if task.name == name else ' ' + task.name}: a warm-up, and {counted(request.runs, 'run')}")
        runs.append(repeat(subject.conversation, task, noise, bench, request.runs))
        results.append(result(task, runs[-1], bench))
        yield {"note": asked[0].note, "tasks": list(results), "rows": []}
    if name == "adaptive":
        yield {"note": asked[0].note, "tasks": [*results, together(asked, runs, bench)], "rows": []}


def _why_not(
    subject: "Subject",
    request: Request,
    served: "tuple[Server, str, int | None] | None",
    asked: "dict[str, tuple[Task, ...]]",
) -> str | None:
    """Why transformers cannot take part. Raises EndpointError where a server's model holds less than fixed16 asks for."""
    if request.against == "transformers":
        from dgemma_local.bench.transformers_side import why_not

        return why_not(subject.folder, subject.network)
    if served is not None:
        from dgemma_local.bench.endpoint import require_room

        task = asked["fixed16"][0]
        require_room(*served, len(task.prompt) + task.max_tokens)
    return None


def _without(request: Request, reason: str) -> dict[str, Any]:
    """`against` of the document where nothing of theirs was measured."""
    from dgemma_local.bench.report import RATIOS

    return {"what": request.against, "found": {"why_not": reason}, "ratio": dict.fromkeys(RATIOS)}


def _against(
    subject: "Subject", request: Request, task: "Task", ours: dict[str, Any], say: Callable[[str], None]
) -> dict[str, Any]:
    """`against` of the document: theirs, and the ratios ours : theirs as speeds."""
    assert request.against is not None
    if request.against == "transformers":
        from dgemma_local.bench import comparison
        from dgemma_local.bench.report import ratios

        found = comparison.measure(subject, subject.folder, task, runs=request.runs, say=say)
        return {"what": request.against, "found": found, "ratio": ratios(found)}
    from dgemma_local.bench import endpoint
    from dgemma_local.bench.protocols import random_ids
    from dgemma_local.bench.report import endpoint_ratios

    many = counted(request.runs, "request")
    say(f"the server: a warm-up, and {many} of {len(task.prompt):,} tokens in, {task.max_tokens:,} out")
    prompts = [random_ids(len(task.prompt), subject.vocabulary, request.seed + n) for n in range(1 + request.runs)]
    canvas = subject.conversation.model.canvas_length
    found = endpoint.measure(request.against, prompts, task.max_tokens, canvas=canvas)
    figures = ours["fixed16"]["tasks"][0]["figures"]
    return {"what": found["url"], "found": found, "ratio": endpoint_ratios(figures, found)}


def _served(against: str | None) -> "tuple[Server, str, int | None] | None":
    """The server, its model and the most tokens that it holds. Raises EndpointError where none answers.

    Before minutes have gone into our own figures. None where no server is asked.
    """
    if against in (None, "transformers"):
        return None
    from dgemma_local.bench.server import Server

    server = Server(str(against), os.environ.get("OPENAI_API_KEY", ""))
    return server, *server.model()


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
