"""DiffusionGemma in plain torch, readable as its diagram, exact to the reference's rounding.

                 ids ─ embed ─ × √D ─────────────────────────┐
    prompt or finished canvas                                ├─ layers ─► K/V, committed          encoder: causal
                                                             │
    canvas + previous logits ─ self-conditioning ────────────┴─ layers ─ norm ─ head ─► logits    decoder: sees all

Encoder and decoder are one set of layers. One flag, `causal`, tells them apart: the mask, the layer scalar's set, and
whether the rows' K/V stay in the cache.

Letters   T rows, D model, H heads, KV key/value heads, d head_dim, E experts, A active experts, F expert width,
          V vocabulary, L canvas; `...` nothing at inference (batch 1), the batch in training.
Weights   Matrices may be packed, FP8 or NVFP4, and are then decoded as they are used (`quant`); norms, router and scalars
          are plain tensors, and their dtype is the model's.
Rounding  Tensors are in the model's dtype. Norms, softmaxes, router weights and the experts' sum are computed in fp32
          (fp64 in an fp64 model) and rounded once, where the reference rounds.
Source    transformers 5.24 modeling_diffusion_gemma.py with DynamicCache and grouped_mm experts.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma_local import rope
from dgemma_local.cache import Cache, Memory
from dgemma_local.config import LayerConfig, ModelConfig
from dgemma_local.quant import Weight, embedding, grouped_linear, linear, rows_of, weighted_rows

PREFILL_CHUNK = 512  # rows of an encoder pass: its mask and activations stay small at any prompt length
# Bytes of fp32 logits that head and soft embedding work on at once. A real canvas has 268 MB of logits, and what is
# made on the way to them or from them comes in pieces of this size.
VOCABULARY_BLOCK = 32 << 20

Weights = Mapping[str, Weight]
Rotary = tuple[Tensor, Tensor]  # cos and signed sin, [T, 1, d]


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter this model wants, by name. q, k, v are one matrix, and so are gate and up: one GEMM each."""
    D, V, E, F_, S, I = (
        config.hidden_size,
        config.vocab_size,
        config.num_experts,
        config.expert_size,
        config.self_conditioning_size,
        config.intermediate_size,
    )
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (V, D),
        "norm": (D,),
        "self_conditioning.pre_norm": (D,),
        "self_conditioning.gate_up_proj": (2 * S, D),
        "self_conditioning.down_proj": (D, S),
    }
    for i, layer in enumerate(config.layers):
        shares = 1 if layer.kind == "full" else 2  # on full layers the values are the raw keys
        own: dict[str, tuple[int, ...]] = {
            "input_layernorm": (D,),
            "self_attn.qkv_proj": ((config.heads + shares * layer.kv_heads) * layer.head_dim, D),
            "self_attn.q_norm": (layer.head_dim,),
            "self_attn.k_norm": (layer.head_dim,),
            "self_attn.o_proj": (D, config.heads * layer.head_dim),
            "post_attention_layernorm": (D,),
            "pre_feedforward_layernorm": (D,),
            "mlp.gate_up_proj": (2 * I, D),
            "mlp.down_proj": (D, I),
            "post_feedforward_layernorm_1": (D,),
            "router.scale": (D,),
            "router.proj": (E, D),
            "router.per_expert_scale": (E,),
            "pre_feedforward_layernorm_2": (D,),
            "experts.gate_up_proj": (E, 2 * F_, D),
            "experts.down_proj": (E, D, F_),
            "post_feedforward_layernorm_2": (D,),
            "post_feedforward_layernorm": (D,),
            "layer_scalar": (1,),
            "encoder_layer_scalar": (1,),
        }
        shapes |= {f"layers.{i}.{name}": shape for name, shape in own.items()}
    return shapes


def plain(weight: Weight) -> Tensor:
    """A parameter that no checkpoint packs."""
    assert isinstance(weight, Tensor)
    return weight


def normalise(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last axis, in fp32 or wider and not yet rounded."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., D] -> [..., D] in x's dtype: `normalise(x) * weight`, rounded once. No `1 + w`; None: no weight."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)  # computes in fp32 inside; a test holds it to the line above


