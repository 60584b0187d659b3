"""fsdp.compat.torch_fsdp over gloo processes: an old script gives the losses of torch's FSDP1, and sharded states load."""

from pathlib import Path

import pytest
import torch

from tests.support.processes import results_of

pytestmark = pytest.mark.gloo
NO_LOCAL = "DeviceMesh is not compatible with LOCAL_STATE_DICT. Use SHARDED_STATE_DICT, which gives DTensors."

NOT_KNOWN = ["get_optimizer_state_dict", "set_model_state_dict", "get_model_state_dict"]


def test_an_old_script_gives_the_losses_of_torch_and_sharded_states_load(tmp_path: Path) -> None:
    results = results_of("tests.compat.fsdp1.torch_fsdp_program", 2, tmp_path)
    for result in results:
        losses, weights = result["ours"]
        torch.testing.assert_close(losses, result["torch"][0])
        assert list(weights) == list(result["torch"][1])
        for name, value in result["torch"][1].items():
            torch.testing.assert_close(weights[name], value, msg=name)
        assert result["SHARDED_STATE_DICT"] == ({"ShardedTensor"}, True)
        assert result["LOCAL_STATE_DICT"] == ({"ShardedTensor"}, True)
        assert result["local with a mesh"] == [NO_LOCAL] * 2
        assert result["optimizer"]
        assert result["by torch"][:2] == [True, True]
        said = "does not know this class, and would take this rank's part of a state for all of it, or nothing: "
        assert [text.split()[0] for text in result["by torch"][2] if said in text] == NOT_KNOWN
        assert len(result["resumed"]) == 11 and all(result["resumed"].values()), result["resumed"]
    assert results[0]["order"] == results[1]["order"] and len(results[0]["order"]) > 2


def test_rank_0_alone_gives_the_states_of_a_model_with_replicas(tmp_path: Path) -> None:
    assert results_of("tests.compat.replicas_program", 4, tmp_path) == [{"mesh": True, "groups": True}] * 4


def test_a_model_with_tensor_parallelism_trains_and_is_saved_as_by_torch(tmp_path: Path) -> None:
    for result in results_of("tests.compat.fsdp1.parallel_program", 4, tmp_path):
        for name, (ours, theirs) in result["pairs"].items():
            assert ours["first"] == ours["again"], name
            torch.testing.assert_close(ours["losses"] + ours["first"], theirs["losses"] + theirs["first"], msg=name)
            for kind in ("weights", "state"):
                assert ours["placements"][kind] == theirs["placements"][kind], name
                torch.testing.assert_close(ours[kind], theirs[kind], msg=name)
        torch.testing.assert_close(*result["norms"])
        for losses, expected in result["one dimension"]:
            torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
        assert result["full"]
        without_mesh, no_shard, with_grads = result["refusals"]
        assert with_grads.endswith("with_grads=True needs a model without tensor parallelism; read p.grad.full_tensor().")
        assert "is a DTensor: give the mesh to cut it over as well" in without_mesh
        assert 'leave out plain_shards and "NO_SHARD"' in no_shard
