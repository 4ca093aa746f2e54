"""A vLLM server as a client sees it: what is asked over HTTP, what comes and when, and every way in which it may not.

    GET  /v1/models       the model's name and the longest sequence it is served with
    GET  /version         vLLM's version; null from a server without it
    GET  /server_info     its diffusion settings, which vLLM shows in developer mode alone
    POST /v1/completions  `prompt` a list of ids, `ignore_eos`, `stream`, with usage in every chunk

How a canvas is denoised is the server's choice: `max_denoising_steps`, `confidence_threshold` and temperatures come from
its start (`--diffusion-config`, the model's generation_config.json) and no request can ask for them; of the request's
sampling DiffusionGemma's sampler there reads top_k and top_p alone. None of them is sent.

Sources: vLLM's vllm/entrypoints/openai/completion/protocol.py at 002032ee (CompletionRequest), vllm/config/diffusion.py as in
docs.vllm.ai/en/latest/api/vllm/config/diffusion, vllm/model_executor/models/diffusion_gemma.py at 00c25c81 (its sampler),
docs.vllm.ai/en/v0.15.0/api/vllm/entrypoints/serve/instrumentator/server_info (VLLM_SERVER_DEV_MODE).
"""

import json
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from dgemma_local.errors import EndpointError, UsageError

CONNECT = 10.0  # seconds to reach the server
SILENCE = 120.0  # seconds without a token; a slow card takes some ten for a canvas
MOST_BYTES = 4 << 20  # of an answer in JSON, or of one line of a stream
SHOWN = 160  # characters of what a server says about itself

NOT_READ = (
    "max_denoising_steps, confidence_threshold and temperatures are the server's: a request cannot set them, and outside "
    "developer mode (VLLM_SERVER_DEV_MODE=1) they cannot be read"
)

Clock = Callable[[], float]  # seconds


class Chunk(NamedTuple):
    """Tokens that came at one time."""

    at: float  # seconds since the request was sent
    tokens: int | None  # of the answer so far; None where the server does not say


class Answered(NamedTuple):
    """One request's answer."""

    chunks: tuple[Chunk, ...]
    prompt_tokens: int
    completion_tokens: int


