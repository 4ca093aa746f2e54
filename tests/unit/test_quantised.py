"""Checkpoints in the published quantised layouts: the numbers are the dequantised model's, and no fault is silent."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from tiny import write_tensors, write_tiny
from tiny_quantised import SCHEMES, SIZES, write_quantised
from torch import Tensor

from dgemma_local import loading
from dgemma_local.checkpoint import open_checkpoint
from dgemma_local.config import load_model_config
from dgemma_local.errors import CheckpointError
from dgemma_local.layout import Options, plan
from dgemma_local.loading import Proof, decoded, load, save
from dgemma_local.model import DiffusionGemma, parameter_shapes
from dgemma_local.quant import Fp8, Nvfp4, Weight, quantise_fp8
from dgemma_local.schemes import scheme_of

Tensors = dict[str, Tensor]
EXPERT = "model.decoder.layers.1.experts.5."
PACKED = {"fp8": "weight", "nvfp4": "weight_packed", "modelopt": "weight"}
GLOBAL = {"nvfp4": "weight_global_scale", "modelopt": "weight_scale_2"}
INPUT = {"nvfp4": "input_global_scale", "modelopt": "input_scale"}


def opened(folder: Path, options: Options | None = None, proof: Proof | None = None) -> dict[str, Weight]:
    return load(open_checkpoint(folder), load_model_config(folder), options, proof=proof)


def logits(folder: Path, weights: dict[str, Weight]) -> Tensor:
    """Two denoising steps after a prompt: packed weights meet every operation, self-conditioning included."""
    model = DiffusionGemma(load_model_config(folder), weights)
    draw = torch.Generator().manual_seed(3)
    cache = model.new_cache()
    model.encode(torch.randint(64, (9,), generator=draw), cache)
    canvas = torch.randint(64, (12,), generator=draw)
    first = model.denoise(canvas, cache, None)
    return torch.cat([first, model.denoise(canvas, cache, model.signal(first / 0.7))])


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        opened(folder)
    assert caught.value.what.isprintable() and caught.value.fix
    return caught.value.what


# ── the numbers ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantised_model_computes_what_its_decoded_weights_do(scheme: str, tmp_path: Path) -> None:
    """In fp32, logits in [-30, 30]: the same numbers, added up in another order."""
    _, plain = write_quantised(tmp_path / "q", scheme, seed=7)
    write_tiny(tmp_path / "p", 7, dtype=torch.float32, **SIZES)
    write_tensors(tmp_path / "p", plain)
    asked = Options(torch.float32)
    packed = opened(tmp_path / "q", asked)
    want = opened(tmp_path / "p", asked)
    again = decoded(packed, torch.float32)
    assert all(torch.equal(again[name], want[name]) for name in want)
    torch.testing.assert_close(logits(tmp_path / "q", packed), logits(tmp_path / "p", want), atol=2e-5, rtol=0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_stored_in_few_bits_stays_so(scheme: str, tmp_path: Path) -> None:
    stored, _ = write_quantised(tmp_path, scheme)
    proof = Proof()
    weights = opened(tmp_path, proof=proof)
    kind = Fp8 if scheme == "fp8" else Nvfp4
    packed = {name.split(".", 2)[-1] for name, w in weights.items() if isinstance(w, kind)}
    attention = {"self_attn.qkv_proj", "self_attn.o_proj"} if scheme == "fp8" else set()
    mlp = {"mlp.gate_up_proj", "mlp.down_proj"} if scheme != "modelopt" else set()
    assert packed == attention | mlp | {"experts.gate_up_proj", "experts.down_proj"}
    assert sum(w.nbytes for w in weights.values()) == sum(t.nbytes for t in stored.values()) == proof.read
    assert sum(proof.resident.values()) == proof.read
    assert proof.placed == len(stored) and proof.filled == len(weights) and not proof.ignored


@pytest.mark.parametrize("scheme", ["nvfp4", "modelopt"])
def test_each_part_keeps_its_own_global_scale(scheme: str, tmp_path: Path) -> None:
    stored, _ = write_quantised(tmp_path, scheme)
    weight = opened(tmp_path)["layers.1.experts.gate_up_proj"]
    assert isinstance(weight, Nvfp4) and weight.divides == (scheme == "nvfp4")
    gate, up = (stored[f"{EXPERT}{half}_proj.{GLOBAL[scheme]}"].reshape(()) for half in ("gate", "up"))
    assert gate != up and weight.global_scale[5].tolist() == [gate, up]
    assert weight.input_scale[5].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_save_writes_what_load_reads(scheme: str, tmp_path: Path) -> None:
    stored, _ = write_quantised(tmp_path / "a", scheme)
    weights = opened(tmp_path / "a")
    save(load_model_config(tmp_path / "a"), weights, tmp_path / "b")
    (tmp_path / "b" / "config.json").write_text((tmp_path / "a" / "config.json").read_text())
    written = open_checkpoint(tmp_path / "b").tensors
    before = open_checkpoint(tmp_path / "a").tensors
    assert {n: (t.dtype, t.nbytes) for n, t in written.items()} == {n: (t.dtype, t.nbytes) for n, t in before.items()}
    again = opened(tmp_path / "b")
    assert all(
        torch.equal(x, y)
        for x, y in zip(decoded(weights, torch.float32).values(), decoded(again, torch.float32).values(), strict=True)
    )
    assert len(stored) == len(written)


def test_attention_and_embedding_become_fp8_as_they_are_read(tmp_path: Path) -> None:
    stored, _ = write_quantised(tmp_path, "nvfp4")
    weights = opened(tmp_path, Options(fp8_attention=True, fp8_embedding=True))
    for name, parts in {
        "embed_tokens": ["embed_tokens"],
        "layers.0.self_attn.o_proj": ["layers.0.self_attn.o_proj"],
        "layers.2.self_attn.qkv_proj": [f"layers.2.self_attn.{letter}_proj" for letter in "qk"],
    }.items():
        want = quantise_fp8(torch.cat([stored[f"model.decoder.{part}.weight"] for part in parts]))
        held = weights[name]
        assert isinstance(held, Fp8)
        assert torch.equal(held.codes.view(torch.uint8), want.codes.view(torch.uint8))
        assert torch.equal(held.scale, want.scale)
    eight = opened(tmp_path, Options(torch.float32, fp8_attention=True, fp8_embedding=True))
    same = logits(tmp_path, {**decoded(eight, torch.float32)})
    torch.testing.assert_close(logits(tmp_path, eight), same, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["nvfp4", "modelopt", "fp8"])
def test_the_dense_mlp_becomes_fp8_whatever_it_was(name: str, tmp_path: Path) -> None:
    """Of NVFP4 what it decodes to, of 16 bits as they are read, FP8 as it is; and the plan has its bytes."""
    write_quantised(tmp_path, name)
    before, after = opened(tmp_path), opened(tmp_path, Options(fp8_mlp=True))
    for parameter, was in before.items():
        now = after[parameter]
        if ".mlp." not in parameter or isinstance(was, Fp8):
            assert type(now) is type(was)
            continue
        want = quantise_fp8(was if isinstance(was, Tensor) else was.decode(torch.bfloat16))
        assert isinstance(now, Fp8) and now.scale.dtype == torch.bfloat16
        assert torch.equal(now.codes.view(torch.uint8), want.codes.view(torch.uint8))
        assert torch.equal(now.scale, want.scale)
    assert isinstance(before["layers.0.mlp.down_proj"], {"nvfp4": Nvfp4, "modelopt": Tensor, "fp8": Fp8}[name])
    checkpoint, config = open_checkpoint(tmp_path), load_model_config(tmp_path)
    planned = plan(config, checkpoint.tensors, scheme_of(checkpoint.quantisation), Options(fp8_mlp=True))
    held = {parameter: form.nbytes for parameter, form in planned.held.items()}
    assert held == {parameter: weight.nbytes for parameter, weight in after.items()}


def test_rows_are_quantised_alike_however_they_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A staging buffer of three rows of the embedding."""
    write_quantised(tmp_path, "nvfp4")
    asked = Options(torch.float32, fp8_embedding=True)
    want = decoded(opened(tmp_path, asked), torch.float32)
    monkeypatch.setattr("dgemma_local.reading.STAGING", 3 * 32 * 2)
    few = decoded(opened(tmp_path, asked), torch.float32)
    assert all(torch.equal(few[name], want[name]) for name in want)


