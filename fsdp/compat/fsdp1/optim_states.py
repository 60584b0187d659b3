"""Optimizer state in FSDP1's formats: by name in full, by name with parts cut by rows, by number for this rank's optimizer."""

import warnings
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.autograd.frames import own_method
from fsdp.compat.fsdp1 import torch_names
from fsdp.compat.fsdp1.sharding import instances_in
from fsdp.compat.fsdp1.state_types import settings_of
from fsdp.compat.fsdp1.states import format_of, part_of
from fsdp.compat.fsdp1.torch_names import OptimStateKeyType, StateDictType
from fsdp.compat.shared.plain_group import PlainGroup
from fsdp.errors import ShardingError
from fsdp.state_dict.fqns import first_names, plain_fqn
from fsdp.state_dict.model_view import ModelView
from fsdp.state_dict.optim_state import OptimizerView, gather_optim_state


def order_of(model: nn.Module, optim: torch.optim.Optimizer | None, optim_input: Any) -> torch.optim.Optimizer:
    """The optimizer whose parameters are meant: `optim`, or one over `optim_input`, or one over all parameters.

    Raises:
        ValueError: both are given.
    """
    if optim is not None and optim_input is not None:
        raise ValueError("optim and optim_input contradict each other; give optim.")
    warn_of(optim_input)
    if optim is not None:
        return optim
    given = list(model.parameters() if optim_input is None else optim_input)
    return torch.optim.SGD([{"params": list(one["params"])} if isinstance(one, dict) else one for one in given], lr=1.0)


def warn_of(optim_input: Any) -> None:
    """Warn of an argument that FSDP1 deprecates."""
    if optim_input is not None:
        warnings.warn("the `optim_input` argument is deprecated; give optim, the optimizer.", FutureWarning, stacklevel=5)


def broadcast(given: Any, model: nn.Module, group: Any) -> dict[str, Any]:
    """The state dict that rank 0 gives. `group` is None or the group of ranks that share the shards. Communicates."""
    instance = instances_in(model)[0]
    comms = None if instance._unit_ref is None else instance._unit_ref.engine.comms
    across = None if comms is None else comms.joint if isinstance(instance.process_group, PlainGroup) else comms.across
    if across is not None:  # with tensor parallelism one rank of all dimensions has the full state
        wanted: dict[str, Any] = across.gather_objects(given if across.rank == 0 else None, "optim_state_dict_to_load")[0]
        return wanted
    if instance._inter_node_pg is not None and group in (None, instance.process_group):
        given = torch_names.from_rank_0(given, instance._inter_node_pg)  # to the first rank of each replica
    found: dict[str, Any] = torch_names.from_rank_0(given, instance.process_group if group is None else group)
    return found


# saving -----------------------------------------------------------------------------------


class StateView(OptimizerView):
    """The parameters of an optimizer by name, and its state, or what counts in place of that."""

    _given: Mapping[Any, dict[str, Any]] | None = None
    _options: list[dict[str, Any]] | None = None

    def take_state(self, state_dict: Mapping[str, Any]) -> None:
        """From now on, the values of `state_dict` count in place of those that the optimizer has.

        It is what the `state_dict()` of the optimizer returned on this rank, perhaps with values added or changed. Its keys are
        numbers, or the names that the optimizer gives to its parameters. Its groups may be left out.

        Raises:
            ShardingError: a key is none of the optimizer's.
        """
        groups = own_method(self.optimizer, "state_dict")()["param_groups"]
        known: dict[Any, Tensor] = {
            **{number: self.parameters[name] for name, number in self.numbers(groups).items() if isinstance(number, int)},
            **self.parameters,
        }
        found = {key: plain_fqn(key) if isinstance(key, str) else key for key in state_dict["state"]}
        unknown = sorted(str(key) for key, number in found.items() if number not in known)
        if unknown:
            raise ShardingError(
                f"{self.operation}: the optimizer has no parameters {unknown}, which the state dict has; give what its "
                "state_dict() returns."
            )
        self._given = {known[found[key]]: kept for key, kept in state_dict["state"].items()}
        self._options = state_dict.get("param_groups")

    def options(self) -> list[dict[str, Any]]:
        return self.with_names(self._options) if self._options else super().options()

    def own_state(self) -> Mapping[Any, dict[str, Any]]:
        return super().own_state() if self._given is None else self._given


def full(
    model: nn.Module, optim: torch.optim.Optimizer, rank0_only: bool, to_host: bool = True, given: Any = None
) -> dict[str, Any]:
    """See `FullyShardedDataParallel.full_optim_state_dict`. `given`: what counts in place of the optimizer's own state."""
    device = "cpu" if to_host else instances_in(model)[0].compute_device
    view = StateView(ModelView(model, "optim_state_dict"), optim)
    _check_alike(view)
    if given is not None:
        view.take_state(given)
    return {**gather_optim_state(view, rank0_only, device)}


def _check_alike(view: OptimizerView) -> None:
    """Check that all ranks step the sharded parameters that rank 0 steps.

    Raises:
        RuntimeError: on every rank; one leaves some out.
    """
    by_rank = view.comm.gather_objects([*view.param_shards], view.operation)
    for rank, names in enumerate(by_rank):
        missing = sorted(set(by_rank[0]) - set(names))
        if missing:
            raise RuntimeError(
                "FSDP currently requires each rank to have at least the optimizer states needed by rank 0's optimizer but some "
                f"ranks are missing some of those states: rank {rank} leaves out {missing}. Make the optimizer from the same "
                "parameters on every rank."
            )


