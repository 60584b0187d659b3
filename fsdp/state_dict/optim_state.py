"""Optimizer state by parameter name: gathered in full, loaded from full.

Names, not numbers: an optimizer's own state dict counts parameters in its order, and holds this rank's parts.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp.comm.agreement import agree_on_refusals
from fsdp.comm.communicator import Communicator
from fsdp.errors import ShardingError
from fsdp.runtime.registry import collective_call, resting_units_in, world_comm_in
from fsdp.state_dict.fqns import entries
from fsdp.state_dict.optim_placement import PlacementKind, StatePlacement, placement_from_full, placement_of
from fsdp.state_dict.param_ranges import broadcast_all
from fsdp.state_dict.param_shard import ParamShard, param_shards_in

PLAIN = (bool, int, float, str, type(None))
State = dict[str, dict[str, Any]]
"""By the name of the parameter and of what the optimizer keeps for it."""


class TensorMeta(NamedTuple):
    """One tensor with dimensions, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class OptimizerView:
    """The parameters of an optimizer by name, and what this rank holds of them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, caller: str) -> None:
        self.units = resting_units_in(model, caller)
        self.comm: Communicator = self.units[0].comm
        """To the ranks that share the shards: what all of them keep together is the full state."""
        self.world_comm = world_comm_in(model, caller)
        self.optimizer = optimizer
        self.caller = caller
        self.param_shards: dict[str, ParamShard] = {}
        """Of the sharded ones."""
        names: dict[int, str] = {}
        for name, tensor in entries(model):
            names.setdefault(id(tensor), name)
        param_shards = param_shards_in(model)
        self.parameters: dict[str, Tensor] = {}
        self.groups: list[list[str]] = []
        """The names in each group, in order."""
        for group in optimizer.param_groups:
            self.groups.append([])
            for parameter in group["params"]:
                name = names.get(id(parameter), "")
                if not name:
                    raise ShardingError(
                        f"{caller}: the optimizer steps a parameter of shape {tuple(parameter.shape)} that is not in this model; "
                        "make it from model.parameters()."
                    )
                self.groups[-1].append(name)
                self.parameters[name] = parameter
                if id(parameter) in param_shards:
                    self.param_shards[name] = param_shards[id(parameter)]

    @property
    def rank(self) -> int:
        return self.comm.rank

    def options(self) -> list[dict[str, Any]]:
        """The groups as an optimizer's state dict has them, with names for numbers."""
        options = self.optimizer.state_dict()["param_groups"]
        return [
            {**{key: deepcopy(value) for key, value in group.items() if key != "param_names"}, "params": list(names)}
            for group, names in zip(options, self.groups, strict=True)
        ]

    def local(self) -> State:
        """This rank's state. What is kept for a part without elements is nothing."""
        return {name: dict(self.optimizer.state[p]) for name, p in self.parameters.items() if self.optimizer.state.get(p)}

    def placements(self) -> tuple[dict[tuple[str, str], StatePlacement], State]:
        """How every tensor lies over the ranks, and what is no tensor, or one without dimensions: the same on every rank.

        Raises:
            ShardingError: on every rank, if some state is there on some ranks only or of a type that cannot be saved.
        """
        by_rank = agree_on_refusals(self.comm, lambda: _tensor_meta(self.caller, self.local()))
        keys = dict.fromkeys((name, key) for state in by_rank for name, kept in state.items() for key in kept)
        placements: dict[tuple[str, str], StatePlacement] = {}
        values: State = {}
        for name, key in sorted(keys):
            where = f"{self.caller}: {key!r} of parameter {name!r}"
            there = {rank: state[name][key] for rank, state in enumerate(by_rank) if key in state.get(name, {})}
            found = next(iter(there.values()))
            if isinstance(found, TensorMeta):
                shapes = {rank: one.shape for rank, one in there.items() if isinstance(one, TensorMeta)}
                placements[name, key] = placement_of(where, self.param_shards.get(name), shapes, found.dtype)
            elif any(one != found for one in there.values()):
                raise ShardingError(f"{where} differs between ranks: {there}; step every rank alike.")
            else:
                values.setdefault(name, {})[key] = found
        return placements, values

    def named(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict by name, given one by name or one by number from an optimizer with the same groups.

        Raises:
            ShardingError: it is neither, or names parameters this optimizer does not have, or lacks some.
        """
        if not isinstance(state_dict, Mapping) or {"state", "param_groups"} - set(state_dict):
            raise ShardingError(f"{self.caller}: give a dict with 'state' and 'param_groups'.")
        given = [list(group["params"]) for group in state_dict["param_groups"]]
        state = state_dict["state"]
        if any(isinstance(one, int) for names in given for one in names):
            if [len(names) for names in given] != [len(names) for names in self.groups]:
                raise ShardingError(
                    f"{self.caller}: the state dict has groups of {[len(n) for n in given]} parameters, the optimizer of "
                    f"{[len(n) for n in self.groups]}."
                )
            by_number = {
                number: name
                for numbers, names in zip(given, self.groups, strict=True)
                for number, name in zip(numbers, names, strict=True)
            }
            state = {by_number[number]: kept for number, kept in state.items()}
            given = self.groups
        known = {name for names in self.groups for name in names}
        strange = sorted(({name for names in given for name in names} ^ known) | (set(state) - known))
        if strange:
            raise ShardingError(
                f"{self.caller}: parameters {strange} are in one of the state dict and the optimizer only; make the "
                "optimizer from the same parameters."
            )
        return {"state": state, "param_groups": self._groups(given, state_dict["param_groups"])}

    def _groups(self, given: list[list[str]], options: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The given options in the order of this optimizer's groups."""
        found = []
        for names in self.groups:
            of = next((i for i, there in enumerate(given) if set(there) == set(names)), None)
            if of is None:
                raise ShardingError(
                    f"{self.caller}: the optimizer has a group of {names}, the state dict has groups of other parameters; group "
                    "them alike."
                )
            found.append({**options[of], "params": names})
        return found

    def install(self, state: State, groups: list[dict[str, Any]]) -> None:
        """Give this rank's state to the optimizer, its own way, which knows dtypes and devices."""
        numbers = {name: number for number, name in enumerate(name for names in self.groups for name in names)}
        current = self.optimizer.state_dict()["param_groups"]
        renumbered = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": mine["params"]}
            for group, mine in zip(groups, current, strict=True)
        ]
        in_order = [number for group in current for number in group["params"]]
        by_number = {in_order[numbers[name]]: kept for name, kept in state.items()}
        self.optimizer.load_state_dict({"state": by_number, "param_groups": renumbered})

    def holds(self, name: str) -> bool:
        """Whether this rank has elements of a parameter, and so state."""
        return name not in self.param_shards or self.rank in self.param_shards[name].holders


