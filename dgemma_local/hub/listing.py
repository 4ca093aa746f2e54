"""What the hub says a revision holds, and which of it is needed.

    listed   every file of the commit with its size and hash; a name or a hash that is no safe path is refused
    needed   what the loader reads (Entry.files), at the top of the repository; never a pickle

Source: the hub's API, /api/models/{repository}/revision/{revision}?blobs=true.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dgemma_local import __version__
from dgemma_local.checkpoint import INDEX, SINGLE
from dgemma_local.errors import FetchError
from dgemma_local.hub.cache import ALWAYS
from dgemma_local.hub.failures import server
from dgemma_local.registry import Entry

_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")  # reading one runs the code inside it
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_TOKEN = re.compile(r"[!-~]*")  # what a header can carry, without spaces


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository."""

    name: str
    size: int
    etag: str  # sha256 of its content, or git's sha1 where it is small


@dataclass(frozen=True, slots=True)
class Listing:
    """The needed files of one commit, by name."""

    commit: str
    files: Mapping[str, RemoteFile]


def listing(entry: Entry) -> Listing:
    """The needed files of `entry`'s revision, as the hub has them now.

    Raises FetchError, and what `failures.told` tells.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    if entry.revision is not None and not _is_plain(entry.revision):  # it becomes a path, too
        raise FetchError(f"{entry.revision!r} is not the name of a revision", "give a commit, branch or tag")
    if constants.HF_HUB_OFFLINE:
        raise OfflineModeIsEnabled  # whatever the token: none is sent
    _check_token()
    api = HfApi(endpoint=server(), library_name="dgemma", library_version=__version__)
    patience = constants.HF_HUB_DOWNLOAD_TIMEOUT
    try:
        info = api.model_info(entry.repository or "", revision=entry.revision, files_metadata=True, timeout=patience)
        listed = {f.rfilename: (f.size, f.lfs.sha256 if f.lfs else f.blob_id) for f in info.siblings or ()}
        commit = str(info.sha)
    except (json.JSONDecodeError, LookupError, TypeError, AttributeError):
        raise _no_hub() from None
    if not _COMMIT.fullmatch(commit):
        raise _no_hub()
    for name in listed:
        _check_name(entry, name)
    return Listing(commit, {name: _remote(entry, name, *listed[name]) for name in _needed(entry, list(listed))})


def headers() -> Mapping[str, str]:
    """Of a request for a file: with the user's token, where there is one."""
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented there

    return build_hf_headers(library_name="dgemma", library_version=__version__)


def address(entry: Entry, found: Listing, file: RemoteFile) -> str:
    """Where the hub serves a file of that commit."""
    from huggingface_hub import hf_hub_url

    return hf_hub_url(entry.repository or "", file.name, revision=found.commit, endpoint=server())


def lacking(entry: Entry, name: str) -> FetchError:
    """A repository without a file that a checkpoint needs."""
    return FetchError(
        f"{entry.repository} has no {name}, so it is not a whole checkpoint",
        "give a repository, or a revision, that has it",
    )


def _check_token() -> None:
    """Said here: the HTTP library fails on such a token in ways of its own, and shows it."""
    try:
        good = _TOKEN.fullmatch(headers().get("authorization", "").removeprefix("Bearer "))
    except UnicodeError:  # the file it is kept in
        good = None
    if not good:
        raise FetchError(
            "the Hugging Face token holds characters that no token has",
            "copy it once more: set HF_TOKEN, or run `hf auth login`",
        )


def _check_name(entry: Entry, name: str) -> None:
    """A listed name becomes a path here, and stands in messages."""
    if not _is_plain(name):
        raise FetchError(
            f"{entry.repository} lists a file {name!r}, which is not a plain name inside a folder",
            "do not use this repository",
        )


def _is_plain(name: str) -> bool:
    return "\\" not in name and name.isprintable() and not {"", ".", ".."} & {*name.split("/")}


def _needed(entry: Entry, names: Sequence[str]) -> list[str]:
    top = [name for name in names if "/" not in name]
    chosen = [name for name in top if any(fnmatchcase(name, form) for form in entry.files) and not _is_pickle(name)]
    tensors = [name for name in chosen if name.endswith(".safetensors")]
    if SINGLE in tensors:  # the loader reads it alone
        chosen = [name for name in chosen if name == SINGLE or name not in tensors]
    elif not tensors:
        if pickles := [name for name in names if _is_pickle(name)]:
            raise FetchError(
                f"{entry.repository} has its weights as pickles alone ({pickles[0]}): loading one runs the code inside it",
                "give a repository with safetensors",
            )
        raise FetchError(f"{entry.repository} has no safetensors", "give the repository of a whole checkpoint")
    elif INDEX not in chosen:
        raise lacking(entry, SINGLE)
    if missing := next((name for name in ALWAYS if name not in chosen), None):
        raise lacking(entry, missing)
    return chosen


def _remote(entry: Entry, name: str, size: int | None, etag: str | None) -> RemoteFile:
    if type(size) is not int or size < 0 or not isinstance(etag, str) or not _ETAG.fullmatch(etag):
        raise FetchError(
            f"{server()} lists {name} of {entry.repository} without a size and a hash to verify it by",
            "set HF_ENDPOINT to the hub, or to a mirror that passes them on",
        )
    return RemoteFile(name, size, etag)


def _is_pickle(name: str) -> bool:
    return name.lower().endswith(_PICKLES)


def _no_hub() -> FetchError:
    return FetchError(
        f"{server()} does not answer as the hub does",
        "correct HF_ENDPOINT; where a network asks for a login first, log in",
    )
