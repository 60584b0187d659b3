"""Full parameters: lent to the user, gathered into a plain state dict, loaded from one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.errors import ShardingError
from fsdp.plan import TRANSPARENT
from fsdp.sharded import Sharded, units_in
from state_machine import Event


@contextmanager
def summon_full_params(model: nn.Module, writeback: bool = True) -> Iterator[None]:
    """Inside, the parameters of `model` are the full ones: same objects, full shapes, their own precision.

    With `writeback`, each rank keeps its part of what was changed inside. Memory: the whole model on
    every rank. `.grad` is set aside meanwhile. A forward under `torch.no_grad()` works and does not
    communicate. Communicates on entry: every rank must call it alike.

    Raises:
        IllegalTransition: inside a forward, a backward, or another summon.
    """
    lent: list[Sharded] = []
    kept = False
    try:
        for sharded in units_in(model, "summon_full_params"):
            sharded.hear(Event.SUMMONED)
            lent.append(sharded)
        yield
        kept = writeback
    finally:
        for sharded in lent:
            sharded.hear(Event.RETURNED if kept else Event.DISCARDED)


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers of the plain module, in full, on the CPU of every rank.

    Communicates, one unit at a time. Extra state of modules (`get_extra_state`) is not part of it.

    Raises:
        IllegalTransition: inside a forward, a backward, or a summon.
    """
    full: dict[int, Tensor] = {}
    for sharded in units_in(model, "full_state_dict"):
        sharded.hear(Event.SUMMONED)
        try:
            for place, parameter in sharded.unit.full_parameters():
                full[id(place.parameter)] = parameter.detach().to("cpu", copy=True)
        finally:
            sharded.hear(Event.DISCARDED)
    return {
        name: full[id(value)] if id(value) in full else value.detach().to("cpu", copy=True) for name, value in _entries(model)
    }


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Load a plain module's state dict, the same on every rank. Does not communicate.

    Raises:
        ShardingError: names are missing, unexpected, or of another shape. Nothing was loaded.
    """
    units = units_in(model, "load_full_state_dict")
    for sharded in units:
        if not sharded.engine.root.at_rest:
            raise ShardingError("load_full_state_dict: call it outside any forward, backward and summon_full_params.")
    entries = list(_entries(model))
    missing = [name for name, _ in entries if name not in state_dict]
    unexpected = sorted(set(state_dict) - {name for name, _ in entries})
    if missing or unexpected:
        raise ShardingError(
            f"load_full_state_dict: missing {missing or 'nothing'}, unexpected {unexpected or 'nothing'}; "
            "give the state dict of the same plain module."
        )
    flats = [flat for sharded in units for flat in sharded.unit.flats]
    shapes = {id(p): slot.shape for flat in flats for p, slot in zip(flat.shard_parameters, flat.layout.slots, strict=True)}
    for name, value in entries:
        wanted = shapes.get(id(value), tuple(value.shape))
        if tuple(state_dict[name].shape) != wanted:
            raise ShardingError(
                f"load_full_state_dict: {name!r} has shape {tuple(state_dict[name].shape)}, the model has {wanted}."
            )
    given = {id(value): state_dict[name] for name, value in entries}
    for flat in flats:
        for parameter, part in zip(flat.shard_parameters, flat.parts, strict=True):
            # through the parameter, so that autograd sees that it changed
            parameter.copy_(given[id(parameter)].reshape(-1)[part.first : part.first + part.numel].view(part.shape))
    for _, value in entries:
        if id(value) not in shapes:
            value.copy_(given[id(value)])


def _entries(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The names and tensors of the plain module's state dict, in its order; tied ones once a name."""
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = "".join(f"{part}." for part in path.split(".") if part and part not in TRANSPARENT)
        saved = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in (*module._parameters.items(), *saved.items()):
            if tensor is not None:
                yield prefix + name, tensor
