"""A hub on this machine with one model, and what tests of fetching ask of it and of its cache.

A test file takes the fixture by its name: `from fetching import server as server`.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_server import COMMIT, Hub, Repository, checkpoint
from huggingface_hub import close_session, constants

from dgemma_local import hub
from dgemma_local.errors import FetchError
from dgemma_local.hub import cache, pull, transfer
from dgemma_local.registry import FILES, Entry

ROOT = Path(__file__).parents[1]
NAME = "org/model"
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


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def python(code: str, **environment: str) -> str:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING", "XDG_"))}
    return subprocess.run(
        [sys.executable, "-c", code], check=True, env=clean | environment, cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
