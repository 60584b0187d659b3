"""Shards as torch's DTensors, for code that looks at `placements`, `to_local()` and `full_tensor()`.

[Note: shards as DTensors]
A DTensor with the placement Shard(0) holds on each rank as many rows as on the next, except at the end. So each parameter is a
segment of its flat buffer (see `Layout`): this rank's rows are a range of its chunk, and a DTensor over them needs no copy. The
chunks of all ranks, one after the other, are not the full parameters: gathered chunks are copied once (see `Wire`). The buffer of
a unit that has one parameter needs no copy.

Shard(1) has that layout if the flat buffer holds the parameter with dimension 1 in front: a chunk is then a range of its rows.
The tensors that code sees are views in which the dimension is back in its place. They are not contiguous; nothing is copied.

A parameter may be a DTensor before wrapping, which tensor parallelism has made. Its local tensor is stored and cut. The unsharded
parameter is a DTensor over the same mesh as before, and the shard is a DTensor over both meshes.
"""

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Size, Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp.errors import ShardingAssertion, ShardingError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class DTensorMesh(NamedTuple):
    """The mesh over which DTensors lie. Its last dimension shards, the others hold replicas."""

    mesh: "DeviceMesh"

    def layout_of(self, parameter: Tensor, dim: int) -> "DTensorLayout":
        """The layout of tensors with the shape of `parameter`, which are cut along the dimension `dim`."""
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
        from torch.distributed.tensor.placement_types import _StridedShard

        in_front = torch.empty(parameter.shape, device="meta").movedim(dim, 0)
        meta = TensorMeta(parameter.shape, torch.empty(in_front.shape, device="meta").movedim(0, dim).stride(), parameter.dtype)
        replicas = (Replicate(),) * (self.mesh.ndim - 1)
        given: Any = getattr(parameter, "_spec", None)
        if given is None:
            return DTensorLayout(DTensorSpec(self.mesh, (*replicas, Shard(dim)), meta), dim, None)
        # Tensor parallelism has cut the parameter first, so a dimension that both cut is in two steps of strides.
        parts = given.num_shards_map[dim]
        mine: Any = Shard(dim) if parts == 1 else _StridedShard(dim, split_factor=parts)
        mesh = type(self.mesh)._concatenate([self.mesh, given.mesh])
        both = DTensorSpec(mesh, (*replicas, mine, *given.placements), meta)
        return DTensorLayout(both, dim, DTensorSpec(given.mesh, given.placements, meta))


class DTensorLayout(NamedTuple):
    """How a parameter, its gradient and its optimizer state lie on a mesh."""

    spec: Any
    """torch's DTensorSpec of the shards."""
    dim: int
    """The dimension that is cut over the ranks."""
    unsharded_spec: Any
    """torch's DTensorSpec of the unsharded parameter, if tensor parallelism has spread it; else None."""

    @property
    def shape(self) -> Size:
        """The shape of the full tensor."""
        shape: Size = self.spec.tensor_meta.shape
        return shape

    @property
    def is_plain(self) -> bool:
        """Whether the unsharded parameter is an ordinary tensor, cut between rows."""
        return self.dim == 0 and self.unsharded_spec is None

    def of_dtype(self, dtype: torch.dtype) -> "DTensorLayout":
        """The layout of tensors of another dtype that are cut in the same way."""
        specs = [None if one is None else replace(one, tensor_meta=one.tensor_meta._replace(dtype=dtype)) for one in self[::2]]
        return DTensorLayout(specs[0], self.dim, specs[1])

    def stored(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor as the flat buffer stores it: the dimension that is cut comes first."""
        local = local_of(tensor)
        found = tensor if local is None else local
        return found.movedim(self.dim, 0) if self.dim else found

    def shown(self, stored: Tensor) -> Tensor:
        """A view of a stored tensor with its dimensions in their places."""
        return stored.movedim(0, self.dim) if self.dim else stored

    def unsharded(self, local: Tensor) -> Tensor:
        """The unsharded parameter whose part on this rank is `local`: `local` itself, unless tensor parallelism has spread it."""
        return local if self.unsharded_spec is None else _dtensor(local, self.unsharded_spec)

    def local_grad(self, gradient: Any) -> Tensor:
        """This rank's part of an unsharded gradient. Communicates if the gradient lies on the ranks in another way."""
        if gradient.placements != self.unsharded_spec.placements:
            gradient = gradient.redistribute(placements=self.unsharded_spec.placements)
        local: Tensor = gradient._local_tensor
        return local.wait() if hasattr(local, "wait") else local

    def fits(self, tensor: Any) -> bool:
        """Whether a DTensor has this shape and lies on the ranks in this way."""
        return bool(
            tensor.shape == self.shape and tensor.placements == self.spec.placements and tensor.device_mesh == self.spec.mesh
        )

    def tensor(self, local: Tensor) -> Tensor:
        """A DTensor whose part on this rank is `local`. It shares the memory."""
        return _dtensor(local, self.spec)


def _dtensor(local: Tensor, spec: Any) -> Tensor:
    # as torch's own fully_shard makes them, without `__init__`, which takes most of the time and does nothing
    kind = _dtensor_class()
    made: Tensor = kind.__new__(kind, _at_zero(local.dtype, local.device), spec, requires_grad=False)
    set_local(made, local)
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


def make_dtensor_mesh(mesh: "DeviceMesh") -> DTensorMesh:
    """The last dimension of the mesh shards, the others hold replicas."""
    _hook_optimizers()
    return DTensorMesh(mesh)


def dim_of(name: str, parameter: Tensor, placement: Any) -> int:
    """The dimension of `parameter` that `placement`, given by the user, cuts.

    Raises:
        ShardingError: it cuts none.
    """
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
def _hook_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_replaced)
    register_optimizer_step_post_hook(_count_step)


