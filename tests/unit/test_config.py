"""config.json and generation_config.json: the published values, both spellings, and an error for whatever is not there."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import GENERATION

from dgemma_local.config import LayerConfig, ModelConfig, RopeConfig, load_generation_config, load_model_config
from dgemma_local.errors import ConfigError

PUBLISHED: dict[str, Any] = json.loads((Path(__file__).parent.parent / "golden" / "config.google-26b.json").read_text())
RELEASED = GENERATION | {"eos_token_id": [1, 106, 50]}
FULL = (5, 11, 17, 23, 29)

TEXT = """
    final_logit_softcapping global_head_dim head_dim hidden_size intermediate_size layer_types max_position_embeddings
    moe_intermediate_size num_attention_heads num_experts num_global_key_value_heads num_hidden_layers num_key_value_heads
    rms_norm_eps sliding_window top_k_experts vocab_size rope_parameters
    rope_parameters.full_attention rope_parameters.full_attention.rope_type rope_parameters.full_attention.rope_theta
    rope_parameters.full_attention.partial_rotary_factor
    rope_parameters.sliding_attention rope_parameters.sliding_attention.rope_type
    rope_parameters.sliding_attention.rope_theta
"""
REQUIRED = ["text_config", "canvas_length", *(f"text_config.{key}" for key in TEXT.split())]
GENERATION_REQUIRED = [
    "confidence_threshold",
    "eos_token_id",
    "max_denoising_steps",
    "pad_token_id",
    "stability_threshold",
    "t_max",
    "t_min",
    "sampler_config",
    "sampler_config._cls_name",
    "sampler_config.entropy_bound",
]


def changed(values: dict[str, Any], path: str, value: Any = None) -> dict[str, Any]:
    """A copy with the key at the dotted `path` set, or taken out where `value` is None."""
    whole = copy.deepcopy(values)
    *parents, key = path.split(".")
    inner = whole
    for parent in parents:
        inner = inner[parent]
    if value is None:
        del inner[key]
    else:
        inner[key] = value
    return whole


def per_layer(values: dict[str, Any], name: Callable[[int], str]) -> dict[str, Any]:
    """The other spelling of the full layers' geometry."""
    whole = copy.deepcopy(values)
    text = whole["text_config"]
    own = {"head_dim": text.pop("global_head_dim"), "num_key_value_heads": text.pop("num_global_key_value_heads")}
    text["per_layer_config"] = {name(i): own for i in FULL}
    return whole


def read(folder: Path, values: Any) -> ModelConfig:
    (folder / "config.json").write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
    return load_model_config(folder)


def generation(folder: Path, values: Any) -> Any:
    (folder / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")
    return load_generation_config(folder)


def refused(load: Callable[[Path, Any], Any], folder: Path, values: Any) -> str:
    """What the error says: one line, with a cure."""
    with pytest.raises(ConfigError) as caught:
        load(folder, values)
    assert caught.value.what.isprintable() and caught.value.fix.isprintable() and caught.value.fix
    return caught.value.what


# ── the published model ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_published_geometry(tmp_path: Path) -> None:
    config = read(tmp_path, PUBLISHED)
    sliding = LayerConfig(kind="sliding", head_dim=256, kv_heads=8)
    full = LayerConfig(kind="full", head_dim=512, kv_heads=2)
    assert config == ModelConfig(
        vocab_size=262144,
        hidden_size=2816,
        intermediate_size=2112,
        self_conditioning_size=2112,
        expert_size=704,
        num_experts=128,
        top_k=8,
        heads=16,
        layers=tuple(full if i in FULL else sliding for i in range(30)),
        sliding_window=1024,
        rope={"sliding": RopeConfig(theta=1e4, rotating=1.0), "full": RopeConfig(theta=1e6, rotating=0.25)},
        rms_eps=1e-6,
        softcap=30.0,
        canvas_length=256,
        max_positions=262144,
        dtype="bfloat16",
    )


@pytest.mark.parametrize("name", [str, "{:02}".format], ids=["plain", "zero-padded"])
def test_both_spellings_of_the_geometry_are_one(tmp_path: Path, name: Callable[[int], str]) -> None:
    """transformers numbers the layers with leading zeros when it saves, and reads either."""
    other = per_layer(PUBLISHED, name)
    assert read(tmp_path, other) == read(tmp_path, PUBLISHED)


@pytest.mark.parity
def test_what_transformers_saves_is_the_same_config(tmp_path: Path) -> None:
    from transformers import DiffusionGemmaConfig

    ours = read(tmp_path, PUBLISHED)
    DiffusionGemmaConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "saved")
    assert "per_layer_config" in json.loads((tmp_path / "saved" / "config.json").read_text())["text_config"]
    assert load_model_config(tmp_path / "saved") == ours


