"""Training the demo models: a run that stopped and went on is the run that did not stop, and its sampler is the sampler."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake import GENERATION
from torch import Tensor

from dgemma_local import sampler
from dgemma_local.demo import tasks, train
from dgemma_local.demo.export import export
from dgemma_local.demo.lives import ENTROPY_BOUND, LIFE, MAX_STEPS, POOL, T_MAX, T_MIN, Life, Lives, lived, sampler_step
from dgemma_local.demo.train import CONFIGS, GROUPS, Options, Puzzles, Trainer
from dgemma_local.noise import PhiloxNoise

STEPS = 4


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handful of puzzles instead of hundreds; the 9×9 ones still grow by one a step."""
    grow = Puzzles.grow
    monkeypatch.setattr(Puzzles, "grow", lambda self, side, size: grow(self, side, 2 + size % 100))


def options(folder: Path, model: tasks.Model, seed: int = 0) -> Options:
    return Options(model=model, folder=folder, steps=STEPS, prompts=2, seed=seed)


def state(trainer: Trainer) -> dict[str, Tensor]:
    """All that later steps depend on."""
    tensors = {f"weight {k}": w.detach() for k, w in trainer.weights.items()}
    for name, optimiser in (("muon", trainer.muon), ("adam", trainer.adam)):
        for i, held in optimiser.state_dict()["state"].items():
            tensors |= {f"{name} {i} {k}": v for k, v in held.items()}
    for group, lives in trainer.lives.held.items():
        for i, life in enumerate(lives):
            tensors |= {f"{group} {i} canvas": life.canvas, f"{group} {i} scaled": life.scaled}
            tensors[f"{group} {i} ages"] = torch.tensor([life.age, life.right, *life.committed])
    return tensors


