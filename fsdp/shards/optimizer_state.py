"""The state of an optimizer as sharded state: what its `state_dict()` returns, and what it takes from others.

Rule 1: a state dict holds a ShardedValue for each shard, as that of a model does. Distributed Checkpoint saves and loads it.
Rule 2: a full tensor is cut to this rank's part without communication. What fits in no way is refused before it is loaded.

The first step, and each call of this engine that is given an optimizer, sets the hooks on its state dict. A new optimizer has
none yet. Its state is looked through at its first step.
"""

from collections.abc import Iterator
from typing import Any, Final, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsdp.autograd.frames import caller_of_full_state
from fsdp.errors import ShardingError
from fsdp.shards.info import ShardInfo
from fsdp.shards.shard_parameter import EmptyShardParameter, ShardParameter
from fsdp.shards.shard_tensor import ShardTensor, as_shard, local_operators, plain
from fsdp.shards.sharded_value import ShardedValue

ELEMENT_WISE_OPTIMIZERS: Final = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
    *(torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD, torch.optim.Adagrad, torch.optim.Adadelta),
)
"""torch's optimizers whose step computes each element of a parameter from the same element of its gradient and state."""
NUMBERS: Final = frozenset({"step", "mu_product", "eta", "mu"})
"""Keys under which these optimizers keep one number for a parameter. It is the same on every rank."""
_hooked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
"""The optimizers with hooks, each with the number of its sharded parameters when its state was last looked through."""
StateDict = dict[str, Any]


def hook_state(optimizer: Optimizer, parameters: list[Any] | None = None) -> None:
    """Turn the state of `optimizer` into shards, and set the hooks on its state dict, if this was not done yet.

    Raises:
        ShardingError: some state does not fit its parameter.
    """
    if parameters is None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sharded = sum([isinstance(parameter, ShardParameter) for parameter in parameters])
    known = _hooked.get(optimizer)
    if not sharded or known == sharded:
        return
    adopt_state(optimizer)
    if known is None:
        optimizer.register_state_dict_post_hook(_give_values)
        optimizer.register_load_state_dict_pre_hook(_take_values)
    _hooked[optimizer] = sharded


def adopt_state(optimizer: Optimizer) -> None:
    """Turn the state of each sharded parameter into shards.

    Raises:
        ShardingError: some state does not fit its parameter. Nothing was changed.
    """
    found = {p: _parts(optimizer, p, kept) for p, kept in optimizer.state.items() if isinstance(p, ShardParameter) and kept}
    for parameter, kept in found.items():
        optimizer.state[parameter] = kept


def _give_values(optimizer: Optimizer, state_dict: StateDict) -> None:
    """Put values that know the full shape into a state dict, and an empty dict for each parameter that is on other ranks."""
    caller = caller_of_full_state()
    if caller is not None:
        loads = caller == "set"
        raise ShardingError(
            f"{caller}_optimizer_state_dict with full_state_dict=True takes parts for full tensors: call "
            f"fsdp.{'load_' * loads}full_optim_state_dict(model, optimizer{', state' * loads}), which has the same form, or "
            "leave full_state_dict out."
        )
    state = {number: {key: _value(key, one) for key, one in kept.items()} for number, kept in state_dict["state"].items()}
    # torch's set_optimizer_state_dict asks for an entry of every parameter, also of those that lie on other ranks
    for number, parameter in _numbered(optimizer, state_dict) if state else ():
        if isinstance(parameter, EmptyShardParameter):
            state.setdefault(number, {})
    state_dict["state"] = state


