"""Files for their owner's eyes alone (0600, folders 0700), written whole or not at all, by one at a time.

A file is written beside its place, brought to the disk, and then given its name: at every moment it is the old one or the
new one.
"""

import errno
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

FILE, FOLDER = 0o600, 0o700
LOCKED = 2.0  # seconds that another one's writing is waited for; it may have been stopped amid it


def file_at(path: Path) -> Path:
    """There, and for its owner alone; what it holds already stays. Raises OSError."""
    folder_at(path.parent)
    if path.exists() and not path.is_file():  # a device's mode is everybody's, and a FIFO would be waited for
        raise OSError(errno.EINVAL, f"{path} is no regular file")
    os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, FILE))
    path.chmod(FILE)
    return path


def folder_at(folder: Path) -> None:
    """There; what of it and of its parent is made here is for the owner alone. Raises OSError, NotADirectoryError too."""
    modes = {folder.parent.parent: 0o777, folder.parent: FOLDER, folder: FOLDER}
    for each, mode in modes.items():
        try:
            each.mkdir(mode=mode, parents=each == folder.parent.parent, exist_ok=True)
        except FileExistsError:  # a name that is taken is another thing
            raise NotADirectoryError(errno.ENOTDIR, f"{each} is no folder") from None


def written(text: str, path: Path, place: Callable[[str, Path], None]) -> Path:
    """text: ASCII. place: gives the file beside its name, as `os.replace` or `placed` do. Raises OSError."""
    handle, beside = tempfile.mkstemp(prefix=".", suffix=".new", dir=path.parent)  # 0600
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        place(beside, path)
    except BaseException:
        with suppress(OSError):
            Path(beside).unlink()
        raise
    _sync(path.parent)
    return path


def placed(beside: str, path: Path) -> None:
    """Gives the file its name. Raises FileExistsError where that is another's."""
    try:
        os.link(beside, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, FILE))
        Path(beside).replace(path)
    else:
        Path(beside).unlink()


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Nobody else writes in this folder meanwhile, where it can be locked."""
    with ExitStack() as left:
        with suppress(OSError):
            _lock(folder, left)
        yield


def _lock(folder: Path, left: ExitStack) -> None:
    """Raises OSError: it is still another's, or none can be had. left: what gives it back."""
    if sys.platform == "win32":
        return
    import fcntl

    opened = os.open(folder, os.O_RDONLY)
    left.callback(os.close, opened)
    end = time.monotonic() + LOCKED
    while True:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def _sync(folder: Path) -> None:
    """The name, too, is on the disk; where a folder cannot be opened, the file is whole all the same."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
