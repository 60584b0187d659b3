"""Torch's DTensors as shards, for code that looks at `placements`, `to_local()` and `full_tensor()`. See params/placement.py."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp.autograd.dynamo import uncompiled
from fsdp.comm.dtensor_mesh import have_same_first_dims, ranks_of
from fsdp.errors import ShardingAssertion, ShardingError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    Mesh = DeviceMesh
else:
    Mesh = object  # the import takes half a second

Part = tuple[tuple[int, ...], tuple[int, ...]]
"""The sizes and the offsets of a part of a tensor, (dims,) each."""
_LOCAL_ATTRIBUTES: Final = attrgetter("_local_tensor.__dict__")
_LOCAL_SHAPE: Final = attrgetter("_local_tensor.shape")
_GATHERS: Final = {"fsdp_pre_all_gather", "fsdp_post_all_gather"}
"""torch's names of methods that prepare a gather of a DTensor and make a tensor of what was gathered."""


def make_dtensor(local: Tensor, spec: Any) -> Tensor:
    """A DTensor whose part on this rank is `local`. It shares the memory. `spec`: torch's DTensorSpec."""
    # as torch's own fully_shard makes them, without `__init__`, which takes most of the time and does nothing
    kind = _dtensor_class()
    made: Tensor = kind.__new__(kind, _at_zero(local.dtype, local.device), spec, requires_grad=False)
    made._local_tensor = local  # type: ignore[attr-defined]
    return made


@cache
def _at_zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a DTensor is made of in place of its part: torch cannot deep-copy one whose part begins inside a storage."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)


@cache
def _dtensor_class() -> Any:
    """Imported when the first shard is made a DTensor: the import takes half a second."""
    from torch.distributed.tensor import DTensor

    return DTensor


def as_parameter(dtensor: Any, requires_grad: bool) -> nn.Parameter:
    """`dtensor` itself as a parameter. `nn.Parameter(dtensor)` makes another of its part, which torch cannot pickle."""
    made: nn.Parameter = dtensor.requires_grad_(requires_grad)
    made._is_param = True
    return made


def specs_of(mesh: Mesh, parameter: Tensor, dim: int, joint_mesh: Mesh | None) -> tuple[Any, Any, tuple[int, ...]]:
    """torch's DTensorSpecs of a shard that is cut over `mesh` along `dim`, and of its unsharded parameter, or None; its ranks.

    `joint_mesh`: see `ParamInfo`. That other ranks than those of `mesh` have copies there is no more than the user's word.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor.placement_types import _StridedShard

    in_front = torch.empty(parameter.shape, device="meta").movedim(dim, 0)
    meta = TensorMeta(parameter.shape, torch.empty(in_front.shape, device="meta").movedim(0, dim).stride(), parameter.dtype)
    replicas = (Replicate(),) * (mesh.ndim - 1)
    given: Any = getattr(parameter, "_spec", None)
    if given is None:
        on = joint_mesh or mesh
        return DTensorSpec(on, (*replicas, Shard(dim), *(Replicate(),) * (on.ndim - mesh.ndim)), meta), None, ranks_of(mesh)
    # Tensor parallelism has cut the parameter first, so a dimension that both cut is in two steps of strides.
    parts = given.num_shards_map[dim]
    mine: Any = Shard(dim) if parts == 1 else _StridedShard(dim, split_factor=parts)
    joined = type(mesh)._concatenate([mesh, given.mesh])
    shard = DTensorSpec(joined, (*replicas, mine, *given.placements), meta)
    return shard, DTensorSpec(given.mesh, given.placements, meta), ranks_of(joined)


def lies_alike(given: Any, spec: Any) -> bool:
    """Whether each rank has the same part of tensors that lie as two DTensorSpecs of torch say. One may have copies elsewhere."""
    shared = min(given.mesh.ndim, spec.mesh.ndim)
    copies = (*given.placements[shared:], *spec.placements[shared:])
    is_same_cut = given.placements[:shared] == spec.placements[:shared] and all(one.is_replicate() for one in copies)
    return is_same_cut and have_same_first_dims(given.mesh, spec.mesh)


def local_of_full(full: Tensor, spec: Any) -> Tensor:
    """This rank's part of a full tensor that lies as `spec`, torch's DTensorSpec, says: a view."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(full.shape, spec.mesh, spec.placements)
    for dim, (length, offset) in enumerate(zip(shape, offsets, strict=True)):
        full = full.narrow(dim, min(offset, full.shape[dim] - length), length)
    return full


