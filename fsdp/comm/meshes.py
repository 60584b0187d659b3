"""The device mesh of a module whose shards are DTensors."""

from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from fsdp.comm import simulated
from fsdp.errors import ShardingError


def open_mesh(process_group: Any, mesh: Any, device: torch.device) -> DeviceMesh:
    """The given mesh, or one over a group: the given one, or the default one. Does not communicate.

    Raises:
        ShardingError: there is no mesh: inside `fsdp.simulate`, or the shape of a mesh was given in its place.
    """
    if simulated.current_rank() is not None:
        raise ShardingError("dtensors=True needs process groups, which fsdp.simulate does not have; leave it out there.")
    if isinstance(mesh, tuple | list):
        raise ShardingError(f"dtensors=True needs a DeviceMesh, not the shape of one, {mesh!r}: give init_device_mesh(...).")
    if mesh is not None:
        found: DeviceMesh = mesh
        return found
    return DeviceMesh.from_group(process_group or c10d._get_default_group(), device.type)
