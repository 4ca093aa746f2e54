"""`dgemma`, and `python -m dgemma_local`: Ctrl-C ends it without a traceback, imports included."""

import signal


def main() -> None:
    """The console script."""
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a background job ignores it
    if handled:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from dgemma_local.streams import leave_early, release

    if handled:
        signal.signal(signal.SIGINT, leave_early)
    from dgemma_local import cli

    try:
        cli.main()
    finally:
        release()


if __name__ == "__main__":
    main()
