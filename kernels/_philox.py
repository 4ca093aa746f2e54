"""The sampler's random stream inside kernels: the words and variates of `dgemma_local.noise`, for any counter, in any order.

    key      seed mod 2^32, seed >> 32                                          ┐ on the device: one captured graph
    counter  group, canvas position, purpose · 2^16 + step, attempt · 2^24 + canvas   ┘ serves every canvas and step

Precision Words are bit-equal to `noise.philox`. An exponential variate is within 4 ulp of `noise.exponential`: 1.04 at worst
          over all 2^23 + 2^20 arguments that there are, torch's own 0.63.
Cost      15 integer instructions a word, 26 a variate. 1 − (⌊w/512⌋ + ½)·2^-23 is put together from the word's bits with one
          subtraction, exactly; its logarithm has no special cases to mind: 15 instructions where `tl.log` has 24.
Source    noise.py. `tl.philox` is given four uint32 counters: `tl.randint4x` would set two of them to zero, and `tl.rand`
          can return 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma_local.noise import LANES, WORD

from ._triton import tl, triton

LANE = tl.constexpr(LANES // 4)  # neighbouring ids that a word serves: 32


@dataclass(frozen=True, slots=True, eq=False)
class Key:
    """What a step's draws depend on beside position and purpose, where kernels can read it."""

    numbers: Tensor  # int32 [3], bit patterns: seed mod 2^32, seed >> 32, attempt · 2^24 + canvas
    step: Tensor  # int32 [1]: the denoising step, from 0

    @classmethod
    def of(cls, seed: int, attempt: int, canvas: int, step: Tensor) -> "Key":
        """The key of a canvas; `step` is the counter that the steps themselves raise."""
        return cls(key_numbers(seed, attempt, canvas).to(step.device), step)


def key_numbers(seed: int, attempt: int, canvas: int) -> Tensor:
    """int32 [3] on the CPU; to be copied into a key that a captured graph reads."""
    if not (0 <= seed < 1 << 64 and 0 <= attempt < 1 << 8 and 0 <= canvas < 1 << 24):
        raise ValueError(f"key: seed {seed}, attempt {attempt}, canvas {canvas}")
    numbers = torch.tensor([seed & WORD, seed >> 32, (attempt << 24) + canvas], dtype=torch.int64)
    return (numbers - ((numbers >> 31) << 32)).to(torch.int32)  # the same bits


@triton.jit
def words(key, step, purpose: tl.constexpr, position, group):
    """Four uint32 words for every pair of `position` and `group`, integers that broadcast; `key`, `step` point to a Key's."""
    low = tl.load(key).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(key + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    none = (position * 0 + group * 0).to(tl.uint32)  # the shape of all four counters
    c2 = none + (tl.load(step) + purpose * 65536).to(tl.uint32)
    c3 = none + tl.load(key + 2).to(tl.uint32, bitcast=True)
    return tl.philox((high << 32) | low, none + group.to(tl.uint32), none + position.to(tl.uint32), c2, c3)


@triton.jit
def uniform_token(word, vocab_size):
    """uint32 words -> int32 ids, uniform in 0 … vocab_size - 1."""
    return ((word.to(tl.uint64) * vocab_size) >> 32).to(tl.int32)


@triton.jit
def exponential(word):
    """uint32 words -> standard exponential variates, fp32, in (0, 24 ln 2]."""
    # 1 + (2^23 - 1 - ⌊w/512⌋)·2^-23 as bits, less 1 - 2^-24: exact
    common = -_log(((word >> 9) ^ 0x3FFFFFFF).to(tl.float32, bitcast=True) - 0.999999940395355224609375)
    # of w < 2^20 alone: 2^23 + w as bits, less 2^23 - ½
    small = ((word | 0x4B000000).to(tl.float32, bitcast=True) - 8388607.5) * 2.3283064365386963e-10
    rare = small * (1.0 + small * (0.5 + small * 0.3333333432674407958984375))
    return tl.where(word < 1048576, rare, common)


@triton.jit
def _log(x):
    """Natural logarithm of normal numbers below infinity, 1.04 ulp."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F2AAAAB) & -8388608  # so that what is left lies in [2/3, 4/3)
    f = (bits - exponent).to(tl.float32, bitcast=True) - 1.0
    r = -0.130310059 * f + 0.140869141  # N. Juffa's minimax polynomial of log(1 + f)
    r = r * f - 0.121483512
    r = r * f + 0.139814854
    r = r * f - 0.166846126
    r = r * f + 0.200120345
    r = r * f - 0.249996200
    r = r * f + 0.333331972
    r = r * f - 0.5
    r = r * (f * f) + f
    return exponent.to(tl.float32) * 8.26295832e-08 + r  # 2^-23 ln 2
