"""The one door to the kernels: which way a call goes, why, and that nothing but torch is needed for the twins."""

import os
import subprocess
import sys
from pathlib import Path

import published
import pytest
import torch
from dgemma_local.kernels._launch import ADA, BLACKWELL, HOPPER, Gpu, Tile, choose, recording
from torch import Tensor

from dgemma_local import ops, quant
from dgemma_local.cache import Cache, Room
from dgemma_local.card import Card
from dgemma_local.checkpoint import Checkpoint
from dgemma_local.config import load_model_config
from dgemma_local.errors import UsageError
from dgemma_local.layout import Options
from dgemma_local.planning import plan_run

CPU = torch.device("cpu")
KERNELS = Path(__file__).parents[2] / "kernels"


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DGEMMA_OPS", raising=False)


def test_a_cpu_takes_the_twins_and_says_so() -> None:
    assert ops.why_torch(CPU, torch.bfloat16) == "the model is on cpu"


def test_the_environment_s_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGEMMA_OPS", "fast-head, nvfp4-rows")
    assert ops.wishes() == {"fast-head", "nvfp4-rows"}
    monkeypatch.setenv("DGEMMA_OPS", "tritn")
    with pytest.raises(UsageError, match="DGEMMA_OPS has the word 'tritn'") as error:
        ops.wishes()
    assert error.value.fix == f"choose of: {', '.join(ops.WISHES)}"


