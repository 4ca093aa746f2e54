"""What a kernel would read across its strides is refused, by name."""

from collections.abc import Callable

import pytest
import torch
from dgemma_local.kernels import attention, embedding, experts, norms, router, vocabulary
from dgemma_local.kernels._philox import Key
from torch import Tensor

from dgemma_local.quant import Fp8


def strided(*shape: int) -> Tensor:
    """Every second number of a row."""
    return torch.ones(*shape[:-1], 2 * shape[-1])[..., ::2]


ROUTING = router.Routing(torch.ones(4, 2), torch.zeros(4, 2).int(), torch.arange(8).int(), torch.tensor([8, 8]).int())
KEY = Key(torch.zeros(3).int(), torch.zeros(1).int())
SLAB, SPAN = torch.ones(1, 8, 16), torch.tensor([0, 0, 4, 0]).int()
CASES: dict[str, Callable[[], object]] = {
    "route: proj": lambda: router.route(torch.ones(4, 16), torch.ones(16), strided(8, 16), torch.ones(8), 2, 1e-6),
    "experts: gate_up": lambda: experts.experts(torch.ones(4, 32), ROUTING, strided(2, 32, 32), torch.ones(2, 32, 16)),
    "embed: ids": lambda: embedding.embed(torch.arange(8)[::2], torch.ones(9, 16), 1.0),
    "combine: pair": lambda: norms.combine(
        torch.ones(4, 16), norms.Pairs(torch.ones(8, 16), strided(4, 2)), torch.ones(4, 16),
        *[torch.ones(16)] * 3, torch.ones(1), 1e-6,
    ),
    "vocabulary_step: hidden": lambda: vocabulary.vocabulary_step(
        strided(4, 16), torch.ones(128, 16), 30.0, torch.ones(1), 1.0, KEY
    ),
    "vocabulary_step: E_scale": lambda: vocabulary.vocabulary_step(
        torch.ones(4, 16), Fp8(torch.ones(128, 16).to(torch.float8_e4m3fn), torch.ones(128, 2)[:, :1]), 30.0,
        torch.ones(1), 1.0, KEY,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} \(.*\), strides \(.*\), wanted contiguous$"):
        CASES[name]()


@pytest.mark.parametrize(
    ("window", "splits", "says"), [(0, None, "window 0"), (-3, None, "window -3"), (None, -1, "splits -1")]
)
def test_attention_refuses_what_means_nothing(window: int | None, splits: int | None, says: str) -> None:
    with pytest.raises(ValueError, match=f"^attention: .*{says}"):
        attention.attention(torch.ones(4, 2, 16), SLAB, SLAB, SPAN, window, splits=splits)


def test_fewer_weights_than_rows_are_refused() -> None:
    one = torch.ones(16)
    pairs = norms.Pairs(torch.ones(8, 16), torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"weights of pairs \(3, 2\)"):
        norms.combine(torch.ones(4, 16), pairs, torch.ones(4, 16), one, one, one, torch.ones(1), 1e-6)
