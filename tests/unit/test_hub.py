"""Fetching from a hub on this machine: whole, cut, damaged, refused."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock
from hub_server import COMMIT, Hub, Repository, checkpoint
from huggingface_hub import close_session, constants, hf_hub_download, scan_cache_dir, snapshot_download

from dgemma_local import hub
from dgemma_local.checkpoint import INDEX, Checkpoint, open_checkpoint
from dgemma_local.errors import CheckpointError, FetchError
from dgemma_local.hub import cache, pull, transfer
from dgemma_local.registry import FILES, Entry

ROOT = Path(__file__).parents[2]
NAME = "org/model"
KNOWN = "google/diffusiongemma-26B-A4B-it"  # to the command line, by models.toml
ENTRY = Entry(name="big", repository=NAME, revision=COMMIT)
NEEDED = {
    *(n for n in checkpoint() if n.endswith(".safetensors") and "/" not in n),
    *(n for n in FILES if not n.startswith("*")),
}


class Told(hub.Watch):
    """Remembers what a fetch tells."""

    def __init__(self) -> None:
        self.tasks: list[tuple[str, int, int]] = []
        self.moved: list[int] = []
        self.lines: list[str] = []

    def start(self, task: str, total: int, done: int) -> None:
        self.tasks.append((task, total, done))

    def advance(self, count: int) -> None:
        self.moved.append(count)

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGING")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(transfer, "WAITS", (0.0, 0.0))
    monkeypatch.setattr(transfer, "SPAN", 3000)
    monkeypatch.setattr(transfer, "CONNECTIONS", 4)
    monkeypatch.setattr(pull, "MARGIN", 0)
    monkeypatch.setattr(os, "fsync", lambda number: None)  # a busy disk takes its time
    with Hub({NAME: Repository(checkpoint())}) as running:
        point(monkeypatch, running.url)
        yield running
    close_session()


def point(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """What HF_ENDPOINT does at import."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def refused(entry: Entry = ENTRY, act: Callable[[Entry], object] = hub.fetch) -> FetchError:
    with pytest.raises(FetchError) as caught:
        act(entry)
    error = caught.value
    assert error.exit_code == 10
    assert "\n" not in error.what + error.fix and len(error.what) < 300 and error.fix
    return error


def same(folder: Path, files: dict[str, bytes]) -> bool:
    return all((folder / name).read_bytes() == data for name, data in files.items())


def needed(server: Hub) -> dict[str, bytes]:
    return {name: data for name, data in server.repositories[NAME].files.items() if name in NEEDED}


def blob(server: Hub, name: str) -> Path:
    return cache.repository(ENTRY) / "blobs" / server.etag(NAME, name)


SHARD = "model-00001-of-00002.safetensors"


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


# ── without the hub ───────────────────────────────────────────────────────────────────────────────────────────────


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


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


# ── refused ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_gated(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.repositories[NAME].gated = True
    error = refused()
    assert error.what == "org/model is gated: its licence has to be accepted first"
    assert error.fix == f"accept it at {server.url}/org/model, then run `hf auth login` or set HF_TOKEN"
    monkeypatch.setenv("HF_TOKEN", "mine")
    assert "the account whose token is used" in refused().fix
    assert "gated" in refused(act=hub.remote_checkpoint).what


def test_no_repository_or_a_private_one(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for token in (None, "mine"):
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        error = refused(replace(ENTRY, repository="org/nothing"))
        assert error.what == "there is no repository org/nothing, or it is private"
        assert "HF_TOKEN" in error.fix


def test_a_token_that_is_refused(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "expired")
    error = refused()
    assert "token was refused" in error.what and "expired" not in error.what + error.fix


def test_no_revision(server: Hub) -> None:
    assert refused(replace(ENTRY, revision="v9")).what == "org/model has no revision 'v9'"
    assert "not the name of a revision" in refused(replace(ENTRY, revision="../main")).what
    assert not server.fetched()


def test_a_file_that_is_listed_and_gone(server: Hub) -> None:
    server.faults.missing = {"config.json"}
    error = refused()
    assert error.what == f"org/model lists a file 'config.json', and {server.url} does not have it (404)"
    assert error.fix == "give another revision, or try later"  # the same command would end the same way


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (403, "does not allow"),
        (407, "proxy wants a login"),
        (404, "answers 404"),
        (429, "fewer requests"),
        (500, "(500)"),
        (503, "(503)"),
    ],
)
def test_statuses(server: Hub, status: int, says: str) -> None:
    server.faults.status = status
    assert says in refused().what


