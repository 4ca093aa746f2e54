"""Named settings of the sampler: how long a canvas may take, how much a step accepts, and when it is believed.

`balanced` is what the checkpoint says. The other two were chosen on the demo models, whose checkpoints say the same as
the 26B one (48 steps, 0.1 nats, 0.005 nats, 1 draft): `python tests/compare_presets.py` measures them. There, `fast`
halves the steps of hard questions for two wrong answers in a hundred; `quality` doubles them, and gains no more than
chance would. Thinking is not among the settings: without it a model answers more often with nothing at all.
"""

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum

from dgemma_local.config import GenerationConfig


class Preset(StrEnum):
    """A name for settings of the sampler."""

    fast = "fast"
    balanced = "balanced"
    quality = "quality"


SETTINGS: Mapping[str, Mapping[str, int | float]] = {
    Preset.fast: {"steps": 16, "entropy_bound": 0.1, "confidence": 0.02, "stability": 1},
    Preset.balanced: {},
    Preset.quality: {"steps": 96, "entropy_bound": 0.05, "confidence": 0.002, "stability": 2},
}


def applied(config: GenerationConfig, preset: str | None) -> GenerationConfig:
    """A checkpoint's settings with those of the preset in their place; None: as they are."""
    return config if preset is None else replace(config, **SETTINGS[preset])  # type: ignore[arg-type]
