"""The one door to the kernels: every hot operation of the model, by its Triton kernel or in plain torch.

    model, captured ─► ops ─┬─► kernel     bf16 on a card of capability 8.9 or newer, without gradients
                            │     └─► its twin, where the card's self-test found it wrong, or DGEMMA_OPS=twins
                            └─► torch      everything else: a CPU, fp32 and fp64, training, DGEMMA_OPS=torch

In torch, norms, rotation, router and gates are the kernels' own twins. Attention is sdpa, products with packed weights are
`quant`'s, and the end of a step is `sampler.advance`: they round as the reference does. A twin that stands in for its
kernel takes the kernel's operands instead: slabs and spans, quantised rows, a state on the device (`captured`).

The choice is by device and dtype and is made anew at each call, which costs a look into a table. `why_torch` says the
reason, and the command line shows it: no fallback is silent.

Formats on their way into a matrix. A norm is told which matrix reads its rows next (`into`), and where that wants few
bits the norm's kernel writes them itself:

    weights           on a card                                 elsewhere
    plain             plain rows                                plain rows
    FP8, per channel  FP8 rows, a scale each (W8A8)             plain rows; weights are decoded block by block (`quant`)
    NVFP4             plain rows; decoded in registers (W4A16)  plain rows; decoded block by block
                      nvfp4-rows: NVFP4 rows (W4A4)

DGEMMA_OPS holds words, see WISHES. They are read at every call; what is captured as a graph keeps those it was captured with,
and fp8-soft, which costs memory, and eager count when a model is opened.

Letters as in model.py.
"""

import dataclasses
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma_local import quant
from dgemma_local.cache import Memory, SlabMemory
from dgemma_local.config import Kind
from dgemma_local.errors import UsageError
from dgemma_local.quant import Fp8, Nvfp4, Weight

if TYPE_CHECKING:  # the type checker does not follow the package's path to ../kernels
    from kernels import _philox
    from kernels import attention as _attention
    from kernels import bf16_linear as _bf16
    from kernels import canvas as _canvas
    from kernels import embedding as _embedding
    from kernels import experts as _experts
    from kernels import fp8_linear as _fp8
    from kernels import heads as _heads
    from kernels import norms as _norms
    from kernels import nvfp4_linear as _nvfp4
    from kernels import nvfp4_nvfp4_linear as _nvfp4_nvfp4
    from kernels import router as _router
    from kernels import rows as _rows
    from kernels import vocabulary as _vocabulary
    from kernels._gelu import gated_gelu_twin
    from kernels._launch import gpu_of, is_recording
    from kernels._triton import INSTALLED, INTERPRETED
    from kernels.norms import Pairs as Pairs
    from kernels.router import Routing as Routing
else:
    from dgemma_local.kernels import _philox
    from dgemma_local.kernels import attention as _attention
    from dgemma_local.kernels import bf16_linear as _bf16
    from dgemma_local.kernels import canvas as _canvas
    from dgemma_local.kernels import embedding as _embedding
    from dgemma_local.kernels import experts as _experts
    from dgemma_local.kernels import fp8_linear as _fp8
    from dgemma_local.kernels import heads as _heads
    from dgemma_local.kernels import norms as _norms
    from dgemma_local.kernels import nvfp4_linear as _nvfp4
    from dgemma_local.kernels import nvfp4_nvfp4_linear as _nvfp4_nvfp4
    from dgemma_local.kernels import router as _router
    from dgemma_local.kernels import rows as _rows
    from dgemma_local.kernels import vocabulary as _vocabulary
    from dgemma_local.kernels._gelu import gated_gelu_twin
    from dgemma_local.kernels._launch import gpu_of, is_recording
    from dgemma_local.kernels._triton import INSTALLED, INTERPRETED
    from dgemma_local.kernels.norms import Pairs
    from dgemma_local.kernels.router import Routing

Rows = Tensor | Fp8 | Nvfp4  # [T, D], plain or quantised for the matrix that reads them next
Reader = tuple[Tensor, Weight | None]  # a norm's weight, and the matrix that its rows go into
Rotary = tuple[Tensor, Tensor]  # cos and signed sin, [T, d]

