"""Parameters that were put into a wrapped module: in the place of its own, whose values they become, or beside them."""

import warnings
from typing import Any

import torch

from fsdp.params.module_tree import IGNORED, ModuleTree
from fsdp.params.unit import Unit
from fsdp.runtime.engine import Engine
from fsdp.shards.shard_tensor import plain
from fsdp.state_dict.param_shard import param_shards_of
from fsdp.torch_fsdp_api.sharding import plain_name


def take_over(engine: Engine) -> None:
    """Copy parameters that have replaced those of units into these, and leave new ones unsharded, as FSDP1 does.

    Raises:
        RuntimeError: a parameter that has replaced another one does not fit.
    """
    tree = ModuleTree.of(engine.units[0].module)
    if not tree.is_changed:
        return
    for unit in engine.units:
        _write_back(unit)
    for name, parameter in tree.added():
        parameter.__dict__[IGNORED] = True
        warnings.warn(
            f"parameter {plain_name(name)!r} was added after wrapping: it is not sharded, and its gradients are not reduced.",
            stacklevel=2,
        )


@torch.no_grad()
def _write_back(unit: Unit) -> None:
    """Copy what stands in the places of the parameters of a unit into these, and put them back."""
    for param_shard, info in zip(param_shards_of(unit), unit.param_infos, strict=True):
        parameter = param_shard.parameter
        for module, slot in info.slots:
            given: Any = module._parameters.get(slot)
            if given is None or given is parameter or given is unit.unsharded_of(parameter):
                continue
            local = plain(parameter)
            if given.shape != local.shape or given.dtype != local.dtype:
                raise RuntimeError(
                    f"Cannot writeback when the parameter shape changes: {info.names[0]!r} of unit {unit.name!r} is "
                    f"{tuple(local.shape)}, {local.dtype} on this rank, and was replaced by {tuple(given.shape)}, {given.dtype}. "
                    "Replace it by a parameter like the one that is there."
                )
            parameter.copy_(given)
            parameter.requires_grad_(given.requires_grad)
            setattr(module, slot, parameter)