# ── faults, each by its name ──────────────────────────────────────────────────────────────────────────────────────


def change(folder: Path, scheme: str, alter: Callable[[Tensors], Tensors]) -> None:
    stored, _ = write_quantised(folder, scheme)
    write_tensors(folder, alter(dict(stored)))


def one(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: value(tensors[name])}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("leaf", ["gate_proj", "up_proj", "down_proj"])
def test_an_expert_s_tensor_renamed_dropped_duplicated_or_misshapen(scheme: str, leaf: str, tmp_path: Path) -> None:
    stored, _ = write_quantised(tmp_path, scheme)
    names = [name for name in stored if name.startswith(f"{EXPERT}{leaf}.")]
    assert len(names) == (2 if scheme == "fp8" else 4)
    for name in names:
        rest = {n: t for n, t in stored.items() if n != name}
        odd = stored[name].new_zeros(3, 5)
        for tensors, says in (
            (rest, f"missing (1): {name}"),
            (rest | {f"{name}_x": stored[name]}, f"missing (1): {name}"),
            (rest | {f"{name}_x": stored[name]}, f"without a place in this model (1): {name}_x"),
            (stored | {name.replace("experts.5", "experts.8"): stored[name]}, "experts.8."),
            (rest | {name: odd}, f"{name} is [3, 5], not"),
            (rest | {name: torch.zeros(stored[name].shape, dtype=torch.int8)}, f"{name} is "),
        ):
            write_tensors(tmp_path, {n: t.clone() for n, t in tensors.items()})
            assert says in refused(tmp_path), (name, says)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("leaf", ["gate_proj", "down_proj"])
