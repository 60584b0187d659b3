"""How an instance is made a unit of the engine: its arguments in the engine's words, its group, its precision, its buffers."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.api.wrap import fully_shard
from fsdp.autograd.pytree import modules_within
from fsdp.building.choose_units import is_bare_container
from fsdp.building.other_engines import refuse_other_engines
from fsdp.building.torch_policies import OF_FSDP1, OFFLOADS, refuse_unknown_fields
from fsdp.compat.fsdp1 import torch_names
from fsdp.compat.fsdp1.torch_names import HYBRID, CPUOffload, ShardingStrategy
from fsdp.compat.shared.dtype_and_device import change_precision
from fsdp.compat.shared.instances import drop_state_hooks, put_on
from fsdp.compat.shared.newer_peers import refuse_unknown_member
from fsdp.compat.shared.plain_group import shared_group
from fsdp.config import MixedPrecisionPolicy
from fsdp.device.streams import current_accelerator
from fsdp.errors import ShardingError
from fsdp.params.layout import ALIGNMENT
from fsdp.params.module_tree import IGNORED
from fsdp.params.shown_params import owning_unit
from fsdp.runtime.registry import UnitRef, unit_ref_of
from fsdp.state_dict.fqns import plain_fqn

PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


def instances_in(module: nn.Module) -> list[Any]:
    """The FullyShardedDataParallel instances in `module`, in the order of the modules."""
    return [one for one in module.modules() if hasattr(type(one), "optim_state_dict_to_load")]


def instance_of(module: nn.Module) -> nn.Module | None:
    """The module if it is an instance. Torch's functions for state dicts ask so, once the door is installed."""
    return module if any(one is module for one in instances_in(module)) else None


def kind_of(strategy: ShardingStrategy) -> str:
    """How ranks share the parameters. Instances of one root do so alike."""
    return strategy.name if strategy in (*HYBRID, ShardingStrategy.NO_SHARD) else "shard"


# arguments --------------------------------------------------------------------------------


def device_of(device_id: Any) -> torch.device | None:
    """The device of `device_id`. On a machine without accelerators any number is the host.

    Raises:
        TypeError: it is neither a number nor a device.
    """
    if device_id is None:
        return None
    if not torch.accelerator.is_available() and isinstance(device_id, int):
        return torch.device("cpu")
    device = torch.device(device_id)
    if device.type != "cpu" and device.index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
        warnings.warn(f"device_id={device_id!r} does not have an explicit index; {device} is used.", stacklevel=5)
    return device


def computing_device(given: torch.device | None, offload: CPUOffload, module: nn.Module, own: Sequence[Tensor]) -> torch.device:
    """Where an instance computes: on `device_id`, else on the accelerator if it offloads, else where its own parameters are."""
    inner = next((one.compute_device for one in instances_in(module)), torch.device("cpu"))
    here = next((one.device for one in own if not one.is_meta), inner)
    if given is None and offload.offload_params and here.type == "cpu":
        return current_accelerator() or here
    if given is None and here.type == "cpu" and own:
        warnings.warn(
            "The passed-in `module` is on CPU, where it computes and communicates. Move it to a device first, or give device_id, "
            "if there is one.",
            stacklevel=4,
        )
    return given or here


def move(module: nn.Module, device: torch.device, own: Sequence[Tensor]) -> None:
    """Move the parameters of an instance, and all buffers, to the device where it computes. Shards of inner ones stay.

    Raises:
        ValueError: its parameters are on another device than that, and not on the host.
    """
    others = {one.device for one in own if one.device.type not in ("cpu", "meta")} - {device}
    if others:
        raise ValueError(f"device_id is {device}, and the module has parameters on {others.pop()}; give one of them.")
    put_on(device, [*own, *module.buffers()])


def ignored_modules(module: nn.Module, modules: Any, states: Any) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """The modules and the parameters that `ignored_modules` and `ignored_states` leave alone.

    Raises:
        ValueError: both are given, something in them is of another type, or `states` mixes modules and parameters.
    """
    if modules is not None and states is not None:
        raise ValueError("Cannot pass both ignored_modules and ignored_states at the same time; give ignored_states alone.")
    given = list(modules if states is None else states) if (modules is not None or states is not None) else []
    allowed: tuple[type, ...] = (nn.Module,) if states is None else (nn.Parameter, nn.Module)
    if not any(all(isinstance(one, kind) for one in given) for kind in allowed):
        types = sorted({type(one) for one in given}, key=repr)
        raise ValueError(
            f"ignored_modules expects nn.Module list elements but got types {types}."
            if states is None
            else f"ignored_states expects all nn.Parameter or all nn.Module list elements but got types {types}."
        )
    named = [one for one in given if isinstance(one, nn.Module)]
    for one in named:
        if one in instances_in(one):
            raise ValueError("ignored_modules: an item is a FullyShardedDataParallel; leave it out.")
        if one is module:
            warnings.warn(
                "Trying to ignore the top-level module passed into the FSDP constructor itself will result in all parameters "
                "being ignored.",
                stacklevel=5,
            )
    left = {child for one in named for child in one.modules()}
    parameters = {one for one in given if isinstance(one, nn.Parameter)} | {p for one in left for p in one.parameters()}
    for inner in instances_in(module):
        left |= inner._ignored_modules
        parameters |= inner._ignored_params
    return left, parameters


