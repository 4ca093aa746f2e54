"""A mixture of E gated MLPs: each row's A experts, weighted and summed.

    out[t] = Σ over slots s of  weight[t, s] · down_e( gelu(gate_e x_t) · (up_e x_t) )        e = chosen[t, s]

    x ─ gated ─► h ─ (quantise) ─ down ─► y by pair ─ combine ─► out
        D → F    [P, F]           F → D   [T, A, D]              [T, D]

What multiplies depends on how the weights are stored:
    Tensor, Nvfp4 with Tensor x     experts_grouped; h stays in the model's dtype
    Fp8 with Fp8 x                  experts_grouped; h is quantised again, one scale a pair (rows)
    Nvfp4 with Nvfp4 x              experts_nvfp4_nvfp4, sm_120; h is quantised where it is made

Shapes     x [T, D]; gate_up [E, 2F, D]; down [E, D, F]; routing of T rows -> [T, D] of `dtype`.
Precision  y is rounded to `dtype`; the sum over slots is fp32, in the order of the slots, rounded once. No atomics: the
           same bits every time.
Traffic    combine: P · D read, T · D written; y is in the L2 still.
Grid       combine: one program for each row and block of columns.
"""

import torch
from torch import Tensor

from dgemma_local.quant import Fp8, Nvfp4, Weight

from . import experts_grouped, experts_nvfp4_nvfp4
from ._launch import Cost, launch
from ._triton import tl, triton
from .router import Routing
from .rows import quantise_rows, quantise_rows_twin

Rows = Tensor | Fp8 | Nvfp4
COLUMNS = 1024  # of a combining program


def experts_twin(
    x: Rows, routing: Routing, gate_up: Weight, down: Weight, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """The same in torch; `dtype` fp64 is the tests' truth."""
    if isinstance(x, Nvfp4):
        y = experts_nvfp4_nvfp4.pairs_twin(x, routing, gate_up, down, dtype)
    else:
        h = experts_grouped.gated_twin(x, routing, gate_up, dtype)
        rows = quantise_rows_twin(h) if isinstance(x, Fp8) else h
        y = experts_grouped.down_twin(rows, routing, down, dtype)
    return combine_twin(y, routing.weights)


def combine_twin(y: Tensor, weights: Tensor) -> Tensor:
    """y [P, D] by pair, weights [T, A] -> [T, D]."""
    T, A = weights.shape
    wide = torch.promote_types(y.dtype, torch.float32)
    return (y.view(T, A, -1).to(wide) * weights.to(wide)[..., None]).sum(1).to(y.dtype)


@triton.jit
def _experts_combine(Y, WEIGHTS, OUT, D: tl.constexpr, A: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(A):
        y = tl.load(Y + (row * A + slot).to(tl.int64) * D + d, d < D, other=0.0).to(tl.float32)
        total += tl.load(WEIGHTS + row * A + slot) * y
    tl.store(OUT + row.to(tl.int64) * D + d, total.to(OUT.dtype.element_ty), d < D)


def experts(x: Rows, routing: Routing, gate_up: Weight, down: Weight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """x [T, D], quantised as the weights want it -> [T, D] of `dtype`, the model's."""
    if gate_up.shape[0] != down.shape[0] or gate_up.shape[1] != 2 * down.shape[2] or down.shape[1] != x.shape[1]:
        raise ValueError(f"experts: x {tuple(x.shape)}, gate_up {tuple(gate_up.shape)}, down {tuple(down.shape)}")
    if isinstance(x, Nvfp4):
        return combine(experts_nvfp4_nvfp4.pairs(x, routing, gate_up, down, dtype), routing.weights)
    h = experts_grouped.gated(x, routing, gate_up, dtype)
    rows = quantise_rows(h) if isinstance(x, Fp8) else h
    return combine(experts_grouped.down(rows, routing, down, dtype), routing.weights)


def combine(y: Tensor, weights: Tensor) -> Tensor:
    """y [P, D] by pair, weights fp32 [T, A] -> [T, D] of y's dtype."""
    T, A = weights.shape
    P, D = y.shape
    if P != T * A:
        raise ValueError(f"combine: y {tuple(y.shape)}, weights {tuple(weights.shape)}")
    out = y.new_empty(T, D)
    launch(
        _experts_combine, (T, triton.cdiv(D, COLUMNS)), y, weights, out, D=D, A=A, BLOCK=COLUMNS,
        cost=lambda: combine_cost(T, A, D, y.element_size()),
    )  # fmt: skip
    return out


def combine_cost(T: int, A: int, D: int, element_bytes: int) -> Cost:
    """y read, out written."""
    return Cost(element_bytes * T * D * (A + 1) + 4 * T * A, 2 * T * A * D)
