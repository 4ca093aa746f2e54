"""Machines with one broken piece each: the doctor finds it, and names the cure."""

import hashlib
import json
import os
import shutil
import stat
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from dgemma_local.kernels import _launch
from hub_server import Hub, git_sha1

from dgemma_local import card, ops, presets
from dgemma_local.bench import synthetic
from dgemma_local.card import MIB, Card
from dgemma_local.demo.render import MODELS
from dgemma_local.doctor import (
    CHECKS,
    child,
    document,
    examine,
    failed,
    hardware,
    software,
    storage,
    surroundings,
    trial,
)
from dgemma_local.doctor.examination import Check, Machine
from dgemma_local.doctor.finding import LONGEST, Finding, Level, ok, private
from dgemma_local.doctor.probe import Lost, Probe
from dgemma_local.fit import GB
from dgemma_local.registry import table
from dgemma_local.selftest import cases

NVFP4 = "26b-a4b-nvfp4"
A = "GPU-3a1cb1e4-0f4e-6b52-9f7a-5d0a3f1f8c11"
RTX_4090 = Card(
    index=0,
    name="NVIDIA GeForce RTX 4090",
    uuid=A,
    total=24564 * MIB,
    free=24000 * MIB,
    capability=(8, 9),
    driver="580.65",
)


