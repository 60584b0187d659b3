"""The state of an optimizer as sharded state: what its `state_dict()` returns, and what it takes from others.

Rule 1: a state dict holds a ShardedValue for each shard, as that of a model does. Distributed Checkpoint saves and loads it.
Rule 2: a full tensor is cut to this rank's part without communication. What fits in no way is refused before it is loaded.
Rule 3: a state dict communicates for torch's functions with full_state_dict=True alone. They get full tensors.

The first step, and each call of this engine that is given an optimizer, sets the hooks on its state dict. A new optimizer has
none yet. Its state is looked through at its first step.
"""

from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from math import prod
from typing import Any, Final, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsdp.autograd.dynamo import is_full_graph
from fsdp.autograd.frames import FullStateCall, full_state_call
from fsdp.comm.agreement import agree_and_gather
from fsdp.comm.communicator import Communicator
from fsdp.comm.joint_gather import gather_parts
from fsdp.errors import ShardingError
from fsdp.shards.info import ShardInfo
from fsdp.shards.refusals import refuse_compiled
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
_FULL: Final = "full_state_dict=True"
StateDict = dict[str, Any]
State = dict[Any, dict[str, Any]]
"""The state of each parameter, by its number or name."""
Parameters = dict[Any, ShardParameter]
"""The sharded parameters of an optimizer, by number or name."""


class Extent(NamedTuple):
    """Which elements of a flattened tensor a rank holds."""

    shape: tuple[int, ...]
    """The shape of the full tensor."""
    dtype: torch.dtype
    first: int
    numel: int


def hook_state(optimizer: Optimizer, parameters: list[Any] | None = None) -> None:
    """Turn the state of `optimizer` into shards, and set the hooks on its state dict, if this was not done yet.

    Raises:
        ShardingError: some state does not fit its parameter, or the step of the optimizer is compiled.
    """
    if parameters is None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sharded = sum([count for kind, count in Counter(map(type, parameters)).items() if issubclass(kind, ShardParameter)])
    known = _hooked.get(optimizer)
    if not sharded or known == sharded:
        return
    if any(base.__module__.startswith("torchao.") for base in type(optimizer).__mro__):
        refuse_compiled(type(optimizer).__name__, "torchao compiles it")
    if any(map(is_full_graph, vars(optimizer).values())):
        refuse_compiled(type(optimizer).__name__, "it calls functions that are compiled with fullgraph=True")
    adopt_state(optimizer)
    # a wrapper that never calls Optimizer.__init__ has a state dict of its own, around that of the optimizer in it
    if known is None and hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
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
    call, given = full_state_call(), state_dict["state"]
    parameters = {number: p for number, p in _numbered(optimizer, state_dict) if isinstance(p, ShardParameter)}
    state = {number: {key: _value(key, one) for key, one in kept.items()} for number, kept in given.items()}
    elsewhere = [number for number, p in parameters.items() if isinstance(p, EmptyShardParameter)]
    if call is not None and not call.loads:
        state.update(_full_state(parameters, given, call))
        elsewhere = [number for number in elsewhere if not parameters[number].shard_info.numel]
    elif call is not None:
        state = {**_state_of_others(parameters, given), **state}
    # torch's set_optimizer_state_dict asks for an entry of every parameter, also of those that lie on other ranks
    for number in elsewhere if state else ():
        state.setdefault(number, {})
    state_dict["state"] = state


def _full_state(parameters: Parameters, state: State, call: FullStateCall) -> State:
    """The full state of each parameter that has state on any rank, if this rank keeps it. Communicates.

    Memory besides the result: one tensor. Traffic: each rank sends its part of a tensor to all others.

    Raises:
        ShardingError: on every rank, if some state has no full form, or ranks differ in a number.
    """
    full: State = {}
    for comm, here, by_rank in _outlines("get", parameters, state):
        plan = {number: _together(p.shard_info, [outline.get(number, {}) for outline in by_rank]) for number, p in here.items()}
        for number, kept in plan.items():
            for key, found in kept.items():
                one = _in_full(found, comm, state.get(number, {}).get(key), here[number])
                if call.keeps:
                    full.setdefault(number, {})[key] = one.cpu() if call.offloads and isinstance(one, Tensor) else one
    return full


