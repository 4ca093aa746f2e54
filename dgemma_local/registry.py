"""The table of models: a name, or a folder, to the folder to open.

Two files of one form: `models.toml` of this package, and the user's own. The user's wins, key by key, so that one line,
`folder = …`, tells where a known model was downloaded to.

    -m NAME     its `folder`, else its complete copy in the Hugging Face cache, else: run `dgemma pull NAME`
    -m FOLDER   the folder
"""

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dgemma_local import toml_file
from dgemma_local.errors import ConfigError, UnknownModel

_PACKAGE = Path(__file__).resolve().parent
# What the loader reads. A repository has more: cards, other formats, vision and audio processors.
FILES = (
    "*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)

RESERVED = ("auto",)  # what the command line takes for the choice by the card

_TEXT = ("repository", "revision", "folder", "format", "licence", "note")
_NUMBERS: dict[str, tuple[type, ...]] = {"bytes": (int,), "needs": (int, float)}
_LISTS = ("files",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One model. None is not known; of `repository` and `folder`, one at least is."""

    name: str
    repository: str | None = None  # on huggingface.co
    revision: str | None = None  # a commit there; None: not pinned
    files: tuple[str, ...] = FILES  # patterns of what is fetched from there
    folder: Path | None = None
    format: str | None = None  # "bf16", "fp8", "nvfp4"
    bytes: int | None = None  # of the weight files
    needs: float | None = None  # GB of VRAM with 8,192 tokens of context; 0: runs on a CPU
    licence: str | None = None
    note: str = ""  # one line on quality


def table() -> dict[str, Entry]:
    """Every known model by name, the packaged ones first.

    Raises ConfigError: a file that is not TOML, a key or a value without a meaning.
    """
    inside = _PACKAGE / "models.toml"  # a wheel carries the table inside the package; a checkout keeps it beside
    merged = _read(inside if inside.is_file() else _PACKAGE.parent / "models.toml", _PACKAGE)
    own = user_file()
    for name, values in _read(own, own.parent).items():
        # another repository is another model: our revision and sizes say nothing about it
        merged[name] = values if "repository" in values else merged.get(name, {}) | values
        if not {"repository", "folder"} & merged[name].keys():
            raise ConfigError(f"{own}: [{name}] has neither 'folder' nor 'repository'", "add one of the two")
    return {name: Entry(name=name, **values) for name, values in merged.items()}


def user_folder() -> Path:
    """Where the user's own files lie. XDG_CONFIG_HOME counts where it is absolute, as its specification has it."""
    home = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    return (home if home.is_absolute() else expand("~/.config")) / "dgemma"


def user_file() -> Path:
    """The user's table of models."""
    return user_folder() / "models.toml"


def is_folder(path: Path) -> bool:
    """Whatever the string: one too long for a path, or behind a folder that may not be entered, is not a folder."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def is_demo(folder: Path) -> bool:
    """Whether `folder` is one of the demo checkpoints that come with this package."""
    return folder.resolve().is_relative_to(_PACKAGE / "demo")


def find(name: str) -> Entry:
    """The entry of that name, or of that repository. Raises UnknownModel, and ConfigError as `table` does."""
    entries = table()
    for entry in entries.values():
        if name in (entry.name, entry.repository):
            return entry
    raise UnknownModel(f"no model is called {name!r}", f"pick one of: {', '.join(entries)}")


def resolve(name_or_folder: str, cached: Callable[[Entry], Path | None] = lambda entry: None) -> tuple[str, Path]:
    """A name of the table, or a folder -> the name to show, the folder to open.

    A name wins over a folder called the same; `./name` is the folder. `cached` looks for a complete copy among what was
    fetched. Raises UnknownModel: neither, a model that is not on this machine, a file where its folder is wanted. Raises
    ConfigError as `table` does.
    """
    entries = table()
    entry = entries.get(name_or_folder)
    if entry is not None and entry.folder is not None:
        if not is_folder(entry.folder):
            raise UnknownModel(
                f"the folder of {entry.name!r} is not there: {entry.folder}",
                f"give a folder that is, here or as `folder` in {user_file()}",
            )
        return entry.name, entry.folder
    path = expand(name_or_folder)
    if entry is None and name_or_folder.strip() and is_folder(path):
        return path.resolve().name, path
    for known in entries.values():
        if name_or_folder in (known.name, known.repository):
            if folder := known.folder or cached(known):
                return known.name, folder
            raise UnknownModel(f"{known.name!r} is not on this machine", f"run `dgemma pull {shlex.quote(known.name)}`")
    if path.suffix in (".safetensors", ".gguf", ".bin", ".json"):
        raise UnknownModel(f"{name_or_folder!r} is not a folder", "give the folder that holds the whole checkpoint")
    raise UnknownModel(
        f"no model and no folder is called {name_or_folder!r}", f"pick one of: {', '.join(entries)}; or give a folder"
    )


def _read(path: Path, base: Path) -> dict[str, dict[str, Any]]:
    """One file's entries, checked; folders relative to `base`. No file, no entries."""
    return {name: _check(path, name, values, base) for name, values in toml_file.read(path).items()}


def _check(path: Path, name: str, values: object, base: Path) -> dict[str, Any]:
    if not name.strip() or not name.isprintable():
        raise ConfigError(f"{path}: {name!r} is not a name", "give each model a name of one line of text")
    if name in RESERVED:
        raise ConfigError(f"{path}: [{name}] has a name that means the choice by the card", "rename that table")
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: {name!r} is not a table", f"give each model a table: [{name}]")
    checked: dict[str, Any] = {}
    for key, value in values.items():
        if key in _TEXT:
            good = _is_line(value)
        elif key in _NUMBERS:
            good = type(value) in _NUMBERS[key] and 0 <= value < 1 << 63  # what TOML promises
        elif key in _LISTS:
            good = isinstance(value, list) and value != [] and all(map(_is_line, value))
        else:
            known = ", ".join((*_TEXT, *_NUMBERS, *_LISTS))
            raise ConfigError(f"{path}: [{name}] has an unknown key {key!r}", f"known are: {known}")
        if not good:
            wanted = "one line of text" if key in _TEXT else "a number from 0 to 2**63"
            wanted = "a list of file names or patterns" if key in _LISTS else wanted
            raise ConfigError(f"{path}: [{name}] {key} = {toml_file.shown(value)} is not {wanted}", "correct that line")
        checked[key] = base / expand(value) if key == "folder" else tuple(value) if key in _LISTS else value
    return checked


def _is_line(value: object) -> bool:
    return isinstance(value, str) and value.strip() != "" and value.isprintable()


def expand(path: str) -> Path:
    """`~` is the home folder where there is one: a container's user may have none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)