def sharded(model: nn.Module, optim: torch.optim.Optimizer, given: Any = None) -> dict[str, Any]:
    """See `FullyShardedDataParallel.sharded_optim_state_dict`. `given`: see `full`."""
    found = full(model, optim, rank0_only=False, given=given)
    instance = instances_in(model)[0]

    def part(value: Any, parameter: Tensor) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        return part_of(instance, value.to(instance.compute_device), parameter)

    # in the order of the model, which is the same on all ranks: who gathers the parts does so in the order of the dict
    names = first_names(model)
    stepped = {name: p for p in model.parameters() if (name := names[id(p)]) in found["state"]}
    state = {name: {key: part(value, p) for key, value in found["state"][name].items()} for name, p in stepped.items()}
    return {**found, "state": state}


def in_format(model: nn.Module, optim: torch.optim.Optimizer, given: Any) -> dict[str, Any]:
    """See `FullyShardedDataParallel.optim_state_dict`."""
    settings = settings_of(model)
    for one in instances_in(model):
        format_of(one)
    if settings.state_dict_type is StateDictType.SHARDED_STATE_DICT:
        found = sharded(model, optim, given)
    else:
        config = settings.optim_state_dict_config
        found = full(model, optim, getattr(config, "rank0_only", False), config.offload_to_cpu, given)
    if given is not None and "param_groups" not in given:
        found.pop("param_groups", None)
    return found


# loading ----------------------------------------------------------------------------------


@torch.no_grad()
def to_load(given: Mapping[str, Any], model: nn.Module, optim: torch.optim.Optimizer, is_named: bool = False) -> dict[str, Any]:
    """This rank's part of a state by name, as `optim.load_state_dict` takes it. Communicates for parts that are cut by rows.

    With `is_named` it is by the names of `model.named_parameters()`, for an optimizer that gives its parameters names.
    """
    view = OptimizerView(ModelView(model, "optim_state_dict_to_load"), optim)
    group = instances_in(model)[0].process_group
    left_out = _left_out(given, view)
    complete = {"param_groups": view.options(), **given}
    named = view.named({**complete, "param_groups": _filled(complete["param_groups"], left_out, view)})
    state: dict[str, dict[str, Any]] = {}
    for name, kept in named["state"].items():
        values = {key: torch_names.full_value(value, group) for key, value in kept.items()}
        if view.holds(name) or optim.state.get(view.parameters[name]):
            state[name] = {key: _part(view, name, key, value) for key, value in values.items()}
    found: dict[str, Any]
    if is_named:
        current = {id(parameter): name for name, parameter in model.named_parameters()}
        names = {name: current[id(parameter)] for name, parameter in view.parameters.items()}
        groups = [{**group, "params": [names[name] for name in group["params"]]} for group in named["param_groups"]]
        found = {"state": {names[name]: kept for name, kept in state.items()}, "param_groups": groups}
    else:
        found = view.numbered(state, named["param_groups"])
        without = {number for number, name in enumerate(name for names in view.groups for name in names) if name in left_out}
        for one in found["param_groups"]:
            one["params"] = [number for number in one["params"] if number not in without]
    return found if "param_groups" in given else {"state": found["state"]}


def _left_out(given: Mapping[str, Any], view: OptimizerView) -> set[str]:
    """The parameters of the optimizer that are not sharded, and which the state does not have: the caller adds their state.

    Raises:
        ValueError: the state has a part of the parameters of a unit.
    """
    names = {name for group in given.get("param_groups", ()) for name in group["params"]}
    if not names or not all(isinstance(name, str) for name in names):
        return set()
    absent = set(view.parameters) - names
    for unit in {id(one.flat): one.flat for one in view.param_shards.values()}.values():
        own = {name for name, one in view.param_shards.items() if one.flat is unit}
        if own & absent and own - absent:
            raise ValueError(
                "All unflattened parameters comprising a single flat parameter must have scalar state with the same value and "
                f"dtype: the state dict has not {sorted(own & absent)}, and has other parameters of the same module."
            )
    return absent - set(view.param_shards)


def _filled(groups: list[dict[str, Any]], left_out: set[str], view: OptimizerView) -> list[dict[str, Any]]:
    """The given groups with the parameters that are left out, each in the group of those that are in its group here."""
    if not left_out:
        return groups
    return [
        {
            **group,
            "params": [
                *group["params"],
                *(n for mine in view.groups if set(mine) & set(group["params"]) for n in mine if n in left_out),
            ],
        }
        for group in groups
    ]


def _part(view: OptimizerView, name: str, key: str, value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.dim():
        return deepcopy(value)
    if not view.holds(name):
        parameter = view.parameters[name]
        is_like_param = tuple(value.shape) == view.param_shards[name].shape
        return torch.empty(parameter.shape if is_like_param else (0,), dtype=value.dtype, device=parameter.device)
    placement = view.place_full(name, key, tuple(value.shape), value.dtype)
    return placement.part_of(value, view.comm.rank).to(view.parameters[name].device)


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