class GradForm(NamedTuple):
    """How the parts of a gradient lie on the ranks of a mesh: each may be a term of the sum that is the gradient."""

    mesh: Any = None
    """None: nothing is left to add up."""
    placements: tuple[Any, ...] = ()
    """Those of the gradient: torch's Partial for each dimension of the mesh whose ranks have terms."""

    @property
    def num_terms(self) -> int:
        """Of how many ranks' terms the gradient is the sum."""
        return math.prod(self.mesh.size(dim) for dim, one in enumerate(self.placements) if one.is_partial())

    def add_up(self, terms: Sequence[Tensor]) -> None:
        """Let each of `terms` be its sum over the ranks, in its dtype. One collective adds up all of them."""
        joined = torch.cat([term.reshape(-1) for term in terms])
        for dim, one in enumerate(self.placements):
            if one.is_partial():
                # what `full_tensor` of a DTensor of these calls in the end, for a fifth of its host time
                group = self.mesh.get_group(dim).group_name
                torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce_(joined, "sum", group))
        parts = joined.split_with_sizes([term.numel() for term in terms])
        torch._foreach_copy_(list(terms), [part.view_as(term) for part, term in zip(parts, terms, strict=True)])


SUMMED: Final = GradForm()
"""The form of a gradient of which nothing is left to add up."""


def form_of(placements: tuple[Any, ...], spec: Any) -> GradForm | None:
    """The form of a gradient of a parameter that lies as `spec`, torch's DTensorSpec, says; None if its parts are others.

    `placements`: those of the gradient.
    """
    if placements == spec.placements:
        return SUMMED
    pairs = zip(placements, spec.placements, strict=True)
    if all([mine == wanted or (mine.is_partial("sum") and wanted.is_replicate()) for mine, wanted in pairs]):
        return GradForm(spec.mesh, placements)
    return None


def full_with_grad(unsharded: Any, data_ranks: Sequence[int]) -> Tensor:
    """The full tensor of a DTensor, differentiable. Communicates, in the backward too if its mesh is one of `data_ranks`.

    `data_ranks` have data of their own: gradients are averaged over them. Others compute the same, and have the gradient already.
    """
    from torch.distributed.tensor import Partial, Replicate

    how = Partial() if {*ranks_of(unsharded.device_mesh)} <= {*data_ranks} else Replicate()
    full: Tensor = unsharded.full_tensor(grad_placements=[how] * unsharded.device_mesh.ndim)
    return full


def dim_of(name: str, parameter: Tensor, placement: Any) -> int:
    """The dimension of `parameter` that `placement`, given by the user, cuts. Raise ShardingError if it cuts none."""
    from torch.distributed.tensor import Shard

    if type(placement) is not Shard:
        raise ShardingError(f"shard_placement_fn must return Shard(dim) or None; for {name!r} it returned {placement!r}.")
    dim = placement.dim + parameter.dim() if placement.dim < 0 else placement.dim
    if not 0 <= dim < parameter.dim():
        raise ShardingAssertion(
            f"shard_placement_fn: Shard dim {placement.dim} is invalid for {parameter.dim()}D tensor {name!r}; return one of its "
            f"dimensions, 0 to {parameter.dim() - 1}."
        )
    return dim


@cache
def _hook_steps() -> None:
    """Let optimizers count their steps as changes of DTensors, and refuse parameters in whose places DTensors are trained."""
    register_optimizer_step_pre_hook(uncompiled(_refuse_replaced))
    register_optimizer_step_post_hook(uncompiled(_count_step))


def _count_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count the step as a change of each DTensor of this engine: operators on lists of DTensors (foreach) count none."""
    increment_version([p for group in optimizer.param_groups for p in group["params"] if STANDS_FOR in p.__dict__])


def _refuse_replaced(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ShardingError if a parameter of the optimizer would never change, because another one is trained in its place."""
    for group in optimizer.param_groups:
        for cause in [p.__dict__[REPLACED] for p in group["params"] if REPLACED in p.__dict__]:
            raise ShardingError(f"{type(optimizer).__name__} {cause}")


def agree_on_meshes(flags: Collection[Tensor], parameters: Iterable[nn.Parameter]) -> None:
    """Let each flag be the largest of all ranks that have a part of these DTensors, if a mesh has several dimensions.

    With one dimension torch's operator has asked them. Communicates.
    """
    from torch.distributed.tensor import Partial

    meshes = dict.fromkeys(cast(Any, one).device_mesh for one in parameters if local_of(one) is not None)
    for mesh in meshes if any(mesh.ndim > 1 for mesh in meshes) else ():
        for flag in flags:
            parts = _dtensor_class().from_local(flag, mesh, [Partial("max")] * mesh.ndim, run_check=False)
            flag.copy_(parts.full_tensor())


@cache
def let_checkpoints_find_parts() -> None:
    """From now on, let torch's checkpoints ask `part_of` which part of a DTensor a rank has."""
    from torch.distributed import _state_dict_utils
    from torch.distributed.checkpoint import planner_helpers

    name = "compute_local_shape_and_global_offset"
    for asks in (_state_dict_utils, planner_helpers):
        setattr(asks, name, partial(part_of, getattr(asks, name)))


