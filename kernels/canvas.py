"""The end of a denoising step: who is accepted, what the next step reads, and whether there is one.

    accepted    the calmest positions, (H, position) ascending, as long as those before them sum to ≤ bound
    next        the sample where accepted, a uniform random token elsewhere; when done, the draft
    converged   the draft equals the last k drafts, and mean H < confidence
    done        converged, or out of steps: the state is then left alone, so that steps launched ahead do no harm

Shapes     draft, sampled int64 [L], entropy fp32 [L]; the state (`State`) is read and written in place, and keeps draft
           and entropy of the last step beside it, for whoever reads a step behind its end
Precision  Entropies are summed in fp64 and the sums rounded to fp32, as torch's cumsum does on a CPU: the same positions
           are accepted, whatever the order of addition. mean H likewise.
Traffic    (8·k + 49)·L bytes: nothing; what counts is the latency of one launch.
Grid       One program of one warp: none waits for another, and no barrier is needed between reading and writing.
           64-bit keys, entropy above position, are sorted; the last accepted one is the threshold of all.
Source     dgemma_local.sampler.advance, its second half; transformers 5.24 generation_diffusion_gemma.py.
"""

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma_local.noise import WORD, Purpose, philox

from . import _philox
from ._launch import Cost, launch
from ._philox import Key
from ._triton import tl, triton

RENOISE = int(Purpose.RENOISE)
ALIGNED = 16  # bytes, of every view: what a vector load takes


@dataclass(frozen=True, slots=True, eq=False)
class Views:
    """One buffer by name: what the host writes to begin a canvas, and what it reads of a step, each one copy.

    begins    numbers, step, temperature, canvas, flags
    reports                               canvas, flags, accepted, draft, entropy
    """

    memory: Tensor  # uint8 [n]
    key: Key  # its `step` comes next, and is raised by `update`
    temperature: Tensor  # fp32 [1], of the step that comes next
    canvas: Tensor  # int64 [L], what that step reads; when done, what is committed
    flags: Tensor  # int32 [2]: converged, done
    accepted: Tensor  # bool [L], by the last step
    draft: Tensor  # int64 [L], of the last step
    entropy: Tensor  # fp32 [L], nats, of the last step
    begins: Tensor  # uint8, a slice of memory
    reports: Tensor  # uint8, a slice of memory

    @classmethod
    def over(cls, memory: Tensor, length: int) -> "Views":
        """Of a canvas of `length` in uint8 [n], n = `buffer_bytes(length)`, contiguous; ValueError elsewhere."""
        size = buffer_bytes(length)
        if (memory.shape, memory.dtype) != ((size,), torch.uint8) or not memory.is_contiguous():
            raise ValueError(f"canvas: {tuple(memory.shape)} {memory.dtype}, wanted uint8 [{size}], contiguous")
        if memory.storage_offset() % ALIGNED:
            raise ValueError(f"canvas: a buffer at byte {memory.storage_offset()}, no multiple of {ALIGNED}")
        at, end, views = {}, 0, {}
        for name, (dtype, count) in _fields(length).items():
            at[name] = end
            views[name] = memory[end : end + count * dtype.itemsize].view(dtype)
            end += _aligned(count * dtype.itemsize)
        key = Key(views.pop("numbers"), views.pop("step"))
        return cls(memory, key, **views, begins=memory[: at["accepted"]], reports=memory[at["canvas"] :])


def _fields(length: int) -> dict[str, tuple[torch.dtype, int]]:
    """Name, dtype and count of what lies in a buffer, in order."""
    return {
        "numbers": (torch.int32, 3),
        "step": (torch.int32, 1),
        "temperature": (torch.float32, 1),
        "canvas": (torch.int64, length),
        "flags": (torch.int32, 2),
        "accepted": (torch.bool, length),
        "draft": (torch.int64, length),
        "entropy": (torch.float32, length),
    }


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def buffer_bytes(length: int) -> int:
    """Of a canvas of `length` tokens."""
    return sum(_aligned(count * dtype.itemsize) for dtype, count in _fields(length).values())


@dataclass(frozen=True, slots=True, eq=False)
class State(Views):
    """One canvas between two denoising steps, on the device; k drafts of history, up to N steps."""

    temperatures: Tensor  # fp32 [N], of every step
    history: Tensor  # int64 [k, L], the last drafts; that of step s in row s mod k

    @classmethod
    def new(cls, length: int, stability: int, temperatures: Tensor) -> "State":
        """Room for a canvas of `length` on the device of `temperatures`; `begin` fills it."""
        device = temperatures.device
        views = Views.over(torch.zeros(buffer_bytes(length), dtype=torch.uint8, device=device), length)
        views.temperature.copy_(temperatures[:1])
        history = torch.zeros(stability, length, dtype=torch.int64, device=device)
        return cls(
            **{f.name: getattr(views, f.name) for f in fields(views)}, temperatures=temperatures, history=history
        )

    def begin(self, first: Tensor, numbers: Tensor) -> None:
        """A new canvas: its random tokens [L], and its key (`_philox.key_numbers`)."""
        self.canvas.copy_(first)
        self.key.numbers.copy_(numbers)
        self.key.step.zero_()
        self.flags.zero_()
        self.temperature.copy_(self.temperatures[:1])

    def views(self, buffer: Tensor) -> Views:
        """The same names over another buffer like `memory`, uint8 [n], on any device: where the host fills and reads."""
        return Views.over(buffer, len(self.canvas))