class Here:
    """Answers as the child does, in this process, or as it is told to."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    def ask(self, part: str, limit: float, **given: Any) -> dict[str, Any]:
        if part in self.answers:
            if isinstance(self.answers[part], Exception):
                raise self.answers[part]
            return cast(dict[str, Any], self.answers[part])
        return child.answer({"part": part, **given})


SEES = {
    "version": "2.13.0", "cuda": "13.0", "hip": None, "sane": True, "cuda_available": True, "said": "",
    "cards": ["NVIDIA GeForce RTX 4090"], "built_for": ["sm_80", "sm_86", "sm_90", "sm_120"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if surroundings.THEIRS.fullmatch(name) and name not in ("LANG", "PYTHONPATH"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def machine(*cards: Card, **known: Any) -> Machine:
    made = Machine(probe=cast(Probe, Here(**known.pop("answers", {}))), cards=cards, models=table())
    for name, value in known.items():
        setattr(made, name, value)
    return made


def found(look: Callable[[Machine], Iterable[Finding]], at: Machine) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine([Check("check", look)], at)}


def is_cured(finding: Finding, level: Level, what: str, cure: str) -> None:
    assert finding.level is level
    assert what in finding.what and cure in (finding.cure or ""), finding


# ── the examination itself ────────────────────────────────────────────────────────────────────────────────────────


def test_what_a_check_raises_is_a_finding_and_the_next_goes_on() -> None:
    def broken(at: Machine) -> Iterator[Finding]:
        yield ok("first", "is kept")
        raise ZeroDivisionError("two\nlines")

    seen = list(examine([Check("broken", broken), Check("next", lambda at: [ok("next", "done")])], machine()))
    assert [(f.name, f.level) for f in seen] == [("first", "OK"), ("broken", "FAIL"), ("next", "OK")]
    is_cured(seen[1], Level.FAIL, "ZeroDivisionError: two lines", "--json")


def test_a_check_that_hangs_is_left_behind() -> None:
    began = time.monotonic()
    hangs = Check("disk", lambda at: cast(Any, time.sleep(30)), 0.05, "pull the plug")
    seen = list(examine([hangs, Check("next", lambda at: [ok("next", "done")])], machine()))
    assert time.monotonic() - began < 10
    is_cured(seen[0], Level.FAIL, "no answer within 0.05 seconds", "pull the plug")
    assert seen[1].level is Level.OK


def test_a_panic_is_a_finding() -> None:
    def panics(at: Machine) -> Iterator[Finding]:
        raise SystemExit(3)

    (seen,) = examine([Check("odd", panics)], machine())
    assert seen.level is Level.FAIL and failed([seen]) and not failed([])


def test_a_report_names_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/data/alice")
    assert private("/data/alice/x and /data/alicent, /home/bob/y") == "~/x and /data/alicent, ~/y"
    assert private({"a": ["http://me:secret@proxy:1/"], "n": 3}) == {"a": ["http://proxy:1/"], "n": 3}
    tidied = Finding(
        name="n", level=Level.OK, what="a\nb " * 300, cure="/data/alice", facts={"p": "/data/alice/z"}
    ).tidied()
    assert len(tidied.what) == LONGEST and "\n" not in tidied.what
    assert (tidied.cure, tidied.facts) == ("~", {"p": "~/z"})
    monkeypatch.setenv("HOME", "/")
    assert private("/etc") == "/etc"


def test_the_document_is_json() -> None:
    made = json.loads(json.dumps(document([ok("a", "b", size=1)], 1.26)))
    assert made["findings"] == [{"name": "a", "level": "OK", "what": "b", "cure": None, "facts": {"size": 1}}]
    assert made["seconds"] == 1.3 and made["failed"] is False
    assert made["versions"]["torch"] == torch.__version__


def test_every_check_has_an_end() -> None:
    assert all(0 < check.limit < 3601 for check in CHECKS)
    assert hardware.FIRST < hardware.LIMIT <= 8


# ── Python, packages ──────────────────────────────────────────────────────────────────────────────────────────────


def test_python_and_packages_of_this_environment() -> None:
    assert found(software.python, machine())["python"].level is Level.OK
    packages = found(software.packages, machine())
    assert packages["packages"].facts["versions"]["tokenizers"] == software.installed("tokenizers")
    assert "torch" not in packages["packages"].facts["versions"]


def test_a_package_that_is_missing_or_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    there = software.installed
    monkeypatch.setattr(software, "installed", lambda p: {"rich": None, "tokenizers": "0.15.0"}.get(p, there(p)))
    seen = found(software.packages, machine())
    is_cured(seen["rich"], Level.FAIL, "is not installed", "pip install 'rich")
    is_cured(seen["tokenizers"], Level.FAIL, "0.15.0 is outside", "pip install 'tokenizers")


def test_reported_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "installed", {"triton": "3.8.0", "huggingface-hub": "1.17.0"}.get)
    is_cured(found(software.known, machine())["known faults"], Level.WARN, "triton 3.8.0", "pip install 'triton")
    monkeypatch.setattr(software, "installed", {"triton": "3.7.1", "huggingface-hub": "1.18.0"}.get)
    assert "goes on where it was" in found(software.known, machine())["known faults"].what
    monkeypatch.setattr(software, "installed", {"triton": "3.7.1"}.get)
    assert found(software.known, machine())["known faults"].level is Level.OK
    b300 = Card(index=0, name="B300", uuid=A, total=GB, free=GB, capability=(10, 3))
    is_cured(found(software.known, machine(b300))["known faults"], Level.WARN, "#10590", "triton")


# ── torch and triton ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], None]:
    """A module that a child of this process imports in another's place."""
    monkeypatch.syspath_prepend(tmp_path / "modules")

    def breaks(name: str, code: str) -> None:
        (tmp_path / "modules").mkdir(exist_ok=True)
        (tmp_path / "modules" / f"{name}.py").write_text(code)

    return breaks


MISSING = 'raise ModuleNotFoundError("No module named \'{0}\'", name="{0}")'


def test_triton_is_missing(broken: Callable[[str, str], None]) -> None:
    broken("triton", MISSING.format("triton"))
    with Probe() as asked:
        seen = found(software.triton, machine(RTX_4090, probe=asked))["triton"]
        is_cured(seen, Level.FAIL, "is not installed: no kernel runs", "pip install 'triton<3.8,>=3.6'")
        assert found(software.triton, machine(probe=asked))["triton"].level is Level.WARN


