"""What can go wrong between here and the hub, as one line and its cure.

    the server says     gated, no such repository / revision / file, refused token, too many requests, 5xx
    on the way          no name, no route, proxy, TLS, timeout, a connection that broke
    on this machine     disk full, a cache that may not be written, offline by choice

huggingface_hub answers with its own exceptions over those of its HTTP library (httpx in its release 1, httpx2 in 2).
"""

import errno
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR
from typing import Any

from dgemma_local.errors import DgemmaError, FetchError
from dgemma_local.registry import Entry

KEPT = "what arrived is kept; run the same command to go on"

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


class Unreachable(FetchError):
    """The hub does not answer, or may not be asked: what is here can still serve."""


@contextmanager
def told(entry: Entry) -> Iterator[None]:
    """What goes wrong inside is raised as FetchError; anything that is not a failure of this kind passes."""
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


def quiet() -> None:
    """huggingface_hub warns and draws on stderr; here one place tells everything."""
    with warnings.catch_warnings(action="ignore"):  # of variables it no longer knows
        from huggingface_hub.utils import logging

    logging.set_verbosity(ERROR)


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
        return f"{name} has no file {error.response.url.path.rpartition('/')[2]!r} any more", "run the command again"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no repository {name}, or it is private", f"check the name; for a private one {login}"
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
    if isinstance(error, library.ProxyError):
        return f"the proxy refuses: {text}", "check HTTP_PROXY, HTTPS_PROXY and NO_PROXY"
    if isinstance(error, (library.UnsupportedProtocol, library.InvalidURL)):
        return f"{server()!r} is not a server's address", "correct HF_ENDPOINT: it begins with https://"
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
    if error.errno in _FORBIDDEN:
        return (
            f"{where} may not be written: {error.strerror}",
            "check its permissions, or set HF_HOME to a folder of yours",
        )
    return f"{where}: {error.strerror or error}", f"check the disk; {KEPT}"
