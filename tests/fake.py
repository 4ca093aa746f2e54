"""A block-diffusion model in a few lines, which sees exactly what its cache holds and remembers what it was asked."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dgemma_local import sampler
from dgemma_local.cache import Room
from dgemma_local.config import GenerationConfig
from dgemma_local.noise import Noise
from dgemma_local.sampler import FREE, Canvas, Rules

PAD, END, MARK = 0, 1, 2  # MARK ends a prompt: the answer is told from what follows the last one

GENERATION = GenerationConfig(
    steps=8, t_min=0.4, t_max=0.8, entropy_bound=0.1, confidence=0.005, stability=1, end_ids=(END,), pad_id=PAD
)


@dataclass
class FakeCache:
    """The committed tokens themselves."""

    tokens: list[int] = field(default_factory=list)
    croppable: bool = True
    epoch: int = 0

    @property
    def length(self) -> int:
        return len(self.tokens)

    def can_crop(self, length: int) -> bool:
        return self.croppable and length <= self.length

    def crop(self, length: int) -> None:
        assert self.can_crop(length)
        del self.tokens[length:]


@dataclass
class FakeModel:
    """Answers every prompt with `script`, padded. Unsure for `doubt` steps a canvas, then certain: doubt + 2 steps.

    `before` is called ahead of each denoising step with its number over all; what it raises, `denoise` raises.
    """

    script: Sequence[int]
    canvas_length: int = 4
    vocab_size: int = 32
    max_positions: int = 1000
    doubt: int = 0
    croppable: bool = True
    joins: int = 0
    mode: str = "fake"
    room: Room | None = None
    before: Callable[[int], None] = lambda _: None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    step: int = 0  # within the canvas
    encoded: list[list[int]] = field(default_factory=list)
    fed: list[tuple[list[int], Tensor | None]] = field(default_factory=list)  # canvas, signal

    def new_cache(self) -> FakeCache:
        return FakeCache(croppable=self.croppable)

    def encode(self, ids: Tensor, cache: FakeCache) -> None:
        self.encoded.append(ids.tolist())
        cache.tokens.extend(ids.tolist())

    def told(self, cache: FakeCache) -> list[int]:
        """The canvas that comes next."""
        since = cache.tokens[::-1].index(MARK)
        rest = [*self.script[since:], *[PAD] * self.canvas_length]
        return rest[: self.canvas_length]

    def denoising(
        self,
        ids: Sequence[int],
        number: int,
        cache: FakeCache,
        config: GenerationConfig,
        noise: Noise,
        rules: Rules = FREE,
    ) -> Iterator[Canvas]:
        if ids:
            self.encode(torch.tensor(ids), cache)
        canvas = sampler.begin(number, noise, rules)
        while not canvas.done:
            canvas = sampler.step(self, canvas, cache, config, noise)
            yield canvas

    def denoise(self, canvas: Tensor, cache: FakeCache, previous: Tensor | None) -> Tensor:
        self.before(len(self.fed))
        self.step = step = 0 if previous is None else self.step + 1
        self.fed.append((canvas.tolist(), previous))
        target = torch.tensor(self.told(cache))
        if step < self.doubt:
            target = 3 + (target + step) % (self.vocab_size - 3)  # other words at each step
        return torch.nn.functional.one_hot(target, self.vocab_size) * 30.0

    def signal(self, logits: Tensor) -> Tensor:
        return logits

    def first_bad_layer(self, canvas: Tensor, cache: FakeCache, previous: Tensor | None) -> str:
        return "layer 7"
