"""State dicts in fairscale's formats: full, of one rank, consolidated offline; and pickling.

Rule 1: names of the wrappers are in no state dict; a vector is `flat_param_<i>` under the name of its instance.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.comm.exchanges import gather_rows
from fsdp.compat.fairscale.flat_params import Flat, chunk_and_pad, joined, views_of
from fsdp.compat.fairscale.groups import can_communicate, comm_of, global_rank
from fsdp.compat.fairscale.sharding import cast_buffers, get_fsdp_instances, shard
from fsdp.compat.shared.instances import WRAPPED_NAME, rename
from fsdp.device.storage import storage_key
from fsdp.state_dict.fqns import plain_fqn

_renaming = [True]
"""Whether `load_state_dict` accepts plain names. A list, so that the context below can change it."""


def remove_own_name(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Remove the wrapper's name from a state dict that was saved."""
    rename(state_dict, prefix + WRAPPED_NAME, prefix)


def add_own_name(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Add the wrapper's name to a state dict that is loaded."""
    if not _renaming[0] or any(key.startswith(prefix + WRAPPED_NAME) for key in state_dict):
        return
    rename(state_dict, prefix, prefix + WRAPPED_NAME)


@contextmanager
def no_pre_load_state_dict_hook() -> Iterator[None]:
    """Inside, the wrapper adds nothing to the names that `load_state_dict` gets."""
    before, _renaming[0] = _renaming[0], False
    try:
        yield
    finally:
        _renaming[0] = before


def padding(flat: Flat, rank: int, world_size: int) -> int:
    """How many elements at the end of a rank's shard belong to no parameter."""
    chunk = flat.parameter.numel() // world_size
    length = sum(prod(shape) for shape in flat.shapes)
    return max(0, min((rank + 1) * chunk - length, chunk))


# full state -------------------------------------------------------------------------------


def full_state_dict(instance: Any, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `state_dict()` of an instance returns."""
    if instance.keeps_shards:
        return save(*args, **kwargs)
    shard_late(instance)
    is_outermost = not args and kwargs.get("destination") is None
    with ExitStack() as stack:
        if instance.training_state.name != "SUMMON_FULL_PARAMS":
            stack.enter_context(instance.summon_full_params(volatile=True))
        were_cast = instance.buffers_are_cast
        cast_buffers(instance, torch.float32)
        try:
            state = save(*args, **kwargs)
        finally:
            instance.buffers_are_cast = False
            if were_cast:
                cast_buffers(instance)
        device = torch.device("cpu") if instance.move_params_to_cpu else instance.state_dict_device
        keys = {storage_key(p) for p in instance.module.flat_params}
        for name, value in state.items():
            if isinstance(value, Tensor) and storage_key(value) in keys:
                state[name] = value.to(device, copy=True)
            elif isinstance(value, Tensor) and is_outermost:
                state[name] = value.to(device)
    if instance.state_dict_on_rank_0_only and is_outermost and global_rank() != 0:
        state.clear()
    return state


# local state ------------------------------------------------------------------------------


@contextmanager
def shards_shown(instance: Any) -> Iterator[None]:
    """Let `state_dict()` of all instances give shards inside."""
    instances = get_fsdp_instances(instance)
    for one in instances:
        if one.training_state.name != "IDLE":
            raise ValueError(
                f"local_state_dict: an instance is in {one.training_state.name}; call it outside any forward, backward and "
                "summon_full_params."
            )
        one.keeps_shards = True
    try:
        yield
    finally:
        for one in instances:
            one.keeps_shards = False


def local_metadata(root: Any) -> dict[str, Any]:
    """The names, shapes and paddings of the vectors of every instance in `root`."""
    described = []
    names = {id(module): plain_fqn(path) for path, module in root.named_modules()}
    owners: dict[int, str] = {}
    for path, one in root.named_modules():
        if not hasattr(type(one), "local_metadata_dict"):
            continue
        params, tied = {}, []
        for index, (flat, padded) in enumerate(zip(one.module.flats, one.numel_padded_per_param, strict=True)):
            inside, shapes, numels = one.module.metadata(index)
            backing = inside[0] if flat.has_own_name else flat.attribute
            params[backing] = {"names": inside, "shapes": list(shapes), "numels": list(numels), "padding": padded}
            for name, slots in zip(inside, flat.slots, strict=True):
                base = plain_fqn(path)
                tied += [(name, _below(names[id(module)], base, attribute)) for module, attribute in slots[1:]]
                owners[id(flat.parameter)] = joined(base, name)
        described.append(
            {
                "fsdp_path": plain_fqn(path),
                "params": params,
                "no_broadcast_optim_state": one.no_broadcast_optim_state,
                "shared_param_info": tied,
            }
        )
    for one in get_fsdp_instances(root):
        for shared in one._shared:
            source = owners.get(id(shared.parameter))
            if source is not None:
                described[0]["shared_param_info"] += [(source, joined(names[id(m)], name)) for m, name in shared.slots]
    buffers = [plain_fqn(name) for name, _ in root.named_buffers()]
    return {"param_metadata": described, "buffer_names": buffers}


def _below(path: str, base: str, name: str) -> str:
    """The name of a parameter of the module at `path`, counted from the instance at `base`."""
    return joined(path[len(base) + 1 :] if base else path, name)


def consolidate(
    shard_weights: list[dict[str, Tensor]], shard_metadata: list[dict[str, Any]], with_module_buffers: bool, strict: bool
) -> dict[str, Tensor]:
    """The full state dict of local state dicts and their metadata, both of every rank."""
    if len(shard_weights) != len(shard_metadata) or not shard_weights:
        raise ValueError(
            f"consolidate_shard_weights: got {len(shard_weights)} state dicts and {len(shard_metadata)} metadata; give both of "
            "every rank."
        )
    full: dict[str, Tensor] = {}
    for index, described in enumerate(shard_metadata[0]["param_metadata"]):
        path = described["fsdp_path"]
        for backing, about in described["params"].items():
            name = joined(path, backing)
            if not strict and name not in shard_weights[0]:
                continue
            paddings = [one["param_metadata"][index]["params"][backing]["padding"] for one in shard_metadata]
            shards = (weights[name].reshape(-1) for weights in shard_weights)
            data = _put_together(shards, paddings, sum(about["numels"]))
            for inside, value in zip(about["names"], views_of(data, about["shapes"]), strict=True):
                full[joined(path, inside)] = value
        for source, target in described["shared_param_info"]:
            if strict or joined(path, source) in full:
                full[joined(path, target)] = full[joined(path, source)]
    if with_module_buffers:
        for name in shard_metadata[0]["buffer_names"]:
            if strict or name in shard_weights[0]:
                full[name] = shard_weights[0][name]
    return full


def _put_together(shards: Iterator[Tensor], paddings: list[int], length: int) -> Tensor:
    """The unpadded shards one after the other, as many as are needed: an expert's first shard may have everything."""
    parts: list[Tensor] = []
    for part, padded in zip(shards, paddings, strict=True):
        if sum(one.numel() for one in parts) < length:
            parts.append(part[: part.numel() - padded])
    return torch.cat(parts)


# instances whose group cannot communicate yet ---------------------------------------------


def cut_without_group(instance: Any) -> None:
    """Keep this rank's shard of each vector; the engine takes over once there is a process group."""
    for parameter in instance.params:
        parameter.data = chunk_and_pad(parameter.detach(), instance.world_size)[instance.rank].clone()


def shard_late(instance: Any) -> None:
    """Let the engine take over the instances in `instance` that had no process group when they were made."""
    if not instance.is_lazily_sharded:
        return
    for one in reversed(get_fsdp_instances(instance)):
        if one.is_lazily_sharded and can_communicate(one.process_group):
            for parameter in one.params if one.world_size > 1 else ():
                comm = comm_of(one.process_group)
                parameter.data = gather_rows(comm, parameter.detach().reshape(-1), "shards made without a group").view(-1)
            one.is_lazily_sharded = False
            shard(one)


def for_pickle(instance: Any) -> dict[str, Any]:
    """The attributes that pickle saves. Process groups cannot be saved."""
    return {
        **instance.__dict__,
        "process_group": "MISSING",
        "process_group_reduce_scatter": "MISSING",
        "is_lazily_sharded": True,
        "buffers_are_cast": False,
    }
