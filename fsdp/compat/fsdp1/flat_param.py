"""What code asks of FSDP1's flat parameters: `params`, `_handle` and `_flat_param` of an instance. Nothing is stored here."""

from typing import Any

import torch
from torch import Tensor, nn

from fsdp.compat.fsdp1.torch_names import ShardParamInfo
from fsdp.compat.fsdp2 import residence
from fsdp.compat.shared.instances import convert_from
from fsdp.params.placement import Placement
from fsdp.params.unit import Unit
from fsdp.runtime.registry import UnitRef, unit_ref_of
from fsdp.shards.shard_tensor import plain
from fsdp.state_dict.param_shard import ParamShard, param_shards_of


class FlatPart(nn.Parameter):
    """This rank's part of one parameter as a vector, which shares its memory and its gradient: an item of `instance.params`.

    Its names and ranges are those of a flat parameter of FSDP1 that holds this parameter alone.
    """

    _is_flat_param = True
    _parameter: nn.Parameter
    _placement: Placement
    _fqns: tuple[str, ...]
    """The name of the parameter in the instance."""
    _shapes: tuple[torch.Size, ...]
    """The shape of the full parameter."""
    _shard_param_infos: tuple[ShardParamInfo, ...]
    """The range of the full parameter, end to end, that this rank has."""

    def __new__(cls, name: str, param_shard: ParamShard) -> "FlatPart":
        """The vector of a sharded parameter with this name."""
        parameter, part = param_shard.parameter, param_shard.placement.part
        made: FlatPart = torch.Tensor._make_subclass(cls, plain(parameter).reshape(-1), parameter.requires_grad)
        made._parameter, made._placement = parameter, param_shard.placement
        made._fqns, made._shapes = (name,), (torch.Size(param_shard.shape),)
        here = ShardParamInfo(True, 0, part.numel, part.first, part.first + part.numel - 1)
        made._shard_param_infos = (here if part.numel else ShardParamInfo(False, None, None, None, None),)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A parameter with the same values, which belongs to no instance."""
        return nn.Parameter(self.detach().clone(), self.requires_grad)

    @property
    def grad(self) -> Tensor | None:
        """This rank's part of the gradient as a vector, which shares its memory."""
        gradient = self._parameter.grad
        return None if gradient is None or gradient.is_sparse else plain(gradient).reshape(-1)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        local = None if gradient is None else gradient.view(plain(self._parameter).shape)
        self._parameter.grad = None if local is None else self._placement.as_shard(local)


class FlatParamView:
    """This rank's part of the parameters of one unit, as one vector that is made anew by each read.

    A change of such a vector in place is lost. Assigning to `data` changes the parameters, and may change their dtype.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @property
    def _ref(self) -> UnitRef:
        ref = unit_ref_of(self._module)
        assert ref is not None, "the module of an instance with parameters is a unit"
        return ref

    @property
    def _unit(self) -> Unit:
        return self._ref.unit

    @property
    def _fqns(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return tuple(info.names[0] for info in self._unit.param_infos)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters; the smallest of those that can be trained, if there are several."""
        params = self._unit.sharded_params
        return min([p.dtype for p in params if p.requires_grad] or [params[0].dtype], key=lambda dtype: dtype.itemsize)

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
        """The values that this rank has; inside `summon_full_params` those of all ranks."""
        return torch.cat([plain(parameter.detach()).reshape(-1) for parameter in self._unit.sharded_params])

    @data.setter
    def data(self, values: Tensor) -> None:
        if values.shape != self.shape:
            raise ValueError(
                f"_flat_param.data: {tuple(values.shape)} elements for {tuple(self.shape)}; give as many as there are."
            )
        dtypes = {p.dtype for p in self._unit.sharded_params if p.is_floating_point()}
        if dtypes != {values.dtype}:
            own = self._unit
            convert_from(
                self._ref, lambda one: one.to(values.dtype) if one.is_floating_point() else one, lambda unit: unit is own
            )
        shards = list(param_shards_of(self._unit))
        sizes = [plain(one.parameter).numel() for one in shards]
        with torch.no_grad():
            for one, part in zip(shards, torch.split(values, sizes), strict=True):
                one.overwrite(part.view(plain(one.parameter).shape))

    @property
    def grad(self) -> Tensor | None:
        """The gradients that this rank has, with zeros for parameters without one; None if no parameter has one."""
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

    def __init__(self, instance: Any, module: nn.Module) -> None:
        self.flat_param = FlatParamView(module)
        self.uses_sharded_strategy = instance.sharding_strategy.name != "NO_SHARD"
        """Whether ranks hold different parts."""

    @property
    def sharded_grad(self) -> Tensor | None:
        """The gradients that this rank has."""
        return self.flat_param.grad

    def reshard(self, free_unsharded_flat_param: bool) -> None:
        """Free the gathered parameters of the instance. Does nothing while it computes."""
        if free_unsharded_flat_param:
            residence.reshard(self.flat_param._ref)

    def post_reshard(self) -> None:
        """Do nothing: `reshard` has freed what can be freed."""


class NoEvents:
    """Stands for the device, its events and the queue of them in which torch's `_reshard` notes a release of memory."""

    def Event(self) -> "NoEvents":
        return self

    def record(self) -> None:
        """Do nothing: the streams of the engine wait for each other."""

    def enqueue(self, event: "NoEvents") -> None:
        """Do nothing: see `record`."""
