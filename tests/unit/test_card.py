"""Cards and holders from nvidia-smi as it answered on real machines, by an executable of that name on PATH."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from dgemma_local import card
from dgemma_local.card import MIB, Card, Holder, ask, cards, host_memory

# Written as `--format=csv,noheader,nounits` prints them: index, name, total, used, capability, driver, uuid, free.
# Totals, capabilities and the reserved share (total - used - free) are those of such cards; uuids are made up.
A, B = "GPU-3a1cb1e4-0f4e-6b52-9f7a-5d0a3f1f8c11", "GPU-77e0d2aa-8c54-41c8-bb7b-0c1d3d6f2b90"
RTX_4090 = f"0, NVIDIA GeForce RTX 4090, 24564, 3321, 8.9, 550.144.03, {A}, 20895\n"
RTX_5090 = f"0, NVIDIA GeForce RTX 5090, 32607, 2, 12.0, 575.57.08, {A}, 32100\n"
H200 = f"0, NVIDIA H200, 143771, 0, 9.0, 570.86.15, {A}, 143156\n"
TWO = RTX_4090 + f"1, NVIDIA GeForce RTX 3090, 24576, 14, 8.6, 550.144.03, {B}, 24112\n"
MIG = f"0, NVIDIA A100-SXM4-80GB, 81920, [N/A], 8.0, 535.183.01, {A}, [N/A]\n"
SHARED = f"0, NVIDIA GB10, [N/A], [N/A], 12.1, 580.95.05, {A}, [N/A]\n"  # its memory is the host's
APPS = f"4711, /usr/bin/python3, 2874, {A}\n1902, /opt/comfy, v2/bin/main, 412, {A}\n"


@pytest.fixture
def nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> "Fake":
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Fake(tmp_path / "nvidia-smi")


class Fake:
    """Answers the two queries, and nothing else."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def says(self, gpus: str, apps: str = "", code: int = 0) -> None:
        self.script(
            f"""case "$1 $2" in
"--query-gpu=index,name,memory.total,memory.used,compute_cap,driver_version,uuid,memory.free {CSV}") printf '%s' '{gpus}';;
"--query-compute-apps=pid,process_name,used_memory,gpu_uuid {CSV}") printf '%s' '{apps}';;
*) echo "unknown: $*"; exit 2;;
esac
exit {code}"""
        )

    def script(self, body: str) -> None:
        self.path.write_text(f"#!/bin/sh\n{body}\n")
        self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)


CSV = "--format=csv,noheader,nounits"


def test_a_4090_and_who_holds_it(nvidia_smi: Fake) -> None:
    nvidia_smi.says(RTX_4090, APPS + f"77, someone else, 500, {B}\n")
    assert cards() == (
        Card(
            index=0,
            name="NVIDIA GeForce RTX 4090",
            uuid=A,
            total=24564 * MIB,
            free=20895 * MIB,  # and not 24564 - 3321: the driver keeps 348 for itself
            capability=(8, 9),
            driver="550.144.03",
            holders=(
                Holder(pid=4711, name="/usr/bin/python3", bytes=2874 * MIB),
                Holder(pid=1902, name="/opt/comfy, v2/bin/main", bytes=412 * MIB),
            ),
        ),
    )


@pytest.mark.parametrize(
    ("row", "total", "free", "capability"),
    [(RTX_5090, 34_190_917_632, 32100 * MIB, (12, 0)), (H200, 150_754_820_096, 143156 * MIB, (9, 0))],
)
def test_other_cards(nvidia_smi: Fake, row: str, total: int, free: int, capability: tuple[int, int]) -> None:
    nvidia_smi.says(row)
    (found,) = cards()
    assert (found.total, found.free, found.capability, found.holders) == (total, free, capability, ())


@pytest.mark.parametrize(("row", "total"), [(MIG, 81920 * MIB), (SHARED, None)])
def test_what_the_driver_does_not_say_is_not_known(nvidia_smi: Fake, row: str, total: int | None) -> None:
    nvidia_smi.says(row, f"12, [Insufficient Permissions], [N/A], {A}\n[N/A], x, 3, {A}\n")
    (found,) = cards()
    assert (found.total, found.free) == (total, None)
    assert found.holders == (Holder(pid=12, name="[Insufficient Permissions]", bytes=None),)


def test_without_the_free_field_the_rest_of_the_total_is_taken(nvidia_smi: Fake) -> None:
    nvidia_smi.says(f"0, NVIDIA Something, 1000, 300, [N/A], 1.0, {A}, [N/A]\n")
    (found,) = cards()
    assert (found.free, found.capability) == (700 * MIB, None)


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1]),
        ("", []),
        ("0", [0]),
        ("1", [1]),
        ("1,0", [1, 0]),
        (" 1 , 0 ", [1, 0]),
        (A, [0]),
        (B[:12], [1]),
        ("GPU-", []),  # the beginning of both
        ("-1", []),
        ("1,7,0", [1]),  # CUDA stops at the first that is no card
        ("MIG-deadbeef", []),
    ],
)
def test_the_cards_that_cuda_would_show(
    nvidia_smi: Fake, monkeypatch: pytest.MonkeyPatch, visible: str | None, indices: list[int]
) -> None:
    nvidia_smi.says(TWO)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [found.index for found in cards()] == indices


