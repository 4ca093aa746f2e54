"""Checkpoint to parameters: each tensor has a place, each parameter its tensors, and the numbers are the reference's."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tiny import tiny_config, tiny_tensors, write_tensors, write_tiny
from torch import Tensor

from dgemma_local import loading
from dgemma_local.checkpoint import SINGLE, TensorInfo, open_checkpoint
from dgemma_local.config import ModelConfig, load_model_config
from dgemma_local.errors import CheckpointError
from dgemma_local.layout import Options, Placement, plan
from dgemma_local.loading import load, save
from dgemma_local.model import DiffusionGemma, parameter_shapes
from dgemma_local.quant import Weight

GOLDEN = Path(__file__).parent.parent / "golden" / "tiny"
ENCODER = "model.encoder.language_model."
DECODER = "model.decoder."

Tensors = dict[str, Tensor]


def opened(folder: Path, dtype: torch.dtype | None = None) -> Tensors:
    return plain(load(open_checkpoint(folder), load_model_config(folder), Options(dtype)))


def plain(weights: Mapping[str, Weight]) -> Tensors:
    assert all(isinstance(weight, Tensor) for weight in weights.values())
    return dict(weights)  # type: ignore[arg-type]


def refused(folder: Path) -> CheckpointError:
    """The error loading raises: one line, with a cure."""
    with pytest.raises(CheckpointError) as caught:
        opened(folder)
    assert caught.value.what.isprintable() and caught.value.fix.isprintable()
    return caught.value


def headers(tensors: Tensors, dtype: str = "F32") -> dict[str, TensorInfo]:
    return {n: TensorInfo(n, dtype, tuple(t.shape), Path("x"), t.nbytes) for n, t in tensors.items()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelConfig, Tensors]:
    """A folder to read, never to write in."""
    folder = tmp_path_factory.mktemp("tiny")
    tensors = write_tiny(folder)
    return folder, load_model_config(folder), tensors


# ── the numbers are the reference's ───────────────────────────────────────────────────────────────────────────────


def test_the_golden_model_gives_the_reference_logits() -> None:
    """Tolerances in absolute logits, which lie in [-30, 30]; vectors computed by transformers 5.24 in fp32."""
    model = DiffusionGemma(load_model_config(GOLDEN), opened(GOLDEN))
    for case in json.loads((GOLDEN / "forward.json").read_text())["cases"]:
        prompt, canvas, commit, second = (torch.tensor(case[k]) for k in ("prompt", "canvas", "commit", "canvas2"))
        cache = model.new_cache()
        model.encode(prompt, cache)
        steps = {
            "logits_step0": model.denoise(canvas, cache, None),
            "logits_with_sc": model.denoise(canvas, cache, model.signal(torch.tensor(case["sc_logits"]))),
        }
        model.encode(commit, cache)
        steps["logits_canvas2_step0"] = model.denoise(second, cache, None)
        for name, logits in steps.items():
            torch.testing.assert_close(
                logits, torch.tensor(case[name]), atol=5e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
            )


# ── each tensor in its place ──────────────────────────────────────────────────────────────────────────────────────


def test_rows_are_stacked_in_order(tiny: tuple[Path, ModelConfig, Tensors]) -> None:
    folder, config, t = tiny
    weights = opened(folder)
    assert {name: tuple(w.shape) for name, w in weights.items()} == parameter_shapes(config)
    for i, kind in enumerate("ssf"):
        attention, mlp = f"{DECODER}layers.{i}.self_attn.", f"{DECODER}layers.{i}.mlp."
        parts = [t[f"{attention}{letter}_proj.weight"] for letter in ("qk" if kind == "f" else "qkv")]
        assert torch.equal(weights[f"layers.{i}.self_attn.qkv_proj"], torch.cat(parts))
        gate, up = t[f"{mlp}gate_proj.weight"], t[f"{mlp}up_proj.weight"]
        assert torch.equal(weights[f"layers.{i}.mlp.gate_up_proj"], torch.cat([gate, up]))
    gate, up = (t[f"{DECODER}self_conditioning.{half}_proj.weight"] for half in ("gate", "up"))
    assert torch.equal(weights["self_conditioning.gate_up_proj"], torch.cat([gate, up]))


def test_encoder_and_decoder_scalars_are_not_swapped(tiny: tuple[Path, ModelConfig, Tensors]) -> None:
    folder, _, t = tiny
    weights = opened(folder)
    for i in range(3):
        decoder, encoder = t[f"{DECODER}layers.{i}.layer_scalar"], t[f"{ENCODER}layers.{i}.layer_scalar"]
        assert not torch.equal(decoder, encoder)
        assert torch.equal(weights[f"layers.{i}.layer_scalar"], decoder)
        assert torch.equal(weights[f"layers.{i}.encoder_layer_scalar"], encoder)


def test_every_other_parameter_is_its_tensor(tiny: tuple[Path, ModelConfig, Tensors]) -> None:
    folder, config, t = tiny
    weights = opened(folder)
    stacked = ("qkv_proj", "mlp.gate_up_proj", "self_conditioning.gate_up_proj", "encoder_layer_scalar")
    alone = [name for name in parameter_shapes(config) if not name.endswith(stacked)]
    assert len(alone) == 4 + 3 * 17
    for name in alone:
        published = f"{DECODER}{name}"
        assert torch.equal(weights[name], t[published if published in t else f"{published}.weight"]), name


@st.composite
def geometries(draw: st.DrawFn) -> dict[str, Any]:
    small = st.integers(1, 3)
    kv, full_kv = draw(small), draw(small)
    experts = draw(small)
    return {
        "pattern": draw(st.text("sf", max_size=4)) + "f",
        "kv_heads": kv,
        "full_kv_heads": full_kv,
        "heads": kv * full_kv * draw(small),
        "head_dim": 2 * draw(small),
        "full_head_dim": 2 * draw(small),
        "hidden": draw(small),
        "vocab": draw(small),
        "intermediate": draw(small),
        "expert_size": draw(small),
        "experts": experts,
        "top_k": draw(st.integers(1, experts)),
    }


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(geometry=geometries(), seed=st.integers(0, 99))
def test_a_plan_loses_nothing_and_fills_every_row_once(geometry: dict[str, Any], seed: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(**geometry)))
    config = load_model_config(tmp_path)
    tensors = tiny_tensors(tiny_config(**geometry), seed)
    layout = plan(config, headers(tensors))
    assert sorted(place.tensor for place in layout.placements) == sorted(tensors)
    assert not layout.copies and not layout.ignored
    rows: dict[str, list[int]] = {}
    for place in layout.placements:
        assert (place.field, place.expert, place.stop - place.start) == ("", None, len(tensors[place.tensor]))
        rows.setdefault(place.parameter, []).extend(range(place.start, place.stop))
    assert {name: sorted(filled) for name, filled in rows.items()} == {
        name: list(range(shape[0])) for name, shape in parameter_shapes(config).items()
    }


def test_embedding_and_head_are_one_matrix(tiny: tuple[Path, ModelConfig, Tensors]) -> None:
    """No second copy that another device could hold: what is written into the one is what the other multiplies by."""
    folder, config, _ = tiny
    weights = opened(folder)
    wider = parameter_shapes(dataclasses.replace(config, vocab_size=config.vocab_size + 1))
    assert [name for name in weights if tuple(weights[name].shape) != wider[name]] == ["embed_tokens"]
    model = DiffusionGemma(config, weights)
    hidden = torch.ones(1, config.hidden_size)
    weights["embed_tokens"][7].zero_()
    weights["embed_tokens"][8].fill_(1.0)
    assert not model.embed(torch.tensor([7])).any() and model.embed(torch.tensor([8])).all()
    logits = model.head(hidden)[0]
    assert logits[7] == 0 and logits[8] > 20


# ── left out, by rule ─────────────────────────────────────────────────────────────────────────────────────────────


def test_vision_is_left_out_by_name(tiny: tuple[Path, ModelConfig, Tensors], tmp_path: Path) -> None:
    folder, config, t = tiny
    vision = {
        "model.encoder.vision_tower.encoder.layers.0.mlp.gate_proj.linear.weight": torch.ones(2, dtype=torch.int8),
        "model.encoder.embed_vision.embedding_projection.weight": torch.ones(2, 2),
    }
    layout = plan(config, headers(t | vision))
    assert layout.ignored == dict.fromkeys(vision, "images are not read yet")
    write_tiny(tmp_path)
    write_tensors(tmp_path, t | vision)
    before, after = opened(folder), opened(tmp_path)
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("copy", "original"),
    [
        ("lm_head.weight", f"{DECODER}embed_tokens.weight"),
        (f"{ENCODER}embed_tokens.weight", f"{DECODER}embed_tokens.weight"),
        (f"{ENCODER}layers.1.self_attn.k_proj.weight", f"{DECODER}layers.1.self_attn.k_proj.weight"),
    ],
)
def test_a_copy_of_a_tied_weight_must_be_equal(copy: str, original: str, tmp_path: Path) -> None:
    t = write_tiny(tmp_path)
    write_tensors(tmp_path, t | {copy: t[original].clone()})
    config = load_model_config(tmp_path)
    (place,) = plan(config, open_checkpoint(tmp_path).tensors).copies
    assert place.tensor == copy
    weights = opened(tmp_path, torch.bfloat16)

    changed = t[original].clone()
    changed[-1, -1] += 1
    write_tensors(tmp_path, t | {copy: changed})
    assert f"{copy} differs from {original}" in refused(tmp_path).what

    write_tensors(tmp_path, t | {copy: t[original][:-1].clone()})
    assert f"{copy} is" in refused(tmp_path).what

    write_tensors(tmp_path, {name: tensor for name, tensor in t.items() if name != original} | {copy: t[original]})
    assert f"missing (1): {original}" in refused(tmp_path).what  # a copy does not stand in for what it copies
    assert weights["embed_tokens"].dtype == torch.bfloat16


# ── what is refused ───────────────────────────────────────────────────────────────────────────────────────────────


def drop(name: str) -> Callable[[Tensors], Tensors]:
    return lambda t: {n: v for n, v in t.items() if n != name}


def put(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Tensors], Tensors]:
    return lambda t: t | {name: torch.ones(shape, dtype=dtype)}


def per_expert(t: Tensors) -> Tensors:
    """The quantised publishers' layout: an expert a tensor, with scales."""
    split = {n: v for n, v in t.items() if ".experts." not in n}
    for layer in range(3):
        for e in range(8):
            split[f"{DECODER}layers.{layer}.experts.{e}.down_proj.weight"] = torch.ones(4)
            split[f"{DECODER}layers.{layer}.experts.{e}.down_proj.input_global_scale"] = torch.ones(1)
    return split


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (put("model.decoder.extra.weight", 3), ["without a place in this model (1): model.decoder.extra.weight"]),
        (
            put(f"{DECODER}layers.2.self_attn.v_proj.weight", 16, 32),
            ["without a place in this model (1)", "layers.2.self_attn.v_proj"],
        ),
        (
            put(f"{DECODER}layers.3.layer_scalar", 1),
            ["without a place in this model (1): model.decoder.layers.3.layer_scalar"],
        ),
        (
            put(f"{ENCODER}layers.3.layer_scalar", 1),
            [f"without a place in this model (1): {ENCODER}layers.3.layer_scalar"],
        ),
        (put("lm_head.bias", 64), ["without a place in this model (1): lm_head.bias"]),
        (drop(f"{DECODER}norm.weight"), ["missing (1): model.decoder.norm.weight"]),
        (
            drop(f"{DECODER}layers.0.self_attn.v_proj.weight"),
            ["missing (1): model.decoder.layers.0.self_attn.v_proj.weight"],
        ),
        (drop(f"{ENCODER}layers.0.layer_scalar"), [f"missing (1): {ENCODER}layers.0.layer_scalar"]),
        (put(f"{DECODER}norm.weight", 31), ["model.decoder.norm.weight is [31], not [32]"]),
        (put(f"{DECODER}layers.0.mlp.up_proj.weight", 32, 24), ["up_proj.weight is [32, 24], not [24, 32]"]),
        (put(f"{DECODER}layers.0.layer_scalar"), ["layers.0.layer_scalar is [], not [1]"]),
        (
            put(f"{DECODER}norm.weight", 32, dtype=torch.float64),
            ["dtype that does not belong there (1): model.decoder.norm.weight is F64"],
        ),
        (
            put(f"{DECODER}norm.weight", 32, dtype=torch.int8),
            ["dtype that does not belong there (1): model.decoder.norm.weight is I8"],
        ),
        (
            per_expert,
            [
                "without a place in this model (24): ",
                f"{DECODER}layers.N.experts.N.down_proj.input_global_scale ×24 (first: {DECODER}layers.0.experts.0.",
                f"missing (3): {DECODER}layers.N.experts.gate_up_proj ×3 (first: {DECODER}layers.0.experts.gate_up_",
                "down_proj.weight is [4], not [32, 16] ×",
            ],
        ),
        (
            lambda _: {"x": torch.ones(1)},
            ["without a place in this model (1): x; tensors of this model that are missing (74): "],
        ),
    ],
)
def test_what_does_not_fit_is_named(change: Callable[[Tensors], Tensors], says: list[str], tmp_path: Path) -> None:
    t = write_tiny(tmp_path)
    write_tensors(tmp_path, change(t))
    error = refused(tmp_path)
    assert all(fragment in error.what for fragment in says), error.what


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_any_one_tensor_missing_or_misshapen_is_named(
    data: st.DataObject, tiny: tuple[Path, ModelConfig, Tensors]
) -> None:
    _, config, t = tiny
    name = data.draw(st.sampled_from(sorted(t)))
    held = headers(t)
    plan(config, held)
    for wrong in (
        {n: info for n, info in held.items() if n != name},
        held | {name: dataclasses.replace(held[name], shape=(*held[name].shape, 1))},
        held | {f"{name}_scale": held[name]},
    ):
        with pytest.raises(CheckpointError) as caught:
            plan(config, wrong)
        assert name in caught.value.what


