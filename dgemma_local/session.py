"""Open a model, answer a prompt: the public interface.

session = open_session("demo")
for event in session.answer([{"role": "user", "content": "Hello"}], seed=1):
    ...
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from dgemma_local import captured, hub, lock, logs, ops, presets, registry, selftest
from dgemma_local.cache import Cache
from dgemma_local.channels import AnswerDecoder, StopSearch, is_blank, opens_channel
from dgemma_local.checkpoint import open_checkpoint, refuse_special_files
from dgemma_local.config import GenerationConfig, load_generation_config, load_model_config
from dgemma_local.engine import Conversation, never
from dgemma_local.errors import DoesNotFit, KernelCrash, UsageError
from dgemma_local.events import Event
from dgemma_local.fit import AtMost
from dgemma_local.interrupts import Flag, noting_ctrl_c
from dgemma_local.layout import Options
from dgemma_local.loading import Proof, fill
from dgemma_local.model import DiffusionGemma
from dgemma_local.noise import PhiloxNoise
from dgemma_local.planning import Device, Planned, plan_run
from dgemma_local.tokens import Message, Tokenizer

DEFAULT_MAX_TOKENS = 1024  # four canvases of the real model; its own generation config would stop after one
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Below this many parameters a step's operations are too short to share: with a second thread the demo model's step went
# from 8.5 to 12.6 ms in bf16, as it is stored, and from 5.5 to 5.3 in fp32 (tests/compare_step.py).
ONE_THREAD_BELOW = 50_000_000


@dataclass(slots=True)
class Session:
    """A loaded model, its tokenizer, and the conversation whose cache the next turn may reuse."""

    name: str
    tokenizer: Tokenizer
    generation: GenerationConfig
    conversation: Conversation[Cache]
    is_demo: bool
    planned: Planned
    proof: Proof
    slow_because: str | None  # why operations run in plain torch; None where they run on the fused kernels
    revision: str | None = None  # the commit of the hub's repository that the files are of
    preset: str | None = None  # that was asked for; None: settings of the sampler are the model's own
    words: tuple[str, ...] = ()  # of DGEMMA_OPS
    found: tuple[str, ...] = ()  # what the kernels' self-test had to say
    hold: lock.Hold = field(default_factory=lambda: lock.Hold(None))  # of the card
    pressed: Flag = field(default_factory=Flag)  # Ctrl-C, during the latest answer

    @property
    def canvas_length(self) -> int:
        return self.conversation.model.canvas_length

    @property
    def mode(self) -> str:
        """How passes are run: "graphs", "eager launches: why", or "torch: why"."""
        return self.conversation.model.mode

    @property
    def notices(self) -> tuple[str, ...]:
        """What a user should know of the card by now: kernels that were found wrong, passes that could not be captured."""
        runner = self.conversation.model
        failed = runner.notice if isinstance(runner, captured.Captured) else None
        return (*self.found, *([failed] if failed else []))

    @property
    def on_gpu(self) -> bool:
        return self.conversation.model.device.type != "cpu"

    @property
    def steps(self) -> int:
        """Denoising steps a canvas may take, unless told otherwise."""
        return self.generation.steps

    @property
    def settings(self) -> dict[str, object]:
        """How an answer comes about, in plain values: for recordings, `--json` and `--stats`."""
        network = self.conversation.model
        names = ("t_min", "t_max", "entropy_bound", "confidence", "stability")
        return {name: getattr(self.generation, name) for name in names} | {
            "preset": self.preset,
            "context": self.conversation.context,
            "device": network.device.type,
            "operations": self.mode,
        }

    def answer(
        self,
        messages: Sequence[Message],
        *,
        seed: int,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        steps: int | None = None,
        thinking: bool = False,
        think_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Iterator[Event]:
        """The events of one answer. The same seed gives the same events.

        think_tokens: where a thought is open that takes so many tokens or more, the next canvas begins with its end, and
        the answer follows; None lets it take all. stop: the answer ends before the first of these strings in its text;
        a thought holds none. A first canvas with nothing for a reader begins anew once (`Retried`).

        Ctrl-C ends it after the running step, with Finished("interrupted"); a second one at once. Raises UsageError on
        numbers out of range, PromptError on a prompt longer than the context, NumericalError on NaN, DoesNotFit where
        memory runs out all the same, KernelCrash where the card gives up.
        """
        if not 0 <= seed < 1 << 64:
            raise UsageError(f"the seed {seed} is out of range", "give a whole number from 0 to 18446744073709551615")
        if max_tokens < 1:
            raise UsageError(f"an answer of {max_tokens} tokens cannot be given", "ask for at least 1")
        if steps is not None and not 1 <= steps <= 4096:
            raise UsageError(f"{steps} denoising steps cannot be taken", "ask for 1 to 4096")
        if think_tokens is not None and not 1 <= think_tokens < max_tokens:
            raise UsageError(
                f"a thought of {think_tokens} tokens leaves none of {max_tokens} for an answer",
                f"bound the thought by 1 to {max_tokens - 1} tokens" if max_tokens > 1 else "ask for a longer answer",
            )
        config = self.generation if steps is None else replace(self.generation, steps=steps)
        model = self.conversation.model
        noise = PhiloxNoise(seed, model.canvas_length, self.tokenizer.vocab_size, model.device)
        prompt = self.prompt(messages, thinking=thinking)
        self.pressed.clear()
        search = StopSearch(self.tokenizer, stop, open_channel=self._opens(prompt))
        with noting_ctrl_c(self.pressed), _memory_told("while answering"):
            yield from self.conversation.answer(
                prompt,
                config,
                noise,
                max_tokens,
                stop=search,
                rest=lambda: search.rest,
                first=never if think_tokens is None else self._closer(prompt, think_tokens),
                blank=lambda tokens: is_blank(self._decoder(prompt), tokens),
                interrupted=self.pressed.is_set,
            )

    def prompt(self, messages: Sequence[Message], *, thinking: bool = False) -> tuple[int, ...]:
        """Token ids of a conversation up to the model's turn. Raises PromptError where no context could hold it."""
        return self.tokenizer.prompt(messages, thinking=thinking, max_tokens=self.conversation.context)

    def _opens(self, prompt: Sequence[int]) -> bool:
        """Whether the answer begins inside a thought."""
        return opens_channel(prompt, self.tokenizer.special)

    def _decoder(self, prompt: Sequence[int]) -> AnswerDecoder:
        """Of an answer to `prompt`."""
        return AnswerDecoder(self.tokenizer, open_channel=self._opens(prompt))

    def _closer(self, prompt: Sequence[int], most: int) -> Callable[[Sequence[int]], int | None]:
        """The end of a thought, where the next canvas is to begin with it."""

        def first(tokens: Sequence[int]) -> int | None:
            decoder = self._decoder(prompt)
            decoder.feed(tokens)
            over = decoder.in_thought and decoder.thought_tokens >= most
            return self.tokenizer.special.channel_close if over else None

        return first


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """How a model is to be loaded; None is decided by what there is."""

    dtype: str | None = None  # "float32", "bfloat16"; None: as stored
    device: str | None = None  # "cpu", "cuda"; None: a card if there is one, and the demo on the CPU
    context: int | None = None  # tokens of prompt and answer that memory is planned for; may be `AtMost`
    vram: float | None = None  # GB to stay within; None: what is free
    fp8_attention: bool = False
    fp8_embedding: bool = False
    fp8_mlp: bool = False
    checksum: bool = False
    steps: int | None = None  # that a canvas may take, for passes to be captured with; None: the model's own
    preset: str | None = None  # of `presets`: settings of the sampler in the place of the model's own