WISHES = {
    "torch": "plain torch, no kernel",
    "twins": "every kernel's torch twin in its place, on any device",
    "eager": "launch by launch, without CUDA graphs",
    "fast-head": "logits and soft embedding in fp32 from one reading of the embedding, not with the reference's roundings",
    "fp8-soft": "with an FP8 embedding, its soft embedding in FP8 too, from a second copy of the codes that lie across",
    "nvfp4-rows": "on a card that multiplies NVFP4 by NVFP4, rows in four bits too",
}
BLOCK_SCALED = (12, 0)  # tensor cores that take NVFP4 on both sides
OLDEST = (8, 9)  # FP8 units; below it nothing was compiled or thought through

# Where each kernel's function lies, its twin's beside it: NAME and NAME_twin.
KERNELS: dict[str, ModuleType] = {
    "embed": _embedding,
    "rms_norm": _norms,
    "sandwich": _norms,
    "combine": _norms,
    "quantise_rows": _rows,
    "quantise_rows_nvfp4": _rows,
    "bf16_linear": _bf16,
    "bf16_gated": _bf16,
    "fp8_linear": _fp8,
    "fp8_gated": _fp8,
    "nvfp4_linear": _nvfp4,
    "nvfp4_gated": _nvfp4,
    "nvfp4_nvfp4_linear": _nvfp4_nvfp4,
    "nvfp4_nvfp4_gated": _nvfp4_nvfp4,
    "heads": _heads,
    "attention": _attention,
    "route": _router,
    "experts": _experts,
    "vocabulary_step": _vocabulary,
    "update": _canvas,
}
_replaced: frozenset[str] = frozenset()


# ── which of the two ──────────────────────────────────────────────────────────────────────────────────────────────


