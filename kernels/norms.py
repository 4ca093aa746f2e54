"""Gemma's norms, each with what surrounds it, in one pass over the row.

    rms_norm    n  = w · x / rms(x)                                        rms(t) = sqrt(mean(t²) + eps)

    sandwich    h  = residual + post · x / rms(x)                          closes attention,
                nᵢ = preᵢ · h / rms(h)                                     opens the dense MLP and the experts

    combine     routed = Σ over slots  weight · y                          the A experts of a row, in the slots' order
                b  = w₁ · dense / rms(dense) + w₂ · routed / rms(routed)
                y  = (residual + w · b / rms(b)) · scalar                  closes the layer,
                n  = following · y / rms(y)                                opens the next one's attention

    quantised   scale = max|n| / 448,  codes = e4m3(n / scale)             any n, where an FP8 linear reads it

Shapes     x, residual, h, n, dense, routed, y [T, D]; weights [D]; scalar [1] or [T]; codes [T, D] E4M3, scale [T, 1] fp32
Precision  sums, quotients and the product with a norm's weight in fp32, then one rounding to the model's dtype; + and
           · scalar round each. h and y are rounded before their own rms, n before it is quantised (a zero row: scale 1).
Traffic    with s bytes an element: rms_norm 2s·T·D, sandwich (3 + readers)s·T·D, combine (4 + A)s·T·D; a quantised n counts
           1 instead of s. The weights, 6 kB each, stay in the L2.
Grid       one program a row. No tile to choose: the block is the row, and the warps follow from D.
Source     transformers 5.24 modeling_diffusion_gemma.py; compressed-tensors 0.20, "token", dynamic, symmetric.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma_local.quant import Fp8

from ._e4m3 import to_e4m3
from ._launch import Cost, contiguous, launch
from ._triton import tl, triton
from .rows import quantise_rows_twin

Row = Tensor | Fp8
LANE = 8  # columns a lane, 16 bytes in bf16; with 16 the E4M3 rows change their layout through shared memory


@dataclass(frozen=True, slots=True)
class Pairs:
    """What the experts made of each row, before it is weighted and summed."""

    y: Tensor  # [T·A, D], by pair t·A + slot
    weights: Tensor  # fp32 [T, A]

    def summed(self) -> Tensor:
        """[T, D] of y's dtype: the sum in fp32 or wider, rounded once."""
        by_row = self.y.view(
            *self.weights.shape, -1
        )  # times fp32 weights: no copy of its own, in fp32, before the product
        return (by_row * self.weights[..., None]).sum(-2).to(self.y.dtype)


# ── twins: differentiable, any leading axes ───────────────────────────────────────────────────────────────────────


def normalise(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last axis, in fp32 or wider and not yet rounded."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.rms_norm(wide, wide.shape[-1:], None, eps)


def norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., D] -> [..., D] in x's dtype: `normalise(x) * weight`, rounded once. No `1 + w`; None: no weight."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)  # fp32 inside, like `normalise`


def rms_norm_twin(x: Tensor, weight: Tensor | None, eps: float, quantise: bool = False) -> Row:
    """x [..., D] -> its norm, or that norm's codes."""
    normed = norm(x, weight, eps)
    return quantise_rows_twin(normed) if quantise else normed


def sandwich_twin(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    pres: Sequence[Tensor | None],
    eps: float,
    quantise: bool | Sequence[bool] = False,
) -> tuple[Tensor, tuple[Row, ...]]:
    """-> h and its norm under each of `pres`; None: without a weight."""
    h = residual + norm(x, post, eps)
    if len(pres) == 1:
        normed = [norm(h, pres[0], eps)]
    else:
        unit = normalise(h, eps)  # one normalisation, several readers
        normed = [(unit if pre is None else unit * pre).to(h.dtype) for pre in pres]
    wanted = _each(quantise, len(pres))
    return h, tuple(quantise_rows_twin(n) if q else n for n, q in zip(normed, wanted, strict=True))


