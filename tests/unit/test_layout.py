"""Every tensor of the four published checkpoints has its place, to the byte."""

from pathlib import Path

import published
import pytest

from dgemma_local.checkpoint import TensorInfo
from dgemma_local.config import ModelConfig
from dgemma_local.fit import Estimate, estimate
from dgemma_local.layout import Options, Plan, plan
from dgemma_local.registry import table
from dgemma_local.schemes import scheme_of

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
GIANT = {
    "google-bf16": (1_047, 51_647_562_456),
    "redhat-fp8-dynamic": (24_232, 27_197_665_496),
    "redhat-nvfp4": (47_337, 18_048_607_656),
    "nvidia-nvfp4": (47_067, 18_818_050_776),
}
VISION = 1_145_588_832  # bytes of the tower and its projection, bf16 everywhere
ATTENTION, ATTENTION_FP8 = 2_220_359_680, 1_110_850_560
EMBEDDING, EMBEDDING_FP8 = 1_476_395_008, 738_721_792


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return published.real_config(tmp_path_factory.mktemp("real"))


@pytest.fixture(scope="module")
def lists() -> dict[str, dict[str, TensorInfo]]:
    return {name: published.tensors(name) for name in GIANT}


def planned(config: ModelConfig, tensors: dict[str, TensorInfo], name: str, options: Options | None = None) -> Plan:
    return plan(config, tensors, scheme_of(published.QUANTISATION[name]), options)


@pytest.mark.parametrize("name", GIANT)
def test_all_tensors_of_a_published_checkpoint_are_planned(
    name: str, config: ModelConfig, lists: dict[str, dict[str, TensorInfo]]
) -> None:
    tensors = lists[name]
    assert (len(tensors), sum(t.nbytes for t in tensors.values())) == GIANT[name]
    layout = planned(config, tensors, name)
    assert {place.tensor for place in layout.placements} | layout.ignored.keys() == tensors.keys()
    assert len(layout.placements) + len(layout.ignored) == len(tensors) and not layout.copies
    assert len(layout.ignored) == 356 and all("vision" in tensor for tensor in layout.ignored)
    # what is resident is what is stored, to the byte, but for the vision tower
    assert sum(layout.resident.values()) == GIANT[name][1] - VISION


@pytest.mark.parametrize("name", GIANT)
def test_every_row_of_every_parameter_is_filled_once(
    name: str, config: ModelConfig, lists: dict[str, dict[str, TensorInfo]]
) -> None:
    layout = planned(config, lists[name], name)
    spans: dict[tuple[str, str, int | None], list[tuple[int, int]]] = {}
    for place in layout.placements:
        spans.setdefault((place.parameter, place.field, place.expert), []).append((place.start, place.stop))
    fields = {"plain": {""}, "fp8": {"codes", "scale"}, "nvfp4": {"packed", "scale", "global_scale", "input_scale"}}
    for parameter, held in layout.held.items():
        assert {where for p, where, _ in spans if p == parameter} == fields[held.form]
        stacked = len(held.shape) == 3 and held.form != "plain"
        experts = range(held.shape[0]) if stacked else [None]
        for where in fields[held.form]:
            size = len(held.heights) if where in ("global_scale", "input_scale") else held.shape[1 if stacked else 0]
            for expert in experts:
                covered = [row for a, b in sorted(spans[parameter, where, expert]) for row in range(a, b)]
                assert covered == list(range(size)), (parameter, where, expert)


@pytest.mark.parametrize(
    ("entry", "name", "leaner"),
    [
        ("26b-a4b-bf16", "google-bf16", None),
        ("26b-a4b-fp8", "redhat-fp8-dynamic", None),
        ("26b-a4b-nvfp4", "redhat-nvfp4", 16.8),
        ("26b-a4b-nvfp4-nvidia", "nvidia-nvfp4", 17.6),
    ],
)
def test_the_tables_say_what_is_planned(
    entry: str, name: str, leaner: float | None, config: ModelConfig, lists: dict[str, dict[str, TensorInfo]]
) -> None:
    """models.toml's `needs`, and README's two columns."""

    def planned_for(options: Options | None = None) -> Estimate:
        return estimate(config, planned(config, lists[name], name, options).resident, context=8192)

    as_stored = planned_for()
    assert table()[entry].needs == pytest.approx(as_stored.total / 1e9, abs=0.05)
    (row,) = [line for line in README.splitlines() if line.startswith(f"| `{entry}`")]
    files, plain, fp8 = (cell.strip() for cell in row.split("|")[3:6])
    stored = table()[entry].bytes
    assert stored and files == f"{stored / 1e9:.1f} GB" and plain == f"{as_stored.allocated / 1e9:.1f} GB"
    if leaner is not None:
        assert fp8 == f"{leaner} GB" == f"{planned_for(Options(fp8_attention=True)).allocated / 1e9:.1f} GB"


def test_components_have_the_published_bytes(config: ModelConfig, lists: dict[str, dict[str, TensorInfo]]) -> None:
    sizes = planned(config, lists["google-bf16"], "google-bf16").resident
    assert sizes["experts", "bf16"] == 45_675_970_560
    assert sizes["attention", "bf16"] == ATTENTION
    assert sizes["dense MLP", "bf16"] == 1_070_530_560
    assert sizes["embedding", "bf16"] == EMBEDDING
    assert sizes["self-conditioning", "bf16"] == 35_684_352
    assert sizes["router", "bf16"] == 21_626_880
    assert sizes["norms and scalars", "bf16"] == 1_406_584
    fp8 = planned(config, lists["redhat-fp8-dynamic"], "redhat-fp8-dynamic").resident
    assert fp8["experts", "fp8"] == 22_870_425_600 and fp8["attention", "fp8"] == ATTENTION_FP8
    nvfp4 = planned(config, lists["redhat-nvfp4"], "redhat-nvfp4").resident
    assert nvfp4["experts", "nvfp4"] == 12_846_458_880 and nvfp4["dense MLP", "nvfp4"] == 301_087_440
    assert nvfp4["attention", "bf16"] == ATTENTION


@pytest.mark.parametrize("name", ["redhat-nvfp4", "nvidia-nvfp4"])
def test_attention_and_embedding_may_be_held_in_fp8(
    name: str, config: ModelConfig, lists: dict[str, dict[str, TensorInfo]]
) -> None:
    before = planned(config, lists[name], name).resident
    after = planned(config, lists[name], name, Options(fp8_attention=True, fp8_embedding=True)).resident
    assert after["attention", "fp8"] == ATTENTION_FP8 and after["embedding", "fp8"] == EMBEDDING_FP8
    assert sum(before.values()) - sum(after.values()) == ATTENTION - ATTENTION_FP8 + EMBEDDING - EMBEDDING_FP8


def test_the_real_geometry_has_the_published_parameters(
    config: ModelConfig, lists: dict[str, dict[str, TensorInfo]]
) -> None:
    held = planned(config, lists["google-bf16"], "google-bf16").held
    sizes = {parameter: h.empty("meta").numel() for parameter, h in held.items()}
    assert sum(sizes.values()) == 25_823_781_228 - 572_794_416
    packed = planned(config, lists["redhat-nvfp4"], "redhat-nvfp4").held
    assert packed["layers.0.experts.gate_up_proj"].heights == (704, 704)
    assert packed["layers.0.mlp.down_proj"].heights == (2816,)
