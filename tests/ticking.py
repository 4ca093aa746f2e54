"""A clock for tests."""

from collections.abc import Callable
from itertools import count


def ticking(step: float = 1.0) -> Callable[[], float]:
    """A clock on which `step` seconds pass from one look to the next."""
    ticks = count()
    return lambda: next(ticks) * step
