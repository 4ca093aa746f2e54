"""DiffusionGemma in plain torch, readable as its diagram, exact to the reference's rounding.

                 ids ─ embed ─ × √D ─────────────────────────┐
    prompt or finished canvas                                ├─ layers ─► K/V, committed          encoder: causal
                                                             │
    canvas + previous logits ─ self-conditioning ────────────┴─ layers ─ norm ─ head ─► logits    decoder: sees all

Encoder and decoder are one set of layers. One flag, `causal`, tells them apart: the mask, the layer scalar's set, and
whether the rows' K/V stay in the cache. So one pass may have segments of both kinds: rows that join the cache, and the
canvas behind them, which reads their K/V layer by layer. The weights are then read once for both.

Letters   T rows, D model, H heads, KV key/value heads, d head_dim, E experts, A active experts, F expert width,
          V vocabulary, L canvas; `...` nothing at inference (batch 1), the batch in training.
Weights   Matrices may be packed, FP8 or NVFP4, and are then decoded as they are used (`quant`); norms, router and scalars
          are plain tensors, and their dtype is the model's.
Rounding  Tensors are in the model's dtype. Norms, softmaxes, router weights and the experts' sum are computed in fp32
          (fp64 in an fp64 model) and rounded once, where the reference rounds.
Source    transformers 5.24 modeling_diffusion_gemma.py with DynamicCache and grouped_mm experts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor

from dgemma_local import ops, rope, sampler
from dgemma_local.cache import Cache, Memory, Room
from dgemma_local.config import GenerationConfig, Kind, LayerConfig, ModelConfig
from dgemma_local.noise import Noise
from dgemma_local.ops import Pairs, Reader, Rotary, Routing, Rows, Seen, Sight
from dgemma_local.quant import Weight, linear, rows_of, weighted_rows

PREFILL_CHUNK = 512  # rows of an encoder pass: its mask and activations stay small at any prompt length
# Bytes of fp32 logits that head and soft embedding work on at once. A real canvas has 268 MB of logits, and what is
# made on the way to them or from them comes in pieces of this size.
VOCABULARY_BLOCK = 32 << 20

NOWHERE_ELSE = "the final norm or head"  # what is left when all layers are finite

Weights = Mapping[str, Weight]


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


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of a pass that see alike."""

    rows: int
    causal: bool  # rows of an encoder pass; else of a canvas
    memory: Memory  # where they stand, and what lies before them
    sights: Mapping[Kind, Sight]
    rotary: Mapping[LayerConfig, Rotary]
    kv_only: bool = False  # nothing is asked of the last layer but their keys and values


def plain(weight: Weight) -> Tensor:
    """A parameter that no checkpoint packs."""
    assert isinstance(weight, Tensor)
    return weight


class MLP:
    """down(gelu(gate x) * up x)."""

    def __init__(self, gate_up: Weight, down: Weight, dtype: torch.dtype) -> None:
        self.gate_up, self.down, self.dtype = gate_up, down, dtype

    def __call__(self, x: Rows) -> Tensor:
        return ops.linear(ops.gated(x, self.gate_up, self.dtype), self.down, self.dtype)


class Attention:
    """Grouped-query attention with normalised q, k and v, scale 1.0, no softcap.

    On full layers v is the key projection before its norm and rotation; v is never rotated.
    """

    def __init__(self, config: ModelConfig, index: int, weights: Weights) -> None:
        layer = self.geometry = config.layers[index]
        self.index, self.kind, self.heads, self.eps = index, layer.kind, config.heads, config.rms_eps
        self.kv_heads, self.head_dim = layer.kv_heads, layer.head_dim
        self.qkv_proj, self.o_proj = weights["self_attn.qkv_proj"], weights["self_attn.o_proj"]
        q_norm, k_norm = plain(weights["self_attn.q_norm"]), plain(weights["self_attn.k_norm"])
        self.qk_norm = torch.cat([q_norm.expand(self.heads, -1), k_norm.expand(self.kv_heads, -1)])  # [H + KV, d]

    def write(self, x: Rows, segments: Sequence[Segment]) -> list[Seen]:
        """x [..., T, D] -> by segment queries, and the keys and values they attend over, their own among them.

        All are written before any is read: the rows of a segment may see those of the one before.
        """
        projected = ops.linear(x, self.qkv_proj, self.qk_norm.dtype)
        return [
            ops.heads(
                rows, self.qk_norm, of.rotary[self.geometry], self.heads, self.kv_heads, self.eps,
                of.memory, self.index, of.sights[self.kind],
            )
            for rows, of in zip(projected.split([of.rows for of in segments], -2), segments, strict=True)
        ]  # fmt: skip

    def read(self, seen: Sequence[Seen]) -> Tensor:
        """-> [..., T, D]."""
        attended = ops.attention(seen)
        return ops.linear(attended, self.o_proj, attended.dtype)


