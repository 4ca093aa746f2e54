"""Plain text on the clipboard: by a program of the desktop, else by asking the terminal."""

import base64
import os
import shutil
import subprocess
import sys

from dgemma_local.ui.terminal import Terminal

SECONDS = 5.0  # a program that takes longer waits for something
LONGEST = 74_994  # characters of base64 that xterm takes; others take more


def copy(text: str, terminal: Terminal) -> str:
    """What was done, in one line."""
    for command in _programs():
        try:
            done = subprocess.run(
                command,
                input=text.encode(errors="replace"),
                timeout=SECONDS,
                check=False,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return f"copied {len(text)} characters by {command[0]}"
    if not terminal.redraws:
        return "not copied: there is no clipboard here"
    packed = base64.b64encode(text.encode(errors="replace")).decode()
    terminal.file.write(f"\x1b]52;c;{packed}\x07")
    terminal.file.flush()
    said = f"asked the terminal to copy {len(text)} characters (OSC 52); not every terminal does"
    return said + (", and hardly one so many" if len(packed) > LONGEST else "")


def _programs() -> list[list[str]]:
    """Those whose desktop is there."""
    wanted = []
    if sys.platform == "darwin":
        wanted.append(["pbcopy"])
    if os.environ.get("WAYLAND_DISPLAY"):
        wanted.append(["wl-copy"])
    if os.environ.get("DISPLAY"):
        wanted.append(["xclip", "-selection", "clipboard"])
    return [command for command in wanted if shutil.which(command[0])]