def combine_twin(
    dense: Tensor,
    routed: Tensor | Pairs,
    residual: Tensor,
    norm_1: Tensor,
    norm_2: Tensor,
    norm_both: Tensor,
    scalar: Tensor,
    eps: float,
    following: Tensor | None = None,
    quantise: bool = False,
) -> tuple[Tensor, Row | None]:
    """-> the next layer's residual stream and, if its first norm `following` is given, that norm of it."""
    if isinstance(routed, Pairs):
        routed = routed.summed()
    both = norm(dense, norm_1, eps) + norm(routed, norm_2, eps)
    y = (residual + norm(both, norm_both, eps)) * (scalar if scalar.numel() == 1 else scalar[:, None])
    return y, None if following is None else rms_norm_twin(y, following, eps, quantise)


# ── kernels ───────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _unit(x, eps, D: tl.constexpr):
    """x / rms(x) of a row in fp32; lanes past D hold 0."""
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x) / D + eps)


@triton.jit
def _add(a, b, c, d):
    return a + c, b + d


@triton.jit
def _units(x, y, eps, D: tl.constexpr):
    """Two rows over their own rms; both sums in one exchange between the warps."""
    x, y = x.to(tl.float32), y.to(tl.float32)
    xx, yy = tl.reduce((x * x, y * y), 0, _add)
    return x * tl.rsqrt(xx / D + eps), y * tl.rsqrt(yy / D + eps)


@triton.jit
def _weight(W, col, live):
    """A norm's weight; 1 where it has none. Loaded before the row's sum, so that it is there when the sum is."""
    return tl.full(col.shape, 1.0, tl.float32) if W is None else tl.load(W + col, live, other=0.0)


@triton.jit
def _write(n, N, S, row, col, live, D: tl.constexpr):
    """The row n, rounded to the model's dtype already, as it is; or its codes, and its scale to S."""
    if S is not None:
        n = n.to(tl.float32)
        scale = tl.div_rn(tl.max(tl.abs(n)), 448.0)
        scale = tl.where(scale == 0, 1.0, scale)
        tl.store(S + row, scale)
        tl.store(N + row * D + col, to_e4m3(tl.div_rn(n, scale)), live)
    else:
        tl.store(N + row * D + col, n, live)


