"""Where a sampler's randomness comes from: a keyed counter with no state and no order of draws.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Every word is a function of

    key      (seed mod 2^32, seed >> 32)                               seed 0 … 2^64 - 1
    counter  c0 = group
             c1 = canvas position
             c2 = purpose · 2^16 + step      purpose 0 initial canvas, 1 sample, 2 re-noise; first step 0
             c3 = attempt · 2^24 + canvas    canvas number within this answer, attempt from 0

all uint32, so that a fused kernel and this module draw the same numbers, in any order, and may leave out what is not
needed. The turn of a conversation is no input.

    uniform token   group 0, word 0:  id = (w · V) >> 32
    sample noise    vocabulary id v:  group 32·(v // 128) + v % 32, word (v % 128) // 32
                    E = -log(1 - (⌊w/512⌋ + ½)·2^-23), and u(1 + u(½ + u/3)) with u = (w + ½)·2^-32 for w < 2^20
    sample          argmax of exp(z - max z) / E, lowest id on ties: the exponential race, the same as Gumbel-max

E is never 0 and never infinite. Words and uniform tokens are bit-equal everywhere, E within 4 ulp.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
LANES = 128  # vocabulary ids that 32 counters serve: four words each
WORD = 0xFFFFFFFF


class Purpose(IntEnum):
    """What a draw is for."""

    CANVAS = 0
    SAMPLE = 1
    RENOISE = 2


class Noise(Protocol):
    """A sampler's three draws; L canvas positions, V vocabulary ids."""

    def canvas(self, canvas: int) -> Tensor:
        """The first canvas, [L] int64, uniform over the vocabulary."""
        ...

    def sample(self, logits: Tensor, accepted: Tensor, canvas: int, step: int) -> Tensor:
        """[L] int64, drawn from softmax of [L, V] fp32 logits. Only rows where `accepted` [L] is True need be right."""
        ...

    def renoise(self, canvas: int, step: int) -> Tensor:
        """[L] int64, uniform over the vocabulary."""
        ...


def philox(counter: Tensor, key: tuple[int, int]) -> Tensor:
    """counter [4, ...] int64 holding uint32 values -> four words [4, ...], the same."""
    # The two multiplications of a round go side by side: even counters in one tensor, odd ones in the other.
    even, odd = counter[0::2], counter[1::2]
    lanes = (2, *[1] * (counter.dim() - 1))
    by = torch.tensor(MULTIPLIERS, device=counter.device).view(lanes)
    # key words in the order that each round xors them, [rounds, 2]
    keys = torch.tensor(
        [[(k + r * w) & WORD for k, w in zip(key, WEYL, strict=True)] for r in range(ROUNDS)], device=counter.device
    ).view(ROUNDS, *lanes)
    for r in range(ROUNDS):
        product = even * by  # wraps in int64; its bits are the uint64 product's
        high = (product >> 32) & WORD
        even, odd = high.flip(0) ^ odd ^ keys[r], (product & WORD).flip(0)
    return torch.stack([even, odd], 1).flatten(0, 1)


def exponential(word: Tensor) -> Tensor:
    """uint32 words in int64 -> standard exponential variates, fp32, in (0, 24 ln 2]."""
    uniform = ((word >> 9).to(torch.float32) + 0.5) * 2.0**-23  # exact: 24 bits
    common = -torch.log1p(-uniform)
    small = (word.to(torch.float32) + 0.5) * 2.0**-32
    rare = small * (1.0 + small * (0.5 + small * (1.0 / 3.0)))
    return torch.where(word < 1 << 20, rare, common)


def exponential_race(logits: Tensor, variates: Tensor) -> Tensor:
    """logits, variates [..., V] -> [...] int64: a sample of softmax(logits); the lowest id wins a tie."""
    return ((logits - logits.amax(-1, keepdim=True)).exp() / variates).argmax(-1)


@dataclass(frozen=True, slots=True)
class PhiloxNoise:
    """This project's stream."""

    seed: int
    length: int  # canvas positions
    vocab_size: int
    device: torch.device
    attempt: int = 0  # a retry of the same canvas raises it

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed {self.seed} is not in 0 … 2^64 - 1")

    def words(self, purpose: Purpose, canvas: int, step: int, positions: Tensor, groups: Tensor) -> Tensor:
        """positions [P], groups [G] -> words [4, P, G] int64."""
        counter = torch.empty(4, len(positions), len(groups), dtype=torch.int64, device=self.device)
        counter[0] = groups
        counter[1] = positions[:, None]
        counter[2] = (purpose << 16) + step
        counter[3] = (self.attempt << 24) + canvas
        return philox(counter, (self.seed & WORD, self.seed >> 32))

    def _uniform(self, purpose: Purpose, canvas: int, step: int) -> Tensor:
        positions = torch.arange(self.length, device=self.device)
        word = self.words(purpose, canvas, step, positions, torch.zeros(1, dtype=torch.int64, device=self.device))[0, :, 0]
        return (word * self.vocab_size) >> 32

    def canvas(self, canvas: int) -> Tensor:
        return self._uniform(Purpose.CANVAS, canvas, 0)

    def renoise(self, canvas: int, step: int) -> Tensor:
        return self._uniform(Purpose.RENOISE, canvas, step)

    def variates(self, canvas: int, step: int, positions: Tensor) -> Tensor:
        """positions [P] -> exponential variates [P, V] fp32."""
        blocks = -(-self.vocab_size // LANES)
        groups = torch.arange(32 * blocks, device=self.device)
        word = self.words(Purpose.SAMPLE, canvas, step, positions, groups)
        # [4, P, 32·blocks] -> [P, blocks, 4, 32]: vocabulary order
        by_id = word.unflatten(-1, (blocks, 32)).permute(1, 2, 0, 3).reshape(len(positions), -1)
        return exponential(by_id[:, : self.vocab_size])

    def sample(self, logits: Tensor, accepted: Tensor, canvas: int, step: int) -> Tensor:
        """Rows that are not accepted hold 0."""
        positions = accepted.nonzero()[:, 0]
        drawn = exponential_race(logits[positions], self.variates(canvas, step, positions))
        return torch.zeros_like(accepted, dtype=torch.int64).index_put((positions,), drawn)


class TorchNoise:
    """transformers' draws from torch's generator, in its order: for parity tests.

    Per canvas `randint`; per step `multinomial` over all rows, then `randint`. It has state: ask in that order.
    """

    def __init__(self, generator: torch.Generator, length: int, vocab_size: int) -> None:
        self.generator, self.length, self.vocab_size = generator, length, vocab_size

    def _uniform(self) -> Tensor:
        return torch.randint(0, self.vocab_size, (1, self.length), generator=self.generator)[0]

    def canvas(self, canvas: int) -> Tensor:
        return self._uniform()

    def sample(self, logits: Tensor, accepted: Tensor, canvas: int, step: int) -> Tensor:
        return torch.multinomial(logits.softmax(-1), 1, generator=self.generator)[:, 0]

    def renoise(self, canvas: int, step: int) -> Tensor:
        return self._uniform()
