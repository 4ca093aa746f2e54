"""What is on disk: one file, shards, and every way in which a file can be less than its header says."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny import write_tensors, write_tiny

from dgemma_local.checkpoint import INDEX, SINGLE, Checkpoint, families, open_checkpoint, refuse_special_files
from dgemma_local.errors import CheckpointError, ConfigError

Header = dict[str, Any]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A good single file of three tensors."""
    path = tmp_path_factory.mktemp("whole") / SINGLE
    tensors = {"a.0.w": torch.ones(2, 3), "a.1.w": torch.ones(4, dtype=torch.bfloat16), "b": torch.tensor(1.0)}
    save_file(tensors, path, metadata={"format": "pt"})
    return path.read_bytes()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that examples of one property may write over."""
    return tmp_path_factory.mktemp("scratch")


def file_of(header: object, payload: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(payload)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> Header:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refused(folder: Path) -> CheckpointError:
    """The error `open_checkpoint` raises: one line, with a cure."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert caught.value.what.isprintable() and caught.value.fix.isprintable()
    return caught.value


def test_facts_of_one_file(tmp_path: Path) -> None:
    tensors = write_tiny(tmp_path, dtype=torch.bfloat16)
    held = open_checkpoint(tmp_path)
    assert held.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        info = held.tensors[name]
        assert (info.name, info.dtype, info.shape, info.file) == (name, "BF16", tuple(tensor.shape), tmp_path / SINGLE)
        assert info.nbytes == tensor.nbytes
        stored = (tmp_path / SINGLE).read_bytes()[info.begin : info.begin + info.nbytes]
        assert stored == tensor.view(torch.uint8).numpy().tobytes()
    assert held.bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_bytes_by_dtype(tmp_path: Path, whole: bytes) -> None:
    (tmp_path / SINGLE).write_bytes(whole)
    assert open_checkpoint(tmp_path).dtypes == {"F32": 28, "BF16": 8}


def test_shards_hold_what_one_file_holds(tmp_path: Path) -> None:
    def facts(checkpoint: Checkpoint) -> dict[str, tuple[Any, ...]]:
        return {name: (t.dtype, t.shape, t.nbytes) for name, t in checkpoint.tensors.items()}

    write_tiny(tmp_path / "one")
    write_tiny(tmp_path / "three", shards=3)
    one, three = open_checkpoint(tmp_path / "one"), open_checkpoint(tmp_path / "three")
    assert facts(one) == facts(three)
    assert len({t.file for t in three.tensors.values()}) == 3
    assert all(t.file.is_file() for t in three.tensors.values())


def test_an_empty_tensor_and_a_header_without_metadata(tmp_path: Path) -> None:
    header = {"empty": entry("F32", [0, 4], 0, 0), "nibbles": entry("F4", [2, 3], 0, 3)}
    (tmp_path / SINGLE).write_bytes(file_of(header, 3))
    assert open_checkpoint(tmp_path).bytes == 3


def test_no_torch_at_import() -> None:
    code = "import sys, dgemma_local.checkpoint; sys.exit(bool({'torch', 'safetensors', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


# ── a file that is not whole ──────────────────────────────────────────────────────────────────────────────────────


@given(data=st.data())
def test_a_cut_file_is_always_refused(data: st.DataObject, whole: bytes, scratch: Path) -> None:
    cut = data.draw(st.integers(0, len(whole) - 1))
    (scratch / SINGLE).write_bytes(whole[:cut])
    assert "truncated" in refused(scratch).what


@given(more=st.binary(min_size=1, max_size=9))
def test_bytes_after_the_last_tensor_are_refused(more: bytes, whole: bytes, scratch: Path) -> None:
    (scratch / SINGLE).write_bytes(whole + more)
    assert f"{len(more)} bytes after its last tensor" in refused(scratch).what


