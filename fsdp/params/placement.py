"""How a parameter, its gradient and its optimizer state lie on the ranks, and what code sees of them.

| class            | its shard                               | the unsharded parameter                             |
| ---------------- | --------------------------------------- | --------------------------------------------------- |
| Placement        | an ordinary tensor                      | an ordinary tensor                                  |
| ShardPlacement   | a tensor that knows what it is a part of | an ordinary tensor                                  |
| DTensorPlacement | a DTensor                               | an ordinary tensor, or a DTensor of a mesh around it |

Rule 1: no other file asks of which class a placement is. What differs is a method or an attribute of the placement.

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

import torch
from torch import Size, Tensor, nn

from fsdp.comm.communicator import Communicator
from fsdp.comm.dtensor_mesh import ranks_of
from fsdp.config import Config, MeshKind
from fsdp.errors import ShardingError
from fsdp.params.layout import Layout, make_layout, make_row_layout
from fsdp.params.param_info import ParamInfo
from fsdp.shards.cut import Shape
from fsdp.shards.dtensors import (
    STANDS_FOR,
    SUMMED,
    GradForm,
    Mesh,
    as_parameter,
    form_of,
    full_with_grad,
    here_of,
    keep_hooks,
    let_checkpoints_find_parts,
    lies_alike,
    local_of,
    local_of_full,
    make_dtensor,
    replace_by_dtensor,
    specs_of,
)
from fsdp.shards.info import ShardInfo
from fsdp.shards.refusals import check_fit
from fsdp.shards.shard_parameter import become_full, become_local, become_shard, make_plain, moved_shards
from fsdp.shards.shard_tensor import ShardTensor, as_shard, plain
from fsdp.shards.sharded_value import ShardedValue
from fsdp.shards.state_placement import StatePlacement, has_dimensions, place_full, place_local, refuse_absent, refuse_shape

_torch: Any = torch._C
_storage_id: Final[Callable[[Tensor], int]] = _torch._storage_id


class Placement:
    """One parameter of a flat buffer. Its shard is an ordinary tensor: the full parameter, or a part that knows of no other."""

    __slots__ = ("cut", "extent", "is_complete", "layout", "name", "part", "rank", "shape")

    asks_address: ClassVar = True
    """Whether only its address says where the shard lies. Otherwise `moved_shards` has all that were moved."""
    refuses_data: ClassVar = False
    """Whether the shard cannot be pointed at other memory (`p.data = x`)."""
    replaces_param: ClassVar = False
    """Whether the shard is another object than the user's Parameter, in whose place it is trained."""
    has_empty_grad: ClassVar = False
    """Whether a rank that holds no element has a gradient without elements where others have one with."""
    address: Callable[[Tensor], int] = staticmethod(Tensor.data_ptr)
    """Where a shard lies."""
    dim: int = 0
    """The dimension that is cut over the ranks. It comes first in the flat buffer."""
    ranks: Sequence[int] = ()
    """The numbers of the ranks that have a part of it, as far as a mesh says so."""
    is_row_range: bool = True
    """Whether the shards are ranges of the parameter's elements, in the order of its memory."""
    is_tensor_parallel: bool = False
    """Whether the unsharded parameter is itself a DTensor, which tensor parallelism has spread over a mesh."""
    _unsharded_spec: Any = None
    """torch's DTensorSpec of that."""

    def __init__(self, name: str, layout: Layout, index: int, rank: int, is_complete: bool = False) -> None:
        """`index`: the number of the parameter in `layout`. `is_complete`: each rank has the full parameter."""
        self.name = name
        self.layout = layout
        self.rank = rank
        self.is_complete = is_complete
        self.extent = layout.slots[index]
        self.shape: Shape = self.extent.shape
        """The shape of the full parameter."""
        self.part = layout.part(index, rank)
        self.cut = layout.cut(index)

    # which elements -----------------------------------------------------------------------

    @property
    def gets_grad(self) -> bool:
        """Whether the shard ever has a `.grad`."""
        return self.part.numel > 0 or self.has_empty_grad or self.is_complete

    @property
    def coordinates(self) -> tuple[int, ...]:
        """Which of the parts this rank has. Ranks with the same coordinates have the same part."""
        return (self.rank,)

    def counts_among(self, ranks: Sequence[int], is_first: bool) -> bool:
        """Whether this rank counts its part in a sum over `ranks`, those of all meshes. Of ranks with the same part, one does.

        `is_first`: whether the first of them is among the ranks with which this one shares the shards.
        """
        return is_first

    # views and copies ---------------------------------------------------------------------

    def stored(self, tensor: Tensor) -> Tensor:
        """This rank's part of an unsharded tensor as the flat buffer stores it: the dimension that is cut comes first."""
        return stored(tensor, self.dim)

    def shown(self, stored: Tensor) -> Tensor:
        """A view of a stored tensor with its dimensions in their places."""
        return stored.movedim(0, self.dim) if self.dim else stored

    def full_in(self, flat: Tensor) -> Tensor:
        """The parameter in an unsharded flat tensor (W * C,), as a forward sees it: a view, or a DTensor over one."""
        extent = self.extent
        return self.unsharded(self.shown(flat[extent.start : extent.end].view(extent.shape)))

    def full_of(self, stored: Tensor) -> Tensor:
        """The full parameter of which the flat buffer stores `stored`. Communicates if tensor parallelism has cut it."""
        view: Any = self.unsharded(self.shown(stored))
        full: Tensor = view.full_tensor() if self.is_tensor_parallel else view
        return full

    def over_all_dims(self, unsharded: Tensor, data_ranks: Sequence[int]) -> Tensor:
        """The full parameter of an unsharded one, differentiable. Communicates if tensor parallelism has cut it.

        `data_ranks`: the ranks over which gradients are averaged.
        """
        return full_with_grad(unsharded, data_ranks) if self.is_tensor_parallel else unsharded

    def shard_in(self, chunk: Tensor) -> Tensor:
        """This rank's part of the parameter in a tensor (C,) that is cut like the shard: a view."""
        part = self.part
        return self.shown(chunk[part.offset : part.offset + part.numel].view(part.shape))

    def local_part(self, full: Tensor) -> Tensor:
        """This rank's part of a tensor with the shape of the unsharded parameter."""
        part = self.part
        return self.shown(self.stored(full).reshape(-1)[part.first : part.first + part.numel].view(part.shape))

    def part_of_full(self, full: Tensor) -> Tensor:
        """This rank's part of a full tensor. It may be a view."""
        return self.local_part(local_of_full(full, self._unsharded_spec) if self.is_tensor_parallel else full)

    def unsharded(self, view: Tensor) -> Tensor:
        """The unsharded parameter whose part on this rank is `view`."""
        return make_dtensor(view, self._unsharded_spec) if self.is_tensor_parallel else view

    def local_grad(self, gradient: Any, form: GradForm | None = None) -> tuple[Tensor, GradForm]:
        """This rank's part of an unsharded gradient, and its form, which may be given.

        Communicates if the gradient has another form, except to make terms of it.
        """
        return gradient, SUMMED

    def as_shard(self, local: Tensor) -> Tensor:
        """`local`, this rank's part of a tensor that is cut like the parameter, as code sees it: a tensor like the shard."""
        return local

    # the user's Parameter objects ---------------------------------------------------------

    def make_shard(self, info: ParamInfo, local: Tensor) -> None:
        """Turn the parameter of `info` into its shard, which shares the memory of `local`."""
        become_local(info.parameter, local.data)

    def make_full(self, info: ParamInfo, unsharded: nn.Parameter, full: Tensor, gradient: Tensor | None) -> None:
        """Make the parameter of `info` an ordinary one with the values `full` and this gradient.

        Hooks that were set before wrapping, which `unsharded` has, are its own again.
        """
        parameter, accumulator = info.parameter, info.kept_accumulator
        parameter.grad = None
        become_full(parameter, full, None if accumulator is None else accumulator.variable)
        late, early = parameter._backward_hooks, unsharded._backward_hooks
        if early:
            unsharded._backward_hooks = None
            early.update(late or {})
        parameter._backward_hooks = early or late
        keep_hooks(parameter)
        parameter.grad = gradient

    def stand_in(self, shard: nn.Parameter, unsharded: Tensor, copied: nn.Parameter | None) -> nn.Parameter:
        """The copy of `shard` in a copy of the model, until that is sharded: it has the data `unsharded`, or is a DTensor.

        `copied`: what becomes that, if code has copied `shard` already.
        """
        if copied is None:
            return make_plain(shard, unsharded)
        become_full(copied, unsharded)
        return copied

    # state dicts --------------------------------------------------------------------------

    def value(self, name: str, local: Tensor) -> Tensor:
        """`local`, which has the shape of this rank's shard, as this rank's part of a tensor shaped like the parameter.

        It shares the memory, and torch's Distributed Checkpoint saves and loads it.
        """
        return ShardedValue(name, plain(local), self.shape, self.part.first, 0 in self.shape and self.rank == 0)

    def part_of_value(self, given: Tensor) -> Tensor | None:
        """This rank's part of a sharded `given`; None if it is cut in another way than the parameter."""
        first, numel = self.part.first, self.part.numel
        is_same = isinstance(given, ShardedValue) and (given.first, given.local.numel()) == (first, numel)
        return given.local if is_same and tuple(given.shape) == self.shape else None  # type: ignore[attr-defined]

    def part_of_given(self, operation: str, name: str, given: Any, parameter: Tensor) -> Tensor:
        """This rank's part of `given`, which is the full tensor or already this part. Errors begin with `operation`.

        Raises:
            ShardingError: `given` has another shape, or a dtype whose conversion would lose something, or is another part.
        """
        if given is parameter:
            # torch's set_model_state_dict gives the model its own parameters under names that are missing
            return plain(parameter)
        if local_of(given) is not None and (local := self.part_of_value(given)) is not None:
            return local  # a DTensor that is cut like this one
        check_fit(operation, name, given, self.shape, parameter.dtype)
        if not isinstance(given, ShardedValue):
            return self.part_of_full(given.detach())
        local = self.part_of_value(given)
        if local is None:
            raise ShardingError(
                f"{operation}: {name!r} was cut in another way than this model's (other ranks, or other units): save it with "
                "fsdp.save and load it with fsdp.load, which cut it anew, or give the full value."
            )
        return local

    # the state of an optimizer --------------------------------------------------------------

    @property
    def keeps_state(self) -> bool:
        """Whether this rank has state of the parameter."""
        return self.part.numel > 0 or self.replaces_param

    def part_of_former_state(self, former: Tensor, device: torch.device, value: Any) -> Tensor | None:
        """This rank's part, on `device`, of what an optimizer keeps of `former`, the parameter before it was sharded.

        None if it does not lie as that did, so that nothing says how to cut it.
        """
        how = ("shape", "device_mesh", "placements")  # ordinary tensors lack the last two
        is_alike = [getattr(value, one, None) for one in how] == [getattr(former, one, None) for one in how]
        return self.as_shard(self.local_part(value).to(device, copy=True)) if is_alike else None

    def part_of_state(self, where: str, value: Any) -> Any:
        """What this rank saves of an optimizer's value. If nothing says how it lies on ranks, an error begins with `where`."""
        return plain(value) if isinstance(value, ShardTensor) else value

    def place_state(self, where: str, shapes: Mapping[int, Shape], dtype: torch.dtype) -> StatePlacement:
        """See `fsdp.shards.state_placement.Place`."""
        return place_local(where, self.cut, shapes, dtype)

    def place_full_state(self, where: str, shape: Shape, dtype: torch.dtype) -> StatePlacement:
        """The placement of a full tensor of `shape`. If it cannot be cut like the parameter, an error begins with `where`."""
        return place_full(where, self.cut, shape, dtype)

    def placed(self, layout: Layout, index: int, like: nn.Parameter, dtype: torch.dtype) -> "Placement":
        """The placement of the parameter at `index` of another layout, in `dtype`. `like`: the shard until now."""
        return type(self)(self.name, layout, index, self.rank, self.is_complete)


