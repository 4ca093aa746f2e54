"""quantization_config: the published ones are understood, what is not read is named before anything is loaded."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import published
import pytest
import torch
from tiny_quantised import write_quantised

from dgemma_local.checkpoint import open_checkpoint
from dgemma_local.config import load_model_config
from dgemma_local.demo.export import export, quantised
from dgemma_local.demo.train import CONFIGS
from dgemma_local.errors import CheckpointError, ConfigError
from dgemma_local.loading import load
from dgemma_local.model import parameter_shapes
from dgemma_local.quant import Fp8, Nvfp4
from dgemma_local.schemes import quantization_config, scheme_of

LAYER = "model.decoder.layers.3."
MODULES = {
    "attention": f"{LAYER}self_attn.q_proj",
    "mlp": f"{LAYER}mlp.gate_proj",
    "expert": f"{LAYER}experts.17.down_proj",
    "router": f"{LAYER}router.proj",
    "self-conditioning": "model.decoder.self_conditioning.up_proj",
    "head": "lm_head",
}


def refused(config: dict[str, Any]) -> CheckpointError | ConfigError:
    """A configuration that is broken is ConfigError's; a scheme that is not read is CheckpointError's."""
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        scheme_of(config)
    assert isinstance(caught.value, ConfigError) == caught.value.what.startswith("config.json: ")
    assert caught.value.what.isprintable() and caught.value.fix.isprintable()
    return caught.value


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("google-bf16", {}),
        ("redhat-fp8-dynamic", {"attention": "fp8", "mlp": "fp8", "expert": "fp8"}),
        ("redhat-nvfp4", {"mlp": "nvfp4", "expert": "nvfp4"}),
        ("nvidia-nvfp4", {"expert": "modelopt"}),
    ],
)
def test_a_published_configuration(name: str, want: dict[str, str]) -> None:
    of = scheme_of(published.QUANTISATION[name])
    assert {key: of(module) for key, module in MODULES.items()} == {key: want.get(key) for key in MODULES}


@pytest.mark.parametrize("ignored", ["decoder.layers.3.mlp.gate_proj", "re:.*layers.3.mlp", "re:decoder.*gate_proj"])
def test_names_are_listed_with_or_without_model_in_front(ignored: str) -> None:
    of = scheme_of(published.FP8 | {"ignore": [ignored]})
    assert of(MODULES["mlp"]) is None and of(MODULES["expert"]) == "fp8"
    assert scheme_of(published.FP8 | {"ignore": ["re:layers.3.mlp"]})(MODULES["mlp"]) == "fp8"  # from the start


def test_groups_may_name_their_layers() -> None:
    config = copy.deepcopy(published.FP8)
    four = copy.deepcopy(published.NVFP4["config_groups"]["group_0"]) | {"targets": ["re:.*experts.*"]}
    eight = config["config_groups"]["group_0"] | {"targets": ["re:.*self_attn.*"]}
    of = scheme_of(config | {"config_groups": {"a": four, "b": eight}, "format": "mixed-precision"})
    assert (of(MODULES["expert"]), of(MODULES["attention"]), of(MODULES["mlp"])) == ("nvfp4", "fp8", None)


def weights(**changes: Any) -> dict[str, Any]:
    config = copy.deepcopy(published.FP8)
    config["config_groups"]["group_0"]["weights"] |= changes
    return config


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantised by 'gptq'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantised by 'bitsandbytes'"),
        ({"bits": 4}, "a method without a name"),
        ({"quant_method": 5}, "a method without a name"),
        (weights(num_bits=4, type="int", strategy="group", group_size=32), "4-bit int by group of 32"),
        (weights(strategy="tensor"), "8-bit float by tensor (float-quantized)"),
        (weights(type="int"), "8-bit int by channel"),
        (weights(symmetric=False), "asymmetric"),
        (weights(num_bits="eight"), "compressed-tensors refuses its quantization_config"),
        (published.FP8 | {"format": "pack-quantized", "config_groups": {}}, None),
        (published.FP8 | {"quantization_status": "frozen"}, "'frozen', not 'compressed'"),
        (published.FP8 | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        (published.FP8 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (published.FP8 | {"config_groups": {"group_0": 5}}, "compressed-tensors refuses"),
        (published.FP8 | {"ignore": ["re:*("]}, "is not a pattern"),
        (published.MODELOPT | {"quant_algo": "FP8"}, "modelopt 'FP8'"),
        (published.MODELOPT | {"quant_algo": None}, "modelopt names no 'quant_algo'"),
        (published.MODELOPT | {"ignore": "*mlp*"}, "is not a list of names"),
        (published.MODELOPT | {"group_size": 32}, "in groups of 32"),
    ],
)
def test_what_is_not_read_is_named(config: dict[str, Any], says: str | None) -> None:
    if says is None:
        assert scheme_of(config)(MODULES["expert"]) is None  # no group, nothing quantised
    else:
        assert says in refused(config).what


def test_static_activations_are_another_scheme() -> None:
    config = copy.deepcopy(published.FP8)
    config["config_groups"]["group_0"]["input_activations"] |= {"dynamic": False, "strategy": "tensor"}
    assert "static activations" in refused(config).what


def test_it_is_refused_before_a_tensor_is_read(tmp_path: Path) -> None:
    """The payload is gone, and the message is still about the scheme."""
    write_quantised(tmp_path, "fp8")
    checkpoint = open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    config = load_model_config(tmp_path)
    wrong = type(checkpoint)(checkpoint.folder, checkpoint.tensors, {"quant_method": "awq"})
    with pytest.raises(CheckpointError, match="'awq'"):
        load(wrong, config)


@pytest.mark.parametrize("scheme", ["fp8", "nvfp4"])
def test_what_is_written_is_what_compressed_tensors_reads(scheme: Any, tmp_path: Path) -> None:
    """The demo model's own layouts, through the configuration that stands beside them."""
    config = CONFIGS["text"]
    draw = torch.Generator().manual_seed(1)
    plain = {n: torch.randn(s, generator=draw).bfloat16().abs() for n, s in parameter_shapes(config).items()}
    packed = quantised(plain, scheme)
    export(config, packed, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert written == quantization_config(scheme, written["ignore"])
    loaded = load(open_checkpoint(tmp_path), load_model_config(tmp_path))
    kind = Fp8 if scheme == "fp8" else Nvfp4
    attention = {"self_attn.qkv_proj", "self_attn.o_proj"} if scheme == "fp8" else set()
    assert {n.split(".", 2)[-1] for n, w in loaded.items() if isinstance(w, kind)} == attention | {
        "mlp.gate_up_proj",
        "mlp.down_proj",
        "experts.gate_up_proj",
        "experts.down_proj",
    }
    for name, weight in loaded.items():
        want = packed[name]
        if isinstance(weight, torch.Tensor):
            assert isinstance(want, torch.Tensor) and torch.equal(weight, want)
        else:
            assert not isinstance(want, torch.Tensor)
            assert torch.equal(weight.decode(torch.float32), want.decode(torch.float32)), name


def test_an_unquantised_model_never_meets_compressed_tensors() -> None:
    code = """if True:
        import sys
        from dgemma_local.schemes import scheme_of
        scheme_of(None); scheme_of({"quant_method": "modelopt", "quant_algo": "NVFP4"})
        assert not {"compressed_tensors", "transformers"} & sys.modules.keys()
    """
    subprocess.run([sys.executable, "-c", code], check=True)