@pytest.mark.parametrize("model", ["sudoku", "text"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, model: tasks.Model) -> None:
    """Bit for bit, the canvases that live between two steps included; the last steps see quantised weights at times."""
    whole = Trainer(options(tmp_path, model))
    before = {k: w.detach().clone() for k, w in whole.weights.items()}
    for _ in range(STEPS // 2):
        facts = whole.advance()
        assert 0 < float(facts["denoise"]) < 20 and 0 <= float(facts["causal"]) < 20 and facts["group"] in GROUPS[model]
    whole.save()
    moved = {k for k, w in whole.weights.items() if not torch.equal(w, before[k])}
    assert moved == {k for k in before if not k.endswith("layer_scalar")}

    resumed = Trainer(options(tmp_path, model))
    resumed.resume()
    assert resumed.step == whole.step == 2 and resumed.puzzles.bases == whole.puzzles.bases
    while whole.step < STEPS:
        assert whole.advance() == resumed.advance()
    assert resumed.puzzles.bases == whole.puzzles.bases
    ours, want = state(resumed), state(whole)
    assert ours.keys() == want.keys() and len(want) > 100
    assert all(torch.equal(ours[k], want[k]) for k in want)
    assert all(w.isfinite().all() for w in want.values())


def test_without_a_state_a_run_begins(tmp_path: Path) -> None:
    trainer = Trainer(options(tmp_path, "text"))
    trainer.resume()
    assert trainer.step == 0


def test_the_seed_and_the_step_choose_the_batch(tmp_path: Path) -> None:
    def losses(seed: int) -> list[float]:
        trainer = Trainer(options(tmp_path, "text", seed))
        first = trainer.loss()[0].item()
        again = trainer.loss()[0].item()
        trainer.step = 1
        return [first, again, trainer.loss()[0].item()]

    a, b = losses(1), losses(2)
    assert a == losses(1) and a[0] == a[1]
    assert a[0] != a[2] and a[0] != b[0]


def life(answer: list[int], age: int = 0, right: int = 0) -> Life:
    size = len(answer)
    return Life([1, 2], torch.tensor(answer), torch.zeros(size, dtype=torch.long), torch.zeros(size, 128), age, right)


def test_canvases_wait_their_turn_and_leave_when_solved_or_old() -> None:
    born: list[int] = []

    def fresh() -> list[Life]:
        born.append(len(born))
        return [life([born[-1], n]) for n in range(4)]

    lives = Lives({})
    first = lives.draw("g", 4, fresh)
    lives.put("g", first, [replace(each, age=1) for each in first])
    second = lives.draw("g", 4, fresh)  # every second one has waited
    assert [each.answer.tolist() for each in second] == [[1, 0], [0, 0], [1, 2], [0, 1]]
    assert lives.held["g"][0] is second[1]  # drawing changes nothing
    solved, old, right, older = (
        replace(second[0], right=2),
        replace(second[1], age=LIFE),
        replace(second[2], right=1),
        replace(second[3], age=LIFE - 1),
    )
    lives.put("g", second, [solved, old, right, older])
    assert [each.answer.tolist() for each in lives.held["g"]] == [[0, 2], [0, 3], [1, 2], [0, 1]]
    for _ in range(3 * POOL):
        four = lives.draw("g", 4, fresh)
        lives.put("g", four, [replace(each, age=1) for each in four])
    assert len(lives.held["g"]) == 4 * POOL


def test_a_life_is_one_step_of_the_sampler_older() -> None:
    answer = [7] * 96
    before = [life(answer, age=0), life(answer, age=47, right=1), life(answer, right=1)]
    logits = torch.full((3, 96, 128), -20.0)
    logits[:, :, 7] = 10.0
    logits[2, 5, 9] = 20.0  # one wrong position
    after = lived(before, logits, torch.Generator().manual_seed(1))
    assert [(each.age, each.right) for each in after] == [(1, 1), (48, 2), (1, 0)]
    assert torch.equal(after[0].scaled, logits[0] / T_MAX)
    assert torch.equal(after[1].scaled, logits[1] / (T_MIN + (T_MAX - T_MIN) / MAX_STEPS))
    assert all(torch.equal(each.canvas, torch.tensor(answer)) for each in after[:2])
    assert after[2].canvas[5] == 9
    assert before[0].age == 0  # a life is a value


def test_a_state_is_written_at_once_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(options(tmp_path, "text"))
    trainer.save()
    was = trainer.file.read_bytes()

    def full(_: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(train.torch, "save", full)
    with pytest.raises(OSError, match="no space"):
        trainer.save()
    assert trainer.file.read_bytes() == was


def test_the_rate_rises_stays_and_falls(tmp_path: Path) -> None:
    trainer = Trainer(replace(options(tmp_path, "text"), steps=1000))
    rates = []
    for trainer.step in (0, 24, 49, 200, 500, 750, 999):
        rates.append(trainer.rate())
    assert rates == pytest.approx([0.02, 0.5, 1, 1, 1, 0.5, 0.01])


def test_a_model_can_learn_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same batch ten times over: its loss falls by a third."""
    trainer = Trainer(replace(options(tmp_path, "text"), steps=400))
    monkeypatch.setattr(Trainer, "rate", lambda self: 0.3)
    losses = []
    for _ in range(10):
        trainer.step = 0
        losses.append(float(trainer.advance()["denoise"]))
    assert losses[-1] < 0.67 * losses[0]


@pytest.mark.parametrize("model", sorted(GROUPS))
def test_every_group_of_tasks_makes_examples(model: tasks.Model) -> None:
    puzzles = Puzzles(0)
    for side in (4, 6, 9):
        puzzles.grow(side, 0)
    assert sum(GROUPS[model].values()) == pytest.approx(1)
    for group in GROUPS[model]:
        made = {train.example(model, group, train.random.Random(n), puzzles, late=n % 2 == 0).task for n in range(40)}
        if group in ("9×9", "6×6", "4×4"):
            assert made == {f"sudoku{group[0]}"}
        elif group == "thinking":
            assert made == {"sudoku4-thinking", "sudoku6-thinking", "sudoku9-thinking"}
        elif group == "refusal":
            assert {task.removesuffix("-thinking") for task in made} == {tasks.OUT_OF_SCOPE}
        elif group == "times table":
            assert {task.removesuffix("-thinking") for task in made} == {group}
        else:
            assert len(made) > 6 and tasks.OUT_OF_SCOPE in made and not any("times" in task for task in made)


@torch.no_grad()
def test_its_sampler_step_is_the_sampler_s() -> None:
    """Row by row: the same scaled logits and acceptance, a sample there and a random token elsewhere."""
    config = replace(GENERATION, entropy_bound=ENTROPY_BOUND)
    V = CONFIGS["text"].vocab_size
    logits = (
        torch.randn(3, 96, V, generator=torch.Generator().manual_seed(1))
        * torch.tensor([3.0, 8.0, 20.0])[:, None, None]
    )
    t = float(sampler.temperature(config, 0))
    runs = [sampler_step(logits, t, torch.Generator().manual_seed(seed)) for seed in range(60)]
    for b in range(3):
        noise = PhiloxNoise(1, 96, V, torch.device("cpu"))
        want = sampler.advance(sampler.begin(0, noise), logits[b], config, noise)
        assert want.logits is not None and want.draft is not None and want.accepted is not None
        torch.testing.assert_close(runs[0][1][b], want.logits)
        kept = torch.stack([(after[b] == want.draft).float() for after, _ in runs]).mean(0)
        # accepted: the draft's own probability, near 1; refused: one time in 128
        p = want.logits.softmax(-1).amax(-1)
        assert (kept[want.accepted] - p[want.accepted]).abs().max() < 0.25
        assert kept[~want.accepted].mean() < 0.05
        assert 0 < want.accepted.sum() < 96


def test_a_report_is_a_line_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(options(tmp_path, "text"))
    trainer.step = 3
    facts: dict[str, list[dict[str, float | str]]] = {
        "text": [
            {"denoise": 1.0, "causal": 2.0, "right": 0.25, "solved": 0.0},
            {"denoise": 2.0, "causal": 2.0, "right": 0.75, "solved": 0.5},
        ]
    }
    train.report(trainer, facts)
    (line,) = (tmp_path / "log.jsonl").read_text().splitlines()
    assert json.loads(line)["text"] == {"denoise": 1.5, "causal": 2.0, "right": 0.5, "solved": 0.25}
    assert capsys.readouterr().out == "step 3/4  0.0 min  text 50.0% 25%\n"


@pytest.mark.parametrize("scheme", ["fp8", "nvfp4"])
def test_what_is_quantised_is_what_the_published_checkpoints_quantise(tmp_path: Path, scheme: str) -> None:
    """Attention, dense MLPs and experts; router, embedding, self-conditioning and norms stay as they are."""
    trainer = Trainer(options(tmp_path, "text"))
    seen = trainer._quantised(scheme)
    parts = {k.split(".", 2)[-1] for k, w in trainer.weights.items() if not torch.equal(seen[k], w)}
    attention = {"self_attn.qkv_proj", "self_attn.o_proj"}
    assert parts == attention | {"mlp.gate_up_proj", "mlp.down_proj", "experts.gate_up_proj", "experts.down_proj"}
    assert trainer._quantised("") is trainer.weights


def test_a_new_run_may_begin_with_a_checkpoint(tmp_path: Path) -> None:
    first = Trainer(options(tmp_path / "first", "text"))
    first.advance()
    export(CONFIGS["text"], first.weights, tmp_path / "checkpoint", torch.float32)
    second = Trainer(replace(options(tmp_path / "second", "text"), start=tmp_path / "checkpoint"))
    second.resume()
    assert second.step == 0
    assert all(torch.equal(second.weights[k], w) for k, w in first.weights.items())
