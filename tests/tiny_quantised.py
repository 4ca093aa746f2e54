"""Tiny checkpoints in the published quantised layouts, from formulas written out here: an independent witness.

    fp8        RedHatAI FP8-dynamic    compressed-tensors float-quantized: attention, dense MLP, experts
    nvfp4      RedHatAI NVFP4          compressed-tensors nvfp4-pack-quantized: dense MLP, experts
    modelopt   NVIDIA NVFP4            ModelOpt: experts

Experts are one tensor each. Every matrix has a global scale of its own, so gate's and up's differ.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import published
import torch
from tiny import tiny_config, tiny_tensors, write_tensors, write_tiny
from torch import Tensor

SCHEMES = ("fp8", "nvfp4", "modelopt")
QUANTISATION: dict[str, dict[str, Any]] = {
    "fp8": published.FP8,
    "nvfp4": published.NVFP4,
    "modelopt": published.MODELOPT,
}
SIZES: dict[str, Any] = {"intermediate": 32, "expert_size": 16, "hidden": 32}  # groups of 16 everywhere
_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def write_quantised(
    folder: Path, scheme: str, seed: int = 0, **changes: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A whole checkpoint in `folder` -> its tensors, and those of the plain fp32 model that it stands for."""
    sizes = SIZES | changes
    config = tiny_config(**{"dtype": "bfloat16", **sizes})
    stored, plain = quantised(tiny_tensors(config, seed), scheme)
    write_tiny(folder, seed, **sizes)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTISATION[scheme]}))
    write_tensors(folder, stored)
    return stored, plain


def quantised(tensors: Mapping[str, Tensor], scheme: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Published names and plain fp32 tensors -> the same model's tensors in a layout, and as it decodes, in fp32."""
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".experts." in name:
            block, _, leaf = name.rpartition(".")
            decoded = []
            for e, matrix in enumerate(tensor):
                halves = {"gate_proj": 0, "up_proj": 1} if leaf == "gate_up_proj" else {"down_proj": 0}
                parts = matrix.chunk(len(halves))
                decoded.append(
                    torch.cat([put(stored, f"{block}.{e}.{h}", parts[i], scheme) for h, i in halves.items()])
                )
            plain[name] = torch.stack(decoded)
        elif (".mlp." in name and scheme != "modelopt") or (
            ".self_attn." in name and "_proj" in name and scheme == "fp8"
        ):
            plain[name] = put(stored, name.removesuffix(".weight"), tensor, scheme)
        else:
            stored[name] = tensor.bfloat16()
            plain[name] = stored[name].float()
    return stored, plain


def put(stored: dict[str, Tensor], module: str, w: Tensor, scheme: str) -> Tensor:
    """Stores one matrix under its published names -> what it decodes to, fp32."""
    w = w.bfloat16().float()
    if scheme == "fp8":
        scale = (w.abs().amax(-1, keepdim=True) / 448).bfloat16()
        codes = (w / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored |= {f"{module}.weight": codes, f"{module}.weight_scale": scale}
        return codes.float() * scale.float()
    whole = 448 * 6 / w.abs().max()
    groups = w.unflatten(-1, (-1, 16))
    scale = (whole * groups.abs().amax(-1) / 6).to(torch.float8_e4m3fn)
    unit = scale.float() / whole if scheme == "nvfp4" else scale.float() * (1 / whole)
    distance = ((groups.abs() / unit[..., None])[..., None] - _VALUES).abs()
    index = distance.argmin(-1)
    codes = (index + 8 * (groups < 0)).flatten(-2).to(torch.uint8)
    packed = codes[..., 0::2] + 16 * codes[..., 1::2]
    scalar = whole.reshape(1) if scheme == "nvfp4" else 1 / whole
    names = (
        ("weight_packed", "weight_global_scale", "input_global_scale")
        if scheme == "nvfp4"
        else ("weight", "weight_scale_2", "input_scale")
    )
    stored |= {
        f"{module}.{names[0]}": packed,
        f"{module}.weight_scale": scale,
        f"{module}.{names[1]}": scalar.clone(),
        f"{module}.{names[2]}": torch.full_like(scalar, 0.5),
    }
    return (_VALUES[index] * (1 - 2.0 * (groups < 0)) * unit[..., None]).flatten(-2)
