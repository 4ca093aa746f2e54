"""A user's TOML file, read and edited: no file is no settings, what cannot be read is one line and its cure.

An edit changes one line, and leaves every other one as its owner wrote it: TOML is for people.
"""

import codecs
import errno
import io
import json
import re
import tempfile
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

from dgemma_local import files
from dgemma_local.errors import ConfigError

LONGEST = 1 << 20  # bytes; it is written by hand
_PERMISSION = (errno.EACCES, errno.EPERM)


def read(path: Path) -> dict[str, Any]:
    """The file's tables; empty where there is no file.

    Raises ConfigError: no regular file, not readable, too long, not UTF-8, not TOML, a link that leads nowhere.
    """
    try:
        raw = files.whole(path, LONGEST).removeprefix(codecs.BOM_UTF8)
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise ConfigError(f"{path} is a link to what is not there", "correct the link, or remove it") from None
        return {}
    except OSError as error:
        cure = "check its permissions, or remove it" if error.errno in _PERMISSION else "put a file of TOML there"
        raise ConfigError(f"{path} cannot be read: {error.strerror}", cure) from None
    try:
        return tomllib.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = 1 + raw.count(b"\n", 0, error.start)
        raise ConfigError(f"{path} is not UTF-8 at line {line}", "save the file as UTF-8") from None
    except ValueError as error:  # TOMLDecodeError, and an integer with too many digits
        last = 1 + raw.rstrip().count(b"\n")
        why = str(error).replace("end of document", f"end of document, line {last}")
        raise ConfigError(f"{path} is not TOML: {why}", "correct that line, or remove the file") from None
    except RecursionError:
        raise ConfigError(f"{path} is not TOML: nested too deep", "correct it, or remove the file") from None


def shown(value: object) -> str:
    """A value in an error: Python writes no integer of more than 4,300 digits, and TOML can hold one in hexadecimal."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return "…"
    return text if len(text) <= 80 else text[:79] + "…"


# ── edited ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def written(value: object) -> str:
    """A value in TOML."""
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


# Of one line, up to a comment: a # within quotes is of the value.
_VALUE = r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|[^"'#])*?"""


def edited(text: str, table: str, name: str, literal: str | None) -> str:
    """The file with `name = literal` in [table], or without `name`; every other line, and a comment behind it, stays.

    Lines end as the first one does.
    """
    lines = list(io.StringIO(text))  # unlike splitlines, at line feeds alone, as TOML's
    end_of_line = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += end_of_line
    header = next((at for at, line in enumerate(lines) if _header(line) == table), None)
    if header is None:
        added = [*([""] if lines else []), f"[{table}]", f"{name} = {literal}"] if literal is not None else []
        return "".join([*lines, *(f"{each}{end_of_line}" for each in added)])
    end = next((at for at in range(header + 1, len(lines)) if _header(lines[at]) is not None), len(lines))
    line = re.compile(rf"(\s*[\"']?{re.escape(name)}[\"']?\s*=\s*){_VALUE}(\s*#.*)?\s*")
    for at in range(header + 1, end):
        if found := line.fullmatch(lines[at]):
            comment = (found[2] or "").rstrip()
            lines[at] = "" if literal is None else f"{found[1]}{literal}{comment}{end_of_line}"
            return "".join(lines)
    if literal is not None:
        last = max(at for at in range(header, end) if lines[at].strip())
        lines.insert(last + 1, f"{name} = {literal}{end_of_line}")
    return "".join(lines)


def _header(line: str) -> str | None:
    found = re.fullmatch(r"\s*\[([^\[\]]+)\]\s*(#.*)?", line.rstrip("\n"))
    return None if found is None else found[1].replace(" ", "")


def write(path: Path, content: bytes, otherwise: str) -> None:
    """Whole or not at all; through a link, to where it leads, and over a regular file alone.

    Raises ConfigError, whose cure may be `otherwise`.
    """
    try:
        path = files.replaceable(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = tempfile.NamedTemporaryFile(dir=path.parent, prefix=".config-", delete=False)  # noqa: SIM115 - renamed
        try:
            with new:
                new.write(content)
            with suppress(FileNotFoundError):
                Path(new.name).chmod(path.stat().st_mode)
            Path(new.name).replace(path)
        except BaseException:
            Path(new.name).unlink(missing_ok=True)
            raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        cure = "make room on that disk" if full else "check what is there, and its permissions"
        raise ConfigError(f"{path} cannot be written: {error.strerror}", f"{cure}, or {otherwise}") from None
