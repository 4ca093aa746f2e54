"""What is in the cache, told without a network and without huggingface_hub.

    <root>/models--org--name/
        blobs/<etag>                          a file; its etag is its hash: sha256, or git's sha1 where it is small
        blobs/<etag>.dgemma.incomplete        one on its way, and beside it a note of how far (transfer)
        snapshots/<commit>/<name>   ─►        a link to its blob; the file itself on a disk without links
        refs/<revision>                       the commit that a branch or tag was last seen at

Source: huggingface_hub's guide "Understand caching"; the names of folders and variables are its own.
"""

import errno
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from dgemma_local.checkpoint import INDEX, SINGLE
from dgemma_local.errors import FetchError
from dgemma_local.files import whole as read_whole
from dgemma_local.hub.failures import size, told
from dgemma_local.registry import Entry

PARTIAL = ".dgemma.incomplete"  # ends as huggingface_hub's own, so that its tools find and clear what was left behind
LARGEST_INDEX = 1 << 26  # bytes; one that names every expert of the 26B model by itself takes some 4 MB
ALWAYS = ("config.json", "tokenizer.json")  # besides the weights; the other files have a default, or a stand-in

_COMMIT = re.compile(r"[0-9a-f]{40}")


def root() -> Path:
    """The folder of all models, from the variables huggingface_hub reads, in its order.

    Raises FetchError: it is a link that leads back to itself, or relative to a folder that is gone.
    """
    caches = os.getenv("XDG_CACHE_HOME", "~/.cache")
    home = _path(os.getenv("HF_HOME", f"{caches}/huggingface"))
    hub = os.getenv("HF_HUB_CACHE", os.getenv("HUGGINGFACE_HUB_CACHE", str(Path(home, "hub"))))
    try:
        path = real(Path(_path(hub)))
    except OSError as error:  # the current folder is gone
        raise _no_cache(hub, error) from None
    try:
        path.stat()
    except OSError as error:  # any other is told where something is looked for
        if error.errno == errno.ELOOP:
            raise _no_cache(hub, error) from None
    return path


def real(path: Path) -> Path:
    """Where links lead. Those in a circle, on which Path.resolve fails on some versions of Python, stay links."""
    return Path(os.path.realpath(path))


def repository(entry: Entry) -> Path:
    """The folder of an entry's repository, there or not."""
    return root() / "--".join(("models", *(entry.repository or "").split("/")))


def folder_of(entry: Entry) -> Path | None:
    """The folder of a complete copy of `entry` at its revision, or None. Nothing is hashed.

    Without a pinned revision any complete copy serves, the one its branch was last seen at first. Raises FetchError: a
    file of it is a link out of the cache, or the cache cannot be read.
    """
    with _readable():
        folder = _chosen(entry)
        if folder is None or lacks(folder) is not None:
            return None
        for path in files(entry, folder):
            inside(entry, folder, path)
        return folder


def lacks(folder: Path) -> str | None:
    """The first file without which a snapshot is no checkpoint, None where it is whole."""
    names = [*ALWAYS, *(weights(folder) or (SINGLE,))]
    return next((name for name in names if not (folder / name).is_file()), None)


def weights(folder: Path) -> tuple[str, ...] | None:
    """The names of the weight files, there or not: the single file, else the shards of the index. None: neither."""
    return (SINGLE,) if (folder / SINGLE).exists() else shards(folder)


def shards(folder: Path) -> tuple[str, ...] | None:
    """The weight files that the index names; None without an index that can be read."""
    try:
        where = json.loads(read_whole(folder / INDEX, LARGEST_INDEX))["weight_map"]
        return tuple(sorted({str(shard) for shard in where.values()})) or None
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None


def held(entry: Entry) -> int:
    """Bytes on the disk for `entry`: its revision's files, and what has arrived of files on their way."""
    with _readable():
        folder = _chosen(entry)
        there = {real(path) for path in folder.rglob("*")} if folder else set()
        whole = sum(path.stat().st_size for path in there if path.is_file())
        return whole + sum(_allocated(path) for path in _partials(entry))