@pytest.mark.parametrize("value", [0, 0x22])
def test_an_expert_of_one_value_is_refused(scheme: str, leaf: str, value: int, tmp_path: Path) -> None:
    name = f"{EXPERT}{leaf}.{PACKED[scheme]}"
    whole = f"{EXPERT}up_proj.{PACKED[scheme]}"  # shares its memory with gate_proj's

    def same(tensor: Tensor) -> Tensor:
        return torch.full_like(tensor.view(torch.uint8), value).view(tensor.dtype)

    change(tmp_path, scheme, lambda t: t | {n: same(t[n]) for n in ((name, whole) if "gate" in leaf else (name,))})
    assert f"{name} holds all" in refused(tmp_path)


def test_a_half_of_one_value_is_refused(tmp_path: Path) -> None:
    """Gate and up lie in one matrix, and each is looked at."""
    name = f"{EXPERT}up_proj.weight_packed"
    change(tmp_path, "nvfp4", one(name, torch.zeros_like))
    assert f"{name} holds all" in refused(tmp_path)


@pytest.mark.parametrize(
    ("scheme", "leaf", "value", "says"),
    [
        ("fp8", "weight_scale", float("nan"), "scales that are NaN, infinite or negative"),
        ("fp8", "weight_scale", float("inf"), "scales that are NaN, infinite or negative"),
        ("fp8", "weight_scale", -1.0, "scales that are NaN, infinite or negative"),
        ("nvfp4", "weight_scale", float("nan"), "NaN or negative block scales"),
        ("nvfp4", "weight_scale", -1.0, "NaN or negative block scales"),
        ("modelopt", "weight_scale", float("nan"), "NaN or negative block scales"),
        ("nvfp4", "weight_global_scale", float("nan"), "a global scale that is NaN"),
        ("nvfp4", "weight_global_scale", float("inf"), "a global scale that is NaN"),
        ("nvfp4", "weight_global_scale", 0.0, "a global scale that is NaN"),
        ("nvfp4", "weight_global_scale", 3e38, "a global scale out of all proportion"),
        ("nvfp4", "weight_global_scale", 1e-30, "a global scale out of all proportion"),
        ("modelopt", "weight_scale_2", 1e-38, "a global scale out of all proportion"),
        ("nvfp4", "input_global_scale", float("nan"), "a global scale that is NaN"),
        ("modelopt", "weight_scale_2", float("inf"), "a global scale that is NaN"),
        ("modelopt", "weight_scale_2", -1.0, "a global scale that is NaN"),
    ],
)
@pytest.mark.parametrize("half", ["gate_proj", "up_proj", "down_proj"])
def test_a_scale_that_is_none_is_refused(
    scheme: str, leaf: str, value: float, says: str, half: str, tmp_path: Path
) -> None:
    name = f"{EXPERT}{half}.{leaf}"

    def spoil(tensor: Tensor) -> Tensor:
        spoilt = tensor.float().flatten()
        spoilt[len(spoilt) // 2] = value
        return spoilt.view(tensor.shape).to(tensor.dtype)

    change(tmp_path, scheme, one(name, spoil))
    assert f"{name} holds {says}" in refused(tmp_path)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scales_that_are_all_zero_are_refused(scheme: str, tmp_path: Path) -> None:
    name = f"{EXPERT}down_proj.weight_scale"
    change(tmp_path, scheme, one(name, torch.zeros_like))
    assert f"{name} holds" in refused(tmp_path) and "all zero" in refused(tmp_path)


def test_plain_experts_of_one_value_are_refused(tmp_path: Path) -> None:
    tensors = write_tiny(tmp_path)
    name = "model.decoder.layers.2.experts.down_proj"
    spoilt = tensors[name].clone()
    spoilt[3] = 0.25
    write_tensors(tmp_path, tensors | {name: spoilt})
    assert f"{name} holds all values equal" in refused(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.decoder.norm.weight",
        "model.decoder.layers.1.router.proj.weight",
        "model.decoder.layers.0.layer_scalar",
        "model.encoder.language_model.layers.2.layer_scalar",
    ],
)
def test_a_norm_or_router_that_is_not_a_number_is_refused(name: str, tmp_path: Path) -> None:
    tensors = write_tiny(tmp_path)
    spoilt = tensors[name].clone()
    spoilt.view(-1)[-1] = float("nan")
    write_tensors(tmp_path, tensors | {name: spoilt})
    assert f"{name} holds NaN or infinity" in refused(tmp_path)


