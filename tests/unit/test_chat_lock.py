"""Two chats that save one conversation at the same time."""

import fcntl
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chats import pairs

from dgemma_local.chat import private, store

TWO = pairs(("a", "b"), ("c", ""))


def test_a_file_that_holds_what_is_to_be_written_is_one_s_own(tmp_path: Path) -> None:
    """Its save was broken off between the file and the note of it."""
    before, now = replace(TWO, asked=1), replace(TWO, asked=2)
    store.save(now, tmp_path)
    assert store.kept(now, before, tmp_path) == now and store.names(tmp_path) == ["n"]


def test_one_chat_at_a_time_looks_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free: list[bool] = []
    looks, writes = store._holds, store._written

    def lockable() -> bool:
        opened = os.open(tmp_path, os.O_RDONLY)
        try:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            return True
        finally:
            os.close(opened)

    def watched(real: Any) -> Any:
        def called(*arguments: Any) -> Any:
            free.append(lockable())
            return real(*arguments)

        return called

    monkeypatch.setattr(store, "_holds", watched(looks))
    monkeypatch.setattr(store, "_written", watched(writes))
    first = store.kept(TWO, None, tmp_path)
    store.kept(replace(TWO, asked=1), first, tmp_path)
    store.renamed(replace(TWO, name="new"), first, tmp_path)
    assert free == [False] * 5 and lockable()


def test_a_chat_that_stopped_amid_its_save_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "LOCKED", 0.0)
    opened = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        assert store.kept(TWO, None, tmp_path) == TWO == store.load("n", tmp_path)
    finally:
        os.close(opened)
