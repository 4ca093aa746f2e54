"""gelu(gate) · up, tanh form: what stands between the two products of every gated MLP.

Precision  gate and up are each rounded to the model's dtype, gelu is taken in fp32 and rounded, the product is rounded.
Source     transformers 5.24: gelu_pytorch_tanh.
"""

import torch.nn.functional as F
from torch import Tensor

from ._triton import tl, triton

_MINUS_2_SQRT_2_PI = tl.constexpr(-1.5957691216057308)  # −2 √(2/π)
_CUBIC = tl.constexpr(0.044715)


def gated_gelu_twin(gate_up: Tensor) -> Tensor:
    """[..., 2F], gate before up -> [..., F]."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


@triton.jit
def gelu_tanh(x):
    """½ x (1 + tanh(√(2/π) (x + 0.044715 x³))), fp32.

    tanh(u) = 2 / (1 + exp(−2u)) − 1 is off by 2⁻²⁴ at the most, which counts against 1, not against a small u. Below −4
    it cancels with the 1, as it does in torch, whose last digits x · sigmoid(2u) would miss.
    """
    tanh = 2 / (tl.exp((x + x * x * x * _CUBIC) * _MINUS_2_SQRT_2_PI) + 1) - 1
    return 0.5 * x * (1 + tanh)


@triton.jit
def gated_gelu(gate, up, OUT: tl.constexpr):
    """fp32 sums -> OUT."""
    gelu = gelu_tanh(gate.to(OUT).to(tl.float32)).to(OUT).to(tl.float32)
    return (gelu * up.to(OUT).to(tl.float32)).to(OUT)
