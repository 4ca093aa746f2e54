"""What kernels and twins write into the caller's memory: the same bits as into their own, and nothing beside it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from dgemma_local.kernels import soft
from dgemma_local.kernels._philox import Key
from dgemma_local.kernels.attention import attention, attention_twin
from dgemma_local.kernels.embedding import embed, embed_twin
from dgemma_local.kernels.vocabulary import transpose_codes, vocabulary_step, vocabulary_step_twin
from torch import Tensor

from dgemma_local.quant import quantise_fp8

BF16 = torch.bfloat16
T, D, V, HEADS, BEFORE, BEHIND = 5, 48, 160, 3, 2, 4
Call = Callable[..., Tensor]


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def embedding(form: Any, **options: Any) -> Tensor:
    made: Tensor = form(torch.arange(T), rows(V, D), 7.0, rows(T, D, seed=1), 1e-6, True, **options)
    return made


def attending(form: Any, splits: int, **options: Any) -> Tensor:
    """A prompt whose first keys are behind it."""
    q, k, v = rows(T, HEADS, D // HEADS), rows(1, 40, D // HEADS, seed=1), rows(1, 40, D // HEADS, seed=2)
    kernel = {"splits": splits} if form is attention else {}
    made: Tensor = form(q, k, v, torch.tensor([0, 30, T, 1], dtype=torch.int32), None, **kernel, **options)
    return made


def stepping(form: Any, across: bool, reference: bool, **options: Any) -> Tensor:
    key = Key.of(3, 1, 2, torch.zeros(1, dtype=torch.int32))
    E = quantise_fp8(rows(V, D, seed=1)) if across else rows(V, D, seed=1)
    turned = transpose_codes(E) if across else None  # type: ignore[arg-type]
    step = form(rows(T, D), E, 30.0, torch.ones(1), 7.0, key, reference, across=turned, chunk=128, **options)
    assert isinstance(step.soft, Tensor)
    return step.soft


def calls() -> Iterator[tuple[str, Call]]:
    for form in (embed, embed_twin):
        yield form.__name__, lambda form=form, **o: embedding(form, **o)
    for attend, splits in ((attention, 1), (attention, 3), (attention_twin, 1)):
        yield (
            f"{attend.__name__}, splits {splits}",
            lambda form=attend, splits=splits, **o: attending(form, splits, **o),
        )
    for step in (vocabulary_step, vocabulary_step_twin):
        for across in (False, True):
            for reference in (True, False):
                name = f"{step.__name__}, {'across' if across else 'plain'}, {'reference' if reference else 'fast'}"
                yield name, lambda form=step, a=across, r=reference, **o: stepping(form, a, r, **o)


CALLS = dict(calls())


@pytest.mark.parametrize("name", CALLS)
def test_a_slice_of_the_callers(name: str) -> None:
    call = CALLS[name]
    whole = torch.full((BEFORE + T + BEHIND, D), -7.0, dtype=BF16)
    out = whole[BEFORE : BEFORE + T]
    made = call(out=out)
    assert made.data_ptr() == out.data_ptr() and made.shape == out.shape
    assert torch.equal(out, call()) and not out.isnan().any()
    assert (whole[:BEFORE] == -7).all() and (whole[BEFORE + T :] == -7).all()


UNFIT = {
    "shape": torch.zeros(T + 1, D, dtype=BF16),
    "axes": torch.zeros(T * D, dtype=BF16),
    "dtype": torch.zeros(T, D),
    "strides": torch.zeros(T, 2 * D, dtype=BF16)[:, ::2],
    "device": torch.zeros(T, D, dtype=BF16, device="meta"),
}


@pytest.mark.parametrize("what", UNFIT)
@pytest.mark.parametrize("name", CALLS)
def test_what_does_not_fit_is_refused(name: str, what: str) -> None:
    kernel = name.split(",")[0].removesuffix("_twin")
    with pytest.raises(
        ValueError, match=rf"^{kernel}: out \(.*, wanted \({T}, {D}\) torch.bfloat16 on cpu, contiguous$"
    ):
        CALLS[name](out=UNFIT[what])


def test_a_step_without_its_soft_embedding_writes_none() -> None:
    with pytest.raises(ValueError, match="soft False"):
        stepping(vocabulary_step, False, True, soft=False, out=torch.zeros(T, D, dtype=BF16))


def test_the_last_kernel_of_a_step_refuses_as_well() -> None:
    with pytest.raises(ValueError, match=r"^combine: out \(2, 3\)"):
        soft.combine(torch.zeros(1, 3, 2), torch.ones(3), 1.0, BF16, True, out=torch.zeros(2, 3, dtype=BF16))
