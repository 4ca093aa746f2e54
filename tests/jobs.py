"""A shell with job control and no line editor, which would mend the terminal: python jobs.py PROGRAM ARGUMENT...

The program has the terminal. Whenever it stops, "[stopped: MODES]" says which modes it has left on, and a line is read:

    fg      the program goes on, with the terminal
    bg      the program goes on without; another line is read

It ends with "[ended: MODES]" and the program's exit code.
"""

import os
import select
import signal
import sys
import termios


def modes() -> str:
    on = termios.tcgetattr(0)[3]
    return " ".join(name for name in ("ECHO", "ICANON") if on & getattr(termios, name))


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def begun(program: list[str]) -> int:
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        os.tcsetpgrp(0, os.getpid())
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)
        os.execvp(program[0], program)
    return child


def came_back(child: int) -> bool:
    """Whether "fg" was typed before the program, in the background, ended or stopped."""
    os.killpg(child, signal.SIGCONT)
    say("[in the background]")
    while not select.select([0], [], [], 0.05)[0]:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None:
            return False
    return os.read(0, 100) == b"fg\n"


def main(program: list[str]) -> int:
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # as shells do, to take the terminal back
    child = begun(program)
    while os.WIFSTOPPED(status := os.waitpid(child, os.WUNTRACED)[1]):
        os.tcsetpgrp(0, os.getpgrp())
        say(f"[stopped: {modes()}]")
        if os.read(0, 100) == b"bg\n" and not came_back(child):
            continue
        os.tcsetpgrp(0, child)
        os.killpg(child, signal.SIGCONT)
    os.tcsetpgrp(0, os.getpgrp())
    say(f"[ended: {modes()}]")
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
