"""One model for the length of one public call: its units, communicators, parameters and names, each looked up once."""

from functools import cached_property

import torch
from torch import nn

from fsdp.errors import ShardingError
from fsdp.runtime.engine import Engine
from fsdp.runtime.registry import engines_of, resting_units_in
from fsdp.state_dict.fqns import entries, first_names
from fsdp.state_dict.param_shard import param_shards_in


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

    def refuse_sparse(self) -> None:
        """Check that all values of the state dict can be written to a file.

        Raises:
            ShardingError: one is a sparse tensor.
        """
        for name, tensor in self.entries:
            if id(tensor) not in self.param_shards and tensor.layout is not torch.strided:
                raise ShardingError(
                    f"{self.function_name}: {name!r} is a tensor of layout {tensor.layout}, which these files cannot hold; "
                    "keep its dense form, or leave it out of the state dict (register_buffer(..., persistent=False))."
                )

    @cached_property
    def engines(self) -> tuple[Engine, ...]:
        """The engines of the roots in the model.

        Raises:
            ShardingError: the model is only a part of a root.
        """
        return engines_of(self._refs, self.model, self.function_name)

    @cached_property
    def parameters(self) -> tuple[tuple[str, nn.Parameter], ...]:
        """Every parameter once, under its first name."""
        found = {id(tensor): (self.fqns[id(tensor)], tensor) for _, tensor in self.entries if isinstance(tensor, nn.Parameter)}
        return tuple(found.values())
