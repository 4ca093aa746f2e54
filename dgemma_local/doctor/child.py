"""What the probe's child does: imports torch and triton, reads checkpoints, tries the kernels, answers on the demo.

Facts alone, no verdict.

Requests come on stdin; answers go to what was stdout: what libraries print there goes to stderr.
"""

import json
import math
import os
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgemma_local.errors import DgemmaError

if TYPE_CHECKING:
    import torch

    from dgemma_local.layout import Placement, Plan
    from dgemma_local.model import DiffusionGemma
    from dgemma_local.quant import Weight

STEPS = 2  # of the demo, at least: self-conditioning begins with the second
CONTEXT = 8192  # tokens that attention's splits are tried for, as a run plans them


def main() -> None:
    """Answers until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """A part's facts, or what it raised: `error`, and of one with a cure `fix`."""
    part: Callable[..., dict[str, Any]] = PARTS[request.pop("part")]
    try:
        return part(**request)
    except DgemmaError as error:
        return {"error": error.what, "fix": error.fix}
    except BaseException as error:  # of a broken installation: anything
        lines = str(error).strip().splitlines() or ["no message"]
        return {"error": f"{type(error).__name__}: {lines[0]}", "missing": getattr(error, "name", None)}


def torch_facts() -> dict[str, Any]:
    """Its version and build, what it can do here, and the cards it sees, in nvidia-smi's order."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    import torch

    square = torch.eye(4) @ torch.eye(4)  # a library for another processor ends here
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        there = torch.cuda.is_available()
    cards = range(torch.cuda.device_count() if there else 0)
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "sane": bool(square.trace() == 4),
        "cuda_available": there,
        "said": str(told[0].message).partition("\n")[0] if told else "",
        "cards": [torch.cuda.get_device_name(i) for i in cards],
        "built_for": torch.cuda.get_arch_list() if there else [],
    }


def triton_facts() -> dict[str, Any]:
    import triton

    return {"version": str(triton.__version__)}


def wishes() -> dict[str, Any]:
    """Of DGEMMA_OPS; a word that it may not hold is an error."""
    from dgemma_local import ops

    return {"words": sorted(ops.wishes())}


def contents(folder: str, whole: bool) -> dict[str, Any]:
    """A checkpoint's tensors placed in this architecture; `whole`: each read and proved, number by number."""
    from dgemma_local.checkpoint import open_checkpoint
    from dgemma_local.config import load_model_config
    from dgemma_local.layout import plan
    from dgemma_local.loading import fill, prove
    from dgemma_local.schemes import scheme_of

    checkpoint = open_checkpoint(Path(folder))
    layout = plan(load_model_config(Path(folder)), checkpoint.tensors, scheme_of(checkpoint.quantisation))
    for alone in _apart(layout) if whole else ():
        prove(fill(checkpoint, alone), alone)
    return {"placed": len(layout.placements), "bytes": checkpoint.bytes}


def _apart(layout: "Plan") -> "Iterator[Plan]":
    """A plan a parameter: no more than the largest of them is in memory at a time."""
    from dataclasses import replace

    placements, copies = _by_parameter(layout.placements), _by_parameter(layout.copies)
    for parameter, held in layout.held.items():
        mine, repeated = tuple(placements[parameter]), tuple(copies[parameter])
        yield replace(layout, placements=mine, copies=repeated, held={parameter: held}, staged={})


def _by_parameter(places: "Iterable[Placement]") -> "defaultdict[str, list[Placement]]":
    found: defaultdict[str, list[Placement]] = defaultdict(list)
    for place in places:
        found[place.parameter].append(place)
    return found


def kernels(layout: str) -> dict[str, Any]:
    """Every kernel of the 26B model's geometry in a checkpoint's layout, once beside its twin; or `why` none runs."""
    import torch

    from dgemma_local import ops, selftest

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    why = ops.why_torch(device, torch.bfloat16)
    if why is None and "twins" in ops.wishes():
        why = "DGEMMA_OPS=twins puts their torch twins in their place"
    if why is not None:
        return {"why": why}
    outcomes = selftest.run(shapes(layout, device), CONTEXT)
    return {
        "outcomes": [
            {"name": each.name, "ok": each.ok, "untested": each.what == selftest.UNTESTED, "what": each.what}
            for each in outcomes
        ]
    }


def shapes(layout: str, device: "torch.device") -> "DiffusionGemma":
    """The 26B model as its kernels see it, in no memory: every weight is one number, looked at as a matrix."""
    from dgemma_local.bench import synthetic
    from dgemma_local.model import DiffusionGemma

    held = synthetic.forms(synthetic.published_config(), layout)
    thin = {name: _thin(form.empty("meta"), device) for name, form in held.items()}
    return DiffusionGemma(synthetic.published_config(), thin)


def _thin(weight: "Weight", device: "torch.device") -> "Weight":
    from dataclasses import replace

    from dgemma_local.quant import Fp8, Nvfp4

    def one(tensor: "torch.Tensor") -> "torch.Tensor":
        return tensor.new_zeros(1, device=device).expand(tensor.shape)

    if isinstance(weight, Fp8):
        return Fp8(one(weight.codes), one(weight.scale))
    if isinstance(weight, Nvfp4):
        scales = one(weight.global_scale), one(weight.input_scale)
        return replace(
            weight, packed=one(weight.packed), scale=one(weight.scale), global_scale=scales[0], input_scale=scales[1]
        )
    return one(weight)


def smoke() -> dict[str, Any]:
    """An easy answer of the demo model in a real session, on a card where torch sees one: it takes STEPS, or few more."""
    import torch

    from dgemma_local.auto import DEMO
    from dgemma_local.events import CanvasCommitted, Finished, StepDone
    from dgemma_local.session import Wishes, open_session

    began = time.perf_counter()
    session = open_session(DEMO, Wishes(device="cuda" if torch.cuda.is_available() else "cpu"))
    opened = time.perf_counter()
    question = [{"role": "user", "content": "Say hello."}]
    events = list(session.answer(question, seed=1, max_tokens=1))  # type: ignore[arg-type]
    ended = time.perf_counter()
    steps = [event for event in events if isinstance(event, StepDone)]
    return {
        "steps": len(steps),
        "finite": all(map(math.isfinite, (h for step in steps for h in step.entropy))),
        "finished": isinstance(events[-1], Finished),
        "converged": all(event.converged for event in events if isinstance(event, CanvasCommitted)),
        "load_s": round(opened - began, 3),
        "answer_s": round(ended - opened, 3),
        "mode": session.mode,
        "notices": list(session.notices),
    }


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "torch": torch_facts,
    "triton": triton_facts,
    "wishes": wishes,
    "contents": contents,
    "kernels": kernels,
    "smoke": smoke,
}
