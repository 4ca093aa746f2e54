"""What a recording keeps of a run, how much it takes on disk, and what its schema says of it."""

import gzip
import json
import os
import pty
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import recordings
from jsonschema import Draft202012Validator

from dgemma_local import recording as package
from dgemma_local.channels import AnswerDecoder
from dgemma_local.errors import RecordingError
from dgemma_local.events import CanvasCommitted, Event, Finished, StepDone
from dgemma_local.recording import Header, Piece, Recorder, Recording, Word, check_target, open_recording
from dgemma_local.states import follow

PUZZLE = "Solve this sudoku:\n53..7....\n6..195...\n.98....6.\n8...6...3\n4..8.3..1\n7...2...6\n.6....28.\n...419..5\n....8...."
TESTS = Path(recordings.__file__).parent


@cache
def schema() -> Draft202012Validator:
    text = (Path(package.__file__).parent / "schema.json").read_text()
    Draft202012Validator.check_schema(json.loads(text))
    return Draft202012Validator(json.loads(text))


def lines(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in text.splitlines()]


def written(folder: Path, made: Recording, name: str = "run.jsonl") -> Path:
    path = folder / name
    recordings.write(path, made)
    return path


# What goes in comes out


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz", "run.GZ", "run"])
@pytest.mark.parametrize(
    "made",
    [
        recordings.make(),
        recordings.make(canvases=1, steps=1, length=1),
        recordings.make(canvases=3, length=96, texts=["a", "b", "\n"], seed=4),
        recordings.hostile(),
    ],
    ids=["usual", "least", "few words", "hostile"],
)
def test_a_recording_is_read_as_it_was_written(tmp_path: Path, made: Recording, name: str) -> None:
    path = written(tmp_path, made, name)
    assert open_recording(path) == made
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == (path.suffix.lower() == ".gz")


def test_the_maker_makes_what_a_run_has() -> None:
    made = recordings.make()
    seen = list(follow(zip(made.events, made.seconds, strict=True), {recordings.END}))[-1]
    assert min(seen.thaws, seen.replacements, seen.corrections, seen.saved) > 0
    assert made == recordings.make() != recordings.make(seed=1)
    for steps in made.canvases:
        counts, means = [sum(s.accepted) for s in steps], [sum(s.entropy) for s in steps]
        assert counts[0] < counts[-1] and means[0] > means[-1] and [s.done for s in steps] == [False] * 7 + [True]


def test_half_a_character_becomes_a_mark_on_both_sides(tmp_path: Path) -> None:
    made = recordings.hostile(lone=True)
    made.words[4] = Word("\udfff<turn|>", control=True)
    header = replace(made.header, model="\udcff", settings={"\ud800": "\udfff", "odd": Path("a"), "nan": float("nan")})
    path = written(tmp_path, replace(made, header=header))
    assert b"\\ud800" not in path.read_bytes() and b"\\udfff" not in path.read_bytes()
    spelled = path.read_bytes().replace(b'"<pad>"', b'"\\ud800\\ud83d\\ude00"')
    path.write_bytes(spelled)
    found = open_recording(path)
    assert found.word(recordings.PAD) == Word("�😀", control=True)
    assert found.header.model == "�" and found.header.settings == {"�": "�", "odd": "a", "nan": "nan"}
    assert "x�y" in found.text and repr(found).encode()  # all of it can be encoded


def test_equal_numbers_of_two_kinds_stay_apart(tmp_path: Path) -> None:
    made = recordings.make(length=8, steps=3)
    first, *rest = [event for event in made.events if isinstance(event, StepDone)]
    made.events[1] = replace(first, entropy=(0.0, 1.0, 2.0, 3.0, -0.0, -1e-9, 21.9999, 7.0))
    path = written(tmp_path, made)
    assert b'"entropy":[0.0,1.0,2.0,3.0,0.0,0.0,22.0,7.0]' in path.read_bytes()
    found = open_recording(path).canvases[0][0]
    assert repr(found.entropy) == "(0.0, 1.0, 2.0, 3.0, 0.0, 0.0, 22.0, 7.0)"
    for step in (found, *rest):
        assert {type(each) for each in (*step.fed, *step.draft, *step.next)} == {int}
        assert {type(each) for each in step.entropy} == {float} and {type(each) for each in step.accepted} == {bool}


