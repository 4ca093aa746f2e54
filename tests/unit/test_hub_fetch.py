"""Fetching from a hub on this machine: the needed files and no other; cut anywhere, and taken up again where it was."""

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fetching import ENTRY, NAME, NEEDED, ROOT, SHARD, Told, blob, needed, refused, same
from fetching import server as server
from filelock import FileLock
from hub_server import COMMIT, Hub, Repository, checkpoint
from huggingface_hub import hf_hub_download, scan_cache_dir, snapshot_download

from dgemma_local import hub
from dgemma_local.checkpoint import open_checkpoint
from dgemma_local.errors import FetchError
from dgemma_local.hub import cache, pull, transfer
from dgemma_local.registry import FILES

KNOWN = "google/diffusiongemma-26B-A4B-it"  # to the command line, by models.toml


# ── a whole fetch ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_needed_files_and_no_other(server: Hub) -> None:
    watch = Told()
    folder = hub.fetch(ENTRY, watch=watch)
    assert folder == cache.root() / "models--org--model" / "snapshots" / COMMIT
    assert {path.name for path in folder.iterdir()} == NEEDED == server.fetched()
    assert same(folder, needed(server))
    size = sum(map(len, needed(server).values()))
    assert server.sent == size  # each byte once
    weights = sum(len(data) for name, data in needed(server).items() if name.endswith(".safetensors"))
    assert watch.tasks == [("fetching", size, 0), ("verifying", weights, 0)] and sum(watch.moved) == size + weights
    assert len(open_checkpoint(folder).tensors) == 4


def test_one_file_leaves_other_tensors_behind(server: Hub) -> None:
    files = checkpoint(0) | {"consolidated.safetensors": b"x", "model.bin": b"x"}
    server.repositories[NAME] = Repository(files)
    folder = hub.fetch(ENTRY)
    assert {path.name for path in folder.glob("*.safetensors")} == {"model.safetensors"}
    assert not list(folder.glob("*.bin"))


def test_a_pickle_is_not_fetched_when_asked_for(server: Hub) -> None:
    folder = hub.fetch(replace(ENTRY, files=(*FILES, "*.bin", "README.md")))
    assert {path.name for path in folder.iterdir()} == NEEDED | {"README.md"}


def test_the_second_time_nothing_moves(server: Hub) -> None:
    first = hub.fetch(ENTRY)
    server.settled().clear()
    assert hub.fetch(ENTRY) == first
    assert [request.path for request in server.settled()] == [f"/api/models/{NAME}/revision/{COMMIT}"]


