"""transformers' own DiffusionGemma beside ours: the same folder, one process, in turns.

    per_step   one denoising step each, sampling included, from step to step of the same canvases; on a CPU alone, for on
               a card our steps run ahead of the host and cannot be taken one by one
    answers    whole answers to the same prompts, transformers' `generate` against `engine.Conversation.answer`; the time
               between two drafts of them is a step's

The contestants: ours with this project's random stream, ours with transformers' draws, whose tokens must equal theirs,
and transformers with its default experts, with eager and with sdpa attention over one set of weights. A ratio sets the
faster of theirs against the slower of ours. On a card ours is the kernels, which draw for themselves: nothing to compare
token by token there.

Milliseconds are medians by a monotonic clock (time.perf_counter), and a warm-up that is not counted comes first.
transformers is imported when its model is opened: that takes seconds. Its cache is a DynamicCache, its default.
Source: transformers 5.24 modeling_diffusion_gemma.py and generation_diffusion_gemma.py.
"""

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from dgemma_local import sampler
from dgemma_local.bench.protocols import Task
from dgemma_local.card import host_memory
from dgemma_local.checkpoint import open_checkpoint
from dgemma_local.config import GenerationConfig
from dgemma_local.engine import Conversation, Croppable
from dgemma_local.errors import CheckpointError
from dgemma_local.events import Finished, StepDone
from dgemma_local.fit import gb
from dgemma_local.model import DiffusionGemma
from dgemma_local.noise import Noise, PhiloxNoise, TorchNoise

if TYPE_CHECKING:
    from dgemma_local.bench.subject import Subject

STEPS = 6  # of each canvas that is taken step by step; the first has no self-conditioning
ROUNDS = 20  # such canvases
WARM_UP = 3  # canvases before them
RUNS = 5  # answers of each
THREADS = (1, 2)  # of a CPU
ATTENTIONS = ("eager", "sdpa")
OURS, THEIR_DRAWS = "ours", "ours, their draws"
THEIRS = tuple(f"transformers {attention}" for attention in ATTENTIONS)
# Beside its weights transformers holds a step's logits a few times over; what a tenth of the weights leaves is enough for
# the real model's 268 MB of fp32 logits, and small for the demo's.
SPARE = 1.1

# transformers refuses a threshold of 0, and without one it leaves the whole test out, entropies and all. No mean of fp32
# entropies but 0 itself is below this one.
NEVER_CONFIDENT = torch.finfo(torch.float32).tiny

# As small as transformers builds it: our layers are those of the text, and its default tower has 16 of its own.
NO_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "position_embedding_size": 8,
}

Clock = Callable[[], float]  # seconds
CacheT = TypeVar("CacheT", bound=Croppable)


# ── opening it ────────────────────────────────────────────────────────────────────────────────────────────────────


def why_not(folder: Path | None, network: DiffusionGemma, free: int | None = None) -> str | None:
    """Why transformers cannot take part, in one line; None where it can.

    `folder`: of the checkpoint, None for random weights. `free`: bytes there are for its weights; None: asked.
    """
    if folder is None:
        return "these weights are random and in no folder that transformers could open"
    if find_spec("transformers") is None:
        return "transformers is not installed (pip install transformers==5.24.0)"
    if find_spec("transformers.models.diffusion_gemma") is None:
        return "the transformers installed here has no DiffusionGemma (pip install transformers==5.24.0)"
    checkpoint = open_checkpoint(folder)
    if checkpoint.quantisation is not None:
        return "the folder's weights are packed, and transformers is compared on unpacked ones"
    count = sum(torch.Size(tensor.shape).numel() for tensor in checkpoint.tensors.values())
    wanted = round(SPARE * network.dtype.itemsize * count)
    left = _free(network.device) if free is None else free
    if left is not None and wanted > left:
        return f"it would take {gb(wanted)} beside our weights, and {gb(left)} are free"
    return None


