"""A hub on this machine: answers as huggingface.co does, and misbehaves as networks do.

    GET  /api/models/{repository}[/revision/{revision}]?blobs=true    commit, names, sizes, hashes
    HEAD, GET /{repository}/resolve/{revision}/{name}                 small files; large ones: 302 to
    GET  /cdn/{etag}                                                  with ranges

    with Hub({"org/name": Repository({"config.json": b"{}", ...})}) as hub:
        ...  # HF_ENDPOINT=hub.url; hub.log is what was asked

Headers and error codes as huggingface_hub reads them (file_download.py, utils/_http.py).
"""

import hashlib
import json
import random
import re
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40
LARGE = (".safetensors", "tokenizer.json", ".bin")  # stored in LFS


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def tensor_file(seed: int, tensors: Mapping[str, tuple[int, ...]]) -> bytes:
    """A safetensors file of bf16 tensors, filled with noise."""
    header, at = {}, 0
    for name, shape in tensors.items():
        size = 2
        for axis in shape:
            size *= axis
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + random.Random(seed).randbytes(at)


def checkpoint(shards: int = 2, rows: int = 64) -> dict[str, bytes]:
    """The files of a checkpoint in `shards` shards, or in one file for 0, beside files that nobody needs."""
    names = [f"model-{n + 1:05}-of-{shards:05}.safetensors" for n in range(shards)] or ["model.safetensors"]
    tensors = {name: {f"layers.{n}.{w}.weight": (rows, 32) for w in "ab"} for n, name in enumerate(names)}
    files = {name: tensor_file(n, tensors[name]) for n, name in enumerate(names)}
    where = {tensor: name for name in names for tensor in tensors[name]}
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": where}).encode()
    files["config.json"] = b'{"architectures": ["DiffusionGemmaForBlockDiffusion"]}'
    files["generation_config.json"] = b'{"t_min": 0.4}'
    files["tokenizer.json"] = random.Random(99).randbytes(5000)
    files["tokenizer_config.json"] = b"{}"
    files["chat_template.jinja"] = b"{{ messages }}"
    for extra in ("README.md", ".gitattributes", "recipe.yaml", "pytorch_model.bin", "original/model.safetensors"):
        files[extra] = b"nobody needs " + extra.encode()
    return files


@dataclass
class Repository:
    """Files of one commit; `main` and the commit itself name it."""

    files: dict[str, bytes]
    commit: str = COMMIT
    gated: bool = False
    token: str | None = None  # without it the repository does not exist


@dataclass(frozen=True)
class Request:
    """One line of the log; `sent` counts bytes of a file's body."""

    method: str
    path: str
    range: str | None
    token: str | None
    sent: int


@dataclass
class Faults:
    """What goes wrong, and how often."""

    status: int | None = None  # every answer
    statuses: list[int] = field(default_factory=list)  # the next answers of /cdn
    budget: int | None = None  # bytes of files, then every connection breaks
    down: bool = False
    wrong: dict[str, int] = field(default_factory=dict)  # etag -> times its bytes arrive changed
    short: dict[str, int] = field(default_factory=dict)  # etag -> where its body ends
    missing: set[str] = field(default_factory=set)  # names that are listed and not served
    ranges: bool = True
    delay: float = 0.0  # seconds before each answer
    pace: float = 0.0  # seconds before each 256 bytes of a file
    body: bytes | None = None  # of every answer, in HTML
    names: dict[str, str] = field(default_factory=dict)  # listed under another name
    no_hash: bool = False
    hashes: dict[str, str] = field(default_factory=dict)  # listed with another hash
    stride: int | None = None  # bytes of a file, then this connection breaks
    offset: int = 0  # ranges begin so many bytes later
    xet: bool = False  # says that files are also in Xet storage, which is not there


