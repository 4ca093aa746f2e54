"""Compiles a recorded launch for a card that is not here, and reads from the machine code what a card would be given.

    with recording(gpu) as launches: rms_norm(x, w, eps)      # wrappers run on meta tensors of the real sizes
    artefact = compile_launch(launches[0], gpu)               # registers, spills, shared memory, mma, the hot loop

The signature is derived as triton's launcher derives it: a tensor is a pointer of its type, an int that is 1 becomes a
constant, multiples of 16 and aligned pointers are marked as such (without that mark there is no vector load and no
cp.async). ptxas and cuobjdump come with triton's wheel; neither a driver nor a card is needed.

    python tests/cross.py norms attention.py …    these kernels' configurations on all cards; --gpu ada, --loop for its ops
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton  # before dgemma_local.kernels, which looks whether somebody did
from dgemma_local.kernels._launch import ADA, BLACKWELL, HOPPER, Gpu, Launch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CARDS: Mapping[str, Gpu] = {"ada": ADA, "hopper": HOPPER, "blackwell": BLACKWELL}
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"

POINTERS = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "u1",
}
OLD_TRITON = "3.6.0"  # the oldest that pyproject allows
ALIGNED = 16  # bytes of a pointer, or units of an int, whose multiples triton marks
STEP = ("step/", "first/")  # configurations whose bounds are report.json's
SHORTEST = 9  # instructions; a backward jump over fewer waits for something
MMA = ("HMMA", "QMMA", "OMMA", "IMMA", "DMMA", "HGMMA", "QGMMA", "IGMMA", "UTCHMMA", "UTCQMMA", "UTCOMMA")
PTX_MMA = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[\w.:]*")
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);")


@dataclass(frozen=True, slots=True)
class Source:
    """What triton compiles: types, constants and marks by the argument's position."""

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[tuple[int, ...], Any]
    marks: Mapping[tuple[int, ...], Any]

    @property
    def key(self) -> str:
        return repr(
            (self.kernel.cache_key, self.signature, sorted(map(repr, self.constants.items())), sorted(self.marks))
        )


@dataclass(frozen=True, slots=True)
class Loop:
    """A stretch of code that a backward jump repeats, and how often each operation stands in it."""

    first: int
    last: int
    operations: Mapping[str, int]

    @property
    def length(self) -> int:
        return sum(self.operations.values())

    @property
    def mma(self) -> int:
        return count(self.operations, *MMA)


@dataclass(frozen=True, slots=True)
class Artefact:
    """What the compilers made of a launch for a card."""

    name: str
    capability: tuple[int, int]
    registers: int
    stack: int  # bytes a thread, of spills or of a call; what nothing loads or stores costs nothing
    spills: int  # LDL and STL
    shared: int  # bytes a program
    warps: int
    operations: Mapping[str, int]  # of the whole program, SASS
    loops: tuple[Loop, ...] = field(repr=False)  # innermost ones only
    ptx_mma: Mapping[str, int]

    @property
    def instructions(self) -> int:
        return sum(self.operations.values())

    @property
    def mma(self) -> dict[str, int]:
        return {o: n for o, n in self.operations.items() if o.split(".")[0] in MMA}

    @property
    def hot(self) -> Loop | None:
        """The innermost loop with the most mma; without any, the longest."""
        return max(self.loops, key=lambda loop: (loop.mma, loop.length), default=None)

    @property
    def lengths(self) -> list[int]:
        """Instructions of every loop that multiplies matrices, longest first; without such of the longest loop, or all."""
        of_mma = sorted((loop.length for loop in self.loops if loop.mma), reverse=True)
        return of_mma or [self.hot.length if self.hot else self.instructions]

    def __str__(self) -> str:
        arch = "sm_{}{}".format(*self.capability)
        head = f"{self.name:28s} {arch:6s} reg {self.registers:3d} shared {self.shared:6d} warps {self.warps}"
        if self.spills:
            head += f" SPILLS: stack {self.stack}, {self.spills} LDL/STL"
        if self.hot is None:
            return f"{head} | no loop, {self.instructions} instructions {short(self.mma)}"
        per = f", {self.hot.length / self.hot.mma:.2f} each" if self.hot.mma else ""
        return (
            f"{head} | loop {self.hot.length} with {self.hot.mma} mma{per}, all {self.instructions} {short(self.mma)}"
        )


