"""What a hub lists or says of its files is not trusted: names, hashes, commits, indices, and headers read alone."""

import json
from dataclasses import replace

import pytest
from fetching import ENTRY, NAME, SHARD, needed, refused, same
from fetching import server as server
from hub_server import Hub, checkpoint

from dgemma_local import hub
from dgemma_local.checkpoint import INDEX, Checkpoint, open_checkpoint
from dgemma_local.errors import CheckpointError, FetchError
from dgemma_local.hub import cache, transfer

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
