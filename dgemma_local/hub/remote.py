"""What a checkpoint holds, before it is fetched: headers read from the hub, a few MB of many GB.

config.json, the index     brought into the cache and checked, as a fetch would
each weight file           8 bytes, then the header they announce, by range requests
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dgemma_local.checkpoint import Checkpoint, TensorInfo, header_length, parse_header, quantisation_of
from dgemma_local.errors import CheckpointError
from dgemma_local.hub.failures import told
from dgemma_local.hub.listing import Listing, RemoteFile, address, headers, listing
from dgemma_local.hub.pull import bring_small, config_of, weights_of
from dgemma_local.hub.transfer import CONNECTIONS, first_bytes
from dgemma_local.registry import Entry


def remote_checkpoint(entry: Entry) -> Checkpoint:
    """The tensors of `entry` as the hub has them; its `folder` holds config.json, generation_config.json and the index.

    The files its tensors name are not there yet. Raises FetchError, and CheckpointError as `open_checkpoint` does.
    """
    with told(entry):
        found = listing(entry)
        folder = bring_small(entry, found)
        quantisation = quantisation_of(config_of(entry, folder))
        shards = weights_of(entry, found, folder)
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            tables = list(pool.map(lambda shard: _header(entry, found, shard, folder / shard.name), shards))
    tensors: dict[str, TensorInfo] = {}
    for table in tables:
        if twice := next((name for name in table if name in tensors), None):
            raise CheckpointError(f"{twice} is in two shards of {entry.repository}", "use another revision")
        tensors |= table
    return Checkpoint(folder, tensors, quantisation)


def _header(entry: Entry, found: Listing, file: RemoteFile, path: Path) -> Mapping[str, TensorInfo]:
    where = address(entry, found, file)
    length = header_length(path, first_bytes(where, 8, headers()), file.size)
    return parse_header(path, first_bytes(where, 8 + length, headers())[8:], file.size)
