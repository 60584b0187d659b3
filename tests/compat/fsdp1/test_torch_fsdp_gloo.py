"""fsdp.compat.torch_fsdp over gloo processes: an old script gives the losses of torch's FSDP1, and sharded states load."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from fsdp.compat import install, torch_fsdp
from fsdp.compat.torch_fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
)
from fsdp.errors import ShardingError
from tests.compat.fsdp1.test_optim_states import OPTIMIZERS, train, trained
from tests.compat.fsdp1.test_torch_fsdp import Net, batch, old_script
from tests.support.processes import results_of

pytestmark = pytest.mark.gloo
NO_LOCAL = "DeviceMesh is not compatible with LOCAL_STATE_DICT. Use SHARDED_STATE_DICT, which gives DTensors."
NOT_KNOWN = ["get_optimizer_state_dict", "set_model_state_dict", "get_model_state_dict"]


def torch_on_the_host() -> Any:
    """torch's FSDP1, which trains on the host if it is not asked to look for an accelerator."""
    from torch.distributed.fsdp import _init_utils, fully_sharded_data_parallel
    from torch.distributed.fsdp._common_utils import _FSDPDeviceHandle

    def handle(state: Any, *_: Any) -> Any:
        state._device_handle = _FSDPDeviceHandle.from_device(torch.device("cpu"))
        return state

    _init_utils._init_device_handle = fully_sharded_data_parallel._init_device_handle = handle
    return fully_sharded_data_parallel


CONFIGS: dict[StateDictType, tuple[Any, Any]] = {
    StateDictType.SHARDED_STATE_DICT: (None, None),
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig(True, True), FullOptimStateDictConfig(True, True)),
}
"""Each kind of state with its options: the full one is on rank 0 alone, which gives it to the others."""


def resumed(name: str, kind: StateDictType, **options: Any) -> bool:
    """Whether a run that was saved and loaded goes on as one that was not."""
    make = OPTIMIZERS[name]
    straight, one = trained(make, 3, **options)
    with FullyShardedDataParallel.state_dict_type(straight, kind, *CONFIGS[kind]):
        weights, state = deepcopy(straight.state_dict()), FullyShardedDataParallel.optim_state_dict(straight, one)
    train(straight, one, range(3, 5))
    other, two = trained(make, 0, **options)
    if kind is StateDictType.FULL_STATE_DICT:
        carrier = [weights]
        dist.broadcast_object_list(carrier)
        weights = carrier[0]
    with FullyShardedDataParallel.state_dict_type(other, kind, *CONFIGS[kind]):
        other.load_state_dict(weights)
        two.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(other, two, state))
    train(other, two, range(3, 5))
    return all(map(torch.equal, straight.parameters(), other.parameters()))


def resumed_by_torch(is_full: bool) -> bool:
    """The same with torch's newer functions, which know the class once the door is installed."""
    options = StateDictOptions(full_state_dict=is_full)
    straight, one = trained(OPTIMIZERS["groups"], 3)
    with install("torch_fsdp"):
        weights, state = deepcopy(get_state_dict(straight, one, options=options))
    train(straight, one, range(3, 5))
    other, two = trained(OPTIMIZERS["groups"], 0)
    with install("torch_fsdp"):
        set_state_dict(other, two, model_state_dict=weights, optim_state_dict=state, options=options)
    train(other, two, range(3, 5))
    return all(map(torch.equal, straight.parameters(), other.parameters()))


def refused_by_torch() -> list[str]:
    """What torch's functions say of an optimizer's state, and of full values and modules, while the door is not installed."""
    model, optimizer = trained(OPTIMIZERS["groups"], 1)
    full = get_model_state_dict(model)
    assert all(torch.equal(value, full[name]) for name, value in model.state_dict().items())
    full_by_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    said = []
    for call in (
        lambda: get_optimizer_state_dict(model, optimizer),
        lambda: set_model_state_dict(model, full if dist.get_rank() == 0 else {}, options=full_by_rank_0),
        lambda: get_model_state_dict(model, submodules={model.module}),
    ):
        try:
            call()
        except ShardingError as error:
            said.append(str(error))
    return said


