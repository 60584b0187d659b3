"""The state of an optimizer as sharded state: what its `state_dict()` returns, and what it takes from others.

Rule 1: a state dict holds a ShardedValue for each shard, as that of a model does. Distributed Checkpoint saves and loads it.
Rule 2: a full tensor is cut to this rank's part without communication. What fits in no way is refused before it is loaded.
Rule 3: a state dict communicates for torch's functions with full_state_dict=True alone. They get full tensors.

The first step, and each call of this engine that is given an optimizer, sets the hooks on its state dict. A new optimizer has
none yet. Its state is looked through at its first step.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp.autograd.dynamo import is_full_graph
from fsdp.autograd.frames import FullStateCall, full_state_call
from fsdp.comm.agreement import agree_and_gather
from fsdp.errors import ShardingError
from fsdp.shards.dtensors import STANDS_FOR
from fsdp.shards.info import ShardInfo
from fsdp.shards.refusals import refuse_compiled
from fsdp.shards.shard_parameter import Clock, EmptyShardParameter, ShardParameter, summoned
from fsdp.shards.shard_tensor import ShardTensor, as_shard, local_operators, plain
from fsdp.shards.sharded_value import ShardedValue
from fsdp.shards.state_placement import State, StatePlacement, outline_of, placed, where_of

ELEMENT_WISE_OPTIMIZERS: Final = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
    *(torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD, torch.optim.Adagrad, torch.optim.Adadelta),
)
"""torch's optimizers whose step computes each element of a parameter from the same element of its gradient and state."""
NUMBERS: Final = frozenset({"step", "mu_product", "eta", "mu"})
"""Keys under which these optimizers keep one number for a parameter. It is the same on every rank."""
_hooked: WeakSet[Optimizer] = WeakSet()
"""The optimizers with hooks."""
cuts: Final = Clock()
"""How often parameters were cut into shards, or made ordinary again, in the whole process."""
_known_cuts: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
"""The count of `cuts` when the state of an optimizer was last compared with its parameters."""
_REMEDY: Final = "take fsdp.full_optim_state_dict before fsdp.unwrap, and load it with fsdp.load_full_optim_state_dict"
_FULL: Final = "full_state_dict=True"
StateDict = dict[str, Any]
Parameters = dict[Any, ShardParameter]
"""The sharded parameters of an optimizer, by number or name."""


