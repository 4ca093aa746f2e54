"""Settings of every test: hypothesis draws the same examples every time, torch uses one thread, no one's own defaults."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("the same", deadline=None, derandomize=True)  # and measures no time on a busy machine
settings.load_profile("the same")
os.environ["DGEMMA_CONFIG"] = os.devnull  # of whoever runs the tests; their processes inherit it


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Each operation of a tiny model takes microseconds; a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