def test_a_layer_of_its_own_geometry_and_one_without(tmp_path: Path) -> None:
    """A layer that per_layer_config leaves out, or a key of one, has the plain keys' value."""
    values = per_layer(PUBLISHED, str)
    values["text_config"]["per_layer_config"] = {"0": {"head_dim": 128}, "29": {"num_key_value_heads": 4}}
    layers = read(tmp_path, values).layers
    assert (layers[0].head_dim, layers[0].kv_heads) == (128, 8)
    assert (layers[5].head_dim, layers[5].kv_heads) == (256, 8)
    assert (layers[29].head_dim, layers[29].kv_heads) == (256, 4)


def test_self_conditioning_has_its_own_width_only_if_the_file_says_so(tmp_path: Path) -> None:
    assert read(tmp_path, changed(PUBLISHED, "text_config.self_conditioning_size", 640)).self_conditioning_size == 640


def test_without_a_dtype_the_tensors_decide(tmp_path: Path) -> None:
    assert read(tmp_path, changed(PUBLISHED, "dtype")).dtype is None


# ── what is not there, and what is not implemented ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    assert f"'{key}' is missing" in refused(read, tmp_path, changed(PUBLISHED, key))


@pytest.mark.parametrize("key", [key for key in REQUIRED if "." in key])
def test_a_null_is_a_missing_key(tmp_path: Path, key: str) -> None:
    text = json.dumps(changed(PUBLISHED, key, "NULL")).replace('"NULL"', "null")
    assert f"'{key}' is missing" in refused(read, tmp_path, text)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("text_config", []),
        ("canvas_length", 0),
        ("canvas_length", 256.0),
        ("canvas_length", True),
        ("text_config.hidden_size", "2816"),
        ("text_config.hidden_size", -1),
        ("text_config.vocab_size", 2**31),
        ("text_config.num_experts", 0),
        ("text_config.top_k_experts", 129),
        ("text_config.sliding_window", 0),
        ("text_config.rms_norm_eps", 0.0),
        ("text_config.final_logit_softcapping", float("nan")),
        ("text_config.final_logit_softcapping", float("inf")),
        ("text_config.rms_norm_eps", 10**400),
        ("text_config.hidden_size", 10**4000),
        ("text_config.rope_parameters", 1),
        ("dtype", ["bfloat16"]),
        ("text_config.rope_parameters.full_attention.rope_theta", -1.0),
        ("text_config.rope_parameters.full_attention.rope_type", "yarn"),
        ("text_config.rope_parameters.sliding_attention.rope_type", "dynamic"),
        ("text_config.rope_parameters.full_attention.partial_rotary_factor", 1.5),
        ("text_config.rope_parameters.full_attention.factor", 8.0),
        ("text_config.rope_parameters.sliding_attention.partial_rotary_factor", 0.5),
        ("text_config.use_bidirectional_attention", "all"),
        ("text_config.per_layer_config", {"30": {"head_dim": 512}}),
        ("text_config.per_layer_config", {"last": {"head_dim": 512}}),
        ("text_config.per_layer_config", {"1" * 5000: {"head_dim": 512}}),
        ("text_config.layer_types", "full_attention"),
        ("text_config.hidden_activation", "silu"),
        ("text_config.attention_bias", True),
        ("tie_word_embeddings", False),
    ],
)
def test_a_value_that_cannot_be_is_named(tmp_path: Path, key: str, value: Any) -> None:
    what = refused(read, tmp_path, changed(PUBLISHED, key, value))
    assert f"'{key}" in what and len(what) < 300


@pytest.mark.parametrize("model_type", ["gemma4", "llada", "diffusion_gemma_text", None, 3])
def test_another_architecture_is_refused(tmp_path: Path, model_type: Any) -> None:
    values = PUBLISHED | {"model_type": model_type}
    assert repr(model_type) in refused(read, tmp_path, values)
    assert "None" in refused(read, tmp_path, changed(PUBLISHED, "model_type"))


@pytest.mark.parametrize(
    ("kinds", "says"),
    [
        (["full_attention"] * 29, "29 layer types for 30 layers"),
        (["full_attention"] * 29 + ["sliding_attention"], "last layer is not full attention"),
        (["full_attention"] * 29 + ["linear_attention"], "layer_types"),
        ([*["full_attention"] * 29, 7], "layer_types"),
        ([[]], "layer_types"),
    ],
)
def test_layer_types_that_cannot_be(tmp_path: Path, kinds: list[Any], says: str) -> None:
    assert says in refused(read, tmp_path, changed(PUBLISHED, "text_config.layer_types", kinds))


