"""Arguments of DistributedDataParallel, checked and translated: devices of inputs, ignored parameters, other engines' options."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from fsdp.building.peer_options import refused_options, remedies_for
from fsdp.errors import ShardingError

IGNORED = "_ddp_params_and_buffers_to_ignore"
"""The attribute of a module with the names that DistributedDataParallel leaves alone. Users of torch set it."""

ABSENT: Final = {
    "reducer": "use fsdp.reducer_stats(model)",
    "logger": "use fsdp.story(model)",
    "scatter": "a forward moves its inputs",
    "to_kwargs": "a forward moves its inputs",
    "gather": "outputs stay where they are",
    "join_device": "use `with model.join():`",
    "join_process_group": "use `with model.join():`",
    "will_sync_module_buffers": "read model.broadcast_buffers",
}
"""Names of torch's class that belong to its own engine, and what to use instead."""


def input_device(module: nn.Module, device_ids: Sequence[Any] | None, output_device: Any) -> torch.device | None:
    """The device to which inputs are moved; None if they are not.

    Raises:
        ShardingError: the module is on the host or elsewhere, or there are several devices.
    """
    if not device_ids and output_device is None:
        return None
    given = [*(device_ids or ()), *(() if output_device is None else (output_device,))]
    kind = next((p.device.type for p in module.parameters()), "cpu")
    wanted = {torch.device(kind, one) if isinstance(one, int) else torch.device(one) for one in given}
    found = {p.device for p in module.parameters()}
    if kind == "cpu" or len(wanted) != 1 or wanted != found:
        raise ShardingError(
            f"device_ids={device_ids!r} with output_device={output_device!r}: one device is allowed, where the module is, "
            f"and None on the host; the parameters are on {', '.join(sorted(map(str, found)))}."
        )
    return wanted.pop()


def left_alone(module: nn.Module, broadcasts_buffers: bool) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """The modules all of whose parameters and buffers are ignored, and the other ignored parameters.

    The user has set their names on `module`.

    Raises:
        ShardingError: a name is none of the module's, or a buffer is ignored beside others, or while buffers are broadcast.
    """
    names = set(module.__dict__.get(IGNORED, ()))
    if broadcasts_buffers and (buffers := sorted(names & {name for name, _ in module.named_buffers(remove_duplicate=False)})):
        raise ShardingError(f"{buffers[0]!r} is ignored, and buffers are broadcast all together; give broadcast_buffers=False.")
    found: list[nn.Module] = []
    covered: set[str] = set()
    for prefix, one in module.named_modules():
        tensors = (*one.named_parameters(remove_duplicate=False), *one.named_buffers(remove_duplicate=False))
        below = {f"{prefix}.{name}" if prefix else name for name, _ in tensors}
        if below and below <= names and not below <= covered:
            found.append(one)
            covered |= below
    parameters = dict(module.named_parameters(remove_duplicate=False))
    rest = sorted(names - covered)
    for name in rest:
        if name not in parameters:
            raise ShardingError(
                f"{name!r} is ignored, and is no parameter; a buffer is ignored with all parameters and buffers of its module: "
                "put those into a module of their own."
            )
    return found, [parameters[name] for name in rest]


def check_hook(hook: Any) -> None:
    """Check a communication hook and its annotations, if it has any.

    Raises:
        TypeError: it cannot be called.
        ValueError: an annotation says that it takes no bucket, or returns no future of a tensor.
    """
    if not callable(hook):
        raise TypeError(f"Communication hook must be callable. It takes (state, bucket); this is {hook!r}.")
    try:
        signature = inspect.signature(hook)
    except ValueError:
        return  # compiled code says nothing
    bucket = signature.parameters.get("bucket")
    if bucket is not None and not _names(bucket.annotation, "GradBucket"):
        raise ValueError(f"Communication hook: bucket annotation should be dist.GradBucket. It is {bucket.annotation!r}.")
    if not _names(signature.return_annotation, "Future"):
        raise ValueError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]. It is "
            f"{signature.return_annotation!r}."
        )


def checked_hook(hook: Callable[..., Any]) -> Callable[[object, Any], Any]:
    """The hook, with torch's error if it returns no future."""

    def call(state: object, bucket: Any) -> Any:
        found = hook(state, bucket)
        if not isinstance(found, torch._C.Future):
            raise RuntimeError(f"callback must return a torch.futures.Future object, but got {type(found).__name__}.")
        return found

    return call


def _names(annotation: Any, name: str) -> bool:
    """Whether an annotation is a class of this name, in quotes or not. None is right, and so is one for anything."""
    return annotation in (inspect.Signature.empty, Any, object) or name in (
        annotation if isinstance(annotation, str) else repr(annotation)
    )


def refuse_other_options(given: Mapping[str, object], known: Collection[str]) -> None:
    """Drop options of other engines whose values mean what happens here anyway, and refuse all others.

    Raises:
        ShardingError: an option is not known here, or has another value.
    """
    refused = refused_options(given)
    if refused:
        raise ShardingError(
            f"DistributedDataParallel: {remedies_for(refused, known)}. Options of Apex are those of fsdp.compat.apex; "
            "fsdp.fully_shard has the other ones."
        )
