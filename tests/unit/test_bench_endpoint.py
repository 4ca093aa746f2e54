"""The benchmark beside a server: figures of its chunks by hand, what it is asked, and what goes wrong."""

import json
from collections.abc import Sequence
from typing import Any, get_args

import pytest
from ticking import ticking
from vllm_server import MODEL, Failure, Manner, VllmServer

from dgemma_local.bench import endpoint
from dgemma_local.bench.endpoint import figures, together
from dgemma_local.bench.server import NOT_READ, Answered, Chunk, Server
from dgemma_local.errors import EndpointError, UsageError

UNKNOWN_STEPS = "how many steps its canvases take is not known: no time of a step is set beside ours"
PROMPTS = ((5, 6, 7), (6, 7, 8), (7, 8, 9))  # the first to warm up


# ── a server: what is computed ────────────────────────────────────────────────────────────────────────────────────


def answered(*chunks: tuple[float, int | None], total: int | None = None) -> Answered:
    return Answered(tuple(Chunk(*chunk) for chunk in chunks), 1024, total or chunks[-1][1] or 0)


def test_figures_of_four_canvases() -> None:
    found, missing = figures(answered((0.5, 256), (0.75, 512), (1.0, 768), (1.5, 1024)))
    assert missing == {}
    assert (found["ttft_ms"], found["chunks"], found["seconds"]) == (500.0, 4, 1.5)
    assert found["end_to_end_tok_s"] == pytest.approx(1024 / 1.5)  # prefill and first canvas included
    assert found["decode_tok_s"] == 768.0  # the first canvas took no time of this second
    assert found["canvas_ms"] == 250.0  # 250, 250, 500


def test_pieces_that_come_together_are_one_chunk() -> None:
    pieces = [Chunk(0.5, 100), Chunk(0.504, 200), Chunk(0.506, 256), Chunk(0.8, 300), Chunk(0.801, 512)]
    assert together(pieces) == [Chunk(0.5, 200), Chunk(0.506, 256), Chunk(0.8, 512)]
    found, _ = figures(answered((0.5, 128), (0.501, 256), (1.0, 384), (1.001, 512)))
    assert (found["chunks"], found["decode_tok_s"], found["canvas_ms"]) == (2, 512.0, 500.0)
    assert found["seconds"] == 1.001


@pytest.mark.parametrize("chunks", [[(0.5, 1024)], [(0.5, 256), (0.501, 512), (0.502, 1024)]])
def test_one_burst_has_no_decode_speed(chunks: list[tuple[float, int]]) -> None:
    found, missing = figures(answered(*chunks))
    assert found["decode_tok_s"] is None and found["canvas_ms"] is None
    assert missing == dict.fromkeys(("decode_tok_s", "canvas_ms"), "all tokens came at once")
    assert found["end_to_end_tok_s"] == 1024 / chunks[-1][0]


def test_chunks_of_unknown_size_have_no_decode_speed() -> None:
    found, missing = figures(answered((0.5, None), (1.0, None), total=512))
    assert found["decode_tok_s"] is None and found["end_to_end_tok_s"] == 512.0
    assert set(missing) == {"decode_tok_s", "canvas_ms"} and "continuous_usage_stats" in missing["canvas_ms"]


def test_only_whole_canvases_have_a_time() -> None:
    found, missing = figures(answered((0.5, 1), (1.0, 2), (1.5, 3)))  # token by token
    assert found["canvas_ms"] is None and found["decode_tok_s"] == 2.0
    assert missing == {"canvas_ms": "no chunk holds whole canvases of 256 tokens"}
    pair, _ = figures(answered((0.5, 256), (1.0, 768), (1.25, 868)))  # two at once, then a part of one
    assert pair["canvas_ms"] == 250.0
    small, _ = figures(answered((0.5, 96), (1.0, 192)), canvas=96)
    assert small["canvas_ms"] == 500.0
    odd, _ = figures(answered((0.5, 256), (1.0, None), (1.5, 768), total=768))
    assert odd["canvas_ms"] is None and odd["decode_tok_s"] == 512.0


