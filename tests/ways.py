"""Ways to generate: settings that stop early, late, inside a canvas, and geometries on which they are tried."""

from typing import Any, NamedTuple

from dgemma_local.config import GenerationConfig

DEFAULTS = GenerationConfig(
    steps=48,
    t_min=0.4,
    t_max=0.8,
    entropy_bound=0.1,
    confidence=0.005,
    stability=1,
    end_ids=(),
    pad_id=0,
)


class Kind(NamedTuple):
    """A way to generate: how sure the model is, and the sampler's settings."""

    confidence: float
    canvases: int
    settings: dict[str, Any]


STOPS = {"entropy_bound": 30.0, "confidence": 0.5, "steps": 12}
KINDS = {
    "many canvases": Kind(1.0, 4, {"steps": 5}),
    "one step": Kind(1.0, 3, {"steps": 1}),
    "loose bound": Kind(1.0, 3, {"steps": 6, "entropy_bound": 3.0}),
    "tight bound": Kind(1.0, 2, {"steps": 5, "entropy_bound": 1e-6}),
    "colder": Kind(1.0, 3, {"steps": 7, "t_min": 0.0, "t_max": 0.5}),
    "end tokens": Kind(1.0, 5, {"steps": 4, "end_ids": tuple(range(24, 30))}),
    "early stop": Kind(3.0, 3, STOPS),
    "early stop, stability 0": Kind(3.0, 3, STOPS | {"stability": 0, "entropy_bound": 3.0, "confidence": 0.3}),
    "early stop, stability 2": Kind(3.0, 3, STOPS | {"stability": 2}),
    "early stop, end tokens": Kind(3.0, 5, STOPS | {"end_ids": tuple(range(20, 26))}),
}
QUIET = ("plain", "window beyond the prompt", "window of two", "canvas of one", "one layer")
