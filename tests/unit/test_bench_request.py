"""What a benchmark is asked: protocols, prompts, context lengths, and flags that cannot be."""

from dataclasses import replace
from typing import Any

import pytest
from fake import GENERATION

from dgemma_local.bench import command, protocols, request
from dgemma_local.errors import UsageError

# ── what is asked ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_fixed16_is_vllms() -> None:
    task = protocols.fixed16(GENERATION, canvas=256, context=8192, vocabulary=range(1000), seed=3)
    assert (len(task.prompt), task.max_tokens, task.note) == (1024, 1024, "")
    assert task.config == replace(GENERATION, steps=16, confidence=0.0, end_ids=())
    assert len(set(task.prompt)) > 500 and max(task.prompt) < 1000
    assert task.prompt == protocols.fixed16(GENERATION, canvas=256, context=4096, vocabulary=range(1000), seed=3).prompt
    assert task.prompt != protocols.fixed16(GENERATION, canvas=256, context=4096, vocabulary=range(1000), seed=4).prompt


def test_prompts_of_a_tokenizer_hold_no_token_that_steers() -> None:
    from dgemma_local.bench.subject import open_model

    subject = open_model("demo", device=None, context=None)
    assert subject.tokenizer is not None
    steering = {token for token in range(subject.vocab_size) if subject.tokenizer.is_control(token)}
    assert len(steering) > 5 and {*subject.vocabulary} == {*range(subject.vocab_size)} - steering
    for name in ("fixed16", "context"):
        drawn = {token for task in command.tasks(name, subject, 0) for token in task.prompt}
        assert len(drawn) > 100 and not drawn & steering
    subject.tokenizer = None
    assert list(subject.vocabulary) == list(range(subject.vocab_size))


def test_fixed16_where_the_context_is_short() -> None:
    task = protocols.fixed16(GENERATION, canvas=96, context=1024, vocabulary=range(128), seed=0)
    assert len(task.prompt) == task.max_tokens == 480 and "scaled: 480 tokens" in task.note and "1,024" in task.note
    with pytest.raises(UsageError, match="holds no fixed16") as refused:
        protocols.fixed16(GENERATION, canvas=96, context=191, vocabulary=range(128), seed=0)
    assert "192" in refused.value.fix
    assert protocols.fixed16(GENERATION, canvas=96, context=192, vocabulary=range(128), seed=0).max_tokens == 96
    assert protocols.fixed16(GENERATION, canvas=256, context=2048, vocabulary=range(128), seed=0).note == ""


@pytest.mark.parametrize(
    ("context", "canvas", "lengths"),
    [
        (8192, 256, (1024, 2048, 4096, 7680)),
        (262_144, 256, (*(1024 * 2**n for n in range(8)), 261_632)),
        (1024, 96, (256, 512, 832)),
        (4608, 256, (1024, 2048, 4096)),
        (512, 256, ()),
        (513, 256, (1,)),
    ],
)
def test_the_sweep(context: int, canvas: int, lengths: tuple[int, ...]) -> None:
    found = protocols.sweep_lengths(context, canvas)
    if lengths != (1,):
        assert found == lengths
    assert all(n + 2 * canvas <= context for n in found) and list(found) == sorted(set(found))
    if lengths:
        tasks = protocols.sweep(GENERATION, canvas=canvas, context=context, vocabulary=range(64), seed=0)
        assert [len(task.prompt) for task in tasks] == list(found)
        assert {task.max_tokens for task in tasks} == {2 * canvas} and {task.config.steps for task in tasks} == {16}
    else:
        with pytest.raises(UsageError, match="leaves the context sweep no prompt"):
            protocols.sweep(GENERATION, canvas=canvas, context=context, vocabulary=range(64), seed=0)


@pytest.mark.parametrize(
    ("demo", "names"),
    [
        (None, ["chat", "code", "json", "prose"]),
        ("demo", ["sudoku-4x4", "sudoku-6x6", "sudoku-9x9"]),
        ("demo-text", ["dates", "json", "table", "words"]),
    ],
)
def test_shipped_prompts(demo: str | None, names: list[str]) -> None:
    read: list[str] = []

    def encode(text: str) -> tuple[int, ...]:
        read.append(text)
        return tuple(text.encode())

    tasks = list(protocols.adaptive(GENERATION, encode, demo=demo, context=1024, canvas=96))
    assert [task.name for task in tasks] == names and all(task.config == GENERATION for task in tasks)
    assert all(text == text.strip() and text for text in read)
    assert all(len(task.prompt) + task.max_tokens <= 1024 and task.max_tokens % 96 == 0 for task in tasks)
    wide = protocols.adaptive(GENERATION, encode, demo=demo, context=8192, canvas=96)
    assert {task.max_tokens for task in wide} == {1024}


# ── flags ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ({"demo": True, "model": "x"}, "exclude each other"),
        ({"demo": True, "synthetic": "26b"}, "exclude each other"),
        ({"synthetic": "27b"}, "no synthetic model is called '27b'"),
        ({"layout": "fp8"}, "--layout is that of a synthetic model"),
        ({"synthetic": "26b", "layout": "int4"}, "no layout is called 'int4'"),
        ({"synthetic": "26b", "protocol": "adaptive"}, "has no words"),
        ({"synthetic": "26b", "against": "transformers"}, "cannot open random weights"),
        ({"demo": True, "protocol": "fixed16,quick"}, "no protocol is called 'quick'"),
        ({"demo": True, "protocol": " , "}, "names nothing"),
        ({"demo": True, "runs": 0}, "0 runs"),
        ({"model": " "}, "--model names nothing"),
        (
            {"demo": True, "against": "transformers", "fp8_mlp": True, "fp8_attention": True},
            "--fp8-attention, --fp8-mlp",
        ),
        ({"demo": True, "seed": 1 << 64}, "out of range"),
        ({"demo": True, "seed": -1}, "out of range"),
        ({"demo": True, "context": 0}, "a context of 0"),
        ({"demo": True, "device": "tpu"}, "the device 'tpu'"),
        ({"demo": True, "dtype": "float16"}, "the dtype 'float16'"),
        ({"synthetic": "26b", "dtype": "bfloat16"}, "--dtype is that of a model with weights"),
        ({"demo": True, "against": "vllm"}, "against 'vllm'"),
        ({"demo": True, "against": "http://x", "protocol": "adaptive"}, "compared by fixed16"),
    ],
)
def test_flags_that_cannot_be(flags: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError) as refused:
        request.checked(**flags)
    assert what in refused.value.what and refused.value.fix and "\n" not in refused.value.what + refused.value.fix


def test_what_is_measured_without_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgemma_local.auto.cards", lambda: ())
    assert request.checked() == request.Request(model="demo", protocols=("fixed16", "adaptive", "breakdown"))
    assert request.checked(demo=True, protocol="all").protocols == protocols.NAMES
    assert request.checked(demo=True, protocol="breakdown, fixed16").protocols == ("fixed16", "breakdown")
    assert request.checked(demo=True, dtype="bfloat16", device="cpu").dtype == "bfloat16"
    random = request.checked(synthetic="26b")
    assert (random.model, random.layout, random.protocols) == (None, "nvfp4", ("fixed16", "breakdown"))
    assert request.checked(synthetic="26b", protocol="all").protocols == ("fixed16", "context", "breakdown")