@torch.no_grad()
@collective_call
def full_optim_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank0_only: bool = True, device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """The state of `optimizer` in full, by parameter name: {"state": {name: {...}}, "param_groups": [{"params": names, ...}]}.

    That is the form of torch's `get_optimizer_state_dict(..., full_state_dict=True)`. With `rank0_only`, the other ranks take
    part and get an empty dict. Communicates: every rank must call it alike. Memory beyond what is returned: one tensor.

    Raises:
        ShardingError: inside a forward, a backward or a summon; the optimizer is another model's; or some state is a statistic
            over this rank's part alone, which has no full form (`fsdp.save` keeps it for the same number of ranks).
    """
    view = OptimizerView(model, optimizer, "full_optim_state_dict")
    placements, state = view.placements()
    for (name, key), placement in placements.items():
        if placement.kind is PlacementKind.PER_RANK:
            raise ShardingError(
                f"full_optim_state_dict: {key!r} of parameter {name!r} has shape {placement.shape} on each rank, a statistic "
                "over that rank's part alone, and no full form; fsdp.save keeps it for the same number of ranks."
            )
    wanted = view.world_comm.rank == 0 or not rank0_only
    local = view.local()
    for (name, key), placement in placements.items():
        full = _gather(placement, local.get(name, {}).get(key), view, name)
        if wanted:
            state.setdefault(name, {})[key] = full.to(device, copy=full.device == torch.device(device))
    ordered = {name: state[name] for names in view.groups for name in names if name in state}
    return {"state": ordered, "param_groups": view.options()} if wanted else {}