def remove(entry: Entry) -> int:
    """Deletes `entry`'s revision and what has arrived of it -> bytes freed; blobs another revision links to stay.

    Raises FetchError: something could not be deleted.
    """
    freed = 0
    with told(entry):
        from huggingface_hub import scan_cache_dir

        for path in list(_partials(entry)):
            freed += _allocated(path)
            path.unlink()
        for path in (repository(entry) / "snapshots").rglob("*"):
            if path.is_symlink() and not path.exists():  # for one that leads nowhere, huggingface_hub leaves all
                path.unlink()
        if folder := _chosen(entry):
            strategy = scan_cache_dir(root()).delete_revisions(folder.name)
            strategy.execute()
            freed += strategy.expected_freed_size
        _clear(repository(entry))
    if left := held(entry):
        raise FetchError(
            f"{size(left)} of {entry.name!r} could not be removed from {repository(entry)}",
            "check the permissions of that folder, or remove it yourself",
        )
    return freed


def files(entry: Entry, folder: Path) -> list[Path]:
    """The files of a snapshot that a run may read."""
    return [path for path in sorted(folder.iterdir()) if any(fnmatchcase(path.name, form) for form in entry.files)]


def _no_cache(hub: str, error: OSError) -> FetchError:
    return FetchError(
        f"the cache {hub!r} cannot be found: {error.strerror}", "correct HF_HUB_CACHE or HF_HOME: a folder of yours"
    )


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FetchError(
            f"{error.filename or root()} cannot be read: {error.strerror}",
            "check its permissions, or set HF_HOME to a folder of yours",
        ) from None


def _chosen(entry: Entry) -> Path | None:
    """The first complete snapshot of the revision, else the first one, else None."""
    folders = list(_snapshots(entry))
    return next((folder for folder in folders if lacks(folder) is None), folders[0] if folders else None)


def _snapshots(entry: Entry) -> Iterator[Path]:
    """Folders that hold `entry`'s revision: the named commit, the one its branch was last seen at, and where nothing is
    pinned the others, latest first."""
    if entry.repository is None:
        return
    folders = repository(entry) / "snapshots"
    commit = entry.revision or "main"
    if not _COMMIT.fullmatch(commit):
        try:
            commit = (repository(entry) / "refs" / commit).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            commit = ""
    first = folders / commit
    if _COMMIT.fullmatch(commit) and first.is_dir():  # and no other name: it becomes part of a path
        yield first
    if entry.revision is None and folders.is_dir():
        others = (path for path in folders.iterdir() if path.is_dir() and path != first)
        yield from sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)


def inside(entry: Entry, folder: Path, path: Path) -> None:
    """A link in a snapshot leads to a blob: of the repository, or of the store huggingface_hub shares among them."""
    blobs = (folder, repository(entry) / "blobs", root() / "blobs")
    if not any(real(path).is_relative_to(real(home)) for home in blobs):
        raise FetchError(
            f"{path} is a link out of the cache, to {real(path)}",
            f"remove it and run `dgemma pull {entry.name}`; to use files of your own, give their folder",
        )


def _partials(entry: Entry) -> Iterator[Path]:
    if entry.repository is not None:
        yield from (repository(entry) / "blobs").glob(f"*{PARTIAL}*")


def _allocated(path: Path) -> int:
    """What a file takes: one on its way has its full length from the start, and blocks only where bytes have arrived."""
    facts = path.stat()
    return min(facts.st_size, 512 * getattr(facts, "st_blocks", facts.st_size))


def _clear(folder: Path) -> None:
    """Removes the folders of a repository of which nothing is left."""
    for path in (folder / "blobs", folder / "snapshots", folder):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def _path(text: str) -> str:
    return os.path.expandvars(os.path.expanduser(text))  # noqa: PTH111 - unlike Path's, it does without a home
