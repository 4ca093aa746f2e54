"""Weights in few bits, as the published checkpoints store them, decoded in plain torch while they are used.

    Fp8      code E4M3                                   w = code · scale                    one scale a row
    Nvfp4    code E2M1, scale E4M3, global scale fp32    w = code · (scale / global)         one scale for 16 along the input
                                                         w = code · (scale · global)         where ModelOpt wrote it

    E2M1     bit 3 is the sign; bits 0 … 2 are   0 ½ 1 1½ 2 3 4 6        −0 stays −0
    byte j   ┌ high nibble: element 2j + 1 ┬ low nibble: element 2j ┐    [½, −6, 1, 3] is F1 52

Decoding is exact: fp32 in the order written here, then one rounding to the dtype asked for. That is compressed-tensors'
own order; in bf16 the two agree in every bit. Activations stay as they are (weight-only arithmetic).

A matrix is never decoded whole: `linear` and its kin decode a block of rows, use it, and go on, and experts that no row
chose are not decoded at all. A plain Tensor takes torch's own operation.

Sources: compressed-tensors 0.20 (compressors/nvfp4, quantization/utils/helpers); NVIDIA ModelOpt's NVFP4QTensor.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3_MAX, E2M1_MAX = 448.0, 6.0
GROUP = 16  # weights along the input that share an NVFP4 scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# what compressed-tensors puts where a scale came out as 0: the codes of such a row or group are all 0
NO_ROW_SCALE = {torch.bfloat16: 2.0**-7, torch.float32: 2.0**-23}
NO_GROUP_SCALE = 0x20  # E4M3's 0.125

# Bytes of fp32 that are decoded at once. On a CPU they and what is made on the way had better stay in the cache: an FP8
# expert of 1,408 × 2,816 takes 5 ms of one EPYC core in blocks of 4 MiB, 20 ms in one piece. A GPU wants few, large steps.
CPU_BLOCK, GPU_BLOCK = 4 << 20, 64 << 20

EVERYTHING = slice(None)


@dataclass(frozen=True, slots=True, eq=False)
class Fp8:
    """A matrix, or a stack of them, in E4M3 with one scale a row."""

    codes: Tensor  # float8_e4m3fn [..., out, in]
    scale: Tensor  # bf16 or fp32 [..., out, 1]; multiplies

    def __post_init__(self) -> None:
        want = (*self.codes.shape[:-1], 1)
        if tuple(self.scale.shape) != want or self.scale.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"Fp8: scale {tuple(self.scale.shape)} {self.scale.dtype}, wanted {want} bf16 or fp32")

    @classmethod
    def empty(
        cls,
        shape: Sequence[int],
        scale_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Uninitialised; shape [..., out, in]."""
        codes = torch.empty(*shape, dtype=torch.float8_e4m3fn, device=device)
        return cls(codes, torch.empty(*shape[:-1], 1, dtype=scale_dtype, device=device))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def numel(self) -> int:
        return self.codes.numel()

    def __getitem__(self, expert: int) -> Self:
        """One expert of a stack, a view."""
        return replace(self, codes=self.codes[expert], scale=self.scale[expert])

    def rows(self, rows: slice) -> Self:
        """Some of the output rows, a view."""
        return replace(self, codes=self.codes[..., rows, :], scale=self.scale[..., rows, :])

    def pick(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Single rows, decoded: ids [...] of a matrix [out, in] -> [..., in]."""
        codes = self.codes.view(torch.uint8)[ids].view(torch.float8_e4m3fn)
        return Fp8(codes, self.scale[ids]).decode(dtype)

    def decode(self, dtype: torch.dtype, rows: slice = EVERYTHING) -> Tensor:
        """[..., out, in] of `dtype`, or some of its rows."""
        part = self if rows == EVERYTHING else self.rows(rows)
        return _e4m3(part.codes).mul_(part.scale).to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Nvfp4:
    """A matrix, or a stack of them, in E2M1 with a scale for every 16 weights and a global one for each fused part.

    `heights` are the parts' rows: (2,112, 2,112) of gate and up, (out,) of a matrix that was stored alone. The parts'
    global scales are often equal, which nothing here relies on.
    """

    packed: Tensor  # uint8 [..., out, in / 2]
    scale: Tensor  # float8_e4m3fn [..., out, in / 16]
    global_scale: Tensor  # fp32 [..., parts]
    input_scale: Tensor  # fp32 [..., parts], the activations', as stored; for kernels that quantise them
    heights: tuple[int, ...]
    divides: bool  # the global scale divides (compressed-tensors), or multiplies (ModelOpt)

    def __post_init__(self) -> None:
        *lead, out, half = self.packed.shape
        shapes = tuple(tuple(t.shape) for t in (self.scale, self.global_scale, self.input_scale))
        parts = (*lead, len(self.heights))
        want = ((*lead, out, 2 * half // GROUP), parts, parts)
        if shapes != want or sum(self.heights) != out or 2 * half % GROUP:
            raise ValueError(
                f"Nvfp4: {tuple(self.packed.shape)}, heights {self.heights}: scales {shapes}, wanted {want}"
            )

    @classmethod
    def empty(
        cls,
        shape: Sequence[int],
        heights: Sequence[int] | None = None,
        divides: bool = True,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Uninitialised; shape [..., out, in], in a multiple of 16; without heights one part."""
        *lead, out, width = shape
        parts = tuple(heights) if heights is not None else (out,)
        return cls(
            packed=torch.empty(*lead, out, width // 2, dtype=torch.uint8, device=device),
            scale=torch.empty(*lead, out, width // GROUP, dtype=torch.float8_e4m3fn, device=device),
            global_scale=torch.empty(*lead, len(parts), device=device),
            input_scale=torch.empty(*lead, len(parts), device=device),
            heights=parts,
            divides=divides,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.packed.shape[:-1], 2 * self.packed.shape[-1])

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.packed, self.scale, self.global_scale, self.input_scale))

    def numel(self) -> int:
        return 2 * self.packed.numel()

    def __getitem__(self, expert: int) -> Self:
        """One expert of a stack, a view."""
        return replace(
            self,
            packed=self.packed[expert],
            scale=self.scale[expert],
            global_scale=self.global_scale[expert],
            input_scale=self.input_scale[expert],
        )

    def rows(self, rows: slice) -> Self:
        """Some of the output rows, a view; a part may be left with none."""
        at = range(self.shape[-2])[rows]
        if at.step != 1:
            raise ValueError(f"Nvfp4: rows {rows} are not one run")
        ends = [min(max(end, at.start), at.start + len(at)) for end in accumulate(self.heights)]
        heights = tuple(end - begin for begin, end in pairwise([at.start, *ends]))
        return replace(self, packed=self.packed[..., rows, :], scale=self.scale[..., rows, :], heights=heights)

    def shared(self, parts: int) -> Self:
        """The same numbers as `parts` fused parts of equal height that share one global scale."""
        return replace(
            self,
            global_scale=self.global_scale.repeat_interleave(parts, -1),
            input_scale=self.input_scale.repeat_interleave(parts, -1),
            heights=(self.packed.shape[-2] // parts,) * parts,
        )

    def pick(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Single rows, decoded: ids [...] of a matrix [out, in] -> [..., in]."""
        scale = self.scale.view(torch.uint8)[ids].view(torch.float8_e4m3fn)
        return _decode_nvfp4(self.packed[ids], self._unit(scale, self._global_of_rows()[ids])).to(dtype)

    def decode(self, dtype: torch.dtype, rows: slice = EVERYTHING) -> Tensor:
        """[..., out, in] of `dtype`, or some of its rows."""
        part = self if rows == EVERYTHING else self.rows(rows)
        return _decode_nvfp4(part.packed, self._unit(part.scale, part._global_of_rows())).to(dtype)

    def _global_of_rows(self) -> Tensor:
        """[..., out, 1]."""
        parts = self.global_scale.unsqueeze(-1).split(1, -2)
        return torch.cat([g.expand(*g.shape[:-2], n, 1) for g, n in zip(parts, self.heights, strict=True)], -2)

    def _unit(self, scale: Tensor, global_scale: Tensor) -> Tensor:
        """What a code of 1 stands for, fp32 [..., out, in / 16]."""
        unit = _e4m3(scale)
        return unit.div_(global_scale) if self.divides else unit.mul_(global_scale)


Weight = Tensor | Fp8 | Nvfp4


# ── operations ────────────────────────────────────────────────────────────────────────────────────────────────────


def linear(x: Tensor, w: Weight) -> Tensor:
    """x [..., in], w [out, in] -> x @ wᵀ [..., out]."""
    if isinstance(w, Tensor):
        return F.linear(x, w)
    blocks = list(_blocks(w))
    if len(blocks) == 1:
        return F.linear(x, w.decode(x.dtype))
    out = x.new_empty(*x.shape[:-1], w.shape[0])
    for rows in blocks:
        out[..., rows] = F.linear(x, w.decode(x.dtype, rows))
    return out


def grouped_linear(x: Tensor, w: Weight, ends: Tensor) -> Tensor:
    """x [P, in], sorted by group; w [E, out, in]; ends [E] int32, one past each group's last row -> [P, out]."""
    if isinstance(w, Tensor) and x.dtype != torch.float64 and all(n * x.element_size() % 16 == 0 for n in w.shape[1:]):
        return F.grouped_mm(x, w.transpose(1, 2), offs=ends)
    # grouped_mm wants 16-byte strides and knows no fp64
    groups = [(e, a, b) for e, (a, b) in enumerate(pairwise([0, *ends.tolist()])) if a < b]
    if not groups:
        return x.new_empty(0, w.shape[1])
    return torch.cat([linear(x[a:b], w[e]) for e, a, b in groups])


def embedding(w: Weight, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """w [V, D], ids [...] int64 -> [..., D]; `dtype` is what packed rows are decoded to."""
    return F.embedding(ids, w) if isinstance(w, Tensor) else w.pick(ids, dtype)


def weighted_rows(p: Tensor, w: Weight) -> Tensor:
    """p [..., V], w [V, D] -> p @ w [..., D]; over blocks the sum is kept in fp32 or wider and rounded once."""
    if isinstance(w, Tensor):
        return p @ w
    blocks = list(_blocks(w))
    if len(blocks) == 1:
        return p @ w.decode(p.dtype)
    wide = torch.promote_types(p.dtype, torch.float32)
    total = torch.zeros(*p.shape[:-1], w.shape[1], dtype=wide, device=p.device)
    for rows in blocks:
        total += p[..., rows].to(wide) @ w.decode(p.dtype, rows).to(wide)
    return total.to(p.dtype)


def rows_of(w: Weight, rows: slice) -> Weight:
    """Some output rows of a matrix, a view."""
    return w[rows] if isinstance(w, Tensor) else w.rows(rows)


def _blocks(w: Fp8 | Nvfp4) -> Iterator[slice]:
    """Runs of rows, each of at most a block's bytes once decoded to fp32."""
    *_, out, width = w.shape
    step = max(1, (CPU_BLOCK if w.device.type == "cpu" else GPU_BLOCK) // (4 * width))
    return (slice(begin, min(begin + step, out)) for begin in range(0, out, step))


# ── codes to numbers: tables, because torch's own conversion on a CPU is four times slower than looking up ────────


@cache
def _e4m3_table(device: torch.device) -> Tensor:
    """[256] fp32."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32).to(device)


@cache
def _e2m1_pairs(device: torch.device) -> Tensor:
    """[256] int64, each the two fp32 numbers of a byte side by side, so that one look-up fetches both."""
    values = torch.tensor([*E2M1, *(-v for v in E2M1)])
    return torch.stack([values.repeat(16), values.repeat_interleave(16)], 1).view(torch.int64)[:, 0].to(device)


def _e4m3(codes: Tensor) -> Tensor:
    """float8_e4m3fn -> fp32 of the same shape, fresh memory."""
    index = codes.view(torch.uint8).flatten().int()
    return _e4m3_table(codes.device).index_select(0, index).view(codes.shape)


def _decode_nvfp4(packed: Tensor, unit: Tensor) -> Tensor:
    """packed [..., in / 2], unit [..., in / 16] -> fp32 [..., in]."""
    # One of twelve forms tried, 1.0 G weights/s for 1,408 × 2,816 on one core: pairs of fp32 as rows of a table 0.3,
    # pairs of bf16 0.2, bit arithmetic 0.1.
    pairs = _e2m1_pairs(packed.device).index_select(0, packed.flatten().int())
    groups = pairs.view(torch.float32).view(*unit.shape, GROUP)
    return groups.mul_(unit.unsqueeze(-1)).flatten(-2)


# ── numbers to codes, each step in the dtype that compressed-tensors takes it in ──────────────────────────────────


@torch.no_grad()
def quantise_fp8(w: Tensor) -> Fp8:
    """w [..., out, in] bf16 or fp32 -> codes and scales of w's dtype: scale = amax / 448 of each row."""
    quantised = Fp8.empty(w.shape, w.dtype, w.device)
    for rows in _blocks(quantised):  # an embedding is 1.5 GB
        part, target = w[..., rows, :], quantised.rows(rows)
        scale = part.abs().amax(-1, keepdim=True) / E4M3_MAX
        target.scale.copy_(scale.masked_fill_(scale == 0, NO_ROW_SCALE[w.dtype]))
        target.codes.copy_((part / target.scale).clamp_(-E4M3_MAX, E4M3_MAX))
    return quantised


# between two codes; a tie goes to the even code, so every second bound lies one ulp below its midpoint
_BOUNDS = tuple(m * (1 - 2.0**-24) if i % 2 else m for i, m in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)))


@torch.no_grad()
def quantise_nvfp4(w: Tensor, heights: Sequence[int] | None = None) -> Nvfp4:
    """w [..., out, in] bf16 or fp32 -> a global scale for each part, which divides, and codes under it.

        global = 448 · 6 / amax(part)    scale = e4m3(global · amax(group) / 6)    code = e2m1(w / (scale / global))

    amax / 6 and the global scale are taken in w's dtype, as the published calibration does with its bf16 weights.
    """
    quantised = Nvfp4.empty(w.shape, heights, device=w.device)
    quantised.input_scale.fill_(1.0)
    amax = torch.stack([part.abs().amax((-2, -1)) for part in w.split(quantised.heights, -2)], -1)
    whole = E4M3_MAX * E2M1_MAX / amax.clamp_min(torch.finfo(w.dtype).tiny)
    quantised.global_scale.copy_(whole.nan_to_num(nan=1.0, posinf=1.0))
    groups, global_scale = w.unflatten(-1, (-1, GROUP)), quantised._global_of_rows()
    # 448 and a bf16 rounding at most, which E4M3 takes for 448
    quantised.scale.copy_(global_scale * (groups.abs().amax(-1) / E2M1_MAX))
    quantised.scale.view(torch.uint8)[_e4m3(quantised.scale) == 0] = NO_GROUP_SCALE
    codes = e2m1((groups / quantised._unit(quantised.scale, global_scale).unsqueeze(-1)).flatten(-2))
    quantised.packed.copy_(pack(codes))
    return quantised


def e2m1(x: Tensor) -> Tensor:
    """The nearest codes, uint8, a tie to the even one; |x| > 5 is 6, and only what is below 0 has a sign."""
    magnitude = torch.bucketize(x.abs(), x.new_tensor(_BOUNDS), out_int32=True).to(torch.uint8)
    return magnitude | ((x < 0).to(torch.uint8) << 3)


def pack(codes: Tensor) -> Tensor:
    """E2M1 codes uint8 [..., in] -> bytes [..., in / 2]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)