def local_with_a_mesh(mesh: Any) -> list[str]:
    """What the two kinds of state dicts say in a format that has no form with a mesh."""
    model = FullyShardedDataParallel(Net(), use_orig_params=True, device_mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters())
    said = []
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        for ask in (model.state_dict, lambda: FullyShardedDataParallel.optim_state_dict(model, optimizer)):
            try:
                ask()
            except RuntimeError as refusal:
                said.append(str(refusal))
    return said


def run(rank: int, size: int, folder: Path) -> Any:
    result: dict[str, Any] = {"ours": old_script(torch_fsdp, rank)}
    model = FullyShardedDataParallel(Net(), use_orig_params=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(batch(0, rank)).sum().backward()
    optimizer.step()
    full = {name: value.clone() for name, value in model.state_dict().items()}
    for kind in (StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT):
        with FullyShardedDataParallel.state_dict_type(model, kind):
            saved = model.state_dict()
            kinds = {type(value).__name__ for name, value in saved.items() if name != "scale"}
            with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            model.load_state_dict(saved)
        again = model.state_dict()
        result[kind.name] = kinds, all(torch.equal(full[name], again[name]) for name in full)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        sharded = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        before = [value.clone() for state in optimizer.state.values() for value in state.values()]
        FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, sharded, load_directly=True)
        after = [value for state in optimizer.state.values() for value in state.values()]
    result["optimizer"] = all(map(torch.equal, before, after)) and len(before) == len(after)
    parameters = list(model.parameters())
    backwards = torch.optim.Adam(parameters[::-1] if rank else parameters)
    backwards.step()
    result["order"] = list(FullyShardedDataParallel.sharded_optim_state_dict(model, backwards)["state"])
    result["resumed"] = {(name, kind.name): resumed(name, kind) for name in OPTIMIZERS for kind in CONFIGS}
    result["by torch"] = [resumed_by_torch(True), resumed_by_torch(False), refused_by_torch()]
    mesh = init_device_mesh("cpu", (size,))
    result["resumed"]["with a mesh", ""] = resumed("groups", StateDictType.SHARDED_STATE_DICT, device_mesh=mesh)
    result["local with a mesh"] = local_with_a_mesh(mesh)
    result["torch"] = old_script(torch_on_the_host(), rank)
    return result


def test_an_old_script_gives_the_losses_of_torch_and_sharded_states_load(tmp_path: Path) -> None:
    results = results_of(run, 2, tmp_path)
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


def from_rank_0(**options: Any) -> bool:
    """Whether a model that gets the full states of rank 0 goes on as the one that was saved, with torch's newer functions."""

    def made() -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        inner = FullyShardedDataParallel(nn.Linear(8, 12), **options)
        model = FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(12, 4)), **options)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    saved, loaded = made(), made()
    step(*saved)
    gathered = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = deepcopy(get_model_state_dict(saved[0], options=gathered))
    state = deepcopy(get_optimizer_state_dict(*saved, options=gathered))
    given = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(loaded[0], weights if dist.get_rank() == 0 else {}, options=given)
    set_optimizer_state_dict(*loaded, state if dist.get_rank() == 0 else {}, options=given)
    step(*saved)
    step(*loaded)
    one, two = (get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) for model, _ in (saved, loaded))
    return len(one) == 4 and all(torch.equal(one[name], two[name]) for name in one)


def with_replicas(rank: int, size: int, folder: Path) -> list[bool]:
    """The ranks are given as a mesh, and as groups."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    pair = mesh["shards"].get_group(), mesh["replicas"].get_group()
    options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "use_orig_params": True}
    with install("torch_fsdp"):
        return [from_rank_0(**ranks, **options) for ranks in ({"device_mesh": mesh}, {"process_group": pair})]


def test_rank_0_alone_gives_the_states_of_a_model_with_replicas(tmp_path: Path) -> None:
    assert results_of(with_replicas, 4, tmp_path) == [[True, True]] * 4
