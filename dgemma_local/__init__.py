"""dgemma: DiffusionGemma on one consumer GPU, every denoising step in view."""

from pathlib import Path as _Path

__version__ = "0.1.0"

# A wheel carries the kernels inside this package; a checkout keeps them beside it.
if not (_Path(__file__).parent / "kernels").is_dir():
    __path__.append(str(_Path(__file__).resolve().parent.parent))