def why_torch(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why operations on `device` in `dtype` run in plain torch; None where they take the kernels, or those's twins."""
    if is_recording():
        return None
    words = wishes()
    if "twins" in words and "torch" not in words:
        return None
    why = _without_kernels(device.type, device.index, dtype)
    return "DGEMMA_OPS=torch asks for it" if why is None and "torch" in words else why


def replace(names: Iterable[str]) -> None:
    """For the rest of the process these run as their twins. Raises KeyError on a name that is none of KERNELS'."""
    global _replaced
    names = frozenset(names)
    for name in names:
        _ = KERNELS[name]
    _replaced |= names


def replaced() -> frozenset[str]:
    """Of KERNELS, those that run as their twins at present."""
    return frozenset(KERNELS) if "twins" in wishes() else _replaced


def _one(name: str, kernel: bool) -> Any:
    """The kernel of that name, if it is wanted and not replaced, else its twin."""
    return getattr(KERNELS[name], name if kernel and name not in replaced() else f"{name}_twin")


def wishes() -> frozenset[str]:
    """What DGEMMA_OPS asks for. Raises UsageError on a word it does not know."""
    return _words(os.environ.get("DGEMMA_OPS", ""))


@cache
def _words(text: str) -> frozenset[str]:
    words = frozenset(word for word in text.replace(",", " ").split())
    if unknown := words - WISHES.keys():
        raise UsageError(f"DGEMMA_OPS has the word {min(unknown)!r}", f"choose of: {', '.join(WISHES)}")
    return words


def mended() -> bool:
    """Whether this process interprets kernels, and rightly: what tests/interpreter.py makes of Triton's interpreter."""
    builder = getattr(sys.modules.get("triton.runtime.interpreter"), "InterpreterBuilder", None)
    return INTERPRETED and bool(getattr(builder, "mended", False))


@cache
def _without_kernels(device: str, index: int | None, dtype: torch.dtype) -> str | None:
    if not INSTALLED and (INTERPRETED or device == "cuda"):
        return "triton is not installed"
    if INTERPRETED:
        return None if mended() else "Triton's interpreter, unmended, rounds bf16 wrongly and knows no assembly"
    if device != "cuda":
        return f"the model is on {device}"
    capability = torch.cuda.get_device_capability(index or 0)
    if capability < OLDEST:
        return "the card's capability is {}.{}, and the kernels begin at {}.{}".format(*capability, *OLDEST)
    return None if dtype == torch.bfloat16 else f"the model is in {str(dtype).removeprefix('torch.')}, not bfloat16"


def fused(x: Tensor) -> bool:
    """Whether operations on x take the kernels."""
    return not torch.is_grad_enabled() and why_torch(x.device, x.dtype) is None


def form(x: Tensor, into: Weight | None) -> str:
    """What rows become before they go into this matrix: "plain", "fp8" or "nvfp4".

    The same for a kernel and its twin, since it decides what is computed, not how. Under the interpreter as on a card.
    """
    if into is None or isinstance(into, Tensor):
        return "plain"
    if not (x.is_cuda or mended() or is_recording() or "twins" in wishes()):
        return "plain"
    if isinstance(into, Fp8):
        return "fp8"
    four_bits = "nvfp4-rows" in wishes() and gpu_of(x).capability >= BLOCK_SCALED
    return "nvfp4" if four_bits else "plain"


def _quantised(x: Tensor, into: Weight) -> Rows:
    """Rows in the form that `into` wants, by a pass of their own."""
    wanted, kernel = form(x, into), fused(x)
    if wanted == "fp8":
        x = _one("quantise_rows", kernel)(x)
    elif wanted == "nvfp4" and isinstance(into, Nvfp4):
        x = _one("quantise_rows_nvfp4", kernel)(x, _input_scale(into))
    return x


def _in_four_bits(normed: Rows, into: Weight | None, wanted: str) -> Rows:
    """A norm's rows; its kernel writes plain and FP8 ones itself."""
    return _quantised(normed, into) if wanted == "nvfp4" and isinstance(normed, Tensor) and into is not None else normed


def _input_scale(w: Nvfp4) -> Tensor:
    """fp32 [1], dividing: of all experts and parts the one that holds the largest activations."""
    return (w.input_scale.amin() if w.divides else 1 / w.input_scale.amax()).view(1)


# ── the operations, in the model's order ──────────────────────────────────────────────────────────────────────────


def embed(
    ids: Tensor,
    table: Weight,
    scale: float,
    dtype: torch.dtype,
    soft: Tensor | None = None,
    eps: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """ids [..., T] int64 -> [..., T, D] of the model's `dtype`, scaled; with `eps` + soft, and normalised, as a canvas is."""
    packed = isinstance(table, Nvfp4) or torch.is_grad_enabled()
    kernel = not packed and why_torch(ids.device, dtype) is None
    named = {} if out is None else {"out": out}
    made: Tensor = _one("embed", kernel)(ids, table, scale, soft, eps or 0.0, eps is not None, dtype, **named)
    return made


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, into: Weight | None = None) -> Rows:
    """[..., T, D] -> the same shape, in the form that `into` reads."""
    wanted = form(x, into)
    normed = _one("rms_norm", fused(x))(x, weight, eps, wanted == "fp8")
    return _in_four_bits(normed, into, wanted)


def sandwich(
    x: Tensor, residual: Tensor, post: Tensor, readers: Sequence[Reader], eps: float
) -> tuple[Tensor, tuple[Rows, ...]]:
    """What attention made -> the residual stream behind it, and its norm for each reader."""
    pres, wanted = [weight for weight, _ in readers], [form(x, into) for _, into in readers]
    h, normed = _one("sandwich", fused(x))(x, residual, post, pres, eps, [each == "fp8" for each in wanted])
    return h, tuple(_in_four_bits(n, into, each) for n, each, (_, into) in zip(normed, wanted, readers, strict=True))


def combine(
    dense: Tensor,
    routed: Tensor | Pairs,
    residual: Tensor,
    posts: tuple[Tensor, Tensor, Tensor],
    scalar: Tensor,
    eps: float,
    following: Reader,
) -> tuple[Tensor, Rows]:
    """The two branches of a layer -> the next layer's residual stream, and its norm for the `following` reader.

    scalar [1], or [T], a number a row.
    """
    weight, into = following
    wanted = form(dense, into)
    x, normed = _one("combine", fused(dense))(dense, routed, residual, *posts, scalar, eps, weight, wanted == "fp8")
    assert normed is not None
    return x, _in_four_bits(normed, into, wanted)


def linear(x: Rows, w: Weight, dtype: torch.dtype) -> Tensor:
    """x [..., T, in], w [out, in] -> [..., T, out] of `dtype`, the model's."""
    return _product(x, w, dtype, gated=False)


def gated(x: Rows, w: Weight, dtype: torch.dtype) -> Tensor:
    """x [..., T, in], w [2F, in], gate above up -> gelu(gate x) · up x [..., T, F], each rounded."""
    return _product(x, w, dtype, gated=True)


def _product(x: Rows, w: Weight, dtype: torch.dtype, gated: bool) -> Tensor:
    if isinstance(x, Tensor) and not isinstance(w, Tensor):
        x = _quantised(x, w)
    kernel = not torch.is_grad_enabled() and why_torch(x.device, dtype) is None
    what = "gated" if gated else "linear"
    made: Tensor
    if isinstance(x, Tensor):
        if not kernel:
            product = quant.linear(x, w)
            return gated_gelu_twin(product) if gated else product
        made = _one(f"bf16_{what}" if isinstance(w, Tensor) else f"nvfp4_{what}", kernel)(x, w)
    else:
        made = _one(f"fp8_{what}" if isinstance(x, Fp8) else f"nvfp4_nvfp4_{what}", kernel)(x, w, dtype)
    return made


@dataclass(frozen=True, slots=True)
class Sight:
    """What the rows of one pass see on layers of one kind: a mask for torch, or a span on the device for the kernels."""

    mask: Tensor | None = None
    span: Tensor | None = None
    window: int | None = None
    reach: int = 0  # keys that a row may see at the most, rounded up to a power of two


def sight(x: Tensor, memory: Memory, kind: Kind, rows: int, causal: bool, window: int) -> Sight:
    """Of `rows` rows that begin at memory.length; x [..., T, D] are all rows of the pass."""
    if not fused(x):
        return Sight(mask=memory.mask(kind, rows, causal))
    slabs = _slabs(memory)
    # the splits follow from it, and each number is a compilation
    reach = 1 << (slabs.reach(kind, rows) - 1).bit_length()
    return Sight(span=slabs.span(kind, rows, causal), window=window if kind == "sliding" else None, reach=reach)


Seen = tuple[Tensor, Tensor, Tensor, Sight]  # queries, the keys and values they attend over, what they see of those


def heads(
    projected: Tensor,
    qk_norm: Tensor,
    rotary: Rotary,
    heads: int,
    kv_heads: int,
    eps: float,
    memory: Memory,
    layer: int,
    sight: Sight,
) -> Seen:
    """projected [..., T, N·d] -> queries [..., T, H, d], and the keys and values that they attend over.

    The pass's own keys and values go into the memory: on the kernels into their slots, else behind those it returns.
    """
    cos, sin = rotary
    if sight.span is not None:
        k, v = _slabs(memory).slab(layer)
        q = _one("heads", kernel=True)(projected, qk_norm, cos, sin, heads, kv_heads, eps, k, v, sight.span)
        return q.contiguous(), k, v, sight  # the twin's is not
    q, k, v = _heads.project_twin(projected, qk_norm, cos, sin, heads, kv_heads, eps)
    return q, *memory.write(layer, k.transpose(-3, -2), v.transpose(-3, -2)), sight


def attention(seen: Sequence[Seen]) -> Tensor:
    """What `heads` gave of each segment of a pass -> [..., T, H·d], one behind the other; scale 1.0, no softcap."""
    if any(sight.span is None for *_, sight in seen):
        parts = [_attended(*each) for each in seen]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -2)
    q = seen[0][0]
    rows = [len(q) for q, *_ in seen]
    out = q.new_empty(sum(rows), q.shape[1] * q.shape[2])
    attend, most = _one("attention", kernel=True), "attention" not in replaced()
    for (q, keys, values, sight), into in zip(seen, out.split(rows), strict=True):
        named = {"most": sight.reach} if most else {}
        attend(q, keys, values, sight.span, sight.window, out=into, **named)
    return out


