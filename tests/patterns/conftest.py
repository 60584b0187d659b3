"""What both worlds share: little garbage to search; and the processes of the real one."""

import gc
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.patterns.harness import Outcome
from tests.patterns.processes import SIZES, run_all


@pytest.fixture(autouse=True, scope="package")
def imported_modules_are_no_garbage() -> Iterator[None]:
    """A thousand models are made and dropped; without this the collector searches all of torch each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="package")
def processes() -> Iterator[dict[int, Future[dict[str, list[Outcome]]]]]:
    """Of every size the outcomes of all patterns, from when somebody asks: other tests run beside, in a process of their own."""
    with ThreadPoolExecutor(len(SIZES)) as pool:
        yield {size: pool.submit(run_all, size) for size in SIZES}