def hook_state(optimizer: Optimizer) -> None:
    """Turn the state of `optimizer` into shards, and set the hooks on its state dict, if it has none yet.

    Raises:
        ShardingError: some state does not fit its parameter, or the step of the optimizer is compiled.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if optimizer in _hooked or not any([issubclass(kind, ShardParameter) for kind in set(map(type, parameters))]):
        return
    if any(base.__module__.startswith("torchao.") for base in type(optimizer).__mro__):
        refuse_compiled(type(optimizer).__name__, "torchao compiles it")
    if any(map(is_full_graph, vars(optimizer).values())):
        refuse_compiled(type(optimizer).__name__, "it calls functions that are compiled with fullgraph=True")
    adopt_state(optimizer)
    # a wrapper that never calls Optimizer.__init__ has a state dict of its own, around that of the optimizer in it
    if hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
        optimizer.register_state_dict_post_hook(_give_values)
        optimizer.register_load_state_dict_pre_hook(_take_values)
    _hooked.add(optimizer)


def compare_state(optimizer: Optimizer) -> None:
    """Cut full state of parameters that have become shards, as far as it is known to be such.

    Raises:
        ShardingError: some state is of shards that a parameter does not have any more, or does not fit it.
    """
    if _known_cuts.get(optimizer, 0) == cuts.count:
        return
    known = type(optimizer) in ELEMENT_WISE_OPTIMIZERS
    is_fused = isinstance(optimizer, ELEMENT_WISE_OPTIMIZERS) and optimizer.defaults.get("fused")
    for parameter, kept in optimizer.state.items():
        if not isinstance(parameter, Tensor) or parameter in summoned:
            continue
        if isinstance(parameter, ShardParameter):
            parts = _parts(optimizer, parameter, kept)
            # others may keep statistics over this rank's part, beside shards
            if known or not any([isinstance(one, ShardTensor) for one in kept.values()]):
                kept.update(parts)
            continue
        for key, one in kept.items() if isinstance(kept, dict) else ():
            # fused implementations compare no shapes: they would write past the end
            compares = (known or is_fused) and type(one) is Tensor and key not in NUMBERS
            if isinstance(one, ShardTensor) or (compares and one.shape != parameter.shape):
                raise ShardingError(
                    f"{type(optimizer).__name__}: the state {key!r}, of shape {tuple(plain(one).shape)} on this rank, is of "
                    f"another cut than the parameter, of shape {tuple(parameter.shape)}, since its module was wrapped or "
                    f"unwrapped: {_REMEDY}."
                )
    if not _summoned(optimizer):
        _known_cuts[optimizer] = cuts.count


def before_step(optimizer: Optimizer, *_: object) -> None:
    """See `hook_state` and `compare_state`. Raise ShardingError if the step needs parts while the model shows full values."""
    full = _summoned(optimizer)
    # one optimizer may have two models, of which the other is to be stepped
    others = full and any(p.grad is not None for group in optimizer.param_groups for p in group["params"] if p not in summoned)
    for parameter in full:
        kept = {} if others and parameter.grad is None else optimizer.state.get(parameter, {})
        stands_for = STANDS_FOR in parameter.__dict__ and parameter.requires_grad
        if stands_for or any(isinstance(one, ShardTensor) for one in (kept.values() if isinstance(kept, dict) else [kept])):
            _refuse_summoned(optimizer, "step", parameter)
    hook_state(optimizer)
    compare_state(optimizer)


def _summoned(optimizer: Optimizer) -> list[Tensor]:
    if not summoned.data:
        return []
    return [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter in summoned]


def _refuse_summoned(optimizer: Optimizer, operation: str, parameter: Tensor) -> NoReturn:
    raise ShardingError(
        f"{type(optimizer).__name__}.{operation}: the model shows the full value of {summoned[parameter]!r}, and the optimizer "
        "keeps this rank's part; leave summon_full_params first."
    )


def adopt_state(optimizer: Optimizer) -> None:
    """Turn the state of each sharded parameter into shards. If some does not fit, raise ShardingError, and change nothing."""
    optimizer.state.update(
        {p: _adopted(optimizer, p, kept) for p, kept in optimizer.state.items() if isinstance(p, ShardParameter) and kept != {}}
    )


class Successor(NamedTuple):
    """What is trained in the place of a parameter."""

    parameter: nn.Parameter
    part_of_state: Callable[[Tensor], Tensor | None]
    """This rank's part of a tensor of an optimizer's state of the former parameter; None if nothing says how to cut it."""


def living_optimizers() -> list[Optimizer]:
    """All optimizers of this process. Torch lists them nowhere, so the garbage collector is asked: 0.1 s for 300,000 objects."""
    return [one for one in gc.get_objects() if issubclass(type(one), Optimizer)]


def hand_over(optimizers: Iterable[Optimizer], successors: Mapping[Any, Successor]) -> None:
    """Let `optimizers` train the successors of their parameters, with this rank's parts of their state.

    An optimizer of which some state cannot be cut keeps all its parameters. Its step is refused, see `is_replaced`.
    """
    for optimizer in optimizers:
        lists = [group["params"] for group in vars(optimizer).get("param_groups", ())]  # one around another has none itself
        former = [one for parameters in lists for one in parameters if one in successors]
        state = {one: optimizer.state[one] for one in former if one in optimizer.state}
        parts = {one: _parts_for(successors[one], kept) for one, kept in state.items() if isinstance(kept, dict)}
        if len(parts) < len(state) or any([part is None for kept in parts.values() for part in kept.values()]):
            continue
        for parameters in lists:
            parameters[:] = [successors[one].parameter if one in successors else one for one in parameters]
        for one, kept in parts.items():
            del optimizer.state[one]
            optimizer.state[successors[one].parameter] = kept


def _parts_for(successor: Successor, kept: dict[str, Any]) -> dict[str, Any]:
    """The state `kept` of a parameter, as its successor's."""
    return {
        key: value if isinstance(value, int | float) or getattr(value, "ndim", None) == 0 else successor.part_of_state(value)
        for key, value in kept.items()
    }


def _give_values(optimizer: Optimizer, state_dict: StateDict) -> None:
    """Put values that know the full shape into a state dict, and an empty dict for each parameter that is on other ranks."""
    call, given = full_state_call(), state_dict["state"]
    parameters = {number: p for number, p in _numbered(optimizer, state_dict) if isinstance(p, ShardParameter)}
    state = given | {
        number: {key: _value(key, one) for key, one in _as_dict(optimizer, p, given[number]).items()}
        for number, p in parameters.items()
        if number in given
    }
    elsewhere = [number for number, p in parameters.items() if isinstance(p, EmptyShardParameter)]
    if call is not None and not call.loads:
        state.update(_full_state(parameters, given, call))
        elsewhere = [number for number in elsewhere if not parameters[number].shard_info.numel]
    elif call is not None:
        state = {**_state_of_others(parameters, given), **{number: kept for number, kept in state.items() if kept}}
    # torch's set_optimizer_state_dict asks for an entry of every parameter, also of those that lie on other ranks
    for number in elsewhere if state else ():
        state.setdefault(number, {})
    state_dict["state"] = state


