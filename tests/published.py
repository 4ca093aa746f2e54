"""The four published checkpoints as lists: every tensor's name, shape and dtype, and their quantization_config.

Names and sizes come from public header dumps, API answers and model cards (tests/golden/tensors.json), none of it from
dgemma's own code. RedHat's NVFP4 configuration was never seen; it is put together from its card's recipe.
"""

import json
import math
from pathlib import Path
from typing import Any

from dgemma_local.checkpoint import TensorInfo
from dgemma_local.config import ModelConfig, load_model_config

GOLDEN = Path(__file__).parent / "golden"
CHECKPOINTS: dict[str, dict[str, Any]] = json.loads((GOLDEN / "tensors.json").read_text())["checkpoints"]
BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}
LAYERS = range(30)

_ROUTERS = [f"model.{side}.layers.{i}.router.proj" for side in ("encoder.language_model", "decoder") for i in LAYERS]
_SELF_CONDITIONING = [f"model.decoder.self_conditioning.{leaf}_proj" for leaf in ("gate", "up", "down")]
_RECIPE = ["lm_head", "re:.*embed.*", "re:.*router", "re:.*vision_tower.*", "re:.*self_conditioning.*"]

FP8: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "format": "float-quantized",
            "input_activations": {
                "actorder": None,
                "block_structure": None,
                "dynamic": True,
                "group_size": None,
                "num_bits": 8,
                "observer": None,
                "observer_kwargs": {},
                "strategy": "token",
                "symmetric": True,
                "type": "float",
            },
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": None,
                "num_bits": 8,
                "observer": "memoryless_minmax",
                "observer_kwargs": {},
                "strategy": "channel",
                "symmetric": True,
                "type": "float",
            },
        }
    },
    "format": "float-quantized",
    "global_compression_ratio": None,
    "ignore": [*_ROUTERS, *_SELF_CONDITIONING, "lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "sparsity_config": {},
    "transform_config": {},
    "version": "0.15.1.dev25+gc170de6",
}

NVFP4: dict[str, Any] = FP8 | {
    "config_groups": {
        "group_0": {
            "format": "nvfp4-pack-quantized",
            "input_activations": {
                "dynamic": "local",
                "group_size": 16,
                "num_bits": 4,
                "strategy": "tensor_group",
                "symmetric": True,
                "type": "float",
            },
            "targets": ["Linear"],
            "weights": {
                "dynamic": False,
                "group_size": 16,
                "num_bits": 4,
                "strategy": "tensor_group",
                "symmetric": True,
                "type": "float",
            },
        }
    },
    "format": "nvfp4-pack-quantized",
    "ignore": [*_RECIPE, "re:.*self_attn"],
}

MODELOPT: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "targets": ["Linear"],
        }
    },
    "ignore": [
        "lm_head",
        "*embed_vision*",
        "*mlp*",
        "*router*",
        "*self_attn*",
        "*self_conditioning*",
        "*vision_tower*",
    ],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.45.0.dev127"},
    "quant_algo": "NVFP4",
    "quant_method": "modelopt",
}

QUANTISATION: dict[str, dict[str, Any] | None] = {
    "google-bf16": None,
    "redhat-fp8-dynamic": FP8,
    "redhat-nvfp4": NVFP4,
    "nvidia-nvfp4": MODELOPT,
}


def real_config(tmp: Path) -> ModelConfig:
    """The released model's geometry, from its published config.json."""
    (tmp / "config.json").write_text((GOLDEN / "config.google-26b.json").read_text())
    return load_model_config(tmp)


def tensors(checkpoint: str) -> dict[str, TensorInfo]:
    """Every tensor of one published checkpoint."""
    found: dict[str, TensorInfo] = {}
    for family in CHECKPOINTS[checkpoint]["families"]:
        for layer in family.get("layers", [None]):
            for expert in range(family.get("experts", 1)):
                name = family["name"].replace("{L}", str(layer)).replace("{E}", str(expert))
                shape = tuple(family["shape"])
                size = math.prod(shape) * BYTES[family["dtype"]]
                found[name] = TensorInfo(name, family["dtype"], shape, Path("model.safetensors"), size)
    return found