def test_no_name_is_a_repository(server: Hub) -> None:
    assert "is not the name of a repository" in refused(replace(ENTRY, repository="a/b/c")).what


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://127.0.0.1:9", "cannot be reached"),
        ("http://no.such.host.invalid", "cannot be reached"),
        ("127.0.0.1:9", "not a server's address"),
        ("http://127.0.0.1:port", "not a server's address"),
    ],
)
def test_no_network(server: Hub, monkeypatch: pytest.MonkeyPatch, url: str, says: str) -> None:
    point(monkeypatch, url)
    assert says in refused().what


def test_tls(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    point(monkeypatch, server.url.replace("http:", "https:"))
    assert "certificate" in refused().what


@pytest.mark.parametrize(
    ("value", "says"),
    [("http://127.0.0.1:9", "cannot be reached"), ("nonsense://x", "proxy"), ("socks5://127.0.0.1:9", "SOCKS")],
)
def test_proxies(server: Hub, monkeypatch: pytest.MonkeyPatch, value: str, says: str) -> None:
    close_session()
    monkeypatch.setenv("http_proxy", value)
    assert says in refused().what


@pytest.mark.parametrize(
    "url",
    ["http://[::bad", "http://127.0.0.1:99999", "http://h:port", "http://", "", "ftp://h", "http://a..b", "h" * 999],
)
def test_an_endpoint_that_is_no_address(server: Hub, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", url)
    for act in (hub.fetch, hub.remote_checkpoint, hub.remove):
        error = refused(act=act)
        assert "is not a server's address" in error.what and "correct HF_ENDPOINT" in error.fix
    assert not server.log


def test_such_an_endpoint_is_found_before_the_library_fails_on_stdout() -> None:
    code = """
from dgemma_local import hub
from dgemma_local.errors import FetchError
from dgemma_local.registry import Entry
try:
    hub.fetch(Entry(name="big", repository="org/model"))
except FetchError as error:
    print(error.what)
"""
    assert python(code, HF_ENDPOINT="http://[::bad") == "'http://[::bad' is not a server's address"


@pytest.mark.parametrize("url", ["http://[::1]:9", "HTTP://127.0.0.1:9/", "http://localhost:9/hub"])
def test_an_endpoint_that_is_an_address(server: Hub, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", url)
    assert same(hub.fetch(ENTRY), needed(server))  # the library has read another one, at import


@pytest.mark.parametrize("token", ["hf_\N{RIGHT DOUBLE QUOTATION MARK}x", "hf é", "hf_\tx", "hf_\x01", "hf_\udcff"])
def test_a_token_that_cannot_be_sent(server: Hub, monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    folder = hub.fetch(ENTRY)
    monkeypatch.setenv("HF_TOKEN", token)
    error = refused()
    assert error.what == "the Hugging Face token holds characters that no token has" and "HF_TOKEN" in error.fix
    offline(monkeypatch)
    assert hub.fetch(ENTRY) == folder  # none is sent


def test_a_token_file_that_is_not_text(server: Hub, tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"hf_\xff")
    assert "characters that no token has" in refused().what


def test_a_proxy_that_wants_a_login(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    close_session()
    monkeypatch.setenv("https_proxy", server.url)
    server.faults.status = 407
    point(monkeypatch, "https://no.such.host.invalid")
    error = refused()
    assert error.what == "the proxy wants a login (407)" and "HTTPS_PROXY=http://user:password@" in error.fix


def test_a_proxy_that_refuses(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    close_session()
    monkeypatch.setenv("https_proxy", server.url)  # does not know CONNECT
    point(monkeypatch, "https://no.such.host.invalid")
    assert "proxy refuses" in refused().what


def test_no_answer_in_time(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.05)
    server.faults.delay = 0.3
    assert "does not answer in time" in refused().what


@pytest.mark.parametrize("body", [b"<html>Please log in</html>", b"[]", b"{}", b'{"siblings": [{}]}', b"null"])
def test_a_login_page_instead_of_a_hub(server: Hub, body: bytes) -> None:
    server.faults.body = body
    assert "does not answer as the hub does" in refused().what


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


# ── what is listed cannot be trusted ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "name",
    [
        "../config.json",
        "a/../../config.json",
        "/etc/config.json",
        "a\\config.json",
        "config\n.json",
        "a//b",
        "\x1b[2J",
        ".",
    ],
)
def test_names_that_lead_elsewhere(server: Hub, name: str) -> None:
    server.faults.names = {"README.md": name}
    error = refused()
    assert repr(name) in error.what and error.what.isprintable()
    assert refused(act=hub.remote_checkpoint).what == error.what
    assert server.sent == 0


def test_nothing_but_pickles(server: Hub) -> None:
    kept = {name: data for name, data in checkpoint().items() if ".safetensors" not in name}
    server.repositories[NAME].files = kept
    error = refused()
    assert "pickles alone (pytorch_model.bin)" in error.what and server.sent == 0
    del kept["pytorch_model.bin"]
    assert refused().what == "org/model has no safetensors"


def test_a_hash_is_needed_and_becomes_a_path(server: Hub) -> None:
    for value in ("../../../x", "A" * 64, "a" * 63, ""):
        server.faults.hashes = {SHARD: value}
        assert "without a size and a hash" in refused().what
    server.faults.hashes, server.faults.no_hash = {}, True
    assert "without a size and a hash" in refused().what


def test_a_commit_becomes_a_path(server: Hub) -> None:
    server.repositories[NAME].commit = "../../x"
    assert "does not answer as the hub does" in refused(replace(ENTRY, revision=None)).what


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-00002-of-00002.safetensors"])
def test_a_repository_that_is_not_whole(server: Hub, name: str) -> None:
    del server.repositories[NAME].files[name]
    server.settled().clear()
    for act in (hub.fetch, hub.remote_checkpoint):
        assert refused(act=act).what == f"{NAME} has no {name}, so it is not a whole checkpoint"
    assert not any(name.endswith(".safetensors") for name in server.fetched())
    assert name.endswith(".safetensors") or not server.fetched()


def index(*names: str) -> bytes:
    return json.dumps({"weight_map": {f"t{n}": name for n, name in enumerate(names)}}).encode()


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        (INDEX, b"[[[", f"has an {INDEX} that names no files"),
        (INDEX, b"{}", f"has an {INDEX} that names no files"),
        (INDEX, index(SHARD, "../../../x.safetensors"), "'../../../x.safetensors', which is no safetensors file"),
        (INDEX, index(SHARD, "original/model.safetensors"), "'original/model.safetensors', which is no safetensors"),
        (INDEX, index(SHARD, "\x1b[2J.safetensors"), "which is no safetensors file beside it"),
        (INDEX, index(SHARD, "x" * 5000 + ".safetensors"), "which is no safetensors file beside it"),
        (INDEX, index(SHARD, "config.json"), "'config.json', which is no safetensors file"),
        (INDEX, index(SHARD, "a.safetensors"), "has no a.safetensors, so it is not a whole"),
        ("config.json", b"{", "no config.json that can be read"),
    ],
)
def test_small_files_are_checked_before_the_weights_come(server: Hub, name: str, data: bytes, says: str) -> None:
    server.repositories[NAME].files[name] = data
    for act in (hub.fetch, hub.remote_checkpoint):
        error = refused(act=act)
        assert says in error.what and error.what.isprintable()
    assert not any(name.endswith(".safetensors") for name in server.fetched())
    assert not list(cache.repository(ENTRY).glob(f"blobs/*{cache.PARTIAL}*"))  # nor is there anything to go on with


def test_neither_one_file_nor_an_index(server: Hub) -> None:
    del server.repositories[NAME].files[INDEX]
    assert refused().what == f"{NAME} has no model.safetensors, so it is not a whole checkpoint"
    assert server.sent == 0


def test_an_index_beside_one_file_is_not_read(server: Hub) -> None:
    server.repositories[NAME].files = checkpoint(0) | {INDEX: b"[[["}
    assert len(open_checkpoint(hub.fetch(ENTRY)).tensors) == 2


def test_two_files_of_one_content(server: Hub) -> None:
    server.repositories[NAME].files["generation_config.json"] = b"{}"  # as tokenizer_config.json
    assert same(hub.fetch(ENTRY), needed(server))


# ── headers alone ─────────────────────────────────────────────────────────────────────────────────────────────────


def facts(found: Checkpoint) -> dict[str, tuple[str, tuple[int, ...], str, int, int]]:
    return {t.name: (t.dtype, t.shape, t.file.name, t.nbytes, t.begin) for t in found.tensors.values()}


@pytest.mark.parametrize("shards", [0, 3])
def test_headers_are_read_from_the_hub(server: Hub, monkeypatch: pytest.MonkeyPatch, shards: int) -> None:
    server.repositories[NAME].files = checkpoint(shards, rows=2000)
    monkeypatch.setattr(transfer, "SPAN", 1 << 20)
    found = hub.remote_checkpoint(ENTRY)
    total = sum(len(data) for name, data in server.repositories[NAME].files.items())
    assert 0 < server.sent < total / 100
    assert (found.folder / "config.json").is_file() and hub.folder_of(ENTRY) is None
    local = open_checkpoint(hub.fetch(ENTRY))
    assert facts(found) == facts(local) and found.folder == local.folder and found.bytes == local.bytes


def test_a_server_without_ranges_is_cut_short(server: Hub) -> None:
    server.repositories[NAME].files = checkpoint(0, rows=100_000)
    server.faults.ranges = False
    assert len(hub.remote_checkpoint(ENTRY).tensors) == 2
    assert server.sent < 12_800_000  # it stops sending when nobody listens


def test_the_quantisation_comes_along(server: Hub) -> None:
    server.repositories[NAME].files["config.json"] = b'{"quantization_config": {"quant_method": "modelopt"}}'
    assert hub.remote_checkpoint(ENTRY).quantisation == {"quant_method": "modelopt"}


def test_remote_headers_that_lie(server: Hub) -> None:
    files = server.repositories[NAME].files
    good = dict(files)
    other = "model-00002-of-00002.safetensors"
    for name, data, error in [
        (SHARD, b"version https://git-lfs", CheckpointError),
        (SHARD, good[SHARD] + b"x", CheckpointError),
        (SHARD, good[SHARD][:-1], CheckpointError),
        (SHARD, good[SHARD][:20], CheckpointError),
        (other, good[SHARD], CheckpointError),  # each tensor twice
        ("config.json", b"{", FetchError),
        ("model.safetensors.index.json", b"{}", FetchError),
    ]:
        files[name] = data
        with pytest.raises(error):
            hub.remote_checkpoint(ENTRY)
        files[name] = good[name]
    del files[other]
    assert f"has no {other}" in refused(act=hub.remote_checkpoint).what


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


def python(code: str, **environment: str) -> str:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING", "XDG_"))}
    return subprocess.run(
        [sys.executable, "-c", code], check=True, env=clean | environment, cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()


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
