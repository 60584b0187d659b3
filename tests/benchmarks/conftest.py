"""What a benchmark sets for its process is put back after each test."""

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """What a benchmark sets for its process, where that is the process of the tests."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
    gc.unfreeze()
