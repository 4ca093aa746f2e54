"""fp32 against transformers, pass by pass: prefill, first step, self-conditioned step, commit, second canvas.

Logits within 5e-5 and hidden states within 1e-5, absolute; logits lie in [-30, 30], and two orders of the same sums
differ by a good 1e-5 in either implementation.
"""

from pathlib import Path

import pytest
import torch
from reference import GEOMETRIES, Reference, encode, open_model, write_calm
from torch import Tensor

pytestmark = pytest.mark.parity

HIDDEN, LOGITS = 1e-5, 5e-5
GOLDEN = Path(__file__).parent.parent / "golden" / "tiny"


def close(ours: Tensor, theirs: Tensor, atol: float, what: str) -> None:
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0, msg=lambda message: f"{what}: {message}")


class Draw:
    """Random ids of one vocabulary; the first five, which may be special, only in canvases."""

    def __init__(self, seed: int, vocab: int, canvas: int) -> None:
        self.generator, self.vocab, self.length = torch.Generator().manual_seed(seed), vocab, canvas

    def prompt(self, n: int) -> Tensor:
        return torch.randint(5, self.vocab, (n,), generator=self.generator)

    def canvas(self) -> Tensor:
        return torch.randint(0, self.vocab, (self.length,), generator=self.generator)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_pass_of_two_canvases(tmp_path: Path, name: str, seed: int, attention: str) -> None:
    """Prompts shorter than, as long as and longer than the window; both are conditioned on the same logits."""
    folder = write_calm(tmp_path, seed, **GEOMETRIES[name])
    ours, theirs = open_model(folder), Reference(folder, attention=attention)
    W, L = ours.config.sliding_window, ours.config.canvas_length
    draw = Draw(seed, ours.config.vocab_size, L)
    for n in (1, W - 1, W, W + 1, 3 * W + 5):
        where = f"prompt of {n}"
        prompt, canvas, block, second = draw.prompt(n), draw.canvas(), draw.canvas(), draw.canvas()
        a, b = ours.new_cache(), theirs.new_cache()
        close(encode(ours, prompt, a), theirs.encode(prompt, b), HIDDEN, f"{where}: prefill")
        for number, fed in enumerate((canvas, second)):
            step, want = ours.denoise(fed, a, None), theirs.denoise(fed, b, None)
            close(step, want, LOGITS, f"{where}: canvas {number}, first step")
            for t in (0.8, 0.42):
                conditioned = ours.denoise(block, a, ours.signal(want / t))
                close(conditioned, theirs.denoise(block, b, want / t), LOGITS, f"{where}: canvas {number}, t = {t}")
            close(encode(ours, block, a), theirs.encode(block, b), HIDDEN, f"{where}: commit {number}")
        assert a.length == b.get_seq_length() == n + 2 * L


@pytest.mark.parametrize("chunk", [5, 8, 512])
def test_a_prompt_of_many_windows_in_chunks(chunk: int) -> None:
    """150 windows, longer than the rotary table's first size; transformers reads it in one pass."""
    ours, theirs = open_model(GOLDEN), Reference(GOLDEN, attention="sdpa")
    draw = Draw(3, 64, 12)
    prompt, canvas = draw.prompt(1200), draw.canvas()
    a, b = ours.new_cache(), theirs.new_cache()
    ours.encode(prompt, a, chunk)
    theirs.encode(prompt, b)
    step = ours.denoise(canvas, a, None)
    close(step, theirs.denoise(canvas, b, None), LOGITS, "first step")
    close(
        ours.denoise(canvas, a, ours.signal(step / 0.5)), theirs.denoise(canvas, b, step / 0.5), LOGITS, "second step"
    )


def test_a_second_turn_on_a_cropped_cache() -> None:
    """Two canvases, back to the end of the prompt, and on with a longer conversation: as transformers from the start."""
    ours, theirs = open_model(GOLDEN), Reference(GOLDEN)
    draw = Draw(4, 64, 12)
    first, turn, canvas = draw.prompt(21), draw.prompt(30), draw.canvas()
    cache = ours.new_cache()
    ours.encode(first, cache)
    for _ in range(2):
        ours.denoise(canvas, cache, None)
        ours.encode(draw.canvas(), cache)
    cache.crop(21)
    ours.encode(turn, cache)
    fresh = theirs.new_cache()
    theirs.encode(torch.cat([first, turn]), fresh)
    close(ours.denoise(canvas, cache, None), theirs.denoise(canvas, fresh, None), LOGITS, "second turn")


@pytest.mark.parametrize("length", [5, 24])
def test_a_canvas_of_another_length(length: int) -> None:
    ours, theirs = open_model(GOLDEN), Reference(GOLDEN)
    draw = Draw(5, 64, length)
    prompt, canvas = draw.prompt(20), draw.canvas()
    a, b = ours.new_cache(), theirs.new_cache()
    ours.encode(prompt, a)
    theirs.encode(prompt, b)
    close(ours.denoise(canvas, a, None), theirs.denoise(canvas, b, None), LOGITS, f"canvas of {length}")