@triton.jit
def _rms_norm(X, W, N, S, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    live = col < D
    x = tl.load(X + row * D + col, live, other=0.0)
    w = _weight(W, col, live)
    n = (_unit(x, eps, D) * w).to(X.dtype.element_ty)
    _write(n, N, S, row, col, live, D)


@triton.jit
def _sandwich(X, R, POST, H, PRE_1, N_1, S_1, PRE_2, N_2, S_2, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    live = col < D
    x = tl.load(X + row * D + col, live, other=0.0)
    r = tl.load(R + row * D + col, live, other=0.0)
    post = tl.load(POST + col, live, other=0.0)
    pre_1 = _weight(PRE_1, col, live)
    if N_2 is not None:
        pre_2 = _weight(PRE_2, col, live)

    a = (_unit(x, eps, D) * post).to(H.dtype.element_ty)
    h = (r.to(tl.float32) + a.to(tl.float32)).to(H.dtype.element_ty)
    tl.store(H + row * D + col, h, live)
    unit = _unit(h, eps, D)
    _write((unit * pre_1).to(H.dtype.element_ty), N_1, S_1, row, col, live, D)
    if N_2 is not None:
        _write((unit * pre_2).to(H.dtype.element_ty), N_2, S_2, row, col, live, D)


@triton.jit
def _combine(
    DENSE, ROUTED, PAIR, R, W_1, W_2, W, SCALAR, NEXT, Y, N, S, eps,
    A: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    live = col < D
    dense = tl.load(DENSE + row * D + col, live, other=0.0)
    if PAIR is None:
        routed = tl.load(ROUTED + row * D + col, live, other=0.0)
    else:
        total = tl.zeros((BLOCK,), tl.float32)
        for slot in tl.static_range(A):
            y = tl.load(ROUTED + (row * A + slot) * D + col, live, other=0.0).to(tl.float32)
            total += tl.load(PAIR + row * A + slot) * y
        routed = total.to(Y.dtype.element_ty)
    r = tl.load(R + row * D + col, live, other=0.0)
    w_1 = tl.load(W_1 + col, live, other=0.0)
    w_2 = tl.load(W_2 + col, live, other=0.0)
    w = tl.load(W + col, live, other=0.0)
    scalar = tl.load(SCALAR + row * EACH).to(tl.float32)  # EACH 0: one of all rows
    if N is not None:
        following = tl.load(NEXT + col, live, other=0.0)

    one, two = _units(dense, routed, eps, D)
    one = (one * w_1).to(Y.dtype.element_ty)
    two = (two * w_2).to(Y.dtype.element_ty)
    both = (one.to(tl.float32) + two.to(tl.float32)).to(Y.dtype.element_ty)
    b = (_unit(both, eps, D) * w).to(Y.dtype.element_ty)
    h = (r.to(tl.float32) + b.to(tl.float32)).to(Y.dtype.element_ty)
    y = (h.to(tl.float32) * scalar).to(Y.dtype.element_ty)
    tl.store(Y + row * D + col, y, live)
    if N is not None:
        _write((_unit(y, eps, D) * following).to(Y.dtype.element_ty), N, S, row, col, live, D)


# ── wrappers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, quantise: bool = False) -> Row:
    """x [T, D] -> [T, D] in x's dtype, or its codes."""
    rows, width = _shape("rms_norm", x, {}, {"weight": weight})
    normed, codes, scale = _target(x, quantise)
    launch(
        _rms_norm, (rows,), x, weight, codes, scale, eps, D=width, **row_block(width),
        cost=lambda: rms_norm_cost(rows, width, x.element_size(), quantise),
    )  # fmt: skip
    return normed


def sandwich(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    pres: Sequence[Tensor | None],
    eps: float,
    quantise: bool | Sequence[bool] = False,
) -> tuple[Tensor, tuple[Row, ...]]:
    """x, residual [T, D] -> h [T, D] and, for each of one or two `pres`, its norm or that norm's codes."""
    weights = {"post": post} | {f"pre {i}": pre for i, pre in enumerate(pres)}
    rows, width = _shape("sandwich", x, {"residual": residual}, weights)
    wanted = _each(quantise, len(pres))
    if len(pres) not in (1, 2):
        raise ValueError(f"sandwich: {len(pres)} readers of a row, wanted 1 or 2")
    h = torch.empty_like(x)
    targets = [_target(x, q) for q in wanted]
    readers = [a for pre, (_, codes, scale) in zip(pres, targets, strict=True) for a in (pre, codes, scale)]
    readers += [None] * (6 - len(readers))
    launch(
        _sandwich, (rows,), x, residual, post, h, *readers, eps, D=width, **row_block(width),
        cost=lambda: sandwich_cost(rows, width, x.element_size(), wanted),
    )  # fmt: skip
    return h, tuple(normed for normed, _, _ in targets)


def combine(
    dense: Tensor,
    routed: Tensor | Pairs,
    residual: Tensor,
    norm_1: Tensor,
    norm_2: Tensor,
    norm_both: Tensor,
    scalar: Tensor,
    eps: float,
    following: Tensor | None = None,
    quantise: bool = False,
) -> tuple[Tensor, Row | None]:
    """dense, residual [T, D], routed the same or by pair -> y [T, D] and, if `following` is given, its norm or codes.

    scalar [1], or [T]: rows of the encoder and of a canvas, whose layers have scalars of their own, in one pass.
    """
    by_pair, pair = (routed.y, routed.weights) if isinstance(routed, Pairs) else (routed, None)
    slots = 1 if pair is None else pair.shape[-1]
    weights = {"norm_1": norm_1, "norm_2": norm_2, "norm_both": norm_both, "following": following}
    rows, width = _shape("combine", dense, {"residual": residual}, weights)
    if pair is not None and pair.shape != (rows, slots):
        raise ValueError(f"combine: x {tuple(dense.shape)}, weights of pairs {tuple(pair.shape)}")
    contiguous("combine", pair=pair)
    if by_pair.shape != (rows * slots, width) or not by_pair.is_contiguous():
        raise ValueError(f"combine: x {tuple(dense.shape)}, routed {tuple(by_pair.shape)}, {slots} of each row")
    if scalar.numel() != 1 and scalar.shape != (rows,):
        raise ValueError(f"combine: scalar {tuple(scalar.shape)}, wanted one number, or one of each of {rows} rows")
    contiguous("combine", scalar=scalar)
    y = torch.empty_like(dense)
    normed, codes, scale = (None, None, None) if following is None else _target(dense, quantise)
    launch(
        _combine, (rows,), dense, by_pair, pair, residual, norm_1, norm_2, norm_both, scalar, following, y, codes, scale, eps,
        A=slots, D=width, EACH=int(scalar.numel() > 1), **row_block(width),
        cost=lambda: combine_cost(rows, width, dense.element_size(), slots, None if following is None else quantise),
    )  # fmt: skip
    return y, normed


def _shape(name: str, x: Tensor, rows: dict[str, Tensor], weights: dict[str, Tensor | None]) -> tuple[int, int]:
    """(T, D) of x; ValueError where a tensor that the kernel would read beside it is of another shape."""
    if x.dim() != 2 or not x.is_contiguous():
        raise ValueError(f"{name}: x {tuple(x.shape)}, strides {x.stride()}, wanted [T, D], contiguous")
    for what, t in rows.items():
        if t.shape != x.shape or not t.is_contiguous():
            raise ValueError(f"{name}: x {tuple(x.shape)}, {what} {tuple(t.shape)}, strides {t.stride()}")
    for what, w in weights.items():
        if w is not None and (w.shape != x.shape[1:] or not w.is_contiguous()):
            raise ValueError(f"{name}: x {tuple(x.shape)}, {what} {tuple(w.shape)}, strides {w.stride()}")
    return x.shape[0], x.shape[1]


def _target(x: Tensor, quantise: bool) -> tuple[Row, Tensor, Tensor | None]:
    """Where a normed row goes: what is returned, and the kernel's two pointers."""
    if not quantise:
        plain = torch.empty_like(x)
        return plain, plain, None
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    return Fp8(codes, scale), codes, scale


def _each(quantise: bool | Sequence[bool], readers: int) -> tuple[bool, ...]:
    wanted = (quantise,) * readers if isinstance(quantise, bool) else tuple(quantise)
    if len(wanted) != readers:
        raise ValueError(f"sandwich: quantise {wanted} for {readers} readers")
    return wanted


def row_block(width: int) -> dict[str, int]:
    """The launch of one program a row of `width`."""
    block = max(128, 1 << (width - 1).bit_length())  # E4M3 is rounded four to an instruction
    return {"BLOCK": block, "warps": min(16, max(1, block // (32 * LANE))), "stages": 1}


# ── what a launch moves and computes, with `element` bytes of the model's dtype ───────────────────────────────────


def _row_bytes(width: int, element: int, quantised: bool) -> int:
    return width + 4 if quantised else width * element


def rms_norm_cost(rows: int, width: int, element: int, quantised: bool = False) -> Cost:
    moved = rows * (width * element + _row_bytes(width, element, quantised)) + width * element
    return Cost(moved, rows * width * (4 + 3 * quantised))


def sandwich_cost(rows: int, width: int, element: int, quantised: Sequence[bool]) -> Cost:
    written = sum(_row_bytes(width, element, q) for q in quantised)
    moved = rows * (3 * width * element + written) + (1 + len(quantised)) * width * element
    return Cost(moved, rows * width * (8 + sum(1 + 3 * q for q in quantised)))


def combine_cost(rows: int, width: int, element: int, slots: int, quantised: bool | None) -> Cost:
    """`slots` pairs of a row, 1 where they are summed already; `quantised` None: no norm of what follows."""
    written = 0 if quantised is None else _row_bytes(width, element, quantised)
    moved = rows * ((3 + slots) * width * element + written) + (3 if quantised is None else 4) * width * element
    return Cost(moved, rows * width * (13 + 2 * slots + (0 if quantised is None else 4 + 3 * quantised)))
