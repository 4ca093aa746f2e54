"""What may be replaced by name, and what may be read whole: regular files alone."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from dgemma_local import files


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # its name is bounded


KINDS: dict[str, Callable[[Path], None]] = {"pipe": os.mkfifo, "socket": _socket, "folder": Path.mkdir}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("linked", [False, True])
def test_nothing_but_a_regular_file_is_replaced_or_read(
    kind: str, linked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "it"
    KINDS[kind](path)
    if linked:
        (tmp_path / "link").symlink_to(path)
        path = tmp_path / "link"
    for asked in (files.replaceable, lambda path: files.whole(path, 9)):
        with pytest.raises(OSError, match=files.NOT_REGULAR):
            asked(path)


def test_a_link_stays_one_wherever_it_leads(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for name, leads in (("near", "file"), ("far", "near"), ("nowhere", "none")):
        (tmp_path / name).symlink_to(leads)
    assert files.replaceable(tmp_path / "far") == (tmp_path / "file").resolve()
    assert files.replaceable(tmp_path / "nowhere") == tmp_path.resolve() / "none"
    assert files.replaceable(tmp_path / "none") == tmp_path.resolve() / "none"
    assert files.replaceable(tmp_path / "file" / "deeper") == tmp_path.resolve() / "file" / "deeper"


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"123456789")
    assert files.whole(path, 9) == b"123456789"
    with pytest.raises(OSError, match="longer than 8 bytes"):
        files.whole(path, 8)
    with pytest.raises(FileNotFoundError):
        files.whole(tmp_path / "none", 9)
    assert files.whole(Path(os.devnull), 9) == b""  # as a file of no settings
