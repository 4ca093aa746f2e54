"""From the hub to an answer: a tiny model in RedHat's and NVIDIA's layouts is planned unseen, fetched, loaded and asked."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from hub_server import Hub, Repository
from huggingface_hub import constants
from own_hub import own_hub
from tiny_quantised import SCHEMES, write_quantised
from typer.testing import CliRunner

from dgemma_local import auto, cli, planning
from dgemma_local import card as card_module
from dgemma_local.card import Card
from dgemma_local.demo import vocabulary
from dgemma_local.registry import user_file

REPOSITORIES = {scheme: f"org/{scheme}" for scheme in SCHEMES}
TABLE = "".join(
    f'[{scheme}]\nrepository = "{name}"\nformat = "{scheme.replace("modelopt", "nvfp4")}"\nbytes = 90_000\n'
    for scheme, name in REPOSITORIES.items()
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """Every file of each repository by name."""
    found = {}
    for scheme, name in REPOSITORIES.items():
        folder = tmp_path_factory.mktemp(scheme)
        write_quantised(folder, scheme, vocab=128, max_positions=400)
        vocabulary.write(folder)
        found[name] = {path.name: path.read_bytes() for path in folder.iterdir()}
    return found


@pytest.fixture
def server(files: dict[str, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    served = {name: Repository(content) for name, content in files.items()}
    with own_hub(served, TABLE, tmp_path, monkeypatch) as running:
        yield running


def dgemma(*arguments: str) -> Result:
    found = CliRunner().invoke(cli.app, list(arguments))
    assert "Traceback" not in found.output
    return found


def plan(*arguments: str, code: int = 0) -> dict[str, Any]:
    found = dgemma("models", "show", *arguments, "--json")
    assert found.exit_code == code, found.output
    shown: dict[str, Any] = json.loads(found.stdout)
    return shown


@pytest.mark.parametrize("scheme", SCHEMES)
def test_planned_fetched_loaded_asked(
    scheme: str, server: Hub, files: dict[str, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = len(files[REPOSITORIES[scheme]]["model.safetensors"])
    before = plan(scheme, "--context", "100")
    assert server.sent < weights // 2, "headers alone"
    assert dgemma("run", "-m", scheme, "-p", "Hi").exit_code == 4  # not here yet
    assert dgemma("pull", scheme, "-q").exit_code == 0

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    server.shutdown()
    assert plan(scheme, "--context", "100")["components"] == before["components"]
    found = dgemma(
        "run",
        "-m",
        scheme,
        "-p",
        "Hi",
        "--seed",
        "3",
        "--max-tokens",
        "12",
        "--steps",
        "3",
        "--context",
        "100",
        "--verbose",
    )
    assert found.exit_code in (0, 9, 17, 18), found.output  # a random model may end at once
    assert "fits: " in found.stderr
    assert "checksum of the stored bytes: " in found.stderr and "left out" not in found.stderr
    kind = "fp8" if scheme == "fp8" else "nvfp4"
    assert f"experts {kind}" in found.stderr


def test_attention_in_fp8_is_planned_and_held(server: Hub) -> None:
    as_stored = {(part["name"], part["dtype"]): part["bytes"] for part in plan("nvfp4")["components"]}
    leaner = {(p["name"], p["dtype"]): p["bytes"] for p in plan("nvfp4", "--fp8-attention")["components"]}
    assert leaner["attention", "fp8"] < 0.6 * as_stored["attention", "bf16"]


def test_a_budget_is_held_before_anything_is_fetched(server: Hub) -> None:
    needed = plan("nvfp4", "--context", "400")["allocated"] / 1e9
    verdict = plan("nvfp4", "--context", "400", "--vram", f"{needed * 1.01:.9f}")["verdict"]
    assert verdict["context"] == 400 and not verdict["cures"]
    verdict = plan("nvfp4", "--context", "400", "--vram", f"{needed * 0.95:.9f}", code=11)["verdict"]
    assert 12 < verdict["context"] < 400 and "context of at most" in verdict["cures"][0]
    lines = dgemma("models", "show", "nvfp4", "--vram", "0.0001").stdout.splitlines()
    assert any(line.startswith("does not fit: ") for line in lines) and lines[-1].startswith("fix: ")


def card(total: float) -> Card:
    size = int(total * 1e9)
    return Card(index=0, name="NVIDIA GeForce RTX 4090", uuid="GPU-1", total=size, free=size - 10**9)


def test_auto_takes_what_suits_the_card(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user may say where the published ones lie; `auto` never takes a model that is only the user's."""
    user_file().write_text(TABLE + '[26b-a4b-nvfp4]\nrepository = "org/nvfp4"\nformat = "nvfp4"\nbytes = 90_000\n')
    for module in (auto, planning, card_module):
        monkeypatch.setattr(module, "cards", lambda: (card(25.8),))
    assert auto.to_run()[0] == "demo" and "`dgemma pull` fetches 26b-a4b-nvfp4 (NVFP4: " in auto.to_run()[1]
    found = dgemma("pull")
    assert found.exit_code == 0 and "26b-a4b-nvfp4: NVFP4: NVIDIA GeForce RTX 4090 has 25.80 GB" in found.stderr
    assert "26b-a4b-nvfp4 fits: " in found.stderr  # planned before it was fetched
    assert auto.to_run()[0] == "26b-a4b-nvfp4" and "FP8 would not fit" in auto.to_run()[1]
    monkeypatch.setattr(auto, "cards", lambda: (card(34.0),))
    name, why = auto.to_run(quality=True)
    assert name == "demo" and "`dgemma pull` fetches 26b-a4b-fp8 (FP8: " in why
    monkeypatch.setattr(auto, "cards", lambda: ())
    assert auto.to_run() == ("demo", "")


def test_what_can_never_fit_is_not_fetched(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(card(0.5), total=10_000, free=10_000)
    monkeypatch.setattr(card_module, "cards", lambda: (small,))
    found = dgemma("pull", "nvfp4")
    assert found.exit_code == 11 and found.stderr.splitlines()[-2].startswith("error: nvfp4 does not fit")
    assert "--anyway" in found.stderr and server.sent < 60_000  # headers alone
    assert dgemma("pull", "nvfp4", "--anyway", "-q").exit_code == 0


@pytest.mark.parametrize("arguments", [("--prefer", "quality", "-m", "demo"), ("--quiet", "--verbose")])
def test_flags_that_contradict_each_other(arguments: tuple[str, ...], server: Hub) -> None:
    assert dgemma("run", "-p", "Hi", *arguments).exit_code == 2


def test_what_the_hub_has_may_be_no_checkpoint(server: Hub, files: dict[str, dict[str, bytes]]) -> None:
    name = REPOSITORIES["fp8"]
    config = json.loads(files[name]["config.json"])
    config["quantization_config"] = {"quant_method": "gptq"}
    server.repositories[name] = Repository(files[name] | {"config.json": json.dumps(config).encode()})
    found = dgemma("models", "show", "fp8")
    assert found.exit_code == 6 and "quantised by 'gptq'" in found.stderr