TORCHES = [
    (MISSING.format("torch"), "is not installed", "pip install 'torch"),
    ("raise ImportError('libcudnn.so.9: cannot open')", "libcudnn.so.9: cannot open", "--force-reinstall"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "ended by SIGILL", "--force-reinstall"),
    ("import os; os._exit(3)", "ended with 3", "--force-reinstall"),
    ("print('noise on stdout'); raise OSError('short read')", "OSError: short read", "--force-reinstall"),
    ("__version__ = '2.0'", "AttributeError", "--force-reinstall"),
]


@pytest.mark.parametrize(("code", "what", "cure"), TORCHES)
def test_torch_is_broken(broken: Callable[[str, str], None], code: str, what: str, cure: str) -> None:
    broken("torch", code)
    with Probe() as asked:
        at = machine(probe=asked)
        is_cured(found(software.torch, at)["torch"], Level.FAIL, what, cure)
        assert at.torch is None
        assert found(trial.kernels, at)["kernels"].level is found(trial.smoke, at)["demo"].level is Level.SKIP


def test_torch_hangs(broken: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    broken("torch", "import time; time.sleep(60)")
    monkeypatch.setattr(software, "IMPORT_LIMIT", 0.2)
    with Probe() as asked:
        seen = found(software.torch, machine(probe=asked))["torch"]
        is_cured(seen, Level.FAIL, "no answer within 0.2 seconds", "restart the computer")
        assert asked._child is None  # and none is left


def test_a_probe_starts_again_after_a_crash(broken: Callable[[str, str], None]) -> None:
    broken("torch", "import os; os._exit(3)")
    with Probe() as asked:
        with pytest.raises(Lost):
            asked.ask("torch", 30)
        assert "version" in asked.ask("triton", 60)


CUDAS: list[tuple[dict[str, Any], Card, str, str]] = [
    ({"cuda": None}, RTX_4090, "is no CUDA build: NVIDIA GeForce RTX 4090 lies idle", "pip install --force-reinstall 'torch"),
    ({"version": "2.9.1"}, RTX_4090, "2.9.1 is outside", "pip install 'torch"),
    ({"sane": False}, RTX_4090, "multiplies wrongly", "--force-reinstall"),
    ({}, replace(RTX_4090, driver="550.144.03"), "a driver from 580 on, here is 550.144.03", "install a driver from 580"),
    ({"cuda": "12.8"}, replace(RTX_4090, driver="515.1"), "a driver from 525 on", "install a driver from 525"),
    ({"cuda_available": False, "said": "no permission"}, RTX_4090, "torch sees no card, and nvidia-smi does: no perm", "--gpus"),
    ({"built_for": ["sm_90"]}, RTX_4090, "no code for capability 8.9: sm_90", "newest CUDA"),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "here", "what", "cure"), CUDAS)
def test_torch_and_the_card_do_not_go_together(facts: dict[str, Any], here: Card, what: str, cure: str) -> None:
    seen = found(software.torch, machine(here, answers={"torch": SEES | facts}))
    (wrong,) = (each for each in seen.values() if each.level is Level.FAIL)
    is_cured(wrong, Level.FAIL, what, cure)


def test_torch_and_the_card_go_together() -> None:
    seen = found(software.torch, machine(RTX_4090, answers={"torch": SEES}))
    assert {each.level for each in seen.values()} == {Level.OK} and set(seen) == {"torch", "CUDA"}


@pytest.mark.parametrize(
    ("built", "capability", "good"),
    [
        (["sm_86"], (8, 9), True), (["sm_90"], (8, 9), False), (["sm_80"], (9, 0), False), (["sm_90a"], (9, 0), True),
        (["compute_80"], (12, 0), True), (["compute_120"], (9, 0), False), (["sm_100"], (12, 0), False), ([], (8, 9), True),
    ],
)  # fmt: skip
def test_which_code_a_card_runs(built: list[str], capability: tuple[int, int], good: bool) -> None:
    assert software.runs(built, capability) is good


