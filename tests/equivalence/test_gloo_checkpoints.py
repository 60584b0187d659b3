"""Checkpoints over real processes: to and from FSDP2, by torch's own calls, and when a rank is killed."""

from pathlib import Path

import pytest
import torch
from models import CASES
from test_gloo import run, start

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
    rank_0, _ = run(2, tmp_path, "from FSDP2", "into FSDP2", "plain DCP")
    for program in ("from FSDP2", "into FSDP2"):
        theirs, ours = rank_0[program]
        assert set(theirs["optimizer"]) == set(dict(CASES["net"].model().named_parameters()))
        assert_equal(ours, theirs)
    assert_equal(rank_0["plain DCP"], dict(CASES["net"].model().state_dict()))


def test_when_a_rank_is_killed_the_other_hears_of_it_and_the_checkpoint_before_is_read(tmp_path: Path) -> None:
    ranks = [start(rank, 2, tmp_path, "killed") for rank in range(2)]
    try:
        assert ranks[1].wait(timeout=60) == -9
        assert ranks[0].wait(timeout=60) == 0
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    _, seconds = torch.load(tmp_path / "told.pt")
    assert seconds < 10
    assert [path.name for path in (tmp_path / "run").glob("[!.]*")] == ["1"]
    (tmp_path / "store").unlink()
    (found,) = run(1, tmp_path, "reads alone")
    assert_equal(found["reads alone"], dict(CASES["net"].model().state_dict()))