class Router:
    """Chooses A experts a row from the un-normalised residual stream."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.top_k, self.eps = config.top_k, config.rms_eps
        self.scale, self.proj = plain(weights["router.scale"]), plain(weights["router.proj"])
        self.per_expert_scale = plain(weights["router.per_expert_scale"])

    def __call__(self, residual: Tensor) -> Routing:
        """[..., T, D] -> who goes where."""
        return ops.route(residual, self.scale, self.proj, self.per_expert_scale, self.top_k, self.eps)


class Experts:
    """A mixture of E gated MLPs; rows are grouped by expert, so that each expert's weights are read once."""

    def __init__(self, gate_up: Weight, down: Weight, dtype: torch.dtype) -> None:
        self.gate_up, self.down, self.dtype = gate_up, down, dtype  # [E, 2F, D], [E, D, F]

    def __call__(self, x: Rows, routing: Routing) -> Tensor | Pairs:
        """x [..., T, D] -> [..., T, D], summed in fp32 and rounded once; on the kernels `ops.combine` sums."""
        return ops.experts(x, routing, self.gate_up, self.down, self.dtype)


class Layer:
    """Attention, then a dense MLP and a mixture of experts side by side.

        x ─ norm ─ attention ─ norm ─┬─ + ─┬─ norm ─ mlp ──────── norm ─┐
        └────────────────────────────┘     ├─ router ─────────┐         + ─ norm ─ + ─ × scalar
                                           ├─ norm ─ experts ─┴─ norm ──┘          │
                                           └───────────────────────────────────────┘

    The scalar multiplies the whole residual stream, and encoder and decoder have each their own. The first norm is
    taken where x is made: at the end of the layer before.
    """

    def __init__(self, config: ModelConfig, index: int, weights: Weights) -> None:
        self.eps = config.rms_eps
        self.attention = Attention(config, index, weights)
        self.input_layernorm = plain(weights["input_layernorm"])
        dtype = self.input_layernorm.dtype
        self.mlp = MLP(weights["mlp.gate_up_proj"], weights["mlp.down_proj"], dtype)
        self.router = Router(config, weights)
        self.experts = Experts(weights["experts.gate_up_proj"], weights["experts.down_proj"], dtype)
        self.post_attention_layernorm = plain(weights["post_attention_layernorm"])
        self.pre_feedforward_layernorm = plain(weights["pre_feedforward_layernorm"])
        self.pre_feedforward_layernorm_2 = plain(weights["pre_feedforward_layernorm_2"])
        self.post_feedforward_layernorm_1 = plain(weights["post_feedforward_layernorm_1"])
        self.post_feedforward_layernorm_2 = plain(weights["post_feedforward_layernorm_2"])
        self.post_feedforward_layernorm = plain(weights["post_feedforward_layernorm"])
        self.scalars = {True: plain(weights["encoder_layer_scalar"]), False: plain(weights["layer_scalar"])}
        self._by_row: dict[tuple[tuple[int, bool], ...], Tensor] = {}  # a pass has one of a few shapes

    @property
    def entrance(self) -> Reader:
        """The norm at the top, and what reads it."""
        return self.input_layernorm, self.attention.qkv_proj

    def __call__(
        self, x: Tensor, seen: list[Seen], segments: Sequence[Segment], following: Reader
    ) -> tuple[Tensor, Rows]:
        """x [..., T, D] and what `attention.write` made of its norm -> the next x, and its norm for `following`."""
        attended = self.attention.read(seen)
        seen.clear()  # no queries beside the experts
        dense_reader = self.pre_feedforward_layernorm, self.mlp.gate_up
        routed_reader = self.pre_feedforward_layernorm_2, self.experts.gate_up
        r, (for_mlp, for_experts) = ops.sandwich(
            attended, x, self.post_attention_layernorm, (dense_reader, routed_reader), self.eps
        )
        del attended
        dense = self.mlp(for_mlp)
        routed = self.experts(for_experts, self.router(r))
        posts = self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2, self.post_feedforward_layernorm
        return ops.combine(dense, routed, r, posts, self._scalar(segments), self.eps, following)

    def _scalar(self, segments: Sequence[Segment]) -> Tensor:
        """[1], or of segments of both kinds a number a row, [T]."""
        kinds = tuple((of.rows, of.causal) for of in segments)
        if len(kinds) == 1:
            return self.scalars[kinds[0][1]]
        if kinds not in self._by_row:
            self._by_row[kinds] = torch.cat([self.scalars[causal].expand(rows) for rows, causal in kinds])
        return self._by_row[kinds]