def gated_gelu(gate_up: Tensor) -> Tensor:
    """[..., 2F] -> [..., F]: gelu(gate) * up, tanh form, each rounded."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


class MLP:
    """down(gelu(gate x) * up x)."""

    def __init__(self, gate_up: Weight, down: Weight) -> None:
        self.gate_up, self.down = gate_up, down

    def __call__(self, x: Tensor) -> Tensor:
        return linear(gated_gelu(linear(x, self.gate_up)), self.down)


class Attention:
    """Grouped-query attention with normalised q, k and v, scale 1.0, no softcap.

    On full layers v is the key projection before its norm and rotation; v is never rotated.
    """

    def __init__(self, config: ModelConfig, index: int, weights: Weights) -> None:
        layer = config.layers[index]
        self.index, self.kind, self.heads, self.eps = index, layer.kind, config.heads, config.rms_eps
        self.kv_heads, self.head_dim = layer.kv_heads, layer.head_dim
        self.qkv_proj, self.o_proj = weights["self_attn.qkv_proj"], weights["self_attn.o_proj"]
        q_norm, k_norm = plain(weights["self_attn.q_norm"]), plain(weights["self_attn.k_norm"])
        self.qk_norm = torch.cat([q_norm.expand(self.heads, -1), k_norm.expand(self.kv_heads, -1)])  # [H + KV, d]

    def project(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., T, D] -> q [..., H, T, d], k and v [..., KV, T, d], normalised, q and k rotated."""
        H, KV = self.heads, self.kv_heads
        projected = linear(x, self.qkv_proj)
        heads = normalise(projected.view(*x.shape[:-1], -1, self.head_dim), self.eps)  # [..., T, N, d]
        qk = rope.rotate((heads[..., : H + KV, :] * self.qk_norm).to(x.dtype), *rotary).transpose(-3, -2)
        v = heads[..., -KV:, :].to(x.dtype).transpose(-3, -2)
        return qk[..., :H, :, :], qk[..., H:, :, :], v

    def __call__(self, x: Tensor, rotary: Rotary, memory: Memory, mask: Tensor | None) -> Tensor:
        q, k, v = self.project(x, rotary)
        keys, values = memory.write(self.index, k, v)
        # sdpa takes its fused path on 4 axes only
        lead = (1,) if q.dim() == 3 else ()
        q, keys, values = (t.reshape(*lead, *t.shape) for t in (q, keys, values))
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=1.0, enable_gqa=True)
        return linear(out.transpose(1, 2).reshape(*x.shape[:-1], -1), self.o_proj)