@pytest.mark.parametrize(
    ("installed", "capability", "dtype", "why"),
    [
        (True, (8, 9), torch.bfloat16, None),
        (True, (12, 0), torch.bfloat16, None),
        (False, (8, 9), torch.bfloat16, "triton is not installed"),
        (True, (8, 6), torch.bfloat16, "the card's capability is 8.6, and the kernels begin at 8.9"),
        (True, (8, 9), torch.float32, "the model is in float32, not bfloat16"),
    ],
)
def test_what_a_card_takes(
    installed: bool,
    capability: tuple[int, int],
    dtype: torch.dtype,
    why: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ops, "INSTALLED", installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    ops._without_kernels.cache_clear()
    assert ops.why_torch(torch.device("cuda"), dtype) == why
    monkeypatch.setenv("DGEMMA_OPS", "torch")
    assert ops.why_torch(torch.device("cuda"), dtype) == (why or "DGEMMA_OPS=torch asks for it")
    ops._without_kernels.cache_clear()


def test_gradients_take_the_twins() -> None:
    with recording(ADA):
        assert not ops.fused(torch.empty(1, device="meta"))
        with torch.no_grad():
            assert ops.fused(torch.empty(1, device="meta"))


@torch.no_grad()
@pytest.mark.parametrize(("gpu", "words", "forms"), [
    (ADA, "", ("plain", "fp8", "plain")),
    (ADA, "nvfp4-rows", ("plain", "fp8", "plain")),
    (HOPPER, "nvfp4-rows", ("plain", "fp8", "plain")),
    (BLACKWELL, "", ("plain", "fp8", "plain")),
    (BLACKWELL, "nvfp4-rows", ("plain", "fp8", "nvfp4")),
])  # fmt: skip
def test_rows_take_the_form_that_their_matrix_reads(
    gpu: Gpu, words: str, forms: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DGEMMA_OPS", words)
    x = torch.empty(4, 32, dtype=torch.bfloat16, device="meta")
    matrices: list[quant.Weight] = [
        torch.empty(16, 32, device="meta"),
        quant.Fp8.empty((16, 32), device="meta"),
        quant.Nvfp4.empty((16, 32), device="meta"),
    ]
    with recording(gpu):
        assert tuple(ops.form(x, w) for w in matrices) == forms
    assert [ops.form(torch.zeros(4, 32), w) for w in matrices] == ["plain"] * 3  # on a CPU activations stay as they are


def test_the_largest_activations_scale_rules() -> None:
    def matrix(divides: bool, *scales: float) -> quant.Nvfp4:
        w = quant.Nvfp4.empty((len(scales), 16, 32), divides=divides)
        w.input_scale.copy_(torch.tensor(scales).view(-1, 1))
        return w

    assert ops._input_scale(matrix(True, 8.0, 2.0, 4.0)).tolist() == [2.0]
    assert ops._input_scale(matrix(False, 0.125, 0.5, 0.25)).tolist() == [2.0]


def test_a_card_that_no_table_lists_takes_the_newest_older_one_s_tile_if_that_fits() -> None:
    small, large = Tile(64, 64, 64, 4, 2), Tile(128, 128, 64, 8, 4)
    tiles = {(8, 9): small, (9, 0): large}
    assert choose(tiles, ADA) is small and choose(tiles, HOPPER) is large
    assert choose(tiles, BLACKWELL) is small  # newer than Hopper, and less than half its shared memory
    assert choose(tiles, Gpu((10, 0), 232_448, 148)) is large
    assert choose(tiles, Gpu((8, 0), 166_912, 108)) is small


# ── without triton ────────────────────────────────────────────────────────────────────────────────────────────────


def python(program: str, **environment: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    return done.stdout.strip()


def test_a_cpu_build_of_torch_does_not_import_triton() -> None:
    program = "import sys, torch, dgemma_local.session; print('triton' in sys.modules, torch.version.cuda)"
    assert python(program) in ("False None", "True " + str(torch.version.cuda))


def test_every_twin_imports_and_runs_where_triton_is_not_installed() -> None:
    """TRITON_INTERPRET asks for it, and it is not there: a whole answer of the demo model on the twins."""
    files = ", ".join(sorted(f"'{file.stem}'" for file in KERNELS.glob("*.py") if file.stem != "__init__"))
    program = f"""
import sys
sys.modules["triton"] = None
from importlib import import_module
for name in ({files}):
    import_module("dgemma_local.kernels." + name)
from dgemma_local.kernels._triton import INSTALLED
from dgemma_local.session import open_session
from dgemma_local.events import Finished
session = open_session("demo-text")
events = list(session.answer([{{"role": "user", "content": "Spell dog."}}], seed=1))
print(INSTALLED, session.slow_because, isinstance(events[-1], Finished), events[-1].reason, sep="; ")
"""
    assert python(program, TRITON_INTERPRET="1") == "False; triton is not installed; True; end"


@torch.no_grad()
def test_a_growing_context_takes_few_compilations() -> None:
    config = load_model_config(Path(__file__).parent.parent / "golden" / "tiny")
    cache = Cache(config, torch.bfloat16, "meta")
    cache.reserve(Room(context=10_000, rows=12, slack=12))
    reaches = set()
    with recording(ADA):
        for length in range(0, 9_000, 12):
            cache.length = length
            for kind in config.rope:
                sight = ops.sight(torch.empty(12, 32, device="meta"), cache, kind, 12, False, config.sliding_window)
                assert sight.reach >= cache.reach(kind, 12)
                assert sight.window == (None if kind == "full" else config.sliding_window)
                reaches.add(sight.reach)
    assert len(reaches) <= 12


def test_a_turned_embedding_is_made_and_planned_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = published.real_config(tmp_path)
    checkpoint = Checkpoint(tmp_path, published.tensors("redhat-nvfp4"), published.QUANTISATION["redhat-nvfp4"])
    card = Card(index=0, name="RTX 4090", uuid="GPU-0", total=24 * 10**9, free=24 * 10**9)

    def planned(*, fp8: bool) -> int:
        options = Options(fp8_embedding=fp8)
        return plan_run(checkpoint, config, options, device="cuda", card=card).estimate.weights

    plain, fp8 = planned(fp8=False), planned(fp8=True)
    monkeypatch.setenv("DGEMMA_OPS", "fp8-soft")
    turned = config.vocab_size * config.hidden_size
    assert planned(fp8=False) == plain and planned(fp8=True) == fp8 + turned
    across = ops.Head.of(quant.Fp8.empty((config.vocab_size, config.hidden_size), device="meta"), 30.0, 53.0).across
    assert across is not None and across.nbytes == pytest.approx(turned, rel=1e-3)


def test_the_twins_of_a_linear_are_quant_s_own() -> None:
    """On a CPU packed weights are decoded block by block, and rows stay as they are."""
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    w: Tensor = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    for matrix in (w, quant.quantise_fp8(w), quant.quantise_nvfp4(w)):
        assert torch.equal(ops.linear(x, matrix, x.dtype), quant.linear(x, matrix))
