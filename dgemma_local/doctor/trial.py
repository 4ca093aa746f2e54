"""What only a trial tells: checkpoints placed and read, kernels beside their torch twins, an easy answer of the demo."""

import time
from collections.abc import Iterator

from dgemma_local.doctor.child import STEPS
from dgemma_local.doctor.examination import REPORT, Machine
from dgemma_local.doctor.finding import Finding, fail, ok, skip, warn
from dgemma_local.doctor.probe import Lost
from dgemma_local.hub.failures import size

READING = 3600.0  # seconds for all contents: 50 GB from a slow disk
COMPILING = 300.0  # seconds: kernels are compiled for a card once, a minute or so, on a slow processor more
LAYOUT = "nvfp4"  # whose kernels are tried where no checkpoint is chosen by the card
WITHOUT = "without torch there is nothing to try"
NO_TORCH = "DGEMMA_OPS=torch runs everything in plain torch"


def contents(machine: Machine) -> Iterator[Finding]:
    """Whether each checkpoint is one of this architecture. With --verify those without published hashes are read."""
    if machine.torch is None:
        yield skip("contents", WITHOUT)
        return
    fitting, ends = [], time.monotonic() + READING
    for model, folder in list(machine.folders.items()):
        name, whole = f"contents {model}", machine.verify and machine.models[model].folder is not None
        try:
            found = machine.probe.ask("contents", max(0.0, ends - time.monotonic()), folder=str(folder), whole=whole)
        except Lost as lost:
            yield fail(name, f"the trial did not end well: {lost}", REPORT, folder=str(folder))
            continue
        if "error" in found:
            yield fail(name, found["error"], found.get("fix") or REPORT, folder=str(folder))
        elif whole:
            yield ok(name, f"{size(found['bytes'])} read, every number of it: nothing that cannot be right", **found)
        else:
            fitting.append(model)
    if fitting:
        yield ok("contents", f"tensors of this architecture, by their headers: {', '.join(fitting)}", models=fitting)


def kernels(machine: Machine) -> Iterator[Finding]:
    """Each kernel of the card's checkpoint by name; where none runs, why."""
    if machine.torch is None:
        yield skip("kernels", WITHOUT)
        return
    if machine.torch["cuda_available"]:
        machine.say("trying the kernels on this card; the first time they are compiled for it, a minute or more")
    layout = machine.wanted.entry.format if machine.wanted else None
    try:
        found = machine.probe.ask("kernels", COMPILING, layout=layout or LAYOUT)
    except Lost as lost:
        yield fail("kernels", f"the trial did not end well: {lost}", f"{NO_TORCH}; {REPORT}")
        return
    if "error" in found:
        yield fail("kernels", found["error"], found.get("fix") or f"{NO_TORCH}; {REPORT}")
        return
    if "why" in found:
        why = found["why"] if machine.card or machine.torch["cuda_available"] else f"no card is in use ({found['why']})"
        yield skip("kernels", f"nothing runs on kernels here: {why}", why=found["why"])
        return
    yield from judged(found["outcomes"], layout or LAYOUT)


def judged(outcomes: list[dict[str, str | bool]], layout: str) -> Iterator[Finding]:
    """A line for each kernel that is wrong, and one for those that are right: OK where that is all of them."""
    facts = {"layout": layout, "outcomes": outcomes}
    wrong = [each for each in outcomes if not each["ok"]]
    untested = [str(each["name"]) for each in outcomes if each["ok"] and each["untested"]]
    right = [str(each["name"]) for each in outcomes if each["ok"] and not each["untested"]]
    for each in wrong:
        cure = f"a run puts its torch twin in its place, slower; try another driver or triton, and {REPORT}"
        yield fail(f"kernel {each['name']}", f"differs from its torch twin: {each['what']}", cure)
    said = f"{len(right)} of {len(outcomes)} as their torch twins ({layout})"
    said = f"{said}: {', '.join(right)}" if right else said
    if untested:
        what = f"{said}; not tried, the card has too little memory: {', '.join(untested)}"
        yield warn("kernels", what, "end what holds the card, and run this again", **facts)
    elif wrong or not outcomes:
        yield warn("kernels", said, NO_TORCH, **facts)
    else:
        yield ok("kernels", said, **facts)


def smoke(machine: Machine) -> Iterator[Finding]:
    """An easy answer of the demo in a real session. One that never settles is an alarm: so does a network that is wrong."""
    if machine.torch is None:
        yield skip("demo", WITHOUT)
        return
    try:
        found = machine.probe.ask("smoke", COMPILING)
    except Lost as lost:
        yield fail("demo", f"the demo model does not run: {lost}", REPORT)
        return
    if "error" in found:
        yield fail("demo", found["error"], found.get("fix") or REPORT)
    elif not found["finite"] or not found["finished"] or found["steps"] < STEPS:
        yield fail(
            "demo", f"{found['steps']} steps, finite: {found['finite']}, ended: {found['finished']}", REPORT, **found
        )
    elif not found["converged"]:
        what = f"an easy answer did not settle in {found['steps']} steps: something is computed wrongly here"
        yield fail("demo", what, f"{NO_TORCH}, and tells whether a kernel is at fault; {REPORT}", **found)
    else:
        took = (
            f"loaded in {found['load_s']:.2f} s, {found['steps']} steps and their commit in {found['answer_s']:.2f} s"
        )
        yield ok("demo", f"{took}; {found['mode']}", **found)
        for notice in found["notices"]:
            yield warn("demo", notice, REPORT)