def count(operations: Mapping[str, int], *names: str) -> int:
    return sum(n for o, n in operations.items() if o.split(".")[0] in names)


def short(operations: Mapping[str, int]) -> str:
    return " ".join(f"{o} ×{n}" for o, n in operations.items())


def source_of(launch: Launch) -> Source:
    """The signature that triton's launcher would derive from the arguments."""
    signature, constants, marks = {}, {}, {}
    given = dict(zip([p.name for p in launch.kernel.params], launch.args, strict=False)) | dict(launch.constants)
    for place, parameter in enumerate(launch.kernel.params):
        value = given.get(parameter.name, parameter.default)
        constant, kind, aligned = _specialised(value, parameter)
        signature[parameter.name] = kind
        if constant:
            constants[(place,)] = value
        elif aligned and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment):
            marks[(place,)] = [["tt.divisibility", ALIGNED]]
    return Source(launch.kernel, signature, constants, marks)


def _specialised(value: Any, parameter: Any) -> tuple[bool, str, bool]:
    """Whether it is a constant, its type, whether it is a multiple of 16."""
    if parameter.is_constexpr or value is None:
        return True, "constexpr", False
    if isinstance(value, torch.Tensor):
        return False, f"*{POINTERS[value.dtype]}", value.storage_offset() * value.element_size() % ALIGNED == 0
    if isinstance(value, bool):
        return False, "u1", False
    if isinstance(value, float):
        return False, "fp32", False
    if isinstance(value, int):
        if value == 1 and not parameter.do_not_specialize:
            return True, "constexpr", False
        kind = "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"
        return False, kind, value % ALIGNED == 0
    raise TypeError(f"argument {parameter.name}: {type(value).__name__}")


def title_of(launch: Launch) -> str:
    """The kernel's name, with its file's where that says more: attention, attention.combine."""
    file = launch.kernel.fn.__module__.rsplit(".", 1)[-1]
    return launch.name if launch.name.startswith(file) else f"{file}.{launch.name}"


def key_of(launch: Launch, gpu: Gpu) -> str:
    """The same for launches that are the same code."""
    return repr((source_of(launch).key, launch.warps, launch.stages, gpu.capability))


def compile_launch(launch: Launch, gpu: Gpu) -> Artefact:
    """Compile for `gpu` and read the artefact; triton's own errors pass through."""
    source = source_of(launch)
    major, minor = gpu.capability
    made = triton.compile(
        ASTSource(source.kernel, dict(source.signature), dict(source.constants), dict(source.marks)),
        target=GPUTarget("cuda", 10 * major + minor, 32),
        options={"num_warps": launch.warps, "num_stages": launch.stages},
    )
    dump = _dump(made.asm["cubin"])
    code = list(_instructions(dump))
    operations = Counter(operation for _, operation, _ in code)
    usage = re.search(r"REG:(\d+) STACK:(\d+)", dump)
    if usage is None or not code:
        raise RuntimeError(f"cuobjdump: no code or no REG and STACK in its answer, {dump[:200]!r}")
    return Artefact(
        title_of(launch),
        gpu.capability,
        int(usage[1]),
        int(usage[2]),
        count(operations, "LDL", "STL"),
        made.metadata.shared,
        made.metadata.num_warps,
        dict(operations),
        tuple(_innermost(code)),
        dict(Counter(PTX_MMA.findall(made.asm["ptx"]))),
    )


