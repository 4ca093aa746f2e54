"""Checkpoint to parameters and back: memory for every parameter, one pass over the files, then a look at what arrived.

    open_checkpoint ─► scheme_of ─► plan ─► memory ─► read ─► verify

What a loader can silently get wrong is asked of the numbers: experts that are all one value, scales that are NaN,
infinite, negative or all zero.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dgemma_local.checkpoint import SINGLE, Checkpoint
from dgemma_local.config import ModelConfig
from dgemma_local.errors import CheckpointError
from dgemma_local.layout import STORED, Field, Options, Placement, Plan, component, destination, plan, tied_to, wanted
from dgemma_local.model import parameter_shapes
from dgemma_local.quant import Fp8, Nvfp4, Weight, quantise_fp8
from dgemma_local.reading import Job, Take, read
from dgemma_local.schemes import Scheme, scheme_of

_DTYPES = {**STORED, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}
LARGEST_UNIT = 448.0 * 6.0  # the largest number of E4M3 times that of E2M1: what a global scale of 1 can reach
_LARGEST_E4M3 = 0x7E  # 448 as a byte; one more is NaN, and those above are negative
_AGAIN = "fetch the checkpoint again; if it stays, its publisher's files are damaged"


@dataclass(slots=True)
class Proof:
    """What a load did, for a user who wants to know."""

    placed: int = 0  # tensors that are in a parameter now
    compared: int = 0  # tied copies, equal to what they repeat
    ignored: Mapping[str, str] = field(default_factory=dict)  # tensor -> why
    filled: int = 0  # parameters
    resident: Mapping[tuple[str, str], int] = field(default_factory=dict)  # (component, dtype) -> bytes
    read: int = 0  # bytes
    seconds: float = 0.0
    checksum: str | None = None  # of the stored bytes of every tensor that was read, where it was asked for


def load(
    checkpoint: Checkpoint,
    config: ModelConfig,
    options: Options | None = None,
    device: torch.device | str = "cpu",
    *,
    progress: Callable[[int, int], None] | None = None,
    checksum: bool = False,
    proof: Proof | None = None,
) -> dict[str, Weight]:
    """Plans and fills: every parameter of `model.parameter_shapes` on `device`, as `model.DiffusionGemma` takes them.

    Raises CheckpointError: what `plan` finds, and as `fill` does.
    """
    layout = plan(config, checkpoint.tensors, scheme_of(checkpoint.quantisation), options)
    return fill(checkpoint, layout, device, progress=progress, checksum=checksum, proof=proof)


def fill(
    checkpoint: Checkpoint,
    layout: Plan,
    device: torch.device | str = "cpu",
    *,
    progress: Callable[[int, int], None] | None = None,
    checksum: bool = False,
    proof: Proof | None = None,
) -> dict[str, Weight]:
    """Reads what `layout` places. `progress` hears bytes read and bytes in all; `proof` is filled in.

    Raises CheckpointError: a copy of a tied weight that differs, a file that cannot be read, numbers that cannot be
    right.
    """
    start = time.perf_counter()
    weights = {parameter: held.empty(device) for parameter, held in {**layout.held, **layout.staged}.items()}
    total, done = sum(checkpoint.tensors[place.tensor].nbytes for place in layout.placements), 0

    def arrived(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(done, total)

    sums = read((_job(checkpoint, weights, place) for place in layout.placements), progress=arrived, checksum=checksum)
    read(_comparison(checkpoint, weights, place) for place in layout.copies)
    verify(weights, layout)
    for parameter in layout.staged:
        stored = weights[parameter]
        assert isinstance(stored, Nvfp4)
        weights[parameter] = quantise_fp8(stored.decode(torch.bfloat16))
    if proof is not None:
        proof.placed, proof.compared, proof.ignored = len(layout.placements), len(layout.copies), layout.ignored
        proof.filled, proof.resident, proof.read = len(weights), layout.resident, total
        proof.checksum = _digest(sums) if checksum else None
        proof.seconds = time.perf_counter() - start
    return weights


def decoded(weights: Mapping[str, Weight], dtype: torch.dtype) -> dict[str, Tensor]:
    """The same parameters as plain tensors; the packed ones in `dtype`."""
    return {name: w if isinstance(w, Tensor) else w.decode(dtype) for name, w in weights.items()}


def _job(checkpoint: Checkpoint, weights: Mapping[str, Weight], place: Placement) -> Job:
    tensor = checkpoint.tensors[place.tensor]
    stored = _DTYPES[tensor.dtype]
    weight = weights[place.parameter]
    if isinstance(weight, Fp8) and place.field == "":
        return Job(tensor, stored, take=_quantising(weight, place))
    to = destination(weights, place)
    if to.device.type == "cpu" and to.dtype == stored:
        return Job(tensor, stored, to=to)

    def take(row: int, part: Tensor) -> None:
        to[row : row + len(part)].copy_(part) if part.dim() else to.copy_(part)

    return Job(tensor, stored, take=take)


def _quantising(weight: Fp8, place: Placement) -> Take:
    def take(row: int, part: Tensor) -> None:
        made = quantise_fp8(part.to(weight.codes.device))
        rows = slice(place.start + row, place.start + row + len(part))
        weight.codes[rows] = made.codes
        weight.scale[rows] = made.scale

    return take


def _comparison(checkpoint: Checkpoint, weights: Mapping[str, Weight], place: Placement) -> Job:
    tensor = checkpoint.tensors[place.tensor]
    weight = weights[place.parameter]

    def take(row: int, part: Tensor) -> None:
        if isinstance(weight, Fp8) and place.field == "":
            made = quantise_fp8(part.to(weight.codes.device))
            rows = slice(place.start + row, place.start + row + len(part))
            same = torch.equal(made.codes.view(torch.uint8), weight.codes[rows].view(torch.uint8))
        else:
            held = destination(weights, place)
            held = held[row : row + len(part)] if part.dim() else held[0]
            part = part.to(held.device, held.dtype)
            same = torch.equal(_comparable(held), _comparable(part))
        if not same:
            raise CheckpointError(
                f"{place.tensor} differs from {tied_to(place.tensor)}, and this architecture ties them",
                "give a checkpoint whose embedding and head, encoder and decoder share their weights",
            )

    return Job(tensor, _DTYPES[tensor.dtype], take=take)


def _comparable(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _digest(sums: Mapping[str, int]) -> str:
    """One checksum of all tensors, whatever file and order they came in."""
    lines = "".join(f"{name} {crc:08x}\n" for name, crc in sorted(sums.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


# ── numbers that cannot be right ──────────────────────────────────────────────────────────────────────────────────


def verify(weights: Mapping[str, Weight], layout: Plan) -> None:
    """Raises CheckpointError naming the tensor: matrices of one value, scales that are no scales."""
    for parameter, weight in weights.items():
        heights = layout.held[parameter].heights
        for where, bad, what in _faults(parameter, weight, heights):
            if bad.any():
                raise CheckpointError(f"{_culprit(layout, parameter, where, bad)} holds {what}", _AGAIN)


def prove(weights: Mapping[str, Weight], layout: Plan) -> None:
    """Raises CheckpointError naming the tensor: one that holds NaN or infinity anywhere.

    It reads all that was loaded once more, which a load does not take the time for.
    """
    for place in layout.placements:
        if not _all_finite(destination(weights, place)):
            raise CheckpointError(f"{place.tensor} holds NaN or infinity", _AGAIN)


def _all_finite(tensor: Tensor) -> bool:
    if tensor.dtype == torch.float8_e4m3fn:  # without infinities; torch finds no largest of its codes
        return bool((tensor.view(torch.uint8) & (_LARGEST_E4M3 + 1)).amax() <= _LARGEST_E4M3)
    if not tensor.is_floating_point():
        return True  # E2M1, two in a byte: every code is a number
    least, largest = tensor.aminmax()  # NaN where there is one; no memory of the tensor's size
    return bool(least.isfinite() & largest.isfinite())


def _faults(parameter: str, weight: Weight, heights: tuple[int, ...]) -> Iterator[tuple[Field, Tensor, str]]:
    """Field, [parts] or [experts, parts] bool, what is wrong where it is True."""

    def by_part(matrices: Tensor, test: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.stack([test(part) for part in matrices.split(heights, -2)], -1)

    if isinstance(weight, Nvfp4):
        worst = by_part(weight.scale.view(torch.uint8), lambda part: part.flatten(-2).amax(-1))
        yield "scale", worst > _LARGEST_E4M3, "NaN or negative block scales"
        yield "scale", worst == 0, "block scales that are all zero"
        for where, values in _globals(weight):
            yield where, ~(values.isfinite() & (values > 0)), "a global scale that is NaN, infinite, negative or zero"
        largest = LARGEST_UNIT / weight.global_scale if weight.divides else LARGEST_UNIT * weight.global_scale
        yield "global_scale", (largest < 1e-8) | (largest > 1e8), "a global scale out of all proportion"
        yield "packed", by_part(weight.packed, _one_value), "all bytes equal"
    elif isinstance(weight, Fp8):
        good = by_part(weight.scale, lambda part: (part.isfinite() & (part >= 0)).flatten(-2).all(-1))
        yield "scale", ~good, "scales that are NaN, infinite or negative"
        yield "scale", by_part(weight.scale, lambda part: (part == 0).flatten(-2).all(-1)), "scales that are all zero"
        yield "codes", by_part(weight.codes.view(torch.uint8), _one_value), "all values equal"
    elif heights:
        yield "", by_part(weight, _one_value), "all values equal"
    if isinstance(weight, Tensor) and component(parameter) in ("norms and scalars", "router"):
        yield "", ~weight.isfinite().all().reshape(1), "NaN or infinity"


def _globals(weight: Nvfp4) -> list[tuple[Field, Tensor]]:
    return [("global_scale", weight.global_scale), ("input_scale", weight.input_scale)]


def _one_value(matrices: Tensor) -> Tensor:
    """[..., out, in] -> [...] bool: whether a matrix holds one value only. A look at one row clears most of them."""
    row = matrices[..., 0, :]
    same = (row == row[..., :1]).all(-1)
    for index in map(tuple, same.nonzero().tolist()):
        same[index] = (matrices[index] == matrices[index][0, 0]).all()
    return same


def _culprit(layout: Plan, parameter: str, where: Field, bad: Tensor) -> str:
    """The published name of the first tensor where `bad` is True."""
    *expert, part = bad.nonzero()[0].tolist()
    first = part if where in ("global_scale", "input_scale") else sum(layout.held[parameter].heights[:part])
    for place in layout.placements:
        mine = place.parameter == parameter and place.field in (where, "")
        if mine and (place.expert is None or [place.expert] == expert):
            stacked = bool(expert) and place.expert is None  # one tensor of all experts
            if stacked or place.start <= first < place.stop:
                return place.tensor
    return parameter


# ── and back ──────────────────────────────────────────────────────────────────────────────────────────────────────


def save(config: ModelConfig, weights: Mapping[str, Weight], folder: Path, dtype: torch.dtype | None = None) -> None:
    """Writes `weights`, by our names, to `folder`/model.safetensors by the published ones; the inverse of `load`.

    Packed weights are written as compressed-tensors stores them, experts one by one; plain experts as one tensor a
    layer. `dtype` of plain tensors, None: as they are. The file appears whole or not at all. Raises ValueError where
    `weights` are not exactly the model's parameters or the dtype is not one that `load` reads.
    """
    if {name: tuple(weight.shape) for name, weight in weights.items()} != parameter_shapes(config):
        raise ValueError("the weights are not the parameters of this configuration")
    schemes = {name: stored_scheme(weight) for name, weight in weights.items()}
    fused = frozenset(name for name, scheme in schemes.items() if ".experts." in name and scheme is None)
    tensors: dict[str, Tensor] = {}
    for name, want in wanted(config, schemes, fused).items():
        tensor = destination(weights, want.place).detach().to("cpu")
        if want.place.field == "":
            tensor = tensor.to(dtype)
        tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
    if not {tensor.dtype for tensor in tensors.values()} <= set(_DTYPES.values()):
        raise ValueError(f"a checkpoint is stored in one of {', '.join(STORED)}")
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{SINGLE}.{os.getpid()}"
    try:
        save_file(tensors, unfinished, metadata={"format": "pt"})
        unfinished.chmod(0o644)  # safetensors leaves it to its owner alone
        unfinished.replace(folder / SINGLE)
    finally:
        unfinished.unlink(missing_ok=True)


def stored_scheme(weight: Weight) -> Scheme | None:
    """How `save` stores a weight."""
    if isinstance(weight, Nvfp4):
        return "nvfp4" if weight.divides else "modelopt"
    return "fp8" if isinstance(weight, Fp8) else None
