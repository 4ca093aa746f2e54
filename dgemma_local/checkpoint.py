"""What is on disk: names, dtypes, shapes and sizes of a folder's tensors, from the headers alone.

    one file   [ u64 n, little-endian | n bytes of JSON: name -> dtype, shape, data_offsets | payload ]
    a folder   model.safetensors, else model.safetensors.index.json (`weight_map`: name -> shard) and its shards

No tensor is read and torch is not needed. Every file is checked to be whole: the payload is covered by its tensors from
the first byte to the last, none overlaps, and each is as long as its dtype and shape say. So what this room lets
through fails later only if the disk does.

Source: the safetensors format description; limits as in safetensors 0.8 (header at most 100 MB).
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from dgemma_local.errors import CheckpointError, ConfigError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes; a real one of 47,337 tensors is about 6 MB

_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8}
_BITS |= {"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16}
_BITS |= {"I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64}

_AGAIN = "fetch the file again"
_WHOLE = "give the folder that holds the whole checkpoint"
_OTHER_FORMATS = (".gguf", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".npz")
_QUANTISED = ("quantization_config", "compression_config")  # the second is what older compressed-tensors wrote


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor."""

    name: str
    dtype: str  # as safetensors spells it: "BF16", "F16", "F32", ...
    shape: tuple[int, ...]
    file: Path
    nbytes: int
    begin: int = 0  # its first byte in the file


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Every tensor of one folder."""

    folder: Path
    tensors: Mapping[str, TensorInfo]
    quantisation: Mapping[str, Any] | None = None  # config.json's `quantization_config`, unread

    @property
    def bytes(self) -> int:
        """Payload of all tensors; headers not counted."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def dtypes(self) -> dict[str, int]:
        """Payload bytes of each dtype."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
        return sizes


def open_checkpoint(folder: Path) -> Checkpoint:
    """The tensors of `folder`, none of them read.

    Raises CheckpointError: no safetensors, a missing or truncated file, a broken header, an index and shards that
    disagree.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder", _WHOLE)
    try:
        files = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise _unreadable(folder, error) from None
    if SINGLE in files:  # first, as transformers has it: an index beside it may be older
        return Checkpoint(folder, _read_header(folder / SINGLE), _quantisation(folder))
    if INDEX in files:
        return Checkpoint(folder, _read_shards(folder, files), _quantisation(folder))
    raise _nothing_there(folder, files)


def refuse_special_files(folder: Path) -> None:
    """A pipe would be waited for, a device read for ever. Raises CheckpointError: something here that is not a file."""
    for path in sorted(folder.glob("*")) if folder.is_dir() else ():
        if path.suffix in (".json", ".jinja", ".safetensors") and path.exists() and not path.is_file():
            raise CheckpointError(f"{path} is not a regular file", _WHOLE)


def families(names: list[str], most: int = 3) -> str:
    """Names grouped by pattern, layer and expert numbers written N: `a.N.b ×30 (first: a.0.b)`, and how many kinds more."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "N", name), []).append(name)
    said = [
        f"{pattern} ×{len(g)} (first: {g[0]})" if len(g) > 1 else g[0] for pattern, g in list(groups.items())[:most]
    ]
    more = len(groups) - len(said)
    return ", ".join(said) + (f", and {more} more kind{'s' if more > 1 else ''}" if more else "")


def quantisation_of(config: object) -> Mapping[str, Any] | None:
    """What config.json says about quantisation, if anything. Raises ConfigError: something that is not an object."""
    if not isinstance(config, dict):
        return None
    for key in _QUANTISED:
        if scheme := config.get(key):
            if not isinstance(scheme, dict):
                raise ConfigError(f"config.json: '{key}' is not an object", _AGAIN)
            return scheme
    return None


def _quantisation(folder: Path) -> Mapping[str, Any] | None:
    """A config.json that is absent or broken is `config`'s to report."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return quantisation_of(config)


def _nothing_there(folder: Path, files: list[str]) -> CheckpointError:
    if stray := [name for name in files if name.endswith(".safetensors")]:
        return CheckpointError(f"{folder} has {stray[0]!r} but neither {SINGLE} nor {INDEX}", _WHOLE)
    if other := [name for name in files if name.endswith(_OTHER_FORMATS)]:
        return CheckpointError(
            f"{folder} has {other[0]!r} and no safetensors; .safetensors is the only format read",
            "give the published checkpoint in safetensors",
        )
    return CheckpointError(f"{folder} has no {SINGLE} and no {INDEX}", _WHOLE)


