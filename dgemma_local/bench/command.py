"""The command behind both front ends, `dgemma bench` and `python -m dgemma_local.bench`: a request in, a document out."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from dgemma_local import __version__
from dgemma_local.bench import SCHEMA
from dgemma_local.bench.protocols import NAMES
from dgemma_local.errors import BenchRefused, UsageError

if TYPE_CHECKING:
    from dgemma_local.bench.measure import Bench
    from dgemma_local.bench.protocols import Task
    from dgemma_local.bench.subject import Subject

SYNTHETIC = "26b"
DEFAULT_LAYOUT = "nvfp4"
DEFAULT_RUNS, MOST_RUNS = 3, 1000
LARGEST_SEED = (1 << 64) - 1
WITHOUT_CONTEXT = ("fixed16", "adaptive", "breakdown")  # by default: the sweep takes minutes
OF_SYNTHETIC = ("fixed16", "breakdown")  # its tokens mean nothing, so that a rule of stopping has nothing to see


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be measured; `checked` has looked at it."""

    model: str | None = None  # a name or a folder; None: synthetic
    layout: str | None = None  # of a synthetic model
    protocols: tuple[str, ...] = WITHOUT_CONTEXT
    against: str | None = None  # "transformers", or an endpoint's address
    runs: int = DEFAULT_RUNS
    context: int | None = None
    seed: int = 0
    device: str | None = None


def checked(
    *,
    demo: bool = False,
    model: str | None = None,
    synthetic: str | None = None,
    layout: str | None = None,
    protocol: str | None = None,
    against: str | None = None,
    runs: int = DEFAULT_RUNS,
    context: int | None = None,
    seed: int = 0,
    device: str | None = None,
) -> Request:
    """Flags as they were given. Raises UsageError on what contradicts itself, is unknown, or is out of range."""
    if demo + (model is not None) + (synthetic is not None) > 1:
        raise UsageError("--demo, --model and --synthetic exclude each other", "give one of them")
    if synthetic not in (None, SYNTHETIC):
        raise UsageError(f"no synthetic model is called {synthetic!r}", f"give --synthetic {SYNTHETIC}")
    if layout is not None and synthetic is None:
        raise UsageError("--layout is that of a synthetic model", f"add --synthetic {SYNTHETIC}, or drop it")
    if not 1 <= runs <= MOST_RUNS:
        raise UsageError(f"{runs} runs cannot be made", f"ask for 1 to {MOST_RUNS:,}")
    if not 0 <= seed <= LARGEST_SEED:
        raise UsageError(f"the seed {seed} is out of range", f"give a whole number from 0 to {LARGEST_SEED}")
    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"the device {device!r} is not known", "choose one of: cpu, cuda")
    if against not in (None, "transformers") and not str(against).startswith(("http://", "https://")):
        raise UsageError(f"nothing can be measured against {against!r}", "give transformers, or an http:// address")
    if context is not None and context < 1:
        raise UsageError(f"a context of {context} tokens cannot be given", "ask for at least one canvas and a prompt")
    if synthetic is None:
        name, layout = ("demo" if demo else model or _default()), None
    else:
        name, layout = None, layout or DEFAULT_LAYOUT
        _check_layout(layout)
    if name is None and against == "transformers":
        raise UsageError("transformers cannot open random weights", "compare it on a model: --demo or --model NAME")
    wanted = _protocols(protocol, OF_SYNTHETIC if name is None else WITHOUT_CONTEXT)
    if name is None and "adaptive" in wanted and protocol != "all":
        raise UsageError(
            "a synthetic model has no words: adaptive means nothing", "ask for fixed16, context, breakdown"
        )
    if name is None:
        wanted = tuple(one for one in wanted if one != "adaptive")
    if against not in (None, "transformers") and "fixed16" not in wanted:
        raise UsageError("an endpoint is compared by fixed16", "add fixed16 to --protocol")
    return Request(
        model=name,
        layout=layout,
        protocols=wanted,
        against=against,
        runs=runs,
        context=context,
        seed=seed,
        device=device,
    )


def writable(file: str | None) -> Path | None:
    """Where the document goes as well, looked at before anything is measured. Raises UsageError where it cannot."""
    if file is None:
        return None
    path = Path(file)
    try:
        there = path.exists()
        path.open("a").close()
        if not there:
            path.unlink()  # nothing is left behind where nothing is measured
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "not a path"
        raise UsageError(f"{file!r} cannot be written: {why}", "give --json a file in a folder that is there") from None
    return path


