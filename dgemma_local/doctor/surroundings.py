"""The environment variables that change what happens, as they are set. A token's value is never told."""

import os
import re
from collections.abc import Iterator

from dgemma_local import logs
from dgemma_local.doctor.examination import Machine
from dgemma_local.doctor.finding import Finding, fail, ok, warn
from dgemma_local.doctor.probe import Lost

THEIRS = re.compile(
    r"(DGEMMA|HF|HUGGING_?FACE|TRITON|CUDA|NVIDIA|PYTORCH|TORCH|TOKENIZERS|XDG)_\w+"
    r"|OMP_NUM_THREADS|MKL_NUM_THREADS|CC|TERM|COLORTERM|NO_COLOR|LANG|LC_ALL|LC_CTYPE|PYTHON(UTF8|IOENCODING|PATH|HOME)"
    r"|(HTTPS?|ALL|NO)_PROXY|SSL_CERT_FILE|LD_LIBRARY_PATH",
    re.IGNORECASE,
)
SECRET = re.compile(r"TOKEN(?!IZERS)|SECRET|PASSWORD|_KEY", re.IGNORECASE)
WORDS_LIMIT = 60.0  # seconds


def environment(machine: Machine) -> Iterator[Finding]:
    """What is set; what of it cannot be meant."""
    found = {name: told(name, value) for name, value in sorted(os.environ.items()) if THEIRS.fullmatch(name)}
    yield ok(
        "environment",
        ", ".join(f"{name}={value}" for name, value in found.items()) or "none that matter are set",
        **found,
    )
    if os.environ.get("TRITON_INTERPRET") == "1":
        what = "TRITON_INTERPRET=1: Triton's interpreter rounds bf16 wrongly, so no kernel runs"
        yield warn("environment", what, "unset TRITON_INTERPRET")
    if os.environ.get("DGEMMA_OPS") and machine.torch is not None:
        yield from _words(machine)
    if path := os.environ.get("DGEMMA_LOG"):
        logs.check(path)  # raises: the last


def told(name: str, value: str) -> str:
    """A value as it may be shown."""
    return "set, not shown" if SECRET.search(name) else value


def _words(machine: Machine) -> Iterator[Finding]:
    """Of DGEMMA_OPS."""
    try:
        found = machine.probe.ask("wishes", WORDS_LIMIT)
    except Lost:
        return  # which the checks before have told
    if "error" in found:
        yield fail("environment", found["error"], found.get("fix") or "unset DGEMMA_OPS")
