"""A user's TOML file, read: no file is no settings, and what cannot be read is one line and its cure."""

import codecs
import tomllib
from pathlib import Path
from typing import Any

from dgemma_local.errors import ConfigError


def read(path: Path) -> dict[str, Any]:
    """The file's tables; empty where there is no file. Raises ConfigError: not readable, not UTF-8, not TOML."""
    try:
        raw = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", "check its permissions, or remove it") from None
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
