"""`python -m dgemma_local.bench`: `dgemma bench` for a machine that has torch and triton, and nothing else."""

import argparse
import sys
from collections.abc import Sequence

from dgemma_local.bench import command, report
from dgemma_local.errors import INTERRUPTED, DgemmaError


def parser() -> argparse.ArgumentParser:
    """The flags of `dgemma bench`; `command.checked` says what they may hold."""
    flags = argparse.ArgumentParser(prog="python -m dgemma_local.bench", description="Measure a model on this machine.")
    flags.add_argument("--demo", action="store_true")
    flags.add_argument("-m", "--model", metavar="NAME")
    flags.add_argument("--synthetic", metavar=command.SYNTHETIC)
    flags.add_argument("--layout", metavar="L")
    flags.add_argument("--protocol", metavar="P,…")
    flags.add_argument("--against", metavar="WHAT")
    flags.add_argument("--runs", type=int, default=command.DEFAULT_RUNS, metavar="N")
    flags.add_argument("--context", type=int, metavar="N")
    flags.add_argument("--seed", type=int, default=0, metavar="N")
    flags.add_argument("--json", metavar="FILE")
    flags.add_argument("--device")
    flags.add_argument("-q", "--quiet", action="store_true")
    return flags


def main(arguments: Sequence[str] | None = None) -> int:
    """-> the exit code; a user's mistakes are two lines on stderr, as in `dgemma`."""
    given = vars(parser().parse_args(arguments))
    file, quiet = given.pop("json"), given.pop("quiet")
    try:
        request = command.checked(**given)
        target = command.writable(file)
        document = command.perform(request, (lambda text: None) if quiet else _say)
        if target is not None:
            target.write_text(report.line(document) + "\n", encoding="utf-8")
    except DgemmaError as error:
        _say(f"error: {error.what}\n  fix: {error.fix}")
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    lines = [*report.head(document)]
    for table in report.tables(document):
        lines += ["", *report.plain(table)]
    sys.stdout.write("\n".join([*lines, report.line(document)]) + "\n")
    return 0


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
