"""What is kept of a self-test: a verdict, by all that it was on; what runs it anew, and what is no kernel's fault."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from twin_kernels import BF16, MOST, names
from twin_kernels import networks as networks
from twin_kernels import own_process as own_process

from dgemma_local import errors, ops, selftest
from dgemma_local.model import DiffusionGemma


@pytest.fixture
def network(networks: dict[str, DiffusionGemma], monkeypatch: pytest.MonkeyPatch) -> DiffusionGemma:
    """One whose passes count as taking kernels on a card."""
    monkeypatch.setattr(selftest, "needed", lambda network: True)
    return networks["plain"]


# ── what is kept ──────────────────────────────────────────────────────────────────────────────────────────────────


def kept_file() -> Path:
    file = selftest.cache_file()
    assert file is not None
    return file


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[DiffusionGemma]:
    """Each fresh self-test; one kernel fails."""
    made: list[DiffusionGemma] = []

    def run(network: DiffusionGemma, context: int | None) -> list[selftest.Outcome]:
        made.append(network)
        wrong = selftest.Outcome("attention", False, "NaN in 1 of 2 numbers; full")
        return [wrong if name == "attention" else selftest.Outcome(name, True) for name in names(network)]

    monkeypatch.setattr(selftest, "run", run)
    return made


def test_a_failing_kernel_is_replaced_with_one_line(network: DiffusionGemma, runs: list[DiffusionGemma]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DGEMMA_OPS", "")
        line = (
            "kernel attention failed its self-test (NaN in 1 of 2 numbers; full): its torch twin runs instead, slower"
        )
        assert selftest.apply(network) == [line]
        assert ops.replaced() == {"attention"}
        assert selftest.apply(network) == [line]  # from the cache
        assert [each.name for each in selftest.failing(network)] == ["attention"]
    assert len(runs) == 1


def test_a_kept_verdict_runs_nothing_and_force_runs_anew(network: DiffusionGemma, runs: list[DiffusionGemma]) -> None:
    for force, fresh in ((False, 1), (False, 1), (True, 2), (False, 2)):
        assert [each.name for each in selftest.failing(network, force=force)] == ["attention"]
        assert len(runs) == fresh
    (entry,) = json.loads(kept_file().read_text()).values()
    assert set(entry) == {
        *("card", "capability", "driver", "torch", "triton", "dgemma", "sources", "cases", "outcomes")
    }
    assert [path.name for path in kept_file().parent.iterdir()] == ["selftest.json"]


@pytest.mark.parametrize("what", ["_driver", "_triton", "_name", "_capability", "_sources", "__version__", "cases"])
def test_anything_new_runs_again(
    network: DiffusionGemma, runs: list[DiffusionGemma], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    selftest.failing(network)
    with monkeypatch.context() as patch:
        if what == "cases":
            patch.setenv("DGEMMA_OPS", "twins fast-head")
        else:
            patch.setattr(selftest, what, "9" if what == "__version__" else lambda *device: "another")
        selftest.failing(network)
        selftest.failing(network)
        assert len(runs) == 2
    selftest.failing(network)  # both are kept
    assert len(runs) == 2


def test_another_planned_context_runs_again_where_it_may_choose_other_splits(
    network: DiffusionGemma, runs: list[DiffusionGemma]
) -> None:
    for context, fresh in ((None, 1), (MOST, 1), (2 * MOST, 1), (MOST - 1, 2), (MOST - 1, 2), (40, 3), (None, 3)):
        assert len(selftest.apply(network, context=context)) == 1 and len(runs) == fresh


def test_a_changed_kernel_is_another_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = selftest._sources()
    file = tmp_path / "embedding.py"
    file.write_text("one")
    monkeypatch.setattr(ops.KERNELS["embed"], "__file__", str(file))
    with_one = selftest._sources()
    file.write_text("two")
    assert len({before, with_one, selftest._sources()}) == 3


DAMAGED = [
    *("", "{", "[]", '"x"', "\xff\xfe", '{"KEY": 3}', '{"KEY": {"outcomes": []}}'),
    *(
        '{"KEY": {"outcomes": [{"name": "embed"}]}}',
        '{"KEY": {"outcomes": 3}}',
        '{"KEY": {"outcomes": [{"name": "no", "ok": true, "what": ""}]}}',
    ),
]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_file_runs_again(network: DiffusionGemma, runs: list[DiffusionGemma], text: str) -> None:
    selftest.failing(network)
    file = kept_file()
    (key,) = json.loads(file.read_text())
    file.write_bytes(text.replace("KEY", key).encode("latin-1"))
    _, notices = selftest._verdict(network, force=False)
    assert len(runs) == 2
    damaged = f"the kernels' self-test is not remembered: {file} is damaged"
    assert notices == ([] if "KEY" in text else [damaged])
    assert selftest._verdict(network, force=False)[1] == [] and len(runs) == 2  # mended


def test_an_unwritable_folder_is_one_line(
    network: DiffusionGemma, runs: list[DiffusionGemma], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    lines = selftest.apply(network)
    assert len(lines) == 2 and lines[1].startswith("the kernels' self-test is not remembered: ")
    assert "annot be" in lines[1]
    assert len(selftest.failing(network)) == 1 and len(runs) == 2


def test_the_file_is_written_whole_or_not_at_all(
    network: DiffusionGemma, runs: list[DiffusionGemma], monkeypatch: pytest.MonkeyPatch
) -> None:
    selftest.failing(network)
    before = kept_file().read_text()

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    monkeypatch.setattr(selftest, "_driver", lambda: "another")
    assert selftest._verdict(network, force=False)[1][0].endswith("cannot be written: No space left on device")
    assert kept_file().read_text() == before and len(list(kept_file().parent.iterdir())) == 1


def test_only_the_newest_are_kept(
    network: DiffusionGemma, runs: list[DiffusionGemma], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "KEPT", 2)
    for driver in ("1", "2", "3"):
        monkeypatch.setattr(selftest, "_driver", lambda driver=driver: driver)
        selftest.failing(network)
    entries = json.loads(kept_file().read_text()).values()
    assert [entry["driver"] for entry in entries] == ["2", "3"]


@pytest.mark.parametrize("home", ["", "relative"])
def test_a_relative_cache_home_does_not_count(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert selftest.cache_file() == tmp_path / ".cache" / "dgemma" / "selftest.json"


def test_without_a_home_nothing_is_kept(
    network: DiffusionGemma, runs: list[DiffusionGemma], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose user is a number."""

    def nobody(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert selftest.cache_file() is None
    for fresh in (1, 2):
        told, notice = selftest.apply(network)
        assert told.startswith("kernel attention failed") and len(runs) == fresh
        assert notice == ("the kernels' self-test is not remembered: there is no home folder, and no XDG_CACHE_HOME")


def stuck(*given: Any) -> None:
    raise AssertionError("it waits for a pipe's writer")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda file: file.symlink_to("/dev/zero")])