def _read_shards(folder: Path, files: list[str]) -> dict[str, TensorInfo]:
    where = _read_weight_map(folder / INDEX)
    tensors: dict[str, TensorInfo] = {}
    for shard in sorted(set(where.values())):
        if shard not in files:
            names = [name for name, file in where.items() if file == shard]
            raise CheckpointError(f"{folder} has no {shard}, where its index puts {families(names, 1)}", _WHOLE)
        for name, tensor in _read_header(folder / shard).items():
            if name in tensors:
                raise CheckpointError(f"{name} is in two shards: {tensors[name].file.name} and {shard}", _WHOLE)
            tensors[name] = tensor
    if absent := [name for name, shard in where.items() if name not in tensors or tensors[name].file.name != shard]:
        raise CheckpointError(
            f"tensors that are not in the shard the index names ({len(absent)}): {families(absent)}",
            "fetch the index and the shards of one revision",
        )
    return tensors


def _read_weight_map(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _unreadable(path, error) from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is not JSON", _AGAIN) from None
    where = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(where, dict) or not where:
        raise CheckpointError(f"{path} has no 'weight_map'", _AGAIN)
    for name, shard in where.items():
        # a plain file name: an index must not lead out of its folder
        if not isinstance(shard, str) or not re.fullmatch(r"\w[\w.-]*", shard):
            raise CheckpointError(f"{path} puts {name!r} in {shard!r}, which is not a file name", _AGAIN)
        _check_name(path, name)
    return where


def _read_header(path: Path) -> dict[str, TensorInfo]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = header_length(path, file.read(8), size)
            return parse_header(path, file.read(length), size)
    except OSError as error:
        raise _unreadable(path, error) from None


def header_length(path: Path, start: bytes, size: int) -> int:
    """The first 8 bytes of a file of `size` bytes -> how many bytes of JSON follow. Raises CheckpointError."""
    if start == b"version ":
        raise CheckpointError(f"{path} is a git-lfs pointer, not the tensors", "run `git lfs pull`, or fetch the file")
    length = int.from_bytes(start, "little")
    if 8 + length > size:
        raise CheckpointError(f"{path} is truncated, or not safetensors: {size:,} bytes cannot hold its header", _AGAIN)
    if length > MAX_HEADER:
        raise CheckpointError(f"{path} is not safetensors: a header of {length:,} bytes", _AGAIN)
    return length


def parse_header(path: Path, header: bytes, size: int) -> dict[str, TensorInfo]:
    """The JSON of a file of `size` bytes -> its tensors. `path` is for messages and TensorInfo.file alone.

    Raises CheckpointError: broken JSON, a tensor that is not as long as it says, payload not covered to the byte.
    """
    try:
        entries = json.loads(header, object_pairs_hook=_no_name_twice)
    except _Twice as error:
        raise CheckpointError(f"{path} has {error.args[0]!r:.200} twice in its header", _AGAIN) from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} has a broken header: not JSON", _AGAIN) from None
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path} has a broken header: not an object", _AGAIN)
    start = 8 + len(header)
    tensors = {
        name: _parse_entry(path, name, entry, start) for name, entry in entries.items() if name != "__metadata__"
    }
    at, payload = 0, size - start
    for tensor in sorted(tensors.values(), key=lambda t: (t.begin, t.nbytes)):
        if tensor.begin - start != at:
            raise CheckpointError(
                f"{path}: {tensor.name} begins at byte {tensor.begin - start} of the payload, not at {at}", _AGAIN
            )
        at += tensor.nbytes
    if at > payload:
        raise CheckpointError(f"{path} is truncated: its tensors take {at:,} bytes and {payload:,} are there", _AGAIN)
    if at < payload:
        raise CheckpointError(f"{path} has {payload - at:,} bytes after its last tensor", _AGAIN)
    return tensors


class _Twice(Exception):
    """A name stands twice in one JSON object."""


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _Twice(name)
        found[name] = value
    return found


def _parse_entry(path: Path, name: str, entry: Any, start: int) -> TensorInfo:
    """One tensor's header entry; the payload starts at byte `start` of the file."""
    _check_name(path, name)
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{path} has a broken header entry for {name}", _AGAIN)
    begin, end = offsets
    bits = _BITS.get(dtype)
    if bits is None:
        raise CheckpointError(
            f"{path}: {name} has the unknown dtype {dtype!r}", "give a checkpoint in bf16, fp16, fp32, FP8 or NVFP4"
        )
    if 8 * (end - begin) != bits * math.prod(shape):
        raise CheckpointError(f"{path}: {name} is {dtype} {list(shape)} but takes {end - begin:,} bytes", _AGAIN)
    return TensorInfo(name, dtype, tuple(shape), path, end - begin, start + begin)


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _check_name(path: Path, name: str) -> None:
    """Names end up in one-line messages on a terminal."""
    if not name.isprintable() or not name:
        raise CheckpointError(f"{path} has a tensor name that is not printable text: {name[:80]!r}", _AGAIN)


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read: {error.strerror}", "check the file and its permissions")
