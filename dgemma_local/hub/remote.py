"""What a checkpoint holds, before it is fetched: headers read from the hub, a few MB of many GB.

config.json, the index     brought into the cache, as a fetch would
each weight file           8 bytes, then the header they announce, by range requests
"""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dgemma_local.checkpoint import SINGLE, Checkpoint, TensorInfo, header_length, parse_header, quantisation_of
from dgemma_local.errors import CheckpointError, FetchError
from dgemma_local.hub import cache
from dgemma_local.hub.failures import told
from dgemma_local.hub.listing import Listing, RemoteFile, address, headers, listing
from dgemma_local.hub.pull import bring_small
from dgemma_local.hub.transfer import CONNECTIONS, first_bytes
from dgemma_local.registry import Entry


def remote_checkpoint(entry: Entry) -> Checkpoint:
    """The tensors of `entry` as the hub has them; its `folder` holds config.json, generation_config.json and the index.

    The files its tensors name are not there yet. Raises FetchError, and CheckpointError as `open_checkpoint` does.
    """
    with told(entry):
        found = listing(entry)
        folder = bring_small(entry, found)
        shards = _shards(entry, found, folder)
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            tables = list(pool.map(lambda shard: _header(entry, found, shard, folder / shard.name), shards))
    tensors: dict[str, TensorInfo] = {}
    for table in tables:
        if twice := next((name for name in table if name in tensors), None):
            raise CheckpointError(f"{twice} is in two shards of {entry.repository}", "use another revision")
        tensors |= table
    return Checkpoint(folder, tensors, quantisation_of(_config(entry, folder)))


def _shards(entry: Entry, found: Listing, folder: Path) -> list[RemoteFile]:
    """The weight files the loader will read."""
    names = (SINGLE,) if SINGLE in found.files else cache.shards(folder) or (SINGLE,)
    for name in names:
        if name not in found.files:
            raise FetchError(
                f"{entry.repository} has no {name}, so it is not a whole checkpoint",
                "give a repository, or a revision, that has it",
            )
    return [found.files[name] for name in names]


def _header(entry: Entry, found: Listing, file: RemoteFile, path: Path) -> Mapping[str, TensorInfo]:
    where = address(entry, found, file)
    length = header_length(path, first_bytes(where, 8, headers()), file.size)
    return parse_header(path, first_bytes(where, 8 + length, headers())[8:], file.size)


def _config(entry: Entry, folder: Path) -> object:
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise FetchError(f"{entry.repository} has no config.json that can be read", "use another revision") from None
