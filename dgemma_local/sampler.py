"""The entropy-bound sampler: a pure function from one canvas state to the next.

    z        softcapped logits / temperature                      temperature falls linearly from t_max towards t_min
    draft    argmax z                                             shown to people, and committed at the end
    H        entropy of softmax(z) a position, nats
    accepted the calmest positions whose calmer ones sum to ≤ entropy_bound
    next     a sample of softmax(z) where accepted, a uniform random token elsewhere: nothing is remembered
    rules    before all that, a few logits may be given (`Rules`)
    done     the draft equals the last `stability` drafts, and mean H < confidence; or the steps ran out

What is committed is the last draft, never the sampled canvas (transformers; Google's JAX code commits the sample).

Memory: of tensors as wide as the vocabulary a step holds one whole, the logits it was given, which it scales in place;
everything else is made by blocks of rows (`noise.row_blocks`).
Source: transformers 5.24 generation_diffusion_gemma.py; vectors in tests/golden.
"""

from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from dgemma_local.config import GenerationConfig
from dgemma_local.noise import Noise, joined, row_blocks


@dataclass(frozen=True, slots=True)
class Rules:
    """What a canvas is held to, whatever the model says: at every step its logits are changed so, and nothing else is.

    A pinned position has one token of probability 1: entropy 0, so always accepted. A banned token has probability 0.
    """

    pinned: tuple[tuple[int, int], ...] = ()  # positions, ascending, and the token of each
    banned: tuple[int, ...] = ()  # tokens
    below: int = 0  # they are banned at the first so many positions

    @property
    def positions(self) -> tuple[int, ...]:
        """The pinned ones."""
        return tuple(position for position, _ in self.pinned)

    def seat(self, canvas: Tensor) -> Tensor:
        """[L] int64 random tokens -> the first canvas, which is changed in place."""
        for position, token in self.pinned:
            canvas[position] = token
        return canvas

    def hold(self, logits: Tensor) -> None:
        """[L, V], changed in place. What is not a number stays so."""
        if self.banned:
            logits[: self.below, list(self.banned)] = -torch.inf
        for position, token in self.pinned:
            own = logits[position, token].clone()
            logits[position] = -torch.inf
            logits[position, token] = own


FREE = Rules()


@dataclass(frozen=True, slots=True)
class Canvas:
    """One canvas between two denoising steps; L positions, V vocabulary ids."""

    number: int  # within the answer, from 0
    step: int  # the step that comes next, from 0
    next: Tensor  # [L] int64, what that step reads; when done, what is committed
    rules: Rules = FREE
    fed: Tensor | None = None  # [L] int64, what the last step read
    history: tuple[Tensor, ...] = ()  # the last `stability` drafts, newest last
    logits: Tensor | None = None  # [L, V] fp32, last step's, temperature-scaled; None once `signal` stands for them
    signal: Tensor | None = None  # what the model conditions the next step on, made of those logits
    draft: Tensor | None = None  # [L] int64, argmax of them
    accepted: Tensor | None = None  # [L] bool
    entropy: Tensor | None = None  # [L] fp32, nats
    temperature: float = 0.0  # of the last step
    converged: bool = False  # stable and confident
    done: bool = False  # converged, or out of steps


CacheT = TypeVar("CacheT", contravariant=True)


class Denoiser(Protocol[CacheT]):
    """A model that shows its logits; L canvas, V vocabulary."""

    def denoise(self, canvas: Tensor, cache: CacheT, signal: Tensor | None) -> Tensor:
        """canvas [L] int64, last step's signal or None -> softcapped logits [L, V] fp32, the caller's to keep or change."""
        ...

    def signal(self, logits: Tensor) -> Tensor:
        """What the next step is conditioned on, made of a step's temperature-scaled logits [L, V]."""
        ...


def temperature(config: GenerationConfig, step: int) -> Tensor:
    """0-dim fp32. Computed in fp32 from the steps that are left, as the reference does; t_min is never reached."""
    left = torch.tensor(config.steps - step, dtype=torch.int32)
    return config.t_min + (config.t_max - config.t_min) * (left / config.steps)


def entropies(logits: Tensor) -> Tensor:
    """[L, V] fp32 -> [L] nats, of softmax(logits). -inf logits are safe: they have no part in the sum.

    In the centred one-pass form of the kernels: H = log Z - S / Z with Z = Σ e^c, S = Σ e^c c, c = z - max z.
    """
    centred = logits - logits.amax(-1, keepdim=True)
    weight = centred.exp()
    total = weight.sum(-1)
    return total.log() - weight.mul_(centred.clamp_min_(torch.finfo(logits.dtype).min)).sum(-1) / total


def accept(entropy: Tensor, bound: float) -> Tensor:
    """[L] fp32 -> [L] bool: calmest first, as long as those before sum to ≤ bound. One is always accepted."""
    ordered, index = entropy.sort(stable=True)  # equals by position, as the kernel has them
    before = ordered.cumsum(0)[:-1]  # of all but the first; not cumsum - own: in fp32 that is not monotone
    return torch.ones_like(index, dtype=torch.bool).scatter_(0, index[1:], before <= bound)


def begin(number: int, noise: Noise, rules: Rules = FREE) -> Canvas:
    """A canvas of random tokens, but for the pinned ones."""
    return Canvas(number=number, step=0, next=rules.seat(noise.canvas(number)), rules=rules)


@torch.inference_mode()
def advance(canvas: Canvas, logits: Tensor, config: GenerationConfig, noise: Noise) -> Canvas:
    """One denoising step: softcapped logits [L, V] fp32 -> the next state. Draws: one sample, one re-noise.

    The logits are used up: scaled in place, they become the state's.
    """
    t = temperature(config, canvas.step)
    canvas.rules.hold(logits)
    scaled = logits.div_(t.to(logits.device))
    blocks = [scaled[rows] for rows in row_blocks(*scaled.shape)]
    draft = joined([block.argmax(-1) for block in blocks])
    entropy = joined([entropies(block) for block in blocks])
    accepted = accept(entropy, config.entropy_bound)
    sampled = noise.sample(scaled, accepted, canvas.number, canvas.step)
    fresh = noise.renoise(canvas.number, canvas.step)
    k = config.stability
    stable = len(canvas.history) == k and all(torch.equal(draft, past) for past in canvas.history)
    converged = stable and bool(entropy.mean() < config.confidence)
    done = converged or canvas.step + 1 == config.steps
    return replace(
        canvas,
        step=canvas.step + 1,
        fed=canvas.next,
        next=draft if done else torch.where(accepted, sampled, fresh),
        history=(*canvas.history, draft)[-k:] if k else (),
        logits=scaled,
        signal=None,
        draft=draft,
        accepted=accepted,
        entropy=entropy,
        temperature=float(t),
        converged=converged,
        done=done,
    )


def step(model: Denoiser[CacheT], canvas: Canvas, cache: CacheT, config: GenerationConfig, noise: Noise) -> Canvas:
    """One denoising step of a model by its logits. They become the signal at once: no two steps' are alive together."""
    after = advance(canvas, model.denoise(canvas.next, cache, canvas.signal), config, noise)
    assert after.logits is not None
    return replace(after, logits=None, signal=None if after.done else model.signal(after.logits))
