"""cross.py derives what triton's launcher would, and reads machine code rightly."""

from types import SimpleNamespace
from typing import Any

import cross
import pytest
import torch
import triton
import triton.language as tl
from dgemma_local.kernels._launch import ADA, Cost, Launch, launch, recording
from kernel_report import flops_of, loop_flops
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend

FREE = SimpleNamespace(
    name="x", is_constexpr=False, do_not_specialize=False, do_not_specialize_on_alignment=False, default=None
)
VALUES = [
    *(torch.empty(4, dtype=dtype) for dtype in cross.POINTERS),
    torch.empty(64, dtype=torch.uint8)[3:],
    *(0, 1, 2, 16, -16, 17, 2**31 - 1, 2**31, -(2**31) - 1, 2**62),
    *(1.0, 0.0, True, False, None),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: f"{v.dtype}" if isinstance(v, torch.Tensor) else repr(v))
def test_arguments_are_specialised_as_by_triton(value: Any) -> None:
    constant, kind, aligned = cross._specialised(value, FREE)
    want, mark = native_specialize_impl(CUDABackend, value, False, True, True)
    assert kind == want and constant == (want == "constexpr")
    assert aligned == (mark == "D") or constant


@triton.jit
def _multiply(X, Y, OUT, rows, K: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, 16)[:, None] * K + tl.arange(0, 32)[None, :]
    acc = tl.zeros((16, 16), tl.float32)
    for k in range(0, K, 32):
        acc += tl.dot(tl.load(X + i + k), tl.load(Y + i + k).T)
    tl.store(OUT + tl.arange(0, 16)[:, None] * N + tl.arange(0, 16)[None, :], acc, tl.arange(0, 16)[:, None] < rows)


def _recorded() -> Launch:
    x = torch.empty(16, 512, dtype=torch.bfloat16, device="meta")
    out = torch.empty(16, 16, device="meta")
    with recording(ADA) as launches:
        launch(_multiply, (1,), x, x, out, 7, cost=lambda: Cost(0, 2 * 16 * 16 * 512, "bf16"), warps=1, K=512, N=16)
    return launches[0]


def test_a_launch_compiles_from_meta_tensors() -> None:
    artefact = cross.compile_launch(_recorded(), ADA)
    assert artefact.name == "test_cross.multiply" and artefact.warps == 1
    assert list(artefact.mma) == ["HMMA.16816.F32.BF16"] and artefact.spills == 0
    assert any("m16n8k16" in name for name in artefact.ptx_mma)
    hot = artefact.hot
    # 32 of k a trip: two k16 steps of two n8 halves, and the whole sum is the launch's flops
    assert hot is not None and hot.mma % 4 == 0 and artefact.lengths == [hot.length]
    assert loop_flops(hot) == hot.mma * 2 * 16 * 8 * 16


def test_equal_launches_have_one_key() -> None:
    first, second = _recorded(), _recorded()
    assert cross.key_of(first, ADA) == cross.key_of(second, ADA)
    other = Launch(
        first.kernel, first.grid, (*first.args[:3], 16), first.constants, first.warps, first.stages, first.cost
    )
    assert cross.key_of(first, ADA) != cross.key_of(other, ADA)


def test_innermost_loops() -> None:
    """A loop in a loop, a wait of three instructions, the jump to itself behind the end."""
    code = [(16 * i, "FADD", "R0, R0, R0") for i in range(60)]
    code[20] = (320, "BRA", "0x0a0")  # 10 … 20
    code[30] = (480, "BRA", "0x050")  # 5 … 30, around it
    code[40] = (640, "BRA.U", "0x260")  # 38 … 40, too short
    code[59] = (944, "BRA", "0x3b0")
    (loop,) = cross._innermost(code)
    assert (loop.first, loop.last, loop.length, loop.mma) == (160, 320, 11, 0)


@pytest.mark.parametrize(
    ("operation", "flops"),
    [
        ("HMMA.16816.F32.BF16", 2 * 16 * 8 * 16),
        ("HMMA.1688.F32.TF32", 2 * 16 * 8 * 8),
        ("QMMA.16832.F32.E4M3.E4M3", 2 * 16 * 8 * 32),
        ("QMMA.SF.16832.F32.E4M3.E4M3.E8", 2 * 16 * 8 * 32),
        ("OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X", 2 * 16 * 8 * 64),
        ("HGMMA.64x128x16.F32.BF16", 2 * 64 * 128 * 16 // 4),
        ("QGMMA.64x16x32.F32.E4M3.E4M3", 2 * 64 * 16 * 32 // 4),
    ],
)
def test_flops_of_a_warps_mma(operation: str, flops: int) -> None:
    assert flops_of(operation) == flops
