"""Open a model, answer a prompt: the public interface.

session = open_session("demo")
for event in session.answer([{"role": "user", "content": "Hello"}], seed=1):
    ...
"""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType

import torch

from dgemma_local import registry
from dgemma_local.cache import Cache
from dgemma_local.checkpoint import open_checkpoint
from dgemma_local.config import GenerationConfig, load_generation_config, load_model_config
from dgemma_local.engine import Conversation
from dgemma_local.errors import UsageError
from dgemma_local.events import Event
from dgemma_local.layout import Options
from dgemma_local.loading import load
from dgemma_local.model import DiffusionGemma
from dgemma_local.noise import PhiloxNoise
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
    pressed: threading.Event = field(default_factory=threading.Event)  # Ctrl-C, during the latest answer

    @property
    def canvas_length(self) -> int:
        return self.conversation.model.canvas_length

    @property
    def steps(self) -> int:
        """Denoising steps a canvas may take, unless told otherwise."""
        return self.generation.steps

    def answer(
        self,
        messages: Sequence[Message],
        *,
        seed: int,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        steps: int | None = None,
        thinking: bool = False,
        stop: Sequence[str] = (),
    ) -> Iterator[Event]:
        """The events of one answer. The same seed gives the same events.

        Ctrl-C ends it after the running step, with Finished("interrupted"); a second one at once. Raises UsageError on
        numbers out of range, PromptError on a prompt longer than the context, NumericalError on NaN.
        """
        if not 0 <= seed < 1 << 64:
            raise UsageError(f"the seed {seed} is out of range", "give a whole number from 0 to 18446744073709551615")
        if max_tokens < 1:
            raise UsageError(f"an answer of {max_tokens} tokens cannot be given", "ask for at least 1")
        if steps is not None and not 1 <= steps <= 4096:
            raise UsageError(f"{steps} denoising steps cannot be taken", "ask for 1 to 4096")
        config = self.generation if steps is None else replace(self.generation, steps=steps)
        model = self.conversation.model
        noise = PhiloxNoise(seed, model.canvas_length, self.tokenizer.vocab_size, model.device)
        prompt = self.prompt(messages, thinking=thinking)
        self.pressed.clear()
        with _ctrl_c(self.pressed):
            yield from self.conversation.answer(
                prompt, config, noise, max_tokens, stop=self._stopper(stop), interrupted=self.pressed.is_set
            )

    def prompt(self, messages: Sequence[Message], *, thinking: bool = False) -> tuple[int, ...]:
        """Token ids of a conversation up to the model's turn. Raises PromptError where no context could hold it."""
        return self.tokenizer.prompt(messages, thinking=thinking, max_tokens=self.conversation.model.max_positions)

    def _stopper(self, strings: Sequence[str]) -> Callable[[Sequence[int]], int | None]:
        """Where the first stop string begins, as a count of whole tokens before it."""

        def find(tokens: Sequence[int]) -> int | None:
            text = self.tokenizer.decode(tokens)
            starts = [at for at in (text.find(string) for string in strings if string) if at >= 0]
            if not starts:
                return None
            kept = len(tokens)
            while kept and len(self.tokenizer.decode(tokens[:kept])) > min(starts):
                kept -= 1
            return kept

        return find


def open_session(model: str, dtype: str | None = None) -> Session:
    """`model`: a name in models.toml or a folder. `dtype`: "float32", "bfloat16", or None for what is stored.

    Raises UnknownModel, ConfigError, TokenizerError, CheckpointError, UsageError; small files are checked first.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"the dtype {dtype!r} is not known", f"choose one of: {', '.join(DTYPES)}")
    name, folder = registry.resolve(model)
    config = load_model_config(folder)
    generation = load_generation_config(folder, config.vocab_size)
    tokenizer = Tokenizer.load(folder, config.vocab_size)
    weights = load(open_checkpoint(folder), config, Options(None if dtype is None else DTYPES[dtype]))
    if sum(weight.numel() for weight in weights.values()) < ONE_THREAD_BELOW:
        torch.set_num_threads(1)
    return Session(
        name=name,
        tokenizer=tokenizer,
        generation=generation,
        conversation=Conversation(DiffusionGemma(config, weights)),
        is_demo=registry.is_demo(folder),
    )


def timed(events: Iterable[Event]) -> Iterator[tuple[Event, float]]:
    """Each event with the seconds that making it took; the reader's own time between two is not counted."""
    source = iter(events)
    while True:
        start = time.perf_counter()
        try:
            event = next(source)
        except StopIteration:
            return
        yield event, time.perf_counter() - start


@contextmanager
def _ctrl_c(pressed: threading.Event) -> Iterator[None]:
    """The first Ctrl-C sets `pressed`; after it Python's own handler is back, so that a second one stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    before = signal.getsignal(signal.SIGINT)

    def press(number: int, frame: FrameType | None) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)  # None: not installed by Python
