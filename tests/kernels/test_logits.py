"""The head's product against its twin: any run of ids, any width, any format; and the peaks on the way."""

import pytest
import torch
from dgemma_local.kernels._launch import ADA, BLACKWELL, HOPPER, Tile, gpu_of, recording
from dgemma_local.kernels.logits import Rows, logits, logits_twin
from near import assert_near, assert_no_worse
from torch import Tensor

from dgemma_local.quant import E4M3_MAX, Fp8, quantise_fp8

SMALL = Tile(16, 32, 32, 4, 2)


def rows(T: int, D: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(T, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fp8_rows(x: Tensor) -> Fp8:
    scale = x.float().abs().amax(-1, keepdim=True) / E4M3_MAX
    return Fp8((x.float() / scale).to(torch.float8_e4m3fn), scale)


def run(
    hidden: Rows, E: Rows, begin: int, end: int, dtype: torch.dtype, resident: bool, tile: Tile | None = SMALL
) -> tuple[Tensor, Tensor]:
    block = tile.n if tile else 128
    out = torch.empty(hidden.shape[0], end - begin + 3, dtype=dtype)
    peaks = torch.empty(hidden.shape[0], -(-(end - begin) // block) + 1)
    logits(hidden, E, out, peaks, begin, end, resident, tile)
    assert out[:, end - begin :].isnan().all()  # nothing past the end is touched
    assert peaks[:, -1].isnan().all()
    return out[:, : end - begin], peaks[:, :-1]


@pytest.mark.parametrize(
    ("T", "V", "D", "begin", "end"), [(1, 5, 16, 0, 5), (17, 200, 80, 32, 199), (40, 96, 33, 0, 96)]
)
@pytest.mark.parametrize("kind", ["plain", "widened", "fp8"])
def test_near_its_twin(T: int, V: int, D: int, begin: int, end: int, kind: str) -> None:
    hidden: Rows = rows(T, D, torch.bfloat16, 1)
    E: Rows = rows(V, D, torch.bfloat16, 2)
    if kind != "plain":
        E = quantise_fp8(E)
    if kind == "fp8":
        hidden = fp8_rows(hidden)
    for dtype, steps, equal in ((torch.bfloat16, 2, 0.99), (torch.float32, 64, 0.0)):
        ours, peaks = run(hidden, E, begin, end, dtype, resident=dtype == torch.float32)
        twin = logits_twin(hidden, E, dtype)[:, begin:end]
        assert_near(ours, twin, steps, equal)  # fp32: sums of 80 products in another order
        blocks = [part.float().amax(-1) for part in ours.split(SMALL.n, -1)]
        assert torch.equal(peaks, torch.stack(blocks, -1))
    truth = logits_twin(_wide(hidden), _wide(E), torch.float64)[:, begin:end]
    ours, _ = run(hidden, E, begin, end, torch.float32, resident=True)
    assert_no_worse(ours, logits_twin(hidden, E, torch.bfloat16)[:, begin:end].float(), truth)


def _wide(x: Rows) -> Rows:
    return x if isinstance(x, Fp8) else x.double()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype: torch.dtype) -> None:
    hidden, E = rows(9, 48, dtype, 3), rows(70, 48, dtype, 4)
    ours, _ = run(hidden, E, 0, 70, dtype, resident=False)
    assert_near(ours, logits_twin(hidden, E, dtype), *((2, 0.99) if dtype == torch.float16 else (64, 0.0)))
    packed = quantise_fp8(E.float())
    ours, _ = run(hidden, packed, 0, 70, dtype, resident=False)
    assert_near(ours, logits_twin(hidden, packed, dtype), *((2, 0.99) if dtype == torch.float16 else (64, 0.0)))


def test_unit_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """As sm_120 multiplies FP8: the same sums."""
    hidden, E = fp8_rows(rows(17, 80, torch.bfloat16, 7)), quantise_fp8(rows(70, 80, torch.bfloat16, 8))
    monkeypatch.setattr("dgemma_local.kernels.logits.gpu_of", lambda _: BLACKWELL)
    ours, _ = run(hidden, E, 0, 70, torch.bfloat16, resident=False)
    assert_near(ours, logits_twin(hidden, E, torch.bfloat16))
    meta = {"device": "meta"}
    for gpu in (ADA, HOPPER, BLACKWELL):
        with recording(gpu) as launches:
            monkeypatch.setattr("dgemma_local.kernels.logits.gpu_of", gpu_of)
            for x in (Fp8.empty((8, 64), torch.float32, **meta), torch.empty(8, 64, dtype=torch.bfloat16, **meta)):
                out, peaks = torch.empty(8, 300, dtype=torch.bfloat16, **meta), torch.empty(8, 3, **meta)
                logits(x, Fp8.empty((300, 64), **meta), out, peaks, 0, 300)
        assert [x.constants["UNIT_SCALES"] for x in launches] == [gpu == BLACKWELL, False]


def test_the_cards_own_tile() -> None:
    hidden, E = rows(3, 64, torch.bfloat16, 5), rows(300, 64, torch.bfloat16, 6)
    ours, peaks = run(hidden, E, 0, 300, torch.bfloat16, resident=False, tile=None)
    assert_near(ours, logits_twin(hidden, E, torch.bfloat16))
    assert torch.equal(peaks[:, -1], ours[:, 256:].float().amax(-1))


def test_negative_peaks() -> None:
    """What pads a tile must not be a maximum: all logits are negative."""
    hidden, E = torch.ones(2, 16, dtype=torch.bfloat16), -torch.ones(33, 16, dtype=torch.bfloat16)
    _, peaks = run(hidden, E, 0, 33, torch.bfloat16, resident=False)
    assert torch.equal(peaks, torch.full((2, 2), -16.0))


def test_errors() -> None:
    hidden, E = rows(4, 32, torch.bfloat16, 0), rows(64, 32, torch.bfloat16, 0)
    out, peaks = torch.empty(4, 64, dtype=torch.bfloat16), torch.empty(4, 2)
    for bad in (
        lambda: logits(hidden, E, out, peaks, 0, 65, tile=SMALL),
        lambda: logits(hidden, E, out[:, :63], peaks, 0, 64, tile=SMALL),
        lambda: logits(hidden, E, out[:3], peaks, 0, 64, tile=SMALL),
        lambda: logits(hidden, E, out, peaks[:, :1], 0, 64, tile=SMALL),
        lambda: logits(hidden, E, out, peaks, 5, 5, tile=SMALL),
        lambda: logits(hidden, E[:, :31].contiguous(), out, peaks, 0, 64, tile=SMALL),
        lambda: logits(fp8_rows(hidden), E, out, peaks, 0, 64, tile=SMALL),
    ):
        with pytest.raises(ValueError, match="logits: hidden"):
            bad()