def test_holders_stand_with_their_own_card(nvidia_smi: Fake) -> None:
    nvidia_smi.says(TWO, f"5, a, 10, {B}\n6, b, 20, {B}\n7, c, 30, {A}\n")
    assert [[holder.pid for holder in found.holders] for found in cards()] == [[7], [6, 5]]


def test_no_nvidia_smi_is_no_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cards() == ()


@pytest.mark.parametrize(
    "body",
    [
        "echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9",
        "echo 'No devices were found'",
        "exit 0",
        f"printf '0, half a row, {A}'",
        "printf '\\377\\376, x'",
        f"printf '%s' '{RTX_4090}'; exit 15",
        "kill -9 $$",
    ],
)
def test_an_nvidia_smi_that_fails_is_no_card(nvidia_smi: Fake, body: str) -> None:
    nvidia_smi.script(body)
    assert cards() == ()


def test_an_nvidia_smi_that_may_not_be_run_is_no_card(nvidia_smi: Fake) -> None:
    nvidia_smi.path.mkdir()
    assert cards() == ()


def test_an_nvidia_smi_that_hangs_is_no_card(nvidia_smi: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "TIMEOUT", 0.2)
    nvidia_smi.script("exec sleep 60")
    assert cards() == ()


@pytest.mark.parametrize("body", ["exec yes", "exec yes >&2", "trap '' PIPE; exec yes"])
def test_an_nvidia_smi_that_prints_for_ever_is_no_card(nvidia_smi: Fake, body: str) -> None:
    nvidia_smi.script(body)
    with pytest.raises(subprocess.SubprocessError, match="without end"):
        ask(["nvidia-smi"], 30)
    assert cards() == ()


def test_so_much_is_read_of_an_answer_and_no_more(nvidia_smi: Fake) -> None:
    nvidia_smi.script(f"head -c {card.LARGEST} /dev/zero; echo said >&2; exit 3")
    answer = ask(["nvidia-smi"], 30)
    assert (len(answer.out), answer.errors, answer.code) == (card.LARGEST, "said\n", 3)
    nvidia_smi.script(f"head -c {card.LARGEST + 1} /dev/zero")
    with pytest.raises(subprocess.SubprocessError):
        ask(["nvidia-smi"], 30)


def test_one_that_has_ended_and_left_its_pipe_to_another_is_not_waited_for(nvidia_smi: Fake) -> None:
    nvidia_smi.script("sleep 3 & echo $!")
    with pytest.raises(subprocess.TimeoutExpired):
        ask(["nvidia-smi"], 0.3)


@pytest.mark.parametrize(
    "row",
    [f"{'1' * 5000}, x, 1, 1, 8.9, 1.0, {A}, 1", f"0, x, {'1' * 5000}, 1, 8.{'1' * 5000}, 1.0, {A}, {'1' * 5000}"],
)
def test_a_number_of_thousands_of_digits_is_none(nvidia_smi: Fake, row: str) -> None:
    nvidia_smi.says(row, f"{'1' * 5000}, x, 3, {A}\n")
    assert [(each.total, each.free, each.capability, each.holders) for each in cards()] in (
        [],
        [(None, None, None, ())],
    )


# ── the host ──────────────────────────────────────────────────────────────────────────────────────────────────────

MEMINFO = "MemTotal:       24606004 kB\nMemFree:        17000000 kB\nMemAvailable:   22212840 kB\nSwapFree: 0 kB\n"
AVAILABLE = 22_212_840 * 1024


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = {
    "proc/meminfo": MEMINFO,
    "proc/self/cgroup": "0::/box/inner\n",
    "sys/fs/cgroup/box/memory.max": "8000000000\n",
    "sys/fs/cgroup/box/memory.current": "3000000000\n",
    "sys/fs/cgroup/box/memory.stat": "anon 1\ninactive_file 500000000\n",
    "sys/fs/cgroup/box/inner/memory.max": "max\n",
    "sys/fs/cgroup/box/inner/memory.current": "100\n",
}
V1 = {
    "proc/meminfo": MEMINFO,
    "proc/self/cgroup": "5:devices:/\n4:cpu,memory:/docker/abc\n0::/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "4000000000\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000000000\n",
    "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 250000000\n",
}


@pytest.mark.parametrize(
    ("files", "bytes"),
    [
        ({"proc/meminfo": MEMINFO}, AVAILABLE),
        (V2, 5_500_000_000),  # the group's cache is given up
        (V2 | {"sys/fs/cgroup/box/memory.max": "max\n"}, AVAILABLE),
        (V2 | {"sys/fs/cgroup/box/inner/memory.max": "1000000000"}, 999_999_900),  # the tightest counts
        (V2 | {"sys/fs/cgroup/box/memory.current": "9000000000"}, 0),
        (V1, 3_250_000_000),  # the path is the host's; within the container it is not there
        (V1 | {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, AVAILABLE),
        ({}, None),
    ],
)
def test_what_the_host_has_left(tmp_path: Path, files: dict[str, str], bytes: int | None) -> None:
    assert host_memory(write(tmp_path, files)) == bytes