def test_a_text_stands_where_its_token_is_named_first(tmp_path: Path) -> None:
    made = recordings.make(length=16, vocabulary=60)
    asked: list[int] = []

    def word(token: int) -> Word:
        asked.append(token)
        return made.word(token)

    path = tmp_path / "run.jsonl"
    with Recorder(path, made.header, word) as recorder:
        for event, seconds, pieces in zip(made.events, made.seconds, made.pieces, strict=True):
            recorder.take(event, seconds, pieces)
    assert len(asked) == len(set(asked)) == len(made.words)
    named: list[int] = []
    for line in lines(path):
        ids = [token for name in ("ends", "prompt", "fed", "draft", "next") for token in line.get(name, ())]
        new = (
            [token for token in dict.fromkeys(ids or line.get("tokens", ()) or ()) if token not in named]
            if line["event"] != "prefilled"
            else []
        )
        assert len(line.get("texts", ())) == len(new)
        named += new
    assert named == asked


def test_what_stays_out(tmp_path: Path) -> None:
    made = recordings.make()
    path = written(tmp_path, replace(made, header=replace(made.header, prompt=None)))
    assert "prompt" not in lines(path)[0] and open_recording(path).header.prompt is None
    assert [i for i, line in enumerate(lines(path)) if "fed" in line] == [2, 11]  # the first step of each canvas


def test_a_run_may_be_stopped_anywhere(tmp_path: Path) -> None:
    made = recordings.make(length=8, steps=3)
    for kept in range(len(made.events) - 1):
        path = tmp_path / f"{kept}.jsonl"
        with Recorder(path, made.header, made.word) as recorder:
            for event in made.events[:kept]:
                recorder.take(event, 0.5)
            recorder.take(Finished("interrupted", (), 0, 0), 0.5, [Piece("thought", "half")])
        found = open_recording(path)
        assert found.notice is None and found.events[:-1] == made.events[:kept]
        assert found.pieces[-1] == (Piece("thought", "half"),) and found.text == ""


# Size


@pytest.mark.parametrize("seed", range(2))
def test_a_step_of_256_positions_takes_at_most_3_kilobytes(tmp_path: Path, seed: int) -> None:
    made = recordings.make(canvases=3, steps=16, length=256, vocabulary=262_144, seed=seed)
    texts = [word.text for word in made.words.values()]
    assert 5 <= sum(map(len, texts)) / len(texts) <= 6 and max(made.words) > 262_000 and len(texts) > 9_000
    path = written(tmp_path, made, "run.jsonl.gz")
    assert path.stat().st_size / 48 <= 3_000


# The schema


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Event], tuple[int, ...]]:
    """A recording of the demo model, its raw events and its prompt."""
    from dgemma_local.session import open_session, timed

    session = open_session("demo")
    messages: Any = [{"role": "user", "content": PUZZLE}]
    prompt = session.prompt(messages, thinking=True)
    header = Header(
        model=session.name,
        revision=None,
        demo=session.is_demo,
        seed=1,
        canvas_length=session.canvas_length,
        steps=session.steps,
        max_tokens=1024,
        ends=tuple(session.generation.end_ids),
        prompt=prompt,
        settings=session.settings,
        dgemma="0.1.0",
    )
    tokenizer = session.tokenizer
    decoder = AnswerDecoder(tokenizer)
    path = tmp_path_factory.mktemp("demo") / "run.jsonl.gz"
    events = []
    with Recorder(path, header, lambda token: Word(tokenizer.piece(token), tokenizer.is_control(token))) as recorder:
        for event, seconds in timed(session.answer(messages, seed=1, thinking=True, steps=12)):
            kept = decoder.feed(event.tokens[: event.kept]) if isinstance(event, CanvasCommitted) else []
            recorder.take(event, seconds, decoder.close() if isinstance(event, Finished) else kept)
            events.append(event)
    return path, events, prompt


def test_a_real_run_is_kept_to_the_last_token(run: tuple[Path, list[Event], tuple[int, ...]]) -> None:
    path, events, prompt = run
    found = open_recording(path)
    assert found.notice is None and found.header.prompt == prompt and len(found.canvases) > 1 and found.text
    for ours, theirs in zip(found.events, events, strict=True):
        if isinstance(theirs, StepDone) and isinstance(ours, StepDone):
            assert ours.entropy == pytest.approx(theirs.entropy, abs=5.01e-4)
            theirs = replace(theirs, entropy=ours.entropy, temperature=ours.temperature)
        assert ours == theirs


def test_recordings_are_what_the_schema_says(run: tuple[Path, list[Event], tuple[int, ...]], tmp_path: Path) -> None:
    made = recordings.make(canvases=2)
    paths = [run[0], written(tmp_path, made), written(tmp_path, recordings.hostile(lone=True), "hostile.gz")]
    paths.append(written(tmp_path, replace(made, header=replace(made.header, prompt=None, revision=None)), "short"))
    for path in paths:
        for line in lines(path):
            schema().validate(line)