def _free(device: torch.device) -> int | None:
    """Bytes that a second model may take; None: unknown."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory()


def open_theirs(folder: Path, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """transformers' model under the names of THEIRS, once for each attention, over one set of weights.

    Raises CheckpointError where it and the folder do not agree on the tensors.
    """
    import transformers
    from transformers.utils import logging

    library: Any = transformers  # whose types say less than they seem to
    log: Any = logging
    log.disable_progress_bar()
    log.set_verbosity_error()  # its report lists the vision tower as missing
    config = library.DiffusionGemmaConfig.from_pretrained(folder, vision_config=NO_VISION)
    model, report = library.DiffusionGemmaForBlockDiffusion.from_pretrained(
        folder, config=config, dtype=dtype, attn_implementation=ATTENTIONS[0], output_loading_info=True
    )
    wrong = sorted(name for key in ("missing_keys", "unexpected_keys") for name in report[key] if "vision" not in name)
    if wrong:
        raise CheckpointError(
            f"transformers and {folder} do not agree on {len(wrong)} tensors: {wrong[0]} …",
            "use the whole folder of one checkpoint, and transformers 5.24",
        )
    model = model.to(device).eval()
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    opened = {THEIRS[0]: model}
    for name, attention in zip(THEIRS[1:], ATTENTIONS[1:], strict=True):
        opened[name] = copy.deepcopy(model, dict(shared))  # modules and configuration alone
        opened[name].set_attn_implementation(attention)
    return opened


def settings(config: GenerationConfig) -> dict[str, Any]:
    """`config` as transformers' `generate` takes it."""
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

    return {
        "max_denoising_steps": config.steps,
        "sampler_config": EntropyBoundSamplerConfig(entropy_bound=config.entropy_bound),
        "t_min": config.t_min,
        "t_max": config.t_max,
        "stability_threshold": config.stability,
        "confidence_threshold": max(config.confidence, NEVER_CONFIDENT),
        "eos_token_id": list(config.end_ids) or None,
        "pad_token_id": config.pad_id,
    }


# ── step by step ──────────────────────────────────────────────────────────────────────────────────────────────────


class Contestant(Protocol):
    """Takes steps when it is asked to."""

    def begin(self, seed: int) -> None:
        """A canvas of random tokens behind the prompt."""
        ...

    def step(self) -> list[int]:
        """One denoising step -> the tokens that the next one reads."""
        ...


class Ours:
    """This project's step: the model's forward pass and the sampler."""

    def __init__(self, model: DiffusionGemma, prompt: Tensor, config: GenerationConfig, own_stream: bool) -> None:
        self.model, self.config, self.own_stream = model, config, own_stream
        self.cache = model.new_cache()
        model.encode(prompt, self.cache)

    def begin(self, seed: int) -> None:
        self.noise = noise_of(self.model, seed, self.own_stream)
        self.canvas = sampler.begin(0, self.noise)

    @torch.inference_mode()
    def step(self) -> list[int]:
        self.canvas = self.model.advance(self.canvas, self.cache, self.config, self.noise)
        tokens: list[int] = self.canvas.next.tolist()
        return tokens


def noise_of(model: DiffusionGemma, seed: int, own_stream: bool) -> Noise:
    """This project's stream, or transformers' draws as torch.manual_seed(seed) gives them on a CPU."""
    L, V = model.canvas_length, model.config.vocab_size
    return (
        PhiloxNoise(seed, L, V, model.device) if own_stream else TorchNoise(torch.Generator().manual_seed(seed), L, V)
    )


class Theirs:
    """transformers' step, as its `generate` takes it."""

    def __init__(self, model: Any, prompt: Tensor, config: GenerationConfig) -> None:
        self.model, self.prompt, self.steps = model, prompt[None], config.steps
        generation, _ = model._prepare_generation_config(None, **settings(config))
        self.sampler = model._prepare_sampler(generation)
        self.processor = model._prepare_logits_processor(generation)
        self.stopping = model._prepare_diffusion_stopping_criteria(generation)
        self.cache = model._prepare_cache_for_generation(
            generation, batch_size=1, max_length=model.config.canvas_length
        )
        with torch.inference_mode():
            model.model.encoder(input_ids=self.prompt, cache=self.cache)

    def begin(self, seed: int) -> None:
        torch.manual_seed(seed)
        n, device = self.prompt.shape[1], self.prompt.device
        self.canvas = self.sampler.initialize_canvas(1, device)
        self.draft = torch.full_like(self.canvas, -1)
        self.signal, self.left = None, self.steps
        self.positions = torch.arange(n, n + self.canvas.shape[1], device=device)[None]
        self.masks = self.model.model.decoder.create_diffusion_decoder_attention_mask(
            config=self.model.config, inputs_embeds=self.canvas.unsqueeze(-1), cache=self.cache
        )
        self.finished = torch.zeros(1, dtype=torch.bool, device=device)
        self.stopping.reset()
        self.state = torch.get_rng_state()

    @torch.inference_mode()
    def step(self) -> list[int]:
        torch.set_rng_state(self.state)  # contestants take turns with the one generator that transformers draws from
        self.canvas, self.draft, self.signal, self.finished = self.model._denoising_step(
            decoder_forward=self.model.forward,
            current_canvas=self.canvas,
            argmax_canvas=self.draft,
            input_ids=self.prompt,
            decoder_position_ids=self.positions,
            self_conditioning_logits=self.signal,
            mask_mapping=self.masks,
            cache=self.cache,
            finished_denoising=self.finished & False,  # it must not freeze the canvas: every step is to be whole
            cur_step=self.left,
            sampler=self.sampler,
            logits_processor=self.processor,
            diffusion_stopping_criteria=self.stopping,
        )
        self.left -= 1
        tokens: list[int] = self.canvas[0].tolist()
        self.state = torch.get_rng_state()
        return tokens


