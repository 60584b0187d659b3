"""What `story` tells is what happened."""

import pytest
from torch import nn

import fsdp
from tests.support.models import Block, Net, X, loss_of, make_net


def test_a_step_can_be_read() -> None:
    def one_rank(rank: int) -> list[str]:
        model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block}, prefetch=0)
        told = [fsdp.story(model)]
        model.blocks[1].register_forward_hook(lambda *_: told.append(fsdp.story(model)))
        loss_of(model(X)).backward()
        return [*told, fsdp.story(model)]

    before, inside, after = fsdp.simulate(2, one_rank)[1]
    shards = sum(-(-p.numel() // 2) * 4 for p in Net().parameters())
    assert before.splitlines()[0].startswith("root 'Net', rank 1 of 2, backward RESTING; bytes held: ")
    held = int(before.splitlines()[0].rpartition("held: ")[2].split()[0].replace(",", ""))
    assert shards <= held <= 1.1 * shards
    assert "  shard: gather_objects fully_shard\n  reduce: nothing called yet" in before and before.endswith("nothing yet")

    calls = "gather_objects fully_shard, all_gather Net, all_gather blocks.0, all_gather blocks.1"
    assert f"  shard: {calls}" in inside.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in inside.splitlines()[3:]}
    assert rows["Net"] == ["FORWARD", "UNSHARDED", "PRE_FORWARD"]
    assert rows["blocks.0"] == ["IDLE", "SHARDED", "PRE_FORWARD", "POST_FORWARD"]
    assert rows["blocks.2"] == ["IDLE", "SHARDED", "nothing", "yet"]

    assert "reduce_scatter blocks.2" in after and "all_reduce which gradients came" in after
    rows = {line.split()[0]: line.split()[1:] for line in after.splitlines()[3:]}
    assert rows["blocks.1"][:2] == ["IDLE", "SHARDED"] and rows["blocks.1"][-1] == "FINAL_CALLBACK"
    assert "PRE_BACKWARD" in rows["blocks.1"] and "POST_BACKWARD" in rows["blocks.1"]


def test_every_communicator_of_a_mesh_is_listed_once() -> None:
    def one_rank(rank: int) -> list[str]:
        told = []
        for options in ({}, {"sharding_strategy": "NO_SHARD"}, {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 2)}):
            model = fsdp.fully_shard(make_net(), **options)
            loss_of(model(X)).backward()
            told.append(" ".join(line.split(":")[0].strip() for line in fsdp.story(model).splitlines()[1:-1]))
        return told

    assert fsdp.simulate(4, one_rank)[0] == ["shard reduce", "replica world", "shard reduce replica world"]


def test_a_module_without_a_story_is_refused() -> None:
    with pytest.raises(fsdp.ShardingError, match="story: Linear contains no unit"):
        fsdp.story(nn.Linear(2, 2))
