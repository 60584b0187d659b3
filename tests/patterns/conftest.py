"""What both worlds share: one thread, little garbage to search, and processes that run beside the simulated world."""

import gc
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.patterns.harness import Outcome
from tests.patterns.processes import SIZES, run_all

HERE = Path(__file__).resolve().parent


def _waits(item: pytest.Item) -> bool:
    """For processes that were started before."""
    return item.path.name == "test_gloo.py" and item.path.parent == HERE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the tests in this folder, those that wait for processes come last."""
    places = [place for place, item in enumerate(items) if item.path.parent == HERE]
    for place, item in zip(places, sorted((items[place] for place in places), key=_waits), strict=True):
        items[place] = item


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """As in the processes over gloo: threads sum in an order of their own, and cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="package")
def imported_modules_are_no_garbage() -> Iterator[None]:
    """A thousand models are made and dropped; without this the collector searches all of torch each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="package")
def processes(request: pytest.FixtureRequest) -> Iterator[dict[int, Future[dict[str, list[Outcome]]]]]:
    """Of every size the outcomes of all patterns. Started before the simulated world, if they are asked for at all."""
    wanted = any(map(_waits, request.session.items))
    with ThreadPoolExecutor(len(SIZES)) as pool:
        yield {size: pool.submit(run_all, size) for size in SIZES if wanted}
