"""Train a demo model: `python -m dgemma_local.demo.train sudoku` or `… text` (resumable, seeded; an hour or two on a CPU).

Objective. The decoder predicts the clean token at every position of two canvases a prompt. One is noised: each token of
the answer is replaced, with probability t ~ U(0, 1], by a uniform random one, and half of these rows are
self-conditioned on a first pass. The other lives (`lives.py`): it began as random tokens and is where the real sampler
left it, so that the model learns to go on from its own mistakes. The encoder is trained as a causal language model of
the answers at the same time, and the last part sees weights as FP8 and NVFP4 would hold them.

Each step depends on the seed, its number and the saved state alone: a resumed run continues as if it had not stopped.
Sources: the published fine-tuning recipes (NVIDIA NeMo AutoModel, DiffusionGemmaSFTRecipe) for noise, self-conditioning
and the encoder loss; the rest was measured on this model (CHANGELOG, "Tried").
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma_local.checkpoint import open_checkpoint
from dgemma_local.config import LayerConfig, ModelConfig, RopeConfig
from dgemma_local.demo import fakequant, sudoku, tasks
from dgemma_local.demo.lives import T_MAX, T_MIN, Life, Lives, born, lived
from dgemma_local.demo.network import Batch, Muon, fused_rows, initial_weights, is_matrix, trainable
from dgemma_local.demo.render import PAD, Renderer, padded
from dgemma_local.layout import Options as LoadOptions
from dgemma_local.loading import decoded, load
from dgemma_local.model import DiffusionGemma


def _config(hidden_size: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=128,
        hidden_size=hidden_size,
        intermediate_size=hidden_size,
        self_conditioning_size=hidden_size,
        expert_size=32,
        num_experts=8,
        top_k=2,
        heads=4,
        layers=tuple(
            LayerConfig(kind="full", head_dim=32, kv_heads=1)
            if kind == "f"
            else LayerConfig(kind="sliding", head_dim=32, kv_heads=2)
            for kind in "sfsf"
        ),
        sliding_window=128,
        rope={"sliding": RopeConfig(theta=100.0, rotating=1.0), "full": RopeConfig(theta=1000.0, rotating=0.5)},
        rms_eps=1e-6,
        softcap=30.0,
        canvas_length=96,
        max_positions=1024,
        dtype="bfloat16",
    )


CONFIGS: dict[tasks.Model, ModelConfig] = {"sudoku": _config(96), "text": _config(128)}
# share of the steps that each group of tasks has; a step is of one group, for prompts of like length
GROUPS: dict[tasks.Model, dict[str, float]] = {
    "sudoku": {"9×9": 0.57, "6×6": 0.22, "4×4": 0.11, "thinking": 0.06, "refusal": 0.04},
    "text": {"text": 0.9, "times table": 0.1},
}
CAUSAL_SHARE = 0.25  # of the steps; the causal loss has weight 1 there
VIEWS = 2  # canvases a prompt, the living and the noised one: one encoder pass serves both
LATE_FROM = 0.6  # of the steps: harder puzzles, quantised weights
HARD_CLUES = {4: 8, 6: 16, 9: 40}  # at most so many from then on
PAD_WEIGHT = 0.2  # most of a short answer's canvas is padding, and easy
BALANCE_WEIGHT = 0.01  # experts' load balance


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    model: tasks.Model
    folder: Path  # state and log
    steps: int
    prompts: int  # a step
    seed: int
    start: Path | None = None  # a checkpoint folder whose weights a new run begins with


class Puzzles:
    """Base puzzles of every size, dug once and shuffled for ever; 9×9 grows by one a step, so that nobody waits."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.bases: dict[int, list[tuple[sudoku.Grid, sudoku.Grid]]] = {4: [], 6: [], 9: []}

    def grow(self, side: int, size: int) -> None:
        held = self.bases[side]
        while len(held) < size:
            rng = random.Random(f"{self.seed} {side} {len(held)}")
            held.append(sudoku.make(rng, sudoku.SHAPES[side], tasks.CLUES[side][0]))

    def example(self, rng: random.Random, side: int, most: int) -> tasks.Example:
        clues = rng.randint(tasks.CLUES[side][0], most)
        return tasks.sudoku_example(rng, side, rng.choice(self.bases[side]), clues)