@contextmanager
def _memory_told(when: str) -> Iterator[None]:
    """What the card, or the computer, could not give becomes an error with a cure."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        what = " ".join(str(error).split()).partition(". ")[0]
        raise DoesNotFit(
            f"memory ran out {when}{f': {what}' if what else ''}",
            "plan for a shorter --context, or end what else holds it (`dgemma doctor` says who)",
        ) from None
    except torch.AcceleratorError as error:
        what = " ".join(str(error).split()).partition(". ")[0]
        raise KernelCrash(
            f"the card gave up {when}: {what}", "run again with DGEMMA_OPS=torch, and see `dgemma doctor`"
        ) from None


@_memory_told("while the model was opened")
def open_session(
    model: str,
    wishes: Wishes | None = None,
    progress: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Session:
    """`model`: a name in models.toml or a folder. `progress` hears bytes read and bytes in all, `say` why it takes longer.

    Raises UnknownModel, ConfigError, TokenizerError, CheckpointError, UsageError, DoesNotFit, KernelCrash; small files
    are checked first, and a plan of the memory before a tensor is read. On a card the kernels are tested, once a card and
    driver, and a denoising step is captured.
    """
    wishes = wishes or Wishes()
    if wishes.dtype is not None and wishes.dtype not in DTYPES:
        raise UsageError(f"the dtype {wishes.dtype!r} is not known", f"choose one of: {', '.join(DTYPES)}")
    with logs.phase("resolve"):
        name, folder = registry.resolve(model, hub.folder_of)
    refuse_special_files(folder)
    device = _device(wishes.device, folder)
    ops.wishes()  # a word that DGEMMA_OPS may not hold is refused before anything is loaded
    config = load_model_config(folder)
    generation = presets.applied(load_generation_config(folder, config.vocab_size), wishes.preset)
    tokenizer = Tokenizer.load(folder, config.vocab_size)
    checkpoint = open_checkpoint(folder)
    options = Options(
        None if wishes.dtype is None else DTYPES[wishes.dtype],
        wishes.fp8_attention,
        wishes.fp8_embedding,
        wishes.fp8_mlp,
    )
    with logs.phase("plan"):
        planned = plan_run(checkpoint, config, options, device=device, context=wishes.context, vram=wishes.vram)
    agreed, said = planned.agreed, planned.verdict
    firm = wishes.context is not None and not isinstance(wishes.context, AtMost)
    if said is not None and (agreed is None or (firm and not said.fits)):
        raise lock.named(said.error(name), _hold(device, planned).other)
    assert agreed is not None
    hold = _hold(device, planned)
    if hold.other is not None:
        say(f"another dgemma is on this card, too: {hold.other.line}")
    proof = Proof()
    with logs.phase("load"):
        weights = fill(checkpoint, planned.layout, device, progress=progress, checksum=wishes.checksum, proof=proof)
    if sum(weight.numel() for weight in weights.values()) < ONE_THREAD_BELOW:
        torch.set_num_threads(1)
    network = DiffusionGemma(config, weights)
    with logs.phase("selftest"):
        found = selftest.apply(network, say, agreed.room.context)
    with logs.phase("capture"):
        runner = captured.best(network, agreed.room)
        if isinstance(runner, captured.Captured):
            runner.prepare(generation if wishes.steps is None else replace(generation, steps=wishes.steps))
    return Session(
        name=name,
        tokenizer=tokenizer,
        generation=generation,
        conversation=Conversation(runner, agreed.room),
        revision=folder.name if folder.parent.name == "snapshots" else None,  # as the hub's cache lays them out
        slow_because=ops.why_torch(network.device, network.dtype),
        preset=wishes.preset,
        words=tuple(sorted(ops.wishes())),
        found=tuple(found),
        is_demo=registry.is_demo(folder),
        planned=planned,
        proof=proof,
        hold=hold,
    )


def _hold(device: Device, planned: Planned) -> lock.Hold:
    """The lock of the card, or who has it. On a CPU nothing is held."""
    card = _card(device, planned)
    agreed = planned.agreed
    return lock.Hold(None) if card is None else lock.take(card, None if agreed is None else agreed.total)


def _card(device: Device, planned: Planned) -> str | None:
    """A name of the card that every process has for it; None: no card."""
    if device != "cuda":
        return None
    card = None if planned.verdict is None else planned.verdict.budget.card
    return "cuda" if card is None else card.uuid


def _device(wish: str | None, folder: Path) -> Device:
    if wish not in (None, "cpu", "cuda"):
        raise UsageError(f"the device {wish!r} is not known", "choose one of: cpu, cuda")
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # nvidia-smi's, so that the card is the one planned for
    there = torch.cuda.is_available()
    if wish == "cuda" and not there:
        raise UsageError("torch sees no CUDA device", "drop --device cuda, or install torch's CUDA build and a driver")
    if wish is None:
        return "cuda" if there and not registry.is_demo(folder) else "cpu"
    return "cuda" if wish == "cuda" else "cpu"


def timed(events: Iterable[Event]) -> Iterator[tuple[Event, float]]:
    """Each event with the seconds that making it took; the reader's own time between two is not counted."""
    source, logged = iter(events), logs.Canvases()
    while True:
        start = time.perf_counter()
        try:
            event = next(source)
        except StopIteration:
            return
        seconds = time.perf_counter() - start
        logged.take(event, seconds)
        yield event, seconds
