"""Optimizer state in fairscale's format: per parameter of the plain module, numbered in the order of the instances."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.comm.exchanges import gather_rows
from fsdp.compat.fairscale.flat_params import Flat, chunk_and_pad, views_of
from fsdp.compat.fairscale.sharding import get_fsdp_instances

EXTRA = ("param_id_map", "uncollected_local_ids")
"""Entries of a gathered dict that an optimizer does not know."""


def is_singleton_tensor(x: Any) -> bool:
    """Whether `x` is a tensor without dimensions."""
    return isinstance(x, Tensor) and x.dim() == 0


def _vectors(root: Any) -> Iterator[tuple[Any, Flat, nn.Parameter, list[int]]]:
    """Each instance with each of its vectors, its parameter and the global ids of the plain parameters in it."""
    number = 0
    for instance in get_fsdp_instances(root):
        for flat, parameter in zip(instance.module.flats, instance.params, strict=True):
            yield instance, flat, parameter, list(range(number, number + len(flat.shapes)))
            number += len(flat.shapes)


def _local_ids(optim: torch.optim.Optimizer) -> dict[int, int]:
    """The optimizer's number of each parameter, by the parameter's id."""
    parameters = [p for group in optim.param_groups for p in group["params"]]
    return {id(p): number for number, p in enumerate(parameters)}


@torch.no_grad()
def gather_full(root: Any, optim: torch.optim.Optimizer) -> dict[str, Any] | None:
    """See `FullyShardedDataParallel.gather_full_optim_state_dict`."""
    _check(root, optim)
    local_ids = _local_ids(optim)
    state: dict[int, Any] = {}
    id_map: dict[int, int | None] = {}
    total = 0
    for instance, flat, parameter, numbers in _vectors(root):
        total += len(numbers)
        local = local_ids.get(id(parameter))
        id_map.update(dict.fromkeys(numbers, local))
        for key, value in optim.state.get(parameter, {}).items():
            for number, part in zip(numbers, _gathered(instance, flat, parameter, value), strict=True):
                state.setdefault(number, {})[key] = part
    if root.rank != 0:
        return None
    (group,) = optim.state_dict()["param_groups"]
    seen = {id_map[number] for number in state}
    # the state of an instance that is left out is this rank's own
    apart = {local_ids.get(id(p)) for one, _, p, _ in _vectors(root) if one.no_broadcast_optim_state}
    return {
        "state": state,
        "param_groups": [{**group, "params": list(range(total))}],
        "param_id_map": id_map,
        "uncollected_local_ids": sorted(local for local in set(local_ids.values()) if local not in seen or local in apart),
    }


def _check(root: Any, optim: torch.optim.Optimizer) -> None:
    """Refuse what the format cannot say."""
    if not root._is_root:
        raise AssertionError("gather_full_optim_state_dict: this instance is inside another one; call it on the outermost.")
    if len(optim.param_groups) != 1:
        raise AssertionError(
            f"gather_full_optim_state_dict: the optimizer has {len(optim.param_groups)} parameter groups, and the format has "
            "one; use fsdp.full_optim_state_dict(model.module, optimizer)."
        )
    for one in get_fsdp_instances(root):
        if not one.flatten_parameters and len(one.params) > 1:
            raise NotImplementedError(
                "gather_full_optim_state_dict: an instance with several parameters has flatten_parameters=False; the format "
                "is that of flat parameters: give flatten_parameters=True, or use fsdp.full_optim_state_dict(model.module, "
                "optimizer)."
            )


def _gathered(instance: Any, flat: Flat, parameter: nn.Parameter, value: Any) -> list[Any]:
    """One state of a vector, for each of its parameters. Communicates if the state is sharded."""
    if not isinstance(value, Tensor):
        return [value] * len(flat.shapes)
    if is_singleton_tensor(value) or value.numel() != parameter.numel():
        return [value.item() if is_singleton_tensor(value) else value.cpu().clone()] * len(flat.shapes)
    comm = instance._unit_ref.unit.comm
    host = gather_rows(comm, value.reshape(-1), "full value of optimizer state").view(-1).cpu()
    return (
        [view.clone() for view in views_of(host, flat.shapes)]
        if instance.rank == 0 or comm.size == 1
        else [None] * len(flat.shapes)
    )


@torch.no_grad()
def shard_of(root: Any, full: dict[str, Any]) -> dict[str, Any]:
    """See `FullyShardedDataParallel.get_shard_from_optim_state_dict`."""
    vectors = list(_vectors(root))
    count = sum(len(numbers) for *_, numbers in vectors)
    saved = len(full["param_groups"][0]["params"])
    if count != saved:
        raise AssertionError(
            f"get_shard_from_optim_state_dict: the state is of {saved} parameters, and this model has {count}; wrap the model "
            "as it was when the state was gathered."
        )
    order = {id(p): number for number, p in enumerate(root.parameters())}
    state = {
        order[id(parameter)]: {
            key: _shard(instance, parameter, [full["state"][number][key] for number in numbers])
            for key in full["state"][numbers[0]]
        }
        for instance, _, parameter, numbers in vectors
        if numbers[0] in full["state"]
    }
    full["state"] = state
    groups = [{**full["param_groups"][0], "params": list(range(len(order)))}]
    return {**{key: value for key, value in full.items() if key not in EXTRA}, "state": state, "param_groups": groups}


def _shard(instance: Any, parameter: nn.Parameter, parts: list[Any]) -> Any:
    """This rank's part of one state of a vector. Torch's optimizers count steps in a tensor."""
    if not isinstance(parts[0], Tensor):
        is_number = isinstance(parts[0], int | float) and not isinstance(parts[0], bool)
        return torch.tensor(float(parts[0])) if is_number else parts[0]
    comm = instance._unit_ref.unit.comm
    return chunk_and_pad(torch.cat([part.reshape(-1) for part in parts]), comm.size)[comm.rank].clone().view(parameter.shape)
