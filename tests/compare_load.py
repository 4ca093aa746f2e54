"""How fast a checkpoint loads, beside the same file read into fresh memory, and what loading it takes.

    PYTHONPATH=tests:. python tests/compare_load.py [--layers 6] [--rounds 7] [--folder DIR]

Writes a checkpoint of the real geometry in RedHat's NVFP4 layout with fewer layers and a smaller vocabulary (about 3 GB),
then, alternating and with a warm page cache: `load` with its checksum off, and `readinto` of the whole file into one
fresh buffer. Each load runs in a process of its own, so that its peak memory is its own. The last line is JSON.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import published
import torch
from tiny import tiny_config

from dgemma_local.checkpoint import TensorInfo, open_checkpoint
from dgemma_local.config import load_model_config
from dgemma_local.layout import destination, plan, wanted
from dgemma_local.loading import Proof, load
from dgemma_local.model import parameter_shapes
from dgemma_local.quant import Weight
from dgemma_local.schemes import Scheme, scheme_of

BLOCK = 64 << 20
SIZES = {"U8": 1, "F8_E4M3": 1, "F32": 4, "BF16": 2}


def write(folder: Path, layers: int) -> Path:
    """A checkpoint of random numbers that mean something: finite scales, positive global ones."""
    pattern = ("sssss" + "f") * layers
    config = tiny_config(
        pattern=pattern[: layers - 1] + "f", hidden=2816, vocab=16384, intermediate=2112, heads=16, kv_heads=8,
        full_kv_heads=2, head_dim=256, full_head_dim=512, window=1024, canvas=256, experts=128, top_k=8,
        expert_size=704, dtype="bfloat16",
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": published.NVFP4}))
    geometry = load_model_config(folder)
    schemes: dict[str, Scheme | None] = {
        name: "nvfp4" if ".experts." in name or ".mlp." in name else None for name in parameter_shapes(geometry)
    }
    facts: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for name, want in wanted(geometry, schemes, frozenset()).items():
        dtype = "BF16" if "BF16" in want.dtypes else next(iter(want.dtypes))
        size = SIZES[dtype]
        for n in want.shapes[0]:
            size *= n
        facts[name] = (dtype, want.shapes[0], size)
    header: dict[str, Any] = {}
    at = 0
    order = sorted(facts, key=lambda name: (-SIZES[facts[name][0]], name))  # safetensors' own: by width, then by name
    for name in order:
        dtype, shape, size = facts[name]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    draw = torch.Generator().manual_seed(0)
    noise = torch.randint(256, (BLOCK,), dtype=torch.uint8, generator=draw)
    path = folder / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for n, name in enumerate(order):
            dtype, _, size = facts[name]
            if dtype == "F32":
                file.write(torch.tensor([1000.0 + n]).numpy().tobytes())
                continue
            start = 4096 * (n % 1000)
            raw = noise[start : start + size] if start + size <= BLOCK else noise.repeat(-(-size // BLOCK))[:size]
            if dtype == "F8_E4M3":
                raw = raw & 0x3F | 0x20
            elif dtype == "BF16":
                raw = raw.clone()
                raw[1::2] = raw[1::2] & 0x80 | 0x3C  # magnitudes about 1/100
            file.write(raw.numpy().tobytes())
    return path


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def one_load(folder: Path, checked: bool) -> dict[str, Any]:
    """In a process of its own: seconds, growth of peak memory, bytes planned and held; with `checked` every byte."""
    config = load_model_config(folder)
    scheme_of(published.NVFP4)("warm")  # compressed-tensors' import is not the reading
    torch.empty(1)
    before = peak()
    start = time.perf_counter()
    checkpoint, proof = open_checkpoint(folder), Proof()
    weights = load(checkpoint, config, proof=proof)
    seconds = time.perf_counter() - start
    found: dict[str, Any] = {
        "seconds": seconds,
        "read": proof.read,
        "peak": peak() - before,
        "planned": sum(proof.resident.values()),
        "held": sum(weight.nbytes for weight in weights.values()),
    }
    if checked:
        compare_bytes(checkpoint.tensors, weights, folder)
    return found


def compare_bytes(tensors: Any, weights: dict[str, Weight], folder: Path) -> None:
    """Every stored byte, checksummed where it ended up in memory and where it came from."""
    layout = plan(load_model_config(folder), tensors, scheme_of(published.NVFP4))
    with (folder / "model.safetensors").open("rb") as file:
        for place in layout.placements:
            tensor: TensorInfo = tensors[place.tensor]
            file.seek(tensor.begin)
            held = destination(weights, place).reshape(-1).view(torch.uint8).numpy()
            assert zlib.crc32(file.read(tensor.nbytes)) == zlib.crc32(held), place.tensor


def one_read(path: Path) -> float:
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        start = time.perf_counter()
        memory = torch.empty(size, dtype=torch.uint8).numpy().data
        at = 0
        while at < size:
            at += file.readinto(memory[at:]) or 0
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="write there and keep it; else a temporary folder")
    parser.add_argument("--child", choices=["load", "check", "read"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child == "read":
        print(json.dumps({"seconds": one_read(options.folder / "model.safetensors")}))
        return
    if options.child:
        print(json.dumps(one_load(options.folder, options.child == "check")))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "model.safetensors").is_file():
            write(folder, options.layers)

        def child(kind: str) -> dict[str, Any]:
            command = [sys.executable, __file__, "--child", kind, "--folder", str(folder)]
            done: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            return done

        child("check")
        print("every byte of the file is in memory, checksums equal")
        loads, reads = [], []
        for _ in range(options.rounds):
            loads.append(child("load"))
            reads.append(child("read")["seconds"])
        load_s, read_s = statistics.median(r["seconds"] for r in loads), statistics.median(reads)
        one = loads[0]
        report = {
            "file_bytes": (folder / "model.safetensors").stat().st_size,
            "load_s": round(load_s, 3),
            "readinto_s": round(read_s, 3),
            "ratio": round(load_s / read_s, 3),
            "planned_bytes": one["planned"],
            "held_bytes": one["held"],
            "peak_over_held": round(max(r["peak"] for r in loads) / one["held"], 4),
            "peak_above_held_bytes": max(r["peak"] for r in loads) - one["held"],
        }
        gbs = one["read"] / 1e9
        print(f"load {load_s:.2f} s ({gbs / load_s:.2f} GB/s), readinto {read_s:.2f} s: ratio {report['ratio']}")
        print(json.dumps(report))


if __name__ == "__main__":
    main()
