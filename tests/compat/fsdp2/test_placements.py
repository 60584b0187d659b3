"""Parameters that are cut along another dimension than the first, or by tensor parallelism as well, over gloo."""

from pathlib import Path

import pytest
import torch

from tests.support.processes import results_of

pytestmark = pytest.mark.gloo

REFUSED = (
    "shard_placement_fn chooses the placements of DTensors; give dtensors=True",
    "shard_placement_fn must be a function of a parameter, not 7",
    "shard_placement_fn must return Shard(dim) or None; for 'weight' it returned 1",
    "shard_placement_fn: Shard dim 1 is invalid for 1D tensor 'bias'",
    "the model is built differently on different ranks",
)


def test_parameters_that_are_cut_along_their_last_dimension_are_trained(tmp_path: Path) -> None:
    for result in results_of("tests.compat.fsdp2.placements_program", 2, tmp_path):
        for said, text in zip(result.pop("refused"), REFUSED, strict=True):
            assert text in said
        placements, shapes = result.pop("placements"), result.pop("rows")
        assert placements["inner.weight"] == "(Shard(dim=1),)"
        assert shapes[0][0] == 7 and shapes[0][1] in (2, 3)
        assert all(result.values()), result


def test_tensor_parallel_parameters_are_cut_once_more(tmp_path: Path) -> None:
    for result in results_of("tests.compat.fsdp2.parallel_program", 4, tmp_path):
        for name in ("rows", "other"):
            theirs, mine = result[name]["torch"], result[name]["ours"]
            assert mine["placements"] == theirs["placements"]
            torch.testing.assert_close(mine["losses"], theirs["losses"])
            torch.testing.assert_close(mine["norms"], theirs["norms"])
            torch.testing.assert_close(mine["full"], theirs["full"])
            torch.testing.assert_close(mine["state"], theirs["state"])
        theirs, mine = result["experts"]["torch"], result["experts"]["ours"]
        if theirs is not None:  # older versions of torch have one mesh for a unit
            assert mine["placements"] == theirs["placements"]
            torch.testing.assert_close((mine["losses"], mine["full"]), (theirs["losses"], theirs["full"]))
        assert "dim=1" in result["other"]["ours"]["placements"]["0.up.weight"]
        for said, text in zip(
            result["refusals"],
            (
                "is a DTensor: give the mesh to cut it over as well",
                "which cannot be joined with",
                "is a DTensor: give the mesh to cut it over as well",
                "is a TwoTensor, a tensor class with operators of its own",
                "copy.deepcopy: FSDP does not support deepcopy of 'Sequential', which FSDP2's fully_shard has wrapped",
            ),
            strict=True,
        ):
            assert text in said