def test_other_tools_find_it(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub.fetch(replace(ENTRY, revision=None))
    info = scan_cache_dir(cache.root())
    (repository,) = info.repos
    (revision,) = repository.revisions
    assert not info.warnings and not list(cache.root().glob("*/blobs/*incomplete*"))
    assert repository.repo_id == NAME and revision.refs == {"main"} and revision.nb_files == len(NEEDED)
    assert {path.parent.name for file in revision.files for path in [file.blob_path]} == {"blobs"}
    kept = {"cache_dir": cache.root(), "local_files_only": True}
    assert Path(snapshot_download(NAME, **kept)) == folder


def test_what_another_tool_fetched_is_not_fetched_again(server: Hub) -> None:
    for name in NEEDED:
        hf_hub_download(NAME, name, revision=COMMIT, cache_dir=cache.root())
    server.settled().clear()
    assert hub.folder_of(ENTRY) == hub.fetch(ENTRY)
    assert server.sent == 0


def test_a_new_commit_brings_what_changed(server: Hub) -> None:
    entry = replace(ENTRY, revision=None)
    hub.fetch(entry)
    files = server.repositories[NAME].files | {"config.json": b'{"new": 1}'}
    server.repositories[NAME] = Repository(files, commit="d" * 40)
    server.settled().clear()
    folder = hub.fetch(entry)
    assert folder.name == "d" * 40 and same(folder, needed(server))
    assert server.sent == len(b'{"new": 1}') and hub.folder_of(entry) == folder


def test_the_token_goes_to_the_hub(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.repositories[NAME].token = "secret"
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub.fetch(ENTRY)
    to_hub = [request for request in server.settled() if not request.path.startswith("/cdn/")]
    assert {request.token for request in to_hub} == {"Bearer secret"}
    assert {request.token for request in server.log if request not in to_hub} == {None}


def test_xet_storage_is_not_needed(server: Hub) -> None:
    server.faults.xet = True
    assert same(hub.fetch(ENTRY), needed(server))


def test_a_disk_without_links(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", no_links)
    folder = hub.fetch(ENTRY)
    assert same(folder, needed(server)) and not any(path.is_symlink() for path in folder.iterdir())
    server.settled().clear()
    assert hub.fetch(ENTRY) == hub.folder_of(ENTRY) == folder and server.sent == 0


def test_the_weights_are_linked_last(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a snapshot that has them has the small files, too, wherever a run is ended."""
    linked: list[str] = []
    link = pull.Store.link
    monkeypatch.setattr(pull.Store, "link", lambda self, file: (linked.append(file.name), link(self, file)))
    hub.fetch(ENTRY)
    assert set(linked) == NEEDED and set(linked[-2:]) == {name for name in NEEDED if name.endswith(".safetensors")}


def test_one_fetch_at_a_time(server: Hub) -> None:
    watch = Told()
    lock = cache.root() / ".locks" / "models--org--model" / "dgemma.lock"
    lock.parent.mkdir(parents=True)
    found: list[Path] = []
    with FileLock(lock):
        thread = threading.Thread(target=lambda: found.append(hub.fetch(ENTRY, watch=watch)))
        thread.start()
        while not watch.lines and thread.is_alive():
            time.sleep(0.01)
        assert watch.lines == ["another dgemma fetches this; waiting for it"] and server.sent == 0
    thread.join()
    assert same(found[0], needed(server))


# ── cut and taken up again ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_anywhere_is_taken_up_where_it_was(server: Hub, seed: int) -> None:
    total = sum(map(len, needed(server).values()))
    server.faults.budget = random.Random(seed).randrange(1, total)
    watch = Told()
    with pytest.raises(FetchError) as caught:
        hub.fetch(ENTRY, watch=watch)
    assert "what arrived is kept; run the same command to go on" in caught.value.fix
    arrived = sum(watch.moved)
    assert arrived <= server.sent and hub.folder_of(ENTRY) is None

    server.faults.budget, server.faults.down = None, False
    server.settled().clear()
    again = Told()
    assert same(hub.fetch(ENTRY, watch=again), needed(server))
    assert server.sent == total - arrived  # the missing bytes, and no other
    task, size, done = again.tasks[0]
    assert task == "fetching" and size - done == total - arrived
    files = [request for request in server.log if "/resolve/" in request.path]
    assert all(request.range and request.range.startswith("bytes=") for request in files)


def test_a_broken_connection_is_taken_up_in_the_same_run(server: Hub) -> None:
    server.faults.statuses = [503, 429, 500]
    etag = server.etag(NAME, SHARD)
    server.faults.short[etag] = 3500
    watch = Told()
    assert "org/model" not in refused(act=lambda e: hub.fetch(e, watch=watch)).what  # it never comes: named below
    del server.faults.short[etag]
    server.faults.statuses = [503, 502]
    assert same(hub.fetch(ENTRY, watch=watch), needed(server))
    assert "the connection broke; asking again for what is missing" in watch.lines


def test_every_attempt_that_brings_bytes_counts_anew(server: Hub) -> None:
    server.faults.stride = 300  # a file of 8 kB takes 28 attempts, and 2 in vain would end it
    assert same(hub.fetch(ENTRY), needed(server))


def test_half_a_shard(server: Hub) -> None:
    server.faults.short[server.etag(NAME, SHARD)] = 4000
    error = refused()
    assert "broke" in error.what and "what arrived is kept" in error.fix
    assert hub.folder_of(ENTRY) is None and not blob(server, SHARD).exists()


def test_a_note_that_does_not_fit_is_worth_nothing(server: Hub) -> None:
    partial = blob(server, SHARD).with_name(blob(server, SHARD).name + cache.PARTIAL)
    note = partial.with_name(partial.name + ".txt")
    size = len(needed(server)[SHARD])
    spans = [3000] * (size // 3000) + [size % 3000]
    for text, length in [
        ("x", size),
        ("9" * 5000, size),
        (f"3000 {size} 3000", size),  # too few spans
        (f"0 {size} 0", size),
        (f"3000 {size} -1 3000 3000", size),
        (" ".join(map(str, (3000, size, *spans))), size - 1),  # a file that something else has cut
    ]:
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(b"\1" * length)
        note.write_text(text)
        watch = Told()
        assert same(hub.fetch(ENTRY, watch=watch), needed(server)) and not watch.lines
        assert not partial.exists() and not note.exists()
        blob(server, SHARD).unlink()


def test_spans_of_another_size_are_taken_up(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.faults.budget = 9000
    watch = Told()
    refused(act=lambda entry: hub.fetch(entry, watch=watch))
    server.faults.budget, server.faults.down = None, False
    server.settled().clear()
    monkeypatch.setattr(transfer, "SPAN", 100_000)
    assert same(hub.fetch(ENTRY), needed(server))
    assert server.sent == sum(map(len, needed(server).values())) - sum(watch.moved)


def test_ctrl_c_keeps_what_arrived(server: Hub) -> None:
    class Press(Told):
        def advance(self, count: int) -> None:
            super().advance(count)
            if sum(self.moved) > 5000:
                raise KeyboardInterrupt  # in a thread: it ends the fetch as in the main one

    watch = Press()
    with pytest.raises(KeyboardInterrupt):
        hub.fetch(ENTRY, watch=watch)
    held = hub.held(ENTRY)
    assert held > 0
    server.settled().clear()
    assert same(hub.fetch(ENTRY), needed(server))
    total = sum(map(len, needed(server).values()))
    assert total - 2 * sum(watch.moved) < server.sent < total


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_fetch_that_is_ended_from_outside(server: Hub, number: int, code: int) -> None:
    server.faults.pace = 0.02
    source = f"""
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits SIG_IGN
import typer
from dgemma_local.cli import Commands
from dgemma_local.cli_models import app_models, pull
from dgemma_local.hub import pull as pulling, transfer
pulling.MARGIN, transfer.SPAN, transfer.NOTE_EVERY = 0, 3000, 0.02
app = typer.Typer(cls=Commands)
app.add_typer(app_models, name="models")
app.command()(pull)
app(["pull", {KNOWN!r}, "--revision", {COMMIT!r}])
"""
    server.repositories[KNOWN] = server.repositories[NAME]
    entry = replace(ENTRY, repository=KNOWN)
    environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_HUB_DISABLE_TELEMETRY": "1"}
    child = subprocess.Popen(
        [sys.executable, "-c", source], env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    notes = cache.repository(entry) / "blobs"
    while sum(int(n) for note in notes.glob("*.txt") for n in note.read_text().split()[2:]) < 1000:
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(number)
    said = child.communicate()[1]
    assert child.returncode == code and "Traceback" not in said
    if number == signal.SIGINT:
        assert said.endswith("what arrived is kept; run the same command to go on\ninterrupted\n")
        assert "broke" not in said
    server.faults.pace = 0.0
    server.settled().clear()
    assert same(hub.fetch(entry), needed(server))
    assert 0 < server.sent < sum(map(len, needed(server).values())) - 1000


def test_a_server_without_ranges(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.faults.ranges = False
    assert "sends all of" in refused().what
    monkeypatch.setattr(transfer, "SPAN", 1 << 20)  # files of one span need none
    hub.remove(ENTRY)
    assert same(hub.fetch(ENTRY), needed(server))


def test_a_server_that_answers_another_range(server: Hub) -> None:
    server.faults.offset = 1
    assert "answers bytes" in refused().what
