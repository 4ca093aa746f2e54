"""What `auto` stands for on this machine.

    a card below 40 GB    NVFP4         from 40 GB on    FP8         --prefer quality    FP8 from 32 GB on
    no card, or not fetched yet: `run` answers with the demo model

No torch: a card is asked through nvidia-smi.
"""

from dgemma_local.card import cards
from dgemma_local.fit import Choice, choose
from dgemma_local.hub import folder_of
from dgemma_local.registry import table

DEMO = "demo"
PUBLISHED = ("26b-a4b-nvfp4", "26b-a4b-fp8")


def choice(*, quality: bool = False) -> Choice:
    """The published checkpoint for the first card, or for none, and why. A user's own are taken by their names alone."""
    known = table()
    found = choose([known[name] for name in PUBLISHED], cards(), "quality" if quality else None)
    assert found is not None  # both formats are there
    return found


def to_run(*, quality: bool = False) -> tuple[str, str]:
    """The model that `run` opens, and a line that says why, or nothing."""
    if not cards():
        return DEMO, ""  # whose own label says what it is
    found = choice(quality=quality)
    if folder_of(found.entry) is None:
        return DEMO, f"the demo model answers; `dgemma pull` fetches {found.entry.name} ({found.reason})"
    return found.entry.name, f"{found.entry.name} ({found.reason})"
