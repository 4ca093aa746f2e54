"""`python -m dgemma_local.bench`: `dgemma bench` for a machine that has torch and triton, and nothing else."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from dgemma_local import streams
from dgemma_local.bench import command, report, request
from dgemma_local.bench.json_file import JsonFile
from dgemma_local.errors import INTERRUPTED, DgemmaError


def parser() -> argparse.ArgumentParser:
    """The flags of `dgemma bench`; `request.checked` says what they may hold."""
    flags = argparse.ArgumentParser(prog="python -m dgemma_local.bench", description="Measure a model on this machine.")
    flags.add_argument("--demo", action="store_true")
    flags.add_argument("-m", "--model", metavar="NAME")
    flags.add_argument("--synthetic", metavar=request.SYNTHETIC)
    flags.add_argument("--layout", metavar="L")
    flags.add_argument("--protocol", metavar="P,…")
    flags.add_argument("--against", metavar="WHAT")
    flags.add_argument("--runs", type=int, default=request.DEFAULT_RUNS, metavar="N")
    flags.add_argument("--context", type=int, metavar="N")
    flags.add_argument("--seed", type=int, default=0, metavar="N")
    for part in request.FP8:
        flags.add_argument(f"--fp8-{part}", action="store_true")
    flags.add_argument("--dtype")
    flags.add_argument("--json", metavar="FILE")
    flags.add_argument("--device")
    flags.add_argument("-q", "--quiet", action="store_true")
    return flags


def main(arguments: Sequence[str] | None = None) -> int:
    """-> the exit code; a user's mistakes are two lines on stderr, as in `dgemma`."""
    try:
        try:
            return _run(arguments)
        finally:  # --help ends with an exception, and what it wrote may not be written yet
            sys.stdout.flush()
    except OSError as error:
        return streams.lost(error)


def _run(arguments: Sequence[str] | None) -> int:
    given = vars(parser().parse_args(arguments))
    name, quiet = given.pop("json"), given.pop("quiet")
    try:
        wanted = request.checked(**given)
        command.run(wanted, (lambda text: None) if quiet else streams.say, JsonFile(name, streams.say), _show)
    except DgemmaError as error:
        streams.say(f"error: {error.what}\n  fix: {error.fix}")
        return error.exit_code
    except KeyboardInterrupt:
        streams.say("interrupted")
        return INTERRUPTED
    return 0


def _show(document: Mapping[str, Any]) -> None:
    lines = [*report.head(document)]
    for table in report.tables(document):
        lines += ["", *report.plain(table)]
    sys.stdout.write("\n".join([*lines, report.line(document)]) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    streams.prepare()
    sys.exit(main())