def perform(request: Request, say: Callable[[str], None]) -> dict[str, Any]:
    """Opens, tests, measures -> the document. `say` hears what is being done.

    Raises what opening a model raises; BenchRefused where a kernel failed or two runs differ; FetchError of an endpoint;
    KeyboardInterrupt after Ctrl-C.
    """
    from dgemma_local.bench import machine
    from dgemma_local.bench.measure import Bench
    from dgemma_local.bench.subject import open_model, open_synthetic

    if request.against not in (None, "transformers"):
        _require_endpoint(request.against)
    if request.model is None:
        assert request.layout is not None
        say(f"making the 26B model of random numbers, {request.layout}")
        subject = open_synthetic(request.layout, device=request.device, context=request.context, seed=request.seed)
    else:
        subject = open_model(request.model, device=request.device, context=request.context)
    require_sound_kernels(subject)
    machine.forget_peak(subject.device)
    found: dict[str, Any] = {}
    with machine.Power(machine.uuid_of(subject.device)) as power:
        settle = machine.settle(subject.device)
        bench = Bench(clock=perf_counter, settle=settle, shared=subject.shared, power=power)
        for name in request.protocols:
            found[name] = _protocol(name, subject, bench, request, say)
        peak, of = machine.peak_memory(subject.device)  # before others take their part
        against = _against(subject, request, found, say)
    return {
        "schema": SCHEMA,
        "dgemma": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "label": subject.label,
        "seed": request.seed,
        "runs": request.runs,
        "subject": _described(subject),
        "machine": machine.describe(subject.device, power),
        "protocols": found,
        "memory": {"peak_bytes": peak, "of": of, "planned_bytes": subject.planned_bytes},
        "against": against,
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
    sizes: dict[str, int] = {"canvas": canvas, "context": context, "vocab_size": subject.vocab_size, "seed": seed}
    if name == "fixed16":
        return (protocols.fixed16(subject.generation, **sizes),)
    return protocols.sweep(subject.generation, **sizes)


def require_sound_kernels(subject: "Subject") -> None:
    """Raises BenchRefused where a kernel of this subject fails its self-test; none is asked where none runs."""
    from dgemma_local import ops, selftest

    if not selftest.needed(subject.network):
        return
    failing = {*(outcome.name for outcome in selftest.failing(subject.network)), *ops.replaced()}
    if failing:
        raise BenchRefused(
            f"the self-test of these kernels failed on this card: {', '.join(sorted(failing))}",
            "no speed is shown over it; report it with `dgemma run --verbose`, card and driver",
        )


def _protocol(
    name: str, subject: "Subject", bench: "Bench", request: Request, say: Callable[[str], None]
) -> dict[str, Any]:
    if name == "breakdown":
        from dgemma_local.bench.breakdown import breakdown

        say("breakdown")
        rows = breakdown(subject.network, subject.conversation.room, subject.device)
        return {"note": "", "tasks": [], "rows": rows}
    from dgemma_local.bench.measure import repeat, result, together
    from dgemma_local.noise import PhiloxNoise

    asked = tasks(name, subject, request.seed)
    noise = PhiloxNoise(request.seed, subject.conversation.model.canvas_length, subject.vocab_size, subject.device)
    runs = []
    for task in asked:
        say(f"{name}{'' if task.name == name else ' ' + task.name}: a warm-up, and {request.runs} runs")
        runs.append(repeat(subject.conversation, task, noise, bench, request.runs))
    results = [result(task, each, bench) for task, each in zip(asked, runs, strict=True)]
    if name == "adaptive":
        results.append(together(asked, runs, bench))
    return {"note": asked[0].note, "tasks": results, "rows": []}


def _against(
    subject: "Subject", request: Request, ours: dict[str, Any], say: Callable[[str], None]
) -> dict[str, Any] | None:
    """`against` of the document: theirs, and the ratios ours : theirs as speeds."""
    if request.against is None:
        return None
    say(f"against {request.against}")
    if request.against == "transformers":
        from dgemma_local.bench import transformers_side
        from dgemma_local.bench.report import ratios

        task = tasks("fixed16", subject, request.seed)[0]
        found = transformers_side.measure(subject, subject.folder, task, runs=request.runs)
        return {"what": request.against, "found": found, "ratio": ratios(found)}
    from dgemma_local.bench import endpoint
    from dgemma_local.bench.protocols import random_ids
    from dgemma_local.bench.report import endpoint_ratios

    task = tasks("fixed16", subject, request.seed)[0]
    prompts = [random_ids(len(task.prompt), subject.vocab_size, request.seed + n) for n in range(1 + request.runs)]
    canvas = subject.conversation.model.canvas_length
    found = endpoint.measure(request.against, prompts, task.max_tokens, canvas=canvas)
    figures = ours["fixed16"]["tasks"][0]["figures"]
    return {"what": found["url"], "found": found, "ratio": endpoint_ratios(figures, found["median"])}


def _require_endpoint(url: str) -> None:
    """Raises UsageError where no server answers at `url`: before minutes have gone into our own figures."""
    from dgemma_local.bench.endpoint import Server

    Server(url, os.environ.get("OPENAI_API_KEY", "")).model()


def _described(subject: "Subject") -> dict[str, Any]:
    network = subject.network
    return {
        "name": subject.name,
        "kind": subject.kind,
        "layout": subject.layout,
        "dtype": str(network.dtype).removeprefix("torch."),
        "device": str(subject.device),
        "mode": subject.mode,
        "context": subject.conversation.context,
        "canvas_length": subject.conversation.model.canvas_length,
        "vocab_size": subject.vocab_size,
        "load_seconds": subject.load_seconds,
        "planned_bytes": subject.planned_bytes,
    }


def _default() -> str:
    """What `run` would open: the checkpoint for this card where it is fetched, else the demo."""
    from dgemma_local.auto import to_run

    return to_run()[0]


def _check_layout(layout: str) -> None:
    from dgemma_local.bench.synthetic import LAYOUTS

    if layout not in LAYOUTS:
        raise UsageError(f"no layout is called {layout!r}", f"choose of: {', '.join(LAYOUTS)}")


def _protocols(text: str | None, default: Sequence[str]) -> tuple[str, ...]:
    """In the order of NAMES."""
    if text is None:
        return tuple(default)
    if text == "all":
        return NAMES
    wanted = set(_words(text))
    if unknown := sorted(wanted - {*NAMES}):
        raise UsageError(f"no protocol is called {unknown[0]!r}", f"choose of: {', '.join(NAMES)}; or all")
    if not wanted:
        raise UsageError("--protocol names nothing", f"choose of: {', '.join(NAMES)}; or all")
    return tuple(name for name in NAMES if name in wanted)


def _words(text: str) -> Iterator[str]:
    return (word.strip() for word in text.split(",") if word.strip())
