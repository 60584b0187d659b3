"""How an instance is made a unit of the engine: checks of its options, its group, its buffers, parameters of other instances."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fsdp.api.wrap import fully_shard
from fsdp.autograd.pytree import modules_within
from fsdp.building.conversions import Conversion
from fsdp.building.other_engines import refuse_other_engines
from fsdp.building.shardable import check_renormalised
from fsdp.compat.fairscale.flat_params import SharedParam, record
from fsdp.compat.shared.dtype_and_device import changes
from fsdp.compat.shared.instances import check_factor, convert_from, divide_by, drop_state_hooks, put_on
from fsdp.compat.shared.plain_group import shared_group
from fsdp.config import MixedPrecisionPolicy, OffloadPolicy, ReductionPolicy
from fsdp.device.streams import current_accelerator
from fsdp.errors import ShardingError
from fsdp.params.module_tree import IGNORED
from fsdp.runtime.registry import unit_ref_of
from fsdp.state_dict.fqns import plain_fqn


def get_fsdp_instances(mod: nn.Module, skip_empty: bool = False) -> list[Any]:
    """The instances in `mod`, in the order of the modules; with `skip_empty` only those with parameters of their own."""
    found = [one for one in mod.modules() if hasattr(type(one), "local_metadata_dict")]
    return [one for one in found if one.params] if skip_empty else found


def check_options(instance: Any, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Refuse arguments that contradict each other or do not fit the parameters of `module`."""
    check_renormalised(((f"{name}.weight".lstrip("."), one) for name, one in module.named_modules()), instance.world_size)
    if instance.fp32_reduce_scatter and not instance.mixed_precision:
        raise ValueError("fp32_reduce_scatter=True needs mixed_precision=True; leave it out or set both.")
    if instance.move_params_to_cpu != instance.move_grads_to_cpu:
        raise ShardingError(
            f"move_params_to_cpu={instance.move_params_to_cpu} with move_grads_to_cpu={instance.move_grads_to_cpu}: parameters "
            "and their gradients must be on one device; leave move_grads_to_cpu out."
        )
    is_pure_fp16 = not instance.mixed_precision and instance.compute_dtype is torch.float16
    for parameter in parameters:
        wanted = torch.float16 if is_pure_fp16 else torch.float32
        if parameter.dtype is not wanted:
            raise ValueError(
                f"a parameter is {parameter.dtype}; with mixed_precision={instance.mixed_precision} and compute_dtype="
                f"{instance.compute_dtype} every parameter must be {wanted}: convert the module before wrapping it."
            )


@contextmanager
def put_back_if_refused(module: nn.Module, parameters: Sequence[nn.Parameter]) -> Generator[None, None, None]:
    """If the body raises, let `module` and these parameters of it be what they were before."""
    owners = [(owner, owner._parameters.copy()) for owner in module.modules() if type(owner._parameters) is dict]  # of no unit
    found = [(parameter, parameter.size(), dict(parameter.__dict__)) for parameter in parameters]
    try:
        yield
    except BaseException:
        for parameter, shape, attributes in found:
            if parameter.size() != shape:  # it has become a vector
                parameter.data = parameter.data[: shape.numel()].view(shape)
            parameter.__dict__.clear()
            parameter.__dict__.update(attributes)
        for owner, shown in owners:
            owner._parameters = shown
            for name, value in shown.items():
                owner.__dict__.pop(name, None)  # a view of a vector
                record(owner, name, value)
        raise


def computing_device(given: torch.device | None, offloads: bool, module: nn.Module, own: Sequence[Tensor]) -> torch.device:
    """Where an instance computes: as given, else on the accelerator if it offloads, else where its own parameters are."""
    inner = next((one.compute_device for one in get_fsdp_instances(module)), torch.device("cpu"))
    here = next((p.device for p in own), inner)
    if given is None and offloads and here.type == "cpu":
        return current_accelerator() or here
    return given or here


def move_units(instance: Any, fn: Conversion) -> None:
    """Move the shards of an instance and of those inside it, as `cuda()` asks for. The next forward refuses another dtype."""
    ref = unit_ref_of(instance.module)
    if ref is not None:
        # without the move `fn` changes nothing
        convert_from(ref, fn, lambda unit: changes(unit, fn) and not changes(unit, lambda one: fn(one).to(one.device)))


