"""The public interface over a tiny random checkpoint with the demo model's tokenizer."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import write_tiny
from typer.testing import CliRunner

from dgemma_local import cli, planning
from dgemma_local import session as module
from dgemma_local.demo import vocabulary
from dgemma_local.errors import (
    CheckpointError,
    ConfigError,
    DoesNotFit,
    PromptError,
    TokenizerError,
    UnknownModel,
    UsageError,
)
from dgemma_local.events import CanvasCommitted, Event, Finished, Prefilled, StepDone
from dgemma_local.fit import AtMost
from dgemma_local.session import DEFAULT_MAX_TOKENS, Session, Wishes, open_session, timed
from dgemma_local.tokens import Message

HI: list[Message] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """`open_session` chooses one for a model this small, and it stays chosen: here two are set before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, vocab=128, max_positions=400)
    vocabulary.write(path)
    return path


@pytest.fixture
def session(folder: Path) -> Session:
    return open_session(str(folder))


def answer(session: Session, messages: list[Message] = HI, **options: Any) -> list[Event]:
    return list(session.answer(messages, **{"seed": 1, "max_tokens": 20, "steps": 4, **options}))


def finished(events: list[Event]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


def alone(folder: Path, messages: list[Message], **options: Any) -> list[Event]:
    return answer(open_session(str(folder)), messages, **options)


# ── what is opened ────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_a_session_knows(session: Session, folder: Path) -> None:
    assert (session.canvas_length, session.steps, session.is_demo) == (12, 48, False)
    assert session.generation.end_ids == (1,)
    assert Path(session.name).name == folder.name
    assert DEFAULT_MAX_TOKENS == 1024
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("dtype", "held"), [(None, torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_the_dtype_that_was_asked_for(folder: Path, dtype: str | None, held: torch.dtype) -> None:
    opened = open_session(str(folder), Wishes(dtype=dtype))
    assert opened.conversation.model.dtype == held
    assert finished(answer(opened)).steps == 8


def test_a_generation_config_of_one_canvas_is_no_limit(folder: Path, tmp_path: Path) -> None:
    """The published file asks for 256 new tokens, one canvas; without a length an answer goes on, and its end is said."""
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    theirs = json.loads((folder / "generation_config.json").read_text()) | {"max_new_tokens": 12, "max_length": 12}
    (tmp_path / "generation_config.json").write_text(json.dumps(theirs))
    flags = ["run", "-m", str(tmp_path), "-p", "Hi", "--seed", "1", "--steps", "2", "--json"]
    for more, most in ([], DEFAULT_MAX_TOKENS), (["--max-tokens", "20"], 20):
        found = CliRunner().invoke(cli.app, [*flags, *more])
        start, *_, end = map(json.loads, found.stdout.splitlines())
        assert (start["max_tokens"], start["canvas_length"]) == (most, 12)
        assert end["canvases"] > 1 and len(end["tokens"]) > 12
    assert found.exit_code == 17 and end["said"].startswith("stopped at --max-tokens 20")


def test_an_unknown_dtype_is_refused_before_anything_is_read() -> None:
    with pytest.raises(UsageError, match="the dtype 'float16' is not known") as caught:
        open_session("no/such/folder", Wishes(dtype="float16"))
    assert caught.value.fix == "choose one of: float32, bfloat16"


@pytest.mark.parametrize(
    ("lacking", "error"),
    [
        ("config.json", ConfigError),
        ("generation_config.json", ConfigError),
        ("tokenizer.json", TokenizerError),
        ("model.safetensors", CheckpointError),
    ],
)
def test_a_folder_that_lacks_a_file(tmp_path: Path, folder: Path, lacking: str, error: type[Exception]) -> None:
    for file in folder.iterdir():
        if file.name != lacking:
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(error):
        open_session(str(tmp_path))


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel):
        open_session(str(tmp_path / "none"))


# ── one answer ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_same_seed_gives_the_same_events(folder: Path) -> None:
    for seed in (0, 2**64 - 1):
        assert alone(folder, HI, seed=seed) == alone(folder, HI, seed=seed)
    assert alone(folder, HI, seed=0) != alone(folder, HI, seed=1)
    assert alone(folder, HI, seed=1) != alone(folder, HI, seed=1 + 2**32)


def test_a_random_model_takes_its_steps_and_its_budget(session: Session) -> None:
    events = answer(session, max_tokens=20, steps=3)
    assert finished(events).reason == "budget" and len(finished(events).tokens) == 20
    assert [e.steps for e in events if isinstance(e, CanvasCommitted)] == [3, 3]
    assert {e.steps for e in events if isinstance(e, StepDone)} == {3}
    assert len(answer(session, max_tokens=1, steps=None)) == 48 + 3


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"seed": -1}, "the seed -1 is out of range"),
        ({"seed": 2**64}, "the seed 18446744073709551616 is out of range"),
        ({"max_tokens": 0}, "an answer of 0 tokens cannot be given"),
        ({"steps": 0}, "0 denoising steps cannot be taken"),
        ({"steps": 4097}, "4097 denoising steps cannot be taken"),
    ],
)
def test_numbers_out_of_range(session: Session, options: dict[str, int], what: str) -> None:
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(UsageError) as caught:
        answer(session, **options)
    assert caught.value.what == what and caught.value.fix
    assert signal.getsignal(signal.SIGINT) is handler


