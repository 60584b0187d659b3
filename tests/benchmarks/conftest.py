"""The benchmarks are scripts in a folder of their own; the models of the tests live beside the tests of fsdp."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tests" / "fsdp")]


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """What a benchmark sets for its process, where that is the process of the tests."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
    gc.unfreeze()
