"""Captures of a sudoku being solved in tmux, step by step: python tests/captures.py FOLDER

    80x24 40x12 200x60   NAME-KK.txt: `tmux capture-pane -e -p` after step K, with --step and a key for each
    no-color             the same at 80x24 with NO_COLOR
    dumb                 with TERM=dumb, frame under frame; one capture of the whole scrollback

and NAME-end.txt, after the run. Checked: states that occur are told apart, nothing of a frame is left behind, and what was
there before the run still is. Exits with 1 where it is not so. Needs tmux.
"""

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 60  # seconds for the next step to be drawn
BEFORE = "written before the run"
PUZZLE = """Solve this sudoku:
.34.7.91.
..2......
...3.25.7
...7..4..
..6......
..3.....6
.......8.
.8...9.3.
...2.6..9"""
STATUS = re.compile(r"step (\d+) of \d+|(\d+)/\d+")
END = "run-ended"
# What draws a state, colours left out: bold, dim, underline, reverse.
CODES = {"frozen": "1", "new": "1;4", "replaced": "1;7", "thawed": "7", "noise": "2"}
_NUMBERS = itertools.count()


class Tmux:
    """A server of its own with one pane."""

    def __init__(self, columns: int, lines: int, environment: dict[str, str]) -> None:
        self._name = f"dgemma-{os.getpid()}-{next(_NUMBERS)}"  # the last one may still be ending
        variables = {k: v for k, v in os.environ.items() if k not in ("TMUX", "NO_COLOR", "COLORTERM", "TMUX_PANE")}
        self._environment = variables | {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
        told = [f"{name}={value}" for name, value in environment.items()]
        size = ["-x", str(columns), "-y", str(lines)]
        self.call("-f", "/dev/null", "new-session", "-d", *size, "env", *told, "PS1=", "bash", "--norc", "--noprofile")
        self.call("set-option", "-g", "history-limit", "20000")

    def call(self, *arguments: str) -> str:
        command = ["tmux", "-L", self._name, *arguments]
        found = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=30, check=True)
        return found.stdout

    def type(self, line: str) -> None:
        self.call("send-keys", "-l", line)
        self.call("send-keys", "Enter")

    def key(self, name: str) -> None:
        self.call("send-keys", name)

    def screen(self, *, colours: bool = False, history: bool = False) -> str:
        return self.call("capture-pane", "-p", *(["-e"] if colours else []), *(["-S", "-"] if history else []))

    def resize(self, columns: int, lines: int) -> None:
        self.call("resize-window", "-x", str(columns), "-y", str(lines))

    def until(self, found: "re.Pattern[str] | str", *, history: bool = False, besides: str = "") -> str:
        """The screen, once it shows what is looked for; `besides` is what it must differ from."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            screen = self.screen(history=history)
            match = re.search(found, screen)
            if match and match.group() != besides:
                return screen
            time.sleep(0.02)
        raise TimeoutError(f"{found!r} did not appear:\n{self.screen()}")

    def until_still(self) -> None:
        """Until the screen is the same for longer than the view takes to see another size."""
        before, same = "", 0
        while same < 5:
            screen = self.screen()
            before, same = screen, same + 1 if screen == before else 0
            time.sleep(0.05)

    def end(self) -> None:
        subprocess.run(
            ["tmux", "-L", self._name, "kill-server"], env=self._environment, capture_output=True, timeout=30
        )


@contextmanager
def tmux(columns: int, lines: int, environment: dict[str, str] | None = None) -> Iterator[Tmux]:
    server = Tmux(columns, lines, environment or {})
    try:
        yield server
    finally:
        server.end()


def command(*flags: str, environment: dict[str, str] | None = None) -> str:
    told = " ".join(f"{name}={value}" for name, value in (environment or {}).items())
    words = [
        sys.executable,
        "-m",
        "dgemma_local",
        "run",
        "-m",
        "demo",
        "-p",
        PUZZLE,
        "--seed",
        "0",
        "--visualize",
        *flags,
    ]
    return f"clear; echo '{BEFORE}'; {told} {shlex.join(words)} 2>&1; echo {END[:4]}''{END[4:]}"


def start(pane: Tmux, folder: Path, line: str) -> None:
    """The command in a script: a line as long as a puzzle would be echoed."""
    script = folder / "command.sh"
    script.write_text(line + "\n", encoding="utf-8")
    pane.type(f"cd {shlex.quote(str(Path(__file__).parent.parent))} && . {shlex.quote(str(script.resolve()))}")


def stepped(folder: Path, name: str, columns: int, lines: int, environment: dict[str, str]) -> list[str]:
    """Captures every step -> what is wrong."""
    seen: set[str] = set()
    wrong: list[str] = []
    number, last = 0, ""
    with tmux(columns, lines) as pane:
        start(pane, folder, command("--step", environment=environment))
        while True:
            screen = pane.until(re.compile(rf"{END}|{STATUS.pattern}"), besides=last)
            if END in screen:
                break
            found = STATUS.search(screen)
            assert found is not None
            last, number = found.group(), number + 1
            capture = pane.screen(colours=True)
            (folder / f"{name}-{number:02}.txt").write_text(capture, encoding="utf-8")
            seen |= states_in(capture)
            if BEFORE not in pane.screen(history=True):
                wrong.append(f"{name}: what stood above has gone at step {number}")
            pane.key("Space")
        (folder / f"{name}-end.txt").write_text(pane.screen(colours=True), encoding="utf-8")
        wrong += [f"{name}: {each}" for each in residue(pane.screen(history=True))]
        if (
            "\x1b[?25" in pane.screen(colours=True)
            or pane.call("display-message", "-p", "#{cursor_flag}").strip() != "1"
        ):
            wrong.append(f"{name}: the cursor has not come back")
    missing = set(CODES) - seen
    if missing:
        wrong.append(f"{name}: never told apart: {', '.join(sorted(missing))}")
    print(f"{name}: {number} steps, told apart: {', '.join(sorted(seen))}")
    return wrong


def states_in(capture: str) -> set[str]:
    """States that a capture of the canvas draws: by attributes, and greys for noise where there are colours."""
    found = set()
    on: set[str] = set()  # attributes, and "grey"; tmux sets what differs from what was before, over lines, too
    for line in capture.split("\n"):
        plain = re.sub(r"\x1b\[[\d;]*m", "", line)
        chrome = re.search(r"frozen|canvas \d|thaws|more rows|demo|before the run", plain)
        for codes, text in re.findall(r"(?:\x1b\[([\d;]*)m)?([^\x1b]*)", line):
            for code in re.findall(r"[34]8;5;\d+|\d+", codes):
                if code == "0":
                    on = set()
                elif code in ("1", "2", "4", "7"):
                    on.add(code)
                elif code.startswith("38;") or code == "39":
                    on = (on - {"grey"}) | ({"grey"} if re.fullmatch(r"38;5;2[45]\d", code) else set())
            if text.strip() and not chrome:
                found |= {state for state, code in CODES.items() if set(code.split(";")) == on}
                if on == {"grey"}:
                    found.add("noise")
    return found


def residue(text: str) -> list[str]:
    """What is left of frames in all that the terminal holds."""
    lines = [line for line in text.split("\n") if line.strip()]
    return [f"left behind: {line!r}" for line in lines if re.search(r"step \d+ of \d+ ·|frozen.*noise|more rows", line)]


def dumb(folder: Path) -> list[str]:
    with tmux(80, 24) as pane:
        start(pane, folder, command(environment={"TERM": "dumb"}))
        pane.until(END)
        capture = pane.screen(colours=True, history=True)
    (folder / "dumb.txt").write_text(capture, encoding="utf-8")
    marks = {sign for line in capture.split("\n") if set(line) <= set(" +*-~?.^") for sign in line}
    steps = len(re.findall(r"step \d+ of", capture))
    print(f"dumb: {steps} steps, marks: {' '.join(sorted(marks - {' '}))}")
    missing = set("+*-~") - marks
    return [f"dumb: no mark {sign}" for sign in sorted(missing)] + (["dumb: escape codes"] if "\x1b" in capture else [])


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or shutil.which("tmux") is None:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    wrong = []
    for name, columns, lines, environment in (
        ("80x24", 80, 24, {}),
        ("40x12", 40, 12, {}),
        ("200x60", 200, 60, {}),
        ("no-color", 80, 24, {"NO_COLOR": "1"}),
    ):
        wrong += stepped(folder, name, columns, lines, environment)
    wrong += dumb(folder)
    for each in wrong:
        print(each)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
