"""The memory plan as it is printed, and as JSON."""

import io
import json
from dataclasses import replace

import pytest

from dgemma_local.card import MIB, Card, Holder
from dgemma_local.config import LayerConfig, ModelConfig, RopeConfig
from dgemma_local.fit import Component, Estimate, budget, estimate, verdict
from dgemma_local.ui.models import plan_to_json, show_plan

CONFIG = ModelConfig(
    vocab_size=4096,
    hidden_size=64,
    intermediate_size=64,
    self_conditioning_size=64,
    expert_size=32,
    num_experts=4,
    top_k=2,
    heads=4,
    layers=(
        LayerConfig(kind="sliding", head_dim=16, kv_heads=2),
        LayerConfig(kind="full", head_dim=32, kv_heads=1),
    ),
    sliding_window=64,
    rope={"sliding": RopeConfig(theta=1e4, rotating=1.0), "full": RopeConfig(theta=1e6, rotating=0.25)},
    rms_eps=1e-6,
    softcap=30.0,
    canvas_length=32,
    max_positions=8192,
    dtype=None,
)
CARD = Card(
    index=0,
    name="NVIDIA GeForce RTX 4090",
    uuid="GPU-1",
    total=24564 * MIB,
    free=24204 * MIB,
    holders=(Holder(pid=7, name="python3\x1b[31m", bytes=3000 * MIB), Holder(pid=8, name="Xorg", bytes=None)),
)


def plan() -> Estimate:
    """Round sizes over a real geometry."""
    whole = estimate(CONFIG, {("experts", "nvfp4"): 12_846_458_880, ("attention", "bf16"): 2_220_359_680}, context=8192)
    sizes = {"KV cache": 639_426_560, "rotary tables": 786_432, "canvas × vocabulary": 355_205_120}
    sizes |= {"denoising step": 84_400_000, "prefill chunk": 147_100_000}
    parts = tuple(replace(part, bytes=sizes.get(part.name, part.bytes)) for part in whole.components)
    return replace(whole, components=parts)


def test_a_plan_in_a_pipe() -> None:
    out = io.StringIO()
    found = budget(card=CARD)
    assert found is not None
    show_plan(plan(), replace(verdict(plan(), found), plan=plan()), out)
    assert out.getvalue().splitlines() == [
        "experts (nvfp4)                  12.85 GB",
        "attention (bf16)                  2.22 GB",
        "KV cache, 8,192 tokens            0.64 GB",
        "rotary tables                     0.79 MB",
        "working memory, the largest of    0.36 GB",
        "  canvas × vocabulary             0.36 GB",
        "  denoising step                  0.08 GB",
        "  prefill chunk                   0.15 GB",
        "CUDA context                      0.50 GB",
        "total                            16.56 GB",
        "free on NVIDIA GeForce RTX 4090  25.38 GB",
        "  held by python3�[31m (pid 7)    3.15 GB",
        "  held by Xorg (pid 8)                  ?",
        "fits: 16.57 GB, and NVIDIA GeForce RTX 4090 has 25.38 GB free",
    ]


def test_a_refusal_shows_what_would_do() -> None:
    out = io.StringIO()
    found = budget(vram=15.0)
    assert found is not None
    show_plan(plan(), verdict(plan(), found), out)
    assert out.getvalue().splitlines()[-3:] == [
        "--vram, the CUDA context not counted  15.00 GB",
        "does not fit: 8,192 tokens of context need 16.07 GB, and 15.00 GB were given; the weights alone are 15.07 GB",
        "fix: take --fp8-attention",
    ]


def test_without_a_budget_there_is_no_verdict() -> None:
    out = io.StringIO()
    show_plan(replace(plan(), cuda_context=0), None, out)
    assert out.getvalue().splitlines()[-1] == "total                           16.06 GB"
    assert "CUDA" not in out.getvalue() and plan_to_json(plan(), None)["verdict"] is None


class Tty(io.StringIO):
    """A terminal of 80 columns."""

    def isatty(self) -> bool:
        return True


def test_a_plan_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    out = Tty()
    found = budget(card=CARD)
    assert found is not None
    show_plan(plan(), verdict(plan(), found), out)
    text = out.getvalue()
    assert "experts (nvfp4)" in text and "12.85 GB" in text and "\x1b[1m" in text
    assert "\x1b[31m" not in text  # a process's name may hold anything


def test_a_plan_as_json() -> None:
    found = budget(vram=1.0, card=CARD)
    assert found is not None
    said = json.loads(json.dumps(plan_to_json(plan(), verdict(plan(), found))))
    assert said["components"][0] == {"name": "experts", "dtype": "nvfp4", "bytes": 12_846_458_880, "working": False}
    assert said["components"][-1] == {"name": "prefill chunk", "dtype": None, "bytes": 147_100_000, "working": True}
    assert (said["context"], said["total"]) == (8192, plan().total)
    assert said["working"] == 355_205_120 and said["allocated"] + said["cuda_context"] == said["total"]
    assert said["verdict"]["kind"] == "refused" and said["verdict"]["context"] is None
    assert said["verdict"]["budget"] == 1_000_000_000 and said["verdict"]["cures"]
    assert said["verdict"]["holders"][0] == {"pid": 7, "name": "python3\x1b[31m", "bytes": 3000 * MIB}
    assert all(isinstance(part, Component) for part in plan().components)