# ── a server: what is asked, and what comes ───────────────────────────────────────────────────────────────────────


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def test_the_protocol() -> None:
    manner = Manner(delays=(0.0,))
    with VllmServer(manner) as server:
        found = endpoint.measure(server.url, PROMPTS, 1024, clock=ticking(0.01))
    assert server.log == [
        "GET /v1/models",
        "GET /version",
        "GET /server_info?config_format=json",
        *["POST /v1/completions"] * 3,
    ]
    assert [body["prompt"] for body in server.bodies] == [list(prompt) for prompt in PROMPTS]
    assert server.bodies[0] == {
        "model": MODEL,
        "prompt": [5, 6, 7],
        "max_tokens": 1024,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    assert (found["url"], found["model"], found["version"]) == (server.url, MODEL, "0.26.0")
    assert (found["settings"], found["missing"], found["notes"]) == (NOT_READ, {}, [UNKNOWN_STEPS])
    assert found["same_steps"] is False and found["no_ratio"] is None
    assert (found["prompt_tokens"], found["asked_tokens"], len(found["requests"])) == (3, 1024, 2)
    # the clock is looked at once a line: two lines an event, the first of them without a token
    assert found["median"] == {
        "ttft_ms": pytest.approx(30.0),
        "end_to_end_tok_s": pytest.approx(1024 / 0.09),
        "decode_tok_s": pytest.approx(768 / 0.06),
        "canvas_ms": pytest.approx(20.0),
    }


def test_what_sets_a_server_apart_is_said() -> None:
    manner = Manner(ends_after=512, diffusion={"canvas_length": 256, "max_denoising_steps": 48}, version=None)
    with VllmServer(manner) as server:
        found = endpoint.measure(server.url, PROMPTS, 1024, clock=ticking(0.01))
    assert found["settings"] == manner.diffusion and found["version"] is None
    assert found["notes"] == [
        "the server takes up to 48 steps a canvas, and fixed16 takes 16",
        UNKNOWN_STEPS,
        "an answer has 512 tokens, and 1,024 were asked for",
    ]
    assert found["no_ratio"] == "the server gave 512 tokens, and 1,024 were asked for"


def test_the_median_is_of_the_requests_behind_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([answered((9.0, 256), (99.0, 512)), *(answered((t, 256), (2 * t, 512)) for t in (1.0, 2.0, 4.0))])
    monkeypatch.setattr(Server, "answer", lambda *_: next(answers))
    with VllmServer() as server:
        found = endpoint.measure(server.url, [(1,) * 1024] * 4, 512)
    assert found["median"] == {"ttft_ms": 2e3, "end_to_end_tok_s": 128.0, "decode_tok_s": 128.0, "canvas_ms": 2e3}
    assert found["notes"] == [UNKNOWN_STEPS]


@pytest.mark.parametrize(
    ("settings", "same"),
    [
        ({"max_denoising_steps": 16, "confidence_threshold": 0.0}, True),
        ({"max_denoising_steps": 16, "confidence_threshold": 0.005}, False),
        ({"max_denoising_steps": 16}, False),
        ({"max_denoising_steps": 48, "confidence_threshold": 0.0}, False),
        ({"confidence_threshold": 0.0}, False),
    ],
)
def test_steps_are_known_where_the_server_tells_that_it_takes_all_sixteen(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], same: bool
) -> None:
    monkeypatch.setattr(Server, "answer", lambda *_: answered((1.0, 256), (2.0, 512)))
    with VllmServer(Manner(diffusion=settings)) as server:
        found = endpoint.measure(server.url, [(1,) * 1024] * 2, 512)
    assert found["same_steps"] is same and (UNKNOWN_STEPS in found["notes"]) is not same