def shard(instance: Any) -> None:
    """Make the wrapped module a unit of the engine."""
    if instance.move_params_to_cpu:  # from the device that computes the engine offloads; inner shards stay
        put_on(instance.compute_device, [*instance.params, *instance.module.buffers()])
    inner = [one for one in get_fsdp_instances(instance) if one is not instance]
    group = shared_group(instance.process_group)
    foreign = [one for one in inner if shared_group(one.process_group) is not group]
    for one in foreign:
        # the root over other ranks is driven by itself; it is called inside the forward of this one
        one.module.__dict__[IGNORED] = True
        if one.world_size == 1:
            one.no_broadcast_optim_state = True
    reshard = None if instance.reshard_after_forward and instance.disable_reshard_on_root else instance.reshard_after_forward
    named = {id(p): plain_fqn(name) for name, p in instance.module.named_parameters()}
    alone = tuple(named[id(flat.parameter)] for flat in instance.module.flats if flat.has_own_name)
    fully_shard(
        instance.module,
        group,
        aligned=False,
        plain_shards=True,
        reshard_after_forward=reshard,
        offload_policy=OffloadPolicy() if instance.move_params_to_cpu else None,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=instance.compute_dtype if instance.mixed_precision else None,
            reduce_dtype=torch.float32 if instance.fp32_reduce_scatter else None,
            cast_forward_inputs=False,
        ),
        reduction=ReductionPolicy(
            bucket_cap_mb=instance.bucket_cap_mb if instance.bucket_cap_mb > 0 else None,
            # each ends a flat buffer, so that each parameter is cut by itself
            triggers=alone,
        ),
    )
    refuse_other_engines(instance, type(instance.module.module).__name__)
    drop_state_hooks(instance._unit_ref.engine)
    if instance._divide_factors is not None:
        divide_by("gradient_predivide_factor", instance._unit_ref, *instance._divide_factors)


def cast_buffers(instance: Any, dtype: torch.dtype | None = None) -> None:
    """Cast the floating-point buffers of this instance and those inside it; by default to their `buffer_dtype`, once."""
    if dtype is None and instance.buffers_are_cast:
        return
    instances = get_fsdp_instances(instance)
    others = {id(one) for one in instances}
    for one in instances:
        wanted = one.buffer_dtype if dtype is None or not one.mixed_precision else dtype
        one.buffers_are_cast = dtype is None
        for module in modules_within(one, others):
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point() and buffer.dtype is not wanted:
                    module._buffers[name] = buffer.to(wanted)


def divide_factors(world_size: int, predivide_factor: float | None = None) -> tuple[float, float]:
    """What gradients are divided by before and after the sum. Before it: given, or about the root of the number of ranks."""
    factor = 1.0 if predivide_factor is None else predivide_factor
    check_factor("gradient_predivide_factor", factor)
    while predivide_factor is None and world_size % factor == 0 and world_size / factor > factor:
        factor *= 2
    return factor, world_size / factor


def take_shared(module: nn.Module, dtype: torch.dtype, has_own: bool) -> list[SharedParam]:
    """Remove the parameters that belong to other instances from the modules that are in no inner instance.

    `has_own`: whether this instance has parameters of its own.

    Raises:
        ShardingError: it has none, or a parameter that is trained is tied to one that a flat instance has put into its vector.
    """
    inner = {id(one) for one in get_fsdp_instances(module)}
    found: dict[int, SharedParam] = {}
    for owner in () if id(module) in inner else modules_within(module, inner):
        for name, parameter in owner._parameters.items():
            is_lost = parameter is not None and hasattr(parameter, "_is_flattened") and parameter.requires_grad
            if is_lost or (hasattr(parameter, "_is_sharded") and not has_own):
                why = "a flat instance has put into its vector" if is_lost else "another instance has, and this one has no other"
                raise ShardingError(
                    f"{type(owner).__name__}.{name} is tied to a parameter that {why}. Wrap the module that contains both uses, "
                    "and not each by itself."
                )
            if parameter is not None and hasattr(parameter, "_is_sharded"):
                found.setdefault(id(parameter), SharedParam(parameter, dtype)).slots.append((owner, name))
    for owner, name in chain.from_iterable(shared.slots for shared in found.values()):
        del owner._parameters[name]
    return list(found.values())


def cast_inputs(args: Any, kwargs: Any, old: torch.dtype, new: torch.dtype, keeps_graph: bool) -> tuple[Any, Any]:
    """Cast the tensors of dtype `old` to `new`, in nested containers too. `keeps_graph`: with autograd."""

    def cast(thing: Any) -> Any:
        if not isinstance(thing, Tensor) or thing.dtype is not old:
            return thing
        made = thing.to(new)
        # without a graph the gradient of an input does not reach the input, and the backward still passes through the module
        return made if keeps_graph or not thing.is_leaf else made.requires_grad_(thing.requires_grad)

    with torch.set_grad_enabled(keeps_graph and torch.is_grad_enabled()):
        return tree_map(cast, args), tree_map(cast, kwargs)


def cast_floats_to_right_precision(to_fp16: bool, no_grad: bool, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Cast fp32 tensors to fp16, or fp16 tensors to fp32; return the positional and the named arguments."""
    dtypes = (torch.float32, torch.float16) if to_fp16 else (torch.float16, torch.float32)
    return cast_inputs(args, kwargs, *dtypes, keeps_graph=not no_grad)
