"""Each mend that tools/take_out_mends.py takes out is still there, and the act that shows it shows that it is gone."""

from unittest.mock import patch

import pytest

from tools.take_out_mends import MENDS, is_noticed


@pytest.mark.parametrize("name", sorted(MENDS.keys() - {"forked processes"}))  # without which a process hangs for 20 seconds
def test_a_mend_that_is_taken_out_is_noticed(name: str) -> None:
    try:
        assert is_noticed(name, programs=0)
    finally:
        patch.stopall()