class Router:
    """Chooses A experts a row from the un-normalised residual stream."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.top_k, self.width = config.top_k, config.hidden_size**-0.5
        self.scale, self.proj = plain(weights["router.scale"]), plain(weights["router.proj"])
        self.per_expert_scale = plain(weights["router.per_expert_scale"])

    def probabilities(self, normed: Tensor) -> Tensor:
        """[..., T, D], x / rms(x), rounded -> [..., T, E] fp32."""
        u = normed * self.scale * self.width  # two roundings, as the reference has
        return F.linear(u, self.proj).softmax(-1, dtype=torch.promote_types(u.dtype, torch.float32))

    def __call__(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """-> weights [..., T, A] fp32, which need not sum to 1, and expert numbers [..., T, A]."""
        weights, chosen = self.probabilities(normed).topk(self.top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.per_expert_scale[chosen], chosen


class Experts:
    """A mixture of E gated MLPs; rows are grouped by expert, so that each expert's weights are read once."""

    def __init__(self, gate_up: Weight, down: Weight) -> None:
        self.gate_up, self.down = gate_up, down  # [E, 2F, D], [E, D, F]

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [..., T, D], weights and chosen [..., T, A] -> [..., T, D], summed in fp32 and rounded once."""
        A = chosen.shape[-1]
        flat = chosen.flatten()
        order = flat.argsort(stable=True)  # pairs (row, slot), expert by expert
        ends = torch.bincount(flat, minlength=self.gate_up.shape[0]).cumsum(0).int()
        rows = x.flatten(0, -2).index_select(0, order // A)
        out = grouped_linear(gated_gelu(grouped_linear(rows, self.gate_up, ends)), self.down, ends)
        by_row = torch.empty_like(out).index_copy_(0, order, out).view(-1, A, out.shape[-1])  # [T, A, D]
        return (by_row * weights.flatten(0, -2)[..., None]).sum(-2).to(x.dtype).view_as(x)


class Layer:
    """Attention, then a dense MLP and a mixture of experts side by side.

        x ─ norm ─ attention ─ norm ─┬─ + ─┬─ norm ─ mlp ──────── norm ─┐
        └────────────────────────────┘     ├─ router ─────────┐         + ─ norm ─ + ─ × scalar
                                           ├─ norm ─ experts ─┴─ norm ──┘          │
                                           └───────────────────────────────────────┘

    The scalar multiplies the whole residual stream, and encoder and decoder have each their own.
    """

    def __init__(self, config: ModelConfig, index: int, weights: Weights) -> None:
        self.eps = config.rms_eps
        self.attention = Attention(config, index, weights)
        self.mlp = MLP(weights["mlp.gate_up_proj"], weights["mlp.down_proj"])
        self.router = Router(config, weights)
        self.experts = Experts(weights["experts.gate_up_proj"], weights["experts.down_proj"])
        self.input_layernorm = plain(weights["input_layernorm"])
        self.post_attention_layernorm = plain(weights["post_attention_layernorm"])
        self.pre_feedforward_layernorm = plain(weights["pre_feedforward_layernorm"])
        self.pre_feedforward_layernorm_2 = plain(weights["pre_feedforward_layernorm_2"])
        self.post_feedforward_layernorm_1 = plain(weights["post_feedforward_layernorm_1"])
        self.post_feedforward_layernorm_2 = plain(weights["post_feedforward_layernorm_2"])
        self.post_feedforward_layernorm = plain(weights["post_feedforward_layernorm"])
        self.scalars = {True: plain(weights["encoder_layer_scalar"]), False: plain(weights["layer_scalar"])}

    def __call__(self, x: Tensor, rotary: Rotary, memory: Memory, mask: Tensor | None, causal: bool) -> Tensor:
        """x [..., T, D] -> [..., T, D]."""
        eps = self.eps
        attended = self.attention(rms_norm(x, self.input_layernorm, eps), rotary, memory, mask)
        r = x + rms_norm(attended, self.post_attention_layernorm, eps)
        unit = normalise(r, eps)  # one normalisation, three readers
        dense = self.mlp((unit * self.pre_feedforward_layernorm).to(r.dtype))
        routed = self.experts((unit * self.pre_feedforward_layernorm_2).to(r.dtype), *self.router(unit.to(r.dtype)))
        both = rms_norm(dense, self.post_feedforward_layernorm_1, eps)
        both = both + rms_norm(routed, self.post_feedforward_layernorm_2, eps)
        return (r + rms_norm(both, self.post_feedforward_layernorm, eps)) * self.scalars[causal]


class SelfConditioning:
    """What the previous step thought, as a soft embedding through a gated MLP, added to the canvas embedding."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.eps = config.rms_eps
        self.pre_norm = plain(weights["self_conditioning.pre_norm"])
        self.mlp = MLP(weights["self_conditioning.gate_up_proj"], weights["self_conditioning.down_proj"])

    def __call__(self, embedded: Tensor, soft: Tensor | None) -> Tensor:
        """embedded, soft [..., L, D] -> [..., L, D]. Without a previous step the MLP adds nothing; the norm stays."""
        if soft is not None:
            embedded = embedded + self.mlp(rms_norm(soft, self.pre_norm, self.eps))
        return rms_norm(embedded, None, self.eps)  # post_norm


