"""`python -m dgemma_local` is `dgemma`."""

from dgemma_local.cli import main

main()
