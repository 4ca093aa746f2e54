"""Train a demo model: `python -m dgemma_local.demo.train sudoku` or `… text` (resumable, seeded; an hour or two on a CPU).

Objective. A canvas of the answer is noised: each token is replaced, with probability t ~ U(0, 1], by a uniform random
one; the decoder predicts the clean token at every position. Half of the rows are self-conditioned on a first pass, and
half of those read the canvas that a real sampler step left. From `ON_POLICY_FROM` on, half of the rows have lived
through 1 … 4 real sampler steps first, so that the model learns to leave its own mistakes. The encoder is trained as a
causal language model of the answers at the same time, and the last part sees weights as FP8 and NVFP4 would hold them.

Each step's batch depends on (seed, step) alone, so that a resumed run continues as if it had not stopped.
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
from dgemma_local.demo.network import Batch, Muon, fused_rows, initial_weights, is_matrix, trainable
from dgemma_local.demo.render import PAD, Renderer
from dgemma_local.loading import load
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
    "sudoku": {"9×9": 0.68, "small": 0.23, "thinking": 0.05, "refusal": 0.04},
    "text": {"text": 0.9, "times table": 0.1},
}
CAUSAL_SHARE = 0.25  # of the steps; the causal loss has weight 1 there
VIEWS = 2  # canvases a prompt: one encoder pass serves both
ON_POLICY_FROM = 0.5  # of the steps
HARD_CLUES = {4: 8, 6: 16, 9: 40}  # at most so many from then on
PAD_WEIGHT = 0.2  # most of a short answer's canvas is padding, and easy
BALANCE_WEIGHT = 0.01  # experts' load balance
ENTROPY_BOUND, T_MIN, T_MAX = 0.1, 0.4, 0.8  # the sampler's, as in generation_config.json


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
    if group in ("9×9", "small"):
        side = 9 if group == "9×9" else rng.choice((4, 6, 6, 6))
        return puzzles.example(rng, side, HARD_CLUES[side] if late else tasks.CLUES[side][1])
    if group == "thinking":
        side = rng.choice((4, 6, 9, 9))
        return tasks.thoughtful(puzzles.example(rng, side, tasks.CLUES[side][1]))
    if group == "times table":
        return tasks.text_example(rng, group)
    names = [tasks.OUT_OF_SCOPE] if group == "refusal" else [name for name in tasks.TEXT if name != "times table"]
    name = rng.choice(names)
    return tasks.refusal(rng, model) if name == tasks.OUT_OF_SCOPE else tasks.text_example(rng, name)


def sampler_step(logits: Tensor, temperature: float, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Batched form of `sampler.advance`: softcapped logits [B, L, V] -> next canvas [B, L], scaled logits."""
    z = logits / temperature
    log_p = z.log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(-1)
    ordered, index = entropy.sort(-1)
    before = F.pad(ordered.cumsum(-1)[:, :-1], (1, 0))
    accepted = torch.zeros_like(before, dtype=torch.bool).scatter(-1, index, before <= ENTROPY_BOUND)
    noise = torch.empty_like(p).exponential_(generator=draw)
    fresh = torch.randint(logits.shape[-1], accepted.shape, generator=draw)
    return torch.where(accepted, (p / noise).argmax(-1), fresh), z


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
        self.step = 0
        self.minutes = 0.0

    # ── one step ──────────────────────────────────────────────────────────────────────────────────────────────────

    def loss(self) -> tuple[Tensor, dict[str, float | str]]:
        options, config = self.options, self.config
        rng = random.Random(f"{options.seed} {self.step}")
        draw = torch.Generator().manual_seed(rng.getrandbits(63))
        late = self.step >= ON_POLICY_FROM * options.steps
        shares = GROUPS[options.model]
        group = rng.choices(list(shares), list(shares.values()))[0]
        batch = [example(options.model, group, rng, self.puzzles, late) for _ in range(options.prompts)]
        scheme = rng.choices(("", "fp8", "nvfp4"), (0.5, 0.2, 0.3))[0] if late else ""
        model = trainable(config, self._quantised(scheme))
        prompt, real, answer = self.render.batch(batch, rng)
        P, L = prompt.shape[1], self.config.canvas_length

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
        B = len(clean)
        t = torch.rand(B, 1, generator=draw)
        t[torch.rand(B, 1, generator=draw) < 0.1] = 1.0
        fresh = torch.randint(self.config.vocab_size, (B, L), generator=draw)
        canvas = torch.where(torch.rand(B, L, generator=draw) < t, fresh, clean)
        canvas, previous, conditioned = self._live(model, memory, canvas, fresh, P, late, draw)

        soft = torch.zeros(B, L, self.config.hidden_size)
        if len(conditioned):
            soft[conditioned] = model.soften(previous)
        x = model.self_conditioning(model.embed(canvas), soft)
        logits = model.head(model.hidden(x, memory.canvases(VIEWS, P, detach=False), causal=False))
        balance = torch.stack([layer.router.balance for layer in model.layers]).sum()  # type: ignore[attr-defined]
        denoise = weighted(logits, clean, torch.where(clean == PAD, PAD_WEIGHT, 1.0))
        right = (logits.argmax(-1) == clean)[clean != PAD].float().mean()
        facts = {"group": group, "denoise": denoise.item(), "causal": causal.item(), "right": right.item()}
        return denoise + causal + BALANCE_WEIGHT * balance, facts

    def _quantised(self, scheme: str) -> Mapping[str, Tensor]:
        if not scheme:
            return self.weights
        return {
            k: fakequant.straight_through(w, scheme) if fakequant.is_quantised(k, w) else w
            for k, w in self.weights.items()
        }

    @torch.no_grad()
    def _live(
        self,
        model: DiffusionGemma,
        memory: Batch,
        canvas: Tensor,
        fresh: Tensor,
        P: int,
        late: bool,
        draw: torch.Generator,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Let some rows live: -> canvases, the last step's scaled logits of those rows, their numbers."""
        B = len(canvas)
        steps = torch.randint(1, 5, (B,), generator=draw) if late else torch.ones(B, dtype=torch.long)
        steps[torch.rand(B, generator=draw) < 0.5] = 0
        moves = torch.ones(B, dtype=torch.bool) if late else torch.rand(B, generator=draw) < 0.5
        if late:  # half of the rows that live start from nothing
            blank = (steps > 0) & (torch.rand(B, generator=draw) < 0.5)
            canvas = torch.where(blank[:, None], fresh, canvas)
        conditioned = steps.nonzero()[:, 0]
        scaled = torch.zeros(B, self.config.canvas_length, self.config.vocab_size)
        for k in range(int(steps.max())):
            rows = (steps > k).nonzero()[:, 0]
            soft = model.soften(scaled[rows]) if k else None
            x = model.self_conditioning(model.embed(canvas[rows]), soft)
            seen = memory.canvases(VIEWS, P, detach=True, rows=rows)
            logits = model.head(model.hidden(x, seen, causal=False))
            temperature = T_MIN + (T_MAX - T_MIN) * float(torch.rand((), generator=draw))
            after, z = sampler_step(logits, temperature, draw)
            scaled[rows] = z
            canvas = canvas.clone()
            canvas[rows] = torch.where(moves[rows, None], after, canvas[rows])
        return canvas, scaled[conditioned], conditioned

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
        loss, facts = self.loss()
        self.muon.zero_grad()
        self.adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([w for w in self.weights.values() if w.grad is not None], 5.0)
        for optimiser, full in self.rates:
            for params in optimiser.param_groups:
                params["lr"] = full * self.rate()
            optimiser.step()
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
        }
        partial = self.file.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.file)

    def resume(self) -> None:
        """Go on from the folder's state, else begin from `start`, else from nothing."""
        if not self.file.is_file():
            if self.options.start is not None:
                self._put(load(open_checkpoint(self.options.start), self.config, torch.float32))
            return
        state = torch.load(self.file, weights_only=True)
        if state["model"] != self.options.model:
            sys.exit(f"{self.file} is the state of the {state['model']} model; give another --folder")
        self.step, self.minutes = state["step"], state["minutes"]
        self._put(state["weights"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.puzzles.bases = state["bases"]

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

    keys = ("denoise", "causal", "right")
    groups = {group: {key: mean(facts, key) for key in keys} for group, facts in sorted(recent.items())}
    line = {"step": trainer.step, "minutes": round(trainer.minutes, 2), "rate": round(trainer.rate(), 4), **groups}
    with (trainer.options.folder / "log.jsonl").open("a") as log:
        log.write(json.dumps(line) + "\n")
    shown = "  ".join(f"{group} {facts['right']:.1%}" for group, facts in groups.items())
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
