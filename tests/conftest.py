"""Settings of every test: the same examples of hypothesis, one thread of torch, nobody's own defaults and signals."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("the same", deadline=None, derandomize=True)  # and measures no time on a busy machine
settings.load_profile("the same")
os.environ["DGEMMA_CONFIG"] = os.devnull  # of whoever runs the tests; their processes inherit it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background job has it
    signal.signal(signal.SIGINT, signal.default_int_handler)
for ending in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):  # ignored under nohup
    signal.signal(ending, signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Each operation of a tiny model takes microseconds; a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
