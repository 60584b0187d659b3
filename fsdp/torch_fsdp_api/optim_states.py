"""Optimizer state in FSDP1's formats: by name in full, by name with parts cut by rows, by number for this rank's optimizer."""

import warnings
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.errors import ShardingError
from fsdp.state_dict.fqns import first_names
from fsdp.state_dict.model_view import ModelView
from fsdp.state_dict.optim_placement import placement_from_full
from fsdp.state_dict.optim_state import OptimizerView, full_optim_state_dict
from fsdp.torch_fsdp_api import torch_names
from fsdp.torch_fsdp_api.sharding import instances_in
from fsdp.torch_fsdp_api.state_types import settings_of
from fsdp.torch_fsdp_api.torch_names import OptimStateKeyType, StateDictType


def order_of(model: nn.Module, optim: torch.optim.Optimizer | None, optim_input: Any) -> torch.optim.Optimizer:
    """The optimizer whose parameters are meant: `optim`, or one over `optim_input`, or one over all parameters.

    Raises:
        ValueError: both are given.
    """
    if optim is not None and optim_input is not None:
        raise ValueError("optim and optim_input contradict each other; give optim.")
    if optim_input is not None:
        warnings.warn("optim_input has gone from torch; give optim, the optimizer.", FutureWarning, stacklevel=3)
    if optim is not None:
        return optim
    given = list(model.parameters() if optim_input is None else optim_input)
    return torch.optim.SGD([{"params": list(one["params"])} if isinstance(one, dict) else one for one in given], lr=1.0)


def broadcast(given: Any, model: nn.Module, group: Any) -> dict[str, Any]:
    """The state dict that rank 0 gives. Communicates."""
    found: dict[str, Any] = torch_names.from_rank_0(given, instances_in(model)[0].process_group if group is None else group)
    return found


# saving -----------------------------------------------------------------------------------


def full(model: nn.Module, optim: torch.optim.Optimizer, rank0_only: bool, to_host: bool = True) -> dict[str, Any]:
    """See `FullyShardedDataParallel.full_optim_state_dict`."""
    device = "cpu" if to_host else instances_in(model)[0].compute_device
    state = full_optim_state_dict(model, optim, rank0_only, device)
    return {**state}


def sharded(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """See `FullyShardedDataParallel.sharded_optim_state_dict`."""
    found = full(model, optim, rank0_only=False)
    instance = instances_in(model)[0]

    def part(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        return torch_names.local_chunk(value.to(instance.compute_device), instance.process_group, instance._device_mesh)

    # in the order of the model, which is the same on all ranks: who gathers the parts does so in the order of the dict
    names = [name for name in first_names(model).values() if name in found["state"]]
    state = {name: {key: part(value) for key, value in found["state"][name].items()} for name in names}
    return {**found, "state": state}


def in_format(model: nn.Module, optim: torch.optim.Optimizer, given: Any) -> dict[str, Any]:
    """See `FullyShardedDataParallel.optim_state_dict`."""
    settings = settings_of(model)
    if given is not None and not _is_state_of(optim, given):
        raise ShardingError(
            "optim_state_dict: the given state is not that of the optimizer; give what optim.state_dict() returns."
        )
    if settings.state_dict_type is StateDictType.SHARDED_STATE_DICT:
        found = sharded(model, optim)
    else:
        config = settings.optim_state_dict_config
        found = full(model, optim, getattr(config, "rank0_only", False), config.offload_to_cpu)
    if given is not None and "param_groups" not in given:
        found.pop("param_groups", None)
    return found


def _is_state_of(optim: torch.optim.Optimizer, given: Mapping[str, Any]) -> bool:
    """Whether `given` has the tensors of the optimizer's own state dict."""
    mine = optim.state_dict()["state"]
    return set(given["state"]) == set(mine) and all(
        value is given["state"][number].get(key)
        or torch.is_tensor(value) is False
        or torch.equal(value, given["state"][number][key])
        for number, kept in mine.items()
        for key, value in kept.items()
    )


# loading ----------------------------------------------------------------------------------


@torch.no_grad()
def to_load(given: Mapping[str, Any], model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """This rank's part of a state by name, as `optim.load_state_dict` takes it. Communicates for parts that are cut by rows."""
    view = OptimizerView(ModelView(model, "optim_state_dict_to_load"), optim)
    group = instances_in(model)[0].process_group
    named = view.named({"param_groups": view.options(), **given})
    state: dict[str, dict[str, Any]] = {}
    for name, kept in named["state"].items():
        values = {key: torch_names.full_value(value, group) for key, value in kept.items()}
        if view.holds(name):
            state[name] = {key: _part(view, name, key, value) for key, value in values.items()}
    found = view.numbered(state, named["param_groups"])
    return found if "param_groups" in given else {"state": found["state"]}


def _part(view: OptimizerView, name: str, key: str, value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.dim():
        return deepcopy(value)
    where = f"optim_state_dict_to_load: {key!r} of parameter {name!r}"
    placement = placement_from_full(where, view.param_shards.get(name), tuple(value.shape), value.dtype)
    return placement.cut(value, view.rank).to(view.parameters[name].device)


def rekey(given: Mapping[str, Any], kind: OptimStateKeyType, model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """See `FullyShardedDataParallel.rekey_optim_state_dict`.

    Raises:
        ValueError: keys are neither all names nor all numbers, or `kind` is no OptimStateKeyType.
    """
    if kind not in (OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID):
        raise ValueError(f"optim_state_key_type must be PARAM_NAME or PARAM_ID, not {kind!r}.")
    types = {type(key) for key in given["state"]}
    if len(types) > 1 or not types <= {int, str}:
        raise ValueError(
            f"rekey_optim_state_dict: keys are of types {sorted(one.__name__ for one in types)}; give one of int, str."
        )
    wanted = str if kind is OptimStateKeyType.PARAM_NAME else int
    if types <= {wanted}:
        return {**given}
    names = first_names(model)
    by_number = dict(enumerate(names[id(p)] for group in optim.param_groups for p in group["params"]))
    by_name = {name: number for number, name in by_number.items()}
    new: Mapping[Any, Any] = by_number if wanted is str else by_name
    groups = [{**deepcopy(group), "params": sorted(new[key] for key in group["params"])} for group in given["param_groups"]]
    return {"state": {new[key]: value for key, value in given["state"].items()}, "param_groups": groups}
