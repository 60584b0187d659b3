"""What cannot be sharded: found before anything changes, so that every rank refuses and no module is left half sharded."""

import warnings
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from fsdp.building.choose_units import Planned, buffers_of
from fsdp.building.other_engines import other_engine
from fsdp.comm.communicator import Communicator
from fsdp.comm.context import CommContext
from fsdp.comm.dtensor_mesh import check_joins, check_order, mesh_around, ranks_around, ranks_of
from fsdp.config import Config, MeshKind, ReductionPolicy
from fsdp.errors import ShardingError
from fsdp.params.param_info import ParamInfo
from fsdp.params.shown_params import owning_unit
from fsdp.params.unit import Unit
from fsdp.shards.dtensors import REPLACED, dim_of, here_of, local_of

_PLAIN_FUNCTIONS: Final = (nn.Parameter.__torch_function__, torch.Tensor.__torch_function__)
_PLAIN_DISPATCH: Final = torch.Tensor.__torch_dispatch__
_SUB_BYTE: Final = tuple(f"torch.{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))
"""The names of dtypes that torch cannot copy."""


def check_shardable(plan: Sequence[Planned], config: Config) -> None:
    """Raise ShardingError, which names it, if something of the new units cannot be sharded, or another engine has wrapped it."""
    with_hooks: dict[int, nn.Module] = {}
    for one in plan:
        for module in one.members:
            if with_hooks.setdefault(id(module._forward_hooks), module) is not module:
                raise ShardingError(
                    f"unit {one.name!r} is a copy.copy of another unit, which has the same hooks; use copy.deepcopy, or the "
                    "same module in both places."
                )
        if one.unit is not None:
            continue
        for module in one.own_modules:
            engine = other_engine(module)
            if engine is not None:
                raise ShardingError(
                    f"unit {one.name!r}: {engine} has wrapped its {type(module).__name__}, and reduces or shards by itself; wrap "
                    "the plain module instead."
                )
        places = {id(module): module for info in one.param_infos for module, _ in info.slots}
        for module in (*one.members, *places.values()):
            if isinstance(module, torch.jit.ScriptModule):
                raise ShardingError(
                    f"unit {one.name!r} contains a scripted {module.original_name}, whose parameters TorchScript keeps; wrap the "
                    "module that was scripted, or name it in ignored_modules."
                )
        for info in _not_sharded_yet([one]):
            name, reason = info.names[0], _parameter_problem(info.parameter, config.dtensors)
            if reason is None and config.dtensors and not info.parameter.dim():
                reason = (
                    f"has no dimensions, along which a DTensor is cut. Change {name} to a 1D tensor with numel equal to 1, or "
                    "leave out dtensors if you gave it."
                )
            if reason is not None:
                raise ShardingError(f"parameter {name!r} {reason}")
    _check_shared_memory(plan)
    buffers = buffers_of(plan[0]) if config.sync_module_states or config.broadcast_buffers else []
    parameters = [(info.names[0], info.parameter) for info in _not_sharded_yet(plan)] if config.sync_module_states else []
    for name, tensor in [*buffers, *parameters]:
        reason = _broadcast_problem(tensor)
        if reason is not None:
            raise ShardingError(
                f"{name!r} {reason}, so it cannot be broadcast; make it a plain dense tensor, or leave out sync_module_states "
                "and broadcast_buffers."
            )


def with_dtensors(config: Config, plan: Sequence[Planned]) -> Config:
    """The options for a plan. If a parameter is a DTensor already, as tensor parallelism makes them, all shards are DTensors."""
    if config.plain_shards or config.mesh_kind is MeshKind.REPLICATE:
        return config
    return replace(config, dtensors=config.dtensors or any(map(_is_dtensor, _parameters_in(plan))))


def _parameters_in(plan: Sequence[Planned]) -> Iterator[nn.Parameter]:
    """The parameters of all units: those of new ones, and the shards of units that were wrapped before."""
    return chain.from_iterable(
        one.unit.sharded_params if one.unit else [info.parameter for info in one.param_infos] for one in plan
    )


def check_numbers(name: str, given: Config, outermost: Config) -> None:
    """Raise ShardingError if a unit, wrapped before, has an option that changes numbers, and the outermost one has another."""
    options = [("broadcast_buffers", given.broadcast_buffers, outermost.broadcast_buffers, False)]
    policies = given.reduction, outermost.reduction, ReductionPolicy()
    for field in ("average", "predivide_factor", "deterministic"):
        options.append((f"reduction.{field}", *(getattr(policy, field) for policy in policies)))
    for option, mine, others, default in options:
        if mine not in (default, others):
            raise ShardingError(
                f"unit {name!r} was wrapped with {option}={mine!r}, and that of the outermost unit counts, which is {others!r}: "
                "give it to the outermost one, too."
            )


def check_ranks(name: str, unit: Unit, comms: CommContext, config: Config) -> None:
    """Raise ShardingError unless a unit, wrapped before, can be part of a root over `comms`: on its ranks, or a part of them.

    On some of the ranks it must be known what the others have: its parameters are DTensors that lie on all ranks of the root.
    """
    others = {one for one in (unit.comms, *(flat.comms for flat in unit.flats)) if not one.same_ranks_as(comms)}
    if not others:
        return
    root = set(comms.world_comm.ranks)
    alike = unit.config.mesh_kind is config.mesh_kind is MeshKind.SHARD
    if not alike or not all(set(one.world_comm.ranks) < root for one in others):
        raise ShardingError(
            f"unit {name!r} was wrapped over another process group or mesh, or with a strategy that shares the work in "
            "another way; wrap all units of a model alike. Experts may be wrapped over a part of the ranks, with the strategy of "
            "the rest."
        )
    placements = [placement for flat in unit.flats if flat.comms in others for placement in flat.placements]
    _check_part(f"unit {name!r}", {placement.name: placement.ranks for placement in placements}, root, config)


def _check_part(what: str, parameters: Mapping[str, Sequence[int]], root: set[int], config: Config) -> None:
    """Raise ShardingError unless all ranks of `root` have a part of each of `parameters`, given as their ranks by name.

    Also if an option is given with which all ranks must have the same units.
    """
    for name, ranks in parameters.items():
        if set(ranks) > root:
            raise ShardingError(
                f"{what}: {name!r} lies on ranks {sorted(set(ranks) - root)} too, which are none of the root's data ranks, such "
                "as those of tensor parallelism; spread experts over data ranks alone."
            )
        if set(ranks) != root:
            raise ShardingError(
                f"{what} was wrapped over a part of the ranks, and nothing says what the others have in place of "
                f"{name!r}: make it a DTensor over them first, such as distribute_tensor(parameter, mesh['ep'], "
                "[Shard(0)]), with mesh['ep'] and the mesh of the unit from one mesh over all ranks."
            )
    if config.uneven_paths or config.broadcast_buffers:
        raise ShardingError(
            f"{what} was wrapped over a part of the ranks; leave out uneven_paths and broadcast_buffers, for which "
            "all ranks must have the same units."
        )


def choose_cuts(
    plan: Sequence[Planned], config: Config, mesh: Any, placement_of: Any, comms: CommContext, is_implied: bool
) -> None:
    """Note for each parameter of the new units how it is cut, as `placement_of(parameter)` says: the dimension, and the mesh.

    The mesh is None where it is `mesh`, or has its ranks, those of `comms`. `is_implied`: nobody has asked for DTensors, so that
    all of them may lie on one mesh, which those of FSDP2 do not.

    Raises:
        ShardingError: the function chooses something else than a dimension of the parameter, the shards are no DTensors, or a
            parameter that is a DTensor already lies on a mesh which does not fit.
    """
    if placement_of is not None and not config.dtensors:
        raise ShardingError("shard_placement_fn chooses the placements of DTensors; give dtensors=True, or leave it out.")
    if placement_of is not None and not callable(placement_of):
        raise ShardingError(f"shard_placement_fn must be a function of a parameter, not {placement_of!r}.")
    joint_mesh = mesh_around(mesh, _parameters_in(plan)) if is_implied else None
    for info in _not_sharded_yet(plan):
        name = info.names[0]
        given: Any = None if placement_of is None else placement_of(info.parameter)
        if hasattr(given, "mesh_info"):  # FSDP2's ShardPlacementResult
            given, info.mesh = given.placement, given.mesh_info.mesh
        if given is not None:
            info.shard_dim = dim_of(name, info.parameter, given)
        if info.mesh in (None, mesh) or ranks_of(info.mesh) == tuple(comms.world_comm.ranks):
            info.mesh, info.joint_mesh = None, joint_mesh
        else:
            root = set(comms.world_comm.ranks)
            _check_mesh(name, info.mesh, root, config)
            _check_part(f"parameter {name!r}", {name: ranks_around(info.mesh, [info.parameter])}, root, config)
        if config.dtensors:
            check_order(name, info.parameter, info.mesh or mesh)
        if _is_dtensor(info.parameter):
            check_joins(name, info.parameter, info.mesh or mesh)


def _check_mesh(name: str, mesh: Any, root: set[int], config: Config) -> None:
    """Raise ShardingError if a parameter cannot be cut over a mesh of its own, over some of the ranks `root` of its unit."""
    ranks = ranks_of(mesh)
    if not ranks or mesh.ndim > 1 or not {*ranks} < root or config.mesh_kind is not MeshKind.SHARD:
        raise ShardingError(
            f"parameter {name!r} is to be cut over {mesh!r}: give a DeviceMesh of one dimension over some of the ranks of its "
            'unit, such as mesh["edp"], and none with "HYBRID_SHARD" and "NO_SHARD".'
        )


def choose_dtypes(plan: Sequence[Planned], config: Config, policy: Any) -> None:
    """Note for each parameter of the new units whether it computes in its own dtype, as a policy of FSDP2 says for it.

    Raises:
        ShardingError: the policy chooses a third dtype.
    """
    choose, default = getattr(policy, "param_dtype_override_fn", None), config.mp_policy.param_dtype
    if choose is None:
        return
    for info in _not_sharded_yet(plan):
        chosen, own = choose(info.parameter), info.parameter.dtype
        if chosen not in (None, default, own):
            raise ShardingError(
                f"mp_policy.param_dtype_override_fn gives {chosen!r} for {info.names[0]!r}: param_dtype_override_fn must return "
                f"None, param_dtype, which is {default}, or the parameter's original dtype, which is {own}."
            )
        if chosen is own and chosen is not default:
            info.keeps_dtype = True


def check_triggers(plan: Sequence[Planned], config: Config, module: nn.Module) -> None:
    """Raise ShardingError unless the triggers of reductions are parameters of the new units of `module`."""
    names = {info.names[0] for one in plan for info in one.param_infos}
    for trigger in config.reduction.triggers:
        if trigger not in names:
            raise ShardingError(
                f"reduction.triggers: {type(module).__name__} has no parameter {trigger!r}, or it is in a unit already."
            )


def check_devices(plan: Sequence[Planned], comm: Communicator) -> None:
    """Raise ShardingError unless all parameters are on one device, which the group supports."""
    devices: dict[torch.device, str] = {}
    for info in (info for one in plan for info in one.param_infos if not info.parameter.is_meta):
        devices.setdefault(info.parameter.device, info.names[0])
    if len(devices) > 1:
        (a, first), (b, second) = list(devices.items())[:2]
        raise ShardingError(
            f"parameter {first!r} is on {a}, but {second!r} is on {b}; move the module to one device before wrapping it."
        )
    for device, name in devices.items():
        if not comm.supports_device(device):
            raise ShardingError(
                f"parameter {name!r} is on {device}, where this process group cannot communicate; "
                "move the module to the group's device before wrapping it."
            )


def check_renormalised(named: Iterable[tuple[str, nn.Module]], ranks: int) -> None:
    """Raise ShardingError if an embedding among several ranks changes the rows it looks up (`max_norm`): each has others."""
    for name, module in named if ranks > 1 else ():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ShardingError(
                f"{name!r}: {type(module).__name__}(max_norm={module.max_norm}) changes in its forward the rows that this rank "
                "looks up, and each rank looks up others. Set max_norm to None, and after each step scale the rows: norm = "
                "weight.norm(dim=1, keepdim=True); weight.mul_((max_norm / (norm + 1e-7)).clamp(max=1))."
            )


def device_of(plan: Sequence[Planned]) -> torch.device | None:
    """The device of the parameters of the new units; None if none has one yet, as on the meta device."""
    return next((info.parameter.device for one in plan for info in one.param_infos if not info.parameter.is_meta), None)


def _parameter_problem(parameter: Tensor, dtensors: bool) -> str | None:
    """Why a parameter cannot be sharded, as the end of a sentence that begins with its name; None if it can."""
    kind = type(getattr(parameter, "_local_tensor", parameter))
    if is_lazy(parameter):
        return "is not initialised yet; run one forward of the plain module before wrapping it."
    if not _is_plain(kind):
        return (
            f"is a {kind.__name__}, a tensor class with operators of its own, as quantised weights are; its parts would be "
            "plain tensors. Convert it to a plain parameter, or name its module in ignored_modules."
        )
    if REPLACED in parameter.__dict__ and parameter.requires_grad:
        return (
            "is tied to one of a unit that was wrapped before, where a DTensor has replaced it, so that both would be trained. "
            "Wrap the module that contains all uses, or those that share it as one unit: fully_shard([module_a, module_b])."
        )
    if _is_dtensor(parameter):
        if dtensors and parameter.grad is None:
            return None
        return (
            "is a DTensor, which another engine or a parallel style has spread over ranks already; set its gradient to None and "
            'leave out plain_shards and "NO_SHARD", wrap the plain module, or name this one in ignored_modules.'
        )
    if parameter.layout is not torch.strided:
        return f"has layout {parameter.layout}; make it dense, or name its module in ignored_modules."
    if parameter.is_quantized or str(parameter.dtype) in _SUB_BYTE:
        return (
            f"is {parameter.dtype}, whose elements cannot be copied one by one; convert it to a dtype of whole bytes, or name "
            "its module in ignored_modules."
        )
    if torch._debug_has_internal_overlap(parameter) == 1:
        return (
            "is an expanded tensor, of which several elements are one number in memory; give each its own: "
            "nn.Parameter(parameter.detach().clone())."
        )
    if _lacks_memory(parameter):
        return "has no memory, because something has released it; load or build the module anew."
    if parameter.is_meta and (weakref.getweakrefs(parameter) or parameter._use_count() > 2):  # type: ignore[attr-defined]
        return (
            "is on the meta device and in use by an autograd graph or a weak reference, so it cannot get memory; drop those "
            "first."
        )
    if parameter.grad_dtype not in (None, parameter.dtype):
        return (
            f"has grad_dtype {parameter.grad_dtype}, and its reduced gradient will be {parameter.dtype}, like the parameter. "
            "Keep the parameter in the dtype of its gradient, and give mp_policy=fsdp.MixedPrecisionPolicy(param_dtype="
            f"{parameter.dtype}), which computes in the other one."
        )
    return _gradient_problem(parameter)


def _gradient_problem(parameter: Tensor) -> str | None:
    gradient = parameter.grad
    if gradient is None or (
        gradient.layout is torch.strided and _is_plain(type(gradient)) and gradient.device == parameter.device
    ):
        return None
    return (
        "has a gradient from before wrapping that cannot be cut, because it is sparse, of a class of its own or on another "
        "device; step the optimizer and set the gradient to None first."
    )


def _broadcast_problem(tensor: Tensor) -> str | None:
    """Why rank 0's values cannot be put into a buffer or parameter; None if they can."""
    if is_lazy(tensor):
        return "is not initialised yet"
    if isinstance(tensor, nn.Parameter) and (local := local_of(tensor)) is not None:
        tensor = local
    if not _is_plain(type(tensor)) or tensor.layout is not torch.strided or tensor.is_quantized:
        return f"is a {type(tensor).__name__} of layout {tensor.layout} and dtype {tensor.dtype}"
    if tensor.is_inference():
        return "was made in torch.inference_mode"
    if torch._debug_has_internal_overlap(tensor) == 1:
        return "is an expanded tensor, of which several elements are one number in memory"
    return None


def _is_dtensor(tensor: Tensor) -> bool:
    return any(f"{base.__module__}.".startswith("torch.distributed.tensor.") for base in type(tensor).__mro__)


def _is_plain(kind: Any) -> bool:
    """Whether a class of tensors has torch's operators."""
    return kind.__torch_dispatch__ is _PLAIN_DISPATCH and kind.__torch_function__ in _PLAIN_FUNCTIONS


def _lacks_memory(parameter: Tensor) -> bool:
    if parameter.is_meta or not parameter.numel():
        return False
    return parameter.untyped_storage().size() < (parameter.storage_offset() + _span(parameter)) * parameter.element_size()


def _span(tensor: Tensor) -> int:
    """The number of elements from the first to the last one in memory, with gaps."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1


class _Extent(NamedTuple):
    """Where a tensor lies."""

    place: str | int
    """A device, on which bytes are addresses, or a storage, in which they are counted from its first."""
    begins: int
    """The first byte."""
    ends: int
    """The byte after the last one; of a tensor with gaps the byte after its first element."""
    name: str
    is_trained: bool

    @classmethod
    def of(cls, name: str, tensor: Tensor, is_trained: bool) -> "_Extent":
        """On the device."""
        is_dense = tensor.is_contiguous() or (not tensor.is_nested and _span(tensor) == tensor.numel())
        size = tensor.nbytes if is_dense else tensor.element_size()
        return cls(str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + size, name, is_trained)

    def reaches(self, later: "_Extent") -> bool:
        """Whether one that does not begin earlier has a part of this memory."""
        return self.place == later.place and self.ends > later.begins


def _overlap(extents: list[_Extent]) -> tuple[_Extent, _Extent] | None:
    """Put extents in order, and return the first two that share memory, of which one is trained."""
    extents.sort()
    pairs = zip(accumulate(extents, _wider), extents[1:], strict=False)
    return next((pair for pair in pairs if pair[0].reaches(pair[1]) and any(one.is_trained for one in pair)), None)


def _wider(one: _Extent, later: _Extent) -> _Extent:
    """The one that ends last."""
    return one if one.place == later.place and one.ends > later.ends else later


def _check_shared_memory(plan: Sequence[Planned]) -> None:
    """Raise ShardingError if parameters that are trained share their memory, or a buffer has some of it.

    Parameters would be sharded apart, and a buffer would stay as it is. Those of units that were wrapped before have left the
    memory that they shared.
    """
    new = [(info, here) for info in _not_sharded_yet(plan) if not (here := here_of(info.parameter)).is_meta and here.numel()]
    extents = [_Extent.of(info.names[0], here, info.parameter.requires_grad) for info, here in new]
    for (info, here), one in zip(new, extents, strict=True):
        storage = here.untyped_storage()
        first = storage.data_ptr()
        info.memory = StorageWeakRef(storage), one.begins - first, one.ends - first  # type: ignore[no-untyped-call]
    if (shared := _overlap(extents)) is not None:
        raise ShardingError(
            f"parameters {shared[0].name!r} and {shared[1].name!r} are two objects over the same memory, so that one changes "
            "with the other; tie them by assigning the same Parameter to both modules, or clone one."
        )
    units = [one.unit for one in plan if one.unit is not None]
    earlier = [(info, f" of unit {unit.name!r}") for unit in units for flat in unit.flats for info in flat.param_infos]
    shared = _overlap(
        [
            _Extent(info.memory[0].cdata, *info.memory[1:], f"{info.names[0]!r}{of}", info.parameter.requires_grad)
            for info, of in (*((info, "") for info, _ in new), *earlier)
            if info.memory is not None
        ]
    )
    if shared is not None:
        warnings.warn(
            f"parameters {shared[0].name} and {shared[1].name} were two objects over the same memory, until one was sharded: "
            "from now on none changes with the other. If it shall, assign the same Parameter to both modules before wrapping.",
            stacklevel=2,
        )
    trained = [one for one in extents if one.is_trained]
    for name, buffer in buffers_of(plan[0]):
        if is_lazy(buffer) or buffer.layout is not torch.strided or buffer.is_meta or not buffer.numel():
            continue
        extent = _Extent.of(name, here_of(buffer), is_trained=False)
        before = bisect_left(trained, (extent.place, extent.ends)) - 1  # the last one that begins before the buffer ends
        if before >= 0 and trained[before].reaches(extent):
            raise ShardingError(
                f"buffer {name!r} is over the memory of parameter {trained[before].name!r}, which is trained and sharded: the "
                "buffer would stay as it is now. Read the parameter in the forward, or clone it for the buffer."
            )


def _not_sharded_yet(plan: Sequence[Planned]) -> Iterator[ParamInfo]:
    """The parameters of new units, without those that come from another unit."""
    return (info for one in plan for info in one.param_infos if owning_unit(info.parameter) is None)
