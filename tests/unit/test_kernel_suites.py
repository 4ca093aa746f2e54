"""The kernels' two suites, each in a process of its own, both at once: one interprets triton, the other compiles.

No process can do both, so that a plain `pytest` reaches them through here.
"""

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUITES = {"tests/kernels": {"TRITON_INTERPRET": "1"}, "tests/compile": {}}
ARGUMENTS = ["-q", "--no-header", "-p", "no:cacheprovider", "--durations=3"]


@pytest.mark.slow
def test_both_suites(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with ExitStack() as stack:
        running = {}
        for suite, settings in SUITES.items():
            told = tmp_path / f"{Path(suite).name}.txt"
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "pytest", suite, *ARGUMENTS],
                    cwd=ROOT,
                    env=inherited | settings,
                    stdout=stack.enter_context(told.open("w")),
                    stderr=subprocess.STDOUT,
                )
            )
            stack.callback(process.kill)  # one that ended does not mind
            running[suite] = process, told
        codes = {suite: process.wait() for suite, (process, _) in running.items()}
    wrong = []
    for suite, (_, told) in running.items():
        text = told.read_text()
        summary = text.strip().splitlines()[-1]
        with capsys.disabled():
            print(f"\n{suite}: {summary}")
        passed = re.search(r"(\d+) passed", summary)
        if codes[suite] or passed is None or int(passed[1]) == 0 or re.search("failed|error|skipped", summary):
            wrong.append(f"{suite}, exit code {codes[suite]}\n{text}")
    assert not wrong, "\n".join(wrong)