def _dump(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "cuobjdump", "-sass", "-res-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _instructions(dump: str) -> Iterator[tuple[int, str, str]]:
    """(address, operation, operands) of the machine code, without the NOPs that pad its end."""
    for line in dump.splitlines():
        if (found := INSTRUCTION.match(line)) and found[2] != "NOP":
            yield int(found[1], 16), found[2], found[3]


def _innermost(code: list[tuple[int, str, str]]) -> Iterator[Loop]:
    """Loops that hold no other loop. A jump to itself, behind the end, is no loop."""
    spans = []
    for address, operation, operands in code:
        target = re.search(r"0x([0-9a-f]+)", operands) if operation.startswith("BRA") else None
        if target and int(target[1], 16) < address:
            spans.append((int(target[1], 16), address))
    loops = [Loop(a, b, dict(Counter(o for at, o, _ in code if a <= at <= b))) for a, b in sorted(set(spans))]
    loops = [loop for loop in loops if loop.length >= SHORTEST]
    for loop in loops:
        if not any(inner != loop and loop.first <= inner.first and inner.last <= loop.last for inner in loops):
            yield loop


# Configurations by name: what crosses into another process is their number, for launches hold functions.


@cache
def _configurations() -> Any:
    sys.path.insert(0, str(Path(__file__).parent))
    from compile import configurations

    return configurations


def numbered(entry: Any, card: str) -> Iterator[tuple[int, str, Launch, str]]:
    """(number, label, launch, key) of a configuration's distinct launches."""
    seen = set()
    names: Counter[str] = Counter()
    for number, launch in enumerate(_configurations().recorded(entry, CARDS[card])):
        if (key := key_of(launch, CARDS[card])) not in seen:
            seen.add(key)
            names[title_of(launch)] += 1
            yield number, f"{title_of(launch)} {names[title_of(launch)]}", launch, key


def compile_numbered(name: str, card: str, number: int) -> Artefact:
    (entry,) = (e for e in _configurations().CONFIGURATIONS if e.name == name)
    return compile_launch(_configurations().recorded(entry, CARDS[card])[number], CARDS[card])


def _chosen(names: list[str], cards: list[str], once: bool) -> Iterator[tuple[Any, str, str, Launch, str]]:
    """Every distinct launch that is asked for; with `once` one of each kernel and card."""
    seen = set()
    for card in cards:
        for entry in _configurations().CONFIGURATIONS:
            if CARDS[card] in entry.gpus and (not names or {entry.name, entry.name.split("/")[0]} & set(names)):
                for _, label, launch, key in numbered(entry, card):
                    identity = (card, title_of(launch)) if once else (card, entry.name, key)
                    if identity not in seen:
                        seen.add(identity)
                        yield entry, card, label, launch, key


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="files of kernels/, or whole names of configurations; none: all")
    parser.add_argument("--gpu", choices=CARDS, action="append", help="only this card; may be given more than once")
    parser.add_argument("--once", action="store_true", help="one launch of each kernel and card")
    parser.add_argument("--loop", action="store_true", help="the operations of the hot loop")
    parser.add_argument("--store", action="store_true", help="write what is found into tests/compile/bounds.json")
    arguments = parser.parse_args()
    names = [Path(n).stem if n.endswith(".py") else n for n in arguments.names]
    print(f"triton {triton.__version__}")
    failed, made, stored = False, {}, {}
    for entry, card, label, launch, key in _chosen(names, arguments.gpu or list(CARDS), arguments.once):
        try:
            artefact = made[key] = made.get(key) or compile_launch(launch, CARDS[card])
        except Exception as error:  # whatever a compiler throws; the other launches are of interest all the same
            print(f"{entry.name:24s} {label}, {card}: {_told(error)}", flush=True)
            failed = True
            continue
        print(f"{entry.name:24s} {artefact}", flush=True)
        if artefact.shared > CARDS[card].shared_bytes:
            print(f"    SHARED MEMORY: {artefact.shared} of {CARDS[card].shared_bytes}")
        if arguments.loop and artefact.hot:
            print("    " + short(dict(Counter(artefact.hot.operations).most_common())))
        if entry.name.startswith(STEP):
            continue
        bound = {"lengths": artefact.lengths, "registers": artefact.registers}
        stored.setdefault(entry.name, {}).setdefault(card, {})[label] = bound
    if arguments.store and not failed:
        _store(stored)
    sys.exit(failed)


def _told(error: BaseException) -> str:
    """An error and what it came from: a device function's own error is the cause of its caller's."""
    told = f"{type(error).__name__}: {error}"
    while (cause := error.__cause__) is not None and cause is not error:
        error, told = cause, f"{told}\n  because of {type(cause).__name__}: {cause}"
    return told


def _store(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Replaces what is stored of the configurations and cards that were compiled, and forgets those that are gone."""
    path = Path(__file__).parent / "compile/bounds.json"
    known = [e.name for e in _configurations().CONFIGURATIONS]
    before = json.loads(path.read_text()) if path.exists() else {}
    after = {n: {**before.get(n, {}), **found.get(n, {})} for n in known if n in before or n in found}
    lines = [
        f"  {json.dumps(name)}: {{\n"
        + ",\n".join(f"    {json.dumps(c)}: {json.dumps(b)}" for c, b in cards.items())
        + "\n  }"
        for name, cards in after.items()
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