def _count_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count the step as a change of each DTensor of this engine: operators on lists of DTensors (foreach) count none."""
    increment_version([p for group in optimizer.param_groups for p in group["params"] if STANDS_FOR in p.__dict__])


def _refuse_replaced(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises:
    ShardingError: the optimizer has a parameter in whose place a DTensor is trained, and would never change it.
    """
    for group in optimizer.param_groups:
        if any([REPLACED in parameter.__dict__ for parameter in group["params"]]):
            raise ShardingError(
                f"{type(optimizer).__name__} was made before the module was wrapped with DTensors as shards, which replace its "
                "parameters: make the optimizer after wrapping."
            )


def replace_by_dtensor(
    original: nn.Parameter, local: Tensor, layout: DTensorLayout, former: nn.Parameter | None = None
) -> nn.Parameter:
    """A parameter over the memory of `local`, with the attributes and hooks of `original`, which it replaces.

    `former`: a parameter that was made so before; it becomes the new one, and keeps its own attributes and hooks.
    """
    if former is not None:
        _become(former, nn.Parameter(layout.tensor(local), former.requires_grad))
        return former
    made = nn.Parameter(layout.tensor(local), original.requires_grad)
    made.__dict__.update(original.__dict__)
    made.__dict__[STANDS_FOR] = True
    for hook in (original._post_accumulate_grad_hooks or {}).values():
        made.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    original.__dict__[REPLACED] = True
    return made


def _become(parameter: nn.Parameter, other: nn.Parameter) -> None:
    """Turn the object `parameter` into the DTensor `other`, which may have another dtype or device. Hooks and attributes stay."""
    torch._C._swap_tensor_impl(parameter, other)
    for name in ("_local_tensor", "_spec"):
        setattr(parameter, name, getattr(other, name))
    # torch learns of hooks when the attributes are set
    parameter._backward_hooks = parameter._backward_hooks or None
    if parameter._post_accumulate_grad_hooks:
        parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks


STANDS_FOR = "_fsdp_stands_for_another"
"""The attribute of a DTensor that is trained in place of a parameter."""
REPLACED = "_fsdp_replaced"
"""The attribute of a parameter in whose place a DTensor is trained."""


def local_of(tensor: Any) -> Tensor | None:
    """This rank's part of a DTensor, without autograd; None if `tensor` is none."""
    local: Tensor | None = getattr(tensor, "_local_tensor", None)
    return local


def set_local(tensor: Tensor, local: Tensor) -> None:
    """Let `local` be this rank's part of a DTensor."""
    tensor._local_tensor = local  # type: ignore[attr-defined]
