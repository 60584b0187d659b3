"""Makes the units of a plan, one at a time: allocate, broadcast, shard. Then makes one engine over all of them.

A model on the meta device gets its memory here, in the order of its modules. Each unit is sharded as soon as all its parameters
have values, so no rank ever holds more than one unsharded unit and the layers around it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property, partial
from operator import is_not, methodcaller
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp.autograd.pytree import MANAGED
from fsdp.building.attach import attach, detach
from fsdp.building.choose_units import Planned, buffers_of
from fsdp.building.dissolve import dissolve
from fsdp.building.shardable import device_of
from fsdp.comm.communicator import Communicator
from fsdp.comm.context import CommContext
from fsdp.config import Config
from fsdp.device.streams import META, default_device
from fsdp.errors import ShardingError
from fsdp.params.buffer_plan import make_flat_buffers
from fsdp.params.flat_buffer import sum_of_bits
from fsdp.params.module_tree import IGNORED
from fsdp.params.shown_params import show_plainly
from fsdp.params.unit import Unit, UnitSettings
from fsdp.runtime.registry import unit_ref_of
from fsdp.shards.dtensors import Mesh, here_of
from fsdp.shards.optimizer_state import Successor, hand_over, living_optimizers
from fsdp.state_dict.param_shard import HasGrad, agree_on_gradients

Initialise = Callable[[nn.Module], object]


def stay_on_meta(module: nn.Module) -> None:
    """As `param_init_fn`: leave a module on the meta device. `convert` gives it memory later; until then it cannot compute."""


def check_initialisation(plan: Sequence[Planned], initialise: Any) -> None:
    """Raise ShardingError if something on the meta device cannot get memory and values, or `initialise` is not a function."""
    if initialise is not None and not callable(initialise):
        raise ShardingError(f"param_init_fn must be a callable that takes a module, not {initialise!r}.")
    for one in plan:
        for module in one.own_modules:
            names = [name for name, tensor in _own_tensors(module) if tensor.is_meta]
            if names and initialise is None and not callable(getattr(module, "reset_parameters", None)):
                raise ShardingError(
                    f"{type(module).__name__}.{names[0]} in unit {one.name!r} is on the meta device, and the module has no "
                    "reset_parameters() to give it values; give param_init_fn, a function that initialises one module."
                )


def build(
    plan: Sequence[Planned],
    config: Config,
    comms: CommContext,
    initialise: Initialise | None,
    ignored: Collection[nn.Module | nn.Parameter],
    mesh: Mesh | None = None,
) -> None:
    """Shard the units of the plan and put one engine over all of them.

    Memory: the shards, and at most one unsharded unit with the layers around it.

    Raises:
        ShardingError: `initialise` replaced a parameter, replicas begin with different parameters, or a gradient of a unit that
            is made anew is there on some ranks only.
    """
    regrouped = [one.regrouped for one in plan if one.regrouped is not None]
    has_grad = agree_on_gradients(regrouped, comms.world_comm, "fully_shard") if regrouped else {}
    detach(ref for one in plan if (ref := unit_ref_of(one.module)) is not None)
    units = _Builder(plan, config, comms, initialise, has_grad, mesh).build()
    new_units = [unit for unit, one in zip(units, plan, strict=True) if one.unit is None]
    _check_replicas(new_units, comms)
    _check_shared(new_units, comms)
    if config.sync_module_states:
        _broadcast((name, buffer.detach(), comms.world_comm) for name, buffer in buffers_of(plan[0]))
    inside: list[set[int]] = [set() for _ in plan]
    # where ranks may go different ways, nobody else shall keep them on one
    marks = dict.fromkeys(MANAGED, not units[0].config.uneven_paths)
    for index, one in enumerate(plan):
        for outer in one.ancestors:
            inside[outer].add(index)
        for module in one.own_modules:
            module.__dict__.update(marks)
    for left_alone in ignored:
        left_alone.__dict__[IGNORED] = True
    attach(units, [*map(frozenset, inside)], comms, plan[0].borrowed)


def _check_replicas(units: Sequence[Unit], comms: CommContext) -> None:
    """Raise ShardingError if ranks with the same shards begin with other values: they would train different models."""
    if comms.replica_comm.size == 1 or any(flat.device == META for unit in units for flat in unit.flats):
        return
    sums = [[int(sum_of_bits(flat.shard)) for flat in unit.flats] for unit in units]
    for other in comms.replica_comm.gather_objects(sums, "fully_shard"):
        for unit, mine, theirs in zip(units, sums, other, strict=True):
            if mine != theirs:
                raise ShardingError(
                    f"ranks that hold the same shards begin with different parameters in unit {unit.name!r}. Build the model "
                    "anew, alike on every rank, or give sync_module_states=True."
                )


def _check_shared(units: Sequence[Unit], comms: CommContext) -> None:
    """Raise ShardingError if ranks of tensor parallelism begin with other values of what all of them have."""
    flats = [flat for unit in units for flat in unit.flats]
    if comms.across is None or any(flat.device == META for flat in flats):
        return
    mine = {
        (placement.name, placement.coordinates): int(sum_of_bits(flat.shard_view(number).clone()))
        for flat in flats
        for number, placement in enumerate(flat.placements)
    }
    first: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}
    for rank, theirs in enumerate(comms.across.gather_objects(mine, "fully_shard")):
        for part, bits in theirs.items():
            source, wanted = first.setdefault(part, (rank, bits))
            if bits != wanted:
                raise ShardingError(
                    f"ranks {source} and {rank} of the meshes begin with different values of {part[0]!r}, which tensor "
                    "parallelism does not cut: they would train different models. Build the model alike on every rank, with the "
                    "same seed; param_init_fn too must give such a parameter the same values."
                )


class _Builder:
    """Makes the units of a plan. A unit is sharded when all its modules have memory and values."""

    def __init__(
        self,
        plan: Sequence[Planned],
        config: Config,
        comms: CommContext,
        initialise: Initialise | None,
        has_grad: HasGrad,
        mesh: Mesh | None,
    ) -> None:
        self._mesh = mesh
        self._plan = plan
        self._has_grad = has_grad
        self._config = config
        self._comms = comms
        self._initialise = initialise or methodcaller("reset_parameters")  # checked before anything was changed
        self._index = {id(module): index for index, one in enumerate(plan) for module in one.members}
        self._own = [{id(module) for module in one.own_modules} for one in plan]
        self._units: list[Unit | None] = [None for _ in plan]
        self._device = device_of(plan) or default_device(comms.world_comm.supports_device)

    def build(self) -> list[Unit]:
        """Make every unit and return them, outermost first."""
        self._build(0)
        return [unit for unit in self._units if unit is not None]

    def _build(self, index: int) -> None:
        one = self._plan[index]
        if one.regrouped is not None:
            dissolve(one.regrouped, self._has_grad)
        for module in one.members:
            self._prepare(module, index)
        if one.unit is None and self._config.sync_module_states:
            _broadcast(_parameters_of(one, self._comms))
        unit = one.unit or self._make(one)
        unit.name = one.name
        self._units[index] = unit

    def _make(self, one: Planned) -> Unit:
        before = one.regrouped
        config, settings = (self._config, UnitSettings()) if before is None else (before.config, before.settings)
        for info in one.param_infos:
            for module, _ in info.slots:
                show_plainly(module)  # it may have shown a parameter that belonged to another unit
        former = {info: ref(info.parameter) for info in one.param_infos}
        flats = make_flat_buffers(one.param_infos, config, self._comms, self._mesh)
        unit = Unit(one.members, one.name, flats, config, self._comms, settings)
        successors = {
            parameter: Successor(info.parameter, partial(placement.part_of_former_state, parameter, flat.shard.device))
            for flat in flats
            for info, placement in zip(flat.param_infos, flat.placements, strict=True)
            if (parameter := former[info]()) is not None and parameter is not info.parameter
        }
        if successors:  # other code keeps parameters that were replaced
            hand_over(self._optimizers, successors)
        return unit

    @cached_property
    def _optimizers(self) -> list[Optimizer]:
        return living_optimizers()

    def _prepare(self, module: nn.Module, index: int) -> None:
        """Allocate and initialise `module` and the modules below it, and build the units below it."""
        self._own[index].discard(id(module))
        if self._initialise is not stay_on_meta and any(tensor.is_meta for _, tensor in _own_tensors(module)):
            _materialise(module, self._device)
            before = list(module._parameters.values())
            self._initialise(module)
            if any(map(is_not, before, module._parameters.values())):
                raise ShardingError(
                    f"param_init_fn replaced a parameter of a {type(module).__name__}; it has memory already: copy into it."
                )
        for child in module.children():
            inner = self._index.get(id(child))
            if inner is None and id(child) in self._own[index]:
                self._prepare(child, index)
            elif inner is not None and self._units[inner] is None:
                self._build(inner)


def _own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    found = (*module._parameters.items(), *module._buffers.items())
    return [(name, tensor) for name, tensor in found if tensor is not None]


def _materialise(module: nn.Module, device: torch.device) -> None:
    """Give memory on `device` to the tensors on the meta device. The objects stay the same, so tied parameters stay tied."""
    for parameter in module._parameters.values():
        if parameter is not None and parameter.is_meta:
            fresh = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            fresh.__dict__.update(parameter.__dict__)
            torch.utils.swap_tensors(parameter, fresh)  # type: ignore[no-untyped-call]
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device=device)


def _parameters_of(one: Planned, comms: CommContext) -> Iterator[tuple[str, Tensor, Communicator]]:
    """The parameters of a unit by name, each with the communicator of the ranks that begin with the same values of it.

    A parameter that tensor parallelism has cut begins with the same part where it will be cut further. All ranks of all meshes
    begin with the same values of any other.
    """
    for info in one.param_infos:
        is_cut = not all(one.is_replicate() for one in getattr(info.parameter, "placements", ()))
        comm = (info.comms or comms).world_comm if is_cut else comms.joint
        yield info.names[0], here_of(info.parameter).detach(), comm


def _broadcast(states: Iterable[tuple[str, Tensor, Communicator]]) -> None:
    with torch.no_grad():
        for name, state, comm in states:
            contiguous = state.contiguous()
            comm.broadcast(contiguous, 0, name).wait()
            if contiguous is not state:
                state.copy_(contiguous)
