"""The embedding kernel against its twin, and the twin against the reference's roundings."""

import pytest
import torch
from dgemma_local.kernels._launch import ADA, recording
from dgemma_local.kernels.embedding import embed, embed_twin
from near import assert_near, assert_no_worse
from torch import Tensor

from dgemma_local.quant import Fp8, quantise_fp8, quantise_nvfp4

EPS = 1e-6
V = 50
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size


def scale_of(width: int, dtype: torch.dtype) -> float:
    return float(torch.tensor(width**0.5, dtype=dtype))


def every_way(ids: Tensor, table: Tensor | Fp8, soft: Tensor, dtype: torch.dtype) -> list[tuple]:  # type: ignore[type-arg]
    scale = scale_of(soft.shape[-1], dtype)
    return [(ids, table, scale, s, EPS, normed, dtype) for s in (None, soft) for normed in (False, True)]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_the_twin_rounds_where_the_reference_does(dtype: torch.dtype) -> None:
    table, soft = random(V, 96).to(dtype), random(2, 5, 96, seed=1).to(dtype)
    ids = torch.tensor([[0, 49, 3, 3, 7], [1, 2, 3, 4, 5]])
    scale = torch.tensor(96**0.5, dtype=dtype)
    e = table[ids] * scale
    assert torch.equal(embed_twin(ids, table, float(scale)), e)
    both = e + soft
    wide = both.to(torch.promote_types(dtype, torch.float32))
    normed = (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + EPS)).to(dtype)
    assert torch.equal(embed_twin(ids, table, float(scale), soft, EPS, self_conditioned=True), normed)
    assert torch.equal(embed_twin(ids, table, float(scale), soft, EPS), both)


def test_the_twin_carries_gradients_and_reads_every_layout() -> None:
    table, soft = random(9, 32).double().requires_grad_(), random(3, 32, seed=1).double().requires_grad_()
    ids = torch.tensor([8, 0, 8])
    assert torch.autograd.gradcheck(lambda t, s: embed_twin(ids, t, 5.5, s, EPS, True), (table, soft))
    for pack in (quantise_fp8, quantise_nvfp4):
        packed = pack(table.detach().float())
        rows = packed.decode(torch.float16)[ids]
        assert torch.equal(embed_twin(ids, packed, 2.0, dtype=torch.float16), rows * 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "width"), [(1, 2816), (5, 64), (3, 100)])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_plain_table(count: int, width: int, dtype: torch.dtype, kind: torch.dtype) -> None:
    table, soft = random(V, width).to(dtype), random(count, width, seed=1, size=9).to(dtype)
    ids = torch.tensor([V - 1, 0, 17, 17, 3][:count], dtype=kind)
    for arguments in every_way(ids, table, soft, dtype):
        ours, twin = embed(*arguments), embed_twin(*arguments)
        if not arguments[5]:
            assert torch.equal(ours, twin)  # no sum: every bit
        elif dtype == torch.float32:
            assert_near(ours, twin, steps=4, equal=0)  # the order of the norm's sum
        else:
            truth = embed_twin(
                ids,
                table.double(),
                *arguments[2:3],
                *(t if t is None else t.double() for t in arguments[3:4]),
                EPS,
                True,
            )
            assert_near(ours, twin)
            assert_no_worse(ours, twin, truth)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_fp8_table(dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    table = quantise_fp8(random(V, 100, size=0.02).to(scale_dtype))
    soft, ids = random(4, 100, seed=1).to(dtype), torch.tensor([0, V - 1, 5, 5])
    for arguments in every_way(ids, table, soft, dtype):
        ours, twin = embed(*arguments), embed_twin(*arguments)
        if arguments[5]:
            assert_near(ours, twin, **({"steps": 4, "equal": 0} if dtype == torch.float32 else {}))
        else:
            assert torch.equal(ours, twin)


def test_every_code_of_an_fp8_table() -> None:
    """But NaN's two: 254 codes under one scale, the sign of zero included."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(2, 127)
    table = Fp8(codes.view(torch.float8_e4m3fn), torch.tensor([[2.0**-7], [3.0]]))
    for dtype in DTYPES:
        ours = embed(torch.tensor([1, 0]), table, 1.0, dtype=dtype)
        want = embed_twin(torch.tensor([1, 0]), table, 1.0, dtype=dtype)
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(ours.view(bits), want.view(bits))


def test_a_canvas_without_a_signal_is_normed_all_the_same() -> None:
    """Step 0: the post norm stays though the MLP adds nothing; an encoder pass has neither."""
    table = random(V, 64).bfloat16()
    ids = torch.arange(V)
    assert torch.equal(embed(ids, table, 8.0), table * 8)
    rms = embed(ids, table, 8.0, None, EPS, self_conditioned=True).float().square().mean(-1).sqrt()
    assert (rms - 1).abs().max() < 2e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros_and_huge_rows(dtype: torch.dtype) -> None:
    table = torch.zeros(3, 100, dtype=dtype)
    table[1] = torch.finfo(dtype).max / 4
    table[2, 5] = torch.finfo(dtype).max / 4
    ids, equal = torch.tensor([0, 1, 2]), 0.0 if dtype == torch.float32 else 0.99
    for scale in (1.0, 8.0):  # the second overflows
        assert torch.equal(embed(ids, table, scale), embed_twin(ids, table, scale))
        ours = embed(ids, table, scale, None, EPS, self_conditioned=True)
        assert_near(ours, embed_twin(ids, table, scale, None, EPS, self_conditioned=True), equal=equal)


def test_an_id_outside_the_vocabulary_reads_nothing_and_shows() -> None:
    table = random(V, 64).bfloat16()
    for normed in (False, True):
        for packed in (table, quantise_fp8(table)):
            got = embed(torch.tensor([3, V, -1, 2**31 - 1, 4]), packed, 8.0, None, EPS, normed)
            assert got[[1, 2, 3]].isnan().all() and got[[0, 4]].isfinite().all()


def test_errors_name_the_shapes() -> None:
    table = torch.ones(V, 8)
    with pytest.raises(ValueError, match=r"embed: ids \(1, 2\), table \(50, 8\)"):
        embed(torch.tensor([[1, 2]]), table, 1.0)
    with pytest.raises(ValueError, match=r"embed: ids \(2,\), table \(8, 50\), strides \(1, 8\)"):
        embed(torch.tensor([1, 2]), table.T, 1.0)
    with pytest.raises(ValueError, match=r"embed: ids \(2,\), soft \(3, 8\)"):
        embed(torch.tensor([1, 2]), table, 1.0, torch.ones(3, 8))


def test_it_records_on_meta_tensors_and_knows_its_bytes() -> None:
    ids = torch.empty(256, dtype=torch.int64, device="meta")
    table = torch.empty(262144, 2816, dtype=torch.bfloat16, device="meta")
    soft = torch.empty(256, 2816, dtype=torch.bfloat16, device="meta")
    with recording(ADA) as launches:
        embed(ids, table, 53.0)
        embed(ids, Fp8.empty(table.shape, device="meta"), 53.0, soft, EPS, True)
    assert [launch.cost.bytes for launch in launches] == [256 * (2 * 5632 + 8), 256 * (2816 + 2 * 5632 + 8 + 2)]
