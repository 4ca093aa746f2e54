"""Fetch a checkpoint: list, make sure there is room, bring, verify, link.

    listed     the needed files of the revision (listing)
    brought    what is not in the cache yet (transfer), the small files first: what they say is checked before the weights
    verified   sha256, or git's sha1 of small files, against the listing, before a file is put in its place; a damaged
               one is fetched once more, then named
    linked     the smallest first, so that a snapshot with its weights has everything

A file that is here was verified when it came: it is hashed again only when that is asked for.
"""

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dgemma_local.checkpoint import INDEX, SINGLE
from dgemma_local.errors import FetchError
from dgemma_local.hub import cache
from dgemma_local.hub.failures import Unreachable, size, told
from dgemma_local.hub.listing import Listing, RemoteFile, address, headers, lacking, listing
from dgemma_local.hub.transfer import Partial, Piece, Watch, bring
from dgemma_local.registry import Entry

MARGIN = 1_000_000_000  # bytes that stay free on the disk, for everything else that writes to it
READERS = 4  # files hashed at a time: sha256 takes in 1-2 GB/s a core

_CHUNK = 1 << 20
_LONGEST_NAME = 255  # of a file, on the file systems in use


def fetch(entry: Entry, *, verify: bool = False, watch: Watch | None = None) -> Path:
    """The folder of a complete copy of `entry`, brought here as far as it was not.

    What is brought is verified; with `verify`, what was here, too. Offline, and where the hub cannot be reached, a
    complete copy serves. Raises FetchError; what arrived is kept.
    """
    watch = watch or Watch()
    try:
        with told(entry):
            found = listing(entry)
    except Unreachable as failure:
        folder = cache.folder_of(entry)
        if folder is None:
            raise
        watch.say(f"{failure.what}; the copy here is complete")
        if verify:
            verify_alone(entry, folder, watch)
        return folder
    store = Store.of(entry, found)
    with told(entry):
        _bring(entry, store, list(found.files.values()), verify, watch)
    if missing := cache.lacks(store.folder):
        raise lacking(entry, missing)
    for path in cache.files(entry, store.folder):
        cache.inside(entry, store.folder, path)
    return store.folder


def bring_small(entry: Entry, found: Listing) -> Path:
    """Brings configuration and index alone, where a whole fetch would put them -> the snapshot's folder."""
    files = [f for f in found.files.values() if f.name.endswith(".json") and not f.name.startswith("tokenizer")]
    store = Store.of(entry, found)
    _bring(entry, store, files, False, Watch())
    return store.folder


def weights_of(entry: Entry, found: Listing, folder: Path) -> list[RemoteFile]:
    """The weight files the loader will read. Raises FetchError: an index that is broken, or names what is not there."""
    if SINGLE in found.files:
        return [found.files[SINGLE]]
    names = cache.shards(folder)
    if names is None:
        raise FetchError(f"{entry.repository} has an {INDEX} that names no files", "use another revision")
    for name in names:
        if len(name) > _LONGEST_NAME or "/" in name or not name.isprintable() or not name.endswith(".safetensors"):
            raise FetchError(
                f"{INDEX} of {entry.repository} names {name[:80]!r}, which is no safetensors file beside it",
                "do not use this repository",
            )
        if name not in found.files:
            raise lacking(entry, name)
    return [found.files[name] for name in names]