def test_what_is_no_regular_file_is_neither_read_nor_replaced(
    network: DiffusionGemma, runs: list[DiffusionGemma], make: Callable[[Path], None]
) -> None:
    file = kept_file()
    file.parent.mkdir(parents=True)
    make(file)
    before = file.lstat()
    handler = signal.signal(signal.SIGALRM, stuck)
    signal.alarm(5)
    try:
        _, notices = selftest._verdict(network, force=False)
        told = selftest._write({})
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
    assert (
        notices
        == told
        == [f"the kernels' self-test is not remembered: {file} cannot be written: it is no regular file"]
    )
    assert len(runs) == 1 and file.lstat().st_ino == before.st_ino
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    "change",
    [
        *(lambda o: o[1:], lambda o: o + o[:1], lambda o: o[::-1], lambda o: o[:-1] + o[:1]),
        *(lambda o, what=what: [{**each, **what} for each in o] for what in ({"ok": 1}, {"what": None}, {"name": 3})),
    ],
)
def test_a_verdict_on_other_kernels_is_none(
    network: DiffusionGemma, runs: list[DiffusionGemma], change: Callable[[list[Any]], list[Any]]
) -> None:
    selftest.failing(network)
    kept = json.loads(kept_file().read_text())
    ((key, entry),) = kept.items()
    kept_file().write_text(json.dumps({key: {**entry, "outcomes": change(entry["outcomes"])}}))
    assert [each.name for each in selftest.failing(network)] == ["attention"] and len(runs) == 2
    selftest.failing(network)
    assert len(runs) == 2  # mended