def test_a_file_that_goes_away_after_it_was_opened(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    held, config = open_checkpoint(tmp_path), load_model_config(tmp_path)
    (tmp_path / SINGLE).unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(held, config)


# ── dtypes and shards ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("asked", [None, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_as_asked_else_as_stored(stored: torch.dtype, asked: torch.dtype | None, tmp_path: Path) -> None:
    t = write_tiny(tmp_path, dtype=stored)
    weights = opened(tmp_path, asked)
    assert {w.dtype for w in weights.values()} == {asked or stored}
    assert torch.equal(weights["norm"], t[f"{DECODER}norm.weight"].to(asked or stored))


@pytest.mark.parametrize(
    ("named", "want"),
    [("float16", torch.float16), ("float32", torch.float32), (None, torch.bfloat16), ("odd", torch.bfloat16)],
)
def test_mixed_dtypes_follow_the_config_then_the_embedding(named: Any, want: torch.dtype, tmp_path: Path) -> None:
    t = write_tiny(tmp_path, dtype=torch.float32)
    embedding = f"{DECODER}embed_tokens.weight"
    write_tensors(tmp_path, t | {embedding: t[embedding].bfloat16()})
    (tmp_path / "config.json").write_text(json.dumps(tiny_config() | {"dtype": named}))
    assert {w.dtype for w in opened(tmp_path).values()} == {want}


def test_vision_in_another_dtype_is_not_a_mixture(tmp_path: Path) -> None:
    t = write_tiny(tmp_path, dtype=torch.bfloat16)
    write_tensors(tmp_path, t | {"model.encoder.vision_tower.std_bias": torch.ones(4)})
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(dtype="float32")))
    assert opened(tmp_path)["norm"].dtype == torch.bfloat16


