"""This process's only hub: one on this machine, with a home, a table and a cache of its own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hub_server import Hub, Repository
from huggingface_hub import close_session, constants

from dgemma_local.hub import pull, transfer
from dgemma_local.registry import user_file


@contextmanager
def own_hub(
    repositories: dict[str, Repository], table: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    """`table` is the user's models.toml; models are fetched into `home`/cache."""
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGING", "XDG_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(transfer, "WAITS", ())
    monkeypatch.setattr(pull, "MARGIN", 0)
    monkeypatch.setattr(os, "fsync", lambda number: None)  # a busy disk takes its time
    user_file().parent.mkdir(parents=True)
    user_file().write_text(table)
    with Hub(repositories) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        url = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        yield running
    close_session()
