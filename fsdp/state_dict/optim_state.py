"""Optimizer state by parameter name: gathered in full, loaded from full.

An optimizer's own state dict holds this rank's shards, under the numbers of the parameters in the optimizer's order.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import chain
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from fsdp.autograd.frames import own_method
from fsdp.comm.agreement import agree_and_gather
from fsdp.comm.communicator import Communicator
from fsdp.comm.exchanges import broadcast_all
from fsdp.errors import ShardingError
from fsdp.runtime.registry import collective_call
from fsdp.shards.cut import Shape
from fsdp.shards.optimizer_state import adopt_state, compare_state, hook_state
from fsdp.shards.state_placement import State, StatePlacement, everywhere, has_dimensions, outline_of, placed, where_of
from fsdp.state_dict.fqns import given_by
from fsdp.state_dict.full_state import Copies
from fsdp.state_dict.model_view import ModelView
from fsdp.state_dict.param_shard import ParamShard


class FullOptimState(TypedDict, total=False):
    """The full state of an optimizer by parameter name. Empty on ranks that did not ask for it."""

    state: dict[str, dict[str, Tensor | bool | int | float | str | None]]
    """By name of the parameter, and by the optimizer's own key, such as "exp_avg"."""
    param_groups: list[dict[str, object]]
    """The options of each group; "params" are the names of its parameters."""


