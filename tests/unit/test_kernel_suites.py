"""The kernels' two suites, each in a process of its own, both at once: one interprets triton, the other compiles.

No process can do both, so that a plain `pytest` reaches them through here.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUITES = {"tests/kernels": {"TRITON_INTERPRET": "1"}, "tests/compile": {}}


@pytest.mark.slow
def test_both_suites(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    running = {}
    for suite, settings in SUITES.items():
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET" and not k.startswith("COV_")}
        output = (tmp_path / suite.replace("/", "-")).open("w+")
        command = [
            sys.executable,
            "-m",
            "pytest",
            suite,
            "-q",
            "--no-header",
            "-p",
            "no:cacheprovider",
            "--durations=3",
        ]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment | settings, stdout=output, stderr=subprocess.STDOUT
        )
        running[suite] = process, output
    failed = []
    for suite, (process, output) in running.items():
        code = process.wait()
        output.seek(0)
        text = output.read()
        output.close()
        summary = text.strip().splitlines()[-1]
        with capsys.disabled():
            print(f"\n{suite}: {summary}")
        passed = re.search(r"(\d+) passed", summary)
        if code or passed is None or int(passed[1]) == 0 or re.search(r"failed|error|skipped", summary):
            failed.append(f"{suite}, exit code {code}\n{text}")
    assert not failed, "\n".join(failed)