def check_options(instance: Any) -> None:
    """Check the options of an instance that are torch's own objects.

    Raises:
        ShardingError: one of them asks for what a later version of torch has and this door does not know.
    """
    precision(instance)
    refuse_unknown_fields(instance.cpu_offload, OFFLOADS)
    refuse_unknown_member(instance.backward_prefetch, PREFETCHES)
    refuse_unknown_member(instance.sharding_strategy, STRATEGIES)


def check(module: nn.Module) -> None:
    """Warn of a module that has no forward, as FSDP1 does."""
    if is_bare_container(module):
        warnings.warn(
            f"FSDP will not all-gather parameters for containers that do not implement forward: wrap the members of "
            f"{type(module).__name__}.",
            stacklevel=5,
        )


def check_uniform(instance: Any) -> None:
    """Refuse a unit with trainable and frozen parameters, which one flat parameter of FSDP1 cannot hold.

    Raises:
        ValueError: `use_orig_params` is False, and the parameters of the unit differ in `requires_grad`.
    """
    module = instance._fsdp_wrapped_module
    inner = {id(p) for one in instances_in(module) for p in one.parameters()}
    kinds = {p.requires_grad for p in module.parameters() if id(p) not in inner}
    if len(kinds) > 1 and not instance._use_orig_params:
        raise ValueError(
            f"{type(module).__name__} has both parameters with requires_grad=True and False. FSDP does "
            "not support wrapping such modules when use_orig_params=False; wrap those that differ by themselves, or give "
            "use_orig_params=True."
        )


def wrap_children(module: nn.Module, policy: Any, instance: Any, arguments: dict[str, Any], cls: type[nn.Module]) -> None:
    """Wrap the modules inside `module` that a policy chooses.

    Raises:
        ValueError: one is wrapped already.
    """
    for name, one in module.named_modules():
        if isinstance(one, cls):
            raise ValueError(
                f"FSDP auto wrapping requires modules to not already have FSDP applied but found {name} in "
                f"{type(module).__name__}; wrap by hand or by policy, not both."
            )
    torch_names.auto_wrap(module, policy, instance._ignored_modules, instance._ignored_params, arguments, cls)
    # torch puts an instance in one place; without it in all places of a shared module, state dicts have parts under other names
    wrapped = {one._fsdp_wrapped_module: one for one in instances_in(module)}
    for outer in [one for one in module.modules() if one not in wrapped.values()]:
        for name, one in [*outer._modules.items()]:
            if one in wrapped:
                outer._modules[name] = wrapped[one]


def precision(instance: Any) -> MixedPrecisionPolicy:
    """The engine's policy for the `mixed_precision` of an instance."""
    given = instance.mixed_precision
    refuse_unknown_fields(given, OF_FSDP1)
    casts = given.cast_forward_inputs, given.cast_root_forward_inputs
    return MixedPrecisionPolicy(given.param_dtype, given.reduce_dtype, None, *casts)


# tensors on the meta device ---------------------------------------------------------------