class OptimizerView:
    """The parameters of an optimizer by name, and this rank's state of them."""

    def __init__(self, model_view: ModelView, optimizer: torch.optim.Optimizer, operation: str = "") -> None:
        """Look up the optimizer's parameters. Errors begin with `operation`, or with the name of the public function.

        Raises:
            ShardingError: it is no optimizer; or a parameter is not in the model, or its state does not fit it.
        """
        self.comm: Communicator = model_view.units[0].comm
        """The communicator of the ranks that share the shards. Together these ranks have the full state."""
        self.world_comm = model_view.world_comm
        self.optimizer = optimizer
        self.operation = operation or model_view.function_name
        self.param_shards: dict[str, ParamShard] = {}
        """The sharded parameters."""
        self.parameters: dict[str, Tensor] = {}
        """All parameters."""
        if not hasattr(optimizer, "param_groups"):
            raise ShardingError(f"{self.operation}: the optimizer is a {type(optimizer).__name__}; give one optimizer.")
        hook_state(optimizer)
        self.groups: list[list[str]] = []
        """The names of the parameters in each group, in order."""
        for group in optimizer.param_groups:
            self.groups.append([])
            for parameter in group["params"]:
                name = model_view.fqns.get(id(parameter), "")
                if not name:
                    raise ShardingError(
                        f"{self.operation}: the optimizer steps a parameter of shape {tuple(parameter.shape)} that is not in "
                        "this model; make it from model.parameters()."
                    )
                self.groups[-1].append(name)
                self.parameters[name] = parameter
                if id(parameter) in model_view.param_shards:
                    self.param_shards[name] = model_view.param_shards[id(parameter)]

    def options(self) -> list[dict[str, Any]]:
        """The groups as in the optimizer's state dict, with names in place of numbers."""
        return self.with_names(own_method(self.optimizer, "state_dict")()["param_groups"])

    def with_names(self, options: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Groups with names in place of the numbers of their parameters."""
        return [
            {**{key: deepcopy(value) for key, value in group.items() if key != "param_names"}, "params": list(names)}
            for group, names in zip(options, self.groups, strict=True)
        ]

    def own_state(self) -> Mapping[Any, dict[str, Any]]:
        """The state that the optimizer keeps, by parameter.

        Raises:
            ShardingError: it keeps state under a key that is no parameter, or of shards that were cut in another way.
        """
        stepped = {id(p) for p in self.parameters.values()}
        kept_for = [key for key, kept in self.optimizer.state.items() if id(key) not in stepped and kept != {}]
        foreign = [f"a tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else key for key in kept_for]
        if foreign:
            raise ShardingError(
                f"{self.operation}: the optimizer has state under {foreign}, which belongs to no parameter and would be lost; "
                "keep it in an option of its groups, or outside the optimizer."
            )
        compare_state(self.optimizer)
        return self.optimizer.state

    def local(self) -> State:
        """This rank's state. A parameter without state is left out, and so is one of which this rank has no elements.

        Adagrad makes state for such a parameter too, and never steps it, so its step count there is another than on the ranks
        that have elements. Refuses what `own_state` refuses.
        """
        state = self.own_state()
        kept: State = {name: state[p] for name, p in self.parameters.items() if self.holds(name) and state.get(p)}
        for name in kept.keys() & self.param_shards.keys():
            part_of = self.param_shards[name].placement.part_of_state
            kept[name] = {key: part_of(where_of(self.operation, key, name), value) for key, value in kept[name].items()}
        return kept

    def placed(self) -> State:
        """The state of all ranks, with its placement in place of each tensor that has dimensions. Communicates.

        Tensors without dimensions are the same on every rank. The state of a parameter that is not sharded is this rank's own,
        and is not compared.

        Raises:
            ShardingError: on every rank, if some state exists on some ranks only or has a type that cannot be saved.
        """
        by_rank = agree_and_gather(self.comm, self.operation, lambda: outline_of(self.operation, self.local(), {}))
        for rank, state in enumerate(by_rank):
            if rank != self.comm.rank:
                by_rank[rank] = {name: kept for name, kept in state.items() if name in self.param_shards}
        return placed(self.operation, by_rank, {name: one.placement.place_state for name, one in self.param_shards.items()}, {})

    def place_full(self, name: str, key: str, shape: Shape, dtype: torch.dtype) -> StatePlacement:
        """The placement of a full tensor of `shape`, see `Placement.place_full_state`."""
        if name not in self.param_shards:
            return everywhere(shape, dtype)
        return self.param_shards[name].placement.place_full_state(where_of(self.operation, key, name), shape, dtype)

    def named(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict by name. The given one is by name, or by number with the same groups as this optimizer's.

        Raises:
            ShardingError: it is neither, or its parameters are not this optimizer's.
        """
        if not isinstance(state_dict, Mapping) or {"state", "param_groups"} - set(state_dict):
            raise ShardingError(f"{self.operation}: give a dict with 'state' and 'param_groups'.")
        given = [list(group["params"]) for group in state_dict["param_groups"]]
        state = state_dict["state"]
        if any(isinstance(name, int) for names in given for name in names):
            if [len(names) for names in given] != [len(names) for names in self.groups]:
                raise ShardingError(
                    f"{self.operation}: the state dict has groups of {[len(n) for n in given]} parameters, the optimizer of "
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
        unmatched = sorted(({name for names in given for name in names} ^ known) | (set(state) - known))
        if unmatched:
            raise ShardingError(
                f"{self.operation}: parameters {unmatched} are in one of the state dict and the optimizer only; make the "
                "optimizer from the same parameters."
            )
        return {"state": state, "param_groups": self._groups(given, state_dict["param_groups"])}

    def _groups(self, given: list[list[str]], options: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The given options in the order of this optimizer's groups."""
        found, left = [], dict(enumerate(map(set, given)))
        for number, names in enumerate(self.groups):
            alike = [index for index, others in left.items() if others == set(names)]
            same = number if number in alike else next(iter(alike), None)
            if same is None:
                raise ShardingError(
                    f"{self.operation}: the optimizer has a group of {names}, the state dict has groups of other parameters; "
                    "group them alike."
                )
            del left[same]
            found.append({**options[same], "params": names})
        return found

    def numbered(self, state: State, groups: list[dict[str, Any]]) -> dict[str, Any]:
        """This rank's state by the numbers of the optimizer, as its own `load_state_dict` takes it."""
        current = own_method(self.optimizer, "state_dict")()["param_groups"]
        renumbered = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": numbered["params"]}
            for group, numbered in zip(groups, current, strict=True)
        ]
        numbers = self.numbers(current)
        return {"state": {numbers[name]: kept for name, kept in state.items()}, "param_groups": renumbered}

    def numbers(self, groups: list[dict[str, Any]]) -> dict[str, Any]:
        """What stands for each parameter, by its name, in the `groups` of the optimizer's state dict."""
        return dict(zip(chain(*self.groups), chain(*(group["params"] for group in groups)), strict=True))

    def install(self, state: State, groups: list[dict[str, Any]]) -> None:
        """Load this rank's state by the optimizer's own `load_state_dict`, which converts dtypes and devices."""
        for group, mine in zip(groups, self.optimizer.param_groups, strict=True):
            for key in group.keys() & mine.keys():  # a learning rate that a graph reads stays on its device
                if isinstance(group[key], Tensor) and isinstance(mine[key], Tensor):
                    group[key] = group[key].to(mine[key].device)
        with torch.inference_mode(False), torch.no_grad():  # steps change the state, also what was read in inference mode
            own = [
                {key: one.clone() if isinstance(one, Tensor) and one.is_inference() else one for key, one in kept.items()}
                for kept in (*state.values(), *groups)
            ]
            numbered = self.numbered(dict(zip(state, own, strict=False)), own[len(state) :])
            own_method(self.optimizer, "load_state_dict")(numbered)
            adopt_state(self.optimizer)

    def holds(self, name: str) -> bool:
        """Whether this rank has state of the parameter `name`."""
        return name not in self.param_shards or self.param_shards[name].placement.keeps_state


@torch.no_grad()
@collective_call
def full_optim_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank0_only: bool = True, device: torch.device | str = "cpu"
) -> FullOptimState:
    """Return the full state by parameter name: {"state": {name: {...}}, "param_groups": [{"params": names, ...}]}.

    torch's `get_optimizer_state_dict(..., full_state_dict=True)` has the same form. With `rank0_only`, the other ranks join the
    collectives and get an empty dict. Communicates: every rank must call it alike. Memory besides the result: one tensor.

    Raises:
        ShardingError: inside a forward, a backward or a summon; the optimizer is another model's; or some state is a statistic
            over this rank's part alone, which has no full form (`fsdp.save` keeps it for the same number of ranks); or `device`
            cannot be used.
    """
    return gather_optim_state(OptimizerView(ModelView(model, "full_optim_state_dict"), optimizer), rank0_only, device)


def gather_optim_state(optimizer_view: OptimizerView, rank0_only: bool, device: torch.device | str) -> FullOptimState:
    """See `full_optim_state_dict`. Communicates."""
    wanted = optimizer_view.world_comm.rank == 0 or not rank0_only
    copies = Copies(optimizer_view.operation, optimizer_view.world_comm, device, wanted)
    state, local = optimizer_view.placed(), optimizer_view.local()  # the ranks agree on refusals first
    for name, kept in state.items():
        for key, one in kept.items():
            if isinstance(one, StatePlacement):
                mine, where = local.get(name, {}).get(key), where_of(optimizer_view.operation, key, name)
                kept[key] = copies.of(one.gather(where, mine, optimizer_view.comm, optimizer_view.parameters[name].device))
    copies.check()
    ordered = {name: state[name] for names in optimizer_view.groups for name in names if name in state}
    return {"state": ordered, "param_groups": optimizer_view.options()} if wanted else {}


@torch.no_grad()
@collective_call
def load_full_optim_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, object] | None
) -> None:
    """Load the full state of an optimizer: the same on every rank, or rank 0's if other ranks give None or {}.

    The state is by name, as `full_optim_state_dict` and torch's `get_optimizer_state_dict` return it, or by number, as the
    `state_dict()` of an unsharded optimizer over the same parameters in the same groups. Communicates: every rank must call it
    alike.

    Raises:
        ShardingError: on every rank, if on any of them names or groups differ, or some state cannot be cut like its parameter.
            Nothing was loaded.
    """
    optimizer_view = OptimizerView(ModelView(model, "load_full_optim_state_dict"), optimizer)

    def check() -> tuple[State, list[dict[str, Any]]] | None:
        mine = given_by(optimizer_view.operation, optimizer_view.world_comm.rank, state_dict)
        if mine is None:
            return None
        named = optimizer_view.named(mine)
        outline = outline_of(optimizer_view.operation, named["state"], {})
        for name, key, one in _tensors_in(outline):
            optimizer_view.place_full(name, key, tuple(one.shape), one.dtype)
        return outline, named["param_groups"]

    answers = agree_and_gather(optimizer_view.world_comm, optimizer_view.operation, check)
    first = answers[0]
    assert first is not None, "check raises if rank 0 gives nothing"
    outline, groups = first
    from_rank_0 = any(answer is None for answer in answers)
    given = optimizer_view.named(state_dict)["state"] if state_dict else {}
    local: State = {
        name: {key: deepcopy(value) for key, value in kept.items()}
        for name, kept in outline.items()
        if optimizer_view.holds(name)
    }
    for name, key, one in _tensors_in(outline):
        placement = optimizer_view.place_full(name, key, tuple(one.shape), one.dtype)
        full = given[name][key] if given else torch.empty(one.shape, dtype=one.dtype)
        if from_rank_0:
            full = full.detach().to(optimizer_view.parameters[name].device).contiguous()
            broadcast_all([(0, full)], optimizer_view.world_comm, name)
        if optimizer_view.holds(name):
            local[name][key] = placement.part_of(full, optimizer_view.comm.rank)
    optimizer_view.install(local, groups)


def _tensors_in(outline: State) -> Iterator[tuple[str, str, Tensor]]:
    for name, kept in outline.items():
        for key, value in kept.items():
            if has_dimensions(value):
                yield name, key, value
