"""Names to ids, the template in its sandbox, and decoding that never splits a character."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_tokenizer import BYTE, GAP, IMAGES, MARKERS, TEMPLATE, VOCAB_SIZE, raw, small, write
from tokenizers import decoders

from dgemma_local.errors import PromptError, TokenizerError
from dgemma_local.tokens import KNOWN_IDS, KNOWN_VOCABULARY, StreamDecoder, Tokenizer

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "chat.json").read_text(encoding="utf-8"))["cases"]
CASES = {case["name"]: case for case in GOLDEN}
HI = [{"role": "user", "content": "Hi"}]
EURO = [BYTE + byte for byte in "€".encode()]


def load(folder: Path, template: str | None = TEMPLATE, **files: Any) -> Tokenizer:
    return Tokenizer.load(write(folder, template, **files), VOCAB_SIZE)


def refusal(folder: Path, vocab_size: int = VOCAB_SIZE) -> TokenizerError:
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(folder, vocab_size)
    assert "\n" not in caught.value.what and caught.value.fix
    return caught.value


# The template


@pytest.mark.parametrize("name", ["plain", "thinking", "system", "system_thinking", "history_with_thought"])
def test_renders_what_the_published_template_renders(name: str) -> None:
    case = CASES[name]
    rendered = small().render(case["messages"], thinking=case.get("enable_thinking", False))
    assert rendered == case["rendered"]["fixed"]


def test_tools_reach_the_template_unescaped() -> None:
    tool = {"type": "function", "function": {"name": "w", "description": "<é> & 'co'"}}
    assert f"<|tool>{json.dumps(tool, ensure_ascii=False)}<tool|>" in small().render(HI, tools=[tool])
    assert "<|tool>" not in small().render(HI)


def test_blocks_are_trimmed_as_in_transformers(tmp_path: Path) -> None:
    template = "a\n  {% if true %}\nb\n  {% endif %}\n{% for i in [1, 2] %}{% break %}{% endfor %}c\n"
    assert load(tmp_path, template).render(HI) == "a\nb\nc"


def test_names_come_from_the_config(tmp_path: Path) -> None:
    template = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ add_bos_token }}"
    config = {"bos_token": "<B>", "eos_token": {"content": "<E>"}, "pad_token": None, "add_bos_token": True}
    assert load(tmp_path, template, config=config).render(HI) == "<B>|<E>||"


def test_bos_has_a_name_without_a_config(tmp_path: Path) -> None:
    assert load(tmp_path, "{{ bos_token }}").render(HI) == "<bos>"


def test_the_file_wins_over_the_config(tmp_path: Path) -> None:
    config = {"chat_template": "config"}
    assert load(tmp_path, None, config=config).render(HI) == "config"
    assert load(tmp_path, "file", config=config).render(HI) == "file"


def test_the_date_can_be_asked(tmp_path: Path) -> None:
    assert load(tmp_path, "{{ strftime_now('%Y') }}").render(HI).isdecimal()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__call__ = raise_exception %}",
        "{% set ns = namespace(__call__=1) %}",
        "{{ raise_exception('two\nlines') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_escapes_or_raises_is_an_error_of_ours(tmp_path: Path, template: str) -> None:
    tokenizer = load(tmp_path, template)
    with pytest.raises(TokenizerError, match="the chat template cannot render") as caught:
        tokenizer.render(HI)
    assert "\n" not in caught.value.what


def test_the_templates_own_words_are_shown() -> None:
    with pytest.raises(TokenizerError, match="no such role"):
        small().render([{"role": "tool", "content": ""}])


# Files


def test_known_ids_pass(tmp_path: Path) -> None:
    special = Tokenizer.load(write(tmp_path, markers=KNOWN_IDS), KNOWN_VOCABULARY).special
    assert (special.pad, special.eos, special.bos) == (0, 1, 2)
    assert (special.tool_open, special.tool_close, special.call_open, special.call_close) == (46, 47, 48, 49)
    assert (special.response_open, special.response_close, special.quote, special.think) == (50, 51, 52, 98)
    assert (special.channel_open, special.channel_close, special.turn_open, special.turn_close) == (100, 101, 105, 106)
    assert (special.image_open, special.image, special.image_close) == (255_999, 258_880, 258_882)


@pytest.mark.parametrize("name", ["<|channel>", "<|think|>"])
def test_an_id_that_is_not_the_published_one(tmp_path: Path, name: str) -> None:
    write(tmp_path, markers=MARKERS | {name: 120})
    assert f"{name} at 120, published is {KNOWN_IDS[name]}" in refusal(tmp_path, KNOWN_VOCABULARY).what
    Tokenizer.load(tmp_path, VOCAB_SIZE)  # another vocabulary has its own ids


@pytest.mark.parametrize("name", ["<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>"])
def test_a_needed_token_is_missed_by_name(tmp_path: Path, name: str) -> None:
    write(tmp_path, markers={marker: i for marker, i in MARKERS.items() if marker != name})
    assert f"no token {name}" in refusal(tmp_path).what


def test_other_tokens_may_be_absent(tmp_path: Path) -> None:
    needed = ("<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>")
    tokenizer = load(tmp_path, markers={name: MARKERS[name] for name in needed})
    assert tokenizer.special.call_open is None and tokenizer.special.image is None


def test_no_tokenizer(tmp_path: Path) -> None:
    assert "no tokenizer.json" in refusal(tmp_path).what


def test_no_template(tmp_path: Path) -> None:
    assert "no chat_template.jinja" in refusal(write(tmp_path, None)).what


@pytest.mark.parametrize("content", ["", "{", "[]", "version https://git-lfs.github.com/spec/v1\n"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    (write(tmp_path) / name).write_text(content)
    assert name in refusal(tmp_path).what


def test_text_files_must_be_utf8(tmp_path: Path) -> None:
    (write(tmp_path) / "chat_template.jinja").write_bytes(b"\xff")
    assert "chat_template.jinja cannot be read" in refusal(tmp_path).what


@pytest.mark.parametrize(
    "template", ["{% if %}", "{{ 'open", "{% nothing %}", "{% for i in [] %}" * 30 + "{% endfor %}" * 30]
)
def test_a_template_that_does_not_parse(tmp_path: Path, template: str) -> None:
    assert "does not parse" in refusal(write(tmp_path, template)).what


def test_ids_past_the_embedding(tmp_path: Path) -> None:
    most = max(raw().get_vocab().values())
    write(tmp_path)
    assert f"an id {most}, the model ends at {most - 1}" in refusal(tmp_path, most).what
    assert Tokenizer.load(tmp_path, most + 1).vocab_size == most + 1


def test_a_decoder_that_cannot_be_streamed(tmp_path: Path) -> None:
    for decoder in (decoders.ByteLevel(), decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)]), None):
        tokenizer = raw()
        tokenizer.decoder = decoder
        tokenizer.save(str(write(tmp_path) / "tokenizer.json"))
        assert "decodes by" in refusal(tmp_path).what


# Ids


def test_a_prompt_is_its_rendering_encoded() -> None:
    asked: dict[str, Any] = {"thinking": True, "tools": [{"name": "w"}]}
    assert small().prompt(HI, **asked) == small().encode(small().render(HI, **asked)) != small().prompt(HI)


def test_markers_become_their_ids_and_nothing_is_added() -> None:
    ids = small().prompt(HI)
    assert ids[0] == MARKERS["<bos>"] and ids.count(MARKERS["<bos>"]) == 1
    assert [i for i in ids if small().is_control(i)] == [MARKERS[n] for n in ("<bos>", "<|turn>", "<turn|>", "<|turn>")]


@pytest.mark.parametrize("rendered", [text for case in GOLDEN for text in case["rendered"].values()])
def test_decoding_undoes_encoding(rendered: str) -> None:
    assert small().decode(small().encode(rendered)) == rendered


def test_a_saved_truncation_or_padding_is_ignored(tmp_path: Path) -> None:
    tokenizer = raw()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(write(tmp_path) / "tokenizer.json"))
    assert len(Tokenizer.load(tmp_path, VOCAB_SIZE).encode("Hi Hi Hi")) == 5


def test_half_a_surrogate_pair_is_the_prompts_fault() -> None:
    with pytest.raises(PromptError, match="character 2"):
        small().encode("Hi\udc80")


def test_a_users_half_character_is_the_prompts_fault_and_a_templates_is_its_own(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="character 2"):
        small().prompt([{"role": "user", "content": "Hi\udc80"}])
    with pytest.raises(TokenizerError, match="half a character"):
        load(tmp_path, "{{ '\\ud800' }}").prompt(HI)


@pytest.mark.parametrize("template", ["", " \n", "{# nothing #}"])
def test_a_template_that_writes_nothing(tmp_path: Path, template: str) -> None:
    with pytest.raises(TokenizerError, match="writes nothing"):
        load(tmp_path, template).prompt(HI)


def test_a_prompt_no_context_can_hold_is_refused_before_it_is_rendered(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, "{{ raise_exception('rendered') }}")
    assert tokenizer.longest == len("<|tool_response>")
    prompt: Any = [{"role": "user", "content": "€" * 32}]  # 96 bytes
    with pytest.raises(PromptError, match="96 bytes, more than a context of 5 tokens"):
        tokenizer.prompt(prompt, max_tokens=5)
    for most in (6, None):
        with pytest.raises(TokenizerError, match="rendered"):
            tokenizer.prompt(prompt, max_tokens=most)


class Panic(BaseException):
    """As pyo3 raises: no Exception."""


class Panicking:
    """A library that raises."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise self.error("index out\nof bounds")

    encode = __call__