def test_the_schema_names_every_value_of_a_line_and_no_other(tmp_path: Path) -> None:
    for line in lines(written(tmp_path, recordings.make())):
        for name in line:
            optional = name in ("prompt", "revision") or (name == "event")
            without = {key: value for key, value in line.items() if key != name}
            assert optional or not schema().is_valid(without), (line["event"], name)
        assert not schema().is_valid(line | {"more": 1})
    kinds = schema().schema["$defs"]
    for kind in ("recording", "prefilled", "step_done", "canvas_committed", "finished"):
        for name, value in kinds[kind]["properties"].items():
            told = value is True or "description" in value or value["$ref"] in ("#/$defs/seconds", "#/$defs/pieces")
            assert told, (kind, name)


# What ends a recording early

CHILD = """
import sys, time
from pathlib import Path
import recordings
from dgemma_local.recording import Recorder
made = recordings.make(length=256, vocabulary=262144)
recorder = Recorder(Path(sys.argv[1]), made.header, made.word)
for i in range(int(sys.argv[2])):
    recorder.take(made.events[i], made.seconds[i], made.pieces[i])
print("taken", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("name", "taken"), [("run.jsonl", 6), ("run.jsonl.gz", 6), ("run.jsonl.gz", 12)])
def test_what_was_taken_before_a_kill_is_there(tmp_path: Path, name: str, taken: int) -> None:
    path = tmp_path / name
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS.parent)))}
    command = [sys.executable, "-c", CHILD, str(path), str(taken)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdout is not None and child.stdout.readline() == b"taken\n"
        child.send_signal(signal.SIGKILL)
    made, found = recordings.make(length=256, vocabulary=262_144), open_recording(path)
    assert found.events == made.events[:taken] and found.seconds == made.seconds[:taken]
    assert found.notice == f"{path}: it ends before the run did; shown up to there"


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_a_full_disk_ends_the_recording_and_not_the_run(tmp_path: Path, name: str) -> None:
    made = recordings.make()
    path = tmp_path / name
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Recorder(path, made.header, made.word) as recorder:
        recorder.take(made.events[0], 0.1)
        recorder.take(made.events[1], 0.1)
        size = path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, before[1]))  # room for a part of the next line
        try:
            recorder.take(made.events[2], 0.1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert recorder.failed == f"{path} is recorded in part only: File too large"
        recorder.take(made.events[3], 0.1)
    assert path.stat().st_size == size + 100
    found = open_recording(path)
    assert (
        found.events == made.events[:2]
        and found.notice == f"{path}: line 4: it is cut in the middle; shown up to there"
    )


@pytest.mark.parametrize("there", [False, True])
def test_a_disk_that_is_full_at_the_first_line_leaves_no_file_of_ours(tmp_path: Path, there: bool) -> None:
    path = tmp_path / "run.jsonl"
    if there:
        path.touch()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(RecordingError, match="File too large"):
            begin(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.exists() == there


def test_a_reader_that_leaves_ends_the_recording_and_not_the_run() -> None:
    made = recordings.make()
    there, here = os.pipe()
    with Recorder(Path(f"/dev/fd/{here}"), made.header, made.word) as recorder:
        os.close(there)
        recorder.take(made.events[0], 0.1)
    os.close(here)
    assert str(recorder.failed).endswith("Broken pipe")


def test_what_close_finds_out_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Remote:
        closed = False

        def close(self) -> None:
            assert not self.closed
            self.closed = True
            raise OSError(122, "Disk quota exceeded")

    made = recordings.make()
    recorder = Recorder(tmp_path / "run.jsonl", made.header, made.word)
    recorder._file.close()
    monkeypatch.setattr(recorder, "_file", Remote())
    recorder.close()
    recorder.close()
    assert str(recorder.failed).endswith("recorded in part only: Disk quota exceeded")


# Where a recording may go


def begin(path: Path) -> None:
    Recorder(path, recordings.make().header, lambda token: Word("x")).close()


def refusal(path: Path) -> str:
    with pytest.raises(RecordingError) as caught:
        begin(path)
    assert "\n" not in caught.value.what + caught.value.fix and str(path) in caught.value.what
    return caught.value.what.replace(str(path), "IT")


GZIP = gzip.compress(b"other things" * 100)


@pytest.mark.parametrize(
    "held",
    [
        b"notes",
        b'My notes on the "dgemma recording" format\n',
        b'{"a": "dgemma recording"}\n',
        b"{}\n",
        GZIP,
        GZIP[:12],
        GZIP[:30] + b"\xff" * 30,
        b"\x1f\x8b" + b"\xff" * 600,
        b"\x1f\x8b",
        b'{"event":"recording"}',
    ],
)
@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_what_is_no_recording_is_not_overwritten(tmp_path: Path, name: str, held: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(held)
    assert refusal(path) == "IT is there and is no recording"
    link = tmp_path / "link"
    link.symlink_to(path)
    assert refusal(link) == "IT is there and is no recording"
    assert path.read_bytes() == held


@pytest.mark.parametrize("rest", [0, 1, 20, 46, 47, 48, 200, 5000])
@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_a_recording_is_overwritten_and_so_is_what_is_left_of_one(tmp_path: Path, name: str, rest: int) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(written(tmp_path, recordings.make(seed=3)).read_bytes()[:rest])
    path = path.rename(tmp_path / name)
    assert open_recording(written(tmp_path, recordings.make(), name)) == recordings.make()
    recordings.write(path, recordings.make(seed=2))  # a whole one
    assert open_recording(path) == recordings.make(seed=2)


def test_one_that_another_program_laid_out_is_a_recording(tmp_path: Path) -> None:
    path = written(tmp_path, recordings.make())
    path.write_text("".join(json.dumps(line) + "\n" for line in lines(path)))
    assert open_recording(path) == recordings.make()
    check_target(path)


def test_a_link_is_followed(tmp_path: Path) -> None:
    link, file = tmp_path / "link.jsonl", tmp_path / "file.jsonl"
    link.symlink_to(file)
    for seed in range(2):  # the file is not there, then it is
        recordings.write(link, recordings.make(seed=seed))
        assert open_recording(file) == recordings.make(seed=seed) and link.is_symlink()
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert refusal(loop) == "IT cannot be written: Too many levels of symbolic links"


def test_places_where_nothing_can_be_recorded(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    os.mkfifo(tmp_path / "fifo")
    assert refusal(tmp_path) == "IT is a folder"
    assert refusal(tmp_path / "fifo") == "IT cannot be written: No such device or address"  # and does not wait
    assert refusal(Path("/dev/full")) == "IT cannot be written: No space left on device"
    assert refusal(tmp_path / ("x" * 300)) == "IT cannot be written: File name too long"
    assert refusal(tmp_path / "a\0b") == "IT cannot be written: embedded null byte"
    for path in (tmp_path / "none" / "run.jsonl", file / "run.jsonl"):
        with pytest.raises(RecordingError, match=f"there is no folder {path.parent} to record in"):
            check_target(path)
    begin(Path(os.devnull))
    begin(file)


def test_the_terminal_is_no_place_for_it() -> None:
    ours, theirs = pty.openpty()
    assert refusal(Path(os.ttyname(theirs))) == "IT is where the output goes"
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_nor_is_where_the_answer_goes(tmp_path: Path, stream: str) -> None:
    code = "import sys; from pathlib import Path; from dgemma_local.recording import check_target; check_target(Path(sys.argv[1]))"
    out = tmp_path / "out"
    for path in (f"/dev/{stream}", str(out)):
        with out.open("wb") as file, (tmp_path / "other").open("w+b") as other:
            streams: dict[str, Any] = {"stdout": other, "stderr": other, stream: file}
            assert subprocess.run([sys.executable, "-c", code, path], check=False, **streams).returncode == 1
            said = out if stream == "stderr" else tmp_path / "other"
        assert "is where the output goes" in said.read_text()


def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path, as_nobody: None) -> None:
    assert refusal(tmp_path / "run.jsonl") == "IT cannot be written: it is not yours to write"


@pytest.fixture
def as_nobody(tmp_path: Path) -> Any:
    """Without root's rights, in a folder that only root, or nobody at all, may write."""
    held = [folder for folder in (tmp_path, *tmp_path.parents) if not folder.stat().st_mode & 0o001]
    modes = [(folder, folder.stat().st_mode) for folder in (*held, tmp_path)]
    if os.geteuid() == 0:
        for folder in held:
            folder.chmod(folder.stat().st_mode | 0o011)
    tmp_path.chmod(0o555)
    if os.geteuid() == 0:
        os.seteuid(65534)
    yield
    if os.getuid() == 0:
        os.seteuid(0)
    for folder, mode in modes:
        folder.chmod(mode)
