"""The compile tests' process: triton compiles, for cards that are not here, and is imported before the kernels.

These tests run apart from the others, for an interpreting process cannot compile: `pytest tests/compile`, or all suites by
`pytest` (tests/unit/test_kernel_suites.py starts this one). Compiled code goes into a temporary folder, or into
DGEMMA_COMPILE_CACHE, which makes a second run short; triton 3.6 likewise, or into DGEMMA_OLD_TRITON.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    raise pytest.UsageError("TRITON_INTERPRET=1 is set: an interpreting process cannot compile")
_temporary = tempfile.TemporaryDirectory(prefix="dgemma-compile-")
os.environ["TRITON_CACHE_DIR"] = os.environ.get("DGEMMA_COMPILE_CACHE") or _temporary.name

import triton  # noqa: E402, F401  before the kernels, which look whether somebody did
from compile.configurations import CONFIGURATIONS  # noqa: E402
from cross import CARDS, OLD_TRITON, Artefact, compile_numbered, numbered  # noqa: E402

WORKERS = 2


@pytest.fixture(scope="session")
def compiled(old_compiler: object) -> Iterator[dict[str, "Future[Artefact]"]]:
    """By key (cross.key_of): every distinct launch's artefact to come. Two processes compile while tests wait in order."""
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        futures: dict[str, Future[Artefact]] = {}
        for entry in CONFIGURATIONS:
            for card in (name for name, gpu in CARDS.items() if gpu in entry.gpus):
                for number, _, _, key in numbered(entry, card):
                    if key not in futures:
                        futures[key] = pool.submit(compile_numbered, entry.name, card, number)
        yield futures
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def old_compiler() -> Iterator["subprocess.Popen[str]"]:
    """One launch of each kernel and card under the oldest triton, which lies in a folder of its own."""
    script = Path(__file__).parents[1] / "cross.py"
    with tempfile.TemporaryDirectory(prefix="dgemma-triton-") as temporary:
        folder = Path(os.environ.get("DGEMMA_OLD_TRITON") or temporary)
        if not (folder / "triton").is_dir():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            subprocess.run([*pip, "--target", str(folder), f"triton=={OLD_TRITON}"], check=True)
        environment = os.environ | {"PYTHONPATH": str(folder)}
        with subprocess.Popen(
            [sys.executable, str(script), "--once"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            yield process
            process.kill()
