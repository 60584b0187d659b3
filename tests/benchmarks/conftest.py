"""Benchmarks run in the process of the tests; what one sets for its process is put back after each test."""

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import result_file
import torch


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """What a benchmark sets for its process, where that is the process of the tests."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
    gc.unfreeze()


@pytest.fixture
def report_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """What the main program of a benchmark writes with these arguments. It starts no process, which costs more than all else."""

    def run(benchmark: ModuleType, *arguments: str) -> dict[str, Any]:
        out = tmp_path / f"{benchmark.__name__}.json"
        monkeypatch.setattr(sys, "argv", [f"{benchmark.__name__}.py", *arguments, "--out", str(out)])
        if hasattr(benchmark, "elsewhere"):
            monkeypatch.setattr(benchmark, "elsewhere", lambda measure, settings, timeout: measure(settings))
        benchmark.main()
        return result_file.read(out)

    return run
