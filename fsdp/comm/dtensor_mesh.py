"""The device mesh of a module whose shards are DTensors."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from fsdp.errors import ShardingError


def open_mesh(process_group: Any, mesh: Any, device: torch.device) -> DeviceMesh:
    """The given mesh, or one over a group: the given one, or the default one. Does not communicate.

    Raises:
        ShardingError: the shape of a mesh was given in its place.
    """
    if isinstance(mesh, tuple | list):
        raise ShardingError(f"dtensors=True needs a DeviceMesh, not the shape of one, {mesh!r}: give init_device_mesh(...).")
    if mesh is not None:
        found: DeviceMesh = mesh
        return found
    return DeviceMesh.from_group(process_group or c10d._get_default_group(), device.type)


def ranks_of(mesh: Any) -> tuple[int, ...]:
    """The ranks of a DeviceMesh, in its order; of anything else, none."""
    return tuple(mesh.mesh.flatten().tolist()) if isinstance(mesh, DeviceMesh) else ()


def have_same_first_dims(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    """Whether two meshes share their first dimensions, as many as the smaller one has. All ranks find the same."""
    shared = min(mesh.ndim, other.ndim)
    mine, theirs = ((one.mesh_dim_names or ())[:shared] for one in (mesh, other))
    return mesh == other or (mine == theirs and mesh._get_root_mesh() == other._get_root_mesh())


def ranks_around(mesh: Any, tensors: Iterable[Any]) -> tuple[int, ...]:
    """The ranks of `mesh`, and of the meshes over which tensor parallelism has spread some of `tensors`. Does not communicate.

    Raises:
        ShardingError: some are spread over other dimensions than others.
    """
    found = [{*ranks_of(mesh)}]
    for own in _meshes_of(mesh, tensors):
        found.append({*ranks_of(own if found[0].issubset(ranks_of(own)) else _joined(mesh, own))})
    together = set().union(*found)
    if together not in found:
        what = "some parameters are DTensors over one dimension of the device mesh, and some over another one"
        raise ShardingError(f"{what}: parallelise all of them over the same dimensions.")
    return tuple(sorted(together))


def mesh_around(mesh: Any, tensors: Iterable[Any]) -> DeviceMesh | None:
    """The mesh of the dimensions of `mesh`, then those over which `tensors` are spread; None if that is none, or not one mesh."""
    found = {own if have_same_first_dims(own, mesh) else _joined(mesh, own) for own in _meshes_of(mesh, tensors)} - {None}
    return found.pop() if len(found) == 1 else None


def _joined(mesh: DeviceMesh, other: DeviceMesh) -> DeviceMesh | None:
    """The mesh of the dimensions of both; None if they share ranks, or `check_joins` refuses them."""
    try:
        return DeviceMesh._concatenate([mesh, other])
    except (RuntimeError, TypeError):
        return None


def _meshes_of(mesh: Any, tensors: Iterable[Any]) -> dict[DeviceMesh, None]:
    """The meshes over which some of `tensors` are spread; none if `mesh` is no DeviceMesh."""
    return dict.fromkeys(own for one in tensors if isinstance(mesh, DeviceMesh) and (own := getattr(one, "device_mesh", None)))


def is_part(mesh: Any) -> bool:
    """Whether `mesh` is a part of a mesh with more ranks."""
    return isinstance(mesh, DeviceMesh) and mesh._get_root_mesh().size() > mesh.size()


def groups_around(mesh: Any, tensors: Iterable[Any]) -> list[ProcessGroup]:
    """The groups over which some of `tensors` are spread, without those of `mesh`. Does not communicate.

    If `mesh` is made of several dimensions of another one, such as data and context parallelism, so are the groups of these.
    """
    if not isinstance(mesh, DeviceMesh):
        return []
    root, ranks = mesh._get_root_mesh(), {*ranks_of(mesh)}
    of_root = [root.get_group(dim) for dim in range(root.ndim) if 1 < root.size(dim) < mesh.size()]
    inside = [group for group in of_root if ranks.issuperset(c10d.get_process_group_ranks(group))]
    mine = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    found = dict.fromkeys([*(own.get_group(dim) for own in _meshes_of(mesh, tensors) for dim in range(own.ndim)), *inside])
    return [group for group in found if group not in mine]


def check_joins(name: str, parameter: Any, mesh: Any) -> None:
    """Raise ShardingError if a parameter which tensor parallelism has spread cannot be cut over `mesh` as well."""
    if not isinstance(mesh, DeviceMesh):
        raise ShardingError(
            f"parameter {name!r} is a DTensor: give the mesh to cut it over as well, a part of the same mesh as its "
            'own, such as mesh=both["dp"].'
        )
    if parameter.device_mesh.device_type != mesh.device_type:
        raise ShardingError(
            f"parameter {name!r}: Requires DTensor to have mesh of the same type as the FSDP mesh but got "
            f"{parameter.device_mesh.device_type} for DTensor and {mesh.device_type} for FSDP."
        )
    if any(placement.is_partial() for placement in parameter.placements):
        raise ShardingError(f"parameter {name!r} is a DTensor with parts that must be summed first; redistribute it.")
    try:
        DeviceMesh._concatenate([mesh, parameter.device_mesh])
    except (RuntimeError, TypeError) as problem:
        raise ShardingError(
            f"parameter {name!r} is a DTensor over {parameter.device_mesh!r}, which cannot be joined with {mesh!r}: make both "
            f"meshes from one with named dimensions. torch says: {problem}"
        ) from problem


def check_order(name: str, parameter: Any, mesh: Any) -> None:
    """Raise ShardingError unless the ranks ascend in the dimensions that cut: the last of `mesh`, and of tensor parallelism.

    torch sorts the ranks of groups: in another order its collectives and its checkpoints disagree on who has which part.
    """
    own = [(parameter.device_mesh, i, not one.is_replicate()) for i, one in enumerate(getattr(parameter, "placements", ()))]
    for one, dim, cuts in [(mesh, -1, True), *own]:
        if cuts and isinstance(one, DeviceMesh) and (one.mesh.diff(dim=dim) < 0).any():
            raise ShardingError(
                f"parameter {name!r} would be a DTensor over the ranks {one.mesh.tolist()}, which do not ascend, and checkpoints "
                "of torch would mix up its parts; give a mesh whose ranks ascend in each dimension that cuts it."
            )
