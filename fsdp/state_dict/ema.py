"""A moving average of the weights of a sharded model, cut like its shards.

Rule 1: an update communicates nothing and is one foreach call, over one tensor for each flat buffer.
Rule 2: the average belongs to the units that the model had when it was made. After wrapping anew it is refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fsdp.errors import ShardingError
from fsdp.runtime.registry import resting_units_in
from fsdp.state_dict.fqns import check_names, entries, part_for
from fsdp.state_dict.model_view import ModelView
from fsdp.state_dict.param_shard import ParamShard, param_shards_in


class EMA:
    """An exponential moving average of the weights of a sharded model: average = decay * average + (1 - decay) * weight.

    It begins as the weights are now. Each rank averages its own shards. Frozen parameters, and parameters of ignored modules, are
    averaged as all others. Buffers, and parameters that are no floating-point numbers, are not averaged: `update` copies them.
    Does not communicate. Memory: the shards and the buffers once more, in `dtype`.

    Args:
        model: the sharded model.
        decay: the weight of the average in an update, from 0 to 1.
        dtype: the dtype of the averages of floating-point parameters, for example torch.float32 for weights in bf16. Default
            None: that of the shards.

    Raises:
        ShardingError: `model` contains no unit, or an argument has a wrong value.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, *, dtype: torch.dtype | None = None) -> None:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ShardingError(f"EMA: dtype must be a floating-point torch.dtype or None, not {dtype!r}.")
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay <= 1:
            raise ShardingError(f"EMA: decay must be a number from 0 to 1, not {decay!r}.")
        refs = resting_units_in(model, "EMA")
        self._model = model
        self.decay = decay
        self.updates = 0
        """How often `update` was called."""
        self._shown = False
        self._flats = [flat for ref in refs for flat in ref.unit.flats]
        self._sharded = {id(parameter) for ref in refs for parameter in ref.unit.sharded_params}
        """The ids of the parameters that are shards."""
        self._averages = [
            one.to(dtype if dtype is not None and one.is_floating_point() else one.dtype, copy=True) for one in self._weights()
        ]
        self._buffers = [buffer.clone() for buffer in model.buffers()]

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the weights, and copy the buffers. Call it after each step of the optimizer.

        Raises:
            ShardingError: inside a forward, a backward, a summon or `averaged_weights`; or the model was wrapped anew.
        """
        self._check("EMA.update")
        averages, weights = [], []
        for average, weight in zip(self._averages, self._weights(), strict=True):
            if average.is_floating_point() or average.is_complex():
                averages.append(average)
                weights.append(weight.to(average.dtype))  # a tensor of that dtype as it is
            else:
                average.copy_(weight)
        if averages:
            torch._foreach_lerp_(averages, weights, 1 - self.decay)
        for mine, value in zip(self._buffers, self._model.buffers(), strict=True):
            mine.copy_(value)
        self.updates += 1

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Let the model have the averages as its weights inside, and the buffers of the last update.

        Whatever reads or saves the model does so with the averages then: an evaluation, `full_state_dict`, `save`. The weights
        come back at the end, and changes that were made inside are dropped. Memory: the shards and buffers once more, inside.

        Raises:
            ShardingError: inside a forward, a backward, a summon or `averaged_weights`; or the model was wrapped anew.
        """
        self._check("EMA.averaged_weights")
        weights, buffers = [one.clone() for one in self._weights()], [buffer.clone() for buffer in self._model.buffers()]
        self._shown = True
        try:
            self._write(self._averages, self._buffers)
            yield
        finally:
            self._write(weights, buffers)
            self._shown = False

    def check_model(self, model_view: ModelView) -> None:
        """Raise ShardingError unless the average is one of this model, which has its own weights."""
        self._check(model_view.function_name)
        if not {id(flat) for unit in model_view.units for flat in unit.flats} >= {*map(id, self._flats)}:
            raise ShardingError(f"{model_view.function_name}: the EMA is of another model; give that of this one.")

    def state_dict(self) -> dict[str, object]:
        """Return the averages under the names of the model's `state_dict()`, as shards, and the number of updates.

        `fsdp.save` and `fsdp.load` take the EMA itself. torch's Distributed Checkpoint saves and loads this dict. Give what it
        has loaded to `load_state_dict`.
        """
        self._check("EMA.state_dict")
        return {"averages": self.averages(), "updates": self.updates}

    def averages(self) -> dict[str, Tensor]:
        """The averages and the copies of buffers under the names of the model's `state_dict()`, as shards that share memory."""
        return {
            name: average if shard is None else shard.placement.value(name, average) for name, shard, average in self._places()
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Load what `state_dict` returned: shards of a model sharded alike, or full tensors.

        Raises:
            ShardingError: names are missing or unexpected, or a value does not fit. Nothing was loaded.
        """
        operation = "EMA.load_state_dict"
        self._check(operation)
        places = list(self._places())
        check_names(operation, ["averages", "updates"], state_dict)
        updates, given = state_dict["updates"], state_dict["averages"]
        if not isinstance(updates, int) or not isinstance(given, Mapping):
            raise ShardingError(f"{operation}: this is not what EMA.state_dict returned.")
        check_names(operation, [name for name, _, _ in places], given)
        loaded = [(average, part_for(operation, name, given[name], shard, average)) for name, shard, average in places]
        for average, value in loaded:
            average.copy_(value)
        self.updates = updates

    # helpers ------------------------------------------------------------------------------

    def _check(self, function_name: str) -> None:
        """Check that the averages fit the model as it is now, and that it has its own weights."""
        refs = resting_units_in(self._model, function_name)
        if self._shown:
            raise ShardingError(f"{function_name}: the model has its averages as weights; leave averaged_weights first.")
        if [id(flat) for ref in refs for flat in ref.unit.flats] != [*map(id, self._flats)]:
            raise ShardingError(f"{function_name}: the model was wrapped anew since the average was made; make another EMA.")

    def _others(self) -> list[nn.Parameter]:
        """The parameters that are not sharded: those of ignored modules."""
        return [parameter for parameter in self._model.parameters() if id(parameter) not in self._sharded]

    def _weights(self) -> list[Tensor]:
        """The shard of each flat buffer, then the other parameters: what the averages are of, in their order."""
        for flat in self._flats:
            flat.check_shards("averaged")
        return [*(flat.shard for flat in self._flats), *(parameter.detach() for parameter in self._others())]

    def _places(self) -> Iterator[tuple[str, ParamShard | None, Tensor]]:
        """Each name of the model's state dict with the sharded parameter of that name, if it is one, and the average."""
        averages, param_shards = iter(self._averages), param_shards_in(self._model)
        places: dict[int, Tensor] = {}
        for flat, average in zip(self._flats, averages, strict=False):
            for i, parameter in enumerate(flat.sharded_params):
                places[id(parameter)] = flat.shard_view(i, average)
        others = (*self._others(), *self._model.buffers())
        places |= {id(tensor): one for tensor, one in zip(others, (*averages, *self._buffers), strict=True)}
        for name, tensor in entries(self._model):
            yield name, param_shards.get(id(tensor)), places[id(tensor)]

    @torch.no_grad()
    def _write(self, weights: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Overwrite the weights and buffers of the model."""
        count = len(self._flats)
        for flat, weight in zip(self._flats, weights[:count], strict=True):
            flat.load_shard(weight)
        targets = (*self._others(), *self._model.buffers())
        for target, value in zip(targets, (*weights[count:], *buffers), strict=True):
            target.copy_(value)
