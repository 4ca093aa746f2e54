"""Runs the GPU suite where pytest may be missing, and its launches alone for a sanitizer.

python tests/gpu/run.py [WORDS]            by pytest, or else by the few lines below; tests whose names have all words
python tests/gpu/run.py --launch [WORDS]   each of cases.SUBSET launched once, its outcome not looked at
"""

import importlib.util
import itertools
import re
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    if "--launch" in sys.argv:
        sys.exit(launch(words))
    own = "--own" in sys.argv or importlib.util.find_spec("pytest") is None
    sys.exit(run(words) if own else by_pytest(words))


def by_pytest(words: list[str]) -> int:
    """Without tests/conftest.py, which wants hypothesis; warnings of other versions are no failures here."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-s", "-p", "no:cacheprovider", "-W", "default"]
    command += ["--tb=short", "--durations=15", f"--confcutdir={HERE}", f"--rootdir={HERE.parents[1]}"]
    command += ["-k", " and ".join(words)] if words else []
    return subprocess.call([*command, str(HERE)], cwd=HERE.parents[1])


def launch(words: list[str]) -> int:
    """As many as fit into the seconds; a sanitizer makes them long."""
    begin, left = time.monotonic(), []
    seconds = next((float(word.partition("=")[2]) for word in sys.argv if word.startswith("--seconds=")), float("inf"))
    from gpu import cases, real

    names = [name for name in cases.SUBSET if all(word in name for word in words)]
    for name in names:
        if time.monotonic() - begin > seconds:
            left.append(name)
            continue
        cases.CASES[name](real.S.canvas).ours()
        real.wait()
        print(f"{name}, {time.monotonic() - begin:.1f} s", flush=True)
    print(f"{len(names) - len(left)} of {len(names)} launched" + (f", no time for {'; '.join(left)}" if left else ""))
    return 0


# ── a pytest of marks and parameters alone ────────────────────────────────────────────────────────────────────────


def stand_in() -> types.ModuleType:
    """What the suite asks of pytest."""

    def parametrize(names: Any, values: Any, ids: Any = None) -> Callable[[Any], Any]:
        fields = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)

        def mark(test: Any) -> Any:
            rows = [(v,) if len(fields) == 1 else tuple(v) for v in values]
            test.parameters = [[dict(zip(fields, row, strict=True)) for row in rows], *getattr(test, "parameters", [])]
            return test

        return mark

    module = types.ModuleType("pytest")
    module.mark = types.SimpleNamespace(gpu=None, parametrize=parametrize)  # type: ignore[attr-defined]
    return module


def tests(words: list[str]) -> Iterator[tuple[str, Callable[..., None], dict[str, Any]]]:
    sys.modules["pytest"] = stand_in()
    from gpu import test_kernels, test_session

    for name, test in (vars(test_session) | vars(test_kernels)).items():
        if name.startswith("test_") and callable(test):
            for chosen in itertools.product(*getattr(test, "parameters", [])):
                given = {k: v for part in chosen for k, v in part.items()}
                label = f"{name}[{', '.join(map(str, given.values()))}]"
                if all(word in label for word in words):
                    yield label, test, given


def run(words: list[str]) -> int:
    passed, failed = 0, []
    begin = time.monotonic()
    for label, test, given in tests(words):
        start = time.monotonic()
        try:
            test(**given)
        except Exception:
            failed.append(label)
            print(f"FAILED {label}\n{_short(traceback.format_exc())}", flush=True)
        else:
            passed += 1
            print(f"passed {label} {time.monotonic() - start:.2f} s", flush=True)
    print("\n".join(f"FAILED {label}" for label in failed))
    print(f"{passed} passed, {len(failed)} failed in {time.monotonic() - begin:.0f} s")
    return int(bool(failed) or not passed)


def _short(text: str) -> str:
    """A compiler's error may have thousands of lines."""
    lines = text.splitlines()
    kept = lines if len(lines) <= 60 else [*lines[:25], "…", *(n for n in lines[25:-20] if re.search("error", n))][:60]
    return "\n".join(kept if len(lines) <= 60 else [*kept, "…", *lines[-20:]])


if __name__ == "__main__":
    main()