def _state_of_others(parameters: Parameters, state: State) -> State:
    """What torch finds of parameters that lie on other ranks when it loads full state. Communicates.

    It loads what it finds on this rank alone, and puts full tensors in the place of these, which have the right shapes.
    """
    found: State = {}
    for _, here, by_rank in _outlines("set", parameters, state):
        for number, parameter in here.items():
            for key, one in next((outline[number] for outline in by_rank if outline.get(number)), {}).items():
                if isinstance(one, Extent):
                    one = torch.empty((), dtype=one.dtype, device=parameter.device).expand(one.shape)
                found.setdefault(number, {})[key] = one
    return found


def _outlines(verb: str, parameters: Parameters, state: State) -> Iterator[tuple[Communicator, Parameters, list[State]]]:
    """The parameters of each group of ranks, and the outline of their state by rank. Communicates."""
    for comm in dict.fromkeys(p.shard_info.comm for p in parameters.values()):
        here = {number: p for number, p in parameters.items() if p.shard_info.comm is comm}
        yield comm, here, agree_and_gather(comm, f"{verb}_optimizer_state_dict", lambda here=here: _outline(here, state))  # type: ignore[misc]


def _outline(parameters: Parameters, state: State) -> State:
    """This rank's state with an Extent in place of each tensor that has dimensions."""
    return {
        number: {key: _extent(parameter.shard_info, key, one) for key, one in state.get(number, {}).items()}
        for number, parameter in parameters.items()
        if not (isinstance(parameter, EmptyShardParameter) and parameter.shard_info.numel)
    }


def _extent(info: ShardInfo, key: str, one: Any) -> Any:
    if isinstance(one, ShardTensor):
        return Extent(one.shard_info.shape, one.dtype, one.shard_info.first, one.shard_info.local_shape.numel())
    if isinstance(one, Tensor):
        return Extent(tuple(one.shape), one.dtype, 0, one.numel()) if one.dim() else one.detach().cpu().clone()
    if not isinstance(one, bool | int | float | str | None):
        raise ShardingError(
            f"{_FULL}: {key!r} of parameter {info.name!r} is a {type(one).__name__}; only tensors and plain values can be kept."
        )
    return one


def _together(info: ShardInfo, by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of one parameter on all ranks: for each tensor the Extents by rank, and each other value once.

    Raises:
        ShardingError: a rank lacks a part of a tensor, or has another value.
    """
    found: dict[str, Any] = {}
    for key in dict.fromkeys(key for kept in by_rank for key in kept):
        what = f"{_FULL}: {key!r} of parameter {info.name!r}"
        absent = [rank for rank, numel in enumerate(info.cut.numels()) if numel and key not in by_rank[rank]]
        if absent:
            raise ShardingError(
                f"{what} is missing on ranks {absent}, which hold a part of the parameter; step every rank alike."
            )
        there = [kept[key] for kept in by_rank if key in kept]
        if not any(isinstance(one, Extent) for one in there):
            if any(one != there[0] for one in there):
                raise ShardingError(f"{what} differs between ranks: {there}; step every rank alike.")
            found[key] = deepcopy(there[0])  # simulated ranks share objects
            continue
        kinds = {one[:2] if isinstance(one, Extent) else type(one) for one in there}
        if len(kinds) > 1 or sum(one.numel for one in there) != prod(there[0].shape):
            raise ShardingError(
                f"{what} is a tensor of each rank's own, with no full form: {there}. fsdp.save keeps it for the same number of "
                "ranks."
            )
        found[key] = [kept.get(key, Extent(there[0].shape, there[0].dtype, 0, 0)) for kept in by_rank]
    return found


def _in_full(found: Any, comm: Communicator, mine: Any, parameter: ShardParameter) -> Any:
    """The value that all ranks have, or the full tensor of which each rank has the part that its Extent says. Communicates."""
    if not isinstance(found, list):
        return found
    full = torch.empty(found[0].shape, dtype=found[0].dtype, device=parameter.device)
    parts = [(rank, extent.first, extent.numel) for rank, extent in enumerate(found)]
    mine = None if mine is None else plain(mine)
    return gather_parts(full, parts, mine, comm, f"optimizer state of {parameter.shard_info.name}")


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
        wanted = _info_for(info, one.shard_info.shape, one.shard_info.local_shape)
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