def test_a_figure_that_one_request_lacks_has_no_median(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([answered((1.0, 512)), answered((1.0, 256), (2.0, 512)), answered((1.0, 512))])
    monkeypatch.setattr(Server, "answer", lambda *_: next(answers))
    with VllmServer() as server:
        found = endpoint.measure(server.url, PROMPTS, 512)
    assert found["median"]["decode_tok_s"] is None and found["missing"]["decode_tok_s"] == "all tokens came at once"
    assert found["notes"] == [UNKNOWN_STEPS, "the server counts 1,024 tokens in a prompt of 3"]


def test_a_server_that_cuts_its_canvases_or_counts_them_at_the_end() -> None:
    with VllmServer(Manner(pieces=8)) as server:  # at a clock of 1 ms a line: three pieces within 5 ms
        found = endpoint.measure(server.url, PROMPTS, 512, clock=ticking(0.001))["requests"][0]
    assert found["completion_tokens"] == 512 and found["chunks"] == 6
    with VllmServer(Manner(says_tokens=False)) as server:
        found = endpoint.measure(server.url, PROMPTS, 512, clock=ticking(0.01))
    assert found["requests"][0]["ttft_ms"] == pytest.approx(30.0) and found["median"]["decode_tok_s"] is None


def test_a_path_before_v1_and_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", " s3cret\n")
    with VllmServer(Manner(base="/gpu/0", key="s3cret")) as server:
        for url in (server.url, server.url + "/", server.url + "/v1", server.url + "/v1/"):
            found = endpoint.measure(url, PROMPTS[:2], 256)
            assert found["url"] == server.url
    assert "s3cret" not in json.dumps(found)
    assert server.log[0] == "GET /gpu/0/v1/models"


def test_the_server_ends_by_itself() -> None:
    server = VllmServer(lifetime=0.01)
    server._timer.start()
    server.serve_forever(0.01)  # returns
    server.server_close()


# ── a server: what goes wrong ─────────────────────────────────────────────────────────────────────────────────────


TOLD: dict[Failure, tuple[str, str]] = {
    "not found": ("has no /v1/models (404)", "without /v1"),
    "locked": ("wants a key (403)", "set OPENAI_API_KEY"),
    "broken": ("answers with an error: out of memory None", "log"),
    "page": ("does not answer in JSON: '<html>welcome</html>'", "vLLM server"),
    "page in the stream": ("does not answer in JSON: '<html>'", "vLLM server"),
    "cut": ("broke off in the middle of its answer", "again"),
    "error in the stream": ("answers with an error: EngineCore died", "log"),
    "no usage": ("does not say how many tokens it gave", "include_usage"),
    "no token": ("ended its answer without a token", "log"),
    "silence": ("has been silent for 0.1 s", "busy"),
    "comments": ("has been silent for 0.1 s", "busy"),
    "endless": ("does not end its answer", "max_tokens"),
    "nothing served": ("lists no model at /v1/models", "loaded one"),
}


@pytest.mark.parametrize("failure", get_args(Failure))
def test_each_failure_has_two_lines(failure: Failure) -> None:
    what, fix = TOLD[failure]
    with VllmServer(Manner(failure=failure)) as server, pytest.raises(EndpointError) as raised:
        endpoint.measure(server.url, PROMPTS, 512, silence=0.1)
    assert raised.value.what.startswith(server.url) and raised.value.what.endswith(what)
    assert fix in raised.value.fix
    assert "\n" not in raised.value.what + raised.value.fix


def test_a_key_that_is_refused_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    with VllmServer(Manner(key="another")) as server, pytest.raises(EndpointError) as raised:
        endpoint.measure(server.url, PROMPTS, 512)
    assert raised.value.what == f"{server.url} wants another key (401)"
    with VllmServer(Manner(failure="broken")) as server, pytest.raises(EndpointError) as raised:
        endpoint.measure(server.url, PROMPTS, 512)
    assert raised.value.what.endswith("out of memory Bearer …")
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret\nX-Injected: 1")
    with pytest.raises(UsageError, match="characters that no key has") as raised:
        endpoint.measure(server.url, PROMPTS, 512)
    assert "s3cret" not in raised.value.what + raised.value.fix


def test_a_context_that_is_too_short() -> None:
    with VllmServer(Manner(longest=1000)) as server, pytest.raises(EndpointError, match="context of 1,000") as raised:
        endpoint.measure(server.url, PROMPTS, 1024)
    assert raised.value.fix == "start it with --max-model-len 1027 or more"
    for longest in (1027, None):
        with VllmServer(Manner(longest=longest)) as server:
            assert endpoint.measure(server.url, PROMPTS[:2], 1024)["asked_tokens"] == 1024


def test_nobody_there() -> None:
    with VllmServer() as server:
        pass
    with pytest.raises(EndpointError, match=r"cannot be reached: .*refused"):
        endpoint.measure(server.url, PROMPTS, 512)


def test_https_to_a_server_without_it() -> None:
    with VllmServer() as server, pytest.raises(EndpointError, match="is not trusted") as raised:
        endpoint.measure(server.url.replace("http", "https"), PROMPTS, 512, silence=5.0)
    assert raised.value.what.startswith(f"https://127.0.0.1:{server.server_address[1]} ")


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://host",
        "http://",
        "http://[::1",
        "http://host:99999",
        "http://host:0",
        "http://user:s3cret@host",
        "http://host/v1?key=s3cret",
        "http://host/#s3cret",
        "http://host/a b",
        "http://host/ü",
        "http://ho\nst/",
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UsageError, match="no server's address") as raised:
        Server(url, "")
    assert "s3cret" not in raised.value.what + raised.value.fix


