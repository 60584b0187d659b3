"""The errors for what cannot be computed from this rank's part, with the remedy where it is called."""

from typing import NoReturn

import torch
from torch import Tensor

from fsdp.autograd.frames import stepping_optimizer
from fsdp.errors import ShardingError, StateMismatch
from fsdp.shards.cut import Shape
from fsdp.shards.info import ShardInfo


def refuse(operation: str, info: ShardInfo) -> NoReturn:
    """Raise the error for an operation that needs the full tensor."""
    optimizer = stepping_optimizer()
    if optimizer is not None:
        raise ShardingError(
            f"{optimizer}.step: {operation} on {info.describe()}: it needs the full tensor. Use an optimizer that computes each "
            "element of a parameter by itself, such as torch.optim.AdamW or SGD; docs/reference/optimizers.md lists them."
        )
    raise ShardingError(
        f"{operation} on {info.describe()}: it needs the full tensor. Use fsdp.full_tensor(tensor), or work inside "
        "fsdp.full_parameters(model) for a loss, inside fsdp.summon_full_params(model, writeback=True) for changes; for this "
        "rank's part alone, fsdp.to_local(tensor)."
    )


def refuse_memory(operation: str, info: ShardInfo) -> NoReturn:
    """Raise the error for a shard that shall be moved or shared, or become a parameter of its own."""
    raise ShardingError(
        f"{operation} on {info.describe()}: its unit keeps its memory, so it can be neither moved to another device nor shared, "
        "nor be a parameter of its own. Move the module before wrapping it, or call fsdp.offload(model); share what "
        "fsdp.full_state_dict(model) returns; for this rank's part alone, use fsdp.to_local(tensor)."
    )


def refuse_unreduced(operation: str, info: ShardInfo) -> NoReturn:
    """Raise the error for an operation that reads a gradient that is kept under `no_sync`."""
    raise ShardingError(
        f"{operation} on the gradient of {info.name!r}, which is kept under no_sync: it is not reduced, so each rank has another "
        "one. Step, clip, scale and read gradients after a backward that synchronises."
    )


def refuse_grad_dtype(name: str, dtype: torch.dtype) -> NoReturn:
    """Raise the error for a sharded parameter that shall have gradients of another dtype."""
    raise ShardingError(
        f"grad_dtype of {name!r}: its reduced gradient is {dtype}, like the parameter. Keep the parameter in the dtype of its "
        "gradient, and give mp_policy, which computes in the other one."
    )


def refuse_compiled(optimizer: str, cause: str) -> NoReturn:
    """Raise the error for an optimizer whose step is compiled: dynamo's own error names a method of the shard and no remedy."""
    raise ShardingError(
        f"{optimizer}.step: {cause}, and a compiled step does not know shards. Use an optimizer that computes each "
        "element of a parameter by itself, such as torch.optim.AdamW or SGD; docs/reference/optimizers.md lists them."
    )


def refuse_dcp(info: ShardInfo) -> NoReturn:
    """Raise the error for a shard that is given to torch's Distributed Checkpoint."""
    raise ShardingError(
        f"{info.describe()}, cannot be given to torch's Distributed Checkpoint by itself: give it model.state_dict(), "
        "optimizer.state_dict() after a step, or fsdp.full_tensor(tensor); or call fsdp.save(path, model, optimizer)."
    )


def check_fit(operation: str, name: str, given: object, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return `given`, which can be loaded into a tensor of `shape` and `dtype` without loss. Errors begin with `operation`.

    Raises:
        ShardingError: `given` is no tensor, or has another shape (StateMismatch), or a dtype that holds more than `dtype`.
    """
    if not isinstance(given, Tensor):
        raise ShardingError(f"{operation}: {name!r} is {type(given).__name__}, not a tensor.")
    if callable(getattr(given, "full_tensor", None)):
        raise ShardingError(f"{operation}: {name!r} is a {type(given).__name__}: give what its full_tensor() returns.")
    if tuple(given.shape) != shape:
        raise StateMismatch(f"{operation}: {name!r} has shape {tuple(given.shape)}, the model has {shape}.")
    if given.dtype != dtype and (_kind(given.dtype) != _kind(dtype) or _loses(given.dtype, dtype)):
        raise ShardingError(
            f"{operation}: {name!r} is {given.dtype}, the model has {dtype}, which would lose some of it; convert it first: "
            f".to({dtype})."
        )
    return given


def _loses(given: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether `dtype`, of the same kind, lacks digits or range of `given`. torch promotes no float8."""
    if torch.bool in (given, dtype):
        return given is not torch.bool
    if not any(_kind(dtype)):
        return torch.iinfo(dtype).min > torch.iinfo(given).min or torch.iinfo(dtype).max < torch.iinfo(given).max
    one, other = torch.finfo(given), torch.finfo(dtype)
    return other.eps > one.eps or other.max < one.max or other.tiny * other.eps > one.tiny * one.eps


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex
