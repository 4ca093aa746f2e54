"""Bytes that arrive damaged or stand damaged in the cache are found; a disk that is full or fails is said."""

import errno
import os
import subprocess
import sys

import pytest
from fetching import ENTRY, NAME, ROOT, SHARD, Told, blob, needed, refused, same
from fetching import server as server
from hub_server import Hub

from dgemma_local import hub
from dgemma_local.hub import cache, pull, transfer

# ── damaged ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", [SHARD, "config.json"])
def test_damaged_on_arrival_once(server: Hub, name: str) -> None:
    server.faults.wrong[server.etag(NAME, name)] = 1
    watch = Told()
    folder = hub.fetch(ENTRY, watch=watch)
    assert same(folder, needed(server))
    assert watch.lines == [f"damaged on arrival: {name}; fetching again"]


def test_damaged_on_arrival_again(server: Hub) -> None:
    server.faults.wrong[server.etag(NAME, SHARD)] = 2
    error = refused()
    assert error.what.startswith(f"{SHARD} of {NAME} arrives damaged, twice")
    assert hub.folder_of(ENTRY) is None and not blob(server, SHARD).exists()
    assert not list(blob(server, SHARD).parent.glob(f"*{cache.PARTIAL}*"))
    server.settled().clear()
    assert same(hub.fetch(ENTRY), needed(server))
    assert server.fetched() == {SHARD}  # the others were kept


@pytest.mark.parametrize("name", [SHARD, "chat_template.jinja"])
def test_damaged_on_the_disk_is_found_when_asked_for(server: Hub, name: str) -> None:
    folder = hub.fetch(ENTRY)
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= 1
    blob(server, name).write_bytes(data)
    server.settled().clear()
    hub.fetch(ENTRY)
    assert server.sent == 0  # 18 GB are not hashed on every run
    watch = Told()
    assert same(hub.fetch(ENTRY, verify=True, watch=watch), needed(server))
    assert server.fetched() == {name} and watch.lines == [f"{name} is damaged on the disk; fetching it again"]


def test_a_blob_of_another_length_is_fetched_again(server: Hub) -> None:
    folder = hub.fetch(ENTRY)
    os.truncate(blob(server, SHARD), 100)
    assert same(hub.fetch(ENTRY), needed(server)) and hub.folder_of(ENTRY) == folder


# ── on the disk ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_no_room(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "MARGIN", 1 << 60)
    server.settled().clear()
    error = refused()
    assert str(cache.root()) in error.what and "HF_HOME" in error.fix
    kilobytes = round(sum(map(len, needed(server).values())) / 1000)
    assert f"free; {kilobytes} kB are to come" in error.what
    assert server.sent == 0 and hub.held(ENTRY) == 0


def test_room_is_asked_for_what_is_missing(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.faults.budget = 12_000
    watch = Told()
    refused(act=lambda entry: hub.fetch(entry, watch=watch))
    server.faults.budget, server.faults.down = None, False
    missing = sum(map(len, needed(server).values())) - sum(watch.moved)
    free = type("usage", (), {"free": missing - 1})
    monkeypatch.setattr(pull.shutil, "disk_usage", lambda path: free)
    refused()
    free.free = missing
    assert same(hub.fetch(ENTRY), needed(server))


@pytest.mark.parametrize(
    ("number", "says"),
    [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "may not be written"), (errno.EIO, "check the disk")],
)
def test_the_disk_says_no(server: Hub, monkeypatch: pytest.MonkeyPatch, number: int, says: str) -> None:
    def fail(self: transfer.Partial) -> None:
        if sum(self.done) > 2000:
            raise OSError(number, os.strerror(number), "/the/cache")

    with monkeypatch.context() as patch:
        patch.setattr(transfer.Partial, "save", fail)
        patch.setattr(transfer, "NOTE_EVERY", 0.001)
        error = refused()
        assert says in error.what + error.fix
    assert same(hub.fetch(ENTRY), needed(server))


def test_a_full_disk_in_the_middle(server: Hub) -> None:
    """A limit on the size of files fails as a full disk does, and only there.

    Nothing is on stderr: every answer of the hub carries a warning that the library would show.
    """
    code = f"""
import resource, signal, sys
from huggingface_hub import constants
from dgemma_local import hub
from dgemma_local.errors import FetchError
from dgemma_local.hub import pull, transfer
from dgemma_local.registry import Entry
pull.MARGIN, transfer.SPAN = 0, 2000
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
try:
    hub.fetch(Entry(name="big", repository={NAME!r}))
except FetchError as error:
    print(error.what)
    sys.exit(error.exit_code)
"""
    environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (10, "")
    assert done.stdout.startswith("model-0000") and "is too large for" in done.stdout and "limit" in done.stdout
