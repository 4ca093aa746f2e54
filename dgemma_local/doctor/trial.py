"""What only a trial tells: every kernel beside its torch twin on this card, and an easy answer of the demo."""

from collections.abc import Iterator

from dgemma_local.doctor.child import STEPS
from dgemma_local.doctor.examination import REPORT, Machine
from dgemma_local.doctor.finding import Finding, fail, ok, skip, warn
from dgemma_local.doctor.probe import Lost

COMPILING = 300.0  # seconds: kernels are compiled for a card once, a minute or so, on a slow processor more
LAYOUT = "nvfp4"  # whose kernels are tried where no checkpoint is chosen by the card
WITHOUT = "without torch there is nothing to try"
NO_TORCH = "DGEMMA_OPS=torch runs everything in plain torch"


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
    """A line for each kernel that is wrong, one for those that are right."""
    facts = {"layout": layout, "outcomes": outcomes}
    wrong = [each for each in outcomes if not each["ok"]]
    untested = [str(each["name"]) for each in outcomes if each["untested"]]
    right = [str(each["name"]) for each in outcomes if each["ok"] and not each["untested"]]
    for each in wrong:
        cure = f"a run puts its torch twin in its place, slower; try another driver or triton, and {REPORT}"
        yield fail(f"kernel {each['name']}", f"differs from its torch twin: {each['what']}", cure)
    if untested:
        what = f"not tried, the card has too little memory: {', '.join(untested)}"
        yield warn("kernels", what, "end what holds the card, and run this again")
    said = f"{len(right)} of {len(outcomes)} as their torch twins ({layout})"
    yield ok("kernels", f"{said}: {', '.join(right)}" if right else said, **facts)


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