def _attended(q: Tensor, keys: Tensor, values: Tensor, sight: Sight) -> Tensor:
    """q [..., T, H, d], keys and values [..., KV, N, d] -> [..., T, H·d]."""
    lead = (1,) if q.dim() == 3 else ()  # sdpa takes its fused path on 4 axes only
    queries, keys, values = (t.reshape(*lead, *t.shape) for t in (q.transpose(-3, -2), keys, values))
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=sight.mask, scale=1.0, enable_gqa=True)
    return out.transpose(1, 2).reshape(*q.shape[:-2], -1)


def route(r: Tensor, scale: Tensor, proj: Tensor, per_expert_scale: Tensor, top_k: int, eps: float) -> Routing:
    """r [..., T, D], un-normalised -> which experts each row goes to, with which weights."""
    kernel = fused(r)
    made: Routing
    if not kernel or "route" not in replaced():
        made = _one("route", kernel)(r, scale, proj, per_expert_scale, top_k, eps)
        return made
    made = _router.route_twin(r, scale, proj, per_expert_scale, top_k, eps, _router.ITEM)  # with work for the kernels
    return dataclasses.replace(made, chosen=made.chosen.int(), order=made.order.int())


def probabilities(r: Tensor, scale: Tensor, proj: Tensor, eps: float) -> Tensor:
    """r [..., T, D] -> fp32 [..., T, E], of all experts: what training balances."""
    return _router.probabilities_twin(r, scale, proj, eps)