@torch.no_grad()
def initialise(fn: Callable[[nn.Module], None], module: nn.Module) -> None:
    """Call FSDP1's `param_init_fn`, which gets a module on the meta device and gives it memory and values.

    The engine has given it memory already, and keeps the Parameter objects.
    """
    stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    real = [dict(store) for store in stores]
    for store in stores:
        for name, tensor in store.items():
            if tensor is not None:
                on_meta = torch.empty_like(tensor, device="meta")
                store[name] = nn.Parameter(on_meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else on_meta
    fn(module)
    made = [dict(store) for store in stores]
    for store, tensors in zip(stores, real, strict=True):
        store.update(tensors)
    pairs = [(kept[name], tensor) for kept, new in zip(real, made, strict=True) for name, tensor in new.items() if name in kept]
    given = [(kept, tensor) for kept, tensor in pairs if kept is not None and tensor is not None]
    if any(tensor.is_meta for _, tensor in given):
        fn(module)  # it sets values only
        return
    for kept, tensor in given:
        kept.copy_(tensor)


# units ------------------------------------------------------------------------------------


def shard(instance: Any, param_init_fn: Any, sync_module_states: bool) -> None:
    """Make the wrapped module of an instance a unit of the engine.

    Raises:
        ValueError: `param_init_fn` cannot be called.
    """
    if param_init_fn is not None and not callable(param_init_fn):
        raise ValueError(f"Expected param_init_fn to be callable, not {param_init_fn!r}.")
    check_uniform(instance)
    module = instance._fsdp_wrapped_module
    for one in instances_in(instance):
        if one._ranks_key != instance._ranks_key and IGNORED not in one._unit_module.__dict__:
            # a root over other ranks is driven by itself; it is called inside the forward of this one
            one._unit_module.__dict__[IGNORED] = True
    if all(p in instance._ignored_params for p in module.parameters()) and next(module.parameters(), None) is not None:
        return
    if _serves(unit_ref_of(module), instance):
        return
    strategy, mesh = instance.sharding_strategy, instance._mesh
    is_tensor_parallel = any(isinstance(p, torch_names.DTensor) for p in module.parameters() if p not in instance._ignored_params)
    if mesh is None and (is_tensor_parallel or torch_names.is_part(instance._device_mesh)):
        mesh = instance._device_mesh  # of an instance around this one parameters may be spread over the rest
    if is_tensor_parallel and instance.world_size == 1 and strategy is ShardingStrategy.NO_SHARD:
        strategy = ShardingStrategy.FULL_SHARD  # which cuts nothing over one rank, and knows DTensors
    if instance.mixed_precision.keep_low_precision_grads and is_tensor_parallel:
        raise ShardingError("keep_low_precision_grads=True: `.grad` of a DTensor has the dtype of the parameter; leave it out.")
    own = [p for p in module.parameters() if owning_unit(p) is None and p not in instance._ignored_params]
    keeps = strategy is ShardingStrategy._HYBRID_SHARD_ZERO2
    prefetches = instance.backward_prefetch is not None or instance.forward_prefetch
    fully_shard(
        module,
        None if mesh is not None else shared_group(instance.process_group),
        mesh=mesh,
        sharding_strategy="HYBRID_SHARD" if strategy in HYBRID else strategy.name,
        reshard_after_forward=False if keeps else None,
        mp_policy=precision(instance),
        sync_module_states=sync_module_states,
        offload_policy=instance.cpu_offload,
        param_init_fn=None if param_init_fn is None else partial(initialise, param_init_fn),
        ignored_modules=_outermost_ignored(instance),
        ignored_params=_ignored_params(instance),
        prefetch=1 if prefetches else 0,
        aligned=sum(p.nbytes for p in own) >= ALIGNMENT * instance.world_size,  # a few elements lie where FSDP1 puts them
        plain_shards=not is_tensor_parallel,
    )
    refuse_other_engines(instance, type(module).__name__)
    drop_state_hooks(instance._unit_ref.engine)
    instance.hook_low_precision_grads()


def _serves(ref: UnitRef | None, instance: Any) -> bool:
    """Whether a unit without parameters of its own, which an earlier wrapper made, does what another wrapper of it asks for."""
    return (
        ref is not None
        and not ref.unit.flats
        and ref.unit.config.mp_policy == precision(instance)
        and ref.unit.comm.size == instance.world_size
    )


def _outermost_ignored(instance: Any) -> list[nn.Module] | None:
    """The modules that the engine shall ignore, with all below them. One with a unit inside is not among them."""
    inside = [one for one in instance._fsdp_wrapped_module.modules() if one is not instance._fsdp_wrapped_module]
    ignored = [one for one in inside if one in instance._ignored_modules]
    found = [one for one in ignored if all(unit_ref_of(below) is None for below in one.modules())]
    return [one for one in found if not any(one is not other and one in set(other.modules()) for other in found)] or None


def _ignored_params(instance: Any) -> list[nn.Parameter] | None:
    """The parameters that the engine shall ignore. Those of an instance inside an ignored module stay sharded."""
    found = [p for p in instance._fsdp_wrapped_module.parameters() if p in instance._ignored_params]
    return [p for p in found if owning_unit(p) is None] or None


# buffers and inputs -----------------------------------------------------------------------


def set_precision(root: Any) -> None:
    """Give buffers their dtype; with FSDP_USE_FULL_PREC_IN_EVAL=1, let instances in evaluation mode leave mixed precision out."""
    if root._full_precision_in_eval:
        engine = root._unit_ref.engine
        policies = {}
        for one in instances_in(root):
            ref = one._unit_ref
            wanted = precision(one) if one.training else MixedPrecisionPolicy()
            if ref is not None and ref.engine is engine and ref.unit.config.mp_policy != wanted:
                policies[ref.index] = wanted
        if policies:
            drop_state_hooks(change_precision(engine, policies, "eval"))
    _cast_buffers(root, are_cast=root.training or not root._full_precision_in_eval)


def _cast_buffers(instance: Any, are_cast: bool) -> None:
    """Give the floating-point buffers of this instance and those inside it their `buffer_dtype`, or the dtype from before."""
    if instance._buffers_are_cast is are_cast:
        return
    instances = instances_in(instance)
    others = {id(one) for one in instances}
    paths = {id(module): path for path, module in instance.named_modules()}
    for one in instances:
        one.set_buffers_are_cast(are_cast)
        wanted = one.mixed_precision.buffer_dtype
        for module in modules_within(one, others) if wanted is not None else ():
            for name, buffer in module._buffers.items():
                if buffer is None or not buffer.is_floating_point() or module in one._ignored_modules:
                    continue
                key = plain_fqn(f"{paths[id(module)]}.{name}")
                if are_cast:
                    instance.remember_buffer(key, buffer.dtype)
                module._buffers[name] = buffer.to(wanted if are_cast else instance._buffer_dtypes.get(key, buffer.dtype))
