"""A training state as checkpoint folders in the published layouts: configuration, tokenizer, template, weights.

python -m dgemma_local.demo.export demo-training/sudoku/state.pt [FOLDER] [--quantised]

    FOLDER          bf16, experts as one tensor a layer, as Google publishes them
    FOLDER-fp8      RedHat's FP8-dynamic: attention, dense MLP and experts in E4M3, a scale a row
    FOLDER-nvfp4    RedHat's NVFP4: dense MLP and experts in E2M1, attention in bf16

The quantised ones are made of the bf16 one's weights. Their input_global_scale is 1: no activations were measured, and
with 1 a group's scale holds any whose largest magnitude is between 0.01 and 2,688.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from dgemma_local.config import ARCHITECTURE, ModelConfig
from dgemma_local.demo import vocabulary
from dgemma_local.demo.fakequant import is_quantised
from dgemma_local.demo.lives import ENTROPY_BOUND, MAX_STEPS, T_MAX, T_MIN
from dgemma_local.demo.render import FOLDERS
from dgemma_local.demo.train import CONFIGS
from dgemma_local.layout import modules
from dgemma_local.loading import save
from dgemma_local.quant import Weight, quantise_fp8, quantise_nvfp4
from dgemma_local.schemes import Scheme, quantization_config

_KINDS = {"sliding": "sliding_attention", "full": "full_attention"}


def config_json(config: ModelConfig) -> dict[str, Any]:
    """The published spelling of `config`, which transformers and `load_model_config` read alike."""
    geometry = {layer.kind: layer for layer in config.layers}
    ids = {name: vocabulary.TOKENS.index(f"<{name}>") for name in ("pad", "eos", "bos")}
    ends = [ids["eos"], vocabulary.TOKENS.index("<turn|>")]
    text = {
        "model_type": f"{ARCHITECTURE}_text",
        "attention_bias": False,
        "bos_token_id": ids["bos"],
        "dtype": config.dtype,
        "eos_token_id": ids["eos"],
        "final_logit_softcapping": config.softcap,
        "global_head_dim": geometry["full"].head_dim,
        "head_dim": geometry["sliding"].head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": [_KINDS[layer.kind] for layer in config.layers],
        "max_position_embeddings": config.max_positions,
        "moe_intermediate_size": config.expert_size,
        "num_attention_heads": config.heads,
        "num_experts": config.num_experts,
        "num_global_key_value_heads": geometry["full"].kv_heads,
        "num_hidden_layers": len(config.layers),
        "num_key_value_heads": geometry["sliding"].kv_heads,
        "pad_token_id": ids["pad"],
        "rms_norm_eps": config.rms_eps,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": config.rope["full"].rotating,
                "rope_theta": config.rope["full"].theta,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": config.rope["sliding"].theta, "rope_type": "default"},
        },
        "sliding_window": config.sliding_window,
        "tie_word_embeddings": True,
        "top_k_experts": config.top_k,
        "vocab_size": config.vocab_size,
    }
    return {
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "canvas_length": config.canvas_length,
        "dtype": config.dtype,
        "eos_token_id": ends,
        "model_type": ARCHITECTURE,
        "text_config": text,
        "tie_word_embeddings": True,
    }


def generation_json(config: ModelConfig) -> dict[str, Any]:
    """The released model's sampler settings; the end ids are this vocabulary's."""
    ends = ("<eos>", "<turn|>", "<|tool_response>")
    return {
        "confidence_threshold": 0.005,
        "eos_token_id": [vocabulary.TOKENS.index(name) for name in ends],
        "max_denoising_steps": MAX_STEPS,
        "max_new_tokens": config.canvas_length,
        "pad_token_id": vocabulary.TOKENS.index("<pad>"),
        "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": ENTROPY_BOUND},
        "stability_threshold": 1,
        "t_max": T_MAX,
        "t_min": T_MIN,
    }


def export(
    config: ModelConfig, weights: Mapping[str, Weight], folder: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a whole checkpoint folder; what is packed in `weights` is stored so."""
    folder.mkdir(parents=True, exist_ok=True)
    top = config_json(config)
    packed = {name for name, weight in weights.items() if not isinstance(weight, Tensor)}
    if packed:
        scheme: Scheme = "fp8" if any("self_attn" in name for name in packed) else "nvfp4"
        left = {module.name for module in modules(config, frozenset()) if module.parameter not in packed}
        linear = {name for name in left if name.endswith("proj")}
        top["quantization_config"] = quantization_config(scheme, {*linear, "lm_head"})
    for name, content in (("config.json", top), ("generation_config.json", generation_json(config))):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    vocabulary.write(folder)
    save(config, weights, folder, dtype)


def quantised(weights: Mapping[str, Tensor], scheme: Scheme) -> dict[str, Weight]:
    """The weights as RedHat's FP8-dynamic or NVFP4 recipe leaves them, from bf16 ones."""

    def one(name: str, weight: Tensor) -> Weight:
        if not is_quantised(name, weight) or (scheme == "nvfp4" and "self_attn" in name):
            return weight
        if scheme == "fp8":
            return quantise_fp8(weight)
        packed = quantise_nvfp4(weight)
        return packed if not name.endswith("gate_up_proj") else packed.shared(2)  # as RedHat's gate and up share theirs

    return {name: one(name, weight) for name, weight in weights.items()}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m dgemma_local.demo.export", description=__doc__.split("\n")[0])
    parser.add_argument("state", type=Path)
    parser.add_argument("folder", type=Path, nargs="?", help="default: the model's folder in this package")
    parser.add_argument("--quantised", action="store_true", help="FOLDER-fp8 and FOLDER-nvfp4, too")
    options = parser.parse_args(arguments)
    state = torch.load(options.state, weights_only=True)
    config: ModelConfig = CONFIGS[state["model"]]
    folder: Path = options.folder or FOLDERS[state["model"]]
    weights = {name: weight.to(torch.bfloat16) for name, weight in state["weights"].items()}
    export(config, weights, folder)
    for scheme in get_args(Scheme):
        if options.quantised and scheme != "modelopt":  # which is read, not written
            export(config, quantised(weights, scheme), folder.with_name(f"{folder.name}-{scheme}"))


if __name__ == "__main__":
    main(sys.argv[1:])
