"""Hypothesis profiles, the order of files, the wheel, and a group of one process."""

import gc
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# an assertion that fails in a helper shows its values, as in a test
pytest.register_assert_rewrite("tests.support")

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, max_examples=1_000_000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# a collection of garbage after each 700 new objects, as is usual, takes a seventh of the time of the tests
gc.set_threshold(50_000, 20, 20)

FIRST = (
    "device/test_accelerator.py",
    "device/test_races.py",
    "state_machine_tests/test_bucket.py",
    "patterns/test_simulated.py",
    "patterns/test_gloo.py",
    "equivalence/test_gloo.py",
    "equivalence/test_peers.py",
    "examples/test_examples.py",
    "examples/test_train.py",
    "commands/planning/test_plan.py",
    "comm/failure/test_dimensions.py",
    "checkpoint/test_matrix.py",
)
"""The files that take longest, see docs/development/testing.md."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A part of the tests, see everything.py. Files that take long come first: no process is left alone with one at the end."""
    from tests.support.everything import runs  # after its assertions are registered

    items[:] = filter(runs, items)
    first = {Path(__file__).parent / name for name in FIRST}
    assert all(path.exists() for path in first), first
    items.sort(key=lambda item: item.path not in first)


def pytest_collection_finish() -> None:
    """The first optimizer imports the compiler. pytest's own process, which runs no test with `-n 2`, imports no torch."""
    import_module("torch._dynamo")
    # as in the processes over gloo: threads sum in an order of their own, and cost more than they bring
    import_module("torch").set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> None:
    """A collection of garbage need not search, each time, what was there before this file: torch, the tests, their results."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this repository."""
    from tests.support.wheel import build_wheel  # after its assertions are registered

    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder on which nothing but that wheel is installed, to be named in PYTHONPATH."""
    from tests.support.wheel import unpack

    return unpack(wheel, tmp_path_factory.mktemp("installed"))


@pytest.fixture
def one_process() -> Iterator[None]:
    """A real group of one rank."""
    dist = import_module("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