class ShardPlacement(Placement):
    """One parameter of a flat buffer. Its shard is a tensor that knows what it is a part of."""

    __slots__ = ("info",)

    asks_address: ClassVar = False
    has_empty_grad: ClassVar = True
    address = staticmethod(lambda shard: moved_shards.get(shard, 0))  # type: ignore[no-untyped-call]

    def __init__(self, name: str, layout: Layout, index: int, comm: Communicator) -> None:
        super().__init__(name, layout, index, comm.rank)
        extent, part = self.extent, self.part
        self.info = ShardInfo(name, self.cut, Size(part.shape), part.first, extent.numel, self.cut.by_element, comm)

    def as_shard(self, local: Tensor) -> Tensor:
        return as_shard(local, self.info)

    def make_shard(self, info: ParamInfo, local: Tensor) -> None:
        become_shard(info.parameter, local.data, self.info)

    def placed(self, layout: Layout, index: int, like: nn.Parameter, dtype: torch.dtype) -> Placement:
        return ShardPlacement(self.name, layout, index, self.info.comm)


class DTensorPlacement(Placement):
    """One parameter of a flat buffer. Its shard is a DTensor. See [Note: shards as DTensors]."""

    __slots__ = (
        *("_dtensor", "_grad_form", "_grad_placements", "_spec", "_unsharded_spec"),
        *("dim", "is_row_range", "is_tensor_parallel", "ranks"),
    )

    refuses_data: ClassVar = True
    replaces_param: ClassVar = True
    has_empty_grad: ClassVar = True
    address = staticmethod(_storage_id)

    def __init__(
        self,
        name: str,
        layout: Layout,
        index: int,
        rank: int,
        specs: tuple[Any, Any, tuple[int, ...]],
        dim: int,
        dtensor: nn.Parameter | None = None,
    ) -> None:
        """`specs`: torch's DTensorSpec of the shard, and of the unsharded parameter if it is a DTensor, or None; `ranks`.

        `dtensor`: the DTensor that is the shard already, in another flat buffer, and becomes that of this one.
        """
        super().__init__(name, layout, index, rank)
        self._spec, self._unsharded_spec, self.ranks = specs
        self.shape = tuple(self._spec.tensor_meta.shape)
        self.dim = dim
        self.is_tensor_parallel = self._unsharded_spec is not None
        self.is_row_range = dim == 0 and not self.is_tensor_parallel
        self._dtensor = dtensor
        self._grad_placements: tuple[Any, ...] = ()
        self._grad_form: GradForm | None = None

    @property
    def coordinates(self) -> tuple[int, ...]:
        return tuple([coordinate for coordinate, placement in self._here() if not placement.is_replicate()])

    def counts_among(self, ranks: Sequence[int], is_first: bool) -> bool:
        # ranks in another dimension than those of its mesh have copies of it: the mesh of the first rank counts
        has_first = not ranks or ranks[0] in ranks_of(self._spec.mesh)
        return has_first and not any([placement.is_replicate() and coordinate for coordinate, placement in self._here()])

    def _here(self) -> Iterator[tuple[int, Any]]:
        """This rank's coordinate in each dimension of the mesh, and how the parameter lies along it."""
        return zip(self._spec.mesh.get_coordinate(), self._spec.placements, strict=True)

    def local_grad(self, gradient: Any, form: GradForm | None = None) -> tuple[Tensor, GradForm]:
        spec = self._unsharded_spec
        if spec is None:
            return super().local_grad(gradient)
        if gradient.placements != self._grad_placements:  # most often those of the step before
            self._grad_placements, self._grad_form = gradient.placements, form_of(gradient.placements, spec)
        found = self._grad_form
        form = form or found or SUMMED
        is_other = form is not found and form != found
        if is_other:
            gradient = gradient.redistribute(placements=spec.placements)
        local: Tensor = gradient._local_tensor
        local = local.wait() if hasattr(local, "wait") else local
        return local / form.num_terms if is_other and form is not SUMMED else local, form

    def as_shard(self, local: Tensor) -> Tensor:
        return make_dtensor(local, self._spec)

    def make_shard(self, info: ParamInfo, local: Tensor) -> None:
        if self.is_tensor_parallel:
            let_checkpoints_find_parts()
        info.parameter = replace_by_dtensor(info.parameter, self.as_shard(local), self._dtensor)

    def make_full(self, info: ParamInfo, unsharded: nn.Parameter, full: Tensor, gradient: Tensor | None) -> None:
        """Let a parameter with the values `full` take the place of the DTensor, which has no gradient afterwards."""
        parameter = info.parameter
        parameter.grad = None
        stand_in = nn.Parameter(full, parameter.requires_grad)
        stand_in.__dict__.update(parameter.__dict__)
        del stand_in.__dict__[STANDS_FOR]
        stand_in._backward_hooks, unsharded._backward_hooks = unsharded._backward_hooks, None
        stand_in.grad = gradient
        info.parameter = stand_in

    def stand_in(self, shard: nn.Parameter, unsharded: Tensor, copied: nn.Parameter | None) -> nn.Parameter:
        copied = as_parameter(self.as_shard(plain(shard)), shard.requires_grad) if copied is None else copied
        copied.__dict__[STANDS_FOR] = True
        return copied

    def value(self, name: str, local: Tensor) -> Tensor:
        return super().value(name, local) if self.is_row_range else self.as_shard(plain(local))

    def part_of_value(self, given: Any) -> Tensor | None:
        local, spec = local_of(given), self._spec
        # there may be copies on other ranks, as FSDP2 has none of what tensor parallelism has not cut
        is_alike = local is not None and given.shape == spec.tensor_meta.shape and lies_alike(given._spec, spec)
        return local if is_alike else super().part_of_value(given)

    def part_of_state(self, where: str, value: Any) -> Any:
        if has_dimensions(value) and local_of(value) is None:
            raise ShardingError(
                f"{where} is an ordinary tensor of shape {tuple(value.shape)}, and the parameter is a DTensor: nothing says of "
                "what this is a part. Use an optimizer that keeps DTensors."
            )
        return value

    def place_state(self, where: str, shapes: Mapping[int, Shape], dtype: torch.dtype) -> StatePlacement:
        refuse_absent(where, range(self.layout.num_shards), shapes)
        return DTensorState(self, next(iter(shapes.values())), dtype)

    def place_full_state(self, where: str, shape: Shape, dtype: torch.dtype) -> StatePlacement:
        if shape != self.shape:
            refuse_shape(where, shape, self.shape)
        return DTensorState(self, shape, dtype)

    def placed(self, layout: Layout, index: int, like: nn.Parameter, dtype: torch.dtype) -> Placement:
        specs = [
            None if one is None else replace(one, tensor_meta=one.tensor_meta._replace(dtype=dtype))
            for one in (self._spec, self._unsharded_spec)
        ]
        return DTensorPlacement(self.name, layout, index, self.rank, (specs[0], specs[1], tuple(self.ranks)), self.dim, like)


