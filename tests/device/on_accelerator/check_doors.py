"""The doors of FSDP1, FSDP2 and fairscale on the accelerator train as on the host: with CPU offload, and moved after wrapping."""

from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdp
from fsdp.compat import fairscale, fully_shard, torch_fsdp
from fsdp.compat.fairscale import sharding as fairscale_sharding
from fsdp.compat.fsdp1 import sharding
from fsdp.compat.torch_fsdp import CPUOffload, ShardingStrategy, StateDictType
from tests.device.on_accelerator.check_training import batch
from tests.support.accelerator.device import NAME, Scheduler, load
from tests.support.accelerator.stories import first_difference
from tests.support.accelerator.world import run
from tests.support.models import Block, Net, loss_of

load()
torch.set_num_threads(1)
STRATEGIES: Final = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)


def net() -> nn.Module:
    torch.manual_seed(3)
    return Net(2)


def fsdp1(module: nn.Module, offloads: bool, **options: Any) -> Any:
    return torch_fsdp.FullyShardedDataParallel(
        module,
        cpu_offload=CPUOffload(offloads),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        **options,
    )


def of_fairscale(module: Any, **options: Any) -> Any:
    module.blocks = nn.ModuleList(fairscale.FullyShardedDataParallel(one, **options) for one in module.blocks)
    return fairscale.FullyShardedDataParallel(module, **options)


def step(model: Any, optimizer: torch.optim.Optimizer, rank: int, device: str, number: int, batches_on: str = "") -> None:
    with model.no_sync():
        loss_of(model(batch(rank, number, batches_on or device))).backward()
    loss_of(model(batch(rank, number + 1, batches_on or device))).backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


def on_host(values: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.cpu().clone() for name, value in values.items()}


def is_on_host(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *states))


def fsdp1_program(rank: int, device: str, strategy: ShardingStrategy) -> dict[str, Tensor]:
    """Train, save the states, train on, load the states into another model, and train that one on."""
    FSDP = torch_fsdp.FullyShardedDataParallel
    model = fsdp1(net().to(device), device != "cpu", sharding_strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    step(model, optimizer, rank, device, 0)
    assert is_on_host(model, optimizer)
    found = {}
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        weights, state = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    step(model, optimizer, rank, device, 2)
    other = fsdp1(net().to(device), device != "cpu", sharding_strategy=strategy).float()
    assert other.compute_device == torch.device(device)
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.01, foreach=True)
    with FSDP.state_dict_type(other, StateDictType.FULL_STATE_DICT):
        other.load_state_dict(weights)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(other, optimizer, state))
    step(other, optimizer, rank, device, 2, batches_on="cpu")
    with FSDP.summon_full_params(other), torch.no_grad():
        found |= on_host({f"summoned {name}": p for name, p in other.named_parameters()})
    for name, one in (("first", model), ("second", other)):
        found |= on_host({f"{name} {key}": value for key, value in one.state_dict().items()})
    assert all(torch.equal(found[f"first {name}"], found[f"second {name}"]) for name in weights)
    return found


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_fsdp1_with_cpu_offload_trains_as_on_the_host(strategy: ShardingStrategy) -> None:
    wanted = fsdp.simulate(2, lambda rank: fsdp1_program(rank, "cpu", strategy))
    found = run(2, lambda rank: fsdp1_program(rank, f"{NAME}:{rank}", strategy), Scheduler.RANDOM, 1)
    assert first_difference(found, wanted) is None


def test_a_module_on_the_host_that_is_offloaded_computes_on_the_accelerator() -> None:
    def devices(rank: int) -> list[torch.device]:
        module = net()
        own = list(module.parameters())
        return [
            find(None, offloads, module, own)
            for find, offloads in (
                (sharding.computing_device, CPUOffload(True)),
                (sharding.computing_device, CPUOffload(False)),
                (fairscale_sharding.computing_device, True),
                (fairscale_sharding.computing_device, False),
            )
        ]

    for rank, found in enumerate(run(2, devices, Scheduler.EAGER, 0)):
        assert found == [torch.device(NAME, rank), torch.device("cpu")] * 2


def fairscale_program(rank: int, device: str, flat: bool, way: str) -> dict[str, Tensor]:
    """Train, save the states, train on, and load the states into another model."""

    def make() -> Any:
        if way == "offloaded":
            return of_fairscale(net().to(device), flatten_parameters=flat, cpu_offload=device != "cpu")
        made = of_fairscale(net().to(device), flatten_parameters=flat).cpu()
        assert made.compute_device == torch.device("cpu") and is_on_host(made, torch.optim.SGD(made.parameters()))
        return made.to(device)

    model = make()
    if way == "moved":
        model.blocks[0].cpu().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    step(model, optimizer, rank, device, 0)
    assert is_on_host(model, optimizer) is (way == "offloaded" or device == "cpu")
    assert model.compute_device == model.state_dict_device == torch.device(device)
    weights, local = on_host(model.state_dict()), model.local_state_dict()
    assert all(value.device.type == "cpu" for value in model.state_dict().values()) is (way == "offloaded" or device == "cpu")
    gathered = model.gather_full_optim_state_dict(optimizer) if flat else None
    step(model, optimizer, rank, device, 2)
    other = make()
    other.load_state_dict(weights)
    other.load_local_state_dict(local)
    found = on_host({f"loaded {name}": value for name, value in other.state_dict().items()})
    for key, state in (gathered or {"state": {}})["state"].items():
        found |= {f"state {key} {name}": value for name, value in state.items() if isinstance(value, Tensor)}
    return found | on_host({f"trained {name}": value for name, value in model.state_dict().items()})


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("way", ["offloaded", "moved"])
def test_fairscale_trains_as_on_the_host(flat: bool, way: str) -> None:
    wanted = fsdp.simulate(2, lambda rank: fairscale_program(rank, "cpu", flat, way))
    found = run(2, lambda rank: fairscale_program(rank, f"{NAME}:{rank}", flat, way), Scheduler.RANDOM, 1)
    assert first_difference(found, wanted) is None


def fsdp2_program(rank: int, device: str) -> dict[str, Tensor]:
    model: Any = net().to(device)
    policy = fully_shard.CPUOffloadPolicy()
    for block in model.blocks:
        fully_shard.fully_shard(block, offload_policy=policy)
    fully_shard.fully_shard(model, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    for number in range(3):
        loss_of(model(batch(rank, number, device))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert is_on_host(model, optimizer)
    return on_host(fsdp.full_state_dict(model, rank0_only=False))


def test_fsdp2_with_cpu_offload_trains_as_on_the_host() -> None:
    wanted = fsdp.simulate(2, lambda rank: fsdp2_program(rank, "cpu"))
    found = run(2, lambda rank: fsdp2_program(rank, f"{NAME}:{rank}"), Scheduler.RANDOM, 1)
    assert first_difference(found, wanted) is None


def test_fsdp2_refuses_to_offload_a_module_without_memory() -> None:
    def program(rank: int) -> None:
        with pytest.raises(fsdp.ShardingError, match="CPUOffloadPolicy with 'weight' on the meta device"):
            fully_shard.fully_shard(nn.Linear(2, 2, device="meta"), offload_policy=fully_shard.CPUOffloadPolicy())

    run(2, program, Scheduler.EAGER, 0)