def _full_state(parameters: Parameters, state: State, call: FullStateCall) -> State:
    """The full state of each parameter that has state on any rank, if this rank keeps it. Communicates and refuses as `_placed`.

    Memory besides the result: one tensor. Traffic: each rank sends its part of a tensor to all others.
    """
    full: State = {}
    for number, key, one in _placed("get", parameters, state):
        if isinstance(one, StatePlacement):
            info, mine = parameters[number].shard_info, state.get(number, {}).get(key)
            one = one.gather(
                where_of(_FULL, key, info.name), None if mine is None else plain(mine), info.comm, parameters[number].device
            )
        if call.keeps:
            full.setdefault(number, {})[key] = one.cpu() if call.offloads and isinstance(one, Tensor) else one
    return full


def _state_of_others(parameters: Parameters, state: State) -> State:
    """What torch finds of parameters that lie on other ranks when it loads full state. Communicates.

    It loads what it finds on this rank alone, and puts full tensors in the place of these, which have the right shapes.
    """
    others: State = {}
    for number, key, one in _placed("set", parameters, state):
        if isinstance(one, StatePlacement):
            one = torch.empty((), dtype=one.dtype, device=parameters[number].device).expand(one.shape)
        others.setdefault(number, {})[key] = one
    return others


def _placed(verb: str, parameters: Parameters, state: State) -> Iterator[tuple[Any, str, Any]]:
    """All state that any rank has: the number of the parameter, the key, and the value or its placement, see `placed`.

    Communicates, in one group of ranks after the other.
    """
    for comm in dict.fromkeys(p.shard_info.comm for p in parameters.values()):
        here = {number: p for number, p in parameters.items() if p.shard_info.comm is comm}
        names = {number: p.shard_info.name for number, p in here.items()}
        local = {
            number: {key: plain(one) if isinstance(one, ShardTensor) else one for key, one in state[number].items()}
            for number, p in here.items()
            if number in state and not (isinstance(p, EmptyShardParameter) and p.shard_info.numel)
        }
        by_rank = agree_and_gather(comm, f"{verb}_optimizer_state_dict", partial(outline_of, _FULL, local, names))
        places = {number: p.shard_info.place_state for number, p in here.items()}
        for number, kept in placed(_FULL, by_rank, places, names).items():
            yield from ((number, key, one) for key, one in kept.items())


def _take_values(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
    """Put this rank's parts in the places of values and full tensors in a given state dict, or refuse it before it is loaded."""
    for parameter in _summoned(optimizer) if state_dict["state"] else ():
        _refuse_summoned(optimizer, "load_state_dict", parameter)
    if torch.is_inference_mode_enabled():
        raise ShardingError("load_state_dict of an optimizer: no step could change the state; call it outside inference_mode.")
    parameters = dict(_numbered(optimizer, state_dict))
    state = {
        number: _adopted(optimizer, parameters[number], kept) if isinstance(parameters.get(number), ShardParameter) else kept
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


def _adopted(optimizer: Optimizer, parameter: ShardParameter, kept: Any) -> dict[str, Any]:
    """This rank's parts of the state of one parameter, or none if the optimizer makes them in its first step with it."""
    # these need none of a parameter without elements; Adagrad makes it at once
    makes_later = type(optimizer) in ELEMENT_WISE_OPTIMIZERS and not isinstance(optimizer, torch.optim.Adagrad)
    return {} if makes_later and isinstance(parameter, EmptyShardParameter) else _parts(optimizer, parameter, kept)


def _parts(optimizer: Optimizer, parameter: ShardParameter, kept: Any) -> dict[str, Any]:
    info, known = parameter.shard_info, type(optimizer) in ELEMENT_WISE_OPTIMIZERS
    with local_operators():
        return {key: _part(info, key, one, known) for key, one in _as_dict(optimizer, parameter, kept).items()}


def _as_dict(optimizer: Optimizer, parameter: ShardParameter, kept: Any) -> dict[str, Any]:
    if isinstance(kept, dict):
        return kept
    raise ShardingError(
        f"{type(optimizer).__name__} keeps a {type(kept).__name__} as its state of {parameter.shard_info.name!r}, not a dict, so "
        "it cannot be cut, saved or loaded; keep it under a name: optimizer.state[parameter] = {'momentum': ...}."
    )


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
        return as_shard(info.part_of_full(one).clone(), info)  # a copy, so that the full tensor can be freed
    if known and one.dim():
        raise ShardingError(
            f"the optimizer's state {key!r} of {info.describe()} has shape {tuple(one.shape)}, which is neither: it belongs to "
            "another rank or to another model. Load the full state with fsdp.load_full_optim_state_dict(model, optimizer, "
            "state), or a checkpoint of fsdp.save with fsdp.load."
        )
    rows = info.of_row_sizes(tuple(one.shape))
    if rows is None:
        return one
    return as_shard(one[info.first // info.cut.row :][: info.local_shape[0]].clone(), rows)


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
        f"the optimizer's state {key!r} of {info.name!r} was cut in another way than this model's parameter (other ranks, or "
        "other units): save with fsdp.save and load with fsdp.load, or with torch's dcp.save and dcp.load, which cut it anew; "
        f"or {_REMEDY}."
    )