class DiffusionGemma:
    """The whole network over the parameters that `parameter_shapes` names, on one device."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.canvas_length, self.max_positions = config.canvas_length, config.max_positions
        self.embed_tokens, self.norm = weights["embed_tokens"], plain(weights["norm"])
        self.dtype, self.device = self.norm.dtype, self.norm.device
        # √D is rounded to the model's dtype before it multiplies: 53.0 in bf16 for D = 2,816
        self.embed_scale = float(torch.tensor(config.hidden_size**0.5, dtype=self.dtype))
        self.self_conditioning = SelfConditioning(config, weights)
        self.layers = [
            Layer(
                config,
                i,
                {k.removeprefix(f"layers.{i}."): w for k, w in weights.items() if k.startswith(f"layers.{i}.")},
            )
            for i in range(len(config.layers))
        ]
        self._rotary: dict[LayerConfig, tuple[tuple[int, int], Rotary]] = {}  # of the last pass: start, rows

    # ── the engine's verbs ──────────────────────────────────────────────────────────────────────────────────────

    def new_cache(self) -> Cache:
        """An empty cache for one conversation."""
        return Cache(self.config, self.dtype, self.device)

    @torch.inference_mode()
    def encode(self, ids: Tensor, cache: Cache, chunk: int = PREFILL_CHUNK) -> None:
        """Prefill or commit: ids [T] int64 join the cache. Chunks of any size give the same K/V."""
        for rows in ids.split(chunk):
            self.hidden(self.embed(rows), cache, causal=True, kv_only=True)
            cache.advance(len(rows))

    @torch.inference_mode()
    def signal(self, logits: Tensor) -> Tensor:
        """A step's temperature-scaled logits [L, V] -> what the next step is conditioned on, their soft embedding [L, D]."""
        return self.soften(logits)

    @torch.inference_mode()
    def denoise(self, canvas: Tensor, cache: Cache, signal: Tensor | None) -> Tensor:
        """canvas [L] int64, the previous step's signal [L, D] or None -> softcapped logits [L, V] fp32.

        The cache's committed entries are not touched.
        """
        return self.head(self.hidden(self.self_conditioning(self.embed(canvas), signal), cache, causal=False))

    @torch.inference_mode()
    def first_bad_layer(self, canvas: Tensor, cache: Cache, signal: Tensor | None) -> str:
        """Which part of this denoising step is the first to hold NaN or infinity: a name for an error message."""
        x = self.self_conditioning(self.embed(canvas), signal)
        if not x.isfinite().all():
            return "the embedding or self-conditioning"
        for i, (layer, geometry) in enumerate(zip(self.layers, self.config.layers, strict=True)):
            rotary = self._rotary_at(geometry, cache.length, len(canvas))
            x = layer(x, rotary, cache, None, causal=False)
            if not x.isfinite().all():
                return f"layer {i}"
        return "the final norm or head"

    # ── their parts, in order; differentiable, any leading axes ───────────────────────────────────────────────────

    def embed(self, ids: Tensor) -> Tensor:
        """[..., T] int64 -> [..., T, D]."""
        return embedding(self.embed_tokens, ids, self.dtype) * self.embed_scale

    def soften(self, logits: Tensor) -> Tensor:
        """[..., L, V] temperature-scaled -> [..., L, D], the expected embedding.

        Logits are rounded to the model's dtype before the softmax and probabilities after it; the scale multiplies
        the product. In bf16 all three are visible in the result.
        """
        rows = _at_once(logits.shape[-1])
        if torch.is_grad_enabled() or logits.numel() <= rows * logits.shape[-1]:
            return self._soften(logits)
        soft = torch.cat([self._soften(block) for block in logits.flatten(0, -2).split(rows)])
        return soft.view(*logits.shape[:-1], -1)

    def _soften(self, logits: Tensor) -> Tensor:
        wide = torch.promote_types(self.dtype, torch.float32)
        probabilities = logits.to(self.dtype).softmax(-1, dtype=wide).to(self.dtype)
        return weighted_rows(probabilities, self.embed_tokens) * self.embed_scale

    def hidden(self, x: Tensor, memory: Memory, causal: bool, kv_only: bool = False) -> Tensor:
        """x [..., T, D] through all layers and the final norm, at positions memory.length … + T - 1.

        `kv_only` leaves out what follows the last layer's K/V, which is all that an encoder pass is for.
        """
        rows = x.shape[-2]
        masks = {kind: memory.mask(kind, rows, causal) for kind in self.config.rope}
        for layer, geometry in zip(self.layers, self.config.layers, strict=True):
            rotary = self._rotary_at(geometry, memory.length, rows)
            if kv_only and layer is self.layers[-1]:
                _, k, v = layer.attention.project(rms_norm(x, layer.input_layernorm, layer.eps), rotary)
                memory.write(layer.attention.index, k, v)
                return x
            x = layer(x, rotary, memory, masks[geometry.kind], causal)
        return rms_norm(x, self.norm, self.config.rms_eps)

    def head(self, hidden: Tensor) -> Tensor:
        """[..., L, D] -> [..., L, V] fp32; the product is rounded to the model's dtype before the softcap."""
        cap, wide = self.config.softcap, torch.promote_types(self.dtype, torch.float32)
        if torch.is_grad_enabled():
            return (linear(hidden, self.embed_tokens).to(wide) / cap).tanh() * cap
        logits = hidden.new_empty(*hidden.shape[:-1], self.config.vocab_size, dtype=wide)
        ids = _at_once(hidden[..., 0].numel())
        for begin in range(0, self.config.vocab_size, ids):
            block = logits[..., begin : begin + ids]
            block.copy_(linear(hidden, rows_of(self.embed_tokens, slice(begin, begin + ids))))
            block.div_(cap).tanh_().mul_(cap)
        return logits

    def _rotary_at(self, geometry: LayerConfig, start: int, rows: int) -> Rotary:
        """cos and sin of the pass at `start`. All steps of a canvas share them; of a long context they would be 800 MB."""
        at, tables = self._rotary.get(geometry, (None, None))
        if tables is None or at != (start, rows):
            with torch.inference_mode(False):  # training may be the next to read them
                positions = torch.arange(start, start + rows, device=self.device)
                cos, sin = rope.table(self.config.rope[geometry.kind], geometry.head_dim, positions, self.dtype)
            tables = cos[:, None], sin[:, None]
            self._rotary[geometry] = (start, rows), tables
        return tables


def _at_once(across: int) -> int:
    """Rows of `across` fp32 numbers that a block of the vocabulary's logits holds."""
    return max(1, VOCABULARY_BLOCK // (4 * max(1, across)))