@torch.no_grad()
@collective_call
def load_full_optim_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any] | None) -> None:
    """Load the full state of an optimizer: the same on every rank, or rank 0's where others give None.

    By name, as `full_optim_state_dict` and torch's `get_optimizer_state_dict` give it, or by number, as the `state_dict()` of an
    unsharded optimizer over the same parameters in the same groups. Communicates: every rank must call it alike.

    Raises:
        ShardingError: on every rank, if on any of them names or groups differ, or some state cannot be cut like its parameter.
            Nothing was loaded.
    """
    view = OptimizerView(model, optimizer, "load_full_optim_state_dict")

    def check() -> tuple[State, list[dict[str, Any]]] | None:
        if state_dict is None:
            if view.world_comm.rank == 0:
                raise ShardingError(f"{view.caller}: rank 0 must give the state dict; only other ranks may give None.")
            return None
        named = view.named(state_dict)
        outline = _tensor_meta(view.caller, named["state"])
        for name, key, tensor in _tensor_metas(outline):
            placement_from_full(f"{view.caller}: {key!r} of parameter {name!r}", view.param_shards.get(name), *tensor)
        return outline, named["param_groups"]

    answers = agree_on_refusals(view.world_comm, check)
    first = answers[0]
    assert first is not None, "rank 0 has been asked"
    outline, groups = first
    from_rank_0 = any(answer is None for answer in answers)
    given = {} if state_dict is None else view.named(state_dict)["state"]
    mine: State = {
        name: {key: deepcopy(value) for key, value in kept.items()} for name, kept in outline.items() if view.holds(name)
    }
    for name, key, (shape, dtype) in _tensor_metas(outline):
        placement = placement_from_full("", view.param_shards.get(name), shape, dtype)
        full = given[name][key] if given else torch.empty(shape, dtype=dtype)
        if from_rank_0:
            full = full.detach().to(view.parameters[name].device).contiguous()
            broadcast_all([(0, full)], view.world_comm, name)
        if view.holds(name):
            mine[name][key] = placement.cut(full, view.rank)
    view.install(mine, groups)


def _tensor_meta(caller: str, state: Mapping[str, Mapping[str, Any]]) -> State:
    """The same, with outlines for tensors that have dimensions.

    Raises:
        ShardingError: something is neither a tensor nor a plain value.
    """
    found: State = {}
    for name, kept in state.items():
        found[name] = {}
        for key, value in kept.items():
            if not isinstance(value, (Tensor, *PLAIN)):
                raise ShardingError(
                    f"{caller}: {key!r} of parameter {name!r} is a {type(value).__name__}; only tensors and plain "
                    "values can be kept."
                )
            if isinstance(value, Tensor):
                value = TensorMeta(tuple(value.shape), value.dtype) if value.dim() else value.detach().cpu().clone()
            found[name][key] = value
    return found


def _tensor_metas(outline: State) -> Iterator[tuple[str, str, TensorMeta]]:
    for name, kept in outline.items():
        for key, value in kept.items():
            if isinstance(value, TensorMeta):
                yield name, key, value


def _gather(placement: StatePlacement, local: Tensor | None, view: OptimizerView, name: str) -> Tensor:
    """One tensor of the state in full, on every rank. Each rank that holds some of it sends that to all others."""
    if placement.param_shard is None:
        assert local is not None, "every rank steps what is not sharded"
        return local.detach()
    full = torch.empty(placement.shape, dtype=placement.dtype, device=view.parameters[name].device)
    parts = []
    for rank in placement.param_shard.holders:
        first, numel = placement.span(rank)
        part = full.view(-1)[first : first + numel]
        if rank == view.rank:
            assert local is not None, "the ranks have said who has it"
            part.copy_(local.reshape(-1))
        parts.append((rank, part))
    broadcast_all(parts, view.comm, name)
    return full