@given(data=st.data())
def test_a_damaged_header_never_gives_a_traceback(data: st.DataObject, whole: bytes, scratch: Path) -> None:
    damaged = bytearray(whole)
    for at in data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=4)):
        damaged[at % len(damaged)] = data.draw(st.integers(0, 255))
    (scratch / SINGLE).write_bytes(damaged)
    try:
        held = open_checkpoint(scratch)
    except CheckpointError:
        refused(scratch)
    else:  # a name, the metadata or the payload was hit: what is left must still account for every byte
        assert held.bytes == 36


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (file_of(b"{not json"), "not JSON"),
        (file_of(b"\xff\xfe"), "not JSON"),
        (file_of(b"[" * 100_000), "not JSON"),
        (file_of(b'{"a": ' + b"9" * 5000 + b"}"), "not JSON"),
        (file_of([1, 2]), "not an object"),
        (file_of(b'{"a": 1, "a": 2}'), "'a' twice in its header"),
        (file_of({"a": 1}), "broken header entry for a"),
        (file_of({"a": {"dtype": "F32", "shape": [1]}}), "broken header entry for a"),
        (file_of({"a": entry("F32", [-1], 0, 4)}, 4), "broken header entry for a"),
        (file_of({"a": entry("F32", [True], 0, 4)}, 4), "broken header entry for a"),
        (file_of({"a": entry("F32", [1], 0, 4) | {"data_offsets": [0, 4, 8]}}, 4), "broken header entry for a"),
        (file_of({"a": entry("F32", [1], 4, 0)}, 4), "takes -4 bytes"),
        (file_of({"a": entry("F32", [3], 0, 8)}, 8), "a is F32 [3] but takes 8 bytes"),
        (file_of({"a": entry("F32", [1], 0, 8)}, 8), "a is F32 [1] but takes 8 bytes"),
        (file_of({"a": entry("Q7", [1], 0, 4)}, 4), "unknown dtype 'Q7'"),
        (file_of({"a": entry("F32", [2], 0, 8)}, 4), "truncated: its tensors take 8 bytes and 4 are there"),
        (file_of({"a": entry("F32", [1], 4, 8)}, 8), "a begins at byte 4 of the payload, not at 0"),
        (file_of({"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 4, 8)}, 8), "b begins at byte 4"),
        (file_of({"a\nb": entry("F32", [1], 0, 4)}, 4), "not printable"),
        (file_of({"": entry("F32", [1], 0, 4)}, 4), "not printable"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git-lfs pointer"),
        (b"<!DOCTYPE html><html>not found</html>", "not safetensors"),
    ],
)
def test_a_broken_header_is_named(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    assert says in refused(tmp_path).what


def test_a_giant_header_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / SINGLE).open("wb") as file:  # sparse: takes no disk
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(100_000_100)
    assert "a header of 100,000,001 bytes" in refused(tmp_path).what


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / SINGLE).symlink_to(tmp_path / "gone")
    assert "cannot be read: No such file" in refused(tmp_path).what


# ── shards and their index ────────────────────────────────────────────────────────────────────────────────────────


def edit_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / INDEX
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_tiny(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "has no model-00002-of-00003.safetensors, where its index puts model" in refused(tmp_path).what


def test_a_cut_shard_is_named(tmp_path: Path) -> None:
    write_tiny(tmp_path, shards=3)
    shard = tmp_path / "model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "model-00003-of-00003.safetensors is truncated" in refused(tmp_path).what


def test_tensors_the_index_promises_and_no_shard_has(tmp_path: Path) -> None:
    write_tiny(tmp_path, shards=2)
    extra = {f"layers.{i}.gone": "model-00001-of-00002.safetensors" for i in range(7)}
    edit_index(tmp_path, lambda where: where.update(extra))
    assert "(7): layers.N.gone ×7 (first: layers.0.gone)" in refused(tmp_path).what


def test_a_tensor_in_another_shard_than_the_index_says(tmp_path: Path) -> None:
    write_tensors(tmp_path, {"a": torch.ones(1), "b": torch.ones(1)}, shards=2)
    edit_index(tmp_path, lambda where: where.update({"x": where["b"], "b": where["a"]}))
    assert "not in the shard the index names (2): b, x" in refused(tmp_path).what


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    write_tensors(tmp_path, {"a": torch.ones(1), "b": torch.ones(1)}, shards=2)
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "model-00002-of-00002.safetensors")
    error = refused(tmp_path)
    assert "a is in two shards: model-00001-of-00002.safetensors and model-00002-of-00002.safetensors" in error.what


def test_a_tensor_the_index_forgot_still_counts(tmp_path: Path) -> None:
    write_tensors(tmp_path, {"a": torch.ones(1), "b": torch.ones(1), "c": torch.ones(1)}, shards=2)
    edit_index(tmp_path, lambda where: where.pop("c"))
    assert "c" in open_checkpoint(tmp_path).tensors


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("{", "not JSON"),
        ("[]", "no 'weight_map'"),
        ("{}", "no 'weight_map'"),
        ('{"weight_map": {}}', "no 'weight_map'"),
        ('{"weight_map": {"a": 3}}', "not a file name"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "not a file name"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "not a file name"),
        ('{"weight_map": {"a": ".."}}', "not a file name"),
        ('{"weight_map": {"a\\u001b": "a.safetensors"}}', "not printable"),
        ('{"weight_map": {"a": "a.safetensors"}}', "has no a.safetensors, where its index puts a"),
    ],
)
def test_a_broken_index_is_named(index: str, says: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(index)
    assert says in refused(tmp_path).what


def test_one_whole_file_wins_over_an_index_beside_it(tmp_path: Path, whole: bytes) -> None:
    write_tiny(tmp_path, shards=2)
    (tmp_path / SINGLE).write_bytes(whole)
    assert open_checkpoint(tmp_path).tensors.keys() == {"a.0.w", "a.1.w", "b"}


# ── folders that hold something else ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_what_config_json_says_about_quantisation(key: str, tmp_path: Path, whole: bytes) -> None:
    (tmp_path / SINGLE).write_bytes(whole)
    assert open_checkpoint(tmp_path).quantisation is None
    (tmp_path / "config.json").write_text(json.dumps({key: {"bits": 4}}))
    assert open_checkpoint(tmp_path).quantisation == {"bits": 4}
    (tmp_path / "config.json").write_text(json.dumps({key: "fp8"}))
    with pytest.raises(ConfigError, match=f"'{key}' is not an object"):
        open_checkpoint(tmp_path)


def test_special_files_are_refused_and_never_opened(tmp_path: Path, whole: bytes) -> None:
    """Opening the pipe would wait for a writer, and the device has no end."""
    refuse_special_files(tmp_path / "nowhere")
    (tmp_path / SINGLE).write_bytes(whole)
    (tmp_path / "notes.txt").symlink_to("/dev/zero")
    refuse_special_files(tmp_path)
    for name, make in (
        ("config.json", lambda path: path.symlink_to("/dev/zero")),
        ("chat_template.jinja", os.mkfifo),
        ("tokenizer.json", Path.mkdir),
    ):
        make(tmp_path / name)
        with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
            refuse_special_files(tmp_path)
        (tmp_path / name).rmdir() if (tmp_path / name).is_dir() else (tmp_path / name).unlink()


@pytest.mark.parametrize("config", ["{", "[]", '{"quantization_config": null}', "[" * 100_000])
def test_a_broken_config_is_left_to_its_own_room(config: str, tmp_path: Path, whole: bytes) -> None:
    (tmp_path / "config.json").write_text(config)
    (tmp_path / SINGLE).write_bytes(whole)
    assert len(open_checkpoint(tmp_path).tensors) == 3


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("pytorch_model.bin", "has 'pytorch_model.bin' and no safetensors"),
        ("model-Q4_K_M.gguf", "has 'model-Q4_K_M.gguf' and no safetensors"),
        ("model-00001-of-00011.safetensors", "but neither model.safetensors nor model.safetensors.index.json"),
        ("README.md", "has no model.safetensors and no model.safetensors.index.json"),
        (None, "has no model.safetensors and no model.safetensors.index.json"),
    ],
)
def test_a_folder_of_something_else(file: str | None, says: str, tmp_path: Path) -> None:
    if file:
        (tmp_path / file).write_bytes(b"x")
    assert says in refused(tmp_path).what


def test_no_folder(tmp_path: Path) -> None:
    assert "is not a folder" in refused(tmp_path / "nowhere").what


# ── names by pattern ──────────────────────────────────────────────────────────────────────────────────────────────


def test_families() -> None:
    names = [f"layers.{i}.experts.{e}.w" for i in range(3) for e in range(4)] + [
        "norm_2.w",
        "norm_1.w",
        "x",
        "y",
        "z.0",
    ]
    said = families(names)
    assert said == "layers.N.experts.N.w ×12 (first: layers.0.experts.0.w), norm_2.w, norm_1.w, and 3 more kinds"
    assert families(names[:-2]).endswith("and 1 more kind")
