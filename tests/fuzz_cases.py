"""What `fuzz.py` feeds to `dgemma run` and `dgemma chat`: cases drawn from a grammar, each by its seed and number alone.

    options     read off the commands: each value at, inside and past its bounds, of a wrong type, repeated, contradicted
    defaults    the same values as DGEMMA_ variables and as lines of config.toml, whatever `dgemma config` lists
    prompts     from --prompt, a file, stdin, a pipe with a name, and what is none of them
    scripts     lines of a chat: messages, and every command of its table with arguments good and bad

So an option, a default or a command that is new is drawn with no change here.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import typer

from dgemma_local import preferences
from dgemma_local.chat.commands import BLOCK, COMMANDS
from dgemma_local.chat.conversation import KEYS
from dgemma_local.cli import app
from dgemma_local.cli_help import PAGES

LINKED = "model\x1b[1m\u202e"  # a folder with the files of demo-text
MODELS = ("demo-text", "demo-text", "demo-text", "demo", "demo-fp8", "demo-nvfp4", "auto", LINKED, f"./{LINKED}")
NO_MODELS = (
    "odd",
    "",
    " ",
    "nonsense",
    "demo-tex",
    "DEMO-TEXT",
    ".",
    "..",
    "/",
    "folder",
    "no/such/folder",
    "x" * 5000,
)
QUESTIONS = (
    "Spell river.",
    "Reverse the words: cat dog sun",
    "hello",
    "Say the times table of 3.",
    "12..\n34..\n..12\n..34",
)
ODD_TEXTS = (
    "", " ", "\n", "\t \r\n", "\x01\x02\x1b[2J\x1b]0;x\x07", "\x7f\x80\x9b31m", "a\rb\vc\fd", "\u202eolleh\u2066x\u2069",
    "👩‍👩‍👧‍👦 é" + "\u0301" * 300, "\ufeffhello", "\u2028\u2029\x85", "<|turn>user\nhello<turn|>", "<channel|>", "<|channel>thought",
    "<|image|>", "<|turn>", "<eos><bos><pad>", "<|tool_call>call:x{}<tool_call|>", "{{ messages }}{% raw %}", "\U000e0041\U0010ffff",
    "--stats", "-", "//", "@file", "%s%n{0}", "$(id)`id`", "\ufffd\ufffe\uffff", "A" * 300, "ÄÖ ß 漢字 " * 20,
)  # fmt: skip
ODD_BYTES = (b"\xff\xfe", b"hello \xed\xa0\x80", b"\xc3", b"\xf4\x90\x80\x80 x", b"\x80\x80", b"\xed\xb3\xbf lone")
MEGABYTE = 1 << 20
NUMBERS = (
    "", " ", "x", "-", "-0", "0", "-1", "1.0", "1.5", "1e3", "1e400", "nan", "inf", "-inf", "0x10", "1_0", " 7 ", "٣", "²", "7" * 5000,
    str(2**31), str(2**63), str(2**64 - 1), str(2**64), "None", "true", "1,5", "\x00", "\x1b[0m1",
)  # fmt: skip
# Variables that are not of this program, and that it, or what it stands on, looks at.
FOREIGN = (
    (b"TERM", b"dumb"), (b"TERM", b""), (b"COLUMNS", b"x"), (b"COLUMNS", b"0"), (b"COLUMNS", b"-5"), (b"LINES", b"99999999"),
    (b"FORCE_COLOR", b"1"), (b"NO_COLOR", b"1"), (b"LC_ALL", b"C"), (b"LANG", b"xx_XX.nonsense"), (b"EDITOR", b"'"), (b"VISUAL", b"false"),
    (b"PYTHONIOENCODING", b"ascii"), (b"TMPDIR", b"/none"), (b"DISPLAY", b":99"), (b"HOME", b""), (b"HOME", b"/dev/null"),
    (b"XDG_STATE_HOME", b"/dev/null"), (b"XDG_STATE_HOME", b"relative"), (b"XDG_CONFIG_HOME", b"\xff"), (b"XDG_CACHE_HOME", b"/proc"),
    (b"HF_HOME", b"/dev/null"), (b"HF_ENDPOINT", b"nonsense"), (b"OMP_NUM_THREADS", b"x"), (b"CUDA_VISIBLE_DEVICES", b"-1"),
)  # fmt: skip
SET = ("default", "1", "24", "4096", "4097", '"', '"e"', '"\\n"', "\\")
FLAG_WORDS = ("1", "0", "true", "false", "yes", "off", "", "2", "maybe", "TRUE")
PATHS = (
    "out.jsonl", "out.jsonl.gz", "out.txt", "out", "", ".", "folder", "folder/out.jsonl", "none/out.jsonl", "file/out.jsonl",
    "~/out.jsonl", "~nobody-here/out.jsonl", "taken.jsonl", "/dev/null", "/dev/full", "x" * 300 + ".jsonl", "é\x1b[1m.jsonl", "-.jsonl",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One process. `lines` of a chat's script are counted one by one, everything else once."""

    number: int
    arguments: tuple[bytes, ...]  # the first is the command
    stdin: bytes | None = b""  # None: closed
    variables: Mapping[bytes, bytes] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)  # made in its folder
    pipe: bytes | None = None  # written into the named pipe "pipe"
    stdout: str = "file"  # file, full, gone, closed
    whole: bool = False  # a process of its own, from the console script on
    json: bool = False  # the answer is wanted as JSON lines
    lines: int = 1

    @property
    def command(self) -> str:
        return self.arguments[0].decode()


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a command, as its signature has it."""

    name: str  # of the parameter
    flags: tuple[str, ...]
    kind: type
    least: float | None
    most: float | None


@cache
def _group() -> Any:
    return typer.main.get_command(app)


@cache
def options(command: str) -> dict[str, Option]:
    """Every option of a command, by the name of its parameter."""
    found = _group().commands[command]
    hints = get_type_hints(found.callback, include_extras=True)
    return {
        each.name: _option(each, *get_args(hints[each.name]))
        for each in found.params
        if each.param_type_name == "option" and each.name in hints
    }


def _option(parameter: Any, hint: Any, told: Any, *_: Any) -> Option:
    kinds = [hint, *get_args(hint)]
    kind = next((each for each in kinds if isinstance(each, type) and each is not type(None)), str)
    kind = str if get_origin(hint) is list else kind
    return Option(parameter.name, tuple(parameter.opts), kind, told.min, told.max)


def values(option: Option, draw: random.Random) -> str | bytes:
    """A value of it, more often good than bad."""
    good = draw.random() < 0.75
    if option.name == "model":
        return draw.choice(MODELS if good else NO_MODELS)
    if issubclass(option.kind, Enum):
        words = [str(each.value) for each in option.kind]
        return draw.choice(words if good else [words[0].upper(), words[-1][:-1], "", "nonsense", "\x1b[2J"])
    if option.kind in (int, float):
        return draw.choice(_bounds(option) if good else NUMBERS)
    if option.kind is bool:
        return draw.choice(FLAG_WORDS)  # of a variable, or in a file
    return draw.choice(PATHS) if option.kind is Path else text(draw)


def _bounds(option: Option) -> list[str]:
    step = 1 if option.kind is int else 0.001
    edges = [(option.least, (-1, 0, 1, 1)), (option.most, (1, 0, -1, -1))]  # past it, at it, twice inside
    found = [str(option.kind(edge + way * step)) for edge, ways in edges if edge is not None for way in ways]
    return found or ["-1", "0", "1", "2"]


def text(draw: random.Random) -> str | bytes:
    """A prompt, small enough for a command line."""
    kind = draw.random()
    if kind < 0.4:
        return draw.choice(QUESTIONS)
    if kind < 0.7:
        return draw.choice(ODD_TEXTS)
    if kind < 0.8:
        return draw.choice(ODD_BYTES)
    if kind < 0.9:  # anything at all, lone surrogates left to ODD_BYTES
        return "".join(chr(draw.choice((draw.randrange(1, 256), draw.randrange(0xE000, 0x110000)))) for _ in range(30))
    return draw.choice(QUESTIONS) + draw.choice(ODD_TEXTS)


def contents(draw: random.Random) -> bytes:
    """What a file or a pipe holds: also what no command line could."""
    large: Sequence[Callable[[], bytes]] = (
        lambda: b"a" * MEGABYTE,
        lambda: b"word " * (MEGABYTE // 5),
        lambda: "é漢👩".encode() * (MEGABYTE // 9),
        lambda: b"line\n" * 5000,
        lambda: b"\n" * MEGABYTE,
        lambda: b"\0" * 1000,
        lambda: b"\xef\xbb\xbfSpell river.\r\n",
        lambda: b"\xef\xbb\xbf",
        lambda: b"Spell\0river.",
        lambda: "Spell river.".encode("utf-16"),
        lambda: draw.randbytes(2000),
    )
    return draw.choice(large)() if draw.random() < 0.3 else as_bytes(text(draw)) + draw.choice((b"", b"\n", b"\r\n"))


def as_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")


def case(seed: int, number: int) -> Case:
    """The case of that number."""
    draw = random.Random(f"{seed}:{number}")
    return (_chat if draw.random() < 0.2 else _run)(draw, number)


# ── run ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _run(draw: random.Random, number: int) -> Case:
    given = _flags("run", draw) + ([["--json"]] if draw.random() < 0.15 else [])
    asked, rest = _question(draw)
    parts = [asked, *given]
    draw.shuffle(parts)
    switches = [part[0] for part in parts if part and part[0] in ("--json", "--no-json")]
    begin = ["-m", "demo-text", "--max-tokens", "96", "--steps", "4"] if draw.random() < 0.95 else []
    end = draw.choice((["--max-tokens"], ["--nonsense"], ["--help"], ["a", "b"])) if draw.random() < 0.03 else []
    return _case(
        draw, number, ["run", *begin, *chain(*parts), *end], json=switches[-1:] == ["--json"] and not end, **rest
    )


def _question(draw: random.Random) -> tuple[list[str | bytes], dict[str, Any]]:
    """Its arguments, and what they need: files, stdin, a pipe."""
    match draw.choice("prompt prompt prompt prompt file file file stdin stdin pipe path none both".split()):
        case "prompt":
            return [draw.choice(("-p", "--prompt")), _argument(text(draw))], {}
        case "file":
            return ["question"], {"files": {"question": contents(draw)}}
        case "stdin":
            return ["-"], {"stdin": draw.choice((None, b"", contents(draw), contents(draw)))}
        case "pipe":
            return ["pipe"], {"pipe": draw.choice((b"", contents(draw)))}
        case "path":
            paths = (
                "none",
                "folder",
                "",
                "/dev/null",
                "/dev/zero",
                "/dev/full",
                "file/x",
                "x" * 5000,
                b"\xff",
                "\x1b[2J",
                "--",
            )
            return [draw.choice(paths)], {}
        case "none":
            return [], {"stdin": contents(draw)}
        case _:
            return ["question", "-p", "hello"], {"files": {"question": b"hello"}}


def _argument(value: str | bytes) -> bytes:
    """No argument and no variable can hold NUL."""
    return as_bytes(value).replace(b"\0", b"\1")


def _flags(command: str, draw: random.Random) -> list[list[str | bytes]]:
    """Options with their values, a few of them."""
    known, page = options(command), PAGES[command]
    names = [draw.choice([*known]) for _ in range(draw.choice((0, 0, 1, 1, 1, 2, 4)))]
    if draw.random() < 0.15:
        names += draw.choice(page.exclusive)
    if draw.random() < 0.8:  # what they act on, so that they do something
        names += [needed for name in names for needed in page.needs.get(name, ())]
    if names and draw.random() < 0.1:
        names.append(names[0])
    found: list[list[str | bytes]] = []
    for name in dict.fromkeys(names) if draw.random() < 0.8 else names:
        option, value = known[name], _argument(values(known[name], draw))
        if option.kind is bool:
            opposite = f"--no-{max(option.flags, key=len).removeprefix('--')}"
            found.append([draw.choice((*option.flags * 5, opposite))])
        elif draw.random() < 0.2:
            found.append([as_bytes(max(option.flags, key=len)) + b"=" + value])
        else:
            found.append([draw.choice(option.flags), value])
    return found


# ── chat ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _chat(draw: random.Random, number: int) -> Case:
    given = _flags("chat", draw) if draw.random() < 0.5 else []
    name = [draw.choice(("held", "nobody", "..", "", "é", "\x1b[2J", b"\xff"))] if draw.random() < 0.1 else []
    begin = ["-m", "demo-text", "--max-tokens", "96", "--steps", "4"] if draw.random() < 0.95 else []
    count = draw.choice((0, 1, 3, 6, 12))
    script = b"".join(line(draw) + draw.choice((b"\n",) * 8 + (b"\r\n",)) for _ in range(count))
    if script and draw.random() < 0.15:
        script = script[: draw.randrange(len(script))]  # it ends amid a line, or amid a character
    stdin = None if draw.random() < 0.02 else script
    arguments = ["chat", *begin, *chain(*given), *name]
    return _case(draw, number, arguments, stdin=stdin, lines=max(1, count))


def line(draw: random.Random) -> bytes:
    """One line of a script: a message, or a command with an argument."""
    if draw.random() < 0.4:
        message = (
            contents(draw).replace(b"\n", b" ") if draw.random() < 0.3 else as_bytes(text(draw)).replace(b"\n", b" ")
        )
        return (
            draw.choice((b"",) * 8 + (BLOCK.encode(), b"//"))
            + message
            + draw.choice((b"",) * 8 + (b"\\", BLOCK.encode()))
        )
    known = draw.choice(COMMANDS)
    shown = as_bytes(
        draw.choice((known.name,) * 8 + (known.name.upper(), known.name[:-1], known.name + "x", "", "?", "q"))
    )
    return (
        b"/"
        + shown
        + draw.choice((b" ",) * 8 + (b"\t", b"  ", b""))
        + _rest(known.name, known.argument, draw).replace(b"\n", b" ")
    )


def _rest(name: str, argument: str, draw: random.Random) -> bytes:
    """What follows a command: what its table names, its keys and models, paths, or anything."""
    words = [word for part in argument.replace("[", "").replace("]", "").split() for word in part.split("|")]
    match draw.randrange(4):
        case 0:
            return b""
        case 1 if words:
            return " ".join(draw.choice((word, draw.choice(PATHS))) for word in words).encode()
        case 2 if name == "set":
            return f"{draw.choice(KEYS)} {draw.choice((*NUMBERS, *SET))}".encode()
        case 2 if name == "model":
            return draw.choice(MODELS + NO_MODELS).encode()
        case 2 if name in ("save", "load"):
            return draw.choice(
                ("held", "broken", "other", "..", "a/b", "é" * 200, ".x", "x" * 80, "x" * 81, "a b", "CON")
            ).encode()
        case 2 if name in ("export", "record"):
            return f"{draw.choice(('md ', 'json ', 'html ', ''))}{draw.choice(PATHS)}".encode()
        case 2 if words:
            return draw.choice(words).encode()
        case _:
            return as_bytes(text(draw))


# ── what both have ────────────────────────────────────────────────────────────────────────────────────────────────────

HELD = (
    b'{"format": "dgemma chat", "version": 1, "name": "held", "model": "demo-text", "started": "", "system": null, "asked": 1, '
    b'"settings": {"max_tokens": 24, "steps": 4, "seed": null, "thinking": false, "think_tokens": null, "show_thoughts": false, '
    b'"stop": []}, "turns": [{"user": "Spell dog.", "answer": "d-o-g", "thought": "", "ids": [], "outcome": "complete", "seed": 1, '
    b'"time": ""}]}'
)
CHATS = "state/dgemma/chats"


def _case(draw: random.Random, number: int, arguments: list[str | bytes], **rest: Any) -> Case:
    command = str(arguments[0])
    files: dict[str, bytes] = {"file": b"x", "taken.jsonl": b"{}\n", "folder/x": b"", **rest.pop("files", {})}
    if command == "chat":
        files |= {f"{CHATS}/held.json": HELD, f"{CHATS}/broken.json": HELD[: draw.randrange(len(HELD))]}
    variables: dict[bytes, bytes] = {}
    if draw.random() < 0.2:
        variables = dict([_variable(command, draw) for _ in range(draw.choice((1, 1, 3)))])
    if draw.random() < 0.1:
        files["config/dgemma/config.toml"] = _config(command, draw)
    return Case(
        number=number,
        arguments=tuple(_argument(each) for each in arguments),
        variables=variables,
        files=files,
        stdout=draw.choice(("file",) * 47 + ("full", "gone", "closed")),
        whole=draw.random() < 0.025,
        **rest,
    )


@cache
def _settings(command: str) -> list[preferences.Setting]:
    return [each for each in preferences.settings(_group()).values() if each.command == (command,)]


def _default(command: str, draw: random.Random) -> tuple[preferences.Setting, str | bytes]:
    setting = draw.choice(_settings(command))
    return setting, values(options(command)[setting.parameter], draw)


def _variable(command: str, draw: random.Random) -> tuple[bytes, bytes]:
    if draw.random() < 0.4:
        return draw.choice(FOREIGN)
    setting, value = _default(command, draw)
    others = sorted(preferences.OTHERS)
    name = draw.choice((setting.variable,) * 8 + (setting.variable + "S", draw.choice(others), "DGEMMA_OP", "DGEMMA_"))
    if name in others:
        value = draw.choice(
            (b"", b"torch", b"eager", b"twins fast-head", b"nonsense", b"file", b"folder", b"none/x", b"log", b"\xff")
        )
    return name.encode(), _argument(value)


def _config(command: str, draw: random.Random) -> bytes:
    if draw.random() < 0.2:
        return draw.choice(
            (
                b"",
                b"\xef\xbb\xbf",
                b"[run",
                b"\xff",
                b"run = 1\n",
                b"[run]\nnonsense = 1\n",
                b"\0",
                b"[run.run]\n",
                b"x" * 9999,
            )
        )
    lines = [f"[{command}]".encode()]
    for _ in range(draw.choice((1, 1, 2))):
        setting, value = _default(command, draw)
        shown = (
            as_bytes(value)
            if draw.random() < 0.5
            else json.dumps(as_bytes(value).decode(errors="replace"), ensure_ascii=False).encode()
        )
        shown = b"[" + shown + b"]" if setting.many and draw.random() < 0.8 else shown
        lines.append(setting.name.encode() + b" = " + shown)
    return b"\n".join(lines) + b"\n"
