"""What can go wrong between here and the hub, as one line and its cure.

    the server says     gated, no such repository / revision / file, refused token, too many requests, 5xx
    on the way          no name, no route, proxy, TLS, timeout, a connection that broke
    on this machine     disk full, a cache that may not be written, offline by choice

huggingface_hub answers with its own exceptions over those of its HTTP library (httpx in its release 1, httpx2 in 2).
"""

import errno
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR
from typing import Any
from urllib.parse import urlsplit

from dgemma_local.errors import DgemmaError, FetchError
from dgemma_local.registry import Entry

KEPT = "what arrived is kept; run the same command to go on"

_LOGIN = "give its login with its address: HTTPS_PROXY=http://user:password@host:port, and HTTP_PROXY alike"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


class Unreachable(FetchError):
    """The hub does not answer, or may not be asked: what is here can still serve."""


@contextmanager
def told(entry: Entry) -> Iterator[None]:
    """What goes wrong inside is raised as FetchError; anything that is not a failure of this kind passes."""
    _check_endpoint()
    try:
        quiet()
        yield
    except DgemmaError:
        raise
    except Exception as error:
        failure = _explain(error, entry)
        if failure is None:
            raise
        raise failure from None


def _check_endpoint() -> None:
    """HF_ENDPOINT is an address. Before huggingface_hub is imported: with one that is none, that fails, on stdout."""
    value = os.getenv("HF_ENDPOINT")
    if value is None:
        return
    try:
        parts = urlsplit(value)
        good = parts.scheme in ("http", "https") and (parts.hostname or "").encode("idna") and parts.port != 0
    except ValueError:  # brackets, port; a host's label that is empty or too long
        good = False
    if not good:
        raise Unreachable(*_no_address(value))


def _no_address(value: str) -> tuple[str, str]:
    shown = repr(value if len(value) <= 80 else value[:79] + "…")
    return f"{shown} is not a server's address", "correct HF_ENDPOINT: it begins with https://"


def quiet() -> None:
    """huggingface_hub warns and draws on stderr; here one place tells everything."""
    with warnings.catch_warnings(action="ignore"):  # of variables it no longer knows
        from huggingface_hub.utils import logging

    logging.set_verbosity(ERROR)


def size(count: int) -> str:
    """Bytes as disks and networks count them: 18.0 GB, 350 MB, 12 kB."""
    if count >= 999.5e6:  # what would be rounded to 1000 MB
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.0f} MB" if count >= 999.5e3 else f"{count / 1e3:.0f} kB"


def http() -> Any:
    """The HTTP library that huggingface_hub runs on."""
    from huggingface_hub import get_session

    return sys.modules[type(get_session()).__module__.partition(".")[0]]


def server() -> str:
    """Where files come from: HF_ENDPOINT, or the hub."""
    from huggingface_hub import constants

    return constants.ENDPOINT


def _explain(error: Exception, entry: Entry) -> FetchError | None:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        kind = Unreachable if error.response.status_code >= 500 else FetchError
        return kind(*_status(error, entry))
    if isinstance(error, OfflineModeIsEnabled):
        return Unreachable(
            f"HF_HUB_OFFLINE is set, so {entry.name!r} cannot be fetched", "unset it, and run this again"
        )
    if isinstance(error, HFValidationError):
        return FetchError(f"{entry.repository!r} is not the name of a repository", "correct it: `organisation/name`")
    if way := _way(error):
        return Unreachable(*way)
    if isinstance(error, OSError):
        return FetchError(*_machine(error))
    return None


def _status(error: Any, entry: Entry) -> tuple[str, str]:
    """What the server's answer means."""
    from huggingface_hub import errors

    name, code = entry.repository, error.response.status_code
    login = "run `hf auth login` or set HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):  # first: it is a kind of RepositoryNotFoundError
        account = f"then {login}" if code == 401 else "with the account whose token is used"
        return f"{name} is gated: its licence has to be accepted first", f"accept it at {server()}/{name}, {account}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name} has no revision {entry.revision or 'main'!r}", "give a commit, branch or tag that it has"
    if isinstance(error, errors.RemoteEntryNotFoundError):
        file = error.response.url.path.rpartition("/")[2]
        return (
            f"{name} lists a file {file!r}, and {server()} does not have it (404)",
            "give another revision, or try later",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no repository {name}, or it is private", f"check the name; for a private one {login}"
    if code == 407:
        return "the proxy wants a login (407)", _LOGIN
    if code == 401:
        return f"the token was refused by {server()}", f"{login}, with a token that is still valid"
    if code == 403:
        return f"the token does not allow to read {name}", f"{login}, with a token that may read it"
    if code == 429:
        return f"{server()} wants fewer requests for now (429)", f"wait some minutes; {KEPT}"
    if code >= 500:
        return f"{server()} has a problem of its own ({code})", f"try later: {KEPT}"
    return f"{server()} answers {code} for {name}", "check HF_ENDPOINT and the name of the repository"


def _way(error: Exception) -> tuple[str, str] | None:
    """What happened between here and the server."""
    text, library = str(error), http_or_none()
    if isinstance(error, ImportError) and "socks" in text.lower():
        return (
            "a SOCKS proxy is set, and the package for it is not installed",
            "run `pip install socksio`, or unset the proxy",
        )
    if isinstance(error, ValueError) and "proxy" in text.lower():
        return f"the proxy's address is not understood: {text}", "correct HTTP_PROXY, HTTPS_PROXY or ALL_PROXY"
    if library is None or not isinstance(error, (library.HTTPError, library.InvalidURL)):
        return None
    if isinstance(error, library.ProxyError) and text.startswith("407"):
        return "the proxy wants a login (407)", _LOGIN
    if isinstance(error, library.ProxyError):
        return f"the proxy refuses: {text}", "check HTTP_PROXY, HTTPS_PROXY and NO_PROXY"
    if isinstance(error, (library.UnsupportedProtocol, library.InvalidURL)):
        return _no_address(server())
    if isinstance(error, library.TimeoutException):
        return (
            f"{server()} does not answer in time",
            f"check the network, or set HF_HUB_DOWNLOAD_TIMEOUT to more seconds; {KEPT}",
        )
    if isinstance(error, library.TooManyRedirects):
        return f"{server()} sends from one address to the next without end", "check HF_ENDPOINT and the proxy"
    if isinstance(error, library.ConnectError):
        if "SSL" in text or "CERTIFICATE" in text:
            return (
                f"the certificate of {server()} is not accepted: {text}",
                "check the clock; behind a company's proxy set SSL_CERT_FILE",
            )
        return f"{server()} cannot be reached: {text}", f"check the network, HF_ENDPOINT and the proxy; {KEPT}"
    return f"the connection to {server()} broke: {text}", KEPT


def http_or_none() -> Any:
    """`http`, also where the client itself cannot be made: then there is no error of its own to know."""
    try:
        return http()
    except (ImportError, ValueError):
        return None


def _machine(error: OSError) -> tuple[str, str]:
    where = error.filename or "the cache"
    if error.errno in _FULL:
        return "the disk is full", f"make room, or set HF_HOME to a folder on another disk; {KEPT}"
    if error.errno == errno.EFBIG:
        return (
            f"{where} is too large for the disk's file system, or for a limit on the size of files",
            f"raise the limit (`ulimit -f`), or set HF_HOME to a folder on another disk; {KEPT}",
        )
    if error.errno in _FORBIDDEN:
        return (
            f"{where} may not be written: {error.strerror}",
            "check its permissions, or set HF_HOME to a folder of yours",
        )
    return f"{where}: {error.strerror or error}", f"check the disk; {KEPT}"