def test_triton_finds_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    at = machine(RTX_4090, answers={"triton": {"version": "3.7.1"}})
    monkeypatch.setenv("PATH", str(tmp_path))
    is_cured(found(software.triton, at)["compiler"], Level.FAIL, "no C compiler", "install gcc")
    monkeypatch.setenv("CC", "nocc")
    is_cured(found(software.triton, at)["compiler"], Level.FAIL, "called nocc (CC)", "set CC")
    (tmp_path / "nocc").write_text("")
    (tmp_path / "nocc").chmod(0o755)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    is_cured(found(software.triton, at)["compiler"], Level.FAIL, "Python.h is not there", "python3-dev")
    (tmp_path / "Python.h").write_text("")
    assert found(software.triton, at)["compiler"].level is Level.OK


def test_triton_of_another_version() -> None:
    at = machine(RTX_4090, answers={"triton": {"version": "3.9.0"}})
    is_cured(found(software.triton, at)["triton"], Level.FAIL, "3.9.0 is outside", "pip install 'triton")


# ── the card ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """An nvidia-smi that answers three queries, or runs a script."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def write(cards: str = "", links: str = "", apps: str = "", script: str | None = None) -> None:
        answers = f"""case "$1" in *pcie*) printf '%s' '{links}';; *compute-apps*) printf '%s' '{apps}';; *) printf '%s' '{cards}';; esac"""
        path = folder / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{answers if script is None else script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    return write


LINK = "0, 580.65.06, 1, 4, 16, 16\n"


def row(name: str = "NVIDIA GeForce RTX 4090", total: int = 24564, free: int = 24000, capability: str = "8.9") -> str:
    return f"0, {name}, {total}, {total - free}, {capability}, 580.65.06, {A}, {free}\n"


def test_a_card_that_is_in_order(smi: Callable[..., None]) -> None:
    smi(row(), LINK)
    at = machine()
    seen = found(hardware.cards, at)
    assert {each.level for each in seen.values()} == {Level.OK}
    assert list(seen) == ["driver", "card 0", "VRAM 0", "PCIe 0"]
    assert at.card is not None and at.driver == "580.65.06"
    assert seen["card 0"].what == "NVIDIA GeForce RTX 4090, capability 8.9"
    assert seen["PCIe 0"].facts == {"generation": 1, "generation_max": 4, "width": 16, "width_max": 16}


CARDS = [
    ({"cards": row(total=16376, free=16000)}, "VRAM 0", "needs 18.40 GB", "dgemma models show 26b-a4b-nvfp4"),
    ({"cards": row(capability="8.6")}, "card 0", "the kernels begin at 8.9", "RTX 40 series"),
    ({"cards": row(capability="10.0")}, "card 0", "not seen on it", "`kernels`"),
    (
        {"cards": row(free=9000), "apps": f"4711, python3, 15000, {A}\n"},
        "VRAM 0",
        "pid 4711 (15,000 MiB)",
        "end pid 4711",
    ),
    ({"cards": row(free=9000)}, "VRAM 0", "needs 18.40 GB", "--context"),
    ({"cards": row(), "links": "0, 580.65.06, 4, 4, 4, 16\n"}, "PCIe 0", "4 of 16 lanes", "slot"),
]


@pytest.mark.parametrize(("answers", "name", "what", "cure"), CARDS)
def test_a_card_that_is_not(smi: Callable[..., None], answers: dict[str, str], name: str, what: str, cure: str) -> None:
    smi(**{"links": LINK} | answers)
    is_cured(found(hardware.cards, machine())[name], Level.WARN, what, cure)


SMIS = [
    ("exec sleep 60", Level.FAIL, "nvidia-smi does not answer", "restart the computer"),
    ("echo '<html>'", Level.FAIL, "makes no sense: '<html>'", "install the driver again"),
    ("printf ''", Level.FAIL, "makes no sense", "install the driver again"),
    ("printf '0, 580, 4\\n'", Level.FAIL, "makes no sense", "install the driver again"),
    ("echo 'NVIDIA-SMI has failed'; exit 9", Level.FAIL, "ends with 9: NVIDIA-SMI has failed", "restart"),
    ("echo 'No devices were found'; exit 6", Level.WARN, "finds no card", "power"),
]


@pytest.mark.parametrize(("script", "level", "what", "cure"), SMIS)
def test_a_driver_that_is_not(
    smi: Callable[..., None], script: str, level: Level, what: str, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(script=script)
    monkeypatch.setattr(hardware, "FIRST", 0.5 if "sleep" in script else 7.0)
    at = machine()
    (seen,) = found(hardware.cards, at).values()
    is_cured(seen, level, what, cure)
    assert at.cards == ()


def test_no_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(hardware, "LOADED", tmp_path / "none")
    at = machine(answers={"torch": SEES | {"cuda": None, "cuda_available": False, "version": "2.13.0"}})
    assert found(hardware.cards, at)["card"].level is Level.SKIP
    assert found(software.torch, at)["torch"].level is Level.OK
    kernels = found(trial.kernels, at)["kernels"]
    assert kernels.level is Level.SKIP
    assert kernels.what == "nothing runs on kernels here: no card is in use (the model is on cpu)"


def test_a_driver_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(hardware, "LOADED", tmp_path)
    is_cured(found(hardware.cards, machine())["card"], Level.WARN, "nvidia-smi is not on PATH", "nvidia-utils")


def test_a_card_that_is_hidden(smi: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    smi(row(), LINK)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    is_cured(
        found(hardware.cards, machine())["card"], Level.WARN, "CUDA_VISIBLE_DEVICES='' leaves no card of 1", "unset"
    )


def test_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "host_memory", lambda: GB)
    is_cured(found(hardware.host, machine())["RAM"], Level.WARN, "1.00 GB free", "container's limit")
    monkeypatch.setattr(card, "host_memory", lambda: 4 * GB)
    assert found(hardware.host, machine())["RAM"].level is Level.OK
    monkeypatch.setattr(card, "host_memory", lambda: None)
    assert found(hardware.host, machine())["RAM"].level is Level.SKIP


def test_the_cards_that_kernels_are_for_are_those_of_the_kernels() -> None:
    assert hardware.OLDEST == ops.OLDEST
    assert set(hardware.COMPILED_FOR) == {g.capability for g in (_launch.ADA, _launch.HOPPER, _launch.BLACKWELL)}


# ── disk, checkpoints, hub ────────────────────────────────────────────────────────────────────────────────────────


def with_free(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=count))


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, GB // 2)
    is_cured(found(storage.disk, machine())["disk"], Level.FAIL, "500 MB free", "set HF_HOME")


def test_a_disk_without_room_for_the_cards_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 19 * GB - 1)
    seen = found(storage.disk, machine(RTX_4090))["disk"]
    is_cured(seen, Level.FAIL, f"18.0 GB of {NVFP4} are to come", "make room")
    assert found(storage.disk, machine())["disk"].level is Level.OK  # where the demo answers
    with_free(monkeypatch, 20 * GB)
    assert found(storage.disk, machine(RTX_4090))["disk"].level is Level.OK