@pytest.mark.parametrize(
    ("raised", "becomes"),
    [(Panic, TokenizerError), (ValueError, TokenizerError), (KeyboardInterrupt, KeyboardInterrupt)],
)
def test_a_panic_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: type[BaseException], becomes: type[BaseException]
) -> None:
    tokenizer = load(tmp_path)
    monkeypatch.setattr(tokenizer, "_raw", Panicking(raised))
    with pytest.raises(becomes, match="index out"):
        tokenizer.encode("Hi")

    class Library:
        from_file = Panicking(raised)

    monkeypatch.setattr("dgemma_local.tokens.tokenizers.Tokenizer", Library)
    with pytest.raises(becomes, match="index out"):
        Tokenizer.load(tmp_path, VOCAB_SIZE)


@pytest.mark.parametrize("name", ["<eos>", "<|turn>"])
def test_a_marker_that_is_cut_to_pieces(tmp_path: Path, name: str) -> None:
    path = write(tmp_path) / "tokenizer.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    saved["added_tokens"] = [token for token in saved["added_tokens"] if token["content"] != name]
    path.write_text(json.dumps(saved), encoding="utf-8")
    assert f"of {name}, its id is {MARKERS[name]}" in refusal(tmp_path).what


def test_pieces_for_the_canvas() -> None:
    tokenizer = small()
    shown = {name: tokenizer.piece(i) for name, i in (MARKERS | IMAGES).items()}
    assert all(name == piece for name, piece in shown.items())
    assert tokenizer.piece(BYTE + 0x41) == "A"
    assert tokenizer.piece(EURO[0]) == "�"
    assert tokenizer.piece(GAP) == "�"
    assert [tokenizer.piece(i) for i in tokenizer.encode(" \n")] == [" ", "\n"]


