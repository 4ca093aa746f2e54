"""What may be read whole, and what may be replaced: regular files, never a device, a pipe or a socket.

A pipe is waited for, a device may never end, and one that is replaced by name is gone for the whole machine.
"""

import errno
import os
from pathlib import Path
from stat import S_ISREG

NOT_REGULAR = "it is no regular file"


def replaceable(path: Path) -> Path:
    """The file that a write to `path` may put in its place: behind every link, so that a link stays one.

    It need not be there yet. Raises OSError, whose `strerror` says why: something is there that is no regular file.
    """
    real = Path(os.path.realpath(path))
    try:
        mode = real.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):  # in the second case the write says it
        return real
    if not S_ISREG(mode):
        raise _not_regular(path)
    return real


def whole(path: Path, most: int) -> bytes:
    """All of a regular file of at most `most` bytes; the null device is an empty one.

    Raises OSError, whose `strerror` says why: not there, not readable, another kind of thing, longer.
    """
    if os.path.realpath(path) == os.devnull:
        return b""
    if not S_ISREG(path.stat().st_mode):  # before it is opened: a pipe would be waited for
        raise _not_regular(path)
    with path.open("rb") as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise OSError(errno.EFBIG, f"it is longer than {most:,} bytes", str(path))
    return raw


def _not_regular(path: Path) -> OSError:
    return OSError(errno.EINVAL, NOT_REGULAR, str(path))
