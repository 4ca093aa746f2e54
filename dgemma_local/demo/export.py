"""A training state as a checkpoint folder in the published layout: configuration, tokenizer, template, weights.

python -m dgemma_local.demo.export demo-training/sudoku/state.pt [FOLDER]
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgemma_local.config import ARCHITECTURE, ModelConfig
from dgemma_local.demo import vocabulary
from dgemma_local.demo.fakequant import SCHEMES, is_quantised
from dgemma_local.demo.render import FOLDERS
from dgemma_local.demo.train import CONFIGS, ENTROPY_BOUND, T_MAX, T_MIN
from dgemma_local.loading import save

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
        "max_denoising_steps": 48,
        "max_new_tokens": config.canvas_length,
        "pad_token_id": vocabulary.TOKENS.index("<pad>"),
        "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": ENTROPY_BOUND},
        "stability_threshold": 1,
        "t_max": T_MAX,
        "t_min": T_MIN,
    }


def export(
    config: ModelConfig, weights: Mapping[str, Tensor], folder: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write the whole checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("config.json", config_json(config)), ("generation_config.json", generation_json(config))):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    vocabulary.write(folder)
    save(config, weights, folder, dtype)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m dgemma_local.demo.export", description=__doc__.split("\n")[0])
    parser.add_argument("state", type=Path)
    parser.add_argument("folder", type=Path, nargs="?", help="default: the model's folder in this package")
    parser.add_argument(
        "--through", choices=sorted(SCHEMES), help="round the weights as this format would, to measure it"
    )
    options = parser.parse_args(arguments)
    state = torch.load(options.state, weights_only=True)
    weights = state["weights"]
    if options.through is not None:
        weights = {k: SCHEMES[options.through](w) if is_quantised(k, w) else w for k, w in weights.items()}
    export(CONFIGS[state["model"]], weights, options.folder or FOLDERS[state["model"]])


if __name__ == "__main__":
    main(sys.argv[1:])