def take_turns(
    contestants: Mapping[str, Contestant],
    rounds: int,
    check: Callable[[Mapping[str, list[int]]], None],
    clock: Clock = time.perf_counter,
) -> dict[str, float]:
    """Median milliseconds a step of each, over `rounds` canvases of STEPS steps; `check` gets every step's tokens."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for seed in range(WARM_UP + rounds):
        for one in contestants.values():
            one.begin(seed)
        for _ in range(STEPS):
            tokens = {}
            for name, one in contestants.items():
                start = clock()
                tokens[name] = one.step()
                if seed >= WARM_UP:
                    times[name].append((clock() - start) * 1e3)
            check(tokens)
    return {name: statistics.median(values) for name, values in times.items()}


def per_step(
    model: DiffusionGemma,
    theirs: Mapping[str, Any],
    prompt: Sequence[int],
    config: GenerationConfig,
    *,
    rounds: int = ROUNDS,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Steps in turns on a CPU, with as many threads as torch has now.

    -> threads, ms (by contestant), ratio (theirs ÷ ours), steps (timed, of each), compared and unequal (steps whose
    tokens were set beside transformers' eager ones, and how many differed).
    """
    ids = torch.tensor(prompt, device=model.device)
    config = unending(config)
    contestants: dict[str, Contestant] = {
        OURS: Ours(model, ids, config, own_stream=True),
        THEIR_DRAWS: Ours(model, ids, config, own_stream=False),
        **{name: Theirs(one, ids, config) for name, one in theirs.items()},
    }
    equal: list[bool] = []
    with _generator_kept():
        ms = take_turns(
            contestants, rounds, lambda tokens: equal.append(tokens[THEIR_DRAWS] == tokens[THEIRS[0]]), clock
        )
    return {
        "threads": torch.get_num_threads(),
        "ms": ms,
        "ratio": min(ms[name] for name in THEIRS) / max(ms[OURS], ms[THEIR_DRAWS]),
        "steps": rounds * STEPS,
        "compared": len(equal),
        "unequal": equal.count(False),
    }


def unending(config: GenerationConfig) -> GenerationConfig:
    """Never confident enough to stop: a canvas that is done keeps its draft, where transformers would go on sampling."""
    return replace(config, confidence=0.0)


@contextmanager
def _generator_kept() -> Iterator[None]:
    """transformers draws from torch's own generator, which is left as it was found."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield


# ── whole answers ─────────────────────────────────────────────────────────────────────────────────────────────────


class Answer(NamedTuple):
    """One answer and its clock."""

    tokens: list[int]
    seconds: float  # from the question to the last token
    first_draft: float  # seconds to the first step's draft
    step_ms: list[float]  # from one draft of a canvas to the next


def ours_answer(
    conversation: Conversation[CacheT], task: Task, noise: Noise, clock: Clock = time.perf_counter
) -> Answer:
    """By `Conversation.answer`, from an empty cache."""
    conversation.held.clear()
    drafts: list[list[float]] = []
    tokens: list[int] = []
    start = clock()
    for event in conversation.answer(task.prompt, task.config, noise, task.max_tokens):
        if isinstance(event, StepDone):
            if event.step == 0:
                drafts.append([])
            drafts[-1].append(clock())
        elif isinstance(event, Finished):
            tokens = list(event.tokens)
    return _answer(tokens, start, clock(), drafts)


class _Drafts:
    """A streamer that notes when each draft came."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.canvases = clock, list[list[float]]()

    def put(self, value: Tensor) -> None:
        """The prompt, then each finished canvas: another one begins."""
        self.canvases.append([])

    def put_draft(self, value: Tensor) -> None:
        self.canvases[-1].append(self.clock())

    def end(self) -> None:
        self.canvases.pop()


