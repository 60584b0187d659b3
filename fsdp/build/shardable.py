"""What cannot be sharded: found before anything changes, so that every rank refuses and no module is left half sharded."""

import weakref
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fsdp.build.other_engines import other_engine
from fsdp.build.plan import Planned, buffers_of
from fsdp.comm.communicator import Communicator
from fsdp.config import Config
from fsdp.errors import ShardingError
from fsdp.params.module_params import owning_unit
from fsdp.params.param_info import ParamInfo

_PLAIN_FUNCTIONS: Final = (nn.Parameter.__torch_function__, torch.Tensor.__torch_function__)
_PLAIN_DISPATCH: Final = torch.Tensor.__torch_dispatch__
_SUB_BYTE: Final = tuple(f"torch.{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))
"""The names of dtypes that torch cannot copy."""


def check_shardable(plan: Sequence[Planned], config: Config) -> None:
    """Check the modules, parameters and buffers of the new units.

    Raises:
        ShardingError: one of them cannot be sharded, or another engine has wrapped it. The text names it.
    """
    for one in plan:
        if one.unit is not None:
            continue
        for module in one.own_modules:
            engine = other_engine(module)
            if engine is not None:
                raise ShardingError(
                    f"unit {one.name!r}: {engine} has wrapped its {type(module).__name__}, and reduces or shards by itself; wrap "
                    "the plain module instead."
                )
        places = {id(module): module for info in one.param_infos for module, _ in info.slots}
        for module in (*one.members, *places.values()):
            if isinstance(module, torch.jit.ScriptModule):
                raise ShardingError(
                    f"unit {one.name!r} contains a scripted {module.original_name}, whose parameters TorchScript keeps; wrap the "
                    "module that was scripted, or name it in ignored_modules."
                )
        for info in _not_sharded_yet(one):
            name, reason = info.names[0], _parameter_problem(info.parameter)
            if reason is None and config.dtensors and not info.parameter.dim():
                reason = "has no dimensions, and a DTensor is cut by rows; give it the shape (1,), or leave out dtensors."
            if reason is not None:
                raise ShardingError(f"parameter {name!r} {reason}")
    _check_shared_memory(plan)
    buffers = buffers_of(plan[0]) if config.sync_module_states or config.broadcast_buffers else []
    for name, tensor in [*buffers, *_new_parameters(plan)] if config.sync_module_states else buffers:
        reason = _broadcast_problem(tensor)
        if reason is not None:
            raise ShardingError(
                f"{name!r} {reason}, so it cannot be broadcast; make it a plain dense tensor, or leave out sync_module_states "
                "and broadcast_buffers."
            )


def check_devices(plan: Sequence[Planned], comm: Communicator) -> None:
    """Check that all parameters are on one device, which the group supports.

    Raises:
        ShardingError: they are not.
    """
    devices: dict[torch.device, str] = {}
    for info in (info for one in plan for info in one.param_infos if not info.parameter.is_meta):
        devices.setdefault(info.parameter.device, info.names[0])
    if len(devices) > 1:
        (a, first), (b, second) = list(devices.items())[:2]
        raise ShardingError(
            f"parameter {first!r} is on {a}, but {second!r} is on {b}; move the module to one device before wrapping it."
        )
    for device, name in devices.items():
        if not comm.supports_device(device):
            raise ShardingError(
                f"parameter {name!r} is on {device}, where this process group cannot communicate; "
                "move the module to the group's device before wrapping it."
            )


def device_of(plan: Sequence[Planned]) -> torch.device:
    """The device of the parameters. A parameter on the meta device has none yet."""
    found = (info.parameter.device for one in plan for info in one.param_infos if not info.parameter.is_meta)
    return next(found, torch.device("cpu"))


def _parameter_problem(parameter: Tensor) -> str | None:
    """Why a parameter cannot be sharded, as the end of a sentence that begins with its name; None if it can."""
    kind = type(parameter)
    if is_lazy(parameter):
        return "is not initialised yet; run one forward of the plain module before wrapping it."
    if _is_dtensor(parameter):
        return (
            "is a DTensor, which another engine or a parallel style has spread over ranks already; wrap the plain module, or "
            "name this one in ignored_modules."
        )
    if not _has_plain_operators(parameter):
        return (
            f"is a {kind.__name__}, a tensor class with operators of its own, as quantised weights are; its parts would be "
            "plain tensors. Convert it to a plain parameter, or name its module in ignored_modules."
        )
    if parameter.layout is not torch.strided:
        return f"has layout {parameter.layout}; make it dense, or name its module in ignored_modules."
    if parameter.is_quantized or str(parameter.dtype) in _SUB_BYTE:
        return (
            f"is {parameter.dtype}, whose elements cannot be copied one by one; convert it to a dtype of whole bytes, or name "
            "its module in ignored_modules."
        )
    if torch._debug_has_internal_overlap(parameter) == 1:
        return (
            "is an expanded tensor, of which several elements are one number in memory; give each its own: "
            "nn.Parameter(parameter.detach().clone())."
        )
    if _lacks_memory(parameter):
        return "has no memory, because something has released it; load or build the module anew."
    if parameter.is_meta and (weakref.getweakrefs(parameter) or parameter._use_count() > 2):  # type: ignore[attr-defined]
        return (
            "is on the meta device and in use by an autograd graph or a weak reference, so it cannot get memory; drop those "
            "first."
        )
    return _gradient_problem(parameter)


def _gradient_problem(parameter: Tensor) -> str | None:
    gradient = parameter.grad
    if gradient is None or (
        gradient.layout is torch.strided and _has_plain_operators(gradient) and gradient.device == parameter.device
    ):
        return None
    return (
        "has a gradient from before wrapping that cannot be cut, because it is sparse, of a class of its own or on another "
        "device; step the optimizer and set the gradient to None first."
    )


def _broadcast_problem(tensor: Tensor) -> str | None:
    """Why rank 0's values cannot be put into a buffer or parameter; None if they can."""
    if is_lazy(tensor):
        return "is not initialised yet"
    if not _has_plain_operators(tensor) or tensor.layout is not torch.strided or tensor.is_quantized:
        return f"is a {type(tensor).__name__} of layout {tensor.layout} and dtype {tensor.dtype}"
    if tensor.is_inference():
        return "was made in torch.inference_mode"
    if torch._debug_has_internal_overlap(tensor) == 1:
        return "is an expanded tensor, of which several elements are one number in memory"
    return None


def _is_dtensor(tensor: Tensor) -> bool:
    return any(f"{base.__module__}.".startswith("torch.distributed.tensor.") for base in type(tensor).__mro__)


def _has_plain_operators(tensor: Tensor) -> bool:
    kind = type(tensor)
    return kind.__torch_dispatch__ is _PLAIN_DISPATCH and kind.__torch_function__ in _PLAIN_FUNCTIONS


def _lacks_memory(parameter: Tensor) -> bool:
    if parameter.is_meta or not parameter.numel():
        return False
    spans = ((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return parameter.untyped_storage().size() < (parameter.storage_offset() + sum(spans) + 1) * parameter.element_size()


def _check_shared_memory(plan: Sequence[Planned]) -> None:
    """Check that parameters that are trained begin at places of their own. Two over one memory would be sharded apart.

    Raises:
        ShardingError: two Parameter objects share their memory.
    """
    first: dict[tuple[torch.device, int], tuple[str, bool]] = {}
    for name, parameter in _new_parameters(plan):
        if parameter.is_meta or not parameter.numel():
            continue
        other, trains = first.setdefault((parameter.device, parameter.data_ptr()), (name, parameter.requires_grad))
        if other != name and (trains or parameter.requires_grad):
            raise ShardingError(
                f"parameters {other!r} and {name!r} are two objects over the same memory, so that one changes with the other; "
                "tie them by assigning the same Parameter to both modules, or clone one."
            )


def _new_parameters(plan: Sequence[Planned]) -> Iterator[tuple[str, nn.Parameter]]:
    return ((info.names[0], info.parameter) for one in plan for info in _not_sharded_yet(one))


def _not_sharded_yet(planned: Planned) -> Iterator[ParamInfo]:
    """The parameters of a new unit, without those that come from another unit."""
    return (info for info in planned.param_infos if owning_unit(info.parameter) is None)