def update_twin(
    state: State, draft: Tensor, sampled: Tensor, entropy: Tensor, vocab_size: int, bound: float, confidence: float
) -> None:
    """draft, sampled int64 [L], entropy fp32 [L], nats: the state becomes that of the next step."""
    if state.flags[1]:
        return
    step, (k, L) = int(state.key.step), state.history.shape
    order = entropy.argsort(stable=True)
    before = F.pad(entropy[order].double().cumsum(0)[:-1], (1, 0)).float()
    accepted = torch.zeros_like(state.accepted).scatter(0, order, before <= bound)
    seed_low, seed_high, canvas = (state.key.numbers.long() & WORD).tolist()
    counter = torch.zeros(4, L, dtype=torch.int64, device=draft.device)
    counter[1] = torch.arange(L, device=draft.device)
    counter[2], counter[3] = (RENOISE << 16) + step, canvas
    fresh = (philox(counter, (seed_low, seed_high))[0] * vocab_size) >> 32
    stable = step >= k and bool((state.history == draft).all())
    converged = stable and bool(entropy.double().mean().float() < confidence)
    done = converged or step + 1 >= len(state.temperatures)
    if k:
        state.history[step % k] = draft
    state.draft.copy_(draft)
    state.entropy.copy_(entropy)
    state.accepted.copy_(accepted)
    state.canvas.copy_(draft if done else torch.where(accepted, sampled, fresh))
    state.flags.copy_(torch.tensor([converged, done]))
    state.key.step.add_(1)
    state.temperature.copy_(state.temperatures[min(step + 1, len(state.temperatures) - 1)])


@triton.jit
def _update(
    DRAFT, SAMPLED, ENTROPY, CANVAS, ACCEPTED, LAST_DRAFT, LAST_ENTROPY, HISTORY, FLAGS, KEY, STEP, TEMPERATURES, TEMPERATURE,
    vocab_size, steps, bound, confidence,
    PURPOSE: tl.constexpr, L: tl.constexpr, STABILITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(FLAGS + 1) != 0:
        return
    step = tl.load(STEP)
    place = tl.arange(0, BLOCK)
    live = place < L

    # H's bits, which have its order, above its position. NaN comes last; what rounding left below zero, and −0, come
    # first in whatever order: they are accepted all.
    entropy = tl.load(ENTROPY + place, live, other=0.0)
    bits = tl.where(entropy != entropy, 0x7FC00000, entropy.to(tl.int32, bitcast=True))
    key = (tl.where(live, bits, 0x7FFFFFFF).to(tl.int64) << 32) | place.to(tl.int64)
    ordered = tl.sort(key)
    calm = (ordered >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    sums = tl.cumsum(tl.where(live, calm, 0.0).to(tl.float64), 0)
    # the first has nothing before it; each whose sum is within the bound lets in the one behind it
    count = tl.sum(((sums.to(tl.float32) <= bound) & live).to(tl.int32), 0) + tl.where(bound >= 0.0, 1, 0)
    accepted = live & (key <= tl.max(tl.where(place < count, ordered, -1 << 63), 0))

    draft = tl.load(DRAFT + place, live, other=0)
    stable = step >= STABILITY
    for past in tl.static_range(STABILITY):
        before = tl.load(HISTORY + past * L + place, live, other=0)
        stable = stable & (tl.sum(((draft != before) & live).to(tl.int32), 0) == 0)
    if STABILITY > 0:
        tl.store(HISTORY + (step % STABILITY) * L + place, draft, live)
    mean = (tl.sum(tl.where(live, entropy, 0.0).to(tl.float64), 0) / L).to(tl.float32)
    converged = stable & (mean < confidence)
    done = converged | (step + 1 >= steps)

    word = _philox.words(KEY, STEP, PURPOSE, place, place * 0)[0]
    fresh = _philox.uniform_token(word, vocab_size).to(CANVAS.dtype.element_ty)
    sampled = tl.load(SAMPLED + place, live, other=0)
    tl.store(CANVAS + place, tl.where(done, draft, tl.where(accepted, sampled, fresh)), live)
    tl.store(ACCEPTED + place, accepted, live)
    tl.store(LAST_DRAFT + place, draft, live)
    tl.store(LAST_ENTROPY + place, entropy, live)
    tl.store(FLAGS, converged.to(tl.int32))
    tl.store(FLAGS + 1, done.to(tl.int32))
    tl.store(STEP, step + 1)
    tl.store(TEMPERATURE, tl.load(TEMPERATURES + tl.minimum(step + 1, steps - 1)))


def update(
    state: State, draft: Tensor, sampled: Tensor, entropy: Tensor, vocab_size: int, bound: float, confidence: float
) -> None:
    """draft, sampled int64 [L], entropy fp32 [L], nats: the state becomes that of the next step."""
    k, L = state.history.shape
    given = {"draft": draft, "sampled": sampled, "entropy": entropy, "canvas": state.canvas, "accepted": state.accepted}
    if not L or any(tuple(t.shape) != (L,) or not t.is_contiguous() for t in given.values()):
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in given.items())
        raise ValueError(f"update: history {(k, L)}, and {shapes}")
    launch(
        _update,
        (1,),
        *(draft, sampled, entropy, state.canvas, state.accepted, state.draft, state.entropy),
        *(state.history, state.flags),
        *(state.key.numbers, state.key.step, state.temperatures, state.temperature),
        *(vocab_size, len(state.temperatures), bound, confidence),
        cost=lambda: Cost(bytes_moved(L, k)),
        warps=1,
        PURPOSE=RENOISE,
        L=L,
        STABILITY=k,
        BLOCK=max(32, 1 << (L - 1).bit_length()),
    )


def bytes_moved(length: int, stability: int) -> int:
    """Drafts, samples and entropies in; canvas, marks, draft and entropy out; one draft into the history, and that."""
    return length * (8 + 8 + 4 + 8 + 1 + 8 + 4 + 8 * min(1, stability) + 8 * stability)
