"""The floor of a denoising step: max(all bytes / bandwidth, all flops / peak), every byte once. No kernel enters into it."""

import math

import steps
from predicted import Card

PADDING = 1.44  # rows of 16-row tiles a routed pair, uniform routing
ACTIVATIONS = 0.25  # of their bytes that miss the L2


def floor(checkpoint: str, light: bool, card: Card) -> float:
    """Milliseconds a step of CONTEXT committed tokens, all experts hit, 16-row tiles padded."""
    config = steps.config()
    forms = steps.held(checkpoint, light)
    rows, seen = config.canvas_length, steps.CONTEXT
    moved, seconds = 0.0, 0.0
    for name, form in forms.items():
        if name == "embed_tokens" or len(form.shape) < 2:
            continue
        moved += form.nbytes
        multiplied = math.prod(form.shape[-2:]) * rows
        if ".experts." in name:
            multiplied *= config.top_k * PADDING
        seconds += 2 * multiplied / card.floor["bf16" if form.form == "plain" else form.form]
    embedding = forms["embed_tokens"]
    reads = 1 if light else 2  # for the head, and again for the soft embedding
    moved += embedding.nbytes * reads
    for layer in config.layers:
        keys = min(seen, config.sliding_window) if layer.kind == "sliding" else seen
        moved += 2 * keys * layer.kv_heads * layer.head_dim * 2
        seconds += 4 * rows * config.heads * layer.head_dim * (keys + rows) / card.floor["bf16"]
    moved += (
        ACTIVATIONS
        * len(config.layers)
        * (
            14 * rows * config.hidden_size * 2
            + rows * config.top_k * (2 * config.hidden_size + 3 * config.expert_size) * 2
        )
    )
    vocabulary = 2 * 2 * rows * math.prod(embedding.shape)
    seconds += vocabulary / card.floor["bf16" if embedding.form == "plain" else embedding.form]
    return max(moved / card.bandwidth, seconds) * 1e3
