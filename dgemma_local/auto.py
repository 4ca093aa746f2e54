"""What `auto` stands for on this machine.

    a card below 40 GB    NVFP4         from 40 GB on    FP8         --prefer quality    FP8 from 32 GB on
    no card, or not fetched yet: `run` answers with the demo model

No torch: a card is asked through nvidia-smi.
"""

from dgemma_local.card import cards
from dgemma_local.errors import UnknownModel
from dgemma_local.fit import Choice, choose
from dgemma_local.hub import folder_of
from dgemma_local.registry import table

DEMO = "demo"


def choice(*, quality: bool = False) -> Choice:
    """The published checkpoint for the first card, or for none, and why. Raises UnknownModel: the table has none."""
    found = choose(table().values(), cards(), "quality" if quality else None)
    if found is None:
        raise UnknownModel("no model in the table is stored in FP8 or NVFP4", "name one: `dgemma models` lists them")
    return found


def to_run(*, quality: bool = False) -> tuple[str, str]:
    """The model that `run` opens, and a line that says why, or nothing."""
    if not cards():
        return DEMO, ""  # whose own label says what it is
    found = choice(quality=quality)
    if folder_of(found.entry) is None:
        return DEMO, f"the demo model answers; `dgemma pull` fetches {found.entry.name} ({found.reason})"
    return found.entry.name, f"{found.entry.name} ({found.reason})"
