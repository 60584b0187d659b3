"""FSDP2's `fully_shard` and the functions beside it."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from fsdp.api import forward_methods
from fsdp.api import wrap as native
from fsdp.building.builder import stay_on_meta
from fsdp.building.choose_units import is_bare_container
from fsdp.building.torch_policies import OFFLOADS, refuse_unknown_fields
from fsdp.compat.fsdp2.module import FSDPModule, become_fsdp_module, refuse_unwrapped
from fsdp.compat.fsdp2.move_module import convert_inside, follow_assignments
from fsdp.compat.shared.instances import put_on
from fsdp.errors import ShardingAssertion, ShardingError
from fsdp.runtime.registry import unit_ref_of
from fsdp.shards.shard_tensor import plain


def fully_shard(
    module: Any,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], object] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # frozen, as in FSDP2
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Make `module`, or a list of modules, one unit over the ranks of `mesh`, in place; return it.

    The arguments are FSDP2's. The page "From FSDP2" lists each of them with what differs. Communicates: every rank must call it
    alike.

    Raises:
        ValueError: an argument, the module or the ranks are refused. Nothing was sharded, on any rank.
    """
    modules = module if isinstance(module, list | tuple) else [module]
    if not modules or not all(isinstance(one, nn.Module) for one in modules):
        raise ValueError(f"fully_shard takes a module or a list of modules, not {module!r}.")
    if dp_mesh_dims is not None:
        raise ShardingError("dp_mesh_dims is not supported: give a mesh of these dimensions alone, such as mesh=mesh['shard'].")
    refuse_unknown_fields(offload_policy, OFFLOADS)
    ndim = 1 if mesh is None else 2 if isinstance(mesh, tuple) else mesh.ndim
    if ndim > 2:
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh!r}.")
    offloads = isinstance(offload_policy, CPUOffloadPolicy) and _computes_on_device(modules, mesh)
    _move(modules, mesh, ignored_params or ())
    try:
        native.fully_shard(
            modules[0] if len(modules) == 1 else list(modules),
            mesh=mesh,
            sharding_strategy="FULL_SHARD" if ndim == 1 else "HYBRID_SHARD",
            reshard_after_forward=_reshards(reshard_after_forward),
            mp_policy=mp_policy,
            ignored_params=ignored_params,
            param_init_fn=stay_on_meta,
            dtensors=True,
            shard_placement_fn=partial(_placement_of, shard_placement_fn),
            offload_policy=offload_policy if offloads else None,
        )
    except ShardingError as refusal:
        _say_as_torch(modules, refusal)
        raise
    ref = unit_ref_of(modules[0])
    if ref is not None:
        convert_inside(ref.unit)
        follow_assignments()
    for one in modules:
        become_fsdp_module(one)
    return module


def _placement_of(chosen: Any, parameter: nn.Parameter) -> object:
    """Where a parameter is cut, as the `shard_placement_fn` that was `chosen` says.

    Raises:
        ShardingError: that is no function.
        NotImplementedError: the parameter is not contiguous. Every rank refuses it.
    """
    if not (chosen is None or callable(chosen)):
        raise ShardingError(f"shard_placement_fn must be a function of a parameter, not {chosen!r}.")
    if not plain(parameter).is_contiguous():
        raise NotImplementedError(
            f"FSDP does not support non-contiguous parameters: one of shape {tuple(parameter.shape)} has strides "
            f"{parameter.stride()}, as channels_last gives. Make it contiguous before wrapping (`p.data = p.data.contiguous()`)."
        )
    return None if chosen is None else chosen(parameter)


def _say_as_torch(modules: Sequence[nn.Module], refusal: ShardingError) -> None:
    """Raise a refusal with torch's words in it, where a user's code may look for them. Every rank has refused."""
    for module in modules:
        if isinstance(module, FSDPModule):
            raise ShardingAssertion(
                "Each distinct composable distributed API can only be applied to a module once. fully_shard: "
                f"{type(module).__name__} is wrapped already; wrap a module once."
            ) from refusal
        if is_bare_container(module):
            raise ShardingError(
                f"fully_shard does not support containers that do not implement forward: {type(module).__name__}. Wrap its "
                "members, or the module that contains it."
            ) from refusal


def _reshards(given: Any) -> bool | None:
    """`reshard_after_forward` as the engine takes it."""
    if given is None or isinstance(given, bool):
        return given
    if not isinstance(given, int):
        raise ValueError(f"reshard_after_forward must be True, False, None or a number of ranks, not {given!r}.")
    warnings.warn(f"reshard_after_forward={given}: parameters are resharded over all ranks, as with True.", stacklevel=4)
    return True


def _computes_on_device(modules: Sequence[nn.Module], mesh: Any) -> bool:
    """Whether a device will compute, so that `CPUOffloadPolicy` has an effect.

    Raises:
        ShardingError: a device will compute with a parameter that has no memory yet.
    """
    parameters = [(name, parameter) for module in modules for name, parameter in module.named_parameters()]
    without_memory = [name for name, parameter in parameters if parameter.is_meta]
    accelerator = torch.accelerator.current_accelerator()
    kind = getattr(mesh, "device_type", "cpu" if accelerator is None or not without_memory else accelerator.type)
    if without_memory and kind != "cpu":
        raise ShardingError(
            f"CPUOffloadPolicy with {without_memory[0]!r} on the meta device: give the module memory and values on the {kind} "
            "device first, because the device of the parameters computes."
        )
    return kind != "cpu" or any(not parameter.is_cpu and not parameter.is_meta for _, parameter in parameters)


def _move(modules: Sequence[nn.Module], mesh: Any, ignored: Any) -> None:
    """Move parameters and buffers to this rank's device of the mesh, as FSDP2 does."""
    kind = getattr(mesh, "device_type", None)
    if kind is None or kind == "cpu":
        return
    device = torch.device(kind, torch.accelerator.current_device_index())
    left = set(map(id, ignored))
    for module in modules:
        put_on(device, [one for one in (*module.parameters(), *module.buffers()) if id(one) not in left])


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method of a wrapped module run as its forward. Does nothing with a module that is not wrapped.

    Raises:
        ValueError: the module has no such method, or it cannot run so.
    """
    if isinstance(module, FSDPModule):
        forward_methods.register_forward_method(module, method_name)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Do nothing: every root has streams of its own.

    Raises:
        ValueError: one of `modules` is not wrapped.
    """
    refuse_unwrapped(modules)