def _take_values(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
    """Replace values and full tensors in a given state dict by this rank's parts, before anything is loaded."""
    parameters = dict(_numbered(optimizer, state_dict))
    state = {
        number: _parts(optimizer, parameters[number], kept) if isinstance(parameters.get(number), ShardParameter) else kept
        for number, kept in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _numbered(optimizer: Optimizer, state_dict: StateDict) -> Iterator[tuple[Any, Tensor]]:
    """The parameters of `optimizer`, each with its number or name in a state dict."""
    for given, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=False):
        yield from zip(given["params"], group["params"], strict=False)


def _value(key: str, one: Any) -> Any:
    if isinstance(one, dict):
        return {name: _value(f"{key}.{name}", inner) for name, inner in one.items()}
    if not isinstance(one, ShardTensor):
        return one
    info = one.shard_info
    return ShardedValue(
        f"optimizer.state.{info.name}.{key}", plain(one), info.shape, info.first, not info.numel and info.comm.rank == 0
    )


def _parts(optimizer: Optimizer, parameter: ShardParameter, kept: Any) -> Any:
    """This rank's parts of the state of one parameter."""
    known = type(optimizer) in ELEMENT_WISE_OPTIMIZERS
    # these make the state of a parameter in its first step, and need none of one without elements; Adagrad makes it at once
    if known and isinstance(parameter, EmptyShardParameter) and not isinstance(optimizer, torch.optim.Adagrad):
        return {}
    with local_operators():
        return {key: _part(parameter.shard_info, key, one, known) for key, one in kept.items()}


def _part(info: ShardInfo, key: str, one: Any, known: bool) -> Any:
    if isinstance(one, ShardedValue):
        wanted = _info_for(info, tuple(one.shape), one.local.shape)
        if wanted is None or (one.local.numel() and wanted.first != one.first):
            _refuse_cut(info, key)
        return as_shard(one.local, wanted)
    if isinstance(one, ShardTensor):
        wanted = _info_for(info, one.shard_info.shape, one.shape)
        if wanted is None or wanted.cut != one.shard_info.cut:
            _refuse_cut(info, key)
        return one if wanted.comm is one.shard_info.comm else as_shard(one.detach(), wanted)
    if not isinstance(one, Tensor) or key in NUMBERS:
        return one
    if one.shape == info.local_shape:
        return as_shard(one, info)
    if one.shape == info.shape:
        return as_shard(_cut(info, one), info)
    if known and one.dim():
        raise ShardingError(
            f"the optimizer's state {key!r} of {info.describe()} has shape {tuple(one.shape)}, which is neither: it belongs to "
            "another rank or to another model. Load the full state with fsdp.load_full_optim_state_dict(model, optimizer, "
            "state), or a checkpoint of fsdp.save with fsdp.load."
        )
    is_per_row = one.dim() == len(info.shape) and all(
        n in (1, full) for n, full in zip(one.shape[1:], info.shape[1:], strict=True)
    )
    if info.keeps_rows and is_per_row and one.shape[0] == info.shape[0]:
        row, rest = info.cut.row, one.shape[1:]
        rows = one[info.first // row :][: info.local_shape[0]].clone()
        return as_shard(rows, info.of_rows(torch.Size((info.local_shape[0], *rest))))
    return one


def _cut(info: ShardInfo, full: Tensor) -> Tensor:
    """This rank's part of a full tensor: a copy, so that the full tensor can be freed."""
    return full.reshape(-1)[info.first : info.first + info.local_shape.numel()].view(info.local_shape).clone()


def _info_for(info: ShardInfo, shape: tuple[int, ...], local_shape: torch.Size) -> ShardInfo | None:
    """What this rank's part of a tensor of `shape` is, if it has the parameter's shape or its rows; None if it can't be."""
    if shape == info.shape:
        wanted = info
    elif info.keeps_rows and len(shape) > 1 and shape[0] == info.shape[0]:
        wanted = info.of_rows(local_shape)
    else:
        return None
    return wanted if wanted.local_shape == local_shape and wanted.shape == shape else None


def _refuse_cut(info: ShardInfo, key: str) -> NoReturn:
    raise ShardingError(
        f"load_state_dict of the optimizer: {key!r} of {info.name!r} was cut in another way than this model's parameter (other "
        "ranks, or other units): save with fsdp.save and load with fsdp.load, or with torch's dcp.save and dcp.load, which cut "
        "it anew."
    )
