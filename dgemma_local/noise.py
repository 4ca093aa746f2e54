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

A row of the real vocabulary is 1 MiB of logits and 2 MiB of words, so whoever goes through a canvas of them does so in
blocks of rows (`row_blocks`): of tensors as wide as the vocabulary a step holds one whole, its logits, and blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
LANES = 128  # vocabulary ids that 32 counters serve: four words each
# nats below the best logit from which no id can win the race: log of the largest variate over the smallest, rounded up
FARTHEST = 25.7
AHEAD = 16  # denoising steps whose re-noise is drawn at once; a canvas of the real model takes about as many
# Steps whose exponentials are, where a step's are no more than these bytes of fp32: the demo's 48 KiB, no real model's.
FEW_AHEAD, FEW_BYTES = 4, 64 << 10
WORD = 0xFFFFFFFF
# Bytes of one block of vocabulary rows, as fp32: 32 rows of the real model, all 96 of the demo's. A step holds two or
# three blocks at a time beside its logits.
BLOCK_BYTES = 32 << 20
# The exponentials of a row take eight times its fp32 while they are drawn: counters, words and a round's products are
# int64. A block of a quarter as many rows then takes two blocks.
DRAWN = 4


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

    def again(self) -> "Noise":
        """Other draws, for one more attempt at a canvas."""
        ...


