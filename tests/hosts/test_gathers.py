"""What a gather sends from host to host, counted by the kernel."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.everything import EVERYTHING
from tests.support.hosts import Hosts

pytestmark = [pytest.mark.gloo, pytest.mark.skipif(not EVERYTHING, reason="FSDP_TESTS=all")]
RANKS = 2
"""Of a host."""


def test_a_gather_sends_each_chunk_once_over_each_link(make_hosts: Callable[[int], Hosts], tmp_path: Path) -> None:
    """Broadcasts would send 5 chunks from each of two hosts."""
    hosts = make_hosts(2)
    size = RANKS * len(hosts)
    arguments = [("tests.hosts.gathers", rank, size, tmp_path) for rank in range(size)]
    ranks = [hosts[rank // RANKS].start_rank(*given, output=tmp_path / f"{rank}.txt") for rank, given in enumerate(arguments)]
    for rank, one in enumerate(ranks):
        assert one.wait(60) == 0, (tmp_path / f"{rank}.txt").read_text()
    for rank in range(size):
        chunks = json.loads((tmp_path / f"{rank}.json").read_text())
        assert size - 1 <= chunks < 1.1 * (size - 1)