def test_numbers_at_the_ends_of_their_ranges(session: Session) -> None:
    assert finished(answer(session, seed=0, max_tokens=1, steps=1)).steps == 1
    next(session.answer(HI, seed=2**64 - 1, steps=4096))


def test_a_prompt_longer_than_the_context(session: Session) -> None:
    with pytest.raises(PromptError, match="with a canvas of 12 the context of 400"):
        answer(session, [{"role": "user", "content": "a" * 400}])


def test_thinking_is_part_of_the_prompt(session: Session) -> None:
    plain, thinking = (answer(session, thinking=on)[0] for on in (False, True))
    assert isinstance(plain, Prefilled) and isinstance(thinking, Prefilled)
    assert plain.tokens == len(session.tokenizer.prompt(HI))
    assert thinking.tokens == len(session.tokenizer.prompt(HI, thinking=True)) > plain.tokens


# ── stop strings ──────────────────────────────────────────────────────────────────────────────────────────────────


def stop_at(session: Session, at: int, width: int) -> tuple[list[Event], tuple[int, ...], str]:
    """An answer stopped by the text of `width` of its own tokens from `at` on; the tokens and the string."""
    whole = finished(answer(session, seed=2)).tokens  # text from 0 to 5 and from 7 on
    string = session.tokenizer.decode(whole[at : at + width])
    assert session.tokenizer.decode(whole).find(string) == len(session.tokenizer.decode(whole[:at]))
    return answer(session, seed=2, stop=["not in it", string]), whole, string


@pytest.mark.parametrize(("at", "width"), [(0, 3), (8, 3), (10, 4)])  # the last one across two canvases of 12
def test_an_answer_ends_before_a_stop_string(session: Session, at: int, width: int) -> None:
    events, whole, _ = stop_at(session, at, width)
    assert finished(events).reason == "stop" and finished(events).tokens == whole[:at]
    assert finished(events).canvases == (at + width - 1) // 12 + 1


def test_the_first_of_several_stop_strings_counts(session: Session) -> None:
    whole = finished(answer(session, seed=2)).tokens  # text from 0 to 5 and from 7 on
    late, early = (session.tokenizer.decode(whole[at : at + 3]) for at in (8, 3))
    assert finished(answer(session, seed=2, stop=[late, early])).tokens == whole[:3]


def test_what_is_no_stop(session: Session) -> None:
    assert answer(session, stop=["", "nowhere"])[1:] == answer(session)[1:]


def test_the_settings_of_the_sampler_are_those_in_effect(folder: Path) -> None:
    own, fast = (open_session(str(folder), Wishes(preset=name)).settings for name in (None, "fast"))
    assert (own["preset"], fast["preset"]) == (None, "fast")
    assert own["confidence"] != fast["confidence"] == 0.02


