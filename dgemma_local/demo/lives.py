"""Canvases that live between training steps: real sampler trajectories, one denoising step longer each time they are drawn.

A model that only sees noised answers never meets its own mistakes; one that unrolls the sampler inside a training step
pays for passes it does not learn from. Here the training pass is the sampler's step: its logits, detached, give the next
canvas and the next self-conditioning, and wait in a pool until the canvas is drawn again, as in deep supervision
(Wang et al. 2025, "Hierarchical Reasoning Model", arXiv:2506.21734). A solved canvas leaves; a hard one stays for up to
`LIFE` steps. Half of a batch is new, or the easy ones, which leave at once, would be forgotten.
"""

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma_local.demo.render import Renderer
from dgemma_local.demo.tasks import Example

ENTROPY_BOUND, T_MIN, T_MAX, MAX_STEPS = 0.1, 0.4, 0.8, 48  # the sampler's, as in generation_config.json
LIFE = 16  # denoising steps at most; a run of the trained model takes 3 to 40
POOL = 4  # batches that wait in a group's pool at most


@dataclass(frozen=True, slots=True)
class Life:
    """One canvas between two denoising steps."""

    committed: list[int]  # the prompt, and the canvases before this one
    answer: Tensor  # [L] int64
    canvas: Tensor  # [L] int64
    scaled: Tensor  # [L, V] fp32, the last step's logits / temperature; zeros before the first
    age: int = 0  # denoising steps so far
    right: int = 0  # of them, how many in a row left a draft that is the answer


@dataclass
class Lives:
    """The pools, by group of tasks."""

    held: dict[str, list[Life]]

    def draw(self, group: str, count: int, fresh: Callable[[], list[Life]]) -> list[Life]:
        """New canvases, every second one replaced by one that waited longest. Changes nothing."""
        lives = fresh()[:count]
        for i, life in enumerate(self.held.get(group, [])[: count // 2]):
            lives[2 * i + 1] = life
        return lives

    def put(self, group: str, before: list[Life], after: list[Life]) -> None:
        """`before`, as drawn, have become `after`: those with something left to learn wait again."""
        waiting = self.held.get(group, [])
        drawn = {id(life) for life in before}
        kept = [life for life in after if life.age < LIFE and life.right < 2]
        rest = [life for life in waiting if id(life) not in drawn]
        self.held[group] = (rest + kept)[: POOL * len(before)]

    def state_dict(self) -> dict[str, list[dict[str, object]]]:
        return {group: [asdict(life) for life in lives] for group, lives in self.held.items()}

    def load_state_dict(self, state: dict[str, list[dict[str, object]]]) -> None:
        self.held = {group: [Life(**life) for life in lives] for group, lives in state.items()}  # type: ignore[arg-type]


def born(render: Renderer, examples: list[Example], rng: random.Random, vocab_size: int) -> list[Life]:
    """A random canvas for each example; of an answer of several canvases, any one of them."""
    draw = torch.Generator().manual_seed(rng.getrandbits(63))
    lives = []
    for example in examples:
        committed, answer = render.cut(example, rng)
        canvas = torch.randint(vocab_size, (len(answer),), generator=draw)
        lives.append(Life(committed, torch.tensor(answer), canvas, torch.zeros(len(answer), vocab_size)))
    return lives


def sampler_step(logits: Tensor, temperature: Tensor | float, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Batched form of `sampler.advance`: softcapped logits [B, L, V] -> next canvas [B, L], scaled logits."""
    z = logits / temperature
    log_p = z.log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(-1)
    ordered, index = entropy.sort(-1)
    before = F.pad(ordered.cumsum(-1)[:, :-1], (1, 0))
    accepted = torch.zeros_like(before, dtype=torch.bool).scatter(-1, index, before <= ENTROPY_BOUND)
    noise = torch.empty_like(p).exponential_(generator=draw)
    fresh = torch.randint(logits.shape[-1], accepted.shape, generator=draw)
    return torch.where(accepted, (p / noise).argmax(-1), fresh), z


@torch.no_grad()
def lived(lives: list[Life], logits: Tensor, draw: torch.Generator) -> list[Life]:
    """What one denoising step makes of them: softcapped logits [B, L, V], the temperature that of each one's age."""
    ages = torch.tensor([life.age for life in lives])
    temperature = T_MIN + (T_MAX - T_MIN) * (MAX_STEPS - ages) / MAX_STEPS
    canvas, scaled = sampler_step(logits, temperature[:, None, None], draw)
    draft = logits.argmax(-1)
    return [
        replace(
            life,
            canvas=canvas[i],
            scaled=scaled[i].clone(),
            age=life.age + 1,
            right=life.right + 1 if torch.equal(draft[i], life.answer) else 0,
        )
        for i, life in enumerate(lives)
    ]