class SelfConditioning:
    """What the previous step thought, as a soft embedding through a gated MLP."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.eps = config.rms_eps
        self.pre_norm = plain(weights["self_conditioning.pre_norm"])
        up, down = weights["self_conditioning.gate_up_proj"], weights["self_conditioning.down_proj"]
        self.mlp = MLP(up, down, self.pre_norm.dtype)

    def __call__(self, soft: Tensor) -> Tensor:
        """[..., L, D] -> what is added to the canvas's embedding."""
        return self.mlp(ops.rms_norm(soft, self.pre_norm, self.eps, self.mlp.gate_up))


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
        self._readers: list[Reader] = [*(layer.entrance for layer in self.layers), (self.norm, None)]
        self._rotary: dict[LayerConfig, tuple[tuple[int, int], Rotary]] = {}  # of the last pass: start, rows

    # ── the engine's verbs ──────────────────────────────────────────────────────────────────────────────────────

    room: Room | None = None  # nothing is planned here
    joins = 0  # tokens that may join the cache with a canvas's first step: here an encoder pass is one of its own

    def new_cache(self) -> Cache:
        """An empty cache for one conversation."""
        return Cache(self.config, self.dtype, self.device)

    @property
    def mode(self) -> str:
        """How steps are run, for reports."""
        return f"torch: {ops.why_torch(self.device, self.dtype) or 'step by step'}"

    @torch.inference_mode()
    def encode(self, ids: Tensor, cache: Cache, chunk: int = PREFILL_CHUNK) -> None:
        """Prefill or commit: ids [T] int64 join the cache. Chunks of any size give the same K/V."""
        for rows in ids.to(self.device).split(min(chunk, cache.rows or chunk)):
            self.hidden(self.embed(rows), cache, causal=True, kv_only=True)
            cache.advance(len(rows))

    def denoising(
        self,
        ids: Sequence[int],
        number: int,
        cache: Cache,
        config: GenerationConfig,
        noise: Noise,
        rules: sampler.Rules = sampler.FREE,
    ) -> Iterator[sampler.Canvas]:
        """`ids` join the cache; then canvas `number` of an answer, step by step, until it is done."""
        if ids:
            self.encode(torch.tensor(ids), cache)
        canvas = sampler.begin(number, noise, rules)
        while not canvas.done:
            canvas = self.advance(canvas, cache, config, noise)
            yield canvas

    @torch.inference_mode()
    def signal(self, logits: Tensor) -> Tensor:
        """A step's temperature-scaled logits [L, V] -> what the next step is conditioned on, their soft embedding [L, D]."""
        return self.soften(logits)

    @torch.inference_mode()
    def denoise(self, canvas: Tensor, cache: Cache, signal: Tensor | None) -> Tensor:
        """canvas [L] int64, the previous step's signal [L, D] or None -> softcapped logits [L, V] fp32.

        The cache's committed entries are not touched.
        """
        return self.head(self.hidden(self.canvas_rows(canvas, signal), cache, causal=False))

    @torch.inference_mode()
    def advance(self, canvas: sampler.Canvas, cache: Cache, config: GenerationConfig, noise: Noise) -> sampler.Canvas:
        """One denoising step, by its logits. `captured` takes steps whose logits are never whole."""
        return sampler.step(self, canvas, cache, config, noise)

    @torch.inference_mode()
    def first_bad_layer(self, canvas: Tensor, cache: Cache, signal: Tensor | None) -> str:
        """Which part of this denoising step is the first to hold NaN or infinity: a name for an error message."""
        x = self.canvas_rows(canvas, signal)
        if not x.isfinite().all():
            return "the embedding or self-conditioning"
        for number, (after, _) in enumerate(self._through_layers(x, [self.segment(x, cache, causal=False)])):
            if not after.isfinite().all():
                return f"layer {number}"
        return NOWHERE_ELSE

    # ── their parts, in order; differentiable, any leading axes ───────────────────────────────────────────────────

    def embed(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """[..., T] int64 -> [..., T, D]."""
        return ops.embed(ids, self.embed_tokens, self.embed_scale, self.dtype, out=out)

    def canvas_rows(self, canvas: Tensor, soft: Tensor | None, out: Tensor | None = None) -> Tensor:
        """[..., L] int64, soft embedding [..., L, D] -> [..., L, D]. Without a previous step only the norm acts."""
        added = None if soft is None else self.self_conditioning(soft)
        return ops.embed(canvas, self.embed_tokens, self.embed_scale, self.dtype, added, self.config.rms_eps, out)

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
        layers = self._through_layers(x, [self.segment(x, memory, causal, kv_only)])
        del x  # let go after the first layer, like every other's
        return _last(layers, kv_only)

    def segment(self, x: Tensor, memory: Memory, causal: bool, kv_only: bool = False) -> Segment:
        """Rows x [..., T, D] that begin at memory.length."""
        rows = x.shape[-2]
        return Segment(
            rows,
            causal,
            memory,
            {kind: ops.sight(x, memory, kind, rows, causal, self.config.sliding_window) for kind in self.config.rope},
            {geometry: self._rotary_at(geometry, memory.length, rows) for geometry in self.config.layers},
            kv_only,
        )

    def through(self, x: Tensor, segments: Sequence[Segment]) -> Tensor:
        """x [..., T, D], the rows of all segments, -> those of the last one, as `hidden` gives them."""
        layers = self._through_layers(x, segments)
        del x
        return _last(layers, segments[-1].kv_only)

    def _through_layers(self, x: Tensor, segments: Sequence[Segment]) -> Iterator[tuple[Tensor, Rows]]:
        """After each layer x, and its norm for whoever reads it next. Behind the last one's K/V only what is asked for."""
        normed = ops.rms_norm(x, self._readers[0][0], self.config.rms_eps, self._readers[0][1])
        for layer, following in zip(self.layers, self._readers[1:], strict=True):
            seen = layer.attention.write(normed, segments)
            if layer is self.layers[-1]:
                asked = [not of.kv_only for of in segments]
                seen, segments = list(compress(seen, asked)), list(compress(segments, asked))
                if not segments:
                    yield x, normed
                    return
                x = x[..., -sum(of.rows for of in segments) :, :]
            x, normed = layer(x, seen, segments, following)
            yield x, normed

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
            tables = cos, sin
            self._rotary[geometry] = (start, rows), tables
        return tables


def _last(layers: Iterator[tuple[Tensor, Rows]], kv_only: bool) -> Tensor:
    """The last norm of a pass; of one for K/V alone, what they were made of."""
    for last in layers:  # noqa: B007
        pass
    return plain(last[0 if kv_only else 1])


def _at_once(across: int) -> int:
    """Rows of `across` fp32 numbers that a block of the vocabulary's logits holds."""
    return max(1, VOCABULARY_BLOCK // (4 * max(1, across)))
