"""A preset amid a chat: the model is asked with its settings, and with its own again."""

from dgemma_local.chat.conversation import Settings
from dgemma_local.cli_chat_model import Opened
from dgemma_local.config import load_generation_config
from dgemma_local.demo.render import FOLDERS
from dgemma_local.presets import Preset, applied
from dgemma_local.session import Wishes

OWN = load_generation_config(FOLDERS["sudoku"])
QUESTION = [{"role": "user", "content": "Hello"}]


def test_a_preset_is_set_and_taken_back() -> None:
    model = Opened("demo", Wishes(device="cpu", preset="fast"), preset=Preset.fast)
    for preset in (Preset.fast, Preset.quality, Preset.fast, Preset.balanced, Preset.quality, None):
        start = model.ask(QUESTION, 1, Settings(preset=preset), None).record.start
        assert model._session.generation == applied(OWN, preset)
        assert start.steps == applied(OWN, preset).steps
    assert model.ask(QUESTION, 1, Settings(preset=Preset.fast, steps=3), None).record.start.steps == 3


def test_another_model_is_asked_with_it() -> None:
    model = Opened("demo", Wishes(device="cpu"))
    model.ask(QUESTION, 1, Settings(preset=Preset.quality), None)
    model.switch("demo-text")
    assert model.ask(QUESTION, 1, Settings(preset=Preset.quality), None).record.start.steps == 96