def row_blocks(rows: int, vocab_size: int, each: int = 1) -> list[slice]:
    """`rows` rows in runs of at most BLOCK_BYTES, where a row takes `each` times its fp32."""
    step = max(1, BLOCK_BYTES // (4 * vocab_size * each))
    return [slice(begin, min(begin + step, rows)) for begin in range(0, rows, step)]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """What was made block by block, as one; a single block is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def philox(counter: Tensor, key: tuple[int, int]) -> Tensor:
    """counter [4, ...] int64 holding uint32 values -> four words [4, ...], the same."""
    # A round's two multiplications go side by side: c0 and c2 in one tensor, c1 and c3 in the other. Each round leaves
    # both pairs in the opposite order, and the constants of the next one follow; ten rounds restore it.
    even, odd = counter[0::2], counter[1::2]
    for multiplier, xor in _constants(key, counter.dim(), counter.device):
        product = even * multiplier  # wraps in int64; its bits are the uint64 product's
        even = (product >> 32).bitwise_xor_(odd.flip(0)).bitwise_xor_(xor).bitwise_and_(WORD)
        odd = product  # of which the lower half counts: the upper one is masked with what it is mixed into
    return torch.stack([even, odd & WORD], 1).flatten(0, 1)


@lru_cache(maxsize=4)  # an answer has one key, and draws of two shapes
def _constants(key: tuple[int, int], dims: int, device: torch.device) -> tuple[tuple[Tensor, Tensor], ...]:
    """Multipliers and keys of each round, [2, ...] int64 of as many axes as the counters."""
    keys = [[(k + r * w) & WORD for k, w in zip(key, WEYL, strict=True)] for r in range(ROUNDS)]
    pairs = [(MULTIPLIERS[:: -1 if r % 2 else 1], pair[:: 1 if r % 2 else -1]) for r, pair in enumerate(keys)]
    rounds = torch.tensor(pairs, device=device).view(ROUNDS, 2, 2, *[1] * (dims - 1))
    return tuple((multiplier, xor) for multiplier, xor in rounds)


def exponential(word: Tensor) -> Tensor:
    """uint32 words in int64 -> standard exponential variates, fp32, in (0, 24 ln 2]."""
    uniform = (word >> 9).to(torch.float32).add_(0.5).mul_(2.0**-23)  # exact: 24 bits
    common = uniform.neg_().log1p_().neg_()
    rare = (word < 1 << 20).flatten().nonzero()[:, 0]  # one word in 4,096
    small = word.take(rare).to(torch.float32).add_(0.5).mul_(2.0**-32)
    return common.put_(rare, (small * (1.0 / 3.0)).add_(0.5).mul_(small).add_(1.0).mul_(small))


def exponential_race(logits: Tensor, variates: Tensor) -> Tensor:
    """logits, variates [..., V] -> [...] int64: a sample of softmax(logits); the lowest id wins a tie."""
    return ((logits - logits.amax(-1, keepdim=True)).exp() / variates).argmax(-1)


def _best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [P, V] -> the most likely ids [P], and whether another one could win the race, [P] bool."""
    best = logits.max(-1, keepdim=True)
    return best.indices[:, 0], (logits >= best.values - FARTHEST).sum(-1) > 1


@dataclass(frozen=True, slots=True)
class PhiloxNoise:
    """This project's stream."""

    seed: int
    length: int  # canvas positions
    vocab_size: int
    device: torch.device
    attempt: int = 0  # a retry of the same canvas raises it
    _drawn: dict[Purpose, tuple[tuple[int, int], Tensor]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed {self.seed} is not in 0 … 2^64 - 1")

    def again(self) -> "PhiloxNoise":
        return PhiloxNoise(self.seed, self.length, self.vocab_size, self.device, self.attempt + 1)

    def words(
        self, purpose: Purpose, canvas: int, steps: Tensor | int, positions: Tensor, groups: Tensor | int
    ) -> Tensor:
        """Words [4, ...] int64 of the counters that `steps`, `positions` and `groups` broadcast to."""
        c2 = steps + (purpose << 16)
        c3 = (self.attempt << 24) + canvas
        counter = torch.broadcast_tensors(
            *(torch.as_tensor(c, device=self.device) for c in (groups, positions, c2, c3))
        )
        return philox(torch.stack(counter), (self.seed & WORD, self.seed >> 32))

    def _uniform(self, purpose: Purpose, canvas: int, steps: Tensor | int) -> Tensor:
        word = self.words(purpose, canvas, steps, torch.arange(self.length, device=self.device), 0)[0]
        return (word * self.vocab_size) >> 32

    def canvas(self, canvas: int) -> Tensor:
        return self._uniform(Purpose.CANVAS, canvas, 0)

    def renoise(self, canvas: int, step: int) -> Tensor:
        return self._ahead(
            Purpose.RENOISE, canvas, step, AHEAD, lambda steps: self._uniform(Purpose.RENOISE, canvas, steps[:, None])
        )

    def _ahead(self, purpose: Purpose, canvas: int, step: int, many: int, draw: Callable[[Tensor], Tensor]) -> Tensor:
        """`many` steps are drawn at a time: the cost is in the number of operations, not in their size."""
        block, row = divmod(step, many)
        at, drawn = self._drawn.get(purpose, (None, None))
        if drawn is None or at != (canvas, block):
            drawn = draw(torch.arange(block * many, (block + 1) * many, device=self.device))
            self._drawn[purpose] = (canvas, block), drawn
        return drawn[row]

    def variates(self, canvas: int, steps: Tensor | int, positions: Tensor) -> Tensor:
        """positions [P] -> exponential variates [P, V] fp32; of steps [S, 1, 1] those of each, [S, P, V]."""
        blocks = -(-self.vocab_size // LANES)
        groups = torch.arange(32 * blocks, device=self.device)
        word = self.words(Purpose.SAMPLE, canvas, steps, positions[:, None], groups)
        # [4, ..., P, 32·blocks] -> [..., P, blocks, 4, 32]: vocabulary order
        word = word.unflatten(-1, (blocks, 32)).movedim(0, -2).flatten(-3)
        return exponential(word[..., : self.vocab_size])

    def sample(self, logits: Tensor, accepted: Tensor, canvas: int, step: int) -> Tensor:
        """Rows that are not accepted hold their most likely id, and so do those that no draw could change."""
        best = [_best(logits[rows]) for rows in row_blocks(len(logits), self.vocab_size)]
        ids, contested = (joined(parts) for parts in zip(*best, strict=True))
        positions = (accepted & contested).nonzero()[:, 0]
        for block in row_blocks(len(positions), self.vocab_size, DRAWN):
            ids[positions[block]] = self._race(logits, canvas, step, positions[block])
        return ids

    def _race(self, logits: Tensor, canvas: int, step: int, positions: Tensor) -> Tensor:
        if 4 * self.length * self.vocab_size > FEW_BYTES:
            variates = self.variates(canvas, step, positions)  # before those logits are copied
            return exponential_race(logits[positions], variates)
        every = torch.arange(self.length, device=self.device)
        variates = self._ahead(
            Purpose.SAMPLE, canvas, step, FEW_AHEAD, lambda steps: self.variates(canvas, steps[:, None, None], every)
        )
        return exponential_race(logits[positions], variates[positions])


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

    def again(self) -> "TorchNoise":
        return self  # its draws go on
