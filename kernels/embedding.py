"""Token embedding, with what the canvas adds to it before the first layer.

    e = E[id] · s                                  encoder pass
    x = e / rms(e)                                 denoising step 0
    x = (e + soft) / rms(e + soft)                 later steps; soft is the self-conditioning MLP of the previous step

Shapes     ids [T] int32 or int64; E [V, D] in the model's dtype, or FP8 with a scale a row; soft, x [T, D]
Precision  an FP8 row is decoded in fp32 and rounded to the model's dtype; the product with s, the sum and the norm, which
           is fp32 inside, round once each. s = √D rounded to the model's dtype: 53.0 in bf16 for D = 2,816.
Traffic    with s bytes an element 2s·T·D, s·T·D more with soft; an FP8 row is read as 1 byte an element.
Grid       one program a row; the block is the row.
Source     transformers 5.24 modeling_diffusion_gemma.py: DiffusionGemmaTextScaledWordEmbedding, …SelfConditioning.

An id outside the vocabulary gives a row of NaN: nothing outside E is read, and the model's own check finds it.
"""

import torch
from torch import Tensor

from dgemma_local.quant import Fp8, Weight, embedding

from ._launch import Cost, contiguous, launch
from ._out import filled, target
from ._triton import tl, triton
from .norms import _unit, norm, row_block


def embed_twin(
    ids: Tensor,
    table: Weight,
    scale: float,
    soft: Tensor | None = None,
    eps: float = 0.0,
    self_conditioned: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """ids [..., T] -> [..., T, D]; differentiable in a plain table and in soft."""
    x = embedding(table, ids, dtype) * scale
    if soft is not None:
        x = x + soft
    return filled("embed", out, norm(x, None, eps) if self_conditioned else x)


@triton.jit
def _embed(
    IDS, E, E_SCALE, SOFT, X, scale, eps, V: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, NORMED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    live = col < D
    token = tl.load(IDS + row).to(tl.int64)
    inside = (token >= 0) & (token < V)
    if SOFT is not None:
        soft = tl.load(SOFT + row * D + col, live, other=0.0)

    x = tl.load(E + token * D + col, live & inside, other=0.0).to(tl.float32)
    if E_SCALE is not None:
        x = (x * tl.load(E_SCALE + token, inside, other=0.0).to(tl.float32)).to(X.dtype.element_ty).to(tl.float32)
    x = (x * scale).to(X.dtype.element_ty)
    if SOFT is not None:
        x = (x.to(tl.float32) + soft.to(tl.float32)).to(X.dtype.element_ty)
    if NORMED:
        x = _unit(x, eps, D).to(X.dtype.element_ty)
    tl.store(X + row * D + col, tl.where(inside, x.to(tl.float32), float("nan")).to(X.dtype.element_ty), live)


def embed(
    ids: Tensor,
    table: Tensor | Fp8,
    scale: float,
    soft: Tensor | None = None,
    eps: float = 0.0,
    self_conditioned: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """ids [T] -> [T, D]. `dtype` is what an FP8 table is decoded to; `self_conditioned`: the norm of denoising passes.

    `out`: where it is written, contiguous [T, D] of that dtype.
    """
    vocabulary, width = table.shape
    codes, row_scale = (table.codes, table.scale) if isinstance(table, Fp8) else (table, None)
    if ids.dim() != 1 or not codes.is_contiguous():
        raise ValueError(f"embed: ids {tuple(ids.shape)}, table {tuple(table.shape)}, strides {codes.stride()}")
    contiguous("embed", ids=ids, row_scale=row_scale)
    x = target("embed", out, (len(ids), width), codes.dtype if row_scale is None else dtype, ids.device)
    if soft is not None and (soft.shape != x.shape or not soft.is_contiguous()):
        raise ValueError(f"embed: ids {tuple(ids.shape)}, soft {tuple(soft.shape)}, strides {soft.stride()}")
    launch(
        _embed, (len(ids),), ids, codes, row_scale, soft, x, scale, eps,
        V=vocabulary, D=width, NORMED=self_conditioned, **row_block(width),
        cost=lambda: embed_cost(ids, table, x, soft),
    )  # fmt: skip
    return x


def embed_cost(ids: Tensor, table: Tensor | Fp8, x: Tensor, soft: Tensor | None) -> Cost:
    """One row of the table for each of x."""
    stored = (table.codes, table.scale) if isinstance(table, Fp8) else (table,)
    moved = sum(t.element_size() * t.shape[-1] for t in stored) * len(ids) + ids.nbytes + x.nbytes
    return Cost(moved + (0 if soft is None else soft.nbytes), x.numel() * (5 + (soft is not None)))