@pytest.mark.parametrize("url", ["http://[::1]:8000/a", "https://host", "http://host:80"])
def test_addresses_as_they_are_shown(url: str) -> None:
    assert str(Server(url + "/v1/", "")) == url


class Lines:
    """A response that is read line by line."""

    def __init__(self, events: Sequence[Any]) -> None:
        said = (event if isinstance(event, str) else json.dumps(event) for event in events)
        self.lines = [f"data: {line}\n".encode() for line in said]

    def readline(self, most: int) -> bytes:
        return self.lines.pop(0) if self.lines else b""


def listened(*events: Any) -> Answered:
    response: Any = Lines(events)
    return Server("http://host", "", clock=ticking())._listen(response, -1.0, 512)


def test_words_without_tokens_are_no_chunks() -> None:
    def usage(tokens: int) -> dict[str, int]:
        return {"prompt_tokens": 9, "completion_tokens": tokens}

    word = {"text": "a"}
    found = listened(
        {"choices": [{"text": ""}], "usage": usage(0)},
        {"choices": [{"text": ""}], "usage": usage(256)},  # tokens that no text shows
        {"choices": [word], "usage": usage(512)},
        {"choices": [word], "usage": usage(512)},  # why it ended
        {"choices": [], "usage": usage(512)},
        "[DONE]",
        "not read",
    )
    assert found == Answered((Chunk(2.0, 256), Chunk(3.0, 512)), 9, 512)
    uncounted = listened({"choices": [{"text": ""}]}, {"choices": [word]}, {"choices": [], "usage": usage(1)}, "[DONE]")
    assert uncounted == Answered((Chunk(2.0, None),), 9, 1)


@pytest.mark.parametrize(
    "said",
    [
        {"error": "too many"},
        {"error": {"message": "too many"}},
        {"object": "error", "message": "too many", "code": 400},
    ],
)
def test_errors_in_all_their_forms(said: dict[str, Any]) -> None:
    with pytest.raises(EndpointError, match="answers with an error: too many"):
        listened(said)


@pytest.mark.parametrize("said", ["[1]", "3", "{", "[" * 100_000])
def test_what_is_no_event(said: str) -> None:
    with pytest.raises(EndpointError, match="does not answer in JSON") as raised:
        listened(said)
    assert len(raised.value.what) < 300
