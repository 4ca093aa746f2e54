"""Whether this card runs this model's kernels rightly: each once beside its torch twin, before the first step.

    apply(network) ─► verdict of this card, driver, torch, triton, kernels ─┬─ in the cache: nothing runs
                                                                            └─ else: run(network), and it is kept
    a kernel that fails is replaced by its twin, with a line that says so

Operands are small, of the model's own widths and formats, and the same on every card (`operands`); what is tried is in
`cases` and `ends`, how outcomes are compared in `compare`. What a trial costs is the compilation of its kernel, which
Triton keeps and the model's first step finds.

Not covered: other numbers than these; the splits of attention that another context than the planned one may take, and keys
further back than a window and a little; passes outside `captured`, whose rows are any number; other stabilities than 1
and 2; K/V in FP8; most of the vocabulary and of the experts; kernels under CUDA graphs, or beside each other; a fault that
comes now and then. A verdict is of one trial, not a proof.

A kernel that reads or writes where nothing is may end the process's CUDA context, and no twin can run in it any more:
that is a KernelCrash.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import groupby
from pathlib import Path
from stat import S_ISREG
from typing import Any

import torch

from dgemma_local import __version__, noise, ops, quant
from dgemma_local.card import cards
from dgemma_local.errors import KernelCrash
from dgemma_local.files import replaceable
from dgemma_local.model import DiffusionGemma
from dgemma_local.selftest.cases import cases_of
from dgemma_local.selftest.compare import Outputs
from dgemma_local.selftest.operands import Operands
from dgemma_local.selftest.trial import Case

__all__ = ["Outcome", "apply", "failing", "needed", "run"]

DRIVER = Path("/proc/driver/nvidia/version")
KEPT = 32  # verdicts in the file, the newest: cards, drivers and models come and go
LINE = 200  # characters of an error, for one line of a terminal
HOMELESS = "the kernels' self-test is not remembered: there is no home folder, and no XDG_CACHE_HOME"
UNTESTED = "untested: not enough memory on the card"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the trials of one kernel came to."""

    name: str  # in ops.KERNELS
    ok: bool
    what: str = ""  # what happened, and on which operands; of one that is right nothing


# ── the verbs ─────────────────────────────────────────────────────────────────────────────────────────────────────


def needed(network: DiffusionGemma) -> bool:
    """Whether this network's operations take kernels on a card: elsewhere there is nothing to test."""
    return (
        network.device.type == "cuda"
        and ops.why_torch(network.device, network.dtype) is None
        and "twins" not in ops.wishes()
    )


def apply(
    network: DiffusionGemma, say: Callable[[str], None] = lambda _: None, context: int | None = None
) -> list[str]:
    """Replaces every kernel that fails by its twin -> one line for each, and for a cache that cannot be used.

    `say` hears, before it takes long, why. `context`: tokens that are planned for; None: many. Raises KernelCrash.
    """
    outcomes, notices = _verdict(network, force=False, say=say, context=context)
    wrong = [outcome for outcome in outcomes if not outcome.ok]
    ops.replace(outcome.name for outcome in wrong)
    told = [
        f"kernel {each.name} failed its self-test ({each.what}): its torch twin runs instead, slower" for each in wrong
    ]
    unknown = [each.name for each in outcomes if each.what == UNTESTED]
    if unknown:
        told.append(f"self-test of {', '.join(unknown)} left out: not enough memory on the card")
    return told + notices


def failing(network: DiffusionGemma, *, force: bool = False, context: int | None = None) -> list[Outcome]:
    """The kernels that this network uses and this card gets wrong, by the kept verdict or a fresh one; `force`: fresh.

    `context` as `apply` has it. Raises KernelCrash.
    """
    return [outcome for outcome in _verdict(network, force, context=context)[0] if not outcome.ok]


@torch.inference_mode()
def run(network: DiffusionGemma, context: int | None = None) -> list[Outcome]:
    """Each kernel of this network once beside its twin, whatever is kept or replaced. Raises KernelCrash."""
    make, tried = Operands(network.device, network.dtype), cases_of(network, context)
    with _exact_twins():
        outcomes = [_outcome(name, list(cases), make) for name, cases in groupby(tried, lambda case: case.kernel)]
    if network.device.type == "cuda":
        torch.cuda.empty_cache()  # what a plan counts on
    return outcomes


# ── a kernel ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _outcome(name: str, cases: list[Case], make: Operands) -> Outcome:
    for case in cases:
        try:
            wrong = _wrong(case, make)
        except torch.OutOfMemoryError:
            return Outcome(name, True, UNTESTED)
        if wrong is not None:
            return Outcome(name, False, f"{wrong}; {case.what}")
    return Outcome(name, True)


