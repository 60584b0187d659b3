"""The forward of the outermost instance, and what was put into the model since the last one: parameters, and optimizers.

A parameter that stands in the place of one of a unit gives it its values. One beside them stays unsharded.
"""

import warnings
from typing import Any

import torch

from fsdp.api.wrap import run_forward
from fsdp.compat.fsdp1.sharding import set_precision
from fsdp.compat.shared.instances import moved
from fsdp.errors import PeerFailed, WorldError
from fsdp.params.module_tree import IGNORED, ModuleTree
from fsdp.params.shown_params import owning_unit
from fsdp.params.unit import Unit
from fsdp.runtime.engine import Engine
from fsdp.shards.dtensors import is_replaced
from fsdp.shards.shard_tensor import plain
from fsdp.state_dict.fqns import plain_fqn
from fsdp.state_dict.param_shard import param_shards_of


def run(root: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the forward of the outermost instance.

    Raises:
        RuntimeError: a parameter has an optimizer that steps inside the backward; or see `take_over`.
        WorldError: the ranks call other units.
    """
    if not root.has_started:
        _refuse_optimizers(root)
        root.set_started()
    take_over(root._unit_ref.engine)
    set_precision(root)
    if root.compute_device.type != "cpu":
        args, kwargs = moved((args, kwargs), root.compute_device)
    try:
        return run_forward(root._fsdp_wrapped_module, args, kwargs, root._unit_ref)
    except PeerFailed:
        raise
    except WorldError as error:
        raise WorldError(f"Forward order differs across ranks. {error}") from error


def _refuse_optimizers(root: Any) -> None:
    """Refuse optimizers that torch's `_apply_optimizer_in_backward` has given to parameters."""
    for name, parameter in root.named_parameters():
        if hasattr(parameter, "_in_backward_optimizers"):
            # torch's words are in it, which a user's code may look for
            raise RuntimeError(
                f"parameter {plain_fqn(name)!r} has an optimizer that steps inside the backward. In FSDP1 that is only "
                "supported with use_orig_params=True; here the gradients of all units are written together at the end of a "
                "backward. Step the optimizer after it."
            )


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
            f"parameter {plain_fqn(name)!r} was added after wrapping: it is not sharded, and its gradients are not reduced.",
            stacklevel=2,
        )


@torch.no_grad()
def _write_back(unit: Unit) -> None:
    """Copy what stands in the places of the parameters of a unit into these, and put them back."""
    for param_shard, info in zip(param_shards_of(unit), unit.param_infos, strict=True):
        parameter = param_shard.parameter
        for module, slot in info.slots:
            given: Any = module._parameters.get(slot)
            if given is None or given is parameter:
                continue
            if owning_unit(given) is unit and not any(given is shard for shard in unit.sharded_params):
                continue  # the unsharded parameter, or the full one that summon_full_params shows
            local = plain(parameter)
            if given.shape != local.shape or given.dtype != local.dtype:
                raise RuntimeError(
                    f"Cannot writeback when the parameter shape changes: {info.names[0]!r} of unit {unit.name!r} is "
                    f"{tuple(local.shape)}, {local.dtype} on this rank, and was replaced by {tuple(given.shape)}, {given.dtype}. "
                    "Replace it by a parameter like the one that is there."
                )
            parameter.copy_(given)
            parameter.requires_grad_(given.requires_grad)
            parameter.grad = given.grad
            setattr(module, slot, parameter)
            is_replaced(
                given,
                f"has a parameter that replaced {info.names[0]!r} of unit {unit.name!r} after wrapping, whose values that one "
                "has taken: make the optimizer after the first forward, or replace before wrapping.",
            )