def example(model: tasks.Model, group: str, rng: random.Random, puzzles: Puzzles, late: bool) -> tasks.Example:
    """One example of a group of tasks. Late in training the puzzles are harder."""
    if group in ("9×9", "6×6", "4×4"):
        side = int(group[0])
        return puzzles.example(rng, side, HARD_CLUES[side] if late else tasks.CLUES[side][1])
    if group == "thinking":
        side = rng.choice((4, 6, 9, 9))
        return tasks.thoughtful(puzzles.example(rng, side, tasks.CLUES[side][1]))
    if group == "times table":
        return tasks.text_example(rng, group)
    names = [tasks.OUT_OF_SCOPE] if group == "refusal" else [name for name in tasks.TEXT if name != "times table"]
    name = "reverse" if group == "text" and rng.random() < 0.3 else rng.choice(names)  # the hardest
    return tasks.refusal(rng, model) if name == tasks.OUT_OF_SCOPE else tasks.text_example(rng, name)


class Trainer:
    """Weights, optimisers and data of one run."""

    def __init__(self, options: Options) -> None:
        self.options, self.config = options, CONFIGS[options.model]
        self.weights = {k: w.requires_grad_() for k, w in initial_weights(self.config, options.seed).items()}
        # the two scalars of a layer are equal in the released model; here they stay at one
        frozen = [name for name in self.weights if name.endswith("layer_scalar")]
        for name in frozen:
            self.weights[name].requires_grad_(False)
        matrices = [(w, fused_rows(self.config, k, w)) for k, w in self.weights.items() if is_matrix(k, w)]
        others = [w for k, w in self.weights.items() if not is_matrix(k, w) and k not in frozen]
        self.muon = Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.01)
        self.adam = torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0)
        self.rates = [(self.muon, 0.02), (self.adam, 3e-3)]
        self.puzzles = Puzzles(options.seed)
        self.render = Renderer()
        self.lives = Lives({})
        self.step = 0
        self.minutes = 0.0

    # ── one step ──────────────────────────────────────────────────────────────────────────────────────────────────

    def loss(self) -> tuple[Tensor, dict[str, float | str], tuple[str, list[Life], list[Life]]]:
        """-> the loss, facts for the log, the group's canvases before and after this step."""
        options, config = self.options, self.config
        rng = random.Random(f"{options.seed} {self.step}")
        draw = torch.Generator().manual_seed(rng.getrandbits(63))
        late = self.step >= LATE_FROM * options.steps
        shares = GROUPS[options.model]
        group = rng.choices(list(shares), list(shares.values()))[0]

        def fresh() -> list[Life]:
            made = [example(options.model, group, rng, self.puzzles, late) for _ in range(options.prompts)]
            return born(self.render, made, rng, config.vocab_size)

        lives = self.lives.draw(group, options.prompts, fresh)
        scheme = rng.choices(("", "fp8", "nvfp4"), (0.5, 0.2, 0.3))[0] if late else ""
        model = trainable(config, self._quantised(scheme))
        prompt, real = padded([life.committed for life in lives])
        answer = torch.stack([life.answer for life in lives])
        P = prompt.shape[1]

        # the encoder reads the prompt; one time in four the answer too, as a language model of answers alone: a puzzle's
        # clues are noise to one
        whole = rng.random() < CAUSAL_SHARE
        seen = torch.cat([prompt, answer], 1) if whole else prompt
        memory = Batch(F.pad(real, (0, seen.shape[1] - P), value=True), len(config.layers), config.sliding_window)
        hidden = model.hidden(model.embed(seen), memory, causal=True, kv_only=not whole)
        memory.length = P
        causal = torch.zeros(())
        if whole:
            causal = weighted(model.head(hidden[:, P - 1 : -1]), answer, torch.where(answer == PAD, PAD_WEIGHT, 1.0))

        clean = answer.repeat_interleave(VIEWS, 0)
        canvas, scaled, conditioned = self._canvases(model, memory, lives, P, draw)
        soft = torch.zeros(*clean.shape, config.hidden_size)
        if len(conditioned):
            soft[conditioned] = model.soften(scaled[conditioned])
        x = model.canvas_rows(canvas, soft)
        logits = model.head(model.hidden(x, memory.canvases(VIEWS, P, detach=False), causal=False))
        balance = torch.stack([layer.router.balance for layer in model.layers]).sum()  # type: ignore[attr-defined]
        denoise = weighted(logits, clean, torch.where(clean == PAD, PAD_WEIGHT, 1.0))
        hit = logits.argmax(-1) == clean
        after = lived(lives, logits[::VIEWS].detach(), draw)
        facts: dict[str, float | str] = {
            "group": group,
            "denoise": denoise.item(),
            "causal": causal.item(),
            "right": hit[clean != PAD].float().mean().item(),
            "solved": sum(life.right > 0 for life in after) / len(after),
        }
        return denoise + causal + BALANCE_WEIGHT * balance, facts, (group, lives, after)

    def _quantised(self, scheme: str) -> Mapping[str, Tensor]:
        if not scheme:
            return self.weights
        return {
            k: fakequant.straight_through(w, scheme) if fakequant.is_quantised(k, w) else w
            for k, w in self.weights.items()
        }

    @torch.no_grad()
    def _canvases(
        self, model: DiffusionGemma, memory: Batch, lives: list[Life], P: int, draw: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Living and noised canvases in turn [B, L], scaled logits [B, L, V], numbers of the rows that have some."""
        n, V = len(lives), self.config.vocab_size
        answer = torch.stack([life.answer for life in lives])
        t = torch.rand(n, 1, generator=draw)
        t[torch.rand(n, 1, generator=draw) < 0.1] = 1.0
        random_tokens = torch.randint(V, answer.shape, generator=draw)
        noised = torch.where(torch.rand(answer.shape, generator=draw) < t, random_tokens, answer)
        canvas = torch.stack([torch.stack([life.canvas for life in lives]), noised], 1).flatten(0, 1)
        scaled = torch.stack([torch.stack([life.scaled for life in lives])] * 2, 1).flatten(0, 1)
        first = 2 * (torch.rand(n, generator=draw) < 0.5).nonzero()[:, 0] + 1
        if len(first):
            x = model.canvas_rows(canvas[first], None)
            logits = model.head(model.hidden(x, memory.canvases(VIEWS, P, detach=True, rows=first), causal=False))
            scaled[first] = logits / (T_MIN + (T_MAX - T_MIN) * torch.rand(len(first), 1, 1, generator=draw))
        old = torch.tensor([2 * i for i, life in enumerate(lives) if life.age], dtype=torch.long)
        return canvas, scaled, torch.cat([old, first]).sort().values

    def rate(self) -> float:
        """Share of the full learning rate: 50 steps up, flat, then down over the last half."""
        left = 1 - self.step / self.options.steps
        return min(1.0, (self.step + 1) / 50, max(0.01, 2 * left))

    def advance(self) -> dict[str, float | str]:
        """One optimiser step."""
        start = time.perf_counter()
        if self.options.model == "sudoku":
            for side, most in ((4, 400), (6, 400), (9, 100 + self.step)):
                self.puzzles.grow(side, most)
        loss, facts, lives = self.loss()
        self.muon.zero_grad()
        self.adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([w for w in self.weights.values() if w.grad is not None], 5.0)
        for optimiser, full in self.rates:
            for params in optimiser.param_groups:
                params["lr"] = full * self.rate()
            optimiser.step()
        self.lives.put(*lives)
        self.step += 1
        self.minutes += (time.perf_counter() - start) / 60
        return facts

    # ── stopping and going on ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def file(self) -> Path:
        return self.options.folder / "state.pt"

    def save(self) -> None:
        """The whole state, at once or not at all."""
        state = {
            "model": self.options.model,
            "step": self.step,
            "minutes": self.minutes,
            "weights": {k: w.detach() for k, w in self.weights.items()},
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
            "bases": self.puzzles.bases,
            "lives": self.lives.state_dict(),
        }
        partial = self.file.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.file)

    def resume(self) -> None:
        """Go on from the folder's state, else begin from `start`, else from nothing."""
        if not self.file.is_file():
            if self.options.start is not None:
                weights = load(open_checkpoint(self.options.start), self.config, LoadOptions(torch.float32))
                self._put(decoded(weights, torch.float32))
            return
        state = torch.load(self.file, weights_only=True)
        if state["model"] != self.options.model:
            sys.exit(f"{self.file} is the state of the {state['model']} model; give another --folder")
        self.step, self.minutes = state["step"], state["minutes"]
        self._put(state["weights"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.puzzles.bases = state["bases"]
        self.lives.load_state_dict(state["lives"])

    @torch.no_grad()
    def _put(self, weights: Mapping[str, Tensor]) -> None:
        for k, w in self.weights.items():
            w.copy_(weights[k])


def weighted(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Mean cross-entropy over [B, T] with weights [B, T]."""
    each = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return (each * weight.flatten()).sum() / weight.sum()


def report(trainer: Trainer, recent: Mapping[str, list[dict[str, float | str]]]) -> None:
    """A line for people, a line of JSON for the log."""

    def mean(facts: list[dict[str, float | str]], key: str) -> float:
        return round(sum(float(f[key]) for f in facts) / len(facts), 4)

    keys = ("denoise", "causal", "right", "solved")
    groups = {group: {key: mean(facts, key) for key in keys} for group, facts in sorted(recent.items())}
    line = {"step": trainer.step, "minutes": round(trainer.minutes, 2), "rate": round(trainer.rate(), 4), **groups}
    with (trainer.options.folder / "log.jsonl").open("a") as log:
        log.write(json.dumps(line) + "\n")
    shown = "  ".join(f"{group} {facts['right']:.1%} {facts['solved']:.0%}" for group, facts in groups.items())
    print(f"step {trainer.step}/{trainer.options.steps}  {trainer.minutes:.1f} min  {shown}", flush=True)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m dgemma_local.demo.train", description=__doc__.split("\n")[0])
    parser.add_argument("model", choices=sorted(CONFIGS))
    parser.add_argument("--folder", type=Path, help="state and log (default: demo-training/MODEL)")
    parser.add_argument("--steps", type=int, default=4800)
    parser.add_argument("--prompts", type=int, default=16, help=f"prompts a step, {VIEWS} canvases each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--start", type=Path, metavar="CHECKPOINT", help="begin a new run with the weights of this folder"
    )
    given = vars(parser.parse_args(arguments))
    given["folder"] = given["folder"] or Path("demo-training") / given["model"]
    options = Options(**given)
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # a second one gains a third; two runs side by side gain a whole
    trainer = Trainer(options)
    trainer.resume()
    recent: dict[str, list[dict[str, float | str]]] = {}
    while trainer.step < options.steps:
        facts = trainer.advance()
        recent.setdefault(str(facts["group"]), []).append(facts)
        if trainer.step % 25 == 0:
            report(trainer, recent)
            recent.clear()
        if trainer.step % 250 == 0 or trainer.step == options.steps:
            trainer.save()


if __name__ == "__main__":
    main(sys.argv[1:])
