"""The cache that huggingface_hub shares: served without a hub, links, copies held and removed, and where it is."""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from fetching import ENTRY, NAME, SHARD, Told, blob, needed, offline, point, python, refused, same
from fetching import server as server
from hub_server import COMMIT, Hub, Repository, checkpoint

from dgemma_local import hub
from dgemma_local.checkpoint import INDEX
from dgemma_local.hub import cache
from dgemma_local.registry import Entry

# ── without the hub ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("revision", [COMMIT, None, "main"])
def test_offline_a_complete_copy_serves(server: Hub, monkeypatch: pytest.MonkeyPatch, revision: str | None) -> None:
    entry = replace(ENTRY, revision=revision)
    folder = hub.fetch(entry)
    server.settled().clear()
    offline(monkeypatch)
    watch = Told()
    assert hub.fetch(entry, watch=watch) == hub.folder_of(entry) == folder and not server.log
    assert "HF_HUB_OFFLINE is set" in watch.lines[0] and watch.lines[0].endswith("the copy here is complete")


def test_offline_without_a_copy(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    offline(monkeypatch)
    for act in (hub.fetch, hub.remote_checkpoint):
        error = refused(act=act)
        assert "HF_HUB_OFFLINE" in error.what and "unset" in error.fix
    assert not server.log


def test_offline_the_copy_can_be_verified(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub.fetch(ENTRY)
    offline(monkeypatch)
    assert hub.fetch(ENTRY, verify=True) == folder
    data = bytearray(blob(server, SHARD).read_bytes())
    data[7000] ^= 1
    blob(server, SHARD).write_bytes(data)
    error = refused(act=lambda entry: hub.fetch(entry, verify=True))
    assert SHARD in error.what and "`dgemma pull big --verify`" in error.fix


def test_a_hub_that_is_gone(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub.fetch(ENTRY)
    server.faults.status = 503
    assert hub.fetch(ENTRY) == folder
    error = refused(replace(ENTRY, revision="main"))
    assert "(503)" in error.what and "what arrived is kept" in error.fix
    point(monkeypatch, "http://127.0.0.1:9")
    assert hub.fetch(ENTRY) == folder
    assert "cannot be reached" in refused(replace(ENTRY, revision="main")).what


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", SHARD, "model.safetensors.index.json"])
def test_a_copy_that_lacks_a_file_is_not_complete(server: Hub, name: str) -> None:
    folder = hub.fetch(ENTRY)
    (folder / name).unlink()
    assert hub.folder_of(ENTRY) is None
    server.settled().clear()
    assert hub.fetch(ENTRY) == folder == hub.folder_of(ENTRY) and server.sent == 0  # the blob is still there


def test_an_index_that_is_a_pipe_is_not_waited_for(server: Hub) -> None:
    folder = hub.fetch(ENTRY)
    (folder / INDEX).unlink()
    os.mkfifo(folder / INDEX)
    assert cache.shards(folder) is None and hub.folder_of(ENTRY) is None


def test_a_broken_link_is_not_a_file(server: Hub) -> None:
    folder = hub.fetch(ENTRY)
    blob(server, SHARD).unlink()
    assert hub.folder_of(ENTRY) is None
    assert hub.fetch(ENTRY) == folder == hub.folder_of(ENTRY)


def test_another_revision_is_another_copy(server: Hub) -> None:
    hub.fetch(ENTRY)
    assert hub.folder_of(replace(ENTRY, revision="e" * 40)) is None
    assert hub.folder_of(replace(ENTRY, revision="main")) is None  # never asked for, so not known
    assert hub.folder_of(replace(ENTRY, revision=None)) is not None  # any copy serves
    assert hub.folder_of(Entry(name="mine", folder=Path())) is None


def test_a_reference_is_never_a_path(server: Hub) -> None:
    hub.fetch(ENTRY)
    copy = cache.root() / "elsewhere"
    shutil.copytree(hub.fetch(ENTRY), copy)
    for text in ("../../elsewhere", str(copy), "", "\0", "main"):
        refs = cache.repository(ENTRY) / "refs"
        refs.mkdir(exist_ok=True)
        (refs / "main").write_text(text)
        assert hub.folder_of(replace(ENTRY, revision="main")) is None


def test_a_link_out_of_the_cache_is_refused(server: Hub, tmp_path: Path) -> None:
    folder = hub.fetch(ENTRY)
    (tmp_path / "other").write_text("{}")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(tmp_path / "other")
    error = refused(act=hub.folder_of)
    assert str(folder / "config.json") in error.what and "`dgemma pull big`" in error.fix
    assert same(hub.fetch(ENTRY), needed(server)) and hub.folder_of(ENTRY) == folder  # linked to its blob again
    (tmp_path / "weights").write_bytes(blob(server, SHARD).read_bytes())
    blob(server, SHARD).unlink()
    blob(server, SHARD).symlink_to(tmp_path / "weights")
    assert str(tmp_path / "weights") in refused().what


def test_links_inside_the_cache_are_followed(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub.fetch(ENTRY)
    shared = cache.root() / "blobs" / "ab"  # huggingface_hub's store for all repositories
    shared.mkdir(parents=True)
    moved = blob(server, SHARD).rename(shared / ("ab" * 32))
    blob(server, SHARD).symlink_to(moved)
    assert hub.folder_of(ENTRY) == folder
    (tmp_path / "elsewhere").symlink_to(cache.root())
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    assert hub.folder_of(ENTRY) == folder


# ── a cache that cannot be read ───────────────────────────────────────────────────────────────────────────────────


def test_a_cache_that_cannot_be_read(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.fetch(ENTRY)

    def forbidden(path: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", forbidden)
    monkeypatch.setattr(Path, "rglob", forbidden)
    for act in (hub.folder_of, hub.held):
        error = refused(act=act)
        assert "cannot be read: Permission denied" in error.what and "HF_HOME" in error.fix


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME"])
def test_a_cache_that_is_a_link_to_itself(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv(variable, str(loop))
    for act in (hub.fetch, hub.folder_of, hub.held, hub.remove, hub.remote_checkpoint):
        error = refused(act=act)
        assert str(loop) in error.what and "HF_HOME" in error.fix


def test_a_file_that_is_a_link_to_itself(server: Hub) -> None:
    for name in (SHARD, "generation_config.json"):
        path = hub.fetch(ENTRY) / name
        for link in (path, blob(server, name)):
            link.unlink()
            link.symlink_to(link)
            assert hub.held(ENTRY) > 0
            assert same(hub.fetch(ENTRY), needed(server))
        path.unlink()
        path.symlink_to(path)
        assert hub.remove(ENTRY) > 0 and hub.held(ENTRY) == 0


def test_a_current_folder_that_is_gone(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "cache")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "'cache' cannot be found" in refused(act=hub.folder_of).what


# ── held and removed ──────────────────────────────────────────────────────────────────────────────────────────────


def test_held_and_removed(server: Hub) -> None:
    assert hub.held(ENTRY) == 0 and hub.held(Entry(name="mine", folder=Path())) == 0
    folder = hub.fetch(ENTRY)
    size = sum(map(len, needed(server).values()))
    assert hub.held(ENTRY) == size
    assert hub.remove(ENTRY) == size
    assert not folder.exists() and hub.folder_of(ENTRY) is None and hub.held(ENTRY) == 0
    assert not cache.repository(ENTRY).exists()


def test_a_fetch_that_was_cut_is_held_and_removed(server: Hub) -> None:
    server.repositories[NAME].files = checkpoint(rows=20_000)
    server.faults.budget = 9000
    refused()
    assert 0 < hub.held(ENTRY) < 500_000  # in blocks; the files have 5 MB
    assert hub.remove(ENTRY) > 0
    assert hub.held(ENTRY) == 0 and not cache.repository(ENTRY).exists()


def test_another_revision_keeps_its_files(server: Hub) -> None:
    hub.fetch(ENTRY)
    files = server.repositories[NAME].files | {"config.json": b'{"new": 1}'}
    server.repositories[NAME] = Repository(files, commit="d" * 40)
    other = replace(ENTRY, revision="d" * 40)
    folder = hub.fetch(other)
    old = len(checkpoint()["config.json"])
    assert hub.remove(ENTRY) == old
    assert hub.folder_of(ENTRY) is None and hub.folder_of(other) == folder and same(folder, needed(server))


def test_what_cannot_be_removed_is_said(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.fetch(ENTRY)
    monkeypatch.setattr("shutil.rmtree", lambda path: (_ for _ in ()).throw(PermissionError(13, "no")))
    assert "could not be removed" in refused(act=hub.remove).what


# ── at import ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_light_at_import() -> None:
    code = (
        "import sys, dgemma_local.hub; print({'torch', 'transformers', 'huggingface_hub', 'rich'} & set(sys.modules))"
    )
    assert python(code) == "set()"


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"XDG_CACHE_HOME": "/x"},
        {"HF_HOME": "~/h", "XDG_CACHE_HOME": "/x"},
        {"HF_HOME": "/h", "HUGGINGFACE_HUB_CACHE": "/old"},
        {"HF_HUB_CACHE": "$HOME/c", "HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/h"},
        {"HF_HOME": ""},
    ],
)
def test_the_cache_is_where_huggingface_hub_has_it(variables: dict[str, str]) -> None:
    code = "from pathlib import Path; from dgemma_local import hub; ours = hub.root(); "
    code += "from huggingface_hub.constants import HF_HUB_CACHE as c; print(ours == Path(c).resolve(), ours)"
    assert python(code, HOME="/home/me", **variables).startswith("True /")