def test_shards_load_as_one_file_does(tiny: tuple[Path, ModelConfig, Tensors], tmp_path: Path) -> None:
    folder, _, _ = tiny
    write_tiny(tmp_path, shards=4)
    one, four = opened(folder), opened(tmp_path)
    assert one.keys() == four.keys() and all(torch.equal(one[name], four[name]) for name in one)


def test_parameters_do_not_hold_on_to_the_file(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    weights = opened(tmp_path)
    before = {name: weight.clone() for name, weight in weights.items()}
    (tmp_path / SINGLE).write_bytes(bytes((tmp_path / SINGLE).stat().st_size))
    assert all(torch.equal(weights[name], before[name]) for name in weights)


# ── and back ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pattern", ["f", "ssf", "sfsf"])
def test_load_is_the_inverse_of_save(dtype: torch.dtype, pattern: str, tmp_path: Path) -> None:
    t = write_tiny(tmp_path / "a", seed=5, dtype=dtype, pattern=pattern)
    config, weights = load_model_config(tmp_path / "a"), opened(tmp_path / "a")
    save(config, {name: weight.requires_grad_() for name, weight in weights.items()}, tmp_path / "b")
    with safe_open(tmp_path / "b" / SINGLE, framework="pt") as written:
        assert written.metadata() == {"format": "pt"}
        assert set(written.keys()) == set(t)
        assert all(torch.equal(written.get_tensor(name), t[name]) for name in t)
    again = plain(load(open_checkpoint(tmp_path / "b"), config))
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    assert [path.name for path in (tmp_path / "b").iterdir()] == [SINGLE]


def test_save_rounds_to_the_dtype_asked(tiny: tuple[Path, ModelConfig, Tensors], tmp_path: Path) -> None:
    folder, config, _ = tiny
    save(config, opened(folder), tmp_path, torch.bfloat16)
    assert open_checkpoint(tmp_path).dtypes.keys() == {"BF16"}


def test_save_leaves_the_old_file_when_it_fails(
    tiny: tuple[Path, ModelConfig, Tensors], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, config, _ = tiny
    weights = opened(folder)
    save(config, weights, tmp_path)
    before = (tmp_path / SINGLE).read_bytes()

    def full_disk(_tensors: Tensors, path: Path, **_: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loading, "save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        save(config, weights, tmp_path, torch.bfloat16)
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]
    assert (tmp_path / SINGLE).read_bytes() == before


def test_save_refuses_what_load_would(tiny: tuple[Path, ModelConfig, Tensors], tmp_path: Path) -> None:
    folder, config, _ = tiny
    weights = opened(folder)
    with pytest.raises(ValueError, match="not the parameters"):
        save(config, {k: w for k, w in weights.items() if k != "norm"}, tmp_path)
    with pytest.raises(ValueError, match="not the parameters"):
        save(config, weights | {"norm": torch.ones(3)}, tmp_path)
    with pytest.raises(ValueError, match="stored in one of"):
        save(config, weights, tmp_path, torch.float64)
    assert not list(tmp_path.iterdir())


def test_a_placement_is_a_plain_fact(tiny: tuple[Path, ModelConfig, Tensors]) -> None:
    _, config, t = tiny
    layout = plan(config, headers(t))
    assert (
        Placement(f"{DECODER}layers.0.self_attn.k_proj.weight", "layers.0.self_attn.qkv_proj", "", None, 32, 48)
        in layout.placements
    )
    assert (
        Placement(f"{DECODER}layers.2.self_attn.k_proj.weight", "layers.2.self_attn.qkv_proj", "", None, 64, 80)
        in layout.placements
    )
