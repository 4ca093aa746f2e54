"""transformers' own DiffusionGemma over the folders that dgemma opens: the reference of the parity tests.

Behind the same verbs as `dgemma_local.model`, one sequence without a batch axis. The cache is a DynamicCache and the
experts are transformers' default, `grouped_mm`; its static cache is not exact beyond the window. transformers is imported
when the first reference is built: it takes seconds.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgemma_local.cache import Cache
from dgemma_local.checkpoint import open_checkpoint
from dgemma_local.config import load_model_config
from dgemma_local.loading import load
from dgemma_local.model import DiffusionGemma

# As small as transformers builds it: there is no tower in the folders, and its default one has 16 layers.
NO_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "position_embedding_size": 8,
}


class Reference:
    """transformers' model of one folder; `attention` is "eager" or "sdpa"."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, attention: str = "eager") -> None:
        import transformers
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()  # its report lists the vision tower as missing
        config = transformers.DiffusionGemmaConfig.from_pretrained(folder, vision_config=NO_VISION)
        self.model, report = transformers.DiffusionGemmaForBlockDiffusion.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation=attention, output_loading_info=True
        )
        assert all("vision" in name for name in report["missing_keys"]) and not report["unexpected_keys"]
        assert self.model.config._experts_implementation == "grouped_mm"
        assert self.model.model.decoder.rotary_emb.full_attention_inv_freq.dtype == torch.float32

    def new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config.get_text_config(decoder=True))

    @torch.inference_mode()
    def encode(self, ids: Tensor, cache: Any) -> Tensor:
        """ids [T] join the cache -> the last hidden state [T, D]."""
        hidden: Tensor = self.model.model.encoder(input_ids=ids[None], cache=cache).last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def denoise(self, canvas: Tensor, cache: Any, previous: Tensor | None) -> Tensor:
        """canvas [L], previous logits [L, V] or None -> softcapped logits [L, V] fp32."""
        signal = None if previous is None else previous[None].to(self.model.dtype)
        logits: Tensor = self.model(decoder_input_ids=canvas[None], cache=cache, self_conditioning_logits=signal).logits[0]
        return logits


def open_model(folder: Path, dtype: torch.dtype | None = None) -> DiffusionGemma:
    """dgemma's model of one folder."""
    config = load_model_config(folder)
    return DiffusionGemma(config, load(open_checkpoint(folder), config, dtype))


@torch.inference_mode()
def encode(model: DiffusionGemma, ids: Tensor, cache: Cache) -> Tensor:
    """As `DiffusionGemma.encode` in one chunk, with the last hidden state [T, D] that it leaves out."""
    hidden = model.hidden(model.embed(ids), cache, causal=True)
    cache.advance(len(ids))
    return hidden
