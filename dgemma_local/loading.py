"""Checkpoint to parameters and back: a plan from names and shapes, then one pass over the tensors.

    q_proj ┐                      gate_proj ┐
    k_proj ├ rows of qkv_proj     up_proj   ┴ rows of gate_up_proj       everything else is a parameter of its own
    v_proj ┘

A plan accounts for everything before a byte is read: each stored tensor has a place, is left out by a rule with a
reason, or is an error; each parameter is filled to its last row, or is an error. A tensor that is only skipped, or a
parameter that keeps what memory held, is a model that answers nonsense.

The published files store the text weights once, under `model.decoder`, and of the encoder only its layer scalars. A
second copy of a tied weight may stand beside them (`lm_head`, the encoder's): it is left out, and must be equal.

Source: tensor names of google/diffusiongemma-26B-A4B-it at revision f7f5b7f5; ties as in transformers 5.24.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dgemma_local.checkpoint import SINGLE, Checkpoint, TensorInfo, families
from dgemma_local.config import ModelConfig
from dgemma_local.errors import CheckpointError
from dgemma_local.model import parameter_shapes

STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}

_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in STORED.values()}  # as config.json spells them
_WITHOUT_SUFFIX = ("layer_scalar", "router.scale", "per_expert_scale", "experts.gate_up_proj", "experts.down_proj")
_LEFT_OUT = {
    "model.encoder.vision_tower.": "images are not read yet",
    "model.encoder.embed_vision.": "images are not read yet",
}
_DECODER, _ENCODER, _EMBEDDING = "model.decoder.", "model.encoder.language_model.", "model.decoder.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Placement:
    """`tensor`, as published, is the rows `row` … `row + its own` of `parameter`."""

    tensor: str
    parameter: str
    row: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Where every tensor goes. `placements`, `copies` and `ignored` share no tensor and leave none out."""

    placements: tuple[Placement, ...]
    copies: tuple[Placement, ...]  # tied duplicates of what stands there; compared, not loaded
    ignored: Mapping[str, str]  # tensor -> why it is left out