def test_a_disk_that_may_not_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    is_cured(found(storage.disk, machine())["disk"], Level.FAIL, "may not be written", "permissions")


def test_a_cache_that_is_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "hub").touch()
    for path in (tmp_path / "hub", tmp_path / "hub" / "deeper"):
        monkeypatch.setenv("HF_HUB_CACHE", str(path))
        is_cured(found(storage.disk, machine())["disk"], Level.FAIL, "is no folder", "HF_HOME")


COMMIT = "d" * 40


@pytest.fixture
def fetched(tmp_path: Path) -> Path:
    """The demo's files in the cache, as the card's checkpoint -> its blobs by name."""
    home = tmp_path / "cache" / "models--RedHatAI--diffusiongemma-26B-A4B-it-NVFP4"
    (home / "blobs").mkdir(parents=True)
    (home / "snapshots" / COMMIT).mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(COMMIT)
    for file in (MODELS / "sudoku-nvfp4").iterdir():
        if file.suffix in (".json", ".jinja", ".safetensors") and file.stem != "evaluation":
            data = file.read_bytes()
            large = file.name in ("model.safetensors", "tokenizer.json")
            blob = home / "blobs" / (hashlib.sha256(data).hexdigest() if large else git_sha1(data))
            blob.write_bytes(data)
            (home / "snapshots" / COMMIT / file.name).symlink_to(os.path.relpath(blob, home / "snapshots" / COMMIT))
    return home / "snapshots" / COMMIT


