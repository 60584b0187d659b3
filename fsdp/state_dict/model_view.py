"""One model for the length of one public call: its units, communicators, parameters and names, each looked up once."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor, nn

from fsdp.errors import ShardingError, StateMismatch
from fsdp.runtime.engine import Engine
from fsdp.runtime.registry import engines_of, resting_units_in
from fsdp.shards.shard_tensor import plain
from fsdp.shards.sharded_value import ShardedValue
from fsdp.state_dict.fqns import entries, extra_states, first_names
from fsdp.state_dict.param_shard import param_shards_in

GIVES_SHARDS: Final = "_fsdp_gives_shards"
"""The attribute of modules whose `state_dict()` has a format of its own, see `giving_shards`."""


@contextmanager
def giving_shards(model: nn.Module) -> Iterator[None]:
    """While it runs, `state_dict()` of these modules gives sharded values, and communicates nothing."""
    others = [module for module in model.modules() if hasattr(type(module), GIVES_SHARDS)]
    for module in others:
        setattr(module, GIVES_SHARDS, True)
    try:
        yield
    finally:
        for module in others:
            setattr(module, GIVES_SHARDS, False)


class ModelView:
    """A model between two steps. Build a new one in every call: units, shards and names may differ in the next."""

    def __init__(self, model: nn.Module, function_name: str) -> None:
        """Raises:
        ShardingError: there is no unit; or a forward, a backward or a summon is going on; or a shard was replaced by a
            tensor that does not fit.
        """
        self.model = model
        self.function_name = function_name
        self._refs = resting_units_in(model, function_name)
        self.units = [ref.unit for ref in self._refs]
        self.world_comm = self._refs[0].engine.comms.joint
        """The communicator of all ranks that have a part of the model, in whichever dimension."""
        self.param_shards = param_shards_in(model)
        """The sharded parameters, by the id of the user's Parameter object."""
        self.entries = tuple(entries(model))
        """The names and tensors of the plain module's state dict. A tied tensor occurs once for each name."""
        self.fqns = first_names(model)
        """The first name of each tensor, by its id."""

    def state_dict(self) -> dict[str, Any]:
        """The model's `state_dict()`, in which values of shards share their memory, in whichever format the user gets it.

        By fairscale's names it holds full tensors, and communicates.
        """
        with giving_shards(self.model):
            state: dict[str, Any] = self.model.state_dict()
            return state

    def set_state(self, values: Mapping[str, Any], shown: Mapping[str, Any], strict: bool) -> None:
        """Take over `values`: those of `state_dict()`, which was `shown`, with other content, and extra state of modules.

        What is not the model's memory, because a hook of the user's or another format made it, the model loads by its
        `load_state_dict`, and then all.

        Raises:
            StateMismatch: with `strict`, `load_state_dict` takes other names than `state_dict()` gives, so that some were lost.
        """
        own, extra = dict(self.entries), extra_states(self.model)
        if any(name not in extra and not _is_memory_of(own.get(name), value) for name, value in values.items()):
            given = OrderedDict(values)
            given._metadata = getattr(shown, "_metadata", {})  # type: ignore[attr-defined]
            with giving_shards(self.model):
                found = self.model.load_state_dict(given, strict=False)
            if strict and found.unexpected_keys:
                raise StateMismatch(
                    f"{self.function_name}: hooks of the model give {', '.join(found.unexpected_keys)} in its state dict, which "
                    "its load_state_dict does not know, so that these values are lost. Set a hook for loads that takes them."
                )
            return
        for name in values.keys() & extra.keys():
            extra[name].set_extra_state(values[name])

    def refuse_sparse(self) -> None:
        """Raise ShardingError if a value of the state dict is a sparse tensor, which cannot be written to a file."""
        for name, tensor in self.entries:
            if id(tensor) not in self.param_shards and tensor.layout is not torch.strided:
                raise ShardingError(
                    f"{self.function_name}: {name!r} is a tensor of layout {tensor.layout}, which these files cannot hold; "
                    "keep its dense form, or leave it out of the state dict (register_buffer(..., persistent=False))."
                )

    @cached_property
    def engines(self) -> tuple[Engine, ...]:
        """The engines of the roots in the model. Raise ShardingError if the model is only a part of a root."""
        return engines_of(self._refs, self.model, self.function_name)

    @cached_property
    def parameters(self) -> tuple[tuple[str, nn.Parameter], ...]:
        """Every parameter once, under its first name."""
        found = {id(tensor): (self.fqns[id(tensor)], tensor) for _, tensor in self.entries if isinstance(tensor, nn.Parameter)}
        return tuple(found.values())


def _is_memory_of(tensor: Tensor | None, value: Any) -> bool:
    """Whether `value`, of a state dict, shares the memory of `tensor`, of the model."""
    if tensor is None or not isinstance(value, Tensor):
        return False
    one, other = value.local if isinstance(value, ShardedValue) else plain(value), plain(tensor)
    if (one.dtype, one.numel(), one.data_ptr()) != (other.dtype, other.numel(), other.data_ptr()):
        return False
    return isinstance(value, ShardedValue) or (one.shape, one.stride()) == (other.shape, other.stride())