@torch.inference_mode()
def theirs_answer(model: Any, task: Task, seed: int, device: torch.device, clock: Clock = time.perf_counter) -> Answer:
    """By `generate`: whole canvases, of which the budget's tokens are the answer."""
    torch.manual_seed(seed)
    drafts = _Drafts(clock)
    start = clock()
    out = model.generate(
        torch.tensor([task.prompt], device=device),
        streamer=drafts,
        max_new_tokens=task.max_tokens,
        **settings(task.config),
    )
    tokens = out.sequences[0, len(task.prompt) :].tolist()
    return _answer(tokens[: task.max_tokens], start, clock(), drafts.canvases)


def _answer(tokens: list[int], start: float, end: float, drafts: Sequence[Sequence[float]]) -> Answer:
    gaps = [(after - before) * 1e3 for canvas in drafts for before, after in pairwise(canvas)]
    return Answer(tokens, end - start, drafts[0][0] - start, gaps)


def answers(
    conversation: Conversation[Any],
    network: DiffusionGemma,
    theirs: Mapping[str, Any],
    task: Task,
    *,
    runs: int = RUNS,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """The task is answered by each contestant, one after the other, `runs` times behind a warm-up; each run has its seed.

    -> threads, prompt_tokens, tokens (of an answer), steps (a canvas), runs, by contestant the medians tok_s (prefill
    included), step_ms (None where canvases have one step) and first_draft_ms, ratio (ours ÷ theirs, in tok_s), compared
    and unequal (answers set beside transformers' eager ones, and how many differed; both 0 on a card).
    """
    on_cpu = network.device.type == "cpu"
    given: dict[str, list[Answer]] = {name: [] for name in (OURS, *([THEIR_DRAWS] if on_cpu else ()), *theirs)}
    with _generator_kept():
        for seed in range(1 + runs):
            for name, its in given.items():
                if name in theirs:
                    its.append(theirs_answer(theirs[name], task, seed, network.device, clock))
                else:
                    its.append(ours_answer(conversation, task, noise_of(network, seed, name == OURS), clock))
    equal = [a.tokens == b.tokens for a, b in zip(given.get(THEIR_DRAWS, ()), given[THEIRS[0]], strict=on_cpu)]
    timed = {name: its[1:] for name, its in given.items()}
    tok_s = {name: statistics.median(len(one.tokens) / one.seconds for one in its) for name, its in timed.items()}
    gaps = {name: [ms for one in its for ms in one.step_ms] for name, its in timed.items()}
    return {
        "threads": torch.get_num_threads(),
        "prompt_tokens": len(task.prompt),
        "tokens": task.max_tokens,
        "steps": task.config.steps,
        "runs": runs,
        "tok_s": tok_s,
        "ratio": min(tok_s[name] for name in tok_s if name not in theirs) / max(tok_s[name] for name in theirs),
        "step_ms": {name: statistics.median(values) if values else None for name, values in gaps.items()},
        "first_draft_ms": {
            name: statistics.median(one.first_draft * 1e3 for one in its) for name, its in timed.items()
        },
        "compared": len(equal),
        "unequal": equal.count(False),
    }


# ── all of it ─────────────────────────────────────────────────────────────────────────────────────────────────────


def measure(
    subject: "Subject",
    folder: Path | None,
    task: Task,
    *,
    rounds: int = ROUNDS,
    runs: int = RUNS,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """`subject` against transformers over the checkpoint in `folder`: `task` answered, and steps behind its prompt.

    -> {"why_not": one line}, or why_not None, transformers (version), dtype, per_step (empty on a card) and answers: one
    entry for each number of threads on a CPU. Raises CheckpointError where transformers finds other tensors.
    """
    network = subject.network
    reason = why_not(folder, network)
    if reason is not None or folder is None:
        return {"why_not": reason}
    import transformers

    theirs = open_theirs(folder, network.dtype, network.device)
    steps: list[dict[str, Any]] = []
    whole: list[dict[str, Any]] = []
    on_cpu = network.device.type == "cpu"
    for _ in _threads(THREADS if on_cpu else (torch.get_num_threads(),)):
        if on_cpu:
            steps.append(per_step(network, theirs, task.prompt, subject.generation, rounds=rounds, clock=clock))
        whole.append(answers(subject.conversation, network, theirs, task, runs=runs, clock=clock))
    return {
        "why_not": None,
        "transformers": transformers.__version__,
        "dtype": str(network.dtype).removeprefix("torch."),
        "per_step": steps,
        "answers": whole,
    }


def _threads(counts: Sequence[int]) -> Iterator[int]:
    """torch with so many threads, one number after the other, and as before at the end."""
    before = torch.get_num_threads()
    try:
        for count in counts:
            torch.set_num_threads(count)
            yield count
    finally:
        torch.set_num_threads(before)
