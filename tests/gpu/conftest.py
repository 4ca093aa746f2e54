"""The GPU suite runs where it is asked for: `pytest -m gpu tests/gpu`. Without `-m gpu` nothing of it is selected.

On a machine without pytest: `python tests/gpu/run.py`. Without a card, as a rehearsal on small sizes:
`DGEMMA_GPU_SUITE_SMALL=1 TRITON_INTERPRET=1 pytest -m gpu tests/gpu`.
"""

import pytest
from gpu import real  # noqa: F401  first: a rehearsal mends the interpreter before a kernel is defined


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "gpu" not in config.getoption("markexpr", ""):
        config.hook.pytest_deselected(items=list(items))
        items.clear()