class Server:
    """One OpenAI-compatible server. Every failure of it is an EndpointError that names it.

    UsageError is about what was given: no address, no key.
    """

    def __init__(self, url: str, key: str, silence: float = SILENCE, clock: Clock = time.perf_counter) -> None:
        self.secure, self.host, self.port, self.base = _address(url)
        self.key, self.silence, self.clock = key.strip(), silence, clock
        if not (self.key.isascii() and self.key.isprintable()):
            raise UsageError("OPENAI_API_KEY holds characters that no key has", "set it anew, or unset it")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{host}{'' if self.port is None else f':{self.port}'}{self.base}"

    def model(self) -> tuple[str, int | None]:
        """The first model it serves, and the most tokens of prompt and answer, where it says so."""
        said = self._json("/v1/models")
        models = said.get("data") if isinstance(said, dict) else None
        first = models[0] if isinstance(models, list) and models else None
        if not isinstance(first, dict) or not isinstance(first.get("id"), str):
            raise EndpointError(
                f"{self} lists no model at /v1/models", "give the address of a vLLM server that has loaded one"
            )
        longest = first.get("max_model_len")
        return first["id"], longest if isinstance(longest, int) else None

    def version(self) -> str | None:
        said = self._json("/version", optional=True)
        version = said.get("version") if isinstance(said, dict) else None
        return version if isinstance(version, str) else None

    def settings(self) -> dict[str, Any] | str:
        """`diffusion_config` as vLLM shows it in developer mode, or why there is none."""
        said = self._json("/server_info?config_format=json", optional=True)
        config = said.get("vllm_config") if isinstance(said, dict) else None
        diffusion = config.get("diffusion_config") if isinstance(config, dict) else None
        return diffusion if isinstance(diffusion, dict) else NOT_READ

    def answer(self, model: str, prompt: Sequence[int], max_tokens: int) -> Answered:
        """One streamed completion."""
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        with self._asked("POST", "/v1/completions", json.dumps(body)) as (response, start):
            self._check(response, "/v1/completions")
            return self._listen(response, start, max_tokens)

    def _listen(self, response: HTTPResponse, start: float, max_tokens: int) -> Answered:
        chunks: list[Chunk] = []
        usage: dict[str, Any] = {}
        for said, at in self._events(response, start, most=4 * max_tokens):
            self._refuse_error(said)
            counts = said.get("usage")
            if isinstance(counts, dict):
                usage = counts
            choices = said.get("choices")
            if not choices:
                continue  # the usage of the whole, at the end
            so_far = _count(counts, "completion_tokens") if isinstance(counts, dict) else None
            before = (chunks[-1].tokens if chunks else 0) or 0
            # a word without tokens may come before them, from a chunk of the prompt, and behind them: why they ended
            if so_far > before if so_far is not None else _text(choices):
                chunks.append(Chunk(at - start, so_far))
        prompt_tokens, completion_tokens = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
        if prompt_tokens is None or completion_tokens is None:
            raise EndpointError(
                f"{self} does not say how many tokens it gave", "it has to know stream_options.include_usage"
            )
        if not chunks or not completion_tokens:
            raise EndpointError(f"{self} ended its answer without a token", "read the server's log")
        return Answered(tuple(chunks), prompt_tokens, completion_tokens)

    def _events(self, response: HTTPResponse, start: float, most: int) -> Iterator[tuple[dict[str, Any], float]]:
        """The stream's JSON objects and when they came, up to [DONE]."""
        heard, count = start, 0
        while line := response.readline(MOST_BYTES):
            now = self.clock()
            if now - heard > self.silence:
                raise TimeoutError
            if not line.startswith(b"data:"):
                continue  # between events, or a comment that keeps the connection alive
            heard, count = now, count + 1
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            if count > most:
                raise EndpointError(
                    f"{self} does not end its answer", "it has to know max_tokens; read the server's log"
                )
            said = self._parsed(data)
            if not isinstance(said, dict):
                raise self._not_json(data)
            yield said, now
        raise EndpointError(
            f"{self} broke off in the middle of its answer", "read the server's log, and run this again"
        )

    def _json(self, path: str, optional: bool = False) -> Any:
        """What a GET gives; None where it is `optional` and the server does not have it."""
        with self._asked("GET", path) as (response, _):
            if optional and response.status != 200:
                return None
            self._check(response, path)
            said = self._parsed(response.read(MOST_BYTES))
        self._refuse_error(said)
        return said

    @contextmanager
    def _asked(self, method: str, path: str, body: str | None = None) -> Iterator[tuple[HTTPResponse, float]]:
        """The response to one request on a connection of its own, and when it was sent."""
        make = HTTPSConnection if self.secure else HTTPConnection
        connection = make(self.host, self.port, timeout=min(CONNECT, self.silence))
        headers = {"Accept": "application/json, text/event-stream"}
        headers |= {"Content-Type": "application/json"} if body else {}
        headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            try:
                connection.connect()
            except ssl.SSLError as error:
                raise EndpointError(
                    f"{self} is not trusted: {_one_line(error)}", "check http or https, and SSL_CERT_FILE"
                ) from None
            except (OSError, UnicodeError) as error:  # a host's label that is empty or too long
                raise EndpointError(
                    f"{self} cannot be reached: {_one_line(error)}", "start the server, or correct --against"
                ) from None
            connection.sock.settimeout(self.silence)
            start = self.clock()
            connection.request(method, self.base + path, body, headers)
            yield connection.getresponse(), start
        except TimeoutError:
            raise EndpointError(
                f"{self} has been silent for {self.silence:g} s", "read the server's log; is it busy with others?"
            ) from None
        except (OSError, HTTPException) as error:
            raise EndpointError(
                f"the connection to {self} broke: {_one_line(error)}", "read the server's log, and run this again"
            ) from None
        finally:
            connection.close()

    def _check(self, response: HTTPResponse, path: str) -> None:
        """Raises EndpointError on a status other than 200."""
        status = response.status
        if status == 200:
            return
        if status in (401, 403):
            fix = "check OPENAI_API_KEY" if self.key else "set OPENAI_API_KEY"
            raise EndpointError(
                f"{self} wants another key ({status})" if self.key else f"{self} wants a key ({status})", fix
            )
        if status == 404:
            raise EndpointError(f"{self} has no {path} (404)", "give the address of a vLLM server, without /v1")
        said = response.read(MOST_BYTES)
        try:
            message = _message(json.loads(said))
        except (ValueError, RecursionError):
            message = None
        raise self._failed(message or f"{status} {response.reason}")

    def _refuse_error(self, said: Any) -> None:
        message = _message(said)
        if message is not None:
            raise self._failed(message)

    def _failed(self, message: str) -> EndpointError:
        shown = message.replace(self.key, "…") if self.key else message
        return EndpointError(f"{self} answers with an error: {_one_line(shown)}", "read the server's log")

    def _parsed(self, data: bytes) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise self._not_json(data) from None

    def _not_json(self, data: bytes) -> EndpointError:
        shown = _one_line(data[:SHOWN].decode("utf-8", "replace"))
        return EndpointError(f"{self} does not answer in JSON: {shown!r}", "give the address of a vLLM server")


def _address(url: str) -> tuple[bool, str, int | None, str]:
    """Secure, host, port, and the path before /v1. Raises UsageError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # brackets, port
        raise _no_address() from None
    plain = parts.username is None and parts.password is None and not parts.query and not parts.fragment
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not plain or not url.isprintable():
        raise _no_address()
    base = parts.path.rstrip("/").removesuffix("/v1")
    if not base.isascii() or " " in base:
        raise _no_address()
    return parts.scheme == "https", parts.hostname, port, base


def _no_address() -> UsageError:
    """The address is not shown: there may be a password in it."""
    return UsageError(
        "--against has no server's address", "give http://host:port or https://host, and a key in OPENAI_API_KEY"
    )


def _count(usage: dict[str, Any], name: str) -> int | None:
    value = usage.get(name)
    return value if type(value) is int and value >= 0 else None


def _text(choices: Any) -> bool:
    """Whether the first choice brings text."""
    return isinstance(choices, list) and isinstance(choices[0], dict) and bool(choices[0].get("text"))


def _message(said: Any) -> str | None:
    """What an error object says, OpenAI's or vLLM's; None where it is none."""
    if not isinstance(said, dict):
        return None
    error = said.get("error")
    if error is None and said.get("object") == "error":
        error = said
    if error is None:
        return None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or "no message")


def _one_line(said: object) -> str:
    text = " ".join(str(said).split()) or type(said).__name__
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