def plan(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> Plan:
    """Places every tensor, from the headers alone.

    Raises CheckpointError naming, by pattern, every tensor without a place, parameter without a tensor, wrong shape and
    dtype other than bf16, fp16 and fp32.
    """
    wanted = {place.tensor: (place, shape) for place, shape in _layout(config)}
    missing = [name for name in wanted if name not in tensors]
    placements: list[Placement] = []
    copies: list[Placement] = []
    ignored: dict[str, str] = {}
    unknown: list[str] = []
    misshapen: list[str] = []
    mistyped: list[str] = []
    for name, tensor in tensors.items():
        original = name if name in wanted else _tied_to(name)
        reason = next((why for prefix, why in _LEFT_OUT.items() if name.startswith(prefix)), None)
        if original in wanted:
            place, shape = wanted[original]
            (placements if name == original else copies).append(Placement(name, place.parameter, place.row))
            if tensor.shape != shape:
                misshapen.append(f"{name} is {list(tensor.shape)}, not {list(shape)}")
            elif tensor.dtype not in STORED:
                mistyped.append(f"{name} is {tensor.dtype}")
        elif reason is not None:
            ignored[name] = reason
        else:
            unknown.append(name)
    faults = {
        "tensors without a place in this model": unknown,
        "tensors of this model that are missing": missing,
        "tensors of another shape than config.json asks": misshapen,
        "tensors of a dtype that is not read": mistyped,
    }
    if any(faults.values()):
        raise CheckpointError(
            "; ".join(f"{fault} ({len(names)}): {families(names)}" for fault, names in faults.items() if names),
            "give the whole folder of one checkpoint, bf16, fp16 or fp32 with fused experts: only that layout is read so far",
        )
    return Plan(tuple(placements), tuple(copies), ignored)


def load(
    checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Every parameter of `model.parameter_shapes`, in `dtype` on `device`, as `model.DiffusionGemma` takes them.

    `dtype` None: as stored; where stored dtypes are mixed, config.json's, else the embedding's. Beyond the parameters
    one tensor at a time is in memory. Raises CheckpointError: what `plan` finds, a copy of a tied weight that differs, a
    file that cannot be read.
    """
    layout = plan(config, checkpoint.tensors)
    if dtype is None:
        dtype = _stored_dtype(checkpoint, config, layout)
    shapes = parameter_shapes(config)
    parameters = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
    for place, tensor in _read(checkpoint, layout.placements):
        _rows(parameters, place, len(tensor)).copy_(tensor)
    for place, tensor in _read(checkpoint, layout.copies):
        if not torch.equal(_rows(parameters, place, len(tensor)), tensor.to(device, dtype)):
            raise CheckpointError(
                f"{place.tensor} differs from {_tied_to(place.tensor)}, and this architecture ties them",
                "give a checkpoint whose embedding and head, encoder and decoder share their weights",
            )
    return parameters


def save(config: ModelConfig, weights: Mapping[str, Tensor], folder: Path, dtype: torch.dtype | None = None) -> None:
    """Writes `weights`, by our names, to `folder`/model.safetensors by the published ones; the inverse of `load`.

    `dtype` None: as they are. The file appears whole or not at all. Raises ValueError where `weights` are not exactly
    the model's parameters or the dtype is not one that `load` reads.
    """
    if {name: tuple(weight.shape) for name, weight in weights.items()} != parameter_shapes(config):
        raise ValueError("the weights are not the parameters of this configuration")
    tensors = {
        place.tensor: _rows(weights, place, shape[0]).detach().to("cpu", dtype).contiguous()
        for place, shape in _layout(config)
    }
    if not {tensor.dtype for tensor in tensors.values()} <= set(STORED.values()):
        raise ValueError(f"a checkpoint is stored in one of {', '.join(_BY_NAME)}")
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{SINGLE}.{os.getpid()}"
    try:
        save_file(tensors, unfinished, metadata={"format": "pt"})
        unfinished.chmod(0o644)  # safetensors leaves it to its owner alone
        unfinished.replace(folder / SINGLE)
    finally:
        unfinished.unlink(missing_ok=True)


def _layout(config: ModelConfig) -> Iterator[tuple[Placement, tuple[int, ...]]]:
    """Every tensor of the published layout with its shape, parameter by parameter."""
    for parameter, (rows, *rest) in parameter_shapes(config).items():
        row = 0
        for tensor, height in _parts(config, parameter, rows):
            yield Placement(tensor, parameter, row), (height, *rest)
            row += height


def _parts(config: ModelConfig, parameter: str, rows: int) -> list[tuple[str, int]]:
    """The published tensors that make up one parameter, top to bottom, with their rows."""
    if parameter.endswith(".encoder_layer_scalar"):
        return [(_ENCODER + parameter.replace("encoder_layer_scalar", "layer_scalar"), rows)]
    name = _DECODER + parameter
    if name.endswith(_WITHOUT_SUFFIX):
        return [(name, rows)]
    block, _, leaf = name.rpartition(".")
    if leaf == "qkv_proj":
        layer = config.layers[int(parameter.split(".")[1])]
        q, kv = config.heads * layer.head_dim, layer.kv_heads * layer.head_dim
        heights = {"q": q, "k": kv} if layer.kind == "full" else {"q": q, "k": kv, "v": kv}
        return [(f"{block}.{letter}_proj.weight", height) for letter, height in heights.items()]
    if leaf == "gate_up_proj":
        return [(f"{block}.{half}_proj.weight", rows // 2) for half in ("gate", "up")]
    return [(f"{name}.weight", rows)]


def _tied_to(name: str) -> str:
    """The published name whose weight `name` repeats, if it repeats one."""
    if name == "lm_head.weight":
        return _EMBEDDING
    return _DECODER + name.removeprefix(_ENCODER) if name.startswith(_ENCODER) else name


def _rows(parameters: Mapping[str, Tensor], place: Placement, height: int) -> Tensor:
    return parameters[place.parameter][place.row : place.row + height]


def _stored_dtype(checkpoint: Checkpoint, config: ModelConfig, layout: Plan) -> torch.dtype:
    stored = {STORED[checkpoint.tensors[place.tensor].dtype] for place in layout.placements}
    if len(stored) == 1:
        return stored.pop()
    return _BY_NAME.get(str(config.dtype)) or STORED[checkpoint.tensors[_EMBEDDING].dtype]


def _read(checkpoint: Checkpoint, placements: tuple[Placement, ...]) -> Iterator[tuple[Placement, Tensor]]:
    """Each placement with its tensor, mapped from disk, file by file."""

    def file_of(place: Placement) -> Path:
        return checkpoint.tensors[place.tensor].file

    for path, places in groupby(sorted(placements, key=file_of), key=file_of):
        try:
            with safe_open(path, framework="pt") as tensors:
                for place in places:
                    yield place, tensors.get_tensor(place.tensor)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}", "check the file, or fetch it again") from None