class DTensorState(StatePlacement):
    """State of the parameter's shape. Each rank's part is a DTensor, which knows where it lies."""

    __slots__ = ("_placement",)

    def __init__(self, placement: DTensorPlacement, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__(shape, dtype, placement.cut)
        self._placement = placement

    def part_of(self, full: Tensor, rank: int) -> Tensor:
        return self._placement.as_shard(self._placement.part_of_full(full.detach()).clone())

    def value(self, name: str, local: Tensor, rank: int) -> Tensor:
        return local

    def empty(self, name: str, rank: int, device: torch.device) -> Tensor:
        stored = torch.empty(self._placement.part.shape, dtype=self.dtype, device=device)
        return self._placement.as_shard(self._placement.shown(stored))

    def gather(self, where: str, local: Any, comm: Communicator, device: torch.device) -> Tensor:
        full: Tensor = local.full_tensor()
        return full


def stored(tensor: Tensor, dim: int) -> Tensor:
    """This rank's part of a tensor, or of a DTensor, with the dimension `dim` in front."""
    here = here_of(tensor)
    return here.movedim(dim, 0) if dim else here


def place(
    param_infos: Sequence[ParamInfo], itemsize: int, config: Config, comm: Communicator, mesh: Mesh | None
) -> tuple[Placement, ...]:
    """The placements of the parameters of one flat buffer.

    `itemsize`: the bytes of the smallest element. `mesh`: shards are DTensors over it; its last dimension shards, the others hold
    replicas.
    """
    names = [info.names[0] for info in param_infos]
    if mesh is not None:
        dims = [info.shard_dim for info in param_infos]
        rows = tuple([tuple(stored(info.parameter, dim).shape) for info, dim in zip(param_infos, dims, strict=True)])
        layout = make_row_layout(rows, itemsize, comm.size)
        specs = [specs_of(mesh, info.parameter, info.shard_dim, info.joint_mesh) for info in param_infos]
        return tuple([DTensorPlacement(name, layout, i, comm.rank, specs[i], dims[i]) for i, name in enumerate(names)])
    shapes = tuple([tuple(info.parameter.shape) for info in param_infos])
    layout = make_layout(shapes, itemsize, comm.size, config.aligned)
    is_complete = config.mesh_kind is MeshKind.REPLICATE
    if config.plain_shards or is_complete or comm.size == 1:
        return tuple([Placement(name, layout, i, comm.rank, is_complete) for i, name in enumerate(names)])
    return tuple([ShardPlacement(name, layout, i, comm) for i, name in enumerate(names)])


def place_again(
    placements: Sequence[Placement], shards: Sequence[nn.Parameter], taken: Sequence[int], dtype: torch.dtype, itemsize: int
) -> tuple[Placement, ...]:
    """The placements of a flat buffer that has the parameters `taken` of another, with shards of `dtype` that are cut alike.

    `placements`, `shards`: of all parameters of the other. `itemsize`: bytes of the smallest element.
    """
    layout = placements[0].layout
    if len(taken) < len(placements):
        layout = make_row_layout(tuple([layout.slots[i].shape for i in taken]), itemsize, layout.num_shards)
    return tuple([placements[i].placed(layout, index, shards[i], dtype) for index, i in enumerate(taken)])
