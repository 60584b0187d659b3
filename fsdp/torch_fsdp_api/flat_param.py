"""What code asks of FSDP1's `_handle` and `_flat_param`: the parameters of one instance, end to end. Nothing is stored here."""

from typing import Any

import torch
from torch import Tensor

from fsdp.params.unit import Unit
from fsdp.shards.shard_tensor import plain


class FlatParamView:
    """This rank's part of the parameters of one unit, as one vector. It is made anew by each read: changes of it are lost."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first parameter."""
        return self._unit.sharded_params[0].dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._unit.device

    @property
    def requires_grad(self) -> bool:
        """Whether any parameter is trainable."""
        return any(parameter.requires_grad for parameter in self._unit.sharded_params)

    @property
    def data(self) -> Tensor:
        """A copy of the values that this rank has; inside `summon_full_params` those of all ranks."""
        return torch.cat([plain(parameter.detach()).reshape(-1) for parameter in self._unit.sharded_params])

    @property
    def grad(self) -> Tensor | None:
        """A copy of the gradients that this rank has, with zeros for parameters without one; None if no parameter has one."""
        params = self._unit.sharded_params
        if all(parameter.grad is None for parameter in params):
            return None
        grads = [torch.zeros_like(plain(p.detach())) if p.grad is None else plain(p.grad) for p in params]
        return torch.cat([grad.reshape(-1) for grad in grads])

    @property
    def shape(self) -> torch.Size:
        """The shape of `data`."""
        return torch.Size([self.numel()])

    def numel(self) -> int:
        """The number of elements in `data`."""
        return sum(plain(parameter).numel() for parameter in self._unit.sharded_params)


class FlatParamHandle:
    """What `instance._handle` returns for an instance that has parameters."""

    def __init__(self, instance: Any, unit: Unit) -> None:
        self.flat_param = FlatParamView(unit)
        self.uses_sharded_strategy = instance.sharding_strategy.name != "NO_SHARD"
        """Whether ranks hold different parts."""

    @property
    def sharded_grad(self) -> Tensor | None:
        """The gradients that this rank has."""
        return self.flat_param.grad