@pytest.mark.parametrize("name", ["embed_tokens", "self_conditioning.up_proj", "layers.2.self_attn.k_proj"])
def test_any_matrix_of_one_value_is_refused(name: str, tmp_path: Path) -> None:
    tensors = write_tiny(tmp_path)
    name = f"model.decoder.{name}.weight"
    write_tensors(tmp_path, tensors | {name: torch.zeros_like(tensors[name])})
    assert f"{name} holds all values equal" in refused(tmp_path)


# ── the configuration and the tensors must tell the same story ────────────────────────────────────────────────────


def test_a_configuration_that_the_tensors_contradict(tmp_path: Path) -> None:
    write_quantised(tmp_path, "fp8")
    config = json.loads((tmp_path / "config.json").read_text())
    quantisation = config["quantization_config"]
    for ignore in (["re:.*experts"], ["re:.*self_attn.q_proj"], ["re:.*mlp"]):
        changed = config | {"quantization_config": quantisation | {"ignore": quantisation["ignore"] + ignore}}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        assert "model.decoder.layers." in refused(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "quantization_config"}))
    assert "without a place" in refused(tmp_path) or "dtype" in refused(tmp_path)


def test_plain_experts_may_be_stored_one_by_one(tmp_path: Path) -> None:
    tensors = write_tiny(tmp_path / "one", 4)
    (tmp_path / "many").mkdir()
    for name in ("config.json", "generation_config.json"):
        (tmp_path / "many" / name).write_text((tmp_path / "one" / name).read_text())
    split = {n: t for n, t in tensors.items() if ".experts." not in n}
    for name, tensor in tensors.items():
        block, _, leaf = name.rpartition(".")
        for e, matrix in enumerate(tensor if ".experts." in name else []):
            parts = zip(("gate", "up"), matrix.chunk(2), strict=True) if leaf == "gate_up_proj" else [("down", matrix)]
            split |= {f"{block}.{e}.{half}_proj.weight": part.clone() for half, part in parts}
    write_tensors(tmp_path / "many", split)
    one_file, many = opened(tmp_path / "one"), opened(tmp_path / "many")
    assert all(torch.equal(decoded(many, torch.float32)[n], w) for n, w in decoded(one_file, torch.float32).items())


def test_the_checksum_is_of_the_bytes_and_their_names(tmp_path: Path) -> None:
    def checksum() -> str | None:
        proof = Proof()
        load(open_checkpoint(tmp_path), load_model_config(tmp_path), checksum=True, proof=proof)
        return proof.checksum

    stored, _ = write_quantised(tmp_path, "nvfp4")
    first = checksum()
    write_tensors(tmp_path, stored, shards=3)
    assert first == checksum() != None  # noqa: E711
    name = f"{EXPERT}down_proj.weight_packed"
    changed = stored[name].clone()
    changed[0, 0] ^= 1
    write_tensors(tmp_path, stored | {name: changed})
    assert checksum() != first
    proof = Proof()
    opened(tmp_path, proof=proof)
    assert proof.checksum is None and replace(proof, placed=0).seconds > 0


# ── where it lies ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_all_parameters_lie_on_the_one_device(
    scheme: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their form, every part of every parameter is made on the device that was asked for: here one that holds no
    numbers, and that nothing would lie on by itself."""
    write_tiny(tmp_path, **SIZES) if scheme is None else write_quantised(tmp_path, scheme)
    monkeypatch.setattr(loading, "read", lambda jobs, **_: {})
    monkeypatch.setattr(loading, "verify", lambda *_: None)
    config = load_model_config(tmp_path)
    weights = load(open_checkpoint(tmp_path), config, device="meta")
    assert weights.keys() == parameter_shapes(config).keys()
    where = {name: {part.device.type for part in parts(weight)} for name, weight in weights.items()}
    assert all(found == {"meta"} for found in where.values()), where


def parts(weight: Weight) -> list[Tensor]:
    """Every tensor that a weight is held in."""
    if isinstance(weight, Tensor):
        return [weight]
    found = [getattr(weight, field.name) for field in fields(weight)]
    return [part for part in found if isinstance(part, Tensor)]
