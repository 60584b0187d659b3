"""Full parameters as plain tensors: gathered into a state dict, streamed, loaded from one.

Rule 1: beyond what is returned, a rank holds at most one range of `BUCKET_BYTES`, or one parameter if that is larger.
Rule 2: what does not fit is refused on every rank, before anything is loaded.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from fsdp.comm.agreement import agree_on_refusals
from fsdp.comm.communicator import Communicator
from fsdp.errors import ShardingError
from fsdp.runtime.registry import collective_call, resting_units_in, world_comm_in
from fsdp.state_dict.fqns import check_names, check_values, entries, extra_states
from fsdp.state_dict.param_ranges import ParamRange, broadcast_all, gather_range, memory_for, ranges_of
from fsdp.state_dict.param_shard import param_shards_in

BUCKET_BYTES: Final = 32 << 20


@torch.no_grad()
@collective_call
def full_state_dict(model: nn.Module, rank0_only: bool = True, device: torch.device | str = "cpu") -> dict[str, Any]:
    """What `state_dict()` of the plain module would be: full parameters, persistent buffers, extra state of modules.

    With `rank0_only`, the other ranks take part and get an empty dict. Tensors are copies on `device`.
    Communicates: every rank must call it alike.

    Memory: on the model's device, one range of 32 MiB or one parameter; on `device`, what is returned.

    Raises:
        ShardingError: inside a forward, a backward or a summon.
    """
    wanted = not rank0_only or world_comm_in(model, "full_state_dict").rank == 0
    full: dict[int, Tensor] = {}
    units = resting_units_in(model, "full_state_dict")
    ranges = [(unit, one) for unit in units for one in ranges_of(unit, BUCKET_BYTES)]
    memory = memory_for([one for _, one in ranges])
    for unit, one in ranges:
        buffer = gather_range(one, unit.comm, unit.name, memory)
        if wanted:
            full.update(
                {
                    id(param_shard.parameter): one.view(buffer, param_shard).to(device, copy=True)
                    for param_shard in one.param_shards
                }
            )
    if not wanted:
        return {}
    state: dict[str, Any] = {
        name: full[id(value)] if id(value) in full else value.detach().to(device, copy=True) for name, value in entries(model)
    }
    return {**state, **{name: module.get_extra_state() for name, module in extra_states(model).items()}}


@torch.no_grad()
def iter_full_params(
    model: nn.Module, dtype: torch.dtype | None = None, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter in full, one after the other, on every rank: what pushes weights to an inference engine.

    Names are those of `named_parameters()` of the plain module; tied parameters come once. The tensors are on the model's
    device, in `dtype` or their own, and are views of a buffer of `bucket_bytes` (or of one parameter, if that is larger) that
    lives as long as one of them: keep copies. Communicates while it runs: every rank must go through all of it.

    Raises:
        ShardingError: inside a forward, a backward or a summon, or `bucket_bytes` is not above 0.
    """
    if bucket_bytes <= 0:
        raise ShardingError(f"iter_full_params: bucket_bytes is {bucket_bytes}; give a number above 0.")
    names: dict[int, str] = {}
    for name, tensor in entries(model):
        names.setdefault(id(tensor), name)
    # those of ignored modules, which every rank has in full
    sharded = param_shards_in(model)
    for parameter in model.parameters():
        if id(parameter) not in sharded:
            yield names[id(parameter)], parameter.detach().to(dtype or parameter.dtype)
    for unit in resting_units_in(model, "iter_full_params"):
        for one in ranges_of(unit, bucket_bytes):
            buffer = gather_range(one, unit.comm, unit.name)
            buffer = buffer.to(dtype or buffer.dtype)
            for param_shard in one.param_shards:
                yield names[id(param_shard.parameter)], one.view(buffer, param_shard)


@torch.no_grad()
@collective_call
def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, Any] | None) -> None:
    """Load a plain module's state dict: the same on every rank, or rank 0's where others give None.

    Communicates: every rank must call it alike. Where some give None, parameters are handed out a range of 32 MiB, or one
    parameter, at a time, so that no other rank holds more.

    Raises:
        ShardingError: on every rank, if on any of them names are missing, unexpected, of another shape, or of a dtype that would
            lose something, or if rank 0 gives None. Nothing was loaded.
    """
    units = resting_units_in(model, "load_full_state_dict")
    comm = world_comm_in(model, "load_full_state_dict")

    def check() -> bool:
        if state_dict is None:
            if comm.rank == 0:
                raise ShardingError("load_full_state_dict: rank 0 must give the state dict; only other ranks may give None.")
            return False
        check_names("load_full_state_dict", [*(name for name, _ in entries(model)), *extra_states(model)], state_dict)
        check_values("load_full_state_dict", model, state_dict)
        return True

    everywhere = all(agree_on_refusals(comm, check))
    param_shards = param_shards_in(model)
    given = {} if state_dict is None else {id(value): state_dict[name] for name, value in entries(model)}
    if everywhere:
        for key, param_shard in param_shards.items():
            # through the parameter, so that autograd sees that it changed
            param_shard.parameter.copy_(param_shard.local_part("load_full_state_dict", "", given[key]))
    else:
        for unit in units:
            for one in ranges_of(unit, BUCKET_BYTES):
                _hand_out(one, given, comm, unit.name)
    for name, value in entries(model):
        if id(value) not in param_shards:
            _load_plain(name, value, given.get(id(value)), None if everywhere else comm)
    for name, module in extra_states(model).items():
        mine = None if state_dict is None else state_dict[name]
        module.set_extra_state(mine if everywhere else comm.gather_objects(mine, name)[0])


def _hand_out(one: ParamRange, given: Mapping[int, Tensor], comm: Communicator, label: str) -> None:
    """Rank 0's values of a range into the shards of all ranks."""
    buffer = one.empty()
    if comm.rank == 0:
        for param_shard in one.param_shards:
            one.view(buffer, param_shard).copy_(given[id(param_shard.parameter)])
    broadcast_all([(0, buffer)], comm, label)
    for param_shard in one.param_shards:
        param_shard.parameter.copy_(param_shard.cut(one.view(buffer, param_shard)))


def _load_plain(name: str, value: Tensor, given: Tensor | None, comm: Communicator | None) -> None:
    """What every rank has in full: from what is given here, or by way of `comm` from rank 0."""
    if comm is None:
        assert given is not None, "the names were checked"
        value.copy_(given)
        return
    carrier = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    if given is not None:
        carrier.copy_(given)
    broadcast_all([(0, carrier)], comm, name)
    value.copy_(carrier)
