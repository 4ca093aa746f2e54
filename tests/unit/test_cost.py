"""`dgemma bench --view`: pairs of runs, in turn, on a terminal of its own; no clock is judged."""

import io
import json
from collections.abc import Iterable
from typing import Any

import pytest
from fake_session import END, LENGTH, spell, timed
from small_tokenizer import small

from dgemma_local.channels import AnswerDecoder
from dgemma_local.errors import BenchRefused, UsageError
from dgemma_local.ui import Record, Start
from dgemma_local.ui import cost as cost_module
from dgemma_local.ui.canvas import Vocabulary
from dgemma_local.ui.cost import measure, show_cost

START = Start(model="m", demo=True, seed=1, max_tokens=64, steps=8, canvas_length=LENGTH)
VOCABULARY = Vocabulary(text=small().piece, control=small().is_control, ends=frozenset({END}))
SUBJECT = {"name": "m", "device": "cpu", "canvas_length": LENGTH, "threads": 1}


def measured(texts: Iterable[str], monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], list[bool]]:
    """The document, and of each run whether it was watched."""
    monkeypatch.setattr(cost_module, "FRAMES", 5)
    monkeypatch.setenv("TERM", "xterm")
    records: list[Record] = []
    answers = iter(texts)

    def ask() -> Any:
        records.append(Record(START, AnswerDecoder(small())))
        return timed(spell(next(answers))), records[-1]

    document = measure(ask, VOCABULARY, SUBJECT, 0, 3, lambda text: None)
    return document, [record.watched is not None for record in records]


def test_pairs_alternate_behind_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    document, watched = measured(["Hi user"] * 8, monkeypatch)
    assert watched == [False, True, False, True, True, False, False, True]
    assert document["with"]["steps"] == document["without"]["steps"] == 4
    assert document["with"]["ms_per_step"] == document["without"]["ms_per_step"] == 250  # of the fake clock
    assert document["frames"]["drawn"] >= 1
    assert document["frames"]["drawn"] + document["frames"]["dropped"] == 5  # 4 steps, and the line that stays in view
    assert document["frame_ms"]["frames"] == 5 and document["frame_ms"]["cells"] == 256
    ratio = document["ratio"]
    assert 0 < ratio["min"] <= ratio["median"] <= ratio["max"]


def test_the_cost_is_the_view_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every pair the time with it by the time without, so that a machine that slows down is none of it."""
    took = {False: iter([9.0, 1.0, 2.0, 4.0]), True: iter([9.0, 1.02, 2.06, 4.4])}  # seconds; the first warm up

    def ran(view: bool) -> Any:
        def once(ask: Any, *_: object) -> cost_module.Ran:
            wall = next(took[view])
            return cost_module.Ran(wall, wall / 2, 4, wall, (1, 2), drawn=3 * view, dropped=view)

        return once

    monkeypatch.setattr(cost_module, "_seen", ran(True))
    monkeypatch.setattr(cost_module, "_unseen", ran(False))
    document, _ = measured([], monkeypatch)
    assert document["ratio"] == pytest.approx({"median": 1.03, "min": 1.02, "max": 1.1})
    assert document["cpu_ratio"] == pytest.approx(document["ratio"])
    assert (document["with"]["wall_s"], document["without"]["wall_s"]) == (2.06, 2.0)
    assert document["frames"] == {"drawn": 3, "dropped": 1}
    out = io.StringIO()
    show_cost(document, out)
    assert "wall time with : without, median of the pairs: 1.030 (1.020 to 1.100)" in out.getvalue()


def test_a_view_that_changes_the_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BenchRefused, match="differ"):
        measured(["Hi user"] * 5 + ["Hi model"] + ["Hi user"] * 2, monkeypatch)


def test_the_last_line_is_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    document, _ = measured(["Hi user"] * 8, monkeypatch)
    out = io.StringIO()
    show_cost(document, out)
    lines = out.getvalue().splitlines()
    assert json.loads(lines[-1]) == document
    assert any(f"{document['ratio']['median']:.3f}" in line for line in lines[:-1])


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--runs", "9"], "9 pairs"), (["--model", "demo"], "--model"), (["--protocol", "all"], "--protocol")],
)
def test_flags_that_mean_nothing_are_refused(flags: list[str], said: str) -> None:
    from dgemma_local.cli_bench import _view

    with pytest.raises(UsageError, match=said):
        _view(
            [] if flags[0] == "--runs" else flags[:1],
            int(flags[1]) if flags[0] == "--runs" else None,
            0,
            None,
            quiet=True,
        )
