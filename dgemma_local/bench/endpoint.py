"""A vLLM server's figures by the protocol of `fixed16`: random ids in, tokens out, ends ignored, one request at a time.

The clock (time.perf_counter) starts when a request is sent over an open connection. The first request is a warm-up, and no
two prompts are alike, so that a prefix cache serves none of them.

    ttft_ms           to the first tokens: with whole canvases streamed, the first canvas
    end_to_end_tok_s  tokens ÷ seconds to the last of them, prefill included: as `vllm bench serve` divides
    decode_tok_s      tokens after the first chunk ÷ seconds after it
    canvas_ms         median time between chunks, for each CANVAS tokens of a chunk that holds whole canvases

Chunks within TOGETHER of one another are one: a server that cuts a canvas into pieces is not a faster one. What cannot be
known is None, and `missing` says why.

Sources: docs.vllm.ai/en/latest/cli/bench/serve, and recipes.vllm.ai/Google/diffusiongemma-26B-A4B-it (how it is served).
What is asked, and how: bench/server.py.
"""

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from dgemma_local.bench.protocols import STEPS
from dgemma_local.bench.server import SILENCE, Answered, Chunk, Clock, Server
from dgemma_local.errors import EndpointError

CANVAS = 256  # tokens of the real model's canvas
# seconds between two chunks that are one: a canvas takes the fastest card 60 ms (16 steps of 3.7 ms, all of its bandwidth)
TOGETHER = 0.005


def together(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Chunks that came within TOGETHER of a burst's first one are that burst: its time, and all its tokens."""
    bursts: list[Chunk] = []
    for chunk in chunks:
        if bursts and chunk.at - bursts[-1].at < TOGETHER:
            bursts[-1] = Chunk(bursts[-1].at, chunk.tokens)
        else:
            bursts.append(chunk)
    return bursts


def _between(before: Chunk, after: Chunk) -> int:
    """Tokens that `after` brought; 0 where it is not known."""
    return 0 if before.tokens is None or after.tokens is None else after.tokens - before.tokens


def figures(answer: Answered, canvas: int = CANVAS) -> tuple[dict[str, Any], dict[str, str]]:
    """One answer's figures, and for those that are None, why."""
    bursts = together(answer.chunks)
    first, last = bursts[0], answer.chunks[-1].at
    found: dict[str, Any] = {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "chunks": len(bursts),
        "seconds": last,
        "ttft_ms": first.at * 1e3,
        "end_to_end_tok_s": answer.completion_tokens / last,
        "decode_tok_s": None,
        "canvas_ms": None,
    }
    if len(bursts) == 1:
        why = "all tokens came at once"
        return found, {"decode_tok_s": why, "canvas_ms": why}
    if first.tokens is None:
        why = "the server does not say how many tokens a chunk holds (continuous_usage_stats)"
        return found, {"decode_tok_s": why, "canvas_ms": why}
    # by the bursts' beginnings, both of them: what trails a burst adds no time to its tokens
    found["decode_tok_s"] = (answer.completion_tokens - first.tokens) / (bursts[-1].at - first.at)
    each = [
        (after.at - before.at) * 1e3 * canvas / count
        for before, after in pairwise(bursts)
        if (count := _between(before, after)) and count % canvas == 0
    ]
    if not each:
        return found, {"canvas_ms": f"no chunk holds whole canvases of {canvas} tokens"}
    found["canvas_ms"] = statistics.median(each)
    return found, {}


def measure(
    url: str,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    canvas: int = CANVAS,
    silence: float = SILENCE,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """The server at `url` answers `prompts`, token ids, one after the other; the first is the warm-up.

    -> url, model, version, prompt_tokens, asked_tokens, settings (what of the denoising could be read, or why nothing),
    same_steps (whether they tell that a canvas takes fixed16's steps),
    requests (each one's figures), median (ttft_ms, end_to_end_tok_s, decode_tok_s, canvas_ms), missing (figure -> why it
    is None), notes (what sets these answers apart from the protocol), no_ratio (why none of it can be set against ours, or None). The key in OPENAI_API_KEY goes along, and is shown
    nowhere. Raises EndpointError where there are no figures to be had.
    """
    server = Server(url, os.environ.get("OPENAI_API_KEY", ""), silence, clock)
    model, longest = server.model()
    require_room(server, model, longest, max(len(prompt) for prompt in prompts) + max_tokens)
    version, settings = server.version(), server.settings()
    answers = [server.answer(model, prompt, max_tokens) for prompt in prompts][1:]
    each = [figures(answer, canvas) for answer in answers]
    missing = {name: why for _, reasons in each for name, why in reasons.items()}
    names = ("ttft_ms", "end_to_end_tok_s", "decode_tok_s", "canvas_ms")
    median = {name: None if name in missing else statistics.median(one[name] for one, _ in each) for name in names}
    return {
        "url": str(server),
        "model": model,
        "version": version,
        "prompt_tokens": len(prompts[0]),
        "asked_tokens": max_tokens,
        "settings": settings,
        "same_steps": as_fixed16(settings),
        "requests": [one for one, _ in each],
        "median": median,
        "missing": missing,
        "notes": list(_notes(settings, answers, len(prompts[0]), max_tokens)),
        "no_ratio": _no_ratio(answers, max_tokens),
    }


def require_room(server: Server, model: str, longest: int | None, wanted: int) -> None:
    """Raises EndpointError where the server's model is known to hold fewer than `wanted` tokens."""
    if longest is not None and longest < wanted:
        raise EndpointError(
            f"{server} serves {model} with a context of {longest:,} tokens, and {wanted:,} are asked for",
            f"start it with --max-model-len {wanted} or more",
        )


def _no_ratio(answers: Sequence[Answered], max_tokens: int) -> str | None:
    """A shorter answer has another share of prefill in it, and canvases that were not finished."""
    least = min(one.completion_tokens for one in answers)
    return None if least >= max_tokens else f"the server gave {least:,} tokens, and {max_tokens:,} were asked for"


def as_fixed16(settings: dict[str, Any] | str) -> bool:
    """Whether a server tells that each of its canvases takes fixed16's steps: as many at most, and none too sure for them."""
    if isinstance(settings, str):
        return False
    return settings.get("max_denoising_steps") == STEPS and settings.get("confidence_threshold") == 0


def _notes(
    settings: dict[str, Any] | str, answers: Sequence[Answered], prompt_tokens: int, max_tokens: int
) -> Iterator[str]:
    """What sets these answers apart from the protocol."""
    steps = settings.get("max_denoising_steps") if isinstance(settings, dict) else None
    if steps is not None and steps != STEPS:
        yield f"the server takes up to {steps} steps a canvas, and fixed16 takes {STEPS}"
    if not as_fixed16(settings):
        yield "how many steps its canvases take is not known: no time of a step is set beside ours"
    if other := {one.prompt_tokens for one in answers} - {prompt_tokens}:
        yield f"the server counts {max(other):,} tokens in a prompt of {prompt_tokens:,}"
    if other := {one.completion_tokens for one in answers} - {max_tokens}:
        yield f"an answer has {min(other):,} tokens, and {max_tokens:,} were asked for"
