"""What the self-test's kernels are given: the same numbers on every card, in the forms of a model's own weights.

Numbers are drawn once, on the CPU, and laid out on the device from there: a matrix of 26 M weights is a run of windows
over a million normal variates, a prime number of them, so that no two of its rows are alike. Its rows have sizes from
0.3 to 3, so that a row, a scale or a half of a gated product in another one's place is seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dgemma_local import ops
from dgemma_local.quant import GROUP, Fp8, Nvfp4, Weight

SEED = 20_261_130
VARIATES = 1_048_583  # the first prime past 2^20
SHIFT = 104_729  # between the beginnings of two tensors: the 10,000th prime
E4M3 = torch.float8_e4m3fn
CODE_SIZE = 60.0  # rms of E4M3 codes: 448 is 7 deviations away
# E4M3 bit patterns of NVFP4 scales: ½ … 3.75
LEAST_SCALE, SCALES = 0x30, 24


@dataclass(frozen=True, slots=True)
class Form:
    """How a weight is stored: what a kernel is compiled for, but for its operand's rows."""

    kind: str  # "plain", "fp8", "nvfp4"
    shape: tuple[int, ...]
    rows: str  # what its operand becomes first: "plain", "fp8", "nvfp4" (ops.form)
    scale: str = ""  # dtype of an FP8 row scale
    heights: tuple[int, ...] = ()  # of NVFP4's parts
    divides: bool = True  # NVFP4's global scale

    @classmethod
    def of(cls, weight: Weight, dtype: torch.dtype) -> "Form":
        rows = ops.form(torch.empty(0, dtype=dtype, device=weight.device), weight)
        if isinstance(weight, Fp8):
            return cls("fp8", weight.shape, rows, str(weight.scale.dtype).removeprefix("torch."))
        if isinstance(weight, Nvfp4):
            return cls("nvfp4", weight.shape, rows, heights=weight.heights, divides=weight.divides)
        return cls("plain", tuple(weight.shape), rows)

    def first(self, many: int) -> "Form":
        """Of a stack, `many` experts; of a matrix that is no part of another, as many rows."""
        return replace(self, shape=(min(many, self.shape[0]), *self.shape[1:]))

    def __str__(self) -> str:
        sense = "" if self.kind != "nvfp4" else f" {'+'.join(map(str, self.heights))} {'/' if self.divides else '*'}"
        return f"{' x '.join(map(str, self.shape))} {self.kind} {self.scale}{sense}, {self.rows} rows"


class Operands:
    """Makes tensors on one device, each from a `seed` of its own; activations in the model's `dtype`."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        drawn = torch.Generator().manual_seed(SEED)
        self.device, self.dtype = device, dtype
        self._normal = torch.randn(VARIATES, generator=drawn).to(device)
        self._codes = (self._normal * CODE_SIZE).to(E4M3).view(torch.uint8)
        self._bytes = torch.randint(256, (VARIATES,), generator=drawn, dtype=torch.uint8).to(device)
        self._words = torch.randint(1 << 31, (VARIATES,), generator=drawn).to(device)  # the one source of integers

    def normal(self, *shape: int, seed: int = 0, size: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        return self._windows(self._normal, shape, seed, dtype or self.dtype).mul_(size)

    def uniform(
        self, *shape: int, low: float, high: float, seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        share = self._windows(self._words, shape, seed, torch.float32).div_(1 << 31)
        return (share * (high - low) + low).to(dtype)

    def integers(self, *shape: int, below: int, seed: int = 0) -> Tensor:
        """int64, 0 … below - 1."""
        return self._windows(self._words, shape, seed) % below

    def numbers(self, *values: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def scales(self, width: int, seed: int) -> Tensor:
        """A norm's weight, [width]."""
        return self.normal(width, seed=seed, size=0.5).add_(1)

    def weight(self, form: Form, seed: int) -> Weight:
        """[…, out, in] in the form, of about in^-½ a number."""
        *lead, out, width = form.shape
        sizes = torch.linspace(0.3, 3.0, out, device=self.device)[:, None]
        if form.kind == "plain":
            return self.normal(*form.shape, seed=seed, size=width**-0.5).mul_(sizes.to(self.dtype))
        if form.kind == "fp8":
            codes = self._windows(self._codes, form.shape, seed).view(E4M3)
            scale = (sizes * (width**-0.5 / CODE_SIZE)).expand(*lead, out, 1).contiguous()
            return Fp8(codes, scale.to(getattr(torch, form.scale)))
        parts = (*lead, len(form.heights))
        whole = self.uniform(*parts, low=3.0, high=9.0, seed=seed + 1) * width**0.5
        inputs = self.uniform(*parts, low=100.0, high=300.0, seed=seed + 2)
        scale = self.integers(*lead, out, width // GROUP, below=SCALES, seed=seed + 3).to(torch.uint8) + LEAST_SCALE
        return Nvfp4(
            self._windows(self._bytes, (*lead, out, width // 2), seed),
            scale.view(E4M3),
            whole if form.divides else 1 / whole,
            inputs if form.divides else 1 / inputs,
            form.heights,
            form.divides,
        )

    @staticmethod
    def _windows(numbers: Tensor, shape: Sequence[int], seed: int, dtype: torch.dtype | None = None) -> Tensor:
        """`shape` filled from the seed's place on, round and round; memory of its own."""
        count, begin = torch.Size(shape).numel(), seed * SHIFT % VARIATES
        within = begin + count <= VARIATES
        part = numbers[begin : begin + count] if within else torch.cat([numbers[begin:], numbers[:begin]])
        part = part.to(dtype or numbers.dtype, copy=True)  # of a matrix that goes round more than once, before it grows
        return part.repeat(-(-count // part.numel()))[:count].view(*shape)
