"""Checkpoints over real processes: to and from FSDP2, by torch's own calls, and in the background while training goes on."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.equivalence.test_gloo import run
from tests.support.everything import EVERYTHING
from tests.support.models import CASES

pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    names = ("from FSDP2", "into FSDP2", "plain DCP", "in the background", "own versions", "first steps")
    return run(2, tmp_path_factory.mktemp("ranks"), *names)


def assert_equal(found: object, wanted: object) -> None:
    """Nested dicts of tensors, bit for bit."""
    if isinstance(wanted, dict):
        assert isinstance(found, dict) and set(found) == set(wanted)
        for key in wanted:
            assert_equal(found[key], wanted[key])
    else:
        assert isinstance(found, torch.Tensor) and isinstance(wanted, torch.Tensor) and torch.equal(found, wanted)


def test_fsdp2_reads_what_we_save_and_we_read_what_it_saves(two_ranks: list[dict[str, Any]]) -> None:
    rank_0, rank_1 = two_ranks
    for program in ("from FSDP2", "into FSDP2"):
        theirs, ours = rank_0[program]
        assert set(theirs["optimizer"]) == set(dict(CASES["net"].model().named_parameters()))
        assert_equal(ours, theirs)
    assert_equal(rank_0["plain DCP"], dict(CASES["net"].model().state_dict()))
    for found, wanted in (*rank_0["in the background"], *rank_0["own versions"], *rank_1["own versions"]):
        assert_equal(found, wanted)
    means = [own["own versions"][0][0]["1.running_mean"] for own in (rank_0, rank_1)]
    assert not torch.equal(*means), "the ranks had the same statistics, and nothing was tested"


def test_what_newcomers_meet_first_is_right_or_said_on_every_rank(two_ranks: list[dict[str, Any]]) -> None:
    wanted, found = two_ranks[0]["first steps"]["loaded"]
    assert wanted["model"] and wanted["optimizer"]
    assert_equal(found, wanted)
    for one in (rank["first steps"] for rank in two_ranks):
        assert one["keys"] == (["leave.bias"], ["more"])
        nothing_saved, empty, loaded, option = one["texts"]
        assert "load: the path is None, as fsdp.latest returns where no checkpoint is finished" in nothing_saved
        assert "load_full_state_dict: rank 0 gives an empty state dict" in empty
        assert loaded == ""
        assert "unknown option 'device_id': move the module to its device" in option and "use_orig_params" not in option


@pytest.mark.parametrize(("size", "other"), [(2, 3), (3, 2)] if EVERYTHING else [(2, 3)])
def test_torchs_functions_bring_model_and_optimizer_to_other_ranks(size: int, other: int, tmp_path: Path) -> None:
    """Its own save to another number of ranks; and full state is gathered to rank 0, and loaded from there."""
    saved = run(size, tmp_path, "save both")[0]["save both"]
    (tmp_path / "store").unlink()  # the next start is a group of its own
    ranks = run(other, tmp_path, "load both", "full by torch")
    for loaded in ranks[0]["load both"]:
        assert_equal(loaded, saved)
    for rank, one in enumerate(ranks):
        for number, model in enumerate(one["full by torch"]):
            wanted = ranks[0]["full by torch"][number]["ours"]
            assert wanted["model"] and wanted["optimizer"]
            assert_equal(model["kept"], wanted if rank == 0 else {"model": {}, "optimizer": {}})
            assert_equal(model["everywhere"], wanted["model"])
            if rank == 0:
                assert_equal(model["loaded"], wanted)
