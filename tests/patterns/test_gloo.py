"""Every pattern over gloo, with two processes (and three if all is asked for). One start of the processes runs them all."""

from concurrent.futures import Future

import pytest

from tests.patterns.every import PATTERNS
from tests.patterns.harness import Outcome, compare
from tests.patterns.processes import SIZES

pytestmark = pytest.mark.gloo

CASES = [(name, size) for size in SIZES for name, of in PATTERNS.items() if size == 2 or not of.slow]


@pytest.mark.parametrize(("name", "size"), CASES, ids=[f"{name}, {size} processes" for name, size in CASES])
def test_gloo(name: str, size: int, processes: dict[int, Future[dict[str, list[Outcome]]]]) -> None:
    compare(PATTERNS[name], processes[size].result()[name])
