"""A mixture of E gated MLPs: each row's A experts, weighted and summed.

    out[t] = Σ over slots s of  weight[t, s] · down_e( gelu(gate_e x_t) · (up_e x_t) )        e = chosen[t, s]

    x ─ gated ─► h ─ (quantise) ─ down ─► y by pair ─ norms.combine ─► the layer's end
        D → F    [P, F]           F → D   [T·A, D]

What multiplies depends on how the weights are stored:
    Tensor, Nvfp4 with Tensor x     experts_grouped; h stays in the model's dtype
    Fp8 with Fp8 x                  experts_grouped; h is quantised again, one scale a pair (rows)
    Nvfp4 with Nvfp4 x              experts_nvfp4_nvfp4, sm_120; h is quantised where it is made

Shapes     x [T, D]; gate_up [E, 2F, D]; down [E, D, F]; routing of T rows -> y [T·A, D] of `dtype`.
Precision  y is rounded to `dtype`. `norms.combine`, which reads a row's pairs from the L2, sums them in fp32 in the order
           of the slots and rounds once. No atomics: the same bits every time.
"""

import torch
from torch import Tensor

from dgemma_local.quant import Fp8, Nvfp4, Weight

from . import experts_grouped, experts_nvfp4_nvfp4
from .norms import Pairs
from .router import Routing
from .rows import quantise_rows, quantise_rows_twin

Rows = Tensor | Fp8 | Nvfp4


def experts_twin(
    x: Rows, routing: Routing, gate_up: Weight, down: Weight, dtype: torch.dtype = torch.bfloat16
) -> Pairs:
    """The same in torch; `dtype` fp64 is the tests' truth."""
    if isinstance(x, Nvfp4):
        y = experts_nvfp4_nvfp4.pairs_twin(x, routing, gate_up, down, dtype)
    else:
        h = experts_grouped.gated_twin(x, routing, gate_up, dtype)
        rows = quantise_rows_twin(h) if isinstance(x, Fp8) else h
        y = experts_grouped.down_twin(rows, routing, down, dtype)
    return Pairs(y, routing.weights)


def experts(x: Rows, routing: Routing, gate_up: Weight, down: Weight, dtype: torch.dtype = torch.bfloat16) -> Pairs:
    """x [T, D], quantised as the weights want it -> y [T·A, D] of `dtype`, the model's, with the weights of its pairs."""
    if gate_up.shape[0] != down.shape[0] or gate_up.shape[1] != 2 * down.shape[2] or down.shape[1] != x.shape[1]:
        raise ValueError(f"experts: x {tuple(x.shape)}, gate_up {tuple(gate_up.shape)}, down {tuple(down.shape)}")
    if isinstance(x, Nvfp4):
        return Pairs(experts_nvfp4_nvfp4.pairs(x, routing, gate_up, down, dtype), routing.weights)
    h = experts_grouped.gated(x, routing, gate_up, dtype)
    rows = quantise_rows(h) if isinstance(x, Fp8) else h
    return Pairs(experts_grouped.down(rows, routing, down, dtype), routing.weights)
