"""A vLLM on this machine: streams canvases of random text as its OpenAI server does, and misbehaves as servers do.

    GET  /v1/models, /version, /server_info?config_format=json
    POST /v1/completions        one event of usage and text for each canvas, then the usage of the whole, then [DONE]

    with VllmServer(Manner(delays=(0.02,))) as server:
        ...  # server.url; server.log holds what was asked, server.bodies what was sent

    python tests/vllm_server.py [seconds]        prints its address, and ends after so long

Events as vllm/entrypoints/openai/completion/serving.py sends them with stream_options.continuous_usage_stats.
"""

import json
import sys
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal
from urllib.parse import urlsplit

MODEL = "google/diffusiongemma-26B-A4B-it"
LIFETIME = 60.0  # seconds, if nobody ends it

Failure = Literal[
    "not found",
    "locked",
    "broken",
    "page",
    "page in the stream",
    "cut",
    "error in the stream",
    "no usage",
    "no token",
    "silence",
    "comments",
    "endless",
    "nothing served",
]


@dataclass(frozen=True)
class Manner:
    """How it answers."""

    canvas: int = 256
    delays: tuple[float, ...] = (0.0,)  # seconds before each canvas; the last one goes on
    pieces: int = 1  # events that a canvas is cut into, sent at once
    says_tokens: bool = True  # usage in every event, as asked
    version: str | None = "0.26.0"
    longest: int | None = 8192  # max_model_len
    diffusion: dict[str, Any] | None = None  # shown by /server_info
    base: str = ""  # path before /v1
    key: str | None = None  # without it: 401
    ends_after: int | None = None  # tokens, whatever was asked
    failure: Failure | None = None


class VllmServer(ThreadingHTTPServer):
    """Serves on 127.0.0.1 until the `with` ends, or LIFETIME."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, manner: Manner | None = None, lifetime: float = LIFETIME) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.manner, self.log, self.bodies = manner or Manner(), list[str](), list[dict[str, Any]]()
        self.over = threading.Event()  # whoever delays waits for this
        self.url = f"http://127.0.0.1:{self.server_address[1]}{self.manner.base}"
        self._timer = threading.Timer(lifetime, self.shutdown)
        self._timer.daemon = True
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    def __enter__(self) -> "VllmServer":
        self._timer.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.over.set()
        self._timer.cancel()
        self.shutdown()
        self.server_close()
        self._thread.join()

    def handle_error(self, request: Any, address: Any) -> None:
        """Who asked has gone: nothing to say."""


class _Handler(BaseHTTPRequestHandler):
    server: VllmServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if not self._let_in():
            return
        manner, path = self.server.manner, urlsplit(self.path).path.removeprefix(self.server.manner.base)
        if manner.failure == "page":
            self._send(200, b"<html>welcome</html>", "text/html")
        elif path == "/v1/models":
            one = {"id": MODEL, "object": "model", "max_model_len": manner.longest}
            self._json(200, {"object": "list", "data": [] if manner.failure == "nothing served" else [one]})
        elif path == "/version" and manner.version is not None:
            self._json(200, {"version": manner.version})
        elif path == "/server_info" and manner.diffusion is not None:
            self._json(200, {"vllm_config": {"diffusion_config": manner.diffusion}})
        else:
            self._json(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._let_in():
            return
        self.server.bodies.append(body)
        manner = self.server.manner
        if manner.failure == "broken":
            self._json(500, {"error": {"message": f"out of\nmemory {self.headers['Authorization']}", "code": 500}})
        else:
            self._stream(body)

    def _let_in(self) -> bool:
        manner = self.server.manner
        self.server.log.append(f"{self.command} {self.path}")
        if manner.key is not None and self.headers["Authorization"] != f"Bearer {manner.key}":
            self._json(401, {"error": "Unauthorized"})
            return False
        if manner.failure == "locked":
            self._json(403, {"error": "Forbidden"})
            return False
        if manner.failure == "not found" or not self.path.startswith(manner.base + "/"):
            self._json(404, {"detail": "Not Found"})
            return False
        return True

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        manner, prompt = self.server.manner, len(body["prompt"])
        asked = manner.ends_after or body["max_tokens"]
        given = 0 if manner.failure != "no token" else asked
        # a chunk of prefill brings a word before there is a token; continuous usage counts 0 there
        self._event({"choices": [{"text": "", "finish_reason": None}], "usage": self._now(prompt, 0)})
        number = 0
        while given < asked or manner.failure == "endless":
            self.server.over.wait(manner.delays[min(number, len(manner.delays) - 1)])
            if self._fails(number):
                return
            size = min(manner.canvas, asked - given) or manner.canvas
            for piece in range(manner.pieces):
                given += (size * (piece + 1)) // manner.pieces - (size * piece) // manner.pieces
                choice = {"text": "a ", "finish_reason": "length" if given == asked else None}
                self._event({"choices": [choice], "usage": self._now(prompt, given)})
            number += 1
        if manner.failure != "no usage":
            self._event({"choices": [], "usage": self._usage(prompt, 0 if manner.failure == "no token" else given)})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _fails(self, canvas: int) -> bool:
        """What goes wrong before the second canvas; True: the answer is over."""
        failure = self.server.manner.failure if canvas == 1 else None
        if failure == "cut":
            self.close_connection = True
            return True
        if failure == "silence":
            return self.server.over.wait(LIFETIME)
        if failure == "comments":
            while not self.server.over.wait(0.01):
                self._chunk(b": still here\n\n")
            return True
        if failure == "error in the stream":
            self._event({"error": {"message": "EngineCore died", "code": 500}})
        if failure == "page in the stream":
            self._chunk(b"data: <html>\n\n")
        return False

    def _now(self, prompt: int, given: int) -> dict[str, int] | None:
        return self._usage(prompt, given) if self.server.manner.says_tokens else None

    def _usage(self, prompt: int, given: int) -> dict[str, int] | None:
        if self.server.manner.failure == "no usage":
            return None
        return {"prompt_tokens": prompt, "completion_tokens": given, "total_tokens": prompt + given}

    def _event(self, said: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(said).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _json(self, status: int, said: Any) -> None:
        self._send(status, json.dumps(said).encode(), "application/json")

    def _send(self, status: int, data: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    lifetime = float(sys.argv[1]) if len(sys.argv) > 1 else LIFETIME
    with VllmServer(Manner(delays=(0.1, 0.06)), lifetime) as server:
        print(server.url, flush=True)
        time.sleep(lifetime)


if __name__ == "__main__":
    main()
