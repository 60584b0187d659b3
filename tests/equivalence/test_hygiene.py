"""Models that come and go on simulated ranks leave nothing behind (on real ranks: test_ends.py), and print as what they are."""

import gc
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from tests.equivalence.hygiene_programs import X, round_of_training
from tests.support.models import Block, loss_of, make_net
from tests.support.ranks import on_ranks


def test_twenty_rounds_in_the_simulated_world_leave_nothing_behind() -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        return threading.active_count(), sum(issubclass(type(one), Tensor) for one in gc.get_objects())

    fsdp.simulate(2, lambda rank: round_of_training())
    before = held()
    fsdp.simulate(2, lambda rank: [round_of_training() for _ in range(20)] and None)
    assert held() == before


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("door", [fsdp.FullyShardedDataParallel, fsdp.fully_shard])
@pytest.mark.parametrize("size", [1, 2])
@on_ranks("size")
def test_a_pickle_is_refused_with_a_remedy_that_works(rank: int, size: int, door: Any, strategy: str) -> None:
    """The values of the model's own state dict are refused as well, also where each rank has all parameters."""
    model = door(make_net(), auto_wrap_policy={Block}, sharding_strategy=strategy)
    with pytest.raises(fsdp.ShardingError, match=r"what fsdp.full_state_dict\(model\) returns on rank 0 .every rank calls it"):
        pickle.dumps(model)
    with pytest.raises(fsdp.ShardingError, match="cannot be pickled"):
        pickle.dumps(model.state_dict())
    pickle.dumps(fsdp.full_state_dict(model))


@on_ranks(2)
def test_printing_a_model_at_any_time_shows_what_is_there(rank: int) -> None:
    """Whatever is reached through the module has memory, also while its whole parameters have none."""
    model = fsdp.FullyShardedDataParallel(make_net(), auto_wrap_policy={Block})
    printed: list[str] = []

    def look(*_: Any) -> None:
        printed.append(repr(model))
        printed.extend(repr(p) for p in model.parameters())
        printed.extend(repr(getattr(one, "weight", None)) for one in model.modules())
        printed.extend(repr(p) for one in model.modules() for p in one._parameters.values())

    for module in (model.blocks[1], model.blocks[2].up, model.leave):
        module.register_forward_hook(look)
        module.register_full_backward_hook(look)
    for _ in range(2):
        loss_of(model(X)).backward()
        look()
    assert all(printed)


def test_a_module_that_prints_its_weights_may_be_one() -> None:
    class Shows(nn.Linear):
        def extra_repr(self) -> str:
            return f"{fsdp.to_local(self.weight).detach().tolist()}"

    def one_rank(rank: int) -> tuple[str, str]:
        model = fsdp.fully_shard(nn.Sequential(Shows(2, 2), nn.Linear(2, 2)), auto_wrap_policy={Shows})
        loss = model(torch.ones(1, 2)).sum()
        between = repr(model)
        loss.backward()
        return between, repr(model)

    for between, after in fsdp.simulate(2, one_rank):
        assert between.startswith("Sequential(\n  (0): Shows([") and after == between