def test_a_checkpoint_that_is_in_order(fetched: Path) -> None:
    at = machine(RTX_4090)
    assert "--verify hashes them" in found(storage.checkpoints, at)[f"model {NVFP4}"].what
    assert found(storage.hashes, at) == {} and at.folders[NVFP4] == fetched
    at.verify = True
    assert "--verify" not in found(storage.checkpoints, at)[f"model {NVFP4}"].what
    seen = found(storage.hashes, at)
    assert list(seen) == [f"hashes {NVFP4}"] and seen[f"hashes {NVFP4}"].level is Level.OK


@pytest.mark.parametrize("name", ["model.safetensors", "chat_template.jinja"])
def test_a_byte_of_a_checkpoint_is_damaged(fetched: Path, name: str) -> None:
    blob = (fetched / name).resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    at = machine(RTX_4090, verify=True)
    assert found(storage.checkpoints, at)[f"model {NVFP4}"].level is Level.OK
    seen = found(storage.hashes, at)[f"hashes {NVFP4}"]
    is_cured(seen, Level.FAIL, f"damaged on the disk: {name}", f"dgemma pull {NVFP4} --verify")
    assert NVFP4 not in at.folders and "demo" in at.folders


def test_a_checkpoint_is_cut_short(fetched: Path) -> None:
    blob = (fetched / "model.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:-1])
    seen = found(storage.checkpoints, machine(RTX_4090))[f"model {NVFP4}"]
    is_cured(seen, Level.FAIL, "model.safetensors", "fetch the file again")


def test_a_checkpoint_is_here_in_part(fetched: Path) -> None:
    (fetched / "model.safetensors").unlink()
    seen = found(storage.checkpoints, machine(RTX_4090))[f"model {NVFP4}"]
    is_cured(seen, Level.WARN, "of 18.0 GB are here", f"`dgemma pull {NVFP4}` brings the rest")


def test_the_cards_checkpoint_is_not_fetched() -> None:
    is_cured(
        found(storage.checkpoints, machine(RTX_4090))["models"], Level.WARN, f"{NVFP4}, is not fetched", "`dgemma pull`"
    )
    assert found(storage.checkpoints, machine())["models"].level is Level.SKIP


def test_a_cache_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fetched: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/cache")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", refuse)
        is_cured(
            found(storage.checkpoints, machine())[f"model {NVFP4}"], Level.FAIL, "/cache cannot be read", "permissions"
        )
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    monkeypatch.setenv("HF_HUB_CACHE", str(loop))
    for look in (storage.checkpoints, storage.disk):
        is_cured(found(look, machine())["check"], Level.FAIL, "cannot be found", "HF_HUB_CACHE")


@pytest.fixture
def own_demo(tmp_path: Path) -> Path:
    """The demo's folder, a copy that can be damaged, told by the user's table."""
    folder = tmp_path / "sudoku"
    shutil.copytree(MODELS / "sudoku", folder)
    (tmp_path / "config" / "dgemma").mkdir(parents=True)
    (tmp_path / "config" / "dgemma" / "models.toml").write_text(f'[demo]\nfolder = "{folder}"\n')
    return folder


def test_the_demos_folder_is_damaged(own_demo: Path) -> None:
    (own_demo / "tokenizer.json").write_text("{")
    at = machine()
    assert found(storage.checkpoints, at)["model demo"].level is Level.OK
    is_cured(found(storage.tokenizers, at)["text demo"], Level.FAIL, "tokenizer.json cannot be read", "fetch")
    (own_demo / "model.safetensors").write_bytes(b"\0" * 100)
    is_cured(found(storage.checkpoints, machine())["model demo"], Level.FAIL, "model.safetensors", "")
    at.torch = dict(SEES)
    is_cured(found(trial.smoke, at)["demo"], Level.FAIL, "tokenizer.json cannot be read", "fetch")


