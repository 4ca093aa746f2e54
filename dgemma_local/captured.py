"""A conversation's passes on fixed memory: on a card one CUDA graph each, so that the host is never in a step's way.

    chunk    prompt rows, as many as are planned for, of which nothing is wanted but keys and values
    first    L rows that join the cache, and the canvas's step 0 behind them: one reading of the weights for both
    step     the canvas, conditioned on the step before

                host                                  device, one stream
    begin       inbox, state ───── two copies ──────► spans, positions, ids │ canvas, key, step 0
                                                      first
                ring ◄──────────── one copy ───────── canvas, flags, accepted, draft, entropy
    ahead       step 1 is launched before …           step
                … step 0 is read, and so on           step …

What changes from pass to pass lies in device memory: where rows stand and what they see, the tokens, the step's number,
temperature and key, the state. So a graph is captured once for all of them; only other settings of the sampler want their
own. Rows that a pass has too few of are padding: they write no keys or values, and nobody sees them.

Running ahead. A step is launched before the one in flight is read, unless that one may be the last. What stops a canvas is
seen coming: mean entropy falls by a factor a step, and only below NEAR times the threshold the host waits and looks. A
wait costs the microseconds between two graphs. A wrong guess costs one step, whose result nobody reads: `update` leaves
a finished state alone, and rows behind the committed ones do not count.

Without a card the same passes are called one after another; without graphs (`eager launches`) as well.

Source  fused commit: ours; committed rows are causal, and a canvas reads nothing of them but K/V of the same layer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from dgemma_local import ops, rope, sampler
from dgemma_local.cache import Cache, Room
from dgemma_local.config import GenerationConfig, Kind, LayerConfig
from dgemma_local.errors import DoesNotFit
from dgemma_local.model import NOWHERE_ELSE, DiffusionGemma, Segment
from dgemma_local.noise import Noise, PhiloxNoise
from dgemma_local.ops import Rotary, Sight
from dgemma_local.quant import Nvfp4

# Mean entropy of a step, over the threshold, below which the next one may be the canvas's last. Of 83 canvases of the demo
# models that converged (9x9 puzzles and text), the last step but one was below 12.3 times the threshold in all.
NEAR = 20.0
RING = 4  # reports on their way to the host; two are at most
INBOXES = 2  # passes whose inbox may be on its way
# Keys that the number of splits of full attention is chosen for, at the most: it hardly depends on them, and a short
# context would pay for partial results that a long one asks for.
REACH = 8192
KINDS: tuple[Kind, ...] = ("sliding", "full")

MailT = TypeVar("MailT")


def best(network: DiffusionGemma, room: Room) -> "DiffusionGemma | Captured":
    """What a conversation is to be given: the network itself, in plain torch, or its passes on the kernels."""
    if ops.why_torch(network.device, network.dtype) is not None or isinstance(network.embed_tokens, Nvfp4):
        return network
    return Captured(network, room)


@dataclass(frozen=True, slots=True)
class Inbox:
    """What the host says of a pass, by name; on the device, or on its way there."""

    memory: Tensor  # int64 [n]
    ids: Tensor  # int64 [C], the tokens that join, padded
    starts: Tensor  # int64 [2], positions of the first row that joins and of the canvas
    spans: Tensor  # int32 [2, KINDS, 4]: of the same two, see `cache.SlabMemory.span`

    @classmethod
    def over(cls, memory: Tensor) -> "Inbox":
        ids, starts, rest = memory.split([len(memory) - cls.beside(), 2, 4 * len(KINDS)])
        return cls(memory, ids, starts, rest.view(torch.int32).view(2, len(KINDS), 4))

    @staticmethod
    def beside() -> int:
        """int64 numbers that are not ids."""
        return 2 + 4 * len(KINDS)


class Captured:
    """A network with the memory of one conversation; stands where the engine asks for a model."""

    def __init__(self, network: DiffusionGemma, room: Room) -> None:
        """`room`: what the cache is planned for. Raises ValueError where a pass of two canvases has no room in it."""
        self.network, self.device = network, network.device
        L = self.canvas_length = self.joins = network.canvas_length
        self.rows = room.rows  # of a prompt's chunk
        if room.rows < min(2 * L, room.context):
            raise ValueError(f"passes of {room.rows} rows are planned for, and two canvases have {2 * L}")
        self.max_positions, self.room = network.max_positions, room
        self.cache = network.new_cache()
        self.cache.reserve(room)
        self.on_card = self.device.type == "cuda"
        room_for_ids = max(room.rows, L)
        memory = torch.zeros(room_for_ids + Inbox.beside(), dtype=torch.int64, device=self.device)
        self._inbox = Inbox.over(memory)
        self._mail = [self._mailbox(Inbox.over, self._inbox.memory) for _ in range(INBOXES)]
        self._sent = 0
        self._turns = {
            of: rope.inverse_frequencies(network.config.rope[of.kind], of.head_dim).to(self.device)
            for of in network.config.layers
        }
        self._rotary = {of: self._tables(of) for of in self._turns}
        self._soft = torch.zeros(L, network.config.hidden_size, dtype=network.dtype, device=self.device)
        assert not isinstance(network.embed_tokens, Nvfp4)  # `best` sees to it
        self.head = ops.Head.of(network.embed_tokens, network.config.softcap, network.embed_scale)
        self._config: GenerationConfig | None = None
        self._why_eager = _why_eager()
        self._failed: str | None = None
        self.wasted = 0  # steps that were launched behind a canvas's last
        self._pool: Any = torch.cuda.graph_pool_handle() if self.on_card else None
        self._chunk, self._first, self._step = Phase(self.chunk), Phase(self.first), Phase(self.step)

    def _tables(self, of: LayerConfig) -> Rotary:
        rows = max(self.rows, 2 * self.canvas_length)
        empty = torch.zeros(rows, of.head_dim, dtype=self.network.dtype, device=self.device)
        return empty, empty.clone()

    @property
    def mode(self) -> str:
        """How passes are run, for reports."""
        if not self.on_card:
            return f"eager launches: the model is on {self.device.type}"
        why = self._why_eager or self._failed
        if why is None and any(phase.graph is None for phase in (self._chunk, self._first, self._step)):
            why = "nothing is captured yet"
        return "graphs" if why is None else f"eager launches: {why}"

    @property
    def notice(self) -> str | None:
        """What a user should hear who asked for nothing of the kind."""
        if self._failed is None:
            return None
        return (
            f"a denoising step could not be captured as a CUDA graph and is launched kernel by kernel: {self._failed}"
        )

    # ── the passes: nothing but launches on fixed memory ──────────────────────────────────────────────────────────

    def chunk(self) -> None:
        self._turn(0, self.rows)
        self.network.through(self.network.embed(self._inbox.ids[: self.rows]), [self._joining(self.rows)])

    def first(self) -> None:
        L, network = self.canvas_length, self.network
        self._turn(0, L)
        self._turn(1, L)
        x = self._soft.new_empty(2 * L, self._soft.shape[1])
        network.embed(self._inbox.ids[:L], out=x[:L])
        network.canvas_rows(self._state.canvas, None, out=x[L:])
        self._end(network.through(x, [self._joining(L), self._canvas()]))

    def step(self) -> None:
        x = self.network.canvas_rows(self._state.canvas, self._soft)
        self._end(self.network.through(x, [self._canvas()]))

    def _turn(self, segment: int, rows: int) -> None:
        """The rotary tables of a segment's rows."""
        for of, tables in self._rotary.items():
            cos, sin = (table[segment * rows :][:rows] for table in tables)
            rope.fill(self._turns[of], self._inbox.starts[segment], cos, sin)

    def _joining(self, rows: int) -> Segment:
        return self._segment(0, slice(0, rows), causal=True)

    def _canvas(self) -> Segment:
        return self._segment(1, slice(self.canvas_length, 2 * self.canvas_length), causal=False)

    def _segment(self, number: int, rows: slice, causal: bool) -> Segment:
        window = self.network.config.sliding_window
        sights = {
            kind: Sight(
                span=self._inbox.spans[number, i],
                window=window if kind == "sliding" else None,
                reach=min(self.room.context, REACH),
            )
            for i, kind in enumerate(KINDS)
        }
        rotary = {of: (cos[rows], sin[rows]) for of, (cos, sin) in self._rotary.items()}
        return Segment(rows.stop - rows.start, causal, self.cache, sights, rotary, kv_only=causal)

    def _end(self, hidden: Tensor) -> None:
        ops.end_of_step(hidden, self.head, self._state, *self._stops, self._soft)

    # ── once a session, or where the settings change ──────────────────────────────────────────────────────────────

    @torch.inference_mode()
    def prepare(self, config: GenerationConfig) -> None:
        """Compiles, warms up and captures, before a prompt is there; the settings of a step are part of its graph.

        Those of one kind are captured at a time: other ones replace them. What is stopped half way begins anew.
        """
        self._capture(self._chunk)
        if self._config is not None and _settings(config) == _settings(self._config):
            return
        self._config, self._first.graph, self._step.graph = None, None, None
        temperatures = torch.stack([sampler.temperature(config, step) for step in range(config.steps)])
        state = ops.State.new(self.canvas_length, config.stability, temperatures.to(self.device))
        opening, *ring = [self._mailbox(state.views, state.memory) for _ in range(1 + RING)]
        self._temperatures, self._state, self._opening, self._ring = temperatures, state, opening, ring
        self._stops = config.entropy_bound, config.confidence
        for phase in (self._first, self._step):
            phase.ready = False
            state.flags.fill_(1)  # a finished state is left alone by what is run for its own sake
            self._capture(phase)
        self._config = config

    def _mailbox(self, views: Callable[[Tensor], MailT], like: Tensor) -> "Mailbox[MailT]":
        return Mailbox(views(torch.zeros(like.shape, dtype=like.dtype, pin_memory=self.on_card)), self.on_card)

    def _capture(self, phase: "Phase") -> None:
        """Runs it once, which compiles it, and captures it; both runs are harmless."""
        if phase.ready or not self.on_card:
            return
        self._inbox.memory.zero_()  # spans without a row: no keys and values are written
        phase.body()
        torch.cuda.synchronize()
        if self._why_eager is None and self._failed is None:
            try:
                phase.graph = self._graph_of(phase.body)
            except RuntimeError as error:
                self._failed = f"capture failed: {str(error).splitlines()[0]}"
                for each in (self._chunk, self._first, self._step):
                    each.graph = None
        phase.ready = True

    def _graph_of(self, body: Callable[[], None]) -> Any:
        """All graphs share one pool: what lies there is dead between two passes."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                body()
        except RuntimeError:
            _give_back(self._pool)
            raise
        finally:
            torch.cuda.set_stream(stream)  # torch leaves its own one behind where a capture fails
        return graph

    def _let_go(self) -> None:
        """Of the graphs, and with them of their pool; whoever runs a pass next captures it again."""
        phases = self._chunk, self._first, self._step
        if all(phase.graph is None for phase in phases):
            return
        torch.cuda.synchronize()  # a step that nobody reads may still run
        self._config, self._pool = None, torch.cuda.graph_pool_handle()  # torch captures into no pool that is gone
        for phase in phases:
            phase.graph, phase.ready = None, False
        torch.cuda.empty_cache()

    # ── the engine's verbs ────────────────────────────────────────────────────────────────────────────────────────

    def new_cache(self) -> Cache:
        """The one that there is, empty: graphs know its memory."""
        self.cache.clear()
        return self.cache

    @torch.inference_mode()
    def encode(self, ids: Tensor, cache: Cache) -> None:
        """ids [T] int64, on the host, join the cache."""
        self._capture(self._chunk)
        for part in ids.split(self.rows):
            self._send(part, joining=len(part))
            self._chunk.run()
            cache.advance(len(part))

    def denoising(
        self,
        ids: Sequence[int],
        number: int,
        cache: Cache,
        config: GenerationConfig,
        noise: Noise,
        rules: sampler.Rules = sampler.FREE,
    ) -> Iterator[sampler.Canvas]:
        """ids, at most `joins`, join the cache with the first step of canvas `number`; its steps, until it is done.

        Rules change logits, which are never whole here: such a canvas, one of an answer at most or two, takes its steps
        one by one in the network itself, on the same cache and with the same numbers. The graphs go first, since the plan
        has one working memory for both, and are captured again behind it. Raises DoesNotFit where somebody else took it.
        """
        if rules != sampler.FREE or not isinstance(noise, PhiloxNoise):  # another stream is drawn by its own code
            self._let_go()
            try:
                yield from self.network.denoising(ids, number, cache, config, noise, rules)
            except torch.OutOfMemoryError:
                raise DoesNotFit(
                    f"the logits of canvas {number} have no room: it is tried again, or begins with a given token",
                    "plan for a shorter --context, or end what else holds the card",
                ) from None
            return
        self.prepare(config)
        before = self._begin(ids, number, noise)
        launched = 1
        for step in range(config.steps):
            if launched == step + 1 < config.steps and not may_stop(before, config):
                self._launch(self._step, launched)
                launched += 1
            if not self._done(step) and launched == step + 1:  # before anything else: the card is waiting
                self._launch(self._step, launched)
                launched += 1
            after = self._read(before)
            if after.done:
                self.wasted += launched - (step + 1)
            yield after
            if after.done:
                return
            before = after

    def first_bad_layer(self, canvas: Tensor, cache: Cache, signal: Tensor | None) -> str:
        """As the network says, of the same canvas without a signal: the one it had is gone by the time it is missed."""
        where = self.network.first_bad_layer(canvas.to(self.device), cache, None)
        return where if where != NOWHERE_ELSE else f"self-conditioning, {where}"

    # ── one pass ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _send(self, ids: Tensor, joining: int, canvas: int = 0) -> None:
        """What the next pass reads of where its rows stand: `joining` that join, `canvas` behind them."""
        mail = self._mail[self._sent % len(self._mail)]
        self._sent += 1
        mail.wait()
        inbox, cache = mail.views, self.cache
        inbox.ids[:joining] = ids
        inbox.ids[joining:] = 0
        later = cache.behind(joining, canvas)
        inbox.starts[0], inbox.starts[1] = cache.length, later.length
        for i, kind in enumerate(KINDS):
            inbox.spans[0, i] = torch.tensor([*cache.place(kind, joining), joining, 1])
            inbox.spans[1, i] = torch.tensor([*later.place(kind, canvas), canvas, 0])
        self._inbox.memory.copy_(inbox.memory, non_blocking=True)
        mail.mark()

    @torch.inference_mode()
    def _begin(self, ids: Sequence[int], number: int, noise: PhiloxNoise) -> sampler.Canvas:
        """Launches step 0, and with it the encoder pass of `ids`; what it reads."""
        self._send(torch.tensor(ids, dtype=torch.int64), len(ids), self.canvas_length)
        here = PhiloxNoise(noise.seed, self.canvas_length, noise.vocab_size, torch.device("cpu"), noise.attempt)
        canvas = sampler.begin(number, here)
        self._opening.wait()
        views = self._opening.views
        views.canvas.copy_(canvas.next)
        views.key.numbers.copy_(ops.key_numbers(noise.seed, noise.attempt, number))  # step and flags are 0 for good
        views.temperature.copy_(self._temperatures[:1])
        self._state.begins.copy_(views.begins, non_blocking=True)
        self._opening.mark()
        self._launch(self._first, 0)
        self.cache.advance(len(ids))
        return canvas

    @torch.inference_mode()
    def _launch(self, phase: "Phase", step: int) -> None:
        """A step, and its report on the way; nothing is waited for, and on a card nothing allocated."""
        phase.run()
        mail = self._ring[step % RING]
        mail.views.reports.copy_(self._state.reports, non_blocking=True)
        mail.mark()

    def _done(self, step: int) -> bool:
        """Whether the canvas is; waits for the report of that step."""
        mail = self._ring[step % RING]
        mail.wait()
        return bool(mail.views.flags[1])

    def _read(self, before: sampler.Canvas) -> sampler.Canvas:
        """The state behind `before`, whose report is here."""
        report = self._ring[before.step % RING].views
        converged, done = report.flags.tolist()
        return replace(
            before,
            step=before.step + 1,
            fed=before.next,
            next=report.canvas.clone(),
            draft=report.draft.clone(),
            accepted=report.accepted.clone(),
            entropy=report.entropy.clone(),
            temperature=float(self._temperatures[before.step]),
            converged=bool(converged),
            done=bool(done),
        )


class Phase:
    """One pass over fixed memory."""

    def __init__(self, body: Callable[[], None]) -> None:
        self.body = body
        self.ready = False  # was run once, and is captured if it can be
        self.graph: Any = None  # torch.cuda.CUDAGraph, which has no stub

    def run(self) -> None:
        (self.body if self.graph is None else self.graph.replay)()


class Mailbox(Generic[MailT]):
    """Host memory that a copy reads or writes while the host goes on: pinned where there is a card."""

    def __init__(self, views: MailT, on_card: bool) -> None:
        self.views = views
        self._event = torch.cuda.Event() if on_card else None

    def mark(self) -> None:
        """A copy was launched."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """For the last copy that was launched."""
        if self._event is not None:
            self._event.synchronize()


def _why_eager() -> str | None:
    if "eager" in ops.wishes():
        return "DGEMMA_OPS=eager asks for it"
    if twins := ops.replaced():  # which wait for the host
        return f"{len(twins)} kernels run as their twins" if len(twins) > 1 else f"{min(twins)} runs as its twin"
    return None


def may_stop(before: sampler.Canvas, config: GenerationConfig) -> bool:
    """Whether the step behind `before` may be the canvas's last, as far as one can tell from `before`."""
    if before.step < config.stability:  # too few drafts to be equal
        return False
    return before.entropy is None or bool(before.entropy.mean() < NEAR * config.confidence)


def _give_back(pool: Any) -> None:
    """Ends what a capture that failed has begun with torch's allocator, which would refuse to empty its cache for good."""
    device = torch.cuda.current_device()
    with suppress(RuntimeError):  # where it had not begun, or has ended it itself
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


def _settings(config: GenerationConfig) -> GenerationConfig:
    """Without what only the engine reads."""
    return replace(config, end_ids=(), pad_id=0)
