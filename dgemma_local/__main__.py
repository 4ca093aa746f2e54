"""`dgemma`, and `python -m dgemma_local`: a signal ends it without a traceback, imports included."""

import signal


def main() -> None:
    """The console script."""
    default = (signal.default_int_handler, signal.SIG_DFL)  # a background job ignores Ctrl-C, nohup SIGHUP
    handled = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))
        if signal.getsignal(number) in default
    ]
    for number in handled:
        signal.signal(number, signal.SIG_DFL)
    from dgemma_local.interrupts import leave_early
    from dgemma_local.streams import release

    for number in handled:
        signal.signal(number, leave_early)
    from dgemma_local import cli

    try:
        cli.main()
    finally:
        release()


if __name__ == "__main__":
    main()
