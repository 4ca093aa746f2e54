"""How a load goes, and afterwards what it did.

loaded: 47,021 tensors placed in 633 parameters, 16.90 GB in 9.1 s (1.86 GB/s)
left out: 356 tensors (images are not read yet)
held: experts nvfp4 12.85 GB, attention bf16 2.22 GB, …
operations: fused kernels, a CUDA graph a pass
checksum of the stored bytes: 5f0c2e9a41d7b386
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from dgemma_local.ui.models import gb, show_plan
from dgemma_local.ui.status import SHORTEST_WINDOW
from dgemma_local.ui.terminal import stderr

if TYPE_CHECKING:
    from dgemma_local.hub import Watch
    from dgemma_local.loading import Proof
    from dgemma_local.planning import Planned

WORTH_SHOWING = 500 * 10**6  # bytes; less is read before anyone has looked


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """What `open_session` tells: bytes read and bytes in all, shown on stderr while the block runs."""
    with ExitStack() as stack:
        watch: Watch | None = None
        before = 0

        def arrived(done: int, total: int) -> None:
            nonlocal watch, before
            if total < WORTH_SHOWING:
                return
            if watch is None:
                from dgemma_local.ui import shelf

                watch = stack.enter_context(shelf.progress(quiet=quiet))
                watch.start("loading", total, 0)
            watch.advance(done - before)
            before = done

        yield arrived


def show_proof(planned: "Planned", proof: "Proof", mode: str, words: Iterable[str]) -> None:
    """The plan, what became of it, and what the operations run on, on stderr."""
    terminal = stderr()
    show_plan(planned.agreed or planned.estimate, planned.verdict, sys.stderr)
    for line in proof_lines(proof):
        terminal.say(line)
    for line in operation_lines(mode, words):
        terminal.say(line)


def operation_lines(mode: str, words: Iterable[str]) -> Iterator[str]:
    """What operations run on, why, and which words of DGEMMA_OPS count; `mode` is `Session.mode`."""
    how, _, why = mode.partition(": ")
    yield {
        "graphs": "operations: fused kernels, a CUDA graph a pass",
        "eager launches": f"operations: fused kernels, launch by launch, since {why}",
        "torch": f"operations: plain torch, since {why}",
    }[how]
    if other := ", ".join(word for word in words if word not in ("torch", "eager")):
        yield f"DGEMMA_OPS: {other}" + (", without effect in plain torch" if how == "torch" else "")


def proof_lines(proof: "Proof") -> Iterator[str]:
    """Tensors seen and where they went, bytes by component and dtype, a checksum if there is one."""
    long = proof.seconds >= SHORTEST_WINDOW
    speed = f" ({proof.read / 1e9 / proof.seconds:.2f} GB/s)" if long else ""
    yield (
        f"loaded: {proof.placed:,} tensors placed in {proof.filled:,} parameters, "
        f"{proof.read / 1e9:.2f} GB in {proof.seconds:.1f} s{speed}"
    )
    for reason, count in Counter(proof.ignored.values()).items():
        yield f"left out: {count:,} tensors ({reason})"
    if proof.compared:
        yield f"compared: {proof.compared:,} copies of tied weights, all equal"
    held = (f"{component} {dtype} {gb(size)}" for (component, dtype), size in proof.resident.items())
    yield f"held: {', '.join(held)}"
    if proof.checksum is not None:
        yield f"checksum of the stored bytes: {proof.checksum}"
