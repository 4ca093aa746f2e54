"""Disks, checkpoints and hubs with one fault each: the doctor finds it, and names the cure."""

import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from examined import NVFP4, RTX_4090, SEES, found, is_cured, machine
from examined import nothing_of_this_machine as nothing_of_this_machine
from examined import own_demo as own_demo
from hub_server import Hub, git_sha1

from dgemma_local.demo.render import MODELS
from dgemma_local.doctor import storage, trial
from dgemma_local.doctor.finding import Level
from dgemma_local.fit import GB


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
    assert "--verify hashes what they hold" in found(storage.checkpoints, at)[f"model {NVFP4}"].what
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


def test_the_demos_folder_is_damaged(own_demo: Path) -> None:
    (own_demo / "tokenizer.json").write_text("{")
    at = machine()
    assert found(storage.checkpoints, at)["model demo"].level is Level.OK
    is_cured(found(storage.tokenizers, at)["text demo"], Level.FAIL, "tokenizer.json cannot be read", "fetch")
    (own_demo / "model.safetensors").write_bytes(b"\0" * 100)
    is_cured(found(storage.checkpoints, machine())["model demo"], Level.FAIL, "model.safetensors", "")
    at.torch = dict(SEES)
    is_cured(found(trial.smoke, at)["demo"], Level.FAIL, "tokenizer.json cannot be read", "fetch")


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_a_configuration_that_a_run_refuses(own_demo: Path, name: str) -> None:
    (own_demo / name).write_text("[]")
    at = machine()
    is_cured(found(storage.checkpoints, at)["model demo"], Level.FAIL, f"{name} is not a JSON object", "fetch")
    assert "demo" not in at.folders and "demo-text" in at.folders
    (own_demo / name).unlink()
    is_cured(found(storage.checkpoints, at)["model demo"], Level.FAIL, f"has no {name}", "whole checkpoint")


def test_end_ids_past_the_vocabulary(own_demo: Path) -> None:
    path = own_demo / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token_id": 10**6}))
    is_cured(found(storage.checkpoints, machine())["model demo"], Level.FAIL, "past the vocabulary", "unedited")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_in_a_folder_is_not_waited_for_and_costs_itself_alone(own_demo: Path, name: str) -> None:
    (own_demo / name).unlink()
    os.mkfifo(own_demo / name)
    seen = found(storage.checkpoints, machine())
    is_cured(seen["model demo"], Level.FAIL, f"{name} is not a regular file", "the whole checkpoint")
    assert seen["model demo-text"].level is Level.OK and seen["models"].level is Level.SKIP


def test_a_folder_that_hangs_costs_itself_alone(own_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = storage.refuse_special_files
    monkeypatch.setattr(storage, "DISK", 1.0)
    monkeypatch.setattr(storage, "refuse_special_files", lambda at: time.sleep(60) if at == own_demo else look(at))
    seen = found(storage.checkpoints, machine())
    is_cured(seen["model demo"], Level.FAIL, "no answer within 1 seconds", "look after that disk")
    assert seen["model demo-text"].level is Level.OK and "demo" not in seen["models"].facts["absent"]


def test_what_is_said_of_numbers_that_were_not_read(own_demo: Path) -> None:
    assert "; --verify reads what they hold" in found(storage.checkpoints, machine())["model demo"].what
    assert "--verify" not in found(storage.checkpoints, machine(verify=True))["model demo"].what


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