def part_of(
    theirs: Callable[..., Part], shape: Sequence[int], mesh: Mesh, placements: Sequence[Any], *options: Any, **named: Any
) -> Part:
    """The sizes and the offsets of this rank's part of a DTensor. An empty part begins at the end.

    Where tensor parallelism has cut a dimension into unequal parts, and data parallelism has cut these, torch's function `theirs`
    has sizes and offsets of other parts: it takes the dimensions of the mesh from left to right.
    """
    from torch.distributed.tensor import Replicate

    strided = [i for i, one in enumerate(placements) if hasattr(one, "split_factor")]
    for place in strided[:1]:
        cut = placements[place]
        cuts = [(i, mesh.size(i)) for i, one in enumerate(placements) if getattr(one, "dim", None) == cut.dim]
        if cuts[0][0] != place or math.prod(size for _, size in cuts[1:]) != cut.split_factor:
            break  # it was not cut last
        before = [*placements[:place], Replicate(), *placements[place + 1 :]]
        sizes, offsets = map(list, part_of(theirs, shape, mesh, before))
        length = sizes[cut.dim]
        step = -(-length // mesh.size(place))
        start = min(mesh.get_local_rank(place) * step, length)
        sizes[cut.dim] = min(step, length - start)
        offsets[cut.dim] = offsets[cut.dim] + start if start < length else shape[cut.dim]
        return tuple(sizes), tuple(offsets)
    return theirs(shape, mesh, placements, *options, **named)


def is_replaced(parameter: nn.Parameter, cause: str) -> None:
    """From now on, refuse steps of optimizers that have `parameter`. `cause`: the sentence after the name of the optimizer."""
    _hook_steps()
    parameter.__dict__[REPLACED] = cause


def replace_by_dtensor(original: nn.Parameter, shard: Tensor, former: nn.Parameter | None = None) -> nn.Parameter:
    """A parameter that is the DTensor `shard`, with the attributes and hooks of `original`, which it replaces.

    `former`: a parameter that was made so before; it becomes the new one, and keeps its own attributes and hooks.
    """
    _hook_steps()
    if former is not None:
        _become(former, as_parameter(shard, former.requires_grad))
        return former
    made = as_parameter(shard, original.requires_grad)
    made.__dict__.update(original.__dict__)
    made.__dict__.pop(REPLACED, None)
    made.__dict__[STANDS_FOR] = True
    for hook in (original._post_accumulate_grad_hooks or {}).values():
        made.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    is_replaced(
        original,
        "was made before the module was wrapped with DTensors as shards, which replace its parameters, and has state that cannot "
        "be cut like them: make the optimizer after wrapping.",
    )
    return made


def _become(parameter: nn.Parameter, other: nn.Parameter) -> None:
    """Turn the object `parameter` into the DTensor `other`, which may have another dtype or device. Hooks and attributes stay."""
    torch._C._swap_tensor_impl(parameter, other)
    for name in ("_local_tensor", "_spec"):
        setattr(parameter, name, getattr(other, name))
    keep_hooks(parameter)


def keep_hooks(parameter: nn.Parameter) -> None:
    """Let torch know the hooks of a parameter that has become another tensor: it learns of them when an attribute is set."""
    parameter._backward_hooks = parameter._backward_hooks or None
    if parameter._post_accumulate_grad_hooks:
        parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks


STANDS_FOR = "_fsdp_stands_for_another"
"""The attribute of a DTensor that is trained in place of a parameter."""
REPLACED = "_fsdp_replaced"
"""The attribute of a parameter in whose place another one is trained."""


def local_of(tensor: Any) -> Tensor | None:
    """This rank's part of a DTensor, without autograd; None if `tensor` is none."""
    local: Tensor | None = getattr(tensor, "_local_tensor", None)
    return local


def here_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, without autograd; any other tensor as it is."""
    here: Tensor = getattr(tensor, "_local_tensor", tensor)
    return here


def local_shapes(parameters: Sequence[nn.Parameter]) -> list[torch.Size]:
    """The shapes of this rank's parts of DTensors."""
    return [*map(_LOCAL_SHAPE, parameters)]


def refuse_changed_locals(parameters: Sequence[nn.Parameter], shapes: list[torch.Size], unit: str) -> None:
    """Raise ShardingError if the local tensors of these DTensors have not these shapes, or methods to gather them by torch."""
    if local_shapes(parameters) != shapes:
        raise ShardingError(
            f"unit {unit!r}: a local tensor of a parameter was resized, which has overwritten the parameters behind it, as "
            "nn.init.eye_ does before torch 2.15. Initialise the model before wrapping, and wrap it again."
        )
    for attributes in filter(None, map(_LOCAL_ATTRIBUTES, parameters)):
        for name in sorted(_GATHERS & attributes.keys()):
            raise ShardingError(
                f"unit {unit!r}: {name} of a local tensor is not called, because gathers are the engine's own; delete it, and "
                "give mp_policy=MixedPrecisionPolicy(param_dtype=...) to gather in another dtype."
            )