class Hub(ThreadingHTTPServer):
    """Serves until the `with` ends."""

    daemon_threads = True
    request_queue_size = 64  # a connection that finds no place waits a second
    block_on_close = False

    def __init__(self, repositories: dict[str, Repository]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories, self.faults, self.log = repositories, Faults(), list[Request]()
        self.lock, self.busy = threading.Lock(), 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.cdn = f"http://localhost:{self.server_address[1]}"  # another host, which the token is not for

    def __enter__(self) -> "Hub":
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is part of the game."""

    def etag(self, repository: str, name: str) -> str:
        data = self.repositories[repository].files[name]
        return hashlib.sha256(data).hexdigest() if name.endswith(LARGE) else git_sha1(data)

    def settled(self) -> list[Request]:
        """The log, once every answer is out: a client that has all it wants does not wait for that."""
        while self.busy:
            time.sleep(0.001)
        return self.log

    @property
    def sent(self) -> int:
        """Bytes of files since the log was cleared."""
        return sum(request.sent for request in self.settled())

    def fetched(self) -> set[str]:
        """Names of the files of which something was asked."""
        return {r.path.partition("/resolve/")[2].partition("/")[2] for r in self.settled() if "/resolve/" in r.path}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two small writes
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_CONNECT(self) -> None:
        """As a proxy that opens no tunnel."""
        self.answer(self.server.faults.status or 501, {}, b"")

    def do_GET(self) -> None:
        faults, path = self.server.faults, unquote(urlsplit(self.path).path)
        self.sent = 0
        with self.server.lock:
            self.server.busy += 1
        try:
            if faults.delay:
                time.sleep(faults.delay)
            if faults.down:
                self.hang_up()
            elif faults.status:
                self.answer(faults.status, {}, b'{"error": "so it is"}')
            elif faults.body is not None:
                self.answer(200, {"Content-Type": "text/html"}, faults.body)
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
                self.describe(*match.groups())
            elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self.resolve(*match.groups())
            elif match := re.fullmatch(r"/cdn/([0-9a-f]+)", path):
                self.content(match[1])
            else:
                self.answer(404, {}, b"{}")
        finally:
            with self.server.lock:
                asked = self.headers.get("Range")
                token = self.headers.get("Authorization")
                self.server.log.append(Request(self.command, path, asked, token, self.sent))
                self.server.busy -= 1

    def repository(self, name: str, revision: str | None) -> Repository | None:
        """The repository, if it may be seen; else the answer is given."""
        found = self.server.repositories.get(name)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token == "expired":
            self.answer(401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b"{}")
        elif found is None or (found.token and token != found.token):
            self.answer(404 if token else 401, {"X-Error-Code": "RepoNotFound"}, b'{"error": "Repository not found"}')
        elif revision not in (None, "main", found.commit):
            self.answer(404, {"X-Error-Code": "RevisionNotFound"}, b'{"error": "Invalid rev id"}')
        else:
            return found
        return None

    def describe(self, name: str, revision: str | None) -> None:
        if (found := self.repository(name, revision)) is None:
            return
        siblings = []
        for file, data in found.files.items():
            entry: dict[str, Any] = {"rfilename": self.server.faults.names.get(file, file)}
            if not self.server.faults.no_hash:
                entry |= {"size": len(data), "blobId": git_sha1(data)}
                if file.endswith(LARGE):
                    entry["lfs"] = {"sha256": self.server.etag(name, file), "size": len(data), "pointerSize": 134}
            if file in self.server.faults.hashes:
                entry |= {"lfs": {"sha256": self.server.faults.hashes[file], "size": len(data), "pointerSize": 134}}
            siblings.append(entry)
        facts = {"id": name, "sha": found.commit, "siblings": siblings, "private": False, "gated": found.gated}
        self.answer(200, {"Content-Type": "application/json"}, json.dumps(facts).encode())

    def resolve(self, name: str, revision: str, file: str) -> None:
        if (found := self.repository(name, revision)) is None:
            return
        if found.gated:
            token = self.headers.get("Authorization")
            self.answer(403 if token else 401, {"X-Error-Code": "GatedRepo"}, b'{"error": "restricted"}')
        elif file not in found.files or file in self.server.faults.missing:
            self.answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": found.commit}, b"Entry not found")
        else:
            etag = self.server.etag(name, file)
            facts = {"X-Repo-Commit": found.commit, "ETag": f'"{etag}"'}
            if file.endswith(LARGE):
                facts |= {"X-Linked-ETag": f'"{etag}"', "X-Linked-Size": f"{len(found.files[file])}"}
                if self.server.faults.xet:
                    facts |= {"X-Xet-Hash": "e" * 64, "Link": f'<{self.server.url}/xet>; rel="xet-auth"'}
                self.answer(302, facts | {"Location": f"{self.server.cdn}/cdn/{etag}"}, b"")
            else:
                self.content(etag, facts)

    def content(self, etag: str, facts: Mapping[str, str] | None = None) -> None:
        """A file's bytes, or the range of them that was asked for."""
        faults = self.server.faults
        if faults.statuses:
            self.answer(faults.statuses.pop(0), {"Retry-After": "0"}, b"{}")
            return
        every = ((r, n) for r, found in self.server.repositories.items() for n in found.files)
        data = next(self.server.repositories[r].files[n] for r, n in every if self.server.etag(r, n) == etag)
        total, begin, status, facts = len(data), 0, 200, {"ETag": f'"{etag}"', **(facts or {})}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and faults.ranges:
            begin, end = int(asked[1]), min(int(asked[2] or total) + 1, total)
            facts |= {"Content-Range": f"bytes {begin + faults.offset}-{end - 1}/{total}"}
            data, status = data[begin:end], 206
        if faults.wrong.get(etag, 0) > 0 and data:
            data = bytes([data[0] ^ 1]) + data[1:]
            if begin + len(data) == total:
                faults.wrong[etag] -= 1
        kept = data[: max(0, faults.short[etag] - begin)] if etag in faults.short else data[: faults.stride]
        self.answer(status, facts, kept, length=len(data), counted=True)

    def answer(
        self, status: int, facts: Mapping[str, str], body: bytes, *, length: int | None = None, counted: bool = False
    ) -> None:
        self.send_response(status)
        for key, value in facts.items():
            self.send_header(key, value)
        self.send_header("X-HF-Warning", f"{self.server.url}; update something")  # the library would say so
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command == "HEAD":
            return
        faults = self.server.faults
        step = 1 << 16 if faults.budget is None and not faults.pace else 256  # small: connections share the budget
        for start in range(0, len(body), step):
            chunk = body[start : start + step]
            if counted:
                time.sleep(faults.pace)
                chunk = self.spend(chunk)
            self.wfile.write(chunk)
            self.sent += len(chunk) if counted else 0
            if faults.down:
                self.hang_up()
                return
        if length is not None and len(body) < length:
            self.hang_up()

    def spend(self, chunk: bytes) -> bytes:
        """As much of a chunk as the budget allows; at its end the whole hub goes down."""
        faults = self.server.faults
        with self.server.lock:
            if faults.budget is None:
                return chunk
            chunk = b"" if faults.down else chunk[: faults.budget]
            faults.budget -= len(chunk)
            faults.down = faults.budget == 0
            return chunk

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_WR)  # what was sent still arrives
