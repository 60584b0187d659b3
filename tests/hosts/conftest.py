"""Hosts on a bridge, or the reason why this machine has none."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.hosts import Hosts, hosts_apart, why_no_hosts


@pytest.fixture
def make_hosts(tmp_path: Path) -> Iterator[Callable[[int], Hosts]]:
    """Makes hosts that are removed after the test."""
    if reason := why_no_hosts():
        pytest.skip(reason)
    with ExitStack() as stack:
        yield lambda count: stack.enter_context(hosts_apart(count, tmp_path))
