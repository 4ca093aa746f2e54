"""triton where something here can use it; elsewhere a stand-in, so that every kernel file imports and its twin runs.

It is imported with a CUDA build of torch, under the interpreter (TRITON_INTERPRET=1), or where somebody imported it
before, as the compile suite does. On a CPU build of torch nothing could launch a kernel, and 0.4 s of start-up would buy
nothing; on macOS and Windows it is not installed.
"""

import os
import sys
from importlib import import_module
from typing import Any

import torch


class _Absent:
    """Stands where a triton object would: decorators keep their function, everything else is this again."""

    def __getattr__(self, name: str) -> "_Absent":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else self


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

triton: Any = _Absent()
tl: Any = _Absent()
INSTALLED = False
if INTERPRETED or torch.version.cuda is not None or "triton" in sys.modules:
    try:
        triton, tl = import_module("triton"), import_module("triton.language")
        INSTALLED = True
    except ModuleNotFoundError:
        pass
