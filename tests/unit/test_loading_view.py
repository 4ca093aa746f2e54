"""What a reader sees of a load: nothing of a small one, its bytes of a large one, and what it did where that is asked."""

from dataclasses import replace

import pytest

from dgemma_local.loading import Proof
from dgemma_local.ui import loading

PROOF = Proof(
    placed=46_981,
    compared=2,
    ignored={f"model.encoder.vision_tower.{n}": "images are not read yet" for n in range(356)},
    filled=665,
    resident={("experts", "nvfp4"): 12_846_458_880, ("norms and scalars", "bf16"): 1_406_584},
    read=16_903_018_824,
    seconds=9.25,
    checksum="5f0c2e9a41d7b386",
)


def test_a_proof_in_lines() -> None:
    assert list(loading.proof_lines(PROOF)) == [
        "loaded: 46,981 tensors placed in 665 parameters, 16.90 GB in 9.2 s (1.83 GB/s)",
        "left out: 356 tensors (images are not read yet)",
        "compared: 2 copies of tied weights, all equal",
        "held: experts nvfp4 12.85 GB, norms and scalars bf16 1.41 MB",
        "checksum of the stored bytes: 5f0c2e9a41d7b386",
    ]
    assert len(list(loading.proof_lines(Proof()))) == 2


def test_a_large_load_shows_its_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    with loading.progress() as arrived:
        for done in range(2, 21, 2):
            arrived(done * 10**9, 20 * 10**9)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "loading 20.0 GB" and len(lines) == 11
    assert lines[-1].startswith("loading: 100 %, ") and lines[-1].endswith("/s")


@pytest.mark.parametrize("quiet", [False, True])
def test_a_small_load_or_a_quiet_one_shows_nothing(quiet: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with loading.progress(quiet=quiet) as arrived:
        arrived(100, 20 * 10**9 if quiet else 200)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("mode", "words", "said"),
    [
        ("graphs", (), ["operations: fused kernels, a CUDA graph a pass"]),
        ("graphs", ("fast-head",), ["operations: fused kernels, a CUDA graph a pass", "DGEMMA_OPS: fast-head"]),
        ("eager launches: it failed: x", (), ["operations: fused kernels, launch by launch, since it failed: x"]),
        ("torch: the model is on cpu", ("torch",), ["operations: plain torch, since the model is on cpu"]),
        (
            "torch: it is so",
            ("fast-head", "torch"),
            ["operations: plain torch, since it is so", "DGEMMA_OPS: fast-head, without effect in plain torch"],
        ),
    ],
)
def test_what_the_operations_run_on_is_said(mode: str, words: tuple[str, ...], said: list[str]) -> None:
    assert list(loading.operation_lines(mode, words)) == said


@pytest.mark.parametrize(("seconds", "given"), [(0.005, False), (0.099, False), (0.1, True)])
def test_a_moment_gives_no_rate(seconds: float, given: bool) -> None:
    assert ("/s)" in next(loading.proof_lines(replace(PROOF, seconds=seconds)))) == given
