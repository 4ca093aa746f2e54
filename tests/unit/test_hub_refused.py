"""What a hub, a proxy or a network refuses is one error of two lines: gates, tokens, addresses, statuses."""

from dataclasses import replace
from pathlib import Path

import pytest
from fetching import ENTRY, NAME, needed, offline, point, python, refused, same
from fetching import server as server
from hub_server import Hub
from huggingface_hub import close_session, constants

from dgemma_local import hub


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
