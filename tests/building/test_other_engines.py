"""Other engines around a sharded model, and inside a model that is to be sharded: refused before anything moves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint, replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

import fsdp
from tests.support.models import loss_of, two_layers
from tests.support.states import DOORS

SAID = (
    "Sequential is sharded by fsdp, which averages its gradients over the ranks already; train it as it is, without "
    "DistributedDataParallel, DataParallel, replicate or torch's FSDP around it"
)
pytestmark = pytest.mark.usefixtures("one_process")


def by_fsdp2(module: nn.Module) -> nn.Module:
    return fsdp2(module, mesh=init_device_mesh("cpu", (1,)))  # type: ignore[return-value]


ENGINES = {"DistributedDataParallel": DistributedDataParallel, "replicate": replicate, "FSDP1": Fsdp1, "FSDP2": by_fsdp2}


class Outer(nn.Module):
    """A layer around a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 3)
        self.inner = inner


@DOORS
@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_around_a_sharded_model_is_refused(door: Any, engine: str) -> None:
    model = door(two_layers())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(2):
        with pytest.raises(fsdp.ShardingError, match=SAID):
            ENGINES[engine](model)
    loss_of(model(torch.ones(2, 3))).backward()
    assert all(torch.equal(p, before[name]) and p.grad is not None for name, p in model.named_parameters())


@pytest.mark.parametrize("engine", ["FSDP1", "FSDP2"])
def test_an_engine_around_a_module_that_contains_a_sharded_one_is_refused(engine: str) -> None:
    with pytest.raises(fsdp.ShardingError, match=SAID):
        ENGINES[engine](Outer(fsdp.fully_shard(two_layers())))


def test_a_unit_cannot_be_copied_to_other_devices_by_data_parallel() -> None:
    model = fsdp.fully_shard(two_layers())
    with pytest.raises(fsdp.ShardingError, match=SAID):
        model._replicate_for_data_parallel()
    # without several devices DataParallel only calls the module
    loss_of(DataParallel(model)(torch.ones(2, 3))).backward()
    assert model[0].weight.grad is not None


def test_torch_may_list_its_own_modules_in_a_sharded_model() -> None:
    assert Fsdp1.fsdp_modules(Outer(fsdp.fully_shard(two_layers()))) == []


def test_a_composable_function_from_before_wrapping_stays_recorded() -> None:
    model = two_layers()
    checkpoint(model[0])
    fsdp.fully_shard(model, auto_wrap_policy={nn.Linear})
    with pytest.raises(AssertionError, match="checkpoint has already been applied"):
        checkpoint(model[0])
    loss_of(model(torch.ones(2, 3))).backward()


@pytest.mark.parametrize(
    ("wrap", "text"),
    [
        (DistributedDataParallel, "torch's DistributedDataParallel has wrapped its DistributedDataParallel"),
        (DataParallel, "torch's DataParallel has wrapped its DataParallel"),
        (replicate, "torch's replicate has wrapped its DDP"),
        (by_fsdp2, "torch's FSDP has wrapped its FSDP"),
    ],
    ids=["DistributedDataParallel", "DataParallel", "replicate", "FSDP2"],
)
@pytest.mark.parametrize("inside", [False, True], ids=["itself", "a part"])
def test_a_module_that_another_engine_has_wrapped_is_refused(wrap: Callable[[Any], Any], text: str, inside: bool) -> None:
    model = two_layers()
    if inside:
        model[1] = wrap(model[1])
    else:
        model = wrap(model)
    with pytest.raises(fsdp.ShardingError, match=rf"unit '\w+': {text}.*reduces or shards by itself; wrap the plain module"):
        fsdp.fully_shard(model)


def test_a_parameter_that_is_distributed_already_is_refused() -> None:
    model = two_layers()
    model[1].weight = nn.Parameter(distribute_tensor(torch.eye(3), init_device_mesh("cpu", (1,))))
    with pytest.raises(fsdp.ShardingError, match=r"parameter '1.weight' is a DTensor: give the mesh to cut it over as well"):
        fsdp.fully_shard(model)