def test_nothing_runs_where_no_kernel_does(networks: dict[str, DiffusionGemma], runs: list[DiffusionGemma]) -> None:
    for network in networks.values():
        assert not selftest.needed(network)
        assert selftest.apply(network) == [] and selftest.failing(network, force=True) == []
    assert runs == [] and not kept_file().exists()


def test_it_is_needed_where_kernels_are_taken_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "why_torch", lambda device, dtype: None)
    on_card: Any = SimpleNamespace(device=torch.device("cuda"), dtype=BF16)
    assert not selftest.needed(on_card)  # DGEMMA_OPS=twins
    monkeypatch.setenv("DGEMMA_OPS", "fast-head")
    assert selftest.needed(on_card)
    assert not selftest.needed(cast(Any, SimpleNamespace(device=torch.device("cpu"), dtype=BF16)))  # the interpreter
    monkeypatch.setattr(ops, "why_torch", lambda device, dtype: "a reason")
    assert not selftest.needed(on_card)


# ── what is no kernel's fault, and what nothing can be done about ─────────────────────────────────────────────────


def test_too_little_memory_is_no_verdict(network: DiffusionGemma, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **named: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(ops.KERNELS["attention"], "attention_twin", full)
        lines = selftest.apply(network)
    assert lines == ["self-test of attention left out: not enough memory on the card"]
    assert not kept_file().exists()
    assert selftest.apply(network) == [] and kept_file().exists()


def test_a_dead_context_is_an_error_with_a_cure(network: DiffusionGemma, monkeypatch: pytest.MonkeyPatch) -> None:
    dead: list[bool] = []

    def reads_elsewhere(*given: Any, **named: Any) -> None:
        dead.append(True)

    def wait(device: torch.device) -> None:
        if dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be …")

    monkeypatch.setattr(selftest, "_wait", wait)
    monkeypatch.setattr(ops.KERNELS["attention"], "attention", reads_elsewhere)
    with pytest.raises(
        errors.KernelCrash, match=r"^the kernel attention crashed on cpu \(.*\): RuntimeError: CUDA"
    ) as caught:
        selftest.apply(network)
    assert "DGEMMA_OPS=twins" in caught.value.fix and "DGEMMA_OPS=torch" in caught.value.fix
    assert caught.value.exit_code == 12
    assert not kept_file().exists()


def test_torchs_settings_are_as_before(network: DiffusionGemma, monkeypatch: pytest.MonkeyPatch) -> None:
    matmul, seen = torch.backends.cuda.matmul, []
    before = torch.get_float32_matmul_precision(), matmul.allow_bf16_reduced_precision_reduction
    right = ops.KERNELS["embed"].embed_twin

    def embed_twin(*given: Any, **named: Any) -> Tensor:
        seen.append((torch.get_float32_matmul_precision(), matmul.allow_bf16_reduced_precision_reduction))
        made: Tensor = right(*given, **named)
        return made

    torch.set_float32_matmul_precision("high")
    try:
        monkeypatch.setattr(ops.KERNELS["embed"], "embed_twin", embed_twin)
        selftest.run(network)
        assert set(seen) == {("highest", False)}
        assert (torch.get_float32_matmul_precision(), matmul.allow_bf16_reduced_precision_reduction) == (
            "high",
            before[1],
        )
    finally:
        torch.set_float32_matmul_precision(before[0])