def config_of(entry: Entry, folder: Path) -> object:
    """What config.json holds. Raises FetchError: not JSON."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise FetchError(f"{entry.repository} has no config.json that can be read", "use another revision") from None


@dataclass(frozen=True, slots=True)
class Store:
    """Where the files of one commit lie in the cache."""

    repository: Path
    found: Listing

    @classmethod
    def of(cls, entry: Entry, found: Listing) -> "Store":
        return cls(cache.repository(entry), found)

    @property
    def folder(self) -> Path:
        return self.repository / "snapshots" / self.found.commit

    def blob(self, file: RemoteFile) -> Path:
        return self.repository / "blobs" / file.etag

    def here(self, file: RemoteFile) -> Path | None:
        """Where the whole file lies: its blob, or on a disk without links its place in the snapshot."""
        for path in (self.blob(file), self.folder / file.name):
            if path.is_file() and path.stat().st_size == file.size:
                return path
        return None

    def placed(self, file: RemoteFile) -> bool:
        """Whether the snapshot has the file."""
        here, path = self.here(file), self.folder / file.name
        return here is not None and path.exists() and path.samefile(here)

    def discard(self, file: RemoteFile) -> None:
        self.blob(file).unlink(missing_ok=True)
        (self.folder / file.name).unlink(missing_ok=True)

    def link(self, file: RemoteFile) -> None:
        """Puts a file that is here into the snapshot."""
        blob, path = self.blob(file), self.folder / file.name
        if not blob.is_file() or (path.is_symlink() and cache.real(path) == cache.real(blob)):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        try:
            path.symlink_to(os.path.relpath(blob, self.folder))
        except OSError:  # a disk without links: as huggingface_hub does there
            blob.replace(path)

    def refer(self, revision: str) -> None:
        """Notes which commit a branch or tag was. A cache that cannot be written may lack it: then it holds all else."""
        ref = self.repository / "refs" / revision
        if revision == self.found.commit or (ref.is_file() and ref.read_text(encoding="utf-8") == self.found.commit):
            return
        with suppress(OSError):
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(self.found.commit, encoding="ascii")


def _bring(entry: Entry, store: Store, files: Sequence[RemoteFile], verify: bool, watch: Watch) -> None:
    """Afterwards all `files` are here and in the snapshot, whole and undamaged."""
    if verify or not all(map(store.placed, files)):
        with _alone(entry, watch):
            missing = [file for file in files if not store.here(file)]
            if verify:
                damaged = _damaged([(path, file) for file in files if (path := store.here(file))], watch)
                for file in damaged:
                    watch.say(f"{file.name} is damaged on the disk; fetching it again")
                    store.discard(file)
                missing += damaged
            alike = {file.etag: file for file in missing}  # files of one content are one blob
            _transfer(entry, store, files, list(alike.values()), watch)
            for file in sorted(files, key=lambda file: file.size):
                store.link(file)
    store.refer(entry.revision or "main")


def _transfer(
    entry: Entry, store: Store, files: Sequence[RemoteFile], missing: Sequence[RemoteFile], watch: Watch
) -> None:
    """Brings and verifies the `missing` of `files`: the small ones, and where what these say is good, the weights."""
    partials = _partials(entry, store, missing)
    _room(partials.values())
    if missing:
        total = sum(file.size for file in missing)
        watch.start("fetching", total, total - sum(partial.missing for partial in partials.values()))
    small = {file: partial for file, partial in partials.items() if not _is_weights(file)}
    _arrive(entry, store, small, watch, Watch())
    for file in files:
        if not _is_weights(file):
            store.link(file)
    weights = {file: partial for file, partial in partials.items() if _is_weights(file)}
    try:
        config_of(entry, store.folder)
        weights_of(entry, store.found, store.folder)
    except FetchError:
        _drop_empty(weights.values())
        raise
    _arrive(entry, store, weights, watch, watch)


def _partials(entry: Entry, store: Store, files: Iterable[RemoteFile]) -> dict[RemoteFile, Partial]:
    pieces = {file: Piece(file.name, address(entry, store.found, file), file.size, store.blob(file)) for file in files}
    return {file: Partial.open(piece) for file, piece in pieces.items()}


def _arrive(
    entry: Entry, store: Store, partials: Mapping[RemoteFile, Partial], watch: Watch, verification: Watch
) -> None:
    """Brings and verifies files, what arrives damaged once more."""
    for attempt in (1, 2):
        if not partials:
            return
        bring(list(partials.values()), headers(), watch)
        damaged = _damaged([(partial.piece.path, file) for file, partial in partials.items()], verification)
        for file, partial in partials.items():
            if file in damaged:
                partial.drop()
            else:
                partial.finish()
        if damaged and attempt == 1:
            watch.say(f"damaged on arrival: {_names(damaged)}; fetching again")
            watch.start("fetching", sum(file.size for file in damaged), 0)
            partials = _partials(entry, store, damaged)
        elif damaged:
            raise FetchError(
                f"{_names(damaged)} of {entry.repository} arrives damaged, twice: not the bytes its hash was made from",
                "try later, or without the proxy or mirror between; the other files are kept",
            )
        else:
            return


def _room(partials: Iterable[Partial]) -> None:
    """Raises FetchError where the disk has less free than is still to come, and a margin."""
    partials = list(partials)
    missing = sum(partial.missing for partial in partials)
    free = shutil.disk_usage(cache.root()).free
    if free < missing + MARGIN:
        _drop_empty(partials)
        raise FetchError(
            f"{cache.root()} is on a disk with {size(free)} free; {size(missing)} are to come, "
            f"and {size(MARGIN)} should stay free",
            "make room, or set HF_HOME to a folder on another disk",
        )


def _drop_empty(partials: Iterable[Partial]) -> None:
    for partial in partials:
        if not any(partial.done):
            partial.drop()


def _damaged(files: Sequence[tuple[Path, RemoteFile]], watch: Watch) -> list[RemoteFile]:
    """The files whose content is not what their hash was made from."""
    if not files:
        return []
    stop = threading.Event()

    def whole(item: tuple[Path, RemoteFile]) -> bool:
        path, file = item
        # git puts the kind and the length before the content
        digest = (
            hashlib.sha256() if len(file.etag) == 64 else hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
        )
        with path.open("rb", 0) as content:
            while not stop.is_set() and (chunk := content.read(_CHUNK)):
                digest.update(chunk)
                watch.advance(len(chunk))
        return digest.hexdigest() == file.etag

    watch.start("verifying", sum(file.size for _, file in files), 0)
    with ThreadPoolExecutor(READERS) as pool:
        try:
            return [file for (_, file), good in zip(files, pool.map(whole, files), strict=True) if not good]
        except BaseException:
            stop.set()
            raise


def verify_alone(entry: Entry, folder: Path, watch: Watch) -> None:
    """Without the hub: the name of a blob is its hash."""
    blobs = {path: path.readlink() for path in cache.files(entry, folder) if path.is_symlink()}
    known = [(path, RemoteFile(path.name, path.stat().st_size, blob.name)) for path, blob in blobs.items()]
    if damaged := _damaged(known, watch):
        raise FetchError(
            f"damaged on the disk: {_names(damaged)} in {folder}",
            f"run `dgemma pull {entry.name} --verify` where the hub can be reached: it fetches them again",
        )


@contextmanager
def _alone(entry: Entry, watch: Watch) -> Iterator[None]:
    """One fetch of a repository at a time: two would write into the same unfinished files."""
    from filelock import Timeout
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # documented there

    path = cache.root() / ".locks" / cache.repository(entry).name / "dgemma.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with WeakFileLock(path, timeout=0.1):
            yield
            return
    except Timeout:
        watch.say("another dgemma fetches this; waiting for it")
    with WeakFileLock(path):
        yield


def _is_weights(file: RemoteFile) -> bool:
    return file.name.endswith(".safetensors")


def _names(files: Iterable[RemoteFile]) -> str:
    return ", ".join(file.name for file in files)
