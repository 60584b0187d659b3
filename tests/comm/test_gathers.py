"""Which collectives of gloo a gather launches, on one host and between hosts."""

from pathlib import Path

import pytest

from tests.comm.gather_program import SIZES
from tests.support.processes import results_of

pytestmark = pytest.mark.gloo


def test_large_chunks_are_broadcast_on_one_host_and_go_round_the_ring_between_hosts(tmp_path: Path) -> None:
    small, large = SIZES
    for found in results_of("tests.comm.gather_program", 4, tmp_path):
        assert found[1] == {small: {"_allgather_base": 1}, large: {"broadcast": 4}}
        assert found[2] == {small: {"_allgather_base": 1}, large: {"_allgather_base": 1}}
