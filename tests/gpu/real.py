"""What the GPU suite stands on: the card, the 26B model's sizes, operands made on the card, and how outcomes are told.

DGEMMA_GPU_SUITE_SMALL=1 is the rehearsal: the same code on small sizes, on a CPU, under Triton's interpreter, so that no
test has an error left that has nothing to do with a card. It measures nothing and proves nothing about one.

Imported before everything else of the suite: a rehearsal must mend the interpreter before a kernel is defined.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
for _folder in (TESTS, TESTS.parent):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

REHEARSAL = os.environ.get("DGEMMA_GPU_SUITE_SMALL") == "1"
if REHEARSAL:
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported already and compiles: a rehearsal wants a process of its own")
    os.environ["TRITON_INTERPRET"] = "1"
    import bounds
    import interpreter

    interpreter.install()
    bounds.install()

import torch  # noqa: E402
import triton  # noqa: E402, F401  before the kernels, which look whether somebody did
from torch import Tensor  # noqa: E402

from dgemma_local.quant import Fp8, Nvfp4, quantise_fp8  # noqa: E402

BF16, E4M3, FP32, FP64, INT32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.float64, torch.int32
DEVICE = torch.device("cpu" if REHEARSAL else "cuda")
EPS, SOFTCAP = 1e-6, 30.0
# of every torch twin: no tf32, no sums in bf16
torch.set_float32_matmul_precision("highest")
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


@dataclass(frozen=True, slots=True)
class Sizes:
    """Letters as in model.py."""

    canvas: int
    prefill: int
    odd: int  # rows that nothing divides
    D: int
    dense: int
    F: int
    experts: int
    active: int
    V: int
    heads: int
    sliding: tuple[int, int]  # KV heads, head dim
    full: tuple[int, int]
    window: int
    contexts: tuple[int, ...]

    @property
    def matrices(self) -> dict[str, tuple[int, int, tuple[int, ...]]]:
        """Of a layer: rows, columns, the rows of the parts that are fused in it."""
        (kv, d), (full_kv, full_d) = self.sliding, self.full
        q, full_q = self.heads * d, self.heads * full_d
        parts = {
            "sliding qkv": ((q, kv * d, kv * d), self.D),
            "full qkv": ((full_q, full_kv * full_d), self.D),
            "sliding o": ((self.D,), q),
            "full o": ((self.D,), full_q),
            "gate_up": ((self.dense, self.dense), self.D),
            "down": ((self.D,), self.dense),
        }
        return {name: (sum(heights), width, heights) for name, (heights, width) in parts.items()}


# DiffusionGemma 26B-A4B, its config.json
REAL = Sizes(
    256, 512, 203, 2816, 2112, 704, 128, 8, 262_144, 16, (8, 256), (2, 512), 1024, (0, 1, 1023, 1024, 5000)
)  # fmt: skip
TINY = Sizes(6, 9, 5, 64, 48, 32, 6, 2, 700, 4, (2, 16), (1, 32), 8, (0, 1, 7, 8, 20))
S = TINY if REHEARSAL else REAL


def capability() -> tuple[int, int]:
    """The card's; without one the newest, so that every test is collected."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (12, 0)


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if DEVICE.type == "cuda" else 1 << 40


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def say(*words: object) -> None:
    """A figure for the log, seen with pytest's -s."""
    print("   ", *words, flush=True)


# ── operands ──────────────────────────────────────────────────────────────────────────────────────────────────────


def generator(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def normal(*shape: int, seed: int = 0, size: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), device=DEVICE, dtype=dtype).mul_(size)


def uniform(*shape: int, low: float, high: float, seed: int = 0, dtype: torch.dtype = FP32) -> Tensor:
    return (torch.rand(*shape, generator=generator(seed), device=DEVICE) * (high - low) + low).to(dtype)


def integers(*shape: int, below: int, seed: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(0, below, shape, generator=generator(seed), device=DEVICE, dtype=dtype)


def numbers(*values: float, dtype: torch.dtype = FP32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def matrix(*shape: int, seed: int = 1) -> Tensor:
    """[…, out, in], so that both halves of a gated product count, and each row of a size of its own."""
    w = normal(*shape, seed=seed, size=shape[-1] ** -0.5)
    return w.mul_(torch.linspace(0.3, 3.0, shape[-2], device=DEVICE, dtype=BF16)[:, None])


def fp8_matrix(*shape: int, seed: int = 1) -> Fp8:
    return quantise_fp8(matrix(*shape, seed=seed))


def nvfp4_matrix(*shape: int, heights: tuple[int, ...], divides: bool = True, seed: int = 1) -> Nvfp4:
    """All codes alike often, scales of ½ … 3.75, and for every part of every expert a global scale of its own."""
    *lead, out, width = shape
    whole = uniform(*lead, len(heights), low=3.0, high=9.0, seed=seed + 1) * width**0.5
    inputs = uniform(*lead, len(heights), low=100.0, high=300.0, seed=seed + 2)
    return Nvfp4(
        integers(*lead, out, width // 2, below=256, seed=seed, dtype=torch.uint8),
        (integers(*lead, out, width // 16, below=24, seed=seed + 3, dtype=torch.uint8) + 0x30).view(E4M3),
        whole if divides else 1 / whole,
        inputs if divides else 1 / inputs,
        heights,
        divides,
    )


def with_rows_of_every_size(x: Tensor) -> Tensor:
    """Rows whose largest numbers lie two decades apart."""
    return x * torch.logspace(-1, 1, x.shape[0], device=DEVICE, dtype=x.dtype)[:, None]


def bits(t: Tensor) -> Tensor:
    """What torch.equal compares bit by bit, NaN among them."""
    t = t.contiguous()
    return t if t.dtype == torch.bool else t.view(torch.uint8)


def tensors_of(*made: Any) -> tuple[Tensor, ...]:
    """The tensors of what wrappers return, in order."""
    found: list[Tensor] = []
    for one in made:
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, Fp8):
            found += [one.codes, one.scale]
        elif isinstance(one, Nvfp4):
            found += [one.packed, one.scale]
        elif isinstance(one, tuple | list):
            found += tensors_of(*one)
        elif hasattr(one, "__dataclass_fields__"):
            found += tensors_of(*(getattr(one, name) for name in one.__dataclass_fields__))
    return tuple(found)