def _wrong(case: Case, make: Operands) -> str | None:
    """What is wrong with a kernel on one case's operands; None: nothing."""
    file, trial = ops.KERNELS[case.kernel], case.prepare(make)
    twin = (trial.truth or trial.call)(getattr(file, f"{case.kernel}_twin"))
    _spoil(twin)
    try:
        ours = trial.call(getattr(file, case.kernel))
        _wait(make.device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a compiler, a driver or a wrapper: anything
        _assert_alive(make.device, case, error)
        return _said(error)
    return trial.wrong(ours, twin)


def _spoil(like: Outputs) -> None:
    """NaN where memory of these sizes is taken from next: what a kernel leaves unwritten shall not look right."""
    for made in [torch.empty_like(tensor) for tensor in like]:
        made.fill_(torch.nan if made.dtype.is_floating_point else 1)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _assert_alive(device: torch.device, case: Case, cause: Exception) -> None:
    """Raises KernelCrash where the error has taken the CUDA context with it: every later call fails alike."""
    try:
        _wait(device)
    except RuntimeError:
        raise KernelCrash(
            f"the kernel {case.kernel} crashed on {_name(device)} ({case.what}): {_said(cause)}",
            "set DGEMMA_OPS=twins, its torch twins in the kernels' place, or DGEMMA_OPS=torch; then report it",
        ) from cause


def _said(error: Exception) -> str:
    """An error's kind and its first line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:LINE] if lines else 'no message'}"


@contextmanager
def _exact_twins() -> Iterator[None]:
    """Twins' products without TF32 and without sums in bf16."""
    matmul = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision(), matmul.allow_bf16_reduced_precision_reduction
    torch.set_float32_matmul_precision("highest")
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        matmul.allow_bf16_reduced_precision_reduction = before[1]


# ── verdicts, kept ────────────────────────────────────────────────────────────────────────────────────────────────


def cache_file() -> Path | None:
    """Where verdicts are kept; None: a container's user may have no home.

    XDG_CACHE_HOME counts where it is absolute, as its specification has it.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not home.is_absolute():
        try:
            home = Path("~/.cache").expanduser()
        except RuntimeError:
            return None
    return home / "dgemma" / "selftest.json"


def _verdict(
    network: DiffusionGemma,
    force: bool,
    say: Callable[[str], None] = lambda _: None,
    context: int | None = None,
) -> tuple[list[Outcome], list[str]]:
    """Outcomes, and notices about the file."""
    if not needed(network):
        return [], []
    tried = cases_of(network, context)
    facts = _facts(network, tried)
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    kept, notices = _read()
    names = [name for name, _ in groupby(case.kernel for case in tried)]
    if not force and (found := _outcomes(kept.get(key), names)) is not None:
        return found, notices
    say("testing the kernels on this card; they are compiled for it first, once")
    outcomes = run(network, context)
    if not any(outcome.what == UNTESTED for outcome in outcomes):
        kept.pop(key, None)
        entry = {**facts, "outcomes": [asdict(outcome) for outcome in outcomes]}
        told = _write(dict([*kept.items(), (key, entry)][-KEPT:]))
        notices = notices or told
    return outcomes, notices


def _facts(network: DiffusionGemma, cases: list[Case]) -> dict[str, str]:
    """All that a verdict depends on."""
    tried = "\n".join(f"{case.kernel}: {case.what}" for case in cases)
    return {
        "card": _name(network.device),
        "capability": _capability(network.device),
        "driver": _driver(),
        "torch": str(torch.__version__),
        "triton": _triton(),
        "dgemma": __version__,
        "sources": _sources(),
        "cases": hashlib.sha256(f"{network.dtype}\n{tried}".encode()).hexdigest()[:16],
    }


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _capability(device: torch.device) -> str:
    return "{}.{}".format(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else ""


def _driver() -> str:
    """The version of the NVIDIA driver, one for all cards: as Linux has it, else asked of nvidia-smi; "" where neither is."""
    with suppress(OSError):
        return DRIVER.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    return next((card.driver for card in cards()), "")


def _triton() -> str:
    try:
        return str(import_module("triton").__version__)
    except ModuleNotFoundError:
        return ""


def _sources() -> str:
    """A hash of the kernels, of the formats and the random stream that they know, and of this test."""
    folders = {Path(str(file.__file__)).parent for file in ops.KERNELS.values()} | {Path(__file__).parent}
    files = [*(Path(file) for file in (noise.__file__, quant.__file__)), *(f for d in folders for f in d.glob("*.py"))]
    told = hashlib.sha256()
    for file in sorted(files):
        told.update(f"{file.name}\n".encode() + file.read_bytes())
    return told.hexdigest()[:16]


def _read() -> tuple[dict[str, Any], list[str]]:
    """What is kept by key, and a notice where it cannot be read."""
    file = cache_file()
    if file is None:  # which `_write` says
        return {}, []
    try:
        if _is_odd(file):  # likewise
            return {}, []
        kept = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):  # in the second case it cannot be written either
        return {}, []
    except OSError as error:
        return {}, [_notice(file, f"cannot be read: {error.strerror}")]
    except (ValueError, RecursionError):
        return {}, [_notice(file, "is damaged")]
    return (kept, []) if isinstance(kept, dict) else ({}, [_notice(file, "is damaged")])


def _is_odd(file: Path) -> bool:
    """Whether it is there and no regular file: a pipe's reader waits for its writer."""
    try:
        return not S_ISREG(file.stat().st_mode)
    except FileNotFoundError:
        return False


def _outcomes(entry: Any, names: list[str]) -> list[Outcome] | None:
    """Those of a kept verdict on the kernels `names`; None where there is none, or it is not of this form."""
    try:
        found = [Outcome(**outcome) for outcome in entry["outcomes"]]
    except (TypeError, KeyError):
        return None
    sound = all((type(each.ok), type(each.what)) == (bool, str) for each in found)
    return found if sound and [each.name for each in found] == names else None


def _write(kept: dict[str, Any]) -> list[str]:
    """All at once or not at all; a notice where it cannot be."""
    file = cache_file()
    if file is None:
        return [HOMELESS]
    try:
        file = replaceable(file)
        new = file.with_name(f"{file.name}.{os.getpid()}")
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            new.write_text(json.dumps(kept, indent=1), encoding="utf-8")
            new.replace(file)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        return [_notice(file, f"cannot be written: {error.strerror}")]
    return []


def _notice(file: Path, why: str) -> str:
    return f"the kernels' self-test is not remembered: {file} {why}"
