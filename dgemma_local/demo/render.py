"""Examples as token ids, rendered by the demo models' own tokenizer and chat template, which both share."""

import random
from pathlib import Path

import jinja2
import tokenizers
import torch
from torch import Tensor

from dgemma_local.demo import vocabulary
from dgemma_local.demo.tasks import Example

PAD = vocabulary.TOKENS.index("<pad>")
END_OF_TURN = vocabulary.TOKENS.index("<turn|>")
CANVAS = 96
MODELS = Path(__file__).parent / "models"
FOLDERS = {name: MODELS / name for name in ("sudoku", "text")}


class Renderer:
    """Prompts, and answers cut into canvases."""

    def __init__(self, folder: Path = FOLDERS["sudoku"]) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        self.template = environment.from_string((folder / "chat_template.jinja").read_text(encoding="utf-8"))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def prompt(self, example: Example) -> list[int]:
        messages = [{"role": "user", "content": example.prompt}]
        if example.system is not None:
            messages.insert(0, {"role": "system", "content": example.system})
        text = self.template.render(
            messages=messages, bos_token="<bos>", add_generation_prompt=True, enable_thinking=example.thinking
        )
        return self.encode(text)

    def canvases(self, example: Example) -> list[list[int]]:
        """The answer and its end of turn, padded to whole canvases."""
        ids = [*self.encode(example.answer), END_OF_TURN]
        ids += [PAD] * (-len(ids) % CANVAS)
        return [ids[i : i + CANVAS] for i in range(0, len(ids), CANVAS)]

    def cut(self, example: Example, rng: random.Random) -> tuple[list[int], list[int]]:
        """-> committed tokens, one canvas of the answer: any one, with those before it committed."""
        canvases = self.canvases(example)
        at = rng.randrange(len(canvases))
        return self.prompt(example) + [token for canvas in canvases[:at] for token in canvas], canvases[at]


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """-> tokens [B, P] padded on the left, which of them are real [B, P]."""
    width = max(map(len, rows))
    prompt = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    real = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
    return prompt, real
