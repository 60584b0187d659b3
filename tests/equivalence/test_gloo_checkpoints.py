"""Checkpoints over real processes: to and from FSDP2, by torch's own calls, and in the background while training goes on."""

from pathlib import Path

import pytest
import torch

from tests.equivalence.test_gloo import run
from tests.support.models import CASES

pytestmark = pytest.mark.gloo


def assert_equal(found: object, wanted: object) -> None:
    """Nested dicts of tensors, bit for bit."""
    if isinstance(wanted, dict):
        assert isinstance(found, dict) and set(found) == set(wanted)
        for key in wanted:
            assert_equal(found[key], wanted[key])
    else:
        assert isinstance(found, torch.Tensor) and isinstance(wanted, torch.Tensor) and torch.equal(found, wanted)


def test_fsdp2_reads_what_we_save_and_we_read_what_it_saves(tmp_path: Path) -> None:
    rank_0, _ = run(2, tmp_path, "from FSDP2", "into FSDP2", "plain DCP", "in the background")
    for program in ("from FSDP2", "into FSDP2"):
        theirs, ours = rank_0[program]
        assert set(theirs["optimizer"]) == set(dict(CASES["net"].model().named_parameters()))
        assert_equal(ours, theirs)
    assert_equal(rank_0["plain DCP"], dict(CASES["net"].model().state_dict()))
    for found, wanted in rank_0["in the background"]:
        assert_equal(found, wanted)