def test_control_tokens() -> None:
    tokenizer = small()
    control = {i for i in range(VOCAB_SIZE) if tokenizer.is_control(i)}
    assert control == {*MARKERS.values(), *IMAGES.values(), 3, 4}


def test_markers_are_control_even_where_they_are_not_flagged(tmp_path: Path) -> None:
    path = write(tmp_path) / "tokenizer.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    for token in saved["added_tokens"]:
        token["special"] = False
    path.write_text(json.dumps(saved), encoding="utf-8")
    assert Tokenizer.load(tmp_path, VOCAB_SIZE).is_control(MARKERS["<|channel>"])


# Streaming

IDS = st.lists(
    st.one_of(
        st.sampled_from([*EURO, *EURO, BYTE + 0x41, BYTE + 0xFF, GAP]),
        st.sampled_from(sorted(raw().get_vocab().values())),
        st.integers(0, VOCAB_SIZE - 1),
    ),
    max_size=60,
)


@settings(deadline=None, derandomize=True)
@given(ids=IDS, cuts=st.lists(st.integers(0, 60)))
@example(ids=[*EURO, BYTE + 0xFF], cuts=[3])  # the bad byte spoils the good ones before it
@example(ids=[EURO[0], GAP, *EURO[1:]], cuts=[1, 2])  # an unused id ends no run
def test_pieces_join_to_the_whole(ids: list[int], cuts: list[int]) -> None:
    stream = StreamDecoder(small())
    edges = [0, *sorted(cuts), len(ids)]
    pieces = [stream.feed(ids[a:b]) for a, b in pairwise(edges)]
    assert "".join(pieces) + stream.close() == small().decode(ids)


@settings(deadline=None, derandomize=True)
@given(st.text())
def test_no_piece_holds_half_a_character(text: str) -> None:
    stream = StreamDecoder(small())
    pieces = [stream.feed((i,)) for i in small().encode(text)]
    assert all(piece in text for piece in pieces)


def test_text_comes_as_soon_as_it_is_certain() -> None:
    stream = StreamDecoder(small())
    hi, space = small().encode("Hi ")
    assert stream.feed((hi, *EURO)) == "Hi"
    assert stream.feed(()) == ""
    assert stream.feed((space,)) == "€ "
    assert stream.feed(EURO[:2]) == ""
    assert stream.close() == "��"
    assert stream.close() == "" and stream.feed((hi,)) == "Hi"


class Counting:
    """Counts what is decoded."""

    def __init__(self) -> None:
        self.decoded = 0

    def ends_character(self, token: int) -> bool:
        return small().ends_character(token)

    def decode(self, ids: list[int]) -> str:
        self.decoded += len(ids)
        return small().decode(ids)


def test_each_id_is_decoded_once() -> None:
    counting: Any = Counting()
    stream = StreamDecoder(counting)
    ids = small().encode("Hi 😀 user\n" * 50)
    for i in ids:
        stream.feed((i,))
    stream.close()
    assert counting.decoded == len(ids)


def test_what_is_no_text_is_refused() -> None:
    """An image that is left out unsaid would be answered by invention."""
    part: Any = [{"type": "image", "url": "photo.png"}, {"type": "text", "text": "What is this?"}]
    with pytest.raises(PromptError, match="other than text") as refused:
        small().prompt([{"role": "user", "content": part}])
    assert "images are not read" in refused.value.fix
