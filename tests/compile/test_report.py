"""kernels/README.md against what is stored, and what is stored against what the compilers make today."""

import json
import math
from typing import Any

import pytest
import steps
import torch
from compile.configurations import CONFIGURATIONS, recorded
from cross import CARDS, key_of
from dgemma_local.kernels._launch import recording
from floor import PADDING, floor
from kernel_page import README, render
from kernel_report import _items, passes, summary
from predicted import CARDS_AT_BEST, CHECKPOINTS, ROTARY_TABLES, STORED, first_of, milliseconds, step_of, wanted
from torch.utils._python_dispatch import TorchDispatchMode

SLACK = 0.03  # of instructions and times, as of the bounds


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(STORED.read_text())
    return found


def test_readme_says_what_is_stored(stored: dict[str, Any]) -> None:
    assert README.read_text() == render(stored), "python tests/kernel_report.py --render"


def test_predicted_times_have_a_floor(stored: dict[str, Any]) -> None:
    """A sum of launches cannot be quicker than everything at once."""
    for checkpoint, light, card in wanted():
        name = steps.name(checkpoint, light)
        assert milliseconds(stored, card, name) > stored["floors"][card][name] > 1


def test_names_are_those_of_the_launches(stored: dict[str, Any]) -> None:
    """What reads the report without torch calls steps, first passes and cards as those who compiled them."""
    assert dict(CHECKPOINTS) == steps.CHECKPOINTS
    assert {k: c.arch for k, c in CARDS_AT_BEST.items()} == {
        k: "sm_{}{}".format(*g.capability) for k, g in CARDS.items()
    }
    assert all(step_of(checkpoint, light) == steps.name(checkpoint, light) for checkpoint, light, _ in wanted())
    known = {first_of(step_of(checkpoint, light)) for checkpoint, light, _ in wanted()}
    assert {name for name, *_ in passes() if name.startswith("first/")} == known


class Counting(TorchDispatchMode):
    """Counts torch's own operations that run on a card: a view does not, nor does the room for an output."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and "empty" not in func.overloadpacket.__name__:
            seen = [x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)]
            self.count += not (func.is_view and out.untyped_storage()._cdata in seen)
        return out


@pytest.mark.parametrize("card", CARDS)
def test_torch_itself_launches_a_first_passes_rotary_tables_only(card: str) -> None:
    for run, launches in ((steps.run, 0), (steps.run_first, ROTARY_TABLES)):
        with recording(CARDS[card]):  # what is made once
            run("nvidia-nvfp4")
        with recording(CARDS[card]), Counting() as counting:
            run("nvidia-nvfp4")
        assert counting.count == launches


@pytest.mark.parametrize("card", CARDS)
def test_steps_are_as_stored(card: str, stored: dict[str, Any], compiled: dict[str, Any]) -> None:
    lines: dict[str, Any] = {}
    for name, checkpoint, light, of in passes():
        if of != card:
            continue
        (entry,) = (e for e in CONFIGURATIONS if e.name == name)
        launches = recorded(entry, CARDS[card])
        artefacts = {key: compiled[key].result() for key in {key_of(launch, CARDS[card]) for launch in launches}}
        counts = summary(launches, artefacts, card, steps.lasting(checkpoint, light), lines)
        assert counts == stored["steps"][card].get(name), f"{name}: python tests/kernel_report.py"
    changed = [
        f"{label}: {now}\nstored {was}"
        for label, now in lines.items()
        if not _alike(now, was := stored["launches"][card][label])
    ]
    assert not changed, "\n".join(["python tests/kernel_report.py", *changed])


def _alike(now: dict[str, Any], was: dict[str, Any]) -> bool:
    """The same launch; numbers of the machine code and the time within SLACK, whatever the limits behind the largest do."""
    exact = all(now[k] == was[k] for k in ("grid", "warps", "bytes", "flops", "mma"))
    counted = [(now[k], was[k]) for k in ("per_mma", "per_byte") if was[k] is not None]
    counted.append((max(now["limits"].values()), max(was["limits"].values())))
    return exact and all(math.isclose(a, b, rel_tol=SLACK, abs_tol=0.01) for a, b in counted)


# Worked out independently, for 1,024 tokens behind and all experts hit; a light embedding is read once
@pytest.mark.parametrize(
    ("checkpoint", "light", "card", "milliseconds"),
    [
        ("nvidia-nvfp4", False, "ada", 21.5),
        ("nvidia-nvfp4", False, "hopper", 4.6),
        ("nvidia-nvfp4", True, "ada", 17.3),
        ("nvidia-nvfp4", True, "blackwell", 9.5),
        ("nvidia-nvfp4", True, "hopper", 3.7),
        ("redhat-fp8-dynamic", False, "blackwell", 16.8),
        ("redhat-fp8-dynamic", False, "hopper", 6.5),
    ],
)
def test_floors(checkpoint: str, light: bool, card: str, milliseconds: float) -> None:
    assert floor(checkpoint, light, CARDS_AT_BEST[card]) == pytest.approx(milliseconds, rel=0.01)


def test_a_work_list_under_uniform_routing() -> None:
    """16 pairs an expert in the mean, all experts hit; tiles of 16 pad them by 1.44 (as in the floor)."""
    items, few, many = _items(32, 16, 256)
    assert 128 <= items <= 132 and few + many > 2048
    _, few, many = _items(16, 16, 256)
    assert (few + many) / 2048 == pytest.approx(PADDING, rel=0.02)
    more, _, _ = _items(32, 16, 512)
    assert items < more < 2 * items  # they are of 32 pairs at the most, and hold 16 in the mean
    _, few, many = _items(16, 16, 512)
    assert 1 < (few + many) / 4096 < PADDING  # 32 pairs an expert fill their tiles better