def experts(x: Rows, routing: Routing, gate_up: Weight, down: Weight, dtype: torch.dtype) -> Tensor | Pairs:
    """x [..., T, D] in the form that gate_up reads -> [..., T, D] of `dtype`, or what `combine` is yet to sum."""
    kernel = not torch.is_grad_enabled() and why_torch(x.device, dtype) is None
    if kernel or not isinstance(x, Tensor):
        pairs: Pairs = _one("experts", kernel)(x, routing, gate_up, down, dtype)
        return pairs
    A = routing.chosen.shape[-1]
    order, ends = routing.order, routing.ends
    rows = x.flatten(0, -2).index_select(0, order // A)
    out = quant.grouped_linear(gated_gelu_twin(quant.grouped_linear(rows, gate_up, ends)), down, ends)
    by_pair = Pairs(torch.empty_like(out).index_copy_(0, order, out), routing.weights.flatten(0, -2))
    return by_pair.summed().view_as(x)


@dataclass(frozen=True, slots=True)
class Head:
    """What the end of a denoising step reads of the model."""

    table: Tensor | Fp8  # [V, D]
    softcap: float
    scale: float  # of embeddings
    across: "_vocabulary.Across | None" = None  # the codes of an FP8 table, turned

    @classmethod
    def of(cls, table: Tensor | Fp8, softcap: float, scale: float) -> "Head":
        """To be made once: with `fp8-soft` it turns the codes, which takes as much memory again."""
        if isinstance(table, Fp8) and "fp8-soft" in wishes():
            return cls(table, softcap, scale, _vocabulary.transpose_codes(table))
        return cls(table, softcap, scale)


State = _canvas.State
key_numbers = _philox.key_numbers


def end_of_step(hidden: Tensor, head: Head, state: State, bound: float, confidence: float, soft: Tensor) -> None:
    """hidden [L, D], after the final norm: the state becomes that of the next step, `soft` [L, D] what it is told."""
    rows = _quantised(hidden, head.table)
    assert not isinstance(rows, Nvfp4)  # no checkpoint packs its embedding so
    end = _one("vocabulary_step", kernel=True)(
        rows,
        head.table,
        head.softcap,
        state.temperature,
        head.scale,
        state.key,
        reference="fast-head" not in wishes(),
        dtype=hidden.dtype,
        across=head.across,
        out=soft,
    )
    vocabulary = head.table.shape[0]
    _one("update", kernel=True)(state, end.draft, end.sampled, end.entropy, vocabulary, bound, confidence)


def _slabs(memory: Memory) -> SlabMemory:
    assert isinstance(memory, SlabMemory)  # kernels run at inference alone, on the cache of a conversation
    return memory