def test_templates_are_known_by_their_hash(own_demo: Path) -> None:
    at = machine()
    seen = [found(look, at) for look in (storage.checkpoints, storage.tokenizers)][1]
    digest = hashlib.sha256((own_demo / "chat_template.jinja").read_bytes()).hexdigest()
    assert seen["text demo"].facts["template_sha256"] == digest
    assert "not one of the published" in seen["text demo"].what and "the demo's" in seen["text demo-text"].what
    assert seen["text demo"].facts["markers"]["turn"] == [15, 16]


def test_the_users_table_is_broken(own_demo: Path, tmp_path: Path) -> None:
    assert found(storage.models, machine())["models"].level is Level.OK
    at = machine()
    (tmp_path / "config" / "dgemma" / "models.toml").write_text("[demo")
    is_cured(found(storage.models, at)["check"], Level.FAIL, "is not TOML", "correct that line")


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    with Hub({}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        assert found(storage.online, machine(RTX_4090))["hub"].what == "http://127.0.0.1 answers"
        server.faults.status = 503
        is_cured(found(storage.online, machine(RTX_4090))["hub"], Level.WARN, "error 503", "HTTPS_PROXY")
        server.faults.status = None
        server.faults.delay = 30
        monkeypatch.setattr(storage, "ONLINE_LIMIT", 0.1)
        is_cured(found(storage.online, machine(RTX_4090))["hub"], Level.WARN, "timed out", "network")
        server.faults.delay = 0
    assert found(storage.online, machine())["hub"].level is Level.OK  # nothing is needed
    assert found(storage.online, machine(RTX_4090, folders={NVFP4: "here"}))["hub"].level is Level.OK
    for address in ("hub.example", "https://[", "ftp://hub.example"):
        monkeypatch.setenv("HF_ENDPOINT", address)
        is_cured(found(storage.online, machine())["hub"], Level.FAIL, "is no server's address", "https://")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    is_cured(found(storage.online, machine(RTX_4090))["hub"], Level.WARN, "HF_HUB_OFFLINE is set, and", "unset it")
    assert found(storage.online, machine())["hub"].level is Level.OK


# ── kernels, and the demo ─────────────────────────────────────────────────────────────────────────────────────────


def route(*given: Any) -> ops.Routing:
    """As the kernel makes it: with items of work, and indices in int32."""
    router = ops.KERNELS["route"]
    made: ops.Routing = router.route_twin(*given, block=router.ITEM)
    return replace(made, chosen=made.chosen.int(), order=made.order.int())


def attention(*given: Any, most: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """As the kernel is called: its twin chooses no splits."""
    made: torch.Tensor = ops.KERNELS["attention"].attention_twin(*given, out=out)
    return made


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel runs here: each is its twin, on small sizes."""
    small = synthetic.small_config()
    monkeypatch.setattr(synthetic, "published_config", lambda: small)
    monkeypatch.setattr(cases, "PREFILL_CHUNK", 56)
    monkeypatch.setattr(child, "CONTEXT", 512)
    monkeypatch.setattr(ops, "why_torch", lambda device, dtype: None)
    for name, file in ops.KERNELS.items():
        monkeypatch.setattr(file, name, getattr(file, f"{name}_twin"))
    monkeypatch.setattr(ops.KERNELS["route"], "route", route)
    monkeypatch.setattr(ops.KERNELS["attention"], "attention", attention)


@pytest.mark.parametrize("name", ["rms_norm", "nvfp4_linear"])
def test_a_kernel_that_is_wrong(twins: None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at = machine(RTX_4090, torch=dict(SEES))
    seen = found(trial.kernels, at)
    assert list(seen) == ["kernels"] and seen["kernels"].level is Level.OK
    assert name in seen["kernels"].what and seen["kernels"].what.startswith("14 of 14 as their torch twins (nvfp4)")

    right = getattr(ops.KERNELS[name], name)
    monkeypatch.setattr(ops.KERNELS[name], name, lambda *given: right(*given) * 1.5)
    seen = found(trial.kernels, at)
    is_cured(seen[f"kernel {name}"], Level.FAIL, "differs from its torch twin", "in its place")
    assert seen["kernels"].what.startswith("13 of 14") and name not in seen["kernels"].what


def test_kernels_that_were_not_tried() -> None:
    outcomes = [
        {"name": "embed", "ok": True, "untested": True, "what": "untested"},
        {"name": "heads", "ok": True, "untested": False, "what": ""},
    ]
    warned, good = trial.judged(cast(Any, outcomes), "fp8")
    is_cured(warned, Level.WARN, "embed", "end what holds the card")
    assert good.what == "1 of 2 as their torch twins (fp8): heads"


@pytest.mark.parametrize(
    ("answer", "what", "cure"),
    [
        (Lost("ended by SIGSEGV"), "SIGSEGV", "DGEMMA_OPS=torch"),
        ({"error": "the kernel embed crashed", "fix": "set DGEMMA_OPS=twins"}, "embed crashed", "DGEMMA_OPS=twins"),
        ({"error": "RuntimeError: odd"}, "odd", "--json"),
    ],
)
def test_a_trial_that_ends_badly(answer: Any, what: str, cure: str) -> None:
    at = machine(RTX_4090, torch=dict(SEES), answers={"kernels": answer, "smoke": answer})
    is_cured(found(trial.kernels, at)["kernels"], Level.FAIL, what, cure)
    assert found(trial.smoke, at)["demo"].level is Level.FAIL


def test_two_steps_of_the_demo() -> None:
    at = machine(torch=dict(SEES))
    seen = found(trial.smoke, at)["demo"]
    assert seen.level is Level.OK and seen.facts["steps"] == child.STEPS and seen.facts["finite"]
    assert "the model is on cpu" in seen.what
    wrong = dict(seen.facts) | {"finite": False}
    assert found(trial.smoke, machine(torch=dict(SEES), answers={"smoke": wrong}))["demo"].level is Level.FAIL
    noticed = dict(seen.facts) | {"notices": ["kernel embed failed"]}
    assert found(trial.smoke, machine(torch=dict(SEES), answers={"smoke": noticed}))["demo"].level is Level.WARN


def test_an_easy_answer_that_takes_all_its_steps_is_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would where a router is fed wrong states: here the model's own rule of stopping is out of reach."""
    assert found(trial.smoke, machine(torch=dict(SEES)))["demo"].facts["converged"] is True
    monkeypatch.setattr(presets, "applied", lambda config, _: replace(config, confidence=0.0, steps=4))
    seen = found(trial.smoke, machine(torch=dict(SEES)))["demo"]
    is_cured(seen, Level.FAIL, "did not settle in 4 steps", "DGEMMA_OPS=torch")


def test_the_child_says_what_it_was_given() -> None:
    with Probe() as asked:
        asked.begin("torch")
        assert asked.ask("torch", 60)["version"] == torch.__version__
        assert asked.ask("wishes", 60) == {"words": []}


# ── variables, and the command ────────────────────────────────────────────────────────────────────────────────────


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "none that matter" in found(surroundings.environment, machine())["environment"].what or os.environ.get(
        "LANG"
    )
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@proxy:1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    seen = list(examine([Check("environment", surroundings.environment)], machine()))
    assert "secret" not in json.dumps([dict(each.facts) for each in seen]) + str(seen)
    assert seen[0].facts["TOKENIZERS_PARALLELISM"] == "false" and seen[0].facts["HF_TOKEN"] == "set, not shown"
    is_cured(seen[1], Level.WARN, "TRITON_INTERPRET", "unset")


def test_a_word_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGEMMA_OPS", "troch")
    seen = found(surroundings.environment, machine(torch=dict(SEES)))["environment"]
    is_cured(seen, Level.FAIL, "'troch'", "choose of: torch")
