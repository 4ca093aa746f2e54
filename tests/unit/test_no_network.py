"""No telemetry: with every way to a network blocked, the demo runs, and nothing has tried to get out."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
RECORDING = next(iter(sorted((ROOT / "examples/recordings").glob("*.jsonl*"))))
BLOCKED = """
import atexit, json, os, socket, sys
tried = []
def refuse(name):
    def refused(*arguments, **more):
        tried.append(f"{name}{arguments[-1:]!r}")
        raise OSError("no network in this test")
    return refused
for name in ("connect", "connect_ex", "sendto", "bind"):
    setattr(socket.socket, name, refuse(name))
for name in ("getaddrinfo", "gethostbyname", "create_connection"):
    setattr(socket, name, refuse(name))
atexit.register(lambda: open(os.environ["TRIED"], "w").write(json.dumps(tried)))
"""
WAYS = {
    "run": (["run", "-p", "Spell river.", "-m", "demo-text", "--seed", "1"], ""),
    "run, the model chosen": (["run", "-p", "Hi", "--seed", "1"], ""),
    "replay": (["replay", str(RECORDING)], ""),
    "config": (["config"], ""),
    "models": (["models"], ""),
    "chat": (["chat", "-m", "demo-text"], "Spell river.\n/exit\n"),
}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_sent(way: str, tmp_path: Path) -> None:
    arguments, stdin = WAYS[way]
    code = f"{BLOCKED}\nsys.argv = ['dgemma', *{arguments!r}]\nfrom dgemma_local.__main__ import main\nmain()"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    environment |= {
        "TRIED": str(tmp_path / "tried.json"),
        "HOME": str(tmp_path),
        "DGEMMA_CONFIG": os.devnull,
        "CUDA_VISIBLE_DEVICES": "",
    }
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        input=stdin,
        cwd=ROOT,
        env=environment,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    assert json.loads((tmp_path / "tried.json").read_text(encoding="utf-8")) == []
    assert found.stdout


def test_the_block_would_be_seen(tmp_path: Path) -> None:
    code = f"{BLOCKED}\ntry:\n    socket.create_connection(('localhost', 1))\nexcept OSError:\n    pass"
    environment = os.environ | {"TRIED": str(tmp_path / "tried.json")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)
    assert json.loads((tmp_path / "tried.json").read_text(encoding="utf-8")) == ["create_connection(('localhost', 1),)"]