# ── turns ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def turns(session: Session, tokens: tuple[int, ...]) -> list[Message]:
    text = session.tokenizer.decode(tokens)
    return [*HI, {"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]


def test_the_next_turn_reuses_what_the_cache_holds(session: Session, folder: Path) -> None:
    prompt = session.tokenizer.prompt(HI)
    first = answer(session)
    second = turns(session, finished(first).tokens)
    events, fresh = answer(session, second), alone(folder, second)
    assert isinstance(events[0], Prefilled) and fresh[0] == Prefilled(events[0].tokens, 0)
    assert events[0].reused >= len(prompt)
    ours, want = events[1], fresh[1]
    assert isinstance(ours, StepDone) and isinstance(want, StepDone)
    assert ours.fed == want.fed and ours.draft == want.draft
    assert ours.entropy == pytest.approx(want.entropy, abs=1e-4)  # the prefill was cut elsewhere: other sums


def test_the_same_prompt_again_is_not_encoded(session: Session) -> None:
    n = len(session.tokenizer.prompt(HI))
    first = answer(session)
    assert first[0] == Prefilled(n, 0)
    again = answer(session)
    assert again == [Prefilled(n, n), *first[1:]]


def test_a_cache_that_cannot_step_back_is_byte_for_byte_a_new_one(tmp_path: Path) -> None:
    """A prompt longer than a prefill chunk behind a window of 8, and one that shares only <bos> with it."""
    write_tiny(tmp_path, vocab=128, max_positions=4000)
    vocabulary.write(tmp_path)
    session = open_session(str(tmp_path))
    answer(session, [{"role": "user", "content": "a" * 1200}])
    assert answer(session, HI) == alone(tmp_path, HI)


# ── planned before it is loaded ───────────────────────────────────────────────────────────────────────────────────


def test_memory_is_planned_as_wished(folder: Path) -> None:
    session = open_session(str(folder), Wishes(context=100, checksum=True))
    assert session.conversation.context == 100 == session.planned.estimate.context
    with pytest.raises(PromptError, match="the context of 100 is exceeded"):
        answer(session, [{"role": "user", "content": "a" * 100}])
    assert session.proof.checksum is not None and session.proof.read == session.planned.estimate.weights
    assert open_session(str(folder)).conversation.context == 400  # all that the model has


@pytest.mark.parametrize("context", [12, 401])
def test_a_context_the_model_does_not_have(folder: Path, context: int) -> None:
    with pytest.raises(UsageError, match=f"a context of {context} tokens cannot be given"):
        open_session(str(folder), Wishes(context=context))
    assert open_session(str(folder), Wishes(context=AtMost(context))).conversation.context == (
        13 if context < 13 else 400
    )


def test_what_does_not_fit_is_refused_before_a_tensor_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte holds the weights and a short context, half of one nothing."""
    needed = open_session(str(folder)).planned.estimate.allocated / 1e9

    def no_reading(*_: object, **__: object) -> None:
        raise AssertionError("a tensor was read")

    with monkeypatch.context() as patch:
        patch.setattr(module, "fill", no_reading)
        with pytest.raises(DoesNotFit, match=f"{folder.name} fits with a context of at most"):
            open_session(str(folder), Wishes(context=400, vram=needed * 0.9))
        with pytest.raises(DoesNotFit, match=f"{folder.name} does not fit"):
            open_session(str(folder), Wishes(vram=needed / 10))
    shorter = open_session(str(folder), Wishes(vram=needed * 0.9))  # no context was asked for: as much as fits
    as_much = open_session(str(folder), Wishes(context=AtMost(400), vram=needed * 0.9))
    assert as_much.conversation.context == shorter.conversation.context
    assert 12 < shorter.conversation.context < 400
    assert len(answer(shorter)) > 3


def test_thin_ram_is_refused_before_a_tensor_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is enough, what is read is told, to the last byte."""
    heard: list[tuple[int, int]] = []
    opened = open_session(str(folder), progress=lambda done, total: heard.append((done, total)))
    weights = opened.planned.estimate.weights
    assert heard[-1] == (weights, weights)
    monkeypatch.setattr(planning, "host_memory", lambda: weights // 2)
    monkeypatch.setattr(module, "fill", lambda *_, **__: pytest.fail("a tensor was read"))
    with pytest.raises(DoesNotFit, match=f"{folder.name} does not fit"):
        open_session(str(folder))


def test_a_device_that_is_not_there(folder: Path) -> None:
    with pytest.raises(UsageError, match="the device 'tpu' is not known"):
        open_session(str(folder), Wishes(device="tpu"))
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="torch sees no CUDA device"):
            open_session(str(folder), Wishes(device="cuda"))


# ── Ctrl-C ────────────────────────────────────────────────────────────────────────────────────────────────────────


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def handler() -> Iterator[Any]:
    """A handler of our own, which must be back afterwards."""

    def own(*_: object) -> None:
        raise AssertionError("the caller's handler was asked")

    before = signal.signal(signal.SIGINT, own)
    yield own
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_ctrl_c_ends_the_answer_after_the_running_step(session: Session, handler: Any, at: int) -> None:
    events: list[Event] = []
    for event in session.answer(HI, seed=1, steps=10):
        events.append(event)
        if len(events) == at + 1:
            press()
    assert events[-1] == Finished("interrupted", (), 0, at)
    assert len(events) == at + 2
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_ctrl_c_ends_the_running_step(session: Session, handler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = session.conversation.model
    denoise = model.denoise

    def slow(*arguments: Any) -> Any:
        press()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        press()
        return denoise(*arguments)

    monkeypatch.setattr(model, "denoise", slow)
    assert answer(session)[1:] == [Finished("interrupted", (), 0, 0)]
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_generator_closed_early_gives_the_handler_back(session: Session, handler: Any) -> None:
    events = session.answer(HI, seed=1)
    assert signal.getsignal(signal.SIGINT) is handler  # nothing happens before the first event
    next(events)
    assert signal.getsignal(signal.SIGINT) is not handler
    events.close()
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_answer_that_ends_or_fails_gives_the_handler_back(session: Session, handler: Any) -> None:
    answer(session)
    assert signal.getsignal(signal.SIGINT) is handler
    with pytest.raises(PromptError):
        answer(session, [{"role": "user", "content": "a" * 400}])
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_answer_after_an_interrupted_one(session: Session, folder: Path) -> None:
    for event in session.answer(HI, seed=1, steps=4, max_tokens=60):
        if isinstance(event, CanvasCommitted) and event.canvas == 1:
            press()
    assert answer(session)[1:] == alone(folder, HI)[1:]


def test_an_answer_in_another_thread_leaves_signals_alone(session: Session, folder: Path, handler: Any) -> None:
    events: list[Event] = []
    thread = threading.Thread(target=lambda: events.extend(answer(session)))
    thread.start()
    thread.join()
    assert events == alone(folder, HI)
    assert signal.getsignal(signal.SIGINT) is handler


# ── timings ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_timed_counts_the_making_and_not_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0

    def made() -> Iterator[Event]:
        nonlocal clock
        clock += 3.0
        yield Prefilled(1, 0)
        clock += 5.0
        yield Finished("end", (), 0, 0)

    monkeypatch.setattr(module.time, "perf_counter", lambda: clock)
    seen = []
    for event, seconds in timed(made()):
        seen.append((event, seconds))
        clock += 100.0
    assert seen == [(Prefilled(1, 0), 3.0), (Finished("end", (), 0, 0), 5.0)]
    assert list(timed([])) == []


def test_timed_ends_what_it_reads(session: Session, handler: Any) -> None:
    """Whoever stops reading the timed events gives the handler back too."""
    events = timed(session.answer(HI, seed=1))
    next(events)
    events.close()  # type: ignore[attr-defined]
    del events
    assert signal.getsignal(signal.SIGINT) is handler