def test_a_canvas_leaves_room_for_a_prompt(tmp_path: Path) -> None:
    short = changed(PUBLISHED, "text_config.max_position_embeddings", 256)
    assert "'canvas_length' 256 leaves no room" in refused(read, tmp_path, short)
    assert read(tmp_path, changed(PUBLISHED, "text_config.max_position_embeddings", 257)).max_positions == 257


def test_heads_that_do_not_fit(tmp_path: Path) -> None:
    odd = changed(PUBLISHED, "text_config.global_head_dim", 511)
    assert "layer 5 has head_dim 511" in refused(read, tmp_path, odd)
    uneven = changed(PUBLISHED, "text_config.num_key_value_heads", 3)
    assert "3 key/value heads do not divide 16" in refused(read, tmp_path, uneven)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not JSON"),
        (b'{"model_type": "diffusion_gemma"', "not JSON"),
        (b"[]", "not a JSON object"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"model_type": ' + b"1" * 5000 + b"}", "not JSON"),
    ],
)
def test_a_broken_file(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        load_model_config(tmp_path)
    assert caught.value.what.isprintable()


@pytest.mark.parametrize("load", [load_model_config, load_generation_config])
def test_no_file(tmp_path: Path, load: Callable[[Path], Any]) -> None:
    with pytest.raises(ConfigError, match=r"has no \w*config\.json"):
        load(tmp_path)


# ── generation_config.json ────────────────────────────────────────────────────────────────────────────────────────


def test_the_published_sampler(tmp_path: Path) -> None:
    config = generation(tmp_path, RELEASED)
    assert (config.steps, config.t_min, config.t_max) == (48, 0.4, 0.8)
    assert (config.entropy_bound, config.confidence, config.stability) == (0.1, 0.005, 1)
    assert (config.end_ids, config.pad_id) == ((1, 106, 50), 0)


def test_one_end_id_need_not_be_a_list(tmp_path: Path) -> None:
    assert generation(tmp_path, RELEASED | {"eos_token_id": 1}).end_ids == (1,)


@pytest.mark.parametrize("key", GENERATION_REQUIRED)
def test_a_missing_sampler_key_is_named(tmp_path: Path, key: str) -> None:
    assert f"'{key}' is missing" in refused(generation, tmp_path, changed(RELEASED, key))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_denoising_steps", 0),
        ("max_denoising_steps", 4097),
        ("stability_threshold", -1),
        ("confidence_threshold", -0.1),
        ("t_max", 0.0),
        ("t_min", -0.1),
        ("pad_token_id", "0"),
        ("eos_token_id", [1, "2"]),
        ("eos_token_id", [-1]),
        ("eos_token_id", []),
        ("sampler_config.entropy_bound", "0.1"),
        ("sampler_config._cls_name", "ConfidenceThresholdSamplerConfig"),
    ],
)
def test_a_sampler_value_that_cannot_be(tmp_path: Path, key: str, value: Any) -> None:
    assert str(value).strip("[]") in refused(generation, tmp_path, changed(RELEASED, key, value))


@pytest.mark.parametrize("key", ["eos_token_id", "pad_token_id"])
def test_ids_past_the_vocabulary(tmp_path: Path, key: str) -> None:
    generation(tmp_path, RELEASED | {key: 107})
    assert load_generation_config(tmp_path, 108).t_max == 0.8
    with pytest.raises(ConfigError, match="the token id 107 is past the vocabulary, which ends at 106"):
        load_generation_config(tmp_path, 107)


def test_an_autoregressive_generation_config_is_refused_by_name(tmp_path: Path) -> None:
    """A checkpoint whose model type somebody wrote in by hand: what it lacks is named, and that it is no such model."""
    theirs = {
        "bos_token_id": 2,
        "do_sample": True,
        "eos_token_id": [1, 106],
        "pad_token_id": 0,
        "top_k": 64,
        "top_p": 0.95,
    }
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED), encoding="utf-8")
    assert load_model_config(tmp_path).canvas_length == 256
    said = refused(generation, tmp_path, theirs)
    assert "that of an autoregressive model" in said and "sampler_config, max_denoising_steps" in said
    assert "autoregressive" not in refused(generation, tmp_path, changed(RELEASED, "sampler_config"))


def test_temperatures_in_the_wrong_order(tmp_path: Path) -> None:
    assert "t_min 0.9 is above t_max 0.8" in refused(generation, tmp_path, RELEASED | {"t_min": 0.9})


def test_the_edges_are_allowed(tmp_path: Path) -> None:
    edges = {"t_min": 0.0, "confidence_threshold": 0.0, "stability_threshold": 0, "max_denoising_steps": 1}
    config = generation(tmp_path, RELEASED | edges)
    assert (config.t_min, config.confidence, config.stability, config.steps) == (0.0, 0.0, 0, 1)
