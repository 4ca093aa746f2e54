"""Tiny random checkpoints in the published layout, written without a line of dgemma: an independent witness.

Every scale is random and encoder and decoder scalars differ, so that nothing is hidden by a 1.0.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

KINDS = {"s": "sliding_attention", "f": "full_attention"}

GENERATION: dict[str, Any] = {
    "confidence_threshold": 0.005,
    "eos_token_id": [1],
    "max_denoising_steps": 48,
    "max_new_tokens": 256,
    "pad_token_id": 0,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1},
    "stability_threshold": 1,
    "t_max": 0.8,
    "t_min": 0.4,
}


def tiny_config(
    *,
    pattern: str = "ssf",  # a letter a layer, the last one f
    hidden: int = 32,
    vocab: int = 64,
    intermediate: int = 24,
    heads: int = 4,
    kv_heads: int = 2,
    full_kv_heads: int = 1,
    head_dim: int = 8,
    full_head_dim: int = 16,
    window: int = 8,
    canvas: int = 12,
    experts: int = 8,
    top_k: int = 2,
    expert_size: int = 16,
    softcap: float = 30.0,
    max_positions: int = 131072,
    dtype: str | None = None,
) -> dict[str, Any]:
    """config.json in the published spelling; sizes that are multiples of 8 keep grouped_mm's strides legal in bf16."""
    rope = {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    }
    text = {
        "model_type": "diffusion_gemma_text",
        "attention_bias": False,
        "final_logit_softcapping": softcap,
        "global_head_dim": full_head_dim,
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "layer_types": [KINDS[letter] for letter in pattern],
        "max_position_embeddings": max_positions,
        "moe_intermediate_size": expert_size,
        "num_attention_heads": heads,
        "num_experts": experts,
        "num_global_key_value_heads": full_kv_heads,
        "num_hidden_layers": len(pattern),
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope,
        "sliding_window": window,
        "top_k_experts": top_k,
        "use_bidirectional_attention": "vision",
        "vocab_size": vocab,
    }
    top: dict[str, Any] = {
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "canvas_length": canvas,
        "model_type": "diffusion_gemma",
        "text_config": text,
        "tie_word_embeddings": True,
    }
    return top if dtype is None else top | {"dtype": dtype}


def tiny_tensors(config: Mapping[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random tensors by published name for a `tiny_config`."""
    text = config["text_config"]
    D, I, E, F = (text[k] for k in ("hidden_size", "intermediate_size", "num_experts", "moe_intermediate_size"))
    draw = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}

    def matrix(name: str, *shape: int) -> None:
        tensors[name] = (torch.randn(shape, generator=draw) * shape[-1] ** -0.5).to(dtype)

    def scale(name: str, size: int) -> None:
        tensors[name] = (0.5 + torch.rand(size, generator=draw)).to(dtype)

    tensors["model.decoder.embed_tokens.weight"] = (0.5 * torch.randn(text["vocab_size"], D, generator=draw)).to(dtype)
    scale("model.decoder.norm.weight", D)
    scale("model.decoder.self_conditioning.pre_norm.weight", D)
    matrix("model.decoder.self_conditioning.gate_proj.weight", I, D)
    matrix("model.decoder.self_conditioning.up_proj.weight", I, D)
    matrix("model.decoder.self_conditioning.down_proj.weight", D, I)
    for i, kind in enumerate(text["layer_types"]):
        full = kind == "full_attention"
        d = text["global_head_dim" if full else "head_dim"]
        q = text["num_attention_heads"] * d
        kv = text["num_global_key_value_heads" if full else "num_key_value_heads"] * d
        layer = f"model.decoder.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm"):
            scale(f"{layer}{norm}.weight", D)
        for norm in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm"):
            scale(f"{layer}{norm}.weight", D)
        for norm in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2"):
            scale(f"{layer}{norm}.weight", D)
        scale(f"{layer}layer_scalar", 1)
        scale(f"model.encoder.language_model.layers.{i}.layer_scalar", 1)
        scale(f"{layer}self_attn.q_norm.weight", d)
        scale(f"{layer}self_attn.k_norm.weight", d)
        matrix(f"{layer}self_attn.q_proj.weight", q, D)
        matrix(f"{layer}self_attn.k_proj.weight", kv, D)
        if not full:
            matrix(f"{layer}self_attn.v_proj.weight", kv, D)
        matrix(f"{layer}self_attn.o_proj.weight", D, q)
        matrix(f"{layer}mlp.gate_proj.weight", I, D)
        matrix(f"{layer}mlp.up_proj.weight", I, D)
        matrix(f"{layer}mlp.down_proj.weight", D, I)
        matrix(f"{layer}router.proj.weight", E, D)
        scale(f"{layer}router.scale", D)
        scale(f"{layer}router.per_expert_scale", E)
        matrix(f"{layer}experts.gate_up_proj", E, 2 * F, D)
        matrix(f"{layer}experts.down_proj", E, D, F)
    return tensors


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], shards: int = 1) -> None:
    """`tensors` into model.safetensors, or into `shards` shards with an index; what was there before is removed."""
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    where = {name: f"model-{1 + n % shards:05}-of-{shards:05}.safetensors" for n, name in enumerate(tensors)}
    for file in sorted(set(where.values())):
        part = {name: tensor for name, tensor in tensors.items() if where[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def write_tiny(
    folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, shards: int = 1, **changes: Any
) -> dict[str, Tensor]:
    """A whole random checkpoint in `folder`, no tokenizer: `changes` are tiny_config's. -> tensors by published name."""
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(**{"dtype": str(dtype).removeprefix("torch."), **changes})
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION, indent=1), encoding="utf-8")
    tensors = tiny_tensors(config, seed, dtype)
    write_tensors(folder, tensors, shards)
    return tensors
